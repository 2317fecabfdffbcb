//! What the parts of a store share: the environment, the queues, and the tasks that serve them.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use commit_log::{Log, LogError};
use env::Env;
use governor::Governor;
use scheduler::park::{Bay, Look, Wake};
use scheduler::{Context, Next, PoolKind, Pools, Task, TaskHandle};
use types::rank::{Mutex, Rank, RwLock};

use crate::compaction::Compactor;
use crate::file_cache::{FileCache, WithRoom};
use crate::filer::Filing;
use crate::logger::{Ear, Logger};
use crate::queue::{Outcome, Urgency, WorkQueue};
use crate::reserve::{Keeping, Reserve};
use crate::switch::{Switch, Switching};
use crate::vb::Vb;
use crate::{LogOptions, Options, fetch, flusher};

/// Failures are told at most this often, however many there are.
const LOG_PAUSE: Duration = Duration::from_secs(1);
/// Free space is looked at no more often.
const LOOK_PAUSE: Duration = Duration::from_millis(250);
/// While there is little of it, it is looked at so often though nothing is compacted.
const WATCH_PAUSE: Duration = Duration::from_secs(1);

pub(crate) struct Shared {
    pub env: Env,
    pub options: Options,
    pub files: Arc<FileCache>,
    pub logger: Logger,
    pub switch: Switch,
    pub flushes: WorkQueue<Vb>,
    pub compactor: Compactor,
    pub governor: Arc<Governor>,
    /// vBuckets with somebody waiting for a read; `None` once the store is closed.
    fetches: Mutex<Option<VecDeque<Arc<Vb>>>>,
    writers: Crew,
    readers: Crew,
    /// The number after that of the writer that waits for all while flushes are held back; 0: none does.
    pacer: AtomicUsize,
    retries: OnceLock<TaskHandle>,
    /// For those who wait for the end of a flush.
    endings: Bay<Endings>,
    pub reserve: Reserve,
    /// Of the monotonic clock, in ms: when the disk's free space was looked at.
    looked_at_ms: AtomicU64,
    data_dir: PathBuf,
    /// Looks whether a disk that ran full has room again, when nobody compacts.
    watch: OnceLock<TaskHandle>,
    last_told_ms: AtomicU64,
    untold: AtomicU64,
}

/// Ends of flushes.
#[derive(Default)]
struct Endings {
    all: u64,
    successes: u64,
}

impl Shared {
    pub fn start(env: &Env, pools: &Arc<Pools>, data_dir: &Path, options: Options) -> Arc<Shared> {
        let files = Arc::new(FileCache::new(Arc::clone(&env.storage), options.files_max));
        let storage = WithRoom { storage: Arc::clone(&env.storage), files: Arc::clone(&files) };
        let reserve = Reserve::new(Arc::clone(&env.storage), data_dir, options.reserve_bytes);
        let shared = Arc::new(Shared {
            env: Env { storage: Arc::new(storage), ..env.clone() },
            files,
            logger: Logger::new(),
            switch: Switch::new(),
            flushes: WorkQueue::new(|vb: &Vb| &vb.ticket),
            compactor: Compactor::new(options.compaction),
            governor: Arc::new(Governor::new(Arc::clone(&env.clock), options.governor)),
            fetches: Mutex::ranked(Rank::CommitQueue, Some(VecDeque::new())),
            writers: Crew::new(),
            readers: Crew::new(),
            pacer: AtomicUsize::new(0),
            retries: OnceLock::new(),
            endings: Bay::new(Endings::default()),
            reserve,
            options,
            looked_at_ms: AtomicU64::new(u64::MAX),
            data_dir: data_dir.to_owned(),
            watch: OnceLock::new(),
            last_told_ms: AtomicU64::new(u64::MAX),
            untold: AtomicU64::new(0),
        });
        shared.set_threads(pools, shared.options.readers, shared.options.writers);
        Compactor::start(&shared, pools);
        let retries = pools.spawn(PoolKind::Writer, Arc::new(Retries(Arc::downgrade(&shared))));
        assert!(shared.retries.set(retries).is_ok());
        let watch = pools.spawn(PoolKind::Background, Arc::new(Watch(Arc::downgrade(&shared))));
        assert!(shared.watch.set(watch).is_ok());
        shared.reserve.set_task(pools.spawn(PoolKind::Background, Arc::new(Keeping(Arc::downgrade(&shared)))));
        shared.logger.filer.set_task(pools.spawn(PoolKind::Writer, Arc::new(Filing(Arc::downgrade(&shared)))));
        let (weak, pools_weak) = (Arc::downgrade(&shared), Arc::downgrade(pools));
        shared.switch.set_task(pools.spawn(PoolKind::Background, Arc::new(Switching(weak, pools_weak))));
        shared
    }

    /// Sees that there is a task for each thread. Tasks beyond that do no harm: they wait for one another's thread.
    pub fn set_threads(self: &Arc<Shared>, pools: &Pools, readers: usize, writers: usize) {
        self.writers.grow(writers, |number| {
            let task = Worker { shared: Arc::downgrade(self), number, job: Job::Flush };
            pools.spawn(PoolKind::Writer, Arc::new(task))
        });
        self.readers.grow(readers, |number| {
            let task = Worker { shared: Arc::downgrade(self), number, job: Job::Fetch };
            pools.spawn(PoolKind::Reader, Arc::new(task))
        });
    }

    /// There is a log from here on; what goes into it, the phase tells.
    pub fn set_log(self: &Arc<Shared>, pools: &Pools, log: Arc<Log>, options: &LogOptions) -> Result<(), LogError> {
        self.logger.filer.set(options);
        log.observe(Arc::new(Ear(Arc::downgrade(self))));
        self.logger.set_log(Some(Arc::clone(&log)));
        log.drive(pools, options.driver)
    }

    /// When this returns, none of the store's tasks runs or will.
    pub fn stop(&self) {
        self.compactor.stop();
        self.watch.get().into_iter().for_each(TaskHandle::cancel);
        self.switch.stop();
        self.stop_writing();
        self.logger.stop();
        self.readers.cancel();
        // What is queued holds us, so it must not stay.
        self.flushes.clear();
        let unread = self.fetches.lock().take();
        for vb in unread.into_iter().flatten() {
            fetch::refuse_all(&vb);
        }
    }

    /// When this returns, nothing is flushed any more.
    pub fn stop_writing(&self) {
        if let Some(retries) = self.retries.get() {
            retries.cancel();
        }
        self.writers.cancel();
        self.reserve.stop();
    }

    pub fn changed(&self, vb: &Arc<Vb>, urgency: Urgency) {
        match self.logger.takes() {
            true => self.logger.changed(vb, urgency),
            false => self.file(vb, urgency),
        }
    }

    /// What clients wait for is a sync of the log, not of a file.
    pub fn is_logged(&self) -> bool {
        self.logger.takes()
    }

    /// Asks for a flush to the vBucket's file.
    pub fn file(&self, vb: &Arc<Vb>, urgency: Urgency) {
        if self.flushes.push(vb, urgency) {
            self.writers.call();
        }
    }

    /// Gives a claimed vBucket back to the flushers.
    pub fn release(&self, vb: &Arc<Vb>) {
        if self.flushes.release(vb) {
            self.writers.call();
        }
        self.switch.look();
    }

    pub fn fetch_wanted(&self, vb: &Arc<Vb>) {
        let is_open = self.fetches.lock().as_mut().map(|queue| queue.push_back(Arc::clone(vb))).is_some();
        match is_open {
            true => self.readers.call(),
            false => fetch::refuse_all(vb),
        }
    }

    fn end_flush(&self, vb: &Arc<Vb>, outcome: Outcome) {
        if self.flushes.finish(vb, outcome) {
            self.writers.call();
        }
        if vb.ticket.is_claimed() {
            vb.gate.claimed(self.env.clock.monotonic());
            self.compactor.flush_ended(vb);
        }
        if matches!(outcome, Outcome::Retry(_))
            && let Some(retries) = self.retries.get()
        {
            retries.wake();
        }
        self.switch.look();
        self.endings.change(|endings| {
            endings.all += 1;
            endings.successes += u64::from(!matches!(outcome, Outcome::Retry(_)));
            ((), Wake::Everybody)
        });
    }

    /// Tells the governor whether the disk runs full. To be called again and again while something fills it.
    pub fn watch_free_space(&self, now: Duration) {
        let now_ms = now.as_millis() as u64;
        let last_ms = self.looked_at_ms.load(Ordering::Relaxed);
        if last_ms != u64::MAX && now_ms < last_ms.saturating_add(LOOK_PAUSE.as_millis() as u64) {
            return;
        }
        self.looked_at_ms.store(now_ms, Ordering::Relaxed);
        let Ok(Some(free)) = self.env.storage.free_bytes(&self.data_dir) else { return };
        let low = self.compactor.settings().free_bytes_low;
        if self.governor.set_disk_low(free < low) {
            let free_mb = free >> 20;
            match free < low {
                true => {
                    tracing::warn!(free_mb, "the disk runs full: compaction goes faster, whoever feels it");
                    self.watch.get().into_iter().for_each(|watch| watch.wake_after(WATCH_PAUSE));
                }
                false => tracing::info!(free_mb, "the disk has room again: compaction goes as fast as nobody feels"),
            }
        }
    }

    /// How many flushes have not failed.
    pub fn successes(&self) -> u64 {
        self.endings.read(|endings| endings.successes)
    }

    /// What failed, and waits for its time, is tried again at once, and what is held back is looked at.
    pub fn retry_now(&self) {
        if let Some(pacer) = self.pacer.load(Ordering::Acquire).checked_sub(1) {
            self.writers.wake(pacer);
        }
        let (woken, _) = self.flushes.wake_waiting(Duration::MAX);
        (0..woken).for_each(|_| self.writers.call());
    }

    /// Sleeps until `settled`, looking again whenever a flush has ended.
    pub fn wait_until(&self, mut settled: impl FnMut() -> bool) {
        loop {
            let before = self.endings.read(|endings| endings.all);
            if settled() {
                return;
            }
            self.endings.wait(|endings| match endings.all == before {
                true => Look::Nothing,
                false => Look::Found(()),
            });
        }
    }

    /// Whether a failure may be told in the log now; and how many were not told before it.
    pub fn may_tell(&self) -> Option<u64> {
        let now = self.env.clock.monotonic().as_millis() as u64;
        let last = self.last_told_ms.load(Ordering::Relaxed);
        let due = last == u64::MAX || now >= last.saturating_add(LOG_PAUSE.as_millis() as u64);
        if due && self.last_told_ms.compare_exchange(last, now, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
            return Some(self.untold.swap(0, Ordering::Relaxed));
        }
        self.untold.fetch_add(1, Ordering::Relaxed);
        None
    }
}

/// A few tasks that do the same work.
///
/// A call is not lost: who calls has queued the work before it looks for an idle task, and a task that finds nothing goes
/// on the list of idle ones before it looks at the queue again. Whoever comes second sees what the first one did.
pub(crate) struct Crew {
    tasks: RwLock<Vec<TaskHandle>>,
    idle: Mutex<Vec<usize>>,
}

impl Crew {
    pub fn new() -> Crew {
        Crew {
            tasks: RwLock::ranked(Rank::CommitQueue, Vec::new()),
            idle: Mutex::ranked(Rank::CommitQueue, Vec::new()),
        }
    }

    /// Sees that there are at least `count` tasks, and one in any case.
    pub fn grow(&self, count: usize, spawn: impl FnMut(usize) -> TaskHandle) {
        let mut tasks = self.tasks.write();
        let there = tasks.len();
        tasks.extend((there..count.max(1)).map(spawn));
        let made = there..tasks.len();
        drop(tasks);
        self.idle.lock().extend(made.clone());
        if there > 0 {
            // There may be work already, for which nobody is called any more.
            made.for_each(|_| self.call());
        }
    }

    pub fn call(&self) {
        let idle = self.idle.lock().pop();
        if let Some(number) = idle {
            self.wake(number);
        }
    }

    pub fn wake(&self, number: usize) {
        let task = self.tasks.read().get(number).cloned();
        if let Some(task) = task {
            task.wake();
        }
    }

    pub fn rest(&self, number: usize) {
        let mut idle = self.idle.lock();
        if !idle.contains(&number) {
            idle.push(number);
        }
    }

    pub fn unrest(&self, number: usize) {
        self.idle.lock().retain(|other| *other != number);
    }

    pub fn cancel(&self) {
        let tasks = self.tasks.read().clone();
        tasks.iter().for_each(TaskHandle::cancel);
    }
}

#[derive(Clone, Copy)]
enum Job {
    Flush,
    Fetch,
}

struct Worker {
    shared: Weak<Shared>,
    number: usize,
    job: Job,
}

impl Task for Worker {
    fn name(&self) -> &'static str {
        match self.job {
            Job::Flush => "flush",
            Job::Fetch => "fetch",
        }
    }

    fn run(&self, _: &Context<'_>) -> Next {
        let Some(shared) = self.shared.upgrade() else { return Next::Done };
        if let Job::Flush = self.job
            && let Some(held) = self.hold_back(&shared)
        {
            return held;
        }
        if self.work_once(&shared) {
            return Next::Again;
        }
        let crew = match self.job {
            Job::Flush => &shared.writers,
            Job::Fetch => &shared.readers,
        };
        crew.rest(self.number);
        let nothing = match self.job {
            Job::Flush => shared.flushes.is_empty(),
            Job::Fetch => shared.fetches.lock().as_ref().is_none_or(VecDeque::is_empty),
        };
        if nothing {
            return Next::Idle;
        }
        crew.unrest(self.number);
        Next::Again
    }
}

impl Worker {
    /// While flushes are held back one writer waits for all, however much is queued. The others rest: whoever takes a flush has the
    /// next one called, and the one that waits does so when its time is over. So nothing stays queued that nobody looks at.
    fn hold_back(&self, shared: &Shared) -> Option<Next> {
        let me = self.number + 1;
        let _ = shared.pacer.compare_exchange(me, 0, Ordering::AcqRel, Ordering::Acquire);
        if shared.flushes.is_empty() {
            return None;
        }
        let pause = flusher::pause(shared)?;
        if shared.pacer.compare_exchange(0, me, Ordering::AcqRel, Ordering::Acquire).is_ok() {
            return Some(Next::After(pause));
        }
        shared.writers.rest(self.number);
        Some(Next::Idle)
    }

    fn work_once(&self, shared: &Arc<Shared>) -> bool {
        match self.job {
            Job::Flush => {
                let Some(vb) = shared.flushes.pop() else { return false };
                if shared.pacer.load(Ordering::Acquire) == 0 && !shared.flushes.is_empty() {
                    shared.writers.call();
                }
                let was_unnamed = vb.is_unnamed();
                let outcome = flusher::flush(&vb);
                shared.end_flush(&vb, outcome);
                if was_unnamed {
                    shared.compactor.flush_ended(&vb);
                }
            }
            Job::Fetch => {
                let next = shared.fetches.lock().as_mut().and_then(VecDeque::pop_front);
                let Some(vb) = next else { return false };
                fetch::fetch_all(&vb);
            }
        }
        true
    }
}

/// Watches a disk that runs full.
struct Watch(Weak<Shared>);

impl Task for Watch {
    fn name(&self) -> &'static str {
        "disk space"
    }

    fn run(&self, cx: &Context<'_>) -> Next {
        let Some(shared) = self.0.upgrade() else { return Next::Done };
        shared.watch_free_space(cx.now());
        if shared.governor.is_disk_low() { Next::After(WATCH_PAUSE) } else { Next::Idle }
    }
}

/// Puts failed flushes back into the queue when their time has come.
struct Retries(Weak<Shared>);

impl Task for Retries {
    fn name(&self) -> &'static str {
        "flush retries"
    }

    fn run(&self, cx: &Context<'_>) -> Next {
        let Some(shared) = self.0.upgrade() else { return Next::Done };
        let (woken, next) = shared.flushes.wake_waiting(cx.now());
        (0..woken).for_each(|_| shared.writers.call());
        next.map_or(Next::Idle, Next::At)
    }
}
