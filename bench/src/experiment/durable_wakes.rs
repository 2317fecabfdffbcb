//! Wake-ups on the way of a durable write: from the worker to the log's thread and back, and with a replica through the stream,
//! the other node and its acknowledgement.
//!
//! Who waits for something else to wake it, because the wake-up meant for it was lost, waits for the next write or for a timer.
//! So some rows leave nobody else who could write: one client, or one that writes after a pause in which everything has gone to
//! sleep. A write that takes a tenth of a second, or a second, or for ever, is what to look for.

use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use serde_json::json;
use types::Level;

use super::{Bench, Only};
use crate::load::{Load, Until};
use crate::report::{self, Column, us, whole};
use crate::servers::Shape;
use crate::tally::tenths;
use crate::workload::{Order, Workload};

pub const COLUMNS: &[Column] = &[
    Column("writes", "ops", whole),
    Column("ops/s", "ops_per_s", whole),
    Column("mean", "mean_us", us),
    Column("p50", "p50_us", us),
    Column("p99", "p99_us", us),
    Column("p99.9", "p999_us", us),
    Column("p99.99", "p9999_us", us),
    Column("max", "max_us", us),
    Column("> 100 ms", "above_100ms", whole),
    Column("> 1 s", "above_1s", whole),
    Column("no answer", "unfinished", whole),
    Column("errors", "errors", whole),
];

/// Row, clients, and for one that pauses the ms from one write to the next.
const ROWS: &[(&str, u32, Option<f64>)] = &[
    ("one", 1, None),
    ("64", 64, None),
    ("every-2ms", 1, Some(2.0)),
    ("every-10ms", 1, Some(10.0)),
    ("every-50ms", 1, Some(50.0)),
];
const VALUE_BYTES: usize = 512;

pub fn rows() -> impl Iterator<Item = &'static str> {
    ROWS.iter().map(|(row, ..)| *row)
}

/// What is measured each time.
pub struct DurableWakes<'a> {
    pub only: &'a Only,
    /// Of the several.
    pub shape: Shape,
    pub time: Duration,
}

impl DurableWakes<'_> {
    /// One node, then as many as asked for, each with all rows.
    pub fn run_round(&self, bench: &mut Bench<'_>, settee: &Path) -> Result<()> {
        for shape in [Shape { nodes: 1, replicas: 0, ..self.shape }, self.shape] {
            let nodes = shape.nodes;
            let of = |row: &str| format!("{nodes}-node{}/{row}", if nodes == 1 { "" } else { "s" });
            if ROWS.iter().all(|(row, ..)| !self.only.wants(&of(row))) {
                continue;
            }
            bench.check_stop()?;
            let dir = bench.server_dir()?;
            let cluster = bench.start_cluster(settee, dir.path(), shape)?;
            for (row, clients, pause_ms) in ROWS {
                let name = of(row);
                if !self.only.wants(&name) {
                    continue;
                }
                bench.check_stop()?;
                bench.say(&name);
                let outcome = bench.drive(&cluster, Some(Level::PersistMajority), &self.load(*clients, *pause_ms))?;
                let latencies = &outcome.tally.latencies;
                bench.say(&latencies.draw());
                let mut row = report::row(&name, *clients, &outcome);
                row.entry("unfinished").or_insert(json!(0));
                for (field, longest) in
                    [("above_100ms", Duration::from_millis(100)), ("above_1s", Duration::from_secs(1))]
                {
                    row.insert(field.into(), json!(latencies.count_above(longest.as_nanos() as u64)));
                }
                bench.rows.push(row);
            }
        }
        Ok(())
    }

    fn load(&self, clients: u32, pause_ms: Option<f64>) -> Load {
        Load {
            workload: Workload { value_bytes: VALUE_BYTES, set_pct: 100, keys: 100_000, order: Order::Random },
            clients,
            depth: 1,
            threads: 1,
            warmup: Duration::from_secs(1).min(self.time),
            until: Until::For(self.time),
            rate: pause_ms.map(|ms| tenths(1e3 / ms)),
            seed: 1,
        }
    }
}
