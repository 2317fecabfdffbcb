//! Reading, and the lock that reading may take.

use std::time::Duration;

use types::{Cas, Item};

use super::{Attempt, Doc, Run, Step};
use crate::beside::Lock;
use crate::op::{OpError, Reply};
use crate::value;

const LOCK_DEFAULT_S: u32 = 15;
const LOCK_MAX_S: u32 = 30;

impl Run<'_> {
    pub(super) fn get(&mut self) -> Attempt {
        self.check_readable()?;
        let Doc::Live(item) = self.doc()? else { return Err(OpError::NotFound.into()) };
        let item = self.resident(item)?;
        let cas = self.shown_cas(&item);
        self.show(item, cas)
    }

    pub(super) fn show(&self, item: Item, cas: Cas) -> Attempt {
        let (datatype, body) = value::shown(&item, self.request.accepts)?;
        Ok(Step::Reply(Reply::Value { item, cas, datatype, body }))
    }

    pub(super) fn get_meta(&mut self) -> Attempt {
        self.check_readable()?;
        let doc = self.doc_or_tombstone()?;
        let item = doc.item().ok_or(OpError::NotFound)?;
        let meta = item.meta();
        Ok(Step::Reply(Reply::Meta {
            deleted: item.is_deleted(),
            flags: meta.flags,
            expiry: meta.expiry,
            rev: meta.rev,
            cas: self.shown_cas(item),
            datatype: meta.datatype,
        }))
    }

    pub(super) fn get_and_lock(&mut self, lock_s: u32) -> Attempt {
        self.check_prepare()?;
        let Doc::Live(item) = self.doc()? else { return Err(OpError::NotFound.into()) };
        if self.slot.lock_at(|| self.now()).is_some() {
            return Err(OpError::Locked.into());
        }
        let item = self.resident(item)?;
        let lock_s = if (1..=LOCK_MAX_S).contains(&lock_s) { lock_s } else { LOCK_DEFAULT_S };
        let cas = self.vb.log.fresh_cas(self.clock);
        let reply = self.show(item, cas)?;
        self.slot.set_lock(Some(Lock { cas, until: self.now() + Duration::from_secs(lock_s.into()) }));
        Ok(reply)
    }

    pub(super) fn unlock(&mut self) -> Attempt {
        if self.request.cas == Cas(0) {
            return Err(OpError::Invalid("unlock needs the CAS of the lock").into());
        }
        self.check_prepare()?;
        if self.doc()?.live().is_none() {
            return Err(OpError::NotFound.into());
        }
        match self.slot.lock_at(|| self.now()) {
            None => Err(OpError::NotLocked.into()),
            Some(lock) if lock.cas != self.request.cas => Err(OpError::Locked.into()),
            Some(_) => {
                self.slot.set_lock(None);
                Ok(Step::Reply(Reply::Done { cas: Cas(0) }))
            }
        }
    }

    pub(super) fn evict(&mut self) -> Attempt {
        self.check_prepare()?;
        let Doc::Live(item) = self.doc()? else { return Err(OpError::NotFound.into()) };
        if item.seqno() > self.vb.log.marks.filed() {
            return Err(OpError::Exists.into());
        }
        if self.vb.full_eviction {
            self.slot.forget();
        } else if item.resident() {
            self.slot.put_committed(item.stripped(), false);
        }
        Ok(Step::Reply(Reply::Done { cas: Cas(0) }))
    }
}
