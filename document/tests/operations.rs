//! Every operation and every way it fails, on one JSON text at a time.

use document::subdoc::{self, Change, Path, SubdocError};

use Change::{AddUnique, Counter, Delete, DictAdd, DictUpsert, Insert, PushFirst, PushLast, Replace};
use SubdocError::*;

const P: bool = true;
const NO: bool = false;

fn change(document: &str, change: Change, path: &str, value: &str, parents: bool) -> Result<String, SubdocError> {
    let path = Path::parse(path.as_bytes())?;
    let edit = subdoc::plan(document.as_bytes(), &path, change, value.as_bytes(), parents)?;
    let mut text = document.as_bytes().to_vec();
    edit.apply(&mut text);
    assert!(change == Delete || edit.value_offset < edit.text.len());
    assert!(document::json::is_json(&text), "{}", String::from_utf8_lossy(&text));
    Ok(String::from_utf8(text).unwrap())
}

/// Document, change, path, value, whether parents are made, outcome.
type Row = (&'static str, Change, &'static str, &'static str, bool, Result<&'static str, SubdocError>);

fn check(table: &[Row]) {
    for &(document, op, path, value, parents, expected) in table {
        let made = change(document, op, path, value, parents);
        assert_eq!(made.as_deref().map_err(|e| *e), expected, "{op:?} {path:?} {value:?} on {document}");
    }
}

fn get<'a>(document: &'a str, path: &str) -> Result<&'a str, SubdocError> {
    let found = subdoc::get(document.as_bytes(), &Path::parse(path.as_bytes())?)?;
    Ok(std::str::from_utf8(found).unwrap())
}

fn nested(levels: usize, inner: &str) -> String {
    "[".repeat(levels) + inner + &"]".repeat(levels)
}

#[test]
fn get_finds_the_raw_text_of_a_value() {
    let document = " { \"a\" : [ 1 , {\"b\":\"x\"} , [] ] , \"c.d\":null, \"e\\\"f\":2.50, \"\": {} } ";
    for (path, expected) in [
        ("a", Ok("[ 1 , {\"b\":\"x\"} , [] ]")),
        ("a[0]", Ok("1")),
        ("a[1].b", Ok("\"x\"")),
        ("a[-1]", Ok("[]")),
        ("a[-1][-1]", Err(PathNotFound)),
        ("a[3]", Err(PathNotFound)),
        ("a.b", Err(PathMismatch)),
        ("a[0].x", Err(PathMismatch)),
        ("a[0][0]", Err(PathMismatch)),
        ("[0]", Err(PathMismatch)),
        ("[-1]", Err(PathMismatch)),
        ("`c.d`", Ok("null")),
        ("c", Err(PathNotFound)),
        ("e\\\"f", Ok("2.50")),
        ("``", Ok("{}")),
        ("a..b", Err(PathInvalid)),
    ] {
        assert_eq!(get(document, path), expected, "{path}");
    }
    assert_eq!(get("[[1,2],[3]]", "[1][0]"), Ok("3"));
    assert_eq!(get("5", "a"), Err(PathMismatch));
    assert_eq!(get("", "a"), Err(DocNotJson));
    assert_eq!(get("{\"a\" 1}", "a"), Err(DocNotJson));
    assert_eq!(get("{\"b\":nope,\"a\":1}", "a"), Err(DocNotJson));
    assert_eq!(get("{\"a\":1,\"a\":2}", "a"), Ok("1"));
}

#[test]
fn counting_needs_a_container() {
    let count = |document: &str, path: &str| subdoc::count(document.as_bytes(), &Path::parse(path.as_bytes()).unwrap());
    let document = "{\"a\":[1,[2,3],{}],\"n\":7}";
    assert_eq!(count(document, ""), Ok(2));
    assert_eq!(count(document, "a"), Ok(3));
    assert_eq!(count(document, "a[2]"), Ok(0));
    assert_eq!(count(document, "n"), Err(PathMismatch));
    assert_eq!(count(document, "x"), Err(PathNotFound));
    assert_eq!(count("7", ""), Err(PathMismatch));
}

#[test]
fn members_are_added_and_replaced() {
    check(&[
        ("{}", DictAdd, "a", "1", NO, Ok("{\"a\":1}")),
        ("{ }", DictAdd, "a", " 1 ", NO, Ok("{\"a\":1 }")),
        ("{ \"a\":1 }", DictAdd, "b", "[2]", NO, Ok("{ \"a\":1,\"b\":[2] }")),
        ("{\"a\":1}", DictAdd, "a", "2", NO, Err(PathExists)),
        ("{\"a\":1}", DictUpsert, "a", "2", NO, Ok("{\"a\":2}")),
        ("{\"a\":{}}", DictUpsert, "a.b", "2", NO, Ok("{\"a\":{\"b\":2}}")),
        ("{}", DictUpsert, "a.b", "2", NO, Err(PathNotFound)),
        ("{}", DictUpsert, "a.b.c", "2", P, Ok("{\"a\":{\"b\":{\"c\":2}}}")),
        ("{\"x\":[{}]}", DictAdd, "x[0].`b.c`.d", "2", P, Ok("{\"x\":[{\"b.c\":{\"d\":2}}]}")),
        ("{}", DictAdd, "a[0].b", "2", P, Err(PathNotFound)),
        ("{\"a\":[]}", DictAdd, "a[0].b", "2", P, Err(PathNotFound)),
        ("{\"a\":[1]}", DictUpsert, "a[0]", "2", NO, Err(PathInvalid)),
        ("{\"a\":[1]}", DictUpsert, "a.b", "2", P, Err(PathMismatch)),
        ("[]", DictUpsert, "a", "2", P, Err(PathMismatch)),
        ("{}", DictUpsert, "a", "nope", NO, Err(ValueCantInsert)),
        ("{}", DictUpsert, "a", "1,2", NO, Err(ValueCantInsert)),
        ("{}", DictUpsert, "a", "1}", NO, Err(ValueCantInsert)),
        ("{}", DictUpsert, "a", " ", NO, Err(ValueCantInsert)),
        ("{}", DictUpsert, "a", "1,\"b\":2", NO, Err(ValueCantInsert)),
        ("{}", DictUpsert, "", "1", NO, Err(PathInvalid)),
        ("{", DictUpsert, "a", "1", NO, Err(DocNotJson)),
    ]);
}

#[test]
fn deleting_takes_one_comma_along() {
    check(&[
        ("{\"a\":1}", Delete, "a", "", NO, Ok("{}")),
        ("{ \"a\" : 1 , \"b\":2}", Delete, "a", "", NO, Ok("{ \"b\":2}")),
        ("{\"a\":1 , \"b\":2 }", Delete, "b", "", NO, Ok("{\"a\":1 }")),
        ("{\"a\":1,\"b\":2,\"c\":3}", Delete, "b", "", NO, Ok("{\"a\":1,\"c\":3}")),
        ("[1,2,3]", Delete, "[0]", "", NO, Ok("[2,3]")),
        ("[1,2,3]", Delete, "[-1]", "", NO, Ok("[1,2]")),
        ("[ 1 ]", Delete, "[-1]", "", NO, Ok("[  ]")),
        ("[]", Delete, "[-1]", "", NO, Err(PathNotFound)),
        ("[1]", Delete, "[1]", "", NO, Err(PathNotFound)),
        ("{}", Delete, "a", "", NO, Err(PathNotFound)),
        ("{\"a\":1}", Delete, "a.b", "", NO, Err(PathMismatch)),
        ("{}", Delete, "", "", NO, Err(PathInvalid)),
    ]);
}

#[test]
fn replacing_needs_something_to_replace() {
    check(&[
        ("{\"a\": 1 }", Replace, "a", "{\"x\":[]}", NO, Ok("{\"a\": {\"x\":[]} }")),
        ("[1,2]", Replace, "[-1]", "null", NO, Ok("[1,null]")),
        ("{}", Replace, "a", "1", NO, Err(PathNotFound)),
        ("[]", Replace, "[0]", "1", NO, Err(PathNotFound)),
        ("{\"a\":1}", Replace, "a", "x", NO, Err(ValueCantInsert)),
        ("{\"a\":1}", Replace, "a", "1,2", NO, Err(ValueCantInsert)),
        ("{\"a\":1}", Replace, "", "1", NO, Err(PathInvalid)),
    ]);
}

#[test]
fn arrays_grow_at_both_ends_and_inside() {
    check(&[
        ("[]", PushLast, "", "1", NO, Ok("[1]")),
        ("[ 1 ]", PushLast, "", "2 , [3]", NO, Ok("[ 1,2 , [3] ]")),
        ("[ 1 ]", PushFirst, "", "2,3", NO, Ok("[ 2,3,1 ]")),
        ("[]", PushFirst, "", "2,3", NO, Ok("[2,3]")),
        ("{\"a\":[[]]}", PushLast, "a[0]", "1", NO, Ok("{\"a\":[[1]]}")),
        ("{\"a\":{}}", PushLast, "a", "1", P, Err(PathMismatch)),
        ("{}", PushLast, "", "1", P, Err(PathMismatch)),
        ("{}", PushLast, "a", "1", NO, Err(PathNotFound)),
        ("{}", PushLast, "a", "1,2", P, Ok("{\"a\":[1,2]}")),
        ("{\"z\":0}", PushFirst, "a.b", "1", P, Ok("{\"z\":0,\"a\":{\"b\":[1]}}")),
        ("[]", PushFirst, "[0]", "1", P, Err(PathNotFound)),
        ("{}", PushFirst, "a[0]", "1", P, Err(PathNotFound)),
        ("[]", PushLast, "", "1,", NO, Err(ValueCantInsert)),
        ("[]", PushLast, "", "", NO, Err(ValueCantInsert)),
        ("[1]", PushLast, "", "2]", NO, Err(ValueCantInsert)),
        ("[1,2]", Insert, "[0]", "0", NO, Ok("[0,1,2]")),
        ("[1,2]", Insert, "[1]", "0,0", NO, Ok("[1,0,0,2]")),
        ("[1,2]", Insert, "[2]", "3", NO, Ok("[1,2,3]")),
        ("[]", Insert, "[0]", "3", NO, Ok("[3]")),
        ("[1,2]", Insert, "[3]", "3", NO, Err(PathNotFound)),
        ("[1,2]", Insert, "[-1]", "3", NO, Err(PathInvalid)),
        ("[1,2]", Insert, "a", "3", NO, Err(PathInvalid)),
        ("{\"a\":{}}", Insert, "a[0]", "3", NO, Err(PathMismatch)),
        ("{}", Insert, "a[0]", "3", P, Err(PathNotFound)),
        ("[1]", Insert, "[1][0]", "3", P, Err(PathNotFound)),
        ("[1]", Insert, "[0]", "x", NO, Err(ValueCantInsert)),
    ]);
}

#[test]
fn unique_elements_are_primitives_compared_as_text() {
    check(&[
        ("[]", AddUnique, "", "1", NO, Ok("[1]")),
        ("[1,\"1\",null]", AddUnique, "", "1.0", NO, Ok("[1,\"1\",null,1.0]")),
        ("[1]", AddUnique, "", " 1 ", NO, Err(PathExists)),
        ("[12]", AddUnique, "", "1", NO, Ok("[12,1]")),
        ("[1]", AddUnique, "", "12", NO, Ok("[1,12]")),
        ("[\"a\"]", AddUnique, "", "\"a\"", NO, Err(PathExists)),
        ("[true]", AddUnique, "", "{}", NO, Err(ValueCantInsert)),
        ("[true]", AddUnique, "", "1,2", NO, Err(ValueCantInsert)),
        ("[1,[]]", AddUnique, "", "1", NO, Err(PathMismatch)),
        ("{\"a\":1}", AddUnique, "a", "1", NO, Err(PathMismatch)),
        ("{}", AddUnique, "a", "1", NO, Err(PathNotFound)),
        ("{}", AddUnique, "a.b", "1", P, Ok("{\"a\":{\"b\":[1]}}")),
    ]);
}

#[test]
fn counters_are_signed_64_bit_integers() {
    let max = "{\"n\":9223372036854775807}";
    check(&[
        ("{}", Counter, "n", "5", NO, Ok("{\"n\":5}")),
        ("{\"n\":5}", Counter, "n", "-7", NO, Ok("{\"n\":-2}")),
        ("[ 1 ]", Counter, "[0]", "1", NO, Ok("[ 2 ]")),
        ("{}", Counter, "a.n", "1", NO, Err(PathNotFound)),
        ("{}", Counter, "a.n", "1", P, Ok("{\"a\":{\"n\":1}}")),
        ("[]", Counter, "[0]", "1", P, Err(PathNotFound)),
        ("{\"n\":1}", Counter, "n", "0", NO, Err(DeltaInvalid)),
        ("{\"n\":1}", Counter, "n", "1.5", NO, Err(DeltaInvalid)),
        ("{\"n\":1}", Counter, "n", "+1", NO, Err(DeltaInvalid)),
        ("{\"n\":1}", Counter, "n", "x", NO, Err(DeltaInvalid)),
        ("{\"n\":1}", Counter, "n", "9223372036854775808", NO, Err(DeltaInvalid)),
        ("{\"n\":1.5}", Counter, "n", "1", NO, Err(PathMismatch)),
        ("{\"n\":1e3}", Counter, "n", "1", NO, Err(PathMismatch)),
        ("{\"n\":\"1\"}", Counter, "n", "1", NO, Err(PathMismatch)),
        ("{\"n\":[]}", Counter, "n", "1", NO, Err(PathMismatch)),
        ("{\"n\":9223372036854775808}", Counter, "n", "1", NO, Err(NumRange)),
        (max, Counter, "n", "1", NO, Err(ValueCantInsert)),
        (max, Counter, "n", "-9223372036854775808", NO, Ok("{\"n\":-1}")),
        ("{}", Counter, "", "1", NO, Err(PathInvalid)),
    ]);
    let path = Path::parse(b"n").unwrap();
    let edit = subdoc::plan(b"{\"n\":40}", &path, Counter, b"2", false).unwrap();
    assert_eq!(edit.result.as_deref(), Some(&b"42"[..]));
}

#[test]
fn nesting_stops_at_32_levels() {
    let full = nested(32, "");
    assert_eq!(get(&full, &"[0]".repeat(31)), Ok("[]"));
    assert_eq!(get(&nested(33, ""), "[0]"), Err(DocTooDeep));
    assert_eq!(get(&format!("[{},1]", nested(32, "")), "[1]"), Err(DocTooDeep));
    let at = "[0]".repeat(31);
    assert_eq!(change(&full, PushLast, &at, "1", NO), Ok(nested(32, "1")));
    assert_eq!(change(&full, PushLast, &at, "[]", NO), Err(ValueTooDeep));
    assert_eq!(change(&full, PushFirst, &at, "{}", NO), Err(ValueTooDeep));
    assert_eq!(change(&full, Insert, &(at.clone() + "[0]"), "{}", NO), Err(ValueTooDeep));
    assert_eq!(change(&full, Replace, &at, "[[]]", NO), Err(ValueTooDeep));
    assert_eq!(change("{}", DictAdd, "a", &nested(31, ""), NO).map(|_| ()), Ok(()));
    assert_eq!(change("{}", DictAdd, "a", &nested(32, ""), NO), Err(ValueTooDeep));
    assert_eq!(change("{}", DictAdd, "a", &nested(100_000, ""), NO), Err(ValueTooDeep));
    assert_eq!(change("{}", DictAdd, "a.b.c", &nested(30, ""), P), Err(ValueTooDeep));
    assert_eq!(change("{}", PushLast, "a.b", &nested(30, ""), P), Err(ValueTooDeep));
    assert_eq!(change("{}", PushLast, "a.b", &nested(29, ""), P).map(|_| ()), Ok(()));
    assert_eq!(change("{}", AddUnique, &["a"; 32].join("."), "1", P), Err(ValueTooDeep));
    assert_eq!(change("{}", DictAdd, &["a"; 32].join("."), "1", P).map(|_| ()), Ok(()));
    assert_eq!(change("{}", DictAdd, &["a"; 33].join("."), "1", P), Err(PathTooLong));
}
