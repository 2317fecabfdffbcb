//! Bytes to typed requests, replies to bytes. `wire` has not heard of sockets, engines, clocks or users: it is handed
//! slices and hands back values that borrow from them, so it can be fuzzed alone.
//!
//! ```text
//! bytes ─▶ FrameReader ─▶ Frame ─▶ parse ─▶ Request        Reply, Push ─▶ bytes
//! ```
//!
//! What a connection still has to check by itself, in the protocol's order: that it may run the opcode before
//! authentication ([`opcode::allowed_before_auth`]) goes before [`parse`]; inflating Snappy values, the collection's
//! existence, privileges, the bucket and the vBucket come after it.

#![forbid(unsafe_code)]

pub mod client;
pub mod dcp;
pub mod error_map;
pub mod frame;
pub mod frame_info;
mod fuzz;
pub mod hello;
pub mod kv;
pub mod opcode;
mod parse;
pub mod reply;
pub mod status;

pub use frame::{Close, Frame, FrameReader, Header, Magic, Next, Side};
pub use frame_info::{Durability, RequestFrames};
pub use fuzz::fuzz_frames;
pub use hello::{Feature, FeatureSet};
pub use kv::{Command, Key, Request, ResolvedKey};
pub use opcode::Opcode;
pub use parse::{ParseError, parse};
pub use reply::{Push, Reply};
pub use status::{Legacy, Status};
