//! One connection of a load: bytes in and out, and which requests are under way.

use std::collections::VecDeque;
use std::io::{self, Read, Write};

use anyhow::{Context, Result, bail};
use mio::net::TcpStream;

use crate::protocol::{Action, Answer, Parsed, Protocol};

/// A request under way.
#[derive(Clone, Copy, Debug, Default)]
pub struct UnderWay {
    /// From when its latency counts.
    pub began_ns: u64,
    /// Counts towards a run of a fixed number of operations.
    pub counted: bool,
}

/// 1. At most `depth` requests are under way; each has a ticket that no other has.
/// 2. A reply ends the request whose ticket it carries, or the oldest if the protocol keeps order.
/// 3. After an event the socket has been read until it was empty, so the next event is not missed.
pub struct Connection {
    pub stream: TcpStream,
    protocol: Box<dyn Protocol>,
    /// The start of a reply whose rest has not arrived.
    input: Vec<u8>,
    output: Vec<u8>,
    /// Bytes of `output` that are sent.
    sent: usize,
    tickets: Vec<Option<UnderWay>>,
    free: Vec<u32>,
    order: VecDeque<u32>,
}

/// What one reading of the socket gave.
pub enum Read1 {
    Open,
    Closed,
}

impl Connection {
    pub fn new(stream: TcpStream, protocol: Box<dyn Protocol>, depth: u32) -> Connection {
        let tickets = vec![None; depth as usize];
        let free = (0..depth).rev().collect();
        let (input, output, order) = Default::default();
        Connection { stream, protocol, input, output, sent: 0, tickets, free, order }
    }

    pub fn has_room(&self) -> bool {
        !self.free.is_empty()
    }

    /// The ticket of the next request.
    pub fn next_ticket(&self) -> u32 {
        *self.free.last().expect("the caller has seen room")
    }

    /// Requests under way.
    pub fn under_way(&self) -> impl Iterator<Item = UnderWay> {
        self.tickets.iter().copied().flatten()
    }

    /// Queues a request; [`Connection::flush`] sends it.
    pub fn push(&mut self, key: &[u8], action: Action<'_>, what: UnderWay) {
        let ticket = self.free.pop().expect("the caller has seen room");
        self.tickets[ticket as usize] = Some(what);
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
    pub fn receive(
        &mut self,
        scratch: &mut [u8],
        closing: bool,
        mut each: impl FnMut(UnderWay, Answer),
    ) -> Result<Read1> {
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

    fn take_answers(&mut self, input: &[u8], each: &mut impl FnMut(UnderWay, Answer)) -> Result<usize> {
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

    fn end(&mut self, ticket: Option<u32>) -> Result<UnderWay> {
        let ticket = match ticket {
            // Nearly always the oldest, even where it need not be.
            Some(ticket) if self.order.front() != Some(&ticket) => {
                let at = self.order.iter().position(|t| *t == ticket);
                at.and_then(|at| self.order.remove(at)).context("an answer to a request that is not under way")?
            }
            _ => self.order.pop_front().context("an answer without a request")?,
        };
        let Some(ended) = self.tickets.get_mut(ticket as usize).and_then(Option::take) else {
            bail!("two answers to one request");
        };
        self.free.push(ticket);
        Ok(ended)
    }
}
