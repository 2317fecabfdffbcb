use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::mpsc::channel;
use std::sync::{Arc, Barrier};
use std::time::Duration;

use env::Clock;
use env::sim::SimClock;

use super::{count, counts, does};
use crate::{Next, PoolConfig, PoolError, PoolKind, PoolKind::*, Pools, Stop, THREADS_MAX, current_task};

const CONFIG: PoolConfig = PoolConfig { readers: 2, writers: 2, background: 1, compaction: 1, cpu: 1 };

fn pools() -> Arc<Pools> {
    Pools::start(&env::os::env(), &CONFIG)
}

/// Goal: no wake is lost, with no poll to hide it. Method: a ball goes to and fro between tasks of two pools; one lost wake
/// and it never comes back.
#[test]
fn a_ball_thrown_between_tasks_always_comes_back() {
    let pools = pools();
    let (done, finished) = channel();
    let ball = Arc::new(AtomicUsize::new(0));
    let partner = Arc::new(std::sync::OnceLock::new());
    let (left_ball, left_partner) = (ball.clone(), partner.clone());
    let left = pools.spawn(
        Reader,
        does("left", move |_| {
            if left_ball.load(SeqCst) == 20_000 {
                done.send(()).expect("the test waits");
                return Next::Done;
            }
            left_ball.fetch_add(1, SeqCst);
            let partner: &crate::TaskHandle = left_partner.get().expect("set before the first wake");
            partner.wake();
            Next::Idle
        }),
    );
    let back = left.clone();
    let right = pools.spawn(
        Writer,
        does("right", move |_| {
            back.wake();
            Next::Idle
        }),
    );
    partner.set(right).expect("set once");
    left.wake();
    finished.recv().expect("the ball came back");
    assert_eq!(count(&ball), 20_000);
}

#[test]
fn two_finishers_wake_two_different_sleepers() {
    let pools = Pools::start(&env::os::env(), &PoolConfig { readers: 10, ..CONFIG });
    for _ in 0..200 {
        // Both tasks must be on a thread at once for either to end.
        let (meet, (done, finished)) = (Arc::new(Barrier::new(2)), channel());
        for _ in 0..2 {
            let (meet, done) = (meet.clone(), done.clone());
            pools.execute(Reader, "meets", move || {
                meet.wait();
                done.send(()).expect("the test waits");
            });
        }
        (0..2).for_each(|_| finished.recv().expect("they met"));
    }
}

#[test]
fn a_task_never_runs_on_two_threads_and_sees_what_its_wakers_did() {
    let pools = Pools::start(&env::os::env(), &PoolConfig { writers: 4, ..CONFIG });
    let (asked, done, inside) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)), AtomicBool::new(false));
    let (from, to) = (asked.clone(), done.clone());
    let (tell, all_seen) = channel();
    let task = pools.spawn(
        Writer,
        does("sums up", move |_| {
            assert!(!inside.swap(true, SeqCst), "on two threads");
            let now = from.load(SeqCst);
            if to.swap(now, SeqCst) != now && now == 40_000 {
                tell.send(()).expect("the test waits");
            }
            inside.store(false, SeqCst);
            Next::Idle
        }),
    );
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                (0..10_000).for_each(|_| {
                    asked.fetch_add(1, SeqCst);
                    task.wake();
                })
            });
        }
    });
    all_seen.recv().expect("the last wake was not lost");
    assert_eq!(count(&done), 40_000);
}

#[test]
fn cancel_returns_when_the_run_is_over_and_the_task_dropped() {
    let pools = pools();
    for _ in 0..500 {
        let (started, running) = channel();
        let (inside, runs) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let (flag, counter) = (inside.clone(), runs.clone());
        let task = does("spins", move |_| {
            flag.store(true, SeqCst);
            counter.fetch_add(1, SeqCst);
            let _ = started.send(());
            flag.store(false, SeqCst);
            Next::Again
        });
        let weak = Arc::downgrade(&task);
        let task = pools.spawn(Writer, task);
        task.wake();
        running.recv().expect("it runs");
        task.cancel();
        assert!(!inside.load(SeqCst) && weak.upgrade().is_none());
        let runs_then = count(&runs);
        task.wake();
        assert_eq!(count(&runs), runs_then);
    }
}

#[test]
fn a_deadline_wakes_its_task_though_nothing_else_happens() {
    let pools = pools();
    let clock = env::os::env().clock;
    let (done, finished) = channel();
    let start = clock.monotonic();
    let task = pools.spawn(
        Cpu,
        does("tells", move |_| {
            done.send(()).expect("the test waits");
            Next::Done
        }),
    );
    task.wake_after(Duration::from_secs(3600));
    task.wake_after(Duration::from_millis(20));
    finished.recv().expect("it came");
    assert!(clock.monotonic() - start >= Duration::from_millis(20));
}

/// Goal: threads with nothing to do sleep. Method: keep one pool busy and count how often others woke.
#[test]
fn a_pool_without_work_never_wakes() {
    let pools = pools();
    let (done, finished) = channel();
    for _ in 0..1_000 {
        let done = done.clone();
        pools.execute(Writer, "busy", move || done.send(()).expect("the test waits"));
        finished.recv().expect("it ran");
    }
    let stats = pools.stats();
    let wakeups = |kind: PoolKind| stats.pools.iter().find(|pool| pool.pool == kind).expect("all are there").wakeups;
    assert_eq!((wakeups(Reader), wakeups(Background), wakeups(Cpu), stats.timer_wakeups), (0, 0, 0, 0));
    assert!(wakeups(Writer) <= 2_000);
}

#[test]
fn a_pool_grows_and_shrinks_while_it_works_but_never_to_nothing() {
    let pools = pools();
    let (done, finished) = channel();
    for round in 0..60 {
        let threads = [1, 8, 3][round % 3];
        for _ in 0..20 {
            let done = done.clone();
            pools.execute(Reader, "works", move || done.send(()).expect("the test waits"));
        }
        pools.resize(Reader, threads).expect("a fair size");
    }
    (0..1_200).for_each(|_| finished.recv().expect("each ran"));
    for refused in [0, THREADS_MAX + 1] {
        assert!(
            matches!(pools.resize(Reader, refused), Err(PoolError::Size { pool: Reader, threads }) if threads == refused)
        );
    }
    assert_eq!(
        pools.resize(Writer, 0).expect_err("refused").to_string(),
        "the writer pool cannot have 0 threads: give it 1 to 256"
    );
    assert!(PoolConfig { cpu: 0, ..CONFIG }.check().is_err() && PoolConfig::default().check().is_ok());
    pools.shutdown(Stop::Drain);
    assert!(pools.stats().pools.iter().all(|pool| pool.threads == 0));
}

#[test]
fn draining_runs_what_tasks_of_other_pools_wake() {
    for _ in 0..50 {
        let pools = pools();
        let runs = Arc::new(AtomicUsize::new(0));
        let last = pools.spawn(Background, counts(&runs, Next::Idle));
        let (inner, seen) = (
            pools.spawn(
                Writer,
                does("middle", move |_| {
                    last.wake();
                    Next::Idle
                }),
            ),
            runs.clone(),
        );
        pools.execute(Reader, "first", move || {
            seen.fetch_add(10, SeqCst);
            inner.wake();
        });
        pools.shutdown(Stop::Drain);
        assert_eq!(count(&runs), 11);
        pools.shutdown(Stop::Drain);
    }
}

#[test]
fn a_task_may_drop_the_last_hold_on_its_pools() {
    let pools = pools();
    let (go, wait) = channel::<()>();
    let (done, finished) = channel();
    let held = pools.clone();
    pools.execute(Cpu, "last", move || {
        wait.recv().expect("the test tells");
        drop(held);
        done.send(()).expect("the test waits");
    });
    drop(pools);
    go.send(()).expect("the task waits");
    finished.recv().expect("no deadlock");
}

#[test]
fn deadlines_follow_the_clock_they_were_given() {
    let clock = SimClock::new();
    let pools = Pools::start_with(Arc::new(clock.clone()), &CONFIG);
    let (done, finished) = channel();
    let task = pools.spawn(
        Cpu,
        does("tells", move |cx| {
            done.send(cx.now()).expect("the test waits");
            Next::Idle
        }),
    );
    task.wake_after(Duration::from_secs(1_000));
    clock.advance(Duration::from_secs(1_001));
    pools.clock_moved();
    assert_eq!(finished.recv().expect("it ran"), clock.monotonic());
}

/// Goal: a panic in a task ends the process and the task's name is told. Method: this test, run again as a child.
#[test]
fn a_panic_in_a_task_aborts_and_names_the_task() {
    const CHILD: &str = "SCHEDULER_TEST_PANICS";
    if std::env::var_os(CHILD).is_some() {
        let pools = pools();
        let (_keep, never) = channel::<()>();
        pools.execute(Writer, "burns the toast", move || {
            assert_eq!(current_task(), Some("burns the toast"));
            panic!("smoke");
        });
        let _ = never.recv();
        std::process::exit(0);
    }
    let child = Command::new(std::env::current_exe().expect("a test has a path"))
        .args(["--exact", "--nocapture", "tests::threaded::a_panic_in_a_task_aborts_and_names_the_task"])
        .env(CHILD, "1")
        .output()
        .expect("the test can be started again");
    let told = String::from_utf8_lossy(&child.stderr);
    assert!(told.contains("task burns the toast panicked") && told.contains("smoke"), "{told}");
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&child.status), Some(6), "{:?} {told}", child.status);
}

/// Goal: a pool that is told so lets others go first from its next task on, and no other pool does. Method: what the system says of
/// the threads that run tasks.
#[test]
#[cfg(target_os = "linux")]
fn a_pool_that_gives_way_does_so_with_its_next_task() {
    let pools = Pools::start(&env::os::env(), &CONFIG);
    let niceness = |kind| {
        let (tell, told) = std::sync::mpsc::channel();
        pools.execute(kind, "look", move || {
            let stat = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
            let nice = stat.rsplit_once(") ").unwrap().1.split(' ').nth(16).unwrap();
            tell.send(nice.parse::<i32>().unwrap()).unwrap();
        });
        told.recv().unwrap()
    };
    let usual = niceness(PoolKind::Writer);
    pools.give_way(PoolKind::Writer);
    assert_eq!(niceness(PoolKind::Writer), usual.max(10));
    assert_eq!((niceness(PoolKind::Reader), niceness(PoolKind::Compaction)), (usual, usual.max(10)));
    pools.shutdown(Stop::Drain);
}
