//! Which vBuckets want a flush, across all buckets: two urgencies that take turns, and each vBucket at most once.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use types::rank::{Mutex, Rank};

/// How soon a change should be flushed. `Durable`: somebody waits for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Urgency {
    Normal,
    Durable,
}

/// Where a piece of work stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum Stage {
    Idle,
    QueuedNormal,
    QueuedDurable,
    Running,
    /// Changed while running: to be queued again at the end.
    RunningNormal,
    RunningDurable,
    /// Somebody who does not run it waits for the end of the run.
    RunningClaimed,
    /// Had by somebody who does not run it.
    Claimed,
    /// Failed; sleeps until its time comes, whatever else happens.
    Waiting,
    /// For good.
    Stopped,
    /// For good, once it has finished running.
    Stopping,
}

use Stage::*;

/// The place of one piece of work in a [`WorkQueue`].
#[derive(Debug)]
pub struct Ticket(AtomicU8);

impl Default for Ticket {
    fn default() -> Ticket {
        Ticket(AtomicU8::new(Idle as u8))
    }
}

impl Ticket {
    fn get(&self) -> Stage {
        const STAGES: [Stage; 11] = [
            Idle,
            QueuedNormal,
            QueuedDurable,
            Running,
            RunningNormal,
            RunningDurable,
            RunningClaimed,
            Claimed,
            Waiting,
            Stopped,
            Stopping,
        ];
        STAGES[usize::from(self.0.load(Ordering::Acquire))]
    }

    /// Only with the queue's lock held.
    fn set(&self, stage: Stage) {
        self.0.store(stage as u8, Ordering::Release);
    }

    pub fn is_busy(&self) -> bool {
        !matches!(self.get(), Idle | Waiting | Stopped)
    }

    pub fn is_running(&self) -> bool {
        matches!(self.get(), Running | RunningNormal | RunningDurable | RunningClaimed | Claimed | Stopping)
    }

    pub fn is_claimed(&self) -> bool {
        self.get() == Claimed
    }

    pub fn is_waiting(&self) -> bool {
        self.get() == Waiting
    }

    pub fn is_stopped(&self) -> bool {
        self.get() == Stopped
    }
}

/// What a run of a piece of work came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    Done,
    More,
    /// Not before this moment of the monotonic clock.
    Retry(Duration),
}

/// What asking for a piece of work came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Claim {
    /// It will not run before it is released.
    Mine,
    /// It runs; once it has, it is the claimer's: see [`Ticket::is_claimed`].
    Soon,
    /// It is stopped.
    Never,
}

/// 1. A piece of work is in one place: queued, running on one thread, claimed, waiting, or nowhere.
/// 2. `push` after a change, and the run that sees the change is yet to begin, or the work is queued once more. The
///    argument: a run sets `Running` before it looks at what there is to do, under a lock that the change was also made
///    under. So either it sees the change, or the pusher sees `Running`.
/// 3. With both urgencies waiting, they take turns; within one, first come, first served.
pub struct WorkQueue<W> {
    inner: Mutex<Inner<W>>,
    ticket: fn(&W) -> &Ticket,
}

struct Inner<W> {
    durable: VecDeque<Arc<W>>,
    normal: VecDeque<Arc<W>>,
    /// Sorted by time.
    waiting: VecDeque<(Duration, Arc<W>)>,
    durable_had_turn: bool,
}

impl<W> WorkQueue<W> {
    /// `ticket`: where a piece of work keeps its place in this queue.
    pub fn new(ticket: fn(&W) -> &Ticket) -> WorkQueue<W> {
        let inner = Inner {
            durable: VecDeque::new(),
            normal: VecDeque::new(),
            waiting: VecDeque::new(),
            durable_had_turn: false,
        };
        WorkQueue { inner: Mutex::ranked(Rank::CommitQueue, inner), ticket }
    }

    /// Asks for a run that begins after now. True: something new is queued, so wake a worker.
    pub fn push(&self, work: &Arc<W>, urgency: Urgency) -> bool {
        match ((self.ticket)(work).get(), urgency) {
            (QueuedDurable | RunningDurable | Waiting | Stopping | Stopped, _) => return false,
            (QueuedNormal | RunningNormal, Urgency::Normal) => return false,
            _ => {}
        }
        let mut inner = self.inner.lock();
        let ticket = (self.ticket)(work);
        match (ticket.get(), urgency) {
            (Idle, _) | (QueuedNormal, Urgency::Durable) => {
                // An upgrade leaves the old entry behind; whoever pops it sees that it is stale.
                inner.enqueue(work, ticket, urgency);
                true
            }
            (Running, Urgency::Normal) => {
                ticket.set(RunningNormal);
                false
            }
            (Running | RunningNormal, Urgency::Durable) => {
                ticket.set(RunningDurable);
                false
            }
            _ => false,
        }
    }

    /// The next piece of work, which is the caller's until [`WorkQueue::finish`].
    pub fn pop(&self) -> Option<Arc<W>> {
        let mut inner = self.inner.lock();
        loop {
            let durable_turn = inner.normal.is_empty() || (!inner.durable_had_turn && !inner.durable.is_empty());
            let (work, expected) = match durable_turn {
                true => (inner.durable.pop_front()?, QueuedDurable),
                false => (inner.normal.pop_front()?, QueuedNormal),
            };
            let ticket = (self.ticket)(&work);
            if ticket.get() == expected {
                inner.durable_had_turn = durable_turn;
                ticket.set(Running);
                return Some(work);
            }
        }
    }

    /// Gives a piece of work back. True: it is queued again.
    pub fn finish(&self, work: &Arc<W>, outcome: Outcome) -> bool {
        let mut inner = self.inner.lock();
        let ticket = (self.ticket)(work);
        match (ticket.get(), outcome) {
            (Stopping, _) => {
                ticket.set(Stopped);
                false
            }
            (RunningClaimed, _) => {
                ticket.set(Claimed);
                false
            }
            (_, Outcome::Retry(at)) => {
                ticket.set(Waiting);
                let place = inner.waiting.partition_point(|(other, _)| *other <= at);
                inner.waiting.insert(place, (at, Arc::clone(work)));
                false
            }
            (RunningDurable, _) => {
                inner.enqueue(work, ticket, Urgency::Durable);
                true
            }
            (RunningNormal, _) | (Running, Outcome::More) => {
                inner.enqueue(work, ticket, Urgency::Normal);
                true
            }
            (Running, Outcome::Done) => {
                ticket.set(Idle);
                false
            }
            (stage, _) => unreachable!("finished work was {stage:?}"),
        }
    }

    /// Asks to have a piece of work without running it. One claims at a time.
    pub fn claim(&self, work: &Arc<W>) -> Claim {
        let mut inner = self.inner.lock();
        let ticket = (self.ticket)(work);
        match ticket.get() {
            Idle | QueuedNormal | QueuedDurable | Waiting => {
                // What is left in a queue is stale, as after an upgrade.
                inner.waiting.retain(|(_, other)| !Arc::ptr_eq(other, work));
                ticket.set(Claimed);
                Claim::Mine
            }
            Claimed => Claim::Mine,
            Running | RunningNormal | RunningDurable | RunningClaimed => {
                ticket.set(RunningClaimed);
                Claim::Soon
            }
            Stopping | Stopped => Claim::Never,
        }
    }

    /// Takes a claim back. The work is queued in any case, as nobody knows what was asked meanwhile. True: wake a worker.
    pub fn release(&self, work: &Arc<W>) -> bool {
        let mut inner = self.inner.lock();
        let ticket = (self.ticket)(work);
        match ticket.get() {
            Claimed => {
                inner.enqueue(work, ticket, Urgency::Durable);
                true
            }
            RunningClaimed => {
                ticket.set(RunningDurable);
                false
            }
            _ => false,
        }
    }

    /// Queues what has waited long enough: how many, and when to look again.
    pub fn wake_waiting(&self, now: Duration) -> (usize, Option<Duration>) {
        let mut inner = self.inner.lock();
        let mut woken = 0;
        while let Some((at, _)) = inner.waiting.front()
            && *at <= now
        {
            let (_, work) = inner.waiting.pop_front().expect("just seen");
            let ticket = (self.ticket)(&work);
            if ticket.get() == Waiting {
                inner.enqueue(&work, ticket, Urgency::Durable);
                woken += 1;
            }
        }
        (woken, inner.waiting.front().map(|(at, _)| *at))
    }

    /// A run is under way that began before this call, or somebody else has it. Whatever a run that begins later does, it sees
    /// what the caller did before.
    pub fn is_running(&self, work: &Arc<W>) -> bool {
        let _order = self.inner.lock();
        (self.ticket)(work).is_running()
    }

    /// No run begins after this; one may still be under way: see [`Ticket::is_stopped`].
    pub fn stop(&self, work: &Arc<W>) {
        let mut inner = self.inner.lock();
        let ticket = (self.ticket)(work);
        ticket.set(if ticket.is_running() { Stopping } else { Stopped });
        inner.waiting.retain(|(_, other)| !Arc::ptr_eq(other, work));
    }

    /// Forgets everything that waits: for the end, as queued work may hold the queue.
    pub fn clear(&self) {
        let mut inner = self.inner.lock();
        let waiting = std::mem::take(&mut inner.waiting);
        let queued = (std::mem::take(&mut inner.durable), std::mem::take(&mut inner.normal));
        drop(inner);
        drop((waiting, queued));
    }

    pub fn is_empty(&self) -> bool {
        let inner = self.inner.lock();
        inner.durable.is_empty() && inner.normal.is_empty()
    }
}

impl<W> Inner<W> {
    fn enqueue(&mut self, work: &Arc<W>, ticket: &Ticket, urgency: Urgency) {
        let (queue, stage) = match urgency {
            Urgency::Durable => (&mut self.durable, QueuedDurable),
            Urgency::Normal => (&mut self.normal, QueuedNormal),
        };
        ticket.set(stage);
        queue.push_back(Arc::clone(work));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Job(u32, Ticket);

    fn queue() -> WorkQueue<Job> {
        WorkQueue::new(|job: &Job| &job.1)
    }

    fn job(n: u32) -> Arc<Job> {
        Arc::new(Job(n, Ticket::default()))
    }

    fn popped(queue: &WorkQueue<Job>) -> Vec<u32> {
        std::iter::from_fn(|| queue.pop()).map(|j| j.0).collect()
    }

    #[test]
    fn urgencies_take_turns_so_nothing_starves() {
        let queue = queue();
        for n in 0..3 {
            assert!(queue.push(&job(n), Urgency::Normal));
            assert!(queue.push(&job(10 + n), Urgency::Durable));
        }
        assert!(queue.push(&job(13), Urgency::Durable));
        assert_eq!(popped(&queue), [10, 0, 11, 1, 12, 2, 13]);
    }

    #[test]
    fn work_is_queued_once_and_an_upgrade_moves_it() {
        let queue = queue();
        let (a, b) = (job(1), job(2));
        assert!(queue.push(&a, Urgency::Normal));
        assert!(!queue.push(&a, Urgency::Normal));
        assert!(queue.push(&b, Urgency::Normal));
        assert!(queue.push(&b, Urgency::Durable));
        assert_eq!(popped(&queue), [2, 1]);
    }

    #[test]
    fn a_change_during_a_run_leads_to_another_run() {
        let queue = queue();
        let a = job(1);
        queue.push(&a, Urgency::Normal);
        let running = queue.pop().unwrap();
        assert!(!queue.push(&a, Urgency::Durable), "not on two threads");
        assert!(queue.pop().is_none());
        assert!(queue.finish(&running, Outcome::Done));
        let running = queue.pop().unwrap();
        assert!(!queue.finish(&running, Outcome::Done));
        assert!(queue.pop().is_none());
    }

    #[test]
    fn failed_work_waits_for_its_time_whoever_pushes() {
        let queue = queue();
        let (a, b) = (job(1), job(2));
        for (job, ms) in [(&a, 300), (&b, 100)] {
            queue.push(job, Urgency::Normal);
            queue.finish(&queue.pop().unwrap(), Outcome::Retry(Duration::from_millis(ms)));
        }
        assert!(!queue.push(&a, Urgency::Durable));
        assert_eq!(queue.wake_waiting(Duration::from_millis(99)), (0, Some(Duration::from_millis(100))));
        assert_eq!(queue.wake_waiting(Duration::from_millis(100)), (1, Some(Duration::from_millis(300))));
        assert_eq!(popped(&queue), [2]);
        assert_eq!(queue.wake_waiting(Duration::from_secs(1)), (1, None));
        assert_eq!(popped(&queue), [1]);
    }

    #[test]
    fn claimed_work_does_not_run_until_it_is_released() {
        let queue = queue();
        let (a, b) = (job(1), job(2));
        queue.push(&a, Urgency::Normal);
        assert_eq!(queue.claim(&a), Claim::Mine);
        assert!(!queue.push(&a, Urgency::Durable) && queue.pop().is_none());
        assert!(queue.release(&a));
        assert_eq!(popped(&queue), [1], "queued again, once");

        queue.push(&b, Urgency::Normal);
        let run = queue.pop().unwrap();
        assert_eq!(queue.claim(&b), Claim::Soon);
        queue.push(&b, Urgency::Durable);
        assert!(!queue.finish(&run, Outcome::Retry(Duration::ZERO)) && b.1.is_claimed());
        assert_eq!(queue.claim(&b), Claim::Mine);
        assert!(queue.release(&b));

        let run = queue.pop().unwrap();
        assert_eq!(queue.claim(&b), Claim::Soon);
        assert!(!queue.release(&b), "the claim is withdrawn before the run ends");
        assert!(queue.finish(&run, Outcome::Done));
        queue.stop(&b);
        assert_eq!(queue.claim(&b), Claim::Never);
    }

    #[test]
    fn stopped_work_never_runs_again() {
        let queue = queue();
        let (queued, running, waiting) = (job(1), job(2), job(3));
        queue.push(&waiting, Urgency::Normal);
        queue.finish(&queue.pop().unwrap(), Outcome::Retry(Duration::ZERO));
        queue.push(&running, Urgency::Normal);
        let run = queue.pop().unwrap();
        queue.push(&queued, Urgency::Normal);
        for job in [&queued, &running, &waiting] {
            queue.stop(job);
        }
        assert!(!running.1.is_stopped(), "its run is still under way");
        queue.finish(&run, Outcome::More);
        assert!([&queued, &running, &waiting].iter().all(|j| j.1.is_stopped()));
        queue.push(&queued, Urgency::Durable);
        queue.wake_waiting(Duration::from_secs(1));
        assert!(queue.pop().is_none());
    }
}
