//! Goal: what a majority of nodes acknowledged outlives a node. Method: real processes under `settee cluster-run`, real
//! connections, SIGKILL and SIGSTOP.

mod harness;

use std::collections::BTreeMap;
use std::process::Command;
use std::sync::atomic::{AtomicU16, Ordering::Relaxed};

use harness::nodes::{Nodes, await_end, chains, log_in};
use harness::{Connection, Serve, directory, run};
use types::Level;
use wire::client::{RequestFrame, store_extras};
use wire::{Opcode, Status, frame_info};

const LEVELS: [Level; 3] = [Level::Majority, Level::MajorityAndPersistActive, Level::PersistMajority];
const VBUCKETS: u16 = 8;

/// A write of a level with a time limit of its own.
fn set_within(client: &mut Connection, vb: u16, key: &str, value: &str, timeout_ms: u16) -> Status {
    let mut framing = Vec::new();
    frame_info::push_durability(&mut framing, Level::Majority, Some(timeout_ms));
    let request = RequestFrame {
        vbucket: vb,
        framing_extras: &framing,
        extras: &store_extras(0, 0),
        key: key.as_bytes(),
        value: value.as_bytes(),
        ..RequestFrame::new(Opcode::Set)
    };
    client.call(&request).expect("an answer").status
}

#[test]
fn two_nodes_acknowledge_by_majority_and_one_survives_the_other() {
    let dir = directory();
    let nodes = Nodes::start(dir.path(), 2, 1, VBUCKETS);
    let [first, second] = [&nodes.kv[0], &nodes.kv[1]];
    let (mut a, mut b) = (nodes.client(first), nodes.client(second));
    let chains = chains(&mut a);
    assert_eq!(chains[0], [0, 1]);
    assert_eq!(chains[1], [1, 0]);

    // Every write goes to its active, and is acknowledged once both have it.
    let mut acknowledged = BTreeMap::new();
    for n in 0..60 {
        let (vb, level) = (n % VBUCKETS, LEVELS[usize::from(n / VBUCKETS) % 3]);
        let (key, value) = (format!("k{n}"), format!("v{n}"));
        let client = if chains[usize::from(vb)][0] == 0 { &mut a } else { &mut b };
        let reply = client.set(vb, &key, value.as_bytes(), Some(level)).expect("an answer");
        assert_eq!(reply.status, Status::Success, "{key}: {}", reply.text());
        acknowledged.insert(key, (vb, value));
    }
    let seen = nodes.status(first);
    for node in seen["nodes"].as_array().expect("a list") {
        assert_eq!((&node["state"], &node["active"], &node["replica"]), (&"up".into(), &4.into(), &4.into()), "{seen}");
    }

    // The other node turns a client away with the map, and reads for those who ask a replica.
    let wrong = b.set(0, "k0", b"x", None).expect("an answer");
    assert_eq!(wrong.status, Status::NotMyVbucket);
    assert!(wrong.text().contains("vBucketMap"), "{}", wrong.text());
    let replica = |client: &mut Connection| {
        client.call(&RequestFrame { key: b"k0", ..RequestFrame::new(Opcode::GetReplica) }).expect("an answer")
    };
    assert_eq!(replica(&mut a).status, Status::NotMyVbucket);
    // The commit follows the acknowledgement.
    let from_replica = std::iter::repeat_with(|| replica(&mut b)).find(|reply| reply.status == Status::Success);
    assert_eq!(from_replica.expect("it comes").text(), "v0");

    // A node that answers is not failed over.
    run(&["cluster", "failover", first, "--kv", second]).said(1, &["stop it first"]);
    nodes.kill(first);
    nodes.fail_over(first, second);
    for (key, (vb, value)) in &acknowledged {
        let reply = b.get(*vb, key).expect("an answer");
        assert_eq!((reply.status, reply.text()), (Status::Success, value.clone()), "{key}");
    }
    let seen = nodes.status(second);
    assert_eq!((&seen["nodes"][0]["active"], seen["nodes"].as_array().map(Vec::len)), (&8.into(), Some(1)), "{seen}");
    // Nobody is left to make a majority with; other writes go on.
    let reply = b.set(0, "k0", b"more", Some(Level::Majority)).expect("an answer");
    assert_eq!(reply.status, Status::DurabilityImpossible);
    assert_eq!(b.set(0, "k0", b"more", None).expect("an answer").status, Status::Success);
    nodes.server.stop();
}

/// Goal: no acknowledged write is lost and none is half there, whatever was under way. Method: many clients write durably, the
/// active is killed in the middle, its replica takes over, and every key has the last value that was acknowledged or one that
/// was on its way.
#[test]
fn what_was_acknowledged_under_load_is_at_the_survivor() {
    kill_the_active_under_load(2, 1);
}

/// The replica that does not take over may have more than the one that does: it goes back, and durable writes go on.
#[test]
fn what_was_acknowledged_under_load_is_at_both_survivors() {
    kill_the_active_under_load(3, 2);
}

fn kill_the_active_under_load(count: u16, replicas: u8) {
    const CLIENTS: usize = 8;
    const ACKNOWLEDGED: usize = 600;
    let dir = directory();
    let nodes = Nodes::start(dir.path(), count, replicas, VBUCKETS);
    let [first, second] = [&nodes.kv[0], &nodes.kv[1]];
    let chains = chains(&mut nodes.client(first));
    let mine: Vec<u16> = (0..VBUCKETS).filter(|vb| chains[usize::from(*vb)][0] == 0).collect();
    let (said, heard) = std::sync::mpsc::channel();
    // Each client has keys of its own and writes numbers that grow; returns the last one it sent.
    let work = |client: usize, said: std::sync::mpsc::Sender<(String, u16, u64)>| {
        let mut connection = log_in(first);
        for n in 1u64.. {
            let (vb, level) = (mine[n as usize % mine.len()], LEVELS[n as usize % 3]);
            let key = format!("c{client}-{}-{vb}", n % 7);
            match connection.set(vb, &key, n.to_string().as_bytes(), Some(level)) {
                Ok(reply) if reply.status == Status::Success => drop(said.send((key, vb, n))),
                Ok(reply) => panic!("{:?}: {}", reply.status, reply.text()),
                Err(_) => return n,
            }
        }
        unreachable!("the node is killed")
    };
    let mut acknowledged = BTreeMap::new();
    let last_sent: Vec<u64> = std::thread::scope(|scope| {
        let work = &work;
        let clients: Vec<_> = (0..CLIENTS).map(|n| (n, said.clone())).collect();
        let clients: Vec<_> = clients.into_iter().map(|(n, said)| scope.spawn(move || work(n, said))).collect();
        drop(said);
        for (count, (key, vb, n)) in heard.iter().enumerate() {
            acknowledged.insert(key, (vb, n));
            if count == ACKNOWLEDGED {
                nodes.kill(first);
            }
        }
        clients.into_iter().map(|client| client.join().expect("no panic")).collect()
    });
    nodes.fail_over(first, second);
    let rows = harness::nodes::chains(&mut nodes.client(second));
    let mut survivors: Vec<Connection> = nodes.kv[1..].iter().map(|node| nodes.client(node)).collect();
    for (key, (vb, n)) in &acknowledged {
        let survivor = &mut survivors[rows[usize::from(*vb)][0] as usize];
        let reply = survivor.get(*vb, key).expect("an answer");
        assert_eq!(reply.status, Status::Success, "{key}, acknowledged as {n}: {}", reply.text());
        let found: u64 = reply.text().parse().expect("a number");
        let client: usize = key[1..].split('-').next().and_then(|n| n.parse().ok()).expect("its writer");
        assert!(found == *n || found == last_sent[client], "{key}: {found}, acknowledged {n}");
        if replicas > 1 {
            let again = survivor.set(*vb, key, b"0", Some(Level::PersistMajority)).expect("an answer");
            assert_eq!(again.status, Status::Success, "{key}: {}", again.text());
        }
    }
    nodes.server.stop();
}

#[test]
fn while_the_replica_is_stopped_a_durable_write_is_ambiguous_and_then_goes_on() {
    let dir = directory();
    let nodes = Nodes::start(dir.path(), 2, 1, VBUCKETS);
    let [first, second] = [&nodes.kv[0], &nodes.kv[1]];
    let mut a = nodes.client(first);
    assert_eq!(a.set(0, "k", b"1", Some(Level::Majority)).expect("an answer").status, Status::Success);
    nodes.stop_still(second);
    assert_eq!(set_within(&mut a, 0, "k", "2", 300), Status::SyncWriteAmbiguous);
    assert_eq!(a.get(0, "k").expect("an answer").text(), "1", "what came to nothing is seen by nobody");
    assert_eq!(a.set(0, "other", b"3", None).expect("an answer").status, Status::Success);
    nodes.signal(second, "CONT");
    assert_eq!(a.set(0, "k", b"4", Some(Level::PersistMajority)).expect("an answer").status, Status::Success);
    nodes.server.stop();
}

/// Goal: of three nodes any one may go. Method: the active of a vBucket is killed; one replica takes over, the other follows
/// it, and durable writes go on.
#[test]
fn three_nodes_go_on_without_one() {
    let dir = directory();
    let nodes = Nodes::start(dir.path(), 3, 2, VBUCKETS);
    let mut clients: Vec<Connection> = nodes.kv.iter().map(|node| nodes.client(node)).collect();
    let before = chains(&mut clients[0]);
    for n in 0..30u16 {
        let vb = n % VBUCKETS;
        let client = &mut clients[before[usize::from(vb)][0] as usize];
        let reply = client.set(vb, &format!("k{n}"), b"v", Some(Level::PersistMajority)).expect("an answer");
        assert_eq!(reply.status, Status::Success, "{}", reply.text());
    }
    nodes.kill(&nodes.kv[0]);
    nodes.fail_over(&nodes.kv[0], &nodes.kv[2]);
    let after = chains(&mut clients[1]);
    for n in 0..30u16 {
        let vb = n % VBUCKETS;
        // Places moved down by the one that is gone.
        let client = &mut clients[after[usize::from(vb)][0] as usize + 1];
        assert_eq!(client.get(vb, &format!("k{n}")).expect("an answer").text(), "v", "k{n}");
        let reply = client.set(vb, &format!("k{n}"), b"w", Some(Level::PersistMajority)).expect("an answer");
        assert_eq!(reply.status, Status::Success, "k{n}: {}", reply.text());
    }
    nodes.server.stop();
}

#[test]
fn a_cluster_is_laid_out_once_and_its_nodes_end_with_it() {
    let dir = directory();
    let port = free_ports();
    let start = || {
        let server = Serve::cluster(dir.path()).arg("--vbuckets=8").arg(format!("--base-port={port}")).start();
        let node = server.kv.split(',').next().expect("a node").to_owned();
        (server, node)
    };
    let (server, node) = start();
    let mut client = log_in(&node);
    let reply = client.set(0, "k", b"v", Some(Level::PersistMajority)).expect("an answer");
    assert_eq!(reply.status, Status::Success);
    // Even a parent that is killed leaves no node behind: the directories are free for the next.
    server.kill9();
    for n in 0..2 {
        await_end(&dir.path().join(format!("node-{n}")));
    }
    let (server, node) = start();
    let mut client = log_in(&node);
    assert_eq!(client.get(0, "k").expect("an answer").text(), "v");
    let reply = client.set(0, "k", b"w", Some(Level::PersistMajority)).expect("an answer");
    assert_eq!(reply.status, Status::Success, "the replicas follow again");
    // The second time without one, which comes back as if nothing had happened.
    let pid = server.said().lines().find_map(|line| line.split_once("pid=")).expect("a node").1.to_owned();
    let second = server.kv.split(',').nth(1).expect("a node").to_owned();
    Command::new("sh").args(["-c", "kill -s KILL \"$1\"", "sh", &pid]).status().expect("sh starts");
    while Connection::open(&node).is_ok() {}
    run(&["cluster", "failover", &node, "--kv", &second]).fine();
    server.stop();
    let (server, node) = start();
    assert_eq!(log_in(&node).get(0, "k").expect("an answer").status, Status::NotMyVbucket);
    assert_eq!(log_in(&second).get(0, "k").expect("an answer").text(), "w");
    server.stop();
}

/// Goal: one of two nodes that comes back while the other is gone waits for a decision, and whoever looks is told which. Method: the
/// tool, the log, the metrics and a client are asked; what they say to run is run.
#[test]
fn a_node_that_waits_for_the_other_says_so_everywhere_and_names_the_command() {
    let dir = directory();
    let nodes = Nodes::start(dir.path(), 2, 1, VBUCKETS);
    let [first, second] = [nodes.kv[0].clone(), nodes.kv[1].clone()];
    let reply = nodes.client(&first).set(0, "k", b"v", Some(Level::Majority)).expect("an answer");
    assert_eq!(reply.status, Status::Success);
    nodes.server.stop();

    let data = dir.path().join("node-0");
    let listen = format!("--kv={first}");
    let serve = Serve::bare().arg("--bucket=").arg("--data-dir").arg(data).arg(listen).arg("--admin=127.0.0.1:0");
    let mut server = serve.start();
    let command = format!("cluster failover {second} --kv {first} --bucket default");
    let says_so = |text: &str| text.contains("of 2 nodes 1 answer") && text.contains(&format!("settee {command}"));
    assert!(server.wait_for_log(&command) && says_so(&server.stderr), "{}", server.stderr);
    let mut client = log_in(&first);
    let reply = client.get(0, "k").expect("an answer");
    assert!(reply.status == Status::Etmpfail && says_so(&reply.text()), "{:?}: {}", reply.status, reply.text());
    let seen = run(&["cluster", "status", "--kv", &first]);
    assert!(says_so(seen.fine()) && seen.fine().contains("waiting"), "{}", seen.fine());
    let is_degraded = |yes: u8| {
        let metrics = server.http("/metrics").1;
        assert!(metrics.contains(&format!("bucket_degraded{{bucket=\"default\"}} {yes}")), "{metrics}");
    };
    is_degraded(1);

    run(&command.split(' ').collect::<Vec<_>>()).fine();
    assert_eq!(client.get(0, "k").expect("an answer").text(), "v");
    is_degraded(0);
    let seen = run(&["cluster", "status", "--kv", &first]);
    assert!(!seen.fine().contains("waiting"), "{}", seen.fine());
    server.stop();
}

/// Goal: what is on the disks of a majority outlives all processes. Method: both nodes are killed at once, in the middle of durable
/// writes, and the cluster is started again.
#[test]
fn both_nodes_may_be_killed_at_once() {
    let dir = directory();
    let port = free_ports();
    let start = || {
        let port = format!("--base-port={port}");
        let server = Serve::cluster(dir.path()).arg(format!("--vbuckets={VBUCKETS}")).arg(port).start();
        let kv: Vec<String> = server.kv.split(',').map(str::to_owned).collect();
        (server, kv)
    };
    let (mut server, kv) = start();
    let rows = chains(&mut log_in(&kv[0]));
    let pids: Vec<String> =
        server.said().lines().filter_map(|line| Some(line.split_once("pid=")?.1.to_owned())).collect();
    let work = |vb: u16, mut client: Connection| {
        let mut acknowledged = 0;
        for n in 1u64.. {
            match client.set(vb, &format!("k{vb}"), n.to_string().as_bytes(), Some(Level::PersistMajority)) {
                Ok(reply) if reply.status == Status::Success => acknowledged = n,
                Ok(reply) => panic!("{:?}: {}", reply.status, reply.text()),
                Err(_) => return acknowledged,
            }
            if n == 40 && vb == 0 {
                let kill = ["-c", "kill -s KILL \"$1\" \"$2\"", "sh", &pids[0], &pids[1]];
                assert!(Command::new("sh").args(kill).status().expect("sh starts").success());
            }
        }
        unreachable!("the nodes are killed")
    };
    // All of them before any writes: one of them kills.
    let clients: Vec<_> = (0..VBUCKETS).map(|vb| (vb, log_in(&kv[rows[usize::from(vb)][0] as usize]))).collect();
    let acknowledged: Vec<u64> = std::thread::scope(|scope| {
        let work = &work;
        let clients: Vec<_> = clients.into_iter().map(|(vb, client)| scope.spawn(move || work(vb, client))).collect();
        clients.into_iter().map(|client| client.join().expect("no panic")).collect()
    });
    // An end it has yet to hear of would be one of its own stop.
    assert!(kv.iter().all(|node| server.wait_for_log(&format!("node {node} ended with"))), "{}", server.stderr);
    server.stop();
    let (server, kv) = start();
    for (vb, acknowledged) in (0..VBUCKETS).zip(acknowledged) {
        let mut client = log_in(&kv[rows[usize::from(vb)][0] as usize]);
        let key = format!("k{vb}");
        // What was on its way is settled once the replica is there again.
        let reply = std::iter::repeat_with(|| client.get(vb, &key).expect("an answer"))
            .find(|reply| reply.status != Status::SyncWriteReCommitInProgress)
            .expect("it is settled");
        let found: u64 = if reply.status == Status::KeyEnoent { 0 } else { reply.text().parse().expect("a number") };
        assert!(found == acknowledged || found == acknowledged + 1, "{key}: {found}, acknowledged {acknowledged}");
        let again = client.set(vb, &key, b"0", Some(Level::PersistMajority)).expect("an answer");
        assert_eq!(again.status, Status::Success, "{key}: {}", again.text());
    }
    server.stop();
}

/// The first of four ports in a row that are free now, and that no other test here looks at.
fn free_ports() -> u16 {
    static CALLS: AtomicU16 = AtomicU16::new(0);
    let is_free = |port| std::net::TcpListener::bind(("127.0.0.1", port)).is_ok();
    let first = 20_000 + (std::process::id() % 20_000) as u16 + 1000 * CALLS.fetch_add(1, Relaxed);
    (first..60_000).step_by(4).find(|port| (0..4).all(|n| is_free(port + n))).expect("some are free")
}
