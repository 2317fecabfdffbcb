//! A replica whose history is not its peer's: what it forgets, and that nothing of it comes back.

mod common;

use std::sync::Arc;

use common::link::*;
use common::*;
use engine::*;
use parking_lot::Mutex;
use types::{Cas, Datatype, KeyBuf, Level, Meta, RevSeqno, Seqno, VbState};

fn document<'a>(key: &'a KeyBuf, seqno: u64, value: &'a [u8]) -> Given<'a> {
    let (seqno, cas, rev) = (Seqno(seqno), Cas(seqno << 16), RevSeqno(1));
    let meta = Meta { seqno, cas, rev, flags: 0, expiry: 0, datatype: Datatype::RAW, deleted: None };
    Given { key: key.as_key(), meta, value: Some(value) }
}

fn replica(w: World) -> World {
    w.bucket.set_vb_state(VB, VbState::Replica, Some(topology(&[&["a", "b"]]))).unwrap();
    w
}

/// A snapshot of one document each: keys `k<seqno>`.
fn follow(w: &World, seqnos: impl IntoIterator<Item = u64>, value: &[u8]) {
    for seqno in seqnos {
        let key = k(&format!("k{seqno}"));
        w.bucket.begin_snapshot(VB, memory(seqno, seqno)).unwrap();
        w.bucket.apply(VB, &Change::Document(document(&key, seqno, value))).unwrap();
    }
}

fn roll_back(w: &World, to: u64) -> Result<Seqno, OpError> {
    let told = Arc::new(Mutex::new(None));
    let tell = Arc::clone(&told);
    w.bucket.roll_back(VB, Seqno(to), Box::new(move |result| *tell.lock() = Some(result)));
    w.settle();
    let result = told.lock().take();
    result.expect("told")
}

fn held(w: &World, seqnos: impl IntoIterator<Item = u64>) -> Vec<u64> {
    seqnos.into_iter().filter(|seqno| w.op(&format!("k{seqno}"), Op::GetReplica).is_ok()).collect()
}

fn high(w: &World) -> u64 {
    w.bucket.vbucket(VB).unwrap().log.marks.high().0
}

/// Everything in the file, as one commit more.
fn file(w: &World) {
    w.settle();
    w.advance_s(20);
    assert_eq!(w.bucket.vbucket(VB).unwrap().log.marks.filed().0, high(w));
}

#[test]
fn what_is_newer_is_gone_and_stays_gone() {
    for world in [World::new, World::logged] {
        let w = replica(world(1));
        follow(&w, 1..=10, b"common");
        file(&w);
        follow(&w, 11..=20, b"common");
        file(&w);
        follow(&w, 21..=30, b"theirs");
        file(&w);
        // These are in the log only, if there is one.
        follow(&w, 31..=40, b"theirs");
        w.bucket.begin_snapshot(VB, memory(41, 41)).unwrap();
        let key = k("prepared");
        w.bucket.apply(VB, &Change::Prepare { given: document(&key, 41, b"theirs"), level: Level::Majority }).unwrap();
        w.settle();

        assert_eq!(roll_back(&w, 25), Ok(Seqno(20)), "the last whole state that is on disk");
        assert_eq!((held(&w, 1..=41), high(&w)), ((1..=20).collect(), 20));
        assert_eq!((w.bucket.items(), w.bucket.high_prepared(VB)), (20, Some(Seqno(0))));
        let point = w.bucket.resume_point(VB).unwrap();
        assert_eq!((point.seqno, point.snapshot_start, point.snapshot_end), (Seqno(20), Seqno(20), Seqno(20)));

        let w = w.restart();
        assert_eq!((held(&w, 1..=41), high(&w)), ((1..=20).collect(), 20), "the log brings nothing back");
        follow(&w, [22, 35], b"ours");
        w.advance_s(1);
        let w = w.restart();
        assert_eq!((held(&w, 1..=41), high(&w)), ((1..=20).chain([22, 35]).collect(), 35));
        file(&w);
        let w = w.restart();
        assert_eq!(w.op("k35", Op::GetReplica).map(|reply| body(&reply)).unwrap(), b"ours");
        assert_eq!(w.bucket.items(), 22);
        w.bucket.set_vb_state(VB, VbState::Active, Some(topology(&[&["b"]]))).unwrap();
        assert_eq!(w.set("next", "v").seqno, Seqno(36));
        assert_eq!(w.get("prepared"), Err(OpError::NotFound));
    }
}

#[test]
fn without_an_earlier_state_nothing_is_left() {
    for world in [World::new, World::logged] {
        for is_filed in [false, true] {
            let w = replica(world(1));
            follow(&w, 5..=9, b"theirs");
            if is_filed {
                file(&w);
            }
            w.settle();
            assert_eq!(roll_back(&w, 3), Ok(Seqno(0)));
            assert_eq!((held(&w, 5..=9), w.bucket.items(), high(&w)), (vec![], 0, 0));
            follow(&w, [2], b"ours");
            // A change that nobody waits for is written to the log soon, not at once.
            w.advance_s(1);
            let w = w.restart();
            assert_eq!((held(&w, 1..=9), w.bucket.items(), high(&w)), (vec![2], 1, 2), "{is_filed}");
            assert_eq!(w.bucket.vb_state(VB), Some(VbState::Replica));
        }
    }
}

#[test]
fn a_second_rollback_does_not_find_what_the_first_made_void() {
    for world in [World::new, World::logged] {
        let w = replica(world(1));
        for end in [10, 20, 30] {
            follow(&w, [end], b"theirs");
            file(&w);
        }
        assert_eq!(roll_back(&w, 10), Ok(Seqno(10)));
        follow(&w, [15], b"ours");
        file(&w);
        follow(&w, [40], b"ours");
        file(&w);
        assert_eq!(roll_back(&w, 35), Ok(Seqno(15)));
        assert_eq!(held(&w, 1..=40), [10, 15]);
        assert_eq!(roll_back(&w, 12), Ok(Seqno(10)));
        let w = w.restart();
        assert_eq!(held(&w, 1..=40), [10]);
    }
}

#[test]
fn half_a_snapshot_is_no_state_to_go_back_to() {
    let w = replica(World::new(1));
    follow(&w, [10], b"v");
    file(&w);
    w.bucket.begin_snapshot(VB, memory(11, 20)).unwrap();
    let (one, other) = (k("k12"), k("k20"));
    w.bucket.apply(VB, &Change::Document(document(&one, 12, b"v"))).unwrap();
    w.settle();
    w.bucket.apply(VB, &Change::Document(document(&other, 20, b"v"))).unwrap();
    w.settle();
    assert_eq!(roll_back(&w, 15), Ok(Seqno(10)));
    assert_eq!(held(&w, [10, 12, 20]), [10]);
}

#[test]
fn histories_that_began_later_are_forgotten_and_an_active_vbucket_has_none_but_its_own() {
    let w = replica(World::new(1));
    let first = w.bucket.failover_log(VB).unwrap()[0];
    follow(&w, [10], b"v");
    file(&w);
    w.bucket.set_vb_state(VB, VbState::Active, Some(topology(&[&["b"]]))).unwrap();
    refused_rollback(&w);
    w.set("k11", "its own");
    w.settle();
    w.bucket.set_vb_state(VB, VbState::Replica, None).unwrap();
    assert_eq!(w.bucket.failover_log(VB).unwrap().len(), 2);
    assert_eq!(roll_back(&w, 9), Ok(Seqno(0)));
    assert_eq!(w.bucket.failover_log(VB).unwrap(), [first]);
    assert_eq!(w.bucket.resume_point(VB).unwrap().uuid, first.uuid);
    let cas = w.bucket.vbucket(VB).unwrap().log.max_cas();
    follow(&w, [1], b"v");
    w.bucket.set_vb_state(VB, VbState::Active, None).unwrap();
    assert!(w.set("k", "v").cas > cas, "a CAS is given out once");
}

fn refused_rollback(w: &World) {
    assert_eq!(roll_back(w, 1), Err(OpError::NotMyVbucket));
}
