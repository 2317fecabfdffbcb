//! How much memory small documents take: what a server has resident with them, less what it has without.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::Args;
use serde_json::json;

use super::{Bench, Common, LOOK, Only, Story};
use crate::load::{Load, Until};
use crate::protocol::couchbase;
use crate::report::{Column, Ratio, Row, tenth, whole};
use crate::servers::{Peer, Server, settle};
use crate::tally::tenths;
use crate::workload::{KEY_BYTES, Order, Workload};

#[derive(Args, Debug)]
pub struct Memory {
    #[command(flatten)]
    pub(super) common: Common,
    #[command(flatten)]
    only: Only,
    /// Documents [default: 1000000, with --quick 20000]
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=1_000_000_000))]
    items: Option<u64>,
    /// Bytes of a value
    #[arg(long, value_name = "BYTES", default_value_t = 100)]
    value_size: usize,
    /// Settings for the settee, as in `settee serve --set`
    #[arg(long, value_name = "KEY=VALUE", default_value = "bucket.quota_mb=2048")]
    set: Vec<String>,
}

const LOADED: &str = "settee-loaded";
const RESTARTED: &str = "settee-restarted";
const PEERS: [(&str, Peer); 2] = [("memcached", Peer::Memcached), ("redis", Peer::RedisAlways)];
/// Connections that load, and requests under way on each.
const CLIENTS: u32 = 8;
const DEPTH: u32 = 16;
/// Allocators give back what was not asked for in some seconds. What changes by less than half a percent in this is at rest.
const STANDSTILL: Duration = Duration::from_secs(4);
const LOOKS_MAX: usize = 15;
/// How long a restarted server may take to have everything in memory again.
const WARM_UP_PATIENCE: Duration = Duration::from_secs(120);

const COLUMNS: &[Column] = &[
    Column("documents", "items", whole),
    Column("idle MiB", "idle_mb", tenth),
    Column("MiB", "resident_mb", tenth),
    Column("bytes/document", "bytes_per_item", tenth),
    Column("more than given", "overhead_bytes_per_item", tenth),
];

impl Memory {
    pub(super) fn run(&self, bench: &mut Bench<'_>) -> Result<Story> {
        let patience = self.common.seconds(600.0, 60.0)?;
        let load = self.load(patience);
        for round in 1..=self.common.rounds() {
            bench.check_stop()?;
            if self.only.wants(LOADED) || self.only.wants(RESTARTED) {
                bench.say(&format!("round {round}: settee"));
                self.measure_settee(bench, &load)?;
            }
            for (name, peer) in PEERS.into_iter().filter(|(name, _)| self.only.wants(name)) {
                bench.check_stop()?;
                bench.say(&format!("round {round}: {name}"));
                match self.measure_peer(bench, name, peer, &load) {
                    Ok(row) => bench.rows.push(row),
                    Err(error) => bench.rows.skip(name, &format!("{error:#}")),
                }
            }
        }
        let over = |row, over| Ratio::new("bytes_per_item", row, over);
        let pairs = [LOADED, RESTARTED].into_iter().flat_map(|row| PEERS.map(|(peer, _)| over(row, peer)));
        Ok(Story { columns: COLUMNS, ratios: pairs.collect() })
    }

    fn measure_settee(&self, bench: &mut Bench<'_>, load: &Load) -> Result<()> {
        let dir = bench.server_dir()?;
        let settee = self.common.settee()?;
        let server = Server::settee(&settee, dir.path(), &self.set)?;
        bench.versions.insert("settee".to_owned(), server.version.clone());
        let idle = rest(&server)?;
        fill(bench, &server, load)?;
        let is_filed = bench.await_filed(&bench.observe(&server)?)?;
        let mut row = row(LOADED, load, idle, rest(&server)?);
        if !is_filed {
            row.insert("note".into(), json!("not everything was filed a minute after the last write"));
        }
        bench.rows.push(row);
        bench.say("restarting");
        let server = server.restart(&settee, &self.set)?;
        await_loaded(bench, &server)?;
        bench.rows.push(self::row(RESTARTED, load, idle, rest(&server)?));
        Ok(())
    }

    fn measure_peer(&self, bench: &mut Bench<'_>, name: &str, peer: Peer, load: &Load) -> Result<Row> {
        let dir = bench.server_dir()?;
        let server = Server::peer(peer, dir.path(), CLIENTS)?;
        bench.versions.insert(name.to_owned(), server.version.clone());
        let idle = rest(&server)?;
        fill(bench, &server, load)?;
        Ok(row(name, load, idle, rest(&server)?))
    }

    fn load(&self, patience: Duration) -> Load {
        let keys = self.items.unwrap_or(if self.common.quick { 20_000 } else { 1_000_000 });
        Load {
            workload: Workload { value_bytes: self.value_size, set_pct: 100, keys, order: Order::Sequential },
            clients: CLIENTS,
            depth: DEPTH,
            threads: 1,
            warmup: Duration::ZERO,
            until: Until::OpsWithin(keys, patience),
            rate: None,
            seed: 1,
        }
    }
}

/// Stores every document once.
fn fill(bench: &Bench<'_>, server: &Server, load: &Load) -> Result<()> {
    let tally = bench.drive(server, None, load)?.tally;
    if tally.ops != load.workload.keys {
        bail!("{} of {} documents were stored: {:?}", tally.ops, load.workload.keys, tally.errors);
    }
    Ok(())
}

/// Memory once it does nothing any more, and gives nothing more back to the system.
fn rest(server: &Server) -> Result<u64> {
    settle(server);
    let resident = || server.resident_bytes().context("the server's process cannot be watched");
    let mut before = resident()?;
    for _ in 0..LOOKS_MAX {
        thread::sleep(STANDSTILL);
        let now = resident()?;
        if now.abs_diff(before) < before / 200 {
            return Ok(now);
        }
        before = now;
    }
    Ok(before)
}

fn await_loaded(bench: &Bench<'_>, server: &Server) -> Result<()> {
    let dialect = server.target.prepare(&server.identity, None)?;
    let mut stream = server.target.connect()?;
    dialect.protocol().open(&mut stream)?;
    let began = Instant::now();
    loop {
        bench.check_stop()?;
        let stats = couchbase::stats(&mut stream, "warmup")?;
        let number = |name: &str| stats.get(name).and_then(|text| text.parse::<u64>().ok());
        let (loaded, total) = (number("ep_warmup_vbuckets_loaded"), number("ep_warmup_vbuckets_total"));
        if loaded.is_some() && loaded == total {
            return Ok(());
        }
        if began.elapsed() > WARM_UP_PATIENCE {
            bail!("{loaded:?} of {total:?} vBuckets were loaded {WARM_UP_PATIENCE:?} after the restart");
        }
        thread::sleep(LOOK);
    }
}

fn row(name: &str, load: &Load, idle: u64, resident: u64) -> Row {
    let items = load.workload.keys;
    let mb = |bytes: u64| tenths(bytes as f64 / f64::from(1 << 20));
    let each = resident.saturating_sub(idle) as f64 / items as f64;
    let mut row = Row::new();
    row.insert("name".into(), json!(name));
    row.insert("items".into(), json!(items));
    row.insert("errors".into(), json!(0));
    row.insert("idle_mb".into(), json!(mb(idle)));
    row.insert("resident_mb".into(), json!(mb(resident)));
    row.insert("bytes_per_item".into(), json!(tenths(each)));
    let given = KEY_BYTES + load.workload.value_bytes;
    row.insert("overhead_bytes_per_item".into(), json!(tenths(each - given as f64)));
    row
}
