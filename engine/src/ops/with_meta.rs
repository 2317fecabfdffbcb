//! Changes that bring the metadata they had elsewhere.

use std::borrow::Cow;

use document::xattr;
use types::{Cas, Datatype, DeleteSource, RevSeqno};

use super::{Attempt, Change, Doc, Run};
use crate::durability::Answer;
use crate::op::{OpError, WithMeta, WithMetaMode};
use crate::value::{self, Plain, Remains};

const FORCE: u32 = 0x01;
const FORCE_ACCEPT: u32 = 0x02;
const REGENERATE_CAS: u32 = 0x04;
const SKIP_CONFLICT_RESOLUTION: u32 = 0x08;
const IS_EXPIRATION: u32 = 0x10;

/// A CAS with its top bit set is no clock of this century, and nothing could ever follow it.
const CAS_MAX: Cas = Cas(i64::MAX as u64);

/// Files have 48 bits for a revision, and more must be able to follow.
const REV_MAX: RevSeqno = RevSeqno(1 << 47);

impl Run<'_> {
    pub(super) fn with_meta(&mut self, incoming: WithMeta<'_>) -> Attempt {
        if self.request.durability.is_some() {
            return Err(OpError::NotSupported("durability of a change with metadata").into());
        }
        let options = incoming.options;
        let regenerate = options & REGENERATE_CAS != 0;
        let delete = incoming.mode == WithMetaMode::Delete;
        if options & !(FORCE | FORCE_ACCEPT | REGENERATE_CAS | SKIP_CONFLICT_RESOLUTION | IS_EXPIRATION) != 0
            || options & FORCE_ACCEPT != 0
            || (regenerate && options & SKIP_CONFLICT_RESOLUTION == 0)
            || (options & IS_EXPIRATION != 0 && !delete)
        {
            return Err(OpError::Invalid("these options do not go together here").into());
        }
        if !regenerate && (incoming.cas == Cas(0) || incoming.cas > CAS_MAX) {
            return Err(OpError::Invalid("not a CAS a document can have").into());
        }
        if incoming.rev > REV_MAX {
            return Err(OpError::Invalid("not a revision a document can have").into());
        }
        self.check_prepare()?;
        let doc = self.doc_or_tombstone()?;
        self.check_condition(&doc)?;
        if incoming.mode == WithMetaMode::Add && doc.live().is_some() {
            return Err(OpError::Exists.into());
        }
        let skip = options & (FORCE | SKIP_CONFLICT_RESOLUTION) != 0;
        if !skip && !wins(&incoming, &doc) {
            return Err(OpError::Exists.into());
        }
        let given = Some(((!regenerate).then_some(incoming.cas), RevSeqno(incoming.rev.0.max(1))));
        let change = if delete {
            let (datatype, value) = tombstone_value(&incoming)?;
            let source = if options & IS_EXPIRATION != 0 { DeleteSource::Expiry } else { DeleteSource::Explicit };
            let expiry = if incoming.expiry == 0 { self.now_s() } else { incoming.expiry };
            let (flags, deleted, value) = (incoming.flags, Some(source), value.map(Cow::Owned));
            Change { flags, expiry, datatype, value, deleted, patches: Vec::new(), given }
        } else {
            let (datatype, value) = self.live_value(&incoming)?;
            let expiry = self.terms.cap(incoming.expiry, || self.now_s());
            Change { given, ..Change::alive(incoming.flags, expiry, datatype, value) }
        };
        self.change(&doc, change, Answer::Mutated)
    }

    fn live_value<'v>(&self, incoming: &WithMeta<'v>) -> Result<(Datatype, Cow<'v, [u8]>), OpError> {
        if !incoming.datatype.has(Datatype::XATTR) {
            return self.incoming(incoming.value, incoming.datatype)?.behind(&[]);
        }
        let plain = checked(incoming)?;
        let (datatype, value) = value::join(plain.section(), plain.body())?;
        Ok((datatype, Cow::Owned(value)))
    }
}

/// Whether the incoming change is newer, by revision: strictly greater in the first field that differs.
fn wins(incoming: &WithMeta<'_>, doc: &Doc) -> bool {
    let Some(item) = doc.item() else { return true };
    let ours = item.meta();
    match (incoming.rev, incoming.cas).cmp(&(ours.rev, ours.cas)) {
        std::cmp::Ordering::Equal if incoming.mode != WithMetaMode::Delete => {
            let theirs = (incoming.expiry, incoming.flags, incoming.datatype.has(Datatype::XATTR));
            theirs > (ours.expiry, ours.flags, ours.datatype.has(Datatype::XATTR))
        }
        order => order.is_gt(),
    }
}

fn tombstone_value(incoming: &WithMeta<'_>) -> Result<Remains, OpError> {
    if incoming.value.is_empty() {
        return Ok((Datatype::RAW, None));
    }
    if !incoming.datatype.has(Datatype::XATTR) {
        return Err(OpError::Invalid("a deleted document has no body"));
    }
    let plain = checked(incoming)?;
    let kept = xattr::keep_system(plain.section()).map_err(|_| OpError::BadXattr)?;
    if !plain.body().is_empty() || kept.len() != plain.section().len() {
        return Err(OpError::Invalid("a deleted document has system xattrs only"));
    }
    value::check_size(plain.section(), 0)?;
    Ok((Datatype::XATTR, Some(kept)))
}

fn checked<'a>(incoming: &WithMeta<'a>) -> Result<Plain<'a>, OpError> {
    let plain = Plain::parse(incoming.value, incoming.datatype).map_err(|_| OpError::BadXattr)?;
    xattr::validate(plain.bytes()).map_err(|_| OpError::BadXattr)?;
    Ok(plain)
}
