//! What a durable write costs, three ways: each commit opens its file and closes it, files stay open, or a commit log
//! comes first. Writers wait for their write to be durable before they do the next, each to a random vBucket.
//!
//! `cargo bench -p persist --bench durable -- [--writers N,N…] [--seconds S] [--rounds R] [--vbuckets N] [--dir DIR]`
//! measures on the disk that holds DIR (default: the temporary directory). Under `cargo test` it only shows that it works.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use changelog::{Changelog, FailoverEntry, FailoverTable, VbRecord};
use env::{Env, OpenMode};
use persist::{BucketSpec, LogOptions, Nudge, Options, Store, Urgency};
use scheduler::{PoolConfig, Pools, Stop};
use types::{BucketUuid, Cas, Datatype, Item, KeyBuf, Kind, Meta, RevSeqno, Seqno, VbId, VbState, VbUuid};

const VALUE_BYTES: usize = 512;
const FRONT_ENDS: usize = 2;
const WAYS: [&str; 3] = ["close-each-time", "keep-open", "commit-log"];

struct Size {
    writers: Vec<usize>,
    time: Duration,
    rounds: usize,
    vbuckets: u16,
    dir: PathBuf,
}

fn main() {
    let args: Vec<String> = std::env::args().collect();
    let option = |name: &str| Some(args[args.iter().position(|arg| arg == name)? + 1].clone());
    let is_bench = args.iter().any(|arg| arg == "--bench");
    let number = |name: &str, small: usize, large: usize| match option(name) {
        Some(text) => text.parse().expect("a number"),
        None => [small, large][usize::from(is_bench)],
    };
    let size = Size {
        writers: match option("--writers") {
            Some(list) => list.split(',').map(|n| n.parse().expect("a number")).collect(),
            None if is_bench => vec![1, 64, 500, 2000],
            None => vec![8],
        },
        time: Duration::from_millis(number("--seconds", 0, 3) as u64 * 1000 + 100),
        rounds: number("--rounds", 1, 3),
        vbuckets: number("--vbuckets", 8, 1024) as u16,
        dir: option("--dir").map_or_else(std::env::temp_dir, PathBuf::from),
    };
    let dir = tempfile::tempdir_in(&size.dir).expect("a directory");
    let sync = sync_time(dir.path());
    println!("fdatasync of 4 KiB appended: p50 {:?}, p99 {:?}", sync.0, sync.1);
    println!(
        "{:>8} {:>16} {:>10} {:>10} {:>10} {:>10} {:>10}",
        "writers", "way", "ops/s", "mean", "p50", "p99", "p99.9"
    );
    for writers in &size.writers {
        let mut runs: Vec<Vec<Run>> = WAYS.iter().map(|_| Vec::new()).collect();
        for _ in 0..size.rounds {
            for (way, runs) in WAYS.iter().zip(&mut runs) {
                runs.push(run(dir.path(), way, *writers, &size));
            }
        }
        for (way, mut runs) in WAYS.iter().zip(runs) {
            runs.sort_by_key(|run| run.ops_per_s as u64);
            let Run { ops_per_s, mean, p50, p99, p999 } = &runs[runs.len() / 2];
            println!("{writers:>8} {way:>16} {ops_per_s:>10.0} {mean:>10.0?} {p50:>10.0?} {p99:>10.0?} {p999:>10.0?}");
        }
    }
}

struct Run {
    ops_per_s: f64,
    mean: Duration,
    p50: Duration,
    p99: Duration,
    p999: Duration,
}

fn sync_time(dir: &Path) -> (Duration, Duration) {
    let env = env::os::env();
    let file = env.storage.open(&dir.join("sync"), OpenMode::CreateNew).unwrap();
    let mut times: Vec<Duration> = (0..200)
        .map(|n| {
            let begun = Instant::now();
            env::write_all_at(&*file, &[7; 4096], n * 4096).unwrap();
            file.sync().unwrap();
            begun.elapsed()
        })
        .collect();
    times.sort();
    (times[100], times[198])
}

fn options(way: &str) -> Options {
    let commit_log = (way == "commit-log").then(LogOptions::default);
    let files_max = if way == "close-each-time" { 0 } else { 4096 };
    Options { files_max, commit_log, ..Options::default() }
}

/// Writers that wait for a vBucket, in order of their seqnos.
type Waiting = Mutex<VecDeque<(Seqno, usize, Instant)>>;

struct Done {
    waiting: Vec<Waiting>,
    logs: Vec<Arc<Changelog>>,
    mailboxes: Vec<mpsc::Sender<Option<Vec<usize>>>>,
    taken_us: Mutex<Vec<u32>>,
    ops: AtomicU64,
}

impl Nudge for Done {
    fn marks_moved(&self, vb: VbId) {
        let durable = self.logs[usize::from(vb.0)].marks.durable();
        let mut done = Vec::new();
        {
            let mut waiting = self.waiting[usize::from(vb.0)].lock().unwrap();
            while let Some((seqno, writer, begun)) = waiting.front().copied()
                && seqno <= durable
            {
                waiting.pop_front();
                done.push((writer, begun.elapsed()));
            }
        }
        if done.is_empty() {
            return;
        }
        self.ops.fetch_add(done.len() as u64, Ordering::Relaxed);
        self.taken_us.lock().unwrap().extend(done.iter().map(|(_, taken)| taken.as_micros() as u32));
        let front_end = done[0].0 % FRONT_ENDS;
        let _ = self.mailboxes[front_end].send(Some(done.into_iter().map(|(writer, _)| writer).collect()));
    }
}

fn run(dir: &Path, way: &str, writers: usize, size: &Size) -> Run {
    let dir = tempfile::tempdir_in(dir).unwrap();
    let env = env::os::env();
    let pools = Pools::start(&env, &PoolConfig { writers: 8, ..PoolConfig::default() });
    let store = Store::open(&env, &pools, dir.path(), Options { writers: 8, ..options(way) }).unwrap();
    let spec = BucketSpec {
        name: "b".into(),
        uuid: BucketUuid(9),
        vbuckets: size.vbuckets,
        replicas: 0,
        quota_bytes: 4 << 30,
        flush_enabled: false,
        eviction: persist::Eviction::Value,
        rules: persist::WriteRules::default(),
        compaction: None,
    };
    let bucket = store.create_bucket(spec).unwrap();
    let failover = FailoverTable::new(FailoverEntry { uuid: VbUuid(7), seqno: Seqno(0) });
    let record = VbRecord::new(VbState::Active, failover);
    let logs: Vec<_> = (0..size.vbuckets).map(|_| Arc::new(Changelog::new(Seqno(0), Cas(0), record.clone()))).collect();
    let (mailboxes, front_ends): (Vec<_>, Vec<_>) = (0..FRONT_ENDS).map(|_| mpsc::channel()).unzip();
    let done = Arc::new(Done {
        waiting: logs.iter().map(|_| Waiting::default()).collect(),
        logs: logs.clone(),
        mailboxes: mailboxes.clone(),
        taken_us: Mutex::default(),
        ops: AtomicU64::new(0),
    });
    for (vb, log) in (0..).zip(&logs) {
        bucket.attach(VbId(vb), Arc::clone(log), done.clone());
        // Every vBucket has its file before the clock starts: making them is not what is measured.
        append(&env, log, 0);
        bucket.changed(VbId(vb), Urgency::Durable);
    }
    store.start_drain();
    while logs.iter().any(|log| log.marks.filed() < Seqno(1)) {
        std::thread::sleep(Duration::from_millis(1));
    }
    let elapsed = std::thread::scope(|scope| {
        for (number, front_end) in front_ends.into_iter().enumerate() {
            let (env, bucket, logs, done) = (&env, &bucket, &logs, &done);
            scope.spawn(move || {
                let mut dice = number as u64 + 1;
                while let Ok(Some(ready)) = front_end.recv() {
                    for writer in ready {
                        dice = dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                        let vb = ((dice >> 33) % logs.len() as u64) as u16;
                        {
                            let mut waiting = done.waiting[usize::from(vb)].lock().unwrap();
                            let begun = Instant::now();
                            let seqno = append(env, &logs[usize::from(vb)], dice >> 40).seqno();
                            waiting.push_back((seqno, writer, begun));
                        }
                        bucket.changed(VbId(vb), Urgency::Durable);
                    }
                }
            });
        }
        let begun = Instant::now();
        for (number, mailbox) in mailboxes.iter().enumerate() {
            let _ = mailbox.send(Some((number..writers).step_by(FRONT_ENDS).collect()));
        }
        std::thread::sleep(size.time);
        let elapsed = begun.elapsed();
        let ops = done.ops.load(Ordering::Relaxed);
        mailboxes.iter().for_each(|mailbox| drop(mailbox.send(None)));
        (elapsed, ops)
    });
    drop((bucket, store));
    pools.shutdown(Stop::Cancel);
    let (elapsed, ops) = elapsed;
    let mut taken = std::mem::take(&mut *done.taken_us.lock().unwrap());
    taken.sort_unstable();
    assert!(!taken.is_empty(), "nothing became durable");
    let at = |permille: usize| Duration::from_micros(taken[(taken.len() - 1) * permille / 1000].into());
    let sum: u64 = taken.iter().map(|us| u64::from(*us)).sum();
    Run {
        ops_per_s: ops as f64 / elapsed.as_secs_f64(),
        mean: Duration::from_micros(sum / taken.len() as u64),
        p50: at(500),
        p99: at(990),
        p999: at(999),
    }
}

fn append(env: &Env, log: &Changelog, key: u64) -> Item {
    let key = KeyBuf::in_default_collection(format!("key-{:08}", key % 100_000).as_bytes()).unwrap();
    log.append(&*env.clock, |stamp| {
        let meta = Meta {
            seqno: stamp.seqno,
            cas: stamp.cas,
            rev: RevSeqno(1),
            flags: 0,
            expiry: 0,
            datatype: Datatype::RAW,
            deleted: None,
        };
        let value = vec![b'v'; VALUE_BYTES].into_boxed_slice();
        Item::new(key.as_key(), meta, Kind::Committed { prepared: None }, Some(&value))
    })
}
