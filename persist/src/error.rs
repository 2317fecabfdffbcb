//! What can go wrong with a store, shaped by what the caller does next.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use types::VbId;

/// What to do about an error: decided once, here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Nothing was changed; the same again may work.
    Retry,
    /// This request cannot be fulfilled; the store is fine.
    FailRequest,
    /// What the disk holds is no longer known: no more writes here until a restart has looked.
    StopWrites,
    /// Do not serve from this data: a person has to decide.
    Abort,
}

/// Cheap to clone: one read error is told to everyone who waited for the read.
#[derive(Clone, Debug, thiserror::Error)]
pub enum StoreError {
    #[error("{op} {}: {source}", .path.display())]
    Io { op: &'static str, path: PathBuf, source: Arc<io::Error> },
    /// The bytes of one file are not what was written there.
    #[error("{0}")]
    Damaged(Damages),
    /// A file could not be read or written, its bytes are not known to be wrong.
    #[error("vBucket {vb}: {source}")]
    File { vb: VbId, source: Arc<couchstore::Error> },
    /// What a sync left on disk is unknown.
    #[error("vBucket {vb}: sync of {}: {source}; nothing is written here until a restart", .path.display())]
    SyncFailed { vb: VbId, path: PathBuf, source: Arc<io::Error> },
    #[error("{0}")]
    Log(Arc<commit_log::LogError>),
    #[error("vBucket {vb}: {what}")]
    Refused { vb: VbId, what: String },
    #[error("\"{0}\" cannot name a bucket: 1 to 100 of A-Z a-z 0-9 . _ % - are allowed, except \".\" and \"..\" alone")]
    BadName(String),
    #[error("bucket \"{0}\" exists already")]
    BucketExists(String),
    #[error("the store is closed")]
    Closed,
    #[error("the compaction was cancelled; the file is as it was")]
    Cancelled,
    #[error("there is no bucket \"{0}\"")]
    NoSuchBucket(String),
    #[error("bucket \"{bucket}\": {what}")]
    BadSpec { bucket: String, what: String },
}

impl StoreError {
    pub fn verdict(&self) -> Verdict {
        match self {
            StoreError::Io { .. } => Verdict::Retry,
            StoreError::File { source, .. } if source.is_damage() => Verdict::Abort,
            StoreError::File { .. } => Verdict::Retry,
            StoreError::SyncFailed { .. } | StoreError::Refused { .. } => Verdict::StopWrites,
            StoreError::Damaged(_) => Verdict::Abort,
            StoreError::Log(error) if error.is_temporary() => Verdict::Retry,
            StoreError::Log(_) => Verdict::StopWrites,
            StoreError::BadName(_)
            | StoreError::BucketExists(_)
            | StoreError::NoSuchBucket(_)
            | StoreError::Closed
            | StoreError::Cancelled
            | StoreError::BadSpec { .. } => Verdict::FailRequest,
        }
    }

    /// The operating system's error number, if one is behind this.
    pub fn errno(&self) -> Option<i32> {
        match self {
            StoreError::Io { source, .. } | StoreError::SyncFailed { source, .. } => source.raw_os_error(),
            StoreError::Log(error) => error.errno(),
            StoreError::File { source, .. } => match &**source {
                couchstore::Error::Io { source, .. } | couchstore::Error::Commit { source, .. } => {
                    source.raw_os_error()
                }
                _ => None,
            },
            _ => None,
        }
    }

    /// There is no file of that name.
    pub(crate) fn is_not_found(&self) -> bool {
        matches!(self, StoreError::Io { source, .. } if source.kind() == io::ErrorKind::NotFound)
    }

    /// There is a file of that name already.
    pub(crate) fn is_in_the_way(&self) -> bool {
        matches!(self, StoreError::Io { source, .. } if source.kind() == io::ErrorKind::AlreadyExists)
    }

    pub(crate) fn io(op: &'static str, path: &Path) -> impl FnOnce(io::Error) -> StoreError {
        move |source| StoreError::Io { op, path: path.to_owned(), source: Arc::new(source) }
    }

    pub(crate) fn file(vb: VbId) -> impl FnOnce(couchstore::Error) -> StoreError {
        move |source| StoreError::File { vb, source: Arc::new(source) }
    }
}

/// Everything found damaged in one look at a data directory, so that one restart shows it all.
#[derive(Clone, Debug)]
pub struct Damages(pub Vec<Damage>);

/// One damaged file: where, what, and what it costs.
#[derive(Clone, Debug)]
pub struct Damage {
    pub vb: Option<VbId>,
    pub path: PathBuf,
    /// Where in the file, in bytes, if the damage has a place.
    pub offset: Option<u64>,
    /// What is wrong.
    pub what: String,
    /// What is lost if nothing better than this file turns up.
    pub lost: String,
}

impl fmt::Display for Damages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for damage in &self.0 {
            let offset = damage.offset.map_or(String::new(), |at| format!("@{at}"));
            writeln!(f, "damaged: {}{offset}: {}", damage.path.display(), damage.what)?;
            writeln!(f, "  lost: {}", damage.lost)?;
        }
        write!(
            f,
            "options: restore the file from a backup; look closer with `settee file check FILE`; start with \
             `--set persist.recovery=on` to go back to the newest intact commit of each damaged file (later changes of \
             that vBucket are lost); or move the file out of the data directory and lose that vBucket"
        )
    }
}
