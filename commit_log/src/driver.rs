//! Who leads when somebody submits: a task of the writer pool, or a thread that does nothing else.

use std::sync::{Arc, Weak};
use std::time::Duration;

use scheduler::park::{Bay, Look, Wake};
use scheduler::{Class, Context, Next, PoolKind, Pools, Task, TaskHandle};
use types::rank::Rank;
use types::sync::{Mutex, thread};

use crate::LogError;
use crate::log::{Lead, Log};

/// While the disk is full, it is looked at again this often.
const ROOM_PAUSE: Duration = Duration::from_millis(100);

/// How long changes that nobody waits for may wait for company.
pub(crate) const COMPANY_PAUSE: Duration = Duration::from_millis(10);

/// Who leads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Driver {
    /// A task of the writer pool. Shares threads with others that wait for the disk.
    Task,
    /// A thread of its own: no other work is in its way.
    Thread,
}

/// The threads and tasks that serve a log.
pub(crate) struct Running {
    leader: Leader,
    preparer: TaskHandle,
}

enum Leader {
    Task(TaskHandle),
    Thread { call: Arc<Bay<Call>>, handle: Mutex<Option<thread::JoinHandle<()>>> },
}

#[derive(Default)]
struct Call {
    wanted: bool,
    /// Wanted after a pause.
    wanted_later: bool,
    stopped: bool,
}

impl Running {
    pub fn wake(&self) {
        match &self.leader {
            Leader::Task(task) => task.wake(),
            Leader::Thread { call, .. } => call.change(|call| {
                call.wanted = true;
                ((), Wake::One)
            }),
        }
    }

    pub fn wake_later(&self) {
        match &self.leader {
            Leader::Task(task) => task.wake_after(COMPANY_PAUSE),
            Leader::Thread { call, .. } => call.change(|call| {
                call.wanted_later = true;
                ((), Wake::One)
            }),
        }
    }

    pub fn wake_preparer(&self) {
        self.preparer.wake();
    }

    /// When this returns, neither runs.
    pub fn stop(&self) {
        self.preparer.cancel();
        match &self.leader {
            Leader::Task(task) => task.cancel(),
            Leader::Thread { call, handle } => {
                call.change(|call| {
                    call.stopped = true;
                    ((), Wake::One)
                });
                let handle = handle.lock().take();
                if let Some(handle) = handle
                    && handle.thread().id() != thread::current().id()
                {
                    handle.join().expect("the log's thread ends by returning");
                }
            }
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Log {
    /// From here on, whatever is submitted is made durable without anybody calling [`Log::lead`]. Once.
    pub fn drive(self: &Arc<Log>, pools: &Pools, driver: Driver) -> Result<(), LogError> {
        let preparer = pools.spawn(PoolKind::Background, Arc::new(Preparing(Arc::downgrade(self))));
        let leader = match driver {
            Driver::Task => Leader::Task(pools.spawn(PoolKind::Writer, Arc::new(Leading(Arc::downgrade(self))))),
            Driver::Thread => {
                let call = Arc::new(Bay::new(Call::default()));
                let (log, heard) = (Arc::downgrade(self), Arc::clone(&call));
                let thread = thread::Builder::new().name("commit-log".to_owned());
                let handle = thread.spawn(move || serve(&log, &heard));
                let handle =
                    handle.map_err(LogError::io("start a thread for", std::path::Path::new("the commit log")))?;
                Leader::Thread { call, handle: Mutex::ranked(Rank::RunQueue, Some(handle)) }
            }
        };
        assert!(self.running.set(Running { leader, preparer }).is_ok(), "a log is driven once");
        // What was submitted before saw no driver.
        self.wake_if_full();
        Ok(())
    }
}

fn serve(log: &Weak<Log>, call: &Bay<Call>) {
    let mut pause = None;
    loop {
        let mut has_paused = false;
        let goes_on = call.wait(|call| {
            if call.stopped || std::mem::take(&mut call.wanted) || has_paused {
                call.wanted_later = false;
                return Look::Found(!call.stopped);
            }
            if std::mem::take(&mut call.wanted_later) {
                pause.get_or_insert(COMPANY_PAUSE);
            }
            has_paused = pause.is_some();
            pause.map_or(Look::Nothing, Look::NothingFor)
        });
        let Some(log) = log.upgrade().filter(|_| goes_on) else { return };
        pause = loop {
            match log.lead() {
                Lead::More => {}
                Lead::Full => break Some(ROOM_PAUSE),
                Lead::Later => break Some(COMPANY_PAUSE),
                Lead::Idle | Lead::Busy | Lead::Stopped => break None,
            }
        };
    }
}

struct Leading(Weak<Log>);

impl Task for Leading {
    fn name(&self) -> &'static str {
        "commit log"
    }

    fn class(&self) -> Class {
        Class::Urgent
    }

    fn run(&self, _: &Context<'_>) -> Next {
        let Some(log) = self.0.upgrade() else { return Next::Done };
        match log.lead() {
            Lead::More => Next::Again,
            Lead::Full => Next::After(ROOM_PAUSE),
            Lead::Later => Next::After(COMPANY_PAUSE),
            Lead::Idle | Lead::Busy | Lead::Stopped => Next::Idle,
        }
    }
}

struct Preparing(Weak<Log>);

impl Task for Preparing {
    fn name(&self) -> &'static str {
        "commit log segment"
    }

    fn run(&self, _: &Context<'_>) -> Next {
        let Some(log) = self.0.upgrade() else { return Next::Done };
        // Told by the leader, if it comes to need one.
        let _ = log.prepare_next().and_then(|()| log.choose_way());
        Next::Idle
    }
}
