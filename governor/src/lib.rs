//! The governor of the disk: background work may have what the foreground does not feel.
//!
//! A disk with a deep queue serves everybody at the speed of its slowest: a 4 KiB sync behind four compactions that write
//! as fast as they can takes 200 ms instead of 5. Smaller syncs help (30 to 70 ms), a rate helps more (3 to 5 ms), but no
//! constant is right for every disk and every load. So the rate follows what is measured:
//!
//! ```text
//!     foreground syncs ──latency──▶ over the budget?  yes: rate × 0.6      no: rate × 1.04 + 256 KiB/s
//!                                                          ╲                ╱
//!     compaction, filing ◀──pause── one bucket of tokens ◀─ rate, never below the floor
//! ```
//! While the foreground is idle nobody is held back. This crate does no I/O and starts no thread: it is told what happened
//! and asked how long to wait.

#![forbid(unsafe_code)]

use std::sync::Arc;
use std::time::Duration;

use env::Clock;
use types::rank::{Mutex, Rank};

/// Latencies are judged together for so long.
const WINDOW: Duration = Duration::from_millis(50);
/// A foreground that has asked for nothing for so long is idle.
const IDLE_AFTER: Duration = Duration::from_millis(250);
/// Growth is averaged over about so long.
const GROWTH_OVER: Duration = Duration::from_secs(2);
/// Unused tokens are kept for so long at most: a burst is felt however low the rate is.
const BURST: Duration = Duration::from_millis(10);
const RATE_FIRST: u64 = 32 << 20;
const RATE_MAX: u64 = 4 << 30;
/// A file that is compacted when 30 % of it is garbage costs 2.3 bytes of writing for each byte it grew.
const FLOOR_PER_GROWTH: u64 = 3;
/// The floor when the disk runs full: being slow is better than being full.
const FLOOR_WHEN_FULL: u64 = 64 << 20;
/// No single wait is longer, so that a rate which has risen meanwhile is noticed.
const PAUSE_MAX: Duration = Duration::from_millis(200);

/// What the governor holds to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// What a foreground sync may take. `None`: nobody is ever held back.
    pub latency_budget: Option<Duration>,
    /// Bytes a second that background work always gets.
    pub floor_bytes_per_s: u64,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits { latency_budget: None, floor_bytes_per_s: 4 << 20 }
    }
}

/// What keeps background work from going faster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Held {
    /// Nothing: no budget is set, or the foreground is idle.
    Free,
    /// The budget of foreground latency.
    ByLatency,
    /// It would be slower still, but for the floor.
    AtFloor,
    /// It would be slower still, but the disk is nearly full.
    AtRaisedFloor,
}

impl Held {
    pub const fn name(self) -> &'static str {
        match self {
            Held::Free => "not slowed",
            Held::ByLatency => "slowed: foreground latency",
            Held::AtFloor => "slowed to the floor: foreground latency",
            Held::AtRaisedFloor => "at the raised floor: the disk is nearly full",
        }
    }
}

/// One reading.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reading {
    pub held: Held,
    /// What background work may write together; `None`: as much as it can.
    pub bytes_per_s: Option<u64>,
    pub floor_bytes_per_s: u64,
}

/// 1. Without a budget, and while the foreground is idle, [`Governor::pause`] is `None`.
/// 2. Over any time, background work is let through at the floor's rate or faster.
/// 3. Whoever spends pays afterwards: the tokens may go below nothing, and then everybody waits until they are not.
pub struct Governor {
    clock: Arc<dyn Clock>,
    inner: Mutex<Inner>,
}

struct Inner {
    limits: Limits,
    is_disk_low: bool,
    rate: u64,
    /// Bytes that may be written at once; owed, if below 0.
    tokens: i64,
    filled: Duration,
    window: Window,
    foreground_at: Option<Duration>,
    growth: Growth,
}

/// What the foreground felt lately.
#[derive(Default)]
struct Window {
    began: Duration,
    syncs: u32,
    late: u32,
}

/// How fast the files grow by what is written to them from the front.
#[derive(Default)]
struct Growth {
    since: Duration,
    bytes: u64,
    bytes_per_s: u64,
}

impl Governor {
    pub fn new(clock: Arc<dyn Clock>, limits: Limits) -> Governor {
        let inner = Inner {
            limits,
            is_disk_low: false,
            rate: RATE_FIRST,
            tokens: 0,
            filled: clock.monotonic(),
            window: Window::default(),
            foreground_at: None,
            growth: Growth::default(),
        };
        Governor { clock, inner: Mutex::ranked(Rank::RunQueue, inner) }
    }

    /// Holds to other limits from now on.
    pub fn set_limits(&self, limits: Limits) {
        self.inner.lock().limits = limits;
    }

    /// Somebody waited so long for a sync.
    pub fn foreground(&self, latency: Duration) {
        let now = self.clock.monotonic();
        self.inner.lock().felt(now, latency);
    }

    /// Background work has written so much.
    pub fn spent(&self, bytes: u64) {
        let now = self.clock.monotonic();
        let mut inner = self.inner.lock();
        inner.fill(now);
        inner.tokens = inner.tokens.saturating_sub(bytes as i64);
    }

    /// The files have grown by so much: compaction must be faster than that.
    pub fn grew(&self, bytes: u64) {
        let now = self.clock.monotonic();
        self.inner.lock().growth.add(now, bytes);
    }

    /// How long background work should wait before it goes on; ask again then. `None`: not at all.
    pub fn pause(&self) -> Option<Duration> {
        let now = self.clock.monotonic();
        let mut inner = self.inner.lock();
        inner.fill(now);
        if inner.is_free(now) || inner.tokens >= 0 {
            return None;
        }
        let owed = inner.tokens.unsigned_abs();
        let micros = owed.saturating_mul(1_000_000) / inner.rate();
        Some(Duration::from_micros(micros.max(100)).min(PAUSE_MAX))
    }

    /// About how much to write at a time: a fiftieth of a second's worth, so that work in pieces is smooth.
    pub fn piece_bytes(&self, least: u64, most: u64) -> u64 {
        let now = self.clock.monotonic();
        let inner = self.inner.lock();
        if inner.is_free(now) { most } else { (inner.rate() / 50).clamp(least, most) }
    }

    pub fn is_disk_low(&self) -> bool {
        self.inner.lock().is_disk_low
    }

    /// Whether the disk is running full. True if that is news.
    pub fn set_disk_low(&self, is_low: bool) -> bool {
        std::mem::replace(&mut self.inner.lock().is_disk_low, is_low) != is_low
    }

    pub fn reading(&self) -> Reading {
        let now = self.clock.monotonic();
        let inner = self.inner.lock();
        let floor = inner.floor();
        let held = match () {
            () if inner.is_free(now) => Held::Free,
            () if inner.rate > floor => Held::ByLatency,
            () if inner.is_disk_low => Held::AtRaisedFloor,
            () => Held::AtFloor,
        };
        Reading { held, bytes_per_s: (held != Held::Free).then(|| inner.rate()), floor_bytes_per_s: floor }
    }
}

impl Inner {
    fn is_free(&self, now: Duration) -> bool {
        let is_idle = self.foreground_at.is_none_or(|at| now.saturating_sub(at) > IDLE_AFTER);
        self.limits.latency_budget.is_none() || is_idle
    }

    fn floor(&self) -> u64 {
        let least = if self.is_disk_low { FLOOR_WHEN_FULL } else { 1 << 10 };
        let growing = self.growth.bytes_per_s.saturating_mul(FLOOR_PER_GROWTH);
        self.limits.floor_bytes_per_s.max(growing).max(least).min(RATE_MAX)
    }

    fn rate(&self) -> u64 {
        self.rate.max(self.floor())
    }

    fn fill(&mut self, now: Duration) {
        let passed = now.saturating_sub(self.filled);
        self.filled = now;
        let rate = u128::from(self.rate());
        let earned = |time: Duration| (rate * time.as_micros() / 1_000_000).min(i64::MAX as u128) as i64;
        self.tokens = match self.is_free(now) {
            // What was written while nobody was there to feel it is not held against anybody later.
            true => 0,
            false => self.tokens.saturating_add(earned(passed)).min(earned(BURST)),
        };
    }

    fn felt(&mut self, now: Duration, latency: Duration) {
        let Some(budget) = self.limits.latency_budget else { return };
        self.fill(now);
        self.foreground_at = Some(now);
        self.window.syncs += 1;
        self.window.late += u32::from(latency > budget);
        if now.saturating_sub(self.window.began) < WINDOW {
            return;
        }
        let window = std::mem::replace(&mut self.window, Window { began: now, ..Window::default() });
        let next = match window.late {
            0 => self.rate.saturating_add(self.rate / 25).saturating_add(256 << 10),
            _ => self.rate / 5 * 3,
        };
        // A little below the floor, so that one good moment does not lift it off.
        self.rate = next.clamp(self.floor() / 2, RATE_MAX);
    }
}

impl Growth {
    fn add(&mut self, now: Duration, bytes: u64) {
        self.bytes += bytes;
        let passed = now.saturating_sub(self.since);
        if passed < GROWTH_OVER {
            return;
        }
        let latest = u128::from(self.bytes) * 1_000_000 / passed.as_micros();
        self.bytes_per_s = (u128::from(self.bytes_per_s) / 2 + latest / 2).min(u128::from(RATE_MAX)) as u64;
        (self.since, self.bytes) = (now, 0);
    }
}

#[cfg(test)]
mod tests;
