//! Real threads on real files.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use changelog::{Changelog, FailoverEntry, FailoverTable, VbRecord};
use env::Env;
use persist::{
    BucketSpec, BucketStore, CompactionOptions, LogDriver, LogOptions, Nudge, Options, Purge, Store, StoreError,
    Urgency, WarmUp,
};
use scheduler::{PoolConfig, Pools, Stop};
use types::{
    BucketUuid, Cas, Datatype, DeleteSource, Item, KeyBuf, Kind, Meta, RevSeqno, Seqno, VbId, VbState, VbUuid,
};

const VBS: u16 = 16;

struct Told(mpsc::SyncSender<VbId>);

impl Nudge for Told {
    fn marks_moved(&self, vb: VbId) {
        let _ = self.0.try_send(vb);
    }
}

fn append(log: &Changelog, env: &Env, key: &str, value: Option<&[u8]>) -> Item {
    let key = KeyBuf::in_default_collection(key.as_bytes()).unwrap();
    log.append(&*env.clock, |stamp| {
        let meta = Meta {
            seqno: stamp.seqno,
            cas: stamp.cas,
            rev: RevSeqno(1),
            flags: 0,
            expiry: 0,
            datatype: Datatype::RAW,
            deleted: value.is_none().then_some(DeleteSource::Explicit),
        };
        Item::new(key.as_key(), meta, Kind::Committed { prepared: None }, value)
    })
}

fn attach(bucket: &BucketStore, told: &Arc<Told>) -> Vec<Arc<Changelog>> {
    let recovered: BTreeMap<_, _> = bucket.recovered().into_iter().map(|r| (r.vb, r)).collect();
    let logs = (0..VBS).map(|vb| {
        let failover = FailoverTable::new(FailoverEntry { uuid: VbUuid(7), seqno: Seqno(0) });
        let fresh = VbRecord::new(VbState::Active, failover);
        let log = match recovered.get(&VbId(vb)) {
            Some(r) => Changelog::new(r.high, r.max_cas, r.record.clone()),
            None => Changelog::new(Seqno(0), Cas(0), fresh),
        };
        let log = Arc::new(log);
        bucket.attach(VbId(vb), log.clone(), told.clone());
        log
    });
    logs.collect()
}

fn spec(name: &str) -> BucketSpec {
    BucketSpec {
        name: name.into(),
        uuid: BucketUuid(9),
        vbuckets: VBS,
        replicas: 0,
        quota_bytes: 1 << 20,
        flush_enabled: false,
        eviction: persist::Eviction::Value,
        rules: persist::WriteRules::default(),
        compaction: None,
    }
}

/// Goal: with threads too, no change is forgotten by the queues, and reads see what was filed. Method: writers append and
/// wait for their own change to be durable, readers fetch meanwhile, files are compacted and compactions cancelled, a second
/// bucket comes and goes, and so does the commit log.
#[test]
fn every_change_becomes_durable_without_further_traffic() {
    storm(&Options::default());
}

/// The same with files kept in short supply, and through a commit log that is used again and again.
#[test]
fn every_change_becomes_durable_through_a_commit_log_too() {
    for driver in [LogDriver::Thread, LogDriver::Task] {
        let log = LogOptions { driver, ..small_log() };
        storm(&Options { files_max: 5, commit_log: Some(log), ..Options::default() });
    }
}

fn small_log() -> LogOptions {
    let file_after = Duration::from_millis(20);
    LogOptions { segment_bytes: 64 << 10, bytes_max: 256 << 10, file_after, ..LogOptions::default() }
}

fn storm(options: &Options) {
    let dir = tempfile::tempdir().unwrap();
    let env = env::os::env();
    let pools = Pools::start(&env, &PoolConfig::default());
    let store = Store::open(&env, &pools, dir.path(), options.clone()).unwrap();
    // So small that much happens between two steps.
    let small = CompactionOptions { limit: 3, piece_bytes_max: 100, sync_every: 4096, ..CompactionOptions::default() };
    store.set_compaction(small);
    let bucket = store.create_bucket(spec("b")).unwrap();
    let (sender, told) = mpsc::sync_channel(1);
    let nudge = Arc::new(Told(sender));
    let logs = attach(&bucket, &nudge);
    let (stop, wrong) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let writers: Vec<_> = (0..4u16)
            .map(|writer| {
                let (logs, bucket, env) = (&logs, &bucket, &env);
                scope.spawn(move || {
                    for n in 0..60u16 {
                        let vb = (writer * 5 + n) % VBS;
                        let log = &logs[usize::from(vb)];
                        let value = (n % 7 != 0).then(|| format!("{writer}-{n}").into_bytes());
                        let item = append(log, env, &format!("k{writer}-{}", n % 5), value.as_deref());
                        bucket.changed(VbId(vb), if n % 2 == 0 { Urgency::Normal } else { Urgency::Durable });
                        // Every so often nobody else writes any more, and it must come about all the same.
                        while n % 10 == 9 && log.marks.durable() < item.seqno() {
                            std::thread::yield_now();
                        }
                    }
                })
            })
            .collect();
        scope.spawn(|| {
            while !stop.load(Ordering::Acquire) {
                let key = KeyBuf::in_default_collection(b"k1-1").unwrap();
                for vb in 0..VBS {
                    if bucket.fetch_now(VbId(vb), key.as_key()).is_err() {
                        wrong.fetch_add(1, Ordering::Relaxed);
                    }
                }
            }
        });
        scope.spawn(|| {
            for n in 0..5 {
                let uuid = BucketUuid(10 + n);
                let other = store.create_bucket(BucketSpec { uuid, ..spec("other") }).unwrap();
                store.set_files_max([0, 3, 1000, 0, 2][n as usize]);
                let logs = attach(&other, &nudge);
                for vb in 0..VBS {
                    append(&logs[usize::from(vb)], &env, "k", Some(b"v"));
                    other.changed(VbId(vb), Urgency::Normal);
                }
                for vb in 0..VBS {
                    other.compact(VbId(vb), Purge::default(), Box::new(|_| {}));
                }
                store.delete_bucket("other").unwrap();
            }
        });
        scope.spawn(|| {
            let (sender, ended) = mpsc::channel();
            let mut asked = 0;
            while !stop.load(Ordering::Acquire) || asked < 100 {
                let vb = VbId(asked * 7 % VBS);
                let sender = sender.clone();
                bucket.compact(vb, Purge::default(), Box::new(move |result| sender.send(result).unwrap()));
                asked += 1;
                if asked % 5 == 0 {
                    bucket.cancel_compaction(vb);
                }
                if asked % 20 == 0 {
                    // Whatever was asked for ends, done or cancelled.
                    for _ in 0..20 {
                        let result = ended.recv_timeout(Duration::from_secs(30)).expect("nobody waits for ever");
                        let is_fine = matches!(result, Ok(_) | Err(StoreError::Cancelled));
                        wrong.fetch_add(u64::from(!is_fine), Ordering::Relaxed);
                    }
                }
            }
        });
        scope.spawn(|| {
            let mut is_on = options.commit_log.is_some();
            while !stop.load(Ordering::Acquire) {
                is_on = !is_on;
                store.set_commit_log(is_on.then(small_log)).unwrap();
                while store.is_switching_log() {
                    std::thread::yield_now();
                }
                assert_eq!(store.log_stats().is_some(), is_on);
            }
        });
        writers.into_iter().for_each(|writer| writer.join().unwrap());
        stop.store(true, Ordering::Release);
    });
    assert_eq!(wrong.load(Ordering::Relaxed), 0);
    assert!(told.recv_timeout(Duration::from_secs(5)).is_ok());
    assert!(store.drain().left.is_empty());
    assert_eq!(bucket.pending(), 0);

    let (sender, fetched) = mpsc::channel();
    let key = KeyBuf::in_default_collection(b"k0-1").unwrap();
    for vb in 0..VBS {
        let sender = sender.clone();
        bucket.fetch(VbId(vb), key.as_key(), Box::new(move |found| sender.send(found.unwrap()).unwrap()));
    }
    let found = (0..VBS).filter(|_| fetched.recv_timeout(Duration::from_secs(5)).unwrap().is_some()).count();
    assert!(found > 0);
    drop((store, bucket));
    pools.shutdown(Stop::Cancel);
    assert_reopens(&env, dir.path(), options, &logs);
}

fn assert_reopens(env: &Env, dir: &Path, options: &Options, logs: &[Arc<Changelog>]) {
    let pools = Pools::start(env, &PoolConfig::default());
    let store = Store::open(env, &pools, dir, options.clone()).unwrap();
    assert!(store.was_clean());
    let [bucket] = &store.buckets()[..] else { panic!("one bucket, the other was deleted") };
    let highs: Vec<_> = bucket.recovered().iter().map(|r| r.high).collect();
    assert_eq!(highs, logs.iter().map(|log| log.marks.high()).collect::<Vec<_>>());
    for vb in 0..VBS {
        let mut last = Seqno(0);
        let all = WarmUp { tombstones: true, prove: true };
        bucket.warm_up(VbId(vb), all, &mut |_, _| true, &mut |item| last = item.seqno()).unwrap();
        assert_eq!(last, logs[usize::from(vb)].marks.high());
    }
}
