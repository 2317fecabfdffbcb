//! One pool: a queue and the threads that serve it.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use types::rank::Rank;
use types::sync::{Mutex, thread};

use crate::PoolKind;
use crate::core::Core;
use crate::park::{Bay, Look, Wake};
use crate::ready::Ready;
use crate::stats::PoolStats;
use crate::task::{Cell, TaskHandle};

/// A queue of ready tasks and the threads that serve it.
///
/// 1. As many threads as `target` says, but for those that are on their way in or out.
/// 2. A call meant for a task is not lost on a thread that leaves: shrinking calls everybody, and whoever then goes back to
///    sleep has seen that it may stay. So while there is a surplus, nobody is asleep.
/// 3. After `close` nothing is queued, so nothing is run that was not already off the queue.
pub(crate) struct Pool {
    kind: PoolKind,
    bay: Bay<Queue>,
    threads: Mutex<Threads>,
    gives_way: AtomicBool,
}

struct Queue {
    ready: Ready<Arc<Cell>>,
    /// Tasks off the queue whose run is not over.
    running: usize,
    /// Ever queued.
    pushed: u64,
    threads: usize,
    target: usize,
    /// Ids of threads that left and can be joined at once.
    left: Vec<u64>,
    /// Someone waits for the pool to come to rest.
    draining: bool,
    closed: bool,
}

#[derive(Default)]
struct Threads {
    handles: Vec<(u64, thread::JoinHandle<()>)>,
    started: u64,
}

/// What a thread does next.
enum Step {
    Run(Duration, Arc<Cell>),
    /// Tell who waits for it that the pool is at rest.
    TellAtRest,
    Leave,
}

impl Pool {
    pub fn new(kind: PoolKind) -> Pool {
        let queue = Queue {
            ready: Ready::new(),
            running: 0,
            pushed: 0,
            threads: 0,
            target: 0,
            left: Vec::new(),
            draining: false,
            closed: false,
        };
        let threads = Mutex::ranked(Rank::RunQueue, Threads::default());
        Pool { kind, bay: Bay::new(queue), threads, gives_way: AtomicBool::new(kind.gives_way()) }
    }

    pub fn push(&self, due: Duration, cell: Arc<Cell>) {
        let refused = self.bay.change(|queue| {
            if queue.closed {
                return (Some(cell), Wake::Nobody);
            }
            queue.pushed += 1;
            queue.ready.push(cell.class, due, cell);
            (None, Wake::One)
        });
        // Dropped after the unlock: with the last handle on it, a task may go.
        drop(refused);
    }

    /// Sets how many threads serve the queue. Surplus threads leave when they next look for work.
    pub fn set_target(&self, core: &Arc<Core>, target: usize) -> io::Result<()> {
        let missing = self.bay.change(|queue| {
            queue.target = if queue.closed { 0 } else { target };
            let missing = queue.target.saturating_sub(queue.threads);
            queue.threads += missing;
            (missing, Wake::Everybody)
        });
        let outcome = (0..missing).try_for_each(|started| {
            self.start_thread(core).inspect_err(|_| {
                self.bay.change(|queue| {
                    queue.threads -= missing - started;
                    queue.target = queue.target.min(queue.threads);
                    ((), Wake::Nobody)
                });
            })
        });
        self.reap();
        outcome
    }

    /// Takes a task off the queue, for a stepper: the next one, or the `nth` in no order.
    pub fn take(&self, nth: Option<usize>) -> Option<(Duration, Arc<Cell>)> {
        self.bay.change(|queue| {
            let taken = match nth {
                None => queue.ready.pop(),
                Some(nth) => queue.ready.pop_nth(nth),
            };
            (taken, Wake::Nobody)
        })
    }

    /// How many tasks were ever queued, if none is queued or running now.
    pub fn at_rest(&self) -> Option<u64> {
        self.bay.read(|queue| queue.is_at_rest().then_some(queue.pushed))
    }

    /// From now on, threads tell when the pool comes to rest.
    pub fn drain(&self) {
        self.bay.change(|queue| {
            queue.draining = true;
            ((), Wake::Nobody)
        });
    }

    /// Cancels what is queued and sends the threads home.
    pub fn close(&self) {
        let mut dropped = self.bay.change(|queue| {
            queue.closed = true;
            queue.target = 0;
            (std::mem::replace(&mut queue.ready, Ready::new()), Wake::Everybody)
        });
        while let Some((_, cell)) = dropped.pop() {
            TaskHandle { cell }.cancel();
        }
    }

    /// Waits until all threads have left, after `close`; but not for the calling thread.
    pub fn join(&self) {
        let handles = std::mem::take(&mut self.threads.lock().handles);
        join_others(handles.into_iter().map(|(_, handle)| handle));
    }

    pub fn stats(&self) -> PoolStats {
        let wakeups = self.bay.wakeups();
        self.bay.read(|queue| PoolStats {
            pool: self.kind,
            threads: queue.threads,
            running: queue.running,
            ready: queue.ready.len(),
            wakeups,
        })
    }

    fn start_thread(&self, core: &Arc<Core>) -> io::Result<()> {
        let mut threads = self.threads.lock();
        let id = threads.started;
        threads.started += 1;
        let (kind, core) = (self.kind, core.clone());
        let name = format!("{}-{id}", kind.name());
        // Under the lock, so that a thread that leaves at once is on the list before it is looked for there.
        let handle = thread::Builder::new().name(name).spawn(move || core.pool(kind).work(&core, id))?;
        threads.handles.push((id, handle));
        Ok(())
    }

    /// Joins threads that left.
    fn reap(&self) {
        let left = self.bay.change(|queue| (std::mem::take(&mut queue.left), Wake::Nobody));
        let mut threads = self.threads.lock();
        let (gone, kept) = std::mem::take(&mut threads.handles).into_iter().partition(|(id, _)| left.contains(id));
        threads.handles = kept;
        drop(threads);
        let gone: Vec<_> = gone;
        join_others(gone.into_iter().map(|(_, handle)| handle));
    }

    /// A thread's life.
    fn work(&self, core: &Arc<Core>, id: u64) {
        let mut is_behind = false;
        let mut ran = false;
        loop {
            match self.next_step(id, &mut ran) {
                Step::Run(due, cell) => {
                    if !is_behind && self.gives_way.load(Relaxed) {
                        is_behind = true;
                        self.step_behind();
                    }
                    core.run(due, &cell);
                    ran = true;
                }
                Step::TellAtRest => core.announce_ending(),
                Step::Leave => return,
            }
        }
    }

    /// The calling thread lets all others go first from here on.
    fn step_behind(&self) {
        #[cfg(not(any(loom, shuttle)))]
        if let Err(error) = env::os::give_way() {
            tracing::warn!(pool = self.kind.name(), "its threads are as urgent as all others: {error}");
        }
    }

    /// Its threads let all others go first, each from its next task on, and for good.
    pub fn give_way(&self) {
        self.gives_way.store(true, Relaxed);
    }

    fn next_step(&self, id: u64, ran: &mut bool) -> Step {
        self.sleep_until(|queue| {
            if std::mem::take(ran) {
                queue.running -= 1;
                if queue.draining && queue.is_at_rest() {
                    return Look::Found(Step::TellAtRest);
                }
            }
            if queue.threads > queue.target {
                queue.threads -= 1;
                queue.left.push(id);
                return Look::Found(Step::Leave);
            }
            match queue.ready.pop() {
                Some((due, cell)) => {
                    queue.running += 1;
                    Look::Found(Step::Run(due, cell))
                }
                None => Look::Nothing,
            }
        })
    }

    #[cfg(not(feature = "old-order"))]
    fn sleep_until<R>(&self, look: impl FnMut(&mut Queue) -> Look<R>) -> R {
        self.bay.wait(look)
    }

    /// For the experiment that shows what this was like. Between the two steps lie about a hundred nanoseconds, so the
    /// thread gives up the processor there once in a while, or one would wait for days to see a wake lost.
    #[cfg(feature = "old-order")]
    fn sleep_until<R>(&self, look: impl FnMut(&mut Queue) -> Look<R>) -> R {
        const FALL_BACK: Duration = Duration::from_secs(2);
        thread_local!(static PASSES: std::cell::Cell<u32> = const { std::cell::Cell::new(0) });
        let pause = || {
            let passes = PASSES.get() + 1;
            PASSES.set(passes);
            if passes.is_multiple_of(256) {
                std::thread::yield_now();
            }
        };
        self.bay.wait_in_old_order(Some(FALL_BACK), pause, look)
    }
}

impl Queue {
    fn is_at_rest(&self) -> bool {
        self.ready.is_empty() && self.running == 0
    }
}

/// Joins threads, but never the calling one: a task may let go of the last hold on its pools.
pub(crate) fn join_others(handles: impl Iterator<Item = thread::JoinHandle<()>>) {
    let me = thread::current().id();
    for handle in handles {
        if handle.thread().id() != me {
            handle.join().expect("a thread of a pool ends by returning");
        }
    }
}
