//! Goal: no bytes a client sends can hurt the server or another client.
//!
//! Method: each malformed request goes to a real server over a connection of its own, and must get exactly the status
//! or the close that the protocol's order of checks gives it. Where the connection lives on it must still work, and
//! after each case another client, connected all along, must still be served.

mod harness;

use frontend::auth::scram::Hash;
use harness::connection::{FEATURES, is_closed};
use harness::{Connection, Dice, Reply, Serve, Server};
use wire::client::{RequestFrame, arithmetic_extras, store_extras};
use wire::frame::BODY_LEN_MAX;
use wire::{Feature, Opcode, Status};

const BUCKET: &str = "default";

fn server(dir: &tempfile::TempDir) -> Server {
    Serve::on(&dir.path().join("data")).set("bucket.vbuckets=16").start()
}

/// A client that behaves, and watches that it is served whatever the others do.
struct Witness(Connection);

impl Witness {
    fn new(server: &Server) -> Witness {
        let mut client = server.client(BUCKET);
        assert_eq!(client.set(3, "witness", b"still here", None).unwrap().status, Status::Success);
        Witness(client)
    }

    #[track_caller]
    fn is_served(&mut self, after: &str) {
        let reply =
            self.0.get(3, "witness").unwrap_or_else(|error| panic!("the witness was cut off after {after}: {error}"));
        assert_eq!((reply.status, reply.text().as_str()), (Status::Success, "still here"), "after {after}");
    }
}

/// A request that is refused: what is wrong with it, its bytes, the status.
type Refused = (&'static str, Vec<u8>, Status);

fn refused(what: &'static str, request: RequestFrame<'_>, status: Status) -> Refused {
    (what, RequestFrame { opaque: 0xfeed_beef, ..request }.to_bytes(), status)
}

/// Sends each request over a connection that `connect` makes.
fn check_refusals(server: &Server, witness: &mut Witness, connect: impl Fn() -> Connection, cases: &[Refused]) {
    for (what, bytes, status) in cases {
        let mut client = connect();
        client.send_raw(bytes).unwrap();
        let reply = client.receive().unwrap_or_else(|error| panic!("{what}: no answer: {error}"));
        assert_eq!(reply.status, *status, "{what}: {}", reply.text());
        check_refusal(what, &reply, bytes[1]);
        let noop = client.call(&RequestFrame::new(Opcode::Noop));
        assert_eq!(
            noop.unwrap_or_else(|e| panic!("{what}: the connection is dead: {e}")).status,
            Status::Success,
            "{what}"
        );
        witness.is_served(what);
    }
    assert!(server.http("/health/live").0.contains("200"));
}

/// What every refusal has in common.
fn check_refusal(what: &str, reply: &Reply, opcode: u8) {
    assert_eq!((reply.opcode, reply.opaque), (opcode, 0xfeed_beef), "{what}: whose answer is this?");
    assert_eq!(reply.cas, 0, "{what}");
    assert!(reply.extras.is_empty() && reply.key.is_empty(), "{what}: {reply:?}");
    if reply.value.is_empty() || reply.status == Status::NotMyVbucket {
        return;
    }
    let body: serde_json::Value = serde_json::from_slice(&reply.value).unwrap_or_else(|e| panic!("{what}: {e}"));
    assert!(body["error"]["context"].as_str().is_some_and(|text| !text.is_empty()), "{what}: {body}");
    assert_eq!(reply.datatype, 1, "{what}: a JSON body says that it is JSON");
}

#[test]
fn requests_that_break_their_opcodes_rules_get_einval() {
    let dir = harness::directory();
    let server = server(&dir);
    let mut witness = Witness::new(&server);
    let frame = RequestFrame::new;
    let key = b"k";
    let long = [b'k'; 251];
    let stored = store_extras(0, 0);
    let counted = arithmetic_extras(1, 0, 0);
    let lie = |magic: u8, key_len: u8, extras_len: u8, body: &[u8]| {
        let mut bytes = vec![magic, Opcode::Get as u8, 0, key_len, extras_len, 0, 0, 0];
        bytes.extend_from_slice(&(body.len() as u32).to_be_bytes());
        bytes.extend_from_slice(&0xfeed_beef_u32.to_be_bytes());
        bytes.extend_from_slice(&[0; 8]);
        bytes.extend_from_slice(body);
        bytes
    };
    let mut cases = vec![
        ("a key longer than the body", lie(0x80, 9, 0, b"k"), Status::Einval),
        ("extras longer than the body", lie(0x80, 0, 9, b"k"), Status::Einval),
        ("a key beyond an empty body", lie(0x80, 255, 255, b""), Status::Einval),
        ("an alternative frame with a key longer than the body", lie(0x08, 9, 0, b"k"), Status::Einval),
        refused("GET without a key", frame(Opcode::Get), Status::Einval),
        refused("GET with extras", RequestFrame { key, extras: &[0; 4], ..frame(Opcode::Get) }, Status::Einval),
        refused("GET with a value", RequestFrame { key, value: b"v", ..frame(Opcode::Get) }, Status::Einval),
        refused("GET with a CAS", RequestFrame { key, cas: 1, ..frame(Opcode::Get) }, Status::Einval),
        refused("a key of 251 bytes", RequestFrame { key: &long, ..frame(Opcode::Get) }, Status::Einval),
        refused("SET without extras", RequestFrame { key, value: b"v", ..frame(Opcode::Set) }, Status::Einval),
        refused(
            "SET with half its extras",
            RequestFrame { key, extras: &[0; 4], ..frame(Opcode::Set) },
            Status::Einval,
        ),
        refused("SET without a key", RequestFrame { extras: &stored, ..frame(Opcode::Set) }, Status::Einval),
        refused("ADD with a CAS", RequestFrame { key, extras: &stored, cas: 1, ..frame(Opcode::Add) }, Status::Einval),
        refused(
            "INCREMENT cut short",
            RequestFrame { key, extras: &counted[..8], ..frame(Opcode::Increment) },
            Status::Einval,
        ),
        refused(
            "INCREMENT with a CAS",
            RequestFrame { key, extras: &counted, cas: 1, ..frame(Opcode::Increment) },
            Status::Einval,
        ),
        refused("APPEND with extras", RequestFrame { key, extras: &[0; 4], ..frame(Opcode::Append) }, Status::Einval),
        refused("DELETE with a value", RequestFrame { key, value: b"v", ..frame(Opcode::Delete) }, Status::Einval),
        refused("TOUCH without extras", RequestFrame { key, ..frame(Opcode::Touch) }, Status::Einval),
        refused("UNLOCK without a CAS", RequestFrame { key, ..frame(Opcode::Unlock) }, Status::Einval),
        refused(
            "GET_LOCKED with odd extras",
            RequestFrame { key, extras: &[0; 3], ..frame(Opcode::GetLocked) },
            Status::Einval,
        ),
        refused("NOOP with a key", RequestFrame { key, ..frame(Opcode::Noop) }, Status::Einval),
        refused("VERSION with a value", RequestFrame { value: b"v", ..frame(Opcode::Version) }, Status::Einval),
        refused(
            "a datatype with unknown bits",
            RequestFrame { key, extras: &stored, datatype: 8, ..frame(Opcode::Set) },
            Status::Einval,
        ),
        refused(
            "xattrs in a SET",
            RequestFrame { key, extras: &stored, datatype: 4, ..frame(Opcode::Set) },
            Status::Einval,
        ),
        refused("a datatype for a read", RequestFrame { key, datatype: 1, ..frame(Opcode::Get) }, Status::Einval),
        refused(
            "snappy that is none",
            RequestFrame { key, extras: &stored, datatype: 2, value: &[0xff; 40], ..frame(Opcode::Set) },
            Status::Einval,
        ),
        refused(
            "snappy that claims 4 GiB",
            RequestFrame {
                key,
                extras: &stored,
                datatype: 2,
                value: &[0xff, 0xff, 0xff, 0xff, 0x0f, 0, b'a'],
                ..frame(Opcode::Set)
            },
            Status::Einval,
        ),
        refused(
            "HELLO with half a feature",
            RequestFrame { value: &[0, 6, 0], ..frame(Opcode::Hello) },
            Status::Einval,
        ),
        refused("GET_ERROR_MAP without a version", frame(Opcode::GetErrorMap), Status::Einval),
        refused(
            "GET_ERROR_MAP with a long version",
            RequestFrame { value: &[0; 4], ..frame(Opcode::GetErrorMap) },
            Status::Einval,
        ),
        refused(
            "GET_ERROR_MAP for a vBucket",
            RequestFrame { vbucket: 3, value: &[0, 2], ..frame(Opcode::GetErrorMap) },
            Status::Einval,
        ),
        refused(
            "OBSERVE cut short",
            RequestFrame { value: &[0, 3, 0, 9, b'k'], ..frame(Opcode::Observe) },
            Status::Einval,
        ),
        refused(
            "OBSERVE_SEQNO with half a uuid",
            RequestFrame { value: &[0; 4], ..frame(Opcode::ObserveSeqno) },
            Status::Einval,
        ),
        refused("GET_META of version 9", RequestFrame { key, extras: &[9], ..frame(Opcode::GetMeta) }, Status::Einval),
        refused(
            "SET_WITH_META with odd extras",
            RequestFrame { key, extras: &[0; 25], ..frame(Opcode::SetWithMeta) },
            Status::Einval,
        ),
        refused(
            "SET_WITH_META with CAS 0",
            RequestFrame { key, extras: &[0; 24], ..frame(Opcode::SetWithMeta) },
            Status::Einval,
        ),
        refused(
            "a sub-document path beyond the body",
            RequestFrame { key, extras: &[0, 200, 0], value: b"p", ..frame(Opcode::SubdocGet) },
            Status::Einval,
        ),
        refused(
            "a multi-path lookup of nothing",
            RequestFrame { key, ..frame(Opcode::SubdocMultiLookup) },
            Status::SubdocInvalidCombo,
        ),
        refused(
            "a multi-path lookup cut short",
            RequestFrame { key, value: &[0xc5, 0, 0, 9, b'p'], ..frame(Opcode::SubdocMultiLookup) },
            Status::Einval,
        ),
        refused(
            "a multi-path mutation cut short",
            RequestFrame {
                key,
                value: &[0xc8, 0, 0, 1, 0xff, 0xff, 0xff, 0xff, b'p'],
                ..frame(Opcode::SubdocMultiMutation)
            },
            Status::Einval,
        ),
        refused(
            "a vBucket state that is none",
            RequestFrame { extras: &[9], ..frame(Opcode::SetVbucket) },
            Status::Einval,
        ),
        refused("SELECT_BUCKET without a name", frame(Opcode::SelectBucket), Status::Einval),
        refused(
            "SASL_STEP out of the blue",
            RequestFrame { key: b"SCRAM-SHA1", value: b"x", ..frame(Opcode::SaslStep) },
            Status::Einval,
        ),
    ];
    for (what, framing, opcode, status) in [
        ("framing extras that end inside an object", &[0x13, 3][..], Opcode::Set, Status::Einval),
        ("framing extras that end inside an escape", &[0xf0], Opcode::Set, Status::Einval),
        ("a barrier with data", &[0x01, 0], Opcode::Set, Status::Einval),
        ("a durability requirement of two bytes", &[0x12, 3, 0], Opcode::Set, Status::Einval),
        ("durability level 0", &[0x11, 0], Opcode::Set, Status::DurabilityInvalidLevel),
        ("durability level 4", &[0x11, 4], Opcode::Set, Status::DurabilityInvalidLevel),
        ("a stream id outside DCP", &[0x22, 0, 1], Opcode::Set, Status::Einval),
        ("impersonating nobody", &[0x40], Opcode::Set, Status::Einval),
        ("an unknown frame info", &[0x80], Opcode::Set, Status::UnknownFrameInfo),
        ("a retired frame info", &[0x31, 0], Opcode::Set, Status::UnknownFrameInfo),
        ("a durable GET", &[0x11, 1], Opcode::Get, Status::Einval),
        ("a durable quiet SET", &[0x11, 1], Opcode::SetQ, Status::Einval),
        ("a durable TOUCH", &[0x11, 1], Opcode::Touch, Status::NotSupported),
        ("a GET that preserves the expiry", &[0x50], Opcode::Get, Status::NotSupported),
    ] {
        let extras: &[u8] = match opcode {
            Opcode::Set | Opcode::SetQ => &stored,
            Opcode::Touch => &[0; 4],
            _ => &[],
        };
        cases.push(refused(what, RequestFrame { key, extras, framing_extras: framing, ..frame(opcode) }, status));
    }
    check_refusals(&server, &mut witness, || server.client(BUCKET), &cases);
    assert_eq!(witness.0.get(0, "k").unwrap().status, Status::KeyEnoent, "none of these may have stored anything");
    server.stop();
}

#[test]
fn requests_that_cannot_be_met_get_the_status_that_says_why() {
    let dir = harness::directory();
    let server = server(&dir);
    let mut witness = Witness::new(&server);
    let frame = RequestFrame::new;
    let stored = store_extras(0, 0);
    let huge = vec![b'v'; 21 << 20];
    let unknown = |opcode| RequestFrame { opcode, ..frame(Opcode::Noop) };
    let cases = [
        refused("opcode 0xff", unknown(0xff), Status::UnknownCommand),
        refused("opcode 0x88", unknown(0x88), Status::UnknownCommand),
        refused("a tap opcode", unknown(0x40), Status::NotSupported),
        refused("a DCP opcode without its extras", unknown(0x50), Status::Einval),
        refused(
            "a vBucket that there is not",
            RequestFrame { vbucket: 16, key: b"k", ..frame(Opcode::Get) },
            Status::NotMyVbucket,
        ),
        refused(
            "the last vBucket number",
            RequestFrame { vbucket: 65535, key: b"k", ..frame(Opcode::Get) },
            Status::NotMyVbucket,
        ),
        refused(
            "a value over 20 MiB",
            RequestFrame { key: b"k", extras: &stored, value: &huge, ..frame(Opcode::Set) },
            Status::E2big,
        ),
        // KEY_ENOENT would be truer, and has widely used clients try again until they time out.
        refused(
            "a bucket that there is not",
            RequestFrame { key: b"nowhere", ..frame(Opcode::SelectBucket) },
            Status::Eaccess,
        ),
        refused(
            "a mechanism that there is not",
            RequestFrame { key: b"MAGIC", ..frame(Opcode::SaslAuth) },
            Status::AuthError,
        ),
        refused(
            "a wrong password",
            RequestFrame { key: b"PLAIN", value: b"\0Administrator\0no", ..frame(Opcode::SaslAuth) },
            Status::AuthError,
        ),
        refused(
            "statistics that there are not",
            RequestFrame { key: b"nonsense", ..frame(Opcode::Stat) },
            Status::KeyEnoent,
        ),
        refused(
            "APPEND to nothing",
            RequestFrame { key: b"k", value: b"v", ..frame(Opcode::Append) },
            Status::NotStored,
        ),
    ];
    check_refusals(&server, &mut witness, || server.client(BUCKET), &cases[..8]);
    // A failed login leaves nobody logged in, so what follows needs no bucket and no name.
    for case in &cases[8..10] {
        let mut client = server.client(BUCKET);
        client.send_raw(&case.1).unwrap();
        assert_eq!(client.receive().unwrap().status, case.2, "{}", case.0);
        witness.is_served(case.0);
    }
    check_refusals(&server, &mut witness, || server.client(BUCKET), &cases[10..]);

    let collections: &[Feature] = &[FEATURES, &[Feature::Collections]].concat();
    let with_collections = || Connection::log_in(&server.kv, BUCKET, collections).unwrap();
    let get = |what, key, status| refused(what, RequestFrame { key, ..frame(Opcode::Get) }, status);
    let long: Vec<u8> = [&[0][..], &[b'k'; 251]].concat();
    let cases = [
        get("a collection id and no key", &[0], Status::Einval),
        get("a collection id that does not end", &[0x80], Status::Einval),
        get("a collection id of six bytes", &[0x80, 0x80, 0x80, 0x80, 0x80, 1, b'k'], Status::Einval),
        get("a collection id in a longer form than needed", &[0x80, 0, b'k'], Status::Einval),
        get("a reserved collection id", &[1, b'k'], Status::Einval),
        get("a key of 251 bytes after its collection id", &long, Status::Einval),
        get("a collection that there is not", &[8, b'k'], Status::UnknownCollection),
    ];
    check_refusals(&server, &mut witness, with_collections, &cases);
    server.stop();
}

#[test]
fn strangers_may_do_nothing_but_introduce_themselves() {
    let dir = harness::directory();
    let server = server(&dir);
    let mut witness = Witness::new(&server);
    let frame = RequestFrame::new;
    let stored = store_extras(0, 0);
    let cases = [
        refused("GET", RequestFrame { vbucket: 3, key: b"witness", ..frame(Opcode::Get) }, Status::Eaccess),
        refused(
            "SET",
            RequestFrame { vbucket: 3, key: b"witness", extras: &stored, ..frame(Opcode::Set) },
            Status::Eaccess,
        ),
        refused("DELETE", RequestFrame { vbucket: 3, key: b"witness", ..frame(Opcode::Delete) }, Status::Eaccess),
        refused("STAT", frame(Opcode::Stat), Status::Eaccess),
        refused(
            "SELECT_BUCKET",
            RequestFrame { key: BUCKET.as_bytes(), ..frame(Opcode::SelectBucket) },
            Status::Eaccess,
        ),
        refused("GET_CLUSTER_CONFIG", frame(Opcode::GetClusterConfig), Status::Eaccess),
        refused("FLUSH", frame(Opcode::Flush), Status::Eaccess),
        refused(
            "DELETE_BUCKET",
            RequestFrame { key: BUCKET.as_bytes(), ..frame(Opcode::DeleteBucket) },
            Status::Eaccess,
        ),
        refused("an unknown opcode", RequestFrame { opcode: 0xff, ..frame(Opcode::Noop) }, Status::Eaccess),
        refused("an opcode that is not built", RequestFrame { opcode: 0x50, ..frame(Opcode::Noop) }, Status::Eaccess),
    ];
    let stranger = |features: &[Feature]| {
        let mut client = Connection::open(&server.kv).unwrap();
        client.hello(features).unwrap();
        client
    };
    check_refusals(&server, &mut witness, || stranger(FEATURES), &cases);

    // Clients that do not even say hello.
    for (what, bytes, _) in &cases {
        let mut old = Connection::open(&server.kv).unwrap();
        old.send_raw(bytes).unwrap();
        old.finish_sending().unwrap();
        let replies = old.receive_all().unwrap();
        assert!(
            replies.iter().all(|reply| reply.status == Status::Eaccess && reply.value.is_empty()),
            "{what}: {replies:?}"
        );
        witness.is_served("an old stranger");
    }

    for hash in Hash::ALL {
        let mut client = stranger(FEATURES);
        assert_eq!(client.scram(hash, harness::USER, "guessed").unwrap(), (Status::AuthError, false), "{hash:?}");
        assert_eq!(client.scram(hash, "nobody", harness::PASSWORD).unwrap(), (Status::AuthError, false), "{hash:?}");
        assert_eq!(client.scram(hash, harness::USER, harness::PASSWORD).unwrap(), (Status::Success, true), "{hash:?}");
        let get = RequestFrame { key: b"k", ..frame(Opcode::Get) };
        assert_eq!(client.call(&get).unwrap().status, Status::NoBucket, "logged in, and no bucket selected");
    }
    for message in [&b""[..], b"n,,", b"n,,n=,r=", b"p=tls,,n=a,r=b", b"y,,n=a,r=b,m=x", &[0xff; 300]] {
        let mut client = stranger(FEATURES);
        let request = RequestFrame { key: b"SCRAM-SHA256", value: message, ..frame(Opcode::SaslAuth) };
        let status = client.call(&request).unwrap().status;
        assert!(
            matches!(status, Status::Einval | Status::AuthError),
            "{:?}: {status:?}",
            message.escape_ascii().to_string()
        );
    }
    witness.is_served("bad logins");
    server.stop();
}

#[test]
fn a_stream_that_is_no_protocol_is_closed_without_an_answer() {
    let dir = harness::directory();
    let server = server(&dir);
    let mut witness = Witness::new(&server);
    let length = |magic: u8, body_len: u32| {
        let mut bytes = vec![0; 24];
        bytes[0] = magic;
        bytes[8..12].copy_from_slice(&body_len.to_be_bytes());
        bytes
    };
    let whole = RequestFrame { key: b"witness", vbucket: 3, ..RequestFrame::new(Opcode::Get) }.to_bytes();
    // With each: whether the client hangs up first, which a server that waits for more needs to be told.
    let cases: Vec<(&str, Vec<u8>, bool)> = vec![
        ("TLS", vec![0x16, 3, 1, 2, 0, 1, 0, 1, 0xfc, 3, 3], false),
        ("one zero byte", vec![0], false),
        ("a push that only servers send", length(0x82, 0), false),
        ("a magic one off", length(0x84, 0), false),
        ("a body of one byte too many", length(0x80, BODY_LEN_MAX + 1), false),
        ("a body of 4 GiB", length(0x80, u32::MAX), false),
        ("a body of 4 GiB in an alternative frame", length(0x08, u32::MAX), false),
        ("nothing at all", vec![], true),
        ("one byte of a header", whole[..1].to_vec(), true),
        ("a header cut short", whole[..23].to_vec(), true),
        ("a header and no body", whole[..24].to_vec(), true),
        ("a body cut short", whole[..whole.len() - 1].to_vec(), true),
        ("the largest body announced and not sent", length(0x80, BODY_LEN_MAX), true),
    ];
    for (what, bytes, hangs_up) in &cases {
        for logged_in in [false, true] {
            let mut client = if logged_in { server.client(BUCKET) } else { Connection::open(&server.kv).unwrap() };
            client.send_raw(bytes).unwrap();
            if *hangs_up {
                client.finish_sending().unwrap();
            }
            assert_eq!(client.receive_all().unwrap_or_else(|e| panic!("{what}: {e}")), [], "{what}");
            witness.is_served(what);
        }
    }
    // What came before the nonsense was a request like any other.
    let mut client = server.client(BUCKET);
    client.send_raw(&[&whole[..], b"nonsense"].concat()).unwrap();
    let replies = client.receive_all().unwrap();
    assert_eq!(
        replies.iter().map(|r| (r.status, r.text())).collect::<Vec<_>>(),
        [(Status::Success, "still here".to_owned())]
    );
    // A client that leaves in the middle of a request, or before it reads its answers.
    for cut in [1, 24, whole.len() - 1, whole.len()] {
        let mut client = server.client(BUCKET);
        client.send_raw(&whole[..cut]).unwrap();
        drop(client);
        witness.is_served("a client that left");
    }
    server.stop();
}

#[test]
fn answers_to_requests_nobody_made_change_nothing() {
    let dir = harness::directory();
    let server = server(&dir);
    let mut witness = Witness::new(&server);
    for magic in [0x81, 0x18, 0x83] {
        let mut bytes = RequestFrame { key: b"witness", vbucket: 3, ..RequestFrame::new(Opcode::Delete) }.to_bytes();
        bytes[0] = magic;
        if magic == 0x18 {
            bytes[2..4].copy_from_slice(&[0, b"witness".len() as u8]);
        }
        let mut client = server.client(BUCKET);
        client.send_raw(&bytes).unwrap();
        client.finish_sending().unwrap();
        let replies = client.receive_all().unwrap();
        assert!(replies.iter().all(|reply| reply.status != Status::Success), "{magic:#04x}: {replies:?}");
        witness.is_served("an answer to nothing");
    }
    server.stop();
}

#[test]
fn requests_may_arrive_one_byte_at_a_time() {
    let dir = harness::directory();
    let server = server(&dir);
    let mut client = server.client(BUCKET);
    let set = RequestFrame {
        key: b"slow",
        extras: &store_extras(7, 0),
        value: b"drop by drop",
        ..RequestFrame::new(Opcode::Set)
    };
    let get = RequestFrame { key: b"slow", ..RequestFrame::new(Opcode::Get) };
    let bad = RequestFrame { key: b"slow", extras: b"x", ..RequestFrame::new(Opcode::Get) };
    let stream = [set.to_bytes(), bad.to_bytes(), get.to_bytes()].concat();
    for byte in stream {
        client.send_raw(&[byte]).unwrap();
    }
    let mut statuses = Vec::new();
    for _ in 0..3 {
        statuses.push(client.receive().unwrap());
    }
    assert_eq!(
        statuses.iter().map(|r| r.status).collect::<Vec<_>>(),
        [Status::Success, Status::Einval, Status::Success]
    );
    assert_eq!((statuses[2].extras.as_slice(), statuses[2].text().as_str()), (&7u32.to_be_bytes()[..], "drop by drop"));
    server.stop();
}

/// Opcodes that do harm when they are asked to: random bytes must not ask for them by chance.
const HARMFUL: &[Opcode] = &[
    Opcode::Flush,
    Opcode::FlushQ,
    Opcode::DeleteBucket,
    Opcode::SetVbucket,
    Opcode::DelVbucket,
    Opcode::StopPersistence,
    Opcode::DisableTraffic,
    Opcode::SetParam,
];

#[test]
fn random_bytes_hurt_nobody() {
    let dir = harness::directory();
    let server = server(&dir);
    let mut witness = Witness::new(&server);
    let mut dice = Dice::new("random bytes");
    for _ in 0..300 {
        let mut client = match dice.below(3) {
            0 => Connection::open(&server.kv).unwrap(),
            _ => server.client(BUCKET),
        };
        let mut stream = Vec::new();
        for _ in 0..1 + dice.below(8) {
            stream.extend(random_frame(&mut dice));
        }
        // It may hang up before all is sent, and reset what it has not read.
        let sent = client.send_raw(&stream).and_then(|()| client.finish_sending());
        assert!(sent.as_ref().is_ok_and(|()| true) || sent.as_ref().is_err_and(is_closed), "{sent:?}");
        client.receive_all().unwrap_or_else(|e| panic!("{e} after {:02x?}", &stream[..stream.len().min(200)]));
        witness.is_served("random bytes");
    }
    server.stop();
}

/// Something like a request: a proper one, one with a few bytes changed, or noise behind a proper first byte.
fn random_frame(dice: &mut Dice) -> Vec<u8> {
    let opcode = loop {
        let code = dice.roll() as u8;
        if !HARMFUL.iter().any(|&harmful| harmful as u8 == code) {
            break code;
        }
    };
    let key_len = [0, 1, 8, 250, 251][dice.below(5)];
    let extras_len = [0, 1, 3, 4, 8, 20, 24][dice.below(7)];
    let value_len = if dice.one_in(20) { dice.below(100_000) } else { dice.below(60) };
    let framing_len = if dice.one_in(3) { dice.below(5) } else { 0 };
    let (key, extras, value) = (dice.bytes(key_len), dice.bytes(extras_len), dice.bytes(value_len));
    let framing_extras = dice.bytes(framing_len);
    let mut bytes = RequestFrame {
        opcode,
        vbucket: dice.below(20) as u16,
        opaque: dice.roll() as u32,
        cas: if dice.one_in(2) { 0 } else { dice.roll() },
        datatype: if dice.one_in(2) { 0 } else { dice.below(9) as u8 },
        framing_extras: if key.len() > 255 { &[] } else { &framing_extras },
        extras: &extras,
        key: &key,
        value: &value,
    }
    .to_bytes();
    for _ in 0..[0, 0, 1, 3][dice.below(4)] {
        let at = dice.below(bytes.len());
        if at != 1 {
            bytes[at] = dice.roll() as u8;
        }
    }
    bytes
}
