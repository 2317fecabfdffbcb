//! The simulated environment: a disk that forgets what was not synced, a clock that moves when told, and
//! random numbers that repeat.
//!
//! A crash test runs a workload, cuts the power before each of its I/Os in turn, and looks at what a
//! restarted program finds. [`cut_everywhere`] is that loop; [`FaultPlan`] makes single calls fail; what
//! may survive a cut is told at [`Fate`]. With one thread, the same seed gives the same run, byte for byte.
//! With several, the order in which their calls arrive is theirs, and so is the n of the n-th call.

mod dice;
mod disk;
mod fault;
mod storage;
mod time;

use std::sync::Arc;

use crate::Env;

pub use dice::SimRng;
pub use disk::Fate;
pub use fault::{Fault, FaultPlan, Noise, Op, Rule};
pub use storage::{SimStorage, is_power_off};
pub use time::SimClock;

/// The test's side of a simulated [`Env`]: the same storage, clock and randomness, with their levers.
#[derive(Clone)]
pub struct Sim {
    pub storage: SimStorage,
    pub clock: SimClock,
    pub rng: SimRng,
    seed: u64,
}

/// An empty disk, a clock at 2026-01-01, and randomness, all from `seed`.
pub fn env(seed: u64) -> (Env, Sim) {
    let sim = Sim { storage: SimStorage::new(seed), clock: SimClock::new(), rng: SimRng::new(seed), seed };
    (sim.env(), sim)
}

impl Sim {
    /// What a program started now would be given.
    pub fn env(&self) -> Env {
        Env {
            storage: Arc::new(self.storage.clone()),
            clock: Arc::new(self.clock.clone()),
            rng: Arc::new(self.rng.clone()),
        }
    }

    /// Cuts the power and starts again: see [`SimStorage::power_cut`]. Clock and randomness go on.
    pub fn power_cut(&mut self, fate: impl Into<Fate>) -> Env {
        self.storage = self.storage.power_cut(fate);
        self.env()
    }

    /// Kills the program and starts it again: see [`SimStorage::kill`]. Clock and randomness go on.
    pub fn kill(&mut self) -> Env {
        self.storage = self.storage.kill();
        self.env()
    }

    /// A world like this one that goes its own way: see [`SimStorage::fork`].
    pub fn fork(&self) -> Sim {
        Sim { storage: self.storage.fork(), clock: self.clock.fork(), rng: self.rng.fork(), seed: self.seed }
    }
}

/// How many mutating I/Os `workload` does in a fork of `start` without faults: the cut points are `0..=count`.
pub fn count_ops<T>(start: &Sim, workload: impl FnOnce(&Env) -> T) -> u64 {
    let sim = start.fork();
    workload(&sim.env());
    sim.storage.mutations()
}

/// Runs [`cut_at`] before each mutating I/O of `workload` in turn, and after the last.
pub fn cut_everywhere<T>(start: &Sim, fates: u64, workload: impl Fn(&Env) -> T, check: impl Fn(&mut Sim, &T)) {
    for cut in 0..=count_ops(start, &workload) {
        cut_at(start, cut, fates, &workload, &check);
    }
}

/// Runs `workload` in a fork of `start` and cuts the power before its mutating I/O number `cut` (0 is the
/// first). The workload meets errors from there on and must return all the same, say with what it was
/// acknowledged. `check` gets that and the restarted machine: once with every un-synced change lost, once with
/// every one kept, and `fates` times with a seeded mix. Given to another `cut_everywhere`, that machine is
/// where recovery is crashed in its turn.
///
/// When `check` panics, the seed, the cut and the fate are printed to stderr.
pub fn cut_at<T>(start: &Sim, cut: u64, fates: u64, workload: impl FnOnce(&Env) -> T, check: impl Fn(&mut Sim, &T)) {
    let sim = start.fork();
    sim.storage.arm(FaultPlan::new().cut_before(cut));
    let outcome = workload(&sim.env());
    let seeded = (0..fates).map(|n| Fate::Seeded(dice::mix(start.seed ^ dice::mix(cut << 16 | n))));
    for fate in [Fate::LoseUnsynced, Fate::KeepUnsynced].into_iter().chain(seeded) {
        let _witness = Witness { seed: start.seed, cut, fate, last: sim.storage.last_mutation() };
        let mut restarted = sim.fork();
        restarted.power_cut(fate);
        check(&mut restarted, &outcome);
    }
}

/// Tells which crash it was when a check panics.
struct Witness {
    seed: u64,
    cut: u64,
    fate: Fate,
    last: Option<String>,
}

impl Drop for Witness {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let Witness { seed, cut, fate, last } = self;
            let last = last.as_deref().unwrap_or("nothing");
            eprintln!("seed {seed}: power cut before I/O {cut} (last done: {last}), fate {fate:?}");
        }
    }
}

#[cfg(test)]
mod tests;
