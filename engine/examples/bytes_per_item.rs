//! What a document costs in memory: by our own accounting, and as the operating system sees it.
//!
//!     cargo run --release -p engine --example bytes_per_item -- [ITEMS=1000000] [VALUE_BYTES=100] [value|full]
//!
//! Loads that many documents with 14-byte keys into a bucket of 1024 vBuckets, waits until all are in their files, and
//! compares. Ends with 1 if the two differ by more than 5 %.

#![forbid(unsafe_code)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use engine::{Engine, Mailbox, Op, OpResult, Options, Outcome, Request, StoreMode, Ticket, Waiter};
use persist::{BucketSpec, Eviction, Store};
use scheduler::{PoolConfig, Pools, Stop};
use types::{BucketUuid, Cas, Datatype, KeyBuf, VbId};

struct Nobody;

impl Mailbox for Nobody {
    fn deliver(&self, _: Ticket, result: OpResult) {
        result.expect("stored");
    }
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let mut number = |default: u64| arguments.next().map_or(default, |text| text.parse().expect("a number"));
    let (items, value_bytes) = (number(1_000_000), number(100) as usize);
    let eviction = match arguments.next().as_deref() {
        Some("full") => Eviction::Full,
        _ => Eviction::Value,
    };
    let env = env::os::env();
    let dir = tempfile::tempdir().expect("a directory");
    let pools = Pools::start(&env, &PoolConfig::default());
    let store = Store::open(&env, &pools, dir.path(), persist::Options::default()).expect("opens");
    let engine = Engine::new(&env, &pools, store, Options::default());
    let spec = BucketSpec {
        name: "default".into(),
        uuid: BucketUuid(1),
        vbuckets: 1024,
        replicas: 0,
        quota_bytes: 1 << 40,
        flush_enabled: false,
        eviction,
        rules: persist::WriteRules::default(),
        compaction: None,
    };
    let bucket = engine.create_bucket(spec).expect("a bucket");
    let resident = || env::os::resident_bytes().expect("Linux");
    let before = resident();
    let mailbox: Arc<dyn Mailbox> = Arc::new(Nobody);
    let began = Instant::now();
    let mut value = vec![b'.'; value_bytes];
    for n in 0..items {
        let name = format!("key_{n:010}");
        let key = KeyBuf::in_default_collection(name.as_bytes()).expect("short");
        value[..8.min(value_bytes)].copy_from_slice(&n.to_be_bytes()[..8.min(value_bytes)]);
        let request = Request {
            vb: VbId((crc(name.as_bytes()) % 1024) as u16),
            key: key.as_key(),
            cas: Cas(0),
            durability: None,
            preserve_expiry: false,
            accepts: Datatype(7),
            op: Op::Store { mode: StoreMode::Set, flags: 0, expiry: 0, datatype: Datatype::RAW, value: &value },
        };
        let ticket = Ticket { slot: 0, generation: 0, request: n };
        match bucket.execute(&request, &|| Waiter::new(Arc::clone(&mailbox), ticket)) {
            Outcome::Done(result) => _ = result.expect("stored"),
            Outcome::Pending => {}
        }
        // The changelog, which holds what is not filed, is not what this measures: it is kept small all the time.
        while bucket.store().pending() > 50_000 && n % 1000 == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    let stored = began.elapsed();
    while bucket.store().pending() > 0 {
        std::thread::sleep(Duration::from_millis(10));
    }
    let filed = began.elapsed();
    std::thread::sleep(Duration::from_millis(200));
    let grown = resident() - before;
    let counted = bucket.memory_used();
    for (name, value) in bucket.stats("memory").expect("a group") {
        println!("{name:>28} {value}");
    }
    let each = |bytes: u64| bytes as f64 / items as f64;
    println!("{items} items, {value_bytes} bytes of value: stored in {stored:?}, filed after {filed:?}");
    println!("counted  {:8.1} bytes an item", each(counted));
    println!("resident {:8.1} bytes an item", each(grown));
    let apart = (counted as f64 / grown as f64 - 1.0) * 100.0;
    println!("apart    {apart:8.1} %");
    drop(bucket);
    engine.drain();
    drop(engine);
    pools.shutdown(Stop::Cancel);
    std::process::exit(i32::from(apart.abs() > 5.0));
}

fn crc(bytes: &[u8]) -> u32 {
    // Any even spread does.
    let hash = bytes.iter().fold(0xcbf2_9ce4_8422_2325u64, |h, b| (h ^ u64::from(*b)).wrapping_mul(0x100_0000_01b3));
    (hash >> 33) as u32
}
