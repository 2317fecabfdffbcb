//! Goal: memory is accounted for, bounded, and never traded for a wrong answer.
//!
//! Method: a real server is filled and asked what it holds; what it says is compared with what the system says of it.

mod harness;

use std::collections::BTreeMap;

use harness::{Connection, Serve};
use wire::client::RequestFrame;
use wire::{Opcode, Status};

const BUCKET: &str = "default";
const ITEMS: u64 = 300_000;
const VALUE_LEN: usize = 300;
const PIPELINE: u64 = 1000;

fn key(n: u64) -> String {
    format!("key:{n:010}")
}

/// Sets keys `from..to`, many in flight. What is refused for now is asked again.
fn fill(client: &mut Connection, vbuckets: u64, keys: std::ops::Range<u64>, value: impl Fn(u64) -> Vec<u8>) {
    let mut waiting: Vec<u64> = keys.rev().collect();
    while !waiting.is_empty() {
        let batch = waiting.split_off(waiting.len().saturating_sub(PIPELINE as usize));
        let mut frames = Vec::new();
        for &n in batch.iter().rev() {
            let (key, value, extras) = (key(n), value(n), &[0; 8]);
            let vbucket = (n % vbuckets) as u16;
            let (key, value) = (key.as_bytes(), &value[..]);
            RequestFrame { vbucket, key, extras, value, ..RequestFrame::new(Opcode::Set) }.encode(&mut frames);
        }
        client.send_raw(&frames).unwrap();
        for &n in batch.iter().rev() {
            match client.receive().unwrap().status {
                Status::Success => {}
                Status::Etmpfail | Status::Enomem => waiting.push(n),
                other => panic!("{n}: {other:?}"),
            }
        }
    }
}

fn stats(client: &mut Connection, group: &str) -> BTreeMap<String, String> {
    client.stats(group).unwrap().into_iter().collect()
}

fn number(stats: &BTreeMap<String, String>, name: &str) -> u64 {
    stats.get(name).unwrap_or_else(|| panic!("no {name:?} in {stats:?}")).parse().unwrap()
}

/// Waits until everything is in the files, and only there and in the tables.
fn until_filed(client: &mut Connection) {
    while number(&stats(client, ""), "ep_queue_size") > 0 || number(&stats(client, "memory"), "changelogs") > 0 {
        std::thread::yield_now();
    }
}

#[test]
fn the_parts_add_up_to_what_the_system_sees() {
    let dir = harness::directory();
    let server = Serve::on(dir.path()).set("bucket.vbuckets=64").start();
    let mut client = server.client(BUCKET);
    fill(&mut client, 64, 0..ITEMS, |_| vec![b'x'; VALUE_LEN]);
    for when in ["full of what is not filed", "at rest"] {
        if when == "at rest" {
            until_filed(&mut client);
        }
        let memory = stats(&mut client, "memory");
        let (rss, sum) = (number(&memory, "rss"), number(&memory, "sum"));
        assert!(sum.abs_diff(rss) * 20 <= rss, "{when}: {sum} is not within 5 % of {rss}: {memory:#?}");
        // All that is named, and not only by subtraction.
        let other = number(&memory, "heap_other");
        println!("{when}: rss {rss}, sum {sum}, heap_other {other}, heap_free {}", number(&memory, "heap_free"));
        let parts = ["documents", "tables", "key_filters", "changelogs", "fetches"].map(|part| number(&memory, part));
        let (parts, used) = (parts.iter().sum::<u64>(), number(&memory, "mem_used"));
        // They are read one after the other, and before that something may be filed meanwhile.
        if when == "at rest" {
            assert_eq!(parts, used, "{when}: one bucket, so its own sum");
        } else {
            assert!(parts.abs_diff(used) * 50 <= used, "{when}: one bucket, {parts} is its own sum {used}");
        }
        assert!(number(&memory, "documents") / ITEMS >= VALUE_LEN as u64 + 14, "{when}: {memory:#?}");
    }
    let told = server.tool(&["stats", "memory", "--json"]);
    let told: serde_json::Value = serde_json::from_str(told.fine()).unwrap();
    assert!(told["rss"].as_u64().unwrap() > 0 && told["ep_items_in_memory"] == ITEMS);
    server.stop();
}

/// What a client wrote last under each of its keys.
type Known = BTreeMap<u64, u32>;

/// Tells which write it was.
fn large(n: u64, round: u32) -> Vec<u8> {
    (n << 32 | u64::from(round)).to_be_bytes().repeat(LARGE_LEN / 8)
}

const LARGE_LEN: usize = 28_000;
const LARGE_VBUCKETS: u64 = 64;
const CLIENTS: u64 = 4;
const KEYS_EACH: u64 = 3000;

/// Asks until it is more than a refusal for now.
fn ask(client: &mut Connection, n: u64, request: RequestFrame<'_>) -> harness::Reply {
    let key = key(n);
    let vbucket = (n % LARGE_VBUCKETS) as u16;
    loop {
        let reply = client.call(&RequestFrame { vbucket, key: key.as_bytes(), ..request }).unwrap();
        if !matches!(reply.status, Status::Etmpfail | Status::Enomem) {
            return reply;
        }
    }
}

fn check(client: &mut Connection, n: u64, known: &Known) {
    let reply = ask(client, n, RequestFrame::new(Opcode::Get));
    match known.get(&n) {
        Some(round) => {
            assert!(reply.status == Status::Success && reply.value == large(n, *round), "{n}: {:?}", reply.status)
        }
        None => assert_eq!(reply.status, Status::KeyEnoent, "{n}"),
    }
}

/// Writes, reads, adds and deletes keys that are its own, and knows what must come back.
fn live(mut client: Connection, number: u64, known: &mut Known) {
    let mut dice = harness::Dice::new("larger than memory");
    for step in 0..3500u32 {
        let n = dice.below(KEYS_EACH as usize) as u64 * CLIENTS + number;
        let value = large(n, step);
        let store = RequestFrame { extras: &[0; 8], value: &value, ..RequestFrame::new(Opcode::Set) };
        match dice.below(10) {
            0..=5 => {
                assert_eq!(ask(&mut client, n, store).status, Status::Success);
                known.insert(n, step);
            }
            6 => {
                let reply = ask(&mut client, n, RequestFrame { opcode: Opcode::Add as u8, ..store });
                let expected = if known.contains_key(&n) { Status::KeyEexists } else { Status::Success };
                assert_eq!(reply.status, expected, "ADD of {n}");
                known.entry(n).or_insert(step);
            }
            7 => {
                let reply = ask(&mut client, n, RequestFrame::new(Opcode::Delete));
                let expected = if known.remove(&n).is_some() { Status::Success } else { Status::KeyEnoent };
                assert_eq!(reply.status, expected, "DELETE of {n}");
            }
            _ => check(&mut client, n, known),
        }
    }
}

/// Goal: ten times more data than memory, under either kind of eviction, and after a restart too: the quota holds, and nobody
/// can tell by the answers. Method: clients with keys of their own, and a map beside each; then a kill, and every key is
/// asked for while it is loaded.
#[test]
fn ten_times_more_data_than_memory_is_answered_right() {
    for policy in ["value", "full"] {
        let dir = harness::directory();
        let serve = || {
            Serve::on(dir.path())
                .set("bucket.vbuckets=64")
                .set("bucket.quota_mb=16")
                .set(&format!("bucket.eviction={policy}"))
                .set("warm_up.grace_ms=0")
        };
        let server = serve().start();
        let shown = stats(&mut server.client(BUCKET), "");
        assert!(shown["ep_item_eviction_policy"].starts_with(policy), "{shown:?}");
        let mut known = vec![Known::new(); CLIENTS as usize];
        std::thread::scope(|scope| {
            for (number, known) in (0..).zip(&mut known) {
                let client = server.client(BUCKET);
                scope.spawn(move || live(client, number, known));
            }
        });
        let mut client = server.client(BUCKET);
        let memory = stats(&mut client, "memory");
        let documents: usize = known.iter().map(Known::len).sum();
        println!(
            "{policy}: {} MB in {} MB: {memory:#?}",
            (documents * LARGE_LEN) >> 20,
            number(&memory, "mem_used") >> 20
        );
        assert!(documents * LARGE_LEN >= 160 << 20, "{documents} documents");
        assert!(number(&memory, "mem_used") <= number(&memory, "ep_max_size"));
        until_filed(&mut client);
        server.kill9();

        let server = serve().start();
        let mut client = server.client(BUCKET);
        for n in 0..KEYS_EACH * CLIENTS {
            check(&mut client, n, &known[(n % CLIENTS) as usize]);
        }
        let warm_up = stats(&mut client, "warmup");
        assert_eq!(number(&warm_up, "ep_warmup_estimated_key_count"), documents as u64);
        while stats(&mut client, "warmup")["ep_warmup_state"] != "done" {
            std::thread::yield_now();
        }
        assert_eq!(number(&stats(&mut client, ""), "curr_items"), documents as u64);
        let metrics = server.http("/metrics").1;
        let loaded = metrics.lines().find(|line| line.contains("bucket_warm_up_vbuckets_loaded{")).unwrap();
        assert!(loaded.ends_with(" 64"), "{loaded}");
        server.stop();
    }
}
