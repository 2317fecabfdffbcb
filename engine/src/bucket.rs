//! A bucket: where a request finds its vBucket, and everything its vBuckets share.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicI64};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use changelog::{Allowance, FailoverEntry, FailoverTable, VbRecord};
use document::subdoc::DocFlags;
use env::Env;
use persist::{BucketSpec, BucketStore, Eviction, Nudge, Urgency};
use scheduler::{PoolKind, Pools, TaskHandle};
use types::rank::{Mutex, Rank};
use types::{Body, Cas, DocKey, Item, KeyBuf, Level, Seqno, VbId, VbState, VbUuid};

use crate::chain::Chance;
use crate::counters::Counters;
use crate::engine::Options;
use crate::hash_table::{Footprint, HashSeed};
use crate::op::{Op, OpError, OpResult, Outcome, Reply, Request, Waiter};
use crate::ops::{Attempt, Fetched, Prepared, Run, Step, Stop};
use crate::owned::OwnedRequest;
use crate::pager::{Deadlines, Pager, Pressure};
use crate::roles::RecordWaiters;
use crate::takeover::Takeovers;
use crate::terms::Terms;
use crate::vbucket::{Beginning, VBucket};
use crate::warm_up::WarmUp;

/// How often a request may go back to the file before it is told to come again.
const FETCHES_MAX: usize = 4;
const SEQNO_PERSISTENCE_MAX: Duration = Duration::from_secs(30);
/// One in so many bytes of the quota may hold changes that only slow streams still want; see [`Allowance`].
const FOLLOWERS_SHARE: u64 = 32;

/// One bucket.
///
/// 1. A vBucket changes only because a client, a peer or the clock asked, and only through its changelog.
/// 2. `bytes` and `backlog_bytes` are the sums over the vBuckets.
pub struct Bucket {
    me: Weak<Bucket>,
    pub(crate) env: Env,
    pub(crate) options: Options,
    pub(crate) store: Arc<BucketStore>,
    name: Box<str>,
    pub(crate) terms: Terms,
    pub(crate) pools: Arc<Pools>,
    pub(crate) vbuckets: Box<[VBucket]>,
    pub(crate) bytes: Arc<Footprint>,
    /// What the changelogs hold that is not in a table too.
    pub(crate) backlog_bytes: Arc<AtomicI64>,
    /// Of changes that the changelogs keep for streams alone. They count as `backlog_bytes` too.
    pub(crate) followers: Arc<Allowance>,
    /// Requests that wait for the file, with what they brought along.
    pub(crate) fetching: Fetching,
    pub counters: Counters,
    pub(crate) stopped: AtomicBool,
    is_held: AtomicBool,
    /// What is in the way of the release.
    held_why: Mutex<String>,
    pub(crate) pressure: Pressure,
    /// vBuckets in which somebody waits against a deadline.
    pub(crate) armed: Mutex<BTreeSet<VbId>>,
    /// Those who wait for a vBucket's record to be durable.
    pub(crate) record_waiters: RecordWaiters,
    pub(crate) takeovers: Takeovers,
    tasks: OnceLock<Tasks>,
    pub(crate) warm_up: WarmUp,
}

struct Tasks {
    pager: TaskHandle,
    deadlines: TaskHandle,
}

/// See [`Bucket::fetching`].
#[derive(Default)]
pub(crate) struct Fetching {
    pub requests: AtomicI64,
    pub bytes: AtomicI64,
}

struct MarksMoved(Weak<Bucket>);

impl Nudge for MarksMoved {
    fn marks_moved(&self, vb: VbId) {
        if let Some(bucket) = self.0.upgrade() {
            bucket.marks_moved(vb);
        }
    }

    fn expired(&self, vb: VbId, keys: Vec<KeyBuf>) {
        let Some(bucket) = self.0.upgrade() else { return };
        let vb = &bucket.vbuckets[usize::from(vb.0)];
        if vb.state() == VbState::Active {
            keys.iter().for_each(|key| bucket.expire(vb, key.as_key()));
        }
    }
}

impl Bucket {
    /// A bucket whose vBuckets know what their files say, but hold no documents yet.
    /// `was_clean`: the last run wrote everything it showed to anybody.
    pub(crate) fn new(
        env: &Env,
        pools: &Arc<Pools>,
        options: Options,
        store: Arc<BucketStore>,
        was_clean: bool,
    ) -> Arc<Bucket> {
        let seed = HashSeed([env.rng.u64(), env.rng.u64()]);
        let (bytes, backlog_bytes) = (Arc::new(Footprint::default()), Arc::new(AtomicI64::new(0)));
        let spec = store.spec();
        let followers = Arc::new(Allowance::new(spec.quota_bytes / FOLLOWERS_SHARE));
        let full_eviction = spec.eviction == Eviction::Full;
        let mut begins: Vec<Option<Beginning>> = (0..spec.vbuckets).map(|_| None).collect();
        for file in store.recovered() {
            let mut record = file.record;
            if record.state == VbState::Active {
                if record.topology.is_empty() {
                    record.topology = vec![chain(&options, spec.replicas)];
                }
                if !was_clean {
                    // Somebody may have seen changes the disk did not keep: what comes now is another history.
                    record.failover.begin(FailoverEntry { uuid: fresh_uuid(env), seqno: file.high });
                }
            }
            begins[usize::from(file.vb.0)] = Some(Beginning {
                record,
                high: file.high,
                max_cas: file.max_cas,
                max_deleted_rev: file.max_deleted_rev,
                tombstones_on_disk: file.tombstones > 0,
                live: Some(file.alive.saturating_sub(file.on_disk_prepares)),
                completed: file.completed,
                high_prepared: file.high_prepared,
                visible: file.max_visible,
                open_snapshot: file.open_snapshot,
                is_deleted: false,
            });
        }
        for deleted in store.deleted() {
            let record = VbRecord { rollbacks: deleted.rollbacks, ..dead_record(env, &options, spec.replicas) };
            let begin = Beginning { max_cas: deleted.max_cas, is_deleted: true, ..Beginning::empty(record) };
            begins[usize::from(deleted.vb.0)] = Some(begin);
        }
        let vbuckets = (0u16..).zip(begins).map(|(id, begin)| {
            let begin = begin.unwrap_or_else(|| Beginning::empty(fresh_record(env, &options, spec.replicas)));
            let counted = (Arc::clone(&bytes), Arc::clone(&backlog_bytes));
            VBucket::new(VbId(id), seed, full_eviction, counted, Arc::clone(&followers), begin)
        });
        let vbuckets: Box<[VBucket]> = vbuckets.collect();
        Arc::new_cyclic(|me| Bucket {
            me: me.clone(),
            name: spec.name.as_str().into(),
            terms: Terms::of(&spec),
            env: env.clone(),
            options,
            pools: Arc::clone(pools),
            vbuckets,
            bytes,
            backlog_bytes,
            followers,
            fetching: Fetching::default(),
            counters: Counters::default(),
            stopped: AtomicBool::new(false),
            pressure: Pressure::default(),
            armed: Mutex::ranked(Rank::Durability, BTreeSet::new()),
            record_waiters: RecordWaiters::default(),
            takeovers: Takeovers::default(),
            is_held: AtomicBool::new(false),
            held_why: Mutex::ranked(Rank::RunQueue, String::new()),
            tasks: OnceLock::new(),
            warm_up: WarmUp::default(),
            store,
        })
    }

    /// Hands the changelogs to the store and starts the bucket's tasks. From here on changes become durable.
    pub(crate) fn start(&self) {
        let nudge: Arc<dyn Nudge> = Arc::new(MarksMoved(self.me.clone()));
        for vb in &self.vbuckets {
            self.store.attach(vb.id, Arc::clone(&vb.log), Arc::clone(&nudge));
        }
        let pager = self.pools.spawn(PoolKind::Cpu, Arc::new(Pager::of(self.me.clone())));
        let deadlines = self.pools.spawn(PoolKind::Cpu, Arc::new(Deadlines::of(self.me.clone())));
        pager.wake_after(self.options.pager_interval);
        if self.tasks.set(Tasks { pager, deadlines }).is_err() {
            unreachable!("a bucket is started once");
        }
        for vb in &self.vbuckets {
            self.settle(vb);
        }
    }

    /// Takes no more writes: when this returns, none is under way.
    pub(crate) fn close(&self) {
        self.stopped.store(true, Relaxed);
        for vb in &self.vbuckets {
            // Whoever looked at `stopped` before now has finished once we get this.
            drop(vb.state.write());
        }
    }

    /// Ends the bucket's tasks; whoever waits for a sync write is told that its outcome is unknown.
    pub(crate) fn stop(&self, why: &'static str) {
        self.close();
        if let Some(tasks) = self.tasks.get() {
            tasks.pager.cancel();
            tasks.deadlines.cancel();
        }
        self.warm_up.cancel();
        for vb in &self.vbuckets {
            vb.take_waiting().tell(why);
        }
        self.record_waiters.cancel();
        self.takeovers.cancel();
    }

    pub(crate) fn me(&self) -> Option<Arc<Bucket>> {
        self.me.upgrade()
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn spec(&self) -> Arc<BucketSpec> {
        self.store.spec()
    }

    /// What comes from now on is held to the spec the store has now. One caller at a time.
    pub(crate) fn adopt_spec(&self) {
        let spec = self.spec();
        self.terms.adopt(&spec);
        self.followers.set(spec.quota_bytes / FOLLOWERS_SHARE);
    }

    pub fn store(&self) -> &Arc<BucketStore> {
        &self.store
    }

    /// No request for a document is answered until [`Bucket::release`]: another node may be the one to ask.
    pub fn hold(&self) {
        self.held_because("it asks the others".to_owned());
        self.is_held.store(true, SeqCst);
    }

    /// What is in the way of the release by now, for whoever is turned away.
    pub fn held_because(&self, why: String) {
        let before = std::mem::replace(&mut *self.held_why.lock(), why);
        drop(before);
    }

    /// Returns whether it was held.
    pub fn release(&self) -> bool {
        self.is_held.swap(false, SeqCst)
    }

    pub fn is_held(&self) -> bool {
        self.is_held.load(Relaxed)
    }

    /// Why no request for a document is answered, in words for a person; `None`: they are.
    pub fn held_why(&self) -> Option<String> {
        self.is_held().then(|| {
            format!("this node does not know yet whether it is still the one to ask: {}", *self.held_why.lock())
        })
    }

    /// One vBucket, for those who read its changelog.
    pub fn vbucket(&self, vb: VbId) -> Option<&VBucket> {
        self.vb(vb).ok()
    }

    pub(crate) fn vb(&self, vb: VbId) -> Result<&VBucket, OpError> {
        self.vbuckets.get(usize::from(vb.0)).ok_or(OpError::NotMyVbucket)
    }

    /// Does something that reads files and takes its time, among those who wait for documents.
    pub fn read_behind(&self, name: &'static str, work: impl FnOnce(&BucketStore) + Send + 'static) {
        let store = Arc::clone(&self.store);
        self.pools.execute(PoolKind::Reader, name, move || work(&store));
    }

    /// Carries a request out. If it must wait, `waiter` is called once and its waiter gets the answer.
    pub fn execute(&self, request: &Request<'_>, waiter: &dyn Fn() -> Waiter) -> Outcome {
        let request = &self.terms.raise(request);
        match self.attempt(request, &Fetched::NotAsked, waiter) {
            Ok(Step::Reply(reply)) => Outcome::Done(Ok(reply)),
            Ok(Step::Prepared) => Outcome::Pending,
            Err(Stop::Error(error)) => Outcome::Done(Err(error)),
            Err(Stop::NeedsFile) => {
                self.fetch(OwnedRequest::of(request), waiter(), 1);
                Outcome::Pending
            }
        }
    }

    fn fetch(&self, request: OwnedRequest, waiter: Waiter, round: usize) {
        let Some(me) = self.me.upgrade() else { return };
        self.counters.fetches.add(1);
        let (vb, key) = request.lend(|r| (r.vb, KeyBuf::copy_of(r.key)));
        let clears = self.vbuckets[usize::from(vb.0)].table.clears();
        let filed = self.vbuckets[usize::from(vb.0)].log.marks.filed();
        let bytes = request.memory() as i64;
        self.fetching.requests.fetch_add(1, Relaxed);
        self.fetching.bytes.fetch_add(bytes, Relaxed);
        let done = Box::new(move |found: Result<Option<Item>, persist::StoreError>| {
            me.fetching.requests.fetch_sub(1, Relaxed);
            me.fetching.bytes.fetch_sub(bytes, Relaxed);
            match found {
                Ok(item) => me.retry(request, Fetched::Found { item, filed, clears }, waiter, round),
                Err(_) if me.stopped.load(Relaxed) => waiter.finish(Err(OpError::Cancelled)),
                Err(error) => waiter.finish(Err(OpError::Unreadable(error.to_string()))),
            }
        });
        self.store.fetch(vb, key.as_key(), done);
    }

    fn retry(&self, request: OwnedRequest, fetched: Fetched, waiter: Waiter, round: usize) {
        let waiter = Cell::new(Some(waiter));
        let take = || waiter.take().expect("a request waits once at a time");
        let result = request.lend(|request| self.attempt(request, &fetched, &take));
        match result {
            Ok(Step::Reply(reply)) => take().finish(Ok(reply)),
            Ok(Step::Prepared) => {}
            Err(Stop::Error(error)) => take().finish(Err(error)),
            Err(Stop::NeedsFile) if round < FETCHES_MAX => self.fetch(request, take(), round + 1),
            Err(Stop::NeedsFile) => {
                let why = "the document kept changing while it was read from disk".to_owned();
                take().finish(Err(OpError::Temporary(why)));
            }
        }
    }

    fn attempt(&self, request: &Request<'_>, fetched: &Fetched, waiter: &dyn Fn() -> Waiter) -> Attempt {
        let vb = self.vb(request.vb)?;
        let state = vb.state.read();
        match (&request.op, *state) {
            (Op::GetReplica, VbState::Replica) => {}
            (Op::SubdocLookup(lookup), VbState::Replica) if lookup.doc_flags.has(DocFlags::REPLICA_READ) => {}
            (Op::GetReplica, _) => return Err(OpError::NotMyVbucket.into()),
            (_, VbState::Active) if self.is_held() => {
                return Err(OpError::Temporary(self.held_why().unwrap_or_default()).into());
            }
            (_, VbState::Active) => {}
            _ => return Err(OpError::NotMyVbucket.into()),
        }
        self.admit(vb, request)?;
        let fetched = match fetched {
            // Of before a rollback.
            Fetched::Found { clears, .. } if *clears != vb.table.clears() => &Fetched::NotAsked,
            fetched => fetched,
        };
        let mut run = Run {
            vb,
            clock: &*self.env.clock,
            terms: &self.terms,
            state: *state,
            request,
            slot: vb.table.lock(request.key),
            fetched,
            waiter,
            durability_timeout: self.options.durability_timeout,
            short: matches!(fetched, Fetched::Found { .. }) && self.is_short(),
            brought_back: false,
            appended_bytes: 0,
            prepared: None,
            expired: 0,
            frozen: self.stopped.load(Relaxed),
        };
        let result = run.attempt();
        self.keep_fetched(&mut run);
        let (appended_bytes, prepared, expired) = (run.appended_bytes, run.prepared, run.expired);
        let brought_back = run.brought_back;
        drop(run);
        drop(state);
        self.counters.expired.add(expired);
        if appended_bytes > 0 {
            let waits_for_disk = prepared.is_some_and(|prepared| prepared.level > Level::Majority);
            self.changed(vb, if waits_for_disk { Urgency::Durable } else { Urgency::Normal });
        }
        if let Some(Prepared { level, arm }) = prepared {
            // What waits for the disk is looked at when a mark has moved; a mark that never will may have told so before.
            if level == Level::Majority || vb.log.marks.poisoned().is_some() {
                self.settle(vb);
            }
            self.arm(vb, arm);
        }
        if (appended_bytes > 0 || brought_back) && self.is_short() {
            if brought_back {
                // This at least can leave again.
                self.pressure.is_exhausted.store(false, SeqCst);
                if self.memory_used() > self.refuse_mark() {
                    self.make_room(self.refuse_mark());
                }
            }
            self.give_memory_back();
        }
        result
    }

    /// A value that was fetched stays, if there is room and it is still the newest.
    fn keep_fetched(&self, run: &mut Run<'_>) {
        let Fetched::Found { item: Some(found), .. } = run.fetched else { return };
        let Some(held) = run.slot.document() else { return };
        if !held.resident() && held.committed_seqno() == found.seqno() && !run.short {
            let found = found.clone();
            run.slot.put_committed(found, false);
            run.brought_back = true;
        }
    }

    /// What can be refused before the document is looked at.
    fn admit(&self, vb: &VBucket, request: &Request<'_>) -> Result<(), OpError> {
        let grows_by = match request.op {
            Op::Get
            | Op::GetReplica
            | Op::GetMeta
            | Op::SubdocLookup(_)
            | Op::Evict
            | Op::Unlock
            | Op::GetAndLock { .. } => {
                return match request.durability {
                    Some(_) => Err(OpError::Invalid("durability of an operation that writes nothing")),
                    None => Ok(()),
                };
            }
            Op::Store { value, .. } | Op::Concat { value, .. } => Some(value.len()),
            Op::WithMeta(meta) => Some(meta.value.len()),
            Op::SubdocMutate(mutate) => Some(mutate.specs.iter().map(|spec| spec.value.len()).sum()),
            Op::Touch { .. } | Op::GetAndTouch { .. } | Op::Arithmetic { .. } => Some(0),
            Op::Delete => None,
        };
        if self.stopped.load(Relaxed) {
            return Err(OpError::Cancelled);
        }
        if let Some(reason) = vb.log.marks.poisoned() {
            return Err(OpError::Temporary(format!("vBucket {} takes no writes until a restart: {reason}", vb.id)));
        }
        if request.durability.is_some() {
            self.check_chain(vb)?;
        }
        let Some(grows_by) = grows_by else { return Ok(()) };
        if self.store.disk_full() {
            return Err(OpError::DiskFull);
        }
        if self.store.log_full() {
            return Err(OpError::Temporary("the commit log is full until more of it is filed".into()));
        }
        let (quota, refuse_mark) = (self.quota_bytes(), self.refuse_mark());
        let mut used = self.memory_used() + grows_by as u64;
        if used > refuse_mark && self.make_room(refuse_mark.saturating_sub(grows_by as u64)) {
            used = self.memory_used() + grows_by as u64;
        }
        if used > quota {
            self.refuse_for_memory();
            return Err(OpError::NoMemory);
        }
        if used > refuse_mark {
            self.refuse_for_memory();
            return Err(OpError::Temporary(format!(
                "{used} bytes used, over {} % of the quota of {quota}",
                self.options.memory_refuse_percent
            )));
        }
        Ok(())
    }

    /// Whether enough nodes are there to keep a sync write.
    fn check_chain(&self, vb: &VBucket) -> Result<(), OpError> {
        match vb.chance() {
            Chance::Possible => Ok(()),
            Chance::Impossible => Err(OpError::DurabilityImpossible),
            Chance::Unknown => Err(OpError::Temporary("the replication chain is not known yet".into())),
        }
    }

    pub(crate) fn refuse_for_memory(&self) {
        self.counters.refused_memory.add(1);
        self.give_memory_back();
    }

    /// Wakes the pager. It is not woken again for nothing: only once it has made room, or more can leave.
    pub(crate) fn give_memory_back(&self) {
        if !self.pressure.is_exhausted.load(SeqCst)
            && !self.pressure.is_paging.swap(true, SeqCst)
            && let Some(tasks) = self.tasks.get()
        {
            tasks.pager.wake();
        }
    }

    /// Bytes that count against the quota.
    pub fn memory_used(&self) -> u64 {
        (self.bytes.total() + self.backlog_bytes.load(Relaxed) + self.fetching.bytes.load(Relaxed)).max(0) as u64
    }

    pub fn quota_bytes(&self) -> u64 {
        self.terms.quota_bytes()
    }

    /// From here on the pager lets go of what is in the file, down to [`Bucket::low_mark`].
    pub(crate) fn high_mark(&self) -> u64 {
        percent(self.quota_bytes(), self.options.memory_high_percent)
    }

    pub(crate) fn low_mark(&self) -> u64 {
        percent(self.quota_bytes(), self.options.memory_low_percent)
    }

    /// From here on writes are put off.
    pub(crate) fn refuse_mark(&self) -> u64 {
        percent(self.quota_bytes(), self.options.memory_refuse_percent)
    }

    /// Whether memory is so short that nothing should be kept that is in the file.
    pub(crate) fn is_short(&self) -> bool {
        self.memory_used() > self.high_mark()
    }

    /// The vBucket's log or record has something new: for the disk, and for whoever follows. Call without locks.
    pub(crate) fn changed(&self, vb: &VBucket, urgency: Urgency) {
        self.store.changed(vb.id, urgency);
        vb.bells.ring(vb.id);
    }

    pub(crate) fn settle(&self, vb: &VBucket) {
        let settled = vb.settle(self.env.clock.monotonic());
        if settled.appended_bytes > 0 {
            self.counters.commits.add(settled.committed);
            self.counters.aborts.add(settled.aborted);
            // Who waited for the outcome knows it.
            self.store.changed(vb.id, Urgency::Normal);
            vb.bells.ring_later(vb.id);
        }
        if let Some(nudge) = settled.has_acked {
            nudge.high_prepared_moved(vb.id);
        }
        self.arm(vb, settled.arm);
    }

    /// Has the timer look at the vBucket by then.
    fn arm(&self, vb: &VBucket, deadline: Option<Duration>) {
        let Some(deadline) = deadline else { return };
        self.armed.lock().insert(vb.id);
        if let Some(tasks) = self.tasks.get() {
            tasks.deadlines.wake_at(deadline);
        }
    }

    fn marks_moved(&self, vb: VbId) {
        let vb = &self.vbuckets[usize::from(vb.0)];
        // More is in the file now, so more can leave memory.
        if self.pressure.is_exhausted.swap(false, SeqCst) && self.is_short() {
            self.give_memory_back();
        }
        self.settle(vb);
        self.answer_record_waiters(vb);
        if vb.live_is_rough.load(Relaxed) {
            self.count_anew(vb);
        }
    }

    /// Answers once everything up to `seqno` is on disk, or after 30 s with `Temporary`.
    pub fn seqno_persistence(&self, vb: VbId, seqno: Seqno, waiter: &dyn Fn() -> Waiter) -> Outcome {
        let Ok(vb) = self.vb(vb) else { return Outcome::Done(Err(OpError::NotMyVbucket)) };
        {
            // Held until the waiter is in the queue, so that nobody waits on a bucket that has stopped.
            let state = vb.state.read();
            if *state == VbState::Dead {
                return Outcome::Done(Err(OpError::NotMyVbucket));
            }
            if vb.log.marks.durable() >= seqno {
                return Outcome::Done(Ok(Reply::Done { cas: Cas(0) }));
            }
            if self.stopped.load(Relaxed) {
                return Outcome::Done(Err(OpError::Cancelled));
            }
            let deadline = self.env.clock.monotonic() + SEQNO_PERSISTENCE_MAX;
            vb.waiting.lock().get_or_insert_default().await_seqno(seqno, deadline, waiter());
        }
        self.store.changed(vb.id, Urgency::Durable);
        self.settle(vb);
        Outcome::Pending
    }

    /// Deletes every live document, as ordinary deletes: each gets a seqno and a tombstone. Runs in the background.
    pub fn flush(&self, waiter: Waiter) {
        let Some(me) = self.me.upgrade() else { return };
        self.pools.execute(PoolKind::Cpu, "flush_bucket", move || waiter.finish(me.flush_now()));
    }

    fn flush_now(&self) -> OpResult {
        for vb in &self.vbuckets {
            if vb.state() != VbState::Active {
                continue;
            }
            for id in self.all_live_ids(vb)? {
                let key = DocKey::parse(&id).expect("taken from an item");
                match self.delete_now(vb, key) {
                    // A sync write under way counts as one that comes after.
                    Ok(()) | Err(OpError::NotFound | OpError::SyncWriteInProgress | OpError::ReCommitInProgress) => {}
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(Reply::Done { cas: Cas(0) })
    }

    /// Deletes a document with nothing left of it, whatever its lock says.
    fn delete_now(&self, vb: &VBucket, key: DocKey<'_>) -> Result<(), OpError> {
        let request = self.internal(vb, key, Op::Delete);
        self.admit(vb, &request)?;
        {
            let mut slot = vb.table.lock(key);
            if slot.lock_at(|| self.env.clock.monotonic()).is_some() {
                slot.set_lock(None);
            }
        }
        let waiter = || -> Waiter { unreachable!("a plain delete does not wait") };
        match self.attempt(&request, &Fetched::NotAsked, &waiter) {
            Ok(_) => Ok(()),
            Err(Stop::Error(error)) => Err(error),
            // The document, or system xattrs that would have to be read first.
            Err(Stop::NeedsFile) => {
                let fetched = self.fetch_now(vb, key)?;
                match self.attempt(&request, &fetched, &waiter) {
                    Ok(_) => Ok(()),
                    Err(Stop::Error(error)) => Err(error),
                    Err(Stop::NeedsFile) => Err(OpError::Temporary("the document keeps changing".into())),
                }
            }
        }
    }

    pub(crate) fn internal<'a>(&self, vb: &VBucket, key: DocKey<'a>, op: Op<'a>) -> Request<'a> {
        let (durability, accepts) = (None, types::Datatype(7));
        Request { vb: vb.id, key, cas: Cas(0), durability, preserve_expiry: false, accepts, op }
    }

    /// Looks at an expired document, which deletes it.
    pub(crate) fn expire(&self, vb: &VBucket, key: DocKey<'_>) {
        let request = self.internal(vb, key, Op::GetMeta);
        let waiter = || -> Waiter { unreachable!("looking does not wait") };
        if let Err(Stop::NeedsFile) = self.attempt(&request, &Fetched::NotAsked, &waiter)
            && let Ok(fetched) = self.fetch_now(vb, key)
        {
            let _ = self.attempt(&request, &fetched, &waiter);
        }
    }

    /// The ids of the live documents that `which` picks.
    pub(crate) fn live_ids(&self, vb: &VBucket, which: impl Fn(&Body) -> bool) -> Vec<Box<[u8]>> {
        let mut ids = Vec::new();
        vb.table.visit(|item| {
            if !item.is_deleted() && which(item) {
                ids.push(item.id().into());
            }
            true
        });
        ids
    }

    /// The ids of the live documents, those only in the file included; some may just have been deleted.
    fn all_live_ids(&self, vb: &VBucket) -> Result<Vec<Box<[u8]>>, OpError> {
        if vb.is_loaded() && !vb.full_eviction {
            return Ok(self.live_ids(vb, |_| true));
        }
        let mut ids = Vec::new();
        let mut each = |item: Item| {
            if item.is_committed() {
                ids.push(item.id().into());
            }
        };
        let read = self.store.warm_up(vb.id, persist::WarmUp::default(), &mut |_, _| false, &mut each);
        read.map_err(|e| OpError::Unreadable(e.to_string()))?;
        // What is in no file yet is in memory, and stays there until it is.
        ids.extend(self.live_ids(vb, |_| true));
        ids.sort_unstable();
        ids.dedup();
        Ok(ids)
    }

    fn fetch_now(&self, vb: &VBucket, key: DocKey<'_>) -> Result<Fetched, OpError> {
        let clears = vb.table.clears();
        let filed = vb.log.marks.filed();
        let item = self.store.fetch_now(vb.id, key).map_err(|e| OpError::Unreadable(e.to_string()))?;
        Ok(Fetched::Found { item, filed, clears })
    }

    /// The newest committed version of a key, read from the file on this thread if need be.
    pub(crate) fn peek(&self, vb: &VBucket, key: DocKey<'_>) -> Result<Option<Item>, OpError> {
        let mut fetched = Fetched::NotAsked;
        for _ in 0..FETCHES_MAX {
            {
                let slot = vb.table.lock(key);
                if let Some(item) = slot.committed() {
                    return Ok(Some(item));
                }
                if vb.is_absent(&slot, false) {
                    return Ok(None);
                }
                match fetched {
                    Fetched::Found { item, filed, .. } if vb.table.left_upto() <= filed => return Ok(item),
                    _ => {}
                }
            }
            fetched = self.fetch_now(vb, key)?;
        }
        Err(OpError::Temporary("the document kept changing while it was read from disk".to_owned()))
    }
}

fn percent(bytes: u64, percent: u8) -> u64 {
    bytes / 100 * u64::from(percent)
}

pub(crate) fn fresh_uuid(env: &Env) -> VbUuid {
    VbUuid((env.rng.u64() >> 16).max(1))
}

fn fresh_record(env: &Env, options: &Options, replicas: u8) -> VbRecord {
    let failover = FailoverTable::new(FailoverEntry { uuid: fresh_uuid(env), seqno: Seqno(0) });
    VbRecord { topology: vec![chain(options, replicas)], ..VbRecord::new(VbState::Active, failover) }
}

/// Of a vBucket that is not there.
pub(crate) fn dead_record(env: &Env, options: &Options, replicas: u8) -> VbRecord {
    VbRecord { state: VbState::Dead, ..fresh_record(env, options, replicas) }
}

/// The replication chain of a lone node: itself, and nobody where replicas should be.
fn chain(options: &Options, replicas: u8) -> Vec<Option<String>> {
    let mut chain = vec![Some(options.node.clone())];
    chain.resize(usize::from(replicas) + 1, None);
    chain
}
