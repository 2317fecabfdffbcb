//! Power loss before every I/O: what was told as durable is replayed, in order, and nothing else.

mod rig;

use std::path::Path;

use commit_log::{Lead, Log, LogError, Options};
use env::Env;
use env::sim::{self, Fate, Sim, cut_at, cut_everywhere};
use proptest::prelude::*;
use rig::{DIR, Truth, World, key, open, small};

/// A few submissions at a time, some large, some with records; filing now and then and whenever there is no room.
fn work(env: &Env, truth: &Truth, rounds: u64, mut seed: u64) -> Truth {
    let Ok(mut world) = World::start(env, small(), truth.clone()) else { return truth.clone() };
    let mut roll = |n: u64| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (seed >> 33) % n
    };
    for _ in 0..rounds {
        for _ in 0..1 + roll(4) {
            let size = if roll(5) == 0 { 3000 } else { roll(400) };
            let vb = key(1 + u128::from(roll(2)), roll(3) as u16);
            match world.submit(vb, roll(4), size as usize, roll(6) == 0) {
                Ok(()) | Err(LogError::Full { .. }) => {}
                Err(_) => return world.truth,
            }
        }
        match world.lead() {
            Lead::Idle => {}
            Lead::Full => {
                if !world.file_oldest() || world.lead() != Lead::Idle {
                    return world.truth;
                }
            }
            _ => return world.truth,
        }
        if roll(4) == 0 {
            world.file(key(1 + u128::from(roll(2)), roll(3) as u16));
        }
        if roll(8) == 0 {
            let _ = world.log.prepare_next();
        }
    }
    world.truth
}

/// A restart after a cut: never refused, and what it finds is right. Then some more work on top.
fn restart(sim: &Sim, truth: &Truth) -> Truth {
    let env = sim.env();
    match World::start(&env, small(), truth.clone()) {
        Ok(world) => world.truth,
        Err(error) => panic!("a mere power cut must not stop the log: {error}"),
    }
}

#[test]
fn what_was_told_as_durable_survives_power_loss_before_every_io() {
    let (_, start) = sim::env(11);
    let workload = |env: &Env| work(env, &Truth::default(), 36, 5);
    cut_everywhere(&start, 3, workload, |sim, truth| {
        let truth = restart(sim, truth);
        // Replaying once more gives the same.
        restart(sim, &truth);
    });
}

#[test]
fn recovery_that_is_cut_short_is_recovered_from() {
    let (_, start) = sim::env(12);
    let workload = |env: &Env| work(env, &Truth::default(), 9, 6);
    cut_everywhere(&start, 2, workload, |sim, truth| {
        let again = |env: &Env| work(env, truth, 0, 0);
        cut_everywhere(sim, 2, again, |sim, truth| {
            restart(sim, truth);
        });
    });
}

/// A log all of which is filed may be begun anew: power loss leaves all of what it held, or nothing.
#[test]
fn power_loss_while_a_log_is_begun_anew_leaves_what_it_held_or_nothing() {
    let (env, mut sim) = sim::env(13);
    let mut filed = work(&env, &Truth::default(), 30, 7);
    filed.vbs.values_mut().for_each(|vb| (vb.filed, vb.record_filed) = (vb.durable, vb.record_durable));
    sim.kill();
    let begin = |env: &Env| drop(Log::begin(env, Path::new(DIR), small()));
    cut_everywhere(&sim, 3, begin, |sim, ()| drop(restart(sim, &filed)));
    begin(&sim.env());
    assert!(open(&sim.env(), small()).unwrap().1.is_empty());
    // And it is as good as any other.
    let truth = work(&sim.env(), &filed, 30, 8);
    restart(&sim, &truth);
}

/// A first segment is smaller than others: what does not fit goes to the second, and an empty one is not damage.
#[test]
fn an_item_larger_than_the_first_segment_is_replayed_from_the_second() {
    let options = || Options { segment_bytes: 4 << 20, log_bytes_max: 12 << 20, ..Options::default() };
    let (env, mut sim) = sim::env(14);
    let mut world = World::start(&env, options(), Truth::default()).unwrap();
    world.submit(key(1, 0), 1, 3 << 20, false).unwrap();
    world.submit(key(1, 1), 1, 100, true).unwrap();
    world.lead();
    assert_eq!(world.told.mark(key(1, 0)).seqno.0, 1);
    let env = sim.power_cut(Fate::LoseUnsynced);
    let world = World::start(&env, options(), world.truth).unwrap();
    assert_eq!(world.truth.vbs.len(), 2);
}

/// Goal: a header torn while a segment is used again leaves the segment what it was, as the newest durable header still asks
/// for it. Method: many fates of a cut at each I/O of such a step.
#[test]
fn a_torn_header_leaves_its_segment_what_it_was() {
    let (env, mut start) = sim::env(13);
    let mut world = World::start(&env, small(), Truth::default()).unwrap();
    while world.log.pressure().percent() < 70 {
        world.submit(key(1, 1), 1, 900, false).unwrap();
        assert_eq!(world.lead(), Lead::Idle);
    }
    let truth = world.truth;
    start.kill();
    let workload = |env: &Env| {
        let Ok(mut world) = World::start(env, small(), truth.clone()) else { return truth.clone() };
        // The first is made ready while all are needed, the second takes the place of the oldest.
        let _ = world.log.prepare_next();
        world.file(key(1, 1));
        for _ in 0..12 {
            if world.submit(key(1, 1), 1, 900, false).is_err() || world.lead() != Lead::Idle {
                return world.truth;
            }
        }
        let _ = world.log.prepare_next();
        world.truth
    };
    cut_everywhere(&start, 12, workload, |sim, truth| {
        restart(sim, truth);
    });
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    /// Goal: no old record comes back. Method: life after life on the same disk, each with many turns of the segments and
    /// cut at some I/O, each item marked with its life.
    #[test]
    fn records_of_earlier_lives_never_come_back(seed in any::<u64>(), cuts in prop::collection::vec(0u64..400, 1..6)) {
        let (_, mut sim) = sim::env(seed);
        let mut truth = Truth::default();
        for (n, cut) in (0..).zip(cuts) {
            let next = std::cell::RefCell::new(None);
            cut_at(&sim, cut, 1, |env| work(env, &truth, 30, seed ^ n), |sim, truth| {
                let found = restart(sim, truth);
                *next.borrow_mut() = Some((sim.clone(), found));
            });
            (sim, truth) = next.into_inner().expect("checked at least once");
        }
    }
}
