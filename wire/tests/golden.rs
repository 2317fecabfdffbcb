//! Goal: the bytes of known exchanges never change. Method: hand-written frames are parsed and written again.

use types::{Cas, CollectionId, Datatype, Level, Seqno, VbId, VbUuid};
use wire::client::{self, RequestFrame, hello_value, push_lookup_spec, store_extras};
use wire::frame_info::push_durability;
use wire::hello::negotiate;
use wire::kv::{Get, Store, StoreMode, SubdocLookup};
use wire::reply::mutation_token;
use wire::{Command, Durability, Feature, FeatureSet, Frame, FrameReader, Next, Opcode, Reply, Request, Side, Status};

fn bytes(hex: &str) -> Vec<u8> {
    let digits: Vec<u8> = hex.bytes().filter(|b| !b.is_ascii_whitespace()).collect();
    digits
        .chunks(2)
        .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).expect("ASCII"), 16).expect("hexadecimal"))
        .collect()
}

fn read(side: Side, bytes: &[u8]) -> Frame<'_> {
    match FrameReader::new(side).next(bytes) {
        Ok(Next::Frame(frame)) if frame.frame_len() == bytes.len() => frame,
        other => panic!("not one whole frame: {other:?}"),
    }
}

fn request<'a>(bytes: &'a [u8], features: &[Feature]) -> Request<'a> {
    wire::parse(&read(Side::Server, bytes), FeatureSet::of(features)).expect("a legal request")
}

#[test]
fn a_get_in_the_default_collection() {
    let golden = bytes("80000006 00000210 00000006 11223344 00000000 00000000 00 68656c6c6f");
    let get = request(&golden, &[Feature::Collections]);
    assert_eq!((get.opcode, get.vbucket, get.opaque, get.cas), (Opcode::Get, VbId(528), 0x1122_3344, Cas(0)));
    let Command::Get(Get { key, with_key: false }) = get.command else { panic!("{:?}", get.command) };
    assert_eq!(key.wire(), b"\0hello");
    assert_eq!(key.resolve().as_key().logical(), b"hello");
    let built = RequestFrame { vbucket: 528, opaque: 0x1122_3344, key: b"\0hello", ..RequestFrame::new(Opcode::Get) };
    assert_eq!(built.to_bytes(), golden);
}

#[test]
fn a_durable_set_in_another_collection() {
    let golden =
        bytes("08010402 08010007 00000015 0000002a 00000000 00000000 13012328 02000006 00000000 086b 7b2261223a317d");
    let set = request(&golden, &[Feature::Collections, Feature::Json]);
    assert_eq!((set.vbucket, set.opaque, set.datatype), (VbId(7), 42, Datatype::JSON));
    assert_eq!(set.frames.durability, Some(Durability { level: Level::Majority, timeout_ms: Some(9000) }));
    let Command::Store(Store { mode: StoreMode::Set, key, flags, expiry: 0, value }) = set.command else {
        panic!("{:?}", set.command)
    };
    assert_eq!((flags, value), (0x0200_0006, &br#"{"a":1}"#[..]));
    assert_eq!((key.resolve().as_key().collection(), key.resolve().as_key().logical()), (CollectionId(8), &b"k"[..]));

    let mut framing_extras = Vec::new();
    push_durability(&mut framing_extras, Level::Majority, Some(9000));
    let built = RequestFrame {
        vbucket: 7,
        opaque: 42,
        datatype: 1,
        framing_extras: &framing_extras,
        extras: &store_extras(0x0200_0006, 0),
        key: b"\x08k",
        value: br#"{"a":1}"#,
        ..RequestFrame::new(Opcode::Set)
    };
    assert_eq!(built.to_bytes(), golden);
}

#[test]
fn a_reply_with_duration_and_mutation_token() {
    let golden =
        bytes("18010300 10000000 00000013 0000002a 16f0c1b5 e4a20000 02001a 0000aabbccddeeff 000000000000002a");
    let reply = Reply {
        cas: Cas(0x16f0_c1b5_e4a2_0000),
        extras: &mutation_token(VbUuid(0xaabb_ccdd_eeff), Seqno(42)),
        server_duration: Some(0x1a),
        ..Reply::new(0x01, Status::Success, 42)
    };
    let mut out = Vec::new();
    reply.encode(&mut out);
    assert_eq!(out, golden);

    let frame = read(Side::Client, &golden);
    assert_eq!((client::status(&frame), frame.header.opaque), (Ok(Status::Success), 42));
    assert_eq!((frame.header.cas, frame.extras), (0x16f0_c1b5_e4a2_0000, &golden[27..]));
    assert_eq!(client::server_duration_us(&frame), Some(144));
}

#[test]
fn a_hello_and_its_echo() {
    let golden = bytes("801f0002 00000000 0000000e 00000000 00000000 00000000 7273 0006 0007 0008 000b 0010 0012");
    let hello = request(&golden, &[]);
    let Command::Hello(hello) = hello.command else { panic!("{:?}", hello.command) };
    assert_eq!(hello.agent, b"rs");
    let agreed = negotiate(hello.features, FeatureSet::of(Feature::ALL)).expect("nothing is missing");
    let mut echo = Vec::new();
    agreed.encode(&mut echo);
    assert_eq!(echo, golden[26..]);

    let value = hello_value(&[6, 7, 8, 0xb, 0x10, 0x12]);
    let built = RequestFrame { key: b"rs", value: &value, ..RequestFrame::new(Opcode::Hello) };
    assert_eq!(built.to_bytes(), golden);
}

#[test]
fn a_lookup_of_two_paths() {
    let golden =
        bytes("80d00002 00000007 00000014 00000001 00000000 00000000 006b c5 04 0009 24646f63756d656e74 c6 00 0001 61");
    let lookup = request(&golden, &[Feature::Collections]);
    let Command::SubdocLookup(SubdocLookup { key, doc_flags: 0, specs }) = lookup.command else {
        panic!("{:?}", lookup.command)
    };
    assert_eq!((key.wire(), specs), (&b"\0k"[..], &golden[26..]));

    let mut specs = Vec::new();
    push_lookup_spec(&mut specs, 0xc5, 0x04, b"$document");
    push_lookup_spec(&mut specs, 0xc6, 0, b"a");
    let built = RequestFrame {
        vbucket: 7,
        opaque: 1,
        key: b"\0k",
        value: &specs,
        ..RequestFrame::new(Opcode::SubdocMultiLookup)
    };
    assert_eq!(built.to_bytes(), golden);
}

#[test]
fn the_key_in_an_alternative_frame_is_not_misread_as_sixteen_bits() {
    let mut framing_extras = Vec::new();
    push_durability(&mut framing_extras, Level::PersistMajority, None);
    let key = [b'k'; 250];
    let built = RequestFrame { framing_extras: &framing_extras, key: &key, ..RequestFrame::new(Opcode::Delete) };
    let bytes = built.to_bytes();
    assert_eq!(bytes[2..4], [2, 250]);
    let delete = request(&bytes, &[]);
    let Command::Delete(parsed) = delete.command else { panic!("{:?}", delete.command) };
    assert_eq!(parsed.wire(), key);
}
