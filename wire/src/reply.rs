//! Replies and pushes as bytes, appended to a connection's output buffer.

use types::{Cas, Datatype};

use crate::frame::{Header, Magic};
use crate::frame_info::server_duration_frame;
use crate::hello::{Feature, FeatureSet};
use crate::kv::ConfigVersion;
use crate::opcode::ServerOpcode;
use crate::status::Status;

/// A reply. Unless the status keeps its payload ([`Status::keeps_payload`]), CAS, extras and key are left out, whatever
/// they hold.
#[derive(Clone, Copy, Debug)]
pub struct Reply<'a> {
    /// The request's, known or not.
    pub opcode: u8,
    pub status: Status,
    /// The request's.
    pub opaque: u32,
    pub cas: Cas,
    pub datatype: Datatype,
    pub extras: &'a [u8],
    pub key: &'a [u8],
    /// In two parts, so that what is made up on the spot and what is stored need not be joined first.
    pub value: (&'a [u8], &'a [u8]),
    /// The duration code, for connections that negotiated Tracing and for no other.
    pub server_duration: Option<u16>,
}

impl<'a> Reply<'a> {
    /// A reply without a body.
    pub const fn new(opcode: u8, status: Status, opaque: u32) -> Reply<'a> {
        Reply {
            opcode,
            status,
            opaque,
            cas: Cas(0),
            datatype: Datatype::RAW,
            extras: &[],
            key: &[],
            value: (&[], &[]),
            server_duration: None,
        }
    }

    /// Appends the frame.
    ///
    /// # Panics
    /// If a part does not fit its length field: extras over 255 bytes, a key over 64 KiB, the whole over 4 GiB.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let keeps = self.status.keeps_payload();
        let (cas, extras, key) = if keeps { (self.cas, self.extras, self.key) } else { (Cas(0), &[][..], &[][..]) };
        // The alternative form has no room for a longer key, and the duration may be left out.
        let duration = self.server_duration.filter(|_| key.len() <= 255).map(server_duration_frame);
        let framing: &[u8] = duration.as_ref().map_or(&[], |frame| frame);
        let parts = Parts {
            magic: if framing.is_empty() { Magic::Response } else { Magic::AltResponse },
            opcode: self.opcode,
            datatype: self.datatype,
            vbucket_or_status: self.status as u16,
            opaque: self.opaque,
            cas: cas.0,
            framing,
            extras,
            key,
            value: self.value,
        };
        parts.encode(out);
    }
}

/// What an error tells beyond its status.
#[derive(Clone, Copy, Debug, Default)]
pub struct ErrorBody<'a> {
    /// A sentence for people; empty: none.
    pub context: &'a str,
    /// Of the collections manifest that an unknown collection or scope was looked up in.
    pub manifest_uid: Option<u64>,
}

/// Appends an error reply. Connections without XERROR get no body, those without JSON get the body as raw bytes.
/// The status is sent as it is: translate it first ([`Status::without_xerror`]).
pub fn encode_error(
    out: &mut Vec<u8>,
    (opcode, opaque): (u8, u32),
    status: Status,
    body: ErrorBody<'_>,
    features: FeatureSet,
    server_duration: Option<u16>,
) {
    let json = if features.has(Feature::Xerror) { error_json(body) } else { String::new() };
    let datatype = if !json.is_empty() && features.has(Feature::Json) { Datatype::JSON } else { Datatype::RAW };
    let value = (json.as_bytes(), &[][..]);
    Reply { datatype, value, server_duration, ..Reply::new(opcode, status, opaque) }.encode(out);
}

/// The body of an error reply; empty if there is nothing to tell.
pub fn error_json(body: ErrorBody<'_>) -> String {
    let mut json = String::new();
    if !body.context.is_empty() {
        json.push_str("{\"error\":{\"context\":");
        push_json_string(&mut json, body.context);
        json.push('}');
    }
    if let Some(uid) = body.manifest_uid {
        json.push(if json.is_empty() { '{' } else { ',' });
        json.push_str(&format!("\"manifest_uid\":\"{uid:x}\""));
    }
    if !json.is_empty() {
        json.push('}');
    }
    json
}

fn push_json_string(json: &mut String, text: &str) {
    json.push('"');
    for c in text.chars() {
        match c {
            '"' => json.push_str("\\\""),
            '\\' => json.push_str("\\\\"),
            '\n' => json.push_str("\\n"),
            c if c < ' ' => json.push_str(&format!("\\u{:04x}", u32::from(c))),
            c => json.push(c),
        }
    }
    json.push('"');
}

/// A request from the server to its client. Only for connections that negotiated Duplex.
#[derive(Clone, Copy, Debug)]
pub struct Push<'a> {
    pub opcode: ServerOpcode,
    pub opaque: u32,
    pub datatype: Datatype,
    pub extras: &'a [u8],
    pub key: &'a [u8],
    pub value: &'a [u8],
}

impl Push<'_> {
    /// Appends the frame.
    ///
    /// # Panics
    /// As [`Reply::encode`].
    pub fn encode(&self, out: &mut Vec<u8>) {
        let parts = Parts {
            magic: Magic::ServerRequest,
            opcode: self.opcode as u8,
            datatype: self.datatype,
            vbucket_or_status: 0,
            opaque: self.opaque,
            cas: 0,
            framing: &[],
            extras: self.extras,
            key: self.key,
            value: (self.value, &[]),
        };
        parts.encode(out);
    }
}

/// Appends the news that a bucket (empty: the cluster) has another configuration. `config` is empty for connections
/// that want the version only.
pub fn encode_clustermap_change(
    out: &mut Vec<u8>,
    opaque: u32,
    version: ConfigVersion,
    bucket: &[u8],
    config: &[u8],
    datatype: Datatype,
) {
    let mut extras = [0; 16];
    extras[..8].copy_from_slice(&version.epoch.to_be_bytes());
    extras[8..].copy_from_slice(&version.rev.to_be_bytes());
    let opcode = ServerOpcode::ClustermapChangeNotification;
    Push { opcode, opaque, datatype, extras: &extras, key: bucket, value: config }.encode(out);
}

/// The extras of a successful mutation on a connection that negotiated MutationSeqno.
pub fn mutation_token(vb_uuid: types::VbUuid, seqno: types::Seqno) -> [u8; 16] {
    let mut token = [0; 16];
    token[..8].copy_from_slice(&vb_uuid.0.to_be_bytes());
    token[8..].copy_from_slice(&seqno.0.to_be_bytes());
    token
}

/// A frame of any kind, in parts.
#[derive(Clone, Copy)]
pub(crate) struct Parts<'a> {
    pub magic: Magic,
    pub opcode: u8,
    pub datatype: Datatype,
    pub vbucket_or_status: u16,
    pub opaque: u32,
    pub cas: u64,
    pub framing: &'a [u8],
    pub extras: &'a [u8],
    pub key: &'a [u8],
    pub value: (&'a [u8], &'a [u8]),
}

impl Parts<'_> {
    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        let parts = [self.framing, self.extras, self.key, self.value.0, self.value.1];
        let body_len: usize = parts.iter().map(|part| part.len()).sum();
        let header = Header {
            magic: self.magic,
            opcode: self.opcode,
            framing_len: u8::try_from(self.framing.len()).expect("framing extras of up to 255 bytes"),
            key_len: u16::try_from(self.key.len()).expect("a key of up to 64 KiB"),
            extras_len: u8::try_from(self.extras.len()).expect("extras of up to 255 bytes"),
            datatype: self.datatype.0,
            vbucket_or_status: self.vbucket_or_status,
            body_len: u32::try_from(body_len).expect("a body of up to 4 GiB"),
            opaque: self.opaque,
            cas: self.cas,
        };
        out.reserve(header.frame_len());
        out.extend_from_slice(&header.encode());
        for part in parts {
            out.extend_from_slice(part);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::{Frame, FrameReader, Next, Side};

    fn read(bytes: &[u8]) -> Frame<'_> {
        match FrameReader::new(Side::Client).next(bytes) {
            Ok(Next::Frame(frame)) if frame.frame_len() == bytes.len() => frame,
            other => panic!("not one whole frame: {other:?}"),
        }
    }

    #[test]
    fn errors_carry_neither_cas_nor_extras_nor_key() {
        for &status in Status::ALL {
            let full = Reply { cas: Cas(7), extras: b"extr", key: b"k", ..Reply::new(0, status, 1) };
            let mut out = Vec::new();
            full.encode(&mut out);
            let frame = read(&out);
            let kept = (frame.header.cas, frame.extras, frame.key) == (7, b"extr", b"k");
            let empty = (frame.header.cas, frame.extras.len(), frame.key.len()) == (0, 0, 0);
            assert!(if status.keeps_payload() { kept } else { empty }, "{}", status.name());
        }
    }

    #[test]
    fn the_alternative_form_is_used_for_durations_only() {
        let mut out = Vec::new();
        Reply::new(0x0a, Status::Success, 9).encode(&mut out);
        assert_eq!((out[0], out.len()), (0x81, 24));
        out.clear();
        let long = [b'k'; 256];
        let reply = Reply { server_duration: Some(3), ..Reply::new(0x0a, Status::Einval, 9) };
        reply.encode(&mut out);
        assert_eq!((out[0], read(&out).framing_extras), (0x18, &[0x02, 0, 3][..]));
        out.clear();
        Reply { key: &long, status: Status::Success, ..reply }.encode(&mut out);
        assert_eq!((out[0], read(&out).key), (0x81, &long[..]));
    }

    #[test]
    fn a_value_in_two_parts_is_one_value() {
        let mut out = vec![0xee];
        Reply { value: (b"xattrs", b"body"), ..Reply::new(0, Status::Success, 0) }.encode(&mut out);
        assert_eq!(out[0], 0xee);
        assert_eq!(read(&out[1..]).value, b"xattrsbody");
    }

    #[test]
    fn error_bodies_are_json_whatever_the_context_holds() {
        for context in ["", "plain", "a \"quote\", a \\ and\na line", "\u{1}\u{7f}\u{e9}\u{1f600}\t"] {
            for manifest_uid in [None, Some(0x1f)] {
                let json = error_json(ErrorBody { context, manifest_uid });
                if context.is_empty() && manifest_uid.is_none() {
                    assert_eq!(json, "");
                    continue;
                }
                let parsed: serde_json::Value = serde_json::from_str(&json).expect("valid JSON");
                assert_eq!(parsed["error"]["context"].as_str().unwrap_or(""), context);
                assert_eq!(parsed["manifest_uid"].as_str(), manifest_uid.map(|_| "1f"));
            }
        }
    }

    #[test]
    fn error_bodies_follow_what_was_negotiated() {
        let error = |features: &[Feature]| {
            let body = ErrorBody { context: "no such collection", manifest_uid: Some(3) };
            let mut out = Vec::new();
            let features = FeatureSet::of(features);
            encode_error(&mut out, (0x01, 5), Status::UnknownCollection, body, features, None);
            let frame = read(&out);
            (frame.header.datatype, frame.value.to_vec())
        };
        let json = br#"{"error":{"context":"no such collection"},"manifest_uid":"3"}"#;
        assert_eq!(error(&[Feature::Xerror, Feature::Json]), (1, json.to_vec()));
        assert_eq!(error(&[Feature::Xerror]), (0, json.to_vec()));
        assert_eq!(error(&[Feature::Json]), (0, vec![]));
    }

    #[test]
    fn a_clustermap_push_names_version_and_bucket() {
        let mut out = Vec::new();
        let version = ConfigVersion { epoch: 1, rev: 0x0203 };
        encode_clustermap_change(&mut out, 0xabcd, version, b"default", b"{}", Datatype::JSON);
        let frame = read(&out);
        assert_eq!((frame.header.magic, frame.header.opcode), (Magic::ServerRequest, 1));
        assert_eq!(frame.extras, [0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 2, 3]);
        assert_eq!((frame.key, frame.value, frame.header.datatype), (&b"default"[..], &b"{}"[..], 1));
    }
}
