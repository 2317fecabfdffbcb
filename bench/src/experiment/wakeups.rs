//! From the moment a task is woken to the moment it runs.
//!
//! Each wake waits for the run it caused, then for a random while: mostly long enough for the worker to be fast asleep,
//! and every fourth time next to nothing, so that the wake comes just as the worker lies down. That is the moment at
//! which the old order of steps loses wakes, and at which the right one must not.
//!
//! With `--nodes` it is durable writes instead, on one node and on several: see [`DurableWakes`].
//!
//! A build with the feature `old-order` measures the whole scheduler in that order instead.

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

use super::durable_wakes::{self, DurableWakes};
use super::{Bench, Common, Only, Story};
use crate::report::{Column, Ratio, Row, us, whole};
use crate::servers::Shape;
use crate::tally::{Latencies, tenths};
use crate::workload::Dice;

#[derive(Args, Debug)]
pub struct Wakeups {
    #[command(flatten)]
    pub(super) common: Common,
    #[command(flatten)]
    only: Only,
    /// Wakes of each row [default: 100000, with --quick 5000]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=100_000_000))]
    wakes: Option<u32>,
    /// Durable writes on one node and on so many, instead of wakes of a task by itself
    #[arg(long, value_parser = clap::value_parser!(u16).range(2..=8), conflicts_with = "wakes")]
    nodes: Option<u16>,
    /// Copies of each vBucket beside the active one, on several nodes
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(0..=2))]
    replicas: u8,
    /// vBuckets the durable writes are spread over: a power of two up to 1024
    #[arg(long, default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..=1024))]
    vbuckets: u32,
}

/// The poll that kept the old order of steps from hanging for ever; as long as that of the scheduler it comes from.
const FALL_BACK: Duration = Duration::from_secs(2);
/// Between the two steps of the old order lie about a hundred nanoseconds, in which the kernel may take the processor
/// away at any time. Once in so many passes the worker gives it up there by itself, or one would wait for days to see
/// it.
const PAUSE_EVERY: u32 = 256;
/// A wake that took this long was lost, and found by the fall-back.
const LOST_NS: u64 = 1_000_000_000;
/// Producers that each wake a task of their own and wait for it, on as many threads of the pool.
const PRODUCERS: [u32; 3] = [1, 4, 16];

/// Row, what is woken, and what else happens meanwhile.
const ROWS: &[(&str, Kind, Company)] = if cfg!(feature = "old-order") {
    &[
        ("scheduler-in-old-order", Kind::Scheduler, Company::Nobody),
        ("scheduler-in-old-order-loaded", Kind::Scheduler, Company::Load),
    ]
} else {
    &[
        ("idle", Kind::Scheduler, Company::Nobody),
        ("futex", Kind::Futex, Company::Nobody),
        ("idle-broken", Kind::OldOrder, Company::Nobody),
        ("loaded", Kind::Scheduler, Company::Load),
        ("futex-loaded", Kind::Futex, Company::Load),
        ("beside-cancels", Kind::Scheduler, Company::Cancels),
        ("futex-beside-cancels", Kind::Futex, Company::Cancels),
    ]
};

const COLUMNS: &[Column] = &[
    Column("wakes", "ops", whole),
    Column("lost", "lost", whole),
    Column("wakes/s", "ops_per_s", whole),
    Column("call", "call_p50_us", us),
    Column("mean", "mean_us", us),
    Column("p50", "p50_us", us),
    Column("p99", "p99_us", us),
    Column("p99.9", "p999_us", us),
    Column("p99.99", "p9999_us", us),
    Column("max", "max_us", us),
];

impl Wakeups {
    pub(super) fn run(&self, bench: &mut Bench<'_>) -> Result<Story> {
        if let Some(nodes) = self.nodes {
            return self.run_durable(bench, nodes);
        }
        let wakes = self.wakes.unwrap_or(if self.common.quick { 5_000 } else { 100_000 });
        // Lost wakes take two seconds each, so this is about the broken one.
        let patience = self.common.seconds(60.0, 10.0)?;
        let trips = Duration::from_secs_f64(if self.common.quick { 0.5 } else { 3.0 });
        for round in 1..=self.common.rounds() {
            for (name, kind, company) in ROWS.iter().filter(|(name, ..)| self.only.wants(name)) {
                bench.check_stop()?;
                bench.say(&format!("round {round}: {name}"));
                let measured = kind.measure(*company, wakes, patience, bench.stop);
                bench.rows.push(row(name, wakes, &measured));
            }
            for producers in PRODUCERS {
                bench.check_stop()?;
                let name = format!("round-trips-{producers}");
                if !self.only.wants(&name) {
                    continue;
                }
                bench.say(&format!("round {round}: {name}"));
                bench.rows.push(round_trips(&name, producers, trips));
            }
        }
        let over = |field, row, over| Ratio::new(field, row, over);
        let ratios = vec![
            over("p50_us", "idle", "futex"),
            over("p9999_us", "idle", "futex"),
            over("p50_us", "loaded", "futex-loaded"),
            over("p9999_us", "loaded", "futex-loaded"),
            over("call_p50_us", "idle", "futex"),
            over("p999_us", "beside-cancels", "futex-beside-cancels"),
            over("ops_per_s", "round-trips-16", "round-trips-1"),
        ];
        Ok(Story { columns: COLUMNS, ratios })
    }
}

impl Wakeups {
    fn run_durable(&self, bench: &mut Bench<'_>, nodes: u16) -> Result<Story> {
        let (only, settee) = (&self.only, self.common.settee()?);
        let time = self.common.seconds(20.0, 2.0)?;
        let shape = Shape { nodes, replicas: self.replicas, vbuckets: self.vbuckets };
        let wakes = DurableWakes { only, shape, time };
        for round in 1..=self.common.rounds() {
            bench.say(&format!("round {round}"));
            wakes.run_round(bench, &settee)?;
        }
        let over = |row: &str| Ratio::new("mean_us", &format!("{nodes}-nodes/{row}"), &format!("1-node/{row}"));
        Ok(Story { columns: durable_wakes::COLUMNS, ratios: durable_wakes::rows().map(over).collect() })
    }
}

fn row(name: &str, asked: u32, measured: &Measured) -> Row {
    let mut row = Row::new();
    row.insert("name".into(), json!(name));
    row.insert("ops".into(), json!(measured.waits.count()));
    row.insert("errors".into(), json!(0));
    row.insert("lost".into(), json!(measured.lost));
    measured.waits.fields(&mut row);
    row.insert("call_p50_us".into(), json!(measured.calls.percentile_us(50.0)));
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
    /// From the wake to the run.
    waits: Latencies,
    /// From the wake until the waker can go on.
    calls: Latencies,
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
    fn measure(self, company: Company, wakes: u32, patience: Duration, stop: &AtomicBool) -> Measured {
        let ran = Ran::here();
        let pools =
            Pools::start(&env::os::env(), &PoolConfig { readers: 1, writers: 1, background: 1, compaction: 1, cpu: 1 });
        let company = company.arrive(&pools);
        let measured = match self {
            Kind::Scheduler => {
                let task = pools.spawn(PoolKind::Cpu, Arc::new(Probe(ran.clone())));
                drive(&ran, wakes, patience, stop, || task.wake())
            }
            Kind::Futex => {
                let bare = Bare::start(ran.clone());
                drive(&ran, wakes, patience, stop, || bare.wake())
            }
            Kind::OldOrder => {
                let old = OldOrder::start(ran.clone());
                drive(&ran, wakes, patience, stop, || old.wake(ran.now_ns()))
            }
        };
        drop(company);
        pools.shutdown(Stop::Cancel);
        measured
    }
}

/// How many wakes are answered in a second when many wait for many.
fn round_trips(name: &str, producers: u32, time: Duration) -> Row {
    let config = PoolConfig { readers: 1, writers: 1, background: 1, compaction: 1, cpu: producers as usize };
    let pools = Pools::start(&env::os::env(), &config);
    let began = Instant::now();
    let count: u64 = thread::scope(|scope| {
        let produce = || {
            let ran = Ran::here();
            let task = pools.spawn(PoolKind::Cpu, Arc::new(Probe(ran.clone())));
            (1..)
                .take_while(|n| {
                    task.wake();
                    ran.wait(*n, false);
                    began.elapsed() < time
                })
                .count() as u64
        };
        let producers: Vec<_> = (0..producers).map(|_| scope.spawn(produce)).collect();
        producers.into_iter().map(|producer| producer.join().unwrap_or_default()).sum()
    });
    let per_s = count as f64 / began.elapsed().as_secs_f64();
    pools.shutdown(Stop::Cancel);
    Row::from_iter([
        ("name".to_owned(), json!(name)),
        ("ops".to_owned(), json!(count)),
        ("errors".to_owned(), json!(0)),
        ("ops_per_s".to_owned(), json!(tenths(per_s))),
    ])
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
        measured.calls.record(ran.now_ns() - at);
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

/// What else happens while wakes are measured.
#[derive(Clone, Copy, Debug)]
enum Company {
    Nobody,
    /// Threads that take most of every core.
    Load,
    /// A neighbour on the same scheduler whose tasks with deadlines are made and cancelled a thousand at a time.
    Cancels,
}

/// Of a hundred, how much of each core the load takes.
const LOAD_PCT: u32 = 80;
/// Busy for that share of this, asleep for the rest.
const LOAD_PERIOD: Duration = Duration::from_millis(5);

impl Company {
    fn arrive(self, pools: &Arc<Pools>) -> Busy {
        match self {
            Company::Nobody => Busy::start(0, || || ()),
            Company::Load => Busy::start(thread::available_parallelism().map_or(1, usize::from), || {
                // Against the clock, so that late wake-ups do not lower the share.
                let mut until = Instant::now();
                move || {
                    until = until.max(Instant::now() - LOAD_PERIOD) + LOAD_PERIOD;
                    let busy = until - LOAD_PERIOD * (100 - LOAD_PCT) / 100;
                    while Instant::now() < busy {
                        black_box((0..200_u64).fold(0, |sum, n| black_box(sum + n)));
                    }
                    thread::sleep(until.saturating_duration_since(Instant::now()));
                }
            }),
            Company::Cancels => Busy::start(1, || {
                let pools = pools.clone();
                move || {
                    let tasks: Vec<TaskHandle> = (0..1000)
                        .map(|n| {
                            let task = pools.spawn(PoolKind::Background, Arc::new(Never));
                            task.wake_after(Duration::from_secs(3600 + n));
                            task
                        })
                        .collect();
                    tasks.iter().for_each(TaskHandle::cancel);
                }
            }),
        }
    }
}

/// Cancelled before its time.
struct Never;

impl Task for Never {
    fn name(&self) -> &'static str {
        "never"
    }

    fn run(&self, _: &Context<'_>) -> Next {
        Next::Done
    }
}

/// Threads that do the same again and again until this is dropped.
struct Busy {
    over: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Busy {
    fn start<W: FnMut() + Send + 'static>(threads: usize, work: impl Fn() -> W) -> Busy {
        let over = Arc::new(AtomicBool::new(false));
        let threads = (0..threads)
            .map(|_| {
                let (over, mut work) = (over.clone(), work());
                thread::spawn(move || {
                    while !over.load(Relaxed) {
                        work();
                    }
                })
            })
            .collect();
        Busy { over, threads }
    }
}

impl Drop for Busy {
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
            for company in [Company::Nobody, Company::Load, Company::Cancels] {
                let measured = kind.measure(company, 100, Duration::from_secs(30), &AtomicBool::new(false));
                assert_eq!((measured.waits.count(), measured.lost), (100, 0), "{kind:?} with {company:?}");
            }
        }
    }

    #[test]
    fn many_producers_are_all_answered() {
        let row = round_trips("round-trips-4", 4, Duration::from_millis(50));
        assert!(row["ops"].as_u64() >= Some(4), "{row:?}");
    }
}
