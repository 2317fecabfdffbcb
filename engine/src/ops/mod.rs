//! One attempt at one request, with the stripe of its key held.
//!
//! An attempt either answers, or has prepared a sync write that will answer, or stops because it needs the file; then it
//! has changed nothing, and the next attempt brings what the file said.

mod delete;
mod read;
mod store;
mod subdoc;
mod with_meta;

use std::borrow::Cow;
use std::time::Duration;

use document::subdoc::MacroPatch;
use types::{Cas, Datatype, DeleteSource, Item, Kind, Level, Meta, RevSeqno, Seqno, VbState};

use crate::durability::{Answer, Client, SyncWrite};
use crate::expiry;
use crate::hash_table::Locked;
use crate::op::{Mutated, Op, OpError, Reply, Request, Waiter};
use crate::terms::Terms;
use crate::value::{self, Incoming};
use crate::vbucket::VBucket;

/// What an attempt came to.
pub(crate) enum Step {
    Reply(Reply),
    /// A sync write is under way; its waiter answers.
    Prepared,
}

/// Why an attempt did not come to an end.
#[derive(Debug)]
pub(crate) enum Stop {
    Error(OpError),
    /// Ask the file for the key, then try again.
    NeedsFile,
}

impl From<OpError> for Stop {
    fn from(error: OpError) -> Stop {
        Stop::Error(error)
    }
}

pub(crate) type Attempt<T = Step> = Result<T, Stop>;

/// What the file said of the key, if it was asked.
#[derive(Default)]
pub(crate) enum Fetched {
    #[default]
    NotAsked,
    /// What it holds, and the seqno up to which it had everything when it was asked.
    /// `clears`: of the table, at that time.
    Found { item: Option<Item>, filed: Seqno, clears: u32 },
}

/// The committed document, as an operation sees it.
#[derive(Clone)]
pub(crate) enum Doc {
    Missing,
    Tombstone(Item),
    Live(Item),
}

impl Doc {
    pub fn live(&self) -> Option<&Item> {
        match self {
            Doc::Live(item) => Some(item),
            _ => None,
        }
    }

    pub fn item(&self) -> Option<&Item> {
        match self {
            Doc::Live(item) | Doc::Tombstone(item) => Some(item),
            Doc::Missing => None,
        }
    }
}

/// What a document is to become.
pub(crate) struct Change<'v> {
    pub flags: u32,
    /// Absolute; the time of deletion for a delete.
    pub expiry: u32,
    pub datatype: Datatype,
    pub value: Option<Cow<'v, [u8]>>,
    pub deleted: Option<DeleteSource>,
    /// Places in `value` to be filled once CAS and seqno are known.
    pub patches: Vec<MacroPatch>,
    /// CAS and revision given from elsewhere.
    pub given: Option<(Option<Cas>, RevSeqno)>,
}

/// The sync write an attempt has prepared.
#[derive(Clone, Copy)]
pub(crate) struct Prepared {
    pub level: Level,
    /// When the timer is to look at the vBucket, if that is news.
    pub arm: Option<Duration>,
}

/// See the module.
pub(crate) struct Run<'a> {
    pub vb: &'a VBucket,
    pub clock: &'a dyn env::Clock,
    pub terms: &'a Terms,
    pub state: VbState,
    pub request: &'a Request<'a>,
    pub slot: Locked<'a>,
    pub fetched: &'a Fetched,
    pub waiter: &'a dyn Fn() -> Waiter,
    /// Where the default for sync writes is kept.
    pub durability_timeout: Duration,
    /// Memory is short: what is brought back from the file comes without its value.
    pub short: bool,
    /// Something was brought back from the file.
    pub brought_back: bool,
    /// Bytes appended to the changelog.
    pub appended_bytes: i64,
    pub prepared: Option<Prepared>,
    pub expired: u64,
    /// Nothing may be appended any more, not even what looking would.
    pub frozen: bool,
}

impl Run<'_> {
    // Most operations need neither of these, and looking at the clock is a good part of a short one.
    pub fn now(&self) -> Duration {
        self.clock.monotonic()
    }

    pub fn now_s(&self) -> u32 {
        self.clock.unix_s()
    }

    /// Carries the request out.
    pub fn attempt(&mut self) -> Attempt {
        match self.request.op {
            Op::Get | Op::GetReplica => self.get(),
            Op::GetMeta => self.get_meta(),
            Op::GetAndLock { lock_s } => self.get_and_lock(lock_s),
            Op::Unlock => self.unlock(),
            Op::SubdocLookup(lookup) => self.subdoc_lookup(lookup),
            Op::Evict => self.evict(),
            Op::Touch { expiry } => self.touch(expiry, false),
            Op::GetAndTouch { expiry } => self.touch(expiry, true),
            Op::Store { mode, flags, expiry, datatype, value } => self.store(mode, flags, expiry, datatype, value),
            Op::Concat { end, datatype, value } => self.concat(end, datatype, value),
            Op::Arithmetic { delta, initial, expiry } => self.arithmetic(delta, initial, expiry),
            Op::Delete => self.delete(),
            Op::SubdocMutate(mutate) => self.subdoc_mutate(mutate),
            Op::WithMeta(with_meta) => self.with_meta(with_meta),
        }
    }

    /// The committed document. One that has expired becomes a tombstone first, unless a sync write is under way on it:
    /// then it is only passed over.
    pub fn doc(&mut self) -> Attempt<Doc> {
        let item = self.look(false)?;
        self.alive_or_dead(item)
    }

    /// As [`Run::doc`], and a key nothing is remembered of is looked for among the tombstones in the file.
    pub fn doc_or_tombstone(&mut self) -> Attempt<Doc> {
        let item = self.look(true)?;
        self.alive_or_dead(item)
    }

    /// The newest committed version. One that is only in the file comes back into memory: what follows then goes on as if
    /// it had never left.
    fn look(&mut self, tombstones: bool) -> Attempt<Option<Item>> {
        let dice = self.slot.throw();
        if let Some(item) = self.slot.committed() {
            item.warm(dice);
            return Ok(Some(item));
        }
        if self.vb.is_absent(&self.slot, tombstones) {
            return Ok(None);
        }
        let Fetched::Found { item, filed, .. } = self.fetched else { return Err(Stop::NeedsFile) };
        // If anything newer than the read has left memory, it may have been this key.
        if self.vb.table.left_upto() > *filed {
            return Err(Stop::NeedsFile);
        }
        let Some(found) = item else { return Ok(None) };
        let strip = self.short && !found.is_deleted() && found.memory_of_value() > 0;
        let found = if strip { found.stripped() } else { found.clone() };
        self.slot.put_committed(found.clone(), false);
        self.brought_back = true;
        Ok(Some(found))
    }

    fn alive_or_dead(&mut self, item: Option<Item>) -> Attempt<Doc> {
        let Some(item) = item else { return Ok(Doc::Missing) };
        if item.is_deleted() {
            return Ok(Doc::Tombstone(item));
        }
        if !expiry::is_past(item.meta().expiry, || self.now_s()) {
            return Ok(Doc::Live(item));
        }
        let in_doubt = self.slot.prepare().is_some() || self.vb.log.marks.poisoned().is_some();
        if self.state != VbState::Active || in_doubt || self.frozen {
            return Ok(Doc::Missing);
        }
        let item = if item.meta().datatype.has(Datatype::XATTR) { self.resident(item)? } else { item };
        let (datatype, value) = value::remains(&item)?;
        let deleted_s = self.now_s();
        let make = |cas, seqno| {
            let meta = Meta {
                seqno,
                cas,
                rev: RevSeqno(item.meta().rev.0 + 1),
                expiry: deleted_s,
                datatype,
                deleted: Some(DeleteSource::Expiry),
                ..item.meta()
            };
            (meta, Kind::Committed { prepared: None }, value.map(Cow::Owned))
        };
        let tombstone = self.append(None, make, |_| ());
        self.vb.note_deleted(tombstone.meta().rev);
        self.vb.put(&mut self.slot, tombstone.clone());
        self.expired += 1;
        Ok(Doc::Tombstone(tombstone))
    }

    /// The item with its value.
    pub fn resident(&self, item: Item) -> Attempt<Item> {
        if item.resident() {
            return Ok(item);
        }
        match self.fetched {
            Fetched::Found { item: Some(found), .. } if found.seqno() == item.seqno() => Ok(found.clone()),
            // Changed, and its value gone to the file, since the file was read.
            Fetched::Found { filed, .. } if item.seqno() > *filed => Err(Stop::NeedsFile),
            // The file was whole and should have it.
            Fetched::Found { .. } => Err(Stop::Error(OpError::Unreadable(format!(
                "vBucket {}: the file should hold seqno {} of this key and does not",
                self.vb.id,
                item.seqno()
            )))),
            Fetched::NotAsked => Err(Stop::NeedsFile),
        }
    }

    /// Reads wait for the outcome of what may already have been acknowledged.
    pub fn check_readable(&self) -> Result<(), OpError> {
        match self.slot.prepare() {
            // A replica shows what is committed, whatever comes of it.
            Some(prepare) if self.state == VbState::Active && self.vb.is_inherited(prepare) => {
                Err(OpError::ReCommitInProgress)
            }
            _ => Ok(()),
        }
    }

    /// One sync write a key.
    pub fn check_prepare(&self) -> Result<(), OpError> {
        self.check_readable()?;
        match self.slot.prepare() {
            Some(_) => Err(OpError::SyncWriteInProgress),
            None => Ok(()),
        }
    }

    /// Lock and CAS of a live document. `NotFound` if there is a condition and nothing to fulfil it.
    pub fn check_condition(&self, doc: &Doc) -> Result<(), OpError> {
        let cas = self.request.cas;
        let Some(item) = doc.live() else {
            return if cas == Cas(0) { Ok(()) } else { Err(OpError::NotFound) };
        };
        match self.slot.lock_at(|| self.now()) {
            Some(lock) if lock.cas == cas => Ok(()),
            Some(_) => Err(OpError::Locked),
            None if cas == Cas(0) || cas == item.meta().cas => Ok(()),
            None => Err(OpError::Exists),
        }
    }

    /// The CAS a reader may see.
    pub fn shown_cas(&self, item: &Item) -> Cas {
        if self.slot.lock_at(|| self.now()).is_some() { Cas::LOCKED } else { item.meta().cas }
    }

    /// An expiry from a request as it is stored. A live document's stays if the request says so.
    pub fn expiry_of(&self, raw: u32, doc: &Doc) -> Result<u32, OpError> {
        match doc.live() {
            Some(item) if self.request.preserve_expiry => Ok(item.meta().expiry),
            _ => self.terms.expiry(raw, || self.now_s()),
        }
    }

    /// A body a client sent, in the form the bucket keeps bodies in.
    pub fn incoming<'v>(&self, sent: &'v [u8], datatype: Datatype) -> Result<Incoming<'v>, OpError> {
        let incoming = Incoming::parse(sent, datatype)?;
        Ok(if self.terms.inflates() { incoming.uncompressed() } else { incoming })
    }

    /// Makes `change` the newest version of the key, or prepares it if the request asks for durability.
    pub fn change(&mut self, doc: &Doc, change: Change<'_>, answer: Answer) -> Attempt {
        let Change { flags, expiry, datatype, value, deleted, patches, given } = change;
        let next_rev = doc.item().map_or(self.vb.first_rev(), |item| RevSeqno(item.meta().rev.0 + 1));
        let (given_cas, rev) = given.unwrap_or((None, next_rev));
        let kind = match self.request.durability {
            Some(requirement) => Kind::Prepare { level: requirement.level },
            None => Kind::Committed { prepared: None },
        };
        let client = self.request.durability.map(|requirement| {
            let timeout = requirement.timeout.unwrap_or(self.durability_timeout);
            (requirement.level, self.now() + timeout, (self.waiter)())
        });
        let (vb, uuid) = (self.vb, self.vb.uuid());
        let (mut reply, mut arm) = (None, None);
        let make = |cas, seqno| {
            let mut value = value;
            if let Some(value) = value.as_mut().filter(|_| !patches.is_empty()) {
                patches.iter().for_each(|patch| patch.patch(value.to_mut(), datatype, cas, seqno));
            }
            (Meta { seqno, cas, rev, flags, expiry, datatype, deleted }, kind, value)
        };
        let item = self.append(given_cas, make, |item| {
            let (cas, seqno) = (item.meta().cas, item.seqno());
            let mutated = Mutated { cas, seqno, uuid };
            match client {
                // Under the log's lock, so that the queue is in prepare order.
                Some((level, deadline, waiter)) => {
                    let (client, deadline) = (Some(Client { waiter, answer, mutated }), Some(deadline));
                    let write = SyncWrite { seqno, level, prepare: item.clone(), deadline, client };
                    let mut waiting = vb.waiting.lock();
                    let tracker = waiting.get_or_insert_default();
                    tracker.push(write);
                    arm = tracker.arm();
                }
                None => reply = Some(answer.reply(mutated)),
            }
        });
        match reply {
            Some(reply) => {
                if deleted.is_some() {
                    self.vb.note_deleted(rev);
                }
                self.vb.put(&mut self.slot, item);
                Ok(Step::Reply(reply))
            }
            None => {
                self.prepared = self.request.durability.map(|requirement| Prepared { level: requirement.level, arm });
                // A lock that let this write pass has served.
                self.slot.set_lock(None);
                self.slot.put_prepare(item);
                Ok(Step::Prepared)
            }
        }
    }

    fn append<'v>(
        &mut self,
        given_cas: Option<Cas>,
        make: impl FnOnce(Cas, Seqno) -> (Meta, Kind, Option<Cow<'v, [u8]>>),
        join: impl FnOnce(&Item),
    ) -> Item {
        let key = self.slot.key;
        let build = |stamp: changelog::Stamp| {
            let (meta, kind, value) = make(stamp.cas, stamp.seqno);
            let item = Item::new(key, meta, kind, value.as_deref());
            join(&item);
            item
        };
        let item = match given_cas {
            Some(cas) => self.vb.log.append_with_cas(cas, build),
            None => self.vb.log.append(self.clock, build),
        };
        self.appended_bytes += item.memory() as i64;
        item
    }
}
