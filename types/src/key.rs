//! A document's key: the collection id in unsigned LEB128, then the logical key. The same bytes in memory, in the
//! changelog and in the file, so no part has to translate.

use crate::CollectionId;

/// Longest logical key of the default collection, in bytes. Other collections allow four fewer, so an id is at most 251.
pub const KEY_LEN_MAX: usize = 250;

/// Why bytes are not a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyError {
    Empty,
    TooLong,
    /// The collection prefix is not the shortest LEB128 of a u32, or names one of the reserved ids 1..=7.
    BadCollection,
}

/// A checked key, borrowed. `as_bytes` is the id used everywhere: collection prefix + logical key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DocKey<'a>(&'a [u8]);

impl<'a> DocKey<'a> {
    /// Checks bytes that carry a collection prefix (wire with Collections, or a file's id).
    pub fn parse(id: &'a [u8]) -> Result<DocKey<'a>, KeyError> {
        let (collection, prefix) = leb128(id)?;
        let logical_max = if collection == 0 { KEY_LEN_MAX } else { KEY_LEN_MAX - 4 };
        match (collection, id.len() - prefix) {
            (1..=7, _) => Err(KeyError::BadCollection),
            (_, 0) => Err(KeyError::Empty),
            (_, n) if n > logical_max => Err(KeyError::TooLong),
            _ => Ok(DocKey(id)),
        }
    }

    pub fn as_bytes(self) -> &'a [u8] {
        self.0
    }

    pub fn collection(self) -> CollectionId {
        CollectionId(leb128(self.0).expect("checked when made").0)
    }

    /// The key without its collection prefix.
    pub fn logical(self) -> &'a [u8] {
        &self.0[leb128(self.0).expect("checked when made").1..]
    }
}

/// A key in a buffer of its own, on the stack: for adding the default collection's prefix to a bare wire key.
#[derive(Clone, Copy)]
pub struct KeyBuf {
    len: u8,
    bytes: [u8; KEY_LEN_MAX + 1],
}

impl KeyBuf {
    /// A key of the default collection from its logical bytes.
    pub fn in_default_collection(logical: &[u8]) -> Result<KeyBuf, KeyError> {
        match logical.len() {
            0 => Err(KeyError::Empty),
            n if n > KEY_LEN_MAX => Err(KeyError::TooLong),
            n => {
                let mut bytes = [0; KEY_LEN_MAX + 1];
                bytes[1..=n].copy_from_slice(logical);
                Ok(KeyBuf { len: n as u8 + 1, bytes })
            }
        }
    }

    pub fn copy_of(key: DocKey<'_>) -> KeyBuf {
        let mut bytes = [0; KEY_LEN_MAX + 1];
        bytes[..key.0.len()].copy_from_slice(key.0);
        KeyBuf { len: key.0.len() as u8, bytes }
    }

    pub fn as_key(&self) -> DocKey<'_> {
        DocKey(&self.bytes[..usize::from(self.len)])
    }
}

/// Decodes an unsigned LEB128 u32: the value and how many bytes it took. Only the shortest form is accepted.
fn leb128(bytes: &[u8]) -> Result<(u32, usize), KeyError> {
    let mut value: u64 = 0;
    for (i, &byte) in bytes.iter().take(5).enumerate() {
        value |= u64::from(byte & 0x7f) << (7 * i);
        if byte & 0x80 == 0 {
            if i > 0 && byte == 0 {
                return Err(KeyError::BadCollection);
            }
            let value = u32::try_from(value).map_err(|_| KeyError::BadCollection)?;
            return Ok((value, i + 1));
        }
    }
    Err(if bytes.is_empty() { KeyError::Empty } else { KeyError::BadCollection })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn collection_prefixes_decode_in_their_shortest_form_only() {
        for (id, collection) in [
            (&b"\x00k"[..], 0),
            (b"\x08k", 8),
            (b"\x7fk", 0x7f),
            (b"\x80\x01k", 0x80),
            (b"\xd5\x0ak", 0x555),
            (b"\x8d\xe0\xfb\xd7\x0ck", 0xcafe_f00d),
        ] {
            let key = DocKey::parse(id).unwrap();
            assert_eq!((key.collection(), key.logical()), (CollectionId(collection), &b"k"[..]));
        }
        for id in [&b"\x80\x00k"[..], b"\x01k", b"\x07k", b"\xff\xff\xff\xff\xffk", b"\x80"] {
            assert_eq!(DocKey::parse(id), Err(KeyError::BadCollection), "{id:x?}");
        }
        assert_eq!(DocKey::parse(b"\x00"), Err(KeyError::Empty));
        assert_eq!(DocKey::parse(b""), Err(KeyError::Empty));
    }

    #[test]
    fn the_longest_key_of_each_collection_fits_and_one_more_does_not() {
        assert!(KeyBuf::in_default_collection(&[b'x'; 250]).is_ok());
        assert_eq!(KeyBuf::in_default_collection(&[b'x'; 251]).err(), Some(KeyError::TooLong));
        assert!(DocKey::parse(&[&[8u8][..], &[b'x'; 246]].concat()).is_ok());
        assert_eq!(DocKey::parse(&[&[8u8][..], &[b'x'; 247]].concat()), Err(KeyError::TooLong));
    }
}
