//! Goal: every opcode takes the frames its row describes and refuses all others with the right status. Method: build
//! a legal frame for every row and every length of extras, then spoil one part at a time.

use wire::client::RequestFrame;
use wire::opcode::{CasRule, Presence};
use wire::{Command, Feature, FeatureSet, FrameReader, Next, Opcode, ParseError, Side, Status};

const PLAIN: FeatureSet = FeatureSet::EMPTY;
const EVERYTHING: FeatureSet = FeatureSet::of(Feature::ALL);

/// A frame whose parts can be spoiled.
#[derive(Clone, Debug)]
struct Parts {
    opcode: u8,
    vbucket: u16,
    cas: u64,
    datatype: u8,
    extras: Vec<u8>,
    key: Vec<u8>,
    value: Vec<u8>,
}

impl Parts {
    fn legal(opcode: Opcode, extras_len: usize, features: FeatureSet) -> Parts {
        let info = opcode.info();
        let collections = features.has(Feature::Collections);
        let key: &[u8] = match info.key {
            Presence::No => b"",
            _ if matches!(opcode, Opcode::GetCollectionId | Opcode::GetScopeId) => b"",
            _ if collections => b"\0key",
            _ => b"key",
        };
        let value: &[u8] = match (opcode, info.value) {
            (_, Presence::No) => b"",
            (Opcode::ObserveSeqno, _) => b"8 bytes!",
            (Opcode::GetErrorMap, _) => &[0, 2],
            (Opcode::Observe, _) if collections => b"\0\0\0\x02\0k",
            (Opcode::Observe, _) => b"\0\0\0\x01k",
            (Opcode::DcpSnapshotMarker, _) if extras_len == 1 => &[0; 36],
            (Opcode::DcpSnapshotMarker, _) => b"",
            (Opcode::DcpSystemEvent, _) => &[0; 16],
            _ => b"values",
        };
        Parts {
            opcode: opcode as u8,
            vbucket: 0,
            cas: u64::from(info.cas == CasRule::Set),
            datatype: 0,
            extras: legal_extras(opcode, extras_len),
            key: key.to_vec(),
            value: value.to_vec(),
        }
    }

    fn parse(&self, features: FeatureSet) -> Result<Opcode, ParseError> {
        self.parse_then(features, |request| request.opcode)
    }

    fn parse_then<T>(&self, features: FeatureSet, then: fn(wire::Request<'_>) -> T) -> Result<T, ParseError> {
        let frame = RequestFrame {
            opcode: self.opcode,
            vbucket: self.vbucket,
            opaque: 0xfeed,
            cas: self.cas,
            datatype: self.datatype,
            framing_extras: &[],
            extras: &self.extras,
            key: &self.key,
            value: &self.value,
        };
        let bytes = frame.to_bytes();
        let Ok(Next::Frame(frame)) = FrameReader::new(Side::Server).next(&bytes) else { panic!("no frame: {self:?}") };
        wire::parse(&frame, features).map(then)
    }

    fn assert_refused(&self, features: FeatureSet, why: &str) {
        let error = self.parse(features).expect_err(why);
        assert_eq!(error.status, Status::Einval, "{why}: {self:?}");
        assert!(!error.context.is_empty());
    }
}

fn legal_extras(opcode: Opcode, len: usize) -> Vec<u8> {
    let mut extras = vec![0; len];
    match opcode.loud() {
        Opcode::SetVbucket | Opcode::DcpSetVbucketState => extras[0] = 1,
        Opcode::DcpPrepare => extras[30] = 1,
        Opcode::SetParam => extras[3] = 3,
        Opcode::SetWithMeta | Opcode::AddWithMeta | Opcode::DelWithMeta => extras[23] = 1,
        _ => {}
    }
    extras
}

/// Every opcode with every legal length of extras, on connections with nothing and with everything negotiated.
fn for_every_legal_frame(mut then: impl FnMut(Opcode, Parts, FeatureSet)) {
    for &opcode in Opcode::ALL {
        for &len in opcode.info().extras {
            for features in [PLAIN, EVERYTHING] {
                let collections = features.has(Feature::Collections);
                let depends_on_collections = match opcode {
                    Opcode::GetRandomKey => (len == 0) == collections,
                    Opcode::GetAllVbSeqnos => len == 8 && !collections,
                    _ => false,
                };
                let parts = Parts::legal(opcode, len.into(), features);
                if depends_on_collections {
                    parts.assert_refused(features, "collections decide");
                } else {
                    then(opcode, parts, features);
                }
            }
        }
    }
}

/// The rows written down a second time, by column instead of by opcode, so that a slip in one of them shows.
#[test]
fn the_columns_of_the_table_are_as_documented() {
    let column = |has: fn(&wire::opcode::Info) -> bool| {
        Opcode::ALL.iter().filter(|o| has(o.info())).map(|&o| o as u8).collect::<Vec<_>>()
    };
    let durable = [&[1, 2, 3, 4, 5, 6, 0x0e, 0x0f][..], &(0xc7..=0xcf).collect::<Vec<_>>(), &[0xd1, 0xd3]].concat();
    assert_eq!(column(|i| i.durability()), durable);
    let preserving: Vec<u8> = durable.iter().copied().filter(|code| ![2, 4].contains(code)).collect();
    assert_eq!(column(|i| i.preserve_expiry()), preserving);
    let subdoc: Vec<u8> = (0xc5..=0xd3).collect();
    let reorderable = [0, 1, 2, 3, 4, 5, 6, 0x0c, 0x0e, 0x0f, 0x1c, 0x1d, 0x48, 0x83, 0x93, 0x94, 0x95, 0xb5];
    assert_eq!(column(|i| i.reorderable()), [&reorderable[..], &subdoc].concat());
    let quiet = [9, 0x0d, 0x11, 0x12, 0x13, 0x14, 0x15, 0x16, 0x17, 0x18, 0x19, 0x1a, 0x1e, 0xa1, 0xa3, 0xa5, 0xa9];
    assert_eq!(column(|i| i.quiet()), quiet);
    let mut keyed = [&durable[..8], &[0, 0x0c, 0x1c, 0x1d], &quiet].concat();
    keyed.retain(|code| ![0x17, 0x18].contains(code));
    keyed.extend([0x57, 0x58, 0x59, 0x60, 0x62, 0x63, 0x83, 0x93, 0x94, 0x95, 0xa0, 0xa2, 0xa4, 0xa8, 0xb8]);
    keyed.extend(subdoc);
    keyed.sort_unstable();
    assert_eq!(column(|i| i.collection_key()), keyed);

    for opcode in Opcode::ALL {
        let extras: &[u8] = match *opcode as u8 {
            0x01 | 0x02 | 0x03 | 0x11 | 0x12 | 0x13 | 0xb7 => &[8],
            0x05 | 0x06 | 0x15 | 0x16 => &[20],
            0x1b | 0x1c | 0x1d | 0x1e | 0x82 => &[4],
            0x08 | 0x18 | 0x94 | 0xb8 => &[0, 4],
            0xa0 | 0xa1 | 0xd0 => &[0, 1],
            0xa2..=0xa5 | 0xa8 | 0xa9 => &[24, 26, 28, 30],
            0xc5 | 0xc6 | 0xd2 => &[3, 4],
            0xc7..=0xcf | 0xd3 => &[3, 4, 7, 8, 11, 12],
            0xd1 => &[0, 1, 4, 5, 8, 9],
            0x3d | 0x5b => &[1],
            0x50 | 0x61 | 0x64 => &[8],
            0x51 | 0x55 | 0x5d => &[4],
            0x53 => &[48],
            0x56 => &[1, 20],
            0x57 | 0x60 => &[31],
            0x58 => &[18, 21],
            0x59 => &[20],
            0x5f => &[13],
            0x62 | 0x63 => &[16],
            0x48 => &[0, 4, 8],
            0xb3 => &[24],
            0xb5 => &[0, 16],
            0xb6 => &[0, 4, 5],
            _ => &[0],
        };
        assert_eq!(opcode.info().extras, extras, "{}", opcode.name());
    }
}

#[test]
fn every_opcode_takes_the_frames_of_its_row() {
    let mut seen = 0;
    for_every_legal_frame(|opcode, parts, features| {
        assert_eq!(parts.parse(features), Ok(opcode), "{parts:?}");
        seen += 1;
    });
    assert!(seen > 2 * Opcode::ALL.len());
}

#[test]
fn every_opcode_refuses_extras_of_other_lengths() {
    for_every_legal_frame(|opcode, parts, features| {
        for len in (0..64u8).filter(|len| !opcode.info().extras.contains(len)) {
            Parts { extras: vec![0; len.into()], ..parts.clone() }.assert_refused(features, "extras");
        }
    });
}

#[test]
fn every_opcode_refuses_keys_and_values_that_are_missing_or_too_many() {
    for_every_legal_frame(|opcode, parts, features| {
        let info = opcode.info();
        match info.key {
            Presence::No => Parts { key: b"k".to_vec(), ..parts.clone() }.assert_refused(features, "key"),
            Presence::Must => Parts { key: vec![], ..parts.clone() }.assert_refused(features, "no key"),
            Presence::May => {}
        }
        match info.value {
            Presence::No => Parts { value: b"v".to_vec(), ..parts.clone() }.assert_refused(features, "value"),
            Presence::Must => Parts { value: vec![], ..parts.clone() }.assert_refused(features, "no value"),
            Presence::May => {}
        }
    });
}

#[test]
fn every_opcode_refuses_a_cas_against_its_rule() {
    for_every_legal_frame(|opcode, parts, features| {
        let other = Parts { cas: u64::from(parts.cas == 0), ..parts };
        match opcode.info().cas {
            CasRule::Any => assert_eq!(other.parse(features), Ok(opcode)),
            CasRule::Zero | CasRule::Set => other.assert_refused(features, "CAS"),
        }
    });
    let ruled = |rule| Opcode::ALL.iter().filter(move |o| o.info().cas == rule).copied().collect::<Vec<_>>();
    assert_eq!(ruled(CasRule::Set), [Opcode::DcpPrepare, Opcode::Unlock]);
    for opcode in [Opcode::Add, Opcode::AddQ, Opcode::Increment, Opcode::DecrementQ, Opcode::Get] {
        assert!(ruled(CasRule::Zero).contains(&opcode));
    }
}

#[test]
fn datatypes_must_be_known_allowed_and_negotiated() {
    for_every_legal_frame(|opcode, parts, features| {
        for datatype in 1..=255u8 {
            let typed = Parts { datatype, ..parts.clone() };
            let allowed = datatype & !opcode.info().datatypes == 0 && datatype & !features.datatypes() == 0;
            match allowed {
                true => assert_eq!(typed.parse(features), Ok(opcode)),
                false => typed.assert_refused(features, "datatype"),
            }
        }
    });
}

#[test]
fn keys_that_carry_a_collection_are_checked_as_such() {
    for_every_legal_frame(|opcode, parts, features| {
        if !opcode.info().collection_key() {
            return;
        }
        let prefix: &[u8] = if features.has(Feature::Collections) { b"\0" } else { b"" };
        let key_of = |len: usize| [prefix, &vec![b'k'; len]].concat();
        assert_eq!(Parts { key: key_of(250), ..parts.clone() }.parse(features), Ok(opcode));
        Parts { key: key_of(251), ..parts.clone() }.assert_refused(features, "long key");
        if features.has(Feature::Collections) {
            for key in [&b"\0"[..], b"\x01k", b"\x07k", b"\x80\x00k", b"\xff", b"\xff\xff\xff\xff\xff\x0fk"] {
                Parts { key: key.to_vec(), ..parts.clone() }.assert_refused(features, "collection prefix");
            }
            assert_eq!(Parts { key: b"\x8d\xe0\xfb\xd7\x0ck".to_vec(), ..parts }.parse(features), Ok(opcode));
        }
    });
}

#[test]
fn opcodes_without_a_row_are_unknown_or_not_supported_whatever_follows() {
    for code in 0..=255u8 {
        let Err(status) = Opcode::from_wire(code) else { continue };
        let parts = Parts { opcode: code, datatype: 0xff, ..Parts::legal(Opcode::Set, 8, PLAIN) };
        assert_eq!(parts.parse(PLAIN).map_err(|e| e.status), Err(status), "{code:#04x}");
    }
    assert_eq!(Opcode::from_wire(0xda), Err(Status::NotSupported));
    assert_eq!(Opcode::from_wire(0xff), Err(Status::UnknownCommand));
}

/// Fields that only one opcode knows about.
#[test]
fn numbers_and_lists_inside_a_frame_are_checked() {
    let refuse = |opcode, spoil: fn(&mut Parts)| {
        let len = opcode_extras_max(opcode);
        let mut parts = Parts::legal(opcode, len, EVERYTHING);
        assert!(parts.parse(EVERYTHING).is_ok(), "{parts:?}");
        spoil(&mut parts);
        parts.assert_refused(EVERYTHING, "spoiled");
    };
    refuse(Opcode::GetErrorMap, |p| p.vbucket = 1);
    refuse(Opcode::GetErrorMap, |p| p.value = vec![0, 0, 2]);
    refuse(Opcode::GetCollectionId, |p| p.vbucket = 1);
    refuse(Opcode::GetScopeId, |p| p.vbucket = 1);
    refuse(Opcode::GetCollectionId, |p| p.key = b"a.b".to_vec());
    refuse(Opcode::SetVbucket, |p| p.extras[0] = 0);
    refuse(Opcode::SetVbucket, |p| p.extras[0] = 5);
    refuse(Opcode::DcpOpen, |p| p.key = vec![b'n'; 201]);
    refuse(Opcode::DcpStreamEnd, |p| p.extras[3] = 9);
    refuse(Opcode::DcpSnapshotMarker, |p| p.value = b"v".to_vec());
    refuse(Opcode::DcpSetVbucketState, |p| p.extras[0] = 5);
    refuse(Opcode::DcpSystemEvent, |p| p.extras[11] = 5);
    refuse(Opcode::DcpSystemEvent, |p| p.extras[12] = 1);
    refuse(Opcode::DcpSystemEvent, |p| p.value.push(0));
    refuse(Opcode::DcpPrepare, |p| p.extras[30] = 4);
    refuse(Opcode::SetParam, |p| p.extras[3] = 7);
    refuse(Opcode::GetAllVbSeqnos, |p| p.extras[3] = 5);
    refuse(Opcode::GetAllVbSeqnos, |p| p.extras[0] = 1);
    refuse(Opcode::GetMeta, |p| p.extras[0] = 3);
    refuse(Opcode::ObserveSeqno, |p| p.value.push(0));
    refuse(Opcode::Observe, |p| p.value.push(0));
    refuse(Opcode::Observe, |p| p.value[3] = 0);
    refuse(Opcode::Hello, |p| p.value.push(0));
    refuse(Opcode::SetWithMeta, |p| p.extras[23] = 0);
    refuse(Opcode::SetWithMeta, |p| p.extras[16..24].fill(0xff));
    refuse(Opcode::SetWithMeta, |p| p.extras[27] = 0x20);
    refuse(Opcode::SetWithMeta, |p| p.extras[27] = 0x04);
    refuse(Opcode::SetWithMeta, |p| p.extras[29] = 7);
}

fn opcode_extras_max(opcode: Opcode) -> usize {
    opcode.info().extras.iter().copied().max().unwrap_or(0).into()
}

#[test]
fn trailing_metadata_is_cut_off_the_value_of_a_document_with_meta() {
    let mut parts = Parts::legal(Opcode::SetWithMeta, 30, PLAIN);
    parts.extras[29] = 2;
    let value_of = |request: wire::Request<'_>| match request.command {
        Command::WithMeta(meta) => meta.value.to_vec(),
        other => panic!("{other:?}"),
    };
    assert_eq!(parts.parse_then(PLAIN, value_of), Ok(b"valu".to_vec()));
    // Of 26 bytes of extras the last two are the length; of 28 the last four are options.
    let mut parts = Parts::legal(Opcode::SetWithMeta, 26, PLAIN);
    parts.extras[25] = 6;
    assert_eq!(parts.parse_then(PLAIN, value_of), Ok(vec![]));
}

#[test]
fn a_cas_to_regenerate_may_be_anything() {
    let mut parts = Parts::legal(Opcode::DelWithMeta, 28, PLAIN);
    parts.extras[23] = 0;
    parts.extras[27] = 0x0c;
    assert_eq!(parts.parse(PLAIN), Ok(Opcode::DelWithMeta));
}

#[test]
fn a_counter_with_the_highest_expiry_creates_nothing() {
    let mut parts = Parts::legal(Opcode::Increment, 20, PLAIN);
    let initial_of = |request: wire::Request<'_>| match request.command {
        Command::Arithmetic(arithmetic) => arithmetic.initial,
        other => panic!("{other:?}"),
    };
    parts.extras[15] = 9;
    assert_eq!(parts.parse_then(PLAIN, initial_of), Ok(Some(9)));
    parts.extras[16..].fill(0xff);
    assert_eq!(parts.parse_then(PLAIN, initial_of), Ok(None));
}

/// The optional fields of sub-document extras are told apart by the length alone.
#[test]
fn subdoc_extras_are_read_by_their_length() {
    type Fields = (u8, Option<u32>, Option<u32>);
    let fields = |request: wire::Request<'_>| -> Fields {
        match request.command {
            Command::SubdocSingle(s) => (s.doc_flags, s.expiry, s.user_flags),
            Command::SubdocMutation(m) => (m.doc_flags, m.expiry, m.user_flags),
            Command::SubdocLookup(l) => (l.doc_flags, None, None),
            other => panic!("{other:?}"),
        }
    };
    let (expiry, flags) = ([0, 0, 0, 5], [0, 0, 0, 6]);
    let optional: [(&[&[u8]], Fields); 6] = [
        (&[], (0, None, None)),
        (&[&[4]], (4, None, None)),
        (&[&expiry], (0, Some(5), None)),
        (&[&expiry, &[4]], (4, Some(5), None)),
        (&[&expiry, &flags], (0, Some(5), Some(6))),
        (&[&expiry, &flags, &[4]], (4, Some(5), Some(6))),
    ];
    for (parts, expected) in optional {
        let tail = parts.concat();
        let single =
            Parts { extras: [&[0, 3, 1][..], &tail].concat(), ..Parts::legal(Opcode::SubdocDictUpsert, 3, PLAIN) };
        assert_eq!(single.parse_then(PLAIN, fields), Ok(expected));
        let multi = Parts { extras: tail.clone(), ..Parts::legal(Opcode::SubdocMultiMutation, 0, PLAIN) };
        assert_eq!(multi.parse_then(PLAIN, fields), Ok(expected));
        if tail.len() < 2 {
            let lookup = Parts { extras: tail, ..Parts::legal(Opcode::SubdocMultiLookup, 0, PLAIN) };
            assert_eq!(lookup.parse_then(PLAIN, fields), Ok(expected));
        }
    }
}

/// The first failing check decides: opcode, layout, framing extras, key.
#[test]
fn checks_come_in_the_order_of_the_protocol() {
    let status = |framing: &[u8], extras: &[u8], key: &[u8]| {
        let frame = RequestFrame { framing_extras: framing, extras, key, ..RequestFrame::new(Opcode::Set) };
        let bytes = frame.to_bytes();
        let Ok(Next::Frame(frame)) = FrameReader::new(Side::Server).next(&bytes) else { panic!("no frame") };
        wire::parse(&frame, EVERYTHING).map(|r| r.opcode).map_err(|e| e.status)
    };
    let unknown_frame = [0x90];
    assert_eq!(status(&unknown_frame, &[], b"\0k"), Err(Status::Einval));
    assert_eq!(status(&unknown_frame, &[0; 8], b"\x01k"), Err(Status::UnknownFrameInfo));
    assert_eq!(status(&[], &[0; 8], b"\x01k"), Err(Status::Einval));
    assert_eq!(status(&[], &[0; 8], b"\0k"), Ok(Opcode::Set));
}
