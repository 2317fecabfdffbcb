use std::ops::Range;

use super::{Kind, Reduce};
use crate::doc::DocInfo;
use crate::error::Result;
use crate::format::{Checksum, Fields, inflate, put_lengths, put_uint};
use crate::source::{Appender, READ_BYTES, Source};

const LEAF: u8 = 1;
const INTERIOR: u8 = 0;

/// A node read from the file.
/// 1. It has at least one entry, and nothing after the last.
/// 2. Its keys strictly ascend.
/// 3. Every value is as long as its parts need: what [`Child::decode`] and `DocInfo` are asked of it, they answer.
pub(crate) struct Node {
    pub at: u64,
    /// Size on disk of its chunk.
    pub size: u64,
    pub is_leaf: bool,
    bytes: Vec<u8>,
    entries: Vec<(Range<usize>, Range<usize>)>,
}

/// An interior node's entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Child {
    pub at: u64,
    pub subtree_bytes: u64,
    pub reduce: Reduce,
}

impl Node {
    /// Reads the node at `at`, which must end below `end`.
    pub fn read(source: &Source, at: u64, end: u64, checksum: Checksum, kind: Kind) -> Result<Node> {
        let chunk = source.chunk(at, end, READ_BYTES, checksum)?;
        inflate(&chunk.payload)
            .and_then(|bytes| Node::parse(at, chunk.size, bytes, kind))
            .map_err(|what| source.corrupt(at, what))
    }

    pub(crate) fn parse(at: u64, size: u64, bytes: Vec<u8>, kind: Kind) -> Result<Node, &'static str> {
        let is_leaf = match bytes.first() {
            Some(&LEAF) => true,
            Some(&INTERIOR) => false,
            _ => return Err("a tree node of no known type"),
        };
        let mut entries: Vec<(Range<usize>, Range<usize>)> = Vec::new();
        let mut fields = Fields(&bytes[1..]);
        let mut last: Option<&[u8]> = None;
        while !fields.0.is_empty() {
            const PAST_END: &str = "a tree entry reaches past its node";
            let (key_len, value_len) = fields.lengths().ok_or(PAST_END)?;
            let from = bytes.len() - fields.0.len();
            let key = fields.take(key_len).ok_or(PAST_END)?;
            let value = fields.take(value_len).ok_or(PAST_END)?;
            if last.is_some_and(|last| key <= last) {
                return Err("tree keys out of order");
            }
            last = Some(key);
            check_entry(kind, is_leaf, key, value)?;
            entries.push((from..from + key_len, from + key_len..from + key_len + value_len));
        }
        if entries.is_empty() {
            return Err("a tree node without entries");
        }
        Ok(Node { at, size, is_leaf, bytes, entries })
    }

    pub fn len(&self) -> usize {
        self.entries.len()
    }

    pub fn key(&self, i: usize) -> &[u8] {
        &self.bytes[self.entries[i].0.clone()]
    }

    pub fn value(&self, i: usize) -> &[u8] {
        &self.bytes[self.entries[i].1.clone()]
    }

    /// What entry `i` of an interior node points at.
    pub fn child(&self, kind: Kind, i: usize) -> Child {
        Child::decode(kind, self.value(i)).expect("a node's values were checked when it was read")
    }

    pub fn last_key(&self) -> &[u8] {
        self.key(self.len() - 1)
    }

    /// Index of the first entry whose key is at least `key`.
    pub fn first_at_least(&self, key: &[u8]) -> usize {
        self.entries.partition_point(|(k, _)| &self.bytes[k.clone()] < key)
    }
}

fn check_entry(kind: Kind, is_leaf: bool, key: &[u8], value: &[u8]) -> Result<(), &'static str> {
    if kind == Kind::BySeq && key.len() != 6 {
        return Err("a by-seq key that is not 6 bytes");
    }
    let fits = match (is_leaf, kind) {
        (false, _) => Child::decode(kind, value).is_some(),
        (true, Kind::BySeq) => DocInfo::from_by_seq(key, value).is_some(),
        (true, Kind::ById) => DocInfo::from_by_id(key, value).is_some(),
        (true, Kind::Local) => true,
    };
    if fits { Ok(()) } else { Err("a tree value too short for its parts") }
}

impl Child {
    pub fn encode(&self, kind: Kind) -> Vec<u8> {
        let reduce = self.reduce.encode(kind);
        let mut out = Vec::with_capacity(14 + reduce.len());
        put_uint(&mut out, self.at, 6);
        put_uint(&mut out, self.subtree_bytes, 6);
        put_uint(&mut out, reduce.len() as u64, 2);
        out.extend(reduce);
        out
    }

    pub fn decode(kind: Kind, value: &[u8]) -> Option<Child> {
        let mut fields = Fields(value);
        let (at, subtree_bytes) = (fields.uint(6)?, fields.uint(6)?);
        let reduce_len = fields.uint(2)? as usize;
        Some(Child { at, subtree_bytes, reduce: Reduce::decode(kind, fields.take(reduce_len)?)? })
    }
}

/// Entries that will be a node, in the bytes they will have there.
#[derive(Default)]
pub(crate) struct Entries {
    bytes: Vec<u8>,
    ends: Vec<usize>,
}

impl Entries {
    pub fn push(&mut self, key: &[u8], value: &[u8]) {
        put_lengths(&mut self.bytes, key.len(), value.len());
        self.bytes.extend_from_slice(key);
        self.bytes.extend_from_slice(value);
        self.ends.push(self.bytes.len());
    }

    pub fn len(&self) -> usize {
        self.ends.len()
    }

    pub fn first_value(&self) -> Option<&[u8]> {
        let mut fields = Fields(&self.bytes);
        let (key, value) = fields.lengths()?;
        fields.take(key)?;
        fields.take(value)
    }

    pub fn byte_len(&self) -> usize {
        self.bytes.len()
    }

    /// How many entries, from the front, it takes to have at least `bytes` bytes; all if there are not that many.
    pub fn count_filling(&self, bytes: usize) -> usize {
        (self.ends.partition_point(|&end| end < bytes) + 1).min(self.len())
    }

    /// Writes the first `count` entries as a node and forgets them. Returns its last key and how to point at it.
    pub fn write(&mut self, count: usize, kind: Kind, is_leaf: bool, out: &mut Appender) -> Result<(Vec<u8>, Child)> {
        let cut = self.ends[count - 1];
        let mut reduce = Reduce::default();
        let mut below = 0u64;
        let mut last_key = &[][..];
        let mut fields = Fields(&self.bytes[..cut]);
        for _ in 0..count {
            let (key, value) = fields
                .lengths()
                .and_then(|(k, v)| Some((fields.take(k)?, fields.take(v)?)))
                .expect("these bytes were written by push");
            last_key = key;
            if is_leaf {
                reduce.add(Reduce::of_entry(kind, key, value).expect("leaf values are encoded by DocInfo"));
            } else {
                let child = Child::decode(kind, value).expect("interior values are encoded by Child");
                reduce.add(child.reduce);
                below = below.saturating_add(child.subtree_bytes);
            }
        }
        let last_key = last_key.to_vec();
        let mut plain = Vec::with_capacity(1 + cut);
        plain.push(if is_leaf { LEAF } else { INTERIOR });
        plain.extend(self.bytes.drain(..cut));
        self.ends.drain(..count);
        self.ends.iter_mut().for_each(|end| *end -= cut);

        let packed = out.compress(&plain)?;
        let (at, size) = out.chunk(&packed)?;
        Ok((last_key, Child { at, subtree_bytes: size.saturating_add(below), reduce }))
    }
}
