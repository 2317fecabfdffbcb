//! The commit log is switched on and off while changes come: nothing that was acknowledged is lost, nothing waits for ever,
//! whatever the power and the disk do.

mod rig;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use changelog::VbRecord;
use env::Env;
use env::sim::{self, Fate, Fault, FaultPlan, Op, Rule, count_ops, cut_at, cut_everywhere};
use persist::{LogOptions, Urgency};
use rig::{DATA, Dice, History, Mode, Node, Seed, Writing, assert_holds, assert_node_holds};
use types::VbId;

const EIO: i32 = 5;
const ENOSPC: i32 = 28;

/// From which log to which, round and round. One of them is used again and again.
const WAYS: [(Mode, Mode); 3] =
    [(Mode::Logged, Mode::Kept), (Mode::Recycling, Mode::Evicting), (Mode::Direct, Mode::Logged)];

fn log_of(mode: Mode) -> Option<LogOptions> {
    mode.options().commit_log
}

fn has_log(env: &Env) -> bool {
    env.storage.exists(&Path::new(DATA).join("log")).unwrap_or(false)
}

/// What else a vBucket has: its record, told apart by a number in it.
#[derive(Clone, Default)]
struct Records {
    given: BTreeMap<u16, u64>,
    durable: BTreeMap<u16, u64>,
}

fn numbered(record: &VbRecord, number: u64) -> VbRecord {
    VbRecord { topology: vec![vec![Some(number.to_string())]], ..record.clone() }
}

fn number(record: &VbRecord) -> u64 {
    record.topology.first().and_then(|chain| chain[0].as_ref()).map_or(0, |name| name.parse().unwrap())
}

impl Records {
    /// Now and then without any change beside it.
    fn change(&mut self, node: &Node, vb: u16) {
        let next = self.given.entry(vb).or_default();
        *next += 1;
        let log = &node.logs[usize::from(vb)];
        assert_eq!(log.set_record(numbered(&log.record(), *next)), *next, "versions and numbers agree");
        node.bucket.changed(VbId(vb), Urgency::Durable);
    }

    fn look(&mut self, node: &Node) {
        for vb in self.given.keys() {
            self.durable.insert(*vb, node.bucket.recorded(VbId(*vb)).unwrap_or(0));
        }
    }

    fn assert_found(&self, node: &Node) {
        for found in node.bucket.recovered() {
            let (vb, found) = (found.vb.0, number(&found.record));
            let durable = self.durable.get(&vb).copied().unwrap_or(0);
            assert!(found >= durable, "vb {vb}: record {found} is older than {durable}, which was durable");
            assert!(found <= self.given.get(&vb).copied().unwrap_or(0), "vb {vb}: nobody wrote record {found}");
        }
    }
}

/// Work with switches in it. Ends with all that could become durable.
fn work(env: &Env, (from, to): (Mode, Mode), seed: u64, switches: u64) -> (History, Records) {
    let mut history = History { mode: from, ..History::default() };
    let mut records = Records::default();
    let Ok(node) = Node::start_with(env, seed, from.options()) else { return (history, records) };
    history.bucket_made = true;
    turn(&node, (from, to), seed, switches, &mut history, &mut records);
    (history, records)
}

fn turn(node: &Node, (from, to): (Mode, Mode), seed: u64, switches: u64, history: &mut History, records: &mut Records) {
    let (mut dice, mut writing) = (Dice(seed ^ 0x5157), Writing::new(seed));
    for n in 0..=switches {
        if n > 0 {
            let mode = if n % 2 == 1 { to } else { from };
            node.store.set_commit_log(log_of(mode)).unwrap();
        }
        for _ in 0..3 {
            writing.change(node, history);
            records.change(node, dice.below(u64::from(rig::VBS)) as u16);
            for _ in 0..dice.below(5) {
                node.stepper.step();
            }
        }
    }
    node.run();
    history.note_durable(node);
    records.look(node);
}

fn holds(env: &Env, (history, records): &(History, Records)) {
    let node = Node::start_with(env, 1, history.mode.options()).expect("a crash leaves a store that opens");
    assert_node_holds(&node, history);
    records.assert_found(&node);
}

/// Goal: a switch both ways loses nothing at a power cut. Method: cut before each I/O of work with switches in it, open the
/// store with a log and without, compare.
#[test]
fn what_was_durable_survives_power_loss_at_every_io_of_a_switch() {
    for (seed, way) in (0..).zip(WAYS) {
        let (_, start) = sim::env(seed);
        for switches in 1..=3 {
            let workload = |env: &Env| work(env, way, seed, switches);
            cut_everywhere(&start, 1, workload, |world, (history, records)| {
                for mode in [way.0, way.1] {
                    let history = History { mode, ..history.clone() };
                    holds(&world.fork().env(), &(history, records.clone()));
                }
            });
        }
    }
}

/// A second crash, in the recovery from the first, is no worse.
#[test]
fn power_loss_in_the_recovery_from_a_cut_switch_loses_nothing_either() {
    for (seed, way) in (10..).zip(WAYS) {
        let (_, start) = sim::env(seed);
        let workload = |env: &Env| work(env, way, seed, 2);
        let total = count_ops(&start, workload);
        for cut in (0..total).step_by(29) {
            cut_at(&start, cut, 1, workload, |world, lived| {
                let recovery = |env: &Env| drop(Node::start_with(env, 1, way.1.options()));
                cut_everywhere(world, 0, recovery, |world, ()| holds(&world.env(), lived));
            });
        }
    }
}

/// What a switch comes to: everything is where it should be, nobody waits, and it may be turned again and again.
#[test]
fn a_switch_ends_with_everything_in_its_place() {
    for (seed, mode) in (20..).zip([Mode::Logged, Mode::Recycling].into_iter().cycle()).take(8) {
        let _seed = Seed(seed);
        let (env, mut sim) = sim::env(seed);
        let node = Node::start_with(&env, seed, mode.options()).unwrap();
        let (mut history, mut records) =
            (History { mode, bucket_made: true, ..History::default() }, Records::default());
        let mut writing = Writing::new(seed);
        for round in 0..6 {
            let is_on = round % 2 == 1;
            node.store.set_commit_log(if is_on { log_of(mode) } else { None }).unwrap();
            assert!(node.store.is_switching_log());
            for _ in 0..6 {
                writing.change(&node, &mut history);
                records.change(&node, 2);
            }
            node.run();
            assert!(!node.store.is_switching_log() && has_log(&node.env) == is_on, "round {round}");
            assert_eq!(node.store.log_stats().is_some(), is_on);
            // What nobody waits for has some time.
            writing.change(&node, &mut history);
            node.stepper.advance(Duration::from_millis(10));
            for (vb, changes) in &history.changes {
                let marks = &node.logs[usize::from(*vb)].marks;
                assert_eq!(marks.durable(), changes.last().unwrap().seqno(), "round {round}, vb {vb}");
                assert!(is_on || marks.filed() == marks.durable());
            }
            assert_eq!(node.bucket.recorded(VbId(2)), records.given.get(&2).copied());
            let readers = node.logs.iter().map(|log| log.readers().len()).max();
            assert!(is_on || readers == Some(1), "a log that is gone keeps nothing in memory");
        }
        node.stepper.advance(Duration::from_secs(30));
        assert!((0..rig::VBS).all(|vb| node.logs[usize::from(vb)].backlog().0 == 0));
        history.note_durable(&node);
        records.look(&node);
        assert_eq!(node.stepper.next_deadline(), None, "an idle store has nothing to wake for");
        drop(node);
        holds(&sim.power_cut(Fate::LoseUnsynced), &(history, records));
    }
}

/// Whoever changes his mind in the middle gets what he asked for last.
#[test]
fn a_switch_may_be_turned_back_at_any_moment() {
    for seed in 0..60 {
        let _seed = Seed(seed);
        let mode = [Mode::Logged, Mode::Recycling][seed as usize % 2];
        let (env, mut sim) = sim::env(seed);
        let node = Node::start_with(&env, seed, mode.options()).unwrap();
        let (mut history, mut records) =
            (History { mode, bucket_made: true, ..History::default() }, Records::default());
        let (mut writing, mut dice) = (Writing::new(seed), Dice(seed));
        let mut is_on = true;
        for _ in 0..8 {
            is_on = dice.below(2) == 0;
            node.store.set_commit_log(if is_on { log_of(mode) } else { None }).unwrap();
            for _ in 0..dice.below(4) {
                writing.change(&node, &mut history);
                records.change(&node, dice.below(u64::from(rig::VBS)) as u16);
            }
            for _ in 0..dice.below(12) {
                node.stepper.step();
            }
        }
        node.run();
        assert!(!node.store.is_switching_log() && has_log(&node.env) == is_on);
        history.note_durable(&node);
        records.look(&node);
        for (vb, changes) in &history.changes {
            assert_eq!(history.durable[vb], changes.last().unwrap().seqno().0, "vb {vb}");
        }
        drop(node);
        holds(&sim.power_cut(Fate::LoseUnsynced), &(history, records));
    }
}

/// Goal: whichever sync fails in a switch, nothing is acknowledged that is not there. Method: fail each in turn, of the log, of
/// the files and of the directories, until one lies beyond the end; then cut the power.
#[test]
fn a_failed_sync_in_a_switch_acknowledges_nothing_that_is_not_there() {
    for op in [Op::Sync, Op::SyncDir] {
        for (seed, way) in (30..).zip(WAYS) {
            for nth in 0.. {
                let (env, mut sim) = sim::env(seed);
                let node = Node::start_with(&env, seed, way.0.options()).unwrap();
                node.run();
                sim.storage.arm(FaultPlan::new().rule(Rule::new(op, Fault::Errno(EIO)).nth(nth)));
                let mut history = History { mode: way.0, bucket_made: true, ..History::default() };
                let mut records = Records::default();
                turn(&node, way, seed, 3, &mut history, &mut records);
                node.stepper.advance(Duration::from_secs(60));
                for vb in 0..rig::VBS {
                    history.changes.entry(vb).or_default().push(node.set(vb, "after", b"that"));
                }
                node.stepper.advance(Duration::from_secs(60));
                history.note_durable(&node);
                records.look(&node);
                for (vb, changes) in &history.changes {
                    let is_all_durable = history.durable[vb] == changes.last().unwrap().seqno().0;
                    // A file that takes no more writes may keep a small log from being used again: others do without it.
                    let is_told = node.poisoned(*vb).is_some();
                    assert!(is_all_durable || is_told, "{op:?} {nth}: vb {vb} waits for nothing");
                }
                let is_past_the_end = sim.storage.count(op) <= nth;
                drop(node);
                for fate in [Fate::LoseUnsynced, Fate::KeepUnsynced, Fate::Seeded(nth)] {
                    let lived = (history.clone(), records.clone());
                    let mut world = sim.fork();
                    world.power_cut(fate);
                    for mode in [way.0, way.1] {
                        let lived = (History { mode, ..lived.0.clone() }, lived.1.clone());
                        holds(&world.fork().env(), &lived);
                    }
                }
                sim.power_cut(nth);
                if is_past_the_end {
                    break;
                }
            }
        }
    }
}

/// Writes to all vBuckets, many times what a small log takes, while the file of one cannot be synced.
fn fill_a_log_that_is_held(env: &Env, seed: u64, held: u16) -> (History, Records, Option<Node>) {
    let mut history = History { mode: Mode::Recycling, ..History::default() };
    let mut records = Records::default();
    let Ok(node) = Node::start_with(env, seed, history.mode.options()) else { return (history, records, None) };
    history.bucket_made = true;
    let mut dice = Dice(seed);
    // One has its only change when the log is about full.
    let (late, due) = (rig::VBS - 1, (40 << 10) + dice.below(9 << 10));
    for round in 0..40 {
        let is_due = || node.store.log_stats().is_some_and(|log| log.bytes_in_use >= due);
        let is_late = !history.changes.contains_key(&late) && node.poisoned(held).is_some() && is_due();
        records.change(&node, dice.below(u64::from(late)) as u16);
        for vb in (0..late).chain(is_late.then_some(late)) {
            let value = vec![b'v'; 300 + dice.below(600) as usize];
            history.changes.entry(vb).or_default().push(node.set(vb, &format!("k{}", round % 7), &value));
            (0..dice.below(4)).for_each(|_| _ = node.stepper.step());
        }
        if dice.below(2) == 0 {
            node.run();
        }
    }
    node.stepper.advance(Duration::from_secs(60));
    history.note_durable(&node);
    records.look(&node);
    (history, records, Some(node))
}

/// Goal: a vBucket whose file takes no more writes keeps what the log has of it until a restart, and nobody else has to wait for
/// that. Method: a log so small that it fills; the power is cut at many I/Os of it, and after the end.
#[test]
fn a_log_that_one_vbucket_holds_for_good_is_kept_and_the_others_do_without_it() {
    for seed in 0..60 {
        let _seed = Seed(seed);
        let first_cut = if seed < 3 { 0 } else { u64::MAX / 2 };
        for cut in (first_cut..).step_by(17) {
            let (env, mut sim) = sim::env(seed);
            let held = seed as u16 % (rig::VBS - 1);
            let failing = Rule::new(Op::Sync, Fault::Errno(EIO)).path(&format!("/{held}.couch")).sticky();
            sim.storage.arm(FaultPlan::new().rule(failing).cut_before(cut));
            let (history, records, node) = fill_a_log_that_is_held(&env, seed, held);
            let is_past_the_end = sim.storage.mutations() < cut;
            if is_past_the_end {
                let node = node.as_ref().expect("it started");
                assert!(node.poisoned(held).is_some() && !node.store.log_full() && !node.store.is_switching_log());
                assert_eq!(node.bucket.held_by_log(), [VbId(held)]);
                assert!(history.durable[&held] > 0);
                for (vb, changes) in history.changes.iter().filter(|(vb, _)| **vb != held) {
                    assert_eq!(history.durable[vb], changes.last().unwrap().seqno().0, "vb {vb}");
                }
                // Nobody changes that but a restart.
                node.store.set_commit_log(log_of(Mode::Logged)).unwrap();
                node.run();
                assert!(has_log(&node.env) && !node.store.is_switching_log());
                let drained = node.store.drain();
                assert_eq!(drained.left.iter().map(|left| left.vb).collect::<Vec<_>>(), [VbId(held)]);
            }
            drop(node);
            for fate in [Fate::LoseUnsynced, Fate::KeepUnsynced, Fate::Seeded(cut)] {
                holds(&sim.fork().power_cut(fate), &(history.clone(), records.clone()));
            }
            if is_past_the_end {
                drop(assert_holds(&sim.power_cut(Fate::LoseUnsynced), &history));
                break;
            }
        }
    }
}

/// ENOSPC, and other calls that fail for a while, delay a switch and nothing else.
#[test]
fn a_switch_gets_over_what_fails_for_a_while() {
    let failing =
        [(Op::Write, ENOSPC), (Op::Create, ENOSPC), (Op::Rename, EIO), (Op::RemoveFile, EIO), (Op::List, EIO)];
    for (op, errno) in failing {
        for (seed, way) in (40..).zip(WAYS) {
            for nth in 0.. {
                let (env, mut sim) = sim::env(seed);
                let node = Node::start_with(&env, seed, way.0.options()).unwrap();
                node.run();
                sim.storage.arm(FaultPlan::new().rule(Rule::new(op, Fault::Errno(errno)).nth(nth).times(3)));
                let mut history = History { mode: way.0, bucket_made: true, ..History::default() };
                let mut records = Records::default();
                turn(&node, way, seed, 3, &mut history, &mut records);
                node.stepper.advance(Duration::from_secs(60));
                for vb in 0..rig::VBS {
                    history.changes.entry(vb).or_default().push(node.set(vb, "after", b"that"));
                }
                node.stepper.advance(Duration::from_secs(60));
                let is_past_the_end = sim.storage.count(op) <= nth;
                assert!(!node.store.is_switching_log(), "{op:?} {nth}");
                for (vb, changes) in &history.changes {
                    let last = changes.last().unwrap().seqno().0;
                    assert_eq!(node.durable(*vb), last, "{op:?} {nth}, vb {vb}: {:?}", node.poisoned(*vb));
                }
                assert!(!node.store.log_full() && !node.store.disk_full());
                history.note_durable(&node);
                records.look(&node);
                drop(node);
                holds(&sim.power_cut(Fate::LoseUnsynced), &(history, records));
                if is_past_the_end {
                    break;
                }
            }
        }
    }
}

/// A file that takes no more writes leaves its changes in the log alone: then the log stays, and goes on.
#[test]
fn a_log_that_alone_has_something_is_not_left() {
    let (env, mut sim) = sim::env(50);
    let node = Node::start_with(&env, 50, Mode::Logged.options()).unwrap();
    let mut history = History { mode: Mode::Logged, bucket_made: true, ..History::default() };
    history.changes.entry(0).or_default().push(node.set(0, "a", b"in the log"));
    node.run();
    sim.storage.arm(FaultPlan::new().rule(Rule::new(Op::Sync, Fault::Errno(EIO)).path("/0.couch").sticky()));
    node.store.set_commit_log(None).unwrap();
    history.changes.entry(1).or_default().push(node.set(1, "a", b"meanwhile"));
    node.run();
    assert!(node.poisoned(0).is_some() && !node.store.is_switching_log() && has_log(&node.env));
    history.changes.entry(1).or_default().push(node.set(1, "a", b"later"));
    node.run();
    assert_eq!((node.durable(0), node.durable(1)), (1, 2));
    let marks = &node.logs[1].marks;
    assert!(marks.filed() < marks.durable(), "through the log again");
    history.note_durable(&node);
    drop(node);
    // The next start may do without.
    history.mode = Mode::Direct;
    drop(assert_holds(&sim.power_cut(Fate::LoseUnsynced), &history));
    assert!(!has_log(&sim.env()));
}

#[test]
fn options_that_cannot_work_are_refused_and_change_nothing() {
    let (env, _) = sim::env(51);
    let node = Node::start_with(&env, 51, Mode::Kept.options()).unwrap();
    let options = LogOptions { segment_bytes: 1, ..LogOptions::default() };
    assert!(node.store.set_commit_log(Some(options)).is_err());
    assert!(!node.store.is_switching_log());
}

/// Goal: while a log is entered, no file runs ahead of it. Method: a flush that began before is held in the middle of its
/// sync, while the switch goes as far as it can and others change; then it ends.
#[test]
fn a_log_is_entered_only_when_the_flushes_from_before_have_ended() {
    let (env, sim) = sim::env(52);
    let node = Arc::new(Node::start_with(&env, 52, Mode::Kept.options()).unwrap());
    node.set(0, "a", b"one");
    node.set(1, "b", b"one");
    node.run();
    let seen = Arc::new(AtomicU64::new(0));
    let (held, noted) = (Arc::clone(&node), Arc::clone(&seen));
    sim.storage.meanwhile(Op::Sync, "/0.couch", move || {
        held.store.set_commit_log(log_of(Mode::Logged)).unwrap();
        held.run();
        held.set(1, "b", b"waits for the log");
        held.run();
        assert!(held.store.log_stats().is_some() && held.store.is_switching_log());
        let marks = &held.logs[1].marks;
        assert_eq!((marks.high().0, marks.durable().0), (2, 1), "in a file before it is in the log");
        noted.store(1, Ordering::Relaxed);
    });
    node.set(0, "a", b"two");
    node.run();
    assert_eq!(seen.load(Ordering::Relaxed), 1);
    assert!(!node.store.is_switching_log());
    assert_eq!((node.durable(0), node.durable(1), node.logs[1].marks.filed().0), (2, 2, 1), "through the log");
}
