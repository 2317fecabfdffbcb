//! What a bucket does by itself: ends documents whose time has come, gives memory back, and watches deadlines.

use std::sync::Weak;
use std::sync::atomic::Ordering::Relaxed;

use scheduler::{Context, Next, Task};
use types::{DocKey, VbState};

use crate::bucket::Bucket;
use crate::expiry;

/// Every so often, and whenever a write found memory short: deletes what has expired, forgets tombstones the file has,
/// and under pressure drops values the file has.
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
        bucket.page();
        cx.task().wake_after(bucket.options.pager_interval);
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
    /// One round of the pager.
    pub fn page(&self) {
        let now_s = self.env.clock.unix_s();
        let counters = &self.counters;
        counters.pager_runs.fetch_add(1, Relaxed);
        for vb in &self.vbuckets {
            if vb.state() == VbState::Active && vb.table.counts.expiring.load(Relaxed) > 0 {
                for id in self.live_ids(vb, |item| expiry::is_past(item.meta().expiry, now_s)) {
                    self.expire(vb, DocKey::parse(&id).expect("taken from an item"));
                }
            }
            counters.tombstones_dropped.add(vb.drop_tombstones() as u64);
        }
        if self.paging.load(Relaxed) || self.is_short() {
            self.evict(counters.pager_runs.load(Relaxed) as usize);
        }
    }

    /// Drops values the file has until there is room, beginning with another vBucket each time.
    fn evict(&self, round: usize) {
        let (count, low) = (self.vbuckets.len(), self.low_mark());
        for vb in (0..count).map(|n| &self.vbuckets[(round + n) % count]) {
            if self.memory_used() <= low {
                self.paging.store(false, Relaxed);
                return;
            }
            let evicted = vb.table.evict_values(vb.log.marks.filed(), || self.memory_used() <= low);
            self.counters.evicted.add(evicted as u64);
        }
    }
}
