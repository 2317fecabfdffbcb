//! What a node that follows another applies: the changes of its peer, as they were made there.
//!
//! ```text
//!     begin_snapshot ──▶ apply, apply, … ──▶ the last of it: whole again, and what was prepared in it is said to be here
//! ```
//! Nothing is decided here. What cannot be right is refused, and the stream it came on should be closed and begun anew.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use changelog::{NotTaken, Snapshot};
use persist::Urgency;
use types::{Cas, Datatype, DeleteSource, DocKey, Item, Kind, Level, Meta, RevSeqno, Seqno, VbId, VbState, VbUuid};

use crate::bucket::Bucket;
use crate::durability::Tracker;
use crate::hash_table::Locked;
use crate::passive::AckNudge;
use crate::vbucket::VBucket;

/// What follows, up to `end`, is one snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SnapshotMarker {
    pub start: Seqno,
    pub end: Seqno,
    /// It comes from the peer's disk. There prepares up to here were decided, and only the outcome is sent, as documents.
    pub from_disk: Option<Seqno>,
}

/// A document as the peer has it.
#[derive(Clone, Copy, Debug)]
pub struct Given<'a> {
    pub key: DocKey<'a>,
    pub meta: Meta,
    /// As stored. `None`: a tombstone without xattrs.
    pub value: Option<&'a [u8]>,
}

/// One message of a peer.
#[derive(Clone, Copy, Debug)]
pub enum Change<'a> {
    /// A mutation; a deletion or expiration if `meta.deleted` says so. Of a document with a prepare it is the outcome: so a peer
    /// sends commits from its disk, and those of prepares from the middle of a snapshot in which the stream begins, as nobody
    /// knows whether they are here.
    Document(Given<'a>),
    Prepare {
        given: Given<'a>,
        level: Level,
    },
    Commit {
        key: DocKey<'a>,
        prepared: Seqno,
        seqno: Seqno,
    },
    Abort {
        key: DocKey<'a>,
        prepared: Seqno,
        seqno: Seqno,
    },
    /// There is nothing more up to here.
    Advance {
        seqno: Seqno,
    },
}

impl Change<'_> {
    pub fn seqno(&self) -> Seqno {
        match self {
            Change::Document(given) | Change::Prepare { given, .. } => given.meta.seqno,
            Change::Commit { seqno, .. } | Change::Abort { seqno, .. } | Change::Advance { seqno } => *seqno,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ApplyError {
    #[error("this vBucket is neither replica nor pending here")]
    NotReplica,
    #[error("seqno {seqno} after {high}: changes come in order")]
    OutOfOrder { seqno: Seqno, high: Seqno },
    #[error("seqno {0} lies in no snapshot that was announced")]
    OutsideSnapshot(Seqno),
    #[error("{0}")]
    Invalid(&'static str),
    #[error("the outcome of prepare {0}, which is not here")]
    UnknownPrepare(Seqno),
    /// Try the same again: says why.
    #[error("{0}")]
    Later(String),
    /// Nothing is taken until a restart: says why.
    #[error("{0}")]
    Poisoned(String),
}

/// Where a replica's stream goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResumePoint {
    pub uuid: VbUuid,
    pub seqno: Seqno,
    /// Of the snapshot that `seqno` is in the middle of; both `seqno` if there is none.
    pub snapshot_start: Seqno,
    pub snapshot_end: Seqno,
}

const BITS_48: u64 = (1 << 48) - 1;

impl Given<'_> {
    fn check(&self) -> Result<(), ApplyError> {
        let Meta { seqno, cas, rev, deleted, .. } = self.meta;
        if seqno.0 == 0 || (seqno.0 | rev.0) > BITS_48 {
            return Err(ApplyError::Invalid("seqnos and revisions have 48 bits, and seqnos begin at 1"));
        }
        if cas == Cas(0) || cas == Cas::LOCKED {
            return Err(ApplyError::Invalid("not a CAS a document can have"));
        }
        if self.value.is_none() && deleted.is_none() {
            return Err(ApplyError::Invalid("a document that is not deleted has a value"));
        }
        Ok(())
    }

    fn item(&self, kind: Kind) -> Item {
        Item::new(self.key, self.meta, kind, self.value)
    }
}

impl Bucket {
    /// Who is told when a replica's high prepared seqno has moved; replaces whoever was told before.
    pub fn tell_acks(&self, vb: VbId, nudge: Option<Arc<dyn AckNudge>>) -> Result<(), ApplyError> {
        let vb = self.replica(vb)?;
        let mut waiting = vb.waiting.lock();
        if let Some(passive) = waiting.as_deref_mut().and_then(|tracker| tracker.passive.as_deref_mut()) {
            passive.nudge = nudge;
        }
        Ok(())
    }

    /// What a replica may tell its peer with `SEQNO_ACK`: it has what every prepare up to here asks of it. Of an active
    /// vBucket, its last prepare.
    pub fn high_prepared(&self, vb: VbId) -> Option<Seqno> {
        self.vb(vb).ok().map(|vb| vb.prepared_marks().0)
    }

    /// Where the stream of a replica goes on.
    pub fn resume_point(&self, vb: VbId) -> Result<ResumePoint, ApplyError> {
        let vb = self.replica(vb)?;
        let _state = vb.state.read();
        let (seqno, uuid) = (vb.log.marks.high(), vb.uuid());
        let (snapshot_start, snapshot_end) = match vb.log.open_snapshot() {
            Some(open) => (open.start, open.end),
            None => (seqno, seqno),
        };
        Ok(ResumePoint { uuid, seqno, snapshot_start, snapshot_end })
    }

    fn replica(&self, vb: VbId) -> Result<&VBucket, ApplyError> {
        self.vb(vb).map_err(|_| ApplyError::NotReplica)
    }

    /// The peer announces a snapshot. One that was interrupted goes on with it. One caller a vBucket at a time, as for
    /// [`Bucket::apply`].
    pub fn begin_snapshot(&self, vb: VbId, marker: SnapshotMarker) -> Result<(), ApplyError> {
        let vb = self.replica(vb)?;
        let state = vb.state.read();
        check_replica(*state)?;
        if marker.start > marker.end || marker.end.0 > BITS_48 {
            return Err(ApplyError::Invalid("a snapshot ends before it starts"));
        }
        let completed = marker.from_disk.map(|completed| completed.min(marker.end));
        vb.log.begin_snapshot(marker.end, completed);
        let mut waiting = vb.waiting.lock();
        waiting.get_or_insert_default().passive.get_or_insert_default().decided = completed.unwrap_or_default();
        Ok(())
    }

    /// Applies one message of the peer. Changes are in the order of their seqnos, some of which may be missing, within the
    /// snapshot that was announced. Never waits: [`ApplyError::Later`] gives the message back.
    pub fn apply(&self, vb: VbId, change: &Change<'_>) -> Result<(), ApplyError> {
        if self.take(vb, change)? {
            self.store.changed(vb, Urgency::Durable);
        }
        Ok(())
    }

    /// [`Bucket::apply`], but if something is said to the peer once this is on disk, that is left to the caller. `true`: so it is,
    /// and [`Bucket::make_durable`] must follow before long; several messages, and several vBuckets, may share it.
    pub fn take(&self, vb: VbId, change: &Change<'_>) -> Result<bool, ApplyError> {
        let vb = self.replica(vb)?;
        let (grown, ended) = {
            let state = vb.state.read();
            check_replica(*state)?;
            self.admit_change(vb, change)?;
            match change {
                Change::Document(given) => self.apply_document(vb, given)?,
                Change::Prepare { given, level } => apply_prepare(vb, given, *level)?,
                Change::Commit { key, prepared, seqno } => apply_commit(vb, *key, *prepared, *seqno)?,
                Change::Abort { key, prepared, seqno } => apply_abort(vb, *key, *prepared, *seqno)?,
                Change::Advance { seqno } => (true, vb.log.advance(*seqno).map_err(|e| not_taken(*seqno, e))?),
            }
        };
        let mut awaits_disk = false;
        if let Some(snapshot) = ended {
            end_snapshot(vb, &snapshot);
            self.settle(vb);
            awaits_disk = vb.waiting.lock().as_deref().is_some_and(Tracker::awaits_disk);
        }
        if grown {
            match awaits_disk {
                true => vb.bells.ring(vb.id),
                false => self.changed(vb, Urgency::Normal),
            }
        }
        if self.is_short() {
            self.give_memory_back();
        }
        Ok(awaits_disk)
    }

    /// Has what was taken for these vBuckets made durable. `leads`: on this thread, if nobody else is at it, as it may block and has
    /// nothing better to do; not with a lock held.
    pub fn make_durable(&self, vbs: &[VbId], leads: bool) {
        match leads {
            true => self.store.make_durable(vbs),
            false => vbs.iter().for_each(|vb| self.store.changed(*vb, Urgency::Durable)),
        }
    }

    fn admit_change(&self, vb: &VBucket, change: &Change<'_>) -> Result<(), ApplyError> {
        if self.stopped.load(Relaxed) {
            return Err(ApplyError::NotReplica);
        }
        if let Some(reason) = vb.log.marks.poisoned() {
            return Err(ApplyError::Poisoned(format!("vBucket {} takes no changes until a restart: {reason}", vb.id)));
        }
        let (Change::Document(given) | Change::Prepare { given, .. }) = change else { return Ok(()) };
        given.check()?;
        if self.store.disk_full() {
            return Err(ApplyError::Later("the disk is full".into()));
        }
        if self.store.log_full() {
            return Err(ApplyError::Later("the commit log is full until more of it is filed".into()));
        }
        let (used, mark) = (self.memory_used(), self.refuse_mark());
        if given.meta.deleted.is_none() && used > mark && !self.make_room(mark) {
            self.refuse_for_memory();
            return Err(ApplyError::Later(format!("{used} bytes used of a quota of {}", self.quota_bytes())));
        }
        Ok(())
    }

    fn apply_document(&self, vb: &VBucket, given: &Given<'_>) -> Result<(bool, Option<Snapshot>), ApplyError> {
        let mut slot = vb.table.lock(given.key);
        // A CAS is given out once: this is the commit.
        if let Some(prepare) = slot.prepare().filter(|prepare| prepare.meta().cas == given.meta.cas).cloned() {
            return commit(vb, &mut slot, &prepare, given.meta.seqno);
        }
        let item = given.item(Kind::Committed { prepared: None });
        let ended = vb.log.append_given(&item).map_err(|e| not_taken(item.seqno(), e))?;
        // The peer lets nobody past a prepare: it was decided, in a part that came from the disk.
        drop_prepare(&mut slot);
        vb.put_given(&mut slot, item);
        Ok((true, ended))
    }

    /// Live documents as the file counts them, once it has everything.
    pub(crate) fn count_anew(&self, vb: &VBucket) {
        let _state = vb.state.write();
        if !vb.is_loaded() || vb.log.marks.filed() < vb.log.marks.high() {
            return;
        }
        if let Some((high, live)) = self.store.counted(vb.id)
            && high == vb.log.marks.high()
        {
            vb.live_is_rough.store(false, Relaxed);
            vb.set_live(live);
        }
    }
}

fn check_replica(state: VbState) -> Result<(), ApplyError> {
    match state {
        VbState::Replica | VbState::Pending => Ok(()),
        VbState::Active | VbState::Dead => Err(ApplyError::NotReplica),
    }
}

fn not_taken(seqno: Seqno, why: NotTaken) -> ApplyError {
    match why {
        NotTaken::Behind(high) => ApplyError::OutOfOrder { seqno, high },
        NotTaken::Outside(_) => ApplyError::OutsideSnapshot(seqno),
    }
}

fn drop_prepare(slot: &mut Locked<'_>) {
    if let Some(seqno) = slot.prepare().map(Item::seqno) {
        slot.take_prepare(seqno);
    }
}

fn apply_prepare(vb: &VBucket, given: &Given<'_>, level: Level) -> Result<(bool, Option<Snapshot>), ApplyError> {
    let seqno = given.meta.seqno;
    let passive = |tracker: &Tracker| Some(tracker.passive.as_deref()?.decided);
    let decided = vb.waiting.lock().as_deref().and_then(passive).unwrap_or_default();
    if seqno <= decided && seqno > vb.log.marks.high() {
        // Its outcome comes with the same snapshot, so it is not the last of it.
        return Ok((false, None));
    }
    let mut slot = vb.table.lock(given.key);
    let item = given.item(Kind::Prepare { level });
    let ended = vb.log.append_given(&item).map_err(|e| not_taken(seqno, e))?;
    drop_prepare(&mut slot);
    slot.put_prepare(item);
    vb.waiting.lock().get_or_insert_default().passive.get_or_insert_default().prepared(seqno, level);
    Ok((true, ended))
}

fn apply_commit(
    vb: &VBucket,
    key: DocKey<'_>,
    prepared: Seqno,
    seqno: Seqno,
) -> Result<(bool, Option<Snapshot>), ApplyError> {
    check_seqno(seqno)?;
    let mut slot = vb.table.lock(key);
    match slot.prepare().filter(|prepare| prepare.seqno() == prepared).cloned() {
        Some(prepare) => commit(vb, &mut slot, &prepare, seqno),
        None => Err(ApplyError::UnknownPrepare(prepared)),
    }
}

/// The document becomes what its prepare said.
fn commit(
    vb: &VBucket,
    slot: &mut Locked<'_>,
    prepare: &Item,
    seqno: Seqno,
) -> Result<(bool, Option<Snapshot>), ApplyError> {
    let prepared = prepare.seqno();
    let item = prepare.committed_as(seqno);
    let is_ordered = vb.log.is_ordered(seqno);
    let ended = vb.log.append_given(&item).map_err(|e| not_taken(seqno, e))?;
    slot.take_prepare(prepared);
    vb.put_given(slot, item);
    // Else only the end of the snapshot says of which prepares all is known.
    if is_ordered {
        vb.note_completed(prepared);
    }
    Ok((true, ended))
}

fn apply_abort(
    vb: &VBucket,
    key: DocKey<'_>,
    prepared: Seqno,
    seqno: Seqno,
) -> Result<(bool, Option<Snapshot>), ApplyError> {
    check_seqno(seqno)?;
    let mut slot = vb.table.lock(key);
    // Where part of a snapshot came from a disk it may be all there is of a sync write.
    let prepare = slot.prepare().filter(|prepare| prepare.seqno() == prepared).map(Item::meta);
    let is_ordered = vb.log.is_ordered(seqno);
    let (cas, rev) = prepare.map_or((vb.log.max_cas().max(Cas(1)), RevSeqno(1)), |meta| (meta.cas, meta.rev));
    let meta = Meta {
        seqno,
        cas,
        rev,
        flags: prepare.map_or(0, |meta| meta.flags),
        expiry: (cas.0 / 1_000_000_000) as u32,
        datatype: Datatype::RAW,
        deleted: Some(DeleteSource::Explicit),
    };
    let item = Item::new(key, meta, Kind::Abort { prepared }, None);
    let ended = vb.log.append_given(&item).map_err(|e| not_taken(seqno, e))?;
    slot.take_prepare(prepared);
    if is_ordered {
        vb.note_completed(prepared);
    }
    Ok((true, ended))
}

fn check_seqno(seqno: Seqno) -> Result<(), ApplyError> {
    match seqno.0 {
        1..=BITS_48 => Ok(()),
        _ => Err(ApplyError::Invalid("seqnos have 48 bits and begin at 1")),
    }
}

/// All of a snapshot is here.
fn end_snapshot(vb: &VBucket, snapshot: &Snapshot) {
    if let Some(completed) = snapshot.completed {
        // Those whose outcome did not come with it have none that anybody could still see.
        vb.drop_prepares(completed);
    }
    let mut waiting = vb.waiting.lock();
    waiting.get_or_insert_default().passive.get_or_insert_default().snapshot_ended(snapshot);
}

impl VBucket {
    /// A version of a document whose last one may be in the file only: a peer's, or one that was prepared as a replica.
    pub(crate) fn put_given(&self, slot: &mut Locked<'_>, item: Item) {
        if slot.document().is_none() && !self.is_absent(slot, false) {
            self.live_is_rough.store(true, Relaxed);
        }
        if item.is_deleted() {
            self.note_deleted(item.meta().rev);
        }
        self.put(slot, item);
    }

    /// The high prepared and the high completed seqno.
    pub(crate) fn prepared_marks(&self) -> (Seqno, Seqno) {
        match self.waiting.lock().as_deref() {
            Some(tracker) => tracker.prepared_marks(),
            None => (Seqno(0), Seqno(0)),
        }
    }

    fn note_completed(&self, prepared: Seqno) {
        self.waiting.lock().get_or_insert_default().passive.get_or_insert_default().completed(prepared);
    }

    /// Takes out the prepares up to `upto`.
    fn drop_prepares(&self, upto: Seqno) {
        let mut decided = Vec::new();
        self.table.visit_prepares(|item| {
            if item.seqno() <= upto {
                decided.push(item.clone());
            }
        });
        for prepare in decided {
            self.table.lock(prepare.key()).take_prepare(prepare.seqno());
        }
    }
}
