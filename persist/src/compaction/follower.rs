//! The new file, whole but behind: it follows what was written to the old one meanwhile, and then takes its place.
//!
//! ```text
//!     flusher:    ──A──────B────C──D─▶ old file      held off ◀─┐
//!     follower:     copy A │ A..B │ B..D │ claim the vBucket ───┘ rename, swap, release │ sync the directory, remove the old
//! ```
//! Each round copies what the one before let happen. A flusher that writes faster than that would keep it running for ever,
//! so from the third round on it may write half as many changes during a round as the round has to copy: the last few are
//! few indeed, however fast clients are. What must wait is in the commit log.
//!
//! Whoever is held off waits for no disk: what came last is copied before the claim if that can be had, and the directory
//! is synced after it. Until that sync the new file's name may be lost to power loss, so the old file stays, and a flush
//! that comes first syncs the directory itself before it writes. Where commits follow one another without a pause something
//! always came last: it is copied under the claim, without a sync, and the file is used under its temporary name, which no start
//! would take, until the next flush has synced it and given it its own.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::Duration;

use couchstore::kv::CollectionStats;
use couchstore::{Couch, Doc, DocInfo, Error, Snapshot, vbstate};
use types::Seqno;

use super::copying::{LOOK_BYTES, LeftOut, Piece};
use super::rules::collection_of_local;
use super::target::Target;
use crate::commit::{Tally, Written};
use crate::error::StoreError;
use crate::facts::VbFacts;
use crate::queue::{Claim, Urgency};
use crate::stats::COMPACTION_FINISHES;
use crate::vb::{Committed, Vb};

/// What is left for the claimed vBucket: documents, and bytes of them.
const LAST_DOCS_MAX: u64 = 256;
const LAST_BYTES_MAX: u64 = 256 << 10;
/// One commit of the follower takes so many times what a step of the copy takes: each costs two syncs.
const PIECE_FACTOR: u64 = 4;
const GATE_FROM_ROUND: u32 = 3;
/// So often the last few are copied while others write, in the hope that no more come. Then what came is copied while
/// nobody else writes, and the flush that comes next syncs it together with its own.
const CLOSE_ROUNDS_MAX: u32 = 3;
/// From here on the flusher stands still during a round: no document is so large that this goes on.
const SHUT_FROM_ROUND: u32 = 24;

/// What a vBucket and its compaction owe each other.
pub(crate) struct Gate {
    /// How many changes a flusher may write now.
    room: AtomicI64,
    /// Of the monotonic clock, in ms: nobody compacts it before then without being asked.
    rests_until_ms: AtomicU64,
    /// Of the monotonic clock, in ns: since when the vBucket is claimed. 0: it is not.
    claimed_at_ns: AtomicU64,
}

impl Default for Gate {
    fn default() -> Gate {
        Gate { room: AtomicI64::new(i64::MAX), rests_until_ms: AtomicU64::new(0), claimed_at_ns: AtomicU64::new(0) }
    }
}

impl Gate {
    pub fn room(&self) -> usize {
        self.room.load(Ordering::Acquire).max(0) as usize
    }

    /// So many are being written.
    pub fn pass(&self, changes: usize) {
        let less = |room: i64| (room != i64::MAX).then_some(room.saturating_sub(changes as i64));
        let _ = self.room.fetch_update(Ordering::AcqRel, Ordering::Acquire, less);
    }

    fn set(&self, changes: i64) {
        self.room.store(changes, Ordering::Release);
    }

    /// From here on nobody else writes the file.
    pub fn claimed(&self, now: Duration) {
        let now_ns = (now.as_nanos() as u64).max(1);
        let _ = self.claimed_at_ns.compare_exchange(0, now_ns, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// How long nobody else could write the file.
    fn held_for(&self, now: Duration) -> Duration {
        match self.claimed_at_ns.load(Ordering::Relaxed) {
            0 => Duration::ZERO,
            since_ns => now.saturating_sub(Duration::from_nanos(since_ns)),
        }
    }

    pub fn rest_until(&self, at: Duration) {
        self.rests_until_ms.store(at.as_millis() as u64, Ordering::Relaxed);
    }

    pub fn is_resting(&self, now: Duration) -> bool {
        (now.as_millis() as u64) < self.rests_until_ms.load(Ordering::Relaxed)
    }
}

/// Sees to it that whoever was held off goes on.
struct HeldOff(Arc<Vb>);

impl Drop for HeldOff {
    fn drop(&mut self) {
        self.0.gate.set(i64::MAX);
        self.0.home.shared.file(&self.0, Urgency::Normal);
    }
}

/// The vBucket's file is not written by anybody else, or will not be once a flush under way has ended.
struct Claimed(Arc<Vb>);

impl Drop for Claimed {
    fn drop(&mut self) {
        let vb = &self.0;
        vb.gate.claimed_at_ns.store(0, Ordering::Relaxed);
        vb.home.shared.release(vb);
    }
}

/// 1. `couch` holds what the old file held at `upto`, but for `left_out` and as far as a round under way has come.
/// 2. `facts` are those of `upto`, with the counts of `couch`.
pub(super) struct Follower {
    vb: Arc<Vb>,
    target: Target,
    couch: Couch,
    upto: Arc<Committed>,
    facts: VbFacts,
    left_out: LeftOut,
    round: Option<Round>,
    rounds: u32,
    close_rounds: u32,
    held_off: Option<HeldOff>,
    claimed: Option<Claimed>,
    /// The longest time that the vBucket was claimed.
    exclusive: Duration,
}

/// From `upto` to a later commit of the old file.
struct Round {
    goal: Arc<Committed>,
    file: Snapshot,
    next_seq: u64,
}

/// What trying to end it came to.
pub(super) enum End {
    Swapped(Box<Swapped>),
    /// A flush is under way; it wakes us.
    AwaitFlush,
    /// Too much was written meanwhile: another round.
    Behind,
    /// The vBucket is being removed.
    Gone,
}

/// The new file has taken the place of the old one.
pub(super) struct Swapped {
    pub old: Superseded,
    pub before: Arc<Committed>,
    pub after: Committed,
    pub left_out: LeftOut,
    pub rounds: u32,
}

/// A file that another has taken the place of: needed until that one's name outlives power loss, and then by nobody.
/// Dropped, it is settled.
pub(super) struct Superseded {
    vb: Arc<Vb>,
    rev: u64,
    is_settled: bool,
}

impl Superseded {
    /// Removes the file's name, once nothing can bring it back. Readers that have it open keep it until they close it.
    pub fn settle(&mut self) -> Result<(), StoreError> {
        if std::mem::replace(&mut self.is_settled, true) {
            return Ok(());
        }
        let vb = &self.vb;
        if vb.remove_once_named(&vb.path(self.rev)) {
            return Ok(());
        }
        if let Err(error) = vb.anchor() {
            if let Some(attached) = vb.attached() {
                crate::flusher::poison(vb, &attached, &error);
            }
            return Err(error);
        }
        if vb.attached().is_some_and(|attached| attached.log.marks.poisoned().is_some()) {
            // What the new one holds is in doubt: a start will look at both.
            return Ok(());
        }
        vb.remove_superseded(&vb.path(self.rev));
        Ok(())
    }
}

impl Drop for Superseded {
    fn drop(&mut self) {
        // Whoever learns of an error has been told: the vBucket is poisoned.
        let _ = self.settle();
    }
}

impl Follower {
    pub fn new(
        vb: &Arc<Vb>,
        target: Target,
        couch: Couch,
        upto: Arc<Committed>,
        facts: VbFacts,
        left_out: LeftOut,
    ) -> Follower {
        let vb = Arc::clone(vb);
        Follower {
            vb,
            target,
            couch,
            upto,
            facts,
            left_out,
            round: None,
            rounds: 0,
            close_rounds: 0,
            held_off: None,
            claimed: None,
            exclusive: Duration::ZERO,
        }
    }

    /// One step of a round. The last one: what is left is little enough for [`Follower::end`].
    pub fn follow_some(&mut self) -> Result<Piece, StoreError> {
        if self.round.is_none() {
            let (goal, file) = self.look()?;
            let is_close = self.is_close(&goal, &file)?;
            if self.is_enough(&goal, is_close) {
                return Ok(Piece { is_last: true, ..Piece::default() });
            }
            self.close_rounds += u32::from(is_close);
            self.begin(goal, file, is_close)?;
        }
        self.replay_some(true)
    }

    /// If the vBucket can be had, and little was written since: swaps the files.
    pub fn end(&mut self) -> Result<End, StoreError> {
        let claim = self.vb.home.shared.flushes.claim(&self.vb);
        let vb = &self.vb;
        self.claimed.get_or_insert_with(|| Claimed(Arc::clone(vb)));
        match claim {
            Claim::Never => return Ok(End::Gone),
            Claim::Soon => return Ok(End::AwaitFlush),
            Claim::Mine => vb.gate.claimed(vb.now()),
        }
        let (goal, file) = self.look()?;
        let is_close = self.is_close(&goal, &file)?;
        if !self.is_enough(&goal, is_close) {
            self.release();
            return Ok(End::Behind);
        }
        self.begin(goal, file, is_close)?;
        let is_synced = self.round.is_none();
        while self.round.is_some() {
            self.replay_some(false)?;
        }
        let swapped = self.swap(is_synced)?;
        self.release();
        self.held_off = None;
        Ok(End::Swapped(Box::new(swapped)))
    }

    /// Whether what was written since `upto` may be left for the claimed vBucket.
    fn is_enough(&self, goal: &Committed, is_close: bool) -> bool {
        goal.header_at == self.upto.header_at || (is_close && self.close_rounds >= CLOSE_ROUNDS_MAX)
    }

    fn release(&mut self) {
        if let Some(claimed) = self.claimed.take() {
            let held = self.vb.gate.held_for(self.vb.now());
            drop(claimed);
            COMPACTION_FINISHES.record(held);
            self.exclusive = self.exclusive.max(held);
        }
    }

    pub fn exclusive(&self) -> Duration {
        self.exclusive
    }

    fn look(&self) -> Result<(Arc<Committed>, Snapshot), StoreError> {
        self.vb.reading()?.ok_or_else(|| self.refused("the file that is compacted is gone"))
    }

    /// Whether so little was written since `upto` that it can be copied while nobody else writes.
    fn is_close(&self, goal: &Committed, file: &Snapshot) -> Result<bool, StoreError> {
        let (mut docs, mut bytes) = (0, 0);
        let walked = file.changes_since(self.upto.high.0 + 1, |info| {
            (docs, bytes) = (docs + 1, bytes + info.body_size);
            match docs > LAST_DOCS_MAX || bytes > LAST_BYTES_MAX {
                true => ControlFlow::Break(()),
                false => ControlFlow::Continue(()),
            }
        });
        let flow = walked.map_err(StoreError::file(self.vb.id))?;
        debug_assert!(goal.high >= self.upto.high);
        Ok(flow.is_continue())
    }

    fn begin(&mut self, goal: Arc<Committed>, file: Snapshot, is_close: bool) -> Result<(), StoreError> {
        if goal.rev != self.upto.rev || goal.high < self.upto.high {
            return Err(self.refused("the file that is compacted went back, or is another one"));
        }
        if goal.header_at == self.upto.header_at {
            return Ok(());
        }
        self.rounds += 1;
        if self.rounds >= GATE_FROM_ROUND && self.claimed.is_none() {
            let docs = file.count_since(self.upto.high.0 + 1).map_err(StoreError::file(self.vb.id))?;
            let room = match (self.rounds < SHUT_FROM_ROUND, is_close) {
                (true, false) => docs / 2,
                // Few already: whoever is held off for the sake of fewer waits for the syncs of a round.
                (true, true) => docs.max(1),
                (false, _) => 0,
            };
            self.vb.gate.set(room as i64);
            let vb = &self.vb;
            self.held_off.get_or_insert_with(|| HeldOff(Arc::clone(vb)));
            // Whoever was held off in the last round has its share of this one.
            vb.home.shared.file(vb, Urgency::Normal);
        }
        self.round = Some(Round { goal, file, next_seq: self.upto.high.0 + 1 });
        Ok(())
    }

    /// Copies some of the round under way, as one commit.
    fn replay_some(&mut self, synced: bool) -> Result<Piece, StoreError> {
        let Some(round) = self.round.take() else { return Ok(Piece::default()) };
        let id = self.vb.id;
        let error = || StoreError::file(id);
        let piece_bytes = self.vb.home.shared.compactor.settings().piece_bytes_max.saturating_mul(PIECE_FACTOR);
        let (docs, is_last) = round.next_docs(piece_bytes).map_err(error())?;
        let before = self.couch.file_bytes().map_err(error())?;
        let upto = if is_last { round.goal.high.0 } else { docs.last().map_or(0, |doc| doc.seq) };
        let facts = self.replay(&docs, &round, upto, synced).map_err(error())?;
        self.facts = facts;
        let written = self.couch.file_bytes().map_err(error())?.saturating_sub(before);
        match is_last {
            true => self.upto = round.goal,
            false => self.round = Some(Round { next_seq: upto + 1, ..round }),
        }
        Ok(Piece { written, ..Piece::default() })
    }

    /// Commits `docs`, with everything else as `round`'s goal has it. Gives the goal's facts, with this file's counts.
    fn replay(&mut self, docs: &[DocInfo], round: &Round, upto: u64, synced: bool) -> Result<VbFacts, Error> {
        let Round { goal, file, .. } = round;
        let mut tally = Tally::of(self.couch.snapshot());
        let here = self.couch.locals()?;
        let mut out = self.couch.batch()?;
        let mut written = Vec::with_capacity(docs.len());
        for info in docs {
            let body = file.raw_body(info)?;
            let doc = doc(info, body.as_deref());
            out.put(doc)?;
            written.push(Written::of(&doc));
        }
        out.save()?;
        for ((info, new), old) in docs.iter().zip(&written).zip(out.replaced()) {
            tally.count(&info.id, new, old.as_ref())?;
        }
        let is_ours = |id: &[u8]| id == vbstate::ID || collection_of_local(id).is_some();
        let there = file.locals()?;
        for (id, body) in there.iter().filter(|(id, _)| !is_ours(id)) {
            out.local_put(id, body)?;
        }
        for (id, _) in here.iter().filter(|(id, _)| !is_ours(id) && !there.iter().any(|(other, _)| other == id)) {
            out.local_remove(id)?;
        }
        for (collection, stats) in &tally.collections {
            out.local_put(CollectionStats::id(*collection).as_bytes(), &stats.encode())?;
        }
        let facts = VbFacts {
            on_disk_prepares: self.facts.on_disk_prepares.saturating_add_signed(tally.prepares),
            on_disk_prepare_bytes: self.facts.on_disk_prepare_bytes.saturating_add_signed(tally.prepare_bytes),
            ..goal.facts.clone()
        };
        out.local_put(vbstate::ID, &facts.encode())?;
        out.raise_update_seq(upto)?;
        let timestamp_ns = file.header().timestamp_ns;
        if synced { out.commit(timestamp_ns) } else { out.commit_unsynced(timestamp_ns) }?;
        Ok(facts)
    }

    /// From here on the new file is the vBucket's, for readers and for the flusher. Whoever starts after a crash may still
    /// find the old one, which holds the same as long as the new one is not written.
    fn swap(&mut self, is_synced: bool) -> Result<Swapped, StoreError> {
        let vb = &self.vb;
        let shared = &vb.home.shared;
        let after = self.committed(vb.next_rev())?;
        if is_synced {
            self.target.rename(&vb.named(after.rev))?;
            vb.unanchor();
        } else {
            self.target.leave();
            vb.leave_unnamed(after.rev, self.target.path.clone());
        }
        shared.files.retire(&vb.place, after.rev);
        shared.files.keep(&vb.place, after.rev, Arc::clone(&self.target.file));
        vb.replace_file(after.clone());
        let before = Arc::clone(&self.upto);
        let old = Superseded { vb: Arc::clone(vb), rev: before.rev, is_settled: false };
        Ok(Swapped { old, before, after, left_out: self.left_out, rounds: self.rounds })
    }

    /// What the new file is, checked against the old one as far as numbers can tell.
    fn committed(&self, rev: u64) -> Result<Committed, StoreError> {
        let (header, upto) = (self.couch.header(), &self.upto);
        let is_all = header.doc_count() <= upto.alive && header.doc_count() + self.left_out.prepares >= upto.alive;
        if header.update_seq != upto.high.0 || !is_all {
            return Err(self.refused("the new file does not have what the old one has"));
        }
        Ok(Committed {
            rev,
            header_at: header.at,
            high: upto.high,
            purge: Seqno(header.purge_seq),
            facts: self.facts.clone(),
            alive: header.doc_count(),
            tombstones: header.deleted_count(),
            file_bytes: self.couch.file_bytes().map_err(StoreError::file(self.vb.id))?,
            live_bytes: header.live_bytes(),
        })
    }

    fn refused(&self, what: &str) -> StoreError {
        let what = format!("a compaction was given up: {what} ({})", self.target.path.display());
        StoreError::Refused { vb: self.vb.id, what }
    }
}

impl Round {
    /// What one commit takes, in order of seqno. True: the rest of the round.
    fn next_docs(&self, bytes_max: u64) -> Result<(Vec<DocInfo>, bool), Error> {
        let mut docs = Vec::new();
        let mut bytes = 0;
        let flow = self.file.changes_since(self.next_seq, |info| {
            bytes += info.body_size + LOOK_BYTES;
            docs.push(info);
            match bytes >= bytes_max {
                true => ControlFlow::Break(()),
                false => ControlFlow::Continue(()),
            }
        })?;
        Ok((docs, flow.is_continue()))
    }
}

/// The document as it is stored.
fn doc<'a>(info: &'a DocInfo, body: Option<&'a [u8]>) -> Doc<'a> {
    Doc {
        id: &info.id,
        seq: info.seq,
        rev: info.rev,
        deleted: info.deleted,
        content_meta: info.content_meta,
        rev_meta: &info.rev_meta,
        body,
        compress: false,
    }
}
