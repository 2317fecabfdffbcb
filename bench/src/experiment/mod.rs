//! Whole stories: servers are started, driven side by side and ended, and a table is printed.

mod compaction_sync;
mod connections;
mod durable_wakes;
mod file_cache;
mod idle;
mod memory;
mod neighbours;
mod overwrite;
mod peers;
mod vbuckets;
mod wakeups;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::{Args, Subcommand};
use serde_json::{Value, json};
use types::Level;

use crate::load::{self, Load, Outcome, Until, Watch};
use crate::observer::Observer;
use crate::report::{Column, Ratio, Row};
use crate::servers::{Server, Shape};
use crate::workload::{Order, Workload};
use crate::{machine, report};

/// How long what was written may take to get into the vBuckets' files once nothing more comes.
const FILING_PATIENCE: Duration = Duration::from_secs(60);
/// How long a cluster may take to do its first durable writes.
const FIRST_WRITES_PATIENCE: Duration = Duration::from_secs(60);
/// How often what is waited for is looked at.
const LOOK: Duration = Duration::from_millis(200);

#[derive(Subcommand, Debug)]
pub enum Experiment {
    /// Durable and plain writes here and on memcached, redis, etcd and postgres
    Peers(peers::Peers),
    /// Clients that connect, authenticate, do one thing and leave, on tables smaller than their number
    Connections(connections::Connections),
    /// How long a task that is woken waits until it runs
    Wakeups(wakeups::Wakeups),
    /// What a client notices of others that misbehave, and of nobody at all
    Neighbours(neighbours::Neighbours),
    /// What a server with many buckets does while nobody asks for anything
    Idle(idle::Idle),
    /// Durable writes: files closed each time, kept open, or behind a commit log
    FileCache(file_cache::FileCache),
    /// Durable and plain writes spread over 1, 64 and 1024 vBuckets
    Vbuckets(vbuckets::Vbuckets),
    /// The same documents written over and over, one durable write at a time
    Overwrite(overwrite::Overwrite),
    /// Bytes of memory a small document takes, here and on memcached and redis
    Memory(memory::Memory),
    /// Durable writes beside four compactions: none, synced every 16 MiB, every 1 MiB, governed
    CompactionSync(compaction_sync::CompactionSync),
}

/// What every experiment takes.
#[derive(Args, Clone, Debug)]
pub struct Common {
    /// Everything smaller: done in less than a minute, good for a look only
    #[arg(long)]
    quick: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    /// Where scratch directories are made; decides which disk is measured [default: the temporary directory, unless it
    /// is memory]
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Each row is measured this often, rows taking turns; medians are told [default: 3, with --quick 1]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=99))]
    rounds: Option<u32>,
    /// Seconds a row is measured each time [default: depends on the experiment]
    #[arg(long, value_parser = crate::kv::seconds)]
    seconds: Option<Duration>,
    /// The settee to start [default: this one]
    #[arg(long, value_name = "FILE")]
    settee: Option<PathBuf>,
}

impl Common {
    fn rounds(&self) -> u32 {
        self.rounds.unwrap_or(if self.quick { 1 } else { 3 })
    }

    fn seconds(&self, normal: f64, quick: f64) -> Result<Duration> {
        let time = self.seconds.unwrap_or(Duration::from_secs_f64(if self.quick { quick } else { normal }));
        if time.is_zero() {
            bail!("--seconds 0 measures nothing");
        }
        Ok(time)
    }

    fn settee(&self) -> Result<PathBuf> {
        match &self.settee {
            Some(path) => Ok(path.clone()),
            None => std::env::current_exe().context("cannot tell where this program is"),
        }
    }
}

/// For experiments of many rows and those who know which of them they look for.
#[derive(Args, Clone, Debug)]
pub struct Only {
    /// Only these rows [default: all]
    #[arg(long, value_name = "ROW", value_delimiter = ',')]
    only: Vec<String>,
}

impl Only {
    fn wants(&self, row: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|wanted| wanted == row)
    }
}

/// Beside which everything is measured.
struct Bench<'a> {
    stop: &'a AtomicBool,
    scratch: tempfile::TempDir,
    rows: Rows,
    versions: BTreeMap<String, String>,
}

impl Bench<'_> {
    /// A directory of its own for a server, removed with the value.
    fn server_dir(&self) -> Result<tempfile::TempDir> {
        Ok(tempfile::tempdir_in(self.scratch.path())?)
    }

    /// One that stays until the end of the experiment. Where thousands of files were just removed ext4 looks at each of their inodes for
    /// every file that is made, for a minute and more, and may keep syncs waiting while it tells the disk: the next server would pay for
    /// the one before.
    fn lasting_dir(&self) -> Result<PathBuf> {
        Ok(self.server_dir()?.keep())
    }

    fn check_stop(&self) -> Result<()> {
        if self.stop.load(Relaxed) {
            bail!("interrupted");
        }
        Ok(())
    }

    /// One load on a server, or a cluster, that is watched.
    fn drive(&self, server: &Server, level: Option<Level>, load: &Load) -> Result<Outcome> {
        let dialect = server.target.prepare(&server.identity, level)?;
        let observer = Observer::new(&server.target, &dialect, server.dir())?;
        let usage = || observer.usage();
        let outcome = load::run(&server.target, &dialect, load, &Watch { stop: self.stop, usage: &usage, live: true })?;
        if outcome.interrupted {
            bail!("interrupted");
        }
        Ok(outcome)
    }

    /// A cluster whose replicas follow: the first writes, which wait for that and make files, are done.
    fn start_cluster(&mut self, settee: &Path, dir: &Path, shape: Shape) -> Result<Server> {
        let cluster = Server::cluster(settee, dir, shape, &[])?;
        self.versions.insert("settee".to_owned(), cluster.version.clone());
        let keys = u64::from(shape.vbuckets) * 8;
        let load = Load {
            workload: Workload { value_bytes: 16, set_pct: 100, keys, order: Order::Sequential },
            clients: 64,
            depth: 1,
            threads: 1,
            warmup: Duration::ZERO,
            until: Until::OpsWithin(keys, FIRST_WRITES_PATIENCE),
            rate: None,
            seed: 1,
        };
        let outcome = self.drive(&cluster, Some(Level::PersistMajority), &load)?;
        if outcome.tally.ops < keys {
            bail!("of the first {keys} durable writes {} succeeded: {:?}", outcome.tally.ops, outcome.tally.errors);
        }
        self.say(&format!("{keys} first durable writes took {:.1} s", outcome.elapsed.as_secs_f64()));
        Ok(cluster)
    }

    /// An observer of a server.
    fn observe(&self, server: &Server) -> Result<Observer> {
        Observer::new(&server.target, &server.target.prepare(&server.identity, None)?, server.dir())
    }

    /// Waits until what a server was given is in the vBuckets' files. False: it was not after a minute.
    fn await_filed(&self, observer: &Observer) -> Result<bool> {
        let began = Instant::now();
        while observer.sum("unfiled_items").is_some_and(|items| items > 0) {
            self.check_stop()?;
            if began.elapsed() > FILING_PATIENCE {
                return Ok(false);
            }
            thread::sleep(LOOK);
        }
        Ok(true)
    }

    fn say(&self, what: &str) {
        eprintln!("{what}");
    }
}

impl Experiment {
    pub fn run(&self, stop: &AtomicBool) -> Result<()> {
        let (name, common) = match self {
            Experiment::Peers(e) => ("peers", &e.common),
            Experiment::Connections(e) => ("connections", &e.common),
            Experiment::Wakeups(e) => ("wakeups", &e.common),
            Experiment::Neighbours(e) => ("neighbours", &e.common),
            Experiment::Idle(e) => ("idle", &e.common),
            Experiment::FileCache(e) => ("file-cache", &e.common),
            Experiment::CompactionSync(e) => ("compaction-sync", &e.common),
            Experiment::Vbuckets(e) => ("vbuckets", &e.common),
            Experiment::Overwrite(e) => ("overwrite", &e.common),
            Experiment::Memory(e) => ("memory", &e.common),
        };
        if let Err(error) = env::os::raise_fd_limit() {
            eprintln!("cannot raise the limit of open files: {error}");
        }
        let scratch = machine::scratch(common.dir.as_deref())?;
        let fdatasync = machine::probe_sync(scratch.path(), if common.quick { 500 } else { 3000 })?;
        let mut bench = Bench { stop, scratch, rows: Rows::default(), versions: BTreeMap::new() };
        let story = match self {
            Experiment::Peers(e) => e.run(&mut bench)?,
            Experiment::Connections(e) => e.run(&mut bench)?,
            Experiment::Wakeups(e) => e.run(&mut bench)?,
            Experiment::Neighbours(e) => e.run(&mut bench)?,
            Experiment::Idle(e) => e.run(&mut bench)?,
            Experiment::FileCache(e) => e.run(&mut bench)?,
            Experiment::CompactionSync(e) => e.run(&mut bench)?,
            Experiment::Vbuckets(e) => e.run(&mut bench)?,
            Experiment::Overwrite(e) => e.run(&mut bench)?,
            Experiment::Memory(e) => e.run(&mut bench)?,
        };
        let mut machine = machine::describe(bench.scratch.path());
        machine["versions"] = json!(bench.versions);
        let rows = bench.rows.medians();
        if common.json {
            let mut object = report::object(name, machine, &fdatasync, rows);
            object.insert("quick".into(), json!(common.quick));
            return report::print(&format!("{}\n", Value::from(object)));
        }
        let mut text = format!(
            "{name}: {} cores ({}), {} MiB, Linux {}, {} on {}\nfdatasync of 512 B, pre-zeroed: p50 {}, p99 {}\n",
            machine["cores"],
            machine["cpu"].as_str().unwrap_or_default(),
            machine["mem_mb"],
            machine["kernel"].as_str().unwrap_or_default(),
            machine["fs"].as_str().unwrap_or_default(),
            bench.scratch.path().parent().unwrap_or(Path::new("/")).display(),
            crate::tally::show_us(fdatasync.percentile_us(50.0)),
            crate::tally::show_us(fdatasync.percentile_us(99.0)),
        );
        for (server, version) in &bench.versions {
            text += &format!("{server}: {version}\n");
        }
        text += &format!(
            "{} round(s){}\n\n",
            common.rounds(),
            if common.quick { ", --quick: good for a look only" } else { "" }
        );
        text += &report::table(&rows, story.columns);
        let ratios: String = story.ratios.iter().filter_map(|ratio| ratio.say(&rows)).collect();
        if !ratios.is_empty() {
            text += &format!("\n{ratios}");
        }
        report::print(&text)
    }
}

/// Rows by name, one for each round.
#[derive(Default)]
struct Rows(Vec<Vec<Row>>);

impl Rows {
    fn push(&mut self, row: Row) {
        match self.0.iter_mut().find(|same| same[0]["name"] == row["name"]) {
            Some(same) => same.push(row),
            None => self.0.push(vec![row]),
        }
    }

    fn skip(&mut self, name: &str, reason: &str) {
        eprintln!("{name}: skipped, {reason}");
        self.push(report::skipped(name, reason));
    }

    /// One row a name: each number the median over the rounds, but for errors and the like, which are summed. A row
    /// that was skipped in one round is told by the others.
    fn medians(self) -> Vec<Row> {
        const SUMS: &[&str] = &[
            "errors",
            "refused",
            "misses",
            "connections_lost",
            "unfinished",
            "close_wait",
            "lost",
            "turned_away",
            "above_10ms",
            "above_100ms",
            "above_1s",
        ];
        let median_of = |rounds: Vec<Row>| {
            let measured: Vec<&Row> = rounds.iter().filter(|row| !row.contains_key("skipped")).collect();
            let Some(first) = measured.first() else { return rounds[0].clone() };
            let mut row = Row::new();
            for (field, value) in first.iter() {
                let mut numbers: Vec<f64> =
                    measured.iter().filter_map(|row| row.get(field).and_then(Value::as_f64)).collect();
                numbers.sort_by(f64::total_cmp);
                let value = match value {
                    Value::Number(_) if SUMS.contains(&&**field) => number(numbers.iter().sum()),
                    // The worse of the two in the middle would be the upper one for times, the lower for rates: take
                    // the lower one always and say so by having an odd number of rounds by default.
                    Value::Number(_) => number(numbers[(numbers.len() - 1) / 2]),
                    other => other.clone(),
                };
                row.insert(field.clone(), value);
            }
            for other in &measured[1..] {
                for (field, value) in other.iter() {
                    row.entry(field.clone()).or_insert_with(|| value.clone());
                }
            }
            if measured.len() > 1 {
                row.insert("rounds".into(), json!(measured.len()));
            }
            row
        };
        self.0.into_iter().map(median_of).collect()
    }
}

/// Whole numbers stay whole.
fn number(n: f64) -> Value {
    if n.fract() == 0.0 && n.abs() < 1e15 { json!(n as i64) } else { json!(n) }
}

/// How the rows are shown.
struct Story {
    columns: &'static [Column],
    /// Told beneath the table.
    ratios: Vec<Ratio>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_become_medians_and_errors_sums() {
        let mut rows = Rows::default();
        for (ops, errors) in [(10.5, 1), (30.5, 0), (20.5, 2)] {
            let fields = [("name", json!("a")), ("ops_per_s", json!(ops)), ("errors", json!(errors))];
            rows.push(fields.into_iter().map(|(name, value)| (name.to_owned(), value)).collect());
        }
        rows.skip("b", "not installed");
        let rows = rows.medians();
        assert_eq!(
            (&rows[0]["ops_per_s"], &rows[0]["errors"], &rows[0]["rounds"]),
            (&json!(20.5), &json!(3), &json!(3))
        );
        assert_eq!(rows[1]["skipped"], "not installed");
    }
}
