//! What a vBucket's file must say besides documents: its state and its histories.

use types::{Seqno, VbState, VbUuid};

/// One history of the vBucket began at `seqno`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FailoverEntry {
    pub uuid: VbUuid,
    pub seqno: Seqno,
}

/// The histories of a vBucket, newest first. Never empty, at most [`FailoverTable::ENTRIES_MAX`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FailoverTable(Vec<FailoverEntry>);

impl FailoverTable {
    pub const ENTRIES_MAX: usize = 25;

    pub fn new(first: FailoverEntry) -> FailoverTable {
        FailoverTable(vec![first])
    }

    /// The table a file holds. `None` if it has no entry.
    pub fn from_entries(mut newest_first: Vec<FailoverEntry>) -> Option<FailoverTable> {
        newest_first.truncate(Self::ENTRIES_MAX);
        (!newest_first.is_empty()).then_some(FailoverTable(newest_first))
    }

    /// Starts a new history at `seqno`; those that would begin later never happened.
    pub fn begin(&mut self, entry: FailoverEntry) {
        self.0.retain(|old| old.seqno <= entry.seqno);
        self.0.insert(0, entry);
        self.0.truncate(Self::ENTRIES_MAX);
    }

    /// Forgets the histories that begin after `seqno`: they are another's. `fresh` names one if none is left.
    pub fn prune(&mut self, seqno: Seqno, fresh: impl FnOnce() -> VbUuid) {
        self.0.retain(|entry| entry.seqno <= seqno);
        if self.0.is_empty() {
            self.0.push(FailoverEntry { uuid: fresh(), seqno: Seqno(0) });
        }
    }

    pub fn current(&self) -> FailoverEntry {
        self.0[0]
    }

    pub fn newest_first(&self) -> &[FailoverEntry] {
        &self.0
    }
}

/// State, histories and replication chains of a vBucket, replaced as a whole when any changes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VbRecord {
    pub state: VbState,
    pub failover: FailoverTable,
    /// Replication chains, each `[active, replica…]` by node name, `None` where a replica is missing. Empty: never set.
    pub topology: Vec<Vec<Option<String>>>,
    /// How often this vBucket went back to an earlier state because its history was not the cluster's. What the commit log
    /// holds from before the last time is void.
    pub rollbacks: u32,
}

impl VbRecord {
    /// Without a replication chain, and never rolled back.
    pub fn new(state: VbState, failover: FailoverTable) -> VbRecord {
        VbRecord { state, failover, topology: Vec::new(), rollbacks: 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(uuid: u64, seqno: u64) -> FailoverEntry {
        FailoverEntry { uuid: VbUuid(uuid), seqno: Seqno(seqno) }
    }

    #[test]
    fn a_new_history_drops_those_that_would_begin_after_it() {
        let mut table = FailoverTable::new(entry(1, 0));
        table.begin(entry(2, 50));
        table.begin(entry(3, 20));
        assert_eq!(table.newest_first(), [entry(3, 20), entry(1, 0)]);
    }

    #[test]
    fn the_table_forgets_the_oldest_beyond_its_bound() {
        let mut table = FailoverTable::new(entry(1, 0));
        for n in 2..100 {
            table.begin(entry(n, n));
        }
        assert_eq!(table.newest_first().len(), FailoverTable::ENTRIES_MAX);
        assert_eq!(table.current(), entry(99, 99));
    }
}
