//! The vocabulary every part speaks: identifiers, the key, the item, locks that know their rank, and what the model checkers
//! stand in for.

#![forbid(unsafe_code)]

mod body;
mod ids;
mod item;
mod key;
pub mod rank;
pub mod sync;

pub use body::{Body, HEATS, HeldBy, Holders, allocated};
pub use ids::{BucketUuid, Cas, CollectionId, RevSeqno, ScopeId, Seqno, VbId, VbState, VbUuid};
pub use item::{Datatype, DeleteSource, Item, Kind, Level, Meta};
pub use key::{DocKey, KEY_LEN_MAX, KeyBuf, KeyError};
