//! Single calls fail: nothing is acknowledged that is not there, what can be tried again is, the rest is said.

mod rig;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use env::sim::{self, Fate, Fault, FaultPlan, Op, Rule, Sim, SimStorage};
use persist::{Options, StoreError, Verdict};
use rig::{FILE_MODES, History, MODES, Mode, Node, Seed, assert_holds, assert_node_holds, work_on};
use types::{KeyBuf, Kind, VbId};

const EIO: i32 = 5;
const EMFILE: i32 = 24;
const ENOSPC: i32 = 28;

fn started(seed: u64, mode: Mode) -> (Sim, Node) {
    let (env, sim) = sim::env(seed);
    let node = Node::start_with(&env, seed, mode.options()).unwrap();
    (sim, node)
}

/// A vBucket with `a` durable and `b` about to be flushed under `plan`.
fn flushed_under(mode: Mode, plan: FaultPlan) -> (Sim, Node, History) {
    let (sim, node) = started(7, mode);
    let mut history = History { mode, ..History::default() };
    let changes = history.changes.entry(0).or_default();
    changes.push(node.set(0, "a", b"one"));
    node.run();
    history.durable.insert(0, 1);
    assert_eq!(node.durable(0), 1);
    sim.storage.arm(plan);
    changes.push(node.set(0, "a", b"two"));
    node.run();
    (sim, node, history)
}

fn read(node: &Node, key: &str) -> Option<Vec<u8>> {
    let key = KeyBuf::in_default_collection(key.as_bytes()).unwrap();
    node.bucket.fetch_now(VbId(0), key.as_key()).unwrap().map(|item| item.value().to_vec())
}

/// S01, S30: a failed sync acknowledges nothing, stops this vBucket and no other, is visible, and shows nothing of the
/// failed commit; a restart finds the acknowledged state or the one in flight.
#[test]
fn a_failed_sync_poisons_its_vbucket_and_shows_nothing() {
    for (nth, mode) in [0, 1].into_iter().flat_map(|nth| FILE_MODES.map(|mode| (nth, mode))) {
        for fate in [Fate::LoseUnsynced, Fate::KeepUnsynced, Fate::Seeded(nth)] {
            let (mut sim, node, mut history) = flushed_under(mode, FaultPlan::new().fail_nth(Op::Sync, nth, EIO));
            let nudges = node.nudges();
            assert_eq!(node.durable(0), 1);
            let reason = node.poisoned(0).expect("poisoned").to_owned();
            assert!(reason.starts_with("fsync of /data/buckets/b/0.couch.1 failed: "), "{reason}");
            let stats = node.bucket.stats();
            assert_eq!((stats.sync_failures, stats.poisoned), (1, vec![(VbId(0), reason)]));
            assert_eq!(read(&node, "a").unwrap(), b"one", "reads go on, at the last good commit");

            // More changes are neither flushed nor acknowledged, however long we wait; others' are.
            history.changes.get_mut(&0).unwrap().push(node.set(0, "a", b"three"));
            let other = node.set(1, "x", b"fine");
            node.stepper.advance(Duration::from_secs(60));
            assert_eq!((node.durable(0), node.durable(1)), (1, 1));
            history.changes.insert(1, vec![other]);
            history.durable.insert(1, 1);
            assert_eq!(node.nudges(), nudges + 1);
            let left: Vec<_> = node.store.drain().left.into_iter().map(|left| (left.vb, left.why)).collect();
            assert_eq!(left.len(), 1);
            assert!(left[0].0 == VbId(0) && left[0].1.starts_with("fsync of "), "{left:?}");

            drop(node);
            let env = sim.power_cut(fate);
            history.changes.get_mut(&0).unwrap().truncate(2);
            let node = assert_holds(&env, &history);
            assert!(!node.store.was_clean());
        }
    }
}

/// S30 for the first commit of a vBucket: its one sync, and the directory's.
#[test]
fn a_failed_sync_of_a_new_file_acknowledges_nothing() {
    for (op, nth) in [(Op::Sync, 0), (Op::SyncDir, 0)] {
        for fate in [Fate::LoseUnsynced, Fate::KeepUnsynced] {
            let (mut sim, node) = started(8, Mode::Kept);
            sim.storage.arm(FaultPlan::new().fail_nth(op, nth, EIO));
            let item = node.set(0, "a", b"one");
            node.stepper.advance(Duration::from_secs(60));
            assert_eq!(node.durable(0), 0);
            assert!(node.poisoned(0).is_some());
            assert_eq!(read(&node, "a"), None);
            drop(node);
            let history = History { changes: [(0, vec![item])].into(), ..History::default() };
            drop(assert_holds(&sim.power_cut(fate), &history));
        }
    }
}

/// A sync that lies cannot be noticed, but a start after it must not invent anything.
#[test]
fn a_disk_that_lies_about_a_sync_leaves_an_earlier_state() {
    let (mut sim, node, mut history) =
        flushed_under(Mode::Direct, FaultPlan::new().rule(Rule::new(Op::Sync, Fault::Lie).times(2)));
    assert_eq!(node.durable(0), 2);
    drop(node);
    history.durable.insert(0, 1);
    drop(assert_holds(&sim.power_cut(Fate::LoseUnsynced), &history));
}

/// S31, S35: whatever call fails, once or often, in the end everything is there exactly once, and counts are right.
#[test]
fn a_flush_that_fails_is_tried_again_until_everything_is_there() {
    for (op, errno) in [(Op::Write, EIO), (Op::Open, EMFILE), (Op::Create, ENOSPC), (Op::Rename, EIO), (Op::Read, EIO)]
    {
        for seed in 0..12 {
            let _seed = Seed(seed);
            let mode = MODES[seed as usize % MODES.len()];
            let (mut sim, node) = started(seed, mode);
            let rule = Rule::new(op, Fault::Errno(errno)).path(".couch").nth(seed).times(1 + seed % 4);
            sim.storage.arm(FaultPlan::new().rule(rule));
            let mut history = History { mode, bucket_made: true, ..History::default() };
            work_on(&node, seed, 30, &mut history);
            node.stepper.advance(Duration::from_secs(60));
            assert_eq!(node.bucket.pending(), 0, "{op:?} {mode:?}: {:?}", node.bucket.stats());
            for vb in 0..rig::VBS {
                assert!(node.poisoned(vb).is_none(), "{op:?}");
                history.durable.insert(vb, node.durable(vb));
            }
            assert!(!node.bucket.disk_full());
            sim.storage.arm(FaultPlan::new());
            assert_node_holds(&node, &history);
            drop(node);
            drop(assert_holds(&sim.power_cut(Fate::LoseUnsynced), &history));
        }
    }
}

#[test]
fn a_failing_flush_waits_longer_each_time_and_acknowledges_nothing() {
    let (sim, node, _) = flushed_under(Mode::Direct, FaultPlan::new().fail_from(Op::Write, 0, EIO));
    let failures = |node: &Node| node.bucket.stats().flush_failures;
    assert_eq!((failures(&node), node.bucket.stats().waiting_vbs), (1, 1));
    // 100, 200, 400, 800, 1600, 3200, then 5000 ms.
    for (ms, expected) in [(99, 1), (1, 2), (200, 3), (400, 4), (800, 5), (1600, 6), (3200, 7), (5000, 8), (5000, 9)] {
        node.stepper.advance(Duration::from_millis(ms));
        assert_eq!(failures(&node), expected);
    }
    assert_eq!((node.durable(0), node.poisoned(0)), (1, None));
    assert_eq!(read(&node, "a").unwrap(), b"one");
    sim.storage.arm(FaultPlan::new());
    node.stepper.advance(Duration::from_secs(5));
    assert_eq!((node.durable(0), read(&node, "a").unwrap()), (2, b"two".to_vec()));
}

/// Goal: a stop does not wait for files that cannot be written, says which and why, and whether anything is lost. Method: no
/// file takes a write; how long the stop goes on is told by the test's clock.
#[test]
fn a_stop_leaves_without_what_cannot_be_filed_and_says_what_becomes_of_it() {
    for mode in MODES {
        let (mut sim, node) = started(11, mode);
        (0..rig::VBS).for_each(|vb| drop(node.set(vb, "a", b"one")));
        node.file_all();
        let filed = |node: &Node| (0..rig::VBS).map(|vb| node.logs[usize::from(vb)].marks.filed().0).sum::<u64>();
        assert_eq!(filed(&node), u64::from(rig::VBS));
        sim.storage.arm(FaultPlan::new().rule(Rule::new(Op::Write, Fault::Errno(EIO)).path(".couch").sticky()));
        (0..rig::VBS).for_each(|vb| drop(node.set(vb, "b", b"two")));
        node.set(0, "c", b"three");
        // Retries are at their longest pause.
        node.stepper.advance(Duration::from_secs(60));

        let failures = node.bucket.stats().flush_failures;
        let mut drain = node.store.begin_drain();
        node.run();
        let tried = node.bucket.stats().flush_failures - failures;
        assert_eq!(tried, u64::from(rig::VBS), "what waits for its next time is tried at once");
        let mut waited = 0;
        while !drain.is_over() {
            node.stepper.advance(Duration::from_secs(1));
            waited += 1;
            assert!(waited <= 10, "{mode:?}");
        }
        assert_eq!(waited, 10, "{mode:?}: it is tried again for a while");
        let drained = drain.end();
        let told = drained.to_string();
        assert_eq!(drained.left.len(), usize::from(rig::VBS));
        assert!(
            told.contains("vBuckets whose files lack changes: 0, 1, 2, 3; 0: ") && told.contains("os error 5"),
            "{told}"
        );
        match mode.is_logged() {
            true => assert!(
                told.contains("the next start files them: 5; changes that are not known to be on disk: 0"),
                "{told}"
            ),
            false => assert!(told.contains("on disk: 5, of vBuckets: 4; none of them was acknowledged"), "{told}"),
        }
        assert_eq!(drained.is_lossy(), !mode.is_logged());
        drop(node);
        let node = Node::start_with(&sim.kill(), 1, mode.options()).unwrap();
        assert!(!node.store.was_clean());
        assert_eq!(filed(&node), if mode.is_logged() { 9 } else { 4 }, "{mode:?}");
    }
}

/// A file that cannot be written holds nobody else up, and everybody is waited for as long as anybody gets further.
#[test]
fn a_stop_waits_while_any_file_gets_further() {
    let (sim, node) = started(12, Mode::Kept);
    sim.storage.arm(FaultPlan::new().rule(Rule::new(Op::Write, Fault::Errno(EIO)).path(".couch").sticky()));
    (0..rig::VBS).for_each(|vb| drop(node.set(vb, "a", b"one")));
    node.run();
    let mut drain = node.store.begin_drain();
    node.stepper.advance(Duration::from_secs(9));
    assert!(!drain.is_over());
    let others = Rule::new(Op::Write, Fault::Errno(EIO)).path("2.couch").sticky();
    sim.storage.arm(FaultPlan::new().rule(others));
    node.stepper.advance(Duration::from_secs(5));
    assert!(!drain.is_over());
    node.stepper.advance(Duration::from_secs(9));
    assert!(!drain.is_over());
    node.stepper.advance(Duration::from_secs(1));
    assert!(drain.is_over());
    let left: Vec<_> = drain.end().left.iter().map(|left| (left.vb.0, left.lost)).collect();
    assert_eq!(left, [(2, 1)]);
}

/// The log is no help to a bucket whose directory somebody removed, or if its own is gone.
#[test]
fn a_stop_says_that_what_was_promised_is_lost_if_its_directory_was_removed() {
    let (sim, node, _) = flushed_under(Mode::Logged, FaultPlan::new());
    let files = Rule::new(Op::Write, Fault::Errno(EIO)).path(".couch").sticky();
    sim.storage.arm(FaultPlan::new().rule(files));
    node.env.storage.remove_file(Path::new("/data/buckets/b/bucket.json")).unwrap();
    let mut drain = node.store.begin_drain();
    node.stepper.advance(Duration::from_secs(10));
    assert!(drain.is_over());
    let told = drain.end().to_string();
    assert!(told.contains("on disk: 2, of vBuckets: 1; acknowledged as durable: 2"), "{told}");
}

/// S34: the disk fills up, is said to be full, reads go on, and space is all it takes to recover.
#[test]
fn a_full_disk_is_told_and_recovers_by_itself() {
    let (sim, node, mut history) = flushed_under(Mode::Direct, FaultPlan::new().space_bytes_max(1));
    assert!(node.bucket.disk_full() && node.store.disk_full() && node.bucket.stats().disk_full);
    assert_eq!(read(&node, "a").unwrap(), b"one");
    node.set(1, "b", b"in a file yet to be made");
    node.stepper.advance(Duration::from_secs(30));
    assert_eq!((node.durable(0), node.durable(1)), (1, 0));
    sim.storage.set_space_bytes_max(None);
    node.stepper.advance(Duration::from_secs(10));
    assert_eq!((node.durable(0), node.durable(1)), (2, 1));
    assert!(!node.bucket.disk_full());
    history.durable.insert(0, 2);
}

#[test]
fn no_descriptors_left_is_ridden_out() {
    let (sim, node, _) = flushed_under(Mode::Direct, FaultPlan::new().open_files_max(0));
    assert_eq!(node.durable(0), 1);
    let key = KeyBuf::in_default_collection(b"a").unwrap();
    let error = node.bucket.fetch_now(VbId(0), key.as_key()).unwrap_err();
    assert_eq!((error.verdict(), error.errno()), (Verdict::Retry, Some(EMFILE)));
    sim.storage.set_open_files_max(None);
    node.stepper.advance(Duration::from_secs(1));
    assert_eq!(node.durable(0), 2);
    assert_eq!(sim.storage.open_files(), 0, "files are closed after each commit");
}

/// Goal: many more vBuckets than descriptors cost opens, not failures, with everything kept and with nothing. Method: 30
/// buckets take turns under a limit that is hardly more than what one flush and one read need at a time.
#[test]
fn many_buckets_get_by_with_few_descriptors() {
    for files_max in [0, 3, 1024] {
        let (env, mut sim) = sim::env(11);
        let node = Node::start_with(&env, 11, Options { files_max, ..Options::default() }).unwrap();
        let others: Vec<_> = (0..29)
            .map(|n| {
                let spec =
                    persist::BucketSpec { name: format!("b{n}"), uuid: types::BucketUuid(100 + n), ..rig::spec() };
                let bucket = node.store.create_bucket(spec).unwrap();
                let logs = rig::attach(&bucket);
                (bucket, logs)
            })
            .collect();
        sim.storage.set_open_files_max(Some(6));
        for round in 0..3 {
            for (bucket, logs) in &others {
                for vb in 0..rig::VBS {
                    let value = format!("{round}");
                    let kind = Kind::Committed { prepared: None };
                    rig::append(&logs[usize::from(vb)], &node.env, "k", Some(value.as_bytes()), kind);
                    bucket.changed(VbId(vb), persist::Urgency::Durable);
                }
            }
            if round == 1 {
                // The off-switch and its opposite, under load.
                (0..50).for_each(|_| {
                    node.stepper.step();
                });
                node.store.set_files_max(0);
                node.store.set_files_max(files_max);
            }
            node.run();
            for (bucket, logs) in &others {
                let key = KeyBuf::in_default_collection(b"k").unwrap();
                let found = bucket.fetch_now(VbId(1), key.as_key()).unwrap().expect("written");
                assert_eq!(found.value(), format!("{round}").as_bytes());
                assert!(logs.iter().all(|log| log.marks.filed() == log.marks.high()), "{:?}", bucket.stats());
                assert_eq!(bucket.stats().flush_failures, 0);
            }
            let stats = node.store.files().stats();
            assert_eq!(sim.storage.open_files(), stats.kept as u64, "nothing is open that is not kept");
            assert!(stats.kept <= files_max.min(6));
        }
        others.iter().for_each(|(bucket, _)| node.store.delete_bucket(&bucket.spec().name).unwrap());
        assert_eq!(sim.storage.open_files(), 0, "a deleted bucket's files are closed");
        drop((others, node));
        let node = Node::start(&sim.power_cut(Fate::LoseUnsynced), 11).unwrap();
        assert_eq!(node.store.buckets().len(), 1);
    }
}

/// S33: a file that cannot be read never makes a key absent; one asked for together with others spares them nothing.
#[test]
fn a_read_that_fails_is_an_error_and_not_an_absent_key() {
    let (sim, node, _) = flushed_under(Mode::Direct, FaultPlan::new());
    let [found, absent, failed] = [0; 3].map(|_| Arc::new(AtomicU64::new(0)));
    let ask = &|key: &str| {
        let key = KeyBuf::in_default_collection(key.as_bytes()).unwrap();
        let (found, absent, failed) = (found.clone(), absent.clone(), failed.clone());
        let done = move |result: Result<Option<types::Item>, StoreError>| {
            let counter = match result {
                Ok(Some(_)) => found,
                Ok(None) => absent,
                Err(_) => failed,
            };
            counter.fetch_add(1, Ordering::Relaxed);
        };
        node.bucket.fetch(VbId(0), key.as_key(), Box::new(done));
    };
    let counts = || [&found, &absent, &failed].map(|c| c.load(Ordering::Relaxed));
    let opens = sim.storage.count(Op::Open);
    ["a", "a", "b"].into_iter().for_each(ask);
    node.run();
    assert_eq!(counts(), [2, 1, 0]);
    assert_eq!(sim.storage.count(Op::Open), opens + 1, "one look at the file for all");

    for op in [Op::Open, Op::Read] {
        sim.storage.arm(FaultPlan::new().fail_from(op, 0, EIO));
        ["a", "b"].into_iter().for_each(ask);
        node.run();
    }
    assert_eq!(counts(), [2, 1, 4]);
    assert_eq!(node.bucket.stats().fetch_failures, 2);
    sim.storage.arm(FaultPlan::new());

    let end = sim.storage.read_file(rig::file(0, 1)).unwrap().len() as u64;
    (0..end).step_by(16).for_each(|at| sim.storage.corrupt(rig::file(0, 1), at, 0xff).unwrap());
    let error = node.bucket.fetch_now(VbId(0), KeyBuf::in_default_collection(b"b").unwrap().as_key()).unwrap_err();
    assert_eq!(error.verdict(), Verdict::Abort, "{error}");
    assert!(error.to_string().contains("/data/buckets/b/0.couch.1@"), "{error}");
}

#[test]
fn whoever_waits_for_a_read_is_answered_when_the_store_closes() {
    let (_sim, node, _) = flushed_under(Mode::Direct, FaultPlan::new());
    let closed = Arc::new(AtomicU64::new(0));
    let Node { store, bucket, stepper, .. } = node;
    let ask = || {
        let key = KeyBuf::in_default_collection(b"a").unwrap();
        let closed = closed.clone();
        let done = move |result: Result<Option<types::Item>, StoreError>| {
            closed.fetch_add(u64::from(matches!(result, Err(StoreError::Closed))), Ordering::Relaxed);
        };
        bucket.fetch(VbId(0), key.as_key(), Box::new(done));
    };
    ask();
    drop(store);
    assert_eq!(closed.load(Ordering::Relaxed), 1);
    ask();
    stepper.run_until_idle();
    assert_eq!(closed.load(Ordering::Relaxed), 2);
}

/// A file that somebody else has written to is not built upon.
#[test]
fn a_file_that_moved_without_us_is_not_written() {
    let (sim, node, _) = flushed_under(Mode::Direct, FaultPlan::new());
    let copy = sim.storage.read_file(rig::file(0, 1)).unwrap();
    node.set(0, "c", b"three");
    node.run();
    sim.storage.write_file(rig::file(0, 1), &copy).unwrap();
    node.set(0, "d", b"four");
    node.run();
    assert_eq!(node.durable(0), 3);
    assert!(node.poisoned(0).is_some_and(|why| why.contains("but the last commit that succeeded is at")));
}

/// The sync after the next `n` fails, and no write succeeds from there on, not even one that takes back what was to be synced.
fn fail_all_from_sync(storage: &SimStorage, n: u64, has_come: &Arc<AtomicBool>) {
    let (again, has_come) = (storage.clone(), Arc::clone(has_come));
    storage.meanwhile(Op::Sync, "", move || match n {
        0 => {
            has_come.store(true, Ordering::Relaxed);
            let writes = Rule::new(Op::Write, Fault::Errno(EIO)).sticky();
            again.arm(FaultPlan::new().fail_nth(Op::Sync, 0, EIO).rule(writes));
        }
        n => fail_all_from_sync(&again, n - 1, &has_come),
    });
}

/// Goal: a sync that failed, and a restart without a reboot: what the page cache shows then is not all on disk, and it says it
/// is. What such a restart finds must be there after a power cut all the same. Method: fail each sync in turn, with several
/// fates of what it was for; kill; look; cut the power; look again.
#[test]
fn what_a_restart_finds_after_a_failed_sync_is_on_disk_before_it_counts() {
    for (seed, mode) in (50..).zip(MODES) {
        for nth in 0.. {
            let has_come = Arc::new(AtomicBool::new(false));
            for fate in 0..4 {
                let _seed = Seed(seed);
                let (env, mut sim) = sim::env(seed ^ fate << 32);
                let node = Node::start_with(&env, seed, mode.options()).unwrap();
                fail_all_from_sync(&sim.storage, nth, &has_come);
                let mut history = History { mode, bucket_made: true, ..History::default() };
                work_on(&node, seed, 10, &mut history);
                node.store.start_drain();
                node.stepper.advance(Duration::from_secs(60));
                history.note_durable(&node);
                drop(node);
                let node = Node::start_with(&sim.kill(), 1, mode.options()).expect("a kill leaves a store that opens");
                assert_node_holds(&node, &history);
                history.note_durable(&node);
                drop(node);
                drop(assert_holds(&sim.power_cut(Fate::LoseUnsynced), &history));
            }
            if !has_come.load(Ordering::Relaxed) {
                break;
            }
        }
    }
}
