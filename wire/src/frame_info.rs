//! Framing extras: small typed objects in front of the body. Requests say how durable they must be and the like,
//! responses say how long the server took.

use types::Level;

use crate::opcode::Opcode;
use crate::parse::ParseError;
use crate::status::Status;

/// How durable a write must be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Durability {
    pub level: Level,
    /// 1..=65534; `None`: the server's default. Do not believe it to be shorter than the client's own patience.
    pub timeout_ms: Option<u16>,
}

/// What a request's framing extras say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RequestFrames<'a> {
    /// Starts after all earlier requests of the connection; later ones wait for it.
    pub barrier: bool,
    pub durability: Option<Durability>,
    pub preserve_expiry: bool,
    /// Run as this user; a leading `^` marks one of the external domain.
    pub impersonate: Option<&'a [u8]>,
    /// Run as the user of this token.
    pub impersonate_token: Option<u16>,
    /// Which of several streams of one vBucket is meant.
    pub stream_id: Option<u16>,
    raw: &'a [u8],
}

impl<'a> RequestFrames<'a> {
    /// Privileges asked for in addition to the impersonated user's own.
    pub fn impersonate_privileges(&self) -> impl Iterator<Item = &'a [u8]> {
        Objects(self.raw).map_while(Result::ok).filter(|o| o.id == IMPERSONATE_PRIVILEGE).map(|o| o.data)
    }

    pub fn impersonates(&self) -> bool {
        self.impersonate.is_some() || self.impersonate_token.is_some() || self.impersonate_privileges().next().is_some()
    }
}

const BARRIER: u16 = 0;
const DURABILITY: u16 = 1;
const DCP_STREAM_ID: u16 = 2;
const IMPERSONATE: u16 = 4;
const PRESERVE_EXPIRY: u16 = 5;
const IMPERSONATE_PRIVILEGE: u16 = 6;
const IMPERSONATE_TOKEN: u16 = 7;

/// Response object: server receive-to-send duration.
const SERVER_DURATION: u16 = 0;

/// One object of the framing extras.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Object<'a> {
    pub id: u16,
    pub data: &'a [u8],
}

/// The bytes end inside an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Truncated;

/// Walks the objects. Ends after the first error.
#[derive(Clone, Copy, Debug)]
pub struct Objects<'a>(pub &'a [u8]);

impl<'a> Iterator for Objects<'a> {
    type Item = Result<Object<'a>, Truncated>;

    fn next(&mut self) -> Option<Self::Item> {
        let (&head, mut rest) = self.0.split_first()?;
        self.0 = &[];
        let mut escape = |nibble: u8| match nibble {
            15 => {
                let (&more, tail) = rest.split_first()?;
                rest = tail;
                Some(15 + u16::from(more))
            }
            n => Some(u16::from(n)),
        };
        let (Some(id), Some(len)) = (escape(head >> 4), escape(head & 0x0f)) else { return Some(Err(Truncated)) };
        let Some((data, tail)) = rest.split_at_checked(usize::from(len)) else { return Some(Err(Truncated)) };
        self.0 = tail;
        Some(Ok(Object { id, data }))
    }
}

/// Reads the framing extras of a request and checks them against its opcode.
///
/// # Errors
/// The status to answer with. Whether the connection negotiated a frame is not looked at: widely used clients send
/// them unannounced.
pub fn parse_request<'a>(raw: &'a [u8], opcode: Opcode) -> Result<RequestFrames<'a>, ParseError> {
    let einval = |context: &'static str| ParseError::new(Status::Einval, context);
    let mut frames = RequestFrames { raw, ..RequestFrames::default() };
    for object in Objects(raw) {
        let Object { id, data } = object.map_err(|Truncated| einval("the framing extras end inside an object"))?;
        let twice = match id {
            BARRIER if data.is_empty() => std::mem::replace(&mut frames.barrier, true),
            BARRIER => return Err(einval("the barrier frame carries no data")),
            // A widely used client adds these anew each time it sends a request that was turned away by another node.
            DURABILITY => {
                frames.durability = Some(durability(data)?);
                false
            }
            PRESERVE_EXPIRY if data.is_empty() => {
                frames.preserve_expiry = true;
                false
            }
            PRESERVE_EXPIRY => return Err(einval("the preserve-expiry frame carries no data")),
            IMPERSONATE if data.is_empty() => return Err(einval("the impersonate frame needs a user name")),
            IMPERSONATE => frames.impersonate.replace(data).is_some(),
            IMPERSONATE_PRIVILEGE if data.is_empty() => return Err(einval("the privilege frame needs a name")),
            IMPERSONATE_PRIVILEGE => false,
            IMPERSONATE_TOKEN => match data {
                &[high, low] => frames.impersonate_token.replace(u16::from_be_bytes([high, low])).is_some(),
                _ => return Err(einval("the impersonation token id takes 2 bytes")),
            },
            DCP_STREAM_ID if !opcode.is_dcp() => return Err(einval("only DCP requests carry a stream id")),
            DCP_STREAM_ID => match data {
                &[high, low] => frames.stream_id.replace(u16::from_be_bytes([high, low])).is_some(),
                _ => return Err(einval("a DCP stream id takes 2 bytes")),
            },
            _ => return Err(ParseError::new(Status::UnknownFrameInfo, "the request carries an unknown frame info")),
        };
        if twice {
            return Err(einval("a frame info is there twice"));
        }
    }
    if frames.durability.is_some() && !opcode.info().durability() {
        // These two are writes that could be durable; they just cannot be made so.
        return Err(match opcode {
            Opcode::Touch | Opcode::GetAndTouch => {
                ParseError::new(Status::NotSupported, "this command cannot be made durable")
            }
            _ => einval("this command takes no durability requirement"),
        });
    }
    if frames.preserve_expiry && !opcode.info().preserve_expiry() {
        return Err(ParseError::new(Status::NotSupported, "this command cannot preserve the expiry time"));
    }
    Ok(frames)
}

fn durability(data: &[u8]) -> Result<Durability, ParseError> {
    let (level, timeout_ms) = match *data {
        [level] => (level, None),
        [level, high, low] => (level, Some(u16::from_be_bytes([high, low]))),
        _ => return Err(ParseError::new(Status::Einval, "the durability requirement takes 1 or 3 bytes")),
    };
    let bad = |context| ParseError::new(Status::DurabilityInvalidLevel, context);
    let level = Level::from_wire(level).ok_or_else(|| bad("durability levels are 1, 2 and 3"))?;
    match timeout_ms {
        Some(0) => Err(bad("a durability timeout of 0 ms is reserved")),
        // Reserved too, but a widely used client clamps long timeouts to it.
        Some(u16::MAX) => Ok(Durability { level, timeout_ms: Some(u16::MAX - 1) }),
        timeout_ms => Ok(Durability { level, timeout_ms }),
    }
}

/// Appends one object.
///
/// # Panics
/// If the id or the length is above 270.
pub fn push_object(out: &mut Vec<u8>, id: u16, data: &[u8]) {
    let nibble = |n: usize| match n {
        0..15 => (n as u8, None),
        _ => (15, Some(u8::try_from(n - 15).expect("ids and lengths of frame infos end at 270"))),
    };
    let (id, id_more) = nibble(usize::from(id));
    let (len, len_more) = nibble(data.len());
    out.push(id << 4 | len);
    out.extend(id_more);
    out.extend(len_more);
    out.extend_from_slice(data);
}

/// Appends a durability requirement, for clients.
pub fn push_durability(out: &mut Vec<u8>, level: Level, timeout_ms: Option<u16>) {
    match timeout_ms.map(u16::to_be_bytes) {
        None => push_object(out, DURABILITY, &[level as u8]),
        Some([high, low]) => push_object(out, DURABILITY, &[level as u8, high, low]),
    }
}

/// Appends the wish that an overwritten document keeps its expiry time, for clients.
pub fn push_preserve_expiry(out: &mut Vec<u8>) {
    push_object(out, PRESERVE_EXPIRY, &[]);
}

/// The framing extras of a DCP message of one of several streams.
pub const fn stream_id_frame(id: u16) -> [u8; 3] {
    let [high, low] = id.to_be_bytes();
    [(DCP_STREAM_ID as u8) << 4 | 2, high, low]
}

/// The framing extras of a response that tells its duration.
pub const fn server_duration_frame(code: u16) -> [u8; 3] {
    let [high, low] = code.to_be_bytes();
    [0x02, high, low]
}

/// The duration code a response's framing extras carry, if any.
pub fn server_duration(framing_extras: &[u8]) -> Option<u16> {
    Objects(framing_extras).map_while(Result::ok).find_map(|object| match (object.id, object.data) {
        (SERVER_DURATION, &[high, low]) => Some(u16::from_be_bytes([high, low])),
        _ => None,
    })
}

const DURATION_EXPONENT: f64 = 1.74;

/// Squeezes microseconds into 16 bits, precise for short times and good up to 120 s.
pub fn encode_duration_us(us: u64) -> u16 {
    // The cast saturates, which is the upper bound wanted.
    (us as f64 * 2.0).powf(1.0 / DURATION_EXPONENT) as u16
}

/// Microseconds that a duration code stands for.
pub fn decode_duration_us(code: u16) -> u64 {
    (f64::from(code).powf(DURATION_EXPONENT) / 2.0) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(raw: &[u8], opcode: Opcode) -> Status {
        parse_request(raw, opcode).expect_err("refused").status
    }

    #[test]
    fn durations_have_the_documented_codes() {
        for (us, code) in [
            (1, 1),
            (10, 5),
            (119, 23),
            (1000, 78),
            (10_000, 296),
            (100_000, 1113),
            (1_000_000, 4181),
            (10_000_000, 15_703),
            (u64::MAX, u16::MAX),
            (0, 0),
        ] {
            assert_eq!(encode_duration_us(us), code, "{us} us");
        }
        assert_eq!(decode_duration_us(0x1a), 144);
        assert_eq!(decode_duration_us(u16::MAX) / 100_000, 1201);
    }

    #[test]
    fn durability_is_read_with_and_without_a_timeout() {
        let read = |raw| parse_request(raw, Opcode::Set).map(|f| f.durability.expect("there"));
        assert_eq!(read(&[0x13, 1, 0x23, 0x28]), Ok(Durability { level: Level::Majority, timeout_ms: Some(9000) }));
        assert_eq!(read(&[0x11, 3]), Ok(Durability { level: Level::PersistMajority, timeout_ms: None }));
        assert_eq!(read(&[0x13, 2, 0xff, 0xff]).map(|d| d.timeout_ms), Ok(Some(65534)));
    }

    #[test]
    fn a_requirement_that_is_there_twice_counts_once() {
        let twice = parse_request(&[0x11, 1, 0x50, 0x11, 3, 0x50], Opcode::Set).expect("as a client repeats it");
        assert_eq!((twice.durability.map(|d| d.level), twice.preserve_expiry), (Some(Level::PersistMajority), true));
    }

    #[test]
    fn bad_framing_extras_get_their_own_status() {
        assert_eq!(status(&[0x11, 0], Opcode::Set), Status::DurabilityInvalidLevel);
        assert_eq!(status(&[0x11, 4], Opcode::Set), Status::DurabilityInvalidLevel);
        assert_eq!(status(&[0x13, 1, 0, 0], Opcode::Set), Status::DurabilityInvalidLevel);
        assert_eq!(status(&[0x12, 1, 0], Opcode::Set), Status::Einval);
        assert_eq!(status(&[0x13, 1, 0], Opcode::Set), Status::Einval);
        assert_eq!(status(&[0x11, 1], Opcode::Get), Status::Einval);
        assert_eq!(status(&[0x11, 1], Opcode::SetQ), Status::Einval);
        assert_eq!(status(&[0x11, 1], Opcode::Touch), Status::NotSupported);
        assert_eq!(status(&[0x11, 1], Opcode::GetAndTouch), Status::NotSupported);
        assert_eq!(status(&[0x50], Opcode::Get), Status::NotSupported);
        assert_eq!(status(&[0x51, 0], Opcode::Set), Status::Einval);
        assert_eq!(status(&[0x01, 0], Opcode::Get), Status::Einval);
        assert_eq!(status(&[0x22, 0, 1], Opcode::Get), Status::Einval);
        assert_eq!(status(&[0x30], Opcode::Get), Status::UnknownFrameInfo);
        assert_eq!(status(&[0x40], Opcode::Get), Status::Einval);
        assert_eq!(status(&[0x71, 0], Opcode::Get), Status::Einval);
        assert_eq!(status(&[0x00, 0x00], Opcode::Get), Status::Einval);
        assert_eq!(status(&[0xf0], Opcode::Get), Status::Einval);
        assert_eq!(status(&[0xf0, 0], Opcode::Get), Status::UnknownFrameInfo);
    }

    #[test]
    fn objects_come_in_any_order_and_with_escaped_lengths() {
        let mut raw = Vec::new();
        push_object(&mut raw, IMPERSONATE, b"a-user-name-of-over-fifteen-bytes");
        push_object(&mut raw, IMPERSONATE_PRIVILEGE, b"Read");
        push_preserve_expiry(&mut raw);
        push_object(&mut raw, IMPERSONATE_PRIVILEGE, b"MetaWrite");
        push_durability(&mut raw, Level::Majority, None);
        push_object(&mut raw, BARRIER, b"");
        let frames = parse_request(&raw, Opcode::Set).expect("legal");
        assert_eq!(raw[..2], [0x4f, 18]);
        assert_eq!(frames.impersonate, Some(&b"a-user-name-of-over-fifteen-bytes"[..]));
        assert_eq!(frames.impersonate_privileges().collect::<Vec<_>>(), [&b"Read"[..], b"MetaWrite"]);
        assert!(frames.barrier && frames.preserve_expiry && frames.durability.is_some() && frames.impersonates());
    }

    #[test]
    fn ids_and_lengths_of_fifteen_and_more_are_escaped_both_ways() {
        for (id, len) in [(14, 14), (15, 14), (14, 15), (15, 15), (16, 200), (270, 270)] {
            let data = vec![7; len];
            let mut raw = Vec::new();
            push_object(&mut raw, id, &data);
            assert_eq!(Objects(&raw).collect::<Vec<_>>(), [Ok(Object { id, data: &data })]);
            assert_eq!(Objects(&raw[..raw.len() - 1]).last(), Some(Err(Truncated)));
        }
    }

    #[test]
    fn a_response_duration_is_found_among_unknown_objects() {
        assert_eq!(server_duration(&[0x12, 0, 1, 0x02, 0, 0x1a]), Some(0x1a));
        assert_eq!(server_duration(&server_duration_frame(0x1234)), Some(0x1234));
        assert_eq!(server_duration(&[]), None);
    }
}
