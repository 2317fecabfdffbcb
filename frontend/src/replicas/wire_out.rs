//! A connection to another node: bytes in, bytes out, and waiting for either, for a moment or for somebody else's word.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, ToSocketAddrs};
use std::time::Duration;

use env::Env;
use mio::net::TcpStream;
use mio::{Events, Interest, Poll, Token};

pub(super) const WAKE: Token = Token(0);
const PEER: Token = Token(1);

/// Read at a time.
const CHUNK_LEN: usize = 256 << 10;

/// Events say when a socket *became* ready, so both flags are kept until a call says "would block".
pub(super) struct WireOut {
    stream: TcpStream,
    pub input: Vec<u8>,
    pub output: Vec<u8>,
    is_readable: bool,
    is_writable: bool,
}

impl WireOut {
    /// Begins to connect.
    ///
    /// # Errors
    /// No such host, or no socket to be had.
    pub fn connect(poll: &Poll, peer: &str) -> io::Result<WireOut> {
        let unknown = || io::Error::new(ErrorKind::NotFound, format!("{peer} is no address"));
        let address: SocketAddr = peer.to_socket_addrs()?.next().ok_or_else(unknown)?;
        let mut stream = TcpStream::connect(address)?;
        poll.registry().register(&mut stream, PEER, Interest::READABLE | Interest::WRITABLE)?;
        let (input, output) = (Vec::new(), Vec::new());
        Ok(WireOut { stream, input, output, is_readable: false, is_writable: false })
    }

    /// Small messages are not held back.
    pub fn hurry(&self) -> io::Result<()> {
        self.stream.set_nodelay(true)
    }

    /// Sends what there is, and returns as soon as something was read, somebody has woken the poll, or it is `until`. Does not
    /// read unless `reads`: the peer then stops by itself.
    ///
    /// # Errors
    /// The connection is over.
    pub fn pump(
        &mut self,
        poll: &mut Poll,
        events: &mut Events,
        env: &Env,
        until: Duration,
        reads: bool,
    ) -> io::Result<()> {
        self.flush()?;
        if reads && self.is_readable && self.fill()? {
            return Ok(());
        }
        let patience = until.saturating_sub(env.clock.monotonic());
        match poll.poll(events, Some(patience)) {
            Err(error) if error.kind() == ErrorKind::Interrupted => return Ok(()),
            result => result?,
        }
        for event in events.iter().filter(|event| event.token() == PEER) {
            self.is_readable |= event.is_readable() || event.is_read_closed() || event.is_error();
            self.is_writable |= event.is_writable() || event.is_write_closed() || event.is_error();
        }
        self.flush()?;
        if reads && self.is_readable {
            self.fill()?;
        }
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        let mut sent = 0;
        while self.is_writable && sent < self.output.len() {
            match self.stream.write(&self.output[sent..]) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(n) => sent += n,
                Err(error) if error.kind() == ErrorKind::WouldBlock => self.is_writable = false,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        self.output.drain(..sent);
        Ok(())
    }

    /// Reads some. False: there is nothing.
    fn fill(&mut self) -> io::Result<bool> {
        let len = self.input.len();
        self.input.resize(len + CHUNK_LEN, 0);
        let result = loop {
            match self.stream.read(&mut self.input[len..]) {
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                result => break result,
            }
        };
        self.input.truncate(len + *result.as_ref().unwrap_or(&0));
        match result {
            Ok(0) => Err(io::Error::new(ErrorKind::UnexpectedEof, "the peer closed the connection")),
            Ok(_) => Ok(true),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                self.is_readable = false;
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }
}
