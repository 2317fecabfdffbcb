//! Speaking to another node until it knows who we are: one question at a time, each with an answer that is waited for.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use env::Env;
use limits::{Class, Permit};
use mio::{Events, Poll, Waker};
use replication::{Broken, Consumer};
use wire::client::{RequestFrame, hello_value, status};
use wire::{Frame, FrameReader, Next, Opcode, Side, Status};

use super::Credentials;
use super::wire_out::{WAKE, WireOut};
use crate::Shared;
use crate::auth::scram::{self, Hash};
use crate::cluster::Map;

/// A poller, a waker and the socket.
const DESCRIPTORS: u32 = 3;

#[derive(Debug, thiserror::Error)]
pub(super) enum Failure {
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("{0}")]
    Broken(#[from] Broken),
    #[error("{0}")]
    Login(String),
    /// Nobody wants it any more.
    #[error("stopped")]
    Stopped,
}

/// Ends a caller, and wakes it, from other threads.
pub(super) struct Leash {
    is_stopping: AtomicBool,
    waker: Waker,
}

impl Leash {
    pub fn stop(&self) {
        self.is_stopping.store(true, Ordering::Release);
        self.wake();
    }

    pub fn wake(&self) {
        if let Err(error) = self.waker.wake() {
            panic!("waking a thread that speaks to another node: {error}");
        }
    }
}

/// What a thread that speaks to other nodes owns.
pub(super) struct Caller {
    pub env: Env,
    credentials: Credentials,
    poll: Poll,
    events: Events,
    leash: Arc<Leash>,
    _permit: Permit,
}

impl Caller {
    /// # Errors
    /// There is no way to log in, or no room for more descriptors.
    pub fn new(shared: &Shared) -> Result<Caller, String> {
        let credentials = shared.options.credentials.clone();
        let credentials = credentials.ok_or("this node knows no password to log in there with")?;
        let permit = shared.ledger.take_many(Class::Connections, DESCRIPTORS).ok_or("all connections are taken")?;
        let text = |error: io::Error| error.to_string();
        let poll = Poll::new().map_err(text)?;
        let waker = Waker::new(poll.registry(), WAKE).map_err(text)?;
        let leash = Arc::new(Leash { is_stopping: AtomicBool::new(false), waker });
        let (env, events) = (shared.env.clone(), Events::with_capacity(8));
        Ok(Caller { env, credentials, poll, events, leash, _permit: permit })
    }

    pub fn leash(&self) -> Arc<Leash> {
        Arc::clone(&self.leash)
    }

    pub fn check(&self) -> Result<(), Failure> {
        if self.leash.is_stopping.load(Ordering::Acquire) { Err(Failure::Stopped) } else { Ok(()) }
    }

    pub fn now(&self) -> Duration {
        self.env.clock.monotonic()
    }

    /// Lets some time pass.
    pub fn rest(&mut self, pause: Duration) -> Result<(), Failure> {
        let until = self.now() + pause;
        while self.now() < until {
            self.check()?;
            let patience = until.saturating_sub(self.now());
            match self.poll.poll(&mut self.events, Some(patience)) {
                Err(error) if error.kind() != io::ErrorKind::Interrupted => return Err(error.into()),
                _ => {}
            }
        }
        self.check()
    }

    pub fn pump(&mut self, wire: &mut WireOut, until: Duration, reads: bool) -> Result<(), Failure> {
        Ok(wire.pump(&mut self.poll, &mut self.events, &self.env, until, reads)?)
    }

    /// Says who we are, has the peer prove that it knows the password too, and selects the bucket. Each answer may take
    /// `patience`.
    pub fn log_in(&mut self, peer: &str, bucket: &str, patience: Duration) -> Result<WireOut, Failure> {
        let mut wire = WireOut::connect(&self.poll, peer)?;
        let mut features = Vec::new();
        Consumer::FEATURES.encode(&mut features);
        let codes: Vec<u16> = features.as_chunks::<2>().0.iter().map(|code| u16::from_be_bytes(*code)).collect();
        let agent = concat!("settee-node/", env!("CARGO_PKG_VERSION"));
        let hello =
            RequestFrame { key: agent.as_bytes(), value: &hello_value(&codes), ..RequestFrame::new(Opcode::Hello) };
        let (_, agreed) = self.ask(&mut wire, &hello, &[Status::Success], patience)?;
        if agreed != features {
            return Err(Failure::Login("the peer does not know all that replication needs".to_owned()));
        }
        wire.hurry()?;
        let Credentials { user, password } = self.credentials.clone();
        let mut exchange = scram::Client::new(Hash::Sha512, &user, &password, |bytes| self.env.rng.fill(bytes));
        let key = Hash::Sha512.mechanism().as_bytes();
        let first = RequestFrame { key, value: &exchange.first(), ..RequestFrame::new(Opcode::SaslAuth) };
        let (_, challenge) = self.ask(&mut wire, &first, &[Status::AuthContinue], patience)?;
        let proof = exchange.respond(&challenge);
        let proof = proof.map_err(|failure| Failure::Login(format!("its challenge makes no sense: {failure:?}")))?;
        let last = RequestFrame { key, value: &proof, ..RequestFrame::new(Opcode::SaslStep) };
        let (status, word) = self.ask(&mut wire, &last, &[Status::Success, Status::AuthError], patience)?;
        if status != Status::Success || !exchange.verify(&word) {
            return Err(Failure::Login(format!("user {user:?} has another password there")));
        }
        let select = RequestFrame { key: bucket.as_bytes(), ..RequestFrame::new(Opcode::SelectBucket) };
        self.ask(&mut wire, &select, &[Status::Success], patience)?;
        Ok(wire)
    }

    /// The map that the peer goes by.
    pub fn ask_for_map(&mut self, wire: &mut WireOut, patience: Duration) -> Result<Map, Failure> {
        let request = RequestFrame::new(Opcode::GetClusterConfig);
        let (_, text) = self.ask(wire, &request, &[Status::Success], patience)?;
        let (map, _) = Map::parse(&text).map_err(|why| Failure::Login(format!("its map makes no sense: {why}")))?;
        Ok(map)
    }

    /// Sends a request and waits for its answer, which has to be one of these.
    fn ask(
        &mut self,
        wire: &mut WireOut,
        request: &RequestFrame<'_>,
        expected: &[Status],
        patience: Duration,
    ) -> Result<(Status, Vec<u8>), Failure> {
        request.encode(&mut wire.output);
        let until = self.now() + patience;
        loop {
            self.check()?;
            match FrameReader::new(Side::Client).next(&wire.input).map_err(Broken::from)? {
                Next::Frame(frame) => {
                    let answer = answer_of(&frame)?;
                    let len = frame.frame_len();
                    wire.input.drain(..len);
                    return match expected.contains(&answer.0) {
                        true => Ok(answer),
                        false => Err(Failure::Login(format!("opcode {:#04x}: {}", request.opcode, answer.0.name()))),
                    };
                }
                Next::Malformed(header) => return Err(Failure::Login(format!("{header:?} does not add up"))),
                Next::Need(_) if self.now() >= until => {
                    return Err(Failure::Login(format!("no answer within {patience:?}")));
                }
                Next::Need(_) => self.pump(wire, until, true)?,
            }
        }
    }
}

fn answer_of(frame: &Frame<'_>) -> Result<(Status, Vec<u8>), Failure> {
    let status = status(frame).map_err(|code| Failure::Login(format!("status {code:#06x}")))?;
    Ok((status, frame.value.to_vec()))
}
