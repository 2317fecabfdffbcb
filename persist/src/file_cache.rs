//! vBucket files kept open between uses.
//!
//! What is kept is the descriptor and nothing else: no buffers, no trees. Whoever uses a file reads its state from the
//! disk, at the commit that is known to be good, so a commit that failed cannot leak into the next one through here.
//!
//! ```text
//!     open ──▶ kept? ── yes ──▶ a share of the handle
//!                └──── no ───▶ the file system, without the lock ──▶ keep a share, unless retired meanwhile
//! ```

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use env::{Durable, File, OpenMode, Storage};
use types::rank::{Mutex, Rank};
use types::{BucketUuid, VbId};

use crate::stats::{FILE_CACHE_HITS, FILE_CLOSES_FOR_ROOM, FILE_OPENS, FILE_REOPENS, FILES_GIVEN_BACK, FILES_KEPT};

/// Given back at least, when descriptors run out: whoever ran out is rarely the only one.
const GIVEN_BACK_MIN: usize = 16;

const ENFILE: i32 = 23;
const EMFILE: i32 = 24;

/// Whether an error says that there are no descriptors left: the system's word for it, or that of a storage which counts
/// them and did not even ask the system.
pub(crate) fn is_out_of_files(error: &io::Error) -> bool {
    match error.raw_os_error() {
        Some(errno) => matches!(errno, EMFILE | ENFILE),
        None => error.kind() == io::ErrorKind::ResourceBusy,
    }
}

/// A vBucket as the cache knows it.
#[derive(Debug)]
pub(crate) struct Place {
    bucket: BucketUuid,
    vb: VbId,
    /// The one revision that may be kept; 0: none.
    live_rev: AtomicU64,
    /// Its file was kept once and closed to make room.
    was_evicted: AtomicBool,
}

impl Place {
    pub fn new(bucket: BucketUuid, vb: VbId, live_rev: u64) -> Place {
        Place { bucket, vb, live_rev: AtomicU64::new(live_rev), was_evicted: AtomicBool::new(false) }
    }

    fn key(&self, rev: u64) -> Key {
        Key { bucket: self.bucket, vb: self.vb, rev }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Key {
    bucket: BucketUuid,
    vb: VbId,
    rev: u64,
}

/// Keeps at most `files_max` vBucket files open for their next user.
///
/// 1. One entry per (bucket, vBucket, revision): users of a file share its handle.
/// 2. What is kept is at most `files_max`, at any time; 0 keeps nothing. Users hold their handles beyond that.
/// 3. The lock is held neither while opening nor while closing. A file that is thrown out is closed by its last user.
/// 4. A failed open leaves no trace: the next caller tries afresh.
/// 5. After [`FileCache::retire`] no file of an older revision is kept: who is opening one meanwhile looks, under the lock,
///    whether it is still live.
pub struct FileCache {
    storage: Arc<dyn Storage>,
    files_max: AtomicUsize,
    kept: Mutex<Kept>,
}

#[derive(Default)]
struct Kept {
    files: HashMap<Key, Entry>,
    /// From the one not used for longest on.
    by_age: BTreeMap<u64, Key>,
    uses: u64,
}

struct Entry {
    file: Arc<dyn File>,
    place: Arc<Place>,
    used: u64,
}

/// One reading of the cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FileCacheStats {
    pub kept: usize,
    pub files_max: usize,
}

impl FileCache {
    pub(crate) fn new(storage: Arc<dyn Storage>, files_max: usize) -> FileCache {
        let kept = Mutex::ranked(Rank::FileCache, Kept::default());
        FileCache { storage, files_max: AtomicUsize::new(files_max), kept }
    }

    /// Changes how many files are kept, under load too. What is too many is closed before this returns, except what is in
    /// use: that closes when its use ends. 0 keeps none.
    pub fn set_files_max(&self, files_max: usize) {
        self.files_max.store(files_max, Ordering::Release);
        let surplus = self.kept.lock().shrink_to(files_max);
        drop(surplus);
    }

    /// Closes up to `n` files that nobody uses, those unused for longest first. Returns how many: as many descriptors are
    /// free now.
    pub fn close_some(&self, n: usize) -> usize {
        let given = self.kept.lock().take_idle(n);
        FILES_GIVEN_BACK.add(given.len() as u64);
        given.len()
    }

    pub fn stats(&self) -> FileCacheStats {
        FileCacheStats { kept: self.kept.lock().files.len(), files_max: self.files_max.load(Ordering::Relaxed) }
    }

    /// The file of revision `rev`, to read and write.
    pub(crate) fn open(&self, place: &Arc<Place>, rev: u64, path: &Path) -> io::Result<Arc<dyn File>> {
        if let Some(file) = self.kept.lock().touch(&place.key(rev)) {
            FILE_CACHE_HITS.inc();
            return Ok(file);
        }
        let file = self.with_room(|| self.storage.open(path, OpenMode::ReadWrite))?;
        match place.was_evicted.swap(false, Ordering::Relaxed) {
            true => FILE_REOPENS.inc(),
            false => FILE_OPENS.inc(),
        }
        Ok(self.keep(place, rev, file))
    }

    /// Keeps a file for its next user, if there is a place for it. Gives back the handle to use: another's, if somebody
    /// has opened the same file meanwhile.
    pub(crate) fn keep(&self, place: &Arc<Place>, rev: u64, file: Arc<dyn File>) -> Arc<dyn File> {
        let mut surplus = Vec::new();
        let key = place.key(rev);
        let mut kept = self.kept.lock();
        let files_max = self.files_max.load(Ordering::Acquire);
        if files_max == 0 || place.live_rev.load(Ordering::Acquire) != rev {
            return file;
        }
        if let Some(other) = kept.touch(&key) {
            drop(kept);
            return other;
        }
        surplus.append(&mut kept.shrink_to(files_max - 1));
        kept.insert(key, Arc::clone(&file), Arc::clone(place));
        drop(kept);
        drop(surplus);
        file
    }

    /// From here on only `rev` of this vBucket is kept; 0: none, ever again.
    pub(crate) fn retire(&self, place: &Place, rev: u64) {
        let before = place.live_rev.swap(rev, Ordering::AcqRel);
        if before == rev {
            return;
        }
        place.was_evicted.store(false, Ordering::Relaxed);
        let old = self.kept.lock().remove(&place.key(before));
        drop(old);
    }

    /// Does what needs a descriptor. If there is none, files are given back, and it is tried once more.
    fn with_room<T>(&self, mut act: impl FnMut() -> io::Result<T>) -> io::Result<T> {
        match act() {
            Err(error) if is_out_of_files(&error) => {
                let n = GIVEN_BACK_MIN.max(self.stats().kept / 8);
                if self.close_some(n) > 0 { act() } else { Err(error) }
            }
            result => result,
        }
    }
}

/// A storage that asks the cache for descriptors when it runs out of them.
pub(crate) struct WithRoom {
    pub storage: Arc<dyn Storage>,
    pub files: Arc<FileCache>,
}

impl Storage for WithRoom {
    fn open(&self, path: &Path, mode: OpenMode) -> io::Result<Arc<dyn File>> {
        self.files.with_room(|| self.storage.open(path, mode))
    }
    fn open_durable(&self, path: &Path, how: Durable) -> io::Result<Option<Arc<dyn File>>> {
        self.files.with_room(|| self.storage.open_durable(path, how))
    }
    fn create_dir_all(&self, path: &Path) -> io::Result<()> {
        self.storage.create_dir_all(path)
    }
    fn list(&self, path: &Path) -> io::Result<Vec<String>> {
        self.files.with_room(|| self.storage.list(path))
    }
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.storage.rename(from, to)
    }
    fn remove_file(&self, path: &Path) -> io::Result<()> {
        self.storage.remove_file(path)
    }
    fn remove_dir(&self, path: &Path) -> io::Result<()> {
        self.storage.remove_dir(path)
    }
    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        // Out of descriptors it has not begun, so a second try is no second sync.
        self.files.with_room(|| self.storage.sync_dir(path))
    }
    fn exists(&self, path: &Path) -> io::Result<bool> {
        self.storage.exists(path)
    }
    fn free_bytes(&self, path: &Path) -> io::Result<Option<u64>> {
        self.storage.free_bytes(path)
    }
}

impl Kept {
    fn touch(&mut self, key: &Key) -> Option<Arc<dyn File>> {
        let entry = self.files.get_mut(key)?;
        self.uses += 1;
        let before = std::mem::replace(&mut entry.used, self.uses);
        self.by_age.remove(&before);
        self.by_age.insert(self.uses, *key);
        Some(Arc::clone(&entry.file))
    }

    fn insert(&mut self, key: Key, file: Arc<dyn File>, place: Arc<Place>) {
        self.uses += 1;
        self.by_age.insert(self.uses, key);
        let before = self.files.insert(key, Entry { file, place, used: self.uses });
        assert!(before.is_none(), "one entry per file");
        FILES_KEPT.add(1);
    }

    #[must_use = "closed outside the lock"]
    fn remove(&mut self, key: &Key) -> Option<Entry> {
        let entry = self.files.remove(key)?;
        self.by_age.remove(&entry.used);
        FILES_KEPT.sub(1);
        Some(entry)
    }

    #[must_use = "closed outside the lock"]
    fn shrink_to(&mut self, files_max: usize) -> Vec<Entry> {
        let mut surplus = Vec::new();
        while self.files.len() > files_max
            && let Some((_, key)) = self.by_age.first_key_value().map(|(age, key)| (*age, *key))
        {
            surplus.extend(self.evict(&key));
        }
        surplus
    }

    #[must_use = "closed outside the lock"]
    fn take_idle(&mut self, n: usize) -> Vec<Entry> {
        // A share can only be taken under the lock, so what has one holder now is ours alone.
        let idle = self.by_age.values().filter(|key| Arc::strong_count(&self.files[*key].file) == 1);
        let idle: Vec<Key> = idle.take(n).copied().collect();
        idle.iter().filter_map(|key| self.evict(key)).collect()
    }

    fn evict(&mut self, key: &Key) -> Option<Entry> {
        let entry = self.remove(key)?;
        entry.place.was_evicted.store(true, Ordering::Relaxed);
        FILE_CLOSES_FOR_ROOM.inc();
        Some(entry)
    }
}

impl Drop for FileCache {
    fn drop(&mut self) {
        FILES_KEPT.sub(self.kept.lock().files.len() as i64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use env::sim::{self, FaultPlan, Op, Sim};
    use std::path::PathBuf;

    const DIR: &str = "/d";

    struct Rig {
        sim: Sim,
        cache: FileCache,
        places: Vec<Arc<Place>>,
    }

    fn path(n: usize, rev: u64) -> PathBuf {
        Path::new(DIR).join(format!("{n}.couch.{rev}"))
    }

    /// Files 0..n, each at revision 1.
    fn rig(n: usize, files_max: usize) -> Rig {
        let (env, sim) = sim::env(1);
        for file in 0..n {
            sim.storage.write_file(path(file, 1), &file.to_be_bytes()).unwrap();
        }
        let places = (0..n).map(|vb| Arc::new(Place::new(BucketUuid(1), VbId(vb as u16), 1))).collect();
        Rig { sim, cache: FileCache::new(env.storage, files_max), places }
    }

    impl Rig {
        fn open(&self, n: usize) -> io::Result<Arc<dyn File>> {
            self.cache.open(&self.places[n], 1, &path(n, 1))
        }

        fn opens(&self) -> u64 {
            self.sim.storage.count(Op::Open)
        }
    }

    fn number(file: &dyn File) -> usize {
        let mut bytes = [0; 8];
        env::read_exact_at(file, &mut bytes, 0).unwrap();
        usize::from_be_bytes(bytes)
    }

    #[test]
    fn users_of_a_file_share_its_handle_and_the_oldest_makes_room() {
        let rig = rig(4, 2);
        assert!(Arc::ptr_eq(&rig.open(0).unwrap(), &rig.open(0).unwrap()));
        rig.open(1).unwrap();
        rig.open(0).unwrap();
        assert_eq!(rig.opens(), 2);
        rig.open(2).unwrap();
        assert_eq!((rig.sim.storage.open_files(), rig.cache.stats().kept), (2, 2));
        rig.open(0).unwrap();
        assert_eq!(rig.opens(), 3, "0 was used more recently than 1");
        rig.open(1).unwrap();
        assert_eq!(rig.opens(), 4);
    }

    /// S06: thrown out while in use, a file goes on to be the same file, and is closed by its last user.
    #[test]
    fn a_file_thrown_out_under_its_users_is_closed_by_the_last() {
        let rig = rig(3, 1);
        let first = rig.open(0).unwrap();
        let second = rig.open(1).unwrap();
        drop(rig.open(2).unwrap());
        assert_eq!((number(&*first), number(&*second)), (0, 1));
        assert_eq!(rig.sim.storage.open_files(), 3, "one kept, two in use");
        drop((first, second));
        assert_eq!(rig.sim.storage.open_files(), 1);
    }

    /// S05: 0 is none, not unlimited, and lowering the number closes at once.
    #[test]
    fn lowering_the_number_closes_files_and_zero_keeps_none() {
        let rig = rig(5, 4);
        (0..5).for_each(|n| drop(rig.open(n).unwrap()));
        let user = rig.open(4).unwrap();
        rig.cache.set_files_max(2);
        assert_eq!(rig.sim.storage.open_files(), 2);
        rig.cache.set_files_max(0);
        assert_eq!((rig.sim.storage.open_files(), rig.cache.stats().kept), (1, 0), "only what is in use");
        drop(user);
        drop(rig.open(1).unwrap());
        assert_eq!(rig.sim.storage.open_files(), 0);
        rig.cache.set_files_max(1);
        drop(rig.open(1).unwrap());
        assert_eq!(rig.sim.storage.open_files(), 1);
    }

    /// S02, S03: running out of descriptors costs kept files, never a request that one of them could have served.
    #[test]
    fn out_of_descriptors_files_are_given_back_and_the_open_tried_once_more() {
        let rig = rig(8, 8);
        (0..4).for_each(|n| drop(rig.open(n).unwrap()));
        rig.sim.storage.set_open_files_max(Some(4));
        let users: Vec<_> = (4..8).map(|n| rig.open(n).unwrap()).collect();
        let opens = rig.opens();
        let error = rig.open(0).err().expect("all four are in use");
        assert!(is_out_of_files(&error));
        assert_eq!(rig.opens(), opens + 1, "with nothing to give back there is no second try");
        rig.sim.storage.set_open_files_max(None);
        drop(users);
        assert_eq!(number(&*rig.open(0).unwrap()), 0);
        assert_eq!(rig.cache.close_some(3), 3);
        assert_eq!(rig.cache.close_some(100), rig.sim.storage.open_files() as usize + 2);
        assert_eq!(rig.sim.storage.open_files(), 0);
    }

    #[test]
    fn a_failed_open_leaves_no_trace() {
        let rig = rig(1, 4);
        rig.sim.storage.arm(FaultPlan::new().fail_nth(Op::Open, 0, 5));
        assert_eq!(rig.open(0).err().and_then(|e| e.raw_os_error()), Some(5));
        assert_eq!((rig.cache.stats().kept, rig.sim.storage.open_files()), (0, 0));
        assert_eq!(number(&*rig.open(0).unwrap()), 0);
    }

    /// A retired revision is not kept, whoever was about to open it; the new one is.
    #[test]
    fn after_retire_only_the_new_revision_is_kept() {
        let rig = rig(1, 4);
        let reader = rig.open(0).unwrap();
        rig.sim.storage.write_file(path(0, 2), &7_usize.to_be_bytes()).unwrap();
        let (place, cache) = (&rig.places[0], &rig.cache);
        cache.retire(place, 2);
        assert_eq!((number(&*reader), cache.stats().kept), (0, 0));
        drop(reader);
        drop(rig.open(0).unwrap());
        assert_eq!((cache.stats().kept, rig.sim.storage.open_files()), (0, 0));
        assert_eq!(number(&*cache.open(place, 2, &path(0, 2)).unwrap()), 7);
        assert_eq!(cache.stats().kept, 1);
        cache.retire(place, 0);
        drop(cache.open(place, 2, &path(0, 2)).unwrap());
        assert_eq!(rig.sim.storage.open_files(), 0);
    }

    /// Goal: permits out equal descriptors open, whatever happens. Method: random opens, faults, retirements and limits;
    /// at rest the disk counts what the cache says it keeps.
    #[test]
    fn what_is_kept_is_what_is_open_after_any_storm() {
        let rig = rig(12, 5);
        let mut dice = 9_u64;
        let mut roll = |n: u64| {
            dice = dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (dice >> 33) % n
        };
        let mut users = Vec::new();
        for round in 0..4000 {
            let n = roll(12) as usize;
            match roll(12) {
                0 => rig.cache.set_files_max(roll(7) as usize),
                1 => drop(rig.cache.close_some(roll(4) as usize)),
                2 => rig.sim.storage.set_open_files_max((roll(2) == 0).then(|| 3 + roll(6))),
                3 => rig.cache.retire(&rig.places[n], roll(2)),
                4 => users.clear(),
                5..8 => users.extend(rig.open(n).ok()),
                _ => drop(rig.open(n).map(|file| assert_eq!(number(&*file), n))),
            }
            let stats = rig.cache.stats();
            assert!(stats.kept <= stats.files_max, "round {round}");
        }
        users.clear();
        assert_eq!(rig.cache.stats().kept as u64, rig.sim.storage.open_files());
        rig.cache.set_files_max(0);
        assert_eq!(rig.sim.storage.open_files(), 0);
    }
}
