//! A log's files as a person may want to see them. Changes nothing.

use std::path::Path;

use env::{Env, OpenMode};
use hashbrown::HashMap;
use serde::Serialize;

use crate::LogError;
use crate::codec;
use crate::format::{FLAG_PAST, FLAG_VB_RECORD, RecordKind, SegmentHeader, Slot};
use crate::recovery::{Candidate, candidates};
use crate::scan::Walk;

/// What is in a log's directory.
#[derive(Clone, Debug, Serialize)]
pub struct Inspection {
    pub log_id: Option<String>,
    /// By file name.
    pub segments: Vec<SegmentReport>,
}

/// One segment file.
#[derive(Clone, Debug, Serialize)]
pub struct SegmentReport {
    pub file: String,
    pub file_bytes: u64,
    /// Of the two header slots: `blank`, `bad`, or the sequence.
    pub slots: [String; 2],
    pub sequence: Option<u64>,
    /// The oldest segment that was needed when this one's header was written.
    pub oldest: Option<u64>,
    pub records: u64,
    /// Writes that brought them, as far as the records tell.
    pub batches: u64,
    /// Where the write began that brought the last record.
    pub last_batch: u64,
    /// Where the records end.
    pub end: u64,
    /// The log was closed in order at the end of this segment.
    pub closed: bool,
    /// A record that proves that what stands at `end` is damaged.
    pub damaged_before: Option<u64>,
    pub ranges: Vec<RangeReport>,
}

/// What a segment holds of one vBucket.
#[derive(Clone, Debug, Serialize)]
pub struct RangeReport {
    pub bucket: String,
    pub vb: u16,
    pub first: u64,
    pub last: u64,
    pub records: u64,
    pub items: u64,
    pub vb_records: u64,
    pub bytes: u64,
}

/// Looks at a log that no server is using.
pub fn inspect(env: &Env, dir: &Path) -> Result<Inspection, LogError> {
    let (candidates, _) = candidates(env, dir, OpenMode::Read)?;
    let log_id = candidates.iter().find_map(|c| c.newest()).map(|(header, _)| format!("{:032x}", header.log_id));
    let segments = candidates.iter().map(|candidate| report(env, candidate)).collect::<Result<_, _>>()?;
    Ok(Inspection { log_id, segments })
}

fn report(env: &Env, candidate: &Candidate) -> Result<SegmentReport, LogError> {
    let show = |slot: &Slot| match slot {
        Slot::Valid(header) => header.sequence.to_string(),
        Slot::Blank => "blank".to_owned(),
        Slot::Version(version) => format!("format {version}"),
        Slot::Bad => "bad".to_owned(),
    };
    let header = candidate.newest().map(|(header, _)| header);
    let file = candidate.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let mut report = SegmentReport {
        file,
        file_bytes: candidate.size,
        slots: [show(&candidate.slots[0]), show(&candidate.slots[1])],
        sequence: header.map(|h| h.sequence),
        oldest: header.map(|h| h.oldest),
        records: 0,
        batches: 0,
        last_batch: 0,
        end: 0,
        closed: false,
        damaged_before: None,
        ranges: Vec::new(),
    };
    if let Some(header) = header {
        let mut bytes = vec![0; candidate.size.min(header.segment_bytes) as usize];
        env::read_exact_at(&*candidate.open(env)?, &mut bytes, 0).map_err(LogError::io("read", &candidate.path))?;
        walk(&mut report, &header, &bytes);
    }
    Ok(report)
}

fn walk(report: &mut SegmentReport, header: &SegmentHeader, bytes: &[u8]) {
    let mut places = HashMap::new();
    let mut walk = Walk::new(bytes, header.seed(), None);
    let mut batch = None;
    while let Some(found) = walk.next() {
        report.records += 1;
        report.batches += u64::from(batch != Some((found.header.life, found.header.batch_at)));
        batch = Some((found.header.life, found.header.batch_at));
        report.last_batch = u64::from(found.header.batch_at);
        report.closed = found.header.kind == RecordKind::Close;
        if found.header.kind != RecordKind::Changes {
            continue;
        }
        let (bucket, vb, first, last) =
            (found.header.bucket, found.header.vb, found.header.first.0, found.header.last.0);
        let place = *places.entry((bucket, vb)).or_insert(report.ranges.len());
        if place == report.ranges.len() {
            let bucket = format!("{:032x}", bucket.0);
            let range = RangeReport { bucket, vb: vb.0, first, last, records: 0, items: 0, vb_records: 0, bytes: 0 };
            report.ranges.push(range);
        }
        let range = &mut report.ranges[place];
        range.first = range.first.min(first);
        range.last = range.last.max(last);
        range.records += 1;
        range.bytes += found.header.stride();
        let mut body = found.body;
        if found.header.flags & FLAG_VB_RECORD != 0 {
            range.vb_records += u64::from(codec::take_vb_record(&mut body).is_ok());
        }
        if found.header.flags & FLAG_PAST != 0 {
            let _ = codec::take_past(&mut body);
        }
        while !body.is_empty() && codec::take_item(&mut body).is_ok() {
            range.items += 1;
        }
    }
    report.end = walk.at;
    report.damaged_before = walk.witness().map(|witness| witness.at);
}
