//! Permits: how many are out, who is told, and what a resize may do.

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed, Ordering::SeqCst};
use std::sync::{Arc, Barrier, Mutex, Weak};
use std::thread;

use limits::{Class, GiveBack, Ledger, Permit, Plan, Wish, Wishes, is_exhausted, with_retry};
use metrics::{Registry, Value};
use proptest::prelude::*;

/// 32 core, 16 background, 8 admin, and 200 for connections and files.
fn ledger(connections: u32) -> Arc<Ledger> {
    let (connections_max, files_max) = (Wish::Asked(connections), Wish::Asked(200 - connections));
    let plan = Plan::for_limit(256, Wishes { connections_max, files_max, workers: 4 }).unwrap();
    Ledger::new(&plan)
}

/// Permits that are only kept in case they are wanted again.
struct Idle {
    ledger: Weak<Ledger>,
    kept: Mutex<VecDeque<Permit>>,
}

impl Idle {
    fn of(ledger: &Arc<Ledger>, class: Class) -> Arc<Idle> {
        let idle = Arc::new(Idle { ledger: Arc::downgrade(ledger), kept: Mutex::default() });
        let saver: Weak<dyn GiveBack> = Arc::downgrade(&idle) as _;
        ledger.on_pressure(class, saver);
        idle
    }

    fn fill(&self, class: Class, count: u32) {
        let ledger = self.ledger.upgrade().unwrap();
        self.kept.lock().unwrap().extend((0..count).map(|_| ledger.take(class).unwrap()));
    }
}

impl GiveBack for Idle {
    fn give_back(&self, wanted: u32) -> u32 {
        let mut kept = self.kept.lock().unwrap();
        let count = kept.len().min(wanted as usize);
        let closed: Vec<_> = kept.drain(..count).collect();
        drop(kept);
        closed.len() as u32
    }
}

#[test]
fn a_class_lends_what_it_has_and_no_more() {
    let ledger = ledger(100);
    let mut out: Vec<_> = (0..100).map(|_| ledger.take(Class::Connections).unwrap()).collect();
    assert!(ledger.take(Class::Connections).is_none());
    // The reserve, and everybody else's, is untouched by that.
    assert!(ledger.take(Class::Admin).is_some() && ledger.take(Class::Files).is_some());
    out.pop();
    assert!(ledger.take_many(Class::Connections, 2).is_none());
    out.push(ledger.take(Class::Connections).unwrap());
    drop(out);
    let stats = ledger.stats().classes[Class::Connections as usize];
    assert_eq!((stats.capacity, stats.out, stats.high_water, stats.refusals), (100, 0, 100, 2));
    assert_eq!(ledger.take_many(Class::Core, 32).unwrap().class(), Class::Core);
    assert_eq!(ledger.out(Class::Core), 0);
}

#[test]
fn a_ledger_costs_nothing_however_large_the_limit() {
    let wishes = Wishes { connections_max: Wish::Asked(900_000), files_max: Wish::Default(90_000), workers: 4 };
    let ledger = Ledger::new(&Plan::for_limit(1_000_000, wishes).unwrap());
    // The value is all there is: its two lists are empty until somebody registers.
    assert!(size_of_val(&*ledger) <= 1024, "{}", size_of_val(&*ledger));
    let out = ledger.take_many(Class::Connections, 900_000).unwrap();
    assert!(ledger.take(Class::Connections).is_none());
    drop(out);
}

#[test]
fn a_class_shrinks_below_what_is_out_and_refuses_until_that_is_back() {
    let ledger = ledger(100);
    let mut out: Vec<_> = (0..10).map(|_| ledger.take(Class::Connections).unwrap()).collect();
    ledger.resize(Class::Connections, 5).unwrap();
    while out.len() > 5 {
        assert!(ledger.take(Class::Connections).is_none());
        out.pop();
    }
    assert!(ledger.take(Class::Connections).is_none());
    out.pop();
    assert!(ledger.take(Class::Connections).is_some());
    ledger.resize(Class::Connections, 0).unwrap();
    assert!(ledger.take(Class::Connections).is_none());
}

#[test]
fn a_class_that_shrinks_has_its_idle_descriptors_closed() {
    let ledger = ledger(100);
    let idle = Idle::of(&ledger, Class::Files);
    idle.fill(Class::Files, 60);
    let _busy = ledger.take_many(Class::Files, 20).unwrap();
    ledger.resize(Class::Files, 50).unwrap();
    assert_eq!((ledger.out(Class::Files), idle.kept.lock().unwrap().len()), (50, 30));
    ledger.resize(Class::Files, 10).unwrap();
    assert_eq!((ledger.out(Class::Files), idle.kept.lock().unwrap().len()), (20, 0), "what is busy stays");
}

/// Goal: a resize promises nothing that somebody still holds. Method: shrink one class under its holders, grow another.
#[test]
fn a_class_grows_by_what_the_others_have_really_given_up() {
    let ledger = ledger(100);
    let refusal = ledger.resize(Class::Connections, 101).unwrap_err();
    assert_eq!(
        refusal.to_string(),
        "connections = 101 is out of range: the limit of open files is 256, of which 100 are left for connections; \
         choose 0 to 100"
    );
    let out = ledger.take_many(Class::Files, 60).unwrap();
    ledger.resize(Class::Files, 40).unwrap();
    assert_eq!(ledger.resize(Class::Connections, 160).unwrap_err().max, 140);
    ledger.resize(Class::Connections, 140).unwrap();
    drop(out);
    ledger.resize(Class::Connections, 160).unwrap();
    let line = "descriptors 256 = core 32 + connections 168 (8 admin) + files 40 + background 16";
    assert_eq!(ledger.plan().to_string(), line);
    assert!(ledger.resize(Class::Files, 41).is_err());
}

#[test]
fn connections_that_need_more_have_idle_files_closed_first() {
    let ledger = ledger(100);
    let idle = Idle::of(&ledger, Class::Files);
    idle.fill(Class::Files, 60);
    let busy = ledger.take_many(Class::Files, 30).unwrap();
    // 10 of the 100 are free, so 20 of the idle ones have to go.
    assert_eq!(ledger.transfer(Class::Files, Class::Connections, 30, 32), 30);
    assert_eq!((ledger.out(Class::Files), idle.kept.lock().unwrap().len()), (70, 40));
    // What is busy stays, and the floor holds.
    assert_eq!(ledger.transfer(Class::Files, Class::Connections, 1_000, 32), 38);
    assert_eq!(ledger.out(Class::Files), 32);
    assert_eq!(ledger.transfer(Class::Files, Class::Connections, 1, 0), 1);
    drop(idle);
    assert_eq!(ledger.transfer(Class::Files, Class::Connections, 5, 0), 1, "30 are in use");
    assert_eq!(ledger.plan().capacity(Class::Connections), 170);
    drop(busy);
    assert_eq!(ledger.stats().given_back, 20 + 38 + 1);
}

#[test]
fn a_claim_closes_idle_descriptors_of_its_class_before_it_gives_up() {
    let ledger = ledger(168);
    let idle = Idle::of(&ledger, Class::Files);
    idle.fill(Class::Files, 20);
    let busy = ledger.take_many(Class::Files, 12).unwrap();
    let mut out: Vec<_> = (0..20).map(|_| ledger.claim(Class::Files).unwrap()).collect();
    assert_eq!(ledger.stats().classes[Class::Files as usize].refusals, 0);
    let refusal: io::Error = ledger.claim(Class::Files).unwrap_err().into();
    assert!(is_exhausted(&refusal));
    assert_eq!(
        refusal.to_string(),
        "all 32 descriptors for files are in use; wait until some are closed, or give them more"
    );
    let _rest = ledger.take_many(Class::Background, 16).unwrap();
    out.truncate(10);
    idle.fill(Class::Files, 10);
    assert!(ledger.claim(Class::Background).is_err(), "closing files makes no room elsewhere");
    assert_eq!(idle.kept.lock().unwrap().len(), 10);
    drop((busy, out));
}

#[test]
fn an_open_without_a_descriptor_is_tried_once_more_after_idle_files_are_closed() {
    const EMFILE: i32 = 24;
    let ledger = ledger(100);
    let idle = Idle::of(&ledger, Class::Files);
    idle.fill(Class::Files, 20);
    for errno in [EMFILE, 23] {
        let mut calls = 0;
        let opened = with_retry(&ledger, || {
            calls += 1;
            if calls == 1 { Err(io::Error::from_raw_os_error(errno)) } else { Ok(calls) }
        });
        assert_eq!(opened.unwrap(), 2);
    }
    assert_eq!(ledger.out(Class::Files), 0);
    let mut calls = 0;
    let failed: io::Result<()> = with_retry(&ledger, || {
        calls += 1;
        Err(io::Error::from_raw_os_error(EMFILE))
    });
    assert!(calls == 2 && is_exhausted(&failed.unwrap_err()), "the second refusal is the caller's");
    // Nothing else is tried twice.
    let other: io::Result<()> = with_retry(&ledger, || {
        calls += 1;
        Err(io::ErrorKind::NotFound.into())
    });
    assert!(calls == 3 && !is_exhausted(&other.unwrap_err()));
    assert_eq!((ledger.stats().exhausted, ledger.stats().given_back), (3, 20));
}

#[test]
fn whoever_was_refused_is_told_once_and_others_are_left_alone() {
    let ledger = ledger(100);
    let told = Arc::new(AtomicU32::new(0));
    let count = Arc::clone(&told);
    ledger.on_release(Class::Connections, move || {
        count.fetch_add(1, Relaxed);
    });
    let told = move || told.swap(0, Relaxed);
    let mut out: Vec<_> = (0..100).map(|_| ledger.take(Class::Connections).unwrap()).collect();
    out.pop();
    assert_eq!(told(), 0, "nobody was refused");
    out.push(ledger.take(Class::Connections).unwrap());
    assert!(ledger.take(Class::Connections).is_none());
    drop(ledger.take(Class::Files).unwrap());
    assert_eq!(told(), 0, "that was another class");
    out.pop();
    out.pop();
    assert_eq!(told(), 1);
    out.extend([ledger.take(Class::Connections).unwrap(), ledger.take(Class::Connections).unwrap()]);
    assert!(ledger.take(Class::Connections).is_none());
    ledger.resize(Class::Files, 99).unwrap();
    ledger.resize(Class::Connections, 101).unwrap();
    assert_eq!(told(), 1, "a larger class has room, too");
}

/// Goal: a part that stops when refused and goes on when told never stops for ever. Method: many threads want the only
/// permit, and sleep without a limit whenever they do not get it.
#[test]
fn threads_that_sleep_until_told_all_get_their_turn() {
    let ledger = ledger(100);
    ledger.resize(Class::Connections, 1).unwrap();
    let wakers: Arc<Mutex<Vec<thread::Thread>>> = Arc::default();
    let sleepers = Arc::clone(&wakers);
    ledger.on_release(Class::Connections, move || sleepers.lock().unwrap().iter().for_each(thread::Thread::unpark));
    let takers: Vec<_> = (0..4)
        .map(|_| {
            let ledger = Arc::clone(&ledger);
            thread::spawn(move || {
                thread::park();
                for _ in 0..5_000 {
                    let permit = loop {
                        match ledger.take(Class::Connections) {
                            Some(permit) => break permit,
                            None => thread::park(),
                        }
                    };
                    drop(permit);
                }
            })
        })
        .collect();
    wakers.lock().unwrap().extend(takers.iter().map(|taker| taker.thread().clone()));
    takers.iter().for_each(|taker| taker.thread().unpark());
    takers.into_iter().for_each(|taker| taker.join().unwrap());
    assert_eq!(ledger.out(Class::Connections), 0);
}

/// Goal: never more descriptors than the limit, and no ratchet. Method: threads hold permits of all classes and count
/// what they hold, while others resize the classes and move room between them; then everything comes back.
#[test]
fn permits_are_conserved_while_classes_are_resized() {
    let ledger = ledger(100);
    let (open, most) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let stop = Arc::new(AtomicBool::new(false));
    let start = Arc::new(Barrier::new(5));
    let holders = (0..3_u64).map(|seed| {
        let (ledger, open, most, start) = (ledger.clone(), open.clone(), most.clone(), start.clone());
        thread::spawn(move || {
            start.wait();
            let (mut held, mut dice) = (VecDeque::new(), Dice(seed + 1));
            for _ in 0..60_000 {
                let class = Class::ALL[dice.below(5) as usize];
                if dice.below(100) < 70 {
                    if let Some(permit) = ledger.take(class) {
                        most.fetch_max(open.fetch_add(1, SeqCst) + 1, SeqCst);
                        held.push_back(permit);
                    }
                } else if !held.is_empty() {
                    let at = dice.below(held.len() as u64) as usize;
                    open.fetch_sub(1, SeqCst);
                    held.swap_remove_back(at);
                }
            }
            open.fetch_sub(held.len() as u64, SeqCst);
        })
    });
    let holders: Vec<_> = holders.collect();
    let movers = (0..2_u64).map(|seed| {
        let (ledger, stop, start) = (ledger.clone(), stop.clone(), start.clone());
        thread::spawn(move || {
            start.wait();
            let mut dice = Dice(seed + 77);
            while !stop.load(Relaxed) {
                let mut class = || Class::ALL[dice.below(5) as usize];
                let (one, other) = (class(), class());
                if dice.below(2) == 0 {
                    let _ = ledger.resize(one, dice.below(256) as u32);
                } else {
                    ledger.transfer(one, other, dice.below(64) as u32, dice.below(16) as u32);
                }
                assert!(ledger.plan().limit() == 256 && ledger.plan().spare() <= 256);
            }
        })
    });
    let movers: Vec<_> = movers.collect();
    holders.into_iter().for_each(|holder| holder.join().unwrap());
    stop.store(true, Relaxed);
    movers.into_iter().for_each(|mover| mover.join().unwrap());
    assert!(most.load(SeqCst) <= 256, "{} descriptors were open of 256", most.load(SeqCst));
    assert!(most.load(SeqCst) > 100, "the test hardly held anything: {}", most.load(SeqCst));
    assert_eq!(Class::ALL.map(|class| ledger.out(class)), [0; 5]);
    // Everything can still be lent: nothing got lost on the way.
    Class::ALL.iter().for_each(|class| ledger.resize(*class, 0).unwrap());
    ledger.resize(Class::Files, 256).unwrap();
    assert!(ledger.take_many(Class::Files, 256).is_some());
}

#[derive(Clone, Debug)]
enum Step {
    Take(usize, u32),
    Drop(usize),
    Resize(usize, u32),
    Transfer(usize, usize, u32, u32),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0..5_usize, 1..30_u32).prop_map(|(class, n)| Step::Take(class, n)),
        3 => (0..64_usize).prop_map(Step::Drop),
        1 => (0..5_usize, 0..300_u32).prop_map(|(class, n)| Step::Resize(class, n)),
        1 => (0..5_usize, 0..5_usize, 0..80_u32, 0..20_u32).prop_map(|(a, b, n, floor)| Step::Transfer(a, b, n, floor)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]
    /// Method: the same steps against plain numbers.
    #[test]
    fn a_ledger_counts_as_a_child_would(steps in prop::collection::vec(step(), 1..200)) {
        let ledger = ledger(100);
        let mut capacity = Class::ALL.map(|class| ledger.plan().capacity(class));
        let mut out = [0_u32; 5];
        let mut held: Vec<(usize, u32, Permit)> = Vec::new();
        for step in steps {
            match step {
                Step::Take(class, n) => {
                    let fits = out[class] + n <= capacity[class];
                    let permit = ledger.take_many(Class::ALL[class], n);
                    prop_assert_eq!(permit.is_some(), fits);
                    if let Some(permit) = permit {
                        out[class] += n;
                        held.push((class, n, permit));
                    }
                }
                Step::Drop(at) if !held.is_empty() => {
                    let (class, n, permit) = held.swap_remove(at % held.len());
                    drop(permit);
                    out[class] -= n;
                }
                Step::Drop(_) => {}
                Step::Resize(class, n) => {
                    let others: u32 = (0..5).filter(|other| *other != class).map(|o| capacity[o].max(out[o])).sum();
                    let resized = ledger.resize(Class::ALL[class], n);
                    prop_assert_eq!(resized.is_ok(), others + n <= 256);
                    if resized.is_ok() {
                        capacity[class] = n;
                    }
                }
                Step::Transfer(from, to, n, floor) => {
                    let free = capacity[from].saturating_sub(out[from].max(floor)).min(n);
                    prop_assert_eq!(ledger.transfer(Class::ALL[from], Class::ALL[to], n, floor), free);
                    capacity[from] -= free;
                    capacity[to] += free;
                }
            }
            prop_assert_eq!(Class::ALL.map(|class| ledger.plan().capacity(class)), capacity);
            prop_assert_eq!(Class::ALL.map(|class| ledger.out(class)), out);
            let claimed: u32 = (0..5).map(|class| capacity[class].max(out[class])).sum();
            prop_assert!(claimed <= 256);
        }
    }
}

#[test]
fn the_registry_shows_every_class() {
    let ledger = ledger(100);
    let mut registry = Registry::new();
    registry.add(&ledger.families());
    registry.assert_every_stat_name_is_unique();
    let _out = ledger.take_many(Class::Files, 7).unwrap();
    let read = |name: &str| {
        let family = registry.families().iter().find(|family| family.name() == name).unwrap();
        let mut readings = Vec::new();
        family.walk(&mut |labels, value| readings.push((labels.iter().map(|(_, v)| v.to_string()).collect(), value)));
        readings
    };
    let of = |class: &str, n| (vec![class.to_owned()], Value::Gauge(n));
    let expected = [of("core", 0), of("connections", 0), of("admin", 0), of("files", 7), of("background", 0)];
    assert_eq!(read("descriptors_out"), expected);
    let expected = [of("core", 32), of("connections", 100), of("admin", 8), of("files", 100), of("background", 16)];
    assert_eq!(read("descriptors_capacity"), expected);
    assert_eq!(read("descriptors_limit"), [(vec![], Value::Gauge(256))]);
}

struct Dice(u64);

impl Dice {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) % n
    }
}
