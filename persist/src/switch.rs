//! The commit log, switched on and off while clients write.
//!
//! ```text
//!     off ──▶ a new log is made ──▶ entering: flushes that began before end ──▶ on
//!      ▲                                                  ▲                      │
//!      │                                                  │ (a file that cannot  ▼
//!      └── the log's directory goes ◀── leaving: what the log has is filed ◀── held: submissions that began before end
//! ```
//! A log that has the only copy of changes of a vBucket that takes no more writes cannot give their room back. While it has some
//! left it is used on. Once it is full it is kept: everybody else's changes go to the files, until a restart.
//!
//! At every moment one of the two makes changes durable, except while entering and held, which take as long as what is under
//! way. Wherever a crash comes, there is one log or none, and files that a replay of it completes: [`crate::flusher`] says
//! why no replay takes a file back.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use commit_log::Log;
use scheduler::{Context, Next, Pools, Task, TaskHandle};
use types::rank::{Mutex, Rank};

use crate::LogOptions;
use crate::error::StoreError;
use crate::logger::Phase;
use crate::names::{LOG_DIR, LOG_GONE_DIR};
use crate::replay::{give_up, has_segments};
use crate::shared::Shared;
use crate::store::remove_tree;
use crate::vb::Vb;

/// Between two attempts at what the disk refused.
const PAUSE: Duration = Duration::from_secs(1);

/// Where a switch stands. Lists are of vBuckets that are not known to be past a step.
enum Step {
    Off,
    Entering(Vec<Arc<Vb>>),
    On,
    Held(Vec<Arc<Vb>>),
    Leaving(Vec<Arc<Vb>>),
    /// All of the log is filed, and nobody writes it any more.
    Left,
    /// Nobody writes it any more, and a restart needs it: see [`Switch::block`].
    Kept,
    /// The log failed: only a restart can tell what it holds.
    Stuck,
}

/// 1. One task takes the steps; it looks again whenever something ended that it may be waiting for.
/// 2. A log is left only when it is filed. If that cannot be, as a file takes no more writes, it is used on, or kept if it has no
///    room.
/// 3. What a log that is kept has of a vBucket does not grow: what it had taken and not written is taken back before a file goes
///    on beyond it.
pub(crate) struct Switch {
    data_dir: OnceLock<PathBuf>,
    wanted: Mutex<Option<LogOptions>>,
    step: Mutex<Step>,
    is_under_way: AtomicBool,
    /// The log has no room, and what holds it can never be filed.
    is_blocked: AtomicBool,
    task: OnceLock<TaskHandle>,
}

impl Switch {
    pub fn new() -> Switch {
        Switch {
            data_dir: OnceLock::new(),
            wanted: Mutex::ranked(Rank::CommitQueue, None),
            step: Mutex::ranked(Rank::CommitQueue, Step::Off),
            is_under_way: AtomicBool::new(false),
            is_blocked: AtomicBool::new(false),
            task: OnceLock::new(),
        }
    }

    pub fn set_task(&self, task: TaskHandle) {
        assert!(self.task.set(task).is_ok(), "a switch has one task");
    }

    /// How the store was opened.
    pub fn begin(&self, data_dir: &Path, log: Option<LogOptions>) {
        assert!(self.data_dir.set(data_dir.to_owned()).is_ok(), "a store is opened once");
        *self.step.lock() = if log.is_some() { Step::On } else { Step::Off };
        *self.wanted.lock() = log;
    }

    pub fn want(&self, log: Option<LogOptions>) {
        let mut wanted = self.wanted.lock();
        *wanted = log;
        self.is_under_way.store(true, Ordering::Release);
        drop(wanted);
        self.look();
    }

    /// The log is full, and all that keeps it so are vBuckets that take no writes: whatever is wanted, everybody else does
    /// without it.
    pub fn block(&self) {
        let wanted = self.wanted.lock();
        let is_news = !self.is_blocked.swap(true, Ordering::AcqRel);
        if is_news {
            self.is_under_way.store(true, Ordering::Release);
        }
        drop(wanted);
        self.look();
    }

    fn is_blocked(&self) -> bool {
        self.is_blocked.load(Ordering::Acquire)
    }

    /// Nothing more is to be done, unless something else is wanted by now.
    fn rest(&self, step: &Step) -> bool {
        let wanted = self.wanted.lock();
        let is_wanted = wanted.is_some() && !self.is_blocked();
        let rests = match step {
            Step::On => is_wanted,
            Step::Off => !is_wanted,
            _ => true,
        };
        self.is_under_way.store(!rests, Ordering::Release);
        rests
    }

    pub fn is_under_way(&self) -> bool {
        self.is_under_way.load(Ordering::Acquire)
    }

    /// Something has ended.
    pub fn look(&self) {
        if self.is_under_way()
            && let Some(task) = self.task.get()
        {
            task.wake();
        }
    }

    pub fn stop(&self) {
        self.task.get().into_iter().for_each(TaskHandle::cancel);
    }
}

/// What a step came to.
enum Turn {
    /// The next one may be taken.
    Go(Step),
    /// Something has to end first.
    Wait(Step),
    /// The disk refused.
    Pause(Step),
    Done(Step),
}

/// Runs the switch.
pub(crate) struct Switching(pub Weak<Shared>, pub Weak<Pools>);

impl Task for Switching {
    fn name(&self) -> &'static str {
        "commit log switch"
    }

    fn run(&self, _: &Context<'_>) -> Next {
        let (Some(shared), Some(pools)) = (self.0.upgrade(), self.1.upgrade()) else { return Next::Done };
        let switch = &shared.switch;
        if !switch.is_under_way() {
            return Next::Idle;
        }
        let step = std::mem::replace(&mut *switch.step.lock(), Step::Stuck);
        let (step, next) = match shared.take_step(&pools, step) {
            Turn::Go(step) => (step, Next::Again),
            Turn::Wait(step) => (step, Next::Idle),
            Turn::Pause(step) => (step, Next::After(PAUSE)),
            Turn::Done(step) => {
                let next = if switch.rest(&step) { Next::Idle } else { Next::Again };
                (step, next)
            }
        };
        *switch.step.lock() = step;
        next
    }
}

impl Shared {
    fn take_step(self: &Arc<Shared>, pools: &Pools, step: Step) -> Turn {
        let logger = &self.logger;
        let wanted = self.switch.wanted.lock().clone().filter(|_| !self.switch.is_blocked());
        match (step, wanted) {
            (Step::Off, None) => {
                tracing::info!("the commit log is off: each vBucket's changes are committed to its file");
                Turn::Done(Step::Off)
            }
            (Step::Off, Some(options)) => match self.new_log(pools, &options) {
                Ok(()) => self.enter(),
                Err(error) => {
                    tracing::warn!("the commit log cannot be begun, trying again in {PAUSE:?}: {error}");
                    Turn::Pause(Step::Off)
                }
            },
            (Step::Entering(mut left), _) => {
                left.retain(|vb| self.flushes.is_running(vb));
                if !left.is_empty() {
                    return Turn::Wait(Step::Entering(left));
                }
                // Whatever is flushed from here on is in the log.
                logger.set_phase(Phase::On);
                logger.look_at_all();
                Turn::Go(Step::On)
            }
            (Step::On, Some(_)) => {
                tracing::info!("the commit log is on: changes of all vBuckets go to it first");
                Turn::Done(Step::On)
            }
            (Step::On, None) => {
                if let Some(log) = logger.log() {
                    log.hold(true);
                }
                Turn::Go(Step::Held(logger.everyone()))
            }
            (Step::Held(mut left), _) => {
                left.retain(|vb| vb.asks.load(Ordering::Acquire) > 0);
                if !left.is_empty() {
                    // They do no I/O.
                    return Turn::Go(Step::Held(left));
                }
                // What the log has is known, and does not grow.
                if self.switch.is_blocked() {
                    self.take_back();
                }
                logger.set_phase(Phase::Leaving);
                logger.look_at_all();
                Turn::Go(Step::Leaving(logger.everyone()))
            }
            (Step::Leaving(_), Some(_)) => self.stay(),
            (Step::Leaving(left), None) => self.leave(left),
            (Step::Left, _) => self.end(),
            (Step::Kept, _) => Turn::Done(Step::Kept),
            (Step::Stuck, _) => Turn::Done(Step::Stuck),
        }
    }

    fn new_log(self: &Arc<Shared>, pools: &Pools, options: &LogOptions) -> Result<(), StoreError> {
        let storage = &*self.env.storage;
        let data_dir = self.switch.data_dir();
        let dir = data_dir.join(LOG_DIR);
        remove_tree(storage, &data_dir.join(LOG_GONE_DIR))?;
        if storage.exists(&dir).map_err(StoreError::io("look for", &dir))? {
            // Left by an attempt that failed: nothing is in it, and nothing of it is known to be on disk, not even its name.
            give_up(storage, data_dir, LOG_GONE_DIR)?;
        }
        let log = Log::begin(&self.env, &dir, options.of_files()).map_err(StoreError::log)?;
        self.set_log(pools, log, options).map_err(StoreError::log)
    }

    /// There is a log, and files must not run ahead of it any more.
    fn enter(&self) -> Turn {
        self.logger.set_phase(Phase::Entering);
        Turn::Go(Step::Entering(self.logger.everyone()))
    }

    /// The log that was to be left is used on.
    fn stay(&self) -> Turn {
        if let Some(log) = self.logger.log() {
            log.hold(false);
        }
        self.enter()
    }

    fn leave(&self, mut left: Vec<Arc<Vb>>) -> Turn {
        let Some(log) = self.logger.log() else { return Turn::Go(Step::Left) };
        if let Some(reason) = log.poisoned() {
            return stuck(&reason);
        }
        while let Some(vb) = left.last() {
            let Some(attached) = vb.attached().filter(|_| !vb.home.gone.load(Ordering::Acquire)) else {
                left.pop();
                continue;
            };
            if attached.is_filed() {
                left.pop();
                continue;
            }
            let Some(reason) = attached.log.marks.poisoned() else { return Turn::Wait(Step::Leaving(left)) };
            let (bucket, vb) = (&vb.home.name, vb.id.0);
            if !self.switch.is_blocked() {
                tracing::error!(
                    bucket,
                    vb,
                    "the commit log stays on until a restart, as only it has the changes of a vBucket: {reason}"
                );
                *self.switch.wanted.lock() = Some(LogOptions::default());
                return self.stay();
            }
            left.pop();
        }
        // Whoever was waited for meanwhile may be one of them by now.
        let mut held = self.logger.everyone().into_iter().filter(|vb| vb.is_held_by_log());
        if let Some(vb) = held.next().filter(|_| self.switch.is_blocked()) {
            let (bucket, id, why) = (&vb.home.name, vb.id.0, vb.poisoned().unwrap_or_default());
            tracing::error!(
                bucket,
                vb = id,
                "the commit log is full, and is kept as it is until a restart, as only it has the changes of a vBucket. \
                 Those of others are committed to their files, which takes longer. Restart soon: {why}"
            );
            self.take_back();
            return Turn::Done(Step::Kept);
        }
        // All of it is filed. Nobody writes to it from here on, and nobody hears of it.
        log.stop();
        match log.poisoned() {
            Some(reason) => stuck(&reason),
            None => Turn::Go(Step::Left),
        }
    }

    /// The log gives up what it took and has not written, which the files are given instead.
    fn take_back(&self) {
        let Some(log) = self.logger.log() else { return };
        log.abandon();
        for vb in self.logger.everyone() {
            if let Some(attached) = vb.attached() {
                attached.records.lock().forget_submitted();
                attached.submitted.fetch_min(attached.log.marks.durable().0, Ordering::AcqRel);
            }
        }
    }

    fn remove_log(&self) -> Result<(), StoreError> {
        let (storage, data_dir) = (&*self.env.storage, self.switch.data_dir());
        // If it has its other name already, only its files are left to remove; the next log, or the next start, does.
        if has_segments(storage, &data_dir.join(LOG_DIR))? { give_up(storage, data_dir, LOG_GONE_DIR) } else { Ok(()) }
    }

    fn end(&self) -> Turn {
        match self.remove_log() {
            Ok(()) => {}
            Err(StoreError::Io { op: "sync directory", path, source }) => {
                let reason = format!("fsync of {} failed: {source}", path.display());
                for vb in self.logger.everyone() {
                    if let Some(attached) = vb.attached() {
                        vb.poison(&attached, reason.clone());
                    }
                }
                return stuck(&reason);
            }
            Err(error) => {
                tracing::warn!("the commit log cannot be removed, trying again in {PAUSE:?}: {error}");
                return Turn::Pause(Step::Left);
            }
        }
        for vb in self.logger.everyone() {
            if let Some(attached) = vb.attached() {
                attached.records.lock().forget_submitted();
            }
        }
        self.switch.is_blocked.store(false, Ordering::Release);
        self.logger.set_phase(Phase::Off);
        self.logger.set_log(None);
        self.logger.look_at_all();
        Turn::Go(Step::Off)
    }
}

impl Switch {
    fn data_dir(&self) -> &Path {
        self.data_dir.get().expect("set when the store was opened")
    }
}

fn stuck(reason: &str) -> Turn {
    tracing::error!("the commit log cannot be left until a restart: {reason}");
    Turn::Done(Step::Stuck)
}
