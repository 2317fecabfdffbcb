use types::Datatype;

use crate::frame::{Frame, FrameReader, HEADER_LEN, Next, Side};
use crate::frame_info;
use crate::hello::{Feature, FeatureSet, negotiate};
use crate::kv::{Command, Request};
use crate::parse::parse;
use crate::reply::{ErrorBody, Parts, encode_error};
use crate::status::Status;

/// Reads `data` as a stream, as server and as client, and walks all that can be walked. For fuzzers and property
/// tests.
///
/// # Panics
/// If frames do not come back from their encoding as they went in, or on any other mistake of this crate.
pub fn fuzz_frames(data: &[u8]) {
    for side in [Side::Server, Side::Client] {
        let mut rest = data;
        loop {
            match FrameReader::new(side).next(rest) {
                Err(_) => break,
                Ok(Next::Need(total)) => {
                    assert!(total > rest.len(), "more is needed than is there");
                    break;
                }
                Ok(Next::Malformed(header)) => rest = &rest[header.frame_len()..],
                Ok(Next::Frame(frame)) => {
                    check_frame(&frame, &rest[..frame.frame_len()]);
                    rest = &rest[frame.frame_len()..];
                }
            }
        }
    }
}

fn check_frame(frame: &Frame<'_>, bytes: &[u8]) {
    assert_eq!(reencode(frame), bytes, "a frame comes back as it went in");
    frame_info::server_duration(frame.framing_extras);
    for features in [FeatureSet::EMPTY, FeatureSet::of(&[Feature::Collections]), FeatureSet::of(Feature::ALL)] {
        match parse(frame, features) {
            Ok(request) => walk(&request),
            Err(error) => {
                assert!(error.status != Status::Success);
                let mut reply = Vec::new();
                let to = (frame.header.opcode, frame.header.opaque);
                let body = ErrorBody { context: &error.context, manifest_uid: None };
                encode_error(&mut reply, to, error.status, body, features, None);
                let read = FrameReader::new(Side::Client).next(&reply);
                assert!(
                    matches!(read, Ok(Next::Frame(f)) if f.frame_len() == reply.len() && reply.len() >= HEADER_LEN)
                );
            }
        }
    }
}

fn reencode(frame: &Frame<'_>) -> Vec<u8> {
    let header = &frame.header;
    let parts = Parts {
        magic: header.magic,
        opcode: header.opcode,
        datatype: Datatype(header.datatype),
        vbucket_or_status: header.vbucket_or_status,
        opaque: header.opaque,
        cas: header.cas,
        framing: frame.framing_extras,
        extras: frame.extras,
        key: frame.key,
        value: (frame.value, &[]),
    };
    let mut out = Vec::new();
    parts.encode(&mut out);
    out
}

fn walk(request: &Request<'_>) {
    let _ = request.frames.impersonate_privileges().count();
    match request.command {
        Command::Get(get) => assert!(get.key.resolve().as_key().as_bytes().ends_with(get.key.wire())),
        Command::Observe(keys) => keys.for_each(|(_, key)| assert!(!key.resolve().as_key().logical().is_empty())),
        Command::Hello(hello) => drop(negotiate(hello.features, FeatureSet::of(Feature::ALL))),
        _ => {}
    }
}
