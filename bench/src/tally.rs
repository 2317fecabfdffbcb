//! What a run came to.

use std::collections::BTreeMap;
use std::time::Duration;

use hdrhistogram::Histogram;
use metrics::{Snapshot, draw, show_duration};
use serde_json::{Map, Value, json};

/// Longest latency told apart; longer ones count as this.
const LONGEST_NS: u64 = 600_000_000_000;

/// Latencies in ns, to three digits.
#[derive(Clone, Debug)]
pub struct Latencies(Histogram<u64>);

impl Default for Latencies {
    fn default() -> Latencies {
        Latencies(Histogram::new_with_bounds(1, LONGEST_NS, 3).expect("bounds that fit"))
    }
}

impl Latencies {
    pub fn record(&mut self, ns: u64) {
        self.0.saturating_record(ns.max(1));
    }

    pub fn add(&mut self, other: &Latencies) {
        self.0.add(&other.0).expect("all have the same bounds");
    }

    pub fn count(&self) -> u64 {
        self.0.len()
    }

    /// Those longer than `ns`, as exactly as they are told apart.
    pub fn count_above(&self, ns: u64) -> u64 {
        self.count() - self.0.count_between(0, ns)
    }

    /// In µs, to the tenth.
    pub fn percentile_us(&self, percent: f64) -> f64 {
        tenths(self.0.value_at_quantile(percent / 100.0) as f64 / 1e3)
    }

    pub fn mean_us(&self) -> f64 {
        tenths(self.0.mean() / 1e3)
    }

    pub fn max_us(&self) -> f64 {
        tenths(self.0.max() as f64 / 1e3)
    }

    /// As [`metrics::draw`] wants it: coarser.
    fn snapshot(&self) -> Snapshot {
        let buckets = self.0.iter_recorded().map(|v| (Duration::from_nanos(v.value_iterated_to()), v.count_at_value()));
        let count = self.count();
        let sum = Duration::from_nanos((self.0.mean() * count as f64) as u64);
        Snapshot::from_buckets(buckets, sum, Duration::from_nanos(self.0.max()))
    }

    /// A line of percentiles, then a histogram.
    pub fn draw(&self) -> String {
        if self.count() == 0 {
            return "no samples\n".to_owned();
        }
        let mut out = format!("{} samples, mean {}", self.count(), show_us(self.mean_us()));
        for (name, percent) in [("p50", 50.0), ("p90", 90.0), ("p99", 99.0), ("p99.9", 99.9), ("p99.99", 99.99)] {
            out += &format!(", {name} {}", show_us(self.percentile_us(percent)));
        }
        out += &format!(", max {}\n", show_us(self.max_us()));
        let bars = draw(&self.snapshot());
        out + bars.split_once('\n').map_or("", |(_, bars)| bars)
    }

    /// The latency fields of a row.
    pub fn fields(&self, row: &mut Map<String, Value>) {
        if self.count() == 0 {
            return;
        }
        row.insert("mean_us".into(), json!(self.mean_us()));
        for (name, percent) in [("p50_us", 50.0), ("p99_us", 99.0), ("p999_us", 99.9), ("p9999_us", 99.99)] {
            row.insert(name.into(), json!(self.percentile_us(percent)));
        }
        row.insert("max_us".into(), json!(self.max_us()));
    }
}

/// Microseconds as people read them.
pub fn show_us(us: f64) -> String {
    show_duration(Duration::from_nanos((us * 1e3) as u64))
}

pub fn tenths(number: f64) -> f64 {
    (number * 10.0).round() / 10.0
}

/// What one thread counted, or all of them together.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    /// Answered without an error, misses included.
    pub ops: u64,
    pub misses: u64,
    pub errors: BTreeMap<String, u64>,
    pub latencies: Latencies,
    /// How much later than intended operations of an open loop were sent.
    pub sent_late: Latencies,
    /// When the last answer came, in ns since the run's epoch.
    pub last_ns: u64,
    /// Sent and not answered when the run ended.
    pub unfinished: u64,
    /// How long the oldest of them had waited.
    pub unfinished_oldest_ns: u64,
    pub connections_lost: u64,
    /// Requests that a server did not have the key of, and that were sent again elsewhere.
    pub turned_away: u64,
}

impl Tally {
    pub fn add(&mut self, other: &Tally) {
        self.ops += other.ops;
        self.misses += other.misses;
        for (name, count) in &other.errors {
            *self.errors.entry(name.clone()).or_default() += count;
        }
        self.latencies.add(&other.latencies);
        self.sent_late.add(&other.sent_late);
        self.last_ns = self.last_ns.max(other.last_ns);
        self.unfinished += other.unfinished;
        self.unfinished_oldest_ns = self.unfinished_oldest_ns.max(other.unfinished_oldest_ns);
        self.connections_lost += other.connections_lost;
        self.turned_away += other.turned_away;
    }

    pub fn error(&mut self, words: &str) {
        match self.errors.get_mut(words) {
            Some(count) => *count += 1,
            None => {
                self.errors.insert(words.to_owned(), 1);
            }
        }
    }

    pub fn error_count(&self) -> u64 {
        self.errors.values().sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn of(ns: &[u64]) -> Latencies {
        let mut latencies = Latencies::default();
        ns.iter().for_each(|ns| latencies.record(*ns));
        latencies
    }

    #[test]
    fn a_row_has_the_contracts_fields_and_none_without_samples() {
        let mut row = Map::new();
        Latencies::default().fields(&mut row);
        assert!(row.is_empty());
        of(&(1..=10_000).map(|us| us * 1_000).collect::<Vec<_>>()).fields(&mut row);
        let near = |name: &str, us: f64| {
            let told = row[name].as_f64().unwrap();
            assert!((told - us).abs() <= us / 1_000.0 + 0.1, "{name}: {told}");
        };
        near("mean_us", 5_000.5);
        near("p50_us", 5_000.0);
        near("p99_us", 9_900.0);
        near("p999_us", 9_990.0);
        near("p9999_us", 9_999.0);
        near("max_us", 10_000.0);
    }

    #[test]
    fn the_drawing_tells_exact_percentiles_and_shows_every_sample() {
        let text = of(&[100_000, 100_000, 100_000, 9_000_000]).draw();
        assert!(text.starts_with("4 samples, mean 2.3"), "{text}");
        assert_eq!(text.lines().count(), 3, "{text}");
        assert_eq!(Latencies::default().draw(), "no samples\n");
    }

    #[test]
    fn what_is_longer_than_the_longest_still_counts() {
        assert_eq!(of(&[u64::MAX, 0]).count(), 2);
    }

    proptest! {
        #[test]
        fn percentiles_are_right_to_three_digits(
            mut ns in prop::collection::vec(1_000u64..1 << 38, 1..200), percent in 0.1f64..100.0,
        ) {
            let told = of(&ns).percentile_us(percent) * 1e3;
            ns.sort_unstable();
            let rank = ((percent / 100.0 * ns.len() as f64).ceil() as usize).clamp(1, ns.len());
            // Rounding of the rank may go to a neighbour.
            let (low, high) = (ns[rank.saturating_sub(2)] as f64, ns[rank.min(ns.len() - 1)] as f64);
            prop_assert!(told >= low * 0.998 - 100.0 && told <= high * 1.002 + 100.0, "{told}: {low}..{high}");
        }

        #[test]
        fn threads_add_up(
            left in prop::collection::vec(1u64..1 << 38, 0..50), right in prop::collection::vec(1u64..1 << 38, 0..50),
        ) {
            let mut sum = of(&left);
            sum.add(&of(&right));
            let both = of(&[left, right].concat());
            let facts = |l: &Latencies| (l.count(), l.percentile_us(50.0), l.max_us());
            prop_assert_eq!(facts(&sum), facts(&both));
        }
    }
}
