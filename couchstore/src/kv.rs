//! What the key-value service keeps where the file format is silent: the metadata of each document, and the local
//! documents about collections. The state of the vBucket is in [`crate::vbstate`].

use types::{CollectionId, Datatype, DeleteSource, Level, Seqno};

use crate::format::{Fields, META_SNAPPY, put_uint};

/// Written into the low bits of byte 16 by every release, read by none.
const FLEX_CODE: u8 = 0x01;
const FLEX_DELETED_BY_EXPIRY: u8 = 0x80;
const OP_PENDING: u64 = 0;
const OP_COMMIT: u64 = 1;
const OP_ABORT: u64 = 2;

/// Bytes of metadata that cannot be understood. Carries what is wrong.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Malformed(pub String);

impl From<&str> for Malformed {
    fn from(what: &str) -> Malformed {
        Malformed(what.to_string())
    }
}

/// `rev_meta` of a document: 18 bytes, or 25 for a prepare or an abort.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RevMeta {
    pub cas: u64,
    /// Unix seconds. Alive: when it expires, 0 for never. Deleted: when it was.
    pub expiry: u32,
    /// The number a client sees.
    pub flags: u32,
    /// Means nothing for a document that is alive.
    pub delete_source: DeleteSource,
    pub datatype: Datatype,
    /// Set for what lives in the prepare namespace.
    pub sync: Option<Sync>,
}

/// A sync write that is not, or never was, committed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sync {
    Pending { level: Level, is_delete: bool },
    Abort { prepared: Seqno },
}

impl RevMeta {
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(25);
        put_uint(&mut out, self.cas, 8);
        put_uint(&mut out, u64::from(self.expiry), 4);
        put_uint(&mut out, u64::from(self.flags), 4);
        let by_expiry = self.delete_source == DeleteSource::Expiry;
        out.push(FLEX_CODE | if by_expiry { FLEX_DELETED_BY_EXPIRY } else { 0 });
        out.push(self.datatype.0);
        match self.sync {
            None => {}
            Some(Sync::Pending { level, is_delete }) => {
                put_uint(&mut out, OP_PENDING, 1);
                put_uint(&mut out, (level as u64) << 1 | u64::from(is_delete), 6);
            }
            Some(Sync::Abort { prepared }) => {
                put_uint(&mut out, OP_ABORT, 1);
                put_uint(&mut out, prepared.0 & crate::format::U48_MAX, 6);
            }
        }
        out
    }

    pub fn decode(bytes: &[u8]) -> Result<RevMeta, Malformed> {
        // 19 bytes: releases before 4.6 had one more, about resolving conflicts.
        if !matches!(bytes.len(), 18 | 19 | 25) {
            return Err(Malformed(format!("document metadata of {} bytes; 18, 19 or 25 are known", bytes.len())));
        }
        let mut fields = Fields(bytes);
        let mut uint = |n| fields.uint(n).ok_or(Malformed::from("document metadata too short"));
        let (cas, expiry, flags) = (uint(8)?, uint(4)? as u32, uint(4)? as u32);
        let (flex, datatype) = (uint(1)? as u8, Datatype(uint(1)? as u8));
        let delete_source = match flex & FLEX_DELETED_BY_EXPIRY {
            0 => DeleteSource::Explicit,
            _ => DeleteSource::Expiry,
        };
        let sync = match bytes.len() {
            25 => match (uint(1)?, uint(6)?) {
                (OP_PENDING, packed) => {
                    let level = Level::from_wire((packed >> 1 & 3) as u8);
                    let level = level.ok_or(Malformed::from("a prepare without a durability level"))?;
                    Some(Sync::Pending { level, is_delete: packed & 1 == 1 })
                }
                (OP_COMMIT, _) => None,
                (OP_ABORT, prepared) => Some(Sync::Abort { prepared: Seqno(prepared) }),
                (op, _) => return Err(Malformed(format!("sync-write operation {op} in document metadata"))),
            },
            _ => None,
        };
        Ok(RevMeta { cas, expiry, flags, delete_source, datatype, sync })
    }
}

/// `content_meta` to store a body of `body_bytes` with: bodies that are not snappy already are to be compressed.
pub fn content_meta(datatype: Datatype, body_bytes: usize) -> u8 {
    let kind = if datatype.has(Datatype::JSON) { 0 } else { 3 };
    let compress = body_bytes > 0 && !datatype.has(Datatype::SNAPPY);
    kind | if compress { META_SNAPPY } else { 0 }
}

/// The local document that counts what a collection has in the file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CollectionStats {
    pub item_count: u64,
    pub high_seqno: u64,
    /// Body, id and metadata of every entry, tombstones and prepares included.
    pub disk_bytes: u64,
}

impl CollectionStats {
    /// Id of the local document.
    pub fn id(collection: CollectionId) -> String {
        format!("|0x{:x}|", collection.0)
    }

    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(12);
        for mut value in [self.item_count, self.high_seqno, self.disk_bytes] {
            while value >= 0x80 {
                out.push(value as u8 | 0x80);
                value >>= 7;
            }
            out.push(value as u8);
        }
        out
    }

    /// Files from before 7.0 lack the third number; it reads as 0.
    pub fn decode(bytes: &[u8]) -> Result<CollectionStats, Malformed> {
        let mut rest = bytes;
        let (item_count, high_seqno) = (leb128(&mut rest)?, leb128(&mut rest)?);
        let disk_bytes = if rest.is_empty() { 0 } else { leb128(&mut rest)? };
        match rest {
            [] => Ok(CollectionStats { item_count, high_seqno, disk_bytes }),
            _ => Err("collection stats with something after them".into()),
        }
    }
}

fn leb128(rest: &mut &[u8]) -> Result<u64, Malformed> {
    let mut value = 0u64;
    for shift in (0..70).step_by(7) {
        let (&byte, after) = rest.split_first().ok_or(Malformed::from("collection stats end inside a number"))?;
        *rest = after;
        let bits = u64::from(byte & 0x7f);
        if shift == 63 && bits > 1 {
            break;
        }
        value |= bits << shift;
        if byte & 0x80 == 0 {
            return Ok(value);
        }
    }
    Err("a number in collection stats exceeds 64 bits".into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sync() -> impl Strategy<Value = Option<Sync>> {
        prop_oneof![
            Just(None),
            (1u8..=3, any::<bool>()).prop_map(|(level, is_delete)| Some(Sync::Pending {
                level: Level::from_wire(level).unwrap(),
                is_delete
            })),
            (0u64..1 << 48).prop_map(|seq| Some(Sync::Abort { prepared: Seqno(seq) })),
        ]
    }

    proptest! {
        #[test]
        fn metadata_read_back_is_what_was_written(
            cas: u64, expiry: u32, flags: u32, by_expiry: bool, datatype in 0u8..8, sync in sync(),
        ) {
            let delete_source = if by_expiry { DeleteSource::Expiry } else { DeleteSource::Explicit };
            let meta = RevMeta { cas, expiry, flags, delete_source, datatype: Datatype(datatype), sync };
            prop_assert_eq!(meta.encode().len(), if sync.is_some() { 25 } else { 18 });
            prop_assert_eq!(RevMeta::decode(&meta.encode()), Ok(meta));
        }

        #[test]
        fn collection_stats_read_back_are_what_was_written(item_count: u64, high_seqno: u64, disk_bytes: u64) {
            let stats = CollectionStats { item_count, high_seqno, disk_bytes };
            prop_assert_eq!(CollectionStats::decode(&stats.encode()), Ok(stats));
        }

        #[test]
        fn no_bytes_make_the_readers_panic(bytes in proptest::collection::vec(any::<u8>(), 0..40)) {
            let _ = RevMeta::decode(&bytes);
            let _ = CollectionStats::decode(&bytes);
        }
    }

    #[test]
    fn stats_from_before_disk_bytes_were_counted_are_read() {
        let old = CollectionStats { item_count: 300, high_seqno: 5, disk_bytes: 0 };
        assert_eq!(CollectionStats::decode(&[0xac, 0x02, 0x05]), Ok(old));
        assert_eq!(CollectionStats::id(CollectionId(0x100)), "|0x100|");
        assert!(CollectionStats::decode(&[0xac]).is_err());
        assert!(CollectionStats::decode(&[0xff; 30]).is_err());
    }

    #[test]
    fn a_legacy_commit_is_read_as_a_mutation_and_odd_lengths_are_refused() {
        let mut bytes = vec![0; 25];
        bytes[18] = 1;
        assert_eq!(RevMeta::decode(&bytes).unwrap().sync, None);
        bytes[18] = 0;
        assert!(RevMeta::decode(&bytes).is_err(), "a prepare needs a level");
        for len in (0..18).chain(20..25).chain(26..30) {
            assert!(RevMeta::decode(&vec![0; len]).is_err(), "{len}");
        }
        assert!(RevMeta::decode(&[0; 19]).is_ok());
    }

    #[test]
    fn only_bodies_that_are_neither_empty_nor_snappy_get_compressed() {
        assert_eq!(content_meta(Datatype::JSON, 5), 0x80);
        assert_eq!(content_meta(Datatype::RAW, 5), 0x83);
        assert_eq!(content_meta(Datatype::RAW, 0), 3);
        assert_eq!(content_meta(Datatype::JSON.with(Datatype::SNAPPY), 5), 0);
    }
}
