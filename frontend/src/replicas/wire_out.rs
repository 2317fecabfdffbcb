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

/// Events say when a socket *became* ready, so both flags are kept until a call says "would block", or a read leaves room:
/// then there is no more, and what comes later is an event again. Only an end that has been announced is not announced twice.
pub(super) struct WireOut {
    stream: TcpStream,
    pub input: Vec<u8>,
    pub output: Vec<u8>,
    /// What is read goes through here, so that room for it need not be cleared each time.
    chunk: Box<[u8]>,
    is_readable: bool,
    is_writable: bool,
    /// The peer sends nothing after what is there.
    is_ending: bool,
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
        Ok(WireOut {
            stream,
            input: Vec::new(),
            output: Vec::new(),
            chunk: vec![0; CHUNK_LEN].into(),
            is_readable: false,
            is_writable: false,
            is_ending: false,
        })
    }

    /// Small messages are not held back.
    pub fn hurry(&self) -> io::Result<()> {
        self.stream.set_nodelay(true)
    }

    /// As far as is known, the peer has sent nothing that was not read.
    pub fn is_drained(&self) -> bool {
        !self.is_readable
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
            self.is_ending |= event.is_read_closed() || event.is_error();
            self.is_readable |= event.is_readable() || self.is_ending;
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
        let result = loop {
            match self.stream.read(&mut self.chunk) {
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                result => break result,
            }
        };
        match result {
            Ok(0) => Err(io::Error::new(ErrorKind::UnexpectedEof, "the peer closed the connection")),
            Ok(len) => {
                self.input.extend_from_slice(&self.chunk[..len]);
                self.is_readable = len == CHUNK_LEN || self.is_ending;
                Ok(true)
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                self.is_readable = false;
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }
}
