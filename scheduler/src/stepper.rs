//! Pools without threads: a test runs tasks one at a time, and time passes when the test says so.

use std::sync::Arc;
use std::time::Duration;

use env::Clock;
use env::sim::SimClock;
use types::rank::Rank;
use types::sync::Mutex;

use crate::core::Core;
use crate::pools::{PoolKind, Pools};

/// More runs than this without a pause are a task that wakes itself forever.
const RUNS_MAX: usize = 1_000_000;

/// Which of the ready tasks a step runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Readers before writers before the rest, each pool in its own order.
    InTurn,
    /// Any of them, chosen from this seed: every order that threads could have produced, sooner or later.
    Seeded(u64),
}

/// Drives [`Pools`] that have no threads. Tasks, handles and `Pools` behave as with threads; only who runs them differs.
/// Steps are taken by one thread at a time, never from within a task.
pub struct Stepper {
    pools: Arc<Pools>,
    core: Arc<Core>,
    clock: SimClock,
    dice: Option<Mutex<u64>>,
}

impl Stepper {
    /// `clock`: the one of the simulated `Env` the tasks were given.
    pub fn new(clock: &SimClock, order: Order) -> Stepper {
        let core = Arc::new(Core::new(Arc::new(clock.clone()), true));
        let dice = match order {
            Order::InTurn => None,
            Order::Seeded(seed) => Some(Mutex::ranked(Rank::RunQueue, seed)),
        };
        Stepper { pools: Pools::stepped(core.clone()), core, clock: clock.clone(), dice }
    }

    pub fn pools(&self) -> Arc<Pools> {
        self.pools.clone()
    }

    /// Runs one ready task. False: none is ready. Tasks whose deadline has come are ready. A task's panic goes on to the
    /// caller.
    pub fn step(&self) -> bool {
        self.core.wake_due(self.core.timers.take_due(self.clock.monotonic()));
        match &self.dice {
            None => step_in_order(&self.core),
            Some(dice) => self.step_by(dice),
        }
    }

    /// Steps until nothing is ready, and tells how many runs that took. Panics after a million.
    pub fn run_until_idle(&self) -> usize {
        let mut runs = 0;
        while self.step() {
            runs += 1;
            assert!(runs < RUNS_MAX, "still busy after {runs} runs: {}", self.busiest());
        }
        runs
    }

    /// Lets time pass, from deadline to deadline; whatever is ready, now or at one of them, runs. Tells how many runs.
    pub fn advance(&self, time: Duration) -> usize {
        let end = self.clock.monotonic() + time;
        let mut runs = self.run_until_idle();
        while let Some(next) = self.next_deadline().filter(|next| *next <= end) {
            self.clock.advance(next.saturating_sub(self.clock.monotonic()));
            runs += self.run_until_idle();
        }
        self.clock.advance(end.saturating_sub(self.clock.monotonic()));
        runs + self.run_until_idle()
    }

    /// The next moment at which anything happens by itself. `None` with nothing ready: an idle server.
    pub fn next_deadline(&self) -> Option<Duration> {
        self.core.timers.first()
    }

    /// How many tasks are ready.
    pub fn ready(&self) -> usize {
        self.core.pools.iter().map(|pool| pool.stats().ready).sum()
    }

    fn step_by(&self, dice: &Mutex<u64>) -> bool {
        let ready = self.ready();
        if ready == 0 {
            return false;
        }
        let mut nth = (roll(&mut dice.lock()) % ready as u64) as usize;
        for kind in PoolKind::ALL {
            let here = self.core.pool(kind).stats().ready;
            if nth < here {
                return step_in(&self.core, kind, Some(nth));
            }
            nth -= here;
        }
        false
    }

    fn busiest(&self) -> String {
        let tasks = self.core.stats().tasks;
        let busiest = tasks.iter().max_by_key(|task| task.runs.get());
        busiest.map_or_else(String::new, |task| format!("most runs by {} ({})", task.name, task.runs.get()))
    }
}

/// One run, from the first pool that has something ready.
pub(crate) fn step_in_order(core: &Arc<Core>) -> bool {
    PoolKind::ALL.into_iter().any(|kind| step_in(core, kind, None))
}

fn step_in(core: &Arc<Core>, kind: PoolKind, nth: Option<usize>) -> bool {
    let Some((due, cell)) = core.pool(kind).take(nth) else { return false };
    core.run(due, &cell);
    true
}

/// SplitMix64.
fn roll(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
