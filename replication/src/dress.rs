//! A change as the message that a consumer is sent: what it may see of the value, in which form, under which key.

use std::borrow::Cow;

use document::{snappy, xattr};
use types::{Datatype, DeleteSource, Item, Kind, Seqno};
use wire::dcp::{Completion, Deletion, Message, Mutation, OpenFlags, Prepare};
use wire::kv::Key;

use crate::terms::Terms;

/// No value inflates to more than this: a body, its xattrs, and some.
const INFLATED_BYTES_MAX: usize = 32 << 20;

/// A value in the form it is sent.
type Value<'a> = (Datatype, Cow<'a, [u8]>);

/// The item as it is told to a consumer that asked in the middle of a snapshot. If that came from a disk, it lacks the prepares
/// that were decided by its end: what commits one of those is sent as the document it makes, as from a disk.
pub(crate) fn outcome_of_half((whole, start): (Seqno, Seqno), item: Item) -> Item {
    match item.kind() {
        Kind::Committed { prepared: Some(prepared) } if whole < prepared && prepared <= start => as_document(item),
        _ => item,
    }
}

/// What commits a prepare, without a word of the prepare.
pub(crate) fn as_document(item: Item) -> Item {
    match item.kind() {
        Kind::Committed { prepared: Some(_) } => {
            let value = item.has_value().then(|| item.value());
            Item::new(item.key(), item.meta(), Kind::Committed { prepared: None }, value)
        }
        _ => item,
    }
}

impl Terms {
    /// Whether the change says anything to a consumer that knows no more than documents.
    pub fn shows(&self, item: &Item) -> bool {
        self.sync_writes || item.is_committed()
    }

    /// Hands the message for `item` to `send`. `Err`: the stored value is damaged.
    pub fn dress<T>(&self, item: &Item, send: impl FnOnce(Message<'_>) -> T) -> Result<T, String> {
        let key = if self.knows_collections() { Key::Prefixed(item.key()) } else { Key::Bare(item.key().logical()) };
        let meta = item.meta();
        let seqno = meta.seqno;
        match item.kind() {
            Kind::Committed { prepared: Some(prepared) } if self.sync_writes => {
                Ok(send(Message::Commit(Completion { prepared, seqno, key })))
            }
            Kind::Abort { prepared } => Ok(send(Message::Abort(Completion { prepared, seqno, key }))),
            Kind::Prepare { level } => {
                let deleted = item.is_deleted();
                let (datatype, value) = if deleted { self.remains(item)? } else { self.value(item)? };
                Ok(send(Message::Prepare(Prepare {
                    seqno,
                    rev: meta.rev,
                    flags: meta.flags,
                    expiry: meta.expiry,
                    deleted,
                    level,
                    cas: meta.cas,
                    datatype,
                    key,
                    value: &value,
                })))
            }
            Kind::Committed { .. } => match meta.deleted {
                None => {
                    let (datatype, value) = self.value(item)?;
                    Ok(send(Message::Mutation(Mutation {
                        seqno,
                        rev: meta.rev,
                        flags: meta.flags,
                        expiry: meta.expiry,
                        cas: meta.cas,
                        datatype,
                        key,
                        value: &value,
                    })))
                }
                Some(source) => {
                    let (datatype, value) = self.remains(item)?;
                    let tells_time = self.open.has(OpenFlags::INCLUDE_DELETE_TIMES);
                    let deletion = Deletion {
                        seqno,
                        rev: meta.rev,
                        delete_time: tells_time.then_some(meta.expiry),
                        cas: meta.cas,
                        datatype,
                        key,
                        value: &value,
                    };
                    Ok(send(match source {
                        DeleteSource::Expiry if self.expiry_opcode => Message::Expiration(deletion),
                        _ => Message::Deletion(deletion),
                    }))
                }
            },
        }
    }

    /// Of a live document.
    fn value<'i>(&self, item: &'i Item) -> Result<Value<'i>, String> {
        let stored = item.meta().datatype;
        let accepts = Datatype(self.features.datatypes());
        let keeps_datatype = self.open.has(OpenFlags::NO_VALUE_WITH_UNDERLYING_DATATYPE);
        let no_body = keeps_datatype || self.open.has(OpenFlags::NO_VALUE);
        let strips = stored.has(Datatype::XATTR) && !self.has_xattrs();
        let inflates = stored.has(Datatype::SNAPPY) && !accepts.has(Datatype::SNAPPY);
        let is_packed = stored.has(Datatype::SNAPPY) || item.value().is_empty();
        if !no_body && !strips && !inflates && (!self.compresses || is_packed) {
            return Ok((stored & accepts, Cow::Borrowed(item.value())));
        }
        let plain = inflate(item)?;
        let (section, body) = xattr::split(&plain, stored).map_err(|error| damaged(item, &error))?;
        let section = if strips { &[][..] } else { section };
        let body = if no_body { &[][..] } else { body };
        let mut datatype = if section.is_empty() { Datatype::RAW } else { Datatype::XATTR };
        if !no_body || keeps_datatype {
            datatype = datatype | stored & Datatype::JSON;
        }
        let value = [section, body].concat();
        if self.compresses
            && let Some(packed) = snappy::compress(&value).filter(|packed| packed.len() < value.len())
        {
            return Ok(((datatype & accepts).with(Datatype::SNAPPY), Cow::Owned(packed)));
        }
        let shown = if keeps_datatype { datatype | stored & Datatype::SNAPPY } else { datatype };
        Ok((shown & accepts, Cow::Owned(value)))
    }

    /// Of what is deleted: its xattrs, as far as they outlive it.
    fn remains<'i>(&self, item: &'i Item) -> Result<Value<'i>, String> {
        let stored = item.meta().datatype;
        if !stored.has(Datatype::XATTR) || !self.has_xattrs() {
            return Ok((Datatype::RAW, Cow::Borrowed(&[])));
        }
        let plain = inflate(item)?;
        let (section, _) = xattr::split(&plain, stored).map_err(|error| damaged(item, &error))?;
        let kept = match self.deleted_user_xattrs {
            true => section.to_vec(),
            false => xattr::keep_system(section).map_err(|error| damaged(item, &error))?,
        };
        Ok((if kept.is_empty() { Datatype::RAW } else { Datatype::XATTR }, Cow::Owned(kept)))
    }
}

fn inflate(item: &Item) -> Result<Cow<'_, [u8]>, String> {
    match item.meta().datatype.has(Datatype::SNAPPY) {
        true => snappy::inflate(item.value(), INFLATED_BYTES_MAX).map(Cow::Owned).map_err(|e| damaged(item, &e)),
        false => Ok(Cow::Borrowed(item.value())),
    }
}

fn damaged(item: &Item, what: &dyn std::fmt::Display) -> String {
    format!("the stored value of seqno {} is damaged: {what}", item.seqno())
}

#[cfg(test)]
mod tests {
    use super::*;
    use types::{Cas, KeyBuf, Level, Meta, RevSeqno};
    use wire::dcp::Open;
    use wire::{Feature, FeatureSet};

    fn terms(flags: OpenFlags, features: &[Feature]) -> Terms {
        let open = Open { flags: flags.with(OpenFlags::PRODUCER), name: b"n", details: b"" };
        Terms::of(&open, FeatureSet::of(features)).unwrap_or_else(|refusal| panic!("{refusal:?}"))
    }

    fn item(datatype: Datatype, deleted: Option<DeleteSource>, kind: Kind, value: Option<&[u8]>) -> Item {
        let key = KeyBuf::in_default_collection(b"k").unwrap();
        let (seqno, cas, rev) = (Seqno(9), Cas(8), RevSeqno(7));
        Item::new(key.as_key(), Meta { seqno, cas, rev, flags: 6, expiry: 5, datatype, deleted }, kind, value)
    }

    const PLAIN: Kind = Kind::Committed { prepared: None };

    fn value(terms: &Terms, item: &Item) -> (Datatype, Vec<u8>) {
        let send = |message: Message<'_>| match message {
            Message::Mutation(m) => (m.datatype, m.value.to_vec()),
            Message::Deletion(d) => (d.datatype, d.value.to_vec()),
            other => panic!("{other:?}"),
        };
        terms.dress(item, send).unwrap()
    }

    /// One pair `_s` and one pair `u` in front of a body.
    fn with_xattrs(body: &[u8]) -> Vec<u8> {
        let mut xattrs = xattr::Xattrs::default();
        xattrs.set(b"_s", b"1".to_vec());
        xattrs.set(b"u", b"2".to_vec());
        [&xattrs.to_section()[..], body].concat()
    }

    const RICH: &[Feature] = &[Feature::Json, Feature::Snappy, Feature::Xattr];

    #[test]
    fn a_value_comes_in_the_form_its_consumer_knows() {
        let body = br#"{"some":"json that is worth compressing, worth compressing, worth compressing"}"#;
        let packed = snappy::compress(body).unwrap();
        let stored = item(Datatype::JSON.with(Datatype::SNAPPY), None, PLAIN, Some(&packed));
        let none = OpenFlags::default();
        assert_eq!(value(&terms(none, RICH), &stored), (Datatype(3), packed.clone()));
        assert_eq!(value(&terms(none, &[Feature::Json]), &stored), (Datatype::JSON, body.to_vec()));
        assert_eq!(value(&terms(none, &[]), &stored), (Datatype::RAW, body.to_vec()));
        let loose = item(Datatype::JSON, None, PLAIN, Some(body));
        let compressing = Terms { compresses: true, ..terms(none, RICH) };
        assert_eq!(value(&compressing, &loose), (Datatype(3), packed.clone()));
        let torn = item(Datatype::SNAPPY, None, PLAIN, Some(&packed[..9]));
        assert!(terms(none, &[]).dress(&torn, |_| ()).is_err());
    }

    #[test]
    fn xattrs_come_if_they_were_asked_for() {
        let full = with_xattrs(b"{}");
        let datatype = Datatype::JSON.with(Datatype::XATTR);
        let packed = snappy::compress(&full).unwrap();
        let xattrs = OpenFlags::INCLUDE_XATTRS;
        let stored = item(datatype, None, PLAIN, Some(&full));
        let stored_packed = item(datatype.with(Datatype::SNAPPY), None, PLAIN, Some(&packed));
        assert_eq!(value(&terms(OpenFlags::default(), RICH), &stored), (Datatype::JSON, b"{}".to_vec()));
        assert_eq!(value(&terms(OpenFlags::default(), RICH), &stored_packed), (Datatype::JSON, b"{}".to_vec()));
        assert_eq!(value(&terms(xattrs, RICH), &stored), (datatype, full.clone()));
        let only = with_xattrs(b"");
        assert_eq!(value(&terms(xattrs.with(OpenFlags::NO_VALUE), RICH), &stored), (Datatype::XATTR, only.clone()));
        let underlying = OpenFlags::NO_VALUE_WITH_UNDERLYING_DATATYPE;
        assert_eq!(value(&terms(xattrs.with(underlying), RICH), &stored), (datatype, only.clone()));
        assert_eq!(value(&terms(OpenFlags::NO_VALUE, RICH), &stored), (Datatype::RAW, vec![]));
        assert_eq!(value(&terms(underlying, RICH), &stored), (Datatype::JSON, vec![]));
    }

    #[test]
    fn of_what_is_deleted_the_systems_xattrs_stay() {
        let tombstone = item(Datatype::XATTR, Some(DeleteSource::Explicit), PLAIN, Some(&with_xattrs(b"")));
        let xattrs = OpenFlags::INCLUDE_XATTRS;
        assert_eq!(value(&terms(OpenFlags::default(), RICH), &tombstone), (Datatype::RAW, vec![]));
        let system = xattr::keep_system(&with_xattrs(b"")).unwrap();
        assert_eq!(value(&terms(xattrs, RICH), &tombstone), (Datatype::XATTR, system));
        let all = terms(xattrs.with(OpenFlags::INCLUDE_DELETED_USER_XATTRS), RICH);
        assert_eq!(value(&all, &tombstone), (Datatype::XATTR, with_xattrs(b"")));
    }

    #[test]
    fn each_kind_of_change_is_the_message_that_the_consumer_knows() {
        let name = |terms: &Terms, item: &Item| {
            terms.dress(item, |message| match message {
                Message::Mutation(_) => "mutation".to_owned(),
                Message::Deletion(d) => format!("deletion {:?}", d.delete_time),
                Message::Expiration(d) => format!("expiration {:?}", d.delete_time),
                Message::Prepare(p) => format!("prepare {}", p.deleted),
                Message::Commit(c) => format!("commit {}", c.prepared),
                Message::Abort(c) => format!("abort {}", c.prepared),
                other => panic!("{other:?}"),
            })
        };
        let plain = terms(OpenFlags::default(), RICH);
        let rich = Terms { sync_writes: true, expiry_opcode: true, ..terms(OpenFlags::INCLUDE_DELETE_TIMES, RICH) };
        let both = |item: &Item| [name(&plain, item).unwrap(), name(&rich, item).unwrap()];
        let deleted = |source| item(Datatype::RAW, Some(source), PLAIN, None);
        assert_eq!(both(&item(Datatype::RAW, None, PLAIN, Some(b"v"))), ["mutation", "mutation"]);
        assert_eq!(both(&deleted(DeleteSource::Explicit)), ["deletion None", "deletion Some(5)"]);
        assert_eq!(both(&deleted(DeleteSource::Expiry)), ["deletion None", "expiration Some(5)"]);
        let committed = Kind::Committed { prepared: Some(Seqno(3)) };
        for (half, expected) in [((2, 3), "mutation"), ((3, 9), "commit 3"), ((0, 2), "commit 3"), ((3, 3), "commit 3")]
        {
            let half = (Seqno(half.0), Seqno(half.1));
            let item = outcome_of_half(half, item(Datatype::RAW, None, committed, Some(b"v")));
            assert_eq!(name(&rich, &item).unwrap(), expected, "{half:?}");
        }
        assert_eq!(both(&item(Datatype::RAW, None, committed, Some(b"v"))), ["mutation", "commit 3"]);
        let prepare = item(Datatype::RAW, Some(DeleteSource::Explicit), Kind::Prepare { level: Level::Majority }, None);
        let abort = item(Datatype::RAW, Some(DeleteSource::Explicit), Kind::Abort { prepared: Seqno(3) }, None);
        assert_eq!([name(&rich, &prepare), name(&rich, &abort)].map(Result::unwrap), ["prepare true", "abort 3"]);
        assert_eq!([plain.shows(&prepare), plain.shows(&abort), rich.shows(&prepare)], [false, false, true]);
    }
}
