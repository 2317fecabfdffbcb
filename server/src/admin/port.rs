//! The admin port's sockets: each has a permit of the core class, so that no client of the key-value port can take its
//! place, and none is kept for a client that says nothing: for ten seconds, or for one while others wait.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::task::{Context, Poll};
use std::time::Duration;

use limits::{Class, Ledger, Permit};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio::time::{Instant, Sleep, sleep};

/// How long a client may be silent that was answered, or has just come.
const SILENCE_MAX: Duration = Duration::from_secs(10);
/// How long after its last byte it may be waiting for an answer; some take as long as the disk does.
const ANSWER_MAX: Duration = Duration::from_secs(120);
/// How much less of both there is while others wait.
const CROWDED: u32 = 10;
/// How often a silent client is looked at. Not the rule but its grain: nobody is looked at for longer than the rule.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// How long to leave the listener alone when the system has no descriptor for another connection.
const RETRY: Duration = Duration::from_millis(100);

/// Accepts as many as there are permits; the rest waits in the backlog.
pub struct Port {
    listener: TcpListener,
    ledger: Arc<Ledger>,
    released: Arc<Notify>,
    crowded: Arc<AtomicBool>,
}

impl Port {
    pub fn new(listener: TcpListener, ledger: Arc<Ledger>) -> Port {
        let released = Arc::new(Notify::new());
        let notify = Arc::downgrade(&released);
        ledger.on_release(Class::Core, move || {
            if let Some(released) = notify.upgrade() {
                released.notify_one();
            }
        });
        Port { listener, ledger, released, crowded: Arc::default() }
    }

    async fn permit(&self) -> Permit {
        loop {
            match self.ledger.take(Class::Core) {
                Some(permit) => {
                    self.crowded.store(false, Relaxed);
                    return permit;
                }
                // Remembers a release that comes before this line.
                None => {
                    self.crowded.store(true, Relaxed);
                    self.released.notified().await;
                }
            }
        }
    }
}

impl axum::serve::Listener for Port {
    type Io = Connection;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Connection, SocketAddr) {
        let permit = self.permit().await;
        loop {
            match self.listener.accept().await {
                Ok((stream, peer)) => {
                    let connection = Connection {
                        stream,
                        heard: Instant::now(),
                        is_asking: false,
                        look: Box::pin(sleep(LOOK_EVERY)),
                        crowded: Arc::clone(&self.crowded),
                        _permit: permit,
                    };
                    return (connection, peer);
                }
                Err(error) => {
                    if limits::is_exhausted(&error) {
                        self.ledger.give_back(None, 1);
                        tracing::warn!("accepting on the admin port pauses: {error}");
                    }
                    sleep(RETRY).await;
                }
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

/// One client's socket.
pub struct Connection {
    // Declared first: closed before the permit is given back.
    stream: TcpStream,
    /// When bytes last went either way.
    heard: Instant,
    /// They came from the client, so the next are ours to send.
    is_asking: bool,
    look: Pin<Box<Sleep>>,
    crowded: Arc<AtomicBool>,
    _permit: Permit,
}

impl Connection {
    /// Ready with an error once the client has been silent for too long; `result` if something happened.
    fn or_too_silent<T>(
        &mut self,
        cx: &mut Context<'_>,
        result: Poll<io::Result<T>>,
        is_read: bool,
    ) -> Poll<io::Result<T>> {
        if result.is_ready() {
            (self.heard, self.is_asking) = (Instant::now(), is_read);
            return result;
        }
        while self.look.as_mut().poll(cx).is_ready() {
            let patience = if self.is_asking { ANSWER_MAX } else { SILENCE_MAX };
            let patience = if self.crowded.load(Relaxed) { patience / CROWDED } else { patience };
            if self.heard.elapsed() >= patience {
                return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
            }
            self.look.set(sleep(LOOK_EVERY));
        }
        Poll::Pending
    }
}

impl AsyncRead for Connection {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let read = Pin::new(&mut self.stream).poll_read(cx, buf);
        self.or_too_silent(cx, read, true)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, buf);
        self.or_too_silent(cx, written, false)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
