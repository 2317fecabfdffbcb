//! Reading records out of a segment's bytes, and telling a torn end from a damaged middle.
//!
//! One write is under way at a time, and it begins when everything before it is durable. So a power cut tears nothing but
//! the last write; and each record names where its write began. If a whole record is found beyond a place that cannot be
//! read, and its write began beyond that place too, then the place was durable once: it is damaged. Otherwise both are
//! pieces of one torn write, and nobody was told of it.

use crate::format::{ALIGN, BLOCK_BYTES, DATA_AT, RECORD_HEADER_BYTES, RecordHeader, be32, tag};

const BLOCK: usize = BLOCK_BYTES as usize;

/// A record found whole.
pub(crate) struct Found<'a> {
    pub at: u64,
    pub header: RecordHeader,
    pub crc: u32,
    pub body: &'a [u8],
}

/// Steps through the records of a segment, each linked to the one before.
pub(crate) struct Walk<'a> {
    bytes: &'a [u8],
    seed: u32,
    /// Where the next record is, or would be.
    pub at: u64,
    /// The checksum of the record before; `None` if there is nothing to compare with.
    pub prev: Option<u32>,
}

impl<'a> Walk<'a> {
    pub fn new(bytes: &'a [u8], seed: u32, prev: Option<u32>) -> Walk<'a> {
        Walk { bytes, seed, at: DATA_AT, prev }
    }

    /// The record that follows, if it is whole and follows indeed.
    pub fn next(&mut self) -> Option<Found<'a>> {
        let found = record_at(self.bytes, self.seed, self.at)?;
        if self.prev.is_some_and(|prev| prev != found.header.prev) {
            return None;
        }
        self.at += found.header.stride();
        self.prev = Some(found.crc);
        Some(found)
    }

    /// A record that proves that what should stand at `self.at` was durable once.
    pub fn witness(&self) -> Option<Found<'a>> {
        let last = self.bytes.len().checked_sub(RECORD_HEADER_BYTES)?;
        let blocks = (self.at as usize / BLOCK..=last / BLOCK).filter(|block| !is_zero(self.bytes, *block));
        blocks
            .flat_map(|block| (block * BLOCK..(block + 1) * BLOCK).step_by(ALIGN))
            .filter(|at| (self.at as usize..=last).contains(at))
            .filter(|at| be32(self.bytes, *at) == tag(self.seed, *at as u64))
            .filter_map(|at| record_at(self.bytes, self.seed, at as u64))
            .find(|found| u64::from(found.header.batch_at) > self.at)
    }
}

/// Most of a segment in its first life: no record begins there.
fn is_zero(bytes: &[u8], block: usize) -> bool {
    let end = bytes.len().min((block + 1) * BLOCK);
    bytes[block * BLOCK..end] == [0; BLOCK][..end - block * BLOCK]
}

/// The record at `at`, if its checksums are right.
pub(crate) fn record_at(bytes: &[u8], seed: u32, at: u64) -> Option<Found<'_>> {
    let start = usize::try_from(at).ok()?;
    let (header, crc) = RecordHeader::decode(bytes.get(start..)?, seed, at)?;
    let body = start + RECORD_HEADER_BYTES;
    let body = bytes.get(body..body.checked_add(header.body_len as usize)?)?;
    // The header, which is tied to its place, vouches for the body, which was checksummed before it had one.
    (crc32c::crc32c(body) == header.body_crc && u64::from(header.batch_at) <= at).then_some(Found {
        at,
        header,
        crc,
        body,
    })
}
