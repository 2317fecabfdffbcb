//! Goal: the engine is a map with conditions. Method: random operations on few keys beside a plain model, time passing,
//! values evicted, tombstones forgotten and the program restarted in between; every answer must be the model's.

mod common;

use std::collections::BTreeMap;
use std::time::Duration;

use common::*;
use engine::*;
use proptest::prelude::*;
use types::{Cas, Datatype, Level, VbId};

#[derive(Clone, Debug)]
enum Step {
    Store {
        mode: StoreMode,
        with_cas: WithCas,
        expiry: u32,
        durable: Option<Level>,
    },
    Delete {
        with_cas: WithCas,
        durable: Option<Level>,
    },
    Get,
    Meta,
    Touch {
        expiry: u32,
    },
    Lock {
        seconds: u32,
    },
    Unlock {
        with_cas: WithCas,
    },
    Append {
        with_cas: WithCas,
    },
    Add {
        by: u64,
        initial: Option<u64>,
    },
    Evict,
    Wait {
        ms: u64,
    },
    Page,
    /// All that is in the file leaves memory, as if it were short.
    Squeeze,
    /// A few steps of what goes on behind the scenes.
    Steps {
        count: usize,
    },
    Restart,
}

#[derive(Clone, Copy, Debug)]
enum WithCas {
    None,
    Right,
    Lock,
    Wrong,
}

fn steps() -> impl Strategy<Value = Vec<(u8, Step)>> {
    let cas = || {
        prop_oneof![
            4 => Just(WithCas::None),
            2 => Just(WithCas::Right),
            2 => Just(WithCas::Lock),
            1 => Just(WithCas::Wrong)
        ]
    };
    let level = || {
        prop_oneof![
            3 => Just(None),
            1 => Just(Some(Level::Majority)),
            1 => Just(Some(Level::PersistMajority))
        ]
    };
    let mode = prop_oneof![Just(StoreMode::Set), Just(StoreMode::Add), Just(StoreMode::Replace)];
    let expiry = || prop_oneof![3 => Just(0u32), 1 => 1u32..20];
    let step = prop_oneof![
        6 => (mode, cas(), expiry(), level())
            .prop_map(|(mode, with_cas, expiry, durable)| Step::Store { mode, with_cas, expiry, durable }),
        3 => (cas(), level()).prop_map(|(with_cas, durable)| Step::Delete { with_cas, durable }),
        4 => Just(Step::Get),
        3 => Just(Step::Meta),
        1 => expiry().prop_map(|expiry| Step::Touch { expiry }),
        2 => (0u32..40).prop_map(|seconds| Step::Lock { seconds }),
        1 => cas().prop_map(|with_cas| Step::Unlock { with_cas }),
        2 => cas().prop_map(|with_cas| Step::Append { with_cas }),
        2 => (0u64..5, prop::option::of(0u64..100)).prop_map(|(by, initial)| Step::Add { by, initial }),
        2 => Just(Step::Evict),
        2 => (0u64..12_000).prop_map(|ms| Step::Wait { ms }),
        1 => Just(Step::Page),
        2 => Just(Step::Squeeze),
        1 => (1usize..4).prop_map(|count| Step::Steps { count }),
        1 => Just(Step::Restart),
    ];
    prop::collection::vec((0u8..4, step), 1..60)
}

#[derive(Clone, Debug)]
struct Doc {
    value: Vec<u8>,
    expiry: u32,
    cas: Cas,
}

#[derive(Default)]
struct Model {
    live: BTreeMap<u8, Doc>,
    /// By key: the revision of the newest version, dead or alive.
    rev: BTreeMap<u8, u64>,
    locks: BTreeMap<u8, (Cas, Duration)>,
    last_cas: Cas,
    /// Of a change, not of a lock: what outlives a restart.
    written_cas: Cas,
}

impl Model {
    fn look(&mut self, key: u8, now_s: u32) -> Option<Doc> {
        if self.live.get(&key).is_some_and(|doc| doc.expiry != 0 && doc.expiry <= now_s) {
            self.live.remove(&key);
            self.locks.remove(&key);
            *self.rev.get_mut(&key).unwrap() += 1;
        }
        self.live.get(&key).cloned()
    }

    fn lock(&self, key: u8, now: Duration) -> Option<Cas> {
        self.locks.get(&key).filter(|lock| now < lock.1).map(|lock| lock.0)
    }

    fn condition(&self, key: u8, cas: Cas, now: Duration) -> Result<(), OpError> {
        match (self.live.get(&key), self.lock(key, now)) {
            (None, _) if cas == Cas(0) => Ok(()),
            (None, _) => Err(OpError::NotFound),
            (Some(_), Some(lock)) if lock == cas => Ok(()),
            (Some(_), Some(_)) => Err(OpError::Locked),
            (Some(doc), None) if cas == Cas(0) || cas == doc.cas => Ok(()),
            (Some(_), None) => Err(OpError::Exists),
        }
    }

    fn write(&mut self, key: u8, doc: Option<Doc>, cas: Cas) {
        assert!(cas > self.last_cas, "CAS values grow");
        (self.last_cas, self.written_cas) = (cas, cas);
        self.locks.remove(&key);
        *self.rev.entry(key).or_default() += 1;
        match doc {
            Some(doc) => self.live.insert(key, Doc { cas, ..doc }),
            None => self.live.remove(&key),
        };
    }
}

fn expiry_at(raw: u32, now_s: u32) -> u32 {
    if raw == 0 { 0 } else { now_s + raw }
}

/// The error, or what came of it.
fn error_of(result: &OpResult) -> Result<(), OpError> {
    result.as_ref().map(|_| ()).map_err(OpError::clone)
}

fn run(script: Vec<(u8, Step)>, eviction: persist::Eviction) {
    let mut w = World::with(7, persist::BucketSpec { eviction, ..spec() });
    let mut model = Model::default();
    for (n, (key, step)) in script.into_iter().enumerate() {
        let (name, now, now_s) = (format!("k{key}"), w.env.clock.monotonic(), w.now_s());
        let before = model.look(key, now_s);
        let cas_for = |model: &Model, with| match with {
            WithCas::None => Cas(0),
            WithCas::Right => before.as_ref().map_or(Cas(0), |doc| doc.cas),
            WithCas::Lock => model.locks.get(&key).map_or(Cas(0), |lock| lock.0),
            WithCas::Wrong => Cas(12345),
        };
        let id = k(&name);
        let with = |cas, durable: Option<Level>, op| Request {
            cas,
            durability: durable.map(|level| Requirement { level, timeout: None }),
            ..request(&id, op)
        };
        let what = format!("step {n}: {step:?} on {name}, model has {before:?}");
        match step {
            Step::Store { mode, with_cas, expiry, durable } => {
                let cas = if mode == StoreMode::Add { Cas(0) } else { cas_for(&model, with_cas) };
                let value = format!("{n}").into_bytes();
                let result = w.run(&with(cas, durable, store(mode, expiry, &value)));
                let expected = match (mode, &before) {
                    (StoreMode::Add, Some(_)) => Err(OpError::Exists),
                    (StoreMode::Replace, None) => Err(OpError::NotFound),
                    _ => model.condition(key, cas, now),
                };
                assert_eq!(error_of(&result), expected, "{what}");
                if expected.is_ok() {
                    let doc = Doc { value, expiry: expiry_at(expiry, now_s), cas: Cas(0) };
                    model.write(key, Some(doc), mutated(result).cas);
                }
            }
            Step::Delete { with_cas, durable } => {
                let cas = cas_for(&model, with_cas);
                let result = w.run(&with(cas, durable, Op::Delete));
                let expected = model.condition(key, cas, now).and(before.map(|_| ()).ok_or(OpError::NotFound));
                assert_eq!(error_of(&result), expected, "{what}");
                if expected.is_ok() {
                    model.write(key, None, mutated(result).cas);
                }
            }
            Step::Get => {
                let result = w.run(&request(&id, Op::Get));
                assert_eq!(error_of(&result), before.as_ref().map(|_| ()).ok_or(OpError::NotFound), "{what}");
                if let Some(doc) = before {
                    assert_eq!(body(result.as_ref().unwrap()), doc.value, "{what}");
                    let shown = if model.lock(key, now).is_some() { Cas::LOCKED } else { doc.cas };
                    assert_eq!(cas_of(result), shown, "{what}");
                }
            }
            Step::Meta => match (w.run(&request(&id, Op::GetMeta)), before) {
                (Ok(Reply::Meta { deleted: false, expiry, rev, .. }), Some(doc)) => {
                    assert_eq!(expiry, doc.expiry, "{what}");
                    // A key may go on higher than its own last revision: after another key's forgotten tombstone.
                    assert!(rev.0 >= model.rev[&key], "{what}");
                    model.rev.insert(key, rev.0);
                }
                (Ok(Reply::Meta { deleted: true, rev, .. }), None) => {
                    assert!(rev.0 >= model.rev[&key], "{what}");
                    model.rev.insert(key, rev.0);
                }
                (Err(OpError::NotFound), None) => assert!(!model.rev.contains_key(&key), "{what}"),
                (other, _) => panic!("{what}: {other:?}"),
            },
            Step::Touch { expiry } => {
                let result = w.run(&request(&id, Op::Touch { expiry }));
                let expected = match &before {
                    None => Err(OpError::NotFound),
                    Some(_) if model.lock(key, now).is_some() => Err(OpError::Locked),
                    Some(_) => Ok(()),
                };
                assert_eq!(error_of(&result), expected, "{what}");
                if expected.is_ok() {
                    let (doc, cas) = (before.unwrap(), cas_of(result));
                    if doc.expiry == expiry_at(expiry, now_s) {
                        assert_eq!(cas, doc.cas, "{what}");
                    } else {
                        model.write(key, Some(Doc { expiry: expiry_at(expiry, now_s), ..doc }), cas);
                    }
                }
            }
            Step::Lock { seconds } => {
                let result = w.run(&request(&id, Op::GetAndLock { lock_s: seconds }));
                let expected = match &before {
                    None => Err(OpError::NotFound),
                    Some(_) if model.lock(key, now).is_some() => Err(OpError::Locked),
                    Some(_) => Ok(()),
                };
                assert_eq!(error_of(&result), expected, "{what}");
                if expected.is_ok() {
                    let held = if (1..=30).contains(&seconds) { seconds } else { 15 };
                    let cas = cas_of(result);
                    assert!(cas > model.last_cas);
                    model.last_cas = cas;
                    model.locks.insert(key, (cas, now + Duration::from_secs(held.into())));
                }
            }
            Step::Unlock { with_cas } => {
                let cas = cas_for(&model, with_cas);
                let result = w.run(&with(cas, None, Op::Unlock));
                let expected = match (cas, &before, model.lock(key, now)) {
                    (Cas(0), ..) => Err(OpError::Invalid("unlock needs the CAS of the lock")),
                    (_, None, _) => Err(OpError::NotFound),
                    (_, _, None) => Err(OpError::NotLocked),
                    (cas, _, Some(lock)) if cas == lock => Ok(()),
                    _ => Err(OpError::Locked),
                };
                assert_eq!(error_of(&result), expected, "{what}");
                if expected.is_ok() {
                    model.locks.remove(&key);
                }
            }
            Step::Append { with_cas } => {
                let cas = cas_for(&model, with_cas);
                let op = Op::Concat { end: End::Append, datatype: Datatype::RAW, value: b"0" };
                let result = w.run(&with(cas, None, op));
                let expected = match &before {
                    None => Err(OpError::NotStored),
                    Some(_) => model.condition(key, cas, now),
                };
                assert_eq!(error_of(&result), expected, "{what}");
                if expected.is_ok() {
                    let mut doc = before.unwrap();
                    doc.value.push(b'0');
                    model.write(key, Some(doc), mutated(result).cas);
                }
            }
            Step::Add { by, initial } => {
                let result = w.run(&request(&id, Op::Arithmetic { delta: Delta::Increment(by), initial, expiry: 0 }));
                let number = |doc: &Doc| std::str::from_utf8(&doc.value).unwrap().parse::<u64>().ok();
                let expected = match (&before, initial) {
                    (None, None) => Err(OpError::NotFound),
                    (None, Some(initial)) => Ok((initial, 0)),
                    (Some(doc), _) => model
                        .condition(key, Cas(0), now)
                        .and_then(|()| number(doc).ok_or(OpError::BadDelta))
                        .map(|old| (old.wrapping_add(by), doc.expiry)),
                };
                assert_eq!(error_of(&result), expected.clone().map(|_| ()), "{what}");
                if let Ok((value, expiry)) = expected {
                    let doc = Doc { value: value.to_string().into_bytes(), expiry, cas: Cas(0) };
                    model.write(key, Some(doc), mutated(result).cas);
                }
            }
            Step::Evict => {
                w.settle();
                let result = w.run(&request(&id, Op::Evict));
                assert_eq!(error_of(&result), before.map(|_| ()).ok_or(OpError::NotFound), "{what}");
            }
            Step::Wait { ms } => {
                w.stepper.advance(Duration::from_millis(ms));
            }
            Step::Page => w.file_everything(),
            Step::Squeeze => {
                w.bucket.squeeze();
            }
            Step::Steps { count } => (0..count).for_each(|_| _ = w.stepper.step()),
            Step::Restart => {
                w.settle();
                let items = w.bucket.items();
                w = w.restart();
                assert_eq!(w.bucket.items(), items, "{what}");
                model.locks.clear();
                model.last_cas = model.written_cas;
            }
        }
    }
    // The whole, and again after a restart.
    for round in 0..2 {
        for key in 0..4u8 {
            let expected = model.look(key, w.now_s()).map(|doc| doc.value).ok_or(OpError::NotFound);
            assert_eq!(w.get(&format!("k{key}")), expected, "k{key}, round {round}");
        }
        assert_eq!(w.bucket.items(), model.live.len() as u64);
        w.settle();
        w = w.restart();
    }
    let high = w.bucket.all_vb_seqnos(None, true)[0];
    assert_eq!(high.0, VbId(0));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_engine_answers_as_a_map_with_conditions_would(script in steps()) {
        run(script, persist::Eviction::Value);
    }

    #[test]
    fn so_it_does_when_whole_documents_leave_memory(script in steps()) {
        run(script, persist::Eviction::Full);
    }
}
