//! How late the machine itself is: a thread on each core that wants to wake every millisecond and does nothing else.
//!
//! A core that the machine's host takes away for a tenth of a second delays whatever waits for it. Without this beside them,
//! the slowest of many thousand requests say little about the server that answered them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::tally::Latencies;

const EVERY: Duration = Duration::from_millis(1);

/// Watches until it is stopped or dropped.
pub struct Canary {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<Latencies>>,
}

impl Canary {
    pub fn start() -> Canary {
        let stop = Arc::new(AtomicBool::new(false));
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let watch = |core| {
            let stop = Arc::clone(&stop);
            thread::spawn(move || watch(core, &stop))
        };
        let threads = (0..cores).map(watch).collect();
        Canary { stop, threads }
    }

    /// By how much they were late, all cores together.
    pub fn stop(mut self) -> Latencies {
        self.stop.store(true, Relaxed);
        let mut late = Latencies::default();
        for thread in self.threads.drain(..) {
            late.add(&thread.join().unwrap_or_default());
        }
        late
    }
}

impl Drop for Canary {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
    }
}

fn watch(core: usize, stop: &AtomicBool) -> Latencies {
    // Where it may not choose its core, it is as good as any thread.
    let _ = env::os::stay_on_core(core);
    let mut late = Latencies::default();
    while !stop.load(Relaxed) {
        let due = Instant::now() + EVERY;
        thread::sleep(EVERY);
        late.record(due.elapsed().as_nanos() as u64);
    }
    late
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_core_is_watched_until_it_is_stopped() {
        let canary = Canary::start();
        let stop = Arc::clone(&canary.stop);
        drop(canary);
        assert!(stop.load(Relaxed));
        let late = watch(0, &AtomicBool::new(true));
        assert_eq!(late.count(), 0);
    }
}
