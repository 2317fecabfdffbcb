//! Whole pools under shuttle: wakes, snoozes, cancels, resizes and shutdowns at once, in thousands of random orders.
//!
//! A lost wake shows as a deadlock: there is no poll, and time stands still unless the test moves it.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use env::sim::SimClock;
use shuttle::thread;

use crate::park::{Bay, Look, Wake};
use crate::{Context, Next, PoolConfig, PoolKind::*, Pools, Stop, Task, TaskHandle};

const ONE_EACH: PoolConfig = PoolConfig { readers: 1, writers: 1, background: 1, compaction: 1, cpu: 1 };
const SECOND: Duration = Duration::from_secs(1);

/// Shuttle's random order finds most; its priority-based one finds what needs few but exact switches.
fn storm(run: impl Fn() + Send + Sync + Copy + 'static) {
    shuttle::check_random(run, 3_000);
    shuttle::check_pct(run, 1_000, 3);
}

/// Counts its runs, tells after each, and checks that it is alone.
struct Probe {
    next: Next,
    inside: AtomicUsize,
    tally: Arc<Tally>,
}

/// How many runs there were, and how many probes still live.
struct Tally(Bay<(usize, usize)>);

impl Tally {
    fn new(probes: usize) -> Arc<Tally> {
        Arc::new(Tally(Bay::new((0, probes))))
    }

    fn await_runs(&self, at_least: usize) {
        self.0.wait(|(runs, _)| if *runs >= at_least { Look::Found(()) } else { Look::Nothing });
    }

    fn runs(&self) -> usize {
        self.0.read(|(runs, _)| *runs)
    }

    fn alive(&self) -> usize {
        self.0.read(|(_, alive)| *alive)
    }
}

fn probe(tally: &Arc<Tally>, next: Next) -> Arc<dyn Task> {
    Arc::new(Probe { next, inside: AtomicUsize::new(0), tally: tally.clone() })
}

impl Task for Probe {
    fn name(&self) -> &'static str {
        "probe"
    }
    fn run(&self, _: &Context<'_>) -> Next {
        assert_eq!(self.inside.fetch_add(1, SeqCst), 0, "on two threads");
        thread::yield_now();
        self.tally.0.change(|(runs, _)| {
            *runs += 1;
            ((), Wake::Everybody)
        });
        assert_eq!(self.inside.fetch_sub(1, SeqCst), 1);
        self.next
    }
}

impl Drop for Probe {
    fn drop(&mut self) {
        self.tally.0.change(|(_, alive)| {
            *alive -= 1;
            ((), Wake::Everybody)
        });
    }
}

fn start(config: &PoolConfig) -> (Arc<Pools>, SimClock) {
    let clock = SimClock::new();
    (Pools::start_with(Arc::new(clock.clone()), config), clock)
}

fn in_background(work: impl FnOnce() + Send + 'static) -> thread::JoinHandle<()> {
    thread::spawn(work)
}

#[test]
fn every_task_woken_from_many_threads_runs() {
    storm(|| {
        let (pools, _) = start(&PoolConfig { writers: 2, ..ONE_EACH });
        let tally = Tally::new(2);
        let tasks: Vec<TaskHandle> = (0..2).map(|_| pools.spawn(Writer, probe(&tally, Next::Idle))).collect();
        let wakers: Vec<_> = (0..2)
            .map(|_| {
                let tasks = tasks.clone();
                in_background(move || tasks.iter().for_each(TaskHandle::wake))
            })
            .collect();
        // Each task has one run at least, whoever's wake it was.
        tally.await_runs(2);
        for waker in wakers {
            waker.join().expect("it woke");
        }
        // And one more after a wake that comes when all is done.
        let before = tally.runs();
        tasks[0].wake();
        tally.await_runs(before + 1);
    });
}

#[test]
fn a_task_that_sleeps_is_woken_by_its_deadline_or_sooner() {
    storm(|| {
        let (pools, clock) = start(&ONE_EACH);
        let tally = Tally::new(1);
        let task = pools.spawn(Background, probe(&tally, Next::After(SECOND)));
        let snoozer = in_background({
            let task = task.clone();
            move || task.snooze(SECOND)
        });
        task.wake();
        tally.await_runs(1);
        snoozer.join().expect("it snoozed");
        // A deadline is set by the snooze, whatever the run did to its own. Time passes it.
        clock.advance(SECOND * 3);
        pools.clock_moved();
        tally.await_runs(2);
        task.cancel();
        assert_eq!(tally.alive(), 0);
    });
}

/// The timer thread must be called for it: no clock moves, and no other deadline would wake it.
#[test]
fn a_deadline_already_past_is_seen_by_a_timer_thread_asleep() {
    storm(|| {
        let (pools, _) = start(&ONE_EACH);
        let tally = Tally::new(1);
        let task = pools.spawn(Cpu, probe(&tally, Next::Idle));
        task.wake_at(Duration::ZERO);
        tally.await_runs(1);
    });
}

/// Looking at the pools one after the other must not miss work that moves from the last to the first meanwhile.
#[test]
fn a_drain_is_not_fooled_by_work_that_changes_pools() {
    storm(|| {
        let (pools, _) = start(&ONE_EACH);
        let tally = Tally::new(1);
        let next = pools.spawn(Reader, probe(&tally, Next::Idle));
        pools.execute(Cpu, "chains", move || {
            thread::yield_now();
            next.wake();
        });
        pools.shutdown(Stop::Drain);
        assert_eq!(tally.runs(), 1);
    });
}

#[test]
fn cancel_is_final_whatever_else_happens() {
    storm(|| {
        let (pools, clock) = start(&PoolConfig { readers: 2, ..ONE_EACH });
        let tally = Tally::new(1);
        let task = pools.spawn(Reader, probe(&tally, Next::Again));
        task.wake();
        let others = [
            in_background({
                let task = task.clone();
                move || {
                    task.wake();
                    task.wake_after(SECOND);
                }
            }),
            in_background({
                let (task, clock, pools) = (task.clone(), clock.clone(), pools.clone());
                move || {
                    task.snooze(SECOND);
                    clock.advance(SECOND);
                    pools.clock_moved();
                }
            }),
            in_background({
                let task = task.clone();
                move || task.cancel()
            }),
        ];
        task.cancel();
        let runs = tally.runs();
        for other in others {
            other.join().expect("it did what it should");
        }
        task.wake();
        pools.shutdown(Stop::Drain);
        assert_eq!((tally.runs(), tally.alive()), (runs, 0));
    });
}

#[test]
fn nothing_is_stranded_by_resizing() {
    storm(|| {
        let (pools, _) = start(&PoolConfig { readers: 2, ..ONE_EACH });
        let tally = Tally::new(3);
        let tasks: Vec<TaskHandle> = (0..3).map(|_| pools.spawn(Reader, probe(&tally, Next::Idle))).collect();
        let resizer = in_background({
            let pools = pools.clone();
            move || [1, 3, 1].iter().for_each(|size| pools.resize(Reader, *size).expect("a fair size"))
        });
        tasks.iter().for_each(TaskHandle::wake);
        tally.await_runs(3);
        resizer.join().expect("it resized");
        tasks[0].wake();
        tally.await_runs(4);
        pools.shutdown(Stop::Cancel);
        assert!(pools.stats().pools.iter().all(|pool| pool.threads == 0));
    });
}

#[test]
fn a_stop_that_drains_runs_all_that_was_woken_before() {
    storm(|| {
        let (pools, _) = start(&ONE_EACH);
        let tally = Tally::new(2);
        let second = pools.spawn(Writer, probe(&tally, Next::Idle));
        let first = pools.spawn(Reader, probe(&tally, Next::Done));
        let chained = second.clone();
        pools.execute(Cpu, "chains", move || chained.wake());
        first.wake();
        pools.shutdown(Stop::Drain);
        assert_eq!(tally.runs(), 2);
        second.wake();
        second.cancel();
        assert_eq!((tally.runs(), tally.alive()), (2, 0));
    });
}

#[test]
fn a_stop_ends_whatever_storm_is_on() {
    storm(|| {
        let (pools, clock) = start(&PoolConfig { readers: 2, ..ONE_EACH });
        let tally = Tally::new(3);
        let tasks = [
            pools.spawn(Reader, probe(&tally, Next::Again)),
            pools.spawn(Reader, probe(&tally, Next::After(SECOND))),
            pools.spawn(Writer, probe(&tally, Next::Idle)),
        ];
        tasks.iter().for_each(TaskHandle::wake);
        let waker = in_background({
            let tasks = tasks.clone();
            move || {
                tasks[2].wake();
                tasks[1].wake_after(SECOND);
                tasks[1].cancel();
            }
        });
        let mover = in_background({
            let pools = pools.clone();
            move || {
                clock.advance(SECOND);
                pools.clock_moved();
                pools.resize(Reader, 1).expect("a fair size");
            }
        });
        pools.shutdown(Stop::Cancel);
        let runs = tally.runs();
        waker.join().expect("it woke");
        mover.join().expect("it moved");
        tasks.iter().for_each(TaskHandle::cancel);
        assert_eq!((tally.runs(), tally.alive()), (runs, 0));
    });
}
