//! What one commit says of its vBucket besides documents: kept in memory as of the last good commit, stored as the local
//! document `_local/vbstate`.

use changelog::{FailoverEntry, FailoverTable, Snapshot, VbRecord};
use couchstore::vbstate::{CheckpointType, Failover, VbStateRecord};
use types::{Cas, RevSeqno, Seqno, VbState, VbUuid};

const BUILD: &str = concat!("settee-", env!("CARGO_PKG_VERSION"));

/// Computed for each commit from the last one that succeeded, so a failed commit leaves no trace here.
///
/// 1. `completed ≤ high`, `prepared ≤ high`, `snap_start ≤ high ≤ snap_end`.
/// 2. `on_disk_prepares` is the number of ids in the prepare namespace that are not deleted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct VbFacts {
    pub record: VbRecord,
    pub max_cas: Cas,
    /// The highest revision of a tombstone.
    pub max_deleted_rev: RevSeqno,
    /// The highest prepare that was committed or aborted.
    pub completed: Seqno,
    /// The highest prepare.
    pub prepared: Seqno,
    /// The highest prepare of a whole snapshot, or the end of a whole one from a peer's disk: what this vBucket may say that it
    /// has.
    pub high_prepared: Seqno,
    /// The last seqno that is neither prepare nor abort.
    pub max_visible: Seqno,
    /// The first seqno whose CAS is a hybrid clock reading.
    pub hlc_epoch: Option<Seqno>,
    pub might_contain_xattrs: bool,
    pub on_disk_prepares: u64,
    pub on_disk_prepare_bytes: u64,
    pub snap_start: Seqno,
    pub snap_end: Seqno,
    /// That snapshot comes, at least in part, from a peer's disk.
    pub snap_from_disk: bool,
}

impl VbFacts {
    /// Of a vBucket that was never committed.
    pub fn new(record: VbRecord) -> VbFacts {
        VbFacts {
            record,
            max_cas: Cas(0),
            max_deleted_rev: RevSeqno(0),
            completed: Seqno(0),
            prepared: Seqno(0),
            high_prepared: Seqno(0),
            max_visible: Seqno(0),
            hlc_epoch: None,
            might_contain_xattrs: false,
            on_disk_prepares: 0,
            on_disk_prepare_bytes: 0,
            snap_start: Seqno(0),
            snap_end: Seqno(0),
            snap_from_disk: false,
        }
    }

    /// Prepares up to `upto` are decided.
    pub fn complete(&mut self, upto: Option<Seqno>) {
        self.completed = self.completed.max(upto.unwrap_or_default());
    }

    /// The snapshot in the middle of which the file ends.
    pub fn open_snapshot(&self, high: Seqno) -> Option<Snapshot> {
        // What is decided at its end the peer says again.
        let completed = self.snap_from_disk.then_some(Seqno(0));
        let open = Snapshot { start: self.snap_start, end: self.snap_end, completed };
        (open.start < high && high < open.end).then_some(open)
    }

    pub fn encode(&self) -> Vec<u8> {
        self.to_stored().encode()
    }

    /// For a file that begins with this commit.
    pub fn encode_as_first(&self) -> Vec<u8> {
        VbStateRecord { is_first: true, ..self.to_stored() }.encode()
    }

    fn to_stored(&self) -> VbStateRecord {
        let failover = self.record.failover.newest_first().iter();
        let topology = &self.record.topology;
        VbStateRecord {
            max_deleted_seqno: self.max_deleted_rev.0,
            snap_start: self.snap_start.0,
            snap_end: self.snap_end.0,
            max_cas: self.max_cas.0,
            hlc_epoch: self.hlc_epoch.map(|seqno| seqno.0),
            might_contain_xattrs: self.might_contain_xattrs,
            completed_seqno: self.completed.0,
            prepared_seqno: self.prepared.0,
            high_prepared_seqno: self.high_prepared.0,
            max_visible_seqno: Some(self.max_visible.0),
            on_disk_prepares: self.on_disk_prepares,
            on_disk_prepare_bytes: self.on_disk_prepare_bytes,
            checkpoint_type: if self.snap_from_disk { CheckpointType::Disk } else { CheckpointType::Memory },
            build: Some(BUILD.to_owned()),
            failover_table: Some(failover.map(|e| Failover { uuid: e.uuid.0, seqno: e.seqno.0 }).collect()),
            // One that no reader would accept must not make the file unreadable.
            replication_topology: is_storable(topology).then(|| topology.clone()),
            rollbacks: self.record.rollbacks.into(),
            ..VbStateRecord::new(self.record.state)
        }
    }

    /// Reads the document of a file whose header says `high`. `fresh` names the first history if the file has none.
    pub fn decode(bytes: &[u8], high: Seqno, fresh: impl FnOnce() -> VbUuid) -> Result<VbFacts, String> {
        let stored = VbStateRecord::decode(bytes).map_err(|e| e.to_string())?;
        if !stored.namespaces_supported {
            return Err("vbstate: namespaces_supported is false: keys lack collection ids".to_owned());
        }
        let entries = stored.failover_table.unwrap_or_default();
        let entries = entries.iter().map(|e| FailoverEntry { uuid: VbUuid(e.uuid), seqno: Seqno(e.seqno) }).collect();
        let failover = FailoverTable::from_entries(entries)
            .unwrap_or_else(|| FailoverTable::new(FailoverEntry { uuid: fresh(), seqno: high }));
        let topology = stored.replication_topology.unwrap_or_default();
        let (mut snap_start, mut snap_end) = (Seqno(stored.snap_start), Seqno(stored.snap_end));
        if !(snap_start <= high && high <= snap_end) {
            if stored.state != VbState::Active {
                return Err(format!("vbstate: snapshot {snap_start}..{snap_end} does not span the high seqno {high}"));
            }
            (snap_start, snap_end) = (high, high);
        }
        let rollbacks = u32::try_from(stored.rollbacks).map_err(|_| "vbstate: rollbacks are too many".to_owned())?;
        let (completed, prepared) = (Seqno(stored.completed_seqno), Seqno(stored.prepared_seqno));
        if completed > high || prepared > high {
            return Err(format!("vbstate: prepares {completed}, {prepared} lie beyond the high seqno {high}"));
        }
        Ok(VbFacts {
            record: VbRecord { state: stored.state, failover, topology, rollbacks },
            max_cas: Cas(stored.max_cas),
            max_deleted_rev: RevSeqno(stored.max_deleted_seqno),
            completed,
            prepared,
            high_prepared: Seqno(stored.high_prepared_seqno.min(high.0)),
            max_visible: stored.max_visible_seqno.map_or(high, Seqno),
            hlc_epoch: stored.hlc_epoch.map(Seqno),
            might_contain_xattrs: stored.might_contain_xattrs,
            on_disk_prepares: stored.on_disk_prepares,
            on_disk_prepare_bytes: stored.on_disk_prepare_bytes,
            snap_start,
            snap_end,
            snap_from_disk: stored.checkpoint_type != CheckpointType::Memory,
        })
    }
}

fn is_storable(topology: &[Vec<Option<String>>]) -> bool {
    let chain = |chain: &Vec<Option<String>>| (1..=4).contains(&chain.len()) && chain[0].is_some();
    (1..=2).contains(&topology.len()) && topology.iter().all(chain)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn facts() -> impl Strategy<Value = (VbFacts, Seqno)> {
        let failover = prop::collection::vec((1u64..1 << 48, 0u64..1 << 48), 1..25);
        let node = "[a-z0-9@.:]{1,20}";
        let chain = (node, prop::collection::vec(prop::option::of(node), 0..4))
            .prop_map(|(first, rest)| [Some(first)].into_iter().chain(rest).collect());
        let topology = prop::collection::vec(chain, 0..3);
        let numbers = prop::array::uniform10(0u64..1 << 48);
        (failover, topology, numbers, 0usize..4, any::<bool>(), any::<bool>()).prop_map(
            |(failover, topology, n, state, xattrs, epoch)| {
                let high = n[0];
                let entries = failover.iter().map(|&(id, seq)| FailoverEntry { uuid: VbUuid(id), seqno: Seqno(seq) });
                let facts = VbFacts {
                    record: VbRecord {
                        state: [VbState::Active, VbState::Replica, VbState::Pending, VbState::Dead][state],
                        failover: FailoverTable::from_entries(entries.collect()).unwrap(),
                        topology,
                        rollbacks: n[0] as u32,
                    },
                    max_cas: Cas(n[1] << 16),
                    max_deleted_rev: RevSeqno(n[2]),
                    completed: Seqno(n[3].min(high)),
                    prepared: Seqno(n[4].min(high)),
                    high_prepared: Seqno(n[1].min(high)),
                    max_visible: Seqno(n[5]),
                    hlc_epoch: epoch.then_some(Seqno(n[6])),
                    might_contain_xattrs: xattrs,
                    on_disk_prepares: n[7],
                    on_disk_prepare_bytes: n[8],
                    snap_start: Seqno(n[9].min(high)),
                    snap_end: Seqno(n[9].max(high)),
                    snap_from_disk: epoch,
                };
                (facts, Seqno(high))
            },
        )
    }

    proptest! {
        #[test]
        fn what_is_written_reads_back((facts, high) in facts()) {
            prop_assert_eq!(VbFacts::decode(&facts.encode(), high, || unreachable!()).unwrap(), facts);
        }

        #[test]
        fn any_topology_leaves_a_readable_file(
            topology in prop::collection::vec(prop::collection::vec(prop::option::of("[a-z]"), 0..6), 0..4),
        ) {
            let mut facts = VbFacts::new(crate::testing::record());
            facts.record.topology = topology;
            prop_assert!(VbFacts::decode(&facts.encode(), Seqno(0), || unreachable!()).is_ok());
        }
    }

    #[test]
    fn a_document_with_only_what_is_required_gets_the_defaults() {
        let json = br#"{"max_cas":"18446744073709551615","max_deleted_seqno":"3","namespaces_supported":true,"snap_end":"9","snap_start":"9","state":"active"}"#;
        let facts = VbFacts::decode(json, Seqno(12), || VbUuid(77)).unwrap();
        assert_eq!((facts.max_cas, facts.max_visible, facts.hlc_epoch), (Cas(0), Seqno(12), None));
        assert_eq!((facts.snap_start, facts.snap_end), (Seqno(12), Seqno(12)));
        assert_eq!(facts.record.failover.current(), FailoverEntry { uuid: VbUuid(77), seqno: Seqno(12) });
        let replica = String::from_utf8(json.to_vec()).unwrap().replace("active", "replica");
        assert!(VbFacts::decode(replica.as_bytes(), Seqno(12), || VbUuid(77)).is_err());
    }
}
