//! The documents of one vBucket in memory, by key.
//!
//! Cut into stripes so that writers of different keys rarely meet. An entry is three pointers; key and metadata live in
//! the item it points to, shared with the changelog and with replies under way. Nothing is allocated before the first
//! document arrives: most vBuckets of a small bucket stay empty.

use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI64, Ordering::Relaxed};
use std::time::Duration;

use hashbrown::HashTable as Table;
use types::rank::{Mutex, MutexGuard, Rank};
use types::{Cas, DocKey, Item, Seqno};

/// Stripes of a vBucket's table. With 1024 vBuckets even a few make collisions of writers rare.
const STRIPES: usize = 4;

/// Bytes a slot of the table takes, beside the item: the entry, its control byte, and the slack of a table that grows
/// by doubling.
const SLOT_BYTES: i64 = (size_of::<Entry>() as i64 + 1) * 3 / 2;

/// A pessimistic lock: in memory only, gone with the process.
#[derive(Debug)]
pub struct Lock {
    /// The CAS that opens it; fresh, beside the document's own.
    pub cas: Cas,
    /// On the monotonic clock.
    pub until: Duration,
}

/// What is known of one key.
///
/// 1. At least one of `committed` and `prepare` is there.
/// 2. `committed` is the newest committed change (a tombstone counts), `prepare` the one sync write under way.
/// 3. A lock is on a live document only.
#[derive(Default)]
pub struct Entry {
    pub committed: Option<Item>,
    pub prepare: Option<Item>,
    pub lock: Option<Box<Lock>>,
}

impl Entry {
    fn id(&self) -> &[u8] {
        self.committed.as_ref().or(self.prepare.as_ref()).expect("an entry holds an item").id()
    }
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
    /// Bytes of items and slots.
    pub bytes: AtomicI64,
}

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

/// The table. Counts are kept in step by [`Locked`], through which every change goes.
pub struct HashTable {
    seed: HashSeed,
    stripes: OnceLock<Box<[Mutex<Table<Entry>>]>>,
    pub counts: Counts,
    /// Bytes of every table of the bucket together.
    bucket_bytes: Arc<AtomicI64>,
}

impl HashTable {
    pub fn new(seed: HashSeed, bucket_bytes: Arc<AtomicI64>) -> HashTable {
        HashTable { seed, stripes: OnceLock::new(), counts: Counts::default(), bucket_bytes }
    }

    fn stripes(&self) -> &[Mutex<Table<Entry>>] {
        self.stripes.get_or_init(|| {
            (0..STRIPES).map(|_| Mutex::ranked(Rank::HashStripe, Table::new())).collect::<Vec<_>>().into()
        })
    }

    /// Takes the stripe of `key`.
    pub fn lock<'a>(&'a self, key: DocKey<'a>) -> Locked<'a> {
        let hash = self.seed.hash(key.as_bytes());
        // The low bits choose the slot inside the stripe.
        let stripe = self.stripes()[(hash >> 32) as usize % STRIPES].lock();
        Locked { table: self, stripe, hash, key }
    }

    /// Shows every entry of a stripe at a time, until `each` says no. Stripes that were never needed are not made.
    pub fn visit(&self, mut each: impl FnMut(&Entry) -> bool) {
        for stripe in self.stripes.get().into_iter().flatten() {
            for entry in stripe.lock().iter() {
                if !each(entry) {
                    return;
                }
            }
        }
    }

    /// Forgets the tombstones up to `filed`: the file has them. Returns how many.
    pub fn drop_tombstones(&self, filed: Seqno) -> usize {
        let mut dropped = 0;
        for stripe in self.stripes.get().into_iter().flatten() {
            let mut freed = Vec::new();
            let mut stripe = stripe.lock();
            stripe.retain(|entry| {
                let tombstone = entry.committed.as_ref().filter(|item| item.is_deleted() && item.seqno() <= filed);
                match tombstone {
                    Some(item) if entry.prepare.is_none() => {
                        freed.push(item.clone());
                        false
                    }
                    _ => true,
                }
            });
            if !freed.is_empty() {
                stripe.shrink_to(0, |entry| self.seed.hash(entry.id()));
            }
            for item in &freed {
                self.count(item, -1);
            }
            self.add_bytes(-SLOT_BYTES * freed.len() as i64);
            dropped += freed.len();
        }
        dropped
    }

    /// Replaces the values of live documents up to `filed` by the note that they are in the file, until `enough` says so.
    /// Returns how many.
    pub fn evict_values(&self, filed: Seqno, mut enough: impl FnMut() -> bool) -> usize {
        let mut evicted = 0;
        for stripe in self.stripes.get().into_iter().flatten() {
            for entry in stripe.lock().iter_mut() {
                if enough() {
                    return evicted;
                }
                let Some(item) = &mut entry.committed else { continue };
                if !item.is_deleted() && item.resident() && item.has_value() && item.seqno() <= filed {
                    self.count(item, -1);
                    *item = item.stripped();
                    self.count(item, 1);
                    evicted += 1;
                }
            }
        }
        evicted
    }

    /// Bytes of the tables themselves beside what is counted per entry: for the statistics.
    pub fn slots(&self) -> (usize, usize) {
        let stripes = self.stripes.get().into_iter().flatten();
        stripes.fold((0, 0), |(slots, len), stripe| {
            let table = stripe.lock();
            (slots + table.capacity(), len + table.len())
        })
    }

    fn count(&self, item: &Item, sign: i64) {
        let counts = &self.counts;
        if !item.is_committed() {
            counts.prepares.fetch_add(sign, Relaxed);
        } else if item.is_deleted() {
            counts.tombstones.fetch_add(sign, Relaxed);
        } else {
            counts.live.fetch_add(sign, Relaxed);
            if !item.resident() {
                counts.non_resident.fetch_add(sign, Relaxed);
            }
            if item.meta().expiry != 0 {
                counts.expiring.fetch_add(sign, Relaxed);
            }
        }
        self.add_bytes(sign * item.memory() as i64);
    }

    fn add_bytes(&self, bytes: i64) {
        self.counts.bytes.fetch_add(bytes, Relaxed);
        self.bucket_bytes.fetch_add(bytes, Relaxed);
    }
}

impl Drop for HashTable {
    fn drop(&mut self) {
        self.bucket_bytes.fetch_sub(self.counts.bytes.load(Relaxed), Relaxed);
    }
}

/// One key, with its stripe held.
pub struct Locked<'a> {
    table: &'a HashTable,
    stripe: MutexGuard<'a, Table<Entry>>,
    hash: u64,
    pub key: DocKey<'a>,
}

impl Locked<'_> {
    pub fn entry(&self) -> Option<&Entry> {
        self.stripe.find(self.hash, |entry| entry.id() == self.key.as_bytes())
    }

    pub fn committed(&self) -> Option<&Item> {
        self.entry()?.committed.as_ref()
    }

    pub fn prepare(&self) -> Option<&Item> {
        self.entry()?.prepare.as_ref()
    }

    /// The lock, if it still holds at `now` of the monotonic clock.
    pub fn lock_at(&self, now: Duration) -> Option<&Lock> {
        self.entry()?.lock.as_deref().filter(|lock| now < lock.until)
    }

    /// Puts a newer committed change in place, or the same with or without its value. A lock ends when `unlock` says so.
    pub fn put_committed(&mut self, item: Item, unlock: bool) {
        debug_assert!(item.is_committed());
        let table = self.table;
        table.count(&item, 1);
        let old = self.with_entry(|entry| {
            if unlock {
                entry.lock = None;
            }
            entry.committed.replace(item)
        });
        if let Some(old) = old {
            table.count(&old, -1);
        }
    }

    pub fn put_prepare(&mut self, item: Item) {
        debug_assert!(!item.is_committed());
        self.table.count(&item, 1);
        let old = self.with_entry(|entry| entry.prepare.replace(item));
        assert!(old.is_none(), "a key has one sync write at a time");
    }

    /// Takes the prepare of this seqno out, if it is still there.
    pub fn take_prepare(&mut self, seqno: Seqno) -> Option<Item> {
        self.prepare().filter(|item| item.seqno() == seqno)?;
        let found = self.stripe.find_entry(self.hash, |entry| entry.id() == self.key.as_bytes());
        let mut entry = found.ok().expect("just seen");
        let item = entry.get_mut().prepare.take().expect("just seen");
        if entry.get().committed.is_none() {
            // The entry's id is gone with the prepare: it may not stay a moment longer.
            entry.remove();
            self.table.add_bytes(-SLOT_BYTES);
        }
        self.table.count(&item, -1);
        Some(item)
    }

    pub fn set_lock(&mut self, lock: Option<Lock>) {
        if self.entry().is_some() {
            self.with_entry(|entry| entry.lock = lock.map(Box::new));
        }
    }

    /// Changes the entry of the key, making an empty one first if there is none; `change` fills it.
    fn with_entry<R>(&mut self, change: impl FnOnce(&mut Entry) -> R) -> R {
        let (seed, id) = (self.table.seed, self.key.as_bytes());
        match self.stripe.find_mut(self.hash, |entry| entry.id() == id) {
            Some(entry) => change(entry),
            None => {
                let mut entry = Entry::default();
                let result = change(&mut entry);
                self.stripe.insert_unique(self.hash, entry, |entry| seed.hash(entry.id()));
                self.table.add_bytes(SLOT_BYTES);
                result
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use types::{Datatype, DeleteSource, KeyBuf, Kind, Meta, RevSeqno};

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
        let value = (!deleted).then_some(&b"value"[..]);
        Item::new(key, meta, Kind::Committed { prepared: None }, value)
    }

    fn table() -> (HashTable, Arc<AtomicI64>) {
        let bytes = Arc::new(AtomicI64::new(0));
        (HashTable::new(HashSeed([1, 2]), Arc::clone(&bytes)), bytes)
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
        table.visit(|entry| {
            let item = entry.committed.as_ref().unwrap();
            if item.is_deleted() {
                dead += 1
            } else {
                live += 1
            }
            held += item.memory() as i64 + SLOT_BYTES;
            true
        });
        assert_eq!((live, dead), (table.counts.live.load(Relaxed), table.counts.tombstones.load(Relaxed)));
        assert_eq!(live + dead, 100);
        assert_eq!(held, bytes.load(Relaxed));
        assert_eq!(table.drop_tombstones(Seqno(1000)) as i64, dead);
        assert_eq!(table.counts.tombstones.load(Relaxed), 0);
        table.evict_values(Seqno(1000), || false);
        assert_eq!(table.counts.non_resident.load(Relaxed), live);
        drop(table);
        assert_eq!(bytes.load(Relaxed), 0);
    }

    #[test]
    fn tombstones_the_file_does_not_have_yet_stay() {
        let (table, _) = table();
        for n in 1..=10u64 {
            let key = KeyBuf::in_default_collection(format!("k{n}").as_bytes()).unwrap();
            table.lock(key.as_key()).put_committed(item(key.as_key(), n, true), true);
        }
        assert_eq!(table.drop_tombstones(Seqno(4)), 4);
        assert_eq!(table.counts.tombstones.load(Relaxed), 6);
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
