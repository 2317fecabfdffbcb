//! Goal: whatever clients do while files are compacted, every file is whole, holds what was acknowledged, and counts it right.
//!
//! Method: a real server, one client a vBucket with a model of its own, another that compacts without a pause; then SIGKILL.
//! One vBucket is deleted and made again now and then, so that it is dropped while it is compacted, or is about to be.
//! The files are judged by the offline check, once as the kill left them and once as a new start stopped with them.

mod harness;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use harness::{Connection, Dice, Serve, Server};
use types::Level;
use wire::client::RequestFrame;
use wire::{Opcode, Status};

const BUCKET: &str = "default";
const VBUCKETS: u16 = 4;
const ROUNDS: usize = 400;
/// The vBucket that does not last.
const REBORN: u16 = 0;

type Model = BTreeMap<String, Vec<u8>>;

#[test]
fn files_that_were_compacted_under_load_pass_the_check_and_hold_what_was_acknowledged() {
    for log in ["on", "off"] {
        let dir = harness::directory();
        let data = dir.path().join("data");
        let serve = || {
            let serve = Serve::on(&data).set(&format!("bucket.vbuckets={VBUCKETS}"));
            // Files are written all the time, so that compactions have something to follow.
            serve.set(&format!("persist.commit_log={log}")).set("persist.filing_age_s_max=1")
        };
        let server = serve().start();
        let models = load(&server, log);
        let lines: BTreeMap<_, _> = server.client(BUCKET).stats("compaction").unwrap().into_iter().collect();
        assert!(lines.contains_key("exclusive"), "{lines:?}");
        server.kill9();
        // An old file may still lie beside the one that took its place.
        assert_files_are_whole(&data);

        let server = serve().start();
        let mut client = server.client(BUCKET);
        for (vb, model) in models.iter().enumerate() {
            for (key, value) in model {
                assert_eq!(client.get(vb as u16, key).unwrap().value, *value, "vBucket {vb}: {key}");
            }
        }
        let counts: BTreeMap<_, _> = client.stats("").unwrap().into_iter().collect();
        assert_eq!(counts["curr_items"], models.iter().map(Model::len).sum::<usize>().to_string());
        server.stop();
        assert_eq!(assert_files_are_whole(&data), usize::from(VBUCKETS));
        let mut found = Model::new();
        for file in harness::vbucket_files(&data, BUCKET) {
            let dump = harness::run(&["file", "dump", file.to_str().unwrap()]).fine().to_owned();
            let docs = dump.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
            for doc in docs.filter(|doc| doc["prepare"].is_null() && doc["deleted"] == false) {
                let body = doc["body"].as_str().expect("text").as_bytes().to_vec();
                let is_new = found.insert(key(doc["id_hex"].as_str().expect("hex")), body).is_none();
                assert!(is_new, "twice: {doc}");
            }
        }
        assert_eq!(found, models.into_iter().flatten().collect::<Model>());
    }
}

/// As clients call it: without the collection before it.
fn key(id_hex: &str) -> String {
    let bytes = id_hex.as_bytes()[2..].chunks(2).map(|pair| std::str::from_utf8(pair).expect("hex"));
    bytes.map(|pair| char::from(u8::from_str_radix(pair, 16).expect("hex"))).collect()
}

/// What each vBucket must hold.
fn load(server: &Server, test: &str) -> Vec<Model> {
    let is_over = AtomicBool::new(false);
    let mut dice = Dice::new(&format!("compaction with the log {test}"));
    thread::scope(|scope| {
        let (client, is_over) = (server.client(BUCKET), &is_over);
        let compacting = scope.spawn(move || compact_until(client, is_over));
        let writers: Vec<_> = (0..VBUCKETS)
            .map(|vb| {
                let (mut client, mut dice) = (server.client(BUCKET), dice.split());
                scope.spawn(move || write(&mut client, vb, &mut dice))
            })
            .collect();
        let models = writers.into_iter().map(|writer| writer.join().expect("no panic")).collect();
        is_over.store(true, Ordering::Relaxed);
        assert!(compacting.join().expect("no panic") >= u64::from(VBUCKETS));
        models
    })
}

fn write(client: &mut Connection, vb: u16, dice: &mut Dice) -> Model {
    let mut model = Model::new();
    for round in 0..ROUNDS {
        if vb == REBORN && dice.one_in(20) {
            make_anew(client, vb);
            model.clear();
        }
        let key = format!("{vb}-{}", dice.below(50));
        if dice.one_in(4) {
            let delete = RequestFrame { vbucket: vb, key: key.as_bytes(), ..RequestFrame::new(Opcode::Delete) };
            let expected = if model.remove(&key).is_some() { Status::Success } else { Status::KeyEnoent };
            assert_eq!(client.call(&delete).unwrap().status, expected, "{key}");
        } else {
            let value = format!("{{\"round\":{round},\"filler\":\"{}\"}}", "x".repeat(dice.below(300))).into_bytes();
            let level = dice.one_in(2).then_some(Level::PersistMajority);
            client.set(vb, &key, &value, level).unwrap();
            model.insert(key, value);
        }
    }
    // The last of each vBucket is durable, and so is all that came before it.
    let key = format!("{vb}-last");
    client.set(vb, &key, b"{}", Some(Level::PersistMajority)).unwrap();
    model.insert(key, b"{}".to_vec());
    model
}

/// Dead, gone, and there again.
fn make_anew(client: &mut Connection, vbucket: u16) {
    let (dead, active) = ([4], [1]);
    for (opcode, extras) in [(Opcode::SetVbucket, &dead[..]), (Opcode::DelVbucket, &[]), (Opcode::SetVbucket, &active)]
    {
        let request = RequestFrame { vbucket, extras, ..RequestFrame::new(opcode) };
        assert_eq!(client.call(&request).unwrap().status, Status::Success, "{opcode:?}");
    }
}

fn compact_until(mut client: Connection, is_over: &AtomicBool) -> u64 {
    let mut count = 0;
    while !is_over.load(Ordering::Relaxed) || count < u64::from(VBUCKETS) {
        let mut extras = [0; 24];
        extras[16] = (count / 4 % 2) as u8; // leave out tombstones, every other round
        let vbucket = (count % u64::from(VBUCKETS)) as u16;
        let reply = client.call(&RequestFrame { vbucket, extras: &extras, ..RequestFrame::new(Opcode::CompactDb) });
        let status = reply.unwrap().status;
        // Whoever asks for it as it goes is told so.
        let may_be_gone = vbucket == REBORN && matches!(status, Status::Etmpfail | Status::NotMyVbucket);
        assert!(status == Status::Success || may_be_gone, "{status:?}");
        count += 1;
    }
    count
}

fn assert_files_are_whole(data: &std::path::Path) -> usize {
    let files = harness::vbucket_files(data, BUCKET);
    for file in &files {
        let name = file.to_str().unwrap();
        let check = harness::run(&["file", "check", "--all", name]);
        let check: serde_json::Value = serde_json::from_str(check.fine()).unwrap();
        assert_eq!(check["whole"], true, "{check}");
    }
    files.len()
}
