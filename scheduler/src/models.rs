//! Every order in which threads can take the steps of [`crate::park`] and [`crate::word`], tried by loom.
//!
//! A lost wake shows as a deadlock, as nothing polls. The two old orders of steps are here as well and must fail: so the
//! models are seen to be able to.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use loom::sync::atomic::AtomicUsize;
use loom::thread;

use crate::park::{Bay, Look, Wake};
use crate::word::{Cancelled, Ended, Woken, Word};

type Queue = Bay<VecDeque<u32>>;

fn push(queue: &Queue, what: u32) {
    queue.change(|queue| {
        queue.push_back(what);
        ((), Wake::One)
    });
}

fn look(queue: &mut VecDeque<u32>) -> Look<u32> {
    queue.pop_front().map_or(Look::Nothing, |what| Look::Found(what))
}

/// Threads are preempted at most this often in one execution: enough for every bug of this kind on record, and seconds
/// instead of days with three threads.
fn model(preemptions: usize, run: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(run);
}

fn fails(run: impl Fn() + Sync + Send + 'static) -> bool {
    catch_unwind(AssertUnwindSafe(|| loom::model(run))).is_err()
}

#[test]
fn a_change_made_while_the_last_sleeper_parks_is_seen() {
    loom::model(|| {
        let queue = Arc::new(Queue::new(VecDeque::new()));
        let pusher = thread::spawn({
            let queue = queue.clone();
            move || push(&queue, 1)
        });
        assert_eq!(queue.wait(look), 1);
        pusher.join().expect("it pushed");
        assert_eq!(queue.sleepers(), 0);
    });
}

#[test]
fn the_old_order_of_steps_loses_a_change() {
    assert!(fails(|| {
        let queue = Arc::new(Queue::new(VecDeque::new()));
        let pusher = thread::spawn({
            let queue = queue.clone();
            move || push(&queue, 1)
        });
        assert_eq!(queue.wait_in_old_order(None, || (), look), 1);
        pusher.join().expect("it pushed");
    }));
}

#[test]
fn two_changes_wake_two_sleepers() {
    model(3, || {
        let queue = Arc::new(Queue::new(VecDeque::new()));
        let sleepers = [(); 2].map(|()| {
            let queue = queue.clone();
            thread::spawn(move || queue.wait(look))
        });
        push(&queue, 1);
        push(&queue, 2);
        let mut found = sleepers.map(|sleeper| sleeper.join().expect("it was called"));
        found.sort_unstable();
        assert_eq!(found, [1, 2]);
    });
}

#[test]
fn a_thread_sent_home_takes_no_call_with_it() {
    model(3, || {
        // The value: how many are to go home, and the queue.
        let bay = Arc::new(Bay::new((0u32, VecDeque::new())));
        let look = |state: &mut (u32, VecDeque<u32>)| {
            if state.0 > 0 {
                state.0 -= 1;
                return Look::Found(None);
            }
            state.1.pop_front().map_or(Look::Nothing, |what| Look::Found(Some(what)))
        };
        let threads = [(); 2].map(|()| {
            let bay = bay.clone();
            thread::spawn(move || bay.wait(look))
        });
        bay.change(|state| {
            state.0 = 1;
            ((), Wake::Everybody)
        });
        bay.change(|state| {
            state.1.push_back(7);
            ((), Wake::One)
        });
        let mut found = threads.map(|thread| thread.join().expect("it was called"));
        found.sort_unstable();
        assert_eq!(found, [None, Some(7)]);
    });
}

#[test]
fn an_unpark_by_a_stranger_does_no_harm() {
    loom::model(|| {
        let queue = Arc::new(Queue::new(VecDeque::new()));
        let sleeper = thread::spawn({
            let queue = queue.clone();
            move || queue.wait(look)
        });
        sleeper.thread().unpark();
        push(&queue, 1);
        assert_eq!(sleeper.join().expect("it was called"), 1);
    });
}

/// A waker writes, then wakes. The runner reads in each run, and runs again if the word says so.
fn wake_during_run(end: impl Fn(&Word) -> Ended + Copy + Sync + Send + 'static) {
    let (word, note) = (Arc::new(Word::new()), Arc::new(AtomicUsize::new(0)));
    assert_eq!(word.wake(), Woken::Queue);
    let waker = thread::spawn({
        let (word, note) = (word.clone(), note.clone());
        move || {
            note.store(1, Relaxed);
            word.wake()
        }
    });
    let run = || {
        let mut seen;
        loop {
            assert!(word.begin());
            seen = note.load(Relaxed);
            if end(&word) != Ended::Queue {
                return seen;
            }
        }
    };
    let mut seen = run();
    if waker.join().expect("it woke") == Woken::Queue {
        seen = run();
    }
    assert_eq!(seen, 1, "the last run came before the wake");
}

#[test]
fn a_wake_during_a_run_is_followed_by_a_run() {
    loom::model(|| wake_during_run(|word| word.end(false)));
}

#[test]
fn clearing_the_flag_after_the_work_loses_a_wake() {
    assert!(fails(|| wake_during_run(|word| word.end_clearing_late())));
}

#[test]
fn of_two_wakers_one_queues() {
    loom::model(|| {
        let word = Arc::new(Word::new());
        let other = thread::spawn({
            let word = word.clone();
            move || word.wake()
        });
        let mine = word.wake();
        let theirs = other.join().expect("it woke");
        assert!([mine, theirs].contains(&Woken::Queue) && [mine, theirs].contains(&Woken::Already));
    });
}

#[test]
fn cancel_returns_only_when_no_run_is_left() {
    model(4, || {
        let (word, endings) = (Arc::new(Word::new()), Arc::new(Bay::new(())));
        let (inside, held) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(1)));
        assert_eq!(word.wake(), Woken::Queue);
        let runner = thread::spawn({
            let (word, endings, inside, held) = (word.clone(), endings.clone(), inside.clone(), held.clone());
            move || {
                while word.begin() {
                    inside.store(1, Relaxed);
                    inside.store(0, Relaxed);
                    match word.end(false) {
                        Ended::Idle => return,
                        Ended::Queue => {}
                        Ended::Gone => {
                            assert_eq!(held.fetch_sub(1, SeqCst), 1, "dropped once");
                            if word.bury() {
                                endings.change(|()| ((), Wake::Everybody));
                            }
                            return;
                        }
                    }
                }
            }
        });
        let waker = thread::spawn({
            let word = word.clone();
            move || word.wake()
        });
        match word.cancel() {
            Cancelled::First => assert_eq!(held.fetch_sub(1, SeqCst), 1, "dropped once"),
            Cancelled::WhileRunning => endings.wait(|()| match word.is_running() {
                true => Look::Nothing,
                false => Look::Found(()),
            }),
            Cancelled::Already => panic!("nobody else cancels"),
        }
        assert_eq!((inside.load(Relaxed), held.load(Relaxed)), (0, 0));
        waker.join().expect("it woke");
        runner.join().expect("it ran");
        assert!(!word.begin(), "it never runs again");
    });
}

/// Word and bay together, as in a pool: if any wake were lost, the worker would sleep forever.
#[test]
fn a_task_woken_while_the_last_worker_parks_still_runs() {
    model(3, || {
        let (word, note) = (Arc::new(Word::new()), Arc::new(AtomicUsize::new(0)));
        let queue = Arc::new(Queue::new(VecDeque::new()));
        let wakers = [(); 2].map(|()| {
            let (word, note, queue) = (word.clone(), note.clone(), queue.clone());
            thread::spawn(move || {
                note.fetch_add(1, Relaxed);
                if word.wake() == Woken::Queue {
                    push(&queue, 1);
                }
            })
        });
        let mut seen = 0;
        while seen < 2 {
            queue.wait(look);
            assert!(word.begin());
            seen = note.load(Relaxed);
            if word.end(false) == Ended::Queue {
                push(&queue, 1);
            }
        }
        for waker in wakers {
            waker.join().expect("it woke");
        }
    });
}
