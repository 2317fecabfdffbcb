//! What was written, as memory keeps it: once, whatever it is seen as (see [`Item`]).
//!
//! There are as many of these as there are documents, so a body is one allocation: counts, metadata packed to 24 bytes,
//! then the id, what few of them have, and the value. 100 bytes of value under a 14-byte key take 160 bytes of the heap.

use std::cell::RefCell;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};
use std::sync::atomic::{AtomicU8, AtomicU16};

use triomphe::ThinArc;

use crate::item::{Datatype, DeleteSource, Item, Kind, Level, Meta};
use crate::{Cas, DocKey, RevSeqno, Seqno};

/// What was written. Clones share it.
///
/// 1. Nothing of it changes but its heat, who counts it and, once, the place of its commit.
/// 2. Seqno and revision fit 48 bits, as in the file.
#[derive(Clone)]
pub struct Body(ThinArc<Head, u8>);

/// What a body says beside its bytes: the id, then six bytes of a prepare's seqno if the kind has one, then two of the
/// revision if it is a high one, four of the flags and four of the expiry if they are not 0, then the value.
struct Head {
    cas: u64,
    seqno_low: u32,
    rev_low: u32,
    seqno_high: u16,
    /// How many seqnos after the prepare that it was made as it was committed; 0: it was not, or not as this body.
    committed_after: AtomicU16,
    /// The bits of a datatype, and two more.
    datatype: u8,
    id_len: u8,
    bits: u8,
    /// Low six bits: how much it is in use, see [`Body::warm`]. Above: who holds it, see [`HeldBy`].
    usage: AtomicU8,
}

const _: () = assert!(size_of::<Head>() == 24 && size_of::<Option<Body>>() == 8);

/// Of `Head::bits`: why deleted (0: it is not), the kind, and three more.
const DELETED_MASK: u8 = 3;
const KIND_SHIFT: u8 = 2;
const KIND_MASK: u8 = 7;
const HAS_HIGH_REV: u8 = 1 << 5;
pub(crate) const HAS_VALUE: u8 = 1 << 6;
pub(crate) const ELSEWHERE: u8 = 1 << 7;

/// Of `Head::datatype`.
const DATATYPE_MASK: u8 = Datatype::JSON.with(Datatype::SNAPPY).with(Datatype::XATTR).0;
const HAS_FLAGS: u8 = 1 << 6;
const HAS_EXPIRY: u8 = 1 << 7;

/// Kinds. A prepare is this and its level.
const DOCUMENT: u8 = 0;
const COMMIT: u8 = 1;
const ABORT: u8 = 2;
const PREPARE: u8 = 4;

/// What may be among the bytes: a prepare's seqno, the high part of a revision, the flags, the expiry.
const PREPARED_BYTES: usize = 6;
const HIGH_REV_BYTES: usize = 2;
const FLAGS_BYTES: usize = 4;
const EXPIRY_BYTES: usize = 4;

/// One more than the highest heat.
pub const HEATS: usize = 64;
const HEAT_MASK: u8 = 63;
/// Of a body just made or just brought back: it gets its chance before it may leave.
const HEAT_FRESH: u8 = 2;
/// Heat counts uses one by one up to here; each further step of this many takes twice as many uses.
const HEAT_STEP: u8 = 4;

/// Who counts a body's memory. One that is in both is counted once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum HeldBy {
    Table = 64,
    Log = 128,
}

/// Who counts it at a moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holders(u8);

impl Holders {
    pub const NOBODY: Holders = Holders(0);

    pub const fn only(by: HeldBy) -> Holders {
        Holders(by as u8)
    }

    pub const fn has(self, by: HeldBy) -> bool {
        self.0 & by as u8 != 0
    }
}

impl Body {
    pub(crate) fn new(id: &[u8], meta: Meta, kind: Kind, value: &[u8], mut bits: u8) -> Body {
        assert!((meta.seqno.0 | meta.rev.0) >> 48 == 0, "seqnos and revisions have 48 bits");
        bits |= match meta.deleted {
            None => 0,
            Some(DeleteSource::Explicit) => 1,
            Some(DeleteSource::Expiry) => 2,
        };
        let (code, prepared) = match kind {
            Kind::Committed { prepared: None } => (DOCUMENT, None),
            Kind::Committed { prepared } => (COMMIT, prepared),
            Kind::Prepare { level } => (PREPARE | level as u8, None),
            Kind::Abort { prepared } => (ABORT, Some(prepared)),
        };
        let rev_high = (meta.rev.0 >> 32) as u16;
        if rev_high > 0 {
            bits |= HAS_HIGH_REV;
        }
        let mut datatype_bits = meta.datatype.0 & DATATYPE_MASK;
        if meta.flags != 0 {
            datatype_bits |= HAS_FLAGS;
        }
        if meta.expiry != 0 {
            datatype_bits |= HAS_EXPIRY;
        }
        let head = Head {
            cas: meta.cas.0,
            seqno_low: meta.seqno.0 as u32,
            rev_low: meta.rev.0 as u32,
            seqno_high: (meta.seqno.0 >> 32) as u16,
            committed_after: AtomicU16::new(0),
            datatype: datatype_bits,
            id_len: u8::try_from(id.len()).expect("ids have at most 251 bytes"),
            bits: bits | code << KIND_SHIFT,
            usage: AtomicU8::new(HEAT_FRESH),
        };
        // Put together here first: only bytes that lie side by side can be copied into place in one go.
        SCRATCH.with_borrow_mut(|bytes| {
            bytes.clear();
            bytes.extend_from_slice(id);
            if let Some(prepared) = prepared {
                bytes.extend_from_slice(&prepared.0.to_be_bytes()[8 - PREPARED_BYTES..]);
            }
            if rev_high > 0 {
                bytes.extend_from_slice(&rev_high.to_be_bytes());
            }
            if meta.flags != 0 {
                bytes.extend_from_slice(&meta.flags.to_be_bytes());
            }
            if meta.expiry != 0 {
                bytes.extend_from_slice(&meta.expiry.to_be_bytes());
            }
            bytes.extend_from_slice(value);
            let body = Body(ThinArc::from_header_and_slice(head, bytes));
            bytes.shrink_to(SCRATCH_BYTES_MAX);
            body
        })
    }

    fn head(&self) -> &Head {
        &self.0.header.header
    }

    fn has(&self, bit: u8) -> bool {
        self.head().bits & bit != 0
    }

    fn code(&self) -> u8 {
        self.head().bits >> KIND_SHIFT & KIND_MASK
    }

    fn has_prepared(&self) -> bool {
        matches!(self.code(), COMMIT | ABORT)
    }

    fn number_at(&self, at: usize, bytes: usize) -> u64 {
        self.0.slice[at..at + bytes].iter().fold(0, |n, byte| n << 8 | u64::from(*byte))
    }

    fn id_len(&self) -> usize {
        usize::from(self.head().id_len)
    }

    fn rev_at(&self) -> usize {
        self.id_len() + if self.has_prepared() { PREPARED_BYTES } else { 0 }
    }

    fn flags_at(&self) -> usize {
        self.rev_at() + if self.has(HAS_HIGH_REV) { HIGH_REV_BYTES } else { 0 }
    }

    fn has_flags(&self) -> bool {
        self.head().datatype & HAS_FLAGS != 0
    }

    fn expiry_at(&self) -> usize {
        self.flags_at() + if self.has_flags() { FLAGS_BYTES } else { 0 }
    }

    fn has_expiry(&self) -> bool {
        self.head().datatype & HAS_EXPIRY != 0
    }

    fn value_at(&self) -> usize {
        self.expiry_at() + if self.has_expiry() { EXPIRY_BYTES } else { 0 }
    }

    /// The metadata as it was made.
    pub(crate) fn meta(&self) -> Meta {
        let head = self.head();
        let rev_high = if self.has(HAS_HIGH_REV) { self.number_at(self.rev_at(), HIGH_REV_BYTES) } else { 0 };
        Meta {
            seqno: self.seqno(),
            cas: Cas(head.cas),
            rev: RevSeqno(rev_high << 32 | u64::from(head.rev_low)),
            flags: if self.has_flags() { self.number_at(self.flags_at(), FLAGS_BYTES) as u32 } else { 0 },
            expiry: self.expiry(),
            datatype: Datatype(head.datatype & DATATYPE_MASK),
            deleted: match head.bits & DELETED_MASK {
                0 => None,
                1 => Some(DeleteSource::Explicit),
                _ => Some(DeleteSource::Expiry),
            },
        }
    }

    /// What it was made as.
    pub(crate) fn kind(&self) -> Kind {
        let prepared = || Seqno(self.number_at(self.id_len(), PREPARED_BYTES));
        match self.code() {
            DOCUMENT => Kind::Committed { prepared: None },
            COMMIT => Kind::Committed { prepared: Some(prepared()) },
            ABORT => Kind::Abort { prepared: prepared() },
            prepare => Kind::Prepare { level: Level::from_wire(prepare & !PREPARE).expect("made from a level") },
        }
    }

    /// Where it was made.
    pub(crate) fn seqno(&self) -> Seqno {
        let head = self.head();
        Seqno(u64::from(head.seqno_high) << 32 | u64::from(head.seqno_low))
    }

    pub(crate) fn is_prepare(&self) -> bool {
        self.code() & PREPARE != 0
    }

    pub(crate) fn is_abort(&self) -> bool {
        self.code() == ABORT
    }

    pub(crate) fn committed_after(&self) -> u16 {
        self.head().committed_after.load(Acquire)
    }

    /// Keeps where it was committed. False: it was committed elsewhere before.
    pub(crate) fn set_committed_after(&self, after: u16) -> bool {
        match self.head().committed_after.compare_exchange(0, after, AcqRel, Acquire) {
            Ok(_) => true,
            Err(before) => before == after,
        }
    }

    /// The body of a document as a change: what committed it, if it was made as a prepare.
    pub fn committed(&self) -> Item {
        Item::seen(self.clone(), self.committed_after())
    }

    /// The seqno of [`Body::committed`].
    pub fn committed_seqno(&self) -> Seqno {
        Seqno(self.seqno().0 + u64::from(self.committed_after()))
    }

    pub fn key(&self) -> DocKey<'_> {
        DocKey::parse(self.id()).expect("items are made from checked keys")
    }

    /// The id bytes: collection prefix + logical key.
    pub fn id(&self) -> &[u8] {
        &self.0.slice[..self.id_len()]
    }

    /// The stored value: xattr section (if the datatype says so) and body, compressed if the datatype says so.
    /// Meaningless unless [`Body::resident`].
    pub fn value(&self) -> &[u8] {
        &self.0.slice[self.value_at()..]
    }

    /// Whether there is a value at all (an empty one counts). A tombstone without xattrs has none.
    pub fn has_value(&self) -> bool {
        self.has(HAS_VALUE)
    }

    /// False: the value must be fetched from the file first.
    pub fn resident(&self) -> bool {
        !self.has(ELSEWHERE)
    }

    pub fn is_deleted(&self) -> bool {
        self.has(DELETED_MASK)
    }

    /// See [`Meta::expiry`].
    pub fn expiry(&self) -> u32 {
        if self.has_expiry() { self.number_at(self.expiry_at(), EXPIRY_BYTES) as u32 } else { 0 }
    }

    /// How much it is in use, below [`HEATS`], on a scale on which a step of 4 is twice the uses.
    pub fn heat(&self) -> u8 {
        self.head().usage.load(Relaxed) & HEAT_MASK
    }

    pub fn set_heat(&self, heat: u8) {
        let usage = self.head().usage.load(Relaxed);
        // Whoever comes between says something newer.
        let _ = self.head().usage.compare_exchange(usage, usage & !HEAT_MASK | heat & HEAT_MASK, Relaxed, Relaxed);
    }

    /// It was used. `dice` is any number that differs from use to use. What is in constant use is written to rarely; two
    /// uses at once may count as one.
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

    /// Notes that it is held. Returns who held it before.
    pub fn enter(&self, by: HeldBy) -> Holders {
        Holders(self.head().usage.fetch_or(by as u8, AcqRel) & !HEAT_MASK)
    }

    /// Notes that it is held no longer. Returns who held it before.
    pub fn leave(&self, by: HeldBy) -> Holders {
        Holders(self.head().usage.fetch_and(!(by as u8), AcqRel) & !HEAT_MASK)
    }

    /// Bytes of memory it takes (not the table slot that points to it).
    pub fn memory(&self) -> usize {
        memory_of(self.0.slice.len())
    }

    /// Those of them that [`Item::stripped`] saves.
    pub fn memory_of_value(&self) -> usize {
        self.memory() - memory_of(self.value_at())
    }
}

/// Two counts before the head and the bytes after it.
const fn memory_of(bytes: usize) -> usize {
    allocated(16 + size_of::<Head>() + bytes)
}

thread_local! {
    static SCRATCH: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// What a thread keeps for the next one; enough for nearly all.
const SCRATCH_BYTES_MAX: usize = 64 << 10;

/// What asking the allocator for `bytes` costs. It has sizes in steps of 16 up to 128, and four from each power of two to
/// the next.
pub const fn allocated(bytes: usize) -> usize {
    let step = if bytes <= 128 { 16 } else { 1 << ((bytes - 1).ilog2() - 2) };
    bytes.next_multiple_of(step)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::KeyBuf;

    fn meta() -> Meta {
        Meta {
            seqno: Seqno(1),
            cas: Cas(1),
            rev: RevSeqno(u64::from(u32::MAX)),
            flags: 0,
            expiry: 0,
            datatype: Datatype::RAW,
            deleted: None,
        }
    }

    #[test]
    fn a_small_document_takes_one_small_allocation() {
        let key = KeyBuf::in_default_collection(b"key_0000000001").unwrap();
        let item = Item::new(key.as_key(), meta(), Kind::Committed { prepared: None }, Some(&[0; 100]));
        assert_eq!(item.memory(), 160);
        assert_eq!((item.stripped().memory(), item.memory_of_value()), (64, 96));
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
        assert_eq!(item.enter(HeldBy::Log), Holders::NOBODY);
        item.set_heat(63);
        assert_eq!(item.enter(HeldBy::Table), Holders::only(HeldBy::Log));
        let both = item.leave(HeldBy::Log);
        assert!(both.has(HeldBy::Log) && both.has(HeldBy::Table));
        assert_eq!(item.leave(HeldBy::Table), Holders::only(HeldBy::Table));
        assert_eq!(item.heat(), 63);
        item.warm(0);
        assert_eq!(item.heat(), 63);
    }
}
