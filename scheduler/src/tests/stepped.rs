use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use env::Clock;
use env::sim::SimClock;
use metrics::{Registry, write_openmetrics};

use super::{count, counts, does, does_as};
use crate::{Class, Next, Order, PoolKind::*, Stepper, Stop};

const SECOND: Duration = Duration::from_secs(1);

fn stepper() -> (Stepper, SimClock) {
    let clock = SimClock::new();
    (Stepper::new(&clock, Order::InTurn), clock)
}

#[test]
fn a_task_runs_when_woken_and_not_before() {
    let (stepper, _) = stepper();
    let runs = Arc::default();
    let task = stepper.pools().spawn(Writer, counts(&runs, Next::Idle));
    assert_eq!((stepper.run_until_idle(), count(&runs)), (0, 0));
    task.wake();
    task.wake();
    assert_eq!((stepper.run_until_idle(), count(&runs)), (1, 1));
}

#[test]
fn a_task_woken_while_running_runs_once_more() {
    let (stepper, _) = stepper();
    let runs = Arc::new(AtomicUsize::new(0));
    let seen = runs.clone();
    let task = stepper.pools().spawn(Writer, {
        does("wakes itself", move |cx| {
            if seen.fetch_add(1, SeqCst) == 0 {
                cx.task().wake();
                cx.task().wake();
            }
            Next::Idle
        })
    });
    task.wake();
    assert_eq!((stepper.run_until_idle(), count(&runs)), (2, 2));
}

#[test]
fn deadlines_come_in_order_and_on_time() {
    let (stepper, clock) = stepper();
    let log = Arc::new(Mutex::new(Vec::new()));
    for seconds in [3, 1, 2] {
        let (log, start) = (log.clone(), clock.monotonic());
        let task = stepper.pools().spawn(
            Cpu,
            does("logs", move |cx| {
                log.lock().expect("no panics").push((seconds, (cx.now() - start).as_secs()));
                Next::Idle
            }),
        );
        task.wake_after(SECOND * seconds as u32);
    }
    assert_eq!(stepper.advance(SECOND * 2), 2);
    assert_eq!(stepper.advance(SECOND * 2), 1);
    assert_eq!(*log.lock().expect("no panics"), [(1, 1), (2, 2), (3, 3)]);
}

/// Goal: an idle server does nothing. Method: a day passes, with many tasks that were all busy once.
#[test]
fn idle_tasks_cause_no_runs_and_no_deadlines() {
    let (stepper, _) = stepper();
    let runs = Arc::default();
    let tasks: Vec<_> = (0..30_720).map(|_| stepper.pools().spawn(Writer, counts(&runs, Next::Idle))).collect();
    tasks.iter().for_each(|task| task.wake());
    assert_eq!(stepper.run_until_idle(), 30_720);
    assert_eq!(stepper.next_deadline(), None);
    assert_eq!(stepper.advance(SECOND * 86_400), 0);
}

#[test]
fn a_task_that_sleeps_for_a_while_keeps_its_rhythm() {
    let (stepper, _) = stepper();
    let runs = Arc::default();
    let task = stepper.pools().spawn(Background, counts(&runs, Next::After(SECOND)));
    task.wake();
    assert_eq!(stepper.advance(SECOND * 10), 11);
    task.cancel();
    assert_eq!((stepper.advance(SECOND * 10), stepper.next_deadline()), (0, None));
}

#[test]
fn a_run_replaces_the_tasks_own_deadline() {
    let (stepper, _) = stepper();
    let runs = Arc::new(AtomicUsize::new(0));
    let seen = runs.clone();
    let task = stepper.pools().spawn(
        Writer,
        does("backs off once", move |_| match seen.fetch_add(1, SeqCst) {
            0 => Next::After(SECOND * 10),
            _ => Next::Idle,
        }),
    );
    task.wake();
    stepper.run_until_idle();
    assert!(stepper.next_deadline().is_some());
    task.wake();
    stepper.run_until_idle();
    assert_eq!((stepper.next_deadline(), count(&runs)), (None, 2));
}

#[test]
fn a_deadline_asked_for_survives_earlier_runs_and_the_earliest_holds() {
    let (stepper, _) = stepper();
    let runs = Arc::default();
    let task = stepper.pools().spawn(Writer, counts(&runs, Next::Idle));
    task.wake_after(SECOND * 5);
    task.wake_after(SECOND * 9);
    task.wake();
    assert_eq!(stepper.advance(SECOND * 4), 1);
    assert_eq!(stepper.advance(SECOND), 1);
    assert_eq!(stepper.advance(SECOND * 10), 0);
}

#[test]
fn snooze_moves_every_deadline_and_a_snooze_of_nothing_is_a_wake() {
    let (stepper, _) = stepper();
    let runs = Arc::default();
    let task = stepper.pools().spawn(Writer, counts(&runs, Next::Idle));
    task.wake_after(SECOND);
    task.snooze(SECOND * 5);
    assert_eq!(stepper.advance(SECOND * 4), 0);
    assert_eq!(stepper.advance(SECOND), 1);
    task.snooze(Duration::ZERO);
    assert_eq!(stepper.run_until_idle(), 1);
}

#[test]
fn a_cancelled_task_is_dropped_at_once_and_never_runs() {
    let (stepper, _) = stepper();
    let runs = Arc::default();
    let task = counts(&runs, Next::Again);
    let weak = Arc::downgrade(&task);
    let handle = stepper.pools().spawn(Writer, task);
    handle.wake();
    handle.wake_after(SECOND);
    assert!(stepper.step());
    handle.cancel();
    assert!(weak.upgrade().is_none() && handle.is_gone());
    handle.cancel();
    handle.wake();
    handle.wake_after(SECOND);
    stepper.advance(SECOND * 2);
    assert_eq!((count(&runs), stepper.next_deadline()), (1, None));
}

#[test]
fn a_task_may_cancel_itself_and_its_destructor_may_spawn() {
    struct SpawnsWhenDropped(Arc<crate::Pools>, Arc<AtomicUsize>);
    impl Drop for SpawnsWhenDropped {
        fn drop(&mut self) {
            self.0.spawn(Cpu, counts(&self.1, Next::Done)).wake();
        }
    }
    let (stepper, _) = stepper();
    let runs = Arc::new(AtomicUsize::new(0));
    let held = SpawnsWhenDropped(stepper.pools(), runs.clone());
    let task = stepper.pools().spawn(
        Cpu,
        does("cancels itself", move |cx| {
            let _held = &held;
            cx.task().cancel();
            Next::Again
        }),
    );
    task.wake();
    assert_eq!((stepper.run_until_idle(), count(&runs)), (2, 1));
    assert!(task.is_gone());
}

#[test]
fn a_task_that_holds_its_own_handle_is_freed_when_done() {
    let (stepper, _) = stepper();
    let own = Arc::new(Mutex::new(None));
    let inside = own.clone();
    let handle = stepper.pools().spawn(
        Cpu,
        does("holds itself", move |_| {
            assert!(inside.lock().expect("no panics").is_some());
            Next::Done
        }),
    );
    *own.lock().expect("no panics") = Some(handle.clone());
    handle.wake();
    stepper.run_until_idle();
    assert_eq!(Arc::strong_count(&own), 1);
}

#[test]
fn a_pool_serves_urgent_before_normal_before_lazy() {
    let (stepper, _) = stepper();
    let log = Arc::new(Mutex::new(Vec::new()));
    for class in [Class::Lazy, Class::Normal, Class::Urgent] {
        let log = log.clone();
        let logs = does_as(class, "logs", move |_| {
            log.lock().expect("no panics").push(class);
            Next::Done
        });
        stepper.pools().spawn(Reader, logs).wake();
    }
    stepper.run_until_idle();
    assert_eq!(*log.lock().expect("no panics"), [Class::Urgent, Class::Normal, Class::Lazy]);
}

#[test]
fn every_order_comes_up_under_some_seed_and_the_same_under_the_same() {
    let order = |seed| {
        let stepper = Stepper::new(&SimClock::new(), Order::Seeded(seed));
        let log = Arc::new(Mutex::new(String::new()));
        for (kind, letter) in [(Reader, 'a'), (Writer, 'b'), (Writer, 'c')] {
            let log = log.clone();
            stepper.pools().execute(kind, "logs", move || log.lock().expect("no panics").push(letter));
        }
        stepper.run_until_idle();
        std::mem::take(&mut *log.lock().expect("no panics"))
    };
    let seen: std::collections::BTreeSet<_> = (0..100).map(order).collect();
    assert_eq!(seen.len(), 6, "{seen:?}");
    assert_eq!(order(7), order(7));
}

#[test]
fn the_stop_runs_or_drops_what_is_queued_as_asked() {
    for (stop, expected) in [(Stop::Drain, 1), (Stop::Cancel, 0)] {
        let (stepper, _) = stepper();
        let runs: Arc<AtomicUsize> = Arc::default();
        let seen = runs.clone();
        stepper.pools().execute(Writer, "counts", move || {
            seen.fetch_add(1, SeqCst);
        });
        stepper.pools().shutdown(stop);
        assert_eq!((count(&runs), Arc::strong_count(&runs)), (expected, 1));
        let late = runs.clone();
        drop(stepper.pools().execute(Writer, "late", move || drop(late)));
        assert_eq!((stepper.run_until_idle(), Arc::strong_count(&runs)), (0, 1));
    }
}

#[test]
#[should_panic(expected = "out of paper")]
fn a_panic_in_a_stepped_task_reaches_the_test() {
    let (stepper, _) = stepper();
    stepper.pools().execute(Cpu, "prints", || panic!("out of paper"));
    stepper.run_until_idle();
}

#[test]
fn waits_are_measured_from_the_due_time_and_over_runs_counted() {
    let (stepper, clock) = stepper();
    let slow = clock.clone();
    let task = stepper.pools().spawn(
        Writer,
        does("slow", move |cx| {
            assert!(!cx.should_yield());
            slow.advance(SECOND);
            assert!(cx.should_yield());
            Next::Idle
        }),
    );
    task.wake();
    task.wake();
    clock.advance(Duration::from_millis(30));
    stepper.run_until_idle();
    task.wake_after(SECOND);
    clock.advance(SECOND + Duration::from_millis(50));
    stepper.run_until_idle();

    let stats = stepper.pools().stats();
    let slow = stats.task("slow").expect("it was spawned");
    assert_eq!((slow.runs.get(), slow.wakes.get(), slow.overruns.get()), (2, 2, 2));
    assert_eq!(slow.wait.snapshot().sum(), Duration::from_millis(80));
    assert_eq!(slow.run.snapshot().max(), SECOND);

    let (mut registry, mut page) = (Registry::new(), String::new());
    stepper.pools().register(&mut registry);
    registry.assert_every_stat_name_is_unique();
    write_openmetrics(&mut page, registry.families());
    assert!(page.contains("settee_scheduler_task_runs_total{pool=\"writer\",task=\"slow\"} 2\n"), "{page}");
}
