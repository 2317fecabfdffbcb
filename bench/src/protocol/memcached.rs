//! memcached, in its text and its binary form.

use std::net::TcpStream;

use anyhow::{Result, bail};
use wire::client::{RequestFrame, store_extras};
use wire::{FrameReader, Next, Opcode, Side};

use super::{Action, Answer, Parsed, Protocol, decimal, line, words};

#[derive(Default)]
pub struct Text;

impl Protocol for Text {
    fn open(&mut self, _: &mut TcpStream) -> Result<()> {
        Ok(())
    }

    fn encode(&mut self, key: &[u8], action: Action<'_>, _: u32, out: &mut Vec<u8>) {
        match action {
            Action::Get => {
                out.extend_from_slice(b"get ");
                out.extend_from_slice(key);
            }
            Action::Set(value) => {
                out.extend_from_slice(b"set ");
                out.extend_from_slice(key);
                out.extend_from_slice(b" 0 0 ");
                out.extend_from_slice(value.len().to_string().as_bytes());
                out.extend_from_slice(b"\r\n");
                out.extend_from_slice(value);
            }
        }
        out.extend_from_slice(b"\r\n");
    }

    fn parse(&mut self, input: &[u8]) -> Result<Parsed> {
        let Some((first, len)) = line(input) else { return Ok(Parsed::Incomplete) };
        Ok(match first {
            b"STORED" => Parsed::reply(len, Answer::Done),
            b"END" => Parsed::reply(len, Answer::Miss),
            value if value.starts_with(b"VALUE ") => {
                let Some(bytes) = value.split(|b| *b == b' ').nth(3).and_then(decimal) else {
                    bail!("memcached: a VALUE line without a length: {:?}", words(value));
                };
                // The value, its line end, and `END`.
                let whole = len + bytes + 2 + 5;
                if input.len() < whole { Parsed::Incomplete } else { Parsed::reply(whole, Answer::Done) }
            }
            b"ERROR" | b"NOT_STORED" => Parsed::reply(len, Answer::Error(words(first))),
            other if other.starts_with(b"SERVER_ERROR") || other.starts_with(b"CLIENT_ERROR") => {
                Parsed::reply(len, Answer::Error(words(other)))
            }
            other => bail!("not a memcached answer: {:?}", words(other)),
        })
    }
}

#[derive(Default)]
pub struct Binary;

impl Protocol for Binary {
    fn open(&mut self, _: &mut TcpStream) -> Result<()> {
        Ok(())
    }

    fn encode(&mut self, key: &[u8], action: Action<'_>, ticket: u32, out: &mut Vec<u8>) {
        match action {
            Action::Get => RequestFrame { opaque: ticket, key, ..RequestFrame::new(Opcode::Get) }.encode(out),
            Action::Set(value) => {
                let extras = store_extras(0, 0);
                RequestFrame { opaque: ticket, extras: &extras, key, value, ..RequestFrame::new(Opcode::Set) }
                    .encode(out);
            }
        }
    }

    fn parse(&mut self, input: &[u8]) -> Result<Parsed> {
        parse_frame(input)
    }
}

/// The reply at the front of a binary stream, memcached's or ours.
pub(super) fn parse_frame(input: &[u8]) -> Result<Parsed> {
    match FrameReader::new(Side::Client).next(input)? {
        Next::Need(_) => Ok(Parsed::Incomplete),
        Next::Malformed(header) => bail!("the server sent a frame that does not add up: {header:?}"),
        Next::Frame(frame) => {
            if frame.header.magic.is_request() {
                bail!("the server sent a request nobody asked for: {frame:?}");
            }
            let answer = match wire::client::status(&frame) {
                Ok(wire::Status::Success) => Answer::Done,
                Ok(wire::Status::KeyEnoent) => Answer::Miss,
                Ok(wire::Status::NotMyVbucket) => Answer::Elsewhere(frame.value.to_vec()),
                Ok(status) => Answer::Error(status.name().to_owned()),
                Err(code) => Answer::Error(format!("status {code:#06x}")),
            };
            Ok(Parsed::Reply { len: frame.frame_len(), answer, ticket: Some(frame.header.opaque) })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::tests::{bytes_of, replies};

    #[test]
    fn text_requests_are_as_the_protocol_says() {
        assert_eq!(bytes_of(&mut Text, b"k", Action::Get), b"get k\r\n");
        assert_eq!(bytes_of(&mut Text, b"k", Action::Set(b"a\r\nb")), b"set k 0 0 4\r\na\r\nb\r\n");
    }

    #[test]
    fn text_answers_are_found_wherever_the_bytes_are_cut() {
        let stream = b"STORED\r\nVALUE k 0 4\r\nEND\r\nEND\r\nEND\r\nSERVER_ERROR out of memory\r\n";
        let expected =
            [Answer::Done, Answer::Done, Answer::Miss, Answer::Error("SERVER_ERROR out of memory".to_owned())];
        // The four bytes of the value look like the start of an answer: `END` and a carriage return.
        let stream = [&stream[..21], b"END\r", b"\r\nEND\r\n", &stream[31..]].concat();
        assert_eq!(replies(|| Box::new(Text), &stream), expected);
    }

    #[test]
    fn what_is_not_memcached_is_refused() {
        assert!(Text.parse(b"HTTP/1.1 400 Bad Request\r\n").is_err());
        assert!(Text.parse(b"VALUE k 0\r\n").is_err());
        assert!(Binary.parse(b"ERROR\r\n").is_err());
    }

    #[test]
    fn binary_answers_carry_their_ticket() {
        let request = bytes_of(&mut Binary, b"key", Action::Set(b"v"));
        assert_eq!((request[0], request[1], request[15], request.len()), (0x80, 1, 7, 24 + 8 + 3 + 1));
        let mut reply = vec![0; 24];
        (reply[0], reply[1], reply[7], reply[15]) = (0x81, 1, 1, 7);
        let expected = Parsed::Reply { len: 24, answer: Answer::Miss, ticket: Some(7) };
        assert_eq!(Binary.parse(&reply).unwrap(), expected);
        assert_eq!(Binary.parse(&reply[..23]).unwrap(), Parsed::Incomplete);
        reply[7] = 0x86;
        let Parsed::Reply { answer: Answer::Error(words), .. } = Binary.parse(&reply).unwrap() else {
            panic!("no error")
        };
        assert_eq!(words, "ETMPFAIL");
    }
}
