//! What a start makes of what it finds: leftovers go, the newest whole file counts, damage is refused and told.

mod rig;

use std::path::Path;
use std::time::Duration;

use env::Env;
use env::sim::{self, Sim};
use persist::{Options, Store, StoreError, Verdict, WarmUp};
use rig::{History, Node, Seed, assert_holds, file, record, spec};
use types::{KeyBuf, Kind, Level, Seqno, VbId, VbState, VbUuid};

/// A stopped store with two changes in vBucket 0, each in a commit of its own.
fn written() -> (Sim, History) {
    let (env, mut sim) = sim::env(3);
    let node = Node::start(&env, 3).unwrap();
    let mut history = History { bucket_made: true, ..History::default() };
    for value in [b"one", b"two"] {
        history.changes.entry(0).or_default().push(node.set(0, "a", value));
        node.run();
    }
    history.durable.insert(0, 2);
    drop(node);
    sim.power_cut(sim::Fate::LoseUnsynced);
    (sim, history)
}

fn open_error(env: &Env, options: Options) -> StoreError {
    Node::start_with(env, 1, options).err().expect("refused")
}

fn names(sim: &Sim) -> Vec<String> {
    sim.env().storage.list(Path::new("/data/buckets/b")).unwrap()
}

#[test]
fn leftovers_are_removed_and_what_is_not_ours_is_left_alone() {
    let (sim, history) = written();
    for name in ["0.couch.boot", "3.couch.boot", "0.couch.1.compact", "bucket.json.tmp", "notes.txt", "9.couch.1"] {
        sim.storage.write_file(Path::new("/data/buckets/b").join(name), b"junk").unwrap();
    }
    for name in ["x~new", "y~0~gone"] {
        sim.env().storage.create_dir_all(&Path::new("/data/buckets").join(name)).unwrap();
        sim.storage.write_file(Path::new("/data/buckets").join(name).join("1.couch.1"), b"junk").unwrap();
    }
    drop(Node::start(&sim.env(), 1).unwrap());
    assert_eq!(names(&sim), ["0.couch.1", "9.couch.1", "bucket.json", "notes.txt"]);
    assert_eq!(sim.env().storage.list(Path::new("/data/buckets")).unwrap(), ["b"]);
    drop(assert_holds(&sim.env(), &history));
}

/// S17: a newer file that was never in use must not hide a good older one, nor be thrown away.
#[test]
fn a_bogus_newer_generation_is_set_aside_and_the_good_one_used() {
    let (_, history) = written();
    let good = |sim: &Sim| sim.storage.read_file(file(0, 1)).unwrap();
    type Bogus = fn(&[u8]) -> Vec<u8>;
    let bogus: [(&str, Bogus); 5] = [
        ("cut back to an earlier commit", |good| good[..8192].to_vec()),
        ("zero length", |_| Vec::new()),
        ("garbage", |_| vec![0xa5; 9000]),
        ("cut before its only commit", |good| good[..4096].to_vec()),
        ("zeros", |good| vec![0; good.len()]),
    ];
    for (what, make) in bogus {
        let (sim, _) = written();
        let bytes = make(&good(&sim));
        sim.storage.write_file(file(0, 2), &bytes).unwrap();
        let node = Node::start(&sim.env(), 1).unwrap_or_else(|e| panic!("{what}: {e}"));
        assert_eq!(names(&sim), ["0.couch.1", "0.couch.2.aside", "bucket.json"], "{what}");
        assert_eq!(sim.storage.read_file("/data/buckets/b/0.couch.2.aside").unwrap(), bytes);
        drop(node);
        drop(assert_holds(&sim.env(), &history));
    }
}

#[test]
fn of_two_whole_generations_the_newer_counts_and_the_older_goes() {
    let (sim, history) = written();
    let bytes = sim.storage.read_file(file(0, 1)).unwrap();
    sim.storage.write_file(file(0, 12), &bytes).unwrap();
    let node = Node::start(&sim.env(), 1).unwrap();
    assert_eq!(node.bucket.recovered()[0].file, "0.couch.12");
    assert_eq!(names(&sim), ["0.couch.12", "bucket.json"]);
    drop(node);
    drop(assert_holds(&sim.env(), &history));
}

/// A newer generation that was in use and is damaged may hold acknowledged changes: that is for a person to decide.
#[test]
fn a_damaged_newer_generation_that_was_in_use_is_refused() {
    let (sim, _) = written();
    let mut bytes = sim.storage.read_file(file(0, 1)).unwrap();
    let newest = bytes.len() - bytes.len() % 4096;
    bytes[newest + 10] ^= 1;
    sim.storage.write_file(file(0, 2), &bytes).unwrap();
    assert_eq!(open_error(&sim.env(), Options::default()).verdict(), Verdict::Abort);
    assert_eq!(names(&sim), ["0.couch.1", "0.couch.2", "bucket.json"], "nothing is touched");
}

/// S32: damage is refused, naming every file, the place, the loss and what can be done; the recovery option goes back to
/// the newest commit that is whole, says so, and the next strict start takes it.
#[test]
fn a_damaged_file_is_refused_with_what_is_lost_and_what_to_do() {
    let (sim, _) = written();
    let node = Node::start(&sim.env(), 1).unwrap();
    node.set(2, "z", b"in another file");
    node.run();
    drop(node);
    let newest = |vb| (sim.storage.read_file(file(vb, 1)).unwrap().len() as u64) / 4096 * 4096;
    sim.storage.corrupt(file(0, 1), newest(0) + 9, 0x40).unwrap();
    sim.storage.write_file(file(2, 1), b"").unwrap();

    let error = open_error(&sim.env(), Options::default());
    let text = error.to_string();
    assert_eq!(error.verdict(), Verdict::Abort);
    for part in [
        &*format!("/data/buckets/b/0.couch.1@{}", newest(0)),
        "vBucket 0: every change after seqno 1; up to 1 documents",
        "/data/buckets/b/2.couch.1",
        "vBucket 2: all its documents",
        "settee file check",
        "backup",
    ] {
        assert!(text.contains(part), "{part} is not in:\n{text}");
    }

    let rescue = Options { recovery: true, ..Options::default() };
    let text = open_error(&sim.env(), rescue.clone()).to_string();
    assert!(!text.contains("0.couch.1") && text.contains("2.couch.1"), "an empty file cannot be rescued:\n{text}");
    sim.env().storage.remove_file(&file(2, 1)).unwrap();
    let node = Node::start_with(&sim.env(), 1, rescue).unwrap();
    let recovered = node.bucket.recovered();
    assert_eq!((recovered.len(), recovered[0].high), (1, Seqno(1)));
    let histories = recovered[0].record.failover.newest_first();
    assert_eq!((histories.len(), histories[0].seqno), (2, Seqno(1)), "peers can tell");
    drop(node);
    let node = Node::start(&sim.env(), 1).unwrap();
    assert_eq!(node.warm_up(0)[0].value(), b"one");
    node.set(0, "b", b"goes on");
    node.run();
    assert_eq!(node.durable(0), 2);
}

/// All but the one byte that makes the newest commit's header a header: without it, the file is as it was just before that
/// commit, which is a state a crash may leave.
#[test]
fn any_flipped_bit_is_found_or_harmless() {
    let (sim, history) = written();
    let len = sim.storage.read_file(file(0, 1)).unwrap().len() as u64;
    let newest = len / 4096 * 4096;
    for at in (0..len).filter(|at| *at != newest) {
        let _seed = Seed(at);
        let world = sim.fork();
        world.storage.corrupt(file(0, 1), at, 1 << (at % 8)).unwrap();
        let Ok(node) = Node::start(&world.env(), 1) else { continue };
        let mut items = Vec::new();
        let all = WarmUp { tombstones: true, prove: true };
        if node.bucket.warm_up(VbId(0), all, &mut |_, _| true, &mut |item| items.push(item)).is_ok() {
            assert_eq!(items.len(), 1, "never silently nothing");
            assert_eq!(items[0].meta(), history.changes[&0][1].meta());
            assert_eq!(items[0].value(), b"two");
        }
        let key = KeyBuf::in_default_collection(b"a").unwrap();
        assert!(!matches!(node.bucket.fetch_now(VbId(0), key.as_key()), Ok(None)), "never \"not found\"");
    }
}

#[test]
fn a_missing_or_damaged_spec_is_damage() {
    for bytes in [&b"{"[..], b""] {
        let (sim, _) = written();
        sim.storage.write_file("/data/buckets/b/bucket.json", bytes).unwrap();
        let error = open_error(&sim.env(), Options::default());
        assert!(matches!(error, StoreError::Damaged(_)) && error.to_string().contains("bucket.json"), "{error}");
    }
}

/// S37: only a drain that left nothing behind makes the next start a clean one, and only one.
#[test]
fn a_stop_is_clean_only_after_a_whole_drain() {
    let (env, mut sim) = sim::env(5);
    let node = Node::start(&env, 5).unwrap();
    assert!(node.store.was_clean(), "nothing came before");
    node.set(0, "a", b"one");
    node.store.start_drain();
    node.run();
    assert!(node.store.drain().left.is_empty());
    assert_eq!(node.bucket.pending(), 0);
    drop(node);

    let node = Node::start(&sim.power_cut(sim::Fate::LoseUnsynced), 5).unwrap();
    assert!(node.store.was_clean());
    drop(node);
    let node = Node::start(&sim.power_cut(sim::Fate::LoseUnsynced), 5).unwrap();
    assert!(!node.store.was_clean(), "the mark was taken back at once");
    drop(node);
    for cut in 0..12 {
        let mut world = sim.fork();
        let node = Node::start(&world.env(), 5).unwrap();
        world.storage.arm(sim::FaultPlan::new().cut_before(cut));
        let changed = node.set(0, "a", b"two").seqno().0;
        node.store.start_drain();
        node.run();
        node.stepper.advance(Duration::from_secs(30));
        if node.bucket.pending() > 0 {
            continue;
        }
        let _ = node.store.drain();
        drop(node);
        let node = Node::start(&world.power_cut(cut), 5).unwrap();
        assert!(!node.store.was_clean() || node.logs[0].marks.durable().0 == changed, "cut {cut}");
    }
}

#[test]
fn a_record_is_kept_with_its_topology_and_history() {
    let (env, mut sim) = sim::env(6);
    let node = Node::start(&env, 6).unwrap();
    node.set(0, "a", b"one");
    node.run();
    assert_eq!(node.bucket.recorded(VbId(0)), Some(0));
    let commits = node.bucket.stats().commits;
    let mut changed = record(VbState::Replica);
    changed.failover.begin(changelog::FailoverEntry { uuid: VbUuid(99), seqno: Seqno(1) });
    changed.topology = vec![vec![Some("n1".into()), None]];
    for vb in [0, 1] {
        node.logs[vb].set_record(changed.clone());
        node.bucket.changed(VbId(vb as u16), persist::Urgency::Normal);
    }
    node.run();
    assert_eq!((node.bucket.recorded(VbId(0)), node.bucket.recorded(VbId(1))), (Some(1), Some(1)));
    // The same once more is not worth a commit.
    node.logs[0].set_record(changed.clone());
    node.bucket.changed(VbId(0), persist::Urgency::Normal);
    node.run();
    assert_eq!((node.bucket.recorded(VbId(0)), node.bucket.stats().commits), (Some(2), commits + 2));
    drop(node);
    let node = Node::start(&sim.power_cut(sim::Fate::LoseUnsynced), 6).unwrap();
    let recovered = node.bucket.recovered();
    assert_eq!(recovered.iter().map(|r| (r.vb.0, r.high.0)).collect::<Vec<_>>(), [(0, 1), (1, 0)]);
    assert!(recovered.iter().all(|r| r.record == changed));
    assert_eq!(node.bucket.stats().commits, 0, "nothing changed since");
}

#[test]
fn many_changes_of_a_key_in_one_flush_leave_the_newest() {
    let (env, mut sim) = sim::env(7);
    let node = Node::start(&env, 7).unwrap();
    let mut history = History { bucket_made: true, ..History::default() };
    let changes = history.changes.entry(0).or_default();
    for n in 0..50u64 {
        let key = format!("k{}", n % 3);
        let prepare = node.put(0, &key, Some(b"p"), Kind::Prepare { level: Level::Majority });
        let prepared = prepare.seqno();
        changes.push(prepare);
        changes.push(node.put(0, &key, Some(b"p"), Kind::Committed { prepared: Some(prepared) }));
    }
    node.run();
    history.durable.insert(0, 100);
    let stats = node.bucket.stats();
    assert_eq!((stats.commits, stats.items_written, stats.items_deduplicated), (1, 3, 97));
    drop(node);
    drop(assert_holds(&sim.power_cut(sim::Fate::LoseUnsynced), &history));
}

/// Values not wanted stay in the file, and are fetched whole.
#[test]
fn values_left_behind_by_warm_up_can_be_fetched() {
    let (env, mut sim) = sim::env(8);
    let node = Node::start(&env, 8).unwrap();
    let big = vec![b'x'; 100_000];
    node.set(0, "big", &big);
    node.set(0, "empty", b"");
    node.put(0, "gone", None, Kind::Committed { prepared: None });
    node.run();
    drop(node);
    let node = Node::start(&sim.power_cut(sim::Fate::LoseUnsynced), 8).unwrap();
    let mut items = Vec::new();
    let mut sizes = Vec::new();
    let mut none = |_: &types::Meta, bytes| {
        sizes.push(bytes);
        false
    };
    node.bucket.warm_up(VbId(0), WarmUp::default(), &mut none, &mut |item| items.push(item)).unwrap();
    assert_eq!(items.len(), 2, "tombstones come only if asked for");
    assert!(items.iter().all(|item| !item.resident()));
    assert!(sizes.len() == 2 && sizes[0] < big.len() / 10 && sizes[1] == 0, "compressed in the file: {sizes:?}");
    let fetched = node.bucket.fetch_now(VbId(0), items[0].key()).unwrap().unwrap();
    assert!(fetched.value() == big && fetched.meta() == items[0].meta());
    let gone = KeyBuf::in_default_collection(b"gone").unwrap();
    assert!(node.bucket.fetch_now(VbId(0), gone.as_key()).unwrap().unwrap().is_deleted());
}

#[test]
fn a_deleted_bucket_is_gone_and_its_name_free() {
    let (env, mut sim) = sim::env(9);
    let node = Node::start(&env, 9).unwrap();
    let item = node.set(0, "a", b"one");
    node.run();
    node.set(0, "a", b"two");
    assert!(matches!(node.store.create_bucket(spec()), Err(StoreError::BucketExists(_))));
    node.store.delete_bucket("b").unwrap();
    assert!(matches!(node.store.delete_bucket("b"), Err(StoreError::NoSuchBucket(_))));
    node.run();
    assert!(node.bucket.fetch_now(VbId(0), item.key()).is_err(), "not \"not found\"");
    assert!(node.store.buckets().is_empty());
    assert!(node.store.create_bucket(spec()).unwrap().recovered().is_empty());
    let bad = persist::BucketSpec { name: "../x".into(), ..spec() };
    assert!(matches!(node.store.create_bucket(bad), Err(StoreError::BadName(_))));
    drop(node);
    let node = Node::start(&sim.power_cut(sim::Fate::LoseUnsynced), 9).unwrap();
    assert!(node.bucket.recovered().is_empty());
}

/// A bucket is made and removed whole or not at all, whenever the power goes.
#[test]
fn power_loss_leaves_a_bucket_or_none() {
    let open = |env: &Env| {
        let stepper = scheduler::Stepper::new(&sim::SimClock::new(), scheduler::Order::InTurn);
        Store::open(env, &stepper.pools(), Path::new(rig::DATA), Options::default())
    };
    let make = |env: &Env| open(env).is_ok_and(|store| store.create_bucket(spec()).is_ok());
    let (_, start) = sim::env(10);
    sim::cut_everywhere(&start, 2, make, |world, &made| {
        let store = open(&world.env()).unwrap();
        assert!(!made || store.buckets().len() == 1, "an acknowledged bucket is there");
        if store.buckets().is_empty() {
            store.create_bucket(spec()).unwrap();
        }
    });
    assert!(make(&start.env()));
    let remove = |env: &Env| open(env).is_ok_and(|store| store.delete_bucket("b").is_ok());
    sim::cut_everywhere(&start, 2, remove, |world, &removed| {
        let store = open(&world.env()).unwrap();
        assert!(!removed || store.buckets().is_empty(), "a removed bucket stays away");
        let _ = store.delete_bucket("b");
        store.create_bucket(spec()).unwrap();
    });
}
