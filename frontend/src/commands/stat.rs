//! STAT: one reply frame an entry, then an empty one. All of them are written in one go, so nothing can come between.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use wire::Status;
use wire::kv::Stat;

use super::{Context, Refusal};
use crate::Shared;
use crate::connection::Selected;
use crate::counts;

type Lines = Vec<(String, String)>;

impl Context<'_> {
    pub(super) fn stat(&mut self, stat: &Stat<'_>) -> Result<(), Refusal> {
        let group = String::from_utf8_lossy(stat.group);
        let group = group.trim();
        let lines = match group {
            "" => self.general(),
            "reset" => {
                self.shared.stats.reset();
                Lines::new()
            }
            "connections" => connections(self.shared),
            "dcp" => streams(self.shared, self.bucket()?),
            _ => self.group(group)?,
        };
        for (name, value) in &lines {
            let mut reply = self.blank(Status::Success);
            // Names and values are ours; the cut keeps even a foolish one from breaking the frame.
            reply.key = &name.as_bytes()[..name.len().min(250)];
            reply.value = (value.as_bytes(), &[]);
            reply.server_duration = self.duration_code(self.took());
            reply.encode(self.out);
        }
        self.done()
    }

    /// A group of the bucket, or one that somebody else knows, or both.
    fn group(&self, group: &str) -> Result<Lines, Refusal> {
        let bucket = self.session.selected.as_ref();
        let of_bucket = bucket.and_then(|selected| selected.bucket.stats(group));
        let (name, arguments) = group.split_once(' ').unwrap_or((group, ""));
        let mut lines = Lines::new();
        let mut emit = |name: &str, value: &str| lines.push((name.to_owned(), value.to_owned()));
        let known = self.shared.stats.stats(name, arguments.trim(), bucket.map(|s| &*s.shape.name), &mut emit);
        let known = known || of_bucket.is_some();
        lines.extend(of_bucket.unwrap_or_default());
        match (known, bucket) {
            (true, _) => Ok(lines),
            (false, Some(_)) => Err((Status::KeyEnoent, format!("there is no group of statistics {name:?}"))),
            (false, None) => Err((Status::NoBucket, "statistics of a bucket need one selected".to_owned())),
        }
    }

    fn general(&self) -> Lines {
        let shared = self.shared;
        let mut lines = Lines::new();
        let mut put = |name: &str, value: String| lines.push((name.to_owned(), value));
        put("pid", std::process::id().to_string());
        put("uptime", (shared.now() - shared.started).as_secs().to_string());
        put("time", shared.env.clock.unix_s().to_string());
        put("version", shared.options.version.clone());
        put("pointer_size", usize::BITS.to_string());
        put("threads", shared.mailboxes.len().to_string());
        put("curr_connections", shared.table.active().to_string());
        put("max_connections", shared.connections_max().to_string());
        put("unauthenticated_connections", shared.strangers.count().to_string());
        put("unauthenticated_connections_max", shared.strangers.share().to_string());
        put("bytes_unsent", shared.unsent_len.load(Relaxed).to_string());
        for (name, counter) in [
            ("total_connections", &counts::TOTAL_CONNECTIONS),
            ("auth_errors", &counts::AUTH_ERRORS),
            ("bytes_read", &counts::BYTES_READ),
            ("bytes_written", &counts::BYTES_WRITTEN),
            ("cmd_get", &counts::CMD_GET),
            ("cmd_set", &counts::CMD_SET),
            ("get_hits", &counts::GET_HITS),
            ("get_misses", &counts::GET_MISSES),
        ] {
            put(name, counter.get().to_string());
        }
        let bucket = self.session.selected.as_ref();
        lines.extend(bucket.and_then(|selected| selected.bucket.stats("")).unwrap_or_default());
        let mut emit = |name: &str, value: &str| lines.push((name.to_owned(), value.to_owned()));
        shared.stats.stats("", "", bucket.map(|s| &*s.shape.name), &mut emit);
        lines
    }
}

/// One line a connection: its id and what is known of it, as JSON.
fn connections(shared: &Shared) -> Lines {
    let now = shared.now();
    let mut lines = Lines::new();
    shared.table.walk(|info| {
        let names = info.names.lock().clone();
        let idle = now.saturating_sub(Duration::from_millis(info.last_request.load(Relaxed)));
        let line = serde_json::json!({
            "peer": info.peer.to_string(),
            "user": names.user.as_deref(),
            "bucket": names.bucket,
            "agent": names.agent,
            "age_s": now.saturating_sub(info.since).as_secs(),
            "idle_s": idle.as_secs(),
            "requests": info.requests.load(Relaxed),
            "in_flight": info.in_flight.load(Relaxed),
            "in_reserve": info.in_reserve.load(Relaxed),
            "bytes_queued": info.bytes_queued.load(Relaxed),
        });
        lines.push((format!("{}.{}", info.slot.index, info.slot.generation), line.to_string()));
    });
    lines
}

/// Each producer of the bucket and each of its streams: how far it is, and how far it could be.
fn streams(shared: &Shared, selected: &Selected) -> Lines {
    let mut lines = Lines::new();
    let producers = shared.streams.of_bucket(&selected.shape.name);
    for producer in producers {
        let mut put = |name: &str, value: String| lines.push((format!("{}:{name}", producer.name), value));
        put("bytes_sent", producer.bytes_sent().to_string());
        put("unacked_bytes", producer.unacked_bytes().to_string());
        put("max_unacked_bytes", producer.room_bytes().to_string());
        for stream in producer.streams() {
            let mut put = |name: &str, value: String| put(&format!("stream_{}_{name}", stream.vb), value);
            put("state", stream.state().name().to_owned());
            put("start_seqno", stream.start.to_string());
            put("end_seqno", stream.end.to_string());
            put("last_sent_seqno", stream.sent().to_string());
            put("items_sent", stream.items_sent().to_string());
            put("items_remaining", stream.items_left(&selected.bucket).to_string());
            put("backfills", stream.backfills().to_string());
            put("backfill_remaining", stream.backfill_left().to_string());
            put("acked_prepare_seqno", stream.acked().to_string());
        }
    }
    for (peer, link) in shared.replicas.of_bucket(&selected.shape.name) {
        let mut put = |name: &str, value: String| lines.push((format!("replicas of {peer}:{name}"), value));
        put("connected", link.is_connected.load(Relaxed).to_string());
        put("connects", link.connects.load(Relaxed).to_string());
        put("vbuckets", link.wanted.load(Relaxed).to_string());
        put("following", link.consumer.following.load(Relaxed).to_string());
        put("stream_restarts", link.consumer.restarts.load(Relaxed).to_string());
        put("items_received", link.consumer.items.load(Relaxed).to_string());
        put("bytes_received", link.consumer.bytes.load(Relaxed).to_string());
        put("trouble", link.trouble.lock().clone());
    }
    let mut put = |name: &str, value: u64| lines.push((name.to_owned(), value.to_string()));
    let totals = shared.streams.totals(&selected.bucket);
    put("ep_dcp_producer_count", totals.producers);
    put("ep_dcp_stream_count", totals.streams);
    put("ep_dcp_items_remaining", totals.items_left);
    put("ep_dcp_backfill_remaining", totals.backfill_left);
    put("ep_dcp_unacked_bytes", totals.unacked_bytes);
    put("ep_dcp_total_bytes", totals.bytes_sent);
    lines
}
