//! The load generator: many connections on few event loops.
//!
//! ```text
//!     closed loop:  answer ──▶ next request on the same connection        (as fast as the server lets it)
//!     open loop:    its moment has come ──▶ any connection with room      (see `pace`)
//! ```
//!
//! One loop costs about what the servers' own loops cost: a read, a write and a share of an `epoll_wait` per operation,
//! and two clock readings.

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use metrics::Timings;
use mio::{Events, Interest, Poll, Token, Waker};

use crate::connection::{Connection, Read1, UnderWay};
use crate::pace::Pace;
use crate::process::Usage;
use crate::progress::Progress;
use crate::protocol::{Action, Answer};
use crate::tally::Tally;
use crate::target::{Dialect, Target};
use crate::workload::{Picker, Workload};

/// What to do to a server.
#[derive(Clone, Debug)]
pub struct Load {
    pub workload: Workload,
    pub clients: u32,
    /// Requests under way on each connection.
    pub depth: u32,
    pub threads: u32,
    pub warmup: Duration,
    pub until: Until,
    /// Operations a second of an open loop; `None`: closed.
    pub rate: Option<f64>,
    pub seed: u64,
}

/// When a run is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Until {
    Ops(u64),
    For(Duration),
}

/// A finished run.
#[derive(Clone, Debug)]
pub struct Outcome {
    pub tally: Tally,
    /// From the end of the warm-up to the end of the run, or to the last answer of a fixed number of operations.
    pub elapsed: Duration,
    /// Processor time of this process meanwhile.
    pub client_cpu: Duration,
    /// What the server's processes used meanwhile, if they could be watched.
    pub server: Option<Usage>,
    /// The run was cut short by a signal.
    pub interrupted: bool,
}

impl Outcome {
    pub fn ops_per_s(&self) -> f64 {
        self.tally.ops as f64 / self.elapsed.as_secs_f64().max(1e-9)
    }
}

/// What watches a run from outside.
pub struct Watch<'a> {
    /// Set by a signal: the run ends early.
    pub stop: &'a AtomicBool,
    /// What the server has used so far.
    pub usage: &'a dyn Fn() -> Option<Usage>,
    /// Prints a line a second.
    pub live: bool,
}

/// How long answers of an open loop are waited for after its end.
const STRAGGLERS: Duration = Duration::from_secs(10);
/// A request of a closed loop that waited this long when the run was over is worth telling.
const HANGS_NS: u64 = 1_000_000_000;
/// Bytes a socket is read with at a time.
const CHUNK: usize = 64 * 1024;
/// An event loop looks at the clock at least this often, in case no event comes.
const TICK: Duration = Duration::from_millis(50);

struct Shared {
    epoch: Instant,
    /// In ns since `epoch`; set before the loops start.
    measure_from_ns: AtomicU64,
    stop_at_ns: AtomicU64,
    /// Nobody is to begin anything any more.
    stop: AtomicBool,
    ops: AtomicU64,
    errors: AtomicU64,
    timings: Timings,
}

/// Connects, warms up, measures.
///
/// # Errors
/// A connection cannot be made, or all of them were lost.
pub fn run(target: &Target, dialect: &Dialect, load: &Load, watch: &Watch<'_>) -> Result<Outcome> {
    let threads = load.threads.clamp(1, load.clients.max(1));
    let mut groups: Vec<Vec<Connection>> = (0..threads).map(|_| Vec::new()).collect();
    for n in 0..load.clients {
        if watch.stop.load(Relaxed) {
            bail!("interrupted while connecting");
        }
        let connection = open(target, dialect, load.depth);
        let connection = connection.with_context(|| format!("connection {} of {}", n + 1, load.clients))?;
        groups[(n % threads) as usize].push(connection);
    }

    let shared = Arc::new(Shared {
        epoch: Instant::now(),
        measure_from_ns: AtomicU64::new(0),
        stop_at_ns: AtomicU64::new(u64::MAX),
        stop: AtomicBool::new(false),
        ops: AtomicU64::new(0),
        errors: AtomicU64::new(0),
        timings: Timings::new(),
    });
    let barrier = Arc::new(Barrier::new(threads as usize + 1));
    let mut handles = Vec::new();
    for (lane, connections) in groups.into_iter().enumerate() {
        let (shared, barrier, load) = (shared.clone(), barrier.clone(), load.clone());
        let lane = lane as u64;
        let body = move || {
            let looped = Loop::new(connections, &shared, &load, lane, u64::from(threads));
            barrier.wait();
            // A second time: by now the moments are set.
            barrier.wait();
            looped?.run()
        };
        handles.push(thread::Builder::new().name(format!("load-{lane}")).spawn(body)?);
    }
    barrier.wait();
    let now = shared.epoch.elapsed();
    let measure_from = now + load.warmup;
    shared.measure_from_ns.store(measure_from.as_nanos() as u64, Relaxed);
    if let Until::For(time) = load.until {
        shared.stop_at_ns.store((measure_from + time).as_nanos() as u64, Relaxed);
    }
    barrier.wait();

    let finished = || handles.iter().all(thread::JoinHandle::is_finished);
    let sleep_to = |moment: Duration| {
        while shared.epoch.elapsed() < moment && !finished() && !watch.stop.load(Relaxed) {
            thread::sleep((moment.saturating_sub(shared.epoch.elapsed())).min(TICK));
        }
    };
    sleep_to(measure_from);
    let before = (env::os::cpu_time()?, (watch.usage)());
    let mut progress = Progress::new(watch.live, load.until, shared.epoch.elapsed());
    let mut after = None;
    while !finished() {
        if watch.stop.load(Relaxed) {
            shared.stop.store(true, Relaxed);
        }
        let now = shared.epoch.elapsed();
        if let Until::For(time) = load.until
            && now >= measure_from + time
            && after.is_none()
        {
            after = Some((env::os::cpu_time()?, (watch.usage)()));
        }
        progress.show(now, shared.ops.load(Relaxed), shared.errors.load(Relaxed), &shared.timings);
        let end = Duration::from_nanos(shared.stop_at_ns.load(Relaxed));
        let next = progress.next().min(if end > now { end } else { now + TICK }).min(now + TICK);
        thread::sleep(next.saturating_sub(now).max(Duration::from_millis(1)));
    }
    progress.end();
    let after = match after {
        Some(taken) => taken,
        None => (env::os::cpu_time()?, (watch.usage)()),
    };

    let mut tally = Tally::default();
    for handle in handles {
        tally.add(&handle.join().map_err(|_| anyhow::anyhow!("a load thread panicked"))??);
    }
    let interrupted = watch.stop.load(Relaxed);
    let elapsed = match load.until {
        Until::For(time) if !interrupted => time,
        _ => Duration::from_nanos(tally.last_ns).saturating_sub(measure_from),
    };
    let server = before.1.zip(after.1).map(|(before, after)| after.since(&before));
    Ok(Outcome { tally, elapsed, client_cpu: after.0.saturating_sub(before.0), server, interrupted })
}

fn open(target: &Target, dialect: &Dialect, depth: u32) -> Result<Connection> {
    let mut stream = target.connect()?;
    let mut protocol = dialect.protocol();
    protocol.open(&mut stream)?;
    stream.set_nonblocking(true)?;
    Ok(Connection::new(mio::net::TcpStream::from_std(stream), protocol, depth))
}

const WAKE: Token = Token(usize::MAX);

/// One thread's connections.
struct Loop {
    poll: Poll,
    connections: Vec<Option<Connection>>,
    shared: Arc<Shared>,
    picker: Picker,
    pace: Option<Pace>,
    /// Connections with room, least recently used first; kept in an open loop only. One that is at the front without
    /// room is skipped.
    idle: VecDeque<usize>,
    /// Operations still to begin that count, of a run of a fixed number.
    quota: u64,
    under_way: u64,
    tally: Tally,
    measure_from_ns: u64,
    stop_at_ns: u64,
    rate: Option<f64>,
    fixed: bool,
    lane: u64,
    lanes: u64,
    depth: u64,
    alive: usize,
    first_failure: Option<anyhow::Error>,
}

impl Loop {
    fn new(connections: Vec<Connection>, shared: &Arc<Shared>, load: &Load, lane: u64, lanes: u64) -> Result<Loop> {
        let poll = Poll::new()?;
        let mut connections = connections;
        for (n, connection) in connections.iter_mut().enumerate() {
            poll.registry().register(&mut connection.stream, Token(n), Interest::READABLE | Interest::WRITABLE)?;
        }
        let places = u64::from(load.clients) * u64::from(load.depth);
        let quota = match load.until {
            Until::Ops(ops) => ops / lanes + u64::from(lane < ops % lanes),
            Until::For(_) => u64::MAX,
        };
        Ok(Loop {
            poll,
            alive: connections.len(),
            idle: (0..connections.len()).flat_map(|n| std::iter::repeat_n(n, load.depth as usize)).collect(),
            connections: connections.into_iter().map(Some).collect(),
            shared: shared.clone(),
            picker: Picker::new(load.workload.clone(), lane, lanes, places, load.seed ^ (lane << 32)),
            pace: None,
            quota,
            under_way: 0,
            tally: Tally::default(),
            measure_from_ns: 0,
            stop_at_ns: u64::MAX,
            rate: load.rate,
            fixed: quota != u64::MAX,
            lane,
            lanes,
            depth: u64::from(load.depth),
            first_failure: None,
        })
    }

    fn now_ns(&self) -> u64 {
        self.shared.epoch.elapsed().as_nanos() as u64
    }

    fn run(mut self) -> Result<Tally> {
        self.measure_from_ns = self.shared.measure_from_ns.load(Relaxed);
        self.stop_at_ns = self.shared.stop_at_ns.load(Relaxed);
        let pacer = match self.rate {
            None => None,
            Some(rate) => {
                let pace = Pace::new(self.now_ns(), rate, self.lane, self.lanes);
                self.pace = Some(pace.clone());
                Some(Pacer::start(&self.poll, pace, &self.shared)?)
            }
        };
        if self.pace.is_none() {
            for n in 0..self.connections.len() {
                self.begin(n, self.now_ns());
            }
        }
        let mut events = Events::with_capacity(1024);
        let mut scratch = vec![0; CHUNK];
        let mut give_up_ns = u64::MAX;
        loop {
            let now = self.now_ns();
            if self.is_over(now) {
                let paced = self.pace.is_some() || self.fixed;
                if give_up_ns == u64::MAX {
                    give_up_ns = now + if paced { STRAGGLERS.as_nanos() as u64 } else { 0 };
                }
                if self.under_way == 0 || now >= give_up_ns || self.shared.stop.load(Relaxed) {
                    break;
                }
            }
            if self.alive == 0 {
                break;
            }
            let patience = Duration::from_nanos(self.stop_at_ns.saturating_sub(now)).clamp(Duration::ZERO, TICK);
            let patience = if patience.is_zero() { TICK } else { patience };
            match self.poll.poll(&mut events, Some(patience)) {
                Err(error) if error.kind() != io::ErrorKind::Interrupted => return Err(error.into()),
                _ => {}
            }
            for event in &events {
                if event.token() != WAKE {
                    self.serve(event.token().0, &mut scratch, event.is_read_closed() || event.is_error());
                }
            }
            self.begin_due();
        }
        drop(pacer);
        self.finish()
    }

    /// Nothing more shall begin.
    fn is_over(&self, now_ns: u64) -> bool {
        now_ns >= self.stop_at_ns || self.quota == 0 || self.shared.stop.load(Relaxed)
    }

    /// Takes the answers a connection has, and in a closed loop asks again.
    fn serve(&mut self, n: usize, scratch: &mut [u8], closing: bool) {
        let Some(mut connection) = self.connections[n].take() else { return };
        let mut now = 0;
        let received = connection.receive(scratch, closing, |what, answer| {
            if now == 0 {
                now = self.shared.epoch.elapsed().as_nanos() as u64;
            }
            self.under_way -= 1;
            if self.pace.is_some() {
                self.idle.push_back(n);
            }
            self.count(what, &answer, now);
        });
        let flushed = match received {
            Ok(Read1::Open) => connection.flush().map_err(anyhow::Error::from),
            Ok(Read1::Closed) => Err(anyhow::anyhow!("the server closed the connection")),
            Err(error) => Err(error),
        };
        match flushed {
            Err(error) => self.lose(connection, error),
            Ok(()) => {
                self.connections[n] = Some(connection);
                if self.pace.is_none() && now != 0 {
                    self.begin(n, now);
                }
            }
        }
    }

    fn count(&mut self, what: UnderWay, answer: &Answer, now: u64) {
        // A fixed number counts those that began in time; an open loop those that should have; otherwise all that
        // end between the two moments, whenever they began.
        let counts = match (self.fixed, self.pace.is_some()) {
            (true, _) => what.counted,
            (false, true) => what.began_ns >= self.measure_from_ns,
            (false, false) => now >= self.measure_from_ns && now < self.stop_at_ns,
        };
        if !counts {
            return;
        }
        self.tally.last_ns = now;
        let took = now.saturating_sub(what.began_ns);
        match answer {
            Answer::Error(words) => {
                self.tally.error(words);
                self.shared.errors.fetch_add(1, Relaxed);
                return;
            }
            Answer::Miss => self.tally.misses += 1,
            Answer::Done => {}
        }
        self.tally.ops += 1;
        self.tally.latencies.record(took);
        self.shared.ops.fetch_add(1, Relaxed);
        self.shared.timings.record(Duration::from_nanos(took));
    }

    /// Fills a connection with requests of a closed loop.
    fn begin(&mut self, n: usize, now: u64) {
        let Some(mut connection) = self.connections[n].take() else { return };
        while connection.has_room() && !self.is_over(now) {
            self.push(n, &mut connection, now, now);
        }
        match connection.flush() {
            Ok(()) => self.connections[n] = Some(connection),
            Err(error) => self.lose(connection, error.into()),
        }
    }

    /// Sends what an open loop's moments ask for, as far as there is room.
    fn begin_due(&mut self) {
        let now = self.now_ns();
        while let Some(&n) = self.idle.front() {
            if self.is_over(now) {
                return;
            }
            let Some(mut connection) = self.connections[n].take() else {
                self.idle.pop_front();
                continue;
            };
            let Some(intended) = self.pace.as_mut().and_then(|pace| pace.take_due(now)) else {
                self.connections[n] = Some(connection);
                return;
            };
            if intended >= self.measure_from_ns {
                self.tally.sent_late.record(now - intended);
            }
            self.idle.pop_front();
            self.push(n, &mut connection, intended, now);
            match connection.flush() {
                Ok(()) => self.connections[n] = Some(connection),
                Err(error) => self.lose(connection, error.into()),
            }
        }
    }

    fn push(&mut self, n: usize, connection: &mut Connection, began_ns: u64, now: u64) {
        let counted = self.fixed && now >= self.measure_from_ns;
        if counted {
            self.quota -= 1;
        }
        let place = (self.lane + n as u64 * self.lanes) * self.depth + u64::from(connection.next_ticket());
        let (key, value) = self.picker.pick(place);
        let action = value.map_or(Action::Get, Action::Set);
        connection.push(key, action, UnderWay { began_ns, counted });
        self.under_way += 1;
    }

    fn lose(&mut self, connection: Connection, error: anyhow::Error) {
        self.alive -= 1;
        self.under_way -= connection.under_way().count() as u64;
        self.tally.connections_lost += 1;
        for _ in connection.under_way() {
            self.tally.error("connection lost");
        }
        self.first_failure.get_or_insert(error);
    }

    fn finish(mut self) -> Result<Tally> {
        if self.alive == 0
            && let Some(error) = self.first_failure
        {
            // The run has failed: the other threads need not go on.
            self.shared.stop.store(true, Relaxed);
            return Err(error.context("every connection was lost; the first one because"));
        }
        // A closed loop is always cut off with requests under way; worth telling is one that hangs.
        let patience = if self.pace.is_some() || self.fixed { 0 } else { HANGS_NS };
        let now = self.now_ns();
        for under_way in self.connections.iter().flatten().flat_map(Connection::under_way) {
            let waited = now.saturating_sub(under_way.began_ns);
            if waited >= patience {
                self.tally.unfinished += 1;
                self.tally.unfinished_oldest_ns = self.tally.unfinished_oldest_ns.max(waited);
            }
        }
        Ok(self.tally)
    }
}

/// Wakes an event loop when the next moment of an open loop has come: the loop's own timeouts are in milliseconds.
struct Pacer {
    over: Arc<AtomicBool>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Pacer {
    fn start(poll: &Poll, mut pace: Pace, shared: &Arc<Shared>) -> Result<Pacer> {
        let waker = Waker::new(poll.registry(), WAKE)?;
        let over = Arc::new(AtomicBool::new(false));
        let (ours, shared) = (over.clone(), shared.clone());
        let body = move || {
            while !ours.load(Relaxed) {
                let now = shared.epoch.elapsed().as_nanos() as u64;
                let mut due = false;
                while pace.take_due(now).is_some() {
                    due = true;
                }
                if due && waker.wake().is_err() {
                    return;
                }
                let now = shared.epoch.elapsed().as_nanos() as u64;
                thread::sleep(Duration::from_nanos(pace.next_ns().saturating_sub(now)).min(TICK));
            }
        };
        let thread = thread::Builder::new().name("pacer".to_owned()).spawn(body)?;
        Ok(Pacer { over, thread: Some(thread) })
    }
}

impl Drop for Pacer {
    fn drop(&mut self) {
        self.over.store(true, Relaxed);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            eprintln!("the pacer panicked");
        }
    }
}
