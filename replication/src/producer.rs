//! One connection's producer: its streams, and what is sent next.
//!
//! Frames are taken out one at a time, as long as the caller has room for them and the consumer has said that it has. Streams
//! with something to send take turns, a snapshot each.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use engine::Bucket;
use types::{CollectionId, Seqno, VbId, VbState};
use wire::dcp::{EndReason, Message, Open, OpenFlags, Packet, StreamFlags, StreamRequest, push_failover_log};
use wire::{Feature, FeatureSet, Status};

use crate::dress::outcome_of_half;
use crate::filter::{Filter, Wishes};
use crate::flow::Flow;
use crate::inbox::{Inbox, Note, StreamNumber, Wake};
use crate::pulse::{Beat, Pulse};
use crate::registry::{Face, Registry};
use crate::rollback::{History, Verdict, decide};
use crate::snapshot::Next;
use crate::stats::{DCP_BYTES_SENT, DCP_ITEMS_SENT, DCP_PRODUCERS, DCP_ROLLBACKS};
use crate::stream::{Place, Plan, Step, Stream};
use crate::takeover::{self, Takeover};
use crate::terms::{Control, Terms};

/// Files a consumer has read at a time: each holds a descriptor and a piece in memory.
const BACKFILLS_MAX: usize = 4;
/// How long a replica hears nothing of what nobody waits for, if its vBucket has nothing else to tell: of a few, and of many. A
/// thousand vBuckets that share 30 000 writes a second have one each 33 ms.
const COMPANY_PAUSE: Duration = Duration::from_millis(10);
const COMPANY_PAUSE_OF_MANY: Duration = Duration::from_millis(50);
const MANY: usize = 64;

/// What a request is answered with if not with success.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    pub status: Status,
    /// For people.
    pub context: Cow<'static, str>,
    /// Of [`Status::Rollback`]: where to.
    pub rollback: Option<Seqno>,
}

impl Refusal {
    pub fn new(status: Status, context: impl Into<String>) -> Refusal {
        Refusal { status, context: Cow::Owned(context.into()), rollback: None }
    }
}

/// Why no more was taken out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pulled {
    /// As much as was asked for; there may be more.
    Full,
    /// There is no more, until the producer is woken or hears of its consumer.
    Dry,
    /// The connection is to be closed, for this reason.
    Over(&'static str),
}

type Key = (VbId, Option<u16>);

/// See the module.
///
/// 1. A stream that could send something is in `ready`, once, unless it waits for its file or for company; its `place` says so.
/// 2. At most [`BACKFILLS_MAX`] streams have their turn at their file; those that wait are in `line`, in order.
pub struct Producer {
    bucket: Arc<Bucket>,
    terms: Terms,
    flow: Flow,
    pulse: Pulse,
    inbox: Arc<Inbox>,
    face: Arc<Face>,
    streams: BTreeMap<StreamNumber, Stream>,
    by_key: HashMap<Key, StreamNumber>,
    made: StreamNumber,
    ready: VecDeque<StreamNumber>,
    line: VecDeque<StreamNumber>,
    /// Those that wait for company, and some that did, each with the moment since when; in that order.
    deferred: VecDeque<(Duration, StreamNumber)>,
    backfills: usize,
    over: Option<&'static str>,
}

impl Producer {
    /// What OPEN asks for. Another producer of the same name ends. `wake` has this one looked at.
    ///
    /// # Errors
    /// The status to answer with.
    pub fn open(
        bucket: &Arc<Bucket>,
        open: &Open<'_>,
        features: FeatureSet,
        registry: &Registry,
        wake: Arc<dyn Wake>,
        now: Duration,
    ) -> Result<Producer, Refusal> {
        if !open.flags.has(OpenFlags::PRODUCER) {
            return Err(Refusal::new(Status::NotSupported, "this end only produces"));
        }
        let terms = Terms::of(open, features)?;
        let name = String::from_utf8_lossy(open.name).into_owned();
        let face = Arc::new(Face::new(bucket.name().to_owned(), name, Arc::clone(&wake)));
        registry.enter(&face);
        DCP_PRODUCERS.add(1);
        Ok(Producer {
            bucket: Arc::clone(bucket),
            terms,
            flow: Flow::default(),
            pulse: Pulse::new(now),
            inbox: Inbox::new(wake),
            face,
            streams: BTreeMap::new(),
            by_key: HashMap::new(),
            made: 0,
            ready: VecDeque::new(),
            line: VecDeque::new(),
            deferred: VecDeque::new(),
            backfills: 0,
            over: None,
        })
    }

    /// What the consumer called itself.
    pub fn name(&self) -> &str {
        &self.face.name
    }

    /// The replica that acknowledges what it is sent, if this is one.
    pub fn replica(&self) -> Option<&str> {
        self.terms.consumer.as_deref().filter(|_| self.terms.sync_writes)
    }

    /// # Errors
    /// The status to answer with; the connection goes on.
    pub fn control(&mut self, name: &[u8], value: &[u8]) -> Result<(), Refusal> {
        match self.terms.control(name, value, !self.streams.is_empty())? {
            Control::Noop(on) => self.pulse.switch(on),
            Control::NoopInterval(interval) => self.pulse.set_interval(interval),
            Control::BufferBytes(bytes) => {
                self.flow.set_room(bytes);
                self.face.room_bytes.store(bytes, Relaxed);
            }
            Control::SyncWrites(on) => self.terms.sync_writes = on,
            Control::ExpiryOpcode(on) => self.terms.expiry_opcode = on,
            Control::Compresses(on) => self.terms.compresses = on,
            Control::StreamIds(on) => self.terms.stream_ids = on,
            Control::EndOnClose(on) => self.terms.end_on_close = on,
            Control::DeletedUserXattrs(on) => self.terms.deleted_user_xattrs = on,
            Control::MarkerVersion(version) => self.terms.marker_version = version,
            Control::Consumer(name) => {
                // The first one counts; nobody says two.
                let _ = self.face.replica.set(name.clone());
                self.terms.consumer = Some(name);
            }
            Control::NewStatuses(on) => self.terms.new_statuses = on,
            Control::Hint => {}
        }
        Ok(())
    }

    /// Opens a stream. Returns the vBucket's histories, which are to be answered before anything is pulled.
    ///
    /// # Errors
    /// The status to answer with; no stream was opened.
    pub fn stream_request(&mut self, packet: &Packet<'_>, request: &StreamRequest<'_>) -> Result<Vec<u8>, Refusal> {
        let refuse = |status, context: &str| Err(Refusal::new(status, context));
        let flags = request.flags;
        if flags.unknown() != 0 {
            return refuse(Status::Einval, &format!("flags {:#x} mean nothing", flags.unknown()));
        }
        let needs_pulse = self.terms.has_xattrs() || !request.filter.is_empty();
        if needs_pulse && !self.pulse.is_on() {
            return refuse(Status::NotSupported, "xattrs and filters need enable_noop first");
        }
        let wishes = Wishes::parse(request.filter, self.terms.knows_collections(), |id| id == CollectionId(0))?;
        if self.terms.sync_writes && matches!(wishes.filter, Filter::Collections(_)) {
            return refuse(Status::NotSupported, "a replica takes every collection");
        }
        if wishes.stream_id.is_some() != self.terms.stream_ids {
            return refuse(Status::DcpStreamIdInvalid, "a stream id is given when they were enabled, and only then");
        }
        let key = (packet.vb, wishes.stream_id);
        if self.by_key.contains_key(&key) {
            return refuse(Status::KeyEexists, "there is such a stream already");
        }
        let Some(vb) = self.bucket.vbucket(packet.vb) else {
            return refuse(Status::NotMyVbucket, "there is no such vBucket");
        };
        let record = vb.log.record();
        let takes_over = flags.has(StreamFlags::TAKEOVER);
        let serves = match record.state {
            VbState::Active => true,
            VbState::Replica | VbState::Pending => !flags.has(StreamFlags::ACTIVE_ONLY) && !takes_over,
            VbState::Dead => false,
        };
        if !serves {
            return refuse(Status::NotMyVbucket, "the vBucket is not served here");
        }
        let (high, purge) = (vb.log.marks.high(), self.bucket.store().purge_seqno(packet.vb));
        let history = History { failover: &record.failover, high, purge };
        let mut start = request.start;
        if flags.has(StreamFlags::FROM_LATEST) {
            start = high;
        } else {
            match decide(request, wishes.purge, &history) {
                Verdict::Accept => {}
                Verdict::OutOfRange => {
                    return refuse(Status::Erange, "the seqnos are out of order, or beyond what there is");
                }
                Verdict::Rollback(to) => {
                    DCP_ROLLBACKS.inc();
                    let context = format!("what is known beyond seqno {to} is of another history");
                    return Err(Refusal { rollback: Some(to), ..Refusal::new(Status::Rollback, context) });
                }
            }
        }
        let mut end = request.end;
        if flags.has(StreamFlags::TO_LATEST) {
            end = end.min(high);
        }
        if flags.has(StreamFlags::DISK_ONLY) {
            end = end.min(vb.log.marks.filed());
        }
        let is_whole = start == request.snap_end && !flags.has(StreamFlags::FROM_LATEST);
        let mut log = Vec::new();
        push_failover_log(&mut log, record.failover.newest_first().iter().map(|entry| (entry.uuid, entry.seqno)));
        self.made += 1;
        let plan = Plan {
            number: self.made,
            vb: packet.vb,
            opaque: packet.opaque,
            stream_id: wishes.stream_id,
            start,
            end,
            half: (if is_whole { start } else { request.snap_start }, start),
            filter: wishes.filter,
            state: record.state,
            uuid: record.failover.current().uuid,
            rollbacks: record.rollbacks,
            purge: if flags.has(StreamFlags::IGNORE_PURGED_TOMBSTONES) { Seqno(u64::MAX) } else { purge },
            takeover: takes_over.then_some(Takeover::Sending),
            skips_deletes: self.terms.open.has(OpenFlags::SKIP_DELETES_IN_BACKFILL),
        };
        let stream = Stream::new(plan, &self.bucket, &self.inbox, self.replica().is_some());
        self.face.streams.lock().insert(self.made, Arc::clone(&stream.face));
        self.by_key.insert(key, self.made);
        self.streams.insert(self.made, stream);
        self.make_ready(self.made);
        Ok(log)
    }

    /// # Errors
    /// The status to answer with.
    pub fn close_stream(&mut self, packet: &Packet<'_>, out: &mut Vec<u8>) -> Result<(), Refusal> {
        let found = self.by_key.get(&(packet.vb, packet.stream_id)).copied();
        let Some(number) = found else {
            let status = if self.terms.new_statuses { Status::DcpStreamNotFound } else { Status::KeyEnoent };
            return Err(Refusal::new(status, "there is no such stream"));
        };
        match self.terms.end_on_close {
            true => self.end_stream(number, EndReason::Closed, out),
            false => drop(self.forget(number)),
        }
        Ok(())
    }

    /// The consumer has dealt with so many bytes.
    pub fn buffer_ack(&mut self, bytes: u32) {
        self.flow.acked(bytes);
        self.note_flow();
    }

    /// A replica has every prepare up to `seqno`. Returns whether there is such a stream, so that it counts.
    pub fn seqno_ack(&mut self, packet: &Packet<'_>, seqno: Seqno) -> bool {
        let found = self.by_key.get(&(packet.vb, packet.stream_id)).and_then(|number| self.streams.get(number));
        found.is_some_and(|stream| {
            stream.face.set_acked(seqno);
            true
        })
    }

    /// The owner deals with what the consumer says, and pulls afterwards: until it is told that there is no more, nobody needs to
    /// wake it.
    pub fn attend(&mut self) {
        self.inbox.attend();
    }

    /// The consumer said something, whatever it was.
    pub fn heard(&mut self, now: Duration) {
        self.pulse.heard(now);
    }

    /// The consumer answered a message. If it could not deal with one of a stream, the stream ends.
    pub fn answered(&mut self, opcode: wire::Opcode, status: Option<Status>, opaque: u32) {
        if opcode == wire::Opcode::DcpNoop {
            self.pulse.answered();
        } else if opcode == wire::Opcode::DcpSetVbucketState && status == Some(Status::Success) {
            let of_it = self.streams.values_mut().find(|stream| stream.plan.opaque == opaque);
            let Some(stream) = of_it else { return };
            let number = stream.plan.number;
            match stream.answered(&self.inbox) {
                Ok(()) => self.make_ready(number),
                Err(_) => drop(self.forget(number)),
            }
        } else if status != Some(Status::Success) {
            let of_it = |stream: &&Stream| stream.plan.opaque == opaque;
            let numbers: Vec<_> = self.streams.values().filter(of_it).map(|stream| stream.plan.number).collect();
            numbers.into_iter().for_each(|number| drop(self.forget(number)));
        }
    }

    /// When it is to be looked at by the clock.
    pub fn deadline(&self) -> Option<Duration> {
        self.pulse.next().into_iter().chain(self.deferred.front().map(|(since, _)| *since + self.company_pause())).min()
    }

    /// Appends frames to `out`, about `bytes_max` bytes of them.
    pub fn pull(&mut self, out: &mut Vec<u8>, bytes_max: usize, now: Duration) -> Pulled {
        if self.face.is_replaced() {
            self.over = Some("its consumer has opened another connection");
        }
        match self.pulse.beat(now) {
            Beat::Nothing => {}
            Beat::Ask => {
                Packet::new(Message::Noop).encode(out);
                self.pulse.asked(now);
            }
            Beat::Dead(why) => self.over = Some(why),
        }
        if let Some(why) = self.over {
            return Pulled::Over(why);
        }
        let full = out.len() + bytes_max;
        loop {
            self.collect(out, now);
            self.end_deferrals(now);
            while let Some(&number) = self.ready.front()
                && !self.flow.is_shut()
            {
                if out.len() >= full {
                    return Pulled::Full;
                }
                self.advance(number, out);
            }
            if self.inbox.rest() {
                return Pulled::Dry;
            }
        }
    }

    /// Looks at what others left word of.
    fn collect(&mut self, out: &mut Vec<u8>, now: Duration) {
        for note in self.inbox.collect() {
            match note {
                Note::Rung(number) => self.make_ready(number),
                Note::RungLater(number) => self.defer(number, now),
                Note::Read(number, piece) => {
                    let Some(stream) = self.streams.get_mut(&number) else { continue };
                    match stream.take_piece(&self.terms, piece) {
                        Ok(()) => self.make_ready(number),
                        Err(reason) => self.end_stream(number, reason, out),
                    }
                }
                Note::LetGo(number, true) => {
                    if let Some(stream) = self.streams.get_mut(&number) {
                        stream.let_go();
                    }
                    self.make_ready(number);
                }
                Note::LetGo(number, false) => self.end_stream(number, EndReason::StateChanged, out),
            }
        }
    }

    /// Does one step of the stream at the front.
    fn advance(&mut self, number: StreamNumber, out: &mut Vec<u8>) {
        let stream = self.streams.get_mut(&number).expect("what is ready is there");
        let had_turn = stream.has_turn();
        let step = stream.step(&self.terms);
        if had_turn && !stream.has_turn() {
            self.backfills -= 1;
        }
        match step {
            Step::Send(next) => self.send(number, next, out),
            Step::Tell(state) => self.tell(number, state, out),
            Step::Rest => self.unready(number),
            Step::ReadOn => {
                stream.read_on(&self.inbox);
                self.unready(number);
            }
            Step::WantsTurn => {
                self.unready(number);
                self.queue_up(number);
            }
            Step::End(reason) => self.end_stream(number, reason, out),
        }
        self.give_turns();
    }

    /// Lets those at the front of the line read their files.
    fn give_turns(&mut self) {
        while self.backfills < BACKFILLS_MAX
            && let Some(number) = self.line.pop_front()
        {
            // Whoever was closed meanwhile left the line.
            let stream = self.streams.get_mut(&number).expect("what waits is there");
            stream.place = Place::Nowhere;
            self.backfills += 1;
            stream.read_on(&self.inbox);
        }
    }

    fn send(&mut self, number: StreamNumber, next: Next, out: &mut Vec<u8>) {
        let stream = self.streams.get_mut(&number).expect("what is ready is there");
        let Plan { vb, opaque, stream_id, .. } = stream.plan;
        let before = out.len();
        let mut put = |message: Message<'_>| Packet { vb, opaque, stream_id, message }.encode(out);
        let dressed = match next {
            Next::Marker(marker) => {
                put(Message::SnapshotMarker(marker));
                Ok(())
            }
            Next::Advanced(seqno) => {
                stream.face.note_sent(seqno, 0);
                put(Message::SeqnoAdvanced(seqno));
                Ok(())
            }
            Next::Item(item) => {
                stream.face.note_sent(item.seqno(), 1);
                DCP_ITEMS_SENT.inc();
                self.terms.dress(&outcome_of_half(stream.plan.half, item), put)
            }
        };
        if let Err(why) = dressed {
            tracing::warn!(bucket = self.bucket.name(), vb = vb.0, "a stream ends: {why}");
            return self.end_stream(number, EndReason::BackfillFailed, out);
        }
        let rests = stream.may_rest();
        if !rests && stream.is_at_a_pause() {
            // The next snapshot is somebody else's.
            self.ready.rotate_left(1);
        }
        self.charge(out.len() - before);
        if rests {
            self.unready(number);
        }
    }

    /// Has the receiver of a vBucket that moves become something else. It takes our histories along, and the chains.
    fn tell(&mut self, number: StreamNumber, state: VbState, out: &mut Vec<u8>) {
        let stream = self.streams.get(&number).expect("what is ready is there");
        let Plan { vb, opaque, stream_id, .. } = stream.plan;
        let details = match self.terms.features.has(Feature::Json) {
            true => takeover::details(&stream.record()),
            false => String::new(),
        };
        let before = out.len();
        let message = Message::SetVbucketState { state, details: details.as_bytes() };
        Packet { vb, opaque, stream_id, message }.encode(out);
        self.charge(out.len() - before);
    }

    fn charge(&mut self, bytes: usize) {
        DCP_BYTES_SENT.add(bytes as u64);
        self.face.bytes_sent.fetch_add(bytes as u64, Relaxed);
        self.flow.sent(bytes);
        self.note_flow();
    }

    fn note_flow(&self) {
        self.face.unacked_bytes.store(self.flow.unacked_bytes(), Relaxed);
    }

    fn end_stream(&mut self, number: StreamNumber, reason: EndReason, out: &mut Vec<u8>) {
        let Some(stream) = self.forget(number) else { return };
        let Plan { vb, opaque, stream_id, .. } = stream.plan;
        let before = out.len();
        Packet { vb, opaque, stream_id, message: Message::StreamEnd(reason) }.encode(out);
        tracing::debug!(bucket = self.bucket.name(), vb = vb.0, name = self.name(), "a stream ends: {}", reason.text());
        self.charge(out.len() - before);
    }

    /// Takes a stream out. What was read for it is not waited for.
    fn forget(&mut self, number: StreamNumber) -> Option<Stream> {
        let stream = self.streams.remove(&number)?;
        self.by_key.remove(&(stream.plan.vb, stream.plan.stream_id));
        self.face.streams.lock().remove(&number);
        self.ready.retain(|other| *other != number);
        self.line.retain(|other| *other != number);
        if stream.has_turn() {
            self.backfills -= 1;
            self.give_turns();
        }
        Some(stream)
    }

    /// One that waits for its turn at the file has nothing to say before.
    fn make_ready(&mut self, number: StreamNumber) {
        if let Some(stream) = self.streams.get_mut(&number)
            && matches!(stream.place, Place::Nowhere | Place::Deferred { .. })
        {
            stream.place = Place::Ready;
            self.ready.push_back(number);
        }
    }

    fn defer(&mut self, number: StreamNumber, now: Duration) {
        if let Some(stream) = self.streams.get_mut(&number)
            && stream.place == Place::Nowhere
        {
            stream.place = Place::Deferred { since: now };
            self.deferred.push_back((now, number));
        }
    }

    fn company_pause(&self) -> Duration {
        if self.deferred.len() < MANY { COMPANY_PAUSE } else { COMPANY_PAUSE_OF_MANY }
    }

    /// When the time of one is over, those go along that have waited for half of theirs: there is one look for many.
    fn end_deferrals(&mut self, now: Duration) {
        let pause = self.company_pause();
        if self.deferred.front().is_none_or(|(since, _)| *since + pause > now) {
            return;
        }
        while let Some((since, number)) = self.deferred.pop_front_if(|(since, _)| *since + pause / 2 <= now) {
            // One that found company may wait for the next.
            if self.streams.get(&number).is_some_and(|stream| stream.place == (Place::Deferred { since })) {
                self.make_ready(number);
            }
        }
    }

    fn queue_up(&mut self, number: StreamNumber) {
        if let Some(stream) = self.streams.get_mut(&number) {
            stream.place = Place::InLine;
            self.line.push_back(number);
        }
    }

    /// The stream at the front has nothing to send for now.
    fn unready(&mut self, number: StreamNumber) {
        if let Some(stream) = self.streams.get_mut(&number) {
            stream.place = Place::Nowhere;
        }
        assert_eq!(self.ready.pop_front(), Some(number), "the stream at the front does its step");
    }
}

impl Drop for Producer {
    fn drop(&mut self) {
        DCP_PRODUCERS.sub(1);
    }
}
