//! Random documents, paths and bytes, compared with a tree model where one applies.

use document::json::is_json;
use document::subdoc::{self, Change, Path, SubdocError};
use proptest::prelude::*;
use serde_json::Value;

#[derive(Clone, Debug)]
enum Step {
    Key(String),
    Index(usize),
    Last,
}

fn key() -> impl Strategy<Value = String> {
    prop_oneof![4 => "[abc]", 1 => prop::sample::select(vec!["a.b", "c[0]", "`", "é", "x\"y", "\\", ""])
        .prop_map(str::to_owned)]
}

fn document() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        (-5i64..5).prop_map(Value::from),
        ".{0,12}".prop_map(Value::from),
    ];
    leaf.prop_recursive(5, 40, 5, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..5).prop_map(Value::from),
            prop::collection::vec((key(), inner), 0..5).prop_map(|pairs| pairs.into_iter().collect()),
        ]
    })
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step =
        prop_oneof![5 => key().prop_map(Step::Key), 3 => (0usize..4).prop_map(Step::Index), 1 => Just(Step::Last)];
    prop::collection::vec(step, 0..4)
}

/// Half of the paths lead to something.
fn document_and_steps() -> impl Strategy<Value = (Value, Vec<Step>)> {
    (document(), steps(), any::<bool>(), prop::collection::vec(any::<prop::sample::Index>(), 4)).prop_map(
        |(document, steps, follow, picks)| {
            if !follow {
                return (document, steps);
            }
            let mut path = Vec::new();
            let mut at = &document;
            for pick in picks {
                at = match at {
                    Value::Array(list) if !list.is_empty() => {
                        let index = pick.index(list.len());
                        path.push(if index + 1 == list.len() { Step::Last } else { Step::Index(index) });
                        &list[index]
                    }
                    Value::Object(members) if !members.is_empty() => {
                        let (key, value) = members.iter().nth(pick.index(members.len())).unwrap();
                        path.push(Step::Key(key.clone()));
                        value
                    }
                    _ => break,
                };
            }
            (document.clone(), path)
        },
    )
}

fn path_text(steps: &[Step]) -> String {
    let mut text = String::new();
    for step in steps {
        match step {
            Step::Key(key) => {
                let quoted = serde_json::to_string(key).unwrap();
                let raw = &quoted[1..quoted.len() - 1];
                if !text.is_empty() {
                    text.push('.');
                }
                text += &format!("`{}`", raw.replace('`', "``"));
            }
            Step::Index(index) => text += &format!("[{index}]"),
            Step::Last => text += "[-1]",
        }
    }
    text
}

/// The same document with other white space: the operations work on text, so it must not matter.
fn written(document: &Value, pretty: bool) -> Vec<u8> {
    if pretty { serde_json::to_vec_pretty(document).unwrap() } else { serde_json::to_vec(document).unwrap() }
}

fn follow<'a>(mut at: &'a mut Value, steps: &[Step]) -> Result<&'a mut Value, SubdocError> {
    for step in steps {
        at = match (step, at) {
            (Step::Key(key), Value::Object(members)) => members.get_mut(key),
            (Step::Index(index), Value::Array(list)) => list.get_mut(*index),
            (Step::Last, Value::Array(list)) => list.last_mut(),
            _ => return Err(SubdocError::PathMismatch),
        }
        .ok_or(SubdocError::PathNotFound)?;
    }
    Ok(at)
}

/// What `change` makes of a tree. Parents are never made.
fn model(document: &Value, steps: &[Step], change: Change, value: &Value) -> Result<Value, SubdocError> {
    use SubdocError::*;
    let mut new = document.clone();
    match change {
        Change::DictAdd | Change::DictUpsert => {
            let Some((Step::Key(key), parents)) = steps.split_last() else { return Err(PathInvalid) };
            let Value::Object(members) = follow(&mut new, parents)? else { return Err(PathMismatch) };
            if change == Change::DictAdd && members.contains_key(key) {
                return Err(PathExists);
            }
            members.insert(key.clone(), value.clone());
        }
        Change::Replace => {
            if steps.is_empty() {
                return Err(PathInvalid);
            }
            *follow(&mut new, steps)? = value.clone();
        }
        Change::Delete => {
            let (last, parents) = steps.split_last().ok_or(PathInvalid)?;
            follow(&mut new, steps)?;
            match (last, follow(&mut new, parents)?) {
                (Step::Key(key), Value::Object(members)) => drop(members.remove(key)),
                (Step::Index(index), Value::Array(list)) => drop(list.remove(*index)),
                (Step::Last, Value::Array(list)) => drop(list.pop()),
                _ => unreachable!("the path was followed"),
            }
        }
        Change::PushFirst | Change::PushLast => {
            let Value::Array(list) = follow(&mut new, steps)? else { return Err(PathMismatch) };
            list.insert(if change == Change::PushFirst { 0 } else { list.len() }, value.clone());
        }
        Change::Insert => {
            let Some((Step::Index(index), parents)) = steps.split_last() else { return Err(PathInvalid) };
            let Value::Array(list) = follow(&mut new, parents)? else { return Err(PathMismatch) };
            if *index > list.len() {
                return Err(PathNotFound);
            }
            list.insert(*index, value.clone());
        }
        Change::AddUnique => {
            if value.is_array() || value.is_object() {
                return Err(ValueCantInsert);
            }
            let Value::Array(list) = follow(&mut new, steps)? else { return Err(PathMismatch) };
            if list.iter().any(|element| element.is_array() || element.is_object()) {
                return Err(PathMismatch);
            }
            if list.contains(value) {
                return Err(PathExists);
            }
            list.push(value.clone());
        }
        Change::Counter => {
            let (last, parents) = steps.split_last().ok_or(PathInvalid)?;
            let delta = value.as_i64().filter(|delta| *delta != 0).ok_or(DeltaInvalid)?;
            match follow(&mut new, steps) {
                Ok(found) => {
                    let old = found.as_i64().ok_or(PathMismatch)?;
                    *found = Value::from(old.checked_add(delta).ok_or(ValueCantInsert)?);
                }
                Err(PathNotFound) => match (last, follow(&mut new, parents)?) {
                    (Step::Key(key), Value::Object(members)) => drop(members.insert(key.clone(), Value::from(delta))),
                    _ => return Err(PathNotFound),
                },
                Err(error) => return Err(error),
            }
        }
    }
    Ok(new)
}

fn any_change() -> impl Strategy<Value = Change> {
    prop::sample::select(vec![
        Change::DictAdd,
        Change::DictUpsert,
        Change::Delete,
        Change::Replace,
        Change::PushFirst,
        Change::PushLast,
        Change::Insert,
        Change::AddUnique,
        Change::Counter,
    ])
}

/// A spec as the wire has it, more often sound than not.
fn request_spec() -> impl Strategy<Value = Vec<u8>> {
    const VALUES: [&str; 7] = ["1", "\"x\"", "{\"a\":[1]}", "[]", "-9", "[{},1]", "no"];
    const MACROS: [&str; 4] =
        ["\"${Mutation.CAS}\"", "\"${Mutation.seqno}\"", "\"${Mutation.value_crc32c}\"", "\"${$document}\""];
    let op_and_flags = prop_oneof![
        8 => (Just(0xc8u8), prop::sample::select(vec![1u8, 5, 0x15, 0x15, 0x25])),
        2 => (Just(0xc7), prop::sample::select(vec![0, 1, 5, 0x15])),
        2 => (Just(0xc9), prop::sample::select(vec![0, 4])),
        1 => (Just(0xca), prop::sample::select(vec![0, 4, 0x14])),
        3 => (prop::sample::select(vec![0xcb, 0xcc]), prop::sample::select(vec![1, 5, 0x15])),
        1 => (Just(0xcd), prop::sample::select(vec![0, 4, 0x14])),
        1 => (prop::sample::select(vec![0xce, 0xcf]), prop::sample::select(vec![1, 5])),
        1 => (Just(0xd3), prop::sample::select(vec![4, 0x24])),
        1 => (prop::sample::select(vec![0xc5, 0xd2]), prop::sample::select(vec![0, 4])),
        1 => (any::<u8>(), any::<u8>()),
    ];
    let tail = prop_oneof![2 => Just(String::new()), 2 => "[ab]", 1 => steps().prop_map(|steps| path_text(&steps))];
    (op_and_flags, "[_]?[uv]", tail, 0..VALUES.len(), 0..MACROS.len()).prop_map(
        |((op, flags), key, tail, value_at, macro_at)| {
            let dot = if tail.is_empty() || tail.starts_with('[') { "" } else { "." };
            let path = match (flags & 4 != 0, tail.is_empty()) {
                (true, _) => format!("{key}{dot}{tail}"),
                (false, true) => key,
                (false, false) => tail,
            };
            let value = if flags & 0x10 != 0 { MACROS[macro_at] } else { VALUES[value_at] };
            let value = if matches!(op, 0xc9 | 0xd3) { "" } else { value };
            let reads = matches!(op, 0xc5 | 0xd2);
            let mut spec = vec![op, flags];
            spec.extend((path.len() as u16).to_be_bytes());
            if !reads {
                spec.extend((value.len() as u32).to_be_bytes());
            }
            spec.extend(path.as_bytes());
            if !reads {
                spec.extend(value.as_bytes());
            }
            spec
        },
    )
}

fn agree_on_json(bytes: &[u8]) -> Result<(), TestCaseError> {
    let theirs = std::str::from_utf8(bytes).is_ok() && serde_json::from_slice::<serde::de::IgnoredAny>(bytes).is_ok();
    prop_assert_eq!(is_json(bytes), theirs, "{:?}", String::from_utf8_lossy(bytes));
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn reading_finds_what_the_tree_has((document, steps) in document_and_steps(), pretty: bool) {
        let text = written(&document, pretty);
        let path_text = path_text(&steps);
        let path = Path::parse(path_text.as_bytes()).unwrap();
        let mut tree = document.clone();
        let expected = follow(&mut tree, &steps).map(|value| value.clone());
        let found = subdoc::get(&text, &path).map(|found| serde_json::from_slice::<Value>(found).unwrap());
        prop_assert_eq!(&found, &expected);
        prop_assert_eq!(subdoc::exists(&text, &path), expected.as_ref().map(drop).map_err(|e| *e));
        let count = expected.and_then(|value| match value {
            Value::Array(list) => Ok(list.len()),
            Value::Object(members) => Ok(members.len()),
            _ => Err(SubdocError::PathMismatch),
        });
        prop_assert_eq!(subdoc::count(&text, &path), count);
    }

    #[test]
    fn changing_does_what_the_tree_does(
        (document, steps) in document_and_steps(),
        change in any_change(),
        value in document(),
        small in -3i64..4,
        use_small: bool,
        pretty: bool,
    ) {
        let value = if use_small || change == Change::Counter { Value::from(small) } else { value };
        let text = written(&document, pretty);
        let path_text = path_text(&steps);
        let path = Path::parse(path_text.as_bytes()).unwrap();
        let edit = subdoc::plan(&text, &path, change, &serde_json::to_vec(&value).unwrap(), false);
        let made = edit.map(|edit| {
            let mut new = text.clone();
            edit.apply(&mut new);
            serde_json::from_slice::<Value>(&new).unwrap()
        });
        prop_assert_eq!(made, model(&document, &steps, change, &value), "{}", path_text);
    }

    #[test]
    fn made_parents_lead_to_the_value(
        (document, steps) in document_and_steps(),
        keys in prop::collection::vec(key(), 1..4),
        value in document(),
    ) {
        let steps: Vec<Step> = steps.into_iter().chain(keys.into_iter().map(Step::Key)).collect();
        let path_text = path_text(&steps);
        let path = Path::parse(path_text.as_bytes()).unwrap();
        let mut text = written(&document, false);
        let value_text = serde_json::to_vec(&value).unwrap();
        if let Ok(edit) = subdoc::plan(&text, &path, Change::DictUpsert, &value_text, true) {
            edit.apply(&mut text);
            prop_assert!(is_json(&text));
            prop_assert_eq!(subdoc::get(&text, &path), Ok(&value_text[..]));
        }
    }

    #[test]
    fn json_is_what_serde_takes_for_json(mut bytes in document().prop_map(|d| written(&d, false)),
                                         at: prop::sample::Index, with: u8, how in 0u8..4) {
        agree_on_json(&bytes)?;
        let at = at.index(bytes.len());
        match how {
            0 => bytes[at] = with,
            1 => bytes.insert(at, with),
            2 => drop(bytes.remove(at)),
            _ => bytes.truncate(at),
        }
        agree_on_json(&bytes)?;
    }

    #[test]
    fn json_is_what_serde_takes_for_json_in_near_json(text in "[\\[\\]{},:\"\\\\0-9eE.+\\-truefalsn \u{e9}/bu\t\n]{0,24}") {
        agree_on_json(text.as_bytes())?;
    }

    #[test]
    fn numbers_and_strings_are_read_as_serde_reads_them(
        number in "-?[0-9]{0,3}(\\.[0-9]{0,2})?([eE][+-]?[0-9]{0,2})?",
        string in "\"([a-z]|\\\\[\"\\\\/bfnrtux0-9a-f]|\\\\u[0-9a-fg]{4}|\u{e9}|\u{1f600}|\u{1}){0,20}\"",
        raw in prop::collection::vec(any::<u8>(), 0..20),
    ) {
        agree_on_json(number.as_bytes())?;
        agree_on_json(string.as_bytes())?;
        agree_on_json(&[b"\"", &raw[..], b"\""].concat())?;
    }

    #[test]
    fn random_requests_on_real_documents_keep_every_promise(
        document in document(),
        xattrs in prop::collection::vec(("[_]?[uvw]", document()), 0..3),
        empty in prop::bool::weighted(0.2),
        choice in prop::sample::select(vec![0u8, 1, 5, 5, 3, 2, 0xff]),
        doc_flags in prop::sample::select(vec![0u8, 0, 0, 0, 0, 1, 1, 2, 4, 5, 0x14, 0x0e]),
        mut specs in prop::collection::vec(request_spec(), 1..5),
    ) {
        let mut all = document::xattr::Xattrs::default();
        for (key, value) in xattrs {
            all.set(key.as_bytes(), written(&value, false));
        }
        let section = if choice & 1 == 0 || all.is_empty() { Vec::new() } else { all.to_section() };
        let choice = if section.is_empty() { choice & !1 } else { choice };
        let body = serde_json::json!({ "a": document, "u": {} });
        let body = if empty { Vec::new() } else { written(&body, true) };
        let value = [section, body].concat();
        specs.sort_by_key(|spec| spec[1] & 4 == 0);
        let mut data = vec![choice, doc_flags];
        data.extend((value.len() as u16).to_be_bytes());
        data.extend(value);
        data.extend(specs.concat());
        document::fuzz_subdoc(&data);
    }

    #[test]
    fn random_bytes_never_panic(data in prop::collection::vec(any::<u8>(), 0..200)) {
        document::fuzz_subdoc(&data);
        document::fuzz_json(&data);
        document::fuzz_xattr(&data);
        let _ = Path::parse(&data);
        let _ = document::snappy::inflate(&data, 1 << 16);
        let half = data.len() / 2;
        if let Ok(path) = Path::parse(&data[..half.min(8)]) {
            let _ = subdoc::get(&data[half..], &path);
        }
    }
}
