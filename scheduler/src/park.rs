//! Sleeping and waking. Nothing else in this crate puts a thread to sleep: workers, the timer thread, and those who wait
//! for a task to end all do it in a [`Bay`].
//!
//! The mistake this module exists to rule out: look, find nothing, and go to sleep, while between the two somebody made a
//! change and saw nobody to wake. Such a sleeper used to be saved by a poll seconds later. There is no poll here.

use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::time::Duration;

use types::rank::Rank;
use types::sync::{AtomicBool, Mutex, park, thread};

/// A value, and the threads asleep until it changes.
///
/// No wake is lost, because what one looks at and who sleeps are one thing under one lock:
///
/// ```text
/// changer:   lock   change the value    take sleeper off the list   call it   unlock   unpark it
/// sleeper:   lock   look: nothing yet   put itself on the list                unlock   park until called
/// ```
///
/// 1. Whoever gets the lock second sees what the first one did: either the look finds the change, or the change finds the
///    sleeper. There is no third order.
/// 2. A call is a flag, set before the unpark. If both come before the park, the flag is seen and there is no park. So an
///    unpark meant for something else, or one swallowed by something else, does no harm.
/// 3. A call takes its sleeper off the list: two changes that each wake one wake two different sleepers.
/// 4. A sleeper that is woken looks again. A superfluous wake costs a look; it changes nothing.
/// 5. Nothing foreign runs under the lock but the caller's look or change, which must not take another.
///
/// Checked by loom in `a_change_made_while_the_last_sleeper_parks_is_seen`, beside the old order, which must fail.
pub struct Bay<S> {
    state: Mutex<State<S>>,
}

struct State<S> {
    value: S,
    /// Last come, first called: its caches are warm, and the others can sleep on.
    sleepers: Vec<Arc<Sleeper>>,
    wakeups: u64,
}

struct Sleeper {
    thread: thread::Thread,
    called: AtomicBool,
}

/// Whom a change concerns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wake {
    Nobody,
    One,
    Everybody,
}

/// What a look at the value came to.
pub enum Look<R> {
    /// The wait is over.
    Found(R),
    /// Sleep until called.
    Nothing,
    /// Sleep until called, but no longer than this.
    NothingFor(Duration),
}

impl<S> Bay<S> {
    pub fn new(value: S) -> Bay<S> {
        Bay { state: Mutex::ranked(Rank::RunQueue, State { value, sleepers: Vec::new(), wakeups: 0 }) }
    }

    /// Changes the value and calls whom it concerns.
    pub fn change<R>(&self, change: impl FnOnce(&mut S) -> (R, Wake)) -> R {
        let mut state = self.state.lock();
        let (result, wake) = change(&mut state.value);
        let called = state.call(wake);
        drop(state);
        called.unpark();
        result
    }

    /// Reads the value.
    pub fn read<R>(&self, read: impl FnOnce(&S) -> R) -> R {
        read(&self.state.lock().value)
    }

    /// Looks until something is found, asleep between looks.
    pub fn wait<R>(&self, mut look: impl FnMut(&mut S) -> Look<R>) -> R {
        let mut sleeper: Option<Arc<Sleeper>> = None;
        loop {
            let mut state = self.state.lock();
            if let Some(me) = &sleeper {
                state.wakeups += 1;
                // Still listed if the time was up, or if an unpark was not ours.
                state.sleepers.retain(|other| !Arc::ptr_eq(other, me));
            }
            let limit = match look(&mut state.value) {
                Look::Found(result) => return result,
                Look::Nothing => None,
                Look::NothingFor(limit) => Some(limit),
            };
            let me = sleeper.get_or_insert_with(Sleeper::here);
            me.called.store(false, Relaxed);
            state.sleepers.push(me.clone());
            drop(state);
            me.sleep(limit);
        }
    }

    /// The order of steps that was wrong: look, and only then, in a second step, go on the list. Kept so that the checkers
    /// are seen to find it, and to measure what the poll that hid it (`limit`) cost. Between the steps comes `pause`.
    #[cfg(any(loom, feature = "old-order"))]
    pub fn wait_in_old_order<R>(
        &self,
        limit: Option<Duration>,
        mut pause: impl FnMut(),
        mut look: impl FnMut(&mut S) -> Look<R>,
    ) -> R {
        loop {
            if let Look::Found(result) = look(&mut self.state.lock().value) {
                return result;
            }
            // A change made here calls nobody.
            pause();
            let me = Sleeper::here();
            self.state.lock().sleepers.push(me.clone());
            me.sleep(limit);
            self.state.lock().sleepers.retain(|other| !Arc::ptr_eq(other, &me));
        }
    }

    /// How often a sleeper woke, since the start.
    pub fn wakeups(&self) -> u64 {
        self.state.lock().wakeups
    }

    /// How many are asleep now.
    pub fn sleepers(&self) -> usize {
        self.state.lock().sleepers.len()
    }
}

/// Sleepers called under the lock, to be unparked after it.
struct Called {
    one: Option<Arc<Sleeper>>,
    others: Vec<Arc<Sleeper>>,
}

impl<S> State<S> {
    fn call(&mut self, wake: Wake) -> Called {
        let called = match wake {
            Wake::Nobody => Called { one: None, others: Vec::new() },
            Wake::One => Called { one: self.sleepers.pop(), others: Vec::new() },
            Wake::Everybody => Called { one: None, others: std::mem::take(&mut self.sleepers) },
        };
        called.each().for_each(|sleeper| sleeper.called.store(true, Release));
        called
    }
}

impl Called {
    fn each(&self) -> impl Iterator<Item = &Arc<Sleeper>> {
        self.one.iter().chain(&self.others)
    }

    fn unpark(&self) {
        self.each().for_each(|sleeper| sleeper.thread.unpark());
    }
}

impl Sleeper {
    fn here() -> Arc<Sleeper> {
        Arc::new(Sleeper { thread: thread::current(), called: AtomicBool::new(false) })
    }

    /// Returns when called; with a limit, perhaps sooner.
    fn sleep(&self, limit: Option<Duration>) {
        while !self.called.load(Acquire) {
            park(limit);
            if limit.is_some() {
                return;
            }
        }
    }
}
