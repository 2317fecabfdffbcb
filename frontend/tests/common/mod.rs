//! A real server on a free port over a temporary directory, and a client that says exactly what a test wants.

#![allow(dead_code)]

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use engine::Engine;
use env::Env;
use frontend::auth::scram::{Client as Scram, Hash};
use frontend::auth::{Role, Users};
use frontend::cluster::Cluster;
use frontend::{FrontEnd, Options, Parts};
use limits::{Class, Ledger, Plan, Wish, Wishes};
use persist::{BucketSpec, Store};
use scheduler::{PoolConfig, PoolKind, Pools};
use types::BucketUuid;
use wire::client::RequestFrame;
use wire::{Feature, Frame, FrameReader, Next, Opcode, Side, Status};

pub const USER: &str = "Administrator";
pub const PASSWORD: &str = "password";

pub struct Server {
    pub front_end: Option<FrontEnd>,
    pub engine: Arc<Engine>,
    pub ledger: Arc<Ledger>,
    pub addr: SocketAddr,
    clock: Arc<JumpingClock>,
    pools: Arc<Pools>,
    _dir: tempfile::TempDir,
}

/// The real clock, which a test may put ahead.
pub struct JumpingClock {
    real: Arc<dyn env::Clock>,
    ahead_s: AtomicU64,
}

/// Does nothing, at a moment long past: so the timer thread, which sleeps by the real clock, looks at the other one.
struct Nudge;

impl scheduler::Task for Nudge {
    fn name(&self) -> &'static str {
        "nudge"
    }
    fn run(&self, _: &scheduler::Context<'_>) -> scheduler::Next {
        scheduler::Next::Done
    }
}

impl env::Clock for JumpingClock {
    fn unix_ns(&self) -> u64 {
        self.real.unix_ns()
    }
    fn monotonic(&self) -> Duration {
        self.real.monotonic() + Duration::from_secs(self.ahead_s.load(Ordering::SeqCst))
    }
}

pub fn spec(name: &str, uuid: u128) -> BucketSpec {
    BucketSpec {
        name: name.to_owned(),
        uuid: BucketUuid(uuid),
        vbuckets: 16,
        replicas: 0,
        quota_bytes: 256 << 20,
        flush_enabled: false,
        eviction: persist::Eviction::default(),
        rules: persist::WriteRules::default(),
        compaction: None,
    }
}

/// Passwords are slow to derive on purpose, so the tests of a program share them.
fn users_file() -> &'static Path {
    static FILE: OnceLock<(tempfile::TempDir, PathBuf)> = OnceLock::new();
    &FILE
        .get_or_init(|| {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("users.json");
            let users = Users::load(&env::os::env(), &path).unwrap().with_iterations(0);
            users.set(USER, PASSWORD, Role::Admin).unwrap();
            users.set("reader", "reader", Role::Data).unwrap();
            users.save().unwrap();
            (dir, path)
        })
        .1
}

impl Server {
    pub fn start() -> Server {
        Server::with(|_| ())
    }

    pub fn open() -> Server {
        Server::with(|options| options.open_bucket = Some("default".to_owned()))
    }

    pub fn with(change: impl FnOnce(&mut Options)) -> Server {
        Server::sized(10_000, change)
    }

    /// With a table for this many clients, besides the reserve.
    pub fn sized(connections_max: u32, change: impl FnOnce(&mut Options)) -> Server {
        let dir = tempfile::tempdir().unwrap();
        let os = env::os::env();
        let clock = Arc::new(JumpingClock { real: os.clock.clone(), ahead_s: AtomicU64::new(0) });
        let env = Env { clock: clock.clone(), ..os };
        let pools = Pools::start(&env, &PoolConfig::default());
        let store = Store::open(&env, &pools, dir.path(), persist::Options::default()).unwrap();
        let engine = Arc::new(Engine::new(&env, &pools, store, engine::Options::default()));
        engine.warm_up().unwrap();
        engine.create_bucket(spec("default", 1)).unwrap();
        engine.create_bucket(BucketSpec { replicas: 1, ..spec("replicated", 2) }).unwrap();
        let users = Users::load(&env, users_file()).unwrap();
        let mut options = Options { listen: ([127, 0, 0, 1], 0).into(), workers: 2, ..Options::default() };
        change(&mut options);
        let wishes = Wishes {
            connections_max: Wish::Default(8),
            files_max: Wish::Default(4096),
            workers: options.workers as u32,
        };
        let ledger = Ledger::new(&Plan::for_limit(20_000, wishes).unwrap());
        ledger.resize(Class::Connections, connections_max).unwrap();
        let parts = Parts {
            env,
            pools: pools.clone(),
            engine: engine.clone(),
            users: Arc::new(users),
            ledger: ledger.clone(),
            cluster: Box::new(|addr| Arc::new(Cluster::new("cafe", None, addr.port(), 8091, 1))),
            stats: Arc::new(()),
            streams: Arc::default(),
        };
        let front_end = frontend::serve(options, parts).unwrap();
        Server { addr: front_end.local_addr(), front_end: Some(front_end), engine, ledger, clock, pools, _dir: dir }
    }

    /// Puts the clock this far ahead of the real one.
    pub fn put_ahead(&self, by: Duration) {
        self.clock.ahead_s.store(by.as_secs(), Ordering::SeqCst);
        self.pools.spawn(PoolKind::Cpu, Arc::new(Nudge)).wake_at(Duration::ZERO);
    }

    /// How often a worker was told to look at its deadlines.
    pub fn deadline_looks(&self) -> u64 {
        let tasks = self.pools.stats().tasks;
        let of_workers = tasks.iter().filter(|task| task.name == "connection_deadlines");
        of_workers.map(|task| task.run.snapshot().count()).sum()
    }

    pub fn connect(&self) -> Client {
        Client::connect(self.addr)
    }

    /// A connection as a current SDK sets it up, on bucket "default".
    pub fn sdk(&self) -> Client {
        self.sdk_with(SDK_FEATURES)
    }

    pub fn sdk_with(&self, features: &[u16]) -> Client {
        let mut client = self.connect();
        client.hello(features);
        client.plain(USER, PASSWORD);
        assert_eq!(client.call(RequestFrame { key: b"default", ..new(Opcode::SelectBucket) }).status, Status::Success);
        client
    }
}

/// What the Python SDK asks for, plus the collections it always uses.
pub const SDK_FEATURES: &[u16] =
    &[0x03, 0x06, 0x07, 0x08, 0x0b, 0x10, 0x0f, 0x11, 0x15, 0x12, 0x17, 0x14, 0x1c, 0x21, 0x0e, 0x1e, 0x0a, 0x04];

pub fn new<'a>(opcode: Opcode) -> RequestFrame<'a> {
    RequestFrame::new(opcode)
}

/// A reply, out of its buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Got {
    pub magic: u8,
    pub opcode: u8,
    pub status: Status,
    pub opaque: u32,
    pub cas: u64,
    pub datatype: u8,
    pub framing: Vec<u8>,
    pub extras: Vec<u8>,
    pub key: Vec<u8>,
    pub value: Vec<u8>,
}

impl Got {
    fn of(frame: &Frame<'_>) -> Got {
        Got {
            magic: frame.header.magic as u8,
            opcode: frame.header.opcode,
            status: wire::client::status(frame).unwrap(),
            opaque: frame.header.opaque,
            cas: frame.header.cas,
            datatype: frame.header.datatype,
            framing: frame.framing_extras.to_vec(),
            extras: frame.extras.to_vec(),
            key: frame.key.to_vec(),
            value: frame.value.to_vec(),
        }
    }

    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.value).unwrap_or_else(|e| panic!("{e}: {self:?}"))
    }

    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.value).unwrap()
    }
}

pub struct Client {
    pub stream: TcpStream,
    buffer: Vec<u8>,
    opaque: u32,
}

impl Client {
    pub fn connect(addr: SocketAddr) -> Client {
        let stream = TcpStream::connect(addr).unwrap();
        stream.set_nodelay(true).unwrap();
        // Only so that a test that would hang fails instead.
        stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        Client { stream, buffer: Vec::new(), opaque: 0 }
    }

    pub fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).unwrap();
    }

    /// The next frame; `None`: the server closed.
    pub fn try_recv(&mut self) -> Option<Got> {
        let reader = FrameReader::new(Side::Client);
        loop {
            if let Next::Frame(frame) = reader.next(&self.buffer).unwrap() {
                let (got, len) = (Got::of(&frame), frame.frame_len());
                self.buffer.drain(..len);
                return Some(got);
            }
            let mut chunk = [0; 64 * 1024];
            match self.stream.read(&mut chunk) {
                Ok(0) => return None,
                Ok(count) => self.buffer.extend_from_slice(&chunk[..count]),
                Err(error) if error.kind() == ErrorKind::ConnectionReset => panic!("reset instead of closed"),
                Err(error) => panic!("{error}"),
            }
        }
    }

    pub fn recv(&mut self) -> Got {
        self.try_recv().expect("the server closed the connection")
    }

    /// Sends a request and takes the next reply, which must be its.
    pub fn call(&mut self, mut request: RequestFrame<'_>) -> Got {
        self.opaque += 1;
        request.opaque = self.opaque;
        self.send(&request.to_bytes());
        let got = self.recv();
        assert_eq!((got.opcode, got.opaque), (request.opcode, request.opaque), "{got:?}");
        got
    }

    pub fn hello(&mut self, features: &[u16]) -> Vec<u16> {
        let value = wire::client::hello_value(features);
        let got = self.call(RequestFrame { key: b"{\"a\":\"test/1\"}", value: &value, ..new(Opcode::Hello) });
        assert_eq!(got.status, Status::Success);
        assert_eq!(got.magic, 0x81);
        got.value.chunks(2).map(|c| u16::from_be_bytes([c[0], c[1]])).collect()
    }

    pub fn plain(&mut self, user: &str, password: &str) {
        let value = format!("\0{user}\0{password}");
        let got = self.call(RequestFrame { key: b"PLAIN", value: value.as_bytes(), ..new(Opcode::SaslAuth) });
        assert_eq!(got.status, Status::Success);
    }

    /// The status of the last message, if it was not success.
    pub fn scram(&mut self, hash: Hash, user: &str, password: &str) -> Result<(), Status> {
        let mut scram = Scram::with_nonce(hash, user, password, "0xffffffe9 0x08 0x7f".to_owned());
        let key = hash.mechanism().as_bytes();
        let got = self.call(RequestFrame { key, value: &scram.first(), ..new(Opcode::SaslAuth) });
        if got.status != Status::AuthContinue {
            return Err(got.status);
        }
        let last = scram.respond(&got.value).unwrap();
        let got = self.call(RequestFrame { key, value: &last, ..new(Opcode::SaslStep) });
        if got.status != Status::Success {
            return Err(got.status);
        }
        assert!(scram.verify(&got.value), "the server proves that it knows the password");
        Ok(())
    }

    pub fn set(&mut self, key: &[u8], value: &[u8]) -> Got {
        let extras = wire::client::store_extras(0x0200_0006, 0);
        self.call(RequestFrame { extras: &extras, key, value, ..new(Opcode::Set) })
    }

    pub fn get(&mut self, key: &[u8]) -> Got {
        self.call(RequestFrame { key, ..new(Opcode::Get) })
    }

    pub fn noop(&mut self) -> Got {
        self.call(new(Opcode::Noop))
    }
}

pub fn features(features: &[Feature]) -> Vec<u16> {
    features.iter().map(|f| *f as u16).collect()
}
