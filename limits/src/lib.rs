//! Who may have how many descriptors.
//!
//! A server that runs out of descriptors fails wherever it happens to open the next one: in the middle of a flush, in
//! the accept loop, while an administrator tries to find out why. So they are divided at the start, and every place that
//! opens, accepts or duplicates holds a [`Permit`] as long as its descriptor lives.
//!
//! ```text
//!     RLIMIT_NOFILE ── Plan ──▶ Ledger ──┬─ core         what the process needs to exist
//!                                        ├─ connections  clients ┐
//!                                        ├─ admin        reserve ┘ so that somebody can always look
//!                                        ├─ files        vBucket files: open ones are a cache, and can be given back
//!                                        ├─ background   compaction, rotation, reload
//!                                        └─ spare        nobody's, until a class is resized
//! ```
//!
//! A plan is a few numbers and a ledger is a few words, however large the limit. When the system says that there is no
//! descriptor after all (other processes count too), [`with_retry`] has idle files closed and tries once more.
//! `limits` knows neither sockets nor vBuckets, and never reads the limit itself: it is handed a number.

#![forbid(unsafe_code)]

mod account;
mod ledger;
mod metered;
mod plan;
mod stats;

pub use account::{Account, Balance};
pub use ledger::{GiveBack, Ledger, NoPermit, NoRoom, Permit, is_exhausted, with_retry};
pub use metered::Metered;
pub use plan::{ADMIN_RESERVE, CONNECTIONS_MIN, FILES_MIN, LIMIT_MIN, Plan, PlanError, Wish, Wishes};
pub use stats::{ClassStats, Stats};

/// What a descriptor is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Class {
    /// Listeners, pollers, standard streams, locks, logs: without them there is no server.
    Core,
    /// Sockets of clients.
    Connections,
    /// Sockets kept free for an administrator while clients hold all of theirs.
    Admin,
    /// vBucket files of flushes and reads.
    Files,
    /// Files of compaction, log rotation and reload.
    Background,
}

impl Class {
    pub const ALL: [Class; 5] = [Class::Core, Class::Connections, Class::Admin, Class::Files, Class::Background];

    pub fn name(self) -> &'static str {
        match self {
            Class::Core => "core",
            Class::Connections => "connections",
            Class::Admin => "admin",
            Class::Files => "files",
            Class::Background => "background",
        }
    }
}
