//! Power loss: what was acknowledged is found again, whole, whatever the disk did with what was not synced.

mod common;

use std::io;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::{Arc, Mutex};

use common::MemFile;
use couchstore::check::{Depth, check};
use couchstore::{Copy, Couch, Doc, Mode, Version};
use env::File;
use proptest::prelude::*;

const SECTOR: usize = 512;

/// A file that remembers what it was asked to do.
struct Journal {
    file: Arc<MemFile>,
    events: Mutex<Vec<Event>>,
}

#[derive(Clone, Debug)]
enum Event {
    Write(u64, Vec<u8>),
    Sync,
    /// A commit was reported as made: so many documents, the last of them written by this commit.
    Acked(u64),
}

impl File for Journal {
    fn read_at(&self, buf: &mut [u8], at: u64) -> io::Result<usize> {
        self.file.read_at(buf, at)
    }
    fn write_at(&self, bytes: &[u8], at: u64) -> io::Result<usize> {
        self.events.lock().unwrap().push(Event::Write(at, bytes.to_vec()));
        self.file.write_at(bytes, at)
    }
    fn size(&self) -> io::Result<u64> {
        self.file.size()
    }
    fn set_size(&self, _: u64) -> io::Result<()> {
        unreachable!("files only grow by being written to")
    }
    fn sync(&self) -> io::Result<()> {
        self.events.lock().unwrap().push(Event::Sync);
        Ok(())
    }
    fn write_back(&self, _at: u64, _len: u64) -> io::Result<()> {
        Ok(())
    }
}

/// Commit `n` leaves documents 0..=n, all with a body that says `n`; bodies are long enough to cross blocks.
fn commits(count: u64) -> Vec<Event> {
    let journal = Arc::new(Journal { file: MemFile::empty(), events: Mutex::default() });
    let mut couch = Couch::create(journal.clone(), Path::new("power"), Version::V13).unwrap();
    for n in 0..count {
        let mut batch = couch.batch().unwrap();
        for i in 0..=n {
            let doc = Doc {
                id: &i.to_be_bytes(),
                seq: 1 + n * count + i,
                rev: n + 1,
                deleted: false,
                content_meta: 3,
                rev_meta: &[0; 18],
                body: Some(&vec![n as u8; 1000]),
                compress: false,
            };
            batch.put(doc).unwrap();
        }
        batch.commit(n + 1).unwrap();
        journal.events.lock().unwrap().push(Event::Acked(n + 1));
    }
    journal.events.lock().unwrap().clone()
}

/// The file after power loss before event `cut`: all that was synced, and of the rest the sectors that `kept` says,
/// the file having grown as far as the furthest of them or a little less.
fn after_loss(events: &[Event], cut: usize, mut kept: impl FnMut() -> bool) -> Vec<u8> {
    let synced = events[..cut].iter().rposition(|event| matches!(event, Event::Sync)).unwrap_or(0);
    let mut bytes = Vec::new();
    for (i, event) in events[..cut].iter().enumerate() {
        let Event::Write(at, new) = event else { continue };
        let mut from = 0;
        while from < new.len() {
            let position = *at as usize + from;
            let to = new.len().min(from + SECTOR - position % SECTOR);
            if i < synced || kept() {
                let end = position + to - from;
                if bytes.len() < end {
                    bytes.resize(end, 0);
                }
                bytes[position..end].copy_from_slice(&new[from..to]);
            }
            from = to;
        }
    }
    bytes
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn power_loss_before_any_call_loses_no_acked_commit_and_mixes_none(seed: u64) {
        let events = commits(5);
        let mut state = seed | 1;
        for cut in 0..=events.len() {
            for keep_of_four in 0..5 {
                let bytes = after_loss(&events, cut, || {
                    state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                    (state >> 40) % 4 < keep_of_four
                });
                let acked = |end: usize| events[..end].iter().rev().find_map(|event| match event {
                    Event::Acked(n) => Some(*n),
                    _ => None,
                });
                let in_flight = acked(cut).unwrap_or(0) + 1;
                let file = MemFile::of(&bytes);
                let couch = match Couch::open(file.clone(), Path::new("power"), Mode::Strict) {
                    Ok(couch) => couch,
                    Err(e) => {
                        prop_assert!(acked(cut).is_none(), "cut before {cut}: {e}");
                        continue;
                    }
                };
                let commit = couch.header().timestamp_ns;
                prop_assert!(commit >= acked(cut).unwrap_or(0) && commit <= in_flight, "cut before {cut}: {commit}");
                let mut docs = 0;
                let _ = couch.changes_since(0, |doc| {
                    assert_eq!(couch.body(&doc).unwrap().unwrap(), vec![commit as u8 - 1; 1000]);
                    docs += 1;
                    ControlFlow::Continue(())
                }).unwrap();
                prop_assert_eq!(docs, commit);
                prop_assert!(check(file, Path::new("power"), Depth::Newest).unwrap().is_whole());
            }
        }
    }
}

/// A copy is not there until its commit; a reader of a half-made one must not take it for an empty file.
#[test]
fn a_copy_without_its_commit_does_not_open() {
    let file = MemFile::empty();
    let mut copy = Copy::create(file.clone(), Path::new("copy"), Version::V13, common::no_spill()).unwrap();
    let couch = common::open(&common::fixture("b-1000snappy-v13.couch"), Mode::Strict).unwrap();
    for _ in 0..4 {
        let mut seq = copy.bytes();
        let _ = couch.changes_since(0, |doc| {
            seq += 1;
            copy.put(&couchstore::DocInfo { seq, ..doc }, Some(&[5; 400])).unwrap();
            ControlFlow::Continue(())
        });
    }
    drop(copy);
    assert!(file.size().unwrap() > 500_000);
    assert!(Couch::open(file, Path::new("copy"), Mode::Strict).is_err());
}
