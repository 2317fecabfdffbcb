//! The other end of the wire, for tools, tests and benchmarks: requests as bytes and what replies say. Replies are
//! cut from the stream by a [`crate::FrameReader`] of [`crate::Side::Client`].

use types::Datatype;

use crate::frame::{Frame, Magic};
use crate::frame_info::{decode_duration_us, server_duration};
use crate::opcode::Opcode;
use crate::reply::Parts;
use crate::status::Status;

/// A request to send. Fields may hold anything, so that tests can say what no proper client would.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestFrame<'a> {
    pub opcode: u8,
    pub vbucket: u16,
    pub opaque: u32,
    pub cas: u64,
    pub datatype: u8,
    /// See [`crate::frame_info::push_durability`] and its neighbours.
    pub framing_extras: &'a [u8],
    pub extras: &'a [u8],
    pub key: &'a [u8],
    pub value: &'a [u8],
}

impl<'a> RequestFrame<'a> {
    /// A request with nothing but its opcode.
    pub const fn new(opcode: Opcode) -> RequestFrame<'a> {
        RequestFrame {
            opcode: opcode as u8,
            vbucket: 0,
            opaque: 0,
            cas: 0,
            datatype: 0,
            framing_extras: &[],
            extras: &[],
            key: &[],
            value: &[],
        }
    }

    /// Appends the frame, in the alternative form if it has framing extras.
    ///
    /// # Panics
    /// If a part does not fit its length field.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let parts = Parts {
            magic: if self.framing_extras.is_empty() { Magic::Request } else { Magic::AltRequest },
            opcode: self.opcode,
            datatype: Datatype(self.datatype),
            vbucket_or_status: self.vbucket,
            opaque: self.opaque,
            cas: self.cas,
            framing: self.framing_extras,
            extras: self.extras,
            key: self.key,
            value: (self.value, &[]),
        };
        parts.encode(out);
    }

    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = Vec::new();
        self.encode(&mut out);
        out
    }
}

/// The extras of SET, ADD and REPLACE.
pub fn store_extras(flags: u32, expiry: u32) -> [u8; 8] {
    let mut extras = [0; 8];
    extras[..4].copy_from_slice(&flags.to_be_bytes());
    extras[4..].copy_from_slice(&expiry.to_be_bytes());
    extras
}

/// The extras of INCREMENT and DECREMENT. An expiry of `u32::MAX`: a missing document is not created.
pub fn arithmetic_extras(delta: u64, initial: u64, expiry: u32) -> [u8; 20] {
    let mut extras = [0; 20];
    extras[..8].copy_from_slice(&delta.to_be_bytes());
    extras[8..16].copy_from_slice(&initial.to_be_bytes());
    extras[16..].copy_from_slice(&expiry.to_be_bytes());
    extras
}

/// The value of a HELLO.
pub fn hello_value(codes: &[u16]) -> Vec<u8> {
    codes.iter().flat_map(|code| code.to_be_bytes()).collect()
}

/// The status of a response; `Err`: a code nobody knows.
pub fn status(response: &Frame<'_>) -> Result<Status, u16> {
    let code = response.header.vbucket_or_status;
    Status::from_wire(code).ok_or(code)
}

/// How long the server says it took, in microseconds, if the response tells.
pub fn server_duration_us(response: &Frame<'_>) -> Option<u64> {
    server_duration(response.framing_extras).map(decode_duration_us)
}

/// Appends one operation of a multi-path lookup.
///
/// # Panics
/// If the path is longer than its length field can say.
pub fn push_lookup_spec(out: &mut Vec<u8>, opcode: u8, path_flags: u8, path: &[u8]) {
    out.extend_from_slice(&[opcode, path_flags]);
    out.extend_from_slice(&u16::try_from(path.len()).expect("a path of up to 64 KiB").to_be_bytes());
    out.extend_from_slice(path);
}

/// Appends one operation of a multi-path mutation.
///
/// # Panics
/// If the path or the value is longer than its length field can say.
pub fn push_mutation_spec(out: &mut Vec<u8>, opcode: u8, path_flags: u8, path: &[u8], value: &[u8]) {
    out.extend_from_slice(&[opcode, path_flags]);
    out.extend_from_slice(&u16::try_from(path.len()).expect("a path of up to 64 KiB").to_be_bytes());
    out.extend_from_slice(&u32::try_from(value.len()).expect("a value of up to 4 GiB").to_be_bytes());
    out.extend_from_slice(path);
    out.extend_from_slice(value);
}
