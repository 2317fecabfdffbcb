//! What a replica has comes in snapshots: between two ends of them it has no state its peer ever had.
//!
//! ```text
//!     [.... start][ 41 42 . 44      end ][            ]
//!            whole        ▲ open        whole again
//!                         high
//! ```

use std::collections::VecDeque;

use types::Seqno;

/// One snapshot, as it is received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// Everything up to here is whole without it.
    pub start: Seqno,
    /// With everything up to here it is whole again.
    pub end: Seqno,
    /// It comes from the peer's disk, where prepares up to here are decided; of what decided them only the outcome is sent.
    pub completed: Option<Seqno>,
}

/// Where a seqno lies among the snapshots.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Place {
    /// The snapshot it is in the middle of.
    pub open: Option<Snapshot>,
    /// The last one from a disk that ends at it or before.
    pub from_disk: Option<Snapshot>,
}

/// The snapshots that some reader has yet to pass.
///
/// 1. They are in order and do not overlap; only the last may reach beyond the high seqno.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshots(VecDeque<Snapshot>);

impl Snapshots {
    pub(crate) fn begin(&mut self, high: Seqno, end: Seqno, completed: Option<Seqno>) {
        if let Some(open) = self.0.back_mut().filter(|last| last.end > high) {
            open.end = open.end.max(end);
            open.completed = open.completed.max(completed);
        } else if end > high {
            self.0.push_back(Snapshot { start: high, end, completed });
        }
    }

    /// Of a snapshot under way there will be no more than there is. What is there of one from a disk stays out of order: it
    /// says no more of prepares than was known before, which is that those up to `completed` are decided.
    pub(crate) fn cut(&mut self, high: Seqno, completed: Seqno) {
        if let Some(open) = self.0.back_mut().filter(|last| last.end > high) {
            (open.end, open.completed) = (high, open.completed.map(|_| completed));
        }
    }

    /// Those that came from a disk.
    pub(crate) fn disks(&self) -> impl Iterator<Item = &Snapshot> {
        self.0.iter().filter(|snapshot| snapshot.completed.is_some())
    }

    /// Whether what is decided at this seqno was decided in the order of the prepares, as on the node that decided it. What
    /// comes from a disk is in the order of the seqnos that are left.
    pub fn is_ordered(&self, seqno: Seqno) -> bool {
        !self.disks().any(|snapshot| snapshot.start < seqno && seqno <= snapshot.end)
    }

    pub(crate) fn resume(&mut self, snapshot: Snapshot) {
        self.0.push_back(snapshot);
    }

    pub(crate) fn last(&self) -> Option<Snapshot> {
        self.0.back().copied()
    }

    pub(crate) fn drop_before(&mut self, seqno: Seqno) {
        while self.0.front().is_some_and(|first| first.end.next() < seqno) {
            self.0.pop_front();
        }
    }

    /// Those that reach `seqno` or end before it: whoever has read up to the end of one may not know that it has ended.
    pub(crate) fn since(&self, seqno: Seqno) -> Snapshots {
        match self.0.is_empty() {
            true => Snapshots::default(),
            false => Snapshots(self.0.iter().filter(|snapshot| snapshot.end.next() >= seqno).copied().collect()),
        }
    }

    /// See [`Place`].
    pub fn at(&self, seqno: Seqno) -> Place {
        let ended = self.0.partition_point(|snapshot| snapshot.end <= seqno);
        Place {
            open: self.0.get(ended).copied().filter(|snapshot| snapshot.start < seqno),
            from_disk: self.0.range(..ended).rev().find(|snapshot| snapshot.completed.is_some()).copied(),
        }
    }
}

impl From<Place> for Snapshots {
    fn from(place: Place) -> Snapshots {
        Snapshots(place.from_disk.into_iter().chain(place.open).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn snapshot(start: u64, end: u64, completed: Option<u64>) -> Snapshot {
        Snapshot { start: Seqno(start), end: Seqno(end), completed: completed.map(Seqno) }
    }

    #[test]
    fn a_place_is_whole_or_says_between_which_ends_it_is_not() {
        let mut all = Snapshots::default();
        all.begin(Seqno(10), Seqno(20), Some(Seqno(15)));
        all.begin(Seqno(20), Seqno(25), None);
        all.begin(Seqno(25), Seqno(30), None);
        let open = |at| all.at(Seqno(at)).open;
        assert_eq!([open(10), open(20), open(25), open(30)], [None; 4]);
        assert_eq!((open(11), open(29)), (Some(snapshot(10, 20, Some(15))), Some(snapshot(25, 30, None))));
        let from_disk = |at| all.at(Seqno(at)).from_disk;
        assert_eq!((from_disk(19), from_disk(20)), (None, Some(snapshot(10, 20, Some(15)))));
        assert_eq!(from_disk(27), from_disk(20));
    }

    #[test]
    fn a_snapshot_that_was_interrupted_stays_open_until_all_of_it_has_come() {
        let mut all = Snapshots::default();
        all.begin(Seqno(10), Seqno(20), None);
        all.begin(Seqno(14), Seqno(30), Some(Seqno(12)));
        assert_eq!(all.at(Seqno(22)).open, Some(snapshot(10, 30, Some(12))));
        all.begin(Seqno(30), Seqno(30), None);
        assert_eq!(all.at(Seqno(30)).open, None);
        all.drop_before(Seqno(31));
        assert_ne!(all, Snapshots::default());
        all.drop_before(Seqno(32));
        assert_eq!(all, Snapshots::default());
    }

    #[test]
    fn what_was_cut_short_stays_out_of_order_and_says_nothing_new_of_prepares() {
        let mut all = Snapshots::default();
        all.begin(Seqno(10), Seqno(20), Some(Seqno(18)));
        all.cut(Seqno(14), Seqno(7));
        let place = Place { open: None, from_disk: Some(snapshot(10, 14, Some(7))) };
        assert_eq!((all.at(Seqno(14)), all.at(Seqno(90))), (place, place));
        assert_eq!([10, 11, 14, 15].map(|at| all.is_ordered(Seqno(at))), [true, false, false, true]);
        assert_eq!((all.since(Seqno(15)), all.since(Seqno(16))), (all.clone(), Snapshots::default()));
        let mut all = Snapshots::default();
        all.begin(Seqno(10), Seqno(20), None);
        all.cut(Seqno(14), Seqno(7));
        assert!(all.is_ordered(Seqno(12)) && all.at(Seqno(14)) == Place::default());
    }
}
