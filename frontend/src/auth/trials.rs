//! Where passwords are tried out that were not seen before: away from the workers, one at a time.
//!
//! Each costs thousands of rounds, some milliseconds. On a worker all its clients would wait for them; and several at a time
//! would only take the threads from those whose work is short. So a crowd that guesses waits for itself.

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::Mutex;
use scheduler::{Context, Next, PoolKind, Pools, Task, TaskHandle};

type Trial = Box<dyn FnOnce() + Send>;

/// As many wait as there are connections, at most: none has two logins under way.
pub(crate) struct Trials {
    queue: Arc<Queue>,
    task: TaskHandle,
}

#[derive(Default)]
struct Queue(Mutex<VecDeque<Trial>>);

impl Trials {
    pub fn new(pools: &Pools) -> Trials {
        let queue = Arc::new(Queue::default());
        Trials { task: pools.spawn(PoolKind::Cpu, Arc::clone(&queue) as _), queue }
    }

    /// Runs `trial` when those before it are done.
    pub fn put(&self, trial: impl FnOnce() + Send + 'static) {
        self.queue.0.lock().push_back(Box::new(trial));
        self.task.wake();
    }
}

impl Drop for Trials {
    fn drop(&mut self) {
        self.task.cancel();
    }
}

impl Task for Queue {
    fn name(&self) -> &'static str {
        "logins"
    }

    fn run(&self, _: &Context<'_>) -> Next {
        let Some(trial) = self.0.lock().pop_front() else { return Next::Idle };
        trial();
        Next::Again
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use env::sim::SimClock;
    use scheduler::{Order, Stepper};

    #[test]
    fn passwords_are_tried_one_at_a_time_and_others_get_their_turn_between() {
        let stepper = Stepper::new(&SimClock::new(), Order::InTurn);
        let trials = Trials::new(&stepper.pools());
        let done = Arc::new(Mutex::new(Vec::new()));
        let note = |what| {
            let done = done.clone();
            move || done.lock().push(what)
        };
        trials.put(note("first"));
        trials.put(note("second"));
        trials.put(note("third"));
        stepper.pools().execute(PoolKind::Cpu, "other", note("somebody else's"));
        stepper.run_until_idle();
        assert_eq!(*done.lock(), ["first", "somebody else's", "second", "third"]);
        trials.put(note("later"));
        stepper.run_until_idle();
        assert_eq!(done.lock().last(), Some(&"later"));
    }
}
