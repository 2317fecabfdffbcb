//! A small world around a log: vBuckets that give out seqnos, files that are only marks, and a memory of what was told.
//! What an item holds tells the life it was written in, so that an old one that comes back is seen.
#![allow(dead_code)]

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex};

use changelog::{FailoverEntry, FailoverTable, VbRecord};
use commit_log::{Key, Lead, Log, LogError, Mark, Observer, Options, Replayed, Submission, Synced};
use env::Env;
use types::{BucketUuid, Cas, Datatype, Item, KeyBuf, Kind, Meta, RevSeqno, Seqno, VbId, VbState, VbUuid};

pub const DIR: &str = "/data/log";

pub fn small() -> Options {
    Options { segment_bytes: 16 << 10, log_bytes_max: 5 * (16 << 10), ..Options::default() }
}

pub fn key(bucket: u128, vb: u16) -> Key {
    Key { bucket: BucketUuid(bucket), vb: VbId(vb) }
}

pub fn item(seqno: u64, life: u64, value_bytes: usize) -> Item {
    let meta = Meta {
        seqno: Seqno(seqno),
        cas: Cas(life << 32 | seqno),
        rev: RevSeqno(1),
        flags: 7,
        expiry: 0,
        datatype: Datatype::RAW,
        deleted: None,
    };
    let name = KeyBuf::in_default_collection(format!("key-{seqno}").as_bytes()).unwrap();
    let value = vec![(seqno * 31 + life) as u8; value_bytes];
    Item::new(name.as_key(), meta, Kind::Committed { prepared: None }, Some(&value))
}

pub fn vb_record(state: VbState, uuid: u64) -> VbRecord {
    let failover = FailoverTable::new(FailoverEntry { uuid: VbUuid(uuid), seqno: Seqno(0) });
    let topology = vec![vec![Some("node-1".to_owned()), None]];
    VbRecord { topology, ..VbRecord::new(state, failover) }
}

/// Remembers what it was told.
#[derive(Default)]
pub struct Told {
    pub durable: Mutex<BTreeMap<(u128, u16), Mark>>,
    pub poisoned: Mutex<Vec<String>>,
    pub rooms: Mutex<u64>,
}

impl Told {
    pub fn mark(&self, key: Key) -> Mark {
        self.durable.lock().unwrap().get(&(key.bucket.0, key.vb.0)).copied().unwrap_or_default()
    }
}

impl Observer for Told {
    fn durable(&self, batch: &[Synced]) {
        assert!(self.poisoned.lock().unwrap().is_empty(), "durable after poisoned");
        let mut durable = self.durable.lock().unwrap();
        let mut seen = Vec::new();
        for synced in batch {
            assert!(!seen.contains(&synced.key), "each vBucket once");
            seen.push(synced.key);
            let mark = durable.entry((synced.key.bucket.0, synced.key.vb.0)).or_default();
            assert!(synced.seqno >= mark.seqno, "durable went back");
            mark.seqno = synced.seqno;
            mark.record_version = mark.record_version.max(synced.record_version.unwrap_or(0));
        }
    }
    fn poisoned(&self, reason: &str) {
        self.poisoned.lock().unwrap().push(reason.to_owned());
    }
    fn room(&self) {
        *self.rooms.lock().unwrap() += 1;
    }
}

/// What is true of one vBucket.
#[derive(Clone, Debug, Default)]
pub struct VbTruth {
    /// Life and value size by seqno, of everything that was submitted and not lost for good.
    pub items: BTreeMap<u64, (u64, usize)>,
    pub filed: u64,
    pub durable: u64,
    pub records: u64,
    pub record_filed: u64,
    pub record_durable: u64,
}

impl VbTruth {
    pub fn high(&self) -> u64 {
        self.items.keys().next_back().copied().unwrap_or(0)
    }
}

/// What the vBuckets know, across crashes.
#[derive(Clone, Debug, Default)]
pub struct Truth {
    pub vbs: BTreeMap<(u128, u16), VbTruth>,
    pub life: u64,
}

/// A running log with its vBuckets.
pub struct World {
    pub log: Arc<Log>,
    pub told: Arc<Told>,
    pub truth: Truth,
}

pub fn open(env: &Env, options: Options) -> Result<(Arc<Log>, Vec<Replayed>), LogError> {
    let mut replayed = Vec::new();
    let log = Log::open(env, Path::new(DIR), options, &mut |record| replayed.push(record))?;
    Ok((log, replayed))
}

impl World {
    /// Opens the log, compares what it replays with `truth`, and goes on from there in another life.
    pub fn start(env: &Env, options: Options, truth: Truth) -> Result<World, LogError> {
        let (log, replayed) = open(env, options)?;
        let mut truth = truth;
        truth.adopt(&replayed);
        truth.life += 1;
        let told = Arc::new(Told::default());
        log.observe(told.clone());
        Ok(World { log, told, truth })
    }

    pub fn submit(&mut self, key: Key, count: u64, value_bytes: usize, with_record: bool) -> Result<(), LogError> {
        let life = self.truth.life;
        let vb = self.truth.vbs.entry((key.bucket.0, key.vb.0)).or_default();
        let high = vb.high().max(vb.filed);
        let items: Vec<_> = (high + 1..=high + count).map(|seqno| item(seqno, life, value_bytes)).collect();
        let version = vb.records + 1;
        let record = vb_record(VbState::Active, version);
        self.log.submit(&Submission {
            bucket: key.bucket,
            vb: key.vb,
            items: &items,
            last: Seqno(high + count),
            record: with_record.then_some((&record, version)),
            past: None,
        })?;
        for seqno in high + 1..=high + count {
            vb.items.insert(seqno, (life, value_bytes));
        }
        vb.records += u64::from(with_record);
        Ok(())
    }

    /// Leads until there is nothing to do or nothing can be done.
    pub fn lead(&mut self) -> Lead {
        loop {
            let lead = self.log.lead();
            self.look();
            if lead != Lead::More {
                return lead;
            }
        }
    }

    fn look(&mut self) {
        for (key, mark) in &*self.told.durable.lock().unwrap() {
            let vb = self.truth.vbs.get_mut(key).expect("only what was submitted is durable");
            assert!(mark.seqno.0 <= vb.high(), "durable beyond what was submitted");
            vb.durable = vb.durable.max(mark.seqno.0);
            vb.record_durable = vb.record_durable.max(mark.record_version);
        }
    }

    /// Files everything of a vBucket that is durable.
    pub fn file(&mut self, key: Key) {
        let Some(vb) = self.truth.vbs.get_mut(&(key.bucket.0, key.vb.0)) else { return };
        vb.filed = vb.filed.max(vb.durable);
        vb.record_filed = vb.record_filed.max(vb.record_durable);
        self.log.release(key, Mark { seqno: Seqno(vb.filed), record_version: vb.record_filed, rollbacks: 0 });
    }

    /// Files whatever holds the oldest segment.
    pub fn file_oldest(&mut self) -> bool {
        let holders = self.log.needs_filing(usize::MAX);
        holders.iter().for_each(|holder| self.file(holder.key));
        !holders.is_empty()
    }
}

impl Truth {
    /// Compares what was replayed with what must be there, and forgets what is gone.
    pub fn adopt(&mut self, replayed: &[Replayed]) {
        let mut ends: BTreeMap<(u128, u16), u64> = BTreeMap::new();
        let mut versions: BTreeMap<(u128, u16), u64> = BTreeMap::new();
        for record in replayed {
            let name = (record.bucket.0, record.vb.0);
            let vb = self.vbs.get(&name).unwrap_or_else(|| panic!("invented: {name:?}"));
            if let Some(found) = &record.record {
                let version = found.failover.current().uuid.0;
                assert_eq!(*found, vb_record(VbState::Active, version));
                assert!(version <= vb.records, "an invented record");
                let before = versions.insert(name, version);
                assert!(before.is_none_or(|before| version == before + 1), "a record is missing before {version}");
            }
            for found in &record.items {
                let seqno = found.seqno().0;
                let (life, value_bytes) =
                    *vb.items.get(&seqno).unwrap_or_else(|| panic!("invented: {name:?} seqno {seqno}"));
                assert_eq!(*found, item(seqno, life, value_bytes), "{name:?} seqno {seqno} is of another life");
                let before = *ends.get(&name).unwrap_or(&(seqno - 1));
                assert_eq!(seqno, before + 1, "{name:?}: order, without gaps");
                assert!(ends.contains_key(&name) || seqno <= vb.filed + 1, "{name:?}: {seqno} comes after a gap");
                ends.insert(name, seqno);
            }
        }
        for (name, vb) in &mut self.vbs {
            let high = ends.get(name).copied().unwrap_or(0).max(vb.filed);
            assert!(high >= vb.durable, "{name:?}: lost {high} < durable {}", vb.durable);
            let version = versions.get(name).copied().unwrap_or(0).max(vb.record_filed);
            assert!(version >= vb.record_durable, "{name:?}: lost record {version} < {}", vb.record_durable);
            vb.items.retain(|seqno, _| *seqno <= high);
            (vb.durable, vb.record_durable, vb.records) = (high, version, version);
        }
    }
}
