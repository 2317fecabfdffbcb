//! A small blocking client of our own protocol, for `settee stats`, `settee bucket` and the tests.

use std::io::{Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use frontend::auth::scram::{self, Hash};
use wire::client::{RequestFrame, hello_value, status};
use wire::{Feature, FrameReader, Next, Opcode, Side, Status};

/// How long connecting, and any one answer, may take.
const PATIENCE: Duration = Duration::from_secs(30);

/// What the tools ask for.
pub const FEATURES: &[Feature] =
    &[Feature::Xerror, Feature::SelectBucket, Feature::Json, Feature::AltRequestSupport, Feature::SyncReplication];

/// One authenticated connection; one request at a time.
pub struct Client {
    stream: TcpStream,
    /// Bytes read and not yet consumed.
    input: Vec<u8>,
    opaque: u32,
}

/// What the server answered.
#[derive(Debug)]
pub struct Answer {
    pub status: Status,
    pub key: Vec<u8>,
    pub value: Vec<u8>,
}

impl Answer {
    /// The answer, or an error in words if it is anything but success.
    pub fn success(self) -> Result<Answer> {
        if self.status == Status::Success {
            return Ok(self);
        }
        let said = serde_json::from_slice::<serde_json::Value>(&self.value).ok();
        match said.as_ref().and_then(|body| body["error"]["context"].as_str()) {
            Some(context) => bail!("{}: {context}", self.status.name()),
            None => bail!("{} ({})", self.status.name(), self.status.description()),
        }
    }
}

impl Client {
    /// How long any one answer may take from now on.
    pub fn wait_for(&mut self, patience: Duration) -> Result<()> {
        Ok(self.stream.set_read_timeout(Some(patience))?)
    }

    /// Connects and says HELLO; no user yet.
    pub fn connect(address: &str, features: &[Feature]) -> Result<Client> {
        Client::connect_within(PATIENCE, address, features)
    }

    /// Likewise, with less patience, also for any one answer.
    pub fn connect_within(patience: Duration, address: &str, features: &[Feature]) -> Result<Client> {
        let unreachable = || format!("no server answers at {address}");
        let found = address.to_socket_addrs().with_context(unreachable)?.next().with_context(unreachable)?;
        let stream = TcpStream::connect_timeout(&found, patience).with_context(unreachable)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(patience))?;
        stream.set_write_timeout(Some(patience))?;
        let mut client = Client { stream, input: Vec::new(), opaque: 0 };
        let codes: Vec<u16> = features.iter().map(|f| *f as u16).collect();
        let agent = concat!("settee/", env!("CARGO_PKG_VERSION"));
        client
            .call(&RequestFrame {
                key: agent.as_bytes(),
                value: &hello_value(&codes),
                ..RequestFrame::new(Opcode::Hello)
            })?
            .success()?;
        Ok(client)
    }

    /// The connection itself, for who speaks another part of the protocol. Nothing may be under way.
    pub fn into_stream(self) -> TcpStream {
        self.stream
    }

    /// Proves who we are, and has the server prove that it knows the password too.
    pub fn authenticate(&mut self, user: &str, password: &str) -> Result<()> {
        let env = env::os::env();
        let mut exchange = scram::Client::new(Hash::Sha512, user, password, |bytes| env.rng.fill(bytes));
        let mechanism = Hash::Sha512.mechanism().as_bytes();
        let first = exchange.first();
        let challenge =
            self.call(&RequestFrame { key: mechanism, value: &first, ..RequestFrame::new(Opcode::SaslAuth) })?;
        if challenge.status != Status::AuthContinue {
            challenge.success()?;
            bail!("the server skipped the SCRAM challenge");
        }
        let proof = exchange
            .respond(&challenge.value)
            .map_err(|failure| anyhow::anyhow!("cannot answer the server's challenge: {failure:?}"))?;
        let last = self.call(&RequestFrame { key: mechanism, value: &proof, ..RequestFrame::new(Opcode::SaslStep) })?;
        if last.status != Status::Success {
            bail!("the server refused user {user:?}: wrong name or password");
        }
        if !exchange.verify(&last.value) {
            bail!("the server does not know the password of {user:?}: is this the right server?");
        }
        Ok(())
    }

    pub fn select_bucket(&mut self, bucket: &str) -> Result<()> {
        let answer = self.call(&RequestFrame { key: bucket.as_bytes(), ..RequestFrame::new(Opcode::SelectBucket) })?;
        answer.success().with_context(|| format!("cannot use bucket {bucket:?}"))?;
        Ok(())
    }

    /// Sends one request and waits for its answer.
    pub fn call(&mut self, request: &RequestFrame<'_>) -> Result<Answer> {
        self.send(request)?;
        self.receive()
    }

    /// Every line of a STAT group, in the server's order.
    pub fn stats(&mut self, group: &str) -> Result<Vec<(String, String)>> {
        self.send(&RequestFrame { key: group.as_bytes(), ..RequestFrame::new(Opcode::Stat) })?;
        let mut lines = Vec::new();
        loop {
            let answer = self.receive()?;
            if answer.status == Status::KeyEnoent {
                bail!("the server has no statistics called {group:?}");
            }
            let answer = answer.success()?;
            if answer.key.is_empty() && answer.value.is_empty() {
                return Ok(lines);
            }
            let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
            lines.push((text(&answer.key), text(&answer.value)));
        }
    }

    fn send(&mut self, request: &RequestFrame<'_>) -> Result<()> {
        self.opaque = self.opaque.wrapping_add(1);
        let bytes = RequestFrame { opaque: self.opaque, ..*request }.to_bytes();
        self.stream.write_all(&bytes).context("the server closed the connection")
    }

    fn receive(&mut self) -> Result<Answer> {
        loop {
            match FrameReader::new(Side::Client).next(&self.input)? {
                Next::Frame(frame) => {
                    let code = |code| anyhow::anyhow!("the server answered with unknown status {code:#06x}");
                    let answer = Answer {
                        status: status(&frame).map_err(code)?,
                        key: frame.key.to_vec(),
                        value: frame.value.to_vec(),
                    };
                    if frame.header.opaque != self.opaque {
                        bail!("the server answered request {} instead of {}", frame.header.opaque, self.opaque);
                    }
                    let len = frame.frame_len();
                    self.input.drain(..len);
                    return Ok(answer);
                }
                Next::Malformed(header) => bail!("the server sent a frame that does not add up: {header:?}"),
                Next::Need(_) => {
                    let mut chunk = [0; 16 * 1024];
                    let n = self.stream.read(&mut chunk).context("no answer from the server")?;
                    if n == 0 {
                        bail!("the server closed the connection");
                    }
                    self.input.extend_from_slice(&chunk[..n]);
                }
            }
        }
    }
}
