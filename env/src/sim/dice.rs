//! Randomness that repeats: splitmix64, small enough to be its own documentation.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::Rng;

const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// Spreads `x` over 64 bits; a bijection.
pub fn mix(x: u64) -> u64 {
    let x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ x >> 31
}

/// One owner's stream of numbers.
#[derive(Clone)]
pub struct Dice(u64);

impl Dice {
    pub fn new(seed: u64) -> Dice {
        Dice(mix(seed ^ STEP))
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(STEP);
        mix(self.0)
    }

    /// A number below `n`; 0 if `n` is 0. The bias is below n / 2^64.
    pub fn below(&mut self, n: u64) -> u64 {
        if n == 0 { 0 } else { self.next() % n }
    }

    pub fn coin(&mut self) -> bool {
        self.next() & 1 == 1
    }
}

/// Randomness from a seed; clones share the stream. Not for secrets.
#[derive(Clone)]
pub struct SimRng(Arc<AtomicU64>);

impl SimRng {
    pub fn new(seed: u64) -> SimRng {
        SimRng(Arc::new(AtomicU64::new(mix(!seed))))
    }

    /// The same numbers from here on, drawn apart.
    pub fn fork(&self) -> SimRng {
        SimRng(Arc::new(AtomicU64::new(self.0.load(Relaxed))))
    }
}

impl Rng for SimRng {
    fn fill(&self, bytes: &mut [u8]) {
        for chunk in bytes.chunks_mut(8) {
            let word = mix(self.0.fetch_add(STEP, Relaxed).wrapping_add(STEP)).to_be_bytes();
            chunk.copy_from_slice(&word[..chunk.len()]);
        }
    }
}
