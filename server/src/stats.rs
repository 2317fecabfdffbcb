//! Statistics of the process, beside those of a bucket: what STAT and `/metrics` say of time, memory and the scheduler.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use frontend::StatProvider;
use limits::Ledger;
use metrics::{Family, Kind, Registry, Snapshot, Source, Value, Visit};
use scheduler::Pools;
use serde_json::{Value as Json, json};

use crate::reload::InEffect;

/// Of vBuckets with one trouble so many are named.
const HOLDERS_MAX: usize = 5;

/// The groups that the process answers.
pub struct Process {
    registry: Arc<Registry>,
    seen: Seen,
}

/// What they are read from.
pub struct Seen {
    pub pools: Arc<Pools>,
    pub ledger: Arc<Ledger>,
    pub in_effect: Arc<InEffect>,
    pub engine: Arc<engine::Engine>,
    pub streams: Arc<replication::Registry>,
    pub node_uuid: String,
    pub began: Instant,
}

impl Process {
    pub fn new(seen: Seen) -> Process {
        let mut registry = Registry::new();
        registry.add(frontend::METRICS);
        registry.add(engine::METRICS);
        registry.add(replication::METRICS);
        registry.add(persist::stats::METRICS);
        registry.add(persist::LOG_METRICS);
        registry.add(crate::reload::METRICS);
        seen.pools.register(&mut registry);
        registry.add(&seen.ledger.families());
        registry.add(&process_families(seen.began));
        registry.add(&bucket_families(&seen.engine));
        registry.add(&stream_families(&seen.engine, &seen.streams));
        registry.assert_every_stat_name_is_unique();
        Process { registry: Arc::new(registry), seen }
    }

    pub fn registry(&self) -> Arc<Registry> {
        Arc::clone(&self.registry)
    }

    fn general(&self, emit: &mut dyn FnMut(&str, &str)) {
        emit("rss", &resident_bytes().to_string());
        emit("cpu_us", &cpu_time().as_micros().to_string());
        emit("start_age_ms", &self.seen.began.elapsed().as_millis().to_string());
    }

    /// One entry a histogram, as JSON: see [`to_json`].
    fn timings(&self, wanted: &str, bucket: Option<&str>, emit: &mut dyn FnMut(&str, &str)) {
        for family in self.registry.families().iter().filter(|family| family.kind() == Kind::Timings) {
            family.walk(&mut |labels, value| {
                let Value::Timings(snapshot) = value else { return };
                let elsewhere =
                    |(name, of): &(&str, &str)| *name == "bucket" && !of.is_empty() && bucket.is_some_and(|b| b != *of);
                if snapshot.count() == 0 || labels.iter().any(elsewhere) {
                    return;
                }
                let labels: Vec<&str> =
                    labels.iter().filter(|(name, _)| *name != "bucket").map(|(_, value)| *value).collect();
                let name = [&[family.name()], &labels[..]].concat().join(" ");
                if name.to_ascii_lowercase().contains(&wanted.to_ascii_lowercase()) {
                    emit(&name, &to_json(&snapshot).to_string());
                }
            });
        }
    }

    fn scheduler(&self, emit: &mut dyn FnMut(&str, &str)) {
        let stats = self.seen.pools.stats();
        for pool in &stats.pools {
            let name = pool.pool.name();
            let line = json!({ "threads": pool.threads, "running": pool.running, "ready": pool.ready, "wakeups": pool.wakeups });
            emit(&format!("pool {name}"), &line.to_string());
        }
        for task in &stats.tasks {
            let (wait, run) = (task.wait.snapshot(), task.run.snapshot());
            let line = json!({
                "runs": task.runs.get(), "wakes": task.wakes.get(), "overruns": task.overruns.get(),
                "wait": summary(&wait), "run": summary(&run),
            });
            emit(&format!("task {} {}", task.pool.name(), task.name), &line.to_string());
        }
        emit("timer_wakeups", &stats.timer_wakeups.to_string());
    }

    /// A line for each compaction that runs, and what slows them.
    fn compaction(&self, emit: &mut dyn FnMut(&str, &str)) {
        let store = self.seen.engine.store();
        let (running, queued) = store.compactions();
        for one in &running {
            let line = json!({
                "phase": one.phase.name(), "percent": one.percent(), "bytes": one.bytes_done, "bytes_total": one.bytes_total,
                "bytes_written": one.bytes_written, "bytes_per_s": one.bytes_per_s,
                "left_s": one.left.map(|left| left.as_secs()), "elapsed_s": one.elapsed.as_secs(), "pace": one.held.name(),
            });
            emit(&format!("vb {}/{}", one.bucket, one.vb), &line.to_string());
        }
        let reading = store.governor().reading();
        let rate = reading.bytes_per_s.map_or("unlimited".to_owned(), |rate| rate.to_string());
        emit("running", &running.len().to_string());
        emit("queued", &queued.to_string());
        emit("exclusive", &summary(&persist::stats::COMPACTION_FINISHES.snapshot()).to_string());
        emit("pace", reading.held.name());
        emit("background_bytes_per_s", &rate);
        emit("background_floor_bytes_per_s", &reading.floor_bytes_per_s.to_string());
    }

    /// The configuration, as memcached's tools call it, and what they look for there under names they know.
    fn settings(&self, emit: &mut dyn FnMut(&str, &str)) {
        self.seen.in_effect.emit(emit);
        let classes = self.seen.ledger.stats().classes;
        let clients = classes.iter().find(|class| class.class == limits::Class::Connections);
        emit("maxconns", &clients.map_or(0, |class| class.capacity).to_string());
        emit("verbosity", "0");
        emit("binding_protocol", "binary");
        emit("item_size_max", &engine::VALUE_BYTES_MAX.to_string());
        emit("cas_enabled", "yes");
    }

    /// The file cache, the log, and what goes to the disk for what was accepted.
    fn persist(&self, emit: &mut dyn FnMut(&str, &str)) {
        let mut number = |name: &str, value: &dyn std::fmt::Display| emit(name, &value.to_string());
        let mut counts = BTreeMap::new();
        for family in persist::stats::METRICS.iter().chain(persist::LOG_METRICS) {
            family.walk(&mut |_, value| match value {
                Value::Counter(n) => drop(counts.insert(family.name(), n)),
                Value::Gauge(n) => number(family.name(), &n),
                Value::Timings(_) => {}
            });
        }
        counts.iter().for_each(|(name, n)| number(name, n));
        let of = |name| counts.get(name).copied().unwrap_or(0) as f64;
        let written = of("log_disk_bytes") + of("file_bytes_written");
        number("write_amplification", &format!("{:.2}", written / of("accepted_bytes").max(1.0)));
        let store = self.seen.engine.store();
        number("file_cache_files_max", &store.files().stats().files_max);
        number("disk_full", &store.disk_full());
        number("unfiled_items", &store.buckets().iter().map(|bucket| bucket.pending()).sum::<u64>());
        number("unfiled_bytes", &store.buckets().iter().map(|bucket| bucket.unfiled_bytes()).sum::<u64>());
        number("log", &if store.log_stats().is_some() { "on" } else { "off" });
        let Some(log) = store.log_stats() else { return };
        number("log_way", &log.way);
        number("log_way_medians", &log.way_medians);
        number("log_syncs", &log.syncs);
        number("log_records_a_sync", &format!("{:.1}", log.records as f64 / log.syncs.max(1) as f64));
        number("log_waiting_bytes", &log.waiting_bytes);
        number("log_segments", &log.segments);
        number("log_bytes_in_use", &log.bytes_in_use);
        number("log_bytes_max", &log.bytes_max);
        let held_by = store.buckets().into_iter().flat_map(|bucket| {
            let name = bucket.spec().name.clone();
            bucket.held_by_log().into_iter().map(move |vb| format!("{name}/{vb}"))
        });
        number("log_held_by", &held_by.take(HOLDERS_MAX).collect::<Vec<_>>().join(" "));
        number("log_full_why", &log.full.as_deref().unwrap_or(""));
        number("log_poisoned_why", &log.poisoned.as_deref().unwrap_or(""));
    }

    /// The sum, then a line a class.
    fn limits(&self, emit: &mut dyn FnMut(&str, &str)) {
        let stats = self.seen.ledger.stats();
        emit("sum", &stats.plan.to_string());
        for class in &stats.classes {
            let line = json!({
                "capacity": class.capacity, "out": class.out, "high_water": class.high_water, "refusals": class.refusals,
            });
            emit(&format!("class {}", class.class.name()), &line.to_string());
        }
        emit("exhausted", &stats.exhausted.to_string());
        emit("given_back", &stats.given_back.to_string());
    }
}

impl StatProvider for Process {
    fn stats(&self, group: &str, arguments: &str, bucket: Option<&str>, emit: &mut dyn FnMut(&str, &str)) -> bool {
        match group {
            "" => self.general(emit),
            "timings" => self.timings(arguments, bucket, emit),
            "scheduler" | "tasks" => self.scheduler(emit),
            "limits" => self.limits(emit),
            "compaction" => self.compaction(emit),
            "config" => self.seen.in_effect.emit(emit),
            "settings" => self.settings(emit),
            "persist" => self.persist(emit),
            "memory" => crate::memory::emit(&self.seen.engine, emit),
            "uuid" => emit("uuid", &self.seen.node_uuid),
            _ => return false,
        }
        true
    }
}

fn summary(snapshot: &Snapshot) -> Json {
    let us = |duration: Duration| duration.as_nanos() as f64 / 1000.0;
    json!({
        "count": snapshot.count(), "mean_us": us(snapshot.mean()), "p50_us": us(snapshot.percentile(50.0)),
        "p99_us": us(snapshot.percentile(99.0)), "p999_us": us(snapshot.percentile(99.9)), "max_us": us(snapshot.max()),
    })
}

/// A histogram for a reader in another process: its summary, its sum, and `[from_us, count]` of each bucket.
fn to_json(snapshot: &Snapshot) -> Json {
    let mut json = summary(snapshot);
    json["sum_us"] = json!(snapshot.sum().as_micros() as u64);
    let buckets: Vec<_> = snapshot.buckets().map(|(from, _, n)| json!([from.as_micros() as u64, n])).collect();
    json["buckets"] = buckets.into();
    json
}

/// What [`to_json`] wrote. `None`: that is something else.
pub fn from_json(json: &Json) -> Option<Snapshot> {
    let buckets: Vec<(Duration, u64)> = json["buckets"]
        .as_array()?
        .iter()
        .map(|bucket| Some((Duration::from_micros(bucket[0].as_u64()?), bucket[1].as_u64()?)))
        .collect::<Option<_>>()?;
    let sum = Duration::from_micros(json["sum_us"].as_u64()?);
    let max = Duration::from_nanos((json["max_us"].as_f64()? * 1000.0) as u64);
    Some(Snapshot::from_buckets(buckets.into_iter(), sum, max))
}

fn resident_bytes() -> u64 {
    env::os::resident_bytes().unwrap_or(0)
}

fn cpu_time() -> Duration {
    env::os::cpu_time().unwrap_or_default()
}

/// A family whose numbers are computed when asked.
struct Computed<F> {
    kind: Kind,
    walk: F,
}

impl<F: Fn(Visit<'_>) + Send + Sync> Source for Computed<F> {
    fn kind(&self) -> Kind {
        self.kind
    }
    fn walk(&self, visit: Visit<'_>) {
        (self.walk)(visit);
    }
}

fn computed(
    name: &'static str,
    help: &'static str,
    kind: Kind,
    walk: impl Fn(Visit<'_>) + Send + Sync + 'static,
) -> Family {
    Family::shared(name, help, Arc::new(Computed { kind, walk }))
}

fn process_families(began: Instant) -> [Family; 3] {
    [
        computed("process_resident_bytes", "Memory of the process that is in RAM.", Kind::Gauge, |visit| {
            visit(&[], Value::Gauge(resident_bytes() as i64));
        }),
        computed("process_cpu_milliseconds", "Processor time used, user and system.", Kind::Counter, |visit| {
            visit(&[], Value::Counter(cpu_time().as_millis() as u64));
        }),
        computed("process_age_seconds", "Since the process started.", Kind::Gauge, move |visit| {
            visit(&[], Value::Gauge(began.elapsed().as_secs() as i64));
        }),
    ]
}

/// Numbers of each bucket. The engine is held weakly: statistics do not keep it alive.
fn bucket_families(engine: &Arc<engine::Engine>) -> Vec<Family> {
    type Read = fn(&engine::Bucket) -> i64;
    let rows: [(&'static str, &'static str, Read); 17] = [
        ("bucket_items", "Live documents.", |b| b.items() as i64),
        ("bucket_memory_used_bytes", "Memory charged to the bucket.", |b| b.memory_used() as i64),
        ("bucket_quota_bytes", "Memory the bucket may use.", |b| b.quota_bytes() as i64),
        ("bucket_pending_items", "Changes that are in no file yet.", |b| b.store().pending() as i64),
        ("bucket_file_bytes", "Size of the bucket's files at their last commits.", |b| {
            b.store().stats().file_bytes as i64
        }),
        ("bucket_commits", "Commits of vBucket files since the start.", |b| b.store().stats().commits as i64),
        ("bucket_items_written", "Changes written to files since the start.", |b| {
            b.store().stats().items_written as i64
        }),
        ("bucket_poisoned_vbuckets", "vBuckets that are not written any more because a sync failed.", |b| {
            b.store().stats().poisoned.len() as i64
        }),
        ("bucket_log_held_vbuckets", "vBuckets not written any more, of which only the commit log has all.", |b| {
            b.store().held_by_log().len() as i64
        }),
        (
            "bucket_degraded",
            "1: no document is served until other nodes have said that this one is still to be asked.",
            |b| i64::from(b.is_held()),
        ),
        ("bucket_unloadable_vbuckets", "vBuckets whose file could not be read whole.", |b| {
            b.warm_up_progress().failed as i64
        }),
        ("bucket_warm_up_vbuckets", "vBuckets with a file, to be loaded after the start.", |b| {
            b.warm_up_progress().vbuckets_total as i64
        }),
        ("bucket_warm_up_vbuckets_loaded", "vBuckets loaded since the start.", |b| {
            b.warm_up_progress().vbuckets_loaded as i64
        }),
        ("bucket_sync_writes_in_flight", "Durable writes that wait for their nodes.", |b| {
            b.sync_writes_under_way().sync_writes as i64
        }),
        ("bucket_sync_write_oldest_milliseconds", "Age of the oldest of them.", |b| {
            b.sync_writes_under_way().oldest_ms as i64
        }),
        ("bucket_replica_acks_behind_max", "Most seqnos that a replica's word is behind the last of them.", |b| {
            b.sync_writes_under_way().acks_behind as i64
        }),
        ("bucket_warm_up_keys", "Documents read since the start by loading.", |b| b.warm_up_progress().keys as i64),
    ];
    rows.into_iter()
        .map(|(name, help, read)| {
            let engine = Arc::downgrade(engine);
            computed(name, help, Kind::Gauge, move |visit| {
                for bucket in engine.upgrade().iter().flat_map(|engine| engine.list()) {
                    visit(&[("bucket", bucket.name())], Value::Gauge(read(&bucket)));
                }
            })
        })
        .collect()
}

/// How far those are behind who are sent a bucket's changes.
fn stream_families(engine: &Arc<engine::Engine>, streams: &Arc<replication::Registry>) -> Vec<Family> {
    type Read = fn(&replication::Totals) -> u64;
    let rows: [(&'static str, &'static str, Read); 4] = [
        ("bucket_dcp_streams", "Streams of the bucket's changes that are open.", |t| t.streams),
        ("bucket_dcp_items_remaining", "Seqnos that consumers are behind, all streams together.", |t| t.items_left),
        ("bucket_dcp_backfill_remaining", "Entries of files that streams have yet to read.", |t| t.backfill_left),
        ("bucket_dcp_unacked_bytes", "Bytes sent to consumers that they have not acknowledged.", |t| t.unacked_bytes),
    ];
    let totals = rows.into_iter().map(|(name, help, read)| {
        let (engine, streams) = (Arc::downgrade(engine), Arc::clone(streams));
        computed(name, help, Kind::Gauge, move |visit| {
            for bucket in engine.upgrade().iter().flat_map(|engine| engine.list()) {
                visit(&[("bucket", bucket.name())], Value::Gauge(read(&streams.totals(&bucket)) as i64));
            }
        })
    });
    let (engine, streams) = (Arc::downgrade(engine), Arc::clone(streams));
    let lag = computed(
        "bucket_replica_lag",
        "Seqnos that a node's replicas have yet to be sent, of what is active here.",
        Kind::Gauge,
        move |visit| {
            for bucket in engine.upgrade().iter().flat_map(|engine| engine.list()) {
                for (node, behind) in streams.replica_lag(&bucket) {
                    visit(&[("bucket", bucket.name()), ("node", &node)], Value::Gauge(behind as i64));
                }
            }
        },
    );
    totals.chain([lag]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_histogram_arrives_in_the_other_process_as_it_was() {
        let timings = metrics::Timings::new();
        [3, 70, 70, 1500, 2_000_000].into_iter().for_each(|us| timings.record(Duration::from_micros(us)));
        let snapshot = timings.snapshot();
        assert_eq!(from_json(&to_json(&snapshot)).unwrap(), snapshot);
    }
}
