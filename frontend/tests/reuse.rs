//! Who takes the place of a client that left: nothing that was meant for the one reaches the other.

mod common;

use std::time::Duration;

use common::{PASSWORD, SDK_FEATURES, Server, USER, new};
use types::Level;
use wire::client::{RequestFrame, hello_value, store_extras};
use wire::frame_info::push_durability;
use wire::{Opcode, Status};

/// The slot and generation of the only connection; `None`: there is none, or more than one.
fn only_slot(server: &Server) -> Option<(u32, u32)> {
    let mut slots = Vec::new();
    server.front_end.as_ref().unwrap().walk_connections(|info| slots.push((info.slot.index, info.slot.generation)));
    <[_; 1]>::try_from(slots).ok().map(|[slot]| slot)
}

fn wait_until_empty(server: &Server) {
    while server.front_end.as_ref().unwrap().connection_count() > 0 {
        std::thread::yield_now();
    }
}

fn one_worker() -> Server {
    Server::with(|options| options.workers = 1)
}

/// Goal: an answer finds the client it was meant for, or nobody. Method: a client is gone while its write is under way,
/// and the next one in its slot, set up the same way, has a write of its own under way when the answer comes.
#[test]
fn an_answer_that_comes_too_late_is_not_the_next_clients() {
    let server = one_worker();
    let mut framing = Vec::new();
    push_durability(&mut framing, Level::PersistMajority, Some(9000));
    let extras = store_extras(0, 0);
    let write = |vbucket, key| RequestFrame {
        framing_extras: &framing,
        vbucket,
        key,
        value: b"v",
        extras: &extras,
        opaque: 7,
        ..new(Opcode::Set)
    };
    let (features, login) = (hello_value(SDK_FEATURES), format!("\0{USER}\0{PASSWORD}"));
    let opening = |write: RequestFrame<'_>| {
        let mut bytes = Vec::new();
        RequestFrame { key: b"test", value: &features, ..new(Opcode::Hello) }.encode(&mut bytes);
        RequestFrame { key: b"PLAIN", value: login.as_bytes(), ..new(Opcode::SaslAuth) }.encode(&mut bytes);
        RequestFrame { key: b"default", ..new(Opcode::SelectBucket) }.encode(&mut bytes);
        write.encode(&mut bytes);
        bytes
    };
    for round in 0..200 {
        let mut first = server.connect();
        first.send(&opening(write(1, b"\0first")));
        // With answers unread a close is a reset, after which nothing is waited for.
        first.stream.peek(&mut [0]).unwrap();
        let (slot, generation) = only_slot(&server).expect("the first is in");
        drop(first);
        wait_until_empty(&server);

        let mut second = server.connect();
        second.send(&opening(write(2, b"\0second")));
        let replies: Vec<_> = (0..4).map(|_| second.recv()).collect();
        assert_eq!(only_slot(&server), Some((slot, generation + 1)));
        let stored = &replies[3];
        assert_eq!((stored.status, stored.opaque), (Status::Success, 7), "round {round}: {stored:?}");
        let read = second.call(RequestFrame { vbucket: 2, key: b"\0second", ..new(Opcode::Get) });
        assert_eq!(read.cas, stored.cas, "round {round}: another's answer");
        drop(second);
        wait_until_empty(&server);
    }
}

/// Goal: a deadline finds the client it was set for, or nobody. Method: one leaves in the two seconds in which its slot is
/// kept for it, another takes the slot, and the two seconds pass.
#[test]
fn a_deadline_of_a_client_that_left_does_not_end_the_next_one() {
    let server = one_worker();
    let mut first = server.sdk();
    let (slot, generation) = only_slot(&server).expect("the first is in");
    assert_eq!(first.call(new(Opcode::Quit)).status, Status::Success);
    assert_eq!(first.try_recv(), None);
    drop(first);
    wait_until_empty(&server);

    let mut second = server.sdk();
    assert_eq!(only_slot(&server), Some((slot, generation + 1)));
    let before = server.deadline_looks();
    server.put_ahead(Duration::from_secs(3));
    while server.deadline_looks() == before {
        second.noop();
    }
    // The letter is in the box by now: it is opened before the second of these.
    second.noop();
    assert_eq!(second.noop().status, Status::Success);
}
