//! Goal: `settee tail` tells every change of a bucket once, and goes on where an earlier one stopped. Method: the real tool
//! beside a real server, read line by line, ended by a signal, and begun again with what it printed.

mod harness;

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread;

use harness::{PASSWORD, PATIENCE, Serve, Server};
use serde_json::{Value, json};
use types::Level;
use wire::Status;
use wire::client::RequestFrame;

const BUCKET: &str = "default";

struct Tail {
    child: Child,
    lines: Receiver<Value>,
}

impl Tail {
    fn from(server: &Server, from: &str) -> Tail {
        let mut child = spawn(server, from);
        let out = BufReader::new(child.stdout.take().expect("piped"));
        let (sender, lines) = mpsc::channel();
        thread::spawn(move || {
            for line in out.lines().map_while(Result::ok) {
                let parsed = serde_json::from_str(&line).unwrap_or_else(|e| panic!("{e}: {line}"));
                if sender.send(parsed).is_err() {
                    return;
                }
            }
        });
        Tail { child, lines }
    }

    #[track_caller]
    fn next(&self) -> Value {
        self.lines.recv_timeout(PATIENCE).expect("another line")
    }

    /// What changed: kind, key, and where.
    #[track_caller]
    fn told(&self, count: usize) -> Vec<String> {
        let mut told: Vec<String> = (0..count)
            .map(|_| self.next())
            .map(|line| format!("{} {} {}/{}", line["type"], line["key"], line["vb"], line["seqno"]).replace('"', ""))
            .collect();
        // vBuckets come in any order.
        told.sort();
        told
    }

    /// Ends it as Ctrl-C does; the token it prints.
    #[track_caller]
    fn interrupt(mut self) -> String {
        let pid = self.child.id().to_string();
        let status = Command::new("sh").args(["-c", "kill -s INT \"$1\"", "sh", &pid]).status();
        assert!(status.expect("sh starts").success());
        let mut said = String::new();
        self.child.stderr.take().expect("piped").read_to_string(&mut said).expect("text");
        assert_eq!(self.child.wait().expect("our own child").code(), Some(0), "{said}");
        assert!(self.lines.recv_timeout(PATIENCE).is_err(), "more than was expected");
        let token = said.lines().find_map(|line| line.split_once("--from ")).expect("a token").1.trim().to_owned();
        assert!(!token.is_empty());
        token
    }

    /// Ends it, whatever it still has to say.
    fn kill(mut self) {
        self.child.kill().expect("our own child");
        self.child.wait().expect("our own child");
    }
}

fn spawn(server: &Server, from: &str) -> Child {
    let mut command = harness::settee();
    command.env("SETTEE_PASSWORD", PASSWORD).args(["tail", BUCKET, "--from", from, "--kv", &server.kv]);
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the binary starts")
}

fn start(dir: &std::path::Path) -> Server {
    Serve::on(dir).set("bucket.vbuckets=4").start()
}

#[test]
fn a_tail_tells_what_there_is_and_what_comes_and_goes_on_where_it_was() {
    let dir = harness::directory();
    let server = start(dir.path());
    let mut client = server.client(BUCKET);
    let mut set = |vb, key, value: &[u8], durability| {
        assert_eq!(client.set(vb, key, value, durability).expect("an answer").status, Status::Success);
    };
    set(0, "a", br#"{"n":1}"#, None);
    set(3, "b", b"\xff\x00", None);
    let tail = Tail::from(&server, "beginning");
    let mut first = [tail.next(), tail.next()];
    first.sort_by_key(|line| line["vb"].as_u64());
    assert_eq!((&first[0]["key"], &first[0]["value"]), (&json!("a"), &json!({"n": 1})));
    assert_eq!((&first[0]["collection"], &first[0]["expiry"]), (&json!("_default"), &json!(0)));
    assert_eq!((&first[1]["key"], &first[1]["value_base64"]), (&json!("b"), &json!("/wA=")));
    set(3, "c", b"1", Some(Level::PersistMajority));
    assert_eq!(tail.told(1), ["mutation c 3/3"], "a sync write is one change, when it is committed");
    let metrics = server.http("/metrics").1;
    let metric = |name: &str| metrics.lines().any(|line| line.contains(name));
    assert!(metric("dcp_producers 1") && metric("bucket_dcp_streams{bucket=\"default\"} 4"), "{metrics}");
    let stats = server.tool(&["stats", "dcp", "--json"]);
    let stats: Value = serde_json::from_str(stats.fine()).expect("an object");
    assert_eq!((&stats["ep_dcp_stream_count"], &stats["ep_dcp_items_remaining"]), (&json!(4), &json!(0)));
    let token = tail.interrupt();

    set(0, "a", b"2", None);
    set(1, "d", b"3", None);
    let delete = RequestFrame { vbucket: 3, key: b"b", ..RequestFrame::new(wire::Opcode::Delete) };
    assert_eq!(server.client(BUCKET).call(&delete).expect("an answer").status, Status::Success);
    let missed = ["deletion b 3/4", "mutation a 0/2", "mutation d 1/1"];
    let tail = Tail::from(&server, &token);
    assert_eq!(tail.told(3), missed);
    let newer = tail.interrupt();

    // The files have it all as well, and a clean stop is no new history.
    server.stop();
    let server = start(dir.path());
    let tail = Tail::from(&server, &token);
    assert_eq!(tail.told(3), missed);
    drop(tail.interrupt());
    let tail = Tail::from(&server, &newer);
    let mut client = server.client(BUCKET);
    assert_eq!(client.set(2, "e", b"4", None).expect("an answer").status, Status::Success);
    assert_eq!(tail.told(1), ["mutation e 2/1"]);
    drop(tail.interrupt());
    server.stop();
}

#[test]
fn a_tail_from_now_tells_nothing_of_the_past() {
    let dir = harness::directory();
    let server = start(dir.path());
    let mut client = server.client(BUCKET);
    client.set(0, "old", b"1", None).expect("an answer");
    let mut tail = Tail::from(&server, "now");
    // It says when it follows; what is written after that is told.
    let mut said = BufReader::new(tail.child.stderr.take().expect("piped"));
    let mut line = String::new();
    said.read_line(&mut line).expect("a line");
    assert!(line.contains("following"), "{line}");
    client.set(0, "new", b"2", None).expect("an answer");
    client.set(1, "other", b"2", None).expect("an answer");
    assert_eq!(tail.told(2), ["mutation new 0/2", "mutation other 1/1"]);
    tail.kill();
    server.stop();
}

#[test]
fn a_tail_ends_quietly_when_its_reader_has_gone_though_nothing_changes() {
    let dir = harness::directory();
    let server = start(dir.path());
    server.client(BUCKET).set(0, "only", b"1", None).expect("an answer");
    let mut tail = spawn(&server, "beginning");
    let mut line = String::new();
    // What is read here goes with its reader, as in `head -n 1`.
    BufReader::new(tail.stdout.take().expect("piped")).read_line(&mut line).expect("a line");
    assert!(line.contains("only"), "{line}");
    let mut stderr = tail.stderr.take().expect("piped");
    let (sender, said) = mpsc::channel();
    thread::spawn(move || {
        let mut said = String::new();
        stderr.read_to_string(&mut said).expect("text");
        let _ = sender.send(said);
    });
    let said = said.recv_timeout(PATIENCE);
    if said.is_err() {
        tail.kill().expect("our own child");
    }
    assert_eq!((said.as_deref(), tail.wait().expect("our own child").code()), (Ok(""), Some(0)));
    server.stop();
}

/// After a kill the disk may have less than was seen: what was told is of another history, and the tail says so.
#[test]
fn a_tail_of_a_history_that_ended_is_told_to_go_back() {
    let dir = harness::directory();
    let server = start(dir.path());
    let mut client = server.client(BUCKET);
    client.set(0, "kept", b"1", Some(Level::PersistMajority)).expect("an answer");
    let tail = Tail::from(&server, "beginning");
    assert_eq!(tail.told(1), ["mutation kept 0/2"]);
    let token = tail.interrupt();
    server.kill9();
    let server = start(dir.path());
    let tail = Tail::from(&server, &token);
    let mut client = server.client(BUCKET);
    client.set(0, "after", b"2", None).expect("an answer");
    let next = tail.next();
    // The commit may have been lost and made again, or not; either way nothing is told twice for another.
    match next["type"].as_str() {
        Some("rollback") => assert!(next["seqno"].as_u64() <= Some(2), "{next}"),
        _ => assert_eq!((&next["key"], &next["vb"]), (&json!("after"), &json!(0))),
    }
    tail.kill();
    server.stop();
}

#[test]
fn a_tail_says_what_is_wrong_with_what_it_was_given() {
    let dir = harness::directory();
    let server = start(dir.path());
    server.tool(&["tail", BUCKET, "--from", "yesterday"]).said(1, &["now, beginning, or a token"]);
    server.tool(&["tail", "nosuch"]).said(1, &["nosuch"]);
    harness::run(&["tail"]).said(2, &["<BUCKET>"]);
    server.stop();
}
