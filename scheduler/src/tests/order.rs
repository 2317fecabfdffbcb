use std::time::Duration;

use proptest::prelude::*;

use crate::ready::{Class, PASSED_OVER_MAX, Ready};

const CLASSES: [Class; 3] = [Class::Urgent, Class::Normal, Class::Lazy];

#[test]
fn within_a_class_due_time_decides_and_then_arrival() {
    let mut ready = Ready::new();
    for (due, what) in [(5, "c"), (3, "a"), (5, "d"), (4, "b")] {
        ready.push(Class::Normal, Duration::from_micros(due), what);
    }
    let order: String = std::iter::from_fn(|| ready.pop()).map(|(_, what)| what).collect();
    assert_eq!(order, "abcd");
}

/// Goal: nothing starves. Method: two classes never run dry; count how long a task of the third waits.
#[test]
fn endless_urgent_work_does_not_starve_the_rest() {
    let mut ready = Ready::new();
    for class in CLASSES {
        ready.push(class, Duration::ZERO, class);
    }
    let mut waited = [0u32; 3];
    for _ in 0..10_000 {
        let (_, class) = ready.pop().expect("never empty");
        for other in CLASSES {
            waited[other as usize] += 1;
        }
        waited[class as usize] = 0;
        assert!(waited.iter().all(|waited| *waited <= PASSED_OVER_MAX + 2), "{waited:?}");
        ready.push(class, Duration::ZERO, class);
    }
}

proptest! {
    /// Goal: what goes in comes out once, in order within its class. Method: random pushes and pops.
    #[test]
    fn nothing_is_lost_doubled_or_overtaken(steps in prop::collection::vec((0usize..4, 0u64..8), 1..200)) {
        let mut ready = Ready::new();
        let mut model: Vec<(Class, Duration, usize)> = Vec::new();
        for (id, (step, due)) in steps.into_iter().enumerate() {
            if let Some(class) = CLASSES.get(step) {
                ready.push(*class, Duration::from_micros(due), id);
                model.push((*class, Duration::from_micros(due), id));
            } else if let Some((due, id)) = ready.pop() {
                let at = model.iter().position(|entry| entry.2 == id).expect("it went in and did not come out");
                let (class, ..) = model.remove(at);
                let overtaken = model.iter().find(|other| other.0 == class && (other.1, other.2) < (due, id));
                prop_assert!(overtaken.is_none());
            } else {
                prop_assert!(model.is_empty());
            }
            prop_assert_eq!(ready.len(), model.len());
            prop_assert_eq!(ready.is_empty(), model.is_empty());
        }
        while !model.is_empty() {
            let (_, id) = ready.pop_nth(model.len() / 2).expect("as many as in the model");
            model.retain(|entry| entry.2 != id);
            prop_assert_eq!(ready.len(), model.len());
        }
    }
}
