//! The whole log under shuttle: submitting, leading, preparing, filing and closing at once, in thousands of random orders.
//!
//! A submission that nobody makes durable, or a full log that nobody wakes, shows as a deadlock: nothing polls.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use env::sim;
use scheduler::park::{Bay, Look, Wake};
use scheduler::{PoolConfig, Pools, Stop};
use shuttle::thread;
use types::{BucketUuid, Cas, Datatype, Item, KeyBuf, Kind, Meta, RevSeqno, Seqno, VbId};

use crate::{Driver, Key, Lead, Log, LogError, Mark, Observer, Options, Submission, Synced};

const DIR: &str = "/log";
const BUCKET: BucketUuid = BucketUuid(1);

fn storm(run: impl Fn() + Send + Sync + Copy + 'static) {
    shuttle::check_random(run, 1_000);
    shuttle::check_pct(run, 500, 3);
}

#[derive(Default)]
struct Seen {
    durable: BTreeMap<u16, u64>,
    rooms: u64,
    poisoned: bool,
}

struct Told(Bay<Seen>);

impl Observer for Told {
    fn durable(&self, batch: &[Synced]) {
        self.0.change(|seen| {
            seen.durable.extend(batch.iter().map(|synced| (synced.key.vb.0, synced.seqno.0)));
            ((), Wake::Everybody)
        });
    }
    fn poisoned(&self, _: &str) {
        self.0.change(|seen| {
            assert!(!std::mem::replace(&mut seen.poisoned, true), "told once");
            ((), Wake::Everybody)
        });
    }
    fn room(&self) {
        self.0.change(|seen| {
            seen.rooms += 1;
            ((), Wake::Everybody)
        });
    }
}

impl Told {
    /// True: durable. False: poisoned.
    fn wait_durable(&self, vb: u16, seqno: u64) -> bool {
        self.0.wait(|seen| match seen.durable.get(&vb).is_some_and(|durable| *durable >= seqno) {
            true => Look::Found(true),
            false if seen.poisoned => Look::Found(false),
            false => Look::Nothing,
        })
    }
}

fn item(seqno: u64, value_bytes: usize) -> Item {
    let meta = Meta {
        seqno: Seqno(seqno),
        cas: Cas(seqno),
        rev: RevSeqno(1),
        flags: 0,
        expiry: 0,
        datatype: Datatype::RAW,
        deleted: None,
    };
    let key = KeyBuf::in_default_collection(b"k").unwrap();
    let value = vec![0; value_bytes];
    Item::new(key.as_key(), meta, Kind::Committed { prepared: None }, Some(&value))
}

fn submission(vb: u16, seqno: u64, items: &[Item]) -> Submission<'_> {
    Submission { bucket: BUCKET, vb: VbId(vb), items, last: Seqno(seqno), record: None, past: None }
}

fn submit(log: &Log, vb: u16, seqno: u64, value_bytes: usize) -> Result<(), LogError> {
    log.submit(&submission(vb, seqno, &[item(seqno, value_bytes)]))
}

fn open(env: &env::Env) -> (Arc<Log>, Arc<Told>) {
    let options = Options { segment_bytes: 16 << 10, log_bytes_max: 48 << 10, ..Options::default() };
    let log = Log::open(env, Path::new(DIR), options, &mut |_| {}).unwrap();
    let told = Arc::new(Told(Bay::new(Seen::default())));
    log.observe(told.clone());
    (log, told)
}

fn pools(env: &env::Env) -> Arc<Pools> {
    Pools::start(env, &PoolConfig { readers: 1, writers: 1, background: 1, compaction: 1, cpu: 1 })
}

/// Goal: no submission is left behind. Method: those who submit lead themselves, and then wait.
#[test]
fn those_who_submit_may_lead_and_none_is_left_behind() {
    storm(|| {
        let (env, _) = sim::env(1);
        let (log, told) = open(&env);
        let threads: Vec<_> = (0..3)
            .map(|vb| {
                let (log, told) = (log.clone(), told.clone());
                thread::spawn(move || {
                    for seqno in 1..=3 {
                        submit(&log, vb, seqno, 10).unwrap();
                        while log.lead() == Lead::More {}
                        assert!(told.wait_durable(vb, seqno));
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        let stats = log.stats();
        assert!(stats.records == 9 && stats.syncs <= 9);
    });
}

/// Two guests that deposit and lead once, beside the driver. What was taken must have been told, or they wait for ever.
fn guests(closes_meanwhile: bool) {
    let (env, _) = sim::env(1);
    let (log, told) = open(&env);
    let pools = pools(&env);
    log.drive(&pools, Driver::Thread).unwrap();
    let guests = [0, 1].map(|vb| {
        let (log, told) = (log.clone(), told.clone());
        thread::spawn(move || {
            for seqno in 1..=2 {
                match log.deposit(&submission(vb, seqno, &[item(seqno, 10)])) {
                    Ok(true) => log.lead_here(),
                    Ok(false) => {}
                    Err(LogError::Closed) if closes_meanwhile => return,
                    Err(error) => panic!("{error}"),
                }
                assert!(told.wait_durable(vb, seqno));
            }
        })
    });
    if closes_meanwhile {
        log.close().unwrap();
    }
    guests.into_iter().for_each(|guest| guest.join().unwrap());
    log.close().unwrap();
    drop(log);
    pools.shutdown(Stop::Drain);
}

#[test]
fn what_comes_while_a_guest_leads_is_not_left_behind() {
    storm(|| guests(false));
}

#[test]
fn what_a_guest_has_in_hand_when_the_log_is_closed_is_not_left_behind() {
    storm(|| guests(true));
}

fn driven(driver: Driver) {
    let (env, _) = sim::env(1);
    let (log, told) = open(&env);
    let pools = pools(&env);
    log.drive(&pools, driver).unwrap();
    let threads: Vec<_> = (0..2)
        .map(|vb| {
            let (log, told) = (log.clone(), told.clone());
            thread::spawn(move || {
                for seqno in 1..=2 {
                    submit(&log, vb, seqno, 10).unwrap();
                    assert!(told.wait_durable(vb, seqno));
                }
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    log.close().unwrap();
    drop(log);
    pools.shutdown(Stop::Drain);
}

#[test]
fn a_task_leaves_no_submission_behind() {
    storm(|| driven(Driver::Task));
}

#[test]
fn a_thread_leaves_no_submission_behind() {
    storm(|| driven(Driver::Thread));
}

/// Goal: a full log goes on when there is room, whoever makes it and whenever. Method: large items through a log of three
/// segments, with a filer that releases what is durable; refused submissions wait for `room` and come again.
#[test]
fn a_full_log_goes_on_when_something_was_filed() {
    storm(|| {
        let (env, _) = sim::env(1);
        let (log, told) = open(&env);
        let pools = pools(&env);
        log.drive(&pools, Driver::Thread).unwrap();
        let filer = {
            let (log, told) = (log.clone(), told.clone());
            thread::spawn(move || {
                for seqno in 1..=8 {
                    assert!(told.wait_durable(0, seqno));
                    log.release(
                        Key { bucket: BUCKET, vb: VbId(0) },
                        Mark { seqno: Seqno(seqno), record_version: 0, rollbacks: 0 },
                    );
                }
            })
        };
        let mut seqno = 1;
        while seqno <= 8 {
            let rooms = told.0.read(|seen| seen.rooms);
            match submit(&log, 0, seqno, 7_000) {
                Ok(()) => seqno += 1,
                Err(LogError::Full { .. }) => told.0.wait(|seen| match seen.rooms > rooms {
                    true => Look::Found(()),
                    false => Look::Nothing,
                }),
                Err(error) => panic!("{error}"),
            }
        }
        filer.join().unwrap();
        log.close().unwrap();
        drop(log);
        pools.shutdown(Stop::Drain);
    });
}

/// Goal: a failed sync is told once, and everyone gets an answer.
#[test]
fn a_failed_sync_answers_everyone() {
    storm(|| {
        let (env, sim) = sim::env(1);
        let (log, told) = open(&env);
        sim.storage.arm(sim::FaultPlan::new().fail_nth(sim::Op::Sync, 1, 5));
        let pools = pools(&env);
        log.drive(&pools, Driver::Task).unwrap();
        let threads: Vec<_> = (0..2)
            .map(|vb| {
                let (log, told) = (log.clone(), told.clone());
                thread::spawn(move || {
                    for seqno in 1..=3 {
                        if submit(&log, vb, seqno, 10).is_err() || !told.wait_durable(vb, seqno) {
                            assert!(log.poisoned().is_some());
                            return;
                        }
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        let _ = log.close();
        drop(log);
        pools.shutdown(Stop::Drain);
    });
}
