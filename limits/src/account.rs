//! A count in one word with what it may be, so that it is never more than that, not even while it is resized.

use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use types::sync::{AtomicBool, AtomicU32, AtomicU64, fence};

/// Room and use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Balance {
    /// What may be out.
    pub capacity: u32,
    /// What is.
    pub out: u32,
}

impl Balance {
    fn pack(self) -> u64 {
        u64::from(self.capacity) << 32 | u64::from(self.out)
    }

    fn unpack(word: u64) -> Balance {
        Balance { capacity: (word >> 32) as u32, out: word as u32 }
    }

    /// What nobody else may be promised: after a shrink, more can be out than there is room for.
    pub(crate) fn claimed(self) -> u32 {
        self.capacity.max(self.out)
    }
}

/// What can be lent, and is: the descriptors of a class, or places for those of whom there should not be too many.
///
/// 1. [`Account::take`] lends no more than the capacity of the same moment: both are one word.
/// 2. Whoever was refused is told when that may have changed: see [`Account::take`].
/// 3. Giving back more than is out panics.
#[repr(align(64))]
pub struct Account {
    balance: AtomicU64,
    /// Somebody was refused and not told since.
    starved: AtomicBool,
    high_water: AtomicU32,
    refusals: AtomicU64,
}

impl Account {
    pub fn new(capacity: u32) -> Account {
        Account {
            balance: AtomicU64::new(Balance { capacity, out: 0 }.pack()),
            starved: AtomicBool::new(false),
            high_water: AtomicU32::new(0),
            refusals: AtomicU64::new(0),
        }
    }

    /// Takes `n`, or none and remembers that somebody was refused: then the next [`Account::give`] or
    /// [`Account::resize`] says so. Nobody is stranded, because both sides write, fence and then read the other's word:
    ///
    /// ```text
    ///     taker:  starved = true   fence   is there room after all?
    ///     giver:  out -= n         fence   starved?  yes: tell
    /// ```
    ///
    /// A taker that gets its share at the second look leaves the mark: it may be another's. That one is told once too
    /// often instead of never.
    pub fn take(&self, n: u32) -> bool {
        if self.take_quietly(n) {
            return true;
        }
        self.starved.store(true, Relaxed);
        fence(SeqCst);
        let taken = self.take_quietly(n);
        if !taken {
            self.refusals.fetch_add(1, Relaxed);
        }
        taken
    }

    /// Takes `n`, or none and leaves no trace of having asked.
    pub fn take_quietly(&self, n: u32) -> bool {
        let taken = self.balance.fetch_update(SeqCst, Relaxed, |word| {
            let balance = Balance::unpack(word);
            let out = balance.out.checked_add(n).filter(|out| *out <= balance.capacity)?;
            Some(Balance { out, ..balance }.pack())
        });
        if let Ok(before) = taken {
            self.high_water.fetch_max(Balance::unpack(before).out + n, Relaxed);
        }
        taken.is_ok()
    }

    /// Takes one, whatever there is: it is there already, and only now counts.
    pub fn take_beyond(&self) {
        let before = Balance::unpack(self.balance.fetch_add(1, SeqCst));
        self.high_water.fetch_max(before.out + 1, Relaxed);
    }

    /// True: somebody was refused before and is to be told.
    #[must_use]
    pub fn give(&self, n: u32) -> bool {
        let before = Balance::unpack(self.balance.fetch_sub(u64::from(n), SeqCst));
        assert!(before.out >= n, "{n} given back where {} were out", before.out);
        self.is_starved()
    }

    /// Sets the capacity to what `choose` makes of the balance, and returns the old balance. True: as for
    /// [`Account::give`].
    #[must_use]
    pub fn resize(&self, choose: impl Fn(Balance) -> u32) -> (Balance, bool) {
        let before = self.balance.fetch_update(SeqCst, Relaxed, |word| {
            let balance = Balance::unpack(word);
            Some(Balance { capacity: choose(balance), ..balance }.pack())
        });
        let before = before.unwrap_or_else(|word| word);
        (Balance::unpack(before), self.is_starved())
    }

    pub fn balance(&self) -> Balance {
        Balance::unpack(self.balance.load(SeqCst))
    }

    pub fn high_water(&self) -> u32 {
        self.high_water.load(Relaxed)
    }

    pub fn refusals(&self) -> u64 {
        self.refusals.load(Relaxed)
    }

    fn is_starved(&self) -> bool {
        fence(SeqCst);
        self.starved.load(Relaxed) && self.starved.swap(false, Relaxed)
    }
}

#[cfg(all(test, loom))]
mod models {
    use super::*;
    use loom::sync::Arc;
    use loom::thread;

    /// Goal: nobody waits for a permit that is free. Method: two ask for the only one while its holder gives it back;
    /// then whoever got it gives it back too.
    #[test]
    fn whoever_is_refused_while_the_last_permit_comes_back_is_told() {
        loom::model(|| {
            let account = Arc::new(Account::new(1));
            assert!(account.take(1));
            let takers: Vec<_> = (0..2)
                .map(|_| {
                    let account = account.clone();
                    thread::spawn(move || account.take(1))
                })
                .collect();
            let mut told = account.give(1);
            let taken = takers.into_iter().map(|taker| taker.join().unwrap()).filter(|taken| *taken).count();
            assert!(taken <= 1);
            for _ in 0..taken {
                told |= account.give(1);
            }
            assert!(told, "somebody was refused, the permit is free, and nobody was told");
            assert_eq!(account.balance(), Balance { capacity: 1, out: 0 });
        });
    }

    /// The same when room is made by a larger capacity.
    #[test]
    fn whoever_is_refused_while_the_class_grows_is_told() {
        loom::model(|| {
            let account = Arc::new(Account::new(0));
            let taker = {
                let account = account.clone();
                thread::spawn(move || account.take(1))
            };
            let (_, told) = account.resize(|_| 1);
            assert!(taker.join().unwrap() || told);
        });
    }
}
