"""A real server process for each test module, and real SDK connections to it."""

import os
import re
import signal
import subprocess
import uuid
from datetime import timedelta
from pathlib import Path

import pytest
from couchbase.auth import PasswordAuthenticator
from couchbase.cluster import Cluster
from couchbase.options import ClusterOptions, ClusterTimeoutOptions

ROOT = Path(__file__).resolve().parents[3]
PASSWORD = "a test password"


def binary():
    return os.environ.get("SETTEE_BIN", str(ROOT / "target" / "release" / "settee"))


class Server:
    """`settee serve` on free ports; `kill()` is SIGKILL, `stop()` is SIGTERM."""

    def __init__(self, data_dir, *settings, kv="127.0.0.1:0", admin="127.0.0.1:0"):
        self.data_dir = data_dir
        args = [binary(), "serve", "--data-dir", str(data_dir), "--kv", kv, "--admin", admin]
        for setting in settings:
            args += ["--set", setting]
        self.log = open(str(data_dir) + ".log", "ab")
        self.process = subprocess.Popen(
            args,
            stdout=subprocess.PIPE,
            stderr=self.log,
            env={**os.environ, "SETTEE_PASSWORD": PASSWORD},
        )
        self.ready_line = self._wait_for_ready()
        self.kv = re.search(r"kv=(\S+)", self.ready_line).group(1)
        self.admin = re.search(r"admin=(\S+)", self.ready_line).group(1)

    def _wait_for_ready(self):
        for line in self.process.stdout:
            line = line.decode()
            if line.startswith("ready "):
                return line
        raise RuntimeError(f"the server ended with {self.process.wait()} before it was ready; see {self.log.name}")

    @property
    def kv_port(self):
        return int(self.kv.rsplit(":", 1)[1])

    def kill(self):
        self.process.kill()
        self.process.wait()

    def stop(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=30)

    def connect(self, password=PASSWORD, user="Administrator"):
        timeouts = ClusterTimeoutOptions(kv_timeout=timedelta(seconds=10), connect_timeout=timedelta(seconds=10))
        options = ClusterOptions(PasswordAuthenticator(user, password), timeout_options=timeouts)
        return Cluster(f"couchbase://{self.kv}", options)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("server") / "data", "bucket.vbuckets=64")
    yield server
    assert server.stop() == 0


@pytest.fixture(scope="module")
def cluster(server):
    cluster = server.connect()
    cluster.wait_until_ready(timedelta(seconds=20))
    yield cluster
    cluster.close()


@pytest.fixture(scope="module")
def collection(cluster):
    return cluster.bucket("default").default_collection()


@pytest.fixture
def key():
    return f"k-{uuid.uuid4().hex}"
