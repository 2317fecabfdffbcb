//! A file, open at one of its headers.

use std::fmt;
use std::ops::{Bound, ControlFlow, Deref};
use std::path::Path;
use std::sync::Arc;

use env::File;

use crate::batch::Batch;
use crate::btree::{Kind, Root, Tree, count_from, lookup, scan};
use crate::doc::DocInfo;
use crate::error::{Error, Result};
use crate::format::{MARKER_HEADER, U48_MAX, Version, inflate, past_marker, span};
use crate::header::{self, Header, Mode, Previous};
use crate::source::Source;

/// The file as one commit left it. Later commits do not change what it answers, so it may be read by many threads
/// while another writes; it stays valid as long as the file is only appended to.
#[derive(Clone)]
pub struct Snapshot {
    pub(crate) source: Source,
    pub(crate) header: Header,
}

/// The writer's view of a file.
/// 1. `header` is the last commit that returned success, or the one a rewind went back to: nothing of a batch shows
///    here before its commit is durable.
/// 2. Once a write or a sync has failed, every further batch is refused. Reads go on, at the last good commit.
pub struct Couch {
    pub(crate) snapshot: Snapshot,
    mode: Mode,
    pub(crate) poisoned: bool,
}

impl Deref for Couch {
    type Target = Snapshot;

    fn deref(&self) -> &Snapshot {
        &self.snapshot
    }
}

impl fmt::Debug for Snapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Snapshot").field("path", &self.source.path).field("header", &self.header).finish()
    }
}

impl fmt::Debug for Couch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Couch").field("snapshot", &self.snapshot).field("poisoned", &self.poisoned).finish()
    }
}

impl Couch {
    /// Writes the first, empty header to an empty file. Not synced: until the first commit the file may vanish, and
    /// that loses nothing. `path` is what errors call the file.
    pub fn create(file: Arc<dyn File>, path: &Path, version: Version) -> Result<Couch> {
        let source = Source { file, path: path.into() };
        let size = source.size()?;
        if size != 0 {
            return Err(Error::NotEmpty { path: source.path, size });
        }
        let header = Header::empty(version);
        env::write_all_at(&*source.file, &header.encode(MARKER_HEADER), 0).map_err(source.io("write", 0))?;
        Ok(Couch::at(source, header, Mode::Strict))
    }

    /// Opens the file at its newest header. `path` is what errors call the file.
    pub fn open(file: Arc<dyn File>, path: &Path, mode: Mode) -> Result<Couch> {
        let source = Source { file, path: path.into() };
        let header = header::newest(&source, mode)?;
        header::refuse_encrypted(&source, &header)?;
        Ok(Couch::at(source, header, mode))
    }

    pub(crate) fn at(source: Source, header: Header, mode: Mode) -> Couch {
        Couch { snapshot: Snapshot { source, header }, mode, poisoned: false }
    }

    /// Goes back to the header before this one; [`Error::NoHeader`], and no change, if there is none. What follows is
    /// not cut off: it is garbage once the next commit is made, which starts from here.
    pub fn rewind(&mut self) -> Result<()> {
        self.snapshot.header = header::before(&self.source, &self.header, self.mode)?;
        Ok(())
    }

    /// Goes back to before the first commit: the next one starts from nothing.
    pub fn clear(&mut self) {
        let header = &mut self.snapshot.header;
        (header.update_seq, header.purge_seq) = (0, 0);
        (header.by_seq, header.by_id, header.local) = (None, None, None);
    }

    /// Starts a change of the file.
    pub fn batch(&mut self) -> Result<Batch<'_>> {
        Batch::new(self)
    }

    /// A reader that stays at this header.
    pub fn snapshot(&self) -> Snapshot {
        self.snapshot.clone()
    }
}

impl Snapshot {
    /// Opens the file at the header found at `at`.
    pub fn open_at(file: Arc<dyn File>, path: &Path, at: u64) -> Result<Snapshot> {
        let source = Source { file, path: path.into() };
        let header = header::at(&source, at)?;
        header::refuse_encrypted(&source, &header)?;
        Ok(Snapshot { source, header })
    }

    pub fn header(&self) -> &Header {
        &self.header
    }

    pub fn path(&self) -> &Path {
        &self.source.path
    }

    /// Size of the file in bytes.
    pub fn file_bytes(&self) -> Result<u64> {
        self.source.size()
    }

    /// This header and all before it, newest first. In strict mode damage on the way is an error.
    pub fn headers(&self, mode: Mode) -> Result<Vec<Header>> {
        let mut headers = vec![self.header.clone()];
        loop {
            match header::before(&self.source, &headers[headers.len() - 1], mode) {
                Ok(header) => headers.push(header),
                Err(Error::NoHeader { .. }) => return Ok(headers),
                Err(e) if mode == Mode::Recovery && e.is_damage() => return Ok(headers),
                Err(e) => return Err(e),
            }
        }
    }

    pub fn get_by_id(&self, id: &[u8]) -> Result<Option<DocInfo>> {
        Ok(self.get_many_by_id(&[id])?.pop().flatten())
    }

    /// Looks up all of `ids`, which must ascend, reading each node on the way once.
    pub fn get_many_by_id(&self, ids: &[&[u8]]) -> Result<Vec<Option<DocInfo>>> {
        debug_assert!(ids.is_sorted(), "ids must ascend");
        let mut docs = Vec::with_capacity(ids.len());
        lookup(self.tree(Kind::ById), self.header.by_id.as_ref(), ids, &mut |i, value| {
            docs.push(value.and_then(|value| DocInfo::from_by_id(ids[i], value)));
        })?;
        Ok(docs)
    }

    pub fn get_by_seq(&self, seq: u64) -> Result<Option<DocInfo>> {
        if seq > U48_MAX {
            return Ok(None);
        }
        let key = DocInfo::seq_key(seq);
        let mut doc = None;
        lookup(self.tree(Kind::BySeq), self.header.by_seq.as_ref(), &[&key], &mut |_, value| {
            doc = value.and_then(|value| DocInfo::from_by_seq(&key, value));
        })?;
        Ok(doc)
    }

    /// Visits the documents last changed at `seq` or later, tombstones included, in order of seqno, until `visit`
    /// breaks.
    pub fn changes_since(
        &self,
        seq: u64,
        mut visit: impl FnMut(DocInfo) -> ControlFlow<()>,
    ) -> Result<ControlFlow<()>> {
        if seq > U48_MAX {
            return Ok(ControlFlow::Continue(()));
        }
        let from = DocInfo::seq_key(seq);
        self.scan(Kind::BySeq, &self.header.by_seq, Bound::Included(&from), |key, value| {
            DocInfo::from_by_seq(key, value).map_or(ControlFlow::Continue(()), &mut visit)
        })
    }

    /// How many documents, tombstones included, were last changed at `seq` or later. Reads one node a level.
    pub fn count_since(&self, seq: u64) -> Result<u64> {
        match seq {
            0..=U48_MAX => count_from(self.tree(Kind::BySeq), self.header.by_seq.as_ref(), &DocInfo::seq_key(seq)),
            _ => Ok(0),
        }
    }

    /// Visits the documents whose id is in the range, tombstones included, in order of id, until `visit` breaks.
    pub fn by_id(
        &self,
        from: Bound<&[u8]>,
        to: Bound<&[u8]>,
        mut visit: impl FnMut(DocInfo) -> ControlFlow<()>,
    ) -> Result<ControlFlow<()>> {
        let mut past_end = false;
        let flow = self.scan(Kind::ById, &self.header.by_id, from, |id, value| {
            past_end = match to {
                Bound::Unbounded => false,
                Bound::Included(to) => id > to,
                Bound::Excluded(to) => id >= to,
            };
            match past_end {
                true => ControlFlow::Break(()),
                false => DocInfo::from_by_id(id, value).map_or(ControlFlow::Continue(()), &mut visit),
            }
        })?;
        Ok(if past_end { ControlFlow::Continue(()) } else { flow })
    }

    /// The document's body in plain text; `None` if it has none.
    pub fn body(&self, doc: &DocInfo) -> Result<Option<Vec<u8>>> {
        match self.raw_body(doc)? {
            Some(raw) if doc.is_compressed() => {
                inflate(&raw).map(Some).map_err(|what| self.source.corrupt(doc.body_at, what))
            }
            raw => Ok(raw),
        }
    }

    /// The document's body as stored: snappy if [`DocInfo::is_compressed`]. `None` if it has none.
    pub fn raw_body(&self, doc: &DocInfo) -> Result<Option<Vec<u8>>> {
        if !doc.has_body() {
            return Ok(None);
        }
        let guess = span(past_marker(doc.body_at), doc.body_size);
        let chunk = self.source.chunk(doc.body_at, self.header.at, guess, self.header.version.checksum())?;
        Ok(Some(chunk.payload))
    }

    pub fn local(&self, id: &[u8]) -> Result<Option<Vec<u8>>> {
        let mut body = None;
        lookup(self.tree(Kind::Local), self.header.local.as_ref(), &[id], &mut |_, value| {
            body = value.map(<[u8]>::to_vec);
        })?;
        Ok(body)
    }

    /// All local documents, in order of id.
    pub fn locals(&self) -> Result<Vec<(Vec<u8>, Vec<u8>)>> {
        let mut all = Vec::new();
        let _ = self.scan(Kind::Local, &self.header.local, Bound::Unbounded, |id, body| {
            all.push((id.to_vec(), body.to_vec()));
            ControlFlow::Continue(())
        })?;
        Ok(all)
    }

    pub(crate) fn tree(&self, kind: Kind) -> Tree<'_> {
        Tree { source: &self.source, checksum: self.header.version.checksum(), end: self.header.at, kind }
    }

    fn scan(
        &self,
        kind: Kind,
        root: &Option<Root>,
        from: Bound<&[u8]>,
        mut visit: impl FnMut(&[u8], &[u8]) -> ControlFlow<()>,
    ) -> Result<ControlFlow<()>> {
        scan(self.tree(kind), root.as_ref(), from, &mut visit)
    }

    /// The header a commit on top of this one starts from.
    pub(crate) fn next_header(&self) -> Header {
        let previous = match self.header.previous {
            Previous::Unknown => Previous::Unknown,
            Previous::None | Previous::At(_) => Previous::At(self.header.at),
        };
        Header { previous, ..self.header.clone() }
    }
}
