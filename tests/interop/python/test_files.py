"""The files that a server leaves, after compactions under load, judged by a reader that shares nothing with it."""

import json
import os
import subprocess
import threading
from datetime import timedelta
from pathlib import Path

import pytest
from conftest import PASSWORD, ROOT, Server, binary
from couch_reader import Wrong, check
from couchbase.durability import DurabilityLevel, ServerDurability
from couchbase.options import UpsertOptions

FIXTURES = ROOT / "couchstore" / "tests" / "fixtures"


def test_the_reader_finds_in_the_original_librarys_files_what_is_said_of_them():
    for path in sorted(FIXTURES.glob("*.couch")):
        said = json.loads(path.with_suffix(".json").read_text())
        if "docs_by_seq" not in said or path.name.startswith("j-"):
            with pytest.raises(Wrong):
                check(path)
            continue
        newest = check(path)[-1]
        found = [(doc.id.hex(), doc.seq, doc.rev, doc.deleted, doc.rev_meta.hex()) for doc in newest.docs]
        names = ("id_hex", "seq", "rev", "deleted", "rev_meta_hex")
        assert found == [tuple(doc[name] for name in names) for doc in said["docs_by_seq"]], path.name
        assert (newest.header.update_seq, newest.header.purge_seq) == (said["update_seq"], said["purge_seq"]), path.name


def compact(server, *options):
    command = [binary(), "bucket", "compact", "default", "--kv", server.kv, *options]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "SETTEE_PASSWORD": PASSWORD})


@pytest.mark.parametrize("log", ["on", "off"])
def test_files_compacted_under_load_break_no_rule_of_the_format(tmp_path, log):
    data = tmp_path / "data"
    settings = ["bucket.vbuckets=4", "persist.filing_age_s_max=1", f"persist.commit_log={log}"]
    server = Server(data, *settings)
    cluster = server.connect()
    cluster.wait_until_ready(timedelta(seconds=20))
    collection = cluster.bucket("default").default_collection()
    durably = UpsertOptions(durability=ServerDurability(DurabilityLevel.PERSIST_TO_MAJORITY))
    model, is_over = {}, threading.Event()

    def write():
        for n in range(3000):
            key = f"k{n % 400}"
            if n % 7 == 3 and key in model:
                collection.remove(key)
                del model[key]
                continue
            model[key] = {"n": n, "filler": "x" * (n % 300)}
            collection.upsert(key, model[key], durably if n % 5 == 0 else UpsertOptions())
        is_over.set()

    writing = threading.Thread(target=write)
    writing.start()
    rounds = 0
    while not is_over.is_set():
        compact(server, *(["--drop-deletes"] if rounds % 2 else []))
        rounds += 1
    writing.join()
    compact(server)
    cluster.close()
    assert server.stop() == 0 and rounds > 0
    found = {}
    files = sorted(Path(data, "buckets", "default").glob("*.couch.*"))
    assert len(files) == 4
    for path in files:
        newest = check(path, kv=True)[-1]
        found |= {doc.id[1:].decode(): json.loads(newest.value(doc)) for doc in newest.docs if not doc.deleted and doc.id[0] == 0}
    assert found == model
