//! Deleting.

use std::borrow::Cow;

use types::{DeleteSource, Item};

use super::{Attempt, Change, Run};
use crate::durability::Answer;
use crate::op::OpError;
use crate::value;

impl Run<'_> {
    pub(super) fn delete(&mut self) -> Attempt {
        self.check_prepare()?;
        let doc = self.doc()?;
        self.check_condition(&doc)?;
        let item = doc.live().ok_or(OpError::NotFound)?.clone();
        // Only system xattrs outlive the document, so only they make its value worth a look.
        let item = if item.meta().datatype.has(types::Datatype::XATTR) { self.resident(item)? } else { item };
        let change = self.deletion(&item, DeleteSource::Explicit)?;
        self.change(&doc, change, Answer::Mutated)
    }

    /// What is left of a document when it is deleted.
    pub(super) fn deletion(&self, item: &Item, source: DeleteSource) -> Result<Change<'static>, OpError> {
        let (datatype, value) = value::remains(item)?;
        Ok(Change {
            flags: item.meta().flags,
            expiry: self.now_s(),
            datatype,
            value: value.map(Cow::Owned),
            deleted: Some(source),
            patches: Vec::new(),
            given: None,
        })
    }
}
