//! A vBucket comes here from the node where it is active.
//!
//! ```text
//!     begin_takeover ──▶ hand_over: pending ──▶ hand_over: active ──▶ whoever asked is told, once that is durable
//!                          └──── end_takeover, or any other role: it came to nothing
//! ```
//! Only while somebody has asked for it, and until the moment it is called off, may the other node make the vBucket active here: so
//! whoever called it off knows that it will not become so any more.

use std::collections::BTreeMap;

use changelog::FailoverTable;
use persist::Urgency;
use types::rank::{Mutex, Rank};
use types::{VbId, VbState};

use crate::bucket::Bucket;
use crate::chain::Topology;
use crate::op::{OpError, OpResult, Outcome, Reply, Waiter};
use crate::roles::{Origin, Role};

/// Who waits for vBuckets to be active here.
pub(crate) struct Takeovers(Mutex<BTreeMap<VbId, Waiter>>);

impl Default for Takeovers {
    fn default() -> Takeovers {
        Takeovers(Mutex::ranked(Rank::Durability, BTreeMap::new()))
    }
}

impl Takeovers {
    pub fn is_under_way(&self, vb: VbId) -> bool {
        self.0.lock().contains_key(&vb)
    }

    /// It has ended: whoever asked is to be told.
    #[must_use]
    pub fn take(&self, vb: VbId) -> Option<Waiter> {
        self.0.lock().remove(&vb)
    }

    /// Nobody will be told any more: each waiter says `Cancelled` by itself.
    pub fn cancel(&self) {
        let waiters = std::mem::take(&mut *self.0.lock());
        drop(waiters);
    }
}

/// Says that a takeover came to nothing.
pub(crate) fn called_off(waiter: Option<Waiter>, why: &str) {
    if let Some(waiter) = waiter {
        waiter.finish(Err(OpError::Temporary(format!("the vBucket was not taken over: {why}"))));
    }
}

impl Bucket {
    /// The node that a replica follows may hand the vBucket over from now on. Answers once it is active here and that is durable, or
    /// with why it is not. `NotMyVbucket`: it is no replica.
    pub fn begin_takeover(&self, vb: VbId, waiter: &dyn Fn() -> Waiter) -> Outcome {
        let begin = || -> Result<Option<OpResult>, OpError> {
            let vb = self.vb(vb)?;
            let state = vb.state.write();
            match *state {
                VbState::Active => Ok(Some(Ok(Reply::Done { cas: types::Cas(0) }))),
                VbState::Replica | VbState::Pending => {
                    if self.takeovers.is_under_way(vb.id) {
                        return Err(OpError::Exists);
                    }
                    self.takeovers.0.lock().insert(vb.id, waiter());
                    Ok(None)
                }
                VbState::Dead => Err(OpError::NotMyVbucket),
            }
        };
        match begin() {
            Ok(Some(result)) => Outcome::Done(result),
            Ok(None) => {
                if self.stopped.load(std::sync::atomic::Ordering::SeqCst) {
                    self.takeovers.cancel();
                }
                Outcome::Pending
            }
            Err(error) => Outcome::Done(Err(error)),
        }
    }

    /// Whether somebody wants the vBucket to become active here, and it is not yet.
    pub fn takes_over(&self, vb: VbId) -> bool {
        self.takeovers.is_under_way(vb)
    }

    /// The node that had the vBucket says what it is here from now on: first pending, then active, with the histories it had there
    /// and these chains.
    ///
    /// # Errors
    /// Nobody asked for it, or not any more; or it cannot be, as part of a snapshot is missing.
    pub fn hand_over(
        &self,
        vb: VbId,
        state: VbState,
        failover: FailoverTable,
        topology: Option<Topology>,
    ) -> Result<(), OpError> {
        let vb = self.vb(vb)?;
        let role = Role { state, topology, failover: Some(failover) };
        let (version, waiter) = self.change_role(vb, role, Origin::HandOver)?;
        if let Some(waiter) = waiter {
            self.tell_when_recorded(vb, version, waiter);
        }
        Ok(())
    }

    /// The takeover is off, if one was under way: when this returns, the vBucket is active, or will not become so by itself.
    pub fn end_takeover(&self, vb: VbId, why: &str) {
        let Ok(vb) = self.vb(vb) else { return };
        let waiter = {
            let mut current = vb.state.write();
            let waiter = self.takeovers.take(vb.id);
            if waiter.is_some() && *current == VbState::Pending {
                let mut record = (*vb.log.record()).clone();
                record.state = VbState::Replica;
                vb.log.set_record(record);
                *current = VbState::Replica;
            }
            waiter
        };
        if waiter.is_some() {
            self.changed(vb, Urgency::Normal);
        }
        called_off(waiter, why);
    }
}
