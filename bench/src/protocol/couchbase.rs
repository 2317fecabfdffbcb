//! Our own protocol: HELLO, a proof of the password, a bucket, then documents by vBucket.

use std::collections::BTreeMap;
use std::net::TcpStream;
use std::sync::Arc;

use anyhow::{Result, anyhow, bail};
use frontend::auth::scram::{Client as Scram, Hash};
use types::Level;
use wire::client::{RequestFrame, hello_value, status, store_extras};
use wire::{Feature, FrameReader, Next, Opcode, Side, Status};

use super::memcached::parse_frame;
use super::{Action, Parsed, Protocol, exchange};
use crate::route::{Route, vbucket_of};

/// How one gets in and what for.
#[derive(Clone, Debug)]
pub struct Login {
    pub user: String,
    pub password: String,
    pub bucket: String,
}

/// What all connections of a run share, learnt by the first.
#[derive(Debug)]
pub struct Shape {
    login: Login,
    route: Route,
    /// Framing extras of a write.
    framing: Vec<u8>,
}

impl Shape {
    /// Logs in once, with a proof from both sides, and asks the server, which was dialled as `address`, where the bucket's
    /// vBuckets are.
    ///
    /// # Errors
    /// The server refuses the user or the bucket, or has no map of it.
    pub fn learn(stream: &mut TcpStream, address: &str, login: Login, level: Option<Level>) -> Result<Shape> {
        hello(stream)?;
        scram(stream, &login)?;
        select(stream, &login.bucket)?;
        let route = ask_route(stream, address)?;
        let mut framing = Vec::new();
        if let Some(level) = level {
            wire::frame_info::push_durability(&mut framing, level, None);
        }
        Ok(Shape { login, route, framing })
    }

    /// Where the vBuckets were when the run was prepared.
    pub fn route(&self) -> &Route {
        &self.route
    }
}

pub struct Couchbase {
    shape: Arc<Shape>,
}

impl Couchbase {
    pub fn new(shape: Arc<Shape>) -> Couchbase {
        Couchbase { shape }
    }
}

impl Protocol for Couchbase {
    fn open(&mut self, stream: &mut TcpStream) -> Result<()> {
        hello(stream)?;
        // Thousands of connections would each pay the thousands of rounds that make a proof slow on purpose. The server
        // has proven itself to the first of them; on loopback nobody listens.
        if stream.peer_addr()?.ip().is_loopback() {
            plain(stream, &self.shape.login)?;
        } else {
            scram(stream, &self.shape.login)?;
        }
        select(stream, &self.shape.login.bucket)
    }

    fn encode(&mut self, key: &[u8], action: Action<'_>, ticket: u32, out: &mut Vec<u8>) {
        let vbucket = vbucket_of(key, self.shape.route.vbuckets());
        match action {
            Action::Get => RequestFrame { vbucket, opaque: ticket, key, ..RequestFrame::new(Opcode::Get) }.encode(out),
            Action::Set(value) => {
                let (extras, framing_extras) = (store_extras(0, 0), &self.shape.framing);
                let set = RequestFrame::new(Opcode::Set);
                RequestFrame { vbucket, opaque: ticket, framing_extras, extras: &extras, key, value, ..set }
                    .encode(out);
            }
        }
    }

    fn parse(&mut self, input: &[u8]) -> Result<Parsed> {
        parse_frame(input)
    }
}

/// Has one vBucket's file of the selected bucket compacted, and waits for the end of it.
///
/// # Errors
/// The server refuses, or the compaction fails.
pub fn compact(stream: &mut TcpStream, vbucket: u16) -> Result<()> {
    let request = RequestFrame { vbucket, extras: &[0; 24], ..RequestFrame::new(Opcode::CompactDb) };
    match call(stream, &request)?.0 {
        Status::Success => Ok(()),
        code => Err(anyhow!("vBucket {vbucket} was not compacted: {}", code.name())),
    }
}

/// Asks a connection that is ready where the vBuckets of its bucket are; it goes to the server at `address`.
///
/// # Errors
/// The server does not tell, or what it tells is no map.
pub fn ask_route(stream: &mut TcpStream, address: &str) -> Result<Route> {
    match call(stream, &RequestFrame::new(Opcode::GetClusterConfig))? {
        (Status::Success, document) => Route::parse(&document, address),
        (code, _) => Err(anyhow!("the server does not tell its configuration: {}", code.name())),
    }
}

/// Every line of a group of statistics.
///
/// # Errors
/// The server refuses, or has no such group.
pub fn stats(stream: &mut TcpStream, group: &str) -> Result<BTreeMap<String, String>> {
    let request = RequestFrame { key: group.as_bytes(), ..RequestFrame::new(Opcode::Stat) }.to_bytes();
    exchange(stream, &request, |input| {
        let (mut lines, mut at) = (BTreeMap::new(), 0);
        while let Next::Frame(frame) = FrameReader::new(Side::Client).next(&input[at..])? {
            match status(&frame) {
                Ok(Status::Success) if frame.key.is_empty() => return Ok(Some(lines)),
                Ok(Status::Success) => {}
                other => bail!("the server does not tell its statistics {group:?}: {other:?}"),
            }
            let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
            lines.insert(text(frame.key), text(frame.value));
            at += frame.frame_len();
        }
        Ok(None)
    })
}

fn hello(stream: &mut TcpStream) -> Result<()> {
    let features = [
        Feature::TcpNoDelay,
        Feature::Xerror,
        Feature::SelectBucket,
        Feature::AltRequestSupport,
        Feature::SyncReplication,
        // Durable writes of one connection are then under way side by side.
        Feature::UnorderedExecution,
    ];
    let codes: Vec<u16> = features.iter().map(|feature| *feature as u16).collect();
    let agent = concat!("settee-bench/", env!("CARGO_PKG_VERSION")).as_bytes();
    let value = hello_value(&codes);
    let (code, _) = call(stream, &RequestFrame { key: agent, value: &value, ..RequestFrame::new(Opcode::Hello) })?;
    if code == Status::Success { Ok(()) } else { Err(anyhow!("the server refuses HELLO: {}", code.name())) }
}

fn plain(stream: &mut TcpStream, login: &Login) -> Result<()> {
    let value = format!("\0{}\0{}", login.user, login.password);
    let auth = RequestFrame { key: b"PLAIN", value: value.as_bytes(), ..RequestFrame::new(Opcode::SaslAuth) };
    match call(stream, &auth)?.0 {
        Status::Success => Ok(()),
        code => Err(anyhow!("the server refuses user {:?}: {}", login.user, code.name())),
    }
}

fn scram(stream: &mut TcpStream, login: &Login) -> Result<()> {
    let env = env::os::env();
    let mut client = Scram::new(Hash::Sha512, &login.user, &login.password, |bytes| env.rng.fill(bytes));
    let key = Hash::Sha512.mechanism().as_bytes();
    let first = client.first();
    let (code, challenge) = call(stream, &RequestFrame { key, value: &first, ..RequestFrame::new(Opcode::SaslAuth) })?;
    if code != Status::AuthContinue {
        bail!("the server offers no {}: {}", Hash::Sha512.mechanism(), code.name());
    }
    let proof = client.respond(&challenge).map_err(|failure| anyhow!("cannot answer the challenge: {failure:?}"))?;
    let (code, last) = call(stream, &RequestFrame { key, value: &proof, ..RequestFrame::new(Opcode::SaslStep) })?;
    if code != Status::Success {
        bail!("the server refuses user {:?}: wrong name or password ({})", login.user, code.name());
    }
    if !client.verify(&last) {
        bail!("the server does not know the password of {:?}: is this the right server?", login.user);
    }
    Ok(())
}

fn select(stream: &mut TcpStream, bucket: &str) -> Result<()> {
    match call(stream, &RequestFrame { key: bucket.as_bytes(), ..RequestFrame::new(Opcode::SelectBucket) })?.0 {
        Status::Success => Ok(()),
        code => Err(anyhow!("cannot use bucket {bucket:?}: {}", code.name())),
    }
}

fn call(stream: &mut TcpStream, request: &RequestFrame<'_>) -> Result<(Status, Vec<u8>)> {
    exchange(stream, &request.to_bytes(), |input| match FrameReader::new(Side::Client).next(input)? {
        Next::Need(_) => Ok(None),
        Next::Malformed(header) => bail!("the server sent a frame that does not add up: {header:?}"),
        Next::Frame(frame) => {
            let code = status(&frame).map_err(|code| anyhow!("unknown status {code:#06x}"))?;
            Ok(Some((code, frame.value.to_vec())))
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_carry_the_durability_and_reads_do_not() {
        let mut framing = Vec::new();
        wire::frame_info::push_durability(&mut framing, Level::PersistMajority, None);
        let login = Login { user: String::new(), password: String::new(), bucket: String::new() };
        let mut couchbase = Couchbase::new(Arc::new(Shape { login, route: Route::to_one("n:1"), framing }));
        let mut out = Vec::new();
        couchbase.encode(b"key", Action::Set(b"v"), 9, &mut out);
        assert_eq!((out[0], out[2], out[24], out[25]), (0x08, 2, 0x11, 3));
        out.clear();
        couchbase.encode(b"key", Action::Get, 9, &mut out);
        assert_eq!((out[0], out[15], out.len()), (0x80, 9, 27));
    }
}
