//! Sub-document operations: reading and changing parts of a JSON document without sending all of it.
//! ```text
//! spec bytes ── spec ──▶ checked specs ──┬── lookup ──▶ one fragment or error a spec
//!                           DocView ─────┴── mutate ──▶ a new value, with gaps for the sequencer to fill
//! ```
//! `path` reads paths, `walk` follows them through raw text, `edit` plans one splice, `virtuals` makes up the
//! attributes nobody stored. Nothing is ever parsed into a tree: a change costs one pass and one copy.

mod edit;
mod lookup;
mod macros;
mod mutate;
mod path;
mod spec;
mod virtuals;
mod walk;

pub use edit::{Change, Edit, count, exists, find, get, plan};
pub use lookup::{Answer, Start, lookup, may_look_up, start};
pub use macros::{MacroKind, MacroPatch};
pub use mutate::{MutateError, Mutation, mutate};
pub use path::{Component, LEVELS_MAX, PATH_LEN_MAX, Path};
pub use spec::{
    DocFlags, Features, LookupSpec, MutationSpec, Op, PathFlags, RequestError, SPECS_MAX, parse_lookup_specs,
    parse_mutation_specs, single_lookup, single_mutation,
};
pub use virtuals::Facts;

use types::Datatype;

/// Why one spec failed. The other specs of a lookup are not affected; a mutation does nothing at all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubdocError {
    #[error("the path does not exist")]
    PathNotFound,
    #[error("the path keys or indexes a value of another type")]
    PathMismatch,
    #[error("the path is not well formed")]
    PathInvalid,
    #[error("the path has more than 32 components")]
    PathTooLong,
    #[error("the document nests deeper than 32 levels")]
    DocTooDeep,
    #[error("the value cannot stand there: not JSON, not a primitive, or a counter that overflows")]
    ValueCantInsert,
    #[error("the document is not JSON")]
    DocNotJson,
    #[error("the stored number does not fit a signed 64-bit integer")]
    NumRange,
    #[error("the delta is not a signed 64-bit integer other than 0")]
    DeltaInvalid,
    #[error("the path exists already")]
    PathExists,
    #[error("the value would nest the document deeper than 32 levels")]
    ValueTooDeep,
    #[error("no such macro")]
    XattrUnknownMacro,
    #[error("no such virtual attribute")]
    XattrUnknownVattr,
    #[error("virtual attributes cannot be changed")]
    XattrCantModifyVattr,
    #[error("no such field of a virtual attribute in a macro")]
    XattrUnknownVattrMacro,
    #[error("the attribute does not hold a binary value")]
    FieldNotBinary,
}

/// Why a request failed as a whole, once its document was found or not found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DocError {
    #[error("no such document")]
    NotFound,
    #[error("the document exists already")]
    Exists,
    #[error("only deleted documents can be revived")]
    CanOnlyReviveDeleted,
    #[error("a deleted document cannot have a body")]
    DeletedCantHaveValue,
    #[error("the stored xattr section is damaged: {0}")]
    Xattrs(#[from] crate::xattr::XattrError),
}

/// What is stored under a key, as far as a request may see it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Existence {
    #[default]
    Missing,
    Live,
    Tombstone,
}

/// A document as an operation sees it. A missing one has an empty value.
#[derive(Clone, Copy, Debug, Default)]
pub struct DocView<'a> {
    /// Inflated: xattr section if the datatype says so, then the body.
    pub value: &'a [u8],
    /// JSON and XATTR bits of `value`.
    pub datatype: Datatype,
    pub existence: Existence,
    pub facts: Facts,
}
