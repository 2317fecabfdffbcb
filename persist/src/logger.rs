//! Between the changelogs and the commit log: what a vBucket has goes to the log at once, what the log made durable is
//! published.
//!
//! ```text
//!     changed(vb) ──▶ submit what is behind the log cursor ──▶ commit log: one sync for all
//!                                                                   │
//!     changed(vb), while another submits for it: counted, seen      ▼
//!                                                     durable moves, nudge, and the filer is told
//! ```
//! Submitting copies and does no I/O, so whoever changed a vBucket does it: no task stands between a change and the sync
//! it rides.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use changelog::{Cursor, VbRecord};
use commit_log::{Key, Log, LogError, Mark, Observer, Past, Submission, Synced};
use types::rank::{Mutex, Rank, RwLock};
use types::{BucketUuid, Seqno};

use crate::filer::Filer;
use crate::queue::Urgency;
use crate::shared::Shared;
use crate::turn::{self, Desk, Turn};
use crate::vb::{Attached, Vb};

/// A submission takes no further change once it has this many bytes of them.
const SUBMISSION_BYTES_MAX: usize = 4 << 20;
/// From this share of the log on, the oldest segment is filed for its room.
const FILE_FROM_PERCENT: u64 = 50;

/// A vBucket's records on their way: the log does not give them back, and a file must not run ahead of the log.
#[derive(Default)]
pub(crate) struct Records {
    submitted: VecDeque<(u64, Arc<VbRecord>)>,
    logged: Option<(u64, Arc<VbRecord>)>,
}

impl Records {
    pub fn starting_at(version: u64, record: Arc<VbRecord>) -> Records {
        Records { submitted: VecDeque::new(), logged: Some((version, record)) }
    }

    /// A file has it, whether or not the log does.
    pub fn filed(&mut self, version: u64, record: &Arc<VbRecord>) {
        if self.logged.as_ref().is_none_or(|(logged, _)| *logged < version) {
            self.logged = Some((version, Arc::clone(record)));
        }
        self.submitted.retain(|(submitted, _)| *submitted > version);
    }

    /// Nothing is on its way to the log any more, and a file that has the record of version `recorded` lacks nothing that the
    /// log has.
    pub fn are_filed(&self, recorded: Option<u64>) -> bool {
        self.submitted.is_empty() && self.logged.as_ref().map(|(version, _)| *version) <= recorded
    }

    /// What was on its way never came.
    pub fn forget_submitted(&mut self) {
        self.submitted.clear();
    }

    /// The newest one that is durable.
    pub fn logged(&self) -> Option<(u64, Arc<VbRecord>)> {
        self.logged.clone()
    }

    fn submitted_version(&self) -> Option<u64> {
        self.submitted.back().or(self.logged.as_ref()).map(|(version, _)| *version)
    }

    pub fn became_durable(&mut self, upto: u64) {
        while self.submitted.front().is_some_and(|(version, _)| *version <= upto) {
            let newer = self.submitted.pop_front();
            // What was submitted while a rollback began is void.
            if newer.as_ref().map(|record| record.0) > self.logged.as_ref().map(|record| record.0) {
                self.logged = newer;
            }
        }
    }
}

/// Where changes become durable. It goes round: off, entering, on, leaving, off; from leaving perhaps back to entering.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Phase {
    /// In the files. There is no log, or it takes nothing any more.
    Off,
    /// Nowhere, for as long as the flushes take that began before. The log is there; a file must not run ahead of it.
    Entering,
    /// In the log.
    On,
    /// In the files; the log is still needed, and takes nothing.
    Leaving,
}

impl Phase {
    const ALL: [Phase; 4] = [Phase::Off, Phase::Entering, Phase::On, Phase::Leaving];

    /// Files get only what the log has made durable.
    pub fn is_log_first(self) -> bool {
        matches!(self, Phase::Entering | Phase::On)
    }
}

/// The vBuckets of a bucket, as the log's observer finds them.
type Homes = HashMap<BucketUuid, Arc<[Arc<Vb>]>>;

/// 1. What is behind a vBucket's log cursor has not been submitted; what is before it was, once, in order. One thread at a
///    time submits for a vBucket: whoever raised its `asks` from 0. It goes on until nobody has asked meanwhile.
/// 2. `durable` is published here, by the thread that leads the log, as long as the logger takes; otherwise by the flusher.
/// 3. What the log refused for want of room is submitted again when there is some: a vBucket is on the list of the refused
///    before it looks again whether the log is full, and the log has room before the list is taken.
/// 4. A change is never forgotten when the phase changes. Whoever changes it looks at each vBucket afterwards, under the
///    changelog's lock and with its `asks` raised. A change from before that is seen then; one that comes later sees the
///    new phase.
pub(crate) struct Logger {
    log: RwLock<Option<Arc<Log>>>,
    /// Grows with each change of `log`.
    log_epoch: AtomicU64,
    homes: RwLock<Arc<Homes>>,
    pub filer: Filer,
    refused: Mutex<Vec<Arc<Vb>>>,
    promised: Mutex<Vec<Arc<Vb>>>,
    is_full: AtomicBool,
    phase: AtomicU8,
}

impl Logger {
    pub fn new() -> Logger {
        Logger {
            log: RwLock::ranked(Rank::FileCache, None),
            log_epoch: AtomicU64::new(1),
            homes: RwLock::ranked(Rank::FileCache, Arc::default()),
            filer: Filer::new(),
            refused: Mutex::ranked(Rank::CommitQueue, Vec::new()),
            promised: Mutex::ranked(Rank::CommitQueue, Vec::new()),
            is_full: AtomicBool::new(false),
            phase: AtomicU8::new(Phase::Off as u8),
        }
    }

    pub fn phase(&self) -> Phase {
        Phase::ALL[usize::from(self.phase.load(Ordering::Acquire))]
    }

    /// Changes go through the log. Otherwise flushes commit them themselves.
    pub fn takes(&self) -> bool {
        self.phase() == Phase::On
    }

    /// To be followed by [`Logger::look_at_all`], once there are vBuckets.
    pub fn set_phase(&self, phase: Phase) {
        self.phase.store(phase as u8, Ordering::Release);
    }

    pub fn set_log(&self, log: Option<Arc<Log>>) {
        let mut here = self.log.write();
        let before = std::mem::replace(&mut *here, log);
        self.log_epoch.fetch_add(1, Ordering::Release);
        drop(here);
        drop(before);
    }

    /// All vBuckets of all buckets.
    pub fn everyone(&self) -> Vec<Arc<Vb>> {
        let homes = Arc::clone(&self.homes.read());
        homes.values().flat_map(|vbs| vbs.iter()).cloned().collect()
    }

    /// Sends what is there where it goes in this phase.
    pub fn look_at_all(&self) {
        self.gather();
        self.has_room();
        self.submit_all(&self.everyone());
    }

    pub fn log(&self) -> Option<Arc<Log>> {
        self.log.read().clone()
    }

    pub fn is_full(&self) -> bool {
        self.is_full.load(Ordering::Acquire)
    }

    pub fn add(&self, bucket: BucketUuid, vbs: &[Arc<Vb>]) {
        let mut homes = self.homes.write();
        let mut more = Homes::clone(&homes);
        more.insert(bucket, vbs.into());
        *homes = Arc::new(more);
    }

    pub fn remove(&self, bucket: BucketUuid) {
        let before = {
            let mut homes = self.homes.write();
            let mut fewer = Homes::clone(&homes);
            fewer.remove(&bucket);
            std::mem::replace(&mut *homes, Arc::new(fewer))
        };
        drop(before);
        self.filer.forget(bucket);
    }

    /// The bucket is gone from the disk: its part of the log is not needed.
    pub fn forget(&self, bucket: BucketUuid) {
        if let Some(log) = self.log() {
            log.forget(bucket);
        }
    }

    /// The vBucket has something new. What nobody waits for waits for company.
    pub fn changed(&self, vb: &Arc<Vb>, urgency: Urgency) {
        match urgency {
            Urgency::Durable => self.submit(vb),
            Urgency::Normal if vb.is_promised.swap(true, Ordering::AcqRel) => {}
            Urgency::Normal => self.promise(vb),
        }
    }

    /// The vBuckets have something new that somebody waits for. Makes it durable on this thread, unless another one is at it.
    /// `false`: not with a log.
    pub fn lead<'a>(&self, vbs: impl Iterator<Item = &'a Arc<Vb>>) -> bool {
        if !self.takes() {
            return false;
        }
        let turn = Turn::begin(self);
        vbs.for_each(|vb| self.submit(vb));
        turn.wait();
        true
    }

    fn promise(&self, vb: &Arc<Vb>) {
        let mut promised = self.promised.lock();
        promised.push(Arc::clone(vb));
        let is_first = promised.len() == 1;
        drop(promised);
        match self.takes() {
            true if !is_first => {}
            true => self.log().map_or_else(|| self.gather(), |log| log.promise()),
            // Nobody will ask for the list.
            false => self.gather(),
        }
    }

    /// Submits what was promised.
    fn gather(&self) {
        let promised = std::mem::take(&mut *self.promised.lock());
        turn::with_desk(self, |desk| {
            for vb in &promised {
                // Before the look: whatever comes later is promised anew.
                vb.is_promised.swap(false, Ordering::AcqRel);
                self.submit_at(desk, vb);
            }
        });
    }

    fn submit_all(&self, vbs: &[Arc<Vb>]) {
        turn::with_desk(self, |desk| vbs.iter().for_each(|vb| self.submit_at(desk, vb)));
    }

    fn submit(&self, vb: &Arc<Vb>) {
        turn::with_desk(self, |desk| self.submit_at(desk, vb));
    }

    fn submit_at(&self, desk: &mut Desk, vb: &Arc<Vb>) {
        if vb.asks.fetch_add(1, Ordering::AcqRel) > 0 {
            return;
        }
        let mut seen = 1;
        loop {
            self.submit_for(desk, vb);
            match vb.asks.compare_exchange(seen, 0, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => break,
                Err(now) => seen = now,
            }
        }
        if !self.takes() && vb.is_dirty() {
            vb.home.shared.file(vb, Urgency::Durable);
        }
    }

    /// Sees that the desk has the log that there is.
    fn refresh(&self, desk: &mut Desk) {
        if desk.epoch == self.log_epoch.load(Ordering::Acquire) {
            return;
        }
        desk.call();
        let log = self.log.read();
        (desk.log, desk.epoch) = (log.clone(), self.log_epoch.load(Ordering::Acquire));
    }

    fn submit_for(&self, desk: &mut Desk, vb: &Arc<Vb>) {
        let Some(attached) = vb.attached() else { return };
        let cursor = attached.log_cursor.lock().take();
        let cursor = match (self.phase(), cursor) {
            (Phase::On, None) => Some(attached.enter_log()),
            (Phase::Off, Some(cursor)) => {
                attached.log.unregister(cursor);
                None
            }
            (_, cursor) => cursor,
        };
        self.refresh(desk);
        if let (Some(log), Some(cursor)) = (&desk.log, &cursor) {
            desk.calls |= self.submit_from(cursor, vb, &attached, log);
        }
        *attached.log_cursor.lock() = cursor;
    }

    /// Whether the log's leader is to be called.
    fn submit_from(&self, cursor: &Cursor, vb: &Arc<Vb>, attached: &Attached, log: &Log) -> bool {
        let mut calls = false;
        while self.takes() && attached.log.marks.poisoned().is_none() && !vb.home.gone.load(Ordering::Acquire) {
            let slice = attached.log.read(cursor, SUBMISSION_BYTES_MAX);
            let submitted = attached.records.lock().submitted_version();
            let with_record = submitted != Some(slice.record_version);
            // As for a file: a record that was never changed waits for the first change.
            let is_worth = || slice.record_version > 0 || vb.committed().is_some();
            if slice.is_empty() && !(with_record && is_worth()) {
                break;
            }
            if with_record {
                let record = (slice.record_version, Arc::clone(&slice.record));
                attached.records.lock().submitted.push_back(record);
            }
            let rollbacks = slice.record.rollbacks;
            let after = Seqno(slice.from.0 - 1);
            let past = Past { rollbacks, after, snapshots: &slice.snapshots };
            let submission = Submission {
                bucket: vb.home.uuid,
                vb: vb.id,
                items: &slice.items,
                last: slice.last,
                record: with_record.then_some((&*slice.record, slice.record_version)),
                past: (slice.is_given || rollbacks > 0).then_some(past),
            };
            match log.deposit(&submission) {
                Ok(nobody_leads) => {
                    calls |= nobody_leads;
                    attached.log.release(cursor, slice.last);
                    attached.submitted.store(slice.last.0, Ordering::Release);
                    let bytes: usize = slice.items.iter().map(|item| item.memory()).sum();
                    self.filer.add_bytes(vb, bytes as u64);
                    // The slice was not cut short: who has something newer asks after that.
                    if bytes < SUBMISSION_BYTES_MAX {
                        break;
                    }
                }
                Err(error) => {
                    if with_record {
                        attached.records.lock().submitted.pop_back();
                    }
                    self.refuse(vb, attached, log, &error);
                    break;
                }
            }
        }
        calls
    }

    fn refuse(&self, vb: &Arc<Vb>, attached: &Attached, log: &Log, error: &LogError) {
        match error {
            // Whoever closed it looks at all vBuckets afterwards.
            LogError::Closed => {}
            LogError::Full { .. } | LogError::Io { .. } => {
                self.refused.lock().push(Arc::clone(vb));
                self.is_full.store(true, Ordering::Release);
                self.filer.wake();
                if log.stats().full.is_none() || !self.takes() {
                    self.has_room();
                }
            }
            LogError::Poisoned(_) | LogError::TooLarge { .. } | LogError::Damaged { .. } | LogError::BadOptions(_) => {
                vb.poison(attached, error.to_string());
            }
        }
    }

    fn has_room(&self) {
        self.is_full.store(false, Ordering::Release);
        let refused = std::mem::take(&mut *self.refused.lock());
        self.submit_all(&refused);
    }

    /// The vBucket's file holds everything up to here.
    pub fn filed(&self, vb: &Vb, seqno: Seqno, record_version: u64) {
        let rollbacks = vb.rollbacks();
        let Some(log) = self.log() else { return };
        let key = Key { bucket: vb.home.uuid, vb: vb.id };
        log.release(key, Mark { seqno, record_version, rollbacks });
    }

    /// Whether the oldest segment should be filed now, so that the log keeps room.
    pub fn wants_room(&self) -> bool {
        self.is_full() || self.log().is_some_and(|log| log.pressure().percent() >= FILE_FROM_PERCENT)
    }

    /// The vBuckets whose filing makes room.
    pub fn holders(&self) -> Vec<Arc<Vb>> {
        let Some(log) = self.log() else { return Vec::new() };
        let homes = Arc::clone(&self.homes.read());
        let find = |key: &Key| homes.get(&key.bucket)?.get(usize::from(key.vb.0)).cloned();
        log.needs_filing(usize::MAX).iter().filter_map(|holder| find(&holder.key)).collect()
    }

    /// Makes durable what was submitted, and takes nothing any more: from here on flushes commit by themselves.
    pub fn close(&self) {
        // The files may not take it.
        self.gather();
        self.set_phase(Phase::Off);
        let Some(log) = self.log() else { return };
        if let Err(error) = log.close()
            && log.poisoned().is_none()
        {
            // What it did not take is still in the changelogs, and goes to the files now.
            tracing::warn!("the commit log could not be closed in order: {error}");
        }
    }

    /// When this returns, nothing is written to the log and nobody is told anything.
    pub fn stop(&self) {
        self.set_phase(Phase::Off);
        self.set_log(None);
        *self.homes.write() = Arc::default();
        let kept = [&self.refused, &self.promised].map(|list| std::mem::take(&mut *list.lock()));
        drop(kept);
        self.filer.stop();
    }

    fn publish(&self, batch: &[Synced]) {
        let homes = Arc::clone(&self.homes.read());
        // Most of a batch is of one bucket.
        let mut home: Option<(BucketUuid, &[Arc<Vb>])> = None;
        for synced in batch {
            let Key { bucket, vb } = synced.key;
            let vbs = match home {
                Some((uuid, vbs)) if uuid == bucket => vbs,
                _ => homes.get(&bucket).map_or(&[][..], |vbs| &vbs[..]),
            };
            home = Some((bucket, vbs));
            let Some(vb) = vbs.get(usize::from(vb.0)) else { continue };
            let Some(attached) = vb.publish_durable(synced) else { continue };
            // After the mark: whoever changes the phase looks at it afterwards.
            match self.phase() {
                Phase::Leaving => vb.home.shared.file(vb, Urgency::Durable),
                _ => self.filer.note(vb),
            }
            attached.nudge.marks_moved(vb.id);
        }
        if self.wants_room() {
            self.filer.wake();
        }
    }
}

/// Hears what the log did.
pub(crate) struct Ear(pub Weak<Shared>);

impl Ear {
    fn with(&self, hear: impl FnOnce(&Logger)) {
        if let Some(shared) = self.0.upgrade() {
            hear(&shared.logger);
            shared.switch.look();
        }
    }
}

impl Observer for Ear {
    fn durable(&self, batch: &[Synced]) {
        self.with(|logger| logger.publish(batch));
    }

    fn poisoned(&self, reason: &str) {
        self.with(|logger| {
            let homes = Arc::clone(&logger.homes.read());
            for vb in homes.values().flat_map(|vbs| vbs.iter()) {
                if let Some(attached) = vb.attached() {
                    vb.poison(&attached, format!("the commit log is not written any more: {reason}"));
                }
            }
        });
    }

    fn room(&self) {
        if let Some(shared) = self.0.upgrade() {
            shared.reserve.may_have_space();
        }
        self.with(Logger::has_room);
    }

    fn synced(&self, took: Duration) {
        if let Some(shared) = self.0.upgrade() {
            shared.governor.foreground(took);
        }
    }

    fn disk_full(&self) {
        if let Some(shared) = self.0.upgrade() {
            shared.reserve.write_failed();
        }
    }

    fn gather(&self) {
        self.with(Logger::gather);
    }
}
