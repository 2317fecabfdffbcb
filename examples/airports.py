#!/usr/bin/env python3
"""Load the world's airports as durable JSON documents, then prove that all of them are there.

    pip install couchbase airportsdata
    python examples/airports.py couchbase://127.0.0.1:11210 --password-file settee-data/password

Every document is written with persistToMajority: when the progress line counts it, it is on disk. Kill the server with
SIGKILL while this runs, start it again, and run `airports.py --resume`: nothing that was counted is missing.
"""

import argparse
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import airportsdata
from couchbase.auth import PasswordAuthenticator
from couchbase.cluster import Cluster
from couchbase.durability import DurabilityLevel, ServerDurability
from couchbase.exceptions import CouchbaseException, DocumentNotFoundException
from couchbase.options import ClusterOptions, UpsertMultiOptions

BATCH = 256
JOURNAL = Path("airports.acknowledged")


def main():
    args = arguments()
    password = os.environ.get("SETTEE_PASSWORD") or Path(args.password_file).read_text().splitlines()[0]
    cluster = Cluster(args.server, ClusterOptions(PasswordAuthenticator(args.user, password)))
    collection = cluster.bucket(args.bucket).default_collection()
    airports = airportsdata.load()

    acknowledged = set(read_journal()) if args.resume else set()
    try:
        if args.resume:
            verify(collection, {code: airports[code] for code in acknowledged}, "acknowledged before")
        load(collection, {code: a for code, a in airports.items() if code not in acknowledged}, args.resume)
        verify(collection, airports, "all")
    except CouchbaseException as error:
        sys.exit(f"\nstopped: {type(error).__name__}; start the server again, then run with --resume")
    JOURNAL.unlink()
    cluster.close()


def load(collection, airports, resume):
    """Durable upserts in batches; each acknowledged code goes to the journal only after its answer came."""
    durable = UpsertMultiOptions(
        durability=ServerDurability(DurabilityLevel.PERSIST_TO_MAJORITY), timeout=timedelta(seconds=30)
    )
    codes = list(airports)
    start = time.monotonic()
    with open(JOURNAL, "a" if resume else "w") as journal:
        for at in range(0, len(codes), BATCH):
            batch = {code: airports[code] for code in codes[at : at + BATCH]}
            result = collection.upsert_multi(batch, durable)
            for code in result.results:
                journal.write(code + "\n")
            journal.flush()
            if not result.all_ok:
                raise next(iter(result.exceptions.values()))
            done = at + len(batch)
            rate = done / (time.monotonic() - start)
            print(f"\rdurable {done:>6} / {len(codes)}   {rate:7.0f} documents/s", end="", flush=True)
    print()


def verify(collection, airports, which):
    """Reads every document back and compares it with the source."""
    codes = list(airports)
    wrong = 0
    for at in range(0, len(codes), BATCH):
        batch = codes[at : at + BATCH]
        result = collection.get_multi(batch)
        for error in result.exceptions.values():
            # Not to be reached is not the same as not to be there.
            if not isinstance(error, DocumentNotFoundException):
                raise error
        for code in batch:
            got = result.results.get(code)
            if got is None or got.content_as[dict] != airports[code]:
                wrong += 1
                print(f"\nmissing or different: {code}")
        print(f"\rverified {at + len(batch):>6} / {len(codes)}   ({which})", end="", flush=True)
    print()
    if wrong:
        sys.exit(f"{wrong} of {len(codes)} documents are missing or different")


def read_journal():
    if not JOURNAL.exists():
        sys.exit(f"nothing to resume: {JOURNAL} is not here")
    return JOURNAL.read_text().split("\n")[:-1]


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("server", nargs="?", default="couchbase://127.0.0.1:11210")
    parser.add_argument("--user", default="Administrator")
    parser.add_argument("--password-file", default="settee-data/password")
    parser.add_argument("--bucket", default="default")
    parser.add_argument("--resume", action="store_true", help="verify what was acknowledged before, then load the rest")
    return parser.parse_args()


if __name__ == "__main__":
    main()
