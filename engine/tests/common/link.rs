//! One node follows another: what a replication stream does, by direct calls.

use changelog::Cursor;
use engine::*;
use types::{Item, Kind, Seqno, VbId, VbState};

use super::World;

pub const VB: VbId = VbId(0);

pub fn topology(chains: &[&[&str]]) -> Topology {
    let node = |name: &&str| (*name != "-").then(|| (*name).to_owned());
    chains.iter().map(|chain| chain.iter().map(node).collect()).collect()
}

fn given(item: &Item) -> Given<'_> {
    Given { key: item.key(), meta: item.meta(), value: item.has_value().then(|| item.value()) }
}

/// What a peer says of a commit that is out of order.
pub fn as_document(item: &Item) -> Change<'_> {
    Change::Document(given(item))
}

/// What a peer says of one item of its changelog.
pub fn change(item: &Item) -> Change<'_> {
    let (given, key, seqno) = (given(item), item.key(), item.seqno());
    match item.kind() {
        Kind::Committed { prepared: None } => Change::Document(given),
        Kind::Committed { prepared: Some(prepared) } => Change::Commit { key, prepared, seqno },
        Kind::Prepare { level } => Change::Prepare { given, level },
        Kind::Abort { prepared } => Change::Abort { key, prepared, seqno },
    }
}

pub fn memory(start: u64, end: u64) -> SnapshotMarker {
    SnapshotMarker { start: Seqno(start), end: Seqno(end), from_disk: None }
}

/// Sends what the active's file has after `seqno`. Returns its high seqno.
fn backfill(active: &World, replica: &World, seqno: Seqno) -> Seqno {
    let mut items = Vec::new();
    let options = persist::WarmUp { tombstones: true, prove: false };
    let store = active.bucket.store();
    let file = store.warm_up(VB, options, &mut |_, _| true, &mut |item| items.push(item)).unwrap().unwrap();
    let marker = SnapshotMarker { start: seqno, end: file.high, from_disk: Some(file.completed) };
    replica.bucket.begin_snapshot(VB, marker).unwrap();
    for item in items.iter().filter(|item| item.seqno() > seqno) {
        replica.bucket.apply(VB, &change(item)).unwrap();
    }
    // Aborts are left out above, and one may be the last.
    if replica.bucket.resume_point(VB).unwrap().seqno < file.high {
        replica.bucket.apply(VB, &Change::Advance { seqno: file.high }).unwrap();
    }
    file.high
}

/// A stream of vBucket 0 to the replica called `name`.
pub struct Link<'a> {
    active: &'a World,
    replica: &'a World,
    name: &'static str,
    cursor: Cursor,
}

impl<'a> Link<'a> {
    /// The replica's histories become the active's. What is not in memory any more comes from the active's file.
    pub fn open(active: &'a World, replica: &'a World, name: &'static str) -> Link<'a> {
        replica.bucket.set_vb_state(VB, VbState::Replica, None).unwrap();
        let failover = active.bucket.vbucket(VB).unwrap().log.record().failover.clone();
        let _ = replica.bucket.adopt_failover_log(VB, failover, &|| replica.nobody());
        let seqno = replica.bucket.resume_point(VB).unwrap().seqno;
        active.bucket.replica_began(VB, name, seqno).unwrap();
        let log = &active.bucket.vbucket(VB).unwrap().log;
        let cursor = log.cursor(name, seqno).unwrap_or_else(|| {
            let high = backfill(active, replica, seqno);
            log.cursor(name, high).expect("a file holds what the memory does not")
        });
        Link { active, replica, name, cursor }
    }

    /// Carries over what there is, as one snapshot; the replica does not say yet what it has.
    pub fn carry(&self) {
        let log = &self.active.bucket.vbucket(VB).unwrap().log;
        let slice = log.read(&self.cursor, usize::MAX);
        if slice.is_empty() {
            return;
        }
        let from_disk = slice.decided_out_of_order();
        let marker = SnapshotMarker { from_disk, ..memory(slice.from.0, slice.last.0) };
        self.replica.bucket.begin_snapshot(VB, marker).unwrap();
        for item in &slice.items {
            let change = match change(item) {
                Change::Commit { .. } if from_disk.is_some() => as_document(item),
                change => change,
            };
            self.replica.bucket.apply(VB, &change).unwrap();
        }
        log.release(&self.cursor, slice.last);
    }

    pub fn ack(&self) {
        let prepared = self.replica.bucket.high_prepared(VB).unwrap();
        self.active.bucket.seqno_acked(VB, self.name, prepared).unwrap();
    }

    /// Until nothing moves any more.
    pub fn run(&self) {
        for _ in 0..8 {
            self.active.settle();
            self.carry();
            self.replica.settle();
            self.ack();
        }
    }

    pub fn close(self) {
        self.active.bucket.vbucket(VB).unwrap().log.unregister(self.cursor);
    }
}
