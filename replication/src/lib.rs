//! Streams of changes: what one connection of the replication protocol wants, and what it is sent.
//!
//! ```text
//!     changelog ──followers──▶ ┐
//!                              ├─▶ Stream ─▶ Producer ── pull ──▶ the connection's output
//!     vBucket's file ─pieces─▶ ┘      ▲
//!                                     └── a bell: "look again"
//! ```
//!
//! A stream reads the changelog, it is never called back. When the changelog does not reach back far enough, it reads one
//! commit of the vBucket's file first; when its consumer is slow, it is left behind and does so again. So what a consumer
//! costs is bounded, and does not depend on how far behind it is.
//!
//! The other end is a [`Consumer`]: it follows the active vBuckets of one peer and has the engine apply what it is sent.
//!
//! Everything here is driven from outside: requests and the time are handed in, frames are taken out as there is room for
//! them. This crate has not heard of sockets, threads or users.

#![forbid(unsafe_code)]

mod consumer;
mod dress;
mod filter;
mod flow;
mod inbox;
mod producer;
mod pulse;
mod registry;
mod rollback;
mod snapshot;
mod stats;
mod stream;
mod takeover;
mod terms;

pub use consumer::{Broken, Consumer, ConsumerFace, Place};
pub use filter::Filter;
pub use inbox::Wake;
pub use producer::{Producer, Pulled, Refusal};
pub use registry::{Face, Registry, StreamFace, Totals};
pub use rollback::{History, Verdict, decide};
pub use stats::METRICS;
pub use stream::StreamState;
