//! Counting, cheaply enough to do it everywhere.
//!
//! A metric is declared once, beside the line that counts, and everything else is derived by walking: the `stats`
//! command, the OpenMetrics page, the documentation. There is no life before `main`: each module with metrics has a
//! `METRICS` slice, each crate hands its slices to the server's [`Registry`].
//!
//! ```
//! use metrics::{Counter, Labelled, Registry, Timings, metrics};
//!
//! metrics! {
//!     /** Files closed to make room for another. */
//!     pub static FILE_CACHE_EVICTIONS: Counter = "file_cache_evictions";
//!     /** How long an operation took, by bucket and kind. */
//!     pub static OPS: Labelled<Timings> = "op_duration" ["bucket", "op"];
//! }
//!
//! FILE_CACHE_EVICTIONS.inc();
//! let mut registry = Registry::new();
//! registry.add(METRICS);
//! assert_eq!(registry.families().len(), 2);
//! ```
//!
//! Cost: a count is one relaxed addition, a timing is two (a few nanoseconds each, more when cores fight for the line).
//! A histogram takes its 3.6 KiB at the first record, so that what never happens costs nothing. This crate never reads a
//! clock; it is handed durations.

#![forbid(unsafe_code)]

mod draw;
mod openmetrics;
mod registry;
mod timings;

use std::sync::atomic::{AtomicI64, AtomicU64, Ordering::Relaxed};

pub use draw::{draw, show_duration};
pub use openmetrics::{CONTENT_TYPE, write_openmetrics};
pub use registry::{Family, Kind, Labelled, Metric, Registry, Source, Value, Visit};
pub use timings::{Snapshot, Timings};

/// Declares statics of type [`Counter`], [`Gauge`], [`Timings`] or [`Labelled`], and the slice `METRICS` that lists them.
/// One block per module. Names are `snake_case` without prefix or unit; labels follow in brackets.
#[macro_export]
macro_rules! metrics {
    ($($(#[doc = $help:literal])+ $vis:vis static $NAME:ident : $ty:ty = $name:literal $([$($label:literal),+])?;)*) => {
        $($(#[doc = $help])+ $vis static $NAME: $ty = <$ty>::new($(&[$($label),+])?);)*
        /// What this module counts, for the registry.
        pub static METRICS: &[$crate::Family] = &[$($crate::Family::new($name, concat!($($help),+), &$NAME)),*];
    };
}

/// A number that only grows.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    pub const fn new() -> Counter {
        Counter(AtomicU64::new(0))
    }

    #[inline]
    pub fn inc(&self) {
        self.add(1);
    }

    #[inline]
    pub fn add(&self, n: u64) {
        self.0.fetch_add(n, Relaxed);
    }

    pub fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

/// A number that goes up and down.
#[derive(Debug, Default)]
pub struct Gauge(AtomicI64);

impl Gauge {
    pub const fn new() -> Gauge {
        Gauge(AtomicI64::new(0))
    }

    #[inline]
    pub fn set(&self, value: i64) {
        self.0.store(value, Relaxed);
    }

    #[inline]
    pub fn add(&self, n: i64) {
        self.0.fetch_add(n, Relaxed);
    }

    #[inline]
    pub fn sub(&self, n: i64) {
        self.0.fetch_sub(n, Relaxed);
    }

    pub fn get(&self) -> i64 {
        self.0.load(Relaxed)
    }
}
