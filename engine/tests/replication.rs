//! Two nodes, one following the other: what a sync write waits for, what a replica holds, and what a change of roles leaves.

mod common;

use std::time::Duration;

use common::link::*;
use common::*;
use engine::*;
use env::sim::{Fault, FaultPlan, Op as Io, Rule};
use types::{Cas, Datatype, DeleteSource, Level, Meta, RevSeqno, Seqno, VbState};

const LEVELS: [Level; 3] = [Level::Majority, Level::MajorityAndPersistActive, Level::PersistMajority];

fn pair() -> (World, World) {
    let (a, b) = (World::new(1), World::new(2));
    a.bucket.set_vb_state(VB, VbState::Active, Some(topology(&[&["a", "b"]]))).unwrap();
    b.bucket.set_vb_state(VB, VbState::Replica, Some(topology(&[&["a", "b"]]))).unwrap();
    (a, b)
}

fn ambiguous(answer: Option<OpResult>) {
    assert!(matches!(answer, Some(Err(OpError::Ambiguous(_)))), "{answer:?}");
}

fn get_replica(w: &World, key: &str) -> Result<Vec<u8>, OpError> {
    w.op(key, Op::GetReplica).map(|reply| body(&reply))
}

fn stop_disk(w: &World) {
    let refuse = |op| Rule::new(op, Fault::Errno(5)).sticky();
    w.sim.storage.arm(FaultPlan::new().rule(refuse(Io::Write)).rule(refuse(Io::Create)));
}

fn given<'a>(key: &'a types::KeyBuf, seqno: u64, value: Option<&'static [u8]>) -> Given<'a> {
    let deleted = value.is_none().then_some(DeleteSource::Explicit);
    let (seqno, cas, rev) = (Seqno(seqno), Cas(seqno << 16), RevSeqno(1));
    let meta = Meta { seqno, cas, rev, flags: 0, expiry: 0, datatype: Datatype::RAW, deleted };
    Given { key: key.as_key(), meta, value }
}

#[test]
fn each_level_waits_for_what_it_says() {
    for level in LEVELS {
        let (a, b) = pair();
        let link = Link::open(&a, &b, "b");
        a.settle();
        let key = k("k");
        stop_disk(&a);
        stop_disk(&b);
        let number = a.start(&durable(&key, level, set("v")));
        link.run();
        let in_memory = a.answer(number);
        assert_eq!(in_memory.is_some(), level == Level::Majority, "{level:?}");
        assert_eq!(b.bucket.high_prepared(VB).unwrap() == Seqno(1), level != Level::PersistMajority);
        a.sim.storage.arm(FaultPlan::new());
        a.advance_s(10);
        link.run();
        let on_active = in_memory.or(a.answer(number));
        assert_eq!(on_active.is_some(), level != Level::PersistMajority, "{level:?}");
        b.sim.storage.arm(FaultPlan::new());
        b.advance_s(10);
        link.run();
        mutated(on_active.or(a.answer(number)).expect("on both disks"));
        assert_eq!(get_replica(&b, "k").unwrap(), b"v");
    }
}

#[test]
fn a_replica_shows_what_is_committed_and_nothing_else() {
    let (a, b) = pair();
    let link = Link::open(&a, &b, "b");
    a.set("k", "old");
    let key = k("k");
    let number = a.start(&durable(&key, Level::Majority, set("new")));
    link.carry();
    assert_eq!(get_replica(&b, "k").unwrap(), b"old");
    refused(b.op("k", Op::Get), OpError::NotMyVbucket);
    link.ack();
    let Mutated { cas, .. } = mutated(a.answer(number).unwrap());
    assert_eq!(get_replica(&b, "k").unwrap(), b"old");
    link.run();
    let Ok(Reply::Value { item, .. }) = b.op("k", Op::GetReplica) else { panic!() };
    assert_eq!((item.value(), item.meta().cas), (&b"new"[..], cas), "prepare and commit share the CAS");
    let (on_a, on_b) = (a.bucket.items(), b.bucket.items());
    assert_eq!((on_a, on_b), (1, 1));
}

#[test]
fn what_no_majority_has_in_time_is_ambiguous_on_both_nodes_alike() {
    let (a, b) = pair();
    let link = Link::open(&a, &b, "b");
    a.set("k", "old");
    let key = k("k");
    let soon = Requirement { level: Level::Majority, timeout: Some(Duration::from_millis(5)) };
    let number = a.start(&Request { durability: Some(soon), ..request(&key, set("new")) });
    a.advance_s(1);
    ambiguous(a.answer(number));
    link.run();
    assert_eq!((a.get("k").unwrap(), get_replica(&b, "k").unwrap()), (b"old".to_vec(), b"old".to_vec()));
    assert_eq!(a.bucket.vbucket(VB).unwrap().sync_writes(), 0);
    a.set("k", "free again");
}

#[test]
fn what_a_promoted_replica_finds_prepared_is_settled_before_anybody_sees_it() {
    let (a, b) = pair();
    let link = Link::open(&a, &b, "b");
    a.set("k", "old");
    let key = k("k");
    a.start(&durable(&key, Level::PersistMajority, set("new")));
    link.run();
    // The active knows that it is committed, and tells; but the replica did not hear of it.
    let other = k("other");
    let unheard = a.start(&durable(&other, Level::PersistMajority, set("unheard")));
    link.carry();
    b.settle();
    link.ack();
    a.settle();
    mutated(a.answer(unheard).expect("acknowledged"));
    // From here on there is only b, and then somebody who follows it.
    b.bucket.set_vb_state(VB, VbState::Active, Some(topology(&[&["b", "c"]]))).unwrap();
    refused(b.op("other", Op::Get), OpError::ReCommitInProgress);
    refused(b.op("other", set("x")), OpError::ReCommitInProgress);
    b.advance_s(3600);
    refused(b.op("other", Op::Get), OpError::ReCommitInProgress);
    assert_eq!(b.get("k").unwrap(), b"new");
    let histories = b.bucket.failover_log(VB).unwrap();
    assert_eq!((histories.len(), histories[0].seqno), (2, b.bucket.resume_point(VB).unwrap().seqno));
    let c = World::new(3);
    let next = Link::open(&b, &c, "c");
    next.run();
    assert_eq!(b.get("other").unwrap(), b"unheard");
    assert_eq!(get_replica(&c, "other").unwrap(), b"unheard");
}

/// Goal: what changes before its vBucket is loaded is counted once. Method: a replica is told of a document that it has on its disk
/// only, or of a prepare of it, and becomes active; that is filed, and then everything is loaded.
#[test]
fn a_document_that_changes_before_it_is_loaded_is_counted_once() {
    for is_prepared in [false, true] {
        let b = World::new(2);
        let topology = || Some(topology(&[&["b"]]));
        b.bucket.set_vb_state(VB, VbState::Replica, topology()).unwrap();
        let key = k("k");
        b.bucket.begin_snapshot(VB, memory(0, 1)).unwrap();
        b.bucket.apply(VB, &Change::Document(given(&key, 1, Some(b"old")))).unwrap();
        b.file_everything();
        let b = b.restart();
        assert_eq!(b.bucket.warm_up_progress().vbuckets_loaded, 0);
        b.bucket.begin_snapshot(VB, memory(2, 2)).unwrap();
        let given = given(&key, 2, Some(b"new"));
        let change = match is_prepared {
            true => Change::Prepare { given, level: Level::Majority },
            false => Change::Document(given),
        };
        b.bucket.apply(VB, &change).unwrap();
        b.bucket.set_vb_state(VB, VbState::Active, topology()).unwrap();
        b.file_everything();
        b.advance_s(60);
        assert_eq!(b.get("k").unwrap(), b"new");
        assert_eq!((b.bucket.items(), b.bucket.warm_up_progress().vbuckets_loaded), (1, 1), "{is_prepared}");
    }
}

/// What comes from a disk is not in the order of the prepares: whoever has half of it may have one decided, and not those before.
#[test]
fn one_promoted_in_the_middle_of_a_disk_snapshot_forgets_no_prepare_nor_does_who_follows_it() {
    for (world, is_filed) in [(World::new as fn(u64) -> World, true), (World::new, false), (World::logged, false)] {
        let (b, c) = (world(2), world(3));
        b.bucket.set_vb_state(VB, VbState::Replica, Some(topology(&[&["a", "b"]]))).unwrap();
        let (first, second) = (k("first"), k("second"));
        b.bucket.begin_snapshot(VB, memory(0, 2)).unwrap();
        for (key, seqno) in [(&first, 1), (&second, 2)] {
            let given = given(key, seqno, Some(b"new"));
            b.bucket.apply(VB, &Change::Prepare { given, level: Level::PersistMajority }).unwrap();
        }
        if is_filed {
            b.file_everything();
        }
        let from_disk = Some(Seqno(2));
        b.bucket.begin_snapshot(VB, SnapshotMarker { start: Seqno(2), end: Seqno(9), from_disk }).unwrap();
        let decided = given(&second, 2, Some(b"new"));
        let decided = Given { meta: Meta { seqno: Seqno(4), ..decided.meta }, ..decided };
        b.bucket.apply(VB, &Change::Document(decided)).unwrap();
        b.bucket.set_vb_state(VB, VbState::Active, Some(topology(&[&["b", "c"]]))).unwrap();
        let link = Link::open(&b, &c, "c");
        link.carry();
        link.close();
        // Nobody says what c has, so that nothing is settled; and then both begin again from their disks.
        let [b, c] = [b, c].map(|world| {
            world.file_everything();
            world.restart()
        });
        c.bucket.set_vb_state(VB, VbState::Active, Some(topology(&[&["c", "b"]]))).unwrap();
        for world in [&b, &c] {
            refused(world.op("first", Op::Get), OpError::ReCommitInProgress);
            assert_eq!(world.get("second").unwrap(), b"new");
        }
    }
}

#[test]
fn too_few_nodes_end_what_is_under_way_but_not_what_may_be_known() {
    let (a, b) = pair();
    let link = Link::open(&a, &b, "b");
    let (old, new) = (k("old"), k("new"));
    let first = a.start(&durable(&old, Level::Majority, set("v")));
    link.carry();
    let role = |chain: &[&str]| (VbState::Active, Some(topology(&[chain])));
    let (state, chains) = role(&["a", "-"]);
    a.bucket.set_vb_state(VB, state, chains).unwrap();
    ambiguous(a.answer(first));
    refused(a.run(&durable(&new, Level::Majority, set("v"))), OpError::DurabilityImpossible);
    // The replica has it as well, and there it may have been acknowledged.
    let (state, chains) = role(&["b", "-"]);
    b.bucket.set_vb_state(VB, state, chains).unwrap();
    assert_eq!(b.get("old").unwrap(), b"v", "it is settled by the one that is left");
    refused(b.run(&durable(&new, Level::Majority, set("v"))), OpError::DurabilityImpossible);
}

#[test]
fn a_replica_outlives_its_restart_with_what_it_said_it_has() {
    let (a, b) = pair();
    let link = Link::open(&a, &b, "b");
    let key = k("k");
    a.set("plain", "1");
    a.start(&durable(&key, Level::PersistMajority, set("v")));
    link.carry();
    b.settle();
    let said = b.bucket.high_prepared(VB).unwrap();
    assert_eq!(said, Seqno(2));
    link.close();
    let b = b.restart();
    assert_eq!(b.bucket.vb_state(VB), Some(VbState::Replica));
    assert_eq!(b.bucket.high_prepared(VB), Some(said));
    assert_eq!((get_replica(&b, "plain").unwrap(), get_replica(&b, "k")), (b"1".to_vec(), Err(OpError::NotFound)));
    let link = Link::open(&a, &b, "b");
    link.run();
    assert_eq!(get_replica(&b, "k").unwrap(), b"v");
}

/// Goal: only what has to be on disk before something is said costs its link a sync, and the link may make it itself. Method: a
/// replica with a commit log and without, and no thread but the one that applies.
#[test]
fn a_prepare_for_memory_is_said_at_once_and_one_for_the_disk_after_a_sync_by_whoever_took_it() {
    for (b, after_own_sync) in [(World::new(1), 1), (World::logged(2), 2)] {
        let bucket = &b.bucket;
        bucket.set_vb_state(VB, VbState::Replica, None).unwrap();
        b.settle();
        let key = k("k");
        let take = |seqno, level| {
            bucket.begin_snapshot(VB, memory(seqno, seqno)).unwrap();
            bucket.take(VB, &Change::Prepare { given: given(&key, seqno, Some(b"v")), level }).unwrap()
        };
        let said = || bucket.high_prepared(VB).unwrap().0;
        assert_eq!((take(1, Level::Majority), said()), (false, 1));
        assert_eq!((take(2, Level::PersistMajority), said()), (true, 1));
        bucket.make_durable(&[VB], true);
        assert_eq!(said(), after_own_sync);
        assert!(take(3, Level::PersistMajority));
        bucket.make_durable(&[VB], false);
        b.settle();
        assert_eq!(said(), 3);
    }
}

#[test]
fn a_restart_in_the_middle_of_a_snapshot_goes_on_with_all_of_it() {
    let (_, b) = pair();
    let keys: Vec<_> = (0..4).map(|n| k(&format!("k{n}"))).collect();
    let bucket = &b.bucket;
    bucket.begin_snapshot(VB, memory(0, 10)).unwrap();
    bucket.apply(VB, &Change::Document(given(&keys[0], 4, Some(b"v")))).unwrap();
    bucket.apply(VB, &Change::Document(given(&keys[1], 10, Some(b"v")))).unwrap();
    bucket.begin_snapshot(VB, memory(11, 20)).unwrap();
    bucket
        .apply(VB, &Change::Prepare { given: given(&keys[2], 13, Some(b"v")), level: Level::PersistMajority })
        .unwrap();
    b.settle();
    assert_eq!(bucket.high_prepared(VB), Some(Seqno(0)));
    let b = b.restart();
    let point = b.bucket.resume_point(VB).unwrap();
    assert_eq!((point.seqno, point.snapshot_start, point.snapshot_end), (Seqno(13), Seqno(10), Seqno(20)));
    assert_eq!(b.bucket.high_prepared(VB), Some(Seqno(0)));
    b.bucket.begin_snapshot(VB, memory(10, 20)).unwrap();
    b.bucket.apply(VB, &Change::Document(given(&keys[3], 20, Some(b"v")))).unwrap();
    b.settle();
    assert_eq!(b.bucket.high_prepared(VB), Some(Seqno(13)));
    // A new history begins where the last whole state was, wherever the vBucket ends.
    b.bucket.begin_snapshot(VB, memory(21, 30)).unwrap();
    b.bucket.apply(VB, &Change::Document(given(&keys[0], 25, Some(b"w")))).unwrap();
    b.bucket.set_vb_state(VB, VbState::Active, Some(topology(&[&["b"]]))).unwrap();
    assert_eq!(b.bucket.failover_log(VB).unwrap()[0].seqno, Seqno(20));
    assert_eq!((b.get("k2").unwrap(), b.get("k0").unwrap()), (b"v".to_vec(), b"w".to_vec()));
    assert!(b.set("next", "v").seqno > Seqno(25));
}

#[test]
fn a_snapshot_from_a_disk_says_what_became_of_prepares() {
    let (_, b) = pair();
    let keys: Vec<_> = (0..5).map(|n| k(&format!("k{n}"))).collect();
    let prepare =
        |n: usize, seqno| Change::Prepare { given: given(&keys[n], seqno, Some(b"new")), level: Level::Majority };
    let bucket = &b.bucket;
    bucket.begin_snapshot(VB, memory(0, 3)).unwrap();
    for (n, seqno) in [(0, 1), (1, 2), (2, 3)] {
        bucket.apply(VB, &prepare(n, seqno)).unwrap();
    }
    assert_eq!(bucket.high_prepared(VB), Some(Seqno(3)));
    // Of the three one was committed and overwritten since, one committed, one aborted so long ago that nothing is left.
    let marker = SnapshotMarker { start: Seqno(3), end: Seqno(20), from_disk: Some(Seqno(9)) };
    bucket.begin_snapshot(VB, marker).unwrap();
    bucket.apply(VB, &Change::Document(given(&keys[1], 7, Some(b"two")))).unwrap();
    bucket.apply(VB, &prepare(3, 9)).unwrap();
    bucket.apply(VB, &Change::Document(given(&keys[3], 10, Some(b"three")))).unwrap();
    bucket.apply(VB, &prepare(4, 12)).unwrap();
    b.settle();
    // Half of it: after a restart nothing is taken for decided that the file does not show to be.
    let b = b.restart();
    let bucket = &b.bucket;
    assert_eq!(bucket.resume_point(VB).unwrap().snapshot_start, Seqno(3));
    bucket.begin_snapshot(VB, SnapshotMarker { start: Seqno(3), ..marker }).unwrap();
    bucket.apply(VB, &Change::Document(given(&keys[0], 20, Some(b"overwritten")))).unwrap();
    assert_eq!(bucket.high_prepared(VB), Some(Seqno(3)), "not before all of it is durable");
    b.settle();
    assert_eq!(bucket.high_prepared(VB), Some(Seqno(20)));
    let b = b.restart();
    b.bucket.set_vb_state(VB, VbState::Active, Some(topology(&[&["b", "c"]]))).unwrap();
    for (n, expected) in [(0, Ok(&b"overwritten"[..])), (1, Ok(b"two")), (2, Err(OpError::NotFound)), (3, Ok(b"three"))]
    {
        assert_eq!(b.get(&format!("k{n}")).as_deref(), expected.as_ref().map(|value| *value), "k{n}");
    }
    refused(b.op("k4", Op::Get), OpError::ReCommitInProgress);
}

#[test]
fn what_cannot_be_right_is_refused_and_changes_nothing() {
    let (_, b) = pair();
    let (key, bucket) = (k("k"), &b.bucket);
    let document = |seqno| Change::Document(given(&key, seqno, Some(b"v")));
    assert_eq!(bucket.apply(VB, &document(1)), Err(ApplyError::OutsideSnapshot(Seqno(1))));
    bucket.begin_snapshot(VB, memory(0, 5)).unwrap();
    bucket.apply(VB, &document(2)).unwrap();
    assert_eq!(bucket.apply(VB, &document(2)), Err(ApplyError::OutOfOrder { seqno: Seqno(2), high: Seqno(2) }));
    assert_eq!(bucket.apply(VB, &document(6)), Err(ApplyError::OutsideSnapshot(Seqno(6))));
    let commit = Change::Commit { key: key.as_key(), prepared: Seqno(1), seqno: Seqno(3) };
    assert_eq!(bucket.apply(VB, &commit), Err(ApplyError::UnknownPrepare(Seqno(1))));
    assert!(matches!(bucket.apply(VB, &document(1 << 48)), Err(ApplyError::Invalid(_))));
    assert!(matches!(bucket.apply(VB, &Change::Document(given(&key, 0, None))), Err(ApplyError::Invalid(_))));
    assert!(matches!(bucket.begin_snapshot(VB, memory(6, 5)), Err(ApplyError::Invalid(_))));
    bucket.apply(VB, &Change::Document(given(&key, 4, None))).unwrap();
    assert_eq!((get_replica(&b, "k"), bucket.items()), (Err(OpError::NotFound), 0));
    bucket.apply(VB, &Change::Advance { seqno: Seqno(5) }).unwrap();
    b.settle();
    let marks = &bucket.vbucket(VB).unwrap().log.marks;
    assert_eq!((marks.high(), marks.filed()), (Seqno(5), Seqno(5)), "what was left out is durable too");
    bucket.set_vb_state(VB, VbState::Active, None).unwrap();
    assert_eq!(bucket.apply(VB, &document(6)), Err(ApplyError::NotReplica));
    assert_eq!(bucket.begin_snapshot(VB, memory(6, 7)), Err(ApplyError::NotReplica));
}

#[test]
fn a_role_is_durable_when_it_is_answered() {
    let w = World::new(1);
    let role = Role::of(VbState::Replica, Some(topology(&[&["a", "b"]])));
    let outcome = w.bucket.set_vbucket_state(VB, role, &|| w.waiter(7));
    assert!(matches!(outcome, Outcome::Pending));
    assert!(w.answer(7).is_none());
    w.settle();
    assert!(matches!(w.answer(7), Some(Ok(Reply::Done { .. }))));
    let w = w.restart();
    assert_eq!(w.bucket.vb_state(VB), Some(VbState::Replica));
    for nonsense in [&["-", "a"][..], &["a", "a"]] {
        let refused = w.bucket.set_vb_state(VB, VbState::Active, Some(topology(&[nonsense])));
        assert!(matches!(refused, Err(OpError::Invalid(_))), "{nonsense:?}");
    }
}
