//! Which reply comes when: in order unless the client agreed to something else, and even then behind fences.
//!
//! A write that must reach the disk is answered by letter, which the worker opens after its turn. So when both are sent
//! in one write, a read behind it is answered first if it may be, and second if it may not.

mod common;

use common::{Client, SDK_FEATURES, Server, new};
use types::Level;
use wire::client::{RequestFrame, store_extras};
use wire::frame_info::push_durability;
use wire::{Opcode, Status};

const UNORDERED: u16 = 0x0e;

fn ordered() -> Vec<u16> {
    SDK_FEATURES.iter().copied().filter(|f| *f != UNORDERED).collect()
}

fn durable(level: Level) -> Vec<u8> {
    let mut framing = Vec::new();
    push_durability(&mut framing, level, Some(9000));
    framing
}

/// Sends a durable write (opaque 1) and `then` (opaque 2) together; the opaques in the order of the replies.
fn race(client: &mut Client, then: RequestFrame<'_>) -> Vec<u32> {
    let (framing, extras) = (durable(Level::PersistMajority), store_extras(0, 0));
    let write = RequestFrame {
        framing_extras: &framing,
        key: b"\0k",
        value: b"1",
        extras: &extras,
        opaque: 1,
        ..new(Opcode::Set)
    };
    let mut bytes = write.to_bytes();
    RequestFrame { opaque: 2, ..then }.encode(&mut bytes);
    client.send(&bytes);
    let replies = [client.recv(), client.recv()];
    for reply in &replies {
        assert_eq!(reply.status, Status::Success, "{reply:?}");
    }
    replies.iter().map(|reply| reply.opaque).collect()
}

#[test]
fn an_ordered_connection_answers_in_the_order_of_its_requests() {
    let server = Server::start();
    let mut client = server.sdk_with(&ordered());
    client.set(b"\0other", b"v");
    for _ in 0..20 {
        assert_eq!(race(&mut client, RequestFrame { key: b"\0other", ..new(Opcode::Get) }), [1, 2]);
    }
}

#[test]
fn an_unordered_connection_lets_a_read_overtake_a_durable_write() {
    let server = Server::start();
    let mut client = server.sdk();
    client.set(b"\0other", b"v");
    let read = RequestFrame { key: b"\0other", ..new(Opcode::Get) };
    let overtaken = (0..20).filter(|_| race(&mut client, read) == [2, 1]).count();
    assert!(overtaken > 0, "nothing ever overlapped");
}

#[test]
fn fences_hold_even_on_an_unordered_connection() {
    let server = Server::start();
    let mut client = server.sdk();
    client.set(b"\0other", b"v");
    let barrier = [0u8];
    let fences = [
        new(Opcode::Noop),
        RequestFrame { key: b"\0other", ..new(Opcode::GetQ) },
        RequestFrame { key: b"\0other", framing_extras: &barrier, ..new(Opcode::Get) },
        RequestFrame { key: b"default", ..new(Opcode::SelectBucket) },
    ];
    for fence in fences {
        for _ in 0..5 {
            assert_eq!(race(&mut client, fence), [1, 2], "{fence:?}");
        }
    }
}

#[test]
fn durable_writes_are_answered_when_they_are_and_refused_where_they_cannot_be() {
    let server = Server::start();
    let mut client = server.sdk();
    let extras = store_extras(0, 0);
    for level in [Level::Majority, Level::MajorityAndPersistActive, Level::PersistMajority] {
        let framing = durable(level);
        let write =
            RequestFrame { framing_extras: &framing, key: b"\0d", value: b"v", extras: &extras, ..new(Opcode::Set) };
        let got = client.call(write);
        assert_eq!((got.status, got.extras.len()), (Status::Success, 16), "{level:?}");
        assert_eq!(client.get(b"\0d").cas, got.cas);
    }
    // 65535 is reserved, and sent all the same.
    let framing = [0x13, 1, 0xff, 0xff];
    let write =
        RequestFrame { framing_extras: &framing, key: b"\0d", value: b"v", extras: &extras, ..new(Opcode::Set) };
    assert_eq!(client.call(write).status, Status::Success);
    assert_eq!(
        client.call(RequestFrame { framing_extras: &[0x11, 9], ..write }).status,
        Status::DurabilityInvalidLevel
    );
    let read = RequestFrame { framing_extras: &framing, key: b"\0d", ..new(Opcode::Get) };
    assert_eq!(client.call(read).status, Status::Einval);

    assert_eq!(client.call(RequestFrame { key: b"replicated", ..new(Opcode::SelectBucket) }).status, Status::Success);
    let got = client.call(write);
    assert_eq!((got.status, got.cas), (Status::DurabilityImpossible, 0), "at once, not after the timeout");
}

/// Thousands of requests in one write, more than a turn's worth of them and of replies.
#[test]
fn a_deep_pipeline_is_answered_completely_and_in_order() {
    let server = Server::start();
    let mut client = server.sdk_with(&ordered());
    client.set(b"\0big", &[b'x'; 10_000]);
    let mut bytes = Vec::new();
    let count = 2_000;
    for opaque in 1..=count {
        RequestFrame { key: b"\0big", opaque, ..new(Opcode::Get) }.encode(&mut bytes);
    }
    let mut writer = client.stream.try_clone().unwrap();
    let sender = std::thread::spawn(move || std::io::Write::write_all(&mut writer, &bytes).unwrap());
    for opaque in 1..=count {
        let got = client.recv();
        assert_eq!((got.opaque, got.value.len()), (opaque, 10_000));
    }
    sender.join().unwrap();
}
