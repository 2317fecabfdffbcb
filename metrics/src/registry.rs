//! The list of everything that is counted, and how to walk it.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::RwLock;

use crate::{Counter, Gauge, Snapshot, Timings};

/// What kind of number a family has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Counter,
    Gauge,
    Timings,
}

/// One reading.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value {
    Counter(u64),
    Gauge(i64),
    Timings(Snapshot),
}

/// Called with the labels (name, value) and the reading of each series.
pub type Visit<'a> = &'a mut dyn FnMut(&[(&str, &str)], Value);

/// A single number or histogram.
pub trait Metric: Default + Send + Sync + 'static {
    const KIND: Kind;
    fn read(&self) -> Value;
}

impl Metric for Counter {
    const KIND: Kind = Kind::Counter;
    fn read(&self) -> Value {
        Value::Counter(self.get())
    }
}

impl Metric for Gauge {
    const KIND: Kind = Kind::Gauge;
    fn read(&self) -> Value {
        Value::Gauge(self.get())
    }
}

impl Metric for Timings {
    const KIND: Kind = Kind::Timings;
    fn read(&self) -> Value {
        Value::Timings(self.snapshot())
    }
}

/// Something a family's readings come from: one metric, a labelled set, or a part that computes them when asked.
pub trait Source: Send + Sync {
    fn kind(&self) -> Kind;
    /// Visits each series.
    fn walk(&self, visit: Visit<'_>);
}

impl<M: Metric> Source for M {
    fn kind(&self) -> Kind {
        M::KIND
    }
    fn walk(&self, visit: Visit<'_>) {
        visit(&[], self.read());
    }
}

/// One metric per combination of label values. Callers look a series up once and keep the [`Arc`]; the lookup allocates.
pub struct Labelled<M> {
    names: &'static [&'static str],
    series: RwLock<BTreeMap<Vec<String>, Arc<M>>>,
}

impl<M: Metric> Labelled<M> {
    pub const fn new(names: &'static [&'static str]) -> Labelled<M> {
        Labelled { names, series: RwLock::new(BTreeMap::new()) }
    }

    /// The series of these label values, in the order the labels were declared; created at the first call.
    pub fn with(&self, values: &[&str]) -> Arc<M> {
        assert_eq!(values.len(), self.names.len(), "labels are {:?}", self.names);
        let values: Vec<String> = values.iter().map(|value| value.to_string()).collect();
        if let Some(series) = self.series.read().get(&values) {
            return series.clone();
        }
        self.series.write().entry(values).or_default().clone()
    }

    /// Forgets every series whose label `name` is `value`, such as those of a deleted bucket.
    pub fn forget(&self, name: &str, value: &str) {
        let at = self.names.iter().position(|label| *label == name);
        let at = at.unwrap_or_else(|| panic!("no label {name} among {:?}", self.names));
        self.series.write().retain(|values, _| values[at] != value);
    }
}

impl<M: Metric> Source for Labelled<M> {
    fn kind(&self) -> Kind {
        M::KIND
    }
    fn walk(&self, visit: Visit<'_>) {
        // Copied out: `visit` may take its time, and a new series must not wait for it.
        let series: Vec<_> = self.series.read().iter().map(|(values, m)| (values.clone(), m.clone())).collect();
        for (values, metric) in series {
            let labels: Vec<_> = self.names.iter().copied().zip(values.iter().map(String::as_str)).collect();
            visit(&labels, metric.read());
        }
    }
}

/// A name, what it means, and where its readings come from.
#[derive(Clone)]
pub struct Family {
    name: &'static str,
    help: &'static str,
    source: Origin,
}

#[derive(Clone)]
enum Origin {
    Static(&'static dyn Source),
    Shared(Arc<dyn Source>),
}

impl Family {
    /// For the [`metrics!`](crate::metrics) macro.
    pub const fn new(name: &'static str, help: &'static str, source: &'static dyn Source) -> Family {
        Family { name, help, source: Origin::Static(source) }
    }

    /// A family whose readings come from a part that was made at run time.
    pub fn shared(name: &'static str, help: &'static str, source: Arc<dyn Source>) -> Family {
        Family { name, help, source: Origin::Shared(source) }
    }

    pub fn name(&self) -> &'static str {
        self.name
    }

    pub fn help(&self) -> &'static str {
        self.help.trim()
    }

    pub fn kind(&self) -> Kind {
        self.source().kind()
    }

    /// Calls `visit` with the labels and reading of each series.
    pub fn walk(&self, visit: Visit<'_>) {
        self.source().walk(visit);
    }

    fn source(&self) -> &dyn Source {
        match &self.source {
            Origin::Static(source) => *source,
            Origin::Shared(source) => &**source,
        }
    }
}

/// All families, sorted by name.
///
/// 1. Names are unique and `snake_case`, help is not empty: [`Registry::assert_every_stat_name_is_unique`].
#[derive(Clone, Default)]
pub struct Registry {
    families: Vec<Family>,
}

impl Registry {
    pub fn new() -> Registry {
        Registry::default()
    }

    /// Adds what a module's `metrics!` declared, or families made with [`Family::shared`].
    pub fn add(&mut self, families: &[Family]) {
        self.families.extend_from_slice(families);
        self.families.sort_by_key(|family| family.name);
    }

    pub fn families(&self) -> &[Family] {
        &self.families
    }

    /// For the test of whoever collects a registry. Panics with the offending name.
    pub fn assert_every_stat_name_is_unique(&self) {
        for pair in self.families.windows(2) {
            assert_ne!(pair[0].name, pair[1].name, "two stats share this name");
        }
        for family in &self.families {
            let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
            assert!(family.name.chars().all(plain), "{}: a stat's name is snake_case", family.name);
            assert!(!family.help().is_empty(), "{}: a stat says what it counts", family.name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    crate::metrics! {
        /** Files opened. */
        pub static FILE_OPENS: Counter = "file_opens";
        /// Files open
        /// now.
        static FILES_OPEN: Gauge = "files_open";
        /// How long operations took.
        static OPS: Labelled<Timings> = "op_duration" ["bucket", "op"];
    }

    fn readings(family: &Family) -> Vec<(String, Value)> {
        let mut out = Vec::new();
        family.walk(&mut |labels, value| out.push((format!("{labels:?}"), value)));
        out
    }

    #[test]
    fn what_is_declared_once_can_be_walked() {
        FILE_OPENS.add(3);
        FILES_OPEN.set(-2);
        OPS.with(&["default", "get"]).record(Duration::from_micros(7));
        OPS.with(&["gone", "get"]).record(Duration::from_micros(7));
        OPS.forget("bucket", "gone");

        let mut registry = Registry::new();
        registry.add(METRICS);
        registry.assert_every_stat_name_is_unique();
        let names: Vec<_> = registry.families().iter().map(|f| (f.name(), f.help(), f.kind())).collect();
        assert_eq!(
            names,
            [
                ("file_opens", "Files opened.", Kind::Counter),
                ("files_open", "Files open now.", Kind::Gauge),
                ("op_duration", "How long operations took.", Kind::Timings),
            ]
        );
        assert_eq!(readings(&registry.families()[0]), [("[]".to_string(), Value::Counter(3))]);
        assert_eq!(readings(&registry.families()[1]), [("[]".to_string(), Value::Gauge(-2))]);
        let ops = readings(&registry.families()[2]);
        assert_eq!(ops.len(), 1);
        assert_eq!(ops[0].0, r#"[("bucket", "default"), ("op", "get")]"#);
    }

    #[test]
    #[should_panic(expected = "two stats share this name")]
    fn a_name_used_twice_is_found() {
        let mut registry = Registry::new();
        registry.add(METRICS);
        registry.add(&METRICS[..1]);
        registry.assert_every_stat_name_is_unique();
    }
}
