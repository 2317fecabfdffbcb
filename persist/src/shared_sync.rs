//! One sync for all who ask while another is under way.
//!
//! Thousands of files come into being side by side, in one directory, and each has to see its name outlive power loss. A sync of
//! the directory takes all names there are, so whoever finds one under way waits for the next, and that one is for all of them.
//!
//! ```text
//!     a: rename ─▶ sync ──────────────┐
//!     b:       rename ─▶ waits        └▶ done
//!     c:           rename ─▶ waits       b: sync ─────────▶ done: b and c
//! ```

use std::io;
use std::sync::{Arc, OnceLock};

use scheduler::park::{Bay, Look, Wake};

/// 1. One sync at a time.
/// 2. Whoever asks is answered by a sync that began after that, and by the first such: if it fails it has failed for all of its
///    round, as another may find nothing left to do and say that all is well.
pub(crate) struct SharedSync {
    rounds: Bay<Rounds>,
}

#[derive(Default)]
struct Rounds {
    /// For all who ask before it begins.
    next: Arc<Round>,
    is_under_way: bool,
}

#[derive(Default)]
struct Round(OnceLock<Result<(), Arc<io::Error>>>);

impl SharedSync {
    pub fn new() -> SharedSync {
        SharedSync { rounds: Bay::new(Rounds::default()) }
    }

    /// Blocks until all that was done before this is durable. `act` is the sync, whoever of those who ask comes to do it.
    pub fn sync(&self, act: impl FnOnce() -> io::Result<()>) -> Result<(), Arc<io::Error>> {
        let mine = self.rounds.read(|rounds| Arc::clone(&rounds.next));
        let leads = self.rounds.wait(|rounds| {
            if mine.0.get().is_some() {
                Look::Found(false)
            } else if rounds.is_under_way {
                Look::Nothing
            } else {
                rounds.is_under_way = true;
                rounds.next = Arc::default();
                Look::Found(true)
            }
        });
        if leads {
            let outcome = act().map_err(Arc::new);
            self.rounds.change(|rounds| {
                rounds.is_under_way = false;
                let is_first = mine.0.set(outcome).is_ok();
                assert!(is_first, "a round has one sync");
                ((), Wake::Everybody)
            });
        }
        mine.0.get().expect("the round is over").clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
    use std::sync::mpsc;
    use std::thread;

    /// Goal: who comes while a sync is under way is not answered by it, and shares the next one, its failure too. Method: the first
    /// sync is held up until three more have asked; the second one fails.
    #[test]
    fn those_who_come_during_a_sync_share_the_next_one() {
        let shared = SharedSync::new();
        let syncs = AtomicUsize::new(0);
        let fails = &|| {
            syncs.fetch_add(1, SeqCst);
            Err(io::ErrorKind::Other.into())
        };
        let (begun, has_begun) = mpsc::channel();
        let (end, may_end) = mpsc::channel();
        thread::scope(|scope| {
            let first = scope.spawn(|| {
                shared.sync(move || {
                    begun.send(()).unwrap();
                    may_end.recv().unwrap();
                    Ok(())
                })
            });
            has_begun.recv().unwrap();
            let others: Vec<_> = (0..3).map(|_| scope.spawn(|| shared.sync(fails))).collect();
            while shared.rounds.read(|rounds| Arc::strong_count(&rounds.next)) < 4 {
                thread::yield_now();
            }
            end.send(()).unwrap();
            assert!(first.join().unwrap().is_ok());
            assert!(others.into_iter().all(|other| other.join().unwrap().is_err()));
        });
        assert_eq!(syncs.load(SeqCst), 1);
        assert!(shared.sync(|| Ok(())).is_ok(), "what comes after is another round");
    }
}
