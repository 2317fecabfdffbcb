//! One thread of the load generator.
//!
//! ```text
//!     closed loop:  answer ──▶ next request of the same client            (as fast as the server lets it)
//!     open loop:    its moment has come ──▶ any client with room          (see `pace`)
//!
//!     request ──▶ server of its key ──▶ answer
//!                   │  no connection, or turned away
//!                   └──▶ stranded: a newer map, a new connection, a pause ──▶ sent again
//! ```
//!
//! One loop costs about what the servers' own loops cost: a read, a write and a share of an `epoll_wait` per operation,
//! and two clock readings.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Result;
use metrics::Timings;
use mio::{Events, Interest, Poll, Registry, Token, Waker};

use crate::client::{Client, UnderWay};
use crate::connection::{Connection, Read1};
use crate::load::{self, Load, Until};
use crate::pace::Pace;
use crate::protocol::{Action, Answer};
use crate::route::Routes;
use crate::tally::Tally;
use crate::target::{Dialect, Target};
use crate::workload::Picker;

/// How long answers of an open loop are waited for after its end.
const STRAGGLERS: Duration = Duration::from_secs(10);
/// A request of a closed loop that waited this long when the run was over is worth telling.
const HANGS_NS: u64 = 1_000_000_000;
/// Bytes a socket is read with at a time.
const CHUNK: usize = 64 * 1024;
/// An event loop looks at the clock at least this often, in case no event comes.
pub const TICK: Duration = Duration::from_millis(50);
/// How long a request that no server would have waits until it is tried again.
const STRANDED_FOR: Duration = Duration::from_millis(5);
/// How long a server that cannot be reached is left alone, and others are not asked for a newer map.
const UNREACHABLE_FOR: Duration = Duration::from_millis(200);
/// How long a loop may stand still for a server that does not answer.
const RECONNECT_PATIENCE: Duration = Duration::from_millis(500);

/// What the loops and their owner tell each other.
pub struct Shared {
    pub epoch: Instant,
    /// In ns since `epoch`; set before the loops start.
    pub measure_from_ns: AtomicU64,
    pub stop_at_ns: AtomicU64,
    /// Nobody is to begin anything any more.
    pub stop: AtomicBool,
    pub ops: AtomicU64,
    pub errors: AtomicU64,
    pub timings: Timings,
}

impl Shared {
    pub fn new() -> Shared {
        let (measure_from_ns, stop, ops, errors) = Default::default();
        let stop_at_ns = AtomicU64::new(u64::MAX);
        Shared { epoch: Instant::now(), measure_from_ns, stop_at_ns, stop, ops, errors, timings: Timings::new() }
    }
}

/// Whom the clients speak to, and how.
pub struct Side {
    pub target: Target,
    pub dialect: Dialect,
    pub routes: Routes,
}

/// The error of a request whose answer never came.
const LOST: &str = "connection lost";

const WAKE: Token = Token(usize::MAX);
const SERVER_SHIFT: u32 = 32;
const _: () = assert!(usize::BITS == 64, "a token holds a client and a server");

fn token(client: usize, server: usize) -> Token {
    Token(client | server << SERVER_SHIFT)
}

fn register(registry: &Registry, client: usize, server: usize, connection: &mut Connection) -> io::Result<()> {
    registry.register(&mut connection.stream, token(client, server), Interest::READABLE | Interest::WRITABLE)
}

/// One thread's clients.
pub struct Loop {
    poll: Poll,
    clients: Vec<Option<Client>>,
    side: Side,
    /// Requests that no server would have: client and ticket.
    stranded: Vec<(usize, u32)>,
    /// When they are tried again.
    stranded_until_ns: u64,
    /// By place: until when a server that could not be reached is left alone.
    unreachable_until_ns: Vec<u64>,
    /// When servers may be asked for a newer map.
    ask_from_ns: u64,
    /// Clients that lost a connection they were sending on: nothing else tells that they have room again.
    bereft: Vec<usize>,
    shared: Arc<Shared>,
    picker: Picker,
    pace: Option<Pace>,
    /// Clients with room, least recently used first, as often as they have it; kept in an open loop only.
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
    pub fn new(
        mut clients: Vec<Client>,
        side: Side,
        shared: &Arc<Shared>,
        load: &Load,
        lane: u64,
        lanes: u64,
    ) -> Result<Loop> {
        let poll = Poll::new()?;
        for (n, client) in clients.iter_mut().enumerate() {
            for (server, connection) in client.connections() {
                register(poll.registry(), n, server, connection)?;
            }
        }
        let places = u64::from(load.clients) * u64::from(load.depth);
        let quota = match load.until {
            Until::Ops(ops) | Until::OpsWithin(ops, _) => ops / lanes + u64::from(lane < ops % lanes),
            Until::For(_) => u64::MAX,
        };
        Ok(Loop {
            poll,
            alive: clients.len(),
            idle: (0..clients.len()).flat_map(|n| std::iter::repeat_n(n, load.depth as usize)).collect(),
            clients: clients.into_iter().map(Some).collect(),
            side,
            stranded: Vec::new(),
            stranded_until_ns: 0,
            unreachable_until_ns: Vec::new(),
            ask_from_ns: 0,
            bereft: Vec::new(),
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

    pub fn run(mut self) -> Result<Tally> {
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
            for n in 0..self.clients.len() {
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
            let most = if self.stranded.is_empty() { TICK } else { STRANDED_FOR };
            let patience = Duration::from_nanos(self.stop_at_ns.saturating_sub(now)).min(most);
            let patience = if patience.is_zero() { most } else { patience };
            match self.poll.poll(&mut events, Some(patience)) {
                Err(error) if error.kind() != io::ErrorKind::Interrupted => return Err(error.into()),
                _ => {}
            }
            for event in &events {
                if event.token() != WAKE {
                    let (n, server) = (event.token().0 as u32 as usize, event.token().0 >> SERVER_SHIFT);
                    self.serve(n, server, &mut scratch, event.is_read_closed() || event.is_error());
                }
            }
            self.retry_stranded();
            self.begin_due();
            for n in std::mem::take(&mut self.bereft) {
                self.begin(n, self.now_ns());
            }
        }
        drop(pacer);
        self.finish()
    }

    /// Nothing more shall begin.
    fn is_over(&self, now_ns: u64) -> bool {
        now_ns >= self.stop_at_ns || self.quota == 0 || self.shared.stop.load(Relaxed)
    }

    /// Takes the answers a connection has, and in a closed loop asks again.
    fn serve(&mut self, n: usize, server: usize, scratch: &mut [u8], closing: bool) {
        let Some(mut client) = self.clients[n].take() else { return };
        let Some(mut connection) = client.take(server) else {
            self.clients[n] = Some(client);
            return;
        };
        let mut now = 0;
        let received = connection.receive(scratch, closing, |ticket, answer| {
            if now == 0 {
                now = self.shared.epoch.elapsed().as_nanos() as u64;
            }
            if let Answer::Elsewhere(document) = answer {
                return self.turn_away(n, ticket, server, &document, now);
            }
            self.under_way -= 1;
            if self.pace.is_some() {
                self.idle.push_back(n);
            }
            self.count(client.end(ticket), &answer, now);
        });
        let flushed = match received {
            Ok(Read1::Open) => connection.flush().map_err(anyhow::Error::from),
            Ok(Read1::Closed) => Err(anyhow::anyhow!("the server closed the connection")),
            Err(error) => Err(error),
        };
        match flushed {
            Ok(()) => client.connect(server, connection),
            Err(error) => {
                now = self.now_ns();
                self.lose(n, &mut client, &connection, error);
            }
        }
        self.put_back(n, client);
        if now != 0 {
            self.begin(n, now);
        }
    }

    /// Sets a request aside that the server does not have the key of.
    fn turn_away(&mut self, n: usize, ticket: u32, server: usize, document: &[u8], now: u64) {
        self.tally.turned_away += 1;
        self.strand(n, ticket, now);
        if self.side.routes.take_document(document, server) {
            self.stranded_until_ns = now;
        }
    }

    fn strand(&mut self, n: usize, ticket: u32, now: u64) {
        if self.stranded.is_empty() {
            self.stranded_until_ns = now + STRANDED_FOR.as_nanos() as u64;
        }
        self.stranded.push((n, ticket));
    }

    /// Sends what was set aside, if its time has come.
    fn retry_stranded(&mut self) {
        let now = self.now_ns();
        if self.stranded.is_empty() || now < self.stranded_until_ns {
            return;
        }
        for (n, ticket) in std::mem::take(&mut self.stranded) {
            let Some(mut client) = self.clients[n].take() else { continue };
            self.reach(n, &mut client, ticket, now);
            self.send(n, &mut client, ticket, now);
            self.put_back(n, client);
        }
    }

    /// Connects to the server that has the key of a request, if need be and if that is possible now. The loop stands still
    /// meanwhile, as it does for a newer map.
    fn reach(&mut self, n: usize, client: &mut Client, ticket: u32, now: u64) {
        let (key, _) = self.picker.bytes(client.request(ticket).pick);
        let Some(server) = self.side.routes.server_of(key) else { return self.ask(now) };
        let places = self.unreachable_until_ns.len().max(server + 1);
        self.unreachable_until_ns.resize(places, 0);
        if client.connection(server).is_some() {
            return;
        }
        if now < self.unreachable_until_ns[server] {
            return self.ask(now);
        }
        let address = &self.side.routes.servers()[server];
        let opened = load::open(&self.side.target.at(address), &self.side.dialect, RECONNECT_PATIENCE);
        let ready = opened.and_then(|mut connection| {
            register(self.poll.registry(), n, server, &mut connection)?;
            Ok(connection)
        });
        match ready {
            Ok(connection) => client.connect(server, connection),
            Err(_) => {
                self.unreachable_until_ns[server] = self.now_ns() + UNREACHABLE_FOR.as_nanos() as u64;
                self.ask(now);
            }
        }
    }

    /// Asks the servers for a newer map.
    fn ask(&mut self, now: u64) {
        if now < self.ask_from_ns {
            return;
        }
        let Side { target, dialect, routes } = &mut self.side;
        for address in routes.servers().to_vec() {
            // Who does not answer knows nothing.
            if target.at(&address).ask_route(dialect, RECONNECT_PATIENCE).is_ok_and(|route| routes.take(&route)) {
                break;
            }
        }
        self.ask_from_ns = self.now_ns() + UNREACHABLE_FOR.as_nanos() as u64;
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
            Answer::Done | Answer::Elsewhere(_) => {}
        }
        self.tally.ops += 1;
        self.tally.latencies.record(took);
        self.shared.ops.fetch_add(1, Relaxed);
        self.shared.timings.record(Duration::from_nanos(took));
    }

    /// Fills a client with requests of a closed loop.
    fn begin(&mut self, n: usize, now: u64) {
        if self.pace.is_some() {
            return;
        }
        let Some(mut client) = self.clients[n].take() else { return };
        while client.has_room() && !self.is_over(now) {
            self.push(n, &mut client, now, now);
        }
        self.put_back(n, client);
    }

    /// Sends what an open loop's moments ask for, as far as there is room.
    fn begin_due(&mut self) {
        let now = self.now_ns();
        while let Some(&n) = self.idle.front() {
            if self.is_over(now) {
                return;
            }
            let Some(mut client) = self.clients[n].take() else {
                self.idle.pop_front();
                continue;
            };
            let Some(intended) = self.pace.as_mut().and_then(|pace| pace.take_due(now)) else {
                self.clients[n] = Some(client);
                return;
            };
            if intended >= self.measure_from_ns {
                self.tally.sent_late.record(now - intended);
            }
            self.idle.pop_front();
            self.push(n, &mut client, intended, now);
            self.put_back(n, client);
        }
    }

    fn push(&mut self, n: usize, client: &mut Client, began_ns: u64, now: u64) {
        let counted = self.fixed && now >= self.measure_from_ns;
        if counted {
            self.quota -= 1;
        }
        let place = (self.lane + n as u64 * self.lanes) * self.depth + u64::from(client.next_ticket());
        let pick = self.picker.pick(place);
        let ticket = client.begin(UnderWay { pick, began_ns, counted });
        self.under_way += 1;
        self.send(n, client, ticket, now);
    }

    /// Queues a request for the server that has its key.
    fn send(&mut self, n: usize, client: &mut Client, ticket: u32, now: u64) {
        let (key, value) = self.picker.bytes(client.request(ticket).pick);
        match self.side.routes.server_of(key).and_then(|server| client.connection(server)) {
            Some(connection) => connection.push(key, value.map_or(Action::Get, Action::Set), ticket),
            None => self.strand(n, ticket, now),
        }
    }

    /// Sends what is queued. A client that has lost its last connection is gone.
    fn put_back(&mut self, n: usize, mut client: Client) {
        while let Err((server, error)) = client.flush() {
            if let Some(connection) = client.take(server) {
                self.lose(n, &mut client, &connection, error.into());
            }
            self.bereft.push(n);
        }
        if client.connections().next().is_some() {
            self.clients[n] = Some(client);
            return;
        }
        self.alive -= 1;
        self.stranded.retain(|(other, _)| *other != n);
        for _ in client.under_way() {
            self.under_way -= 1;
            self.tally.error(LOST);
        }
    }

    /// What was under way on a connection may or may not have been done.
    fn lose(&mut self, n: usize, client: &mut Client, connection: &Connection, error: anyhow::Error) {
        self.tally.connections_lost += 1;
        for ticket in connection.under_way() {
            client.end(ticket);
            self.under_way -= 1;
            self.tally.error(LOST);
            if self.pace.is_some() {
                self.idle.push_back(n);
            }
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
        for under_way in self.clients.iter().flatten().flat_map(Client::under_way) {
            let waited = now.saturating_sub(under_way.began_ns);
            if waited >= patience {
                self.tally.unfinished += 1;
                self.tally.unfinished_oldest_ns = self.tally.unfinished_oldest_ns.max(waited);
            }
        }
        // Of an open loop, what should have begun and found no room counts as if it had.
        if let Some(pace) = self.pace.as_mut().filter(|_| !self.fixed) {
            while let Some(intended) = pace.take_due(self.stop_at_ns.min(now)) {
                if intended >= self.measure_from_ns {
                    self.tally.unfinished += 1;
                    self.tally.unfinished_oldest_ns = self.tally.unfinished_oldest_ns.max(now - intended);
                }
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
