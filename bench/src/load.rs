//! The load generator: many clients on few event loops.
//!
//! A client of a cluster has a connection to each server and sends every request to the one that has its key.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::client::Client;
use crate::connection::Connection;
use crate::event_loop::{Loop, Shared, Side, TICK};
use crate::process::Usage;
use crate::progress::Progress;
use crate::route::Routes;
use crate::tally::Tally;
use crate::target::{Dialect, PATIENCE, Target};
use crate::workload::Workload;

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
    /// So many operations, if they take no longer than this.
    OpsWithin(u64, Duration),
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

/// Connects, warms up, measures.
///
/// # Errors
/// A connection cannot be made, or all of them were lost.
pub fn run(target: &Target, dialect: &Dialect, load: &Load, watch: &Watch<'_>) -> Result<Outcome> {
    let threads = load.threads.clamp(1, load.clients.max(1));
    let route = target.route(dialect);
    let mut groups: Vec<Vec<Client>> = (0..threads).map(|_| Vec::new()).collect();
    for n in 0..load.clients {
        if watch.stop.load(Relaxed) {
            bail!("interrupted while connecting");
        }
        let mut client = Client::new(load.depth);
        for (server, address) in route.servers.iter().enumerate() {
            let connection = open(&target.at(address), dialect, PATIENCE);
            let which = || format!("client {} of {}, server {address}", n + 1, load.clients);
            client.connect(server, connection.with_context(which)?);
        }
        groups[(n % threads) as usize].push(client);
    }

    let shared = Arc::new(Shared::new());
    let barrier = Arc::new(Barrier::new(threads as usize + 1));
    let mut handles = Vec::new();
    for (lane, clients) in groups.into_iter().enumerate() {
        let (shared, barrier, load) = (shared.clone(), barrier.clone(), load.clone());
        let side = Side { target: target.clone(), dialect: dialect.clone(), routes: Routes::new(&route) };
        let lane = lane as u64;
        let body = move || {
            let looped = Loop::new(clients, side, &shared, &load, lane, u64::from(threads));
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
    if let Until::For(time) | Until::OpsWithin(_, time) = load.until {
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

/// Connects and makes ready.
pub(crate) fn open(target: &Target, dialect: &Dialect, patience: Duration) -> Result<Connection> {
    let mut stream = target.connect_within(patience)?;
    let mut protocol = dialect.protocol();
    protocol.open(&mut stream)?;
    stream.set_nonblocking(true)?;
    Ok(Connection::new(mio::net::TcpStream::from_std(stream), protocol))
}
