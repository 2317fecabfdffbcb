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

/// How a write is durable by itself, when it returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durable {
    /// Through the page cache: O_DSYNC.
    Synced,
    /// Past it: O_DIRECT and O_DSYNC. For writes inside the file's size only, whose place, length and address in memory are
    /// multiples of 4096; others may be refused.
    Direct,
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
    /// Has these bytes on their way to the disk, and waits for them, so that a later sync has little to do and nobody else waits
    /// for all of it. Promises nothing: what was written is durable after [`File::sync`] only, which tells of failures again.
    fn write_back(&self, at: u64, len: u64) -> io::Result<()>;
}

/// A tree of directories and files.
pub trait Storage: Send + Sync {
    fn open(&self, path: &Path, mode: OpenMode) -> io::Result<Arc<dyn File>>;
    /// Opens an existing file for writes that are durable when they return. `None`: there is no such way here, write and sync
    /// instead.
    fn open_durable(&self, _path: &Path, _how: Durable) -> io::Result<Option<Arc<dyn File>>> {
        Ok(None)
    }
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
    /// How much more can be written to the file system that holds `path`, in bytes. `None`: nobody knows.
    fn free_bytes(&self, _path: &Path) -> io::Result<Option<u64>> {
        Ok(None)
    }
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

/// Creates `path` and any missing parent, and makes them outlive power loss. Of the directories that were
/// there before, only the one that holds `path` or its topmost new parent is synced.
pub fn create_dir_durable(storage: &dyn Storage, path: &Path) -> io::Result<()> {
    let parent = |path: &Path| match path.parent() {
        Some(parent) if parent.as_os_str().is_empty() => Some(Path::new(".").to_path_buf()),
        parent => parent.map(Path::to_path_buf),
    };
    let mut holders: Vec<_> = parent(path).into_iter().collect();
    while let Some(missing) = holders.last()
        && !storage.exists(missing)?
        && let Some(holder) = parent(missing)
    {
        holders.push(holder);
    }
    storage.create_dir_all(path)?;
    holders.iter().try_for_each(|holder| storage.sync_dir(holder))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// What every [`Storage`] does, in the empty directory `dir`.
    pub(crate) fn behaves(storage: &dyn Storage, dir: &Path) {
        let kind = |result: io::Result<()>| result.map_err(|error| error.kind());
        let open = |name: &str, mode| storage.open(&dir.join(name), mode);
        storage.create_dir_all(&dir.join("a/b")).unwrap();
        storage.create_dir_all(&dir.join("a/b")).unwrap();
        let file = open("a/f", OpenMode::CreateNew).unwrap();
        assert_eq!(kind(open("a/f", OpenMode::CreateNew).map(drop)), Err(io::ErrorKind::AlreadyExists));
        assert_eq!(kind(open("a/g", OpenMode::ReadWrite).map(drop)), Err(io::ErrorKind::NotFound));
        assert_eq!(kind(open("c/g", OpenMode::CreateNew).map(drop)), Err(io::ErrorKind::NotFound));

        write_all_at(&*file, b"abc", 2).unwrap();
        file.set_size(9).unwrap();
        file.set_size(4).unwrap();
        file.sync().unwrap();
        let mut found = [9; 8];
        assert_eq!(file.read_at(&mut found, 0).unwrap(), 4);
        assert_eq!(&found[..4], b"\0\0ab");
        assert_eq!(file.read_at(&mut found, 4).unwrap(), 0);
        assert_eq!(file.read_at(&mut found, 400).unwrap(), 0);
        assert_eq!(file.size().unwrap(), 4);
        assert_eq!(kind(read_exact_at(&*file, &mut found, 0)), Err(io::ErrorKind::UnexpectedEof));
        assert!(open("a/f", OpenMode::Read).unwrap().write_at(b"x", 0).is_err());

        open("a/g", OpenMode::CreateNew).unwrap();
        assert_eq!(storage.list(&dir.join("a")).unwrap(), ["b", "f", "g"]);
        storage.rename(&dir.join("a/f"), &dir.join("a/g")).unwrap();
        assert_eq!(storage.list(&dir.join("a")).unwrap(), ["b", "g"]);
        assert_eq!(open("a/g", OpenMode::ReadWrite).unwrap().size().unwrap(), 4);
        assert_eq!(kind(storage.rename(&dir.join("a/f"), &dir.join("a/h"))), Err(io::ErrorKind::NotFound));
        assert_eq!(kind(storage.remove_dir(&dir.join("a"))), Err(io::ErrorKind::DirectoryNotEmpty));
        assert_eq!(kind(storage.sync_dir(&dir.join("c"))), Err(io::ErrorKind::NotFound));
        storage.sync_dir(&dir.join("a")).unwrap();
        storage.remove_file(&dir.join("a/g")).unwrap();
        assert_eq!(kind(storage.remove_file(&dir.join("a/g"))), Err(io::ErrorKind::NotFound));
        storage.remove_dir(&dir.join("a/b")).unwrap();
        assert!(storage.exists(&dir.join("a")).unwrap() && !storage.exists(&dir.join("a/b")).unwrap());
        assert_eq!(file.read_at(&mut found, 0).unwrap(), 4, "a removed file stays readable while open");
    }
}
