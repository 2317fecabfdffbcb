//! Compaction: a vBucket's file is written anew without what nobody needs, beside everything else.
//!
//! ```text
//!     asked, or too much garbage ──▶ queue, one place a vBucket ──▶ at most `limit` at a time, first come first served
//!                                                                            │
//!     <vb>.couch.<n+1> ◀── swap ◀── follow what was written meanwhile ◀── copy ◀┘   each step as the governor lets it
//! ```
//! One mechanism per concern: the queue orders, the number of workers that may take limits, the governor slows.

mod copying;
mod follower;
mod job;
mod progress;
mod rules;
mod target;

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use scheduler::park::{Bay, Look, Wake};
use scheduler::{Context, Next, PoolKind, Pools, Task};
use serde::{Deserialize, Serialize};
use types::rank::{Mutex, Rank, RwLock};

use crate::error::StoreError;
use crate::shared::{Crew, Shared};
use crate::stats::{
    COMPACTION_CANCELS, COMPACTION_FAILURES, COMPACTION_READ_BYTES, COMPACTIONS, COMPACTIONS_QUEUED,
    COMPACTIONS_RUNNING, TOMBSTONES_PURGED,
};
use crate::vb::{Home, Vb};

pub(crate) use follower::Gate;
pub use job::{CompactionDone, CompactionReport};
use job::{Job, Turn};
use progress::Progress;
pub use progress::{CompactionProgress, Phase};
pub use rules::Purge;

/// No more than so many run at a time, whatever the limit says.
pub const COMPACTIONS_MAX: usize = 16;
/// After a failure, a vBucket is not compacted for so long unless somebody asks.
const PAUSE_AFTER_FAILURE: Duration = Duration::from_secs(30);

/// When a vBucket's file is compacted without being asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Trigger {
    /// Of the file, what is garbage. 0: never for this reason.
    pub garbage_percent: u8,
    /// Garbage. 0: never for this reason.
    pub garbage_bytes: u64,
    /// Smaller files are left alone.
    pub file_bytes_min: u64,
}

impl Default for Trigger {
    /// Never. A small file is mostly gaps however often it is compacted, so it is left alone by any rule.
    fn default() -> Trigger {
        Trigger { garbage_percent: 0, garbage_bytes: 0, file_bytes_min: 1 << 20 }
    }
}

impl Trigger {
    fn fires(&self, file_bytes: u64, live_bytes: u64) -> bool {
        let garbage = file_bytes.saturating_sub(live_bytes);
        let by_percent = self.garbage_percent > 0 && garbage * 100 >= file_bytes * u64::from(self.garbage_percent);
        let by_bytes = self.garbage_bytes > 0 && garbage >= self.garbage_bytes;
        file_bytes >= self.file_bytes_min && (by_percent || by_bytes)
    }
}

/// How files are compacted; all of it may be changed while the store works.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CompactionOptions {
    pub trigger: Trigger,
    /// Compactions at a time, 1 to [`COMPACTIONS_MAX`].
    pub limit: usize,
    /// The new file is written back to the disk whenever so many bytes were added to it. 0: only when it is whole, by its sync.
    pub sync_every: u64,
    /// A step copies no more bytes than this.
    pub piece_bytes_max: u64,
    /// Whether compactions, too, go slower when the governor says so.
    pub is_paced: bool,
    /// Tombstones live so long.
    pub purge_age: Duration,
    /// Below so much free space on the disk compaction goes faster, whoever feels it.
    pub free_bytes_low: u64,
}

impl Default for CompactionOptions {
    fn default() -> CompactionOptions {
        CompactionOptions {
            trigger: Trigger::default(),
            limit: 2,
            sync_every: 1 << 20,
            piece_bytes_max: 1 << 20,
            is_paced: true,
            purge_age: Duration::from_secs(3 * 24 * 60 * 60),
            free_bytes_low: 1 << 30,
        }
    }
}

/// 1. At most `limit` compactions run; fewer only if fewer wait, or if what waits is running already.
/// 2. A vBucket waits at most once: whoever asks again adds what it wants. One that runs may wait for its next, since what
///    it has copied is not copied again.
/// 3. Whoever asked is answered exactly once.
/// 4. After [`Compactor::forget`] nothing of the bucket runs or will; after [`Compactor::stop`] nothing at all.
pub(crate) struct Compactor {
    settings: RwLock<CompactionOptions>,
    state: Mutex<State>,
    workers: Crew,
    seats: Vec<Mutex<Seat>>,
    /// Counts ends of compactions, for those who wait for one.
    ends: Bay<u64>,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Request>,
    running: Vec<Arc<Progress>>,
    is_stopped: bool,
}

struct Request {
    vb: Arc<Vb>,
    purges: Vec<Purge>,
    dones: Vec<CompactionDone>,
}

/// Where a worker keeps its compaction between two steps: long work is a value that somebody owns.
enum Seat {
    Empty,
    Resting(Box<Job>),
    /// The worker has it.
    Stepping,
}

impl Compactor {
    pub fn new(settings: CompactionOptions) -> Compactor {
        Compactor {
            settings: RwLock::ranked(Rank::CommitQueue, settings),
            state: Mutex::ranked(Rank::CommitQueue, State::default()),
            workers: Crew::new(),
            seats: (0..COMPACTIONS_MAX).map(|_| Mutex::ranked(Rank::CommitQueue, Seat::Empty)).collect(),
            ends: Bay::new(0),
        }
    }

    pub fn start(shared: &Arc<Shared>, pools: &Pools) {
        shared.compactor.workers.grow(COMPACTIONS_MAX, |number| {
            pools.spawn(PoolKind::Compaction, Arc::new(Worker { shared: Arc::downgrade(shared), number }))
        });
    }

    pub fn settings(&self) -> CompactionOptions {
        *self.settings.read()
    }

    pub fn set(&self, settings: CompactionOptions) {
        *self.settings.write() = settings;
        (0..COMPACTIONS_MAX).for_each(|_| self.workers.call());
    }

    /// Asks for a compaction that begins after now.
    pub fn ask(&self, vb: &Arc<Vb>, purge: Purge, done: Option<CompactionDone>) {
        let refused = {
            let mut state = self.state.lock();
            match state.is_stopped || vb.home.gone.load(Ordering::Acquire) {
                true => done,
                false => {
                    state.enqueue(vb, purge, done);
                    None
                }
            }
        };
        match refused {
            Some(done) => done(Err(StoreError::Closed)),
            None => self.workers.call(),
        }
    }

    /// Looks whether a vBucket's file has too much garbage by now.
    pub fn consider(&self, vb: &Arc<Vb>) {
        let own = *vb.home.trigger.read();
        let trigger = own.unwrap_or_else(|| self.settings().trigger);
        let Some(committed) = vb.committed() else { return };
        if !trigger.fires(committed.file_bytes, committed.live_bytes) || vb.gate.is_resting(vb.now()) {
            return;
        }
        let is_known = {
            let state = self.state.lock();
            state.queue.iter().any(|request| Arc::ptr_eq(&request.vb, vb)) || state.is_running(vb)
        };
        if !is_known {
            self.ask(vb, Purge::default(), None);
        }
    }

    /// Ends what runs or waits for this vBucket. Whoever asked for it is told.
    pub fn cancel(&self, vb: &Arc<Vb>) {
        self.end_all(|other| Arc::ptr_eq(other, vb));
    }

    /// Ends everything of a bucket, whose directory is about to go.
    pub fn forget(&self, home: &Arc<Home>) {
        self.end_all(|vb| Arc::ptr_eq(&vb.home, home));
    }

    /// Ends everything, for good.
    pub fn stop(&self) {
        self.state.lock().is_stopped = true;
        self.end_all(|_| true);
        self.workers.cancel();
    }

    fn end_all(&self, which: impl Fn(&Arc<Vb>) -> bool) {
        let (mut queued, mut rest) = (Vec::new(), VecDeque::new());
        {
            let mut state = self.state.lock();
            for request in std::mem::take(&mut state.queue) {
                if which(&request.vb) { queued.push(request) } else { rest.push_back(request) }
            }
            state.queue = rest;
            COMPACTIONS_QUEUED.sub(queued.len() as i64);
            let running = state.running.iter().filter(|progress| which(&progress.vb));
            running.for_each(|progress| progress.cancelled.store(true, Ordering::Release));
        }
        queued.into_iter().flat_map(|request| request.dones).for_each(|done| done(Err(StoreError::Cancelled)));
        for seat in &self.seats {
            let mut seat = seat.lock();
            if matches!(&*seat, Seat::Resting(job) if which(&job.progress.vb))
                && let Seat::Resting(job) = std::mem::replace(&mut *seat, Seat::Empty)
            {
                drop(seat);
                self.ended(job, Err(StoreError::Cancelled));
            }
        }
        // What is being stepped right now ends after the step.
        self.wait_until(|| !self.state.lock().running.iter().any(|progress| which(&progress.vb)));
    }

    fn wait_until(&self, settled: impl Fn() -> bool) {
        loop {
            let before = self.ends.read(|count| *count);
            if settled() {
                return;
            }
            self.ends.wait(|count| match *count == before {
                true => Look::Nothing,
                false => Look::Found(()),
            });
        }
    }

    /// A flush of this vBucket has ended, and its compaction has waited for that.
    pub fn flush_ended(&self, vb: &Arc<Vb>) {
        let is_its = |seat: &Mutex<Seat>| match &*seat.lock() {
            Seat::Resting(job) => Arc::ptr_eq(&job.progress.vb, vb),
            // It looks again after its step, as a wake during a run leads to another.
            Seat::Stepping => true,
            Seat::Empty => false,
        };
        let numbers = (0..self.seats.len()).filter(|number| is_its(&self.seats[*number]));
        numbers.for_each(|number| self.workers.wake(number));
    }

    pub fn progress(&self, now: Duration, held: governor::Held) -> Vec<CompactionProgress> {
        let held = if self.settings().is_paced { held } else { governor::Held::Free };
        self.state.lock().running.iter().map(|progress| progress.read(now, held)).collect()
    }

    /// vBuckets that wait for a compaction.
    pub fn queued(&self) -> usize {
        self.state.lock().queue.len()
    }

    fn next(&self, now: Duration) -> Option<Box<Job>> {
        let limit = self.settings().limit;
        let mut state = self.state.lock();
        let place = state.startable(limit)?;
        let Request { vb, purges, dones } = state.queue.remove(place)?;
        let progress = Arc::new(Progress::new(vb, now));
        state.running.push(Arc::clone(&progress));
        drop(state);
        COMPACTIONS_QUEUED.sub(1);
        COMPACTIONS_RUNNING.add(1);
        Some(Box::new(Job::new(progress, purges, dones)))
    }

    fn is_startable(&self) -> bool {
        let limit = self.settings().limit;
        self.state.lock().startable(limit).is_some()
    }

    /// Gives back everything a compaction had, and tells those who asked for it.
    fn ended(&self, mut job: Box<Job>, result: Result<CompactionReport, StoreError>) {
        let progress = Arc::clone(&job.progress);
        let dones = std::mem::take(&mut job.dones);
        drop(job);
        tell(&progress, &result);
        self.state.lock().running.retain(|other| !Arc::ptr_eq(other, &progress));
        COMPACTIONS_RUNNING.sub(1);
        dones.into_iter().for_each(|done| done(result.clone()));
        self.ends.change(|count| {
            *count += 1;
            ((), Wake::Everybody)
        });
        // There is one more place.
        self.workers.call();
    }
}

impl State {
    fn enqueue(&mut self, vb: &Arc<Vb>, purge: Purge, done: Option<CompactionDone>) {
        match self.queue.iter_mut().find(|request| Arc::ptr_eq(&request.vb, vb)) {
            Some(request) => {
                if !request.purges.contains(&purge) {
                    request.purges.push(purge);
                }
                request.dones.extend(done);
            }
            None => {
                COMPACTIONS_QUEUED.add(1);
                let (vb, dones) = (Arc::clone(vb), done.into_iter().collect());
                self.queue.push_back(Request { vb, purges: vec![purge], dones });
            }
        }
    }

    fn is_running(&self, vb: &Arc<Vb>) -> bool {
        self.running.iter().any(|progress| Arc::ptr_eq(&progress.vb, vb))
    }

    /// The first in the queue that may run, if there is a place for it.
    fn startable(&self, limit: usize) -> Option<usize> {
        let has_place = !self.is_stopped && self.running.len() < limit;
        self.queue.iter().position(|request| has_place && !self.is_running(&request.vb))
    }
}

fn tell(progress: &Progress, result: &Result<CompactionReport, StoreError>) {
    let vb = &progress.vb;
    let (bucket, number) = (&vb.home.name, vb.id.0);
    let counters = &vb.home.counters;
    match result {
        Ok(report) => {
            COMPACTIONS.record(report.took);
            COMPACTION_READ_BYTES.add(report.bytes_before);
            TOMBSTONES_PURGED.add(report.tombstones_purged);
            counters.add(|c| &c.compactions, 1);
            tracing::debug!(bucket, vb = number, ?report, "compacted");
        }
        Err(StoreError::Cancelled) => COMPACTION_CANCELS.inc(),
        Err(error) => {
            COMPACTION_FAILURES.inc();
            counters.add(|c| &c.compaction_failures, 1);
            vb.gate.rest_until(vb.now() + PAUSE_AFTER_FAILURE);
            if let Some(untold) = vb.home.shared.may_tell() {
                tracing::warn!(bucket, vb = number, untold, "compaction failed, the file stays as it is: {error}");
            }
        }
    }
}

struct Worker {
    shared: std::sync::Weak<Shared>,
    number: usize,
}

impl Task for Worker {
    fn name(&self) -> &'static str {
        "compaction"
    }

    fn run(&self, cx: &Context<'_>) -> Next {
        let Some(shared) = self.shared.upgrade() else { return Next::Done };
        let compactor = &shared.compactor;
        let seat = &compactor.seats[self.number];
        let kept = match &mut *seat.lock() {
            seat @ Seat::Resting(_) => Some(std::mem::replace(seat, Seat::Stepping)),
            _ => None,
        };
        let mut job = match kept {
            Some(Seat::Resting(job)) => job,
            _ => match compactor.next(cx.now()) {
                Some(job) => {
                    *seat.lock() = Seat::Stepping;
                    job
                }
                None => return self.rest(compactor),
            },
        };
        shared.watch_free_space(cx.now());
        match job.run() {
            Turn::Ended(result) => {
                *seat.lock() = Seat::Empty;
                compactor.ended(job, result);
                Next::Again
            }
            Turn::Wait(next) => {
                let progress = Arc::clone(&job.progress);
                *seat.lock() = Seat::Resting(job);
                // Whoever cancels looked into the seat before this, or finds it there.
                if progress.cancelled.load(Ordering::Acquire) { Next::Again } else { next }
            }
        }
    }
}

impl Worker {
    fn rest(&self, compactor: &Compactor) -> Next {
        compactor.workers.rest(self.number);
        if !compactor.is_startable() {
            return Next::Idle;
        }
        compactor.workers.unrest(self.number);
        Next::Again
    }
}

impl Vb {
    fn now(&self) -> Duration {
        self.home.shared.env.clock.monotonic()
    }
}
