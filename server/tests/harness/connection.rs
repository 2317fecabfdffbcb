//! A client that can also misbehave: requests are sent as they are given, any number before the first answer is read.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};

use frontend::auth::scram::{self, Hash};
use types::Level;
use wire::client::{RequestFrame, hello_value, status, store_extras};
use wire::{Feature, FrameReader, Next, Opcode, Side, Status, frame_info};

use super::{PASSWORD, PATIENCE, USER};

/// What our clients negotiate if a test does not say.
pub const FEATURES: &[Feature] = &[
    Feature::MutationSeqno,
    Feature::Xattr,
    Feature::Xerror,
    Feature::SelectBucket,
    Feature::Snappy,
    Feature::Json,
    Feature::AltRequestSupport,
    Feature::SyncReplication,
];

pub struct Connection {
    stream: TcpStream,
    /// Read and not yet taken.
    input: Vec<u8>,
    opaque: u32,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reply {
    pub opcode: u8,
    pub status: Status,
    pub opaque: u32,
    pub cas: u64,
    pub datatype: u8,
    pub extras: Vec<u8>,
    pub key: Vec<u8>,
    pub value: Vec<u8>,
}

impl Reply {
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.value).into_owned()
    }

    /// The vBucket's uuid and the seqno that a write got.
    pub fn token(&self) -> Option<(u64, u64)> {
        let (uuid, seqno) = self.extras.split_first_chunk::<8>()?;
        Some((u64::from_be_bytes(*uuid), u64::from_be_bytes(seqno.try_into().ok()?)))
    }
}

impl Connection {
    /// Connects and says nothing.
    pub fn open(address: &str) -> io::Result<Connection> {
        let stream = TcpStream::connect(address)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        Ok(Connection { stream, input: Vec::new(), opaque: 0 })
    }

    /// Connects, proves who it is with one message, and selects the bucket.
    pub fn log_in(address: &str, bucket: &str, features: &[Feature]) -> io::Result<Connection> {
        let mut client = Connection::open(address)?;
        client.hello(features)?;
        let plain = format!("\0{USER}\0{PASSWORD}");
        let proof = RequestFrame { key: b"PLAIN", value: plain.as_bytes(), ..RequestFrame::new(Opcode::SaslAuth) };
        assert_eq!(client.call(&proof)?.status, Status::Success, "PLAIN");
        if !bucket.is_empty() {
            let reply =
                client.call(&RequestFrame { key: bucket.as_bytes(), ..RequestFrame::new(Opcode::SelectBucket) })?;
            assert_eq!(reply.status, Status::Success, "{}", reply.text());
        }
        Ok(client)
    }

    /// The features the server agreed to, as it sent them.
    pub fn hello(&mut self, features: &[Feature]) -> io::Result<Vec<u8>> {
        let codes: Vec<u16> = features.iter().map(|&f| f as u16).collect();
        let hello =
            RequestFrame { key: b"settee-tests", value: &hello_value(&codes), ..RequestFrame::new(Opcode::Hello) };
        let reply = self.call(&hello)?;
        assert_eq!(reply.status, Status::Success, "{}", reply.text());
        Ok(reply.value)
    }

    /// The whole SCRAM exchange; the status of the message that ended it, and whether the server proved itself too.
    pub fn scram(&mut self, hash: Hash, user: &str, password: &str) -> io::Result<(Status, bool)> {
        let mut exchange = scram::Client::new(hash, user, password, |bytes| bytes.fill(7));
        let key = hash.mechanism().as_bytes();
        let challenge =
            self.call(&RequestFrame { key, value: &exchange.first(), ..RequestFrame::new(Opcode::SaslAuth) })?;
        if challenge.status != Status::AuthContinue {
            return Ok((challenge.status, false));
        }
        let proof = exchange.respond(&challenge.value).expect("a challenge as the standard has it");
        let last = self.call(&RequestFrame { key, value: &proof, ..RequestFrame::new(Opcode::SaslStep) })?;
        Ok((last.status, exchange.verify(&last.value)))
    }

    /// Sends a request under an opaque of its own, which it returns.
    pub fn send(&mut self, request: &RequestFrame<'_>) -> io::Result<u32> {
        self.opaque = self.opaque.wrapping_add(1);
        let bytes = RequestFrame { opaque: self.opaque, ..*request }.to_bytes();
        self.send_raw(&bytes)?;
        Ok(self.opaque)
    }

    pub fn send_raw(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.write_all(bytes)
    }

    /// Says that no more will come.
    pub fn finish_sending(&mut self) -> io::Result<()> {
        self.stream.shutdown(Shutdown::Write)
    }

    /// The next answer.
    ///
    /// # Errors
    /// `UnexpectedEof` when the server closed the connection; `InvalidData` when it sent what is no answer.
    pub fn receive(&mut self) -> io::Result<Reply> {
        loop {
            let found = FrameReader::new(Side::Client).next(&self.input).map_err(io::Error::other)?;
            match found {
                Next::Frame(frame) => {
                    let code = |code| invalid(format!("unknown status {code:#06x}"));
                    let reply = Reply {
                        opcode: frame.header.opcode,
                        status: status(&frame).map_err(code)?,
                        opaque: frame.header.opaque,
                        cas: frame.header.cas,
                        datatype: frame.header.datatype,
                        extras: frame.extras.to_vec(),
                        key: frame.key.to_vec(),
                        value: frame.value.to_vec(),
                    };
                    if frame.header.magic.is_request() {
                        return Err(invalid(format!("a request: {frame:?}")));
                    }
                    let len = frame.frame_len();
                    self.input.drain(..len);
                    return Ok(reply);
                }
                Next::Malformed(header) => return Err(invalid(format!("a malformed answer: {header:?}"))),
                Next::Need(_) => {
                    let mut chunk = [0; 64 * 1024];
                    match self.stream.read(&mut chunk)? {
                        0 if self.input.is_empty() => return Err(io::ErrorKind::UnexpectedEof.into()),
                        0 => return Err(invalid(format!("{} bytes of an unfinished answer", self.input.len()))),
                        n => self.input.extend_from_slice(&chunk[..n]),
                    }
                }
            }
        }
    }

    /// Reads answers until the server closes the connection.
    ///
    /// # Errors
    /// It did not close, or sent what is no answer.
    pub fn receive_all(&mut self) -> io::Result<Vec<Reply>> {
        let mut replies = Vec::new();
        loop {
            match self.receive() {
                Ok(reply) => replies.push(reply),
                Err(error) if is_closed(&error) => return Ok(replies),
                Err(error) => return Err(error),
            }
        }
    }

    /// Sends one request and waits for its answer.
    pub fn call(&mut self, request: &RequestFrame<'_>) -> io::Result<Reply> {
        let opaque = self.send(request)?;
        let reply = self.receive()?;
        if (reply.opaque, reply.opcode) != (opaque, request.opcode) {
            return Err(invalid(format!(
                "{reply:?} is no answer to request {opaque} of opcode {:#04x}",
                request.opcode
            )));
        }
        Ok(reply)
    }

    pub fn get(&mut self, vbucket: u16, key: &str) -> io::Result<Reply> {
        self.call(&RequestFrame { vbucket, key: key.as_bytes(), ..RequestFrame::new(Opcode::Get) })
    }

    pub fn set(&mut self, vbucket: u16, key: &str, value: &[u8], durability: Option<Level>) -> io::Result<Reply> {
        let framing = framing(durability);
        self.call(&RequestFrame {
            vbucket,
            framing_extras: &framing,
            extras: &store_extras(0, 0),
            key: key.as_bytes(),
            value,
            ..RequestFrame::new(Opcode::Set)
        })
    }

    /// Every line of a STAT group.
    pub fn add(&mut self, vbucket: u16, key: &str, value: &[u8]) -> io::Result<Reply> {
        let (key, extras) = (key.as_bytes(), &[0; 8]);
        self.call(&RequestFrame { vbucket, key, extras, value, ..RequestFrame::new(Opcode::Add) })
    }

    pub fn stats(&mut self, group: &str) -> io::Result<Vec<(String, String)>> {
        self.send(&RequestFrame { key: group.as_bytes(), ..RequestFrame::new(Opcode::Stat) })?;
        let mut lines = Vec::new();
        loop {
            let reply = self.receive()?;
            assert_eq!(reply.status, Status::Success, "stats {group}: {}", reply.text());
            if reply.key.is_empty() && reply.value.is_empty() {
                return Ok(lines);
            }
            lines.push((String::from_utf8_lossy(&reply.key).into_owned(), reply.text()));
        }
    }
}

/// The framing extras of a write of this level.
pub fn framing(durability: Option<Level>) -> Vec<u8> {
    let mut framing = Vec::new();
    if let Some(level) = durability {
        frame_info::push_durability(&mut framing, level, None);
    }
    framing
}

/// Whether it means that the server is gone or has hung up, and nothing else.
pub fn is_closed(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionRefused, ConnectionReset, UnexpectedEof};
    matches!(error.kind(), UnexpectedEof | ConnectionReset | BrokenPipe | ConnectionAborted | ConnectionRefused)
}

fn invalid(what: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}
