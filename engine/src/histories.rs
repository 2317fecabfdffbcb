//! Every short history of sync writes, against a model that counts anew each time.
//!
//! The states that can be reached are walked through by breadth: whatever order prepares, acknowledgements, syncs, deadlines,
//! changes of the chains and promotions come in, the tracker must decide what the model decides, when it does. The model knows
//! of each node which prepares it has, one by one, and goes over all of them after every event.

use std::collections::{BTreeSet, HashSet};
use std::time::Duration;

use changelog::Watermarks;
use types::{Cas, Datatype, Item, KeyBuf, Kind, Level, Meta, RevSeqno, Seqno};

use crate::chain::{Chains, Chance, Topology};
use crate::durability::{SyncWrite, Tracker, Verdict};

const LEVELS: [Level; 3] = [Level::Majority, Level::MajorityAndPersistActive, Level::PersistMajority];
const REPLICAS: [&str; 2] = ["b", "c"];

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Event {
    Prepare(Level),
    /// A replica has one prepare more.
    Ack(usize),
    /// One prepare more is on the active's disk.
    Persist,
    /// The deadline of one prepare more is past.
    Expire,
    Topology(usize),
    /// What is under way is another node's, which may have acknowledged it.
    Promote,
    /// A replica has lost everything.
    Restart(usize),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Committed,
    Aborted,
}

fn topologies() -> Vec<Topology> {
    let chain = |nodes: &[&str]| nodes.iter().map(|n| (*n != "-").then(|| (*n).to_owned())).collect();
    vec![
        vec![chain(&["a"])],
        vec![chain(&["a", "b"])],
        vec![chain(&["a", "b", "c"])],
        vec![chain(&["a", "b", "-"])],
        vec![chain(&["a", "-"])],
        vec![chain(&["a", "b"]), chain(&["c", "a"])],
        vec![chain(&["a", "b"]), chain(&["c"])],
    ]
}

/// What really is.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Model {
    /// Level, and whether somebody waits for it. Seqnos are places from 1 on.
    prepares: Vec<(Level, bool)>,
    decided: usize,
    has: [BTreeSet<usize>; 2],
    on_disk: BTreeSet<usize>,
    expired: BTreeSet<usize>,
    topology: usize,
}

impl Model {
    fn happens(&mut self, event: Event) {
        let next_in = |set: &BTreeSet<usize>| (1..).find(|n| !set.contains(n)).expect("there is always one more");
        match event {
            Event::Prepare(level) => self.prepares.push((level, true)),
            Event::Ack(node) => _ = self.has[node].insert(next_in(&self.has[node])),
            Event::Persist => _ = self.on_disk.insert(next_in(&self.on_disk)),
            Event::Expire => _ = self.expired.insert(next_in(&self.expired)),
            Event::Topology(n) => self.topology = n,
            Event::Promote => self.prepares.iter_mut().for_each(|prepare| prepare.1 = false),
            Event::Restart(node) => self.has[node].clear(),
        }
    }

    fn may(&self, event: Event, prepares_max: usize) -> bool {
        let count = self.prepares.len();
        match event {
            Event::Prepare(_) => count < prepares_max,
            Event::Ack(node) => self.has[node].len() < count,
            Event::Persist => self.on_disk.len() < count,
            Event::Expire => self.expired.len() < count,
            Event::Topology(n) => self.topology != n,
            Event::Promote => self.prepares[self.decided..].iter().any(|(_, is_awaited)| *is_awaited),
            Event::Restart(node) => !self.has[node].is_empty(),
        }
    }

    fn decide(&mut self, topologies: &[Topology]) -> Vec<(usize, Outcome)> {
        let mut outcomes = Vec::new();
        while let Some(&(level, is_awaited)) = self.prepares.get(self.decided) {
            let n = self.decided + 1;
            let is_here = self.on_disk.contains(&n);
            let has = |node: &str| match REPLICAS.iter().position(|replica| *replica == node) {
                None => true,
                Some(replica) => self.has[replica].contains(&n),
            };
            let chains = &topologies[self.topology];
            let is_majority = |chain: &[Option<String>], count: &dyn Fn(&str) -> bool| {
                chain.iter().flatten().filter(|node| count(node)).count() * 2 > chain.len()
            };
            let by_all = |count: &dyn Fn(&str) -> bool| chains.iter().all(|chain| is_majority(chain, count));
            // What may have been acknowledged is settled by those who are left.
            let by_those_left =
                || chains.iter().all(|chain| chain.iter().flatten().all(|node| has(node)) || is_majority(chain, &has));
            let has_all = if is_awaited { by_all(&has) } else { by_those_left() };
            let outcome = if has_all && (level == Level::Majority || is_here) {
                Outcome::Committed
            } else if is_awaited && (self.expired.contains(&n) || !by_all(&|_| true)) {
                Outcome::Aborted
            } else {
                break;
            };
            outcomes.push((n, outcome));
            self.decided += 1;
        }
        outcomes
    }
}

/// The thing itself, beside what it is told.
struct System {
    tracker: Tracker,
    durable: u64,
    prepares: u64,
    expired: u64,
    acked: [u64; 2],
}

impl System {
    fn new(topology: &Topology) -> System {
        let mut system = System { tracker: Tracker::default(), durable: 0, prepares: 0, expired: 0, acked: [0; 2] };
        system.set_topology(topology);
        system
    }

    /// The same again: those who wait are left out.
    fn fork(&self) -> System {
        let mut tracker = Tracker::default();
        for write in self.tracker.writes() {
            let (seqno, level, deadline) = (write.seqno, write.level, write.deadline);
            tracker.push(SyncWrite { seqno, level, prepare: write.prepare.clone(), deadline, client: None });
        }
        tracker.chains = self.tracker.chains.clone();
        tracker.is_impossible = self.tracker.is_impossible;
        System { tracker, ..*self }
    }

    fn set_topology(&mut self, topology: &Topology) {
        let before = self.tracker.chains.take();
        self.tracker.chains = Chains::of(topology, before.as_deref()).map(Box::new);
        self.tracker.is_impossible = Chance::of(topology) == Chance::Impossible;
        // As replicas do when they connect again.
        self.acked.iter().zip(REPLICAS).for_each(|(seqno, node)| tell(&mut self.tracker, node, *seqno));
    }

    fn happens(&mut self, event: Event, topologies: &[Topology]) {
        match event {
            Event::Prepare(level) => {
                self.prepares += 1;
                let deadline = Some(Duration::from_secs(self.prepares));
                let seqno = Seqno(self.prepares);
                self.tracker.push(SyncWrite { seqno, level, prepare: prepare(seqno, level), deadline, client: None });
            }
            Event::Ack(node) => {
                self.acked[node] += 1;
                tell(&mut self.tracker, REPLICAS[node], self.acked[node]);
            }
            Event::Persist => self.durable += 1,
            Event::Expire => self.expired += 1,
            Event::Topology(n) => self.set_topology(&topologies[n]),
            Event::Promote => {
                for write in self.tracker.drain() {
                    self.tracker.push(SyncWrite { deadline: None, ..write });
                }
            }
            Event::Restart(node) => {
                self.acked[node] = 0;
                if let Some(chains) = &mut self.tracker.chains {
                    chains.begin_anew(REPLICAS[node], Seqno(0));
                }
            }
        }
    }

    fn decide(&mut self) -> Vec<(usize, Outcome)> {
        let (marks, now) = (Watermarks::default(), Duration::from_secs(self.expired));
        marks.roll_back(Seqno(self.durable), Seqno(0));
        assert!(self.tracker.begin());
        let next = || {
            self.tracker.next(&marks, now).map(|verdict| match verdict {
                Verdict::Commit(write) => (write.seqno.0 as usize, Outcome::Committed),
                Verdict::Abort(write, _) => (write.seqno.0 as usize, Outcome::Aborted),
                Verdict::Ambiguous(_) => unreachable!("no disk fails here"),
            })
        };
        std::iter::from_fn(next).collect()
    }

    /// All that what it does next depends on.
    fn state(&self) -> String {
        let writes: Vec<_> = self.tracker.writes().map(|w| (w.seqno, w.level, w.deadline)).collect();
        let (chains, is_impossible) = (&self.tracker.chains, self.tracker.is_impossible);
        format!("{writes:?} {chains:?} {is_impossible} {} {} {:?}", self.durable, self.expired, self.acked)
    }
}

fn prepare(seqno: Seqno, level: Level) -> Item {
    let key = KeyBuf::in_default_collection(b"k").expect("short");
    let (cas, rev, datatype) = (Cas(seqno.0), RevSeqno(1), Datatype::RAW);
    let meta = Meta { seqno, cas, rev, flags: 0, expiry: 0, datatype, deleted: None };
    Item::new(key.as_key(), meta, Kind::Prepare { level }, None)
}

fn tell(tracker: &mut Tracker, node: &str, seqno: u64) {
    if let Some(chains) = &mut tracker.chains {
        chains.ack(node, Seqno(seqno));
    }
}

/// Walks through all states with up to so many prepares, from the topology `first` on. Returns how many there are.
fn walk(prepares_max: usize, first: usize, events: &[Event]) -> usize {
    let topologies = topologies();
    let model = Model {
        prepares: Vec::new(),
        decided: 0,
        has: Default::default(),
        on_disk: BTreeSet::new(),
        expired: BTreeSet::new(),
        topology: first,
    };
    let mut seen = HashSet::new();
    let mut next = vec![(model, System::new(&topologies[first]), Vec::new())];
    while let Some((model, system, history)) = next.pop() {
        for event in events.iter().filter(|event| model.may(**event, prepares_max)) {
            let (mut model, mut system, mut history) = (model.clone(), system.fork(), history.clone());
            history.push(*event);
            model.happens(*event);
            system.happens(*event, &topologies);
            let (expected, found) = (model.decide(&topologies), system.decide());
            assert_eq!(found, expected, "from topology {first}: {history:?}");
            if seen.insert((model.clone(), system.state())) {
                next.push((model, system, history));
            }
        }
    }
    seen.len()
}

fn all_but_topologies() -> Vec<Event> {
    let mut events: Vec<_> = LEVELS.map(Event::Prepare).to_vec();
    events.extend([Event::Ack(0), Event::Ack(1), Event::Persist, Event::Expire]);
    events
}

#[test]
fn four_writes_of_any_level_are_decided_as_the_model_says_in_any_order_of_events() {
    let states = walk(4, 2, &all_but_topologies());
    assert!(states > 10_000, "{states} states");
}

#[test]
fn three_writes_are_decided_as_the_model_says_by_one_chain_of_two_nodes_and_by_two_chains() {
    for first in [1, 5] {
        let states = walk(3, first, &all_but_topologies());
        assert!(states > 500, "{states} states from topology {first}");
    }
}

#[test]
fn two_writes_are_decided_as_the_model_says_whatever_becomes_of_nodes_and_chains() {
    let mut events = all_but_topologies();
    events.extend((0..topologies().len()).map(Event::Topology));
    events.extend([Event::Promote, Event::Restart(0), Event::Restart(1)]);
    let states = walk(2, 1, &events);
    assert!(states > 1_000, "{states} states");
}
