//! Space kept back for when the disk is full.
//!
//! A file that nobody reads holds some megabytes. When a write finds no space the file goes, so that what was accepted can
//! still be written, and deletes and compaction can make room; meanwhile whatever would need more is refused. Writes are
//! taken again once the file can be made anew: so "full" is said while there is still space for what must be done, and it
//! is not taken back by the first write that happens to fit.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use env::{OpenMode, Storage};

use crate::error::StoreError;
use crate::vb::remove_if_there;

const STEP_BYTES: usize = 1 << 20;

/// 1. `is_full` from the first write without space until the reserve is whole again.
/// 2. Without a reserve (0 bytes), `is_full` until a write has succeeded.
pub(crate) struct Reserve {
    storage: Arc<dyn Storage>,
    path: PathBuf,
    bytes: u64,
    is_full: AtomicBool,
}

impl Reserve {
    pub fn new(storage: Arc<dyn Storage>, path: PathBuf, bytes: u64) -> Reserve {
        Reserve { storage, path, bytes, is_full: AtomicBool::new(false) }
    }

    /// Makes the reserve as large as it should be, at a start. A disk without room for it counts as full.
    pub fn set_up(&self) -> Result<(), StoreError> {
        if self.bytes == 0 {
            return remove_if_there(&*self.storage, &self.path);
        }
        match self.fill() {
            Ok(()) => {}
            Err(error) if is_out_of_space(&error) => self.write_failed(),
            Err(error) => return Err(StoreError::io("write", &self.path)(error)),
        }
        Ok(())
    }

    pub fn is_full(&self) -> bool {
        self.is_full.load(Ordering::Acquire)
    }

    /// A write found no space.
    pub fn write_failed(&self) {
        self.is_full.store(true, Ordering::Release);
        if self.bytes > 0
            && let Err(error) = remove_if_there(&*self.storage, &self.path)
        {
            tracing::warn!("the disk is full, and its reserve could not be given up: {error}");
        }
    }

    /// A write has succeeded.
    pub fn write_succeeded(&self) {
        if self.bytes == 0 {
            self.is_full.store(false, Ordering::Release);
        }
    }

    /// Looks whether the disk has room for the reserve again. True: it had to be tried, and has to be again.
    pub fn try_to_recover(&self) -> bool {
        if self.bytes == 0 || !self.is_full() {
            return false;
        }
        match self.fill() {
            Ok(()) => {
                tracing::info!("the disk has room again");
                self.is_full.store(false, Ordering::Release);
                false
            }
            Err(_) => {
                let _ = remove_if_there(&*self.storage, &self.path);
                true
            }
        }
    }

    /// Whoever made the disk full is gone.
    pub fn forget(&self) {
        self.write_succeeded();
    }

    /// The bytes are written, as a hole would hold nothing back. They need not outlive anything, so nothing is synced.
    fn fill(&self) -> io::Result<()> {
        let file = match self.storage.open(&self.path, OpenMode::ReadWrite) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                self.storage.open(&self.path, OpenMode::CreateNew)?
            }
            opened => opened?,
        };
        let mut at = file.size()?;
        if at > self.bytes {
            return file.set_size(self.bytes);
        }
        let zeros = vec![0; STEP_BYTES.min(self.bytes as usize)];
        while at < self.bytes {
            let step = zeros.len().min((self.bytes - at) as usize);
            env::write_all_at(&*file, &zeros[..step], at)?;
            at += step as u64;
        }
        Ok(())
    }
}

/// No space left, or the quota is used up.
pub(crate) fn is_out_of_space(error: &io::Error) -> bool {
    const ENOSPC: i32 = 28;
    const EDQUOT: i32 = 122;
    matches!(error.raw_os_error(), Some(ENOSPC | EDQUOT))
}

/// Where the reserve is.
pub(crate) fn path(data_dir: &Path) -> PathBuf {
    data_dir.join("reserve")
}
