//! Changing a document: all specs in order on a draft, then one new value, or nothing.

use std::borrow::Cow;

use types::{Cas, Datatype, Seqno};

use super::lookup::{WRAPPER_KEY, decode_binary, encode_binary, wrap};
use super::macros::{self, MacroKind, MacroPatch};
use super::spec::split_xattr_path;
use super::{
    Change, DocError, DocFlags, DocView, Edit, Existence, MutationSpec, Op, Path, PathFlags, Start, SubdocError, edit,
    start,
};
use crate::json;
use crate::xattr::{self, Sizes, Xattrs};

/// A new value for the document.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mutation {
    /// Inflated: xattr section if the datatype says so, then the body. Empty with `deleted`: no value at all.
    pub value: Vec<u8>,
    /// JSON and XATTR bits of `value`.
    pub datatype: Datatype,
    /// The result is a tombstone.
    pub deleted: bool,
    /// The document was made by this request: its user flags and expiry start from nothing.
    pub created: bool,
    /// Index of the spec and the value it answers with. Only counters have one.
    pub results: Vec<(u8, Vec<u8>)>,
    /// Gaps in `value`, to be filled in this order once CAS and seqno are known: see [`Mutation::patch`].
    pub patches: Vec<MacroPatch>,
    /// The body counts as the user's.
    pub sizes: Sizes,
}

impl Mutation {
    /// Fills all gaps.
    pub fn patch(&mut self, cas: Cas, seqno: Seqno) {
        for patch in std::mem::take(&mut self.patches) {
            patch.patch(&mut self.value, self.datatype, cas, seqno);
        }
    }
}

/// Why nothing was changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MutateError {
    #[error(transparent)]
    Doc(#[from] DocError),
    #[error("spec {index}: {error}")]
    Spec { index: u8, error: SubdocError },
}

/// Applies `specs`, in order, all or none. `view` is what is stored under the key, tombstones included whatever the
/// flags say. Sizes are not limited here: the caller compares [`Mutation::sizes`] with its limits.
pub fn mutate(view: &DocView<'_>, specs: &[MutationSpec<'_>], flags: DocFlags) -> Result<Mutation, MutateError> {
    let (section, body) = xattr::split(view.value, view.datatype).map_err(DocError::Xattrs)?;
    let xattrs = Xattrs::parse(section).map_err(DocError::Xattrs)?;
    let started = start(flags, view.existence, !xattrs.is_empty())?;
    let revived = view.existence == Existence::Tombstone && flags.has(DocFlags::REVIVE);
    let deleted = match started {
        Start::Create => flags.has(DocFlags::CREATE_AS_DELETED),
        Start::Edit => view.existence == Existence::Tombstone && !revived,
    };
    if deleted && specs.iter().any(gives_body) {
        return Err(DocError::DeletedCantHaveValue.into());
    }
    let root_is_new = match started {
        Start::Create => !deleted,
        Start::Edit => revived && flags.creates() && body.is_empty(),
    };
    let body: &[u8] = match started {
        _ if root_is_new => new_root(specs),
        Start::Create => b"",
        Start::Edit => body,
    };
    let mut draft = Draft {
        view,
        make_parents: flags.creates(),
        xattrs: if started == Start::Edit { xattrs } else { Xattrs::default() },
        xattr_gaps: Vec::new(),
        body_is_json: root_is_new || (started == Start::Edit && view.datatype.has(Datatype::JSON)),
        body: Gapped::of(body),
        deleted,
    };
    let mut results = Vec::new();
    for (index, spec) in (0u8..).zip(specs) {
        match draft.apply(spec) {
            Ok(None) => {}
            Ok(Some(result)) => results.push((index, result)),
            Err(error) => return Err(MutateError::Spec { index, error }),
        }
    }
    Ok(draft.finish(results, started == Start::Create))
}

/// Whether a spec, if it succeeds, leaves a body.
fn gives_body(spec: &MutationSpec<'_>) -> bool {
    match spec.op {
        Op::DeleteDoc => false,
        Op::ReplaceBodyWithXattr => true,
        _ => !spec.flags.has(PathFlags::XATTR),
    }
}

/// The body a new document starts with, so that the first path into it fits.
fn new_root(specs: &[MutationSpec<'_>]) -> &'static [u8] {
    let first = specs.iter().find(|spec| !spec.flags.has(PathFlags::XATTR) && !spec.op.is_whole_doc());
    match first {
        Some(spec) if spec.path.is_empty() || spec.path.starts_with(b"[") => b"[]",
        _ => b"{}",
    }
}

/// Text with gaps that follow it through edits.
struct Gapped<'a> {
    text: Cow<'a, [u8]>,
    gaps: Vec<MacroPatch>,
}

impl<'a> Gapped<'a> {
    fn of(text: &'a [u8]) -> Gapped<'a> {
        Gapped { text: Cow::Borrowed(text), gaps: Vec::new() }
    }

    /// A gap that is replaced or deleted is gone, one behind the edit moves with its text.
    fn apply(&mut self, edit: &Edit, inserted: Option<MacroKind>) {
        let replaced = &edit.replaced;
        self.gaps.retain(|gap| gap.offset >= replaced.end || gap.offset + gap.len() <= replaced.start);
        for gap in self.gaps.iter_mut().filter(|gap| gap.offset >= replaced.end) {
            gap.offset = gap.offset - replaced.len() + edit.text.len();
        }
        self.gaps.extend(inserted.map(|kind| MacroPatch { offset: replaced.start + edit.value_offset, kind }));
        edit.apply(self.text.to_mut());
    }
}

/// A document while its specs are applied.
struct Draft<'a> {
    view: &'a DocView<'a>,
    make_parents: bool,
    xattrs: Xattrs<'a>,
    /// Gaps in xattr values, counted from the start of the value.
    xattr_gaps: Vec<(Vec<u8>, MacroPatch)>,
    body: Gapped<'a>,
    body_is_json: bool,
    deleted: bool,
}

impl Draft<'_> {
    fn apply(&mut self, spec: &MutationSpec<'_>) -> Result<Option<Vec<u8>>, SubdocError> {
        let change = match spec.op {
            Op::SetDoc => {
                self.body = Gapped { text: Cow::Owned(spec.value.to_vec()), gaps: Vec::new() };
                self.body_is_json = json::is_json(spec.value);
                return Ok(None);
            }
            Op::DeleteDoc => return self.delete().map(|()| None),
            Op::ReplaceBodyWithXattr => return self.replace_body(spec).map(|()| None),
            Op::DictAdd => Change::DictAdd,
            Op::DictUpsert => Change::DictUpsert,
            Op::Delete => Change::Delete,
            Op::Replace => Change::Replace,
            Op::PushLast => Change::PushLast,
            Op::PushFirst => Change::PushFirst,
            Op::Insert => Change::Insert,
            Op::AddUnique => Change::AddUnique,
            Op::Counter => Change::Counter,
            // Lookups change nothing; requests with one among their mutations are refused before this.
            Op::GetDoc | Op::Get | Op::Exists | Op::GetCount => return Ok(None),
        };
        let make_parents = self.make_parents || spec.flags.has(PathFlags::MKDIR_P);
        if spec.flags.has(PathFlags::XATTR) {
            return self.change_xattr(spec, change, make_parents);
        }
        let path = Path::parse(spec.path)?;
        if !self.body_is_json {
            return Err(SubdocError::DocNotJson);
        }
        let edit = edit::plan(&self.body.text, &path, change, spec.value, make_parents)?;
        self.body.apply(&edit, None);
        Ok(edit.result)
    }

    fn change_xattr(
        &mut self,
        spec: &MutationSpec<'_>,
        change: Change,
        make_parents: bool,
    ) -> Result<Option<Vec<u8>>, SubdocError> {
        let (key, path) = stored_xattr(spec.path)?;
        let mut inserted = None;
        let value = if spec.flags.has(PathFlags::EXPAND_MACROS) {
            let expansion = macros::expand(spec.value, self.view)?;
            inserted = expansion.kind;
            Cow::Owned(expansion.text)
        } else if spec.flags.has(PathFlags::BINARY) {
            Cow::Owned(encode_binary(spec.value))
        } else {
            Cow::Borrowed(spec.value)
        };
        let mut wrapped = self.wrapped(key);
        let edit = edit::plan(&wrapped.text, &path, change, &value, make_parents)?;
        wrapped.apply(&edit, inserted);
        self.xattr_gaps.retain(|(name, _)| name != key);
        match edit::find(&wrapped.text, &Path::below(WRAPPER_KEY, b"")?) {
            Ok(span) => {
                let moved = |gap: MacroPatch| MacroPatch { offset: gap.offset - span.start, ..gap };
                self.xattr_gaps.extend(wrapped.gaps.iter().map(|gap| (key.to_vec(), moved(*gap))));
                self.xattrs.set(key, wrapped.text[span].to_vec());
            }
            Err(SubdocError::PathNotFound) => drop(self.xattrs.remove(key)),
            Err(error) => return Err(error),
        }
        Ok(edit.result)
    }

    fn replace_body(&mut self, spec: &MutationSpec<'_>) -> Result<(), SubdocError> {
        let (key, path) = stored_xattr(spec.path)?;
        let wrapped = self.wrapped(key);
        let span = edit::find(&wrapped.text, &path)?;
        let text = &wrapped.text[span.clone()];
        if spec.flags.has(PathFlags::BINARY) {
            let body = decode_binary(text)?;
            self.body_is_json = json::is_json(&body);
            self.body = Gapped { text: Cow::Owned(body), gaps: Vec::new() };
            return Ok(());
        }
        let inside = wrapped.gaps.iter().filter(|gap| span.contains(&gap.offset));
        let gaps = inside.map(|gap| MacroPatch { offset: gap.offset - span.start, ..*gap }).collect();
        self.body = Gapped { text: Cow::Owned(text.to_vec()), gaps };
        self.body_is_json = true;
        Ok(())
    }

    fn delete(&mut self) -> Result<(), SubdocError> {
        if self.deleted {
            return Err(SubdocError::PathNotFound);
        }
        self.deleted = true;
        self.body = Gapped::of(b"");
        self.body_is_json = false;
        self.xattrs.retain_system();
        self.xattr_gaps.retain(|(key, _)| xattr::is_system_key(key));
        Ok(())
    }

    /// One xattr as the only member of an object, or an empty object if there is none.
    fn wrapped(&self, key: &[u8]) -> Gapped<'static> {
        let text = wrap(self.xattrs.get(key));
        let shift = wrap(Some(b"")).len() - 1;
        let gaps = self.xattr_gaps.iter().filter(|(name, _)| name == key);
        let gaps = gaps.map(|(_, gap)| MacroPatch { offset: gap.offset + shift, ..*gap }).collect();
        Gapped { text: Cow::Owned(text), gaps }
    }

    fn finish(self, results: Vec<(u8, Vec<u8>)>, created: bool) -> Mutation {
        let mut value = self.xattrs.to_section();
        let mut sizes = xattr::sizes(&value).expect("the section was just built");
        sizes.user_bytes += self.body.text.len();
        let mut datatype = Datatype::RAW;
        if !value.is_empty() {
            datatype = datatype.with(Datatype::XATTR);
        }
        if self.body_is_json && !self.deleted {
            datatype = datatype.with(Datatype::JSON);
        }
        let mut patches = Vec::new();
        for (key, start) in self.xattrs.value_offsets() {
            let gaps = self.xattr_gaps.iter().filter(|(name, _)| name == key);
            patches.extend(gaps.map(|(_, gap)| MacroPatch { offset: gap.offset + start, ..*gap }));
        }
        let body_gaps = self.body.gaps.iter();
        patches.extend(body_gaps.map(|gap| MacroPatch { offset: gap.offset + value.len(), ..*gap }));
        value.extend_from_slice(&self.body.text);
        // The checksum covers the body, so it comes after the gaps there; without any it can be filled in now.
        patches.sort_by_key(|patch| patch.kind == MacroKind::ValueCrc32c);
        if self.body.gaps.is_empty() {
            let first_crc = patches.iter().position(|patch| patch.kind == MacroKind::ValueCrc32c);
            for patch in patches.drain(first_crc.unwrap_or(patches.len())..) {
                patch.patch(&mut value, datatype, Cas(0), Seqno(0));
            }
        }
        Mutation { value, datatype, deleted: self.deleted, created, results, patches, sizes }
    }
}

/// The key of a stored xattr and the path into its wrapper.
fn stored_xattr(path: &[u8]) -> Result<(&[u8], Path<'_>), SubdocError> {
    let (key, rest) = split_xattr_path(path);
    if xattr::is_virtual_key(key) {
        return Err(SubdocError::XattrCantModifyVattr);
    }
    Ok((key, Path::below(WRAPPER_KEY, rest)?))
}
