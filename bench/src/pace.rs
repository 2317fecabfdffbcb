//! When operations begin that do not wait for each other.
//!
//! A client that sends its next request when the last is answered goes quiet just when the server is slow, and so never
//! measures how slow. Here the moments are fixed beforehand: operation `i` begins at `i / rate`. If no connection is
//! free then, it is sent late, and its latency still counts from when it should have been.

/// Moments at a constant rate, in ns since the run's epoch.
///
/// 1. The moments do not depend on when anybody asked for them.
/// 2. Each is given out once, in order, and not before its time.
#[derive(Clone, Debug)]
pub struct Pace {
    start_ns: u64,
    per_second: f64,
    /// Which of the moments is next.
    next: u64,
    /// Moments of this value and every `lanes`-th after it are ours.
    lanes: u64,
}

impl Pace {
    /// The share `lane` of `lanes` threads in `per_second` operations.
    pub fn new(start_ns: u64, per_second: f64, lane: u64, lanes: u64) -> Pace {
        assert!(per_second > 0.0 && lane < lanes, "a rate above zero, shared by those who are there");
        Pace { start_ns, per_second, next: lane, lanes }
    }

    /// When the next operation shall begin.
    pub fn next_ns(&self) -> u64 {
        self.start_ns + (self.next as f64 * 1e9 / self.per_second) as u64
    }

    /// The next moment, if it has come.
    pub fn take_due(&mut self, now_ns: u64) -> Option<u64> {
        let at = self.next_ns();
        if at > now_ns {
            return None;
        }
        self.next += self.lanes;
        Some(at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_are_even_and_come_in_time() {
        let mut pace = Pace::new(1_000, 1e6, 0, 1);
        assert_eq!(pace.take_due(999), None);
        let due: Vec<u64> = std::iter::from_fn(|| pace.take_due(4_500)).collect();
        assert_eq!(due, [1_000, 2_000, 3_000, 4_000]);
        assert_eq!(pace.next_ns(), 5_000);
    }

    #[test]
    fn lanes_share_the_moments_without_overlap() {
        let mut due: Vec<u64> = (0..3)
            .flat_map(|lane| {
                let mut pace = Pace::new(0, 1e9, lane, 3);
                std::iter::from_fn(move || pace.take_due(9)).collect::<Vec<_>>()
            })
            .collect();
        due.sort();
        assert_eq!(due, (0..10).collect::<Vec<u64>>());
    }

    /// Goal: a stall shows in the latency of all that should have been sent meanwhile. Method: one connection, a server
    /// that takes 1 ms but once 100 ms, a clock moved by hand.
    #[test]
    fn a_stall_is_charged_to_everything_that_had_to_wait() {
        let mut pace = Pace::new(0, 500.0, 0, 1);
        let (mut now, mut latencies) = (0, Vec::new());
        for op in 0..200 {
            now = now.max(pace.next_ns());
            let intended = pace.take_due(now).expect("its time has come");
            now += if op == 50 { 100_000_000 } else { 1_000_000 };
            latencies.push(now - intended);
        }
        assert_eq!(
            latencies.iter().filter(|ns| **ns <= 1_000_000).count(),
            101,
            "before the stall, and after catching up"
        );
        assert_eq!(latencies[50], 100_000_000);
        assert_eq!(latencies[51], 99_000_000, "sent 98 ms late");
        assert!(latencies[51..149].is_sorted_by(|a, b| a > b));
    }
}
