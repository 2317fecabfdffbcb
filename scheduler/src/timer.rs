//! Deadlines. One thread watches all of them and does nothing but hand due tasks to their pools; with no deadline it
//! sleeps until there is one.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use env::Clock;

use crate::park::{Bay, Look, Wake};
use crate::task::Cell;

/// A task has two deadlines, so that neither who asks for a run nor the run's own answer can undo the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Slot {
    /// From [`crate::Next`]; every run replaces it.
    Own,
    /// From [`crate::TaskHandle::wake_at`]; the earliest holds.
    Asked,
}

const NEVER: u64 = u64::MAX;

/// All deadlines.
///
/// 1. `by_due` has an entry for a task and slot exactly if the task's `deadlines[slot]` is not [`NEVER`].
/// 2. A task that is gone has none: cancelling takes them out after setting the mark, and adding looks at the mark under
///    the same lock.
/// 3. The thread is called only if the first deadline moved forward.
pub(crate) struct Timers {
    bay: Bay<Deadlines>,
}

#[derive(Default)]
struct Deadlines {
    by_due: BTreeMap<(u64, u64, Slot), Arc<Cell>>,
    closed: bool,
}

impl Timers {
    pub fn new() -> Timers {
        Timers { bay: Bay::new(Deadlines::default()) }
    }

    /// The task's own deadline, in place of an earlier one.
    pub fn set_own(&self, cell: &Arc<Cell>, at: Duration) {
        self.change(|deadlines| deadlines.set(cell, Slot::Own, ns(at)));
    }

    /// Takes the task's own deadline back.
    pub fn clear_own(&self, cell: &Arc<Cell>) {
        self.change(|deadlines| deadlines.set(cell, Slot::Own, NEVER));
    }

    /// A deadline from outside; an earlier one holds.
    pub fn ask(&self, cell: &Arc<Cell>, at: Duration) {
        self.change(|deadlines| {
            let at = ns(at).min(cell.deadlines[Slot::Asked as usize].load(Relaxed));
            deadlines.set(cell, Slot::Asked, at);
        });
    }

    /// One deadline in place of all.
    pub fn replace(&self, cell: &Arc<Cell>, at: Duration) {
        self.change(|deadlines| {
            deadlines.set(cell, Slot::Own, NEVER);
            deadlines.set(cell, Slot::Asked, ns(at));
        });
    }

    /// Takes out the deadlines of a task that is gone.
    pub fn forget(&self, cell: &Arc<Cell>) {
        self.change(|deadlines| {
            deadlines.set(cell, Slot::Own, NEVER);
            deadlines.set(cell, Slot::Asked, NEVER);
        });
    }

    /// Sleeps until tasks are due; `None` after `close`. What is due comes in the order of the deadlines.
    pub fn next_due(&self, clock: &dyn Clock) -> Option<Vec<(Duration, Arc<Cell>)>> {
        self.bay.wait(|deadlines| {
            if deadlines.closed {
                return Look::Found(None);
            }
            let now = ns(clock.monotonic());
            let due = deadlines.take_due(now);
            if !due.is_empty() {
                return Look::Found(Some(due));
            }
            match deadlines.first() {
                None => Look::Nothing,
                Some(first) => Look::NothingFor(Duration::from_nanos(first - now)),
            }
        })
    }

    /// What is due now, without waiting.
    pub fn take_due(&self, now: Duration) -> Vec<(Duration, Arc<Cell>)> {
        self.bay.change(|deadlines| (deadlines.take_due(ns(now)), Wake::Nobody))
    }

    pub fn first(&self) -> Option<Duration> {
        self.bay.read(|deadlines| deadlines.first().map(Duration::from_nanos))
    }

    /// No deadline counts from now on.
    pub fn close(&self) {
        let dropped = self.bay.change(|deadlines| {
            deadlines.closed = true;
            (std::mem::take(&mut deadlines.by_due), Wake::Everybody)
        });
        drop(dropped);
    }

    /// Lets the thread look at the clock again: for a clock that is moved by hand.
    #[cfg(all(test, not(loom)))]
    pub fn look_again(&self) {
        self.bay.change(|_| ((), Wake::Everybody));
    }

    pub fn wakeups(&self) -> u64 {
        self.bay.wakeups()
    }

    fn change(&self, change: impl FnOnce(&mut Deadlines)) {
        self.bay.change(|deadlines| {
            let before = deadlines.first().unwrap_or(NEVER);
            change(deadlines);
            let sooner = deadlines.first().is_some_and(|first| first < before);
            ((), if sooner { Wake::One } else { Wake::Nobody })
        });
    }
}

impl Deadlines {
    fn set(&mut self, cell: &Arc<Cell>, slot: Slot, at: u64) {
        let at = if self.closed || cell.word.is_gone() { NEVER } else { at };
        let old = cell.deadlines[slot as usize].swap(at, Relaxed);
        if old == at {
            return;
        }
        if old != NEVER {
            self.by_due.remove(&(old, cell.id, slot));
        }
        if at != NEVER {
            self.by_due.insert((at, cell.id, slot), cell.clone());
        }
    }

    fn take_due(&mut self, now: u64) -> Vec<(Duration, Arc<Cell>)> {
        let mut due = Vec::new();
        while let Some(entry) = self.by_due.first_entry() {
            let &(at, _, slot) = entry.key();
            if at > now {
                break;
            }
            let cell = entry.remove();
            cell.deadlines[slot as usize].store(NEVER, Relaxed);
            due.push((Duration::from_nanos(at), cell));
        }
        due
    }

    fn first(&self) -> Option<u64> {
        self.by_due.first_key_value().map(|(&(at, ..), _)| at)
    }
}

/// Five hundred years and more are never.
fn ns(at: Duration) -> u64 {
    u64::try_from(at.as_nanos()).unwrap_or(NEVER)
}
