//! A task's state, in one atomic word.

use std::sync::atomic::Ordering::{AcqRel, Acquire};

use types::sync::AtomicU32;

/// Somebody asked for a run that has not begun.
const WOKEN: u32 = 1;
const RUNNING: u32 = 2;
/// It will not run again.
const GONE: u32 = 4;
/// Somebody sleeps until `RUNNING` is cleared.
const AWAITED: u32 = 8;

/// Decides, among all who wake, run and cancel a task, who may do what.
///
/// 1. Who turns 0 into `WOKEN` queues the task, nobody else. The runner of a task woken meanwhile queues it when it ends.
///    So a task is queued at most once and never runs on two threads.
/// 2. `WOKEN` is cleared before the run, never after: a wake during the run asks for another one.
/// 3. Every step is a read-modify-write, even a wake that changes nothing. These have one order: a wake either comes
///    before the clearing, and then the run sees what the waker wrote before it, or after, and then leaves its mark.
/// 4. After `GONE` no run begins. Who sets it first sees whether one is under way.
///
/// Checked by loom in `a_wake_during_a_run_is_followed_by_a_run` and `cancel_returns_only_when_no_run_is_left`.
#[derive(Default)]
pub struct Word(AtomicU32);

/// What the runner does with the task after a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// Leave it; the next waker queues it.
    Idle,
    /// Queue it.
    Queue,
    /// Drop what it holds, then call [`Word::bury`].
    Gone,
}

/// What a canceller found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cancelled {
    /// Not running, and this call was the first: the caller drops what the task holds.
    First,
    /// A run is under way: its runner drops it, and announces that.
    WhileRunning,
    /// Someone came first, and no run is under way.
    Already,
}

impl Word {
    pub fn new() -> Word {
        Word(AtomicU32::new(0))
    }

    /// Asks for a run.
    pub fn wake(&self) -> Woken {
        match self.0.fetch_or(WOKEN, AcqRel) {
            0 => Woken::Queue,
            RUNNING => Woken::RunsOnceMore,
            _ => Woken::Already,
        }
    }

    /// Called by who took the task off the queue. False: it was cancelled while it waited.
    pub fn begin(&self) -> bool {
        let begin = |word: u32| {
            debug_assert!(word & RUNNING == 0, "a task is on one queue, once");
            (word & GONE == 0).then_some(RUNNING)
        };
        self.0.fetch_update(AcqRel, Acquire, begin).is_ok()
    }

    /// Called by the runner; `again`: as if woken during the run.
    pub fn end(&self, again: bool) -> Ended {
        let again = if again { WOKEN } else { 0 };
        let end = |word: u32| (word & GONE == 0).then_some((word | again) & !RUNNING);
        match self.0.fetch_update(AcqRel, Acquire, end) {
            Ok(word) if (word | again) & WOKEN != 0 => Ended::Queue,
            Ok(_) => Ended::Idle,
            Err(_) => Ended::Gone,
        }
    }

    /// Called by the runner whose task shall not run again, before [`Word::end`].
    pub fn finish(&self) {
        self.0.fetch_or(GONE, AcqRel);
    }

    /// Called by the runner after `Gone`. True: someone sleeps until now.
    pub fn bury(&self) -> bool {
        self.0.fetch_and(!RUNNING, AcqRel) & AWAITED != 0
    }

    pub fn cancel(&self) -> Cancelled {
        let word = self.0.fetch_or(GONE | AWAITED, AcqRel);
        match (word & RUNNING != 0, word & GONE != 0) {
            (true, _) => Cancelled::WhileRunning,
            (false, true) => Cancelled::Already,
            (false, false) => Cancelled::First,
        }
    }

    pub fn is_running(&self) -> bool {
        self.0.load(Acquire) & RUNNING != 0
    }

    pub fn is_gone(&self) -> bool {
        self.0.load(Acquire) & GONE != 0
    }

    /// The order that was wrong: the flag is cleared when the work is done, and a wake during the work with it.
    #[cfg(all(loom, test))]
    pub fn end_clearing_late(&self) -> Ended {
        self.0.fetch_and(!(RUNNING | WOKEN), AcqRel);
        Ended::Idle
    }
}

/// What a waker found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Woken {
    /// At rest: the caller queues it.
    Queue,
    /// Running: its runner queues it.
    RunsOnceMore,
    /// A run was already due, or none will ever be.
    Already,
}
