//! The end of a run: what waits goes to the files, for as long as any of them gets further.
//!
//! A supervisor kills a server that takes too long to stop, and files that cannot be written now may never be. With a commit
//! log there is nothing to lose by leaving: it has what they lack, and the next start files that.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use types::VbId;

use crate::names::{BUCKETS_DIR, CLEAN_FILE, LOG_DIR, SPEC_FILE};
use crate::queue::Urgency;
use crate::spec::replace_file;
use crate::store::Store;
use crate::vb::Vb;

/// With what no file has got any further for so long, a stop goes on. Twice the longest pause before a flush is tried again.
const STILL_MAX: Duration = Duration::from_secs(10);
/// So many vBuckets are named where there may be many.
const NAMED_MAX: usize = 5;

/// A stop under way. Nothing may be appended to the changelogs any more.
///
/// 1. It waits for a vBucket while that is being flushed or will be, unless no flush of any vBucket has succeeded for
///    `STILL_MAX`. What was tried and failed before is tried at once when the wait begins.
/// 2. As nothing is appended, flushes that succeed come to an end. So does this.
pub struct Drain<'a> {
    store: &'a Store,
    /// Not looked at, or not done when they were.
    rest: Vec<Arc<Vb>>,
    /// How many flushes had succeeded at `since`, and none after.
    successes: u64,
    since: Duration,
}

/// How a drain ended.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Drained {
    /// vBuckets with changes that are not in their file: poisoned, or their flush went on failing.
    pub left: Vec<Left>,
}

/// A vBucket whose file could not be written to its end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Left {
    pub bucket: String,
    pub vb: VbId,
    /// What is in the way.
    pub why: String,
    /// Changes that the next start finds in the commit log.
    pub logged: u64,
    /// Changes that are not known to be on disk: neither in the file nor in a commit log that the next start will read.
    pub lost: u64,
    /// Of these, those that were acknowledged as durable. None, unless somebody removed files of a server that ran.
    pub promised: u64,
}

impl Drained {
    /// There are changes that the next start will not know of.
    pub fn is_lossy(&self) -> bool {
        self.left.iter().any(|left| left.lost > 0)
    }
}

/// What an operator has to know, if anything is left.
impl fmt::Display for Drained {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for bucket in self.left.chunk_by(|a, b| a.bucket == b.bucket) {
            let named: Vec<_> = bucket.iter().take(NAMED_MAX).map(|left| left.vb.to_string()).collect();
            let more = match bucket.len() - named.len() {
                0 => String::new(),
                more => format!(" and {more} more"),
            };
            let (Left { bucket, vb, why, .. }, named) = (&bucket[0], named.join(", "));
            writeln!(f, "bucket {bucket}: vBuckets whose files lack changes: {named}{more}; {vb}: {why}")?;
        }
        let sum = |of: fn(&Left) -> u64| self.left.iter().map(of).sum::<u64>();
        let (logged, lost, promised) = (sum(|left| left.logged), sum(|left| left.lost), sum(|left| left.promised));
        if logged > 0 {
            write!(f, "changes that are in the commit log, from where the next start files them: {logged}; ")?;
        }
        let of = self.left.iter().filter(|left| left.lost > 0).count();
        write!(f, "changes that are not known to be on disk: {lost}")?;
        match (lost, promised) {
            (0, _) => Ok(()),
            (_, 0) => write!(f, ", of vBuckets: {of}; none of them was acknowledged as durable"),
            _ => write!(
                f,
                ", of vBuckets: {of}; acknowledged as durable: {promised}, but somebody removed the directories they were \
                 written to"
            ),
        }
    }
}

impl Store {
    /// Flushes everything that waits and ends all flushing, for a shutdown. Blocks until each vBucket's changes are in its
    /// file, or it is clear that they will not be: see [`Drain`].
    pub fn drain(&self) -> Drained {
        let mut drain = self.begin_drain();
        self.shared.wait_until(|| drain.is_over());
        drain.end()
    }

    /// Asks for a flush of everything that waits, without waiting for it.
    pub fn start_drain(&self) {
        self.shared.logger.filer.file_all();
        for bucket in self.buckets() {
            for vb in bucket.vbs().iter().filter(|vb| vb.is_dirty()) {
                self.shared.changed(vb, Urgency::Durable);
            }
        }
    }

    /// The first part of [`Store::drain`], for those who do the waiting themselves.
    pub fn begin_drain(&self) -> Drain<'_> {
        let shared = &self.shared;
        // What it has copied is not needed, and what it holds up is.
        shared.compactor.stop();
        shared.switch.stop();
        // Whatever the log could not take goes to the files now, like everything else.
        shared.logger.close();
        self.start_drain();
        shared.retry_now();
        Drain {
            store: self,
            rest: self.buckets().iter().flat_map(|bucket| bucket.vbs()).cloned().collect(),
            successes: shared.successes(),
            since: shared.env.clock.monotonic(),
        }
    }
}

impl Drain<'_> {
    /// There is nothing to wait for any more. To be asked again whenever a flush has ended.
    pub fn is_over(&mut self) -> bool {
        while self.rest.pop_if(|vb| !(vb.ticket.is_busy() || vb.ticket.is_waiting())).is_some() {}
        if self.rest.is_empty() {
            return true;
        }
        let (now, successes) = (self.store.shared.env.clock.monotonic(), self.store.shared.successes());
        if successes > self.successes {
            (self.successes, self.since) = (successes, now);
        }
        now.saturating_sub(self.since) >= STILL_MAX
    }

    /// Ends all flushing, and says what was left.
    pub fn end(self) -> Drained {
        let shared = &self.store.shared;
        if !self.rest.is_empty() {
            tracing::error!("no file of a vBucket could be written for {STILL_MAX:?}: stopping without");
        }
        shared.stop_writing();
        let left = self.left();
        if left.is_empty() && !self.store.is_drained.swap(true, Ordering::AcqRel) {
            let storage = &*shared.env.storage;
            if let Err(error) = replace_file(storage, &self.store.data_dir, CLEAN_FILE, b"") {
                tracing::warn!("the mark of a clean stop could not be written: {error}");
            }
        }
        Drained { left }
    }

    fn left(&self) -> Vec<Left> {
        let mut left = Vec::new();
        for bucket in self.store.buckets() {
            let here: Vec<_> = bucket.vbs().iter().filter_map(left_of).collect();
            let is_kept = here.is_empty() || self.will_be_replayed(&bucket.spec().name);
            left.extend(here.into_iter().map(|vb| if is_kept { vb } else { vb.without_log() }));
        }
        left
    }

    /// The next start finds the bucket, and the log. Who removes directories below a running server has neither.
    fn will_be_replayed(&self, bucket: &str) -> bool {
        let data_dir = &self.store.data_dir;
        let needed = [data_dir.join(LOG_DIR), data_dir.join(BUCKETS_DIR).join(bucket).join(SPEC_FILE)];
        needed.iter().all(|path| self.store.shared.env.storage.exists(path).unwrap_or(true))
    }
}

impl Left {
    fn without_log(self) -> Left {
        Left { lost: self.lost + self.logged, promised: self.logged, logged: 0, ..self }
    }
}

/// What the vBucket's file lacks.
fn left_of(vb: &Arc<Vb>) -> Option<Left> {
    let attached = vb.attached()?;
    let marks = &attached.log.marks;
    let (high, durable, filed) = (marks.high(), marks.durable(), marks.filed());
    // A poisoned one too: what it could not write would be missed by whoever takes the stop for a clean one.
    if high <= filed && !vb.wants_record(&attached) {
        return None;
    }
    Some(Left {
        bucket: vb.home.name.clone(),
        vb: vb.id,
        why: marks.poisoned().map(str::to_owned).or_else(|| vb.failure()).unwrap_or_else(|| "nobody wrote it".into()),
        logged: durable.0.saturating_sub(filed.0),
        lost: high.0.saturating_sub(durable.0),
        promised: 0,
    })
}
