//! A document as the trees know it: everything but its body.

use crate::format::{Fields, META_SNAPPY, put_lengths, put_uint};

/// Bit 47 of a body's position: the document is deleted.
const DELETED: u64 = 1 << 47;

/// Metadata of one document; the same in both trees.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DocInfo {
    pub id: Vec<u8>,
    pub seq: u64,
    /// How often the document was changed.
    pub rev: u64,
    pub deleted: bool,
    /// Bit 7: the stored body is snappy. Low bits: 0 JSON, 1 checked and not JSON, 2 reserved key, 3 not checked.
    pub content_meta: u8,
    /// Opaque here; see [`crate::kv::RevMeta`].
    pub rev_meta: Vec<u8>,
    /// Position of the body in the file; 0 means there is none.
    pub body_at: u64,
    /// Bytes the body takes on disk, frame included. Old files may say a few more: accounting, not a length to trust.
    pub body_size: u64,
}

impl DocInfo {
    pub fn has_body(&self) -> bool {
        self.body_at != 0
    }

    pub fn is_compressed(&self) -> bool {
        self.content_meta & META_SNAPPY != 0
    }

    fn packed_position(&self) -> u64 {
        self.body_at | if self.deleted { DELETED } else { 0 }
    }

    pub(crate) fn seq_key(seq: u64) -> [u8; 6] {
        let [_, _, key @ ..] = seq.to_be_bytes();
        key
    }

    pub(crate) fn by_id_value(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(23 + self.rev_meta.len());
        put_uint(&mut out, self.seq, 6);
        put_uint(&mut out, self.body_size, 4);
        put_uint(&mut out, self.packed_position(), 6);
        put_uint(&mut out, self.rev, 6);
        out.push(self.content_meta);
        out.extend_from_slice(&self.rev_meta);
        out
    }

    pub(crate) fn by_seq_value(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(18 + self.id.len() + self.rev_meta.len());
        put_lengths(&mut out, self.id.len(), self.body_size as usize);
        put_uint(&mut out, self.packed_position(), 6);
        put_uint(&mut out, self.rev, 6);
        out.push(self.content_meta);
        out.extend_from_slice(&self.id);
        out.extend_from_slice(&self.rev_meta);
        out
    }

    pub(crate) fn from_by_id(id: &[u8], value: &[u8]) -> Option<DocInfo> {
        let mut fields = Fields(value);
        let seq = fields.uint(6)?;
        let body_size = fields.uint(4)?;
        DocInfo::shared_fields(&mut fields, seq, body_size).map(|(doc, rev_meta)| DocInfo {
            id: id.to_vec(),
            rev_meta: rev_meta.to_vec(),
            ..doc
        })
    }

    pub(crate) fn from_by_seq(key: &[u8], value: &[u8]) -> Option<DocInfo> {
        let seq = Fields(key).uint(6)?;
        let mut fields = Fields(value);
        let (id_len, body_size) = fields.lengths()?;
        let (doc, rest) = DocInfo::shared_fields(&mut fields, seq, body_size as u64)?;
        let (id, rev_meta) = rest.split_at_checked(id_len)?;
        Some(DocInfo { id: id.to_vec(), rev_meta: rev_meta.to_vec(), ..doc })
    }

    fn shared_fields<'a>(fields: &mut Fields<'a>, seq: u64, body_size: u64) -> Option<(DocInfo, &'a [u8])> {
        let packed = fields.uint(6)?;
        let rev = fields.uint(6)?;
        let content_meta = fields.uint(1)? as u8;
        let doc = DocInfo {
            id: Vec::new(),
            seq,
            rev,
            deleted: packed & DELETED != 0,
            content_meta,
            rev_meta: Vec::new(),
            body_at: packed & !DELETED,
            body_size,
        };
        Some((doc, fields.0))
    }
}
