//! Compacting a file that nobody writes.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use env::{OpenMode, Storage};

use crate::copy::Copy;
use crate::couch::Snapshot;
use crate::error::{Error, Result};
use crate::header::Mode;
use crate::inspect;

/// Writes what `from` holds at its newest header to the new file `to`: every document and tombstone, all local documents,
/// the same seqnos and timestamp, in the same version, as one commit without garbage. `Ok` means that it outlives power
/// loss. On an error there is no new file.
pub fn compact(storage: &Arc<dyn Storage>, from: &Path, to: &Path, mode: Mode) -> Result<()> {
    let snapshot = inspect::open(&**storage, from, mode)?.snapshot();
    let io = |op, path: &Path| {
        let path = path.into();
        move |source| Error::Io { op, path, offset: 0, source }
    };
    let file = storage.open(to, OpenMode::CreateNew).map_err(io("create", to))?;
    let spilled = PathBuf::from(format!("{}.sorting", to.display()));
    let spill = {
        let (storage, spilled) = (Arc::clone(storage), spilled.clone());
        Box::new(move || storage.open(&spilled, OpenMode::CreateNew))
    };
    let copied = Copy::create(file, to, snapshot.header().version, spill).and_then(|copy| copy_all(&snapshot, copy));
    // Rarely there, and only in the way.
    let _ = storage.remove_file(&spilled);
    let dir = to.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let synced = copied.and_then(|()| storage.sync_dir(dir).map_err(io("sync directory", dir)));
    if synced.is_err() {
        let _ = storage.remove_file(to);
    }
    synced
}

fn copy_all(snapshot: &Snapshot, mut copy: Copy) -> Result<()> {
    let mut failed = None;
    let walked = snapshot.changes_since(0, |doc| {
        let put = snapshot.raw_body(&doc).and_then(|body| copy.put(&doc, body.as_deref()));
        failed = put.err();
        if failed.is_some() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    let _ = failed.map_or(walked, Err)?;
    snapshot.locals()?.iter().try_for_each(|(id, body)| copy.local_put(id, body))?;
    let header = snapshot.header();
    copy.commit(header.update_seq, header.purge_seq, header.timestamp_ns).map(drop)
}
