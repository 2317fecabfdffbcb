//! The bytes of a segment: two header slots, then records. `docs/FORMAT.md` tells the same in prose.
//!
//! ```text
//! 0         4096      8192                         batch_at of r3, r4
//! [ slot 0 ][ slot 1 ][ r1 ][ r2   ]               ▼
//!                                     … [ r2 ][ r3 ][ r4 ][ zeros, or what an earlier life left ]
//!                                          ▲─ prev ─┘
//! ```

use crc32c::{crc32c, crc32c_append};
use types::{BucketUuid, Seqno, VbId};

pub const MAGIC: &[u8; 8] = b"SETTEELG";
/// Of the segments written. Version 1 had the values of commits, and is read as well.
pub const VERSION: u32 = 2;

/// What is written at once begins and ends at a multiple of this: a page, and what direct I/O asks for.
pub const BLOCK_BYTES: u64 = 4096;
/// Where the first record of a segment is: after the two header slots.
pub const DATA_AT: u64 = 2 * BLOCK_BYTES;
pub const SEGMENT_HEADER_BYTES: usize = 64;
pub const RECORD_HEADER_BYTES: usize = 64;
/// Records begin at multiples of this.
pub const ALIGN: usize = 8;

/// One life of a segment file. A file is used again and again; each time under a new sequence number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentHeader {
    /// Random, the same in all segments of a log.
    pub log_id: u128,
    /// Grows by one from segment to segment, from 1; never used twice.
    pub sequence: u64,
    /// The oldest segment that was needed when this was written.
    pub oldest: u64,
    pub segment_bytes: u64,
}

/// What a header slot holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Slot {
    Valid(SegmentHeader),
    /// Never written.
    Blank,
    /// A checksum that is right and a version that is not ours.
    Version(u32),
    Bad,
}

impl SegmentHeader {
    pub fn encode(&self) -> [u8; SEGMENT_HEADER_BYTES] {
        let mut bytes = [0; SEGMENT_HEADER_BYTES];
        bytes[0..8].copy_from_slice(MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_be_bytes());
        bytes[16..32].copy_from_slice(&self.log_id.to_be_bytes());
        bytes[32..40].copy_from_slice(&self.sequence.to_be_bytes());
        bytes[40..48].copy_from_slice(&self.oldest.to_be_bytes());
        bytes[48..56].copy_from_slice(&self.segment_bytes.to_be_bytes());
        let crc = header_crc(&bytes);
        bytes[12..16].copy_from_slice(&crc.to_be_bytes());
        bytes
    }

    pub fn decode(bytes: &[u8; SEGMENT_HEADER_BYTES]) -> Slot {
        if bytes.iter().all(|byte| *byte == 0) {
            return Slot::Blank;
        }
        if bytes[0..8] != MAGIC[..] || be32(bytes, 12) != header_crc(bytes) {
            return Slot::Bad;
        }
        if !(1..=VERSION).contains(&be32(bytes, 8)) {
            return Slot::Version(be32(bytes, 8));
        }
        Slot::Valid(SegmentHeader {
            log_id: be128(bytes, 16),
            sequence: be64(bytes, 32),
            oldest: be64(bytes, 40),
            segment_bytes: be64(bytes, 48),
        })
    }

    pub fn seed(&self) -> u32 {
        seed(self.log_id, self.sequence)
    }
}

fn header_crc(bytes: &[u8; SEGMENT_HEADER_BYTES]) -> u32 {
    crc32c_append(crc32c(&bytes[..12]), &bytes[16..])
}

/// What every checksum in a segment starts from, so that a record of an earlier life of the file is none of this one.
pub fn seed(log_id: u128, sequence: u64) -> u32 {
    crc32c_append(crc32c(&log_id.to_be_bytes()), &sequence.to_be_bytes())
}

/// What a record is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum RecordKind {
    /// Changes of one vBucket, or its record, or both.
    Changes = 1,
    /// The log was closed in order. Proves that all before it was whole.
    Close = 2,
    /// Nothing: what comes next does not fit into the segment, and no segment is left without a record.
    Skip = 3,
}

/// The body begins with a vBucket record.
pub const FLAG_VB_RECORD: u8 = 1;
/// What the items came in: see [`crate::Past`].
pub const FLAG_PAST: u8 = 2;

/// What stands before a record's body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordHeader {
    /// The checksum of the record before, be it in another segment.
    pub prev: u32,
    /// Where the write began that brought this record. Everything before was durable then.
    pub batch_at: u32,
    /// Drawn anew each time the log is opened, so that no record is ever written twice with the same bytes.
    pub life: u32,
    pub body_len: u32,
    pub body_crc: u32,
    pub vb: VbId,
    pub kind: RecordKind,
    pub flags: u8,
    pub bucket: BucketUuid,
    /// Of the items, or `last` + 1 if there are none.
    pub first: Seqno,
    pub last: Seqno,
}

impl RecordHeader {
    /// The header as it stands at offset `at`, and its checksum.
    pub fn encode(&self, seed: u32, at: u64) -> ([u8; RECORD_HEADER_BYTES], u32) {
        let mut bytes = [0; RECORD_HEADER_BYTES];
        bytes[0..4].copy_from_slice(&tag(seed, at).to_be_bytes());
        bytes[8..12].copy_from_slice(&self.prev.to_be_bytes());
        bytes[12..16].copy_from_slice(&self.batch_at.to_be_bytes());
        bytes[16..20].copy_from_slice(&self.life.to_be_bytes());
        bytes[20..24].copy_from_slice(&self.body_len.to_be_bytes());
        bytes[24..28].copy_from_slice(&self.body_crc.to_be_bytes());
        bytes[28..30].copy_from_slice(&self.vb.0.to_be_bytes());
        bytes[30] = self.kind as u8;
        bytes[31] = self.flags;
        bytes[32..48].copy_from_slice(&self.bucket.0.to_be_bytes());
        bytes[48..56].copy_from_slice(&self.first.0.to_be_bytes());
        bytes[56..64].copy_from_slice(&self.last.0.to_be_bytes());
        let crc = crc32c_append(seed, &bytes[8..]);
        bytes[4..8].copy_from_slice(&crc.to_be_bytes());
        (bytes, crc)
    }

    /// The header at offset `at` of the segment with this seed, and its checksum; `None` if there is none.
    pub fn decode(bytes: &[u8], seed: u32, at: u64) -> Option<(RecordHeader, u32)> {
        let bytes: &[u8; RECORD_HEADER_BYTES] = bytes.first_chunk()?;
        let crc = be32(bytes, 4);
        if be32(bytes, 0) != tag(seed, at) || crc32c_append(seed, &bytes[8..]) != crc {
            return None;
        }
        let kind = match bytes[30] {
            1 => RecordKind::Changes,
            2 => RecordKind::Close,
            3 => RecordKind::Skip,
            _ => return None,
        };
        let header = RecordHeader {
            prev: be32(bytes, 8),
            batch_at: be32(bytes, 12),
            life: be32(bytes, 16),
            body_len: be32(bytes, 20),
            body_crc: be32(bytes, 24),
            vb: VbId(u16::from_be_bytes([bytes[28], bytes[29]])),
            kind,
            flags: bytes[31],
            bucket: BucketUuid(be128(bytes, 32)),
            first: Seqno(be64(bytes, 48)),
            last: Seqno(be64(bytes, 56)),
        };
        Some((header, crc))
    }

    /// From this record to the next, in bytes.
    pub fn stride(&self) -> u64 {
        (RECORD_HEADER_BYTES as u64 + u64::from(self.body_len)).next_multiple_of(ALIGN as u64)
    }
}

/// Ties a record to its place, so that bytes copied elsewhere are none.
pub fn tag(seed: u32, at: u64) -> u32 {
    seed ^ at as u32
}

pub fn be32(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

pub fn be64(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

fn be128(bytes: &[u8], at: usize) -> u128 {
    u128::from_be_bytes(bytes[at..at + 16].try_into().expect("sixteen bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_segment_header_is_read_back_and_any_flipped_bit_is_seen() {
        let header = SegmentHeader { log_id: 7 << 90, sequence: 9, oldest: 3, segment_bytes: 1 << 26 };
        let bytes = header.encode();
        assert_eq!(SegmentHeader::decode(&bytes), Slot::Valid(header));
        for bit in 0..bytes.len() * 8 {
            let mut flipped = bytes;
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(SegmentHeader::decode(&flipped), Slot::Bad, "bit {bit}");
        }
        assert_eq!(SegmentHeader::decode(&[0; 64]), Slot::Blank);
    }

    proptest! {
        #[test]
        fn a_record_header_is_valid_in_its_place_only(
            numbers in (any::<u32>(), any::<u32>(), any::<u32>(), 0u32..1 << 26, any::<u16>(), any::<u64>()),
            seed in any::<u32>(), other_seed in any::<u32>(), at in 0u64..1 << 29, flip in 0usize..512,
        ) {
            let (prev, batch_at, life, body_len, vb, first) = numbers;
            let header = RecordHeader {
                prev, batch_at, life, body_len, body_crc: !prev, vb: VbId(vb), kind: RecordKind::Changes, flags: 1,
                bucket: BucketUuid(u128::from(first) << 60), first: Seqno(first), last: Seqno(!first),
            };
            let (mut bytes, crc) = header.encode(seed, at);
            prop_assert_eq!(RecordHeader::decode(&bytes, seed, at), Some((header, crc)));
            prop_assert_eq!(RecordHeader::decode(&bytes, seed, at + 8), None);
            if seed != other_seed {
                prop_assert_eq!(RecordHeader::decode(&bytes, other_seed, at), None);
            }
            bytes[flip / 8] ^= 1 << (flip % 8);
            prop_assert_eq!(RecordHeader::decode(&bytes, seed, at), None);
            prop_assert_eq!(RecordHeader::decode(&bytes[..63], seed, at), None);
        }
    }
}
