//! Following a path through raw JSON text. What lies beside the path is stepped over, what lies behind the match is
//! not looked at, so the start of a large document is found at the cost of its start.

use std::ops::Range;

use super::{Component, LEVELS_MAX, SubdocError};
use crate::json::{self, Fault};

impl From<Fault> for SubdocError {
    fn from(fault: Fault) -> SubdocError {
        match fault {
            Fault::Syntax => SubdocError::DocNotJson,
            Fault::TooDeep => SubdocError::DocTooDeep,
        }
    }
}

/// Where the path ended.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Walk {
    Hit(Hit),
    Miss(Miss),
}

/// A value that is there.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Hit {
    pub value: Range<usize>,
    /// Where the member (with its key) or element begins.
    pub start: usize,
    /// Where the one before it in the same container ends.
    pub previous_end: Option<usize>,
    /// Containers around the value.
    pub levels: usize,
}

/// The innermost container that is there lacks the next component.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Miss {
    /// The first component that is not there.
    pub component: usize,
    pub in_array: bool,
    /// What the container holds.
    pub count: usize,
    /// Where one more would go: behind the last, or behind the opening bracket.
    pub insert_at: usize,
    /// Containers around what would be inserted.
    pub levels: usize,
}

/// Looks for the value at `components`. `PathMismatch` when the path keys an array or a scalar or indexes what is not
/// an array.
pub(super) fn walk(text: &[u8], components: &[Component<'_>]) -> Result<Walk, SubdocError> {
    let mut at = json::skip_space(text, 0);
    let (mut start, mut previous_end) = (at, None);
    for (levels, component) in components.iter().enumerate() {
        match (component, text.get(at)) {
            (_, None) => return Err(SubdocError::DocNotJson),
            (Component::Key(_), Some(b'{')) | (Component::Index(_) | Component::Last, Some(b'[')) => {}
            _ => return Err(SubdocError::PathMismatch),
        }
        let mut elements = Elements::open(text, at, levels)?;
        let in_array = elements.close == b']';
        let mut found = None;
        while let Some(element) = elements.next()? {
            let matches = match component {
                Component::Key(key) => text[element.key.clone()] == **key,
                Component::Index(index) => elements.count == index + 1,
                Component::Last => true,
            };
            if matches {
                found = Some((element, elements.previous_end));
                if !matches!(component, Component::Last) {
                    break;
                }
            }
        }
        match found {
            Some((element, previous)) => (at, start, previous_end) = (element.value, element.start, previous),
            None => {
                let insert_at = elements.previous_end.unwrap_or(at + 1);
                let (component, count) = (levels, elements.count);
                return Ok(Walk::Miss(Miss { component, in_array, count, insert_at, levels: levels + 1 }));
            }
        }
    }
    let levels = components.len();
    let end = json::value(text, at, LEVELS_MAX - levels)?.end;
    Ok(Walk::Hit(Hit { value: at..end, start, previous_end, levels }))
}

#[derive(Clone, Debug)]
pub(super) struct Element {
    /// Where it begins, with its key.
    pub start: usize,
    /// The key between its quotes; empty in an array.
    pub key: Range<usize>,
    /// Where its value begins.
    pub value: usize,
}

/// The members or elements of one container. A value is stepped over only when the next one is asked for, so whoever
/// found what it wanted has not paid for it.
#[derive(Debug)]
pub(super) struct Elements<'a> {
    text: &'a [u8],
    at: usize,
    pub close: u8,
    levels: usize,
    pending: Option<usize>,
    /// How many were given out.
    pub count: usize,
    /// Where the one before the current one ends; at the end of the container, where the last one ends.
    pub previous_end: Option<usize>,
}

impl<'a> Elements<'a> {
    /// Of the container whose bracket is at `at` and which has `levels` containers around it.
    pub fn open(text: &'a [u8], at: usize, levels: usize) -> Result<Elements<'a>, SubdocError> {
        if levels >= LEVELS_MAX {
            return Err(SubdocError::DocTooDeep);
        }
        let close = text[at] + 2;
        Ok(Elements { text, at: at + 1, close, levels: levels + 1, pending: None, count: 0, previous_end: None })
    }

    pub fn next(&mut self) -> Result<Option<Element>, SubdocError> {
        if let Some(value) = self.pending.take() {
            self.at = json::value(self.text, value, LEVELS_MAX - self.levels)?.end;
            self.previous_end = Some(self.at);
        }
        let mut start = json::skip_space(self.text, self.at);
        match self.text.get(start) {
            Some(&byte) if byte == self.close => return Ok(None),
            Some(b',') if self.count > 0 => start = json::skip_space(self.text, start + 1),
            Some(_) if self.count == 0 => {}
            _ => return Err(SubdocError::DocNotJson),
        }
        let (key, value) = if self.close == b'}' {
            let (quote, value) = json::key(self.text, start)?;
            (start + 1..quote, value)
        } else {
            (start..start, start)
        };
        self.pending = Some(value);
        self.count += 1;
        Ok(Some(Element { start, key, value }))
    }
}
