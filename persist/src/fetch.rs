//! Reading single documents from files: everything asked of one vBucket meanwhile is read in one go.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use couchstore::{DocInfo, Snapshot};
use types::{DocKey, Item};

use crate::batch::prepare_id;
use crate::codec;
use crate::error::StoreError;
use crate::stats::{FETCH_FAILURES, FETCHED, FETCHES};
use crate::vb::{Done, Vb};

/// Asks for one document; `done` gets it on a reader's thread.
pub(crate) fn ask(vb: &Arc<Vb>, key: DocKey<'_>, done: Done) {
    let first = {
        let mut waiting = vb.fetches.lock();
        let first = waiting.is_empty();
        waiting.entry(key.as_bytes().into()).or_default().push(done);
        first
    };
    if first {
        vb.home.shared.fetch_wanted(vb);
    }
}

/// Answers everybody who waits for a document of this vBucket.
pub(crate) fn fetch_all(vb: &Vb) {
    let mut waiting: Vec<(Box<[u8]>, Vec<Done>)> = std::mem::take(&mut *vb.fetches.lock()).into_iter().collect();
    waiting.sort_unstable_by(|a, b| a.0.cmp(&b.0));
    let clock = &vb.home.shared.env.clock;
    let begun = clock.monotonic();
    let ids: Vec<&[u8]> = waiting.iter().map(|(id, _)| &**id).collect();
    let found = Reading::open(vb).and_then(|reading| {
        let infos = reading.infos(&ids)?;
        Ok((reading, infos))
    });
    FETCHED.add(ids.len() as u64);
    vb.home.counters.add(|c| &c.fetched, ids.len() as u64);
    match found {
        Ok((reading, infos)) => {
            let mut found: Vec<_> = waiting.into_iter().zip(infos).collect();
            // The disk, and what reads ahead on it, goes forward.
            found.sort_unstable_by_key(|(_, info)| info.as_ref().map_or(0, |info| info.body_at));
            for ((_, dones), info) in found {
                // An item is not cloned but read again for each who waits: that more than one does is rare.
                dones.into_iter().for_each(|done| done(reading.item(info.as_ref())));
            }
        }
        Err(error) => {
            FETCH_FAILURES.inc();
            vb.home.counters.add(|c| &c.fetch_failures, 1);
            if let Some(untold) = vb.home.shared.may_tell() {
                tracing::warn!(bucket = vb.home.name, vb = vb.id.0, untold, "documents could not be read: {error}");
            }
            waiting.into_iter().flat_map(|(_, dones)| dones).for_each(|done| done(Err(error.clone())));
        }
    }
    FETCHES.record(clock.monotonic().saturating_sub(begun));
}

/// Tells everybody who waits for a document of this vBucket that the store is closed.
pub(crate) fn refuse_all(vb: &Vb) {
    let waiting = std::mem::take(&mut *vb.fetches.lock());
    waiting.into_values().flatten().for_each(|done| done(Err(StoreError::Closed)));
}

/// Reads one document at once.
pub(crate) fn now(vb: &Vb, key: DocKey<'_>) -> Result<Option<Item>, StoreError> {
    one(vb, key.as_bytes())
}

/// Reads the prepare of one document, be it completed or not, at once.
pub(crate) fn prepare_now(vb: &Vb, key: DocKey<'_>) -> Result<Option<Item>, StoreError> {
    one(vb, &prepare_id(key.as_bytes()))
}

fn one(vb: &Vb, id: &[u8]) -> Result<Option<Item>, StoreError> {
    let reading = Reading::open(vb)?;
    let info = reading.infos(&[id])?.pop().flatten();
    reading.item(info.as_ref())
}

/// A vBucket's last good commit, open for reading. Without a file nothing was ever committed, so everything is absent.
struct Reading<'a> {
    vb: &'a Vb,
    file: Option<Snapshot>,
}

impl Reading<'_> {
    fn open(vb: &Vb) -> Result<Reading<'_>, StoreError> {
        if vb.home.gone.load(Ordering::Acquire) {
            return Err(StoreError::NoSuchBucket(vb.home.name.clone()));
        }
        let file = vb.reading()?.map(|(_, file)| file);
        Ok(Reading { vb, file })
    }

    fn infos(&self, ids: &[&[u8]]) -> Result<Vec<Option<DocInfo>>, StoreError> {
        match &self.file {
            Some(file) => file.get_many_by_id(ids).map_err(StoreError::file(self.vb.id)),
            None => Ok(vec![None; ids.len()]),
        }
    }

    fn item(&self, info: Option<&DocInfo>) -> Result<Option<Item>, StoreError> {
        let (Some(file), Some(info)) = (&self.file, info) else { return Ok(None) };
        let entry = codec::entry(info).map_err(|what| self.vb.damaged(what))?;
        entry.map(|entry| entry.with_value(self.vb.id, file, info)).transpose()
    }
}
