//! Disks fail; a commit that was not reported as made is either the whole batch or nothing, and never a part of the
//! next one.

mod common;

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use common::{Call, MemFile};
use couchstore::{Batch, CommitOutcome, Couch, Doc, Error, Mode, Result, Step, Version};

const PATH: &str = "faulty.couch";

fn put(batch: &mut Batch<'_>, seq: u64, id: &[u8], body: &[u8]) -> Result<()> {
    batch.put(Doc {
        id,
        seq,
        rev: 1,
        deleted: false,
        content_meta: 3,
        rev_meta: &[1; 18],
        body: Some(body),
        compress: false,
    })
}

/// Batch `n` writes documents 10n to 10n+9 and overwrites document 0; large enough for several writes.
fn batch(couch: &mut Couch, n: u64) -> Result<CommitOutcome> {
    let mut batch = couch.batch()?;
    let body = vec![n as u8; 40_000];
    for i in 1..10 {
        put(&mut batch, 10 * n + i, format!("doc-{}", 10 * n + i).as_bytes(), &body)?;
    }
    put(&mut batch, 10 * n + 10, b"doc-0", &body)?;
    batch.local_put(b"_local/batch", &[n as u8])?;
    batch.commit(n)
}

fn prepared() -> (Arc<MemFile>, Couch) {
    let file = MemFile::empty();
    let mut couch = Couch::create(file.clone(), Path::new(PATH), Version::V13).unwrap();
    batch(&mut couch, 0).unwrap();
    (file, couch)
}

fn logical(couch: &Couch) -> Vec<(Vec<u8>, u64, Option<Vec<u8>>)> {
    let mut docs = Vec::new();
    let _ = couch.changes_since(0, |doc| {
        let body = couch.body(&doc).unwrap();
        docs.push((doc.id, doc.seq, body));
        ControlFlow::Continue(())
    });
    docs
}

fn reopen(file: &Arc<MemFile>) -> Couch {
    Couch::open(file.clone(), Path::new(PATH), Mode::Strict).unwrap()
}

#[test]
fn a_commit_is_few_large_writes_and_two_syncs() {
    let (file, mut couch) = prepared();
    let (writes, syncs) = (file.writes.load(Relaxed), file.syncs.load(Relaxed));
    let mut one = couch.batch().unwrap();
    put(&mut one, 100, b"one", b"{}").unwrap();
    one.commit(1).unwrap();
    assert_eq!(file.writes.load(Relaxed) - writes, 2, "all the data with the header, then the marker");
    assert_eq!(file.syncs.load(Relaxed) - syncs, 2);
    assert_eq!(couch.header().update_seq, 100);
}

#[test]
fn a_lookup_reads_each_level_once_and_a_body_once() {
    let file = MemFile::empty();
    let mut couch = Couch::create(file.clone(), Path::new(PATH), Version::V13).unwrap();
    let mut batch = couch.batch().unwrap();
    for seq in 1..=1000 {
        put(&mut batch, seq, format!("{seq:05}").as_bytes(), &[7; 6000]).unwrap();
    }
    batch.commit(1).unwrap();
    let before = file.reads.load(Relaxed);
    let couch = reopen(&file);
    assert_eq!(file.reads.load(Relaxed) - before, 1, "the header is in the last block");
    let before = file.reads.load(Relaxed);
    let doc = couch.get_by_id(b"00500").unwrap().unwrap();
    assert_eq!(file.reads.load(Relaxed) - before, 3, "three levels");
    let before = file.reads.load(Relaxed);
    assert_eq!(couch.body(&doc).unwrap().unwrap(), [7; 6000]);
    assert_eq!(file.reads.load(Relaxed) - before, 1);
}

#[test]
fn whichever_write_or_sync_fails_the_error_says_so_and_the_old_commit_stands() {
    for call in [Call::Write, Call::Sync] {
        for k in 0.. {
            let (file, mut couch) = prepared();
            let old = logical(&couch);
            file.fail_at(call, k);
            let Err(error) = batch(&mut couch, 1) else {
                assert!(k >= 2, "{call:?}: no call failed");
                break;
            };
            let Error::Commit { step, .. } = &error else { panic!("{call:?} {k}: {error:?}") };
            match call {
                Call::Sync => assert_eq!(*step, [Step::DataSync, Step::MarkerSync][k as usize]),
                _ => assert!(matches!(step, Step::Write | Step::MarkerWrite)),
            }
            assert!(error.to_string().contains(PATH), "{error}");
            assert_eq!(logical(&couch), old, "reads go on at the old commit");
            assert!(matches!(couch.batch().map(|_| ()), Err(Error::Poisoned { .. })));
            assert_eq!(logical(&reopen(&file)), old, "{call:?} {k}: a failed commit must not be found by others");

            // The same batch again, on a reopened file, is as if nothing had happened.
            let mut again = reopen(&file);
            batch(&mut again, 1).unwrap();
            let (other, mut undisturbed) = prepared();
            batch(&mut undisturbed, 1).unwrap();
            assert_eq!(logical(&reopen(&file)), logical(&reopen(&other)));
            assert!(couchstore::check::check(file, Path::new(PATH), couchstore::check::Depth::All).unwrap().is_whole());
        }
    }
}

#[test]
fn a_failed_or_dropped_batch_does_not_leak_into_the_next() {
    let (file, mut couch) = prepared();
    let mut dropped = couch.batch().unwrap();
    put(&mut dropped, 11, b"dropped", b"1").unwrap();
    dropped.local_put(b"_local/dropped", b"1").unwrap();
    dropped.purge_seq(9).unwrap();
    dropped.save().unwrap();
    drop(dropped);
    let mut refused = couch.batch().unwrap();
    put(&mut refused, 12, b"twice", b"1").unwrap();
    put(&mut refused, 13, b"twice", b"2").unwrap();
    assert!(matches!(refused.commit(2), Err(Error::Refused(_))));

    let mut next = couch.batch().unwrap();
    put(&mut next, 11, b"next", b"1").unwrap();
    next.commit(3).unwrap();
    for couch in [couch, reopen(&file)] {
        for id in [&b"dropped"[..], b"twice"] {
            assert_eq!(couch.get_by_id(id).unwrap(), None);
        }
        assert_eq!(couch.local(b"_local/dropped").unwrap(), None);
        assert_eq!((couch.header().update_seq, couch.header().purge_seq), (11, 0));
    }
}

#[test]
fn a_batch_that_ignores_a_failed_put_or_save_is_not_committed() {
    let (file, mut couch) = prepared();
    let old = logical(&couch);
    let mut ignoring = couch.batch().unwrap();
    file.fail_at(Call::Write, 0);
    let failed = (11..30).filter(|&seq| put(&mut ignoring, seq, &seq.to_be_bytes(), &[1; 40_000]).is_err()).count();
    assert!(failed > 0);
    assert!(matches!(ignoring.commit(2), Err(Error::Commit { step: Step::Write, .. })));
    assert_eq!(logical(&reopen(&file)), old);

    let mut couch = reopen(&file);
    let mut ignoring = couch.batch().unwrap();
    put(&mut ignoring, 11, b"twice", b"1").unwrap();
    put(&mut ignoring, 12, b"twice", b"2").unwrap();
    assert!(ignoring.save().is_err());
    put(&mut ignoring, 13, b"once", b"3").unwrap();
    assert!(matches!(ignoring.commit(2), Err(Error::Refused(_))));
    assert_eq!(logical(&reopen(&file)), old);
}

#[test]
fn a_file_opened_in_recovery_can_be_written_to_and_then_opens_normally() {
    for name in ["h-torn-header", "i-garbage-tail", "k-corrupt-header", "l-torn-data"] {
        let file = MemFile::of(&common::fixture(&format!("{name}-v13.couch")));
        let mut couch = Couch::open(file.clone(), Path::new(name), Mode::Recovery).unwrap();
        let before = logical(&couch);
        let mut batch = couch.batch().unwrap();
        put(&mut batch, 1000, b"new", b"body").unwrap();
        batch.commit(1).unwrap();
        let after = logical(&reopen(&file));
        assert_eq!(after[..after.len() - 1], before, "{name}");
        assert_eq!(after[after.len() - 1], (b"new".to_vec(), 1000, Some(b"body".to_vec())));
    }
}

#[test]
fn whichever_read_fails_the_error_surfaces_and_nothing_is_said_to_be_absent() {
    for k in 0..8 {
        let (file, mut couch) = prepared();
        file.fail_at(Call::Read, k);
        let outcome = couch.get_by_id(b"doc-0").and_then(|doc| couch.body(&doc.unwrap()).map(|body| body.unwrap()));
        match outcome {
            Ok(body) => assert_eq!(body.len(), 40_000),
            Err(e) => assert!(matches!(e, Error::Io { op: "read", .. }), "{e:?}"),
        }
        file.fail_at(Call::Read, k);
        match batch(&mut couch, 1) {
            Ok(_) => {}
            Err(e) => {
                assert!(matches!(e, Error::Io { .. }), "{e:?}");
                file.heal();
                assert_eq!(reopen(&file).header().update_seq, 10);
                batch(&mut couch, 1).expect("a failed read leaves the couch fit to try again");
            }
        }
        file.heal();
        assert_eq!(reopen(&file).header().update_seq, 20);
    }
}

#[test]
fn what_the_format_cannot_hold_is_refused_and_the_batch_goes_on() {
    let (_, mut couch) = prepared();
    let mut batch = couch.batch().unwrap();
    let is_limit = |result: Result<()>| assert!(matches!(result, Err(Error::Limit { .. })), "{result:?}");
    is_limit(put(&mut batch, 11, &[b'x'; 4096], b""));
    is_limit(put(&mut batch, 1 << 48, b"x", b""));
    is_limit(put(&mut batch, 11, b"x", &vec![0; (1 << 28) - 8]));
    is_limit(batch.local_put(&[b'x'; 4096], b""));
    is_limit(batch.purge_seq(1 << 48));
    let bodiless =
        Doc { id: b"x", seq: 11, rev: 1, deleted: false, content_meta: 0, rev_meta: b"", body: None, compress: false };
    assert!(matches!(batch.put(bodiless), Err(Error::Refused(_))));
    put(&mut batch, 11, &[b'x'; 4095], b"").unwrap();
    batch.commit(1).unwrap();
    let longest = couch.get_by_id(&[b'x'; 4095]).unwrap().unwrap();
    assert_eq!(couch.body(&longest).unwrap(), Some(Vec::new()));

    let mut stolen = couch.batch().unwrap();
    put(&mut stolen, 5, b"another", b"").unwrap();
    assert!(matches!(stolen.commit(2), Err(Error::Refused(_))), "seqno 5 belongs to another document");
    assert_eq!(couch.header().update_seq, 11);
    let file = MemFile::of(b"x");
    assert!(matches!(Couch::create(file, Path::new(PATH), Version::V13), Err(Error::NotEmpty { size: 1, .. })));
}
