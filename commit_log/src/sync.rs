//! The few primitives the log is built from, so that shuttle can stand in for them.

#[cfg(not(shuttle))]
mod chosen {
    pub use std::thread;
    pub use types::rank::{Mutex, MutexGuard};
}

#[cfg(shuttle)]
mod chosen {
    pub use shuttle::sync::MutexGuard;
    pub use shuttle::thread;
    use types::rank::Rank;

    pub struct Mutex<T>(shuttle::sync::Mutex<T>);

    impl<T> Mutex<T> {
        pub fn ranked(_: Rank, value: T) -> Mutex<T> {
            Mutex(shuttle::sync::Mutex::new(value))
        }

        pub fn lock(&self) -> MutexGuard<'_, T> {
            self.0.lock().expect("nothing panics under this lock")
        }
    }
}

pub use chosen::*;
