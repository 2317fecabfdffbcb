//! The pools as the rest of the server sees them, run by threads or by a stepper.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use env::{Clock, Env};
use metrics::Registry;
use types::rank::Rank;
use types::sync::{Mutex, thread};

use crate::core::Core;
use crate::pool::join_others;
use crate::stats::{self, Stats};
use crate::task::{Once, Task, TaskHandle};

/// A pool is named by what its tasks wait for, so that one kind of waiting does not hold up another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PoolKind {
    /// Reads from disk that somebody waits for.
    Reader,
    /// Writes and syncs.
    Writer,
    /// I/O that nobody waits for, or only an administrator.
    Background,
    /// Compaction: it runs a thousand times as long as anything else that writes.
    Compaction,
    /// Computing, without I/O.
    Cpu,
}

impl PoolKind {
    pub const ALL: [PoolKind; 5] =
        [PoolKind::Reader, PoolKind::Writer, PoolKind::Background, PoolKind::Compaction, PoolKind::Cpu];

    pub const fn name(self) -> &'static str {
        match self {
            PoolKind::Reader => "reader",
            PoolKind::Writer => "writer",
            PoolKind::Background => "background",
            PoolKind::Compaction => "compaction",
            PoolKind::Cpu => "cpu",
        }
    }

    /// Whether its threads let all others go first whatever else is said. Only where nobody ever waits for a task to end: the
    /// background's are waited for by the commit log, which needs its next segment, and by clients, whose documents are being loaded.
    pub(crate) const fn gives_way(self) -> bool {
        matches!(self, PoolKind::Compaction)
    }
}

/// Threads per pool. None may be 0: what waits in a pool without threads waits forever.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolConfig {
    pub readers: usize,
    pub writers: usize,
    pub background: usize,
    pub compaction: usize,
    pub cpu: usize,
}

/// More threads than this in one pool are a mistake.
pub const THREADS_MAX: usize = 256;

impl Default for PoolConfig {
    /// Readers and writers wait for the disk, so there may be more of them than cores.
    fn default() -> PoolConfig {
        let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
        PoolConfig { readers: cores.clamp(4, 16), writers: 4, background: 3, compaction: 2, cpu: cores.clamp(2, 16) }
    }
}

impl PoolConfig {
    pub fn threads(&self, kind: PoolKind) -> usize {
        match kind {
            PoolKind::Reader => self.readers,
            PoolKind::Writer => self.writers,
            PoolKind::Background => self.background,
            PoolKind::Compaction => self.compaction,
            PoolKind::Cpu => self.cpu,
        }
    }

    /// Refuses sizes that [`Pools::start`] would not accept.
    pub fn check(&self) -> Result<(), PoolError> {
        PoolKind::ALL.into_iter().try_for_each(|kind| check_size(kind, self.threads(kind)))
    }
}

#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    #[error("the {} pool cannot have {threads} threads: give it 1 to {THREADS_MAX}", .pool.name())]
    Size { pool: PoolKind, threads: usize },
    #[error("cannot start a thread for the {} pool; it goes on with those it has", .pool.name())]
    Thread { pool: PoolKind, source: io::Error },
}

fn check_size(pool: PoolKind, threads: usize) -> Result<(), PoolError> {
    if (1..=THREADS_MAX).contains(&threads) { Ok(()) } else { Err(PoolError::Size { pool, threads }) }
}

/// What becomes of the tasks that are queued when the pools stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// They run, and so does what they wake, until nothing is left. A task that always wants to run again must be
    /// cancelled first, or the stop never comes.
    Drain,
    /// They are dropped.
    Cancel,
}

/// Five pools and a timer.
///
/// 1. A task is on one thread at most, and never runs after its `cancel` returned.
/// 2. A wake is followed by a run that begins after it, without delay if a thread is free. Nothing polls.
/// 3. With nothing ready and no deadline, no thread wakes.
/// 4. After `shutdown` no task runs, and nothing that is woken or spawned will.
pub struct Pools {
    core: Arc<Core>,
    timer_thread: Mutex<Option<thread::JoinHandle<()>>>,
}

impl Pools {
    /// Starts the threads. Panics if a size is refused by [`PoolConfig::check`], or if the system gives no thread.
    pub fn start(env: &Env, config: &PoolConfig) -> Arc<Pools> {
        Pools::start_with(env.clock.clone(), config)
    }

    pub(crate) fn start_with(clock: Arc<dyn Clock>, config: &PoolConfig) -> Arc<Pools> {
        config.check().unwrap_or_else(|refused| panic!("{refused}"));
        crate::death::tell_names();
        let core = Arc::new(Core::new(clock, false));
        for kind in PoolKind::ALL {
            core.pool(kind).set_target(&core, config.threads(kind)).expect("a thread for a pool");
        }
        let on_timer = core.clone();
        let timer = thread::Builder::new().name("timer".to_string()).spawn(move || {
            while let Some(due) = on_timer.timers.next_due(&*on_timer.clock) {
                on_timer.wake_due(due);
            }
        });
        let timer = timer.expect("a thread for the timer");
        Arc::new(Pools { core, timer_thread: Mutex::ranked(Rank::RunQueue, Some(timer)) })
    }

    pub(crate) fn stepped(core: Arc<Core>) -> Arc<Pools> {
        Arc::new(Pools { core, timer_thread: Mutex::ranked(Rank::RunQueue, None) })
    }

    /// Makes a task known to a pool. It does not run before it is woken.
    pub fn spawn(&self, kind: PoolKind, task: Arc<dyn Task>) -> TaskHandle {
        TaskHandle::new(&self.core, kind, task)
    }

    /// Runs a closure once, as soon as a thread is free. After `shutdown` it is dropped unrun.
    pub fn execute(&self, kind: PoolKind, name: &'static str, work: impl FnOnce() + Send + 'static) -> TaskHandle {
        let handle = self.spawn(kind, Arc::new(Once::new(name, work)));
        handle.wake();
        handle
    }

    /// Changes how many threads a pool has; tasks that run are not disturbed.
    pub fn resize(&self, kind: PoolKind, threads: usize) -> Result<(), PoolError> {
        check_size(kind, threads)?;
        if self.core.stepped {
            return Ok(());
        }
        let resized = self.core.pool(kind).set_target(&self.core, threads);
        resized.map_err(|source| PoolError::Thread { pool: kind, source })
    }

    /// The pool's threads let all others go first, each from its next task on, and for good: a thread cannot take it back. For a pool
    /// whose tasks nobody waits for as the server is set up.
    pub fn give_way(&self, kind: PoolKind) {
        self.core.pool(kind).give_way();
    }

    /// The clock that deadlines refer to.
    pub fn now(&self) -> Duration {
        self.core.clock.monotonic()
    }

    pub fn stats(&self) -> Stats {
        self.core.stats()
    }

    /// Adds the pools' statistics to a registry.
    pub fn register(&self, registry: &mut Registry) {
        stats::register(&self.core, registry);
    }

    /// Deadlines no longer count; queued tasks run or are dropped; threads are joined. Called by a task, it does not wait
    /// for that task's thread, and must not drain. A second call finds nothing left to do.
    pub fn shutdown(&self, stop: Stop) {
        self.core.timers.close();
        let timer = self.timer_thread.lock().take();
        join_others(timer.into_iter());
        if stop == Stop::Drain {
            assert!(crate::current_task().is_none(), "a task cannot wait for itself to end: shut down from outside");
            if self.core.stepped {
                while crate::stepper::step_in_order(&self.core) {}
            } else {
                self.core.pools.iter().for_each(|pool| pool.drain());
                self.core.await_quiet();
            }
        }
        self.core.pools.iter().for_each(|pool| pool.close());
        self.core.pools.iter().for_each(|pool| pool.join());
    }

    /// Tells the timer thread that the clock was moved.
    #[cfg(all(test, not(loom)))]
    pub(crate) fn clock_moved(&self) {
        self.core.timers.look_again();
    }
}

impl Drop for Pools {
    fn drop(&mut self) {
        self.shutdown(Stop::Cancel);
    }
}
