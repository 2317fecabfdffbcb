//! One compaction, in steps of a few milliseconds: between any two of them it may wait, be seen, or be cancelled.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use governor::Governor;
use scheduler::Next;
use types::Seqno;

use super::copying::{Copying, Piece};
use super::follower::{End, Follower, Swapped};
use super::progress::{Phase, Progress};
use super::rules::Purge;
use crate::error::StoreError;
use crate::stats::COMPACTION_WRITTEN_BYTES;
use crate::vb::Vb;

/// A step writes no less, however slow it has to be.
const PIECE_BYTES_MIN: u64 = 64 << 10;

/// What a compaction did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CompactionReport {
    pub bytes_before: u64,
    pub bytes_after: u64,
    pub tombstones_purged: u64,
    pub prepares_dropped: u64,
    /// Tombstones up to here may be gone.
    pub purge: Seqno,
    /// Times it had to follow what was written meanwhile.
    pub rounds: u32,
    /// How long the vBucket's file could not be written by anybody else, at a time.
    pub exclusive: Duration,
    pub took: Duration,
}

/// Told how a compaction ended that was asked for.
pub type CompactionDone = Box<dyn FnOnce(Result<CompactionReport, StoreError>) + Send>;

pub(super) struct Job {
    pub progress: Arc<Progress>,
    pub dones: Vec<CompactionDone>,
    purges: Vec<Purge>,
    stage: Stage,
}

enum Stage {
    Asked,
    Copying(Box<Copying>),
    Indexing(Box<Copying>),
    Following(Box<Follower>),
    Ending(Box<Follower>),
    Settling(Box<Swapped>, Duration),
    /// Failed or done.
    Over,
}

/// What a step came to.
pub(super) enum Turn {
    Wait(Next),
    Ended(Result<CompactionReport, StoreError>),
}

impl Job {
    pub fn new(progress: Arc<Progress>, purges: Vec<Purge>, dones: Vec<CompactionDone>) -> Job {
        Job { progress, dones, purges, stage: Stage::Asked }
    }

    fn vb(&self) -> &Arc<Vb> {
        &self.progress.vb
    }

    /// Takes the next step, if it may be taken now.
    pub fn run(&mut self) -> Turn {
        let is_swapped = matches!(self.stage, Stage::Settling(..));
        if !is_swapped && self.is_cancelled() {
            return Turn::Ended(Err(StoreError::Cancelled));
        }
        // Whoever is about to swap holds a flusher up, so it does not wait.
        if !is_swapped
            && !matches!(self.stage, Stage::Ending(_))
            && let Some(pause) = self.governor().and_then(Governor::pause)
        {
            return Turn::Wait(Next::After(pause));
        }
        match self.step() {
            Ok(Turn::Ended(report)) => Turn::Ended(report),
            Ok(wait) => wait,
            Err(error) => Turn::Ended(Err(error)),
        }
    }

    /// Who says how fast it may go, if anybody does.
    fn governor(&self) -> Option<&Governor> {
        let shared = &self.vb().home.shared;
        shared.compactor.settings().is_paced.then_some(&*shared.governor)
    }

    fn is_cancelled(&self) -> bool {
        let vb = self.vb();
        let is_poisoned = || vb.attached().is_some_and(|attached| attached.log.marks.poisoned().is_some());
        self.progress.cancelled.load(Ordering::Acquire)
            || vb.is_rolling_back.load(Ordering::Acquire)
            || vb.home.gone.load(Ordering::Acquire)
            || is_poisoned()
    }

    fn step(&mut self) -> Result<Turn, StoreError> {
        let again = Ok(Turn::Wait(Next::Again));
        // A step that fails leaves the stage over, and what it held is given back.
        match std::mem::replace(&mut self.stage, Stage::Over) {
            Stage::Asked => {
                let Some(copying) = Copying::begin(self.vb(), &self.purges)? else {
                    return Ok(Turn::Ended(Ok(CompactionReport::default())));
                };
                self.progress.total.store(copying.bytes_total(), Ordering::Relaxed);
                self.enter(Phase::Copying, Stage::Copying(Box::new(copying)));
                again
            }
            Stage::Copying(mut copying) => {
                let piece = copying.copy_some(self.piece_bytes())?;
                let is_last = piece.is_last;
                self.account(piece);
                match is_last {
                    false => self.stage = Stage::Copying(copying),
                    true => self.enter(Phase::Indexing, Stage::Indexing(copying)),
                }
                again
            }
            Stage::Indexing(mut copying) => {
                let piece = copying.index_some(self.piece_bytes())?;
                let is_last = piece.is_last;
                self.account(piece);
                match is_last {
                    false => self.stage = Stage::Indexing(copying),
                    true => self.enter(Phase::CatchingUp, Stage::Following(Box::new(copying.commit()?))),
                }
                again
            }
            Stage::Following(mut follower) => {
                let piece = follower.follow_some()?;
                let is_last = piece.is_last;
                self.account(piece);
                match is_last {
                    false => self.stage = Stage::Following(follower),
                    true => self.enter(Phase::Finishing, Stage::Ending(follower)),
                }
                again
            }
            Stage::Ending(follower) => self.end(follower),
            Stage::Settling(swapped, exclusive) if self.vb().is_unnamed() && !self.is_cancelled() => {
                // The flush that names it wakes us.
                self.stage = Stage::Settling(swapped, exclusive);
                Ok(Turn::Wait(Next::Idle))
            }
            Stage::Settling(mut swapped, exclusive) => {
                swapped.old.settle()?;
                Ok(Turn::Ended(Ok(self.report(&swapped, exclusive))))
            }
            Stage::Over => Ok(Turn::Ended(Err(StoreError::Cancelled))),
        }
    }

    fn end(&mut self, mut follower: Box<Follower>) -> Result<Turn, StoreError> {
        match follower.end()? {
            End::Swapped(swapped) => {
                self.stage = Stage::Settling(swapped, follower.exclusive());
                Ok(Turn::Wait(Next::Again))
            }
            End::AwaitFlush => {
                self.stage = Stage::Ending(follower);
                Ok(Turn::Wait(Next::Idle))
            }
            End::Behind => {
                self.enter(Phase::CatchingUp, Stage::Following(follower));
                Ok(Turn::Wait(Next::Again))
            }
            End::Gone => Ok(Turn::Ended(Err(StoreError::Cancelled))),
        }
    }

    fn report(&self, swapped: &Swapped, exclusive: Duration) -> CompactionReport {
        let Swapped { before, after, left_out, rounds, .. } = swapped;
        CompactionReport {
            bytes_before: before.file_bytes,
            bytes_after: after.file_bytes,
            tombstones_purged: left_out.tombstones,
            prepares_dropped: left_out.prepares,
            purge: after.purge,
            rounds: *rounds,
            exclusive,
            took: self.vb().now().saturating_sub(self.progress.began),
        }
    }

    fn enter(&mut self, phase: Phase, stage: Stage) {
        self.progress.enter(phase);
        self.stage = stage;
    }

    fn piece_bytes(&self) -> u64 {
        let shared = &self.vb().home.shared;
        let most = shared.compactor.settings().piece_bytes_max;
        self.governor().map_or(most, |governor| governor.piece_bytes(PIECE_BYTES_MIN.min(most), most))
    }

    fn account(&self, piece: Piece) {
        let vb = self.vb();
        let shared = &vb.home.shared;
        if let Some(governor) = self.governor() {
            governor.spent(piece.written.max(piece.done));
        }
        self.progress.advance(shared.env.clock.monotonic(), piece.done, piece.written);
        COMPACTION_WRITTEN_BYTES.add(piece.written);
        if !piece.expired.is_empty()
            && let Some(attached) = vb.attached()
        {
            attached.nudge.expired(vb.id, piece.expired);
        }
    }
}
