//! What a compaction of a vBucket's file means for its documents.

mod common;

use std::sync::Arc;

use common::*;
use engine::*;
use parking_lot::Mutex;
use persist::{BucketSpec, CompactionReport, Eviction, Purge};
use types::{VbId, VbState};

fn compact(w: &World, purge: Purge) -> CompactionReport {
    let told = Arc::new(Mutex::new(None));
    let tell = told.clone();
    w.bucket.store().compact(VbId(0), purge, Box::new(move |result| *tell.lock() = Some(result)));
    w.settle();
    told.lock().take().expect("it has ended").expect("it has not failed")
}

fn tombstones(w: &World) -> u64 {
    w.bucket.store().recovered().iter().find(|file| file.vb == VbId(0)).map_or(0, |file| file.tombstones)
}

/// S22. Goal: a document that expires goes, one that was set anew meanwhile stays. Method: the file has both with an expiry
/// that is over; memory has a newer version of one, in no file yet.
#[test]
fn compaction_ends_what_has_expired_and_not_what_was_set_anew() {
    for eviction in [Eviction::Value, Eviction::Full] {
        let w = World::with(1, BucketSpec { eviction, ..spec() });
        for key in ["old", "renewed", "touched"] {
            mutated(w.op(key, store(StoreMode::Set, 10, b"v")));
        }
        w.set("other", "v");
        w.file_everything();
        w.bucket.squeeze();
        w.advance_s(20);
        mutated(w.op("renewed", set("new")));
        assert_eq!(w.bucket.items(), 4, "nobody has looked at the expired ones");
        compact(&w, Purge::default());
        w.settle();
        assert_eq!((w.get("renewed").unwrap(), w.get("other").unwrap()), (b"new".to_vec(), b"v".to_vec()));
        assert_eq!((w.bucket.items(), tombstones(&w)), (2, 2), "{eviction:?}: deleted, as by a client");
        let w = w.restart();
        assert_eq!(w.get("renewed").unwrap(), b"new");
        assert_eq!((w.get("old"), w.get("touched")), (Err(OpError::NotFound), Err(OpError::NotFound)));
    }
}

/// S22, whenever the newer version comes. Method: a document that has expired is set anew, or made to live on, before each step
/// of the compaction that meets it.
#[test]
fn a_document_that_is_set_anew_at_any_moment_of_a_compaction_survives() {
    for eviction in [Eviction::Value, Eviction::Full] {
        let mut met = 0;
        for steps in 0..30 {
            let w = World::with(steps, BucketSpec { eviction, ..spec() });
            mutated(w.op("k", store(StoreMode::Set, 10, b"v")));
            w.set("other", "v");
            w.file_everything();
            w.bucket.squeeze();
            w.advance_s(20);
            w.bucket.store().compact(VbId(0), Purge { all: true, ..Purge::default() }, Box::new(drop));
            met += (0..steps).filter(|_| w.stepper.step()).count();
            mutated(w.op("k", set("new")));
            w.file_everything();
            assert_eq!(w.get("k").unwrap(), b"new", "{eviction:?} after {steps} steps");
            assert_eq!((w.bucket.items(), w.restart().get("k").unwrap()), (2, b"new".to_vec()));
        }
        assert!(met > 30, "the compaction took no steps");
    }
}

/// S22 on a replica: what ends, and when, only its active says.
#[test]
fn a_replica_keeps_what_has_expired_until_it_is_active() {
    let w = World::new(3);
    mutated(w.op("k", store(StoreMode::Set, 10, b"v")));
    w.set("other", "v");
    w.file_everything();
    w.bucket.set_vb_state(VbId(0), VbState::Replica, None).unwrap();
    w.advance_s(20);
    let high = |w: &World| w.bucket.vbucket(VbId(0)).unwrap().log.marks.high().0;
    compact(&w, Purge::default());
    w.settle();
    assert_eq!((high(&w), w.bucket.items()), (2, 2), "it has appended nothing");
    w.bucket.set_vb_state(VbId(0), VbState::Active, None).unwrap();
    compact(&w, Purge::default());
    w.settle();
    assert_eq!((high(&w), w.bucket.items(), w.get("k")), (3, 1, Err(OpError::NotFound)));
}

/// S21. A deletion that was purged stays a deletion, and revisions go on above it, now and after a restart.
#[test]
fn a_purged_deletion_stays_one_and_its_revision_is_not_used_again() {
    for eviction in [Eviction::Value, Eviction::Full] {
        let w = World::with(2, BucketSpec { eviction, ..spec() });
        for _ in 0..5 {
            w.set("gone", "v");
        }
        mutated(w.op("gone", Op::Delete));
        w.set("last", "v");
        w.file_everything();
        let report = compact(&w, Purge { all: true, ..Purge::default() });
        assert_eq!((report.tombstones_purged, report.purge.0, tombstones(&w)), (1, 6, 0));
        assert_eq!(w.get("gone"), Err(OpError::NotFound));
        let w = w.restart();
        assert_eq!(w.get("gone"), Err(OpError::NotFound));
        assert_eq!(w.get("last").unwrap(), b"v");
        w.set("gone", "again");
        assert!(w.meta("gone").2 > 6, "{eviction:?}: {:?}", w.meta("gone"));
        w.file_everything();
        assert_eq!(w.restart().get("gone").unwrap(), b"again");
    }
}
