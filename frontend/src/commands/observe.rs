//! How far things have come: seqnos, histories, what is on disk; and a document picked at random.

use std::borrow::Cow;

use document::{snappy, xattr};
use engine::{Outcome, Waiter};
use types::{Datatype, Seqno, VbId, VbUuid};
use wire::kv::{GetAllVbSeqnos, GetRandomKey, ObserveKeys};
use wire::{Feature, Reply, Status};

use super::{Context, Refusal, not_supported};
use crate::errors;

impl Context<'_> {
    pub(super) fn observe(&mut self, keys: ObserveKeys<'_>) -> Result<(), Refusal> {
        let bucket = self.bucket()?.bucket.clone();
        let mut value = Vec::new();
        for (vb, key) in keys {
            let observed = bucket.observe(vb, key.resolve().as_key()).map_err(|e| errors::of_op(&e))?;
            let wire = key.wire();
            value.extend_from_slice(&vb.0.to_be_bytes());
            value.extend_from_slice(&(wire.len() as u16).to_be_bytes());
            value.extend_from_slice(wire);
            value.push(observed.state as u8);
            value.extend_from_slice(&observed.cas.0.to_be_bytes());
        }
        self.value(Default::default(), &value)
    }

    pub(super) fn observe_seqno(&mut self, vb: VbId, uuid: VbUuid) -> Result<(), Refusal> {
        let seen = self.bucket()?.bucket.observe_seqno(vb, uuid).map_err(|e| errors::of_op(&e))?;
        let mut value = vec![u8::from(seen.old.is_some())];
        value.extend_from_slice(&vb.0.to_be_bytes());
        for number in [seen.uuid.0, seen.persisted.0, seen.current.0] {
            value.extend_from_slice(&number.to_be_bytes());
        }
        if let Some((uuid, seqno)) = seen.old {
            value.extend_from_slice(&uuid.0.to_be_bytes());
            value.extend_from_slice(&seqno.0.to_be_bytes());
        }
        self.value(Default::default(), &value)
    }

    pub(super) fn get_all_vb_seqnos(&mut self, get: &GetAllVbSeqnos) -> Result<(), Refusal> {
        if let Some(collection) = get.collection.filter(|c| c.0 != 0) {
            return Err((Status::UnknownCollection, format!("no collection {:#x}", collection.0)));
        }
        // Whoever does not know of sync writes would wait for a prepare for ever.
        let with_sync_writes = self.session.features.has(Feature::SyncReplication);
        let seqnos = self.bucket()?.bucket.all_vb_seqnos(get.state, with_sync_writes);
        let mut value = Vec::with_capacity(seqnos.len() * 10);
        for (vb, seqno) in seqnos {
            value.extend_from_slice(&vb.0.to_be_bytes());
            value.extend_from_slice(&seqno.0.to_be_bytes());
        }
        self.value(Default::default(), &value)
    }

    pub(super) fn seqno_persistence(&mut self, vb: VbId, seqno: Seqno) -> Result<(), Refusal> {
        let bucket = self.bucket()?.bucket.clone();
        let ticket = self.ticket();
        let mailbox = self.mailbox;
        match bucket.seqno_persistence(vb, seqno, &|| Waiter::new(mailbox.clone(), ticket)) {
            Outcome::Done(result) => self.answer(result),
            Outcome::Pending => self.wait(ticket, true),
        }
        Ok(())
    }

    pub(super) fn get_random_key(&mut self, get: &GetRandomKey) -> Result<(), Refusal> {
        let bucket = self.bucket()?.bucket.clone();
        if get.collection.0 != 0 {
            return Err((Status::UnknownCollection, format!("no collection {:#x}", get.collection.0)));
        }
        if get.include_xattr {
            return not_supported("a random document with its xattrs");
        }
        let Some(item) = bucket.random_key() else {
            return Err((Status::KeyEnoent, "there is no document in memory".to_owned()));
        };
        let damaged = || (Status::Einternal, "the stored value is malformed".to_owned());
        let (mut value, mut datatype) = (Cow::Borrowed(item.value()), item.meta().datatype);
        if datatype.has(Datatype::SNAPPY) && (datatype.has(Datatype::XATTR) || !self.has(Feature::Snappy)) {
            let inflated = snappy::inflate(&value, wire::frame::BODY_LEN_MAX as usize).map_err(|_| damaged())?;
            (value, datatype) = (Cow::Owned(inflated), datatype.without(Datatype::SNAPPY));
        }
        let body = xattr::body(&value, datatype).map_err(|_| damaged())?;
        let datatype = datatype.without(Datatype::XATTR) & Datatype(self.session.features.datatypes());
        let key = if self.has(Feature::Collections) { item.id() } else { item.key().logical() };
        let (flags, cas) = (item.meta().flags.to_be_bytes(), item.meta().cas);
        self.put(Reply { cas, datatype, extras: &flags, key, value: (body, &[]), ..self.blank(Status::Success) });
        Ok(())
    }
}
