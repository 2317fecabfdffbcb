//! A bucket on a simulated disk and clock, and a consumer that writes down what it is told.
#![allow(dead_code, reason = "each test binary uses its own part")]

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use engine::{
    Bucket, Engine, Mailbox, Op, OpResult, Options, Outcome, Request, Requirement, StoreMode, Ticket, Waiter,
};
use env::Env;
use env::sim::Sim;
use persist::{BucketSpec, LogDriver, LogOptions, Store};
use replication::{Producer, Pulled, Refusal, Registry, Wake};
use scheduler::{Order, Stepper};
use types::{BucketUuid, Cas, Datatype, KeyBuf, Level, Seqno, VbId, VbUuid};
use wire::dcp::{Message, Open, OpenFlags, Packet, StreamFlags, StreamRequest};
use wire::{Feature, FeatureSet, FrameReader, Next, Side};

pub const VB: VbId = VbId(1);
pub const FOREVER: Seqno = Seqno(u64::MAX);

pub struct World {
    pub sim: Sim,
    pub env: Env,
    pub stepper: Stepper,
    pub engine: Engine,
    pub bucket: Arc<Bucket>,
    pub registry: Registry,
}

struct Nobody;

impl Mailbox for Nobody {
    fn deliver(&self, _: Ticket, _: OpResult) {}
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

impl World {
    pub fn new() -> World {
        World::with(spec())
    }

    pub fn with(spec: BucketSpec) -> World {
        World::open(spec, None)
    }

    /// With a commit log.
    pub fn logged() -> World {
        let (segment_bytes, bytes_max, driver) = (16 << 10, 48 << 10, LogDriver::Task);
        World::open(spec(), Some(LogOptions { segment_bytes, bytes_max, driver, ..LogOptions::default() }))
    }

    fn open(spec: BucketSpec, commit_log: Option<LogOptions>) -> World {
        let (_, sim) = env::sim::env(7);
        let env = sim.env();
        let stepper = Stepper::new(&sim.clock, Order::InTurn);
        let pools = stepper.pools();
        let options = persist::Options { writers: 1, readers: 1, commit_log, ..persist::Options::default() };
        let store = Store::open(&env, &pools, Path::new("/data"), options).expect("opens");
        let engine = Engine::new(&env, &pools, store, Options::default());
        engine.warm_up().expect("warms up");
        let bucket = engine.create_bucket(spec).expect("a new bucket");
        World { sim, env, stepper, engine, bucket, registry: Registry::default() }
    }

    pub fn now(&self) -> Duration {
        self.env.clock.monotonic()
    }

    fn run(&self, vb: VbId, key: &str, level: Option<Level>, op: Op<'_>) {
        let key = KeyBuf::in_default_collection(key.as_bytes()).expect("a key");
        let durability = level.map(|level| Requirement { level, timeout: None });
        let (cas, accepts) = (Cas(0), Datatype(7));
        let request = Request { vb, key: key.as_key(), cas, durability, preserve_expiry: false, accepts, op };
        let waiter = || Waiter::new(Arc::new(Nobody), Ticket { slot: 0, generation: 0, request: 0 });
        match self.bucket.execute(&request, &waiter) {
            Outcome::Done(result) => drop(result.expect("done")),
            Outcome::Pending => assert!(level.is_some(), "only a sync write waits"),
        }
    }

    pub fn set(&self, key: &str, value: &str) {
        self.set_in(VB, key, value);
    }

    pub fn set_in(&self, vb: VbId, key: &str, value: &str) {
        self.run(vb, key, None, store(value));
    }

    pub fn set_durably(&self, key: &str, value: &str) {
        self.run(VB, key, Some(Level::PersistMajority), store(value));
    }

    pub fn delete(&self, key: &str) {
        self.run(VB, key, None, Op::Delete);
    }

    /// Everything is in the files and, as far as it may, out of memory.
    pub fn file(&self) {
        self.stepper.run_until_idle();
    }

    pub fn uuid(&self) -> VbUuid {
        self.bucket.vb_uuid(VB).expect("a vBucket")
    }

    pub fn high(&self) -> Seqno {
        self.bucket.vbucket(VB).expect("a vBucket").log.marks.high()
    }
}

fn store(value: &str) -> Op<'_> {
    Op::Store { mode: StoreMode::Set, flags: 0, expiry: 0, datatype: Datatype::RAW, value: value.as_bytes() }
}

/// Counts how often somebody was woken.
#[derive(Default)]
pub struct Bedside(AtomicU64);

impl Wake for Bedside {
    fn wake(&self) {
        self.0.fetch_add(1, Relaxed);
    }
}

impl Bedside {
    pub fn wakes(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

pub struct Consumer<'w> {
    pub world: &'w World,
    pub producer: Producer,
    pub features: FeatureSet,
    pub bedside: Arc<Bedside>,
    /// Bytes of all that was told.
    pub told_bytes: usize,
}

pub fn request(start: u64) -> StreamRequest<'static> {
    let (flags, uuid) = (StreamFlags::default(), VbUuid(0));
    let at = Seqno(start);
    StreamRequest { flags, start: at, end: FOREVER, uuid, snap_start: at, snap_end: at, filter: b"" }
}

impl<'w> Consumer<'w> {
    pub fn new(world: &'w World) -> Consumer<'w> {
        Consumer::with(world, "c", OpenFlags::default(), &[])
    }

    pub fn with(world: &'w World, name: &str, flags: OpenFlags, features: &[Feature]) -> Consumer<'w> {
        let bedside = Arc::new(Bedside::default());
        let open = Open { flags: flags.with(OpenFlags::PRODUCER), name: name.as_bytes(), details: b"" };
        let features = FeatureSet::of(features);
        let wake = Arc::clone(&bedside) as _;
        let producer = Producer::open(&world.bucket, &open, features, &world.registry, wake, world.now());
        let producer = producer.unwrap_or_else(|refusal| panic!("{refusal:?}"));
        Consumer { world, producer, features, bedside, told_bytes: 0 }
    }

    pub fn control(&mut self, name: &str, value: &str) {
        self.producer.control(name.as_bytes(), value.as_bytes()).expect("agreed");
    }

    pub fn ask_of(&mut self, vb: VbId, request: &StreamRequest<'_>) -> Result<Vec<u8>, Refusal> {
        let packet = Packet { vb, opaque: 7, ..Packet::new(Message::StreamRequest(*request)) };
        self.producer.stream_request(&packet, request)
    }

    pub fn ask(&mut self, request: &StreamRequest<'_>) -> Result<Vec<u8>, Refusal> {
        self.ask_of(VB, request)
    }

    /// A stream from `start` of the history there is now.
    pub fn stream_from(&mut self, start: u64) {
        let uuid = self.world.uuid();
        self.ask(&StreamRequest { uuid, ..request(start) }).expect("a stream");
    }

    /// Takes out one portion of frames.
    pub fn pull(&mut self, bytes_max: usize) -> (Vec<String>, Pulled) {
        let mut out = Vec::new();
        let pulled = self.producer.pull(&mut out, bytes_max, self.world.now());
        self.told_bytes += out.len();
        (show_all(&out, self.features), pulled)
    }

    /// All there is to be told now, without files being read meanwhile.
    pub fn told(&mut self) -> Vec<String> {
        let (told, pulled) = self.pull(usize::MAX / 2);
        assert_eq!(pulled, Pulled::Dry);
        told
    }

    /// All there is to be told, whatever has to be read for it.
    pub fn told_everything(&mut self) -> Vec<String> {
        let mut told = Vec::new();
        loop {
            told.extend(self.told());
            if self.world.stepper.run_until_idle() == 0 {
                return told;
            }
        }
    }
}

fn show_all(bytes: &[u8], features: FeatureSet) -> Vec<String> {
    let (mut at, mut shown) = (0, Vec::new());
    while at < bytes.len() {
        let Ok(Next::Frame(frame)) = FrameReader::new(Side::Client).next(&bytes[at..]) else {
            panic!("no whole frame")
        };
        let packet = Packet::parse(&frame, features).expect("a message");
        shown.push(show(&packet));
        at += frame.frame_len();
    }
    shown
}

fn show(packet: &Packet<'_>) -> String {
    let key = |key: wire::Key<'_>| key.resolve().as_key().logical().escape_ascii().to_string();
    match packet.message {
        Message::SnapshotMarker(m) => {
            let from = if m.flags.has(wire::dcp::SnapshotFlags::DISK) { "disk" } else { "memory" };
            format!("{from} {}..{}", m.start, m.end)
        }
        Message::Mutation(m) => format!("{} {}={}", m.seqno, key(m.key), m.value.escape_ascii()),
        Message::Deletion(d) => format!("{} {} deleted", d.seqno, key(d.key)),
        Message::Expiration(d) => format!("{} {} expired", d.seqno, key(d.key)),
        Message::Prepare(p) => format!("{} {}? {}", p.seqno, key(p.key), p.value.escape_ascii()),
        Message::Commit(c) => format!("{} {}! of {}", c.seqno, key(c.key), c.prepared),
        Message::Abort(c) => format!("{} {} aborted", c.seqno, key(c.key)),
        Message::StreamEnd(reason) => format!("end: {reason:?}"),
        Message::SeqnoAdvanced(seqno) => format!("advanced {seqno}"),
        Message::Noop => "noop".to_owned(),
        Message::SetVbucketState { state, .. } => format!("be {}", state.name()),
        other => format!("{other:?}"),
    }
}
