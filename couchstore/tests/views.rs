//! What people and scripts are shown of a file, and what the key-value service reads in it.

mod common;

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use common::{fixture, open, sidecar};
use couchstore::check::Depth;
use couchstore::kv::{RevMeta, Sync};
use couchstore::vbstate::{self, VbStateRecord};
use couchstore::{Error, Mode, inspect};
use serde_json::{Value, json};
use types::{DeleteSource, Level, VbState};

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

fn path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

#[test]
fn a_dump_is_the_sidecar_line_by_line() {
    for name in WHOLE {
        let want = sidecar(name);
        let couch = open(&fixture(name), Mode::Strict).unwrap();
        let mut lines = Vec::new();
        let flow = inspect::dump(&couch, |mut line| {
            if let Some(prepare) = line.as_object_mut().unwrap().remove("prepare") {
                assert_eq!(prepare, json!({"level": 1, "is_delete": false}));
            }
            lines.push(line);
            ControlFlow::Continue(())
        });
        assert!(flow.unwrap().is_continue());
        let wanted = want["docs_by_seq"].as_array().unwrap();
        assert_eq!(lines.len(), wanted.len(), "{name}");
        lines.iter().zip(wanted).for_each(|(line, want)| assert_eq!(line, want, "{name}"));
        assert_eq!(inspect::local_docs(&couch).unwrap(), want["local_docs"], "{name}");
    }
}

#[test]
fn info_says_what_the_sidecar_says() {
    let storage = env::os::env().storage;
    for name in WHOLE {
        let want = sidecar(name);
        let info = inspect::info(&*storage, &path(name), Mode::Strict).unwrap();
        for key in ["disk_version", "crc", "doc_count", "deleted_count", "update_seq", "purge_seq"] {
            assert_eq!(info[key], want[key], "{name} {key}");
        }
        let ids: Vec<&String> = want["local_docs"].as_object().unwrap().keys().collect();
        assert_eq!(info["local_docs"], json!(ids));
        assert_eq!(info["file_bytes"], fixture(name).len());
        assert!(info["live_bytes"].as_u64().unwrap() < info["file_bytes"].as_u64().unwrap());
    }
    match inspect::info(&*storage, &path("absent.couch"), Mode::Strict) {
        Err(e @ Error::Io { op: "open", .. }) => assert!(e.to_string().contains("absent.couch"), "{e}"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn check_names_the_file_and_the_byte() {
    let storage = env::os::env().storage;
    let good = inspect::check(&*storage, &path("d-multi-commit-v13.couch"), Depth::All).unwrap();
    assert_eq!((&good["whole"], &good["damage"]), (&json!(true), &json!([])));
    assert!(good["headers"].as_array().unwrap().iter().all(|header| header["whole"] == true));
    let bad = inspect::check(&*storage, &path("k-corrupt-header-v13.couch"), Depth::Newest).unwrap();
    assert_eq!(bad["whole"], false);
    assert_eq!(bad["damage"][0]["offset"], 65536);
    assert!(bad["damage"][0]["what"].as_str().unwrap().contains("k-corrupt-header-v13.couch@65536: checksum"));
    assert_eq!(bad["headers"][0]["header_pos"], 57344);
}

#[test]
fn an_unreadable_body_is_dumped_as_an_error_beside_its_metadata() {
    let couch = open(&fixture("j-corrupt-doc-v13.couch"), Mode::Strict).unwrap();
    let mut errors = Vec::new();
    let _ = inspect::dump(&couch, |line| {
        errors.extend(line.get("error").map(|error| (line["seq"].clone(), error.to_string())));
        ControlFlow::Continue(())
    });
    assert_eq!(errors.len(), 1);
    assert_eq!(errors[0].0, 5);
    assert!(errors[0].1.contains("checksum"));
}

#[test]
fn document_metadata_is_read_and_written_as_the_server_does() {
    let mut kinds = [0; 3];
    for name in WHOLE {
        for want in sidecar(name)["docs_by_seq"].as_array().unwrap() {
            let text = want["rev_meta_hex"].as_str().unwrap();
            let bytes: Vec<u8> =
                (0..text.len()).step_by(2).map(|i| u8::from_str_radix(&text[i..i + 2], 16).unwrap()).collect();
            let meta = RevMeta::decode(&bytes).unwrap();
            assert_eq!(meta.cas.to_string(), want["cas"]);
            assert_eq!(meta.expiry, want["exptime"]);
            assert_eq!(meta.flags, want["flags"]);
            assert_eq!(meta.datatype.0, want["datatype"]);
            assert_eq!(meta.delete_source == DeleteSource::Expiry, want["flex_byte"] == 0x81);
            assert_eq!(meta.encode(), bytes);
            match meta.sync {
                None if meta.delete_source == DeleteSource::Expiry => kinds[1] += 1,
                None => kinds[0] += 1,
                Some(sync) => {
                    kinds[2] += 1;
                    assert_eq!(sync, Sync::Pending { level: Level::Majority, is_delete: false });
                }
            }
        }
    }
    assert!(kinds.iter().all(|&n| n > 0), "{kinds:?}");
}

#[test]
fn the_state_of_a_vbucket_is_read_from_every_sample_and_written_alike() {
    for name in WHOLE {
        let couch = open(&fixture(name), Mode::Strict).unwrap();
        let Some(text) = couch.local(vbstate::ID).unwrap() else { continue };
        let record = VbStateRecord::decode(&text).unwrap();
        assert_eq!(record.state, VbState::Active);
        assert_eq!(record.snap_end, couch.header().update_seq);
        let mut want: Value = serde_json::from_slice(&text).unwrap();
        // The samples' script stored two numbers that the header already has.
        want.as_object_mut().unwrap().retain(|key, _| key != "high_seqno" && key != "purge_seqno");
        assert_eq!(String::from_utf8(record.encode()).unwrap(), want.to_string(), "{name}");
    }
}
