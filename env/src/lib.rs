//! The seam where the world begins: files, time and randomness.
//!
//! Everything above this crate is deterministic given an [`Env`]. The real one talks to the operating
//! system ([`os`]); the simulated one ([`sim`]) keeps files in memory, drops what was not synced when
//! the power is cut, and fails the call it was asked to fail. `env` knows nothing of documents.

#![deny(unsafe_code)]

mod clock;
pub mod os;
mod rng;
pub mod sim;
mod storage;

use std::sync::Arc;

pub use clock::Clock;
pub use rng::Rng;
pub use storage::{Durable, File, OpenMode, Storage, create_dir_durable, read_exact_at, write_all_at};

/// The three sources of non-determinism, handed to whoever needs them.
#[derive(Clone)]
pub struct Env {
    pub storage: Arc<dyn Storage>,
    pub clock: Arc<dyn Clock>,
    pub rng: Arc<dyn Rng>,
}
