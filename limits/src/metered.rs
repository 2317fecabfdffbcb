//! Storage that pays for what it opens.

use std::io;
use std::path::Path;
use std::sync::Arc;

use env::{Durable, File, OpenMode, Storage};

use crate::{Class, Ledger, Permit, with_retry};

/// 1. A descriptor is open only while its permit is out: it is had before the open and given back after the close. So
///    with no call under way, permits out are descriptors open, whichever way the calls ended.
/// 2. A call that finds no descriptor has idle files closed and is tried once more.
#[derive(Clone)]
pub struct Metered {
    inner: Arc<dyn Storage>,
    ledger: Arc<Ledger>,
    class_of: Arc<dyn Fn(&Path) -> Class + Send + Sync>,
}

struct MeteredFile {
    // Declared first: closed before the permit is given back.
    inner: Arc<dyn File>,
    _permit: Permit,
}

impl Metered {
    /// Every open is of `class`.
    pub fn new(inner: Arc<dyn Storage>, ledger: Arc<Ledger>, class: Class) -> Metered {
        Metered::by_path(inner, ledger, move |_| class)
    }

    /// The class of each open is what `class_of` makes of the path.
    pub fn by_path(
        inner: Arc<dyn Storage>,
        ledger: Arc<Ledger>,
        class_of: impl Fn(&Path) -> Class + Send + Sync + 'static,
    ) -> Metered {
        Metered { inner, ledger, class_of: Arc::new(class_of) }
    }

    /// The same storage for another class.
    pub fn for_class(&self, class: Class) -> Metered {
        Metered { class_of: Arc::new(move |_| class), ..self.clone() }
    }

    fn with_permit<T>(&self, path: &Path, call: impl FnMut() -> io::Result<T>) -> io::Result<(T, Permit)> {
        let permit = self.ledger.claim((self.class_of)(path))?;
        // Dropped on failure, after whatever the call opened.
        Ok((with_retry(&self.ledger, call)?, permit))
    }
}

impl Storage for Metered {
    fn open(&self, path: &Path, mode: OpenMode) -> io::Result<Arc<dyn File>> {
        let (inner, permit) = self.with_permit(path, || self.inner.open(path, mode))?;
        Ok(Arc::new(MeteredFile { inner, _permit: permit }))
    }

    fn open_durable(&self, path: &Path, how: Durable) -> io::Result<Option<Arc<dyn File>>> {
        let (opened, permit) = self.with_permit(path, || self.inner.open_durable(path, how))?;
        Ok(opened.map(|inner| Arc::new(MeteredFile { inner, _permit: permit }) as Arc<dyn File>))
    }

    fn create_dir_all(&self, path: &Path) -> io::Result<()> {
        self.inner.create_dir_all(path)
    }

    fn list(&self, path: &Path) -> io::Result<Vec<String>> {
        self.with_permit(path, || self.inner.list(path)).map(|(names, _permit)| names)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.inner.rename(from, to)
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        self.inner.remove_file(path)
    }

    fn remove_dir(&self, path: &Path) -> io::Result<()> {
        self.inner.remove_dir(path)
    }

    /// A sync is not tried again after it failed, but one without a descriptor never began.
    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        self.with_permit(path, || self.inner.sync_dir(path)).map(|(done, _permit)| done)
    }

    fn exists(&self, path: &Path) -> io::Result<bool> {
        self.inner.exists(path)
    }
    fn free_bytes(&self, path: &Path) -> io::Result<Option<u64>> {
        self.inner.free_bytes(path)
    }
}

impl File for MeteredFile {
    fn read_at(&self, buf: &mut [u8], at: u64) -> io::Result<usize> {
        self.inner.read_at(buf, at)
    }
    fn write_at(&self, bytes: &[u8], at: u64) -> io::Result<usize> {
        self.inner.write_at(bytes, at)
    }
    fn size(&self) -> io::Result<u64> {
        self.inner.size()
    }
    fn set_size(&self, size: u64) -> io::Result<()> {
        self.inner.set_size(size)
    }
    fn sync(&self) -> io::Result<()> {
        self.inner.sync()
    }
    fn write_back(&self, at: u64, len: u64) -> io::Result<()> {
        self.inner.write_back(at, len)
    }
}
