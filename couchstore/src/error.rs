//! What can go wrong with a file, told so that the byte can be found.

use std::io;
use std::path::Path;
use std::sync::Arc;

pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The step of a commit that failed. Up to `DataSync` nobody can have seen the new header. After `MarkerWrite` or
/// `MarkerSync` a reopened file shows either the old header or the new one, each complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    Write,
    DataSync,
    MarkerWrite,
    MarkerSync,
}

/// Offsets are positions in the file, in bytes.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{op} {}@{offset}: {source}", .path.display())]
    Io { op: &'static str, path: Arc<Path>, offset: u64, source: io::Error },
    #[error("{}@{offset}: checksum {found:#010x}, expected {expected:#010x}", .path.display())]
    Checksum { path: Arc<Path>, offset: u64, found: u32, expected: u32 },
    #[error("{}@{offset}: {what}", .path.display())]
    Corrupt { path: Arc<Path>, offset: u64, what: &'static str },
    #[error("{}@{offset}: the file ends inside what starts here", .path.display())]
    Truncated { path: Arc<Path>, offset: u64 },
    #[error("{}: no header found; nothing was ever committed to this file, or it is not a couchstore file", .path.display())]
    NoHeader { path: Arc<Path> },
    #[error("{}@{offset}: header version {version} is unknown; this build reads 11 to 14", .path.display())]
    UnknownVersion { path: Arc<Path>, offset: u64, version: u8 },
    #[error("{}: encrypted with key \"{key_id}\", which is not supported; decrypt it by compacting it unencrypted", .path.display())]
    Encrypted { path: Arc<Path>, key_id: String },
    #[error("{what} is {value}; the format allows at most {max}")]
    Limit { what: &'static str, value: u64, max: u64 },
    #[error("refused to write: {0}")]
    Refused(&'static str),
    #[error("commit of {} failed at step {step:?}: {source}; reopen the file to learn what it holds", .path.display())]
    Commit { step: Step, path: Arc<Path>, source: io::Error },
    #[error("{}: an earlier commit failed; reopen the file before writing to it", .path.display())]
    Poisoned { path: Arc<Path> },
    #[error("{}: holds {size} bytes already; a new file must be empty", .path.display())]
    NotEmpty { path: Arc<Path>, size: u64 },
}

impl Error {
    /// Where in the file the trouble is, if it has a place.
    pub fn offset(&self) -> Option<u64> {
        match self {
            Error::Io { offset, .. }
            | Error::Checksum { offset, .. }
            | Error::Corrupt { offset, .. }
            | Error::Truncated { offset, .. }
            | Error::UnknownVersion { offset, .. } => Some(*offset),
            _ => None,
        }
    }

    /// True if the bytes on disk are at fault, so that trying again cannot help.
    pub fn is_damage(&self) -> bool {
        matches!(
            self,
            Error::Checksum { .. } | Error::Corrupt { .. } | Error::Truncated { .. } | Error::NoHeader { .. }
        )
    }
}
