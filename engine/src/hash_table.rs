//! The documents of one vBucket in memory, by key.
//!
//! Cut into stripes so that writers of different keys rarely meet. A slot is one pointer; key and metadata live in the
//! body it points to, shared with the changelog and with replies under way. What few keys have, a sync write or a lock,
//! is kept beside. Nothing is allocated before the first document arrives: most vBuckets of a small bucket stay empty.

use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI64, AtomicU32, AtomicU64, Ordering::Relaxed, Ordering::SeqCst};
use std::time::Duration;

use hashbrown::HashTable as Table;
use types::rank::{Mutex, MutexGuard, Rank};
use types::{Body, DocKey, HEATS, HeldBy, Item, Seqno, allocated};

use crate::beside::{Beside, Lock, memory_of};
use crate::key_filter::KeyFilter;

/// Stripes of a vBucket's table. With 1024 vBuckets even a few make collisions of writers rare. Tables grow by doubling, at
/// 7/8 full; with five stripes round millions of documents leave them three quarters full, with four just over half.
pub const STRIPES: usize = 5;

/// What is in memory of a part of the keys.
///
/// 1. `items` has the newest committed change (a tombstone counts) of its keys; a key may be missing from it if the file
///    has it.
/// 2. A key has at most one prepare. While it has one, or a lock, its item stays.
/// 3. `filter` knows every key that was ever in `items` or had a prepare.
#[derive(Default)]
struct Stripe {
    items: Table<Body>,
    beside: Beside,
    filter: KeyFilter,
    /// Bytes last reported: of the table and what is beside it, and of the filter.
    charged: (i64, i64),
    throws: u32,
}

/// Exact counts of what is in the table.
#[derive(Debug, Default)]
pub struct Counts {
    pub live: AtomicI64,
    pub tombstones: AtomicI64,
    /// Live documents whose value is only in the file.
    pub non_resident: AtomicI64,
    /// Live documents with an expiry.
    pub expiring: AtomicI64,
    pub prepares: AtomicI64,
    pub bytes: Footprint,
}

impl Counts {
    /// Live documents with their value.
    pub fn resident(&self) -> u64 {
        (self.live.load(Relaxed) - self.non_resident.load(Relaxed)).max(0) as u64
    }
}

/// Bytes of memory, by what they are for.
#[derive(Debug, Default)]
pub struct Footprint {
    pub items: AtomicI64,
    pub tables: AtomicI64,
    pub filters: AtomicI64,
}

impl Footprint {
    pub fn total(&self) -> i64 {
        self.items.load(Relaxed) + self.tables.load(Relaxed) + self.filters.load(Relaxed)
    }
}

/// What may leave memory.
#[derive(Clone, Copy, Debug)]
pub struct Leaving {
    /// The file has everything up to here.
    pub filed: Seqno,
    /// Only what is in use no more than this.
    pub heat_max: u8,
    /// Key and metadata too.
    pub whole: bool,
    /// [`HashTable::clears`] when `filed` was read.
    pub clears: u32,
}

/// What coming and going does to the bytes in the table, and to those that only the changelog holds. All threads share
/// those sums, and mostly one document replaces another of its size; so they are told of the difference.
#[derive(Default)]
struct BytesChange {
    items: i64,
    backlog: i64,
}

impl BytesChange {
    fn count(&mut self, body: &Body, sign: i64) {
        let bytes = sign * body.memory() as i64;
        self.items += bytes;
        let held = if sign > 0 { body.enter(HeldBy::Table) } else { body.leave(HeldBy::Table) };
        if held.has(HeldBy::Log) {
            self.backlog -= bytes;
        }
    }
}

/// What left.
#[derive(Clone, Copy, Debug, Default)]
pub struct Left {
    pub items: u64,
    pub bytes: u64,
}

/// Bytes in use that could leave, by heat.
pub type HeatMap = [u64; HEATS];

/// Secret start of the hash, drawn once a process, so that nobody can send keys that collide.
#[derive(Clone, Copy)]
pub struct HashSeed(pub [u64; 2]);

impl HashSeed {
    /// Folded multiplication over eight bytes at a time.
    pub fn hash(self, id: &[u8]) -> u64 {
        fn fold(a: u64, b: u64) -> u64 {
            let wide = u128::from(a) * u128::from(b);
            wide as u64 ^ (wide >> 64) as u64
        }
        let [mut state, key] = self.0;
        let mut chunks = id.chunks_exact(8);
        for chunk in &mut chunks {
            let word = u64::from_be_bytes(chunk.try_into().expect("eight bytes"));
            state = fold(state ^ word, key | 1).rotate_left(23);
        }
        let mut tail = [0; 8];
        let rest = chunks.remainder();
        tail[..rest.len()].copy_from_slice(rest);
        state = fold(state ^ u64::from_be_bytes(tail), key.rotate_left(32) | 1);
        fold(state ^ id.len() as u64, 0x9e37_79b9_7f4a_7c15)
    }
}

fn stripe_of(hash: u64) -> usize {
    // The low bits choose the slot inside the stripe.
    (hash >> 32) as usize % STRIPES
}

/// The table. Counts are kept in step by [`Locked`], through which every change goes.
pub struct HashTable {
    seed: HashSeed,
    stripes: OnceLock<Box<[Mutex<Stripe>]>>,
    pub counts: Counts,
    /// The highest seqno of an item that left whole: what the file said before it had that one may be out of date.
    left_upto: AtomicU64,
    /// How often everything was taken out.
    clears: AtomicU32,
    /// Keep a filter of all keys.
    filtered: bool,
    /// Of every table of the bucket together.
    bucket_bytes: Arc<Footprint>,
    /// Bytes that only the changelogs hold.
    backlog_bytes: Arc<AtomicI64>,
}

impl HashTable {
    pub fn new(
        seed: HashSeed,
        filtered: bool,
        bucket_bytes: Arc<Footprint>,
        backlog_bytes: Arc<AtomicI64>,
    ) -> HashTable {
        let (stripes, counts, left_upto) = (OnceLock::new(), Counts::default(), AtomicU64::new(0));
        let clears = AtomicU32::new(0);
        HashTable { seed, stripes, counts, left_upto, clears, filtered, bucket_bytes, backlog_bytes }
    }

    fn stripes(&self) -> &[Mutex<Stripe>] {
        self.stripes.get_or_init(|| {
            self.add_bytes(|bytes| &bytes.tables, allocated(STRIPES * size_of::<Mutex<Stripe>>()) as i64);
            (0..STRIPES).map(|_| Mutex::ranked(Rank::HashStripe, Stripe::default())).collect::<Vec<_>>().into()
        })
    }

    fn made(&self) -> impl Iterator<Item = &Mutex<Stripe>> {
        self.stripes.get().into_iter().flatten()
    }

    /// Takes the stripe of `key`.
    pub fn lock<'a>(&'a self, key: DocKey<'a>) -> Locked<'a> {
        let hash = self.seed.hash(key.as_bytes());
        let stripe = self.stripes()[stripe_of(hash)].lock();
        Locked { table: self, stripe, change: BytesChange::default(), hash, key }
    }

    #[cfg(test)]
    pub fn stripe_of(&self, key: DocKey<'_>) -> usize {
        stripe_of(self.seed.hash(key.as_bytes()))
    }

    /// Shows the documents, a stripe at a time, until `each` says no. Stripes that were never needed are not made.
    pub fn visit(&self, mut each: impl FnMut(&Body) -> bool) {
        for stripe in self.made() {
            if !stripe.lock().items.iter().all(&mut each) {
                return;
            }
        }
    }

    pub fn visit_prepares(&self, mut each: impl FnMut(&Item)) {
        for stripe in self.made() {
            stripe.lock().beside.prepares().for_each(&mut each);
        }
    }

    /// The highest seqno of an item that left memory whole.
    pub fn left_upto(&self) -> Seqno {
        Seqno(self.left_upto.load(Relaxed))
    }

    /// How often [`HashTable::clear`] was called. What was read of the file before the last time is void.
    pub fn clears(&self) -> u32 {
        self.clears.load(SeqCst)
    }

    /// Takes everything out: the vBucket goes back to an earlier state. Nobody may be putting anything in who does not look at
    /// [`HashTable::clears`] with the stripe held.
    pub fn clear(&self) {
        self.clears.fetch_add(1, SeqCst);
        for stripe in self.made() {
            let mut stripe = stripe.lock();
            let items = std::mem::take(&mut stripe.items);
            let beside = std::mem::take(&mut stripe.beside);
            let mut change = BytesChange::default();
            items.iter().for_each(|item| self.count(&mut change, item, -1));
            beside.prepares().for_each(|prepare| self.count_prepare(&mut change, prepare, -1));
            self.add_change(change);
            self.charge(&mut stripe);
        }
        self.left_upto.store(0, Relaxed);
    }

    /// Makes the filter ready for so many more keys.
    pub fn reserve_filter(&self, keys: u64) {
        for stripe in self.stripes() {
            let mut stripe = stripe.lock();
            stripe.filter.reserve(keys as usize / STRIPES * 9 / 8);
            self.charge(&mut stripe);
        }
    }

    /// Forgets the tombstones up to `filed`: the file has them. Returns how many.
    pub fn drop_tombstones(&self, filed: Seqno, clears: u32) -> usize {
        let left = |stripe| {
            self.remove(stripe, clears, |item| item.is_deleted() && item.committed_seqno() <= filed).items as usize
        };
        self.made().map(left).sum()
    }

    /// Lets items go from one stripe until `enough`, the coldest only; the others cool.
    pub fn evict(&self, stripe: usize, leaving: Leaving, mut enough: impl FnMut() -> bool) -> Left {
        let Some(stripe) = self.made().nth(stripe) else { return Left::default() };
        let goes = |item: &Body| {
            if leaving.gain(item) == 0 || enough() {
                return false;
            }
            let cold = item.heat() <= leaving.heat_max;
            if !cold {
                item.cool();
            }
            cold
        };
        if leaving.whole { self.remove(stripe, leaving.clears, goes) } else { self.strip(stripe, leaving.clears, goes) }
    }

    /// Adds what could leave one stripe to `map`.
    pub fn survey(&self, stripe: usize, leaving: Leaving, map: &mut HeatMap) {
        let Some(stripe) = self.made().nth(stripe) else { return };
        for item in &stripe.lock().items {
            map[usize::from(item.heat())] += leaving.gain(item);
        }
    }

    fn remove(&self, stripe: &Mutex<Stripe>, clears: u32, mut goes: impl FnMut(&Body) -> bool) -> Left {
        let mut stripe = stripe.lock();
        if self.clears() != clears {
            return Left::default();
        }
        let Stripe { items, beside, .. } = &mut *stripe;
        let mut left = Left::default();
        items.retain(|item| {
            if !goes(item) || self.is_pinned(beside, item) {
                return true;
            }
            self.left_upto.fetch_max(item.committed_seqno().0, Relaxed);
            let mut change = BytesChange::default();
            self.count(&mut change, item, -1);
            self.add_change(change);
            left.items += 1;
            left.bytes += item.memory() as u64;
            false
        });
        // A table a quarter full would be made half as large or less.
        if left.items > 0 && items.len() * 4 <= items.capacity() {
            items.shrink_to(items.len() * 3 / 2, |item| self.seed.hash(item.id()));
        }
        self.charge(&mut stripe);
        left
    }

    fn is_pinned(&self, beside: &Beside, item: &Body) -> bool {
        !beside.is_empty() && beside.has(self.seed.hash(item.id()), item.id())
    }

    fn strip(&self, stripe: &Mutex<Stripe>, clears: u32, mut goes: impl FnMut(&Body) -> bool) -> Left {
        let mut stripe = stripe.lock();
        if self.clears() != clears {
            return Left::default();
        }
        let Stripe { items, beside, .. } = &mut *stripe;
        let mut left = Left::default();
        for item in items.iter_mut() {
            if !goes(item) || self.is_pinned(beside, item) {
                continue;
            }
            let before = item.memory();
            let mut change = BytesChange::default();
            self.count(&mut change, item, -1);
            *item = item.committed().stripped().into_document();
            self.count(&mut change, item, 1);
            self.add_change(change);
            left.items += 1;
            left.bytes += (before - item.memory()) as u64;
        }
        left
    }

    /// Slots there are, and slots in use: for the statistics.
    pub fn slots(&self) -> (usize, usize) {
        self.made().fold((0, 0), |(slots, len), stripe| {
            let stripe = stripe.lock();
            (slots + stripe.items.capacity(), len + stripe.items.len())
        })
    }

    fn count_prepare(&self, change: &mut BytesChange, prepare: &Item, sign: i64) {
        self.counts.prepares.fetch_add(sign, Relaxed);
        change.count(prepare.body(), sign);
    }

    fn count(&self, change: &mut BytesChange, item: &Body, sign: i64) {
        let counts = &self.counts;
        if item.is_deleted() {
            counts.tombstones.fetch_add(sign, Relaxed);
        } else {
            counts.live.fetch_add(sign, Relaxed);
            if !item.resident() {
                counts.non_resident.fetch_add(sign, Relaxed);
            }
            if item.expiry() != 0 {
                counts.expiring.fetch_add(sign, Relaxed);
            }
        }
        change.count(item, sign);
    }

    fn add_change(&self, change: BytesChange) {
        self.add_bytes(|bytes| &bytes.items, change.items);
        if change.backlog != 0 {
            self.backlog_bytes.fetch_add(change.backlog, Relaxed);
        }
    }

    /// Notes how much memory the stripe holds beside its items.
    fn charge(&self, stripe: &mut Stripe) {
        let filter = if self.filtered { stripe.filter.memory() } else { 0 };
        let now = ((memory_of(&stripe.items) + stripe.beside.memory()) as i64, filter as i64);
        let before = std::mem::replace(&mut stripe.charged, now);
        self.add_bytes(|bytes| &bytes.tables, now.0 - before.0);
        self.add_bytes(|bytes| &bytes.filters, now.1 - before.1);
    }

    fn add_bytes(&self, what: impl Fn(&Footprint) -> &AtomicI64, bytes: i64) {
        if bytes != 0 {
            what(&self.counts.bytes).fetch_add(bytes, Relaxed);
            what(&self.bucket_bytes).fetch_add(bytes, Relaxed);
        }
    }
}

impl Leaving {
    /// The bytes won if the item leaves; 0 if it may not.
    fn gain(&self, item: &Body) -> u64 {
        let bytes = match self.whole {
            true => item.memory(),
            false if item.is_deleted() || !item.resident() => 0,
            false => item.memory_of_value(),
        };
        if item.committed_seqno() <= self.filed { bytes as u64 } else { 0 }
    }
}

impl Drop for HashTable {
    fn drop(&mut self) {
        let (ours, all) = (&self.counts.bytes, &self.bucket_bytes);
        all.items.fetch_sub(ours.items.load(Relaxed), Relaxed);
        all.tables.fetch_sub(ours.tables.load(Relaxed), Relaxed);
        all.filters.fetch_sub(ours.filters.load(Relaxed), Relaxed);
    }
}

/// One key, with its stripe held.
pub struct Locked<'a> {
    table: &'a HashTable,
    stripe: MutexGuard<'a, Stripe>,
    /// Told when the stripe is let go.
    change: BytesChange,
    hash: u64,
    pub key: DocKey<'a>,
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        self.table.add_change(std::mem::take(&mut self.change));
    }
}

impl Locked<'_> {
    /// The newest committed change.
    pub fn committed(&self) -> Option<Item> {
        self.document().map(Body::committed)
    }

    /// Its body.
    pub fn document(&self) -> Option<&Body> {
        self.stripe.items.find(self.hash, |item| item.id() == self.key.as_bytes())
    }

    pub fn prepare(&self) -> Option<&Item> {
        self.stripe.beside.prepare(self.hash, self.key.as_bytes())
    }

    /// A throw of the dice that is the same whenever the same things happened before.
    pub fn throw(&mut self) -> u64 {
        self.stripe.throws = self.stripe.throws.wrapping_add(1);
        (self.hash ^ u64::from(self.stripe.throws)).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32
    }

    /// The lock that holds at the time `now` tells. Few keys are locked, so the clock is seldom looked at.
    pub fn lock_at(&self, now: impl FnOnce() -> Duration) -> Option<&Lock> {
        self.stripe.beside.lock(self.hash, self.key.as_bytes()).filter(|lock| now() < lock.until)
    }

    /// The key was never here, nor noted.
    pub fn is_stranger(&self) -> bool {
        !self.stripe.filter.may_have(self.hash)
    }

    /// Notes that the file has this key.
    pub fn note_key(&mut self) {
        if self.table.filtered {
            self.stripe.filter.insert(self.hash);
            self.table.charge(&mut self.stripe);
        }
    }

    /// Puts a newer committed change in place, or the same with or without its value. A lock ends when `unlock` says so.
    pub fn put_committed(&mut self, item: Item, unlock: bool) {
        debug_assert!(item.is_committed());
        if unlock {
            self.set_lock(None);
        }
        let (table, id) = (self.table, self.key.as_bytes());
        let item = item.into_document();
        table.count(&mut self.change, &item, 1);
        match self.stripe.items.find_mut(self.hash, |item| item.id() == id) {
            Some(old) => {
                item.set_heat(old.heat().max(item.heat()));
                table.count(&mut self.change, old, -1);
                *old = item;
            }
            None => {
                let seed = table.seed;
                self.stripe.items.insert_unique(self.hash, item, |item| seed.hash(item.id()));
                self.grown();
            }
        }
    }

    pub fn put_prepare(&mut self, item: Item) {
        debug_assert!(!item.is_committed());
        assert!(self.prepare().is_none(), "a key has one sync write at a time");
        self.table.count_prepare(&mut self.change, &item, 1);
        self.stripe.beside.put_prepare(self.hash, item, self.table.seed);
        self.grown();
    }

    /// Takes the prepare of this seqno out, if it is still there.
    pub fn take_prepare(&mut self, seqno: Seqno) -> Option<Item> {
        let item = self.stripe.beside.take_prepare(self.hash, self.key.as_bytes(), seqno)?;
        self.table.count_prepare(&mut self.change, &item, -1);
        self.table.charge(&mut self.stripe);
        Some(item)
    }

    /// A lock on a document that is not here is not kept.
    pub fn set_lock(&mut self, lock: Option<Lock>) {
        let (hash, id, seed) = (self.hash, self.key.as_bytes(), self.table.seed);
        let lock = lock.filter(|_| self.document().is_some());
        if self.stripe.beside.has_locks() || lock.is_some() {
            self.stripe.beside.set_lock(hash, id, lock, seed);
            self.table.charge(&mut self.stripe);
        }
    }

    /// Removes the item whole, unless a sync write or a lock holds it.
    pub fn forget(&mut self) {
        let (hash, id) = (self.hash, self.key.as_bytes());
        if self.stripe.beside.has(hash, id) {
            return;
        }
        if let Ok(found) = self.stripe.items.find_entry(hash, |item| item.id() == id) {
            let item = found.remove().0;
            self.table.left_upto.fetch_max(item.committed_seqno().0, Relaxed);
            self.table.count(&mut self.change, &item, -1);
        }
    }

    fn grown(&mut self) {
        if self.table.filtered {
            self.stripe.filter.insert(self.hash);
        }
        self.table.charge(&mut self.stripe);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use types::{Cas, Datatype, DeleteSource, KeyBuf, Kind, Meta, RevSeqno};

    fn item(key: DocKey<'_>, seqno: u64, deleted: bool) -> Item {
        let meta = Meta {
            seqno: Seqno(seqno),
            cas: Cas(seqno),
            rev: RevSeqno(1),
            flags: 0,
            expiry: 0,
            datatype: Datatype::RAW,
            deleted: deleted.then_some(DeleteSource::Explicit),
        };
        let value = (!deleted).then_some(&b"a value that is worth something"[..]);
        Item::new(key, meta, Kind::Committed { prepared: None }, value)
    }

    fn table() -> (HashTable, Arc<Footprint>) {
        let bytes = Arc::new(Footprint::default());
        (HashTable::new(HashSeed([1, 2]), true, Arc::clone(&bytes), Arc::default()), bytes)
    }

    #[test]
    fn counts_and_bytes_are_exact_whatever_comes_and_goes() {
        let (table, bytes) = table();
        for n in 0..1000u64 {
            let key = KeyBuf::in_default_collection(format!("k{}", n % 100).as_bytes()).unwrap();
            let mut locked = table.lock(key.as_key());
            locked.put_committed(item(key.as_key(), n + 1, n % 3 == 0), true);
        }
        let (mut live, mut dead, mut held) = (0, 0, 0);
        table.visit(|item| {
            if item.is_deleted() {
                dead += 1
            } else {
                live += 1
            }
            held += item.memory() as i64;
            true
        });
        assert_eq!((live, dead), (table.counts.live.load(Relaxed), table.counts.tombstones.load(Relaxed)));
        assert_eq!(live + dead, 100);
        assert_eq!(held, bytes.items.load(Relaxed));
        assert!(bytes.tables.load(Relaxed) >= 100 * 9 && bytes.filters.load(Relaxed) >= 100);
        assert_eq!(table.drop_tombstones(Seqno(1000), 0) as i64, dead);
        assert_eq!(table.counts.tombstones.load(Relaxed), 0);
        let leaving = Leaving { filed: Seqno(1000), heat_max: 255, whole: false, clears: 0 };
        (0..STRIPES).for_each(|stripe| assert_eq!(table.evict(stripe, leaving, || true).items, 0));
        (0..STRIPES).for_each(|stripe| _ = table.evict(stripe, leaving, || false));
        assert_eq!(table.counts.non_resident.load(Relaxed), live);
        let whole = Leaving { whole: true, ..leaving };
        let left = (0..STRIPES).map(|stripe| table.evict(stripe, whole, || false).items).sum::<u64>();
        assert_eq!((left as i64, bytes.items.load(Relaxed), table.left_upto()), (live, 0, Seqno(1000)));
        drop(table);
        assert_eq!(bytes.total(), 0);
    }

    #[test]
    fn tombstones_the_file_does_not_have_yet_stay() {
        let (table, _) = table();
        for n in 1..=10u64 {
            let key = KeyBuf::in_default_collection(format!("k{n}").as_bytes()).unwrap();
            table.lock(key.as_key()).put_committed(item(key.as_key(), n, true), true);
        }
        assert_eq!(table.drop_tombstones(Seqno(4), 0), 4);
        assert_eq!(table.counts.tombstones.load(Relaxed), 6);
    }

    #[test]
    fn what_is_in_use_stays_and_what_is_held_never_leaves() {
        let (table, _) = table();
        let keys: Vec<_> =
            (0..100).map(|n| KeyBuf::in_default_collection(format!("k{n}").as_bytes()).unwrap()).collect();
        for (n, key) in keys.iter().enumerate() {
            let mut slot = table.lock(key.as_key());
            slot.put_committed(item(key.as_key(), n as u64 + 1, false), true);
            (0..n * 10).for_each(|_| slot.document().unwrap().warm(0));
        }
        let [held, prepared, newest] = [3, 5, 99].map(|n| keys[n].as_key());
        table.lock(held).set_lock(Some(Lock { cas: Cas(1), until: Duration::from_secs(9) }));
        let meta = item(prepared, 200, false).meta();
        let prepare = Item::new(prepared, meta, Kind::Prepare { level: types::Level::Majority }, None);
        table.lock(prepared).put_prepare(prepare);
        let leave = |filed, heat_max| {
            let leaving = Leaving { filed: Seqno(filed), heat_max, whole: true, clears: 0 };
            (0..STRIPES).for_each(|stripe| _ = table.evict(stripe, leaving, || false));
        };
        leave(99, 25);
        let is_here = |key| table.lock(key).committed().is_some();
        assert!(is_here(held) && is_here(prepared) && !is_here(keys[0].as_key()) && is_here(keys[50].as_key()));
        leave(99, 255);
        assert_eq!(table.counts.live.load(Relaxed), 3);
        assert!(is_here(held) && is_here(prepared) && is_here(newest));
        table.lock(held).set_lock(None);
        assert!(table.lock(prepared).take_prepare(Seqno(200)).is_some());
        leave(100, 255);
        assert_eq!(table.counts.live.load(Relaxed), 0);
        assert!(keys.iter().all(|key| !table.lock(key.as_key()).is_stranger()));
    }

    #[test]
    fn keys_with_the_same_beginning_spread() {
        let seed = HashSeed([0x1234, 0x9876_5432]);
        let mut buckets = [0u32; 64];
        for n in 0..6400 {
            buckets[(seed.hash(format!("\0user::profile::{n:08}").as_bytes()) % 64) as usize] += 1;
        }
        assert!(buckets.iter().all(|&n| (50..200).contains(&n)), "{buckets:?}");
    }
}
