//! The flusher: takes what waits in a vBucket's changelog, commits it to the file, and moves the marks.
//!
//! ```text
//!     changelog ──read──▶ batch ──commit──▶ file      durable = filed = last      cursor released      nudge
//!         ▲                         │
//!         └── read again, later ◀── failed             a failed sync: poisoned, never again until a restart
//! ```
//! Each vBucket's file is committed by itself: two syncs a flush. That is the baseline which a shared log is measured
//! against; `durable` and `filed` are published separately because there they part.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use changelog::Slice;

use crate::batch::Batch;
use crate::commit::commit;
use crate::error::{StoreError, Verdict};
use crate::logger::Phase;
use crate::queue::Outcome;
use crate::reserve::is_out_of_space;
use crate::shared::Shared;
use crate::stats::{ACCEPTED_BYTES, FILE_BYTES, FLUSH_FAILURES, FLUSHED_BYTES, FLUSHED_ITEMS, FLUSHES, SYNC_FAILURES};
use crate::vb::{Attached, Committed, Vb};

const RETRY_FIRST: Duration = Duration::from_millis(100);
const RETRY_MAX: Duration = Duration::from_secs(5);

/// How long no flush should begin: as long as the log has room, nobody waits for one.
pub(crate) fn pause(shared: &Shared) -> Option<Duration> {
    let may_wait = shared.logger.phase() == Phase::On && !shared.logger.wants_room();
    if may_wait { shared.governor.pause() } else { None }
}

/// Flushes one vBucket once. The caller has it from the queue, so nobody else does.
pub(crate) fn flush(vb: &Arc<Vb>) -> Outcome {
    let Some(attached) = vb.attached() else { return Outcome::Done };
    if attached.log.marks.poisoned().is_some() || vb.home.gone.load(Ordering::Acquire) {
        return Outcome::Done;
    }
    if vb.gate.room() == 0 {
        // Its compaction asks again.
        return Outcome::Done;
    }
    let clock = &vb.home.shared.env.clock;
    let begun = clock.monotonic();
    let phase = vb.home.shared.logger.phase();
    let Some(slice) = what_to_flush(vb, &attached, phase) else { return name(vb, &attached) };
    let batch = Batch::of(&slice);
    if batch.is_empty() && vb.committed().is_some_and(|c| c.facts.record == *slice.record) {
        note_record(&attached, &slice);
        if !slice.is_empty() {
            // Nothing to write: a peer left out everything up to here.
            vb.publish_filed(&attached, slice.last);
            attached.log.release(&attached.cursor, slice.last);
            attached.nudge.marks_moved(vb.id);
        }
        end(vb, &attached, &slice);
        return name(vb, &attached);
    }
    match commit(vb, &slice, &batch) {
        Ok(committed) => {
            publish(vb, &attached, &slice, &batch, committed);
            vb.home.shared.compactor.consider(vb);
            FLUSHES.record(clock.monotonic().saturating_sub(begun));
            end(vb, &attached, &slice)
        }
        Err(error) if error.verdict() == Verdict::Retry => put_back(vb, &error),
        Err(error) => {
            poison(vb, &attached, &error);
            Outcome::Done
        }
    }
}

/// With a commit log, a file holds nothing that the log does not: neither changes nor a record. So what a log replays is
/// never older than the file. While a log is left behind, a file that ends where the log ends has the log's record, as the
/// log would be believed; one that goes on beyond that has its own.
fn what_to_flush(vb: &Vb, attached: &Attached, phase: Phase) -> Option<Slice> {
    vb.take_unfiled_bytes();
    let durable = attached.log.marks.durable();
    let mut slice = attached.log.read(&attached.cursor, vb.home.shared.options.batch_bytes_max);
    let room = vb.gate.room();
    let is_log_first = phase.is_log_first();
    let count = match is_log_first {
        true => slice.items.partition_point(|item| item.seqno() <= durable),
        false => slice.items.len(),
    };
    slice.last = if slice.items.len() > count.min(room) {
        slice.items.truncate(count.min(room));
        slice.items.last().map_or(attached.log.marks.filed(), |item| item.seqno())
    } else if is_log_first {
        slice.last.min(durable)
    } else {
        slice.last
    };
    vb.gate.pass(slice.items.len());
    let is_beyond_log = slice.last.0 > attached.submitted.load(Ordering::Acquire);
    if phase == Phase::Off || (phase == Phase::Leaving && is_beyond_log) {
        return (!slice.is_empty() || vb.wants_record(attached)).then_some(slice);
    }
    (slice.record_version, slice.record) = attached.records.lock().logged()?;
    let is_new = attached.recorded.load(Ordering::Acquire) != slice.record_version;
    (!slice.is_empty() || is_new).then_some(slice)
}

/// With nothing to write, a compaction may still have left it to us to give the new file its name.
fn name(vb: &Vb, attached: &Attached) -> Outcome {
    if let Err(error) = vb.sync_and_name() {
        poison(vb, attached, &error);
    }
    Outcome::Done
}

fn publish(vb: &Vb, attached: &Attached, slice: &Slice, batch: &Batch<'_>, committed: Committed) {
    let recovered = vb.failures() > 0;
    let grown = committed.file_bytes.saturating_sub(vb.committed().map_or(0, |before| before.file_bytes));
    FILE_BYTES.add(grown);
    vb.home.shared.governor.grew(grown);
    if vb.home.shared.is_logged() {
        vb.home.shared.governor.spent(grown);
    }
    let accepted = slice.items.iter().filter(|item| item.is_committed());
    ACCEPTED_BYTES.add(accepted.map(|item| (item.id().len() + item.value().len()) as u64).sum());
    // Before the marks: whoever sees them may ask the file.
    vb.set_committed(committed);
    note_record(attached, slice);
    vb.home.shared.reserve.may_have_space();
    vb.publish_filed(attached, slice.last);
    attached.log.release(&attached.cursor, slice.last);

    let counters = &vb.home.counters;
    counters.add(|c| &c.commits, 1);
    counters.add(|c| &c.items_written, batch.entries.len() as u64);
    counters.add(|c| &c.items_deduplicated, (batch.items_in - batch.entries.len()) as u64);
    counters.add(|c| &c.value_bytes_written, batch.entries.iter().map(|e| e.item.value().len() as u64).sum());
    FLUSHED_BYTES.add(batch.bytes_in as u64);
    FLUSHED_ITEMS.add(batch.items_in as u64);
    if recovered {
        tracing::info!(bucket = vb.home.name, vb = vb.id.0, "flushing works again");
    }
    attached.nudge.marks_moved(vb.id);
}

/// The file has the slice's record.
fn note_record(attached: &Attached, slice: &Slice) {
    attached.recorded.store(slice.record_version, Ordering::Release);
    attached.records.lock().filed(slice.record_version, &slice.record);
}

/// Gives the log its room back, and sees to it that what is left gets its turn.
fn end(vb: &Arc<Vb>, attached: &Attached, slice: &Slice) -> Outcome {
    let marks = &attached.log.marks;
    let logger = &vb.home.shared.logger;
    logger.filed(vb, slice.last, slice.record_version);
    if !logger.takes() {
        return if marks.high() > slice.last { Outcome::More } else { Outcome::Done };
    }
    let is_behind = marks.durable() > slice.last;
    // A slice that was cut short by its size: the rest goes at once. Otherwise it came meanwhile, and may come of age.
    if is_behind && slice_is_full(vb, slice) {
        return Outcome::More;
    }
    let has_newer_record = attached.records.lock().logged().is_some_and(|(version, _)| version != slice.record_version);
    if is_behind || has_newer_record {
        logger.filer.note(vb);
    }
    if logger.wants_room() {
        logger.filer.wake();
    }
    Outcome::Done
}

fn slice_is_full(vb: &Vb, slice: &Slice) -> bool {
    slice.items.iter().map(|item| item.memory()).sum::<usize>() >= vb.home.shared.options.batch_bytes_max
}

/// Nothing was acknowledged and nothing committed: the same changes are read again later.
fn put_back(vb: &Vb, error: &StoreError) -> Outcome {
    let shared = &vb.home.shared;
    if error.errno().is_some_and(is_out_of_space) {
        shared.reserve.write_failed();
    }
    let failures = vb.add_failure(error);
    vb.home.counters.add(|c| &c.flush_failures, 1);
    FLUSH_FAILURES.inc();
    let delay = RETRY_FIRST.saturating_mul(1 << (failures - 1).min(16)).min(RETRY_MAX);
    if let Some(untold) = shared.may_tell() {
        tracing::warn!(
            bucket = vb.home.name,
            vb = vb.id.0,
            failures,
            untold,
            "flush failed, will be tried again in {delay:?}: {error}"
        );
    }
    Outcome::Retry(shared.env.clock.monotonic() + delay)
}

/// What the disk holds is not known, or not what we left there. Reads go on from the last commit that succeeded.
pub(crate) fn poison(vb: &Vb, attached: &Attached, error: &StoreError) {
    let reason = match error {
        StoreError::SyncFailed { path, source, .. } => {
            SYNC_FAILURES.inc();
            vb.home.counters.add(|c| &c.sync_failures, 1);
            format!("fsync of {} failed: {source}", path.display())
        }
        error => {
            FLUSH_FAILURES.inc();
            vb.home.counters.add(|c| &c.flush_failures, 1);
            error.to_string()
        }
    };
    tracing::error!(
        bucket = vb.home.name,
        vb = vb.id.0,
        "no more writes to this vBucket until a restart has looked at the disk: {reason}"
    );
    // If it was this vBucket that found the disk full, nobody would find out that it no longer is.
    vb.home.shared.reserve.may_have_space();
    vb.poison(attached, reason);
}
