//! Goal: a connection that opened DCP is sent changes as they come, at its own pace, and is held to the protocol. Method: a
//! real server, a client that writes, and one that reads streams frame by frame.

mod common;

use std::io::Read;
use std::net::TcpStream;

use common::{Client, SDK_FEATURES, Server, new};
use types::{Seqno, VbId, VbUuid};
use wire::client::RequestFrame;
use wire::dcp::*;
use wire::{Feature, FeatureSet, FrameReader, Magic, Next, Opcode, Side, Status};

const UNORDERED: u16 = 0x0e;
const FOREVER: Seqno = Seqno(u64::MAX);

fn ordered() -> Vec<u16> {
    SDK_FEATURES.iter().copied().filter(|f| *f != UNORDERED).collect()
}

/// What the other end of a DCP connection reads.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Heard {
    Reply(Opcode, Status, Vec<u8>),
    Marker(u64, u64),
    Mutation(VbId, u64, Vec<u8>, Vec<u8>),
    Deletion(VbId, u64, Vec<u8>),
    End(EndReason),
    Noop(u32),
}

struct Feed {
    stream: TcpStream,
    buffer: Vec<u8>,
}

impl Feed {
    fn open(server: &Server, name: &str) -> Feed {
        let mut client = server.sdk_with(&ordered());
        assert_eq!(open(&mut client, name), Status::Success);
        Feed { stream: client.stream, buffer: Vec::new() }
    }

    fn say(&mut self, vb: u16, message: Message<'_>) {
        let mut bytes = Vec::new();
        Packet { vb: VbId(vb), opaque: 0xbeef, ..Packet::new(message) }.encode(&mut bytes);
        std::io::Write::write_all(&mut self.stream, &bytes).unwrap();
    }

    /// The next frame and its length; `None`: the server closed.
    fn try_hear(&mut self) -> Option<(Heard, usize)> {
        let features = FeatureSet::of(Feature::ALL);
        loop {
            if let Next::Frame(frame) = FrameReader::new(Side::Client).next(&self.buffer).unwrap() {
                let len = frame.frame_len();
                let heard = match frame.header.magic {
                    Magic::Response | Magic::AltResponse => {
                        let opcode = Opcode::from_wire(frame.header.opcode).unwrap();
                        Heard::Reply(opcode, wire::client::status(&frame).unwrap(), frame.value.to_vec())
                    }
                    _ => {
                        let packet = Packet::parse(&frame, features).unwrap();
                        let key = |key: wire::Key<'_>| key.resolve().as_key().logical().to_vec();
                        match packet.message {
                            Message::SnapshotMarker(marker) => Heard::Marker(marker.start.0, marker.end.0),
                            Message::Mutation(m) => Heard::Mutation(packet.vb, m.seqno.0, key(m.key), m.value.to_vec()),
                            Message::Deletion(d) => Heard::Deletion(packet.vb, d.seqno.0, key(d.key)),
                            Message::StreamEnd(reason) => Heard::End(reason),
                            Message::Noop => Heard::Noop(packet.opaque),
                            other => panic!("{other:?}"),
                        }
                    }
                };
                self.buffer.drain(..len);
                return Some((heard, len));
            }
            let mut chunk = [0; 64 * 1024];
            match self.stream.read(&mut chunk).unwrap() {
                0 => return None,
                count => self.buffer.extend_from_slice(&chunk[..count]),
            }
        }
    }

    fn hear(&mut self) -> Heard {
        self.try_hear().expect("the server closed the connection").0
    }

    fn control(&mut self, name: &str, value: &str) -> Status {
        self.say(0, Message::Control { name: name.as_bytes(), value: value.as_bytes() });
        let Heard::Reply(Opcode::DcpControl, status, _) = self.hear() else { panic!("no reply") };
        status
    }

    fn stream(&mut self, vb: u16, request: StreamRequest<'static>) -> (Status, Vec<u8>) {
        self.say(vb, Message::StreamRequest(request));
        let Heard::Reply(Opcode::DcpStreamReq, status, value) = self.hear() else { panic!("no reply") };
        (status, value)
    }
}

fn open(client: &mut Client, name: &str) -> Status {
    let extras = [0, 0, 0, 0, 0, 0, 0, 1];
    client.call(RequestFrame { extras: &extras, key: name.as_bytes(), ..new(Opcode::DcpOpen) }).status
}

fn from(start: u64) -> StreamRequest<'static> {
    let (flags, at, uuid) = (StreamFlags::default(), Seqno(start), VbUuid(0));
    StreamRequest { flags, start: at, end: FOREVER, uuid, snap_start: at, snap_end: at, filter: b"" }
}

fn set(client: &mut Client, vb: u16, key: &str, value: &[u8]) {
    let (key, extras) = (format!("\0{key}"), wire::client::store_extras(0, 0));
    let request = RequestFrame { vbucket: vb, extras: &extras, key: key.as_bytes(), value, ..new(Opcode::Set) };
    assert_eq!(client.call(request).status, Status::Success);
}

fn mutation(vb: u16, seqno: u64, key: &str, value: &str) -> Heard {
    Heard::Mutation(VbId(vb), seqno, key.into(), value.into())
}

#[test]
fn changes_are_sent_as_they_come() {
    let server = Server::start();
    let mut writer = server.sdk();
    set(&mut writer, 3, "a", b"1");
    let mut feed = Feed::open(&server, "feed");
    let (status, log) = feed.stream(3, from(0));
    assert_eq!((status, failover_log(&log).map(|log| log.len())), (Status::Success, Some(1)));
    assert_eq!([feed.hear(), feed.hear()], [Heard::Marker(0, 1), mutation(3, 1, "a", "1")]);
    set(&mut writer, 3, "b", b"2");
    assert_eq!([feed.hear(), feed.hear()], [Heard::Marker(2, 2), mutation(3, 2, "b", "2")]);
    let delete = RequestFrame { vbucket: 3, key: b"\0a", ..new(Opcode::Delete) };
    assert_eq!(writer.call(delete).status, Status::Success);
    assert_eq!([feed.hear(), feed.hear()], [Heard::Marker(3, 3), Heard::Deletion(VbId(3), 3, b"a".into())]);
    let (status, _) = feed.stream(5, StreamRequest { end: Seqno(1), ..from(0) });
    assert_eq!(status, Status::Success);
    set(&mut writer, 5, "c", b"3");
    let heard = [feed.hear(), feed.hear(), feed.hear()];
    assert_eq!(heard, [Heard::Marker(0, 1), mutation(5, 1, "c", "3"), Heard::End(EndReason::Ok)]);
    // Other requests are answered in between.
    feed.say(3, Message::GetFailoverLog);
    assert!(matches!(feed.hear(), Heard::Reply(Opcode::DcpGetFailoverLog, Status::Success, _)));
}

#[test]
fn a_consumer_of_another_history_is_told_where_to_go_back_to() {
    let server = Server::start();
    let mut writer = server.sdk();
    set(&mut writer, 3, "a", b"1");
    let mut feed = Feed::open(&server, "feed");
    let (status, value) = feed.stream(3, StreamRequest { uuid: VbUuid(1), ..from(1) });
    assert_eq!((status, rollback_seqno(&value)), (Status::Rollback, Some(Seqno(0))));
}

#[test]
fn a_connection_is_held_to_what_it_opened() {
    let server = Server::start();
    let mut unordered = server.sdk();
    assert_eq!(open(&mut unordered, "n"), Status::NotSupported);
    let mut reader = server.connect();
    reader.hello(&ordered());
    reader.plain("reader", "reader");
    assert_eq!(open(&mut reader, "n"), Status::NoBucket);
    reader.call(RequestFrame { key: b"default", ..new(Opcode::SelectBucket) });
    let early = reader.call(RequestFrame { extras: &[0; 4], ..new(Opcode::DcpBufferAck) });
    assert_eq!(early.status, Status::Einval);
    assert_eq!(open(&mut reader, "n"), Status::Success);
    let control =
        |name: &'static [u8], value: &'static [u8]| RequestFrame { key: name, value, ..new(Opcode::DcpControl) };
    assert_eq!(reader.call(control(b"no_such_thing", b"1")).status, Status::Einval);
    assert_eq!(reader.call(control(b"enable_noop", b"true")).status, Status::Success);
    assert_eq!(reader.call(control(b"consumer_name", b"n1")).status, Status::Eaccess);
    let select = RequestFrame { key: b"replicated", ..new(Opcode::SelectBucket) };
    assert_eq!(reader.call(select).status, Status::NotSupported);
    assert_eq!(open(&mut reader, "n"), Status::Einval);
    assert_eq!(reader.try_recv(), None, "a second OPEN ends the connection");
    let mut admin = server.sdk_with(&ordered());
    assert_eq!(open(&mut admin, "replica"), Status::Success);
    assert_eq!(admin.call(control(b"consumer_name", b"n1")).status, Status::Success);
}

#[test]
fn a_stranger_to_an_open_bucket_does_not_get_all_of_it() {
    let server = Server::open();
    let mut client = server.connect();
    client.hello(&ordered());
    let selected = client.call(RequestFrame { key: b"default", ..new(Opcode::SelectBucket) });
    assert_eq!((selected.status, open(&mut client, "n")), (Status::Success, Status::Eaccess));
}

#[test]
fn a_full_consumer_gets_more_once_it_says_so() {
    let server = Server::start();
    let mut writer = server.sdk();
    (0..100).for_each(|n| set(&mut writer, 3, &format!("k{n}"), &[b'v'; 100]));
    let mut feed = Feed::open(&server, "feed");
    assert_eq!(feed.control("connection_buffer_size", "1000"), Status::Success);
    assert_eq!(feed.stream(3, StreamRequest { end: Seqno(100), ..from(0) }).0, Status::Success);
    let (mut mutations, mut unacked) = (0, 0);
    loop {
        let (heard, len) = feed.try_hear().expect("more");
        unacked += len;
        match heard {
            Heard::Mutation(..) => mutations += 1,
            Heard::End(EndReason::Ok) => break,
            _ => {}
        }
        assert!(unacked < 1000 + 200, "{unacked} bytes were sent to who has room for 1000");
        if unacked >= 1000 {
            feed.say(0, Message::BufferAck(unacked as u32));
            unacked = 0;
        }
    }
    assert_eq!(mutations, 100);
}

/// Goal: nothing piles up for who does not read. Method: many times more is written than is kept for a connection, and then
/// it is read.
#[test]
fn a_consumer_that_does_not_read_costs_little_and_misses_nothing() {
    let server = Server::start();
    let mut writer = server.sdk();
    let mut feed = Feed::open(&server, "feed");
    (0..16).for_each(|vb| assert_eq!(feed.stream(vb, from(0)).0, Status::Success));
    let value = vec![b'v'; 64 << 10];
    for n in 0..640 {
        set(&mut writer, n % 16, &format!("k{n}"), &value);
    }
    let mut queued = 0;
    server.front_end.as_ref().expect("runs").walk_connections(|info| {
        queued = queued.max(info.bytes_queued.load(std::sync::atomic::Ordering::Relaxed));
    });
    assert!(queued < 1 << 20, "{queued} bytes wait for a connection that does not read");
    let mut seen = 0;
    while seen < 640 {
        if let Heard::Mutation(_, _, _, value) = feed.hear() {
            assert_eq!(value.len(), 64 << 10);
            seen += 1;
        }
    }
}

#[test]
fn a_consumer_that_connects_again_ends_its_former_connection() {
    let server = Server::start();
    let mut first = Feed::open(&server, "feed");
    let mut second = Feed::open(&server, "feed");
    assert_eq!(first.try_hear(), None);
    assert_eq!(second.stream(3, from(0)).0, Status::Success);
}

#[test]
fn a_silent_consumer_is_asked_and_then_given_up() {
    let server = Server::start();
    let mut feed = Feed::open(&server, "feed");
    assert_eq!(feed.control("enable_noop", "true"), Status::Success);
    assert_eq!(feed.control("set_noop_interval", "0.1"), Status::Success);
    let Heard::Noop(opaque) = feed.hear() else { panic!("not asked") };
    let answer = wire::Reply { opaque, ..wire::Reply::new(Opcode::DcpNoop as u8, Status::Success, opaque) };
    let mut bytes = Vec::new();
    answer.encode(&mut bytes);
    std::io::Write::write_all(&mut feed.stream, &bytes).unwrap();
    assert!(matches!(feed.hear(), Heard::Noop(_)), "asked again, as it is silent again");
    assert_eq!(feed.try_hear(), None, "and given up when it does not answer");
}

#[test]
fn statistics_tell_how_far_each_stream_is() {
    let server = Server::start();
    let mut writer = server.sdk();
    set(&mut writer, 3, "a", b"1");
    let mut feed = Feed::open(&server, "feed");
    assert_eq!(feed.stream(3, from(0)).0, Status::Success);
    feed.hear();
    feed.hear();
    writer.send(&RequestFrame { key: b"dcp", ..new(Opcode::Stat) }.to_bytes());
    let mut lines = std::collections::BTreeMap::new();
    loop {
        let got = writer.recv();
        if got.key.is_empty() {
            break;
        }
        lines.insert(String::from_utf8(got.key.clone()).unwrap(), got.text().to_owned());
    }
    let line = |name: &str| lines.get(name).map(String::as_str);
    assert_eq!(line("feed:stream_3_state"), Some("in-memory"), "{lines:?}");
    assert_eq!(line("feed:stream_3_last_sent_seqno"), Some("1"));
    assert_eq!(line("feed:stream_3_items_remaining"), Some("0"));
    assert_eq!((line("ep_dcp_producer_count"), line("ep_dcp_stream_count")), (Some("1"), Some("1")));
}
