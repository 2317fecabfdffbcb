//! How clients come in: each the way it really does.

mod common;

use common::{Client, PASSWORD, SDK_FEATURES, Server, USER, new};
use frontend::auth::scram::{Client as Scram, Hash};
use wire::client::RequestFrame;
use wire::{Opcode, Status};

/// HELLO, mechanisms and the first SASL message in one write; then the rest.
#[test]
fn the_python_sdk_gets_in_and_stores_a_document() {
    let server = Server::start();
    let mut client = server.connect();
    let mut scram = Scram::with_nonce(Hash::Sha512, USER, PASSWORD, "0xab 0x08 0x1".into());
    let features = wire::client::hello_value(SDK_FEATURES);
    let (mechanism, first) = (Hash::Sha512.mechanism().as_bytes(), scram.first());
    let mut bytes = Vec::new();
    RequestFrame { key: b"agent", value: &features, opaque: 1, ..new(Opcode::Hello) }.encode(&mut bytes);
    RequestFrame { opaque: 2, ..new(Opcode::SaslListMechs) }.encode(&mut bytes);
    RequestFrame { key: mechanism, value: &first, opaque: 3, ..new(Opcode::SaslAuth) }.encode(&mut bytes);
    client.send(&bytes);
    let hello = client.recv();
    assert_eq!((hello.opaque, hello.status, hello.key.len()), (1, Status::Success, 0));
    assert_eq!(client.recv().text(), "SCRAM-SHA512 SCRAM-SHA256 SCRAM-SHA1 PLAIN");
    let challenge = client.recv();
    assert_eq!((challenge.opaque, challenge.status), (3, Status::AuthContinue));
    let last = scram.respond(&challenge.value).unwrap();
    let done = client.call(RequestFrame { key: mechanism, value: &last, ..new(Opcode::SaslStep) });
    assert!(done.status == Status::Success && scram.verify(&done.value));

    let map = client.call(RequestFrame { value: &[0, 2], ..new(Opcode::GetErrorMap) });
    assert_eq!((map.datatype, map.json()["version"].as_u64()), (1, Some(2)));
    let global = client.call(new(Opcode::GetClusterConfig));
    assert_eq!(global.json()["nodesExt"][0]["thisNode"], true);
    assert!(global.json().get("vBucketServerMap").is_none());
    assert_eq!(client.call(RequestFrame { key: b"default", ..new(Opcode::SelectBucket) }).status, Status::Success);
    let config = client.call(new(Opcode::GetClusterConfig));
    assert_eq!(config.datatype, 1);
    assert_eq!(config.json()["name"], "default");
    assert_eq!(config.json()["vBucketServerMap"]["vBucketMap"].as_array().unwrap().len(), 16);
    assert_eq!(config.json()["nodesExt"][0]["services"]["kv"], server.addr.port());

    let set = client.set(b"\0hello", b"{\"a\":1}");
    assert_eq!((set.status, set.extras.len()), (Status::Success, 16));
    let get = client.get(b"\0hello");
    assert_eq!((get.status, get.cas, get.datatype), (Status::Success, set.cas, 1));
    assert_eq!((&get.value[..], &get.extras[..]), (&b"{\"a\":1}"[..], &[2, 0, 0, 6][..]));
}

/// The bucket is asked for behind the last login message, without waiting for its reply.
#[test]
fn gocb_pipelines_the_selection_of_its_bucket_behind_the_login() {
    let server = Server::start();
    let mut client = server.connect();
    let mut scram = Scram::with_nonce(Hash::Sha512, USER, PASSWORD, "nonce".into());
    let mechanism = Hash::Sha512.mechanism().as_bytes();
    let features = wire::client::hello_value(SDK_FEATURES);
    let first = scram.first();
    let mut bytes = Vec::new();
    RequestFrame { key: b"go", value: &features, ..new(Opcode::Hello) }.encode(&mut bytes);
    RequestFrame { value: &[0, 2], ..new(Opcode::GetErrorMap) }.encode(&mut bytes);
    new(Opcode::SaslListMechs).encode(&mut bytes);
    RequestFrame { key: mechanism, value: &first, ..new(Opcode::SaslAuth) }.encode(&mut bytes);
    client.send(&bytes);
    let replies: Vec<_> = (0..4).map(|_| client.recv()).collect();
    let last = scram.respond(&replies[3].value).unwrap();
    bytes.clear();
    RequestFrame { key: mechanism, value: &last, ..new(Opcode::SaslStep) }.encode(&mut bytes);
    RequestFrame { key: b"default", ..new(Opcode::SelectBucket) }.encode(&mut bytes);
    RequestFrame { extras: &[0; 16], ..new(Opcode::GetClusterConfig) }.encode(&mut bytes);
    client.send(&bytes);
    for _ in 0..2 {
        assert_eq!(client.recv().status, Status::Success);
    }
    assert_eq!(client.recv().json()["name"], "default");
}

#[test]
fn every_mechanism_lets_the_right_password_in_and_no_other() {
    let server = Server::start();
    for hash in Hash::ALL {
        let mut client = server.connect();
        assert_eq!(client.scram(hash, USER, "wrong"), Err(Status::AuthError));
        assert_eq!(client.scram(hash, "nobody", PASSWORD), Err(Status::AuthError));
        assert_eq!(client.scram(hash, USER, PASSWORD), Ok(()), "the connection is still good");
    }
    let plain = |client: &mut Client, value: &[u8]| {
        client.call(RequestFrame { key: b"PLAIN", value, ..new(Opcode::SaslAuth) }).status
    };
    let mut client = server.connect();
    assert_eq!(plain(&mut client, b"\0Administrator\0wrong"), Status::AuthError);
    assert_eq!(plain(&mut client, b"\0Administrator"), Status::Einval);
    assert_eq!(plain(&mut client, b"\0Administrator\0password"), Status::Success);
    assert_eq!(plain(&mut client, b"\0Administrator\0wrong"), Status::AuthError);
    assert_eq!(client.get(b"k").status, Status::Eaccess, "a failed login takes the old one away");
    let unknown = RequestFrame { key: b"GSSAPI", ..new(Opcode::SaslAuth) };
    assert_eq!(client.call(unknown).status, Status::AuthError);
    let stray = RequestFrame { key: b"SCRAM-SHA1", value: b"c=biws,r=x,p=AAAA", ..new(Opcode::SaslStep) };
    assert_eq!(client.call(stray).status, Status::Einval);
}

#[test]
fn nothing_but_the_bootstrap_goes_before_the_login() {
    let server = Server::start();
    let mut client = server.connect();
    assert!(client.hello(&[7, 0x0b]).contains(&7));
    for opcode in [Opcode::Get, Opcode::Stat, Opcode::SelectBucket, Opcode::GetClusterConfig] {
        let got = client.call(RequestFrame { key: b"default", ..new(opcode) });
        assert_eq!((got.status, got.datatype, got.cas), (Status::Eaccess, 1, 0), "{opcode:?}");
        assert!(got.json()["error"]["context"].is_string());
    }
    let got = client.call(RequestFrame { opcode: 0xfb, ..new(Opcode::Get) });
    assert_eq!(got.status, Status::Eaccess, "not even whether an opcode exists");
    assert_eq!(client.noop().status, Status::Success);
}

#[test]
fn selecting_a_bucket_that_is_not_there_is_no_access_and_keeps_the_old_one() {
    let server = Server::start();
    let mut client = server.sdk();
    let got = client.call(RequestFrame { key: b"missing", ..new(Opcode::SelectBucket) });
    assert_eq!(got.status, Status::Eaccess);
    assert_eq!(client.set(b"\0k", b"v").status, Status::Success);
    let got = client.call(RequestFrame { key: b"@no bucket@", ..new(Opcode::SelectBucket) });
    assert_eq!(got.status, Status::Success);
    assert_eq!(client.get(b"\0k").status, Status::NoBucket);
}

#[test]
fn every_client_gets_the_error_map_version_it_can_read() {
    let server = Server::start();
    let mut client = server.connect();
    for (asked, given) in [(1, 1), (2, 2), (9, 2)] {
        let got = client.call(RequestFrame { value: &[0, asked], ..new(Opcode::GetErrorMap) });
        assert_eq!(got.json()["version"], given);
    }
    let got = client.call(RequestFrame { value: &[0, 0], ..new(Opcode::GetErrorMap) });
    assert_eq!(got.status, Status::KeyEnoent);
    let got = client.call(RequestFrame { value: &[0, 2], vbucket: 1, ..new(Opcode::GetErrorMap) });
    assert_eq!(got.status, Status::Einval);
}

#[test]
fn a_second_hello_starts_from_nothing() {
    let server = Server::start();
    let mut client = server.sdk();
    assert_eq!(client.set(b"\0k", b"v").extras.len(), 16);
    assert!(client.hello(&[]).is_empty());
    let got = client.get(b"k");
    assert_eq!((got.status, got.magic, &got.value[..]), (Status::Success, 0x81, &b"v"[..]));
    assert_eq!(client.set(b"k", b"v").extras.len(), 0);
    let odd = client.call(RequestFrame { value: &[0, 6, 0], ..new(Opcode::Hello) });
    assert_eq!(odd.status, Status::Einval);
}

#[test]
fn a_config_the_client_has_already_is_not_sent_again() {
    let server = Server::start();
    let mut client = server.sdk();
    let known = |epoch: u64, rev: u64| [epoch.to_be_bytes(), rev.to_be_bytes()].concat();
    for (extras, empty) in [(known(1, 0), false), (known(1, 1), true), (known(0, 9), false), (known(2, 0), true)] {
        let got = client.call(RequestFrame { extras: &extras, ..new(Opcode::GetClusterConfig) });
        assert_eq!(got.status, Status::Success);
        assert_eq!((got.value.is_empty(), got.datatype == 0), (empty, empty));
    }
}
