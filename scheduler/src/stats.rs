//! What the pools know about themselves.

use std::sync::Arc;

use metrics::{Counter, Family, Kind, Registry, Source, Timings, Value, Visit};

use crate::PoolKind;
use crate::core::Core;

/// Kept per kind of task: all tasks of one name in one pool.
pub struct TaskStats {
    pub pool: PoolKind,
    pub name: &'static str,
    pub runs: Counter,
    /// Wakes that led to a run; those of a task already waiting to run are not counted.
    pub wakes: Counter,
    /// Runs longer than the task's slice.
    pub overruns: Counter,
    /// From being due to running.
    pub wait: Timings,
    pub run: Timings,
}

/// A pool at this moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolStats {
    pub pool: PoolKind,
    pub threads: usize,
    /// Tasks running.
    pub running: usize,
    /// Tasks waiting for a thread.
    pub ready: usize,
    /// How often a thread of the pool woke from sleep.
    pub wakeups: u64,
}

/// Everything: see [`crate::Pools::stats`].
pub struct Stats {
    pub pools: Vec<PoolStats>,
    /// Sorted by pool and name.
    pub tasks: Vec<Arc<TaskStats>>,
    /// How often the timer thread woke from sleep.
    pub timer_wakeups: u64,
}

impl TaskStats {
    pub(crate) fn new(pool: PoolKind, name: &'static str) -> TaskStats {
        let [runs, wakes, overruns] = [const { Counter::new() }; 3];
        TaskStats { pool, name, runs, wakes, overruns, wait: Timings::new(), run: Timings::new() }
    }
}

impl Stats {
    /// The statistics of the tasks called `name`, if any was ever spawned.
    pub fn task(&self, name: &str) -> Option<&TaskStats> {
        self.tasks.iter().find(|task| task.name == name).map(|task| &**task)
    }
}

pub(crate) fn register(core: &Arc<Core>, registry: &mut Registry) {
    let by_task = |name, help, kind, read: fn(&TaskStats) -> Value| {
        Family::shared(name, help, Arc::new(ByTask { core: core.clone(), kind, read }))
    };
    let by_pool = |name, help, kind, read: fn(&PoolStats) -> Value| {
        Family::shared(name, help, Arc::new(ByPool { core: core.clone(), kind, read }))
    };
    registry.add(&[
        by_task("scheduler_task_runs", "Runs, by pool and task.", Kind::Counter, |t| Value::Counter(t.runs.get())),
        by_task("scheduler_task_wakes", "Wakes that led to a run, by pool and task.", Kind::Counter, |t| {
            Value::Counter(t.wakes.get())
        }),
        by_task("scheduler_task_overruns", "Runs longer than the task's slice.", Kind::Counter, |t| {
            Value::Counter(t.overruns.get())
        }),
        by_task("scheduler_task_wait", "From being due to running, by pool and task.", Kind::Timings, |t| {
            Value::Timings(t.wait.snapshot())
        }),
        by_task("scheduler_task_run", "How long runs took, by pool and task.", Kind::Timings, |t| {
            Value::Timings(t.run.snapshot())
        }),
        by_pool("scheduler_threads", "Threads of a pool.", Kind::Gauge, |p| Value::Gauge(p.threads as i64)),
        by_pool("scheduler_ready", "Tasks waiting for a thread of the pool.", Kind::Gauge, |p| {
            Value::Gauge(p.ready as i64)
        }),
        by_pool("scheduler_wakeups", "Times a thread of the pool woke from sleep.", Kind::Counter, |p| {
            Value::Counter(p.wakeups)
        }),
    ]);
}

struct ByTask {
    core: Arc<Core>,
    kind: Kind,
    read: fn(&TaskStats) -> Value,
}

impl Source for ByTask {
    fn kind(&self) -> Kind {
        self.kind
    }
    fn walk(&self, visit: Visit<'_>) {
        for task in self.core.stats().tasks {
            visit(&[("pool", task.pool.name()), ("task", task.name)], (self.read)(&task));
        }
    }
}

struct ByPool {
    core: Arc<Core>,
    kind: Kind,
    read: fn(&PoolStats) -> Value,
}

impl Source for ByPool {
    fn kind(&self) -> Kind {
        self.kind
    }
    fn walk(&self, visit: Visit<'_>) {
        for pool in self.core.stats().pools {
            visit(&[("pool", pool.pool.name())], (self.read)(&pool));
        }
    }
}
