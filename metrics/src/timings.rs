//! Durations, sorted into buckets as they come.
//!
//! Buckets are log-linear over microseconds: the first 16 are one microsecond wide, then every power of two is cut into
//! 16. So a bucket is never wider than a sixteenth of the durations in it, from 1 µs to 71 minutes, in 464 words.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// Each power of two is cut into `1 << CUT_BITS` buckets.
const CUT_BITS: u32 = 4;
const CUTS: usize = 1 << CUT_BITS;
/// Durations of `1 << RANGE_BITS` microseconds and more share the last bucket.
const RANGE_BITS: u32 = 32;
pub(crate) const BUCKET_COUNT: usize = (RANGE_BITS - CUT_BITS + 1) as usize * CUTS;
const _: () = assert!(BUCKET_COUNT * 8 < 4096 - 64, "a histogram stays under a page");

/// A histogram that any thread may add to without waiting.
///
/// 1. A duration is in exactly one bucket; the count is the sum of the buckets, so the two cannot disagree.
/// 2. A snapshot taken while others record may miss the newest ones, never invents any.
/// 3. No memory is taken before the first record.
pub struct Timings {
    cells: OnceLock<Box<Cells>>,
}

struct Cells {
    counts: [AtomicU64; BUCKET_COUNT],
    sum_ns: AtomicU64,
    max_ns: AtomicU64,
}

impl Timings {
    pub const fn new() -> Timings {
        Timings { cells: OnceLock::new() }
    }

    #[inline]
    pub fn record(&self, duration: Duration) {
        let cells = self.cells.get_or_init(Cells::boxed);
        let ns = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        cells.counts[bucket_of(ns / 1_000)].fetch_add(1, Relaxed);
        cells.sum_ns.fetch_add(ns, Relaxed);
        // Looked at first: a new maximum is rare, and reading shares the line where writing would not.
        if ns > cells.max_ns.load(Relaxed) {
            cells.max_ns.fetch_max(ns, Relaxed);
        }
    }

    pub fn snapshot(&self) -> Snapshot {
        let Some(cells) = self.cells.get() else { return Snapshot::default() };
        Snapshot {
            counts: cells.counts.iter().map(|count| count.load(Relaxed)).collect(),
            sum_ns: cells.sum_ns.load(Relaxed),
            max_ns: cells.max_ns.load(Relaxed),
        }
    }

    /// Bytes taken beside the value itself.
    pub fn heap_bytes(&self) -> usize {
        self.cells.get().map_or(0, |cells| size_of_val(&**cells))
    }
}

impl Default for Timings {
    fn default() -> Timings {
        Timings::new()
    }
}

impl Cells {
    #[cold]
    fn boxed() -> Box<Cells> {
        Box::new(Cells {
            counts: [const { AtomicU64::new(0) }; BUCKET_COUNT],
            sum_ns: AtomicU64::new(0),
            max_ns: AtomicU64::new(0),
        })
    }
}

/// What a [`Timings`] held at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// Empty (nothing recorded) or `BUCKET_COUNT` long.
    counts: Vec<u64>,
    sum_ns: u64,
    max_ns: u64,
}

impl Snapshot {
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    pub fn sum(&self) -> Duration {
        Duration::from_nanos(self.sum_ns)
    }

    /// The longest duration, exactly.
    pub fn max(&self) -> Duration {
        Duration::from_nanos(self.max_ns)
    }

    pub fn mean(&self) -> Duration {
        Duration::from_nanos(self.sum_ns.checked_div(self.count()).unwrap_or(0))
    }

    /// A duration that `percent` (0 to 100) of the records do not exceed: never under the true one, and over it by a
    /// sixteenth plus a microsecond at most. Zero if nothing was recorded.
    pub fn percentile(&self, percent: f64) -> Duration {
        let count = self.count();
        let rank = ((percent / 100.0 * count as f64).ceil() as u64).clamp(1, count.max(1));
        let mut seen = 0;
        for (bucket, n) in self.counts.iter().enumerate() {
            seen += n;
            if seen >= rank {
                return if bucket + 1 == BUCKET_COUNT { self.max() } else { upper_edge(bucket).min(self.max()) };
            }
        }
        Duration::ZERO
    }

    /// How many records were shorter than `edge`, which must be a power of two microseconds to be exact.
    pub fn count_below(&self, edge: Duration) -> u64 {
        let end = bucket_of(edge.as_micros() as u64);
        self.counts.iter().take(end).sum()
    }

    /// A snapshot put together again from what [`Snapshot::buckets`], `sum` and `max` said, perhaps in another process.
    pub fn from_buckets(buckets: impl Iterator<Item = (Duration, u64)>, sum: Duration, max: Duration) -> Snapshot {
        let mut counts = vec![0; BUCKET_COUNT];
        buckets.for_each(|(from, n)| counts[bucket_of(from.as_micros() as u64)] += n);
        Snapshot { counts, sum_ns: sum.as_nanos() as u64, max_ns: max.as_nanos() as u64 }
    }

    /// Adds `other`'s records to these.
    pub fn merge(&mut self, other: &Snapshot) {
        if self.counts.is_empty() {
            self.counts = vec![0; other.counts.len()];
        }
        for (mine, theirs) in self.counts.iter_mut().zip(&other.counts) {
            *mine += theirs;
        }
        self.sum_ns = self.sum_ns.saturating_add(other.sum_ns);
        self.max_ns = self.max_ns.max(other.max_ns);
    }

    /// The non-empty buckets, shortest first: from (inclusive), to (exclusive), how many.
    pub fn buckets(&self) -> impl Iterator<Item = (Duration, Duration, u64)> {
        let filled = self.counts.iter().enumerate().filter(|(_, n)| **n > 0);
        filled.map(|(bucket, n)| (lower_edge(bucket), upper_edge(bucket), *n))
    }
}

fn bucket_of(us: u64) -> usize {
    if us < CUTS as u64 {
        return us as usize;
    }
    let us = us.min((1 << RANGE_BITS) - 1);
    let power = us.ilog2();
    let cut = (us >> (power - CUT_BITS)) as usize & (CUTS - 1);
    (power - CUT_BITS + 1) as usize * CUTS + cut
}

fn lower_edge(bucket: usize) -> Duration {
    let us = match bucket / CUTS {
        0 => bucket as u64,
        power => ((CUTS + bucket % CUTS) as u64) << (power - 1),
    };
    Duration::from_micros(us)
}

fn upper_edge(bucket: usize) -> Duration {
    lower_edge(bucket + 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn every_bucket_starts_where_the_one_before_ends() {
        for bucket in 0..BUCKET_COUNT {
            let (from, to) = (lower_edge(bucket).as_micros() as u64, upper_edge(bucket).as_micros() as u64);
            assert!(from < to);
            assert_eq!((bucket_of(from), bucket_of(to - 1)), (bucket, bucket));
        }
    }

    #[test]
    fn a_snapshot_survives_the_trip_through_its_buckets() {
        let timings = Timings::new();
        [0, 1, 17, 999, 1_000_000, 5_000_000_000].iter().for_each(|us| timings.record(Duration::from_micros(*us)));
        let snapshot = timings.snapshot();
        let buckets = snapshot.buckets().map(|(from, _, n)| (from, n));
        assert_eq!(Snapshot::from_buckets(buckets, snapshot.sum(), snapshot.max()), snapshot);
    }

    #[test]
    fn an_unused_histogram_takes_no_memory_and_a_used_one_less_than_a_page() {
        let timings = Timings::new();
        assert_eq!((timings.heap_bytes(), timings.snapshot().count()), (0, 0));
        timings.record(Duration::from_micros(3));
        assert!((1..4096).contains(&timings.heap_bytes()));
    }

    #[test]
    fn durations_beyond_the_range_are_counted_and_their_maximum_kept() {
        let timings = Timings::new();
        timings.record(Duration::from_secs(86_400));
        timings.record(Duration::MAX);
        let snapshot = timings.snapshot();
        assert_eq!(snapshot.count(), 2);
        assert_eq!(snapshot.percentile(99.0), Duration::from_nanos(u64::MAX));
    }

    #[test]
    fn nothing_is_lost_when_threads_record_together() {
        let timings = Timings::new();
        std::thread::scope(|scope| {
            for thread in 0..4u64 {
                let timings = &timings;
                scope
                    .spawn(move || (0..10_000).for_each(|i| timings.record(Duration::from_micros(thread * 1_000 + i))));
            }
        });
        assert_eq!(timings.snapshot().count(), 40_000);
        assert_eq!(timings.snapshot().max(), Duration::from_micros(12_999));
    }

    proptest! {
        #[test]
        fn a_percentile_is_never_under_the_truth_and_little_over(
            mut ns in prop::collection::vec(0u64..1 << 40, 1..300), percent in 0.0f64..=100.0,
        ) {
            let timings = Timings::new();
            ns.iter().for_each(|ns| timings.record(Duration::from_nanos(*ns)));
            ns.sort_unstable();
            let rank = ((percent / 100.0 * ns.len() as f64).ceil() as usize).clamp(1, ns.len());
            let truth = ns[rank - 1];
            let told = timings.snapshot().percentile(percent).as_nanos() as u64;
            prop_assert!(told >= truth && told <= truth + truth / 16 + 1_000, "told {told}, truth {truth}");
        }

        #[test]
        fn merging_equals_recording_into_one(
            left in prop::collection::vec(0u64..1 << 45, 0..50), right in prop::collection::vec(0u64..1 << 45, 0..50),
        ) {
            let (one, two, both) = (Timings::new(), Timings::new(), Timings::new());
            left.iter().for_each(|ns| { one.record(Duration::from_nanos(*ns)); both.record(Duration::from_nanos(*ns)) });
            right.iter().for_each(|ns| { two.record(Duration::from_nanos(*ns)); both.record(Duration::from_nanos(*ns)) });
            let mut merged = one.snapshot();
            merged.merge(&two.snapshot());
            prop_assert_eq!(merged, both.snapshot());
        }
    }
}
