//! One bucket's files, as the engine uses them.

use std::ops::{Bound, ControlFlow};
use std::sync::Arc;
use std::sync::atomic::Ordering::{self, Relaxed};

use changelog::{Changelog, Snapshot, VbRecord};
use couchstore::DocInfo;
use governor::Governor;
use parking_lot::Mutex;
use types::rank::{Rank, RwLock};
use types::{Cas, DocKey, Item, Kind, Meta, RevSeqno, Seqno, VbId};

use crate::batch::PREPARE_PREFIX;
use crate::compaction::{CompactionDone, Purge};
use crate::error::{Damage, Damages, StoreError};
use crate::names;
use crate::queue::Urgency;
use crate::spec::BucketSpec;
use crate::stats::BucketStoreStats;
use crate::vb::{Committed, Done, Home, Nudge, Vb};
use crate::{codec, deletion, fetch, rollback};

/// The files of one bucket.
///
/// 1. A vBucket's marks move only after the commit that they speak of outlives power loss.
/// 2. Reads see the last such commit, never one that failed.
/// 3. "Not found" is said only of a file that was read without error, or of a vBucket that never had one.
pub struct BucketStore {
    spec: RwLock<Arc<BucketSpec>>,
    /// Held while a new spec is written, which no reader waits for.
    changing_spec: Mutex<()>,
    pub(crate) home: Arc<Home>,
    vbs: Vec<Arc<Vb>>,
}

/// What a vBucket's file says. vBuckets without a file are empty.
#[derive(Clone, Debug)]
pub struct RecoveredVb {
    pub vb: VbId,
    pub high: Seqno,
    /// Tombstones up to here may be gone.
    pub purge: Seqno,
    pub max_cas: Cas,
    /// The highest revision of a tombstone.
    pub max_deleted_rev: RevSeqno,
    pub record: VbRecord,
    /// The highest prepare that was committed or aborted.
    pub completed: Seqno,
    /// The highest prepare.
    pub prepared: Seqno,
    /// The highest prepare of a whole snapshot, or the end of a whole one from a peer's disk.
    pub high_prepared: Seqno,
    /// The last change that is neither prepare nor abort.
    pub max_visible: Seqno,
    /// The snapshot in the middle of which a replica's file ends.
    pub open_snapshot: Option<Snapshot>,
    /// Entries not deleted, prepares among them.
    pub alive: u64,
    /// Entries deleted, aborts among them.
    pub tombstones: u64,
    pub on_disk_prepares: u64,
    /// The file's name in its bucket's directory.
    pub file: String,
    pub file_bytes: u64,
}

/// A vBucket that was deleted, and what its next life begins with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeletedVb {
    pub vb: VbId,
    /// For [`VbRecord::rollbacks`].
    pub rollbacks: u32,
    pub max_cas: Cas,
}

/// What to do at warm-up besides streaming documents and open prepares.
#[derive(Clone, Copy, Debug, Default)]
pub struct WarmUp {
    pub tombstones: bool,
    /// Reads the tree of ids too, by which single documents are found later.
    pub prove: bool,
}

impl BucketStore {
    pub(crate) fn new(spec: BucketSpec, home: Arc<Home>, vbs: Vec<Arc<Vb>>) -> BucketStore {
        assert_eq!(vbs.len(), usize::from(spec.vbuckets));
        let spec = RwLock::ranked(Rank::FileCache, Arc::new(spec));
        BucketStore { spec, changing_spec: Mutex::new(()), home, vbs }
    }

    pub fn spec(&self) -> Arc<BucketSpec> {
        Arc::clone(&self.spec.read())
    }

    /// Gives the bucket other settings; durable when it returns. Refuses to change what its files are made of.
    pub(crate) fn change_spec(&self, spec: BucketSpec) -> Result<(), StoreError> {
        let _changing = self.changing_spec.lock();
        if self.home.gone.load(Ordering::Acquire) {
            return Err(StoreError::NoSuchBucket(spec.name));
        }
        if !self.spec().can_become(&spec) {
            let what = "its uuid, vBucket count, replicas and eviction policy are fixed for its life".to_owned();
            return Err(StoreError::BadSpec { bucket: spec.name, what });
        }
        spec.save(&*self.home.shared.env.storage, &self.home.dir)?;
        *self.home.trigger.write() = spec.compaction;
        *self.spec.write() = Arc::new(spec);
        Ok(())
    }

    /// Its directory is about to go: when this returns, nobody writes a spec into it any more.
    pub(crate) fn mark_gone(&self) {
        let _changing = self.changing_spec.lock();
        self.home.gone.store(true, Ordering::Release);
    }

    /// What each file says as of its last good commit; asked right after the store was opened, what was recovered.
    pub fn recovered(&self) -> Vec<RecoveredVb> {
        self.vbs.iter().filter_map(|vb| vb.committed().map(|committed| recovered(vb.id, &committed))).collect()
    }

    /// vBuckets that were deleted and have not been made again.
    pub fn deleted(&self) -> Vec<DeletedVb> {
        let deletions = self.home.deletions.lock();
        let deleted = self.vbs.iter().filter(|vb| vb.committed().is_none()).filter_map(|vb| {
            let deleted = deletions.get(vb.id)?;
            Some(DeletedVb { vb: vb.id, rollbacks: deleted.rollbacks, max_cas: Cas(deleted.max_cas) })
        });
        deleted.collect()
    }

    /// Streams the last good commit of one vBucket in seqno order: every document alive, tombstones if asked for, and the
    /// prepares that are neither committed nor aborted, always with their value. `want_value` is asked for each value
    /// there is, with its bytes on disk; one not wanted stays in the file. Returns what that commit says of itself, `None`
    /// without a file. An error means that the stream is not whole.
    pub fn warm_up(
        &self,
        vb: VbId,
        options: WarmUp,
        want_value: &mut dyn FnMut(&Meta, usize) -> bool,
        each: &mut dyn FnMut(Item),
    ) -> Result<Option<RecoveredVb>, StoreError> {
        let vb = self.vb(vb);
        let Some((committed, file)) = vb.reading()? else { return Ok(None) };
        let warmed = self.warm_up_from(vb, &committed, &file, options, want_value, each);
        warmed.map_err(|error| vb.as_damage(error, &committed))
    }

    fn warm_up_from(
        &self,
        vb: &Vb,
        committed: &Committed,
        file: &couchstore::Snapshot,
        options: WarmUp,
        want_value: &mut dyn FnMut(&Meta, usize) -> bool,
        each: &mut dyn FnMut(Item),
    ) -> Result<Option<RecoveredVb>, StoreError> {
        let completed = committed.facts.completed;
        let mut failed = None;
        let walked = file.changes_since(0, |info| {
            match warm_item(vb, file, &info, options, completed, want_value) {
                Ok(None) => {}
                Ok(Some(item)) => each(item),
                Err(error) => {
                    failed = Some(error);
                    return ControlFlow::Break(());
                }
            }
            ControlFlow::Continue(())
        });
        let _ = walked.map_err(StoreError::file(vb.id))?;
        if let Some(error) = failed {
            return Err(error);
        }
        if options.prove {
            let mut entries = 0;
            let count = |_| {
                entries += 1;
                ControlFlow::Continue(())
            };
            let _ = file.by_id(Bound::Unbounded, Bound::Unbounded, count).map_err(StoreError::file(vb.id))?;
            let expected = committed.alive + committed.tombstones;
            if entries != expected {
                return Err(vb.damaged(format!("the tree of ids has {entries} entries instead of {expected}")));
            }
        }
        Ok(Some(recovered(vb.id, committed)))
    }

    /// The prepares that were neither committed nor aborted as of the last good commit, in seqno order. Reads only as much
    /// of the file as was written since the first of them.
    pub fn open_prepares(&self, vb: VbId) -> Result<Vec<Item>, StoreError> {
        let vb = self.vb(vb);
        if vb.committed().is_none_or(|committed| committed.facts.prepared <= committed.facts.completed) {
            return Ok(Vec::new());
        }
        let Some((committed, file)) = vb.reading()? else { return Ok(Vec::new()) };
        let (completed, prepared) = (committed.facts.completed, committed.facts.prepared);
        let mut found = Vec::new();
        let walked = file.changes_since(completed.0 + 1, |info| {
            if info.seq > prepared.0 {
                return ControlFlow::Break(());
            }
            if info.id.first() == Some(&PREPARE_PREFIX) {
                found.push(info);
            }
            ControlFlow::Continue(())
        });
        let _ = walked.map_err(StoreError::file(vb.id))?;
        let mut open = Vec::new();
        for info in &found {
            let item = warm_item(vb, &file, info, WarmUp::default(), completed, &mut |_, _| true)?;
            open.extend(item.filter(|item| !item.is_committed()));
        }
        Ok(open)
    }

    /// Hands over the vBucket's changelog, which must not start after the high seqno of its file (0 without one). From here
    /// on `changed` makes the flusher look at it. `nudge` is called after every move of the marks and after poisoning,
    /// without locks held. A record that differs from the file's is written without further asking.
    pub fn attach(&self, vb: VbId, log: Arc<Changelog>, nudge: Arc<dyn Nudge>) {
        let vb = self.vb(vb);
        vb.attach(log, nudge);
        self.home.shared.compactor.consider(vb);
        if vb.is_dirty() {
            self.home.shared.changed(vb, Urgency::Normal);
        }
    }

    /// The changelog has grown, or its record was replaced. Cheap if the vBucket is queued already. Not to be called with a
    /// lock of rank `CommitQueue` or below held.
    pub fn changed(&self, vb: VbId, urgency: Urgency) {
        self.home.shared.changed(self.vb(vb), urgency);
    }

    /// The same of several vBuckets for whose changes somebody waits, by a thread that may block and has nothing better to do: it
    /// makes them durable itself, if nobody else is at it. Not to be called with a lock held.
    pub fn make_durable(&self, vbs: &[VbId]) {
        let changed = || vbs.iter().map(|vb| self.vb(*vb));
        if !self.home.shared.logger.lead(changed()) {
            changed().for_each(|vb| self.home.shared.file(vb, Urgency::Durable));
        }
    }

    /// Version of the changelog's record that is durable; `None`: none it was attached with or given since.
    pub fn recorded(&self, vb: VbId) -> Option<u64> {
        let attached = self.vb(vb).attached()?;
        let version = attached.recorded.load(Ordering::Acquire);
        let logged = attached.records.lock().logged().map(|(version, _)| version);
        logged.max((version != u64::MAX).then_some(version))
    }

    /// Reads one document, alive or deleted, from the last good commit. `done` is called on a reader's thread, together
    /// with all others that were asked of this vBucket meanwhile; on the caller's if the store is closed. `Ok(None)`: the
    /// file is whole and has no such key.
    pub fn fetch(&self, vb: VbId, key: DocKey<'_>, done: Done) {
        fetch::ask(self.vb(vb), key, done);
    }

    /// [`BucketStore::fetch`] on the caller's thread.
    pub fn fetch_now(&self, vb: VbId, key: DocKey<'_>) -> Result<Option<Item>, StoreError> {
        fetch::now(self.vb(vb), key)
    }

    /// Asks for a compaction of one vBucket's file that begins after now, with tombstones purged as `purge` says and as
    /// everybody else says who asks before it begins. `done` is told how it ended; on the caller's thread if the store is
    /// closed.
    pub fn compact(&self, vb: VbId, purge: Purge, done: CompactionDone) {
        self.home.shared.compactor.ask(self.vb(vb), purge, Some(done));
    }

    /// Ends a compaction of the vBucket that runs or waits; whoever asked for it is told so.
    pub fn cancel_compaction(&self, vb: VbId) {
        self.home.shared.compactor.cancel(self.vb(vb));
    }

    /// Takes a vBucket back to an earlier commit of its file: the newest that is whole and not after `to`, or to nothing. Durable
    /// when it returns what the file says now; what was later is void in the commit log too, and its changelog, whose readers
    /// see nothing of the past any more, goes on from there. Nothing may be appended meanwhile. Waits for the disk, for a flush,
    /// and for a step of a compaction. An error leaves the vBucket as it was, or poisoned.
    pub fn roll_back(&self, vb: VbId, to: Seqno) -> Result<RecoveredVb, StoreError> {
        let vb = self.vb(vb);
        rollback::roll_back(vb, to)?;
        let committed = vb.committed().expect("a rollback leaves a commit");
        Ok(recovered(vb.id, &committed))
    }

    /// Deletes a vBucket: when this returns it has no file, what the commit log has of it is void, for good, and its changelog,
    /// whose readers see nothing of the past any more, begins at seqno 1 with `record`. Compactions that run or wait are ended, and
    /// whoever asked for them is told. Nothing may be appended meanwhile. Waits for the disk, for a flush, and for a step of a
    /// compaction. An error leaves the vBucket as it was, or poisoned.
    pub fn delete_vb(&self, vb: VbId, record: VbRecord) -> Result<(), StoreError> {
        deletion::delete(self.vb(vb), record)
    }

    /// Whom background work on the bucket's files asks how fast it may go.
    pub fn governor(&self) -> &Governor {
        &self.home.shared.governor
    }

    /// Tombstones up to here may be gone from the vBucket's file.
    pub fn purge_seqno(&self, vb: VbId) -> Seqno {
        self.vb(vb).committed().map_or(Seqno(0), |committed| committed.purge)
    }

    /// The high seqno of the vBucket's file, and how many documents in it are alive.
    pub fn counted(&self, vb: VbId) -> Option<(Seqno, u64)> {
        let committed = self.vb(vb).committed()?;
        Some((committed.high, committed.alive.saturating_sub(committed.facts.on_disk_prepares)))
    }

    /// A write failed for lack of space, and what is kept back for that case has not been had again since: refuse what would need more.
    pub fn disk_full(&self) -> bool {
        self.home.shared.reserve.is_full()
    }

    /// The commit log has no room, and will have some once more is filed: put off what writes.
    pub fn log_full(&self) -> bool {
        self.home.shared.logger.is_full()
    }

    /// vBuckets that take no writes until a restart, and of which only the commit log has the last changes: it cannot use the room
    /// of these again.
    pub fn held_by_log(&self) -> Vec<VbId> {
        self.vbs.iter().filter(|vb| vb.is_held_by_log()).map(|vb| vb.id).collect()
    }

    /// Changes that are in no file yet.
    pub fn pending(&self) -> u64 {
        let pending = |vb: &Arc<Vb>| {
            let marks = &vb.attached()?.log.marks;
            Some(marks.high().0.saturating_sub(marks.filed().0))
        };
        self.vbs.iter().filter_map(pending).sum()
    }

    /// Memory of changes that are in the commit log and whose filing has not begun.
    pub fn unfiled_bytes(&self) -> u64 {
        self.home.unfiled_bytes.load(Relaxed)
    }

    pub fn stats(&self) -> BucketStoreStats {
        let counters = &self.home.counters;
        let poisoned = |vb: &Arc<Vb>| {
            let attached = vb.attached()?;
            Some((vb.id, attached.log.marks.poisoned()?.to_owned()))
        };
        BucketStoreStats {
            queued_vbs: self.vbs.iter().filter(|vb| vb.ticket.is_busy()).count() as u64,
            waiting_vbs: self.vbs.iter().filter(|vb| vb.ticket.is_waiting()).count() as u64,
            pending_items: self.pending(),
            commits: counters.commits.load(Relaxed),
            items_written: counters.items_written.load(Relaxed),
            items_deduplicated: counters.items_deduplicated.load(Relaxed),
            value_bytes_written: counters.value_bytes_written.load(Relaxed),
            flush_failures: counters.flush_failures.load(Relaxed),
            sync_failures: counters.sync_failures.load(Relaxed),
            files_created: counters.files_created.load(Relaxed),
            fetched: counters.fetched.load(Relaxed),
            fetch_failures: counters.fetch_failures.load(Relaxed),
            poisoned: self.vbs.iter().filter_map(poisoned).collect(),
            file_bytes: self.vbs.iter().filter_map(|vb| Some(vb.committed()?.file_bytes)).sum(),
            live_bytes: self.vbs.iter().filter_map(|vb| Some(vb.committed()?.live_bytes)).sum(),
            compactions: counters.compactions.load(Relaxed),
            compaction_failures: counters.compaction_failures.load(Relaxed),
            disk_full: self.disk_full(),
        }
    }

    pub(crate) fn vbs(&self) -> &[Arc<Vb>] {
        &self.vbs
    }

    pub(crate) fn vb(&self, vb: VbId) -> &Arc<Vb> {
        self.vbs.get(usize::from(vb.0)).expect("vBuckets are numbered from 0 up to the bucket's count")
    }
}

fn warm_item(
    vb: &Vb,
    file: &couchstore::Snapshot,
    info: &DocInfo,
    options: WarmUp,
    completed: Seqno,
    want_value: &mut dyn FnMut(&Meta, usize) -> bool,
) -> Result<Option<Item>, StoreError> {
    let Some(entry) = codec::entry(info).map_err(|what| vb.damaged(what))? else { return Ok(None) };
    let wanted = match entry.kind {
        Kind::Abort { .. } => return Ok(None),
        Kind::Prepare { .. } if entry.meta.seqno <= completed => return Ok(None),
        Kind::Prepare { .. } => true,
        Kind::Committed { .. } if entry.meta.deleted.is_some() && !options.tombstones => return Ok(None),
        Kind::Committed { .. } => {
            let bytes = info.body_size.saturating_sub(codec::CHUNK_FRAME_BYTES);
            info.has_body() && want_value(&entry.meta, bytes as usize)
        }
    };
    if wanted { entry.with_value(vb.id, file, info).map(Some) } else { Ok(Some(entry.without_value(info))) }
}

fn recovered(vb: VbId, committed: &Committed) -> RecoveredVb {
    let facts = &committed.facts;
    RecoveredVb {
        vb,
        high: committed.high,
        purge: committed.purge,
        max_cas: facts.max_cas,
        max_deleted_rev: facts.max_deleted_rev,
        record: facts.record.clone(),
        completed: facts.completed,
        prepared: facts.prepared,
        high_prepared: facts.high_prepared,
        max_visible: facts.max_visible,
        open_snapshot: facts.open_snapshot(committed.high),
        alive: committed.alive,
        tombstones: committed.tombstones,
        on_disk_prepares: facts.on_disk_prepares,
        file: names::vb_file(vb, committed.rev),
        file_bytes: committed.file_bytes,
    }
}

impl Vb {
    /// Damage met while reading everything, with what a person needs to decide; other errors as they are.
    fn as_damage(&self, error: StoreError, committed: &Committed) -> StoreError {
        let StoreError::File { source, .. } = &error else { return error };
        if !source.is_damage() {
            return error;
        }
        let lost = format!("vBucket {}: one or more of its {} documents", self.id, committed.alive);
        let (path, offset, what) = (self.path(committed.rev), source.offset(), source.to_string());
        StoreError::Damaged(Damages(vec![Damage { vb: Some(self.id), path, offset, what, lost }]))
    }

    /// The file was read, and says what cannot be.
    pub(crate) fn damaged(&self, what: String) -> StoreError {
        let committed = self.committed();
        let path = committed.as_ref().map_or_else(|| self.home.dir.clone(), |c| self.path(c.rev));
        let lost = format!("vBucket {}: at least the document in question", self.id);
        StoreError::Damaged(Damages(vec![Damage { vb: Some(self.id), path, offset: None, what, lost }]))
    }
}
