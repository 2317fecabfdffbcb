//! The commit log: one sync for many vBuckets.
//!
//! A change is durable once it is in a vBucket's file, but a commit of a file costs two syncs, and there are a thousand
//! files. So changes of all vBuckets of all buckets are first appended to one log, synced together, and acknowledged; the
//! files catch up later, in large batches.
//!
//! ```text
//!     vb 7 ──┐ submit          ┌─ lead ─────────────┐
//!     vb 9 ──┼───────▶ waiting ─▶ write ─▶ sync ─────▶ durable(7, 9, 31) … filed ─▶ release ─▶ segment used again
//!     vb 31 ─┘            ▲    └─────────┬──────────┘
//!                         └─ arrives meanwhile: rides the next sync
//! ```
//! There is no timer and no smallest batch: whoever leads takes what waits and syncs at once.
//!
//! What it costs, in medians of turns taken in one run (`cargo bench -p commit_log`, 2026-11-21, two virtual cores, ext4 on
//! virtio, other programs at work on the same disk: believe the ratios). On a file written full of zeros before, µs:
//!
//! | bytes | write + fdatasync | RWF_DSYNC | O_DIRECT and O_DSYNC |
//! |---|---|---|---|
//! | 4 KiB | 263 | as fdatasync | 223 |
//! | 16 KiB | 198 | | 153 |
//! | 32 KiB | 115 | 113 | 99 |
//! | 64 KiB | 280 | | 220 |
//! | 256 KiB | 184 | 183 | 149 |
//!
//! That depends on the disk and on who else uses it, so a log measures it when it makes its first spare segment ready, in some
//! 20 ms beside the first writes, says what it found, and goes over to the fastest (`way`). RWF_DSYNC on each write does what
//! O_DSYNC does. io_uring is not among the ways: see `docs/performance.md`.
//!
//! Clients in a closed loop over 1024 vBuckets, one change of 512 bytes each, changes per second in the two quieter runs:
//!
//! | clients | task leads | thread leads | submitter leads |
//! |---|---|---|---|
//! | 1 | 10 k (100 µs a sync) | 10.5 k (95) | 11 k (91) |
//! | 64 | 35-43 k | 39-41 k | 18-38 k |
//! | 500 | 125-278 k | 149-306 k | 146-559 k |
//! | 2000 | 379-540 k | 230-510 k | 434-530 k |
//!
//! A task and a thread are alike within the noise; leading oneself saves the wake-up, and does not overlap with submitting.
//!
//! The bytes are told in `docs/FORMAT.md`. This crate has not heard of vBucket files, hash tables or clients.

#![forbid(unsafe_code)]

mod batch;
mod codec;
mod driver;
mod error;
mod format;
mod inspect;
mod log;
mod recovery;
mod scan;
mod segment;
mod space;
pub mod stats;
#[cfg(all(test, shuttle))]
mod storms;
mod way;
mod writer;

pub use codec::ReplicaPast;
pub use driver::Driver;
pub use error::LogError;
pub use inspect::{Inspection, RangeReport, SegmentReport, inspect};
pub use log::{Holder, Lead, Log, Observer, Past, Pressure, Submission, Synced};
pub use recovery::Replayed;
pub use space::{Key, Mark};
pub use stats::LogStats;
pub use way::{Medians, Way};

use format::{BLOCK_BYTES, DATA_AT};

/// How a log uses its disk.
#[derive(Clone, Debug)]
pub struct Options {
    /// Of each file. An item must fit. A multiple of 4096, from 16 KiB to 1 GiB.
    pub segment_bytes: u64,
    /// Of all files together, at least three segments. Bounds the time recovery takes.
    pub log_bytes_max: u64,
    /// How what is written becomes durable, as far as the file system lets us. `None`: whichever is found to be the fastest;
    /// until that is known, written and synced.
    pub way: Option<Way>,
}

impl Default for Options {
    fn default() -> Options {
        Options { segment_bytes: 64 << 20, log_bytes_max: 1 << 30, way: None }
    }
}

impl Options {
    /// Refuses what [`Log::open`] would not accept.
    pub fn check(&self) -> Result<(), LogError> {
        let Options { segment_bytes, log_bytes_max, .. } = self;
        if !(4 * BLOCK_BYTES..=1 << 30).contains(segment_bytes) || segment_bytes % BLOCK_BYTES != 0 {
            let what = format!("segments of {segment_bytes} bytes: give a multiple of 4096 from 16384 to {}", 1 << 30);
            return Err(LogError::BadOptions(what));
        }
        if self.segments_max() < 3 {
            let what = format!("{log_bytes_max} bytes are fewer than three segments of {segment_bytes}");
            return Err(LogError::BadOptions(what));
        }
        Ok(())
    }

    /// Until it is known which is the fastest.
    pub(crate) fn first_way(&self) -> Way {
        self.way.unwrap_or(Way::WriteAndSync)
    }

    pub(crate) fn segments_max(&self) -> usize {
        (self.log_bytes_max / self.segment_bytes) as usize
    }
}

const _: () = assert!(DATA_AT < 4 * BLOCK_BYTES);
