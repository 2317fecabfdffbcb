//! One connection of a load: bytes in and out, and which requests wait for an answer on it.

use std::collections::VecDeque;
use std::io::{self, Read, Write};

use anyhow::{Context, Result};
use mio::net::TcpStream;

use crate::protocol::{Action, Answer, Parsed, Protocol};

/// 1. A reply ends the request whose ticket it carries, or the oldest if the protocol keeps order.
/// 2. After an event the socket has been read until it was empty, so the next event is not missed.
pub struct Connection {
    pub stream: TcpStream,
    protocol: Box<dyn Protocol>,
    /// The start of a reply whose rest has not arrived.
    input: Vec<u8>,
    output: Vec<u8>,
    /// Bytes of `output` that are sent.
    sent: usize,
    /// Tickets of requests under way, oldest first.
    order: VecDeque<u32>,
}

/// What one reading of the socket gave.
pub enum Read1 {
    Open,
    Closed,
}

impl Connection {
    pub fn new(stream: TcpStream, protocol: Box<dyn Protocol>) -> Connection {
        let (input, output, order) = Default::default();
        Connection { stream, protocol, input, output, sent: 0, order }
    }

    /// Tickets of requests under way, oldest first.
    pub fn under_way(&self) -> impl Iterator<Item = u32> {
        self.order.iter().copied()
    }

    /// Queues a request; [`Connection::flush`] sends it. No other request under way has this ticket.
    pub fn push(&mut self, key: &[u8], action: Action<'_>, ticket: u32) {
        self.order.push_back(ticket);
        self.protocol.encode(key, action, ticket, &mut self.output);
    }

    /// Sends what is queued, as far as the socket takes it.
    pub fn flush(&mut self) -> io::Result<()> {
        while self.sent < self.output.len() {
            match self.stream.write(&self.output[self.sent..]) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(n) => self.sent += n,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        self.output.clear();
        self.sent = 0;
        Ok(())
    }

    /// Reads until the socket is empty, handing over every answer. `scratch` is anybody's; `closing`: the event told that
    /// the server has closed, and will not tell again.
    ///
    /// # Errors
    /// What came is not the protocol, or the connection broke.
    pub fn receive(&mut self, scratch: &mut [u8], closing: bool, mut each: impl FnMut(u32, Answer)) -> Result<Read1> {
        loop {
            let n = match self.stream.read(scratch) {
                Ok(0) => return Ok(Read1::Closed),
                Ok(n) => n,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(Read1::Open),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error.into()),
            };
            if self.input.is_empty() {
                let used = self.take_answers(&scratch[..n], &mut each)?;
                self.input.extend_from_slice(&scratch[used..n]);
            } else {
                let mut input = std::mem::take(&mut self.input);
                input.extend_from_slice(&scratch[..n]);
                let used = self.take_answers(&input, &mut each)?;
                input.drain(..used);
                self.input = input;
            }
            // Less than there was room for: the socket is empty, and says so when it no longer is.
            if n < scratch.len() && !closing {
                return Ok(Read1::Open);
            }
        }
    }

    fn take_answers(&mut self, input: &[u8], each: &mut impl FnMut(u32, Answer)) -> Result<usize> {
        let mut used = 0;
        while used < input.len() {
            match self.protocol.parse(&input[used..])? {
                Parsed::Incomplete => break,
                Parsed::Reply { len, answer, ticket } => {
                    used += len;
                    each(self.end(ticket)?, answer);
                }
            }
        }
        Ok(used)
    }

    fn end(&mut self, ticket: Option<u32>) -> Result<u32> {
        match ticket {
            // Nearly always the oldest, even where it need not be.
            Some(ticket) if self.order.front() != Some(&ticket) => {
                let at = self.order.iter().position(|t| *t == ticket);
                at.and_then(|at| self.order.remove(at)).context("an answer to a request that is not under way")
            }
            _ => self.order.pop_front().context("an answer without a request"),
        }
    }
}
