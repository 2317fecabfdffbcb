//! Goal: a damaged file is refused by name and place, or read around where that is provably right; it never turns into
//! a wrong answer or a missing document.
//!
//! Method: a server writes a bucket and stops; its files are damaged in one way after another, each in a fresh copy,
//! and a server is started on the copy.

mod harness;

use std::fs;
use std::path::{Path, PathBuf};

use harness::{Dice, Ended, Serve, Server};
use types::Level;
use wire::Status;

const BUCKET: &str = "default";
const DOCUMENTS: usize = 120;
/// All documents are here; the bucket has another vBucket with one document, which is never damaged.
const VBUCKET: u16 = 1;

/// A data directory written by a server, and what is in it.
struct Original {
    dir: tempfile::TempDir,
    values: Vec<Vec<u8>>,
}

impl Original {
    fn write() -> Original {
        let dir = harness::directory();
        let mut dice = Dice::new("values");
        // What cannot be compressed is found in the file byte for byte.
        let values: Vec<_> = (0..DOCUMENTS).map(|n| dice.bytes(40 + n)).collect();
        // Each change by itself, so that there are older commits to go back to.
        let server = serve(&dir.path().join("original")).set("persist.commit_log=off").start();
        let mut client = server.client(BUCKET);
        for (n, value) in values.iter().enumerate() {
            let durable = (n % 10 == 9).then_some(Level::PersistMajority);
            assert_eq!(client.set(VBUCKET, &key(n), value, durable).unwrap().status, Status::Success);
        }
        assert_eq!(client.set(0, "neighbour", b"whole", None).unwrap().status, Status::Success);
        server.stop();
        Original { dir, values }
    }

    /// A copy to damage: its data directory and the vBucket's file in it.
    fn copy(&self, name: &str) -> (PathBuf, PathBuf) {
        let to = self.dir.path().join(name);
        copy_tree(&self.dir.path().join("original"), &to);
        let start = format!("{VBUCKET}.couch.");
        let mut files = harness::vbucket_files(&to, BUCKET);
        files.retain(|file| file.file_name().unwrap().to_str().unwrap().starts_with(&start));
        assert_eq!(files.len(), 1, "{files:?}");
        (to, files.remove(0))
    }

    /// How many documents the server gives back right after somebody chose to go back: others may be gone, none wrong.
    #[track_caller]
    fn readable_or_lost(&self, server: &Server) -> usize {
        let mut client = server.client(BUCKET);
        assert_eq!(client.get(0, "neighbour").unwrap().text(), "whole");
        let replies = self.values.iter().enumerate().map(|(n, value)| (client.get(VBUCKET, &key(n)).unwrap(), value));
        let right = replies.filter(|(reply, value)| {
            assert!(reply.status != Status::Success || reply.value == **value, "a wrong value");
            reply.status == Status::Success
        });
        right.count()
    }

    /// How many documents the server gives back right. Everything else it says must admit that it could not read.
    #[track_caller]
    fn readable(&self, server: &Server) -> usize {
        let mut client = server.client(BUCKET);
        assert_eq!(client.get(0, "neighbour").unwrap().text(), "whole");
        let mut right = 0;
        for (n, value) in self.values.iter().enumerate() {
            let reply = client.get(VBUCKET, &key(n)).unwrap();
            match reply.status {
                Status::Success => {
                    assert_eq!(&reply.value, value, "a wrong value for {}", key(n));
                    right += 1;
                }
                Status::KeyEnoent => panic!("{} is said not to exist; it cannot be read", key(n)),
                Status::Einternal | Status::Etmpfail | Status::NotMyVbucket => {}
                other => panic!("{}: {other:?}", key(n)),
            }
        }
        right
    }
}

fn key(n: usize) -> String {
    format!("document-{n:04}")
}

/// Without a commit log every durable write is a commit of its file, so there are older ones to go back to.
fn serve(data: &Path) -> Serve {
    Serve::on(data).set("bucket.vbuckets=2").set("persist.commit_log=off")
}

fn copy_tree(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy_tree(&entry.path(), &target);
        } else {
            fs::copy(entry.path(), target).unwrap();
        }
    }
}

fn header_at(file: &Path) -> usize {
    let info: serde_json::Value =
        serde_json::from_str(harness::run(&["file", "info", file.to_str().unwrap()]).fine()).unwrap();
    info["header_pos"].as_u64().unwrap() as usize
}

fn flip(file: &Path, at: usize) {
    let mut bytes = fs::read(file).unwrap();
    bytes[at] ^= 0x40;
    fs::write(file, bytes).unwrap();
}

/// It names the file, where, what is lost, and what can be done.
#[track_caller]
fn says_it_all(ended: &Ended, file: &Path) {
    let place = format!("{}@", file.display());
    ended.said(3, &[&place, "lost: ", "vBucket 1", "options: ", "backup", "settee file check", "persist.recovery=on"]);
    let offset = ended.stderr.split(&place).nth(1).unwrap();
    assert!(offset.starts_with(|c: char| c.is_ascii_digit()), "no offset: {}", ended.stderr);
}

#[test]
fn a_damaged_newest_commit_is_refused_until_someone_decides() {
    let original = Original::write();
    let (data, file) = original.copy("header");
    flip(&file, header_at(&file) + 9);
    let damaged = fs::read(&file).unwrap();
    says_it_all(&serve(&data).refused(), &file);
    // Asking again neither mends nor spoils anything.
    says_it_all(&serve(&data).refused(), &file);
    assert_eq!(fs::read(&file).unwrap(), damaged, "a refusal changed the file");
    harness::run(&["file", "check", file.to_str().unwrap()]).said(3, &[file.to_str().unwrap()]);

    // One way out: back to the commit before.
    let server = serve(&data).set("persist.recovery=on").start();
    let mut client = server.client(BUCKET);
    assert_eq!(client.get(0, "neighbour").unwrap().text(), "whole");
    assert_eq!(client.get(VBUCKET, &key(0)).unwrap().value, original.values[0]);
    let stderr = server.stop().stderr;
    assert!(stderr.contains(file.to_str().unwrap()) && stderr.contains("lost"), "{stderr}");
    serve(&data).start().stop();

    // Another: without the file.
    let (data, file) = original.copy("moved");
    flip(&file, header_at(&file) + 9);
    fs::rename(&file, data.join("elsewhere")).unwrap();
    let server = serve(&data).start();
    assert_eq!(server.client(BUCKET).get(0, "neighbour").unwrap().text(), "whole");
    assert_eq!(server.client(BUCKET).get(VBUCKET, &key(0)).unwrap().status, Status::KeyEnoent);
    server.stop();
}

#[test]
fn a_damaged_tree_is_refused() {
    let original = Original::write();
    let (data, file) = original.copy("node");
    // The last thing in front of a header is the end of a tree's root.
    let bytes = fs::read(&file).unwrap();
    let end = bytes[..header_at(&file)].iter().rposition(|&byte| byte != 0).unwrap();
    flip(&file, end);
    says_it_all(&serve(&data).refused(), &file);
}

/// Where the document's value is.
fn body_at(file: &Path, value: &[u8]) -> usize {
    let bytes = fs::read(file).unwrap();
    bytes.windows(20).position(|window| window == &value[..20]).expect("a value that cannot be compressed")
}

/// Places in a vBucket's file that opening it does not look at: a body, and the leaves whose first documents are neither
/// among the first nor among the last.
fn deep_places(original: &Original) -> Vec<(String, usize)> {
    let (_, file) = original.copy("layout");
    let mut places = vec![("body".to_owned(), body_at(&file, &original.values[50]))];
    let bytes = fs::read(&file).unwrap();
    for n in DOCUMENTS / 4..DOCUMENTS * 3 / 4 {
        let key = key(n);
        let named = bytes.windows(key.len()).enumerate().filter(|(_, word)| *word == key.as_bytes());
        places.extend(named.map(|(at, _)| (format!("leaf-{n}-{at}"), at)));
    }
    // Most of what is in the file was replaced by a later commit.
    places.retain(|(what, at)| {
        let (_, file) = original.copy(&format!("{what}-looked-at"));
        flip(&file, *at);
        harness::run(&["file", "check", file.to_str().unwrap()]).code == Some(3)
    });
    println!("{places:?}");
    assert!(places.len() >= 3, "{places:?}");
    places
}

/// Goal: data that can be read in the time a start may take is read before it is served, to the last byte. Method: bodies,
/// and leaves of both trees, none of which opening a file looks at.
#[test]
fn damage_deep_in_a_file_is_refused_if_there_is_time_to_find_it() {
    let original = Original::write();
    for (what, at) in deep_places(&original) {
        let (data, file) = original.copy(&what);
        flip(&file, at);
        let damaged = fs::read(&file).unwrap();
        says_it_all(&serve(&data).set("warm_up.grace_ms=60000").refused(), &file);
        assert_eq!(fs::read(&file).unwrap(), damaged, "{what}: a refusal changed the file");
        let at = format!("{}@", file.display());
        harness::run(&["file", "check", file.to_str().unwrap()]).said(3, &[&at]);
        if what == "body" {
            harness::run(&["file", "dump", file.to_str().unwrap()]).said(3, &[&at]);
        }
    }
}

/// Goal: what is found damaged only while it is served is told wherever a person looks, and nobody who asks for it hears that
/// it does not exist, nor may put something in its place. Method: as before, with no time before `ready`.
#[test]
fn damage_found_later_is_told_and_never_becomes_a_missing_document() {
    let original = Original::write();
    for (what, at) in deep_places(&original) {
        let (data, file) = original.copy(&what);
        flip(&file, at);
        let server = serve(&data).set("warm_up.grace_ms=0").start();
        let mut client = server.client(BUCKET);
        let stat = |client: &mut harness::Connection, group: &str, name: &str| {
            let stats = client.stats(group).unwrap();
            stats.into_iter().find(|(found, _)| found == name).map(|(_, value)| value)
        };
        while stat(&mut client, "warmup", "ep_warmup_state").as_deref() != Some("done") {
            std::thread::yield_now();
        }
        let place = format!("{}@", file.display());
        let why = stat(&mut client, "warmup", "ep_warmup_failed:vb_1").unwrap_or_default();
        assert!(why.contains(&place) && why.contains("lost: "), "{what}: {why}");
        assert_eq!(stat(&mut client, "", "vb_unloadable_num").as_deref(), Some("1"), "{what}");
        let health = server.http("/health/ready").1;
        assert!(health.starts_with("ready\nbucket default, vBucket 1 could not be read whole"), "{what}: {health}");
        assert!(server.http("/metrics").1.contains("bucket_unloadable_vbuckets{bucket=\"default\"} 1"), "{what}");
        let readable = original.readable(&server);
        println!("{what} @{at}: {readable} of {DOCUMENTS} readable");
        assert!((DOCUMENTS / 4..=DOCUMENTS).contains(&readable), "{what}: {readable}");
        for n in 0..DOCUMENTS {
            let added = client.add(VBUCKET, &key(n), b"in its place").unwrap();
            assert_ne!(added.status, Status::Success, "{what}: {} was overwritten", key(n));
        }
        assert_eq!(original.readable(&server), readable, "{what}");
        assert!(server.stop().stderr.contains(&place), "{what}: the log names the place");
    }
}

#[test]
fn recovery_gets_past_damage_wherever_it_is() {
    let original = Original::write();
    let (_, file) = original.copy("layout");
    let newest = header_at(&file);
    let bytes = fs::read(&file).unwrap();
    let body = bytes.windows(20).position(|window| window == &original.values[110][..20]).expect("not compressed");
    // In front of the newest header lie the nodes it brought, the documents' own before the roots.
    let nodes = body + original.values[110].len() + 200;
    assert!(nodes < newest, "{nodes} {newest}");
    let last = bytes[..newest].iter().rposition(|&byte| byte != 0).unwrap();
    for (what, at) in [("a body", body), ("a node", nodes), ("the last node", last), ("the header", newest + 9)] {
        let (data, file) = original.copy(what);
        flip(&file, at);
        let server = serve(&data).set("persist.recovery=on").start();
        let readable = original.readable_or_lost(&server);
        println!("{what} @{at}: {readable} of {DOCUMENTS} readable");
        assert!(readable > 0, "{what}: no older commit was used");
        let set = server.client(BUCKET).set(VBUCKET, "later", b"v", Some(Level::PersistMajority)).unwrap();
        assert_eq!(set.status, Status::Success, "{what}");
        server.stop();
        // What was given up is given up: the next start needs no option.
        let server = serve(&data).start();
        assert_eq!(original.readable_or_lost(&server), readable, "{what}, a start later");
        assert_eq!(server.client(BUCKET).get(VBUCKET, "later").unwrap().text(), "v", "{what}");
        server.stop();
    }
}

#[test]
fn files_that_are_no_vbucket_files_are_refused() {
    let original = Original::write();
    for (what, bytes) in
        [("empty", Vec::new()), ("zeros", vec![0; 8192]), ("garbage", Dice::new("garbage").bytes(20_000))]
    {
        let (data, file) = original.copy(what);
        fs::write(&file, bytes).unwrap();
        serve(&data).refused().said(3, &[file.to_str().unwrap(), "lost: ", "options: "]);
    }
    let (data, file) = original.copy("cut");
    let bytes = fs::read(&file).unwrap();
    fs::write(&file, &bytes[..header_at(&file) + 5]).unwrap();
    says_it_all(&serve(&data).refused(), &file);
}

#[test]
fn every_damaged_file_is_named_at_once() {
    let original = Original::write();
    let (data, file) = original.copy("two");
    let other = harness::vbucket_files(&data, BUCKET).into_iter().find(|path| *path != file).unwrap();
    flip(&file, header_at(&file) + 9);
    flip(&other, header_at(&other) + 9);
    serve(&data).refused().said(3, &[file.to_str().unwrap(), other.to_str().unwrap(), "vBucket 0", "vBucket 1"]);
}

#[test]
fn a_newer_generation_that_was_never_in_use_is_set_aside_and_reported() {
    let original = Original::write();
    for (what, bytes) in
        [("zero-length", Vec::new()), ("cut short", vec![1, 0, 0, 0]), ("noise", Dice::new("noise").bytes(9000))]
    {
        let (data, file) = original.copy(what);
        let name = file.to_str().unwrap();
        let (stem, rev) = name.rsplit_once('.').unwrap();
        let bogus = PathBuf::from(format!("{stem}.{}", rev.parse::<u64>().unwrap() + 1));
        fs::write(&bogus, &bytes).unwrap();
        let server = serve(&data).start();
        assert_eq!(original.readable(&server), DOCUMENTS, "{what}");
        assert_eq!(
            server.client(BUCKET).set(VBUCKET, "later", b"v", Some(Level::PersistMajority)).unwrap().status,
            Status::Success
        );
        let said = server.stop().stderr;
        assert!(said.contains(bogus.to_str().unwrap()), "{what}: not reported:\n{said}");
        let kept = fs::read_dir(bogus.parent().unwrap()).unwrap().map(|entry| entry.unwrap().path());
        let kept: Vec<_> = kept.filter(|path| *path != file && fs::read(path).unwrap() == bytes).collect();
        assert_eq!(kept.len(), 1, "{what}: kept for a person to look at: {kept:?}");
        let server = serve(&data).start();
        assert_eq!(original.readable(&server), DOCUMENTS, "{what}, a start later");
        assert_eq!(server.client(BUCKET).get(VBUCKET, "later").unwrap().text(), "v");
        server.stop();
    }
}

#[test]
fn a_newer_generation_with_commits_of_its_own_is_not_passed_over() {
    let original = Original::write();
    let (data, file) = original.copy("newer");
    let (stem, rev) = file.to_str().unwrap().rsplit_once('.').unwrap();
    let newer = PathBuf::from(format!("{stem}.{}", rev.parse::<u64>().unwrap() + 1));
    fs::copy(&file, &newer).unwrap();
    flip(&newer, header_at(&file) + 9);
    says_it_all(&serve(&data).refused(), &newer);
}

#[test]
fn a_flipped_bit_anywhere_never_becomes_a_wrong_answer() {
    let original = Original::write();
    let mut dice = Dice::new("flipped bits");
    let (_, file) = original.copy("size");
    let newest = header_at(&file);
    let len = fs::metadata(&file).unwrap().len() as usize;
    let mut refused = 0;
    for round in 0..30 {
        let (data, file) = original.copy(&format!("flip-{round}"));
        // Half of them where the newest commit lies.
        let at = if round % 2 == 0 {
            dice.below(len)
        } else {
            newest.saturating_sub(6000) + dice.below(len - newest.saturating_sub(6000))
        };
        flip(&file, at);
        let mut server = serve(&data).spawn();
        if server.wait_until_ready() {
            original.readable(&server);
            server.stop();
        } else {
            let ended = server.ended();
            ended.said(3, &[&format!("{}@", file.display())]);
            refused += 1;
        }
        fs::remove_dir_all(data).unwrap();
    }
    println!("{refused} of 30 flips were refused at the start");
}

/// Goal: a stop that could not write everything says so, also by how it ends. Method: a file is cut short under a server that
/// runs, which takes no more writes to it then; what was acknowledged is in the commit log, if there is one.
#[test]
fn a_stop_that_leaves_changes_behind_says_which_and_whether_they_are_lost() {
    for (log, code, fate) in [
        ("on", 0, "the next start files them: 1"),
        ("off", 5, "not known to be on disk: 1, of vBuckets: 1; none of them was acknowledged as durable"),
    ] {
        let dir = harness::directory();
        let on = || serve(dir.path()).set("persist.file_cache.files_max=0").set(&format!("persist.commit_log={log}"));
        let server = on().start();
        server.client(BUCKET).set(VBUCKET, "first", b"1", None).expect("an answer");
        server.stop();
        let server = on().start();
        let file = harness::vbucket_files(dir.path(), BUCKET).remove(0);
        fs::OpenOptions::new().write(true).open(file).and_then(|file| file.set_len(10)).expect("a file");
        server.client(BUCKET).set(VBUCKET, "second", b"2", None).expect("an answer");
        server.terminate();
        let ended = server.ended();
        ended.said(code, &["bucket default: vBuckets whose files lack changes: 1; 1: ", fate]);
    }
}
