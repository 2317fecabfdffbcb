//! A replica goes back to before its history and its peer's part.
//!
//! ```text
//!     nobody may ask ──▶ file: an earlier commit ──▶ table, prepares, marks as that says ──▶ replica again ──▶ loaded
//! ```

use std::sync::atomic::Ordering::SeqCst;

use persist::StoreError;
use scheduler::PoolKind;
use types::{Seqno, VbId, VbState};

use crate::bucket::Bucket;
use crate::op::OpError;
use crate::vbucket::VBucket;

/// Told once a rollback has ended: where the vBucket ends now.
pub type RolledBack = Box<dyn FnOnce(Result<Seqno, OpError>) + Send>;

impl Bucket {
    /// Takes a replica back to the newest state that is whole and not after `to`, if need be to nothing. Whatever is newer is
    /// gone from memory and disk, for good once `done` is told; until then nobody can ask the vBucket anything. The histories
    /// that began later are forgotten: ask for the stream again as [`Bucket::resume_point`] says. Streams that read the vBucket's
    /// changelog must be ended by whoever serves them. `NotMyVbucket`: it is active here.
    pub fn roll_back(&self, vb: VbId, to: Seqno, done: RolledBack) {
        let begun = self.vb(vb).and_then(|vb| self.begin_rollback(vb));
        let (state, me) = match (begun, self.me()) {
            (Ok(state), Some(me)) => (state, me),
            (Err(error), _) => return done(Err(error)),
            (Ok(_), None) => return done(Err(OpError::Cancelled)),
        };
        self.pools.execute(PoolKind::Background, "rollback", move || {
            let vb = &me.vbuckets[usize::from(vb.0)];
            let result = me.finish_rollback(vb, state, to);
            let is_back = result.is_ok();
            done(result.map_err(|error| OpError::Temporary(format!("the rollback failed: {error}"))));
            if is_back && let Err(error) = me.load(vb.id) {
                tracing::error!(bucket = me.name(), vb = vb.id.0, "could not be read whole after a rollback: {error}");
            }
        });
    }

    /// Keeps everybody away. Returns the state to go back to.
    fn begin_rollback(&self, vb: &VBucket) -> Result<VbState, OpError> {
        let mut state = vb.state.write();
        if *state == VbState::Active {
            return Err(OpError::NotMyVbucket);
        }
        if vb.is_rolling_back.swap(true, SeqCst) {
            return Err(OpError::Temporary("this vBucket is being rolled back already".into()));
        }
        Ok(std::mem::replace(&mut *state, VbState::Dead))
    }

    fn finish_rollback(&self, vb: &VBucket, before: VbState, to: Seqno) -> Result<Seqno, StoreError> {
        let rolled_back = self.store.roll_back(vb.id, to);
        if let Ok(file) = &rolled_back {
            {
                let _state = vb.state.write();
                vb.forget_all(Some(file));
            }
            self.recover_prepares(vb).inspect_err(|error| {
                // They may have been acknowledged, so nobody may have it without them.
                let (bucket, vb) = (self.name(), vb.id.0);
                tracing::error!(
                    bucket,
                    vb,
                    "rolled back, but out of use until a restart: its prepares cannot be read: {error}"
                );
            })?;
        }
        let mut state = vb.state.write();
        vb.become_passive();
        *state = before;
        vb.is_rolling_back.store(false, SeqCst);
        drop(state);
        vb.bells.ring(vb.id);
        rolled_back.map(|file| file.high)
    }
}
