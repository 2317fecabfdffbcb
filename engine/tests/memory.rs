//! What is in memory, what only in the file, and what a restart brings back.

mod common;

use std::sync::Arc;

use common::*;
use engine::*;
use env::sim::{Fault, FaultPlan, Op as Io, Rule};
use parking_lot::Mutex;
use types::{Cas, Datatype, Level};

const ENOSPC: i32 = 28;
/// What the changelog takes for a change, beside what was written.
const ENTRY_BYTES: u64 = 16;

fn resident(w: &World, key: &str) -> bool {
    let stats = w.bucket.stats(&format!("key {key} 0")).expect("there");
    stats.contains(&("key_is_resident".into(), "true".into()))
}

fn evict(w: &World, key: &str) {
    w.settle();
    w.op(key, Op::Evict).unwrap();
    assert!(!resident(w, key));
}

#[test]
fn a_value_on_disk_is_fetched_for_whoever_needs_it() {
    let w = World::new(1);
    refused(w.op("k", Op::Evict), OpError::NotFound);
    mutated(w.op("k", store(StoreMode::Set, 0, b"5")));
    refused(w.op("k", Op::Evict), OpError::Exists);
    let meta = w.meta("k");
    evict(&w, "k");
    assert_eq!(w.meta("k"), meta, "metadata is always here");
    let key = k("k");
    let number = w.start(&request(&key, Op::Get));
    w.settle();
    assert_eq!(body(&w.answer(number).unwrap().unwrap()), b"5");
    assert!(resident(&w, "k"), "there is room: it stays");
    assert_eq!(cas_of(w.op("k", Op::Get)), meta.3);
    evict(&w, "k");
    assert!(matches!(
        w.op("k", Op::Arithmetic { delta: Delta::Increment(1), initial: None, expiry: 0 }),
        Ok(Reply::Counter { value: 6, .. })
    ));
    evict(&w, "k");
    mutated(w.op("k", Op::Concat { end: End::Append, datatype: Datatype::RAW, value: b"7" }));
    assert_eq!(w.get("k").unwrap(), b"67");
    evict(&w, "k");
    let cas = cas_of(w.op("k", Op::GetAndLock { lock_s: 5 }));
    w.op_cas("k", cas, Op::Unlock).unwrap();
    evict(&w, "k");
    cas_of(w.op("k", Op::GetAndTouch { expiry: 100 }));
    assert_eq!(w.get("k").unwrap(), b"67");
    evict(&w, "k");
    // These do not need the value.
    mutated(w.op("k", set("new")));
    evict(&w, "k");
    mutated(w.op("k", Op::Delete));
}

#[test]
fn a_document_that_changes_while_it_is_fetched_is_answered_with_the_change() {
    let w = World::new(1);
    w.set("k", "old");
    evict(&w, "k");
    let key = k("k");
    let number = w.start(&request(&key, Op::Get));
    w.set("k", "new");
    w.settle();
    assert_eq!(body(&w.answer(number).unwrap().unwrap()), b"new");
    evict(&w, "k");
    let number = w.start(&request(&key, Op::Get));
    mutated(w.op("k", Op::Delete));
    w.settle();
    refused(w.answer(number).unwrap(), OpError::NotFound);
}

#[test]
fn what_cannot_be_read_is_never_called_missing() {
    let w = World::new(1);
    w.set("k", "v");
    w.set("dead", "v");
    mutated(w.op("dead", Op::Delete));
    evict(&w, "k");
    w.bucket.page();
    w.sim.storage.arm(FaultPlan::new().rule(Rule::new(Io::Read, Fault::Errno(5)).sticky()));
    assert!(matches!(w.get("k"), Err(OpError::Unreadable(_))));
    assert!(matches!(w.op("dead", Op::GetMeta), Err(OpError::Unreadable(_))));
    assert_eq!(w.get("dead"), Err(OpError::NotFound), "tombstones answer this from memory: no entry, no document");
    w.sim.storage.arm(FaultPlan::new());
    assert_eq!(w.get("k").unwrap(), b"v");
}

#[test]
fn a_restart_brings_everything_back() {
    let w = World::new(1);
    for n in 0..200 {
        w.set(&format!("k{n}"), &format!("value {n}"));
    }
    for n in 0..50 {
        mutated(w.op(&format!("k{n}"), Op::Delete));
    }
    mutated(w.op("expires", store(StoreMode::Set, 100, b"v")));
    w.settle();
    let last = w.set("last", "v");
    w.settle();
    let old_log = w.bucket.failover_log(types::VbId(0)).unwrap();
    w.sim.clock.jump_wall(-3_600_000_000_000);
    let w = w.restart();
    let recovered = &w.recovered[0];
    assert_eq!((recovered.documents, recovered.tombstones, recovered.vbuckets), (152, 50, 1));
    assert_eq!(recovered.seqnos, last.seqno.0);
    assert_eq!(w.bucket.items(), 152);
    for n in 0..200 {
        let expected = if n < 50 { Err(OpError::NotFound) } else { Ok(format!("value {n}").into_bytes()) };
        assert_eq!(w.get(&format!("k{n}")), expected);
    }
    assert_eq!(w.meta("k0").2, 2, "tombstones are in the file");
    let next = w.set("k0", "again");
    assert_eq!(next.seqno, last.seqno.next());
    assert!(next.cas > last.cas, "though the wall clock went back");
    assert_eq!(w.meta("k0").2, 3);
    let new_log = w.bucket.failover_log(types::VbId(0)).unwrap();
    assert_eq!(new_log[1..], old_log, "after a kill it is another history");
    assert_ne!(new_log[0].uuid, old_log[0].uuid);
}

#[test]
fn over_the_quota_writes_are_refused_and_deletes_make_room() {
    let w = World::with(1, persist::BucketSpec { quota_bytes: 1 << 20, ..spec() });
    // Nothing can be written, so nothing can be evicted.
    w.sim.storage.arm(FaultPlan::new().rule(Rule::new(Io::Create, Fault::Errno(5)).sticky()));
    let value = "v".repeat(10_000);
    let mut stored = 0;
    let refusal = loop {
        match w.op(&format!("k{stored}"), set(&value)) {
            Ok(_) => stored += 1,
            Err(error) => break error,
        }
    };
    assert!(matches!(refusal, OpError::Temporary(_)), "{refusal:?}");
    let huge = "v".repeat(200_000);
    refused(w.op("huge", set(&huge)), OpError::NoMemory);
    assert_eq!(w.get("k0").unwrap().len(), 10_000);
    mutated(w.op("k0", Op::Delete));
    // Once the disk is back, what it holds can leave memory.
    w.sim.storage.arm(FaultPlan::new());
    w.advance_s(60);
    for n in 0..200 {
        if let Err(error) = w.op(&format!("more{n}"), set(&value)) {
            assert!(matches!(error, OpError::Temporary(_)), "{error:?}");
            w.settle();
            mutated(w.op(&format!("more{n}"), set(&value)));
        }
    }
    w.settle();
    assert!(w.bucket.memory_used() <= w.bucket.quota_bytes());
    for n in 0..200 {
        assert_eq!(w.get(&format!("more{n}")).unwrap().len(), 10_000);
    }
    // A restart loads values only as far as they fit.
    let w = w.restart();
    w.settle();
    let progress = w.bucket.warm_up_progress();
    assert!(progress.is_done() && progress.keys - progress.values > 50, "{progress:?}");
    assert!(w.bucket.memory_used() <= w.bucket.quota_bytes());
    assert_eq!(w.get("more199").unwrap().len(), 10_000);
    assert_eq!(w.get("more0").unwrap().len(), 10_000);
}

#[test]
fn a_full_disk_is_told_apart_and_passes() {
    let w = World::new(1);
    w.set("k", "v");
    w.settle();
    w.sim.storage.arm(FaultPlan::new().rule(Rule::new(Io::Write, Fault::Errno(ENOSPC)).times(1)));
    w.set("full", "v");
    w.settle();
    refused(w.op("x", set("v")), OpError::DiskFull);
    assert_eq!(w.get("k").unwrap(), b"v");
    mutated(w.op("k", Op::Delete));
    w.advance_s(60);
    w.set("x", "v");
}

#[test]
fn memory_is_given_back_to_the_last_byte() {
    let w = World::new(1);
    w.set("k", "its vBucket has a table from now on");
    mutated(w.op("k", Op::Delete));
    w.file_everything();
    let empty = w.bucket.memory_used();
    for n in 0..100 {
        w.set(&format!("k{n}"), "some value");
    }
    assert!(w.bucket.memory_used() > empty + 100 * 64);
    let unfiled = w.bucket.memory_used();
    w.settle();
    assert_eq!(
        w.bucket.memory_used(),
        unfiled - 100 * ENTRY_BYTES,
        "an item in the table and in the changelog is counted once"
    );
    for n in 0..300 {
        w.set(&format!("k{}", n % 100), "some other value");
    }
    assert!(w.bucket.memory_used() > unfiled + 200 * 64, "what was overwritten waits for the flusher");
    w.settle();
    assert_eq!(w.bucket.memory_used(), unfiled - 100 * ENTRY_BYTES);
    for n in 0..100 {
        mutated(w.op(&format!("k{n}"), Op::Delete));
    }
    w.file_everything();
    assert_eq!(w.bucket.memory_used(), empty);
}

#[test]
fn a_durable_write_takes_the_memory_of_a_plain_one() {
    let w = World::new(1);
    let write = |durability: Option<Level>, value: &str| {
        for n in 0..100 {
            let key = k(&format!("k{n}"));
            mutated(match durability {
                Some(level) => w.run(&durable(&key, level, set(value))),
                None => w.run(&request(&key, set(value))),
            });
        }
    };
    // The first round leaves tables as they stay.
    write(Some(Level::Majority), "some value");
    write(None, "some value");
    w.file_everything();
    let plain = w.bucket.memory_used();
    w.sim.storage.arm(FaultPlan::new().rule(Rule::new(Io::Write, Fault::Errno(ENOSPC)).sticky()));
    write(Some(Level::Majority), "same size!");
    let unfiled = w.bucket.memory_used();
    assert_eq!(unfiled, plain + 100 * 2 * ENTRY_BYTES, "prepare and commit are one body");
    w.sim.storage.arm(FaultPlan::new());
    write(None, "some value");
    assert!(w.bucket.memory_used() >= unfiled + 100 * (64 + ENTRY_BYTES), "what was overwritten waits for the flusher");
    w.advance_s(60);
    w.file_everything();
    assert_eq!(w.bucket.memory_used(), plain);
}

#[test]
fn every_group_of_statistics_answers() {
    let w = World::new(1);
    w.set("k", "v");
    w.settle();
    for group in [
        "",
        "vbucket",
        "vbucket-details",
        "vbucket-details 3",
        "vbucket-seqno",
        "failovers",
        "durability-monitor",
        "checkpoint",
        "hash",
        "memory",
        "collections",
        "kvstore",
        "warmup",
        "key k 0",
        "vkey k 0",
    ] {
        let lines = w.bucket.stats(group).unwrap_or_else(|| panic!("{group}"));
        assert!(!lines.is_empty(), "{group}");
    }
    assert!(w.bucket.stats("vkey k 0").unwrap().contains(&("key_valid".into(), "valid".into())));
    assert!(w.bucket.stats("nonsense").is_none());
    assert!(w.bucket.stats("vbucket 99").is_none());
}

/// Goal: a counter driven by CAS from many threads adds up. Method: each thread reads, adds, stores with the CAS, and
/// begins again when refused.
#[test]
fn threads_that_compare_and_swap_one_key_lose_no_update() {
    let w = World::new(1);
    w.set("k", "0");
    let (threads, rounds) = (4, 300);
    let bucket: &Arc<Bucket> = &w.bucket;
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                let key = k("k");
                let now = |request: &Request<'_>| match bucket.execute(request, &|| unreachable!()) {
                    Outcome::Done(result) => result,
                    Outcome::Pending => panic!("in memory"),
                };
                for _ in 0..rounds {
                    loop {
                        let reply = now(&request(&key, Op::Get)).unwrap();
                        let Reply::Value { cas, .. } = reply else { panic!() };
                        let next = String::from_utf8(body(&reply)).unwrap().parse::<u64>().unwrap() + 1;
                        let next = next.to_string();
                        match now(&Request { cas, ..request(&key, set(&next)) }) {
                            Ok(_) => break,
                            Err(OpError::Exists) => {}
                            Err(other) => panic!("{other:?}"),
                        }
                    }
                    now(&request(&key, Op::Touch { expiry: 0 })).unwrap();
                }
            });
        }
    });
    assert_eq!(w.get("k").unwrap(), (threads * rounds).to_string().as_bytes());
    assert_eq!(w.meta("k").2, threads * rounds + 1);
    assert_ne!(w.meta("k").3, Cas(0));
}

/// With real threads: sync writes under way when the server stops come to their end, and the next start finds a clean stop.
#[test]
fn a_drain_finishes_what_is_under_way() {
    let (env, mut sim) = env::sim::env(3);
    let start = |env: &env::Env| {
        let config = scheduler::PoolConfig { readers: 2, writers: 2, background: 1, compaction: 1, cpu: 1 };
        let pools = scheduler::Pools::start(env, &config);
        let data_dir = std::path::Path::new(DATA_DIR);
        let store = persist::Store::open(env, &pools, data_dir, persist::Options::default()).unwrap();
        let engine = Engine::new(env, &pools, store, Options::default());
        let recovered = engine.warm_up().unwrap();
        (pools, engine, recovered)
    };
    let letters = Arc::new(Letters::default());
    let (pools, engine, _) = start(&env);
    let bucket = engine.create_bucket(spec()).unwrap();
    for n in 0..200u64 {
        let key = k(&format!("k{n}"));
        let request = durable(&key, types::Level::PersistMajority, set("v"));
        let request = Request { vb: types::VbId((n % 4) as u16), ..request };
        let ticket = Ticket { slot: 0, generation: 0, request: n };
        let mailbox: Arc<dyn Mailbox> = Arc::clone(&letters) as _;
        bucket.execute(&request, &|| Waiter::new(Arc::clone(&mailbox), ticket));
    }
    assert!(engine.drain().left.is_empty());
    for n in 0..200 {
        mutated(letters.take(n).expect("answered"));
    }
    let key = k("late");
    assert!(matches!(
        bucket.execute(&request(&key, set("v")), &|| unreachable!()),
        Outcome::Done(Err(OpError::Cancelled))
    ));
    let histories = bucket.failover_log(types::VbId(1)).unwrap();
    drop((bucket, engine));
    pools.shutdown(scheduler::Stop::Cancel);
    let env = sim.kill();
    let (_pools, engine, recovered) = start(&env);
    assert_eq!((recovered[0].documents, recovered[0].recommitted, recovered[0].vbuckets), (200, 0, 4));
    let bucket = engine.bucket("default").unwrap();
    assert_eq!(bucket.failover_log(types::VbId(1)).unwrap(), histories, "the same history goes on");
}

/// Goal: with threads writing and flushing at once, commits are in the order of their prepares, and everyone is answered
/// once. Method: four threads write durably to one vBucket at every level; its changelog is read through a cursor.
#[test]
fn threads_that_write_durably_are_all_answered_and_committed_in_order() {
    let (env, _sim) = env::sim::env(4);
    let config = scheduler::PoolConfig { readers: 1, writers: 2, background: 1, compaction: 1, cpu: 2 };
    let pools = scheduler::Pools::start(&env, &config);
    let options = persist::Options::default();
    let store = persist::Store::open(&env, &pools, std::path::Path::new(DATA_DIR), options).unwrap();
    let engine = Engine::new(&env, &pools, store, Options::default());
    let bucket = engine.create_bucket(spec()).unwrap();
    let vb = bucket.vbucket(types::VbId(0)).unwrap();
    let cursor = vb.log.cursor("test", types::Seqno(0)).unwrap();
    let letters = Arc::new(Letters::default());
    let (threads, rounds) = (4u64, 150u64);
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let (letters, bucket) = (&letters, &bucket);
            scope.spawn(move || {
                for round in 0..rounds {
                    let key = k(&format!("{thread}.{round}"));
                    let levels =
                        [types::Level::Majority, types::Level::PersistMajority, types::Level::MajorityAndPersistActive];
                    let level = levels[(round % 3) as usize];
                    let ticket = Ticket { slot: 0, generation: 0, request: thread * rounds + round };
                    let mailbox: Arc<dyn Mailbox> = Arc::clone(letters) as _;
                    bucket.execute(&durable(&key, level, set("v")), &|| Waiter::new(Arc::clone(&mailbox), ticket));
                }
            });
        }
    });
    assert!(engine.drain().left.is_empty());
    let acknowledged: Vec<_> = (0..threads * rounds).map(|n| mutated(letters.take(n).expect("answered"))).collect();
    let slice = vb.log.read(&cursor, usize::MAX);
    let committed: Vec<_> = slice
        .items
        .iter()
        .filter_map(|item| match item.kind() {
            types::Kind::Committed { prepared } => prepared,
            _ => None,
        })
        .collect();
    assert_eq!(committed.len(), acknowledged.len());
    assert!(committed.is_sorted(), "commits in prepare order");
    let mut told: Vec<_> = acknowledged.iter().map(|m| m.seqno).collect();
    told.sort();
    assert_eq!(told, committed);
    vb.log.unregister(cursor);
    assert_eq!(bucket.items(), threads * rounds);
}

#[test]
fn sub_document_and_durable_requests_wait_for_the_file_with_all_they_brought() {
    use document::subdoc::{DocFlags, LookupSpec, MutationSpec, Op as Sub, PathFlags};
    let w = World::new(1);
    w.set("k", r#"{"a":[1,2]}"#);
    evict(&w, "k");
    let specs = [
        LookupSpec { op: Sub::Get, flags: PathFlags::XATTR, path: b"$document.value_bytes" },
        LookupSpec { op: Sub::Get, flags: PathFlags::NONE, path: b"a[1]" },
    ];
    let lookup = w.op("k", Op::SubdocLookup(SubdocLookup { specs: &specs, doc_flags: DocFlags::NONE }));
    let Ok(Reply::Lookup { results, .. }) = lookup else { panic!("{lookup:?}") };
    assert_eq!(results, [Ok(b"11".to_vec()), Ok(b"2".to_vec())]);

    evict(&w, "k");
    let specs = [
        MutationSpec { op: Sub::DictUpsert, flags: PathFlags::XATTR, path: b"_x", value: b"1" },
        MutationSpec { op: Sub::PushLast, flags: PathFlags::NONE, path: b"a", value: b"3" },
        MutationSpec { op: Sub::Counter, flags: PathFlags::NONE, path: b"n", value: b"-7" },
    ];
    let (doc_flags, expiry, user_flags) = (DocFlags::NONE, Some(50), Some(9));
    let key = k("k");
    let op = Op::SubdocMutate(SubdocMutate { specs: &specs, doc_flags, expiry, user_flags });
    let level = types::Level::PersistMajority;
    let result = w.run(&durable(&key, level, op));
    let Ok(Reply::SubdocMutated { results, deleted: false, .. }) = result else { panic!("{result:?}") };
    assert_eq!(results, [(2, b"-7".to_vec())]);
    assert_eq!(w.get("k").unwrap(), br#"{"a":[1,2,3],"n":-7}"#);
    assert_eq!(w.meta("k").1, w.now_s() + 50);

    // A store keeps the xattrs it cannot see, a delete the system's: both need the old value.
    evict(&w, "k");
    mutated(w.run(&durable(&key, level, set("{}"))));
    evict(&w, "k");
    mutated(w.run(&durable(&key, level, Op::Delete)));
    let specs = [LookupSpec { op: Sub::Get, flags: PathFlags::XATTR, path: b"_x" }];
    w.file_everything();
    let lookup = w.op("k", Op::SubdocLookup(SubdocLookup { specs: &specs, doc_flags: DocFlags::ACCESS_DELETED }));
    assert!(matches!(&lookup, Ok(Reply::Lookup { deleted: true, results, .. }) if results[0] == Ok(b"1".to_vec())));
}

#[test]
fn an_expired_document_whose_value_is_on_disk_keeps_its_system_xattrs() {
    use document::subdoc::{DocFlags, LookupSpec, MutationSpec, Op as Sub, PathFlags};
    let w = World::new(1);
    let specs = [
        MutationSpec { op: Sub::DictUpsert, flags: PathFlags::XATTR, path: b"_x", value: b"1" },
        MutationSpec { op: Sub::DictUpsert, flags: PathFlags::NONE, path: b"a", value: b"1" },
    ];
    for key in ["seen", "paged"] {
        let doc_flags = DocFlags::MKDOC;
        let op = SubdocMutate { specs: &specs, doc_flags, expiry: Some(10), user_flags: None };
        mutated(w.op(key, Op::SubdocMutate(op)));
        evict(&w, key);
    }
    w.sim.clock.advance(std::time::Duration::from_secs(11));
    assert_eq!(w.get("seen"), Err(OpError::NotFound));
    w.file_everything();
    assert_eq!(w.bucket.items(), 0);
    for key in ["seen", "paged"] {
        let specs = [LookupSpec { op: Sub::Get, flags: PathFlags::XATTR, path: b"_x" }];
        let lookup = w.op(key, Op::SubdocLookup(SubdocLookup { specs: &specs, doc_flags: DocFlags::ACCESS_DELETED }));
        assert!(matches!(&lookup, Ok(Reply::Lookup { deleted: true, results, .. }) if results[0] == Ok(b"1".to_vec())));
    }
}

/// A vBucket found the disk full, and then a sync failed: it will not find out that there is room again.
#[test]
fn a_vbucket_that_is_poisoned_does_not_keep_the_disk_full_for_the_others() {
    let w = World::new(1);
    let rule = |op, errno| Rule::new(op, Fault::Errno(errno)).times(1);
    w.sim.storage.arm(FaultPlan::new().rule(rule(Io::Write, ENOSPC)).rule(rule(Io::Sync, 5)));
    w.set("k", "v");
    w.settle();
    refused(w.op("other", set("v")), OpError::DiskFull);
    w.advance_s(10);
    assert!(matches!(w.op("k", set("v")), Err(OpError::Temporary(why)) if why.contains("restart")));
    let elsewhere = k("k");
    mutated(w.run(&Request { vb: types::VbId(1), ..request(&elsewhere, set("v")) }));
}

/// Goal: a read that the document outran is tried again. Method: two documents are fetched together; before the second is
/// answered, it is changed, filed and evicted.
#[test]
fn a_document_changed_and_evicted_while_it_is_fetched_is_fetched_again() {
    struct Meddler(Mutex<Option<Box<dyn FnOnce() + Send>>>, Mutex<Vec<(u64, OpResult)>>);
    impl Mailbox for Meddler {
        fn deliver(&self, ticket: Ticket, result: OpResult) {
            let meddle = self.0.lock().take();
            self.1.lock().push((ticket.request, result));
            meddle.into_iter().for_each(|meddle| meddle());
        }
    }
    let (env, sim) = env::sim::env(1);
    let (stepper, engine, _) = try_open(&env, &sim.clock).unwrap();
    let (stepper, bucket) = (Arc::new(stepper), engine.create_bucket(spec()).unwrap());
    let meddler = Arc::new(Meddler(Mutex::new(None), Mutex::new(Vec::new())));
    let ask = |bucket: &Bucket, name: &str, op: Op<'_>, number| {
        let (key, mailbox) = (k(name), Arc::clone(&meddler) as Arc<dyn Mailbox>);
        let ticket = Ticket { slot: 0, generation: 0, request: number };
        bucket.execute(&request(&key, op), &|| Waiter::new(Arc::clone(&mailbox), ticket))
    };
    for name in ["a", "b"] {
        ask(&bucket, name, set("old"), 0);
    }
    stepper.run_until_idle();
    for name in ["a", "b"] {
        ask(&bucket, name, Op::Evict, 0);
        assert!(matches!(ask(&bucket, name, Op::Get, if name == "a" { 1 } else { 2 }), Outcome::Pending));
    }
    let again = (Arc::clone(&bucket), Arc::clone(&stepper), Arc::clone(&meddler));
    *meddler.0.lock() = Some(Box::new(move || {
        let (bucket, stepper, meddler) = again;
        for op in [set("new"), Op::Evict] {
            let key = k("b");
            let done = bucket.execute(&request(&key, op), &|| {
                Waiter::new(Arc::clone(&meddler) as Arc<dyn Mailbox>, Ticket { slot: 0, generation: 0, request: 3 })
            });
            assert!(matches!(done, Outcome::Done(Ok(_))), "{done:?}");
            stepper.run_until_idle();
        }
    }));
    stepper.run_until_idle();
    let answers: Vec<_> = meddler.1.lock().drain(..).map(|(n, result)| (n, body(&result.expect("found")))).collect();
    assert_eq!(answers, [(1, b"old".to_vec()), (2, b"new".to_vec())]);
}
