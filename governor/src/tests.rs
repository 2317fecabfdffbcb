use super::*;
use env::sim::SimClock;
use proptest::prelude::*;

const MS: Duration = Duration::from_millis(1);
const BUDGET: Duration = Duration::from_millis(5);
const FLOOR: u64 = 4 << 20;

fn governor(latency_budget: Option<Duration>) -> (SimClock, Governor) {
    let clock = SimClock::new();
    let limits = Limits { latency_budget, floor_bytes_per_s: FLOOR };
    (clock.clone(), Governor::new(Arc::new(clock), limits))
}

/// Bytes that background work gets in `time`, with a foreground sync of `latency(bytes a second lately)` each ms.
fn run(clock: &SimClock, governor: &Governor, time: Duration, latency: impl Fn(u64) -> Duration) -> u64 {
    let (mut done, mut lately) = (0, 0);
    let mut ready_at = clock.monotonic();
    for ms in 0..time.as_millis() {
        if ms % 50 == 0 {
            lately = 0;
        }
        while ready_at <= clock.monotonic() {
            match governor.pause() {
                Some(pause) => ready_at = clock.monotonic() + pause,
                None => {
                    governor.spent(64 << 10);
                    (done, lately) = (done + (64 << 10), lately + (64 << 10));
                    if governor.reading().held == Held::Free {
                        break;
                    }
                }
            }
        }
        governor.foreground(latency(lately * 20));
        clock.advance(MS);
    }
    done
}

#[test]
fn without_a_budget_nobody_waits() {
    let (clock, governor) = governor(None);
    for _ in 0..1000 {
        governor.foreground(Duration::from_secs(1));
        governor.spent(1 << 30);
        clock.advance(MS);
        assert_eq!(governor.pause(), None);
    }
}

#[test]
fn an_idle_foreground_leaves_the_whole_disk_to_the_background() {
    let (clock, governor) = governor(Some(BUDGET));
    governor.spent(1 << 40);
    assert_eq!(governor.pause(), None);
    run(&clock, &governor, Duration::from_secs(1), |_| Duration::from_secs(1));
    governor.spent(1 << 30);
    assert!(governor.pause().is_some());
    clock.advance(IDLE_AFTER + MS);
    assert_eq!((governor.pause(), governor.reading().held), (None, Held::Free));
}

/// A disk on which more than 40 MiB/s of background work makes syncs late: the governor finds that rate.
#[test]
fn the_rate_settles_where_the_budget_is_just_kept() {
    let (clock, governor) = governor(Some(BUDGET));
    let disk = |rate: u64| if rate > 40 << 20 { BUDGET * 4 } else { MS };
    run(&clock, &governor, Duration::from_secs(10), disk);
    let done = run(&clock, &governor, Duration::from_secs(20), disk);
    let rate = (done / 20) >> 20;
    assert!((20..=44).contains(&rate), "{rate} MiB/s");
}

#[test]
fn the_floor_is_kept_whatever_the_foreground_feels() {
    let (clock, governor) = governor(Some(BUDGET));
    run(&clock, &governor, Duration::from_secs(2), |_| Duration::from_secs(1));
    let done = run(&clock, &governor, Duration::from_secs(10), |_| Duration::from_secs(1));
    assert!((FLOOR * 9..=FLOOR * 11).contains(&done), "{done}");
    assert_eq!(governor.reading().held, Held::AtFloor);
}

/// Compaction must win the race against growth, and against the end of the disk.
#[test]
fn growth_and_a_full_disk_raise_the_floor() {
    let (clock, governor) = governor(Some(BUDGET));
    for _ in 0..200 {
        governor.grew(1 << 20);
        clock.advance(MS * 100);
    }
    let floor = governor.reading().floor_bytes_per_s >> 20;
    assert!((28..=32).contains(&floor), "10 MiB/s of growth give {floor} MiB/s");
    assert!(governor.set_disk_low(true));
    assert!(!governor.set_disk_low(true), "told once");
    assert_eq!(governor.reading().floor_bytes_per_s, FLOOR_WHEN_FULL);
    run(&clock, &governor, Duration::from_secs(2), |_| Duration::from_secs(1));
    assert_eq!(governor.reading().held, Held::AtRaisedFloor);
    assert!(governor.set_disk_low(false));
    assert!(governor.reading().floor_bytes_per_s < FLOOR_WHEN_FULL);
}

proptest! {
    /// Whatever happens in whatever order, nobody waits longer than the floor's rate asks for what was spent.
    #[test]
    fn what_is_owed_is_paid_off_at_the_floor_or_faster(
        steps in prop::collection::vec((0u64..2_000_000, 0u64..20_000, 0u64..100_000), 1..100),
    ) {
        let (clock, governor) = governor(Some(BUDGET));
        let mut spent = 0;
        for (bytes, latency_us, passed_us) in steps {
            governor.spent(bytes);
            spent += bytes;
            governor.foreground(Duration::from_micros(latency_us));
            clock.advance(Duration::from_micros(passed_us));
        }
        let until = clock.monotonic() + Duration::from_secs(spent / FLOOR + 1);
        while let Some(pause) = governor.pause() {
            governor.foreground(Duration::from_secs(1));
            clock.advance(pause);
            prop_assert!(clock.monotonic() < until + PAUSE_MAX);
        }
    }
}
