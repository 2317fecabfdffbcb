"""Multi-document transactions, which SDKs build out of sub-document writes on live and deleted documents."""

import pytest
from couchbase.durability import DurabilityLevel, ServerDurability
from couchbase.exceptions import DocumentNotFoundException, TransactionFailed
from couchbase.options import TransactionInsertOptions, TransactionOptions
from couchbase.transcoder import RawBinaryTranscoder

LEVELS = [DurabilityLevel.NONE, DurabilityLevel.MAJORITY, DurabilityLevel.PERSIST_TO_MAJORITY]


@pytest.mark.parametrize("level", LEVELS)
def test_a_transaction_changes_all_its_documents(cluster, collection, key, level):
    made, changed, gone = f"{key}-made", f"{key}-changed", f"{key}-gone"
    collection.upsert(changed, {"n": 1})
    collection.upsert(gone, {"n": 2})

    def transfer(attempt):
        attempt.insert(collection, made, {"n": 3})
        attempt.replace(attempt.get(collection, changed), {"n": 4})
        attempt.remove(attempt.get(collection, gone))
        with pytest.raises(DocumentNotFoundException):
            collection.get(made)
        assert collection.get(changed).content_as[dict] == {"n": 1}

    cluster.transactions.run(transfer, TransactionOptions(durability=ServerDurability(level)))
    assert collection.get(made).content_as[dict] == {"n": 3}
    assert collection.get(changed).content_as[dict] == {"n": 4}
    with pytest.raises(DocumentNotFoundException):
        collection.get(gone)


def test_a_failed_transaction_leaves_everything_as_it_was(cluster, collection, key):
    collection.upsert(key, {"n": 1})

    def fail(attempt):
        attempt.replace(attempt.get(collection, key), {"n": 2})
        attempt.insert(collection, f"{key}-new", {})
        raise ValueError("no")

    with pytest.raises(TransactionFailed):
        cluster.transactions.run(fail)
    assert collection.get(key).content_as[dict] == {"n": 1}
    assert not collection.exists(f"{key}-new").exists
    collection.insert(f"{key}-new", {})


def test_binary_documents_take_part(cluster, collection, key):
    binary = RawBinaryTranscoder()
    options = TransactionInsertOptions(transcoder=binary)
    cluster.transactions.run(lambda attempt: attempt.insert(collection, key, b"\xff\0bytes", options) and None)
    assert collection.get(key, transcoder=binary).content_as[bytes] == b"\xff\0bytes"
