//! A worker: one thread, one event loop, the connections it owns.
//!
//! ```text
//!     socket ──▶ input ──▶ frames ──▶ dispatch ──▶ engine
//!                                        │            ┆ (answers that had to wait: mailbox)
//!     socket ◀── output ◀── replies ◀────┴────────────┘
//! ```
//!
//! Nothing here waits for anything but the poll, unless there is a single client, which waits for the disk anyway: see
//! [`Worker::is_one_clients`]. Events are edge-triggered: they say that a socket *became* ready, so
//! `readable` and `writable` are kept until a call says "would block". A connection that used up its turn goes to the
//! end of the queue with its flags as they are; nothing is lost by that, and nobody starves behind a busy one.

mod alarm;
mod deadlines;

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use alarm::Alarm;
use deadlines::note_end;
use engine::Ticket;
use limits::Permit;
use mio::{Events, Interest, Poll, Token};
use replication::Pulled;
use wire::frame::HEADER_LEN;
use wire::{FrameReader, Next, Opcode, Side};

use crate::buffer::Lender;
use crate::commands::{self, Context};
use crate::connection::{Connection, Parked, Phase, Session};
use crate::counts;
use crate::mailbox::{Answer, Arrival, Letter, Mailbox};
use crate::table::Slot;
use crate::{Bounds, Shared, plain_text};

/// Requests a connection may start before it goes to the end of the queue.
const REQUESTS_PER_TURN: u32 = 128;
/// Bytes a connection may read before it goes to the end of the queue.
const BYTES_PER_TURN: usize = 1 << 20;
/// With this many bytes of replies unsent, no further request is started.
const OUTPUT_HIGH_LEN: usize = 4 << 20;
/// The same while all connections together have more unsent than [`Bounds::unsent_plenty_len`]: thousands that do not read
/// may have a little each, but not all of them much.
const OUTPUT_HIGH_SCARCE_LEN: usize = 64 << 10;
/// Replies are sent once this many bytes have gathered, or the input is used up.
const OUTPUT_SEND_LEN: usize = 256 << 10;
/// How much a producer is asked for at a time, and how often in a turn.
const FEED_LEN: usize = 256 << 10;
const FEEDS_PER_TURN: usize = 4;
/// Connections served until the commit log is woken for what they changed, if it sleeps.
const TURNS_PER_CALL: usize = 32;
/// Longest frame of a client that nobody knows yet; its memory is not to be had for the asking.
const STRANGER_FRAME_LEN_MAX: usize = 1 << 20;
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
    /// Connections that have yet to log in and since when, in order.
    strangers: VecDeque<(Duration, Slot)>,
    /// When to look at a connection's other deadlines. Entries that are too early do no harm: see `deadlines`.
    timers: BinaryHeap<Reverse<(Duration, Slot)>>,
    alarm: Alarm,
    /// The alarm went off, and the deadlines were not looked at since.
    rang: bool,
    bounds: Bounds,
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
        let bounds = *shared.bounds.lock();
        Worker {
            bounds,
            timers: BinaryHeap::new(),
            alarm: Alarm::new(&shared.pools, mailbox.clone()),
            rang: false,
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
        let shared = self.shared.clone();
        let mut events = Events::with_capacity(1024);
        let mut letters = Vec::new();
        while self.draining.is_none() || self.open > 0 {
            let may_sleep = self.ready.is_empty() && self.mailbox.may_sleep();
            let patience = (!may_sleep).then_some(Duration::ZERO);
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
            let round = shared.engine.begin_turn();
            // Those that queue themselves again wait for the next round, after fresh events.
            for served in 1..=self.ready.len() {
                let Some(place) = self.ready.pop_front() else { break };
                self.turn(place as usize);
                if served % TURNS_PER_CALL == 0 {
                    round.call();
                }
            }
            if std::mem::take(&mut self.rang) {
                self.keep_deadlines();
            }
            if self.is_one_clients() {
                round.wait();
            }
        }
    }

    /// There is one connection, and it has nothing more to do before it gets an answer: nobody else is kept waiting.
    fn is_one_clients(&self) -> bool {
        self.open == 1 && self.ready.is_empty() && self.draining.is_none()
    }

    fn note(&mut self, event: &mio::event::Event) {
        let slot = slot_of(event.token());
        let Some(connection) = self.find(slot) else { return };
        connection.hung_up |= event.is_read_closed() || event.is_error();
        connection.readable |= event.is_readable() || connection.hung_up;
        connection.writable |= event.is_writable() || event.is_write_closed() || event.is_error();
        self.enqueue(slot);
    }

    fn open_letter(&mut self, letter: Letter) {
        match letter {
            Letter::Adopt(arrival) => self.adopt(arrival),
            Letter::Promoted { slot, permit } => self.promote(slot, permit),
            Letter::Crowded => self.make_room(),
            Letter::Bounds(bounds) => {
                self.bounds = bounds;
                self.slots().into_iter().for_each(|slot| self.set_timer(slot));
                self.set_alarm();
            }
            Letter::Alarm => {
                self.alarm.note_ring();
                self.rang = true;
            }
            Letter::Answer { ticket, answer } => self.finish(ticket, answer),
            Letter::Look { slot } => self.enqueue(slot),
            Letter::MapChanged => {
                self.push_maps();
                self.close_all(self.outsiders());
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
                self.close_all(self.slots());
                self.set_alarm();
            }
        }
    }

    /// Replies to a request that had to wait. Whoever sent it may be gone, and another have its slot.
    fn finish(&mut self, ticket: Ticket, answer: Answer) {
        let slot = Slot { index: ticket.slot, generation: ticket.generation };
        let (shared, mailbox) = (&self.shared, &self.mailbox);
        let Some(Some(connection)) = self.connections.get_mut(shared.table.place_of(slot)) else { return };
        let session = &mut connection.session;
        if session.slot != slot {
            return;
        }
        let Some(at) = session.in_flight.iter().position(|waiting| waiting.request == ticket.request) else { return };
        let call = session.in_flight.remove(at).call;
        session.info.in_flight.store(session.in_flight.len() as u32, Relaxed);
        let out = connection.output.tail(&mut self.lender);
        Context { session, out, shared, mailbox, call }.answer_late(answer);
        self.enqueue(slot);
    }

    /// Tells those who asked for it that there is another map.
    fn push_maps(&mut self) {
        let mut told = Vec::new();
        for connection in self.connections.iter_mut().flatten() {
            let Connection { session, output, phase, .. } = &mut **connection;
            if session.wants_maps() && !session.closing && *phase == Phase::Serving && !self.shared.is_stranger(session)
            {
                commands::push_map(session, output.tail(&mut self.lender), &self.shared.cluster);
                told.push(session.slot);
            }
        }
        told.into_iter().for_each(|slot| self.enqueue(slot));
    }

    /// Nodes that follow somebody here and are in the map no more. When they come again they are told why they were sent away.
    fn outsiders(&self) -> Vec<Slot> {
        let is_outside = |session: &&Session| {
            let replica = session.producer.as_ref().and_then(|producer| producer.replica());
            let bucket = session.selected.as_ref().map(|selected| &*selected.shape.name);
            let map = bucket.and_then(|bucket| self.shared.cluster.map_of(bucket));
            replica.zip(map).is_some_and(|(replica, (map, _))| map.nodes.iter().all(|node| node.name() != replica))
        };
        let sessions = self.connections.iter().flatten().map(|connection| &connection.session);
        sessions.filter(is_outside).map(|session| session.slot).collect()
    }

    fn slots(&self) -> Vec<Slot> {
        self.connections.iter().flatten().map(|connection| connection.session.slot).collect()
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

    fn adopt(&mut self, Arrival { slot, info, stream, permit, counted }: Arrival) {
        let place = self.shared.table.place_of(slot);
        if self.connections.len() <= place {
            self.connections.resize_with(place + 1, || None);
        }
        let mut session = Session::new(slot, info);
        session.closing = self.draining.is_some();
        commands::greet(&mut session, &self.shared);
        let now = self.shared.now();
        let stranger_since = self.shared.is_stranger(&session).then_some(now);
        if stranger_since.is_some() {
            self.expect_login(now, slot);
        }
        let mut connection = Connection {
            stream,
            session,
            input: Default::default(),
            output: Default::default(),
            // The first event may have been before the registration.
            readable: true,
            writable: true,
            hung_up: false,
            eof: false,
            phase: Phase::Serving,
            queued: false,
            received: now,
            sent: now,
            unsent: false,
            need: HEADER_LEN,
            half: false,
            stranger_since,
            counted,
            parked: Parked::No,
            timer: None,
            permit,
        };
        self.open += 1;
        counts::CURR_CONNECTIONS.add(1);
        let interest = Interest::READABLE | Interest::WRITABLE;
        if let Err(error) = self.poll.registry().register(&mut connection.stream, token_of(slot), interest) {
            tracing::warn!(peer = %connection.session.info.peer, "a connection could not be watched: {error}");
            return self.close(connection);
        }
        assert!(self.connections[place].replace(Box::new(connection)).is_none(), "a slot has one connection");
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
        let mut fate = self.serve(&mut connection);
        if connection.output.len() > self.bounds.unsent_len_max {
            note_end(&connection, "unsent", "too many answers are unread");
            fate = Fate::Gone;
        }
        self.note_login(&mut connection);
        connection.input.settle(&mut self.lender);
        connection.output.settle(&mut self.lender);
        self.note_unsent(&connection);
        let slot = connection.session.slot;
        match fate {
            Fate::Gone => return self.close(*connection),
            Fate::Rest | Fate::Again => self.connections[place] = Some(connection),
        }
        if matches!(fate, Fate::Again) {
            self.enqueue(slot);
        }
        self.set_timer(slot);
    }

    /// Keeps count of what the connections have not taken.
    fn note_unsent(&self, connection: &Connection) {
        let now = connection.output.len() as u64;
        let before = connection.session.info.bytes_queued.swap(now, Relaxed);
        if now != before {
            self.shared.unsent_len.fetch_add(now.wrapping_sub(before), Relaxed);
        }
    }

    /// With more unsent than this, a connection starts no further request. Whoever waits for that has something unsent, so
    /// an event of its own will wake it, however the others fare.
    fn output_high_len(&self) -> usize {
        let plenty = self.bounds.unsent_plenty_len as u64;
        if self.shared.unsent_len.load(Relaxed) > plenty { OUTPUT_HIGH_SCARCE_LEN } else { OUTPUT_HIGH_LEN }
    }

    /// Keeps count of who has yet to log in. A login that is tried again and fails makes a stranger anew.
    fn note_login(&mut self, connection: &mut Connection) {
        let is_stranger = self.shared.is_stranger(&connection.session);
        if is_stranger == connection.stranger_since.is_some() {
            return;
        }
        let now = self.shared.now();
        connection.stranger_since = is_stranger.then_some(now);
        if is_stranger {
            self.expect_login(now, connection.session.slot);
            if !connection.in_reserve() {
                self.shared.strangers.stay();
                connection.counted = true;
            }
        } else if std::mem::take(&mut connection.counted) {
            self.shared.stranger_left();
        }
    }

    fn promote(&mut self, slot: Slot, permit: Permit) {
        let shared = self.shared.clone();
        let Some(connection) = self.find(slot) else { return };
        connection.permit = permit;
        connection.parked = Parked::No;
        connection.session.info.in_reserve.store(false, Relaxed);
        if connection.stranger_since.is_some() {
            shared.strangers.stay();
            connection.counted = true;
        }
        self.enqueue(slot);
    }

    /// The one way a connection ends. What it still waits for is not waited for any more: the answer will find another
    /// generation in the slot.
    fn close(&mut self, mut connection: Connection) {
        let slot = connection.session.slot;
        let place = self.shared.table.place_of(slot);
        assert!(self.connections[place].is_none(), "nothing refers to it but its owner");
        connection.output = Default::default();
        self.note_unsent(&connection);
        connection.session.in_flight.clear();
        connection.session.info.in_flight.store(0, Relaxed);
        let Connection { stream, permit, counted, .. } = connection;
        // Takes it off the poll as well.
        drop(stream);
        self.open -= 1;
        counts::CURR_CONNECTIONS.sub(1);
        self.shared.table.release(slot);
        if counted {
            self.shared.stranger_left();
        }
        // Last: it wakes whoever waits for a place.
        drop(permit);
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
        if let Some(producer) = &mut connection.session.producer {
            producer.attend();
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
                Pause::Backlogged => match self.send(connection) {
                    Ok(()) if connection.output.len() > self.output_high_len() => break Pause::Backlogged,
                    Ok(()) => {}
                    Err(_) => return Fate::Gone,
                },
                pause => break pause,
            }
        };
        let Ok(is_full) = self.send(connection).and_then(|()| self.feed(connection)) else { return Fate::Gone };
        connection.half = matches!(pause, Pause::Hungry) && connection.input.len() > 0;
        match pause {
            Pause::Spent => Fate::Again,
            Pause::Closing if connection.session.in_flight.is_empty() && connection.output.len() == 0 => {
                self.part(connection)
            }
            // A client that has hung up altogether, rather than only stopped sending, shows in the next read.
            Pause::Stalled | Pause::Closing if connection.readable && !connection.eof && !is_full => watch(connection),
            Pause::Backlogged if connection.output.len() <= self.output_high_len() => Fate::Again,
            _ if is_full || connection.session.closing && !matches!(pause, Pause::Closing) => Fate::Again,
            _ => Fate::Rest,
        }
    }

    /// Sends what the connection's producer has, as far as the socket takes it. True: it took a turn's worth, and more.
    fn feed(&mut self, connection: &mut Connection) -> io::Result<bool> {
        if connection.session.closing {
            connection.session.producer = None;
        }
        for _ in 0..FEEDS_PER_TURN {
            let is_stuck = connection.output.len() > 0 && !connection.writable;
            let Some(producer) = &mut connection.session.producer else { return Ok(false) };
            let out = connection.output.tail(&mut self.lender);
            // Even then it looks at the clock.
            let bytes_max = if is_stuck { 0 } else { FEED_LEN };
            let pulled = producer.pull(out, bytes_max, self.shared.now());
            self.send(connection)?;
            match pulled {
                Pulled::Dry => return Ok(false),
                Pulled::Full if is_stuck => return Ok(false),
                Pulled::Full => {}
                Pulled::Over(why) => {
                    note_end(connection, "dcp", why);
                    connection.session.producer = None;
                    connection.session.closing = true;
                    return Ok(true);
                }
            }
        }
        Ok(true)
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
        self.alarm.set(until);
        linger_now(connection)
    }

    fn read(&mut self, connection: &mut Connection, bytes: &mut usize) -> io::Result<()> {
        let room = connection.input.room(connection.need, &mut self.lender);
        let room_len = room.len();
        match connection.stream.read(room) {
            Ok(0) => connection.eof = true,
            Ok(count) => {
                connection.input.received(count);
                // Room is left, so that was all, and what comes next is an event: no need to be told "would block".
                connection.readable = count == room_len || connection.hung_up;
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
        let in_reserve = connection.permit.class() == limits::Class::Admin;
        let output_high_len = self.output_high_len();
        let session = &mut connection.session;
        let pause = loop {
            if session.closing {
                break Pause::Closing;
            }
            if out.len() - sent > output_high_len {
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
                    let last_word = plain_text::refusal(input.filled(), self.shared.cluster.admin_port());
                    out.extend_from_slice(last_word.as_bytes());
                    session.closing = true;
                    break Pause::Closing;
                }
            };
            let (header, framing) = match &next {
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
                Next::Frame(frame) => (&frame.header, frame.framing_extras),
                Next::Malformed(header) => (header, &[][..]),
            };
            if !may_start(session, header.opcode, framing) {
                break Pause::Stalled;
            }
            if in_reserve && !commands::allowed_in_reserve(session, header.opcode) {
                if connection.parked == Parked::Refused || self.shared.stuck.load(Relaxed) {
                    Context::new(session, out, &self.shared, &self.mailbox, connection.received).turn_away(header);
                    break Pause::Closing;
                }
                if connection.parked == Parked::No {
                    connection.parked = Parked::Waiting;
                    self.shared.park(session.slot);
                }
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
        if matches!(pause, Pause::Hungry)
            && connection.output.len() >= OUTPUT_SEND_LEN
            && self.send(connection).is_err()
        {
            connection.session.closing = true;
        }
        pause
    }

    /// Sends what is there, as far as the socket takes it.
    fn send(&self, connection: &mut Connection) -> io::Result<()> {
        let mut moved = false;
        while connection.writable && connection.output.len() > 0 {
            match connection.stream.write(connection.output.unsent()) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => {
                    connection.output.sent(count);
                    counts::BYTES_WRITTEN.add(count as u64);
                    moved = true;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => connection.writable = false,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        // What is sent at once, as nearly everything is, needs no look at the clock.
        let unsent = connection.output.len() > 0;
        if connection.unsent != unsent || (unsent && moved) {
            connection.sent = self.shared.now();
        }
        connection.unsent = unsent;
        Ok(())
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
