//! One connection's consumer: the replicas here that follow a peer, and what is said to it.
//!
//! ```text
//!     peer ── marker, mutation, prepare, … ──▶ receive ──▶ engine
//!          ◀── BUFFER_ACK, SEQNO_ACK, NOOP ── output ◀──┘   ┆ "prepared up to here", later
//! ```
//!
//! | place | happens | goes to |
//! |---|---|---|
//! | Due | it is asked for | Asked |
//! | Asked | the peer agrees, with its histories | Following |
//! | Asked | the peer says how far to go back | GoingBack |
//! | Asked, Following | refused, ended, or what came makes no sense | Resting |
//! | Following | the vBucket is to be taken over | Asked, for that |
//! | GoingBack | the engine has gone back | Due, or Resting if it could not |
//! | Resting | its pause is over | Due |
//!
//! Whoever owns the connection has logged in, hands over what it reads, and sends what is in the output. A change that
//! cannot be taken now is not consumed, and nothing behind it: the peer stops when its room is used up.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Weak};
use std::time::Duration;

use changelog::{FailoverEntry, FailoverTable};
use engine::{AckNudge, ApplyError, Bucket, Change, Given, Mailbox, OpResult, Ticket, Waiter};
use types::{DeleteSource, Meta, Seqno, VbId, VbState};
use wire::dcp::{
    Deletion, MarkerDetail, Message, Mutation, Open, OpenFlags, Packet, SnapshotFlags, StreamFlags, StreamRequest,
    failover_log, rollback_seqno,
};
use wire::{Close, Feature, FeatureSet, Frame, FrameReader, Next, Opcode, Reply, Side, Status};

use crate::inbox::{Inbox, Wake};
use crate::stats::{DCP_CONSUMERS, DCP_ITEMS_RECEIVED, DCP_ROLLBACKS_DONE, DCP_STREAMS_RESTARTED};
use crate::takeover;

/// What the peer may send before we say that we have dealt with some of it.
const ROOM_BYTES: usize = 10 << 20;
/// After so much silence the peer asks whether we are there.
const NOOP_INTERVAL_S: u64 = 20;
/// A peer that says nothing for so long is gone.
const SILENCE_MAX: Duration = Duration::from_secs(3 * NOOP_INTERVAL_S);
/// How long a stream that came to nothing is left alone, at first and at most.
const REST_MIN: Duration = Duration::from_millis(50);
const REST_MAX: Duration = Duration::from_secs(5);
/// How long a change that there is no room for waits.
const LATER: Duration = Duration::from_millis(50);

const OPAQUE_OPEN: u32 = 1;
/// Controls have the opaques behind it, streams those from [`OPAQUE_STREAM`] on.
const OPAQUE_CONTROL: u32 = 2;
const OPAQUE_STREAM: u32 = 1000;

/// Controls without which a replica makes no sense.
const CONTROLS: &[(&str, &str)] = &[
    ("enable_noop", "true"),
    ("enable_sync_writes", "true"),
    ("send_stream_end_on_client_close_stream", "false"),
    ("enable_expiry_opcode", "true"),
];

/// Why the connection is of no use any more.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Broken {
    #[error("the peer refused {what}: {status:?}")]
    Refused { what: String, status: Status },
    #[error("{0}")]
    Wire(#[from] Close),
    #[error("the peer said what makes no sense: {0}")]
    Nonsense(String),
    #[error("nothing was heard of the peer for {SILENCE_MAX:?}")]
    Silent,
}

/// Where a replica's stream is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    Due,
    Asked,
    Following,
    GoingBack,
    Resting { until: Duration },
}

struct Stream {
    place: Place,
    /// Of the request that opened it; what comes under another is of an earlier one.
    opaque: u32,
    /// The last SEQNO_ACK.
    acked: Seqno,
    /// How often in a row it came to nothing.
    failures: u32,
    /// It was asked for to take the vBucket over.
    takes_over: bool,
}

enum Note {
    Prepared(VbId),
    WentBack(VbId, Result<Seqno, String>),
}

/// Has the owner look when the mark of one of its replicas moved.
/// Outlives the consumer.
struct AckBell(Weak<Inbox<Note>>);

impl AckNudge for AckBell {
    fn high_prepared_moved(&self, vb: VbId) {
        if let Some(inbox) = self.0.upgrade() {
            inbox.post(Note::Prepared(vb));
        }
    }
}

/// Histories reach the disk with or before the changes that follow them, so nobody needs to be told.
struct Nobody;

impl Mailbox for Nobody {
    fn deliver(&self, _: Ticket, _: OpResult) {}
}

/// What can be seen of a consumer.
#[derive(Debug, Default)]
pub struct ConsumerFace {
    pub following: AtomicU64,
    pub items: AtomicU64,
    pub bytes: AtomicU64,
    /// How often a stream ended or was refused, and was begun anew.
    pub restarts: AtomicU64,
}

/// See the module.
///
/// 1. At most one consumer follows for a vBucket at a time; its owner sees to that.
/// 2. Bytes are said to be dealt with once their message was, and all are said in the end.
/// 3. What it does for a message does not grow with the number of streams.
/// 4. What is owed is not owed any more when [`Consumer::receive`] returns.
pub struct Consumer {
    bucket: Arc<Bucket>,
    /// This node, as the chains name it.
    node: Box<str>,
    inbox: Arc<Inbox<Note>>,
    streams: BTreeMap<VbId, Stream>,
    /// Streams in [`Place::Following`].
    following: u64,
    /// No stream is due before.
    due_at: Duration,
    out: Vec<u8>,
    opaque: u32,
    /// Controls that the peer has to agree to, in the order of their opaques.
    controls: Vec<(String, String)>,
    unsaid_bytes: usize,
    heard: Duration,
    /// A change waits for room until then.
    full: Option<Duration>,
    /// Have something that the peer is told of once it is on disk, and that nobody was asked to put there yet.
    owed: Vec<VbId>,
    face: Arc<ConsumerFace>,
}

impl Consumer {
    /// What the owner of the connection negotiates.
    pub const FEATURES: FeatureSet = FeatureSet::of(&[
        Feature::Xattr,
        Feature::Xerror,
        Feature::SelectBucket,
        Feature::Snappy,
        Feature::Json,
        Feature::AltRequestSupport,
        Feature::SyncReplication,
        Feature::Collections,
    ]);

    /// Begins: OPEN and what is agreed on are in the output. `node` is the name of this node in the chains.
    pub fn open(
        bucket: &Arc<Bucket>,
        node: &str,
        wake: Arc<dyn Wake>,
        face: Arc<ConsumerFace>,
        now: Duration,
    ) -> Consumer {
        let mut controls: Vec<_> = CONTROLS.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect();
        controls.push(("set_noop_interval".into(), NOOP_INTERVAL_S.to_string()));
        controls.push(("connection_buffer_size".into(), ROOM_BYTES.to_string()));
        controls.push(("consumer_name".into(), node.to_owned()));
        DCP_CONSUMERS.add(1);
        let mut consumer = Consumer {
            bucket: Arc::clone(bucket),
            node: node.into(),
            inbox: Inbox::new(wake),
            streams: BTreeMap::new(),
            following: 0,
            due_at: Duration::MAX,
            out: Vec::new(),
            opaque: OPAQUE_STREAM,
            controls,
            unsaid_bytes: 0,
            heard: now,
            full: None,
            owed: Vec::new(),
            face,
        };
        consumer.introduce(node);
        consumer
    }

    fn introduce(&mut self, node: &str) {
        let flags = OpenFlags::PRODUCER
            .with(OpenFlags::INCLUDE_XATTRS)
            .with(OpenFlags::INCLUDE_DELETE_TIMES)
            .with(OpenFlags::INCLUDE_DELETED_USER_XATTRS);
        let name = format!("replica:{node}:{}", self.bucket.name());
        let name = &name.as_bytes()[..name.len().min(wire::dcp::NAME_LEN_MAX)];
        let open = Message::Open(Open { flags, name, details: b"" });
        Packet { opaque: OPAQUE_OPEN, ..Packet::new(open) }.encode(&mut self.out);
        for (n, (name, value)) in self.controls.iter().enumerate() {
            let control = Message::Control { name: name.as_bytes(), value: value.as_bytes() };
            Packet { opaque: OPAQUE_CONTROL + n as u32, ..Packet::new(control) }.encode(&mut self.out);
        }
    }

    /// Follows for these vBuckets and no others: nothing more is applied to those left out. Asks at once again for those that rest,
    /// and for those that are to be taken over: something may have changed.
    pub fn want(&mut self, vbs: &BTreeSet<VbId>) {
        let left_out: Vec<VbId> = self.streams.keys().filter(|vb| !vbs.contains(vb)).copied().collect();
        for vb in left_out {
            self.close(vb);
            self.put(vb, Place::Due);
            self.streams.remove(&vb);
        }
        for &vb in vbs {
            let takes_over = self.bucket.takes_over(vb);
            let new = Stream { place: Place::Due, opaque: 0, acked: Seqno(0), failures: 0, takes_over: false };
            let stream = self.streams.entry(vb).or_insert(new);
            match stream.place {
                Place::Resting { .. } => {
                    stream.failures = 0;
                    self.put(vb, Place::Due);
                }
                Place::Following if takes_over && !stream.takes_over => {
                    self.close(vb);
                    self.put(vb, Place::Due);
                }
                _ => {}
            }
        }
        self.due_at = Duration::ZERO;
    }

    /// Has the peer end a stream, if there is one.
    fn close(&mut self, vb: VbId) {
        let is_open = |stream: &&Stream| matches!(stream.place, Place::Asked | Place::Following);
        if let Some(stream) = self.streams.get(&vb).filter(is_open) {
            Packet { vb, opaque: stream.opaque, stream_id: None, message: Message::CloseStream }.encode(&mut self.out);
        }
    }

    /// What is to be sent; take out what was.
    pub fn output(&mut self) -> &mut Vec<u8> {
        &mut self.out
    }

    /// Nothing more is to be read until the time has come or the consumer is woken.
    pub fn is_full(&self) -> bool {
        self.full.is_some()
    }

    /// When it is to be looked at by the clock.
    pub fn deadline(&self) -> Duration {
        (self.heard + SILENCE_MAX).min(self.due_at).min(self.full.unwrap_or(Duration::MAX))
    }

    /// Nobody has left word since the last turn: the owner may sleep until the deadline, and will be woken. `false`: another turn
    /// comes first. Until it rests it is not woken.
    pub fn may_sleep(&self) -> bool {
        self.inbox.rest()
    }

    /// Looks at what others left word of and at the clock.
    ///
    /// # Errors
    /// The peer is gone.
    pub fn turn(&mut self, now: Duration) -> Result<(), Broken> {
        if now >= self.heard + SILENCE_MAX && self.full.is_none() {
            return Err(Broken::Silent);
        }
        let (mut prepared, mut back) = (BTreeSet::new(), Vec::new());
        self.inbox.attend();
        for note in self.inbox.collect() {
            match note {
                Note::Prepared(vb) => drop(prepared.insert(vb)),
                Note::WentBack(vb, result) => back.push((vb, result)),
            }
        }
        prepared.into_iter().for_each(|vb| self.say_prepared(vb));
        for (vb, result) in back {
            match result {
                Ok(seqno) => {
                    DCP_ROLLBACKS_DONE.inc();
                    tracing::info!(bucket = self.bucket.name(), vb = vb.0, "went back to seqno {seqno}");
                    self.put(vb, Place::Due);
                }
                Err(why) => self.rest(vb, now, &why),
            }
        }
        if self.due_at <= now {
            self.ask_who_is_due(now);
        }
        if self.full.is_some_and(|until| until <= now) {
            self.full = None;
        }
        self.note_following();
        Ok(())
    }

    fn ask_who_is_due(&mut self, now: Duration) {
        self.due_at = Duration::MAX;
        let mut due = Vec::new();
        for (vb, stream) in &self.streams {
            match stream.place {
                Place::Due => due.push(*vb),
                Place::Resting { until } if until <= now => due.push(*vb),
                Place::Resting { until } => self.due_at = self.due_at.min(until),
                Place::Asked | Place::Following | Place::GoingBack => {}
            }
        }
        due.into_iter().for_each(|vb| self.ask(vb, now));
    }

    fn ask(&mut self, vb: VbId, now: Duration) {
        let is_replica = matches!(self.bucket.vb_state(vb), Some(VbState::Replica | VbState::Pending));
        let point = match self.bucket.resume_point(vb) {
            Ok(point) if is_replica => point,
            _ => return self.rest(vb, now, "it is no replica here"),
        };
        self.opaque = self.opaque.wrapping_add(1).max(OPAQUE_STREAM);
        let takes_over = self.bucket.takes_over(vb);
        let flags = StreamFlags::ACTIVE_ONLY;
        let request = StreamRequest {
            flags: if takes_over { flags.with(StreamFlags::TAKEOVER) } else { flags },
            start: point.seqno,
            end: Seqno(u64::MAX),
            uuid: point.uuid,
            snap_start: point.snapshot_start,
            snap_end: point.snapshot_end,
            filter: b"",
        };
        let message = Message::StreamRequest(request);
        Packet { vb, opaque: self.opaque, stream_id: None, message }.encode(&mut self.out);
        let opaque = self.opaque;
        if let Some(stream) = self.streams.get_mut(&vb) {
            (stream.opaque, stream.takes_over) = (opaque, takes_over);
        }
        self.put(vb, Place::Asked);
    }

    /// The one way from place to place; a new stream begins as due.
    fn put(&mut self, vb: VbId, place: Place) {
        let Some(stream) = self.streams.get_mut(&vb) else { return };
        let before = std::mem::replace(&mut stream.place, place);
        self.following -= u64::from(before == Place::Following);
        self.following += u64::from(place == Place::Following);
        match place {
            Place::Due => self.due_at = Duration::ZERO,
            Place::Resting { until } => self.due_at = self.due_at.min(until),
            Place::Asked | Place::Following | Place::GoingBack => {}
        }
    }

    fn rest(&mut self, vb: VbId, now: Duration, why: &str) {
        let Some(stream) = self.streams.get_mut(&vb) else { return };
        let pause = (REST_MIN * 2u32.saturating_pow(stream.failures.min(16))).min(REST_MAX);
        stream.failures += 1;
        let took_over = std::mem::take(&mut stream.takes_over);
        self.put(vb, Place::Resting { until: now + pause });
        DCP_STREAMS_RESTARTED.inc();
        self.face.restarts.fetch_add(1, Relaxed);
        if took_over {
            self.bucket.end_takeover(vb, why);
        }
        tracing::debug!(bucket = self.bucket.name(), vb = vb.0, ?pause, "its stream rests: {why}");
    }

    /// Tells the peer what a replica has, if that is more than it was told.
    fn say_prepared(&mut self, vb: VbId) {
        let Some(stream) = self.streams.get_mut(&vb).filter(|stream| stream.place == Place::Following) else { return };
        let Some(prepared) = self.bucket.high_prepared(vb).filter(|prepared| *prepared > stream.acked) else { return };
        stream.acked = prepared;
        let message = Message::SeqnoAck(prepared);
        Packet { vb, opaque: stream.opaque, stream_id: None, message }.encode(&mut self.out);
    }

    /// Deals with what was read. Returns how much of it that was; the rest is to be handed over again, with what follows it.
    ///
    /// `leads`: there is nothing more to read, and the caller may block. Then what the peer waits for is made durable here and now,
    /// so that a turn after this tells it, and no thread had to wake another for that.
    ///
    /// # Errors
    /// The connection is to be closed.
    pub fn receive(&mut self, input: &[u8], now: Duration, leads: bool) -> Result<usize, Broken> {
        self.inbox.attend();
        let mut at = 0;
        let result = self.take_all(input, &mut at, now);
        self.say_dealt_with();
        self.make_durable(leads && result.is_ok());
        self.note_following();
        result.map(|()| at)
    }

    fn take_all(&mut self, input: &[u8], at: &mut usize, now: Duration) -> Result<(), Broken> {
        while self.full.is_none() {
            match FrameReader::new(Side::Client).next(&input[*at..])? {
                Next::Frame(frame) => {
                    self.heard = now;
                    if !self.take(&frame, now)? {
                        break;
                    }
                    *at += frame.frame_len();
                }
                Next::Malformed(header) => return Err(Broken::Nonsense(format!("{header:?}"))),
                Next::Need(_) => break,
            }
        }
        Ok(())
    }

    /// What is known already is said before anything else is waited for.
    fn make_durable(&mut self, leads: bool) {
        if self.owed.is_empty() {
            return;
        }
        self.owed.sort_unstable();
        self.owed.dedup();
        self.bucket.make_durable(&self.owed, leads && self.out.is_empty() && self.inbox.is_empty());
        self.owed.clear();
    }

    /// False: not now.
    fn take(&mut self, frame: &Frame<'_>, now: Duration) -> Result<bool, Broken> {
        if !frame.header.magic.is_request() {
            self.answered(frame, now)?;
            return Ok(true);
        }
        let packet = Packet::parse(frame, Consumer::FEATURES).map_err(|error| Broken::Nonsense(error.to_string()))?;
        if packet.message == Message::Noop {
            Reply::new(Opcode::DcpNoop as u8, Status::Success, packet.opaque).encode(&mut self.out);
            return Ok(true);
        }
        if !self.follow(&packet, now) {
            self.full = Some(now + LATER);
            return Ok(false);
        }
        self.unsaid_bytes += frame.frame_len();
        self.face.bytes.fetch_add(frame.frame_len() as u64, Relaxed);
        Ok(true)
    }

    fn answered(&mut self, frame: &Frame<'_>, now: Duration) -> Result<(), Broken> {
        let code = |code| Broken::Nonsense(format!("status {code:#06x}"));
        let status = wire::client::status(frame).map_err(code)?;
        let opaque = frame.header.opaque;
        if (OPAQUE_OPEN..OPAQUE_STREAM).contains(&opaque) {
            let control = self.controls.get((opaque as usize).wrapping_sub(OPAQUE_CONTROL as usize));
            let what = control.map_or("OPEN".to_owned(), |(name, value)| format!("{name}={value}"));
            return match status {
                Status::Success => Ok(()),
                status => Err(Broken::Refused { what, status }),
            };
        }
        let asked = |stream: &&Stream| stream.opaque == opaque && stream.place == Place::Asked;
        let of_request = frame.header.opcode == Opcode::DcpStreamReq as u8;
        let found = self.streams.iter().find(|(_, stream)| of_request && asked(stream)).map(|(vb, _)| *vb);
        let Some(vb) = found else { return Ok(()) };
        match status {
            Status::Success => {
                let log = failover_log(frame.value).and_then(histories);
                let log = log.ok_or_else(|| Broken::Nonsense("histories that are cut short".to_owned()))?;
                self.begin(vb, log, now);
            }
            Status::Rollback => {
                let to = rollback_seqno(frame.value);
                self.go_back(vb, to.ok_or_else(|| Broken::Nonsense("nowhere to go back to".to_owned()))?);
            }
            status => self.rest(vb, now, status.name()),
        }
        Ok(())
    }

    fn begin(&mut self, vb: VbId, log: FailoverTable, now: Duration) {
        let waiter = || Waiter::new(Arc::new(Nobody), Ticket { slot: 0, generation: 0, request: 0 });
        if let engine::Outcome::Done(Err(error)) = self.bucket.adopt_failover_log(vb, log, &waiter) {
            return self.give_up(vb, now, &error.to_string());
        }
        if let Err(error) = self.bucket.tell_acks(vb, Some(Arc::new(AckBell(Arc::downgrade(&self.inbox))))) {
            return self.give_up(vb, now, &error.to_string());
        }
        if let Some(stream) = self.streams.get_mut(&vb) {
            // The peer may have forgotten what it was told.
            stream.acked = Seqno(0);
            let takes_over = stream.takes_over;
            self.put(vb, Place::Following);
            if !takes_over && self.bucket.takes_over(vb) {
                // Wanted since it was asked for.
                self.close(vb);
                return self.put(vb, Place::Due);
            }
        }
        self.say_prepared(vb);
    }

    fn go_back(&mut self, vb: VbId, to: Seqno) {
        self.put(vb, Place::GoingBack);
        tracing::warn!(bucket = self.bucket.name(), vb = vb.0, "what is here beyond seqno {to} is not the peer's");
        let inbox = Arc::clone(&self.inbox);
        let done = move |result: Result<Seqno, engine::OpError>| {
            inbox.post(Note::WentBack(vb, result.map_err(|error| error.to_string())));
        };
        self.bucket.roll_back(vb, to, Box::new(done));
    }

    /// Ends a stream that the peer goes on with.
    fn give_up(&mut self, vb: VbId, now: Duration, why: &str) {
        self.close(vb);
        tracing::warn!(bucket = self.bucket.name(), vb = vb.0, "its stream is begun anew: {why}");
        self.rest(vb, now, why);
    }

    /// Deals with a message of a stream. False: there is no room for it now.
    fn follow(&mut self, packet: &Packet<'_>, now: Duration) -> bool {
        let vb = packet.vb;
        let is_current = |stream: &&mut Stream| stream.opaque == packet.opaque && stream.place == Place::Following;
        let Some(stream) = self.streams.get_mut(&vb).filter(is_current) else { return true };
        if let Message::StreamEnd(reason) = packet.message {
            self.rest(vb, now, reason.text());
            return true;
        }
        if let Message::SetVbucketState { state, details } = packet.message {
            self.be_handed(packet, state, details, now);
            return true;
        }
        match hand_over(&self.bucket, vb, &packet.message) {
            Ok(awaits_disk) => {
                if awaits_disk {
                    self.owed.push(vb);
                }
                stream.failures = 0;
                DCP_ITEMS_RECEIVED.inc();
                self.face.items.fetch_add(1, Relaxed);
                true
            }
            Err(ApplyError::Later(why)) => {
                tracing::debug!(bucket = self.bucket.name(), vb = vb.0, "a change waits: {why}");
                false
            }
            Err(error) => {
                self.give_up(vb, now, &error.to_string());
                true
            }
        }
    }

    /// The peer hands its vBucket over. If it cannot be taken now, the peer is told and gives up.
    fn be_handed(&mut self, packet: &Packet<'_>, state: VbState, details: &[u8], now: Duration) {
        let handed =
            takeover::parse_details(details, &self.node).ok_or_else(|| "histories that are cut short".to_owned());
        let taken = handed.and_then(|(failover, topology)| {
            self.bucket.hand_over(packet.vb, state, failover, topology).map_err(|error| error.to_string())
        });
        let status = if taken.is_ok() { Status::Success } else { Status::Einval };
        Reply::new(Opcode::DcpSetVbucketState as u8, status, packet.opaque).encode(&mut self.out);
        match taken {
            Ok(()) => {
                let name = state.name();
                tracing::info!(
                    bucket = self.bucket.name(),
                    vb = packet.vb.0,
                    "is {name} here, as its node hands it over"
                );
            }
            Err(why) => self.rest(packet.vb, now, &why),
        }
    }

    fn say_dealt_with(&mut self) {
        if self.unsaid_bytes >= ROOM_BYTES / 2 {
            let bytes = std::mem::take(&mut self.unsaid_bytes);
            Packet::new(Message::BufferAck(bytes as u32)).encode(&mut self.out);
        }
    }

    fn note_following(&self) {
        self.face.following.store(self.following, Relaxed);
    }

    /// Where each stream is, in order of vBucket.
    pub fn places(&self) -> impl Iterator<Item = (VbId, Place)> {
        self.streams.iter().map(|(vb, stream)| (*vb, stream.place))
    }
}

impl Drop for Consumer {
    fn drop(&mut self) {
        self.face.following.store(0, Relaxed);
        DCP_CONSUMERS.add(-1);
    }
}

fn histories(newest_first: Vec<(types::VbUuid, Seqno)>) -> Option<FailoverTable> {
    FailoverTable::from_entries(newest_first.into_iter().map(|(uuid, seqno)| FailoverEntry { uuid, seqno }).collect())
}

/// Has the engine take a message of a stream. True: see [`Bucket::take`].
fn hand_over(bucket: &Bucket, vb: VbId, message: &Message<'_>) -> Result<bool, ApplyError> {
    let apply = |change: Change<'_>| bucket.take(vb, &change);
    match *message {
        Message::SnapshotMarker(marker) => {
            let completed = match marker.detail {
                MarkerDetail::V1 => Seqno(0),
                MarkerDetail::V2 { high_completed, .. } | MarkerDetail::V2_2 { high_completed, .. } => high_completed,
            };
            let from_disk = marker.flags.has(SnapshotFlags::DISK).then_some(completed);
            let marker = engine::SnapshotMarker { start: marker.start, end: marker.end, from_disk };
            bucket.begin_snapshot(vb, marker).map(|()| false)
        }
        Message::Mutation(Mutation { seqno, rev, flags, expiry, cas, datatype, key, value }) => {
            let meta = Meta { seqno, cas, rev, flags, expiry, datatype, deleted: None };
            apply(Change::Document(Given { key: key.resolve().as_key(), meta, value: Some(value) }))
        }
        Message::Deletion(deletion) => bury(bucket, vb, &deletion, DeleteSource::Explicit),
        Message::Expiration(deletion) => bury(bucket, vb, &deletion, DeleteSource::Expiry),
        Message::Prepare(p) => {
            let deleted = p.deleted.then_some(DeleteSource::Explicit);
            let (seqno, cas, rev) = (p.seqno, p.cas, p.rev);
            let meta = Meta { seqno, cas, rev, flags: p.flags, expiry: p.expiry, datatype: p.datatype, deleted };
            let value = (!p.deleted || !p.value.is_empty()).then_some(p.value);
            apply(Change::Prepare { given: Given { key: p.key.resolve().as_key(), meta, value }, level: p.level })
        }
        Message::Commit(c) => {
            apply(Change::Commit { key: c.key.resolve().as_key(), prepared: c.prepared, seqno: c.seqno })
        }
        Message::Abort(c) => {
            apply(Change::Abort { key: c.key.resolve().as_key(), prepared: c.prepared, seqno: c.seqno })
        }
        Message::SeqnoAdvanced(seqno) => apply(Change::Advance { seqno }),
        // There is one collection here; its seqno counts all the same.
        Message::SystemEvent(event) => apply(Change::Advance { seqno: event.seqno }),
        _ => Err(ApplyError::Invalid("no message of a stream")),
    }
}

fn bury(bucket: &Bucket, vb: VbId, deletion: &Deletion<'_>, source: DeleteSource) -> Result<bool, ApplyError> {
    let Deletion { seqno, rev, delete_time, cas, datatype, key, value } = *deletion;
    let expiry = delete_time.unwrap_or(0);
    let meta = Meta { seqno, cas, rev, flags: 0, expiry, datatype, deleted: Some(source) };
    let value = (!value.is_empty()).then_some(value);
    bucket.take(vb, &Change::Document(Given { key: key.resolve().as_key(), meta, value }))
}
