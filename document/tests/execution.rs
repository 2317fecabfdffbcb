//! Whole commands on whole documents: xattrs beside bodies, tombstones, virtual attributes, macros.

use document::subdoc::{
    self, DocError, DocFlags, DocView, Existence, Facts, LookupSpec, MutateError, Mutation, MutationSpec, Op,
    PathFlags, SubdocError,
};
use document::{value_crc32c, xattr};
use types::{Cas, Datatype, RevSeqno, Seqno, VbUuid};

use PathFlags as F;
use SubdocError::*;

const NONE: DocFlags = DocFlags::NONE;
const MACRO: PathFlags = F::XATTR.with(F::EXPAND_MACROS).with(F::MKDIR_P);
const BYTES: PathFlags = F::XATTR.with(F::BINARY);

/// A document and what it takes to show it.
struct Doc {
    value: Vec<u8>,
    datatype: Datatype,
    existence: Existence,
    facts: Facts,
}

impl Doc {
    fn new(existence: Existence, xattrs: &[(&str, &str)], body: &str) -> Doc {
        let mut all = xattr::Xattrs::default();
        for (key, value) in xattrs {
            all.set(key.as_bytes(), value.as_bytes().to_vec());
        }
        let mut datatype = Datatype::RAW;
        if !xattrs.is_empty() {
            datatype = datatype.with(Datatype::XATTR);
        }
        if document::json::is_json(body.as_bytes()) {
            datatype = datatype.with(Datatype::JSON);
        }
        let facts = Facts {
            cas: Cas(0x1234_5678_9abc_def0),
            vbucket_uuid: VbUuid(0xaabb),
            seqno: Seqno(42),
            rev: RevSeqno(7),
            expiry: 99,
            flags: 0x0200_0006,
            stored_datatype: datatype,
            last_modified_s: Some(1_700_000_000),
            hlc_now_s: 1_700_000_001,
            hlc_logical: false,
            shows_system_xattrs: true,
        };
        Doc { value: [all.to_section(), body.into()].concat(), datatype, existence, facts }
    }

    fn live(xattrs: &[(&str, &str)], body: &str) -> Doc {
        Doc::new(Existence::Live, xattrs, body)
    }

    fn missing() -> Doc {
        Doc::new(Existence::Missing, &[], "")
    }

    fn dead(xattrs: &[(&str, &str)]) -> Doc {
        Doc::new(Existence::Tombstone, xattrs, "")
    }

    fn view(&self) -> DocView<'_> {
        DocView { value: &self.value, datatype: self.datatype, existence: self.existence, facts: self.facts }
    }

    fn read(&self, op: Op, flags: PathFlags, path: &str) -> Result<String, SubdocError> {
        let spec = LookupSpec { op, flags, path: path.as_bytes() };
        let answer = subdoc::lookup(&self.view(), &[spec]).unwrap().remove(0);
        answer.map(|bytes| String::from_utf8(bytes.into_owned()).unwrap())
    }

    fn xattr(&self, path: &str) -> Result<String, SubdocError> {
        self.read(Op::Get, F::XATTR, path)
    }

    fn mutate(&self, specs: &[MutationSpec<'_>], flags: DocFlags) -> Result<Mutation, MutateError> {
        subdoc::mutate(&self.view(), specs, flags)
    }

    fn error(&self, specs: &[MutationSpec<'_>], flags: DocFlags) -> MutateError {
        self.mutate(specs, flags).unwrap_err()
    }
}

fn spec<'a>(op: Op, flags: PathFlags, path: &'a str, value: &'a str) -> MutationSpec<'a> {
    MutationSpec { op, flags, path: path.as_bytes(), value: value.as_bytes() }
}

fn upsert<'a>(path: &'a str, value: &'a str) -> MutationSpec<'a> {
    spec(Op::DictUpsert, F::NONE, path, value)
}

fn upsert_xattr<'a>(path: &'a str, value: &'a str) -> MutationSpec<'a> {
    spec(Op::DictUpsert, F::XATTR, path, value)
}

/// Xattrs as "key=value key=value", and the body.
fn shown(mutation: &Mutation) -> (String, String) {
    let (section, body) = xattr::split(&mutation.value, mutation.datatype).unwrap();
    if !section.is_empty() {
        xattr::validate(&mutation.value).unwrap();
    }
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    let pairs: Vec<String> = xattr::pairs(section)
        .map(|pair| pair.map(|(key, value)| format!("{}={}", text(key), text(value))).unwrap())
        .collect();
    (pairs.join(" "), text(body))
}

fn failed(index: u8, error: SubdocError) -> MutateError {
    MutateError::Spec { index, error }
}

#[test]
fn one_lookup_fails_alone() {
    let doc = Doc::live(&[("_sync", "{\"r\":1}"), ("u", "[1,2]")], "{\"a\":{\"b\":[1,2,3]}}");
    let specs = [
        (Op::Get, F::XATTR, "_sync.r", Ok("1")),
        (Op::Get, F::XATTR, "_sync", Ok("{\"r\":1}")),
        (Op::Get, F::XATTR, "u[-1]", Ok("2")),
        (Op::GetCount, F::XATTR, "u", Ok("2")),
        (Op::Exists, F::XATTR, "_sync.x", Err(PathNotFound)),
        (Op::Get, F::XATTR, "none", Err(PathNotFound)),
        (Op::Get, F::XATTR, "none.x", Err(PathNotFound)),
        (Op::Get, F::XATTR, "u.x", Err(PathMismatch)),
        (Op::Get, F::XATTR, "u.", Err(PathInvalid)),
        (Op::Get, F::NONE, "a.b[1]", Ok("2")),
        (Op::Exists, F::NONE, "a.b", Ok("")),
        (Op::Exists, F::NONE, "x", Err(PathNotFound)),
        (Op::GetCount, F::NONE, "", Ok("1")),
        (Op::GetCount, F::NONE, "a.b", Ok("3")),
        (Op::Get, F::NONE, "a[0]", Err(PathMismatch)),
        (Op::GetDoc, F::NONE, "", Ok("{\"a\":{\"b\":[1,2,3]}}")),
    ];
    let asked: Vec<LookupSpec<'_>> =
        specs.iter().map(|&(op, flags, path, _)| LookupSpec { op, flags, path: path.as_bytes() }).collect();
    let answers = subdoc::lookup(&doc.view(), &asked).unwrap();
    for (answer, (op, _, path, expected)) in answers.iter().zip(specs) {
        let answer = answer.as_ref().map(|bytes| std::str::from_utf8(bytes).unwrap()).map_err(|e| *e);
        assert_eq!(answer, expected, "{op:?} {path}");
    }
}

#[test]
fn a_body_that_is_not_json_still_has_xattrs() {
    let doc = Doc::live(&[("u", "1")], "raw bytes");
    assert_eq!(doc.read(Op::Get, F::NONE, "a"), Err(DocNotJson));
    assert_eq!(doc.read(Op::GetCount, F::NONE, ""), Err(DocNotJson));
    assert_eq!(doc.read(Op::GetDoc, F::NONE, ""), Ok("raw bytes".to_owned()));
    assert_eq!(doc.xattr("u"), Ok("1".to_owned()));
    assert_eq!(doc.error(&[upsert("a", "1")], NONE), failed(0, DocNotJson));
    let changed = doc.mutate(&[upsert_xattr("u", "2")], NONE).unwrap();
    assert_eq!(shown(&changed), ("u=2".to_owned(), "raw bytes".to_owned()));
    assert_eq!(changed.datatype, Datatype::XATTR);
    assert_eq!(Doc::live(&[("u", "1")], "").read(Op::GetDoc, F::NONE, ""), Err(PathNotFound));
}

#[test]
fn the_document_tells_about_itself() {
    let doc = Doc::live(&[("_s", "1"), ("u", "2")], "{}");
    let crc = format!("\"{:#010x}\"", value_crc32c(b"{}"));
    for (path, expected) in [
        ("$document.CAS", "\"0x123456789abcdef0\""),
        ("$document.vbucket_uuid", "\"0x000000000000aabb\""),
        ("$document.seqno", "\"0x000000000000002a\""),
        ("$document.revid", "\"7\""),
        ("$document.exptime", "99"),
        ("$document.flags", "33554438"),
        ("$document.value_bytes", "2"),
        ("$document.datatype", "[\"json\",\"xattr\"]"),
        ("$document.datatype[1]", "\"xattr\""),
        ("$document.deleted", "false"),
        ("$document.last_modified", "\"1700000000\""),
        ("$document.value_crc32c", &crc),
        ("$vbucket.HLC", "{\"now\":\"1700000001\",\"mode\":\"real\"}"),
        ("$vbucket.HLC.mode", "\"real\""),
        ("$XTOC", "[\"_s\",\"u\"]"),
    ] {
        assert_eq!(doc.xattr(path).as_deref(), Ok(expected), "{path}");
    }
    let whole: serde_json::Value = serde_json::from_str(&doc.xattr("$document").unwrap()).unwrap();
    assert_eq!(whole.as_object().unwrap().len(), 11);
    assert_eq!(doc.xattr("$document.nope"), Err(PathNotFound));
    assert_eq!(doc.xattr("$nope"), Err(XattrUnknownVattr));
    assert_eq!(doc.error(&[upsert_xattr("$document.CAS", "1")], NONE), failed(0, XattrCantModifyVattr));
    assert_eq!(Doc::dead(&[]).xattr("$document.deleted").as_deref(), Ok("true"));
    assert_eq!(Doc::live(&[], "raw").xattr("$document.datatype").as_deref(), Ok("[\"raw\"]"));
    let mut discreet = Doc::live(&[("_s", "1"), ("u", "2")], "{}");
    discreet.facts.shows_system_xattrs = false;
    assert_eq!(discreet.xattr("$XTOC").as_deref(), Ok("[\"u\"]"));
}

#[test]
fn specs_apply_in_order_and_all_or_none() {
    let doc = Doc::live(&[("u", " {\"k\": 1} ")], "{ \"a\": 1 }");
    let made = doc
        .mutate(
            &[
                upsert_xattr("u.n", "2"),
                spec(Op::Counter, F::XATTR, "u.k", "5"),
                upsert("b", "{}"),
                upsert("b.c", "[]"),
                spec(Op::PushLast, F::NONE, "b.c", "1,2"),
                spec(Op::Counter, F::NONE, "a", "-3"),
            ],
            NONE,
        )
        .unwrap();
    let body = "{ \"a\": -2,\"b\":{\"c\":[1,2]} }";
    assert_eq!(shown(&made), ("u={\"k\": 6,\"n\":2}".to_owned(), body.to_owned()));
    assert_eq!(made.results, [(1, b"6".to_vec()), (5, b"-2".to_vec())]);
    assert_eq!(made.datatype, Datatype::JSON | Datatype::XATTR);
    assert!(!made.deleted && !made.created);
    assert_eq!(made.sizes.user_bytes + made.sizes.system_bytes, made.value.len());
    let fails = [upsert("b", "1"), spec(Op::Delete, F::NONE, "x", ""), upsert("c", "1")];
    assert_eq!(doc.error(&fails, NONE), failed(1, PathNotFound));
}

#[test]
fn editing_xattrs_leaves_the_body_alone_and_the_other_way_round() {
    let doc = Doc::live(&[("a", "1"), ("_b", " [ ] ")], " {} ");
    let gone = doc.mutate(&[spec(Op::Delete, F::XATTR, "a", "")], NONE).unwrap();
    assert_eq!(shown(&gone), ("_b= [ ] ".to_owned(), " {} ".to_owned()));
    let body = doc.mutate(&[upsert("x", "1")], NONE).unwrap();
    assert_eq!(shown(&body), ("a=1 _b= [ ] ".to_owned(), " {\"x\":1} ".to_owned()));
    let none = Doc::live(&[("a", "1")], "{}").mutate(&[spec(Op::Delete, F::XATTR, "a", "")], NONE).unwrap();
    assert_eq!((none.value.as_slice(), none.datatype), (&b"{}"[..], Datatype::JSON));
    assert_eq!(doc.error(&[upsert_xattr("new.x", "1")], NONE), failed(0, PathNotFound));
    let made = doc.mutate(&[spec(Op::DictAdd, F::XATTR.with(F::MKDIR_P), "new.x", "1")], NONE).unwrap();
    assert_eq!(shown(&made).0, "a=1 _b= [ ]  new={\"x\":1}");
    assert_eq!(doc.error(&[upsert_xattr("new", "nope")], NONE), failed(0, ValueCantInsert));
    assert_eq!(doc.error(&[spec(Op::DictAdd, F::XATTR, "a", "2")], NONE), failed(0, PathExists));
}

#[test]
fn whether_a_document_may_be_created_is_decided_by_flags_and_what_is_there() {
    use DocError::*;
    use Existence::*;
    use subdoc::Start::*;
    let (k, n, a) = (DocFlags::MKDOC, DocFlags::ADD, DocFlags::ACCESS_DELETED);
    let (c, v) = (DocFlags::CREATE_AS_DELETED, DocFlags::REVIVE);
    for (flags, missing, live, tombstone, tombstone_with_xattrs) in [
        (NONE, Err(NotFound), Ok(Edit), Err(NotFound), Err(NotFound)),
        (k, Ok(Create), Ok(Edit), Ok(Create), Ok(Create)),
        (n, Ok(Create), Err(Exists), Ok(Create), Ok(Create)),
        (a, Err(NotFound), Ok(Edit), Ok(Edit), Ok(Edit)),
        (k.with(a), Ok(Create), Ok(Edit), Ok(Edit), Ok(Edit)),
        (n.with(a).with(c), Ok(Create), Err(Exists), Ok(Create), Err(Exists)),
        (a.with(v), Err(NotFound), Err(CanOnlyReviveDeleted), Ok(Edit), Ok(Edit)),
    ] {
        let decide = |existence, xattrs| subdoc::start(flags, existence, xattrs);
        assert_eq!(decide(Missing, false), missing, "{flags:?}");
        assert_eq!(decide(Live, true), live, "{flags:?}");
        assert_eq!(decide(Tombstone, false), tombstone, "{flags:?}");
        assert_eq!(decide(Tombstone, true), tombstone_with_xattrs, "{flags:?}");
    }
    assert!(subdoc::may_look_up(a, Tombstone) && !subdoc::may_look_up(NONE, Tombstone));
    assert!(subdoc::may_look_up(NONE, Live) && !subdoc::may_look_up(a, Missing));
    assert_eq!(Doc::missing().error(&[upsert("a", "1")], NONE), MutateError::Doc(NotFound));
}

#[test]
fn a_new_document_gets_the_root_its_first_path_needs() {
    let k = DocFlags::MKDOC;
    for (specs, body) in [
        (vec![upsert("a.b", "1")], "{\"a\":{\"b\":1}}"),
        (vec![spec(Op::PushLast, F::NONE, "", "1")], "[1]"),
        (vec![spec(Op::PushFirst, F::NONE, "x", "1")], "{\"x\":[1]}"),
        (vec![spec(Op::Insert, F::NONE, "[0]", "1")], "[1]"),
        (vec![upsert_xattr("u", "1"), spec(Op::AddUnique, F::NONE, "", "1")], "[1]"),
        (vec![upsert_xattr("u.x", "1")], "{}"),
        (vec![spec(Op::SetDoc, F::NONE, "", "raw")], "raw"),
    ] {
        let made = Doc::missing().mutate(&specs, k).unwrap();
        assert!(made.created && !made.deleted);
        assert_eq!(shown(&made).1, body);
        assert_eq!(made.datatype.has(Datatype::JSON), body != "raw");
    }
    let over = Doc::dead(&[("_old", "1")]).mutate(&[upsert("a", "1")], DocFlags::ADD).unwrap();
    assert_eq!((shown(&over).0, over.created), (String::new(), true), "nothing of the tombstone is left");
}

#[test]
fn tombstones_have_xattrs_and_no_body() {
    let a = DocFlags::ACCESS_DELETED;
    let staged = DocFlags::ADD.with(a).with(DocFlags::CREATE_AS_DELETED);
    let made = Doc::missing().mutate(&[upsert_xattr("txn.id", "\"t\"")], staged).unwrap();
    assert!(made.deleted && made.created);
    assert_eq!(shown(&made), ("txn={\"id\":\"t\"}".to_owned(), String::new()));
    assert_eq!(made.datatype, Datatype::XATTR);
    let no_body = MutateError::Doc(DocError::DeletedCantHaveValue);
    assert_eq!(Doc::missing().error(&[upsert_xattr("t", "1"), upsert("a", "1")], staged), no_body);

    let dead = Doc::dead(&[("txn", "{\"doc\":{\"a\":1}}")]);
    let edited = dead.mutate(&[upsert_xattr("txn.id", "1")], a).unwrap();
    assert!(edited.deleted && !edited.created);
    assert_eq!(dead.error(&[upsert("a", "1")], a), no_body);
    let commit = [spec(Op::ReplaceBodyWithXattr, F::XATTR, "txn.doc", ""), spec(Op::Delete, F::XATTR, "txn", "")];
    assert_eq!(dead.error(&commit, a), no_body);
    let revived = dead.mutate(&commit, a.with(DocFlags::REVIVE)).unwrap();
    assert!(!revived.deleted);
    assert_eq!((revived.value.as_slice(), revived.datatype), (&b"{\"a\":1}"[..], Datatype::JSON));
}

#[test]
fn deleting_a_document_keeps_system_xattrs_only() {
    let doc = Doc::live(&[("u", "1"), ("_s", "2")], "{}");
    let delete = spec(Op::DeleteDoc, F::NONE, "", "");
    let made = doc.mutate(&[upsert_xattr("_t", "3"), upsert_xattr("w", "4"), delete], NONE).unwrap();
    assert!(made.deleted);
    assert_eq!(shown(&made), ("_s=2 _t=3".to_owned(), String::new()));
    assert_eq!(made.datatype, Datatype::XATTR);
    let bare = Doc::live(&[("u", "1")], "{}").mutate(&[delete], NONE).unwrap();
    assert!(bare.deleted && bare.value.is_empty());
    assert_eq!(bare.datatype, Datatype::RAW);
    assert_eq!(Doc::dead(&[]).error(&[delete], DocFlags::ACCESS_DELETED), failed(0, PathNotFound));
}

#[test]
fn a_body_can_come_out_of_an_xattr() {
    let doc = Doc::live(&[("t", "{\"s\":{\"new\":1}}")], "{\"old\":1}");
    let replace = |path| spec(Op::ReplaceBodyWithXattr, F::XATTR, path, "");
    let made = doc.mutate(&[replace("t.s"), upsert("more", "2")], NONE).unwrap();
    assert_eq!(shown(&made).1, "{\"new\":1,\"more\":2}");
    assert_eq!(doc.error(&[replace("t.x")], NONE), failed(0, PathNotFound));
    assert_eq!(doc.error(&[replace("x")], NONE), failed(0, PathNotFound));
}

#[test]
fn binary_xattrs_travel_as_base64() {
    let doc = Doc::live(&[], "{}");
    let made = doc.mutate(&[spec(Op::DictUpsert, BYTES, "b", "\u{1}raw")], NONE).unwrap();
    assert_eq!(shown(&made).0, "b=\"cb-content-base64-encoded:AXJhdw==\"");
    let stored = Doc::live(&[("b", "\"cb-content-base64-encoded:AXJhdw==\""), ("j", "1"), ("s", "\"x\"")], "{}");
    assert_eq!(stored.read(Op::Get, BYTES, "b").as_deref(), Ok("\u{1}raw"));
    assert_eq!(stored.read(Op::Get, BYTES, "j"), Err(FieldNotBinary));
    assert_eq!(stored.read(Op::Get, BYTES, "s"), Err(FieldNotBinary));
    assert_eq!(stored.xattr("b").as_deref(), Ok("\"cb-content-base64-encoded:AXJhdw==\""));
    let body = stored.mutate(&[spec(Op::ReplaceBodyWithXattr, BYTES, "b", "")], NONE).unwrap();
    assert_eq!((shown(&body).1.as_str(), body.datatype), ("\u{1}raw", Datatype::XATTR));
    assert_eq!(stored.error(&[spec(Op::ReplaceBodyWithXattr, BYTES, "j", "")], NONE), failed(0, FieldNotBinary));
}

fn sequenced(mut mutation: Mutation) -> (String, String) {
    mutation.patch(Cas(0x0102_0304_0506_0708), Seqno(0x2a));
    shown(&mutation)
}

#[test]
fn macros_are_filled_in_when_the_write_is_sequenced() {
    let doc = Doc::live(&[("_s", "{}")], "{}");
    let specs = [
        spec(Op::DictUpsert, MACRO, "_s.cas", "\"${Mutation.CAS}\""),
        spec(Op::DictUpsert, MACRO, "_s.seqno", "\"${Mutation.seqno}\""),
        spec(Op::DictUpsert, MACRO, "_s.crc", "\"${Mutation.value_crc32c}\""),
        spec(Op::PushLast, MACRO, "u.list", "\"${Mutation.seqno}\""),
        upsert("a", "1"),
    ];
    let made = doc.mutate(&specs, NONE).unwrap();
    assert_eq!(made.patches.len(), 3, "the checksum is known at once");
    let crc = value_crc32c(b"{\"a\":1}");
    let seqno = "\"0x000000000000002a\"";
    let system = format!("_s={{\"cas\":\"0x0807060504030201\",\"seqno\":{seqno},\"crc\":\"{crc:#010x}\"}}");
    assert_eq!(sequenced(made), (format!("{system} u={{\"list\":[{seqno}]}}"), "{\"a\":1}".to_owned()));
}

#[test]
fn gaps_follow_their_text_through_later_specs() {
    let doc = Doc::live(&[("a", "[]"), ("b", "1")], "{}");
    let seqno = "\"${Mutation.seqno}\"";
    let filled = "\"0x000000000000002a\"";
    let specs = [
        spec(Op::PushLast, MACRO, "a", seqno),
        spec(Op::PushLast, MACRO, "a", "\"${Mutation.CAS}\""),
        spec(Op::PushFirst, F::XATTR, "a", "\"something in front\""),
        spec(Op::Delete, F::XATTR, "a[-1]", ""),
        upsert_xattr("b", "\"longer than it was\""),
        spec(Op::DictAdd, MACRO, "c", seqno),
        spec(Op::Delete, F::XATTR, "c", ""),
        spec(Op::DictAdd, MACRO, "d", seqno),
        upsert_xattr("d", "7"),
    ];
    let made = doc.mutate(&specs, NONE).unwrap();
    assert_eq!(made.patches.len(), 1);
    assert_eq!(sequenced(made).0, format!("a=[\"something in front\",{filled}] b=\"longer than it was\" d=7"));
}

#[test]
fn a_gap_moves_into_the_body_with_its_xattr_and_the_checksum_waits_for_it() {
    let doc = Doc::live(&[], "{}");
    let specs = [
        spec(Op::DictAdd, MACRO, "t.n", "\"${Mutation.seqno}\""),
        spec(Op::DictAdd, MACRO, "crc", "\"${Mutation.value_crc32c}\""),
        spec(Op::ReplaceBodyWithXattr, F::XATTR, "t", ""),
        upsert("z", "1"),
    ];
    let body = "{\"n\":\"0x000000000000002a\",\"z\":1}";
    let (xattrs, made) = sequenced(doc.mutate(&specs, NONE).unwrap());
    assert_eq!(made, body);
    assert!(xattrs.ends_with(&format!("crc=\"{:#010x}\"", value_crc32c(body.as_bytes()))), "{xattrs}");
}

#[test]
fn macros_can_quote_the_document_as_it_was() {
    let doc = Doc::live(&[], "{}");
    let add = |value| spec(Op::DictAdd, MACRO, "x", value);
    let made = |value| doc.mutate(&[add(value)], NONE).map(|made| shown(&made).0);
    assert_eq!(made("\"${$document.CAS}\"").as_deref(), Ok("x=\"0x123456789abcdef0\""));
    assert_eq!(made("\"${$document.exptime}\"").as_deref(), Ok("x=99"));
    assert!(made("\"${$document}\"").unwrap().starts_with("x={\"CAS\":"));
    assert_eq!(made("\"${$document.nope}\""), Err(failed(0, XattrUnknownVattrMacro)));
    assert_eq!(made("\"${$nope}\""), Err(failed(0, XattrUnknownVattrMacro)));
    for unknown in ["\"${Mutation.nope}\"", "\"text\"", "1", "\"${Mutation.CAS\"", "\"$\""] {
        assert_eq!(made(unknown), Err(failed(0, XattrUnknownMacro)), "{unknown}");
    }
}
