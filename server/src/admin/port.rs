//! The admin port's sockets: each has a permit of the core class, so that no client of the key-value port can take its
//! place, and none is kept for a client that says nothing.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use limits::{Class, Ledger, Permit};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio::time::{Instant, Sleep, sleep, sleep_until};

/// How long a client may be silent between two requests, or take to send one.
const SILENCE_MAX: Duration = Duration::from_secs(10);
/// How long to leave the listener alone when the system has no descriptor for another connection.
const RETRY: Duration = Duration::from_millis(100);

/// Accepts as many as there are permits; the rest waits in the backlog.
pub struct Port {
    listener: TcpListener,
    ledger: Arc<Ledger>,
    released: Arc<Notify>,
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
        Port { listener, ledger, released }
    }

    async fn permit(&self) -> Permit {
        loop {
            match self.ledger.take(Class::Core) {
                Some(permit) => return permit,
                // Remembers a release that comes before this line.
                None => self.released.notified().await,
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
                    let silence = Box::pin(sleep(SILENCE_MAX));
                    return (Connection { stream, silence, _permit: permit }, peer);
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
    silence: Pin<Box<Sleep>>,
    _permit: Permit,
}

impl Connection {
    fn was_heard(&mut self) {
        self.silence.set(sleep_until(Instant::now() + SILENCE_MAX));
    }
}

impl AsyncRead for Connection {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if let Poll::Ready(read) = Pin::new(&mut self.stream).poll_read(cx, buf) {
            self.was_heard();
            return Poll::Ready(read);
        }
        ready!(self.silence.as_mut().poll(cx));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        if let Poll::Ready(written) = Pin::new(&mut self.stream).poll_write(cx, buf) {
            self.was_heard();
            return Poll::Ready(written);
        }
        ready!(self.silence.as_mut().poll(cx));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
