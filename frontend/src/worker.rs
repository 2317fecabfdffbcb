//! A worker: one thread, one event loop, the connections it owns.
//!
//! ```text
//!     socket ──▶ input ──▶ frames ──▶ dispatch ──▶ engine
//!                                        │            ┆ (answers that had to wait: mailbox)
//!     socket ◀── output ◀── replies ◀────┴────────────┘
//! ```
//!
//! Nothing here waits for anything but the poll. Events are edge-triggered: they say that a socket *became* ready, so
//! `readable` and `writable` are kept until a call says "would block". A connection that used up its turn goes to the
//! end of the queue with its flags as they are; nothing is lost by that, and nobody starves behind a busy one.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use mio::{Events, Interest, Poll, Token};
use wire::frame::HEADER_LEN;
use wire::{FrameReader, Next, Opcode, Side};

use crate::Shared;
use crate::buffer::Lender;
use crate::commands::{self, Context};
use crate::connection::{Connection, Info, Phase, Session};
use crate::counts;
use crate::mailbox::{Letter, Mailbox};
use crate::table::Slot;

/// Requests a connection may start before it goes to the end of the queue.
const REQUESTS_PER_TURN: u32 = 128;
/// Bytes a connection may read before it goes to the end of the queue.
const BYTES_PER_TURN: usize = 1 << 20;
/// With this many bytes of replies unsent, no further request is started.
const OUTPUT_HIGH_LEN: usize = 4 << 20;
/// Replies are sent once this many bytes have gathered, or the input is used up.
const OUTPUT_SEND_LEN: usize = 256 << 10;
/// Longest frame of a client that nobody knows yet; its memory is not to be had for the asking.
const STRANGER_FRAME_LEN_MAX: usize = 1 << 20;
/// How long a client may take to log in.
const LOGIN_MAX: Duration = Duration::from_secs(30);
/// Requests of one connection that may be under way together.
const IN_FLIGHT_MAX: usize = 32;
/// How long a closed connection is kept to see the client's end of it.
const LINGER: Duration = Duration::from_secs(2);
/// The same while shutting down.
const LINGER_DRAINING: Duration = Duration::from_millis(250);

pub(crate) const WAKE: Token = Token(usize::MAX);

pub(crate) struct Worker {
    poll: Poll,
    shared: Arc<Shared>,
    mailbox: Arc<Mailbox>,
    /// By place; the table's slots of this worker.
    connections: Vec<Option<Box<Connection>>>,
    open: usize,
    ready: VecDeque<u32>,
    /// Closed connections and when to forget them, about in order.
    lingering: VecDeque<(Duration, Slot)>,
    /// Connections that have yet to log in and by when, in order.
    strangers: VecDeque<(Duration, Slot)>,
    lender: Lender,
    draining: Option<Duration>,
}

/// What becomes of a connection after its turn.
enum Fate {
    /// It waits for an event or an answer.
    Rest,
    /// It could go on.
    Again,
    Gone,
}

/// Why no further request was started.
enum Pause {
    /// The input holds no whole frame.
    Hungry,
    /// An answer must come first.
    Stalled,
    /// Too much is unsent.
    Backlogged,
    /// The turn is over.
    Spent,
    /// The connection is closing.
    Closing,
}

impl Worker {
    pub fn new(poll: Poll, shared: Arc<Shared>, mailbox: Arc<Mailbox>) -> Worker {
        Worker {
            poll,
            shared,
            mailbox,
            connections: Vec::new(),
            open: 0,
            ready: VecDeque::new(),
            lingering: VecDeque::new(),
            strangers: VecDeque::new(),
            lender: Lender::default(),
            draining: None,
        }
    }

    pub fn run(mut self) {
        let mut events = Events::with_capacity(1024);
        let mut letters = Vec::new();
        while self.draining.is_none() || self.open > 0 {
            let patience = self.patience();
            match self.poll.poll(&mut events, patience) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => panic!("waiting for events: {error}"),
            }
            for event in &events {
                if event.token() != WAKE {
                    self.note(event);
                }
            }
            self.mailbox.collect(&mut letters);
            for letter in letters.drain(..) {
                self.open_letter(letter);
            }
            // Those that queue themselves again wait for the next round, after fresh events.
            for _ in 0..self.ready.len() {
                let Some(place) = self.ready.pop_front() else { break };
                self.turn(place as usize);
            }
            self.forget_the_dead();
        }
    }

    /// How long the poll may wait.
    fn patience(&mut self) -> Option<Duration> {
        if !self.ready.is_empty() {
            return Some(Duration::ZERO);
        }
        self.skip_acquaintances();
        let first = |queue: &VecDeque<(Duration, Slot)>| queue.front().map(|(until, _)| *until);
        let deadlines = [first(&self.lingering), first(&self.strangers), self.draining];
        let next = deadlines.into_iter().flatten().min()?;
        // Rounded up to what the poll can tell apart, so that it does not spin through the last millisecond.
        Some(next.saturating_sub(self.shared.now()) + Duration::from_millis(1))
    }

    /// Takes those off the front of the strangers that are none any more.
    fn skip_acquaintances(&mut self) {
        while let Some(&(_, slot)) = self.strangers.front() {
            let shared = self.shared.clone();
            if self.find(slot).is_some_and(|connection| shared.is_stranger(&connection.session)) {
                return;
            }
            self.strangers.pop_front();
        }
    }

    fn note(&mut self, event: &mio::event::Event) {
        let slot = slot_of(event.token());
        let Some(connection) = self.find(slot) else { return };
        connection.readable |= event.is_readable() || event.is_read_closed() || event.is_error();
        connection.writable |= event.is_writable() || event.is_write_closed() || event.is_error();
        self.enqueue(slot);
    }

    fn open_letter(&mut self, letter: Letter) {
        match letter {
            Letter::Adopt { slot, info, stream } => self.adopt(slot, info, stream),
            Letter::Answer { ticket, answer } => {
                let slot = Slot { index: ticket.slot, generation: ticket.generation };
                let (shared, mailbox) = (self.shared.clone(), self.mailbox.clone());
                let place = shared.table.place_of(slot);
                let Some(Some(connection)) = self.connections.get_mut(place) else { return };
                if connection.session.slot != slot {
                    return;
                }
                let flight = &mut connection.session.in_flight;
                let Some(at) = flight.iter().position(|w| w.request == ticket.request) else { return };
                let waiting = flight.remove(at);
                connection.session.info.in_flight.store(flight.len() as u32, Relaxed);
                let out = connection.output.tail(&mut self.lender);
                let session = &mut connection.session;
                Context { session, out, shared: &shared, mailbox: &mailbox, call: waiting.call }.answer_late(answer);
                self.enqueue(slot);
            }
            Letter::BucketGone { name } => {
                let sessions = self.connections.iter().flatten().map(|connection| &connection.session);
                let of_it = |session: &&Session| session.selected.as_ref().is_some_and(|s| s.shape.name == *name);
                self.close_all(sessions.filter(of_it).map(|session| session.slot).collect());
            }
            Letter::Drain { until } => {
                self.draining = Some(until);
                let soon = self.shared.now() + LINGER_DRAINING;
                self.lingering.iter_mut().for_each(|(until, _)| *until = soon.min(*until));
                self.close_all(self.connections.iter().flatten().map(|c| c.session.slot).collect());
            }
        }
    }

    /// Lets connections end as soon as what is under way is answered.
    fn close_all(&mut self, slots: Vec<Slot>) {
        for slot in slots {
            if let Some(connection) = self.find(slot) {
                connection.session.closing = true;
            }
            self.enqueue(slot);
        }
    }

    fn adopt(&mut self, slot: Slot, info: Arc<Info>, mut stream: mio::net::TcpStream) {
        let place = self.shared.table.place_of(slot);
        if self.connections.len() <= place {
            self.connections.resize_with(place + 1, || None);
        }
        let interest = Interest::READABLE | Interest::WRITABLE;
        if let Err(error) = self.poll.registry().register(&mut stream, token_of(slot), interest) {
            tracing::warn!(peer = %info.peer, "a connection could not be watched: {error}");
            drop(stream);
            self.shared.release(slot);
            return;
        }
        let mut session = Session::new(slot, info);
        session.closing = self.draining.is_some();
        commands::greet(&mut session, &self.shared);
        if self.shared.is_stranger(&session) {
            self.skip_acquaintances();
            self.strangers.push_back((self.shared.now() + LOGIN_MAX, slot));
        }
        let connection = Connection {
            stream,
            session,
            input: Default::default(),
            output: Default::default(),
            // The first event may have been before the registration.
            readable: true,
            writable: true,
            eof: false,
            phase: Phase::Serving,
            queued: false,
            received: self.shared.now(),
            need: HEADER_LEN,
        };
        assert!(self.connections[place].replace(Box::new(connection)).is_none(), "a slot has one connection");
        self.open += 1;
        counts::CURR_CONNECTIONS.add(1);
        self.enqueue(slot);
    }

    fn find(&mut self, slot: Slot) -> Option<&mut Connection> {
        let connection = self.connections.get_mut(self.shared.table.place_of(slot))?.as_deref_mut()?;
        (connection.session.slot == slot).then_some(connection)
    }

    fn enqueue(&mut self, slot: Slot) {
        let place = self.shared.table.place_of(slot) as u32;
        let Some(connection) = self.find(slot) else { return };
        if !std::mem::replace(&mut connection.queued, true) {
            self.ready.push_back(place);
        }
    }

    fn turn(&mut self, place: usize) {
        let Some(mut connection) = self.connections.get_mut(place).and_then(Option::take) else { return };
        connection.queued = false;
        let fate = self.serve(&mut connection);
        connection.input.settle(&mut self.lender);
        connection.output.settle(&mut self.lender);
        connection.session.info.bytes_queued.store(connection.output.len() as u64, Relaxed);
        let slot = connection.session.slot;
        match fate {
            Fate::Gone => return self.close(*connection),
            Fate::Rest | Fate::Again => self.connections[place] = Some(connection),
        }
        if matches!(fate, Fate::Again) {
            self.enqueue(slot);
        }
    }

    /// The one way a connection ends.
    fn close(&mut self, mut connection: Connection) {
        // An error here leaves nothing to be done: dropping the stream closes it either way.
        let _ = self.poll.registry().deregister(&mut connection.stream);
        let slot = connection.session.slot;
        drop(connection);
        self.open -= 1;
        counts::CURR_CONNECTIONS.sub(1);
        self.shared.release(slot);
    }

    fn forget_the_dead(&mut self) {
        if self.lingering.is_empty() && self.strangers.is_empty() && self.draining.is_none() {
            return;
        }
        let now = self.shared.now();
        while self.strangers.front().is_some_and(|(until, _)| *until <= now) {
            let Some((_, slot)) = self.strangers.pop_front() else { break };
            let shared = self.shared.clone();
            if let Some(connection) = self.find(slot)
                && shared.is_stranger(&connection.session)
            {
                tracing::debug!(peer = %connection.session.info.peer, "closing: it did not log in in time");
                self.close_all(vec![slot]);
            }
        }
        while self.lingering.front().is_some_and(|(until, _)| *until <= now) {
            let Some((_, slot)) = self.lingering.pop_front() else { break };
            self.drop_slot(slot);
        }
        if self.draining.is_some_and(|until| until <= now) {
            let slots: Vec<Slot> = self.connections.iter().flatten().map(|c| c.session.slot).collect();
            slots.into_iter().for_each(|slot| self.drop_slot(slot));
        }
    }

    fn drop_slot(&mut self, slot: Slot) {
        if self.find(slot).is_some()
            && let Some(connection) = self.connections[self.shared.table.place_of(slot)].take()
        {
            self.close(*connection);
        }
    }

    fn serve(&mut self, connection: &mut Connection) -> Fate {
        if let Phase::Lingering { .. } = connection.phase {
            return linger(connection);
        }
        let (mut requests, mut bytes) = (REQUESTS_PER_TURN, BYTES_PER_TURN);
        let pause = loop {
            match self.start_requests(connection, &mut requests) {
                Pause::Hungry if connection.eof => break Pause::Closing,
                Pause::Hungry if !connection.readable => break Pause::Hungry,
                Pause::Hungry if bytes == 0 => break Pause::Spent,
                Pause::Hungry => match self.read(connection, &mut bytes) {
                    Ok(()) => {}
                    Err(_) => return Fate::Gone,
                },
                Pause::Backlogged => match send(connection) {
                    Ok(()) if connection.output.len() > OUTPUT_HIGH_LEN => break Pause::Backlogged,
                    Ok(()) => {}
                    Err(_) => return Fate::Gone,
                },
                pause => break pause,
            }
        };
        if send(connection).is_err() {
            return Fate::Gone;
        }
        match pause {
            Pause::Spent => Fate::Again,
            Pause::Closing if connection.session.in_flight.is_empty() && connection.output.len() == 0 => {
                self.part(connection)
            }
            // A client that has hung up altogether, rather than only stopped sending, shows in the next read.
            Pause::Stalled | Pause::Closing if connection.readable && !connection.eof => watch(connection),
            Pause::Backlogged if connection.output.len() <= OUTPUT_HIGH_LEN => Fate::Again,
            _ => Fate::Rest,
        }
    }

    /// Everything is said: shuts our end, and waits for the client's unless it is shut already.
    fn part(&mut self, connection: &mut Connection) -> Fate {
        if connection.eof || connection.stream.shutdown(Shutdown::Write).is_err() {
            return Fate::Gone;
        }
        let linger = if self.draining.is_some() { LINGER_DRAINING } else { LINGER };
        let until = self.shared.now() + linger;
        connection.phase = Phase::Lingering { until };
        self.lingering.push_back((until, connection.session.slot));
        linger_now(connection)
    }

    fn read(&mut self, connection: &mut Connection, bytes: &mut usize) -> io::Result<()> {
        let room = connection.input.room(connection.need, &mut self.lender);
        match connection.stream.read(room) {
            Ok(0) => connection.eof = true,
            Ok(count) => {
                connection.input.received(count);
                connection.received = self.shared.now();
                counts::BYTES_READ.add(count as u64);
                *bytes = bytes.saturating_sub(count);
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => connection.readable = false,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Starts the requests in the input, as far as they may be started now.
    fn start_requests(&mut self, connection: &mut Connection, requests: &mut u32) -> Pause {
        let reader = FrameReader::new(Side::Server);
        // Taken out, so that a frame can borrow from it while the rest of the connection is worked on.
        let mut input = std::mem::take(&mut connection.input);
        let sent = connection.output.sent_len();
        let out = connection.output.tail(&mut self.lender);
        let session = &mut connection.session;
        let pause = loop {
            if session.closing {
                break Pause::Closing;
            }
            if out.len() - sent > OUTPUT_HIGH_LEN {
                break Pause::Backlogged;
            }
            if *requests == 0 {
                break Pause::Spent;
            }
            let next = match reader.next(input.filled()) {
                Ok(next) => next,
                Err(close) => {
                    tracing::debug!(peer = %session.info.peer, "closing: {close}");
                    counts::PROTOCOL_ERRORS.inc();
                    session.closing = true;
                    break Pause::Closing;
                }
            };
            let (code, framing) = match &next {
                Next::Need(need) if *need > STRANGER_FRAME_LEN_MAX && self.shared.is_stranger(session) => {
                    tracing::debug!(peer = %session.info.peer, "closing: a frame of {need} bytes before the login");
                    counts::PROTOCOL_ERRORS.inc();
                    session.closing = true;
                    break Pause::Closing;
                }
                Next::Need(need) => {
                    connection.need = *need;
                    break Pause::Hungry;
                }
                Next::Frame(frame) => (frame.header.opcode, frame.framing_extras),
                Next::Malformed(header) => (header.opcode, &[][..]),
            };
            if !may_start(session, code, framing) {
                break Pause::Stalled;
            }
            let mut context = Context::new(session, out, &self.shared, &self.mailbox, connection.received);
            let len = match next {
                Next::Frame(frame) => {
                    context.run(&frame);
                    frame.frame_len()
                }
                Next::Malformed(header) => {
                    context.refuse(&header);
                    header.frame_len()
                }
                Next::Need(_) => unreachable!("handled above"),
            };
            input.consume(len);
            *requests -= 1;
        };
        if session.closing {
            // Whatever follows is not ours to answer any more.
            input.consume(input.len());
        }
        connection.input = input;
        if matches!(pause, Pause::Hungry) && connection.output.len() >= OUTPUT_SEND_LEN && send(connection).is_err() {
            connection.session.closing = true;
        }
        pause
    }
}

/// Whether a request may start beside those under way.
fn may_start(session: &Session, code: u8, framing: &[u8]) -> bool {
    let flight = &session.in_flight;
    if flight.is_empty() {
        return true;
    }
    session.features.has(wire::Feature::UnorderedExecution)
        && flight.len() < IN_FLIGHT_MAX
        && flight.iter().all(|waiting| !waiting.fence)
        && Opcode::from_wire(code).is_ok_and(|opcode| opcode.info().reorderable())
        && !is_barrier(framing)
}

fn is_barrier(framing: &[u8]) -> bool {
    wire::frame_info::Objects(framing).map_while(Result::ok).any(|object| object.id == 0)
}

/// Sends what is there, as far as the socket takes it.
fn send(connection: &mut Connection) -> io::Result<()> {
    while connection.writable && connection.output.len() > 0 {
        match connection.stream.write(connection.output.unsent()) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(count) => {
                connection.output.sent(count);
                counts::BYTES_WRITTEN.add(count as u64);
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => connection.writable = false,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Looks whether a client whose requests are not read now is still there.
fn watch(connection: &mut Connection) -> Fate {
    match connection.stream.peek(&mut [0]) {
        Ok(0) => connection.eof = true,
        Ok(_) => {}
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => connection.readable = false,
        Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
        Err(_) => return Fate::Gone,
    }
    Fate::Rest
}

fn linger(connection: &mut Connection) -> Fate {
    if connection.readable { linger_now(connection) } else { Fate::Rest }
}

/// Throws away what still arrives, a turn's worth.
fn linger_now(connection: &mut Connection) -> Fate {
    let mut scrap = [0; 16 * 1024];
    for _ in 0..16 {
        match connection.stream.read(&mut scrap) {
            Ok(0) => return Fate::Gone,
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                connection.readable = false;
                return Fate::Rest;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return Fate::Gone,
        }
    }
    Fate::Again
}

const _: () = assert!(usize::BITS == 64, "an event's token holds a slot and its generation");

fn token_of(slot: Slot) -> Token {
    Token((slot.generation as usize) << 32 | slot.index as usize)
}

fn slot_of(token: Token) -> Slot {
    Slot { index: token.0 as u32, generation: (token.0 >> 32) as u32 }
}
