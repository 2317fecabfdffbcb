//! The same documents written over and over: whether the server gets slower with what it has to clear away, and how much it
//! writes to the disk for what it was given.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Args;
use serde_json::json;
use types::Level;

use super::{Bench, Common, Story};
use crate::load::{Load, Until};
use crate::report::{self, Column, Row};
use crate::servers::Server;
use crate::tally::tenths;
use crate::workload::{KEY_BYTES, Order, Workload};

#[derive(Args, Debug)]
pub struct Overwrite {
    #[command(flatten)]
    pub(super) common: Common,
    /// Documents [default: 100000, with --quick 2000]
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=1_000_000_000))]
    keys: Option<u64>,
    /// How often each of them is written
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(2..=1000))]
    passes: u32,
    /// Connections, each with one durable write at a time
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=60_000))]
    clients: u32,
    /// Bytes of a value
    #[arg(long, value_name = "BYTES", default_value_t = 1024)]
    value_size: usize,
    /// Settings for the settee, as in `settee serve --set`
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
}

const COLUMNS: &[Column] = &[
    Column("ops/s", "ops_per_s", report::whole),
    Column("mean", "mean_us", report::us),
    Column("p50", "p50_us", report::us),
    Column("p99", "p99_us", report::us),
    Column("p99.9", "p999_us", report::us),
    Column("max", "max_us", report::us),
    Column("cpu/op", "cpu_us_per_op", report::us),
    Column("syncs/s", "syncs_per_s", report::whole),
    Column("written/op", "written_bytes_per_op", report::whole),
    Column("last of first", "last_of_first", report::hundredth),
    Column("late half of early", "late_half_of_early", report::hundredth),
    Column("written of given", "write_amplification", report::hundredth),
    Column("errors", "errors", report::whole),
];

impl Overwrite {
    pub(super) fn run(&self, bench: &mut Bench<'_>) -> Result<Story> {
        // One pass of the slowest sensible disk.
        let patience = self.common.seconds(600.0, 60.0)?;
        for round in 1..=self.common.rounds() {
            bench.check_stop()?;
            bench.say(&format!("round {round}"));
            self.run_round(bench, patience)?;
        }
        Ok(Story { columns: COLUMNS, ratios: Vec::new() })
    }

    fn run_round(&self, bench: &mut Bench<'_>, patience: Duration) -> Result<()> {
        let dir = bench.server_dir()?;
        let server = Server::settee(&self.common.settee()?, dir.path(), &self.set)?;
        bench.versions.insert("settee".to_owned(), server.version.clone());
        let observer = bench.observe(&server)?;
        let before = observer.usage().context("the server's process cannot be watched")?;
        let load = self.load(patience);
        let (mut rates, mut time, mut errors) = (Vec::new(), Duration::ZERO, 0);
        for pass in 1..=self.passes {
            bench.say(&format!("pass {pass} of {}", self.passes));
            let outcome = bench.drive(&server, Some(Level::PersistMajority), &load)?;
            let done = outcome.tally.ops + outcome.tally.error_count();
            if done < load.workload.keys {
                bail!("pass {pass}: {done} of {} writes within {patience:?}", load.workload.keys);
            }
            rates.push(outcome.ops_per_s());
            time += outcome.elapsed;
            errors += outcome.tally.error_count();
            bench.rows.push(report::row(&format!("pass-{pass}"), self.clients, &outcome));
        }
        let is_filed = bench.await_filed(&observer)?;
        let used = observer.usage().context("the server is gone")?.since(&before);
        let ops = load.workload.keys * u64::from(self.passes);
        let mut row = Row::new();
        row.insert("name".into(), json!("all"));
        row.insert("clients".into(), json!(self.clients));
        row.insert("ops".into(), json!(ops - errors));
        row.insert("errors".into(), json!(errors));
        row.insert("ops_per_s".into(), json!(tenths(ops as f64 / time.as_secs_f64().max(1e-9))));
        row.insert("last_of_first".into(), json!(hundredths(rates[rates.len() - 1] / rates[0].max(1e-9))));
        let (early, late) = rates.split_at(rates.len() / 2);
        row.insert("late_half_of_early".into(), json!(hundredths(mean(late) / mean(early).max(1e-9))));
        if let Some(written) = used.written_bytes {
            let given = ops * (KEY_BYTES + self.value_size) as u64;
            row.insert("written_bytes_per_op".into(), json!(tenths(written as f64 / ops as f64)));
            row.insert("write_amplification".into(), json!(hundredths(written as f64 / given as f64)));
        }
        if !is_filed {
            row.insert("note".into(), json!("not everything was filed a minute after the last write"));
        }
        bench.rows.push(row);
        Ok(())
    }

    fn load(&self, patience: Duration) -> Load {
        let keys = self.keys.unwrap_or(if self.common.quick { 2_000 } else { 100_000 });
        Load {
            workload: Workload { value_bytes: self.value_size, set_pct: 100, keys, order: Order::Sequential },
            clients: self.clients,
            depth: 1,
            threads: 1,
            warmup: Duration::ZERO,
            until: Until::OpsWithin(keys, patience),
            rate: None,
            seed: 1,
        }
    }
}

fn mean(rates: &[f64]) -> f64 {
    rates.iter().sum::<f64>() / rates.len().max(1) as f64
}

fn hundredths(number: f64) -> f64 {
    (number * 100.0).round() / 100.0
}
