//! One link: a thread that follows the vBuckets of one bucket on one peer, for as long as it is wanted.

use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use engine::Bucket;
use env::Env;
use limits::{Class, Permit};
use mio::{Events, Poll, Waker};
use parking_lot::Mutex;
use replication::{Broken, Consumer, ConsumerFace};
use types::VbId;
use wire::client::{RequestFrame, hello_value, status};
use wire::{Frame, FrameReader, Next, Opcode, Side, Status};

use super::wire_out::{WAKE, WireOut};
use super::{Credentials, Route};
use crate::Shared;
use crate::auth::scram::{self, Hash};

/// How long connecting, and each answer while logging in, may take.
const LOGIN_MAX: Duration = Duration::from_secs(10);
/// The pause before a peer that cannot be reached is tried again, at first and at most.
const PAUSE_MIN: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(3);
/// A poller, a waker and the socket.
const DESCRIPTORS: u32 = 3;

#[derive(Debug, thiserror::Error)]
enum Failure {
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

/// What can be seen of a link.
#[derive(Default)]
pub(crate) struct LinkFace {
    pub consumer: Arc<ConsumerFace>,
    pub is_connected: AtomicBool,
    pub connects: AtomicU64,
    pub wanted: AtomicU64,
    /// Why it is not connected.
    pub trouble: Mutex<String>,
}

pub(super) struct Link {
    desk: Arc<Desk>,
    thread: JoinHandle<()>,
}

/// What a link's thread shares with others.
struct Desk {
    wants: Mutex<BTreeSet<VbId>>,
    /// Looked at by the thread: its wants, or the roles of vBuckets, are not what they were.
    has_news: AtomicBool,
    is_stopping: AtomicBool,
    waker: Waker,
    face: Arc<LinkFace>,
}

impl replication::Wake for Desk {
    fn wake(&self) {
        if let Err(error) = self.waker.wake() {
            panic!("waking a link: {error}");
        }
    }
}

impl Desk {
    fn look(&self) {
        self.has_news.store(true, Ordering::Release);
        replication::Wake::wake(self);
    }
}

impl Link {
    /// # Errors
    /// The bucket is gone, there is no way to log in, or no room for another thread or descriptor.
    pub fn start(shared: &Arc<Shared>, route: &Route, wants: BTreeSet<VbId>) -> Result<Link, String> {
        let bucket = shared.engine.bucket(&route.bucket).ok_or("the bucket is gone")?;
        let credentials = shared.options.credentials.clone();
        let credentials = credentials.ok_or("this node knows no password to log in there with")?;
        let permit = shared.ledger.take_many(Class::Connections, DESCRIPTORS).ok_or("all connections are taken")?;
        let text = |error: io::Error| error.to_string();
        let poll = Poll::new().map_err(text)?;
        let waker = Waker::new(poll.registry(), WAKE).map_err(text)?;
        let face = Arc::new(LinkFace::default());
        face.wanted.store(wants.len() as u64, Ordering::Relaxed);
        let desk = Arc::new(Desk {
            wants: Mutex::new(wants),
            has_news: AtomicBool::new(true),
            is_stopping: AtomicBool::new(false),
            waker,
            face,
        });
        let follower = Follower {
            env: shared.env.clone(),
            bucket,
            route: route.clone(),
            credentials,
            desk: Arc::clone(&desk),
            poll,
            events: Events::with_capacity(8),
            _permit: permit,
        };
        let name = format!("replica-{}", route.peer);
        let thread = thread::Builder::new().name(name).spawn(|| follower.run()).map_err(text)?;
        Ok(Link { desk, thread })
    }

    pub fn wants(&self) -> BTreeSet<VbId> {
        self.desk.wants.lock().clone()
    }

    /// These from now on: all it had and more.
    pub fn want(&self, vbs: BTreeSet<VbId>) {
        self.desk.face.wanted.store(vbs.len() as u64, Ordering::Relaxed);
        *self.desk.wants.lock() = vbs;
        self.desk.look();
    }

    /// Asks again for what came to nothing before.
    pub fn look(&self) {
        self.desk.look();
    }

    /// It ends soon.
    pub fn stop(&self) {
        self.desk.is_stopping.store(true, Ordering::Release);
        self.desk.look();
    }

    /// Once it has ended nothing more is applied. Call [`Link::stop`] first.
    pub fn join(self) {
        if self.thread.join().is_err() {
            tracing::error!("a link to another node panicked");
        }
    }

    pub fn face(&self) -> Arc<LinkFace> {
        Arc::clone(&self.desk.face)
    }
}

/// What the thread owns.
struct Follower {
    env: Env,
    bucket: Arc<Bucket>,
    route: Route,
    credentials: Credentials,
    desk: Arc<Desk>,
    poll: Poll,
    events: Events,
    _permit: Permit,
}

impl Follower {
    fn run(mut self) {
        let mut pause = PAUSE_MIN;
        loop {
            let failure = match self.follow() {
                Err(Failure::Stopped) | Ok(()) => return,
                Err(failure) => failure.to_string(),
            };
            let face = &self.desk.face;
            let was_connected = face.is_connected.swap(false, Ordering::Relaxed);
            let is_new = std::mem::replace(&mut *face.trouble.lock(), failure.clone()) != failure;
            if was_connected {
                pause = PAUSE_MIN;
            }
            if was_connected || is_new {
                tracing::warn!(bucket = self.route.bucket, peer = self.route.peer, "replicas do not follow: {failure}");
            }
            if self.rest(pause).is_err() {
                return;
            }
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }

    fn check(&self) -> Result<(), Failure> {
        if self.desk.is_stopping.load(Ordering::Acquire) { Err(Failure::Stopped) } else { Ok(()) }
    }

    fn now(&self) -> Duration {
        self.env.clock.monotonic()
    }

    /// Lets some time pass.
    fn rest(&mut self, pause: Duration) -> Result<(), Failure> {
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

    /// One connection, from its beginning to its end.
    fn follow(&mut self) -> Result<(), Failure> {
        let mut wire = WireOut::connect(&self.poll, &self.route.peer)?;
        self.log_in(&mut wire)?;
        let face = Arc::clone(&self.desk.face);
        face.is_connected.store(true, Ordering::Relaxed);
        face.connects.fetch_add(1, Ordering::Relaxed);
        face.trouble.lock().clear();
        tracing::info!(bucket = self.route.bucket, peer = self.route.peer, "replicas follow");
        let wake = Arc::clone(&self.desk) as Arc<dyn replication::Wake>;
        let now = self.now();
        let mut consumer = Consumer::open(&self.bucket, &self.route.node, wake, Arc::clone(&face.consumer), now);
        self.desk.has_news.store(true, Ordering::Release);
        loop {
            self.check()?;
            if self.desk.has_news.swap(false, Ordering::AcqRel) {
                consumer.want(&self.desk.wants.lock());
            }
            let now = self.now();
            consumer.turn(now)?;
            let taken = consumer.receive(&wire.input, now)?;
            wire.input.drain(..taken);
            wire.output.append(consumer.output());
            self.pump(&mut wire, consumer.deadline(), !consumer.is_full())?;
        }
    }

    fn pump(&mut self, wire: &mut WireOut, until: Duration, reads: bool) -> Result<(), Failure> {
        Ok(wire.pump(&mut self.poll, &mut self.events, &self.env, until, reads)?)
    }

    /// Says who we are, has the peer prove that it knows the password too, and selects the bucket.
    fn log_in(&mut self, wire: &mut WireOut) -> Result<(), Failure> {
        let mut features = Vec::new();
        Consumer::FEATURES.encode(&mut features);
        let codes: Vec<u16> = features.as_chunks::<2>().0.iter().map(|code| u16::from_be_bytes(*code)).collect();
        let agent = concat!("settee-node/", env!("CARGO_PKG_VERSION"));
        let hello =
            RequestFrame { key: agent.as_bytes(), value: &hello_value(&codes), ..RequestFrame::new(Opcode::Hello) };
        let (_, agreed) = self.ask(wire, &hello, &[Status::Success])?;
        if agreed != features {
            return Err(Failure::Login("the peer does not know all that replication needs".to_owned()));
        }
        wire.hurry()?;
        let Credentials { user, password } = self.credentials.clone();
        let mut exchange = scram::Client::new(Hash::Sha512, &user, &password, |bytes| self.env.rng.fill(bytes));
        let key = Hash::Sha512.mechanism().as_bytes();
        let first = RequestFrame { key, value: &exchange.first(), ..RequestFrame::new(Opcode::SaslAuth) };
        let (_, challenge) = self.ask(wire, &first, &[Status::AuthContinue])?;
        let proof = exchange.respond(&challenge);
        let proof = proof.map_err(|failure| Failure::Login(format!("its challenge makes no sense: {failure:?}")))?;
        let last = RequestFrame { key, value: &proof, ..RequestFrame::new(Opcode::SaslStep) };
        let (status, word) = self.ask(wire, &last, &[Status::Success, Status::AuthError])?;
        if status != Status::Success || !exchange.verify(&word) {
            return Err(Failure::Login(format!("user {user:?} has another password there")));
        }
        let bucket = self.route.bucket.clone();
        let select = RequestFrame { key: bucket.as_bytes(), ..RequestFrame::new(Opcode::SelectBucket) };
        self.ask(wire, &select, &[Status::Success]).map(|_| ())
    }

    /// Sends a request and waits for its answer, which has to be one of these.
    fn ask(
        &mut self,
        wire: &mut WireOut,
        request: &RequestFrame<'_>,
        expected: &[Status],
    ) -> Result<(Status, Vec<u8>), Failure> {
        request.encode(&mut wire.output);
        let until = self.now() + LOGIN_MAX;
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
                    return Err(Failure::Login(format!("no answer within {LOGIN_MAX:?}")));
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
