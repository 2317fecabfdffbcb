//! Goal: no sync write that was acknowledged is lost as long as a majority has its disks, and none is invented, whoever
//! crashes, is cut off, has a disk that stands still or fails, comes back or takes over.
//!
//! Method: two or three whole engines on simulated disks, one vBucket, streams by direct calls that end in the middle of
//! snapshots, a coordinator that makes the replica with the highest mark active, clients that write each key one value after
//! the other. Persist-to-majority writes outlive any crash; a node whose sync failed does so too, some time later. In seeds
//! without crashes, where nodes are cut off, disks stand still and roles change all the same, every level must hold. At
//! the end all nodes have the same documents.
//!
//! `SETTEE_SIM_SEEDS=n` runs more seeds, `SETTEE_SIM_SEED=n` only this one. A failing seed is printed and replays.

mod common;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use changelog::{Cursor, FailoverEntry, FailoverTable};
use common::link::{VB, as_document, change};
use common::seeds::{self, Dice, for_each_seed};
use common::*;
use engine::*;
use env::sim::{Fate, Fault, FaultPlan, Op as Io, Rule};
use parking_lot::Mutex;
use persist::BucketSpec;
use types::{Item, Level, Seqno, VbState};

const SEEDS: u64 = 60;
const STEPS: u64 = 400;
const KEYS: u64 = 6;
const NAMES: [&str; 3] = ["a", "b", "c"];
const LEVELS: [Level; 3] = [Level::Majority, Level::MajorityAndPersistActive, Level::PersistMajority];

#[test]
fn no_acknowledged_write_is_lost_and_none_invented_whoever_crashes_and_takes_over() {
    for_each_seed(SEEDS, |seed, lived: &mut Lived| Cluster::new(seed).run(lived));
}

#[derive(Debug, Default)]
struct Lived {
    acknowledged: u64,
    ambiguous: u64,
    unknown: u64,
    crashes: u64,
    failed_syncs: u64,
    standstills: u64,
    promotions: u64,
    rollbacks: u64,
    rollbacks_to_nothing: u64,
    backfills: u64,
    recommits: u64,
    hand_overs: u64,
    hand_overs_undone: u64,
}

impl seeds::Lived for Lived {
    fn assert_thorough(&self) {
        let often = [self.acknowledged, self.crashes, self.promotions, self.backfills, self.standstills];
        let after_all = [self.rollbacks, self.rollbacks_to_nothing, self.recommits, self.failed_syncs];
        let hand_overs = [self.hand_overs, self.hand_overs_undone];
        let sometimes = [self.ambiguous, self.unknown].into_iter().chain(hand_overs).chain(after_all);
        assert!(often.iter().all(|n| *n >= 50) && sometimes.into_iter().all(|n| n >= 5), "{self:?}");
    }
}

/// A write that was asked for and not answered.
struct Asked {
    node: usize,
    number: u64,
    key: u64,
    value: u64,
    level: Option<Level>,
}

/// What is known of a key. Values are numbered in the order they were asked for.
#[derive(Default)]
struct Known {
    /// This value, or one that came later, is what the document must be; 0: nothing need be there.
    at_least: u64,
    /// May be the document.
    asked: Vec<u64>,
    under_way: bool,
}

/// A stream from the active to a replica.
struct Stream {
    cursor: Cursor,
    pending: VecDeque<Item>,
    /// What is released once all that is pending was applied.
    upto: Seqno,
    /// The part of a snapshot that the replica had when it asked: of prepares in it that were decided it may have nothing.
    half: (Seqno, Seqno),
    /// What is pending came from a disk once: no commits are sent, but the documents they make.
    is_unordered: bool,
}

impl Stream {
    fn change<'a>(&self, item: &'a Item) -> Change<'a> {
        match change(item) {
            Change::Commit { prepared, .. }
                if self.is_unordered || self.half.0 < prepared && prepared <= self.half.1 =>
            {
                as_document(item)
            }
            change => change,
        }
    }
}

struct Cluster {
    dice: Dice,
    nodes: Vec<Option<World>>,
    active: usize,
    /// Has on disk what the active had when the replica came to follow it; or is the active. Who does not has no say in who
    /// is next.
    follows: Vec<bool>,
    /// What it must have first.
    goals: Vec<Seqno>,
    /// Cannot be reached.
    cut_off: Option<usize>,
    /// Its disk does nothing for now.
    standing: Option<usize>,
    streams: Vec<Option<Stream>>,
    asked: Vec<Asked>,
    keys: BTreeMap<u64, Known>,
    values: u64,
    with_crashes: bool,
}

impl Cluster {
    fn new(seed: u64) -> Cluster {
        let mut dice = Dice(seed);
        let count = 2 + dice.below(2) as usize;
        let nodes = (0..count as u64).map(|n| {
            let (_, sim) = env::sim::env(seed << 8 | n);
            let log = dice.one_in(2).then(small_log);
            Some(World::open_with(sim, BucketSpec { vbuckets: 1, ..spec() }, log))
        });
        let nodes: Vec<_> = nodes.collect();
        let with_crashes = !dice.one_in(3);
        let cluster = Cluster {
            dice,
            active: 0,
            follows: vec![true; count],
            goals: vec![Seqno(0); count],
            cut_off: None,
            standing: None,
            streams: (0..count).map(|_| None).collect(),
            nodes,
            asked: Vec::new(),
            keys: (0..KEYS).map(|key| (key, Known::default())).collect(),
            values: 0,
            with_crashes,
        };
        let topology = cluster.topology();
        for n in 0..count {
            let state = if n == 0 { VbState::Active } else { VbState::Replica };
            cluster.world(n).bucket.set_vb_state(VB, state, Some(topology.clone())).unwrap();
            cluster.world(n).settle();
        }
        cluster
    }

    fn world(&self, n: usize) -> &World {
        self.nodes[n].as_ref().expect("up")
    }

    fn topology(&self) -> Topology {
        vec![self.chain_from(self.active)]
    }

    fn chain_from(&self, first: usize) -> Vec<Option<String>> {
        let others = (0..self.nodes.len()).filter(|n| *n != first);
        [first].into_iter().chain(others).map(|n| Some(NAMES[n].to_owned())).collect()
    }

    fn run(mut self, lived: &mut Lived) {
        for _ in 0..STEPS {
            self.step(lived);
            self.hear(lived);
        }
        self.heal(lived);
        self.check();
    }

    fn step(&mut self, lived: &mut Lived) {
        let n = self.dice.below(self.nodes.len() as u64) as usize;
        match self.dice.below(26) {
            0..=7 => self.write(lived),
            8 | 9 => self.read(),
            10..=15 => self.stream(n, lived),
            16..=19 if self.standing != Some(n) => {
                let steps = self.dice.below(6);
                (0..steps).for_each(|_| _ = self.world(n).stepper.step());
            }
            20 => self.running().for_each(|world| world.advance_s(1)),
            21 if self.dice.one_in(4) => self.running().for_each(|world| world.advance_s(31)),
            21 if self.standing != Some(n) => self.world(n).settle(),
            22 if self.with_crashes && self.dice.one_in(2) => self.crash(n, lived),
            22 => self.cut_off = if self.cut_off.is_none() { Some(n) } else { None },
            23 if self.standing.take().is_none() => {
                lived.standstills += 1;
                self.standing = Some(n);
            }
            24 if self.with_crashes && self.dice.one_in(4) => {
                let rule = Rule::new(Io::Sync, Fault::Errno(5)).nth(self.dice.below(3));
                self.world(n).sim.storage.arm(FaultPlan::new().rule(rule));
            }
            24 if self.is_poisoned(n) => {
                lived.failed_syncs += 1;
                self.crash(n, lived);
            }
            25 if self.dice.one_in(3) => self.fail_over(lived),
            25 if self.dice.one_in(2) => self.hand_over(lived),
            _ => {}
        }
    }

    /// Those whose disks do not stand still.
    fn running(&self) -> impl Iterator<Item = &World> {
        let is_running = |(n, _): &(usize, _)| self.standing != Some(*n);
        self.nodes.iter().enumerate().filter(is_running).filter_map(|(_, world)| world.as_ref())
    }

    /// A sync has failed; only a restart tells what is on its disk.
    fn is_poisoned(&self, n: usize) -> bool {
        self.world(n).bucket.vbucket(VB).unwrap().log.marks.poisoned().is_some()
    }

    fn write(&mut self, lived: &mut Lived) {
        let key = self.dice.below(KEYS);
        if self.keys[&key].under_way {
            return;
        }
        self.values += 1;
        let value = self.values;
        let level = LEVELS.get(self.dice.below(4) as usize).copied();
        let (name, body) = (k(&format!("key{key}")), value.to_string());
        let op = set(&body);
        let request = level.map_or(request(&name, op), |level| durable(&name, level, op));
        let (number, answer) = self.world(self.active).begin(&request);
        let asked = Asked { node: self.active, number, key, value, level };
        let known = self.keys.get_mut(&key).unwrap();
        known.asked.push(value);
        known.under_way = true;
        match answer {
            Some(answer) => self.answered(&asked, answer, lived),
            None => self.asked.push(asked),
        }
    }

    fn answered(&mut self, asked: &Asked, answer: OpResult, lived: &mut Lived) {
        let holds = match asked.level {
            None => false,
            Some(level) => level == Level::PersistMajority || !self.with_crashes,
        };
        let known = self.keys.get_mut(&asked.key).unwrap();
        known.under_way = false;
        match answer {
            Ok(_) if holds => {
                lived.acknowledged += 1;
                known.at_least = known.at_least.max(asked.value);
            }
            Ok(_) => {}
            Err(OpError::Ambiguous(_)) => lived.ambiguous += 1,
            // Said at once: nothing was done.
            Err(_) => known.asked.retain(|value| *value != asked.value),
        }
    }

    /// Takes what was answered.
    fn hear(&mut self, lived: &mut Lived) {
        let asked = std::mem::take(&mut self.asked);
        for asked in asked {
            match self.world(asked.node).answer(asked.number) {
                Some(answer) => self.answered(&asked, answer, lived),
                None => self.asked.push(asked),
            }
        }
    }

    fn read(&mut self) {
        let key = self.dice.below(KEYS);
        // Somebody who was cut off may not know yet that it is not the one to ask.
        if self.cut_off != Some(self.active) {
            let found = self.world(self.active).get(&format!("key{key}"));
            self.check_key(key, found);
        }
    }

    fn check_key(&self, key: u64, found: Result<Vec<u8>, OpError>) {
        let Known { at_least, asked, .. } = &self.keys[&key];
        match found {
            Ok(body) => {
                let value: u64 = std::str::from_utf8(&body).unwrap().parse().unwrap();
                assert!(asked.contains(&value), "key {key}: {value} was invented, {asked:?} were asked for");
                assert!(value >= *at_least, "key {key}: {value} is there, but {at_least} was acknowledged");
            }
            Err(OpError::NotFound) => assert_eq!(*at_least, 0, "key {key}: acknowledged, and gone"),
            Err(OpError::ReCommitInProgress) => {}
            Err(other) => panic!("key {key}: {other:?}"),
        }
    }

    fn is_reachable(&self, n: usize) -> bool {
        self.cut_off != Some(n) && self.cut_off != Some(self.active)
    }

    fn stream(&mut self, n: usize, lived: &mut Lived) {
        if n == self.active || !self.is_reachable(n) || self.is_poisoned(n) {
            return;
        }
        if self.streams[n].is_none() && !self.connect(n, lived) {
            return;
        }
        let count = 1 + self.dice.below(6);
        self.carry(n, count);
        if self.dice.one_in(2) {
            self.ack(n);
        }
        if self.dice.one_in(40) {
            self.disconnect(n);
        }
    }

    fn ack(&mut self, n: usize) {
        let durable = self.world(n).bucket.vbucket(VB).unwrap().log.marks.durable();
        self.follows[n] |= durable >= self.goals[n];
        let prepared = self.world(n).bucket.high_prepared(VB).unwrap();
        self.world(self.active).bucket.seqno_acked(VB, NAMES[n], prepared).unwrap();
    }

    fn carry(&mut self, n: usize, count: u64) {
        let mut stream = self.streams[n].take().expect("connected");
        let (active, replica) = (self.world(self.active), self.world(n));
        let log = &active.bucket.vbucket(VB).unwrap().log;
        if stream.pending.is_empty() {
            let slice = log.read(&stream.cursor, 1 << 10);
            if !slice.is_empty() {
                let unordered = slice.decided_out_of_order();
                let marker = SnapshotMarker { start: slice.from, end: slice.last, from_disk: unordered };
                replica.bucket.begin_snapshot(VB, marker).unwrap();
                (stream.upto, stream.pending) = (slice.last, slice.items.into());
                stream.is_unordered = unordered.is_some();
            }
        }
        for _ in 0..count {
            let Some(item) = stream.pending.front() else { break };
            match replica.bucket.apply(VB, &stream.change(item)) {
                Ok(()) => _ = stream.pending.pop_front(),
                Err(ApplyError::Later(_)) => break,
                Err(error) => panic!("{item:?}: {error}"),
            }
        }
        if stream.pending.is_empty() {
            log.release(&stream.cursor, stream.upto);
        }
        self.streams[n] = Some(stream);
    }

    fn disconnect(&mut self, n: usize) {
        if let Some(stream) = self.streams[n].take() {
            self.world(self.active).bucket.vbucket(VB).unwrap().log.unregister(stream.cursor);
        }
    }

    /// Asks for a stream as a consumer does, rolling back as told.
    fn connect(&mut self, n: usize, lived: &mut Lived) -> bool {
        let (active, replica) = (self.world(self.active), self.world(n));
        if replica.bucket.vb_state(VB) != Some(VbState::Replica) {
            replica.bucket.set_vb_state(VB, VbState::Replica, Some(self.topology())).unwrap();
        }
        let log = &active.bucket.vbucket(VB).unwrap().log;
        let histories = active.bucket.failover_log(VB).unwrap();
        let mut follows = self.follows[n];
        loop {
            let point = replica.bucket.resume_point(VB).unwrap();
            let Some(to) = must_roll_back(&point, &histories, log.marks.high()) else { break };
            follows = false;
            lived.rollbacks += 1;
            lived.rollbacks_to_nothing += u64::from(to == Seqno(0));
            let ended = Arc::new(Mutex::new(None));
            let tell = Arc::clone(&ended);
            replica.bucket.roll_back(VB, to, Box::new(move |result| *tell.lock() = Some(result)));
            replica.settle();
            let result = ended.lock().take().expect("told");
            match result {
                Ok(seqno) => assert!(seqno <= to),
                Err(_) if self.is_poisoned(n) => return false,
                Err(error) => panic!("rolling back to {to}: {error:?}"),
            }
        }
        let table = FailoverTable::from_entries(histories).expect("never empty");
        let _ = replica.bucket.adopt_failover_log(VB, table, &|| replica.nobody());
        let ResumePoint { seqno, snapshot_start, .. } = replica.bucket.resume_point(VB).unwrap();
        active.bucket.replica_began(VB, NAMES[n], seqno).unwrap();
        let goal = log.marks.high();
        let stream = match log.cursor(NAMES[n], seqno) {
            Some(cursor) => Stream {
                cursor,
                pending: VecDeque::new(),
                upto: seqno,
                half: (snapshot_start, seqno),
                is_unordered: false,
            },
            None => {
                lived.backfills += 1;
                backfill(active, replica, NAMES[n], snapshot_start, seqno)
            }
        };
        self.streams[n] = Some(stream);
        (self.follows[n], self.goals[n]) = (follows, goal);
        true
    }

    fn crash(&mut self, n: usize, lived: &mut Lived) {
        self.restart(n, lived);
        self.after_restart(n, lived);
    }

    fn restart(&mut self, n: usize, lived: &mut Lived) {
        lived.crashes += 1;
        if n == self.active {
            (0..self.nodes.len()).for_each(|n| self.streams[n] = None);
        } else {
            self.disconnect(n);
        }
        let fate = self.dice.below(4);
        let seed = self.dice.below(u64::MAX);
        let world = self.nodes[n].take().expect("up").restart_after(|sim| match fate {
            0 => drop(sim.kill()),
            1 => drop(sim.power_cut(Fate::LoseUnsynced)),
            2 => drop(sim.power_cut(Fate::KeepUnsynced)),
            _ => drop(sim.power_cut(seed)),
        });
        self.nodes[n] = Some(world);
        // Whoever asked will never know.
        let asked = std::mem::take(&mut self.asked);
        for asked in asked {
            if asked.node == n {
                lived.unknown += 1;
                self.keys.get_mut(&asked.key).unwrap().under_way = false;
            } else {
                self.asked.push(asked);
            }
        }
    }

    /// The active hands over to a replica in order. Either may crash between any two steps; then it is decided as whoever moves
    /// vBuckets does.
    fn hand_over(&mut self, lived: &mut Lived) {
        let old = self.active;
        let may = |n: &usize| *n != old && self.is_reachable(*n) && self.follows[*n];
        let Some(next) = (0..self.nodes.len()).find(may) else { return };
        let is_well = |cluster: &Cluster| [old, next].iter().all(|n| !cluster.is_poisoned(*n));
        if !is_well(self) || [old, next].map(Some).contains(&self.standing) {
            return;
        }
        if self.streams[next].is_none() && !self.connect(next, lived) {
            return;
        }
        let begun = self.world(next).bucket.begin_takeover(VB, &|| self.world(next).nobody());
        assert!(matches!(begun, Outcome::Pending), "{begun:?}");
        let failover = self.world(old).bucket.vbucket(VB).unwrap().log.record().failover.clone();
        let be = |cluster: &Cluster, state, topology| {
            cluster.world(next).bucket.hand_over(VB, state, failover.clone(), topology).unwrap();
        };
        for step in 0..5 {
            if self.with_crashes && self.dice.one_in(6) {
                let who = if self.dice.one_in(2) { old } else { next };
                self.restart(who, lived);
                break;
            }
            if !is_well(self) {
                break;
            }
            match step {
                0 => {
                    self.carry_all(next);
                    be(self, VbState::Pending, None);
                }
                1 => self.world(old).bucket.set_vb_state(VB, VbState::Dead, None).unwrap(),
                // That is on disk before the other one is active.
                2 => self.world(old).settle(),
                3 => self.carry_all(next),
                _ => be(self, VbState::Active, Some(vec![self.chain_from(next)])),
            }
        }
        // From here on it will not become active any more, if it is not.
        self.world(next).bucket.end_takeover(VB, "interrupted");
        let states = [old, next].map(|n| self.world(n).bucket.vb_state(VB).unwrap());
        assert_ne!(states, [VbState::Active; 2], "both are active");
        (0..self.nodes.len()).for_each(|n| self.disconnect(n));
        if states[1] == VbState::Active {
            lived.hand_overs += 1;
            self.active = next;
        } else {
            lived.hand_overs_undone += 1;
        }
        let (active, topology) = (self.active, self.topology());
        self.world(active).bucket.set_vb_state(VB, VbState::Active, Some(topology)).unwrap();
        self.follows = (0..self.nodes.len()).map(|n| n == active).collect();
        self.hear(lived);
        // Who asked the old one was told, or its process is gone.
        for asked in std::mem::take(&mut self.asked) {
            match asked.node == active {
                true => self.asked.push(asked),
                false => self.keys.get_mut(&asked.key).unwrap().under_way = false,
            }
        }
    }

    fn carry_all(&mut self, n: usize) {
        // A slice at a time.
        let high = |cluster: &Cluster, n| cluster.world(n).bucket.vbucket(VB).unwrap().log.marks.high();
        while high(self, n) < high(self, self.active) && !self.is_poisoned(n) {
            self.carry(n, u64::MAX);
            self.world(n).settle();
        }
    }

    /// A node that thinks that it is active asks whether it still is.
    fn after_restart(&mut self, n: usize, lived: &mut Lived) {
        let world = self.world(n);
        if n == self.active {
            lived.recommits += world.recovered[0].recommitted;
            world.bucket.set_vb_state(VB, VbState::Active, Some(self.topology())).unwrap();
        } else if world.bucket.vb_state(VB) == Some(VbState::Active) {
            world.bucket.set_vb_state(VB, VbState::Replica, Some(self.topology())).unwrap();
        }
    }

    /// The replica with the highest mark takes over, if a majority of nodes can be asked for theirs.
    fn fail_over(&mut self, lived: &mut Lived) {
        let others: Vec<_> = (0..self.nodes.len()).filter(|n| *n != self.active && self.cut_off != Some(*n)).collect();
        let may_follow = |n: &usize| self.follows[*n] && !self.is_poisoned(*n);
        if others.len() < self.nodes.len() - 1 || !others.iter().all(may_follow) {
            return;
        }
        let mark = |n: &usize| {
            (self.world(*n).bucket.high_prepared(VB), self.world(*n).bucket.resume_point(VB).unwrap().seqno)
        };
        let next = *others.iter().max_by_key(|n| mark(n)).expect("another");
        lived.promotions += 1;
        (0..self.nodes.len()).for_each(|n| self.disconnect(n));
        let before = std::mem::replace(&mut self.active, next);
        self.world(next).bucket.set_vb_state(VB, VbState::Active, Some(self.topology())).unwrap();
        self.follows = (0..self.nodes.len()).map(|n| n == next).collect();
        if self.dice.one_in(2) {
            // Else it goes on as if nothing had happened, until it is reached.
            self.world(before).bucket.set_vb_state(VB, VbState::Replica, Some(self.topology())).unwrap();
        }
        self.hear(lived);
        // Who asked the old one is told there, or gives up.
        let asked = std::mem::take(&mut self.asked);
        for asked in asked {
            lived.unknown += 1;
            self.keys.get_mut(&asked.key).unwrap().under_way = false;
        }
    }

    /// Everybody is there, and time passes.
    fn heal(&mut self, lived: &mut Lived) {
        (self.cut_off, self.standing) = (None, None);
        for n in 0..self.nodes.len() {
            self.world(n).sim.storage.arm(FaultPlan::new());
            if self.is_poisoned(n) {
                self.crash(n, lived);
            }
        }
        for _ in 0..12 {
            for n in 0..self.nodes.len() {
                self.world(n).settle();
                if n != self.active {
                    if self.streams[n].is_none() {
                        self.connect(n, lived);
                    }
                    self.carry(n, u64::MAX);
                    self.carry(n, u64::MAX);
                    self.world(n).advance_s(5);
                    self.ack(n);
                }
                self.hear(lived);
            }
            self.world(self.active).advance_s(5);
        }
        self.hear(lived);
    }

    fn check(&self) {
        let active = self.world(self.active);
        assert!(self.asked.is_empty(), "somebody still waits");
        assert_eq!(active.bucket.vbucket(VB).unwrap().sync_writes(), 0, "a sync write is stuck");
        for key in 0..KEYS {
            let name = format!("key{key}");
            let here = active.get(&name);
            assert_ne!(here, Err(OpError::ReCommitInProgress));
            self.check_key(key, here.clone());
            for n in (0..self.nodes.len()).filter(|n| *n != self.active) {
                let there = self.world(n).op(&name, Op::GetReplica).map(|reply| body(&reply));
                assert_eq!(there, here, "{name} on {}", NAMES[n]);
            }
        }
        for (world, name) in self.nodes.iter().flatten().zip(NAMES) {
            assert_eq!(world.bucket.items(), active.bucket.items(), "documents of {name}");
            let marks = &world.bucket.vbucket(VB).unwrap().log.marks;
            assert_eq!(marks.high(), active.bucket.vbucket(VB).unwrap().log.marks.high(), "{name}");
        }
    }
}

/// What a producer says to a request for a stream.
fn must_roll_back(point: &ResumePoint, histories: &[FailoverEntry], high: Seqno) -> Option<Seqno> {
    if point.seqno == Seqno(0) {
        return None;
    }
    let Some(place) = histories.iter().position(|entry| entry.uuid == point.uuid) else { return Some(Seqno(0)) };
    let upper = place.checked_sub(1).map_or(high, |newer| histories[newer].seqno);
    let (mut start, mut end) = (point.snapshot_start, point.snapshot_end);
    if point.seqno == start {
        end = point.seqno;
    }
    if end <= upper {
        return None;
    }
    if point.seqno == end {
        start = point.seqno;
    }
    Some(if start > upper { upper } else { start })
}

/// What the active's file has after `seqno`, and then what is in memory.
fn backfill(active: &World, replica: &World, name: &str, snapshot_start: Seqno, seqno: Seqno) -> Stream {
    let mut items = VecDeque::new();
    let options = persist::WarmUp { tombstones: true, prove: false };
    let store = active.bucket.store();
    let mut each = |item: Item| {
        if item.seqno() > seqno {
            items.push_back(item);
        }
    };
    let file = store.warm_up(VB, options, &mut |_, _| true, &mut each).unwrap().expect("a file");
    let marker = SnapshotMarker { start: seqno, end: file.high, from_disk: Some(file.completed) };
    replica.bucket.begin_snapshot(VB, marker).unwrap();
    if items.back().is_none_or(|item| item.seqno() < file.high) {
        // What is last was left out: an abort.
        let whole = items.drain(..).collect::<Vec<_>>();
        for item in &whole {
            replica.bucket.apply(VB, &change(item)).unwrap();
        }
        replica.bucket.apply(VB, &Change::Advance { seqno: file.high }).unwrap();
    }
    let cursor = active.bucket.vbucket(VB).unwrap().log.cursor(name, file.high).expect("the memory has the rest");
    Stream { cursor, pending: items, upto: file.high, half: (snapshot_start, seqno), is_unordered: true }
}
