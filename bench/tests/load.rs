//! The load generator on a real front end over a real engine, in this process, on a free port.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use bench::load::{self, Load, Outcome, Until, Watch};
use bench::target::{Dialect, Identity, Target};
use bench::workload::{Order, Workload};
use engine::Engine;
use frontend::auth::{Role, Users};
use frontend::cluster::{BucketShape, Cluster, Map, Node, Revision};
use frontend::{FrontEnd, Options, Parts};
use limits::{Ledger, Plan, Wish, Wishes};
use persist::{BucketSpec, Eviction, Store};
use scheduler::{PoolConfig, Pools};
use types::{BucketUuid, Level, Seqno, VbId, VbState};

const VBUCKETS: u16 = 16;

struct Server {
    front_end: FrontEnd,
    engine: Arc<Engine>,
    cluster: Arc<Cluster>,
    _dir: tempfile::TempDir,
}

impl Server {
    fn start() -> Server {
        let dir = tempfile::tempdir().unwrap();
        let env = env::os::env();
        let pools = Pools::start(&env, &PoolConfig::default());
        let store = Store::open(&env, &pools, dir.path(), persist::Options::default()).unwrap();
        let engine = Arc::new(Engine::new(&env, &pools, store, engine::Options::default()));
        engine.warm_up().unwrap();
        let spec = BucketSpec {
            name: "default".to_owned(),
            uuid: BucketUuid(1),
            vbuckets: VBUCKETS,
            replicas: 0,
            quota_bytes: 256 << 20,
            flush_enabled: false,
            eviction: Eviction::Value,
            rules: persist::WriteRules::default(),
            compaction: None,
        };
        engine.create_bucket(spec).unwrap();
        let users = Users::in_memory(&env).with_iterations(0);
        users.set("tester", "secret", Role::Admin).unwrap();
        let wishes = Wishes { connections_max: Wish::Default(4096), files_max: Wish::Default(4096), workers: 2 };
        let options = Options { listen: ([127, 0, 0, 1], 0).into(), workers: 2, ..Options::default() };
        let cluster = Arc::new(std::sync::OnceLock::new());
        let made = cluster.clone();
        let parts = Parts {
            env,
            pools,
            engine: engine.clone(),
            users: Arc::new(users),
            cluster: Box::new(move |addr| {
                made.get_or_init(|| Arc::new(Cluster::new("cafe", None, addr.port(), 8091, 1))).clone()
            }),
            stats: Arc::new(()),
            streams: Arc::default(),
            ledger: Ledger::new(&Plan::for_limit(20_000, wishes).unwrap()),
        };
        let front_end = frontend::serve(options, parts).unwrap();
        Server { front_end, engine, cluster: cluster.get().unwrap().clone(), _dir: dir }
    }

    fn target(&self) -> Target {
        Target::parse(&format!("couchbase://{}/default", self.front_end.local_addr())).unwrap()
    }

    fn dialect(&self, level: Option<Level>) -> Dialect {
        self.target().prepare(&identity("secret"), level).unwrap()
    }

    fn run(&self, level: Option<Level>, load: &Load) -> Outcome {
        let watch = Watch { stop: &AtomicBool::new(false), usage: &|| None, live: false };
        load::run(&self.target(), &self.dialect(level), load, &watch).unwrap()
    }

    /// Is told, as place `this` of `servers`, at which place each vBucket is active.
    fn take_map(&self, servers: &[&Server], this: usize, rev: i64, active: fn(u16) -> usize) {
        let node = |server: &&Server| {
            let address = server.front_end.local_addr();
            Node { host: address.ip().to_string(), kv_port: address.port(), admin_port: 8091 }
        };
        let bucket = self.engine.bucket("default").unwrap();
        let shape = BucketShape::of(&bucket.spec());
        let revision = Revision { epoch: 1, rev };
        let map = Map {
            revision,
            cluster_uuid: "cafe".to_owned(),
            bucket: shape.name.clone(),
            uuid: shape.uuid.clone(),
            replicas: 0,
            nodes: servers.iter().map(node).collect(),
            chains: (0..VBUCKETS).map(|vb| vec![Some(active(vb))]).collect(),
            forward: BTreeMap::new(),
        };
        for vb in 0..VBUCKETS {
            let state = if active(vb) == this { VbState::Active } else { VbState::Dead };
            bucket.set_vb_state(VbId(vb), state, None).unwrap();
        }
        self.cluster.give(&shape, revision, &map.document(Some(this))).unwrap();
    }

    fn documents(&self) -> u64 {
        self.engine.bucket("default").unwrap().items()
    }
}

fn identity(password: &str) -> Identity {
    Identity { user: "tester".to_owned(), password: password.to_owned() }
}

fn ops(ops: u64) -> Load {
    Load {
        workload: Workload { value_bytes: 100, set_pct: 100, keys: 1_000, order: Order::Sequential },
        clients: 8,
        depth: 4,
        threads: 2,
        warmup: Duration::ZERO,
        until: Until::Ops(ops),
        rate: None,
        seed: 1,
    }
}

#[test]
fn exactly_as_many_operations_as_asked_are_done_and_counted() {
    let server = Server::start();
    let outcome = server.run(None, &ops(1_000));
    assert_eq!((outcome.tally.ops, outcome.tally.error_count(), outcome.tally.unfinished), (1_000, 0, 0));
    assert_eq!(outcome.tally.latencies.count(), 1_000);
    assert_eq!(server.documents(), 1_000, "in sequence every key is stored once");
}

#[test]
fn reads_find_what_was_stored_and_miss_what_was_not() {
    let server = Server::start();
    server.run(None, &ops(1_000));
    let read = |keys| {
        let load = ops(500);
        let workload = Workload { set_pct: 0, keys, order: Order::Random, ..load.workload.clone() };
        server.run(None, &Load { workload, ..load }).tally
    };
    assert_eq!(read(1_000).misses, 0);
    let misses = read(1_000_000).misses;
    assert!((450..=500).contains(&misses), "of 500 reads, {misses} missed");
}

#[test]
fn durable_writes_side_by_side_on_one_connection_all_succeed() {
    let server = Server::start();
    let workload = Workload { order: Order::Random, ..ops(0).workload };
    let load = Load { clients: 2, depth: 16, workload, ..ops(300) };
    let outcome = server.run(Some(Level::PersistMajority), &load);
    assert_eq!((outcome.tally.ops, &outcome.tally.errors), (300, &Default::default()));
}

#[test]
fn an_open_loop_keeps_its_rate_and_its_number() {
    let server = Server::start();
    let outcome = server.run(None, &Load { rate: Some(2_000.0), ..ops(1_000) });
    assert_eq!((outcome.tally.ops, outcome.tally.error_count()), (1_000, 0));
    assert!(outcome.elapsed >= Duration::from_millis(490), "{:?} is faster than asked", outcome.elapsed);
    assert_eq!(outcome.tally.sent_late.count(), 1_000);
}

#[test]
fn what_an_open_loop_could_not_begin_counts_as_unanswered() {
    let server = Server::start();
    // One request at a time, and a moment every 100 ns.
    let load = Load {
        clients: 1,
        depth: 1,
        threads: 1,
        rate: Some(1e7),
        until: Until::For(Duration::from_millis(50)),
        ..ops(0)
    };
    let tally = server.run(None, &load).tally;
    assert!(tally.unfinished > tally.ops, "{} and {}", tally.unfinished, tally.ops);
}

/// Two servers that have every other vBucket each.
fn pair() -> [Server; 2] {
    let pair = [Server::start(), Server::start()];
    for (this, server) in pair.iter().enumerate() {
        server.take_map(&[&pair[0], &pair[1]], this, 10, |vb| usize::from(vb % 2));
    }
    pair
}

#[test]
fn each_document_goes_to_the_server_that_has_its_vbucket() {
    let [left, right] = pair();
    let outcome = left.run(Some(Level::PersistMajority), &ops(1_000));
    assert_eq!((outcome.tally.ops, &outcome.tally.errors), (1_000, &Default::default()));
    assert_eq!(outcome.tally.turned_away, 0);
    let (here, there) = (left.documents(), right.documents());
    assert_eq!(here + there, 1_000);
    assert!(here > 400 && there > 400, "{here} and {there}");
}

/// Goal: who is turned away takes the newer map and asks again there. Method: everything moves to the second server after the
/// run was prepared.
#[test]
fn who_is_turned_away_takes_the_newer_map() {
    let [left, right] = pair();
    let dialect = left.dialect(None);
    for (this, server) in [&left, &right].into_iter().enumerate() {
        server.take_map(&[&left, &right], this, 11, |_| 1);
    }
    let watch = Watch { stop: &AtomicBool::new(false), usage: &|| None, live: false };
    let tally = load::run(&left.target(), &dialect, &ops(1_000), &watch).unwrap().tally;
    assert_eq!((tally.ops, tally.error_count(), left.documents(), right.documents()), (1_000, 0, 0, 1_000));
    assert!((1..=64).contains(&tally.turned_away), "{} were turned away", tally.turned_away);
}

/// Goal: a server that is gone costs what was under way there, and nothing after the newer map. Method: one of two stops in the
/// middle of an endless run, and the other takes over.
#[test]
fn a_server_that_is_gone_is_done_without_once_the_map_says_so() {
    let [left, right] = pair();
    let (target, dialect) = (left.target(), left.dialect(None));
    let stop = Arc::new(AtomicBool::new(false));
    let told = stop.clone();
    let running = std::thread::spawn(move || {
        let watch = Watch { stop: &told, usage: &|| None, live: false };
        let load = Load { until: Until::For(Duration::from_secs(600)), ..ops(0) };
        load::run(&target, &dialect, &Load { workload: Workload { keys: 1 << 20, ..load.workload }, ..load }, &watch)
    });
    while right.documents() == 0 {
        std::thread::yield_now();
    }
    right.front_end.drain(Duration::from_secs(1));
    left.take_map(&[&left], 0, 11, |_| 0);
    let bucket = left.engine.bucket("default").unwrap();
    let seqnos = || bucket.all_vb_seqnos(Some(VbState::Active), true);
    while seqnos().iter().any(|(_, seqno)| *seqno == Seqno(0)) {
        std::thread::yield_now();
    }
    stop.store(true, std::sync::atomic::Ordering::Relaxed);
    let tally = running.join().unwrap().unwrap().tally;
    assert!(tally.error_count() <= 8 * 4, "{:?}", tally.errors);
    assert_eq!(tally.connections_lost, 8);
}

#[test]
fn a_wrong_password_or_bucket_is_said_before_any_load() {
    let server = Server::start();
    let refused = server.target().prepare(&identity("wrong"), None).unwrap_err();
    assert!(refused.to_string().contains("wrong name or password"), "{refused}");
    let nowhere = Target { path: "nowhere".to_owned(), ..server.target() };
    let refused = nowhere.prepare(&identity("secret"), None).unwrap_err();
    assert!(refused.to_string().contains("nowhere"), "{refused}");
}

#[test]
fn a_server_that_stops_ends_the_run_with_a_reason() {
    let server = Server::start();
    let (target, dialect) = (server.target(), server.dialect(None));
    let load = Load { until: Until::For(Duration::from_secs(60)), ..ops(0) };
    let running = std::thread::spawn(move || {
        let watch = Watch { stop: &AtomicBool::new(false), usage: &|| None, live: false };
        load::run(&target, &dialect, &load, &watch)
    });
    while server.documents() == 0 {
        std::thread::yield_now();
    }
    server.front_end.drain(Duration::from_secs(1));
    let error = running.join().unwrap().expect_err("it cannot have gone well");
    assert!(format!("{error:#}").contains("every connection was lost"), "{error:#}");
}
