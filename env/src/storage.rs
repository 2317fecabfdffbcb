//! Files and directories, narrow enough to fake honestly.

use std::io;
use std::path::Path;
use std::sync::Arc;

/// How a file is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpenMode {
    /// The file must exist; writes fail.
    Read,
    /// The file must exist.
    ReadWrite,
    /// The file must not exist.
    CreateNew,
}

/// An open file. Positions are explicit, so one handle serves many threads.
pub trait File: Send + Sync {
    /// Reads at most `buf.len()` bytes at `at`. May be short; 0 means end of file.
    fn read_at(&self, buf: &mut [u8], at: u64) -> io::Result<usize>;
    /// Writes at most `bytes.len()` bytes at `at`. May be short. Writing past the end leaves a hole of zeros.
    fn write_at(&self, bytes: &[u8], at: u64) -> io::Result<usize>;
    /// The file's size in bytes.
    fn size(&self) -> io::Result<u64>;
    /// Cuts or extends (with zeros) the file to `size` bytes.
    fn set_size(&self, size: u64) -> io::Result<()>;
    /// `Ok`: every earlier write to this file, and its size, outlives power loss. `Err`: trust none of them.
    /// Does not make the file's directory entry durable: see [`Storage::sync_dir`].
    fn sync(&self) -> io::Result<()>;
}

/// A tree of directories and files.
pub trait Storage: Send + Sync {
    fn open(&self, path: &Path, mode: OpenMode) -> io::Result<Arc<dyn File>>;
    /// Creates `path` and any missing parent.
    fn create_dir_all(&self, path: &Path) -> io::Result<()>;
    /// Names of the entries of a directory, sorted.
    fn list(&self, path: &Path) -> io::Result<Vec<String>>;
    /// Atomically replaces `to` by `from`. Durable only after `sync_dir` of the parent(s).
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    fn remove_file(&self, path: &Path) -> io::Result<()>;
    /// Removes an empty directory.
    fn remove_dir(&self, path: &Path) -> io::Result<()>;
    /// Makes creations, renames and removals directly inside `path` outlive power loss.
    fn sync_dir(&self, path: &Path) -> io::Result<()>;
    fn exists(&self, path: &Path) -> io::Result<bool>;
}

/// Fills `buf` from `at`, going on after short reads and interruptions. A file that ends inside `buf` is
/// `UnexpectedEof`.
pub fn read_exact_at(file: &dyn File, mut buf: &mut [u8], mut at: u64) -> io::Result<()> {
    while !buf.is_empty() {
        match file.read_at(buf, at) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => {
                buf = &mut buf[n..];
                at += n as u64;
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// Writes all of `bytes` at `at`, going on after short writes and interruptions. A device that keeps
/// accepting nothing is `WriteZero`.
pub fn write_all_at(file: &dyn File, mut bytes: &[u8], mut at: u64) -> io::Result<()> {
    let mut refusals = 0;
    while !bytes.is_empty() {
        match file.write_at(bytes, at) {
            Ok(0) => {
                refusals += 1;
                if refusals == 16 {
                    return Err(io::ErrorKind::WriteZero.into());
                }
            }
            Ok(n) => {
                refusals = 0;
                bytes = &bytes[n..];
                at += n as u64;
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}
