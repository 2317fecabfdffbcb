//! One protocol a file: a request into bytes, a reply out of bytes, and how a connection is made ready. Everything else
//! about driving a server is the same code for all of them.

pub mod couchbase;
pub mod etcd;
pub mod memcached;
pub mod postgres;
pub mod redis;

use std::io::{Read, Write};
use std::net::TcpStream;

use anyhow::{Context, Result, bail};

/// What to do to a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action<'a> {
    Get,
    /// Stores this value whatever was there.
    Set(&'a [u8]),
}

/// What a server answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    Done,
    /// There is no such key: an answer, not an error.
    Miss,
    /// Another node has it: with the map of who has what, if the server sent one.
    Elsewhere(Vec<u8>),
    /// In the server's own words.
    Error(String),
}

/// What is at the front of the bytes received.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Parsed {
    /// Not yet a whole reply.
    Incomplete,
    Reply {
        /// Bytes it took.
        len: usize,
        answer: Answer,
        /// The ticket of the request, where replies may overtake each other. `None`: the oldest request's.
        ticket: Option<u32>,
    },
}

impl Parsed {
    pub fn reply(len: usize, answer: Answer) -> Parsed {
        Parsed::Reply { len, answer, ticket: None }
    }
}

/// One connection's side of a protocol.
pub trait Protocol: Send {
    /// Makes a fresh connection ready for requests. The stream blocks, and has time limits.
    ///
    /// # Errors
    /// The server refuses, or speaks something else.
    fn open(&mut self, stream: &mut TcpStream) -> Result<()>;

    /// Appends a request; `ticket` is told apart from those of other requests under way on this connection.
    fn encode(&mut self, key: &[u8], action: Action<'_>, ticket: u32, out: &mut Vec<u8>);

    /// Looks at the front of what was received.
    ///
    /// # Errors
    /// The bytes are not this protocol: the connection is of no more use.
    fn parse(&mut self, input: &[u8]) -> Result<Parsed>;
}

/// Sends bytes and reads until `look` has found what it looks for: enough for the few steps of making a connection
/// ready.
pub(crate) fn exchange<T>(
    stream: &mut TcpStream,
    request: &[u8],
    mut look: impl FnMut(&[u8]) -> Result<Option<T>>,
) -> Result<T> {
    stream.write_all(request).context("the server closed the connection")?;
    let mut input = Vec::new();
    let mut chunk = [0; 4096];
    loop {
        if let Some(found) = look(&input)? {
            return Ok(found);
        }
        match stream.read(&mut chunk).context("no answer from the server")? {
            0 => bail!("the server closed the connection"),
            n => input.extend_from_slice(&chunk[..n]),
        }
    }
}

/// The line at the front, without its end, and the bytes both take.
pub(crate) fn line(input: &[u8]) -> Option<(&[u8], usize)> {
    let end = input.windows(2).position(|pair| pair == b"\r\n")?;
    Some((&input[..end], end + 2))
}

/// Decimal digits as a length; `None` if they are none, or say more than 4 GiB.
pub(crate) fn decimal(digits: &[u8]) -> Option<usize> {
    let number: u32 = std::str::from_utf8(digits).ok()?.parse().ok()?;
    usize::try_from(number).ok()
}

/// A server's words, fit for a table.
pub(crate) fn words(bytes: &[u8]) -> String {
    String::from_utf8_lossy(&bytes[..bytes.len().min(80)]).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    pub fn bytes_of(protocol: &mut dyn Protocol, key: &[u8], action: Action<'_>) -> Vec<u8> {
        let mut out = Vec::new();
        protocol.encode(key, action, 7, &mut out);
        out
    }

    /// The answers in a stream; the same for every place at which its first part ends.
    pub fn replies(protocol: impl Fn() -> Box<dyn Protocol>, stream: &[u8]) -> Vec<Answer> {
        let at_cut = |cut: usize| {
            let (mut protocol, mut answers, mut at) = (protocol(), Vec::new(), 0);
            for end in [cut, stream.len()] {
                while let Parsed::Reply { len, answer, .. } = protocol.parse(&stream[at..end]).unwrap() {
                    answers.push(answer);
                    at += len;
                }
            }
            assert_eq!(at, stream.len(), "cut at {cut}: all is taken");
            answers
        };
        let whole = at_cut(stream.len());
        assert!((0..stream.len()).all(|cut| at_cut(cut) == whole));
        whole
    }
}
