//! Synchronous writes: order, visibility, what is told when, and what a restart makes of them.

mod common;

use std::time::Duration;

use common::*;
use engine::*;
use env::sim::{Fault, FaultPlan, Op as Io, Rule};
use types::{Level, Seqno, VbId, VbState};

const EIO: i32 = 5;

fn ambiguous(answer: Option<OpResult>) {
    assert!(matches!(answer, Some(Err(OpError::Ambiguous(_)))), "{answer:?}");
}

/// Flushes fail and are tried again later, for ever.
fn stuck_disk(w: &World) {
    w.sim.storage.arm(
        FaultPlan::new()
            .rule(Rule::new(Io::Write, Fault::Errno(EIO)).sticky())
            .rule(Rule::new(Io::Create, Fault::Errno(EIO)).sticky()),
    );
}

#[test]
fn a_durable_write_is_acknowledged_when_it_is_on_disk_and_not_before() {
    let w = World::new(1);
    let key = k("k");
    for level in [Level::MajorityAndPersistActive, Level::PersistMajority] {
        let number = w.start(&durable(&key, level, set("v")));
        assert!(w.answer(number).is_none());
        w.settle();
        let Mutated { cas, seqno, .. } = mutated(w.answer(number).unwrap());
        let shown = w.op("k", Op::Get).unwrap();
        let Reply::Value { item, .. } = &shown else { panic!() };
        assert_eq!((item.meta().cas, item.seqno()), (cas, seqno.next()), "prepare and commit share the CAS");
        assert!(w.bucket.observe_seqno(VbId(0), w.bucket.vb_uuid(VbId(0)).unwrap()).unwrap().persisted >= seqno);
    }
}

#[test]
fn a_majority_of_one_is_reached_in_memory() {
    let w = World::new(1);
    let key = k("k");
    stuck_disk(&w);
    let number = w.start(&durable(&key, Level::Majority, set("v")));
    mutated(w.answer(number).expect("no disk needed"));
    assert_eq!(w.get("k").unwrap(), b"v");
}

#[test]
fn what_is_pending_is_seen_by_nobody_and_written_by_nobody() {
    let w = World::new(1);
    let old = w.set("k", "old");
    let (key, new) = (k("k"), k("new"));
    let level = Level::PersistMajority;
    let first = w.start(&durable(&key, level, set("pending")));
    let second = w.start(&durable(&new, level, set("pending")));
    assert_eq!(w.get("k").unwrap(), b"old");
    assert_eq!(w.meta("k").3, old.cas);
    assert_eq!(w.get("new"), Err(OpError::NotFound));
    refused(w.op("new", Op::GetMeta), OpError::NotFound);
    for op in [
        set("x"),
        store(StoreMode::Add, 0, b"x"),
        Op::Delete,
        Op::Touch { expiry: 1 },
        Op::GetAndTouch { expiry: 1 },
        Op::GetAndLock { lock_s: 1 },
        Op::Arithmetic { delta: Delta::Increment(1), initial: Some(1), expiry: 0 },
        Op::Concat { end: End::Append, datatype: types::Datatype::RAW, value: b"x" },
    ] {
        for key in ["k", "new"] {
            refused(w.op(key, op), OpError::SyncWriteInProgress);
        }
    }
    refused(w.op_cas("k", old.cas, Op::Unlock), OpError::SyncWriteInProgress);
    refused(w.run(&durable(&key, level, set("x"))), OpError::SyncWriteInProgress);
    assert_eq!(w.bucket.items(), 1);
    w.set("elsewhere", "not held up");
    w.settle();
    mutated(w.answer(first).unwrap());
    mutated(w.answer(second).unwrap());
    assert_eq!((w.get("k").unwrap(), w.get("new").unwrap()), (b"pending".to_vec(), b"pending".to_vec()));
}

#[test]
fn conditions_are_judged_against_the_committed_document() {
    let w = World::new(1);
    let key = k("k");
    let level = Level::PersistMajority;
    refused(w.run(&durable(&key, level, store(StoreMode::Replace, 0, b"v"))), OpError::NotFound);
    refused(w.run(&durable(&key, level, Op::Delete)), OpError::NotFound);
    let first = mutated(w.run(&durable(&key, level, store(StoreMode::Add, 0, b"1"))));
    refused(w.run(&durable(&key, level, store(StoreMode::Add, 0, b"2"))), OpError::Exists);
    let with_cas = |cas| Request { cas, ..durable(&key, level, set("2")) };
    refused(w.run(&with_cas(types::Cas(1))), OpError::Exists);
    mutated(w.run(&with_cas(first.cas)));
    let number = w.start(&durable(&key, level, Op::Delete));
    assert_eq!(w.get("k").unwrap(), b"2", "a pending delete hides nothing");
    w.settle();
    mutated(w.answer(number).unwrap());
    assert_eq!(w.get("k"), Err(OpError::NotFound));
    assert_eq!(w.meta("k").2, 3);
    let counted =
        w.run(&durable(&key, level, Op::Arithmetic { delta: Delta::Increment(1), initial: Some(41), expiry: 0 }));
    assert!(matches!(counted, Ok(Reply::Counter { value: 41, .. })), "{counted:?}");
}

#[test]
fn commits_are_in_the_order_of_their_prepares_whatever_the_levels() {
    let w = World::new(1);
    let keys: Vec<_> = (0..6).map(|n| k(&format!("k{n}"))).collect();
    let levels = [Level::PersistMajority, Level::Majority, Level::MajorityAndPersistActive];
    let numbers: Vec<_> =
        keys.iter().zip(levels.iter().cycle()).map(|(key, level)| w.start(&durable(key, *level, set("v")))).collect();
    // The majority ones wait behind the head that needs the disk.
    assert!(numbers.iter().all(|n| w.answer(*n).is_none()));
    w.settle();
    let prepares: Vec<_> = numbers.iter().map(|n| mutated(w.answer(*n).unwrap()).seqno).collect();
    assert!(prepares.is_sorted());
    let commits: Vec<Seqno> = (0..6)
        .map(|n| match w.op(&format!("k{n}"), Op::Get).unwrap() {
            Reply::Value { item, .. } => item.seqno(),
            other => panic!("{other:?}"),
        })
        .collect();
    assert!(commits.is_sorted() && commits[0] > prepares[0], "{prepares:?} {commits:?}");
}

#[test]
fn a_write_past_its_deadline_is_ambiguous_and_the_key_is_free_again() {
    let w = World::new(1);
    w.set("k", "old");
    w.settle();
    stuck_disk(&w);
    let (key, other) = (k("k"), k("other"));
    let soon = Requirement { level: Level::PersistMajority, timeout: Some(Duration::from_millis(100)) };
    let number = w.start(&Request { durability: Some(soon), ..request(&key, set("new")) });
    let later = w.start(&durable(&other, Level::PersistMajority, set("v")));
    w.stepper.advance(Duration::from_millis(99));
    assert!(w.answer(number).is_none());
    w.stepper.advance(Duration::from_millis(1));
    ambiguous(w.answer(number));
    assert_eq!(w.get("k").unwrap(), b"old");
    w.set("k", "free");
    assert!(w.answer(later).is_none());
    // The default time-out of 30 s, and no traffic to help.
    w.advance_s(30);
    ambiguous(w.answer(later));
    assert_eq!(w.get("other"), Err(OpError::NotFound));
    // The disk comes back; what was aborted stays so.
    w.sim.storage.arm(FaultPlan::new());
    w.advance_s(60);
    let w = w.restart();
    assert_eq!((w.get("k").unwrap(), w.get("other")), (b"free".to_vec(), Err(OpError::NotFound)));
    assert_eq!(w.recovered[0].recommitted, 0);
}

#[test]
fn an_expired_deadline_behind_a_patient_head_waits_its_turn() {
    let w = World::new(1);
    stuck_disk(&w);
    let (head, tail) = (k("head"), k("tail"));
    let within = |ms| Some(Requirement { level: Level::PersistMajority, timeout: Some(Duration::from_millis(ms)) });
    let first = w.start(&Request { durability: within(5000), ..request(&head, set("v")) });
    let second = w.start(&Request { durability: within(10), ..request(&tail, set("v")) });
    w.advance_s(1);
    assert!(w.answer(second).is_none());
    w.advance_s(4);
    ambiguous(w.answer(first));
    ambiguous(w.answer(second));
}

#[test]
fn a_failed_sync_leaves_every_waiting_write_ambiguous_and_refuses_new_ones() {
    let w = World::new(1);
    w.set("k", "old");
    w.settle();
    let key = k("k");
    w.sim.storage.arm(FaultPlan::new().fail_from(Io::Sync, 0, EIO));
    let number = w.start(&durable(&key, Level::PersistMajority, set("new")));
    w.settle();
    ambiguous(w.answer(number));
    assert_eq!(w.get("k").unwrap(), b"old", "reads go on");
    let refusal = w.op("other", set("v"));
    assert!(matches!(&refusal, Err(OpError::Temporary(why)) if why.contains("restart")), "{refusal:?}");
    assert!(matches!(w.op("other", Op::Delete), Err(OpError::Temporary(_))));
    let elsewhere = k("k");
    mutated(w.run(&Request { vb: VbId(1), ..request(&elsewhere, set("v")) }));
    let general = w.bucket.stats("").unwrap();
    assert!(general.contains(&("vb_poisoned_num".into(), "1".into())), "{general:?}");
}

#[test]
fn a_vbucket_that_stops_being_active_leaves_its_writes_ambiguous_and_may_finish_them_later() {
    let w = World::new(1);
    let key = k("k");
    let number = w.start(&durable(&key, Level::PersistMajority, set("v")));
    w.bucket.set_vb_state(VbId(0), VbState::Replica, None).unwrap();
    ambiguous(w.answer(number));
    w.settle();
    w.bucket.set_vb_state(VbId(0), VbState::Active, None).unwrap();
    w.settle();
    assert_eq!(w.get("k").unwrap(), b"v");
}

#[test]
fn inherited_prepares_are_told_apart_until_they_are_settled() {
    let w = World::new(1);
    let key = k("k");
    w.start(&durable(&key, Level::PersistMajority, set("v")));
    w.bucket.set_vb_state(VbId(0), VbState::Replica, None).unwrap();
    stuck_disk(&w);
    w.bucket.set_vb_state(VbId(0), VbState::Active, None).unwrap();
    refused(w.op("k", Op::Get), OpError::ReCommitInProgress);
    refused(w.op("k", set("x")), OpError::ReCommitInProgress);
    w.advance_s(3600);
    refused(w.op("k", Op::Get), OpError::ReCommitInProgress);
    w.sim.storage.arm(FaultPlan::new());
    w.advance_s(60);
    assert_eq!(w.get("k").unwrap(), b"v");
}

#[test]
fn a_chain_with_a_hole_is_impossible_at_once() {
    let w = World::with(1, persist::BucketSpec { replicas: 1, ..spec() });
    let key = k("k");
    for level in [Level::Majority, Level::MajorityAndPersistActive, Level::PersistMajority] {
        refused(w.run(&durable(&key, level, set("v"))), OpError::DurabilityImpossible);
    }
    w.set("k", "plain writes work");
    let set_topology = |topology| w.bucket.set_vb_state(VbId(0), VbState::Active, Some(topology)).unwrap();
    set_topology(vec![vec![Some("me".into())]]);
    mutated(w.run(&durable(&key, Level::Majority, set("v"))));
    set_topology(vec![]);
    assert!(matches!(w.run(&durable(&key, Level::Majority, set("v"))), Err(OpError::Temporary(_))));
}

#[test]
fn a_deleted_bucket_leaves_nobody_waiting() {
    let w = World::new(1);
    let key = k("k");
    let number = w.start(&durable(&key, Level::PersistMajority, set("v")));
    w.engine.delete_bucket("default").unwrap();
    ambiguous(w.answer(number));
    refused(w.op("k", set("x")), OpError::Cancelled);
    assert!(w.engine.bucket("default").is_none());
    assert!(w.engine.create_bucket(spec()).is_ok());
}

/// A prepare that reached the disk without its commit was perhaps acknowledged: a restart commits it before anyone looks.
#[test]
fn prepares_found_on_disk_are_committed_before_clients_come_in() {
    let mut w = World::new(1);
    w.set("plain", "v");
    for (n, delete) in [(0, false), (1, true)] {
        let key = k("k");
        let op = if delete { Op::Delete } else { set("durable") };
        w.start(&durable(&key, Level::PersistMajority, op));
        // The first flush writes the prepare; the commit comes of it and is not written any more.
        while w.bucket.stats("vbucket-seqno 0").unwrap()[0].1 == w.bucket.stats("vbucket-seqno 0").unwrap()[1].1 {
            if !w.stepper.step() || w.bucket.stats("durability-monitor 0").unwrap()[1].1 == "0" {
                break;
            }
        }
        w = w.restart();
        assert_eq!(w.recovered[0].recommitted, 1, "round {n}");
        let expected = if delete { Err(OpError::NotFound) } else { Ok(b"durable".to_vec()) };
        assert_eq!(w.get("k"), expected);
        assert_eq!(w.bucket.items(), 2 - u64::from(delete));
        w.settle();
        w = w.restart();
        assert_eq!(w.recovered[0].recommitted, 0);
        assert_eq!(w.get("k"), expected);
    }
}

#[test]
fn a_prepare_of_a_replica_outlives_a_restart_and_is_completed_once_it_is_active() {
    let w = World::new(1);
    let key = k("k");
    let number = w.start(&durable(&key, Level::PersistMajority, set("v")));
    w.bucket.set_vb_state(VbId(0), VbState::Replica, None).unwrap();
    ambiguous(w.answer(number));
    w.settle();
    let w = w.restart();
    assert_eq!((w.bucket.vb_state(VbId(0)), w.recovered[0].recommitted), (Some(VbState::Replica), 0));
    w.bucket.set_vb_state(VbId(0), VbState::Active, None).unwrap();
    w.settle();
    assert_eq!(w.get("k").unwrap(), b"v");
}

#[test]
fn nobody_waits_for_a_seqno_of_a_deleted_bucket() {
    let w = World::new(1);
    w.engine.delete_bucket("default").unwrap();
    let outcome = w.bucket.seqno_persistence(VbId(0), Seqno(5), &|| w.waiter(99));
    assert!(matches!(outcome, Outcome::Done(Err(OpError::Cancelled))), "{outcome:?}");
}
