//! The same writes and reads, by the same client code, on this server and on others.

use std::time::Duration;

use anyhow::{Result, bail};
use clap::Args;
use types::Level;

use super::{Bench, Common, Story};
use crate::kv::preload;
use crate::load::{self, Load, Until, Watch};
use crate::report::{self, Ratio};
use crate::servers::{Peer, Server, settle};
use crate::workload::{Order, Workload};

#[derive(Args, Debug)]
pub struct Peers {
    #[command(flatten)]
    pub(super) common: Common,
    /// Numbers of connections [default: 1,64,500,2000, with --quick 1,64]
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=60_000))]
    clients: Vec<u32>,
    /// Requests under way on each connection
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    depth: u32,
    /// Bytes of a value
    #[arg(long, value_name = "BYTES", default_value_t = 512)]
    value_size: usize,
    /// Event loops of the load generator
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    threads: u32,
    /// Only these [default: all]
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Settings for the settees, as in `settee serve --set`
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
}

/// A line of the story: who, and what is asked of them.
struct Case {
    name: &'static str,
    peer: Option<Peer>,
    level: Option<Level>,
    set_pct: u32,
}

const CASES: &[Case] = &[
    Case { name: "settee-durable", peer: None, level: Some(Level::PersistMajority), set_pct: 100 },
    Case { name: "redis-always", peer: Some(Peer::RedisAlways), level: None, set_pct: 100 },
    Case { name: "etcd", peer: Some(Peer::Etcd), level: None, set_pct: 100 },
    Case { name: "postgres", peer: Some(Peer::Postgres), level: None, set_pct: 100 },
    Case { name: "settee-plain", peer: None, level: None, set_pct: 100 },
    Case { name: "memcached-set", peer: Some(Peer::Memcached), level: None, set_pct: 100 },
    Case { name: "settee-get", peer: None, level: None, set_pct: 0 },
    Case { name: "memcached-get", peer: Some(Peer::Memcached), level: None, set_pct: 0 },
];

impl Peers {
    pub(super) fn run(&self, bench: &mut Bench<'_>) -> Result<Story> {
        if let Some(unknown) = self.only.iter().find(|name| CASES.iter().all(|case| case.name != **name)) {
            bail!("--only {unknown}: choose from {}", CASES.iter().map(|c| c.name).collect::<Vec<_>>().join(", "));
        }
        let clients = match (&self.clients[..], self.common.quick) {
            ([], true) => vec![1, 64],
            ([], false) => vec![1, 64, 500, 2000],
            (chosen, _) => chosen.to_vec(),
        };
        let time = self.common.seconds(5.0, 1.0)?;
        let settee = self.common.settee()?;
        let cases = || CASES.iter().filter(|case| self.only.is_empty() || self.only.iter().any(|n| n == case.name));
        for round in 1..=self.common.rounds() {
            for case in cases() {
                bench.check_stop()?;
                let dir = bench.server_dir()?;
                let most = clients.iter().copied().max().unwrap_or(1).max(64);
                let server = match case.peer {
                    None => Server::settee(&settee, dir.path(), &self.set),
                    Some(peer) => Server::peer(peer, dir.path(), most),
                };
                let server = match server {
                    Ok(server) => server,
                    Err(error) => {
                        for clients in &clients {
                            bench.rows.skip(&format!("{}/{clients}", case.name), &format!("{error:#}"));
                        }
                        continue;
                    }
                };
                let through = if case.peer == Some(Peer::Etcd) { " (through its JSON gateway)" } else { "" };
                let known = case.name.split('-').next().unwrap_or(case.name).to_owned();
                bench.versions.insert(known, format!("{}{through}", server.version));
                for (n, &clients) in clients.iter().enumerate() {
                    bench.check_stop()?;
                    let name = format!("{}/{clients}", case.name);
                    bench.say(&format!("round {round}: {name}"));
                    match self.measure(bench, case, &server, clients, time, n == 0) {
                        Ok(row) => bench.rows.push(row),
                        Err(error) => bench.rows.skip(&name, &format!("{error:#}")),
                    }
                }
            }
        }
        let pairs = |n: &u32| {
            let pair = |row: &str, over: &str| Ratio::new("ops_per_s", &format!("{row}/{n}"), &format!("{over}/{n}"));
            [
                pair("settee-durable", "redis-always"),
                pair("settee-durable", "settee-plain"),
                pair("settee-plain", "memcached-set"),
                pair("settee-get", "memcached-get"),
            ]
        };
        Ok(Story { columns: report::LOAD_COLUMNS, ratios: clients.iter().flat_map(pairs).collect() })
    }

    fn measure(
        &self,
        bench: &Bench<'_>,
        case: &Case,
        server: &Server,
        clients: u32,
        time: Duration,
        first: bool,
    ) -> Result<report::Row> {
        let keys = if self.common.quick { 20_000 } else { 100_000 };
        let load = Load {
            workload: Workload { value_bytes: self.value_size, set_pct: case.set_pct, keys, order: Order::Random },
            clients,
            depth: self.depth,
            threads: self.threads,
            warmup: if self.common.quick { Duration::from_millis(200) } else { Duration::from_secs(1) },
            until: Until::For(time),
            rate: None,
            seed: 1,
        };
        if first && case.set_pct < 100 {
            let dialect = server.target.prepare(&server.identity, case.level)?;
            let watch = Watch { stop: bench.stop, usage: &|| None, live: false };
            load::run(&server.target, &dialect, &preload(&load), &watch)?;
            settle(server);
        }
        let outcome = bench.drive(server, case.level, &load)?;
        Ok(report::row(&format!("{}/{clients}", case.name), clients, &outcome))
    }
}
