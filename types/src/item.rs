//! One change to one key, as the hash table holds it, the changelog orders it and the file stores it. Immutable once
//! made: readers share it by `Arc`, a newer change is a newer item.

use std::ops::{BitAnd, BitOr};

use crate::{Cas, DocKey, RevSeqno, Seqno};

/// What a value's bytes are. The bits are the wire's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Datatype(pub u8);

impl Datatype {
    pub const RAW: Datatype = Datatype(0);
    pub const JSON: Datatype = Datatype(1);
    pub const SNAPPY: Datatype = Datatype(2);
    pub const XATTR: Datatype = Datatype(4);

    pub const fn has(self, bit: Datatype) -> bool {
        self.0 & bit.0 != 0
    }
    #[must_use]
    pub const fn with(self, bit: Datatype) -> Datatype {
        Datatype(self.0 | bit.0)
    }
    #[must_use]
    pub const fn without(self, bit: Datatype) -> Datatype {
        Datatype(self.0 & !bit.0)
    }
}

impl BitAnd for Datatype {
    type Output = Datatype;
    fn bitand(self, other: Datatype) -> Datatype {
        Datatype(self.0 & other.0)
    }
}

impl BitOr for Datatype {
    type Output = Datatype;
    fn bitor(self, other: Datatype) -> Datatype {
        Datatype(self.0 | other.0)
    }
}

/// Why a document is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeleteSource {
    Explicit,
    Expiry,
}

/// How durable a synchronous write must be. The discriminants are the wire's and the file's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Level {
    Majority = 1,
    MajorityAndPersistActive = 2,
    PersistMajority = 3,
}

impl Level {
    pub const fn from_wire(level: u8) -> Option<Level> {
        match level {
            1 => Some(Level::Majority),
            2 => Some(Level::MajorityAndPersistActive),
            3 => Some(Level::PersistMajority),
            _ => None,
        }
    }
}

/// What an item says about its key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The document is as this item says. `prepared` is the seqno of the prepare it commits, if any.
    Committed { prepared: Option<Seqno> },
    /// The document will be so once this is durable at `level`; invisible until then.
    Prepare { level: Level },
    /// The prepare of this seqno came to nothing.
    Abort { prepared: Seqno },
}

/// A document's metadata.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Meta {
    pub seqno: Seqno,
    pub cas: Cas,
    pub rev: RevSeqno,
    /// The client's, opaque; the number is the big-endian reading of its four bytes.
    pub flags: u32,
    /// Alive: when it expires, Unix seconds, 0 = never. Deleted: when it was deleted.
    pub expiry: u32,
    pub datatype: Datatype,
    /// `Some`: a tombstone (or, for a prepare, a delete waiting to be committed).
    pub deleted: Option<DeleteSource>,
}

/// One change to one key.
#[derive(Debug, PartialEq, Eq)]
pub struct Item {
    id: Box<[u8]>,
    pub meta: Meta,
    pub kind: Kind,
    /// `None`: no value: a tombstone without xattrs, or a value that is only in the file (see [`Item::resident`]).
    value: Option<Box<[u8]>>,
    resident: bool,
}

impl Item {
    /// An item whose value, if it has one, is here.
    pub fn new(key: DocKey<'_>, meta: Meta, kind: Kind, value: Option<Box<[u8]>>) -> Item {
        Item { id: key.as_bytes().into(), meta, kind, value, resident: true }
    }

    /// An item known from the file, whose value was left there.
    pub fn without_value(key: DocKey<'_>, meta: Meta, kind: Kind) -> Item {
        Item { id: key.as_bytes().into(), meta, kind, value: None, resident: false }
    }

    pub fn key(&self) -> DocKey<'_> {
        DocKey::parse(&self.id).expect("items are made from checked keys")
    }

    /// The id bytes: collection prefix + logical key.
    pub fn id(&self) -> &[u8] {
        &self.id
    }

    /// The stored value: xattr section (if the datatype says so) and body, compressed if the datatype says so.
    /// Meaningless unless [`Item::resident`].
    pub fn value(&self) -> &[u8] {
        self.value.as_deref().unwrap_or_default()
    }

    /// Whether there is a value at all (an empty one counts). A tombstone without xattrs has none.
    pub fn has_value(&self) -> bool {
        self.value.is_some()
    }

    /// False: the value must be fetched from the file first.
    pub fn resident(&self) -> bool {
        self.resident
    }

    pub fn is_deleted(&self) -> bool {
        self.meta.deleted.is_some()
    }

    pub fn is_committed(&self) -> bool {
        matches!(self.kind, Kind::Committed { .. })
    }

    /// Bytes of memory this item holds, its allocations included (not the table slot that points to it).
    pub fn memory(&self) -> usize {
        size_of::<Item>() + 16 + self.id.len() + self.value.as_ref().map_or(0, |v| v.len())
    }
}
