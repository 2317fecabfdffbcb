//! Synchronous writes that wait for their watermark, and whoever else waits for one.
//!
//! The queue of a vBucket is in prepare order, because a write joins it under the changelog's lock. It is completed from
//! the front only, by one thread at a time (`completing`), so commits are appended in the order of their prepares. Whoever
//! comes while another completes may leave: the completing thread looks again, under this lock, before it stops.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use changelog::Watermarks;
use types::{Item, Level, Seqno};

use crate::chain::Chains;
use crate::op::{Mutated, OpError, OpResult, Reply, Waiter};
use crate::passive::{AckNudge, Passive};

/// What the client of a sync write is told once it is committed.
pub(crate) enum Answer {
    Mutated,
    Counter(u64),
    Subdoc { deleted: bool, results: Vec<(u8, Vec<u8>)> },
}

impl Answer {
    pub fn reply(self, mutated: Mutated) -> Reply {
        match self {
            Answer::Mutated => Reply::Mutated(mutated),
            Answer::Counter(value) => Reply::Counter { value, mutated },
            Answer::Subdoc { deleted, results } => Reply::SubdocMutated { mutated, deleted, results },
        }
    }
}

/// One prepare under way.
pub(crate) struct SyncWrite {
    pub seqno: Seqno,
    pub level: Level,
    pub prepare: Item,
    /// On the monotonic clock. `None`: inherited from before a restart or from another node, never given up.
    pub deadline: Option<Duration>,
    /// Who to tell: nobody, if inherited.
    pub client: Option<Client>,
}

pub(crate) struct Client {
    pub waiter: Waiter,
    pub answer: Answer,
    pub mutated: Mutated,
}

/// What to do with the write at the front.
pub(crate) enum Verdict {
    Commit(SyncWrite),
    /// Says why it came to nothing.
    Abort(SyncWrite, &'static str),
    /// Nobody can know: the disk's content is in doubt.
    Ambiguous(SyncWrite),
}

/// Asked for `durable ≥ seqno`.
struct SeqnoWaiter {
    seqno: Seqno,
    deadline: Duration,
    waiter: Waiter,
}

/// Those who wait in one vBucket.
///
/// 1. `queue` is in prepare order.
/// 2. While `completing`, one thread owns the right to take from the front.
#[derive(Default)]
pub(crate) struct Tracker {
    queue: VecDeque<SyncWrite>,
    completing: bool,
    seqno_waiters: Vec<SeqnoWaiter>,
    /// When the bucket's timer will look here, if it will.
    armed_at: Option<Duration>,
    /// Who else must have a write; `None`: this node alone decides.
    pub chains: Option<Box<Chains>>,
    /// The chains cannot make anything durable: who waits is told, unless the outcome may be known elsewhere.
    pub is_impossible: bool,
    /// Of a vBucket that is not active.
    pub passive: Option<Box<Passive>>,
    /// Of the next one: a rollback begins a new one.
    pub passive_nudge: Option<Arc<dyn AckNudge>>,
    /// High and last completed prepare, for the statistics.
    pub high_prepared: Seqno,
    pub completed: Seqno,
}

impl Tracker {
    pub fn push(&mut self, write: SyncWrite) {
        assert!(self.queue.back().is_none_or(|last| last.seqno < write.seqno), "prepares join in order");
        self.high_prepared = write.seqno;
        self.queue.push_back(write);
    }

    pub fn len(&self) -> usize {
        self.queue.len()
    }

    /// Takes the right to complete. `false`: another thread has it and will look again.
    pub fn begin(&mut self) -> bool {
        !std::mem::replace(&mut self.completing, true)
    }

    /// The write at the front if its time has come; `None` gives the right to complete back.
    pub fn next(&mut self, marks: &Watermarks, now: Duration) -> Option<Verdict> {
        assert!(self.completing, "whoever completes has said so");
        let verdict = self.queue.front().and_then(|head| {
            // Before the poison: what was published as durable before it is.
            let on_disk = marks.durable() >= head.seqno;
            let has_all = || match &self.chains {
                None => on_disk || head.level == Level::Majority,
                Some(chains) => {
                    let is_inherited = head.deadline.is_none();
                    chains.is_satisfied(head.seqno, head.level, on_disk, is_inherited)
                }
            };
            let make: fn(SyncWrite) -> Verdict = if !on_disk && marks.poisoned().is_some() {
                Verdict::Ambiguous
            } else if has_all() {
                Verdict::Commit
            } else if head.deadline.is_some_and(|deadline| deadline <= now) {
                |write| Verdict::Abort(write, "not durable within its time-out")
            } else if self.is_impossible && head.deadline.is_some() {
                |write| Verdict::Abort(write, "too few nodes are left in the replication chain")
            } else {
                return None;
            };
            Some(make)
        });
        match verdict {
            Some(make) => {
                let write = self.queue.pop_front().expect("just seen");
                self.completed = write.seqno;
                Some(make(write))
            }
            None => {
                self.completing = false;
                None
            }
        }
    }

    /// Takes everything that waits for a sync write.
    pub fn drain(&mut self) -> Vec<SyncWrite> {
        self.queue.drain(..).collect()
    }

    pub fn await_seqno(&mut self, seqno: Seqno, deadline: Duration, waiter: Waiter) {
        self.seqno_waiters.push(SeqnoWaiter { seqno, deadline, waiter });
    }

    /// Those whose seqno is on disk, or never will be in time, with what to tell them.
    pub fn take_seqno_waiters(&mut self, marks: &Watermarks, now: Duration) -> Vec<(Waiter, OpResult)> {
        let durable = marks.durable();
        let poisoned = marks.poisoned();
        let due = |w: &mut SeqnoWaiter| w.seqno <= durable || poisoned.is_some() || w.deadline <= now;
        let answer = |w: SeqnoWaiter| {
            let result = if w.seqno <= durable {
                Ok(Reply::Done { cas: types::Cas(0) })
            } else if let Some(reason) = poisoned {
                Err(OpError::Temporary(format!("nothing more is written here: {reason}")))
            } else {
                Err(OpError::Temporary(format!("seqno {} is not on disk yet, {durable} is", w.seqno)))
            };
            (w.waiter, result)
        };
        self.seqno_waiters.extract_if(.., due).map(answer).collect()
    }

    /// The moment the timer must be told of, if it will not look here by then anyway.
    pub fn arm(&mut self) -> Option<Duration> {
        let head = self.queue.front().and_then(|write| write.deadline);
        let first = self.seqno_waiters.iter().map(|w| w.deadline).chain(head).min()?;
        if self.armed_at.is_some_and(|armed| armed <= first) {
            return None;
        }
        self.armed_at = Some(first);
        Some(first)
    }

    /// See [`Passive::awaits_disk`].
    pub fn awaits_disk(&self) -> bool {
        self.passive.as_deref().is_some_and(Passive::awaits_disk)
    }

    /// The high prepared and the high completed seqno.
    pub fn prepared_marks(&self) -> (Seqno, Seqno) {
        match &self.passive {
            Some(passive) => (passive.high_prepared, passive.completed),
            None => (self.high_prepared, self.completed),
        }
    }

    /// The prepares under way, oldest first.
    pub fn writes(&self) -> impl DoubleEndedIterator<Item = &SyncWrite> {
        self.queue.iter()
    }

    /// The timer has looked.
    pub fn disarm(&mut self) {
        self.armed_at = None;
    }
}
