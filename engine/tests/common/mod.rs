//! An engine on a simulated disk and clock, driven step by step; the only place where tests touch the API.
#![allow(dead_code, reason = "each test binary uses its own part")]

pub mod link;
pub mod seeds;

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use engine::*;
use env::Env;
use env::sim::{Sim, SimClock};
use parking_lot::Mutex;
use persist::{BucketSpec, Store};
use scheduler::{Order, Stepper};
use types::{BucketUuid, Cas, Datatype, KeyBuf, Level, VbId};

pub const DATA_DIR: &str = "/data";
pub const ALL: Datatype = Datatype(7);

/// Collects answers by request.
#[derive(Default)]
pub struct Letters(Mutex<HashMap<u64, OpResult>>);

impl Letters {
    pub fn take(&self, number: u64) -> Option<OpResult> {
        self.0.lock().remove(&number)
    }
}

impl Mailbox for Letters {
    fn deliver(&self, ticket: Ticket, result: OpResult) {
        let before = self.0.lock().insert(ticket.request, result);
        assert!(before.is_none(), "a request is answered once");
    }
}

pub struct World {
    pub sim: Sim,
    pub env: Env,
    pub stepper: Stepper,
    pub engine: Engine,
    pub bucket: Arc<Bucket>,
    pub recovered: Vec<Recovered>,
    commit_log: Option<persist::LogOptions>,
    letters: Arc<Letters>,
    next: std::cell::Cell<u64>,
}

pub fn spec() -> BucketSpec {
    BucketSpec {
        name: "default".into(),
        uuid: BucketUuid(1),
        vbuckets: 4,
        replicas: 0,
        quota_bytes: 64 << 20,
        flush_enabled: true,
        eviction: persist::Eviction::default(),
        rules: persist::WriteRules::default(),
        compaction: None,
    }
}

pub fn options() -> Options {
    Options::default()
}

/// What may go wrong on the way up.
pub fn try_open(env: &Env, clock: &SimClock) -> Result<(Stepper, Engine, Vec<Recovered>), persist::StoreError> {
    try_open_with(env, clock, None)
}

/// A commit log of a few small files.
pub fn small_log() -> persist::LogOptions {
    let driver = persist::LogDriver::Task;
    persist::LogOptions { segment_bytes: 16 << 10, bytes_max: 48 << 10, driver, ..persist::LogOptions::default() }
}

pub fn try_open_with(
    env: &Env,
    clock: &SimClock,
    commit_log: Option<persist::LogOptions>,
) -> Result<(Stepper, Engine, Vec<Recovered>), persist::StoreError> {
    let store_options = persist::Options { writers: 1, readers: 1, commit_log, ..persist::Options::default() };
    open_engine(env, clock, Order::InTurn, store_options)
}

/// An engine that has read its disk, and is stepped by hand.
pub fn open_engine(
    env: &Env,
    clock: &SimClock,
    order: Order,
    store_options: persist::Options,
) -> Result<(Stepper, Engine, Vec<Recovered>), persist::StoreError> {
    let stepper = Stepper::new(clock, order);
    let pools = stepper.pools();
    let store = Store::open(env, &pools, Path::new(DATA_DIR), store_options)?;
    let engine = Engine::new(env, &pools, store, options());
    let recovered = engine.warm_up()?;
    Ok((stepper, engine, recovered))
}

impl World {
    pub fn new(seed: u64) -> World {
        World::with(seed, spec())
    }

    pub fn with(seed: u64, spec: BucketSpec) -> World {
        let (_, sim) = env::sim::env(seed);
        World::open(sim, spec)
    }

    /// Changes go to a commit log first, and to the files later.
    pub fn logged(seed: u64) -> World {
        let (_, sim) = env::sim::env(seed);
        World::open_with(sim, spec(), Some(small_log()))
    }

    pub fn open(sim: Sim, spec: BucketSpec) -> World {
        World::open_with(sim, spec, None)
    }

    pub fn open_with(sim: Sim, spec: BucketSpec, commit_log: Option<persist::LogOptions>) -> World {
        let env = sim.env();
        let (stepper, engine, recovered) = try_open_with(&env, &sim.clock, commit_log.clone()).expect("opens");
        let bucket = engine.bucket(&spec.name).unwrap_or_else(|| engine.create_bucket(spec).expect("a new bucket"));
        let letters = Arc::new(Letters::default());
        World { sim, env, stepper, engine, bucket, recovered, commit_log, letters, next: std::cell::Cell::new(0) }
    }

    /// Ends the program without a word and starts it again.
    pub fn restart(self) -> World {
        self.restart_after(|sim| drop(sim.kill()))
    }

    /// Ends the program as `end` says and starts it again.
    pub fn restart_after(self, end: impl FnOnce(&mut Sim)) -> World {
        let World { mut sim, stepper, engine, bucket, commit_log, .. } = self;
        end(&mut sim);
        let spec = BucketSpec::clone(&bucket.spec());
        drop((bucket, engine, stepper));
        World::open_with(sim, spec, commit_log)
    }

    /// Begins a request: its number, and the answer if there is one at once.
    pub fn begin(&self, request: &Request<'_>) -> (u64, Option<OpResult>) {
        let number = self.next.get();
        self.next.set(number + 1);
        match self.bucket.execute(request, &|| self.waiter(number)) {
            Outcome::Done(result) => (number, Some(result)),
            Outcome::Pending => (number, None),
        }
    }

    /// For an answer that nobody takes.
    pub fn nobody(&self) -> Waiter {
        let number = self.next.get();
        self.next.set(number + 1);
        self.waiter(number)
    }

    pub fn waiter(&self, number: u64) -> Waiter {
        let letters: Arc<dyn Mailbox> = Arc::clone(&self.letters) as _;
        Waiter::new(letters, Ticket { slot: 0, generation: 0, request: number })
    }

    /// Begins a request that must not be answered at once.
    pub fn start(&self, request: &Request<'_>) -> u64 {
        let (number, now) = self.begin(request);
        assert!(now.is_none(), "answered at once: {now:?}");
        number
    }

    pub fn answer(&self, number: u64) -> Option<OpResult> {
        self.letters.take(number)
    }

    /// A request and its answer, stepping until it comes.
    pub fn run(&self, request: &Request<'_>) -> OpResult {
        let (number, now) = self.begin(request);
        if let Some(result) = now {
            return result;
        }
        loop {
            // No further than needed: what goes on behind the scenes, such as loading, stays under way.
            if let Some(result) = self.answer(number) {
                return result;
            }
            assert!(self.stepper.step(), "an answer once nothing is left to do");
        }
    }

    pub fn settle(&self) {
        self.stepper.run_until_idle();
    }

    pub fn advance_s(&self, seconds: u64) {
        self.stepper.advance(Duration::from_secs(seconds));
    }

    pub fn now_s(&self) -> u32 {
        self.env.clock.unix_s()
    }

    pub fn op(&self, key: &str, op: Op<'_>) -> OpResult {
        self.op_cas(key, Cas(0), op)
    }

    pub fn op_cas(&self, key: &str, cas: Cas, op: Op<'_>) -> OpResult {
        let key = k(key);
        self.run(&Request { cas, ..request(&key, op) })
    }

    pub fn get(&self, key: &str) -> Result<Vec<u8>, OpError> {
        self.op(key, Op::Get).map(|reply| body(&reply))
    }

    pub fn set(&self, key: &str, value: &str) -> Mutated {
        mutated(self.op(key, set(value)))
    }

    pub fn meta(&self, key: &str) -> (bool, u32, u64, Cas) {
        match self.op(key, Op::GetMeta) {
            Ok(Reply::Meta { deleted, expiry, rev, cas, .. }) => (deleted, expiry, rev.0, cas),
            other => panic!("{other:?}"),
        }
    }

    /// Everything written, and its tombstones and values dropped from memory.
    pub fn file_everything(&self) {
        self.settle();
        self.bucket.page();
    }
}

pub fn k(key: &str) -> KeyBuf {
    KeyBuf::in_default_collection(key.as_bytes()).unwrap()
}

pub fn request<'a>(key: &'a KeyBuf, op: Op<'a>) -> Request<'a> {
    let (cas, key) = (Cas(0), key.as_key());
    Request { vb: VbId(0), key, cas, durability: None, preserve_expiry: false, accepts: ALL, op }
}

pub fn durable<'a>(key: &'a KeyBuf, level: Level, op: Op<'a>) -> Request<'a> {
    Request { durability: Some(Requirement { level, timeout: None }), ..request(key, op) }
}

pub fn set(value: &str) -> Op<'_> {
    store(StoreMode::Set, 0, value.as_bytes())
}

pub fn store(mode: StoreMode, expiry: u32, value: &[u8]) -> Op<'_> {
    Op::Store { mode, flags: 0xdead_beef, expiry, datatype: Datatype::RAW, value }
}

pub fn mutated(result: OpResult) -> Mutated {
    match result {
        Ok(Reply::Mutated(mutated) | Reply::Counter { mutated, .. } | Reply::SubdocMutated { mutated, .. }) => mutated,
        other => panic!("{other:?}"),
    }
}

pub fn body(reply: &Reply) -> Vec<u8> {
    match reply {
        Reply::Value { item, body, .. } => body.of(item).to_vec(),
        other => panic!("{other:?}"),
    }
}

pub fn cas_of(result: OpResult) -> Cas {
    match result {
        Ok(Reply::Value { cas, .. } | Reply::Done { cas } | Reply::Lookup { cas, .. }) => cas,
        other => mutated(other).cas,
    }
}

#[track_caller]
pub fn refused(result: OpResult, error: OpError) {
    match result {
        Err(found) => assert_eq!(found, error),
        Ok(reply) => panic!("expected {error:?}, got {reply:?}"),
    }
}
