//! Commands on buckets as a whole: making, deleting and emptying them, and the states of their vBuckets.

use engine::{Outcome, Role, Waiter};
use persist::{BucketSpec, CompactionReport, Compression, Purge, StoreError};
use scheduler::PoolKind;
use types::{BucketUuid, Level, VbId, VbState};
use wire::Status;
use wire::kv::{CompactDb, CreateBucket, DeleteBucket, SetClusterConfig, SetVbucket};

use super::{Context, Refusal, einval, no_such_vbucket, not_supported};
use crate::Shared;
use crate::cluster::{BucketShape, NotGiven, Revision};
use crate::errors;
use crate::mailbox::{Answer, JobReply, Letter};

/// Of a bucket created without saying how many.
const VBUCKETS_DEFAULT: u16 = 1024;
/// Of a bucket created without saying how much.
const QUOTA_BYTES_DEFAULT: u64 = 256 << 20;

impl Context<'_> {
    pub(super) fn list_buckets(&mut self) -> Result<(), Refusal> {
        let visible =
            |name: &str| self.session.identity.is_some() || self.shared.options.open_bucket.as_deref() == Some(name);
        let names: Vec<String> = self.shared.bucket_names().into_iter().filter(|name| visible(name)).collect();
        self.value(Default::default(), names.join(" ").as_bytes())
    }

    pub(super) fn create_bucket(&mut self, create: &CreateBucket<'_>) -> Result<(), Refusal> {
        let (Ok(name), Ok(config)) = (std::str::from_utf8(create.name), std::str::from_utf8(create.config)) else {
            return einval("a bucket's name and configuration are text");
        };
        let uuid = u128::from(self.shared.env.rng.u64()) << 64 | u128::from(self.shared.env.rng.u64());
        let spec = parse_spec(name, config, BucketUuid(uuid)).map_err(|what| (Status::Einval, what))?;
        self.job("create_bucket", move |shared| {
            shared.engine.create_bucket(spec).map_err(refused)?;
            shared.cluster.changed();
            Ok(JobReply::default())
        });
        Ok(())
    }

    pub(super) fn delete_bucket(&mut self, delete: &DeleteBucket<'_>) -> Result<(), Refusal> {
        let Ok(name) = std::str::from_utf8(delete.name) else { return einval("a bucket's name is text") };
        let name = name.to_owned();
        self.job("delete_bucket", move |shared| {
            shared.engine.delete_bucket(&name).map_err(refused)?;
            shared.forget_bucket(&name);
            Ok(JobReply::default())
        });
        Ok(())
    }

    /// Does something that takes long elsewhere; the reply comes when it is done.
    fn job(&mut self, name: &'static str, work: impl FnOnce(&Shared) -> Result<JobReply, Refusal> + Send + 'static) {
        let ticket = self.ticket();
        let (mailbox, shared) = (self.mailbox.clone(), self.shared.me());
        self.wait(ticket, true);
        self.shared.pools.execute(PoolKind::Background, name, move || {
            let answer = Answer::Job(work(&shared));
            mailbox.post(Letter::Answer { ticket, answer });
        });
    }

    /// Old memcached clients expect to be able to; others only where the bucket allows it.
    pub(super) fn flush(&mut self, delay_s: u32) -> Result<(), Refusal> {
        let bucket = self.bucket()?.bucket.clone();
        if self.session.greeted && !bucket.spec().flush_enabled {
            return not_supported("flushing this bucket");
        }
        if delay_s > 0 {
            return not_supported("a delayed flush");
        }
        let ticket = self.ticket();
        self.wait(ticket, true);
        bucket.flush(Waiter::new(self.mailbox.clone(), ticket));
        Ok(())
    }

    /// Answered when the vBucket's file is compacted. What others asked of the same compaction is done too.
    pub(super) fn compact(&mut self, vb: VbId, compact: &CompactDb) -> Result<(), Refusal> {
        let bucket = self.bucket()?.bucket.clone();
        bucket.vb_state(vb).ok_or_else(|| no_such_vbucket(vb))?;
        let before_s = (compact.purge_before_s > 0).then(|| u32::try_from(compact.purge_before_s).unwrap_or(u32::MAX));
        let upto = Some(compact.purge_before_seqno).filter(|seqno| seqno.0 > 0);
        let ticket = self.ticket();
        let mailbox = self.mailbox.clone();
        self.wait(ticket, true);
        let done = move |result: Result<CompactionReport, StoreError>| {
            let refused = |error: StoreError| (Status::Etmpfail, error.to_string());
            let answer = Answer::Job(result.map(|_| JobReply::default()).map_err(refused));
            mailbox.post(Letter::Answer { ticket, answer });
        };
        bucket.store().compact(vb, Purge { all: compact.drop_deletes, before_s, upto }, Box::new(done));
        Ok(())
    }

    pub(super) fn get_vbucket(&mut self, vb: VbId) -> Result<(), Refusal> {
        let state = self.bucket()?.bucket.vb_state(vb).ok_or_else(|| no_such_vbucket(vb))?;
        self.value(Default::default(), &(state as u32).to_be_bytes())
    }

    pub(super) fn set_vbucket(&mut self, vb: VbId, set: &SetVbucket<'_>) -> Result<(), Refusal> {
        let bucket = self.bucket()?.bucket.clone();
        let topology = match set.meta {
            b"" => None,
            meta => topology(meta)?,
        };
        if topology.is_some() && set.state != VbState::Active {
            return einval("only an active vBucket has a topology");
        }
        let ticket = self.ticket();
        let mailbox = self.mailbox;
        let outcome =
            bucket.set_vbucket_state(vb, Role::of(set.state, topology), &|| Waiter::new(mailbox.clone(), ticket));
        self.shared.replicas.role_changed(bucket.name());
        match outcome {
            Outcome::Done(result) => self.answer(result),
            Outcome::Pending => self.wait(ticket, true),
        }
        Ok(())
    }

    /// A map from a coordinator: clients are told, and replicas follow.
    pub(super) fn set_cluster_config(&mut self, set: &SetClusterConfig<'_>) -> Result<(), Refusal> {
        let (Ok(name), Ok(text)) = (std::str::from_utf8(set.bucket), std::str::from_utf8(set.config)) else {
            return einval("a bucket's name and its map are text");
        };
        if name.is_empty() {
            return not_supported("a map of the whole cluster");
        }
        let (name, text) = (name.to_owned(), text.to_owned());
        let version = Revision { epoch: set.version.epoch, rev: set.version.rev };
        self.job("set_cluster_config", move |shared| {
            let bucket = shared.engine.bucket(&name).ok_or_else(|| (Status::KeyEnoent, format!("no bucket {name}")))?;
            let given = shared.cluster.give(&BucketShape::of(&bucket.spec()), version, &text);
            given.map_err(|why| match why {
                NotGiven::Invalid(_) => (Status::Einval, why.to_string()),
                NotGiven::Stale { .. } => (Status::KeyEexists, why.to_string()),
                NotGiven::NotKept(_) => (Status::Etmpfail, why.to_string()),
            })?;
            shared.replicas.look();
            shared.replicas.told(&bucket);
            Ok(JobReply::default())
        });
        Ok(())
    }

    /// Answered when nothing of the vBucket is left, whether or not the request says that it would wait.
    pub(super) fn del_vbucket(&mut self, vb: VbId) -> Result<(), Refusal> {
        let bucket = self.bucket()?.bucket.clone();
        self.job("delete_vbucket", move |shared| {
            let deleted = bucket.delete_vbucket(vb);
            shared.replicas.role_changed(bucket.name());
            deleted.map(|()| JobReply::default()).map_err(|error| errors::of_op(&error))
        });
        Ok(())
    }

    /// Traffic is on, as a bucket is warm before it can be selected; but not while this node has yet to find out whether its map is
    /// the one to go by. Whoever decides may say that it is.
    pub(super) fn traffic(&mut self) -> Result<(), Refusal> {
        let bucket = self.bucket()?.bucket.clone();
        match self.call.opcode {
            Some(wire::Opcode::EnableTraffic) => {
                self.shared.replicas.told(&bucket);
                self.done()
            }
            _ => not_supported("switching traffic off"),
        }
    }
}

type Topology = Vec<Vec<Option<String>>>;

fn topology(meta: &[u8]) -> Result<Option<Topology>, Refusal> {
    let wrong = || (Status::Einval, "the value is JSON such as {\"topology\":[[\"n1\",null]]}".to_owned());
    let meta: serde_json::Value = serde_json::from_slice(meta).map_err(|_| wrong())?;
    match meta.get("topology") {
        None => Ok(None),
        Some(topology) => serde_json::from_value(topology.clone()).map(Some).map_err(|_| wrong()),
    }
}

/// Reads `module NUL key=value;key=value`. Keys that say nothing to this server are passed over: such configurations
/// are written for another one and carry all its settings.
fn parse_spec(name: &str, config: &str, uuid: BucketUuid) -> Result<BucketSpec, String> {
    // Other servers' settings are skipped, as their managers send them all; our own tools mean each one.
    let (module, pairs) = config.split_once('\0').unwrap_or(("", ""));
    let mut spec = BucketSpec {
        name: name.to_owned(),
        uuid,
        vbuckets: VBUCKETS_DEFAULT,
        replicas: 0,
        quota_bytes: QUOTA_BYTES_DEFAULT,
        flush_enabled: false,
        eviction: persist::Eviction::default(),
        rules: persist::WriteRules::default(),
        compaction: None,
    };
    for (key, value) in pairs.split(';').filter_map(|pair| pair.split_once('=')) {
        let wrong = |_| format!("{key}={value} is not a number that fits");
        match key.trim() {
            "max_vbuckets" => spec.vbuckets = value.trim().parse().map_err(wrong)?,
            "max_size" => spec.quota_bytes = value.trim().parse().map_err(wrong)?,
            "replicas" => spec.replicas = value.trim().parse().map_err(wrong)?,
            "flush_enabled" => spec.flush_enabled = value.trim() == "true",
            "max_ttl" => spec.rules.max_ttl_s = value.trim().parse().map_err(wrong)?,
            "compression_mode" => spec.rules.compression = compression(value.trim())?,
            "durability_min_level" => spec.rules.min_durability = min_durability(value.trim())?,
            "item_eviction_policy" => {
                spec.eviction = match value.trim() {
                    "value_only" => persist::Eviction::Value,
                    "full_eviction" => persist::Eviction::Full,
                    _ => return Err(format!("{key}={value} is neither value_only nor full_eviction")),
                }
            }
            unknown if module == "settee" => return Err(format!("a bucket has no setting {unknown:?}")),
            _ => {}
        }
    }
    spec.check().map_err(|e| e.to_string())?;
    Ok(spec)
}

fn compression(name: &str) -> Result<Compression, String> {
    match name {
        "off" => Ok(Compression::Off),
        "passive" => Ok(Compression::Passive),
        "active" => Ok(Compression::Active),
        _ => Err(format!("compression_mode is off, passive or active, not {name:?}")),
    }
}

fn min_durability(name: &str) -> Result<Option<Level>, String> {
    match name {
        "none" => Ok(None),
        "majority" => Ok(Some(Level::Majority)),
        "majority_and_persist_on_master" => Ok(Some(Level::MajorityAndPersistActive)),
        "persist_to_majority" => Ok(Some(Level::PersistMajority)),
        _ => Err(format!("there is no durability_min_level {name:?}")),
    }
}

fn refused(error: StoreError) -> Refusal {
    let status = match &error {
        StoreError::BucketExists(_) => Status::KeyEexists,
        StoreError::NoSuchBucket(_) => Status::KeyEnoent,
        StoreError::BadName(_) | StoreError::BadSpec { .. } => Status::Einval,
        _ => Status::Etmpfail,
    };
    (status, error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use persist::WriteRules;

    #[test]
    fn a_bucket_configuration_of_another_server_is_read_as_far_as_it_matters() {
        let config = "ep.so\0max_size=1048576;max_vbuckets=64;backend=couchdb;replicas=1;flush_enabled=true;x";
        let spec = parse_spec("b", config, BucketUuid(1)).unwrap();
        assert_eq!((spec.vbuckets, spec.replicas, spec.quota_bytes, spec.flush_enabled), (64, 1, 1 << 20, true));
        let rules = "ep.so\0max_ttl=60;durability_min_level=persist_to_majority;compression_mode=off";
        let expected =
            WriteRules { max_ttl_s: 60, min_durability: Some(Level::PersistMajority), compression: Compression::Off };
        assert_eq!(parse_spec("b", rules, BucketUuid(1)).unwrap().rules, expected);
        assert_eq!(parse_spec("b", "default_engine.so", BucketUuid(1)).unwrap().vbuckets, 1024);
        let full = parse_spec("b", "ep.so\0item_eviction_policy=full_eviction", BucketUuid(1)).unwrap();
        assert_eq!((spec.eviction, full.eviction), (persist::Eviction::Value, persist::Eviction::Full));
        assert!(parse_spec("b", "ep.so\0item_eviction_policy=none", BucketUuid(1)).is_err());
        for (name, config) in [
            ("a/b", "x\0"),
            ("b", "x\0max_vbuckets=1000"),
            ("b", "x\0max_vbuckets=-1"),
            ("b", "x\0compression_mode=zip"),
        ] {
            assert!(parse_spec(name, config, BucketUuid(1)).is_err(), "{name} {config:?}");
        }
    }

    #[test]
    fn a_topology_is_a_list_of_chains_with_holes() {
        let chains = topology(br#"{"topology":[["n1",null]],"use_snapshot":"x"}"#).unwrap();
        assert_eq!(chains, Some(vec![vec![Some("n1".to_owned()), None]]));
        assert_eq!(topology(b"{}").unwrap(), None);
        assert!(topology(br#"{"topology":[1]}"#).is_err() && topology(b"nonsense").is_err());
    }
}
