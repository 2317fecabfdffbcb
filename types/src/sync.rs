//! The primitives of whatever loom tries in every order of steps, or shuttle in many: the system's own, or the checker's that
//! stands in for them.

#[cfg(not(any(loom, shuttle)))]
mod chosen {
    pub use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, fence};
    pub use std::thread;
    pub use std::thread_local;

    pub use crate::rank::{Mutex, MutexGuard};

    /// Sleeps until called, or so long.
    pub fn park(limit: Option<std::time::Duration>) {
        match limit {
            None => thread::park(),
            Some(limit) => thread::park_timeout(limit),
        }
    }
}

#[cfg(any(loom, shuttle))]
mod chosen {
    #[cfg(loom)]
    use loom as checker;
    #[cfg(shuttle)]
    use shuttle as checker;

    pub use checker::sync::MutexGuard;
    pub use checker::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, fence};
    pub use checker::thread;
    pub use checker::thread_local;

    use crate::rank::Rank;

    /// Neither checker models time: a sleep with a limit ends when someone calls.
    pub fn park(_limit: Option<std::time::Duration>) {
        thread::park();
    }

    /// Ranks are for debug builds to check: here it only looks the same.
    pub struct Mutex<T>(checker::sync::Mutex<T>);

    impl<T> Mutex<T> {
        pub fn ranked(_: Rank, value: T) -> Mutex<T> {
            Mutex(checker::sync::Mutex::new(value))
        }

        pub fn lock(&self) -> MutexGuard<'_, T> {
            self.0.lock().expect("nothing panics under this lock")
        }
    }
}

pub use chosen::*;
