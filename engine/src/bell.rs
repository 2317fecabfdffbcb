//! Who wants to know that a vBucket has changed.
//!
//! A stream reads the changelog when it likes; a bell only says that there is something to look at. It may ring for nothing,
//! and it rings after the change has its place and every lock is released.
//!
//! ```text
//!     listener:   bells.add        log.lock: read, nothing new      goes to sleep
//!     engine:     log.lock: append                       bells.is_anybody?   yes: ring
//! ```
//! No change is missed. Both sides take the log's lock between the two steps: if the listener reads first, it had put itself
//! on the list before, and whoever appends after that sees it, even with a relaxed load; if it reads second, it finds the
//! change itself.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use types::VbId;
use types::rank::{Mutex, Rank};

/// Told to look again. Called on any thread, without locks held: it must be quick.
pub trait Bell: Send + Sync {
    fn ring(&self, vb: VbId);

    /// There is something new that nobody waits for.
    fn ring_later(&self, vb: VbId) {
        self.ring(vb);
    }
}

/// The bells of one vBucket. Without any, a change costs one load.
pub(crate) struct Bells {
    is_anybody: AtomicBool,
    bells: Mutex<Arc<[Arc<dyn Bell>]>>,
}

impl Bells {
    pub fn new() -> Bells {
        Bells { is_anybody: AtomicBool::new(false), bells: Mutex::ranked(Rank::Durability, Arc::new([])) }
    }

    pub fn add(&self, bell: Arc<dyn Bell>) {
        let mut bells = self.bells.lock();
        *bells = bells.iter().cloned().chain([bell]).collect();
        self.is_anybody.store(true, Relaxed);
    }

    pub fn remove(&self, bell: &Arc<dyn Bell>) {
        let mut bells = self.bells.lock();
        *bells = bells.iter().filter(|other| !Arc::ptr_eq(other, bell)).cloned().collect();
        self.is_anybody.store(!bells.is_empty(), Relaxed);
    }

    /// Call after a change, without locks.
    pub fn ring(&self, vb: VbId) {
        self.each(|bell| bell.ring(vb));
    }

    /// The same after one that nobody waits for.
    pub fn ring_later(&self, vb: VbId) {
        self.each(|bell| bell.ring_later(vb));
    }

    fn each(&self, ring: impl Fn(&dyn Bell)) {
        if self.is_anybody.load(Relaxed) {
            let bells = Arc::clone(&*self.bells.lock());
            bells.iter().for_each(|bell| ring(&**bell));
        }
    }
}
