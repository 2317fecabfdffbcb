//! Goal: both ends of a replication connection mean the same bytes. Method: hand-written frames are read and written
//! again, and whatever can be said comes back as it was said.

use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use types::{Cas, CollectionId, Datatype, Level, RevSeqno, ScopeId, Seqno, VbId, VbState, VbUuid};
use wire::dcp::*;
use wire::{Feature, FeatureSet, Frame, FrameReader, Key, Next, Side};

const EVERYTHING: FeatureSet = FeatureSet::of(Feature::ALL);

fn bytes(hex: &str) -> Vec<u8> {
    let digits: Vec<u8> = hex.bytes().filter(|b| !b.is_ascii_whitespace()).collect();
    let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).expect("ASCII"), 16).expect("hexadecimal");
    digits.chunks(2).map(byte).collect()
}

fn read(bytes: &[u8]) -> Frame<'_> {
    match FrameReader::new(Side::Client).next(bytes) {
        Ok(Next::Frame(frame)) if frame.frame_len() == bytes.len() => frame,
        other => panic!("not one whole frame: {other:?}"),
    }
}

fn key(bytes: &[u8]) -> Key<'_> {
    Key::parse(bytes, true).expect("a legal key")
}

/// Reads `hex`, which must mean `packet`, and writes it again.
fn assert_golden(hex: &str, packet: Packet<'_>) {
    let golden = bytes(hex);
    assert_eq!(Packet::parse(&read(&golden), EVERYTHING), Ok(packet));
    let mut written = Vec::new();
    packet.encode(&mut written);
    assert_eq!(written, golden, "{packet:?}");
    assert_eq!(packet.frame_len(), golden.len());
}

fn of_vb_7(message: Message<'_>) -> Packet<'_> {
    Packet { vb: VbId(7), opaque: 0x2a, ..Packet::new(message) }
}

#[test]
fn opening_and_controlling_a_connection() {
    let flags = OpenFlags::PRODUCER.with(OpenFlags::INCLUDE_XATTRS);
    let open = Message::Open(Open { flags, name: b"feed", details: b"" });
    assert_golden("80500004 08000000 0000000c 00000000 0000000000000000 00000000 00000005 66656564", Packet::new(open));
    let flags = OpenFlags(0);
    let consumer = Message::Open(Open { flags, name: b"r", details: br#"{"consumer_name":"n"}"# });
    assert_golden(
        "80500001 08010000 0000001e 00000000 0000000000000000 00000000 00000000 72
         7b22636f6e73756d65725f6e616d65223a226e227d",
        Packet::new(consumer),
    );
    let control = Message::Control { name: b"enable_noop", value: b"true" };
    assert_golden(
        "805e000b 00000000 0000000f 00000000 0000000000000000 656e61626c655f6e6f6f70 74727565",
        Packet::new(control),
    );
    assert_golden(
        "805d0000 04000000 00000004 00000000 0000000000000000 00100000",
        Packet::new(Message::BufferAck(1 << 20)),
    );
    assert_golden("805c0000 00000000 00000000 00000000 0000000000000000", Packet::new(Message::Noop));
}

#[test]
fn the_life_of_a_stream() {
    let request = StreamRequest {
        flags: StreamFlags::TO_LATEST,
        start: Seqno(0x10),
        end: Seqno(u64::MAX),
        uuid: VbUuid(0xaabb_ccdd_eeff),
        snap_start: Seqno(0x0f),
        snap_end: Seqno(0x20),
        filter: br#"{"sid":3}"#,
    };
    let packet = Packet { stream_id: Some(3), ..of_vb_7(Message::StreamRequest(request)) };
    assert_golden(
        "08530300 30010007 0000003c 0000002a 0000000000000000 220003 00000004 00000000 0000000000000010
         ffffffffffffffff 0000aabbccddeeff 000000000000000f 0000000000000020 7b22736964223a337d",
        packet,
    );
    assert_golden(
        "80510000 04000007 00000004 0000002a 0000000000000000 00000001",
        of_vb_7(Message::AddStream(StreamFlags::TAKEOVER)),
    );
    assert_golden("80540000 00000007 00000000 0000002a 0000000000000000", of_vb_7(Message::GetFailoverLog));
    assert_golden("80520000 00000007 00000000 0000002a 0000000000000000", of_vb_7(Message::CloseStream));
    assert_golden(
        "80550000 04000007 00000004 0000002a 0000000000000000 00000002",
        of_vb_7(Message::StreamEnd(EndReason::StateChanged)),
    );
    assert_golden(
        "80640000 08000007 00000008 0000002a 0000000000000000 0000000000000021",
        of_vb_7(Message::SeqnoAdvanced(Seqno(0x21))),
    );
    assert_golden(
        "805b0000 01010007 00000003 0000002a 0000000000000000 03 7b7d",
        of_vb_7(Message::SetVbucketState { state: VbState::Pending, details: b"{}" }),
    );
}

#[test]
fn snapshot_markers_of_every_version() {
    let flags = SnapshotFlags::MEMORY.with(SnapshotFlags::CHECKPOINT);
    let marker =
        |detail| of_vb_7(Message::SnapshotMarker(SnapshotMarker { start: Seqno(1), end: Seqno(0x10), flags, detail }));
    assert_golden(
        "80560000 14000007 00000014 0000002a 0000000000000000 0000000000000001 0000000000000010 00000005",
        marker(MarkerDetail::V1),
    );
    assert_golden(
        "80560000 01000007 00000025 0000002a 0000000000000000 00
         0000000000000001 0000000000000010 00000005 000000000000000e 000000000000000a",
        marker(MarkerDetail::V2 { max_visible: Seqno(0xe), high_completed: Seqno(0xa) }),
    );
    assert_golden(
        "80560000 01000007 00000035 0000002a 0000000000000000 02
         0000000000000001 0000000000000010 00000005 000000000000000e 000000000000000a
         0000000000000004 000000000000000d",
        marker(MarkerDetail::V2_2 {
            max_visible: Seqno(0xe),
            high_completed: Seqno(0xa),
            purge: Seqno(4),
            high_prepared: Seqno(0xd),
        }),
    );
}

#[test]
fn changes_of_documents() {
    let mutation = Mutation {
        seqno: Seqno(0x11),
        rev: RevSeqno(2),
        flags: 0x0200_0006,
        expiry: 0x6000_0000,
        cas: Cas(0x16f0_c1b5_e4a2_0000),
        datatype: Datatype::JSON,
        key: key(b"\0k"),
        value: b"{}",
    };
    assert_golden(
        "80570002 1f010007 00000023 0000002a 16f0c1b5e4a20000 0000000000000011 0000000000000002
         02000006 60000000 00000000 0000 00 006b 7b7d",
        of_vb_7(Message::Mutation(mutation)),
    );
    let deletion = Deletion {
        seqno: Seqno(0x12),
        rev: RevSeqno(3),
        delete_time: None,
        cas: Cas(5),
        datatype: Datatype::RAW,
        key: key(b"\x08k"),
        value: b"",
    };
    let ids = "0000000000000012 0000000000000003";
    assert_golden(
        &format!("80580002 12000007 00000014 0000002a 0000000000000005 {ids} 0000 086b"),
        of_vb_7(Message::Deletion(deletion)),
    );
    let deletion = Deletion { delete_time: Some(0x6000_0000), ..deletion };
    assert_golden(
        &format!("80580002 15000007 00000017 0000002a 0000000000000005 {ids} 60000000 00 086b"),
        of_vb_7(Message::Deletion(deletion)),
    );
    assert_golden(
        &format!("80590002 14000007 00000016 0000002a 0000000000000005 {ids} 60000000 086b"),
        of_vb_7(Message::Expiration(deletion)),
    );
}

#[test]
fn synchronous_writes() {
    let prepare = Prepare {
        seqno: Seqno(0x11),
        rev: RevSeqno(2),
        flags: 1,
        expiry: 0,
        deleted: true,
        level: Level::PersistMajority,
        cas: Cas(9),
        datatype: Datatype::RAW,
        key: key(b"\0k"),
        value: b"",
    };
    assert_golden(
        "80600002 1f000007 00000021 0000002a 0000000000000009 0000000000000011 0000000000000002
         00000001 00000000 00000000 00 01 03 006b",
        of_vb_7(Message::Prepare(prepare)),
    );
    let done = Completion { prepared: Seqno(0x11), seqno: Seqno(0x13), key: key(b"\0k") };
    let rest = "0002 10000007 00000012 0000002a 0000000000000000 0000000000000011 0000000000000013 006b";
    assert_golden(&format!("8062 {rest}"), of_vb_7(Message::Commit(done)));
    assert_golden(&format!("8063 {rest}"), of_vb_7(Message::Abort(done)));
    assert_golden(
        "80610000 08000007 00000008 0000002a 0000000000000000 0000000000000011",
        of_vb_7(Message::SeqnoAck(Seqno(0x11))),
    );
}

#[test]
fn events_of_collections() {
    let event = |event| {
        of_vb_7(Message::SystemEvent(SystemEvent { seqno: Seqno(5), manifest_uid: 7, scope: ScopeId(8), event }))
    };
    let collection = CollectionId(9);
    let ids = "0000000000000007 00000008";
    let head = |key_len: &str, body_len: &str, code: &str| {
        format!("805f{key_len} 0d000007 {body_len} 0000002a 0000000000000000 0000000000000005 {code}")
    };
    let created = |max_ttl_s| event(Event::CollectionCreated { name: b"c", collection, max_ttl_s });
    assert_golden(&format!("{} 63 {ids} 00000009", head("0001", "0000001e", "00000000 00")), created(None));
    assert_golden(
        &format!("{} 63 {ids} 00000009 0000003c", head("0001", "00000022", "00000000 01")),
        created(Some(60)),
    );
    let dropped = event(Event::CollectionDropped { collection });
    assert_golden(&format!("{} {ids} 00000009", head("0000", "0000001d", "00000001 00")), dropped);
    assert_golden(
        &format!("{} 73 {ids}", head("0001", "0000001a", "00000003 00")),
        event(Event::ScopeCreated { name: b"s" }),
    );
    assert_golden(&format!("{} {ids}", head("0000", "00000019", "00000004 00")), event(Event::ScopeDropped));
}

#[test]
fn replies_in_bytes_are_lists_of_numbers() {
    let histories = vec![(VbUuid(0xaabb), Seqno(5)), (VbUuid(0xccdd), Seqno(0))];
    let mut log = Vec::new();
    push_failover_log(&mut log, histories.clone());
    assert_eq!(log, bytes("000000000000aabb 0000000000000005 000000000000ccdd 0000000000000000"));
    assert_eq!((failover_log(&log), failover_log(&log[1..])), (Some(histories), None));
    assert_eq!((rollback_seqno(&bytes("0000000000000102")), rollback_seqno(&[1])), (Some(Seqno(0x102)), None));
    let seqnos = bytes("0001 0000000000000005 03ff 0000000000000000");
    assert_eq!(vb_seqnos(&seqnos), Some(vec![(VbId(1), Seqno(5)), (VbId(1023), Seqno(0))]));
    assert_eq!(vb_seqnos(&seqnos[1..]), None);
}

#[test]
fn a_stream_id_belongs_to_replication_only() {
    let mut written = Vec::new();
    Packet { stream_id: Some(0x102), ..Packet::new(Message::CloseStream) }.encode(&mut written);
    let frames = |bytes: &[u8]| wire::parse(&read(bytes), EVERYTHING).map(|r| r.frames.stream_id).map_err(|e| e.status);
    assert_eq!(frames(&written), Ok(Some(0x102)));
    written[1] = wire::Opcode::Noop as u8;
    assert_eq!(frames(&written), Err(wire::Status::Einval));
}

/// The parts a message may borrow.
#[derive(Clone, Debug)]
struct Store {
    which: u8,
    a: u64,
    b: u64,
    c: u64,
    d: u64,
    small: (u32, u32, u8),
    option: Option<u32>,
    key: Vec<u8>,
    text: Vec<u8>,
}

fn stores() -> impl Strategy<Value = Store> {
    let numbers = (any::<u64>(), any::<u64>(), any::<u64>(), 1u64..);
    let key = vec(any::<u8>(), 1..40).prop_map(|mut key| {
        key.insert(0, 0);
        key
    });
    let small = (any::<u32>(), any::<u32>(), 0u8..8);
    (0u8..23, numbers, small, option::of(any::<u32>()), key, vec(any::<u8>(), 1..60)).prop_map(
        |(which, (a, b, c, d), small, option, key, text)| Store { which, a, b, c, d, small, option, key, text },
    )
}

impl Store {
    fn message(&self) -> Message<'_> {
        let (seqno, rev, cas) = (Seqno(self.a), RevSeqno(self.b), Cas(self.d));
        let (x, y, bits) = self.small;
        let (key, value, datatype) = (key(&self.key), &self.text[..], Datatype(bits));
        let deletion = |delete_time| Deletion { seqno, rev, delete_time, cas, datatype, key, value };
        let completion = Completion { prepared: Seqno(self.b), seqno, key };
        let marker = |detail| SnapshotMarker { start: seqno, end: Seqno(self.b), flags: SnapshotFlags(x), detail };
        let (max_visible, high_completed) = (Seqno(self.c), Seqno(self.d));
        let event = |event| Message::SystemEvent(SystemEvent { seqno, manifest_uid: self.b, scope: ScopeId(x), event });
        let collection = CollectionId(y);
        match self.which {
            0 => Message::Open(Open { flags: OpenFlags(x), name: &self.key, details: value }),
            1 => Message::AddStream(StreamFlags(x)),
            2 => Message::CloseStream,
            3 => Message::StreamRequest(StreamRequest {
                flags: StreamFlags(x),
                start: seqno,
                end: Seqno(self.b),
                uuid: VbUuid(self.c),
                snap_start: Seqno(self.d),
                snap_end: seqno,
                filter: value,
            }),
            4 => Message::GetFailoverLog,
            5 => Message::StreamEnd(EndReason::ALL[usize::from(bits)]),
            6 => Message::SnapshotMarker(marker(MarkerDetail::V1)),
            7 => Message::SnapshotMarker(marker(MarkerDetail::V2 { max_visible, high_completed })),
            8 => Message::SnapshotMarker(marker(MarkerDetail::V2_2 {
                max_visible,
                high_completed,
                purge: seqno,
                high_prepared: Seqno(self.b),
            })),
            9 => Message::Mutation(Mutation { seqno, rev, flags: x, expiry: y, cas, datatype, key, value }),
            10 => Message::Deletion(deletion(self.option)),
            11 => Message::Expiration(deletion(Some(x))),
            12 => Message::SetVbucketState { state: VbState::Replica, details: value },
            13 => Message::Noop,
            14 => Message::BufferAck(x),
            15 => Message::Control { name: &self.key, value },
            16 => event(Event::CollectionCreated { name: &self.key, collection, max_ttl_s: self.option }),
            17 => event(Event::CollectionDropped { collection }),
            18 => event(Event::ScopeCreated { name: &self.key }),
            19 => event(Event::ScopeDropped),
            20 => Message::Prepare(Prepare {
                seqno,
                rev,
                flags: x,
                expiry: y,
                deleted: self.option.is_some(),
                level: Level::from_wire(1 + bits % 3).expect("a level"),
                cas,
                datatype,
                key,
                value,
            }),
            21 => Message::Commit(completion),
            _ => Message::Abort(completion),
        }
    }
}

proptest! {
    #[test]
    fn whatever_is_said_is_understood(store in stores(), vb: u16, opaque: u32, stream_id: Option<u16>) {
        let packet = Packet { vb: VbId(vb), opaque, stream_id, message: store.message() };
        let mut written = Vec::new();
        packet.encode(&mut written);
        prop_assert_eq!(packet.frame_len(), written.len());
        prop_assert_eq!(Packet::parse(&read(&written), EVERYTHING), Ok(packet));
    }
}
