//! What is inside a value: whether it is JSON, its compression, its extended attributes, and sub-document paths.
//! ```text
//! stored value ── snappy::inflate ──▶ [xattr section][body] ── subdoc ──▶ fragments, or a new value
//! ```
//! Pure functions, bytes in and bytes out. This crate has not heard of sockets, buckets, locks or time: what a virtual
//! attribute tells about a document is handed in as [`subdoc::Facts`], and what only the sequencer knows is left as
//! [`subdoc::MacroPatch`]es for it to fill.

#![forbid(unsafe_code)]

mod fuzz;
pub mod json;
pub mod snappy;
pub mod subdoc;
pub mod xattr;

pub use fuzz::{fuzz_json, fuzz_subdoc, fuzz_xattr};

/// The checksum shown as `$document.value_crc32c`: CRC-32C of the inflated body, without xattrs.
pub fn value_crc32c(body: &[u8]) -> u32 {
    crc32c::crc32c(body)
}
