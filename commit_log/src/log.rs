//! The log as its users see it.

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use changelog::{Snapshots, VbRecord};
use env::Env;
use scheduler::park::{Bay, Look, Wake};
use types::rank::Rank;
use types::sync::{Mutex, MutexGuard};
use types::{BucketUuid, Item, Seqno, VbId};

use crate::Options;
use crate::batch::Batch;
use crate::driver::{COMPANY_PAUSE, Running};
use crate::error::LogError;
use crate::format::{DATA_AT, RECORD_HEADER_BYTES, RecordKind, SegmentHeader};
use crate::recovery::{self, Opened, Replayed};
use crate::segment::{self, Pace, Trouble};
use crate::space::{Key, Mark, Space};
use crate::stats::{self, LogStats};
use crate::way::{self, Medians, Way};
use crate::writer::Writer;

/// Changes of one vBucket that are to be durable together with whatever else waits.
#[derive(Clone, Copy)]
pub struct Submission<'a> {
    pub bucket: BucketUuid,
    pub vb: VbId,
    /// In seqno order, values included.
    pub items: &'a [Item],
    /// The seqno of the last item; without items, the vBucket's high seqno.
    pub last: Seqno,
    /// The vBucket's record and its version, if it changed.
    pub record: Option<(&'a VbRecord, u64)>,
    /// Of a vBucket that is, or ever was, a replica.
    pub past: Option<Past<'a>>,
}

/// What a replica's changes came in.
#[derive(Clone, Copy)]
pub struct Past<'a> {
    /// [`VbRecord::rollbacks`] when they came.
    pub rollbacks: u32,
    /// There is nothing between this and the first item that was not submitted.
    pub after: Seqno,
    pub snapshots: &'a Snapshots,
}

/// One vBucket's part of what a sync made durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Synced {
    pub key: Key,
    /// Everything submitted up to here is durable.
    pub seqno: Seqno,
    /// So is the record of this version, if one was submitted.
    pub record_version: Option<u64>,
    /// Of the submission: after a later rollback the seqno says nothing.
    pub rollbacks: u32,
}

/// Who wants to know. Called by the thread that leads, between syncs: be quick, and do not wait for the log.
pub trait Observer: Send + Sync {
    /// These are durable: one entry for each vBucket in the batch.
    fn durable(&self, batch: &[Synced]);
    /// Nothing that was submitted and not told as durable will ever be. Called once.
    fn poisoned(&self, reason: &str);
    /// There is room again after [`LogError::Full`].
    fn room(&self) {}
    /// A write took so long to become durable. Somebody waits for most of them.
    fn synced(&self, _took: Duration) {}
    /// The disk is full. Told again and again as long as the log needs space.
    fn disk_full(&self) {}
    /// The time of what was promised ([`Log::promise`]) has come: submit it.
    fn gather(&self) {}
}

/// What a turn of leading came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lead {
    /// Nothing waits.
    Idle,
    /// A batch was made durable, and more has come meanwhile.
    More,
    /// Nothing waits that nobody sees to, but something was promised: lead again after a pause.
    Later,
    /// Another thread leads; it will see all that was submitted before this call.
    Busy,
    /// What waits needs room: it comes from [`Log::release`], from freeing disk space, or from a segment that is being made
    /// ready. Lead again then.
    Full,
    /// The log is poisoned or closed.
    Stopped,
}

/// How full the log is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pressure {
    /// Bytes of segments that are not free, up to the last record.
    pub bytes_in_use: u64,
    pub bytes_max: u64,
}

impl Pressure {
    pub fn percent(&self) -> u64 {
        self.bytes_in_use * 100 / self.bytes_max.max(1)
    }
}

/// A vBucket that must be filed up to `mark` before the oldest segment can be used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holder {
    pub key: Key,
    pub mark: Mark,
}

/// The log of a data directory.
///
/// 1. What [`Observer::durable`] names outlives power loss, and will be replayed until it is released.
/// 2. Records are durable in the order of submission; what a crash leaves is a prefix of that order.
/// 3. At most one thread leads: it owns the [`Writer`]. Whoever submits has put its records under the queue's lock, where
///    the leader looks last before it gives the writer back; so either the leader sees the records, or the submitter sees
///    the writer, and wakes the driver. There is no third order.
/// 4. After a failed sync or write nothing is written, and nothing is told as durable.
/// 5. No lock is held across I/O. The queue's and the space's lock are never held together.
/// 6. A guest ([`Log::lead_here`]) leads once. What is left then, and what was promised meanwhile, the driver has been told of.
pub struct Log {
    env: Env,
    dir: PathBuf,
    options: Options,
    log_id: u128,
    queue: Mutex<Queue>,
    space: Mutex<Space>,
    observer: OnceLock<Arc<dyn Observer>>,
    pub(crate) running: OnceLock<Running>,
    guests: Bay<Guests>,
    active_bytes: AtomicU64,
    /// A [`Way`]: how segments are written from here on.
    way: AtomicU8,
    medians: OnceLock<Medians>,
    counts: Counts,
}

thread_local! {
    /// Where a thread makes its submissions ready.
    static SCRATCH: Cell<Batch> = const { Cell::new(Batch::new()) };
}

#[derive(Default)]
struct Counts {
    syncs: AtomicU64,
    records: AtomicU64,
    bytes: AtomicU64,
}

/// Threads that lead though that is not what they are for.
#[derive(Default)]
struct Guests {
    leading: u32,
    are_barred: bool,
}

struct Queue {
    waiting: Batch,
    submits: u64,
    /// On the monotonic clock.
    waiting_since: Duration,
    /// When the oldest promise was made that nobody was asked to keep yet, on the monotonic clock.
    promised_at: Option<Duration>,
    /// An empty batch whose memory can be used again.
    spare: Batch,
    /// Gone while somebody leads.
    writer: Option<Box<Writer>>,
    /// Who leads will not come back.
    is_guest_leading: bool,
    /// What was taken last needs room. Nothing more is taken.
    full: Option<Arc<str>>,
    poisoned: Option<Arc<str>>,
    /// Nothing is taken, for now.
    held: bool,
    closed: bool,
}

impl Queue {
    fn give_back(&mut self, writer: Box<Writer>) {
        self.writer = Some(writer);
        self.is_guest_leading = false;
    }
}

/// Why leading stops before everything is durable.
enum Halt {
    NoRoom {
        why: Arc<str>,
        disk_full: bool,
    },
    /// A segment is being made ready by another thread.
    Soon,
    Poison(Arc<str>),
}

impl From<Trouble> for Halt {
    fn from(trouble: Trouble) -> Halt {
        match trouble {
            Trouble::NoRoom(why) => Halt::NoRoom { why, disk_full: false },
            Trouble::DiskFull(why) => Halt::NoRoom { why, disk_full: true },
            Trouble::Poison(why) => Halt::Poison(why),
        }
    }
}

impl Log {
    /// Opens the log in `dir`, or makes one. All it holds is given to `replay` in order; when this returns without error,
    /// that is durable. On [`LogError::Damaged`] nothing that was replayed may be used.
    ///
    /// Whoever replays skips what its files hold already, and what belongs to no bucket it knows ([`Log::forget`] those).
    pub fn open(
        env: &Env,
        dir: &Path,
        options: Options,
        replay: &mut dyn FnMut(Replayed),
    ) -> Result<Arc<Log>, LogError> {
        options.check()?;
        let opened = recovery::open(env, dir, &options, replay)?;
        Ok(Log::go_on(env, dir, options, opened))
    }

    /// Opens a log all of which is filed, or makes one: what it holds is not looked at, and is none of it from
    /// here on. On an error, or after a crash meanwhile, it may be neither whole nor gone: begin again.
    pub fn begin(env: &Env, dir: &Path, options: Options) -> Result<Arc<Log>, LogError> {
        options.check()?;
        let opened = recovery::begin(env, dir, &options)?;
        Ok(Log::go_on(env, dir, options, opened))
    }

    fn go_on(env: &Env, dir: &Path, options: Options, opened: Opened) -> Arc<Log> {
        let Opened { log_id, sealed, active, active_marks, at, tail, prev, ready, spares, next_number } = opened;
        let way = if active.durable.is_some() { active.way } else { Way::WriteAndSync };
        let why = match options.way {
            None => "until it is known which way is the fastest",
            Some(wanted) if wanted == way => "as configured",
            Some(_) => "the file system or the system does not take the way that is configured",
        };
        tracing::info!(way = way.name(), why, segment_bytes = options.segment_bytes, "commit log open");
        let mut space = Space::new(ready, spares, active.header.sequence, next_number);
        space.files += sealed.len();
        sealed.into_iter().for_each(|(segment, marks)| space.seal(segment, marks));
        let life = env.rng.u64() as u32;
        let writer = Writer::new(active, active_marks, at, tail, prev, life);
        let queue = Queue {
            waiting: Batch::default(),
            submits: 0,
            waiting_since: Duration::ZERO,
            promised_at: None,
            spare: Batch::default(),
            writer: Some(Box::new(writer)),
            is_guest_leading: false,
            full: None,
            poisoned: None,
            held: false,
            closed: false,
        };
        Arc::new(Log {
            env: env.clone(),
            dir: dir.to_owned(),
            options,
            log_id,
            queue: Mutex::ranked(Rank::CommitQueue, queue),
            space: Mutex::ranked(Rank::CommitQueue, space),
            observer: OnceLock::new(),
            running: OnceLock::new(),
            guests: Bay::new(Guests::default()),
            active_bytes: AtomicU64::new(at),
            way: AtomicU8::new(way as u8),
            medians: OnceLock::new(),
            counts: Counts::default(),
        })
    }

    /// Says whom to tell. Before the first submission, and once.
    pub fn observe(&self, observer: Arc<dyn Observer>) {
        assert!(self.observer.set(observer).is_ok(), "a log has one observer");
    }

    /// Adds changes to what waits. Does no I/O and does not wait. All of a submission is taken, or none.
    pub fn submit(&self, submission: &Submission<'_>) -> Result<(), LogError> {
        if self.deposit(submission)? {
            self.call();
        }
        Ok(())
    }

    /// As [`Log::submit`], and wakes nobody. True: nobody leads who would see it, so [`Log::call`] or [`Log::lead_here`] is to
    /// follow, once for however many were deposited.
    pub fn deposit(&self, submission: &Submission<'_>) -> Result<bool, LogError> {
        let mut batch = SCRATCH.take();
        let outcome = batch.put(submission, self.body_bytes_max()).and_then(|()| self.enqueue(&mut batch));
        batch.clear();
        batch.rest();
        SCRATCH.set(batch);
        outcome
    }

    /// Whether nobody leads who would see it.
    fn enqueue(&self, batch: &mut Batch) -> Result<bool, LogError> {
        let mut queue = self.queue.lock();
        if let Some(reason) = &queue.poisoned {
            return Err(LogError::Poisoned(Arc::clone(reason)));
        }
        if queue.closed || queue.held {
            return Err(LogError::Closed);
        }
        if let Some(why) = &queue.full {
            let why = Arc::clone(why);
            drop(queue);
            let Pressure { bytes_in_use, bytes_max } = self.pressure();
            return Err(LogError::Full { bytes_in_use, bytes_max, why });
        }
        if queue.waiting.is_empty() {
            queue.waiting_since = self.env.clock.monotonic();
        }
        queue.waiting.append(batch);
        queue.submits += 1;
        let nobody_leads = queue.writer.is_some();
        drop(queue);
        stats::SUBMITS.inc();
        Ok(nobody_leads)
    }

    /// There are changes that nobody waits for. Before long the observer is asked to submit them, with whatever has joined
    /// them by then: see [`Observer::gather`].
    pub fn promise(&self) {
        let mut queue = self.queue.lock();
        if queue.promised_at.is_some() {
            return;
        }
        queue.promised_at = Some(self.env.clock.monotonic());
        let nobody_will_look = queue.writer.is_some() || queue.is_guest_leading;
        drop(queue);
        if nobody_will_look {
            self.wake_later();
        }
    }

    /// Has what was promised submitted, if it has waited long enough for company.
    fn gather(&self) {
        let now = self.env.clock.monotonic();
        let is_due = |promised_at: &mut Duration| *promised_at + COMPANY_PAUSE <= now;
        let is_due = self.queue.lock().promised_at.take_if(is_due).is_some();
        if is_due && let Some(observer) = self.observer.get() {
            observer.gather();
        }
    }

    /// Takes all that waits, makes it durable, tells the observer. For a thread that may block; the driver's, or one that
    /// has submitted and has nothing better to do. Call again on [`Lead::More`].
    pub fn lead(&self) -> Lead {
        self.gather();
        let mut queue = self.queue.lock();
        if queue.poisoned.is_some() {
            return Lead::Stopped;
        }
        match queue.writer.take() {
            Some(writer) => self.lead_with(writer, queue),
            // It may be a guest, who keeps no promises.
            None if queue.promised_at.is_some() => Lead::Later,
            None => Lead::Busy,
        }
    }

    /// Leads once, for a thread that has deposited changes and could only wait for them: that saves two hand-overs between
    /// threads. If somebody leads already, or it would take more than one write, the driver does it.
    pub fn lead_here(&self) {
        let may_lead = self.guests.change(|guests| {
            guests.leading += u32::from(!guests.are_barred);
            (!guests.are_barred, Wake::Nobody)
        });
        if !may_lead {
            return self.call();
        }
        let lead = self.lead_as_guest();
        self.guests.change(|guests| {
            guests.leading -= 1;
            ((), Wake::Everybody)
        });
        if matches!(lead, Lead::More | Lead::Full) {
            self.call();
        }
    }

    fn lead_as_guest(&self) -> Lead {
        let mut queue = self.queue.lock();
        if queue.poisoned.is_some() {
            return Lead::Stopped;
        }
        let Some(writer) = &queue.writer else { return Lead::Busy };
        if !writer.takes_in_one(&queue.waiting) {
            return Lead::More;
        }
        let writer = queue.writer.take().expect("just seen");
        queue.is_guest_leading = true;
        self.lead_with(writer, queue)
    }

    fn lead_with(&self, mut writer: Box<Writer>, mut queue: MutexGuard<'_, Queue>) -> Lead {
        if writer.batch.is_empty() {
            if queue.waiting.is_empty() {
                writer.rest();
                queue.spare.rest();
                queue.waiting.rest();
                queue.give_back(writer);
                return match queue.closed {
                    true => Lead::Stopped,
                    false if queue.promised_at.is_some() => Lead::Later,
                    false => Lead::Idle,
                };
            }
            let spare = std::mem::take(&mut queue.spare);
            let taken = std::mem::replace(&mut queue.waiting, spare);
            queue.spare = std::mem::replace(&mut writer.batch, taken);
            stats::WAITS.record(self.env.clock.monotonic().saturating_sub(queue.waiting_since));
        }
        drop(queue);
        let halt = self.write(&mut writer).err();
        if halt.is_none() {
            writer.clear();
        }
        let mut queue = self.queue.lock();
        if let Some(Halt::Poison(reason)) = &halt {
            queue.poisoned.get_or_insert_with(|| Arc::clone(reason));
        }
        if let Some(reason) = queue.poisoned.clone() {
            drop(queue);
            self.tell_poisoned(&reason);
            return Lead::Stopped;
        }
        queue.give_back(writer);
        match halt {
            None if !queue.waiting.is_empty() => Lead::More,
            None if queue.promised_at.is_some() => Lead::Later,
            None => Lead::Idle,
            Some(Halt::NoRoom { why, disk_full }) => {
                let is_news = queue.full.replace(Arc::clone(&why)).is_none();
                drop(queue);
                if is_news {
                    stats::FULL.inc();
                    tracing::warn!("the commit log has no room: {why}");
                }
                if disk_full && let Some(observer) = self.observer.get() {
                    observer.disk_full();
                }
                Lead::Full
            }
            Some(_) => Lead::Full,
        }
    }

    /// Writes the batch, in as many segments as it takes.
    fn write(&self, writer: &mut Writer) -> Result<(), Halt> {
        while !writer.is_done() {
            let (count, bytes) = writer.fitting();
            if count == 0 && writer.at == DATA_AT {
                writer.skip();
                continue;
            }
            if count == 0 {
                self.next_segment(writer)?;
                continue;
            }
            let way = self.way();
            if writer.segment.way != way {
                writer.segment.go_over(&self.env, way);
            }
            let began = self.env.clock.monotonic();
            let written = writer.write(count, bytes)?;
            let took = self.env.clock.monotonic().saturating_sub(began);
            stats::SYNCS.record(took);
            if let Some(observer) = self.observer.get() {
                observer.synced(took);
            }
            stats::BATCH_BYTES.record(std::time::Duration::from_micros(written.bytes as u64));
            stats::BATCH_RECORDS.record(std::time::Duration::from_micros(written.records as u64));
            stats::BYTES.add(written.bytes as u64);
            self.counts.syncs.fetch_add(1, Relaxed);
            self.counts.records.fetch_add(written.records as u64, Relaxed);
            self.counts.bytes.fetch_add(written.bytes as u64, Relaxed);
            if let Some(observer) = self.observer.get()
                && !written.synced.is_empty()
            {
                observer.durable(written.synced);
            }
            self.active_bytes.store(writer.at, Relaxed);
            self.has_room();
        }
        Ok(())
    }

    /// What waited for room has been written: others may come again.
    fn has_room(&self) {
        let was_full = self.queue.lock().full.take().is_some();
        if was_full {
            tracing::info!("the commit log has room again");
            if let Some(observer) = self.observer.get() {
                observer.room();
            }
        }
    }

    fn next_segment(&self, writer: &mut Writer) -> Result<(), Halt> {
        loop {
            let next = self.space.lock().ready.pop_front();
            if let Some(next) = next {
                let sequence = next.header.sequence;
                let (full, marks) = writer.switch(next);
                let full = full.rest();
                let mut space = self.space.lock();
                // Not before the full one is counted: until then it is the oldest that is needed.
                space.active_sequence = sequence;
                space.seal(full, marks);
                let wants_another = space.ready.is_empty();
                drop(space);
                self.active_bytes.store(writer.at, Relaxed);
                if wants_another {
                    self.wake_preparer();
                }
                return Ok(());
            }
            if !self.prepare()? {
                return Err(Halt::Soon);
            }
            stats::PREPARED_LATE.inc();
        }
    }

    /// Makes a segment ready to follow the active one, if there is none. The driver does this in the background; without a
    /// driver, the leader does it when it must.
    pub fn prepare_next(&self) -> Result<(), LogError> {
        let prepared = self.prepare();
        // It may wait for just this.
        self.call();
        match prepared.map_err(Halt::from) {
            Ok(_) | Err(Halt::Soon) => Ok(()),
            Err(Halt::Poison(reason)) => {
                self.poison(&reason);
                Err(LogError::Poisoned(reason))
            }
            // Should that be the disk, the leader tells when it needs the space.
            Err(Halt::NoRoom { why, .. }) => {
                let Pressure { bytes_in_use, bytes_max } = self.pressure();
                Err(LogError::Full { bytes_in_use, bytes_max, why })
            }
        }
    }

    /// False: another thread is at it, and wakes the leader when it is done.
    fn prepare(&self) -> Result<bool, Trouble> {
        let mut space = self.space.lock();
        if space.preparing {
            return Ok(false);
        }
        if !space.ready.is_empty() {
            return Ok(true);
        }
        let header = SegmentHeader {
            log_id: self.log_id,
            sequence: space.newest + 1,
            oldest: space.oldest_sequence(),
            segment_bytes: self.options.segment_bytes,
        };
        let spare = space.spares.pop();
        let number = space.next_number;
        if spare.is_none() {
            if space.files >= self.options.segments_max() {
                let why = format!("all {} segments hold changes that are not filed", space.sealed_count() + 1);
                return Err(Trouble::NoRoom(why.into()));
            }
            space.files += 1;
            space.next_number += 1;
        }
        space.preparing = true;
        drop(space);

        let made = match spare {
            Some(spare) => match spare.begin(&self.env, self.way(), header) {
                Ok(segment) => {
                    stats::RECYCLED.inc();
                    Ok(segment)
                }
                Err(trouble) => Err((trouble, Some(spare))),
            },
            None => {
                let path = self.dir.join(segment::file_name(number));
                stats::CREATED.inc();
                segment::create(&self.env, self.way(), path, header, Pace::Beside).map_err(|trouble| (trouble, None))
            }
        };

        let mut space = self.space.lock();
        space.preparing = false;
        let outcome = match made {
            Ok(segment) => {
                space.newest = header.sequence;
                space.ready.push_back(segment);
                Ok(true)
            }
            Err((trouble, spare)) => {
                space.files -= usize::from(spare.is_none());
                space.spares.extend(spare);
                // Whether its header reached the disk is not known, so no other file may get the same sequence.
                space.preparing = matches!(trouble, Trouble::Poison(_));
                Err(trouble)
            }
        };
        drop(space);
        outcome
    }

    fn way(&self) -> Way {
        Way::ALL[usize::from(self.way.load(Relaxed))]
    }

    /// Finds out which way of writing is the fastest here, on the segment that is ready, and goes over to it: once in a log's
    /// life, and not if a way is configured. Takes some 20 ms, in which that segment cannot be used.
    pub fn choose_way(&self) -> Result<(), LogError> {
        if self.options.way.is_some() || self.medians.get().is_some() {
            return Ok(());
        }
        let mut space = self.space.lock();
        if space.preparing {
            return Ok(());
        }
        let Some(segment) = space.ready.pop_front() else { return Ok(()) };
        space.preparing = true;
        drop(space);
        let compared = way::compare(&self.env, &segment);
        let mut space = self.space.lock();
        space.preparing = false;
        space.ready.push_front(segment);
        drop(space);
        match compared {
            Ok(medians) => {
                let fastest = medians.fastest();
                match medians.0.is_empty() {
                    true => tracing::info!(way = fastest.name(), "the commit log has no other way of writing here"),
                    false => {
                        tracing::info!(way = fastest.name(), "the commit log's fastest way of writing here: {medians}")
                    }
                }
                self.way.store(fastest as u8, Relaxed);
                let _ = self.medians.set(medians);
            }
            Err(Trouble::Poison(reason)) => {
                self.poison(&reason);
                return Err(LogError::Poisoned(reason));
            }
            // Another time.
            Err(Trouble::NoRoom(_) | Trouble::DiskFull(_)) => {}
        }
        // The leader may wait for just this segment.
        self.call();
        Ok(())
    }

    /// The vBucket's file holds everything up to `mark`: what it has in the log up to there is not needed. A record that was
    /// replayed counts as version 0.
    pub fn release(&self, key: Key, mark: Mark) {
        if self.space.lock().release(key, mark) {
            self.wake_if_full();
        }
    }

    /// Nothing of this bucket is needed any more, be it in the log or yet to come.
    pub fn forget(&self, bucket: BucketUuid) {
        if self.space.lock().forget(bucket) {
            self.wake_if_full();
        }
    }

    /// The vBuckets that keep the oldest full segment from being used again, at most `max` of them. Empty: none does, or no
    /// segment but the active one is in use.
    pub fn needs_filing(&self, max: usize) -> Vec<Holder> {
        let space = self.space.lock();
        space.holders().iter().take(max).map(|(key, mark)| Holder { key: *key, mark: *mark }).collect()
    }

    pub fn pressure(&self) -> Pressure {
        let sealed = self.space.lock().sealed_bytes();
        let bytes_max = self.options.segments_max() as u64 * self.options.segment_bytes;
        Pressure { bytes_in_use: sealed + self.active_bytes.load(Relaxed), bytes_max }
    }

    /// Why the log is not written any more, if so.
    pub fn poisoned(&self) -> Option<Arc<str>> {
        self.queue.lock().poisoned.clone()
    }

    pub fn stats(&self) -> LogStats {
        let Pressure { bytes_in_use, bytes_max } = self.pressure();
        let segments = self.space.lock().files as u64;
        let queue = self.queue.lock();
        LogStats {
            way: self.way().name(),
            way_medians: self.medians.get().map(Medians::to_string).unwrap_or_default(),
            syncs: self.counts.syncs.load(Relaxed),
            submits: queue.submits,
            records: self.counts.records.load(Relaxed),
            bytes: self.counts.bytes.load(Relaxed),
            waiting_bytes: queue.waiting.bytes.len() as u64,
            segments,
            bytes_in_use,
            bytes_max,
            full: queue.full.as_deref().map(str::to_owned),
            poisoned: queue.poisoned.as_deref().map(str::to_owned),
        }
    }

    /// The largest encoded item, with its vBucket's record, that a segment takes.
    pub fn body_bytes_max(&self) -> usize {
        (self.options.segment_bytes - DATA_AT) as usize - RECORD_HEADER_BYTES
    }

    /// Whether submissions are refused as [`LogError::Closed`] from here on. What was taken before becomes durable all the same.
    pub fn hold(&self, held: bool) {
        self.queue.lock().held = held;
    }

    /// When this returns, nobody leads of himself any more, and nobody will.
    pub fn stop(&self) {
        if let Some(running) = self.running.get() {
            running.stop();
        }
        self.guests.change(|guests| {
            guests.are_barred = true;
            ((), Wake::Nobody)
        });
        self.guests.wait(|guests| if guests.leading == 0 { Look::Found(()) } else { Look::Nothing });
    }

    /// Takes no more, and forgets what waits: nothing is written from here on. Stops the driver.
    pub fn abandon(&self) {
        self.stop();
        let mut queue = self.queue.lock();
        queue.closed = true;
        let waiting = std::mem::take(&mut queue.waiting);
        queue.writer.iter_mut().for_each(|writer| writer.clear());
        drop(queue);
        drop(waiting);
    }

    /// Takes no more, makes durable what waits, and marks the end, so that the next start can tell a torn end from a damaged
    /// one. Stops the driver.
    pub fn close(&self) -> Result<(), LogError> {
        self.stop();
        {
            let mut queue = self.queue.lock();
            if !queue.closed && queue.poisoned.is_none() {
                queue.closed = true;
                queue.waiting.append(&mut Batch::of_the_log(RecordKind::Close));
            }
        }
        while let Lead::More = self.lead() {}
        let queue = self.queue.lock();
        match (&queue.poisoned, &queue.full) {
            (Some(reason), _) => Err(LogError::Poisoned(Arc::clone(reason))),
            (None, Some(why)) => {
                let why = Arc::clone(why);
                drop(queue);
                let Pressure { bytes_in_use, bytes_max } = self.pressure();
                Err(LogError::Full { bytes_in_use, bytes_max, why })
            }
            (None, None) => Ok(()),
        }
    }

    /// For those who do not lead. If somebody does, it is told when the write under way is over, and not before.
    fn poison(&self, reason: &Arc<str>) {
        let mut queue = self.queue.lock();
        queue.poisoned.get_or_insert_with(|| Arc::clone(reason));
        let nobody_leads = queue.writer.take().is_some();
        drop(queue);
        if nobody_leads {
            self.tell_poisoned(reason);
        }
    }

    /// Called by the last owner of the writer, so once.
    fn tell_poisoned(&self, reason: &str) {
        let dropped = std::mem::take(&mut self.queue.lock().waiting);
        drop(dropped);
        tracing::error!("the commit log is not written any more, restart to see what the disk holds: {reason}");
        if let Some(observer) = self.observer.get() {
            observer.poisoned(reason);
        }
    }

    /// Wakes who leads.
    pub fn call(&self) {
        if let Some(running) = self.running.get() {
            running.wake();
        }
    }

    /// After something that may have made room.
    pub(crate) fn wake_if_full(&self) {
        self.wake_preparer();
        self.call();
    }

    fn wake_later(&self) {
        if let Some(running) = self.running.get() {
            running.wake_later();
        }
    }

    fn wake_preparer(&self) {
        if let Some(running) = self.running.get() {
            running.wake_preparer();
        }
    }
}
