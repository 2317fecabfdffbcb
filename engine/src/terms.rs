//! The settings of a bucket that requests look at. They may change while requests run, so each is a plain number: looking
//! costs nothing, and a request sees the old value or the new one.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64};

use persist::{BucketSpec, Compression};
use types::Level;

use crate::expiry;
use crate::op::{Op, OpError, Request, Requirement};

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Terms {
    quota_bytes: AtomicU64,
    max_ttl_s: AtomicU32,
    /// 0: none.
    min_level: AtomicU8,
    inflates: AtomicBool,
}

impl Terms {
    pub fn of(spec: &BucketSpec) -> Terms {
        let terms = Terms::default();
        terms.adopt(spec);
        terms
    }

    pub fn adopt(&self, spec: &BucketSpec) {
        self.quota_bytes.store(spec.quota_bytes, Relaxed);
        self.max_ttl_s.store(spec.rules.max_ttl_s, Relaxed);
        self.min_level.store(spec.rules.min_durability.map_or(0, |level| level as u8), Relaxed);
        self.inflates.store(spec.rules.compression == Compression::Off, Relaxed);
    }

    pub fn quota_bytes(&self) -> u64 {
        self.quota_bytes.load(Relaxed)
    }

    /// Whether values are kept inflated, however they came.
    pub fn inflates(&self) -> bool {
        self.inflates.load(Relaxed)
    }

    /// The request, with as much durability as the bucket gives every write.
    pub fn raise<'r>(&self, request: &Request<'r>) -> Request<'r> {
        let asked = request.durability.map(|requirement| requirement.level);
        match Level::from_wire(self.min_level.load(Relaxed)) {
            Some(least) if takes_durability(&request.op) && asked < Some(least) => {
                let timeout = request.durability.and_then(|requirement| requirement.timeout);
                Request { durability: Some(Requirement { level: least, timeout }), ..*request }
            }
            _ => *request,
        }
    }

    /// An expiry from the wire as Unix seconds, no later than the bucket allows; 0 = never.
    pub fn expiry(&self, raw: u32, now_s: impl Fn() -> u32) -> Result<u32, OpError> {
        Ok(self.cap(expiry::absolute(raw, &now_s)?, now_s))
    }

    /// As [`Terms::expiry`], of one that is a moment already.
    pub fn cap(&self, expiry: u32, now_s: impl FnOnce() -> u32) -> u32 {
        match self.max_ttl_s.load(Relaxed) {
            0 => expiry,
            max_ttl_s => expiry::sooner(expiry, now_s().saturating_add(max_ttl_s)),
        }
    }
}

fn takes_durability(op: &Op<'_>) -> bool {
    matches!(op, Op::Store { .. } | Op::Delete | Op::Arithmetic { .. } | Op::Concat { .. } | Op::SubdocMutate(_))
}
