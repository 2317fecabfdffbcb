//! Sub-document reads and changes: the document's rules here, the paths in `document::subdoc`.

use std::borrow::Cow;

use document::subdoc::{DocError, DocFlags, DocView, Existence, Facts, MutateError, lookup, may_look_up, mutate};
use types::{Cas, Datatype, DeleteSource, Item, VbState};

use super::{Attempt, Change, Doc, Run, Step};
use crate::durability::Answer;
use crate::op::{OpError, Reply, SubdocLookup, SubdocMutate};
use crate::value::{self, Plain, SYSTEM_XATTR_BYTES_MAX, VALUE_BYTES_MAX};

/// Flags for which a tombstone is a document.
const SEES_TOMBSTONES: DocFlags = DocFlags::ACCESS_DELETED.with(DocFlags::REVIVE);

impl Run<'_> {
    pub(super) fn subdoc_lookup(&mut self, request: SubdocLookup<'_>) -> Attempt {
        let flags = request.doc_flags;
        if flags.has(DocFlags::REPLICA_READ) != (self.state == VbState::Replica) {
            return Err(OpError::NotMyVbucket.into());
        }
        self.check_readable()?;
        let doc = self.subdoc_doc(flags)?;
        if !may_look_up(flags, existence(&doc)) {
            return Err(OpError::NotFound.into());
        }
        let item = self.resident(doc.item().expect("there is something to look at").clone())?;
        let plain = Plain::of(&item)?;
        let view = self.view(&doc, Some((&item, &plain)));
        let found = lookup(&view, request.specs).map_err(|e| value::damaged(&item, &e))?;
        let results = found.into_iter().map(|result| result.map(|bytes| bytes.into_owned())).collect();
        Ok(Step::Reply(Reply::Lookup { cas: self.shown_cas(&item), deleted: item.is_deleted(), results }))
    }

    pub(super) fn subdoc_mutate(&mut self, request: SubdocMutate<'_>) -> Attempt {
        let flags = request.doc_flags;
        self.check_prepare()?;
        let doc = self.subdoc_doc(flags)?;
        self.check_subdoc_condition(flags, &doc)?;
        let item = match doc.item() {
            Some(item) => Some(self.resident(item.clone())?),
            None => None,
        };
        let plain = match &item {
            Some(item) => Some(Plain::of(item)?),
            None => None,
        };
        let view = self.view(&doc, item.as_ref().zip(plain.as_ref()));
        let mutation = match mutate(&view, request.specs, flags) {
            Ok(mutation) => mutation,
            Err(MutateError::Spec { index, error }) => {
                let deleted = view.existence == Existence::Tombstone;
                return Ok(Step::Reply(Reply::SubdocFailed { index, error, deleted }));
            }
            Err(MutateError::Doc(error)) => return Err(refusal(error, item.as_ref()).into()),
        };
        let sizes = mutation.sizes;
        if sizes.user_bytes > VALUE_BYTES_MAX || sizes.system_bytes > SYSTEM_XATTR_BYTES_MAX {
            return Err(OpError::TooBig.into());
        }
        let old_flags = item.as_ref().filter(|_| !mutation.created).map_or(0, |item| item.meta().flags);
        let expiry = if mutation.deleted { self.now_s() } else { self.expiry_of(request.expiry.unwrap_or(0), &doc)? };
        let has_value = !(mutation.deleted && mutation.value.is_empty());
        let change = Change {
            flags: request.user_flags.unwrap_or(old_flags),
            expiry,
            datatype: if mutation.deleted { mutation.datatype & Datatype::XATTR } else { mutation.datatype },
            value: has_value.then_some(Cow::Owned(mutation.value)),
            deleted: mutation.deleted.then_some(DeleteSource::Explicit),
            patches: mutation.patches,
            given: None,
        };
        let answer = Answer::Subdoc { deleted: mutation.deleted, results: mutation.results };
        self.change(&doc, change, answer)
    }

    fn subdoc_doc(&mut self, flags: DocFlags) -> Attempt<Doc> {
        if flags.has(SEES_TOMBSTONES) { self.doc_or_tombstone() } else { self.doc() }
    }

    /// As for other writes, and a tombstone that may be seen has a CAS too.
    fn check_subdoc_condition(&self, flags: DocFlags, doc: &Doc) -> Result<(), OpError> {
        match doc {
            Doc::Tombstone(item) if flags.has(SEES_TOMBSTONES) && self.request.cas != Cas(0) => {
                if item.meta().cas == self.request.cas { Ok(()) } else { Err(OpError::Exists) }
            }
            doc => self.check_condition(doc),
        }
    }

    fn view<'v>(&self, doc: &Doc, stored: Option<(&Item, &'v Plain<'_>)>) -> DocView<'v> {
        let clock = self.vb.log.max_cas();
        let now_ns = self.clock.unix_ns();
        let mut facts = Facts {
            vbucket_uuid: self.vb.uuid(),
            hlc_now_s: clock.0.max(now_ns) / 1_000_000_000,
            hlc_logical: clock.0 > now_ns,
            shows_system_xattrs: true,
            ..Facts::default()
        };
        let Some((item, plain)) = stored else {
            return DocView { existence: existence(doc), facts, ..DocView::default() };
        };
        let meta = item.meta();
        facts.cas = self.shown_cas(item);
        facts.seqno = meta.seqno;
        facts.rev = meta.rev;
        facts.expiry = meta.expiry;
        facts.flags = meta.flags;
        facts.stored_datatype = meta.datatype;
        facts.last_modified_s = Some(meta.cas.0 / 1_000_000_000);
        DocView { value: plain.bytes(), datatype: plain.datatype, existence: existence(doc), facts }
    }
}

fn existence(doc: &Doc) -> Existence {
    match doc {
        Doc::Missing => Existence::Missing,
        Doc::Tombstone(_) => Existence::Tombstone,
        Doc::Live(_) => Existence::Live,
    }
}

fn refusal(error: DocError, item: Option<&Item>) -> OpError {
    match error {
        DocError::NotFound => OpError::NotFound,
        DocError::Exists => OpError::Exists,
        DocError::CanOnlyReviveDeleted => OpError::CanOnlyReviveDeleted,
        DocError::DeletedCantHaveValue => OpError::DeletedCannotHaveValue,
        DocError::Xattrs(what) => item.map_or(OpError::BadXattr, |item| value::damaged(item, &what)),
    }
}
