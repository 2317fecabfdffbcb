//! Writing whole documents: store, append and prepend, counters, touch.

use std::borrow::Cow;

use types::{Cas, Datatype};

use super::{Attempt, Change, Doc, Run, Step};
use crate::durability::Answer;
use crate::op::{Delta, End, Mutated, OpError, Reply, StoreMode};
use crate::value::{self, Incoming, Plain};

impl Run<'_> {
    pub(super) fn store(
        &mut self,
        mode: StoreMode,
        flags: u32,
        expiry: u32,
        datatype: Datatype,
        sent: &[u8],
    ) -> Attempt {
        if mode == StoreMode::Add && self.request.cas != Cas(0) {
            return Err(OpError::Invalid("add takes no CAS").into());
        }
        self.check_prepare()?;
        let doc = self.doc()?;
        match (mode, doc.live()) {
            (StoreMode::Add, Some(_)) => return Err(OpError::Exists.into()),
            (StoreMode::Replace, None) => return Err(OpError::NotFound.into()),
            _ => self.check_condition(&doc)?,
        }
        let incoming = self.incoming(sent, datatype)?;
        let (datatype, value) = match doc.live() {
            // A body is replaced, the attributes beside it stay.
            Some(item) if item.meta().datatype.has(Datatype::XATTR) => {
                let item = self.resident(item.clone())?;
                incoming.behind(Plain::of(&item)?.section())?
            }
            _ => incoming.behind(&[])?,
        };
        let expiry = self.expiry_of(expiry, &doc)?;
        self.change(&doc, Change::alive(flags, expiry, datatype, value), Answer::Mutated)
    }

    pub(super) fn concat(&mut self, end: End, datatype: Datatype, sent: &[u8]) -> Attempt {
        self.check_prepare()?;
        let doc = self.doc()?;
        let Doc::Live(item) = &doc else { return Err(OpError::NotStored.into()) };
        self.check_condition(&doc)?;
        let item = self.resident(item.clone())?;
        let (incoming, stored) = (Incoming::parse(sent, datatype)?, Plain::of(&item)?);
        value::check_size(stored.section(), stored.body().len() + incoming.body().len())?;
        let body = match end {
            End::Append => [stored.body(), incoming.body()].concat(),
            End::Prepend => [incoming.body(), stored.body()].concat(),
        };
        let (datatype, value) = value::join(stored.section(), &body)?;
        self.change(&doc, Change::alive(item.meta().flags, item.meta().expiry, datatype, value), Answer::Mutated)
    }

    pub(super) fn arithmetic(&mut self, delta: Delta, initial: Option<u64>, expiry: u32) -> Attempt {
        if self.request.cas != Cas(0) {
            return Err(OpError::Invalid("counters take no CAS").into());
        }
        self.check_prepare()?;
        let doc = self.doc()?;
        let Doc::Live(item) = &doc else {
            let value = initial.ok_or(OpError::NotFound)?;
            let expiry = self.terms.expiry(expiry, || self.now_s())?;
            let digits = value.to_string().into_bytes();
            return self.change(&doc, Change::alive(0, expiry, Datatype::JSON, digits), Answer::Counter(value));
        };
        self.check_condition(&doc)?;
        let item = self.resident(item.clone())?;
        let stored = Plain::of(&item)?;
        let old = number(stored.body()).ok_or(OpError::BadDelta)?;
        let value = match delta {
            Delta::Increment(by) => old.wrapping_add(by),
            Delta::Decrement(by) => old.saturating_sub(by),
        };
        let (datatype, bytes) = value::join(stored.section(), value.to_string().as_bytes())?;
        let change = Change::alive(item.meta().flags, item.meta().expiry, datatype, bytes);
        self.change(&doc, change, Answer::Counter(value))
    }

    /// Sets the expiry. An expiry that stays as it was writes nothing.
    pub(super) fn touch(&mut self, expiry: u32, and_get: bool) -> Attempt {
        if self.request.durability.is_some() {
            return Err(OpError::NotSupported("durability of touch").into());
        }
        self.check_prepare()?;
        let doc = self.doc()?;
        let Doc::Live(item) = &doc else { return Err(OpError::NotFound.into()) };
        if self.slot.lock_at(|| self.now()).is_some() {
            return Err(OpError::Locked.into());
        }
        let expiry = self.terms.expiry(expiry, || self.now_s())?;
        let unchanged = expiry == item.meta().expiry;
        if unchanged && !and_get {
            return Ok(Step::Reply(Reply::Done { cas: item.meta().cas }));
        }
        let mut item = self.resident(item.clone())?;
        if !unchanged {
            let meta = item.meta();
            let change = Change::alive(meta.flags, expiry, meta.datatype, item.value());
            let Step::Reply(Reply::Mutated(Mutated { cas, .. })) = self.change(&doc, change, Answer::Mutated)? else {
                unreachable!("a write without durability answers at once");
            };
            if !and_get {
                return Ok(Step::Reply(Reply::Done { cas }));
            }
            item = self.slot.committed().expect("just written");
        }
        let cas = item.meta().cas;
        self.show(item, cas)
    }
}

impl<'v> Change<'v> {
    pub(super) fn alive(flags: u32, expiry: u32, datatype: Datatype, value: impl Into<Cow<'v, [u8]>>) -> Change<'v> {
        let value = Some(value.into());
        Change { flags, expiry, datatype, value, deleted: None, patches: Vec::new(), given: None }
    }
}

/// A counter's value: decimal digits that fit 64 bits, nothing else.
fn number(body: &[u8]) -> Option<u64> {
    let digits = std::str::from_utf8(body).ok()?;
    if digits.bytes().all(|b| b.is_ascii_digit()) { digits.parse().ok() } else { None }
}

#[cfg(test)]
mod tests {
    use super::number;

    #[test]
    fn counters_are_plain_decimals() {
        assert_eq!(number(b"0"), Some(0));
        assert_eq!(number(b"18446744073709551615"), Some(u64::MAX));
        for bad in [&b""[..], b"18446744073709551616", b"-1", b"+1", b" 1", b"1 ", b"\"1\"", b"x", b"\xff"] {
            assert_eq!(number(bad), None, "{bad:?}");
        }
    }
}
