//! B+trees that are only ever appended to: changing a leaf writes it anew, and every node above it.
//!
//!          root ── last key of each child, where it is, what it sums up to
//!         ╱    ╲
//!     leaf      leaf' ◀─ rewritten at the end of the file; the old one is garbage
//!
//! Three trees live in a file, with the same nodes and different entries: see [`Kind`].

mod bulk;
mod modify;
mod node;
mod read;

pub(crate) use bulk::Bulk;
pub(crate) use modify::{Action, Met, Op, modify};
pub(crate) use node::{Child, Node};
pub(crate) use read::{Tree, count_from, lookup, scan};

use crate::doc::DocInfo;
use crate::format::{Fields, put_uint};

/// Nodes are split when their entries exceed this many bytes...
const SPLIT_BYTES: usize = 1279;
/// ...and then filled up to at least this many.
const FILL_BYTES: usize = SPLIT_BYTES * 2 / 3;
/// A tree higher than this is a loop: even two children a node would make 2^64 leaves.
const HEIGHT_MAX: usize = 64;

/// What a tree's keys and values are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Seqno to metadata; sums up to the number of entries.
    BySeq,
    /// Document id to metadata; sums up to counts and body bytes.
    ById,
    /// Local document id to its body; sums up to nothing.
    Local,
}

/// What a subtree sums up to. By-seq trees know only one number and keep it in `alive`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reduce {
    pub alive: u64,
    pub deleted: u64,
    /// Size on disk of the bodies.
    pub body_bytes: u64,
}

impl Reduce {
    pub(crate) fn encode(self, kind: Kind) -> Vec<u8> {
        let mut out = Vec::with_capacity(16);
        match kind {
            Kind::BySeq => put_uint(&mut out, self.alive, 5),
            Kind::ById => {
                put_uint(&mut out, self.alive, 5);
                put_uint(&mut out, self.deleted, 5);
                put_uint(&mut out, self.body_bytes, 6);
            }
            Kind::Local => {}
        }
        out
    }

    pub(crate) fn decode(kind: Kind, bytes: &[u8]) -> Option<Reduce> {
        let mut fields = Fields(bytes);
        Some(match kind {
            Kind::BySeq => Reduce { alive: fields.uint(5)?, ..Reduce::default() },
            Kind::ById => Reduce { alive: fields.uint(5)?, deleted: fields.uint(5)?, body_bytes: fields.uint(6)? },
            Kind::Local => Reduce::default(),
        })
    }

    pub(crate) fn add(&mut self, other: Reduce) {
        self.alive = self.alive.saturating_add(other.alive);
        self.deleted = self.deleted.saturating_add(other.deleted);
        self.body_bytes = self.body_bytes.saturating_add(other.body_bytes);
    }

    /// What one leaf entry counts for; `None` if it is malformed.
    pub(crate) fn of_entry(kind: Kind, key: &[u8], value: &[u8]) -> Option<Reduce> {
        Some(match kind {
            Kind::BySeq => Reduce { alive: 1, ..Reduce::default() },
            Kind::ById => {
                let doc = DocInfo::from_by_id(key, value)?;
                let deleted = u64::from(doc.deleted);
                Reduce { alive: 1 - deleted, deleted, body_bytes: doc.body_size }
            }
            Kind::Local => Reduce::default(),
        })
    }
}

/// Where a tree begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Root {
    /// Position of its topmost node.
    pub at: u64,
    /// Size on disk of all its nodes.
    pub subtree_bytes: u64,
    pub reduce: Reduce,
}

impl Root {
    pub(crate) fn encode(&self, kind: Kind) -> Vec<u8> {
        let mut out = Vec::with_capacity(28);
        put_uint(&mut out, self.at, 6);
        put_uint(&mut out, self.subtree_bytes, 6);
        out.extend(self.reduce.encode(kind));
        out
    }

    pub(crate) fn decode(kind: Kind, bytes: &[u8], header_at: u64) -> Result<Root, &'static str> {
        let mut fields = Fields(bytes);
        let (Some(at), Some(subtree_bytes)) = (fields.uint(6), fields.uint(6)) else {
            return Err("a root too short for its position");
        };
        if at >= header_at {
            return Err("a root that lies beyond its header");
        }
        let reduce = Reduce::decode(kind, fields.0).ok_or("a root too short for its sums")?;
        Ok(Root { at, subtree_bytes, reduce })
    }
}

impl From<Child> for Root {
    fn from(child: Child) -> Root {
        Root { at: child.at, subtree_bytes: child.subtree_bytes, reduce: child.reduce }
    }
}
