//! Back to an earlier commit: a replica whose history is not its peer's forgets what the peer never had.
//!
//! Files are only appended to, so earlier commits are still there, back to the last compaction. The newest of them that is
//! no later than asked for, and whole, is made the newest again by a commit that begins from it; without one, an empty state
//! is. That commit counts one rollback more, and so makes void, in one go, what the commit log has from before.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use changelog::{Slice, Snapshots, VbRecord};
use couchstore::vbstate::VbStateRecord;
use couchstore::{Couch, Error, Step, vbstate};
use types::{Seqno, VbUuid};

use crate::batch::Batch;
use crate::commit::commit;
use crate::error::{StoreError, Verdict};
use crate::facts::VbFacts;
use crate::flusher::poison;
use crate::logger::Records;
use crate::queue::Claim;
use crate::vb::{Attached, Committed, Vb};

/// Takes the vBucket back to `to` at the latest. Nothing may be appended to its changelog meanwhile. Waits for a flush or a
/// step of a compaction that is under way. `Err`: it is as it was, or poisoned.
pub(crate) fn roll_back(vb: &Arc<Vb>, to: Seqno) -> Result<(), StoreError> {
    let (attached, _turn) = Turn::take(vb)?;
    let committed = rewound(vb, &attached, to).inspect_err(|error| {
        if error.verdict() != Verdict::Retry {
            poison(vb, &attached, error);
        }
    })?;
    let record = committed.facts.record.clone();
    begin_again(vb, &attached, Some(committed), record);
    Ok(())
}

/// A vBucket that somebody has to himself who is neither a flusher nor a compaction. Dropped, it is given back.
pub(crate) struct Turn<'a>(&'a Arc<Vb>);

impl Turn<'_> {
    /// Ends a compaction, and waits for a flush, that is under way.
    pub fn take(vb: &Arc<Vb>) -> Result<(Arc<Attached>, Turn<'_>), StoreError> {
        let Some(attached) = vb.attached() else { return Err(StoreError::Closed) };
        vb.is_rolling_back.store(true, Ordering::Release);
        let turn = Turn(vb);
        // One that begins after this ends at its first step.
        vb.home.shared.compactor.cancel(vb);
        match vb.home.shared.flushes.claim(vb) {
            Claim::Mine => {}
            Claim::Soon => vb.home.shared.wait_until(|| vb.ticket.is_claimed() || vb.ticket.is_stopped()),
            Claim::Never => return Err(StoreError::Closed),
        }
        if vb.ticket.is_stopped() {
            return Err(StoreError::Closed);
        }
        if let Some(reason) = attached.log.marks.poisoned() {
            let what = format!("it takes no writes until a restart: {reason}");
            return Err(StoreError::Refused { vb: vb.id, what });
        }
        Ok((attached, turn))
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.is_rolling_back.store(false, Ordering::Release);
        self.0.home.shared.release(self.0);
    }
}

/// The changelog goes on from an earlier commit, `None` being nothing at all, with a record that is durable as it is.
pub(crate) fn begin_again(vb: &Vb, attached: &Attached, committed: Option<Committed>, record: VbRecord) {
    let high = committed.as_ref().map_or(Seqno(0), |committed| committed.high);
    vb.take_unfiled_bytes();
    attached.log.roll_back(high);
    vb.roll_back(attached, committed);
    let version = attached.log.set_record(record.clone());
    *attached.records.lock() = Records::starting_at(version, Arc::new(record));
    attached.recorded.store(version, Ordering::Release);
    attached.submitted.store(high.0, Ordering::Release);
    vb.home.shared.logger.filed(vb, high, version);
}

/// The file, with the earlier state as its newest commit.
fn rewound(vb: &Vb, attached: &Attached, to: Seqno) -> Result<Committed, StoreError> {
    let before = attached.log.record();
    let fresh = || VbUuid((vb.home.shared.env.rng.u64() >> 16).max(1));
    let record = |high: Seqno| {
        let mut record = VbRecord { rollbacks: before.rollbacks + 1, ..(*before).clone() };
        record.failover.prune(high, fresh);
        record
    };
    let Some(committed) = vb.committed() else {
        // Nothing was ever filed, but the log may have something.
        let slice = Slice {
            from: Seqno(1),
            items: Vec::new(),
            last: Seqno(0),
            snapshots: Snapshots::default(),
            is_given: true,
            record: Arc::new(record(Seqno(0))),
            record_version: 0,
        };
        return commit(vb, &slice, &Batch::of(&slice));
    };
    let mut couch = vb.couch(&committed)?;
    let mut facts = match earlier(vb, &mut couch, to)? {
        Some(facts) => facts,
        None => {
            couch.clear();
            VbFacts::new((*before).clone())
        }
    };
    let high = Seqno(couch.header().update_seq);
    facts.record = record(high);
    // Neither goes back: what was given out once is not given out again for something else.
    facts.max_cas = facts.max_cas.max(committed.facts.max_cas);
    facts.max_deleted_rev = facts.max_deleted_rev.max(committed.facts.max_deleted_rev);
    let file = || StoreError::file(vb.id);
    let mut out = couch.batch().map_err(file())?;
    out.local_put(vbstate::ID, &facts.encode()).map_err(file())?;
    let outcome = out.commit(vb.home.shared.env.clock.unix_ns()).map_err(|error| match error {
        Error::Commit { step: Step::DataSync | Step::MarkerSync, path, source } => {
            StoreError::SyncFailed { vb: vb.id, path: path.to_path_buf(), source: source.into() }
        }
        error => StoreError::file(vb.id)(error),
    })?;
    vb.name()?;
    let header = outcome.header;
    tracing::warn!(
        bucket = vb.home.name,
        vb = vb.id.0,
        asked = to.0,
        from = committed.high.0,
        to = high.0,
        "rolled back: this replica's history was not the active one's"
    );
    Ok(Committed {
        rev: committed.rev,
        header_at: header.at,
        high,
        purge: Seqno(header.purge_seq),
        alive: header.doc_count(),
        tombstones: header.deleted_count(),
        file_bytes: couch.file_bytes().map_err(file())?,
        live_bytes: header.live_bytes(),
        facts,
    })
}

/// Goes back to the newest commit that is whole and not after `to`. What it says; `None` if there is none.
fn earlier(vb: &Vb, couch: &mut Couch, to: Seqno) -> Result<Option<VbFacts>, StoreError> {
    let file = || StoreError::file(vb.id);
    loop {
        let high = Seqno(couch.header().update_seq);
        let stored = couch.local(vbstate::ID).map_err(file())?;
        if let Some(stored) = stored.as_deref().filter(|_| high <= to) {
            let fresh = || VbUuid((vb.home.shared.env.rng.u64() >> 16).max(1));
            let facts = VbFacts::decode(stored, high, fresh).map_err(|what| vb.damaged(what))?;
            if facts.open_snapshot(high).is_none() {
                return Ok(Some(facts));
            }
        }
        if stored.is_some_and(|stored| VbStateRecord::decode(&stored).is_ok_and(|stored| stored.is_first)) {
            // To look for what is not there is to look at every block of the file.
            return Ok(None);
        }
        match couch.rewind() {
            Ok(()) => {}
            Err(Error::NoHeader { .. }) => return Ok(None),
            Err(error) => return Err(file()(error)),
        }
    }
}
