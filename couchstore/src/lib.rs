//! couchstore files: documents in append-only B+trees, one header for each commit.
//!
//!     |hdr|..bodies, nodes..|hdr|..bodies, nodes..|hdr|
//!                 ╰──────────◀╯  ╰────◀───────────◀╯   a header's roots reach back over everything before it
//!
//! A commit appends: bodies, the leaves they change, the nodes above those, a header. Nothing written is changed again
//! but one byte a commit, the marker that turns a durable header into *the* header. So a reader at a header needs no
//! lock, a crash finds the file whole at the last header, and older headers stay readable until compaction.
//!
//! This crate has not heard of vBuckets, threads or time; what it reads and writes goes through [`env::File`].
//! [`kv`] alone knows what the key-value service puts into the metadata that is opaque here.

#![forbid(unsafe_code)]

mod batch;
mod btree;
pub mod check;
mod copy;
mod couch;
mod doc;
mod error;
mod format;
mod fuzz;
mod header;
pub mod inspect;
pub mod kv;
mod offline;
mod runs;
mod source;
pub mod vbstate;

pub use batch::{Batch, CommitOutcome, Doc};
pub use btree::{Kind, Reduce, Root};
pub use copy::Copy;
pub use couch::{Couch, Snapshot};
pub use doc::DocInfo;
pub use error::{Error, Result, Step};
pub use format::{Checksum, META_SNAPPY, Version};
pub use fuzz::fuzz_open;
pub use header::{Header, Mode, Previous};
pub use offline::compact;
pub use runs::Spill;
