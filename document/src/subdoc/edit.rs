//! The operations on one JSON text. Each is a single splice: one range of the text makes way for new bytes, all other
//! bytes stay as they are.

use std::ops::Range;

use super::walk::{Elements, Hit, Miss, Walk, walk};
use super::{Component, LEVELS_MAX, Path, SubdocError};
use crate::json::{self, Fault};

/// A change to a value at a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    DictAdd,
    DictUpsert,
    Delete,
    Replace,
    PushLast,
    PushFirst,
    Insert,
    AddUnique,
    Counter,
}

/// What a change does to the text: `replaced` makes way for `text`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Edit {
    pub replaced: Range<usize>,
    pub text: Vec<u8>,
    /// Where in `text` the caller's value begins.
    pub value_offset: usize,
    /// The new number of a counter.
    pub result: Option<Vec<u8>>,
}

impl Edit {
    pub fn apply(&self, document: &mut Vec<u8>) {
        document.splice(self.replaced.clone(), self.text.iter().copied());
    }
}

/// The text of the value at `path`.
pub fn get<'a>(document: &'a [u8], path: &Path<'_>) -> Result<&'a [u8], SubdocError> {
    Ok(&document[find(document, path)?])
}

/// Where the value at `path` is.
pub fn find(document: &[u8], path: &Path<'_>) -> Result<Range<usize>, SubdocError> {
    Ok(hit(document, path)?.value)
}

pub fn exists(document: &[u8], path: &Path<'_>) -> Result<(), SubdocError> {
    hit(document, path).map(drop)
}

/// How many members or elements the container at `path` has.
pub fn count(document: &[u8], path: &Path<'_>) -> Result<usize, SubdocError> {
    let hit = hit(document, path)?;
    if !matches!(document[hit.value.start], b'{' | b'[') {
        return Err(SubdocError::PathMismatch);
    }
    let mut elements = Elements::open(document, hit.value.start, hit.levels)?;
    while elements.next()?.is_some() {}
    Ok(elements.count)
}

/// Works out `change` at `path` with `value` (unused by `Delete`), without applying it. With `make_parents`, objects
/// missing on the way are created; array elements never are.
pub fn plan(
    document: &[u8],
    path: &Path<'_>,
    change: Change,
    value: &[u8],
    make_parents: bool,
) -> Result<Edit, SubdocError> {
    let components = path.components();
    let place = Place { document, components, make_parents };
    match change {
        Change::DictAdd | Change::DictUpsert => {
            let Some(Component::Key(_)) = components.last() else { return Err(SubdocError::PathInvalid) };
            let value = Value::single(value)?;
            match walk(document, components)? {
                Walk::Hit(_) if change == Change::DictAdd => Err(SubdocError::PathExists),
                Walk::Hit(hit) => replace(hit, &value),
                Walk::Miss(miss) => place.create(&miss, &value, Wrap::None),
            }
        }
        Change::Delete => {
            if components.is_empty() {
                return Err(SubdocError::PathInvalid);
            }
            Ok(delete(document, hit(document, path)?))
        }
        Change::Replace => {
            if components.is_empty() {
                return Err(SubdocError::PathInvalid);
            }
            let value = Value::single(value)?;
            replace(hit(document, path)?, &value)
        }
        Change::PushLast | Change::PushFirst => {
            let value = Value::list(value)?;
            match walk(document, components)? {
                Walk::Hit(hit) => push(document, &hit, &value, change == Change::PushFirst),
                Walk::Miss(miss) => place.create(&miss, &value, Wrap::Array),
            }
        }
        Change::Insert => place.insert(&Value::list(value)?),
        Change::AddUnique => {
            let value = Value::single(value)?;
            if value.levels > 0 {
                return Err(SubdocError::ValueCantInsert);
            }
            match walk(document, components)? {
                Walk::Hit(hit) => add_unique(document, &hit, &value),
                Walk::Miss(miss) => place.create(&miss, &value, Wrap::Array),
            }
        }
        Change::Counter => place.counter(value),
    }
}

fn hit(document: &[u8], path: &Path<'_>) -> Result<Hit, SubdocError> {
    match walk(document, path.components())? {
        Walk::Hit(hit) => Ok(hit),
        Walk::Miss(_) => Err(SubdocError::PathNotFound),
    }
}

/// What the client wants stored: checked JSON without white space around it.
struct Value<'a> {
    text: &'a [u8],
    levels: usize,
}

impl<'a> Value<'a> {
    /// Exactly one JSON value.
    fn single(text: &'a [u8]) -> Result<Value<'a>, SubdocError> {
        let (value, count) = Value::parse(text)?;
        if count == 1 { Ok(value) } else { Err(SubdocError::ValueCantInsert) }
    }

    /// One or more, with commas between.
    fn list(text: &'a [u8]) -> Result<Value<'a>, SubdocError> {
        Ok(Value::parse(text)?.0)
    }

    fn parse(text: &'a [u8]) -> Result<(Value<'a>, usize), SubdocError> {
        let start = json::skip_space(text, 0);
        let (mut at, mut levels, mut count) = (start, 0, 0);
        loop {
            let scanned = json::value(text, at, LEVELS_MAX).map_err(|fault| match fault {
                Fault::Syntax => SubdocError::ValueCantInsert,
                Fault::TooDeep => SubdocError::ValueTooDeep,
            })?;
            levels = levels.max(scanned.levels);
            count += 1;
            at = json::skip_space(text, scanned.end);
            match text.get(at) {
                None => return Ok((Value { text: &text[start..scanned.end], levels }, count)),
                Some(b',') => at = json::skip_space(text, at + 1),
                Some(_) => return Err(SubdocError::ValueCantInsert),
            }
        }
    }

    fn fits_below(&self, levels: usize) -> Result<(), SubdocError> {
        if levels + self.levels > LEVELS_MAX { Err(SubdocError::ValueTooDeep) } else { Ok(()) }
    }
}

/// What a new value is put into when nothing is there.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Wrap {
    None,
    Array,
}

fn replace(hit: Hit, value: &Value<'_>) -> Result<Edit, SubdocError> {
    value.fits_below(hit.levels)?;
    Ok(Edit { replaced: hit.value, text: value.text.to_vec(), value_offset: 0, result: None })
}

fn delete(document: &[u8], hit: Hit) -> Edit {
    let behind = json::skip_space(document, hit.value.end);
    let replaced = if document.get(behind) == Some(&b',') {
        hit.start..json::skip_space(document, behind + 1)
    } else {
        hit.previous_end.unwrap_or(hit.start)..hit.value.end
    };
    Edit { replaced, text: Vec::new(), value_offset: 0, result: None }
}

/// Puts `value` behind the `count` others that end at `at`.
fn append(at: usize, count: usize, value: &Value<'_>) -> Edit {
    let mut text = Vec::with_capacity(value.text.len() + 1);
    if count > 0 {
        text.push(b',');
    }
    let value_offset = text.len();
    text.extend_from_slice(value.text);
    Edit { replaced: at..at, text, value_offset, result: None }
}

/// Puts `value` in front of the element that begins at `at`.
fn prepend(at: usize, value: &Value<'_>) -> Edit {
    let mut text = Vec::with_capacity(value.text.len() + 1);
    text.extend_from_slice(value.text);
    text.push(b',');
    Edit { replaced: at..at, text, value_offset: 0, result: None }
}

fn array<'a>(document: &'a [u8], hit: &Hit) -> Result<Elements<'a>, SubdocError> {
    if document[hit.value.start] != b'[' {
        return Err(SubdocError::PathMismatch);
    }
    Elements::open(document, hit.value.start, hit.levels)
}

fn push(document: &[u8], hit: &Hit, value: &Value<'_>, first: bool) -> Result<Edit, SubdocError> {
    let mut elements = array(document, hit)?;
    value.fits_below(hit.levels + 1)?;
    while let Some(element) = elements.next()? {
        if first {
            return Ok(prepend(element.start, value));
        }
    }
    Ok(append(elements.previous_end.unwrap_or(hit.value.start + 1), elements.count, value))
}

fn add_unique(document: &[u8], hit: &Hit, value: &Value<'_>) -> Result<Edit, SubdocError> {
    let mut elements = array(document, hit)?;
    let mut present = false;
    while let Some(element) = elements.next()? {
        if matches!(document.get(element.value), Some(b'{' | b'[')) {
            return Err(SubdocError::PathMismatch);
        }
        let rest = &document[element.value..];
        // A scalar ends where the text of the same scalar does, or goes on.
        present |= rest.starts_with(value.text) && json::value(rest, 0, 0)?.end == value.text.len();
    }
    if present {
        return Err(SubdocError::PathExists);
    }
    value.fits_below(hit.levels + 1)?;
    Ok(append(elements.previous_end.unwrap_or(hit.value.start + 1), elements.count, value))
}

struct Place<'a> {
    document: &'a [u8],
    components: &'a [Component<'a>],
    make_parents: bool,
}

impl Place<'_> {
    /// Writes what is missing from `miss` on: the last member always, its parents only if they may be made.
    fn create(&self, miss: &Miss, value: &Value<'_>, wrap: Wrap) -> Result<Edit, SubdocError> {
        let missing = &self.components[miss.component..];
        let only_leaf = missing.len() == 1 && wrap == Wrap::None;
        if miss.in_array || !(only_leaf || self.make_parents) {
            return Err(SubdocError::PathNotFound);
        }
        let wrapped = usize::from(wrap == Wrap::Array);
        value.fits_below(miss.levels + missing.len() - 1 + wrapped)?;
        let mut text = Vec::new();
        if miss.count > 0 {
            text.push(b',');
        }
        for (n, component) in missing.iter().enumerate() {
            let Component::Key(key) = component else { return Err(SubdocError::PathNotFound) };
            text.extend_from_slice(if n == 0 { b"\"" } else { b"{\"" });
            text.extend_from_slice(key);
            text.extend_from_slice(b"\":");
        }
        text.extend_from_slice(&b"["[..wrapped]);
        let value_offset = text.len();
        text.extend_from_slice(value.text);
        text.extend_from_slice(&b"]"[..wrapped]);
        text.resize(text.len() + missing.len() - 1, b'}');
        Ok(Edit { replaced: miss.insert_at..miss.insert_at, text, value_offset, result: None })
    }

    fn insert(&self, value: &Value<'_>) -> Result<Edit, SubdocError> {
        let Some(Component::Index(index)) = self.components.last() else { return Err(SubdocError::PathInvalid) };
        match walk(self.document, self.components)? {
            Walk::Hit(hit) => {
                value.fits_below(hit.levels)?;
                Ok(prepend(hit.start, value))
            }
            Walk::Miss(miss) if miss.component + 1 == self.components.len() && miss.count == *index => {
                value.fits_below(miss.levels)?;
                Ok(append(miss.insert_at, miss.count, value))
            }
            Walk::Miss(_) => Err(SubdocError::PathNotFound),
        }
    }

    fn counter(&self, delta: &[u8]) -> Result<Edit, SubdocError> {
        if self.components.is_empty() {
            return Err(SubdocError::PathInvalid);
        }
        let delta = match Integer::parse(delta.trim_ascii()) {
            Integer::Fits(delta) if delta != 0 => delta,
            _ => return Err(SubdocError::DeltaInvalid),
        };
        let found = walk(self.document, self.components)?;
        let old = match &found {
            Walk::Miss(_) => 0,
            Walk::Hit(hit) => match Integer::parse(&self.document[hit.value.clone()]) {
                Integer::Fits(old) => old,
                Integer::TooLarge => return Err(SubdocError::NumRange),
                Integer::None => return Err(SubdocError::PathMismatch),
            },
        };
        let sum = old.checked_add(delta).ok_or(SubdocError::ValueCantInsert)?.to_string().into_bytes();
        let value = Value { text: &sum, levels: 0 };
        let edit = match found {
            Walk::Hit(hit) => replace(hit, &value)?,
            Walk::Miss(miss) => self.create(&miss, &value, Wrap::None)?,
        };
        Ok(Edit { result: Some(sum), ..edit })
    }
}

/// What a text is as a whole number, in JSON's spelling.
enum Integer {
    Fits(i64),
    TooLarge,
    None,
}

impl Integer {
    fn parse(text: &[u8]) -> Integer {
        let digits = text.strip_prefix(b"-").unwrap_or(text);
        let spelled = matches!(digits, [b'0'] | [b'1'..=b'9', ..]) && digits.iter().all(u8::is_ascii_digit);
        match std::str::from_utf8(text) {
            Ok(text) if spelled => text.parse().map_or(Integer::TooLarge, Integer::Fits),
            _ => Integer::None,
        }
    }
}
