//! Paths: `name.list[3].last[-1]`, with backticks around a name that holds `.`, `[` or `]`.
//! A name is kept as the raw text between the quotes of a JSON string, because that is what it is compared with.

use std::borrow::Cow;

use super::SubdocError;
use crate::json;

/// Bytes of the longest path.
pub const PATH_LEN_MAX: usize = 1024;
/// Components of the longest path, and containers a document may nest.
pub const LEVELS_MAX: usize = 32;

/// One step down into a document.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Component<'a> {
    /// The member whose key, as written between its quotes, is this.
    Key(Cow<'a, [u8]>),
    /// The element at this place, counted from 0.
    Index(usize),
    /// The last element.
    Last,
}

/// The way from the root of a document to a value in it. Empty: the root itself.
/// 1. At most [`LEVELS_MAX`] components.
/// 2. Keys are valid text for between the quotes of a JSON string, so they can be written as they are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Path<'a> {
    components: Vec<Component<'a>>,
}

impl<'a> Path<'a> {
    /// `PathInvalid` for bad syntax, `PathTooLong` for too many bytes or components.
    pub fn parse(text: &'a [u8]) -> Result<Path<'a>, SubdocError> {
        let mut path = Path::default();
        path.extend(text)?;
        Ok(path)
    }

    /// A path into one xattr: `first` stands for its key, `rest` is what followed the key: nothing, or more path
    /// that begins with `.` or `[`.
    pub(crate) fn below(first: &'a [u8], rest: &'a [u8]) -> Result<Path<'a>, SubdocError> {
        let mut path = Path { components: vec![Component::Key(Cow::Borrowed(first))] };
        match rest {
            [b'.'] => return Err(SubdocError::PathInvalid),
            [b'.', more @ ..] => path.extend(more)?,
            [b'[', ..] | [] => path.extend(rest)?,
            _ => return Err(SubdocError::PathInvalid),
        }
        Ok(path)
    }

    pub fn components(&self) -> &[Component<'a>] {
        &self.components
    }

    fn extend(&mut self, text: &'a [u8]) -> Result<(), SubdocError> {
        if text.len() > PATH_LEN_MAX {
            return Err(SubdocError::PathTooLong);
        }
        let mut at = 0;
        while at < text.len() {
            if text[at] == b'[' {
                let close = position(&text[at..], b']').ok_or(SubdocError::PathInvalid)?;
                self.push(index(&text[at + 1..at + close])?)?;
                at += close + 1;
            } else {
                let (key, len) = if text[at] == b'`' { quoted(&text[at + 1..])? } else { plain(&text[at..]) };
                if (key.is_empty() && len == 0) || !json::is_string_content(&key) {
                    return Err(SubdocError::PathInvalid);
                }
                self.push(Component::Key(key))?;
                at += len;
            }
            match text.get(at) {
                // A dot may stand before an index too, since clients write `list.[0]`; but something has to follow it.
                Some(b'.') if at + 1 < text.len() => at += 1,
                None | Some(b'[') => {}
                Some(_) => return Err(SubdocError::PathInvalid),
            }
        }
        Ok(())
    }

    fn push(&mut self, component: Component<'a>) -> Result<(), SubdocError> {
        if self.components.len() == LEVELS_MAX {
            return Err(SubdocError::PathTooLong);
        }
        self.components.push(component);
        Ok(())
    }
}

fn position(text: &[u8], byte: u8) -> Option<usize> {
    text.iter().position(|&b| b == byte)
}

/// A bare name, and its length.
fn plain(text: &[u8]) -> (Cow<'_, [u8]>, usize) {
    let len = text.iter().position(|b| matches!(b, b'.' | b'[' | b']' | b'`')).unwrap_or(text.len());
    (Cow::Borrowed(&text[..len]), len)
}

/// A name in backticks, from behind the opening one; and its length with both of them.
fn quoted(text: &[u8]) -> Result<(Cow<'_, [u8]>, usize), SubdocError> {
    let mut key = Vec::new();
    let mut from = 0;
    loop {
        let len = position(&text[from..], b'`').ok_or(SubdocError::PathInvalid)?;
        let end = from + len;
        if text.get(end + 1) == Some(&b'`') {
            key.extend_from_slice(&text[from..=end]);
            from = end + 2;
        } else if from == 0 {
            return Ok((Cow::Borrowed(&text[..end]), end + 2));
        } else {
            key.extend_from_slice(&text[from..end]);
            return Ok((Cow::Owned(key), end + 2));
        }
    }
}

fn index<'a>(digits: &[u8]) -> Result<Component<'a>, SubdocError> {
    match digits {
        b"-1" => Ok(Component::Last),
        b"0" => Ok(Component::Index(0)),
        [b'1'..=b'9', rest @ ..] if rest.iter().all(u8::is_ascii_digit) => {
            let number = std::str::from_utf8(digits).ok().and_then(|text| text.parse::<u32>().ok());
            number.map(|n| Component::Index(n as usize)).ok_or(SubdocError::PathInvalid)
        }
        _ => Err(SubdocError::PathInvalid),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(text: &str) -> Result<Vec<String>, SubdocError> {
        let show = |component: &Component<'_>| match component {
            Component::Key(key) => String::from_utf8(key.to_vec()).unwrap(),
            Component::Index(n) => format!("#{n}"),
            Component::Last => "#last".to_owned(),
        };
        Ok(Path::parse(text.as_bytes())?.components().iter().map(show).collect())
    }

    #[test]
    fn paths_are_cut_at_dots_and_brackets_but_not_inside_backticks() {
        for (text, parts) in [
            ("", &[][..]),
            ("a", &["a"]),
            ("a.b", &["a", "b"]),
            ("a[0].b[-1]", &["a", "#0", "b", "#last"]),
            ("[10][2]", &["#10", "#2"]),
            ("[1].x", &["#1", "x"]),
            ("a.[0].[-1].b", &["a", "#0", "#last", "b"]),
            ("`a.b`.`c[0]`", &["a.b", "c[0]"]),
            ("`tick``tock`", &["tick`tock"]),
            ("````", &["`"]),
            ("``", &[""]),
            ("`a`[3]", &["a", "#3"]),
            ("q\\\"uote", &["q\\\"uote"]),
            ("ключ. b ", &["ключ", " b "]),
        ] {
            assert_eq!(shown(text).unwrap(), parts, "{text}");
        }
    }

    #[test]
    fn broken_paths_are_refused() {
        for text in [
            ".",
            "a.",
            ".a",
            "a..b",
            "a[",
            "a]",
            "a[]",
            "a[x]",
            "a[-2]",
            "a[01]",
            "a[+1]",
            "a[0]b",
            "`a",
            "a`b",
            "`a`b",
            "a\"b",
            "a\\",
            "a\\x",
            "\n",
            "[4294967296]",
            "[0].",
        ] {
            assert_eq!(shown(text), Err(SubdocError::PathInvalid), "{text}");
        }
        assert_eq!(Path::parse(b"\xff"), Err(SubdocError::PathInvalid));
    }

    #[test]
    fn long_paths_are_refused() {
        assert_eq!(shown(&["a"; 32].join(".")).unwrap().len(), 32);
        assert_eq!(shown(&["a"; 33].join(".")), Err(SubdocError::PathTooLong));
        assert_eq!(shown(&"[0]".repeat(33)), Err(SubdocError::PathTooLong));
        assert_eq!(shown(&"a".repeat(1024)).unwrap().len(), 1);
        assert_eq!(shown(&"a".repeat(1025)), Err(SubdocError::PathTooLong));
    }

    #[test]
    fn an_xattr_path_continues_behind_the_key() {
        let parts = |rest: &'static [u8]| Path::below(b"k", rest).map(|path| path.components().len());
        assert_eq!(parts(b""), Ok(1));
        assert_eq!(parts(b".a.b"), Ok(3));
        assert_eq!(parts(b"[0]"), Ok(2));
        assert_eq!(parts(b"."), Err(SubdocError::PathInvalid));
        assert_eq!(parts(b".[0]"), Ok(2));
    }
}
