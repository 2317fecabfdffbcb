//! The xattr section: small named JSON values that ride in front of a document's body.
//! ```text
//! value = [u32 length of the pairs][pair]…[body]      pair = [u32 n][key 00 json 00]: n bytes
//! ```
//! Sync Gateway and transactions keep their books here, so a section is checked when it comes in and copied untouched
//! unless somebody edits it. Names that begin with `_` belong to the system and outlive a delete; those that begin
//! with `$` are virtual and never stored.

use std::borrow::Cow;

use types::Datatype;

use crate::json;

/// Bytes of the longest xattr key.
pub const KEY_LEN_MAX: usize = 15;

const PREFIX: usize = size_of::<u32>();

/// What is wrong with an xattr section. Offsets count from the start of the value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum XattrError {
    #[error("xattr section of {claimed} bytes in a value of {available}")]
    Truncated { claimed: usize, available: usize },
    #[error("xattr pair at offset {offset} does not fit its frame")]
    Frame { offset: usize },
    #[error("xattr key at offset {offset} is not allowed: 1 to 15 bytes, no punctuation in front but `_`")]
    Key { offset: usize },
    #[error("xattr key at offset {offset} appears twice")]
    Duplicate { offset: usize },
    #[error("xattr value at offset {offset} is not JSON")]
    Value { offset: usize },
}

/// Whether `key` may name an xattr, virtual ones included: 1 to 15 bytes of UTF-8 without control characters, `.` or
/// `[`, beginning with `_`, `$` (then more must follow) or no ASCII punctuation at all.
pub fn is_valid_key(key: &[u8]) -> bool {
    let Some(&first) = key.first() else { return false };
    key.len() <= KEY_LEN_MAX
        && match first {
            b'_' | b'$' => key.len() > 1,
            _ => !first.is_ascii_punctuation() && first != b' ',
        }
        && !key.iter().any(|b| b.is_ascii_control() || matches!(b, b'.' | b'['))
        && std::str::from_utf8(key).is_ok()
}

pub fn is_system_key(key: &[u8]) -> bool {
    key.first() == Some(&b'_')
}

pub fn is_virtual_key(key: &[u8]) -> bool {
    key.first() == Some(&b'$')
}

/// Cuts an inflated value into (xattr section with its length prefix, body), by its datatype. Without the XATTR bit
/// the section is empty. Only the outer length is checked.
pub fn split(value: &[u8], datatype: Datatype) -> Result<(&[u8], &[u8]), XattrError> {
    if !datatype.has(Datatype::XATTR) {
        return Ok((&[], value));
    }
    let truncated = |claimed| XattrError::Truncated { claimed, available: value.len() };
    let prefix = value.first_chunk::<PREFIX>().ok_or(truncated(PREFIX))?;
    let claimed = PREFIX.saturating_add(u32::from_be_bytes(*prefix) as usize);
    value.split_at_checked(claimed).ok_or(truncated(claimed))
}

/// The body of an inflated value.
pub fn body(value: &[u8], datatype: Datatype) -> Result<&[u8], XattrError> {
    Ok(split(value, datatype)?.1)
}

/// The pairs of a section (with its length prefix; empty means none), in stored order. Ends after the first fault.
pub fn pairs(section: &[u8]) -> Pairs<'_> {
    Pairs { section, at: PREFIX }
}

/// See [`pairs`].
#[derive(Clone, Debug)]
pub struct Pairs<'a> {
    section: &'a [u8],
    at: usize,
}

impl<'a> Pairs<'a> {
    fn pair(&self) -> Option<(&'a [u8], &'a [u8], usize)> {
        let rest = self.section.get(self.at..)?;
        let n = u32::from_be_bytes(*rest.first_chunk::<PREFIX>()?) as usize;
        let pair = rest[PREFIX..].get(..n)?;
        let nul = pair.iter().position(|&b| b == 0)?;
        let value = pair[nul + 1..].strip_suffix(&[0])?;
        Some((&pair[..nul], value, PREFIX + n))
    }
}

impl<'a> Iterator for Pairs<'a> {
    type Item = Result<(&'a [u8], &'a [u8]), XattrError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.at >= self.section.len() {
            return None;
        }
        match self.pair() {
            Some((key, value, len)) => {
                self.at += len;
                Some(Ok((key, value)))
            }
            None => {
                let offset = self.at;
                self.at = self.section.len();
                Some(Err(XattrError::Frame { offset }))
            }
        }
    }
}

/// Checks all of an inflated value with the XATTR bit: frames, keys (allowed, unique, none virtual), values (JSON).
pub fn validate(value: &[u8]) -> Result<(), XattrError> {
    let (section, _) = split(value, Datatype::XATTR)?;
    let mut seen: Vec<(&[u8], usize)> = Vec::new();
    let mut pairs = pairs(section);
    let mut offset = PREFIX;
    while let Some(pair) = pairs.next() {
        let (key, json) = pair?;
        let key_at = offset + PREFIX;
        if !is_valid_key(key) || is_virtual_key(key) {
            return Err(XattrError::Key { offset: key_at });
        }
        if !json::is_json(json) {
            return Err(XattrError::Value { offset: key_at + key.len() + 1 });
        }
        seen.push((key, key_at));
        offset = pairs.at;
        debug_assert_eq!(offset, key_at + key.len() + json.len() + 2);
    }
    // Sorted rather than compared pairwise: a section may hold a million tiny pairs.
    seen.sort_unstable();
    match seen.windows(2).find(|two| two[0].0 == two[1].0) {
        Some(two) => Err(XattrError::Duplicate { offset: two[1].1 }),
        None => Ok(()),
    }
}

/// The value of one xattr.
pub fn get<'a>(section: &'a [u8], key: &[u8]) -> Result<Option<&'a [u8]>, XattrError> {
    for pair in pairs(section) {
        let (name, value) = pair?;
        if name == key {
            return Ok(Some(value));
        }
    }
    Ok(None)
}

/// Bytes of a section by owner: names and values with their frames. The length prefix counts as the system's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sizes {
    pub system_bytes: usize,
    pub user_bytes: usize,
}

/// How the bytes of a section divide between system and user xattrs.
pub fn sizes(section: &[u8]) -> Result<Sizes, XattrError> {
    let mut sizes = Sizes { system_bytes: section.len().min(PREFIX), user_bytes: 0 };
    for pair in pairs(section) {
        let (key, value) = pair?;
        let bytes = pair_len(key, value);
        *if is_system_key(key) { &mut sizes.system_bytes } else { &mut sizes.user_bytes } += bytes;
    }
    Ok(sizes)
}

/// The section that is left of `section` when a document is deleted: system xattrs only. Empty when none are left.
pub fn keep_system(section: &[u8]) -> Result<Vec<u8>, XattrError> {
    let mut xattrs = Xattrs::parse(section)?;
    xattrs.retain_system();
    Ok(xattrs.to_section())
}

fn pair_len(key: &[u8], value: &[u8]) -> usize {
    PREFIX + key.len() + value.len() + 2
}

/// Key and value.
type Pair<'a> = (Cow<'a, [u8]>, Cow<'a, [u8]>);

/// A section taken apart for editing.
/// 1. Keys are unique: `set` replaces.
/// 2. What is not touched stays borrowed and is written back in the same order, byte for byte.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Xattrs<'a> {
    pairs: Vec<Pair<'a>>,
}

impl<'a> Xattrs<'a> {
    /// Of a section with its length prefix; an empty slice has none.
    pub fn parse(section: &'a [u8]) -> Result<Xattrs<'a>, XattrError> {
        let pairs = pairs(section).map(|pair| pair.map(|(k, v)| (Cow::Borrowed(k), Cow::Borrowed(v))));
        Ok(Xattrs { pairs: pairs.collect::<Result<_, _>>()? })
    }

    pub fn is_empty(&self) -> bool {
        self.pairs.is_empty()
    }

    pub fn iter(&self) -> impl Iterator<Item = (&[u8], &[u8])> {
        self.pairs.iter().map(|(key, value)| (key.as_ref(), value.as_ref()))
    }

    pub fn get(&self, key: &[u8]) -> Option<&[u8]> {
        self.pairs.iter().find(|(name, _)| name.as_ref() == key).map(|(_, value)| value.as_ref())
    }

    /// The caller has checked that `key` is valid and `value` is JSON.
    pub fn set(&mut self, key: &[u8], value: Vec<u8>) {
        match self.pairs.iter_mut().find(|(name, _)| name.as_ref() == key) {
            Some(pair) => pair.1 = Cow::Owned(value),
            None => self.pairs.push((Cow::Owned(key.to_vec()), Cow::Owned(value))),
        }
    }

    /// Whether there was one.
    pub fn remove(&mut self, key: &[u8]) -> bool {
        let before = self.pairs.len();
        self.pairs.retain(|(name, _)| name.as_ref() != key);
        self.pairs.len() < before
    }

    pub fn retain_system(&mut self) {
        self.pairs.retain(|(name, _)| is_system_key(name));
    }

    /// Bytes of [`Xattrs::to_section`].
    pub fn section_len(&self) -> usize {
        let pairs: usize = self.iter().map(|(key, value)| pair_len(key, value)).sum();
        if self.is_empty() { 0 } else { PREFIX + pairs }
    }

    /// Where in the section the value of each pair begins, in order.
    pub(crate) fn value_offsets(&self) -> impl Iterator<Item = (&[u8], usize)> {
        let mut at = PREFIX;
        self.iter().map(move |(key, value)| {
            let offset = at + PREFIX + key.len() + 1;
            at += pair_len(key, value);
            (key, offset)
        })
    }

    /// The section with its length prefix; empty (and then the value must not carry the XATTR bit) when no pair is left.
    pub fn to_section(&self) -> Vec<u8> {
        let len = self.section_len();
        let mut section = Vec::with_capacity(len);
        if len > 0 {
            section.extend_from_slice(&be(len - PREFIX));
        }
        for (key, value) in self.iter() {
            section.extend_from_slice(&be(key.len() + value.len() + 2));
            section.extend_from_slice(key);
            section.push(0);
            section.extend_from_slice(value);
            section.push(0);
        }
        section
    }
}

fn be(len: usize) -> [u8; PREFIX] {
    u32::try_from(len).expect("xattrs come out of frames far below 4 GiB").to_be_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SYNC: &[u8] = b"\0\0\0\x12\0\0\0\x0e_sync\0{\"r\":1}\0{}";

    fn value(pairs: &[(&[u8], &[u8])], body: &[u8]) -> Vec<u8> {
        let xattrs = Xattrs { pairs: pairs.iter().map(|&(k, v)| (Cow::Borrowed(k), Cow::Borrowed(v))).collect() };
        [xattrs.to_section(), body.to_vec()].concat()
    }

    #[test]
    fn the_worked_example_is_read_and_written() {
        assert_eq!(value(&[(b"_sync", b"{\"r\":1}")], b"{}"), SYNC);
        let (section, body) = split(SYNC, Datatype::XATTR | Datatype::JSON).unwrap();
        assert_eq!((section.len(), body), (22, &b"{}"[..]));
        assert_eq!(get(section, b"_sync"), Ok(Some(&b"{\"r\":1}"[..])));
        assert_eq!(get(section, b"other"), Ok(None));
        assert_eq!(validate(SYNC), Ok(()));
        assert_eq!(split(SYNC, Datatype::JSON), Ok((&b""[..], SYNC)));
    }

    #[test]
    fn keys_follow_the_rules_of_names() {
        for yes in ["a", "_s", "$d", "fifteen_bytes_k", "é", "a-b", "1st"] {
            assert!(is_valid_key(yes.as_bytes()), "{yes}");
        }
        for no in ["", "_", "$", "sixteen_bytes_ke", ".a", "-a", "a.b", "a[0]", "a\u{1}", "\u{7f}", "!x", "`a`", " a"] {
            assert!(!is_valid_key(no.as_bytes()), "{no}");
        }
        assert!(!is_valid_key(b"\xff"));
    }

    #[test]
    fn every_kind_of_damage_is_named_with_its_place() {
        let two = value(&[(b"a", b"1"), (b"b", b"2")], b"");
        assert_eq!(validate(&two), Ok(()));
        assert_eq!(validate(b"\0\0"), Err(XattrError::Truncated { claimed: 4, available: 2 }));
        assert_eq!(validate(b"\0\0\0\x09"), Err(XattrError::Truncated { claimed: 13, available: 4 }));
        assert_eq!(validate(&value(&[(b"a", b"1"), (b"a", b"2")], b"")), Err(XattrError::Duplicate { offset: 16 }));
        assert_eq!(validate(&value(&[(b"a", b"nope")], b"")), Err(XattrError::Value { offset: 10 }));
        assert_eq!(validate(&value(&[(b"a", b"1"), (b"$v", b"2")], b"")), Err(XattrError::Key { offset: 16 }));
        let mut broken = two.clone();
        broken[7] = 3; // the first pair is one byte short, so it does not end in 00
        assert_eq!(validate(&broken), Err(XattrError::Frame { offset: 4 }));
        broken[4] = 0xff;
        assert_eq!(validate(&broken), Err(XattrError::Frame { offset: 4 }));
        assert_eq!(validate(b"\0\0\0\x02\0\0"), Err(XattrError::Frame { offset: 4 }));
    }

    #[test]
    fn editing_one_pair_leaves_the_others_as_they_were() {
        let stored = value(&[(b"u", b" 1 "), (b"_s", b"2"), (b"w", b"3")], b"");
        let mut xattrs = Xattrs::parse(&stored).unwrap();
        xattrs.set(b"_s", b"22".to_vec());
        xattrs.set(b"new", b"4".to_vec());
        assert!(xattrs.remove(b"w"));
        assert!(!xattrs.remove(b"w"));
        let section = xattrs.to_section();
        assert_eq!(section, value(&[(b"u", b" 1 "), (b"_s", b"22"), (b"new", b"4")], b""));
        for (key, at) in xattrs.value_offsets() {
            assert!(section[at..].starts_with(xattrs.get(key).unwrap()));
        }
        assert_eq!(sizes(&section), Ok(Sizes { system_bytes: 4 + 4 + 2 + 2 + 2, user_bytes: 10 + 10 }));
        assert_eq!(keep_system(&section), Ok(value(&[(b"_s", b"22")], b"")));
        assert_eq!(keep_system(&value(&[(b"u", b"1")], b"")), Ok(Vec::new()));
    }
}
