//! The connection table: a fixed number of slots, owned in equal shares by the workers.
//!
//! A slot is taken from the worker with the fewest connections and goes back to the same worker's list, so a
//! connection never moves and nobody scans. Freed slots are reused last in, first out, which keeps the touched memory
//! small; slots never used are not there yet, so a large table costs nothing until it fills. Statistics walk one
//! worker's share at a time, under a lock that accept and close hold for a few instructions.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed, Ordering::SeqCst, fence};

use types::rank::{Mutex, Rank};

use crate::connection::Info;

/// Which connection. Equal slots of different generations are different connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Slot {
    pub index: u32,
    pub generation: u32,
}

/// 1. A slot is free, or has exactly one owner and an entry on the active list: free + active = capacity.
/// 2. The generation grows at each release, so a late event or answer finds another number and is dropped.
/// 3. [`Table::release`] is the only way back, and it panics on a slot that is not taken.
/// 4. Whoever was told "full" is told when that may have changed: see [`Table::take`].
pub struct Table {
    shares: Box<[Share]>,
    capacity: u32,
    /// Somebody waits for a slot.
    starved: AtomicBool,
    /// Connections are spread from here when several workers have equally few.
    turn: AtomicU32,
}

struct Share {
    active: AtomicU32,
    capacity: u32,
    slots: Mutex<Slots>,
}

#[derive(Default)]
struct Slots {
    entries: Vec<Entry>,
    free: Vec<u32>,
}

struct Entry {
    generation: u32,
    info: Option<Arc<Info>>,
}

impl Table {
    pub fn new(workers: usize, capacity: u32) -> Table {
        assert!(workers > 0 && capacity as usize >= workers, "every worker has at least one slot");
        let share = |w: u32| Share {
            active: AtomicU32::new(0),
            capacity: capacity / workers as u32 + u32::from(w < capacity % workers as u32),
            slots: Mutex::ranked(Rank::RunQueue, Slots::default()),
        };
        let shares = (0..workers as u32).map(share).collect();
        Table { shares, capacity, starved: AtomicBool::new(false), turn: AtomicU32::new(0) }
    }

    pub fn capacity(&self) -> u32 {
        self.capacity
    }

    pub fn active(&self) -> u32 {
        self.shares.iter().map(|share| share.active.load(Relaxed)).sum()
    }

    /// The worker that owns a slot.
    pub fn worker_of(&self, slot: Slot) -> usize {
        slot.index as usize % self.shares.len()
    }

    /// Where the owner keeps it: dense from 0 within each worker.
    pub fn place_of(&self, slot: Slot) -> usize {
        slot.index as usize / self.shares.len()
    }

    /// Takes a slot of the least loaded worker, and puts what `info` makes for it on the active list.
    ///
    /// `None`: all taken; the next release will answer true. That promise holds because both sides write, fence and
    /// then read the other's word:
    ///
    /// ```text
    ///     taker:     starved = true   fence   look for a slot once more
    ///     releaser:  slot is free     fence   starved?  yes: tell
    /// ```
    pub fn take(&self, info: impl FnOnce(Slot) -> Arc<Info>) -> Option<(Slot, Arc<Info>)> {
        let slot = self.find().or_else(|| {
            self.starved.store(true, Relaxed);
            fence(SeqCst);
            let slot = self.find();
            if slot.is_some() {
                self.starved.store(false, Relaxed);
            }
            slot
        })?;
        let info = info(slot);
        let mut slots = self.shares[self.worker_of(slot)].slots.lock();
        slots.entries[slot.index as usize / self.shares.len()].info = Some(info.clone());
        drop(slots);
        Some((slot, info))
    }

    /// Gives a slot back. True: somebody waits for one.
    #[must_use]
    pub fn release(&self, slot: Slot) -> bool {
        let share = &self.shares[self.worker_of(slot)];
        let place = slot.index as usize / self.shares.len();
        let mut slots = share.slots.lock();
        let entry = &mut slots.entries[place];
        assert_eq!(entry.generation, slot.generation, "a slot is released by its owner");
        assert!(entry.info.take().is_some(), "a slot is released once");
        entry.generation = entry.generation.wrapping_add(1);
        slots.free.push(place as u32);
        drop(slots);
        share.active.fetch_sub(1, Relaxed);
        fence(SeqCst);
        self.starved.swap(false, Relaxed)
    }

    /// Visits every connection, one worker's share after the other.
    pub fn walk(&self, mut visit: impl FnMut(&Info)) {
        for share in &self.shares {
            let infos: Vec<_> = share.slots.lock().entries.iter().filter_map(|entry| entry.info.clone()).collect();
            infos.iter().for_each(|info| visit(info));
        }
    }

    fn find(&self) -> Option<Slot> {
        let first = self.turn.fetch_add(1, Relaxed) as usize;
        let mut workers: Vec<usize> = (0..self.shares.len()).map(|w| (first + w) % self.shares.len()).collect();
        workers.sort_by_key(|&w| self.shares[w].active.load(Relaxed));
        workers.into_iter().find_map(|w| self.shares[w].find(w as u32, self.shares.len() as u32))
    }
}

impl Share {
    fn find(&self, worker: u32, workers: u32) -> Option<Slot> {
        let mut slots = self.slots.lock();
        let place = match slots.free.pop() {
            Some(place) => place,
            None if (slots.entries.len() as u32) < self.capacity => {
                slots.entries.push(Entry { generation: 0, info: None });
                slots.entries.len() as u32 - 1
            }
            None => return None,
        };
        let generation = slots.entries[place as usize].generation;
        self.active.fetch_add(1, Relaxed);
        Some(Slot { index: place * workers + worker, generation })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take(table: &Table) -> Option<Slot> {
        table.take(|slot| Arc::new(Info::new(slot, "127.0.0.1:1".parse().unwrap(), Default::default()))).map(|(s, _)| s)
    }

    #[test]
    fn every_slot_can_be_taken_once_and_the_workers_stay_even() {
        let table = Table::new(3, 8);
        let slots: Vec<Slot> = (0..8).map(|_| take(&table).expect("free")).collect();
        assert_eq!(take(&table), None);
        let mut indexes: Vec<u32> = slots.iter().map(|s| s.index).collect();
        indexes.sort();
        indexes.dedup();
        assert_eq!(indexes.len(), 8);
        let of = |w| slots.iter().filter(|s| table.worker_of(**s) == w).count();
        assert_eq!([of(0), of(1), of(2)], [3, 3, 2]);
        assert_eq!(table.active(), 8);
    }

    #[test]
    fn a_freed_slot_comes_back_as_another_generation() {
        let table = Table::new(1, 4);
        let first = take(&table).unwrap();
        assert!(!table.release(first), "nobody waits");
        let second = take(&table).unwrap();
        assert_eq!((second.index, second.generation), (first.index, first.generation + 1));
    }

    #[test]
    fn whoever_was_refused_is_told_of_the_next_free_slot_once() {
        let table = Table::new(2, 2);
        let (one, two) = (take(&table).unwrap(), take(&table).unwrap());
        assert_eq!(take(&table), None);
        assert!(table.release(one));
        assert!(!table.release(two));
        assert!(take(&table).is_some() && take(&table).is_some());
    }

    #[test]
    #[should_panic(expected = "a slot is released")]
    fn releasing_twice_panics() {
        let table = Table::new(1, 1);
        let slot = take(&table).unwrap();
        let _ = table.release(slot);
        let _ = table.release(slot);
    }

    #[test]
    fn the_active_list_shows_who_is_connected() {
        let table = Table::new(2, 5);
        let slots: Vec<Slot> = (0..4).map(|_| take(&table).unwrap()).collect();
        let _ = table.release(slots[1]);
        let mut seen = Vec::new();
        table.walk(|info| seen.push(info.slot.index));
        seen.sort();
        let mut expected = vec![slots[0].index, slots[2].index, slots[3].index];
        expected.sort();
        assert_eq!(seen, expected);
    }
}
