//! What SDKs do with documents once they are in.

mod common;

use common::{Client, Server, new};
use serde_json::json;
use wire::client::{RequestFrame, push_lookup_spec, push_mutation_spec, store_extras};
use wire::{Opcode, Status};

const XATTR: u8 = 0x04;

fn lookup(client: &mut Client, key: &[u8], specs: &[(u8, u8, &str)], doc_flags: u8) -> common::Got {
    let mut value = Vec::new();
    for (opcode, flags, path) in specs {
        push_lookup_spec(&mut value, *opcode, *flags, path.as_bytes());
    }
    let extras = [doc_flags];
    let extras = if doc_flags == 0 { &[][..] } else { &extras[..] };
    client.call(RequestFrame { key, extras, value: &value, ..new(Opcode::SubdocMultiLookup) })
}

fn mutate(client: &mut Client, key: &[u8], specs: &[(Opcode, u8, &str, &str)], doc_flags: u8) -> common::Got {
    let mut value = Vec::new();
    for (opcode, flags, path, text) in specs {
        push_mutation_spec(&mut value, *opcode as u8, *flags, path.as_bytes(), text.as_bytes());
    }
    let extras = [doc_flags];
    let extras = if doc_flags == 0 { &[][..] } else { &extras[..] };
    client.call(RequestFrame { key, extras, value: &value, ..new(Opcode::SubdocMultiMutation) })
}

/// The entries of a multi-path lookup.
fn entries(got: &common::Got) -> Vec<(u16, String)> {
    let (mut rest, mut entries) = (&got.value[..], Vec::new());
    while !rest.is_empty() {
        let status = u16::from_be_bytes([rest[0], rest[1]]);
        let len = u32::from_be_bytes([rest[2], rest[3], rest[4], rest[5]]) as usize;
        entries.push((status, String::from_utf8(rest[6..6 + len].to_vec()).unwrap()));
        rest = &rest[6 + len..];
    }
    entries
}

#[test]
fn paths_are_read_each_with_its_own_status() {
    let server = Server::start();
    let mut client = server.sdk();
    // The JSON bit is the server's to set.
    client.set(b"\0j", br#"{"a":{"b":[1,2,3]},"s":"x"}"#);
    let get = Opcode::SubdocGet as u8;
    let fine = lookup(&mut client, b"\0j", &[(get, XATTR, "$document.exptime"), (get, 0, "a.b[1]"), (0, 0, "")], 0);
    assert_eq!((fine.status, fine.datatype), (Status::Success, 0));
    assert_eq!(entries(&fine)[..2], [(0, "0".to_owned()), (0, "2".to_owned())]);
    assert!(entries(&fine)[2].1.starts_with("{\"a\""));
    let exists = Opcode::SubdocExists as u8;
    let count = Opcode::SubdocGetCount as u8;
    let some = lookup(&mut client, b"\0j", &[(get, 0, "nope"), (exists, 0, "s"), (count, 0, "a.b")], 0);
    assert_eq!(some.status, Status::SubdocMultiPathFailure);
    assert_eq!(entries(&some), [(0xc0, String::new()), (0, String::new()), (0, "3".to_owned())]);
    let missing = lookup(&mut client, b"\0missing", &[(get, 0, "a")], 0);
    assert_eq!((missing.status, missing.key.len()), (Status::KeyEnoent, 0));
    let order = lookup(&mut client, b"\0j", &[(get, 0, "a"), (get, XATTR, "x")], 0);
    assert_eq!(order.status, Status::SubdocInvalidXattrOrder);

    let one = RequestFrame { key: b"\0j", extras: &[0, 6, 0], value: b"a.b[2]", ..new(Opcode::SubdocGet) };
    let got = client.call(one);
    assert_eq!((got.status, &got.value[..], got.datatype), (Status::Success, &b"3"[..], 1));
    let got = client.call(RequestFrame { value: b"a.b[9]", ..one });
    assert_eq!(got.status, Status::SubdocPathEnoent);
}

#[test]
fn paths_are_changed_all_or_none() {
    let server = Server::start();
    let mut client = server.sdk();
    client.set(b"\0j", br#"{"n":1}"#);
    let got = mutate(
        &mut client,
        b"\0j",
        &[
            (Opcode::SubdocDictUpsert, XATTR | 1, "meta.by", "\"me\""),
            (Opcode::SubdocCounter, 0, "n", "5"),
            (Opcode::SubdocArrayPushLast, 1, "list", "1,2"),
        ],
        0,
    );
    assert_eq!((got.status, got.extras.len()), (Status::Success, 16));
    assert_eq!(got.value, [&[1u8, 0, 0, 0, 0, 0, 1][..], b"6"].concat(), "only the counter has something to say");
    assert_eq!(client.get(b"\0j").json(), json!({"n": 6, "list": [1, 2]}));
    let failed = mutate(
        &mut client,
        b"\0j",
        &[(Opcode::SubdocDictUpsert, 0, "x", "1"), (Opcode::SubdocReplace, 0, "missing", "1")],
        0,
    );
    assert_eq!((failed.status, &failed.value[..], failed.cas), (Status::SubdocMultiPathFailure, &[1, 0, 0xc0][..], 0));
    assert_eq!(client.get(b"\0j").json(), json!({"n": 6, "list": [1, 2]}), "nothing of it happened");
    let xattr = lookup(&mut client, b"\0j", &[(Opcode::SubdocGet as u8, XATTR, "meta")], 0);
    assert_eq!(entries(&xattr)[0].1, r#"{"by":"me"}"#);

    let created = mutate(&mut client, b"\0new", &[(Opcode::SubdocDictUpsert, 0, "a", "1")], 0x01);
    assert_eq!(created.status, Status::Success);
    let again = mutate(&mut client, b"\0new", &[(Opcode::SubdocDictUpsert, 0, "a", "1")], 0x02);
    assert_eq!(again.status, Status::KeyEexists);
    let tomb = mutate(&mut client, b"\0tomb", &[(Opcode::SubdocDictUpsert, XATTR, "_txn", "{}")], 0x02 | 0x04 | 0x08);
    assert_eq!(tomb.status, Status::SubdocSuccessDeleted);
    let seen = lookup(&mut client, b"\0tomb", &[(Opcode::SubdocGet as u8, XATTR, "_txn")], 0x04);
    assert_eq!((seen.status, &*entries(&seen)[0].1), (Status::SubdocSuccessDeleted, "{}"));
    assert_eq!(client.get(b"\0tomb").status, Status::KeyEnoent);

    let extras = [0, 1, 0];
    let counter = RequestFrame { key: b"\0j", extras: &extras, value: b"n10", ..new(Opcode::SubdocCounter) };
    assert_eq!(client.call(counter).value, b"16");
    let bad = RequestFrame { value: b"nx", ..counter };
    assert_eq!(client.call(bad).status, Status::SubdocDeltaEinval);
}

#[test]
fn locks_are_kept_and_told_in_the_words_the_client_knows() {
    let server = Server::start();
    let mut client = server.sdk();
    client.set(b"\0l", b"v");
    let lock = client.call(RequestFrame { key: b"\0l", extras: &[0, 0, 0, 9], ..new(Opcode::GetLocked) });
    assert_eq!((lock.status, &lock.value[..]), (Status::Success, &b"v"[..]));
    assert_eq!(client.get(b"\0l").cas, u64::MAX);
    assert_eq!(client.set(b"\0l", b"w").status, Status::Locked);
    let mut old = server.sdk_with(&[0x08, 0x12]);
    assert_eq!(old.set(b"\0l", b"w").status, Status::KeyEexists);
    let unlock = |cas| RequestFrame { key: b"\0l", cas, ..new(Opcode::Unlock) };
    assert_eq!(old.call(unlock(7)).status, Status::Etmpfail);
    assert_eq!(client.call(unlock(7)).status, Status::Locked);
    assert_eq!(client.call(unlock(0)).status, Status::Einval);
    assert_eq!(client.call(unlock(lock.cas)).status, Status::Success);
    assert_eq!(client.call(unlock(lock.cas)).status, Status::NotLocked);
    assert_eq!(client.set(b"\0l", b"w").status, Status::Success);
}

#[test]
fn compressed_values_are_given_compressed_only_to_those_who_can_read_them() {
    let server = Server::start();
    let mut snappy = server.sdk();
    let text = br#"{"text":"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"}"#;
    let packed = document::snappy::compress(text).unwrap();
    let extras = store_extras(0, 0);
    let set = RequestFrame { key: b"\0s", extras: &extras, value: &packed, datatype: 3, ..new(Opcode::Set) };
    assert_eq!(snappy.call(set).status, Status::Success);
    let got = snappy.get(b"\0s");
    assert!(got.datatype == 3 && got.value == packed || got.datatype == 1 && got.value == text);
    let mut plain = server.sdk_with(&[0x08, 0x12, 0x0b]);
    let got = plain.get(b"\0s");
    assert_eq!((got.datatype, &got.value[..]), (1, &text[..]));
    assert_eq!(plain.call(set).status, Status::Einval, "not negotiated");
    let mut raw = server.sdk_with(&[0x08, 0x12]);
    assert_eq!(raw.get(b"\0s").datatype, 0);
}

#[test]
fn metadata_has_the_length_each_client_insists_on() {
    let server = Server::start();
    let mut client = server.sdk();
    client.set(b"\0m", b"{}");
    for (version, len) in [(&[][..], 20), (&[1], 20), (&[2], 21)] {
        let got = client.call(RequestFrame { key: b"\0m", extras: version, ..new(Opcode::GetMeta) });
        assert_eq!((got.status, got.extras.len()), (Status::Success, len));
        assert_eq!(got.extras[..8], [0, 0, 0, 0, 2, 0, 0, 6]);
    }
    client.call(RequestFrame { key: b"\0m", ..new(Opcode::Delete) });
    let got = client.call(RequestFrame { key: b"\0m", extras: &[2], ..new(Opcode::GetMeta) });
    assert_eq!((got.status, &got.extras[..4]), (Status::Success, &[0, 0, 0, 1][..]), "tombstones are found");
    let got = client.call(RequestFrame { key: b"\0never", extras: &[2], ..new(Opcode::GetMeta) });
    assert_eq!(got.status, Status::KeyEnoent);
}

#[test]
fn seqnos_and_histories_can_be_observed() {
    let server = Server::start();
    let mut client = server.sdk();
    let set = client.set(b"\0o", b"v");
    let (uuid, seqno) = (&set.extras[..8], u64::from_be_bytes(set.extras[8..].try_into().unwrap()));
    let mut wait = [0; 8];
    wait.copy_from_slice(&seqno.to_be_bytes());
    let persisted = client.call(RequestFrame { extras: &wait, ..new(Opcode::SeqnoPersistence) });
    assert_eq!(persisted.status, Status::Success);
    let seen = client.call(RequestFrame { value: uuid, ..new(Opcode::ObserveSeqno) });
    assert_eq!((seen.status, seen.value.len(), seen.value[0]), (Status::Success, 27, 0));
    assert_eq!(seen.value[11..19], wait, "persisted");
    assert_eq!(seen.value[19..27], wait, "current");
    let unknown = client.call(RequestFrame { value: &[9; 8], ..new(Opcode::ObserveSeqno) });
    assert_eq!(unknown.status, Status::KeyEnoent);
    let log = client.call(new(Opcode::GetFailoverLog));
    assert_eq!((log.value.len(), &log.value[..8]), (16, uuid));
    let all = client.call(new(Opcode::GetAllVbSeqnos));
    assert_eq!((all.value.len(), &all.value[..10]), (160, &[&[0, 0], &wait[..]].concat()[..]));
    let mut keys = vec![0, 0, 0, 2];
    keys.extend_from_slice(b"\0o");
    keys.extend_from_slice(b"\0\0\0\x02\0x");
    let observed = client.call(RequestFrame { value: &keys, ..new(Opcode::Observe) });
    assert_eq!((observed.value[6], observed.value[21]), (0x01, 0x80));
    let random = client.call(RequestFrame { extras: &[0; 4], ..new(Opcode::GetRandomKey) });
    assert_eq!((&random.key[..], &random.value[..]), (&b"\0o"[..], &b"v"[..]));
}

#[test]
fn only_the_default_collection_is_known() {
    let server = Server::start();
    let mut client = server.sdk();
    let id = |client: &mut Client, opcode, path: &str| {
        let got = client.call(RequestFrame { value: path.as_bytes(), ..new(opcode) });
        (got.status, got.extras.len())
    };
    for path in ["_default._default", ".", "_default."] {
        assert_eq!(id(&mut client, Opcode::GetCollectionId, path), (Status::Success, 12));
    }
    assert_eq!(id(&mut client, Opcode::GetCollectionId, "_default.x"), (Status::UnknownCollection, 0));
    assert_eq!(id(&mut client, Opcode::GetCollectionId, "x.y"), (Status::UnknownScope, 0));
    assert_eq!(id(&mut client, Opcode::GetCollectionId, "nodot"), (Status::Einval, 0));
    assert_eq!(id(&mut client, Opcode::GetScopeId, "_default"), (Status::Success, 12));
    assert_eq!(id(&mut client, Opcode::GetScopeId, "x"), (Status::UnknownScope, 0));
    let manifest = client.call(new(Opcode::GetManifest));
    assert_eq!(manifest.json()["scopes"][0]["collections"][0]["uid"], "0");
}

#[test]
fn buckets_come_and_go_and_take_their_connections_along() {
    let server = Server::start();
    let mut admin = server.sdk();
    let create = RequestFrame { key: b"new", value: b"ep.so\0max_vbuckets=8", ..new(Opcode::CreateBucket) };
    assert_eq!(admin.call(create).status, Status::Success);
    assert_eq!(admin.call(create).status, Status::KeyEexists);
    assert_eq!(admin.call(new(Opcode::ListBuckets)).text(), "default new replicated");
    let mut user = server.connect();
    user.hello(common::SDK_FEATURES);
    user.plain("reader", "reader");
    assert_eq!(user.call(RequestFrame { key: b"x", ..create }).status, Status::Eaccess);
    assert_eq!(user.call(RequestFrame { key: b"new", ..new(Opcode::SelectBucket) }).status, Status::Success);
    assert_eq!(user.set(b"\0k", b"v").status, Status::Success);
    let delete = RequestFrame { key: b"new", ..new(Opcode::DeleteBucket) };
    assert_eq!(admin.call(delete).status, Status::Success);
    assert_eq!(admin.call(delete).status, Status::KeyEnoent);
    user.send(&RequestFrame { key: b"\0k", ..new(Opcode::Get) }.to_bytes());
    assert!(user.try_recv().is_none_or(|got| got.status == Status::NoBucket));
    assert_eq!(admin.noop().status, Status::Success);
}

/// A bucket deleted through another door.
#[test]
fn a_connection_notices_that_its_bucket_is_gone() {
    let server = Server::start();
    let mut client = server.sdk();
    server.engine.delete_bucket("default").unwrap();
    server.front_end.as_ref().unwrap().cluster().changed();
    assert_eq!(client.get(b"\0k").status, Status::NoBucket);
    assert_eq!(client.try_recv(), None);
}

#[test]
fn vbucket_states_can_be_seen_and_set_by_an_administrator() {
    let server = Server::start();
    let mut client = server.sdk();
    let state = |client: &mut Client| client.call(new(Opcode::GetVbucket)).value;
    assert_eq!(state(&mut client), [0, 0, 0, 1]);
    assert_eq!(client.call(RequestFrame { extras: &[2], ..new(Opcode::SetVbucket) }).status, Status::Success);
    assert_eq!(state(&mut client), [0, 0, 0, 2]);
    assert_eq!(client.set(b"\0k", b"v").status, Status::NotMyVbucket);
    let topology =
        RequestFrame { extras: &[1], value: br#"{"topology":[["me"]]}"#, datatype: 1, ..new(Opcode::SetVbucket) };
    assert_eq!(client.call(topology).status, Status::Success);
    assert_eq!(client.set(b"\0k", b"v").status, Status::Success);
}

#[test]
fn a_dead_vbucket_can_be_deleted_and_made_again_at_once() {
    let server = Server::start();
    let mut client = server.sdk();
    let set_state = |client: &mut Client, state: u8| {
        assert_eq!(client.call(RequestFrame { extras: &[state], ..new(Opcode::SetVbucket) }).status, Status::Success);
    };
    let delete = |client: &mut Client| client.call(RequestFrame { value: b"async=0", ..new(Opcode::DelVbucket) });
    assert_eq!(client.set(b"\0k", b"v").status, Status::Success);
    let refused = delete(&mut client);
    assert_eq!(refused.status, Status::Einval);
    assert!(String::from_utf8_lossy(&refused.value).contains("dead"), "says what to do");
    set_state(&mut client, 4);
    assert_eq!(delete(&mut client).status, Status::Success);
    for opcode in [Opcode::GetVbucket, Opcode::DelVbucket, Opcode::CompactDb] {
        let extras: &[u8] = if opcode == Opcode::CompactDb { &[0; 24] } else { &[] };
        assert_eq!(client.call(RequestFrame { extras, ..new(opcode) }).status, Status::NotMyVbucket, "{opcode:?}");
    }
    set_state(&mut client, 1);
    assert_eq!(client.get(b"\0k").status, Status::KeyEnoent);
    assert_eq!(client.set(b"\0k", b"again").status, Status::Success);
}

/// What is under way is finished, what was answered is sent, and then the connection ends.
#[test]
fn draining_answers_what_is_under_way_and_closes_cleanly() {
    let mut server = Server::start();
    let mut busy = server.sdk();
    let mut idle = server.sdk();
    let extras = store_extras(0, 0);
    let set =
        RequestFrame { framing_extras: &[0x11, 3], key: b"\0k", value: b"v", extras: &extras, ..new(Opcode::Set) };
    assert_eq!(busy.call(set).status, Status::Success);
    busy.send(&set.to_bytes());
    // Known to be read once something behind it on another connection of the worker could be; a short look suffices.
    while server.engine.bucket("default").unwrap().all_vb_seqnos(None, true)[0].1.0 < 3 {
        std::thread::yield_now();
    }
    server.front_end.take().unwrap().drain(std::time::Duration::from_secs(5));
    assert_eq!(busy.recv().status, Status::Success);
    assert_eq!(busy.try_recv(), None);
    assert_eq!(idle.try_recv(), None);
    assert!(std::net::TcpStream::connect(server.addr).is_err());
}
