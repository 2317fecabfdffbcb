//! Promises that hold for all bytes.

use proptest::collection::vec;
use proptest::prelude::*;
use wire::client::RequestFrame;
use wire::frame_info::{Objects, decode_duration_us, encode_duration_us, push_object};
use wire::{Close, FrameReader, Next, Opcode, Reply, Side, Status, fuzz_frames};

#[derive(Clone, Debug)]
struct Owned {
    head: (u8, u16, u32, u64, u8),
    framing: Vec<u8>,
    extras: Vec<u8>,
    key: Vec<u8>,
    value: Vec<u8>,
}

impl Owned {
    fn frame(&self) -> RequestFrame<'_> {
        let (opcode, vbucket, opaque, cas, datatype) = self.head;
        RequestFrame {
            opcode,
            vbucket,
            opaque,
            cas,
            datatype,
            framing_extras: &self.framing,
            extras: &self.extras,
            key: &self.key,
            value: &self.value,
        }
    }
}

/// Framing extras that are well-formed more often than chance would have it.
fn framing() -> impl Strategy<Value = Vec<u8>> {
    let objects = vec((0u16..20, vec(any::<u8>(), 0..20)), 0..4).prop_map(|objects| {
        let mut raw = Vec::new();
        objects.iter().for_each(|(id, data)| push_object(&mut raw, *id, data));
        raw
    });
    prop_oneof![Just(vec![]), objects, vec(any::<u8>(), 1..16)]
}

/// Requests whose opcode exists and whose lengths are mostly right, so that parsing gets far.
fn requests() -> impl Strategy<Value = Owned> {
    (0..Opcode::ALL.len(), any::<prop::sample::Index>()).prop_flat_map(|(row, pick)| {
        let info = Opcode::ALL[row].info();
        let extras_len = usize::from(info.extras[pick.index(info.extras.len())]);
        let head = (Just(info.opcode as u8), any::<u16>(), any::<u32>(), 0u64..3, 0u8..8);
        let key = prop_oneof![Just(vec![]), vec(any::<u8>(), 1..20), vec(any::<u8>(), 240..256)];
        (head, framing(), vec(any::<u8>(), extras_len), key, vec(any::<u8>(), 0..40))
            .prop_map(|(head, framing, extras, key, value)| Owned { head, framing, extras, key, value })
    })
}

/// Where each frame started, and its value unless it was malformed.
type Seen = Vec<(usize, Option<Vec<u8>>)>;

/// What a reader makes of a stream that is all there, and how it stopped.
fn walk(reader: FrameReader, stream: &[u8]) -> (Seen, Result<(), Close>) {
    let (mut at, mut seen) = (0, Vec::new());
    loop {
        let len = match reader.next(&stream[at..]) {
            Err(close) => return (seen, Err(close)),
            Ok(Next::Need(_)) => return (seen, Ok(())),
            Ok(Next::Frame(frame)) => {
                seen.push((at, Some(frame.value.to_vec())));
                frame.frame_len()
            }
            Ok(Next::Malformed(header)) => {
                seen.push((at, None));
                header.frame_len()
            }
        };
        at += len;
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_bytes_make_the_reader_or_the_parser_panic(mut data in vec(any::<u8>(), 0..200), small in any::<bool>()) {
        fuzz_frames(&data);
        // Once more with a body short enough to be there.
        if data.len() > 24 {
            data[0] = if small { 0x80 } else { 0x08 };
            let body = (data.len() - 24) as u32;
            data[8..12].copy_from_slice(&body.to_be_bytes());
            fuzz_frames(&data);
        }
    }

    #[test]
    fn a_request_comes_back_as_it_was_sent(owned in requests()) {
        let sent = owned.frame();
        let bytes = sent.to_bytes();
        fuzz_frames(&bytes);
        let Ok(Next::Frame(got)) = FrameReader::new(Side::Server).next(&bytes) else { panic!("no frame") };
        let back = RequestFrame {
            opcode: got.header.opcode,
            vbucket: got.header.vbucket_or_status,
            opaque: got.header.opaque,
            cas: got.header.cas,
            datatype: got.header.datatype,
            framing_extras: got.framing_extras,
            extras: got.extras,
            key: got.key,
            value: got.value,
        };
        prop_assert_eq!(back, sent);
    }

    #[test]
    fn a_reply_comes_back_as_it_was_sent(
        status in 0..Status::ALL.len(),
        (opaque, cas, duration) in (any::<u32>(), any::<u64>(), any::<Option<u16>>()),
        extras in vec(any::<u8>(), 0..30),
        key in vec(any::<u8>(), 0..300),
        value in vec(any::<u8>(), 0..60),
        cut in any::<prop::sample::Index>(),
    ) {
        let status = Status::ALL[status];
        let reply = Reply {
            cas: types::Cas(cas),
            extras: &extras,
            key: &key,
            value: value.split_at(cut.index(value.len() + 1)),
            server_duration: duration,
            ..Reply::new(0, status, opaque)
        };
        let mut bytes = Vec::new();
        reply.encode(&mut bytes);
        let Ok(Next::Frame(got)) = FrameReader::new(Side::Client).next(&bytes) else { panic!("no frame") };
        prop_assert_eq!(wire::client::status(&got), Ok(status));
        prop_assert_eq!((got.header.opaque, got.value), (opaque, &value[..]));
        let kept = (got.header.cas, got.extras, got.key);
        prop_assert_eq!(kept, if status.keeps_payload() { (cas, &extras[..], &key[..]) } else { (0, &[][..], &[][..]) });
        let told = duration.filter(|_| got.key.len() <= 255);
        prop_assert_eq!(wire::frame_info::server_duration(got.framing_extras), told);
    }

    #[test]
    fn bytes_that_trickle_in_make_the_same_frames(requests in vec(requests(), 0..4), tail in vec(any::<u8>(), 0..30)) {
        let mut stream = Vec::new();
        requests.iter().for_each(|request| request.frame().encode(&mut stream));
        stream.extend_from_slice(&tail);
        let reader = FrameReader::new(Side::Server);
        let whole = walk(reader, &stream);
        prop_assert!(whole.0.len() >= requests.len());

        let (mut start, mut end, mut seen) = (0, 0, Vec::new());
        let stopped = loop {
            match reader.next(&stream[start..end]) {
                Err(close) => break Err(close),
                Ok(Next::Need(total)) => {
                    prop_assert!(total > end - start);
                    if end == stream.len() {
                        break Ok(());
                    }
                    end += 1;
                }
                Ok(Next::Frame(frame)) => {
                    seen.push((start, Some(frame.value.to_vec())));
                    start += frame.frame_len();
                }
                Ok(Next::Malformed(header)) => {
                    seen.push((start, None));
                    start += header.frame_len();
                }
            }
        };
        prop_assert_eq!((seen, stopped), whole);
    }

    #[test]
    fn framing_objects_come_back_as_they_were_written(
        objects in vec((0u16..=270, prop_oneof![vec(any::<u8>(), 0..20), vec(any::<u8>(), 250..=270)]), 0..5),
    ) {
        let mut raw = Vec::new();
        objects.iter().for_each(|(id, data)| push_object(&mut raw, *id, data));
        let back: Vec<_> = Objects(&raw).map(|o| o.map(|o| (o.id, o.data.to_vec()))).collect();
        prop_assert_eq!(back, objects.into_iter().map(Ok).collect::<Vec<_>>());
    }

    #[test]
    fn duration_codes_grow_with_the_duration_and_lose_little(us in 0u64..120_000_000) {
        let code = encode_duration_us(us);
        prop_assert!(encode_duration_us(us + 1) >= code);
        prop_assert!(decode_duration_us(code) <= us + 1);
        prop_assert!(decode_duration_us(code.saturating_add(1)) >= us.saturating_sub(1));
    }
}
