//! How far each stage has come, as plain numbers published by one owner each.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use types::Seqno;

/// The marks of one vBucket.
///
/// 1. `high ≥ durable ≥ filed`, and each only grows, but for a rollback.
/// 2. `high` and `visible` are published by the changelog, `durable` and `filed` by the persistence of this vBucket, nobody else.
/// 3. A published mark covers everything up to it: a reader that sees `durable ≥ n` may acknowledge n.
/// 4. Once poisoned, `durable` and `filed` never move again.
#[derive(Debug, Default)]
pub struct Watermarks {
    high: AtomicU64,
    visible: AtomicU64,
    durable: AtomicU64,
    filed: AtomicU64,
    poison: OnceLock<String>,
}

impl Watermarks {
    /// The marks of a vBucket whose file holds everything up to `seqno`.
    pub(crate) fn starting_at(seqno: Seqno) -> Watermarks {
        Watermarks {
            high: AtomicU64::new(seqno.0),
            visible: AtomicU64::new(seqno.0),
            durable: AtomicU64::new(seqno.0),
            filed: AtomicU64::new(seqno.0),
            poison: OnceLock::new(),
        }
    }

    /// In memory.
    pub fn high(&self) -> Seqno {
        Seqno(self.high.load(Ordering::Acquire))
    }

    /// The last change that whoever does not know of sync writes can see: no prepare, and no abort.
    pub fn visible(&self) -> Seqno {
        Seqno(self.visible.load(Ordering::Acquire))
    }

    /// On disk, in the commit log or the file: may be acknowledged as persisted.
    pub fn durable(&self) -> Seqno {
        Seqno(self.durable.load(Ordering::Acquire))
    }

    /// Committed in the couchstore file: readable by key, may leave memory.
    pub fn filed(&self) -> Seqno {
        Seqno(self.filed.load(Ordering::Acquire))
    }

    pub(crate) fn publish_high(&self, seqno: Seqno) {
        self.high.store(seqno.0, Ordering::Release);
    }

    pub(crate) fn publish_visible(&self, seqno: Seqno) {
        self.visible.store(seqno.0, Ordering::Release);
    }

    /// Says that everything up to `seqno` is on disk.
    pub fn publish_durable(&self, seqno: Seqno) {
        assert!(self.poison.get().is_none(), "a poisoned vBucket makes nothing durable");
        assert!(seqno <= self.high(), "durable mark {seqno} beyond what was written");
        let before = self.durable.fetch_max(seqno.0, Ordering::AcqRel);
        assert!(before <= seqno.0, "durable mark went back from {before} to {seqno}");
    }

    /// Says that everything up to `seqno` is in the couchstore file.
    pub fn publish_filed(&self, seqno: Seqno) {
        assert!(seqno <= self.durable(), "filed mark {seqno} beyond the durable one");
        let before = self.filed.fetch_max(seqno.0, Ordering::AcqRel);
        assert!(before <= seqno.0, "filed mark went back from {before} to {seqno}");
    }

    /// The vBucket went back to `seqno`, which its file has. Whoever publishes must be kept from it meanwhile.
    pub fn roll_back(&self, seqno: Seqno, visible: Seqno) {
        self.visible.store(visible.0, Ordering::Release);
        for mark in [&self.filed, &self.durable, &self.high] {
            mark.store(seqno.0, Ordering::Release);
        }
    }

    /// Stops the marks for good: what the disk holds is no longer known. The first reason is kept.
    pub fn poison(&self, reason: String) {
        let _ = self.poison.set(reason);
    }

    /// Why nothing is made durable any more, if so.
    pub fn poisoned(&self) -> Option<&str> {
        self.poison.get().map(String::as_str)
    }
}
