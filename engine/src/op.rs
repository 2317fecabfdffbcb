//! Commands as values: what a client asks of one document, and what it is told.
//!
//! A [`Request`] borrows the bytes it arrived in, so a read copies nothing. When it must wait (the value is on disk, the
//! write has to become durable) the engine keeps what it needs to finish and answers through the [`Waiter`]; nothing is
//! asked of the front end twice.

use std::sync::Arc;
use std::time::Duration;

use types::{Cas, Datatype, DocKey, Item, Level, RevSeqno, Seqno, VbId, VbUuid};

/// One operation on one document.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    pub vb: VbId,
    pub key: DocKey<'a>,
    /// 0: no condition.
    pub cas: Cas,
    pub durability: Option<Requirement>,
    /// Keep the expiry of a live document, whatever the operation says.
    pub preserve_expiry: bool,
    /// The datatype bits this connection may be shown; a value stored in a form it cannot read is converted.
    pub accepts: Datatype,
    pub op: Op<'a>,
}

/// How durable a write must be before it is acknowledged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Requirement {
    pub level: Level,
    /// `None`: the bucket's default.
    pub timeout: Option<Duration>,
}

/// What to do with the document. Expiries are as on the wire: 0 never, up to 30 days relative, else absolute.
#[derive(Clone, Copy, Debug)]
pub enum Op<'a> {
    Get,
    /// Only in replica state.
    GetReplica,
    GetMeta,
    GetAndTouch {
        expiry: u32,
    },
    Touch {
        expiry: u32,
    },
    /// Seconds as on the wire: 0 or more than 30 mean 15.
    GetAndLock {
        lock_s: u32,
    },
    Unlock,
    Store {
        mode: StoreMode,
        flags: u32,
        expiry: u32,
        datatype: Datatype,
        value: &'a [u8],
    },
    Delete,
    Arithmetic {
        delta: Delta,
        initial: Option<u64>,
        expiry: u32,
    },
    Concat {
        end: End,
        datatype: Datatype,
        value: &'a [u8],
    },
    SubdocLookup(SubdocLookup<'a>),
    SubdocMutate(SubdocMutate<'a>),
    /// A change with the metadata it had elsewhere.
    WithMeta(WithMeta<'a>),
    /// Drops the value from memory; the document stays. For tests and tools.
    Evict,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreMode {
    Set,
    Add,
    Replace,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delta {
    Increment(u64),
    Decrement(u64),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    Append,
    Prepend,
}

/// Sub-document reads. The specs were validated by the front end (`document::subdoc`).
#[derive(Clone, Copy, Debug)]
pub struct SubdocLookup<'a> {
    pub specs: &'a [document::subdoc::LookupSpec<'a>],
    pub doc_flags: document::subdoc::DocFlags,
}

/// Sub-document changes, all or nothing.
#[derive(Clone, Copy, Debug)]
pub struct SubdocMutate<'a> {
    pub specs: &'a [document::subdoc::MutationSpec<'a>],
    pub doc_flags: document::subdoc::DocFlags,
    /// `None`: the request had none.
    pub expiry: Option<u32>,
    pub user_flags: Option<u32>,
}

#[derive(Clone, Copy, Debug)]
pub struct WithMeta<'a> {
    pub mode: WithMetaMode,
    pub flags: u32,
    pub expiry: u32,
    pub rev: RevSeqno,
    pub cas: Cas,
    pub options: u32,
    pub datatype: Datatype,
    pub value: &'a [u8],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WithMetaMode {
    Set,
    Add,
    Delete,
}

/// What the client is told when it worked.
#[derive(Debug)]
pub enum Reply {
    /// The document. The item is shared, not copied; `cas` is what the client may see (all ones if locked). `value` is the
    /// body alone, ready for this connection: without xattrs, inflated if it has to be.
    Value {
        item: Item,
        cas: Cas,
        datatype: Datatype,
        body: Body,
    },
    Meta {
        deleted: bool,
        flags: u32,
        expiry: u32,
        rev: RevSeqno,
        cas: Cas,
        datatype: Datatype,
    },
    /// The document changed.
    Mutated(Mutated),
    Counter {
        value: u64,
        mutated: Mutated,
    },
    /// Touch, unlock: a CAS (0 where none applies) and no token.
    Done {
        cas: Cas,
    },
    /// One entry a spec, in order.
    Lookup {
        cas: Cas,
        deleted: bool,
        results: Vec<SubdocResult>,
    },
    /// Specs that produced a value (counters): index and JSON.
    SubdocMutated {
        mutated: Mutated,
        deleted: bool,
        results: Vec<(u8, Vec<u8>)>,
    },
    /// The first spec that failed; nothing was changed.
    SubdocFailed {
        index: u8,
        error: document::subdoc::SubdocError,
        deleted: bool,
    },
}

/// A document's body as a reply carries it.
#[derive(Debug)]
pub enum Body {
    /// The item's stored bytes from this offset on (what is before is the xattr section).
    Stored { from: usize },
    /// Converted for this reply.
    Owned(Vec<u8>),
}

impl Body {
    pub fn of<'a>(&'a self, item: &'a Item) -> &'a [u8] {
        match self {
            Body::Stored { from } => &item.value()[*from..],
            Body::Owned(bytes) => bytes,
        }
    }
}

pub type SubdocResult = Result<Vec<u8>, document::subdoc::SubdocError>;

/// What a change was given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mutated {
    pub cas: Cas,
    pub seqno: Seqno,
    pub uuid: VbUuid,
}

/// Why it did not work. Each is one status on the wire.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OpError {
    #[error("no such document")]
    NotFound,
    #[error("the document exists, or its CAS differs")]
    Exists,
    #[error("append or prepend to a missing document")]
    NotStored,
    #[error("the document is locked")]
    Locked,
    #[error("the document is not locked")]
    NotLocked,
    #[error("not a number")]
    BadDelta,
    #[error("the value is too large")]
    TooBig,
    #[error("{0}")]
    Invalid(&'static str),
    #[error("malformed xattrs")]
    BadXattr,
    #[error("this vBucket is not active here")]
    NotMyVbucket,
    /// May work if tried again: says why.
    #[error("{0}")]
    Temporary(String),
    #[error("the bucket's memory quota is used up")]
    NoMemory,
    #[error("the disk is full")]
    DiskFull,
    #[error("a synchronous write of this document is in progress")]
    SyncWriteInProgress,
    #[error("the outcome of a synchronous write from before the restart is being settled")]
    ReCommitInProgress,
    /// It may or may not happen.
    #[error("{0}")]
    Ambiguous(&'static str),
    #[error("the replication chain cannot satisfy this durability level")]
    DurabilityImpossible,
    #[error("not supported: {0}")]
    NotSupported(&'static str),
    #[error("only a deleted document can be revived")]
    CanOnlyReviveDeleted,
    #[error("a deleted document has no body")]
    DeletedCannotHaveValue,
    /// The file could not be read: the document may well exist.
    #[error("{0}")]
    Unreadable(String),
    #[error("the expiry does not fit 32 bits")]
    ExpiryOverflow,
    /// The request was dropped before it was decided (the bucket was deleted, the server stops).
    #[error("cancelled")]
    Cancelled,
}

pub type OpResult = Result<Reply, OpError>;

/// What the engine says at once.
#[derive(Debug)]
pub enum Outcome {
    Done(OpResult),
    /// The answer comes through the waiter.
    Pending,
}

/// Which request of which connection, as the front end numbers them. Opaque to the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ticket {
    pub slot: u32,
    pub generation: u32,
    pub request: u64,
}

/// Takes answers to requests that had to wait; wakes the worker that owns the connection. Callable from any thread, with
/// no lock above `RunQueue` held.
pub trait Mailbox: Send + Sync {
    fn deliver(&self, ticket: Ticket, result: OpResult);
}

/// A promise to answer one request, exactly once: dropped without an answer it says `Cancelled`.
pub struct Waiter {
    mailbox: Option<Arc<dyn Mailbox>>,
    ticket: Ticket,
}

impl Waiter {
    pub fn new(mailbox: Arc<dyn Mailbox>, ticket: Ticket) -> Waiter {
        Waiter { mailbox: Some(mailbox), ticket }
    }

    pub fn finish(mut self, result: OpResult) {
        self.mailbox.take().expect("answered once").deliver(self.ticket, result);
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        if let Some(mailbox) = self.mailbox.take() {
            mailbox.deliver(self.ticket, Err(OpError::Cancelled));
        }
    }
}
