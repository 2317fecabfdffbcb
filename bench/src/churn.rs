//! Clients that come, say a few things and leave, again and again.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use anyhow::Result;
use mio::net::TcpStream;
use mio::{Events, Interest, Poll, Token};
use socket2::{Domain, Socket, Type};

use crate::process::Usage;
use crate::protocol::{Answer, Parsed, Protocol};
use crate::tally::Latencies;

/// Something said, and how many answers it gets.
#[derive(Clone, Debug)]
pub struct Step {
    pub request: Vec<u8>,
    pub answers: u32,
}

impl Step {
    /// Both said at once.
    pub fn and(mut self, other: Step) -> Step {
        self.request.extend_from_slice(&other.request);
        self.answers += other.answers;
        self
    }
}

/// Who comes and goes.
pub struct Churn<'a> {
    pub address: SocketAddr,
    /// Each connection goes through all of them, one after the other.
    pub steps: &'a [Step],
    pub protocol: &'a dyn Fn() -> Box<dyn Protocol>,
    pub clients: u32,
    pub warmup: Duration,
    pub time: Duration,
}

#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// Connections that went through all steps.
    pub completed: u64,
    /// Connections that were refused, reset, or closed before their time.
    pub refused: u64,
    /// Answers that were errors.
    pub errors: BTreeMap<String, u64>,
    /// Clients that completed nothing in the time measured.
    pub starved: u64,
    /// From the beginning of the connection to the last answer.
    pub latencies: Latencies,
    /// The longest time in which some client completed nothing.
    pub longest_gap_ns: u64,
    pub elapsed: Duration,
    pub client_cpu: Duration,
    pub server: Option<Usage>,
}

struct Client {
    stream: Option<TcpStream>,
    protocol: Box<dyn Protocol>,
    step: usize,
    answers: u32,
    output: Vec<u8>,
    input: Vec<u8>,
    began_ns: u64,
    completed_ns: u64,
    completed: u64,
}

/// What driving a client came to.
enum State {
    Waiting,
    Completed,
    Failed(String),
}

impl Churn<'_> {
    /// # Errors
    /// The machine has no sockets or addresses left.
    pub fn run(&self, stop: &AtomicBool, usage: &dyn Fn() -> Option<Usage>) -> Result<Outcome> {
        let mut poll = Poll::new()?;
        let mut events = Events::with_capacity(1024);
        let mut clients: Vec<Client> = (0..self.clients).map(|_| Client::new((self.protocol)())).collect();
        let mut outcome = Outcome::default();
        let epoch = Instant::now();
        let now_ns = || epoch.elapsed().as_nanos() as u64;
        let from_ns = self.warmup.as_nanos() as u64;
        let until_ns = from_ns + self.time.as_nanos() as u64;
        let mut before = None;
        // Those that are to connect anew: not at once, or a server that refuses would keep us busy with nothing else.
        let mut anew: Vec<usize> = (0..clients.len()).collect();
        let mut scratch = vec![0; 16 * 1024];
        loop {
            let now = now_ns();
            if now >= from_ns && before.is_none() {
                before = Some((env::os::cpu_time()?, usage()));
                // Gaps count from here.
                clients.iter_mut().for_each(|client| client.completed_ns = now);
            }
            if now >= until_ns || stop.load(Relaxed) {
                break;
            }
            for n in std::mem::take(&mut anew) {
                match self.connect(n, &poll) {
                    Ok(stream) => clients[n].start(stream, &self.steps[0], now_ns()),
                    Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                        outcome.refused += u64::from(before.is_some());
                        anew.push(n);
                    }
                    Err(error) => return Err(error.into()),
                }
            }
            let patience = if anew.is_empty() { Duration::from_millis(20) } else { Duration::from_millis(1) };
            match poll.poll(&mut events, Some(patience)) {
                Err(error) if error.kind() != io::ErrorKind::Interrupted => return Err(error.into()),
                _ => {}
            }
            for event in &events {
                let n = event.token().0;
                let client = &mut clients[n];
                let readable = event.is_readable() || event.is_read_closed() || event.is_error();
                let state = client.drive(readable, self.steps, &mut scratch, &mut outcome.errors);
                let now = now_ns();
                let counts = before.is_some();
                match state {
                    State::Waiting => continue,
                    State::Completed if counts => {
                        outcome.completed += 1;
                        outcome.latencies.record(now - client.began_ns);
                        client.completed += 1;
                        outcome.longest_gap_ns = outcome.longest_gap_ns.max(now - client.completed_ns);
                        client.completed_ns = now;
                    }
                    State::Failed(words) if counts => {
                        outcome.refused += 1;
                        *outcome.errors.entry(words).or_default() += 1;
                    }
                    State::Completed | State::Failed(_) => {}
                }
                // Closing takes the socket off the poll.
                client.stream = None;
                anew.push(n);
            }
        }
        let now = now_ns();
        if let Some((cpu, used)) = before {
            outcome.elapsed = Duration::from_nanos(now.saturating_sub(from_ns));
            outcome.client_cpu = env::os::cpu_time()?.saturating_sub(cpu);
            outcome.server = usage().zip(used).map(|(after, before)| after.since(&before));
            for client in &clients {
                outcome.starved += u64::from(client.completed == 0);
                outcome.longest_gap_ns = outcome.longest_gap_ns.max(now.saturating_sub(client.completed_ns));
            }
        }
        Ok(outcome)
    }

    /// Begins a connection. A machine has 28 000 ports to connect from on one address and keeps each for a while, so
    /// every client has its own address where loopback has plenty.
    fn connect(&self, n: usize, poll: &Poll) -> io::Result<TcpStream> {
        let socket = Socket::new_raw(Domain::for_address(self.address), Type::STREAM.nonblocking().cloexec(), None)?;
        if let SocketAddr::V4(address) = self.address
            && address.ip().is_loopback()
        {
            let own = Ipv4Addr::new(127, 0, 1 + (n / 250 % 250) as u8, 2 + (n % 250) as u8);
            socket.set_reuse_address(true)?;
            socket.bind(&SocketAddr::from((own, 0)).into())?;
        }
        match socket.connect(&self.address.into()) {
            Err(error) if error.raw_os_error() != Some(IN_PROGRESS) && error.kind() != io::ErrorKind::WouldBlock => {
                return Err(error);
            }
            _ => {}
        }
        let mut stream = TcpStream::from_std(socket.into());
        poll.registry().register(&mut stream, Token(n), Interest::READABLE | Interest::WRITABLE)?;
        Ok(stream)
    }
}

/// EINPROGRESS, for which `io::ErrorKind` has no stable name.
const IN_PROGRESS: i32 = 115;

impl Client {
    fn new(protocol: Box<dyn Protocol>) -> Client {
        Client {
            stream: None,
            protocol,
            step: 0,
            answers: 0,
            output: Vec::new(),
            input: Vec::new(),
            began_ns: 0,
            completed_ns: 0,
            completed: 0,
        }
    }

    fn start(&mut self, stream: TcpStream, first: &Step, now_ns: u64) {
        self.stream = Some(stream);
        self.step = 0;
        self.output.clear();
        self.input.clear();
        self.began_ns = now_ns;
        self.say(first);
    }

    /// Goes on as far as possible without waiting, and without asking the system what the next event will tell: one call
    /// to send a step, one to read its answers. A load generator that makes more of them measures itself.
    fn drive(
        &mut self,
        mut readable: bool,
        steps: &[Step],
        scratch: &mut [u8],
        errors: &mut BTreeMap<String, u64>,
    ) -> State {
        loop {
            match self.flush() {
                // Not connected yet, or the socket is full.
                Ok(()) if !self.output.is_empty() => return State::Waiting,
                Ok(()) => {}
                Err(error) => return State::Failed(error.to_string()),
            }
            let Some(stream) = &mut self.stream else { return State::Waiting };
            if !readable {
                return State::Waiting;
            }
            match stream.read(scratch) {
                Ok(0) => return State::Failed("closed by the server".to_owned()),
                Ok(n) => {
                    self.input.extend_from_slice(&scratch[..n]);
                    // Room is left, so that was all, and what comes next is an event.
                    readable = n == scratch.len();
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return State::Waiting,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return State::Failed(error.to_string()),
            }
            while !self.input.is_empty() {
                match self.protocol.parse(&self.input) {
                    Ok(Parsed::Incomplete) => break,
                    Ok(Parsed::Reply { len, answer, .. }) => {
                        self.input.drain(..len);
                        if let Answer::Error(words) = answer {
                            *errors.entry(words).or_default() += 1;
                        }
                        self.answers = self.answers.saturating_sub(1);
                    }
                    Err(error) => return State::Failed(error.to_string()),
                }
            }
            if self.answers == 0 {
                self.step += 1;
                match steps.get(self.step) {
                    None => return State::Completed,
                    Some(step) => self.say(step),
                }
            }
        }
    }

    fn say(&mut self, step: &Step) {
        self.output.extend_from_slice(&step.request);
        self.answers = step.answers;
    }

    fn flush(&mut self) -> io::Result<()> {
        let Some(stream) = &mut self.stream else { return Ok(()) };
        while !self.output.is_empty() {
            match stream.write(&self.output) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(n) => drop(self.output.drain(..n)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}
