//! Opening a log: which files are its segments, what they say, and where to go on.
//!
//! A power cut leaves whole segments and one torn end, never more; `scan` tells why. Everything else that does not fit is
//! damage, and damage stops here: a log is read whole or not at all.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use changelog::VbRecord;
use env::{Env, File, OpenMode, write_all_at};
use types::{BucketUuid, Item, Seqno, VbId};

use crate::Options;
use crate::codec::{self, ReplicaPast};
use crate::error::LogError;
use crate::format::{
    BLOCK_BYTES, DATA_AT, FLAG_PAST, FLAG_VB_RECORD, RECORD_HEADER_BYTES, RecordHeader, RecordKind, SegmentHeader,
    Slot, VERSION, seed,
};
use crate::scan::{Found, Walk, record_at};
use crate::segment::{self, Pace, Resting, Segment, Trouble};
use crate::space::{Key, Mark, Marks};

/// Of the first file of a log, for which a start waits. A start with an empty data directory took 80 ms without a log, 130
/// with a first file of 4 MiB and 300 with one of 64 MiB (medians of a busy machine); the next file is made ready beside the
/// first writes.
const FIRST_SEGMENT_BYTES: u64 = 1 << 20;

/// What one record says, in the order it was written.
#[derive(Debug)]
pub struct Replayed {
    pub bucket: BucketUuid,
    pub vb: VbId,
    /// State and histories of the vBucket as of `last`, if they had changed.
    pub record: Option<VbRecord>,
    /// In seqno order. May begin before what the vBucket's file holds. A commit has the value of its prepare, which is not
    /// repeated: see [`Item::resident`].
    pub items: Vec<Item>,
    /// The vBucket's high seqno after these items.
    pub last: Seqno,
    /// Of a vBucket that is, or ever was, a replica.
    pub past: Option<ReplicaPast>,
}

impl Replayed {
    /// How often the vBucket had been rolled back.
    pub fn rollbacks(&self) -> u32 {
        self.past.map_or(0, |past| past.rollbacks)
    }

    pub fn mark(&self) -> Mark {
        Mark { seqno: self.last, record_version: 0, rollbacks: self.rollbacks() }
    }
}

/// A log as it was left.
pub(crate) struct Opened {
    pub log_id: u128,
    pub sealed: VecDeque<(Resting, Marks)>,
    pub active: Segment,
    pub active_marks: Marks,
    /// Where the next record goes, and what stands before it in its block.
    pub at: u64,
    pub tail: Vec<u8>,
    pub prev: u32,
    /// Segments after the active one, without records.
    pub ready: VecDeque<Segment>,
    /// Segments nothing needs any more.
    pub spares: Vec<Resting>,
    pub next_number: u32,
}

/// A file in the log's directory.
pub(crate) struct Candidate {
    pub path: PathBuf,
    pub size: u64,
    pub slots: [Slot; 2],
}

impl Candidate {
    /// The newest header and its slot.
    pub fn newest(&self) -> Option<(SegmentHeader, u8)> {
        let valid = (0..).zip(&self.slots).filter_map(|(slot, found)| match found {
            Slot::Valid(header) => Some((*header, slot)),
            _ => None,
        });
        valid.max_by_key(|(header, _)| (header.sequence, header.segment_bytes))
    }

    /// One file is open at a time, however many there are.
    pub fn open(&self, env: &Env) -> Result<Arc<dyn File>, LogError> {
        env.storage.open(&self.path, OpenMode::Read).map_err(LogError::io("open", &self.path))
    }

    fn into_resting(self, header: SegmentHeader, slot: u8) -> Resting {
        Resting { path: self.path, header, slot, file_bytes: self.size }
    }

    fn damaged(&self, offset: u64, what: impl Into<String>, lost: impl Into<String>) -> LogError {
        LogError::Damaged { path: self.path.clone(), offset, what: what.into(), lost: lost.into() }
    }
}

/// The segment files of a directory by name, and the number after the highest.
pub(crate) fn candidates(env: &Env, dir: &Path, mode: OpenMode) -> Result<(Vec<Candidate>, u32), LogError> {
    let names = env.storage.list(dir).map_err(LogError::io("list", dir))?;
    let mut found = Vec::new();
    let mut next_number = 1;
    for name in names {
        let Some(number) = segment::file_number(&name) else {
            tracing::warn!(file = name, "not a commit log segment: left alone");
            continue;
        };
        next_number = next_number.max(number + 1);
        let path = dir.join(name);
        let file = env.storage.open(&path, mode).map_err(LogError::io("open", &path))?;
        let (slots, size) = Segment::look(&*file).map_err(LogError::io("read", &path))?;
        if let Some(version) = slots.iter().find_map(|slot| if let Slot::Version(v) = slot { Some(*v) } else { None }) {
            let what =
                format!("written in format {version} of the commit log; this program knows formats 1 to {VERSION}");
            return Err(LogError::Damaged { path, offset: 0, what, lost: "nothing: use a newer program".into() });
        }
        found.push(Candidate { path, size, slots });
    }
    Ok((found, next_number))
}

/// The segments that are needed, oldest first, and those that are not.
pub(crate) struct Chosen {
    pub needed: Vec<(Candidate, SegmentHeader, u8)>,
    pub surplus: Vec<Candidate>,
}

/// Sorts the files. Fails if one that is needed is missing or cannot be told.
pub(crate) fn choose(env: &Env, dir: &Path, candidates: Vec<Candidate>) -> Result<Chosen, LogError> {
    let newest = candidates.iter().filter_map(|c| c.newest()).map(|(header, _)| header).max_by_key(|h| h.sequence);
    let Some(newest) = newest else {
        for candidate in &candidates {
            if !is_zero_after_header(env, candidate)? {
                let what = "neither header slot can be read, in this or any other segment";
                return Err(candidate.damaged(0, what, "all that is in the log and not yet filed"));
            }
        }
        return Ok(Chosen { needed: Vec::new(), surplus: candidates });
    };
    let mut needed: Vec<(Candidate, SegmentHeader, u8)> = Vec::new();
    let mut surplus = Vec::new();
    for candidate in candidates {
        match candidate.newest() {
            Some((header, _)) if header.log_id != newest.log_id => {
                let what = "belongs to another log: its log id differs from the other segments'";
                return Err(candidate.damaged(0, what, "nothing, if it is moved to where it belongs"));
            }
            Some((header, slot)) if header.sequence >= newest.oldest => needed.push((candidate, header, slot)),
            _ => surplus.push(candidate),
        }
    }
    needed.sort_by_key(|(_, header, _)| header.sequence);
    for (expected, (candidate, header, _)) in (newest.oldest..).zip(&needed) {
        if header.sequence > expected {
            let what = format!("segment {expected} is missing; the first after it is in this file");
            let lost = format!("what was in segment {expected} and not yet filed; later segments cannot be used");
            return Err(LogError::Damaged { path: dir.to_owned(), offset: 0, what, lost });
        }
        if header.sequence < expected {
            return Err(candidate.damaged(0, format!("a second segment {}", header.sequence), "unknown"));
        }
        if candidate.size < header.segment_bytes {
            let what = format!("the file ends there; {} bytes belong to it", header.segment_bytes);
            return Err(candidate.damaged(candidate.size, what, "the records after this place that are not yet filed"));
        }
    }
    // A header is durable before the first record is written. So a record of a segment nobody has heard of means that
    // its header was destroyed.
    let next = newest.sequence + 1;
    for candidate in &surplus {
        let mut bytes = [0; RECORD_HEADER_BYTES];
        if candidate.size < DATA_AT + bytes.len() as u64 {
            continue;
        }
        let file = candidate.open(env)?;
        env::read_exact_at(&*file, &mut bytes, DATA_AT).map_err(LogError::io("read", &candidate.path))?;
        if RecordHeader::decode(&bytes, seed(newest.log_id, next), DATA_AT).is_some() {
            let what = format!("holds records of segment {next}, but no header that says so");
            return Err(candidate.damaged(0, what, format!("what is in segment {next}, the newest")));
        }
    }
    Ok(Chosen { needed, surplus })
}

fn is_zero_after_header(env: &Env, candidate: &Candidate) -> Result<bool, LogError> {
    let file = candidate.open(env)?;
    let mut bytes = vec![0; candidate.size.saturating_sub(DATA_AT) as usize];
    env::read_exact_at(&*file, &mut bytes, DATA_AT.min(candidate.size))
        .map_err(LogError::io("read", &candidate.path))?;
    Ok(bytes.iter().all(|byte| *byte == 0))
}

/// What is known after reading some segments in order.
#[derive(Default)]
struct Reading {
    prev: Option<u32>,
    /// The last segment that had a record: its place among the needed ones, where it ends, where its last write began.
    last: Option<(usize, u64, u64)>,
}

pub(crate) fn open(
    env: &Env,
    dir: &Path,
    options: &Options,
    replay: &mut dyn FnMut(Replayed),
) -> Result<Opened, LogError> {
    env::create_dir_durable(&*env.storage, dir).map_err(LogError::io("create directory", dir))?;
    let (candidates, next_number) = candidates(env, dir, OpenMode::ReadWrite)?;
    let Chosen { needed, surplus } = choose(env, dir, candidates)?;
    if needed.is_empty() {
        return begin_after(env, dir, options, (surplus, next_number));
    }
    let mut sealed: Vec<Resting> = needed.into_iter().map(|(c, header, slot)| c.into_resting(header, slot)).collect();

    let mut marks: Vec<Marks> = sealed.iter().map(|_| Marks::new()).collect();
    let (reading, mut bytes) = read_all(env, &sealed, |n, found| {
        if let Some(replayed) = decode(&sealed[n], &found)? {
            let key = Key { bucket: replayed.bucket, vb: replayed.vb };
            marks[n].entry(key).or_default().rise(replayed.mark());
            replay(replayed);
        }
        Ok(())
    })?;

    // From here on the log is known to be whole. What was read may still be in the page cache only, and perhaps a sync of
    // it has failed: it is written once more, so that it can be counted on.
    let spares = keep_spares(env, options, surplus, sealed.len())?;
    let (active_at, at, batch_at) = reading.last.unwrap_or((0, DATA_AT, DATA_AT));
    let open = |resting: &Resting| resting.open(env).map_err(LogError::io("open", &resting.path));
    let mut ready = sealed.split_off(active_at + 1).iter().map(open).collect::<Result<VecDeque<_>, _>>()?;
    let mut active = open(&sealed.pop().expect("there is an active segment"))?;
    if reading.last.is_some() {
        let from = batch_at / BLOCK_BYTES * BLOCK_BYTES;
        let span = from as usize..at.next_multiple_of(BLOCK_BYTES) as usize;
        bytes[at as usize..span.end].fill(0);
        write_all_at(&*active.file, &bytes[span], from).map_err(LogError::io("write", &active.path))?;
        active.file.sync().map_err(LogError::io("sync", &active.path))?;
    }
    let is_empty = reading.last.is_none();
    for segment in is_empty.then_some(&mut active).into_iter().chain(&mut ready) {
        let path = segment.path.clone();
        segment.renew_header().map_err(refused(&path))?;
    }
    env.storage.sync_dir(dir).map_err(LogError::io("sync directory", dir))?;
    for segment in [&mut active].into_iter().chain(&mut ready) {
        segment.go_over(env, options.first_way());
    }

    marks.truncate(active_at + 1);
    let active_marks = marks.pop().expect("as many as segments");
    let block_at = (at / BLOCK_BYTES * BLOCK_BYTES) as usize;
    let tail = if reading.last.is_some() { bytes[block_at..at as usize].to_vec() } else { Vec::new() };
    Ok(Opened {
        log_id: active.header.log_id,
        sealed: sealed.into_iter().zip(marks).collect(),
        active,
        active_marks,
        at,
        tail,
        prev: reading.prev.unwrap_or(0),
        ready,
        spares,
        next_number,
    })
}

/// Begins the log anew, whatever it holds: all of that is filed. Reads headers only.
pub(crate) fn begin(env: &Env, dir: &Path, options: &Options) -> Result<Opened, LogError> {
    env::create_dir_durable(&*env.storage, dir).map_err(LogError::io("create directory", dir))?;
    begin_after(env, dir, options, candidates(env, dir, OpenMode::ReadWrite)?)
}

/// The files there are give the log's identity and their room. A first file is made small, as somebody waits for it.
fn begin_after(
    env: &Env,
    dir: &Path,
    options: &Options,
    (candidates, mut next_number): (Vec<Candidate>, u32),
) -> Result<Opened, LogError> {
    let newest = candidates.iter().filter_map(Candidate::newest).map(|(header, _)| header).max_by_key(|h| h.sequence);
    let log_id = newest.map_or_else(|| u128::from(env.rng.u64()) << 64 | u128::from(env.rng.u64()), |h| h.log_id);
    let sequence = newest.map_or(1, |header| header.sequence + 1);
    let is_ours = |candidate: &Candidate| candidate.newest().is_some_and(|(header, _)| header.log_id == log_id);
    let (ours, foreign): (Vec<_>, Vec<_>) = candidates.into_iter().partition(is_ours);
    for candidate in foreign {
        remove(env, &candidate)?;
    }
    let mut spares = keep_spares(env, options, ours, 0)?;
    let header = SegmentHeader { log_id, sequence, oldest: sequence, segment_bytes: options.segment_bytes };
    let active = match spares.pop() {
        Some(spare) => spare.begin(env, options.first_way(), header).map_err(refused(&spare.path))?,
        None => {
            let path = dir.join(segment::file_name(next_number));
            next_number += 1;
            let header = SegmentHeader { segment_bytes: options.segment_bytes.min(FIRST_SEGMENT_BYTES), ..header };
            segment::create(env, options.first_way(), path.clone(), header, Pace::Hurry).map_err(refused(&path))?
        }
    };
    env.storage.sync_dir(dir).map_err(LogError::io("sync directory", dir))?;
    Ok(Opened {
        log_id,
        sealed: VecDeque::new(),
        active,
        active_marks: Marks::new(),
        at: DATA_AT,
        tail: Vec::new(),
        prev: 0,
        ready: VecDeque::new(),
        spares,
        next_number,
    })
}

/// Walks through all records in order. Returns where they end, and the bytes of the segment in which they do.
fn read_all(
    env: &Env,
    segments: &[Resting],
    mut each: impl FnMut(usize, Found<'_>) -> Result<(), LogError>,
) -> Result<(Reading, Vec<u8>), LogError> {
    let mut reading = Reading::default();
    let (mut bytes, mut last_bytes) = (Vec::new(), Vec::new());
    for (n, segment) in segments.iter().enumerate() {
        segment.read(env, &mut bytes)?;
        let seed = segment.header.seed();
        if n > 0
            && let Some(first) = record_at(&bytes, seed, DATA_AT)
        {
            // No segment is left before it has a record, and its last write is durable before the first to the next begins.
            let end = reading.last.filter(|(last, ..)| *last == n - 1).map(|(_, end, _)| end);
            if end.is_none() || reading.prev != Some(first.header.prev) {
                return Err(damaged(&segments[n - 1], end.unwrap_or(DATA_AT), &first));
            }
        }
        let mut walk = Walk::new(&bytes, seed, reading.prev);
        while let Some(found) = walk.next() {
            reading.last = Some((n, walk.at, u64::from(found.header.batch_at)));
            each(n, found)?;
        }
        reading.prev = walk.prev;
        if let Some(witness) = walk.witness() {
            return Err(damaged(segment, walk.at, &witness));
        }
        if reading.last.is_some_and(|(last, ..)| last == n) {
            std::mem::swap(&mut bytes, &mut last_bytes);
        }
    }
    Ok((reading, last_bytes))
}

fn damaged(segment: &Resting, at: u64, next: &Found<'_>) -> LogError {
    let sequence = segment.header.sequence;
    let lost = format!(
        "records of segment {sequence} from this place on; the next that can be read, for vBucket {} seqnos {}..={}, was \
         written after it",
        next.header.vb, next.header.first, next.header.last
    );
    LogError::Damaged {
        path: segment.path.clone(),
        offset: at,
        what: "this record is not what was written".into(),
        lost,
    }
}

fn decode(segment: &Resting, found: &Found<'_>) -> Result<Option<Replayed>, LogError> {
    let header = &found.header;
    let mut body = found.body;
    let mut read = || {
        let record = (header.flags & FLAG_VB_RECORD != 0).then(|| codec::take_vb_record(&mut body)).transpose()?;
        let past = (header.flags & FLAG_PAST != 0).then(|| codec::take_past(&mut body)).transpose()?;
        let mut items = Vec::new();
        while !body.is_empty() {
            items.push(codec::take_item(&mut body)?);
        }
        Ok(Replayed { bucket: header.bucket, vb: header.vb, record, items, last: header.last, past })
    };
    match header.kind {
        RecordKind::Close | RecordKind::Skip => Ok(None),
        RecordKind::Changes => read().map(Some).map_err(|what: String| LogError::Damaged {
            path: segment.path.clone(),
            offset: found.at,
            what: format!("{what}, though the checksum is right"),
            lost: format!("vBucket {}: seqnos {}..={}", header.vb, header.first, header.last),
        }),
    }
}

/// Keeps those surplus files that can be used again, within bounds, and removes the others.
fn keep_spares(env: &Env, options: &Options, surplus: Vec<Candidate>, needed: usize) -> Result<Vec<Resting>, LogError> {
    let mut spares = Vec::new();
    for candidate in surplus {
        let fits = candidate.size >= options.segment_bytes && needed + spares.len() < options.segments_max();
        match candidate.newest() {
            Some((header, slot)) if fits => {
                spares.push(candidate.into_resting(header, slot));
            }
            _ => remove(env, &candidate)?,
        }
    }
    Ok(spares)
}

fn remove(env: &Env, candidate: &Candidate) -> Result<(), LogError> {
    tracing::info!(file = %candidate.path.display(), "removing a commit log file that nothing needs");
    env.storage.remove_file(&candidate.path).map_err(LogError::io("remove", &candidate.path))
}

fn refused(path: &Path) -> impl FnOnce(Trouble) -> LogError {
    move |trouble| {
        let (Trouble::NoRoom(why) | Trouble::DiskFull(why) | Trouble::Poison(why)) = trouble;
        LogError::io("prepare", path)(std::io::Error::other(&*why))
    }
}
