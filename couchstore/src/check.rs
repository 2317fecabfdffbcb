//! Proving a file whole, as far as its bytes can prove it.
//!
//! Everything a header reaches is read: nodes, bodies, both trees against each other, and every sum against a recount.
//! What no header reaches is garbage and may be anything, but the marker of every block must make sense.

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;

use env::File;

use crate::btree::{Child, Kind, Node, Reduce, Tree};
use crate::couch::{Couch, Snapshot};
use crate::doc::DocInfo;
use crate::error::{Error, Result};
use crate::format::{BLOCK_BYTES, MARKER_DATA, MARKER_HEADER, MARKER_METADATA, inflate, past_marker, span};
use crate::header::{self, Header, Mode, Previous};

/// Which commits to check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Depth {
    /// The one the file opens at.
    Newest,
    /// Every one that a scan of the file finds.
    All,
}

/// Something wrong with the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Damage {
    /// Position in the file, if it has one.
    pub offset: Option<u64>,
    /// Position of the header from which it was met; `None` if the file's blocks alone show it.
    pub header_at: Option<u64>,
    pub what: String,
}

/// What a check found.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Headers checked, newest first, each with whether all it reaches is whole.
    pub headers: Vec<(Header, bool)>,
    /// Documents, nodes and bytes of chunks read while checking.
    pub docs: u64,
    pub nodes: u64,
    pub chunk_bytes: u64,
    /// Empty if the file is whole. The first is the first met.
    pub damage: Vec<Damage>,
    /// Odd but harmless.
    pub warnings: Vec<String>,
}

impl Report {
    pub fn is_whole(&self) -> bool {
        self.damage.is_empty()
    }

    fn add(&mut self, header_at: Option<u64>, error: Error) -> Result<()> {
        match error {
            Error::Io { .. } => Err(error),
            error => {
                self.damage.push(Damage { offset: error.offset(), header_at, what: error.to_string() });
                Ok(())
            }
        }
    }
}

/// Checks the file; damage goes into the report. Failing to read, encryption and an unknown version are errors. A file without any header that
/// can be read has a report without headers.
pub fn check(file: Arc<dyn File>, path: &Path, depth: Depth) -> Result<Report> {
    let mut report = Report::default();
    let newest = match Couch::open(file.clone(), path, Mode::Strict) {
        Ok(couch) => Some(couch),
        Err(e) if !e.is_damage() => return Err(e),
        Err(e) => {
            report.add(None, e)?;
            match Couch::open(file.clone(), path, Mode::Recovery) {
                Ok(couch) => Some(couch),
                Err(e) if !e.is_damage() => return Err(e),
                Err(_) => None,
            }
        }
    };
    let Some(newest) = newest else { return Ok(report) };
    let positions = check_markers(&newest, &mut report)?;
    let mut bodies = HashSet::new();
    check_header(&newest, &mut bodies, &mut report)?;
    if depth == Depth::All {
        for at in positions.into_iter().rev().filter(|&at| at < newest.header().at) {
            let snapshot = Snapshot { source: newest.source.clone(), header: header::at(&newest.source, at)? };
            check_header(&snapshot, &mut bodies, &mut report)?;
        }
    }
    Ok(report)
}

/// Reads the first byte of every block; returns where whole headers are.
fn check_markers(snapshot: &Snapshot, report: &mut Report) -> Result<Vec<u64>> {
    let source = &snapshot.source;
    let mut headers = Vec::new();
    let mut marker = [0];
    for at in (0..source.size()?).step_by(BLOCK_BYTES as usize) {
        source.read_up_to(&mut marker, at)?;
        match marker[0] {
            MARKER_DATA => {}
            MARKER_METADATA if at == 0 => {}
            MARKER_HEADER => match header::at(source, at) {
                Ok(_) => headers.push(at),
                // Compaction before 7.0 left this byte in front of plain data.
                Err(_) if at == 0 => {}
                Err(e) => add_once(report, e)?,
            },
            _ => add_once(report, source.corrupt(at, "a block that is neither data nor a header"))?,
        }
    }
    Ok(headers)
}

/// The strict open may have met the same.
fn add_once(report: &mut Report, error: Error) -> Result<()> {
    let known = error.offset().is_some() && report.damage.iter().any(|damage| damage.offset == error.offset());
    if known { Ok(()) } else { report.add(None, error) }
}

fn check_header(snapshot: &Snapshot, bodies: &mut HashSet<u64>, report: &mut Report) -> Result<()> {
    let at = snapshot.header.at;
    let damages = report.damage.len();
    let mut walk = Walk { snapshot, bodies, report };
    if let Err(e) = walk.header() {
        report.add(Some(at), e)?;
    }
    let whole = report.damage.len() == damages;
    report.headers.push((snapshot.header.clone(), whole));
    Ok(())
}

struct Walk<'a> {
    snapshot: &'a Snapshot,
    /// Positions of the bodies found good already, under this header or another.
    bodies: &'a mut HashSet<u64>,
    report: &'a mut Report,
}

impl Walk<'_> {
    fn header(&mut self) -> Result<()> {
        let header = &self.snapshot.header;
        if matches!(header.previous, Previous::At(before) if before >= header.at) {
            return Err(self.corrupt(header.at, "a header points at a previous one that is not before it"));
        }
        let mut by_id: Vec<DocInfo> = Vec::new();
        self.tree(Kind::ById, &mut |doc| by_id.extend(doc))?;
        by_id.sort_unstable_by_key(|doc| doc.seq);
        let mut by_seq: Vec<DocInfo> = Vec::new();
        self.tree(Kind::BySeq, &mut |doc| by_seq.extend(doc))?;
        self.tree(Kind::Local, &mut |_| {})?;

        if let Some((one, _)) = by_id.iter().zip(&by_seq).find(|(a, b)| a != b) {
            let root = header.by_id.map_or(header.at, |root| root.at);
            return Err(self.corrupt(
                if one.has_body() { one.body_at } else { root },
                "the two trees tell differently of a document",
            ));
        }
        if by_id.len() != by_seq.len() {
            return Err(self.corrupt(header.at, "the two trees hold different numbers of documents"));
        }
        if by_seq.last().is_some_and(|doc| doc.seq > header.update_seq) {
            return Err(self.corrupt(header.at, "a document has a seqno above the header's"));
        }
        self.report.docs += by_seq.len() as u64;
        // A damaged body is reported and does not hide the next.
        for doc in by_seq.iter().filter(|doc| doc.has_body()) {
            if let Err(e) = self.body(doc) {
                self.report.add(Some(header.at), e)?;
            }
        }
        Ok(())
    }

    fn corrupt(&self, at: u64, what: &'static str) -> Error {
        self.snapshot.source.corrupt(at, what)
    }

    fn body(&mut self, doc: &DocInfo) -> Result<()> {
        if self.bodies.contains(&doc.body_at) {
            return Ok(());
        }
        let header = &self.snapshot.header;
        let guess = span(past_marker(doc.body_at), doc.body_size);
        let chunk = self.snapshot.source.chunk(doc.body_at, header.at, guess, header.version.checksum())?;
        self.report.chunk_bytes += chunk.size;
        if chunk.size != doc.body_size {
            let (at, told, is) = (doc.body_at, doc.body_size, chunk.size);
            self.report.warnings.push(format!("body at {at} takes {is} bytes, its document says {told}"));
        }
        if doc.is_compressed() {
            inflate(&chunk.payload).map_err(|what| self.corrupt(doc.body_at, what))?;
        }
        self.bodies.insert(doc.body_at);
        Ok(())
    }

    fn tree(&mut self, kind: Kind, visit: &mut dyn FnMut(Option<DocInfo>)) -> Result<()> {
        let header = &self.snapshot.header;
        let root = match kind {
            Kind::BySeq => header.by_seq,
            Kind::ById => header.by_id,
            Kind::Local => header.local,
        };
        let Some(root) = root else { return Ok(()) };
        let tree = self.snapshot.tree(kind);
        let mut order = Order::default();
        let top = tree.top(&root)?;
        let found = self.node(tree, &top, 0, &mut order, visit)?;
        let told = Child { at: root.at, subtree_bytes: root.subtree_bytes, reduce: root.reduce };
        if found != told {
            return Err(self.corrupt(header.at, "a header's sums differ from a recount of its tree"));
        }
        Ok(())
    }

    /// Walks everything below `node`; returns what a pointer at it should say.
    fn node(
        &mut self,
        tree: Tree<'_>,
        node: &Node,
        depth: usize,
        order: &mut Order,
        visit: &mut dyn FnMut(Option<DocInfo>),
    ) -> Result<Child> {
        self.report.nodes += 1;
        self.report.chunk_bytes += node.size;
        let mut sum = Child { at: node.at, subtree_bytes: node.size, reduce: Reduce::default() };
        if node.is_leaf {
            order.leaf(node, depth).map_err(|what| self.corrupt(node.at, what))?;
        }
        for i in 0..node.len() {
            let (key, value) = (node.key(i), node.value(i));
            if node.is_leaf {
                let entry = Reduce::of_entry(tree.kind, key, value);
                sum.reduce.add(entry.ok_or_else(|| self.corrupt(node.at, "a tree value too short for its parts"))?);
                visit(match tree.kind {
                    Kind::BySeq => DocInfo::from_by_seq(key, value),
                    Kind::ById => DocInfo::from_by_id(key, value),
                    Kind::Local => None,
                });
            } else {
                let below = tree.below(node, i, depth)?;
                let found = self.node(tree, &below, depth + 1, order, visit)?;
                if found != node.child(tree.kind, i) {
                    return Err(self.corrupt(node.at, "a node's sums differ from a recount below it"));
                }
                sum.subtree_bytes = sum.subtree_bytes.saturating_add(found.subtree_bytes);
                sum.reduce.add(found.reduce);
            }
        }
        Ok(sum)
    }
}

/// What must hold from leaf to leaf.
#[derive(Default)]
struct Order {
    last_key: Option<Vec<u8>>,
    depth: Option<usize>,
}

impl Order {
    fn leaf(&mut self, node: &Node, depth: usize) -> Result<(), &'static str> {
        if self.last_key.as_deref().is_some_and(|last| node.key(0) <= last) {
            return Err("tree keys out of order");
        }
        if *self.depth.get_or_insert(depth) != depth {
            return Err("a leaf at another depth than the others");
        }
        self.last_key = Some(node.last_key().to_vec());
        Ok(())
    }
}

/// How many entries each leaf of a tree holds, in order: its shape, as far as the batches that made it decide.
pub fn leaf_counts(snapshot: &Snapshot, kind: Kind) -> Result<Vec<usize>> {
    fn gather(tree: Tree<'_>, node: &Node, depth: usize, counts: &mut Vec<usize>) -> Result<()> {
        if node.is_leaf {
            counts.push(node.len());
            return Ok(());
        }
        (0..node.len()).try_for_each(|i| gather(tree, &tree.below(node, i, depth)?, depth + 1, counts))
    }
    let header = snapshot.header();
    let root = match kind {
        Kind::BySeq => header.by_seq,
        Kind::ById => header.by_id,
        Kind::Local => header.local,
    };
    let mut counts = Vec::new();
    if let Some(root) = root {
        let tree = snapshot.tree(kind);
        gather(tree, &tree.top(&root)?, 0, &mut counts)?;
    }
    Ok(counts)
}
