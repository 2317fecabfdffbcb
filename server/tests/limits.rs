//! Goal: descriptors are divided at start, and running out of them is an inconvenience.

mod harness;

use std::fs;
use std::path::Path;

use frontend::auth::{Role, Users};
use harness::{Connection, Serve, Server, USER};
use types::Level;
use wire::client::RequestFrame;
use wire::{Opcode, Status};

const BUCKET: &str = "default";

fn serve(dir: &Path) -> Serve {
    Serve::on(&dir.join("data")).set("bucket.vbuckets=64")
}

fn stat(client: &mut Connection, group: &str, name: &str) -> String {
    let stats = client.stats(group).unwrap();
    stats.into_iter().find(|(found, _)| found == name).unwrap_or_else(|| panic!("no {name:?} in {group:?}")).1
}

#[test]
fn a_server_works_with_256_descriptors_and_says_how_they_are_divided() {
    let dir = harness::directory();
    let start = || serve(dir.path()).set("kv.workers=2").set("bucket.vbuckets=256").descriptors(256).start();
    let server = start();
    let mut client = server.client(BUCKET);
    for vb in 0..256 {
        let reply = client.set(vb, &format!("k{vb}"), b"v", Some(Level::PersistMajority)).unwrap();
        assert_eq!(reply.status, Status::Success, "vBucket {vb}");
    }
    let sum = "descriptors 256 = core 28 + connections 132 (8 admin) + files 80 + background 16";
    assert_eq!(stat(&mut client, "limits", "sum"), sum);
    let drawn = server.tool(&["stats", "limits"]);
    let drawn = drawn.fine();
    for class in ["core", "connections", "admin", "files", "background"] {
        assert!(drawn.lines().any(|line| line.starts_with(class)), "{class}:\n{drawn}");
    }
    // Many more than there is room for: the rest waits.
    let crowd: Vec<Connection> = (0..300).map(|_| Connection::open(&server.kv).unwrap()).collect();
    assert_eq!(client.set(0, "k", b"v", None).unwrap().status, Status::Success);
    drop(crowd);
    let ended = server.stop();
    assert_eq!(ended.stderr.matches(sum).count(), 1, "{}", ended.stderr);
    assert!(ended.stderr.contains("connections_max is 124 instead of 10000"), "{}", ended.stderr);

    // More files to read than may be open.
    let server = start();
    let mut client = server.client(BUCKET);
    (0..256).for_each(|vb| assert_eq!(client.get(vb, &format!("k{vb}")).unwrap().text(), "v"));
    server.stop();
}

#[test]
fn fewer_descriptors_than_a_server_needs_are_refused_with_the_number() {
    let dir = harness::directory();
    let refused = serve(dir.path()).set("kv.workers=2").descriptors(255).refused();
    refused.said(4, &["the limit of open files is 255, and 256 is the least", "ulimit -n 256"]);
    let many = serve(dir.path()).set("kv.workers=256").descriptors(300).refused();
    many.said(4, &["the limit of open files is 300", "256 workers", "start fewer workers"]);
    assert!(!dir.path().join("data").exists());
}

#[test]
fn limits_that_cannot_be_are_refused_with_the_range() {
    let dir = harness::directory();
    let asked = |n: u32| serve(dir.path()).set("kv.workers=2").set(&format!("kv.connections_max={n}"));
    asked(10_000).descriptors(1024).refused().said(2, &["kv.connections_max = 10000", "8 to 924"]);
    for pair in [
        "kv.connections_max=0",
        "kv.connections_max=7",
        "kv.connections_max=-1",
        "kv.idle_timeout_s=-1",
        "kv.keepalive_s=-5",
        "kv.login_timeout_s=0",
        "kv.stall_timeout_s=0",
        "kv.unsent_mb_max=0",
        "kv.workers=-1",
        "persist.readers=0",
        "persist.readers=-1",
        "persist.writers=0",
    ] {
        let key = pair.split('=').next().unwrap();
        serve(dir.path()).set(pair).refused().said(2, &[key, "a whole number from"]);
    }
    assert!(!dir.path().join("data").exists());
    // The most that is left is granted in full.
    asked(924).descriptors(1024).start().stop();
}

/// Goal: what is not used costs nothing. Method: the same server with a small limit and with the largest this process
/// may give; a million where that is allowed.
#[test]
fn a_huge_limit_costs_nothing() {
    let dir = harness::directory();
    let hard: u64 = {
        let limits = fs::read_to_string("/proc/self/limits").unwrap();
        let line = limits.lines().find_map(|l| l.strip_prefix("Max open files")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap_or(1_000_000)
    };
    let resident = |limit| {
        let server = serve(dir.path()).descriptors(limit).start();
        let rss = stat(&mut server.client(BUCKET), "", "rss").parse::<u64>().unwrap();
        let sum = stat(&mut server.client(BUCKET), "limits", "sum");
        assert!(sum.starts_with(&format!("descriptors {limit} = ")), "{sum}");
        server.stop();
        rss
    };
    let huge = hard.min(1_000_000);
    let (small, large) = (resident(1024), resident(huge));
    println!("{small} bytes with 1024 descriptors, {large} with {huge}");
    assert!(large < small + (4 << 20), "{small} bytes with 1024 descriptors, {large} with {huge}");
}

fn noop(server: &Server) -> Connection {
    let mut client = Connection::open(&server.kv).unwrap();
    client.send(&RequestFrame::new(Opcode::Noop)).unwrap();
    client
}

/// Goal: no open site does worse than wait. Method: the system denies every descriptor; clients, writes and a reload
/// come meanwhile; then it grants them again.
#[test]
fn without_a_descriptor_everything_waits_and_nothing_is_lost() {
    let dir = harness::directory();
    let file = dir.path().join("settee.toml");
    fs::write(&file, "[kv]\nidle_timeout_s = 3000\n").unwrap();
    let mut server = serve(dir.path()).arg("--config").arg(&file).start();
    let mut client = server.client(BUCKET);
    assert_eq!(client.set(1, "before", b"v", Some(Level::PersistMajority)).unwrap().status, Status::Success);

    server.limit_descriptors("3:1024");
    let mut waiting: Vec<Connection> = (0..3).map(|_| noop(&server)).collect();
    assert!(server.wait_for_log("accepting pauses"));
    assert_eq!(client.get(1, "before").unwrap().text(), "v", "those who are in are served");
    client.set(2, "meanwhile", b"v", None).unwrap();
    fs::write(&file, "[kv]\nidle_timeout_s = 4000\n").unwrap();
    server.signal("HUP");
    assert!(server.wait_for_log("the configuration stays as it was"));
    assert!(server.wait_for_log("the users stay as they were"));
    assert_eq!(stat(&mut client, "config", "kv.idle_timeout_s"), "3000");
    assert!(stat(&mut client, "config", "reload_config_refusal").contains("Too many open files"));
    assert_ne!(stat(&mut client, "limits", "exhausted"), "0");

    server.limit_descriptors("1024:1024");
    for client in &mut waiting {
        assert_eq!(client.receive().unwrap().status, Status::Success);
    }
    let mut late = server.client(BUCKET);
    assert_eq!(late.set(3, "after", b"v", Some(Level::PersistMajority)).unwrap().status, Status::Success);
    server.signal("HUP");
    assert!(server.wait_for_log("configuration read again"));
    assert!(server.wait_for_log("users read again"));
    assert_eq!(stat(&mut late, "config", "kv.idle_timeout_s"), "4000");
    server.stop();

    let server = serve(dir.path()).start();
    let mut client = server.client(BUCKET);
    for (vb, key) in [(1, "before"), (2, "meanwhile"), (3, "after")] {
        assert_eq!(client.get(vb, key).unwrap().text(), "v", "{key}");
    }
    server.stop();
}

#[test]
fn a_hangup_reads_configuration_and_users_again_or_leaves_them_as_they_were() {
    let dir = harness::directory();
    let file = dir.path().join("settee.toml");
    let write = |text: &str| fs::write(&file, text).unwrap();
    write("[kv]\nconnections_max = 8\n");
    let mut server = serve(dir.path()).arg("--config").arg(&file).descriptors(1024).start();
    let mut client = server.client(BUCKET);
    assert_eq!(stat(&mut client, "", "max_connections"), "8");
    let hang_up = |server: &mut Server, words: &[&str]| {
        server.stderr.clear();
        server.signal("HUP");
        for word in words {
            assert!(server.wait_for_log(word), "no {word:?}:\n{}", server.stderr);
        }
        assert!(server.wait_for_log(" users "));
    };

    write("[kv]\nconnections_max = 9\nworkers = 3\n[log]\nlevel = \"info,frontend=debug\"\n");
    hang_up(
        &mut server,
        &["configuration read again", "kv.connections_max log.level", "wait_for_restart=\"kv.workers\""],
    );
    assert_eq!(stat(&mut client, "", "max_connections"), "9");
    assert_eq!(stat(&mut client, "config", "reload_waits_for_restart"), "kv.workers");
    assert_eq!(stat(&mut client, "config", "kv.workers"), "0", "what is in effect");
    let (settings, config) = (client.stats("settings").unwrap(), client.stats("config").unwrap());
    assert_eq!(settings[..config.len()], config[..]);

    for (text, words) in [
        ("[kv]\nconnections_max = 5000\n", &["kv.connections_max", "the limit of open files is 1024"][..]),
        ("[kv]\nconnections_max = \"many\"\n", &["a whole number from 8"]),
        ("[kv\n", &["stays as it was"]),
        ("[kv]\nidle_timeout = 3\n", &["did you mean \"kv.idle_timeout_s\"?"]),
    ] {
        write(text);
        hang_up(&mut server, words);
        assert_eq!(stat(&mut client, "", "max_connections"), "9");
        assert!(!stat(&mut client, "config", "reload_config_refusal").is_empty());
    }

    // Another user; then a file that is none, which changes nothing.
    let path = dir.path().join("data/users.json");
    let users = Users::load(&env::os::env(), &path).unwrap().with_iterations(0);
    users.set("reader", "a password", Role::Data).unwrap();
    users.save().unwrap();
    write("");
    hang_up(&mut server, &["configuration read again", "users=2"]);
    assert_eq!(stat(&mut client, "config", "reload_config_refusal"), "");
    let log_in = |server: &Server| {
        let mut client = Connection::open(&server.kv).unwrap();
        client.hello(harness::connection::FEATURES).unwrap();
        client.scram(frontend::auth::scram::Hash::Sha256, "reader", "a password").unwrap().0
    };
    assert_eq!(log_in(&server), Status::Success);
    fs::write(&path, "{").unwrap();
    hang_up(&mut server, &["the users stay as they were"]);
    assert_eq!(log_in(&server), Status::Success);
    assert!(stat(&mut client, "config", "reload_users_refusal").contains("users.json"));
    fs::remove_file(&path).unwrap();
    hang_up(&mut server, &["the users stay as they were"]);
    assert_eq!(log_in(&server), Status::Success);
    assert!(server.client(BUCKET).get(0, "k").is_ok(), "{USER} as well");
    server.stop();
}

/// Reads the log until it says `word`.
fn said_in(log: &Path, client: &mut Connection, word: &str) -> bool {
    // Each look is a round trip to the server, which has ended if it does not answer.
    loop {
        if fs::read_to_string(log).is_ok_and(|text| text.contains(word)) {
            return true;
        }
        stat(client, "", "pid");
    }
}

#[test]
fn a_rotated_log_is_opened_anew_and_without_a_descriptor_the_old_one_stays() {
    let dir = harness::directory();
    let (log, rotated, second) = (dir.path().join("log"), dir.path().join("log.1"), dir.path().join("log.2"));
    let server = serve(dir.path()).set(&format!("log.file={}", log.display())).start();
    let mut client = server.client(BUCKET);
    assert!(said_in(&log, &mut client, "descriptors "));

    fs::rename(&log, &rotated).unwrap();
    server.limit_descriptors("3:1024");
    server.signal("HUP");
    assert!(said_in(&rotated, &mut client, "the log stays in the file it has"), "the old file is still written");
    assert!(said_in(&rotated, &mut client, "the users stay as they were"));
    assert!(stat(&mut client, "config", "reload_log_refusal").contains("Too many open files"));
    assert!(!log.exists());

    server.limit_descriptors("1024:1024");
    let background = stat(&mut client, "limits", "class background");
    server.signal("HUP");
    assert!(said_in(&log, &mut client, "users read again"));
    assert_eq!(stat(&mut client, "config", "reload_log_refusal"), "");
    fs::rename(&log, &second).unwrap();
    server.signal("HUP");
    assert!(said_in(&log, &mut client, "users read again"));
    assert!(!fs::read_to_string(&rotated).unwrap().contains("users read again"));
    assert_eq!(stat(&mut client, "limits", "class background"), background, "one file is open, and one is paid for");
    let ended = server.stop();
    assert!(
        fs::read_to_string(&log).unwrap().contains("stopped") && !ended.stderr.contains("INFO"),
        "{}",
        ended.stderr
    );

    let nowhere = serve(dir.path()).set("log.file=/proc/nowhere/log").refused();
    nowhere.said(4, &["/proc/nowhere/log", "log.file"]);
}

#[test]
fn pools_grow_and_shrink_on_a_hangup_and_never_to_nothing() {
    let dir = harness::directory();
    let file = dir.path().join("settee.toml");
    fs::write(&file, "[persist]\nreaders = 2\nwriters = 2\n").unwrap();
    let mut server = serve(dir.path()).set("bucket.vbuckets=64").arg("--config").arg(&file).descriptors(1024).start();
    let mut client = server.client(BUCKET);
    let mut reload = |text: &str, word: &str| {
        fs::write(&file, text).unwrap();
        server.stderr.clear();
        server.signal("HUP");
        assert!(server.wait_for_log(word) && server.wait_for_log(" users "), "{}", server.stderr);
        ["reader", "writer", "compaction"].map(|kind| {
            let pool = stat(&mut client, "scheduler", &format!("pool {kind}"));
            serde_json::from_str::<serde_json::Value>(&pool).unwrap()["threads"].as_u64().unwrap()
        })
    };
    let grown = "[persist]\nreaders = 5\nwriters = 12\n[compaction]\nlimit = 6\n";
    assert_eq!(reload(grown, "configuration read again"), [5, 12, 6]);
    for (text, words) in [
        ("[persist]\nreaders = 0\n", "a whole number from 1 to 128"),
        ("[persist]\nwriters = 0\n", "a whole number from 1 to 128"),
        ("[compaction]\nlimit = 0\n", "a whole number from 1"),
    ] {
        assert_eq!(reload(text, words), [5, 12, 6], "{text}");
    }
    reload("[persist]\nreaders = 1\nwriters = 1\n[compaction]\nlimit = 1\n", "configuration read again");
    let mut client = server.client(BUCKET);
    for vb in 0..64 {
        let reply = client.set(vb, "k", b"v", Some(Level::PersistMajority)).unwrap();
        assert_eq!(reply.status, Status::Success, "vBucket {vb}");
    }
    server.stop();
}
