//! Goal: nodes come and go while clients write, and nobody loses anything by it. Method: real processes under `settee cluster-run`,
//! clients that route by the map and write durably, the commands of `settee cluster`, SIGKILL in the middle.

mod harness;

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use frontend::cluster::{Map, Node};
use harness::nodes::{Nodes, await_end, log_in};
use harness::{Connection, Serve, directory, run, settee};
use types::Level;
use wire::client::RequestFrame;
use wire::{Opcode, Status};

const VBUCKETS: u16 = 16;
const KEYS: u64 = 8;
const LEVELS: [Level; 3] = [Level::Majority, Level::MajorityAndPersistActive, Level::PersistMajority];

/// A client that goes where its map says, and takes a newer one from whoever turns it away.
struct Smart {
    map: Map,
    connections: BTreeMap<String, Connection>,
}

impl Smart {
    fn new(seed: &str) -> Smart {
        let mut connection = log_in(seed);
        let map = map_of(&mut connection).expect("it answers");
        Smart { map, connections: BTreeMap::from([(seed.to_owned(), connection)]) }
    }

    /// Sends it to the active of the vBucket until that answers for itself. `None`: the connection broke, and nobody knows what became
    /// of it.
    fn call(&mut self, request: &RequestFrame<'_>) -> Option<harness::Reply> {
        loop {
            let Some(active) = self.map.chains[usize::from(request.vbucket)][0] else {
                // A failover is under way.
                self.learn();
                continue;
            };
            let node = self.map.nodes[active].name();
            if !self.connections.contains_key(&node) {
                let features = harness::connection::FEATURES;
                match Connection::log_in(&node, "default", features) {
                    Ok(connection) => drop(self.connections.insert(node.clone(), connection)),
                    // It was never sent.
                    Err(_) => {
                        self.learn();
                        continue;
                    }
                }
            }
            let Ok(reply) = self.connections.get_mut(&node).expect("connected").call(request) else {
                self.connections.remove(&node);
                self.learn();
                return None;
            };
            match reply.status {
                Status::NotMyVbucket => {
                    if let Ok((map, _)) = Map::parse(&reply.value)
                        && map.revision > self.map.revision
                    {
                        self.map = map;
                    }
                    std::thread::yield_now();
                }
                // Settled soon; or a node that has yet to hear of its place.
                Status::SyncWriteReCommitInProgress | Status::Etmpfail => std::thread::yield_now(),
                _ => return Some(reply),
            }
        }
    }

    /// Asks everybody for a newer map.
    fn learn(&mut self) {
        for node in self.map.nodes.iter().map(Node::name).collect::<Vec<_>>() {
            let features = harness::connection::FEATURES;
            let map = Connection::log_in(&node, "default", features).ok().and_then(|mut c| map_of(&mut c));
            if let Some(map) = map.filter(|map| map.revision > self.map.revision) {
                self.map = map;
            }
        }
    }
}

fn map_of(connection: &mut Connection) -> Option<Map> {
    let reply = connection.call(&RequestFrame::new(Opcode::GetClusterConfig)).ok()?;
    Map::parse(&reply.value).ok().map(|(map, _)| map)
}

/// What clients know of a counter of their own: it was told to be this, and may be more by so many that nobody knows the fate of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Known {
    counted: u64,
    unknown: u64,
}

/// Clients with counters of their own, each in a vBucket: an increment that is lost or done twice shows.
struct Load {
    stop: AtomicBool,
    done: AtomicU64,
    known: Mutex<BTreeMap<(u16, String), Known>>,
}

impl Load {
    fn new() -> Load {
        Load { stop: AtomicBool::new(false), done: AtomicU64::new(0), known: Mutex::default() }
    }

    fn work(&self, client: u64, seed: &str) {
        let _stop = Stop(&self.stop);
        let mut smart = Smart::new(seed);
        let mut known = BTreeMap::<(u16, String), Known>::new();
        for n in 0.. {
            if self.stop.load(Relaxed) {
                break;
            }
            let (vb, level) = (((n + client) % u64::from(VBUCKETS)) as u16, LEVELS[n as usize % 3]);
            let key = format!("c{client}-{}", n % KEYS);
            let framing = harness::connection::framing(Some(level));
            // By one, from one on, for ever.
            let extras = [1u64.to_be_bytes(), 1u64.to_be_bytes()].concat();
            let extras = [&extras[..], &[0; 4]].concat();
            let request = RequestFrame {
                vbucket: vb,
                framing_extras: &framing,
                extras: &extras,
                key: key.as_bytes(),
                ..RequestFrame::new(Opcode::Increment)
            };
            let reply = smart.call(&request);
            let known = known.entry((vb, key.clone())).or_default();
            match reply {
                Some(reply) if reply.status == Status::Success => {
                    let value = u64::from_be_bytes(reply.value[..].try_into().expect("eight bytes"));
                    let (least, most) = (known.counted + 1, known.counted + known.unknown + 1);
                    assert!((least..=most).contains(&value), "{key} in vBucket {vb}: {value}, {known:?}");
                    *known = Known { counted: value, unknown: 0 };
                    self.done.fetch_add(1, Relaxed);
                }
                Some(reply) if reply.status == Status::SyncWriteAmbiguous => known.unknown += 1,
                None => known.unknown += 1,
                Some(reply) if matches!(reply.status, Status::SyncWriteInProgress | Status::DurabilityImpossible) => {}
                Some(reply) => panic!("{key}: {:?}: {}", reply.status, reply.text()),
            }
        }
        self.known.lock().expect("no panic").extend(known);
    }

    /// Waits for so many more.
    fn await_more(&self, count: u64) {
        let until = self.done.load(Relaxed) + count;
        while self.done.load(Relaxed) < until {
            assert!(!self.stop.load(Relaxed), "a client has ended");
            std::thread::yield_now();
        }
    }

    /// Every counter is what its client was told, and nobody else's is there.
    fn check(&self, seed: &str) {
        let mut smart = Smart::new(seed);
        for ((vb, key), known) in &*self.known.lock().expect("no panic") {
            let get = RequestFrame { vbucket: *vb, key: key.as_bytes(), ..RequestFrame::new(Opcode::Get) };
            let reply = smart.call(&get).expect("nobody dies now");
            let value: u64 =
                if reply.status == Status::KeyEnoent { 0 } else { reply.text().parse().expect("a number") };
            assert!(
                (known.counted..=known.counted + known.unknown).contains(&value),
                "{key} in {vb}: {value}, {known:?}"
            );
        }
    }
}

/// Whoever ends, ends all.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

/// Runs clients beside something else, which ends with them stopped.
fn under_load(load: &Load, seed: &str, what: impl FnOnce()) {
    std::thread::scope(|scope| {
        let _stop = Stop(&load.stop);
        for client in 0..4 {
            scope.spawn(move || load.work(client, seed));
        }
        load.await_more(50);
        what();
        load.await_more(50);
    });
}

/// Active and replica vBuckets of each node, by its name.
fn shares(nodes: &Nodes, through: &str) -> BTreeMap<String, (u64, u64)> {
    let seen = nodes.status(through);
    assert_eq!(seen["moving"], 0, "{seen}");
    let of = |node: &serde_json::Value| {
        let number = |name: &str| node[name].as_u64().unwrap_or_else(|| panic!("{seen}"));
        (node["node"].as_str().expect("a name").to_owned(), (number("active"), number("replica")))
    };
    seen["nodes"].as_array().expect("a list").iter().map(of).collect()
}

#[test]
fn a_node_is_added_and_another_removed_under_durable_load() {
    let dir = directory();
    let mut nodes = Nodes::start(dir.path(), 2, 1, VBUCKETS);
    let [first, second] = [nodes.kv[0].clone(), nodes.kv[1].clone()];
    let data_dir = format!("--data-dir={}", dir.path().display());
    let load = Load::new();
    under_load(&load, &second, || {
        // Which nodes there are the command finds in the directory.
        let said = run(&["cluster", "add", &data_dir]).fine().to_owned();
        let third = said.split_whitespace().next().expect("its name").to_owned();
        nodes.await_start(&third);
        assert_eq!(shares(&nodes, &third)[&third], (0, 0));
        run(&["cluster", "add", &third, "--kv", &first]).said(1, &["in the map already"]);
        let said = run(&["cluster", "rebalance", &data_dir]).fine().to_owned();
        assert!(said.contains("vBuckets moved"), "{said}");
        let spread = shares(&nodes, &first);
        assert!(
            spread.len() == 3 && spread.values().all(|(a, r)| (5..=6).contains(a) && (5..=6).contains(r)),
            "{spread:?}"
        );
        let again = run(&["cluster", "rebalance", "--kv", &third]).fine().to_owned();
        assert!(!again.contains("moved"), "what is even stays: {again}");
        load.await_more(100);
        let said = run(&["cluster", "remove", &first, "--kv", &third, &data_dir]).fine().to_owned();
        assert!(said.contains(&format!("{first} has stopped")), "{said}");
        assert!(Connection::open(&first).is_err());
        let spread = shares(&nodes, &third);
        assert_eq!(spread, BTreeMap::from([(second.clone(), (8, 8)), (third, (8, 8))]));
    });
    load.check(&second);
    nodes.server.stop();
}

/// Goal: whoever moves vBuckets may be killed at any time, and so may the node they go to; the command goes on when it is given
/// again. Method: SIGKILL after some of the moves were made.
#[test]
fn a_rebalance_that_is_killed_is_gone_on_with() {
    let dir = directory();
    let mut nodes = Nodes::start(dir.path(), 2, 1, VBUCKETS);
    let [first, second] = [nodes.kv[0].clone(), nodes.kv[1].clone()];
    let data_dir = format!("--data-dir={}", dir.path().display());
    let load = Load::new();
    under_load(&load, &second, || {
        let said = run(&["cluster", "add", &data_dir]).fine().to_owned();
        let third = said.split_whitespace().next().expect("its name").to_owned();
        nodes.await_start(&third);
        let before = Smart::new(&first).map.revision;
        for attempt in 0..4 {
            let mut command = settee();
            command.env("SETTEE_PASSWORD", harness::PASSWORD).args(["cluster", "rebalance", &data_dir]);
            let mut child = command.stdout(std::process::Stdio::null()).spawn().expect("it starts");
            // Wherever that is: the maps it gives are what can be seen of how far it is.
            let rev = |smart: &mut Smart| {
                smart.learn();
                smart.map.revision.rev
            };
            let mut smart = Smart::new(&first);
            let from = rev(&mut smart);
            while rev(&mut smart) <= from + attempt && child.try_wait().expect("our child").is_none() {
                std::thread::yield_now();
            }
            let _ = child.kill();
            child.wait().expect("our child");
            load.await_more(20);
        }
        assert!(Smart::new(&first).map.revision > before);
        run(&["cluster", "rebalance", &data_dir]).fine();
        let spread = shares(&nodes, &first);
        assert!(
            spread.len() == 3 && spread.values().all(|(a, r)| (5..=6).contains(a) && (5..=6).contains(r)),
            "{spread:?}"
        );
        // The first is to go; the one that most of it goes to dies.
        let mut command = settee();
        command.env("SETTEE_PASSWORD", harness::PASSWORD).args(["cluster", "remove", &first, &data_dir]);
        let mut child = command.stdout(std::process::Stdio::null()).spawn().expect("it starts");
        let mut smart = Smart::new(&first);
        while smart.map.forward.is_empty() && child.try_wait().expect("our child").is_none() {
            smart.learn();
        }
        nodes.kill(&third);
        child.wait().expect("our child");
        // With three nodes and two copies nothing that was acknowledged needs the third.
        run(&["cluster", "failover", &third, "--kv", &second]).fine();
        run(&["cluster", "rebalance", "--kv", &second]).fine();
        assert_eq!(shares(&nodes, &second), BTreeMap::from([(first.clone(), (8, 8)), (second.clone(), (8, 8))]));
    });
    load.check(&second);
    nodes.server.stop();
}

/// Goal: a node that was failed over and comes back by itself acknowledges nothing, and one that only was away comes back to what it
/// had, without anybody's help. Method: nodes of a cluster are started by hand.
#[test]
fn a_node_that_comes_back_asks_before_it_serves() {
    let dir = directory();
    let nodes = Nodes::start(dir.path(), 3, 1, VBUCKETS);
    let [first, second, third] = [0, 1, 2].map(|n| nodes.kv[n].clone());
    let mut smart = Smart::new(&first);
    for vb in 0..VBUCKETS {
        let framing = harness::connection::framing(Some(Level::PersistMajority));
        let (key, extras) = (format!("k{vb}"), [0; 8]);
        let set = RequestFrame {
            vbucket: vb,
            framing_extras: &framing,
            extras: &extras,
            key: key.as_bytes(),
            value: b"v",
            ..RequestFrame::new(Opcode::Set)
        };
        assert_eq!(smart.call(&set).map(|reply| reply.status), Some(Status::Success));
    }
    let mine = smart.map.chains.iter().position(|chain| chain[0] == Some(0)).expect("the first has some") as u16;
    let key = format!("k{mine}");
    nodes.kill(&first);
    await_end(&dir.path().join("node-0"));
    let data = dir.path().join("node-0");
    let before = dir.path().join("before");
    assert!(Command::new("cp").arg("-r").args([&data, &before]).status().expect("cp starts").success());
    let start_on = |data: &Path| {
        let (kv, admin) = (format!("--kv={first}"), "--admin=127.0.0.1:0");
        let server = Serve::bare().arg("--data-dir").arg(data).arg(kv).arg(admin).arg("--bucket=");
        server.set("auth.scram_iterations=4096").start()
    };
    let start = || start_on(&data);
    // It was away, and nobody took its place.
    let server = start();
    assert_eq!(
        smart
            .call(&RequestFrame { vbucket: mine, key: key.as_bytes(), ..RequestFrame::new(Opcode::Get) })
            .map(|reply| reply.text()),
        None
    );
    let reply = smart.call(&RequestFrame { vbucket: mine, key: key.as_bytes(), ..RequestFrame::new(Opcode::Get) });
    assert_eq!(reply.expect("it answers").text(), "v");
    server.kill9();
    // Now somebody does.
    nodes.fail_over(&first, &second);
    let server = start();
    let mut back = log_in(&first);
    // Nothing, then nothing by its old map, then the newer one.
    let (map, this) = std::iter::repeat_with(|| back.set(mine, &key, b"stale", None).expect("an answer"))
        .find_map(|reply| match reply.status {
            Status::Etmpfail => None,
            Status::NotMyVbucket => Map::parse(&reply.value).ok().filter(|(map, _)| map.nodes.len() == 2),
            other => panic!("{other:?}"),
        })
        .expect("it finds out");
    assert_eq!((map.place_of(&first), this), (None, None), "it sends clients to the others");
    server.kill9();
    // Alone it cannot know.
    nodes.kill(&second);
    nodes.kill(&third);
    // Its files may be as they were, if it was killed as soon as it had the map.
    std::fs::copy(data.join("cluster.json"), before.join("cluster.json")).expect("it keeps the map");
    for data in [&data, &before] {
        let server = start_on(data);
        let mut back = log_in(&first);
        let statuses = std::iter::repeat_with(|| back.set(mine, &key, b"stale", None).expect("an answer").status);
        let settled = statuses.into_iter().find(|status| *status != Status::Etmpfail);
        assert_eq!(settled, Some(Status::NotMyVbucket), "what it knew it knows still");
        server.stop();
    }
}

#[test]
fn the_commands_find_a_cluster_in_the_directory_they_are_given_in() {
    let dir = directory();
    let cluster = Serve::cluster(&dir.path().join("settee-cluster")).without_password();
    let server = cluster.arg("--vbuckets=8").arg("--base-port=0").start();
    let mut command = settee();
    let output = command.current_dir(dir.path()).args(["cluster", "status", "--json"]).output().expect("it starts");
    let seen: serde_json::Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
    let up = seen["nodes"].as_array().expect("a list").iter().filter(|node| node["state"] == "up");
    assert_eq!(up.count(), 2, "{seen}");
    server.stop();
}
