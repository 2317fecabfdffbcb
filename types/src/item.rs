//! One change to one key, as the hash table holds it, the changelog orders it and the file stores it. Immutable once
//! made: readers share it, a newer change is a newer item.
//!
//! There are as many of these as there are documents, so an item is one allocation: counts, metadata packed to 32 bytes,
//! then the id and the value. 100 bytes of value under a 14-byte key take 176 bytes of the heap.

use std::cell::RefCell;
use std::fmt;
use std::ops::{BitAnd, BitOr};
use std::sync::atomic::AtomicU8;
use std::sync::atomic::Ordering::{AcqRel, Relaxed};

use triomphe::ThinArc;

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

/// One change to one key. Clones share it.
///
/// 1. Nothing of it changes but its heat.
/// 2. Seqno and revision fit 48 bits, as in the file.
#[derive(Clone)]
pub struct Item(ThinArc<Head, u8>);

/// What an item says beside its bytes: the id, then six bytes of a prepare's seqno if `kind` has one, then the value.
struct Head {
    cas: u64,
    seqno_low: u32,
    rev_low: u32,
    flags: u32,
    expiry: u32,
    seqno_high: u16,
    rev_high: u16,
    datatype: u8,
    id_len: u8,
    bits: u8,
    /// Low six bits: how much the item is in use, see [`Item::warm`]. Above: who holds it, see [`HeldBy`].
    usage: AtomicU8,
}

const _: () = assert!(size_of::<Head>() == 32 && size_of::<Option<Item>>() == 8);

/// Of `Head::bits`. Two each: why deleted (0: it is not), the kind, the level of a prepare.
const KIND_SHIFT: u8 = 2;
const LEVEL_SHIFT: u8 = 4;
const HAS_VALUE: u8 = 1 << 6;
const ELSEWHERE: u8 = 1 << 7;

/// A prepare's seqno among the bytes.
const PREPARED_BYTES: usize = 6;

/// One more than the highest heat.
pub const HEATS: usize = 64;
const HEAT_MASK: u8 = 63;
/// Of an item just made or just brought back: it gets its chance before it may leave.
const HEAT_FRESH: u8 = 2;
/// Heat counts uses one by one up to here; each further step of this many takes twice as many uses.
const HEAT_STEP: u8 = 4;

/// Who counts an item's memory. One that is in both is counted once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum HeldBy {
    Table = 64,
    Log = 128,
}

impl Item {
    /// An item whose value, if it has one, is here.
    pub fn new(key: DocKey<'_>, meta: Meta, kind: Kind, value: Option<&[u8]>) -> Item {
        let bits = if value.is_some() { HAS_VALUE } else { 0 };
        Item::build(key.as_bytes(), meta, kind, value.unwrap_or_default(), bits)
    }

    /// An item known from the file, whose value was left there.
    pub fn without_value(key: DocKey<'_>, meta: Meta, kind: Kind) -> Item {
        Item::build(key.as_bytes(), meta, kind, &[], ELSEWHERE)
    }

    /// The same change, its value left in the file.
    pub fn stripped(&self) -> Item {
        let item = Item::build(self.id(), self.meta(), self.kind(), &[], ELSEWHERE);
        item.set_heat(self.heat());
        item
    }

    fn build(id: &[u8], meta: Meta, kind: Kind, value: &[u8], mut bits: u8) -> Item {
        assert!((meta.seqno.0 | meta.rev.0) >> 48 == 0, "seqnos and revisions have 48 bits");
        bits |= match meta.deleted {
            None => 0,
            Some(DeleteSource::Explicit) => 1,
            Some(DeleteSource::Expiry) => 2,
        };
        let (code, level, prepared) = match kind {
            Kind::Committed { prepared: None } => (0, 0, None),
            Kind::Committed { prepared } => (1, 0, prepared),
            Kind::Prepare { level } => (2, level as u8, None),
            Kind::Abort { prepared } => (3, 0, Some(prepared)),
        };
        let head = Head {
            cas: meta.cas.0,
            seqno_low: meta.seqno.0 as u32,
            rev_low: meta.rev.0 as u32,
            flags: meta.flags,
            expiry: meta.expiry,
            seqno_high: (meta.seqno.0 >> 32) as u16,
            rev_high: (meta.rev.0 >> 32) as u16,
            datatype: meta.datatype.0,
            id_len: u8::try_from(id.len()).expect("ids have at most 251 bytes"),
            bits: bits | code << KIND_SHIFT | level << LEVEL_SHIFT,
            usage: AtomicU8::new(HEAT_FRESH),
        };
        // Put together here first: only bytes that lie side by side can be copied into place in one go.
        SCRATCH.with_borrow_mut(|bytes| {
            bytes.clear();
            bytes.extend_from_slice(id);
            if let Some(prepared) = prepared {
                bytes.extend_from_slice(&prepared.0.to_be_bytes()[8 - PREPARED_BYTES..]);
            }
            bytes.extend_from_slice(value);
            let item = Item(ThinArc::from_header_and_slice(head, bytes));
            bytes.shrink_to(SCRATCH_BYTES_MAX);
            item
        })
    }

    fn head(&self) -> &Head {
        &self.0.header.header
    }

    pub fn meta(&self) -> Meta {
        let head = self.head();
        Meta {
            seqno: self.seqno(),
            cas: Cas(head.cas),
            rev: RevSeqno(u64::from(head.rev_high) << 32 | u64::from(head.rev_low)),
            flags: head.flags,
            expiry: head.expiry,
            datatype: Datatype(head.datatype),
            deleted: match head.bits & 3 {
                0 => None,
                1 => Some(DeleteSource::Explicit),
                _ => Some(DeleteSource::Expiry),
            },
        }
    }

    pub fn kind(&self) -> Kind {
        let prepared = || {
            let at = usize::from(self.head().id_len);
            let bytes = &self.0.slice[at..at + PREPARED_BYTES];
            Seqno(bytes.iter().fold(0, |n, byte| n << 8 | u64::from(*byte)))
        };
        match self.code() {
            0 => Kind::Committed { prepared: None },
            1 => Kind::Committed { prepared: Some(prepared()) },
            2 => {
                let level = Level::from_wire(self.head().bits >> LEVEL_SHIFT & 3);
                Kind::Prepare { level: level.expect("made from a level") }
            }
            _ => Kind::Abort { prepared: prepared() },
        }
    }

    fn code(&self) -> u8 {
        self.head().bits >> KIND_SHIFT & 3
    }

    pub fn seqno(&self) -> Seqno {
        let head = self.head();
        Seqno(u64::from(head.seqno_high) << 32 | u64::from(head.seqno_low))
    }

    pub fn key(&self) -> DocKey<'_> {
        DocKey::parse(self.id()).expect("items are made from checked keys")
    }

    /// The id bytes: collection prefix + logical key.
    pub fn id(&self) -> &[u8] {
        &self.0.slice[..usize::from(self.head().id_len)]
    }

    /// The stored value: xattr section (if the datatype says so) and body, compressed if the datatype says so.
    /// Meaningless unless [`Item::resident`].
    pub fn value(&self) -> &[u8] {
        let prepared = if self.code() & 1 == 1 { PREPARED_BYTES } else { 0 };
        &self.0.slice[usize::from(self.head().id_len) + prepared..]
    }

    /// Whether there is a value at all (an empty one counts). A tombstone without xattrs has none.
    pub fn has_value(&self) -> bool {
        self.head().bits & HAS_VALUE != 0
    }

    /// False: the value must be fetched from the file first.
    pub fn resident(&self) -> bool {
        self.head().bits & ELSEWHERE == 0
    }

    pub fn is_deleted(&self) -> bool {
        self.head().bits & 3 != 0
    }

    pub fn is_committed(&self) -> bool {
        self.code() < 2
    }

    /// How much the item is in use, below [`HEATS`], on a scale on which a step of 4 is twice the uses.
    pub fn heat(&self) -> u8 {
        self.head().usage.load(Relaxed) & HEAT_MASK
    }

    pub fn set_heat(&self, heat: u8) {
        let usage = self.head().usage.load(Relaxed);
        // Whoever comes between says something newer.
        let _ = self.head().usage.compare_exchange(usage, usage & !HEAT_MASK | heat & HEAT_MASK, Relaxed, Relaxed);
    }

    /// The item was used. `dice` is any number that differs from use to use. An item in constant use is written to
    /// rarely; two uses at once may count as one.
    pub fn warm(&self, dice: u64) {
        let heat = self.heat();
        let one_in = 1u64 << (heat / HEAT_STEP);
        if dice & (one_in - 1) == 0 && heat < HEAT_MASK {
            self.set_heat(heat + 1);
        }
    }

    /// Time has passed: half of the uses are forgotten.
    pub fn cool(&self) {
        let heat = self.heat();
        if heat > 0 {
            self.set_heat(if heat > 2 * HEAT_STEP { heat - HEAT_STEP } else { heat / 2 });
        }
    }

    /// Notes that it is held. Returns whether the other one holds it too.
    pub fn enter(&self, by: HeldBy) -> bool {
        self.is_held_otherwise(by, self.head().usage.fetch_or(by as u8, AcqRel))
    }

    /// Notes that it is held no longer. Returns whether the other one still holds it.
    pub fn leave(&self, by: HeldBy) -> bool {
        self.is_held_otherwise(by, self.head().usage.fetch_and(!(by as u8), AcqRel))
    }

    fn is_held_otherwise(&self, by: HeldBy, usage: u8) -> bool {
        usage & !HEAT_MASK & !(by as u8) != 0
    }

    /// Bytes of memory this item holds (not the table slot that points to it).
    pub fn memory(&self) -> usize {
        // Two counts before the head and the bytes after it.
        allocated(16 + size_of::<Head>() + self.0.slice.len())
    }

    /// Those of them that [`Item::stripped`] saves.
    pub fn memory_of_value(&self) -> usize {
        self.memory() - allocated(16 + size_of::<Head>() + self.0.slice.len() - self.value().len())
    }
}

thread_local! {
    static SCRATCH: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// What a thread keeps for the next item; enough for nearly all.
const SCRATCH_BYTES_MAX: usize = 64 << 10;

/// What asking the allocator for `bytes` costs: its own word before them, and rounding up to 16.
pub const fn allocated(bytes: usize) -> usize {
    if bytes <= 24 { 32 } else { (bytes + 8 + 15) & !15 }
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
            rev: RevSeqno(1 << 47),
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

    #[test]
    fn a_small_document_takes_one_small_allocation() {
        let key = KeyBuf::in_default_collection(b"key_0000000001").unwrap();
        let item = Item::new(key.as_key(), meta(), Kind::Committed { prepared: None }, Some(&[0; 100]));
        assert_eq!(item.memory(), 176);
        assert_eq!((item.stripped().memory(), item.memory_of_value()), (80, 96));
    }

    #[test]
    fn heat_tells_often_from_rarely_used_and_fades() {
        let key = KeyBuf::in_default_collection(b"k").unwrap();
        let used = |times: u64| {
            let item = Item::new(key.as_key(), meta(), Kind::Committed { prepared: None }, None);
            (0..times).for_each(|n| item.warm(n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20));
            item
        };
        let heats = [0, 2, 100, 5_000, 200_000].map(|times| used(times).heat());
        assert!(heats.is_sorted_by(|a, b| a < b), "{heats:?}");
        let item = used(1_000_000);
        let before = item.heat();
        item.cool();
        assert_eq!(item.heat(), before - HEAT_STEP);
        (0..40).for_each(|_| item.cool());
        assert_eq!(item.heat(), 0);
    }

    #[test]
    fn two_holders_know_of_each_other_whatever_the_heat() {
        let key = KeyBuf::in_default_collection(b"k").unwrap();
        let item = Item::new(key.as_key(), meta(), Kind::Committed { prepared: None }, None);
        assert!(!item.enter(HeldBy::Log));
        item.set_heat(63);
        assert!(item.enter(HeldBy::Table) && item.leave(HeldBy::Log) && !item.leave(HeldBy::Table));
        assert_eq!(item.heat(), 63);
        item.warm(0);
        assert_eq!(item.heat(), 63);
    }
}
