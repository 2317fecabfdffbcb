//! What the engine counts: for the whole node through `metrics`, and by bucket for the `STAT` command.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use metrics::Counter;

metrics::metrics! {
    /// Sync writes that were committed.
    pub static SYNC_WRITES_COMMITTED: Counter = "sync_writes_committed";
    /// Sync writes that were not durable in time.
    pub static SYNC_WRITES_ABORTED: Counter = "sync_writes_aborted";
    /// Documents whose expiry came.
    pub static DOCUMENTS_EXPIRED: Counter = "documents_expired";
    /// Requests that had to read the vBucket's file first.
    pub static REQUESTS_FETCHED: Counter = "requests_fetched";
    /// Writes refused because the bucket's quota was nearly used up.
    pub static WRITES_REFUSED_MEMORY: Counter = "writes_refused_memory";
    /// Values, or whole documents, dropped from memory because the file has them.
    pub static VALUES_EVICTED: Counter = "values_evicted";
    /// Tombstones dropped from memory because the file has them.
    pub static TOMBSTONES_DROPPED: Counter = "tombstones_dropped";
}

/// One bucket's count and the node's.
#[derive(Debug)]
pub struct Count {
    here: AtomicU64,
    everywhere: &'static Counter,
}

impl Count {
    fn of(everywhere: &'static Counter) -> Count {
        Count { here: AtomicU64::new(0), everywhere }
    }

    pub(crate) fn add(&self, n: u64) {
        if n > 0 {
            self.here.fetch_add(n, Relaxed);
            self.everywhere.add(n);
        }
    }

    pub fn get(&self) -> u64 {
        self.here.load(Relaxed)
    }
}

/// Counts of one bucket.
#[derive(Debug)]
pub struct Counters {
    pub expired: Count,
    pub commits: Count,
    pub aborts: Count,
    pub fetches: Count,
    pub refused_memory: Count,
    pub evicted: Count,
    pub tombstones_dropped: Count,
    pub pager_runs: AtomicU64,
}

impl Default for Counters {
    fn default() -> Counters {
        Counters {
            expired: Count::of(&DOCUMENTS_EXPIRED),
            commits: Count::of(&SYNC_WRITES_COMMITTED),
            aborts: Count::of(&SYNC_WRITES_ABORTED),
            fetches: Count::of(&REQUESTS_FETCHED),
            refused_memory: Count::of(&WRITES_REFUSED_MEMORY),
            evicted: Count::of(&VALUES_EVICTED),
            tombstones_dropped: Count::of(&TOMBSTONES_DROPPED),
            pager_runs: AtomicU64::new(0),
        }
    }
}
