//! Goal: a durable write that was acknowledged is never lost, and nothing is invented. Method: run a workload through
//! `execute` with the power cut before each I/O in turn, restart on what the disk kept, compare with what was told.

mod common;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use common::*;
use engine::*;
use env::Env;
use env::sim::SimClock;
use parking_lot::Mutex;
use persist::LogOptions;
use scheduler::Stepper;
use types::{Cas, Level, VbId};

#[derive(Default)]
struct Letters(Mutex<HashMap<u64, OpResult>>);

impl Mailbox for Letters {
    fn deliver(&self, ticket: Ticket, result: OpResult) {
        self.0.lock().insert(ticket.request, result);
    }
}

/// What clients know: by (vBucket, key), the values written in order (`None` = delete) and how many of them were
/// acknowledged as durable.
#[derive(Default)]
struct Told {
    written: BTreeMap<(u16, String), Vec<Option<String>>>,
    acknowledged: BTreeMap<(u16, String), usize>,
    /// By vBucket, the highest CAS of an acknowledged durable write.
    cas: BTreeMap<u16, Cas>,
}

fn workload(env: &Env, clock: &SimClock, log: &Option<LogOptions>) -> Told {
    let mut told = Told::default();
    let Ok((stepper, engine, _)) = try_open_with(env, clock, log.clone()) else { return told };
    let Ok(bucket) = engine.create_bucket(spec()) else { return told };
    let letters = Arc::new(Letters::default());
    let mut number = 0;
    for round in 0..5u64 {
        let mut waiting = Vec::new();
        for slot in 0..4u64 {
            let (vb, name) = ((slot % 2) as u16, format!("k{}", slot / 2));
            let key = k(&name);
            let value = (round + slot) % 5;
            let text = format!("{round}.{slot}");
            let op = if value == 4 && round > 0 { Op::Delete } else { set(&text) };
            let level = [None, Some(Level::PersistMajority), Some(Level::MajorityAndPersistActive)]
                [(round as usize + slot as usize) % 3];
            let durability = level.map(|level| Requirement { level, timeout: None });
            let request = Request { vb: VbId(vb), durability, ..request(&key, op) };
            number += 1;
            let ticket = Ticket { slot: 0, generation: 0, request: number };
            let outcome = bucket.execute(&request, &|| Waiter::new(Arc::clone(&letters) as Arc<dyn Mailbox>, ticket));
            let place = (vb, name);
            let written = matches!(op, Op::Delete).then_some(None).unwrap_or(Some(text));
            match outcome {
                Outcome::Pending => {
                    told.written.entry(place.clone()).or_default().push(written);
                    waiting.push((number, place));
                }
                // Not durable: it may be there or not.
                Outcome::Done(Ok(_)) => {
                    told.written.entry(place).or_default().push(written);
                }
                Outcome::Done(Err(_)) => {}
            }
        }
        pump(&stepper);
        for (number, place) in waiting {
            if let Some(Ok(reply)) = letters.0.lock().remove(&number) {
                let cas = told.cas.entry(place.0).or_default();
                *cas = (*cas).max(mutated(Ok(reply)).cas);
                let count = told.written[&place].len();
                told.acknowledged.insert(place, count);
            }
        }
        bucket.page();
    }
    told
}

/// Runs what is ready. A flush that fails is tried again only when time passes, so this ends with the power off too.
fn pump(stepper: &Stepper) {
    stepper.run_until_idle();
}

fn check(env: &Env, clock: &SimClock, log: &Option<LogOptions>, told: &Told) {
    let (stepper, engine, _) =
        try_open_with(env, clock, log.clone()).expect("a power cut leaves nothing that refuses to open");
    let Some(bucket) = engine.bucket("default") else {
        assert!(told.acknowledged.is_empty(), "the bucket is gone with what it acknowledged");
        return;
    };
    pump(&stepper);
    let letters = Arc::new(Letters::default());
    let ask = |vb: u16, name: &str, op: Op<'_>, number: u64| {
        let key = k(name);
        let request = Request { vb: VbId(vb), ..request(&key, op) };
        let ticket = Ticket { slot: 0, generation: 0, request: number };
        match bucket.execute(&request, &|| Waiter::new(Arc::clone(&letters) as Arc<dyn Mailbox>, ticket)) {
            Outcome::Done(result) => result,
            Outcome::Pending => {
                stepper.run_until_idle();
                letters.0.lock().remove(&number).expect("answered")
            }
        }
    };
    for (n, (place, written)) in told.written.iter().enumerate() {
        let found = match ask(place.0, &place.1, Op::Get, n as u64) {
            Ok(reply) => Some(String::from_utf8(body(&reply)).unwrap()),
            Err(OpError::NotFound) => None,
            Err(other) => panic!("{place:?}: {other:?}"),
        };
        // The last acknowledged version, or any later one; before the first acknowledgement also nothing at all.
        let acknowledged = told.acknowledged.get(place).copied().unwrap_or(0);
        let mut allowed = written[acknowledged.saturating_sub(1)..].to_vec();
        if acknowledged == 0 {
            allowed.push(None);
        }
        assert!(allowed.contains(&found), "{place:?}: found {found:?}, allowed {allowed:?}");
        let next = mutated(ask(place.0, &place.1, set("after"), 1000 + n as u64));
        // The clock stood still meanwhile: only what the disk kept makes CAS values grow.
        assert!(Some(&next.cas) > told.cas.get(&place.0), "{place:?}");
    }
}

#[test]
fn an_acknowledged_durable_write_survives_power_loss_before_every_io() {
    for log in [None, Some(small_log())] {
        let clock = SimClock::new();
        let whole = workload(&env::sim::env(11).0, &clock, &log);
        assert!(whole.acknowledged.len() >= 4, "the workload acknowledges durable writes when nothing goes wrong");
        let start = env::sim::env(11).1;
        env::sim::cut_everywhere(
            &start,
            1,
            |env| workload(env, &clock, &log),
            |sim, told| {
                let env = sim.env();
                check(&env, &sim.clock, &log, told)
            },
        );
    }
}
