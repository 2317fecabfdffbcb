//! Goal: the model keeps the promises of [`Storage`] and no others. What it may lose must be lost for some
//! seed, or crash tests built on it prove nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::{File, OpenMode, Rng, Storage, read_exact_at, write_all_at};

const FATES: u64 = 200;

fn create(storage: &dyn Storage, path: &str) -> Arc<dyn File> {
    storage.open(Path::new(path), OpenMode::CreateNew).unwrap()
}

fn open(storage: &dyn Storage, path: &str) -> Arc<dyn File> {
    storage.open(Path::new(path), OpenMode::ReadWrite).unwrap()
}

/// A disk with a durable `/d` and a durable `/d/f` of these bytes.
fn with_file(bytes: &[u8]) -> SimStorage {
    let storage = SimStorage::new(1);
    storage.write_file("/d/f", bytes).unwrap();
    storage
}

/// What `path` may be after a cut: every distinct outcome over many seeds.
fn outcomes(storage: &SimStorage, path: &str) -> BTreeSet<Option<Vec<u8>>> {
    (0..FATES).map(|seed| storage.fork().power_cut(seed).read_file(path).ok()).collect()
}

#[derive(Clone, Debug)]
enum Step {
    Write(u16, u8, u16),
    SetSize(u16),
    Sync,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        4 => (0..20_000u16, any::<u8>(), 1..9_000u16).prop_map(|(at, byte, len)| Step::Write(at, byte, len)),
        1 => (0..20_000u16).prop_map(Step::SetSize),
        2 => Just(Step::Sync),
    ];
    prop::collection::vec(step, 0..12)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    /// Every byte after a cut is one the file held at or after its last sync, or a zero in a part that was new.
    #[test]
    fn a_cut_leaves_only_bytes_written_since_the_last_sync_or_synced(steps in steps(), seed: u64) {
        let storage = with_file(b"");
        let file = open(&storage, "/d/f");
        let mut versions = vec![Vec::new()];
        for step in steps {
            match step {
                Step::Write(at, byte, len) => write_all_at(&*file, &vec![byte; len.into()], at.into()).unwrap(),
                Step::SetSize(size) => file.set_size(size.into()).unwrap(),
                Step::Sync => {
                    file.sync().unwrap();
                    versions.clear();
                }
            }
            versions.push(storage.read_file("/d/f").unwrap());
        }
        let (synced, latest) = (versions[0].clone(), versions.last().unwrap().clone());
        prop_assert_eq!(&storage.fork().power_cut(Fate::LoseUnsynced).read_file("/d/f").unwrap(), &synced);
        prop_assert_eq!(&storage.fork().power_cut(Fate::KeepUnsynced).read_file("/d/f").unwrap(), &latest);
        let longest = versions.iter().map(Vec::len).max().unwrap();
        let shortest = versions.iter().map(Vec::len).min().unwrap();
        let after = storage.power_cut(seed).read_file("/d/f").unwrap();
        prop_assert!((shortest..=longest).contains(&after.len()));
        for (at, byte) in after.iter().enumerate() {
            let known = versions.iter().any(|version| version.get(at).copied().unwrap_or(0) == *byte);
            prop_assert!(known, "byte {} at {} was never there", byte, at);
        }
        if versions.len() == 1 {
            prop_assert_eq!(after, synced);
        }
    }

    #[test]
    fn a_loop_that_goes_on_writes_and_reads_exact_bytes_through_any_noise(
        seed: u64,
        writes in prop::collection::vec((0..5000u64, prop::collection::vec(any::<u8>(), 0..600)), 1..20),
    ) {
        let storage = SimStorage::new(seed);
        let file = create(&storage, "f");
        storage.arm(FaultPlan::new().noise(Noise::loud()));
        let mut model = Vec::new();
        for (at, bytes) in &writes {
            write_all_at(&*file, bytes, *at).unwrap();
            let (start, end) = (*at as usize, *at as usize + bytes.len());
            if !bytes.is_empty() {
                model.resize(model.len().max(end), 0);
                model[start..end].copy_from_slice(bytes);
            }
        }
        let mut found = vec![0; model.len()];
        read_exact_at(&*file, &mut found, 0).unwrap();
        prop_assert_eq!(&found, &model);
        prop_assert_eq!(storage.read_file("f").unwrap(), model);
    }

    #[test]
    fn the_same_seed_gives_the_same_run(seed: u64, fate: u64) {
        let run = || {
            let (env, sim) = env(seed);
            sim.storage.arm(FaultPlan::new().noise(Noise::loud()).fail_nth(Op::Sync, 1, libc::EIO));
            for n in 0..4 {
                let file = create(&*env.storage, &format!("{n}"));
                let mut bytes = [0; 3000];
                env.rng.fill(&mut bytes);
                write_all_at(&*file, &bytes, n * 100).unwrap();
                let _ = file.sync();
                write_all_at(&*file, &bytes, n * 4000).unwrap();
            }
            let _ = env.storage.sync_dir(Path::new("/"));
            env.storage.rename(Path::new("1"), Path::new("2")).unwrap();
            sim.storage.power_cut(fate).list_all()
        };
        prop_assert_eq!(run(), run());
    }

    /// Method: random creates, renames and removals of a few names; some directories synced on the way.
    #[test]
    fn a_cut_never_tears_an_entry_and_keeps_what_was_synced(
        seed: u64,
        moves in prop::collection::vec((0..4u8, 0..4usize, 0..4usize), 1..24),
    ) {
        let storage = SimStorage::new(0);
        let mut model: BTreeMap<String, Vec<u8>> = BTreeMap::new();
        let absent = |name: &str| (name.to_owned(), BTreeSet::from([None]));
        let mut allowed: BTreeMap<String, BTreeSet<Option<Vec<u8>>>> =
            ["/0", "/1", "/2", "/3"].map(absent).into();
        for (n, (kind, a, b)) in moves.into_iter().enumerate() {
            let (a, b) = (format!("/{a}"), format!("/{b}"));
            match kind {
                0 if !model.contains_key(&a) => {
                    let file = create(&storage, &a);
                    write_all_at(&*file, &[n as u8 + 1], 0).unwrap();
                    file.sync().unwrap();
                    model.insert(a, vec![n as u8 + 1]);
                }
                1 if model.contains_key(&a) => {
                    storage.rename(Path::new(&a), Path::new(&b)).unwrap();
                    let bytes = model.remove(&a).unwrap();
                    model.insert(b, bytes);
                }
                2 if model.contains_key(&a) => {
                    storage.remove_file(Path::new(&a)).unwrap();
                    model.remove(&a);
                }
                3 => {
                    storage.sync_dir(Path::new("/")).unwrap();
                    allowed.values_mut().for_each(BTreeSet::clear);
                }
                _ => {}
            }
            for (name, outcomes) in &mut allowed {
                outcomes.insert(model.get(name).cloned());
            }
        }
        prop_assert_eq!(&storage.list_all().into_iter().collect::<BTreeMap<_, _>>(), &model);
        let kept: BTreeMap<_, _> = storage.fork().power_cut(Fate::KeepUnsynced).list_all().into_iter().collect();
        prop_assert_eq!(&kept, &model);
        let after: BTreeMap<_, _> = storage.power_cut(seed).list_all().into_iter().collect();
        let distinct: BTreeSet<_> = after.values().collect();
        prop_assert_eq!(distinct.len(), after.len(), "a file has one name");
        for (name, outcomes) in allowed {
            prop_assert!(outcomes.contains(&after.get(&name).cloned()), "{} is none of its versions", name);
        }
    }
}

#[test]
fn every_fate_of_unsynced_writes_happens_for_some_seed() {
    let storage = with_file(&[1; 8192]);
    let file = open(&storage, "/d/f");
    file.write_at(&[2; 4096], 0).unwrap();
    file.write_at(&[3; 4096], 4096).unwrap();
    let found: Vec<Vec<u8>> = outcomes(&storage, "/d/f").into_iter().flatten().collect();
    let has = |test: &dyn Fn(&[u8]) -> bool| found.iter().any(|bytes| test(bytes));
    assert!(has(&|b| b == [1; 8192]), "dropped");
    assert!(has(&|b| b[..4096] == [2; 4096] && b[4096..] == [3; 4096]), "kept");
    assert!(has(&|b| b[..4096] == [1; 4096] && b[4096..] == [3; 4096]), "reordered");
    let seam = |b: &[u8]| b.windows(2).position(|pair| pair[0] != pair[1]).map_or(0, |at| at + 1);
    assert!(has(&|b| seam(b) % 512 != 0), "torn at any byte");
    assert!(has(&|b| seam(b) % 4096 != 0 && seam(b) % 512 == 0), "torn between sectors");
}

#[test]
fn a_grown_size_may_survive_without_its_data_and_data_without_its_size() {
    let storage = with_file(b"old");
    let file = open(&storage, "/d/f");
    file.write_at(&[7; 5000], 0).unwrap();
    let found: Vec<Vec<u8>> = outcomes(&storage, "/d/f").into_iter().flatten().collect();
    assert!(found.iter().any(|bytes| bytes.len() == 5000 && bytes.ends_with(&[0])));
    assert!(found.contains(&vec![7; 3]));
    assert!(found.contains(&b"old".to_vec()));
}

#[test]
fn a_rename_not_followed_by_sync_dir_gives_old_or_new_and_never_neither() {
    let storage = with_file(b"old");
    let file = create(&storage, "/d/f.tmp");
    write_all_at(&*file, b"new", 0).unwrap();
    file.sync().unwrap();
    storage.rename(Path::new("/d/f.tmp"), Path::new("/d/f")).unwrap();
    assert_eq!(outcomes(&storage, "/d/f"), BTreeSet::from([Some(b"old".to_vec()), Some(b"new".to_vec())]));
    storage.sync_dir(Path::new("/d")).unwrap();
    assert_eq!(outcomes(&storage, "/d/f"), BTreeSet::from([Some(b"new".to_vec())]));
}

#[test]
fn a_removal_may_outlive_an_earlier_rename_to_another_name() {
    let storage = with_file(b"old");
    let file = create(&storage, "/d/g.tmp");
    write_all_at(&*file, b"new", 0).unwrap();
    file.sync().unwrap();
    storage.rename(Path::new("/d/g.tmp"), Path::new("/d/g")).unwrap();
    storage.remove_file(Path::new("/d/f")).unwrap();
    let neither = |seed| {
        let after = storage.fork().power_cut(seed);
        after.read_file("/d/f").is_err() && after.read_file("/d/g").is_err()
    };
    assert!((0..FATES).any(neither));
}

#[test]
fn a_file_renamed_twice_has_one_of_its_names_after_a_cut() {
    let storage = with_file(b"x");
    storage.rename(Path::new("/d/f"), Path::new("/d/g")).unwrap();
    storage.rename(Path::new("/d/g"), Path::new("/d/h")).unwrap();
    let names = |seed| storage.fork().power_cut(seed).list(Path::new("/d")).unwrap();
    let found: BTreeSet<Vec<String>> = (0..FATES).map(names).collect();
    assert_eq!(found, ["f", "g", "h"].map(|name| vec![name.to_owned()]).into());
}

#[test]
fn a_sync_of_one_directory_leaves_no_older_change_of_the_other_to_win_later() {
    let storage = with_file(b"x");
    storage.write_file("/e/other", b"").unwrap();
    create(&storage, "/e/f");
    storage.rename(Path::new("/d/f"), Path::new("/e/f")).unwrap();
    storage.sync_dir(Path::new("/d")).unwrap();
    storage.sync_dir(Path::new("/e")).unwrap();
    assert_eq!(outcomes(&storage, "/e/f"), BTreeSet::from([Some(b"x".to_vec())]));
}

#[test]
fn a_synced_file_whose_entry_was_never_synced_may_be_lost() {
    let storage = with_file(b"");
    let file = create(&storage, "/d/g");
    write_all_at(&*file, b"x", 0).unwrap();
    file.sync().unwrap();
    assert_eq!(outcomes(&storage, "/d/g"), BTreeSet::from([None, Some(b"x".to_vec())]));
}

#[test]
fn a_directory_is_durable_only_with_its_parents_entry() {
    let storage = SimStorage::new(1);
    storage.create_dir_all(Path::new("/a/b")).unwrap();
    let file = create(&storage, "/a/b/f");
    write_all_at(&*file, b"x", 0).unwrap();
    file.sync().unwrap();
    for (dir, sure) in [("/a/b", false), ("/a", false), ("/", true)] {
        storage.sync_dir(Path::new(dir)).unwrap();
        assert_eq!(!outcomes(&storage, "/a/b/f").contains(&None), sure, "after sync of {dir}");
    }
}

#[test]
fn a_directory_made_durable_survives_a_cut_with_all_its_parents() {
    let (env, sim) = env(1);
    crate::create_dir_durable(&*env.storage, Path::new("/a/b")).unwrap();
    crate::create_dir_durable(&*env.storage, Path::new("a/b/c/d")).unwrap();
    crate::create_dir_durable(&*env.storage, Path::new("e")).unwrap();
    assert!(!sim.storage.has_unsynced());
    let survivors: Vec<_> = sim.storage.power_cut(Fate::LoseUnsynced).list_all().into_iter().map(|(p, _)| p).collect();
    assert_eq!(survivors, ["/a/", "/a/b/", "/a/b/c/", "/a/b/c/d/", "/e/"]);
}

#[test]
fn files_and_directories_behave_as_the_trait_says() {
    let storage = SimStorage::new(1);
    storage.write_file("/d/x", b"").unwrap();
    storage.remove_file(Path::new("/d/x")).unwrap();
    crate::storage::tests::behaves(&storage, Path::new("/d"));
}

#[test]
fn a_rename_across_directories_is_one_step_whichever_is_synced() {
    for synced in ["/d", "/e", "/"] {
        let storage = with_file(b"x");
        storage.write_file("/e/other", b"").unwrap();
        storage.rename(Path::new("/d/f"), Path::new("/e/f")).unwrap();
        storage.sync_dir(Path::new(synced)).unwrap();
        for seed in 0..FATES {
            let after = storage.fork().power_cut(seed);
            let (old, new) = (after.read_file("/d/f").is_ok(), after.read_file("/e/f").is_ok());
            assert!(old != new && (new || synced == "/"));
        }
    }
}

#[test]
fn a_sync_that_succeeds_after_one_that_failed_brings_nothing_back() {
    let storage = with_file(&[1; 4096]);
    let file = open(&storage, "/d/f");
    let mut fates = BTreeSet::new();
    for n in 0..40 {
        file.write_at(&[1; 4096], 0).unwrap();
        file.sync().unwrap();
        file.write_at(&[2; 4096], 0).unwrap();
        storage.arm(FaultPlan::new().fail_nth(Op::Sync, 0, libc::EIO));
        assert_eq!(file.sync().unwrap_err().raw_os_error(), Some(libc::EIO));
        assert_eq!(storage.read_file("/d/f").unwrap(), [2; 4096], "reads see what the sync failed to keep");
        let before = storage.fork().power_cut(n).read_file("/d/f").unwrap();
        file.sync().unwrap();
        assert_eq!(storage.fork().power_cut(n).read_file("/d/f").unwrap(), before);
        let fork = storage.fork();
        fork.drop_clean_pages();
        assert_eq!(fork.read_file("/d/f").unwrap(), before, "the device can be read before a cut, too");
        fates.insert(before);
    }
    assert!(fates.len() > 3, "its fate is chance");
}

#[test]
fn a_sync_that_lies_keeps_nothing_and_says_ok() {
    let storage = with_file(b"old");
    let file = open(&storage, "/d/f");
    let lie = |op| FaultPlan::new().rule(Rule::new(op, Fault::Lie).path("/d"));
    storage.arm(lie(Op::Sync));
    file.write_at(b"new", 0).unwrap();
    file.sync().unwrap();
    file.sync().unwrap();
    assert_eq!(outcomes(&storage, "/d/f"), BTreeSet::from([Some(b"old".to_vec())]));
    storage.arm(lie(Op::SyncDir));
    storage.remove_file(Path::new("/d/f")).unwrap();
    storage.sync_dir(Path::new("/d")).unwrap();
    assert_eq!(outcomes(&storage, "/d/f"), BTreeSet::from([Some(b"old".to_vec())]));
}

#[test]
fn handles_of_an_earlier_boot_fail_and_count_no_longer() {
    let storage = with_file(b"x");
    let file = open(&storage, "/d/f");
    let reborn = storage.power_cut(3);
    let newer = open(&reborn, "/d/f");
    assert!(is_power_off(&file.sync().unwrap_err()));
    assert!(is_power_off(&file.read_at(&mut [0], 0).unwrap_err()));
    assert!(is_power_off(&storage.exists(Path::new("/d/f")).unwrap_err()));
    assert_eq!(reborn.open_files(), 1);
    drop(file);
    assert_eq!(reborn.open_files(), 1);
    drop(newer);
    assert_eq!(reborn.open_files(), 0);
}

#[test]
fn a_kill_keeps_what_was_written_but_does_not_sync_it() {
    let storage = with_file(b"old");
    open(&storage, "/d/f").write_at(b"new", 0).unwrap();
    let reborn = storage.kill();
    assert_eq!(reborn.read_file("/d/f").unwrap(), b"new");
    assert!(reborn.has_unsynced());
    assert_eq!(reborn.power_cut(Fate::LoseUnsynced).read_file("/d/f").unwrap(), b"old");
}

#[test]
fn from_the_cut_on_every_call_fails_until_the_power_is_back() {
    let storage = with_file(b"old");
    let file = open(&storage, "/d/f");
    storage.arm(FaultPlan::new().cut_before(1));
    file.write_at(b"new", 0).unwrap();
    assert!(file.size().is_ok(), "reading is no reason for the power to go");
    for _ in 0..2 {
        assert!(is_power_off(&file.sync().unwrap_err()));
        assert!(is_power_off(&file.size().unwrap_err()));
    }
    assert_eq!(storage.mutations(), 1);
    assert_eq!(storage.last_mutation().unwrap(), "Write /d/f");
    let reborn = storage.power_cut(Fate::LoseUnsynced);
    assert_eq!(reborn.read_file("/d/f").unwrap(), b"old");
    open(&reborn, "/d/f").sync().unwrap();
}

#[test]
fn rules_count_only_calls_of_their_kind_and_path() {
    let storage = with_file(b"x");
    storage.write_file("/d/log", b"x").unwrap();
    let (file, log) = (open(&storage, "/d/f"), open(&storage, "/d/log"));
    let rule = Rule::new(Op::Sync, Fault::Errno(libc::EIO)).path("log").nth(1).times(2);
    storage.arm(FaultPlan::new().rule(rule).fail_from(Op::Write, 1, libc::EDQUOT));
    let results: Vec<bool> = (0..5).map(|_| file.sync().is_ok() && log.sync().is_ok()).collect();
    assert_eq!(results, [true, false, false, true, true]);
    assert_eq!(storage.count(Op::Sync), 10);
    assert!(file.write_at(b"y", 0).is_ok());
    assert!((0..9).all(|_| file.write_at(b"y", 0).unwrap_err().raw_os_error() == Some(libc::EDQUOT)));
}

#[test]
fn a_rule_by_chance_strikes_some_calls() {
    let storage = with_file(b"x");
    let file = open(&storage, "/d/f");
    let rule = Rule::new(Op::Read, Fault::Errno(libc::EIO)).sticky().chance_permille(250);
    storage.arm(FaultPlan::new().rule(rule));
    let failed = (0..1000).filter(|_| file.read_at(&mut [0], 0).is_err()).count();
    assert!((150..350).contains(&failed), "{failed}");
}

#[test]
fn a_limit_of_open_files_is_reached_and_never_passed() {
    let storage = with_file(b"x");
    storage.arm(FaultPlan::new().open_files_max(2));
    let held = (open(&storage, "/d/f"), open(&storage, "/d/f"));
    let refused = |result: std::io::Result<()>| assert_eq!(result.unwrap_err().raw_os_error(), Some(libc::EMFILE));
    refused(storage.open(Path::new("/d/f"), OpenMode::Read).map(drop));
    refused(storage.open(Path::new("/d/g"), OpenMode::CreateNew).map(drop));
    refused(storage.list(Path::new("/d")).map(drop));
    refused(storage.sync_dir(Path::new("/d")));
    assert!(!storage.exists(Path::new("/d/g")).unwrap());
    drop(held.0);
    create(&storage, "/d/g");
    assert_eq!(storage.open_files(), 1);
}

#[test]
fn a_full_disk_takes_what_fits_and_recovers_when_space_is_freed() {
    let storage = SimStorage::new(1);
    storage.write_file("big", &[1; 600]).unwrap();
    storage.arm(FaultPlan::new().space_bytes_max(1000));
    let file = create(&storage, "f");
    assert_eq!(file.write_at(&[2; 500], 0).unwrap(), 400);
    let full = |result: std::io::Result<usize>| assert_eq!(result.unwrap_err().raw_os_error(), Some(libc::ENOSPC));
    full(file.write_at(&[2; 100], 400));
    full(file.set_size(401).map(|()| 0));
    full(storage.open(Path::new("g"), OpenMode::CreateNew).map(|_| 0));
    assert_eq!(file.write_at(&[3; 400], 0).unwrap(), 400, "overwriting needs no space");
    let big = open(&storage, "big");
    storage.remove_file(Path::new("big")).unwrap();
    full(file.write_at(&[2; 100], 400));
    drop(big);
    assert_eq!(storage.used_bytes(), 400);
    assert_eq!(file.write_at(&[2; 600], 400).unwrap(), 600);
}

#[test]
fn a_removed_file_is_readable_by_who_has_it_open() {
    let storage = with_file(b"x");
    let file = open(&storage, "/d/f");
    storage.remove_file(Path::new("/d/f")).unwrap();
    storage.sync_dir(Path::new("/d")).unwrap();
    for n in 0..600 {
        let path = format!("/d/{n}");
        drop(create(&storage, &path));
        storage.remove_file(Path::new(&path)).unwrap();
        storage.sync_dir(Path::new("/d")).unwrap();
    }
    assert_eq!(file.read_at(&mut [0; 9], 0).unwrap(), 1);
    file.write_at(b"yy", 0).unwrap();
    file.sync().unwrap();
    assert_eq!(storage.power_cut(0).list_all(), [("/d/".to_owned(), Vec::new())]);
}

#[test]
fn misuse_gets_the_operating_systems_errors() {
    let storage = with_file(b"x");
    let code = |result: std::io::Result<()>| result.unwrap_err().raw_os_error().unwrap();
    let path = Path::new;
    assert_eq!(code(storage.open(path("/d/g"), OpenMode::Read).map(drop)), libc::ENOENT);
    assert_eq!(code(storage.open(path("/d"), OpenMode::ReadWrite).map(drop)), libc::EISDIR);
    assert_eq!(code(storage.open(path("/d/f"), OpenMode::CreateNew).map(drop)), libc::EEXIST);
    assert_eq!(code(storage.open(path("/x/f"), OpenMode::CreateNew).map(drop)), libc::ENOENT);
    assert_eq!(code(storage.remove_dir(path("/d"))), libc::ENOTEMPTY);
    assert_eq!(code(storage.rename(path("/d"), path("/d/e"))), libc::EINVAL);
    assert_eq!(code(storage.create_dir_all(path("/d/f/g"))), libc::ENOTDIR);
    let reader = storage.open(path("/d/f"), OpenMode::Read).unwrap();
    assert_eq!(code(reader.write_at(b"y", 0).map(drop)), libc::EBADF);
    assert_eq!(reader.read_at(&mut [0], u64::MAX).unwrap(), 0);
}

#[test]
fn a_flipped_bit_is_seen_at_once_and_after_a_cut() {
    let storage = with_file(&[0; 4]);
    storage.corrupt("/d/f", 2, 0x10).unwrap();
    assert_eq!(storage.read_file("/d/f").unwrap(), [0, 0, 0x10, 0]);
    assert!(storage.corrupt("/d/f", 4, 1).is_err());
    assert_eq!(storage.power_cut(0).read_file("/d/f").unwrap(), [0, 0, 0x10, 0]);
}

#[test]
fn clocks_move_only_when_told_and_a_wall_jump_is_no_time() {
    let (env, sim) = env(1);
    let start = env.clock.unix_ns();
    sim.clock.advance(Duration::from_secs(2));
    sim.clock.jump_wall(-5_000_000_000);
    assert_eq!(env.clock.unix_ns(), start - 3_000_000_000);
    assert_eq!(env.clock.monotonic(), Duration::from_secs(2));
}

#[test]
fn two_seeds_give_two_streams_and_one_seed_one() {
    let three = |seed| {
        let rng = SimRng::new(seed);
        [rng.u64(), rng.u64(), rng.u64()]
    };
    assert_eq!(three(1), three(1));
    assert!(three(1).iter().all(|n| !three(2).contains(n)));
}

/// The classic way to replace a file; the flags are what a careless author forgets.
fn replace(env: &Env, sync_file: bool, sync_dir: bool) -> std::io::Result<()> {
    let storage = &*env.storage;
    for bytes in [b"one", b"two"] {
        let file = storage.open(Path::new("/tmp"), OpenMode::CreateNew)?;
        write_all_at(&*file, bytes, 0)?;
        if sync_file {
            file.sync()?;
        }
        storage.rename(Path::new("/tmp"), Path::new("/f"))?;
        if sync_dir {
            storage.sync_dir(Path::new("/"))?;
        }
    }
    Ok(())
}

fn survives(sync_file: bool, sync_dir: bool) -> bool {
    std::panic::catch_unwind(|| {
        let workload = |env: &Env| replace(env, sync_file, sync_dir).is_ok();
        cut_everywhere(&env(5).1, 50, workload, |sim, acked| {
            let mut bytes = [0; 3];
            let found = sim.storage.open(Path::new("/f"), OpenMode::Read);
            let whole = found.and_then(|file| read_exact_at(&*file, &mut bytes, 0)).is_ok();
            assert!(!whole || &bytes == b"one" || &bytes == b"two");
            assert!(!acked || (whole && &bytes == b"two"));
        });
    })
    .is_ok()
}

#[test]
fn a_careful_replacement_survives_a_cut_anywhere_and_a_careless_one_is_caught() {
    assert!(survives(true, true));
    assert!(!survives(false, true));
    assert!(!survives(true, false));
}

#[test]
fn cut_points_are_as_many_as_mutating_calls() {
    assert_eq!(count_ops(&env(1).1, |env| replace(env, true, true).unwrap()), 10);
}

/// Goal: crashes can be nested. Method: a move by copy and remove, redone at start, cut at every step of both.
#[test]
fn recovery_can_be_cut_in_its_turn() {
    let resume = |env: &Env| -> std::io::Result<()> {
        let storage = &*env.storage;
        let (from, to, temp) = (Path::new("/d/f"), Path::new("/d/g"), Path::new("/d/g.tmp"));
        if storage.exists(temp)? {
            storage.remove_file(temp)?;
        }
        if storage.exists(from)? {
            let file = storage.open(temp, OpenMode::CreateNew)?;
            write_all_at(&*file, b"x", 0)?;
            file.sync()?;
            storage.rename(temp, to)?;
            storage.sync_dir(Path::new("/d"))?;
            storage.remove_file(from)?;
        }
        storage.sync_dir(Path::new("/d"))
    };
    let start = env(9).1;
    start.storage.write_file("/d/f", b"x").unwrap();
    let whole = |storage: &SimStorage, path| storage.read_file(path).is_ok_and(|bytes| bytes == b"x");
    cut_everywhere(&start, 4, resume, |sim, _| {
        cut_everywhere(sim, 4, resume, |sim, done| {
            assert!(whole(&sim.storage, "/d/f") || whole(&sim.storage, "/d/g"));
            resume(&sim.env()).unwrap();
            assert!(done.is_err() || !sim.storage.exists(Path::new("/d/f")).unwrap());
            assert_eq!(sim.storage.list_all(), [("/d/".into(), Vec::new()), ("/d/g".into(), b"x".to_vec())]);
        });
    });
}
