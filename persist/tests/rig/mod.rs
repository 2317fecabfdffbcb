//! A store on simulated storage, stepped by hand, and a model of what it must hold.

#![allow(dead_code, reason = "each test binary uses a part")]

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use changelog::{Changelog, FailoverEntry, FailoverTable, VbRecord};
use couchstore::kv::CollectionStats;
use couchstore::{Couch, check};
use env::sim::SimClock;
use env::{Env, OpenMode};
use persist::{
    BucketSpec, BucketStore, CompactionOptions, CompactionReport, LogDriver, LogOptions, Nudge, Options, Purge, Store,
    StoreError, Urgency, WarmUp,
};
use scheduler::{Order, Stepper};
use types::{
    BucketUuid, Cas, CollectionId, Datatype, DeleteSource, Item, KeyBuf, Kind, Level, Meta, RevSeqno, Seqno, VbId,
    VbState, VbUuid,
};

pub const DATA: &str = "/data";
pub const BUCKET: &str = "b";
pub const VBS: u16 = 4;

pub fn spec() -> BucketSpec {
    BucketSpec {
        name: BUCKET.into(),
        uuid: BucketUuid(5),
        vbuckets: VBS,
        replicas: 0,
        quota_bytes: 1 << 20,
        flush_enabled: false,
        eviction: persist::Eviction::default(),
        rules: persist::WriteRules::default(),
        compaction: None,
    }
}

pub fn file(vb: u16, rev: u64) -> PathBuf {
    Path::new(DATA).join(format!("buckets/{BUCKET}/{vb}.couch.{rev}"))
}

pub fn record(state: VbState) -> VbRecord {
    let failover = FailoverTable::new(FailoverEntry { uuid: VbUuid(77), seqno: Seqno(0) });
    VbRecord::new(state, failover)
}

/// How the store works in a test.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// Each commit opens its file and closes it.
    Direct,
    /// Files are kept open.
    #[default]
    Kept,
    /// Files are kept open, but too few for all vBuckets.
    Evicting,
    /// Changes go to the commit log, and to the files when the store opens again or stops.
    Logged,
    /// The same with a log so small that files are written all the time to make room in it.
    Recycling,
}

pub const MODES: [Mode; 5] = [Mode::Direct, Mode::Kept, Mode::Evicting, Mode::Logged, Mode::Recycling];
/// Those in which a commit of the file is what makes a change durable.
pub const FILE_MODES: [Mode; 3] = [Mode::Direct, Mode::Kept, Mode::Evicting];
pub const LOG_MODES: [Mode; 2] = [Mode::Logged, Mode::Recycling];

impl Mode {
    pub fn options(self) -> Options {
        let files_max = match self {
            Mode::Direct => 0,
            Mode::Kept | Mode::Logged => 1024,
            Mode::Evicting | Mode::Recycling => 2,
        };
        let commit_log = self.is_logged().then(|| LogOptions {
            segment_bytes: 16 << 10,
            bytes_max: 48 << 10,
            driver: LogDriver::Task,
            ..LogOptions::default()
        });
        // So small that many things can happen between two steps of a compaction.
        let compaction = CompactionOptions { piece_bytes_max: 64, sync_every: 4096, ..CompactionOptions::default() };
        // Some with space kept back, some without.
        let reserve_bytes = if matches!(self, Mode::Kept | Mode::Recycling) { 64 << 10 } else { 0 };
        Options { files_max, commit_log, compaction, reserve_bytes, ..Options::default() }
    }

    pub fn is_logged(self) -> bool {
        matches!(self, Mode::Logged | Mode::Recycling)
    }

    fn value_bytes_max(self) -> u64 {
        if self == Mode::Recycling { 4000 } else { 40 }
    }
}

#[derive(Default)]
struct Nudges {
    moves: AtomicU64,
    expired: Mutex<Vec<KeyBuf>>,
}

impl Nudge for Nudges {
    fn marks_moved(&self, _: VbId) {
        self.moves.fetch_add(1, Ordering::Relaxed);
    }

    fn expired(&self, _: VbId, keys: Vec<KeyBuf>) {
        self.expired.lock().unwrap().extend(keys);
    }
}

/// Where the end of a compaction is told.
#[derive(Clone, Default)]
pub struct Answer(Arc<Mutex<Vec<Result<CompactionReport, StoreError>>>>);

impl Answer {
    /// `None`: not yet.
    pub fn get(&self) -> Option<Result<CompactionReport, StoreError>> {
        let told = self.0.lock().unwrap();
        assert!(told.len() <= 1, "told once");
        told.first().cloned()
    }

    pub fn report(&self) -> CompactionReport {
        self.get().expect("it has ended").expect("it has not failed")
    }
}

/// Everything that was ever appended to each vBucket, and how much of it was reported durable.
#[derive(Clone, Default)]
pub struct History {
    pub mode: Mode,
    pub bucket_made: bool,
    pub changes: BTreeMap<u16, Vec<Item>>,
    pub durable: BTreeMap<u16, u64>,
    /// Files are compacted, too, at random moments.
    pub compacts: bool,
}

impl History {
    pub fn note_durable(&mut self, node: &Node) {
        self.durable = (0..VBS).map(|vb| (vb, node.durable(vb))).collect();
    }
}

/// One run of a server's lower half.
pub struct Node {
    pub env: Env,
    pub clock: SimClock,
    pub stepper: Stepper,
    pub store: Store,
    pub bucket: Arc<BucketStore>,
    pub logs: Vec<Arc<Changelog>>,
    nudges: Arc<Nudges>,
}

impl Node {
    /// Opens the store, makes the bucket if it is not there, and attaches a changelog to each vBucket.
    pub fn start(env: &Env, seed: u64) -> Result<Node, StoreError> {
        Node::start_with(env, seed, Mode::default().options())
    }

    pub fn start_with(env: &Env, seed: u64, options: Options) -> Result<Node, StoreError> {
        // The stepper moves time itself, so each run has a clock of its own.
        let clock = SimClock::new();
        let env = Env { clock: Arc::new(clock.clone()), ..env.clone() };
        let stepper = Stepper::new(&clock, Order::Seeded(seed));
        let store = Store::open(&env, &stepper.pools(), Path::new(DATA), options)?;
        let bucket = match store.buckets().pop() {
            Some(bucket) => bucket,
            None => store.create_bucket(spec())?,
        };
        let nudges = Arc::new(Nudges::default());
        let logs = attach_with(&bucket, &nudges);
        Ok(Node { env, clock, stepper, store, bucket, logs, nudges })
    }

    pub fn put(&self, vb: u16, key: &str, value: Option<&[u8]>, kind: Kind) -> Item {
        let item = append(&self.logs[usize::from(vb)], &self.env, key, value, kind);
        self.bucket.changed(VbId(vb), Urgency::Durable);
        item
    }

    pub fn set(&self, vb: u16, key: &str, value: &[u8]) -> Item {
        self.put(vb, key, Some(value), Kind::Committed { prepared: None })
    }

    /// Runs until nothing is left to do now.
    pub fn run(&self) {
        self.stepper.run_until_idle();
    }

    /// The mark, and that it agrees with its twin.
    pub fn durable(&self, vb: u16) -> u64 {
        let marks = &self.logs[usize::from(vb)].marks;
        assert!(marks.durable() == marks.filed() || self.store.log_stats().is_some());
        marks.durable().0
    }

    /// Brings everything to the files.
    pub fn file_all(&self) {
        self.run();
        self.store.start_drain();
        self.run();
    }

    pub fn poisoned(&self, vb: u16) -> Option<&str> {
        self.logs[usize::from(vb)].marks.poisoned()
    }

    pub fn nudges(&self) -> u64 {
        self.nudges.moves.load(Ordering::Relaxed)
    }

    pub fn compact(&self, vb: u16, purge: Purge) -> Answer {
        let answer = Answer::default();
        let told = answer.clone();
        self.bucket.compact(VbId(vb), purge, Box::new(move |result| told.0.lock().unwrap().push(result)));
        answer
    }

    /// The keys that compactions found expired, as clients call them.
    pub fn expired(&self) -> Vec<Vec<u8>> {
        self.nudges.expired.lock().unwrap().iter().map(|key| key.as_key().as_bytes()[1..].to_vec()).collect()
    }

    pub fn warm_up(&self, vb: u16) -> Vec<Item> {
        let mut items = Vec::new();
        let all = WarmUp { tombstones: true, prove: true };
        self.bucket.warm_up(VbId(vb), all, &mut |_, _| true, &mut |item| items.push(item)).expect("a file that opened");
        items
    }
}

/// A changelog for each vBucket, going on where its file ends.
pub fn attach(bucket: &BucketStore) -> Vec<Arc<Changelog>> {
    attach_with(bucket, &Arc::new(Nudges::default()))
}

/// The same for a bucket with another number of vBuckets.
pub fn attach_to(bucket: &BucketStore, vbs: u16) -> Vec<Arc<Changelog>> {
    attach_some(bucket, vbs, &Arc::new(Nudges::default()))
}

fn attach_with(bucket: &BucketStore, nudges: &Arc<Nudges>) -> Vec<Arc<Changelog>> {
    attach_some(bucket, VBS, nudges)
}

fn attach_some(bucket: &BucketStore, vbs: u16, nudges: &Arc<Nudges>) -> Vec<Arc<Changelog>> {
    let recovered: BTreeMap<_, _> = bucket.recovered().into_iter().map(|r| (r.vb, r)).collect();
    let deleted: BTreeMap<_, _> = bucket.deleted().into_iter().map(|d| (d.vb, d)).collect();
    let logs = (0..vbs).map(|vb| {
        let log = match (recovered.get(&VbId(vb)), deleted.get(&VbId(vb))) {
            (Some(r), _) => Changelog::new(r.high, r.max_cas, r.record.clone()),
            (None, Some(d)) => {
                Changelog::new(Seqno(0), d.max_cas, VbRecord { rollbacks: d.rollbacks, ..record(VbState::Dead) })
            }
            (None, None) => Changelog::new(Seqno(0), Cas(0), record(VbState::Active)),
        };
        let log = Arc::new(log);
        bucket.attach(VbId(vb), Arc::clone(&log), nudges.clone());
        log
    });
    logs.collect()
}

pub fn append(log: &Changelog, env: &Env, key: &str, value: Option<&[u8]>, kind: Kind) -> Item {
    let key = KeyBuf::in_default_collection(key.as_bytes()).unwrap();
    let cas = log.fresh_cas(&*env.clock);
    log.append_with_cas(cas, |stamp| {
        let deleted = value.is_none().then_some(DeleteSource::Explicit);
        let meta = Meta {
            seqno: stamp.seqno,
            cas: stamp.cas,
            rev: RevSeqno(stamp.seqno.0),
            flags: 0xdead_beef,
            expiry: if deleted.is_some() { 1 } else { 0 },
            datatype: Datatype::RAW,
            deleted,
        };
        Item::new(key.as_key(), meta, kind, value)
    })
}

/// What a file at seqno `high` must hold: the newest version of each document, and the prepares still open.
pub fn model(changes: &[Item], high: u64) -> (BTreeMap<u64, Item>, Facts) {
    let (mut docs, mut prepares) = (BTreeMap::new(), BTreeMap::new());
    let mut facts = Facts::default();
    for item in changes.iter().filter(|item| item.seqno().0 <= high) {
        match item.kind() {
            Kind::Committed { prepared } => {
                docs.insert(item.id().to_vec(), item.clone());
                facts.completed = facts.completed.max(prepared.unwrap_or_default().0);
            }
            Kind::Prepare { .. } => {
                prepares.insert(item.id().to_vec(), item.clone());
                facts.prepared = item.seqno().0;
            }
            Kind::Abort { prepared } => {
                prepares.insert(item.id().to_vec(), item.clone());
                facts.completed = facts.completed.max(prepared.0);
            }
        }
    }
    let is_prepare = |item: &&Item| matches!(item.kind(), Kind::Prepare { .. });
    facts.on_disk_prepares = prepares.values().filter(is_prepare).count() as u64;
    facts.items = docs.values().filter(|item| !item.is_deleted()).count() as u64;
    let open = prepares.into_values().filter(|p| is_prepare(&p) && p.seqno().0 > facts.completed);
    (docs.into_values().chain(open).map(|item| (item.seqno().0, item)).collect(), facts)
}

#[derive(Debug, Default, PartialEq, Eq)]
pub struct Facts {
    pub completed: u64,
    pub prepared: u64,
    pub on_disk_prepares: u64,
    pub items: u64,
}

/// Goal: whatever was reported durable is there, in an order that happened, and nothing else. Opens the store as a new
/// run would, compares each vBucket with the model, proves its file whole, and goes on writing.
pub fn assert_holds(env: &Env, history: &History) -> Node {
    let node = Node::start_with(env, 1, history.mode.options()).expect("a crash leaves a store that opens");
    assert_node_holds(&node, history);
    for vb in 0..VBS {
        let item = node.set(vb, "later", b"still works");
        node.run();
        assert_eq!(node.durable(vb), item.seqno().0, "vb {vb} goes on");
        node.file_all();
        let fetched = node.bucket.fetch_now(VbId(vb), item.key()).unwrap().expect("just written");
        assert_eq!(fetched.value(), b"still works");
    }
    node
}

pub fn assert_node_holds(node: &Node, history: &History) {
    let recovered: BTreeMap<_, _> = node.bucket.recovered().into_iter().map(|r| (r.vb.0, r)).collect();
    for vb in 0..VBS {
        let changes = history.changes.get(&vb).map(Vec::as_slice).unwrap_or_default();
        let durable = history.durable.get(&vb).copied().unwrap_or(0);
        let high = recovered.get(&vb).map_or(0, |r| r.high.0);
        let last = changes.last().map_or(0, |item| item.seqno().0);
        assert!(high >= durable, "vb {vb}: acknowledged up to {durable}, found {high}");
        assert!(high <= last, "vb {vb}: seqno {high} was never given out, the last one is {last}");

        let (expected, facts) = model(changes, high);
        let found = node.warm_up(vb);
        assert!(found.is_sorted_by_key(|item| item.seqno()), "vb {vb}: in seqno order");
        let purge = recovered.get(&vb).map_or(Seqno(0), |r| r.purge);
        let seqnos: BTreeSet<_> = found.iter().map(|item| item.seqno()).collect();
        for item in expected.values().filter(|item| !seqnos.contains(&item.seqno())) {
            let may_be_purged = item.is_deleted() && item.is_committed() && item.seqno() <= purge;
            assert!(
                may_be_purged && item.seqno().0 < high,
                "vb {vb} at {high}, purged to {purge}: {} lacks",
                item.seqno()
            );
        }
        for item in &found {
            let original = expected.get(&item.seqno().0).expect("nothing is invented");
            assert_eq!((item.id(), item.meta()), (original.id(), original.meta()), "vb {vb}");
            assert_eq!((item.value(), item.has_value()), (original.value(), original.has_value()), "vb {vb}");
        }
        let Some(r) = recovered.get(&vb) else { continue };
        let found = Facts {
            completed: r.completed.0,
            prepared: r.prepared.0,
            on_disk_prepares: r.on_disk_prepares,
            items: facts.items,
        };
        let open = expected.values().filter(|item| !item.is_committed()).count() as u64;
        let mut facts = facts;
        // Prepares that were completed stay until a compaction, unless they were completed in one flush.
        if (open..facts.on_disk_prepares).contains(&r.on_disk_prepares) {
            facts.on_disk_prepares = r.on_disk_prepares;
        }
        assert_eq!(found, facts, "vb {vb} at {high}");
        assert_counts(&node.env, &Path::new(DATA).join("buckets").join(BUCKET).join(&r.file), &facts);
    }
}

/// The file passes the format's own check, and what it says of itself agrees with a recount.
fn assert_counts(env: &Env, path: &Path, facts: &Facts) {
    let open = || env.storage.open(path, OpenMode::Read).unwrap();
    let report = check::check(open(), path, check::Depth::Newest).unwrap();
    assert!(report.is_whole(), "{}: {:?}", path.display(), report.damage);
    let couch = Couch::open(open(), path, couchstore::Mode::Strict).unwrap();
    let (mut prepares, mut bytes) = (0, 0);
    let _ = couch
        .changes_since(0, |info| {
            prepares += u64::from(info.id[0] == 2 && !info.deleted);
            bytes += info.body_size + (info.id.len() + info.rev_meta.len()) as u64;
            std::ops::ControlFlow::Continue(())
        })
        .unwrap();
    assert_eq!(prepares, facts.on_disk_prepares);
    if couch.header().update_seq == 0 {
        return;
    }
    let stats = couch.local(CollectionStats::id(CollectionId(0)).as_bytes()).unwrap().expect("counts");
    let expected =
        CollectionStats { item_count: facts.items, high_seqno: couch.header().update_seq, disk_bytes: bytes };
    assert_eq!(CollectionStats::decode(&stats).unwrap(), expected);
}

/// A workload: `rounds` rounds of changes in random vBuckets, with flushes at random moments. Never panics on errors, as
/// the power may go at any time.
pub fn work(env: &Env, mode: Mode, seed: u64, rounds: u64) -> History {
    let mut history = History { mode, ..History::default() };
    let Ok(node) = Node::start_with(env, seed, mode.options()) else { return history };
    history.bucket_made = true;
    work_on(&node, seed, rounds, &mut history);
    history
}

pub fn work_on(node: &Node, seed: u64, rounds: u64, history: &mut History) {
    let mut writing = Writing::new(seed);
    (0..rounds).for_each(|_| writing.change(node, history));
    node.run();
    history.note_durable(node);
}

/// Changes of all kinds, one after the other.
pub struct Writing {
    dice: Dice,
    round: u64,
    /// Of each vBucket in order, as they are completed.
    prepared: BTreeMap<u16, VecDeque<(Seqno, String, Vec<u8>)>>,
}

impl Writing {
    pub fn new(seed: u64) -> Writing {
        Writing { dice: Dice(seed), round: 0, prepared: BTreeMap::new() }
    }

    /// Makes a change, mostly, and takes a few steps.
    pub fn change(&mut self, node: &Node, history: &mut History) {
        let (dice, round) = (&mut self.dice, self.round);
        self.round += 1;
        let vb = dice.below(u64::from(VBS)) as u16;
        let key = format!("k{}", dice.below(6));
        let filler = "x".repeat(dice.below(history.mode.value_bytes_max()) as usize);
        let value = format!("{round}-{filler}").into_bytes();
        let pending = self.prepared.entry(vb).or_default();
        let is_pending = pending.iter().any(|(_, of, _)| *of == key);
        let item = match if is_pending && dice.below(10) < 7 { pending.pop_front() } else { None } {
            Some((seqno, key, value)) => match dice.below(7) {
                0..5 => node.put(vb, &key, Some(&value), Kind::Committed { prepared: Some(seqno) }),
                _ => node.put(vb, &key, None, Kind::Abort { prepared: seqno }),
            },
            None if is_pending => return,
            None => match dice.below(10) {
                0..6 => node.set(vb, &key, &value),
                6..8 => node.put(vb, &key, None, Kind::Committed { prepared: None }),
                _ => {
                    let item = node.put(vb, &key, Some(&value), Kind::Prepare { level: Level::PersistMajority });
                    pending.push_back((item.seqno(), key, value));
                    item
                }
            },
        };
        history.changes.entry(vb).or_default().push(item);
        if history.compacts && dice.below(3) == 0 {
            node.compact(vb, Purge { all: dice.below(2) == 0, ..Purge::default() });
        }
        for _ in 0..dice.below(if history.compacts { 8 } else { 3 }) {
            node.stepper.step();
        }
    }
}

/// SplitMix64: small, and the same everywhere.
pub struct Dice(pub u64);

impl Dice {
    pub fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ z >> 31) % n
    }
}

/// Names the seed of a loop's round when that round panics.
pub struct Seed(pub u64);

impl Drop for Seed {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("failing seed: {}", self.0);
        }
    }
}
