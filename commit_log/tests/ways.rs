//! Ways of writing: the fastest is found on the disk itself, gone over to under load, and nothing else changes.

mod rig;

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use commit_log::{Lead, LogError, Options, Way};
use env::sim::{self, Fate, Sim, SimClock};
use env::{Clock, Durable, Env, File, OpenMode, Storage};
use rig::{Truth, World, key, small};

/// The simulated disk, on which calls take time, with ways of writing of which some may be missing.
struct Slow {
    sim: Arc<dyn Storage>,
    clock: SimClock,
    times: Times,
}

/// What a sync takes, and a write of each of the other ways; `None`: there is no such way.
#[derive(Clone, Copy)]
struct Times {
    sync_us: u64,
    dsync_us: Option<u64>,
    direct_us: Option<u64>,
}

struct SlowFile {
    file: Arc<dyn File>,
    clock: SimClock,
    write_us: u64,
    sync_us: u64,
    /// Syncs with each write.
    is_durable: bool,
}

impl File for SlowFile {
    fn read_at(&self, buf: &mut [u8], at: u64) -> io::Result<usize> {
        self.file.read_at(buf, at)
    }
    fn write_at(&self, bytes: &[u8], at: u64) -> io::Result<usize> {
        self.clock.advance(Duration::from_micros(self.write_us));
        let written = self.file.write_at(bytes, at)?;
        if self.is_durable {
            self.file.sync()?;
        }
        Ok(written)
    }
    fn size(&self) -> io::Result<u64> {
        self.file.size()
    }
    fn set_size(&self, size: u64) -> io::Result<()> {
        self.file.set_size(size)
    }
    fn sync(&self) -> io::Result<()> {
        self.clock.advance(Duration::from_micros(self.sync_us));
        self.file.sync()
    }
    fn write_back(&self, at: u64, len: u64) -> io::Result<()> {
        self.file.write_back(at, len)
    }
}

impl Storage for Slow {
    fn open(&self, path: &Path, mode: OpenMode) -> io::Result<Arc<dyn File>> {
        let (file, clock) = (self.sim.open(path, mode)?, self.clock.clone());
        Ok(Arc::new(SlowFile { file, clock, write_us: 0, sync_us: self.times.sync_us, is_durable: false }))
    }
    fn open_durable(&self, path: &Path, how: Durable) -> io::Result<Option<Arc<dyn File>>> {
        let time = if how == Durable::Synced { self.times.dsync_us } else { self.times.direct_us };
        let Some(write_us) = time else { return Ok(None) };
        let (file, clock) = (self.sim.open(path, OpenMode::ReadWrite)?, self.clock.clone());
        Ok(Some(Arc::new(SlowFile { file, clock, write_us, sync_us: 0, is_durable: true })))
    }
    fn create_dir_all(&self, path: &Path) -> io::Result<()> {
        self.sim.create_dir_all(path)
    }
    fn list(&self, path: &Path) -> io::Result<Vec<String>> {
        self.sim.list(path)
    }
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.sim.rename(from, to)
    }
    fn remove_file(&self, path: &Path) -> io::Result<()> {
        self.sim.remove_file(path)
    }
    fn remove_dir(&self, path: &Path) -> io::Result<()> {
        self.sim.remove_dir(path)
    }
    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        self.sim.sync_dir(path)
    }
    fn exists(&self, path: &Path) -> io::Result<bool> {
        self.sim.exists(path)
    }
}

fn slow(sim: &Sim, times: Times) -> Env {
    let storage = Slow { sim: Arc::new(sim.storage.clone()), clock: sim.clock.clone(), times };
    Env { storage: Arc::new(storage), ..sim.env() }
}

const FAST_DIRECT: Times = Times { sync_us: 200, dsync_us: Some(190), direct_us: Some(120) };

#[test]
fn the_fastest_way_is_found_and_gone_over_to_in_the_segment_under_way() {
    for (times, expected) in [
        (FAST_DIRECT, Way::Direct),
        (Times { sync_us: 200, dsync_us: Some(120), direct_us: Some(150) }, Way::Dsync),
        (Times { sync_us: 200, dsync_us: Some(300), direct_us: None }, Way::WriteAndSync),
        // As good, and does less besides.
        (Times { sync_us: 200, dsync_us: Some(205), direct_us: Some(210) }, Way::Direct),
        (Times { sync_us: 200, dsync_us: Some(195), direct_us: Some(240) }, Way::Dsync),
    ] {
        let (_, mut sim) = sim::env(1);
        let env = slow(&sim, times);
        let mut world = World::start(&env, small(), Truth::default()).unwrap();
        let took = |world: &mut World| {
            let before = sim.clock.monotonic();
            world.submit(key(1, 1), 1, 100, false).unwrap();
            assert_eq!(world.lead(), Lead::Idle);
            (sim.clock.monotonic() - before).as_micros() as u64
        };
        assert_eq!((took(&mut world), world.log.stats().way), (200, Way::WriteAndSync.name()), "until it is known");
        world.log.prepare_next().unwrap();
        let before = sim.clock.monotonic();
        world.log.choose_way().unwrap();
        let chose_for = sim.clock.monotonic() - before;
        assert!(chose_for <= Duration::from_millis(21), "{chose_for:?}");
        let stats = world.log.stats();
        assert_eq!(stats.way, expected.name());
        assert!(stats.way_medians.contains("write and fdatasync 200 µs, O_DSYNC "), "{}", stats.way_medians);
        let us = match expected {
            Way::WriteAndSync => times.sync_us,
            Way::Dsync => times.dsync_us.unwrap(),
            Way::Direct => times.direct_us.unwrap(),
        };
        assert_eq!(took(&mut world), us, "in the segment that was begun the other way");
        // On and on, through the segment it was measured on, and once only.
        while world.log.pressure().percent() < 60 {
            took(&mut world);
        }
        let before = sim.clock.monotonic();
        world.log.choose_way().unwrap();
        assert_eq!(sim.clock.monotonic(), before);
        let truth = world.truth;
        World::start(&sim.power_cut(Fate::LoseUnsynced), small(), truth).unwrap();
    }
}

#[test]
fn a_way_that_is_configured_is_taken_without_measuring_and_one_that_is_not_there_replaced() {
    let (_, sim) = sim::env(2);
    for (way, times, expected) in [
        (Way::WriteAndSync, FAST_DIRECT, Way::WriteAndSync),
        (Way::Dsync, FAST_DIRECT, Way::Dsync),
        (Way::Direct, FAST_DIRECT, Way::Direct),
        (Way::Direct, Times { direct_us: None, ..FAST_DIRECT }, Way::WriteAndSync),
    ] {
        let sim = sim.fork();
        let world = World::start(&slow(&sim, times), Options { way: Some(way), ..small() }, Truth::default()).unwrap();
        assert_eq!(world.log.stats().way, expected.name());
        world.log.prepare_next().unwrap();
        let before = sim.clock.monotonic();
        world.log.choose_way().unwrap();
        assert_eq!((sim.clock.monotonic(), world.log.stats().way_medians.as_str()), (before, ""));
    }
}

/// S30: a sync is a sync, whatever it is for.
#[test]
fn a_sync_that_fails_while_ways_are_compared_stops_the_log() {
    for nth in 0..6 {
        let (_, mut sim) = sim::env(3);
        let mut world = World::start(&slow(&sim, FAST_DIRECT), small(), Truth::default()).unwrap();
        world.submit(key(1, 1), 1, 100, false).unwrap();
        assert_eq!(world.lead(), Lead::Idle);
        world.log.prepare_next().unwrap();
        sim.storage.arm(sim::FaultPlan::new().fail_nth(sim::Op::Sync, nth, 5));
        assert!(matches!(world.log.choose_way(), Err(LogError::Poisoned(_))));
        assert_eq!((world.log.lead(), world.told.poisoned.lock().unwrap().len()), (Lead::Stopped, 1));
        let truth = world.truth;
        World::start(&sim.power_cut(Fate::Seeded(nth)), small(), truth).unwrap();
    }
}

/// Zeros written to compare ways are no records, and the segment's header is durable before them.
#[test]
fn power_loss_while_ways_are_compared_loses_nothing() {
    let (_, start) = sim::env(4);
    let workload = |env: &Env| {
        // The environment that is cut is the simulation's; time does not pass in it.
        let times = Times { sync_us: 0, dsync_us: Some(0), direct_us: Some(0) };
        let storage = Slow { sim: Arc::clone(&env.storage), clock: SimClock::new(), times };
        let env = Env { storage: Arc::new(storage), ..env.clone() };
        let Ok(mut world) = World::start(&env, small(), Truth::default()) else { return Truth::default() };
        let _ = world.submit(key(1, 1), 1, 900, false);
        if world.lead() != Lead::Idle || world.log.prepare_next().is_err() || world.log.choose_way().is_err() {
            return world.truth;
        }
        for _ in 0..12 {
            if world.submit(key(1, 1), 1, 900, false).is_err() || world.lead() != Lead::Idle {
                break;
            }
        }
        world.truth
    };
    sim::cut_everywhere(&start, 2, workload, |sim, truth| {
        World::start(&sim.env(), small(), truth.clone()).expect("a mere power cut");
    });
}
