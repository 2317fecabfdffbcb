"""Buckets, users and the rest of the cluster, as the SDK's managers see them."""

import time
from datetime import timedelta

import pytest
from conftest import PASSWORD
from couchbase.durability import DurabilityLevel
from couchbase.exceptions import (
    AuthenticationException,
    BucketAlreadyExistsException,
    BucketDoesNotExistException,
    BucketNotFlushableException,
    CollectionNotFoundException,
    FeatureUnavailableException,
    InvalidArgumentException,
    ScopeNotFoundException,
    ServiceUnavailableException,
)
from couchbase.kv_range_scan import RangeScan
from couchbase.management.buckets import (
    BucketSettings,
    BucketType,
    CompressionMode,
    CreateBucketSettings,
    EvictionPolicyType,
)
from couchbase.management.users import Role, User
from couchbase.options import GetOptions


@pytest.fixture
def bucket(cluster, key):
    settings = CreateBucketSettings(name=key, ram_quota_mb=100, num_replicas=0, flush_enabled=True)
    cluster.buckets().create_bucket(settings)
    yield cluster.bucket(key)
    cluster.buckets().drop_bucket(key)


def test_a_bucket_is_as_it_was_asked_for_and_can_be_changed(cluster, key):
    manager = cluster.buckets()
    asked = {
        "name": key,
        "ram_quota_mb": 100,
        "num_replicas": 0,
        "flush_enabled": False,
        "max_expiry": timedelta(seconds=100),
        "minimum_durability_level": DurabilityLevel.PERSIST_TO_MAJORITY,
        "compression_mode": CompressionMode.ACTIVE,
        "eviction_policy": EvictionPolicyType.FULL,
    }
    manager.create_bucket(CreateBucketSettings(**asked))
    assert {field: manager.get_bucket(key).get(field) for field in asked} == asked
    with pytest.raises(BucketAlreadyExistsException):
        manager.create_bucket(CreateBucketSettings(name=key, ram_quota_mb=100))
    with pytest.raises(BucketNotFlushableException):
        manager.flush_bucket(key)
    manager.update_bucket(BucketSettings(name=key, ram_quota_mb=150, flush_enabled=True))
    asked.update(ram_quota_mb=150, flush_enabled=True)
    assert {field: manager.get_bucket(key).get(field) for field in asked} == asked
    assert key in [bucket.name for bucket in manager.get_all_buckets()]
    manager.flush_bucket(key)
    manager.drop_bucket(key)
    for gone in [manager.get_bucket, manager.drop_bucket, manager.flush_bucket]:
        with pytest.raises(BucketDoesNotExistException):
            gone(key)


def test_documents_of_a_bucket_with_a_longest_life_expire(cluster, bucket):
    name = bucket.name
    cluster.buckets().update_bucket(
        BucketSettings(name=name, ram_quota_mb=100, max_expiry=timedelta(seconds=100))
    )
    collection = bucket.default_collection()
    before = int(time.time())
    collection.upsert("k", {"no": "expiry"})
    after = int(time.time())
    expiry = collection.get("k", GetOptions(with_expiry=True)).expiryTime.timestamp()
    assert before + 100 <= expiry <= after + 100


def test_a_flushed_bucket_is_empty_and_goes_on(cluster, bucket):
    collection = bucket.default_collection()
    collection.upsert("k", 1)
    cluster.buckets().flush_bucket(bucket.name)
    assert not collection.exists("k").exists
    collection.upsert("k", 2)
    assert collection.get("k").content_as[int] == 2


def test_what_cannot_be_had_is_refused(cluster, key):
    for wish in [{"bucket_type": BucketType.EPHEMERAL}, {"ram_quota_mb": 1}, {"num_replicas": 9}]:
        with pytest.raises(InvalidArgumentException):
            cluster.buckets().create_bucket(CreateBucketSettings(**{"name": key, "ram_quota_mb": 100, **wish}))


def test_there_is_the_default_collection_and_no_other(cluster):
    manager = cluster.bucket("default").collections()
    scopes = manager.get_all_scopes()
    assert [(s.name, [c.name for c in s.collections]) for s in scopes] == [("_default", ["_default"])]
    with pytest.raises(InvalidArgumentException):
        manager.create_scope("inventory")
    with pytest.raises(InvalidArgumentException):
        manager.create_collection("_default", "airlines")
    with pytest.raises(ScopeNotFoundException):
        manager.drop_scope("inventory")
    with pytest.raises(CollectionNotFoundException):
        manager.drop_collection("_default", "airlines")


def test_a_user_can_log_in_until_they_are_dropped(server, cluster, key):
    users = cluster.users()
    with pytest.raises(InvalidArgumentException):
        users.upsert_user(User(username=key, password="secret", roles=[Role(name="data_reader", bucket="default")]))
    role = Role(name="bucket_full_access", bucket="*")
    users.upsert_user(User(username=key, password="secret", roles=[role]))
    assert users.get_user(key).user.roles == {role}
    assert {user.user.username for user in users.get_all_users()} == {"Administrator", key}
    theirs = server.connect("secret", key)
    theirs.bucket("default").default_collection().upsert(key, 1)
    theirs.close()
    users.drop_user(key)
    with pytest.raises(AuthenticationException):
        server.connect("secret", key).bucket("default")


def test_a_changed_password_is_the_password(server, cluster, key):
    cluster.users().upsert_user(User(username=key, password="old", roles=[Role(name="admin")]))
    theirs = server.connect("old", key)
    theirs.users().change_password("new")
    theirs.close()
    server.connect("new", key).close()
    cluster.users().drop_user(key)


def test_the_cluster_describes_itself(cluster):
    (node,) = cluster.cluster_info().nodes
    assert node["services"] == ["kv"]
    assert cluster.users().get_user("Administrator").user.roles == {Role(name="admin")}
    assert PASSWORD not in str(cluster.diagnostics().as_json())


def test_services_that_do_not_exist_say_so_at_once(cluster):
    with pytest.raises(ServiceUnavailableException):
        cluster.query("select 1").execute()
    with pytest.raises(FeatureUnavailableException):
        list(cluster.bucket("default").default_collection().scan(RangeScan()))
