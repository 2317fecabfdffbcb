//! Plain memcached clients on an open bucket: no HELLO, no login, the oldest form of everything.

mod common;

use common::{Client, Server, USER, new};
use wire::client::{RequestFrame, arithmetic_extras, store_extras};
use wire::{Opcode, Status};

fn status_of(client: &mut Client, request: RequestFrame<'_>) -> Status {
    let got = client.call(request);
    assert_eq!((got.magic, got.datatype), (0x81, 0), "{got:?}");
    if got.status != Status::Success {
        assert_eq!((got.cas, got.extras.len(), got.key.len(), got.value.len()), (0, 0, 0, 0), "{got:?}");
    }
    got.status
}

#[test]
fn the_basic_commands_work_as_memcapable_expects() {
    let server = Server::open();
    let mut client = server.connect();
    let extras = store_extras(0xdead_beef, 0);
    let store = |opcode| RequestFrame { key: b"k", value: b"value", extras: &extras, ..new(opcode) };
    assert_eq!(status_of(&mut client, store(Opcode::Replace)), Status::KeyEnoent);
    assert_eq!(status_of(&mut client, store(Opcode::Add)), Status::Success);
    assert_eq!(status_of(&mut client, store(Opcode::Add)), Status::KeyEexists);
    assert_eq!(status_of(&mut client, store(Opcode::Replace)), Status::Success);
    let set = client.call(store(Opcode::Set));
    assert!(set.cas != 0 && set.extras.is_empty());
    let stale = RequestFrame { cas: set.cas - 1, ..store(Opcode::Set) };
    assert_eq!(status_of(&mut client, stale), Status::KeyEexists);

    let get = client.get(b"k");
    assert_eq!((get.cas, &get.extras[..], &get.value[..]), (set.cas, &[0xde, 0xad, 0xbe, 0xef][..], &b"value"[..]));
    let getk = client.call(RequestFrame { key: b"k", ..new(Opcode::GetK) });
    assert_eq!(&getk.key[..], b"k");
    assert_eq!(status_of(&mut client, RequestFrame { key: b"x", ..new(Opcode::GetK) }), Status::KeyEnoent);

    let concat = |opcode, value| RequestFrame { key: b"k", value, ..new(opcode) };
    assert_eq!(status_of(&mut client, concat(Opcode::Append, b">")), Status::Success);
    assert_eq!(status_of(&mut client, concat(Opcode::Prepend, b"<")), Status::Success);
    assert_eq!(client.get(b"k").value, b"<value>");
    let missing = RequestFrame { key: b"x", value: b"v", ..new(Opcode::Append) };
    assert_eq!(status_of(&mut client, missing), Status::NotStored);

    let delete = client.call(RequestFrame { key: b"k", ..new(Opcode::Delete) });
    assert_eq!((delete.status, delete.cas), (Status::Success, 0), "old clients expect no CAS here");
    assert_eq!(status_of(&mut client, RequestFrame { key: b"k", ..new(Opcode::Delete) }), Status::KeyEnoent);
    let version = client.call(new(Opcode::Version));
    assert!(!version.value.is_empty());
}

#[test]
fn counters_start_with_the_initial_value_and_stop_at_zero() {
    let server = Server::open();
    let mut client = server.connect();
    let mut count = |opcode, delta, initial, expiry| {
        let extras = arithmetic_extras(delta, initial, expiry);
        let got = client.call(RequestFrame { key: b"n", extras: &extras, ..new(opcode) });
        <[u8; 8]>::try_from(&got.value[..]).map(u64::from_be_bytes).map_err(|_| got.status)
    };
    assert_eq!(count(Opcode::Increment, 1, 0, u32::MAX), Err(Status::KeyEnoent));
    assert_eq!(count(Opcode::Increment, 7, 10, 0), Ok(10));
    assert_eq!(count(Opcode::Increment, 7, 10, 0), Ok(17));
    assert_eq!(count(Opcode::Decrement, 7, 10, 0), Ok(10));
    assert_eq!(count(Opcode::Decrement, 70, 10, 0), Ok(0));
    assert_eq!(client.get(b"n").value, b"0");
    client.set(b"n", b"no number");
    let extras = arithmetic_extras(1, 0, 0);
    let got = RequestFrame { key: b"n", extras: &extras, ..new(Opcode::Increment) };
    assert_eq!(status_of(&mut client, got), Status::DeltaBadval);
    let with_cas = RequestFrame { cas: 1, ..got };
    assert_eq!(status_of(&mut client, with_cas), Status::Einval);
}

/// Everything a quiet command has to say is said before the reply to the NOOP behind it.
#[test]
fn quiet_commands_say_only_what_is_unusual_and_in_order() {
    let server = Server::open();
    let mut client = server.connect();
    let extras = store_extras(0, 0);
    let mut bytes = Vec::new();
    let mut opaque = 0;
    let mut push = |request: RequestFrame<'_>| {
        opaque += 1;
        RequestFrame { opaque, ..request }.encode(&mut bytes);
    };
    push(RequestFrame { key: b"k", value: b"v", extras: &extras, ..new(Opcode::SetQ) });
    push(RequestFrame { key: b"k", value: b"v", extras: &extras, ..new(Opcode::AddQ) }); // 2: exists
    push(RequestFrame { key: b"x", value: b"v", extras: &extras, ..new(Opcode::ReplaceQ) }); // 3: missing
    push(RequestFrame { key: b"x", ..new(Opcode::GetQ) });
    push(RequestFrame { key: b"k", ..new(Opcode::GetKQ) }); // 5: a hit
    push(RequestFrame { key: b"k", value: b"!", ..new(Opcode::AppendQ) });
    push(RequestFrame { key: b"k", ..new(Opcode::GetQ) }); // 7: a hit
    push(RequestFrame { key: b"k", ..new(Opcode::DeleteQ) });
    push(RequestFrame { key: b"k", ..new(Opcode::DeleteQ) }); // 9: missing
    push(new(Opcode::Noop)); // 10
    client.send(&bytes);
    let mut said = Vec::new();
    while said.last().is_none_or(|(opaque, _)| *opaque != 10) {
        let got = client.recv();
        said.push((got.opaque, got.status));
        match got.opaque {
            5 => assert_eq!((&got.key[..], &got.value[..]), (&b"k"[..], &b"v"[..])),
            7 => assert_eq!(&got.value[..], b"v!"),
            _ => {}
        }
    }
    let expected = [
        (2, Status::KeyEexists),
        (3, Status::KeyEnoent),
        (5, Status::Success),
        (7, Status::Success),
        (9, Status::KeyEnoent),
        (10, Status::Success),
    ];
    assert_eq!(said, expected);
}

#[test]
fn quit_answers_and_closes_and_its_quiet_form_just_closes() {
    let server = Server::open();
    for (opcode, replies) in [(Opcode::Quit, 1), (Opcode::QuitQ, 0)] {
        let mut client = server.connect();
        let mut bytes = new(opcode).to_bytes();
        // What follows is neither answered nor answered with a reset.
        bytes.extend(new(Opcode::Noop).to_bytes());
        client.send(&bytes);
        for _ in 0..replies {
            assert_eq!(client.recv().opcode, opcode as u8);
        }
        assert_eq!(client.try_recv(), None);
    }
}

#[test]
fn flush_empties_the_bucket_for_old_clients_and_is_refused_to_new_ones() {
    let server = Server::open();
    let mut client = server.connect();
    for (opcode, extras) in [(Opcode::Flush, &[0u8; 4][..]), (Opcode::Flush, &[]), (Opcode::FlushQ, &[])] {
        assert_eq!(client.set(b"k", b"v").status, Status::Success);
        if opcode == Opcode::Flush {
            assert_eq!(status_of(&mut client, RequestFrame { extras, ..new(opcode) }), Status::Success);
        } else {
            client.send(&RequestFrame { extras, ..new(opcode) }.to_bytes());
        }
        assert_eq!(client.get(b"k").status, Status::KeyEnoent, "{opcode:?}");
    }
    let mut sdk = server.sdk();
    assert_eq!(sdk.call(new(Opcode::Flush)).status, Status::NotSupported);
}

#[test]
fn stat_ends_with_an_empty_entry_and_knows_its_groups() {
    let server = Server::open();
    let mut client = server.connect();
    for group in ["", "connections", "vbucket", "vbucket-seqno 3", "reset"] {
        client.send(&RequestFrame { key: group.as_bytes(), opaque: 77, ..new(Opcode::Stat) }.to_bytes());
        let mut lines = 0;
        loop {
            let got = client.recv();
            assert_eq!((got.opaque, got.status, got.extras.len(), got.cas), (77, Status::Success, 0, 0));
            if got.key.is_empty() {
                assert!(got.value.is_empty());
                break;
            }
            lines += 1;
        }
        assert_eq!(lines == 0, group == "reset", "{group}");
    }
    assert_eq!(client.call(RequestFrame { key: b"nonsense", ..new(Opcode::Stat) }).status, Status::KeyEnoent);
}

#[test]
fn a_memcached_client_that_logs_in_with_plain_has_a_bucket() {
    let server = Server::start();
    let mut client = server.connect();
    let value = format!("\0{USER}\0{}", common::PASSWORD);
    let auth = RequestFrame { key: b"PLAIN", value: value.as_bytes(), ..new(Opcode::SaslAuth) };
    assert_eq!(status_of(&mut client, auth), Status::Success);
    assert_eq!(client.set(b"k", b"v").status, Status::Success);
}

#[test]
fn a_memcached_client_and_an_sdk_find_the_same_documents() {
    let server = Server::open();
    let (mut old, mut sdk) = (server.connect(), server.sdk());
    for (key, vbucket) in [("foo", 115 % 16), ("bar", 767 % 16), ("hello", 528 % 16)] {
        assert_eq!(old.set(key.as_bytes(), b"v").status, Status::Success);
        let wire = [b"\0", key.as_bytes()].concat();
        assert_eq!(sdk.call(RequestFrame { key: &wire, vbucket, ..new(Opcode::Get) }).value, b"v");
        sdk.call(RequestFrame { key: &wire, vbucket, ..new(Opcode::Delete) });
        assert_eq!(old.get(key.as_bytes()).status, Status::KeyEnoent);
    }
    let version = old.call(new(Opcode::Version));
    assert!(!version.text().starts_with('0'), "libmemcached refuses it");
}

#[test]
fn an_open_bucket_opens_no_other_and_administers_nothing() {
    let server = Server::open();
    let mut client = server.connect();
    client.hello(common::SDK_FEATURES);
    assert_eq!(client.get(b"\0k").status, Status::NoBucket, "it knows how to ask");
    let select = |name| RequestFrame { key: name, ..new(Opcode::SelectBucket) };
    assert_eq!(client.call(select(b"replicated")).status, Status::Eaccess);
    assert_eq!(client.call(select(b"default")).status, Status::Success);
    assert_eq!(client.get(b"\0k").status, Status::KeyEnoent);
    assert_eq!(client.call(new(Opcode::ListBuckets)).text(), "default");
    let create = RequestFrame { key: b"new", value: b"ep.so\0", ..new(Opcode::CreateBucket) };
    assert_eq!(client.call(create).status, Status::Eaccess);
    assert_eq!(client.call(RequestFrame { key: b"default", ..new(Opcode::DeleteBucket) }).status, Status::Eaccess);
}
