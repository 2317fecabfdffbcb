//! Whatever is written, in whatever batches, is what a map would hold, at the newest header and at every one before.

mod common;

use std::collections::BTreeMap;
use std::ops::{Bound, ControlFlow};
use std::path::Path;
use std::sync::Arc;

use common::{MemFile, hex};
use couchstore::check::{Depth, check};
use couchstore::{Couch, Doc, DocInfo, Error, Mode, Snapshot, Version};
use proptest::prelude::*;

#[derive(Clone, Debug)]
enum Change {
    Put { id: u8, body_bytes: usize, compress: bool },
    Delete { id: u8, body: bool },
    LocalPut { id: u8, body_bytes: usize },
    LocalRemove { id: u8 },
}

#[derive(Clone, Debug)]
struct Commit {
    changes: Vec<Change>,
    save_after: Option<usize>,
    reopen: bool,
}

#[derive(Clone, Debug, PartialEq)]
struct Entry {
    seq: u64,
    deleted: bool,
    rev_meta: Vec<u8>,
    body: Option<Vec<u8>>,
}

#[derive(Clone, Debug, Default, PartialEq)]
struct Model {
    docs: BTreeMap<Vec<u8>, Entry>,
    locals: BTreeMap<Vec<u8>, Vec<u8>>,
    seq: u64,
}

fn change() -> impl Strategy<Value = Change> {
    let size = prop_oneof![4 => 0usize..40, 2 => 40usize..600, 1 => 3000usize..9000];
    prop_oneof![
        8 => (any::<u8>(), size.clone(), any::<bool>())
            .prop_map(|(id, body_bytes, compress)| Change::Put { id, body_bytes, compress }),
        3 => (any::<u8>(), any::<bool>()).prop_map(|(id, body)| Change::Delete { id, body }),
        1 => (0u8..30, size).prop_map(|(id, body_bytes)| Change::LocalPut { id, body_bytes }),
        2 => (0u8..30).prop_map(|id| Change::LocalRemove { id }),
    ]
}

fn commits() -> impl Strategy<Value = Vec<Commit>> {
    let commit = (proptest::collection::vec(change(), 0..60), proptest::option::of(0usize..60), any::<bool>())
        .prop_map(|(changes, save_after, reopen)| Commit { changes, save_after, reopen });
    proptest::collection::vec(commit, 1..7)
}

fn doc_id(id: u8) -> Vec<u8> {
    // Lengths vary, so that splits do.
    let mut out = vec![0];
    out.extend(format!("key-{id:03}").bytes());
    out.resize(out.len() + usize::from(id % 7) * 10, b'x');
    out
}

fn bytes(seed: u64, len: usize) -> Vec<u8> {
    (0..len as u64).map(|i| ((seed * 31 + i * i) >> 2) as u8).collect()
}

/// Applies one commit to the couch and to the model; checks what the couch says it replaced.
fn apply(couch: &mut Couch, model: &mut Model, commit: &Commit, timestamp_ns: u64) {
    let mut replaced = Vec::new();
    let mut seen = std::collections::HashSet::new();
    let mut batch = couch.batch().unwrap();
    for (i, change) in commit.changes.iter().enumerate() {
        match change {
            Change::Put { id, .. } | Change::Delete { id, .. } if !seen.insert(*id) => {}
            Change::Put { id, .. } | Change::Delete { id, .. } => {
                model.seq += 1 + model.seq % 3;
                let seq = model.seq;
                let (deleted, body, compress) = match change {
                    Change::Put { body_bytes, compress, .. } => (false, Some(bytes(seq, *body_bytes)), *compress),
                    Change::Delete { body, .. } => (true, body.then(|| bytes(seq, 9)), true),
                    _ => unreachable!(),
                };
                let entry = Entry { seq, deleted, rev_meta: seq.to_be_bytes().to_vec(), body };
                batch
                    .put(Doc {
                        id: &doc_id(*id),
                        seq,
                        rev: seq + 1,
                        deleted,
                        content_meta: if compress { 0x80 } else { 3 },
                        rev_meta: &entry.rev_meta,
                        body: entry.body.as_deref(),
                        compress,
                    })
                    .unwrap();
                replaced.push(model.docs.insert(doc_id(*id), entry).map(|old| (old.seq, old.deleted)));
            }
            Change::LocalPut { id, body_bytes } => {
                let (id, body) = (vec![*id; 1 + usize::from(*id) * 9], bytes(7, *body_bytes));
                batch.local_put(&id, &body).unwrap();
                model.locals.insert(id, body);
            }
            Change::LocalRemove { id } => {
                let id = vec![*id; 1 + usize::from(*id) * 9];
                batch.local_remove(&id).unwrap();
                model.locals.remove(&id);
            }
        }
        if commit.save_after == Some(i) {
            batch.save().unwrap();
        }
    }
    let outcome = batch.commit(timestamp_ns).unwrap();
    let told: Vec<_> = outcome.replaced.iter().map(|old| old.as_ref().map(|old| (old.seq, old.deleted))).collect();
    assert_eq!(told, replaced);
    assert_eq!(outcome.header.timestamp_ns, timestamp_ns);
}

fn assert_holds(snapshot: &Snapshot, model: &Model) {
    let read = |doc: &DocInfo| Entry {
        seq: doc.seq,
        deleted: doc.deleted,
        rev_meta: doc.rev_meta.clone(),
        body: snapshot.body(doc).unwrap(),
    };
    let mut docs = BTreeMap::new();
    let mut last_id = None;
    let _ = snapshot.by_id(Bound::Unbounded, Bound::Unbounded, |doc| {
        assert!(last_id.as_ref() < Some(&doc.id));
        last_id = Some(doc.id.clone());
        docs.insert(doc.id.clone(), read(&doc));
        ControlFlow::Continue(())
    });
    assert_eq!(docs, model.docs);
    let mut seqs = Vec::new();
    let _ = snapshot.changes_since(0, |doc| {
        assert_eq!(Some(&read(&doc)), model.docs.get(&doc.id));
        seqs.push(doc.seq);
        ControlFlow::Continue(())
    });
    assert!(seqs.is_sorted());
    assert_eq!(seqs.len(), model.docs.len());
    assert_eq!(BTreeMap::from_iter(snapshot.locals().unwrap()), model.locals);

    let ids: Vec<Vec<u8>> = (0..=255).map(doc_id).collect::<std::collections::BTreeSet<_>>().into_iter().collect();
    let ids: Vec<&[u8]> = ids.iter().map(Vec::as_slice).collect();
    for (id, found) in ids.iter().zip(snapshot.get_many_by_id(&ids).unwrap()) {
        assert_eq!(found.as_ref().map(read).as_ref(), model.docs.get(*id));
    }
    for seq in [0, 1, model.seq / 2, model.seq, model.seq + 1] {
        let want = model.docs.iter().find(|(_, entry)| entry.seq == seq).map(|(id, _)| id);
        assert_eq!(snapshot.get_by_seq(seq).unwrap().map(|doc| doc.id).as_ref(), want);
        let since = model.docs.values().filter(|entry| entry.seq >= seq).count() as u64;
        assert_eq!(snapshot.count_since(seq).unwrap(), since);
    }
    let header = snapshot.header();
    let deleted = model.docs.values().filter(|entry| entry.deleted).count() as u64;
    assert_eq!((header.doc_count(), header.deleted_count()), (model.docs.len() as u64 - deleted, deleted));
    assert_eq!(header.update_seq, model.seq);
}

/// Runs the commits on `file`; returns the model after each, with its header's position.
fn run(file: Arc<MemFile>, version: Version, commits: &[Commit]) -> Vec<(u64, Model)> {
    let path = Path::new("model");
    let mut couch = Couch::create(file.clone(), path, version).unwrap();
    let mut model = Model::default();
    let mut history = vec![(0, model.clone())];
    for (i, commit) in commits.iter().enumerate() {
        apply(&mut couch, &mut model, commit, 1 + i as u64);
        history.push((couch.header().at, model.clone()));
        if commit.reopen {
            let header = couch.header().clone();
            couch = Couch::open(file.clone(), path, Mode::Strict).unwrap();
            assert_eq!(*couch.header(), header);
        }
    }
    history
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn a_file_holds_what_a_map_would_at_every_header(commits in commits(), v14: bool) {
        let version = if v14 { Version::V14 } else { Version::V13 };
        let file = MemFile::empty();
        let history = run(file.clone(), version, &commits);
        let report = check(file.clone(), Path::new("model"), Depth::All).unwrap();
        prop_assert_eq!(&report.damage, &[]);
        prop_assert_eq!(&report.warnings, &Vec::<String>::new());
        prop_assert_eq!(report.headers.len(), history.len());

        let mut couch = Couch::open(file.clone(), Path::new("model"), Mode::Strict).unwrap();
        let pinned = couch.snapshot();
        for (i, (at, model)) in history.iter().enumerate().rev() {
            prop_assert_eq!(couch.header().at, *at);
            assert_holds(&couch, model);
            assert_holds(&Snapshot::open_at(file.clone(), Path::new("model"), *at).unwrap(), model);
            match couch.rewind() {
                Ok(()) => prop_assert!(i > 0),
                Err(e) => assert!(i == 0 && matches!(e, Error::NoHeader { .. })),
            }
        }
        assert_holds(&pinned, &history.last().unwrap().1);
    }

    #[test]
    fn short_reads_and_writes_make_the_same_bytes(commits in commits(), seed: u64) {
        let (plain, stingy) = (MemFile::empty(), MemFile::empty());
        stingy.stingy(seed);
        let history = run(plain.clone(), Version::V13, &commits);
        prop_assert_eq!(&run(stingy.clone(), Version::V13, &commits), &history);
        prop_assert!(plain.bytes() == stingy.bytes());
        let couch = Couch::open(stingy, Path::new("stingy"), Mode::Strict).unwrap();
        assert_holds(&couch, &history.last().unwrap().1);
    }

    #[test]
    fn a_commit_after_a_rewind_starts_from_there_and_nothing_later_shows(
        commits in commits(), after in commits(), back in 1usize..4, v14: bool,
    ) {
        let version = if v14 { Version::V14 } else { Version::V13 };
        let file = MemFile::empty();
        let history = run(file.clone(), version, &commits);
        let mut couch = Couch::open(file.clone(), Path::new("model"), Mode::Strict).unwrap();
        let back = back.min(history.len() - 1);
        (0..back).for_each(|_| couch.rewind().unwrap());
        let (at, mut model) = history[history.len() - 1 - back].clone();
        prop_assert_eq!(couch.header().at, at);
        apply(&mut couch, &mut model, &after[0], 99);
        assert_holds(&Couch::open(file.clone(), Path::new("model"), Mode::Strict).unwrap(), &model);
        if v14 {
            couch.rewind().unwrap();
            prop_assert_eq!(couch.header().at, at);
        }
        prop_assert!(check(file, Path::new("model"), Depth::All).unwrap().is_whole());
    }

    #[test]
    fn ranges_of_ids_have_the_ends_they_are_asked_for(commits in commits(), from: u8, to: u8, shape in 0usize..9) {
        let file = MemFile::empty();
        let history = run(file.clone(), Version::V13, &commits);
        let couch = Couch::open(file, Path::new("model"), Mode::Strict).unwrap();
        let (from, to) = (doc_id(from.min(to)), doc_id(to.max(from)));
        let bound = |kind, key| match kind {
            0 => Bound::Unbounded,
            1 => Bound::Included(key),
            _ => Bound::Excluded(key),
        };
        let (from, to) = (bound(shape % 3, &from[..]), bound(shape / 3, &to[..]));
        let mut found = Vec::new();
        let flow = couch.by_id(from, to, |doc| {
            found.push(hex(&doc.id));
            ControlFlow::Continue(())
        });
        prop_assert!(flow.unwrap().is_continue());
        let within = |id: &[u8]| {
            (match from { Bound::Unbounded => true, Bound::Included(f) => id >= f, Bound::Excluded(f) => id > f })
                && (match to { Bound::Unbounded => true, Bound::Included(t) => id <= t, Bound::Excluded(t) => id < t })
        };
        let want: Vec<_> = history.last().unwrap().1.docs.keys().filter(|id| within(id)).map(|id| hex(id)).collect();
        prop_assert_eq!(found, want);
    }
}

#[test]
fn removing_every_local_document_leaves_a_tree_that_can_grow_again() {
    let file = MemFile::empty();
    let mut couch = Couch::create(file.clone(), Path::new("locals"), Version::V13).unwrap();
    for round in 0..2 {
        let mut batch = couch.batch().unwrap();
        (0..200u8).for_each(|i| batch.local_put(&[i; 40], &[round; 30]).unwrap());
        batch.commit(1).unwrap();
        assert_eq!(couch.locals().unwrap().len(), 200);
        let mut batch = couch.batch().unwrap();
        (0..200u8).for_each(|i| batch.local_remove(&[i; 40]).unwrap());
        batch.commit(2).unwrap();
        assert_eq!(couch.header().local, None);
        assert_eq!(couch.locals().unwrap(), []);
    }
    assert!(check(file, Path::new("locals"), Depth::All).unwrap().is_whole());
}
