//! What a durable write costs when each vBucket's file is committed by itself, with and without opening it anew, and
//! when one log is synced for all.

use std::time::Duration;

use anyhow::{Result, bail};
use clap::Args;
use types::Level;

use super::{Bench, Common, Story};
use crate::load::{self, Load, Until, Watch};
use crate::report::{self, Ratio};
use crate::servers::Server;
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
    /// Event loops of the load generator
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    threads: u32,
}

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
        let load = Load {
            workload: Workload { value_bytes: self.value_size, set_pct: 100, keys: 100_000, order: Order::Random },
            clients: self.clients,
            depth: 1,
            threads: self.threads,
            // The first writes of each vBucket make its file.
            warmup: Duration::from_secs(if self.common.quick { 2 } else { 5 }),
            until: Until::For(time),
            rate: None,
            seed: 1,
        };
        let dialect = server.target.prepare(&server.identity, level)?;
        let usage = || server.usage();
        let outcome =
            load::run(&server.target, &dialect, &load, &Watch { stop: bench.stop, usage: &usage, live: true })?;
        if outcome.interrupted {
            bail!("interrupted");
        }
        Ok(report::row(name, self.clients, &outcome))
    }
}
