//! Many changes, one wake: a thread that serves many clients in turn hands each change to the commit log at once, but wakes
//! the log's leader when it has served all, so that one sync takes what would otherwise be spread over two.
//!
//! Also saved is the way to the log itself. Which log there is stands behind a lock that all threads share, and to take it
//! for each change costs more, by two cores taking the same two cache lines from each other, than to copy the change.

use std::cell::Cell;
use std::marker::PhantomData;
use std::sync::Arc;

use commit_log::Log;

use crate::logger::Logger;

/// What a thread needs to hand changes to the log.
///
/// 1. If something was deposited that nobody leads for, the leader is called when this goes, or earlier.
#[derive(Default)]
pub(crate) struct Desk {
    pub log: Option<Arc<Log>>,
    /// Of the logger, when it had this log; 0: never.
    pub epoch: u64,
    pub calls: bool,
}

impl Desk {
    pub fn call(&mut self) {
        if std::mem::take(&mut self.calls)
            && let Some(log) = &self.log
        {
            log.call();
        }
    }
}

impl Drop for Desk {
    fn drop(&mut self) {
        self.call();
    }
}

thread_local! {
    /// Of the turn under way on this thread, with the address of the logger that it is about.
    static DESK: Cell<Option<(usize, Desk)>> = const { Cell::new(None) };
}

/// Runs `work` with the desk of the turn under way on this thread, or with one of its own.
pub(crate) fn with_desk<R>(logger: &Logger, work: impl FnOnce(&mut Desk) -> R) -> R {
    match DESK.take() {
        Some((of, mut desk)) if of == address(logger) => {
            let result = work(&mut desk);
            DESK.set(Some((of, desk)));
            result
        }
        other => {
            DESK.set(other);
            work(&mut Desk::default())
        }
    }
}

fn address(logger: &Logger) -> usize {
    std::ptr::from_ref(logger).addr()
}

/// A thread's turn of serving. It belongs to the thread that began it, which must not wait for anything that it changed
/// meanwhile.
pub struct Turn<'a> {
    logger: &'a Logger,
    of_this_thread: PhantomData<*const ()>,
}

impl<'a> Turn<'a> {
    pub(crate) fn begin(logger: &'a Logger) -> Turn<'a> {
        let before = DESK.replace(Some((address(logger), Desk::default())));
        debug_assert!(before.is_none(), "a thread has one turn at a time");
        Turn { logger, of_this_thread: PhantomData }
    }

    /// Wakes the log for what was changed so far.
    pub fn call(&self) {
        with_desk(self.logger, Desk::call);
    }

    /// Ends the turn of a thread that nobody needs until what it changed is durable: if nobody leads the log, it does so itself,
    /// once.
    pub fn wait(self) {
        if let Some((_, mut desk)) = DESK.take()
            && std::mem::take(&mut desk.calls)
            && let Some(log) = &desk.log
        {
            log.lead_here();
        }
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        drop(DESK.take());
    }
}
