//! What the store counts: process-wide histograms for the registry, and a few numbers for each bucket.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use metrics::{Counter, Gauge, Timings};
use types::VbId;

metrics::metrics! {
    /** How long flushes of one vBucket took, from reading its changelog to the moved marks. */
    pub static FLUSHES: Timings = "flush_duration";
    /** How long the commit step of flushes took: both syncs of the vBucket's file. */
    pub static COMMITS: Timings = "commit_duration";
    /** Changes taken into flushes, before deduplication. Divided by the number of flushes: the batch. */
    pub static FLUSHED_ITEMS: Counter = "flushed_items";
    /** Bytes of changes taken into flushes. */
    pub static FLUSHED_BYTES: Counter = "flushed_bytes";
    /** Bytes of keys and values that clients had changed and that are in files now, each version once. Divides the bytes written. */
    pub static ACCEPTED_BYTES: Counter = "accepted_bytes";
    /** Bytes appended to vBucket files by flushes. With log_disk_bytes: all that was written for accepted_bytes. */
    pub static FILE_BYTES: Counter = "file_bytes_written";
    /** How long reading a group of documents from one vBucket's file took. */
    pub static FETCHES: Timings = "background_fetch_duration";
    /** Flushes that failed and were put back to be tried again. */
    pub static FLUSH_FAILURES: Counter = "flush_failures";
    /** Syncs that failed; each stops one vBucket's writes until a restart. */
    pub static SYNC_FAILURES: Counter = "sync_failures";
    /** Documents asked from files. */
    pub static FETCHED: Counter = "background_fetch_documents";
    /** Reads of documents that failed. */
    pub static FETCH_FAILURES: Counter = "background_fetch_failures";
    /** vBucket files opened: the first time, or with no file cache. */
    pub static FILE_OPENS: Counter = "file_cache_opens";
    /** vBucket files opened again after they were closed to make room. Growing as fast as flushes: files_max is too low. */
    pub static FILE_REOPENS: Counter = "file_cache_reopens";
    /** Uses of a vBucket file that found it open. */
    pub static FILE_CACHE_HITS: Counter = "file_cache_hits";
    /** vBucket files closed to make room for another, or because fewer are to be kept. */
    pub static FILE_CLOSES_FOR_ROOM: Counter = "file_cache_closes_for_room";
    /** Of those, the ones given back because descriptors ran out. */
    pub static FILES_GIVEN_BACK: Counter = "file_cache_given_back";
    /** vBucket files kept open now. */
    pub static FILES_KEPT: Gauge = "file_cache_kept";
    /** How long compactions of one vBucket took, from their beginning to the swap. */
    pub static COMPACTIONS: Timings = "compaction_duration";
    /** How long compactions kept everybody else from writing the vBucket's file, at their end. */
    pub static COMPACTION_FINISHES: Timings = "compaction_exclusive_duration";
    /** Bytes of the files that were compacted. */
    pub static COMPACTION_READ_BYTES: Counter = "compaction_read_bytes";
    /** Bytes that compactions have written, so far. */
    pub static COMPACTION_WRITTEN_BYTES: Counter = "compaction_written_bytes";
    /** Compactions that failed. The file stays as it was. */
    pub static COMPACTION_FAILURES: Counter = "compaction_failures";
    /** Compactions that were cancelled. */
    pub static COMPACTION_CANCELS: Counter = "compaction_cancels";
    /** Tombstones that compactions left out. */
    pub static TOMBSTONES_PURGED: Counter = "tombstones_purged";
    /** Compactions under way. */
    pub static COMPACTIONS_RUNNING: Gauge = "compactions_running";
    /** vBuckets that wait for a compaction. */
    pub static COMPACTIONS_QUEUED: Gauge = "compactions_queued";
}

/// Counts of one bucket.
#[derive(Default)]
pub(crate) struct BucketCounters {
    pub commits: AtomicU64,
    pub items_written: AtomicU64,
    pub items_deduplicated: AtomicU64,
    pub value_bytes_written: AtomicU64,
    pub flush_failures: AtomicU64,
    pub sync_failures: AtomicU64,
    pub files_created: AtomicU64,
    pub fetched: AtomicU64,
    pub fetch_failures: AtomicU64,
    pub compactions: AtomicU64,
    pub compaction_failures: AtomicU64,
}

impl BucketCounters {
    pub fn add(&self, counter: impl Fn(&BucketCounters) -> &AtomicU64, n: u64) {
        counter(self).fetch_add(n, Relaxed);
    }
}

/// One reading of a bucket's store. Taking it touches no file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BucketStoreStats {
    /// vBuckets queued for a flush or being flushed.
    pub queued_vbs: u64,
    /// vBuckets whose flush failed and waits to be tried again.
    pub waiting_vbs: u64,
    /// Changes that are in no file yet.
    pub pending_items: u64,
    pub commits: u64,
    pub items_written: u64,
    /// Changes that a newer change of the same key in the same flush made unnecessary.
    pub items_deduplicated: u64,
    pub value_bytes_written: u64,
    pub flush_failures: u64,
    pub sync_failures: u64,
    pub files_created: u64,
    pub fetched: u64,
    pub fetch_failures: u64,
    /// vBuckets that are not written any more, and why.
    pub poisoned: Vec<(VbId, String)>,
    /// Sum of the vBucket files' sizes at their last commits, in bytes.
    pub file_bytes: u64,
    /// Of these, what the last commits need. The rest is garbage, which compaction gives back.
    pub live_bytes: u64,
    pub compactions: u64,
    pub compaction_failures: u64,
    pub disk_full: bool,
}
