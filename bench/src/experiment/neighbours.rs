//! What one client notices of the others: of those that say nothing, of those that say half of something, of those that
//! ask for much and never read. And what it meets when it is alone: very many requests one after the other, each beside a
//! round trip to a bare echo, so that what the machine does to both is told apart from what the server does.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::Args;
use serde_json::json;

use super::{Bench, Common, Story};
use crate::protocol::{Action, Answer, Parsed, Protocol};
use crate::report::{Column, Ratio, Row, us, whole};
use crate::servers::Server;
use crate::tally::{Latencies, tenths};

#[derive(Args, Debug)]
pub struct Neighbours {
    #[command(flatten)]
    pub(super) common: Common,
    /// Clients that misbehave, of each kind
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..=2000))]
    clients: u32,
    /// Requests one after the other [default: 1000000, with --quick 20000]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=100_000_000))]
    requests: Option<u32>,
}

/// Requests a row is measured with before it is the next one's turn.
const SLICE: u32 = 500;
/// What no request should take.
const LUMP_NS: u64 = 10_000_000;
/// They misbehave for as long as the experiment takes.
const SETTINGS: [&str; 3] = ["kv.login_timeout_s=3600", "kv.stall_timeout_s=3600", "bucket.vbuckets=16"];
const LARGE_KEY: &[u8] = b"large";
const LARGE_LEN: usize = 64 << 10;
/// Answers that a client which never reads asks for: 8 MiB.
const LARGE_COUNT: usize = 128;

const COLUMNS: &[Column] = &[
    Column("requests", "ops", whole),
    Column("requests/s", "ops_per_s", whole),
    Column("mean", "mean_us", us),
    Column("p50", "p50_us", us),
    Column("p99", "p99_us", us),
    Column("p99.9", "p999_us", us),
    Column("p99.99", "p9999_us", us),
    Column("max", "max_us", us),
    Column("cpu/op", "cpu_us_per_op", us),
    Column("> 10 ms", "above_10ms", whole),
    Column("server MiB", "resident_mb", whole),
];

#[derive(Clone, Copy, Debug)]
enum Crowd {
    Nobody,
    Silent,
    HalfAFrame,
    NeverReads,
}

const CROWDS: [(&str, Crowd); 4] = [
    ("alone", Crowd::Nobody),
    ("beside-silent", Crowd::Silent),
    ("beside-half-a-frame", Crowd::HalfAFrame),
    ("beside-never-reads", Crowd::NeverReads),
];

impl Neighbours {
    pub(super) fn run(&self, bench: &mut Bench<'_>) -> Result<Story> {
        let time = self.common.seconds(10.0, 1.0)?;
        for round in 1..=self.common.rounds() {
            bench.say(&format!("round {round}: {} clients of each kind", self.clients));
            self.beside_crowds(bench, time)?;
        }
        let requests = self.requests.unwrap_or(if self.common.quick { 20_000 } else { 1_000_000 });
        bench.say(&format!("{requests} requests, one after the other"));
        self.one_after_the_other(bench, requests)?;
        // Processor time and the median tell of the server, the rate of everything else on the machine as well.
        let fields = ["cpu_us_per_op", "p50_us", "ops_per_s"];
        let beside = |(name, _): &(&str, Crowd)| fields.map(|field| Ratio::new(field, name, "alone"));
        let ratios = CROWDS[1..].iter().flat_map(beside).collect();
        Ok(Story { columns: COLUMNS, ratios })
    }

    /// All crowds at once, each on a server of its own, and one client that asks each of the servers in turn.
    fn beside_crowds(&self, bench: &mut Bench<'_>, time: Duration) -> Result<()> {
        let mut houses = Vec::new();
        for (name, crowd) in CROWDS {
            houses.push((name, self.settle(bench, crowd)?, Latencies::default(), Duration::ZERO));
        }
        let before: Vec<_> = houses.iter().map(|(_, house, ..)| house.server.usage()).collect();
        while houses.iter().any(|(.., spent)| *spent < time) {
            bench.check_stop()?;
            for (_, house, latencies, spent) in &mut houses {
                let began = Instant::now();
                for _ in 0..SLICE {
                    latencies.record(house.witness.round_trip()?);
                }
                *spent += began.elapsed();
            }
        }
        for ((name, house, latencies, spent), before) in houses.into_iter().zip(before) {
            let mut row = row(name, &latencies, spent);
            if let Some((after, before)) = house.server.usage().zip(before) {
                let cpu = after.since(&before).cpu;
                row.insert("cpu_us_per_op".into(), json!(tenths(cpu.as_secs_f64() * 1e6 / latencies.count() as f64)));
            }
            row.insert("clients".into(), json!(house.crowd.len() + 1));
            if let Some(bytes) = house.server.resident_bytes() {
                row.insert("resident_mb".into(), json!(tenths(bytes as f64 / f64::from(1 << 20))));
            }
            bench.rows.push(row);
        }
        Ok(())
    }

    fn one_after_the_other(&self, bench: &mut Bench<'_>, requests: u32) -> Result<()> {
        let mut house = self.settle(bench, Crowd::Nobody)?;
        let mut echo = Echo::start()?;
        let (mut ours, mut bare) = (Latencies::default(), Latencies::default());
        let (mut our_time, mut bare_time) = (0, 0);
        for n in 0..requests {
            if n % SLICE == 0 {
                bench.check_stop()?;
            }
            let (our_ns, bare_ns) = (house.witness.round_trip()?, echo.round_trip()?);
            ours.record(our_ns);
            bare.record(bare_ns);
            our_time += our_ns;
            bare_time += bare_ns;
        }
        bench.say(&format!("sequential: {}echo: {}", ours.draw(), bare.draw()));
        bench.rows.push(row("sequential", &ours, Duration::from_nanos(our_time)));
        bench.rows.push(row("echo", &bare, Duration::from_nanos(bare_time)));
        Ok(())
    }

    /// A server, the crowd on it, and a client that behaves.
    fn settle(&self, bench: &mut Bench<'_>, crowd: Crowd) -> Result<House> {
        let dir = bench.server_dir()?;
        let server = Server::settee(&self.common.settee()?, dir.path(), &SETTINGS.map(str::to_owned))?;
        bench.versions.insert("settee".to_owned(), server.version.clone());
        let dialect = server.target.prepare(&server.identity, None)?;
        let log_in = || Witness::log_in(&server, dialect.protocol());
        let mut witness = log_in()?;
        witness.store(LARGE_KEY, &vec![b'v'; LARGE_LEN])?;
        let clients = match crowd {
            Crowd::Nobody => 0,
            _ => self.clients,
        };
        let join = |_| -> Result<TcpStream> {
            Ok(match crowd {
                Crowd::Nobody | Crowd::Silent => server.target.connect()?,
                Crowd::HalfAFrame => {
                    let mut client = log_in()?;
                    let half = client.request.len() / 2;
                    client.stream.write_all(&client.request[..half])?;
                    client.stream
                }
                Crowd::NeverReads => {
                    let mut client = log_in()?;
                    let mut get = Vec::new();
                    client.protocol.encode(LARGE_KEY, Action::Get, 0, &mut get);
                    client.stream.write_all(&get.repeat(LARGE_COUNT))?;
                    client.stream
                }
            })
        };
        let crowd = (0..clients).map(join).collect::<Result<Vec<_>>>()?;
        Ok(House { witness, crowd, server, _dir: dir })
    }
}

fn row(name: &str, latencies: &Latencies, spent: Duration) -> Row {
    let mut row = Row::new();
    row.insert("name".into(), json!(name));
    row.insert("ops".into(), json!(latencies.count()));
    row.insert("ops_per_s".into(), json!(tenths(latencies.count() as f64 / spent.as_secs_f64().max(1e-9))));
    latencies.fields(&mut row);
    row.insert("above_10ms".into(), json!(latencies.count_above(LUMP_NS)));
    row
}

/// Clients first: they are gone before their server is.
struct House {
    witness: Witness,
    crowd: Vec<TcpStream>,
    server: Server,
    _dir: tempfile::TempDir,
}

/// A client that asks, waits for the answer, and asks again.
struct Witness {
    stream: TcpStream,
    protocol: Box<dyn Protocol>,
    request: Vec<u8>,
    input: Vec<u8>,
}

impl Witness {
    fn log_in(server: &Server, mut protocol: Box<dyn Protocol>) -> Result<Witness> {
        let mut stream = server.target.connect()?;
        protocol.open(&mut stream)?;
        let mut request = Vec::new();
        protocol.encode(b"missing", Action::Get, 0, &mut request);
        Ok(Witness { stream, protocol, request, input: Vec::new() })
    }

    fn store(&mut self, key: &[u8], value: &[u8]) -> Result<()> {
        let mut request = Vec::new();
        self.protocol.encode(key, Action::Set(value), 0, &mut request);
        self.stream.write_all(&request)?;
        match self.answer()? {
            Answer::Done => Ok(()),
            other => bail!("a document was not stored: {other:?}"),
        }
    }

    /// In ns.
    fn round_trip(&mut self) -> Result<u64> {
        let began = Instant::now();
        self.stream.write_all(&self.request)?;
        let answer = self.answer()?;
        let took = began.elapsed().as_nanos() as u64;
        match answer {
            Answer::Miss => Ok(took),
            other => bail!("a read of what is not there was answered with {other:?}"),
        }
    }

    fn answer(&mut self) -> Result<Answer> {
        let mut chunk = [0; 4096];
        self.input.clear();
        loop {
            if let Parsed::Reply { answer, .. } = self.protocol.parse(&self.input)? {
                return Ok(answer);
            }
            match self.stream.read(&mut chunk).context("no answer from the server")? {
                0 => bail!("the server closed the connection"),
                n => self.input.extend_from_slice(&chunk[..n]),
            }
        }
    }
}

/// The least a round trip can be on this machine: another thread sends back what it gets.
struct Echo(TcpStream);

impl Echo {
    /// Bytes of a short request.
    const LEN: usize = 32;

    fn start() -> Result<Echo> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let near = TcpStream::connect(listener.local_addr()?)?;
        let (mut far, _) = listener.accept()?;
        near.set_nodelay(true)?;
        far.set_nodelay(true)?;
        // Ends when the other end closes.
        thread::spawn(move || {
            let mut bytes = [0; Echo::LEN];
            while far.read_exact(&mut bytes).and_then(|()| far.write_all(&bytes)).is_ok() {}
        });
        Ok(Echo(near))
    }

    /// In ns.
    fn round_trip(&mut self) -> Result<u64> {
        let began = Instant::now();
        self.0.write_all(&[0; Echo::LEN])?;
        self.0.read_exact(&mut [0; Echo::LEN])?;
        Ok(began.elapsed().as_nanos() as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_echo_answers_each_time_and_slow_answers_are_counted() {
        let mut echo = Echo::start().unwrap();
        let mut latencies = Latencies::default();
        (0..10).for_each(|_| latencies.record(echo.round_trip().unwrap()));
        latencies.record(2 * LUMP_NS);
        let row = row("echo", &latencies, Duration::from_secs(1));
        assert_eq!((&row["ops"], &row["ops_per_s"]), (&json!(11), &json!(11.0)));
        assert!(row["above_10ms"].as_u64() >= Some(1));
    }
}
