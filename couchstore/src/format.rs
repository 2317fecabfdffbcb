//! Numbers, versions, blocks and checksums: what every other part of the format is spelled with.
//!
//! The file is cut in blocks of 4096 bytes, and the first byte of each is a marker that belongs to nobody's data:
//!
//!     |0.data.data.data.|0.data....(hole)|1.header........|0.data ...
//!
//! So a run of bytes that crosses a boundary is one byte longer on disk for each boundary. Sizes on disk never count
//! the markers; positions do.

/// Bytes in a block, its marker included.
pub const BLOCK_BYTES: u64 = 4096;
/// First byte of a block of data, or of a hole.
pub const MARKER_DATA: u8 = 0;
/// First byte of a block that starts with a header.
pub const MARKER_HEADER: u8 = 1;
/// First byte of block 0 if it describes how the file is encrypted.
pub const MARKER_METADATA: u8 = 2;

/// Bytes in front of a data chunk's payload: length and checksum.
pub const CHUNK_FRAME_BYTES: u64 = 8;
/// Set in the length of every data chunk, clear in that of a header.
pub const DATA_CHUNK_BIT: u32 = 1 << 31;

pub const ID_BYTES_MAX: u64 = (1 << 12) - 1;
pub const VALUE_BYTES_MAX: u64 = (1 << 28) - 1;
pub const CHUNK_BYTES_MAX: u64 = (1 << 31) - 1;
pub const POSITION_MAX: u64 = (1 << 47) - 1;
pub const U48_MAX: u64 = (1 << 48) - 1;
/// A header's body and its checksum.
pub const HEADER_BYTES_MAX: u64 = 1024;
/// Bit of a document's `content_meta`: the stored body is snappy.
pub const META_SNAPPY: u8 = 0x80;

/// The version byte of a header; it rules the whole file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Version {
    /// CRC-32.
    V11 = 11,
    /// CRC-32C.
    V12 = 12,
    /// Headers carry a timestamp. The newest that 7.x servers and tools read, so the one new files get.
    V13 = 13,
    /// Headers point at their predecessor; the file may be encrypted.
    V14 = 14,
}

impl Version {
    pub fn from_byte(byte: u8) -> Option<Version> {
        [Version::V11, Version::V12, Version::V13, Version::V14].into_iter().find(|v| v.byte() == byte)
    }

    pub const fn byte(self) -> u8 {
        self as u8
    }

    pub const fn checksum(self) -> Checksum {
        match self {
            Version::V11 => Checksum::Crc32,
            _ => Checksum::Crc32c,
        }
    }

    /// Bytes of a header before its roots.
    pub const fn header_fixed_bytes(self) -> usize {
        match self {
            Version::V11 | Version::V12 => 25,
            Version::V13 => 33,
            Version::V14 => 39,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Checksum {
    /// zlib's, polynomial 0xEDB88320 reflected.
    Crc32,
    /// Castagnoli's, polynomial 0x82F63B78 reflected.
    Crc32c,
}

impl Checksum {
    pub fn of(self, bytes: &[u8]) -> u32 {
        match self {
            Checksum::Crc32 => crc32fast::hash(bytes),
            Checksum::Crc32c => crc32c::crc32c(bytes),
        }
    }

    pub const fn name(self) -> &'static str {
        match self {
            Checksum::Crc32 => "CRC-32 (zlib)",
            Checksum::Crc32c => "CRC-32C",
        }
    }
}

/// Bytes being taken apart from the front; every taking fails rather than reads past the end.
#[derive(Clone, Copy)]
pub(crate) struct Fields<'a>(pub &'a [u8]);

impl<'a> Fields<'a> {
    pub fn take(&mut self, n: usize) -> Option<&'a [u8]> {
        let (head, rest) = self.0.split_at_checked(n)?;
        self.0 = rest;
        Some(head)
    }

    /// A big-endian number of `n` bytes, at most 8.
    pub fn uint(&mut self, n: usize) -> Option<u64> {
        Some(self.take(n)?.iter().fold(0, |value, &byte| value << 8 | u64::from(byte)))
    }

    /// Lengths of a key and its value, packed in 12 and 28 bits.
    pub fn lengths(&mut self) -> Option<(usize, usize)> {
        let packed = self.uint(5)?;
        Some(((packed >> 28) as usize, (packed & VALUE_BYTES_MAX) as usize))
    }
}

/// Appends the low `n` bytes of `value`, big-endian. What does not fit was refused before it got here.
pub(crate) fn put_uint(out: &mut Vec<u8>, value: u64, n: usize) {
    debug_assert!(n == 8 || value >> (8 * n) == 0, "{value} does not fit in {n} bytes");
    out.extend_from_slice(&value.to_be_bytes()[8 - n..]);
}

pub(crate) fn put_lengths(out: &mut Vec<u8>, key: usize, value: usize) {
    debug_assert!(key as u64 <= ID_BYTES_MAX && value as u64 <= VALUE_BYTES_MAX);
    put_uint(out, (key as u64) << 28 | value as u64, 5);
}

/// The first byte that data at `at` may use: one further if `at` is where a marker goes.
pub(crate) fn past_marker(at: u64) -> u64 {
    at + u64::from(at.is_multiple_of(BLOCK_BYTES))
}

/// How many bytes of the file `len` bytes of data take, from `at`, which is not a marker's place.
pub(crate) fn span(at: u64, len: u64) -> u64 {
    let room = BLOCK_BYTES - at % BLOCK_BYTES;
    len + len.saturating_sub(room).div_ceil(BLOCK_BYTES - 1)
}

/// Largest plain text that `compressed` bytes of snappy can stand for. Its densest element makes 64 bytes from 3, so a
/// claim beyond this is damage, and believing it would let a flipped bit ask for gigabytes.
pub(crate) fn inflated_bytes_max(compressed: usize) -> usize {
    compressed.saturating_mul(22).saturating_add(64)
}

/// Inflates raw snappy, or says what is wrong with it.
pub(crate) fn inflate(bytes: &[u8]) -> Result<Vec<u8>, &'static str> {
    let claimed = snap::raw::decompress_len(bytes).map_err(|_| "snappy data without a length")?;
    if claimed > inflated_bytes_max(bytes.len()) {
        return Err("snappy data claims an impossible length");
    }
    snap::raw::Decoder::new().decompress_vec(bytes).map_err(|_| "malformed snappy data")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_match_their_published_check_values() {
        assert_eq!(Checksum::Crc32c.of(b"123456789"), 0xe306_9283);
        assert_eq!(Checksum::Crc32.of(b"123456789"), 0xcbf4_3926);
        assert_eq!(Checksum::Crc32c.of(b""), 0);
        assert_eq!(Checksum::Crc32.of(b""), 0);
    }

    #[test]
    fn a_span_grows_by_one_byte_for_each_marker_inside_it() {
        assert_eq!(span(1, 4095), 4095);
        assert_eq!(span(1, 4096), 4097);
        assert_eq!(span(1, 8190), 8191);
        assert_eq!(span(1, 8191), 8193);
        assert_eq!(span(4095, 1), 1);
        assert_eq!(span(4095, 2), 3);
        assert_eq!(span(100, 0), 0);
    }

    #[test]
    fn lengths_are_packed_in_twelve_and_twenty_eight_bits() {
        let mut out = Vec::new();
        put_lengths(&mut out, 2, 41);
        assert_eq!(out, [0, 0x20, 0, 0, 0x29]);
        assert_eq!(Fields(&out).lengths(), Some((2, 41)));
        out.clear();
        put_lengths(&mut out, 4095, (1 << 28) - 1);
        assert_eq!(out, [0xff; 5]);
    }

    #[test]
    fn no_snappy_output_exceeds_the_bound_believed() {
        for len in [0, 1, 60, 64, 1000, 65_536, 1 << 20] {
            let packed = snap::raw::Encoder::new().compress_vec(&vec![7; len]).unwrap();
            assert!(len <= inflated_bytes_max(packed.len()), "{len}");
            assert_eq!(inflate(&packed).unwrap().len(), len);
        }
        assert!(inflate(&[0xff, 0xff, 0xff, 0xff, 0x0f, 0x00]).is_err());
    }
}
