//! The way in for fuzzers: any bytes, taken for a file.

use std::io;
use std::ops::{Bound, ControlFlow};
use std::path::Path;
use std::sync::Arc;

use env::File;

use crate::check::{Depth, check};
use crate::couch::Couch;
use crate::header::Mode;
use crate::kv::RevMeta;
use crate::vbstate::{self, VbStateRecord};

/// Opens `bytes` in both modes and reads all that can be reached. Anything but returning is a bug.
pub fn fuzz_open(bytes: &[u8]) {
    let file: Arc<dyn File> = Arc::new(Frozen(bytes.to_vec()));
    let path = Path::new("fuzz");
    for mode in [Mode::Strict, Mode::Recovery] {
        let Ok(couch) = Couch::open(file.clone(), path, mode) else { continue };
        let _ = couch.headers(mode);
        let _ = couch.changes_since(0, |doc| {
            let _ = couch.body(&doc);
            let _ = RevMeta::decode(&doc.rev_meta);
            let _ = couch.get_by_id(&doc.id);
            ControlFlow::Continue(())
        });
        let _ = couch.by_id(Bound::Excluded(b"\0k"), Bound::Unbounded, |doc| {
            let _ = couch.get_by_seq(doc.seq);
            ControlFlow::Continue(())
        });
        if let Ok(Some(state)) = couch.local(vbstate::ID) {
            let _ = VbStateRecord::decode(&state);
        }
        let _ = couch.locals();
    }
    let _ = check(file, path, Depth::All);
}

/// Bytes that can only be read.
struct Frozen(Vec<u8>);

impl File for Frozen {
    fn read_at(&self, buf: &mut [u8], at: u64) -> io::Result<usize> {
        let rest = usize::try_from(at).ok().and_then(|at| self.0.get(at..)).unwrap_or(&[]);
        let n = rest.len().min(buf.len());
        buf[..n].copy_from_slice(&rest[..n]);
        Ok(n)
    }

    fn write_at(&self, _: &[u8], _: u64) -> io::Result<usize> {
        Err(io::ErrorKind::ReadOnlyFilesystem.into())
    }

    fn size(&self) -> io::Result<u64> {
        Ok(self.0.len() as u64)
    }

    fn set_size(&self, _: u64) -> io::Result<()> {
        Err(io::ErrorKind::ReadOnlyFilesystem.into())
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }
}
