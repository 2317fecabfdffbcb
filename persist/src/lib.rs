//! Persistence: what the engine's changelogs say becomes couchstore files, and the files become an engine again.
//!
//! ```text
//!     changelog ──▶ flusher ──▶ <vb>.couch.<rev>          marks move, a nudge tells
//!     engine    ◀── fetch, warm-up ◀──┘
//! ```
//! This crate owns the data directory's `buckets/`, decides when bytes are safe, and says so with two numbers a vBucket:
//! `durable` and `filed`. It has not heard of hash tables, sockets or clients.

#![forbid(unsafe_code)]

mod batch;
mod bucket;
mod changes;
mod codec;
mod commit;
mod compaction;
mod deletion;
mod drain;
mod error;
mod facts;
mod fetch;
mod file_cache;
mod filer;
mod flusher;
mod logger;
mod names;
mod queue;
mod recovery;
mod replay;
mod reserve;
mod rollback;
mod shared;
mod shared_sync;
mod spec;
pub mod stats;
mod store;
mod switch;
mod sync;
#[cfg(test)]
mod testing;
mod turn;
mod vb;

use std::time::Duration;

pub use bucket::{BucketStore, DeletedVb, RecoveredVb, WarmUp};
pub use changes::Changes;
pub use commit_log::stats::METRICS as LOG_METRICS;
pub use commit_log::{Driver as LogDriver, Inspection as LogInspection, LogStats, Way as LogWay};
pub use compaction::{
    COMPACTIONS_MAX, CompactionDone, CompactionOptions, CompactionProgress, CompactionReport, Phase, Purge, Trigger,
};
pub use couchstore::Version;
pub use drain::{Drain, Drained, Left};
pub use error::{Damage, Damages, StoreError, Verdict};
pub use file_cache::{FileCache, FileCacheStats};
pub use governor::{Governor, Held, Limits};
pub use queue::Urgency;
pub use spec::{BucketSpec, Compression, Eviction, WriteRules};
pub use stats::BucketStoreStats;
pub use store::Store;
pub use turn::Turn;
pub use vb::Nudge;

/// What is in a commit log's directory, which no server is using. Changes nothing.
pub fn inspect_log(env: &env::Env, dir: &std::path::Path) -> Result<LogInspection, StoreError> {
    commit_log::inspect(env, dir).map_err(StoreError::log)
}

/// How a store uses its commit log.
#[derive(Clone, Debug)]
pub struct LogOptions {
    /// Of each of its files. An item must fit. A multiple of 4096, from 16 KiB to 1 GiB.
    pub segment_bytes: u64,
    /// Of all files together, at least three segments. Bounds what a start after a crash must file first.
    pub bytes_max: u64,
    pub driver: LogDriver,
    /// How what is written becomes durable; `None`: whichever is found to be the fastest.
    pub way: Option<LogWay>,
    /// The age at which a change that is in the log goes to its vBucket's file.
    pub file_after: Duration,
    /// A bucket files the oldest of its changes sooner once they hold this much memory, or a quarter of its quota.
    pub unfiled_bytes_max: u64,
}

impl Default for LogOptions {
    fn default() -> LogOptions {
        LogOptions {
            segment_bytes: 64 << 20,
            bytes_max: 1 << 30,
            driver: LogDriver::Thread,
            way: None,
            file_after: Duration::from_secs(10),
            unfiled_bytes_max: 256 << 20,
        }
    }
}

impl LogOptions {
    pub(crate) fn of_files(&self) -> commit_log::Options {
        let LogOptions { segment_bytes, bytes_max: log_bytes_max, way, .. } = *self;
        commit_log::Options { segment_bytes, log_bytes_max, way }
    }
}

/// How a store works.
#[derive(Clone, Debug)]
pub struct Options {
    /// Flushes at a time; at least 1.
    pub writers: usize,
    /// vBuckets read from at a time; at least 1.
    pub readers: usize,
    /// A flush takes no further change once it has this many bytes of them.
    pub batch_bytes_max: usize,
    /// Of files made from now on; existing ones keep theirs.
    pub format: Version,
    /// vBucket files kept open for their next use; 0: none. See [`Store::set_files_max`].
    pub files_max: usize,
    /// Changes go to a log that all vBuckets share, and to the files later; `None`: to the files, each by itself.
    pub commit_log: Option<LogOptions>,
    pub compaction: CompactionOptions,
    pub governor: Limits,
    /// Disk space kept back for when there is none left; 0: none.
    pub reserve_bytes: u64,
    /// Go back to the newest readable commit of damaged files, as another history, instead of refusing to open.
    pub recovery: bool,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            writers: 4,
            readers: 4,
            batch_bytes_max: 16 << 20,
            format: Version::V13,
            files_max: 1024,
            commit_log: None,
            compaction: CompactionOptions::default(),
            governor: Limits::default(),
            reserve_bytes: 0,
            recovery: false,
        }
    }
}
