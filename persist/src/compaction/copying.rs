//! The long part: what the file held when the compaction began goes to the new one, in order of seqno, and then its index.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::Arc;

use couchstore::kv::CollectionStats;
use couchstore::{Copy, Couch, DocInfo, Error, Mode, Snapshot, vbstate};
use types::{CollectionId, DocKey, KeyBuf, Seqno};

use super::follower::Follower;
use super::rules::{Purge, Recount, Rules, Verdict, collection_of_local};
use super::target::{Target, WrittenBack};
use crate::error::StoreError;
use crate::vb::{Committed, Vb};

/// An entry that is only looked at counts for so many bytes: reading it costs something too.
pub(super) const LOOK_BYTES: u64 = 64;

pub(super) struct Copying {
    vb: Arc<Vb>,
    target: Target,
    copy: Copy,
    source: Arc<Committed>,
    file: Snapshot,
    next_seq: u64,
    purges: Vec<Purge>,
    now_s: u32,
    oldest_kept_s: u32,
    highest: BTreeMap<CollectionId, u64>,
    recount: Recount,
    left_out: LeftOut,
}

/// What the new file lacks on purpose.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct LeftOut {
    pub tombstones: u64,
    pub prepares: u64,
    /// The highest tombstone.
    pub purged: Seqno,
}

/// What one step did.
#[derive(Default)]
pub(super) struct Piece {
    pub done: u64,
    pub written: u64,
    pub expired: Vec<KeyBuf>,
    pub is_last: bool,
}

impl Copying {
    /// `None`: there is no file.
    pub fn begin(vb: &Arc<Vb>, purges: &[Purge]) -> Result<Option<Copying>, StoreError> {
        let Some((source, file)) = vb.reading()? else { return Ok(None) };
        let shared = &vb.home.shared;
        let settings = shared.compactor.settings();
        let target = Target::create(vb, source.rev)?;
        let out = WrittenBack::every(settings.sync_every, &target.file);
        let copy = Copy::create(out, &target.path, shared.options.format, target.spill());
        let copy = copy.map_err(StoreError::file(vb.id))?;
        let now_s = shared.env.clock.unix_s();
        let purge_age_s = settings.purge_age.as_secs().min(u64::from(u32::MAX)) as u32;
        Ok(Some(Copying {
            vb: Arc::clone(vb),
            target,
            copy,
            source,
            file,
            next_seq: 0,
            purges: purges.to_vec(),
            now_s,
            oldest_kept_s: now_s.saturating_sub(purge_age_s),
            highest: BTreeMap::new(),
            recount: Recount::default(),
            left_out: LeftOut::default(),
        }))
    }

    pub fn bytes_total(&self) -> u64 {
        let header = self.file.header();
        header.live_bytes() + (header.doc_count() + header.deleted_count()) * LOOK_BYTES
    }

    /// Copies about `bytes` more.
    pub fn copy_some(&mut self, bytes: u64) -> Result<Piece, StoreError> {
        let before = self.copy.bytes();
        let mut piece = Piece::default();
        let file = self.file.clone();
        let mut failed = None;
        let walked = file.changes_since(self.next_seq, |info| {
            if let Err(error) = self.take(&file, info, &mut piece) {
                failed = Some(error);
            }
            match failed.is_some() || piece.done >= bytes {
                true => ControlFlow::Break(()),
                false => ControlFlow::Continue(()),
            }
        });
        let flow = failed.map_or(walked, Err).map_err(StoreError::file(self.vb.id))?;
        piece.is_last = flow.is_continue();
        piece.written = self.copy.bytes() - before;
        Ok(piece)
    }

    fn take(&mut self, file: &Snapshot, info: DocInfo, piece: &mut Piece) -> Result<(), Error> {
        self.next_seq = info.seq + 1;
        piece.done += info.body_size + LOOK_BYTES;
        let mut rules = Rules {
            file,
            completed: self.source.facts.completed,
            purges: &self.purges,
            oldest_kept_s: self.oldest_kept_s,
            now_s: self.now_s,
            highest: &mut self.highest,
        };
        match rules.judge(&info)? {
            Verdict::Keep => {}
            Verdict::KeepExpired => piece.expired.extend(DocKey::parse(&info.id).ok().map(KeyBuf::copy_of)),
            Verdict::Purge => {
                self.left_out.tombstones += 1;
                self.left_out.purged = Seqno(info.seq);
                return Ok(());
            }
            Verdict::DropPrepare => {
                self.left_out.prepares += 1;
                return Ok(());
            }
        }
        let body = file.raw_body(&info)?;
        self.recount.add(&info);
        self.copy.put(&info, body.as_deref())
    }

    /// Writes about `bytes` more of the trees.
    pub fn index_some(&mut self, bytes: u64) -> Result<Piece, StoreError> {
        let before = self.copy.bytes();
        let is_last = self.copy.index(bytes).map_err(StoreError::file(self.vb.id))?;
        let written = self.copy.bytes() - before;
        Ok(Piece { done: written, written, expired: Vec::new(), is_last })
    }

    /// Makes the new file one, as of when the compaction began.
    pub fn commit(mut self) -> Result<Follower, StoreError> {
        let file = || StoreError::file(self.vb.id);
        let header = self.file.header();
        let counted = self.recount.into_facts(&self.source.facts, &self.file);
        let (facts, collections) = counted.map_err(file())?;
        for (id, body) in locals(&self.file, &collections).map_err(file())? {
            self.copy.local_put(&id, &body).map_err(file())?;
        }
        self.copy.local_put(vbstate::ID, &facts.encode_as_first()).map_err(file())?;
        let purge = header.purge_seq.max(self.left_out.purged.0);
        self.copy.commit(header.update_seq, purge, header.timestamp_ns).map_err(file())?;
        self.target.remove_spilled()?;
        let couch = Couch::open(Arc::clone(&self.target.file), &self.target.path, Mode::Strict).map_err(file())?;
        Ok(Follower::new(&self.vb, self.target, couch, self.source, facts, self.left_out))
    }
}

type Local = (Vec<u8>, Vec<u8>);

/// The local documents of the new file but for the vBucket's state: counts as they were counted, all others as they were.
fn locals(file: &Snapshot, collections: &BTreeMap<CollectionId, CollectionStats>) -> Result<Vec<Local>, Error> {
    let counts = collections.iter().map(|(id, stats)| (CollectionStats::id(*id).into_bytes(), stats.encode()));
    let others = file.locals()?.into_iter().filter(|(id, _)| id != vbstate::ID && collection_of_local(id).is_none());
    Ok(counts.chain(others).collect())
}
