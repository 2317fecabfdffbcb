//! From files to memory, while clients are served.
//!
//! ```text
//!     headers read, open prepares committed ──▶ vBucket after vBucket: keys, and values while there is room ──▶ all loaded
//!                                                  │
//!                                                  └── grace over: ready; a key asked for before its turn is looked up in the file
//! ```
//! How long a start takes so depends on the number of files, not on what is in them. What is damaged is found by reading it:
//! damage met within the grace stops the start; what is met later is told, and whoever asks for what cannot be read gets an
//! error.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use persist::{Damages, StoreError, Verdict};
use scheduler::park::{Bay, Look, Wake};
use scheduler::{Class, Context, Next, PoolKind, Task, TaskHandle};
use types::rank::{Mutex, Rank};
use types::{Item, KeyBuf, VbId, VbState};

use crate::bucket::Bucket;
use crate::vbucket::VBucket;

/// What a bucket was found to hold.
#[derive(Clone, Debug, Default)]
pub struct Recovered {
    pub bucket: String,
    /// With a file.
    pub vbuckets: usize,
    pub documents: u64,
    /// In the files; they are not loaded.
    pub tombstones: u64,
    /// Sync writes that were under way and are now committed.
    pub recommitted: u64,
    /// Sum of the vBuckets' high seqnos.
    pub seqnos: u64,
    /// Until the bucket could be served.
    pub took: Duration,
}

/// How far loading has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WarmUpProgress {
    pub vbuckets_loaded: usize,
    pub vbuckets_total: usize,
    /// Documents read, and those that came with their value.
    pub keys: u64,
    pub values: u64,
    /// Of keys and values.
    pub bytes: u64,
    /// vBuckets that could not be read to their end: each of their documents is looked up in the file.
    pub failed: usize,
    /// Since the bucket was served; stands still once everything is loaded.
    pub took: Duration,
}

impl WarmUpProgress {
    pub fn is_done(&self) -> bool {
        self.vbuckets_loaded + self.failed >= self.vbuckets_total
    }
}

/// How many vBuckets are loaded at once.
const LOADERS: usize = 2;
/// One whose file could not be read is tried again after so long, then after twice that, and so on.
const AGAIN_FIRST: Duration = Duration::from_secs(1);
const AGAIN_MAX: Duration = Duration::from_secs(60);

/// The loading of a bucket.
pub(crate) struct WarmUp {
    files: OnceLock<Vec<VbId>>,
    next: AtomicUsize,
    /// Those that are tried again.
    again: Mutex<Vec<VbId>>,
    ends: Bay<Ends>,
    keys: AtomicU64,
    values: AtomicU64,
    bytes: AtomicU64,
    began: OnceLock<Duration>,
    ended: OnceLock<Duration>,
    pub recovered: OnceLock<Recovered>,
    tasks: OnceLock<Vec<TaskHandle>>,
}

/// What came of the vBuckets whose turn has been.
#[derive(Default)]
struct Ends {
    loaded: usize,
    failed: BTreeMap<VbId, StoreError>,
}

impl Default for WarmUp {
    fn default() -> WarmUp {
        WarmUp {
            files: OnceLock::new(),
            next: AtomicUsize::new(0),
            again: Mutex::ranked(Rank::CommitQueue, Vec::new()),
            ends: Bay::new(Ends::default()),
            keys: AtomicU64::new(0),
            values: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            began: OnceLock::new(),
            ended: OnceLock::new(),
            recovered: OnceLock::new(),
            tasks: OnceLock::new(),
        }
    }
}

impl WarmUp {
    pub fn cancel(&self) {
        self.tasks.get().into_iter().flatten().for_each(TaskHandle::cancel);
    }
}

impl Bucket {
    /// Takes over what the files say of themselves, and the sync writes that were under way.
    pub(crate) fn recover(&self) -> Result<Recovered, StoreError> {
        let began = self.env.clock.monotonic();
        let files = self.store.recovered();
        let mut recovered = Recovered { bucket: self.name().to_owned(), vbuckets: files.len(), ..Recovered::default() };
        let mut damages = Vec::new();
        for file in &files {
            let vb = &self.vbuckets[usize::from(file.vb.0)];
            match self.recover_prepares(vb) {
                // Elsewhere they wait for whoever makes the vBucket active.
                Ok(count) => recovered.recommitted += if vb.state() == VbState::Active { count } else { 0 },
                // The others are looked at too, so that one start shows all of it.
                Err(StoreError::Damaged(found)) => damages.extend(found.0),
                Err(other) => return Err(other),
            }
            if vb.full_eviction {
                vb.table.reserve_filter(file.alive + file.tombstones);
            }
            recovered.seqnos += file.high.0;
            recovered.tombstones += file.tombstones;
            recovered.documents += vb.live();
            match vb.state() {
                VbState::Active => vb.retrack(),
                _ => vb.become_passive(),
            }
        }
        if !damages.is_empty() {
            return Err(StoreError::Damaged(Damages(damages)));
        }
        let _ = self.warm_up.files.set(files.iter().map(|file| file.vb).collect());
        let now = self.env.clock.monotonic();
        let _ = self.warm_up.began.set(now);
        recovered.took = now.saturating_sub(began);
        let _ = self.warm_up.recovered.set(recovered.clone());
        Ok(recovered)
    }

    pub(crate) fn recover_prepares(&self, vb: &VBucket) -> Result<u64, StoreError> {
        let prepares = self.store.open_prepares(vb.id)?;
        let mut count = 0;
        for prepare in &prepares {
            // What it will replace must be known when it is committed.
            let committed = self.store.fetch_now(vb.id, prepare.key())?;
            let mut slot = vb.table.lock(prepare.key());
            // A snapshot that a replica has half of may have brought the outcome before it says so of all of them.
            let is_decided = committed.as_ref().is_some_and(|item| item.seqno() > prepare.seqno());
            if let Some(item) = committed {
                slot.put_committed(item, false);
            }
            if !is_decided {
                slot.put_prepare(prepare.clone());
                count += 1;
            }
        }
        Ok(count)
    }

    /// Sleeps until everything is loaded, but not past `deadline` of the monotonic clock. The error is the damage met by then.
    pub(crate) fn load_until(&self, deadline: Duration) -> Result<(), Damages> {
        let total = self.warm_up.files.get().map_or(0, Vec::len);
        let damages = self.warm_up.ends.wait(|ends| {
            let left = deadline.saturating_sub(self.env.clock.monotonic());
            if ends.loaded + ends.failed.len() < total && !left.is_zero() {
                return Look::NothingFor(left);
            }
            let damages = ends.failed.values().filter_map(|error| match error {
                StoreError::Damaged(found) => Some(found.0.clone()),
                _ => None,
            });
            Look::Found(damages.flatten().collect::<Vec<_>>())
        });
        if damages.is_empty() { Ok(()) } else { Err(Damages(damages)) }
    }

    /// The vBuckets that could not be read whole, and why.
    pub fn unloadable(&self) -> Vec<(VbId, String)> {
        self.warm_up.ends.read(|ends| ends.failed.iter().map(|(vb, error)| (*vb, error.to_string())).collect())
    }

    /// Begins to load.
    pub(crate) fn warm_up(self: &Arc<Bucket>) {
        let count = self.warm_up.files.get().map_or(0, Vec::len).min(LOADERS);
        let tasks: Vec<_> = (0..count)
            .map(|_| {
                let pause = Mutex::ranked(Rank::CommitQueue, Duration::ZERO);
                self.pools.spawn(PoolKind::Background, Arc::new(Loader { bucket: Arc::downgrade(self), pause }))
            })
            .collect();
        tasks.iter().for_each(TaskHandle::wake);
        let _ = self.warm_up.tasks.set(tasks);
    }

    /// How far the loading of what was on disk has come.
    pub fn warm_up_progress(&self) -> WarmUpProgress {
        let warm_up = &self.warm_up;
        let began = warm_up.began.get().copied().unwrap_or_default();
        let ended = warm_up.ended.get().copied().unwrap_or_else(|| self.env.clock.monotonic());
        let vbuckets_total = warm_up.files.get().map_or(0, Vec::len);
        let (vbuckets_loaded, failed) = warm_up.ends.read(|ends| (ends.loaded, ends.failed.len()));
        WarmUpProgress {
            vbuckets_loaded,
            vbuckets_total,
            keys: warm_up.keys.load(Relaxed),
            values: warm_up.values.load(Relaxed),
            bytes: warm_up.bytes.load(Relaxed),
            failed,
            took: if vbuckets_total == 0 { Duration::ZERO } else { ended.saturating_sub(began) },
        }
    }

    /// Loads one vBucket: all of its keys, or under full eviction a filter of them; values while there is room.
    pub(crate) fn load(&self, id: VbId) -> Result<(), StoreError> {
        let (vb, progress) = (&self.vbuckets[usize::from(id.0)], &self.warm_up);
        let clears = vb.table.clears();
        let filed = vb.log.marks.filed();
        let has_room = |bytes: usize| self.memory_used() + bytes as u64 <= self.low_mark();
        let (mut documents, mut read_bytes, mut keys, mut values) = (0i64, 0, 0, 0);
        let mut each = |item: Item| {
            if !item.is_committed() {
                return;
            }
            documents += i64::from(!item.is_deleted());
            progress.keys.fetch_add(1, Relaxed);
            progress.values.fetch_add(item.has_value().into(), Relaxed);
            keys += 1;
            values += u64::from(item.has_value());
            let bytes = (item.id().len() + item.value().len()) as u64;
            read_bytes += bytes;
            progress.bytes.fetch_add(bytes, Relaxed);
            let key = KeyBuf::copy_of(item.key());
            let mut slot = vb.table.lock(key.as_key());
            if vb.table.clears() != clears {
                return;
            }
            slot.note_key();
            if slot.document().is_some() {
                return;
            }
            // Of these a newer version may have come and left again since the file was opened; values alone never take
            // the key along, and tombstones stay while this runs.
            let passed = vb.table.left_upto() > filed || item.is_deleted() || !item.resident();
            if !(vb.full_eviction && passed) {
                slot.put_committed(item, false);
            }
        };
        let options = persist::WarmUp { tombstones: vb.full_eviction, prove: true };
        let read = self.store.warm_up(id, options, &mut |_, bytes| has_room(bytes), &mut each);
        self.store.governor().spent(read_bytes);
        let read = read.inspect_err(|_| {
            // They come again.
            let counted = [(&progress.keys, keys), (&progress.values, values), (&progress.bytes, read_bytes)];
            counted.into_iter().for_each(|(count, by)| _ = count.fetch_sub(by, Relaxed));
        })?;
        let said = read.map_or(0, |file| file.alive.saturating_sub(file.on_disk_prepares));
        {
            let _state = vb.state.read();
            if vb.table.clears() != clears {
                return Ok(());
            }
            vb.set_loaded(documents - said as i64);
        }
        // The file may have had everything before this, and then nobody looks again.
        if vb.live_is_rough.load(Relaxed) {
            self.count_anew(vb);
        }
        Ok(())
    }
}

/// Loads one vBucket a run, whenever there is nothing better to do and the governor lets it.
struct Loader {
    bucket: Weak<Bucket>,
    /// Since the last attempt at those that are tried again.
    pause: Mutex<Duration>,
}

impl Loader {
    /// Loads what could not be read for a reason that may have passed.
    fn load_again(&self, bucket: &Bucket) -> Next {
        let again = &bucket.warm_up.again;
        let waited = *self.pause.lock();
        let due = if waited.is_zero() { Vec::new() } else { std::mem::take(&mut *again.lock()) };
        for vb in due {
            let result = bucket.load(vb);
            if result.as_ref().is_err_and(|error| error.verdict() == Verdict::Retry) {
                again.lock().push(vb);
                continue;
            }
            if result.is_ok() {
                tracing::info!(bucket = bucket.name(), vb = vb.0, "could be read whole now");
            }
            bucket.warm_up.ends.change(|ends| {
                match result {
                    Ok(()) => ends.loaded += usize::from(ends.failed.remove(&vb).is_some()),
                    Err(error) => _ = ends.failed.insert(vb, error),
                }
                ((), Wake::Everybody)
            });
        }
        if again.lock().is_empty() {
            return Next::Done;
        }
        let pause = (waited * 2).clamp(AGAIN_FIRST, AGAIN_MAX);
        *self.pause.lock() = pause;
        Next::After(pause)
    }
}

impl Task for Loader {
    fn name(&self) -> &'static str {
        "warm_up"
    }

    fn class(&self) -> Class {
        Class::Lazy
    }

    fn run(&self, _: &Context<'_>) -> Next {
        let Some(bucket) = self.bucket.upgrade() else { return Next::Done };
        let warm_up = &bucket.warm_up;
        let Some(files) = warm_up.files.get() else { return Next::Done };
        if let Some(pause) = bucket.store.governor().pause() {
            return Next::After(pause);
        }
        let Some(vb) = files.get(warm_up.next.fetch_add(1, Relaxed)) else { return self.load_again(&bucket) };
        let result = bucket.load(*vb);
        if let Err(error) = &result {
            tracing::error!(
                bucket = bucket.name(),
                vb = vb.0,
                "could not be read whole; its documents are looked up in the file one by one, and whoever asks for one that \
                 cannot be read gets an error: {error}"
            );
            if error.verdict() == Verdict::Retry {
                warm_up.again.lock().push(*vb);
            }
        }
        warm_up.ends.change(|ends| {
            match result {
                Ok(()) => ends.loaded += 1,
                Err(error) => _ = ends.failed.insert(*vb, error),
            }
            ((), Wake::Everybody)
        });
        let progress = bucket.warm_up_progress();
        if progress.is_done() && warm_up.ended.set(bucket.env.clock.monotonic()).is_ok() {
            tracing::info!(
                bucket = bucket.name(),
                vbuckets = progress.vbuckets_loaded,
                failed = progress.failed,
                documents = progress.keys,
                values = progress.values,
                bytes = progress.bytes,
                took_ms = progress.took.as_millis(),
                "everything is loaded"
            );
        }
        Next::Again
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::mpsc::channel;

    use env::sim::Sim;
    use persist::{BucketSpec, Eviction, Store};
    use scheduler::{PoolConfig, Pools, Stop};
    use types::{BucketUuid, Cas, Datatype, DocKey};

    use super::*;
    use crate::engine::{Engine, Options};
    use crate::op::{Mailbox, Op, OpResult, Request, StoreMode, Ticket, Waiter};

    struct Letter(std::sync::mpsc::Sender<OpResult>);

    impl Mailbox for Letter {
        fn deliver(&self, _: Ticket, result: OpResult) {
            let _ = self.0.send(result);
        }
    }

    fn ask(bucket: &Bucket, key: DocKey<'_>, op: Op<'_>) -> OpResult {
        ask_of(bucket, VbId(0), key, op)
    }

    fn ask_of(bucket: &Bucket, vb: VbId, key: DocKey<'_>, op: Op<'_>) -> OpResult {
        let (send, receive) = channel();
        let mailbox: Arc<dyn Mailbox> = Arc::new(Letter(send));
        let ticket = Ticket { slot: 0, generation: 0, request: 0 };
        let (cas, accepts) = (Cas(0), Datatype(7));
        let request = Request { vb, key, cas, durability: None, preserve_expiry: false, accepts, op };
        match bucket.execute(&request, &|| Waiter::new(Arc::clone(&mailbox), ticket)) {
            crate::Outcome::Done(result) => result,
            crate::Outcome::Pending => receive.recv().expect("answered"),
        }
    }

    fn set(bucket: &Bucket, key: DocKey<'_>, value: &[u8]) {
        set_in(bucket, VbId(0), key, value);
    }

    fn set_in(bucket: &Bucket, vb: VbId, key: DocKey<'_>, value: &[u8]) {
        let (mode, flags, expiry, datatype) = (StoreMode::Set, 0, 0, Datatype::RAW);
        ask_of(bucket, vb, key, Op::Store { mode, flags, expiry, datatype, value }).expect("stored");
    }

    fn start(sim: &Sim, eviction: Eviction) -> (Arc<Pools>, Engine, Arc<Bucket>) {
        let env = sim.env();
        let pools = Pools::start(&env, &PoolConfig { readers: 2, writers: 2, background: 1, compaction: 1, cpu: 1 });
        let store = Store::open(&env, &pools, Path::new("/data"), persist::Options::default()).expect("opens");
        let engine = Engine::new(&env, &pools, store, Options::default());
        // What begins to load is held up by whoever has the first key's stripe.
        engine.warm_up().expect("nothing is damaged");
        let new = || engine.create_bucket(spec(eviction, 1)).expect("a new one");
        let bucket = engine.bucket("b").unwrap_or_else(new);
        (pools, engine, bucket)
    }

    fn spec(eviction: Eviction, vbuckets: u16) -> BucketSpec {
        BucketSpec {
            name: "b".into(),
            uuid: BucketUuid(1),
            vbuckets,
            replicas: 0,
            quota_bytes: 64 << 20,
            flush_enabled: true,
            eviction,
            rules: persist::WriteRules::default(),
            compaction: None,
        }
    }

    fn until(mut what: impl FnMut() -> bool) {
        while !what() {
            std::thread::yield_now();
        }
    }

    /// Goal: while clients wait for slow syncs, loading waits too, and it takes what the disk gives once they do not. Method:
    /// four vBuckets, stepped; then how much time went by until all are loaded.
    #[test]
    fn loading_is_slowed_by_what_clients_feel() {
        let (_, mut sim) = env::sim::env(2);
        {
            let env = sim.env();
            let pools =
                Pools::start(&env, &PoolConfig { readers: 2, writers: 2, background: 1, compaction: 1, cpu: 1 });
            let store = Store::open(&env, &pools, Path::new("/data"), persist::Options::default()).expect("opens");
            let engine = Engine::new(&env, &pools, store, Options::default());
            engine.warm_up().expect("nothing is damaged");
            let bucket = engine.create_bucket(spec(Eviction::Value, 4)).expect("a new one");
            for (n, vb) in (0..64).zip((0..4).cycle()) {
                let key = KeyBuf::in_default_collection(format!("k{n}").as_bytes()).expect("short");
                set_in(&bucket, VbId(vb), key.as_key(), &[7; 16 << 10]);
            }
            assert!(engine.drain().left.is_empty());
            drop((bucket, engine));
            pools.shutdown(Stop::Cancel);
        }
        for is_felt in [true, false] {
            sim.kill();
            let clock = env::sim::SimClock::new();
            let env = env::Env { clock: Arc::new(clock.clone()), ..sim.env() };
            let stepper = scheduler::Stepper::new(&clock, scheduler::Order::Seeded(1));
            let limits = persist::Limits {
                latency_budget: is_felt.then_some(Duration::from_millis(5)),
                floor_bytes_per_s: 256 << 10,
            };
            let options = persist::Options { governor: limits, ..persist::Options::default() };
            let store = Store::open(&env, &stepper.pools(), Path::new("/data"), options).expect("opens");
            let governor = store.governor();
            let ms = Duration::from_millis(1);
            let feel = || {
                governor.foreground(Duration::from_millis(50));
                clock.advance(ms);
            };
            (0..2000).for_each(|_| feel());
            let options = Options { loading_grace: Duration::ZERO, ..Options::default() };
            let engine = Engine::new(&env, &stepper.pools(), store, options);
            engine.warm_up().expect("nothing is damaged");
            let bucket = engine.bucket("b").expect("there");
            let mut took_ms = 0;
            while !bucket.warm_up_progress().is_done() {
                governor.foreground(Duration::from_millis(50));
                stepper.advance(ms);
                took_ms += 1;
                assert!(took_ms < 10_000, "the floor lets it end");
            }
            // A vBucket has 256 KiB, and whoever spends pays afterwards.
            assert_eq!(took_ms > 1000, is_felt, "{took_ms} ms");
            engine.drain();
        }
    }

    /// A file that could not be read for a while is loaded once it can be, and nothing of it is counted twice.
    #[test]
    fn what_could_not_be_read_for_a_while_is_loaded_later() {
        let (_, mut sim) = env::sim::env(3);
        let keys: Vec<_> =
            (0..8).map(|n| KeyBuf::in_default_collection(format!("k{n}").as_bytes()).expect("short")).collect();
        {
            let (pools, engine, bucket) = start(&sim, Eviction::Value);
            keys.iter().for_each(|key| set(&bucket, key.as_key(), b"value"));
            assert!(engine.drain().left.is_empty());
            drop((bucket, engine));
            pools.shutdown(Stop::Cancel);
        }
        sim.kill();
        let clock = env::sim::SimClock::new();
        let env = env::Env { clock: Arc::new(clock.clone()), ..sim.env() };
        let stepper = scheduler::Stepper::new(&clock, scheduler::Order::InTurn);
        let store =
            Store::open(&env, &stepper.pools(), Path::new("/data"), persist::Options::default()).expect("opens");
        let engine = Engine::new(&env, &stepper.pools(), store, Options::default());
        engine.warm_up().expect("nothing is damaged");
        let bucket = engine.bucket("b").expect("there");
        let failing = env::sim::Rule::new(env::sim::Op::Read, env::sim::Fault::Errno(5)).path("0.couch").sticky();
        sim.storage.arm(env::sim::FaultPlan::new().rule(failing));
        stepper.run_until_idle();
        let seen = || (bucket.unloadable().len(), bucket.warm_up_progress().vbuckets_loaded);
        stepper.advance(Duration::from_secs(20));
        assert_eq!(seen(), (1, 0));
        sim.storage.arm(env::sim::FaultPlan::new());
        stepper.advance(Duration::from_secs(20));
        assert_eq!(seen(), (0, 1));
        assert_eq!((bucket.warm_up_progress().keys, bucket.items()), (8, 8));
        engine.drain();
    }

    /// Goal: what changes and leaves memory again while its vBucket is loaded is not undone by the loading. Method: the
    /// loader is held at the first key, its view of the file already taken; then the other keys are changed, filed, and
    /// dropped from memory as far as that is allowed.
    #[test]
    fn loading_undoes_nothing() {
        for eviction in [Eviction::Value, Eviction::Full] {
            let (_, mut sim) = env::sim::env(1);
            let keys: Vec<_> =
                (0..64).map(|n| KeyBuf::in_default_collection(format!("k{n}").as_bytes()).expect("short")).collect();
            {
                let (pools, engine, bucket) = start(&sim, eviction);
                keys.iter().for_each(|key| set(&bucket, key.as_key(), b"a value of some length, worth dropping"));
                assert!(engine.drain().left.is_empty());
                drop((bucket, engine));
                pools.shutdown(Stop::Cancel);
            }
            sim.kill();
            let env = sim.env();
            let pools =
                Pools::start(&env, &PoolConfig { readers: 2, writers: 2, background: 1, compaction: 1, cpu: 1 });
            let store = Store::open(&env, &pools, Path::new("/data"), persist::Options::default()).expect("opens");
            let found = store.buckets().remove(0);
            let bucket = Bucket::new(&env, &pools, Options::default(), found, true);
            bucket.recover().expect("nothing is damaged");
            bucket.start();
            let vb = &bucket.vbuckets[0];
            let stripe_of = |key: &KeyBuf| vb.table.stripe_of(key.as_key());
            let held = stripe_of(&keys[0]);
            std::thread::scope(|scope| {
                let (release, released) = channel::<()>();
                let (hold, is_held) = channel();
                let first = &keys[0];
                scope.spawn(move || {
                    let _slot = vb.table.lock(first.as_key());
                    hold.send(()).expect("somebody waits");
                    let _ = released.recv();
                });
                is_held.recv().expect("held");
                let loader = scope.spawn(|| bucket.load(VbId(0)).expect("readable"));
                until(|| bucket.warm_up.keys.load(Relaxed) > 0);
                let others = || keys.iter().filter(|key| stripe_of(key) != held);
                for (n, key) in others().enumerate() {
                    match n % 2 {
                        0 => _ = ask(&bucket, key.as_key(), Op::Delete).expect("it was there"),
                        _ => set(&bucket, key.as_key(), b"new, and again long enough to be dropped"),
                    }
                }
                until(|| vb.log.marks.filed() == vb.log.marks.high());
                // Would wait for the held stripe, if it wanted to drop any.
                let tombstones = || vb.table.counts.tombstones.load(Relaxed);
                let before = tombstones();
                let dropper = scope.spawn(|| vb.drop_tombstones());
                until(|| dropper.is_finished() || tombstones() < before);
                for stripe in (0..crate::hash_table::STRIPES).filter(|stripe| *stripe != held) {
                    let (whole, clears) = (vb.full_eviction, vb.table.clears());
                    let filed = vb.log.marks.filed();
                    let leaving = crate::hash_table::Leaving { filed, heat_max: 255, whole, clears };
                    vb.table.evict(stripe, leaving, || false);
                }
                release.send(()).expect("still there");
                loader.join().expect("no panic");
                for (n, key) in others().enumerate() {
                    match ask(&bucket, key.as_key(), Op::Get) {
                        Ok(crate::Reply::Value { item, body, .. }) if n % 2 == 1 => {
                            assert!(body.of(&item).starts_with(b"new"), "{eviction:?}");
                        }
                        Err(crate::OpError::NotFound) if n % 2 == 0 => {}
                        other => panic!("{eviction:?} {n}: {other:?}"),
                    }
                }
                let deleted = others().count().div_ceil(2);
                assert_eq!(bucket.items(), (keys.len() - deleted) as u64);
            });
            bucket.stop("the test is over");
            drop((bucket, store));
            pools.shutdown(Stop::Cancel);
        }
    }
}
