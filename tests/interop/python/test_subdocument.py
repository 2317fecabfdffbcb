"""Parts of documents through the official SDK."""

import pytest
import couchbase.subdocument as SD
from couchbase.exceptions import (
    DocumentExistsException,
    DocumentNotFoundException,
    DocumentNotJsonException,
    CasMismatchException,
    NumberTooBigException,
    PathExistsException,
    PathInvalidException,
    PathMismatchException,
    PathNotFoundException,
)
from couchbase.options import GetOptions, LookupInOptions, MutateInOptions, UpsertOptions
from couchbase.transcoder import RawBinaryTranscoder
from datetime import timedelta

DOCUMENT = {
    "name": "Ada",
    "address": {"city": "London", "lines": ["12 St James's Square", "Mayfair"]},
    "visits": 7,
    "tags": ["first", "of", "many"],
    "nested": {"a": {"b": {"c": [1, {"d": "deep"}]}}},
}


@pytest.fixture
def doc(collection, key):
    collection.upsert(key, DOCUMENT)
    return key


def test_lookups_reach_any_depth(collection, doc):
    result = collection.lookup_in(
        doc,
        [
            SD.get("address.city"),
            SD.get("address.lines[1]"),
            SD.get("tags[-1]"),
            SD.get("nested.a.b.c[1].d"),
            SD.exists("visits"),
            SD.exists("no.such"),
            SD.count("tags"),
            SD.count("nested"),
            SD.get("missing"),
        ],
    )
    assert [result.content_as[str](i) for i in range(4)] == ["London", "Mayfair", "many", "deep"]
    assert result.exists(4) and not result.exists(5)
    assert result.content_as[int](6) == 3 and result.content_as[int](7) == 1
    with pytest.raises(PathNotFoundException):
        result.content_as[str](8)


def test_lookup_of_a_missing_document_is_not_found(collection, key):
    with pytest.raises(DocumentNotFoundException):
        collection.lookup_in(key, [SD.get("a")])


def test_lookup_errors_name_the_path_not_the_document(collection, doc):
    result = collection.lookup_in(doc, [SD.get("name[0]"), SD.get("tags.first"), SD.get("bad..path")])
    for index, expected in enumerate([PathMismatchException, PathMismatchException, PathInvalidException]):
        with pytest.raises(expected):
            result.content_as[str](index)


def test_dictionaries_change_in_place(collection, doc):
    cas = collection.get(doc).cas
    result = collection.mutate_in(
        doc,
        (
            SD.upsert("address.postcode", "SW1Y"),
            SD.insert("new.branch.leaf", 1, create_parents=True),
            SD.replace("name", "Countess"),
            SD.remove("visits"),
        ),
    )
    assert result.cas != cas
    got = collection.get(doc).content_as[dict]
    assert got["address"]["postcode"] == "SW1Y"
    assert got["new"] == {"branch": {"leaf": 1}}
    assert got["name"] == "Countess" and "visits" not in got
    assert got["nested"] == DOCUMENT["nested"]


def test_arrays_grow_at_both_ends_and_in_the_middle(collection, doc):
    collection.mutate_in(
        doc,
        (
            SD.array_append("tags", "x", "y"),
            SD.array_prepend("tags", "zero"),
            SD.array_insert("tags[2]", "mid"),
            SD.array_addunique("tags", "unique"),
        ),
    )
    assert collection.get(doc).content_as[dict]["tags"] == [
        "zero", "first", "mid", "of", "many", "x", "y", "unique",
    ]
    with pytest.raises(PathExistsException):
        collection.mutate_in(doc, (SD.array_addunique("tags", "unique"),))


def test_counters_inside_documents(collection, doc):
    result = collection.mutate_in(
        doc, (SD.increment("visits", 5), SD.decrement("below.zero", 3, create_parents=True))
    )
    assert result.content_as[int](0) == 12 and result.content_as[int](1) == -3
    with pytest.raises(PathMismatchException):
        collection.mutate_in(doc, (SD.increment("name", 1),))


def test_a_failed_spec_changes_nothing(collection, doc):
    before = collection.get(doc)
    with pytest.raises(PathNotFoundException):
        collection.mutate_in(doc, (SD.upsert("name", "changed"), SD.replace("no.such", 1)))
    with pytest.raises(PathExistsException):
        collection.mutate_in(doc, (SD.upsert("name", "changed"), SD.insert("visits", 1)))
    after = collection.get(doc)
    assert after.content_as[dict] == DOCUMENT and after.cas == before.cas


def test_cas_and_store_semantics(collection, doc, key):
    cas = collection.get(doc).cas
    collection.mutate_in(doc, (SD.upsert("n", 1),), MutateInOptions(cas=cas))
    with pytest.raises(CasMismatchException):
        collection.mutate_in(doc, (SD.upsert("n", 2),), MutateInOptions(cas=cas))
    fresh = doc + "-fresh"
    with pytest.raises(DocumentNotFoundException):
        collection.mutate_in(fresh, (SD.upsert("a", 1),))
    collection.mutate_in(fresh, (SD.upsert("a", 1),), MutateInOptions(store_semantics=SD.StoreSemantics.UPSERT))
    with pytest.raises(DocumentExistsException):
        collection.mutate_in(fresh, (SD.upsert("a", 2),), MutateInOptions(store_semantics=SD.StoreSemantics.INSERT))
    assert collection.get(fresh).content_as[dict] == {"a": 1}


def test_xattrs_live_beside_the_body(collection, doc):
    collection.mutate_in(
        doc,
        (
            SD.upsert("meta.author.name", "me", xattr=True, create_parents=True),
            SD.upsert("_sys.n", 1, xattr=True, create_parents=True),
            SD.upsert("name", "with xattrs"),
        ),
    )
    result = collection.lookup_in(
        doc, [SD.get("meta.author.name", xattr=True), SD.get("_sys", xattr=True), SD.get("name")]
    )
    assert result.content_as[str](0) == "me"
    assert result.content_as[dict](1) == {"n": 1}
    assert "meta" not in collection.get(doc).content_as[dict]
    collection.upsert(doc, {"replaced": True})
    kept = collection.lookup_in(doc, [SD.get("meta.author.name", xattr=True)])
    assert kept.content_as[str](0) == "me"


def test_virtual_xattrs_describe_the_document(collection, doc):
    cas = collection.get(doc).cas
    result = collection.lookup_in(doc, [SD.get("$document", xattr=True), SD.get("$document.CAS", xattr=True)])
    about = result.content_as[dict](0)
    assert about["CAS"] == f"0x{cas:016x}" == result.content_as[str](1)
    assert about["deleted"] is False and about["exptime"] == 0
    assert "json" in about["datatype"]
    assert set(about) >= {"vbucket_uuid", "seqno", "revid", "flags", "value_bytes", "last_modified", "value_crc32c"}


def test_macros_expand_when_the_write_is_sequenced(collection, doc):
    result = collection.mutate_in(
        doc,
        (
            SD.upsert("m.cas", SD.MutationMacro.cas(), xattr=True, create_parents=True),
            SD.upsert("m.seq", SD.MutationMacro.seq_no(), xattr=True),
            SD.upsert("m.crc", SD.MutationMacro.value_crc32c(), xattr=True),
        ),
    )
    found = collection.lookup_in(
        doc, [SD.get("m", xattr=True), SD.get("$document.seqno", xattr=True), SD.get("$document.value_crc32c", xattr=True)]
    )
    macros = found.content_as[dict](0)
    assert int(macros["cas"], 16) == int.from_bytes(result.cas.to_bytes(8, "little"), "big")
    assert macros["seq"] == found.content_as[str](1)
    assert macros["crc"] == found.content_as[str](2)


def test_create_as_deleted_makes_a_tombstone_with_xattrs_only(collection, key):
    from couchbase.subdocument import StoreSemantics

    collection.mutate_in(
        key,
        (SD.upsert("_txn", {"id": "t1"}, xattr=True, create_parents=True),),
        MutateInOptions(store_semantics=StoreSemantics.INSERT, create_as_deleted=True),
    )
    with pytest.raises(DocumentNotFoundException):
        collection.get(key)
    found = collection.lookup_in(key, [SD.get("_txn.id", xattr=True)], LookupInOptions(access_deleted=True))
    assert found.content_as[str](0) == "t1"


def test_expiry_of_subdocument_changes(collection, doc):
    with_expiry = GetOptions(with_expiry=True)
    collection.upsert(doc, DOCUMENT, UpsertOptions(expiry=timedelta(hours=1)))
    collection.mutate_in(doc, (SD.upsert("a", 1),), MutateInOptions(preserve_expiry=True))
    assert collection.get(doc, with_expiry).expiry_time is not None
    collection.mutate_in(doc, (SD.upsert("a", 2),))
    assert collection.get(doc, with_expiry).expiry_time is None
    collection.mutate_in(doc, (SD.upsert("a", 3),), MutateInOptions(expiry=timedelta(hours=1)))
    assert collection.get(doc, with_expiry).expiry_time is not None


def test_a_value_that_is_not_json_has_no_paths(collection, key):
    collection.upsert(key, b"\x00\x01", UpsertOptions(transcoder=RawBinaryTranscoder()))
    with pytest.raises(DocumentNotJsonException):
        collection.lookup_in(key, [SD.get("a")]).content_as[str](0)
    with pytest.raises(DocumentNotJsonException):
        collection.mutate_in(key, (SD.upsert("a", 1),))
