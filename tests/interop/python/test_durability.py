"""Acknowledged durable writes through the official SDK, across the end of the process."""

from datetime import timedelta

import pytest
from couchbase.durability import DurabilityLevel, ServerDurability
from couchbase.exceptions import CouchbaseException, DurabilityImpossibleException
from couchbase.options import (
    GetOptions,
    IncrementOptions,
    InsertOptions,
    MutateInOptions,
    RemoveOptions,
    ReplaceOptions,
    SignedInt64,
    UpsertOptions,
)
import couchbase.subdocument as SD

from conftest import Server

LEVELS = [
    DurabilityLevel.MAJORITY,
    DurabilityLevel.MAJORITY_AND_PERSIST_TO_ACTIVE,
    DurabilityLevel.PERSIST_TO_MAJORITY,
]


@pytest.mark.parametrize("level", LEVELS)
def test_every_operation_takes_every_level(collection, key, level):
    durable = ServerDurability(level)
    inserted = collection.insert(key, {"n": 1}, InsertOptions(durability=durable))
    assert collection.get(key).cas == inserted.cas
    replaced = collection.replace(key, {"n": 2}, ReplaceOptions(durability=durable, cas=inserted.cas))
    upserted = collection.upsert(key, {"n": 3}, UpsertOptions(durability=durable))
    changed = collection.mutate_in(key, (SD.increment("n", 4),), MutateInOptions(durability=durable))
    assert len({inserted.cas, replaced.cas, upserted.cas, changed.cas}) == 4
    assert collection.get(key).content_as[dict] == {"n": 7}
    collection.remove(key, RemoveOptions(durability=durable))
    assert not collection.exists(key).exists
    counted = collection.binary().increment(key, IncrementOptions(initial=SignedInt64(1), durability=durable))
    assert counted.content == 1


def test_a_chain_that_is_too_short_is_said_at_once(tmp_path):
    server = Server(tmp_path / "data", "bucket.replicas=1", "bucket.vbuckets=16")
    cluster = server.connect()
    collection = cluster.bucket("default").default_collection()
    with pytest.raises(DurabilityImpossibleException):
        collection.upsert("k", 1, UpsertOptions(durability=ServerDurability(DurabilityLevel.MAJORITY)))
    collection.upsert("k", 1)
    cluster.close()
    assert server.stop() == 0


def test_acknowledged_documents_survive_kill_9_and_a_clean_stop(tmp_path):
    durable = UpsertOptions(
        durability=ServerDurability(DurabilityLevel.PERSIST_TO_MAJORITY), timeout=timedelta(seconds=20)
    )
    data_dir = tmp_path / "data"
    written = {}
    for round_number in range(4):
        server = Server(data_dir, "bucket.vbuckets=64")
        cluster = server.connect()
        collection = cluster.bucket("default").default_collection()
        for name, (value, cas) in written.items():
            got = collection.get(name)
            assert got.content_as[dict] == value and got.cas == cas
        for n in range(100):
            name, value = f"doc-{n % 60}", {"round": round_number, "n": n}
            written[name] = (value, collection.upsert(name, value, durable).cas)
        collection.upsert("gone", 1, durable)
        collection.remove("gone", RemoveOptions(durability=ServerDurability(DurabilityLevel.PERSIST_TO_MAJORITY)))
        cluster.close()
        if round_number % 2:
            assert server.stop() == 0
        else:
            server.kill()
    server = Server(data_dir, "bucket.vbuckets=64")
    cluster = server.connect()
    collection = cluster.bucket("default").default_collection()
    assert not collection.exists("gone").exists
    for name, (value, cas) in written.items():
        got = collection.get(name, GetOptions(with_expiry=True))
        assert got.content_as[dict] == value
    cluster.close()
    assert server.stop() == 0
