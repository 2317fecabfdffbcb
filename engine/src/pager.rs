//! Background upkeep of a bucket: ends what has expired, forgets what the file remembers, and watches deadlines.
//!
//! ```text
//!     high mark crossed ──▶ pager: survey a few stripes ──▶ how cold must go ──▶ sweep, from where the last one ended
//!                             ▲                                                     │ cold leaves, warm cools
//!                             └──────────────────── not enough yet ◀────────────────┘
//! ```
//! An item's heat grows with its uses, ever more slowly, and each passing sweep takes back a part: so what stays is what is
//! used often and lately. Nothing that the file does not have ever leaves.

use std::sync::Weak;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize};
use std::time::Duration;

use scheduler::{Context, Next, Task};
use types::{DocKey, HEATS, VbState};

use crate::bucket::Bucket;
use crate::expiry;
use crate::hash_table::{HeatMap, Leaving, Left, STRIPES};
use crate::vbucket::VBucket;

/// Stripes looked at to learn how cold must go.
const SURVEY_STRIPES: usize = 64;
/// Stripes a write may sweep by itself before it is refused.
const MAKE_ROOM_STRIPES: usize = 64;

/// How memory and the pager are doing.
#[derive(Default)]
pub(crate) struct Pressure {
    /// The pager was woken and has not finished.
    pub is_paging: AtomicBool,
    /// The pager found nothing that may leave; nothing has changed since.
    pub is_exhausted: AtomicBool,
    /// Where the next sweep goes on: a stripe, counted over all vBuckets.
    hand: AtomicUsize,
    /// Up to this heat items left last time.
    heat_max: AtomicU8,
    /// When the next whole round is due, in monotonic ms.
    round_due_ms: AtomicU64,
}

/// Every so often: deletes what has expired and forgets tombstones the file has. Under pressure lets go of what the file
/// has.
pub(crate) struct Pager {
    bucket: Weak<Bucket>,
}

impl Pager {
    pub fn of(bucket: Weak<Bucket>) -> Pager {
        Pager { bucket }
    }
}

impl Task for Pager {
    fn name(&self) -> &'static str {
        "pager"
    }

    fn run(&self, cx: &Context<'_>) -> Next {
        let Some(bucket) = self.bucket.upgrade() else { return Next::Done };
        let (now, due) = (cx.now(), &bucket.pressure.round_due_ms);
        if now.as_millis() as u64 >= due.load(Relaxed) {
            bucket.look_over();
            due.store((now + bucket.options.pager_interval).as_millis() as u64, Relaxed);
        }
        if !bucket.reclaim(|| cx.should_yield()) {
            return Next::Again;
        }
        cx.task().wake_at(Duration::from_millis(due.load(Relaxed)));
        Next::Idle
    }
}
/// Looks at the vBuckets in which somebody waits against a deadline, when the first of these has come.
pub(crate) struct Deadlines {
    bucket: Weak<Bucket>,
}

impl Deadlines {
    pub fn of(bucket: Weak<Bucket>) -> Deadlines {
        Deadlines { bucket }
    }
}

impl Task for Deadlines {
    fn name(&self) -> &'static str {
        "sync_write_deadlines"
    }

    fn run(&self, _: &Context<'_>) -> Next {
        let Some(bucket) = self.bucket.upgrade() else { return Next::Done };
        // Whoever still waits there arms it again.
        let armed = std::mem::take(&mut *bucket.armed.lock());
        for id in armed {
            let vb = &bucket.vbuckets[usize::from(id.0)];
            if let Some(tracker) = vb.waiting.lock().as_deref_mut() {
                tracker.disarm();
            }
            bucket.settle(vb);
        }
        Next::Idle
    }
}

impl Bucket {
    /// One round of the pager, to its end.
    pub fn page(&self) {
        self.look_over();
        self.reclaim(|| false);
    }

    /// Lets go of all that the file has, however much it is used. For tests and tools.
    pub fn squeeze(&self) {
        (0..self.stripes()).for_each(|_| _ = self.sweep(u8::MAX, 0));
    }

    /// Ends what has expired and forgets the tombstones the file has.
    fn look_over(&self) {
        let now_s = self.env.clock.unix_s();
        self.counters.pager_runs.fetch_add(1, Relaxed);
        for vb in &self.vbuckets {
            if vb.state() == VbState::Active && vb.table.counts.expiring.load(Relaxed) > 0 {
                for id in self.live_ids(vb, |item| expiry::is_past(item.expiry(), || now_s)) {
                    self.expire(vb, DocKey::parse(&id).expect("taken from an item"));
                }
            }
            self.counters.tombstones_dropped.add(vb.drop_tombstones() as u64);
        }
    }

    /// Lets go of what the file has, coldest first, until no more than the low mark is in use or nothing may leave.
    /// `false`: there is more to do.
    fn reclaim(&self, should_yield: impl Fn() -> bool) -> bool {
        let pressure = &self.pressure;
        while pressure.is_paging.load(SeqCst) || (self.is_short() && !pressure.is_exhausted.load(SeqCst)) {
            pressure.is_paging.store(true, SeqCst);
            for vb in &self.vbuckets {
                self.counters.tombstones_dropped.add(vb.drop_tombstones() as u64);
            }
            if !self.sweep_down(self.low_mark(), &should_yield) {
                return false;
            }
            // Whoever found us at work has left it to us: so look again after this.
            pressure.is_paging.store(false, SeqCst);
        }
        true
    }

    /// Sweeps until no more than `low` is in use, or says that nothing may leave. `false`: it should yield before.
    fn sweep_down(&self, low: u64, should_yield: &impl Fn() -> bool) -> bool {
        let mut anything = false;
        loop {
            let excess = self.memory_used().saturating_sub(low);
            if excess == 0 {
                return true;
            }
            let heat_max = if anything { u8::MAX } else { self.survey(excess) };
            self.pressure.heat_max.store(heat_max, Relaxed);
            // Said before it is known: if more is filed during the sweep, it is taken back, and that is seen after it.
            self.pressure.is_exhausted.store(heat_max == u8::MAX, SeqCst);
            let mut left = 0;
            for _ in 0..self.stripes() {
                left += self.sweep(heat_max, low).items;
                if self.memory_used() <= low {
                    self.pressure.is_exhausted.store(false, SeqCst);
                    return true;
                }
                if should_yield() {
                    self.pressure.is_exhausted.store(false, SeqCst);
                    return false;
                }
            }
            if left > 0 {
                self.pressure.is_exhausted.store(false, SeqCst);
            } else if heat_max == u8::MAX {
                return true;
            }
            anything = left == 0;
        }
    }

    /// A write is about to be refused: lets go of the next best until `target`, if that can be done at once.
    pub(crate) fn make_room(&self, target: u64) -> bool {
        if self.pressure.is_exhausted.load(Relaxed) {
            return false;
        }
        for heat_max in [self.pressure.heat_max.load(Relaxed), u8::MAX] {
            for _ in 0..MAKE_ROOM_STRIPES.min(self.stripes()) {
                self.sweep(heat_max, target);
                if self.memory_used() <= target {
                    return true;
                }
            }
        }
        false
    }

    fn stripes(&self) -> usize {
        self.vbuckets.len() * STRIPES
    }

    /// The stripe `n`, counted over all vBuckets, and what may leave it.
    fn stripe(&self, n: usize, heat_max: u8) -> (&VBucket, usize, Leaving) {
        let vb = &self.vbuckets[n % self.stripes() / STRIPES];
        let clears = vb.table.clears();
        let leaving = Leaving { filed: vb.log.marks.filed(), heat_max, whole: vb.full_eviction, clears };
        (vb, n % STRIPES, leaving)
    }

    /// Sweeps the next stripe.
    fn sweep(&self, heat_max: u8, target: u64) -> Left {
        let (vb, stripe, leaving) = self.stripe(self.pressure.hand.fetch_add(1, Relaxed), heat_max);
        let left = vb.table.evict(stripe, leaving, || self.memory_used() <= target);
        self.counters.evicted.add(left.items);
        left
    }

    /// Up to which heat items must leave to win `excess` bytes, going by a few stripes.
    fn survey(&self, excess: u64) -> u8 {
        let mut map: HeatMap = [0; HEATS];
        let (count, first) = (self.stripes(), self.pressure.hand.load(Relaxed));
        let looked_at = SURVEY_STRIPES.min(count);
        for n in 0..looked_at {
            let (vb, stripe, leaving) = self.stripe(first.wrapping_add(n * count / looked_at), u8::MAX);
            vb.table.survey(stripe, leaving, &mut map);
        }
        let wanted = excess.div_ceil((count / looked_at) as u64);
        let mut sum = 0;
        let enough = map.iter().position(|bytes| {
            sum += bytes;
            sum >= wanted
        });
        enough.map_or(u8::MAX, |heat| heat as u8)
    }
}
