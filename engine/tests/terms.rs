//! What a bucket makes of every write: its longest life, its least durability, the form its value is kept in.

mod common;

use common::*;
use engine::*;
use persist::{BucketSpec, Compression, StoreError, WriteRules};
use types::{Cas, Datatype, Level, RevSeqno};

fn with(rules: WriteRules) -> World {
    World::with(1, BucketSpec { rules, ..spec() })
}

#[test]
fn nothing_outlives_the_longest_life() {
    let w = with(WriteRules { max_ttl_s: 100, ..WriteRules::default() });
    let expiry = |key| w.meta(key).1;
    let latest = w.now_s() + 100;
    for (key, asked, kept) in [("never", 0, latest), ("later", 101, latest), ("sooner", 99, latest - 1)] {
        mutated(w.op(key, store(StoreMode::Set, asked, b"1")));
        assert_eq!(expiry(key), kept, "{key}");
    }
    w.advance_s(10);
    cas_of(w.op("sooner", Op::Touch { expiry: 0 }));
    assert_eq!(expiry("sooner"), latest + 10);
    w.op("counter", Op::Arithmetic { delta: Delta::Increment(1), initial: Some(1), expiry: 0 }).unwrap();
    assert_eq!(expiry("counter"), latest + 10);
    let copy = WithMeta {
        mode: WithMetaMode::Set,
        flags: 0,
        expiry: latest + 500,
        rev: RevSeqno(9),
        cas: Cas(9),
        options: 0,
        datatype: Datatype::RAW,
        value: b"v",
    };
    mutated(w.op("copy", Op::WithMeta(copy)));
    assert_eq!(expiry("copy"), latest + 10);
    mutated(w.op("never", Op::Concat { end: End::Append, datatype: Datatype::RAW, value: b"1" }));
    assert_eq!(expiry("never"), latest, "what sets no expiry changes none");
}

#[test]
fn every_write_waits_for_the_least_durability() {
    let w = with(WriteRules { min_durability: Some(Level::MajorityAndPersistActive), ..WriteRules::default() });
    let counter = Op::Arithmetic { delta: Delta::Increment(1), initial: Some(1), expiry: 0 };
    let append = Op::Concat { end: End::Append, datatype: Datatype::RAW, value: b"1" };
    let key = k("k");
    for op in [counter, set("2"), append, Op::Delete] {
        let number = w.start(&request(&key, op));
        w.settle();
        w.answer(number).expect("on disk").unwrap();
    }
    let number = w.start(&durable(&key, Level::Majority, set("v")));
    refused(w.run(&durable(&key, Level::PersistMajority, set("x"))), OpError::SyncWriteInProgress);
    w.settle();
    mutated(w.answer(number).expect("on disk"));
    cas_of(w.op("k", Op::Touch { expiry: 5 }));
}

#[test]
fn compressed_values_are_kept_inflated_if_the_bucket_says_so() {
    let packed = document::snappy::compress(&[b'x'; 1000]).expect("that shrinks");
    let compressed =
        Op::Store { mode: StoreMode::Set, flags: 0, expiry: 0, datatype: Datatype::SNAPPY, value: &packed };
    for (compression, kept) in [(Compression::Off, Datatype::RAW), (Compression::Passive, Datatype::SNAPPY)] {
        let w = with(WriteRules { compression, ..WriteRules::default() });
        mutated(w.op("k", compressed));
        let Ok(Reply::Value { item, .. }) = w.op("k", Op::Get) else { panic!("there") };
        assert_eq!(item.meta().datatype, kept, "{compression:?}");
    }
}

#[test]
fn new_settings_hold_at_once_and_after_a_restart() {
    let w = World::new(1);
    mutated(w.op("before", set("v")));
    let changed = BucketSpec {
        quota_bytes: 20 << 20,
        flush_enabled: false,
        rules: WriteRules { max_ttl_s: 7, ..WriteRules::default() },
        ..spec()
    };
    w.engine.change_bucket(changed.clone()).unwrap();
    assert_eq!((w.bucket.quota_bytes(), &*w.bucket.spec()), (20 << 20, &changed));
    mutated(w.op("after", set("v")));
    assert_eq!((w.meta("before").1, w.meta("after").1), (0, w.now_s() + 7));
    let w = w.restart();
    assert_eq!((w.bucket.quota_bytes(), &*w.bucket.spec()), (20 << 20, &changed));
}

#[test]
fn what_the_files_are_made_of_stays() {
    let w = World::new(1);
    for other in [
        BucketSpec { vbuckets: 8, ..spec() },
        BucketSpec { replicas: 1, ..spec() },
        BucketSpec { uuid: types::BucketUuid(2), ..spec() },
        BucketSpec { eviction: persist::Eviction::Full, ..spec() },
    ] {
        assert!(matches!(w.engine.change_bucket(other), Err(StoreError::BadSpec { .. })));
    }
    let other = BucketSpec { name: "other".into(), ..spec() };
    assert!(matches!(w.engine.change_bucket(other), Err(StoreError::NoSuchBucket(_))));
    assert_eq!(*w.bucket.spec(), spec());
}
