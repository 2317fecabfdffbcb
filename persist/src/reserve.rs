//! Space kept back for when the disk is full.
//!
//! A file that nobody reads holds some megabytes. When a write finds no space the file goes, so that what was accepted can
//! still be written, and deletes and compaction can make room; meanwhile whatever would need more is refused. Writes are
//! taken again once the file can be made anew: so "full" is said while there is still space for what must be done, and it
//! is not taken back by the first write that happens to fit.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use env::{OpenMode, Storage};
use scheduler::{Context, Next, Task, TaskHandle};
use types::rank::{Mutex, Rank};

use crate::shared::Shared;
use crate::vb::remove_if_there;

const STEP_BYTES: usize = 1 << 20;
/// A full disk is looked at after so long, then after twice that, and so on.
const PAUSE_FIRST: Duration = Duration::from_secs(1);
const PAUSE_MAX: Duration = Duration::from_secs(8);

/// 1. `is_full` from the first write without space until the reserve is whole again.
/// 2. Without a reserve (0 bytes), `is_full` until a write has succeeded.
/// 3. Only its task touches the file.
pub(crate) struct Reserve {
    storage: Arc<dyn Storage>,
    path: PathBuf,
    bytes: u64,
    is_full: AtomicBool,
    /// Until the next look at a full disk; `None`: the reserve is still there.
    pause: Mutex<Option<Duration>>,
    task: OnceLock<TaskHandle>,
}

impl Reserve {
    pub fn new(storage: Arc<dyn Storage>, data_dir: &Path, bytes: u64) -> Reserve {
        let (is_full, pause) = (AtomicBool::new(false), Mutex::ranked(Rank::CommitQueue, None));
        Reserve { storage, path: data_dir.join("reserve"), bytes, is_full, pause, task: OnceLock::new() }
    }

    pub fn set_task(&self, task: TaskHandle) {
        task.wake();
        assert!(self.task.set(task).is_ok(), "a reserve has one task");
    }

    pub fn stop(&self) {
        self.task.get().into_iter().for_each(TaskHandle::cancel);
    }

    pub fn is_full(&self) -> bool {
        self.is_full.load(Ordering::Acquire)
    }

    /// A write found no space.
    pub fn write_failed(&self) {
        let was_full = self.is_full.swap(true, Ordering::AcqRel);
        if !was_full && let Some(task) = self.task.get() {
            task.wake();
        }
    }

    /// A write has succeeded, or whoever found the disk full will not write again.
    pub fn may_have_space(&self) {
        if self.bytes == 0 {
            self.is_full.store(false, Ordering::Release);
        }
    }

    /// Makes the reserve, gives it up, or tries to make it again.
    fn keep(&self) -> Next {
        let pause = *self.pause.lock();
        if self.bytes == 0 || (self.is_full() && pause.is_none()) {
            return self.give_up(pause);
        }
        match self.fill() {
            Ok(()) => {
                if self.is_full.swap(false, Ordering::AcqRel) {
                    tracing::info!("the disk has room again");
                }
                *self.pause.lock() = None;
                Next::Idle
            }
            Err(error) if error.raw_os_error().is_some_and(is_out_of_space) => {
                self.is_full.store(true, Ordering::Release);
                self.give_up(pause)
            }
            Err(error) => {
                tracing::warn!("no space is kept back for a full disk: {}: {error}", self.path.display());
                self.is_full.store(false, Ordering::Release);
                Next::Idle
            }
        }
    }

    fn give_up(&self, pause: Option<Duration>) -> Next {
        if let Err(error) = remove_if_there(&*self.storage, &self.path) {
            tracing::warn!("space kept back for a full disk could not be given up: {error}");
        }
        if self.bytes == 0 {
            return Next::Idle;
        }
        if pause.is_none() {
            tracing::warn!("the disk is full: writes that need space are refused until there is some");
        }
        let pause = pause.map_or(PAUSE_FIRST, |pause| (pause * 2).min(PAUSE_MAX));
        *self.pause.lock() = Some(pause);
        Next::After(pause)
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
pub(crate) fn is_out_of_space(errno: i32) -> bool {
    const ENOSPC: i32 = 28;
    const EDQUOT: i32 = 122;
    matches!(errno, ENOSPC | EDQUOT)
}

/// Runs the reserve.
pub(crate) struct Keeping(pub Weak<Shared>);

impl Task for Keeping {
    fn name(&self) -> &'static str {
        "disk reserve"
    }

    fn run(&self, _: &Context<'_>) -> Next {
        self.0.upgrade().map_or(Next::Done, |shared| shared.reserve.keep())
    }
}
