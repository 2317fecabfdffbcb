//! The share of the connection table that clients may hold who have not said who they are.
//!
//! They are let in a few at a time; the rest waits in the listen backlog, where a client costs nothing. So a thousand
//! that connect and say nothing cannot push out those with work to do, and a thousand that log in all get their turn.

use limits::Account;

/// Even a small table lets this many in at a time.
const SHARE_MIN: u32 = 16;

/// 1. [`Strangers::enter`] lets in no more than the share allows at that moment.
/// 2. Whoever was turned away is told when that may have changed, as of any [`Account`].
pub struct Strangers(Account);

impl Strangers {
    pub fn new(connections_max: u32) -> Strangers {
        Strangers(Account::new(share_of(connections_max)))
    }

    /// False: there are enough of them, and the next [`Strangers::leave`] or [`Strangers::resize`] says so.
    pub fn enter(&self) -> bool {
        self.0.take(1)
    }

    /// One who is in already has become a stranger again.
    pub fn stay(&self) {
        self.0.take_beyond();
    }

    /// True: somebody waits.
    #[must_use]
    pub fn leave(&self) -> bool {
        self.0.give(1)
    }

    /// True: somebody waits.
    #[must_use]
    pub fn resize(&self, connections_max: u32) -> bool {
        self.0.resize(|_| share_of(connections_max)).1
    }

    pub fn count(&self) -> u32 {
        self.0.balance().out
    }

    pub fn share(&self) -> u32 {
        self.0.balance().capacity
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
