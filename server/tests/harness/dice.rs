//! Chance that can be thrown again: set SETTEE_TEST_SEED to the seed a failed test printed.

use std::time::SystemTime;

pub struct Dice(u64);

impl Dice {
    /// The seed the environment names, or a new one; printed, and so shown when the test fails.
    pub fn new(test: &str) -> Dice {
        let now = || SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("after 1970").as_nanos() as u64;
        let seed = match std::env::var("SETTEE_TEST_SEED") {
            Ok(text) => text.parse().expect("SETTEE_TEST_SEED is a whole number"),
            Err(_) => now(),
        };
        println!("{test}: SETTEE_TEST_SEED={seed}");
        Dice(seed)
    }

    /// Dice of their own for a part of the test, so that threads do not share luck.
    pub fn split(&mut self) -> Dice {
        Dice(self.roll())
    }

    /// splitmix64.
    pub fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// 0 up to, not including, `end`.
    pub fn below(&mut self, end: usize) -> usize {
        (self.roll() % end as u64) as usize
    }

    /// Once in `n` throws.
    pub fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    pub fn bytes(&mut self, len: usize) -> Vec<u8> {
        (0..len).map(|_| self.roll() as u8).collect()
    }
}
