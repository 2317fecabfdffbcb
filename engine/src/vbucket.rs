//! One vBucket: its documents in memory, its changelog, and who waits for it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU8, AtomicU64};
use std::time::Duration;

use changelog::{Allowance, Changelog, Snapshot, VbRecord};
use persist::RecoveredVb;
use types::rank::{Mutex, Rank, RwLock};
use types::{Cas, Datatype, Item, Kind, Level, Meta, RevSeqno, Seqno, VbId, VbState, VbUuid};

use crate::bell::{Bell, Bells};
use crate::chain::{Chains, Chance};
use crate::durability::{SyncWrite, Tracker, Verdict};
use crate::hash_table::{Footprint, HashSeed, HashTable, Locked};
use crate::op::{OpError, OpResult, Waiter};
use crate::passive::{AckNudge, Passive};

/// One vBucket.
///
/// 1. `log` is appended to with the stripe of the item's key held, so that a key's order in the log is the order its
///    readers saw.
/// 2. A key that is not in `table` may be in the file: [`VBucket::is_absent`] says when that need not be looked up.
/// 3. Whoever changes a document has its last version in `table`, if there is one.
pub struct VBucket {
    pub id: VbId,
    /// Operations hold it for reading while they run.
    pub(crate) state: RwLock<VbState>,
    pub(crate) table: HashTable,
    pub log: Arc<Changelog>,
    /// Of the current history.
    uuid: AtomicU64,
    /// Highest revision of any deleted document: where a key that is not remembered goes on.
    max_deleted_rev: AtomicU64,
    /// Keys leave memory too, not only values.
    pub(crate) full_eviction: bool,
    /// Every live document of the file is in `table`, or, under full eviction, every key in its filter.
    is_loaded: AtomicBool,
    /// The file may hold tombstones the table does not.
    tombstones_on_disk: AtomicBool,
    /// Live documents, wherever they are.
    live: AtomicI64,
    /// Something was put whose last version may have been in the file only: `live` may be too high until it is counted anew.
    pub(crate) live_is_rough: AtomicBool,
    /// A [`Chance`]: of sync writes, as the topology is.
    chance: AtomicU8,
    /// Prepares up to here are from before a restart or another node's: they may have been acknowledged.
    inherited_upto: AtomicU64,
    pub(crate) waiting: Mutex<Option<Box<Tracker>>>,
    pub(crate) bells: Bells,
    /// It goes back to an earlier state, or is being deleted: nobody may change its state meanwhile.
    pub(crate) is_rolling_back: AtomicBool,
    /// It was deleted, and nobody has made it again: it is dead and empty, and there is none if anybody asks.
    pub(crate) is_deleted: AtomicBool,
}

/// What a vBucket begins with.
pub(crate) struct Beginning {
    pub record: VbRecord,
    pub high: Seqno,
    pub max_cas: Cas,
    pub max_deleted_rev: RevSeqno,
    pub tombstones_on_disk: bool,
    /// Live documents of the file, if there is one.
    pub live: Option<u64>,
    /// The highest prepare that is committed or aborted, and the highest that this vBucket may say it has.
    pub completed: Seqno,
    pub high_prepared: Seqno,
    pub visible: Seqno,
    /// In the middle of which the file ends.
    pub open_snapshot: Option<Snapshot>,
    pub is_deleted: bool,
}

impl Beginning {
    /// Of a vBucket without a file.
    pub fn empty(record: VbRecord) -> Beginning {
        Beginning {
            record,
            high: Seqno(0),
            max_cas: Cas(0),
            max_deleted_rev: RevSeqno(0),
            tombstones_on_disk: false,
            live: None,
            completed: Seqno(0),
            high_prepared: Seqno(0),
            visible: Seqno(0),
            open_snapshot: None,
            is_deleted: false,
        }
    }
}

impl VBucket {
    pub(crate) fn new(
        id: VbId,
        seed: HashSeed,
        full_eviction: bool,
        (bucket_bytes, backlog_bytes): (Arc<Footprint>, Arc<AtomicI64>),
        followers: Arc<Allowance>,
        begin: Beginning,
    ) -> VBucket {
        let (state, uuid) = (begin.record.state, begin.record.failover.current().uuid);
        let topology = begin.record.topology.clone();
        let has_prepared = begin.high_prepared > Seqno(0);
        let log = Changelog::new(begin.high, begin.max_cas, begin.record).counted(Arc::clone(&backlog_bytes));
        let log = log.allowing(followers).visible_upto(begin.visible);
        if let Some(open) = begin.open_snapshot.filter(|_| state != VbState::Active) {
            log.resume_snapshot(open);
        }
        let vb = VBucket {
            id,
            state: RwLock::ranked(Rank::VBucketState, state),
            table: HashTable::new(seed, full_eviction, bucket_bytes, backlog_bytes),
            log: Arc::new(log),
            uuid: AtomicU64::new(uuid.0),
            max_deleted_rev: AtomicU64::new(begin.max_deleted_rev.0),
            tombstones_on_disk: AtomicBool::new(begin.tombstones_on_disk),
            full_eviction,
            is_loaded: AtomicBool::new(begin.live.is_none()),
            live: AtomicI64::new(begin.live.unwrap_or(0) as i64),
            live_is_rough: AtomicBool::new(false),
            chance: AtomicU8::new(0),
            inherited_upto: AtomicU64::new(0),
            waiting: Mutex::ranked(Rank::Durability, None),
            bells: Bells::new(),
            is_rolling_back: AtomicBool::new(false),
            is_deleted: AtomicBool::new(begin.is_deleted),
        };
        if has_prepared {
            let mut waiting = vb.waiting.lock();
            let tracker = waiting.get_or_insert_default();
            (tracker.high_prepared, tracker.completed) = (begin.high_prepared, begin.completed);
        }
        vb.set_topology(&topology);
        vb
    }

    /// From here on sync writes are held to these chains. What replicas said before still counts.
    pub(crate) fn set_topology(&self, topology: &[Vec<Option<String>>]) {
        let chance = Chance::of(topology);
        self.chance.store(chance as u8, Relaxed);
        let mut waiting = self.waiting.lock();
        let before = waiting.as_deref().and_then(|tracker| tracker.chains.as_deref());
        let chains = Chains::of(topology, before).map(Box::new);
        if waiting.is_some() || chains.is_some() {
            let tracker = waiting.get_or_insert_default();
            tracker.chains = chains;
            tracker.is_impossible = chance == Chance::Impossible;
        }
    }

    /// Whether a sync write can be made durable as the chains are.
    pub(crate) fn chance(&self) -> Chance {
        Chance::from_bits(self.chance.load(Relaxed))
    }

    /// From here on `bell` rings after every change of the log or of its record.
    pub fn listen(&self, bell: Arc<dyn Bell>) {
        self.bells.add(bell);
    }

    pub fn unlisten(&self, bell: &Arc<dyn Bell>) {
        self.bells.remove(bell);
    }

    pub fn state(&self) -> VbState {
        *self.state.read()
    }

    pub fn uuid(&self) -> VbUuid {
        VbUuid(self.uuid.load(Relaxed))
    }

    pub(crate) fn set_uuid(&self, uuid: VbUuid) {
        self.uuid.store(uuid.0, Relaxed);
    }

    /// The revision of a key nothing is remembered of.
    pub(crate) fn first_rev(&self) -> RevSeqno {
        RevSeqno(self.max_deleted_rev.load(Relaxed) + 1)
    }

    pub fn max_deleted_rev(&self) -> RevSeqno {
        RevSeqno(self.max_deleted_rev.load(Relaxed))
    }

    pub(crate) fn note_deleted(&self, rev: RevSeqno) {
        self.max_deleted_rev.fetch_max(rev.0, Relaxed);
    }

    /// Whether a key that is not in the table is certainly not in the file either: no live document, nor a tombstone if
    /// these count.
    pub(crate) fn is_absent(&self, slot: &Locked<'_>, tombstones: bool) -> bool {
        self.is_loaded()
            && match self.full_eviction {
                true => slot.is_stranger(),
                false => !(tombstones && self.tombstones_on_disk.load(Relaxed)),
            }
    }

    pub(crate) fn is_loaded(&self) -> bool {
        self.is_loaded.load(Acquire)
    }

    /// `table` or its filter is whole. `correction`: to the number of live documents.
    pub(crate) fn set_loaded(&self, correction: i64) {
        self.live.fetch_add(correction, Relaxed);
        self.is_loaded.store(true, Release);
    }

    /// Live documents, in memory or not.
    pub fn live(&self) -> u64 {
        self.live.load(Relaxed).max(0) as u64
    }

    pub(crate) fn set_live(&self, live: u64) {
        self.live.store(live as i64, Relaxed);
    }

    /// A document has changed.
    pub(crate) fn put(&self, slot: &mut Locked<'_>, item: Item) {
        let was_live = slot.document().is_some_and(|old| !old.is_deleted());
        self.live.fetch_add(i64::from(!item.is_deleted()) - i64::from(was_live), Relaxed);
        slot.put_committed(item, true);
    }

    /// Forgets the tombstones the file has. Returns how many.
    pub(crate) fn drop_tombstones(&self) -> usize {
        // Whoever loads would take for new what a dropped tombstone had ended.
        if !self.is_loaded() || self.table.counts.tombstones.load(Relaxed) == 0 {
            return 0;
        }
        // Said before it is true, so that nobody misses one in between.
        self.tombstones_on_disk.store(true, Relaxed);
        let clears = self.table.clears();
        self.table.drop_tombstones(self.log.marks.filed(), clears)
    }

    /// Whether this prepare is from before a restart.
    pub(crate) fn is_inherited(&self, prepare: &Item) -> bool {
        prepare.seqno().0 <= self.inherited_upto.load(Relaxed)
    }

    /// The open prepares, in order.
    fn prepares(&self) -> Vec<(Seqno, Level, Item)> {
        let mut prepares = Vec::new();
        self.table.visit_prepares(|item| {
            if let Kind::Prepare { level } = item.kind() {
                prepares.push((item.seqno(), level, item.clone()));
            }
        });
        prepares.sort_by_key(|p| p.0);
        prepares
    }

    /// Puts the prepares found in memory back into the queue, after a restart or a change of role. They wait for ever.
    pub(crate) fn retrack(&self) {
        let prepares = self.prepares();
        let mut waiting = self.waiting.lock();
        if let Some(tracker) = waiting.as_deref_mut()
            && let Some(passive) = tracker.passive.take()
        {
            tracker.completed = tracker.completed.max(passive.completed);
            tracker.high_prepared = tracker.high_prepared.max(passive.high_prepared);
        }
        let Some(last) = prepares.last().map(|p| p.0) else { return };
        self.inherited_upto.fetch_max(last.0, Relaxed);
        let tracker = waiting.get_or_insert_default();
        for (seqno, level, prepare) in prepares {
            tracker.push(SyncWrite { seqno, level, prepare, deadline: None, client: None });
        }
    }

    /// Begins to keep the mark that a replica tells its peer. A vBucket that was active says what it had as its own last
    /// snapshot.
    pub(crate) fn become_passive(&self) {
        let prepares: Vec<_> = self.prepares().into_iter().map(|(seqno, level, _)| (seqno, level)).collect();
        let whole = self.log.open_snapshot().map_or(Seqno(u64::MAX), |open| open.start);
        let mut waiting = self.waiting.lock();
        let tracker = waiting.get_or_insert_default();
        if tracker.passive.is_none() {
            // Of what is not known to be on disk only the prepares in memory are said again.
            let first = prepares.first().map_or(tracker.high_prepared, |(seqno, _)| Seqno(seqno.0 - 1));
            let high_prepared = tracker.high_prepared.min(first.max(tracker.completed));
            let mut passive = Passive::resume(high_prepared, tracker.completed, &prepares, whole);
            passive.nudge = tracker.passive_nudge.take();
            tracker.passive = Some(Box::new(passive));
        }
    }

    /// Completes the sync writes whose time has come, from the front, and tells those who wait for a
    /// seqno. Call without locks.
    pub(crate) fn settle(&self, now: Duration) -> Settled {
        let mut settled = Settled::default();
        let state = self.state.read();
        let due = {
            let mut waiting = self.waiting.lock();
            let Some(tracker) = waiting.as_deref_mut() else { return settled };
            let due = tracker.take_seqno_waiters(&self.log.marks, now);
            if *state == VbState::Active && tracker.begin() {
                settled.verdict = tracker.next(&self.log.marks, now);
            } else if let Some(passive) = tracker.passive.as_deref_mut()
                && passive.advance(self.log.marks.durable())
            {
                settled.has_acked = passive.nudge.clone();
            }
            settled.arm = tracker.arm();
            due
        };
        let mut answers: VecDeque<_> = due.into_iter().collect();
        while let Some(verdict) = settled.verdict.take() {
            match verdict {
                Verdict::Commit(write) => {
                    settled.appended_bytes += self.commit(&write);
                    settled.committed += 1;
                    if let Some(client) = write.client {
                        let reply = client.answer.reply(client.mutated);
                        answers.push_back((client.waiter, Ok(reply)));
                    }
                }
                Verdict::Abort(write, why) => {
                    settled.appended_bytes += self.abort(&write);
                    settled.aborted += 1;
                    if let Some(client) = write.client {
                        answers.push_back((client.waiter, Err(OpError::Ambiguous(why))));
                    }
                }
                Verdict::Ambiguous(write) => {
                    if let Some(client) = write.client {
                        let why = "what the disk kept is unknown until a restart";
                        answers.push_back((client.waiter, Err(OpError::Ambiguous(why))));
                    }
                }
            }
            let mut waiting = self.waiting.lock();
            let tracker = waiting.as_deref_mut().expect("stays while someone completes");
            settled.verdict = tracker.next(&self.log.marks, now);
            settled.arm = settled.arm.into_iter().chain(tracker.arm()).min();
        }
        drop(state);
        for (waiter, result) in answers {
            waiter.finish(result);
        }
        settled
    }

    /// The document becomes what its prepare said. Returns the bytes appended.
    fn commit(&self, write: &SyncWrite) -> i64 {
        let mut slot = self.table.lock(write.prepare.key());
        let Some(prepare) = slot.take_prepare(write.seqno) else { return 0 };
        let item = self.log.append_with_cas(prepare.meta().cas, |stamp| prepare.committed_as(stamp.seqno));
        let bytes = item.memory() as i64;
        self.put_given(&mut slot, item);
        bytes
    }

    /// The prepare comes to nothing. Returns the bytes appended.
    fn abort(&self, write: &SyncWrite) -> i64 {
        let mut slot = self.table.lock(write.prepare.key());
        let Some(prepare) = slot.take_prepare(write.seqno) else { return 0 };
        let item = self.log.append_with_cas(prepare.meta().cas, |stamp| {
            let deleted = Some(types::DeleteSource::Explicit);
            let expiry = (prepare.meta().cas.0 / 1_000_000_000) as u32;
            let meta = Meta { seqno: stamp.seqno, deleted, expiry, datatype: Datatype::RAW, ..prepare.meta() };
            Item::new(write.prepare.key(), meta, Kind::Abort { prepared: write.seqno }, None)
        });
        item.memory() as i64
    }

    /// Holds nothing any more of what it held, as its file went back to an earlier state, or there is none. Call with `state`
    /// held for writing.
    pub(crate) fn forget_all(&self, file: Option<&RecoveredVb>) {
        // Before the table is empty: who does not find a key must look into the file.
        self.is_loaded.store(file.is_none(), Release);
        self.tombstones_on_disk.store(file.is_some(), Relaxed);
        self.table.clear();
        let live = file.map_or(0, |file| file.alive.saturating_sub(file.on_disk_prepares));
        self.live.store(live as i64, Relaxed);
        self.live_is_rough.store(false, Relaxed);
        self.inherited_upto.store(0, Relaxed);
        self.set_uuid(self.log.record().failover.current().uuid);
        if let Some(tracker) = self.waiting.lock().as_deref_mut() {
            let nudge = tracker.passive.take().and_then(|passive| passive.nudge);
            (tracker.high_prepared, tracker.completed) =
                file.map(|file| (file.high_prepared, file.completed)).unwrap_or_default();
            tracker.passive_nudge = nudge;
        }
    }

    /// Takes out everyone who waits: the vBucket stops being active, or the server stops.
    pub(crate) fn take_waiting(&self) -> GivenUp {
        let mut waiting = self.waiting.lock();
        let Some(tracker) = waiting.as_deref_mut() else { return GivenUp::default() };
        GivenUp { writes: tracker.drain(), seqnos: tracker.take_seqno_waiters(&self.log.marks, Duration::MAX) }
    }

    /// How many seqnos the last replica is behind the last prepare under way; 0: none is.
    pub(crate) fn acks_behind(&self) -> u64 {
        let waiting = self.waiting.lock();
        let Some(tracker) = waiting.as_deref() else { return 0 };
        let Some(last) = tracker.writes().next_back() else { return 0 };
        let marks = tracker.chains.iter().flat_map(|chains| chains.marks());
        marks.map(|(_, prepared)| last.seqno.0.saturating_sub(prepared.0)).max().unwrap_or(0)
    }

    /// Sync writes under way.
    pub fn sync_writes(&self) -> usize {
        self.waiting.lock().as_deref().map_or(0, Tracker::len)
    }
}

/// Those whose waiting came to nothing.
#[derive(Default)]
pub(crate) struct GivenUp {
    writes: Vec<SyncWrite>,
    seqnos: Vec<(Waiter, OpResult)>,
}

impl GivenUp {
    /// Tells them, without locks held. Nobody knows what becomes of a sync write now.
    pub fn tell(self, why: &'static str) {
        for client in self.writes.into_iter().filter_map(|write| write.client) {
            client.waiter.finish(Err(OpError::Ambiguous(why)));
        }
        for (waiter, result) in self.seqnos {
            waiter.finish(result);
        }
    }
}

/// What came of a look at the queue.
#[derive(Default)]
pub(crate) struct Settled {
    pub appended_bytes: i64,
    pub committed: u64,
    pub aborted: u64,
    /// When the timer is to look here.
    pub arm: Option<Duration>,
    /// To be told that this replica has more.
    pub has_acked: Option<Arc<dyn AckNudge>>,
    verdict: Option<Verdict>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_vbucket_is_small() {
        let bytes = size_of::<VBucket>() + size_of::<Changelog>();
        assert!(bytes <= 768, "{bytes} bytes, 1024 times");
    }
}
