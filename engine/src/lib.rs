//! Buckets, vBuckets, hash tables, synchronous writes, expiry, locks.
//!
//! ```text
//!     Request ──▶ Bucket ──▶ VBucket: stripe of the hash table ──▶ changelog ──▶ (flusher, streams)
//!                    │             │                                   │
//!                    │             └── value only in the file: fetch ──┤
//!                    ◀──────────── Reply now, or Waiter later ◀── marks moved
//! ```
//!
//! The engine is the changelog's only writer. A request that can be answered from memory is answered at once; one that
//! must wait, for a value on disk or for durability, takes what it needs along and is finished by whoever brings the
//! news. The engine has not heard of sockets or byte order.

#![forbid(unsafe_code)]

mod bell;
mod beside;
mod bucket;
mod chain;
mod counters;
mod deletion;
mod durability;
mod engine;
mod expiry;
mod hash_table;
#[cfg(test)]
mod histories;
mod key_filter;
pub mod op;
mod ops;
mod owned;
mod pager;
mod passive;
mod replica;
mod roles;
mod rollback;
mod stats;
mod takeover;
mod terms;
mod value;
mod vbucket;
mod warm_up;

pub use bell::Bell;
pub use bucket::Bucket;
pub use chain::{CHAIN_NODES_MAX, Topology};
pub use counters::{Count, Counters, METRICS};
pub use engine::{Engine, Options};
pub use expiry::RELATIVE_MAX_S;
pub use op::{
    Body, Delta, End, Mailbox, Mutated, Op, OpError, OpResult, Outcome, Reply, Request, Requirement, StoreMode,
    SubdocLookup, SubdocMutate, SubdocResult, Ticket, Waiter, WithMeta, WithMetaMode,
};
pub use passive::AckNudge;
pub use replica::{ApplyError, Change, Given, ResumePoint, SnapshotMarker};
pub use roles::Role;
pub use rollback::RolledBack;
pub use stats::{KeyState, MemoryParts, ObserveSeqno, Observed, UnderWay};
pub use value::{SYSTEM_XATTR_BYTES_MAX, VALUE_BYTES_MAX};
pub use vbucket::VBucket;
pub use warm_up::{Recovered, WarmUpProgress};
