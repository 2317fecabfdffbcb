//! One changelog per vBucket: written only at its end, ordered by seqno, read through cursors.
//!
//! The engine is its only writer. The flusher and every replication stream are readers: each holds a [`Cursor`] and goes at
//! its own pace. What a reader has done it publishes as a [`Watermarks`] number. So "is it dirty?", "is it durable?",
//! "may it be evicted?" are never stored and kept in step; each is a comparison of a seqno with a mark.
//!
//! ```text
//!     engine ──append──▶ [ 17 ][ 18 ][ 19 ][ 20 ]            high = 20
//!                           ▲           ▲
//!                        flusher     stream                  durable, filed ≤ flusher's cursor
//! ```
//!
//! This crate has not heard of files, sockets or threads.

#![forbid(unsafe_code)]

mod follow;
mod log;
mod record;
mod snapshot;
mod watermark;

pub use follow::{Allowance, Follower};
pub use log::{Changelog, Cursor, NotTaken, Slice, Stamp};
pub use record::{FailoverEntry, FailoverTable, VbRecord};
pub use snapshot::{Place, Snapshot, Snapshots};
pub use watermark::Watermarks;
