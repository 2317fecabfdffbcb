//! A file in memory that can be told to fail or to transfer less than it was asked to.
#![allow(dead_code)]

use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use couchstore::{Couch, Mode, Result};
use env::File;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    Read,
    Write,
    Sync,
}

/// 1. Without a plan it behaves like a file on a perfect disk.
/// 2. `fail_at(call, k)` makes the `k`th such call from now fail, and `keep_failing` all after it.
/// 3. `stingy` makes every transfer as short as a small generator says, sometimes nothing for a write.
#[derive(Default)]
pub struct MemFile {
    bytes: Mutex<Vec<u8>>,
    plan: Mutex<Option<(Call, u64)>>,
    stingy: AtomicU64,
    pub reads: AtomicU64,
    pub writes: AtomicU64,
    pub syncs: AtomicU64,
}

impl MemFile {
    pub fn of(bytes: &[u8]) -> Arc<MemFile> {
        Arc::new(MemFile { bytes: Mutex::new(bytes.to_vec()), ..MemFile::default() })
    }

    pub fn empty() -> Arc<MemFile> {
        MemFile::of(&[])
    }

    pub fn bytes(&self) -> Vec<u8> {
        self.bytes.lock().unwrap().clone()
    }

    pub fn edit(&self, edit: impl FnOnce(&mut Vec<u8>)) {
        edit(&mut self.bytes.lock().unwrap());
    }

    pub fn fail_at(&self, call: Call, k: u64) {
        *self.plan.lock().unwrap() = Some((call, k));
    }

    pub fn heal(&self) {
        *self.plan.lock().unwrap() = None;
    }

    pub fn stingy(&self, seed: u64) {
        self.stingy.store(seed | 1, Relaxed);
    }

    fn may(&self, call: Call) -> io::Result<()> {
        let mut plan = self.plan.lock().unwrap();
        match plan.as_mut() {
            Some((planned, k)) if *planned == call && *k == 0 => {
                *plan = None;
                Err(io::Error::other("injected"))
            }
            Some((planned, k)) if *planned == call => {
                *k -= 1;
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn share(&self, len: usize, least: usize) -> usize {
        let state = self.stingy.load(Relaxed);
        if state == 0 || len == 0 {
            return len;
        }
        let next = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        self.stingy.store(next | 1, Relaxed);
        ((next >> 33) as usize % (len + 1)).max(least)
    }
}

impl File for MemFile {
    fn read_at(&self, buf: &mut [u8], at: u64) -> io::Result<usize> {
        self.reads.fetch_add(1, Relaxed);
        self.may(Call::Read)?;
        let bytes = self.bytes.lock().unwrap();
        let rest = bytes.get(at as usize..).unwrap_or(&[]);
        let n = self.share(rest.len().min(buf.len()), 1).min(rest.len()).min(buf.len());
        buf[..n].copy_from_slice(&rest[..n]);
        Ok(n)
    }

    fn write_at(&self, new: &[u8], at: u64) -> io::Result<usize> {
        self.writes.fetch_add(1, Relaxed);
        self.may(Call::Write)?;
        let new = &new[..self.share(new.len(), 0)];
        let mut bytes = self.bytes.lock().unwrap();
        let end = at as usize + new.len();
        if !new.is_empty() && bytes.len() < end {
            bytes.resize(end, 0);
        }
        bytes[at as usize..end].copy_from_slice(new);
        Ok(new.len())
    }

    fn size(&self) -> io::Result<u64> {
        Ok(self.bytes.lock().unwrap().len() as u64)
    }

    fn set_size(&self, size: u64) -> io::Result<()> {
        self.bytes.lock().unwrap().resize(size as usize, 0);
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        self.syncs.fetch_add(1, Relaxed);
        self.may(Call::Sync)
    }
    fn write_back(&self, _at: u64, _len: u64) -> io::Result<()> {
        Ok(())
    }
}

pub fn open(bytes: &[u8], mode: Mode) -> Result<Couch> {
    Couch::open(MemFile::of(bytes), Path::new("test.couch"), mode)
}

pub fn fixture(name: &str) -> Vec<u8> {
    std::fs::read(format!("{}/tests/fixtures/{name}", env!("CARGO_MANIFEST_DIR"))).unwrap()
}

pub fn sidecar(name: &str) -> serde_json::Value {
    serde_json::from_slice(&fixture(&name.replace(".couch", ".json"))).unwrap()
}

pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// For copies of few documents.
pub fn no_spill() -> couchstore::Spill {
    Box::new(|| panic!("so few documents are sorted in memory"))
}
