//! What others can see of a compaction while it runs.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use types::VbId;
use types::rank::{Mutex, Rank};

use crate::vb::Vb;

/// A rate is measured over so long.
const RATE_OVER: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Phase {
    /// Documents are copied as of when it began.
    Copying,
    /// The index by id is written.
    Indexing,
    /// What was written meanwhile follows.
    CatchingUp,
    /// Waits for a flush of this vBucket to end, and then swaps the files.
    Finishing,
}

impl Phase {
    const ALL: [Phase; 4] = [Phase::Copying, Phase::Indexing, Phase::CatchingUp, Phase::Finishing];

    pub const fn name(self) -> &'static str {
        match self {
            Phase::Copying => "copying",
            Phase::Indexing => "indexing",
            Phase::CatchingUp => "catching up",
            Phase::Finishing => "finishing",
        }
    }
}

/// One reading of a compaction that runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CompactionProgress {
    pub bucket: String,
    pub vb: VbId,
    pub phase: Phase,
    /// Of `bytes_total`, how much was looked at: bodies and their entries in the trees.
    pub bytes_done: u64,
    pub bytes_total: u64,
    pub bytes_written: u64,
    pub elapsed: Duration,
    /// Lately.
    pub bytes_per_s: u64,
    /// At this rate. `None` as long as there is none.
    pub left: Option<Duration>,
    /// What keeps it from going faster.
    pub held: governor::Held,
}

impl CompactionProgress {
    pub fn percent(&self) -> u64 {
        (self.bytes_done.min(self.bytes_total) * 100).checked_div(self.bytes_total).unwrap_or(100)
    }
}

pub(super) struct Progress {
    pub vb: Arc<Vb>,
    pub began: Duration,
    pub cancelled: AtomicBool,
    phase: AtomicU8,
    pub done: AtomicU64,
    pub total: AtomicU64,
    pub written: AtomicU64,
    rate: Mutex<Rate>,
}

/// From two readings, one of them at least [`RATE_OVER`] old.
struct Rate {
    since: Duration,
    done: u64,
    bytes_per_s: u64,
}

impl Progress {
    pub fn new(vb: Arc<Vb>, began: Duration) -> Progress {
        Progress {
            vb,
            began,
            cancelled: AtomicBool::new(false),
            phase: AtomicU8::new(Phase::Copying as u8),
            done: AtomicU64::new(0),
            total: AtomicU64::new(0),
            written: AtomicU64::new(0),
            rate: Mutex::ranked(Rank::RunQueue, Rate { since: began, done: 0, bytes_per_s: 0 }),
        }
    }

    pub fn enter(&self, phase: Phase) {
        self.phase.store(phase as u8, Relaxed);
    }

    pub fn advance(&self, now: Duration, done: u64, written: u64) {
        let done = self.done.fetch_add(done, Relaxed) + done;
        self.written.fetch_add(written, Relaxed);
        self.rate.lock().update(now, done);
    }

    pub fn read(&self, now: Duration, held: governor::Held) -> CompactionProgress {
        let (bytes_done, bytes_total) = (self.done.load(Relaxed), self.total.load(Relaxed));
        let bytes_per_s = self.rate.lock().now(now, bytes_done);
        let left = bytes_total.saturating_sub(bytes_done);
        CompactionProgress {
            bucket: self.vb.home.name.clone(),
            vb: self.vb.id,
            phase: Phase::ALL[usize::from(self.phase.load(Relaxed))],
            bytes_done: bytes_done.min(bytes_total),
            bytes_total,
            bytes_written: self.written.load(Relaxed),
            elapsed: now.saturating_sub(self.began),
            bytes_per_s,
            left: (left * 1000).checked_div(bytes_per_s).map(Duration::from_millis),
            held,
        }
    }
}

impl Rate {
    fn update(&mut self, now: Duration, done: u64) {
        if now.saturating_sub(self.since) >= RATE_OVER {
            self.bytes_per_s = self.between(now, done);
            (self.since, self.done) = (now, done);
        }
    }

    fn now(&self, now: Duration, done: u64) -> u64 {
        if self.bytes_per_s == 0 { self.between(now, done) } else { self.bytes_per_s }
    }

    fn between(&self, now: Duration, done: u64) -> u64 {
        let micros = now.saturating_sub(self.since).as_micros();
        (u128::from(done.saturating_sub(self.done)) * 1_000_000).checked_div(micros).unwrap_or(0) as u64
    }
}
