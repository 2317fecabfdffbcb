//! Changing a tree in one pass, node for node as the original library does: the same batches on the same tree give
//! the same nodes with the same entries.

use std::ops::Range;

use super::node::Entries;
use super::{Child, FILL_BYTES, Kind, Node, Root, SPLIT_BYTES, Tree};
use crate::error::Result;
use crate::source::Appender;

/// What is to become of one key.
pub(crate) struct Action {
    pub key: Vec<u8>,
    pub op: Op,
}

pub(crate) enum Op {
    Remove,
    /// Adds the entry or replaces its value.
    Insert(Vec<u8>),
}

/// Hears of each action, by its index, which value its key has; may object.
pub(crate) type Met<'a> = dyn FnMut(usize, Option<&[u8]>) -> Result<()> + 'a;

/// Applies `actions`, in ascending order of key (for one key: at most a removal, then an insertion), and returns the
/// new root. `before` hears of each action, by its index, what it met.
pub(crate) fn modify(
    tree: Tree<'_>,
    root: Option<Root>,
    actions: &[Action],
    out: &mut Appender,
    before: &mut Met<'_>,
) -> Result<Option<Root>> {
    let kind = tree.kind;
    let mut change = Change { tree, actions, out, before };
    let mut level = Builder::new(kind, false);
    match root {
        _ if actions.is_empty() => return Ok(root),
        None => change.leaf(None, 0..actions.len(), &mut level, None)?,
        Some(root) => {
            let node = change.tree.top(&root)?;
            let itself = Child { at: root.at, subtree_bytes: root.subtree_bytes, reduce: root.reduce };
            change.node(&node, 0, 0..actions.len(), &mut level, itself)?;
        }
    }
    if !level.modified {
        return Ok(root);
    }
    // `level` holds the pointers of the former top's level; add levels above it until one pointer is left.
    if level.written.is_empty() && level.queued.len() <= 1 {
        return Ok(level.only_pointer());
    }
    level.finish(change.out)?;
    while level.written.len() > 1 {
        let mut above = Builder::new(kind, false);
        above.modified = true;
        for (key, child) in level.written {
            above.push_child(&key, &child, change.out)?;
        }
        above.finish(change.out)?;
        level = above;
    }
    Ok(level.written.pop().map(|(_, child)| child.into()))
}

struct Change<'a, 'b> {
    tree: Tree<'a>,
    actions: &'b [Action],
    out: &'b mut Appender,
    before: &'b mut Met<'b>,
}

impl Change<'_, '_> {
    /// Applies the actions of `span` below `node`; `itself` is what points at `node` today.
    fn node(
        &mut self,
        node: &Node,
        depth: usize,
        span: Range<usize>,
        parent: &mut Builder,
        itself: Child,
    ) -> Result<()> {
        if node.is_leaf {
            return self.leaf(Some(node), span, parent, Some(itself));
        }
        let mut builder = Builder::new(self.tree.kind, false);
        let mut next = span.start;
        for i in 0..node.len() {
            let is_last = i + 1 == node.len();
            let below = match is_last {
                true => span.end,
                false => next + self.actions[next..span.end].partition_point(|a| *a.key <= *node.key(i)),
            };
            if below == next {
                builder.push(node.key(i), node.value(i), self.out)?;
            } else {
                let child = self.tree.below(node, i, depth)?;
                let itself = node.child(self.tree.kind, i);
                self.node(&child, depth + 1, next..below, &mut builder, itself)?;
                next = below;
            }
        }
        builder.hand_over(parent, node.last_key(), Some(itself), self.out)
    }

    fn leaf(
        &mut self,
        node: Option<&Node>,
        span: Range<usize>,
        parent: &mut Builder,
        itself: Option<Child>,
    ) -> Result<()> {
        let mut builder = Builder::new(self.tree.kind, true);
        let mut next = span.start;
        for i in 0..node.map_or(0, Node::len) {
            let node = node.expect("it has entries");
            let (key, value) = (node.key(i), node.value(i));
            while next < span.end && *self.actions[next].key < *key {
                self.act(next, None, &mut builder)?;
                next += 1;
            }
            let mut met = Some(value);
            while next < span.end && *self.actions[next].key == *key {
                self.act(next, met.take(), &mut builder)?;
                next += 1;
            }
            if let Some(value) = met {
                builder.push(key, value, self.out)?;
            }
        }
        while next < span.end {
            self.act(next, None, &mut builder)?;
            next += 1;
        }
        builder.hand_over(parent, node.map_or(&[], Node::last_key), itself, self.out)
    }

    fn act(&mut self, i: usize, met: Option<&[u8]>, builder: &mut Builder) -> Result<()> {
        (self.before)(i, met)?;
        builder.modified = true;
        let action = &self.actions[i];
        match &action.op {
            Op::Remove => Ok(()),
            Op::Insert(value) => builder.push(&action.key, value, self.out),
        }
    }
}

/// One node being rewritten, as however many nodes it becomes.
struct Builder {
    kind: Kind,
    is_leaf: bool,
    queued: Entries,
    modified: bool,
    /// Nodes written so far, and their last keys.
    written: Vec<(Vec<u8>, Child)>,
}

impl Builder {
    fn new(kind: Kind, is_leaf: bool) -> Builder {
        Builder { kind, is_leaf, queued: Entries::default(), modified: false, written: Vec::new() }
    }

    fn push(&mut self, key: &[u8], value: &[u8], out: &mut Appender) -> Result<()> {
        self.queued.push(key, value);
        if self.modified && self.queued.len() > 3 && self.queued.byte_len() > SPLIT_BYTES {
            let at_least = if self.is_leaf { 1 } else { 2 };
            self.write(self.queued.count_filling(FILL_BYTES).max(at_least), out)?;
        }
        Ok(())
    }

    fn push_child(&mut self, key: &[u8], child: &Child, out: &mut Appender) -> Result<()> {
        let value = child.encode(self.kind);
        self.push(key, &value, out)
    }

    fn write(&mut self, count: usize, out: &mut Appender) -> Result<()> {
        let node = self.queued.write(count, self.kind, self.is_leaf, out)?;
        self.written.push(node);
        Ok(())
    }

    fn finish(&mut self, out: &mut Appender) -> Result<()> {
        match self.queued.len() {
            0 => Ok(()),
            all => self.write(all, out),
        }
    }

    /// Ends this node: `parent` gets what replaces it, or `itself` if nothing does. An emptied node vanishes.
    fn hand_over(
        mut self,
        parent: &mut Builder,
        last_key: &[u8],
        itself: Option<Child>,
        out: &mut Appender,
    ) -> Result<()> {
        if !self.modified {
            return itself.map_or(Ok(()), |itself| parent.push_child(last_key, &itself, out));
        }
        self.finish(out)?;
        parent.modified = true;
        self.written.iter().try_for_each(|(key, child)| parent.push_child(key, child, out))
    }

    fn only_pointer(&self) -> Option<Root> {
        self.queued.first_value().and_then(|value| Child::decode(self.kind, value)).map(Root::from)
    }
}

const _: () = assert!(FILL_BYTES == 852 && SPLIT_BYTES == 1279);
