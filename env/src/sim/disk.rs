//! The disk under the simulation: what programs see, and what would be left if the power went now.
//!
//! ```text
//! write, set_size ──▶ cached ──▶ unsynced changes ── sync ─────▶ durable bytes
//! create, rename, remove ──▶ live entries ──▶ journal ── sync_dir ──▶ durable entries
//!                                               │
//!                                               └── power cut: some survive, see `Fate`
//! ```
//!
//! This module knows no faults, paths or handles; it keeps nodes and says what a cut makes of them.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use super::dice::{Dice, mix};

pub type NodeId = u64;
pub const ROOT: NodeId = 0;

const SECTOR_BYTES: u64 = 512;
const PAGE_BYTES: u64 = 4096;

/// What a power cut makes of changes that were not synced. Synced ones always stay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// All are lost.
    LoseUnsynced,
    /// All are kept.
    KeepUnsynced,
    /// By chance, file by file: lost; kept; the first few kept and the next torn at any byte; any subset of the
    /// writes; any mix of versions by 512-byte sector or 4 KiB page; a grown size kept with or without the data,
    /// or lost. Entries of directories: lost; kept; the first few; or any subset in which nothing outlives an
    /// earlier change to the same name or the same file. A rename is kept whole or lost whole.
    Seeded(u64),
}

impl From<u64> for Fate {
    fn from(seed: u64) -> Fate {
        Fate::Seeded(seed)
    }
}

#[derive(Clone)]
enum Change {
    Write { at: u64, bytes: Vec<u8> },
    Size(u64),
}

impl Change {
    fn apply(&self, image: &mut Vec<u8>) {
        match self {
            Change::Write { at, bytes } => put(image, bytes, *at),
            Change::Size(size) => image.resize(*size as usize, 0),
        }
    }
}

fn put(image: &mut Vec<u8>, bytes: &[u8], at: u64) {
    if bytes.is_empty() {
        return;
    }
    let (start, end) = (at as usize, at as usize + bytes.len());
    if image.len() < end {
        image.resize(end, 0);
    }
    image[start..end].copy_from_slice(bytes);
}

/// A file's bytes.
/// 1. `cached` is what reads see.
/// 2. `durable` with every `unsynced` change applied is `cached`, unless a sync failed or lied.
#[derive(Clone, Default)]
pub struct FileNode {
    cached: Vec<u8>,
    durable: Vec<u8>,
    unsynced: Vec<Change>,
    linked: bool,
    opens: u64,
}

impl FileNode {
    fn in_use(&self) -> bool {
        self.linked || self.opens > 0
    }

    fn settle(&mut self) {
        for change in self.unsynced.drain(..) {
            change.apply(&mut self.durable);
        }
    }

    /// What the device would hold after a cut.
    fn survivor(&self, fate: Fate) -> Vec<u8> {
        let mut image = self.durable.clone();
        match fate {
            Fate::LoseUnsynced => {}
            Fate::KeepUnsynced => self.unsynced.iter().for_each(|change| change.apply(&mut image)),
            Fate::Seeded(seed) => self.roll(&mut image, &mut Dice::new(seed)),
        }
        image
    }

    fn roll(&self, image: &mut Vec<u8>, dice: &mut Dice) {
        if self.unsynced.is_empty() {
            return;
        }
        match dice.below(6) {
            0 => return,
            1 => return self.unsynced.iter().for_each(|change| change.apply(image)),
            2 => self.keep_first_few(image, dice),
            3 => self.unsynced.iter().filter(|_| dice.coin()).for_each(|change| change.apply(image)),
            4 => self.keep_versions(image, dice, SECTOR_BYTES),
            _ => self.keep_versions(image, dice, PAGE_BYTES),
        }
        match dice.below(3) {
            0 if image.len() < self.cached.len() => image.resize(self.cached.len(), 0),
            1 if image.len() > self.durable.len() => image.truncate(self.durable.len()),
            _ => {}
        }
    }

    fn keep_first_few(&self, image: &mut Vec<u8>, dice: &mut Dice) {
        let whole = dice.below(self.unsynced.len() as u64 + 1) as usize;
        self.unsynced[..whole].iter().for_each(|change| change.apply(image));
        if let Some(Change::Write { at, bytes }) = self.unsynced.get(whole) {
            let tear = dice.below(bytes.len() as u64 + 1) as usize;
            if dice.coin() {
                put(image, &bytes[..tear], *at);
            } else {
                put(image, &bytes[tear..], at + tear as u64);
            }
        }
    }

    /// Each block of the file reached the device at some moment of its own: it holds the changes up to then.
    fn keep_versions(&self, image: &mut Vec<u8>, dice: &mut Dice, block_bytes: u64) {
        let seed = dice.next();
        let changes = self.unsynced.len() as u64;
        let version = |block: u64| {
            let roll = mix(seed ^ mix(block));
            match roll & 3 {
                0 => 0,
                1 => changes,
                _ => (roll >> 2) % (changes + 1),
            }
        };
        // A size is the file's and not a block's, so its moment is drawn apart from the blocks'.
        let size_version = version(u64::MAX);
        for (n, change) in (0..).zip(&self.unsynced) {
            match change {
                Change::Size(_) if n < size_version => change.apply(image),
                Change::Size(_) => {}
                Change::Write { at, bytes } => {
                    let mut done = 0;
                    while done < bytes.len() {
                        let here = at + done as u64;
                        let room = block_bytes - here % block_bytes;
                        let next = bytes.len().min(done + room as usize);
                        if n < version(here / block_bytes) {
                            put(image, &bytes[done..next], here);
                        }
                        done = next;
                    }
                }
            }
        }
    }
}

/// A directory's entries, as seen and as sure to survive.
#[derive(Clone, Default)]
struct DirNode {
    live: BTreeMap<String, NodeId>,
    durable: BTreeMap<String, NodeId>,
}

#[derive(Clone)]
enum Node {
    File(FileNode),
    Dir(DirNode),
}

/// A name in a directory.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Slot {
    pub dir: NodeId,
    pub name: String,
}

/// A change of entries that is not durable yet: `node` leaves `from` and appears at `to`, in one step.
#[derive(Clone)]
struct Move {
    node: NodeId,
    from: Option<Slot>,
    to: Option<Slot>,
}

impl Move {
    fn slots(&self) -> impl Iterator<Item = &Slot> {
        self.from.iter().chain(&self.to)
    }

    fn touches(&self, dirs: &BTreeSet<NodeId>) -> bool {
        self.slots().any(|slot| dirs.contains(&slot.dir))
    }
}

/// The nodes of a disk, reachable or merely open.
/// 1. Node 0 is the root; it is always durable.
/// 2. A file has at most one live name.
/// 3. `used_bytes` is the sum of the cached sizes of the files that are linked or open.
#[derive(Clone)]
pub struct Disk {
    nodes: HashMap<NodeId, Node>,
    next_id: NodeId,
    journal: Vec<Move>,
    used_bytes: u64,
    garbage: u32,
}

impl Disk {
    pub fn new() -> Disk {
        let nodes = HashMap::from([(ROOT, Node::Dir(DirNode::default()))]);
        Disk { nodes, next_id: ROOT + 1, journal: Vec::new(), used_bytes: 0, garbage: 0 }
    }

    pub fn used_bytes(&self) -> u64 {
        self.used_bytes
    }

    /// The live entries, or `None` if `id` is a file.
    pub fn entries(&self, id: NodeId) -> Option<&BTreeMap<String, NodeId>> {
        match self.nodes.get(&id)? {
            Node::Dir(dir) => Some(&dir.live),
            Node::File(_) => None,
        }
    }

    pub fn bytes(&self, id: NodeId) -> &[u8] {
        &self.file(id).cached
    }

    pub fn has_unsynced(&self) -> bool {
        let unsynced = |node: &Node| matches!(node, Node::File(file) if file.in_use() && !file.unsynced.is_empty());
        !self.journal.is_empty() || self.nodes.values().any(unsynced)
    }

    pub fn create_file(&mut self, slot: Slot) -> NodeId {
        self.add(slot, Node::File(FileNode { linked: true, ..FileNode::default() }))
    }

    pub fn create_dir(&mut self, slot: Slot) -> NodeId {
        self.add(slot, Node::Dir(DirNode::default()))
    }

    /// Takes `from` to `to`, replacing what is there. The caller has checked that this is allowed.
    pub fn rename(&mut self, from: Slot, to: Slot) {
        let node = self.dir(from.dir).live.remove(&from.name).expect("the caller looked it up");
        if let Some(replaced) = self.dir(to.dir).live.insert(to.name.clone(), node) {
            self.unlinked(replaced);
        }
        self.journal.push(Move { node, from: Some(from), to: Some(to) });
    }

    pub fn remove(&mut self, slot: Slot) {
        let node = self.dir(slot.dir).live.remove(&slot.name).expect("the caller looked it up");
        self.unlinked(node);
        self.journal.push(Move { node, from: Some(slot), to: None });
    }

    pub fn opened(&mut self, id: NodeId) {
        self.file_mut(id).opens += 1;
    }

    pub fn closed(&mut self, id: NodeId) {
        let file = self.file_mut(id);
        file.opens -= 1;
        if !file.in_use() {
            self.used_bytes -= file.cached.len() as u64;
            self.garbage += 1;
        }
    }

    pub fn write(&mut self, id: NodeId, bytes: &[u8], at: u64) {
        self.change(id, Change::Write { at, bytes: bytes.to_vec() });
    }

    pub fn set_size(&mut self, id: NodeId, size: u64) {
        self.change(id, Change::Size(size));
    }

    pub fn sync(&mut self, id: NodeId) {
        self.file_mut(id).settle();
    }

    /// A sync that did not keep its promise: what `fate` spares is durable, the rest stays readable but no
    /// later sync will write it.
    pub fn fail_sync(&mut self, id: NodeId, fate: Fate) {
        let file = self.file_mut(id);
        file.durable = file.survivor(fate);
        file.unsynced.clear();
    }

    /// Makes the moves of `dir` durable. A rename across directories takes the other one along, so that it
    /// stays one step.
    pub fn sync_dir(&mut self, dir: NodeId) {
        for step in self.take_journal(dir) {
            self.settle(&step);
        }
        if self.garbage > 256 {
            self.forget_unreachable();
        }
    }

    /// As [`Disk::fail_sync`], for entries.
    pub fn fail_sync_dir(&mut self, dir: NodeId, fate: Fate) {
        for step in surviving(self.take_journal(dir), fate) {
            self.settle(&step);
        }
    }

    /// Forgets clean pages that only memory holds: after a failed sync, reads see what the device has.
    pub fn drop_clean_pages(&mut self) {
        for node in self.nodes.values_mut() {
            let Node::File(file) = node else { continue };
            file.cached = file.survivor(Fate::KeepUnsynced);
        }
        self.recount();
    }

    /// The program died: nothing is open any more.
    pub fn close_all(&mut self) {
        for node in self.nodes.values_mut() {
            if let Node::File(file) = node {
                file.opens = 0;
            }
        }
        self.forget_unreachable();
        self.recount();
    }

    /// The power went and came back: only what is durable, or spared by `fate`, is there.
    pub fn power_cut(&mut self, fate: Fate) {
        for step in surviving(std::mem::take(&mut self.journal), reseeded(fate, u64::MAX)) {
            self.settle(&step);
        }
        for (id, node) in &mut self.nodes {
            match node {
                Node::File(file) => {
                    file.durable = file.survivor(reseeded(fate, *id));
                    file.cached.clone_from(&file.durable);
                    file.unsynced.clear();
                    file.linked = false;
                }
                Node::Dir(dir) => dir.live.clone_from(&dir.durable),
            }
        }
        for id in self.reachable() {
            if let Some(Node::File(file)) = self.nodes.get_mut(&id) {
                file.linked = true;
            }
        }
        self.close_all();
    }

    /// Makes everything durable as it is now.
    pub fn settle_all(&mut self) {
        for step in std::mem::take(&mut self.journal) {
            self.settle(&step);
        }
        for node in self.nodes.values_mut() {
            if let Node::File(file) = node {
                file.settle();
            }
        }
    }

    /// Flips bits on the device and in memory. False if the file is not that long, or the byte not yet durable.
    pub fn corrupt(&mut self, id: NodeId, at: u64, xor: u8) -> bool {
        let file = self.file_mut(id);
        match (file.cached.get_mut(at as usize), file.durable.get_mut(at as usize)) {
            (Some(cached), Some(durable)) => {
                *cached ^= xor;
                *durable ^= xor;
                true
            }
            _ => false,
        }
    }

    /// Makes `slot` a file with these bytes, seen and durable at once; its directory must be durable.
    pub fn place_file(&mut self, slot: Slot, bytes: &[u8]) {
        let found = self.entries(slot.dir).and_then(|entries| entries.get(&slot.name)).copied();
        let id = found.unwrap_or_else(|| self.create_file(slot));
        self.set_size(id, 0);
        self.write(id, bytes, 0);
        self.settle_all();
    }

    fn add(&mut self, slot: Slot, node: Node) -> NodeId {
        let id = self.next_id;
        self.next_id += 1;
        self.nodes.insert(id, node);
        let replaced = self.dir(slot.dir).live.insert(slot.name.clone(), id);
        assert!(replaced.is_none(), "the caller saw that the name is free");
        self.journal.push(Move { node: id, from: None, to: Some(slot) });
        id
    }

    fn change(&mut self, id: NodeId, change: Change) {
        let file = self.file_mut(id);
        let before = file.cached.len() as u64;
        change.apply(&mut file.cached);
        let after = file.cached.len() as u64;
        file.unsynced.push(change);
        self.used_bytes = self.used_bytes - before + after;
    }

    fn unlinked(&mut self, id: NodeId) {
        self.garbage += 1;
        if let Some(Node::File(file)) = self.nodes.get_mut(&id) {
            file.linked = false;
            if !file.in_use() {
                self.used_bytes -= file.cached.len() as u64;
            }
        }
    }

    fn take_journal(&mut self, dir: NodeId) -> Vec<Move> {
        let mut dirs = BTreeSet::from([dir]);
        loop {
            let before = dirs.len();
            for step in self.journal.iter().filter(|step| step.touches(&dirs)).collect::<Vec<_>>() {
                dirs.extend(step.slots().map(|slot| slot.dir));
            }
            if dirs.len() == before {
                break;
            }
        }
        let (taken, left) = self.journal.drain(..).partition(|step| step.touches(&dirs));
        self.journal = left;
        taken
    }

    fn settle(&mut self, step: &Move) {
        if let Some(from) = &step.from {
            let entries = &mut self.dir(from.dir).durable;
            if entries.get(&from.name) == Some(&step.node) {
                entries.remove(&from.name);
            }
        }
        if let Some(to) = &step.to {
            self.dir(to.dir).durable.insert(to.name.clone(), step.node);
        }
    }

    /// Nodes with a live path from the root.
    fn reachable(&self) -> HashSet<NodeId> {
        let mut found = HashSet::from([ROOT]);
        let mut ahead = vec![ROOT];
        while let Some(id) = ahead.pop() {
            for child in self.entries(id).into_iter().flat_map(BTreeMap::values) {
                if found.insert(*child) {
                    ahead.push(*child);
                }
            }
        }
        found
    }

    fn forget_unreachable(&mut self) {
        let mut kept = HashSet::from([ROOT]);
        for (id, node) in &self.nodes {
            match node {
                Node::File(file) if file.in_use() => drop(kept.insert(*id)),
                Node::File(_) => {}
                Node::Dir(dir) => kept.extend(dir.live.values().chain(dir.durable.values())),
            }
        }
        for step in &self.journal {
            kept.insert(step.node);
            kept.extend(step.slots().map(|slot| slot.dir));
        }
        self.nodes.retain(|id, _| kept.contains(id));
        self.garbage = 0;
    }

    fn recount(&mut self) {
        let used = |node: &Node| match node {
            Node::File(file) if file.in_use() => file.cached.len() as u64,
            _ => 0,
        };
        self.used_bytes = self.nodes.values().map(used).sum();
    }

    fn file(&self, id: NodeId) -> &FileNode {
        match self.nodes.get(&id) {
            Some(Node::File(file)) => file,
            _ => panic!("node {id} is not a file"),
        }
    }

    fn file_mut(&mut self, id: NodeId) -> &mut FileNode {
        match self.nodes.get_mut(&id) {
            Some(Node::File(file)) => file,
            _ => panic!("node {id} is not a file"),
        }
    }

    fn dir(&mut self, id: NodeId) -> &mut DirNode {
        match self.nodes.get_mut(&id) {
            Some(Node::Dir(dir)) => dir,
            _ => panic!("node {id} is not a directory"),
        }
    }
}

/// A fate of its own for each node, whatever order they are visited in.
fn reseeded(fate: Fate, salt: u64) -> Fate {
    match fate {
        Fate::Seeded(seed) => Fate::Seeded(mix(seed ^ mix(salt))),
        all => all,
    }
}

/// The moves that outlive a cut, in order.
fn surviving(journal: Vec<Move>, fate: Fate) -> Vec<Move> {
    let Fate::Seeded(seed) = fate else {
        return if fate == Fate::KeepUnsynced { journal } else { Vec::new() };
    };
    let mut dice = Dice::new(seed);
    let len = journal.len() as u64;
    let (first_few, subset) = match dice.below(4) {
        0 => (0, false),
        1 => (len, false),
        2 => (dice.below(len + 1), false),
        _ => (0, true),
    };
    if !subset {
        return journal.into_iter().take(first_few as usize).collect();
    }
    let (mut lost_nodes, mut lost_slots) = (HashSet::new(), HashSet::new());
    let survives = |step: &Move| {
        let orphan = lost_nodes.contains(&step.node) || step.slots().any(|slot| lost_slots.contains(slot));
        let survives = dice.coin() && !orphan;
        if !survives {
            lost_nodes.insert(step.node);
            lost_slots.extend(step.slots().cloned());
        }
        survives
    };
    journal.into_iter().filter(survives).collect()
}
