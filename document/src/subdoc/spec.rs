//! Requests: which operation may carry which flags, path and value, decided before any document is looked at.
//! One table has a row per operation; everything a request can get wrong is checked against its row.

use super::PATH_LEN_MAX;
use crate::xattr;

/// Specs of the longest multi request.
pub const SPECS_MAX: usize = 16;

/// Why a request was refused before its document was looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    #[error(
        "malformed: truncated specs, a missing or unexpected path or value, or a flag this operation does not take"
    )]
    Invalid,
    #[error("no specs, too many, or operations that do not go together")]
    InvalidCombo,
    #[error("these path flags need the xattr flag, or exclude each other")]
    XattrInvalidFlagCombo,
    #[error("specs with xattr paths must come before those with body paths")]
    InvalidXattrOrder,
    #[error("the path does not begin with a valid xattr key")]
    XattrInvalid,
    #[error("the connection did not enable the feature this flag belongs to")]
    NotSupported,
}

macro_rules! flags {
    ($(#[$doc:meta])* $name:ident { $($(#[$bit_doc:meta])* $bit:ident = $value:literal,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct $name(u8);

        impl $name {
            pub const NONE: $name = $name(0);
            $($(#[$bit_doc])* pub const $bit: $name = $name($value);)*
            const ALL: u8 = 0 $(| $value)*;

            /// `None` when a bit has no meaning.
            pub const fn from_bits(bits: u8) -> Option<$name> {
                if bits & !Self::ALL == 0 { Some($name(bits)) } else { None }
            }
            pub const fn bits(self) -> u8 {
                self.0
            }
            /// Whether any bit of `other` is set.
            pub const fn has(self, other: $name) -> bool {
                self.0 & other.0 != 0
            }
            #[must_use]
            pub const fn with(self, other: $name) -> $name {
                $name(self.0 | other.0)
            }
            const fn within(self, allowed: $name) -> bool {
                self.0 & !allowed.0 == 0
            }
        }
    };
}

flags!(/// How one spec's path and value are meant. The bits are the wire's.
PathFlags {
    /// Make missing parents.
    MKDIR_P = 0x01,
    /// The path leads into the xattrs.
    XATTR = 0x04,
    /// The value is a macro.
    EXPAND_MACROS = 0x10,
    /// The xattr holds bytes, not JSON.
    BINARY = 0x20,
});

flags!(/// What a request asks of the document as a whole. The bits are the wire's.
DocFlags {
    /// Create the document if it is missing. Implies `MKDIR_P`.
    MKDOC = 0x01,
    /// The document must be missing. Implies `MKDIR_P`.
    ADD = 0x02,
    ACCESS_DELETED = 0x04,
    CREATE_AS_DELETED = 0x08,
    REVIVE = 0x10,
    REPLICA_READ = 0x20,
});

impl DocFlags {
    /// Whether a missing document is to be created.
    pub const fn creates(self) -> bool {
        self.has(DocFlags(DocFlags::MKDOC.0 | DocFlags::ADD.0))
    }

    /// The rules among document flags themselves.
    fn check(self, with_cas: bool) -> Result<(), RequestError> {
        let wrong = (self.has(Self::MKDOC) && self.has(Self::ADD))
            || (self.has(Self::ADD) && with_cas)
            || (self.has(Self::REVIVE) && (!self.has(Self::ACCESS_DELETED) || self.has(Self::CREATE_AS_DELETED)));
        if wrong { Err(RequestError::Invalid) } else { Ok(()) }
    }
}

/// What the connection enabled, as far as sub-document requests depend on it. Binary values are not here: HELLO only
/// announces them, and clients use them on the word of the bucket's capabilities, without asking.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Features {
    pub xattr: bool,
    pub replica_read: bool,
}

/// An operation of one spec. The discriminants are the wire's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Op {
    GetDoc = 0x00,
    SetDoc = 0x01,
    DeleteDoc = 0x04,
    Get = 0xc5,
    Exists = 0xc6,
    DictAdd = 0xc7,
    DictUpsert = 0xc8,
    Delete = 0xc9,
    Replace = 0xca,
    PushLast = 0xcb,
    PushFirst = 0xcc,
    Insert = 0xcd,
    AddUnique = 0xce,
    Counter = 0xcf,
    GetCount = 0xd2,
    ReplaceBodyWithXattr = 0xd3,
}

/// What a spec of one operation may look like.
struct Row {
    op: Op,
    kind: Kind,
    needs_value: bool,
    path: PathRule,
    path_flags: u8,
    doc_flags: u8,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Lookup,
    Mutation,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum PathRule {
    Needed,
    MayBeEmpty,
    MustBeEmpty,
}

impl Op {
    #[rustfmt::skip]
    const ROWS: [Row; 16] = {
        use {Kind::{Lookup, Mutation}, PathRule::{MayBeEmpty, MustBeEmpty, Needed}};
        const P: u8 = 0x01;
        const X: u8 = 0x04;
        const M: u8 = 0x10;
        const B: u8 = 0x20;
        const READ: u8 = 0x04 | 0x10 | 0x20; // access deleted, revive, replica read
        const EDIT: u8 = 0x04 | 0x10;
        const MAKE: u8 = 0x01 | 0x02 | EDIT | 0x08; // the document may be created, dead or alive
        const NEW: u8 = 0x02 | EDIT;
        const fn row(op: Op, kind: Kind, needs_value: bool, path: PathRule, path_flags: u8, doc_flags: u8) -> Row {
            Row { op, kind, needs_value, path, path_flags, doc_flags }
        }
        [
            row(Op::GetDoc,               Lookup,   false, MustBeEmpty, 0,             READ),
            row(Op::SetDoc,               Mutation, true,  MustBeEmpty, 0,             0x01 | 0x02),
            row(Op::DeleteDoc,            Mutation, false, MustBeEmpty, 0,             EDIT),
            row(Op::Get,                  Lookup,   false, Needed,      X | B,         READ),
            row(Op::Exists,               Lookup,   false, Needed,      X,             READ),
            row(Op::GetCount,             Lookup,   false, MayBeEmpty,  X,             READ),
            row(Op::DictAdd,              Mutation, true,  Needed,      P | X | M | B, MAKE),
            row(Op::DictUpsert,           Mutation, true,  Needed,      P | X | M | B, MAKE),
            row(Op::Delete,               Mutation, false, Needed,      X,             EDIT),
            row(Op::Replace,              Mutation, true,  Needed,      X | M | B,     NEW),
            row(Op::PushLast,             Mutation, true,  MayBeEmpty,  P | X | M,     MAKE),
            row(Op::PushFirst,            Mutation, true,  MayBeEmpty,  P | X | M,     MAKE),
            row(Op::Insert,               Mutation, true,  Needed,      X | M,         NEW | 0x08),
            row(Op::AddUnique,            Mutation, true,  MayBeEmpty,  P | X,         MAKE),
            row(Op::Counter,              Mutation, true,  Needed,      P | X,         MAKE),
            row(Op::ReplaceBodyWithXattr, Mutation, false, Needed,      X | B,         EDIT),
        ]
    };

    fn row(opcode: u8) -> Option<&'static Row> {
        Op::ROWS.iter().find(|row| row.op as u8 == opcode)
    }

    /// The operation with this opcode, whole-document ones included.
    pub fn from_wire(opcode: u8) -> Option<Op> {
        Op::row(opcode).map(|row| row.op)
    }

    pub const fn is_whole_doc(self) -> bool {
        matches!(self, Op::GetDoc | Op::SetDoc | Op::DeleteDoc)
    }

    pub fn is_mutation(self) -> bool {
        Op::row(self as u8).is_some_and(|row| row.kind == Kind::Mutation)
    }
}

/// One read of a request. The path has at most 1024 bytes and is checked for syntax only when it is followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LookupSpec<'a> {
    pub op: Op,
    pub flags: PathFlags,
    pub path: &'a [u8],
}

/// One change of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MutationSpec<'a> {
    pub op: Op,
    pub flags: PathFlags,
    pub path: &'a [u8],
    pub value: &'a [u8],
}

impl<'a> LookupSpec<'a> {
    /// The xattr this spec reads. The caller checks whether the user may see it.
    pub fn xattr_key(&self) -> Option<&'a [u8]> {
        self.flags.has(PathFlags::XATTR).then(|| split_xattr_path(self.path).0)
    }
}

impl<'a> MutationSpec<'a> {
    /// The xattr this spec works on. The caller checks whether the user may change it.
    pub fn xattr_key(&self) -> Option<&'a [u8]> {
        self.flags.has(PathFlags::XATTR).then(|| split_xattr_path(self.path).0)
    }
}

/// The xattr key at the front of an xattr path, and what follows it.
pub(super) fn split_xattr_path(path: &[u8]) -> (&[u8], &[u8]) {
    path.split_at(path.iter().position(|b| matches!(b, b'.' | b'[')).unwrap_or(path.len()))
}

/// The spec of a single-path lookup: `body` is path and value as the request carries them.
pub fn single_lookup(
    opcode: u8,
    path_flags: u8,
    path_len: usize,
    body: &[u8],
    doc_flags: u8,
    features: Features,
) -> Result<(LookupSpec<'_>, DocFlags), RequestError> {
    let doc_flags = lookup_doc_flags(doc_flags, features)?;
    let (path, value) = body.split_at_checked(path_len).ok_or(RequestError::Invalid)?;
    let row = Op::row(opcode).filter(|row| row.kind == Kind::Lookup && !row.op.is_whole_doc());
    let row = row.ok_or(RequestError::Invalid)?;
    let flags = check(row, path_flags, path, value, doc_flags, features)?;
    Ok((LookupSpec { op: row.op, flags, path }, doc_flags))
}

/// The spec of a single-path mutation: `body` is path and value as the request carries them.
pub fn single_mutation(
    opcode: u8,
    path_flags: u8,
    path_len: usize,
    body: &[u8],
    doc_flags: u8,
    with_cas: bool,
    features: Features,
) -> Result<(MutationSpec<'_>, DocFlags), RequestError> {
    let doc_flags = mutation_doc_flags(doc_flags, with_cas)?;
    let (path, value) = body.split_at_checked(path_len).ok_or(RequestError::Invalid)?;
    let row = Op::row(opcode).filter(|row| row.kind == Kind::Mutation && !row.op.is_whole_doc());
    let row = row.ok_or(RequestError::Invalid)?;
    let flags = check(row, path_flags, path, value, doc_flags, features)?;
    // Requests with many specs may say so of a document that has to exist: transactions stage again what they staged.
    if doc_flags.has(DocFlags::CREATE_AS_DELETED) && !(doc_flags.creates() && flags.has(PathFlags::XATTR)) {
        return Err(RequestError::Invalid);
    }
    Ok((MutationSpec { op: row.op, flags, path, value }, doc_flags))
}

/// The specs of a multi-path lookup, from the request's value.
pub fn parse_lookup_specs(
    value: &[u8],
    doc_flags: u8,
    features: Features,
) -> Result<(Vec<LookupSpec<'_>>, DocFlags), RequestError> {
    let doc_flags = lookup_doc_flags(doc_flags, features)?;
    let mut specs = Vec::new();
    let mut rest = Fields(value);
    while !rest.0.is_empty() {
        let (row, flags) = rest.head(Kind::Lookup, specs.len())?;
        let path_len = rest.u16()?;
        let path = rest.take(path_len.into())?;
        let flags = check(row, flags, path, b"", doc_flags, features)?;
        specs.push(LookupSpec { op: row.op, flags, path });
    }
    check_order(specs.iter().map(|spec| spec.flags))?;
    Ok((specs, doc_flags))
}

/// The specs of a multi-path mutation, from the request's value. `with_cas`: the request has one that is not 0.
pub fn parse_mutation_specs(
    value: &[u8],
    doc_flags: u8,
    with_cas: bool,
    features: Features,
) -> Result<(Vec<MutationSpec<'_>>, DocFlags), RequestError> {
    let doc_flags = mutation_doc_flags(doc_flags, with_cas)?;
    let mut specs = Vec::new();
    let mut rest = Fields(value);
    while !rest.0.is_empty() {
        let (row, flags) = rest.head(Kind::Mutation, specs.len())?;
        let (path_len, value_len) = (rest.u16()?, rest.u32()?);
        let (path, value) = (rest.take(path_len.into())?, rest.take(value_len as usize)?);
        let flags = check(row, flags, path, value, doc_flags, features)?;
        specs.push(MutationSpec { op: row.op, flags, path, value });
    }
    check_order(specs.iter().map(|spec| spec.flags))?;
    let on_body = specs.iter().filter(|spec| !spec.flags.has(PathFlags::XATTR)).count();
    if on_body > 1 && specs.iter().any(|spec| spec.op.is_whole_doc()) {
        return Err(RequestError::InvalidCombo);
    }
    Ok((specs, doc_flags))
}

fn lookup_doc_flags(bits: u8, features: Features) -> Result<DocFlags, RequestError> {
    let flags = DocFlags::from_bits(bits).ok_or(RequestError::Invalid)?;
    if flags.has(DocFlags::REPLICA_READ) && !features.replica_read {
        return Err(RequestError::NotSupported);
    }
    flags.check(false)?;
    Ok(flags)
}

fn mutation_doc_flags(bits: u8, with_cas: bool) -> Result<DocFlags, RequestError> {
    let flags = DocFlags::from_bits(bits).ok_or(RequestError::Invalid)?;
    flags.check(with_cas)?;
    Ok(flags)
}

fn check(
    row: &Row,
    path_flags: u8,
    path: &[u8],
    value: &[u8],
    doc_flags: DocFlags,
    features: Features,
) -> Result<PathFlags, RequestError> {
    let flags = PathFlags::from_bits(path_flags).ok_or(RequestError::Invalid)?;
    let (macros, binary) = (flags.has(PathFlags::EXPAND_MACROS), flags.has(PathFlags::BINARY));
    let xattr = flags.has(PathFlags::XATTR);
    let path_fits = match row.path {
        PathRule::Needed => !path.is_empty(),
        PathRule::MayBeEmpty => true,
        PathRule::MustBeEmpty => path.is_empty(),
    };
    if !flags.within(PathFlags(row.path_flags))
        || !doc_flags.within(DocFlags(row.doc_flags))
        || path.len() > PATH_LEN_MAX
        || !path_fits
        || row.needs_value == value.is_empty()
    {
        return Err(RequestError::Invalid);
    }
    if (macros || binary) && (!xattr || (macros && binary)) {
        return Err(RequestError::XattrInvalidFlagCombo);
    }
    if row.op == Op::ReplaceBodyWithXattr && !xattr {
        return Err(RequestError::Invalid);
    }
    if xattr && !features.xattr {
        return Err(RequestError::NotSupported);
    }
    if xattr && !xattr::is_valid_key(split_xattr_path(path).0) {
        return Err(RequestError::XattrInvalid);
    }
    Ok(flags)
}

/// At least one spec, and those on xattrs first.
fn check_order(flags: impl Iterator<Item = PathFlags>) -> Result<(), RequestError> {
    let on_xattrs: Vec<bool> = flags.map(|flags| flags.has(PathFlags::XATTR)).collect();
    if on_xattrs.is_empty() {
        return Err(RequestError::InvalidCombo);
    }
    if on_xattrs.is_sorted_by(|before, after| before >= after) { Ok(()) } else { Err(RequestError::InvalidXattrOrder) }
}

/// What is left of the specs' bytes.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn head(&mut self, kind: Kind, seen: usize) -> Result<(&'static Row, u8), RequestError> {
        let head = self.take(2)?;
        let row = Op::row(head[0]).filter(|row| row.kind == kind && seen < SPECS_MAX);
        Ok((row.ok_or(RequestError::InvalidCombo)?, head[1]))
    }

    fn take(&mut self, len: usize) -> Result<&'a [u8], RequestError> {
        let (taken, rest) = self.0.split_at_checked(len).ok_or(RequestError::Invalid)?;
        self.0 = rest;
        Ok(taken)
    }

    fn u16(&mut self) -> Result<u16, RequestError> {
        let (bytes, rest) = self.0.split_first_chunk().ok_or(RequestError::Invalid)?;
        self.0 = rest;
        Ok(u16::from_be_bytes(*bytes))
    }

    fn u32(&mut self) -> Result<u32, RequestError> {
        let (bytes, rest) = self.0.split_first_chunk().ok_or(RequestError::Invalid)?;
        self.0 = rest;
        Ok(u32::from_be_bytes(*bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: Features = Features { xattr: true, replica_read: true };

    fn read(op: u8, flags: u8, path: &str) -> Vec<u8> {
        let mut spec = vec![op, flags];
        spec.extend((path.len() as u16).to_be_bytes());
        spec.extend(path.as_bytes());
        spec
    }

    fn write(op: u8, flags: u8, path: &str, value: &str) -> Vec<u8> {
        let mut spec = vec![op, flags];
        spec.extend((path.len() as u16).to_be_bytes());
        spec.extend((value.len() as u32).to_be_bytes());
        spec.extend(path.as_bytes());
        spec.extend(value.as_bytes());
        spec
    }

    fn lookup_error(bytes: &[u8], doc_flags: u8) -> Option<RequestError> {
        parse_lookup_specs(bytes, doc_flags, ALL).err()
    }

    fn mutation_error(bytes: &[u8], doc_flags: u8) -> Option<RequestError> {
        parse_mutation_specs(bytes, doc_flags, false, ALL).err()
    }

    #[test]
    fn the_worked_lookup_is_read() {
        let bytes = b"\xc5\x04\x00\x09$document\xc6\x00\x00\x01a";
        let (specs, flags) = parse_lookup_specs(bytes, 0, ALL).unwrap();
        assert_eq!(flags, DocFlags::NONE);
        assert_eq!(specs[0], LookupSpec { op: Op::Get, flags: PathFlags::XATTR, path: b"$document" });
        assert_eq!(specs[1], LookupSpec { op: Op::Exists, flags: PathFlags::NONE, path: b"a" });
        assert_eq!((specs.len(), specs[0].xattr_key(), specs[1].xattr_key()), (2, Some(&b"$document"[..]), None));
        for cut in 1..bytes.len() {
            let whole = cut == 13; // the first spec alone
            assert_eq!(lookup_error(&bytes[..cut], 0), (!whole).then_some(RequestError::Invalid), "{cut}");
        }
    }

    #[test]
    fn a_lookup_is_refused_for_the_right_reason() {
        use RequestError::*;
        for (bytes, doc_flags, error) in [
            (vec![], 0, InvalidCombo),
            (read(0xc5, 0, "a").repeat(17), 0, InvalidCombo),
            (read(0xc8, 0, "a"), 0, InvalidCombo),
            (read(0x77, 0, "a"), 0, InvalidCombo),
            (read(0xc5, 0, ""), 0, Invalid),
            (read(0x00, 0, "a"), 0, Invalid),
            (read(0xc5, 0x01, "a"), 0, Invalid),
            (read(0xc5, 0x02, "a"), 0, Invalid),
            (read(0xc6, 0x24, "a"), 0, Invalid),
            (read(0xc5, 0x20, "a"), 0, XattrInvalidFlagCombo),
            (read(0xc5, 0, &"a".repeat(1025)), 0, Invalid),
            (read(0xc5, 4, "-x"), 0, XattrInvalid),
            (read(0xc5, 4, "sixteen_bytes_ke"), 0, XattrInvalid),
            (read(0xd2, 4, ""), 0, XattrInvalid),
            ([read(0xc5, 0, "a"), read(0xc5, 4, "x")].concat(), 0, InvalidXattrOrder),
            ([read(0x00, 0, ""), read(0xc5, 4, "x")].concat(), 0, InvalidXattrOrder),
            (read(0xc5, 0, "a"), 0x01, Invalid),
            (read(0xc5, 0, "a"), 0x40, Invalid),
            (read(0xc5, 0, "a"), 0x10, Invalid),
        ] {
            assert_eq!(lookup_error(&bytes, doc_flags), Some(error), "{bytes:?} {doc_flags:#x}");
        }
        assert_eq!(lookup_error(&read(0xc5, 0, "a").repeat(16), 0x24), None);
        assert_eq!(lookup_error(&[read(0xc5, 4, "x"), read(0x00, 0, "")].concat(), 0), None);
    }

    #[test]
    fn a_mutation_is_refused_for_the_right_reason() {
        use RequestError::*;
        for (bytes, doc_flags, error) in [
            (vec![], 0, InvalidCombo),
            (write(0xc5, 0, "a", ""), 0, InvalidCombo),
            (write(0xc8, 0, "a", ""), 0, Invalid),
            (write(0xc9, 0, "a", "1"), 0, Invalid),
            (write(0xc8, 0, "", "1"), 0, Invalid),
            (write(0xc8, 0x08, "a", "1"), 0, Invalid),
            (write(0xc8, 0x10, "a", "1"), 0, XattrInvalidFlagCombo),
            (write(0xc8, 0x34, "a", "1"), 0, XattrInvalidFlagCombo),
            (write(0xce, 0x14, "a", "1"), 0, Invalid),
            (write(0xd3, 0, "a", ""), 0, Invalid),
            (write(0xc8, 0, "a", "1"), 0x03, Invalid),
            (write(0xc8, 0, "a", "1"), 0x20, Invalid),
            (write(0xc8, 0, "a", "1"), 0x10, Invalid),
            (write(0xc8, 0, "a", "1"), 0x1d, Invalid),
            (write(0xca, 0, "a", "1"), 0x01, Invalid),
            ([write(0xc8, 0, "a", "1"), write(0xc9, 0, "b", "")].concat(), 0x01, Invalid),
            ([write(0x04, 0, "", ""), write(0xc8, 0, "a", "1")].concat(), 0, InvalidCombo),
            ([write(0xc8, 0, "a", "1"), write(0x01, 0, "", "{}")].concat(), 0, InvalidCombo),
            ([write(0x04, 0, "", ""), write(0xc8, 4, "x", "1")].concat(), 0, InvalidXattrOrder),
        ] {
            assert_eq!(mutation_error(&bytes, doc_flags), Some(error), "{bytes:?} {doc_flags:#x}");
        }
        assert_eq!(mutation_error(&[write(0xc8, 4, "x", "1"), write(0x04, 0, "", "")].concat(), 0), None);
        assert_eq!(mutation_error(&write(0xc8, 4, "x", "1"), 0x0c), None, "staged again");
        assert_eq!(mutation_error(&write(0xc8, 0x15, "x", "1"), 0x0e), None);
        assert_eq!(mutation_error(&write(0xcb, 0, "", "1"), 0x01), None);
        let bytes = write(0xc8, 0, "a", "1");
        assert_eq!(parse_mutation_specs(&bytes, 0x02, true, ALL).err(), Some(Invalid));
        for cut in 1..bytes.len() {
            assert_eq!(mutation_error(&bytes[..cut], 0), Some(Invalid));
        }
    }

    #[test]
    fn features_that_were_not_enabled_are_not_supported() {
        let none = Features::default();
        let refused = Some(RequestError::NotSupported);
        assert_eq!(parse_lookup_specs(&read(0xc5, 4, "x"), 0, none).err(), refused);
        assert_eq!(parse_lookup_specs(&read(0xc5, 0, "x"), 0x20, none).err(), refused);
        assert_eq!(single_lookup(0xc5, 4, 1, b"x", 0, none).err(), refused);
    }

    #[test]
    fn binary_values_need_no_feature_of_their_own() {
        let xattr = Features { xattr: true, ..Features::default() };
        assert!(parse_mutation_specs(&write(0xc8, 0x24, "x", "1"), 0, false, xattr).is_ok());
        assert!(parse_lookup_specs(&read(0xc5, 0x24, "x"), 0, xattr).is_ok());
    }

    #[test]
    fn single_requests_follow_the_same_rules() {
        use RequestError::Invalid;
        let spec = LookupSpec { op: Op::Get, flags: PathFlags::NONE, path: b"a" };
        assert_eq!(single_lookup(0xc5, 0, 1, b"a", 0, ALL), Ok((spec, DocFlags::NONE)));
        for (opcode, path_len, body) in [(0xc5, 1, "ab"), (0xc5, 2, "a"), (0x00, 0, ""), (0xc8, 1, "a"), (0xc5, 0, "")]
        {
            assert_eq!(single_lookup(opcode, 0, path_len, body.as_bytes(), 0, ALL).err(), Some(Invalid));
        }
        let (spec, flags) = single_mutation(0xc8, 1, 1, b"a{}", 1, false, ALL).unwrap();
        assert_eq!((spec.op, spec.path, spec.value, flags), (Op::DictUpsert, &b"a"[..], &b"{}"[..], DocFlags::MKDOC));
        assert_eq!(
            single_mutation(0xc8, 0, 1, b"a1", 0x0a, false, ALL).err(),
            Some(Invalid),
            "body of a dead document"
        );
        assert!(single_mutation(0xc8, 4, 1, b"a1", 0x0a, false, ALL).is_ok());
        assert_eq!(single_mutation(0xc8, 4, 1, b"a1", 0x0c, false, ALL).err(), Some(Invalid), "would create nothing");
        for (opcode, flags) in [(0x01, 0), (0x04, 0), (0xc5, 0), (0xd3, 0)] {
            assert_eq!(single_mutation(opcode, flags, 1, b"a", 0, false, ALL).err(), Some(Invalid), "{opcode:#x}");
        }
    }
}
