//! Clients that misbehave: a status or a close, never a crash, never another client's problem.

mod common;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use common::{Client, Server, features, new};
use proptest::prelude::*;
use wire::client::{RequestFrame, store_extras};
use wire::{Feature, Opcode, Status};

#[test]
fn frames_may_arrive_byte_by_byte() {
    let server = Server::start();
    let mut client = server.sdk();
    let extras = store_extras(0, 0);
    let bytes = RequestFrame { key: b"\0k", value: b"value", extras: &extras, ..new(Opcode::Set) }.to_bytes();
    for byte in bytes {
        client.send(&[byte]);
    }
    assert_eq!(client.recv().status, Status::Success);
}

#[test]
fn a_frame_over_the_limit_and_bytes_that_are_none_are_closed_without_a_reply() {
    let server = Server::start();
    let mut header = new(Opcode::Set).to_bytes();
    header[8..12].copy_from_slice(&(31u32 << 20).to_be_bytes());
    for bytes in [&header[..], b"gather\r\n", b"\x82\x01", &[0xff; 100]] {
        let mut client = server.connect();
        client.send(bytes);
        assert_eq!(client.try_recv(), None, "{bytes:?}");
    }
    assert_eq!(server.connect().noop().status, Status::Success);
}

#[test]
fn clients_of_the_text_protocol_and_browsers_are_told_before_they_are_closed() {
    let server = Server::start();
    for (sent, first_word) in
        [("get k\r\n", "SERVER_ERROR "), ("version\r\n", "SERVER_ERROR "), ("GET / HTTP/1.1\r\n\r\n", "HTTP/1.1 400 ")]
    {
        let mut stream = TcpStream::connect(server.addr).unwrap();
        stream.write_all(sent.as_bytes()).unwrap();
        let mut told = String::new();
        stream.read_to_string(&mut told).unwrap();
        assert!(told.starts_with(first_word) && told.ends_with('\n'), "{sent:?}: {told:?}");
    }
}

#[test]
fn strangers_get_no_memory_for_large_frames() {
    let server = Server::start();
    let mut client = server.connect();
    let mut header = new(Opcode::Set).to_bytes();
    header[8..12].copy_from_slice(&(2u32 << 20).to_be_bytes());
    client.send(&header);
    assert_eq!(client.try_recv(), None);
}

#[test]
fn a_client_that_does_not_log_in_is_closed_in_time_and_one_that_does_stays() {
    let server = Server::with(|options| options.workers = 1);
    let mut friend = server.sdk();
    let mut silent = server.connect();
    let mut half = server.connect();
    half.send(&[0x80, 0]);
    let mut early = server.connect();
    early.noop();
    server.put_ahead(Duration::from_secs(29));
    assert_eq!((friend.noop().status, early.noop().status), (Status::Success, Status::Success));
    server.put_ahead(Duration::from_secs(31));
    assert_eq!((silent.try_recv(), half.try_recv(), early.try_recv()), (None, None, None));
    assert_eq!(friend.noop().status, Status::Success);
}

#[test]
fn a_value_over_the_limit_is_too_big_and_the_connection_lives() {
    let server = Server::start();
    let mut client = server.sdk();
    assert_eq!(client.set(b"\0k", &vec![b'x'; (20 << 20) + 1]).status, Status::E2big);
    assert_eq!(client.set(b"\0k", &vec![b'x'; 20 << 20]).status, Status::Success);
    assert_eq!(client.get(b"\0k").value.len(), 20 << 20);
}

#[test]
fn each_malformed_frame_gets_its_status_and_the_next_one_is_fine() {
    let server = Server::start();
    let mut client = server.sdk();
    let extras = store_extras(0, 0);
    let set = RequestFrame { key: b"\0k", value: b"v", extras: &extras, ..new(Opcode::Set) };
    let cases = [
        (RequestFrame { opcode: 0xff, ..new(Opcode::Get) }, Status::UnknownCommand),
        (RequestFrame { opcode: 0x5a, ..new(Opcode::Get) }, Status::NotSupported),
        (RequestFrame { extras: &[], ..set }, Status::Einval),
        (RequestFrame { key: b"", ..set }, Status::Einval),
        (RequestFrame { key: b"\0", ..set }, Status::Einval),
        (RequestFrame { key: &[0x80; 6], ..set }, Status::Einval),
        (RequestFrame { key: &[0; 252], ..set }, Status::Einval),
        (RequestFrame { key: b"\x01k", ..set }, Status::Einval),
        (RequestFrame { datatype: 8, ..set }, Status::Einval),
        (RequestFrame { datatype: 4, ..set }, Status::Einval),
        (RequestFrame { datatype: 2, value: b"\xff\xff\xff", ..set }, Status::Einval),
        (RequestFrame { vbucket: 999, ..set }, Status::NotMyVbucket),
        (RequestFrame { framing_extras: &[0x30], ..set }, Status::UnknownFrameInfo),
        (RequestFrame { framing_extras: &[0x13, 1], ..set }, Status::Einval),
        (RequestFrame { framing_extras: &[0x41, b'u'], ..set }, Status::Eaccess),
        (RequestFrame { value: b"v", key: b"\0k", ..new(Opcode::Get) }, Status::Einval),
        (RequestFrame { opcode: Opcode::Add as u8, cas: 1, ..set }, Status::Einval),
        (RequestFrame { key: b"\x08k", ..set }, Status::UnknownCollection),
    ];
    for (request, status) in cases {
        let got = client.call(request);
        assert_eq!((got.status, got.cas, got.extras.len(), got.key.len()), (status, 0, 0, 0), "{request:?}");
        assert_eq!(client.noop().status, Status::Success);
    }
    // A body shorter than its key.
    let mut short = new(Opcode::Get).to_bytes();
    short[3] = 9;
    client.send(&short);
    assert_eq!(client.recv().status, Status::Einval);
    assert_eq!(client.call(set).status, Status::Success);
}

#[test]
fn error_bodies_suit_what_was_negotiated() {
    let server = Server::start();
    let unknown = RequestFrame { key: b"\x08k", ..new(Opcode::Get) };
    let got = server.sdk().call(unknown);
    assert_eq!((got.datatype, got.json()["manifest_uid"].as_str()), (1, Some("0")));
    let mut plain = server.sdk_with(&features(&[Feature::SelectBucket, Feature::Collections]));
    let got = plain.call(unknown);
    assert_eq!(
        (got.status, got.datatype, got.value.len()),
        (Status::Einval, 0, 0),
        "no XERROR: an old status, no body"
    );
    let xerror = features(&[Feature::SelectBucket, Feature::Collections, Feature::Xerror]);
    let got = server.sdk_with(&xerror).call(unknown);
    assert_eq!((got.status, got.datatype), (Status::UnknownCollection, 0), "text without the JSON bit");

    let mut client = server.sdk();
    let stray = RequestFrame { vbucket: 500, key: b"\0k", ..new(Opcode::Get) };
    let first = client.call(stray);
    assert_eq!((first.datatype, first.json()["name"].as_str()), (1, Some("default")));
    let second = client.call(stray);
    assert_eq!((second.datatype, second.value.len()), (0, 0), "the same map is not sent twice");
}

/// Without XERROR there is no word for it. Whoever has yet to log in is told all the same, as it always was.
#[test]
fn a_request_that_is_not_allowed_ends_the_connection_of_a_client_without_xerror() {
    let server = Server::start();
    let log_in = |list: &[Feature]| {
        let mut client = server.connect();
        client.hello(&features(list));
        assert_eq!(client.get(b"\0k").status, Status::Eaccess);
        client.plain("reader", "reader");
        client
    };
    let forbidden = RequestFrame { key: b"another", value: b"{}", ..new(Opcode::DeleteBucket) };
    let mut told = log_in(&[Feature::SelectBucket, Feature::Xerror]);
    assert_eq!(told.call(forbidden).status, Status::Eaccess);
    assert_eq!(told.noop().status, Status::Success);
    let mut untold = log_in(&[Feature::SelectBucket]);
    untold.send(&forbidden.to_bytes());
    assert_eq!(untold.try_recv(), None);
}

#[test]
fn durations_are_told_to_those_who_asked_and_to_nobody_else() {
    let server = Server::start();
    let mut told = server.sdk();
    let mut not_told = server.sdk_with(&features(&[Feature::SelectBucket, Feature::Collections]));
    for key in [&b"\0missing"[..], b"\0k"] {
        let (with, without) = (told.get(key), not_told.get(key));
        assert_eq!((with.magic, with.framing.len(), with.framing[0]), (0x18, 3, 0x02));
        assert_eq!((without.magic, without.framing.len()), (0x81, 0));
    }
}

/// A client that sends requests and never reads: its replies stop growing, and others do not notice.
#[test]
fn a_client_that_never_reads_is_held_and_does_not_hold_others() {
    let server = Server::start();
    let mut hog = server.sdk();
    hog.set(b"\0big", &vec![b'x'; 1 << 20]);
    hog.stream.set_nonblocking(true).unwrap();
    let request = RequestFrame { key: b"\0big", ..new(Opcode::Get) }.to_bytes();
    for _ in 0..200 {
        if hog.stream.write(&request).is_err() {
            break;
        }
    }
    let mut client = server.sdk();
    for _ in 0..100 {
        assert_eq!(client.noop().status, Status::Success);
    }
    let queued: u64 = queued(&server).iter().sum();
    assert!(queued < 16 << 20, "{queued} bytes wait for a client that does not read");
}

fn queued(server: &Server) -> Vec<u64> {
    let mut queued = Vec::new();
    server.front_end.as_ref().unwrap().walk_connections(|info| {
        queued.push(info.bytes_queued.load(std::sync::atomic::Ordering::Relaxed));
    });
    queued
}

/// Goal: many that never read take no more together than a few do. Method: each asks for 4 times what one may leave
/// unread; all of them get what is left, and go on when they read after all.
#[test]
fn clients_that_never_read_share_what_one_of_them_may_have() {
    const CLIENTS: usize = 20;
    const ANSWERS: usize = 256;
    let server = Server::with(|options| options.bounds.unsent_plenty_len = 1 << 20);
    let value = vec![b'x'; 64 << 10];
    server.sdk().set(b"\0large", &value);
    let requests = RequestFrame { key: b"\0large", ..new(Opcode::Get) }.to_bytes().repeat(ANSWERS);
    let mut hogs: Vec<Client> = (0..CLIENTS).map(|_| server.sdk()).collect();
    hogs.iter_mut().for_each(|hog| hog.send(&requests));
    let mut witness = server.sdk();
    let deadline = Instant::now() + Duration::from_secs(20);
    while queued(&server).iter().filter(|bytes| **bytes > 0).count() < CLIENTS {
        assert!(Instant::now() < deadline, "{:?}", queued(&server));
        assert_eq!(witness.noop().status, Status::Success);
    }
    // What the first may have until there are too many, and each of the others a little.
    let queued: u64 = queued(&server).iter().sum();
    assert!(queued < 16 << 20, "{queued} bytes wait for {CLIENTS} that do not read");
    for hog in &mut hogs {
        (0..ANSWERS).for_each(|_| assert!(hog.recv().value == value));
    }
}

#[test]
fn a_full_table_makes_clients_wait_and_lets_them_in_when_one_leaves() {
    let server = Server::sized(2, |_| ());
    let (mut one, mut two) = (server.connect(), server.connect());
    one.noop();
    two.noop();
    let mut three = server.connect();
    three.send(&new(Opcode::Noop).to_bytes());
    three.stream.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
    let waited = three.stream.read(&mut [0]).expect_err("not served");
    assert!(matches!(waited.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut));
    drop(one);
    three.stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    assert_eq!(three.recv().status, Status::Success);
    assert_eq!(two.noop().status, Status::Success);
}

/// The table grows and shrinks under its clients: those who wait come in, those who are in stay.
#[test]
fn the_table_changes_its_size_while_it_is_full() {
    let server = Server::sized(2, |_| ());
    let handle = server.front_end.as_ref().unwrap().handle();
    let mut clients = vec![server.sdk(), server.sdk()];
    let mut waiting: Vec<Client> = (0..2).map(|_| server.connect()).collect();
    for client in &mut waiting {
        client.send(&new(Opcode::Noop).to_bytes());
    }
    handle.resize(4).unwrap();
    for mut client in waiting {
        assert_eq!(client.recv().status, Status::Success);
        clients.push(client);
    }
    handle.resize(1).unwrap();
    for client in &mut clients {
        assert_eq!(client.noop().status, Status::Success, "nobody is thrown out");
    }
    // Only the last place that is left is given away.
    let mut next = server.connect();
    next.send(&new(Opcode::Noop).to_bytes());
    for client in clients.drain(..3) {
        drop(client);
    }
    next.stream.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    next.stream.read(&mut [0]).expect_err("not served");
    drop(clients);
    next.stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    assert_eq!(next.recv().status, Status::Success);
    let refusal = handle.resize(1_000_000).unwrap_err().to_string();
    assert!(refusal.contains("the limit of open files is 20000"), "{refusal}");
}

/// More than a client may leave unread: it is closed, and the memory is free again.
#[test]
fn a_client_whose_answers_pile_up_beyond_the_bound_is_closed() {
    let server = Server::with(|options| {
        options.workers = 1;
        options.bounds.unsent_len_max = 2 << 20;
    });
    let mut hog = server.sdk();
    hog.set(b"\0big", &vec![b'x'; 1 << 20]);
    let request = RequestFrame { key: b"\0big", ..new(Opcode::Get) }.to_bytes();
    hog.send(&request.repeat(50));
    let mut client = server.sdk();
    let deadline = Instant::now() + Duration::from_secs(10);
    while server.front_end.as_ref().unwrap().connection_count() > 1 {
        assert!(Instant::now() < deadline, "the hog is still there");
        assert_eq!(client.noop().status, Status::Success);
    }
}

#[test]
fn a_port_that_is_taken_is_named() {
    let server = Server::start();
    let taken = std::panic::catch_unwind(|| Server::with(|options| options.listen = server.addr));
    let error = *taken.err().expect("refused").downcast::<String>().unwrap();
    assert!(error.contains(&server.addr.to_string()), "{error}");
}

fn shake(server: &Server, bytes: &[u8], log_in: bool) {
    let mut client = if log_in { server.sdk() } else { server.connect() };
    client.stream.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
    let _ = client.stream.write_all(bytes);
    let _ = client.stream.read(&mut [0; 4096]);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1, ..ProptestConfig::default() })]

    /// Random frames, mostly well formed on the outside, before and after the login.
    #[test]
    fn random_frames_never_hurt_the_server(
        frames in proptest::collection::vec(
            (any::<u8>(), any::<u8>(), 0u8..40, 0u16..20, proptest::collection::vec(any::<u8>(), 0..120), any::<u16>()),
            40,
        ),
    ) {
        let server = Server::open();
        let mut bytes = Vec::new();
        for (opcode, datatype, extras_len, key_len, body, vb) in &frames {
            // Whole requests, with the lengths as they come; now and then nonsense in front.
            let alt = opcode % 5 == 0;
            let mut header = [0; 24];
            header[0] = if alt { 0x08 } else { 0x80 };
            header[1] = *opcode;
            header[2] = if alt { (vb % 8) as u8 } else { 0 };
            header[3] = *key_len as u8;
            header[4] = *extras_len;
            header[5] = datatype % 9;
            header[6..8].copy_from_slice(&(vb % 18).to_be_bytes());
            header[8..12].copy_from_slice(&(body.len() as u32).to_be_bytes());
            bytes.extend_from_slice(&header);
            bytes.extend_from_slice(body);
        }
        shake(&server, &bytes, true);
        shake(&server, &bytes, false);
        for chunk in bytes.chunks(777) {
            shake(&server, chunk, false);
        }
        let mut client = Client::connect(server.addr);
        prop_assert_eq!(client.noop().status, Status::Success);
    }
}

/// A connection that goes away while its write is on its way to the disk. The next one in its slot gets no answer but its
/// own: each of its calls looks at whose the answer is.
#[test]
fn a_client_that_vanishes_in_the_middle_leaves_nothing_behind() {
    let server = Server::with(|options| options.workers = 1);
    let extras = store_extras(0, 0);
    for _ in 0..50 {
        let mut client = server.sdk();
        let set =
            RequestFrame { framing_extras: &[0x11, 3], key: b"\0k", value: b"v", extras: &extras, ..new(Opcode::Set) };
        client.send(&set.to_bytes());
        drop(client);
        let mut next = server.sdk();
        assert_eq!(next.noop().status, Status::Success);
    }
    let deadline = Instant::now() + Duration::from_secs(5);
    while server.front_end.as_ref().unwrap().connection_count() > 0 {
        assert!(Instant::now() < deadline, "slots leaked");
        std::thread::yield_now();
    }
    let _: TcpStream = server.connect().stream;
}
