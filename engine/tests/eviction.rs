//! More data than memory: what leaves, what stays, and that nobody can tell by the answers.

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use common::*;
use engine::*;
use env::sim::{Fault, FaultPlan, Op as Io, Rule};
use parking_lot::{Condvar, Mutex};
use persist::{BucketSpec, Eviction};
use types::{Cas, Level};

const BOTH: [Eviction; 2] = [Eviction::Value, Eviction::Full];

fn stat(w: &World, group: &str, name: &str) -> u64 {
    let stats = w.bucket.stats(group).expect("there");
    stats.iter().find(|line| line.0 == name).unwrap_or_else(|| panic!("{name}")).1.parse().expect("a number")
}

fn small(eviction: Eviction, quota_bytes: u64) -> BucketSpec {
    BucketSpec { eviction, quota_bytes, ..spec() }
}

fn value(n: u32, round: u32) -> String {
    format!("{round}.{n}:").repeat(100)
}

/// Goal: with ten times more data than memory no write is refused as long as the disk keeps up, the quota holds at every
/// moment, and every document reads back. Method: write, step until idle every few writes, read all.
#[test]
fn ten_times_the_quota_fits_if_the_disk_keeps_up() {
    for eviction in BOTH {
        let w = World::with(1, small(eviction, 400 << 10));
        // Of 50 KB a value; in a bucket that keeps keys, these fill a part of the memory.
        let count = if eviction == Eviction::Full { 8000 } else { 2500 };
        let mut bytes = 0;
        for n in 0..count {
            let value = value(n, 0);
            bytes += value.len() as u64;
            w.set(&format!("k{n}"), &value);
            if n % 8 == 0 {
                w.settle();
            }
            assert!(w.bucket.memory_used() <= w.bucket.quota_bytes(), "{eviction:?} {n}: {}", w.bucket.memory_used());
        }
        assert!(bytes >= 3 * w.bucket.quota_bytes());
        assert_eq!(w.bucket.items(), u64::from(count));
        for n in 0..count {
            assert_eq!(w.get(&format!("k{n}")).unwrap(), value(n, 0).as_bytes(), "{eviction:?} {n}");
            assert!(
                w.bucket.memory_used() <= w.bucket.quota_bytes(),
                "{eviction:?} {n}: {:?}",
                w.bucket.stats("memory")
            );
        }
        assert_eq!(w.bucket.counters.refused_memory.get(), 0);
        assert!(w.bucket.counters.evicted.get() > u64::from(count) / 2);
        w.settle();
        assert!(w.bucket.memory_used() <= w.bucket.quota_bytes() / 100 * 85);
    }
}

#[test]
fn writes_are_put_off_only_while_nothing_can_leave() {
    for eviction in BOTH {
        let w = World::with(1, small(eviction, 400 << 10));
        w.set("filed", &value(0, 0));
        w.settle();
        w.sim.storage.arm(FaultPlan::new().rule(Rule::new(Io::Write, Fault::Errno(5)).sticky()));
        let mut stored = 0;
        let refusal = loop {
            match w.op(&format!("k{stored}"), set(&value(stored, 0))) {
                Ok(_) => stored += 1,
                Err(error) => break error,
            }
        };
        assert!(matches!(refusal, OpError::Temporary(_)), "{refusal:?}");
        assert!(w.bucket.memory_used() > w.bucket.quota_bytes() / 100 * 94);
        assert!(w.get("filed").is_ok(), "what had left is fetched");
        w.sim.storage.arm(FaultPlan::new());
        w.advance_s(60);
        assert!(w.bucket.memory_used() <= w.bucket.quota_bytes() / 100 * 75, "the pager was woken by what was filed");
        for n in 0..stored {
            assert_eq!(w.get(&format!("k{n}")).unwrap(), value(n, 0).as_bytes());
        }
    }
}

/// Goal: what is in use stays in memory. Method: a few documents are read over and over while many others are written.
#[test]
fn the_pager_takes_the_cold_and_leaves_the_hot() {
    for eviction in BOTH {
        let w = World::with(1, small(eviction, 400 << 10));
        let hot: Vec<String> = (0..20).map(|n| format!("hot{n}")).collect();
        hot.iter().for_each(|key| _ = w.set(key, &value(1, 1)));
        for n in 0..2000 {
            w.set(&format!("k{n}"), &value(n, 0));
            w.get(&hot[n as usize % hot.len()]).unwrap();
            if n % 4 == 0 {
                w.settle();
            }
        }
        let before = w.bucket.counters.fetches.get();
        hot.iter().for_each(|key| _ = w.get(key).unwrap());
        let fetched = w.bucket.counters.fetches.get() - before;
        assert!(fetched <= 2, "{eviction:?}: {fetched} of {} hot documents had left", hot.len());
    }
}

#[test]
fn misses_are_known_without_the_file() {
    let w = World::with(1, small(Eviction::Full, 64 << 20));
    for n in 0..2000 {
        w.set(&format!("k{n}"), "v");
    }
    w.settle();
    let w = w.restart();
    for round in ["after the start", "after everything has left"] {
        w.settle();
        w.bucket.squeeze();
        assert_eq!(stat(&w, "memory", "ep_items_in_memory"), 0);
        assert!(stat(&w, "memory", "ep_key_filter_memory") > 2000);
        let before = w.bucket.counters.fetches.get();
        for n in 0..2000 {
            assert_eq!(w.get(&format!("stranger{n}")), Err(OpError::NotFound));
        }
        let fetched = w.bucket.counters.fetches.get() - before;
        assert!(fetched < 30, "{round}: {fetched} of 2000 misses went to the file");
        assert_eq!(w.bucket.items(), 2000);
        assert_eq!(w.get("k77").unwrap(), b"v");
    }
}

#[test]
fn what_cannot_be_read_is_never_called_missing_nor_overwritten_blindly() {
    for (eviction, loaded) in [(Eviction::Full, true), (Eviction::Full, false), (Eviction::Value, false)] {
        let w = World::with(1, small(eviction, 64 << 20));
        w.set("k", "v");
        mutated(w.op("k", set("w")));
        w.settle();
        let w = w.restart();
        if loaded {
            w.settle();
            w.bucket.squeeze();
        }
        w.sim.storage.arm(FaultPlan::new().rule(Rule::new(Io::Read, Fault::Errno(5)).sticky()));
        for op in [Op::Get, Op::GetMeta, Op::Delete, set("x"), store(StoreMode::Add, 0, b"x"), Op::Touch { expiry: 5 }]
        {
            let result = w.op("k", op);
            assert!(matches!(result, Err(OpError::Unreadable(_))), "{eviction:?} {op:?}: {result:?}");
        }
        let key = k("k");
        assert!(matches!(w.bucket.observe(types::VbId(0), key.as_key()), Err(OpError::Unreadable(_))));
        w.sim.storage.arm(FaultPlan::new());
        refused(w.op("k", store(StoreMode::Add, 0, b"x")), OpError::Exists);
        assert_eq!((w.get("k").unwrap(), w.meta("k").2), (b"w".to_vec(), 2));
    }
}

#[test]
fn a_start_that_could_not_load_serves_from_the_file() {
    let w = World::with(1, small(Eviction::Value, 64 << 20));
    for n in 0..50 {
        w.set(&format!("k{n}"), "v");
    }
    w.settle();
    let w = w.restart();
    w.sim.storage.arm(FaultPlan::new().rule(Rule::new(Io::Read, Fault::Errno(5)).sticky()));
    w.settle();
    let progress = w.bucket.warm_up_progress();
    assert_eq!((progress.failed, progress.vbuckets_loaded, progress.is_done()), (1, 0, true));
    w.sim.storage.arm(FaultPlan::new());
    assert_eq!(w.bucket.items(), 50);
    assert_eq!(w.get("k7").unwrap(), b"v");
    assert_eq!(w.get("none"), Err(OpError::NotFound));
    mutated(w.op("k7", Op::Delete));
    w.file_everything();
    assert_eq!((w.get("k7"), w.bucket.items()), (Err(OpError::NotFound), 49));
}

/// Goal: before its vBucket is loaded a document answers as after. Method: a restart, and each operation asked at once.
#[test]
fn a_document_is_served_before_its_vbucket_is_loaded() {
    for eviction in BOTH {
        let w = World::with(1, small(eviction, 64 << 20));
        for n in 0..10 {
            w.set(&format!("k{n}"), &n.to_string());
            w.set(&format!("k{n}"), &n.to_string());
        }
        w.set("dead", "v");
        mutated(w.op("dead", Op::Delete));
        w.settle();
        let w = w.restart();
        assert!(!w.bucket.warm_up_progress().is_done());
        assert_eq!(w.bucket.items(), 10);
        assert_eq!(w.get("k0").unwrap(), b"0");
        refused(w.op("k1", store(StoreMode::Add, 0, b"x")), OpError::Exists);
        w.set("k2", "new");
        assert_eq!((w.meta("k2").2, w.bucket.items()), (3, 10));
        let key = k("k3");
        mutated(w.run(&durable(&key, Level::PersistMajority, set("sync"))));
        assert_eq!((w.meta("k3").2, w.bucket.items()), (3, 10));
        mutated(w.op("k4", Op::Delete));
        w.set("fresh", "v");
        assert_eq!(w.bucket.items(), 10);
        assert_eq!((w.meta("dead").0, w.meta("dead").2), (true, 2));
        assert!(matches!(
            w.op("k5", Op::Arithmetic { delta: Delta::Increment(1), initial: None, expiry: 0 }),
            Ok(Reply::Counter { value: 6, .. })
        ));
        let lock = cas_of(w.op("k6", Op::GetAndLock { lock_s: 10 }));
        refused(w.op("k6", set("x")), OpError::Locked);
        refused(w.op_cas("k7", Cas(1), set("x")), OpError::Exists);
        w.bucket.squeeze();
        // Deleted, filed and forgotten before the loader comes by: it must not bring the document back.
        w.bucket.page();
        w.settle();
        assert!(w.bucket.warm_up_progress().is_done());
        assert_eq!((w.get("k4"), w.bucket.items()), (Err(OpError::NotFound), 10));
        w.op_cas("k6", lock, Op::Unlock).unwrap();
        assert_eq!((w.get("k2").unwrap(), w.get("k3").unwrap()), (b"new".to_vec(), b"sync".to_vec()));
        assert_eq!((w.get("k9").unwrap(), w.get("fresh").unwrap()), (b"9".to_vec(), b"v".to_vec()));
        let Ok(Reply::Done { .. }) = ({
            let number = 1_000_000;
            w.bucket.flush(w.waiter(number));
            w.settle();
            w.answer(number).unwrap()
        }) else {
            panic!("flush")
        };
        assert_eq!((w.bucket.items(), w.get("k9")), (0, Err(OpError::NotFound)));
    }
}

#[test]
fn a_flush_finds_documents_that_are_only_in_the_file() {
    let w = World::with(1, small(Eviction::Full, 64 << 20));
    for n in 0..100 {
        w.set(&format!("k{n}"), "v");
    }
    w.settle();
    w.bucket.squeeze();
    w.set("unfiled", "v");
    w.bucket.flush(w.waiter(7_000_000));
    w.settle();
    w.answer(7_000_000).unwrap().unwrap();
    assert_eq!((w.bucket.items(), w.get("k5"), w.get("unfiled")), (0, Err(OpError::NotFound), Err(OpError::NotFound)));
    let w = w.restart();
    w.settle();
    assert_eq!(w.bucket.items(), 0);
}

#[test]
fn a_document_with_a_sync_write_under_way_stays() {
    for eviction in BOTH {
        let w = World::with(1, small(eviction, 64 << 20));
        w.set("k", &value(1, 1));
        w.settle();
        w.sim.storage.arm(FaultPlan::new().rule(Rule::new(Io::Write, Fault::Errno(5)).times(1)));
        let key = k("k");
        let number = w.start(&durable(&key, Level::PersistMajority, Op::Delete));
        w.bucket.squeeze();
        assert_eq!(stat(&w, "memory", "ep_values_in_memory"), 1);
        w.advance_s(60);
        mutated(w.answer(number).unwrap());
        assert_eq!(w.bucket.items(), 0);
    }
}

/// Goal: with threads writing, reading, flushing and paging at once, nobody is told anything but the truth. Method: each
/// thread has keys of its own and a map beside them; memory holds a small part of what is written, and the server is
/// started in between, so that loading goes on at the same time.
#[test]
fn threads_larger_than_memory_see_their_own_writes() {
    for eviction in BOTH {
        let (env, mut sim) = env::sim::env(6);
        let mut known: Vec<BTreeMap<String, String>> = vec![BTreeMap::new(); 3];
        let mut env = env;
        for round in 0..2u32 {
            let config = scheduler::PoolConfig { readers: 2, writers: 2, background: 1, compaction: 1, cpu: 2 };
            let pools = scheduler::Pools::start(&env, &config);
            let store_options = persist::Options::default();
            let store = persist::Store::open(&env, &pools, std::path::Path::new(DATA_DIR), store_options).unwrap();
            let engine = Engine::new(&env, &pools, store, Options::default());
            engine.warm_up().unwrap();
            let bucket =
                engine.bucket("default").unwrap_or_else(|| engine.create_bucket(small(eviction, 200 << 10)).unwrap());
            std::thread::scope(|scope| {
                for (thread, mine) in known.iter_mut().enumerate() {
                    let bucket = &bucket;
                    scope.spawn(move || own_keys(bucket, thread as u64, round, mine));
                }
            });
            let live: usize = known.iter().map(BTreeMap::len).sum();
            assert_eq!(bucket.items(), live as u64, "{eviction:?} round {round}");
            assert!(engine.drain().left.is_empty());
            assert!(bucket.counters.evicted.get() > 100, "{eviction:?}: {}", bucket.counters.evicted.get());
            drop((bucket, engine));
            pools.shutdown(scheduler::Stop::Cancel);
            env = sim.kill();
        }
    }
}

fn own_keys(bucket: &Arc<Bucket>, thread: u64, round: u32, mine: &mut BTreeMap<String, String>) {
    let letters = Arc::new(Letters::default());
    let mut number = 0;
    let mut ask = |name: &str, op: Op<'_>| -> OpResult {
        let key = k(name);
        let request = Request { vb: types::VbId((name.len() % 4) as u16), ..request(&key, op) };
        loop {
            number += 1;
            let ticket = Ticket { slot: thread as u32, generation: 0, request: number };
            let mailbox: Arc<dyn Mailbox> = Arc::clone(&letters) as _;
            let result = match bucket.execute(&request, &|| Waiter::new(Arc::clone(&mailbox), ticket)) {
                Outcome::Done(result) => result,
                Outcome::Pending => loop {
                    match letters.take(number) {
                        Some(result) => break result,
                        None => std::thread::yield_now(),
                    }
                },
            };
            match result {
                // The disk is behind, or the key's neighbours come and go too fast.
                Err(OpError::Temporary(_) | OpError::NoMemory) => std::thread::yield_now(),
                other => return other,
            }
        }
    };
    let mut dice = thread * 7919 + u64::from(round) * 104_729 + 1;
    for n in 0..600u32 {
        dice = dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let name = format!("{thread}.{}", (dice >> 33) % 400);
        let expected = mine.get(&name).cloned();
        let text = value(n, round);
        match (dice >> 20) % 8 {
            0..=2 => {
                mutated(ask(&name, set(&text)));
                mine.insert(name, text);
            }
            3 => match (ask(&name, store(StoreMode::Add, 0, text.as_bytes())), expected) {
                (Ok(_), None) => _ = mine.insert(name, text),
                (Err(OpError::Exists), Some(_)) => {}
                (other, expected) => panic!("{name}: {other:?}, expected {expected:?}"),
            },
            4 => match (ask(&name, Op::Delete), expected) {
                (Ok(_), Some(_)) => _ = mine.remove(&name),
                (Err(OpError::NotFound), None) => {}
                (other, expected) => panic!("{name}: {other:?}, expected {expected:?}"),
            },
            _ => match (ask(&name, Op::Get), expected) {
                (Ok(reply), Some(expected)) => assert_eq!(body(&reply), expected.as_bytes(), "{name}"),
                (Err(OpError::NotFound), None) => {}
                (other, expected) => panic!("{name}: {other:?}, expected {expected:?}"),
            },
        }
    }
}

/// Answers of which some are held back, and the reader's thread with them.
#[derive(Default)]
struct Gate {
    letters: Letters,
    held: Mutex<BTreeSet<u64>>,
    opened: Condvar,
    reached: Mutex<BTreeSet<u64>>,
}

impl Gate {
    fn open(&self, number: u64) {
        self.held.lock().remove(&number);
        self.opened.notify_all();
    }

    fn until_reached(&self, number: u64) {
        while !self.reached.lock().contains(&number) {
            std::thread::yield_now();
        }
    }
}

impl Mailbox for Gate {
    fn deliver(&self, ticket: Ticket, result: OpResult) {
        self.letters.deliver(ticket, result);
        self.reached.lock().insert(ticket.request);
        let mut held = self.held.lock();
        while held.contains(&ticket.request) {
            self.opened.wait(&mut held);
        }
    }
}

/// Goal: what was read from the file counts for nothing once something newer has left memory. Method: both readers are kept
/// busy, so that two keys are read in one go; between the answers, the second is changed, filed and evicted.
#[test]
fn a_read_that_was_overtaken_is_made_again() {
    const ELSEWHERE: u64 = 0;
    const FIRST: u64 = 1;
    const BEFORE: u64 = 2;
    const OVERTAKEN: u64 = 3;
    const CHANGE: u64 = 4;
    let (env, _sim) = env::sim::env(6);
    let config = scheduler::PoolConfig { readers: 2, writers: 1, background: 1, compaction: 1, cpu: 1 };
    let pools = scheduler::Pools::start(&env, &config);
    let options = persist::Options { readers: 2, ..persist::Options::default() };
    let store = persist::Store::open(&env, &pools, std::path::Path::new(DATA_DIR), options).unwrap();
    let engine = Engine::new(&env, &pools, store, Options::default());
    let bucket = engine.create_bucket(small(Eviction::Full, 64 << 20)).unwrap();
    let gate = Arc::new(Gate::default());
    let ask = |vb: u16, name: &str, op: Op<'_>, number: u64| {
        let mailbox: Arc<dyn Mailbox> = Arc::clone(&gate) as _;
        let ticket = Ticket { slot: 0, generation: 0, request: number };
        bucket.execute(&Request { vb: types::VbId(vb), ..request(&k(name), op) }, &|| {
            Waiter::new(Arc::clone(&mailbox), ticket)
        })
    };
    let read = |vb, name, number| assert!(matches!(ask(vb, name, Op::Get, number), Outcome::Pending), "{name}");
    let leave = || {
        for vb in 0..2 {
            let marks = &bucket.vbucket(types::VbId(vb)).unwrap().log.marks;
            while marks.filed() < marks.high() {
                std::thread::yield_now();
            }
        }
        bucket.squeeze();
    };
    for (vb, name) in [(1, "elsewhere"), (0, "first"), (0, "before"), (0, "overtaken")] {
        assert!(matches!(ask(vb, name, set("old"), 99), Outcome::Done(Ok(_))), "nothing to wait for");
    }
    leave();
    gate.held.lock().extend([ELSEWHERE, FIRST, BEFORE]);
    read(1, "elsewhere", ELSEWHERE);
    read(0, "first", FIRST);
    gate.until_reached(ELSEWHERE);
    gate.until_reached(FIRST);
    read(0, "before", BEFORE);
    read(0, "overtaken", OVERTAKEN);
    gate.open(FIRST);
    gate.until_reached(BEFORE);
    // The other reader brings it back for the change.
    gate.open(ELSEWHERE);
    assert!(matches!(ask(0, "overtaken", set("new"), CHANGE), Outcome::Pending));
    gate.until_reached(CHANGE);
    leave();
    gate.open(BEFORE);
    gate.until_reached(OVERTAKEN);
    assert_eq!(body(&gate.letters.take(OVERTAKEN).unwrap().unwrap()), b"new");
}
