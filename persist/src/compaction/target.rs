//! The file that a compaction writes, from nothing to taking the old one's place or being given up.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use couchstore::Spill;
use env::{File, OpenMode, Storage};

use crate::error::StoreError;
use crate::names;
use crate::vb::{Vb, open_file, remove_if_there};

/// 1. Under its own name it is of no use to anybody: whoever starts finds it and removes it.
/// 2. Dropped, it is removed, and the space is free again; unless it was renamed, or left to others.
pub(super) struct Target {
    vb: Arc<Vb>,
    pub path: PathBuf,
    spilled: PathBuf,
    pub file: Arc<dyn File>,
    is_kept: bool,
}

impl Target {
    /// `rev` is the revision that is compacted.
    pub fn create(vb: &Arc<Vb>, rev: u64) -> Result<Target, StoreError> {
        let path = vb.home.dir.join(names::compact_file(vb.id, rev));
        let spilled = vb.home.dir.join(names::spill_file(vb.id, rev));
        let storage = &*vb.home.shared.env.storage;
        remove_if_there(storage, &path)?;
        remove_if_there(storage, &spilled)?;
        let file = open_file(&vb.home.shared, &path, OpenMode::CreateNew)?;
        Ok(Target { vb: Arc::clone(vb), path, spilled, file, is_kept: false })
    }

    /// Where entries go that do not fit in memory.
    pub fn spill(&self) -> Spill {
        let (storage, path) = (Arc::clone(&self.vb.home.shared.env.storage), self.spilled.clone());
        Box::new(move || storage.open(&path, OpenMode::CreateNew))
    }

    pub fn remove_spilled(&self) -> Result<(), StoreError> {
        remove_if_there(self.storage(), &self.spilled)
    }

    /// Gives the file its final name, which outlives power loss once the directory is synced.
    pub fn rename(&mut self, to: &Path) -> Result<(), StoreError> {
        self.storage().rename(&self.path, to).map_err(StoreError::io("rename", &self.path))?;
        self.is_kept = true;
        Ok(())
    }

    /// Leaves it to others to give the file its name.
    pub fn leave(&mut self) {
        self.is_kept = true;
    }

    fn storage(&self) -> &dyn Storage {
        &*self.vb.home.shared.env.storage
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        let left: &[&PathBuf] = if self.is_kept { &[] } else { &[&self.spilled, &self.path] };
        for path in left {
            if let Err(error) = remove_if_there(self.storage(), path) {
                tracing::warn!(
                    "what a compaction left cannot be removed before the next one, or the next start: {error}"
                );
            }
        }
    }
}

/// A file whose bytes go to the disk whenever so many were written, so that the sync at the end has little to do: whoever syncs
/// another file meanwhile waits for all of it. They are not synced on the way, as nothing but the end counts.
pub(super) struct WrittenBack {
    file: Arc<dyn File>,
    every: u64,
    since: AtomicU64,
}

impl WrittenBack {
    /// `every` 0: never.
    pub fn every(every: u64, file: &Arc<dyn File>) -> Arc<dyn File> {
        match every {
            0 => Arc::clone(file),
            every => Arc::new(WrittenBack { file: Arc::clone(file), every, since: AtomicU64::new(0) }),
        }
    }
}

impl File for WrittenBack {
    fn read_at(&self, buf: &mut [u8], at: u64) -> io::Result<usize> {
        self.file.read_at(buf, at)
    }
    /// Writes no further than to where it is written back. Whoever writes a file anew goes on where it ended.
    fn write_at(&self, bytes: &[u8], at: u64) -> io::Result<usize> {
        let since = self.since.load(Relaxed);
        let room = self.every.saturating_sub(since).max(1);
        let now = bytes.len().min(usize::try_from(room).unwrap_or(usize::MAX));
        let written = self.file.write_at(&bytes[..now], at)? as u64;
        let waiting = since + written;
        if waiting < self.every {
            self.since.store(waiting, Relaxed);
        } else {
            self.since.store(0, Relaxed);
            self.file.write_back((at + written).saturating_sub(waiting), waiting)?;
        }
        Ok(written as usize)
    }
    fn size(&self) -> io::Result<u64> {
        self.file.size()
    }
    fn set_size(&self, size: u64) -> io::Result<()> {
        self.file.set_size(size)
    }
    fn sync(&self) -> io::Result<()> {
        self.file.sync()
    }
    fn write_back(&self, at: u64, len: u64) -> io::Result<()> {
        self.file.write_back(at, len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use env::sim::{self, Op};

    #[test]
    fn bytes_go_back_after_so_many_whatever_the_sizes_of_the_writes() {
        for (every, writes, backs) in [(4096, 10, 10), (1 << 20, 10, 0), (100, 1, 40), (0, 10, 0), (1, 1, 4096)] {
            let (env, sim) = sim::env(1);
            let file = env.storage.open(Path::new("/f"), OpenMode::CreateNew).unwrap();
            let through = WrittenBack::every(every, &file);
            for n in 0..writes {
                env::write_all_at(&*through, &[7; 4096], n * 4096).unwrap();
            }
            assert_eq!(
                (sim.storage.count(Op::WriteBack), file.size().unwrap()),
                (backs, writes * 4096),
                "every {every}"
            );
        }
    }
}
