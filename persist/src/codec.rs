//! Items as the file has them: which bytes of metadata, which body.

use couchstore::kv::{self, RevMeta, Sync};
use couchstore::{Doc, DocInfo, META_SNAPPY, Snapshot};
use types::{Cas, Datatype, DeleteSource, DocKey, Item, Kind, Meta, RevSeqno, Seqno, VbId};

use crate::batch::PREPARE_PREFIX;
use crate::error::StoreError;

/// Ids of what the server writes for itself about collections.
const SYSTEM_EVENT_PREFIX: u8 = 0x01;
/// A body's size on disk is that of its chunk: payload and this.
pub const CHUNK_FRAME_BYTES: u64 = 8;

/// The metadata of an item that couchstore does not interpret. `now_s` stands in for a deletion time that is missing.
pub fn rev_meta(item: &Item, now_s: u32) -> Vec<u8> {
    let meta = item.meta();
    let sync = match item.kind() {
        Kind::Committed { .. } => None,
        Kind::Prepare { level } => Some(Sync::Pending { level, is_delete: item.is_deleted() }),
        Kind::Abort { prepared } => Some(Sync::Abort { prepared }),
    };
    let no_time = is_tombstone(item) && meta.expiry == 0;
    RevMeta {
        cas: meta.cas.0,
        expiry: if no_time { now_s.max(1) } else { meta.expiry },
        flags: meta.flags,
        delete_source: meta.deleted.unwrap_or(DeleteSource::Explicit),
        datatype: meta.datatype,
        sync,
    }
    .encode()
}

/// Whether the file marks the item as deleted. The prepare of a deletion is alive: it says what will be.
fn is_tombstone(item: &Item) -> bool {
    match item.kind() {
        Kind::Committed { .. } => item.is_deleted(),
        Kind::Prepare { .. } => false,
        Kind::Abort { .. } => true,
    }
}

/// The document to write for an item. `id` and `rev_meta` are the file's.
pub fn doc<'a>(item: &'a Item, id: &'a [u8], rev_meta: &'a [u8]) -> Doc<'a> {
    assert!(item.resident(), "a change brings its value");
    let deleted = is_tombstone(item);
    let body = match item.kind() {
        Kind::Abort { .. } => None,
        _ if deleted && !item.has_value() => None,
        _ => Some(item.value()),
    };
    let content_meta = kv::content_meta(item.meta().datatype, body.map_or(0, <[u8]>::len));
    Doc {
        id,
        seq: item.seqno().0,
        rev: item.meta().rev.0,
        deleted,
        content_meta,
        rev_meta,
        body,
        compress: content_meta & META_SNAPPY != 0,
    }
}

/// What an entry of the file is about.
pub struct Entry<'a> {
    pub key: DocKey<'a>,
    pub meta: Meta,
    pub kind: Kind,
}

/// Reads an entry's metadata. `None`: something of the server's own, no document.
pub fn entry(info: &DocInfo) -> Result<Option<Entry<'_>>, String> {
    let in_prepares = info.id.first() == Some(&PREPARE_PREFIX);
    if info.id.first() == Some(&SYSTEM_EVENT_PREFIX) {
        return Ok(None);
    }
    let key = DocKey::parse(&info.id[usize::from(in_prepares)..])
        .map_err(|e| format!("id {:02x?} of seqno {} is not a key: {e:?}", info.id, info.seq))?;
    let stored = RevMeta::decode(&info.rev_meta).map_err(|e| format!("seqno {}: {e}", info.seq))?;
    let mut deleted = info.deleted.then_some(stored.delete_source);
    let kind = match (in_prepares, stored.sync) {
        (false, None) => Kind::Committed { prepared: None },
        (true, Some(Sync::Pending { level, is_delete })) => {
            deleted = is_delete.then_some(stored.delete_source);
            Kind::Prepare { level }
        }
        (true, Some(Sync::Abort { prepared })) => Kind::Abort { prepared },
        _ => return Err(format!("seqno {}: id {:02x?} does not fit its metadata", info.seq, info.id)),
    };
    let meta = Meta {
        seqno: Seqno(info.seq),
        cas: Cas(stored.cas),
        rev: RevSeqno(info.rev),
        flags: stored.flags,
        expiry: stored.expiry,
        // An empty body is neither JSON nor compressed, whatever was said of it.
        datatype: if info.body_size <= CHUNK_FRAME_BYTES { Datatype::RAW } else { stored.datatype },
        deleted,
    };
    Ok(Some(Entry { key, meta, kind }))
}

/// The collection of an id as the file has it, and whether it is in the prepare namespace.
pub fn collection_of(id: &[u8]) -> Option<(types::CollectionId, bool)> {
    let in_prepares = id.first() == Some(&PREPARE_PREFIX);
    let key = DocKey::parse(&id[usize::from(in_prepares)..]).ok()?;
    Some((key.collection(), in_prepares))
}

impl Entry<'_> {
    /// The item with its value, which is read and, if couchstore compressed it, inflated.
    pub fn with_value(&self, vb: VbId, file: &Snapshot, info: &DocInfo) -> Result<Item, StoreError> {
        let body = file.body(info).map_err(StoreError::file(vb))?;
        let body = body.filter(|body| !(self.meta.deleted.is_some() && body.is_empty()));
        Ok(Item::new(self.key, self.meta, self.kind, body.as_deref()))
    }

    /// The item without its value, which stays in the file. Where there is none, that is all there is.
    pub fn without_value(&self, info: &DocInfo) -> Item {
        match info.has_body() {
            true => Item::without_value(self.key, self.meta, self.kind),
            false => Item::new(self.key, self.meta, self.kind, None),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batch::file_id;
    use proptest::prelude::*;
    use types::{KeyBuf, Level};

    fn info(item: &Item) -> DocInfo {
        let (id, rev_meta) = (file_id(item), rev_meta(item, 1_000));
        let doc = doc(item, &id, &rev_meta);
        DocInfo {
            id: doc.id.to_vec(),
            seq: doc.seq,
            rev: doc.rev,
            deleted: doc.deleted,
            content_meta: doc.content_meta,
            rev_meta: doc.rev_meta.to_vec(),
            body_at: u64::from(doc.body.is_some()),
            body_size: doc.body.map_or(0, |b| b.len() as u64 + 8),
        }
    }

    fn items() -> impl Strategy<Value = Item> {
        let kinds = prop_oneof![
            Just(Kind::Committed { prepared: None }),
            (1u8..4).prop_map(|level| Kind::Prepare { level: Level::from_wire(level).unwrap() }),
            (1u64..1 << 48).prop_map(|n| Kind::Abort { prepared: Seqno(n) }),
        ];
        let sources = prop::option::of(prop_oneof![Just(DeleteSource::Explicit), Just(DeleteSource::Expiry)]);
        let numbers = (1u64..1 << 48, any::<u64>(), 1u64..1 << 48, any::<u32>(), 1u32.., 0u8..8);
        (kinds, sources, numbers, "[a-z]{1,20}", prop::collection::vec(any::<u8>(), 1..40)).prop_map(
            |(kind, mut deleted, (seqno, cas, rev, flags, expiry, datatype), key, value)| {
                if let Kind::Abort { .. } = kind {
                    deleted = deleted.or(Some(DeleteSource::Explicit));
                }
                let has_value = deleted.is_none();
                let meta = Meta {
                    seqno: Seqno(seqno),
                    cas: Cas(cas),
                    rev: RevSeqno(rev),
                    flags,
                    expiry,
                    datatype: if has_value { Datatype(datatype) } else { Datatype::RAW },
                    deleted,
                };
                let key = KeyBuf::in_default_collection(key.as_bytes()).unwrap();
                Item::new(key.as_key(), meta, kind, has_value.then_some(&*value))
            },
        )
    }

    proptest! {
        #[test]
        fn metadata_survives_the_file(item in items()) {
            let info = info(&item);
            let entry = entry(&info).unwrap().unwrap();
            prop_assert_eq!((entry.key, entry.meta, entry.kind), (item.key(), item.meta(), item.kind()));
            prop_assert_eq!(info.rev_meta.len(), if item.is_committed() { 18 } else { 25 });
        }

        #[test]
        fn any_metadata_gives_an_entry_or_an_error(
            raw in prop::collection::vec(any::<u8>(), 0..30), id in prop::collection::vec(0u8..4, 0..5),
        ) {
            let info = DocInfo {
                id, seq: 1, rev: 1, deleted: false, content_meta: 0, rev_meta: raw, body_at: 0, body_size: 0,
            };
            let _ = entry(&info);
        }
    }

    #[test]
    fn a_tombstone_always_has_a_time() {
        let key = KeyBuf::in_default_collection(b"k").unwrap();
        let meta = Meta {
            seqno: Seqno(1),
            cas: Cas(2),
            rev: RevSeqno(1),
            flags: 0,
            expiry: 0,
            datatype: Datatype::RAW,
            deleted: Some(DeleteSource::Expiry),
        };
        let item = Item::new(key.as_key(), meta, Kind::Committed { prepared: None }, None);
        let raw = rev_meta(&item, 1_000);
        assert_eq!(raw[8..12], 1_000u32.to_be_bytes());
        assert_eq!(raw[16] & 0x80, 0x80);
        let info = info(&item);
        assert!(info.deleted && !info.has_body());
    }

    #[test]
    fn a_prepared_delete_is_alive_until_it_is_committed() {
        let key = KeyBuf::in_default_collection(b"k").unwrap();
        let meta = Meta {
            seqno: Seqno(1),
            cas: Cas(2),
            rev: RevSeqno(1),
            flags: 0,
            expiry: 0,
            datatype: Datatype::RAW,
            deleted: Some(DeleteSource::Explicit),
        };
        let item = Item::new(key.as_key(), meta, Kind::Prepare { level: Level::PersistMajority }, None);
        let info = info(&item);
        assert!(!info.deleted && info.has_body());
        assert_eq!((info.rev_meta[18], info.rev_meta[24]), (0, 3 << 1 | 1));
    }
}
