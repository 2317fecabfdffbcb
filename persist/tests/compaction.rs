//! Files are compacted while they are written, the disk fails and the power goes: nothing is lost, nothing invented, and
//! nothing comes back.

mod rig;

use std::path::Path;
use std::time::Duration;

use env::Clock;
use env::sim::{self, Fate, Fault, FaultPlan, Op, Rule, Sim, cut_everywhere};
use persist::{CompactionOptions, Limits, Options, Purge, StoreError, Trigger};
use proptest::prelude::*;
use rig::{
    BUCKET, DATA, FILE_MODES, History, MODES, Mode, Node, Seed, VBS, assert_holds, assert_node_holds, file, work_on,
};
use scheduler::PoolKind;
use types::{Item, KeyBuf, Kind, Level, Seqno, VbId};

const EIO: i32 = 5;
const ENOSPC: i32 = 28;

fn work(env: &env::Env, mode: Mode, seed: u64, rounds: u64) -> History {
    let mut history = History { mode, compacts: true, ..History::default() };
    if let Ok(node) = Node::start_with(env, seed, mode.options()) {
        history.bucket_made = true;
        work_on(&node, seed, rounds, &mut history);
    }
    history
}

fn names(sim: &Sim) -> Vec<String> {
    let dir = Path::new(DATA).join("buckets").join(BUCKET);
    env::Storage::list(&sim.storage, &dir).unwrap()
}

/// One file a vBucket at most, and nothing unfinished or set aside.
fn assert_tidy(sim: &Sim) {
    let names = names(sim);
    for vb in 0..VBS {
        let own: Vec<_> = names.iter().filter(|name| name.starts_with(&format!("{vb}."))).collect();
        assert!(own.len() <= 1, "{own:?}");
    }
    assert!(!names.iter().any(|name| name.ends_with(".aside") || name.contains(".compact")), "{names:?}");
}

/// S16. Goal: whatever a compaction was doing when the power went, exactly one generation of the file counts, and it has
/// all that was acknowledged. Method: cut before each I/O of a workload that compacts.
#[test]
fn power_loss_at_every_io_of_a_compaction_loses_nothing() {
    for (seed, mode) in (50..).zip(MODES) {
        let (_, start) = sim::env(seed);
        cut_everywhere(
            &start,
            1,
            |env| work(env, mode, seed, 8),
            |world, history| {
                drop(assert_holds(&world.env(), history));
                assert_tidy(world);
            },
        );
    }
}

/// A vBucket with garbage, all of it in its file.
fn node_with_garbage(mode: Mode, seed: u64) -> (Sim, Node, History) {
    let (env, sim) = sim::env(seed);
    let node = Node::start_with(&env, seed, mode.options()).unwrap();
    let mut history = History { mode, compacts: true, ..History::default() };
    for round in 0..30 {
        set(&node, &mut history, &format!("k{}", round % 10), &[round; 200]);
        node.run();
    }
    node.file_all();
    (sim, node, history)
}

fn set(node: &Node, history: &mut History, key: &str, value: &[u8]) -> Item {
    let item = node.set(0, key, value);
    history.changes.entry(0).or_default().push(item.clone());
    item
}

fn get(node: &Node, key: &str) -> Option<Vec<u8>> {
    let key = KeyBuf::in_default_collection(key.as_bytes()).unwrap();
    node.bucket.fetch_now(VbId(0), key.as_key()).unwrap().map(|item| item.value().to_vec())
}

/// Goal: a compaction that fails leaves the old file as it was, and none of its own. Method: each call of each kind fails
/// in turn, while the vBucket is written.
#[test]
fn a_compaction_that_fails_leaves_the_old_file_and_gives_the_space_back() {
    for (op, errno) in [
        (Op::Create, ENOSPC),
        (Op::Write, ENOSPC),
        (Op::Write, EIO),
        (Op::Sync, EIO),
        (Op::WriteBack, EIO),
        (Op::Rename, EIO),
        (Op::SyncDir, EIO),
        (Op::Read, EIO),
        (Op::Size, EIO),
    ] {
        for nth in 0.. {
            let _seed = Seed(nth);
            let (mut sim, node, mut history) = node_with_garbage(Mode::Kept, 60);
            let rule =
                Rule::new(op, Fault::Errno(errno)).nth(nth).path(if op == Op::SyncDir { "" } else { ".compact" });
            sim.storage.arm(FaultPlan::new().rule(rule));
            let answer = node.compact(0, Purge::default());
            node.stepper.step();
            history.changes.get_mut(&0).unwrap().push(node.set(0, "k1", b"meanwhile"));
            node.run();
            let result = answer.get().expect("it has ended");
            sim.storage.arm(FaultPlan::new());
            if let Err(error) = &result {
                assert!(error.errno() == Some(errno), "{op:?} {nth}: {error}");
                assert_eq!(get(&node, "k3").unwrap(), [23; 200], "reads go on");
                if op == Op::SyncDir {
                    assert!(node.poisoned(0).is_some(), "which file a start would find is not known");
                } else {
                    assert!(!names(&sim).iter().any(|name| name.contains(".compact")), "{op:?} {nth}");
                    node.compact(0, Purge::default());
                    node.run();
                    assert!(names(&sim).contains(&"0.couch.2".to_owned()), "the next one succeeds");
                }
            }
            if node.poisoned(0).is_none() {
                history.durable.insert(0, node.durable(0));
                assert_eq!(node.durable(0), history.changes[&0].last().unwrap().seqno().0);
            }
            drop(node);
            sim.power_cut(Fate::Seeded(nth));
            drop(assert_holds(&sim.env(), &history));
            assert_tidy(&sim);
            if result.is_ok() {
                assert!(nth > 0, "{op:?} was never met");
                break;
            }
        }
    }
}

/// Goal: a disk that is too full for the copy stays as full as it was, and goes on serving.
#[test]
fn a_compaction_without_space_takes_none() {
    let (sim, node, mut history) = node_with_garbage(Mode::Kept, 61);
    let used = sim.storage.used_bytes();
    sim.storage.arm(FaultPlan::new().space_bytes_max(used + 3000));
    let answer = node.compact(0, Purge::default());
    node.run();
    assert_eq!(answer.get().unwrap().unwrap_err().errno(), Some(ENOSPC));
    assert_eq!(sim.storage.used_bytes(), used);
    sim.storage.arm(FaultPlan::new());
    set(&node, &mut history, "k0", b"after");
    node.run();
    let answer = node.compact(0, Purge::default());
    node.run();
    let report = answer.report();
    assert!(report.bytes_after < report.bytes_before / 2, "{report:?}");
    assert!(sim.storage.used_bytes() < used);
    assert_node_holds(&node, &history);
}

/// S17: whatever lies beside the good file under a newer name, the good file is used.
#[test]
fn bogus_newer_generations_and_leftovers_do_not_win() {
    for bogus in [&b""[..], b"garbage", &[0; 8192]] {
        let (mut sim, node, mut history) = node_with_garbage(Mode::Kept, 62);
        history.durable.insert(0, node.durable(0));
        drop(node);
        let dir = Path::new(DATA).join("buckets").join(BUCKET);
        sim.storage.write_file(file(0, 2), bogus).unwrap();
        sim.storage.write_file(dir.join("0.couch.1.compact"), bogus).unwrap();
        sim.storage.write_file(dir.join("0.couch.1.sorting"), bogus).unwrap();
        let node = assert_holds(&sim.env(), &history);
        history.changes.get_mut(&0).unwrap().extend(node.warm_up(0).into_iter().filter(|i| i.id() == b"\0later"));
        assert!(names(&sim).contains(&"0.couch.2.aside".to_owned()));
        let answer = node.compact(0, Purge::default());
        node.run();
        answer.report();
        assert!(names(&sim).contains(&"0.couch.3".to_owned()), "a name is not used twice");
        history.durable.insert(0, node.durable(0));
        drop(node);
        sim.power_cut(Fate::LoseUnsynced);
        assert_eq!(
            Node::start_with(&sim.env(), 1, Mode::Kept.options()).unwrap().bucket.recovered()[0].file,
            "0.couch.3"
        );
    }
}

/// S20. The name of a compacted file may be back after power loss, as nobody syncs its removal. What it holds beyond a rollback
/// of the file that took its place is void.
#[test]
fn an_old_file_that_is_back_does_not_undo_a_rollback() {
    let (mut sim, node, _) = node_with_garbage(Mode::Kept, 76);
    node.compact(0, Purge::default());
    node.run();
    assert_eq!(node.bucket.roll_back(VbId(0), Seqno(5)).unwrap().high, Seqno(0), "no earlier commit is left");
    drop(node);
    let env = sim.power_cut(Fate::LoseUnsynced);
    assert!(names(&sim).contains(&"0.couch.1".to_owned()), "nothing has come back");
    let node = Node::start(&env, 1).unwrap();
    let found = node.bucket.recovered().into_iter().find(|found| found.vb == VbId(0)).unwrap();
    assert_eq!((found.file.as_str(), found.high, found.record.rollbacks), ("0.couch.2", Seqno(0), 1));
    assert_tidy(&sim);
}

/// S25. Whoever goes back from the beginning of a compacted file does not look for an earlier commit in all of it.
#[test]
fn going_back_in_a_compacted_file_reads_little_of_it() {
    let (sim, node, mut history) = node_with_garbage(Mode::Kept, 77);
    (0..2000).for_each(|n| drop(set(&node, &mut history, &format!("n{n}"), &[7; 1000])));
    node.file_all();
    let compacted = node.compact(0, Purge::default());
    node.run();
    let blocks = compacted.report().bytes_after / 4096;
    let last = set(&node, &mut history, "last", b"v").seqno();
    node.file_all();
    for to in [Seqno(last.0 - 1), Seqno(1)] {
        sim.storage.arm(FaultPlan::new());
        let high = node.bucket.roll_back(VbId(0), to).unwrap().high;
        assert_eq!(high, if to.0 == 1 { Seqno(0) } else { to });
        let reads = sim.storage.count(Op::Read);
        assert!(blocks > 50 && reads < 20, "{reads} reads in a file of {blocks} blocks, back to {to}");
    }
}

/// S15. Goal: a compaction ends although its vBucket is written faster than it follows. Method: after each of its steps
/// more is written than a step copies.
#[test]
fn a_compaction_ends_however_fast_the_writer_is() {
    for mode in [Mode::Kept, Mode::Logged] {
        let (_, node, mut history) = node_with_garbage(mode, 63);
        let piece = CompactionOptions { piece_bytes_max: 1024, ..CompactionOptions::default() };
        node.store.set_compaction(piece);
        (0..1000).for_each(|n| drop(set(&node, &mut history, &format!("n{n}"), &[7; 100])));
        node.file_all();
        let answer = node.compact(0, Purge::default());
        let mut written = 0u64;
        while answer.get().is_none() {
            for _ in 0..100 {
                set(&node, &mut history, &format!("n{}", written % 1000), &[7; 100]);
                written += 1;
            }
            if mode.is_logged() {
                node.store.start_drain();
            }
            for _ in 0..3 {
                node.stepper.step();
            }
            assert!(written < 200_000, "it would never end");
        }
        let report = answer.report();
        assert!(report.rounds >= 3, "{report:?}");
        node.file_all();
        history.durable.insert(0, node.durable(0));
        assert_eq!(node.durable(0), history.changes[&0].last().unwrap().seqno().0, "nobody is held off any more");
        assert_node_holds(&node, &history);
    }
}

/// Goal: who writes a vBucket waits for no disk while its files are swapped. Method: the step in which the new file gets its
/// name syncs nothing, neither a file nor the directory.
#[test]
fn files_are_swapped_without_a_sync() {
    for mode in MODES {
        let (sim, node, _) = node_with_garbage(mode, 74);
        let answer = node.compact(0, Purge::default());
        let syncs = || (sim.storage.count(Op::Sync), sim.storage.count(Op::SyncDir));
        let mut before = syncs();
        while !names(&sim).contains(&"0.couch.2".to_owned()) {
            before = syncs();
            assert!(node.stepper.step());
        }
        assert_eq!(syncs(), before, "{mode:?}");
        node.run();
        answer.report();
    }
}

/// Goal: what is acknowledged between the swap of the files and the sync of their directory is not lost with the new name.
/// Method: a change comes right after the swap, in as many orders as there are seeds, and the power goes once it is durable.
#[test]
fn what_is_acknowledged_right_after_a_swap_survives_power_loss() {
    for mode in FILE_MODES {
        let mut came_first = 0;
        for seed in 80..100 {
            let _seed = Seed(seed);
            let (mut sim, node, mut history) = node_with_garbage(mode, seed);
            node.compact(0, Purge::default());
            while !names(&sim).contains(&"0.couch.2".to_owned()) {
                node.stepper.step();
            }
            let last = set(&node, &mut history, "k", b"right after");
            while node.durable(0) < last.seqno().0 {
                assert!(node.stepper.step());
            }
            came_first += u32::from(names(&sim).contains(&"0.couch.1".to_owned()));
            history.durable.insert(0, last.seqno().0);
            let after = sim.power_cut(Fate::LoseUnsynced);
            drop(node);
            drop(assert_holds(&after, &history));
            assert_tidy(&sim);
        }
        assert!(came_first > 0, "the compaction always came first");
    }
}

/// Readers that have the old file open go on reading it; those who come later read the new one.
#[test]
fn a_reader_of_the_old_file_reads_on() {
    let (sim, node, history) = node_with_garbage(Mode::Direct, 64);
    let mut answer = None;
    let mut seen = 0;
    let warm_up = persist::WarmUp { tombstones: true, ..Default::default() };
    let mut each = |_: Item| {
        seen += 1;
        if seen == 2 {
            answer = Some(node.compact(0, Purge::default()));
            node.run();
            assert!(!names(&sim).contains(&"0.couch.1".to_owned()));
        }
    };
    node.bucket.warm_up(VbId(0), warm_up, &mut |_, _| true, &mut each).unwrap();
    assert_eq!(seen, 10);
    answer.unwrap().report();
    assert_node_holds(&node, &history);
}

/// S21: the highest seqno stays, young tombstones stay, what is purged is on record, and nothing comes back.
#[test]
fn tombstones_go_when_they_are_old_enough_and_never_the_highest_seqno() {
    let (mut sim, node, mut history) = node_with_garbage(Mode::Logged, 65);
    let deleted = Kind::Committed { prepared: None };
    for key in ["k0", "k1", "k2"] {
        history.changes.get_mut(&0).unwrap().push(node.put(0, key, None, deleted));
    }
    node.file_all();
    let tombstones = |node: &Node| node.warm_up(0).iter().filter(|item| item.is_deleted()).count();
    let compact = |node: &Node, purge| {
        let answer = node.compact(0, purge);
        node.run();
        answer.report()
    };
    // The rig's tombstones are as old as can be.
    let nothing = Purge { before_s: Some(0), ..Purge::default() };
    assert_eq!((compact(&node, nothing).tombstones_purged, tombstones(&node)), (0, 3));
    let first = Purge { upto: Some(types::Seqno(31)), ..Purge::default() };
    let report = compact(&node, first);
    assert_eq!((report.tombstones_purged, report.purge.0, tombstones(&node)), (1, 31, 2));
    let report = compact(&node, Purge { all: true, ..Purge::default() });
    assert_eq!((report.tombstones_purged, report.purge.0, tombstones(&node)), (1, 32, 1), "33 is the highest");
    assert_eq!(node.bucket.purge_seqno(VbId(0)).0, 32);
    assert_eq!(get(&node, "k0"), None);

    // The log still has the documents that were deleted.
    history.durable.insert(0, 33);
    drop(node);
    sim.power_cut(Fate::LoseUnsynced);
    let node = assert_holds(&sim.env(), &history);
    assert_eq!((get(&node, "k0"), node.bucket.purge_seqno(VbId(0)).0), (None, 32));
}

/// Prepares whose outcome is known go; the others stay, and can still be committed.
#[test]
fn only_completed_prepares_are_left_out() {
    let (mut sim, node, mut history) = node_with_garbage(Mode::Kept, 66);
    let prepare = Kind::Prepare { level: Level::PersistMajority };
    let changes = history.changes.get_mut(&0).unwrap();
    let done = node.put(0, "p1", Some(b"1"), prepare);
    // In two flushes: of one, nothing of the prepare would be in the file.
    node.run();
    let commit = node.put(0, "p1", Some(b"1"), Kind::Committed { prepared: Some(done.seqno()) });
    changes.extend([done, commit, node.put(0, "p2", Some(b"2"), prepare)]);
    node.run();
    let answer = node.compact(0, Purge::default());
    node.run();
    assert_eq!(answer.report().prepares_dropped, 1);
    assert_eq!(node.bucket.open_prepares(VbId(0)).unwrap().len(), 1);
    history.durable.insert(0, 33);
    drop(node);
    sim.power_cut(Fate::LoseUnsynced);
    let node = assert_holds(&sim.env(), &history);
    assert_eq!(node.bucket.open_prepares(VbId(0)).unwrap()[0].value(), b"2");
}

/// S14: whoever asks for a compaction that waits already adds to it, and is answered by what does both.
#[test]
fn requests_for_a_waiting_compaction_are_merged() {
    let (_, node, mut history) = node_with_garbage(Mode::Kept, 67);
    history.changes.get_mut(&0).unwrap().push(node.put(0, "k5", None, Kind::Committed { prepared: None }));
    set(&node, &mut history, "k6", b"last");
    node.run();
    let plain = node.compact(0, Purge { before_s: Some(0), ..Purge::default() });
    let purging = node.compact(0, Purge { all: true, ..Purge::default() });
    node.run();
    assert_eq!(plain.report(), purging.report());
    assert_eq!(purging.report().tombstones_purged, 1);
    assert_eq!(node.bucket.stats().compactions, 1);

    let running = node.compact(0, Purge::default());
    node.stepper.step();
    let next = node.compact(0, Purge::default());
    node.run();
    assert_ne!((running.report(), node.bucket.stats().compactions), (next.report(), 2), "not the one that had begun");
}

/// S12, S13: never more than the limit, always as many as that, and everybody gets a turn, first come first served.
#[test]
fn the_limit_is_held_and_reached_and_nobody_starves() {
    for limit in [1, 2, 3] {
        let (env, _) = sim::env(68);
        let mut options = Mode::Kept.options();
        options.compaction.limit = limit;
        let node = Node::start_with(&env, 68, options).unwrap();
        (0..VBS).for_each(|vb| (0..100).for_each(|n| drop(node.set(vb, &format!("k{n}"), &[n; 100]))));
        node.run();
        let answers: Vec<_> = (0..VBS).map(|vb| node.compact(vb, Purge::default())).collect();
        let mut begun = Vec::new();
        let (mut steps, mut short) = (0, 0);
        while node.stepper.step() {
            let (running, queued) = node.store.compactions();
            assert!(running.len() <= limit);
            steps += 1;
            short += u32::from(queued > 0 && running.len() < limit);
            begun.extend(running.iter().map(|r| r.vb.0).filter(|vb| !begun.contains(vb)).collect::<Vec<_>>());
        }
        assert!(short * 20 < steps, "{short} of {steps} steps with less than {limit}");
        assert_eq!(begun, (0..VBS).collect::<Vec<_>>());
        assert!(answers.iter().all(|answer| answer.report().bytes_after > 0));
    }
}

/// S18, S19: a bucket goes while its files are compacted, and another of the same name comes: whoever asked is told, no
/// file is left, the new one's are its own.
#[test]
fn a_bucket_may_be_dropped_and_made_again_at_any_step_of_a_compaction() {
    for steps in 0.. {
        let (sim, node, _) = node_with_garbage(Mode::Kept, 69);
        let (first, second) = (node.compact(0, Purge::default()), node.compact(1, Purge::default()));
        for n in 0..steps {
            if n % 5 == 0 {
                node.set(0, "k", &[0; 500]);
            }
            node.stepper.step();
        }
        let is_over = first.get().is_some();
        node.store.delete_bucket(BUCKET).unwrap();
        assert!(first.get().is_some() && second.get().is_some(), "told, at step {steps}");
        assert!(is_over || matches!(first.get(), Some(Err(StoreError::Cancelled))));
        let spec = persist::BucketSpec { uuid: types::BucketUuid(6), ..rig::spec() };
        let bucket = node.store.create_bucket(spec).unwrap();
        assert_eq!(names(&sim), ["bucket.json"]);
        let logs = rig::attach(&bucket);
        rig::append(&logs[0], &node.env, "mine", Some(b"v"), Kind::Committed { prepared: None });
        bucket.changed(VbId(0), persist::Urgency::Durable);
        node.run();
        assert_eq!(names(&sim), ["0.couch.1", "bucket.json"]);
        assert!(matches!(node.compact(0, Purge::default()).get(), Some(Err(StoreError::Closed))));
        if is_over {
            break;
        }
    }
}

/// Cancelled at any step, a compaction ends at once, and the vBucket is as if it had not been.
#[test]
fn a_cancelled_compaction_leaves_nothing_and_holds_nobody_up() {
    for steps in 0.. {
        let (sim, node, mut history) = node_with_garbage(Mode::Kept, 70);
        let answer = node.compact(0, Purge::default());
        for n in 0..steps {
            if n % 3 == 0 {
                set(&node, &mut history, "k", &[n as u8; 300]);
            }
            node.stepper.step();
        }
        let is_over = answer.get().is_some();
        node.bucket.cancel_compaction(VbId(0));
        assert!(answer.get().is_some());
        assert_eq!(node.store.compactions().0, []);
        // If it was past the end, the new file still gets its name.
        node.run();
        assert!(!names(&sim).iter().any(|name| name.contains(".compact")));
        set(&node, &mut history, "after", b"x");
        node.run();
        assert_eq!(node.durable(0), history.changes[&0].len() as u64);
        assert_node_holds(&node, &history);
        if is_over {
            break;
        }
    }
}

/// S22: what has expired is told to whoever knows the newest version, and kept.
#[test]
fn expired_documents_are_reported_and_left_to_who_knows_the_newest_version() {
    let (_, node, _) = node_with_garbage(Mode::Kept, 71);
    let key = KeyBuf::in_default_collection(b"old").unwrap();
    node.logs[0].append(&*node.env.clock, |stamp| {
        let meta = types::Meta {
            seqno: stamp.seqno,
            cas: stamp.cas,
            rev: types::RevSeqno(1),
            flags: 0,
            expiry: 7,
            datatype: types::Datatype::RAW,
            deleted: None,
        };
        Item::new(key.as_key(), meta, Kind::Committed { prepared: None }, Some(b"v"))
    });
    node.bucket.changed(VbId(0), persist::Urgency::Durable);
    node.run();
    let answer = node.compact(0, Purge::default());
    node.run();
    answer.report();
    assert_eq!(node.expired(), [b"old"]);
    assert_eq!(get(&node, "old").unwrap(), b"v");
}

/// The governor: while clients wait for slow syncs, a compaction waits too and says why; it goes on at the floor's rate at
/// least, and as fast as it can once nobody waits.
#[test]
fn a_compaction_is_slowed_by_what_clients_feel_and_says_so() {
    let (_, node, mut history) = node_with_garbage(Mode::Logged, 73);
    (0..2000).for_each(|n| drop(set(&node, &mut history, &format!("n{n}"), &[7; 1000])));
    node.file_all();
    let floor_bytes_per_s = 64 << 10;
    let governor = node.store.governor();
    governor.set_limits(Limits { latency_budget: Some(Duration::from_millis(5)), floor_bytes_per_s });
    node.store.set_compaction(CompactionOptions::default());
    let slow_sync = || governor.foreground(Duration::from_millis(50));
    let ms = Duration::from_millis(1);
    for _ in 0..2000 {
        slow_sync();
        node.clock.advance(ms);
    }
    let answer = node.compact(0, Purge::default());
    let mut waited_ms = 0;
    while answer.get().is_none() {
        slow_sync();
        node.stepper.advance(ms);
        waited_ms += 1;
        if let Some(running) = node.store.compactions().0.first().filter(|_| waited_ms > 500) {
            assert_eq!(running.held, persist::Held::AtFloor);
            assert!(running.bytes_per_s <= floor_bytes_per_s * 3 && running.percent() < 100, "{running:?}");
        }
        assert!(waited_ms < 20_000, "the floor lets it end");
    }
    assert!(waited_ms > 1000, "so much at 64 KiB/s takes more than {waited_ms} ms");
    node.stepper.advance(Duration::from_secs(1));
    let began = node.clock.monotonic();
    let answer = node.compact(0, Purge::default());
    node.run();
    answer.report();
    assert_eq!(node.clock.monotonic(), began, "nobody waits, nothing is held back");
}

/// Goal: a disk that runs full while a compaction runs makes it faster, whoever feels it, and says why. Method: the space
/// goes when the compaction has begun, and comes back when nothing is compacted any more.
#[test]
fn a_disk_that_runs_full_meanwhile_raises_the_floor() {
    let (sim, node, mut history) = node_with_garbage(Mode::Logged, 75);
    (0..2000).for_each(|n| drop(set(&node, &mut history, &format!("n{n}"), &[7; 1000])));
    node.file_all();
    let governor = node.store.governor();
    let limits = Limits { latency_budget: Some(Duration::from_millis(5)), floor_bytes_per_s: 64 << 10 };
    governor.set_limits(limits);
    node.store.set_compaction(CompactionOptions { free_bytes_low: 64 << 20, ..CompactionOptions::default() });
    let wait = |ms: u64| {
        for _ in 0..ms {
            governor.foreground(Duration::from_millis(50));
            node.stepper.advance(Duration::from_millis(1));
        }
    };
    wait(2000);
    let answer = node.compact(0, Purge::default());
    wait(500);
    assert_eq!((governor.reading().held, governor.reading().floor_bytes_per_s), (persist::Held::AtFloor, 64 << 10));
    sim.storage.set_space_bytes_max(Some(sim.storage.used_bytes() + (16 << 20)));
    wait(500);
    assert_eq!(governor.reading().held, persist::Held::AtRaisedFloor);
    assert!(governor.reading().floor_bytes_per_s >= 64 << 20);
    assert!(answer.get().is_some(), "at the old floor it takes half a minute");
    wait(3000);
    assert_eq!(governor.reading().held, persist::Held::AtRaisedFloor, "it is as full as before");
    sim.storage.set_space_bytes_max(None);
    wait(1500);
    assert_eq!(
        governor.reading().floor_bytes_per_s,
        64 << 10,
        "there is room again, and nobody had to compact to see it"
    );
    node.run();
    assert_eq!(node.stepper.next_deadline(), None, "nobody looks any more");
}

/// Compactions that nobody wants slowed are not, whatever clients feel.
#[test]
fn a_compaction_that_is_not_paced_never_waits() {
    let (_, node, _) = node_with_garbage(Mode::Logged, 76);
    let governor = node.store.governor();
    let limits = Limits { latency_budget: Some(Duration::from_millis(5)), floor_bytes_per_s: 1 };
    governor.set_limits(limits);
    governor.foreground(Duration::from_secs(1));
    governor.spent(1 << 30);
    assert!(governor.pause().is_some());
    node.store.set_compaction(CompactionOptions { is_paced: false, ..CompactionOptions::default() });
    let answer = node.compact(0, Purge::default());
    node.run();
    answer.report();
    assert!(node.clock.monotonic() < Duration::from_millis(1));
}

/// S11: nothing else waits for a thread that compacts.
#[test]
fn compactions_have_a_pool_to_themselves() {
    let (_, node, _) = node_with_garbage(Mode::Logged, 77);
    node.compact(0, Purge::default());
    node.run();
    let stats = node.stepper.pools().stats();
    let there: Vec<_> = stats.tasks.iter().filter(|task| task.pool == PoolKind::Compaction).collect();
    assert_eq!(there.iter().map(|task| task.name).collect::<Vec<_>>(), ["compaction"]);
    assert!(there[0].runs.get() > 3);
}

/// Garbage starts a compaction by itself; afterwards there is none, so it does not start again.
#[test]
fn too_much_garbage_is_compacted_without_asking_and_once() {
    let by_percent = Trigger { garbage_percent: 50, garbage_bytes: 0, file_bytes_min: 40_000 };
    let by_bytes = Trigger { garbage_percent: 0, garbage_bytes: 30_000, file_bytes_min: 0 };
    for trigger in [by_percent, by_bytes] {
        let (env, _) = sim::env(72);
        let compaction = CompactionOptions { trigger, ..CompactionOptions::default() };
        let node = Node::start_with(&env, 72, Options { compaction, ..Options::default() }).unwrap();
        let mut file_bytes_max = 0;
        for round in 0..100u8 {
            node.set(0, "k", &[round; 100]);
            node.run();
            file_bytes_max = file_bytes_max.max(node.bucket.stats().file_bytes);
        }
        let compactions = node.bucket.stats().compactions;
        assert!((2..40).contains(&compactions), "{compactions}");
        assert!(file_bytes_max < 100_000, "{file_bytes_max}");
        let before = node.bucket.stats().compactions;
        node.stepper.advance(Duration::from_secs(600));
        assert_eq!(node.bucket.stats().compactions, before);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    /// S12. Goal: whatever is asked, merged, cancelled, written and changed of the limit, no more run than the limit was when
    /// they began, and whoever asked is told, once. Method: all of it at random, a few steps in between.
    #[test]
    fn the_limit_holds_and_everybody_is_told(seed: u64) {
        let (env, _) = sim::env(seed);
        let node = Node::start_with(&env, seed, Mode::Kept.options()).unwrap();
        (0..VBS).for_each(|vb| (0..30).for_each(|n| drop(node.set(vb, &format!("k{n}"), &[n; 100]))));
        node.run();
        let (mut dice, mut answers, mut allowed) = (rig::Dice(seed), Vec::new(), 2);
        for _ in 0..200 {
            let vb = dice.below(u64::from(VBS)) as u16;
            match dice.below(8) {
                0..3 => answers.push(node.compact(vb, Purge { all: dice.below(2) == 0, ..Purge::default() })),
                3 => node.bucket.cancel_compaction(VbId(vb)),
                4 => drop(node.set(vb, "k", &[1; 300])),
                5 => {
                    let limit = 1 + dice.below(3) as usize;
                    allowed = limit.max(node.store.compactions().0.len());
                    node.store.set_compaction(CompactionOptions { limit, ..Mode::Kept.options().compaction });
                }
                _ => {}
            }
            (0..dice.below(12)).for_each(|_| _ = node.stepper.step());
            let running = node.store.compactions().0.len();
            prop_assert!(running <= allowed, "{running} of {allowed}");
        }
        node.run();
        prop_assert_eq!((node.store.compactions().0.len(), node.store.compactions().1), (0, 0));
        for answer in &answers {
            let told = answer.get().expect("told");
            prop_assert!(matches!(told, Ok(_) | Err(StoreError::Cancelled)), "{:?}", told);
        }
    }

    /// Goal: compaction changes nothing that anybody can ask for. Method: random changes with compactions at random moments,
    /// in all modes; then every document by seqno (the warm-up), by id, and all counts, against a model.
    #[test]
    fn contents_are_the_same_by_id_and_by_seqno(seed: u64, rounds in 10u64..120) {
        for mode in MODES {
            let (env, _) = sim::env(seed);
            let node = Node::start_with(&env, seed, mode.options()).unwrap();
            let mut history = History { mode, compacts: true, bucket_made: true, ..History::default() };
            work_on(&node, seed, rounds, &mut history);
            (0..VBS).for_each(|vb| drop(node.compact(vb, Purge { all: seed % 2 == 0, ..Purge::default() })));
            node.run();
            node.file_all();
            assert_node_holds(&node, &history);
            for (vb, changes) in &history.changes {
                let (docs, _) = rig::model(changes, u64::MAX);
                for item in docs.values().filter(|item| item.is_committed() && !item.is_deleted()) {
                    let found = node.bucket.fetch_now(VbId(*vb), item.key()).unwrap().expect("by id");
                    prop_assert_eq!((found.meta(), found.value()), (item.meta(), item.value()));
                }
            }
            drop(node);
            drop(assert_holds(&env, &history));
        }
    }
}
