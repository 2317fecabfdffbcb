//! What a compaction of a vBucket's file means for its documents.

mod common;

use std::sync::Arc;

use common::*;
use engine::*;
use parking_lot::Mutex;
use persist::{BucketSpec, CompactionReport, Eviction, Purge};
use types::VbId;

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
