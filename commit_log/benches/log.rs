//! What a sync costs here, and what the log makes of it: `cargo bench -p commit_log [-- --seconds S] [--dir DIR]`.
//!
//! All variants take turns in one run, so that the machine's moods meet all alike; medians are of the turns. Under
//! `cargo test` everything is small and nothing is claimed.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use commit_log::{Driver, Lead, Log, Observer, Options, Submission, Synced, Way};
use env::{Durable, OpenMode};
use scheduler::park::{Bay, Look, Wake};
use scheduler::{PoolConfig, Pools};
use types::{BucketUuid, Cas, Datatype, Item, KeyBuf, Kind, Meta, RevSeqno, Seqno, VbId};

const VBUCKETS: usize = 1024;
const VALUE_BYTES: usize = 512;

struct Sizes {
    turns: usize,
    turn: Duration,
    syncs_a_turn: usize,
    segment_bytes: u64,
    dir: PathBuf,
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let value = |name: &str| arguments.iter().position(|a| a == name).and_then(|n| arguments.get(n + 1).cloned());
    let is_bench = arguments.iter().any(|argument| argument == "--bench");
    let seconds: f64 = value("--seconds").map_or(3.0, |s| s.parse().expect("a number of seconds"));
    let dir = value("--dir").map_or(std::env::temp_dir(), PathBuf::from);
    let sizes = match is_bench {
        true => Sizes {
            turns: 7,
            turn: Duration::from_secs_f64(seconds / 7.0),
            syncs_a_turn: 200,
            segment_bytes: 64 << 20,
            dir,
        },
        false => Sizes { turns: 1, turn: Duration::from_millis(20), syncs_a_turn: 3, segment_bytes: 1 << 20, dir },
    };
    measure_syncs(&sizes);
    measure_log(&sizes);
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Write and sync against a write that is durable by itself, on a file that was zeroed before.
fn measure_syncs(sizes: &Sizes) {
    println!("{:>9}  {:<28} {:>9} {:>9}", "bytes", "way", "p50 µs", "p99 µs");
    let env = env::os::env();
    let dir = tempfile::tempdir_in(&sizes.dir).expect("a directory");
    for bytes in [4096, 16 << 10, 64 << 10, 256 << 10, 1 << 20] {
        let path = dir.path().join(format!("{bytes}"));
        let file = env.storage.open(&path, OpenMode::CreateNew).expect("create");
        let zeros = vec![0; 1 << 20];
        let file_bytes = sizes.segment_bytes;
        (0..file_bytes >> 20).for_each(|n| env::write_all_at(&*file, &zeros, n << 20).expect("write"));
        file.sync().expect("sync");
        let open = |how| env.storage.open_durable(&path, how).expect("open");
        let durable = [("O_DSYNC write", open(Durable::Synced)), ("O_DIRECT | O_DSYNC write", open(Durable::Direct))];
        let memory = vec![0xa5; bytes + 4096];
        let start = memory.as_ptr().align_offset(4096);
        let block = &memory[start..start + bytes];
        let mut ways = vec![("write + fdatasync", None, Vec::new(), 0)];
        ways.extend(durable.iter().filter_map(|(name, file)| Some((*name, Some(file.as_ref()?), Vec::new(), 0))));
        for _ in 0..sizes.turns {
            for (_, durable, took, at) in &mut ways {
                for _ in 0..sizes.syncs_a_turn {
                    if *at + bytes as u64 > file_bytes {
                        *at = 0;
                    }
                    let began = Instant::now();
                    match durable {
                        Some(durable) => env::write_all_at(&***durable, block, *at).expect("write"),
                        None => {
                            env::write_all_at(&*file, block, *at).expect("write");
                            file.sync().expect("sync");
                        }
                    }
                    took.push(began.elapsed().as_secs_f64() * 1e6);
                    *at += bytes as u64;
                }
            }
        }
        for (name, _, mut took, _) in ways {
            took.sort_by(f64::total_cmp);
            println!(
                "{bytes:>9}  {name:<28} {:>9.0} {:>9.0}",
                took[took.len() / 2],
                took[(took.len() * 99 / 100).min(took.len() - 1)]
            );
        }
    }
}

/// Hands what became durable to the thread that plays the clients.
struct Answers(Bay<Vec<Synced>>);

impl Observer for Answers {
    fn durable(&self, batch: &[Synced]) {
        self.0.change(|answers| {
            answers.extend_from_slice(batch);
            ((), Wake::One)
        });
    }
    fn poisoned(&self, reason: &str) {
        panic!("{reason}");
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Led {
    /// The clients' thread leads itself.
    Inline,
    Driven(Driver),
}

struct Variant {
    name: &'static str,
    way: Way,
    led: Led,
}

/// Clients in a closed loop: each submits one 512-byte change, waits until it is durable, and submits the next.
struct Clients {
    log: Arc<Log>,
    answers: Arc<Answers>,
    _pools: Arc<Pools>,
    _dir: tempfile::TempDir,
    led: Led,
    /// By vBucket: high seqno, and what is not durable yet.
    vbs: Vec<(u64, VecDeque<u64>)>,
    item: Box<[u8]>,
}

const BUCKET: BucketUuid = BucketUuid(1);

impl Clients {
    fn new(sizes: &Sizes, variant: &Variant) -> Clients {
        let env = env::os::env();
        let dir = tempfile::tempdir_in(&sizes.dir).expect("a directory");
        let options = Options {
            segment_bytes: sizes.segment_bytes,
            log_bytes_max: 4 * sizes.segment_bytes,
            way: Some(variant.way),
        };
        let log = Log::open(&env, &dir.path().join("log"), options, &mut |_| {}).expect("a new log");
        let answers = Arc::new(Answers(Bay::new(Vec::new())));
        log.observe(answers.clone());
        let pools = Pools::start(&env, &PoolConfig::default());
        if let Led::Driven(driver) = variant.led {
            log.drive(&pools, driver).expect("a thread");
        }
        // All files are made before anything is measured.
        let mut clients = Clients {
            log,
            answers,
            _pools: pools,
            _dir: dir,
            led: variant.led,
            vbs: (0..VBUCKETS).map(|_| (0, VecDeque::new())).collect(),
            item: vec![b'v'; VALUE_BYTES].into(),
        };
        while clients.log.stats().bytes < 5 * sizes.segment_bytes {
            clients.run(4000, Duration::from_millis(50));
        }
        clients
    }

    fn submit(&mut self, vb: usize) {
        let (high, waiting) = &mut self.vbs[vb];
        *high += 1;
        waiting.push_back(*high);
        let meta = Meta {
            seqno: Seqno(*high),
            cas: Cas(*high << 16),
            rev: RevSeqno(1),
            flags: 0,
            expiry: 0,
            datatype: Datatype::RAW,
            deleted: None,
        };
        let key = KeyBuf::in_default_collection(b"key-0123456789").expect("a key");
        let item = Item::new(key.as_key(), meta, Kind::Committed { prepared: None }, Some(&self.item));
        let submission = Submission {
            bucket: BUCKET,
            vb: VbId(vb as u16),
            items: &[item],
            last: Seqno(*high),
            record: None,
            past: None,
        };
        self.log.submit(&submission).expect("room");
    }

    /// Returns changes per second and syncs per second.
    fn run(&mut self, count: usize, time: Duration) -> (f64, f64) {
        let syncs = self.log.stats().syncs;
        let began = Instant::now();
        (0..count).for_each(|n| self.submit(n % VBUCKETS));
        let (mut open, mut answered) = (count, 0);
        while open > 0 {
            if self.led == Led::Inline {
                assert_ne!(self.log.lead(), Lead::Full);
            }
            let batch = self.answers.0.wait(|answers| match answers.is_empty() {
                true => Look::Nothing,
                false => Look::Found(std::mem::take(answers)),
            });
            let goes_on = began.elapsed() < time;
            for synced in batch {
                let vb = usize::from(synced.key.vb.0);
                let waiting = &mut self.vbs[vb].1;
                let before = waiting.len();
                while waiting.front().is_some_and(|seqno| *seqno <= synced.seqno.0) {
                    waiting.pop_front();
                }
                let done = before - waiting.len();
                answered += done;
                open -= done;
                if goes_on {
                    (0..done).for_each(|_| self.submit(vb));
                    open += done;
                }
            }
            // The filer of this benchmark is infinitely fast.
            for holder in self.log.needs_filing(usize::MAX) {
                self.log.release(holder.key, holder.mark);
            }
        }
        let took = began.elapsed().as_secs_f64();
        (answered as f64 / took, (self.log.stats().syncs - syncs) as f64 / took)
    }
}

fn measure_log(sizes: &Sizes) {
    let variants = [
        Variant { name: "page cache, thread", way: Way::WriteAndSync, led: Led::Driven(Driver::Thread) },
        Variant { name: "page cache, inline", way: Way::WriteAndSync, led: Led::Inline },
        Variant { name: "direct, task", way: Way::Direct, led: Led::Driven(Driver::Task) },
        Variant { name: "direct, thread", way: Way::Direct, led: Led::Driven(Driver::Thread) },
        Variant { name: "direct, inline", way: Way::Direct, led: Led::Inline },
    ];
    let mut clients: Vec<_> = variants.iter().map(|variant| Clients::new(sizes, variant)).collect();
    println!("{:>9}  {:<28} {:>9} {:>9} {:>9}", "clients", "way", "changes/s", "syncs/s", "µs/sync");
    for count in [1, 64, 500, 2000] {
        let mut seen: Vec<(Vec<f64>, Vec<f64>)> = variants.iter().map(|_| Default::default()).collect();
        for _ in 0..sizes.turns {
            for (clients, (changes, syncs)) in clients.iter_mut().zip(&mut seen) {
                let (c, s) = clients.run(count, sizes.turn);
                changes.push(c);
                syncs.push(s);
            }
        }
        for (variant, (changes, syncs)) in variants.iter().zip(seen) {
            let (changes, syncs) = (median(changes), median(syncs));
            println!("{count:>9}  {:<28} {changes:>9.0} {syncs:>9.0} {:>9.0}", variant.name, 1e6 / syncs);
        }
    }
}
