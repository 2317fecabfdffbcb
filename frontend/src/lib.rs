//! The front end: sockets, worker threads and the connection table. It turns bytes into commands, runs them against the
//! engine and sends what comes back, now or later.
//!
//! ```text
//!     listener ──▶ table (a slot) ──▶ worker's mailbox ──▶ worker: event loop ──▶ commands ──▶ engine
//!                                          ▲                                                     │
//!                                          └──────────────── answers that had to wait ◀──────────┘
//! ```
//!
//! A connection stays with its worker for life, so nothing of it is shared or locked. A worker never waits: what cannot
//! be answered at once is remembered with all that is needed to answer it, and finished by a letter. The front end does
//! not know files, seqnos' order or what durable means; that is the engine's.

#![forbid(unsafe_code)]

pub mod auth;
mod buffer;
pub mod cluster;
mod commands;
mod connection;
pub mod counts;
mod errors;
mod listener;
mod mailbox;
mod plain_text;
mod replicas;
mod strangers;
pub mod table;
mod worker;

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Release};
use std::sync::{Arc, Weak};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use engine::Engine;
use env::Env;
use limits::{Class, Ledger, NoRoom};
use mio::{Poll, Waker};
use parking_lot::Mutex;
use scheduler::Pools;

pub use commands::MANIFEST;
pub use connection::{Info as ConnectionInfo, Names as ConnectionNames};
pub use counts::METRICS;
pub use replicas::Credentials;

/// Memory that connections hold: themselves and their buffers, those kept for the next included.
pub fn connections_bytes() -> u64 {
    let each = size_of::<connection::Connection>() as i64;
    (counts::CONNECTION_BUFFER_BYTES.get() + counts::CURR_CONNECTIONS.get() * each).max(0) as u64
}

use auth::Users;
use auth::trials::Trials;
use cluster::Cluster;
use connection::Session;
use counts::{ErrorCounts, OpTimings};
use listener::Listener;
use mailbox::{Letter, Mailbox};
use replicas::Replicas;
use strangers::Strangers;
use table::{Slot, Table};
use worker::{WAKE, Worker};

/// How the front end is set up.
#[derive(Clone, Debug)]
pub struct Options {
    /// Port 0 picks a free one.
    pub listen: SocketAddr,
    /// Event loops; 0: one a core.
    pub workers: usize,
    /// A bucket for clients that do not authenticate. The caller has made sure that this is wanted.
    pub open_bucket: Option<String>,
    /// What VERSION answers.
    pub version: String,
    pub bounds: Bounds,
    /// To log in at other nodes with; without them nothing is replicated to this one.
    pub credentials: Option<Credentials>,
}

/// What one client may take, in time and memory. May be changed while the front end runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// How long a client may take to log in.
    pub login_timeout: Duration,
    /// A client that sends nothing for this long is closed. `None`: it may stay.
    pub idle_timeout: Option<Duration>,
    /// How long a request may stay half sent, or answers unread.
    pub stall_timeout: Duration,
    /// With more bytes of answers than this to be sent, a client is closed.
    pub unsent_len_max: usize,
    /// With more than this to be sent to all of them together, none may have much waiting.
    pub unsent_plenty_len: usize,
    /// After how much silence the system asks whether the client's machine is still there.
    pub keepalive: Option<Duration>,
}

impl Default for Bounds {
    fn default() -> Bounds {
        Bounds {
            login_timeout: Duration::from_secs(30),
            idle_timeout: None,
            stall_timeout: Duration::from_secs(60),
            unsent_len_max: 256 << 20,
            unsent_plenty_len: 256 << 20,
            keepalive: Some(Duration::from_secs(60)),
        }
    }
}

impl Default for Options {
    fn default() -> Options {
        Options {
            listen: SocketAddr::from(([127, 0, 0, 1], 11210)),
            workers: 0,
            open_bucket: None,
            // The protocol's generation first: libmemcached gives up on a server whose major version is 0.
            version: concat!("8.0.0-settee-", env!("CARGO_PKG_VERSION")).to_owned(),
            bounds: Bounds::default(),
            credentials: None,
        }
    }
}

/// Groups of statistics that the front end cannot tell by itself. Called on a worker thread: must not wait.
pub trait StatProvider: Send + Sync {
    /// Emits the entries of `group`. False: there is no such group here, ask elsewhere.
    fn stats(&self, group: &str, arguments: &str, bucket: Option<&str>, emit: &mut dyn FnMut(&str, &str)) -> bool;
    /// Zeroes what can be zeroed.
    fn reset(&self) {}
}

/// No groups.
impl StatProvider for () {
    fn stats(&self, _: &str, _: &str, _: Option<&str>, _: &mut dyn FnMut(&str, &str)) -> bool {
        false
    }
}

/// The parts a front end stands on.
pub struct Parts {
    pub env: Env,
    /// For what takes long: making and deleting buckets.
    pub pools: Arc<Pools>,
    pub engine: Arc<Engine>,
    pub users: Arc<Users>,
    /// Says how many connections there may be: its classes `Connections` and, for the reserve, `Admin`.
    pub ledger: Arc<Ledger>,
    /// Makes the cluster's view once the port is known.
    pub cluster: Box<dyn FnOnce(SocketAddr) -> Arc<Cluster>>,
    pub stats: Arc<dyn StatProvider>,
    /// Where those who are sent changes can be seen.
    pub streams: Arc<replication::Registry>,
}

/// What all workers share.
pub(crate) struct Shared {
    pub env: Env,
    pub options: Options,
    pub engine: Arc<Engine>,
    pub users: Arc<Users>,
    pub trials: Trials,
    pub cluster: Arc<Cluster>,
    pub stats: Arc<dyn StatProvider>,
    pub ledger: Arc<Ledger>,
    pub bounds: Mutex<Bounds>,
    pub table: Table,
    pub strangers: Strangers,
    /// Bytes of replies that clients have not taken, as of each connection's last turn.
    pub unsent_len: AtomicU64,
    /// Connections of the reserve that wait for an ordinary place, the first come first.
    pub parked: Mutex<VecDeque<Slot>>,
    /// Clients wait, and no ordinary place came free for a while.
    pub stuck: AtomicBool,
    pub errors: ErrorCounts,
    /// Who is sent changes.
    pub streams: Arc<replication::Registry>,
    /// What is followed elsewhere.
    pub replicas: Replicas,
    pub pools: Arc<Pools>,
    pub started: Duration,
    pub stopping: AtomicBool,
    /// Of requests without a bucket.
    pub unbound: Arc<OpTimings>,
    me: Weak<Shared>,
    mailboxes: Vec<Arc<Mailbox>>,
    listener: Waker,
    timings: Mutex<HashMap<String, Arc<OpTimings>>>,
}

impl Shared {
    pub fn now(&self) -> Duration {
        self.env.clock.monotonic()
    }

    /// A connection of the reserve waits for an ordinary place.
    pub fn park(&self, slot: Slot) {
        self.parked.lock().push_back(slot);
        self.wake_listener();
    }

    /// One stranger less.
    pub fn stranger_left(&self) {
        if self.strangers.leave() {
            self.wake_listener();
        }
    }

    /// Client connections there may be, the reserve not among them.
    pub fn connections_max(&self) -> u32 {
        self.ledger.plan().connections_max()
    }

    /// Has not logged in, and has to.
    pub fn is_stranger(&self, session: &Session) -> bool {
        session.identity.is_none() && self.options.open_bucket.is_none()
    }

    fn wake_listener(&self) {
        if let Err(error) = self.listener.wake() {
            panic!("waking the listener: {error}");
        }
    }

    pub fn me(&self) -> Arc<Shared> {
        self.me.upgrade().expect("borrowed from the very thing")
    }

    /// Sorted.
    pub fn bucket_names(&self) -> Vec<String> {
        self.engine.list().iter().map(|bucket| bucket.name().to_owned()).collect()
    }

    /// Ends the connections to a bucket that was deleted.
    pub fn forget_bucket(&self, name: &str) {
        self.timings.lock().remove(name);
        counts::OP_DURATION.forget("bucket", name);
        self.cluster.forget(name);
        self.cluster.changed();
        self.replicas.look();
        let name: Arc<str> = name.into();
        self.mailboxes.iter().for_each(|mailbox| mailbox.post(Letter::BucketGone { name: name.clone() }));
    }

    /// The histograms of a bucket.
    pub fn timings_of(&self, bucket: &str) -> Arc<OpTimings> {
        let mut timings = self.timings.lock();
        if let Some(found) = timings.get(bucket) {
            return found.clone();
        }
        let made = Arc::new(OpTimings::of_bucket(bucket));
        timings.insert(bucket.to_owned(), made.clone());
        made
    }
}

/// A running front end. Dropped without [`FrontEnd::drain`] it drains with no patience at all.
pub struct FrontEnd {
    local_addr: SocketAddr,
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

/// Binds and starts serving.
///
/// # Errors
/// The address cannot be bound (it is in the text), or a thread or event queue cannot be had.
pub fn serve(options: Options, parts: Parts) -> io::Result<FrontEnd> {
    let socket = listener::bind(options.listen, &options.bounds)?;
    let local_addr = socket.local_addr()?;
    let workers = match options.workers {
        0 => thread::available_parallelism().map_or(1, usize::from),
        n => n,
    };
    let listener_poll = Poll::new()?;
    let polls = (0..workers).map(|_| Poll::new()).collect::<io::Result<Vec<Poll>>>()?;
    let mailbox = |poll: &Poll| Ok(Arc::new(Mailbox::new(Waker::new(poll.registry(), WAKE)?)));
    let mailboxes = polls.iter().map(mailbox).collect::<io::Result<Vec<_>>>()?;
    let listener = Waker::new(listener_poll.registry(), WAKE)?;
    let shared = Arc::new_cyclic(|me| Shared {
        table: Table::new(workers),
        strangers: Strangers::new(parts.ledger.plan().connections_max()),
        unsent_len: AtomicU64::new(0),
        parked: Mutex::new(VecDeque::new()),
        stuck: AtomicBool::new(false),
        bounds: Mutex::new(options.bounds),
        ledger: parts.ledger,
        errors: ErrorCounts::default(),
        streams: parts.streams,
        replicas: Replicas::default(),
        trials: Trials::new(&parts.pools),
        pools: parts.pools,
        started: parts.env.clock.monotonic(),
        stopping: AtomicBool::new(false),
        unbound: Arc::new(OpTimings::of_bucket("")),
        me: me.clone(),
        mailboxes,
        listener,
        timings: Mutex::new(HashMap::new()),
        env: parts.env,
        options,
        engine: parts.engine,
        users: parts.users,
        cluster: (parts.cluster)(local_addr),
        stats: parts.stats,
    });
    let mut front_end = FrontEnd { local_addr, shared: shared.clone(), threads: Vec::new() };
    for (n, poll) in polls.into_iter().enumerate() {
        let worker = Worker::new(poll, shared.clone(), shared.mailboxes[n].clone());
        front_end.threads.push(thread::Builder::new().name(format!("kv-worker-{n}")).spawn(|| worker.run())?);
    }
    // From here on every slot has a worker to serve it.
    for class in [Class::Connections, Class::Admin] {
        let weak = Arc::downgrade(&shared);
        shared.ledger.on_release(class, move || {
            if let Some(shared) = weak.upgrade() {
                shared.wake_listener();
            }
        });
    }
    let weak = Arc::downgrade(&shared);
    shared.cluster.on_change(move || {
        if let Some(shared) = weak.upgrade() {
            shared.mailboxes.iter().for_each(|mailbox| mailbox.post(Letter::MapChanged));
        }
    });
    shared.replicas.start(&shared);
    let listener = Listener::new(listener_poll, socket, shared);
    front_end.threads.push(thread::Builder::new().name("kv-listener".to_owned()).spawn(|| listener.run())?);
    Ok(front_end)
}

impl FrontEnd {
    /// Where it listens.
    pub fn local_addr(&self) -> SocketAddr {
        self.local_addr
    }

    pub fn cluster(&self) -> &Arc<Cluster> {
        &self.shared.cluster
    }

    /// For parts that outlive a borrow of this one.
    pub fn handle(&self) -> Handle {
        Handle(Arc::clone(&self.shared))
    }

    /// Connections open now.
    pub fn connection_count(&self) -> u32 {
        self.shared.table.active()
    }

    /// Visits every open connection.
    pub fn walk_connections(&self, visit: impl FnMut(&ConnectionInfo)) {
        self.shared.table.walk(visit);
    }

    /// Stops accepting, lets requests under way finish, sends what is to be sent and closes, all within `patience`.
    /// The engine must go on meanwhile: durable writes are waited for.
    pub fn drain(mut self, patience: Duration) {
        self.stop(patience);
    }

    fn stop(&mut self, patience: Duration) {
        self.shared.stopping.store(true, Release);
        self.shared.wake_listener();
        let until = self.shared.now() + patience;
        // The listener first: after it no connection is new.
        if let Some(listener) = self.threads.pop() {
            join(listener);
        }
        self.shared.replicas.stop();
        for mailbox in &self.shared.mailboxes {
            mailbox.post(Letter::Drain { until });
        }
        for worker in self.threads.drain(..) {
            join(worker);
        }
    }
}

/// A running front end, as others may change it.
#[derive(Clone)]
pub struct Handle(Arc<Shared>);

impl Handle {
    /// To be called after a bucket was deleted by other means than the key-value port: ends the connections to it.
    pub fn forget_bucket(&self, name: &str) {
        self.0.forget_bucket(name);
    }

    /// Sets how many clients there may be. More than that many stay until they leave.
    ///
    /// # Errors
    /// There are not so many descriptors; the range is in the text.
    pub fn resize(&self, connections_max: u32) -> Result<(), NoRoom> {
        self.0.ledger.resize(Class::Connections, connections_max)?;
        if self.0.strangers.resize(connections_max) {
            self.0.wake_listener();
        }
        Ok(())
    }

    /// Sets what one client may take, of those here and those to come.
    pub fn set_bounds(&self, bounds: Bounds) {
        *self.0.bounds.lock() = bounds;
        self.0.wake_listener();
        self.0.mailboxes.iter().for_each(|mailbox| mailbox.post(Letter::Bounds(bounds)));
    }
}

fn join(thread: JoinHandle<()>) {
    let name = thread.thread().name().unwrap_or("a thread").to_owned();
    if thread.join().is_err() {
        tracing::error!("{name} panicked");
    }
}

impl Drop for FrontEnd {
    fn drop(&mut self) {
        if !self.threads.is_empty() {
            self.stop(Duration::ZERO);
        }
    }
}
