//! One commit of one vBucket's file: documents, `_local/vbstate` and collection counts, all or nothing.
//!
//! What the commit builds on is read from the file, at the header that the last good commit left; so a failed commit cannot
//! leak into the next one, whether the file was kept open or not.

use std::collections::BTreeMap;
use std::sync::Arc;

use changelog::Slice;
use couchstore::kv::CollectionStats;
use couchstore::{CommitOutcome, Couch, Doc, DocInfo, Error, Snapshot, Step, vbstate};
use env::OpenMode;
use types::{CollectionId, Seqno};

use crate::batch::{Batch, PREPARE_PREFIX};
use crate::error::StoreError;
use crate::facts::VbFacts;
use crate::file_cache::is_out_of_files;
use crate::stats::COMMITS;
use crate::vb::{Committed, Vb, open_file, remove_if_there};
use crate::{codec, names};

/// Writes `batch`, and `slice`'s record, so that they outlive power loss. `Err`: nothing may be acknowledged.
pub(crate) fn commit(vb: &Vb, slice: &Slice, batch: &Batch<'_>) -> Result<Committed, StoreError> {
    match vb.committed() {
        Some(before) => {
            vb.anchor()?;
            let mut couch = vb.couch(&before)?;
            if couch.header().at != before.header_at {
                let what = format!(
                    "{} has a header at {}, but the last commit that succeeded is at {}",
                    couch.path().display(),
                    couch.header().at,
                    before.header_at
                );
                return Err(StoreError::Refused { vb: vb.id, what });
            }
            let committed =
                write(vb, &mut couch, before.rev, &before.facts, slice, batch, |out, now_ns| out.commit(now_ns))?;
            vb.name()?;
            Ok(committed)
        }
        None => first_commit(vb, slice, batch),
    }
}

/// A file comes into being whole: it is written under another name, synced, renamed, and its directory synced.
fn first_commit(vb: &Vb, slice: &Slice, batch: &Batch<'_>) -> Result<Committed, StoreError> {
    let shared = &vb.home.shared;
    let storage = &*shared.env.storage;
    let rev = vb.next_rev();
    let (boot, path) = (vb.home.dir.join(names::boot_file(vb.id)), vb.path(rev));
    let file = match open_file(shared, &boot, OpenMode::CreateNew) {
        Err(error) if error.is_in_the_way() => {
            remove_if_there(storage, &boot)?;
            open_file(shared, &boot, OpenMode::CreateNew)
        }
        result => result,
    }?;
    let mut couch = Couch::create(Arc::clone(&file), &boot, shared.options.format).map_err(StoreError::file(vb.id))?;
    let facts = vb.first_facts((*slice.record).clone());
    let committed = write(vb, &mut couch, rev, &facts, slice, batch, |out, now_ns| out.commit_first(now_ns))?;
    drop(couch);
    storage.rename(&boot, &path).map_err(StoreError::io("rename", &path))?;
    vb.home.sync_dir().map_err(|source| match is_out_of_files(&source) {
        // The directory could not even be opened. The next try renames another file over this one.
        true => StoreError::Io { op: "sync directory", path: vb.home.dir.clone(), source },
        false => StoreError::SyncFailed { vb: vb.id, path: vb.home.dir.clone(), source },
    })?;
    shared.files.retire(&vb.place, rev);
    shared.files.keep(&vb.place, rev, file);
    vb.home.counters.add(|c| &c.files_created, 1);
    Ok(committed)
}

fn write(
    vb: &Vb,
    couch: &mut Couch,
    rev: u64,
    before: &VbFacts,
    slice: &Slice,
    batch: &Batch<'_>,
    commit: impl FnOnce(couchstore::Batch<'_>, u64) -> Result<CommitOutcome, Error>,
) -> Result<Committed, StoreError> {
    let file = || StoreError::file(vb.id);
    let update_seq = couch.header().update_seq;
    if !batch.is_empty() && batch.first.0 <= update_seq {
        let what = format!(
            "a flush of seqnos {} to {} was refused: {} holds everything up to {update_seq} already",
            batch.first,
            batch.last,
            couch.path().display()
        );
        return Err(StoreError::Refused { vb: vb.id, what });
    }
    let mut facts = batch.facts_after(before, slice, &slice.record);
    let now_s = vb.home.shared.env.clock.unix_s();
    let mut tally = Tally::of(couch.snapshot());

    let mut out = couch.batch().map_err(file())?;
    let mut packer = Packer::new();
    let mut written = Vec::with_capacity(batch.entries.len());
    for entry in &batch.entries {
        let rev_meta = codec::rev_meta(entry.item, now_s);
        let doc = packer.pack(codec::doc(entry.item, &entry.id, &rev_meta));
        out.put(doc).map_err(|e| failed(vb, e))?;
        written.push(Written::of(&doc));
    }
    out.save().map_err(|e| failed(vb, e))?;
    for ((entry, new), old) in batch.entries.iter().zip(&written).zip(out.replaced()) {
        tally.count(&entry.id, new, old.as_ref()).map_err(file())?;
    }
    facts.on_disk_prepares = facts.on_disk_prepares.saturating_add_signed(tally.prepares);
    facts.on_disk_prepare_bytes = facts.on_disk_prepare_bytes.saturating_add_signed(tally.prepare_bytes);
    for (collection, stats) in &tally.collections {
        out.local_put(CollectionStats::id(*collection).as_bytes(), &stats.encode()).map_err(file())?;
    }
    out.local_put(vbstate::ID, &facts.encode()).map_err(file())?;
    // A peer may have left out what comes last.
    out.raise_update_seq(batch.last.0).map_err(file())?;

    let clock = &vb.home.shared.env.clock;
    let begun = clock.monotonic();
    let outcome = commit(out, clock.unix_ns()).map_err(|e| failed(vb, e))?;
    let took = clock.monotonic().saturating_sub(begun);
    COMMITS.record(took);
    if !vb.home.shared.is_logged() {
        vb.home.shared.governor.foreground(took);
    }
    let header = outcome.header;
    debug_assert!(batch.is_empty() || header.update_seq == batch.last.0);
    Ok(Committed {
        rev,
        header_at: header.at,
        high: Seqno(header.update_seq),
        purge: Seqno(header.purge_seq),
        alive: header.doc_count(),
        tombstones: header.deleted_count(),
        file_bytes: couch.file_bytes().map_err(file())?,
        live_bytes: header.live_bytes(),
        facts,
    })
}

/// Compresses bodies here rather than in the batch, so that their size on disk is known before the counts are written.
struct Packer {
    encoder: snap::raw::Encoder,
    packed: Vec<u8>,
}

impl Packer {
    fn new() -> Packer {
        Packer { encoder: snap::raw::Encoder::new(), packed: Vec::new() }
    }

    fn pack<'a>(&'a mut self, doc: Doc<'a>) -> Doc<'a> {
        let Some(body) = doc.body.filter(|_| doc.compress) else { return doc };
        self.packed.resize(snap::raw::max_compress_len(body.len()), 0);
        match self.encoder.compress(body, &mut self.packed) {
            Ok(len) => Doc { body: Some(&self.packed[..len]), compress: false, ..doc },
            // Only for bodies beyond what snappy can do, which the file will refuse for their size.
            Err(_) => doc,
        }
    }
}

/// What a document written means for the counts.
pub(crate) struct Written {
    seq: u64,
    deleted: bool,
    disk_bytes: u64,
}

impl Written {
    pub fn of(doc: &Doc<'_>) -> Written {
        let body_size = doc.body.map_or(0, |body| body.len() as u64 + codec::CHUNK_FRAME_BYTES);
        Written { seq: doc.seq, deleted: doc.deleted, disk_bytes: disk_bytes(doc.id, doc.rev_meta, body_size) }
    }
}

/// What a batch does to the counts that the file keeps.
pub(crate) struct Tally {
    file: Snapshot,
    pub collections: BTreeMap<CollectionId, CollectionStats>,
    pub prepares: i64,
    pub prepare_bytes: i64,
}

impl Tally {
    pub fn of(file: Snapshot) -> Tally {
        Tally { file, collections: BTreeMap::new(), prepares: 0, prepare_bytes: 0 }
    }

    pub fn count(&mut self, id: &[u8], new: &Written, old: Option<&DocInfo>) -> Result<(), Error> {
        let old_bytes = old.map_or(0, |old| disk_bytes(&old.id, &old.rev_meta, old.body_size));
        let was_alive = old.is_some_and(|old| !old.deleted);
        let alive_diff = i64::from(!new.deleted) - i64::from(was_alive);
        let is_prepare = id.first() == Some(&PREPARE_PREFIX);
        if is_prepare {
            self.prepares += alive_diff;
            self.prepare_bytes += if new.deleted { 0 } else { new.disk_bytes as i64 };
            self.prepare_bytes -= if was_alive { old_bytes as i64 } else { 0 };
        }
        let Some((collection, _)) = codec::collection_of(id) else { return Ok(()) };
        if !self.collections.contains_key(&collection) {
            let stored = self.file.local(CollectionStats::id(collection).as_bytes())?;
            let stats = stored.and_then(|bytes| CollectionStats::decode(&bytes).ok()).unwrap_or_default();
            self.collections.insert(collection, stats);
        }
        let stats = self.collections.get_mut(&collection).expect("just inserted");
        stats.high_seqno = stats.high_seqno.max(new.seq);
        stats.disk_bytes = (stats.disk_bytes + new.disk_bytes).saturating_sub(old_bytes);
        if !is_prepare {
            stats.item_count = stats.item_count.saturating_add_signed(alive_diff);
        }
        Ok(())
    }
}

pub(crate) fn disk_bytes(id: &[u8], rev_meta: &[u8], body_size: u64) -> u64 {
    body_size + (id.len() + rev_meta.len()) as u64
}

/// After a failed sync nothing is known; after any other failure, nothing happened.
fn failed(vb: &Vb, error: Error) -> StoreError {
    match error {
        Error::Commit { step: Step::DataSync | Step::MarkerSync, path, source } => {
            StoreError::SyncFailed { vb: vb.id, path: path.to_path_buf(), source: source.into() }
        }
        error => StoreError::file(vb.id)(error),
    }
}
