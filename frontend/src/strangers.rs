//! The share of the connection table that clients may hold who have not said who they are.
//!
//! They are let in a few at a time; the rest waits in the listen backlog, where a client costs nothing. So a thousand
//! that connect and say nothing cannot push out those with work to do, and a thousand that log in all get their turn.

use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use crate::sync::{AtomicBool, AtomicU64, fence};

/// Even a small table lets this many in at a time.
const SHARE_MIN: u32 = 16;

/// 1. [`Strangers::enter`] lets in no more than the share allows at that moment.
/// 2. Whoever was turned away is told when that may have changed: see there.
pub struct Strangers {
    /// Share and count in one word, so that both are of the same moment.
    word: AtomicU64,
    /// Somebody was turned away and not told since.
    starved: AtomicBool,
}

impl Strangers {
    pub fn new(connections_max: u32) -> Strangers {
        let share = share_of(connections_max);
        Strangers { word: AtomicU64::new(u64::from(share) << 32), starved: AtomicBool::new(false) }
    }

    /// False: there are enough of them, and the next [`Strangers::leave`] or [`Strangers::resize`] says so. Nobody is
    /// stranded, because both sides write, fence and then read the other's word:
    ///
    /// ```text
    ///     comer:   starved = true   fence   is there room after all?
    ///     leaver:  count -= 1       fence   starved?  yes: tell
    /// ```
    pub fn enter(&self) -> bool {
        if self.try_enter() {
            return true;
        }
        self.starved.store(true, Relaxed);
        fence(SeqCst);
        self.try_enter()
    }

    /// One who is in already has become a stranger again.
    pub fn stay(&self) {
        self.word.fetch_add(1, SeqCst);
    }

    /// True: somebody waits.
    #[must_use]
    pub fn leave(&self) -> bool {
        let before = self.word.fetch_sub(1, SeqCst);
        assert!(before as u32 > 0, "a stranger leaves once");
        self.is_starved()
    }

    /// True: somebody waits.
    #[must_use]
    pub fn resize(&self, connections_max: u32) -> bool {
        let share = u64::from(share_of(connections_max)) << 32;
        let resized = self.word.fetch_update(SeqCst, Relaxed, |word| Some(share | (word & u64::from(u32::MAX))));
        debug_assert!(resized.is_ok(), "the update never declines");
        self.is_starved()
    }

    pub fn count(&self) -> u32 {
        self.word.load(Relaxed) as u32
    }

    pub fn share(&self) -> u32 {
        (self.word.load(Relaxed) >> 32) as u32
    }

    fn try_enter(&self) -> bool {
        let room = |word: u64| ((word as u32) < (word >> 32) as u32).then_some(word + 1);
        self.word.fetch_update(SeqCst, Relaxed, room).is_ok()
    }

    fn is_starved(&self) -> bool {
        fence(SeqCst);
        self.starved.load(Relaxed) && self.starved.swap(false, Relaxed)
    }
}

/// A quarter of the table.
fn share_of(connections_max: u32) -> u32 {
    (connections_max / 4).max(SHARE_MIN)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_quarter_of_the_table_is_for_strangers_and_the_next_one_waits_until_one_leaves() {
        let strangers = Strangers::new(80);
        assert!((0..20).all(|_| strangers.enter()));
        assert!(!strangers.enter());
        assert!(strangers.leave(), "somebody waits");
        assert!(!strangers.leave(), "who was told");
        strangers.stay();
        strangers.stay();
        assert_eq!((strangers.count(), strangers.share()), (20, 20));
        assert!(!strangers.enter());
        assert!(strangers.resize(400));
        assert!(strangers.enter());
        assert_eq!((strangers.count(), strangers.share()), (21, 100));
    }
}

#[cfg(all(test, loom))]
mod models {
    use super::*;
    use loom::sync::Arc;
    use loom::thread;

    /// Goal: the door does not stay shut with room behind it. Method: the last stranger leaves while the next knocks.
    #[test]
    fn whoever_is_turned_away_while_the_last_one_leaves_is_told() {
        loom::model(|| {
            let strangers = Arc::new(Strangers { word: AtomicU64::new(1 << 32 | 1), starved: AtomicBool::new(false) });
            let comer = {
                let strangers = strangers.clone();
                thread::spawn(move || strangers.enter())
            };
            let told = strangers.leave();
            assert!(comer.join().unwrap() || told, "turned away, room inside, and nobody was told");
        });
    }
}
