//! Writing a file anew: what compaction does with the documents it keeps.
//!
//! Documents come in order of seqno and are written as they come, bodies between the by-seq leaves that name them. Their
//! by-id entries are sorted on the side, with bounded memory, and merged at the end. So every node is written once, and the
//! new file has no garbage. Every step can be taken in small pieces, as somebody else may want the disk in between.

use std::path::Path;
use std::sync::Arc;

use env::File;

use crate::batch::{limit, publish};
use crate::btree::{Bulk, Kind, Root};
use crate::couch::Couch;
use crate::doc::DocInfo;
use crate::error::{Error, Result};
use crate::format::{CHUNK_FRAME_BYTES, ID_BYTES_MAX, U48_MAX, VALUE_BYTES_MAX, Version};
use crate::header::{Header, Mode, Previous};
use crate::runs::{Merge, Runs, Spill};
use crate::source::{Appender, Source};

/// A file in the making. Until [`Copy::commit`] it has no header and cannot be opened.
pub struct Copy {
    source: Source,
    header: Header,
    out: Appender,
    trees: Trees,
    locals: Vec<(Vec<u8>, Vec<u8>)>,
    seq_last: Option<u64>,
}

/// The trees grow one after the other.
enum Trees {
    BySeq {
        by_seq: Bulk,
        by_id: Runs,
    },
    ById {
        entries: Merge,
        by_id: Bulk,
        last: Option<Vec<u8>>,
    },
    /// Both roots are in the header.
    Whole,
}

impl Copy {
    /// Starts in an empty file. `path` is what errors call it. `spill` makes a file beside it if there are too many
    /// documents to sort in memory; whoever gave it removes that file when the copy is committed or given up.
    pub fn create(file: Arc<dyn File>, path: &Path, version: Version, spill: Spill) -> Result<Copy> {
        let source = Source { file, path: path.into() };
        let size = source.size()?;
        if size != 0 {
            return Err(Error::NotEmpty { path: source.path, size });
        }
        // Such a file has no creation header, and says so by naming position 0, where there is none.
        let previous = if version < Version::V14 { Previous::Unknown } else { Previous::At(0) };
        let header = Header { previous, ..Header::empty(version) };
        let out = Appender::at_start(source.clone(), version.checksum());
        let trees = Trees::BySeq { by_seq: Bulk::new(Kind::BySeq), by_id: Runs::new(spill, source.path.clone()) };
        Ok(Copy { source, header, out, trees, locals: Vec::new(), seq_last: None })
    }

    /// Adds a document of another file with its body as stored there ([`crate::Snapshot::raw_body`]). Seqnos must
    /// ascend.
    pub fn put(&mut self, doc: &DocInfo, raw_body: Option<&[u8]>) -> Result<()> {
        limit("document id in bytes", doc.id.len() as u64, ID_BYTES_MAX)?;
        limit("seqno", doc.seq, U48_MAX)?;
        limit("revision number", doc.rev, U48_MAX)?;
        limit("metadata in bytes", (18 + doc.id.len() + 23 + doc.rev_meta.len()) as u64, VALUE_BYTES_MAX)?;
        let Trees::BySeq { by_seq, by_id } = &mut self.trees else {
            return Err(Error::Refused("a copy takes no more documents once its index is begun"));
        };
        if self.seq_last.is_some_and(|last| doc.seq <= last) {
            return Err(Error::Refused("documents of a copy must come in order of seqno"));
        }
        let (body_at, body_size) = match raw_body {
            None => (0, 0),
            Some(raw) => {
                limit("stored body in bytes", raw.len() as u64, VALUE_BYTES_MAX - CHUNK_FRAME_BYTES)?;
                self.out.chunk(raw)?
            }
        };
        self.seq_last = Some(doc.seq);
        let doc = DocInfo { body_at, body_size, ..doc.clone() };
        by_seq.push(&DocInfo::seq_key(doc.seq), &doc.by_seq_value(), &mut self.out)?;
        let value = doc.by_id_value();
        by_id.push(doc.id, value)
    }

    /// Adds a local document; ids must not repeat.
    pub fn local_put(&mut self, id: &[u8], body: &[u8]) -> Result<()> {
        limit("local document id in bytes", id.len() as u64, ID_BYTES_MAX)?;
        limit("local document in bytes", body.len() as u64, VALUE_BYTES_MAX)?;
        self.locals.push((id.to_vec(), body.to_vec()));
        Ok(())
    }

    /// Bytes of the new file so far, those not yet written included.
    pub fn bytes(&self) -> u64 {
        self.out.position()
    }

    /// Once all documents are put: writes the trees, about `bytes` of them. True: they are whole.
    pub fn index(&mut self, bytes: u64) -> Result<bool> {
        let end = self.out.position().saturating_add(bytes);
        while self.out.position() < end && !self.index_some()? {}
        Ok(matches!(self.trees, Trees::Whole))
    }

    fn index_some(&mut self) -> Result<bool> {
        match std::mem::replace(&mut self.trees, Trees::Whole) {
            Trees::BySeq { by_seq, by_id } => {
                self.header.by_seq = by_seq.finish(&mut self.out)?;
                self.trees = Trees::ById { entries: by_id.merge()?, by_id: Bulk::new(Kind::ById), last: None };
                Ok(false)
            }
            Trees::ById { mut entries, mut by_id, last } => match entries.next()? {
                Some((id, _)) if last.as_ref() == Some(&id) => Err(TWICE),
                Some((id, value)) => {
                    by_id.push(&id, &value, &mut self.out)?;
                    self.trees = Trees::ById { entries, by_id, last: Some(id) };
                    Ok(false)
                }
                None => {
                    self.header.by_id = by_id.finish(&mut self.out)?;
                    let count = |root: &Option<Root>| root.map_or(0, |root| root.reduce.alive + root.reduce.deleted);
                    match count(&self.header.by_id) == count(&self.header.by_seq) {
                        true => Ok(true),
                        false => {
                            Err(self.source.corrupt(0, "the trees of a copy differ in how many documents they have"))
                        }
                    }
                }
            },
            Trees::Whole => Ok(true),
        }
    }

    /// Makes the file: `Ok` means its content outlives power loss; its name is the caller's to make durable.
    /// `update_seq` is the highest seqno of the original, which may belong to a document left out.
    pub fn commit(mut self, update_seq: u64, purge_seq: u64, timestamp_ns: u64) -> Result<Couch> {
        limit("update seqno", update_seq, U48_MAX)?;
        limit("purge seqno", purge_seq, U48_MAX)?;
        self.index(u64::MAX)?;
        self.header.local = locals(self.locals, &mut self.out)?;
        self.header.update_seq = update_seq.max(self.seq_last.unwrap_or(0));
        self.header.purge_seq = purge_seq;
        self.header.timestamp_ns = timestamp_ns;
        publish(&mut self.header, &mut self.out)?;
        Ok(Couch::at(self.source, self.header, Mode::Strict))
    }
}

const TWICE: Error = Error::Refused("two entries of a copy have the same id");

fn locals(mut entries: Vec<(Vec<u8>, Vec<u8>)>, out: &mut Appender) -> Result<Option<Root>> {
    entries.sort_unstable();
    if entries.windows(2).any(|pair| pair[0].0 == pair[1].0) {
        return Err(TWICE);
    }
    let mut tree = Bulk::new(Kind::Local);
    entries.iter().try_for_each(|(key, value)| tree.push(key, value, out))?;
    tree.finish(out)
}
