//! A vBucket whose file is committed over and over while it is compacted: what came last is taken over without a sync, and the new
//! file has its name only once a flush has synced it.

mod rig;

use std::path::Path;

use env::sim::{self, Fate, Fault, FaultPlan, Op, Rule, cut_everywhere};
use persist::Purge;
use rig::{BUCKET, DATA, FILE_MODES, History, Mode, Node, Seed, VBS, assert_holds, record};
use types::{VbId, VbState};

/// A change after each step, from before a compaction until it has ended, with a look at each.
fn busy(env: &env::Env, mode: Mode, seed: u64, mut look: impl FnMut(&Node)) -> History {
    let mut history = History { mode, compacts: true, ..History::default() };
    let Ok(node) = Node::start_with(env, seed, mode.options()) else { return history };
    history.bucket_made = true;
    let mut set =
        |n: u64| history.changes.entry(0).or_default().push(node.set(0, &format!("k{}", n % 5), &[n as u8; 90]));
    (0..10).for_each(&mut set);
    node.run();
    let answer = node.compact(0, Purge::default());
    for n in 0..300 {
        if answer.get().is_some() {
            break;
        }
        set(n);
        // The change is flushed in one step, the compaction takes another.
        for _ in 0..2 {
            node.stepper.step();
            look(&node);
        }
    }
    node.run();
    for vb in 0..VBS {
        history.durable.insert(vb, node.durable(vb));
    }
    history
}

/// The vBucket's file is in use, and is not called as it will be.
fn is_unnamed(node: &Node) -> bool {
    let file =
        node.bucket.recovered().first().map(|there| Path::new(DATA).join("buckets").join(BUCKET).join(&there.file));
    file.is_some_and(|file| !node.env.storage.exists(&file).unwrap_or(true))
}

/// Goal: who commits without a pause waits for no sync of the compaction's. Method: of the step that takes the last changes
/// over, the syncs are counted.
#[test]
fn what_came_last_is_taken_over_without_a_sync() {
    for mode in FILE_MODES {
        let mut met = 0;
        for seed in 0..20 {
            let _seed = Seed(seed);
            let (env, sim) = sim::env(seed);
            let (mut was_unnamed, mut before) = (false, 0);
            let history = busy(&env, mode, seed, |node| {
                let syncs = sim.storage.count(Op::Sync);
                if is_unnamed(node) && !was_unnamed {
                    met += 1;
                    assert_eq!(syncs, before, "in the very step");
                    assert_eq!(node.warm_up(0).len(), 5, "readers see all of it");
                }
                (was_unnamed, before) = (is_unnamed(node), syncs);
            });
            assert_eq!(history.durable[&0], history.changes[&0].len() as u64);
        }
        assert!(met > 0, "{mode:?}: the compaction always came by itself");
    }
}

/// Goal: promise 1, there too. Method: cut the power before each I/O.
#[test]
fn power_loss_at_every_io_of_a_busy_swap_loses_nothing() {
    for (seed, mode) in (0..).zip(FILE_MODES) {
        let (_, start) = sim::env(seed);
        let workload = |env: &env::Env| busy(env, mode, seed, |_| {});
        cut_everywhere(&start, 1, workload, |world, history| drop(assert_holds(&world.env(), history)));
    }
}

/// Goal: the same when calls fail. Method: the n-th of each kind fails, from the moment when the file has no name.
#[test]
fn a_file_that_cannot_be_named_loses_nothing_and_acknowledges_nothing() {
    let mut poisoned = 0;
    let ops = [Op::Sync, Op::Rename, Op::SyncDir, Op::Write, Op::RemoveFile];
    for (seed, op) in (0..50).zip(ops.into_iter().cycle()) {
        let _seed = Seed(seed);
        let (env, mut sim) = sim::env(seed);
        let mut is_armed = false;
        let mut end = None;
        let history = busy(&env, Mode::Kept, seed, |node| {
            if is_unnamed(node) && !std::mem::replace(&mut is_armed, true) {
                sim.storage.arm(FaultPlan::new().rule(Rule::new(op, Fault::Errno(5)).path("buckets").nth(seed % 3)));
            }
            end = Some(node.poisoned(0).is_some());
        });
        poisoned += u32::from(end == Some(true));
        sim.storage.arm(FaultPlan::new());
        for fate in [Fate::LoseUnsynced, Fate::KeepUnsynced, Fate::Seeded(seed)] {
            drop(assert_holds(&sim.fork().power_cut(fate), &history));
        }
        sim.power_cut(Fate::LoseUnsynced);
    }
    assert!(poisoned > 0, "no failure was met at the moment in question");
}

/// A deletion and a rollback may come at that moment too.
#[test]
fn a_file_without_its_name_can_be_deleted_or_rolled_back() {
    let (mut deleted, mut rolled_back) = (0, 0);
    for seed in 0..40 {
        let _seed = Seed(seed);
        let (env, mut sim) = sim::env(seed);
        let (mut is_over, mut kept) = (false, None);
        busy(&env, Mode::Direct, seed, |node| {
            if is_over || !is_unnamed(node) {
                return;
            }
            is_over = true;
            if seed % 2 == 0 {
                node.bucket.delete_vb(VbId(0), record(VbState::Dead)).unwrap();
                let names = node.env.storage.list(&Path::new(DATA).join("buckets").join(BUCKET)).unwrap();
                assert!(!names.iter().any(|name| name.starts_with("0.couch.")), "{names:?}");
                deleted += 1;
            } else {
                let high = node.bucket.roll_back(VbId(0), node.logs[0].marks.filed()).unwrap().high;
                kept = Some((high, node.warm_up(0).len()));
                rolled_back += 1;
            }
            // What came since may come again, or not: only the moment counts here.
            let sim = sim.fork().power_cut(Fate::LoseUnsynced);
            let again = Node::start_with(&sim, 1, Mode::Direct.options()).unwrap();
            let found = again.bucket.recovered().into_iter().find(|r| r.vb == VbId(0)).map(|r| r.high);
            assert_eq!(found.map(|high| (high, again.warm_up(0).len())), kept);
        });
        sim.power_cut(Fate::LoseUnsynced);
    }
    assert!(deleted > 0 && rolled_back > 0, "{deleted} {rolled_back}");
}
