//! What few keys of a stripe have beside their document: a sync write under way, or a lock.
//!
//! With a thousand vBuckets most stripes never have more than one prepare at a time, so the first is kept without
//! allocating anything; who writes durably pays for no table.

use std::time::Duration;

use hashbrown::HashTable as Table;
use types::{Cas, Item, Seqno, allocated};

use crate::hash_table::HashSeed;

/// A pessimistic lock: in memory only, gone with the process.
#[derive(Debug)]
pub struct Lock {
    /// The CAS that opens it; fresh, beside the document's own.
    pub cas: Cas,
    /// On the monotonic clock.
    pub until: Duration,
}

/// No lock holds longer.
pub const LOCK_MAX: Duration = Duration::from_secs(30);

/// 1. A key has at most one prepare.
/// 2. `rare` is there only while it holds anything.
#[derive(Default)]
pub(crate) struct Beside {
    prepare: Option<Item>,
    rare: Option<Box<Rare>>,
}

/// What hardly any stripe has: prepares beyond the first, and locks.
#[derive(Default)]
struct Rare {
    prepares: Table<Item>,
    locks: Table<(Box<[u8]>, Lock)>,
}

impl Beside {
    pub fn prepares(&self) -> impl Iterator<Item = &Item> {
        self.prepare.iter().chain(self.rare.iter().flat_map(|rare| &rare.prepares))
    }

    pub fn prepare(&self, hash: u64, id: &[u8]) -> Option<&Item> {
        let is_its = |item: &Item| item.id() == id;
        let first = self.prepare.as_ref().filter(|item| is_its(item));
        first.or_else(|| self.rare.as_ref()?.prepares.find(hash, is_its))
    }

    pub fn put_prepare(&mut self, hash: u64, item: Item, seed: HashSeed) {
        match &self.prepare {
            None => self.prepare = Some(item),
            Some(_) => {
                let prepares = &mut self.rare.get_or_insert_default().prepares;
                prepares.insert_unique(hash, item, |item| seed.hash(item.id()));
            }
        }
    }

    pub fn take_prepare(&mut self, hash: u64, id: &[u8], seqno: Seqno) -> Option<Item> {
        let is_its = |item: &Item| item.seqno() == seqno && item.id() == id;
        if let Some(first) = self.prepare.take_if(|item| is_its(item)) {
            return Some(first);
        }
        let found = self.rare.as_mut()?.prepares.find_entry(hash, is_its);
        let item = found.ok()?.remove().0;
        self.tidy();
        Some(item)
    }

    pub fn lock(&self, hash: u64, id: &[u8]) -> Option<&Lock> {
        self.rare.as_ref()?.locks.find(hash, |held| *held.0 == *id).map(|held| &held.1)
    }

    /// Whether the key has either.
    pub fn has(&self, hash: u64, id: &[u8]) -> bool {
        self.prepare(hash, id).is_some() || self.lock(hash, id).is_some()
    }

    /// A lock in place of the one there is, if there is one.
    pub fn set_lock(&mut self, hash: u64, id: &[u8], lock: Option<Lock>, seed: HashSeed) {
        let locks = &mut self.rare.get_or_insert_default().locks;
        if let Ok(held) = locks.find_entry(hash, |held| *held.0 == *id) {
            held.remove();
        }
        if let Some(lock) = lock {
            if locks.len() == locks.capacity() {
                locks.retain(|held| held.1.until + LOCK_MAX > lock.until);
            }
            locks.insert_unique(hash, (id.into(), lock), |held| seed.hash(&held.0));
        }
        self.tidy();
    }

    pub fn has_locks(&self) -> bool {
        self.rare.as_ref().is_some_and(|rare| !rare.locks.is_empty())
    }

    pub fn is_empty(&self) -> bool {
        self.prepare.is_none() && self.rare.is_none()
    }

    fn tidy(&mut self) {
        if self.rare.as_ref().is_some_and(|rare| rare.prepares.is_empty() && rare.locks.is_empty()) {
            self.rare = None;
        }
    }

    /// Bytes that were allocated.
    pub fn memory(&self) -> usize {
        self.rare.as_ref().map_or(0, |rare| {
            // The ids of locks are taken for average ones.
            let (prepares, locks) = (memory_of(&rare.prepares), memory_of(&rare.locks));
            allocated(size_of::<Rare>()) + prepares + locks + rare.locks.len() * allocated(32)
        })
    }
}

pub(crate) fn memory_of<T>(table: &Table<T>) -> usize {
    if table.capacity() == 0 { 0 } else { allocated(table.allocation_size()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use types::{Datatype, KeyBuf, Kind, Level, Meta, RevSeqno};

    fn prepare(seqno: u64) -> Item {
        let key = KeyBuf::in_default_collection(format!("k{seqno}").as_bytes()).unwrap();
        let (cas, rev, datatype) = (Cas(seqno), RevSeqno(1), Datatype::RAW);
        let meta = Meta { seqno: Seqno(seqno), cas, rev, flags: 0, expiry: 0, datatype, deleted: None };
        Item::new(key.as_key(), meta, Kind::Prepare { level: Level::Majority }, Some(b"v"))
    }

    #[test]
    fn each_prepare_is_found_and_taken_once_whichever_goes_first() {
        let (seed, items) = (HashSeed([1, 2]), [1, 2, 3].map(prepare));
        for order in [[0, 1, 2], [2, 1, 0], [1, 0, 2], [1, 2, 0]] {
            let mut beside = Beside::default();
            let hash = |item: &Item| seed.hash(item.id());
            beside.put_prepare(hash(&items[0]), items[0].clone(), seed);
            assert_eq!(beside.memory(), 0);
            items[1..].iter().for_each(|item| beside.put_prepare(hash(item), item.clone(), seed));
            for (n, item) in order.map(|n| &items[n]).into_iter().enumerate() {
                assert_eq!((beside.prepare(hash(item), item.id()), beside.prepares().count()), (Some(item), 3 - n));
                assert!(beside.take_prepare(hash(item), item.id(), Seqno(9)).is_none());
                assert!(beside.take_prepare(hash(item), item.id(), item.seqno()).is_some());
                assert!(!beside.has(hash(item), item.id()));
            }
            assert!(beside.is_empty() && beside.memory() == 0);
        }
    }
}
