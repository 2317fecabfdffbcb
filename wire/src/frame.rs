//! Finding frames in a byte stream. Nothing is copied: a [`Frame`] borrows from the buffer it was found in.

use std::fmt;

/// Bytes of the fixed header.
pub const HEADER_LEN: usize = 24;
/// Longest body accepted, in bytes. A header announcing more closes the connection.
pub const BODY_LEN_MAX: u32 = 30 * 1024 * 1024;

/// The first byte: which way a frame goes and how its lengths are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Magic {
    Request = 0x80,
    AltRequest = 0x08,
    Response = 0x81,
    AltResponse = 0x18,
    ServerRequest = 0x82,
    ServerResponse = 0x83,
}

impl Magic {
    pub const fn from_wire(byte: u8) -> Option<Magic> {
        match byte {
            0x80 => Some(Magic::Request),
            0x08 => Some(Magic::AltRequest),
            0x81 => Some(Magic::Response),
            0x18 => Some(Magic::AltResponse),
            0x82 => Some(Magic::ServerRequest),
            0x83 => Some(Magic::ServerResponse),
            _ => None,
        }
    }

    /// The alternative forms split the key length: framing extras first, then a key length of one byte.
    pub const fn is_alt(self) -> bool {
        matches!(self, Magic::AltRequest | Magic::AltResponse)
    }

    /// Asks for something, rather than answers.
    pub const fn is_request(self) -> bool {
        matches!(self, Magic::Request | Magic::AltRequest | Magic::ServerRequest)
    }
}

/// Who reads: it decides which magics make sense.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Requests, and answers to what the server asked (0x81 to DCP messages, 0x83 to pushes).
    Server,
    /// Responses, pushes, and DCP messages, which are requests.
    Client,
}

impl Side {
    const fn accepts(self, magic: Magic) -> bool {
        match self {
            Side::Server => !matches!(magic, Magic::ServerRequest),
            Side::Client => !matches!(magic, Magic::ServerResponse),
        }
    }
}

/// Why a stream can be read no further. There is no reply to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Close {
    #[error("byte {0:#04x} starts no frame; is this the binary protocol?")]
    BadMagic(u8),
    #[error("a frame announces a body of {body_len} bytes, more than {BODY_LEN_MAX}")]
    TooLarge { body_len: u32 },
}

/// The fixed part of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    pub magic: Magic,
    pub opcode: u8,
    /// 0 in the plain forms.
    pub framing_len: u8,
    pub key_len: u16,
    pub extras_len: u8,
    pub datatype: u8,
    /// The vBucket of a request, the status of a response.
    pub vbucket_or_status: u16,
    pub body_len: u32,
    /// Never interpreted; goes back as it came.
    pub opaque: u32,
    pub cas: u64,
}

impl Header {
    /// Reads a header. `None`: the first byte is no magic.
    pub fn parse(bytes: &[u8; HEADER_LEN]) -> Option<Header> {
        let magic = Magic::from_wire(bytes[0])?;
        let (framing_len, key_len) =
            if magic.is_alt() { (bytes[2], u16::from(bytes[3])) } else { (0, u16_at(bytes, 2)) };
        Some(Header {
            magic,
            opcode: bytes[1],
            framing_len,
            key_len,
            extras_len: bytes[4],
            datatype: bytes[5],
            vbucket_or_status: u16_at(bytes, 6),
            body_len: u32_at(bytes, 8),
            opaque: u32_at(bytes, 12),
            cas: u64_at(bytes, 16),
        })
    }

    /// # Panics
    /// If the lengths do not fit the form: framing extras in a plain frame, or a key over 255 bytes in an alternative one.
    pub fn encode(&self) -> [u8; HEADER_LEN] {
        let mut bytes = [0; HEADER_LEN];
        bytes[0] = self.magic as u8;
        bytes[1] = self.opcode;
        if self.magic.is_alt() {
            bytes[2] = self.framing_len;
            bytes[3] = u8::try_from(self.key_len).expect("an alternative frame has keys of up to 255 bytes");
        } else {
            assert!(self.framing_len == 0, "a plain frame has no framing extras");
            bytes[2..4].copy_from_slice(&self.key_len.to_be_bytes());
        }
        bytes[4] = self.extras_len;
        bytes[5] = self.datatype;
        bytes[6..8].copy_from_slice(&self.vbucket_or_status.to_be_bytes());
        bytes[8..12].copy_from_slice(&self.body_len.to_be_bytes());
        bytes[12..16].copy_from_slice(&self.opaque.to_be_bytes());
        bytes[16..24].copy_from_slice(&self.cas.to_be_bytes());
        bytes
    }

    /// Bytes of the whole frame.
    pub const fn frame_len(&self) -> usize {
        HEADER_LEN + self.body_len as usize
    }

    /// Whether the body is long enough for the parts the header promises.
    const fn adds_up(&self) -> bool {
        self.framing_len as u32 + self.extras_len as u32 + self.key_len as u32 <= self.body_len
    }
}

/// One whole frame, borrowed from the buffer.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Frame<'a> {
    pub header: Header,
    pub framing_extras: &'a [u8],
    pub extras: &'a [u8],
    pub key: &'a [u8],
    pub value: &'a [u8],
}

impl Frame<'_> {
    /// Bytes it took in the buffer.
    pub const fn frame_len(&self) -> usize {
        self.header.frame_len()
    }
}

impl fmt::Debug for Frame<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Frame")
            .field("header", &self.header)
            .field("framing_extras", &self.framing_extras)
            .field("extras", &self.extras)
            .field("key", &self.key.escape_ascii().to_string())
            .field("value_len", &self.value.len())
            .finish()
    }
}

/// What is at the front of the buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next<'a> {
    /// Too little to tell: read on until the buffer holds this many bytes.
    Need(usize),
    /// A frame; the next one starts `frame_len()` bytes further.
    Frame(Frame<'a>),
    /// The body is shorter than the parts it should hold. Its end is known all the same, so the protocol survives:
    /// answer `Einval` if it is a request and go on `frame_len()` bytes further. The body has arrived in full.
    Malformed(Header),
}

/// Cuts a byte stream into frames.
#[derive(Clone, Copy, Debug)]
pub struct FrameReader {
    side: Side,
}

impl FrameReader {
    pub const fn new(side: Side) -> FrameReader {
        FrameReader { side }
    }

    /// Looks at the front of `buffer`, which starts where the last frame ended.
    ///
    /// # Errors
    /// The stream is not this protocol, or asks for too much memory: close without a reply.
    pub fn next<'a>(&self, buffer: &'a [u8]) -> Result<Next<'a>, Close> {
        let Some(&first) = buffer.first() else { return Ok(Next::Need(HEADER_LEN)) };
        if !Magic::from_wire(first).is_some_and(|magic| self.side.accepts(magic)) {
            return Err(Close::BadMagic(first));
        }
        let Some(bytes) = buffer.first_chunk::<HEADER_LEN>() else { return Ok(Next::Need(HEADER_LEN)) };
        let header = Header::parse(bytes).ok_or(Close::BadMagic(first))?;
        if header.body_len > BODY_LEN_MAX {
            return Err(Close::TooLarge { body_len: header.body_len });
        }
        let Some(body) = buffer.get(HEADER_LEN..header.frame_len()) else {
            return Ok(Next::Need(header.frame_len()));
        };
        if !header.adds_up() {
            return Ok(Next::Malformed(header));
        }
        let (framing_extras, rest) = body.split_at(usize::from(header.framing_len));
        let (extras, rest) = rest.split_at(usize::from(header.extras_len));
        let (key, value) = rest.split_at(usize::from(header.key_len));
        Ok(Next::Frame(Frame { header, framing_extras, extras, key, value }))
    }
}

/// Big-endian numbers at an offset the caller has checked.
pub(crate) fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}
pub(crate) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}
pub(crate) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SERVER: FrameReader = FrameReader::new(Side::Server);

    #[test]
    fn other_first_bytes_close_at_once() {
        for byte in 0..=255u8 {
            let known = [0x80, 0x08, 0x81, 0x18, 0x83].contains(&byte);
            assert_eq!(SERVER.next(&[byte]).is_ok(), known, "{byte:#04x}");
        }
        assert_eq!(SERVER.next(b"get k\r\n"), Err(Close::BadMagic(b'g')));
    }

    #[test]
    fn a_body_over_the_limit_closes_before_it_is_read() {
        let mut bytes = [0; HEADER_LEN];
        bytes[0] = 0x80;
        bytes[8..12].copy_from_slice(&BODY_LEN_MAX.to_be_bytes());
        assert_eq!(SERVER.next(&bytes), Ok(Next::Need(HEADER_LEN + BODY_LEN_MAX as usize)));
        bytes[8..12].copy_from_slice(&(BODY_LEN_MAX + 1).to_be_bytes());
        assert_eq!(SERVER.next(&bytes), Err(Close::TooLarge { body_len: BODY_LEN_MAX + 1 }));
    }

    #[test]
    fn a_body_shorter_than_its_parts_is_reported_with_its_end_known() {
        let mut bytes = [0; HEADER_LEN + 2];
        bytes[0] = 0x80;
        bytes[3] = 3;
        bytes[11] = 2;
        let Ok(Next::Malformed(header)) = SERVER.next(&bytes) else { panic!("not seen as malformed") };
        assert_eq!(header.frame_len(), bytes.len());
        assert_eq!(SERVER.next(&bytes[..25]), Ok(Next::Need(26)));
    }
}
