//! When vBucket files are written, while the commit log has their changes already.
//!
//! A file's commit costs the same two syncs for one change as for a thousand, and nobody waits for it. So files are written
//! late: when their oldest unfiled change has come of age, when a bucket holds too many bytes of them, or when the log
//! needs the room. Thousands that changed together would come of age together, and whoever waits for the log's sync would
//! wait for all of theirs; so from half the age on they go a part at a time, and are spread from then on.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use scheduler::{Context, Next, Task, TaskHandle};
use types::BucketUuid;
use types::rank::{Mutex, Rank};

use crate::LogOptions;
use crate::queue::Urgency;
use crate::shared::Shared;
use crate::vb::Vb;

/// Steps from half the age of filing to the whole.
const PARTS: u32 = 32;

/// vBuckets that want to be filed, each with the moment since when.
type List = VecDeque<(Duration, Arc<Vb>)>;

/// 1. A vBucket with changes that are durable and not filed is on the list of its bucket, or queued for a flush, or being
///    flushed; afterwards it is looked at again.
/// 2. A list is in order of age: a vBucket goes to its end when it gets its first unfiled change.
pub(crate) struct Filer {
    file_after_ns: AtomicU64,
    unfiled_bytes_max: AtomicU64,
    lists: Mutex<HashMap<BucketUuid, List>>,
    all_now: AtomicBool,
    task: OnceLock<TaskHandle>,
}

impl Filer {
    pub fn new() -> Filer {
        Filer {
            file_after_ns: AtomicU64::new(0),
            unfiled_bytes_max: AtomicU64::new(u64::MAX),
            lists: Mutex::ranked(Rank::CommitQueue, HashMap::new()),
            all_now: AtomicBool::new(false),
            task: OnceLock::new(),
        }
    }

    pub fn set(&self, options: &LogOptions) {
        let file_after_ns = u64::try_from(options.file_after.as_nanos()).unwrap_or(u64::MAX);
        self.file_after_ns.store(file_after_ns, Ordering::Relaxed);
        self.unfiled_bytes_max.store(options.unfiled_bytes_max, Ordering::Relaxed);
    }

    fn file_after(&self) -> Duration {
        Duration::from_nanos(self.file_after_ns.load(Ordering::Relaxed))
    }

    /// See [`LogOptions::unfiled_bytes_max`].
    pub fn unfiled_bytes_max(&self) -> u64 {
        self.unfiled_bytes_max.load(Ordering::Relaxed)
    }

    pub fn set_task(&self, task: TaskHandle) {
        assert!(self.task.set(task).is_ok(), "a filer has one task");
    }

    pub fn wake(&self) {
        if let Some(task) = self.task.get() {
            task.wake();
        }
    }

    /// Files everything that is durable now, without waiting for its time.
    pub fn file_all(&self) {
        self.all_now.store(true, Ordering::Release);
        self.wake();
    }

    pub fn stop(&self) {
        if let Some(task) = self.task.get() {
            task.cancel();
        }
        let lists = std::mem::take(&mut *self.lists.lock());
        drop(lists);
    }

    pub fn forget(&self, bucket: BucketUuid) {
        let list = self.lists.lock().remove(&bucket);
        drop(list);
    }

    /// So many bytes of changes went to the log.
    pub fn add_bytes(&self, vb: &Vb, bytes: u64) {
        vb.unfiled_bytes.fetch_add(bytes, Ordering::Relaxed);
        let before = vb.home.unfiled_bytes.fetch_add(bytes, Ordering::Relaxed);
        let max = vb.home.unfiled_bytes_max();
        if before <= max && before + bytes > max {
            self.wake();
        }
    }

    /// The vBucket has something durable that its file lacks.
    pub fn note(&self, vb: &Arc<Vb>) {
        if vb.is_listed.swap(true, Ordering::AcqRel) {
            return;
        }
        let now = vb.home.shared.env.clock.monotonic();
        let mut lists = self.lists.lock();
        let list = lists.entry(vb.home.uuid).or_default();
        let is_first = list.is_empty();
        list.push_back((now, Arc::clone(vb)));
        drop(lists);
        if is_first && let Some(task) = self.task.get() {
            task.wake_at(now + self.file_after() / 2);
        }
        let home = &vb.home;
        if home.unfiled_bytes.load(Ordering::Relaxed) > home.unfiled_bytes_max() {
            self.wake();
        }
    }

    /// Takes off the lists what is due. Also says when to look again.
    fn take_due(&self, now: Duration) -> (Vec<Arc<Vb>>, Option<Duration>) {
        let all_now = self.all_now.swap(false, Ordering::AcqRel);
        let mut due = Vec::new();
        let mut next = None;
        for list in self.lists.lock().values_mut() {
            let mut part = if all_now { list.len() } else { self.part_of(list, now) };
            let Some(home) = list.front().map(|(_, vb)| Arc::clone(&vb.home)) else { continue };
            // Down to half, so that the next batches are large again.
            let max = home.unfiled_bytes_max();
            let is_heavy = home.unfiled_bytes.load(Ordering::Relaxed) > max;
            let aim = if is_heavy { max / 2 } else { u64::MAX };
            while part > 0 || home.unfiled_bytes.load(Ordering::Relaxed) > aim {
                let Some((_, vb)) = list.pop_front() else { break };
                part = part.saturating_sub(1);
                vb.is_listed.store(false, Ordering::Release);
                vb.take_unfiled_bytes();
                due.push(vb);
            }
            let first = list.front().map(|(since, _)| (*since + self.file_after() / 2).max(now + self.step()));
            next = next.into_iter().chain(first).min();
        }
        (due, next)
    }

    fn step(&self) -> Duration {
        self.file_after() / 2 / PARTS
    }

    /// How many should go now, so that those past half the age go evenly until the oldest is of age.
    fn part_of(&self, list: &List, now: Duration) -> usize {
        let Some((oldest, _)) = list.front() else { return 0 };
        let left = (*oldest + self.file_after()).saturating_sub(now);
        let steps = 1 + left.as_nanos().div_ceil(self.step().as_nanos().max(1)) as usize;
        let half = self.file_after() / 2;
        list.partition_point(|(since, _)| *since + half <= now) / steps
    }
}

impl Vb {
    /// What there is now is being filed, and does not count any more.
    pub fn take_unfiled_bytes(&self) {
        let bytes = self.unfiled_bytes.swap(0, Ordering::Relaxed);
        self.home.unfiled_bytes.fetch_sub(bytes, Ordering::Relaxed);
    }
}

/// Not for lack of space on the disk, which may come back, but because nothing that holds the oldest segment can be filed.
fn is_full_for_good(shared: &Shared, holders: &[Arc<Vb>]) -> bool {
    let is_well = shared.logger.log().is_some_and(|log| log.poisoned().is_none()) && !shared.reserve.is_full();
    is_well && shared.logger.is_full() && !holders.is_empty() && holders.iter().all(|vb| vb.poisoned().is_some())
}

/// Runs the filer.
pub(crate) struct Filing(pub Weak<Shared>);

impl Task for Filing {
    fn name(&self) -> &'static str {
        "filer"
    }

    fn run(&self, cx: &Context<'_>) -> Next {
        let Some(shared) = self.0.upgrade() else { return Next::Done };
        let logger = &shared.logger;
        let (due, next) = logger.filer.take_due(cx.now());
        for vb in &due {
            shared.file(vb, Urgency::Normal);
        }
        if logger.wants_room() {
            let holders = logger.holders();
            holders.iter().for_each(|vb| shared.file(vb, Urgency::Durable));
            if is_full_for_good(&shared, &holders) {
                shared.switch.block();
            }
        }
        next.map_or(Next::Idle, Next::At)
    }
}
