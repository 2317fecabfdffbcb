//! Calls that fail: syncs, writes, space. Nothing that was told as durable is lost, nothing else is told, and what is
//! temporary passes.

mod rig;

use commit_log::{Lead, LogError, Options};
use env::sim::{self, FaultPlan, Noise, Op, Rule, Sim};
use rig::{Truth, World, key, open, small};

const EIO: i32 = 5;
const ENOSPC: i32 = 28;

/// Some work that goes through all segments twice. Returns early when the log stops.
fn work(world: &mut World, rounds: u64) -> Lead {
    for n in 0..rounds {
        for vb in 0..1 + n % 3 {
            match world.submit(key(1, vb as u16), 1 + n % 2, 700, n % 5 == 0) {
                Ok(()) | Err(LogError::Full { .. }) => {}
                Err(_) => return Lead::Stopped,
            }
        }
        match world.lead() {
            Lead::Full => {
                world.file_oldest();
                if let stuck @ (Lead::Full | Lead::Stopped) = world.lead() {
                    return stuck;
                }
            }
            Lead::Stopped => return Lead::Stopped,
            _ => {}
        }
    }
    Lead::Idle
}

/// As [`work`], and then reports how often `op` was called.
fn count(op: Op) -> u64 {
    let (env, sim) = sim::env(1);
    let mut world = World::start(&env, small(), Truth::default()).unwrap();
    sim.storage.arm(FaultPlan::new());
    assert_eq!(work(&mut world, 60), Lead::Idle);
    sim.storage.count(op)
}

/// What restarted programs find, first with the machine still up, then after a power cut on top.
fn restarts(mut sim: Sim, truth: &Truth) {
    let after_kill = World::start(&sim.kill(), small(), truth.clone()).unwrap().truth;
    sim.storage.drop_clean_pages();
    for fate in [sim::Fate::LoseUnsynced, sim::Fate::Seeded(3)] {
        let mut cut = sim.fork();
        // What was replayed once counts as durable, and is asked for again.
        World::start(&cut.power_cut(fate), small(), after_kill.clone()).unwrap();
    }
}

#[test]
fn a_failed_sync_stops_the_log_and_a_restart_finds_what_was_durable() {
    for op in [Op::Sync, Op::SyncDir] {
        let syncs = count(op);
        assert!(syncs > 2);
        for n in 0..syncs {
            let (env, sim) = sim::env(100 + n);
            let mut world = World::start(&env, small(), Truth::default()).unwrap();
            sim.storage.arm(FaultPlan::new().fail_nth(op, n, EIO));
            assert_eq!(work(&mut world, 60), Lead::Stopped, "{op:?} {n}");
            assert_eq!(world.told.poisoned.lock().unwrap().len(), 1);
            let before = world.log.stats();
            assert!(matches!(world.submit(key(1, 0), 1, 10, false), Err(LogError::Poisoned(_))));
            assert_eq!(world.log.lead(), Lead::Stopped);
            assert!(matches!(world.log.close(), Err(LogError::Poisoned(_))));
            assert_eq!(world.log.stats().syncs, before.syncs, "nothing more is written");
            restarts(sim, &world.truth);
        }
    }
}

#[test]
fn a_write_that_fails_stops_the_log_or_passes() {
    for n in 0..count(Op::Write) {
        let (env, sim) = sim::env(200 + n);
        let mut world = World::start(&env, small(), Truth::default()).unwrap();
        sim.storage.arm(FaultPlan::new().fail_nth(Op::Write, n, EIO));
        match work(&mut world, 60) {
            Lead::Stopped => assert_eq!(world.told.poisoned.lock().unwrap().len(), 1),
            // Making a segment can be tried again: nothing is in it yet.
            Lead::Full => assert_eq!(world.lead(), Lead::Idle),
            _ => {}
        }
        restarts(sim, &world.truth);
    }
}

#[test]
fn a_full_disk_at_any_write_is_told_as_such_and_passes() {
    for op in [Op::Write, Op::Create] {
        for n in 0..count(op) {
            let (env, sim) = sim::env(300 + n);
            let mut world = World::start(&env, small(), Truth::default()).unwrap();
            sim.storage.arm(FaultPlan::new().fail_from(op, n, ENOSPC));
            if work(&mut world, 60) == Lead::Full {
                let rooms = *world.told.rooms.lock().unwrap();
                let refused = world.submit(key(1, 0), 1, 10, false).unwrap_err();
                assert!(matches!(refused, LogError::Full { .. }) && refused.is_temporary(), "{refused}");
                assert_eq!(world.lead(), Lead::Full);
                assert_eq!(*world.told.rooms.lock().unwrap(), rooms, "no room is announced");
            }
            sim.storage.arm(FaultPlan::new());
            assert_eq!(world.lead(), Lead::Idle);
            assert_eq!(work(&mut world, 20), Lead::Idle);
            assert!(world.told.poisoned.lock().unwrap().is_empty());
            for vb in world.truth.vbs.values() {
                assert_eq!((vb.durable, vb.record_durable), (vb.high(), vb.records), "all was written in the end");
            }
            restarts(sim, &world.truth);
        }
    }
}

#[test]
fn short_writes_and_interruptions_change_nothing() {
    for seed in 0..10 {
        let (env, sim) = sim::env(seed);
        sim.storage.arm(FaultPlan::new().noise(Noise::loud()));
        let mut world = World::start(&env, small(), Truth::default()).unwrap();
        assert_eq!(work(&mut world, 60), Lead::Idle);
        let env = sim.env();
        World::start(&env, small(), world.truth.clone()).unwrap();
        restarts(sim, &world.truth);
    }
}

#[test]
fn a_log_that_nobody_files_refuses_and_goes_on_after_filing() {
    let (env, _) = sim::env(1);
    let mut world = World::start(&env, small(), Truth::default()).unwrap();
    let refused = loop {
        if let Err(refused) = world.submit(key(1, 1), 1, 900, false) {
            break refused;
        }
        world.lead();
    };
    assert!(matches!(refused, LogError::Full { .. }), "{refused}");
    assert!(world.log.pressure().percent() > 90, "{:?}", world.log.pressure());
    let holders = world.log.needs_filing(10);
    assert_eq!(holders.iter().map(|holder| holder.key).collect::<Vec<_>>(), [key(1, 1)]);
    assert!(world.log.stats().full.is_some());
    world.file(key(1, 1));
    assert_eq!(world.lead(), Lead::Idle);
    assert_eq!(*world.told.rooms.lock().unwrap(), 1);
    assert!(world.log.stats().full.is_none() && world.log.pressure().percent() < 50);
    assert_eq!(work(&mut world, 30), Lead::Idle);
}

#[test]
fn a_forgotten_bucket_holds_nothing_back() {
    let (env, _) = sim::env(1);
    let mut world = World::start(&env, small(), Truth::default()).unwrap();
    while world.submit(key(9, 1), 1, 900, false).is_ok() && world.lead() == Lead::Idle {
        world.submit(key(1, 1), 1, 10, false).unwrap();
        world.lead();
        world.file(key(1, 1));
    }
    assert!(world.log.stats().full.is_some());
    world.log.forget(types::BucketUuid(9));
    assert_eq!(world.lead(), Lead::Idle);
    // What comes late is taken, and holds nothing back either.
    for _ in 0..200 {
        world.submit(key(9, 2), 1, 900, false).unwrap();
        assert_eq!(world.lead(), Lead::Idle);
        world.file(key(1, 1));
    }
}

#[test]
fn a_record_alone_holds_its_segment_until_it_is_filed() {
    let (env, _) = sim::env(1);
    let mut world = World::start(&env, small(), Truth::default()).unwrap();
    world.submit(key(1, 7), 0, 0, true).unwrap();
    assert_eq!(world.lead(), Lead::Idle);
    assert_eq!(world.told.mark(key(1, 7)).record_version, 1);
    while world.log.needs_filing(9).is_empty() {
        world.submit(key(1, 1), 1, 900, false).unwrap();
        world.lead();
    }
    world.file(key(1, 1));
    let holders = world.log.needs_filing(9);
    assert_eq!(holders.iter().map(|holder| holder.key).collect::<Vec<_>>(), [key(1, 7)]);
    world.file(key(1, 7));
    assert!(world.log.needs_filing(9).is_empty());
}

#[test]
fn what_fits_no_segment_is_refused_and_what_just_fits_is_taken() {
    let (env, sim) = sim::env(1);
    let mut world = World::start(&env, small(), Truth::default()).unwrap();
    let overhead = 40 + 1 + "key-1".len();
    let largest = world.log.body_bytes_max() - overhead;
    let refused = world.submit(key(1, 1), 1, largest + 1, false).unwrap_err();
    assert!(matches!(refused, LogError::TooLarge { .. }) && !refused.is_temporary(), "{refused}");
    world.submit(key(1, 1), 1, largest, false).unwrap();
    // Items that fit one by one are spread over records.
    world.submit(key(1, 1), 6, 3000, false).unwrap();
    assert_eq!(world.lead(), Lead::Idle);
    assert_eq!(world.told.mark(key(1, 1)).seqno.0, 7);
    restarts(sim, &world.truth);
}

#[test]
fn segments_of_another_size_are_read_and_replaced() {
    let (_, mut sim) = sim::env(1);
    let mut truth = Truth::default();
    for kib in [16, 32, 16, 24] {
        let options = Options { segment_bytes: kib << 10, log_bytes_max: 5 * (kib << 10), ..Options::default() };
        let mut world = World::start(&sim.kill(), options, truth).unwrap();
        assert_eq!(work(&mut world, 60), Lead::Idle);
        truth = world.truth;
    }
    World::start(&sim.kill(), small(), truth).unwrap();
}

#[test]
fn options_that_cannot_work_are_refused_with_a_reason() {
    let (env, _) = sim::env(1);
    for (segment_bytes, log_bytes_max) in [(4096, 1 << 20), (16385, 1 << 20), (2 << 30, 1 << 40), (1 << 20, 2 << 20)] {
        let refused = open(&env, Options { segment_bytes, log_bytes_max, ..Options::default() }).err().unwrap();
        assert!(matches!(refused, LogError::BadOptions(_)), "{refused}");
    }
}

#[test]
fn an_open_that_fails_can_be_tried_again() {
    let (env, sim) = sim::env(4);
    let mut world = World::start(&env, small(), Truth::default()).unwrap();
    assert_eq!(work(&mut world, 40), Lead::Idle);
    for op in [Op::Open, Op::Read, Op::Size, Op::List, Op::Write, Op::Sync, Op::SyncDir] {
        for n in 0..100 {
            let mut fork = sim.fork();
            let env = fork.kill();
            fork.storage.arm(FaultPlan::new().rule(Rule::new(op, sim::Fault::Errno(EIO)).nth(n)));
            match World::start(&env, small(), world.truth.clone()) {
                Ok(_) if fork.storage.count(op) <= n => break,
                Ok(_) => {}
                Err(error) => assert!(matches!(error, LogError::Io { .. }), "{error}"),
            }
            drop(env);
            World::start(&fork.kill(), small(), world.truth.clone()).unwrap();
        }
    }
}

/// However many segments there are, one is open at a time while they are read.
#[test]
fn a_log_of_many_segments_is_opened_with_few_descriptors() {
    let options = || Options { segment_bytes: 16 << 10, log_bytes_max: 40 * (16 << 10), ..Options::default() };
    let (env, mut sim) = sim::env(5);
    let mut world = World::start(&env, options(), Truth::default()).unwrap();
    while world.log.pressure().percent() < 90 {
        world.submit(key(1, 1), 1, 900, false).unwrap();
        assert_eq!(world.lead(), Lead::Idle);
    }
    assert!(world.log.stats().segments > 30);
    let env = sim.kill();
    sim.storage.arm(FaultPlan::new().open_files_max(2));
    let mut world = World::start(&env, options(), world.truth).unwrap();
    world.submit(key(1, 1), 1, 900, false).unwrap();
    assert_eq!(world.lead(), Lead::Idle);
}
