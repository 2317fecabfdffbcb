//! Writing a file anew: what compaction does with the documents it keeps.
//!
//! Documents come in order of seqno and are written as they come, bodies between the by-seq leaves that name them. Their
//! by-id entries are kept in memory, some tens of bytes each beside the id, and sorted at the end. So every node is
//! written once, and the new file has no garbage.

use std::path::Path;
use std::sync::Arc;

use env::File;

use crate::batch::{limit, publish};
use crate::btree::{Bulk, Kind};
use crate::couch::Couch;
use crate::doc::DocInfo;
use crate::error::{Error, Result};
use crate::format::{CHUNK_FRAME_BYTES, ID_BYTES_MAX, U48_MAX, VALUE_BYTES_MAX, Version};
use crate::header::{Header, Mode, Previous};
use crate::source::{Appender, Source};

/// A file in the making. Until [`Copy::commit`] it has no header and cannot be opened.
pub struct Copy {
    source: Source,
    header: Header,
    out: Appender,
    by_seq: Bulk,
    by_id: Vec<(Vec<u8>, Vec<u8>)>,
    locals: Vec<(Vec<u8>, Vec<u8>)>,
    seq_last: Option<u64>,
}

impl Copy {
    /// Starts in an empty file. `path` is what errors call it.
    pub fn create(file: Arc<dyn File>, path: &Path, version: Version) -> Result<Copy> {
        let source = Source { file, path: path.into() };
        let size = source.size()?;
        if size != 0 {
            return Err(Error::NotEmpty { path: source.path, size });
        }
        // Such a file has no creation header, and says so by naming position 0, where there is none.
        let previous = if version < Version::V14 { Previous::Unknown } else { Previous::At(0) };
        let header = Header { previous, ..Header::empty(version) };
        let out = Appender::at_start(source.clone(), version.checksum());
        let (by_seq, by_id, locals) = (Bulk::new(Kind::BySeq), Vec::new(), Vec::new());
        Ok(Copy { source, header, out, by_seq, by_id, locals, seq_last: None })
    }

    /// Adds a document of another file with its body as stored there ([`crate::Snapshot::raw_body`]). Seqnos must
    /// ascend.
    pub fn put(&mut self, doc: &DocInfo, raw_body: Option<&[u8]>) -> Result<()> {
        limit("document id in bytes", doc.id.len() as u64, ID_BYTES_MAX)?;
        limit("seqno", doc.seq, U48_MAX)?;
        limit("revision number", doc.rev, U48_MAX)?;
        limit("metadata in bytes", (18 + doc.id.len() + 23 + doc.rev_meta.len()) as u64, VALUE_BYTES_MAX)?;
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
        self.by_seq.push(&DocInfo::seq_key(doc.seq), &doc.by_seq_value(), &mut self.out)?;
        let value = doc.by_id_value();
        self.by_id.push((doc.id, value));
        Ok(())
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

    /// Makes the file: `Ok` means its content outlives power loss; its name is the caller's to make durable.
    /// `update_seq` is the highest seqno of the original, which may belong to a document left out.
    pub fn commit(mut self, update_seq: u64, purge_seq: u64, timestamp_ns: u64) -> Result<Couch> {
        limit("update seqno", update_seq, U48_MAX)?;
        limit("purge seqno", purge_seq, U48_MAX)?;
        self.header.by_seq = self.by_seq.finish(&mut self.out)?;
        self.header.by_id = sorted(Kind::ById, self.by_id, &mut self.out)?;
        self.header.local = sorted(Kind::Local, self.locals, &mut self.out)?;
        self.header.update_seq = update_seq.max(self.seq_last.unwrap_or(0));
        self.header.purge_seq = purge_seq;
        self.header.timestamp_ns = timestamp_ns;
        publish(&mut self.header, &mut self.out)?;
        Ok(Couch::at(self.source, self.header, Mode::Strict))
    }
}

fn sorted(kind: Kind, mut entries: Vec<(Vec<u8>, Vec<u8>)>, out: &mut Appender) -> Result<Option<crate::btree::Root>> {
    entries.sort_unstable();
    if entries.windows(2).any(|pair| pair[0].0 == pair[1].0) {
        return Err(Error::Refused("two entries of a copy have the same id"));
    }
    let mut tree = Bulk::new(kind);
    entries.iter().try_for_each(|(key, value)| tree.push(key, value, out))?;
    tree.finish(out)
}
