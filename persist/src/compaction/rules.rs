//! What a compaction leaves out, and what it only reports.

use std::collections::BTreeMap;

use couchstore::kv::CollectionStats;
use couchstore::{DocInfo, Error, Snapshot};
use types::{CollectionId, Kind, Seqno};

use crate::codec;
use crate::facts::VbFacts;

/// Which tombstones whoever asked for a compaction wants to see gone, beside those that are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Purge {
    /// All of them, however young.
    pub all: bool,
    /// Deletions before this moment, in Unix seconds. `None`: older than the purge age.
    pub before_s: Option<u32>,
    /// Of these, only up to this seqno.
    pub upto: Option<Seqno>,
}

impl Purge {
    fn covers(&self, deleted_s: u32, seqno: u64, oldest_kept_s: u32) -> bool {
        let is_old = deleted_s < self.before_s.unwrap_or(oldest_kept_s);
        self.all || (is_old && self.upto.is_none_or(|upto| seqno <= upto.0))
    }
}

/// What becomes of an entry of the old file.
pub(super) enum Verdict {
    Keep,
    /// Kept, as only the newest version of a document decides; but its time is over.
    KeepExpired,
    /// A tombstone that nobody needs any more: the purge seqno must say so.
    Purge,
    /// A prepare whose outcome is known.
    DropPrepare,
}

/// 1. The highest seqno of a vBucket, and of each of its collections, is never left out: whoever continues from there must
///    find it.
/// 2. A prepare that may still be committed or aborted is never left out.
/// 3. A document is never left out.
pub(super) struct Rules<'a> {
    pub file: &'a Snapshot,
    pub completed: Seqno,
    /// Every asker's.
    pub purges: &'a [Purge],
    /// Tombstones younger than this are kept, unless somebody asked otherwise.
    pub oldest_kept_s: u32,
    pub now_s: u32,
    /// The highest seqno of each collection that was looked up.
    pub highest: &'a mut BTreeMap<CollectionId, u64>,
}

impl<'a> Rules<'a> {
    pub fn judge(&mut self, info: &DocInfo) -> Result<Verdict, Error> {
        // What cannot be understood is somebody else's, and kept as it is.
        let Ok(Some(entry)) = codec::entry(info) else { return Ok(Verdict::Keep) };
        match entry.kind {
            Kind::Prepare { .. } if entry.meta.seqno <= self.completed => Ok(Verdict::DropPrepare),
            Kind::Prepare { .. } => Ok(Verdict::Keep),
            Kind::Abort { .. } => self.judge_tombstone(info, entry.meta.expiry),
            Kind::Committed { .. } if entry.meta.deleted.is_some() => self.judge_tombstone(info, entry.meta.expiry),
            Kind::Committed { .. } if entry.meta.expiry != 0 && entry.meta.expiry <= self.now_s => {
                Ok(Verdict::KeepExpired)
            }
            Kind::Committed { .. } => Ok(Verdict::Keep),
        }
    }

    fn judge_tombstone(&mut self, info: &DocInfo, deleted_s: u32) -> Result<Verdict, Error> {
        let is_asked_for = self.purges.iter().any(|purge| purge.covers(deleted_s, info.seq, self.oldest_kept_s));
        if !is_asked_for || info.seq == self.file.header().update_seq || self.is_highest_of_its_collection(info)? {
            return Ok(Verdict::Keep);
        }
        Ok(Verdict::Purge)
    }

    fn is_highest_of_its_collection(&mut self, info: &DocInfo) -> Result<bool, Error> {
        let Some((collection, _)) = codec::collection_of(&info.id) else { return Ok(true) };
        let highest = match self.highest.get(&collection) {
            Some(highest) => *highest,
            None => {
                let stats = stored_stats(self.file, collection)?;
                // Without counts nothing is known of the collection, so all of it is kept.
                *self.highest.entry(collection).or_insert(stats.map_or(0, |stats| stats.high_seqno))
            }
        };
        Ok(info.seq >= highest)
    }
}

pub(super) fn stored_stats(file: &Snapshot, collection: CollectionId) -> Result<Option<CollectionStats>, Error> {
    let stored = file.local(CollectionStats::id(collection).as_bytes())?;
    Ok(stored.and_then(|bytes| CollectionStats::decode(&bytes).ok()))
}

/// What a file's counts must say, counted anew from what was kept: so they are exact whatever they were before.
#[derive(Default)]
pub(super) struct Recount {
    collections: BTreeMap<CollectionId, CollectionStats>,
    prepares: u64,
    prepare_bytes: u64,
}

impl Recount {
    pub fn add(&mut self, info: &DocInfo) {
        let disk_bytes = crate::commit::disk_bytes(&info.id, &info.rev_meta, info.body_size);
        let Some((collection, is_prepare)) = codec::collection_of(&info.id) else { return };
        let stats = self.collections.entry(collection).or_default();
        stats.high_seqno = stats.high_seqno.max(info.seq);
        stats.disk_bytes += disk_bytes;
        if is_prepare && !info.deleted {
            self.prepares += 1;
            self.prepare_bytes += disk_bytes;
        }
        if !is_prepare && !info.deleted {
            stats.item_count += 1;
        }
    }

    /// Facts that say what was counted, and each collection's counts. The highest seqno of a collection stays, though the
    /// document that had it may be gone.
    pub fn into_facts(
        mut self,
        before: &VbFacts,
        file: &Snapshot,
    ) -> Result<(VbFacts, BTreeMap<CollectionId, CollectionStats>), Error> {
        for (id, body) in file.locals()? {
            if let Some(collection) = collection_of_local(&id)
                && let Ok(stats) = CollectionStats::decode(&body)
            {
                let counted = self.collections.entry(collection).or_default();
                counted.high_seqno = counted.high_seqno.max(stats.high_seqno);
            }
        }
        let facts =
            VbFacts { on_disk_prepares: self.prepares, on_disk_prepare_bytes: self.prepare_bytes, ..before.clone() };
        Ok((facts, self.collections))
    }
}

/// The collection that a local document counts, if it does that.
pub(super) fn collection_of_local(id: &[u8]) -> Option<CollectionId> {
    let hex = std::str::from_utf8(id).ok()?.strip_prefix("|0x")?.strip_suffix('|')?;
    u32::from_str_radix(hex, 16).ok().map(CollectionId)
}
