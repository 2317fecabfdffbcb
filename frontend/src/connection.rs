//! One client: what it negotiated, who it is, what it waits for, and the bytes in between.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use engine::Bucket;
use limits::{Class, Permit};
use mio::net::TcpStream;
use parking_lot::Mutex;
use replication::Producer;
use wire::{Feature, FeatureSet, Opcode};

use crate::auth::{Exchange, Identity};
use crate::buffer::{Input, Output};
use crate::cluster::{BucketShape, Revision};
use crate::counts::OpTimings;
use crate::table::Slot;

/// What statistics show of a connection. Written by its worker, read by anybody.
pub struct Info {
    pub slot: Slot,
    pub peer: SocketAddr,
    /// On the monotonic clock.
    pub since: Duration,
    pub last_request: AtomicU64,
    pub requests: AtomicU64,
    pub in_flight: AtomicU32,
    pub bytes_queued: AtomicU64,
    /// It holds one of the places that are kept for an administrator.
    pub in_reserve: AtomicBool,
    pub names: Mutex<Names>,
}

#[derive(Clone, Debug, Default)]
pub struct Names {
    pub user: Option<Arc<str>>,
    pub bucket: Option<String>,
    pub agent: String,
}

impl Info {
    pub fn new(slot: Slot, peer: SocketAddr, since: Duration) -> Info {
        Info {
            slot,
            peer,
            since,
            last_request: AtomicU64::new(since.as_millis() as u64),
            requests: AtomicU64::new(0),
            in_flight: AtomicU32::new(0),
            bytes_queued: AtomicU64::new(0),
            in_reserve: AtomicBool::new(false),
            names: Mutex::new(Names::default()),
        }
    }

    /// Nothing is under way and nothing is queued.
    pub fn is_at_rest(&self) -> bool {
        self.in_flight.load(Relaxed) == 0 && self.bytes_queued.load(Relaxed) == 0
    }

    pub fn note_request(&self, now: Duration) {
        self.requests.fetch_add(1, Relaxed);
        self.last_request.store(now.as_millis() as u64, Relaxed);
    }
}

/// The bucket a connection works on.
#[derive(Clone)]
pub struct Selected {
    pub bucket: Arc<Bucket>,
    pub shape: BucketShape,
    pub timings: Arc<OpTimings>,
    /// Nobody asked for it: it is what connections get that do not know how to select one.
    pub implied: bool,
    /// At this revision of the cluster the bucket was known to exist.
    pub checked: Revision,
}

/// A request whose answer is still to come.
pub struct Waiting {
    pub request: u64,
    pub call: Call,
    /// Nothing may overtake it, nor start before it is done.
    pub fence: bool,
}

/// What is needed of a request to answer it later.
#[derive(Clone, Copy, Debug)]
pub struct Call {
    /// As sent: may be unknown.
    pub code: u8,
    pub opcode: Option<Opcode>,
    pub opaque: u32,
    /// When the request had arrived in full, on the monotonic clock.
    pub received: Duration,
    pub form: Form,
}

/// What a reply's layout depends on beyond its opcode.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Form {
    #[default]
    Plain,
    /// GET_META that asked for the datatype.
    WithDatatype,
    /// A fragment that is not JSON.
    Binary,
}

/// All of a connection but its socket and buffers.
pub struct Session {
    pub slot: Slot,
    pub info: Arc<Info>,
    pub features: FeatureSet,
    /// It has sent a HELLO, so it is one of the clients that expect more than old memcached ones.
    pub greeted: bool,
    pub exchange: Exchange,
    pub identity: Option<Identity>,
    pub selected: Option<Selected>,
    /// It is a DCP connection, and this is what it is sent.
    pub producer: Option<Box<Producer>>,
    /// The newest configuration this connection was sent since it selected its bucket.
    pub config_sent: Option<Revision>,
    /// The newest one it was told of without asking.
    pub config_pushed: Option<Revision>,
    pub in_flight: Vec<Waiting>,
    pub next_request: u64,
    /// No further request is read; what is under way is finished and sent.
    pub closing: bool,
}

impl Session {
    pub fn new(slot: Slot, info: Arc<Info>) -> Session {
        Session {
            slot,
            info,
            features: FeatureSet::EMPTY,
            greeted: false,
            exchange: Exchange::default(),
            identity: None,
            selected: None,
            producer: None,
            config_sent: None,
            config_pushed: None,
            in_flight: Vec::new(),
            next_request: 0,
            closing: false,
        }
    }

    /// Makes `selected` the bucket of the requests to come.
    pub fn select(&mut self, selected: Option<Selected>) {
        self.info.names.lock().bucket = selected.as_ref().map(|s| s.shape.name.clone());
        self.selected = selected;
        (self.config_sent, self.config_pushed) = (None, None);
    }

    /// It is to be told when its bucket has another map or, without a bucket, when the nodes are others.
    pub fn wants_maps(&self) -> bool {
        let has = |feature| self.features.has(feature);
        let asked = has(Feature::ClustermapChangeNotification) || has(Feature::ClustermapChangeNotificationBrief);
        asked && has(Feature::Duplex)
    }

    pub fn identify(&mut self, identity: Option<Identity>) {
        self.info.names.lock().user = identity.as_ref().map(|i| i.user.clone());
        self.identity = identity;
    }
}

/// How far a connection is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    Serving,
    /// Everything is sent and our end is shut; waits for the client's end, so that it reads an end of file rather than a
    /// reset, until this moment.
    Lingering {
        until: Duration,
    },
}

pub struct Connection {
    pub stream: TcpStream,
    pub session: Session,
    pub input: Input,
    pub output: Output,
    /// The socket may have more to read or take more to write: edge-triggered events only say when it turns true.
    pub readable: bool,
    pub writable: bool,
    /// The client has hung up, and that is still to be read: no further event will say so.
    pub hung_up: bool,
    pub eof: bool,
    pub phase: Phase,
    /// It is in the worker's queue already.
    pub queued: bool,
    /// When the last bytes were read.
    pub received: Duration,
    /// The socket did not take all there was.
    pub unsent: bool,
    /// When that became so, or when it last took some of it.
    pub sent: Duration,
    /// The input holds no whole frame until it is this long.
    pub need: usize,
    /// Part of a request is here, and the rest is the client's to send.
    pub half: bool,
    /// Since when it has to log in, if it has to.
    pub stranger_since: Option<Duration>,
    /// It counts among the strangers that the table has room for.
    pub counted: bool,
    /// What it wants to do takes an ordinary place, and it has one of the reserve.
    pub parked: Parked,
    /// When the worker looks at the clock for it.
    pub timer: Option<Duration>,
    /// Given back after the socket is closed.
    pub permit: Permit,
}

impl Connection {
    pub fn in_reserve(&self) -> bool {
        self.permit.class() == Class::Admin
    }
}

/// Whether a connection waits for an ordinary place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parked {
    No,
    Waiting,
    /// There was none; it is told so and closed.
    Refused,
}
