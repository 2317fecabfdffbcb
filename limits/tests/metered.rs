//! Metered storage: permits out are descriptors open, and an open without a descriptor is survived or reported.

use std::collections::VecDeque;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use env::sim::{Fault, FaultPlan, Op, Rule, Sim};
use env::{Durable, File, OpenMode, Storage};
use limits::{Class, GiveBack, Ledger, Metered, Plan, Wish, Wishes, is_exhausted};
use proptest::prelude::*;

const EIO: i32 = 5;
const ENFILE: i32 = 23;
const EMFILE: i32 = 24;
const FILES: u32 = 40;

fn world() -> (Sim, Arc<Ledger>, Metered) {
    let (env, sim) = env::sim::env(7);
    let wishes = Wishes { connections_max: Wish::Default(100), files_max: Wish::Asked(FILES), workers: 4 };
    let ledger = Ledger::new(&Plan::for_limit(256, wishes).unwrap());
    let storage = Metered::new(env.storage, Arc::clone(&ledger), Class::Files);
    storage.create_dir_all(Path::new("d")).unwrap();
    (sim, ledger, storage)
}

/// Files kept open in case they are read again, as a file cache does.
#[derive(Default)]
struct Cache(Mutex<VecDeque<Arc<dyn File>>>);

impl Cache {
    fn fill(&self, storage: &Metered, count: u32) {
        for n in 0..count {
            let file = storage.open(Path::new(&format!("d/cached{n}")), OpenMode::CreateNew).unwrap();
            self.0.lock().unwrap().push_back(file);
        }
    }
}

impl GiveBack for Cache {
    fn give_back(&self, wanted: u32) -> u32 {
        let mut files = self.0.lock().unwrap();
        let count = files.len().min(wanted as usize);
        let closed: Vec<_> = files.drain(..count).collect();
        drop(files);
        closed.len() as u32
    }
}

/// What a flush, a compaction and a recovery do with descriptors. All it opened is closed at the end.
fn workload(storage: &Metered) -> io::Result<()> {
    let dir = Path::new("d");
    for round in 0..3 {
        let (new, old) = (dir.join(format!("new{round}")), dir.join("current"));
        let file = storage.open(&new, OpenMode::CreateNew)?;
        env::write_all_at(&*file, b"bytes", 0)?;
        file.sync()?;
        storage.rename(&new, &old)?;
        storage.sync_dir(dir)?;
        let again = storage.open(&old, OpenMode::ReadWrite)?;
        let reader = storage.open(&old, OpenMode::Read)?;
        assert_eq!(again.size()?, reader.size()?);
        assert!(storage.list(dir)?.contains(&"current".to_owned()));
    }
    storage.remove_file(&dir.join("current"))
}

/// Goal: no open site is lost to one refusal, at any place. Method: each call in turn meets EMFILE or ENFILE once.
#[test]
fn each_open_in_turn_survives_a_missing_descriptor() {
    for (op, errno) in [(Op::Open, EMFILE), (Op::Open, ENFILE), (Op::Create, EMFILE), (Op::List, ENFILE)] {
        let (sim, ledger, storage) = world();
        workload(&storage).unwrap();
        let calls = sim.storage.count(op);
        assert!(calls >= 3);
        for n in 0..calls {
            sim.storage.arm(FaultPlan::new().fail_nth(op, n, errno));
            workload(&storage).unwrap();
            assert_eq!(ledger.stats().exhausted, n + 1);
            assert_eq!((ledger.out(Class::Files), sim.storage.open_files()), (0, 0));
        }
    }
}

/// Goal: out of descriptors for good is an error with a name, leaks nothing, and passes. Method: from each call on,
/// nothing opens; then the fault is lifted.
#[test]
fn from_each_open_on_a_lasting_shortage_is_reported_and_passes() {
    for op in [Op::Open, Op::Create, Op::List] {
        let (sim, ledger, storage) = world();
        workload(&storage).unwrap();
        for n in 0..sim.storage.count(op) {
            sim.storage.arm(FaultPlan::new().fail_from(op, n, EMFILE));
            assert!(is_exhausted(&workload(&storage).unwrap_err()));
            assert_eq!((ledger.out(Class::Files), sim.storage.open_files()), (0, 0));
            sim.storage.arm(FaultPlan::new());
            for name in storage.list(Path::new("d")).unwrap() {
                storage.remove_file(&Path::new("d").join(name)).unwrap();
            }
            workload(&storage).unwrap();
        }
    }
}

/// Goal: cached files never stand in the way. Method: a cache holds every descriptor there is, of the system's or of
/// the class's; the workload goes through all the same.
#[test]
fn a_cache_that_holds_every_descriptor_gives_way() {
    for systems in [true, false] {
        let (sim, ledger, storage) = world();
        let cache = Arc::new(Cache::default());
        ledger.on_pressure(Class::Files, Arc::downgrade(&cache) as _);
        cache.fill(&storage, if systems { 8 } else { FILES });
        if systems {
            sim.storage.set_open_files_max(Some(8));
        }
        workload(&storage).unwrap();
        let stats = ledger.stats();
        assert_eq!((stats.exhausted > 0, stats.given_back > 0), (systems, true));
        assert_eq!(stats.classes[Class::Files as usize].refusals, 0);
        assert_eq!(u64::from(ledger.out(Class::Files)), sim.storage.open_files());
    }
}

#[test]
fn a_directory_is_synced_and_listed_within_the_limit() {
    let (sim, ledger, storage) = world();
    let cache = Arc::new(Cache::default());
    ledger.on_pressure(Class::Files, Arc::downgrade(&cache) as _);
    for call in [|s: &Metered| s.sync_dir(Path::new("d")), |s: &Metered| s.list(Path::new("d")).map(drop)] {
        sim.storage.set_open_files_max(None);
        let opened = storage.list(Path::new("d")).unwrap().len();
        let file = storage.open(Path::new(&format!("d/f{opened}")), OpenMode::CreateNew).unwrap();
        cache.0.lock().unwrap().push_back(file);
        sim.storage.set_open_files_max(Some(1));
        call(&storage).unwrap();
        assert_eq!((ledger.out(Class::Files), sim.storage.open_files()), (0, 0));
        sim.storage.set_open_files_max(Some(0));
        assert!(is_exhausted(&call(&storage).unwrap_err()));
    }
    assert_eq!(ledger.stats().classes[Class::Files as usize].high_water, 2, "the call held a permit, too");
}

#[test]
fn a_class_that_is_used_up_opens_nothing_and_says_which() {
    let (sim, ledger, storage) = world();
    let files: Vec<_> = (0..FILES).map(|n| storage.open(Path::new(&format!("d/{n}")), OpenMode::CreateNew)).collect();
    let created = sim.storage.count(Op::Create);
    let refusal = storage.open(Path::new("d/x"), OpenMode::CreateNew).err().unwrap();
    assert!(is_exhausted(&refusal) && refusal.to_string().contains("all 40 descriptors for files"), "{refusal}");
    assert_eq!(sim.storage.count(Op::Create), created, "without a permit nothing is tried");
    // Another class has its own.
    let background = storage.for_class(Class::Background);
    let file = background.open(Path::new("d/x"), OpenMode::CreateNew).unwrap();
    assert_eq!((ledger.out(Class::Files), ledger.out(Class::Background)), (FILES, 1));
    drop((files, file));
    assert_eq!((ledger.out(Class::Files), ledger.out(Class::Background)), (0, 0));
}

#[test]
fn the_path_can_choose_the_class() {
    let (sim, ledger, _) = world();
    let by_path = |path: &Path| match path.extension() {
        Some(extension) if extension == "compact" => Class::Background,
        _ => Class::Files,
    };
    let storage = Metered::by_path(sim.env().storage, Arc::clone(&ledger), by_path);
    let _files =
        ["d/1.couch.2", "d/1.couch.3.compact"].map(|path| storage.open(Path::new(path), OpenMode::CreateNew).unwrap());
    assert_eq!((ledger.out(Class::Files), ledger.out(Class::Background)), (1, 1));
}

/// Method: real files, and the kernel's own list of what is open.
#[test]
fn permits_out_are_what_the_kernel_lists_as_open() {
    let dir = tempfile::tempdir().unwrap();
    let (_, ledger, _) = world();
    let storage = Metered::new(env::os::env().storage, Arc::clone(&ledger), Class::Files);
    let of_ours = |name: io::Result<std::fs::DirEntry>| {
        let target = std::fs::read_link(name.unwrap().path());
        target.is_ok_and(|target| target.starts_with(dir.path()))
    };
    let open_now = || std::fs::read_dir("/proc/self/fd").unwrap().filter_map(|n| of_ours(n).then_some(())).count();
    let mut files = Vec::new();
    for n in 0..20 {
        files.push(storage.open(&dir.path().join(n.to_string()), OpenMode::CreateNew).unwrap());
        assert!(storage.open(&dir.path().join("missing"), OpenMode::Read).is_err());
        assert_eq!(storage.list(dir.path()).unwrap().len(), n + 1);
        storage.sync_dir(dir.path()).unwrap();
        assert_eq!(open_now(), ledger.out(Class::Files) as usize);
    }
    assert_eq!(open_now(), 20);
    files.truncate(3);
    assert_eq!((open_now(), ledger.out(Class::Files)), (3, 3));
    let open_durable = |storage: &dyn Storage| storage.open_durable(&dir.path().join("0"), Durable::Direct).unwrap();
    let durable = open_durable(&storage);
    assert_eq!(durable.is_some(), open_durable(&*env::os::env().storage).is_some());
    let open = 3 + usize::from(durable.is_some());
    assert_eq!((open_now(), ledger.out(Class::Files) as usize), (open, open));
}

/// Goal: the kernel's refusal is survived, not only the simulated one. Method: this test again, in a process that may
/// have 40 files open, with a cache that takes all of them before its class is used up.
#[test]
fn the_kernels_own_limit_is_survived() {
    const INSIDE: &str = "SETTEE_TEST_FEW_DESCRIPTORS";
    if std::env::var_os(INSIDE).is_none() {
        let again = "ulimit -n 40 && exec \"$0\" --exact the_kernels_own_limit_is_survived --nocapture";
        let this = std::env::current_exe().unwrap();
        let child = std::process::Command::new("sh").args(["-c", again]).arg(this).env(INSIDE, "1").output().unwrap();
        let said = String::from_utf8_lossy(&child.stdout);
        assert!(
            child.status.success() && said.contains("1 passed"),
            "{said}{}",
            String::from_utf8_lossy(&child.stderr)
        );
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (_, ledger, _) = world();
    let storage = Metered::new(env::os::env().storage, Arc::clone(&ledger), Class::Files);
    let cache = Arc::new(Cache::default());
    ledger.on_pressure(Class::Files, Arc::downgrade(&cache) as _);
    for n in 0..200 {
        let file = storage.open(&dir.path().join(n.to_string()), OpenMode::CreateNew).unwrap();
        cache.0.lock().unwrap().push_back(file);
        storage.sync_dir(dir.path()).unwrap();
        assert_eq!(storage.list(dir.path()).unwrap().len(), n + 1);
    }
    let stats = ledger.stats();
    assert!(stats.exhausted > 3 && stats.given_back > 100, "{stats:?}");
    assert_eq!(ledger.out(Class::Files) as usize, cache.0.lock().unwrap().len());
}

#[derive(Clone, Debug)]
enum Step {
    Open { name: u8, mode: OpenMode, background: bool },
    Close(usize),
    Remove(u8),
    List,
    SyncDir,
    LimitOpen(Option<u64>),
    Resize(u32),
}

fn step() -> impl Strategy<Value = Step> {
    let mode = prop_oneof![Just(OpenMode::Read), Just(OpenMode::ReadWrite), Just(OpenMode::CreateNew)];
    let open =
        (0..30_u8, mode, any::<bool>()).prop_map(|(name, mode, background)| Step::Open { name, mode, background });
    prop_oneof![
        10 => open,
        5 => any::<usize>().prop_map(Step::Close),
        1 => (0..30_u8).prop_map(Step::Remove),
        1 => Just(Step::List),
        1 => Just(Step::SyncDir),
        1 => prop::option::of(0..30_u64).prop_map(Step::LimitOpen),
        1 => (0..FILES).prop_map(Step::Resize),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]
    /// Goal: no way to open, fail or close leaves a permit behind or a descriptor without one. Method: random calls on a
    /// disk that fails at random, with a cache that is asked to give way; the count is compared after each.
    #[test]
    fn permits_out_are_descriptors_open_after_any_sequence(
        steps in prop::collection::vec(step(), 1..150),
        (open, create, list) in (0..400_u16, 0..400_u16, 0..400_u16),
    ) {
        let (sim, ledger, files) = world();
        let background = files.for_class(Class::Background);
        let cache = Arc::new(Cache::default());
        ledger.on_pressure(Class::Files, Arc::downgrade(&cache) as _);
        let fault = |op, errno, chance| Rule::new(op, Fault::Errno(errno)).sticky().chance_permille(chance);
        sim.storage.arm(
            FaultPlan::new()
                .rule(fault(Op::Open, EMFILE, open))
                .rule(fault(Op::Create, ENFILE, create))
                .rule(fault(Op::Create, EIO, create / 4))
                .rule(fault(Op::List, EMFILE, list)),
        );
        let mut busy: Vec<Arc<dyn File>> = Vec::new();
        for step in steps {
            match step {
                Step::Open { name, mode, background: in_background } => {
                    let storage = if in_background { &background } else { &files };
                    match storage.open(&PathBuf::from(format!("d/{name}")), mode) {
                        Ok(file) if name % 2 == 0 => cache.0.lock().unwrap().push_back(file),
                        Ok(file) => busy.push(file),
                        Err(_) => {}
                    }
                }
                Step::Close(at) if !busy.is_empty() => drop(busy.swap_remove(at % busy.len())),
                Step::Close(_) => {}
                Step::Remove(name) => drop(files.remove_file(&PathBuf::from(format!("d/{name}")))),
                Step::List => drop(files.list(Path::new("d"))),
                Step::SyncDir => drop(background.sync_dir(Path::new("d"))),
                Step::LimitOpen(n) => sim.storage.set_open_files_max(n),
                Step::Resize(n) => ledger.resize(Class::Files, n).unwrap(),
            }
            let out = ledger.out(Class::Files) + ledger.out(Class::Background);
            prop_assert_eq!(u64::from(out), sim.storage.open_files());
        }
        drop((busy, cache));
        prop_assert_eq!((ledger.out(Class::Files), ledger.out(Class::Background), sim.storage.open_files()), (0, 0, 0));
    }
}
