//! With a commit log: what is durable is in the log, what is filed is in the files, and every way from one to the other
//! can be cut.

mod rig;

use std::path::Path;
use std::time::Duration;

use env::Env;
use env::sim::{self, Fate, Fault, FaultPlan, Noise, Op, Rule, Sim};
use persist::{BucketSpec, Limits, Options, StoreError, Urgency, Verdict};
use rig::{DATA, History, LOG_MODES, Mode, Node, Seed, assert_holds, assert_node_holds, work, work_on};
use types::{BucketUuid, KeyBuf, Kind, VbId};

const EIO: i32 = 5;

fn started(mode: Mode) -> (Sim, Node) {
    let (env, sim) = sim::env(7);
    let node = Node::start_with(&env, 7, mode.options()).unwrap();
    (sim, node)
}

fn marks(node: &Node, vb: u16) -> (u64, u64) {
    let marks = &node.logs[usize::from(vb)].marks;
    (marks.durable().0, marks.filed().0)
}

fn value(node: &Node, vb: u16, key: &str) -> Option<Vec<u8>> {
    let key = KeyBuf::in_default_collection(key.as_bytes()).unwrap();
    node.bucket.fetch_now(VbId(vb), key.as_key()).unwrap().map(|item| item.value().to_vec())
}

fn log_files(env: &Env) -> Vec<String> {
    env.storage.list(Path::new("/data/log")).unwrap_or_default()
}

#[test]
fn a_change_is_durable_after_one_sync_and_filed_when_it_has_come_of_age() {
    let (sim, node) = started(Mode::Logged);
    node.run();
    sim.storage.arm(FaultPlan::new());
    (0..rig::VBS).for_each(|vb| drop(node.set(vb, "a", b"one")));
    node.run();
    assert_eq!((0..rig::VBS).map(|vb| marks(&node, vb)).max(), Some((1, 0)));
    assert_eq!((sim.storage.count(Op::Sync), node.bucket.stats().commits), (1, 0), "one sync for all");
    assert_eq!(node.nudges(), u64::from(rig::VBS));
    node.stepper.advance(Duration::from_millis(9_300));
    assert_eq!(node.bucket.stats().commits, 0);
    node.stepper.advance(Duration::from_millis(700));
    assert_eq!((0..rig::VBS).map(|vb| marks(&node, vb)).min(), Some((1, 1)));
    assert_eq!(value(&node, 3, "a").unwrap(), b"one");
    assert!(node.logs.iter().all(|log| log.backlog().0 == 0), "filed changes leave memory");
    assert_eq!(node.stepper.next_deadline(), None, "an idle store has nothing to wake for");
}

/// Goal: files that are held back for the sake of clients cost one look a pause, however many wait, and are all written when nobody is
/// held back any more. Method: a governor that owes a lot, a store with more files to write than writers, and the runs of its tasks.
#[test]
fn of_many_files_that_are_held_back_one_thread_looks_at_a_time() {
    let (_, node) = started(Mode::Logged);
    let governor = node.store.governor();
    let limits = Limits { latency_budget: Some(Duration::from_millis(5)), floor_bytes_per_s: 1 };
    governor.set_limits(limits);
    let slow_sync = || governor.foreground(Duration::from_millis(50));
    (0..rig::VBS).for_each(|vb| drop(node.set(vb, "a", b"one")));
    node.run();
    let runs = || -> u64 {
        let tasks = node.stepper.pools().stats().tasks;
        tasks.iter().filter(|task| task.name.starts_with("flush")).map(|task| task.runs.get()).sum()
    };
    (0..40).for_each(|_| {
        slow_sync();
        node.stepper.advance(Duration::from_millis(200));
    });
    slow_sync();
    governor.spent(1 << 20);
    let before = runs();
    (0..20).for_each(|_| {
        slow_sync();
        node.stepper.advance(Duration::from_millis(200));
    });
    assert_eq!(node.bucket.stats().commits, 0);
    assert!((10..=25).contains(&(runs() - before)), "{} looks in 20 pauses", runs() - before);
    node.stepper.advance(Duration::from_secs(1));
    assert_eq!((0..rig::VBS).map(|vb| marks(&node, vb)).min(), Some((1, 1)), "nobody waits for the log any more");
    assert_eq!(node.stepper.next_deadline(), None);
}

/// Goal: a turn's changes are durable after it, however it ends, and not before it wakes the log. Method: a log driven by a task, which
/// the stepper runs only when it was woken.
#[test]
fn what_a_thread_changes_in_a_turn_is_synced_once_when_the_turn_ends() {
    let (sim, node) = started(Mode::Logged);
    node.run();
    let durable = |node: &Node| (0..rig::VBS).map(|vb| marks(node, vb).0).collect::<Vec<_>>();
    let set_all = || (0..rig::VBS).for_each(|vb| drop(node.set(vb, "a", b"one")));
    sim.storage.arm(FaultPlan::new());
    let turn = node.store.begin_turn();
    set_all();
    node.run();
    assert_eq!(durable(&node), [0; rig::VBS as usize], "nobody was woken");
    turn.call();
    node.run();
    assert_eq!((durable(&node), sim.storage.count(Op::Sync)), (vec![1; rig::VBS.into()], 1));
    set_all();
    drop(turn);
    node.run();
    assert_eq!((durable(&node), sim.storage.count(Op::Sync)), (vec![2; rig::VBS.into()], 2));
    let turn = node.store.begin_turn();
    set_all();
    turn.wait();
    assert_eq!((durable(&node), sim.storage.count(Op::Sync)), (vec![3; rig::VBS.into()], 3), "by itself");
    node.store.begin_turn().wait();
    set_all();
    node.run();
    assert_eq!((durable(&node), sim.storage.count(Op::Sync)), (vec![4; rig::VBS.into()], 4), "no turn is left behind");
}

/// Many vBuckets that changed at one moment are filed over half the age, a few at a time, and none is late.
#[test]
fn what_changed_together_is_not_filed_all_at_once() {
    const VBUCKETS: u16 = 128;
    let (env, _sim) = sim::env(9);
    let mut options = Mode::Logged.options();
    options.commit_log.as_mut().unwrap().bytes_max = 1 << 20;
    let node = Node::start_with(&env, 9, options).unwrap();
    let spec = BucketSpec { name: "many".into(), uuid: BucketUuid(6), vbuckets: VBUCKETS, ..rig::spec() };
    let bucket = node.store.create_bucket(spec).unwrap();
    let logs = rig::attach_to(&bucket, VBUCKETS);
    for vb in 0..VBUCKETS {
        rig::append(&logs[usize::from(vb)], &node.env, "a", Some(b"v"), Kind::Committed { prepared: None });
        bucket.changed(VbId(vb), Urgency::Durable);
    }
    node.run();
    node.stepper.advance(Duration::from_millis(4_999));
    assert_eq!(bucket.stats().commits, 0);
    let mut before = 0;
    for _ in 0..50 {
        node.stepper.advance(Duration::from_millis(101));
        let commits = bucket.stats().commits;
        assert!(commits - before <= 8, "{} at once", commits - before);
        before = commits;
    }
    assert_eq!(before, u64::from(VBUCKETS));
}

/// The filer's other reason: a bucket holds many bytes that only the log has.
#[test]
fn a_bucket_with_many_unfiled_bytes_files_the_oldest_at_once() {
    let (env, _sim) = sim::env(8);
    let mut options = Mode::Logged.options();
    let log = options.commit_log.as_mut().unwrap();
    (log.unfiled_bytes_max, log.bytes_max) = (1000, 1 << 20);
    let node = Node::start_with(&env, 8, options).unwrap();
    for vb in 0..4 {
        node.set(vb, "a", &[b'x'; 200]);
        node.run();
    }
    assert_eq!((0..4).map(|vb| marks(&node, vb).1).collect::<Vec<_>>(), [1, 1, 1, 0], "down to half of what may wait");
}

/// Filing keeps the log from growing beyond what it may; its segments are used again and again.
#[test]
fn a_small_log_is_used_again_and_again() {
    let (sim, node) = started(Mode::Recycling);
    let used = sim.storage.used_bytes();
    for round in 0..60_u64 {
        for vb in 0..rig::VBS {
            node.set(vb, &format!("k{}", round % 7), &[b'v'; 700]);
        }
        node.run();
        assert!((0..rig::VBS).all(|vb| marks(&node, vb).0 == round + 1), "round {round}: {:?}", node.store.log_stats());
    }
    let stats = node.store.log_stats().unwrap();
    assert!(stats.bytes > 160_000 && stats.bytes_in_use <= 48 << 10 && stats.segments <= 3, "{stats:?}");
    assert_eq!(log_files(&node.env).len() as u64, stats.segments);
    assert!(used > 0 && node.bucket.stats().commits > 8);
    assert!(!node.store.log_full());
}

/// Real limits only: while nothing can be filed and the log is full, writes wait and are said to; then everything goes on.
#[test]
fn a_full_log_is_told_and_recovers_by_itself() {
    let (sim, node) = started(Mode::Recycling);
    let failing = FaultPlan::new().rule(Rule::new(Op::Create, Fault::Errno(28)).path(".couch").sticky());
    sim.storage.arm(failing);
    let mut last = 0;
    while !node.store.log_full() {
        last = node.set(0, "a", &[b'v'; 900]).seqno().0;
        node.run();
        assert!(last < 100);
    }
    assert!(node.bucket.log_full() && last > 20, "full after {last}");
    assert!(marks(&node, 0).0 < last && node.poisoned(0).is_none());
    let waiting = node.set(1, "b", b"waits").seqno().0;
    node.stepper.advance(Duration::from_secs(1));
    assert_eq!(marks(&node, 1), (0, 0));
    sim.storage.arm(FaultPlan::new());
    node.stepper.advance(Duration::from_secs(10));
    assert_eq!((marks(&node, 0).0, marks(&node, 1).0), (last, waiting));
    assert!(!node.store.log_full());
    node.stepper.advance(Duration::from_secs(20));
    assert_eq!((node.bucket.pending(), value(&node, 1, "b").unwrap()), (0, b"waits".to_vec()));
}

/// S30 for the log: whichever sync fails, nothing is acknowledged after it, all vBuckets take no more writes and go on
/// reading, and a restart finds what was acknowledged.
#[test]
fn a_failed_sync_of_the_log_acknowledges_nothing_from_there_on() {
    let mut poisoned = 0;
    for mode in LOG_MODES {
        for nth in 0.. {
            let _seed = Seed(nth);
            let (env, mut sim) = sim::env(nth);
            let node = Node::start_with(&env, nth, mode.options()).unwrap();
            let mut history = History { mode, bucket_made: true, ..History::default() };
            history.changes.entry(3).or_default().push(node.set(3, "first", b"filed"));
            node.file_all();
            sim.storage.arm(FaultPlan::new().rule(Rule::new(Op::Sync, Fault::Errno(EIO)).path("/log/").nth(nth)));
            work_on(&node, nth, 30, &mut history);
            node.stepper.advance(Duration::from_secs(60));
            sim.storage.arm(FaultPlan::new());
            let is_poisoned = node.store.log_stats().unwrap().poisoned.is_some();
            poisoned += u64::from(is_poisoned);
            for vb in 0..rig::VBS {
                assert_eq!(node.poisoned(vb).is_some(), is_poisoned, "one log for all");
                let durable = node.durable(vb);
                node.set(vb, "late", b"never durable");
                node.run();
                assert!(!is_poisoned || node.durable(vb) == durable);
            }
            assert_eq!(value(&node, 3, "first").unwrap(), b"filed", "reads go on");
            node.file_all();
            let left = node.store.drain().left.len();
            assert!(is_poisoned == (left > 0));
            drop(node);
            for fate in [Fate::LoseUnsynced, Fate::KeepUnsynced, Fate::Seeded(nth)] {
                let mut world = sim.fork();
                let node = Node::start_with(&world.power_cut(fate), 1, mode.options()).expect("opens");
                for (vb, recovered) in node.bucket.recovered().iter().map(|r| (r.vb.0, r.high.0)) {
                    assert!(recovered >= history.durable[&vb], "vb {vb}");
                }
            }
            let _ = sim.power_cut(nth);
            if !is_poisoned {
                break;
            }
        }
    }
    assert!(poisoned > 30, "{poisoned}");
}

/// A file that cannot be synced stops its vBucket; what only the log has of it is there after a restart. Method: each sync of a
/// file in turn, through filing by age and for room.
#[test]
fn a_failed_sync_of_a_file_loses_nothing_of_what_the_log_has() {
    for (mode, nth) in LOG_MODES.into_iter().flat_map(|mode| (0..40).map(move |nth| (mode, nth))) {
        let (env, mut sim) = sim::env(nth);
        let node = Node::start_with(&env, nth, mode.options()).unwrap();
        let mut history = History { mode, bucket_made: true, ..History::default() };
        let first = node.set(0, "a", b"one");
        history.changes.entry(0).or_default().push(first);
        node.file_all();
        sim.storage.arm(FaultPlan::new().rule(Rule::new(Op::Sync, Fault::Errno(EIO)).path(".couch").nth(nth)));
        work_on(&node, nth, 30, &mut history);
        node.stepper.advance(Duration::from_secs(60));
        history.note_durable(&node);
        drop(node);
        drop(assert_holds(&sim.power_cut(Fate::Seeded(nth)), &history));
    }
}

/// S34: the first write without space is heard of at once; what is kept back then lets all that was accepted be written; and
/// writes are taken again only once there is as much space as before.
#[test]
fn space_kept_back_takes_what_was_accepted_and_is_had_again_before_more_is() {
    for mode in [Mode::Kept, Mode::Recycling] {
        let (env, mut sim) = sim::env(31);
        let node = Node::start_with(&env, 31, mode.options()).unwrap();
        let mut history = History { mode, bucket_made: true, ..History::default() };
        node.run();
        let reserve = Path::new(DATA).join("reserve");
        assert_eq!(sim.storage.read_file(&reserve).unwrap().len(), 64 << 10);
        let used = sim.storage.used_bytes();
        sim.storage.set_space_bytes_max(Some(used + 1000));
        work_on(&node, 31, 12, &mut history);
        node.stepper.advance(Duration::from_millis(500));
        assert!(node.store.disk_full() && node.bucket.disk_full());
        assert!(!env.storage.exists(&reserve).unwrap());
        node.stepper.advance(Duration::from_secs(30));
        for (vb, changes) in &history.changes {
            assert_eq!(node.durable(*vb), changes.last().unwrap().seqno().0, "vb {vb}: {mode:?}");
        }
        assert!(node.store.disk_full() && !env.storage.exists(&reserve).unwrap(), "{mode:?}: not yet");
        sim.storage.set_space_bytes_max(Some(used + (256 << 10)));
        node.stepper.advance(Duration::from_secs(30));
        assert!(!node.store.disk_full() && sim.storage.read_file(&reserve).unwrap().len() == 64 << 10, "{mode:?}");
        history.note_durable(&node);
        drop(node);
        drop(assert_holds(&sim.power_cut(Fate::LoseUnsynced), &history));
    }
}

/// Goal: ENOSPC is survived wherever it comes. Method: in every mode, each write in turn and the two after it find no space,
/// and so does each file that is made.
#[test]
fn no_space_at_any_one_write_loses_nothing_and_is_got_over() {
    for (seed, mode) in (40..).zip(rig::MODES) {
        for op in [Op::Write, Op::Create] {
            for nth in 0.. {
                let (env, mut sim) = sim::env(seed);
                let node = Node::start_with(&env, seed, mode.options()).unwrap();
                node.run();
                sim.storage.arm(FaultPlan::new().rule(Rule::new(op, Fault::Errno(28)).nth(nth).times(3)));
                let mut history = History { mode, bucket_made: true, ..History::default() };
                work_on(&node, seed, 8, &mut history);
                node.stepper.advance(Duration::from_secs(60));
                let is_past_the_end = sim.storage.count(op) <= nth;
                for (vb, changes) in &history.changes {
                    let last = changes.last().unwrap().seqno().0;
                    assert_eq!(node.durable(*vb), last, "{mode:?}, {op:?} {nth}, vb {vb}: {:?}", node.poisoned(*vb));
                }
                assert!(!node.store.disk_full() && !node.store.log_full(), "{mode:?}, {op:?} {nth}");
                history.note_durable(&node);
                drop(node);
                drop(assert_holds(&sim.power_cut(Fate::LoseUnsynced), &history));
                if is_past_the_end {
                    break;
                }
            }
        }
    }
}

/// S34: wherever the space ends, nothing acknowledged is lost, and with space everything goes on.
#[test]
fn a_disk_that_fills_up_anywhere_loses_nothing_acknowledged() {
    for mode in LOG_MODES {
        for kib in 0..40 {
            let _seed = Seed(kib);
            let (env, mut sim) = sim::env(kib);
            let node = Node::start_with(&env, kib, mode.options()).unwrap();
            let mut history = History { mode, bucket_made: true, ..History::default() };
            sim.storage.set_space_bytes_max(Some(sim.storage.used_bytes() + kib * 1024));
            work_on(&node, kib, 30, &mut history);
            node.stepper.advance(Duration::from_secs(30));
            let mut world = sim.fork();
            history.note_durable(&node);
            drop(assert_holds(&world.power_cut(kib), &history));

            sim.storage.set_space_bytes_max(None);
            node.stepper.advance(Duration::from_secs(60));
            for (vb, changes) in &history.changes {
                assert_eq!(node.durable(*vb), changes.last().unwrap().seqno().0, "vb {vb}");
            }
            assert!(!node.store.log_full() && !node.store.disk_full());
            history.note_durable(&node);
            drop(node);
            drop(assert_holds(&sim.power_cut(Fate::LoseUnsynced), &history));
        }
    }
}

/// The switch may be turned with changes in the log: they are filed first, and an unused log does not stay behind to be
/// replayed over something newer.
#[test]
fn the_log_may_be_switched_off_and_on_between_runs() {
    let (env, mut sim) = sim::env(21);
    let mut history = History { bucket_made: true, ..History::default() };
    let mut env = env;
    for (round, mode) in [Mode::Logged, Mode::Direct, Mode::Recycling, Mode::Logged, Mode::Kept].into_iter().enumerate()
    {
        history.mode = mode;
        let node = Node::start_with(&env, round as u64, mode.options()).unwrap();
        assert_node_holds(&node, &history);
        assert_eq!(log_files(&env).is_empty(), !mode.is_logged(), "{mode:?}");
        for vb in 0..rig::VBS {
            let item = node.set(vb, &format!("k{round}"), b"v");
            history.changes.entry(vb).or_default().push(item);
        }
        node.run();
        history.note_durable(&node);
        assert!(history.durable.values().all(|durable| *durable == round as u64 + 1));
        drop(node);
        env = sim.power_cut(Fate::LoseUnsynced);
    }
    drop(assert_holds(&env, &history));
}

/// Power loss at every moment of a start that switches the log off.
#[test]
fn power_loss_while_the_log_is_switched_off_loses_nothing() {
    let (env, mut sim) = sim::env(22);
    let mut history = work(&env, Mode::Logged, 22, 30);
    sim.power_cut(Fate::LoseUnsynced);
    history.mode = Mode::Kept;
    let open = |env: &Env| drop(Node::start_with(env, 1, Mode::Kept.options()));
    sim::cut_everywhere(&sim, 2, open, |world, ()| drop(assert_holds(&world.env(), &history)));
}

/// What a bucket left in the log is nothing to its successor of the same name.
#[test]
fn a_bucket_of_the_same_name_gets_nothing_of_its_predecessor() {
    let (mut sim, node) = started(Mode::Logged);
    node.set(0, "a", b"of the first");
    node.set(1, "b", b"of the first");
    node.run();
    node.store.delete_bucket("b").unwrap();
    assert!(matches!(node.store.create_bucket(rig::spec()), Err(StoreError::BadSpec { .. })), "a uuid is used once");
    let bucket = node.store.create_bucket(BucketSpec { uuid: BucketUuid(6), ..rig::spec() }).unwrap();
    let logs = rig::attach(&bucket);
    let item = rig::append(&logs[1], &node.env, "c", Some(b"of the second"), Kind::Committed { prepared: None });
    bucket.changed(VbId(1), persist::Urgency::Durable);
    node.run();
    assert_eq!(logs[1].marks.durable(), item.seqno());
    drop((node, bucket, logs));
    let node = Node::start_with(&sim.power_cut(Fate::LoseUnsynced), 1, Mode::Logged.options()).unwrap();
    let recovered = node.bucket.recovered();
    assert_eq!(recovered.iter().map(|r| (r.vb.0, r.high.0)).collect::<Vec<_>>(), [(1, 1)]);
    assert_eq!((value(&node, 1, "c").unwrap(), value(&node, 1, "b")), (b"of the second".to_vec(), None));
}

/// A deleted bucket does not keep the log full.
#[test]
fn a_deleted_bucket_gives_its_part_of_the_log_back() {
    let (sim, node) = started(Mode::Recycling);
    let failing = FaultPlan::new().rule(Rule::new(Op::Create, Fault::Errno(28)).path("/b/").sticky());
    sim.storage.arm(failing);
    while !node.store.log_full() {
        node.set(0, "a", &[b'v'; 900]);
        node.run();
    }
    node.store.delete_bucket("b").unwrap();
    let bucket = node.store.create_bucket(BucketSpec { name: "c".into(), uuid: BucketUuid(6), ..rig::spec() }).unwrap();
    let logs = rig::attach(&bucket);
    for _ in 0..3 {
        rig::append(&logs[0], &node.env, "k", Some(&[b'v'; 900]), Kind::Committed { prepared: None });
        bucket.changed(VbId(0), persist::Urgency::Durable);
        node.stepper.advance(Duration::from_secs(1));
    }
    assert_eq!(logs[0].marks.durable().0, 3, "{:?}", node.store.log_stats());
}

/// A log that goes on where no file ends is damage, told with what can be done; given up when asked, it stays given up.
#[test]
fn a_log_ahead_of_a_missing_file_is_refused_and_given_up_only_when_asked() {
    let (mut sim, node) = started(Mode::Recycling);
    for _ in 0..60 {
        node.set(0, "a", &[b'v'; 900]);
        node.run();
    }
    node.set(1, "b", b"logged");
    node.run();
    drop(node);
    let env = sim.power_cut(Fate::LoseUnsynced);
    env.storage.remove_file(&rig::file(0, 1)).unwrap();
    env.storage.sync_dir(Path::new("/data/buckets/b")).unwrap();
    let error = Node::start_with(&env, 1, Mode::Recycling.options()).err().expect("refused");
    assert_eq!(error.verdict(), Verdict::Abort);
    assert!(error.to_string().contains("ends at seqno 0, but the commit log goes on with seqno "), "{error}");

    let rescue = Options { recovery: true, ..Mode::Recycling.options() };
    drop(Node::start_with(&env, 1, rescue).unwrap());
    let node = Node::start_with(&env, 1, Mode::Recycling.options()).expect("what was given up does not come back");
    assert_eq!((value(&node, 0, "a"), value(&node, 1, "b").unwrap()), (None, b"logged".to_vec()));
}

/// A damaged log is refused; the recovery option uses what comes before the damage and keeps the rest for a person.
#[test]
fn a_damaged_log_is_refused_and_set_aside_only_when_asked() {
    let (mut sim, node) = started(Mode::Logged);
    for n in 0..6 {
        node.set(0, &format!("k{n}"), &[b'x'; 100]);
        node.run();
    }
    drop(node);
    let env = sim.power_cut(Fate::LoseUnsynced);
    sim.storage.corrupt("/data/log/00000001.log", 8192 + 600, 0x10).unwrap();
    let error = Node::start_with(&env, 1, Mode::Logged.options()).err().expect("refused");
    assert_eq!(error.verdict(), Verdict::Abort);
    assert!(error.to_string().contains("/data/log/00000001.log@"), "{error}");
    let rescue = Options { recovery: true, ..Mode::Logged.options() };
    let node = Node::start_with(&env, 1, rescue).unwrap();
    let high = node.bucket.recovered()[0].high.0;
    assert!((1..6).contains(&high), "what comes before the damage: {high}");
    assert!(env.storage.exists(Path::new("/data/log.aside")).unwrap());
    drop(node);
    let node = Node::start_with(&env, 1, Mode::Logged.options()).unwrap();
    assert_eq!(node.bucket.recovered()[0].high.0, high);
}

/// A clean stop files everything, and nothing is replayed after it.
#[test]
fn a_clean_stop_leaves_nothing_to_replay() {
    for mode in LOG_MODES {
        let (env, mut sim) = sim::env(31);
        let node = Node::start_with(&env, 31, mode.options()).unwrap();
        let mut history = History { mode, bucket_made: true, ..History::default() };
        work_on(&node, 31, 30, &mut history);
        node.file_all();
        assert!(node.store.drain().left.is_empty());
        assert!(node.logs.iter().all(|log| log.marks.filed() == log.marks.high()));
        drop(node);
        let node = Node::start_with(&sim.power_cut(Fate::LoseUnsynced), 1, mode.options()).unwrap();
        assert!(node.store.was_clean());
        assert_node_holds(&node, &history);
        assert_eq!(node.bucket.stats().files_created, 0);
    }
}

/// Goal: a commit in the log finds its value in the prepare, wherever that is. Method: prepares with and without a value, one
/// filed before the commit, one not; then the power goes.
#[test]
fn a_commit_gets_its_value_from_its_prepare_in_the_file_or_in_the_log() {
    let (mut sim, node) = started(Mode::Logged);
    node.run();
    let kind = Kind::Prepare { level: types::Level::PersistMajority };
    let prepare = |key: &str, value| (key.to_owned(), node.put(0, key, value, kind).seqno());
    let filed = [prepare("filed", Some(&b"one"[..])), prepare("filed, deleted", None)];
    node.file_all();
    assert_eq!(marks(&node, 0), (2, 2));
    let logged = [prepare("logged", Some(&b"two"[..])), prepare("logged, empty", Some(b""))];
    let values = [Some(&b"one"[..]), None, Some(b"two"), Some(b"")];
    for ((key, prepared), value) in filed.iter().chain(&logged).zip(values) {
        node.put(0, key, value, Kind::Committed { prepared: Some(*prepared) });
    }
    node.run();
    node.stepper.advance(Duration::from_millis(10));
    assert_eq!(marks(&node, 0), (8, 2));
    drop(node);
    let node = Node::start_with(&sim.power_cut(Fate::LoseUnsynced), 7, Mode::Logged.options()).unwrap();
    assert_eq!(value(&node, 0, "filed").unwrap(), b"one");
    assert_eq!(value(&node, 0, "logged").unwrap(), b"two");
    assert_eq!(value(&node, 0, "logged, empty").unwrap(), b"");
    let gone = KeyBuf::in_default_collection(b"filed, deleted").unwrap();
    assert!(node.bucket.fetch_now(VbId(0), gone.as_key()).unwrap().unwrap().is_deleted());
}

/// Goal: whatever fails while a start replays the log, the next start has everything. Method: a log with much that is not
/// filed; each call of its replay fails in turn, by itself or from there on; then the program is killed, or the power goes.
#[test]
fn a_replay_that_fails_anywhere_is_made_up_for_by_the_next_start() {
    let failing = [
        (Op::Sync, EIO),
        (Op::SyncDir, EIO),
        (Op::Write, EIO),
        (Op::Write, 28),
        (Op::Create, 28),
        (Op::Rename, EIO),
        (Op::RemoveFile, EIO),
        (Op::Open, 24),
        (Op::Read, EIO),
        (Op::List, EIO),
    ];
    for (seed, mode) in (60..).zip(LOG_MODES) {
        let (env, mut sim) = sim::env(seed);
        let node = Node::start_with(&env, seed, mode.options()).unwrap();
        let mut history = History { mode, bucket_made: true, ..History::default() };
        work_on(&node, seed, 12, &mut history);
        drop(node);
        sim.power_cut(Fate::LoseUnsynced);
        for (op, errno) in failing {
            let mut refused = 0;
            for nth in 0.. {
                let mut world = sim.fork();
                let rule = Rule::new(op, Fault::Errno(errno)).nth(nth);
                let rule = if nth % 2 == 0 { rule } else { rule.sticky() };
                world.storage.arm(FaultPlan::new().rule(rule));
                // Other buckets and reads may go on, and then it is only later that something is found wrong.
                refused += u64::from(Node::start_with(&world.env(), 1, mode.options()).is_err());
                let is_past_the_end = world.storage.count(op) <= nth;
                let env = match op {
                    Op::SyncDir => world.power_cut(nth),
                    _ => world.kill(),
                };
                let node = Node::start_with(&env, 1, mode.options()).expect("a healthy disk opens");
                assert_node_holds(&node, &history);
                drop(node);
                drop(assert_holds(&world.power_cut(Fate::LoseUnsynced), &history));
                if is_past_the_end {
                    break;
                }
            }
            assert!(refused > 0 || matches!(op, Op::RemoveFile | Op::Rename | Op::Create), "{op:?} is met");
        }
    }
}

/// S31: a replay of short reads, short writes and interruptions gives the same.
#[test]
fn a_replay_from_a_disk_that_does_things_by_halves_gives_the_same() {
    for (seed, mode) in (70..90).zip(LOG_MODES.into_iter().cycle()) {
        let _seed = Seed(seed);
        let (env, mut sim) = sim::env(seed);
        let history = work(&env, mode, seed, 20);
        let env = sim.power_cut(seed);
        sim.storage.arm(FaultPlan::new().noise(Noise::loud()));
        drop(Node::start_with(&env, 1, mode.options()).expect("opens"));
        drop(assert_holds(&sim.power_cut(Fate::LoseUnsynced), &history));
    }
}
