//! Sub-document layouts: how the operations of a multi-path request follow each other, and which of them take a
//! value or do without a path. What the operations mean is not known here.

use crate::frame::{u16_at, u32_at};

/// Longest path, in bytes.
pub const PATH_LEN_MAX: usize = 1024;
/// Most operations in one multi-path request.
pub const SPEC_COUNT_MAX: usize = 16;

/// Bits of an operation's path flags.
pub mod path_flag {
    /// Create missing parents.
    pub const MKDIR_P: u8 = 0x01;
    /// The path leads into the extended attributes.
    pub const XATTR: u8 = 0x04;
    /// The value is a macro to expand.
    pub const EXPAND_MACROS: u8 = 0x10;
    /// The value is binary, stored as base64.
    pub const BINARY_VALUE: u8 = 0x20;
}

/// Bits of a request's document flags.
pub mod doc_flag {
    /// Create the document if it is missing.
    pub const MKDOC: u8 = 0x01;
    /// The document must not exist.
    pub const ADD: u8 = 0x02;
    pub const ACCESS_DELETED: u8 = 0x04;
    pub const CREATE_AS_DELETED: u8 = 0x08;
    pub const REVIVE_DOCUMENT: u8 = 0x10;
    pub const REPLICA_READ: u8 = 0x20;
}

/// Operations on the whole document, which exist inside multi-path requests only.
pub mod whole_doc {
    pub const GET: u8 = 0x00;
    pub const SET: u8 = 0x01;
    pub const DELETE: u8 = 0x04;
}

/// What a single-path operation is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    pub mutation: bool,
    pub takes_value: bool,
    pub empty_path: bool,
}

/// The shape of a single-path operation; `None` for any other opcode.
pub const fn shape(code: u8) -> Option<Shape> {
    let (mutation, takes_value, empty_path) = match code {
        0xc5 | 0xc6 => (false, false, false),
        0xd2 => (false, false, true),
        0xc7 | 0xc8 | 0xca | 0xcd | 0xcf => (true, true, false),
        0xc9 | 0xd3 => (true, false, false),
        0xcb | 0xcc | 0xce => (true, true, true),
        _ => return None,
    };
    Some(Shape { mutation, takes_value, empty_path })
}

/// One operation of a multi-path request, as sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Spec<'a> {
    pub opcode: u8,
    pub path_flags: u8,
    pub path: &'a [u8],
    /// Empty in lookups.
    pub value: &'a [u8],
}

/// The bytes end inside an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Truncated;

/// The operations of a multi-path request, in order. Ends after the first error. Neither their count nor what they
/// are has been checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Specs<'a> {
    rest: &'a [u8],
    mutation: bool,
}

impl<'a> Specs<'a> {
    pub const fn of_lookup(value: &'a [u8]) -> Specs<'a> {
        Specs { rest: value, mutation: false }
    }

    pub const fn of_mutation(value: &'a [u8]) -> Specs<'a> {
        Specs { rest: value, mutation: true }
    }

    /// The operations not yet walked, as sent.
    pub const fn bytes(&self) -> &'a [u8] {
        self.rest
    }

    fn split_first(&self) -> Option<(Spec<'a>, &'a [u8])> {
        let (head, rest) = self.rest.split_at_checked(if self.mutation { 8 } else { 4 })?;
        let value_len = if self.mutation { usize::try_from(u32_at(head, 4)).ok()? } else { 0 };
        let (path, rest) = rest.split_at_checked(usize::from(u16_at(head, 2)))?;
        let (value, rest) = rest.split_at_checked(value_len)?;
        Some((Spec { opcode: head[0], path_flags: head[1], path, value }, rest))
    }
}

impl<'a> Iterator for Specs<'a> {
    type Item = Result<Spec<'a>, Truncated>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.rest.is_empty() {
            return None;
        }
        let (spec, rest) = self.split_first().map_or((Err(Truncated), &[][..]), |(spec, rest)| (Ok(spec), rest));
        self.rest = rest;
        Some(spec)
    }
}

/// Appends an operation of a multi-path lookup, for clients.
///
/// # Panics
/// If the path is longer than its length field can say.
pub fn push_lookup(out: &mut Vec<u8>, opcode: u8, path_flags: u8, path: &[u8]) {
    out.extend_from_slice(&[opcode, path_flags]);
    out.extend_from_slice(&u16::try_from(path.len()).expect("a path of up to 64 KiB").to_be_bytes());
    out.extend_from_slice(path);
}

/// Appends an operation of a multi-path mutation, for clients.
///
/// # Panics
/// If the path or the value is longer than its length field can say.
pub fn push_mutation(out: &mut Vec<u8>, spec: &Spec<'_>) {
    out.extend_from_slice(&[spec.opcode, spec.path_flags]);
    out.extend_from_slice(&u16::try_from(spec.path.len()).expect("a path of up to 64 KiB").to_be_bytes());
    out.extend_from_slice(&u32::try_from(spec.value.len()).expect("a value of up to 4 GiB").to_be_bytes());
    out.extend_from_slice(spec.path);
    out.extend_from_slice(spec.value);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn specs_come_back_in_order_and_a_cut_one_is_an_error() {
        let one = Spec { opcode: 0xc8, path_flags: 0x15, path: b"_sync.cas", value: br#""${Mutation.CAS}""# };
        let two = Spec { opcode: 0xc9, path_flags: 0, path: b"a.b[0]", value: b"" };
        let mut bytes = Vec::new();
        push_mutation(&mut bytes, &one);
        push_mutation(&mut bytes, &two);
        assert_eq!(Specs::of_mutation(&bytes).collect::<Vec<_>>(), [Ok(one), Ok(two)]);
        let cut = Specs::of_mutation(&bytes[..bytes.len() - 1]).collect::<Vec<_>>();
        assert_eq!(cut, [Ok(one), Err(Truncated)]);
        assert_eq!(Specs::of_lookup(&[]).next(), None);
        assert_eq!(Specs::of_lookup(&[0xc5]).next(), Some(Err(Truncated)));
    }
}
