//! Sorting more entries than memory should hold: sorted runs go to a file, and a merge brings them back in order.
//!
//! ```text
//!     push … push ──▶ [held] ──full──▶ sorted ──▶ |run|run|run|   one file, which the caller removes
//!                                                    ╲  │  ╱
//!                                            Merge ◀── smallest next
//! ```
//! Entries carry a checksum: what was spilled comes back as it was, or not at all.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::collections::binary_heap::PeekMut;
use std::io;
use std::path::Path;
use std::sync::Arc;

use env::File;

use crate::error::{Error, Result};
use crate::format::{Checksum, Fields, put_uint};
use crate::source::Source;

/// Makes an empty file for entries that do not fit in memory. Called at most once.
pub type Spill = Box<dyn FnMut() -> io::Result<Arc<dyn File>> + Send>;

/// Memory that entries may take before they are spilled, in bytes.
const HELD_BYTES_MAX: usize = 16 << 20;
/// What an entry takes in memory beside its bytes: two vectors.
const ENTRY_BYTES: usize = 48;
/// Bytes in front of a spilled entry: two lengths and a checksum.
const FRAME_BYTES: usize = 10;
const READ_BYTES: usize = 64 << 10;

pub(crate) type Entry = (Vec<u8>, Vec<u8>);

/// Entries that come in any order.
pub(crate) struct Runs {
    held: Vec<Entry>,
    held_bytes: usize,
    held_bytes_max: usize,
    spill: Spill,
    path: Arc<Path>,
    file: Option<Source>,
    /// Where each run ends; the next begins there.
    ends: Vec<u64>,
}

impl Runs {
    /// `path` is what errors call the file of spilled entries.
    pub fn new(spill: Spill, path: Arc<Path>) -> Runs {
        let (held, ends) = (Vec::new(), Vec::new());
        Runs { held, held_bytes: 0, held_bytes_max: HELD_BYTES_MAX, spill, path, file: None, ends }
    }

    pub fn push(&mut self, key: Vec<u8>, value: Vec<u8>) -> Result<()> {
        self.held_bytes += key.len() + value.len() + ENTRY_BYTES;
        self.held.push((key, value));
        if self.held_bytes > self.held_bytes_max { self.spill() } else { Ok(()) }
    }

    fn spill(&mut self) -> Result<()> {
        let file = match self.file.take() {
            Some(file) => file,
            None => {
                let made = (self.spill)();
                let failed = |source| Error::Io { op: "create", path: self.path.clone(), offset: 0, source };
                Source { file: made.map_err(failed)?, path: self.path.clone() }
            }
        };
        self.held.sort_unstable();
        let mut at = self.ends.last().copied().unwrap_or(0);
        let mut out = Vec::with_capacity(READ_BYTES * 2);
        for (key, value) in self.held.drain(..) {
            put_uint(&mut out, key.len() as u64, 2);
            put_uint(&mut out, value.len() as u64, 4);
            put_uint(&mut out, u64::from(checksum(&key, &value)), 4);
            out.extend_from_slice(&key);
            out.extend_from_slice(&value);
            if out.len() >= READ_BYTES {
                env::write_all_at(&*file.file, &out, at).map_err(file.io("write", at))?;
                at += out.len() as u64;
                out.clear();
            }
        }
        env::write_all_at(&*file.file, &out, at).map_err(file.io("write", at))?;
        self.ends.push(at + out.len() as u64);
        self.held_bytes = 0;
        self.file = Some(file);
        Ok(())
    }

    /// All entries, in order of key.
    pub fn merge(mut self) -> Result<Merge> {
        self.held.sort_unstable();
        let mut heads = BinaryHeap::new();
        let mut runs = Vec::new();
        let mut from = 0;
        for &to in &self.ends {
            runs.push(Run { next: from, to, bytes: Vec::new(), read: 0 });
            from = to;
        }
        let mut merge = Merge { file: self.file, runs, held: self.held.into_iter(), heads: BinaryHeap::new() };
        for number in 0..=merge.runs.len() {
            heads.extend(merge.next_of(number)?.map(|entry| Reverse((entry, number))));
        }
        merge.heads = heads;
        Ok(merge)
    }
}

fn checksum(key: &[u8], value: &[u8]) -> u32 {
    crc32c::crc32c_append(Checksum::Crc32c.of(key), value)
}

/// Sorted runs on their way back.
pub(crate) struct Merge {
    file: Option<Source>,
    runs: Vec<Run>,
    /// The last run, which was never spilled.
    held: std::vec::IntoIter<Entry>,
    /// The first entry left of each run.
    heads: BinaryHeap<Reverse<(Entry, usize)>>,
}

struct Run {
    /// Where to read on.
    next: u64,
    to: u64,
    bytes: Vec<u8>,
    /// How much of `bytes` was handed out.
    read: usize,
}

impl Merge {
    pub fn next(&mut self) -> Result<Option<Entry>> {
        let Some(Reverse((_, number))) = self.heads.peek() else { return Ok(None) };
        let after = self.next_of(*number)?;
        let mut head = self.heads.peek_mut().expect("just seen");
        match after {
            Some(after) => {
                let number = head.0.1;
                let Reverse((entry, _)) = std::mem::replace(&mut *head, Reverse((after, number)));
                Ok(Some(entry))
            }
            None => Ok(Some(PeekMut::pop(head).0.0)),
        }
    }

    fn next_of(&mut self, number: usize) -> Result<Option<Entry>> {
        match (self.runs.get_mut(number), &self.file) {
            (Some(run), Some(file)) => run.next(file),
            _ => Ok(self.held.next()),
        }
    }
}

impl Run {
    fn next(&mut self, file: &Source) -> Result<Option<Entry>> {
        if self.read == self.bytes.len() && self.next == self.to {
            return Ok(None);
        }
        let at = self.next - (self.bytes.len() - self.read) as u64;
        let corrupt = || file.corrupt(at, "a spilled entry is not what was written");
        let frame = self.take(FRAME_BYTES, file)?.ok_or_else(corrupt)?;
        let mut fields = Fields(&frame);
        let (Some(key), Some(value), Some(expected)) = (fields.uint(2), fields.uint(4), fields.uint(4)) else {
            return Err(corrupt());
        };
        let key = self.take(key as usize, file)?.ok_or_else(corrupt)?;
        let value = self.take(value as usize, file)?.ok_or_else(corrupt)?;
        match u64::from(checksum(&key, &value)) == expected {
            true => Ok(Some((key, value))),
            false => Err(corrupt()),
        }
    }

    /// The next `n` bytes; `None` if the run has no more so many.
    fn take(&mut self, n: usize, file: &Source) -> Result<Option<Vec<u8>>> {
        if self.bytes.len() - self.read < n {
            self.bytes.drain(..self.read);
            self.read = 0;
            let have = self.bytes.len();
            let more = (READ_BYTES.max(n) as u64).min(self.to - self.next) as usize;
            self.bytes.resize(have + more, 0);
            let got = file.read_up_to(&mut self.bytes[have..], self.next)?;
            self.bytes.truncate(have + got);
            self.next += got as u64;
        }
        let taken = self.bytes.get(self.read..self.read + n).map(<[u8]>::to_vec);
        self.read += taken.as_ref().map_or(0, Vec::len);
        Ok(taken)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use env::OpenMode;
    use env::sim::{self, SimStorage};
    use proptest::prelude::*;

    const PATH: &str = "/spilled";

    fn runs(storage: &SimStorage, held_bytes_max: usize) -> Runs {
        let storage = storage.clone();
        let spill = Box::new(move || env::Storage::open(&storage, Path::new(PATH), OpenMode::CreateNew));
        Runs { held_bytes_max, ..Runs::new(spill, Path::new(PATH).into()) }
    }

    fn all(mut merge: Merge) -> Result<Vec<Entry>> {
        let mut found = Vec::new();
        while let Some(entry) = merge.next()? {
            found.push(entry);
        }
        Ok(found)
    }

    proptest! {
        #[test]
        fn entries_come_back_sorted_and_whole(
            entries in prop::collection::vec((prop::collection::vec(any::<u8>(), 0..30),
                prop::collection::vec(any::<u8>(), 0..200)), 0..200),
            held_bytes_max in 0usize..5000,
        ) {
            let (_, sim) = sim::env(1);
            let mut runs = runs(&sim.storage, held_bytes_max);
            for (key, value) in entries.clone() {
                runs.push(key, value).unwrap();
            }
            let mut expected = entries;
            expected.sort_unstable();
            prop_assert_eq!(all(runs.merge().unwrap()).unwrap(), expected);
        }
    }

    #[test]
    fn a_flipped_bit_in_a_spilled_run_is_found() {
        let (_, sim) = sim::env(1);
        let mut runs = runs(&sim.storage, 100);
        for n in 0..20u8 {
            runs.push(vec![n; 4], vec![n; 40]).unwrap();
        }
        let file = env::Storage::open(&sim.storage, Path::new(PATH), OpenMode::ReadWrite).unwrap();
        let mut byte = [0];
        env::read_exact_at(&*file, &mut byte, 30).unwrap();
        env::write_all_at(&*file, &[byte[0] ^ 4], 30).unwrap();
        let found = runs.merge().and_then(all);
        assert!(found.is_err_and(|error| error.is_damage()));
    }
}
