//! Reading, and the question both reading and changing begin with: may the request work on what is stored?

use std::borrow::Cow;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use types::Datatype;

use super::spec::split_xattr_path;
use super::{DocError, DocFlags, DocView, Existence, LookupSpec, Op, Path, PathFlags, SubdocError, edit, virtuals};
use crate::xattr::{self, XattrError};

/// What a stored binary xattr begins with, inside its JSON string.
const BINARY_PREFIX: &[u8] = b"cb-content-base64-encoded:";

/// Whether a lookup finds a document at all.
pub const fn may_look_up(flags: DocFlags, existence: Existence) -> bool {
    match existence {
        Existence::Missing => false,
        Existence::Live => true,
        Existence::Tombstone => flags.has(DocFlags::ACCESS_DELETED),
    }
}

/// What a mutation works on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// The document that is there, dead or alive.
    Edit,
    /// A new one; what a tombstone may still hold does not count.
    Create,
}

/// Decides what a mutation with these flags works on. `has_xattrs`: the tombstone still carries some; they may be
/// another transaction's staged insert, so an insert that can see them must not write over them.
pub const fn start(flags: DocFlags, existence: Existence, has_xattrs: bool) -> Result<Start, DocError> {
    let adds = flags.has(DocFlags::ADD);
    match existence {
        Existence::Live if adds => Err(DocError::Exists),
        Existence::Live if flags.has(DocFlags::REVIVE) => Err(DocError::CanOnlyReviveDeleted),
        Existence::Live => Ok(Start::Edit),
        Existence::Tombstone if flags.has(DocFlags::REVIVE) => Ok(Start::Edit),
        Existence::Tombstone if flags.has(DocFlags::ACCESS_DELETED) && adds && has_xattrs => Err(DocError::Exists),
        Existence::Tombstone if flags.has(DocFlags::ACCESS_DELETED) && !adds => Ok(Start::Edit),
        _ if flags.creates() => Ok(Start::Create),
        _ => Err(DocError::NotFound),
    }
}

/// What one lookup spec is answered with.
pub type Answer<'a> = Result<Cow<'a, [u8]>, SubdocError>;

/// Answers every spec, in order. The caller has checked [`may_look_up`]. `Exists` answers with no bytes.
pub fn lookup<'a>(view: &DocView<'a>, specs: &[LookupSpec<'_>]) -> Result<Vec<Answer<'a>>, XattrError> {
    let (section, body) = xattr::split(view.value, view.datatype)?;
    let answer = |spec: &LookupSpec<'_>| {
        if spec.flags.has(PathFlags::XATTR) {
            let (key, _) = split_xattr_path(spec.path);
            let stored = if xattr::is_virtual_key(key) { None } else { xattr::get(section, key)? };
            return Ok(look_up_xattr(view, stored, spec).map(Cow::Owned));
        }
        Ok(look_up_body(view, body, spec))
    };
    specs.iter().map(answer).collect()
}

fn look_up_body<'a>(view: &DocView<'_>, body: &'a [u8], spec: &LookupSpec<'_>) -> Answer<'a> {
    if spec.op == Op::GetDoc {
        return if body.is_empty() { Err(SubdocError::PathNotFound) } else { Ok(Cow::Borrowed(body)) };
    }
    let path = Path::parse(spec.path)?;
    if !view.datatype.has(Datatype::JSON) {
        return Err(SubdocError::DocNotJson);
    }
    look_up(body, &path, spec.op)
}

fn look_up_xattr(view: &DocView<'_>, stored: Option<&[u8]>, spec: &LookupSpec<'_>) -> Result<Vec<u8>, SubdocError> {
    let (key, rest) = split_xattr_path(spec.path);
    let path = Path::below(WRAPPER_KEY, rest)?;
    let wrapped =
        if xattr::is_virtual_key(key) { wrap(Some(&virtuals::value(view, key, rest)?)) } else { wrap(stored) };
    let found = look_up(&wrapped, &path, spec.op)?;
    if spec.flags.has(PathFlags::BINARY) { decode_binary(&found) } else { Ok(found.into_owned()) }
}

fn look_up<'a>(text: &'a [u8], path: &Path<'_>, op: Op) -> Answer<'a> {
    match op {
        Op::Exists => edit::exists(text, path).map(|()| Cow::Borrowed(&b""[..])),
        Op::GetCount => edit::count(text, path).map(|count| Cow::Owned(count.to_string().into_bytes())),
        _ => edit::get(text, path).map(Cow::Borrowed),
    }
}

/// Xattrs are edited as members of an object, so that the same paths and operations serve them.
pub(super) const WRAPPER_KEY: &[u8] = b"v";

pub(super) fn wrap(value: Option<&[u8]>) -> Vec<u8> {
    match value {
        Some(value) => [b"{\"v\":", value, b"}"].concat(),
        None => b"{}".to_vec(),
    }
}

/// `bytes` as the JSON string that stands for them in an xattr.
pub(super) fn encode_binary(bytes: &[u8]) -> Vec<u8> {
    [b"\"", BINARY_PREFIX, STANDARD.encode(bytes).as_bytes(), b"\""].concat()
}

pub(super) fn decode_binary(json: &[u8]) -> Result<Vec<u8>, SubdocError> {
    let encoded = json.strip_prefix(b"\"").and_then(|text| text.strip_suffix(b"\""));
    let encoded = encoded.and_then(|text| text.strip_prefix(BINARY_PREFIX)).ok_or(SubdocError::FieldNotBinary)?;
    STANDARD.decode(encoded).map_err(|_| SubdocError::FieldNotBinary)
}
