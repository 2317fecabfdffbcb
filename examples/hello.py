#!/usr/bin/env python3
"""Hello, Settee: one durable document through the Python SDK."""

from datetime import timedelta
from pathlib import Path
import os

from couchbase.auth import PasswordAuthenticator
from couchbase.cluster import Cluster
from couchbase.durability import DurabilityLevel, ServerDurability
from couchbase.options import ClusterOptions, UpsertOptions

password = os.environ.get("SETTEE_PASSWORD") or Path("settee-data/password").read_text().strip()
server = os.environ.get("SETTEE_KV", "127.0.0.1:11210")
cluster = Cluster(f"couchbase://{server}", ClusterOptions(PasswordAuthenticator("Administrator", password)))
cluster.wait_until_ready(timedelta(seconds=10))
docs = cluster.bucket("default").default_collection()

on_disk = ServerDurability(DurabilityLevel.PERSIST_TO_MAJORITY)
stored = docs.upsert("hello", {"from": "python"}, UpsertOptions(durability=on_disk))
print("on disk, cas", stored.cas)
print("read back", docs.get("hello").content_as[dict])
cluster.close()
