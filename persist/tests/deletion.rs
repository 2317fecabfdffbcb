//! Deleting a vBucket: nothing of it comes back, wherever it was kept, and its next life has nothing to do with it.

mod rig;

use std::path::Path;

use changelog::VbRecord;
use env::Env;
use env::sim::{self, Fate, Fault, FaultPlan, Op, Rule, cut_everywhere};
use persist::{CompactionOptions, Options, Purge, StoreError};
use rig::{BUCKET, DATA, Dice, MODES, Mode, Node, Seed, model, record};
use types::{Item, Kind, VbId, VbState};

/// Between its deletions a vBucket has lives.
#[derive(Default)]
struct Life {
    changes: Vec<Item>,
    durable: u64,
    /// Its deletion was asked for: it may be over.
    is_ending: bool,
}

/// What became of vBucket 0 in a run. A life is on the list once the one before is known to be over.
struct Lives {
    mode: Mode,
    lives: Vec<Life>,
}

fn dead() -> VbRecord {
    record(VbState::Dead)
}

fn dir() -> std::path::PathBuf {
    Path::new(DATA).join("buckets").join(BUCKET)
}

/// Names of files of vBucket 0.
fn files(env: &Env) -> Vec<String> {
    let names = env.storage.list(&dir()).unwrap();
    names.into_iter().filter(|name| name.starts_with("0.couch.")).collect()
}

/// As whoever makes a vBucket anew.
fn make(node: &Node) {
    let log = &node.logs[0];
    log.set_record(VbRecord { state: VbState::Active, ..(*log.record()).clone() });
}

/// Lives and deletions in turn, with compactions asked for and with flushes and steps of compactions at random moments; another
/// vBucket is written beside.
fn work(env: &Env, mode: Mode, seed: u64, lives_max: usize) -> Lives {
    let mut run = Lives { mode, lives: vec![Life::default()] };
    let Ok(node) = Node::start_with(env, seed, mode.options()) else { return run };
    let mut dice = Dice(seed);
    while run.lives.len() <= lives_max {
        let life = run.lives.last_mut().unwrap();
        for _ in 0..dice.below(5) {
            life.changes.push(node.set(0, &format!("k{}", dice.below(3)), format!("{}", dice.0).as_bytes()));
            node.set(1, "beside", b"v");
            if dice.below(2) == 0 {
                node.compact(0, Purge::default());
            }
            for _ in 0..dice.below(12) {
                node.stepper.step();
            }
        }
        if dice.below(2) == 0 {
            node.file_all();
        }
        life.durable = node.durable(0);
        life.is_ending = true;
        if node.bucket.delete_vb(VbId(0), dead()).is_err() {
            return run;
        }
        make(&node);
        run.lives.push(Life::default());
    }
    node.run();
    run.lives.last_mut().unwrap().durable = node.durable(0);
    run
}

fn assert_lives(world: &Env, run: &Lives) {
    let node = Node::start_with(world, 1, run.mode.options()).expect("a crash leaves a store that opens");
    let last = run.lives.last().unwrap();
    match node.bucket.recovered().into_iter().find(|r| r.vb == VbId(0)) {
        None => {
            assert!(
                last.durable == 0 || last.is_ending,
                "life {}: acknowledged up to {}",
                run.lives.len(),
                last.durable
            );
            assert!(node.warm_up(0).is_empty());
        }
        Some(found) => {
            assert_eq!(found.record.rollbacks as usize, run.lives.len() - 1, "an earlier life has come back");
            assert!(found.high.0 >= last.durable && found.high.0 <= last.changes.len() as u64);
            let (expected, _) = model(&last.changes, found.high.0);
            let items = node.warm_up(0);
            assert_eq!(items.len(), expected.len());
            for item in items {
                let original = &expected[&item.seqno().0];
                assert_eq!((item.id(), item.meta(), item.value()), (original.id(), original.meta(), original.value()));
            }
        }
    }
    let there = node.bucket.recovered().iter().any(|r| r.vb == VbId(0));
    assert_eq!(files(&node.env).len(), usize::from(there), "no orphan: {:?}", files(&node.env));
    let before = node.logs[0].max_cas();
    make(&node);
    let item = node.set(0, "later", b"still works");
    let (_, over) = run.lives.split_last().unwrap();
    assert!(over.iter().flat_map(|life| &life.changes).all(|change| change.meta().cas <= before));
    node.file_all();
    assert_eq!(node.durable(0), item.seqno().0);
}

/// Goal: S19, promise 1. Method: cut the power before each I/O of lives and deletions, keep and drop un-synced changes in
/// several ways, reopen, compare, go on.
#[test]
fn nothing_of_a_deleted_life_comes_back_whenever_the_power_goes() {
    for (seed, mode) in (0..).zip(MODES) {
        let _seed = Seed(seed);
        let (_, start) = sim::env(seed);
        cut_everywhere(&start, 2, |env| work(env, mode, seed, 2), |world, run| assert_lives(&world.env(), run));
    }
}

/// A process that dies leaves what it wrote in the page cache, and the next run loses that too.
#[test]
fn a_life_deleted_by_a_killed_run_stays_over_when_the_power_goes_later() {
    for (seed, mode) in (50..).zip(MODES) {
        let _seed = Seed(seed);
        let (_, start) = sim::env(seed);
        for cut in 0..=sim::count_ops(&start, |env| drop(work(env, mode, seed, 2))) {
            let mut world = start.fork();
            world.storage.arm(FaultPlan::new().cut_before(cut));
            let run = work(&world.env(), mode, seed, 2);
            drop(Node::start_with(&world.kill(), 1, mode.options()).expect("a kill leaves a store that opens"));
            assert_lives(&world.power_cut(Fate::LoseUnsynced), &run);
        }
    }
}

/// Each I/O of a deletion fails once: either it is as if nobody had asked, or the vBucket takes no more writes; never both
/// deleted and not.
#[test]
fn a_deletion_that_fails_leaves_the_vbucket_as_it_was_or_takes_no_more_writes() {
    for mode in MODES {
        for op in [Op::Create, Op::Write, Op::Sync, Op::Rename, Op::SyncDir, Op::RemoveFile, Op::List] {
            for errno in [5, 28] {
                let (env, sim) = sim::env(3);
                let node = Node::start_with(&env, 3, mode.options()).unwrap();
                node.set(0, "a", b"filed");
                node.file_all();
                let last = node.set(0, "b", b"durable");
                node.run();
                sim.storage.arm(FaultPlan::new().rule(Rule::new(op, Fault::Errno(errno)).path("buckets")));
                let outcome = node.bucket.delete_vb(VbId(0), dead());
                sim.storage.arm(FaultPlan::new());
                let label = format!("{mode:?} {op:?} {errno}: {outcome:?}");
                match &outcome {
                    Ok(()) => assert_eq!(node.bucket.counted(VbId(0)), None, "{label}"),
                    Err(_) if node.poisoned(0).is_some() => {
                        assert_eq!(node.durable(0), last.seqno().0, "{label}");
                        node.set(0, "c", b"never durable");
                        node.run();
                        assert_eq!(node.durable(0), last.seqno().0, "{label}");
                    }
                    Err(_) => {
                        let next = node.set(0, "c", b"durable too");
                        node.file_all();
                        assert_eq!(node.durable(0), next.seqno().0, "{label}");
                        assert_eq!(node.warm_up(0).len(), 3, "{label}");
                        node.bucket.delete_vb(VbId(0), dead()).expect("it can be tried again");
                    }
                }
                let is_poisoned = node.poisoned(0).is_some();
                drop(node);
                for fate in [Fate::LoseUnsynced, Fate::KeepUnsynced] {
                    let node = Node::start_with(&sim.fork().power_cut(fate), 1, mode.options()).unwrap();
                    let found = node.bucket.recovered().iter().any(|r| r.vb == VbId(0));
                    assert!(!found || is_poisoned, "{label}, then {fate:?}");
                    assert!(!found || node.warm_up(0).len() == 2, "{label}, then {fate:?}");
                }
            }
        }
    }
}

/// S18, S19: whoever waits for a compaction of the old life is told, and the next life is none of its business.
#[test]
fn compactions_that_run_or_wait_end_with_the_life_they_were_for() {
    let compaction = CompactionOptions { limit: 1, ..Mode::Kept.options().compaction };
    let (env, _sim) = sim::env(4);
    let node = Node::start_with(&env, 4, Options { compaction, ..Mode::Kept.options() }).unwrap();
    for (vb, n) in (0..2).flat_map(|vb| (0..50).map(move |n| (vb, n))) {
        node.set(vb, &format!("k{}", n % 25), &[b'v'; 100]);
    }
    node.file_all();
    let mut last_rev = 0;
    for steps in 0..60 {
        // One that runs and one that waits behind another vBucket's.
        let (running, other) = (node.compact(0, Purge::default()), node.compact(1, Purge::default()));
        let queued = node.compact(0, Purge { all: true, ..Purge::default() });
        (0..steps).for_each(|_| _ = node.stepper.step());
        node.bucket.delete_vb(VbId(0), dead()).unwrap();
        for answer in [&running, &queued] {
            let told = answer.get().expect("told");
            assert!(told.is_ok() || matches!(told, Err(StoreError::Cancelled)), "{told:?}");
        }
        let compacted = node.bucket.stats().compactions + u64::from(other.get().is_none());
        assert!(files(&node.env).is_empty(), "after {steps} steps: {:?}", files(&node.env));
        make(&node);
        let first = node.set(0, "new", b"life");
        node.file_all();
        node.run();
        assert!(other.get().expect("it has ended").is_ok());
        assert_eq!((first.seqno().0, node.durable(0), files(&node.env).len()), (1, 1, 1));
        let rev = files(&node.env)[0].rsplit_once('.').unwrap().1.parse::<u64>().unwrap();
        assert!(rev > last_rev, "never the same name");
        last_rev = rev;
        assert_eq!(node.bucket.stats().compactions, compacted, "after {steps} steps: none of the new life");
    }
}

/// What was on its way to the log when the vBucket was deleted says nothing of the next life.
#[test]
fn a_sync_of_the_old_life_acknowledges_nothing_of_the_new_one() {
    for mode in [Mode::Logged, Mode::Recycling] {
        let (env, mut sim) = sim::env(6);
        let node = Node::start_with(&env, 6, mode.options()).unwrap();
        (0..5).for_each(|n| drop(node.set(0, &format!("old{n}"), b"v")));
        node.bucket.delete_vb(VbId(0), dead()).unwrap();
        make(&node);
        node.run();
        assert_eq!((node.durable(0), node.logs[0].marks.high().0), (0, 0), "only of the old life");
        node.set(0, "new", b"v");
        node.run();
        assert_eq!(node.durable(0), 1);
        drop(node);
        let node = Node::start_with(&sim.power_cut(Fate::LoseUnsynced), 1, mode.options()).unwrap();
        assert_eq!(node.warm_up(0).len(), 1);
        let kind = Kind::Committed { prepared: None };
        assert!(node.warm_up(0).iter().all(|item| item.key().as_bytes().ends_with(b"new") && item.kind() == kind));
    }
}

/// A first commit may fail when its file has its name already. That file is of the old life too.
#[test]
fn a_file_that_nobody_knows_of_goes_with_its_life() {
    const EMFILE: i32 = 24;
    let (env, mut sim) = sim::env(8);
    let node = Node::start_with(&env, 8, Mode::Direct.options()).unwrap();
    sim.storage.arm(FaultPlan::new().rule(Rule::new(Op::SyncDir, Fault::Errno(EMFILE))));
    node.set(0, "old", b"v");
    node.run();
    assert_eq!((files(&node.env).len(), node.bucket.counted(VbId(0))), (1, None), "there, and not known");
    node.bucket.delete_vb(VbId(0), dead()).unwrap();
    assert!(files(&node.env).is_empty());
    drop(node);
    let node = Node::start(&sim.power_cut(Fate::KeepUnsynced), 8).unwrap();
    assert!(node.warm_up(0).is_empty());
}

/// Which vBuckets are deleted is not guessed at.
#[test]
fn a_start_is_refused_that_cannot_tell_what_was_deleted() {
    let (env, mut sim) = sim::env(5);
    let node = Node::start(&env, 5).unwrap();
    node.set(0, "a", b"v");
    node.file_all();
    node.bucket.delete_vb(VbId(0), dead()).unwrap();
    assert_eq!(node.bucket.deleted().iter().map(|deleted| deleted.vb.0).collect::<Vec<_>>(), [0]);
    drop(node);
    let env = sim.power_cut(Fate::LoseUnsynced);
    let file = env.storage.open(&dir().join("deleted.json"), env::OpenMode::ReadWrite).unwrap();
    file.write_at(b"?", 0).unwrap();
    let Err(StoreError::Damaged(damages)) = Node::start(&env, 5).map(drop) else { panic!("opened") };
    assert!(damages.to_string().contains("deleted.json"), "{damages}");
}
