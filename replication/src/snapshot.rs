//! Snapshots as a consumer is told of them: where they begin and end, and what of them it is shown.
//!
//! A consumer holds a state the producer really had only when it has all of a snapshot. What it is not shown, of other
//! collections or about writes that are not decided, leaves holes; the end is moved to where it can be reached.

use std::collections::{HashSet, VecDeque};

use persist::Changes;
use types::{Item, Kind, Seqno};
use wire::dcp::{MarkerDetail, SnapshotFlags, SnapshotMarker};

use crate::dress::as_document;
use crate::filter::Filter;
use crate::terms::{MarkerVersion, Terms};

/// What is sent next.
#[derive(Debug)]
pub(crate) enum Next {
    Marker(SnapshotMarker),
    Item(Item),
    /// The rest of the snapshot is not for this consumer.
    Advanced(Seqno),
}

/// What a marker may say besides its range.
#[derive(Clone, Copy, Debug, Default)]
struct Facts {
    max_visible: Seqno,
    completed: Seqno,
    purge: Seqno,
    prepared: Seqno,
}

fn marker(terms: &Terms, (start, end): (Seqno, Seqno), flags: SnapshotFlags, facts: Facts) -> SnapshotMarker {
    let Facts { max_visible, completed: high_completed, purge, prepared: high_prepared } = facts;
    let detail = match terms.marker_version() {
        MarkerVersion::V1 => MarkerDetail::V1,
        MarkerVersion::V2 => MarkerDetail::V2 { max_visible, high_completed },
        MarkerVersion::V2_2 => MarkerDetail::V2_2 { max_visible, high_completed, purge, high_prepared },
    };
    SnapshotMarker { start, end, flags, detail }
}

/// A part of the changelog, up to and including `last`, that will be one snapshot.
pub(crate) struct Part {
    pub start: Seqno,
    pub items: Vec<Item>,
    pub last: Seqno,
    /// See [`changelog::Slice::decided_out_of_order`].
    pub unordered: Option<Seqno>,
}

/// Returns what to send, and the snapshot's end; `None`: the consumer needs to know nothing of it.
///
/// What came from a disk and was not in order there is not in order for a replica either, which may restart in the middle: it is
/// told the same as from a disk, documents instead of commits.
pub(crate) fn of_memory(terms: &Terms, filter: &Filter, part: Part) -> Option<(VecDeque<Next>, Seqno)> {
    let Part { start, mut items, last, unordered } = part;
    // The outcome of a prepare is still to come, and takes the consumer there.
    let ends_undecided = items.last().is_some_and(|item| matches!(item.kind(), Kind::Prepare { .. }));
    items.retain(|item| terms.shows(item) && filter.admits(item));
    let unordered = unordered.filter(|_| terms.sync_writes);
    let source = if unordered.is_some() { SnapshotFlags::DISK } else { SnapshotFlags::MEMORY };
    let mut flags = source.with(SnapshotFlags::CHECKPOINT);
    if terms.sync_writes {
        flags = flags.with(SnapshotFlags::MAY_DUPLICATE_KEYS);
    } else {
        keep_last_of_each_key(&mut items);
    }
    let shown_upto = items.last().map(Item::seqno);
    let can_be_advanced = terms.knows_collections() && !terms.sync_writes && !ends_undecided;
    let end = match shown_upto {
        Some(shown) if shown == last || terms.sync_writes => last,
        _ if can_be_advanced => last,
        Some(shown) => shown,
        None => return None,
    };
    let max_visible = items.iter().rev().find(|item| item.is_committed()).map_or(start, Item::seqno);
    let completed = unordered.unwrap_or_default();
    let facts = Facts { max_visible: max_visible.min(end), completed, ..Facts::default() };
    let mut queue = VecDeque::with_capacity(items.len() + 2);
    queue.push_back(Next::Marker(marker(terms, (start, end), flags, facts)));
    let told = |item| if unordered.is_some() { as_document(item) } else { item };
    queue.extend(items.into_iter().map(told).map(Next::Item));
    if shown_upto != Some(end) && can_be_advanced {
        queue.push_back(Next::Advanced(end));
    }
    Some((queue, end))
}

/// A snapshot has each key once.
fn keep_last_of_each_key(items: &mut Vec<Item>) {
    if items.len() < 2 {
        return;
    }
    let mut seen = HashSet::with_capacity(items.len());
    let is_last: Vec<bool> = items.iter().rev().map(|item| seen.insert(item.id())).collect();
    drop(seen);
    let mut is_last = is_last.into_iter().rev();
    items.retain(|_| is_last.next().expect("one for each"));
}

/// A commit of the file, as one snapshot that comes in pieces.
#[derive(Debug)]
pub(crate) struct OfDisk {
    /// Until the first item is there to be sent.
    marker: Option<SnapshotMarker>,
    end: Seqno,
    shown_upto: Seqno,
    can_be_advanced: bool,
    skips_deletes: bool,
}

impl OfDisk {
    /// Begins at `start`; nothing after `end_max` is wanted.
    pub fn new(terms: &Terms, start: Seqno, end_max: Seqno, changes: &Changes, skips_deletes: bool) -> OfDisk {
        let facts = Facts {
            max_visible: changes.max_visible(),
            completed: changes.completed(),
            purge: changes.purge(),
            prepared: changes.prepared(),
        };
        let ends_undecided = facts.prepared > facts.completed;
        let can_be_advanced = terms.knows_collections() && !terms.sync_writes && !ends_undecided;
        let whole = terms.sync_writes || can_be_advanced;
        let end = if whole { changes.upto() } else { facts.max_visible };
        let end = end.min(end_max);
        let facts = Facts { max_visible: facts.max_visible.min(end), ..facts };
        let marker = Some(marker(terms, (start, end), SnapshotFlags::DISK.with(SnapshotFlags::CHECKPOINT), facts));
        OfDisk { marker, end, shown_upto: start, can_be_advanced, skips_deletes }
    }

    pub fn push(&mut self, terms: &Terms, filter: &Filter, items: Vec<Item>, queue: &mut VecDeque<Next>) {
        for item in items {
            let is_skipped = self.skips_deletes && item.is_committed() && item.is_deleted();
            if item.seqno() > self.end || is_skipped || !terms.shows(&item) || !filter.admits(&item) {
                continue;
            }
            queue.extend(self.marker.take().map(Next::Marker));
            self.shown_upto = item.seqno();
            queue.push_back(Next::Item(item));
        }
    }

    /// There is no more. Returns the snapshot's end, if the consumer knows of the snapshot.
    pub fn finish(&mut self, queue: &mut VecDeque<Next>) -> Option<Seqno> {
        if self.can_be_advanced && self.shown_upto < self.end {
            queue.extend(self.marker.take().map(Next::Marker));
            queue.push_back(Next::Advanced(self.end));
        }
        self.marker.is_none().then_some(self.end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use types::{Cas, CollectionId, Datatype, DeleteSource, DocKey, Level, Meta, RevSeqno};
    use wire::dcp::{Open, OpenFlags};
    use wire::{Feature, FeatureSet};

    fn terms(sync_writes: bool, features: &[Feature]) -> Terms {
        let open = Open { flags: OpenFlags::PRODUCER, name: b"n", details: b"" };
        let terms = Terms::of(&open, FeatureSet::of(features)).unwrap_or_else(|refusal| panic!("{refusal:?}"));
        Terms { sync_writes, ..terms }
    }

    fn item(seqno: u64, id: &[u8], kind: Kind) -> Item {
        let deleted = matches!(kind, Kind::Abort { .. }).then_some(DeleteSource::Explicit);
        let (cas, rev, datatype) = (Cas(1), RevSeqno(1), Datatype::RAW);
        let meta = Meta { seqno: Seqno(seqno), cas, rev, flags: 0, expiry: 0, datatype, deleted };
        Item::new(DocKey::parse(id).unwrap(), meta, kind, None)
    }

    const PLAIN: Kind = Kind::Committed { prepared: None };
    const PREPARE: Kind = Kind::Prepare { level: Level::Majority };

    /// Items 11 and on, by name: `a`, `b` documents, `p` a prepare, `x` an abort, `9` of another collection.
    fn told(terms: &Terms, filter: &Filter, what: &str) -> Option<String> {
        let items = (11..).zip(what.bytes()).map(|(seqno, name)| match name {
            b'p' => item(seqno, b"\0p", PREPARE),
            b'x' => item(seqno, b"\0p", Kind::Abort { prepared: Seqno(seqno - 1) }),
            b'9' => item(seqno, b"\x09k", PLAIN),
            name => item(seqno, &[0, name], PLAIN),
        });
        let last = Seqno(10 + what.len() as u64);
        let part = Part { start: Seqno(10), items: items.collect(), last, unordered: None };
        let (queue, end) = of_memory(terms, filter, part)?;
        let show = |next: &Next| match next {
            Next::Marker(marker) => format!("[{}..{}]", marker.start, marker.end),
            Next::Item(item) => item.seqno().to_string(),
            Next::Advanced(seqno) => format!("→{seqno}"),
        };
        let Some(Next::Marker(SnapshotMarker { end: marked, .. })) = queue.front() else { panic!("no marker first") };
        assert_eq!(*marked, end);
        Some(queue.iter().map(show).collect::<Vec<_>>().join(" "))
    }

    #[test]
    fn a_snapshot_of_memory_has_each_key_once_and_an_end_that_can_be_reached() {
        let old = terms(false, &[]);
        let aware = terms(false, &[Feature::Collections]);
        let replica = terms(true, &[Feature::Collections]);
        let all = |what| {
            [told(&old, &Filter::Default, what), told(&aware, &Filter::All, what), told(&replica, &Filter::All, what)]
                .map(|told| told.unwrap_or_default())
        };
        assert_eq!(all("abc"), ["[10..13] 11 12 13", "[10..13] 11 12 13", "[10..13] 11 12 13"]);
        assert_eq!(all("aba"), ["[10..13] 12 13", "[10..13] 12 13", "[10..13] 11 12 13"]);
        assert_eq!(all("ap"), ["[10..11] 11", "[10..11] 11", "[10..12] 11 12"]);
        assert_eq!(all("apx"), ["[10..11] 11", "[10..13] 11 →13", "[10..13] 11 12 13"]);
        assert_eq!(all("p"), ["", "", "[10..11] 11"]);
        assert_eq!(all("x"), ["", "[10..11] →11", "[10..11] 11"]);
        assert_eq!(all("a9"), ["[10..11] 11", "[10..12] 11 12", "[10..12] 11 12"]);
        let only = Filter::Collections(vec![CollectionId(0)]);
        assert_eq!(told(&aware, &only, "a9").as_deref(), Some("[10..12] 11 →12"));
        assert_eq!(told(&aware, &only, "9").as_deref(), Some("[10..11] →11"));
        assert_eq!(told(&old, &Filter::Default, "9"), None);
    }

    #[test]
    fn what_is_out_of_order_is_told_to_a_replica_as_from_a_disk() {
        let part = || Part {
            start: Seqno(10),
            items: vec![item(11, b"\0k", Kind::Committed { prepared: Some(Seqno(5)) })],
            last: Seqno(11),
            unordered: Some(Seqno(4)),
        };
        let told = |terms: &Terms| {
            let (mut queue, _) = of_memory(terms, &Filter::All, part()).unwrap();
            match (queue.pop_front(), queue.pop_front()) {
                (Some(Next::Marker(marker)), Some(Next::Item(item))) => (marker, item.kind()),
                other => panic!("{other:?}"),
            }
        };
        let (marker, kind) = told(&terms(true, &[Feature::Collections]));
        assert!(marker.flags.has(SnapshotFlags::DISK) && !marker.flags.has(SnapshotFlags::MEMORY));
        assert!(matches!(marker.detail, MarkerDetail::V2 { high_completed: Seqno(4), .. }));
        assert_eq!(kind, PLAIN);
        let (marker, _) = told(&terms(false, &[Feature::Collections]));
        assert!(marker.flags.has(SnapshotFlags::MEMORY) && !marker.flags.has(SnapshotFlags::DISK));
    }

    #[test]
    fn markers_say_as_much_as_their_consumer_understands() {
        let facts = Facts { max_visible: Seqno(5), completed: Seqno(4), purge: Seqno(3), prepared: Seqno(6) };
        let detail = |terms: &Terms| marker(terms, (Seqno(1), Seqno(9)), SnapshotFlags::DISK, facts).detail;
        let v2 = MarkerDetail::V2 { max_visible: Seqno(5), high_completed: Seqno(4) };
        assert_eq!(detail(&terms(false, &[])), MarkerDetail::V1);
        assert_eq!(detail(&terms(true, &[])), v2);
        let newest = Terms { marker_version: MarkerVersion::V2_2, ..terms(true, &[]) };
        assert!(matches!(detail(&newest), MarkerDetail::V2_2 { purge: Seqno(3), high_prepared: Seqno(6), .. }));
    }
}
