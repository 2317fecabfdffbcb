//! Stored bytes in and out: what a client sent becomes what is kept, what is kept becomes what a connection may see.

use std::borrow::Cow;

use document::{json, snappy, xattr};
use types::{Datatype, Item};

use crate::op::{Body, OpError};

/// Most bytes of a body and its user xattrs together, inflated.
pub const VALUE_BYTES_MAX: usize = 20 << 20;
/// Most bytes of system xattrs, beside that.
pub const SYSTEM_XATTR_BYTES_MAX: usize = 1 << 20;
/// A compressed value must be this many hundredths smaller than it inflates to, or it is kept inflated.
const RATIO_MIN_PERCENT: usize = 120;

const INFLATED_BYTES_MAX: usize = VALUE_BYTES_MAX + SYSTEM_XATTR_BYTES_MAX + 1024;

/// An inflated value in its two parts.
pub struct Plain<'a> {
    bytes: Cow<'a, [u8]>,
    /// Where the body begins.
    from: usize,
    /// Without the snappy bit.
    pub datatype: Datatype,
}

impl<'a> Plain<'a> {
    /// Of a resident item. What does not inflate was damaged on its way.
    pub fn of(item: &'a Item) -> Result<Plain<'a>, OpError> {
        Plain::parse(item.value(), item.meta().datatype).map_err(|what| damaged(item, &what))
    }

    pub fn parse(value: &'a [u8], datatype: Datatype) -> Result<Plain<'a>, String> {
        let bytes = if datatype.has(Datatype::SNAPPY) {
            Cow::Owned(snappy::inflate(value, INFLATED_BYTES_MAX).map_err(|e| e.to_string())?)
        } else {
            Cow::Borrowed(value)
        };
        let datatype = datatype.without(Datatype::SNAPPY);
        let from = xattr::split(&bytes, datatype).map_err(|e| e.to_string())?.0.len();
        Ok(Plain { bytes, from, datatype })
    }

    /// The xattr section with its length prefix; empty if there is none.
    pub fn section(&self) -> &[u8] {
        &self.bytes[..self.from]
    }

    pub fn body(&self) -> &[u8] {
        &self.bytes[self.from..]
    }

    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}

/// The error for a stored value that cannot be what was stored.
pub fn damaged(item: &Item, what: &dyn std::fmt::Display) -> OpError {
    OpError::Unreadable(format!("the stored value of seqno {} is damaged: {what}", item.seqno()))
}

/// The body of an item as a connection that understands `accepts` may be sent it.
pub fn shown(item: &Item, accepts: Datatype) -> Result<(Datatype, Body), OpError> {
    let stored = item.meta().datatype;
    let visible = stored.without(Datatype::XATTR) & accepts;
    if !stored.has(Datatype::SNAPPY) {
        let section = xattr::split(item.value(), stored).map_err(|e| damaged(item, &e))?.0;
        return Ok((visible, Body::Stored { from: section.len() }));
    }
    if accepts.has(Datatype::SNAPPY) && !stored.has(Datatype::XATTR) {
        return Ok((visible, Body::Stored { from: 0 }));
    }
    let plain = Plain::of(item)?;
    let body = if plain.from == 0 { plain.bytes.into_owned() } else { plain.body().to_vec() };
    Ok((visible.without(Datatype::SNAPPY), Body::Owned(body)))
}

/// A body a client sent, looked at.
pub struct Incoming<'a> {
    sent: &'a [u8],
    inflated: Cow<'a, [u8]>,
    compressed: bool,
    json: bool,
}

impl<'a> Incoming<'a> {
    /// Whether it is JSON is found out here, whatever the client said.
    pub fn parse(sent: &'a [u8], datatype: Datatype) -> Result<Incoming<'a>, OpError> {
        let compressed = datatype.has(Datatype::SNAPPY);
        let inflated = if compressed {
            match snappy::inflate(sent, VALUE_BYTES_MAX) {
                Ok(bytes) => Cow::Owned(bytes),
                Err(snappy::SnappyError::TooLarge { .. }) => return Err(OpError::TooBig),
                Err(snappy::SnappyError::Damaged { .. }) => {
                    return Err(OpError::Invalid("the value does not inflate"));
                }
            }
        } else {
            Cow::Borrowed(sent)
        };
        let json = json::is_json(&inflated);
        Ok(Incoming { sent, inflated, compressed, json })
    }

    pub fn body(&self) -> &[u8] {
        &self.inflated
    }

    /// The same, as if it had come inflated.
    pub fn uncompressed(self) -> Incoming<'a> {
        Incoming { compressed: false, ..self }
    }

    /// What is stored: this body behind `section`. Compression is kept when it is worth something and nothing had to be
    /// put in front.
    pub fn behind(self, section: &[u8]) -> Result<(Datatype, Cow<'a, [u8]>), OpError> {
        if !section.is_empty() {
            return join(section, &self.inflated).map(|(datatype, value)| (datatype, Cow::Owned(value)));
        }
        check_size(section, self.inflated.len())?;
        let datatype = if self.json { Datatype::JSON } else { Datatype::RAW };
        match self.compressed && self.inflated.len() * 100 >= self.sent.len() * RATIO_MIN_PERCENT {
            true => Ok((datatype.with(Datatype::SNAPPY), Cow::Borrowed(self.sent))),
            false => Ok((datatype, self.inflated)),
        }
    }
}

/// A value from its parts, with its datatype found out and its size checked.
pub fn join(section: &[u8], body: &[u8]) -> Result<(Datatype, Vec<u8>), OpError> {
    let mut datatype = if json::is_json(body) { Datatype::JSON } else { Datatype::RAW };
    if !section.is_empty() {
        datatype = datatype.with(Datatype::XATTR);
    }
    check_size(section, body.len())?;
    Ok((datatype, [section, body].concat()))
}

/// Refuses what is over the limits.
pub fn check_size(section: &[u8], body_len: usize) -> Result<(), OpError> {
    let sizes = xattr::sizes(section).map_err(|_| OpError::BadXattr)?;
    if body_len + sizes.user_bytes > VALUE_BYTES_MAX || sizes.system_bytes > SYSTEM_XATTR_BYTES_MAX {
        return Err(OpError::TooBig);
    }
    Ok(())
}

/// A tombstone's datatype and value.
pub type Remains = (Datatype, Option<Vec<u8>>);

/// What a tombstone keeps of a value: its system xattrs, or nothing.
pub fn remains(item: &Item) -> Result<Remains, OpError> {
    if !item.meta().datatype.has(Datatype::XATTR) {
        return Ok((Datatype::RAW, None));
    }
    let plain = Plain::of(item)?;
    let kept = xattr::keep_system(plain.section()).map_err(|e| damaged(item, &e))?;
    if kept.is_empty() { Ok((Datatype::RAW, None)) } else { Ok((Datatype::XATTR, Some(kept))) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_body_is_json_because_it_is_not_because_the_client_says_so() {
        let stored = |bytes: &[u8], datatype| Incoming::parse(bytes, datatype).unwrap().behind(&[]).unwrap().0;
        assert_eq!(stored(b"{\"a\":1}", Datatype::RAW), Datatype::JSON);
        assert_eq!(stored(b"{a:1}", Datatype::JSON), Datatype::RAW);
        assert_eq!(stored(b"", Datatype::JSON), Datatype::RAW);
    }

    #[test]
    fn compression_that_saves_little_is_undone() {
        let mut dense = vec![0; 4000];
        env::Rng::fill(&env::sim::SimRng::new(1), &mut dense);
        let sparse = vec![b'x'; 4000];
        for (body, kept) in [(dense, false), (sparse, true)] {
            let packed = snappy::compress(&body).unwrap();
            let (datatype, value) = Incoming::parse(&packed, Datatype::SNAPPY).unwrap().behind(&[]).unwrap();
            assert_eq!(datatype.has(Datatype::SNAPPY), kept);
            assert_eq!(*value == *body, !kept);
        }
        assert!(matches!(Incoming::parse(b"\xff\xff", Datatype::SNAPPY), Err(OpError::Invalid(_))));
    }

    #[test]
    fn the_size_limit_is_on_the_inflated_body() {
        let body = vec![b'x'; VALUE_BYTES_MAX + 1];
        assert_eq!(join(&[], &body).err(), Some(OpError::TooBig));
        assert!(join(&[], &body[1..]).is_ok());
        let packed = snappy::compress(&body).unwrap();
        assert_eq!(Incoming::parse(&packed, Datatype::SNAPPY).err(), Some(OpError::TooBig));
    }
}
