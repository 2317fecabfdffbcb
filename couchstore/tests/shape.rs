//! The trees we write have the shape the original library gives them, node for node.

mod common;

use std::ops::ControlFlow;
use std::path::Path;

use common::{MemFile, fixture, hex, open};
use couchstore::check::{Depth, check, leaf_counts};
use couchstore::{Copy, Couch, Doc, DocInfo, Kind, Mode, Snapshot, Version};

fn doc<'a>(id: &'a [u8], seq: u64, rev_meta: &'a [u8], body: &'a [u8]) -> Doc<'a> {
    Doc { id, seq, rev: 1, deleted: false, content_meta: 0x80, rev_meta, body: Some(body), compress: true }
}

fn create(version: Version) -> (std::sync::Arc<MemFile>, Couch) {
    let file = MemFile::empty();
    (file.clone(), Couch::create(file, Path::new("new.couch"), version).unwrap())
}

/// One file written by hand from the rules of the format, literal by literal. Compressors differ, so what is compared
/// is every byte that does not depend on them: framing, bodies, positions as far as the nodes' sizes agree, headers.
#[test]
fn the_worked_example_comes_out_as_computed_by_hand() {
    let (file, mut couch) = create(Version::V14);
    assert_eq!(hex(&file.bytes()), format!("010000002b978bad3a0e{}fffffffffffe", "00".repeat(32)));
    let mut rev_meta = 0x16f0_a1b2_c3d4_0000_u64.to_be_bytes().to_vec();
    rev_meta.extend([0, 0, 0, 0, 2, 0, 0, 6, 1, 1]);
    let mut batch = couch.batch().unwrap();
    batch.put(doc(b"\0k", 1, &rev_meta, br#"{"a":1}"#)).unwrap();
    let outcome = batch.commit(0x1797_9cfe_362a_0000).unwrap();
    assert_eq!(outcome.replaced, [None]);
    let bytes = file.bytes();
    assert_eq!(hex(&bytes[48..65]), "80000009ce0114d007187b2261223a317d");
    assert_eq!(bytes.len(), 4189);

    let inflate = |at: usize| {
        let len = (u32::from_be_bytes(bytes[at..at + 4].try_into().unwrap()) & 0x7fff_ffff) as usize;
        let payload = &bytes[at + 8..at + 8 + len];
        assert_eq!(u32::from_be_bytes(bytes[at + 4..at + 8].try_into().unwrap()), crc32c::crc32c(payload));
        (8 + len, snap::raw::Decoder::new().decompress_vec(payload).unwrap())
    };
    let (by_id_size, by_id) = inflate(65);
    let (by_seq_size, by_seq) = inflate(65 + by_id_size);
    let shared = format!("800000000000300000000000018016f0a1b2c3d400000000000002000006{}", "0101");
    let shared = &shared[2..];
    assert_eq!(hex(&by_id), format!("01{}{}{}{}", "0020000029", "006b", "00000000000100000011", shared));
    let (position, rest) = shared.split_at(26);
    assert_eq!(
        hex(&by_seq),
        format!("01{}{}{}{}{}{}", "0060000026", "000000000001", "0020000011", position, "006b", rest)
    );

    let u48 = |value: usize| format!("{value:012x}");
    let body = [
        "0e",
        "000000000001",
        "000000000000",
        "000000000000",
        "0011",
        "001c",
        "0000",
        "17979cfe362a0000",
        "000000000000",
        &u48(65 + by_id_size),
        &u48(by_seq_size),
        "0000000001",
        &u48(65),
        &u48(by_id_size),
        "0000000001",
        "0000000000",
        "000000000011",
    ]
    .concat();
    assert_eq!(hex(&bytes[4096..4101]), "0100000058");
    assert_eq!(hex(&bytes[4105..]), body);
    assert_eq!(couch.header().live_bytes(), (17 + by_id_size + by_seq_size) as u64);

    let reopened = open(&bytes, Mode::Strict).unwrap();
    assert_eq!(reopened.header(), couch.header());
    let found = reopened.get_by_id(b"\0k").unwrap().unwrap();
    assert_eq!((found.body_at, found.body_size, found.rev_meta.clone()), (48, 17, rev_meta));
    assert_eq!(reopened.body(&found).unwrap().unwrap(), br#"{"a":1}"#);

    let mut unmarked = bytes.clone();
    unmarked[4096] = 0;
    let before = open(&unmarked, Mode::Strict).unwrap();
    assert_eq!((before.header().at, before.header().doc_count()), (0, 0));
    assert_eq!(before.get_by_id(b"\0k").unwrap(), None);
}

/// The same file with nodes that are snappy in name only, all literals; its bytes were computed without this crate.
#[test]
fn the_worked_example_made_without_a_compressor_is_read() {
    let data = [
        "010000002b978bad3a0e0000000000000000000000000000000000000000000000000000000000000000fffffffffffe",
        "80000009ce0114d007187b2261223a317d80000033689bfd0f31c0010020000029006b00000000000100000011000000",
        "0000300000000000018016f0a1b2c3d40000000000000200000601018000003459d7e8e232c401006000002600000000",
        "0001002000001100000000003000000000000180006b16f0a1b2c3d4000000000000020000060101",
    ];
    let header = [
        "0100000058c5e525d10e0000000000010000000000000000000000000011001c000017979cfe362a0000000000000000",
        "00000000007c00000000003c000000000100000000004100000000003b00000000010000000000000000000011",
    ];
    let unhex = |lines: &[&str]| -> Vec<u8> {
        let text = lines.concat();
        (0..text.len()).step_by(2).map(|i| u8::from_str_radix(&text[i..i + 2], 16).unwrap()).collect()
    };
    let mut bytes = unhex(&data);
    bytes.resize(4096, 0);
    bytes.extend(unhex(&header));
    let couch = open(&bytes, Mode::Strict).unwrap();
    assert_eq!(
        (couch.header().version, couch.header().update_seq, couch.header().live_bytes()),
        (Version::V14, 1, 136)
    );
    assert_eq!(couch.header().timestamp_ns, 0x1797_9cfe_362a_0000);
    let found = couch.get_by_id(b"\0k").unwrap().unwrap();
    assert_eq!(couch.get_by_seq(1).unwrap().unwrap(), found);
    assert_eq!(couch.body(&found).unwrap().unwrap(), br#"{"a":1}"#);
    assert_eq!(couch.headers(Mode::Strict).unwrap().iter().map(|h| h.at).collect::<Vec<_>>(), [4096, 0]);
    assert!(check(MemFile::of(&bytes), Path::new("worked"), Depth::All).unwrap().is_whole());
}

/// A by-seq entry is 5 + 6 + 18 bytes, the id and the metadata.
fn one_batch(entry_bytes: usize, count: u64) -> Couch {
    let (_, mut couch) = create(Version::V13);
    let mut batch = couch.batch().unwrap();
    for seq in 1..=count {
        batch.put(doc(format!("{seq:04}").as_bytes(), seq, &vec![7; entry_bytes - 29 - 4], b"")).unwrap();
    }
    batch.commit(1).unwrap();
    couch
}

#[test]
fn one_batch_splits_into_the_leaves_the_original_makes() {
    let repeated = |n: usize, times: usize, last: &[usize]| [vec![n; times], last.to_vec()].concat();
    for (entry_bytes, count, want) in [
        (53, 24, vec![24]),
        (53, 25, vec![17, 8]),
        (53, 100, repeated(17, 5, &[15])),
        (53, 1000, repeated(17, 58, &[14])),
        (200, 10, vec![5, 5]),
        (500, 5, vec![2, 3]),
    ] {
        let couch = one_batch(entry_bytes, count);
        assert_eq!(leaf_counts(&couch, Kind::BySeq).unwrap(), want, "{count} of {entry_bytes}");
    }
}

#[test]
fn single_appends_fill_leaves_as_the_original_does() {
    let (_, mut couch) = create(Version::V13);
    for seq in 1..=60 {
        let mut batch = couch.batch().unwrap();
        batch.put(doc(format!("{seq:04}").as_bytes(), seq, &[7; 53 - 29 - 4], b"")).unwrap();
        batch.commit(seq).unwrap();
    }
    assert_eq!(leaf_counts(&couch, Kind::BySeq).unwrap(), [17, 17, 17, 9]);
}

#[test]
fn long_local_ids_never_put_more_than_three_entries_in_a_node() {
    let (_, mut couch) = create(Version::V13);
    for i in 0..12u8 {
        let mut batch = couch.batch().unwrap();
        batch.local_put(&[i; 2000], b"x").unwrap();
        batch.commit(1).unwrap();
        let counts = leaf_counts(&couch, Kind::Local).unwrap();
        assert!(counts.iter().all(|&n| n <= 3), "{counts:?}");
    }
    assert_eq!(couch.locals().unwrap().len(), 12);
}

/// The documents that the commit at `header_at` brought, in the order they were saved.
fn brought(name: &str, header_at: u64, after_seq: u64) -> (Snapshot, Vec<DocInfo>) {
    let snapshot = Snapshot::open_at(MemFile::of(&fixture(name)), Path::new(name), header_at).unwrap();
    let mut docs = Vec::new();
    let _ = snapshot.changes_since(after_seq + 1, |doc| {
        docs.push(doc);
        ControlFlow::Continue(())
    });
    (snapshot, docs)
}

#[test]
fn saving_the_same_batches_makes_the_same_leaves_as_the_original_made() {
    for (name, docs_a_save) in [
        ("b-1000snappy-v11.couch", 250),
        ("b-1000snappy-v13.couch", 250),
        ("c-deletes-local-v13.couch", 1000),
        ("d-multi-commit-v13.couch", 1000),
    ] {
        let original = open(&fixture(name), Mode::Strict).unwrap();
        let mut headers = original.headers(Mode::Strict).unwrap();
        headers.reverse();
        let (_, mut couch) = create(original.header().version);
        let mut seq = 0;
        for header in headers.iter().filter(|header| header.update_seq > 0) {
            let (snapshot, docs) = brought(name, header.at, seq);
            assert_eq!(docs.len() as u64, header.update_seq - seq, "nothing of a batch was overwritten within it");
            let mut batch = couch.batch().unwrap();
            for (i, info) in docs.iter().enumerate() {
                let body = snapshot.raw_body(info).unwrap();
                batch
                    .put(Doc {
                        id: &info.id,
                        seq: info.seq,
                        rev: info.rev,
                        deleted: info.deleted,
                        content_meta: info.content_meta,
                        rev_meta: &info.rev_meta,
                        body: body.as_deref(),
                        compress: false,
                    })
                    .unwrap();
                if (i + 1) % docs_a_save == 0 {
                    batch.save().unwrap();
                }
            }
            batch.commit(header.timestamp_ns).unwrap();
            seq = header.update_seq;
            for kind in [Kind::BySeq, Kind::ById] {
                let counts = leaf_counts(&snapshot, kind).unwrap();
                assert_eq!(leaf_counts(&couch, kind).unwrap(), counts, "{name}@{} {kind:?}", header.at);
            }
            assert_eq!(couch.header().doc_count(), header.doc_count());
            assert_eq!(couch.header().deleted_count(), header.deleted_count());
            assert_eq!(couch.header().body_bytes(), header.body_bytes());
        }
    }
}

fn copy_of(snapshot: &Snapshot, keep: impl Fn(&DocInfo) -> bool) -> (std::sync::Arc<MemFile>, Couch) {
    let file = MemFile::empty();
    let mut copy =
        Copy::create(file.clone(), Path::new("copy.couch"), snapshot.header().version, common::no_spill()).unwrap();
    let _ = snapshot.changes_since(0, |doc| {
        if keep(&doc) {
            copy.put(&doc, snapshot.raw_body(&doc).unwrap().as_deref()).unwrap();
        }
        ControlFlow::Continue(())
    });
    for (id, body) in snapshot.locals().unwrap().into_iter().rev() {
        copy.local_put(&id, &body).unwrap();
    }
    let header = snapshot.header();
    let couch = copy.commit(header.update_seq, header.purge_seq, header.timestamp_ns).unwrap();
    (file, couch)
}

#[test]
fn a_copy_has_the_leaves_and_the_content_of_the_originals_compaction() {
    for (from, to, tombstones) in [
        ("d-multi-commit-v13.couch", "e-compacted-v13.couch", true),
        ("c-deletes-local-v13.couch", "e2-compacted-dropdeletes-v13.couch", false),
    ] {
        let compacted = open(&fixture(to), Mode::Strict).unwrap();
        let (file, couch) = copy_of(&open(&fixture(from), Mode::Strict).unwrap(), |doc| tombstones || !doc.deleted);
        for kind in [Kind::BySeq, Kind::ById, Kind::Local] {
            assert_eq!(leaf_counts(&couch, kind).unwrap(), leaf_counts(&compacted, kind).unwrap(), "{to} {kind:?}");
        }
        let read = |snapshot: &Snapshot| {
            let mut docs = Vec::new();
            let _ = snapshot.changes_since(0, |doc| {
                let body = snapshot.body(&doc).unwrap();
                docs.push((DocInfo { body_at: 0, ..doc }, body));
                ControlFlow::Continue(())
            });
            (docs, snapshot.locals().unwrap(), snapshot.header().update_seq, snapshot.header().timestamp_ns)
        };
        assert_eq!(read(&couch), read(&compacted));
        assert_eq!(read(&open(&file.bytes(), Mode::Strict).unwrap()), read(&compacted));
        assert_eq!(couch.headers(Mode::Strict).unwrap().len(), 1);
        assert_eq!(couch.header().body_bytes(), compacted.header().body_bytes());
        assert!(check(file, Path::new("copy"), Depth::All).unwrap().is_whole());
    }
}

#[test]
fn a_copy_splits_as_the_originals_does_and_can_be_written_to() {
    let repeated = |n: usize, times: usize, last: &[usize]| [vec![n; times], last.to_vec()].concat();
    for (entry_bytes, count, want) in
        [(53, 100, repeated(17, 5, &[15])), (53, 1000, repeated(17, 58, &[14])), (500, 5, vec![2, 2, 1])]
    {
        let (file, mut couch) = copy_of(&one_batch(entry_bytes, count), |_| true);
        assert_eq!(leaf_counts(&couch, Kind::BySeq).unwrap(), want, "{count} of {entry_bytes}");
        let mut batch = couch.batch().unwrap();
        batch.put(doc(b"0001", count + 1, b"", b"new")).unwrap();
        let outcome = batch.commit(2).unwrap();
        assert_eq!(outcome.replaced[0].as_ref().unwrap().seq, 1);
        assert_eq!(couch.headers(Mode::Strict).unwrap().len(), 2);
        assert!(check(file, Path::new("copy"), Depth::All).unwrap().is_whole());
    }
    for version in [Version::V13, Version::V14] {
        let file = MemFile::empty();
        let copy = Copy::create(file.clone(), Path::new("copy"), version, common::no_spill()).unwrap();
        let couch = copy.commit(7, 3, 1).unwrap();
        assert_eq!(couch.headers(Mode::Strict).unwrap().len(), 1);
        let couch = open(&file.bytes(), Mode::Strict).unwrap();
        assert_eq!((couch.header().update_seq, couch.header().purge_seq, couch.header().doc_count()), (7, 3, 0));
    }
}

/// Whatever the original library has written, compacted by us, has the same documents and passes every check.
#[test]
fn a_file_compacted_offline_has_the_same_content_and_one_commit() {
    let (env, sim) = env::sim::env(1);
    let names = ["d-multi-commit-v13.couch", "c-deletes-local-v13.couch", "e-compacted-v13.couch"];
    for name in names {
        let (from, to) = (Path::new("/").join(name), Path::new("/").join(format!("{name}.new")));
        sim.storage.write_file(&from, &fixture(name)).unwrap();
        couchstore::compact(&env.storage, &from, &to, Mode::Strict).unwrap();
        let open = |path: &Path| couchstore::inspect::open(&*env.storage, path, Mode::Strict).unwrap();
        let dump = |path: &Path| {
            let mut lines = Vec::new();
            let _ = couchstore::inspect::dump(&open(path), |line| {
                lines.push(line.to_string());
                ControlFlow::Continue(())
            });
            (lines, open(path).locals().unwrap())
        };
        assert_eq!(dump(&from), dump(&to), "{name}");
        assert_eq!(open(&to).headers(Mode::Strict).unwrap().len(), 1);
        let file = env.storage.open(&to, env::OpenMode::Read).unwrap();
        assert!(check(file, &to, Depth::All).unwrap().is_whole());
        assert!(couchstore::compact(&env.storage, &from, &to, Mode::Strict).is_err(), "it does not overwrite");
        assert_eq!(dump(&from), dump(&to), "and leaves what is there");
    }
    let damaged = fixture(names[0]);
    sim.storage.write_file("/damaged", &damaged[..damaged.len() / 2]).unwrap();
    let (from, to) = (Path::new("/damaged"), Path::new("/none"));
    if couchstore::compact(&env.storage, from, to, Mode::Strict).is_err() {
        assert!(!env.storage.exists(to).unwrap());
    }
}
