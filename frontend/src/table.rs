//! The connection table: slots, owned by the workers in equal shares.
//!
//! A slot is taken from the worker with the fewest connections and goes back to the same worker's list, so a
//! connection never moves and nobody scans. Freed slots are reused last in, first out, which keeps the touched memory
//! small; slots never used are not there yet, so a large table costs nothing until it fills. How many may be taken is
//! the ledger's business: whoever takes a slot has a permit for its socket, and a resize of the table is one of the
//! ledger. Statistics walk one worker's share at a time, under a lock that accept and close hold for a few
//! instructions.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use types::rank::Rank;
use types::sync::{AtomicU32, Mutex};

use crate::connection::Info;

/// Which connection. Equal slots of different generations are different connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Slot {
    pub index: u32,
    pub generation: u32,
}

/// 1. A slot is free, or has exactly one owner and an entry on the active list: free + active = slots made, and no more
///    are made than were ever taken together.
/// 2. The generation grows at each release, so a late event or answer finds another number and is dropped.
/// 3. [`Table::release`] is the only way back, and it panics on a slot that is not taken, or whose connection still waits
///    for answers or has some to send.
pub struct Table {
    shares: Box<[Share]>,
    /// Connections are spread from here when several workers have equally few.
    turn: AtomicU32,
}

struct Share {
    active: AtomicU32,
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
    pub fn new(workers: usize) -> Table {
        assert!(workers > 0, "somebody has to own the slots");
        let share = |_| Share { active: AtomicU32::new(0), slots: Mutex::ranked(Rank::RunQueue, Slots::default()) };
        Table { shares: (0..workers).map(share).collect(), turn: AtomicU32::new(0) }
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

    /// Takes a slot of the least loaded worker, and puts what `info` makes for it on the active list. For holders of a
    /// permit only.
    pub fn take(&self, info: impl FnOnce(Slot) -> Arc<Info>) -> (Slot, Arc<Info>) {
        let workers = self.shares.len();
        let first = self.turn.fetch_add(1, Relaxed) as usize;
        let least = (0..workers).map(|w| (first + w) % workers).min_by_key(|&w| self.shares[w].active.load(Relaxed));
        let worker = least.unwrap_or(0);
        let share = &self.shares[worker];
        share.active.fetch_add(1, Relaxed);
        let mut slots = share.slots.lock();
        let place = slots.free.pop().unwrap_or_else(|| {
            slots.entries.push(Entry { generation: 0, info: None });
            slots.entries.len() as u32 - 1
        });
        let entry = &mut slots.entries[place as usize];
        assert!(entry.info.is_none(), "a slot has one owner");
        let slot = Slot { index: place * workers as u32 + worker as u32, generation: entry.generation };
        let info = info(slot);
        entry.info = Some(info.clone());
        drop(slots);
        (slot, info)
    }

    /// Gives a slot back.
    pub fn release(&self, slot: Slot) {
        let share = &self.shares[self.worker_of(slot)];
        let place = self.place_of(slot);
        let mut slots = share.slots.lock();
        let entry = &mut slots.entries[place];
        assert_eq!(entry.generation, slot.generation, "a slot is released by its owner");
        let Some(info) = entry.info.take() else { panic!("a slot is released once") };
        assert!(info.is_at_rest(), "what is under way belongs to somebody");
        entry.generation = entry.generation.wrapping_add(1);
        slots.free.push(place as u32);
        assert!(slots.free.len() <= slots.entries.len(), "a free slot is on the list once");
        drop(slots);
        share.active.fetch_sub(1, Relaxed);
    }

    /// Visits every connection, one worker's share after the other.
    pub fn walk(&self, mut visit: impl FnMut(&Info)) {
        for share in &self.shares {
            let infos: Vec<_> = share.slots.lock().entries.iter().filter_map(|entry| entry.info.clone()).collect();
            infos.iter().for_each(|info| visit(info));
        }
    }

    /// Slots made, and how many of them are free.
    #[cfg(test)]
    fn made_and_free(&self) -> (usize, usize) {
        let counts = self.shares.iter().map(|share| {
            let slots = share.slots.lock();
            (slots.entries.len(), slots.free.len())
        });
        counts.fold((0, 0), |(made, free), (m, f)| (made + m, free + f))
    }
}

#[cfg(test)]
fn info_of(slot: Slot) -> Arc<Info> {
    Arc::new(Info::new(slot, "127.0.0.1:1".parse().expect("an address"), Default::default()))
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn take(table: &Table) -> Slot {
        table.take(info_of).0
    }

    #[test]
    fn every_slot_is_somebodys_once_and_the_workers_stay_even() {
        let table = Table::new(3);
        let slots: Vec<Slot> = (0..8).map(|_| take(&table)).collect();
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
        let table = Table::new(1);
        let first = take(&table);
        table.release(first);
        let second = take(&table);
        assert_eq!((second.index, second.generation), (first.index, first.generation + 1));
    }

    #[test]
    #[should_panic(expected = "a slot is released")]
    fn releasing_twice_panics() {
        let table = Table::new(1);
        let slot = take(&table);
        table.release(slot);
        table.release(slot);
    }

    #[test]
    fn the_active_list_shows_who_is_connected() {
        let table = Table::new(2);
        let slots: Vec<Slot> = (0..4).map(|_| take(&table)).collect();
        table.release(slots[1]);
        let mut seen = Vec::new();
        table.walk(|info| seen.push(info.slot.index));
        seen.sort();
        let mut expected = vec![slots[0].index, slots[2].index, slots[3].index];
        expected.sort();
        assert_eq!(seen, expected);
    }

    proptest! {
        /// Goal: free + active = made, and no more are made than were ever out together. Method: any order of coming
        /// and going; the slots that are out are all different.
        #[test]
        fn slots_add_up_whatever_the_order(workers in 1usize..5, steps in proptest::collection::vec(any::<u16>(), 1..200)) {
            let table = Table::new(workers);
            let (mut out, mut most) = (Vec::new(), 0);
            for step in steps {
                if step % 3 == 0 && !out.is_empty() {
                    table.release(out.swap_remove(usize::from(step) % out.len()));
                } else {
                    let slot = take(&table);
                    prop_assert!(out.iter().all(|other: &Slot| other.index != slot.index));
                    out.push(slot);
                }
                most = most.max(out.len());
                let (made, free) = table.made_and_free();
                prop_assert_eq!(free + out.len(), made);
                // Closes may fall on one worker, whose share then grew for the others' sake.
                prop_assert!(made < most + workers * most.max(1));
            }
        }
    }
}

#[cfg(all(test, loom))]
mod models {
    use super::*;
    use loom::sync::atomic::AtomicBool;
    use loom::thread;

    /// Goal: no slot has two owners. Method: two take and give back at once; each marks its slot as its own meanwhile.
    #[test]
    fn no_slot_is_handed_out_twice() {
        loom::model(|| {
            let table = loom::sync::Arc::new(Table::new(1));
            let owned = loom::sync::Arc::new([AtomicBool::new(false), AtomicBool::new(false)]);
            let visit = |table: &Table, owned: &[AtomicBool; 2]| {
                let (slot, _) = table.take(info_of);
                let owned = &owned[slot.index as usize];
                assert!(!owned.swap(true, Relaxed), "it is somebody else's");
                assert!(owned.swap(false, Relaxed));
                table.release(slot);
            };
            let other = {
                let (table, owned) = (table.clone(), owned.clone());
                thread::spawn(move || visit(&table, &owned))
            };
            visit(&table, &owned);
            other.join().unwrap();
            assert_eq!(table.active(), 0);
            let (made, free) = table.made_and_free();
            assert!(made == free && made <= 2);
        });
    }
}
