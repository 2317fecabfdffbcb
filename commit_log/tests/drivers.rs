//! Who leads: a task, a thread, or those who submit. Whoever it is, each submission becomes durable without another one
//! pushing it, and syncs are shared.

mod rig;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier, Mutex, OnceLock, Weak};
use std::time::Duration;

use commit_log::{Driver, Lead, Log, LogError, Observer, Options, Submission, Synced};
use env::sim;
use rig::{DIR, Truth, World, item, key, open, small};
use scheduler::park::{Bay, Look, Wake};
use scheduler::{Order, PoolConfig, Pools, Stepper, Stop};
use types::{BucketUuid, Item, Seqno, VbId};

#[test]
fn a_task_makes_durable_what_is_submitted_and_room_brings_it_back() {
    let (env, sim) = sim::env(1);
    let mut world = World::start(&env, small(), Truth::default()).unwrap();
    world.submit(key(1, 1), 1, 10, false).unwrap();
    let stepper = Stepper::new(&sim.clock, Order::InTurn);
    world.log.drive(&stepper.pools(), Driver::Task).unwrap();
    stepper.run_until_idle();
    assert_eq!(world.told.mark(key(1, 1)).seqno.0, 1, "submitted before there was a driver");
    let refused = loop {
        match world.submit(key(1, 1), 1, 900, false) {
            Ok(()) => stepper.run_until_idle(),
            Err(refused) => break refused,
        };
    };
    assert!(matches!(refused, LogError::Full { .. }), "{refused}");
    let durable = world.told.mark(key(1, 1));
    assert!(durable.seqno.0 < world.truth.vbs[&(1, 1)].high());
    world.log.release(key(1, 1), durable);
    stepper.run_until_idle();
    assert_eq!(world.told.mark(key(1, 1)).seqno.0, world.truth.vbs[&(1, 1)].high());
    world.submit(key(1, 1), 1, 10, false).unwrap();
}

/// Submits the change of the next seqno when it is asked to.
struct Promiser {
    log: OnceLock<Weak<Log>>,
    submitted: AtomicU64,
    marks: Bay<u64>,
}

impl Promiser {
    fn watch(log: &Arc<Log>) -> Arc<Promiser> {
        let (submitted, marks) = (AtomicU64::new(0), Bay::new(0));
        let promiser = Arc::new(Promiser { log: OnceLock::from(Arc::downgrade(log)), submitted, marks });
        log.observe(promiser.clone());
        promiser
    }

    fn submit(&self) {
        let seqno = self.submitted.fetch_add(1, Ordering::Relaxed) + 1;
        let log = self.log.get().and_then(Weak::upgrade).unwrap();
        let (items, last) = ([item(seqno, 1, 10)], Seqno(seqno));
        log.submit(&Submission { bucket: BucketUuid(1), vb: VbId(1), items: &items, last, record: None, past: None })
            .unwrap();
    }

    fn durable(&self) -> u64 {
        self.marks.change(|durable| (*durable, Wake::Nobody))
    }
}

impl Observer for Promiser {
    fn durable(&self, batch: &[Synced]) {
        self.marks.change(|durable| {
            *durable = batch.last().unwrap().seqno.0;
            ((), Wake::Everybody)
        });
    }
    fn poisoned(&self, reason: &str) {
        panic!("{reason}");
    }
    fn gather(&self) {
        self.submit();
    }
}

/// What nobody waits for costs no sync of its own while others sync anyway, and is asked for after a pause.
#[test]
fn a_promise_waits_for_company_and_is_kept() {
    let (env, sim) = sim::env(1);
    let (log, _) = open(&env, small()).unwrap();
    let promiser = Promiser::watch(&log);
    let stepper = Stepper::new(&sim.clock, Order::InTurn);
    log.drive(&stepper.pools(), Driver::Task).unwrap();
    stepper.run_until_idle();
    let seen = || (promiser.durable(), log.stats().syncs);
    log.promise();
    stepper.run_until_idle();
    assert_eq!(seen(), (0, 0), "it waits for company");
    stepper.advance(Duration::from_millis(9));
    promiser.submit();
    stepper.run_until_idle();
    assert_eq!(seen(), (1, 1), "somebody else's sync, too soon for the promise");
    stepper.advance(Duration::from_millis(10));
    assert_eq!(seen(), (2, 2), "its time has come");
    stepper.advance(Duration::from_secs(1));
    assert_eq!((seen(), stepper.next_deadline()), ((2, 2), None), "an idle log has nothing to wake for");
}

/// The same with a thread: every promise is kept, though nobody else comes.
#[test]
fn a_thread_asks_for_what_was_promised_after_a_pause() {
    let (env, _sim) = sim::env(1);
    let env = env::Env { clock: env::os::env().clock, ..env };
    let (log, _) = open(&env, small()).unwrap();
    let promiser = Promiser::watch(&log);
    let pools = Pools::start(&env::os::env(), &PoolConfig::default());
    log.drive(&pools, Driver::Thread).unwrap();
    for seqno in 1..=20 {
        log.promise();
        promiser.marks.wait(|durable| if *durable >= seqno { Look::Found(()) } else { Look::Nothing });
    }
    log.close().unwrap();
    pools.shutdown(Stop::Drain);
}

#[test]
fn a_full_disk_is_looked_at_again_after_a_pause_and_not_before() {
    let (env, sim) = sim::env(1);
    let mut world = World::start(&env, small(), Truth::default()).unwrap();
    let stepper = Stepper::new(&sim.clock, Order::InTurn);
    world.log.drive(&stepper.pools(), Driver::Task).unwrap();
    stepper.run_until_idle();
    sim.storage.arm(sim::FaultPlan::new().fail_from(sim::Op::Write, 0, 28));
    world.submit(key(1, 1), 1, 10, false).unwrap();
    stepper.run_until_idle();
    assert!(world.log.stats().full.is_some());
    let tries = sim.storage.count(sim::Op::Write);
    stepper.run_until_idle();
    assert_eq!(sim.storage.count(sim::Op::Write), tries, "nothing polls");
    sim.storage.arm(sim::FaultPlan::new());
    stepper.advance(Duration::from_millis(100));
    stepper.run_until_idle();
    assert_eq!(world.told.mark(key(1, 1)).seqno.0, 1);
    assert_eq!(*world.told.rooms.lock().unwrap(), 1);
}

/// How far each vBucket is durable, for those who wait for it.
struct Waiters(Bay<BTreeMap<u16, u64>>);

impl Waiters {
    fn wait(&self, vb: u16, seqno: u64) {
        self.0.wait(|marks| match marks.get(&vb).is_some_and(|durable| *durable >= seqno) {
            true => Look::Found(()),
            false => Look::Nothing,
        });
    }
}

fn submission(vb: u16, seqno: u64, items: &[Item]) -> Submission<'_> {
    Submission { bucket: BucketUuid(1), vb: VbId(vb), items, last: Seqno(seqno), record: None, past: None }
}

impl Observer for Waiters {
    fn durable(&self, batch: &[Synced]) {
        self.0.change(|marks| {
            marks.extend(batch.iter().map(|synced| (synced.key.vb.0, synced.seqno.0)));
            ((), Wake::Everybody)
        });
    }
    fn poisoned(&self, reason: &str) {
        panic!("{reason}");
    }
}

/// Goal: every submission becomes durable by itself, and many share a sync. Method: threads in a closed loop, each waiting
/// for its own; a lost wake-up would leave them waiting for ever. In the end all is replayed.
fn storm(env: &env::Env, dir: &Path, driver: Option<Driver>, threads: u16, rounds: u64) -> (u64, u64) {
    let options = Options { segment_bytes: 64 << 10, log_bytes_max: 1 << 20, ..Options::default() };
    let log = Log::open(env, dir, options.clone(), &mut |_| {}).unwrap();
    let waiters = Arc::new(Waiters(Bay::new(BTreeMap::new())));
    log.observe(waiters.clone());
    let pools = Pools::start(env, &PoolConfig { readers: 1, writers: 2, background: 1, compaction: 1, cpu: 1 });
    if let Some(driver) = driver {
        log.drive(&pools, driver).unwrap();
    }
    let start = Barrier::new(usize::from(threads));
    std::thread::scope(|scope| {
        for vb in 0..threads {
            let (log, waiters, start) = (&log, &waiters, &start);
            scope.spawn(move || {
                start.wait();
                for seqno in 1..=rounds {
                    log.submit(&submission(vb, seqno, &[item(seqno, 1, 20)])).unwrap();
                    if driver.is_none() {
                        while log.lead() == Lead::More {}
                    }
                    waiters.wait(vb, seqno);
                    if seqno % 16 == 0 {
                        log.release(
                            key(1, vb),
                            commit_log::Mark { seqno: Seqno(seqno), record_version: 0, rollbacks: 0 },
                        );
                    }
                }
            });
        }
    });
    let stats = log.stats();
    log.close().unwrap();
    pools.shutdown(Stop::Drain);
    assert_eq!(stats.records, u64::from(threads) * rounds);
    drop(log);

    let ends = Mutex::new(BTreeMap::new());
    let mut check = |record: commit_log::Replayed| {
        let mut ends = ends.lock().unwrap();
        let before = ends.insert(record.vb.0, record.last.0);
        assert!(before.is_none_or(|before| record.items[0].seqno().0 == before + 1));
    };
    drop(Log::open(env, dir, options, &mut check).unwrap());
    let ends = ends.into_inner().unwrap();
    assert!((0..threads).all(|vb| ends.get(&vb) == Some(&rounds)), "{ends:?}");
    (stats.syncs, stats.submits)
}

#[test]
fn every_submission_becomes_durable_whoever_leads() {
    for driver in [None, Some(Driver::Task), Some(Driver::Thread)] {
        let (env, _) = sim::env(1);
        let (syncs, submits) = storm(&env, Path::new(DIR), driver, 6, 405);
        assert!(syncs <= submits, "{driver:?}: {syncs} syncs for {submits} submissions");
    }
}

#[test]
fn threads_on_real_files_share_syncs() {
    for driver in [None, Some(Driver::Task), Some(Driver::Thread)] {
        let dir = tempfile::tempdir().unwrap();
        let (syncs, submits) = storm(&env::os::env(), &dir.path().join("log"), driver, 8, 60);
        assert!(syncs < submits, "{driver:?}: {syncs} syncs for {submits} submissions");
    }
}

/// Goal: a guest leads when one write does it, and leaves to the driver what takes a new segment. Method: nobody drives, so what the
/// guest does not do is not done.
#[test]
fn a_guest_leads_once_and_never_begins_a_segment() {
    let (env, _) = sim::env(1);
    let mut world = World::start(&env, small(), Truth::default()).unwrap();
    let mut guests_writes = 0;
    for seqno in 1..=100 {
        world.submit(key(1, 1), 1, 900, false).unwrap();
        world.log.lead_here();
        if world.told.mark(key(1, 1)).seqno.0 == seqno {
            guests_writes += 1;
            continue;
        }
        assert_eq!(world.lead(), Lead::Idle, "the segment is full");
        assert_eq!(world.told.mark(key(1, 1)).seqno.0, seqno);
        world.file(key(1, 1));
    }
    assert_eq!(world.log.stats().syncs, 100);
    assert!((85..100).contains(&guests_writes), "{guests_writes}");
    world.log.close().unwrap();
    world.log.lead_here();
}

/// Promises a change of vBucket 1 whenever one of vBucket 0 has become durable, and submits what was promised.
struct Promising {
    log: Weak<Log>,
    waiters: Waiters,
    promised: AtomicU64,
}

impl Observer for Promising {
    fn durable(&self, batch: &[Synced]) {
        if batch.iter().any(|synced| synced.key.vb == VbId(0)) {
            self.log.upgrade().unwrap().promise();
        }
        self.waiters.durable(batch);
    }
    fn poisoned(&self, reason: &str) {
        panic!("{reason}");
    }
    fn gather(&self) {
        let seqno = self.promised.fetch_add(1, Ordering::Relaxed) + 1;
        self.log.upgrade().unwrap().submit(&submission(1, seqno, &[item(seqno, 1, 20)])).unwrap();
    }
}

/// Goal: what is promised while a guest leads is asked for. Method: the guest's own write makes the promise, and nothing else
/// wakes the driver.
#[test]
fn a_promise_made_while_a_guest_leads_is_kept() {
    let (env, dir) = (env::os::env(), tempfile::tempdir().unwrap());
    let log = Log::open(&env, &dir.path().join("log"), small(), &mut |_| {}).unwrap();
    let pools = Pools::start(&env, &PoolConfig { readers: 1, writers: 1, background: 1, compaction: 1, cpu: 1 });
    let waiters = Waiters(Bay::new(BTreeMap::new()));
    let promising = Arc::new(Promising { log: Arc::downgrade(&log), waiters, promised: AtomicU64::new(0) });
    log.observe(promising.clone());
    log.drive(&pools, Driver::Thread).unwrap();
    for seqno in 1..=3 {
        if log.deposit(&submission(0, seqno, &[item(seqno, 1, 20)])).unwrap() {
            log.lead_here();
        }
        promising.waiters.wait(0, seqno);
        promising.waiters.wait(1, seqno);
    }
    log.close().unwrap();
    pools.shutdown(Stop::Drain);
}

#[test]
fn a_log_that_is_dropped_takes_its_thread_along() {
    let (env, _) = sim::env(1);
    let (log, _) = open(&env, small()).unwrap();
    let pools = Pools::start(&env, &PoolConfig { readers: 1, writers: 1, background: 1, compaction: 1, cpu: 1 });
    log.drive(&pools, Driver::Thread).unwrap();
    let weak = Arc::downgrade(&log);
    drop(log);
    // The thread may be about to notice; it holds the log for a moment only.
    while weak.upgrade().is_some() {
        std::thread::yield_now();
    }
}

#[test]
fn after_a_close_nothing_is_taken() {
    let (env, _) = sim::env(1);
    let mut world = World::start(&env, small(), Truth::default()).unwrap();
    world.submit(key(1, 1), 3, 10, false).unwrap();
    world.log.close().unwrap();
    assert_eq!(world.told.mark(key(1, 1)).seqno.0, 3, "what waited was written");
    assert!(matches!(world.submit(key(1, 1), 1, 10, false), Err(LogError::Closed)));
    world.log.close().unwrap();
    assert_eq!(world.log.lead(), Lead::Stopped);
}

#[test]
fn a_log_that_shall_not_go_past_the_page_cache_writes_and_syncs() {
    let env = env::os::env();
    let dir = tempfile::tempdir().unwrap();
    let options = Options { way: Some(commit_log::Way::WriteAndSync), ..small() };
    let log = Log::open(&env, &dir.path().join("log"), options, &mut |_| {}).unwrap();
    let told = Arc::new(rig::Told::default());
    log.observe(told.clone());
    let (items, last) = ([item(1, 1, 10)], Seqno(1));
    log.submit(&Submission { bucket: BucketUuid(1), vb: VbId(1), items: &items, last, record: None, past: None })
        .unwrap();
    assert_eq!(log.lead(), Lead::Idle);
    assert_eq!((log.stats().way, told.mark(key(1, 1)).seqno), ("write and fdatasync", last));
}
