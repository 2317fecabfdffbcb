//! Looking in from outside: observe, seqnos, and the groups of the `STAT` command the engine knows.

use std::sync::atomic::{AtomicI64, Ordering::Relaxed};

use types::{Cas, DocKey, Item, Level, Seqno, VbId, VbState, VbUuid, allocated};

use crate::bucket::Bucket;
use crate::expiry;
use crate::hash_table::Counts;
use crate::op::OpError;
use crate::vbucket::VBucket;

/// What `OBSERVE` tells of a key. The discriminants are the wire's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum KeyState {
    NotPersisted = 0x00,
    Persisted = 0x01,
    NotFound = 0x80,
    DeletedNotPersisted = 0x81,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Observed {
    pub state: KeyState,
    pub cas: Cas,
}

/// What `OBSERVE_SEQNO` tells of a vBucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ObserveSeqno {
    pub uuid: VbUuid,
    pub persisted: Seqno,
    pub current: Seqno,
    /// The history asked about, if it is not the current one, and the last seqno it shares with it.
    pub old: Option<(VbUuid, Seqno)>,
}

/// Bytes of memory a bucket holds, the allocator's words included.
#[derive(Clone, Copy, Debug, Default)]
pub struct MemoryParts {
    pub documents: u64,
    pub tables: u64,
    pub key_filters: u64,
    /// Of changes that only the changelogs hold.
    pub changelogs: u64,
    /// Requests that wait for a file, with what they brought.
    pub fetches: u64,
    /// The vBuckets themselves, which are there before the first document. Does not count against the quota.
    pub vbuckets: u64,
}

/// About; its parts are a few small allocations.
const VBUCKET_RECORD_BYTES: usize = 320;

type Lines = Vec<(String, String)>;

/// See [`Bucket::sync_writes_under_way`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UnderWay {
    pub sync_writes: u64,
    /// Age of the oldest, in milliseconds.
    pub oldest_ms: u64,
    /// The most seqnos that a replica's acknowledgement is behind the last one.
    pub acks_behind: u64,
}

impl Bucket {
    /// How far the newest committed version of a key has come. Tombstones already forgotten are not found. Reads the file
    /// on this thread if the key may be only there.
    pub fn observe(&self, vb: VbId, key: DocKey<'_>) -> Result<Observed, OpError> {
        let vb = self.vb(vb)?;
        if !matches!(vb.state(), VbState::Active | VbState::Replica) {
            return Err(OpError::NotMyVbucket);
        }
        let Some(item) = self.peek(vb, key)? else { return Ok(Observed { state: KeyState::NotFound, cas: Cas(0) }) };
        let persisted = item.seqno() <= vb.log.marks.durable();
        let gone = item.is_deleted() || expiry::is_past(item.meta().expiry, || self.env.clock.unix_s());
        let state = match (gone, persisted) {
            (false, false) => KeyState::NotPersisted,
            (false, true) => KeyState::Persisted,
            (true, true) => KeyState::NotFound,
            (true, false) => KeyState::DeletedNotPersisted,
        };
        Ok(Observed { state, cas: if state == KeyState::NotFound { Cas(0) } else { item.meta().cas } })
    }

    /// How far a history of a vBucket has come. `NotFound`: it never had that history.
    pub fn observe_seqno(&self, vb: VbId, uuid: VbUuid) -> Result<ObserveSeqno, OpError> {
        let vb = self.vb(vb)?;
        if !matches!(vb.state(), VbState::Active | VbState::Replica) {
            return Err(OpError::NotMyVbucket);
        }
        let record = vb.log.record();
        let entries = record.failover.newest_first();
        let place = entries.iter().position(|entry| entry.uuid == uuid).ok_or(OpError::NotFound)?;
        // A history ended where the next one began.
        let old = place.checked_sub(1).map(|next| (uuid, entries[next].seqno));
        let (persisted, current) = (vb.log.marks.durable(), vb.log.marks.high());
        Ok(ObserveSeqno { uuid: entries[0].uuid, persisted, current, old })
    }

    /// The high seqno of every vBucket in `state`; `None`: of all but the dead. For those who do not know of sync writes that of
    /// the last change they can see.
    pub fn all_vb_seqnos(&self, state: Option<VbState>, with_sync_writes: bool) -> Vec<(VbId, Seqno)> {
        let wanted = |vb: &&VBucket| match state {
            Some(state) => vb.state() == state,
            None => vb.state() != VbState::Dead,
        };
        let seqno = |vb: &VBucket| if with_sync_writes { vb.log.marks.high() } else { vb.log.marks.visible() };
        self.vbuckets.iter().filter(wanted).map(|vb| (vb.id, seqno(vb))).collect()
    }

    /// Any live document whose value is in memory. `None`: there is none.
    pub fn random_key(&self) -> Option<Item> {
        let now_s = self.env.clock.unix_s();
        let dice = self.env.rng.u64() as usize;
        let count = self.vbuckets.len();
        (0..count).map(|n| &self.vbuckets[(dice.wrapping_add(n)) % count]).find_map(|vb| {
            let live = vb.table.counts.live.load(Relaxed);
            if live <= 0 || vb.state() != VbState::Active {
                return None;
            }
            let (mut skip, mut found) = ((dice >> 16) % live as usize, None);
            vb.table.visit(|item| {
                if !item.is_deleted() && item.resident() && !expiry::is_past(item.expiry(), || now_s) {
                    found = Some(item.committed());
                    skip = skip.saturating_sub(1);
                }
                found.is_none() || skip > 0
            });
            found
        })
    }

    /// Sum of a count over the vBuckets.
    pub(crate) fn total(&self, count: impl Fn(&Counts) -> i64) -> i64 {
        self.vbuckets.iter().map(|vb| count(&vb.table.counts)).sum()
    }

    /// Live documents, in memory or not.
    pub fn items(&self) -> u64 {
        self.vbuckets.iter().map(VBucket::live).sum()
    }

    /// One group of statistics, as the `STAT` command names it. `None`: not the engine's.
    pub fn stats(&self, group: &str) -> Option<Lines> {
        let mut words = group.split_ascii_whitespace();
        let name = words.next().unwrap_or("");
        let arguments: Vec<&str> = words.collect();
        let vb = arguments.first().and_then(|text| text.parse().ok()).map(VbId);
        let one_vb = |lines: fn(&Bucket, &VBucket, &mut Lines)| match arguments.is_empty() {
            true => Some(self.each_vb(lines)),
            false => vb.and_then(|vb| self.vb(vb).ok()).map(|vb| {
                let mut out = Lines::new();
                lines(self, vb, &mut out);
                out
            }),
        };
        match name {
            "" => Some(self.general()),
            "vbucket" => one_vb(|_, vb, out| out.push((format!("vb_{}", vb.id), vb.state().name().into()))),
            "vbucket-details" => one_vb(Bucket::vbucket_details),
            "vbucket-seqno" => one_vb(vbucket_seqno),
            "failovers" => one_vb(|_, vb, out| failovers(vb, out)),
            "durability-monitor" | "vbucket-durability-state" => one_vb(Bucket::durability),
            "checkpoint" => one_vb(|_, vb, out| checkpoint(vb, out)),
            "hash" => one_vb(|_, vb, out| hash(vb, out)),
            "memory" => Some(self.memory()),
            "key" | "vkey" => self.key_stats(&arguments, name == "vkey"),
            "collections" => Some(self.collections()),
            "kvstore" => Some(self.kvstore()),
            "warmup" => Some(self.warm_up_stats()),
            _ => None,
        }
    }

    fn each_vb(&self, lines: fn(&Bucket, &VBucket, &mut Lines)) -> Lines {
        let mut out = Lines::new();
        self.vbuckets.iter().for_each(|vb| lines(self, vb, &mut out));
        out
    }

    /// The sync writes that wait for their nodes.
    pub fn sync_writes_under_way(&self) -> UnderWay {
        UnderWay {
            sync_writes: self.vbuckets.iter().map(|vb| vb.sync_writes() as u64).sum(),
            oldest_ms: self.vbuckets.iter().filter_map(|vb| self.oldest_prepare_ms(vb)).max().unwrap_or(0),
            acks_behind: self.vbuckets.iter().map(VBucket::acks_behind).max().unwrap_or(0),
        }
    }

    fn general(&self) -> Lines {
        let in_state = |state| self.vbuckets.iter().filter(|vb| vb.state() == state).count();
        let total = |count: fn(&Counts) -> i64| self.total(count).to_string();
        let counters = &self.counters;
        let rules = self.spec().rules;
        let mut out: Lines = Vec::new();
        let mut put = |name: &str, value: String| out.push((name.to_owned(), value));
        put("curr_items", self.items().to_string());
        put("curr_items_tot", self.items().to_string());
        put("curr_temp_items", "0".into());
        put("mem_used", self.memory_used().to_string());
        put("ep_max_size", self.quota_bytes().to_string());
        put("ep_mem_high_wat", self.high_mark().to_string());
        put("ep_mem_low_wat", self.low_mark().to_string());
        put("ep_kv_size", self.bytes.items.load(Relaxed).to_string());
        put("ep_item_eviction_policy", self.eviction_name().into());
        put("ep_max_ttl", rules.max_ttl_s.to_string());
        put("ep_durability_min_level", rules.min_durability.map_or("none", Level::name).into());
        put("ep_compression_mode", rules.compression.name().into());
        put("ep_flushall_enabled", self.spec().flush_enabled.to_string());
        put("ep_degraded_mode", u8::from(self.is_held()).to_string());
        put("ep_degraded_why", self.held_why().unwrap_or_default());
        put("ep_bucket_type", "persistent".into());
        put("ep_num_non_resident", self.items().saturating_sub(self.resident_items()).to_string());
        put("ep_tombstones_in_memory", total(|c| c.tombstones.load(Relaxed)));
        put("ep_items_with_expiry", total(|c| c.expiring.load(Relaxed)));
        put("ep_sync_writes_pending", total(|c| c.prepares.load(Relaxed)));
        let (commits, aborts) = (counters.commits.get(), counters.aborts.get());
        let UnderWay { sync_writes: in_flight, oldest_ms, acks_behind: behind } = self.sync_writes_under_way();
        put("ep_sync_writes_in_flight", in_flight.to_string());
        put("ep_sync_writes_accepted", (commits + aborts + in_flight).to_string());
        put("ep_sync_write_oldest_ms", oldest_ms.to_string());
        put("ep_replica_acks_behind_max", behind.to_string());
        put("ep_sync_write_commits", commits.to_string());
        put("ep_sync_write_aborts", aborts.to_string());
        put("ep_bg_fetched", counters.fetches.get().to_string());
        put("ep_expired_access", counters.expired.get().to_string());
        put("ep_num_value_ejects", counters.evicted.get().to_string());
        put("ep_tmp_oom_errors", counters.refused_memory.get().to_string());
        put("ep_num_expiry_pager_runs", counters.pager_runs.load(Relaxed).to_string());
        put("ep_queue_size", self.store.pending().to_string());
        put("ep_vb_total", self.vbuckets.len().to_string());
        put("vb_active_num", in_state(VbState::Active).to_string());
        put("vb_replica_num", in_state(VbState::Replica).to_string());
        put("vb_pending_num", in_state(VbState::Pending).to_string());
        put("vb_dead_num", in_state(VbState::Dead).to_string());
        put("vb_unloadable_num", self.warm_up_progress().failed.to_string());
        put("vb_poisoned_num", self.vbuckets.iter().filter(|v| v.log.marks.poisoned().is_some()).count().to_string());
        out
    }

    fn vbucket_details(&self, vb: &VBucket, out: &mut Lines) {
        let (id, counts, marks) = (vb.id, &vb.table.counts, &vb.log.marks);
        out.push((format!("vb_{id}"), vb.state().name().into()));
        let mut put = |name: &str, value: String| out.push((format!("vb_{id}:{name}"), value));
        put("num_items", vb.live().to_string());
        put("num_items_in_memory", counts.live.load(Relaxed).to_string());
        put("num_non_resident", vb.live().saturating_sub(counts.resident()).to_string());
        put("loaded", vb.is_loaded().to_string());
        put("num_tombstones", counts.tombstones.load(Relaxed).to_string());
        put("ht_memory", counts.bytes.total().to_string());
        put("high_seqno", marks.high().to_string());
        put("durable_seqno", marks.durable().to_string());
        put("filed_seqno", marks.filed().to_string());
        put("purge_seqno", self.store.purge_seqno(vb.id).to_string());
        put("uuid", vb.uuid().to_string());
        put("max_cas", vb.log.max_cas().to_string());
        put("max_deleted_revid", vb.max_deleted_rev().to_string());
        put("sync_writes", vb.sync_writes().to_string());
        put("poisoned", marks.poisoned().unwrap_or("no").to_owned());
        let record = vb.log.record();
        let chain = |chain: &Vec<Option<String>>| {
            let nodes: Vec<String> =
                chain.iter().map(|n| n.as_ref().map_or("null".into(), |n| format!("\"{n}\""))).collect();
            format!("[{}]", nodes.join(","))
        };
        let chains: Vec<String> = record.topology.iter().map(chain).collect();
        put("topology", format!("[{}]", chains.join(",")));
    }

    fn durability(&self, vb: &VBucket, out: &mut Lines) {
        let id = vb.id;
        let (high_prepared, completed) = vb.prepared_marks();
        let mut put = |name: &str, value: String| out.push((format!("vb_{id}:{name}"), value));
        put("state", vb.state().name().to_owned());
        put("num_tracked", vb.sync_writes().to_string());
        put("high_prepared_seqno", high_prepared.to_string());
        put("high_completed_seqno", completed.to_string());
        put("oldest_prepare_ms", self.oldest_prepare_ms(vb).unwrap_or(0).to_string());
        let waiting = vb.waiting.lock();
        let Some(tracker) = waiting.as_deref() else { return };
        if let Some(passive) = &tracker.passive {
            put("num_not_acked", passive.unsaid().to_string());
        }
        for (node, prepared) in tracker.chains.iter().flat_map(|chains| chains.marks()) {
            put(&format!("replication_chain:{node}:high_prepared_seqno"), prepared.to_string());
            put(&format!("replication_chain:{node}:behind"), high_prepared.0.saturating_sub(prepared.0).to_string());
        }
    }

    /// How long ago the oldest prepare under way was made, by the clock that its CAS tells.
    fn oldest_prepare_ms(&self, vb: &VBucket) -> Option<u64> {
        let cas = vb.waiting.lock().as_deref()?.writes().next()?.prepare.meta().cas;
        Some(self.env.clock.unix_ns().saturating_sub(cas.0) / 1_000_000)
    }

    fn resident_items(&self) -> u64 {
        self.vbuckets.iter().map(|vb| vb.table.counts.resident()).sum()
    }

    fn eviction_name(&self) -> &'static str {
        match self.store.spec().eviction {
            persist::Eviction::Value => "value_only",
            persist::Eviction::Full => "full_eviction",
        }
    }

    /// What the bucket's memory is used for.
    pub fn memory_parts(&self) -> MemoryParts {
        let bytes = |count: &AtomicI64| count.load(Relaxed).max(0) as u64;
        // An empty vBucket has a changelog with a record: its histories, and a chain that names its nodes.
        let each = size_of::<VBucket>() + allocated(size_of::<changelog::Changelog>()) + VBUCKET_RECORD_BYTES;
        MemoryParts {
            documents: bytes(&self.bytes.items),
            tables: bytes(&self.bytes.tables),
            key_filters: bytes(&self.bytes.filters),
            changelogs: bytes(&self.backlog_bytes),
            fetches: bytes(&self.fetching.bytes),
            vbuckets: (size_of::<Bucket>() + self.vbuckets.len() * each) as u64,
        }
    }

    /// The parts add up to `mem_used`; `ep_overhead` is beside it, as it does not depend on the documents.
    fn memory(&self) -> Lines {
        let items = self.items().max(1);
        let parts = self.memory_parts();
        [
            ("mem_used", self.memory_used().to_string()),
            ("ep_kv_size", parts.documents.to_string()),
            ("ep_table_memory", parts.tables.to_string()),
            ("ep_key_filter_memory", parts.key_filters.to_string()),
            ("ep_changelog_memory", parts.changelogs.to_string()),
            ("ep_fetch_queue_memory", parts.fetches.to_string()),
            ("ep_fetch_queue_requests", self.fetching.requests.load(Relaxed).max(0).to_string()),
            ("ep_overhead", parts.vbuckets.to_string()),
            ("ep_bytes_per_item", (self.memory_used() / items).to_string()),
            ("ep_items_in_memory", self.total(|c| c.live.load(Relaxed)).to_string()),
            ("ep_values_in_memory", self.resident_items().to_string()),
            ("ep_max_size", self.quota_bytes().to_string()),
            ("ep_mem_high_wat", self.high_mark().to_string()),
            ("ep_mem_low_wat", self.low_mark().to_string()),
        ]
        .map(|(name, value)| (name.to_owned(), value))
        .to_vec()
    }

    fn key_stats(&self, arguments: &[&str], check: bool) -> Option<Lines> {
        let &[key, vb] = arguments else { return None };
        let key = types::KeyBuf::in_default_collection(key.as_bytes()).ok()?;
        let vb = self.vb(VbId(vb.parse().ok()?)).ok()?;
        let in_memory = vb.table.lock(key.as_key()).committed();
        let is_resident = in_memory.as_ref().is_some_and(|item| item.resident());
        let item = match in_memory {
            Some(item) => item,
            None => self.peek(vb, key.as_key()).ok()??,
        };
        if item.is_deleted() {
            return None;
        }
        let yes = |yes: bool| if yes { "true" } else { "false" }.to_owned();
        let mut out = vec![
            ("key_is_dirty".to_owned(), yes(item.seqno() > vb.log.marks.durable())),
            ("key_exptime".to_owned(), item.meta().expiry.to_string()),
            ("key_flags".to_owned(), item.meta().flags.to_string()),
            ("key_cas".to_owned(), item.meta().cas.to_string()),
            ("key_vb_state".to_owned(), vb.state().name().to_owned()),
            ("key_is_resident".to_owned(), yes(is_resident)),
        ];
        if check {
            let dirty = item.seqno() > vb.log.marks.filed();
            let valid = match self.store.fetch_now(vb.id, key.as_key()) {
                _ if dirty => "dirty",
                Ok(Some(filed))
                    if filed.meta() == item.meta() && (!item.resident() || filed.value() == item.value()) =>
                {
                    "valid"
                }
                Ok(Some(_)) => "length_mismatch",
                Ok(None) => "item_deleted",
                Err(_) => "unreadable",
            };
            out.push(("key_valid".to_owned(), valid.to_owned()));
        }
        Some(out)
    }

    fn collections(&self) -> Lines {
        let items = self.items().to_string();
        let bytes = self.bytes.total().to_string();
        [
            ("manifest_uid", "0".to_owned()),
            ("0x0:name", "_default".to_owned()),
            ("0x0:0x0:name", "_default".to_owned()),
            ("0x0:0x0:items", items),
            ("0x0:0x0:mem_used", bytes),
        ]
        .map(|(name, value)| (name.to_owned(), value))
        .to_vec()
    }

    fn kvstore(&self) -> Lines {
        let stats = self.store.stats();
        let mut out = [
            ("backend_type", "couchstore".to_owned()),
            ("queued_vbuckets", stats.queued_vbs.to_string()),
            ("waiting_vbuckets", stats.waiting_vbs.to_string()),
            ("pending_items", stats.pending_items.to_string()),
            ("commits", stats.commits.to_string()),
            ("items_written", stats.items_written.to_string()),
            ("items_deduplicated", stats.items_deduplicated.to_string()),
            ("value_bytes_written", stats.value_bytes_written.to_string()),
            ("failure_flush", stats.flush_failures.to_string()),
            ("failure_sync", stats.sync_failures.to_string()),
            ("files_created", stats.files_created.to_string()),
            ("fetched", stats.fetched.to_string()),
            ("failure_get", stats.fetch_failures.to_string()),
            ("file_bytes", stats.file_bytes.to_string()),
            ("live_bytes", stats.live_bytes.to_string()),
            ("compactions", stats.compactions.to_string()),
            ("compaction_failures", stats.compaction_failures.to_string()),
            ("disk_full", stats.disk_full.to_string()),
        ]
        .map(|(name, value)| (format!("rw_0:{name}"), value))
        .to_vec();
        out.extend(stats.poisoned.into_iter().map(|(vb, why)| (format!("rw_0:poisoned:vb_{vb}"), why)));
        out
    }

    fn warm_up_stats(&self) -> Lines {
        let recovered = self.warm_up.recovered.get().cloned().unwrap_or_default();
        let progress = self.warm_up_progress();
        let (state, thread) = match progress.is_done() {
            true => ("done", "complete"),
            false => ("loading", "running"),
        };
        [
            ("ep_warmup", "enabled".to_owned()),
            ("ep_warmup_state", state.to_owned()),
            ("ep_warmup_thread", thread.to_owned()),
            ("ep_warmup_vbuckets_loaded", progress.vbuckets_loaded.to_string()),
            ("ep_warmup_vbuckets_failed", progress.failed.to_string()),
            ("ep_warmup_vbuckets_total", progress.vbuckets_total.to_string()),
            ("ep_warmup_key_count", progress.keys.to_string()),
            ("ep_warmup_value_count", progress.values.to_string()),
            ("ep_warmup_bytes", progress.bytes.to_string()),
            ("ep_warmup_estimated_key_count", recovered.documents.to_string()),
            ("ep_warmup_recommitted", recovered.recommitted.to_string()),
            ("ep_warmup_ready_time", recovered.took.as_micros().to_string()),
            ("ep_warmup_time", progress.took.as_micros().to_string()),
        ]
        .map(|(name, value)| (name.to_owned(), value))
        .into_iter()
        .chain(self.unloadable().into_iter().map(|(vb, why)| (format!("ep_warmup_failed:vb_{vb}"), why)))
        .collect()
    }
}

fn vbucket_seqno(bucket: &Bucket, vb: &VBucket, out: &mut Lines) {
    let (id, marks) = (vb.id, &vb.log.marks);
    let (high, durable) = (marks.high(), marks.durable());
    let mut put = |name: &str, value: String| out.push((format!("vb_{id}:{name}"), value));
    put("high_seqno", high.to_string());
    put("abs_high_seqno", high.to_string());
    put("max_visible_seqno", marks.visible().to_string());
    let (high_prepared, completed) = vb.prepared_marks();
    put("high_prepared_seqno", high_prepared.to_string());
    put("high_completed_seqno", completed.to_string());
    put("last_persisted_seqno", durable.to_string());
    put("purge_seqno", bucket.store.purge_seqno(vb.id).to_string());
    put("uuid", vb.uuid().to_string());
    put("last_persisted_snap_start", durable.to_string());
    put("last_persisted_snap_end", durable.to_string());
}

fn failovers(vb: &VBucket, out: &mut Lines) {
    let record = vb.log.record();
    let entries = record.failover.newest_first();
    let id = vb.id;
    out.push((format!("vb_{id}:num_entries"), entries.len().to_string()));
    out.push((format!("vb_{id}:num_erroneous_entries_erased"), "0".to_owned()));
    for (n, entry) in entries.iter().enumerate() {
        out.push((format!("vb_{id}:{n}:id"), entry.uuid.to_string()));
        out.push((format!("vb_{id}:{n}:seq"), entry.seqno.to_string()));
    }
}

fn checkpoint(vb: &VBucket, out: &mut Lines) {
    let id = vb.id;
    let (entries, bytes) = vb.log.backlog();
    out.push((format!("vb_{id}:state"), vb.state().name().to_owned()));
    out.push((format!("vb_{id}:num_checkpoint_items"), entries.to_string()));
    out.push((format!("vb_{id}:mem_usage"), bytes.to_string()));
    for (name, seqno) in vb.log.readers() {
        out.push((format!("vb_{id}:{name}:cursor_seqno"), seqno.to_string()));
    }
}

fn hash(vb: &VBucket, out: &mut Lines) {
    let id = vb.id;
    let (slots, entries) = vb.table.slots();
    out.push((format!("vb_{id}:size"), slots.to_string()));
    out.push((format!("vb_{id}:counted"), entries.to_string()));
    out.push((format!("vb_{id}:mem_size"), vb.table.counts.bytes.total().to_string()));
}
