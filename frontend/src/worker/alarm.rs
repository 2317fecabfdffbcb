//! The moment at which a worker looks at its deadlines.
//!
//! The timer thread of the scheduler keeps it and says so by letter, so a poll never waits with a timeout. A timeout sets
//! a timer of the system's anew at every poll; here one is set when a deadline is nearer than the one that is set
//! already, which hardly any request brings about.

use std::sync::Arc;
use std::time::Duration;

use scheduler::{Context, Next, PoolKind, Pools, Task, TaskHandle};

use crate::mailbox::{Letter, Mailbox};

/// 1. There is never a deadline before the moment it is set for, or before the letter that it went off is read.
/// 2. It may go off for nothing, as a deadline that moves on does not move it.
pub(super) struct Alarm {
    task: TaskHandle,
    set_for: Option<Duration>,
}

struct Ring(Arc<Mailbox>);

impl Task for Ring {
    fn name(&self) -> &'static str {
        "connection_deadlines"
    }

    fn run(&self, _: &Context<'_>) -> Next {
        self.0.post(Letter::Alarm);
        Next::Idle
    }
}

impl Alarm {
    pub fn new(pools: &Pools, mailbox: Arc<Mailbox>) -> Alarm {
        Alarm { task: pools.spawn(PoolKind::Cpu, Arc::new(Ring(mailbox))), set_for: None }
    }

    /// Goes off no later than at this moment of the monotonic clock.
    pub fn set(&mut self, at: Duration) {
        if self.set_for.is_none_or(|set_for| at < set_for) {
            self.set_for = Some(at);
            self.task.wake_at(at);
        }
    }

    /// It went off.
    pub fn note_ring(&mut self) {
        self.set_for = None;
    }
}

impl Drop for Alarm {
    fn drop(&mut self) {
        self.task.cancel();
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use env::sim::SimClock;
    use mio::{Poll, Waker};
    use scheduler::{Order, Stepper};

    #[test]
    fn it_goes_off_once_at_the_nearest_deadline_and_later_ones_cost_nothing() {
        let clock = SimClock::new();
        let stepper = Stepper::new(&clock, Order::InTurn);
        let poll = Poll::new().unwrap();
        let mailbox = Arc::new(Mailbox::new(Waker::new(poll.registry(), super::super::WAKE).unwrap()));
        let mut alarm = Alarm::new(&stepper.pools(), mailbox.clone());
        let now = stepper.pools().now();
        let after = |s| now + Duration::from_secs(s);
        let letters = || {
            let mut letters = Vec::new();
            mailbox.collect(&mut letters);
            letters.len()
        };

        alarm.set(after(20));
        alarm.set(after(30));
        assert_eq!(stepper.next_deadline(), Some(after(20)));
        alarm.set(after(10));
        stepper.advance(Duration::from_secs(40));
        assert_eq!((letters(), stepper.next_deadline()), (1, None));
        // Until the letter is read the worker will look anyway.
        alarm.set(after(50));
        assert_eq!(stepper.next_deadline(), None);
        alarm.note_ring();
        alarm.set(after(50));
        stepper.advance(Duration::from_secs(10));
        assert_eq!(letters(), 1);
    }
}
