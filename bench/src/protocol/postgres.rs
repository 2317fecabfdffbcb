//! postgres, protocol 3: one prepared statement to read and one to write, each run in a transaction of its own.

use std::net::TcpStream;

use anyhow::{Result, bail};

use super::{Action, Answer, Parsed, Protocol, exchange, words};

const READ: &str = "SELECT v FROM settee_bench WHERE k = $1";
const WRITE: &str = "INSERT INTO settee_bench VALUES ($1, $2) ON CONFLICT (k) DO UPDATE SET v = excluded.v";
const TABLE: &str = "CREATE TABLE IF NOT EXISTS settee_bench (k bytea PRIMARY KEY, v bytea NOT NULL)";

pub struct Postgres {
    pub user: String,
    pub database: String,
}

impl Postgres {
    /// Makes the table, once for all connections.
    ///
    /// # Errors
    /// The server refuses.
    pub fn make_table(&self, stream: &mut TcpStream) -> Result<()> {
        self.start(stream)?;
        settle(stream, &message(b'Q', &[TABLE.as_bytes(), b"\0"]))
    }

    fn start(&self, stream: &mut TcpStream) -> Result<()> {
        let (user, database) = (self.user.as_bytes(), self.database.as_bytes());
        let body = [&196_608_u32.to_be_bytes()[..], b"user\0", user, b"\0database\0", database, b"\0\0"].concat();
        settle(stream, &[&(body.len() as u32 + 4).to_be_bytes()[..], &body].concat())
    }
}

impl Protocol for Postgres {
    fn open(&mut self, stream: &mut TcpStream) -> Result<()> {
        self.start(stream)?;
        let parse = |name: &[u8], text: &str| message(b'P', &[name, b"\0", text.as_bytes(), b"\0", &[0, 0]]);
        settle(stream, &[parse(b"r", READ), parse(b"w", WRITE), message(b'S', &[])].concat())
    }

    fn encode(&mut self, key: &[u8], action: Action<'_>, _: u32, out: &mut Vec<u8>) {
        let len = |bytes: &[u8]| (bytes.len() as u32).to_be_bytes();
        // An unnamed portal, every parameter and the result in binary.
        let bind = match action {
            Action::Get => message(b'B', &[b"\0r\0", &[0, 1, 0, 1, 0, 1], &len(key), key, &[0, 1, 0, 1]]),
            Action::Set(value) => {
                let parameters: [&[u8]; 5] = [&[0, 1, 0, 1, 0, 2], &len(key), key, &len(value), value];
                message(b'B', &[b"\0w\0", &parameters.concat(), &[0, 1, 0, 1]])
            }
        };
        out.extend_from_slice(&bind);
        out.extend_from_slice(b"E\0\0\0\x09\0\0\0\0\0S\0\0\0\x04");
    }

    fn parse(&mut self, input: &[u8]) -> Result<Parsed> {
        let mut at = 0;
        let mut answer = None;
        while let Some((kind, body, len)) = next_message(&input[at..])? {
            at += len;
            match kind {
                b'D' => answer = Some(Answer::Done),
                // SELECT 0: the end of a read that gave no row. The rows of a read and the writes count at least one.
                b'C' => {
                    let none = body.starts_with(b"SELECT 0");
                    answer = answer.or(Some(if none { Answer::Miss } else { Answer::Done }));
                }
                b'E' => answer = Some(Answer::Error(error_words(body))),
                b'Z' => {
                    let Some(answer) = answer else { bail!("postgres: ready again without an answer") };
                    return Ok(Parsed::reply(at, answer));
                }
                _ => {}
            }
        }
        Ok(Parsed::Incomplete)
    }
}

/// A typed message: its letter, its length and its parts.
fn message(kind: u8, parts: &[&[u8]]) -> Vec<u8> {
    let len: usize = parts.iter().map(|part| part.len()).sum();
    let mut out = vec![kind];
    out.extend_from_slice(&(len as u32 + 4).to_be_bytes());
    parts.iter().for_each(|part| out.extend_from_slice(part));
    out
}

/// The message at the front: its letter, what it holds, the bytes it takes.
fn next_message(input: &[u8]) -> Result<Option<(u8, &[u8], usize)>> {
    let Some(head) = input.first_chunk::<5>() else { return Ok(None) };
    let len = u32::from_be_bytes([head[1], head[2], head[3], head[4]]) as usize;
    if !(4..1 << 30).contains(&len) {
        bail!("not a postgres answer: {:?}", words(head));
    }
    Ok(input.get(5..len + 1).map(|body| (head[0], body, len + 1)))
}

/// The code and text among an error's fields.
fn error_words(body: &[u8]) -> String {
    let field = |code: u8| body.split(|b| *b == 0).find(|f| f.first() == Some(&code)).map(|f| words(&f[1..]));
    format!("{} {}", field(b'C').unwrap_or_default(), field(b'M').unwrap_or_default())
}

/// Sends and waits until the server is ready for the next query.
fn settle(stream: &mut TcpStream, request: &[u8]) -> Result<()> {
    exchange(stream, request, |input| {
        let mut at = 0;
        while let Some((kind, body, len)) = next_message(&input[at..])? {
            at += len;
            match (kind, body) {
                (b'E', body) => bail!("postgres refuses: {}", error_words(body)),
                (b'R', [0, 0, 0, 0]) => {}
                (b'R', _) => bail!("postgres asks for a password; only `trust` is supported here"),
                (b'Z', _) => return Ok(Some(())),
                _ => {}
            }
        }
        Ok(None)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::tests::{bytes_of, replies};

    fn postgres() -> Postgres {
        Postgres { user: "u".to_owned(), database: "d".to_owned() }
    }

    #[test]
    fn a_request_binds_executes_and_ends_its_transaction() {
        for action in [Action::Get, Action::Set(b"value")] {
            let request = bytes_of(&mut postgres(), b"key", action);
            let (mut at, mut kinds) = (0, Vec::new());
            while let Some((kind, _, len)) = next_message(&request[at..]).unwrap() {
                kinds.push(kind);
                at += len;
            }
            assert_eq!((kinds.as_slice(), at), (&b"BES"[..], request.len()));
        }
    }

    #[test]
    fn answers_are_found_wherever_the_bytes_are_cut() {
        let ready = || message(b'Z', &[b"I"]);
        let stored = [message(b'2', &[]), message(b'C', &[b"INSERT 0 1\0"]), ready()].concat();
        let found = [message(b'2', &[]), message(b'D', &[b"row"]), message(b'C', &[b"SELECT 1\0"]), ready()].concat();
        let missing = [message(b'2', &[]), message(b'C', &[b"SELECT 0\0"]), ready()].concat();
        let failed = [message(b'E', &[b"SERROR\0C53100\0Mno space\0\0"]), ready()].concat();
        let error = Answer::Error("53100 no space".to_owned());
        let stream = [stored, found, missing, failed].concat();
        let answers = replies(|| Box::new(postgres()), &stream);
        assert_eq!(answers, [Answer::Done, Answer::Done, Answer::Miss, error]);
    }

    #[test]
    fn what_is_not_postgres_is_refused() {
        assert!(postgres().parse(b"HTTP/1.1 400").is_err());
        assert!(postgres().parse(&message(b'Z', &[b"I"])).is_err(), "ready without an answer");
    }
}
