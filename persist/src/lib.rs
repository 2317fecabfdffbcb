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
mod codec;
mod commit;
mod error;
mod facts;
mod fetch;
mod flusher;
mod names;
mod queue;
mod recovery;
mod shared;
mod spec;
pub mod stats;
mod store;
mod sync;
#[cfg(test)]
mod testing;
mod vb;

pub use bucket::{BucketStore, RecoveredVb, WarmUp};
pub use couchstore::Version;
pub use error::{Damage, Damages, StoreError, Verdict};
pub use queue::Urgency;
pub use spec::{BucketSpec, Eviction};
pub use stats::BucketStoreStats;
pub use store::{Drained, Store};
pub use vb::Nudge;

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
    /// Go back to the newest readable commit of damaged files, as another history, instead of refusing to open.
    pub recovery: bool,
}

impl Default for Options {
    fn default() -> Options {
        Options { writers: 4, readers: 4, batch_bytes_max: 16 << 20, format: Version::V13, recovery: false }
    }
}
