//! The end of the log: where the next record goes. Whoever owns the writer leads; there is one.

use env::write_all_at;
use hashbrown::HashMap;

use crate::batch::{BUSY_BYTES_KEPT, Batch, IDLE_BYTES_KEPT};
use crate::error::is_no_space;
use crate::format::{BLOCK_BYTES, DATA_AT, RecordKind};
use crate::log::Synced;
use crate::segment::{Segment, Trouble};
use crate::space::{Key, Mark, Marks};
use crate::stats;

const BLOCK: usize = BLOCK_BYTES as usize;

/// 1. All before `at` is durable, and `prev` is the checksum of the last record there.
/// 2. `tail` is what stands between the last block boundary and `at`: writes are whole blocks, so it is written again.
/// 3. `batch.records[..done]` are durable, and told to the observer.
pub(crate) struct Writer {
    pub segment: Segment,
    pub at: u64,
    pub tail: Vec<u8>,
    pub prev: u32,
    pub life: u32,
    pub marks: Marks,
    pub batch: Batch,
    pub done: usize,
    pub done_bytes: usize,
    buffer: Vec<u8>,
    synced: Vec<Synced>,
    places: HashMap<Key, usize>,
}

/// What one write made durable.
pub(crate) struct Written<'a> {
    pub synced: &'a [Synced],
    pub records: usize,
    pub bytes: usize,
}

impl Writer {
    pub fn new(segment: Segment, marks: Marks, at: u64, tail: Vec<u8>, prev: u32, life: u32) -> Writer {
        Writer {
            segment,
            at,
            tail,
            prev,
            life,
            marks,
            batch: Batch::default(),
            done: 0,
            done_bytes: 0,
            buffer: Vec::new(),
            synced: Vec::new(),
            places: HashMap::new(),
        }
    }

    pub fn is_done(&self) -> bool {
        self.done == self.batch.records.len()
    }

    /// Makes the batch empty.
    pub fn clear(&mut self) {
        self.batch.clear();
        (self.done, self.done_bytes) = (0, 0);
    }

    /// There is nothing to write, perhaps for long: gives memory back.
    pub fn rest(&mut self) {
        self.batch.rest();
        if self.buffer.len() > IDLE_BYTES_KEPT {
            self.buffer = Vec::new();
        }
    }

    /// Nothing is left from before, and all of `waiting` fits in the segment.
    pub fn takes_in_one(&self, waiting: &Batch) -> bool {
        self.batch.is_empty() && self.at + waiting.bytes.len() as u64 <= self.segment.header.segment_bytes
    }

    /// How many of the records that are left fit in the segment: count and bytes.
    pub fn fitting(&self) -> (usize, usize) {
        let room = (self.segment.header.segment_bytes - self.at) as usize;
        let mut bytes = 0;
        let mut count = 0;
        for record in &self.batch.records[self.done..] {
            let stride = record.header.stride() as usize;
            if bytes + stride > room {
                break;
            }
            bytes += stride;
            count += 1;
        }
        (count, bytes)
    }

    /// Puts a record that says nothing before those that are left: none of them fits, and the segment is empty. That happens
    /// in a segment smaller than the configured size, as a log's first one is.
    pub fn skip(&mut self) {
        debug_assert_eq!(self.at, DATA_AT);
        self.batch.insert(self.done, self.done_bytes, Batch::of_the_log(RecordKind::Skip));
    }

    /// Writes the next `count` records and makes them durable. On `DiskFull` nothing has changed, and the same may be tried
    /// again: no sync has failed, so writing the same bytes in the same place makes up for the first attempt.
    pub fn write(&mut self, count: usize, bytes: usize) -> Result<Written<'_>, Trouble> {
        let from = self.at / BLOCK_BYTES * BLOCK_BYTES;
        let (start, prev) = self.compose(count, bytes);
        let span = (self.tail.len() + bytes).next_multiple_of(BLOCK);
        write_durably(&mut self.segment, &self.buffer[start..start + span], from)?;
        stats::DISK_BYTES.add(span as u64);

        let end = self.tail.len() + bytes;
        let block = end / BLOCK * BLOCK;
        self.tail.clear();
        self.tail.extend_from_slice(&self.buffer[start + block..start + end]);
        self.at += bytes as u64;
        self.prev = prev;
        if self.buffer.len() > BUSY_BYTES_KEPT {
            self.buffer = Vec::new();
        }
        self.note(count);
        self.done += count;
        self.done_bytes += bytes;
        Ok(Written { synced: &self.synced, records: count, bytes })
    }

    /// Puts tail, records and zeros into the buffer at a block boundary of memory. Returns where, and the last checksum.
    fn compose(&mut self, count: usize, bytes: usize) -> (usize, u32) {
        let tail = self.tail.len();
        debug_assert_eq!(tail as u64, self.at % BLOCK_BYTES);
        let span = (tail + bytes).next_multiple_of(BLOCK);
        if self.buffer.len() < span + BLOCK {
            self.buffer.resize(span + BLOCK, 0);
        }
        let start = self.buffer.as_ptr().align_offset(BLOCK).min(BLOCK);
        let out = &mut self.buffer[start..start + span];
        out[..tail].copy_from_slice(&self.tail);
        out[tail..tail + bytes].copy_from_slice(&self.batch.bytes[self.done_bytes..self.done_bytes + bytes]);
        out[tail + bytes..].fill(0);
        let seed = self.segment.header.seed();
        let (mut prev, mut place) = (self.prev, tail);
        for waiting in &self.batch.records[self.done..self.done + count] {
            let mut header = waiting.header;
            (header.prev, header.batch_at, header.life) = (prev, self.at as u32, self.life);
            let (encoded, crc) = header.encode(seed, self.at + (place - tail) as u64);
            out[place..place + encoded.len()].copy_from_slice(&encoded);
            place += header.stride() as usize;
            prev = crc;
        }
        (start, prev)
    }

    /// Notes how far each vBucket has come with the next `count` records.
    fn note(&mut self, count: usize) {
        self.synced.clear();
        self.places.clear();
        for waiting in &self.batch.records[self.done..self.done + count] {
            let (header, version) = (&waiting.header, waiting.record_version);
            if header.kind != RecordKind::Changes {
                continue;
            }
            let key = Key { bucket: header.bucket, vb: header.vb };
            let rollbacks = waiting.rollbacks;
            let mark = Mark { seqno: header.last, record_version: version.unwrap_or(0), rollbacks };
            self.marks.entry(key).or_default().rise(mark);
            let place = *self.places.entry(key).or_insert(self.synced.len());
            match self.synced.get_mut(place) {
                None => self.synced.push(Synced { key, seqno: header.last, record_version: version, rollbacks }),
                Some(synced) => {
                    let further = (synced.rollbacks, synced.seqno).max((rollbacks, header.last));
                    (synced.rollbacks, synced.seqno) = further;
                    synced.record_version = synced.record_version.max(version);
                }
            }
        }
    }

    /// Goes on in `next`. Returns the segment that is full, and what it holds.
    pub fn switch(&mut self, next: Segment) -> (Segment, Marks) {
        self.at = DATA_AT;
        self.tail.clear();
        (std::mem::replace(&mut self.segment, next), std::mem::take(&mut self.marks))
    }
}

fn write_durably(segment: &mut Segment, bytes: &[u8], at: u64) -> Result<(), Trouble> {
    let failed = |segment: &Segment, op: &str, e: std::io::Error| {
        let why = format!("{op} {}@{at}: {e}", segment.path.display()).into();
        if is_no_space(&e) { Trouble::DiskFull(why) } else { Trouble::Poison(why) }
    };
    if let Some(durable) = &segment.durable {
        match write_all_at(&**durable, bytes, at) {
            Ok(()) => return Ok(()),
            // Not taken at all: this file system wants it otherwise.
            Err(e) if e.kind() == std::io::ErrorKind::InvalidInput => segment.durable = None,
            Err(e) => return Err(failed(segment, "write", e)),
        }
    }
    write_all_at(&*segment.file, bytes, at).map_err(|e| failed(segment, "write", e))?;
    let synced = segment.file.sync();
    synced.map_err(|e| Trouble::Poison(format!("sync of {} failed: {e}", segment.path.display()).into()))
}
