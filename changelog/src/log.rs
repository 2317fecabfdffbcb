//! The log itself: changes in memory in seqno order, and a cursor is a number.
//!
//! An active vBucket gives out its seqnos one after the other, so there a seqno is an index. A replica's come from its
//! peer, and some may be missing; there a place is found by halving.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering::Relaxed};

use env::Clock;
use types::rank::{Mutex, Rank};
use types::{Cas, HeldBy, Holders, Item, Seqno};

use crate::follow::{Allowance, Follower, Followers};
use crate::snapshot::{Snapshot, Snapshots};
use crate::{VbRecord, Watermarks};

/// What the log gives a change when it takes its place.
#[derive(Clone, Copy, Debug)]
pub struct Stamp {
    pub seqno: Seqno,
    pub cas: Cas,
}

/// A reader's place in the log: everything below `next` was read.
#[derive(Debug)]
pub struct Cursor {
    id: u32,
}

/// What a reader took in one go: a cut of the log, in seqno order, with all there is between its ends.
#[derive(Debug)]
pub struct Slice {
    /// What comes before was released earlier.
    pub from: Seqno,
    pub items: Vec<Item>,
    /// Everything up to here was read: the seqno of the last item or, if there are no more, the log's highest.
    pub last: Seqno,
    /// Those the items came in, of a replica; see [`Snapshots::at`].
    pub snapshots: Snapshots,
    /// Some changes have come from a peer, which may have left out seqnos.
    pub is_given: bool,
    /// The record as it was at the cut.
    pub record: Arc<VbRecord>,
    /// Grows with every [`Changelog::set_record`].
    pub record_version: u64,
}

impl Slice {
    /// There was nothing more to read.
    pub fn is_empty(&self) -> bool {
        self.last < self.from
    }

    /// If part of it came from a peer's disk, where what is decided is not in the order of the prepares: up to which prepare all
    /// are decided by the end of it, as far as the slice tells.
    pub fn decided_out_of_order(&self) -> Option<Seqno> {
        let parts = || self.snapshots.disks().filter(|part| part.start < self.last && self.from <= part.end);
        parts().next()?;
        let told = parts().filter(|part| part.end <= self.last).filter_map(|part| part.completed);
        let ordered = self.items.iter().filter(|item| self.snapshots.is_ordered(item.seqno()));
        Some(told.chain(ordered.filter_map(|item| item.kind().decides())).max().unwrap_or_default())
    }
}

/// Why a change from a peer has no place in the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotTaken {
    /// The log has come so far already.
    Behind(Seqno),
    /// The snapshot under way ends here, if there is one.
    Outside(Option<Seqno>),
}

/// The changes of one vBucket that some reader has yet to see, and the source of its seqnos and CAS values.
///
/// 1. Entries are in order of seqno, each once, none below `first` and none above `high`. Unless a peer left some out there
///    are as many as seqnos from `first` to `high`.
/// 2. CAS values given out only grow, whatever the wall clock does.
/// 3. An entry stays until every registered cursor has passed it *and said so* ([`Changelog::release`]).
/// 4. A body that two entries share is counted once, until the later one goes.
pub struct Changelog {
    inner: Mutex<Inner>,
    pub marks: Watermarks,
    /// Where the bytes are counted that are held for readers only; see [`Changelog::counted`].
    alone_bytes: Arc<AtomicI64>,
}

/// What an entry takes beside the item's body.
const ENTRY_BYTES: i64 = size_of::<Item>() as i64;

/// Room for entries that an empty log keeps for the next.
const ENTRIES_KEPT: usize = 32;

struct Inner {
    /// What comes before was released by every reader.
    first: Seqno,
    high: Seqno,
    entries: VecDeque<Item>,
    cas: Cas,
    cursors: Vec<Place>,
    cursors_made: u32,
    record: Arc<VbRecord>,
    record_version: u64,
    followers: Box<Followers>,
    snapshots: Snapshots,
    is_given: bool,
}

struct Place {
    id: u32,
    name: String,
    next: Seqno,
    /// Has not read since a rollback: what it releases is gone.
    is_stale: bool,
}

impl Changelog {
    /// A log that goes on after `high`, with CAS values above `cas`.
    pub fn new(high: Seqno, cas: Cas, record: VbRecord) -> Changelog {
        let inner = Inner {
            first: high.next(),
            high,
            entries: VecDeque::new(),
            cas,
            cursors: Vec::new(),
            cursors_made: 0,
            record: Arc::new(record),
            record_version: 0,
            followers: Box::default(),
            snapshots: Snapshots::default(),
            is_given: false,
        };
        let (marks, alone_bytes) = (Watermarks::starting_at(high), Arc::default());
        Changelog { inner: Mutex::ranked(Rank::Changelog, inner), marks, alone_bytes }
    }

    /// Adds to `alone_bytes` what the log holds beyond what is in [`types::HeldBy::Table`]. Whoever puts an item there, or
    /// takes it out, while the log holds it, does the same. To be said before the first append.
    pub fn counted(self, alone_bytes: Arc<AtomicI64>) -> Changelog {
        Changelog { alone_bytes, ..self }
    }

    /// How much may be kept for followers alone, of this log and others. To be said before the first one comes.
    pub fn allowing(self, allowance: Arc<Allowance>) -> Changelog {
        self.inner.lock().followers.set_allowance(allowance);
        self
    }

    /// Of a vBucket whose last changes are prepares or aborts: the last that is neither. To be said before the first append.
    pub fn visible_upto(self, seqno: Seqno) -> Changelog {
        self.marks.publish_visible(seqno);
        self
    }

    /// Takes the next seqno and a fresh CAS for the item `make` builds, and appends it. `make` runs under the log's lock:
    /// it should only put the stamp where it belongs.
    pub fn append(&self, clock: &dyn Clock, make: impl FnOnce(Stamp) -> Item) -> Item {
        let mut inner = self.inner.lock();
        let cas = inner.tick(clock);
        self.place(&mut inner, cas, make)
    }

    /// As [`Changelog::append`], with a CAS decided elsewhere: a commit has its prepare's, a copied change its origin's.
    pub fn append_with_cas(&self, cas: Cas, make: impl FnOnce(Stamp) -> Item) -> Item {
        let mut inner = self.inner.lock();
        inner.cas = inner.cas.max(cas);
        self.place(&mut inner, cas, make)
    }

    fn place(&self, inner: &mut Inner, cas: Cas, make: impl FnOnce(Stamp) -> Item) -> Item {
        let seqno = inner.high.next();
        let item = make(Stamp { seqno, cas });
        assert_eq!(item.seqno(), seqno, "an item keeps the seqno it was given");
        self.push(inner, &item);
        item
    }

    fn push(&self, inner: &mut Inner, item: &Item) {
        let body_bytes = if item.enter(HeldBy::Log) == Holders::NOBODY { item.body().memory() as i64 } else { 0 };
        self.alone_bytes.fetch_add(body_bytes + ENTRY_BYTES, Relaxed);
        inner.entries.push_back(item.clone());
        inner.high = item.seqno();
        if item.is_committed() {
            self.marks.publish_visible(inner.high);
        }
        self.marks.publish_high(inner.high);
    }

    /// Appends a change that has its seqno and CAS from a peer, as the next of the snapshot under way; seqnos may be left
    /// out. Returns the snapshot if this ends it. `Err`: nothing was done.
    pub fn append_given(&self, item: &Item) -> Result<Option<Snapshot>, NotTaken> {
        let mut inner = self.inner.lock();
        let snapshot = inner.take(item.seqno())?;
        inner.cas = inner.cas.max(item.meta().cas);
        self.push(&mut inner, item);
        Ok(snapshot)
    }

    /// A peer says that it has nothing up to `seqno` that was not sent. Returns and refuses as [`Changelog::append_given`].
    pub fn advance(&self, seqno: Seqno) -> Result<Option<Snapshot>, NotTaken> {
        let mut inner = self.inner.lock();
        let snapshot = inner.take(seqno)?;
        inner.high = seqno;
        self.marks.publish_high(seqno);
        Ok(snapshot)
    }

    /// What follows up to `end` is whole only when all of it is there. Goes on with a snapshot that is not complete yet.
    /// `completed`: it comes from a disk, where these prepares and those before are decided by the end of it.
    pub fn begin_snapshot(&self, end: Seqno, completed: Option<Seqno>) {
        let mut inner = self.inner.lock();
        let high = inner.high;
        inner.snapshots.begin(high, end, completed);
    }

    /// The snapshot under way, if the log ends in the middle of one.
    pub fn open_snapshot(&self) -> Option<Snapshot> {
        let inner = self.inner.lock();
        inner.snapshots.at(inner.high).open
    }

    /// See [`Snapshots::is_ordered`].
    pub fn is_ordered(&self, seqno: Seqno) -> bool {
        self.inner.lock().snapshots.is_ordered(seqno)
    }

    /// Nothing more comes of the snapshot under way: the log goes on by itself from where it is. Prepares up to `completed` are
    /// known to be decided.
    pub fn end_snapshot(&self, completed: Seqno) {
        let mut inner = self.inner.lock();
        let high = inner.high;
        inner.snapshots.cut(high, completed);
    }

    /// Goes on from a place in the middle of a snapshot, as the file says at a start.
    pub fn resume_snapshot(&self, snapshot: Snapshot) {
        self.inner.lock().snapshots.resume(snapshot);
    }

    /// Forgets everything after `to`, which the file still has, and all that readers wait for. The marks follow by
    /// [`Watermarks::roll_back`].
    pub fn roll_back(&self, to: Seqno) {
        let mut inner = self.inner.lock();
        let dropped: Vec<_> = inner.entries.drain(..).collect();
        (inner.first, inner.high) = (to.next(), to);
        inner.cursors.iter_mut().for_each(|place| (place.next, place.is_stale) = (to.next(), true));
        inner.snapshots = Snapshots::default();
        inner.followers.begin_anew(to.next());
        drop(inner);
        self.uncount(dropped);
    }

    /// A fresh CAS without a change: a lock shows it.
    pub fn fresh_cas(&self, clock: &dyn Clock) -> Cas {
        self.inner.lock().tick(clock)
    }

    /// The highest CAS given out or seen.
    pub fn max_cas(&self) -> Cas {
        self.inner.lock().cas
    }

    pub fn record(&self) -> Arc<VbRecord> {
        Arc::clone(&self.inner.lock().record)
    }

    /// Replaces the record. Readers see the new one with their next slice. Returns its version.
    pub fn set_record(&self, record: VbRecord) -> u64 {
        let mut inner = self.inner.lock();
        inner.record = Arc::new(record);
        inner.record_version += 1;
        inner.record_version
    }

    /// Registers a reader that has seen everything up to and including `after`. `None`: that is too far back for the
    /// memory; read the file first.
    pub fn cursor(&self, name: &str, after: Seqno) -> Option<Cursor> {
        let mut inner = self.inner.lock();
        let next = after.next();
        if next < inner.first {
            return None;
        }
        inner.cursors_made += 1;
        let id = inner.cursors_made;
        inner.cursors.push(Place { id, name: name.to_owned(), next, is_stale: false });
        Some(Cursor { id })
    }

    /// Registers a reader that has seen just what another one has released.
    pub fn cursor_beside(&self, name: &str, other: &Cursor) -> Cursor {
        let mut inner = self.inner.lock();
        let next = inner.place_mut(other).next;
        inner.cursors_made += 1;
        let id = inner.cursors_made;
        inner.cursors.push(Place { id, name: name.to_owned(), next, is_stale: false });
        Cursor { id }
    }

    /// What comes after everything this cursor has released, up to about `bytes_max` bytes (at least one item if there
    /// is one). Reading again before [`Changelog::release`] gives the same items: a failed batch is simply read again.
    pub fn read(&self, cursor: &Cursor, bytes_max: usize) -> Slice {
        let mut inner = self.inner.lock();
        let place = inner.place_mut(cursor);
        place.is_stale = false;
        let next = place.next;
        inner.slice(next, bytes_max)
    }

    /// Registers a reader that has seen everything up to and including `after`, and that may be left behind. `None`: that is
    /// too far back for the memory already, or nobody was ever there.
    pub fn follow(&self, after: Seqno) -> Option<Follower> {
        let mut inner = self.inner.lock();
        let is_here = after.next() >= inner.first && after <= inner.high;
        is_here.then(|| inner.followers.add(after.next()))
    }

    /// What comes after everything the follower was given, up to about `bytes_max` bytes (at least one item if there is
    /// one). `None`: it was left behind, and what it wants is in the file.
    pub fn take(&self, follower: &Follower, bytes_max: usize) -> Option<Slice> {
        let mut inner = self.inner.lock();
        let slice = inner.slice(inner.followers.next_of(follower)?, bytes_max);
        let was_kept = inner.followers.advance(follower, slice.last.next());
        let dropped = if was_kept { inner.trim() } else { Vec::new() };
        drop(inner);
        self.uncount(dropped);
        Some(slice)
    }

    /// Forgets a follower.
    pub fn unfollow(&self, follower: Follower) {
        let mut inner = self.inner.lock();
        inner.followers.remove(follower);
        let dropped = inner.trim();
        drop(inner);
        self.uncount(dropped);
    }

    /// Says that the reader needs nothing up to and including `upto` any more. Of what was read before a rollback it says
    /// nothing.
    pub fn release(&self, cursor: &Cursor, upto: Seqno) {
        let mut inner = self.inner.lock();
        let high = inner.high;
        let place = inner.place_mut(cursor);
        if place.is_stale {
            return;
        }
        assert!(upto <= high, "a cursor released {upto}, the log ends at {high}");
        place.next = place.next.max(upto.next());
        let dropped = inner.trim();
        drop(inner);
        // Freed outside the lock: it may be the last reference to many values.
        self.uncount(dropped);
    }

    /// Forgets a reader.
    pub fn unregister(&self, cursor: Cursor) {
        let mut inner = self.inner.lock();
        inner.cursors.retain(|p| p.id != cursor.id);
        let dropped = inner.trim();
        drop(inner);
        self.uncount(dropped);
    }

    fn uncount(&self, dropped: Vec<Item>) {
        let alone = |item: Item| {
            // The commit comes later, and takes the body with it.
            let is_last = !item.has_shared_commit() && item.leave(HeldBy::Log) == Holders::only(HeldBy::Log);
            ENTRY_BYTES + if is_last { item.body().memory() as i64 } else { 0 }
        };
        self.alone_bytes.fetch_sub(dropped.into_iter().map(alone).sum(), Relaxed);
    }

    /// Entries held for readers: count, and bytes of their bodies. Looks at every one.
    pub fn backlog(&self) -> (usize, usize) {
        let inner = self.inner.lock();
        let first = inner.entries.front().map(Item::seqno);
        let brings_body = |item: &&Item| item.shares_with().is_none_or(|prepared| Some(prepared) < first);
        let bytes = inner.entries.iter().filter(brings_body).map(|item| item.body().memory()).sum();
        (inner.entries.len(), bytes)
    }

    /// Each reader's name and the last seqno it released.
    pub fn readers(&self) -> Vec<(String, Seqno)> {
        self.inner.lock().cursors.iter().map(|p| (p.name.clone(), Seqno(p.next.0 - 1))).collect()
    }
}

impl Inner {
    /// Checks that `seqno` may come next. Returns the snapshot it ends.
    fn take(&mut self, seqno: Seqno) -> Result<Option<Snapshot>, NotTaken> {
        if seqno <= self.high {
            return Err(NotTaken::Behind(self.high));
        }
        let open = self.snapshots.last().filter(|open| open.end > self.high);
        match open {
            Some(open) if seqno <= open.end => {
                self.is_given = true;
                Ok(Some(open).filter(|_| seqno == open.end))
            }
            open => Err(NotTaken::Outside(open.map(|open| open.end))),
        }
    }

    /// The place of the first entry from `seqno` on.
    fn index_of(&self, seqno: Seqno) -> usize {
        match self.high.next().0 - self.first.0 == self.entries.len() as u64 {
            true => ((seqno.0 - self.first.0) as usize).min(self.entries.len()),
            false => self.entries.partition_point(|item| item.seqno() < seqno),
        }
    }

    /// The hybrid clock: wall time with the low 16 bits for counting, never twice the same, never back.
    fn tick(&mut self, clock: &dyn Clock) -> Cas {
        self.cas = Cas((clock.unix_ns() & !0xffff).max(self.cas.0 + 1));
        self.cas
    }

    fn slice(&self, next: Seqno, bytes_max: usize) -> Slice {
        let mut bytes = 0;
        let at = self.index_of(next);
        let items: Vec<_> = self
            .entries
            .range(at..)
            .take_while(|item| {
                let fits = bytes < bytes_max;
                bytes += item.memory();
                fits
            })
            .cloned()
            .collect();
        let last = match items.last() {
            _ if at + items.len() == self.entries.len() => self.high,
            Some(item) => item.seqno(),
            None => Seqno(next.0 - 1),
        };
        let (record, record_version) = (Arc::clone(&self.record), self.record_version);
        let (snapshots, is_given) = (self.snapshots.since(next), self.is_given);
        Slice { from: next, items, last, snapshots, is_given, record, record_version }
    }

    fn place_mut(&mut self, cursor: &Cursor) -> &mut Place {
        self.cursors.iter_mut().find(|p| p.id == cursor.id).expect("a cursor belongs to its log")
    }

    /// Takes out what every reader has passed. Without readers nobody will ask.
    fn trim(&mut self) -> Vec<Item> {
        let passed = self.cursors.iter().map(|p| p.next).min().unwrap_or(self.high.next());
        let keep_from = self.followers.hold(passed, &self.entries);
        let count = self.index_of(keep_from);
        self.snapshots.drop_before(keep_from);
        let dropped: Vec<_> = self.entries.drain(..count).collect();
        self.first = keep_from;
        // There are a thousand logs, and most are empty most of the time.
        if self.entries.is_empty() && self.entries.capacity() > ENTRIES_KEPT {
            self.entries = VecDeque::new();
        }
        dropped
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{FailoverEntry, FailoverTable};
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::time::Duration;
    use types::{Datatype, KeyBuf, Kind, Level, Meta, RevSeqno, VbState, VbUuid};

    struct Wall(AtomicU64);
    impl Clock for Wall {
        fn unix_ns(&self) -> u64 {
            self.0.load(Ordering::Relaxed)
        }
        fn monotonic(&self) -> Duration {
            Duration::ZERO
        }
    }

    fn log() -> Changelog {
        let failover = FailoverTable::new(FailoverEntry { uuid: VbUuid(7), seqno: Seqno(0) });
        Changelog::new(Seqno(10), Cas(5), VbRecord::new(VbState::Active, failover))
    }

    fn append(log: &Changelog, clock: &Wall, key: &str) -> Item {
        let key = KeyBuf::in_default_collection(key.as_bytes()).unwrap();
        log.append(clock, |stamp| {
            let meta = Meta {
                seqno: stamp.seqno,
                cas: stamp.cas,
                rev: RevSeqno(1),
                flags: 0,
                expiry: 0,
                datatype: Datatype::RAW,
                deleted: None,
            };
            Item::new(key.as_key(), meta, Kind::Committed { prepared: None }, Some(b"v"))
        })
    }

    fn seqnos(slice: &Slice) -> Vec<u64> {
        slice.items.iter().map(|i| i.seqno().0).collect()
    }

    #[test]
    fn cas_grows_even_when_the_wall_clock_goes_back() {
        let (log, clock) = (log(), Wall(AtomicU64::new(1 << 40)));
        let first = append(&log, &clock, "a").meta().cas;
        clock.0.store(1 << 20, Ordering::Relaxed);
        let second = append(&log, &clock, "a").meta().cas;
        assert_eq!(first, Cas(1 << 40));
        assert_eq!(second, Cas((1 << 40) + 1));
        assert_eq!(log.fresh_cas(&clock), Cas((1 << 40) + 2));
    }

    #[test]
    fn a_slice_is_given_again_until_it_is_released() {
        let (log, clock) = (log(), Wall(AtomicU64::new(0)));
        let cursor = log.cursor("flusher", Seqno(10)).unwrap();
        for key in ["a", "b", "c"] {
            append(&log, &clock, key);
        }
        assert_eq!(seqnos(&log.read(&cursor, usize::MAX)), [11, 12, 13]);
        assert_eq!(seqnos(&log.read(&cursor, 1)), [11]);
        log.release(&cursor, Seqno(12));
        assert_eq!(seqnos(&log.read(&cursor, usize::MAX)), [13]);
        assert_eq!(log.backlog().0, 1);
        log.release(&cursor, Seqno(13));
        let empty = log.read(&cursor, usize::MAX);
        assert_eq!((empty.last, log.backlog()), (Seqno(13), (0, 0)));
    }

    #[test]
    fn the_slowest_reader_decides_what_stays() {
        let (log, clock) = (log(), Wall(AtomicU64::new(0)));
        let fast = log.cursor("flusher", Seqno(10)).unwrap();
        let slow = log.cursor("stream", Seqno(10)).unwrap();
        append(&log, &clock, "a");
        append(&log, &clock, "b");
        log.release(&fast, Seqno(12));
        assert_eq!(seqnos(&log.read(&slow, usize::MAX)), [11, 12]);
        assert!(log.cursor("late", Seqno(9)).is_none());
        log.unregister(slow);
        assert_eq!(log.backlog().0, 0);
        assert!(log.cursor("late", Seqno(11)).is_none(), "11 and 12 are only in the file now");
        assert!(log.cursor("late", Seqno(12)).is_some());
    }

    fn given(seqno: u64) -> Item {
        let key = KeyBuf::in_default_collection(b"k").unwrap();
        let (cas, rev) = (Cas(seqno << 20), RevSeqno(1));
        let (flags, expiry, datatype) = (0, 0, Datatype::RAW);
        let meta = Meta { seqno: Seqno(seqno), cas, rev, flags, expiry, datatype, deleted: None };
        Item::new(key.as_key(), meta, Kind::Committed { prepared: None }, Some(b"v"))
    }

    #[test]
    fn what_a_peer_left_out_is_passed_over_by_every_reader() {
        let (log, clock) = (log(), Wall(AtomicU64::new(0)));
        let (one, other) = (log.cursor("one", Seqno(10)).unwrap(), log.cursor("other", Seqno(10)).unwrap());
        assert_eq!(log.append_given(&given(12)), Err(NotTaken::Outside(None)));
        log.begin_snapshot(Seqno(20), None);
        for seqno in [12, 15, 16] {
            assert_eq!(log.append_given(&given(seqno)), Ok(None));
        }
        assert_eq!(log.append_given(&given(21)), Err(NotTaken::Outside(Some(Seqno(20)))));
        let whole = Snapshot { start: Seqno(10), end: Seqno(20), completed: None };
        assert_eq!(log.append_given(&given(20)), Ok(Some(whole)));
        assert_eq!(log.append_given(&given(20)), Err(NotTaken::Behind(Seqno(20))));
        let whole = log.read(&one, usize::MAX);
        assert_eq!((seqnos(&whole), whole.last), (vec![12, 15, 16, 20], Seqno(20)));
        assert_eq!(log.read(&one, 1).last, Seqno(12));
        // In the middle of what is missing.
        log.release(&one, Seqno(13));
        assert_eq!(seqnos(&log.read(&one, usize::MAX)), [15, 16, 20]);
        log.release(&other, Seqno(16));
        assert_eq!(log.backlog().0, 3);
        log.release(&one, Seqno(16));
        assert_eq!((seqnos(&log.read(&one, usize::MAX)), log.backlog().0), (vec![20], 1));
        log.begin_snapshot(Seqno(25), None);
        log.advance(Seqno(25)).unwrap();
        log.release(&one, Seqno(20));
        let empty = log.read(&one, usize::MAX);
        assert_eq!((empty.items.len(), empty.last, log.marks.high()), (0, Seqno(25), Seqno(25)));
        log.release(&one, Seqno(25));
        log.release(&other, Seqno(25));
        assert_eq!(append(&log, &clock, "a").seqno(), Seqno(26));
        assert!(append(&log, &clock, "a").meta().cas > Cas(20 << 20));
        assert_eq!(seqnos(&log.read(&other, usize::MAX)), [26, 27]);
    }

    #[test]
    fn a_log_that_was_rolled_back_goes_on_from_there() {
        let (log, clock) = (log(), Wall(AtomicU64::new(0)));
        let cursor = log.cursor("flusher", Seqno(10)).unwrap();
        let follower = log.follow(Seqno(10)).unwrap();
        log.begin_snapshot(Seqno(20), None);
        for seqno in [12, 15, 16] {
            log.append_given(&given(seqno)).unwrap();
        }
        let before = log.max_cas();
        let void = log.read(&cursor, usize::MAX).last;
        log.roll_back(Seqno(10));
        log.marks.roll_back(Seqno(10), Seqno(9));
        assert_eq!((log.backlog(), log.open_snapshot(), log.marks.high()), ((0, 0), None, Seqno(10)));
        assert_eq!(log.marks.visible(), Seqno(9));
        let next = append(&log, &clock, "a");
        assert!(next.seqno() == Seqno(11) && next.meta().cas > before);
        log.release(&cursor, void);
        assert_eq!(seqnos(&log.read(&cursor, usize::MAX)), [11]);
        assert!(log.take(&follower, usize::MAX).is_none(), "what it had read may be gone");
    }

    #[test]
    fn a_follower_gets_everything_as_long_as_there_is_room_for_it() {
        let clock = Wall(AtomicU64::new(0));
        let allowance = Arc::new(Allowance::new(1000));
        let log = log().allowing(Arc::clone(&allowance));
        let flusher = log.cursor("flusher", Seqno(10)).unwrap();
        let (fast, slow) = (log.follow(Seqno(10)).unwrap(), log.follow(Seqno(10)).unwrap());
        (0..8).for_each(|_| drop(append(&log, &clock, "k")));
        let item_bytes = log.backlog().1 as u64 / 8;
        assert_eq!(log.take(&fast, usize::MAX).map(|slice| seqnos(&slice)), Some((11..=18).collect()));
        // What the flusher has yet to pass is not kept for anybody else.
        assert_eq!(allowance.used_bytes(), 0);
        log.release(&flusher, Seqno(13));
        assert_eq!((allowance.used_bytes(), log.backlog().0), (3 * item_bytes, 8));
        assert_eq!(log.take(&slow, 1).map(|slice| (seqnos(&slice), slice.last)), Some((vec![11], Seqno(11))));
        assert_eq!((allowance.used_bytes(), log.backlog().0), (2 * item_bytes, 7));
        // One too many: the slow one is let go, and nobody else notices.
        allowance.set(6 * item_bytes - 1);
        log.release(&flusher, Seqno(17));
        assert_eq!((allowance.used_bytes(), log.backlog().0), (0, 1));
        assert!(log.take(&slow, usize::MAX).is_none() && log.follow(Seqno(16)).is_none());
        append(&log, &clock, "k");
        assert_eq!(log.take(&fast, usize::MAX).map(|slice| seqnos(&slice)), Some(vec![19]));
        assert!(log.take(&slow, usize::MAX).is_none());
        log.unfollow(slow);
        log.unfollow(fast);
        log.release(&flusher, Seqno(19));
        assert_eq!((allowance.used_bytes(), log.backlog()), (0, (0, 0)));
    }

    #[test]
    fn one_slow_follower_does_not_have_those_of_other_logs_left_behind() {
        let clock = Wall(AtomicU64::new(0));
        let allowance = Arc::new(Allowance::new(1000));
        let logs = [log(), log()].map(|log| log.allowing(Arc::clone(&allowance)));
        let flushers = [&logs[0], &logs[1]].map(|log| log.cursor("flusher", Seqno(10)).unwrap());
        let followers = [&logs[0], &logs[1]].map(|log| log.follow(Seqno(10)).unwrap());
        let grow = |n: usize, count: u64| {
            (0..count).for_each(|_| drop(append(&logs[n], &clock, "k")));
            logs[n].release(&flushers[n], logs[n].marks.high());
        };
        grow(0, 6);
        let item_bytes = allowance.used_bytes() / 6;
        allowance.set(6 * item_bytes);
        grow(1, 2);
        assert_eq!(allowance.used_bytes(), 8 * item_bytes, "a little more than there is room for");
        assert_eq!(logs[1].take(&followers[1], usize::MAX).map(|slice| slice.items.len()), Some(2));
        grow(1, 2);
        grow(0, 1);
        assert_eq!(allowance.used_bytes(), 2 * item_bytes, "whoever holds most is left behind when it is looked at");
        assert!(logs[0].take(&followers[0], usize::MAX).is_none());
        assert!(logs[1].take(&followers[1], usize::MAX).is_some());
    }

    #[test]
    fn a_follower_that_leaves_gives_back_what_was_kept_for_it() {
        let clock = Wall(AtomicU64::new(0));
        let allowance = Arc::new(Allowance::default());
        let log = log().allowing(Arc::clone(&allowance));
        let flusher = log.cursor("flusher", Seqno(10)).unwrap();
        let follower = log.follow(Seqno(10)).unwrap();
        (0..4).for_each(|_| drop(append(&log, &clock, "k")));
        log.release(&flusher, Seqno(14));
        assert_eq!((log.backlog().0, allowance.used_bytes() > 0), (4, true));
        log.unfollow(follower);
        assert_eq!((log.backlog(), allowance.used_bytes()), ((0, 0), 0));
    }

    #[test]
    fn what_a_prepare_and_its_commit_share_is_counted_until_both_have_gone() {
        let clock = Wall(AtomicU64::new(0));
        let alone_bytes = Arc::new(AtomicI64::new(0));
        let log = log().counted(Arc::clone(&alone_bytes));
        let cursor = log.cursor("flusher", Seqno(10)).unwrap();
        let prepare = || {
            let key = KeyBuf::in_default_collection(b"k").unwrap();
            log.append(&clock, |stamp| {
                let meta = Meta { seqno: stamp.seqno, ..given(1).meta() };
                Item::new(key.as_key(), meta, Kind::Prepare { level: Level::Majority }, Some(b"v"))
            })
        };
        let commit = |prepare: &Item| {
            let make = |stamp: Stamp| prepare.committed_as(stamp.seqno);
            drop(log.append_with_cas(prepare.meta().cas, make).into_document());
        };
        let counted = || (alone_bytes.load(Ordering::Relaxed), log.backlog());
        let first = prepare();
        let body = first.body().memory();
        commit(&first);
        assert_eq!(counted(), (body as i64 + 32, (2, body)));
        log.release(&cursor, Seqno(11));
        assert_eq!(counted(), (body as i64 + 16, (1, body)));
        log.release(&cursor, Seqno(12));
        assert_eq!(counted(), (0, (0, 0)));
        // Released before it is committed.
        let second = prepare();
        log.release(&cursor, Seqno(13));
        assert_eq!(counted(), (0, (0, 0)));
        commit(&second);
        assert_eq!(counted(), (body as i64 + 16, (1, body)));
        commit(&prepare());
        log.roll_back(Seqno(10));
        assert_eq!(counted(), (0, (0, 0)));
    }

    #[test]
    fn a_new_record_comes_with_the_next_slice() {
        let log = log();
        let cursor = log.cursor("flusher", Seqno(10)).unwrap();
        let before = log.read(&cursor, usize::MAX).record_version;
        let mut record = (*log.record()).clone();
        record.state = VbState::Replica;
        log.set_record(record);
        let slice = log.read(&cursor, usize::MAX);
        assert_eq!((slice.record.state, slice.record_version), (VbState::Replica, before + 1));
    }

    #[test]
    #[should_panic(expected = "beyond what was written")]
    fn nothing_is_durable_before_it_is_written() {
        log().marks.publish_durable(Seqno(11));
    }
}
