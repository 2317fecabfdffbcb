//! Goal: a consumer gets every change it asked for, once and in order, from memory or from the file, whatever its pace.
//! Method: a real bucket on a simulated disk, changed and filed step by step, and a consumer that writes down what comes.

mod common;

use common::*;
use replication::{Pulled, StreamState};
use types::{Seqno, VbId, VbState, VbUuid};
use wire::dcp::{Message, failover_log};
use wire::dcp::{OpenFlags, Packet, StreamFlags, StreamRequest};
use wire::{Feature, Opcode, Status};

#[test]
fn a_stream_from_nothing_tells_everything_and_follows() {
    let world = World::new();
    world.set("a", "1");
    world.set("b", "2");
    world.set("a", "3");
    let mut consumer = Consumer::new(&world);
    let log = consumer.ask(&request(0)).expect("a stream");
    assert_eq!(failover_log(&log).map(|log| log[0]), Some((world.uuid(), Seqno(0))));
    assert_eq!(consumer.told(), ["memory 0..3", "2 b=2", "3 a=3"]);
    assert_eq!(consumer.told(), [""; 0]);
    let wakes = consumer.bedside.wakes();
    world.delete("b");
    world.set("c", "4");
    assert_eq!(consumer.bedside.wakes(), wakes + 1, "woken once for what it has not looked at");
    assert_eq!(consumer.told(), ["memory 4..5", "4 b deleted", "5 c=4"]);
    world.set("c", "5");
    assert_eq!(consumer.bedside.wakes(), wakes + 2);
    assert_eq!(consumer.told(), ["memory 6..6", "6 c=5"]);
}

#[test]
fn what_left_memory_is_read_from_the_file_and_what_came_meanwhile_follows() {
    let world = World::new();
    world.set("a", "1");
    world.set("b", "2");
    world.delete("a");
    world.file();
    let mut consumer = Consumer::new(&world);
    consumer.stream_from(0);
    assert_eq!(consumer.told(), [""; 0]);
    while consumer.bedside.wakes() == 0 {
        assert!(world.stepper.step());
    }
    world.set("c", "3");
    let told = consumer.told();
    assert_eq!(told, ["disk 0..3", "2 b=2", "3 a deleted", "memory 4..4", "4 c=3"]);
    world.set("d", "4");
    assert_eq!(consumer.told_everything(), ["memory 5..5", "5 d=4"]);
    world.file();
    world.set("e", "5");
    assert_eq!(consumer.told(), ["memory 6..6", "6 e=5"], "memory goes on where it was");
}

#[test]
fn a_stream_goes_on_where_its_consumer_was() {
    let world = World::new();
    for n in 0..6 {
        world.set(&format!("k{n}"), "v");
    }
    world.file();
    let mut consumer = Consumer::new(&world);
    consumer.stream_from(4);
    assert_eq!(consumer.told_everything(), ["disk 4..6", "5 k4=v", "6 k5=v"]);
    let again = consumer.ask(&request(0)).map_err(|refusal| refusal.status);
    assert_eq!(again, Err(Status::KeyEexists));
    let wrong = StreamRequest { uuid: VbUuid(1), ..request(3) };
    let refusal = consumer.ask_of(VbId(0), &wrong).expect_err("another history");
    assert_eq!((refusal.status, refusal.rollback), (Status::Rollback, Some(Seqno(0))));
}

#[test]
fn a_stream_with_an_end_ends_there() {
    let world = World::new();
    for n in 0..4 {
        world.set(&format!("k{n}"), "v");
    }
    let mut consumer = Consumer::new(&world);
    consumer.ask(&StreamRequest { end: Seqno(2), ..request(0) }).expect("a stream");
    assert_eq!(consumer.told(), ["memory 0..2", "1 k0=v", "2 k1=v", "end: Ok"]);
    world.file();
    consumer.ask(&StreamRequest { end: Seqno(2), ..request(0) }).expect("a stream");
    assert_eq!(consumer.told_everything(), ["disk 0..2", "1 k0=v", "2 k1=v", "end: Ok"]);
    consumer.ask(&StreamRequest { flags: StreamFlags::TO_LATEST, ..request(0) }).expect("a stream");
    world.set("later", "v");
    let told = consumer.told_everything();
    assert_eq!((told.len(), told.last().map(String::as_str)), (6, Some("end: Ok")));
    consumer.ask(&StreamRequest { flags: StreamFlags::FROM_LATEST, ..request(0) }).expect("a stream");
    world.set("last", "v");
    assert_eq!(consumer.told(), ["memory 5..6", "6 last=v"]);
}

#[test]
fn a_consumer_that_is_full_is_told_nothing_until_it_has_room() {
    let world = World::new();
    for n in 0..100 {
        world.set(&format!("k{n:02}"), "v");
    }
    let mut consumer = Consumer::new(&world);
    consumer.control("connection_buffer_size", "1000");
    consumer.stream_from(0);
    let (mut told, mut acked) = (Vec::new(), 0);
    while told.len() < 101 {
        let before = consumer.told_bytes;
        told.extend(consumer.told());
        assert!(consumer.told_bytes - before <= 1000 + 60, "no more than there is room for, and one message");
        assert!(consumer.told_bytes > before, "stuck after {} messages", told.len());
        consumer.producer.buffer_ack((consumer.told_bytes - acked) as u32);
        acked = consumer.told_bytes;
    }
    assert_eq!(told[0], "memory 0..100");
    assert!(told[1..].iter().zip(1..).all(|(told, n)| told.starts_with(&format!("{n} k"))));
}

/// Goal: a consumer that does not read costs a bounded amount of memory, and misses nothing. Method: many times as much as
/// may be kept is written and filed while it does not read.
#[test]
fn a_slow_consumer_is_left_behind_and_goes_on_with_the_file() {
    let world = World::with(persist::BucketSpec { quota_bytes: 16 << 20, ..spec() });
    let mut consumer = Consumer::new(&world);
    consumer.stream_from(0);
    assert_eq!(consumer.told(), [""; 0]);
    let value = "v".repeat(10_000);
    for n in 0..400 {
        world.set(&format!("k{n}"), &value);
        if n % 20 == 0 {
            world.file();
        }
    }
    world.file();
    let kept = world.bucket.memory_parts().changelogs;
    assert!(kept <= (16 << 20) / 16 + (300 << 10), "{kept} bytes are kept for a consumer that does not read");
    let told = consumer.told_everything();
    let seqnos: Vec<u64> = told.iter().filter_map(|line| line.split(' ').next()?.parse().ok()).collect();
    assert_eq!(seqnos, (1..=400).collect::<Vec<_>>());
    assert!(told.iter().any(|line| line.starts_with("disk ")));
    let face = &world.registry.of_bucket("default")[0].streams()[0];
    assert_eq!((face.state(), face.sent(), face.items_sent()), (StreamState::InMemory, Seqno(400), 400));
    assert!(face.backfills() >= 1 && face.items_left(&world.bucket) == 0);
    drop(consumer);
    assert_eq!(world.bucket.memory_parts().changelogs, 0);
}

#[test]
fn the_file_is_told_in_one_snapshot_however_many_pieces_it_is_read_in() {
    let world = World::new();
    let value = "v".repeat(100_000);
    for n in 0..50 {
        world.set(&format!("k{n}"), &value);
    }
    world.file();
    let mut consumer = Consumer::new(&world);
    consumer.stream_from(0);
    assert_eq!(consumer.told(), [""; 0]);
    // The first piece only; then what was read changes.
    while consumer.bedside.wakes() == 0 {
        assert!(world.stepper.step());
    }
    let (first, _) = consumer.pull(usize::MAX / 2);
    assert!(first.len() > 1 && first.len() < 50, "{}", first.len());
    world.set("k49", "new");
    world.file();
    let told: Vec<String> = first.into_iter().chain(consumer.told_everything()).collect();
    assert_eq!(told[0], "disk 0..50");
    assert_eq!(told[50], format!("50 k49={value}"), "as it was when the snapshot was taken");
    assert_eq!(told[51..], ["disk 51..51", "51 k49=new"]);
}

#[test]
fn sync_writes_are_told_as_such_to_those_who_ask_and_as_changes_to_others() {
    let world = World::new();
    let mut plain = Consumer::with(&world, "plain", OpenFlags::default(), &[]);
    let mut replica = Consumer::with(&world, "replica", OpenFlags::default(), &[Feature::Collections]);
    replica.control("enable_sync_writes", "true");
    replica.control("consumer_name", "n1");
    assert_eq!((plain.producer.replica(), replica.producer.replica()), (None, Some("n1")));
    plain.stream_from(0);
    replica.stream_from(0);
    world.set_durably("k", "v");
    assert_eq!(plain.told(), [""; 0]);
    assert_eq!(
        world.registry.totals(&world.bucket).items_left,
        1,
        "of the replica's, not of who is not told of prepares"
    );
    assert_eq!(replica.told(), ["memory 0..1", "1 k? v"]);
    world.file();
    assert_eq!(plain.told(), ["memory 0..2", "2 k=v"]);
    assert_eq!(replica.told(), ["memory 2..2", "2 k! of 1"]);
    world.set("after", "v");
    world.file();
    let mut late = Consumer::with(&world, "late", OpenFlags::default(), &[Feature::Collections]);
    late.control("enable_sync_writes", "true");
    late.stream_from(0);
    assert_eq!(late.told_everything(), ["disk 0..3", "2 k=v", "3 after=v"], "what is decided is not prepared again");
    let ack = |vb| Packet { vb, ..Packet::new(Message::SeqnoAck(Seqno(1))) };
    assert!(replica.producer.seqno_ack(&ack(VB), Seqno(1)) && !replica.producer.seqno_ack(&ack(VbId(0)), Seqno(1)));
}

#[test]
fn streams_take_turns_snapshot_by_snapshot() {
    let world = World::new();
    let value = "v".repeat(20_000);
    for n in 0..30 {
        world.set_in(VbId(0), &format!("k{n}"), &value);
        world.set_in(VbId(1), &format!("k{n}"), &value);
    }
    let mut consumer = Consumer::new(&world);
    consumer.ask_of(VbId(0), &request(0)).expect("a stream");
    consumer.ask_of(VbId(1), &request(0)).expect("a stream");
    let markers: Vec<String> = consumer.told().into_iter().filter(|line| line.starts_with("memory")).collect();
    assert_eq!(markers[..4], ["memory 0..7", "memory 0..7", "memory 8..14", "memory 8..14"]);
}

#[test]
fn a_vbucket_that_changes_its_state_ends_its_streams() {
    let world = World::new();
    world.set("a", "1");
    let mut consumer = Consumer::new(&world);
    consumer.stream_from(0);
    consumer.told();
    world.bucket.set_vb_state(VB, VbState::Replica, None).expect("a replica");
    assert_eq!(consumer.told(), ["end: StateChanged"]);
    let of = |flags| StreamRequest { flags, ..request(0) };
    let refused = consumer.ask(&of(StreamFlags::ACTIVE_ONLY)).map_err(|refusal| refusal.status);
    assert_eq!(refused, Err(Status::NotMyVbucket));
    consumer.ask(&of(StreamFlags::default())).expect("a replica streams too");
    assert_eq!(consumer.told_everything().len(), 2);
    world.bucket.set_vb_state(VB, VbState::Active, None).expect("active");
    assert_eq!(consumer.told(), ["end: StateChanged"]);
    let outside = consumer.ask_of(VbId(4), &request(0)).map_err(|refusal| refusal.status);
    assert_eq!(outside, Err(Status::NotMyVbucket));
}

#[test]
fn a_stream_can_be_closed_with_or_without_a_word() {
    let world = World::new();
    let mut consumer = Consumer::new(&world);
    let close = Packet { vb: VB, ..Packet::new(Message::CloseStream) };
    let mut out = Vec::new();
    let missing = consumer.producer.close_stream(&close, &mut out).map_err(|refusal| refusal.status);
    assert_eq!(missing, Err(Status::KeyEnoent));
    consumer.control("v7_dcp_status_codes", "true");
    let missing = consumer.producer.close_stream(&close, &mut out).map_err(|refusal| refusal.status);
    assert_eq!(missing, Err(Status::DcpStreamNotFound));
    consumer.stream_from(0);
    consumer.producer.close_stream(&close, &mut out).expect("closed");
    assert!(out.is_empty());
    consumer.control("send_stream_end_on_client_close_stream", "true");
    consumer.stream_from(0);
    consumer.producer.close_stream(&close, &mut out).expect("closed");
    assert_eq!((out.len(), out[1]), (28, Opcode::DcpStreamEnd as u8));
    world.set("a", "1");
    assert_eq!(consumer.told(), [""; 0]);
}

#[test]
fn a_consumer_that_does_not_answer_is_given_up() {
    let world = World::new();
    let mut consumer = Consumer::new(&world);
    consumer.control("enable_noop", "true");
    consumer.control("set_noop_interval", "10");
    assert_eq!(consumer.told(), [""; 0]);
    world.stepper.advance(std::time::Duration::from_secs(10));
    assert_eq!(consumer.told(), ["noop"]);
    consumer.producer.heard(world.now());
    consumer.producer.answered(Opcode::DcpNoop, Some(Status::Success), 0);
    world.stepper.advance(std::time::Duration::from_secs(10));
    assert_eq!(consumer.told(), ["noop"]);
    world.stepper.advance(std::time::Duration::from_secs(10));
    assert!(matches!(consumer.pull(1000).1, Pulled::Over(_)));
}

#[test]
fn a_consumer_that_comes_again_takes_the_place_of_its_former_connection() {
    let world = World::new();
    let mut first = Consumer::new(&world);
    let mut other = Consumer::with(&world, "other", OpenFlags::default(), &[]);
    let mut second = Consumer::new(&world);
    assert_eq!(first.bedside.wakes(), 1);
    assert!(matches!(first.pull(1000).1, Pulled::Over(_)));
    assert_eq!((second.told(), other.told()), (vec![], vec![]));
    drop(first);
    let names: Vec<String> = world.registry.of_bucket("default").iter().map(|face| face.name.clone()).collect();
    assert_eq!(names, ["c", "other"]);
}

#[test]
fn what_needs_more_than_was_agreed_is_refused() {
    let world = World::new();
    let status = |consumer: &mut Consumer<'_>, request: &StreamRequest<'_>| consumer.ask(request).map_err(|r| r.status);
    let mut aware = Consumer::with(&world, "a", OpenFlags::default(), &[Feature::Collections]);
    let filtered = StreamRequest { filter: br#"{"collections":["0"]}"#, ..request(0) };
    assert_eq!(status(&mut aware, &filtered), Err(Status::NotSupported));
    aware.control("enable_noop", "true");
    let unknown = StreamRequest { filter: br#"{"collections":["8"]}"#, ..request(0) };
    assert_eq!(status(&mut aware, &unknown), Err(Status::UnknownCollection));
    let with_id = StreamRequest { filter: br#"{"sid":1}"#, ..request(0) };
    assert_eq!(status(&mut aware, &with_id), Err(Status::DcpStreamIdInvalid));
    assert_eq!(status(&mut aware, &StreamRequest { flags: StreamFlags(0x08), ..request(0) }), Err(Status::Einval));
    assert_eq!(status(&mut aware, &StreamRequest { start: Seqno(9), ..request(0) }), Err(Status::Erange));
    assert!(status(&mut aware, &filtered).is_ok());
    let mut xattrs = Consumer::with(&world, "x", OpenFlags::INCLUDE_XATTRS, &[Feature::Xattr]);
    assert_eq!(status(&mut xattrs, &request(0)), Err(Status::NotSupported));
}

#[test]
fn a_lot_of_streams_read_few_files_at_a_time_and_all_of_them_in_the_end() {
    let world = World::with(persist::BucketSpec { vbuckets: 64, ..spec() });
    for vb in 0..64 {
        world.set_in(VbId(vb), "k", "v");
    }
    world.file();
    let mut consumer = Consumer::new(&world);
    for vb in 0..64 {
        consumer.ask_of(VbId(vb), &StreamRequest { end: Seqno(1), ..request(0) }).expect("a stream");
    }
    assert_eq!(consumer.told(), [""; 0]);
    let reading = |state| {
        let faces = world.registry.of_bucket("default")[0].streams();
        faces.iter().filter(|face| face.state() == state).count()
    };
    assert_eq!((reading(StreamState::Backfilling), reading(StreamState::Waiting)), (4, 60));
    let told = consumer.told_everything();
    assert_eq!(told.iter().filter(|line| *line == "end: Ok").count(), 64);
}

/// Goal: a vBucket that moves is written here or there, never both, and nothing that was written is left behind. Method: it is
/// written at every step of the move, as long as that is possible.
#[test]
fn a_vbucket_that_moves_takes_everything_along_and_is_let_go_first() {
    let world = World::new();
    world.set("a", "1");
    let mut consumer = Consumer::new(&world);
    consumer.ask(&StreamRequest { flags: StreamFlags::TAKEOVER, ..request(0) }).expect("a stream");
    assert_eq!(consumer.told(), ["memory 0..1", "1 a=1", "be pending"]);
    world.set("b", "2");
    assert_eq!(consumer.told(), ["memory 2..2", "2 b=2"]);
    world.set("c", "3");
    let answered = |consumer: &mut Consumer<'_>, opaque| {
        consumer.producer.answered(Opcode::DcpSetVbucketState, Some(Status::Success), opaque);
    };
    answered(&mut consumer, 8);
    assert_eq!(world.bucket.vb_state(VB), Some(VbState::Active), "that was of another stream");
    answered(&mut consumer, 7);
    assert_eq!(world.bucket.vb_state(VB), Some(VbState::Dead));
    assert_eq!(consumer.told(), ["memory 3..3", "3 c=3"]);
    // Nobody else may be active before it is on disk that nobody is here.
    assert_eq!(consumer.told(), [""; 0]);
    assert_eq!(consumer.told_everything(), ["be active"]);
    assert_eq!(consumer.told(), [""; 0]);
    answered(&mut consumer, 7);
    assert_eq!(consumer.told(), ["end: Ok"]);
    let replica = consumer.ask_of(VbId(0), &StreamRequest { flags: StreamFlags::TAKEOVER, ..request(0) });
    assert!(replica.is_ok());
}

#[test]
fn a_move_that_is_refused_leaves_the_vbucket_where_it_is() {
    let world = World::new();
    let mut consumer = Consumer::with(&world, "mover", OpenFlags::default(), &[Feature::Json]);
    consumer.ask(&StreamRequest { flags: StreamFlags::TAKEOVER, ..request(0) }).expect("a stream");
    assert_eq!(consumer.told(), ["be pending"]);
    consumer.producer.answered(Opcode::DcpSetVbucketState, Some(Status::Etmpfail), 7);
    assert_eq!(consumer.told(), [""; 0]);
    assert_eq!(world.bucket.vb_state(VB), Some(VbState::Active));
    world.set("a", "1");
}
