//! One flush's changes, made ready for the file: one entry an id, and what they do to the vBucket's facts.

use std::borrow::Cow;

use changelog::{Place, Slice, VbRecord};
use types::{Datatype, Item, Kind, Seqno};

use crate::facts::VbFacts;

/// Ids of prepares and aborts begin with this; no collection is called so.
pub const PREPARE_PREFIX: u8 = 0x02;

/// What the file calls an item: prepares and aborts live beside the documents, under ids of their own.
pub fn file_id(item: &Item) -> Cow<'_, [u8]> {
    match item.is_committed() {
        true => Cow::Borrowed(item.id()),
        false => Cow::Owned(prepare_id(item.id())),
    }
}

pub fn prepare_id(id: &[u8]) -> Vec<u8> {
    [&[PREPARE_PREFIX], id].concat()
}

pub struct Entry<'a> {
    pub id: Cow<'a, [u8]>,
    pub item: &'a Item,
}

/// 1. `entries` are sorted by id, one each: the newest of the slice. A prepare that the slice completes is not among them:
///    nobody will ask for it.
/// 2. `first..=last` are the slice's seqnos, dropped duplicates included.
pub struct Batch<'a> {
    pub entries: Vec<Entry<'a>>,
    pub first: Seqno,
    pub last: Seqno,
    /// Changes before deduplication, and their bytes.
    pub items_in: usize,
    pub bytes_in: usize,
}

impl<'a> Batch<'a> {
    pub fn of(slice: &'a Slice) -> Batch<'a> {
        let is_decided = decided(&slice.items);
        let is_done = |(n, item): (usize, &Item)| is_decided[n] && matches!(item.kind(), Kind::Prepare { .. });
        let wanted = slice.items.iter().enumerate().filter(|&each| !is_done(each));
        let mut entries: Vec<_> = wanted.map(|(_, item)| Entry { id: file_id(item), item }).collect();
        entries.sort_unstable_by(|a, b| a.id.cmp(&b.id).then_with(|| b.item.seqno().cmp(&a.item.seqno())));
        entries.dedup_by(|later, kept| later.id == kept.id);
        Batch {
            entries,
            first: slice.items.first().map_or(slice.last.next(), |item| item.seqno()),
            last: slice.last,
            items_in: slice.items.len(),
            bytes_in: slice.items.iter().map(|item| item.memory()).sum(),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The facts after this batch, except for the counts of prepares, which only the file can tell.
    pub fn facts_after(&self, before: &VbFacts, slice: &Slice, record: &VbRecord) -> VbFacts {
        let mut facts = before.clone();
        facts.record = record.clone();
        let Place { open, from_disk } = slice.snapshots.at(self.last);
        let whole = open.map_or(self.last, |open| open.start);
        // A file from before this was told apart; or a prepare whose snapshot is whole only now.
        if facts.prepared <= whole {
            facts.high_prepared = facts.high_prepared.max(facts.prepared);
        }
        // Duplicates count too: a prepare committed within the batch was there.
        for item in &slice.items {
            let meta = item.meta();
            facts.max_cas = facts.max_cas.max(meta.cas);
            facts.might_contain_xattrs |= meta.datatype.has(Datatype::XATTR);
            if facts.hlc_epoch.is_none() {
                facts.hlc_epoch = Some(meta.seqno);
            }
            // What was decided comes out of order from a disk: only the end of it says of which prepares all is known.
            if slice.snapshots.is_ordered(meta.seqno) {
                facts.complete(item.kind().decides());
            }
            match item.kind() {
                Kind::Committed { .. } => {
                    facts.max_visible = meta.seqno;
                    if meta.deleted.is_some() {
                        facts.max_deleted_rev = facts.max_deleted_rev.max(meta.rev);
                    }
                }
                Kind::Prepare { .. } => {
                    facts.prepared = meta.seqno;
                    if meta.seqno <= whole {
                        facts.high_prepared = meta.seqno.max(facts.high_prepared);
                    }
                }
                Kind::Abort { .. } => {}
            }
        }
        if let Some(snapshot) = from_disk {
            facts.complete(snapshot.completed);
            facts.high_prepared = facts.high_prepared.max(snapshot.end);
        }
        facts.snap_from_disk = open.is_some_and(|open| open.completed.is_some());
        (facts.snap_start, facts.snap_end) = open.map_or((self.last, self.last), |open| (open.start, open.end));
        facts
    }
}

/// Which of the items another of them decides.
fn decided(items: &[Item]) -> Vec<bool> {
    let mut decided = vec![false; items.len()];
    for prepared in items.iter().filter_map(|item| item.kind().decides()) {
        if let Some(n) = index_of(items, prepared) {
            decided[n] = true;
        }
    }
    decided
}

/// Items are in order of seqno; mostly they follow one another without a gap.
fn index_of(items: &[Item], seqno: Seqno) -> Option<usize> {
    let beyond_first = seqno.0.checked_sub(items.first()?.seqno().0)? as usize;
    let is_there = |n: &usize| items.get(*n).is_some_and(|item| item.seqno() == seqno);
    let upto = &items[..items.len().min(beyond_first)];
    Some(beyond_first).filter(is_there).or_else(|| upto.binary_search_by_key(&seqno, Item::seqno).ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{change, record};
    use changelog::Changelog;
    use env::Env;
    use types::{Cas, Level};

    fn log() -> (Env, Changelog) {
        let (env, _) = env::sim::env(1);
        (env, Changelog::new(Seqno(0), Cas(0), record()))
    }

    #[test]
    fn the_place_of_a_seqno_is_found_whatever_is_missing() {
        let (env, log) = log();
        let cursor = log.cursor("flusher", Seqno(0)).unwrap();
        for _ in 0..10 {
            change(&log, &*env.clock, "k", Kind::Committed { prepared: None }, Some(b"v"));
        }
        let mut items = log.read(&cursor, usize::MAX).items;
        items.retain(|item| ![1, 4, 5, 9].contains(&item.seqno().0));
        let places = (0..12).map(|seqno| index_of(&items, Seqno(seqno)));
        let expected = [None, None, Some(0), Some(1), None, None, Some(2), Some(3), Some(4), None, Some(5), None];
        assert!(places.eq(expected) && index_of(&[], Seqno(1)).is_none());
    }

    #[test]
    fn the_newest_change_of_a_key_is_kept_and_namespaces_stay_apart() {
        let (env, log) = log();
        let cursor = log.cursor("flusher", Seqno(0)).unwrap();
        let committed = |prepared| Kind::Committed { prepared };
        let prepare = Kind::Prepare { level: Level::Majority };
        for (key, kind) in [
            ("b", committed(None)),
            ("a", prepare),
            ("a", committed(Some(Seqno(2)))),
            ("b", committed(None)),
            ("c", prepare),
            ("c", Kind::Abort { prepared: Seqno(5) }),
            ("a", prepare),
        ] {
            change(&log, &*env.clock, key, kind, Some(b"v"));
        }
        let slice = log.read(&cursor, usize::MAX);
        let batch = Batch::of(&slice);
        let kept: Vec<_> = batch.entries.iter().map(|e| (&*e.id, e.item.seqno().0)).collect();
        assert_eq!(kept, [(&b"\0a"[..], 3), (b"\0b", 4), (b"\x02\0a", 7), (b"\x02\0c", 6)]);
        assert_eq!((batch.first, batch.last, batch.items_in), (Seqno(1), Seqno(7), 7));

        let facts = batch.facts_after(&VbFacts::new(record()), &slice, &record());
        assert_eq!((facts.prepared, facts.completed, facts.max_visible), (Seqno(7), Seqno(5), Seqno(4)));
        assert_eq!((facts.snap_start, facts.snap_end, facts.hlc_epoch), (Seqno(7), Seqno(7), Some(Seqno(1))));
    }
}
