//! Goal: a start, its reads and its flushes survive the want of a descriptor wherever it happens. Method: an engine on
//! metered storage whose every open meets EMFILE in turn.

use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};

use engine::{Bucket, Engine, Mailbox, Op, OpResult, Outcome, Request, Requirement, StoreMode, Ticket, Waiter};
use env::sim::{FaultPlan, Op as Call, Sim};
use env::{Env, Storage};
use limits::{Class, GiveBack, Ledger, Metered, Plan, Wish, Wishes};
use persist::{BucketSpec, FileCache, Store};
use scheduler::{PoolConfig, Pools, Stop};
use types::{BucketUuid, Cas, Datatype, KeyBuf, Level, VbId};

const EMFILE: i32 = 24;
const VBUCKETS: u16 = 64;

struct Letter(Sender<OpResult>);

impl Mailbox for Letter {
    fn deliver(&self, _: Ticket, result: OpResult) {
        let _ = self.0.send(result);
    }
}

struct Kept(Arc<FileCache>);

impl GiveBack for Kept {
    fn give_back(&self, wanted: u32) -> u32 {
        self.0.close_some(wanted as usize) as u32
    }
}

struct Node {
    pools: Arc<Pools>,
    engine: Engine,
    bucket: Arc<Bucket>,
    ledger: Arc<Ledger>,
    _kept: Arc<Kept>,
}

impl Node {
    fn start(sim: &Sim) -> Node {
        // The fewest files there are: fewer than vBuckets.
        let wishes = Wishes { connections_max: Wish::Default(8), files_max: Wish::Asked(32), workers: 2 };
        let ledger = Ledger::new(&Plan::for_limit(256, wishes).unwrap());
        let os = sim.env();
        let storage: Arc<dyn Storage> = Arc::new(Metered::new(os.storage.clone(), Arc::clone(&ledger), Class::Files));
        let env = Env { storage, ..os };
        let pools = Pools::start(&env, &PoolConfig { readers: 2, writers: 2, background: 1, compaction: 1, cpu: 1 });
        let options = persist::Options { writers: 2, readers: 2, ..persist::Options::default() };
        let store = Store::open(&env, &pools, Path::new("/data"), options).unwrap();
        let kept = Arc::new(Kept(store.files()));
        ledger.on_pressure(Class::Files, Arc::downgrade(&kept) as _);
        let engine = Engine::new(&env, &pools, store, engine::Options::default());
        engine.warm_up().unwrap();
        let bucket = engine.bucket("b").unwrap_or_else(|| engine.create_bucket(spec()).unwrap());
        Node { pools, engine, bucket, ledger, _kept: kept }
    }

    fn ask(&self, vb: u16, op: Op<'_>) -> OpResult {
        let (send, receive) = channel();
        let mailbox: Arc<dyn Mailbox> = Arc::new(Letter(send));
        let ticket = Ticket { slot: 0, generation: 0, request: 0 };
        let key = KeyBuf::in_default_collection(b"k").unwrap();
        let durably = Requirement { level: Level::PersistMajority, timeout: None };
        let request = Request {
            vb: VbId(vb),
            key: key.as_key(),
            cas: Cas(0),
            durability: matches!(op, Op::Store { .. }).then_some(durably),
            preserve_expiry: false,
            accepts: Datatype(7),
            op,
        };
        match self.bucket.execute(&request, &|| Waiter::new(Arc::clone(&mailbox), ticket)) {
            Outcome::Done(result) => result,
            Outcome::Pending => receive.recv().unwrap(),
        }
    }

    fn set_durably(&self, vb: u16) {
        let store = Op::Store {
            mode: StoreMode::Set,
            flags: 0,
            expiry: 0,
            datatype: Datatype::RAW,
            value: b"a value of its own",
        };
        self.ask(vb, store).unwrap();
    }

    /// Ends it with everything written.
    fn stop(self) -> Arc<Ledger> {
        assert!(self.engine.drain().left.is_empty());
        self.pools.shutdown(Stop::Cancel);
        self.ledger
    }
}

fn spec() -> BucketSpec {
    BucketSpec {
        name: "b".into(),
        uuid: BucketUuid(1),
        vbuckets: VBUCKETS,
        replicas: 0,
        quota_bytes: 64 << 20,
        flush_enabled: true,
        eviction: persist::Eviction::default(),
        rules: persist::WriteRules::default(),
        compaction: None,
    }
}

#[test]
fn a_start_and_its_writes_survive_a_missing_descriptor_at_each_open() {
    let (_, mut sim) = env::sim::env(3);
    let node = Node::start(&sim);
    (0..VBUCKETS).for_each(|vb| node.set_durably(vb));
    let stats = node.stop().stats();
    assert!(stats.given_back > 0, "more files than may be open: {stats:?}");

    for (call, every) in [(Call::Open, 7), (Call::Create, 1), (Call::List, 1)] {
        let mut nth = 0;
        loop {
            sim.kill();
            sim.storage.arm(FaultPlan::new().fail_nth(call, nth, EMFILE));
            let node = Node::start(&sim);
            for vb in [0, VBUCKETS - 1] {
                node.ask(vb, Op::Get).unwrap();
                node.set_durably(vb);
            }
            assert_eq!(node.bucket.items(), u64::from(VBUCKETS), "{call:?} {nth}");
            let exhausted = node.stop().stats().exhausted;
            // The workload has fewer such calls.
            if exhausted == 0 {
                break;
            }
            assert_eq!(exhausted, 1);
            nth += every;
        }
        assert!(call != Call::Open || nth > u64::from(VBUCKETS), "each file was opened: {nth}");
    }
}
