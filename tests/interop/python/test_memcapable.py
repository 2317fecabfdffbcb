"""libmemcached's conformance tests for the binary protocol, against a bucket that is open to clients without a password."""

import re
import subprocess

import pytest

from couchbase.options import GetOptions, UpsertOptions
from couchbase.transcoder import RawJSONTranscoder

from conftest import Server

ASCII = re.compile(r"^ascii ")


@pytest.fixture(scope="module")
def open_server(tmp_path_factory):
    server = Server(
        tmp_path_factory.mktemp("memcapable") / "data", "kv.open_bucket=default", "bucket.vbuckets=16"
    )
    yield server
    assert server.stop() == 0


def test_all_binary_tests_pass(open_server):
    done = subprocess.run(
        ["memccapable", "-h", "127.0.0.1", "-p", str(open_server.kv_port), "-b", "-t", "20"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    output = done.stdout + done.stderr
    results = dict(re.findall(r"^(\S.*?)\s+\[(pass|FAIL|fail|skip)\]", output, re.MULTILINE))
    binary = {name: result for name, result in results.items() if not ASCII.match(name)}
    assert len(binary) == 27, output
    assert set(binary.values()) == {"pass"}, output
    assert done.returncode == 0, output


def test_a_memcached_client_and_an_sdk_see_the_same_documents(open_server, tmp_path):
    address = f"--servers=127.0.0.1:{open_server.kv_port}"

    def run(*args, cwd=tmp_path):
        return subprocess.run(
            [args[0], "--binary", address, *args[1:]], cwd=cwd, capture_output=True, text=True, timeout=30
        )

    names = [f"shared-{n}" for n in range(40)]
    for name in names:
        (tmp_path / name).write_text(f'{{"from": "{name}"}}')
    stored = run("memccp", *names)
    assert stored.returncode == 0, stored.stderr
    cluster = open_server.connect()
    collection = cluster.bucket("default").default_collection()
    text = RawJSONTranscoder()
    for name in names:
        got = collection.get(name, GetOptions(transcoder=text)).content_as[bytes]
        assert got == (tmp_path / name).read_bytes()
    collection.upsert("by-sdk", b'{"from": "sdk"}', UpsertOptions(transcoder=text))
    assert run("memccat", "by-sdk").stdout.strip() == '{"from": "sdk"}'
    cluster.close()


def test_statistics_and_version_are_readable_by_libmemcached(open_server):
    listing = subprocess.run(
        ["memcstat", "--binary", f"--servers=127.0.0.1:{open_server.kv_port}"],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert listing.returncode == 0, listing.stderr
    assert "curr_items" in listing.stdout
