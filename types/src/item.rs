//! One change to one key, as the hash table holds it, the changelog orders it and the file stores it. Immutable once
//! made: readers share it, a newer change is a newer item.
//!
//! ```text
//!     changelog [ .. ][ prepare 41 ][ .. ][ .. ][ commit 44 ][ .. ]        an item: a body, and what it is seen as
//!                            └──────▶ body ◀──────────┘
//!     documents      key ──────────────┘
//! ```

use std::fmt;
use std::ops::{BitAnd, BitOr, Deref};

use crate::body::{Body, ELSEWHERE, HAS_VALUE};
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
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
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

    /// As administrators write it.
    pub const fn name(self) -> &'static str {
        match self {
            Level::Majority => "majority",
            Level::MajorityAndPersistActive => "majorityAndPersistActive",
            Level::PersistMajority => "persistToMajority",
        }
    }

    pub fn from_name(name: &str) -> Option<Level> {
        (1..=3).filter_map(Level::from_wire).find(|level| level.name() == name)
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

impl Kind {
    /// The prepare that this decides.
    pub fn decides(self) -> Option<Seqno> {
        match self {
            Kind::Committed { prepared } => prepared,
            Kind::Abort { prepared } => Some(prepared),
            Kind::Prepare { .. } => None,
        }
    }
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

/// One change to one key. Clones share its body.
///
/// 1. Nothing of it changes but its heat.
/// 2. A prepare and its commit say the same of the document, so they share a body. What was taken for a prepare stays one,
///    whatever becomes of it meanwhile.
/// 3. Among the documents only bodies are kept; see [`Item::into_document`].
#[derive(Clone)]
pub struct Item {
    body: Body,
    /// 0: it is seen as it was made. Else it is the commit of the prepare it was made as, so many seqnos later.
    after: u16,
}

const _: () = assert!(size_of::<Item>() == 16);

impl Item {
    /// An item whose value, if it has one, is here.
    pub fn new(key: DocKey<'_>, meta: Meta, kind: Kind, value: Option<&[u8]>) -> Item {
        let bits = if value.is_some() { HAS_VALUE } else { 0 };
        Item::seen(Body::new(key.as_bytes(), meta, kind, value.unwrap_or_default(), bits), 0)
    }

    /// An item known from the file, whose value was left there.
    pub fn without_value(key: DocKey<'_>, meta: Meta, kind: Kind) -> Item {
        Item::seen(Body::new(key.as_bytes(), meta, kind, &[], ELSEWHERE), 0)
    }

    /// The same change, its value left in the file.
    pub fn stripped(&self) -> Item {
        let item = Item::without_value(self.key(), self.meta(), self.kind());
        item.set_heat(self.heat());
        item
    }

    pub(crate) fn seen(body: Body, after: u16) -> Item {
        Item { body, after }
    }

    /// The commit of this prepare: everything but seqno and kind as it says.
    pub fn committed_as(&self, seqno: Seqno) -> Item {
        let after = seqno.0.checked_sub(self.body.seqno().0).and_then(|after| u16::try_from(after).ok());
        match after.filter(|after| *after > 0 && self.after == 0 && self.body.is_prepare()) {
            Some(after) => Item::seen(self.body.clone(), after),
            None => self.copied(Meta { seqno, ..self.meta() }, Kind::Committed { prepared: Some(self.seqno()) }),
        }
    }

    fn copied(&self, meta: Meta, kind: Kind) -> Item {
        match self.resident() {
            true => Item::new(self.key(), meta, kind, self.has_value().then(|| self.value())),
            false => Item::without_value(self.key(), meta, kind),
        }
    }

    /// The body to keep among the documents. It remembers what committed it: [`Body::committed`] is this item again.
    pub fn into_document(self) -> Body {
        debug_assert!(self.is_committed());
        if self.after == 0 || self.body.set_committed_after(self.after) {
            return self.body;
        }
        // Committed twice, which cannot be told of one body.
        self.copied(self.meta(), self.kind()).body
    }

    /// Of a prepare: its commit, which shares the body, is among the documents, or was.
    pub fn has_shared_commit(&self) -> bool {
        self.after == 0 && self.body.committed_after() > 0
    }

    /// The prepare whose body this commit shares.
    pub fn shares_with(&self) -> Option<Seqno> {
        (self.after > 0).then(|| self.body.seqno())
    }

    pub fn body(&self) -> &Body {
        &self.body
    }

    pub fn meta(&self) -> Meta {
        Meta { seqno: self.seqno(), ..self.body.meta() }
    }

    pub fn kind(&self) -> Kind {
        match self.shares_with() {
            None => self.body.kind(),
            prepared => Kind::Committed { prepared },
        }
    }

    pub fn seqno(&self) -> Seqno {
        Seqno(self.body.seqno().0 + u64::from(self.after))
    }

    pub fn is_committed(&self) -> bool {
        self.after > 0 || !(self.body.is_prepare() || self.body.is_abort())
    }

    /// Bytes of memory that it brings: its body, or nothing but itself if that came with its prepare.
    pub fn memory(&self) -> usize {
        if self.after > 0 { size_of::<Item>() } else { self.body.memory() }
    }
}

impl Deref for Item {
    type Target = Body;
    fn deref(&self) -> &Body {
        &self.body
    }
}

impl PartialEq for Item {
    fn eq(&self, other: &Item) -> bool {
        (self.id(), self.meta(), self.kind(), self.value()) == (other.id(), other.meta(), other.kind(), other.value())
            && (self.has_value(), self.resident()) == (other.has_value(), other.resident())
    }
}

impl Eq for Item {}

impl fmt::Debug for Item {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Item")
            .field("id", &self.id().escape_ascii().to_string())
            .field("meta", &self.meta())
            .field("kind", &self.kind())
            .field("value", &self.has_value().then(|| self.value().escape_ascii().to_string()))
            .field("resident", &self.resident())
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::KeyBuf;

    fn meta() -> Meta {
        Meta {
            seqno: Seqno((1 << 48) - 1),
            cas: Cas(u64::MAX),
            rev: RevSeqno(1 << 47 | 3),
            flags: 0xdead_beef,
            expiry: u32::MAX,
            datatype: Datatype(7),
            deleted: None,
        }
    }

    #[test]
    fn what_goes_in_comes_out_whatever_the_kind() {
        let key = KeyBuf::in_default_collection(&[b'k'; 250]).unwrap();
        let prepared = Seqno(0x1234_5678_9abc);
        for kind in [
            Kind::Committed { prepared: None },
            Kind::Committed { prepared: Some(prepared) },
            Kind::Prepare { level: Level::Majority },
            Kind::Prepare { level: Level::PersistMajority },
            Kind::Abort { prepared },
        ] {
            for deleted in [None, Some(DeleteSource::Explicit), Some(DeleteSource::Expiry)] {
                for value in [None, Some(&b""[..]), Some(b"value")] {
                    let meta = Meta { deleted, ..meta() };
                    let item = Item::new(key.as_key(), meta, kind, value);
                    assert_eq!((item.key(), item.meta(), item.kind()), (key.as_key(), meta, kind));
                    assert_eq!((item.value(), item.has_value()), (value.unwrap_or_default(), value.is_some()));
                    assert_eq!((item.seqno(), item.resident()), (meta.seqno, true));
                    assert_eq!(item.is_deleted(), deleted.is_some());
                    assert_eq!(item.is_committed(), matches!(kind, Kind::Committed { .. }));
                    let left = item.stripped();
                    assert_eq!((left.key(), left.meta(), left.kind()), (key.as_key(), meta, kind));
                    assert_eq!((left.resident(), left.has_value(), left.value()), (false, false, &b""[..]));
                    assert_eq!(left, Item::without_value(key.as_key(), meta, kind));
                    assert_ne!(left, item);
                }
            }
        }
    }

    fn prepare(seqno: u64, deleted: Option<DeleteSource>) -> Item {
        let key = KeyBuf::in_default_collection(b"k").unwrap();
        let meta = Meta { seqno: Seqno(seqno), deleted, ..meta() };
        let value = deleted.is_none().then_some(&b"value"[..]);
        Item::new(key.as_key(), meta, Kind::Prepare { level: Level::PersistMajority }, value)
    }

    #[test]
    fn a_commit_is_its_prepare_under_another_seqno() {
        for deleted in [None, Some(DeleteSource::Explicit)] {
            let prepare = prepare((1 << 40) - 1, deleted);
            let commit = prepare.committed_as(Seqno(1 << 40));
            let prepared = Some(prepare.seqno());
            let copy = prepare.copied(Meta { seqno: Seqno(1 << 40), ..prepare.meta() }, Kind::Committed { prepared });
            assert_eq!((&commit, commit.is_committed(), commit.memory()), (&copy, true, 16));
            assert!(!prepare.has_shared_commit(), "it is not among the documents yet");
            let document = commit.clone().into_document();
            assert!(std::ptr::eq(document.id(), prepare.id()), "nothing was copied");
            assert_eq!((document.committed(), document.committed_seqno()), (commit.clone(), commit.seqno()));
            assert_eq!(
                (prepare.kind(), prepare.is_committed()),
                (Kind::Prepare { level: Level::PersistMajority }, false)
            );
            assert!(prepare.has_shared_commit() && prepare.memory() == document.memory());
            assert_eq!((commit.stripped().kind(), commit.stripped().meta()), (copy.kind(), copy.meta()));
        }
    }

    #[test]
    fn a_commit_that_its_prepare_cannot_tell_of_is_a_copy() {
        let late = prepare(7, None);
        let near = late.committed_as(Seqno(7 + u64::from(u16::MAX)));
        let far = late.committed_as(Seqno(8 + u64::from(u16::MAX)));
        assert_eq!((near.shares_with(), far.shares_with()), (Some(Seqno(7)), None));
        assert_eq!((near.kind(), near.value()), (far.kind(), far.value()));
        let [first, second] = [9, 11].map(|seqno| late.committed_as(Seqno(seqno)).into_document());
        assert_eq!([first, second].map(|document| document.committed_seqno()), [Seqno(9), Seqno(11)]);
        let committed = Item::new(late.key(), late.meta(), Kind::Committed { prepared: None }, None);
        assert_eq!(committed.committed_as(Seqno(9)).shares_with(), None);
    }
}
