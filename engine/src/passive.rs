//! What a replica may say that it has: its high prepared seqno.
//!
//! ```text
//!     prepare ──▶ under way ──end of its snapshot──▶ waiting ──▶ high prepared, in order
//!                                                    majority: at once       persist to majority: all of the snapshot is durable
//! ```
//! Between the ends of a snapshot a replica has no state that its peer ever had, so nothing is said of it. And of several
//! replicas the one with the highest mark on disk is made active, so the mark never runs ahead of what a restart gives back.

use std::collections::VecDeque;
use std::sync::Arc;

use changelog::Snapshot;
use types::{Level, Seqno, VbId};

/// Told after a replica's high prepared seqno has moved. Called without locks held, from any thread: take the number with
/// [`crate::Bucket::high_prepared`], and tell the peer.
pub trait AckNudge: Send + Sync {
    fn high_prepared_moved(&self, vb: VbId);
}

/// 1. `waiting` is in prepare order, and everything in `under_way` comes after it.
/// 2. `high_prepared` only grows, until a rollback.
#[derive(Default)]
pub(crate) struct Passive {
    under_way: Vec<(Seqno, Level)>,
    waiting: VecDeque<Waiting>,
    pub high_prepared: Seqno,
    /// The highest prepare that is committed or aborted.
    pub completed: Seqno,
    /// Prepares up to here are decided by the end of what the peer announced last.
    pub decided: Seqno,
    pub nudge: Option<Arc<dyn AckNudge>>,
}

struct Waiting {
    prepared: Seqno,
    /// Must be durable first; 0: nothing.
    durable: Seqno,
}

impl Passive {
    /// Of a vBucket that was active, or is found on disk. `prepares` are open, in order; those after `whole` belong to a
    /// snapshot under way.
    pub fn resume(high_prepared: Seqno, completed: Seqno, prepares: &[(Seqno, Level)], whole: Seqno) -> Passive {
        let mut passive = Passive { high_prepared, completed, ..Passive::default() };
        let (old, under_way) = prepares.split_at(prepares.partition_point(|(seqno, _)| *seqno <= whole));
        for &(prepared, level) in old.iter().filter(|(seqno, _)| *seqno > high_prepared) {
            passive.waiting.push_back(Waiting { prepared, durable: needs_disk(level, prepared) });
        }
        passive.under_way = under_way.to_vec();
        passive
    }

    pub fn prepared(&mut self, seqno: Seqno, level: Level) {
        self.under_way.push((seqno, level));
    }

    pub fn completed(&mut self, prepared: Seqno) {
        self.completed = self.completed.max(prepared);
    }

    /// All of a snapshot is here.
    pub fn snapshot_ended(&mut self, snapshot: &Snapshot) {
        let end = snapshot.end;
        if let Some(completed) = snapshot.completed {
            self.completed(completed);
            // Of prepares that were decided already, of whatever level, only the outcome was sent.
            self.under_way.clear();
            self.waiting.push_back(Waiting { prepared: end, durable: end });
        }
        for (prepared, level) in self.under_way.drain(..) {
            self.waiting.push_back(Waiting { prepared, durable: needs_disk(level, end) });
        }
    }

    /// Whether, after [`Passive::advance`], something is said once more is durable.
    pub fn awaits_disk(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Moves the mark as far as it goes. True: it has moved.
    pub fn advance(&mut self, durable: Seqno) -> bool {
        let before = self.high_prepared;
        while let Some(first) = self.waiting.pop_front_if(|first| first.durable <= durable) {
            self.high_prepared = self.high_prepared.max(first.prepared);
        }
        self.high_prepared > before
    }

    /// Prepares that are not said to be here yet.
    pub fn unsaid(&self) -> usize {
        self.under_way.len() + self.waiting.len()
    }
}

fn needs_disk(level: Level, seqno: Seqno) -> Seqno {
    if level == Level::PersistMajority { seqno } else { Seqno(0) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn snapshot(start: u64, end: u64, completed: Option<u64>) -> Snapshot {
        Snapshot { start: Seqno(start), end: Seqno(end), completed: completed.map(Seqno) }
    }

    #[test]
    fn nothing_is_said_of_half_a_snapshot() {
        let mut passive = Passive::default();
        passive.prepared(Seqno(1), Level::Majority);
        assert!(!passive.advance(Seqno(1)));
        passive.snapshot_ended(&snapshot(0, 3, None));
        assert!(passive.advance(Seqno(0)));
        assert_eq!((passive.high_prepared, passive.unsaid()), (Seqno(1), 0));
    }

    #[test]
    fn one_that_waits_for_the_disk_holds_up_those_behind_it() {
        let mut passive = Passive::default();
        for (seqno, level) in [(1, Level::MajorityAndPersistActive), (2, Level::PersistMajority), (3, Level::Majority)]
        {
            passive.prepared(Seqno(seqno), level);
        }
        passive.snapshot_ended(&snapshot(0, 5, None));
        assert!(passive.advance(Seqno(4)));
        assert_eq!(passive.high_prepared, Seqno(1));
        // The prepare alone is not enough: after a restart the replica would stand in the middle of a snapshot.
        assert!(!passive.advance(Seqno(4)) && passive.advance(Seqno(5)));
        assert_eq!(passive.high_prepared, Seqno(3));
    }

    #[test]
    fn a_snapshot_from_a_disk_counts_once_it_is_durable_whole() {
        let mut passive = Passive::default();
        passive.snapshot_ended(&snapshot(0, 90, Some(80)));
        assert_eq!(passive.completed, Seqno(80));
        assert!(!passive.advance(Seqno(89)) && passive.advance(Seqno(90)));
        assert_eq!(passive.high_prepared, Seqno(90));
    }

    #[test]
    fn what_is_found_on_disk_goes_on_where_it_was() {
        let prepares = [(Seqno(3), Level::Majority), (Seqno(5), Level::PersistMajority), (Seqno(8), Level::Majority)];
        let mut passive = Passive::resume(Seqno(3), Seqno(2), &prepares, Seqno(6));
        assert!(passive.advance(Seqno(7)));
        assert_eq!((passive.high_prepared, passive.unsaid()), (Seqno(5), 1));
        passive.snapshot_ended(&snapshot(6, 9, None));
        assert!(passive.advance(Seqno(7)));
        assert_eq!(passive.high_prepared, Seqno(8));
    }
}
