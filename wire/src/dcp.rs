//! The replication protocol: what the two ends of a DCP connection say to each other, as values and as bytes.
//!
//! ```text
//! consumer ── OPEN, CONTROL, STREAM_REQ, BUFFER_ACK, SEQNO_ACK ──▶ producer
//! consumer ◀── marker, mutation, deletion, prepare, … STREAM_END ── producer
//! ```
//!
//! All of them are requests, whoever sends them, so both ends read them with [`crate::parse`]. A few are answered by an
//! ordinary response. Which messages suit which end, and in what order they come, is not known here.

use types::{Cas, CollectionId, Datatype, Level, RevSeqno, ScopeId, Seqno, VbId, VbState, VbUuid};

use crate::frame::{Frame, HEADER_LEN, Magic, u16_at, u32_at, u64_at};
use crate::frame_info::stream_id_frame;
use crate::hello::FeatureSet;
use crate::kv::{Command, Key};
use crate::opcode::Opcode;
use crate::parse::{ParseError, parse, vb_state};
use crate::reply::Parts;
use crate::status::Status;

/// Longest name of a connection, in bytes.
pub const NAME_LEN_MAX: usize = 200;

macro_rules! flags {
    ($(#[$doc:meta])* $name:ident { $($(#[$about:meta])* $flag:ident = $bit:literal;)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct $name(pub u32);

        impl $name {
            $($(#[$about])* pub const $flag: $name = $name($bit);)*
            /// Every bit that has a meaning.
            pub const ALL: $name = $name(0 $(| $bit)*);

            pub const fn has(self, flag: $name) -> bool {
                self.0 & flag.0 != 0
            }
            #[must_use]
            pub const fn with(self, flag: $name) -> $name {
                $name(self.0 | flag.0)
            }
            /// The bits that have no meaning here.
            pub const fn unknown(self) -> u32 {
                self.0 & !$name::ALL.0
            }
        }
    };
}

flags! {
    /// Of OPEN.
    OpenFlags {
        /// The server sends. Without it the server would receive.
        PRODUCER = 0x01;
        INCLUDE_XATTRS = 0x04;
        NO_VALUE = 0x08;
        /// Deletions tell when they happened.
        INCLUDE_DELETE_TIMES = 0x20;
        /// As `NO_VALUE`, but the datatype says what the value is.
        NO_VALUE_WITH_UNDERLYING_DATATYPE = 0x40;
        INCLUDE_DELETED_USER_XATTRS = 0x100;
        /// A stream that starts from nothing need not be told what is gone.
        SKIP_DELETES_IN_BACKFILL = 0x200;
    }
}

flags! {
    /// Of STREAM_REQ and ADD_STREAM.
    StreamFlags {
        /// The vBucket moves: the stream ends with the receiver being active.
        TAKEOVER = 0x01;
        /// Up to what is in the file.
        DISK_ONLY = 0x02;
        /// Up to the high seqno of now.
        TO_LATEST = 0x04;
        /// Of an active vBucket or not at all.
        ACTIVE_ONLY = 0x10;
        /// Even a stream from 0 must know the history.
        STRICT_VB_UUID = 0x20;
        /// Starts at the high seqno of now.
        FROM_LATEST = 0x40;
        /// The consumer does not mind missing deletions that were purged.
        IGNORE_PURGED_TOMBSTONES = 0x80;
    }
}

flags! {
    /// Of SNAPSHOT_MARKER.
    SnapshotFlags {
        MEMORY = 0x01;
        DISK = 0x02;
        CHECKPOINT = 0x04;
        /// The marker is to be answered once the snapshot is complete.
        ACK = 0x08;
        HISTORY = 0x10;
        /// The same key may come twice.
        MAY_DUPLICATE_KEYS = 0x20;
    }
}

/// Why a stream ends. The discriminants are the wire's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum EndReason {
    /// The end that was asked for was reached.
    Ok = 0,
    Closed = 1,
    StateChanged = 2,
    Disconnected = 3,
    TooSlow = 4,
    BackfillFailed = 5,
    Rollback = 6,
    FilterEmpty = 7,
    LostPrivileges = 8,
}

impl EndReason {
    pub const ALL: [EndReason; 9] = [
        EndReason::Ok,
        EndReason::Closed,
        EndReason::StateChanged,
        EndReason::Disconnected,
        EndReason::TooSlow,
        EndReason::BackfillFailed,
        EndReason::Rollback,
        EndReason::FilterEmpty,
        EndReason::LostPrivileges,
    ];

    pub fn from_wire(code: u32) -> Option<EndReason> {
        EndReason::ALL.into_iter().find(|reason| *reason as u32 == code)
    }

    /// One sentence for people.
    pub const fn text(self) -> &'static str {
        match self {
            EndReason::Ok => "it reached its end",
            EndReason::Closed => "the consumer closed it",
            EndReason::StateChanged => "the vBucket changed its state",
            EndReason::Disconnected => "the connection ended",
            EndReason::TooSlow => "the consumer is too slow",
            EndReason::BackfillFailed => "the file could not be read",
            EndReason::Rollback => "the consumer has to roll back",
            EndReason::FilterEmpty => "all of its collections were dropped",
            EndReason::LostPrivileges => "the user lost the privilege",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Open<'a> {
    pub flags: OpenFlags,
    /// 1..=[`NAME_LEN_MAX`] bytes.
    pub name: &'a [u8],
    /// Empty, or JSON such as `{"consumer_name":"node"}`.
    pub details: &'a [u8],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamRequest<'a> {
    pub flags: StreamFlags,
    /// What comes has higher seqnos than this.
    pub start: Seqno,
    /// All ones: there is no end.
    pub end: Seqno,
    pub uuid: VbUuid,
    pub snap_start: Seqno,
    pub snap_end: Seqno,
    /// Empty, or JSON that filters.
    pub filter: &'a [u8],
}

/// What a marker tells beyond the range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MarkerDetail {
    V1,
    V2 { max_visible: Seqno, high_completed: Seqno },
    V2_2 { max_visible: Seqno, high_completed: Seqno, purge: Seqno, high_prepared: Seqno },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SnapshotMarker {
    pub start: Seqno,
    pub end: Seqno,
    pub flags: SnapshotFlags,
    pub detail: MarkerDetail,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mutation<'a> {
    pub seqno: Seqno,
    pub rev: RevSeqno,
    pub flags: u32,
    /// Unix seconds; 0: never.
    pub expiry: u32,
    pub cas: Cas,
    pub datatype: Datatype,
    pub key: Key<'a>,
    pub value: &'a [u8],
}

/// A deletion, and an expiration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deletion<'a> {
    pub seqno: Seqno,
    pub rev: RevSeqno,
    /// Unix seconds. `None`: the connection did not ask for it, so the first form is used.
    pub delete_time: Option<u32>,
    pub cas: Cas,
    pub datatype: Datatype,
    pub key: Key<'a>,
    /// Extended attributes, or nothing.
    pub value: &'a [u8],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prepare<'a> {
    pub seqno: Seqno,
    pub rev: RevSeqno,
    pub flags: u32,
    /// Unix seconds; 0: never. Of a deletion: when it was asked for.
    pub expiry: u32,
    pub deleted: bool,
    pub level: Level,
    pub cas: Cas,
    pub datatype: Datatype,
    pub key: Key<'a>,
    pub value: &'a [u8],
}

/// A commit, and an abort.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion<'a> {
    pub prepared: Seqno,
    /// Of the completion itself.
    pub seqno: Seqno,
    pub key: Key<'a>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SystemEvent<'a> {
    pub seqno: Seqno,
    pub manifest_uid: u64,
    pub scope: ScopeId,
    pub event: Event<'a>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event<'a> {
    CollectionCreated {
        name: &'a [u8],
        collection: CollectionId,
        /// `None`: the bucket's rule applies.
        max_ttl_s: Option<u32>,
    },
    CollectionDropped {
        collection: CollectionId,
    },
    ScopeCreated {
        name: &'a [u8],
    },
    ScopeDropped,
}

const COLLECTION_CREATED: u32 = 0;
const COLLECTION_DROPPED: u32 = 1;
const SCOPE_CREATED: u32 = 3;
const SCOPE_DROPPED: u32 = 4;

/// What either end may say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Message<'a> {
    Open(Open<'a>),
    /// From a manager to a consumer.
    AddStream(StreamFlags),
    CloseStream,
    StreamRequest(StreamRequest<'a>),
    GetFailoverLog,
    StreamEnd(EndReason),
    SnapshotMarker(SnapshotMarker),
    Mutation(Mutation<'a>),
    Deletion(Deletion<'a>),
    /// Always tells its time.
    Expiration(Deletion<'a>),
    SetVbucketState {
        state: VbState,
        /// Empty, or JSON with the failover table and the topology.
        details: &'a [u8],
    },
    Noop,
    /// Bytes.
    BufferAck(u32),
    Control {
        name: &'a [u8],
        value: &'a [u8],
    },
    SystemEvent(SystemEvent<'a>),
    Prepare(Prepare<'a>),
    /// The highest prepare up to which all are in place.
    SeqnoAck(Seqno),
    Commit(Completion<'a>),
    Abort(Completion<'a>),
    /// What is between was not for this consumer.
    SeqnoAdvanced(Seqno),
}

/// A message and where it belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packet<'a> {
    /// 0 for what concerns the connection.
    pub vb: VbId,
    /// Of the request that opened the stream.
    pub opaque: u32,
    /// For connections that have several streams of one vBucket.
    pub stream_id: Option<u16>,
    pub message: Message<'a>,
}

impl<'a> Packet<'a> {
    pub const fn new(message: Message<'a>) -> Packet<'a> {
        Packet { vb: VbId(0), opaque: 0, stream_id: None, message }
    }

    /// Reads a frame that must be a DCP message.
    ///
    /// # Errors
    /// The status to answer with.
    pub fn parse(frame: &Frame<'a>, features: FeatureSet) -> Result<Packet<'a>, ParseError> {
        let request = parse(frame, features)?;
        let Command::Dcp(message) = request.command else {
            let context = format!("{} is no DCP message", request.opcode.name());
            return Err(ParseError::new(Status::Einval, context));
        };
        Ok(Packet { vb: request.vbucket, opaque: request.opaque, stream_id: request.frames.stream_id, message })
    }

    /// Appends the frame.
    ///
    /// # Panics
    /// If a part does not fit its length field.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let laid = Laid::of(&self.message);
        let framing = self.stream_id.map(stream_id_frame);
        let framing = framing.as_ref().map_or(&[][..], |frame| frame);
        let parts = Parts {
            magic: if framing.is_empty() { Magic::Request } else { Magic::AltRequest },
            opcode: laid.opcode as u8,
            datatype: laid.datatype,
            vbucket_or_status: self.vb.0,
            opaque: self.opaque,
            cas: laid.cas.0,
            framing,
            extras: laid.extras.bytes(),
            key: laid.key,
            value: (laid.value, laid.tail.bytes()),
        };
        parts.encode(out);
    }

    /// Bytes of the frame: what flow control counts.
    pub fn frame_len(&self) -> usize {
        let laid = Laid::of(&self.message);
        let framing_len = if self.stream_id.is_some() { 3 } else { 0 };
        let body = laid.extras.len + laid.key.len() + laid.value.len() + laid.tail.len;
        HEADER_LEN + framing_len + body
    }
}

/// Up to `N` bytes, put together without the heap.
struct Fields<const N: usize> {
    bytes: [u8; N],
    len: usize,
}

impl<const N: usize> Fields<N> {
    const fn new() -> Fields<N> {
        Fields { bytes: [0; N], len: 0 }
    }

    fn put(mut self, bytes: &[u8]) -> Self {
        self.bytes[self.len..self.len + bytes.len()].copy_from_slice(bytes);
        self.len += bytes.len();
        self
    }

    fn u64(self, n: u64) -> Self {
        self.put(&n.to_be_bytes())
    }

    fn u32(self, n: u32) -> Self {
        self.put(&n.to_be_bytes())
    }

    fn u8(self, n: u8) -> Self {
        self.put(&[n])
    }

    fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

/// A message as the parts of a frame.
struct Laid<'a> {
    opcode: Opcode,
    cas: Cas,
    datatype: Datatype,
    extras: Fields<48>,
    key: &'a [u8],
    value: &'a [u8],
    /// What is behind `value`.
    tail: Fields<52>,
}

impl<'a> Laid<'a> {
    const fn new(opcode: Opcode) -> Laid<'a> {
        Laid {
            opcode,
            cas: Cas(0),
            datatype: Datatype::RAW,
            extras: Fields::new(),
            key: &[],
            value: &[],
            tail: Fields::new(),
        }
    }

    fn of(message: &Message<'a>) -> Laid<'a> {
        let blank = Laid::new(opcode_of(message));
        let json = |bytes: &[u8]| if bytes.is_empty() { Datatype::RAW } else { Datatype::JSON };
        match *message {
            Message::CloseStream | Message::GetFailoverLog | Message::Noop => blank,
            Message::Open(Open { flags, name, details }) => Laid {
                extras: Fields::new().u32(0).u32(flags.0),
                key: name,
                value: details,
                datatype: json(details),
                ..blank
            },
            Message::AddStream(flags) => Laid { extras: Fields::new().u32(flags.0), ..blank },
            Message::StreamRequest(r) => Laid {
                extras: Fields::new()
                    .u32(r.flags.0)
                    .u32(0)
                    .u64(r.start.0)
                    .u64(r.end.0)
                    .u64(r.uuid.0)
                    .u64(r.snap_start.0)
                    .u64(r.snap_end.0),
                value: r.filter,
                datatype: json(r.filter),
                ..blank
            },
            Message::StreamEnd(reason) => Laid { extras: Fields::new().u32(reason as u32), ..blank },
            Message::SnapshotMarker(marker) => Laid::of_marker(blank, &marker),
            Message::Mutation(m) => Laid {
                // Lock time, length of further metadata and use: of interest to no consumer.
                extras: Fields::new().u64(m.seqno.0).u64(m.rev.0).u32(m.flags).u32(m.expiry).put(&[0; 7]),
                cas: m.cas,
                datatype: m.datatype,
                key: m.key.wire(),
                value: m.value,
                ..blank
            },
            Message::Deletion(d) | Message::Expiration(d) => {
                let ids = Fields::new().u64(d.seqno.0).u64(d.rev.0);
                let extras = match (message, d.delete_time) {
                    (Message::Expiration(_), time) => ids.u32(time.unwrap_or(0)),
                    (_, Some(time)) => ids.u32(time).u8(0),
                    (_, None) => ids.put(&[0; 2]),
                };
                Laid { extras, cas: d.cas, datatype: d.datatype, key: d.key.wire(), value: d.value, ..blank }
            }
            Message::SetVbucketState { state, details } => {
                Laid { extras: Fields::new().u8(state as u8), value: details, datatype: json(details), ..blank }
            }
            Message::BufferAck(bytes) => Laid { extras: Fields::new().u32(bytes), ..blank },
            Message::Control { name, value } => Laid { key: name, value, ..blank },
            Message::SystemEvent(event) => Laid::of_event(blank, &event),
            Message::Prepare(p) => Laid {
                extras: Fields::new()
                    .u64(p.seqno.0)
                    .u64(p.rev.0)
                    .u32(p.flags)
                    .u32(p.expiry)
                    // Lock time and use.
                    .put(&[0; 5])
                    .u8(p.deleted.into())
                    .u8(p.level as u8),
                cas: p.cas,
                datatype: p.datatype,
                key: p.key.wire(),
                value: p.value,
                ..blank
            },
            Message::SeqnoAck(seqno) | Message::SeqnoAdvanced(seqno) => {
                Laid { extras: Fields::new().u64(seqno.0), ..blank }
            }
            Message::Commit(c) | Message::Abort(c) => {
                Laid { extras: Fields::new().u64(c.prepared.0).u64(c.seqno.0), key: c.key.wire(), ..blank }
            }
        }
    }

    fn of_marker(blank: Laid<'a>, marker: &SnapshotMarker) -> Laid<'a> {
        let range = |fields: Fields<52>| fields.u64(marker.start.0).u64(marker.end.0).u32(marker.flags.0);
        let (version, tail) = match marker.detail {
            MarkerDetail::V1 => {
                let extras = Fields::new().u64(marker.start.0).u64(marker.end.0).u32(marker.flags.0);
                return Laid { extras, ..blank };
            }
            MarkerDetail::V2 { max_visible, high_completed } => {
                (0, range(Fields::new()).u64(max_visible.0).u64(high_completed.0))
            }
            MarkerDetail::V2_2 { max_visible, high_completed, purge, high_prepared } => {
                let first = range(Fields::new()).u64(max_visible.0).u64(high_completed.0);
                (2, first.u64(purge.0).u64(high_prepared.0))
            }
        };
        Laid { extras: Fields::new().u8(version), tail, ..blank }
    }

    fn of_event(blank: Laid<'a>, event: &SystemEvent<'a>) -> Laid<'a> {
        let ids = Fields::new().u64(event.manifest_uid).u32(event.scope.0);
        let (code, version, key, tail): (u32, u8, &[u8], _) = match event.event {
            Event::CollectionCreated { name, collection, max_ttl_s: None } => {
                (COLLECTION_CREATED, 0, name, ids.u32(collection.0))
            }
            Event::CollectionCreated { name, collection, max_ttl_s: Some(ttl) } => {
                (COLLECTION_CREATED, 1, name, ids.u32(collection.0).u32(ttl))
            }
            Event::CollectionDropped { collection } => (COLLECTION_DROPPED, 0, &[], ids.u32(collection.0)),
            Event::ScopeCreated { name } => (SCOPE_CREATED, 0, name, ids),
            Event::ScopeDropped => (SCOPE_DROPPED, 0, &[], ids),
        };
        Laid { extras: Fields::new().u64(event.seqno.0).u32(code).u8(version), key, tail, ..blank }
    }
}

fn opcode_of(message: &Message<'_>) -> Opcode {
    match message {
        Message::Open(_) => Opcode::DcpOpen,
        Message::AddStream(_) => Opcode::DcpAddStream,
        Message::CloseStream => Opcode::DcpCloseStream,
        Message::StreamRequest(_) => Opcode::DcpStreamReq,
        Message::GetFailoverLog => Opcode::DcpGetFailoverLog,
        Message::StreamEnd(_) => Opcode::DcpStreamEnd,
        Message::SnapshotMarker(_) => Opcode::DcpSnapshotMarker,
        Message::Mutation(_) => Opcode::DcpMutation,
        Message::Deletion(_) => Opcode::DcpDeletion,
        Message::Expiration(_) => Opcode::DcpExpiration,
        Message::SetVbucketState { .. } => Opcode::DcpSetVbucketState,
        Message::Noop => Opcode::DcpNoop,
        Message::BufferAck(_) => Opcode::DcpBufferAck,
        Message::Control { .. } => Opcode::DcpControl,
        Message::SystemEvent(_) => Opcode::DcpSystemEvent,
        Message::Prepare(_) => Opcode::DcpPrepare,
        Message::SeqnoAck(_) => Opcode::DcpSeqnoAck,
        Message::Commit(_) => Opcode::DcpCommit,
        Message::Abort(_) => Opcode::DcpAbort,
        Message::SeqnoAdvanced(_) => Opcode::DcpSeqnoAdvanced,
    }
}

fn einval<T>(context: impl Into<std::borrow::Cow<'static, str>>) -> Result<T, ParseError> {
    Err(ParseError::new(Status::Einval, context))
}

/// Reads a frame whose layout was found to be that of the opcode's row.
pub(crate) fn decode<'a>(
    opcode: Opcode,
    frame: &Frame<'a>,
    doc_key: impl Fn() -> Result<Key<'a>, ParseError>,
) -> Result<Message<'a>, ParseError> {
    let Frame { extras, key, value, .. } = *frame;
    let seqno = |at| Seqno(u64_at(extras, at));
    let rev = || RevSeqno(u64_at(extras, 8));
    let (cas, datatype) = (Cas(frame.header.cas), Datatype(frame.header.datatype));
    Ok(match opcode {
        Opcode::DcpOpen if key.len() > NAME_LEN_MAX => {
            return einval(format!("the connection's name has {} bytes, more than {NAME_LEN_MAX}", key.len()));
        }
        Opcode::DcpOpen => Message::Open(Open { flags: OpenFlags(u32_at(extras, 4)), name: key, details: value }),
        Opcode::DcpAddStream => Message::AddStream(StreamFlags(u32_at(extras, 0))),
        Opcode::DcpCloseStream => Message::CloseStream,
        Opcode::DcpStreamReq => Message::StreamRequest(StreamRequest {
            flags: StreamFlags(u32_at(extras, 0)),
            start: seqno(8),
            end: seqno(16),
            uuid: VbUuid(u64_at(extras, 24)),
            snap_start: seqno(32),
            snap_end: seqno(40),
            filter: value,
        }),
        Opcode::DcpGetFailoverLog => Message::GetFailoverLog,
        Opcode::DcpStreamEnd => match EndReason::from_wire(u32_at(extras, 0)) {
            Some(reason) => Message::StreamEnd(reason),
            None => return einval(format!("{} is no reason to end a stream", u32_at(extras, 0))),
        },
        Opcode::DcpSnapshotMarker => Message::SnapshotMarker(marker(extras, value)?),
        Opcode::DcpMutation => Message::Mutation(Mutation {
            seqno: seqno(0),
            rev: rev(),
            flags: u32_at(extras, 16),
            expiry: u32_at(extras, 20),
            cas,
            datatype,
            key: doc_key()?,
            value,
        }),
        Opcode::DcpDeletion | Opcode::DcpExpiration => {
            let delete_time = (extras.len() >= 20).then(|| u32_at(extras, 16));
            let key = doc_key()?;
            let deletion = Deletion { seqno: seqno(0), rev: rev(), delete_time, cas, datatype, key, value };
            if opcode == Opcode::DcpDeletion { Message::Deletion(deletion) } else { Message::Expiration(deletion) }
        }
        Opcode::DcpSetVbucketState => match vb_state(extras[0]) {
            Some(state) => Message::SetVbucketState { state, details: value },
            None => return einval(format!("{} is no vBucket state", extras[0])),
        },
        Opcode::DcpNoop => Message::Noop,
        Opcode::DcpBufferAck => Message::BufferAck(u32_at(extras, 0)),
        Opcode::DcpControl => Message::Control { name: key, value },
        Opcode::DcpSystemEvent => Message::SystemEvent(system_event(frame)?),
        Opcode::DcpPrepare => match Level::from_wire(extras[30]) {
            Some(level) => Message::Prepare(Prepare {
                seqno: seqno(0),
                rev: rev(),
                flags: u32_at(extras, 16),
                expiry: u32_at(extras, 20),
                deleted: extras[29] != 0,
                level,
                cas,
                datatype,
                key: doc_key()?,
                value,
            }),
            None => return einval(format!("{} is no durability level", extras[30])),
        },
        Opcode::DcpSeqnoAck => Message::SeqnoAck(seqno(0)),
        Opcode::DcpSeqnoAdvanced => Message::SeqnoAdvanced(seqno(0)),
        Opcode::DcpCommit => Message::Commit(Completion { prepared: seqno(0), seqno: seqno(8), key: doc_key()? }),
        Opcode::DcpAbort => Message::Abort(Completion { prepared: seqno(0), seqno: seqno(8), key: doc_key()? }),
        other => unreachable!("{} is no DCP opcode", other.name()),
    })
}

fn marker(extras: &[u8], value: &[u8]) -> Result<SnapshotMarker, ParseError> {
    let seqno = |at| Seqno(u64_at(value, at));
    let range = |bytes: &[u8], detail| SnapshotMarker {
        start: Seqno(u64_at(bytes, 0)),
        end: Seqno(u64_at(bytes, 8)),
        flags: SnapshotFlags(u32_at(bytes, 16)),
        detail,
    };
    Ok(match (extras, value.len()) {
        (&[0], 36) => range(value, MarkerDetail::V2 { max_visible: seqno(20), high_completed: seqno(28) }),
        (&[2], 52) => {
            let (max_visible, high_completed) = (seqno(20), seqno(28));
            range(value, MarkerDetail::V2_2 { max_visible, high_completed, purge: seqno(36), high_prepared: seqno(44) })
        }
        (&[version], len) => return einval(format!("no snapshot marker of version {version} has {len} bytes")),
        (_, 0) => range(extras, MarkerDetail::V1),
        (_, _) => return einval("a snapshot marker of the first version takes no value"),
    })
}

fn system_event<'a>(frame: &Frame<'a>) -> Result<SystemEvent<'a>, ParseError> {
    let Frame { extras, key: name, value, .. } = *frame;
    let (code, version) = (u32_at(extras, 8), extras[12]);
    let expected = match (code, version) {
        (COLLECTION_CREATED, 0) | (COLLECTION_DROPPED, 0 | 1) => 16,
        (COLLECTION_CREATED, 1) => 20,
        (SCOPE_CREATED | SCOPE_DROPPED, 0) => 12,
        _ => return einval(format!("system event {code} of version {version} is unknown")),
    };
    if value.len() != expected {
        return einval(format!("system event {code} takes {expected} bytes, not {}", value.len()));
    }
    let collection = || CollectionId(u32_at(value, 12));
    let event = match code {
        COLLECTION_CREATED => Event::CollectionCreated {
            name,
            collection: collection(),
            max_ttl_s: (version == 1).then(|| u32_at(value, 16)),
        },
        COLLECTION_DROPPED => Event::CollectionDropped { collection: collection() },
        SCOPE_CREATED => Event::ScopeCreated { name },
        _ => Event::ScopeDropped,
    };
    Ok(SystemEvent {
        seqno: Seqno(u64_at(extras, 0)),
        manifest_uid: u64_at(value, 0),
        scope: ScopeId(u32_at(value, 8)),
        event,
    })
}

/// Appends the histories of a vBucket, newest first: the value of the reply to STREAM_REQ and GET_FAILOVER_LOG.
pub fn push_failover_log(out: &mut Vec<u8>, entries: impl IntoIterator<Item = (VbUuid, Seqno)>) {
    for (uuid, seqno) in entries {
        out.extend_from_slice(&uuid.0.to_be_bytes());
        out.extend_from_slice(&seqno.0.to_be_bytes());
    }
}

/// Reads them. `None`: cut short.
pub fn failover_log(value: &[u8]) -> Option<Vec<(VbUuid, Seqno)>> {
    let (entries, []) = value.as_chunks::<16>() else { return None };
    Some(entries.iter().map(|entry| (VbUuid(u64_at(entry, 0)), Seqno(u64_at(entry, 8)))).collect())
}

/// What a consumer must roll back to, from the value of a reply of [`Status::Rollback`]. `None`: malformed.
pub fn rollback_seqno(value: &[u8]) -> Option<Seqno> {
    Some(Seqno(u64::from_be_bytes(value.try_into().ok()?)))
}

/// Reads the reply to GET_ALL_VB_SEQNOS. `None`: cut short.
pub fn vb_seqnos(value: &[u8]) -> Option<Vec<(VbId, Seqno)>> {
    let (entries, []) = value.as_chunks::<10>() else { return None };
    Some(entries.iter().map(|entry| (VbId(u16_at(entry, 0)), Seqno(u64_at(entry, 2)))).collect())
}
