//! What runs in a pool, and the handle others hold on it.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use env::Clock;
use types::rank::Rank;
use types::sync::{AtomicBool, AtomicU64, Mutex};

use crate::core::Core;
use crate::ready::Class;
use crate::stats::TaskStats;
use crate::word::{Cancelled, Woken, Word};
use crate::{PoolKind, core};

/// How long a run may take unless the task says otherwise; more counts as an over-run.
const SLICE_DEFAULT: Duration = Duration::from_millis(100);

/// Work that is done in runs, whenever somebody wakes it or its time has come.
///
/// A run should end within [`Task::slice`] and return [`Next::Again`] if there is more: others wait for the thread. A panic
/// aborts the process.
pub trait Task: Send + Sync + 'static {
    /// One name per kind of task; its statistics are kept under it.
    fn name(&self) -> &'static str;

    fn class(&self) -> Class {
        Class::Normal
    }

    fn slice(&self) -> Duration {
        SLICE_DEFAULT
    }

    /// Never called by two threads at once. A wake from here on leads to another run, so: look at the state, do the work,
    /// return.
    fn run(&self, cx: &Context<'_>) -> Next;
}

/// When a task wants to run next. A wake comes first in any case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// When woken.
    Idle,
    /// At once, after those who are already waiting.
    Again,
    /// At this [`Clock::monotonic`] time.
    At(Duration),
    /// This long from the end of the run.
    After(Duration),
    /// Never.
    Done,
}

/// What a run is told.
pub struct Context<'a> {
    pub(crate) clock: &'a dyn Clock,
    pub(crate) yield_at: Duration,
    pub(crate) task: &'a TaskHandle,
}

impl Context<'_> {
    /// [`Clock::monotonic`].
    pub fn now(&self) -> Duration {
        self.clock.monotonic()
    }

    /// The slice is used up: return [`Next::Again`] soon.
    pub fn should_yield(&self) -> bool {
        self.now() >= self.yield_at
    }

    /// The running task.
    pub fn task(&self) -> &TaskHandle {
        self.task
    }
}

/// A task as others see it. Clones are the same task; dropping them does not cancel it.
#[derive(Clone)]
pub struct TaskHandle {
    pub(crate) cell: Arc<Cell>,
}

pub(crate) struct Cell {
    pub id: u64,
    pub name: &'static str,
    pub kind: PoolKind,
    pub class: Class,
    pub slice: Duration,
    pub word: Word,
    /// Emptied when the task is gone, as the task may hold a handle on itself.
    pub task: Mutex<Option<Arc<dyn Task>>>,
    pub stats: Arc<TaskStats>,
    pub core: Arc<Core>,
    /// Deadlines in ns, by slot; changed under the timers' lock. See [`crate::timer::Slot`].
    pub deadlines: [AtomicU64; 2],
    /// Only the runner's business: there may be a deadline from an earlier run to take back.
    pub has_own_deadline: AtomicBool,
}

impl TaskHandle {
    pub(crate) fn new(core: &Arc<Core>, kind: PoolKind, task: Arc<dyn Task>) -> TaskHandle {
        let cell = Cell {
            id: core.next_id(),
            name: task.name(),
            kind,
            class: task.class(),
            slice: task.slice(),
            word: Word::new(),
            stats: core.stats_of(kind, task.name()),
            task: Mutex::ranked(Rank::RunQueue, Some(task)),
            core: core.clone(),
            deadlines: [AtomicU64::new(u64::MAX), AtomicU64::new(u64::MAX)],
            has_own_deadline: AtomicBool::new(false),
        };
        TaskHandle { cell: Arc::new(cell) }
    }

    pub fn name(&self) -> &'static str {
        self.cell.name
    }

    /// Asks for a run that begins after this call: all that the caller did before is seen by it. Cheap, from any thread,
    /// under any lock of a higher rank; many wakes may become one run. No effect after `cancel` or shutdown.
    #[inline]
    pub fn wake(&self) {
        match self.cell.word.wake() {
            Woken::Already => {}
            Woken::RunsOnceMore => self.cell.stats.wakes.inc(),
            Woken::Queue => {
                self.cell.stats.wakes.inc();
                core::enqueue(&self.cell, self.cell.core.clock.monotonic());
            }
        }
    }

    /// Asks for a run no earlier than `at` ([`Clock::monotonic`]). Of several such requests the earliest holds; it stands
    /// until its time, whatever runs come before.
    pub fn wake_at(&self, at: Duration) {
        self.cell.core.timers.ask(&self.cell, at);
    }

    /// [`TaskHandle::wake_at`], this long from now.
    pub fn wake_after(&self, delay: Duration) {
        self.wake_at(self.cell.core.clock.monotonic().saturating_add(delay));
    }

    /// Replaces every deadline, be it the task's own or asked for, by this long from now. Does not take back a wake, and
    /// what a run under way returns comes on top. A delay of zero is a wake.
    pub fn snooze(&self, delay: Duration) {
        let at = self.cell.core.clock.monotonic().saturating_add(delay);
        self.cell.core.timers.replace(&self.cell, at);
        if delay.is_zero() {
            self.wake();
        }
    }

    /// When this returns, the task is not running, never will be again, and has been dropped by the pool. Waits for a run
    /// under way; called from within that run it does not wait, and the task is dropped when the run ends. Call it as
    /// often as you like, from anywhere, with no lock held that the task's run or destructor takes. Two tasks must not
    /// wait for each other.
    pub fn cancel(&self) {
        match self.cell.word.cancel() {
            Cancelled::First => core::drop_task(&self.cell),
            Cancelled::WhileRunning if core::is_running_here(self.cell.id) => {}
            Cancelled::WhileRunning => self.cell.core.await_end(&self.cell),
            Cancelled::Already => {}
        }
    }

    /// Cancelled or done: no run will begin. One may be ending.
    pub fn is_gone(&self) -> bool {
        self.cell.word.is_gone()
    }
}

impl fmt::Debug for TaskHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}#{}", self.cell.name, self.cell.id)
    }
}

/// A closure as a task that runs once.
pub(crate) struct Once<F> {
    name: &'static str,
    work: Mutex<Option<F>>,
}

impl<F: FnOnce() + Send + 'static> Once<F> {
    pub fn new(name: &'static str, work: F) -> Once<F> {
        Once { name, work: Mutex::ranked(Rank::RunQueue, Some(work)) }
    }
}

impl<F: FnOnce() + Send + 'static> Task for Once<F> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn run(&self, _: &Context<'_>) -> Next {
        let work = self.work.lock().take();
        if let Some(work) = work {
            work();
        }
        Next::Done
    }
}

impl Cell {
    pub fn take_has_own_deadline(&self) -> bool {
        self.has_own_deadline.swap(false, Relaxed)
    }
}
