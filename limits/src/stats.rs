//! The ledger as operators see it.

use std::sync::Arc;

use metrics::{Family, Kind, Source, Value, Visit};

use crate::{Class, Ledger, Plan};

/// One reading of the whole ledger.
#[derive(Clone, Debug)]
pub struct Stats {
    /// Displayed, it is the sum in one line.
    pub plan: Plan,
    pub classes: [ClassStats; Class::ALL.len()],
    /// Opens that met EMFILE or ENFILE.
    pub exhausted: u64,
    /// Idle descriptors closed because others were wanted.
    pub given_back: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClassStats {
    pub class: Class,
    /// Descriptors it may have.
    pub capacity: u32,
    /// Descriptors it has.
    pub out: u32,
    /// The most it had at a time.
    pub high_water: u32,
    /// How often a permit was refused.
    pub refusals: u64,
}

impl Ledger {
    /// What the ledger counts, for the registry.
    pub fn families(self: &Arc<Self>) -> Vec<Family> {
        let by_class = |name, help, kind, read| {
            Family::shared(name, help, Arc::new(ByClass { ledger: Arc::clone(self), kind, read }))
        };
        let total = |name, help, kind, read| {
            Family::shared(name, help, Arc::new(Total { ledger: Arc::clone(self), kind, read }))
        };
        vec![
            by_class("descriptors_capacity", "Descriptors a class may have.", Kind::Gauge, |c| {
                Value::Gauge(c.capacity.into())
            }),
            by_class("descriptors_out", "Descriptors a class has.", Kind::Gauge, |c| Value::Gauge(c.out.into())),
            by_class("descriptors_high_water", "The most descriptors a class had at a time.", Kind::Gauge, |c| {
                Value::Gauge(c.high_water.into())
            }),
            by_class("descriptor_refusals", "Permits for a descriptor that were refused.", Kind::Counter, |c| {
                Value::Counter(c.refusals)
            }),
            total("descriptors_limit", "Files this process may have open.", Kind::Gauge, |s| {
                Value::Gauge(s.plan.limit().try_into().unwrap_or(i64::MAX))
            }),
            total("descriptors_exhausted", "Opens that met EMFILE or ENFILE.", Kind::Counter, |s| {
                Value::Counter(s.exhausted)
            }),
            total(
                "descriptors_given_back",
                "Idle files closed because their descriptors were wanted.",
                Kind::Counter,
                |s| Value::Counter(s.given_back),
            ),
        ]
    }
}

struct ByClass {
    ledger: Arc<Ledger>,
    kind: Kind,
    read: fn(&ClassStats) -> Value,
}

impl Source for ByClass {
    fn kind(&self) -> Kind {
        self.kind
    }
    fn walk(&self, visit: Visit<'_>) {
        for class in &self.ledger.stats().classes {
            visit(&[("class", class.class.name())], (self.read)(class));
        }
    }
}

struct Total {
    ledger: Arc<Ledger>,
    kind: Kind,
    read: fn(&Stats) -> Value,
}

impl Source for Total {
    fn kind(&self) -> Kind {
        self.kind
    }
    fn walk(&self, visit: Visit<'_>) {
        visit(&[], (self.read)(&self.ledger.stats()));
    }
}
