//! The end of a vBucket: what was moved away, or given up, leaves nothing behind.
//!
//! ```text
//!     dead ──▶ nobody may change its state ──▶ durably deleted ──▶ table, marks, waiters as of a vBucket that never was
//! ```

use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use types::{VbId, VbState};

use crate::bucket::{Bucket, dead_record};
use crate::op::OpError;
use crate::vbucket::VBucket;

impl Bucket {
    /// Deletes a dead vBucket, its file and what the commit log has of it; durable when this returns, and it may be made
    /// again at once, as an empty one with a history of its own. Whoever waits for something of it is answered. Waits for the disk.
    /// `NotMyVbucket`: there is none. `Invalid`: it is not dead.
    pub fn delete_vbucket(&self, vb: VbId) -> Result<(), OpError> {
        let vb = self.vb(vb)?;
        begin(vb)?;
        let record = dead_record(&self.env, &self.options, self.spec().replicas);
        let result = self.store.delete_vb(vb.id, record);
        {
            let _state = vb.state.write();
            if result.is_ok() {
                vb.forget_all(None);
                vb.set_topology(&vb.log.record().topology);
                vb.is_deleted.store(true, Relaxed);
            }
            vb.is_rolling_back.store(false, SeqCst);
        }
        vb.take_waiting().tell("the vBucket was deleted");
        self.answer_record_waiters(vb);
        vb.bells.ring(vb.id);
        result.map_err(|error| OpError::Temporary(format!("the vBucket could not be deleted: {error}")))
    }
}

/// Keeps everybody away.
fn begin(vb: &VBucket) -> Result<(), OpError> {
    let state = vb.state.write();
    if vb.is_deleted.load(Relaxed) {
        return Err(OpError::NotMyVbucket);
    }
    if vb.is_rolling_back.load(SeqCst) {
        return Err(OpError::Temporary("this vBucket is being rolled back or deleted".into()));
    }
    if *state != VbState::Dead {
        return Err(OpError::Invalid("only a dead vBucket can be deleted: set its state first"));
    }
    vb.is_rolling_back.store(true, SeqCst);
    Ok(())
}
