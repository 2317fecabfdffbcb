//! Which of the tasks that are ready runs next.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Duration;

/// How urgent a task's runs are compared with those of other tasks in its pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Class {
    /// Somebody waits for it.
    Urgent,
    #[default]
    Normal,
    /// Whenever there is room.
    Lazy,
}

const CLASS_COUNT: usize = 3;

/// A class that has something ready is passed over for a more urgent one at most this many times in a row, plus once for
/// each other class in the same position.
pub const PASSED_OVER_MAX: u32 = 16;

/// Ready tasks in the order in which they shall run: by class, and within a class by due time, then by arrival.
///
/// 1. Within a class, nobody overtakes: the due time does not change while a task waits here.
/// 2. Between classes, nobody starves: see [`PASSED_OVER_MAX`].
pub struct Ready<T> {
    classes: [Line<T>; CLASS_COUNT],
    arrivals: u64,
}

struct Line<T> {
    heap: BinaryHeap<Reverse<Waiting<T>>>,
    passed_over: u32,
}

struct Waiting<T> {
    due: Duration,
    arrival: u64,
    what: T,
}

impl<T> Ready<T> {
    pub fn new() -> Ready<T> {
        Ready { classes: std::array::from_fn(|_| Line { heap: BinaryHeap::new(), passed_over: 0 }), arrivals: 0 }
    }

    pub fn push(&mut self, class: Class, due: Duration, what: T) {
        self.arrivals += 1;
        self.classes[class as usize].heap.push(Reverse(Waiting { due, arrival: self.arrivals, what }));
    }

    /// The next to run, and when it was due.
    pub fn pop(&mut self) -> Option<(Duration, T)> {
        let chosen = self.choose()?;
        for line in &mut self.classes[chosen + 1..] {
            line.passed_over += u32::from(!line.heap.is_empty());
        }
        let line = &mut self.classes[chosen];
        line.passed_over = 0;
        line.heap.pop().map(|Reverse(next)| (next.due, next.what))
    }

    /// The `n`-th of all that wait, in no particular order: for a scheduler that tries what no clock would.
    pub fn pop_nth(&mut self, mut n: usize) -> Option<(Duration, T)> {
        for line in &mut self.classes {
            if n < line.heap.len() {
                let mut all = std::mem::take(&mut line.heap).into_sorted_vec();
                let Reverse(next) = all.remove(n);
                line.heap = all.into();
                return Some((next.due, next.what));
            }
            n -= line.heap.len();
        }
        None
    }

    pub fn len(&self) -> usize {
        self.classes.iter().map(|line| line.heap.len()).sum()
    }

    pub fn is_empty(&self) -> bool {
        self.classes.iter().all(|line| line.heap.is_empty())
    }

    fn choose(&self) -> Option<usize> {
        let waiting = || (0..CLASS_COUNT).filter(|class| !self.classes[*class].heap.is_empty());
        let overdue = waiting().filter(|class| self.classes[*class].passed_over >= PASSED_OVER_MAX);
        overdue.max_by_key(|class| self.classes[*class].passed_over).or_else(|| waiting().next())
    }
}

impl<T> Waiting<T> {
    fn key(&self) -> (Duration, u64) {
        (self.due, self.arrival)
    }
}

impl<T> PartialEq for Waiting<T> {
    fn eq(&self, other: &Self) -> bool {
        self.key() == other.key()
    }
}

impl<T> Eq for Waiting<T> {}

impl<T> PartialOrd for Waiting<T> {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl<T> Ord for Waiting<T> {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.key().cmp(&other.key())
    }
}
