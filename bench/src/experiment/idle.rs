//! What a server with many buckets does while nobody asks for anything: nothing.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use clap::Args;
use serde_json::{Value, json};
use wire::client::{RequestFrame, status};
use wire::{FrameReader, Next, Opcode, Side, Status};

use super::{Bench, Common, Story};
use crate::protocol::{Action, Answer, Parsed, Protocol};
use crate::report::{Column, Row, whole};
use crate::servers::Server;

#[derive(Args, Debug)]
pub struct Idle {
    #[command(flatten)]
    pub(super) common: Common,
    /// Buckets of 1024 vBuckets each, the first made at start among them [default: 30, with --quick 3]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=100))]
    buckets: Option<u32>,
}

/// What was written is filed a second later, and nobody who came is waited for longer than that.
const SETTINGS: [&str; 3] = ["persist.filing_age_s_max=1", "kv.login_timeout_s=1", "bucket.quota_mb=64"];
/// Documents of the first bucket, so that it has something to do before it has nothing.
const DOCUMENTS: u32 = 10_000;
/// It is at rest when no thread of it ran for this long.
const REST: Duration = Duration::from_secs(3);
const REST_PATIENCE: Duration = Duration::from_secs(60);

const COLUMNS: &[Column] = &[
    Column("buckets", "buckets", whole),
    Column("seconds", "seconds", whole),
    Column("of a core", "cpu_pct", percent),
    Column("thread switches", "switches", whole),
    Column("server MiB", "resident_mb", whole),
];

fn percent(value: &Value) -> String {
    value.as_f64().map_or_else(String::new, |pct| format!("{pct:.2} %"))
}

impl Idle {
    pub(super) fn run(&self, bench: &mut Bench<'_>) -> Result<Story> {
        let time = self.common.seconds(30.0, 5.0)?;
        let buckets = self.buckets.unwrap_or(if self.common.quick { 3 } else { 30 });
        for round in 1..=self.common.rounds() {
            bench.say(&format!("round {round}: {buckets} buckets"));
            let dir = bench.server_dir()?;
            let server = Server::settee(&self.common.settee()?, dir.path(), &SETTINGS.map(str::to_owned))?;
            bench.versions.insert("settee".to_owned(), server.version.clone());
            settle(&server, buckets)?;
            bench.say("waiting until it is at rest");
            let at_rest = wait_for_rest(&server)?;
            bench.check_stop()?;
            let before = (server.usage().context("the server is gone")?, switches(&server)?);
            thread::sleep(time);
            let after = (server.usage().context("the server is gone")?, switches(&server)?);
            let cpu = after.0.since(&before.0).cpu;
            let mut row = Row::new();
            row.insert("name".into(), json!("idle"));
            row.insert("errors".into(), json!(u32::from(!at_rest)));
            row.insert("buckets".into(), json!(buckets));
            row.insert("seconds".into(), json!(time.as_secs_f64()));
            row.insert("cpu_pct".into(), json!(100.0 * cpu.as_secs_f64() / time.as_secs_f64()));
            row.insert("switches".into(), json!(after.1 - before.1));
            if let Some(bytes) = server.resident_bytes() {
                row.insert("resident_mb".into(), json!(bytes >> 20));
            }
            bench.rows.push(row);
        }
        Ok(Story { columns: COLUMNS, ratios: Vec::new() })
    }
}

/// Makes the buckets, and gives the first some documents.
fn settle(server: &Server, buckets: u32) -> Result<()> {
    let mut protocol = server.target.prepare(&server.identity, None)?.protocol();
    let mut stream = server.target.connect()?;
    protocol.open(&mut stream)?;
    for document in 0..DOCUMENTS {
        store(&mut stream, &mut *protocol, format!("key-{document}").as_bytes())?;
    }
    for bucket in 1..buckets {
        let request = RequestFrame {
            key: format!("bucket-{bucket}").as_bytes(),
            value: b"settee\0max_size=67108864;replicas=0;max_vbuckets=1024",
            ..RequestFrame::new(Opcode::CreateBucket)
        }
        .to_bytes();
        stream.write_all(&request)?;
        let answer = read_status(&mut stream)?;
        if answer != Status::Success {
            bail!("bucket-{bucket} was not made: {answer:?}");
        }
    }
    Ok(())
}

fn store(stream: &mut TcpStream, protocol: &mut dyn Protocol, key: &[u8]) -> Result<()> {
    let (mut request, mut input, mut chunk) = (Vec::new(), Vec::new(), [0; 4096]);
    protocol.encode(key, Action::Set(&[b'v'; 256]), 0, &mut request);
    stream.write_all(&request)?;
    loop {
        match protocol.parse(&input)? {
            Parsed::Reply { answer: Answer::Done, .. } => return Ok(()),
            Parsed::Reply { answer, .. } => bail!("a document was not stored: {answer:?}"),
            Parsed::Incomplete => match stream.read(&mut chunk)? {
                0 => bail!("the server closed the connection"),
                n => input.extend_from_slice(&chunk[..n]),
            },
        }
    }
}

fn read_status(stream: &mut TcpStream) -> Result<Status> {
    let (mut input, mut chunk) = (Vec::new(), [0; 4096]);
    loop {
        if let Next::Frame(frame) = FrameReader::new(Side::Client).next(&input)? {
            return status(&frame).map_err(|code| anyhow!("an unknown status, {code}"));
        }
        match stream.read(&mut chunk)? {
            0 => bail!("the server closed the connection"),
            n => input.extend_from_slice(&chunk[..n]),
        }
    }
}

/// False: it never came to rest.
fn wait_for_rest(server: &Server) -> Result<bool> {
    let began = Instant::now();
    let (mut last, mut since) = (switches(server)?, Instant::now());
    while since.elapsed() < REST {
        if began.elapsed() > REST_PATIENCE {
            return Ok(false);
        }
        thread::sleep(Duration::from_millis(100));
        let now = switches(server)?;
        if now != last {
            (last, since) = (now, Instant::now());
        }
    }
    Ok(true)
}

fn switches(server: &Server) -> Result<u64> {
    server.context_switches().context("the system does not tell when threads ran")
}
