//! All buckets of a data directory.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};

use commit_log::LogStats;
use env::Env;
use governor::Governor;
use scheduler::Pools;
use types::rank::{Mutex, Rank, RwLock};
use types::{BucketUuid, VbId};

use crate::bucket::BucketStore;
use crate::compaction::{CompactionOptions, CompactionProgress};
use crate::deletion::Deletions;
use crate::error::{Damages, StoreError};
use crate::file_cache::FileCache;
use crate::logger::Phase;
use crate::names::{self, BUCKETS_DIR, CLEAN_FILE, GONE_SUFFIX, NEW_SUFFIX};
use crate::recovery::{Found, Opening};
use crate::replay::open_log;
use crate::shared::Shared;
use crate::shared_sync::SharedSync;
use crate::spec::BucketSpec;
use crate::stats::BucketCounters;
use crate::sync::prove_files;
use crate::turn::Turn;
use crate::vb::{Home, Vb};
use crate::{LogOptions, Options};

/// The buckets of a data directory.
///
/// 1. What `open` gives is whole, or `open` fails; only leftovers of unfinished work are removed.
/// 2. The mark of a clean stop is on disk only while nothing can be written: it is taken back, durably, before the first
///    flush and put there after the last.
pub struct Store {
    pub(crate) shared: Arc<Shared>,
    pub(crate) data_dir: PathBuf,
    buckets: Mutex<BTreeMap<String, Slot>>,
    /// Of all buckets this run has seen. The commit log tells a bucket from its successor by them.
    uuids: Mutex<HashSet<BucketUuid>>,
    was_clean: bool,
    pub(crate) is_drained: AtomicBool,
}

enum Slot {
    /// Being created or deleted: the name is taken.
    Busy,
    Open(Arc<BucketStore>),
}

impl Store {
    /// Reads the data directory, which is created if it is not there. Removes leftovers of unfinished work, sets newer but
    /// bogus files aside, and opens each vBucket's file strictly. Damage is an error that names every damaged file.
    pub fn open(env: &Env, pools: &Arc<Pools>, data_dir: &Path, options: Options) -> Result<Store, StoreError> {
        crate::replay::check(options.commit_log.as_ref())?;
        let storage = &*env.storage;
        let root = data_dir.join(BUCKETS_DIR);
        let is_new = !storage.exists(&root).map_err(StoreError::io("look for", &root))?;
        let clean = data_dir.join(CLEAN_FILE);
        let was_clean = is_new || storage.exists(&clean).map_err(StoreError::io("look for", &clean))?;
        env::create_dir_durable(storage, &root).map_err(StoreError::io("create directory", &root))?;
        // The data directory's own entry: whoever made it may not have synced it, nor a first start that failed.
        let in_doubt = is_new || !was_clean;
        if let Some(parent) = data_dir.parent().filter(|parent| in_doubt && !parent.as_os_str().is_empty()) {
            storage.sync_dir(parent).map_err(StoreError::io("sync directory", parent))?;
        }

        let shared = Shared::start(env, pools, data_dir, options);
        let mut damages = Vec::new();
        let mut files = Vec::new();
        let mut buckets = BTreeMap::new();
        for name in storage.list(&root).map_err(StoreError::io("list", &root))? {
            let dir = root.join(&name);
            if name.ends_with(NEW_SUFFIX) || name.ends_with(GONE_SUFFIX) {
                tracing::info!(dir = name, "removing a bucket that was being made or removed when the last run ended");
                remove_tree(storage, &dir)?;
                continue;
            }
            if names::check_bucket_name(&name).is_err() {
                tracing::warn!(dir = name, "not a bucket's directory: left alone");
                continue;
            }
            let opened = BucketSpec::load(storage, &dir).and_then(|spec| {
                let deletions = Deletions::load(storage, &dir)?;
                let (shared, deletions) = (&shared, &deletions);
                let look = Opening { shared, dir: &dir, spec: &spec, deletions, unclean: !was_clean }.look()?;
                if !look.damages.is_empty() {
                    return Err(StoreError::Damaged(Damages(look.damages)));
                }
                let file = |found: &Found| {
                    (dir.join(names::vb_file(found.vb, found.committed.rev)), found.committed.header_at)
                };
                files.extend(look.found.iter().map(file));
                let mut found: BTreeMap<VbId, _> = look.found.into_iter().map(|found| (found.vb, found)).collect();
                let deletions = deletions.clone();
                Ok(assemble(shared, &dir, spec, deletions, |vb| found.remove(&vb).map(|f| (f.committed, f.next_rev))))
            });
            match opened {
                Ok(bucket) => {
                    buckets.insert(name, Slot::Open(Arc::new(bucket)));
                }
                Err(StoreError::Damaged(Damages(mut more))) => damages.append(&mut more),
                Err(error) => return Err(error),
            }
        }
        if !damages.is_empty() {
            return Err(StoreError::Damaged(Damages(damages)));
        }
        if !was_clean {
            prove_files(env, pools, files)?;
        }
        storage.sync_dir(&root).map_err(StoreError::io("sync directory", &root))?;
        let open = |slot: &Slot| match slot {
            Slot::Open(bucket) => Some((bucket.spec().uuid, Arc::from(bucket.vbs()))),
            Slot::Busy => None,
        };
        let homes: HashMap<_, Arc<[Arc<Vb>]>> = buckets.values().filter_map(open).collect();
        let log = open_log(&shared, pools, data_dir, &homes, was_clean)?;
        // From here on the files have everything that was ever acknowledged.
        crate::vb::remove_if_there(storage, &clean)?;
        storage.sync_dir(data_dir).map_err(StoreError::io("sync directory", data_dir))?;
        homes.iter().for_each(|(uuid, vbs)| shared.logger.add(*uuid, vbs));
        if let (Some(log), Some(options)) = (log, &shared.options.commit_log) {
            shared.set_log(pools, log, options).map_err(StoreError::log)?;
            shared.logger.set_phase(Phase::On);
        }
        shared.switch.begin(data_dir, shared.options.commit_log.clone());
        Ok(Store {
            uuids: Mutex::ranked(Rank::CommitQueue, homes.into_keys().collect()),
            shared,
            data_dir: data_dir.to_owned(),
            buckets: Mutex::ranked(Rank::FileCache, buckets),
            was_clean,
            is_drained: AtomicBool::new(false),
        })
    }

    /// Whether the last run ended by a drain that left nothing behind. If not, each vBucket needs a new history: what a
    /// peer saw of the last one may be more than the disk kept.
    pub fn was_clean(&self) -> bool {
        self.was_clean
    }

    /// A write failed for lack of space, and what is kept back for that case has not been had again since.
    pub fn disk_full(&self) -> bool {
        self.shared.reserve.is_full()
    }

    /// How many vBucket files are kept open for their next use, from now on: 0 is none. See [`FileCache::set_files_max`].
    pub fn set_files_max(&self, files_max: usize) {
        self.shared.files.set_files_max(files_max);
    }

    /// The vBucket files kept open: whoever is short of descriptors may ask it for some.
    pub fn files(&self) -> Arc<FileCache> {
        Arc::clone(&self.shared.files)
    }

    /// The commit log has no room, and will have some once more is filed: writes should be put off. Not said before it is
    /// full indeed.
    pub fn log_full(&self) -> bool {
        self.shared.logger.is_full()
    }

    /// Until the turn ends, what this thread changes is not synced for its own sake.
    pub fn begin_turn(&self) -> Turn<'_> {
        Turn::begin(&self.shared.logger)
    }

    /// `None` without a commit log.
    pub fn log_stats(&self) -> Option<LogStats> {
        Some(self.shared.logger.log()?.stats())
    }

    /// From here on changes go to a commit log, or to the files each by itself, as [`Options::commit_log`] says at a start.
    /// Returns at once; [`Store::is_switching_log`] tells whether it is done. Meanwhile everything is taken, and becomes
    /// durable, as before. Refuses options that could not work.
    ///
    /// A log that holds changes of a vBucket that takes no writes until a restart is kept, and used on.
    pub fn set_commit_log(&self, wanted: Option<LogOptions>) -> Result<(), StoreError> {
        crate::replay::check(wanted.as_ref())?;
        self.shared.switch.want(wanted);
        Ok(())
    }

    /// A change of the commit log is under way.
    pub fn is_switching_log(&self) -> bool {
        self.shared.switch.is_under_way()
    }

    /// There are so many threads for reads and for commits from now on: as many may be under way together.
    pub fn set_threads(&self, pools: &Pools, readers: usize, writers: usize) {
        self.shared.set_threads(pools, readers, writers);
    }

    /// How files are compacted from now on.
    pub fn set_compaction(&self, options: CompactionOptions) {
        self.shared.compactor.set(options);
    }

    /// The compactions that run now, and how many vBuckets wait for one.
    pub fn compactions(&self) -> (Vec<CompactionProgress>, usize) {
        let held = self.shared.governor.reading().held;
        let now = self.shared.env.clock.monotonic();
        (self.shared.compactor.progress(now, held), self.shared.compactor.queued())
    }

    /// Who slows background work down for the sake of those who wait for the disk.
    pub fn governor(&self) -> Arc<Governor> {
        Arc::clone(&self.shared.governor)
    }

    /// In order of name.
    pub fn buckets(&self) -> Vec<Arc<BucketStore>> {
        let open = |slot: &Slot| match slot {
            Slot::Open(bucket) => Some(Arc::clone(bucket)),
            Slot::Busy => None,
        };
        self.buckets.lock().values().filter_map(open).collect()
    }

    /// A bucket with no documents. Durable when it returns: a crash leaves all of it or nothing.
    pub fn create_bucket(&self, spec: BucketSpec) -> Result<Arc<BucketStore>, StoreError> {
        spec.check()?;
        self.reserve(&spec.name)?;
        let name = spec.name.clone();
        let made = self.claim_uuid(&spec).and_then(|()| self.make_dir(&spec));
        let made = made.map(|dir| Arc::new(assemble(&self.shared, &dir, spec, Deletions::default(), |_| None)));
        if let Ok(bucket) = &made {
            self.shared.logger.add(bucket.spec().uuid, bucket.vbs());
        }
        let mut buckets = self.buckets.lock();
        match &made {
            Ok(bucket) => buckets.insert(name, Slot::Open(Arc::clone(bucket))),
            Err(_) => buckets.remove(&name),
        };
        made
    }

    /// Gives a bucket other settings; durable when it returns.
    pub fn change_bucket(&self, spec: BucketSpec) -> Result<(), StoreError> {
        let bucket = match self.buckets.lock().get(&spec.name) {
            Some(Slot::Open(bucket)) => Arc::clone(bucket),
            Some(Slot::Busy) | None => return Err(StoreError::NoSuchBucket(spec.name)),
        };
        bucket.change_spec(spec)
    }

    fn reserve(&self, name: &str) -> Result<(), StoreError> {
        let mut buckets = self.buckets.lock();
        // Names that differ only in case would be one directory on some file systems.
        if buckets.keys().any(|other| other.eq_ignore_ascii_case(name)) {
            return Err(StoreError::BucketExists(name.to_owned()));
        }
        buckets.insert(name.to_owned(), Slot::Busy);
        Ok(())
    }

    /// What the log holds of one bucket must never be taken for another's.
    fn claim_uuid(&self, spec: &BucketSpec) -> Result<(), StoreError> {
        let is_new = self.uuids.lock().insert(spec.uuid);
        if is_new || self.shared.logger.log().is_none() {
            return Ok(());
        }
        let what = format!("uuid {:032x} was another bucket's; each needs a new one", spec.uuid.0);
        Err(StoreError::BadSpec { bucket: spec.name.clone(), what })
    }

    fn make_dir(&self, spec: &BucketSpec) -> Result<PathBuf, StoreError> {
        let storage = &*self.shared.env.storage;
        let root = self.data_dir.join(BUCKETS_DIR);
        let (new, dir) = (root.join(format!("{}{NEW_SUFFIX}", spec.name)), root.join(&spec.name));
        remove_tree(storage, &new)?;
        storage.create_dir_all(&new).map_err(StoreError::io("create directory", &new))?;
        spec.save(storage, &new)?;
        storage.rename(&new, &dir).map_err(StoreError::io("rename", &dir))?;
        storage.sync_dir(&root).map_err(StoreError::io("sync directory", &root))?;
        Ok(dir)
    }

    /// Stops the bucket's flushing, then removes its directory: renamed first, so that a crash leaves all of it or nothing.
    /// Whoever still holds the bucket's store gets errors for reads, and its marks stand still. Waits for flushes under way,
    /// so no lock may be held that a nudge takes. On an error the bucket is closed, but may be back after the next start.
    pub fn delete_bucket(&self, name: &str) -> Result<(), StoreError> {
        let bucket = {
            let mut buckets = self.buckets.lock();
            let slot = buckets.get_mut(name).ok_or_else(|| StoreError::NoSuchBucket(name.to_owned()))?;
            match std::mem::replace(slot, Slot::Busy) {
                Slot::Open(bucket) => bucket,
                Slot::Busy => return Err(StoreError::NoSuchBucket(name.to_owned())),
            }
        };
        bucket.mark_gone();
        self.shared.compactor.forget(&bucket.home);
        bucket.vbs().iter().for_each(|vb| self.shared.flushes.stop(vb));
        self.shared.wait_until(|| bucket.vbs().iter().all(|vb| vb.ticket.is_stopped()));
        for vb in bucket.vbs() {
            vb.detach();
            self.shared.files.retire(&vb.place, 0);
        }
        self.shared.logger.remove(bucket.spec().uuid);
        // If it was this bucket that found the disk full, nobody would find out that it no longer is.
        self.shared.reserve.may_have_space();
        let removed = self.remove_dir(&bucket.spec());
        if removed.is_ok() {
            self.shared.logger.forget(bucket.spec().uuid);
        }
        self.shared.switch.look();
        self.buckets.lock().remove(name);
        removed
    }

    fn remove_dir(&self, spec: &BucketSpec) -> Result<(), StoreError> {
        let storage = &*self.shared.env.storage;
        let root = self.data_dir.join(BUCKETS_DIR);
        let (dir, gone) =
            (root.join(&spec.name), root.join(format!("{}~{:032x}{GONE_SUFFIX}", spec.name, spec.uuid.0)));
        storage.rename(&dir, &gone).map_err(StoreError::io("rename", &dir))?;
        storage.sync_dir(&root).map_err(StoreError::io("sync directory", &root))?;
        // From here on the bucket is gone; what cannot be removed now is removed at the next start.
        if let Err(error) = remove_tree(storage, &gone) {
            tracing::warn!(bucket = spec.name, "the files of a deleted bucket could not be removed yet: {error}");
        }
        Ok(())
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        self.shared.stop();
        // The engine's nudges hold the engine, which may hold us.
        self.buckets().iter().flat_map(|bucket| bucket.vbs()).for_each(|vb| vb.detach());
    }
}

fn assemble(
    shared: &Arc<Shared>,
    dir: &Path,
    spec: BucketSpec,
    deletions: Deletions,
    mut found: impl FnMut(VbId) -> Option<(crate::vb::Committed, u64)>,
) -> BucketStore {
    let home = Arc::new(Home {
        name: spec.name.clone(),
        uuid: spec.uuid,
        dir: dir.to_owned(),
        shared: Arc::clone(shared),
        counters: BucketCounters::default(),
        gone: AtomicBool::new(false),
        unfiled_bytes: AtomicU64::new(0),
        trigger: RwLock::ranked(Rank::CommitQueue, spec.compaction),
        deletions: parking_lot::Mutex::new(deletions),
        unfiled_share: spec.quota_bytes / 4,
        names: SharedSync::new(),
    });
    let vbs = (0..spec.vbuckets).map(|id| {
        let (committed, next_rev) = found(VbId(id)).map_or((None, 1), |(committed, next)| (Some(committed), next));
        Arc::new(Vb::new(VbId(id), Arc::clone(&home), committed, next_rev))
    });
    let vbs = vbs.collect();
    BucketStore::new(spec, home, vbs)
}

/// Removes a directory of files; one that is not there is fine.
pub(crate) fn remove_tree(storage: &dyn env::Storage, dir: &Path) -> Result<(), StoreError> {
    let names = match storage.list(dir) {
        Ok(names) => names,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(StoreError::io("list", dir)(e)),
    };
    for name in names {
        let path = dir.join(name);
        storage.remove_file(&path).map_err(StoreError::io("remove", &path))?;
    }
    storage.remove_dir(dir).map_err(StoreError::io("remove directory", dir))
}
