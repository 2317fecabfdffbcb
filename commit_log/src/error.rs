//! What can go wrong with the log, shaped by what the caller does next.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Cheap to clone: one failure is told to everyone it concerns.
#[derive(Clone, Debug, thiserror::Error)]
pub enum LogError {
    #[error("{op} {}: {source}", .path.display())]
    Io { op: &'static str, path: PathBuf, source: Arc<io::Error> },
    /// Bytes that were durable are not what was written. Nothing of the log may be used.
    #[error("damaged: {}@{offset}: {what}\n  lost: {lost}", .path.display())]
    Damaged { path: PathBuf, offset: u64, what: String, lost: String },
    /// Temporary: nothing was taken. The observer's `room` says when to come again.
    #[error("the commit log has no room ({why}); {bytes_in_use} of {bytes_max} bytes are waiting to be filed")]
    Full { bytes_in_use: u64, bytes_max: u64, why: Arc<str> },
    /// What the disk holds of the log is not known: nothing is taken until a restart has looked.
    #[error("the commit log is not written any more: {0}")]
    Poisoned(Arc<str>),
    #[error("an item of {bytes} bytes does not fit a commit log segment, which takes {bytes_max}")]
    TooLarge { bytes: u64, bytes_max: u64 },
    #[error("the commit log is closed")]
    Closed,
    #[error("commit log options: {0}")]
    BadOptions(String),
}

impl LogError {
    /// Nothing was taken or changed, and the same again may work later.
    pub fn is_temporary(&self) -> bool {
        matches!(self, LogError::Full { .. } | LogError::Io { .. })
    }

    /// The operating system's error number, if one is behind this.
    pub fn errno(&self) -> Option<i32> {
        match self {
            LogError::Io { source, .. } => source.raw_os_error(),
            _ => None,
        }
    }

    pub(crate) fn io(op: &'static str, path: &Path) -> impl FnOnce(io::Error) -> LogError {
        move |source| LogError::Io { op, path: path.to_owned(), source: Arc::new(source) }
    }
}

/// No space left, or the quota is used up.
pub(crate) fn is_no_space(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOSPC | libc::EDQUOT))
}
