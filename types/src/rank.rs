//! Locks that know their rank. They are taken downwards only: in debug builds, taking one of a rank not below every rank
//! the thread already holds panics, so an inversion is found by the first test that walks it, not by the deadlock.

use std::ops::{Deref, DerefMut};

/// The order, top first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Rank {
    /// The registry of buckets: create, delete, select.
    Buckets = 1,
    /// A vBucket's state and failover table; every operation reads it.
    VBucketState = 2,
    /// The items of one stripe of a hash table.
    HashStripe = 3,
    /// Seqno assignment and append; taken inside `HashStripe`, so that a key's seqno order is the order readers saw.
    Changelog = 4,
    /// Synchronous writes that wait for their watermarks.
    Durability = 5,
    /// Which files are open, not the reading of them.
    FileCache = 6,
    /// Work waiting for the next commit.
    CommitQueue = 7,
    /// Pool queues and worker mailboxes.
    RunQueue = 8,
}

#[cfg(debug_assertions)]
mod held {
    use super::Rank;
    use std::cell::Cell;

    thread_local! { static HELD: Cell<u16> = const { Cell::new(0) }; }

    pub fn take(rank: Rank) {
        let held = HELD.get();
        let lowest = 15 - (held.leading_zeros() as u16).min(15);
        assert!(held == 0 || lowest < rank as u16, "lock rank inversion: taking {rank:?} while holding rank {lowest}");
        HELD.set(held | 1 << rank as u8);
    }

    pub fn release(rank: Rank) {
        HELD.set(HELD.get() & !(1 << rank as u8));
    }
}

#[cfg(not(debug_assertions))]
mod held {
    use super::Rank;
    #[inline(always)]
    pub fn take(_: Rank) {}
    #[inline(always)]
    pub fn release(_: Rank) {}
}

macro_rules! guard {
    ($name:ident, $inner:ident $(, $mutable:ident)?) => {
        pub struct $name<'a, T> {
            // Declared first: released before the rank is given back.
            inner: parking_lot::$inner<'a, T>,
            _rank: Held,
        }
        impl<T> Deref for $name<'_, T> {
            type Target = T;
            fn deref(&self) -> &T {
                &self.inner
            }
        }
        $(impl<T> DerefMut for $name<'_, T> {
            fn deref_mut(&mut self) -> &mut T {
                let $mutable = &mut self.inner;
                $mutable
            }
        })?
    };
}

struct Held(Rank);

impl Held {
    fn take(rank: Rank) -> Held {
        held::take(rank);
        Held(rank)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        held::release(self.0);
    }
}

guard!(MutexGuard, MutexGuard, inner);
guard!(ReadGuard, RwLockReadGuard);
guard!(WriteGuard, RwLockWriteGuard, inner);

/// A mutex with a rank.
pub struct Mutex<T> {
    rank: Rank,
    inner: parking_lot::Mutex<T>,
}

impl<T> Mutex<T> {
    pub const fn ranked(rank: Rank, value: T) -> Mutex<T> {
        Mutex { rank, inner: parking_lot::Mutex::new(value) }
    }

    pub fn lock(&self) -> MutexGuard<'_, T> {
        let rank = Held::take(self.rank);
        MutexGuard { inner: self.inner.lock(), _rank: rank }
    }
}

/// A reader-writer lock with a rank.
pub struct RwLock<T> {
    rank: Rank,
    inner: parking_lot::RwLock<T>,
}

impl<T> RwLock<T> {
    pub const fn ranked(rank: Rank, value: T) -> RwLock<T> {
        RwLock { rank, inner: parking_lot::RwLock::new(value) }
    }

    pub fn read(&self) -> ReadGuard<'_, T> {
        let rank = Held::take(self.rank);
        ReadGuard { inner: self.inner.read(), _rank: rank }
    }

    pub fn write(&self) -> WriteGuard<'_, T> {
        let rank = Held::take(self.rank);
        WriteGuard { inner: self.inner.write(), _rank: rank }
    }
}

#[cfg(all(test, debug_assertions))]
mod tests {
    use super::*;

    #[test]
    fn locks_go_down_the_ranks() {
        let (stripe, log) = (Mutex::ranked(Rank::HashStripe, ()), Mutex::ranked(Rank::Changelog, ()));
        let held = stripe.lock();
        drop(log.lock());
        drop(held);
        drop(log.lock());
        drop(stripe.lock());
    }

    #[test]
    #[should_panic(expected = "lock rank inversion")]
    fn going_up_the_ranks_panics() {
        let (stripe, log) = (Mutex::ranked(Rank::HashStripe, ()), Mutex::ranked(Rank::Changelog, ()));
        let _held = log.lock();
        let _inverted = stripe.lock();
    }

    #[test]
    #[should_panic(expected = "lock rank inversion")]
    fn two_locks_of_one_rank_are_never_held_together() {
        let (one, two) = (Mutex::ranked(Rank::HashStripe, ()), Mutex::ranked(Rank::HashStripe, ()));
        let _held = one.lock();
        let _second = two.lock();
    }
}
