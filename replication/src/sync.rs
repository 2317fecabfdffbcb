//! The few primitives that loom stands in for when it tries every order of steps.

#[cfg(not(loom))]
mod chosen {
    pub use std::sync::atomic::AtomicBool;
    pub use types::rank::Mutex;
}

#[cfg(loom)]
mod chosen {
    pub use loom::sync::atomic::AtomicBool;
    use types::rank::Rank;

    pub struct Mutex<T>(loom::sync::Mutex<T>);

    impl<T> Mutex<T> {
        pub fn ranked(_: Rank, value: T) -> Mutex<T> {
            Mutex(loom::sync::Mutex::new(value))
        }

        pub fn lock(&self) -> loom::sync::MutexGuard<'_, T> {
            self.0.lock().expect("nothing panics under this lock")
        }
    }
}

pub use chosen::*;
