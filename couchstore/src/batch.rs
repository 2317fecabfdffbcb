//! Writing: a batch is built on the side and becomes the file in one commit, or never.

use std::collections::BTreeMap;

use crate::btree::{Action, Kind, Met, Op, Tree, modify};
use crate::couch::Couch;
use crate::doc::DocInfo;
use crate::error::{Error, Result, Step};
use crate::format::{
    BLOCK_BYTES, CHUNK_FRAME_BYTES, ID_BYTES_MAX, MARKER_DATA, MARKER_HEADER, META_SNAPPY, POSITION_MAX, U48_MAX,
    VALUE_BYTES_MAX,
};
use crate::header::Header;
use crate::source::Appender;

/// A document to write.
#[derive(Clone, Copy, Debug)]
pub struct Doc<'a> {
    pub id: &'a [u8],
    /// Larger than any this file has seen, unless it was rewound. At most 48 bits.
    pub seq: u64,
    /// At most 48 bits.
    pub rev: u64,
    pub deleted: bool,
    /// Bit 7 says that the stored body is snappy.
    pub content_meta: u8,
    pub rev_meta: &'a [u8],
    /// Only a tombstone may lack one; an empty body is a body.
    pub body: Option<&'a [u8]>,
    /// Compress the body if `content_meta` has bit 7. Without it the body is stored as it is given.
    pub compress: bool,
}

/// What a commit did.
#[derive(Clone, Debug)]
pub struct CommitOutcome {
    pub header: Header,
    /// For each [`Batch::put`], in their order: the version it replaced, tombstone or not; `None` if the id was new.
    pub replaced: Vec<Option<DocInfo>>,
}

/// One commit in the making.
/// 1. The couch keeps its header until [`Batch::commit`] has succeeded; a batch that is dropped or fails leaves only
///    bytes that no header refers to.
/// 2. No two documents of a batch have the same id, or the same seqno.
/// 3. Once a save or a write has failed, the batch cannot be committed any more.
/// 4. Any failed write or sync closes the couch to further batches: what the file holds then is not known.
pub struct Batch<'a> {
    couch: &'a mut Couch,
    header: Header,
    out: Appender,
    docs: Vec<DocInfo>,
    replaced: Vec<Option<DocInfo>>,
    locals: BTreeMap<Vec<u8>, Option<Vec<u8>>>,
    /// A save failed, so part of what was put is gone.
    spoilt: bool,
}

impl<'a> Batch<'a> {
    pub(crate) fn new(couch: &'a mut Couch) -> Result<Batch<'a>> {
        if couch.poisoned {
            return Err(Error::Poisoned { path: couch.source.path.clone() });
        }
        let header = couch.next_header();
        let end = couch.source.size()?;
        let out = Appender::new(couch.source.clone(), header.version.checksum(), end);
        Ok(Batch { couch, header, out, docs: Vec::new(), replaced: Vec::new(), locals: BTreeMap::new(), spoilt: false })
    }

    /// Adds a document. An error of kind [`Error::Limit`] or [`Error::Refused`] leaves the batch as it was.
    pub fn put(&mut self, doc: Doc<'_>) -> Result<()> {
        limit("document id in bytes", doc.id.len() as u64, ID_BYTES_MAX)?;
        limit("seqno", doc.seq, U48_MAX)?;
        limit("revision number", doc.rev, U48_MAX)?;
        limit("metadata in bytes", (18 + doc.id.len() + 23 + doc.rev_meta.len()) as u64, VALUE_BYTES_MAX)?;
        if doc.body.is_none() && !doc.deleted {
            return Err(Error::Refused("a document that is not deleted needs a body, be it empty"));
        }
        let (body_at, body_size) = match doc.body {
            None => (0, 0),
            Some(plain) if doc.compress && doc.content_meta & META_SNAPPY != 0 => {
                let packed = self.out.compress(plain)?;
                self.body(&packed)?
            }
            Some(stored) => self.body(stored)?,
        };
        self.docs.push(DocInfo {
            id: doc.id.to_vec(),
            seq: doc.seq,
            rev: doc.rev,
            deleted: doc.deleted,
            content_meta: doc.content_meta,
            rev_meta: doc.rev_meta.to_vec(),
            body_at,
            body_size,
        });
        Ok(())
    }

    fn body(&mut self, stored: &[u8]) -> Result<(u64, u64)> {
        limit("stored body in bytes", stored.len() as u64, VALUE_BYTES_MAX - CHUNK_FRAME_BYTES)?;
        let written = self.out.chunk(stored);
        self.poison_if_failed(written)
    }

    /// Sets a local document; the last word on an id counts.
    pub fn local_put(&mut self, id: &[u8], body: &[u8]) -> Result<()> {
        limit("local document id in bytes", id.len() as u64, ID_BYTES_MAX)?;
        limit("local document in bytes", body.len() as u64, VALUE_BYTES_MAX)?;
        self.locals.insert(id.to_vec(), Some(body.to_vec()));
        Ok(())
    }

    /// Removes a local document, if it is there.
    pub fn local_remove(&mut self, id: &[u8]) -> Result<()> {
        limit("local document id in bytes", id.len() as u64, ID_BYTES_MAX)?;
        self.locals.insert(id.to_vec(), None);
        Ok(())
    }

    /// Records that tombstones up to `seq` may be gone from the file.
    pub fn purge_seq(&mut self, seq: u64) -> Result<()> {
        limit("purge seqno", seq, U48_MAX)?;
        self.header.purge_seq = seq;
        Ok(())
    }

    /// Raises the highest seqno beyond that of the documents put, as a copy of a file needs whose last changes were
    /// left out.
    pub fn raise_update_seq(&mut self, seq: u64) -> Result<()> {
        limit("update seqno", seq, U48_MAX)?;
        self.header.update_seq = self.header.update_seq.max(seq);
        Ok(())
    }

    /// Writes the trees so far, so that what was put need not be held until the commit: for copies of whole files.
    /// The nodes of the shape so far become garbage, so the more often, the larger the file.
    pub fn save(&mut self) -> Result<()> {
        let saved = self.apply().and_then(|()| self.out.flush());
        self.spoilt |= saved.is_err();
        self.poison_if_failed(saved)
    }

    /// What [`CommitOutcome::replaced`] will say, as far as the batch is saved: so that whoever counts documents can put the
    /// counts into the same commit without looking the ids up twice.
    pub fn replaced(&self) -> &[Option<DocInfo>] {
        &self.replaced
    }

    /// Makes the batch the file's newest commit. `Ok` means it outlives power loss. `timestamp_ns` is kept by files of
    /// version 13 and later.
    ///
    /// The header is written as data first and synced with all it refers to; only then is its first byte turned into
    /// the header marker, and synced. So a torn header never looks like one, and a crash leaves the old commit or this.
    pub fn commit(self, timestamp_ns: u64) -> Result<CommitOutcome> {
        self.commit_by(timestamp_ns, publish)
    }

    /// The same without a sync: until the file has been synced, a crash may leave anything of it, even a torn header. For a file
    /// that does not count yet.
    pub fn commit_unsynced(self, timestamp_ns: u64) -> Result<CommitOutcome> {
        self.commit_by(timestamp_ns, |header, out| {
            place(header, out)?;
            out.block(&header.encode(MARKER_HEADER)).map(drop)
        })
    }

    /// [`Batch::commit`] with one sync for the header and all it refers to, so a crash before the end may leave a torn header. For a
    /// file that gets its name, and so counts, only after this.
    pub fn commit_first(self, timestamp_ns: u64) -> Result<CommitOutcome> {
        self.commit_by(timestamp_ns, |header, out| {
            place(header, out)?;
            out.block(&header.encode(MARKER_HEADER))?;
            let source = out.source();
            let failed = |e| Error::Commit { step: Step::DataSync, path: source.path.clone(), source: e };
            source.file.sync().map_err(failed)
        })
    }

    fn commit_by(
        mut self,
        timestamp_ns: u64,
        publish: impl FnOnce(&mut Header, &mut Appender) -> Result<()>,
    ) -> Result<CommitOutcome> {
        let applied = self.apply();
        self.poison_if_failed(applied)?;
        self.header.timestamp_ns = timestamp_ns;
        let published = publish(&mut self.header, &mut self.out);
        self.poison_if_failed(published)?;
        self.couch.snapshot.header = self.header.clone();
        Ok(CommitOutcome { header: self.header, replaced: self.replaced })
    }

    /// Changes the trees by what was put since the last time.
    fn apply(&mut self) -> Result<()> {
        if self.spoilt {
            return Err(Error::Refused("an earlier save of this batch failed; start another"));
        }
        let docs = std::mem::take(&mut self.docs);
        if !docs.is_empty() {
            self.apply_docs(&docs)?;
        }
        let locals = std::mem::take(&mut self.locals).into_iter();
        let actions: Vec<Action> =
            locals.map(|(key, body)| Action { key, op: body.map_or(Op::Remove, Op::Insert) }).collect();
        self.header.local = self.modify(Kind::Local, &actions, &mut |_, _| Ok(()))?;
        Ok(())
    }

    fn apply_docs(&mut self, docs: &[DocInfo]) -> Result<()> {
        let mut order: Vec<usize> = (0..docs.len()).collect();
        order.sort_unstable_by(|&a, &b| docs[a].id.cmp(&docs[b].id));
        if order.windows(2).any(|pair| docs[pair[0]].id == docs[pair[1]].id) {
            return Err(Error::Refused("two documents of one batch have the same id; keep the newer one"));
        }
        let by_id: Vec<Action> =
            order.iter().map(|&i| Action { key: docs[i].id.clone(), op: Op::Insert(docs[i].by_id_value()) }).collect();
        let mut replaced: Vec<Option<DocInfo>> = vec![None; docs.len()];
        let by_id_root = self.modify(Kind::ById, &by_id, &mut |i, old| {
            replaced[order[i]] = old.and_then(|value| DocInfo::from_by_id(&by_id[i].key, value));
            Ok(())
        })?;
        drop(by_id);

        let removals = replaced.iter().flatten().map(|old| (old.seq, None));
        let insertions = docs.iter().enumerate().map(|(i, doc)| (doc.seq, Some(i)));
        let mut by_seq: Vec<(u64, Option<usize>)> = removals.chain(insertions).collect();
        by_seq.sort_unstable();
        if by_seq.windows(2).any(|pair| pair[0].0 == pair[1].0 && pair[0].1.is_some()) {
            return Err(Error::Refused("two documents of one batch have the same seqno"));
        }
        let actions: Vec<Action> = by_seq
            .into_iter()
            .map(|(seq, doc)| Action {
                key: DocInfo::seq_key(seq).to_vec(),
                op: doc.map_or(Op::Remove, |i| Op::Insert(docs[i].by_seq_value())),
            })
            .collect();
        let (source, header_at) = (self.couch.source.clone(), self.couch.header.at);
        let by_seq_root = self.modify(Kind::BySeq, &actions, &mut |i, old| match (&actions[i].op, old) {
            (Op::Remove, None) => Err(source.corrupt(header_at, "by-id names a seqno that by-seq lacks")),
            (Op::Insert(_), Some(_)) => Err(Error::Refused("another document has this seqno already")),
            _ => Ok(()),
        })?;

        self.header.by_id = by_id_root;
        self.header.by_seq = by_seq_root;
        self.header.update_seq = docs.iter().map(|doc| doc.seq).fold(self.header.update_seq, u64::max);
        self.replaced.append(&mut replaced);
        Ok(())
    }

    fn modify(&mut self, kind: Kind, actions: &[Action], before: &mut Met<'_>) -> Result<Option<crate::btree::Root>> {
        let root = match kind {
            Kind::BySeq => self.header.by_seq,
            Kind::ById => self.header.by_id,
            Kind::Local => self.header.local,
        };
        let source = self.couch.source.clone();
        // What is read was written by an earlier commit or save, so it is in the file and below this.
        let tree = Tree { source: &source, checksum: self.header.version.checksum(), end: self.out.position(), kind };
        modify(tree, root, actions, &mut self.out, before)
    }

    fn poison_if_failed<T>(&mut self, result: Result<T>) -> Result<T> {
        if let Err(Error::Commit { .. }) = result {
            self.couch.poisoned = true;
        }
        result
    }
}

pub(crate) fn limit(what: &'static str, value: u64, max: u64) -> Result<()> {
    if value > max { Err(Error::Limit { what, value, max }) } else { Ok(()) }
}

fn place(header: &mut Header, out: &Appender) -> Result<()> {
    header.at = out.position().next_multiple_of(BLOCK_BYTES);
    limit("file size in bytes", header.at, POSITION_MAX)
}

/// Writes `header` behind all that `out` holds, and makes it the file's newest.
pub(crate) fn publish(header: &mut Header, out: &mut Appender) -> Result<()> {
    place(header, out)?;
    let at = out.block(&header.encode(MARKER_DATA))?;
    assert_eq!(at, header.at);

    let source = out.source();
    let failed = |step| move |e| Error::Commit { step, path: source.path.clone(), source: e };
    source.file.sync().map_err(failed(Step::DataSync))?;
    let marked = env::write_all_at(&*source.file, &[MARKER_HEADER], at).map_err(failed(Step::MarkerWrite));
    let synced = marked.and_then(|()| source.file.sync().map_err(failed(Step::MarkerSync)));
    if synced.is_err() {
        // Whoever opens the file next should not find, in the page cache, a commit that was reported as failed.
        // This may fail like what came before it, and then there is nothing better to do.
        let _ = env::write_all_at(&*source.file, &[MARKER_DATA], at);
    }
    synced
}
