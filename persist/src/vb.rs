//! One vBucket as the store knows it: the last commit of its file, and the changelog that runs ahead of it.

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use changelog::{Changelog, Cursor, VbRecord};
use commit_log::Synced;
use couchstore::{Couch, Mode, Snapshot};
use env::{File, OpenMode};
use types::rank::{Mutex, Rank, RwLock};
use types::{BucketUuid, Cas, Item, KeyBuf, Seqno, VbId};

use crate::compaction::{Gate, Trigger};
use crate::deletion::{Deleted, Deletions};
use crate::error::StoreError;
use crate::facts::VbFacts;
use crate::file_cache::Place;
use crate::logger::Records;
use crate::names;
use crate::queue::Ticket;
use crate::shared::Shared;
use crate::shared_sync::SharedSync;
use crate::stats::BucketCounters;

/// Told after every move of a vBucket's marks, and when it is poisoned. Called without locks held.
pub trait Nudge: Send + Sync {
    fn marks_moved(&self, vb: VbId);

    /// A compaction met documents whose time is over. It keeps them: whoever knows their latest version decides.
    fn expired(&self, _vb: VbId, _keys: Vec<KeyBuf>) {}
}

/// What all vBuckets of a bucket share.
pub(crate) struct Home {
    pub name: String,
    pub uuid: BucketUuid,
    pub dir: PathBuf,
    pub shared: Arc<Shared>,
    pub counters: BucketCounters,
    /// The bucket is being deleted: its files may be gone.
    pub gone: AtomicBool,
    /// Changes in the commit log whose filing nobody has begun, in bytes of memory, and how many may be.
    pub unfiled_bytes: AtomicU64,
    /// The part of the bucket's quota that they may be at most.
    pub unfiled_share: u64,
    /// When files are compacted; `None`: as the store says.
    pub trigger: RwLock<Option<Trigger>>,
    /// As they are on disk. Held while they are written, which nobody waits for who must not.
    pub deletions: parking_lot::Mutex<Deletions>,
    pub names: SharedSync,
}

impl Home {
    /// Has the names of all files that were renamed before this outlive power loss.
    pub fn sync_dir(&self) -> Result<(), Arc<io::Error>> {
        self.names.sync(|| self.shared.env.storage.sync_dir(&self.dir))
    }

    pub fn unfiled_bytes_max(&self) -> u64 {
        self.shared.logger.filer.unfiled_bytes_max().min(self.unfiled_share)
    }
}

/// The last commit that is known to outlive power loss. Reads start at `header_at`, so what a later commit left behind
/// by failing is never seen.
#[derive(Clone, Debug)]
pub(crate) struct Committed {
    pub rev: u64,
    pub header_at: u64,
    pub high: Seqno,
    pub purge: Seqno,
    pub facts: VbFacts,
    pub alive: u64,
    pub tombstones: u64,
    pub file_bytes: u64,
    /// Of these, what this commit needs: see [`couchstore::Header::live_bytes`].
    pub live_bytes: u64,
}

impl Committed {
    /// How far it has come: a seqno after a rollback is further than any before it.
    pub fn reach(&self) -> (u32, Seqno) {
        (self.facts.record.rollbacks, self.high)
    }
}

pub(crate) struct Attached {
    pub log: Arc<Changelog>,
    pub cursor: Cursor,
    pub nudge: Arc<dyn Nudge>,
    /// What was handed to the commit log; none before there was anything to hand. Taken out by who submits.
    pub log_cursor: Mutex<Option<Cursor>>,
    /// The seqno up to which the commit log has taken the changes, if it ever took any.
    pub submitted: AtomicU64,
    /// Version of the changelog's record that the file holds; `u64::MAX`: none.
    pub recorded: AtomicU64,
    pub records: Mutex<Records>,
}

impl Attached {
    /// From here on the commit log is given what the file does not have.
    pub fn enter_log(&self) -> Cursor {
        let cursor = self.log.cursor_beside("commit log", &self.cursor);
        let from = self.log.read(&cursor, 0).from;
        self.submitted.store(from.0 - 1, Ordering::Release);
        cursor
    }

    /// The version of the record that the file holds.
    pub fn recorded(&self) -> Option<u64> {
        Some(self.recorded.load(Ordering::Acquire)).filter(|version| *version != u64::MAX)
    }

    /// The file has all that the commit log has.
    pub fn is_filed(&self) -> bool {
        // What was submitted while the vBucket went back, or was deleted, is void.
        let submitted = self.submitted.load(Ordering::Acquire).min(self.log.marks.high().0);
        let has_changes = self.log.marks.filed().0 >= submitted;
        has_changes && self.records.lock().are_filed(self.recorded())
    }
}

pub(crate) type Done = Box<dyn FnOnce(Result<Option<Item>, StoreError>) + Send>;

/// 1. One flush at a time: whoever got this from the queue, until it gives it back.
/// 2. The marks move, go back, and are poisoned, under the lock of `state`: whoever publishes `durable` may be another than who
///    finds the file broken.
/// 3. `committed` changes only when a commit has succeeded, before the marks say so.
/// 4. No lock is held across I/O.
pub(crate) struct Vb {
    pub id: VbId,
    pub home: Arc<Home>,
    /// Where the file cache keeps the file of the committed revision.
    pub place: Arc<Place>,
    /// In the queue of flushes.
    pub ticket: Ticket,
    /// How often somebody asked for a submission to the commit log while one was under way, itself included.
    pub asks: AtomicU32,
    /// On the list of those whose changes nobody waits for.
    pub is_promised: AtomicBool,
    /// On its way back to an earlier commit: no compaction goes on.
    pub is_rolling_back: AtomicBool,
    /// On the filer's list.
    pub is_listed: AtomicBool,
    /// This vBucket's part of [`Home::unfiled_bytes`].
    pub unfiled_bytes: AtomicU64,
    pub gate: Gate,
    /// The name of the file outlives power loss only once its directory is synced: see [`Vb::anchor`].
    is_unanchored: AtomicBool,
    state: Mutex<State>,
    /// Keys asked for, and who waits for them.
    pub fetches: Mutex<HashMap<Box<[u8]>, Vec<Done>>>,
}

struct State {
    committed: Option<Arc<Committed>>,
    attached: Option<Arc<Attached>>,
    /// No new file gets a lower revision.
    next_rev: u64,
    /// Failed flushes since the last good one, and what the newest of them said.
    failures: u32,
    failure: Option<String>,
    /// The last time that it was.
    deleted: Option<Deleted>,
    unnamed: Option<Unnamed>,
}

/// A compacted file that is the vBucket's already, but does not have its name yet, as not all of it is synced: a start would take
/// the one before it, which has as much until this one is written.
struct Unnamed {
    rev: u64,
    path: PathBuf,
    /// What it takes the place of, if whoever compacted left that to us.
    old: Option<PathBuf>,
}

impl State {
    fn rollbacks(&self) -> u32 {
        let committed = self.committed.as_ref().map_or(0, |committed| committed.facts.record.rollbacks);
        committed.max(self.deleted.map_or(0, |deleted| deleted.rollbacks))
    }
}

impl Vb {
    pub fn new(id: VbId, home: Arc<Home>, committed: Option<Committed>, next_rev: u64) -> Vb {
        let live_rev = committed.as_ref().map_or(0, |committed| committed.rev);
        let place = Arc::new(Place::new(home.uuid, id, live_rev));
        let deleted = home.deletions.lock().get(id);
        let state = State {
            committed: committed.map(Arc::new),
            attached: None,
            next_rev: next_rev.max(deleted.map_or(0, |deleted| deleted.rev.saturating_add(1))),
            failures: 0,
            failure: None,
            deleted,
            unnamed: None,
        };
        Vb {
            id,
            home,
            place,
            ticket: Ticket::default(),
            asks: AtomicU32::new(0),
            is_promised: AtomicBool::new(false),
            is_rolling_back: AtomicBool::new(false),
            is_listed: AtomicBool::new(false),
            unfiled_bytes: AtomicU64::new(0),
            gate: Gate::default(),
            is_unanchored: AtomicBool::new(false),
            state: Mutex::ranked(Rank::FileCache, state),
            fetches: Mutex::ranked(Rank::FileCache, HashMap::new()),
        }
    }

    pub fn committed(&self) -> Option<Arc<Committed>> {
        self.state.lock().committed.clone()
    }

    pub fn set_committed(&self, committed: Committed) {
        let committed = Arc::new(committed);
        let mut state = self.state.lock();
        (state.failures, state.failure) = (0, None);
        state.committed = Some(committed);
    }

    /// A compacted file takes the place of the one before.
    pub fn replace_file(&self, committed: Committed) {
        let mut state = self.state.lock();
        state.next_rev = state.next_rev.max(committed.rev.saturating_add(1));
        state.committed = Some(Arc::new(committed));
    }

    /// The file that the vBucket has now is at `path` until it was synced. Only by who has the vBucket to himself.
    pub fn leave_unnamed(&self, rev: u64, path: PathBuf) {
        self.state.lock().unnamed = Some(Unnamed { rev, path, old: None });
    }

    pub fn is_unnamed(&self) -> bool {
        self.state.lock().unnamed.is_some()
    }

    /// Has this file removed once the new one has its name. False: it has.
    pub fn remove_once_named(&self, old: &Path) -> bool {
        let mut state = self.state.lock();
        state.unnamed.as_mut().map(|unnamed| unnamed.old = Some(old.to_owned())).is_some()
    }

    /// Gives a file that is synced as far as it counts its name, durably. Only by who has the vBucket to himself.
    pub fn name(&self) -> Result<(), StoreError> {
        let (rev, from) = match &self.state.lock().unnamed {
            Some(unnamed) => (unnamed.rev, unnamed.path.clone()),
            None => return Ok(()),
        };
        let (storage, to) = (&*self.home.shared.env.storage, self.named(rev));
        let failed = |source| StoreError::SyncFailed { vb: self.id, path: to.clone(), source };
        storage.rename(&from, &to).map_err(|error| failed(Arc::new(error)))?;
        let unnamed = self.state.lock().unnamed.take();
        self.home.sync_dir().map_err(failed)?;
        if let Some(old) = unnamed.and_then(|unnamed| unnamed.old) {
            self.remove_superseded(&old);
        }
        Ok(())
    }

    /// [`Vb::name`] for a file that nobody has written to since.
    pub fn sync_and_name(&self) -> Result<(), StoreError> {
        let rev = match &self.state.lock().unnamed {
            Some(unnamed) => unnamed.rev,
            None => return Ok(()),
        };
        let (file, path) = self.open(rev)?;
        file.sync().map_err(|source| StoreError::SyncFailed { vb: self.id, path, source: source.into() })?;
        self.name()
    }

    /// Readers that have it open keep it until they close it.
    pub fn remove_superseded(&self, path: &Path) {
        if let Err(error) = remove_if_there(&*self.home.shared.env.storage, path) {
            tracing::warn!(bucket = self.home.name, vb = self.id.0, "a compacted file goes at the next start: {error}");
        }
    }

    /// The file was renamed. Only by who has the vBucket to himself.
    pub fn unanchor(&self) {
        self.is_unanchored.store(true, Ordering::Release);
    }

    /// Sees to it that the file's name outlives power loss, before anything is written to it that must.
    pub fn anchor(&self) -> Result<(), StoreError> {
        if !self.is_unanchored.load(Ordering::Acquire) {
            return Ok(());
        }
        let dir = &self.home.dir;
        let failed = |source| StoreError::SyncFailed { vb: self.id, path: dir.clone(), source };
        self.home.sync_dir().map_err(failed)?;
        self.is_unanchored.store(false, Ordering::Release);
        Ok(())
    }

    pub fn attached(&self) -> Option<Arc<Attached>> {
        self.state.lock().attached.clone()
    }

    pub fn attach(&self, log: Arc<Changelog>, nudge: Arc<dyn Nudge>) {
        let committed = self.committed();
        let high = committed.as_ref().map_or(Seqno(0), |c| c.high);
        let cursor = log.cursor("persistence", high).expect("a changelog starts no later than its file ends");
        let now = log.read(&cursor, 0);
        let same_record = committed.is_some_and(|c| c.facts.record == *now.record);
        let recorded = AtomicU64::new(if same_record { now.record_version } else { u64::MAX });
        let records = match same_record {
            true => Records::starting_at(now.record_version, now.record),
            false => Records::default(),
        };
        let records = Mutex::ranked(Rank::CommitQueue, records);
        let log_cursor = Mutex::ranked(Rank::CommitQueue, None);
        let submitted = AtomicU64::new(0);
        let attached = Arc::new(Attached { log, cursor, log_cursor, submitted, nudge, recorded, records });
        let before = self.state.lock().attached.replace(attached);
        assert!(before.is_none(), "vBucket {} has a changelog already", self.id);
    }

    pub fn detach(&self) {
        let attached = self.state.lock().attached.take();
        drop(attached);
    }

    /// The revision that the next new file gets: above every one that was ever seen.
    pub fn next_rev(&self) -> u64 {
        let state = self.state.lock();
        state.committed.as_ref().map_or(0, |committed| committed.rev.saturating_add(1)).max(state.next_rev)
    }

    pub fn failures(&self) -> u32 {
        self.state.lock().failures
    }

    /// Why the last flush failed, if it did.
    pub fn failure(&self) -> Option<String> {
        self.state.lock().failure.clone()
    }

    /// How often flushes have failed in a row.
    pub fn add_failure(&self, error: &StoreError) -> u32 {
        let failure = Some(error.to_string());
        let mut state = self.state.lock();
        state.failures += 1;
        state.failure = failure;
        state.failures
    }

    /// Publishes what the commit log made durable. `None`: there is nobody to tell, or the marks do not move any more.
    pub fn publish_durable(&self, synced: &Synced) -> Option<Arc<Attached>> {
        let state = self.state.lock();
        let attached = state.attached.as_ref()?;
        if let Some(version) = synced.record_version {
            attached.records.lock().became_durable(version);
        }
        let marks = &attached.log.marks;
        if marks.poisoned().is_some() {
            return None;
        }
        // What was handed to the log before a rollback is void. A flush that needs no log any more may have overtaken the
        // last sync of the log.
        let is_void = state.rollbacks() > synced.rollbacks;
        if !is_void && marks.durable() < synced.seqno {
            marks.publish_durable(synced.seqno);
        }
        Some(Arc::clone(attached))
    }

    /// Publishes what the file holds, which is durable by that.
    pub fn publish_filed(&self, attached: &Attached, seqno: Seqno) {
        let _state = self.state.lock();
        let marks = &attached.log.marks;
        if marks.poisoned().is_some() {
            return;
        }
        if marks.durable() < seqno {
            marks.publish_durable(seqno);
        }
        marks.publish_filed(seqno);
    }

    /// An earlier state is the newest again, or none is; the marks go back to it.
    pub fn roll_back(&self, attached: &Attached, committed: Option<Committed>) {
        let mut state = self.state.lock();
        let (high, visible) = committed.as_ref().map(|there| (there.high, there.facts.max_visible)).unwrap_or_default();
        attached.log.marks.roll_back(high, visible);
        (state.failures, state.failure) = (0, None);
        state.committed = committed.map(Arc::new);
    }

    /// Nothing from before counts any more. Only by who has the vBucket to himself.
    pub fn bury(&self, deleted: Deleted) {
        let mut state = self.state.lock();
        state.next_rev = state.next_rev.max(deleted.rev.saturating_add(1));
        (state.deleted, state.unnamed) = (Some(deleted), None);
        drop(state);
        self.is_unanchored.store(false, Ordering::Release);
    }

    /// What the first commit of a file builds on.
    pub fn first_facts(&self, record: VbRecord) -> VbFacts {
        let max_cas = self.state.lock().deleted.map_or(Cas(0), |deleted| Cas(deleted.max_cas));
        VbFacts { max_cas, ..VbFacts::new(record) }
    }

    /// How often the vBucket has been rolled back or deleted: what the commit log has from before the last time is void.
    pub fn rollbacks(&self) -> u32 {
        self.state.lock().rollbacks()
    }

    /// Stops the marks for good, and tells.
    pub fn poison(&self, attached: &Attached, reason: String) {
        {
            let _state = self.state.lock();
            attached.log.marks.poison(reason);
        }
        attached.nudge.marks_moved(self.id);
        // What it holds of the log it holds for good.
        self.home.shared.logger.filer.wake();
    }

    /// Why it takes no writes until a restart, if so.
    pub fn poisoned(&self) -> Option<String> {
        self.attached()?.log.marks.poisoned().map(str::to_owned)
    }

    /// It takes no writes until a restart, which needs the commit log for it.
    pub fn is_held_by_log(&self) -> bool {
        let is_held = |attached: Arc<Attached>| attached.log.marks.poisoned().is_some() && !attached.is_filed();
        self.attached().is_some_and(is_held)
    }

    /// Whether a flush would find something to do.
    pub fn is_dirty(&self) -> bool {
        let Some(attached) = self.attached() else { return false };
        // First, as it takes the changelog's lock: see [`crate::logger::Logger`].
        let wants_record = self.wants_record(&attached);
        let marks = &attached.log.marks;
        marks.poisoned().is_none() && (wants_record || marks.high() > marks.filed())
    }

    /// Whether the record alone is worth a commit. One that was never changed is not worth a file of its own: a vBucket
    /// without a file is empty, and gets its first record with its first change.
    pub fn wants_record(&self, attached: &Attached) -> bool {
        let recorded = attached.recorded.load(Ordering::Acquire);
        let current = attached.log.read(&attached.cursor, 0);
        let has_file = self.committed().is_some();
        let changed = current.record_version > 0;
        (has_file || changed) && recorded != current.record_version
    }

    /// Where the file of this revision is.
    pub fn path(&self, rev: u64) -> PathBuf {
        match &self.state.lock().unnamed {
            Some(unnamed) if unnamed.rev == rev => unnamed.path.clone(),
            _ => self.named(rev),
        }
    }

    /// Where it is once it has its name.
    pub fn named(&self, rev: u64) -> PathBuf {
        self.home.dir.join(names::vb_file(self.id, rev))
    }

    /// The last good commit, open for reading; `None` if there was none. A compaction may take the file's name away between
    /// the look and the opening: then there is a newer file. So may a deletion: then there is none.
    pub fn reading(&self) -> Result<Option<(Arc<Committed>, Snapshot)>, StoreError> {
        loop {
            let Some(committed) = self.committed() else { return Ok(None) };
            let path = self.path(committed.rev);
            let opened = self.snapshot(&committed);
            let was_replaced =
                || self.committed().is_none_or(|now| now.rev != committed.rev) || self.path(committed.rev) != path;
            if !opened.as_ref().is_err_and(|error| error.is_not_found() && was_replaced()) {
                return opened.map(|file| Some((committed, file)));
            }
        }
    }

    /// Opens the file where readers may look: at the last commit that is known to be durable.
    fn snapshot(&self, committed: &Committed) -> Result<Snapshot, StoreError> {
        let (file, path) = self.open(committed.rev)?;
        Snapshot::open_at(file, &path, committed.header_at).map_err(StoreError::file(self.id))
    }

    /// Opens the file for the next commit.
    pub fn couch(&self, committed: &Committed) -> Result<Couch, StoreError> {
        let (file, path) = self.open(committed.rev)?;
        Couch::open(file, &path, Mode::Strict).map_err(StoreError::file(self.id))
    }

    fn open(&self, rev: u64) -> Result<(Arc<dyn File>, PathBuf), StoreError> {
        let path = self.path(rev);
        let file = self.home.shared.files.open(&self.place, rev, &path).map_err(StoreError::io("open", &path))?;
        Ok((file, path))
    }
}

/// Opens a file that nobody keeps open.
pub(crate) fn open_file(shared: &Shared, path: &std::path::Path, mode: OpenMode) -> Result<Arc<dyn File>, StoreError> {
    let op = if mode == OpenMode::CreateNew { "create" } else { "open" };
    shared.env.storage.open(path, mode).map_err(StoreError::io(op, path))
}

pub(crate) fn remove_if_there(storage: &dyn env::Storage, path: &std::path::Path) -> Result<(), StoreError> {
    match storage.remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(StoreError::io("remove", path)(e)),
        _ => Ok(()),
    }
}
