//! Readers that may be left behind.
//!
//! ```text
//!     [ 17 ][ 18 ][ 19 ][ 20 ][ 21 ]
//!       ▲           ▲           ▲
//!     follower    flusher     follower          17, 18: kept for the first follower alone
//! ```
//!
//! A change that the flusher has not passed is in no file, so it stays whoever else wants it. One that only a follower still
//! wants is in the file too: it stays as long as there is room for such, and a follower that finds its place gone goes on
//! with the file. So a consumer that takes its time costs a bounded amount of memory, whatever it does.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering::Relaxed};

use types::{Item, Seqno};

/// How much may be kept for followers alone; shared by many logs.
///
/// 1. A log that holds no more than its share of `bytes_max`, among those that hold any, is left alone even if there is too
///    much: otherwise one slow follower of a quiet log would have all others left behind. So there may be twice as much.
#[derive(Debug)]
pub struct Allowance {
    bytes: AtomicI64,
    bytes_max: AtomicI64,
    /// Logs that hold any.
    holders: AtomicI64,
}

impl Allowance {
    pub fn new(bytes_max: u64) -> Allowance {
        Allowance { bytes: AtomicI64::new(0), bytes_max: AtomicI64::new(clamp(bytes_max)), holders: AtomicI64::new(0) }
    }

    pub fn set(&self, bytes_max: u64) {
        self.bytes_max.store(clamp(bytes_max), Relaxed);
    }

    /// Bytes kept for followers alone now.
    pub fn used_bytes(&self) -> u64 {
        self.bytes.load(Relaxed).max(0) as u64
    }

    /// A log that held `before` bytes holds `now`.
    fn change(&self, before: i64, now: i64) {
        self.bytes.fetch_add(now - before, Relaxed);
        self.holders.fetch_add(i64::from(now > 0) - i64::from(before > 0), Relaxed);
    }

    /// Whether a log that holds so much has to let go of it.
    fn is_too_much(&self, held: i64) -> bool {
        let bytes_max = self.bytes_max.load(Relaxed);
        let share = bytes_max / self.holders.load(Relaxed).max(1);
        self.bytes.load(Relaxed) > bytes_max && held > share
    }
}

impl Default for Allowance {
    fn default() -> Allowance {
        Allowance::new(u64::MAX)
    }
}

fn clamp(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

/// A place in the log that does not hold on to what follows it at all costs.
#[derive(Debug)]
pub struct Follower {
    id: u32,
}

struct Place {
    id: u32,
    next: Seqno,
    is_lost: bool,
}

/// The followers of one log.
///
/// 1. `bytes` is the memory of the entries below `passed`, and is part of what `allowance` counts.
/// 2. One that is lost holds nothing, and stays lost.
#[derive(Default)]
pub(crate) struct Followers {
    places: Vec<Place>,
    made: u32,
    /// Every other reader has passed what comes before.
    passed: Seqno,
    bytes: i64,
    allowance: Arc<Allowance>,
}

impl Followers {
    pub fn set_allowance(&mut self, allowance: Arc<Allowance>) {
        self.allowance = allowance;
    }

    pub fn add(&mut self, next: Seqno) -> Follower {
        self.made += 1;
        self.places.push(Place { id: self.made, next, is_lost: false });
        Follower { id: self.made }
    }

    pub fn remove(&mut self, follower: Follower) {
        self.places.retain(|place| place.id != follower.id);
    }

    /// What it wants next. `None`: it was left behind.
    pub fn next_of(&self, follower: &Follower) -> Option<Seqno> {
        let place = self.places.iter().find(|place| place.id == follower.id).expect("a follower belongs to its log");
        (!place.is_lost).then_some(place.next)
    }

    /// It has what comes before `next`. True: that was kept for it.
    pub fn advance(&mut self, follower: &Follower, next: Seqno) -> bool {
        let place = self.places.iter_mut().find(|place| place.id == follower.id);
        let place = place.expect("a follower belongs to its log");
        std::mem::replace(&mut place.next, next) < self.passed
    }

    /// The first seqno that is to be kept, when every other reader has passed what comes before `passed`.
    pub fn hold(&mut self, passed: Seqno, entries: &VecDeque<Item>) -> Seqno {
        if passed < self.passed {
            // A reader came that starts among what was kept for followers: it keeps it now.
            return self.places.iter().filter(|place| !place.is_lost).map(|place| place.next).fold(passed, Seqno::min);
        }
        let before = std::mem::replace(&mut self.passed, passed);
        if self.places.is_empty() && self.bytes == 0 {
            return passed;
        }
        let wanted = self.places.iter().filter(|place| !place.is_lost).map(|place| place.next);
        let keep_from = wanted.min().map_or(passed, |next| next.min(passed));
        if self.bytes == 0 && passed == before {
            // The slowest reader has not moved: nothing is newly kept, and nothing was.
            return keep_from;
        }
        let from = entries.partition_point(|item| item.seqno() < keep_from.max(before));
        let upto = |item: &&Item| item.seqno() < passed;
        let kept: usize = entries.range(from..).take_while(upto).map(Item::memory).sum();
        let let_go = entries.iter().take_while(|item| item.seqno() < keep_from.min(before));
        let let_go: usize = let_go.map(Item::memory).sum();
        self.set_bytes(self.bytes + kept as i64 - let_go as i64);
        if self.allowance.is_too_much(self.bytes) { self.leave_behind() } else { keep_from }
    }

    fn set_bytes(&mut self, bytes: i64) {
        self.allowance.change(self.bytes, bytes);
        self.bytes = bytes;
    }

    /// The log goes on from elsewhere, at `next`: nobody's place is there any more.
    pub fn begin_anew(&mut self, next: Seqno) {
        self.places.iter_mut().for_each(|place| place.is_lost = true);
        self.set_bytes(0);
        self.passed = next;
    }

    /// Those who want what nobody else does do not get it.
    fn leave_behind(&mut self) -> Seqno {
        let passed = self.passed;
        self.places.iter_mut().filter(|place| place.next < passed).for_each(|place| place.is_lost = true);
        self.set_bytes(0);
        passed
    }
}

impl Drop for Followers {
    fn drop(&mut self) {
        self.set_bytes(0);
    }
}
