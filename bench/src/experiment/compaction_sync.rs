//! What durable writes feel of four compactions: none beside them, synced seldom, synced often, and held to what the
//! writes feel.

use std::collections::BTreeMap;
use std::net::TcpStream;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::Args;
use metrics::Snapshot;
use serde_json::{Value, json};
use types::Level;

use super::{Bench, Common, Story};
use crate::canary::Canary;
use crate::load::{self, Load, Until, Watch};
use crate::protocol::couchbase;
use crate::report::{self, Column, Ratio, Row};
use crate::servers::Server;
use crate::target::Dialect;
use crate::workload::{Order, Workload};

#[derive(Args, Debug)]
pub struct CompactionSync {
    #[command(flatten)]
    pub(super) common: Common,
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=60_000))]
    clients: u32,
    /// Durable writes a second, begun at their moments whether or not earlier ones are answered
    #[arg(long, value_name = "N", default_value_t = 2000, value_parser = clap::value_parser!(u32).range(1..))]
    rate: u32,
    /// Bytes of a value
    #[arg(long, value_name = "BYTES", default_value_t = 1024)]
    value_size: usize,
    /// Documents before it begins [default: 200000, with --quick 80000]
    #[arg(long, value_name = "N")]
    items: Option<u64>,
    /// vBuckets they are spread over: a power of two up to 1024
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=1024))]
    vbuckets: u32,
    /// What a durable write's sync may take in the row with the governor, in milliseconds
    #[arg(long, value_name = "MS", default_value_t = 2)]
    budget: u32,
}

const COMPACTIONS: u32 = 4;
/// One vBucket, however slow.
const PATIENCE: Duration = Duration::from_secs(600);

/// Each row compacts everything so often with nobody else there.
const PASSES_IDLE: usize = 5;

/// Row, sync interval, whether compactions are paced, whether anything is compacted beside the load. All else is the same in
/// all rows; the filing of the log is paced in each.
const CASES: &[(&str, &str, bool, bool)] = &[
    ("none", "16MiB", false, false),
    ("16MiB", "16MiB", false, true),
    ("1MiB", "1MiB", false, true),
    ("governor", "1MiB", true, true),
];

const COLUMNS: &[Column] = &[
    Column("writes/s", "ops_per_s", report::whole),
    Column("p50", "p50_us", report::us),
    Column("p99", "p99_us", report::us),
    Column("p99.9", "p999_us", report::us),
    Column("p99.99", "p9999_us", report::us),
    Column("max", "max_us", report::us),
    Column("compacted", "compactions", report::whole),
    Column("compaction MB/s", "compaction_mb_per_s", report::tenth),
    Column("wall s, idle", "compaction_wall_s", report::tenth),
    Column("held p99", "exclusive_p99_us", report::us),
    Column("held max", "exclusive_max_us", report::us),
    Column("flush waits p99.9", "flush_wait_p999_us", report::us),
    Column("log waits p99.9", "log_wait_p999_us", report::us),
    Column("log sync p99.9", "log_sync_p999_us", report::us),
    Column("machine late p99.9", "machine_late_p999_us", report::us),
    Column("max", "machine_late_max_us", report::us),
    Column("files MB", "files_mb", report::whole),
    Column("errors", "errors", report::whole),
];

impl CompactionSync {
    pub(super) fn run(&self, bench: &mut Bench<'_>) -> Result<Story> {
        let time = self.common.seconds(30.0, 6.0)?;
        for round in 1..=self.common.rounds() {
            for case @ (name, ..) in CASES {
                bench.check_stop()?;
                bench.say(&format!("round {round}: {name}"));
                match self.measure(bench, case, time) {
                    Ok(row) => bench.rows.push(row),
                    Err(error) => bench.rows.skip(name, &format!("{error:#}")),
                }
            }
        }
        let ratios = vec![
            Ratio::new("p999_us", "governor", "none"),
            Ratio::new("p999_us", "1MiB", "16MiB"),
            Ratio::new("compaction_wall_s", "1MiB", "16MiB"),
            Ratio::new("compaction_wall_s", "governor", "16MiB"),
            Ratio::new("flush_wait_p999_us", "governor", "none"),
            Ratio::new("flush_wait_p999_us", "1MiB", "none"),
            Ratio::new("log_wait_p999_us", "governor", "none"),
            Ratio::new("log_wait_p999_us", "1MiB", "none"),
            Ratio::new("log_sync_p999_us", "governor", "none"),
        ];
        Ok(Story { columns: COLUMNS, ratios })
    }

    fn measure(&self, bench: &mut Bench<'_>, case: &(&str, &str, bool, bool), time: Duration) -> Result<Row> {
        let (name, sync_every, is_paced, compacts) = *case;
        let dir = bench.lasting_dir()?;
        let paced = if is_paced { "on" } else { "off" };
        let settings = [
            format!("bucket.vbuckets={}", self.vbuckets),
            format!("compaction.sync_every={sync_every}"),
            format!("compaction.limit={COMPACTIONS}"),
            // Only what is asked for, so that each row has as much to do.
            "compaction.fragmentation_percent=0".to_owned(),
            format!("compaction.paced={paced}"),
            format!("disk.latency_budget_ms={}", self.budget),
            "persist.filing_age_s_max=1".to_owned(),
        ];
        let settee = self.common.settee()?;
        let server = Server::settee(&settee, &dir, &settings)?;
        bench.versions.insert("settee".to_owned(), server.version.clone());
        self.fill(bench, &server)?;

        let beside = Beside { server: &server, vbuckets: u64::from(self.vbuckets), settee: &settee };
        beside.settle()?;
        let mut row = Row::new();
        let stop = AtomicBool::new(false);
        if compacts {
            let mut walls = Vec::new();
            for _ in 0..PASSES_IDLE {
                let began = Instant::now();
                beside.compact_all(Some(u64::from(self.vbuckets)), &stop)?;
                walls.push(began.elapsed().as_secs_f64());
            }
            walls.sort_by(f64::total_cmp);
            row.insert("compaction_wall_s".into(), json!(walls[PASSES_IDLE / 2]));
        }
        let (before, timed_before) = (beside.stats("kvstore")?, beside.stats("timings")?);
        let began = Instant::now();
        let outcome = thread::scope(|scope| -> Result<load::Outcome> {
            let compacting = compacts.then(|| scope.spawn(|| beside.compact_all(None, &stop)));
            let canary = Canary::start();
            let outcome = self.load(bench, &server, time);
            let late = canary.stop();
            row.insert("machine_late_p999_us".into(), json!(late.percentile_us(99.9)));
            row.insert("machine_late_max_us".into(), json!(late.max_us()));
            stop.store(true, Relaxed);
            let compacted = compacting.map_or(Ok(Ok(())), |thread| thread.join());
            compacted.unwrap_or_else(|_| bail!("a thread panicked"))?;
            outcome
        })?;
        let seconds = began.elapsed().as_secs_f64();
        let (after, timed_after) = (beside.stats("kvstore")?, beside.stats("timings")?);
        let timed = |name: &str| since(&timed_before[name], &timed_after[name]).filter(|timed| timed.count() > 0);
        let count = |stats: &Value, name: &str| stats[format!("rw_0:{name}")].as_f64().unwrap_or(0.0);
        row.append(&mut report::row(name, self.clients, &outcome));
        let us = |duration: Duration| json!(duration.as_micros() as u64);
        if let Some(held) = timed("compaction_exclusive_duration") {
            row.insert("exclusive_p50_us".into(), us(held.percentile(50.0)));
            row.insert("exclusive_p99_us".into(), us(held.percentile(99.0)));
            row.insert("exclusive_max_us".into(), us(held.max()));
        }
        for (field, name) in [
            ("flush_wait_p999_us", "scheduler_task_wait writer flush"),
            ("log_wait_p999_us", "log_wait_duration"),
            ("log_sync_p999_us", "log_sync_duration"),
        ] {
            if let Some(timed) = timed(name) {
                row.insert(field.into(), us(timed.percentile(99.9)));
            }
        }
        row.insert("files_mb".into(), json!((count(&after, "file_bytes") / 1e6).round()));
        if compacts {
            let compactions = count(&after, "compactions") - count(&before, "compactions");
            let each = count(&after, "live_bytes") / f64::from(self.vbuckets);
            row.insert("compactions".into(), json!(compactions));
            row.insert("compaction_mb_per_s".into(), json!(compactions * each / 1e6 / seconds));
        }
        Ok(row)
    }

    /// Every document once, and half of them again, so that the files have garbage.
    fn fill(&self, bench: &Bench<'_>, server: &Server) -> Result<()> {
        let items = self.items.unwrap_or(if self.common.quick { 80_000 } else { 200_000 });
        for (order, ops) in [(Order::Sequential, items), (Order::Random, items / 2)] {
            let load = Load {
                workload: Workload { value_bytes: self.value_size, set_pct: 100, keys: items, order },
                clients: 8,
                depth: 16,
                threads: 1,
                warmup: Duration::ZERO,
                until: Until::Ops(ops),
                rate: None,
                seed: 1,
            };
            let dialect = server.target.prepare(&server.identity, None)?;
            let watch = Watch { stop: bench.stop, usage: &|| None, live: false };
            if load::run(&server.target, &dialect, &load, &watch)?.interrupted {
                bail!("interrupted");
            }
        }
        Ok(())
    }

    fn load(&self, bench: &Bench<'_>, server: &Server, time: Duration) -> Result<load::Outcome> {
        let keys = self.items.unwrap_or(if self.common.quick { 80_000 } else { 200_000 });
        let load = Load {
            workload: Workload { value_bytes: self.value_size, set_pct: 100, keys, order: Order::Random },
            clients: self.clients,
            depth: 1,
            threads: 1,
            warmup: Duration::from_secs(2),
            until: Until::For(time),
            rate: Some(f64::from(self.rate)),
            seed: 2,
        };
        let dialect = server.target.prepare(&server.identity, Some(Level::PersistMajority))?;
        let usage = || server.usage();
        let outcome =
            load::run(&server.target, &dialect, &load, &Watch { stop: bench.stop, usage: &usage, live: true })?;
        if outcome.interrupted { bail!("interrupted") } else { Ok(outcome) }
    }
}

/// What was timed between two readings of a histogram. Its longest is known as well as its bucket.
fn since(before: &Value, after: &Value) -> Option<Snapshot> {
    let read = |reading: &Value| -> Option<BTreeMap<u64, u64>> {
        reading["buckets"].as_array()?.iter().map(|bucket| Some((bucket[0].as_u64()?, bucket[1].as_u64()?))).collect()
    };
    let earlier = read(before).unwrap_or_default();
    let later: Vec<(Duration, u64)> = read(after)?
        .into_iter()
        .map(|(from_us, n)| (Duration::from_micros(from_us), n - earlier.get(&from_us).unwrap_or(&0)))
        .filter(|(_, n)| *n > 0)
        .collect();
    let sum = later.iter().map(|(from, n)| from.saturating_mul(*n as u32)).sum();
    let max = later.last().map_or(Duration::ZERO, |(from, _)| *from);
    Some(Snapshot::from_buckets(later.into_iter(), sum, max))
}

/// What goes on beside the load.
struct Beside<'a> {
    server: &'a Server,
    vbuckets: u64,
    settee: &'a std::path::Path,
}

impl Beside<'_> {
    /// Waits until what was written is in the files.
    fn settle(&self) -> Result<()> {
        let began = Instant::now();
        while self.stats("kvstore")?["rw_0:pending_items"].as_u64() != Some(0) {
            if began.elapsed() > PATIENCE {
                bail!("the files did not take what was written within {PATIENCE:?}");
            }
            thread::sleep(Duration::from_millis(100));
        }
        Ok(())
    }

    /// Compacts one vBucket after the other, a few at a time: so many, or until told to stop.
    fn compact_all(&self, count: Option<u64>, stop: &AtomicBool) -> Result<()> {
        let next = AtomicU64::new(0);
        let work = || -> Result<()> {
            let mut stream = self.connect()?;
            loop {
                let n = next.fetch_add(1, Relaxed);
                if stop.load(Relaxed) || count.is_some_and(|count| n >= count) {
                    return Ok(());
                }
                couchbase::compact(&mut stream, (n % self.vbuckets) as u16)?;
            }
        };
        thread::scope(|scope| {
            let threads: Vec<_> = (0..COMPACTIONS).map(|_| scope.spawn(work)).collect();
            threads.into_iter().try_for_each(|thread| thread.join().unwrap_or_else(|_| bail!("a thread panicked")))
        })
    }

    fn connect(&self) -> Result<TcpStream> {
        let mut stream = self.server.target.connect()?;
        let dialect = self.server.target.prepare(&self.server.identity, None)?;
        let Dialect::Couchbase(_) = &dialect else { bail!("only our own servers are compacted") };
        dialect.protocol().open(&mut stream)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        Ok(stream)
    }

    fn stats(&self, group: &str) -> Result<Value> {
        let mut command = Command::new(self.settee);
        command.args(["stats", group, "--json", "--kv", &self.server.target.address]);
        let output = command.env("SETTEE_PASSWORD", &self.server.identity.password).output()?;
        serde_json::from_slice(&output.stdout).with_context(|| String::from_utf8_lossy(&output.stderr).into_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_timed_between_two_readings_is_their_difference() {
        let reading = |buckets: &[(u64, u64)]| json!({ "buckets": buckets });
        let timed = since(&reading(&[(5, 2), (900, 1)]), &reading(&[(5, 2), (12, 3), (900, 2)])).unwrap();
        assert_eq!((timed.count(), timed.max()), (4, Duration::from_micros(900)));
        assert!(timed.percentile(50.0) < Duration::from_micros(20));
        assert_eq!(since(&Value::Null, &reading(&[(5, 2)])).unwrap().count(), 2);
        assert!(since(&Value::Null, &Value::Null).is_none());
    }
}
