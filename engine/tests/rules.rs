//! What each operation answers in each situation, on one vBucket.

mod common;

use common::*;
use document::subdoc::{self, DocFlags, LookupSpec, MutationSpec, PathFlags, SubdocError};
use engine::*;
use types::{Cas, Datatype, Level, RevSeqno, VbId, VbState};

fn arithmetic(delta: Delta, initial: Option<u64>) -> Op<'static> {
    Op::Arithmetic { delta, initial, expiry: 0 }
}

fn concat(end: End, value: &[u8]) -> Op<'_> {
    Op::Concat { end, datatype: Datatype::RAW, value }
}

#[test]
fn stores_answer_by_mode_and_cas() {
    let w = World::new(1);
    refused(w.op("k", store(StoreMode::Replace, 0, b"v")), OpError::NotFound);
    refused(w.op_cas("k", Cas(7), set("v")), OpError::NotFound);
    refused(w.op_cas("k", Cas(7), store(StoreMode::Add, 0, b"v")), OpError::Invalid("add takes no CAS"));
    let first = mutated(w.op("k", store(StoreMode::Add, 0, b"1")));
    refused(w.op("k", store(StoreMode::Add, 0, b"2")), OpError::Exists);
    refused(w.op_cas("k", Cas(7), set("2")), OpError::Exists);
    let second = mutated(w.op_cas("k", first.cas, set("2")));
    assert!(second.cas > first.cas && second.seqno > first.seqno);
    mutated(w.op_cas("k", second.cas, store(StoreMode::Replace, 0, b"3")));
    assert_eq!(w.get("k").unwrap(), b"3");
    refused(w.op_cas("k", second.cas, Op::Delete), OpError::Exists);
    mutated(w.op("k", Op::Delete));
    refused(w.op("k", Op::Delete), OpError::NotFound);
    assert_eq!(w.get("k"), Err(OpError::NotFound));
}

#[test]
fn revisions_go_on_across_deletes_and_forgotten_tombstones() {
    let w = World::new(1);
    w.set("k", "1");
    w.set("k", "2");
    assert_eq!(w.meta("k").2, 2);
    mutated(w.op("k", Op::Delete));
    assert_eq!((w.meta("k").0, w.meta("k").2), (true, 3));
    w.set("k", "3");
    assert_eq!(w.meta("k").2, 4);
    mutated(w.op("k", Op::Delete));
    w.file_everything();
    assert_eq!(w.bucket.stats("hash").unwrap().iter().find(|l| l.0 == "vb_0:counted").unwrap().1, "0");
    // From the file.
    assert_eq!((w.meta("k").0, w.meta("k").2), (true, 5));
    w.set("k", "4");
    assert_eq!(w.meta("k").2, 6);
    w.set("other", "new keys start above any deleted one");
    assert_eq!(w.meta("other").2, 6);
    refused(w.op("never", Op::GetMeta), OpError::NotFound);
}

#[test]
fn expiry_is_kept_changed_and_obeyed() {
    let w = World::new(1);
    mutated(w.op("k", store(StoreMode::Set, 10, b"v")));
    let at = w.now_s() + 10;
    assert_eq!(w.meta("k").1, at);
    // Counters, appends: kept. Preserve: kept. A plain store: replaced.
    mutated(w.op("k", concat(End::Append, b"w")));
    assert_eq!(w.meta("k").1, at);
    let key = k("k");
    mutated(w.run(&Request { preserve_expiry: true, ..request(&key, set("x")) }));
    assert_eq!(w.meta("k").1, at);
    mutated(w.op("k", set("y")));
    assert_eq!(w.meta("k").1, 0);
    // Touch: an unchanged expiry writes nothing.
    let touched = cas_of(w.op("k", Op::Touch { expiry: 10 }));
    let again = cas_of(w.op("k", Op::Touch { expiry: 10 }));
    assert_eq!(touched, again);
    assert_ne!(cas_of(w.op("k", Op::GetAndTouch { expiry: 11 })), touched);
    assert_eq!(w.meta("k").2, 6);
    w.advance_s(10);
    assert!(w.get("k").is_ok());
    w.advance_s(1);
    assert_eq!(w.get("k"), Err(OpError::NotFound));
    assert_eq!(w.meta("k"), (true, w.now_s(), 7, w.meta("k").3));
    // In the past: written, then gone.
    mutated(w.op("k", store(StoreMode::Set, 2_592_001, b"v")));
    refused(w.op("k", store(StoreMode::Replace, 0, b"v")), OpError::NotFound);
    refused(w.op("k", Op::Touch { expiry: 1 }), OpError::NotFound);
}

#[test]
fn the_pager_ends_what_nobody_looks_at() {
    let w = World::new(1);
    for n in 0..100 {
        mutated(w.op(&format!("k{n}"), store(StoreMode::Set, 1 + n % 2 * 10_000, b"v")));
    }
    assert_eq!(w.bucket.items(), 100);
    w.advance_s(601);
    assert_eq!(w.bucket.items(), 50);
    assert!(w.stepper.next_deadline().is_some(), "the next round is due");
}

#[test]
fn locks_hold_until_they_are_opened_or_run_out() {
    let w = World::new(1);
    refused(w.op("k", Op::GetAndLock { lock_s: 0 }), OpError::NotFound);
    let stored = w.set("k", "v").cas;
    let lock = cas_of(w.op("k", Op::GetAndLock { lock_s: 0 }));
    assert_ne!(lock, stored);
    assert_eq!(cas_of(w.op("k", Op::Get)), Cas::LOCKED);
    assert_eq!(w.meta("k").3, Cas::LOCKED);
    for op in [
        set("x"),
        store(StoreMode::Replace, 0, b"x"),
        Op::Delete,
        Op::Touch { expiry: 5 },
        Op::GetAndTouch { expiry: 5 },
        Op::GetAndLock { lock_s: 5 },
        concat(End::Append, b"x"),
        arithmetic(Delta::Increment(1), None),
    ] {
        refused(w.op("k", op), OpError::Locked);
    }
    refused(w.op_cas("k", stored, set("x")), OpError::Locked);
    refused(w.op_cas("k", stored, Op::Unlock), OpError::Locked);
    refused(w.op("k", Op::Unlock), OpError::Invalid("unlock needs the CAS of the lock"));
    w.op_cas("k", lock, Op::Unlock).unwrap();
    assert_eq!(cas_of(w.op("k", Op::Get)), stored, "the document's own CAS is valid again");
    refused(w.op_cas("k", lock, Op::Unlock), OpError::NotLocked);
    refused(w.op_cas("none", lock, Op::Unlock), OpError::NotFound);

    // 0 and more than 30 mean 15.
    for (asked, held) in [(0, 15), (31, 15), (30, 30), (1, 1)] {
        let lock = cas_of(w.op("k", Op::GetAndLock { lock_s: asked }));
        w.sim.clock.advance(std::time::Duration::from_millis(held * 1000 - 1));
        refused(w.op("k", set("x")), OpError::Locked);
        w.sim.clock.advance(std::time::Duration::from_millis(1));
        refused(w.op_cas("k", lock, set("x")), OpError::Exists);
        w.set("k", "x");
    }

    // Writing with the lock's CAS opens it.
    let lock = cas_of(w.op("k", Op::GetAndLock { lock_s: 0 }));
    mutated(w.op_cas("k", lock, set("y")));
    w.set("k", "z");
    let lock = cas_of(w.op("k", Op::GetAndLock { lock_s: 0 }));
    mutated(w.op_cas("k", lock, Op::Delete));
    w.set("k", "again");
}

#[test]
fn counters_count_and_refuse_what_is_no_number() {
    let w = World::new(1);
    let counter = |result: OpResult| match result {
        Ok(Reply::Counter { value, .. }) => value,
        other => panic!("{other:?}"),
    };
    refused(w.op("c", arithmetic(Delta::Increment(1), None)), OpError::NotFound);
    assert_eq!(counter(w.op("c", arithmetic(Delta::Increment(5), Some(10)))), 10);
    assert_eq!(counter(w.op("c", arithmetic(Delta::Increment(5), Some(10)))), 15);
    assert_eq!(counter(w.op("c", arithmetic(Delta::Decrement(20), None))), 0);
    assert_eq!(counter(w.op("c", arithmetic(Delta::Increment(u64::MAX), None))), u64::MAX);
    assert_eq!(counter(w.op("c", arithmetic(Delta::Increment(2), None))), 1);
    assert_eq!(w.get("c").unwrap(), b"1");
    let Ok(Reply::Value { datatype, .. }) = w.op("c", Op::Get) else { panic!() };
    assert_eq!(datatype, Datatype::JSON);
    w.set("text", "ten");
    refused(w.op("text", arithmetic(Delta::Increment(1), Some(1))), OpError::BadDelta);
    refused(w.op_cas("c", Cas(1), arithmetic(Delta::Increment(1), None)), OpError::Invalid("counters take no CAS"));
}

#[test]
fn append_and_prepend_join_inflated_bodies() {
    let w = World::new(1);
    refused(w.op("k", concat(End::Append, b"x")), OpError::NotStored);
    let long = "x".repeat(1000);
    let packed = document::snappy::compress(long.as_bytes()).unwrap();
    let op = Op::Store { mode: StoreMode::Set, flags: 3, expiry: 0, datatype: Datatype::SNAPPY, value: &packed };
    mutated(w.op("k", op));
    let Ok(Reply::Value { datatype, .. }) = w.op("k", Op::Get) else { panic!() };
    assert_eq!(datatype, Datatype::SNAPPY);
    let key = k("k");
    let plain = w.run(&Request { accepts: Datatype::RAW, ..request(&key, Op::Get) }).unwrap();
    assert_eq!(body(&plain), long.as_bytes());
    mutated(w.op("k", concat(End::Append, b"]")));
    mutated(w.op("k", concat(End::Prepend, b"[")));
    assert_eq!(w.get("k").unwrap(), format!("[{long}]").into_bytes());
    w.set("j", "[1,2");
    mutated(w.op("j", concat(End::Append, b"]")));
    let Ok(Reply::Value { datatype, item, .. }) = w.op("j", Op::Get) else { panic!() };
    assert_eq!((datatype, item.meta().flags), (Datatype::JSON, 0xdead_beef));
}

fn mutate<'a>(specs: &'a [MutationSpec<'a>], doc_flags: DocFlags) -> Op<'a> {
    Op::SubdocMutate(SubdocMutate { specs, doc_flags, expiry: None, user_flags: None })
}

fn upsert<'a>(path: &'a str, value: &'a str, flags: PathFlags) -> MutationSpec<'a> {
    MutationSpec { op: subdoc::Op::DictUpsert, flags, path: path.as_bytes(), value: value.as_bytes() }
}

fn look<'a>(path: &'a str, flags: PathFlags) -> LookupSpec<'a> {
    LookupSpec { op: subdoc::Op::Get, flags, path: path.as_bytes() }
}

fn looked(result: OpResult) -> (bool, Vec<Result<String, SubdocError>>) {
    match result {
        Ok(Reply::Lookup { deleted, results, .. }) => {
            (deleted, results.into_iter().map(|r| r.map(|bytes| String::from_utf8(bytes).unwrap())).collect())
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn xattrs_stay_with_a_store_and_only_the_systems_with_a_delete() {
    let w = World::new(1);
    w.set("k", r#"{"a":1}"#);
    let x = PathFlags::XATTR;
    let specs = [upsert("_sys", "1", x), upsert("user", "2", x), upsert("b", "3", PathFlags::NONE)];
    mutated(w.op("k", mutate(&specs, DocFlags::NONE)));
    assert_eq!(w.get("k").unwrap(), br#"{"a":1,"b":3}"#);
    mutated(w.op("k", set("[]")));
    assert_eq!(w.get("k").unwrap(), b"[]");
    let specs = [look("_sys", x), look("user", x)];
    let lookup = |doc_flags| Op::SubdocLookup(SubdocLookup { specs: &specs, doc_flags });
    assert_eq!(looked(w.op("k", lookup(DocFlags::NONE))), (false, vec![Ok("1".into()), Ok("2".into())]));
    mutated(w.op("k", Op::Delete));
    refused(w.op("k", lookup(DocFlags::NONE)), OpError::NotFound);
    let gone = (true, vec![Ok("1".into()), Err(SubdocError::PathNotFound)]);
    assert_eq!(looked(w.op("k", lookup(DocFlags::ACCESS_DELETED))), gone);
    // The same when only the file remembers.
    w.file_everything();
    assert_eq!(looked(w.op("k", lookup(DocFlags::ACCESS_DELETED))), gone);
    // And a plain add starts without.
    mutated(w.op("k", store(StoreMode::Add, 0, b"new")));
    let none = vec![Err(SubdocError::PathNotFound), Err(SubdocError::PathNotFound)];
    assert_eq!(looked(w.op("k", lookup(DocFlags::NONE))), (false, none));
}

#[test]
fn a_subdoc_change_clears_the_expiry_and_counts_as_one_change() {
    let w = World::new(1);
    mutated(w.op("k", store(StoreMode::Set, 100, b"{}")));
    let specs = [upsert("a", "1", PathFlags::NONE), upsert("b", "2", PathFlags::NONE)];
    mutated(w.op("k", mutate(&specs, DocFlags::NONE)));
    let (_, expiry, rev, _) = w.meta("k");
    assert_eq!((expiry, rev), (0, 2));
    let failing = [upsert("c", "3", PathFlags::NONE), upsert("a.b", "1", PathFlags::NONE)];
    let failed = w.op("k", mutate(&failing, DocFlags::NONE));
    assert!(matches!(failed, Ok(Reply::SubdocFailed { index: 1, error: SubdocError::PathMismatch, deleted: false })));
    assert_eq!(w.get("k").unwrap(), br#"{"a":1,"b":2}"#);
    refused(w.op("none", mutate(&specs, DocFlags::NONE)), OpError::NotFound);
    refused(w.op("k", mutate(&specs, DocFlags::ADD)), OpError::Exists);
    mutated(w.op("new", mutate(&specs, DocFlags::MKDOC)));
    assert_eq!(w.get("new").unwrap(), br#"{"a":1,"b":2}"#);
}

#[test]
fn macros_are_filled_with_what_the_change_was_given() {
    let w = World::new(1);
    let flags = PathFlags::XATTR.with(PathFlags::EXPAND_MACROS);
    let specs = [
        upsert("cas", "\"${Mutation.CAS}\"", flags),
        upsert("seqno", "\"${Mutation.seqno}\"", flags),
        upsert("a", "1", PathFlags::NONE),
    ];
    let Mutated { cas, seqno, .. } = mutated(w.op("k", mutate(&specs, DocFlags::MKDOC)));
    let x = PathFlags::XATTR;
    let specs = [look("cas", x), look("seqno", x), look("$document.CAS", x)];
    let (_, results) = looked(w.op("k", Op::SubdocLookup(SubdocLookup { specs: &specs, doc_flags: DocFlags::NONE })));
    let expected =
        [format!("\"{:#018x}\"", cas.0.swap_bytes()), format!("\"{:#018x}\"", seqno.0), format!("\"{:#018x}\"", cas.0)];
    assert_eq!(results, expected.map(Ok));
}

#[test]
fn a_document_can_be_created_dead_edited_dead_and_revived() {
    let w = World::new(1);
    let x = PathFlags::XATTR;
    let specs = [upsert("_txn", "{}", x)];
    let flags = DocFlags::ADD.with(DocFlags::ACCESS_DELETED).with(DocFlags::CREATE_AS_DELETED);
    let created = w.op("k", mutate(&specs, flags));
    assert!(matches!(created, Ok(Reply::SubdocMutated { deleted: true, .. })), "{created:?}");
    assert_eq!(w.get("k"), Err(OpError::NotFound));
    assert_eq!(w.bucket.items(), 0);
    w.file_everything();
    let specs = [upsert("_txn.op", "\"insert\"", x)];
    let edited = w.op("k", mutate(&specs, DocFlags::ACCESS_DELETED));
    assert!(matches!(edited, Ok(Reply::SubdocMutated { deleted: true, .. })), "{edited:?}");
    refused(w.op_cas("k", Cas(5), mutate(&specs, DocFlags::ACCESS_DELETED)), OpError::Exists);
    w.file_everything();
    let specs = [upsert("_txn.op", "\"done\"", x), upsert("a", "1", PathFlags::NONE)];
    let revive = DocFlags::ACCESS_DELETED.with(DocFlags::REVIVE).with(DocFlags::MKDOC);
    mutated(w.op("k", mutate(&specs, revive)));
    assert_eq!(w.get("k").unwrap(), br#"{"a":1}"#);
    assert_eq!(w.meta("k").2, 3);
    refused(w.op("k", mutate(&specs, revive)), OpError::CanOnlyReviveDeleted);
}

#[test]
fn a_change_with_metadata_wins_or_loses_by_revision_then_cas() {
    let w = World::new(1);
    let with = |mode, rev, cas, options| {
        Op::WithMeta(WithMeta {
            mode,
            flags: 1,
            expiry: 0,
            rev: RevSeqno(rev),
            cas: Cas(cas),
            options,
            datatype: Datatype::RAW,
            value: if mode == WithMetaMode::Delete { b"" } else { b"v" },
        })
    };
    use WithMetaMode::{Add, Delete, Set};
    assert_eq!(mutated(w.op("k", with(Set, 5, 1000, 0))).cas, Cas(1000));
    assert_eq!(w.meta("k").2, 5);
    refused(w.op("k", with(Set, 4, 2000, 0)), OpError::Exists);
    refused(w.op("k", with(Set, 5, 1000, 0)), OpError::Exists);
    refused(w.op("k", with(Add, 9, 2000, 0)), OpError::Exists);
    mutated(w.op("k", with(Set, 5, 1001, 0)));
    mutated(w.op("k", with(Set, 2, 500, 1)));
    assert_eq!((w.meta("k").2, w.meta("k").3), (2, Cas(500)));
    mutated(w.op("k", with(Delete, 7, 700, 0)));
    assert_eq!((w.meta("k").0, w.meta("k").2), (true, 7));
    w.file_everything();
    refused(w.op("k", with(Add, 7, 700, 0)), OpError::Exists);
    mutated(w.op("k", with(Add, 8, 700, 0)));
    for (cas, options) in [(0, 0), (u64::MAX, 0), (1, 4), (1, 2), (1, 0x10), (1, 0x40)] {
        assert!(matches!(w.op("k", with(Set, 99, cas, options)), Err(OpError::Invalid(_))), "{cas} {options}");
    }
    assert!(mutated(w.op("k", with(Set, 99, 0, 0x0c))).cas > Cas(700));
    // The clock never falls behind what it has seen.
    let ahead = (w.now_s() as u64 + 1000) * 1_000_000_000;
    mutated(w.op("k", with(Set, 100, ahead, 0)));
    assert!(w.set("other", "v").cas > Cas(ahead));
    refused(w.op_cas("k", Cas(1), with(Set, 101, ahead, 0)), OpError::Exists);
    refused(w.op_cas("none", Cas(1), with(Set, 101, ahead, 0)), OpError::NotFound);
}

#[test]
fn values_over_the_limit_are_too_big() {
    let w = World::new(1);
    let body = vec![b'x'; VALUE_BYTES_MAX + 1];
    refused(w.op("k", store(StoreMode::Set, 0, &body)), OpError::TooBig);
    mutated(w.op("k", store(StoreMode::Set, 0, &body[1..])));
    refused(w.op("k", concat(End::Append, b"x")), OpError::TooBig);
}

#[test]
fn a_vbucket_serves_what_its_state_allows() {
    let w = World::new(1);
    w.set("k", "v");
    let vb = VbId(0);
    w.bucket.set_vb_state(vb, VbState::Replica, None).unwrap();
    refused(w.op("k", Op::Get), OpError::NotMyVbucket);
    refused(w.op("k", set("x")), OpError::NotMyVbucket);
    assert_eq!(body(&w.op("k", Op::GetReplica).unwrap()), b"v");
    let specs = [look("$document", PathFlags::XATTR)];
    let lookup = |doc_flags| Op::SubdocLookup(SubdocLookup { specs: &specs, doc_flags });
    refused(w.op("k", lookup(DocFlags::NONE)), OpError::NotMyVbucket);
    assert!(w.op("k", lookup(DocFlags::REPLICA_READ)).is_ok());
    for state in [VbState::Pending, VbState::Dead] {
        w.bucket.set_vb_state(vb, state, None).unwrap();
        refused(w.op("k", Op::Get), OpError::NotMyVbucket);
        refused(w.op("k", Op::GetReplica), OpError::NotMyVbucket);
    }
    let before = w.bucket.failover_log(vb).unwrap();
    w.bucket.set_vb_state(vb, VbState::Active, None).unwrap();
    let after = w.bucket.failover_log(vb).unwrap();
    assert_eq!((after.len(), &after[1..]), (2, &before[..]));
    assert_eq!(w.set("k", "w").uuid, after[0].uuid);
    refused(w.op("k", Op::GetReplica), OpError::NotMyVbucket);
    let key = k("k");
    refused(w.run(&Request { vb: VbId(4), ..request(&key, Op::Get) }), OpError::NotMyVbucket);
    assert_eq!(w.bucket.observe_seqno(vb, before[0].uuid).unwrap().old, Some((before[0].uuid, after[0].seqno)));
    assert!(w.bucket.observe_seqno(vb, types::VbUuid(1)).is_err());
}

#[test]
fn observe_tells_persisted_from_not_and_gone_from_never() {
    let w = World::new(1);
    let vb = VbId(0);
    let seen = |key| w.bucket.observe(vb, k(key).as_key()).unwrap().state;
    assert_eq!(seen("k"), KeyState::NotFound);
    w.set("k", "v");
    assert_eq!(seen("k"), KeyState::NotPersisted);
    w.settle();
    assert_eq!(seen("k"), KeyState::Persisted);
    mutated(w.op("k", Op::Delete));
    assert_eq!(seen("k"), KeyState::DeletedNotPersisted);
    w.settle();
    assert_eq!(seen("k"), KeyState::NotFound);
}

#[test]
fn seqno_persistence_answers_when_it_is_on_disk() {
    let w = World::new(1);
    let seqno = w.set("k", "v").seqno;
    let outcome = w.bucket.seqno_persistence(VbId(0), seqno, &|| w.waiter(900));
    assert!(matches!(outcome, Outcome::Pending));
    w.settle();
    assert!(matches!(w.answer(900), Some(Ok(Reply::Done { .. }))));
    assert!(matches!(w.bucket.seqno_persistence(VbId(0), seqno, &|| unreachable!()), Outcome::Done(Ok(_))));
    w.bucket.seqno_persistence(VbId(0), seqno.next(), &|| w.waiter(901));
    w.advance_s(29);
    assert!(w.answer(901).is_none());
    w.advance_s(1);
    assert!(matches!(w.answer(901), Some(Err(OpError::Temporary(_)))));
}

#[test]
fn flush_deletes_everything_as_ordinary_deletes() {
    let w = World::new(1);
    for n in 0..20 {
        w.set(&format!("k{n}"), "v");
    }
    let before = w.bucket.all_vb_seqnos(None, true)[0].1;
    w.op("k3", Op::GetAndLock { lock_s: 0 }).unwrap();
    w.bucket.flush(w.waiter(900));
    w.settle();
    assert!(matches!(w.answer(900), Some(Ok(_))));
    assert_eq!(w.bucket.items(), 0);
    assert_eq!(w.bucket.all_vb_seqnos(None, true)[0].1.0, before.0 + 20);
    assert!(w.bucket.random_key().is_none());
    let w = w.restart();
    assert_eq!(w.bucket.items(), 0);
}

#[test]
fn durability_is_refused_where_it_means_nothing() {
    let w = World::new(1);
    w.set("k", "v");
    let key = k("k");
    for op in [Op::Touch { expiry: 1 }, Op::GetAndTouch { expiry: 1 }] {
        refused(w.run(&durable(&key, Level::Majority, op)), OpError::NotSupported("durability of touch"));
    }
    assert!(matches!(w.run(&durable(&key, Level::Majority, Op::Get)), Err(OpError::Invalid(_))));
}
