//! Time that moves only when a test moves it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::Duration;

use crate::Clock;

/// 2026-01-01T00:00:00Z.
const START_UNIX_NS: u64 = 1_767_225_600_000_000_000;

/// A clock under the test's thumb; clones show the same time.
#[derive(Clone)]
pub struct SimClock(Arc<Hands>);

struct Hands {
    unix_ns: AtomicU64,
    monotonic_ns: AtomicU64,
}

impl SimClock {
    #[expect(clippy::new_without_default, reason = "a clock is made once, by name")]
    pub fn new() -> SimClock {
        SimClock::at(START_UNIX_NS, 0)
    }

    /// The same time, moved apart.
    pub fn fork(&self) -> SimClock {
        SimClock::at(self.0.unix_ns.load(SeqCst), self.0.monotonic_ns.load(SeqCst))
    }

    /// Lets time pass, on both clocks.
    pub fn advance(&self, time: Duration) {
        let ns = time.as_nanos() as u64;
        self.0.unix_ns.fetch_add(ns, SeqCst);
        self.0.monotonic_ns.fetch_add(ns, SeqCst);
    }

    /// Sets the wall clock forward or back, as an administrator or a time server would; no time passes.
    pub fn jump_wall(&self, ns: i64) {
        let jump = |now: u64| Some(now.saturating_add_signed(ns));
        self.0.unix_ns.fetch_update(SeqCst, SeqCst, jump).expect("the jump is always a time");
    }

    fn at(unix_ns: u64, monotonic_ns: u64) -> SimClock {
        SimClock(Arc::new(Hands { unix_ns: AtomicU64::new(unix_ns), monotonic_ns: AtomicU64::new(monotonic_ns) }))
    }
}

impl Clock for SimClock {
    fn unix_ns(&self) -> u64 {
        self.0.unix_ns.load(SeqCst)
    }
    fn monotonic(&self) -> Duration {
        Duration::from_nanos(self.0.monotonic_ns.load(SeqCst))
    }
}
