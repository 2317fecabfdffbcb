//! The line on stderr that shows a run is alive.

use std::collections::BTreeMap;
use std::io::{IsTerminal, Write};
use std::time::Duration;

use metrics::{Snapshot, Timings, show_duration};

use crate::load::Until;

/// Once a second: throughput and p99 of that second.
pub struct Progress {
    live: bool,
    /// The line is rewritten in place; elsewhere each is a line of its own.
    terminal: bool,
    until: Until,
    began: Duration,
    next: Duration,
    ops: u64,
    seen: BTreeMap<Duration, u64>,
}

const INTERVAL: Duration = Duration::from_secs(1);

impl Progress {
    pub fn new(live: bool, until: Until, now: Duration) -> Progress {
        let terminal = std::io::stderr().is_terminal();
        Progress { live, terminal, until, began: now, next: now + INTERVAL, ops: 0, seen: BTreeMap::new() }
    }

    /// When there is something to show.
    pub fn next(&self) -> Duration {
        self.next
    }

    pub fn show(&mut self, now: Duration, ops: u64, errors: u64, timings: &Timings) {
        if now < self.next {
            return;
        }
        let took = now - self.next + INTERVAL;
        let p99 = self.latest(&timings.snapshot()).percentile(99.0);
        let per_s = (ops - self.ops) as f64 / took.as_secs_f64();
        self.ops = ops;
        self.next = now + INTERVAL;
        if !self.live {
            return;
        }
        let elapsed = (now - self.began).as_secs();
        let end = match self.until {
            Until::For(time) => format!("{elapsed} of {} s", time.as_secs()),
            Until::Ops(all) | Until::OpsWithin(all, _) => format!("{elapsed} s, {ops} of {all}"),
        };
        let text = format!("{end}: {per_s:.0} ops/s, p99 {}, {errors} errors", show_duration(p99));
        // Nothing depends on whether anybody reads this.
        let _ = if self.terminal {
            write!(std::io::stderr(), "\r\x1b[K{text}")
        } else {
            writeln!(std::io::stderr(), "{text}")
        };
    }

    pub fn end(&self) {
        if self.live && self.terminal {
            let _ = write!(std::io::stderr(), "\r\x1b[K");
        }
    }

    /// What was recorded since the last time.
    fn latest(&mut self, all: &Snapshot) -> Snapshot {
        let counts: BTreeMap<Duration, u64> = all.buckets().map(|(from, _, n)| (from, n)).collect();
        let new: Vec<_> =
            counts.iter().map(|(from, n)| (*from, n - self.seen.get(from).copied().unwrap_or(0))).collect();
        self.seen = counts;
        Snapshot::from_buckets(new.into_iter(), Duration::ZERO, all.max())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_second_is_judged_by_itself() {
        let timings = Timings::new();
        let mut progress = Progress::new(false, Until::Ops(9), Duration::ZERO);
        (0..100).for_each(|_| timings.record(Duration::from_millis(50)));
        assert!(progress.latest(&timings.snapshot()).percentile(99.0) >= Duration::from_millis(50));
        (0..100).for_each(|_| timings.record(Duration::from_micros(100)));
        assert!(progress.latest(&timings.snapshot()).percentile(99.0) < Duration::from_millis(1));
    }
}
