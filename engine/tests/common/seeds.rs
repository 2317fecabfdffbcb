//! What simulations are made of: chance that repeats, and seeds that are run one after the other and named when they fail.

use std::fmt;
use std::ops::Range;

/// SplitMix64: small, and the same everywhere.
pub struct Dice(pub u64);

impl Dice {
    pub fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % n
    }

    pub fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u64) as usize]
    }
}

/// What a simulation met, so that one that tries nothing is noticed.
pub trait Lived: fmt::Debug + Default {
    fn assert_thorough(&self);
}

/// Runs each of so many seeds, or those that the environment asks for. One alone need not meet everything.
pub fn for_each_seed<L: Lived>(count: u64, run: impl Fn(u64, &mut L)) {
    let number = |name| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let only = number("SETTEE_SIM_SEED");
    let seeds: Range<u64> = match only {
        Some(seed) => seed..seed + 1,
        None => 0..number("SETTEE_SIM_SEEDS").unwrap_or(count),
    };
    let mut lived = L::default();
    for seed in seeds.clone() {
        let _told = Told(seed);
        run(seed, &mut lived);
    }
    println!("seeds {seeds:?}: {lived:?}");
    if only.is_none() {
        lived.assert_thorough();
    }
}

struct Told(u64);

impl Drop for Told {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("seed {0}: SETTEE_SIM_SEED={0} runs it again", self.0);
        }
    }
}
