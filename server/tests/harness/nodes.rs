//! Several nodes, as `settee cluster-run` has them.

use std::fs::File;
use std::path::Path;
use std::process::Command;

use wire::Opcode;
use wire::client::RequestFrame;

use super::{Connection, Serve, Server, connection, run};

/// A running `settee cluster-run`; its nodes end with it.
pub struct Nodes {
    pub server: Server,
    pub kv: Vec<String>,
}

impl Nodes {
    pub fn start(dir: &Path, nodes: u16, replicas: u8, vbuckets: u16) -> Nodes {
        let server = Serve::cluster(dir)
            .arg(format!("--nodes={nodes}"))
            .arg(format!("--replicas={replicas}"))
            .arg(format!("--vbuckets={vbuckets}"))
            .arg("--base-port=0")
            .start();
        let kv = server.kv.split(',').map(str::to_owned).collect();
        Nodes { server, kv }
    }

    /// Waits until a node was started; it may have been added.
    pub fn await_start(&mut self, node: &str) {
        let word = format!("node kv={node} ");
        assert!(self.server.wait_for_output(&word), "it ended:\n{}", self.server.stderr);
    }

    fn pid(&self, node: &str) -> &str {
        let line = self.server.said().lines().find(|line| line.starts_with(&format!("node kv={node} ")));
        let pid = line.and_then(|line| line.split_whitespace().find_map(|word| word.strip_prefix("pid=")));
        pid.expect("a node that was started")
    }

    pub fn signal(&self, node: &str, name: &str) {
        let status = Command::new("sh").args(["-c", "kill -s \"$1\" \"$2\"", "sh", name]).arg(self.pid(node)).status();
        assert!(status.expect("sh starts").success());
    }

    /// SIGSTOP; returns when none of its threads runs any more.
    pub fn stop_still(&self, node: &str) {
        self.signal(node, "STOP");
        let tasks = format!("/proc/{}/task", self.pid(node));
        let is_still = |task: std::io::Result<std::fs::DirEntry>| {
            let stat = std::fs::read_to_string(task.expect("a task").path().join("stat")).expect("its state");
            stat.rsplit_once(") ").expect("its name comes before").1.starts_with('T')
        };
        while !std::fs::read_dir(&tasks).expect("it runs").all(is_still) {
            std::thread::yield_now();
        }
    }

    /// SIGKILL; returns when it is gone.
    pub fn kill(&self, node: &str) {
        self.signal(node, "KILL");
        while Connection::open(node).is_ok() {}
    }

    pub fn client(&self, node: &str) -> Connection {
        log_in(node)
    }

    pub fn status(&self, node: &str) -> serde_json::Value {
        let ended = run(&["cluster", "status", "--json", "--kv", node]);
        serde_json::from_str(ended.fine()).expect("one JSON object")
    }

    pub fn fail_over(&self, gone: &str, through: &str) {
        run(&["cluster", "failover", gone, "--kv", through]).fine();
    }
}

pub fn log_in(node: &str) -> Connection {
    Connection::log_in(node, "default", connection::FEATURES).expect("a client may log in")
}

/// The nodes each vBucket is on, active first, as a node says.
pub fn chains(client: &mut Connection) -> Vec<Vec<i64>> {
    let reply = client.call(&RequestFrame::new(Opcode::GetClusterConfig)).expect("an answer");
    let config: serde_json::Value = serde_json::from_slice(&reply.value).expect("JSON");
    serde_json::from_value(config["vBucketServerMap"]["vBucketMap"].clone()).expect("rows of numbers")
}

/// Waits until no server uses a data directory any more. One that was killed may let go of its sockets first.
pub fn await_end(dir: &Path) {
    let lock = File::open(dir.join("settee.lock")).expect("a server makes it");
    lock.lock().expect("a server lets go of it when it ends");
}
