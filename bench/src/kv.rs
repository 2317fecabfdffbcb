//! `settee bench kv`: one load on one server.

use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Args;

use crate::load::{self, Load, Until, Watch};
use crate::observer::Observer;
use crate::target::{Durability, Identity, Kind, Target};
use crate::workload::{Order, Workload};
use crate::{machine, report};

/// How many syncs the probe of the disk makes beside a run.
const PROBE_SYNCS: usize = 500;
const DEFAULT_TARGET: &str = "couchbase://127.0.0.1:11210/default";

#[derive(Args, Debug)]
pub struct Kv {
    /// Whom to drive: couchbase://HOST:PORT/BUCKET, where any node of a cluster tells of the others, memcached://, memcached+binary://, redis://, etcd:// or postgres://
    #[arg(long, value_name = "URL", default_value = DEFAULT_TARGET, value_parser = Target::parse)]
    target: Target,
    /// Clients, each with a connection to every node
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=60_000))]
    clients: u32,
    /// Requests that each has under way
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    depth: u32,
    /// Event loops of the load generator
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    threads: u32,
    /// Bytes of a value
    #[arg(long, value_name = "BYTES", default_value_t = 512, value_parser = clap::value_parser!(u32).range(..=20 << 20))]
    value_size: u32,
    /// Of a hundred operations, how many store; the others read
    #[arg(long, value_name = "PERCENT", default_value_t = 100, value_parser = clap::value_parser!(u32).range(0..=100))]
    set_pct: u32,
    /// Different keys
    #[arg(long, default_value_t = 100_000, value_parser = clap::value_parser!(u64).range(1..=10_000_000_000))]
    keys: u64,
    /// Of writes to a couchbase:// target: none, majority, majorityAndPersistActive or persistToMajority
    #[arg(long, value_name = "LEVEL", default_value = "none", value_parser = Durability::parse)]
    durability: Durability,
    /// Stop after this many operations
    #[arg(long, conflicts_with = "seconds", value_parser = clap::value_parser!(u64).range(1..))]
    ops: Option<u64>,
    /// Stop after this many seconds [default: 10]
    #[arg(long, value_parser = seconds)]
    seconds: Option<Duration>,
    /// Operations a second, begun at fixed moments whether or not earlier ones are answered; latency counts from those
    #[arg(long, value_name = "PER_SECOND", value_parser = rate)]
    rate: Option<f64>,
    /// Seconds before measuring begins
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = seconds)]
    warmup: Duration,
    /// Store every key once first, so that reads find something
    #[arg(long)]
    preload: bool,
    /// [default: Administrator; of a database: postgres]
    #[arg(long)]
    user: Option<String>,
    /// Else SETTEE_PASSWORD, or --password-file, or the data directory of a server on this machine
    #[arg(long)]
    password: Option<String>,
    /// File whose first line is the password
    #[arg(long, value_name = "FILE")]
    password_file: Option<PathBuf>,
    /// The server's data directory, for the password generated there and for the probe of its disk
    #[arg(long, value_name = "DIR", default_value = "./settee-data")]
    data_dir: PathBuf,
    /// The same keys and order each time
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl Kv {
    fn load(&self) -> Result<Load> {
        let until = match (self.ops, self.seconds.unwrap_or(Duration::from_secs(10))) {
            (Some(ops), _) => Until::Ops(ops),
            (None, time) if time.is_zero() => bail!("--seconds 0 measures nothing"),
            (None, time) => Until::For(time),
        };
        Ok(Load {
            workload: Workload {
                value_bytes: self.value_size as usize,
                set_pct: self.set_pct,
                keys: self.keys,
                order: Order::Random,
            },
            clients: self.clients,
            depth: self.depth,
            threads: self.threads,
            warmup: self.warmup,
            until,
            rate: self.rate,
            seed: self.seed,
        })
    }

    fn identity(&self) -> Result<Identity> {
        if self.target.kind != Kind::Couchbase {
            return Ok(Identity { user: self.user.clone().unwrap_or_default(), ..Identity::default() });
        }
        let user = self.user.clone().unwrap_or_else(|| "Administrator".to_owned());
        let from = |path: &PathBuf| {
            let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
            text.lines().next().map(str::to_owned).with_context(|| format!("{} is empty", path.display()))
        };
        let generated = self.data_dir.join("password");
        let password = match (&self.password, std::env::var("SETTEE_PASSWORD"), &self.password_file) {
            (Some(password), ..) => password.clone(),
            (None, Ok(password), _) => password,
            (None, Err(_), Some(path)) => from(path)?,
            (None, Err(_), None) if generated.exists() => from(&generated)?,
            _ => bail!(
                "no password: give --password or --password-file, or set SETTEE_PASSWORD, or give --data-dir of a server \
                 on this machine (there is no {})",
                generated.display()
            ),
        };
        Ok(Identity { user, password })
    }

    pub fn run(&self, stop: &AtomicBool) -> Result<()> {
        let load = self.load()?;
        let target = &self.target;
        // The disk is the server's only if the directory says so; otherwise the probe is of the disk of temporary
        // files.
        let scratch = machine::scratch(self.data_dir.parent().filter(|_| self.data_dir.is_dir()))?;
        let fdatasync = machine::probe_sync(scratch.path(), PROBE_SYNCS)?;
        if let Err(error) = env::os::raise_fd_limit() {
            eprintln!("cannot raise the limit of open files: {error}");
        }
        let dialect = target.prepare(&self.identity()?, self.durability.level())?;
        if self.preload {
            let filled = load::run(target, &dialect, &preload(&load), &Watch { stop, usage: &|| None, live: true });
            let filled = filled.context("while filling the store")?;
            if filled.tally.error_count() > 0 {
                bail!("filling the store failed: {:?}", filled.tally.errors);
            }
        }
        let observer = Observer::new(target, &dialect, scratch.path())?;
        let usage = || observer.usage();
        let outcome = load::run(target, &dialect, &load, &Watch { stop, usage: &usage, live: true })?;

        let what = self.describe();
        let row = report::row(&target.to_string(), self.clients, &outcome);
        if self.json {
            let machine = machine::describe(scratch.path());
            let object = report::object("kv", machine, &fdatasync, vec![row]);
            return report::print(&format!("{}\n", serde_json::Value::from(object)));
        }
        report::print(&report::story(&what, &row, &outcome))
    }

    fn describe(&self) -> String {
        let loop_kind = self.rate.map_or_else(|| "closed loop".to_owned(), |rate| format!("open loop, {rate} ops/s"));
        format!(
            "{}: {} clients, depth {}, {} B values, {} keys, {} % SET, durability {}, {loop_kind}",
            self.target,
            self.clients,
            self.depth,
            self.value_size,
            self.keys,
            self.set_pct,
            self.durability.name()
        )
    }
}

/// Stores every key once, on the connections and threads of `load`.
pub fn preload(load: &Load) -> Load {
    Load {
        workload: Workload { set_pct: 100, order: Order::Sequential, ..load.workload.clone() },
        clients: load.clients.min(64),
        depth: 16,
        warmup: Duration::ZERO,
        until: Until::Ops(load.workload.keys),
        rate: None,
        ..load.clone()
    }
}

/// What an option in seconds may say.
pub fn seconds(text: &str) -> Result<Duration> {
    let time = text.parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    time.filter(|time| *time <= Duration::from_secs(86_400)).context("a number of seconds from 0 to 86400")
}

fn rate(text: &str) -> Result<f64> {
    let rate = text.parse().ok().filter(|rate| (0.001..=1e8).contains(rate));
    rate.context("operations a second, from 0.001 to 100000000")
}
