//! Who runs when: pools of threads, tasks that are woken, timers.
//!
//! ```text
//!     wake() ───────────┐
//!                       ▼
//!     timer thread ─▶ queue of a pool ─▶ thread: run() ─▶ Idle, Again, At, Done
//!                       ▲                                        │
//!                       └─────────── woken meanwhile ────────────┘
//! ```
//!
//! Nothing here polls. A wake that is lost stays lost, so the two places where one could be are small, argued and
//! model-checked: [`park`] (a thread that goes to sleep) and `word` (a task whose run ends). Both keep the wrong order
//! of steps beside the right one, as a model that must fail.
//!
//! The code that runs in tasks does not know what runs it: [`Pools::start`] has threads, [`Stepper`] has none, and time
//! passes when the test says so. This crate knows nothing of documents, files or sockets.

#![forbid(unsafe_code)]

mod core;
mod death;
#[cfg(all(test, loom))]
mod models;
pub mod park;
mod pool;
mod pools;
mod ready;
mod stats;
mod stepper;
#[cfg(all(test, shuttle))]
mod storms;
mod task;
mod timer;
mod word;

pub use crate::core::current_task;
pub use pools::{PoolConfig, PoolError, PoolKind, Pools, Stop, THREADS_MAX};
pub use ready::{Class, PASSED_OVER_MAX};
pub use stats::{PoolStats, Stats, TaskStats};
pub use stepper::{Order, Stepper};
pub use task::{Context, Next, Task, TaskHandle};

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests;
