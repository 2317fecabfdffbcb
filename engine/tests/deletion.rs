//! A vBucket that is deleted: who may do it, who is told, what is left, and what it may become again.

mod common;

use common::link::*;
use common::*;
use engine::*;
use types::{Cas, Datatype, KeyBuf, Level, Meta, RevSeqno, Seqno, VbState};

fn set_state(w: &World, state: VbState) {
    w.bucket.set_vb_state(VB, state, None).unwrap();
    w.settle();
}

/// What nobody waits for becomes durable before long.
fn persist(w: &World) {
    w.advance_s(1);
    let marks = &w.bucket.vbucket(VB).unwrap().log.marks;
    assert_eq!(marks.durable(), marks.high());
}

fn delete(w: &World) {
    set_state(w, VbState::Dead);
    w.bucket.delete_vbucket(VB).unwrap();
}

fn files(w: &World) -> Vec<String> {
    let names = w.env.storage.list(std::path::Path::new("/data/buckets/default")).unwrap();
    names.into_iter().filter(|name| name.starts_with("0.couch")).collect()
}

#[test]
fn only_a_dead_vbucket_is_deleted_and_only_once() {
    let w = World::new(1);
    w.set("k", "v");
    for state in [VbState::Active, VbState::Replica, VbState::Pending] {
        set_state(&w, state);
        assert!(matches!(w.bucket.delete_vbucket(VB), Err(OpError::Invalid(_))), "{state:?}");
        assert_eq!(w.bucket.vb_state(VB), Some(state));
    }
    delete(&w);
    assert_eq!((w.bucket.vb_state(VB), w.bucket.items(), files(&w).len()), (None, 0, 0));
    assert_eq!(w.bucket.delete_vbucket(VB), Err(OpError::NotMyVbucket));
    refused(w.op("k", Op::Get), OpError::NotMyVbucket);
}

#[test]
fn it_may_be_made_again_at_once_and_has_nothing_to_do_with_what_it_was() {
    for world in [World::new, World::logged] {
        let mut w = world(2);
        for life in 0..3 {
            let first = w.set("k", "v");
            w.file_everything();
            w.set("only in the log", "v");
            let uuid = w.bucket.vb_uuid(VB);
            delete(&w);
            set_state(&w, VbState::Active);
            assert_eq!((w.get("k"), w.bucket.items()), (Err(OpError::NotFound), 0));
            let again = w.set("n", "v");
            assert_eq!((first.seqno, again.seqno), (Seqno(1), Seqno(1)), "life {life}");
            assert!(again.cas > first.cas && w.bucket.vb_uuid(VB) != uuid, "life {life}: a history of its own");
            assert_eq!(w.bucket.failover_log(VB).unwrap().last().unwrap().seqno, Seqno(0));
            persist(&w);
            w = w.restart();
            assert_eq!((w.get("n"), w.get("k"), w.bucket.items()), (Ok(b"v".to_vec()), Err(OpError::NotFound), 1));
            delete(&w);
            set_state(&w, VbState::Active);
        }
    }
}

#[test]
fn it_stays_deleted_over_restarts() {
    for world in [World::new, World::logged] {
        let w = world(3);
        let before = w.set("k", "v");
        persist(&w);
        delete(&w);
        let w = w.restart().restart_after(|sim| drop(sim.power_cut(7)));
        assert_eq!((w.bucket.vb_state(VB), w.bucket.items(), files(&w).len()), (None, 0, 0));
        set_state(&w, VbState::Active);
        assert!(w.set("k", "v").cas > before.cas);
        persist(&w);
        let w = w.restart();
        assert_eq!((w.bucket.vb_state(VB), w.get("k")), (Some(VbState::Active), Ok(b"v".to_vec())));
    }
}

/// Nobody is left waiting: not for a document on disk, a durable write, or a role.
#[test]
fn whoever_waits_for_something_of_it_is_answered() {
    let w = World::new(4);
    w.bucket.set_vb_state(VB, VbState::Active, Some(topology(&[&["a", "b"]]))).unwrap();
    let key = k("durable");
    let write = w.start(&durable(&key, Level::Majority, set("v")));
    let role = w.bucket.set_vbucket_state(VB, Role::of(VbState::Dead, None), &|| w.waiter(1 << 40));
    assert!(matches!(role, Outcome::Pending));
    w.bucket.delete_vbucket(VB).unwrap();
    assert!(matches!(w.answer(write), Some(Err(OpError::Ambiguous(_)))));
    assert!(matches!(w.answer(1 << 40), Some(Ok(Reply::Done { .. }))), "it is deader than dead");
    w.settle();
}

/// As when it moves here again: it follows from the beginning.
#[test]
fn it_may_become_a_replica_again() {
    for world in [World::new, World::logged] {
        let w = world(5);
        (0..9).for_each(|n| _ = w.set(&format!("k{n}"), "v"));
        w.file_everything();
        delete(&w);
        w.bucket.set_vb_state(VB, VbState::Replica, Some(topology(&[&["a", "b"]]))).unwrap();
        let point = w.bucket.resume_point(VB).unwrap();
        assert_eq!((point.seqno, point.snapshot_end), (Seqno(0), Seqno(0)));
        let key: KeyBuf = k("given");
        let (cas, rev) = (Cas(5 << 16), RevSeqno(1));
        let meta = Meta { seqno: Seqno(1), cas, rev, flags: 0, expiry: 0, datatype: Datatype::RAW, deleted: None };
        w.bucket.begin_snapshot(VB, memory(1, 1)).unwrap();
        w.bucket.apply(VB, &Change::Document(Given { key: key.as_key(), meta, value: Some(b"v") })).unwrap();
        persist(&w);
        let w = w.restart();
        assert_eq!((w.bucket.vb_state(VB), w.bucket.items()), (Some(VbState::Replica), 1));
        assert!(w.op("given", Op::GetReplica).is_ok() && w.op("k1", Op::GetReplica).is_err());
    }
}
