//! The body of a record: a vBucket record if the header says so, then items one after the other.
//!
//! A commit says again what its prepare said, so its value is left out: whoever replays takes it from the prepare, which is
//! before it in the log or in the vBucket's file.

use changelog::{FailoverEntry, FailoverTable, Place, Snapshot, VbRecord};
use types::{Cas, Datatype, DeleteSource, DocKey, Item, Kind, Level, Meta, RevSeqno, Seqno, VbState, VbUuid};

use crate::format::{be32, be64};

const ITEM_BYTES: usize = 40;

const KIND_MASK: u8 = 3;
const KIND_COMMITTED: u8 = 0;
const KIND_PREPARE: u8 = 1;
const KIND_ABORT: u8 = 2;
/// A committed item that was prepared before.
const HAS_PREPARED: u8 = 4;
const HAS_VALUE: u8 = 8;
const DELETED: u8 = 16;
const EXPIRED: u8 = 32;
/// The value is the prepare's.
const VALUE_OF_PREPARE: u8 = 64;

/// Bytes `put_item` adds for this item.
pub fn item_bytes(item: &Item) -> usize {
    ITEM_BYTES + 8 * usize::from(prepared(item).is_some()) + item.id().len() + logged_value(item).len()
}

/// What of the item's value goes to the log.
fn logged_value(item: &Item) -> &[u8] {
    if is_commit(item) { &[] } else { item.value() }
}

fn is_commit(item: &Item) -> bool {
    matches!(item.kind(), Kind::Committed { prepared: Some(_) })
}

fn prepared(item: &Item) -> Option<Seqno> {
    match item.kind() {
        Kind::Committed { prepared } => prepared,
        Kind::Prepare { .. } => None,
        Kind::Abort { prepared } => Some(prepared),
    }
}

pub fn put_item(out: &mut Vec<u8>, item: &Item) {
    assert!(item.resident(), "a change brings its value");
    let (id, value, meta) = (item.id(), logged_value(item), item.meta());
    let (kind, level) = match item.kind() {
        Kind::Committed { prepared: None } => (KIND_COMMITTED, 0),
        Kind::Committed { prepared: Some(_) } => (KIND_COMMITTED | HAS_PREPARED, 0),
        Kind::Prepare { level } => (KIND_PREPARE, level as u8),
        Kind::Abort { .. } => (KIND_ABORT | HAS_PREPARED, 0),
    };
    let deleted = match meta.deleted {
        None => 0,
        Some(DeleteSource::Explicit) => DELETED,
        Some(DeleteSource::Expiry) => DELETED | EXPIRED,
    };
    let has_value = match item.has_value() {
        false => 0,
        true if is_commit(item) => VALUE_OF_PREPARE,
        true => HAS_VALUE,
    };
    out.extend([id.len() as u8, kind | has_value | deleted, meta.datatype.0, level]);
    out.extend((value.len() as u32).to_be_bytes());
    out.extend(meta.seqno.0.to_be_bytes());
    out.extend(meta.cas.0.to_be_bytes());
    out.extend(meta.rev.0.to_be_bytes());
    out.extend(meta.flags.to_be_bytes());
    out.extend(meta.expiry.to_be_bytes());
    if let Some(prepared) = prepared(item) {
        out.extend(prepared.0.to_be_bytes());
    }
    out.extend_from_slice(id);
    out.extend_from_slice(value);
}

/// Takes an item off the front of `bytes`. A commit of a value has none with it: see [`Item::resident`].
pub fn take_item(bytes: &mut &[u8]) -> Result<Item, String> {
    let fixed = take(bytes, ITEM_BYTES, "an item")?;
    let (id_len, bits, value_len) = (usize::from(fixed[0]), fixed[1], be32(fixed, 4) as usize);
    let seqno = Seqno(be64(fixed, 8));
    let prepared = match bits & HAS_PREPARED {
        0 => None,
        _ => Some(Seqno(be64(take(bytes, 8, "a prepare's seqno")?, 0))),
    };
    let kind = match (bits & KIND_MASK, prepared) {
        (KIND_COMMITTED, prepared) => Kind::Committed { prepared },
        (KIND_PREPARE, None) => {
            let level = Level::from_wire(fixed[3]);
            Kind::Prepare { level: level.ok_or_else(|| format!("seqno {seqno}: no level {}", fixed[3]))? }
        }
        (KIND_ABORT, Some(prepared)) => Kind::Abort { prepared },
        _ => return Err(format!("seqno {seqno}: no kind of item is {bits:#04x}")),
    };
    let deleted = match (bits & DELETED, bits & EXPIRED) {
        (0, _) => None,
        (_, 0) => Some(DeleteSource::Explicit),
        _ => Some(DeleteSource::Expiry),
    };
    let meta = Meta {
        seqno,
        cas: Cas(be64(fixed, 16)),
        rev: RevSeqno(be64(fixed, 24)),
        flags: be32(fixed, 32),
        expiry: be32(fixed, 36),
        datatype: Datatype(fixed[2]),
        deleted,
    };
    if (meta.seqno.0 | meta.rev.0) >> 48 != 0 {
        return Err(format!("seqno {seqno}, revision {}: both have 48 bits", meta.rev));
    }
    let id = take(bytes, id_len, "a key")?;
    let value = take(bytes, value_len, "a value")?;
    let key = DocKey::parse(id).map_err(|e| format!("seqno {seqno}: id {id:02x?} is not a key: {e:?}"))?;
    if bits & HAS_VALUE == 0 && value_len > 0 {
        return Err(format!("seqno {seqno}: {value_len} bytes of no value"));
    }
    if bits & VALUE_OF_PREPARE != 0 {
        return match (kind, bits & HAS_VALUE) {
            (Kind::Committed { prepared: Some(_) }, 0) => Ok(Item::without_value(key, meta, kind)),
            _ => {
                Err(format!("seqno {seqno}: the value of a prepare in {bits:#04x}, which is no commit or has its own"))
            }
        };
    }
    Ok(Item::new(key, meta, kind, (bits & HAS_VALUE != 0).then_some(value)))
}

/// Bytes `put_past` adds.
pub const PAST_BYTES: usize = 53;

const OPEN: u8 = 1;
const OPEN_FROM_DISK: u8 = 2;
const FROM_DISK: u8 = 4;

/// What a record says of a vBucket that is, or ever was, a replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplicaPast {
    /// How often it had been rolled back.
    pub rollbacks: u32,
    /// Seqnos may be missing from here to the last item.
    pub after: Seqno,
    /// Where among its snapshots the items end.
    pub place: Place,
}

pub fn put_past(out: &mut Vec<u8>, past: &ReplicaPast) {
    let (open, from_disk) = (past.place.open, past.place.from_disk);
    let open_completed = open.and_then(|open| open.completed);
    let bits = [open.map(|_| OPEN), open_completed.map(|_| OPEN_FROM_DISK), from_disk.map(|_| FROM_DISK)];
    out.extend(past.rollbacks.to_be_bytes());
    out.push(bits.into_iter().flatten().sum());
    let numbers = [
        Some(past.after),
        open.map(|open| open.start),
        open.map(|open| open.end),
        open_completed,
        from_disk.map(|snapshot| snapshot.end),
        from_disk.and_then(|snapshot| snapshot.completed),
    ];
    numbers.iter().for_each(|number| out.extend(number.unwrap_or_default().0.to_be_bytes()));
}

/// Takes what `put_past` put off the front of `bytes`.
pub fn take_past(bytes: &mut &[u8]) -> Result<ReplicaPast, String> {
    let fixed = take(bytes, PAST_BYTES, "a replica's past")?;
    let bits = fixed[4];
    let seqno = |n: usize| Seqno(be64(fixed, 5 + 8 * n));
    let open = Snapshot { start: seqno(1), end: seqno(2), completed: (bits & OPEN_FROM_DISK != 0).then(|| seqno(3)) };
    // Where it began is not kept: of what came before it, too, it says which prepares are decided.
    let from_disk = Snapshot { start: Seqno(0), end: seqno(4), completed: Some(seqno(5)) };
    let place =
        Place { open: (bits & OPEN != 0).then_some(open), from_disk: (bits & FROM_DISK != 0).then_some(from_disk) };
    Ok(ReplicaPast { rollbacks: be32(fixed, 0), after: seqno(0), place })
}

/// Bytes of the vBucket record with its length in front.
pub fn put_vb_record(out: &mut Vec<u8>, record: &VbRecord) {
    let at = out.len();
    out.extend([0; 4]);
    out.push(record.state as u8);
    let entries = record.failover.newest_first();
    out.push(entries.len() as u8);
    for entry in entries {
        out.extend(entry.uuid.0.to_be_bytes());
        out.extend(entry.seqno.0.to_be_bytes());
    }
    out.push(record.topology.len() as u8);
    for chain in &record.topology {
        out.push(chain.len() as u8);
        for node in chain {
            out.push(u8::from(node.is_some()));
            let name = node.as_deref().unwrap_or_default();
            out.extend((name.len() as u16).to_be_bytes());
            out.extend_from_slice(name.as_bytes());
        }
    }
    if record.rollbacks > 0 {
        out.extend(record.rollbacks.to_be_bytes());
    }
    let len = (out.len() - at - 4) as u32;
    out[at..at + 4].copy_from_slice(&len.to_be_bytes());
}

/// Takes a vBucket record off the front of `bytes`.
pub fn take_vb_record(bytes: &mut &[u8]) -> Result<VbRecord, String> {
    const WHAT: &str = "a vBucket record";
    let len = be32(take(bytes, 4, WHAT)?, 0) as usize;
    let mut bytes = take(bytes, len, WHAT)?;
    let byte = |bytes: &mut &[u8]| take(bytes, 1, WHAT).map(|b| b[0]);
    let state = byte(&mut bytes)?;
    let state = [VbState::Active, VbState::Replica, VbState::Pending, VbState::Dead]
        .into_iter()
        .find(|known| *known as u8 == state)
        .ok_or_else(|| format!("no vBucket state is {state}"))?;
    let mut entries = Vec::new();
    for _ in 0..byte(&mut bytes)? {
        let entry = take(&mut bytes, 16, WHAT)?;
        entries.push(FailoverEntry { uuid: VbUuid(be64(entry, 0)), seqno: Seqno(be64(entry, 8)) });
    }
    let failover = FailoverTable::from_entries(entries).ok_or("a failover table without entries")?;
    let mut topology = Vec::new();
    for _ in 0..byte(&mut bytes)? {
        let mut chain = Vec::new();
        for _ in 0..byte(&mut bytes)? {
            let node = take(&mut bytes, 3, WHAT)?;
            let name = take(&mut bytes, usize::from(u16::from_be_bytes([node[1], node[2]])), WHAT)?;
            let name = std::str::from_utf8(name).map_err(|e| format!("a node's name: {e}"))?;
            chain.push((node[0] != 0).then(|| name.to_owned()));
        }
        topology.push(chain);
    }
    let rollbacks = if bytes.is_empty() { 0 } else { be32(take(&mut bytes, 4, WHAT)?, 0) };
    match bytes.is_empty() {
        true => Ok(VbRecord { state, failover, topology, rollbacks }),
        false => Err(format!("{} bytes after a vBucket record", bytes.len())),
    }
}

fn take<'a>(bytes: &mut &'a [u8], len: usize, what: &str) -> Result<&'a [u8], String> {
    let (taken, rest) = bytes.split_at_checked(len).ok_or_else(|| format!("{what} ends too soon"))?;
    *bytes = rest;
    Ok(taken)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use types::KeyBuf;

    fn items() -> impl Strategy<Value = Item> {
        let kinds = prop_oneof![
            prop::option::of(1u64..1 << 48).prop_map(|n| Kind::Committed { prepared: n.map(Seqno) }),
            (1u8..4).prop_map(|level| Kind::Prepare { level: Level::from_wire(level).unwrap() }),
            (1u64..1 << 48).prop_map(|n| Kind::Abort { prepared: Seqno(n) }),
        ];
        let sources = prop::option::of(prop_oneof![Just(DeleteSource::Explicit), Just(DeleteSource::Expiry)]);
        let numbers = (any::<u64>(), any::<u64>(), any::<u64>(), any::<u32>(), any::<u32>(), any::<u8>());
        let value = prop::option::of(prop::collection::vec(any::<u8>(), 0..300));
        (kinds, sources, numbers, "[a-z]{1,250}", value).prop_map(|(kind, deleted, n, key, value)| {
            let (seqno, cas, rev, flags, expiry, datatype) = n;
            let (seqno, cas, rev) = (Seqno(seqno >> 16), Cas(cas), RevSeqno(rev >> 16));
            let meta = Meta { seqno, cas, rev, flags, expiry, datatype: Datatype(datatype), deleted };
            let key = KeyBuf::in_default_collection(key.as_bytes()).unwrap();
            Item::new(key.as_key(), meta, kind, value.as_deref())
        })
    }

    fn records() -> impl Strategy<Value = VbRecord> {
        let states =
            prop_oneof![Just(VbState::Active), Just(VbState::Replica), Just(VbState::Pending), Just(VbState::Dead)];
        let entry = (any::<u64>(), any::<u64>()).prop_map(|(u, s)| FailoverEntry { uuid: VbUuid(u), seqno: Seqno(s) });
        let chain = prop::collection::vec(prop::option::of("[a-z@:]{0,20}"), 0..4);
        (states, prop::collection::vec(entry, 1..25), prop::collection::vec(chain, 0..3), any::<u32>()).prop_map(
            |(state, entries, topology, rollbacks)| VbRecord {
                state,
                failover: FailoverTable::from_entries(entries).unwrap(),
                topology,
                rollbacks,
            },
        )
    }

    fn pasts() -> impl Strategy<Value = ReplicaPast> {
        let open = (any::<u64>(), any::<u64>(), prop::option::of(any::<u64>()));
        let open = open.prop_map(|(start, end, completed)| Snapshot {
            start: Seqno(start),
            end: Seqno(end),
            completed: completed.map(Seqno),
        });
        let from_disk = (any::<u64>(), any::<u64>()).prop_map(|(end, completed)| Snapshot {
            start: Seqno(0),
            end: Seqno(end),
            completed: Some(Seqno(completed)),
        });
        let place = (prop::option::of(open), prop::option::of(from_disk));
        (any::<u32>(), any::<u64>(), place).prop_map(|(rollbacks, after, (open, from_disk))| ReplicaPast {
            rollbacks,
            after: Seqno(after),
            place: Place { open, from_disk },
        })
    }

    proptest! {
        #[test]
        fn items_and_records_are_read_back(items in prop::collection::vec(items(), 0..5), record in records()) {
            let mut bytes = Vec::new();
            put_vb_record(&mut bytes, &record);
            for item in &items {
                let before = bytes.len();
                put_item(&mut bytes, item);
                prop_assert_eq!(bytes.len() - before, item_bytes(item));
            }
            let mut rest = &bytes[..];
            prop_assert_eq!(take_vb_record(&mut rest).unwrap(), record);
            for item in &items {
                let with_its_prepares_value = match is_commit(item) && item.has_value() {
                    true => Item::without_value(item.key(), item.meta(), item.kind()),
                    false => item.clone(),
                };
                prop_assert_eq!(take_item(&mut rest).unwrap(), with_its_prepares_value);
            }
            prop_assert!(rest.is_empty());
        }

        #[test]
        fn a_replicas_past_is_read_back(past in pasts()) {
            let mut bytes = Vec::new();
            put_past(&mut bytes, &past);
            prop_assert_eq!(bytes.len(), PAST_BYTES);
            prop_assert_eq!(take_past(&mut &bytes[..]), Ok(past));
        }

        #[test]
        fn any_bytes_give_an_answer_or_an_error(bytes in prop::collection::vec(0u8..8, 0..200)) {
            let _ = take_item(&mut &bytes[..]);
            let _ = take_vb_record(&mut &bytes[..]);
            let _ = take_past(&mut &bytes[..]);
        }
    }
}
