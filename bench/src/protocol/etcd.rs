//! etcd v3 through its JSON gateway on HTTP/1.1. The gateway is a door into the same server: each request costs it a
//! translation to and from its native calls, so its processor time is above that of a native client; its durable path
//! is the same.

use std::collections::VecDeque;
use std::net::TcpStream;

use anyhow::{Context, Result, bail};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;

use super::{Action, Answer, Parsed, Protocol, decimal, words};

#[derive(Default)]
pub struct Etcd {
    /// Which of the requests under way are reads, oldest first: a put's answer looks like that of a read that found
    /// nothing.
    reads: VecDeque<bool>,
}

impl Protocol for Etcd {
    fn open(&mut self, _: &mut TcpStream) -> Result<()> {
        Ok(())
    }

    fn encode(&mut self, key: &[u8], action: Action<'_>, _: u32, out: &mut Vec<u8>) {
        self.reads.push_back(action == Action::Get);
        let key = BASE64.encode(key);
        let (path, body) = match action {
            Action::Get => ("range", format!("{{\"key\":\"{key}\"}}")),
            Action::Set(value) => ("put", format!("{{\"key\":\"{key}\",\"value\":\"{}\"}}", BASE64.encode(value))),
        };
        let head = format!("POST /v3/kv/{path} HTTP/1.1\r\nHost: etcd\r\nContent-Length: {}\r\n\r\n", body.len());
        out.extend_from_slice(head.as_bytes());
        out.extend_from_slice(body.as_bytes());
    }

    fn parse(&mut self, input: &[u8]) -> Result<Parsed> {
        let Some(end) = input.windows(4).position(|w| w == b"\r\n\r\n") else { return Ok(Parsed::Incomplete) };
        let head = std::str::from_utf8(&input[..end]).context("etcd: an answer whose head is not text")?;
        let Some(code) = head.strip_prefix("HTTP/1.1 ").and_then(|rest| rest.get(..3)) else {
            bail!("not an HTTP answer: {:?}", words(head.as_bytes()));
        };
        let length = head.lines().find_map(|line| {
            let (name, value) = line.split_once(':')?;
            name.eq_ignore_ascii_case("content-length").then(|| decimal(value.trim().as_bytes()))?
        });
        let length = length.context("etcd: an answer that does not tell its length")?;
        let Some(body) = input.get(end + 4..end + 4 + length) else { return Ok(Parsed::Incomplete) };
        let read = self.reads.pop_front().context("etcd: an answer nobody asked for")?;
        let answer = match code {
            "200" if read && !body.windows(5).any(|w| w == b"\"kvs\"") => Answer::Miss,
            "200" => Answer::Done,
            _ => Answer::Error(format!("HTTP {code} {}", words(body))),
        };
        Ok(Parsed::reply(end + 4 + length, answer))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::tests::bytes_of;

    fn response(code: &str, body: &str) -> Vec<u8> {
        format!("HTTP/1.1 {code}\r\ncontent-length: {}\r\n\r\n{body}", body.len()).into_bytes()
    }

    #[test]
    fn keys_and_values_go_as_base64_in_json() {
        let put = String::from_utf8(bytes_of(&mut Etcd::default(), b"key", Action::Set(b"value"))).unwrap();
        assert!(put.starts_with("POST /v3/kv/put HTTP/1.1\r\n"), "{put}");
        let (head, body) = put.split_once("\r\n\r\n").unwrap();
        assert_eq!(body, "{\"key\":\"a2V5\",\"value\":\"dmFsdWU=\"}");
        assert!(head.contains(&format!("Content-Length: {}", body.len())));
    }

    #[test]
    fn an_answer_is_judged_by_what_was_asked() {
        let mut etcd = Etcd::default();
        for action in [Action::Set(b"v"), Action::Get, Action::Get, Action::Get] {
            bytes_of(&mut etcd, b"k", action);
        }
        let empty = response("200 OK", "{\"header\":{}}");
        let found = response("200 OK", "{\"header\":{},\"kvs\":[{}]}");
        let failed = response("503 Service Unavailable", "no leader");
        let done = |bytes: &[u8], answer| Parsed::reply(bytes.len(), answer);
        assert_eq!(etcd.parse(&empty[..empty.len() - 1]).unwrap(), Parsed::Incomplete);
        assert_eq!(etcd.parse(&empty).unwrap(), done(&empty, Answer::Done));
        assert_eq!(etcd.parse(&empty).unwrap(), done(&empty, Answer::Miss));
        assert_eq!(etcd.parse(&found).unwrap(), done(&found, Answer::Done));
        assert_eq!(etcd.parse(&failed).unwrap(), done(&failed, Answer::Error("HTTP 503 no leader".to_owned())));
        assert!(etcd.parse(&found).is_err(), "nobody asked");
    }
}
