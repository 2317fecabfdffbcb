//! Goal: whatever clients ask and whatever the disk, the power and the clock do, a vBucket is what its changelog says.
//!
//! Method: random operations of several clients against the whole engine on a simulated disk and clock, tasks run in
//! random order, files compacted, vBuckets rolled back and deleted, faults armed, the program killed, the power cut, again and
//! again. A witness reads every changelog beside
//! the flusher. That gives an exact model: what a restart finds is the witnessed changes up to the seqno the file ends at,
//! no more and no less, and that seqno is not below anything that was ever called durable.
//!
//! `SETTEE_SIM_SEEDS=n` runs more seeds, `SETTEE_SIM_SEED=n` only this one. A failing seed is printed and replays.

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use changelog::Cursor;
use common::seeds::{self, Dice, for_each_seed};
use common::*;
use couchstore::check::{Depth, check};
use document::subdoc::{DocFlags, MutationSpec, Op as Sub, PathFlags};
use engine::*;
use env::OpenMode;
use env::sim::{Fate, Fault, FaultPlan, Noise, Op as Io, Rule, Sim};
use parking_lot::Mutex;
use persist::{BucketSpec, CompactionReport, Eviction, LogOptions, Purge, RecoveredVb, StoreError};
use scheduler::{Order, Stepper};
use types::{Cas, Datatype, Item, Kind, Level, RevSeqno, Seqno, VbId, VbState, VbUuid};

const SEEDS: u64 = 80;
const LIVES: u64 = 5;
const VBUCKETS: u16 = 2;
const KEYS: u64 = 4;
const ENOSPC: i32 = 28;
const EIO: i32 = 5;
/// More than any time-out of the workload, and than the longest pause between two attempts at a flush.
const PATIENCE: Duration = Duration::from_secs(90);

#[test]
fn a_vbucket_is_what_its_changelog_says_whatever_happens() {
    for_each_seed(SEEDS, run);
}

#[derive(Debug, Default)]
struct Lived {
    acknowledged: u64,
    ambiguous: u64,
    fetched: u64,
    lost: u64,
    recommitted: u64,
    poisoned: u64,
    refused_disk: u64,
    refused_memory: u64,
    clean: u64,
    refused_to_open: u64,
    evicted: u64,
    /// Answered before everything was loaded.
    early: u64,
    /// Lives with a commit log, and without.
    logged: u64,
    unlogged: u64,
    compacted: u64,
    purged: u64,
    rolled_back: u64,
    deleted: u64,
    /// Switches of the commit log, in the middle of a life.
    switched: u64,
}

impl seeds::Lived for Lived {
    fn assert_thorough(&self) {
        let Lived { acknowledged, ambiguous, fetched, lost, recommitted, poisoned, refused_disk, .. } = *self;
        let Lived { refused_memory, clean, refused_to_open, evicted, early, logged, unlogged, switched, .. } = *self;
        let Lived { compacted, purged, rolled_back, deleted, .. } = *self;
        let often = [acknowledged, fetched, evicted, logged, unlogged, switched, clean, lost, compacted];
        let sometimes = [ambiguous, recommitted, poisoned, refused_disk, refused_memory, refused_to_open, early];
        assert!([purged, rolled_back, deleted].iter().all(|count| *count >= 20), "{self:?}");
        assert!(often.iter().all(|count| *count >= 60) && sometimes.iter().all(|count| *count >= 3), "{self:?}");
    }
}

/// What is known of one vBucket.
#[derive(Default)]
struct Witness {
    /// Every change, in order; after a restart cut to what the file kept.
    history: Vec<Item>,
    /// Somebody was told that everything up to here is on disk.
    promised: Seqno,
    /// Highest CAS of what survived.
    uuid: Option<VbUuid>,
    cursor: Option<Cursor>,
    /// A rollback or a deletion has failed: a start may find that it has happened.
    in_doubt: bool,
}

impl Witness {
    fn high(&self) -> Seqno {
        self.history.last().map_or(Seqno(0), |item| item.seqno())
    }

    /// The newest committed change of each key.
    fn committed(&self) -> BTreeMap<Vec<u8>, Item> {
        let committed = self.history.iter().filter(|item| item.is_committed());
        committed.map(|item| (item.id().to_vec(), item.clone())).collect()
    }

    /// Prepares that are neither committed nor aborted, in order.
    fn open_prepares(&self) -> Vec<Item> {
        let completed: BTreeSet<Seqno> = self.history.iter().filter_map(completes).collect();
        let open = |item: &&Item| matches!(item.kind(), Kind::Prepare { .. }) && !completed.contains(&item.seqno());
        self.history.iter().filter(open).cloned().collect()
    }

    /// Nothing after this ever was.
    fn forget_after(&mut self, seqno: Seqno) {
        self.history.truncate(seqno.0 as usize);
        self.promised = self.promised.min(seqno);
    }

    /// Compares what the file counts: live documents to the number; prepares and aborts may be more, as those that were
    /// completed stay until a compaction unless they were completed in one flush; deletions up to the purge seqno may be gone.
    fn assert_counts(&self, vb: u16, found: &RecoveredVb) {
        let committed = self.committed();
        let dead = committed.values().filter(|item| item.is_deleted()).count() as u64;
        let live = committed.len() as u64 - dead;
        assert_eq!(found.alive - found.on_disk_prepares, live, "vBucket {vb}: live documents of the file");
        let ids = |of: fn(&Kind) -> bool| {
            let items = self.history.iter().filter(|item| of(&item.kind()));
            items.map(|item| item.id()).collect::<BTreeSet<_>>().len() as u64
        };
        let prepares = self.open_prepares().len() as u64..=ids(|kind| matches!(kind, Kind::Prepare { .. }));
        assert!(prepares.contains(&found.on_disk_prepares), "vBucket {vb}: {prepares:?} prepares in {found:?}");
        let is_kept = |item: &&Item| item.is_deleted() && item.seqno() > found.purge;
        let kept = committed.values().filter(is_kept).count() as u64;
        let tombstones = kept..=dead + ids(|kind| matches!(kind, Kind::Abort { .. }));
        assert!(tombstones.contains(&found.tombstones), "vBucket {vb}: {tombstones:?} tombstones in {found:?}");
    }
}

fn completes(item: &Item) -> Option<Seqno> {
    match item.kind() {
        Kind::Committed { prepared } => prepared,
        Kind::Abort { prepared } => Some(prepared),
        Kind::Prepare { .. } => None,
    }
}

/// A request under way.
struct Asked {
    vb: u16,
    id: Vec<u8>,
    level: Option<Level>,
    is_read: bool,
    /// How long the history was when it was asked.
    since: usize,
    expired_then: bool,
    upto: Option<Seqno>,
}

struct Life<'a> {
    dice: &'a mut Dice,
    lived: &'a mut Lived,
    sim: &'a Sim,
    stepper: Stepper,
    bucket: Arc<Bucket>,
    engine: Engine,
    letters: Arc<Letters>,
    witnesses: &'a mut [Witness],
    asked: BTreeMap<u64, Asked>,
    /// Requests that must be answered somehow.
    unjudged: Vec<u64>,
    /// Compactions that succeeded, and tombstones that they left out.
    compacted: Arc<(AtomicU64, AtomicU64)>,
    next: u64,
    /// Nothing more can be said before a restart.
    is_over: bool,
    /// Reads may fail, because faults were armed.
    reads_may_fail: bool,
    dir_syncs_may_fail: bool,
}

fn run(seed: u64, lived: &mut Lived) {
    let dice = &mut Dice(seed);
    let (_, mut sim) = env::sim::env(seed);
    let (eviction, quota_bytes) =
        (dice.pick(&[Eviction::Value, Eviction::Full]), dice.pick(&[64 << 20, 24 << 10, 6 << 10]));
    let spec = BucketSpec { vbuckets: VBUCKETS, eviction, quota_bytes, ..spec() };
    let commit_log = dice.one_in(2).then(small_log);
    let mut witnesses: Vec<Witness> = (0..VBUCKETS).map(|_| Witness::default()).collect();
    // `None`: a start that failed may have taken the mark back, or not.
    let mut was_clean = Some(true);
    for _ in 0..LIVES {
        if dice.one_in(4) {
            let trouble = Trouble::new(dice, &sim);
            sim.storage.arm(trouble.plan);
            if open(&sim, dice, &commit_log).is_err() {
                lived.refused_to_open += 1;
            }
            // Either way it is gone again before it has done anything but start.
            was_clean = None;
            end(&mut sim, dice, trouble.dir_syncs_may_fail);
        }
        let (stepper, engine) =
            open(&sim, dice, &commit_log).expect("a healthy disk opens, whatever was done to it before");
        let letters = Arc::new(Letters::default());
        let bucket = match engine.bucket("default") {
            Some(bucket) => bucket,
            None => engine.create_bucket(spec.clone()).expect("a new bucket"),
        };
        let (asked, witnesses) = (BTreeMap::new(), &mut witnesses[..]);
        let mut life = Life {
            dice,
            lived,
            sim: &sim,
            stepper,
            bucket,
            engine,
            letters,
            witnesses,
            asked,
            unjudged: Vec::new(),
            compacted: Arc::default(),
            next: 0,
            is_over: false,
            reads_may_fail: false,
            dir_syncs_may_fail: false,
        };
        match commit_log {
            Some(_) => life.lived.logged += 1,
            None => life.lived.unlogged += 1,
        }
        life.begin(was_clean);
        life.check_files();
        life.work();
        let is_clean = !life.is_over && life.dice.one_in(3) && life.stop();
        life.lived.clean += u64::from(is_clean);
        life.lived.compacted += life.compacted.0.load(Relaxed);
        life.lived.purged += life.compacted.1.load(Relaxed);
        life.lived.evicted += life.bucket.counters.evicted.get();
        was_clean = Some(is_clean);
        let Life { stepper, bucket, engine, dir_syncs_may_fail, .. } = life;
        // Ended before its parts are dropped, as a crash does.
        end(&mut sim, dice, dir_syncs_may_fail);
        drop((bucket, engine, stepper));
    }
}

fn open(sim: &Sim, dice: &mut Dice, commit_log: &Option<LogOptions>) -> Result<(Stepper, Engine), persist::StoreError> {
    let order = Order::Seeded(dice.below(u64::MAX));
    let batch_bytes_max = dice.pick(&[1, 500, 16 << 20]);
    let store_options = persist::Options {
        writers: 2,
        readers: 2,
        batch_bytes_max,
        commit_log: commit_log.clone(),
        ..persist::Options::default()
    };
    let (stepper, engine, _) = open_engine(&sim.env(), &sim.clock, order, store_options)?;
    Ok((stepper, engine))
}

/// Ends everything, between two steps.
fn end(sim: &mut Sim, dice: &mut Dice, dir_syncs_may_fail: bool) {
    match dice.below(4) {
        // What a failed sync of a directory left in memory alone outlives the program, and nobody could tell it from what is
        // on disk. File systems that keep a journal stop then; so the machine goes down too.
        0 if !dir_syncs_may_fail => drop(sim.kill()),
        0 | 1 => drop(sim.power_cut(Fate::LoseUnsynced)),
        2 => drop(sim.power_cut(Fate::KeepUnsynced)),
        _ => drop(sim.power_cut(dice.below(u64::MAX))),
    }
    let jump = dice.pick(&[0, 0, -3_600_000_000_000, -1_000_000, 1_000_000_000]);
    sim.clock.jump_wall(jump);
}

/// Something that goes wrong.
struct Trouble {
    plan: FaultPlan,
    reads_may_fail: bool,
    dir_syncs_may_fail: bool,
}

impl Trouble {
    fn new(dice: &mut Dice, sim: &Sim) -> Trouble {
        let rule =
            |dice: &mut Dice, op, errno| Rule::new(op, Fault::Errno(errno)).nth(dice.below(6)).times(1 + dice.below(4));
        let plan = FaultPlan::new();
        let kind = dice.below(9);
        let plan = match kind {
            0 => plan.noise(Noise::loud()),
            1 => plan.rule(rule(dice, Io::Sync, EIO)),
            2 => plan.rule(rule(dice, Io::SyncDir, EIO)).rule(rule(dice, Io::Rename, EIO)),
            3 => plan.rule(rule(dice, Io::Write, EIO)).noise(Noise::loud()),
            4 => plan.rule(rule(dice, Io::Write, ENOSPC)).rule(rule(dice, Io::Sync, EIO)),
            5 => plan.rule(rule(dice, Io::Read, EIO)).rule(rule(dice, Io::Create, EIO)),
            6 => plan.open_files_max(dice.below(3)),
            7 => plan.space_bytes_max(sim.storage.used_bytes() + dice.below(40_000)),
            _ => plan.cut_before(dice.below(60)),
        };
        Trouble { plan, reads_may_fail: matches!(kind, 5 | 6 | 8), dir_syncs_may_fail: kind == 2 }
    }
}

impl Life<'_> {
    /// Compares what was found with what the witnesses saw, and has them look on.
    fn begin(&mut self, was_clean: Option<bool>) {
        // Those of the life before belong to logs that are gone.
        self.witnesses.iter_mut().for_each(|witness| witness.cursor = None);
        let recovered: BTreeMap<u16, RecoveredVb> =
            self.bucket.store().recovered().into_iter().map(|vb| (vb.vb.0, vb)).collect();
        for id in 0..VBUCKETS {
            let found = recovered.get(&id);
            let high = found.map_or(Seqno(0), |found| found.high);
            let witness = &mut self.witnesses[usize::from(id)];
            assert!(high <= witness.high(), "vBucket {id}: nobody wrote {high}");
            if std::mem::take(&mut witness.in_doubt) {
                witness.promised = witness.promised.min(high);
            }
            assert!(high >= witness.promised, "vBucket {id}: ends at {high}, {} was promised", witness.promised);
            assert!(was_clean != Some(true) || high == witness.high(), "vBucket {id}: a clean stop keeps everything");
            let before = witness.history.len();
            witness.history.truncate(high.0 as usize);
            self.lived.lost += (before - witness.history.len()) as u64;
            if let Some(found) = found {
                witness.assert_counts(id, found);
                let completed = witness.history.iter().filter_map(completes).max();
                assert_eq!(found.completed, completed.unwrap_or_default());
                let max_cas = witness.history.iter().map(|item| item.meta().cas).max();
                assert!(Some(found.max_cas) >= max_cas, "vBucket {id}: the highest CAS");
            }
            let vb = self.bucket.vbucket(VbId(id)).expect("there");
            let history = self.bucket.failover_log(VbId(id)).expect("there")[0];
            if high > Seqno(0) && vb.state() == VbState::Active && witness.uuid.is_some() {
                let goes_on = witness.uuid == Some(history.uuid);
                assert!(was_clean.is_none_or(|clean| clean == goes_on), "vBucket {id}: a crash begins a new history");
                assert!(goes_on || history.seqno == high, "vBucket {id}: it begins where the file ends");
            }
            witness.uuid = Some(history.uuid);
            witness.cursor = Some(vb.log.cursor("witness", high).expect("nothing was flushed since"));
            let open = witness.open_prepares();
            if vb.state() != VbState::Active {
                self.bucket.set_vb_state(VbId(id), VbState::Active, None).expect("may be");
                self.witnesses[usize::from(id)].uuid = self.bucket.vb_uuid(VbId(id));
            }
            self.lived.recommitted += open.len() as u64;
            self.look();
            let witness = &self.witnesses[usize::from(id)];
            let new = &witness.history[high.0 as usize..];
            assert_eq!(new.len(), open.len(), "vBucket {id}: open prepares are committed, and nothing else happens");
            for (commit, prepare) in new.iter().zip(&open) {
                let kind = Kind::Committed { prepared: Some(prepare.seqno()) };
                let meta = types::Meta { seqno: commit.seqno(), ..prepare.meta() };
                assert_eq!(
                    (commit.kind(), commit.meta(), commit.id(), commit.value()),
                    (kind, meta, prepare.id(), prepare.value())
                );
            }
        }
        self.read_everything();
    }

    /// Takes over what was appended.
    fn take_over(&mut self) {
        for (id, witness) in (0..).zip(self.witnesses.iter_mut()) {
            let vb = self.bucket.vbucket(VbId(id)).expect("there");
            let Some(cursor) = &witness.cursor else { continue };
            let slice = vb.log.read(cursor, usize::MAX);
            vb.log.release(cursor, slice.last);
            for item in slice.items {
                assert_eq!(item.seqno(), witness.high().next(), "vBucket {id}: no gaps");
                if let Some(prepared) = completes(&item) {
                    let first = witness.open_prepares()[0].seqno();
                    assert_eq!(prepared, first, "vBucket {id}: completed in the order of the prepares");
                }
                witness.history.push(item);
            }
            witness.promised = witness.promised.max(vb.log.marks.durable());
        }
    }

    /// Takes over what was appended, and compares what the engine counts with what there is.
    fn look(&mut self) {
        self.take_over();
        if self.witnesses.iter().any(|witness| witness.cursor.is_none()) {
            return;
        }
        let live = |witness: &Witness| witness.committed().values().filter(|item| !item.is_deleted()).count();
        let prepares: usize = self.witnesses.iter().map(|witness| witness.open_prepares().len()).sum();
        let general: BTreeMap<_, _> = self.bucket.stats("").expect("a group").into_iter().collect();
        assert_eq!(self.bucket.items() as usize, self.witnesses.iter().map(live).sum::<usize>(), "live documents");
        assert_eq!(general["ep_sync_writes_pending"], prepares.to_string());
        self.check_memory();
    }

    /// What the changelogs are charged for is what they hold, or less: what a table holds too is charged there.
    fn check_memory(&self) {
        let (mut entries, mut bytes) = (0, 0);
        for id in 0..VBUCKETS {
            let (more, more_bytes) = self.bucket.vbucket(VbId(id)).expect("there").log.backlog();
            entries += more;
            bytes += more_bytes;
        }
        let memory: BTreeMap<_, _> = self.bucket.stats("memory").expect("a group").into_iter().collect();
        let memory = |name: &str| memory[name].parse::<usize>().expect("a number");
        let charged = memory("ep_changelog_memory");
        assert!(
            (entries * 16..=entries * 16 + bytes).contains(&charged),
            "{charged} for {entries} entries, {bytes} bytes"
        );
        let parts = ["kv_size", "table_memory", "key_filter_memory", "changelog_memory", "fetch_queue_memory"];
        let sum: usize = parts.iter().map(|part| memory(&format!("ep_{part}"))).sum();
        assert_eq!(sum, memory("mem_used"));
    }

    fn work(&mut self) {
        for _ in 0..2 {
            if self.dice.one_in(2) {
                let trouble = Trouble::new(self.dice, self.sim);
                self.sim.storage.arm(trouble.plan);
                self.reads_may_fail |= trouble.reads_may_fail;
                self.dir_syncs_may_fail |= trouble.dir_syncs_may_fail;
            }
            for _ in 0..self.dice.below(40) {
                self.act();
                if self.is_over {
                    return;
                }
                for _ in 0..self.dice.pick(&[0, 0, 1, 3, 100]) {
                    if !self.stepper.step() {
                        break;
                    }
                }
                self.look();
                self.collect();
            }
        }
    }

    fn act(&mut self) {
        match self.dice.below(30) {
            0 if self.dice.one_in(2) => self.bucket.page(),
            0 => self.bucket.squeeze(),
            1 => drop(self.stepper.advance(Duration::from_millis(self.dice.below(5_000)))),
            2 => self.sim.clock.jump_wall(self.dice.pick(&[-5_000_000_000, -1, 1, 20_000_000_000])),
            3 => {
                let vb = VbId(self.dice.below(VBUCKETS.into()) as u16);
                self.bucket.set_vb_state(vb, VbState::Replica, None).expect("may be");
                if self.dice.one_in(2) {
                    self.look();
                    self.bucket.set_vb_state(vb, VbState::Active, None).expect("may be");
                    self.witnesses[usize::from(vb.0)].uuid = self.bucket.vb_uuid(vb);
                }
            }
            4 => {
                let vb = self.dice.below(VBUCKETS.into()) as u16;
                self.bucket.set_vb_state(VbId(vb), VbState::Active, None).expect("may be");
                self.witnesses[usize::from(vb)].uuid = self.bucket.vb_uuid(VbId(vb));
            }
            5 => self.await_seqno(),
            7 | 8 => self.compact(),
            9 if self.dice.one_in(2) => self.roll_back(),
            9 if self.dice.one_in(3) => self.delete(),
            10 => {
                let wanted = self.dice.one_in(2).then(small_log);
                let is_news = wanted.is_some() != self.engine.store().log_stats().is_some();
                self.engine.store().set_commit_log(wanted).expect("options that work");
                self.lived.switched += u64::from(is_news);
            }
            6 => {
                if self.dice.one_in(3) {
                    self.bucket.flush(self.waiter(u64::MAX));
                    self.stepper.run_until_idle();
                    let _ = self.letters.take(u64::MAX).expect("a flush answers");
                }
            }
            _ => self.ask(),
        }
    }

    /// Asks for a compaction, and goes on meanwhile.
    fn compact(&mut self) {
        let vb = self.dice.below(VBUCKETS.into()) as u16;
        let upto = self.dice.one_in(2).then(|| Seqno(self.dice.below(1 + self.witnesses[usize::from(vb)].high().0)));
        let purge = match self.dice.below(3) {
            0 => Purge::default(),
            1 => Purge { all: true, ..Purge::default() },
            _ => Purge { before_s: Some(u32::MAX), upto, ..Purge::default() },
        };
        let counts = Arc::clone(&self.compacted);
        let done = move |result: Result<CompactionReport, StoreError>| {
            if let Ok(report) = result {
                counts.0.fetch_add(u64::from(report.bytes_before > 0), Relaxed);
                counts.1.fetch_add(report.tombstones_purged, Relaxed);
            }
        };
        self.bucket.store().compact(VbId(vb), purge, Box::new(done));
    }

    /// A replica whose history was not its peer's, whatever else goes on.
    fn roll_back(&mut self) {
        let vb = VbId(self.dice.below(VBUCKETS.into()) as u16);
        self.bucket.set_vb_state(vb, VbState::Replica, None).expect("may be");
        self.look();
        let to = Seqno(self.dice.below(1 + self.witnesses[usize::from(vb.0)].high().0));
        let told = Arc::new(Mutex::new(None));
        let tell = Arc::clone(&told);
        self.bucket.roll_back(vb, to, Box::new(move |result| *tell.lock() = Some(result)));
        while told.lock().is_none() {
            assert!(self.stepper.step(), "a rollback ends");
        }
        let result = told.lock().take().expect("told");
        let witness = &mut self.witnesses[usize::from(vb.0)];
        match result {
            Ok(high) => {
                assert!(high <= to);
                witness.forget_after(high);
                self.lived.rolled_back += 1;
            }
            Err(_) => {
                // It may have happened all the same, and then a restart says so.
                witness.in_doubt = true;
                self.is_over = true;
                // Meanwhile the other vBucket went on.
                self.take_over();
                return;
            }
        }
        self.begin_again(vb);
    }

    /// A vBucket is dropped, and made again.
    fn delete(&mut self) {
        let vb = VbId(self.dice.below(VBUCKETS.into()) as u16);
        self.bucket.set_vb_state(vb, VbState::Dead, None).expect("may be");
        self.look();
        match self.bucket.delete_vbucket(vb) {
            Ok(()) => {
                self.witnesses[usize::from(vb.0)].forget_after(Seqno(0));
                self.lived.deleted += 1;
            }
            Err(_) => self.witnesses[usize::from(vb.0)].in_doubt = true,
        }
        self.begin_again(vb);
    }

    /// What was asked of the vBucket before is answered by what it is now, and not judged.
    fn begin_again(&mut self, vb: VbId) {
        self.asked.retain(|number, asked| {
            let is_its = asked.vb == vb.0;
            if is_its {
                self.unjudged.push(*number);
            }
            !is_its
        });
        self.bucket.set_vb_state(vb, VbState::Active, None).expect("may be");
        self.witnesses[usize::from(vb.0)].uuid = self.bucket.vb_uuid(vb);
    }

    fn waiter(&self, number: u64) -> Waiter {
        let letters: Arc<dyn Mailbox> = Arc::clone(&self.letters) as _;
        Waiter::new(letters, Ticket { slot: 0, generation: 0, request: number })
    }

    fn await_seqno(&mut self) {
        let vb = self.dice.below(VBUCKETS.into()) as u16;
        let (number, upto) = (self.next, self.witnesses[usize::from(vb)].high());
        self.next += 1;
        let asked = self.asked(vb, Vec::new(), None, false, Some(upto));
        match self.bucket.seqno_persistence(VbId(vb), upto, &|| self.waiter(number)) {
            Outcome::Pending => drop(self.asked.insert(number, asked)),
            Outcome::Done(result) => self.answered(asked, result),
        }
    }

    fn asked(&self, vb: u16, id: Vec<u8>, level: Option<Level>, is_read: bool, upto: Option<Seqno>) -> Asked {
        let witness = &self.witnesses[usize::from(vb)];
        let expired_then = witness.committed().get(&id).is_some_and(|item| self.is_past(item));
        Asked { vb, id, level, is_read, since: witness.history.len(), expired_then, upto }
    }

    fn is_past(&self, item: &Item) -> bool {
        use env::Clock;
        item.meta().expiry != 0 && item.meta().expiry <= self.sim.clock.unix_s()
    }

    fn ask(&mut self) {
        let (vb, key) = (self.dice.below(VBUCKETS.into()) as u16, k(&format!("k{}", self.dice.below(KEYS))));
        let id = key.as_key().as_bytes().to_vec();
        let number = self.next;
        self.next += 1;
        let size = self.dice.pick(&[0, 10, 300, 1500]);
        let value = if self.dice.one_in(3) { number.to_string() } else { format!("{{\"n\":{number}}}{:size$}", "") };
        let expiry = self.dice.pick(&[0, 0, 0, 1, 5]);
        let current = self.witnesses[usize::from(vb)].committed().get(&id).cloned();
        let cas = match (self.dice.below(4), &current) {
            (0, Some(item)) => item.meta().cas,
            (1, _) if self.dice.one_in(4) => Cas(7),
            _ => Cas(0),
        };
        let mode = self.dice.pick(&[StoreMode::Set, StoreMode::Set, StoreMode::Add, StoreMode::Replace]);
        let specs = [
            MutationSpec { op: Sub::DictUpsert, flags: PathFlags::XATTR, path: b"_x", value: b"1" },
            MutationSpec { op: Sub::DictUpsert, flags: PathFlags::NONE, path: b"n", value: b"2" },
        ];
        let doc_flags = self.dice.pick(&[DocFlags::NONE, DocFlags::MKDOC, DocFlags::ACCESS_DELETED]);
        let op = match self.dice.below(20) {
            0..=6 => store(mode, expiry, value.as_bytes()),
            7 | 8 => Op::Delete,
            9 => Op::Arithmetic { delta: Delta::Increment(1), initial: Some(number), expiry },
            10 => Op::Concat { end: End::Append, datatype: Datatype::RAW, value: b"+" },
            11 => Op::Touch { expiry },
            12 => Op::GetAndTouch { expiry },
            13 => Op::GetAndLock { lock_s: 3 },
            14 => Op::SubdocMutate(SubdocMutate { specs: &specs, doc_flags, expiry: Some(expiry), user_flags: None }),
            15 => Op::WithMeta(WithMeta {
                mode: self.dice.pick(&[WithMetaMode::Set, WithMetaMode::Delete]),
                flags: 1,
                expiry: 0,
                rev: RevSeqno(self.dice.below(9)),
                cas: Cas(1 + self.dice.below(1000)),
                options: 0x08,
                datatype: Datatype::RAW,
                value: b"",
            }),
            16 | 17 => Op::Evict,
            18 => Op::GetMeta,
            _ => Op::Get,
        };
        let durable = matches!(
            op,
            Op::Store { .. } | Op::Delete | Op::Arithmetic { .. } | Op::Concat { .. } | Op::SubdocMutate(_)
        );
        let level = self.dice.pick(&[
            None,
            Some(Level::Majority),
            Some(Level::MajorityAndPersistActive),
            Some(Level::PersistMajority),
        ]);
        let level = level.filter(|_| durable);
        let timeout = self.dice.pick(&[None, Some(Duration::from_millis(1500))]);
        let durability = level.map(|level| Requirement { level, timeout });
        let preserve_expiry = self.dice.one_in(5);
        let request = Request { vb: VbId(vb), cas, durability, preserve_expiry, ..request(&key, op) };
        let asked = self.asked(vb, id, level, matches!(op, Op::Get), None);
        match self.bucket.execute(&request, &|| self.waiter(number)) {
            Outcome::Done(result) => self.answered(asked, result),
            Outcome::Pending => {
                self.lived.fetched += u64::from(level.is_none());
                self.asked.insert(number, asked);
            }
        }
    }

    /// Judges the answers that have come.
    fn collect(&mut self) {
        let answers: Vec<_> = self.asked.keys().filter_map(|n| Some((*n, self.letters.take(*n)?))).collect();
        for (number, result) in answers {
            let asked = self.asked.remove(&number).expect("asked");
            self.answered(asked, result);
        }
    }

    fn answered(&mut self, asked: Asked, result: OpResult) {
        self.look();
        self.lived.early += u64::from(!self.bucket.warm_up_progress().is_done());
        let vb = usize::from(asked.vb);
        if let (Some(upto), Ok(_)) = (asked.upto, &result) {
            let witness = &mut self.witnesses[vb];
            witness.promised = witness.promised.max(upto);
            return;
        }
        match &result {
            Ok(
                Reply::Mutated(told)
                | Reply::Counter { mutated: told, .. }
                | Reply::SubdocMutated { mutated: told, .. },
            ) => {
                let witness = &mut self.witnesses[vb];
                let item = &witness.history[told.seqno.0 as usize - 1];
                assert_eq!((item.seqno(), item.meta().cas, item.id()), (told.seqno, told.cas, &*asked.id));
                assert_eq!(matches!(item.kind(), Kind::Prepare { .. }), asked.level.is_some());
                if asked.level.is_some() {
                    let kind = Kind::Committed { prepared: Some(told.seqno) };
                    assert!(witness.history.iter().any(|item| item.kind() == kind), "acknowledged, so committed");
                    self.lived.acknowledged += 1;
                }
                if asked.level.is_some_and(|level| level > Level::Majority) {
                    witness.promised = witness.promised.max(told.seqno);
                }
            }
            Ok(Reply::Value { item, .. }) if asked.is_read => {
                let versions = self.versions(&asked);
                assert!(versions.iter().flatten().any(|version| same(version, item)), "a value nobody wrote: {item:?}");
            }
            Err(OpError::NotFound) if asked.is_read => {
                let gone = self
                    .versions(&asked)
                    .iter()
                    .any(|version| version.as_ref().is_none_or(|item| item.is_deleted() || self.is_past(item)));
                assert!(gone || asked.expired_then, "not found, and nobody deleted it");
            }
            Ok(_) => {}
            Err(OpError::Unreadable(why)) => assert!(self.reads_may_fail, "{why}"),
            Err(OpError::Ambiguous(_)) => {
                assert!(asked.level.is_some(), "only sync writes are ambiguous");
                self.lived.ambiguous += 1;
            }
            Err(OpError::DiskFull) => self.lived.refused_disk += 1,
            Err(OpError::NoMemory) => self.lived.refused_memory += 1,
            Err(OpError::Temporary(why)) => {
                self.lived.refused_memory += u64::from(why.contains("quota"));
                self.lived.poisoned += u64::from(why.contains("restart"));
            }
            Err(OpError::Cancelled) => panic!("nobody was told to stop"),
            Err(_) => {}
        }
    }

    /// What the key was, from when it was asked for until now.
    fn versions(&self, asked: &Asked) -> Vec<Option<Item>> {
        let history = &self.witnesses[usize::from(asked.vb)].history;
        let of_key = |item: &&Item| item.is_committed() && item.id() == asked.id;
        let first = history[..asked.since].iter().rev().find(of_key).cloned();
        let later = history[asked.since..].iter().filter(of_key).cloned().map(Some);
        [first].into_iter().chain(later).collect()
    }

    /// Every key reads as the witness says.
    fn read_everything(&mut self) {
        for vb in 0..VBUCKETS {
            for n in 0..KEYS {
                let key = k(&format!("k{n}"));
                let (id, number) = (key.as_key().as_bytes().to_vec(), self.next);
                self.next += 1;
                let expected = self.witnesses[usize::from(vb)].committed().get(&id).cloned();
                let expected = expected.filter(|item| !item.is_deleted() && !self.is_past(item));
                let request = Request { vb: VbId(vb), ..request(&key, Op::Get) };
                let result = match self.bucket.execute(&request, &|| self.waiter(number)) {
                    Outcome::Done(result) => result,
                    // No further than needed, so that loading may still be under way.
                    Outcome::Pending => loop {
                        match self.letters.take(number) {
                            Some(result) => break result,
                            None => assert!(self.stepper.step(), "a fetch answers"),
                        }
                    },
                };
                match (result, expected) {
                    (Ok(Reply::Value { item, .. }), Some(expected)) => {
                        assert!(same(&item, &expected), "{item:?}, {expected:?}")
                    }
                    (Err(OpError::NotFound), None) => {}
                    (found, expected) => panic!("vBucket {vb}, k{n}: found {found:?}, expected {expected:?}"),
                }
            }
        }
        self.look();
    }

    fn check_files(&self) {
        let env = self.sim.env();
        for (path, _) in self.sim.storage.list_all() {
            let is_file = path.rsplit_once(".couch.").is_some_and(|(_, rev)| rev.parse::<u64>().is_ok());
            if is_file {
                let file = env.storage.open(Path::new(&path), OpenMode::Read).expect("there");
                let report = check(file, Path::new(&path), Depth::Newest).expect("readable");
                assert!(report.is_whole(), "{path}: {:?}", report.damage);
            }
        }
    }

    /// The disk is well again, and time passes: everyone is answered, and all that can be is written. Then stops, if
    /// there is nothing to wait for.
    fn stop(&mut self) -> bool {
        if self.sim.env().storage.exists(Path::new(DATA_DIR)).is_err() {
            return false;
        }
        self.sim.storage.arm(FaultPlan::new());
        self.stepper.advance(PATIENCE);
        self.look();
        self.collect();
        assert!(self.unjudged.iter().all(|number| self.letters.take(*number).is_some()), "each is answered");
        assert!(self.asked.is_empty(), "requests {:?} were never answered", self.asked.keys());
        let vbs = (0..VBUCKETS).map(|id| self.bucket.vbucket(VbId(id)).expect("there"));
        let is_poisoned = vbs.clone().any(|vb| vb.log.marks.poisoned().is_some());
        for vb in vbs.clone().filter(|vb| vb.log.marks.poisoned().is_none()) {
            let (high, filed) = (vb.log.marks.high(), vb.log.marks.filed());
            assert_eq!(
                high,
                filed,
                "vBucket {}: all is written; {} durable, log full: {}",
                vb.id,
                vb.log.marks.durable(),
                self.bucket.store().log_full()
            );
        }
        let drained = self.engine.drain();
        assert!(is_poisoned || drained.left.is_empty(), "{drained:?}");
        let is_behind = vbs.map(|vb| &vb.log.marks).any(|marks| marks.filed() < marks.high());
        assert!(!is_behind || !drained.left.is_empty(), "{drained:?}");
        drained.left.is_empty()
    }
}

/// The same version of a document: what is read from the file does not know of its prepare.
fn same(a: &Item, b: &Item) -> bool {
    (a.seqno(), a.meta().cas, a.meta().rev, a.value()) == (b.seqno(), b.meta().cas, b.meta().rev, b.value())
}
