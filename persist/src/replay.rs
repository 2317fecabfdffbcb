//! At start: what the commit log holds and the files do not is filed, before anybody sees the store.
//!
//! Filing at once rather than keeping the log's items in memory means that there is one truth when the engine starts: the
//! files. It costs what the log holds at most, in reads and in commits, and `log_bytes_max` bounds that.

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::sync::Arc;

use changelog::{FailoverEntry, FailoverTable, Place, Slice, Snapshots, VbRecord};
use commit_log::{Key, Log, LogError, Mark, Replayed};
use env::Storage;
use scheduler::Pools;
use types::{BucketUuid, Item, Kind, Seqno, VbState, VbUuid};

use crate::LogOptions;
use crate::batch::Batch;
use crate::commit::commit;
use crate::error::{Damage, Damages, StoreError};
use crate::fetch::prepare_now;
use crate::names::{LOG_ASIDE_DIR, LOG_DIR, LOG_GONE_DIR};
use crate::shared::Shared;
use crate::store::remove_tree;
use crate::sync::side_by_side;
use crate::vb::Vb;

/// What the log says of one vBucket beyond its file.
#[derive(Default)]
struct Ahead {
    items: Vec<Item>,
    record: Option<VbRecord>,
    last: Seqno,
    /// Where among a replica's snapshots the items end.
    place: Place,
    /// From and up to where a peer may have left out seqnos.
    loose: Vec<(Seqno, Seqno)>,
}

/// What the log said.
#[derive(Default)]
struct Gathered {
    ahead: HashMap<Key, Ahead>,
    marks: HashMap<Key, Mark>,
    items: u64,
}

impl Gathered {
    /// `file` is where the vBucket's file ends, and how often it was rolled back or deleted; `None`: there is no such vBucket.
    fn take(&mut self, replayed: Replayed, file: Option<(Seqno, u32)>) {
        let key = Key { bucket: replayed.bucket, vb: replayed.vb };
        self.marks.entry(key).or_default().rise(replayed.mark());
        let Some((high, rollbacks)) = file else { return };
        if replayed.rollbacks() < rollbacks {
            return;
        }
        let past = replayed.past;
        self.items += replayed.items.len() as u64;
        let record = replayed.record.filter(|_| replayed.last >= high);
        let mut items = replayed.items.into_iter().filter(|item| item.seqno() > high).peekable();
        // Without items a replica's may still say that there is nothing more up to a seqno, and that a snapshot has ended.
        let says_more = past.is_some() && replayed.last > high;
        if record.is_none() && items.peek().is_none() && !says_more {
            return;
        }
        let ahead = self.ahead.entry(key).or_default();
        if let Some(first) = items.peek().map(|item| item.seqno())
            && first <= ahead.last
        {
            // Written again after the file went back to an earlier commit: the later history counts.
            ahead.items.retain(|item| item.seqno() < first);
            ahead.place.from_disk = ahead.place.from_disk.filter(|snapshot| snapshot.end < first);
        }
        if let Some(past) = past {
            ahead.loose.push((past.after, replayed.last));
        }
        let place = past.map(|past| past.place).unwrap_or_default();
        ahead.place = Place { open: place.open, from_disk: place.from_disk.or(ahead.place.from_disk) };
        ahead.items.extend(items);
        ahead.last = replayed.last;
        ahead.record = record.or(ahead.record.take());
    }
}

/// The commit log as it is to be used from here on, if it is. What it held is in the files when this returns.
pub(crate) fn open_log(
    shared: &Arc<Shared>,
    pools: &Pools,
    data_dir: &Path,
    vbs: &HashMap<BucketUuid, Arc<[Arc<Vb>]>>,
    was_clean: bool,
) -> Result<Option<Arc<Log>>, StoreError> {
    let storage = &*shared.env.storage;
    let dir = data_dir.join(LOG_DIR);
    remove_tree(storage, &data_dir.join(LOG_GONE_DIR))?;
    let options = shared.options.commit_log.clone();
    if options.is_none() && !has_segments(storage, &dir)? {
        return Ok(None);
    }
    if was_clean {
        // The files have everything, and may have a newer record than the log.
        let Some(options) = options else {
            give_up(storage, data_dir, LOG_GONE_DIR)?;
            return Ok(None);
        };
        return Log::begin(&shared.env, &dir, options.of_files()).map(Some).map_err(StoreError::log);
    }
    let log_options = options.clone().unwrap_or_default().of_files();

    let began = shared.env.clock.monotonic();
    let find = |key: Key| vbs.get(&key.bucket)?.get(usize::from(key.vb.0));
    let file_of = |key: Key| {
        let vb = find(key)?;
        Some((vb.committed().map_or(Seqno(0), |committed| committed.high), vb.rollbacks()))
    };
    let mut gathered = Gathered::default();
    let mut strangers = HashSet::new();
    let mut take = |replayed: Replayed| {
        let key = Key { bucket: replayed.bucket, vb: replayed.vb };
        if !vbs.contains_key(&key.bucket) {
            strangers.insert(key.bucket);
        }
        gathered.take(replayed, file_of(key));
    };
    let log = match Log::open(&shared.env, &dir, log_options.clone(), &mut take) {
        Ok(log) => Some(log),
        Err(error @ LogError::Damaged { .. }) if shared.options.recovery => {
            tracing::error!("{error}; as asked for, using what comes before, and keeping the log as {LOG_ASIDE_DIR}");
            None
        }
        Err(error) => return Err(StoreError::log(error)),
    };
    let Gathered { ahead, marks, items } = gathered;

    let mut damages = Vec::new();
    let mut to_file = Vec::new();
    for (key, ahead) in ahead {
        let vb = find(key).expect("only vBuckets that are there");
        match gap(vb, &ahead, &dir) {
            None => to_file.push((Arc::clone(vb), ahead)),
            Some(damage) => damages.push(damage),
        }
    }
    if !damages.is_empty() && !shared.options.recovery {
        return Err(StoreError::Damaged(Damages(damages)));
    }
    for damage in &damages {
        tracing::error!("{}: {}; as asked for, given up: {}", damage.path.display(), damage.what, damage.lost);
    }
    let (vbuckets, filed): (_, usize) = (to_file.len(), to_file.iter().map(|(_, ahead)| ahead.items.len()).sum());
    side_by_side(pools, "replay", to_file, |(vb, ahead)| file(vb, ahead))?;
    if items > 0 {
        let took = shared.env.clock.monotonic().saturating_sub(began);
        tracing::info!(changes = items, filed, vbuckets, took_ms = took.as_millis(), "replayed the commit log");
    }

    let is_wanted = options.is_some();
    if let Some(log) = log.as_ref().filter(|_| is_wanted && damages.is_empty()) {
        strangers.into_iter().for_each(|bucket| log.forget(bucket));
        marks.into_iter().for_each(|(key, mark)| log.release(key, mark));
        return Ok(Some(Arc::clone(log)));
    }
    // What was given up must not come back, and a log that is not used must not grow old.
    let is_damaged = log.is_none();
    drop(log);
    give_up(storage, data_dir, if is_damaged { LOG_ASIDE_DIR } else { LOG_GONE_DIR })?;
    if !is_wanted {
        return Ok(None);
    }
    Log::begin(&shared.env, &dir, log_options).map(Some).map_err(StoreError::log)
}

/// Gives the log's directory another name, so that a crash leaves all of it or nothing; as `gone` it is removed.
pub(crate) fn give_up(storage: &dyn Storage, data_dir: &Path, name: &str) -> Result<(), StoreError> {
    let (dir, target) = (data_dir.join(LOG_DIR), data_dir.join(name));
    remove_tree(storage, &target)?;
    storage.rename(&dir, &target).map_err(StoreError::io("rename", &dir))?;
    storage.sync_dir(data_dir).map_err(StoreError::io("sync directory", data_dir))?;
    if name == LOG_GONE_DIR { remove_tree(storage, &target) } else { Ok(()) }
}

pub(crate) fn has_segments(storage: &dyn Storage, dir: &Path) -> Result<bool, StoreError> {
    if !storage.exists(dir).map_err(StoreError::io("look for", dir))? {
        return Ok(false);
    }
    let names = storage.list(dir).map_err(StoreError::io("list", dir))?;
    Ok(names.iter().any(|name| name.ends_with(".log")))
}

/// Changes that the log does not have and the file neither: then the file is not the one the log was written for.
fn gap(vb: &Vb, ahead: &Ahead, log_dir: &Path) -> Option<Damage> {
    let mut before = vb.committed().map_or(Seqno(0), |committed| committed.high);
    let file_ends = before;
    let mut loose = ahead.loose.iter().peekable();
    for item in &ahead.items {
        while let Some((after, upto)) = loose.next_if(|(_, upto)| *upto < item.seqno()) {
            before = if *after <= before { before.max(*upto) } else { before };
        }
        let may_miss = loose.peek().is_some_and(|(after, _)| *after <= before);
        if item.seqno() != before.next() && !may_miss {
            let what = format!(
                "the file of vBucket {} of bucket \"{}\" ends at seqno {file_ends}, but the commit log goes on with seqno {}",
                vb.id,
                vb.home.name,
                item.seqno()
            );
            let lost = format!("vBucket {}: seqnos {} to {}, and what was between", vb.id, item.seqno(), ahead.last);
            return Some(Damage { vb: Some(vb.id), path: log_dir.to_owned(), offset: None, what, lost });
        }
        before = item.seqno();
    }
    None
}

fn file(vb: &Arc<Vb>, ahead: &Ahead) -> Result<(), StoreError> {
    let committed = vb.committed();
    let high = committed.as_ref().map_or(Seqno(0), |committed| committed.high);
    let record = ahead.record.clone().or(committed.map(|committed| committed.facts.record.clone()));
    let fresh = || {
        let uuid = VbUuid((vb.home.shared.env.rng.u64() >> 16).max(1));
        let failover = FailoverTable::new(FailoverEntry { uuid, seqno: Seqno(0) });
        VbRecord { rollbacks: vb.rollbacks(), ..VbRecord::new(VbState::Active, failover) }
    };
    // A peer may have left out what comes last.
    let told = if ahead.loose.is_empty() { Seqno(0) } else { ahead.last };
    let items = with_values(vb, &ahead.items)?;
    let slice = Slice {
        from: high.next(),
        last: items.last().map_or(high, |item| item.seqno()).max(told),
        items,
        record: Arc::new(record.unwrap_or_else(fresh)),
        record_version: 0,
        snapshots: Snapshots::from(ahead.place),
        is_given: true,
    };
    let batch = Batch::of(&slice);
    if batch.is_empty() && vb.committed().is_some_and(|committed| committed.facts.record == *slice.record) {
        return Ok(());
    }
    let committed = commit(vb, &slice, &batch)?;
    vb.set_committed(committed);
    Ok(())
}

/// The items, commits with the values of their prepares.
fn with_values(vb: &Vb, items: &[Item]) -> Result<Vec<Item>, StoreError> {
    let mut prepares: HashMap<&[u8], &Item> = HashMap::new();
    let mut whole = Vec::with_capacity(items.len());
    for item in items {
        whole.push(match item.kind() {
            Kind::Committed { prepared: Some(_) } if !item.resident() => match prepares.get(item.id()) {
                Some(prepare) => commit_of(vb, item, Some(prepare))?,
                None => commit_of(vb, item, prepare_now(vb, item.key())?.as_ref())?,
            },
            _ => item.clone(),
        });
        if let Kind::Prepare { .. } = item.kind() {
            prepares.insert(item.id(), item);
        }
    }
    Ok(whole)
}

fn commit_of(vb: &Vb, commit: &Item, prepare: Option<&Item>) -> Result<Item, StoreError> {
    let (key, meta, kind) = (commit.key(), commit.meta(), commit.kind());
    let is_its = |prepare: &&Item| kind == Kind::Committed { prepared: Some(prepare.seqno()) };
    let Some(prepare) = prepare.filter(is_its) else {
        let what = format!("seqno {} of the commit log commits a change that neither has: {kind:?}", meta.seqno);
        return Err(vb.damaged(what));
    };
    let committed = prepare.committed_as(meta.seqno);
    let is_as_logged = (committed.meta(), committed.kind()) == (meta, kind);
    Ok(if is_as_logged { committed } else { Item::new(key, meta, kind, prepare.has_value().then(|| prepare.value())) })
}

/// Refuses options that would fail later.
pub(crate) fn check(options: Option<&LogOptions>) -> Result<(), StoreError> {
    options.map_or(Ok(()), |options| options.of_files().check()).map_err(StoreError::log)
}

impl StoreError {
    pub(crate) fn log(error: LogError) -> StoreError {
        match error {
            LogError::Damaged { path, offset, what, lost } => {
                StoreError::Damaged(Damages(vec![Damage { vb: None, path, offset: Some(offset), what, lost }]))
            }
            error => StoreError::Log(Arc::new(error)),
        }
    }
}
