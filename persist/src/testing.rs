//! What the tests of this crate share.

use changelog::{Changelog, FailoverEntry, FailoverTable, VbRecord};
use env::Clock;
use types::{Datatype, Item, KeyBuf, Kind, Meta, RevSeqno, Seqno, VbState, VbUuid};

pub fn record() -> VbRecord {
    let failover = FailoverTable::new(FailoverEntry { uuid: VbUuid(77), seqno: Seqno(0) });
    VbRecord::new(VbState::Active, failover)
}

pub fn change(log: &Changelog, clock: &dyn Clock, key: &str, kind: Kind, value: Option<&[u8]>) -> Item {
    let key = KeyBuf::in_default_collection(key.as_bytes()).unwrap();
    log.append(clock, |stamp| {
        let deleted = match (kind, value) {
            (Kind::Abort { .. }, _) | (_, None) => Some(types::DeleteSource::Explicit),
            _ => None,
        };
        let meta = Meta {
            seqno: stamp.seqno,
            cas: stamp.cas,
            rev: RevSeqno(1),
            flags: 0,
            expiry: 0,
            datatype: Datatype::RAW,
            deleted,
        };
        Item::new(key.as_key(), meta, kind, value)
    })
}
