//! The power goes at every moment in turn, and nothing that was acknowledged is lost, nothing invented.

mod rig;

use env::sim::{self, Fate, FaultPlan, Noise, count_ops, cut_at, cut_everywhere};
use rig::{MODES, Node, Seed, assert_holds, assert_node_holds, work};

/// Goal: promise 1. Method: cut the power before each I/O of a workload, keep and drop un-synced changes in several ways,
/// reopen, compare with the model, go on writing.
#[test]
fn what_was_durable_survives_power_loss_at_every_io() {
    for (seed, mode) in (0..).zip(MODES) {
        let (_, start) = sim::env(seed);
        let workload = |env: &env::Env| work(env, mode, seed, 12);
        cut_everywhere(&start, 2, workload, |world, history| drop(assert_holds(&world.env(), history)));
    }
}

/// Goal: a second crash, in the recovery from the first, is no worse. Method: after cuts in mid-workload, cut again at
/// every I/O of the next run's start.
#[test]
fn power_loss_during_recovery_loses_nothing_either() {
    for (seed, mode) in (10..).zip(MODES) {
        let (_, start) = sim::env(seed);
        let total = count_ops(&start, |env| work(env, mode, seed, 20));
        let sixths: &[u64] = if mode.is_logged() { &[5] } else { &[2, 3, 5] };
        for sixth in sixths {
            cut_at(
                &start,
                total * sixth / 6,
                1,
                |env| work(env, mode, seed, 20),
                |world, history| {
                    let recovery = |env: &env::Env| drop(Node::start_with(env, 1, mode.options()));
                    cut_everywhere(world, 1, recovery, |world, ()| drop(assert_holds(&world.env(), history)));
                },
            );
        }
    }
}

/// Goal: the process may die at any moment too. Method: kill instead of power loss, reopen, then lose the power at once:
/// what the new run took over from the page cache must be on disk before it counts.
#[test]
fn what_a_killed_run_left_in_the_page_cache_is_durable_before_it_counts() {
    for (seed, mode) in (20..).zip(MODES) {
        let _seed = Seed(seed);
        let (_, start) = sim::env(seed);
        for cut in 0..=count_ops(&start, |env| work(env, mode, seed, 12)) {
            let mut world = start.fork();
            world.storage.arm(FaultPlan::new().cut_before(cut));
            let mut history = work(&world.env(), mode, seed, 14);
            let node = Node::start_with(&world.kill(), 1, mode.options()).expect("a kill leaves a store that opens");
            assert_node_holds(&node, &history);
            for (vb, log) in (0..).zip(&node.logs) {
                history.durable.insert(vb, log.marks.durable().0);
            }
            drop(node);
            drop(assert_holds(&world.power_cut(Fate::LoseUnsynced), &history));
        }
    }
}

/// Short reads and writes, interruptions, calls that do nothing: all are ridden out.
#[test]
fn a_disk_that_does_things_by_halves_changes_nothing() {
    for (seed, mode) in (30..40).zip(MODES.into_iter().cycle()) {
        let _seed = Seed(seed);
        let (env, mut world) = sim::env(seed);
        world.storage.arm(FaultPlan::new().noise(Noise::loud()));
        let history = work(&env, mode, seed, 40);
        for (vb, changes) in &history.changes {
            assert_eq!(history.durable[vb], changes.last().unwrap().seqno().0);
        }
        world.power_cut(Fate::LoseUnsynced);
        world.storage.arm(FaultPlan::new().noise(Noise::loud()));
        drop(assert_holds(&world.env(), &history));
    }
}
