//! The listening socket. It accepts, takes a place, and hands the connection to the worker that owns its slot.
//!
//! ```text
//!     accept ─▶ an ordinary place and room among the strangers? ─▶ come in
//!                  └─ no: one of the reserve? ─▶ come in and say who you are: an administrator may look and repair;
//!                         └─ no: wait             anybody else waits for an ordinary place before doing anything
//! ```
//!
//! When there is no place at all it stops accepting: clients wait in the kernel's backlog and are served as soon as
//! somebody leaves. The socket itself stays open whatever happens. Clients wait as long as others come and go; only when
//! nobody has left for [`STUCK_AFTER`], those who merely hold a place of the reserve are asked to leave, so that among
//! all who knock an administrator is found.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed};
use std::time::Duration;

use limits::{Class, Permit, with_retry};
use mio::net::{TcpListener, TcpStream};
use mio::{Events, Interest, Poll, Token};
use socket2::{Domain, Protocol, SockRef, Socket, TcpKeepalive, Type};

use crate::Shared;
use crate::connection::Info;
use crate::counts;
use crate::mailbox::{Arrival, Letter};
use crate::worker::WAKE;

const LISTEN: Token = Token(0);
const BACKLOG: i32 = 4096;
/// How long to leave the listener alone when the system has no descriptor for another connection.
const RETRY: Duration = Duration::from_millis(100);
/// A state that lasts is logged this often.
const LOG_EVERY: Duration = Duration::from_secs(1);
/// With clients waiting and no ordinary place come free for this long, the reserve is cleared.
const STUCK_AFTER: Duration = Duration::from_secs(1);
/// How often it is cleared then.
const CLEAR_EVERY: Duration = Duration::from_millis(250);

pub(crate) struct Listener {
    poll: Poll,
    socket: TcpListener,
    shared: Arc<Shared>,
    /// A connection that was accepted and has no place yet.
    in_hand: Option<(TcpStream, SocketAddr)>,
    /// Since when somebody has been waiting.
    crowded_since: Option<Duration>,
    /// When somebody last got an ordinary place.
    granted: Duration,
    logged: Option<Duration>,
}

/// Binds. The address is in the error's text.
pub(crate) fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let open = || -> io::Result<TcpListener> {
        let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
        socket.set_reuse_address(true)?;
        socket.set_nonblocking(true)?;
        socket.bind(&address.into())?;
        socket.listen(BACKLOG)?;
        Ok(TcpListener::from_std(socket.into()))
    };
    open().map_err(|e| io::Error::new(e.kind(), format!("cannot listen for KV clients on {address}: {e}")))
}

impl Listener {
    pub fn new(poll: Poll, socket: TcpListener, shared: Arc<Shared>) -> Listener {
        let granted = shared.now();
        Listener { poll, socket, shared, in_hand: None, crowded_since: None, granted, logged: None }
    }

    pub fn run(mut self) {
        let mut events = Events::with_capacity(8);
        let mut patience = None;
        if let Err(error) = self.poll.registry().register(&mut self.socket, LISTEN, Interest::READABLE) {
            panic!("watching the listener: {error}");
        }
        loop {
            match self.poll.poll(&mut events, patience) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => panic!("waiting for connections: {error}"),
            }
            if self.shared.stopping.load(Acquire) {
                return;
            }
            patience = self.admit();
        }
    }

    /// Lets in whoever waits, as far as there are places, and says when to look again at the latest.
    ///
    /// Goes on until "would block", "no place" or an error: the event will not come again before that.
    fn admit(&mut self) -> Option<Duration> {
        loop {
            let ordinary = self.seat_the_parked();
            let (stream, peer) = match self.in_hand.take().map_or_else(|| self.accept(), Ok) {
                Ok(accepted) => accepted,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.crowded_since = None;
                    self.shared.stuck.store(false, Relaxed);
                    return None;
                }
                Err(error) if is_passing(&error) => continue,
                Err(error) => {
                    counts::ACCEPT_ERRORS.inc();
                    self.log(&format!("accepting pauses: {error}"));
                    return Some(RETRY);
                }
            };
            match self.find_place(ordinary) {
                Some((permit, counted)) => self.hand_over(stream, peer, permit, counted),
                None => {
                    self.in_hand = Some((stream, peer));
                    return Some(self.wait_for_a_place());
                }
            }
        }
    }

    fn accept(&self) -> io::Result<(TcpStream, SocketAddr)> {
        with_retry(&self.shared.ledger, || self.socket.accept())
    }

    /// Gives free ordinary places to connections of the reserve that wait for one; they came first. False: some still
    /// wait, so there is none for anybody else.
    fn seat_the_parked(&mut self) -> bool {
        while !self.shared.parked.lock().is_empty() {
            let Some(permit) = self.shared.ledger.take(Class::Connections) else { return false };
            // Only this thread takes from the list.
            let Some(slot) = self.shared.parked.lock().pop_front() else { return true };
            self.granted();
            self.shared.mailboxes[self.shared.table.worker_of(slot)].post(Letter::Promoted { slot, permit });
        }
        true
    }

    /// An ordinary place, or one of the reserve; and whether its holder counts among the strangers.
    ///
    /// Whatever is refused here wakes this thread when it is given back.
    fn find_place(&mut self, ordinary: bool) -> Option<(Permit, bool)> {
        let Shared { ledger, strangers, options, .. } = &*self.shared;
        let counted = options.open_bucket.is_none();
        if ordinary && (!counted || strangers.enter()) {
            if let Some(permit) = ledger.take(Class::Connections) {
                self.granted();
                return Some((permit, counted));
            }
            // Nobody but this thread waits for room among them.
            let _ = counted && strangers.leave();
        }
        let permit = ledger.take(Class::Admin)?;
        counts::CONNECTIONS_IN_RESERVE.inc();
        Some((permit, false))
    }

    fn granted(&mut self) {
        self.granted = self.shared.now();
        self.shared.stuck.store(false, Relaxed);
    }

    fn wait_for_a_place(&mut self) -> Duration {
        let now = self.shared.now();
        counts::CONNECTION_TABLE_FULL.inc();
        let capacity = self.shared.connections_max();
        self.log(&format!("all {capacity} connections are taken; others wait until one closes"));
        let since = *self.crowded_since.get_or_insert(now);
        let quiet = now.saturating_sub(since.max(self.granted));
        if quiet < STUCK_AFTER {
            return STUCK_AFTER - quiet;
        }
        self.shared.stuck.store(true, Relaxed);
        self.shared.mailboxes.iter().for_each(|mailbox| mailbox.post(Letter::Crowded));
        CLEAR_EVERY
    }

    fn hand_over(&self, stream: TcpStream, peer: SocketAddr, permit: Permit, counted: bool) {
        let now = self.shared.now();
        let (slot, info) = self.shared.table.take(|slot| Arc::new(Info::new(slot, peer, now)));
        info.in_reserve.store(permit.class() == Class::Admin, Relaxed);
        if let Err(error) = self.prepare(&stream) {
            tracing::debug!(%peer, "setting up the socket: {error}");
        }
        counts::TOTAL_CONNECTIONS.inc();
        let arrival = Arrival { slot, info, stream, permit, counted };
        self.shared.mailboxes[self.shared.table.worker_of(slot)].post(Letter::Adopt(arrival));
    }

    /// So that a client whose machine or network is gone does not keep its place.
    fn prepare(&self, stream: &TcpStream) -> io::Result<()> {
        let bounds = *self.shared.bounds.lock();
        stream.set_nodelay(true)?;
        let socket = SockRef::from(stream);
        if let Some(silence) = bounds.keepalive {
            let probe = (silence / 4).max(Duration::from_secs(1));
            socket.set_tcp_keepalive(&TcpKeepalive::new().with_time(silence).with_interval(probe).with_retries(4))?;
        }
        socket.set_tcp_user_timeout(Some(bounds.stall_timeout))
    }

    fn log(&mut self, what: &str) {
        let now = self.shared.now();
        if self.logged.is_none_or(|last| now.saturating_sub(last) >= LOG_EVERY) {
            tracing::warn!("{what}");
            self.logged = Some(now);
        }
    }
}

/// Errors of one connection that was gone before it was accepted; the listener is fine.
fn is_passing(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionReset, Interrupted};
    matches!(error.kind(), Interrupted | ConnectionAborted | ConnectionReset)
}

/// The waker's token, which must not be the listener's.
const _: () = assert!(WAKE.0 != LISTEN.0);
