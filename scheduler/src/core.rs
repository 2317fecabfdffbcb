//! What threads and steppers share: queues, timers, and the one way a task is run.

use std::any::Any;
use std::cell::Cell as LocalCell;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use env::Clock;
use types::rank::Rank;
use types::sync::{AtomicU64, Mutex, thread_local};

use crate::PoolKind;
use crate::park::{Bay, Look, Wake};
use crate::pool::Pool;
use crate::stats::{Stats, TaskStats};
use crate::task::{Cell, Context, Next, TaskHandle};
use crate::timer::Timers;
use crate::word::{Ended, Woken};

pub(crate) struct Core {
    pub clock: Arc<dyn Clock>,
    pub pools: [Pool; PoolKind::ALL.len()],
    pub timers: Timers,
    /// Counts what those wait for who wait for a task to end or for a pool to run dry.
    endings: Bay<u64>,
    types: Mutex<BTreeMap<(PoolKind, &'static str), Arc<TaskStats>>>,
    ids: AtomicU64,
    /// No threads: whoever takes steps sees panics.
    pub stepped: bool,
}

thread_local! {
    /// The task this thread runs: its id and name.
    #[allow(clippy::missing_const_for_thread_local, reason = "those of the checkers have no const form")]
    static RUNNING_HERE: LocalCell<Option<(u64, &'static str)>> = LocalCell::new(None);
}

pub(crate) fn is_running_here(id: u64) -> bool {
    RUNNING_HERE.with(LocalCell::get).is_some_and(|(running, _)| running == id)
}

/// The name of the task the calling thread is running, for messages.
pub fn current_task() -> Option<&'static str> {
    RUNNING_HERE.with(LocalCell::get).map(|(_, name)| name)
}

impl Core {
    pub fn new(clock: Arc<dyn Clock>, stepped: bool) -> Core {
        Core {
            clock,
            pools: PoolKind::ALL.map(Pool::new),
            timers: Timers::new(),
            endings: Bay::new(0),
            types: Mutex::ranked(Rank::RunQueue, BTreeMap::new()),
            ids: AtomicU64::new(1),
            stepped,
        }
    }

    pub fn pool(&self, kind: PoolKind) -> &Pool {
        &self.pools[kind as usize]
    }

    pub fn next_id(&self) -> u64 {
        self.ids.fetch_add(1, Relaxed)
    }

    pub fn stats_of(&self, kind: PoolKind, name: &'static str) -> Arc<TaskStats> {
        let mut types = self.types.lock();
        types.entry((kind, name)).or_insert_with(|| Arc::new(TaskStats::new(kind, name))).clone()
    }

    pub fn stats(&self) -> Stats {
        let tasks = self.types.lock().values().cloned().collect();
        let pools = self.pools.iter().map(Pool::stats).collect();
        Stats { pools, tasks, timer_wakeups: self.timers.wakeups() }
    }

    /// Runs what came off a queue. A panic of the task ends the process, or goes on to the caller of a stepper.
    pub fn run(&self, due: Duration, cell: &Arc<Cell>) {
        if !cell.word.begin() {
            return;
        }
        let task = cell.task.lock().clone().expect("a task is dropped only after it is gone and not running");
        let began = self.clock.monotonic();
        cell.stats.runs.inc();
        cell.stats.wait.record(began.saturating_sub(due));

        let handle = TaskHandle { cell: cell.clone() };
        let cx = Context { clock: &*self.clock, yield_at: began.saturating_add(cell.slice), task: &handle };
        let outer = RUNNING_HERE.with(|here| here.replace(Some((cell.id, cell.name))));
        let next = guarded(|| task.run(&cx));
        let ended = self.clock.monotonic();
        let took = ended.saturating_sub(began);
        cell.stats.run.record(took);
        cell.stats.overruns.add(u64::from(took > cell.slice));

        // The deadline is set before the word says the run is over: a deadline that comes at once then finds the task
        // running, and asks for another run.
        let mut again = false;
        let mut panic = None;
        match next {
            Ok(Next::At(at)) => self.sleep_until(cell, at),
            Ok(Next::After(delay)) => self.sleep_until(cell, ended.saturating_add(delay)),
            Ok(Next::Idle) => self.forget_own_deadline(cell),
            Ok(Next::Again) => {
                self.forget_own_deadline(cell);
                again = true;
            }
            Ok(Next::Done) => cell.word.finish(),
            Err(_) if !self.stepped => crate::death::abort(cell.name),
            Err(caught) => {
                cell.word.finish();
                panic = Some(caught);
            }
        }
        // Not kept past the end: after `bury` nothing of the task may be left here.
        drop(task);
        match cell.word.end(again) {
            Ended::Idle => {}
            Ended::Queue => enqueue(cell, ended),
            Ended::Gone => {
                drop_task(cell);
                if cell.word.bury() {
                    self.announce_ending();
                }
            }
        }
        RUNNING_HERE.with(|here| here.set(outer));
        if let Some(panic) = panic {
            std::panic::resume_unwind(panic);
        }
    }

    /// Hands tasks whose time has come to their pools.
    pub fn wake_due(&self, due: Vec<(Duration, Arc<Cell>)>) {
        for (at, cell) in due {
            match cell.word.wake() {
                Woken::Already => {}
                Woken::RunsOnceMore => cell.stats.wakes.inc(),
                Woken::Queue => {
                    cell.stats.wakes.inc();
                    enqueue(&cell, at);
                }
            }
        }
    }

    /// Sleeps until the task's run has ended and what it held is dropped.
    pub fn await_end(&self, cell: &Cell) {
        self.endings.wait(|_| match cell.word.is_running() {
            true => Look::Nothing,
            false => Look::Found(()),
        });
    }

    pub fn announce_ending(&self) {
        self.endings.change(|count| {
            *count += 1;
            ((), Wake::Everybody)
        });
    }

    /// Sleeps until no task is queued or running in any pool. Somebody must keep others from waking tasks.
    pub fn await_quiet(&self) {
        loop {
            let before = self.endings.read(|count| *count);
            if self.is_quiet() {
                return;
            }
            self.endings.wait(|count| match *count == before {
                true => Look::Nothing,
                false => Look::Found(()),
            });
        }
    }

    /// Two rounds: a pool seen at rest in both, with nothing pushed between, was at rest all the while; so there was a
    /// moment, between the rounds, when all were.
    fn is_quiet(&self) -> bool {
        let round = || self.pools.iter().map(Pool::at_rest).collect::<Option<Vec<u64>>>();
        let first = round();
        first.is_some() && first == round()
    }

    fn sleep_until(&self, cell: &Arc<Cell>, at: Duration) {
        cell.has_own_deadline.store(true, Relaxed);
        self.timers.set_own(cell, at);
    }

    fn forget_own_deadline(&self, cell: &Arc<Cell>) {
        if cell.take_has_own_deadline() {
            self.timers.clear_own(cell);
        }
    }
}

/// Queues a task for which the caller's step on its word gave the right to do so.
pub(crate) fn enqueue(cell: &Arc<Cell>, due: Duration) {
    cell.core.pool(cell.kind).push(due, cell.clone());
}

/// Drops what a gone task holds. The destructor runs here, under no lock; it may wake, spawn and cancel others.
pub(crate) fn drop_task(cell: &Arc<Cell>) {
    cell.core.timers.forget(cell);
    let task = cell.task.lock().take();
    drop(task);
}

type Panic = Box<dyn Any + Send>;

#[cfg(not(any(loom, shuttle)))]
fn guarded<R>(run: impl FnOnce() -> R) -> Result<R, Panic> {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(run))
}

/// The checkers end an execution by panicking through it.
#[cfg(any(loom, shuttle))]
fn guarded<R>(run: impl FnOnce() -> R) -> Result<R, Panic> {
    Ok(run())
}
