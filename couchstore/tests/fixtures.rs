//! Files written by the original library open here exactly as their sidecars say.

mod common;

use std::ops::{Bound, ControlFlow};

use common::{fixture, hex, open, sidecar};
use couchstore::{DocInfo, Error, Mode, Snapshot};
use serde_json::Value;

const WHOLE: [&str; 11] = [
    "a-10json-v11.couch",
    "a-10json-v12.couch",
    "a-10json-v13.couch",
    "b-1000snappy-v11.couch",
    "b-1000snappy-v13.couch",
    "c-deletes-local-v13.couch",
    "d-multi-commit-v13.couch",
    "e-compacted-v13.couch",
    "e2-compacted-dropdeletes-v13.couch",
    "f-empty-v13.couch",
    "g-collections-v13.couch",
];

fn docs_by_seq(snapshot: &Snapshot) -> Vec<DocInfo> {
    let mut docs = Vec::new();
    let flow = snapshot.changes_since(0, |doc| {
        docs.push(doc);
        ControlFlow::Continue(())
    });
    assert!(flow.unwrap().is_continue());
    docs
}

#[test]
fn every_document_and_header_of_a_whole_file_is_as_its_sidecar_says() {
    for name in WHOLE {
        let want = sidecar(name);
        let couch = open(&fixture(name), Mode::Strict).unwrap();
        let header = couch.header();
        assert_eq!(header.version.byte(), want["disk_version"], "{name}");
        assert_eq!(header.version.checksum().name(), want["crc"], "{name}");
        assert_eq!(header.doc_count(), want["doc_count"], "{name}");
        assert_eq!(header.deleted_count(), want["deleted_count"], "{name}");
        assert_eq!(header.update_seq, want["update_seq"], "{name}");
        assert_eq!(header.purge_seq, want["purge_seq"], "{name}");

        if let Some(commits) = want["commits"].as_array() {
            let mut headers = couch.headers(Mode::Strict).unwrap();
            headers.retain(|header| header.at != 0);
            headers.reverse();
            assert_eq!(headers.len(), commits.len(), "{name}");
            for (header, commit) in headers.iter().zip(commits) {
                assert_eq!(header.at, commit["header_pos"], "{name}");
                assert_eq!(header.update_seq, commit["update_seq"], "{name}");
                assert_eq!(header.doc_count(), commit["doc_count"], "{name}");
                assert_eq!(header.deleted_count(), commit["deleted_count"], "{name}");
                if want["disk_version"] == 13 {
                    assert_eq!(header.timestamp_ns, commit["timestamp_ns"], "{name}");
                }
                if let Some(live) = commit["live_seqs_by_id"].as_array() {
                    let at = Snapshot::open_at(common::MemFile::of(&fixture(name)), couch.path(), header.at).unwrap();
                    let mut seqs = Vec::new();
                    let _ = at.by_id(Bound::Unbounded, Bound::Unbounded, |doc| {
                        seqs.push(Value::from(doc.seq));
                        ControlFlow::Continue(())
                    });
                    assert_eq!(&seqs, live, "{name}@{}", header.at);
                }
            }
        }

        let locals = couch.locals().unwrap();
        assert_eq!(locals.len(), want["local_docs"].as_object().unwrap().len(), "{name}");
        for (id, body) in &locals {
            let want = &want["local_docs"][std::str::from_utf8(id).unwrap()];
            match want["hex"].as_str() {
                Some(want) => assert_eq!(hex(body), want, "{name}"),
                None => assert_eq!(std::str::from_utf8(body).unwrap(), want, "{name}"),
            }
            assert_eq!(couch.local(id).unwrap().as_ref(), Some(body));
        }

        let docs = docs_by_seq(&couch);
        let wanted = want["docs_by_seq"].as_array().unwrap();
        assert_eq!(docs.len(), wanted.len(), "{name}");
        for (doc, want) in docs.iter().zip(wanted) {
            assert_eq!(hex(&doc.id), want["id_hex"], "{name}");
            assert_eq!(doc.seq, want["seq"]);
            assert_eq!(doc.rev, want["rev"]);
            assert_eq!(doc.deleted, want["deleted"]);
            assert_eq!(doc.content_meta, want["content_meta"]);
            assert_eq!(hex(&doc.rev_meta), want["rev_meta_hex"]);
            match (couch.body(doc).unwrap(), want["body"].as_str(), want["body_hex"].as_str()) {
                (None, None, None) => {}
                (Some(body), Some(want), None) => assert_eq!(std::str::from_utf8(&body).unwrap(), want),
                (Some(body), None, Some(want)) => assert_eq!(hex(&body), want),
                (body, ..) => panic!("{name}: {body:?} instead of {want}"),
            }
            assert_eq!(couch.get_by_id(&doc.id).unwrap().as_ref(), Some(doc), "{name}");
            assert_eq!(couch.get_by_seq(doc.seq).unwrap().as_ref(), Some(doc), "{name}");
        }
    }
}

#[test]
fn damaged_files_open_as_the_original_opens_them_in_either_mode() {
    for (name, refused) in [
        ("h-torn-header-v13.couch", Some("Truncated")),
        ("i-garbage-tail-v13.couch", Some("Corrupt")),
        ("k-corrupt-header-v13.couch", Some("Checksum")),
        ("l-torn-data-v13.couch", None),
    ] {
        let want = sidecar(name);
        match (open(&fixture(name), Mode::Strict), refused) {
            (Ok(couch), None) => assert_eq!(couch.header().at, want["default_open"]["header_pos"]),
            (Err(e), Some(kind)) => assert!(format!("{e:?}").starts_with(kind), "{name}: {e:?}"),
            (outcome, _) => panic!("{name}: {:?}", outcome.map(|couch| couch.header().clone())),
        }
        let recovered = open(&fixture(name), Mode::Recovery).unwrap();
        assert_eq!(recovered.header().at, want["recovery_open"]["header_pos"]);
        assert_eq!(recovered.header().update_seq, want["recovery_open"]["update_seq"]);
        assert_eq!(recovered.header().doc_count(), want["recovery_open"]["doc_count"]);
        assert_eq!(recovered.header().deleted_count(), want["recovery_open"]["deleted_count"]);
    }
}

#[test]
fn a_flipped_bit_in_a_body_is_found_when_that_body_is_read_and_hides_nothing_else() {
    let couch = open(&fixture("j-corrupt-doc-v13.couch"), Mode::Strict).unwrap();
    let docs = docs_by_seq(&couch);
    assert_eq!(docs.len(), 10);
    for doc in docs {
        match couch.body(&doc) {
            Ok(Some(_)) => assert_ne!(doc.seq, 5),
            Err(Error::Checksum { offset, .. }) => assert_eq!((doc.seq, offset), (5, doc.body_at)),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn ascending_ids_are_looked_up_in_one_descent_as_well_as_one_by_one() {
    let couch = open(&fixture("b-1000snappy-v13.couch"), Mode::Strict).unwrap();
    let mut ids: Vec<Vec<u8>> = docs_by_seq(&couch).into_iter().step_by(3).map(|doc| doc.id).collect();
    ids.extend([b"".to_vec(), b"\0doc-0005x".to_vec(), b"zzz".to_vec()]);
    ids.sort();
    let ids: Vec<&[u8]> = ids.iter().map(Vec::as_slice).collect();
    let found = couch.get_many_by_id(&ids).unwrap();
    assert_eq!(found.len(), ids.len());
    for (id, doc) in ids.iter().zip(found) {
        assert_eq!(couch.get_by_id(id).unwrap(), doc);
        assert_eq!(doc.is_some(), id.len() == 9);
    }
}
