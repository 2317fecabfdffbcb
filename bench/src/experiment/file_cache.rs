//! What a durable write costs when each vBucket's file is committed by itself, with and without opening it anew, and
//! when one log is synced for all. And what it costs when a second node has to have it too.

use std::time::Duration;

use anyhow::Result;
use clap::Args;
use serde_json::json;
use types::Level;

use super::{Bench, Common, Story};
use crate::load::{Load, Until};
use crate::machine;
use crate::report::{self, Ratio};
use crate::servers::{Server, Shape};
use crate::tally::tenths;
use crate::workload::{Order, Workload};

#[derive(Args, Debug)]
pub struct FileCache {
    #[command(flatten)]
    pub(super) common: Common,
    #[arg(long, default_value_t = 2000, value_parser = clap::value_parser!(u32).range(1..=60_000))]
    clients: u32,
    /// Bytes of a value
    #[arg(long, value_name = "BYTES", default_value_t = 512)]
    value_size: usize,
    /// vBuckets the writes are spread over: a power of two up to 1024
    #[arg(long, default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..=1024))]
    vbuckets: u32,
    /// Compare one node with so many, each with a commit log
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=8))]
    nodes: u16,
    /// Copies of each vBucket beside the active one, where there is more than one node
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(0..=2))]
    replicas: u8,
    /// Event loops of the load generator
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    threads: u32,
}

/// Syncs of the disk by itself, before a row and again after it.
const PROBE_SYNCS: usize = 500;
const DURABLE: Option<Level> = Some(Level::PersistMajority);

/// Row, durability of the writes, settings of the server.
const CASES: &[(&str, Option<Level>, &[&str])] = &[
    ("close-each-time", DURABLE, &["persist.commit_log=off", "persist.file_cache.files_max=0"]),
    ("keep-open", DURABLE, &["persist.commit_log=off", "persist.file_cache.files_max=2048"]),
    ("commit-log", DURABLE, &["persist.commit_log=on"]),
    ("no-durability", None, &["persist.commit_log=on"]),
];

impl FileCache {
    pub(super) fn run(&self, bench: &mut Bench<'_>) -> Result<Story> {
        if self.nodes > 1 {
            return self.run_clusters(bench);
        }
        let time = self.common.seconds(20.0, 4.0)?;
        let settee = self.common.settee()?;
        for round in 1..=self.common.rounds() {
            for (name, level, settings) in CASES {
                bench.check_stop()?;
                let dir = bench.server_dir()?;
                let vbuckets = format!("bucket.vbuckets={}", self.vbuckets);
                let settings: Vec<String> = settings.iter().map(|s| (*s).to_owned()).chain([vbuckets]).collect();
                bench.say(&format!("round {round}: {name}"));
                let measured = Server::settee(&settee, dir.path(), &settings).and_then(|server| {
                    bench.versions.insert("settee".to_owned(), server.version.clone());
                    self.measure(bench, name, *level, &server, time)
                });
                match measured {
                    Ok(row) => bench.rows.push(row),
                    Err(error) => bench.rows.skip(name, &format!("{error:#}")),
                }
            }
        }
        let ratios = vec![
            Ratio::new("mean_us", "keep-open", "close-each-time"),
            Ratio::new("mean_us", "commit-log", "keep-open"),
            Ratio::new("p999_us", "commit-log", "keep-open"),
            Ratio::new("ops_per_s", "commit-log", "no-durability"),
        ];
        Ok(Story { columns: report::LOAD_COLUMNS, ratios })
    }

    fn measure(
        &self,
        bench: &Bench<'_>,
        name: &str,
        level: Option<Level>,
        server: &Server,
        time: Duration,
    ) -> Result<report::Row> {
        // The first writes of each vBucket make its file.
        let warmup = Duration::from_secs(if self.common.quick { 2 } else { 5 });
        let outcome = bench.drive(server, level, &Load { warmup, ..self.load(self.clients, time) })?;
        Ok(report::row(name, self.clients, &outcome))
    }

    fn load(&self, clients: u32, time: Duration) -> Load {
        Load {
            workload: Workload { value_bytes: self.value_size, set_pct: 100, keys: 100_000, order: Order::Random },
            clients,
            depth: 1,
            threads: self.threads,
            warmup: if self.common.quick { Duration::from_millis(200) } else { Duration::from_secs(2) },
            until: Until::For(time),
            rate: None,
            seed: 1,
        }
    }

    /// One node, and several that replicate; each with many clients and with one, beside the disk's own time.
    fn run_clusters(&self, bench: &mut Bench<'_>) -> Result<Story> {
        let time = self.common.seconds(20.0, 4.0)?;
        let settee = self.common.settee()?;
        let shapes = [(1, 0), (self.nodes, self.replicas)];
        for round in 1..=self.common.rounds() {
            for (nodes, replicas) in shapes {
                bench.check_stop()?;
                let dir = bench.lasting_dir()?;
                let shape = Shape { nodes, replicas, vbuckets: self.vbuckets };
                bench.say(&format!("round {round}: {}", row_name(nodes, "")));
                let cluster = match bench.start_cluster(&settee, &dir, shape) {
                    Ok(cluster) => cluster,
                    Err(error) => {
                        bench.rows.skip(&row_name(nodes, ""), &format!("{error:#}"));
                        continue;
                    }
                };
                // One client first: beside the filing of what thousands wrote it would measure that.
                for clients in [1, self.clients] {
                    let name = row_name(nodes, &clients.to_string());
                    bench.say(&name);
                    match self.measure_beside_disk(bench, &name, &cluster, clients, time) {
                        Ok(row) => bench.rows.push(row),
                        Err(error) => bench.rows.skip(&name, &format!("{error:#}")),
                    }
                }
            }
        }
        let over = |field, clients: u32| {
            let name = |nodes| row_name(nodes, &clients.to_string());
            Ratio::new(field, &name(self.nodes), &name(1))
        };
        let many = self.clients;
        let ratios = vec![over("ops_per_s", many), over("mean_us", many), over("p999_us", many), over("mean_us", 1)];
        Ok(Story { columns: report::LOAD_COLUMNS, ratios })
    }

    /// The disk's own time is measured half before and half after.
    fn measure_beside_disk(
        &self,
        bench: &Bench<'_>,
        name: &str,
        cluster: &Server,
        clients: u32,
        time: Duration,
    ) -> Result<report::Row> {
        let probe = || machine::probe_sync(bench.scratch.path(), if self.common.quick { 100 } else { PROBE_SYNCS });
        let mut disk = probe()?;
        let outcome = bench.drive(cluster, DURABLE, &self.load(clients, time))?;
        disk.add(&probe()?);
        let mut row = report::row(name, clients, &outcome);
        row.insert("fdatasync_mean_us".into(), json!(disk.mean_us()));
        let times = outcome.tally.latencies.mean_us() / disk.mean_us().max(0.1);
        row.insert("times_fdatasync".into(), json!(tenths(times)));
        Ok(row)
    }
}

/// `1-node/2000`, `2-nodes/1`.
fn row_name(nodes: u16, clients: &str) -> String {
    let nodes = if nodes == 1 { "1-node".to_owned() } else { format!("{nodes}-nodes") };
    if clients.is_empty() { nodes } else { format!("{nodes}/{clients}") }
}
