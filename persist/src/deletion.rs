//! Deleting one vBucket: from one moment on nothing of it counts, neither in files nor in the commit log.
//!
//! ```text
//!     no flush, no compaction ──▶ deleted.json, durable ──▶ files removed, changelog empty ──▶ another life may begin
//! ```
//! It is the mark in `deleted.json` that deletes, not the removal of files: the log may hold changes of the vBucket for as
//! long as it is not written over, and after power loss a file's name may be back. The mark says which files and which part of
//! the log are void. It stays, also when the vBucket is made again: what comes then has a higher revision, and counts as rolled
//! back once more.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use changelog::VbRecord;
use env::{OpenMode, Storage};
use serde::{Deserialize, Serialize};
use types::VbId;

use crate::error::{Damage, Damages, StoreError, Verdict};
use crate::names::{self, DELETED_FILE, Entry};
use crate::reserve::is_out_of_space;
use crate::rollback::{Turn, begin_again};
use crate::spec::{put_in_place, write_temp};
use crate::vb::{Vb, remove_if_there};

/// No bucket has so many vBuckets that this is too little.
const FILE_BYTES_MAX: u64 = 16 << 20;

/// Up to where nothing of a vBucket counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Deleted {
    /// The highest revision that a file of it had.
    pub rev: u64,
    /// What was counted as rolled back less often is void.
    pub rollbacks: u32,
    /// The highest CAS it gave out: values only grow.
    pub max_cas: u64,
}

/// The vBuckets of a bucket that were ever deleted, by number.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct Deletions(BTreeMap<u16, Deleted>);

impl Deletions {
    pub fn load(storage: &dyn Storage, dir: &Path) -> Result<Deletions, StoreError> {
        let path = dir.join(DELETED_FILE);
        let file = match storage.open(&path, OpenMode::Read) {
            Ok(file) => file,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Deletions::default()),
            Err(e) => return Err(StoreError::io("open", &path)(e)),
        };
        let damaged = |what: String| {
            let lost =
                "which vBuckets were deleted: without this file those whose files are still there come back".into();
            StoreError::Damaged(Damages(vec![Damage { vb: None, path: path.clone(), offset: None, what, lost }]))
        };
        let size = file.size().map_err(StoreError::io("size of", &path))?;
        if size > FILE_BYTES_MAX {
            return Err(damaged(format!("{size} bytes long, which is more than there are vBuckets")));
        }
        let mut bytes = vec![0; size as usize];
        env::read_exact_at(&*file, &mut bytes, 0).map_err(StoreError::io("read", &path))?;
        serde_json::from_slice(&bytes).map_err(|error| damaged(error.to_string()))
    }

    pub fn get(&self, vb: VbId) -> Option<Deleted> {
        self.0.get(&vb.0).copied()
    }

    /// Whether a file is of before its vBucket was deleted.
    pub fn void(&self, vb: VbId, rev: u64) -> bool {
        self.get(vb).is_some_and(|deleted| rev <= deleted.rev)
    }
}

/// Deletes a vBucket, whose changelog goes on from nothing with `record`. Whoever waits for a compaction of it is told.
/// Nothing may be appended meanwhile. Waits for the disk, for a flush, and for a step of a compaction. `Err`: it is as it was, or
/// poisoned.
pub(crate) fn delete(vb: &Arc<Vb>, record: VbRecord) -> Result<(), StoreError> {
    let (attached, turn) = Turn::take(vb)?;
    let before = attached.log.record();
    let rollbacks = vb.rollbacks().max(before.rollbacks).saturating_add(1);
    // A first commit that failed at its very end may have left a file of the next revision.
    let deleted = Deleted { rev: vb.next_rev(), rollbacks, max_cas: attached.log.max_cas().0 };
    mark(vb, deleted).inspect_err(|error| {
        if error.verdict() != Verdict::Retry {
            crate::flusher::poison(vb, &attached, error);
        }
    })?;
    vb.bury(deleted);
    vb.home.shared.files.retire(&vb.place, 0);
    begin_again(vb, &attached, None, VbRecord { rollbacks, ..record });
    remove_files(vb, deleted.rev);
    // Asked for since we began, and not meant for what comes after us.
    vb.home.shared.compactor.cancel(vb);
    drop(turn);
    Ok(())
}

/// Makes it durable that a vBucket is deleted. An error to be retried: it is not.
fn mark(vb: &Vb, deleted: Deleted) -> Result<(), StoreError> {
    let (home, storage) = (&vb.home, &*vb.home.shared.env.storage);
    let mut deletions = home.deletions.lock();
    let mut more = deletions.clone();
    more.0.insert(vb.id.0, deleted);
    let json = serde_json::to_vec_pretty(&more).expect("plain fields always serialise");
    write_temp(storage, &home.dir, DELETED_FILE, &json).inspect_err(|error| {
        if error.errno().is_some_and(is_out_of_space) {
            home.shared.reserve.write_failed();
        }
    })?;
    put_in_place(storage, &home.dir, DELETED_FILE).map_err(|error| match error {
        // A crash may leave either, so nobody may count on the vBucket from here on.
        StoreError::Io { path, source, .. } => StoreError::SyncFailed { vb: vb.id, path, source },
        error => error,
    })?;
    *deletions = more;
    Ok(())
}

/// What cannot be removed now goes at the next start.
fn remove_files(vb: &Vb, upto: u64) {
    let (home, storage) = (&vb.home, &*vb.home.shared.env.storage);
    let is_its = |name: &&String| match names::classify(name, u16::MAX) {
        Entry::VbFile { vb: other, rev } => other == vb.id && rev <= upto,
        Entry::Leftover => name.starts_with(&format!("{}.couch.", vb.id)),
        _ => false,
    };
    let removed = storage.list(&home.dir).map_err(StoreError::io("list", &home.dir)).and_then(|names| {
        names.iter().filter(is_its).try_for_each(|name| remove_if_there(storage, &home.dir.join(name)))
    });
    if let Err(error) = removed {
        tracing::warn!(bucket = home.name, vb = vb.id.0, "files of a deleted vBucket go at the next start: {error}");
    }
    home.shared.reserve.may_have_space();
}
