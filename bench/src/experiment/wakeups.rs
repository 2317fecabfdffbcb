//! From the moment a task is woken to the moment it runs.
//!
//! Each wake waits for the run it caused, then for a random while: mostly long enough for the worker to be fast asleep,
//! and every fourth time next to nothing, so that the wake comes just as the worker lies down. That is the moment at
//! which the old order of steps loses wakes, and at which the right one must not.

use std::collections::VecDeque;
use std::hint::{black_box, spin_loop};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};
use std::thread::{self, JoinHandle, Thread};
use std::time::{Duration, Instant};

use anyhow::Result;
use clap::Args;
use metrics::Timings;
use parking_lot::Mutex;
use scheduler::{Context, Next, PoolConfig, PoolKind, Pools, Stop, Task, TaskHandle};
use serde_json::json;

use super::{Bench, Common, Story};
use crate::report::{Column, Ratio, Row, us, whole};
use crate::tally::Latencies;
use crate::workload::Dice;

#[derive(Args, Debug)]
pub struct Wakeups {
    #[command(flatten)]
    pub(super) common: Common,
    /// Wakes of each row [default: 100000, with --quick 5000]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=100_000_000))]
    wakes: Option<u32>,
}

/// The poll that kept the old order of steps from hanging for ever; as long as that of the scheduler it comes from.
const FALL_BACK: Duration = Duration::from_secs(2);
/// Between the two steps of the old order lie about a hundred nanoseconds, in which the kernel may take the processor
/// away at any time. Once in so many passes the worker gives it up there by itself, or one would wait for days to see
/// it.
const PAUSE_EVERY: u32 = 256;
/// A wake that took this long was lost, and found by the fall-back.
const LOST_NS: u64 = 1_000_000_000;
/// Of a hundred, how much of each core the load takes.
const LOAD_PCT: u32 = 80;

const COLUMNS: &[Column] = &[
    Column("wakes", "ops", whole),
    Column("lost", "lost", whole),
    Column("mean", "mean_us", us),
    Column("p50", "p50_us", us),
    Column("p99", "p99_us", us),
    Column("p99.9", "p999_us", us),
    Column("p99.99", "p9999_us", us),
    Column("max", "max_us", us),
];

impl Wakeups {
    pub(super) fn run(&self, bench: &mut Bench<'_>) -> Result<Story> {
        let wakes = self.wakes.unwrap_or(if self.common.quick { 5_000 } else { 100_000 });
        // Lost wakes take two seconds each, so this is about the broken one.
        let patience = self.common.seconds(60.0, 10.0)?;
        for round in 1..=self.common.rounds() {
            for (name, kind, loaded) in [
                ("idle", Kind::Scheduler, false),
                ("futex", Kind::Futex, false),
                ("idle-broken", Kind::OldOrder, false),
                ("loaded", Kind::Scheduler, true),
                ("futex-loaded", Kind::Futex, true),
            ] {
                bench.check_stop()?;
                bench.say(&format!("round {round}: {name}"));
                let load = loaded.then(|| Load::start(LOAD_PCT));
                let latencies = kind.measure(wakes, patience, bench.stop);
                drop(load);
                bench.rows.push(row(name, wakes, &latencies));
            }
        }
        let ratios = vec![
            Ratio::new("p50_us", "idle", "futex"),
            Ratio::new("p9999_us", "idle", "futex"),
            Ratio::new("p50_us", "loaded", "futex-loaded"),
            Ratio::new("p9999_us", "loaded", "futex-loaded"),
        ];
        Ok(Story { columns: COLUMNS, ratios })
    }
}

fn row(name: &str, asked: u32, measured: &Measured) -> Row {
    let mut row = Row::new();
    row.insert("name".into(), json!(name));
    row.insert("ops".into(), json!(measured.waits.count()));
    row.insert("errors".into(), json!(0));
    row.insert("lost".into(), json!(measured.lost));
    measured.waits.fields(&mut row);
    if name == "idle-broken" {
        row.insert("note".into(), json!(format!("yields between look and sleep once in {PAUSE_EVERY} passes")));
    }
    if measured.waits.count() < u64::from(asked) {
        row.insert("cut_short".into(), json!(true));
    }
    row
}

#[derive(Default)]
struct Measured {
    waits: Latencies,
    lost: u64,
}

/// When the latest run began, and whom to tell.
struct Ran {
    epoch: Instant,
    at_ns: AtomicU64,
    count: AtomicU64,
    waker: Thread,
}

impl Ran {
    fn here() -> Arc<Ran> {
        let (at_ns, count) = Default::default();
        Arc::new(Ran { epoch: Instant::now(), at_ns, count, waker: thread::current() })
    }

    fn now_ns(&self) -> u64 {
        self.epoch.elapsed().as_nanos() as u64
    }

    fn ran(&self) {
        self.at_ns.store(self.now_ns(), Relaxed);
        self.count.fetch_add(1, Release);
        self.waker.unpark();
    }

    /// Waits for the `n`-th run: by looking again and again for a moment if the answer is wanted at once.
    fn wait(&self, n: u64, at_once: bool) {
        let mut looks = if at_once { 20_000 } else { 0 };
        while self.count.load(Acquire) < n {
            if looks > 0 {
                looks -= 1;
                spin_loop();
            } else {
                thread::park_timeout(Duration::from_millis(100));
            }
        }
    }
}

/// What is woken.
#[derive(Clone, Copy, Debug)]
enum Kind {
    /// A task of our scheduler.
    Scheduler,
    /// A thread that parks, and nothing else: the least a wake can cost here.
    Futex,
    /// A queue and its worker in the old order of steps, with the poll that hid what it loses.
    OldOrder,
}

impl Kind {
    fn measure(self, wakes: u32, patience: Duration, stop: &AtomicBool) -> Measured {
        let ran = Ran::here();
        match self {
            Kind::Scheduler => {
                let config = PoolConfig { readers: 1, writers: 1, background: 1, cpu: 1 };
                let pools = Pools::start(&env::os::env(), &config);
                let task: TaskHandle = pools.spawn(PoolKind::Cpu, Arc::new(Probe(ran.clone())));
                let measured = drive(&ran, wakes, patience, stop, || task.wake());
                pools.shutdown(Stop::Cancel);
                measured
            }
            Kind::Futex => {
                let bare = Bare::start(ran.clone());
                drive(&ran, wakes, patience, stop, || bare.wake())
            }
            Kind::OldOrder => {
                let old = OldOrder::start(ran.clone());
                drive(&ran, wakes, patience, stop, || old.wake(ran.now_ns()))
            }
        }
    }
}

fn drive(ran: &Ran, wakes: u32, patience: Duration, stop: &AtomicBool, wake: impl Fn()) -> Measured {
    let mut measured = Measured::default();
    let mut dice = Dice(7);
    let began = Instant::now();
    for n in 1..=u64::from(wakes) {
        if began.elapsed() > patience || stop.load(Relaxed) {
            break;
        }
        let at = ran.now_ns();
        wake();
        let hasty = n % 4 == 0;
        ran.wait(n, hasty);
        let waited = ran.at_ns.load(Relaxed).saturating_sub(at);
        measured.waits.record(waited);
        measured.lost += u64::from(waited >= LOST_NS);
        if hasty {
            // Nobody knows beforehand how long the worker takes from its run to its bed: several magnitudes are tried.
            let most = 1 << dice.below(8);
            (0..dice.below(most)).for_each(|_| spin_loop());
        } else {
            thread::sleep(Duration::from_nanos(dice.below(100_000)));
        }
    }
    measured
}

struct Probe(Arc<Ran>);

impl Task for Probe {
    fn name(&self) -> &'static str {
        "probe"
    }

    fn run(&self, _: &Context<'_>) -> Next {
        self.0.ran();
        Next::Idle
    }
}

/// A thread asleep until a flag is set.
struct Bare {
    flag: Arc<AtomicU64>,
    thread: Option<JoinHandle<()>>,
}

const NOTHING: u64 = 0;
const WOKEN: u64 = 1;
const OVER: u64 = u64::MAX;

impl Bare {
    fn start(ran: Arc<Ran>) -> Bare {
        let flag = Arc::new(AtomicU64::new(NOTHING));
        let ours = flag.clone();
        let thread = thread::spawn(move || {
            loop {
                match ours.swap(NOTHING, Acquire) {
                    NOTHING => thread::park(),
                    WOKEN => ran.ran(),
                    _ => return,
                }
            }
        });
        Bare { flag, thread: Some(thread) }
    }

    fn tell(&self, what: u64) {
        self.flag.store(what, Release);
        if let Some(thread) = &self.thread {
            thread.thread().unpark();
        }
    }

    fn wake(&self) {
        self.tell(WOKEN);
    }
}

impl Drop for Bare {
    fn drop(&mut self) {
        self.tell(OVER);
        join(self.thread.take());
    }
}

/// The order of steps that was wrong for ten years: the worker looks at the queue, finds nothing, and only then, in a
/// second step, says that it sleeps. Who pushes between the two sees nobody to wake.
struct OldOrder {
    state: Arc<OldState>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct OldState {
    queue: Mutex<VecDeque<u64>>,
    sleepers: Mutex<Vec<Thread>>,
}

impl OldOrder {
    fn start(ran: Arc<Ran>) -> OldOrder {
        let state = Arc::new(OldState::default());
        let ours = state.clone();
        let thread = thread::spawn(move || {
            let (wait, run) = (Timings::new(), Timings::new());
            let mut passes = 0_u32;
            loop {
                let found = ours.queue.lock().pop_front();
                match found {
                    Some(OVER) => return,
                    Some(at_ns) => {
                        // The same bookkeeping as around our own tasks.
                        let began = Instant::now();
                        wait.record(Duration::from_nanos(ran.now_ns().saturating_sub(at_ns)));
                        ran.ran();
                        run.record(began.elapsed());
                    }
                    None => {
                        // What is pushed here is not seen until the poll.
                        let until = Instant::now() + FALL_BACK;
                        passes += 1;
                        if passes.is_multiple_of(PAUSE_EVERY) {
                            thread::yield_now();
                        }
                        ours.sleepers.lock().push(thread::current());
                        thread::park_timeout(until.saturating_duration_since(Instant::now()));
                        ours.sleepers.lock().clear();
                    }
                }
            }
        });
        OldOrder { state, thread: Some(thread) }
    }

    fn push(&self, what: u64) {
        self.state.queue.lock().push_back(what);
        let sleeper = self.state.sleepers.lock().pop();
        if let Some(sleeper) = sleeper {
            sleeper.unpark();
        }
    }

    fn wake(&self, at_ns: u64) {
        // A moment, and so not what says that it is over.
        self.push(at_ns);
    }
}

impl Drop for OldOrder {
    fn drop(&mut self) {
        self.push(OVER);
        join(self.thread.take());
    }
}

/// Threads that take a share of every core.
struct Load {
    over: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

/// Busy for a share of this, asleep for the rest.
const LOAD_PERIOD: Duration = Duration::from_millis(5);

impl Load {
    fn start(percent: u32) -> Load {
        let over = Arc::new(AtomicBool::new(false));
        let threads = (0..thread::available_parallelism().map_or(1, usize::from))
            .map(|_| {
                let over = over.clone();
                thread::spawn(move || {
                    // Against the clock, so that late wake-ups do not lower the share.
                    let mut until = Instant::now();
                    while !over.load(Relaxed) {
                        until = until.max(Instant::now() - LOAD_PERIOD) + LOAD_PERIOD;
                        let busy = until - LOAD_PERIOD * (100 - percent) / 100;
                        while Instant::now() < busy {
                            black_box((0..200_u64).fold(0, |sum, n| black_box(sum + n)));
                        }
                        thread::sleep(until.saturating_duration_since(Instant::now()));
                    }
                })
            })
            .collect();
        Load { over, threads }
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.over.store(true, Relaxed);
        self.threads.drain(..).for_each(|thread| join(Some(thread)));
    }
}

fn join(thread: Option<JoinHandle<()>>) {
    if let Some(thread) = thread
        && thread.join().is_err()
    {
        eprintln!("a thread of the experiment panicked");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_wake_of_each_kind_is_answered() {
        for kind in [Kind::Scheduler, Kind::Futex] {
            let measured = kind.measure(200, Duration::from_secs(30), &AtomicBool::new(false));
            assert_eq!((measured.waits.count(), measured.lost), (200, 0), "{kind:?}");
        }
    }
}
