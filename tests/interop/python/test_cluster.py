"""Nodes under `settee cluster-run` through the official SDK: the map, durability by majority, replicas, failover."""

import json
import os
import re
import signal
import subprocess
from datetime import timedelta

import pytest
from couchbase.auth import PasswordAuthenticator
from couchbase.cluster import Cluster
from couchbase.durability import DurabilityLevel, ServerDurability
from couchbase.exceptions import (
    DocumentNotFoundException,
    DocumentUnretrievableException,
    DurabilitySyncWriteAmbiguousException,
    UnAmbiguousTimeoutException,
)
from couchbase.options import ClusterOptions, ClusterTimeoutOptions, GetOptions, UpsertOptions

from conftest import PASSWORD, binary

LEVELS = [
    DurabilityLevel.MAJORITY,
    DurabilityLevel.MAJORITY_AND_PERSIST_TO_ACTIVE,
    DurabilityLevel.PERSIST_TO_MAJORITY,
]


class Nodes:
    """`settee cluster-run` on free ports; its nodes end with it."""

    def __init__(self, data_dir, nodes, replicas):
        self.data_dir = str(data_dir)
        self.env = {**os.environ, "SETTEE_PASSWORD": PASSWORD}
        args = [binary(), "cluster-run", "--data-dir", str(data_dir), "--base-port", "0", "--vbuckets", "64"]
        args += ["--nodes", str(nodes), "--replicas", str(replicas)]
        self.process = subprocess.Popen(args, stdout=subprocess.PIPE, env=self.env)
        self.pids = {}
        for line in self.process.stdout:
            line = line.decode()
            if line.startswith("node "):
                self.pids[re.search(r"kv=(\S+)", line).group(1)] = int(re.search(r"pid=(\d+)", line).group(1))
            if line.startswith("ready "):
                self.connection_string = re.search(r"connect=(\S+)", line).group(1)
                return
        raise RuntimeError(f"the nodes ended with {self.process.wait()} before they were ready")

    def tool(self, *args):
        return subprocess.run([binary(), "cluster", *args], env=self.env, check=True, capture_output=True).stdout

    def begin(self, *args):
        """A command that goes on beside the test."""
        args = [binary(), "cluster", *args, "--data-dir", self.data_dir]
        return subprocess.Popen(args, env=self.env, stdout=subprocess.DEVNULL)

    def connect(self):
        timeouts = ClusterTimeoutOptions(kv_timeout=timedelta(seconds=20), connect_timeout=timedelta(seconds=20))
        options = ClusterOptions(PasswordAuthenticator("Administrator", PASSWORD), timeout_options=timeouts)
        cluster = Cluster(self.connection_string, options)
        cluster.wait_until_ready(timedelta(seconds=30))
        return cluster

    def stop(self):
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(timeout=60)


@pytest.fixture(params=[(2, 1)], ids=lambda size: "{}-nodes".format(size[0]))
def nodes(request, tmp_path):
    nodes = Nodes(tmp_path / "nodes", *request.param)
    yield nodes
    assert nodes.stop() == 0


def eventually(read, *not_yet):
    while True:
        try:
            return read()
        except not_yet:
            pass


def from_replicas(read):
    """A replica has the commit a moment after the client has the answer."""
    return eventually(read, DocumentNotFoundException, DocumentUnretrievableException)


@pytest.mark.parametrize("nodes", [(2, 1), (3, 2)], ids=["2-nodes", "3-nodes"], indirect=True)
def test_a_cluster_is_used_like_one_server_and_survives_a_node(nodes):
    replicas = len(nodes.pids) - 1
    cluster = nodes.connect()
    collection = cluster.bucket("default").default_collection()
    written = {}
    for n in range(120):
        key, value = f"key-{n}", {"n": n}
        collection.upsert(key, value, UpsertOptions(durability=ServerDurability(LEVELS[n % 3])))
        written[key] = value
    for key, value in written.items():
        assert collection.get(key).content_as[dict] == value
    for key in list(written)[:20]:
        found = from_replicas(lambda: collection.get_any_replica(key))
        assert found.content_as[dict] == written[key]
        copies = []
        while len(copies) <= replicas:
            copies = from_replicas(lambda: list(collection.get_all_replicas(key)))
        assert [copy.is_replica for copy in copies].count(True) == replicas
        assert all(copy.content_as[dict] == written[key] for copy in copies)

    first, second, *_ = nodes.pids
    os.kill(nodes.pids[first], signal.SIGKILL)
    nodes_left = json.loads(nodes.tool("status", "--json", "--kv", second))
    assert [node["state"] for node in nodes_left["nodes"]] == ["down"] + ["up"] * replicas
    nodes.tool("failover", first, "--kv", second)
    # The same client finds its way; what it had queued for the dead node before it asked for the map again runs out of time.
    briefly = GetOptions(timeout=timedelta(seconds=2))
    for key, value in written.items():
        found = eventually(lambda: collection.get(key, briefly), UnAmbiguousTimeoutException)
        assert found.content_as[dict] == value
    collection.upsert("after", {"n": 1})
    cluster.close()


def test_nodes_come_and_go_while_a_client_writes(nodes):
    cluster = nodes.connect()
    collection = cluster.bucket("default").default_collection()
    first, second = nodes.pids
    values = {}

    def write_while(command):
        n = 0
        while command.poll() is None or n < 50:
            key, value = f"key-{n % 64}", {"n": n}
            try:
                collection.upsert(key, value, UpsertOptions(durability=ServerDurability(LEVELS[n % 3])))
                values[key] = value
            except DurabilitySyncWriteAmbiguousException:
                # Its vBucket moved under it.
                values.pop(key, None)
            n += 1
        assert command.wait() == 0

    write_while(nodes.begin("add"))
    write_while(nodes.begin("rebalance"))
    seen = json.loads(nodes.tool("status", "--json", "--kv", second))
    assert len(seen["nodes"]) == 3
    assert all(21 <= node[copies] <= 22 for node in seen["nodes"] for copies in ("active", "replica"))
    write_while(nodes.begin("remove", first))
    for key, value in values.items():
        assert collection.get(key).content_as[dict] == value
    cluster.close()
