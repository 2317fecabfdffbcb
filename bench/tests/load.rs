//! The load generator on a real front end over a real engine, in this process, on a free port.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use bench::load::{self, Load, Outcome, Until, Watch};
use bench::target::{Dialect, Identity, Target};
use bench::workload::{Order, Workload};
use engine::Engine;
use frontend::auth::{Role, Users};
use frontend::cluster::Cluster;
use frontend::{FrontEnd, Options, Parts};
use limits::{Ledger, Plan, Wish, Wishes};
use persist::{BucketSpec, Eviction, Store};
use scheduler::{PoolConfig, Pools};
use types::{BucketUuid, Level};

const VBUCKETS: u16 = 16;

struct Server {
    front_end: FrontEnd,
    engine: Arc<Engine>,
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
        let parts = Parts {
            env,
            pools,
            engine: engine.clone(),
            users: Arc::new(users),
            cluster: Box::new(|addr| Arc::new(Cluster::new("cafe", None, addr.port(), 8091, 1))),
            stats: Arc::new(()),
            streams: Arc::default(),
            ledger: Ledger::new(&Plan::for_limit(20_000, wishes).unwrap()),
        };
        Server { front_end: frontend::serve(options, parts).unwrap(), engine, _dir: dir }
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
