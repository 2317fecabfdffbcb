//! Doing the same to many files at once: one at a time, each costs a wait for the disk; together they share it.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use env::{Env, OpenMode, Storage};
use scheduler::park::{Bay, Look, Wake};
use scheduler::{PoolKind, Pools};

use crate::error::StoreError;

const HELPERS_EACH: usize = 4;
/// A header begins a block of the file.
const HEADER_BLOCK_BYTES: u64 = 4096;

/// Makes durable what each of these files says up to its newest commit, whose header is at the given offset.
pub(crate) fn prove_files(env: &Env, pools: &Pools, files: Vec<(PathBuf, u64)>) -> Result<(), StoreError> {
    let storage = Arc::clone(&env.storage);
    side_by_side(pools, "start-up sync", files, move |(path, header_at)| prove_file(&*storage, path, *header_at))
}

/// Does `act` to all of `things`, several at a time. Returns the first failure, once all are done.
pub(crate) fn side_by_side<T: Send + Sync + 'static>(
    pools: &Pools,
    name: &'static str,
    things: Vec<T>,
    act: impl Fn(&T) -> Result<(), StoreError> + Send + Sync + 'static,
) -> Result<(), StoreError> {
    let count = things.len();
    let job = Arc::new(Job { things, act, next: AtomicUsize::new(0), done: Bay::new((0, None)) });
    if count > 1 {
        for kind in [PoolKind::Writer, PoolKind::Reader, PoolKind::Background] {
            for _ in 0..HELPERS_EACH {
                let job = Arc::clone(&job);
                pools.execute(kind, name, move || job.work());
            }
        }
    }
    // The caller works too, so that this ends even if no helper ever runs.
    job.work();
    let failed = job.done.wait(|(done, failed)| match *done == count {
        true => Look::Found(failed.take()),
        false => Look::Nothing,
    });
    failed.map_or(Ok(()), Err)
}

struct Job<T, F> {
    things: Vec<T>,
    act: F,
    /// The first that nobody has taken.
    next: AtomicUsize,
    /// How many are done, and the first failure.
    done: Bay<(usize, Option<StoreError>)>,
}

impl<T, F: Fn(&T) -> Result<(), StoreError>> Job<T, F> {
    fn work(&self) {
        while let Some(thing) = self.things.get(self.next.fetch_add(1, Ordering::Relaxed)) {
            let failure = (self.act)(thing).err();
            self.done.change(|(done, failed)| {
                *done += 1;
                if failed.is_none() {
                    *failed = failure;
                }
                ((), if *done == self.things.len() { Wake::Everybody } else { Wake::Nobody })
            });
        }
    }
}

/// A sync may have failed before this start without a reboot since. Then the page cache shows bytes that are not on disk, and
/// takes them for clean: another sync does nothing. A header counts only after the sync of all before it has succeeded, so
/// the header itself is all that can be in doubt. It is written once more, as it is.
pub(crate) fn prove_file(storage: &dyn Storage, path: &Path, header_at: u64) -> Result<(), StoreError> {
    let file = storage.open(path, OpenMode::ReadWrite).map_err(StoreError::io("open", path))?;
    let size = file.size().map_err(StoreError::io("read", path))?;
    let mut header = vec![0; size.saturating_sub(header_at).min(HEADER_BLOCK_BYTES) as usize];
    env::read_exact_at(&*file, &mut header, header_at).map_err(StoreError::io("read", path))?;
    env::write_all_at(&*file, &header, header_at).map_err(StoreError::io("write", path))?;
    file.sync().map_err(StoreError::io("sync", path))
}
