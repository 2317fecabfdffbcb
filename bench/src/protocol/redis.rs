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
