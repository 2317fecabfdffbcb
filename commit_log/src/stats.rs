//! What the log counts: process-wide histograms for the registry, and one log's numbers at a moment.

use metrics::{Counter, Timings};

metrics::metrics! {
    /** How long writes to the commit log took, from the first byte to durable. */
    pub static SYNCS: Timings = "log_sync_duration";
    /** How long the first submission of a batch waited until its write to the commit log began. */
    pub static WAITS: Timings = "log_wait_duration";
    /** Bytes made durable by one sync of the commit log, a byte shown as a microsecond. */
    pub static BATCH_BYTES: Timings = "log_batch_bytes";
    /** Records made durable by one sync of the commit log, a record shown as a microsecond. */
    pub static BATCH_RECORDS: Timings = "log_batch_records";
    /** Bytes of records written to the commit log. */
    pub static BYTES: Counter = "log_bytes";
    /** Bytes written to the commit log's files, with what fills up blocks. */
    pub static DISK_BYTES: Counter = "log_disk_bytes";
    /** Submissions taken into the commit log. */
    pub static SUBMITS: Counter = "log_submits";
    /** Times the commit log could not go on for want of room. */
    pub static FULL: Counter = "log_full";
    /** Commit log segments that were used again. */
    pub static RECYCLED: Counter = "log_segments_recycled";
    /** Commit log segment files that were begun. */
    pub static CREATED: Counter = "log_segments_created";
    /** Times the writer found no segment ready and had to make one itself. */
    pub static PREPARED_LATE: Counter = "log_segments_prepared_late";
}

/// One reading of a log. Taking it touches no file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LogStats {
    /// How what is written becomes durable.
    pub way: &'static str,
    /// What the ways took when they were compared, in words; empty: they were not.
    pub way_medians: String,
    pub syncs: u64,
    /// Submissions taken.
    pub submits: u64,
    /// Records made durable.
    pub records: u64,
    /// Bytes of records made durable.
    pub bytes: u64,
    /// Bytes that wait for the next sync.
    pub waiting_bytes: u64,
    pub segments: u64,
    pub bytes_in_use: u64,
    pub bytes_max: u64,
    /// Why nothing is taken now, if so.
    pub full: Option<String>,
    pub poisoned: Option<String>,
}
