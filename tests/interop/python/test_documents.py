"""Whole documents through the official SDK."""

import time
from datetime import timedelta

import pytest
from couchbase.exceptions import (
    AmbiguousTimeoutException,
    AuthenticationException,
    BucketNotFoundException,
    CasMismatchException,
    CouchbaseException,
    DeltaInvalidException,
    DocumentExistsException,
    DocumentLockedException,
    DocumentNotFoundException,
    DocumentNotLockedException,
    UnAmbiguousTimeoutException,
)
from couchbase.options import (
    DecrementOptions,
    GetOptions,
    IncrementOptions,
    InsertOptions,
    PingOptions,
    RemoveOptions,
    ReplaceOptions,
    DeltaValue,
    SignedInt64,
    UpsertOptions,
)
from couchbase.diagnostics import PingState, ServiceType
from couchbase.transcoder import RawBinaryTranscoder, RawStringTranscoder

LONG = timedelta(days=40)


def test_upsert_and_get_return_the_document_and_its_cas(collection, key):
    stored = collection.upsert(key, {"a": 1, "list": [1, 2, 3]})
    got = collection.get(key)
    assert got.content_as[dict] == {"a": 1, "list": [1, 2, 3]}
    assert got.cas == stored.cas != 0


def test_mutations_carry_a_token(collection, key):
    first = collection.upsert(key, 1).mutation_token()
    second = collection.upsert(key, 2).mutation_token()
    assert first.partition_uuid == second.partition_uuid != 0
    assert second.sequence_number > first.sequence_number


def test_insert_refuses_a_document_that_exists(collection, key):
    collection.insert(key, 1)
    with pytest.raises(DocumentExistsException):
        collection.insert(key, 2)
    assert collection.get(key).content_as[int] == 1


def test_replace_needs_a_document_and_honours_its_cas(collection, key):
    with pytest.raises(DocumentNotFoundException):
        collection.replace(key, 1)
    cas = collection.upsert(key, 1).cas
    newer = collection.replace(key, 2, ReplaceOptions(cas=cas)).cas
    with pytest.raises(CasMismatchException):
        collection.replace(key, 3, ReplaceOptions(cas=cas))
    assert collection.get(key).cas == newer


def test_remove_honours_its_cas_and_is_final(collection, key):
    old = collection.upsert(key, 1).cas
    new = collection.upsert(key, 2).cas
    with pytest.raises(CasMismatchException):
        collection.remove(key, RemoveOptions(cas=old))
    collection.remove(key, RemoveOptions(cas=new))
    with pytest.raises(DocumentNotFoundException):
        collection.get(key)
    with pytest.raises(DocumentNotFoundException):
        collection.remove(key)
    collection.insert(key, 3)


def test_exists_tells_live_from_deleted(collection, key):
    assert not collection.exists(key).exists
    cas = collection.upsert(key, 1).cas
    found = collection.exists(key)
    assert found.exists and found.cas == cas
    collection.remove(key)
    assert not collection.exists(key).exists


def test_expiry_is_kept_read_back_and_obeyed(collection, key):
    collection.upsert(key, 1, UpsertOptions(expiry=LONG))
    until = collection.get(key, GetOptions(with_expiry=True)).expiry_time
    assert abs(until.timestamp() - time.time() - LONG.total_seconds()) < 5
    collection.upsert(key, 2, UpsertOptions(preserve_expiry=True))
    assert collection.get(key, GetOptions(with_expiry=True)).expiry_time == until
    collection.upsert(key, 3)
    assert collection.get(key, GetOptions(with_expiry=True)).expiry_time is None


def test_a_short_expiry_ends_the_document(collection, key):
    collection.upsert(key, 1, UpsertOptions(expiry=timedelta(seconds=1)))
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if not collection.exists(key).exists:
            break
    with pytest.raises(DocumentNotFoundException):
        collection.get(key)
    collection.insert(key, 2)


def test_touch_and_get_and_touch_change_the_expiry(collection, key):
    before = collection.upsert(key, "v").cas
    touched = collection.touch(key, LONG)
    assert touched.cas not in (0, before)
    with_expiry = collection.get(key, GetOptions(with_expiry=True))
    assert with_expiry.expiry_time is not None
    got = collection.get_and_touch(key, timedelta(0))
    assert got.content_as[str] == "v"
    assert collection.get(key, GetOptions(with_expiry=True)).expiry_time is None


def test_a_locked_document_is_read_but_not_written_without_the_lock(collection, key):
    collection.upsert(key, 1)
    locked = collection.get_and_lock(key, timedelta(seconds=15))
    assert collection.get(key).content_as[int] == 1
    assert collection.get(key).cas != locked.cas
    short = timedelta(milliseconds=500)
    with pytest.raises((DocumentLockedException, AmbiguousTimeoutException, UnAmbiguousTimeoutException)):
        collection.upsert(key, 2, UpsertOptions(timeout=short))
    with pytest.raises(CasMismatchException):
        collection.unlock(key, locked.cas + 1)
    collection.replace(key, 3, ReplaceOptions(cas=locked.cas))
    assert collection.get(key).content_as[int] == 3


def test_unlock_gives_the_document_back(collection, key):
    collection.upsert(key, 1)
    locked = collection.get_and_lock(key, timedelta(seconds=15))
    collection.unlock(key, locked.cas)
    collection.upsert(key, 2)
    with pytest.raises((DocumentNotLockedException, CouchbaseException)):
        collection.unlock(key, locked.cas)


def test_counters_start_count_and_stop_at_zero(collection, key):
    binary = collection.binary()
    with pytest.raises(DocumentNotFoundException):
        binary.increment(key, IncrementOptions(initial=SignedInt64(-1)))
    assert binary.increment(key, IncrementOptions(initial=SignedInt64(10), delta=DeltaValue(5))).content == 10
    assert binary.increment(key, IncrementOptions(delta=DeltaValue(5))).content == 15
    assert binary.decrement(key, DecrementOptions(delta=DeltaValue(100))).content == 0
    assert collection.get(key).content_as[int] == 0
    collection.upsert(key, {"not": "a number"})
    with pytest.raises(DeltaInvalidException):
        binary.increment(key, IncrementOptions(delta=DeltaValue(1)))


def test_append_and_prepend_join_bytes(collection, key):
    binary = collection.binary()
    with pytest.raises(DocumentNotFoundException):
        binary.append(key, b"x")
    raw = RawBinaryTranscoder()
    collection.upsert(key, b"b", UpsertOptions(transcoder=raw))
    binary.append(key, b"c")
    binary.prepend(key, b"a")
    assert collection.get(key, GetOptions(transcoder=raw)).content_as[bytes] == b"abc"


def test_values_of_every_size_come_back_byte_for_byte(collection, key):
    raw = RawBinaryTranscoder()
    for size in (0, 1, 4095, 4096, 65_536, 1 << 20, 20 << 20):
        value = bytes(i * 31 % 251 for i in range(min(size, 4096))) * (size // 4096 or 1) if size else b""
        collection.upsert(key, value, UpsertOptions(transcoder=raw, timeout=timedelta(seconds=30)))
        got = collection.get(key, GetOptions(transcoder=raw, timeout=timedelta(seconds=30))).content_as[bytes]
        assert got == value, size


def test_a_value_over_the_limit_is_refused_and_the_connection_lives_on(collection, key):
    raw = RawBinaryTranscoder()
    noise = __import__("random").Random(7).randbytes((20 << 20) + 1)
    with pytest.raises(CouchbaseException):
        collection.upsert(key, noise, UpsertOptions(transcoder=raw, timeout=timedelta(seconds=30)))
    collection.upsert(key, 1)


def test_strings_stay_strings(collection, key):
    text = RawStringTranscoder()
    collection.upsert(key, "plain {text", UpsertOptions(transcoder=text))
    assert collection.get(key, GetOptions(transcoder=text)).content_as[str] == "plain {text"


def test_projections_read_only_the_named_paths(collection, key):
    collection.upsert(key, {"a": 1, "b": {"c": 2, "d": 3}, "e": 4})
    got = collection.get(key, GetOptions(project=["a", "b.c"]))
    assert got.content_as[dict] == {"a": 1, "b": {"c": 2}}


def test_multi_operations_work_on_hundreds_of_keys(collection, key):
    documents = {f"{key}-{n}": {"n": n} for n in range(500)}
    assert collection.upsert_multi(documents).all_ok
    got = collection.get_multi(list(documents))
    assert got.all_ok
    assert {k: r.content_as[dict] for k, r in got.results.items()} == documents
    assert collection.remove_multi(list(documents)).all_ok


def test_ping_reaches_the_key_value_and_the_admin_port(cluster, server):
    report = cluster.bucket("default").ping(PingOptions(service_types=[ServiceType.KeyValue]))
    endpoints = report.endpoints[ServiceType.KeyValue]
    assert endpoints and all(e.state == PingState.OK for e in endpoints)
    assert server.kv in {e.remote for e in endpoints}


def test_a_wrong_password_and_a_missing_bucket_have_clear_errors(server):
    with pytest.raises(AuthenticationException):
        server.connect(password="wrong")
    cluster = server.connect()
    with pytest.raises(BucketNotFoundException):
        cluster.bucket("no-such-bucket")
    cluster.close()


def test_any_replica_falls_back_to_the_active_copy(collection, key):
    collection.upsert(key, {"v": 1})
    assert collection.get_any_replica(key).content_as[dict] == {"v": 1}
