//! The listening socket. It accepts, takes a slot, and hands the connection to the slot's worker.
//!
//! When every slot is taken it stops accepting: clients wait in the kernel's backlog and are served as soon as somebody
//! leaves. The socket itself stays open whatever happens.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering::Acquire;
use std::time::Duration;

use mio::net::{TcpListener, TcpStream};
use mio::{Events, Interest, Poll, Token};
use socket2::{Domain, Protocol, Socket, Type};

use crate::Shared;
use crate::connection::Info;
use crate::counts;
use crate::mailbox::Letter;
use crate::worker::WAKE;

const LISTEN: Token = Token(0);
const BACKLOG: i32 = 4096;
/// How long to leave the listener alone when the system has no descriptor for another connection.
const RETRY: Duration = Duration::from_millis(100);
/// A state that lasts is logged this often.
const LOG_EVERY: Duration = Duration::from_secs(1);

pub(crate) struct Listener {
    pub poll: Poll,
    pub socket: TcpListener,
    pub shared: Arc<Shared>,
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
    pub fn run(mut self) {
        let mut events = Events::with_capacity(8);
        let mut logged: Option<Duration> = None;
        // A connection that was accepted and has no slot yet.
        let mut waiting: Option<(TcpStream, SocketAddr)> = None;
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
            patience = None;
            // Until "would block", "table full" or an error: the event will not come again before that.
            loop {
                let (stream, peer) = match waiting.take().map_or_else(|| self.socket.accept(), Ok) {
                    Ok(accepted) => accepted,
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                    Err(error) if is_passing(&error) => continue,
                    Err(error) => {
                        counts::ACCEPT_ERRORS.inc();
                        self.log(&mut logged, &format!("accepting pauses: {error}"));
                        patience = Some(RETRY);
                        break;
                    }
                };
                if let Some(stream) = self.hand_over(stream, peer) {
                    counts::CONNECTION_TABLE_FULL.inc();
                    let capacity = self.shared.table.capacity();
                    self.log(
                        &mut logged,
                        &format!("all {capacity} connections are taken; others wait until one closes"),
                    );
                    waiting = Some((stream, peer));
                    break;
                }
            }
        }
    }

    /// Gives the connection to a worker; back if there is no slot.
    fn hand_over(&self, stream: TcpStream, peer: SocketAddr) -> Option<TcpStream> {
        let now = self.shared.now();
        let Some((slot, info)) = self.shared.table.take(|slot| Arc::new(Info::new(slot, peer, now))) else {
            return Some(stream);
        };
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!(%peer, "TCP_NODELAY: {error}");
        }
        counts::TOTAL_CONNECTIONS.inc();
        self.shared.mailboxes[self.shared.table.worker_of(slot)].post(Letter::Adopt { slot, info, stream });
        None
    }

    fn log(&self, last: &mut Option<Duration>, what: &str) {
        let now = self.shared.now();
        if last.is_none_or(|last| now.saturating_sub(last) >= LOG_EVERY) {
            tracing::warn!("{what}");
            *last = Some(now);
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
