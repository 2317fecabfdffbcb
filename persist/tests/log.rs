//! What goes to the log. A binary of its own: tracing decides per process who listens.

mod rig;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use env::sim::{self, FaultPlan, Op};
use rig::Node;

const EIO: i32 = 5;

/// Counts what goes to the log at warning level and above.
struct Lines(Arc<AtomicU64>);

impl tracing::Subscriber for Lines {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() <= tracing::Level::WARN
    }
    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }
    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn event(&self, _: &tracing::Event<'_>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}

#[test]
fn a_storm_of_failures_is_told_a_few_times_only() {
    let lines = Arc::new(AtomicU64::new(0));
    tracing::subscriber::with_default(Lines(lines.clone()), || {
        let (env, sim) = sim::env(9);
        let node = Node::start(&env, 9).unwrap();
        sim.storage.arm(FaultPlan::new().fail_from(Op::Create, 0, EIO));
        (0..rig::VBS).for_each(|vb| drop(node.set(vb, "a", b"one")));
        node.stepper.advance(Duration::from_secs(60));
        assert!(node.bucket.stats().flush_failures > 4 * 15);
        assert_eq!((0..rig::VBS).map(|vb| node.durable(vb)).max(), Some(0));
    });
    let lines = lines.load(Ordering::Relaxed);
    assert!((1..=20).contains(&lines), "{lines} lines in a minute");
}
