use super::node::Entries;
use super::{Child, FILL_BYTES, Kind, Root};
use crate::error::Result;
use crate::source::Appender;

/// By-id leaves of a copied file are filled less than others: the original rounds the limit down to whole KiB there,
/// and copies are to be the same.
const FILL_BYTES_BY_ID: usize = 1024 * 2 / 3;

/// A tree built from entries that come in order, each node written once.
pub(crate) struct Bulk {
    kind: Kind,
    fill_bytes: usize,
    leaf: Entries,
    /// The leaves written so far, by their last keys.
    leaves: Vec<(Vec<u8>, Child)>,
}

impl Bulk {
    pub fn new(kind: Kind) -> Bulk {
        let fill_bytes = if kind == Kind::ById { FILL_BYTES_BY_ID } else { FILL_BYTES };
        Bulk { kind, fill_bytes, leaf: Entries::default(), leaves: Vec::new() }
    }

    pub fn push(&mut self, key: &[u8], value: &[u8], out: &mut Appender) -> Result<()> {
        self.leaf.push(key, value);
        if self.leaf.byte_len() > self.fill_bytes {
            self.leaves.push(self.leaf.write(self.leaf.len(), self.kind, true, out)?);
        }
        Ok(())
    }

    /// Writes what is left, and the levels above.
    pub fn finish(mut self, out: &mut Appender) -> Result<Option<Root>> {
        if self.leaf.len() > 0 {
            self.leaves.push(self.leaf.write(self.leaf.len(), self.kind, true, out)?);
        }
        let mut level = self.leaves;
        while level.len() > 1 {
            let mut above = Vec::new();
            let mut node = Entries::default();
            for (key, child) in level {
                node.push(&key, &child.encode(self.kind));
                if node.byte_len() > self.fill_bytes && node.len() > 1 {
                    above.push(node.write(node.len(), self.kind, false, out)?);
                }
            }
            if node.len() > 0 {
                above.push(node.write(node.len(), self.kind, false, out)?);
            }
            level = above;
        }
        Ok(level.pop().map(|(_, child)| child.into()))
    }
}
