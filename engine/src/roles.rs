//! What a vBucket is here, which nodes have it beside this one, and which histories it has been through.
//!
//! | from | to active | to replica, pending or dead |
//! |---|---|---|
//! | active | other chains; writes that no longer can be made durable come to nothing | who waits is told that the outcome is unknown |
//! | other | a new history begins where this one is whole, unless the last active node hands its own over; what was prepared may have been acknowledged: it is settled, however long it takes | – |

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed, Ordering::SeqCst};

use changelog::{FailoverEntry, FailoverTable};
use persist::Urgency;
use types::rank::{Mutex, Rank};
use types::{Cas, Seqno, VbId, VbState, VbUuid};

use crate::bucket::{Bucket, fresh_uuid};
use crate::chain::{Topology, refuse_topology};
use crate::op::{OpError, OpResult, Outcome, Reply, Waiter};
use crate::takeover;
use crate::vbucket::{GivenUp, VBucket};

/// What a vBucket is to be.
#[derive(Clone, Debug)]
pub struct Role {
    pub state: VbState,
    /// `None`: it stays as it was.
    pub topology: Option<Topology>,
    /// The histories of the node that hands the vBucket over in order: they go on here. `None`: a vBucket that becomes active
    /// begins a new one, as nobody knows what else the last active node did.
    pub failover: Option<FailoverTable>,
}

impl Role {
    pub fn of(state: VbState, topology: Option<Topology>) -> Role {
        Role { state, topology, failover: None }
    }
}

/// Who says what a vBucket is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// Whoever decides about the cluster. A takeover under way is off.
    Coordinator,
    /// The node it moves from, which may say so while somebody waits for that.
    HandOver,
}

/// Those who wait until a vBucket's record is durable, with its version.
pub(crate) struct RecordWaiters {
    waiters: Mutex<BTreeMap<VbId, Vec<(u64, Waiter)>>>,
    count: AtomicUsize,
}

impl Default for RecordWaiters {
    fn default() -> RecordWaiters {
        let waiters = Mutex::ranked(Rank::Durability, BTreeMap::new());
        RecordWaiters { waiters, count: AtomicUsize::new(0) }
    }
}

impl RecordWaiters {
    fn add(&self, vb: VbId, version: u64, waiter: Waiter) {
        self.waiters.lock().entry(vb).or_default().push((version, waiter));
        self.count.fetch_add(1, SeqCst);
    }

    fn take(&self, vb: VbId, is_due: impl Fn(u64) -> bool) -> Vec<Waiter> {
        let mut waiters = self.waiters.lock();
        let Some(here) = waiters.get_mut(&vb) else { return Vec::new() };
        let due: Vec<_> = here.extract_if(.., |(version, _)| is_due(*version)).map(|(_, waiter)| waiter).collect();
        if here.is_empty() {
            waiters.remove(&vb);
        }
        self.count.fetch_sub(due.len(), SeqCst);
        due
    }

    /// Nobody will be told any more: each waiter says `Cancelled` by itself.
    pub fn cancel(&self) {
        let waiters = std::mem::take(&mut *self.waiters.lock());
        drop(waiters);
    }
}

impl Bucket {
    /// `None`: there is no such vBucket, or it was deleted.
    pub fn vb_state(&self, vb: VbId) -> Option<VbState> {
        let vb = self.vb(vb).ok()?;
        let state = vb.state.read();
        (!vb.is_deleted.load(Relaxed)).then_some(*state)
    }

    /// As [`Bucket::set_vbucket_state`], without waiting for the disk, and with a history of its own.
    pub fn set_vb_state(&self, vb: VbId, state: VbState, topology: Option<Topology>) -> Result<(), OpError> {
        let vb = self.vb(vb)?;
        let (_, waiter) = self.change_role(vb, Role::of(state, topology), Origin::Coordinator)?;
        takeover::called_off(waiter, "it was given another role");
        Ok(())
    }

    /// Puts a vBucket in a state; answers once that is durable. Sync writes under way on a vBucket that stops being active have
    /// an unknown outcome; those it finds when it becomes active are committed as soon as the chains allow, and whoever reads or
    /// writes such a document meanwhile is told [`OpError::ReCommitInProgress`].
    pub fn set_vbucket_state(&self, vb: VbId, role: Role, waiter: &dyn Fn() -> Waiter) -> Outcome {
        let vb = match self.vb(vb) {
            Ok(vb) => vb,
            Err(error) => return Outcome::Done(Err(error)),
        };
        match self.change_role(vb, role, Origin::Coordinator) {
            Ok((version, called_off)) => {
                takeover::called_off(called_off, "it was given another role");
                self.await_record(vb, version, waiter)
            }
            Err(error) => Outcome::Done(Err(error)),
        }
    }

    /// Returns the version of the record, and who waited for a takeover that has ended by this.
    pub(crate) fn change_role(
        &self,
        vb: &VBucket,
        role: Role,
        origin: Origin,
    ) -> Result<(u64, Option<Waiter>), OpError> {
        if let Some(why) = role.topology.as_deref().and_then(refuse_topology) {
            return Err(OpError::Invalid(why));
        }
        let (given_up, version, waiter) = {
            // The queue changes together with the state, so that no write slips in between.
            let mut current = vb.state.write();
            if vb.is_rolling_back.load(SeqCst) {
                return Err(OpError::Temporary("this vBucket is being rolled back or deleted".into()));
            }
            if origin == Origin::HandOver {
                self.may_hand_over(vb, *current, role.state)?;
            }
            vb.is_deleted.store(false, Relaxed);
            let mut record = (*vb.log.record()).clone();
            record.state = role.state;
            if let Some(topology) = role.topology {
                vb.set_topology(&topology);
                record.topology = topology;
            }
            let (was_active, is_active) = (*current == VbState::Active, role.state == VbState::Active);
            if is_active && !was_active {
                // In the middle of a snapshot there is more than a whole state, and nobody else need have the same.
                let whole = vb.log.open_snapshot().map_or(vb.log.marks.high(), |open| open.start);
                vb.log.end_snapshot(vb.prepared_marks().1);
                match role.failover {
                    Some(failover) => record.failover = failover,
                    None => record.failover.begin(FailoverEntry { uuid: fresh_uuid(&self.env), seqno: whole }),
                }
                vb.set_uuid(record.failover.current().uuid);
                vb.retrack();
            } else if let Some(failover) = role.failover {
                vb.set_uuid(failover.current().uuid);
                record.failover = failover;
            }
            let version = vb.log.set_record(record);
            *current = role.state;
            let given_up = if was_active && !is_active { vb.take_waiting() } else { GivenUp::default() };
            if !is_active {
                vb.become_passive();
            }
            let goes_on = origin == Origin::HandOver && !is_active;
            let waiter = if goes_on { None } else { self.takeovers.take(vb.id) };
            (given_up, version, waiter)
        };
        given_up.tell("the vBucket is no longer active here");
        self.changed(vb, Urgency::Durable);
        self.settle(vb);
        Ok((version, waiter))
    }

    fn may_hand_over(&self, vb: &VBucket, from: VbState, to: VbState) -> Result<(), OpError> {
        let is_next = matches!(
            (from, to),
            (VbState::Replica | VbState::Pending, VbState::Pending) | (VbState::Pending, VbState::Active)
        );
        if !is_next || !self.takeovers.is_under_way(vb.id) {
            return Err(OpError::Invalid("nobody here asked for the vBucket to be handed over"));
        }
        if to == VbState::Active && vb.log.open_snapshot().is_some() {
            return Err(OpError::Invalid("part of a snapshot is missing"));
        }
        Ok(())
    }

    /// Takes over the histories of the node that a replica follows, as it lists them; answers once that is durable.
    pub fn adopt_failover_log(&self, vb: VbId, failover: FailoverTable, waiter: &dyn Fn() -> Waiter) -> Outcome {
        let adopt = || {
            let vb = self.vb(vb)?;
            let state = vb.state.write();
            if !matches!(*state, VbState::Replica | VbState::Pending) {
                return Err(OpError::NotMyVbucket);
            }
            let mut record = (*vb.log.record()).clone();
            vb.set_uuid(failover.current().uuid);
            record.failover = failover;
            Ok((vb, vb.log.set_record(record)))
        };
        match adopt() {
            Ok((vb, version)) => {
                self.changed(vb, Urgency::Durable);
                self.await_record(vb, version, waiter)
            }
            Err(error) => Outcome::Done(Err(error)),
        }
    }

    fn await_record(&self, vb: &VBucket, version: u64, waiter: &dyn Fn() -> Waiter) -> Outcome {
        if self.stopped.load(Relaxed) {
            return Outcome::Done(Err(OpError::Cancelled));
        }
        if self.store.recorded(vb.id) >= Some(version) {
            return Outcome::Done(Ok(Reply::Done { cas: Cas(0) }));
        }
        self.tell_when_recorded(vb, version, waiter());
        Outcome::Pending
    }

    pub(crate) fn tell_when_recorded(&self, vb: &VBucket, version: u64, waiter: Waiter) {
        self.record_waiters.add(vb.id, version, waiter);
        // It may have become durable, or the bucket have stopped, before anybody knew that somebody waits.
        self.answer_record_waiters(vb);
        if self.stopped.load(SeqCst) {
            self.record_waiters.cancel();
        }
    }

    /// Answers those whose record is durable, or will not be.
    pub(crate) fn answer_record_waiters(&self, vb: &VBucket) {
        if self.record_waiters.count.load(SeqCst) == 0 {
            return;
        }
        let recorded = self.store.recorded(vb.id);
        let poisoned = vb.log.marks.poisoned();
        let due = self.record_waiters.take(vb.id, |version| recorded >= Some(version) || poisoned.is_some());
        for waiter in due {
            let result: OpResult = match poisoned {
                Some(reason) => Err(OpError::Temporary(format!("nothing more is written here: {reason}"))),
                None => Ok(Reply::Done { cas: Cas(0) }),
            };
            waiter.finish(result);
        }
    }

    /// The histories of a vBucket, newest first.
    pub fn failover_log(&self, vb: VbId) -> Result<Vec<FailoverEntry>, OpError> {
        Ok(self.vb(vb)?.log.record().failover.newest_first().to_vec())
    }

    /// The uuid of a vBucket's current history.
    pub fn vb_uuid(&self, vb: VbId) -> Option<VbUuid> {
        self.vb(vb).ok().map(VBucket::uuid)
    }

    /// A replica says that it has what every prepare up to `prepared` asks of it. `Invalid`: it cannot.
    pub fn seqno_acked(&self, vb: VbId, node: &str, prepared: Seqno) -> Result<(), OpError> {
        let vb = self.vb(vb)?;
        {
            let state = vb.state.read();
            if *state != VbState::Active {
                return Err(OpError::NotMyVbucket);
            }
            if prepared > vb.log.marks.high() {
                return Err(OpError::Invalid("a replica has no prepare that was never made"));
            }
            let mut waiting = vb.waiting.lock();
            // Alone, nobody's word is waited for.
            let Some(chains) = waiting.as_deref_mut().and_then(|tracker| tracker.chains.as_deref_mut()) else {
                return Ok(());
            };
            chains.ack(node, prepared);
        }
        self.settle(vb);
        Ok(())
    }

    /// A replica has begun anew, from `seqno` on: after a restart or a rollback it may have less than it said.
    pub fn replica_began(&self, vb: VbId, node: &str, seqno: Seqno) -> Result<(), OpError> {
        let vb = self.vb(vb)?;
        if let Some(chains) = vb.waiting.lock().as_deref_mut().and_then(|tracker| tracker.chains.as_deref_mut()) {
            chains.begin_anew(node, seqno);
        }
        Ok(())
    }
}
