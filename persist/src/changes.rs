//! One commit of a vBucket's file, read in order of seqno, piece by piece.
//!
//! All pieces are of the same commit, so together they are a state the vBucket really had. Meanwhile the file grows, may be
//! compacted and go: what was opened stays readable.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use couchstore::{DocInfo, Snapshot};
use types::{Item, Seqno, VbId};

use crate::bucket::BucketStore;
use crate::codec;
use crate::error::StoreError;
use crate::vb::{Committed, Vb};

/// What was changed after a seqno, as of one commit.
///
/// 1. Each key comes once, with its value; tombstones, open prepares and aborts come too, prepares that are decided do not.
/// 2. Once `is_done`, everything up to `upto` has been given.
pub struct Changes {
    vb: Arc<Vb>,
    committed: Arc<Committed>,
    file: Snapshot,
    next: Seqno,
    is_done: bool,
}

impl BucketStore {
    /// Opens the last good commit to read what was changed after `after`. `None`: the vBucket has no file yet.
    pub fn changes(&self, vb: VbId, after: Seqno) -> Result<Option<Changes>, StoreError> {
        let vb = self.vb(vb);
        let Some((committed, file)) = vb.reading()? else { return Ok(None) };
        let is_done = committed.high <= after;
        Ok(Some(Changes { vb: Arc::clone(vb), committed, file, next: after.next(), is_done }))
    }
}

impl Changes {
    /// The commit's high seqno.
    pub fn upto(&self) -> Seqno {
        self.committed.high
    }

    /// The highest prepare that was decided; those that were not are among the changes.
    pub fn completed(&self) -> Seqno {
        self.committed.facts.completed
    }

    /// The highest prepare.
    pub fn prepared(&self) -> Seqno {
        self.committed.facts.prepared
    }

    /// The highest seqno that is neither prepare nor abort.
    pub fn max_visible(&self) -> Seqno {
        self.committed.facts.max_visible
    }

    /// Tombstones up to here may be missing.
    pub fn purge(&self) -> Seqno {
        self.committed.purge
    }

    pub fn is_done(&self) -> bool {
        self.is_done
    }

    /// How many entries there are from here on. Reads a node a level.
    pub fn left(&self) -> Result<u64, StoreError> {
        if self.is_done {
            return Ok(0);
        }
        self.file.count_since(self.next.0).map_err(StoreError::file(self.vb.id))
    }

    /// The next items, about `bytes_max` of them. May be none although there are more: see [`Changes::is_done`].
    pub fn read(&mut self, bytes_max: usize) -> Result<Vec<Item>, StoreError> {
        if self.vb.home.gone.load(Ordering::Acquire) {
            return Err(StoreError::NoSuchBucket(self.vb.home.name.clone()));
        }
        let (mut infos, mut bytes, mut next) = (Vec::<DocInfo>::new(), 0, None);
        let walked = self.file.changes_since(self.next.0, |info| {
            if bytes >= bytes_max as u64 {
                next = Some(Seqno(info.seq));
                return ControlFlow::Break(());
            }
            bytes += info.body_size + info.id.len() as u64;
            infos.push(info);
            ControlFlow::Continue(())
        });
        let _ = walked.map_err(StoreError::file(self.vb.id))?;
        let (mut items, mut bytes) = (Vec::with_capacity(infos.len()), 0);
        for info in &infos {
            // What is compressed in the file may be much more in memory.
            if bytes >= bytes_max {
                next = Some(Seqno(info.seq));
                break;
            }
            let item = self.item(info)?;
            bytes += item.as_ref().map_or(0, Item::memory);
            items.extend(item);
        }
        self.is_done = next.is_none();
        self.next = next.unwrap_or(self.committed.high.next());
        Ok(items)
    }

    fn item(&self, info: &DocInfo) -> Result<Option<Item>, StoreError> {
        let Some(entry) = codec::entry(info).map_err(|what| self.vb.damaged(what))? else { return Ok(None) };
        let is_decided = matches!(entry.kind, types::Kind::Prepare { .. }) && entry.meta.seqno <= self.completed();
        if is_decided { Ok(None) } else { entry.with_value(self.vb.id, &self.file, info).map(Some) }
    }
}
