"""libmemcached's conformance tests for the binary protocol, against a bucket that is open to clients without a password."""

import re
import subprocess

import pytest

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


def test_keys_of_every_vbucket_are_found_when_the_client_always_says_zero(open_server):
    listing = subprocess.run(
        ["memcstat", "--binary", f"--servers=127.0.0.1:{open_server.kv_port}"],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert listing.returncode == 0, listing.stderr
    assert "curr_items" in listing.stdout
