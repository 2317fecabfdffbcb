//! Which segments hold what is not filed yet, and which can be used again.

use std::collections::VecDeque;

use hashbrown::{HashMap, HashSet};
use types::{BucketUuid, Seqno, VbId};

use crate::segment::{Resting, Segment};

/// A vBucket of a bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Key {
    pub bucket: BucketUuid,
    pub vb: VbId,
}

/// How far a vBucket's changes reach: in seqnos, and in versions of its record. A seqno after a rollback is further than
/// any before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Mark {
    pub seqno: Seqno,
    pub record_version: u64,
    pub rollbacks: u32,
}

impl Mark {
    /// Goes on to `to`, as far as that is further.
    pub fn rise(&mut self, to: Mark) {
        (self.rollbacks, self.seqno) = (self.rollbacks, self.seqno).max((to.rollbacks, to.seqno));
        self.record_version = self.record_version.max(to.record_version);
    }

    fn covers(&self, other: &Mark) -> bool {
        (self.rollbacks, self.seqno) >= (other.rollbacks, other.seqno) && self.record_version >= other.record_version
    }
}

pub(crate) type Marks = HashMap<Key, Mark>;

/// The segments that are not written to.
///
/// 1. `sealed` is in order of sequence, and every one of them is older than the active one.
/// 2. `holders` are the marks of `sealed[0]` that `filed` does not cover; it is never empty while there is a `sealed[0]`.
/// 3. A segment is in `spares` only when all in it is filed, or of a bucket that is gone.
pub(crate) struct Space {
    sealed: VecDeque<(Resting, Marks)>,
    holders: Marks,
    filed: Marks,
    forgotten: HashSet<BucketUuid>,
    pub spares: Vec<Resting>,
    /// Durable headers and no records; the first is next.
    pub ready: VecDeque<Segment>,
    /// Somebody is making a segment ready.
    pub preparing: bool,
    /// The highest sequence that was given out.
    pub newest: u64,
    pub active_sequence: u64,
    /// Files there are or are being made.
    pub files: usize,
    pub next_number: u32,
}

impl Space {
    pub fn new(ready: VecDeque<Segment>, spares: Vec<Resting>, active_sequence: u64, next_number: u32) -> Space {
        let newest = ready.back().map_or(active_sequence, |segment| segment.header.sequence);
        Space {
            sealed: VecDeque::new(),
            holders: Marks::new(),
            filed: Marks::new(),
            forgotten: HashSet::new(),
            files: 1 + ready.len() + spares.len(),
            spares,
            ready,
            preparing: false,
            newest,
            active_sequence,
            next_number,
        }
    }

    /// Takes a segment that is full.
    pub fn seal(&mut self, segment: Resting, marks: Marks) {
        self.sealed.push_back((segment, marks));
        if self.sealed.len() == 1 {
            self.look_at_oldest();
        }
    }

    /// The vBucket's file holds everything up to `mark`. True: a segment became free.
    pub fn release(&mut self, key: Key, mark: Mark) -> bool {
        let filed = self.filed.entry(key).or_default();
        filed.rise(mark);
        match self.holders.get(&key) {
            Some(wanted) if filed.covers(wanted) => drop(self.holders.remove(&key)),
            _ => return false,
        }
        self.holders.is_empty() && self.free_oldest()
    }

    /// Nothing of this bucket is needed any more, now or later. True: a segment became free.
    pub fn forget(&mut self, bucket: BucketUuid) -> bool {
        self.forgotten.insert(bucket);
        self.filed.retain(|key, _| key.bucket != bucket);
        self.holders.retain(|key, _| key.bucket != bucket);
        !self.sealed.is_empty() && self.holders.is_empty() && self.free_oldest()
    }

    /// What keeps the oldest segment from being used again.
    pub fn holders(&self) -> &Marks {
        &self.holders
    }

    pub fn oldest_sequence(&self) -> u64 {
        self.sealed.front().map_or(self.active_sequence, |(segment, _)| segment.header.sequence)
    }

    pub fn sealed_bytes(&self) -> u64 {
        self.sealed.iter().map(|(segment, _)| segment.header.segment_bytes).sum()
    }

    pub fn sealed_count(&self) -> usize {
        self.sealed.len()
    }

    fn free_oldest(&mut self) -> bool {
        let (segment, _) = self.sealed.pop_front().expect("holders belong to a segment");
        self.spares.push(segment);
        self.look_at_oldest();
        true
    }

    /// Finds what holds the oldest segment; frees it, and those after it, if nothing does. Each segment's marks are looked
    /// at once, so a release costs no more than the write it is for.
    fn look_at_oldest(&mut self) {
        while let Some((_, marks)) = self.sealed.front_mut() {
            self.holders = std::mem::take(marks);
            let (filed, forgotten) = (&self.filed, &self.forgotten);
            self.holders.retain(|key, mark| {
                !forgotten.contains(&key.bucket) && !filed.get(key).is_some_and(|filed| filed.covers(mark))
            });
            if !self.holders.is_empty() {
                return;
            }
            let (segment, _) = self.sealed.pop_front().expect("seen above");
            self.spares.push(segment);
        }
    }
}
