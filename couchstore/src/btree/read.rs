use std::ops::{Bound, ControlFlow};

use super::{HEIGHT_MAX, Kind, Node, Root};
use crate::error::Result;
use crate::format::Checksum;
use crate::source::Source;

/// Where the nodes of a tree are read from.
#[derive(Clone, Copy)]
pub(crate) struct Tree<'a> {
    pub source: &'a Source,
    pub checksum: Checksum,
    /// Everything of the tree ends at or below this.
    pub end: u64,
    pub kind: Kind,
}

impl Tree<'_> {
    /// The topmost node.
    pub fn top(&self, root: &Root) -> Result<Node> {
        Node::read(self.source, root.at, self.end, self.checksum, self.kind)
    }

    /// The node below entry `i` of `parent`, which is `depth` levels below the top. It must have been written before
    /// its parent and end with the key its parent knows it by; so no damage makes a walk loop or come by twice.
    pub fn below(&self, parent: &Node, i: usize, depth: usize) -> Result<Node> {
        if depth == HEIGHT_MAX {
            return Err(self.source.corrupt(parent.at, "a tree higher than any file could need"));
        }
        let child = parent.child(self.kind, i);
        let node = Node::read(self.source, child.at, parent.at, self.checksum, self.kind)?;
        if node.last_key() != parent.key(i) {
            return Err(self.source.corrupt(child.at, "a tree node does not end with the key its parent knows it by"));
        }
        Ok(node)
    }
}

/// Looks up `keys`, which ascend, in one descent; tells `found` of each, by its index, in order.
pub(crate) fn lookup(
    tree: Tree<'_>,
    root: Option<&Root>,
    keys: &[&[u8]],
    found: &mut dyn FnMut(usize, Option<&[u8]>),
) -> Result<()> {
    match root {
        Some(root) => descend(tree, &tree.top(root)?, 0, keys, 0, found),
        None => {
            (0..keys.len()).for_each(|i| found(i, None));
            Ok(())
        }
    }
}

fn descend(
    tree: Tree<'_>,
    node: &Node,
    depth: usize,
    keys: &[&[u8]],
    first: usize,
    found: &mut dyn FnMut(usize, Option<&[u8]>),
) -> Result<()> {
    let mut done = 0;
    while done < keys.len() {
        let i = node.first_at_least(keys[done]);
        if i == node.len() {
            (done..keys.len()).for_each(|k| found(first + k, None));
            return Ok(());
        }
        if node.is_leaf {
            found(first + done, (node.key(i) == keys[done]).then(|| node.value(i)));
            done += 1;
        } else {
            let below = keys[done..].partition_point(|key| *key <= node.key(i));
            descend(tree, &tree.below(node, i, depth)?, depth + 1, &keys[done..done + below], first + done, found)?;
            done += below;
        }
    }
    Ok(())
}

/// Is shown a key and its value; breaks if it has seen enough.
pub(crate) type Visit<'a> = dyn FnMut(&[u8], &[u8]) -> ControlFlow<()> + 'a;

/// Visits the entries whose key is at or after `from`, in order, until `visit` breaks.
pub(crate) fn scan(
    tree: Tree<'_>,
    root: Option<&Root>,
    from: Bound<&[u8]>,
    visit: &mut Visit<'_>,
) -> Result<ControlFlow<()>> {
    let Some(root) = root else { return Ok(ControlFlow::Continue(())) };
    let mut last: Option<Vec<u8>> = None;
    walk(tree, &tree.top(root)?, 0, from, &mut last, visit)
}

fn walk(
    tree: Tree<'_>,
    node: &Node,
    depth: usize,
    from: Bound<&[u8]>,
    last: &mut Option<Vec<u8>>,
    visit: &mut Visit<'_>,
) -> Result<ControlFlow<()>> {
    if node.is_leaf {
        // Within a node the order is known; this is about the order of leaves.
        if last.as_deref().is_some_and(|last| node.key(0) <= last) {
            return Err(tree.source.corrupt(node.at, "tree keys out of order"));
        }
        *last = Some(node.last_key().to_vec());
    }
    let start = match from {
        Bound::Unbounded => 0,
        Bound::Included(key) => node.first_at_least(key),
        Bound::Excluded(key) => {
            let i = node.first_at_least(key);
            if i < node.len() && node.key(i) == key { i + 1 } else { i }
        }
    };
    for i in start..node.len() {
        let flow = if node.is_leaf {
            visit(node.key(i), node.value(i))
        } else {
            walk(tree, &tree.below(node, i, depth)?, depth + 1, from, last, visit)?
        };
        if flow.is_break() {
            return Ok(flow);
        }
    }
    Ok(ControlFlow::Continue(()))
}

/// How many entries have a key at or after `from`, believing the sums of all children but the one `from` falls into.
pub(crate) fn count_from(tree: Tree<'_>, root: Option<&Root>, from: &[u8]) -> Result<u64> {
    let Some(root) = root else { return Ok(0) };
    let mut node = tree.top(root)?;
    let mut count = 0u64;
    for depth in 0.. {
        let first = node.first_at_least(from);
        if node.is_leaf {
            count = count.saturating_add((node.len() - first) as u64);
            break;
        }
        for i in first + 1..node.len() {
            count = count.saturating_add(node.child(tree.kind, i).reduce.alive);
        }
        if first == node.len() {
            break;
        }
        node = tree.below(&node, first, depth)?;
    }
    Ok(count)
}
