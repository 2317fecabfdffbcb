//! redis, as arrays of bulk strings.

use std::net::TcpStream;

use anyhow::{Context, Result, bail};

use super::{Action, Answer, Parsed, Protocol, decimal, line, words};

#[derive(Default)]
pub struct Redis;

impl Protocol for Redis {
    fn open(&mut self, _: &mut TcpStream) -> Result<()> {
        Ok(())
    }

    fn encode(&mut self, key: &[u8], action: Action<'_>, _: u32, out: &mut Vec<u8>) {
        match action {
            Action::Get => {
                out.extend_from_slice(b"*2\r\n$3\r\nGET\r\n");
                push_bulk(out, key);
            }
            Action::Set(value) => {
                out.extend_from_slice(b"*3\r\n$3\r\nSET\r\n");
                push_bulk(out, key);
                push_bulk(out, value);
            }
        }
    }

    fn parse(&mut self, input: &[u8]) -> Result<Parsed> {
        let Some((first, len)) = line(input) else { return Ok(Parsed::Incomplete) };
        let Some((kind, rest)) = first.split_first() else { bail!("redis: an empty line for an answer") };
        Ok(match kind {
            b'+' | b':' => Parsed::reply(len, Answer::Done),
            b'-' => Parsed::reply(len, Answer::Error(words(rest))),
            b'$' if rest == b"-1" => Parsed::reply(len, Answer::Miss),
            b'$' => {
                let bytes = decimal(rest).with_context(|| format!("redis: a length of {:?}", words(rest)))?;
                let whole = len + bytes + 2;
                if input.len() < whole { Parsed::Incomplete } else { Parsed::reply(whole, Answer::Done) }
            }
            _ => bail!("not a redis answer: {:?}", words(first)),
        })
    }
}

fn push_bulk(out: &mut Vec<u8>, bytes: &[u8]) {
    out.push(b'$');
    out.extend_from_slice(bytes.len().to_string().as_bytes());
    out.extend_from_slice(b"\r\n");
    out.extend_from_slice(bytes);
    out.extend_from_slice(b"\r\n");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::tests::{bytes_of, replies};

    #[test]
    fn requests_are_arrays_of_bulk_strings() {
        assert_eq!(bytes_of(&mut Redis, b"key", Action::Get), b"*2\r\n$3\r\nGET\r\n$3\r\nkey\r\n");
        let set = bytes_of(&mut Redis, b"key", Action::Set(b"\r\n"));
        assert_eq!(set, b"*3\r\n$3\r\nSET\r\n$3\r\nkey\r\n$2\r\n\r\n\r\n");
    }

    #[test]
    fn answers_are_found_wherever_the_bytes_are_cut() {
        let stream = b"+OK\r\n$4\r\n\r\n+x\r\n$-1\r\n$0\r\n\r\n-MISCONF no disk\r\n";
        let error = Answer::Error("MISCONF no disk".to_owned());
        assert_eq!(
            replies(|| Box::new(Redis), stream),
            [Answer::Done, Answer::Done, Answer::Miss, Answer::Done, error]
        );
    }

    #[test]
    fn what_is_not_redis_is_refused() {
        for bytes in [&b"STORED\r\n"[..], b"\r\n", b"$x\r\n"] {
            assert!(Redis.parse(bytes).is_err(), "{bytes:?}");
        }
    }
}
