//! How clients hear of another map: they are told if they asked for that, they ask with the version they have, or they are turned
//! away by a node that has the vBucket no more. Nobody is sent twice what it has.

mod common;

use common::{Client, Got, SDK_FEATURES, Server, new};
use frontend::cluster::{Map, Node, Revision};
use types::{VbId, VbState};
use wire::client::RequestFrame;
use wire::{Opcode, Status};

const DUPLEX: u16 = 0x0c;
const PUSH: u16 = 0x0d;
const KNOWN_VERSION: u16 = 0x1d;
const PUSH_BRIEF: u16 = 0x1f;

/// A push, as against a reply.
const SERVER_REQUEST: u8 = 0x82;

struct Coordinator {
    admin: Client,
    map: Map,
}

impl Coordinator {
    fn new(server: &Server) -> Coordinator {
        let mut admin = server.sdk();
        let text = admin.call(new(Opcode::GetClusterConfig)).value;
        let (map, _) = Map::parse(&text).expect("what clients get");
        let node = Node { host: "127.0.0.1".into(), kv_port: server.addr.port(), admin_port: 8091 };
        Coordinator { admin, map: Map { nodes: vec![node], ..map } }
    }

    /// Gives a map that is newer by one; returns its version.
    fn give(&mut self) -> [u8; 16] {
        self.map.revision.rev += 1;
        let Revision { epoch, rev } = self.map.revision;
        let extras: [u8; 16] = [epoch.to_be_bytes(), rev.to_be_bytes()].concat().try_into().expect("16 bytes");
        let text = self.map.document(Some(0));
        let give =
            RequestFrame { extras: &extras, key: b"default", value: text.as_bytes(), ..new(Opcode::SetClusterConfig) };
        assert_eq!(self.admin.call(give).status, Status::Success);
        extras
    }
}

fn with(more: &[u16]) -> Vec<u16> {
    [SDK_FEATURES, more].concat()
}

fn rev(got: &Got) -> i64 {
    got.json()["rev"].as_i64().expect("a number")
}

#[test]
fn who_asked_for_it_is_told_of_every_new_map_once() {
    let server = Server::start();
    let mut coordinator = Coordinator::new(&server);
    let mut full = server.sdk_with(&with(&[DUPLEX, PUSH]));
    let mut brief = server.sdk_with(&with(&[DUPLEX, PUSH, PUSH_BRIEF]));
    let mut silent = server.sdk_with(&with(&[DUPLEX]));
    for _ in 0..2 {
        let version = coordinator.give();
        let told = full.recv();
        assert_eq!(
            (told.magic, told.opcode, &told.extras[..], &told.key[..]),
            (SERVER_REQUEST, 1, &version[..], &b"default"[..])
        );
        assert_eq!((told.datatype, rev(&told)), (1, coordinator.map.revision.rev));
        let told = brief.recv();
        assert_eq!((told.magic, &told.extras[..], &told.key[..]), (SERVER_REQUEST, &version[..], &b"default"[..]));
        assert_eq!((told.datatype, told.value.len()), (0, 0));
        // What it was told it asks for.
        assert_eq!(rev(&brief.call(new(Opcode::GetClusterConfig))), coordinator.map.revision.rev);
    }
    // Nothing else was said to anybody: the next frame of each is the answer to this.
    for client in [&mut full, &mut brief, &mut silent] {
        assert_eq!(client.noop().status, Status::Success);
    }
}

/// Goal: a node that was taken out of the cluster while it could not be reached hears of it although its connections are still there.
#[test]
fn a_replica_that_the_map_names_no_more_is_sent_away() {
    let server = Server::start();
    let mut coordinator = Coordinator::new(&server);
    let other = Node { host: "127.0.0.1".into(), kv_port: 1, admin_port: 2 };
    coordinator.map.nodes.push(other.clone());
    coordinator.give();
    let mut replica = server.sdk_with(&SDK_FEATURES.iter().copied().filter(|code| *code != 0x0e).collect::<Vec<_>>());
    let open = RequestFrame { extras: &[0, 0, 0, 0, 0, 0, 0, 1], key: b"a replica", ..new(Opcode::DcpOpen) };
    assert_eq!(replica.call(open).status, Status::Success);
    for (name, value) in [("enable_sync_writes", "true"), ("consumer_name", &other.name())] {
        let control = RequestFrame { key: name.as_bytes(), value: value.as_bytes(), ..new(Opcode::DcpControl) };
        assert_eq!(replica.call(control).status, Status::Success, "{name}");
    }
    coordinator.give();
    assert_eq!(replica.noop().status, Status::Success);
    coordinator.map.nodes.pop();
    coordinator.give();
    assert!(replica.try_recv().is_none());
}

/// Goal: a client without a bucket is told of the nodes, and of nothing before it is known who it is.
#[test]
fn before_it_has_a_bucket_a_client_that_has_logged_in_is_told_of_the_nodes() {
    let server = Server::start();
    let mut coordinator = Coordinator::new(&server);
    let mut client = server.connect();
    let agreed = client.hello(&with(&[DUPLEX, PUSH_BRIEF]));
    assert!(agreed.contains(&DUPLEX) && agreed.contains(&PUSH_BRIEF));
    coordinator.give();
    client.plain(common::USER, common::PASSWORD);
    coordinator.give();
    let told = client.recv();
    assert_eq!((told.magic, &told.key[..], told.value.len()), (SERVER_REQUEST, &b""[..], 0));
    let global = client.call(new(Opcode::GetClusterConfig));
    assert_eq!(told.extras[8..], rev(&global).to_be_bytes());
    assert_eq!(client.call(RequestFrame { key: b"replicated", ..new(Opcode::SelectBucket) }).status, Status::Success);
    coordinator.give();
    // The documents of other buckets have a new version with it, as all of a node that knows only itself have one.
    let told = client.recv();
    assert_eq!((told.magic, &told.key[..]), (SERVER_REQUEST, &b"replicated"[..]));
}

#[test]
fn a_client_is_not_sent_the_map_that_it_has() {
    let server = Server::start();
    let mut coordinator = Coordinator::new(&server);
    server.engine.bucket("default").expect("it is there").set_vb_state(VbId(3), VbState::Dead, None).expect("a role");
    let elsewhere = |client: &mut Client| {
        let got = client.call(RequestFrame { vbucket: 3, key: b"\0k", ..new(Opcode::Get) });
        assert_eq!(got.status, Status::NotMyVbucket);
        got
    };
    // 0x1e, of which this is about, is in what the SDK asks for.
    let mut client = server.sdk_with(&with(&[KNOWN_VERSION]));
    let without: Vec<u16> = SDK_FEATURES.iter().copied().filter(|code| *code != 0x1e).collect();
    let mut forgetful = server.sdk_with(&without);
    let version = coordinator.give();
    assert_eq!(rev(&elsewhere(&mut client)), coordinator.map.revision.rev);
    assert_eq!((elsewhere(&mut client).value.len(), elsewhere(&mut client).datatype), (0, 0));
    assert!(!elsewhere(&mut forgetful).value.is_empty() && !elsewhere(&mut forgetful).value.is_empty());
    let known =
        |client: &mut Client, extras: &[u8]| client.call(RequestFrame { extras, ..new(Opcode::GetClusterConfig) });
    assert_eq!(known(&mut client, &version).value.len(), 0);
    coordinator.give();
    assert_eq!(rev(&known(&mut client, &version)), coordinator.map.revision.rev);
    // It was sent that one, by whatever means.
    assert_eq!(elsewhere(&mut client).value.len(), 0);
    coordinator.give();
    assert_eq!(rev(&elsewhere(&mut client)), coordinator.map.revision.rev);
    // Another bucket, another memory.
    assert_eq!(client.call(RequestFrame { key: b"default", ..new(Opcode::SelectBucket) }).status, Status::Success);
    assert!(!elsewhere(&mut client).value.is_empty());
}
