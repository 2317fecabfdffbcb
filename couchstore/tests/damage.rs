//! Damaged files are found out, and never read as something else.

mod common;

use std::path::Path;

use common::{MemFile, fixture, open};
use couchstore::check::{Depth, check};
use couchstore::{Couch, Doc, Error, Mode, Version, fuzz_open};
use proptest::prelude::*;

const PATH: &str = "damaged.couch";

/// A file of a few commits; returns its bytes and where each header begins and ends.
fn commits(version: Version, count: u64, docs: u64) -> (Vec<u8>, Vec<(usize, usize)>) {
    let file = MemFile::empty();
    let mut couch = Couch::create(file.clone(), Path::new(PATH), version).unwrap();
    let mut headers = vec![(0, file.bytes().len())];
    for commit in 0..count {
        let mut batch = couch.batch().unwrap();
        for i in 0..docs {
            let (id, body) = (format!("doc-{i}"), format!("{{\"commit\":{commit},\"doc\":{i}}}"));
            let doc = Doc {
                id: id.as_bytes(),
                seq: commit * docs + i + 1,
                rev: commit + 1,
                deleted: false,
                content_meta: 0x80,
                rev_meta: &[5; 18],
                body: Some(body.as_bytes()),
                compress: true,
            };
            batch.put(doc).unwrap();
        }
        batch.local_put(b"_local/x", &[commit as u8]).unwrap();
        batch.commit(commit + 1).unwrap();
        headers.push((couch.header().at as usize, file.bytes().len()));
    }
    (file.bytes(), headers)
}

#[test]
fn a_file_cut_anywhere_opens_at_the_newest_whole_header_or_says_that_one_is_torn() {
    for version in [Version::V13, Version::V14] {
        let (bytes, headers) = commits(version, 3, 3);
        for cut in 0..=bytes.len() {
            let newest = headers.iter().rev().find(|(_, end)| *end <= cut).map(|(at, _)| *at as u64);
            let torn = headers.iter().any(|&(at, end)| at > 0 && at + 2 <= cut && cut < end);
            let at = |couch: Couch| couch.header().at;
            match (open(&bytes[..cut], Mode::Recovery).map(at), newest) {
                (Ok(at), Some(newest)) => assert_eq!(at, newest, "cut at {cut}"),
                (Err(Error::NoHeader { .. } | Error::Truncated { .. }), None) => {}
                (other, _) => panic!("cut at {cut}: {other:?}, not {newest:?}"),
            }
            match (open(&bytes[..cut], Mode::Strict).map(at), newest) {
                (Err(Error::Truncated { .. }), _) if torn => {}
                (Ok(at), Some(newest)) if !torn => assert_eq!(at, newest, "cut at {cut}"),
                (Err(Error::NoHeader { .. }), None) if !torn => {}
                (other, _) => panic!("cut at {cut}, torn {torn}: {other:?}, not {newest:?}"),
            }
        }
    }
}

/// Everything of this file up to the end of its data is alive, so there is no bit that may flip unnoticed.
#[test]
fn a_flip_of_any_bit_of_a_live_chunk_or_of_its_header_is_found_by_check() {
    let (bytes, headers) = commits(Version::V13, 1, 4);
    let data_end = bytes[..4096].iter().rposition(|&b| b != 0).unwrap() + 1;
    let (header, end) = headers[1];
    assert!(check(MemFile::of(&bytes), Path::new(PATH), Depth::Newest).unwrap().is_whole());
    for at in (headers[0].1..data_end).chain(header + 1..end) {
        for bit in 0..8 {
            let mut flipped = bytes.clone();
            flipped[at] ^= 1 << bit;
            let report = check(MemFile::of(&flipped), Path::new(PATH), Depth::Newest).unwrap();
            assert!(!report.is_whole(), "byte {at} bit {bit}");
            let damage = &report.damage[0];
            assert!(damage.offset.is_some_and(|offset| offset <= at as u64), "byte {at}: {damage:?}");
            assert!(damage.what.contains(PATH));
        }
    }
}

#[test]
fn a_block_that_lost_its_marker_is_found_even_in_the_middle_of_a_body() {
    let file = MemFile::empty();
    let mut couch = Couch::create(file.clone(), Path::new(PATH), Version::V13).unwrap();
    let mut batch = couch.batch().unwrap();
    let body = vec![9; 20_000];
    let doc = Doc {
        id: b"k",
        seq: 1,
        rev: 1,
        deleted: false,
        content_meta: 3,
        rev_meta: &[],
        body: Some(&body),
        compress: false,
    };
    batch.put(doc).unwrap();
    batch.commit(1).unwrap();
    assert!(check(file.clone(), Path::new(PATH), Depth::All).unwrap().is_whole());
    for block in 1..=4 {
        let mut bytes = file.bytes();
        assert_eq!(bytes[block * 4096], 0);
        bytes[block * 4096] = 9;
        let couch = open(&bytes, Mode::Strict).unwrap();
        let doc = couch.get_by_id(b"k").unwrap().unwrap();
        assert!(matches!(couch.body(&doc), Err(Error::Corrupt { offset, .. }) if offset == block as u64 * 4096));
        let report = check(MemFile::of(&bytes), Path::new(PATH), Depth::Newest).unwrap();
        assert_eq!(report.damage[0].offset, Some(block as u64 * 4096));
    }
}

#[test]
fn check_agrees_with_the_original_about_the_sample_files() {
    let entries = std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures")).unwrap();
    let mut seen = 0;
    for name in entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()) {
        if !name.ends_with(".couch") {
            continue;
        }
        seen += 1;
        let report = check(MemFile::of(&fixture(&name)), Path::new(&name), Depth::All).unwrap();
        let damaged = ["h-", "i-", "j-", "k-"].iter().any(|prefix| name.starts_with(prefix));
        assert_eq!(!report.is_whole(), damaged, "{name}: {:?}", report.damage);
        assert_eq!(report.warnings, Vec::<String>::new(), "{name}");
        for (header, whole) in &report.headers {
            assert_eq!(!whole, name.starts_with("j-") && header.at == 4096, "{name}@{}", header.at);
        }
    }
    assert_eq!(seen, 16);
    let report = check(MemFile::of(&fixture("j-corrupt-doc-v13.couch")), Path::new("j"), Depth::Newest).unwrap();
    let couch = open(&fixture("j-corrupt-doc-v13.couch"), Mode::Strict).unwrap();
    let body_at = couch.get_by_seq(5).unwrap().unwrap().body_at;
    assert_eq!(report.damage.len(), 1);
    assert_eq!(report.damage[0].offset, Some(body_at));
}

#[test]
fn an_encrypted_file_is_refused_by_name_and_an_unknown_version_by_number() {
    let framed = |marker: u8, body: &[u8]| {
        let mut block = vec![marker];
        block.extend((body.len() as u32 + 4).to_be_bytes());
        block.extend(crc32c::crc32c(body).to_be_bytes());
        block.extend(body);
        block
    };
    let mut metadata = vec![1, 4];
    metadata.extend(b"key1");
    metadata.push(32);
    metadata.extend(0..32u8);
    let mut bytes = framed(2, &metadata);
    assert_eq!(bytes[5..9], 0x9288_6800_u32.to_be_bytes());
    bytes.resize(4096, 0);
    let mut header = vec![14];
    header.resize(33, 0);
    header.extend([0xff; 6]);
    bytes.extend(framed(1, &header));
    match open(&bytes, Mode::Strict).map(|_| ()) {
        Err(e @ Error::Encrypted { .. }) => assert!(e.to_string().contains("key1"), "{e}"),
        other => panic!("{other:?}"),
    }

    let (mut bytes, _) = commits(Version::V13, 1, 1);
    bytes.resize(8192, 0);
    let mut header = vec![15];
    header.resize(33, 0);
    bytes.extend(framed(1, &header));
    for mode in [Mode::Strict, Mode::Recovery] {
        assert!(matches!(open(&bytes, mode), Err(Error::UnknownVersion { version: 15, offset: 8192, .. })));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn no_bytes_make_the_reader_panic_or_hang(
        bytes in proptest::collection::vec(any::<u8>(), 0..9000), first in 0u8..3,
    ) {
        let mut bytes = bytes;
        bytes.iter_mut().step_by(4096).for_each(|marker| *marker = first);
        fuzz_open(&bytes);
    }

    #[test]
    fn no_damage_to_a_real_file_makes_the_reader_panic_or_hang(
        edits in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..20), which in 0usize..3,
    ) {
        let name = ["a-10json-v13.couch", "g-collections-v13.couch", "c-deletes-local-v13.couch"][which];
        let mut bytes = fixture(name);
        for (at, byte) in edits {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        fuzz_open(&bytes);
    }
}
