//! What waits for the next sync.

use crc32c::crc32c;
use types::{BucketUuid, Item, Seqno, VbId};

use crate::codec::{self, ReplicaPast};
use crate::error::LogError;
use crate::format::{ALIGN, FLAG_PAST, FLAG_VB_RECORD, RECORD_HEADER_BYTES, RecordHeader, RecordKind};
use crate::log::Submission;

/// A submission is cut into records of about this size, so that the end of a segment is not left empty for a large one.
const BODY_BYTES_AIM: usize = 1 << 20;

/// What a buffer that is used again and again may keep while there is more to write, and while there is not. To ask the system
/// for megabytes at each sync costs a page fault for every 4 KiB of them.
pub(crate) const BUSY_BYTES_KEPT: usize = 8 << 20;
pub(crate) const IDLE_BYTES_KEPT: usize = 512 << 10;
const RECORD_BYTES_LIKELY: usize = 512;

/// Records whose place is not known yet: the header of each is filled in when it is.
#[derive(Default)]
pub(crate) struct Batch {
    /// Room for a header, the body, zeros up to the next multiple of 8; again and again.
    pub bytes: Vec<u8>,
    pub records: Vec<Waiting>,
}

pub(crate) struct Waiting {
    pub header: RecordHeader,
    pub record_version: Option<u64>,
    pub rollbacks: u32,
}

impl Batch {
    pub const fn new() -> Batch {
        Batch { bytes: Vec::new(), records: Vec::new() }
    }

    pub fn is_empty(&self) -> bool {
        self.records.is_empty()
    }

    /// Keeps its memory for the next, unless that is out of the ordinary.
    pub fn clear(&mut self) {
        self.records.clear();
        self.bytes.clear();
        self.shrink(BUSY_BYTES_KEPT);
    }

    /// What comes next may be a while away, and small: gives the memory back. Of an empty batch.
    pub fn rest(&mut self) {
        self.shrink(IDLE_BYTES_KEPT);
    }

    fn shrink(&mut self, bytes: usize) {
        self.bytes.shrink_to(bytes);
        self.records.shrink_to(bytes / RECORD_BYTES_LIKELY);
    }

    pub fn append(&mut self, other: &mut Batch) {
        self.bytes.extend_from_slice(&other.bytes);
        self.records.append(&mut other.records);
    }

    /// Adds the records of a submission. Without a vBucket record they are cut as suits the log; with one, all stays together
    /// as far as it fits, because the changes and the record belong together. After an error, what is here is worth nothing.
    pub fn put(&mut self, submission: &Submission<'_>, body_bytes_max: usize) -> Result<(), LogError> {
        let mut vb_record = Vec::new();
        if let Some((record, _)) = submission.record {
            codec::put_vb_record(&mut vb_record, record);
        }
        let aim = if vb_record.is_empty() { BODY_BYTES_AIM.min(body_bytes_max) } else { body_bytes_max };
        let past_bytes = if submission.past.is_some() { codec::PAST_BYTES } else { 0 };
        let (mut items, mut after) = (submission.items, submission.past.map_or(Seqno(0), |past| past.after));
        loop {
            // The vBucket record goes with the last.
            let (count, bytes) = fitting(items, aim - (vb_record.len() + past_bytes).min(aim));
            let is_last = count == items.len();
            let head = if is_last { &vb_record[..] } else { &[] };
            let bytes = head.len() + past_bytes + bytes;
            if bytes > body_bytes_max {
                let (bytes, bytes_max) = (bytes as u64, body_bytes_max as u64);
                return Err(LogError::TooLarge { bytes, bytes_max });
            }
            let (now, later) = items.split_at(count);
            // Where a peer left out what comes last, the end is beyond the last item.
            let last = if is_last { submission.last } else { now.last().map_or(after, Item::seqno) };
            self.put_record(submission, (after, last), now, head, bytes);
            after = last;
            items = later;
            if is_last {
                return Ok(());
            }
        }
    }

    fn put_record(
        &mut self,
        submission: &Submission<'_>,
        (after, last): (Seqno, Seqno),
        items: &[Item],
        head: &[u8],
        body_bytes: usize,
    ) {
        self.bytes.reserve(RECORD_HEADER_BYTES + body_bytes + ALIGN);
        self.bytes.extend([0; RECORD_HEADER_BYTES]);
        let body_at = self.bytes.len();
        self.bytes.extend_from_slice(head);
        let mut flags = if head.is_empty() { 0 } else { FLAG_VB_RECORD };
        if let Some(past) = &submission.past {
            flags |= FLAG_PAST;
            let (rollbacks, place) = (past.rollbacks, past.snapshots.at(last));
            codec::put_past(&mut self.bytes, &ReplicaPast { rollbacks, after, place });
        }
        items.iter().for_each(|item| codec::put_item(&mut self.bytes, item));
        assert_eq!(self.bytes.len() - body_at, body_bytes, "an item takes as many bytes as it said");
        let header = RecordHeader {
            prev: 0,
            batch_at: 0,
            life: 0,
            body_len: body_bytes as u32,
            body_crc: crc32c(&self.bytes[body_at..]),
            vb: submission.vb,
            kind: RecordKind::Changes,
            flags,
            bucket: submission.bucket,
            first: items.first().map_or(last.next(), |item| item.seqno()),
            last,
        };
        self.bytes.resize(self.bytes.len().next_multiple_of(ALIGN), 0);
        let record_version = submission.record.map(|(_, version)| version).filter(|_| !head.is_empty());
        let rollbacks = submission.past.map_or(0, |past| past.rollbacks);
        self.records.push(Waiting { header, record_version, rollbacks });
    }

    /// Puts another batch before the records from `record` on, which begin at `at`.
    pub fn insert(&mut self, record: usize, at: usize, other: Batch) {
        self.bytes.splice(at..at, other.bytes);
        self.records.splice(record..record, other.records);
    }

    /// A record without a body, for the log itself.
    pub fn of_the_log(kind: RecordKind) -> Batch {
        let header = RecordHeader {
            prev: 0,
            batch_at: 0,
            life: 0,
            body_len: 0,
            body_crc: crc32c(&[]),
            vb: VbId(0),
            kind,
            flags: 0,
            bucket: BucketUuid(0),
            first: Seqno(0),
            last: Seqno(0),
        };
        Batch {
            bytes: vec![0; RECORD_HEADER_BYTES],
            records: vec![Waiting { header, record_version: None, rollbacks: 0 }],
        }
    }
}

/// How many of the first items take at most `aim` bytes together (but one if there is one), and how many those are.
fn fitting(items: &[Item], aim: usize) -> (usize, usize) {
    let mut total = 0;
    for (n, item) in items.iter().enumerate() {
        let bytes = codec::item_bytes(item);
        if n > 0 && total + bytes > aim {
            return (n, total);
        }
        total += bytes;
    }
    (items.len(), total)
}
