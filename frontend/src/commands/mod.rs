//! From a frame to a reply. One function a family; this file checks what is common to all and sends what they say.
//!
//! The order of the checks is the protocol's, because the first one that fails decides the status a client sees: may
//! this connection send the opcode at all; is the frame well formed; do its collection and its bucket exist; then the
//! command itself.

mod bootstrap;
mod bucket;
mod collections;
mod dcp;
mod document;
mod observe;
mod stat;
mod subdoc;

use std::sync::Arc;
use std::time::Duration;

use engine::{OpResult, Outcome, Ticket, Waiter};
use types::{Cas, Datatype, VbId};
use wire::kv::Key;
use wire::reply::{ErrorBody, encode_error, mutation_token};
use wire::{Command, Feature, Frame, Header, Legacy, Opcode, Reply, Request, Status};

use crate::auth::Role;
use crate::connection::{Call, Form, Selected, Session, Waiting};
use crate::mailbox::{Answer, JobReply, Mailbox};
use crate::{Shared, errors};

pub(crate) use bootstrap::{greet, push_map};
pub use collections::MANIFEST;

/// One request being worked on: where it came from and where its reply goes.
pub(crate) struct Context<'c> {
    pub session: &'c mut Session,
    pub out: &'c mut Vec<u8>,
    pub shared: &'c Shared,
    pub mailbox: &'c Arc<Mailbox>,
    pub call: Call,
}

/// A status and a sentence about it.
pub(crate) type Refusal = (Status, String);

impl<'c> Context<'c> {
    pub fn new(
        session: &'c mut Session,
        out: &'c mut Vec<u8>,
        shared: &'c Shared,
        mailbox: &'c Arc<Mailbox>,
        received: Duration,
    ) -> Context<'c> {
        let call = Call { code: 0, opcode: None, opaque: 0, received, form: Form::Plain };
        Context { session, out, shared, mailbox, call }
    }

    /// Works on a request: replies, or arranges for the reply to come.
    pub fn run(&mut self, frame: &Frame<'_>) {
        self.take(&frame.header);
        if !frame.header.magic.is_request() {
            return self.note_answer(&frame.header);
        }
        if !self.may_send() {
            return self.fail(Status::Eaccess, "authenticate first");
        }
        let request = match wire::parse(frame, self.session.features) {
            Ok(request) => request,
            Err(error) => return self.fail(error.status, &error.context),
        };
        if request.frames.impersonates() {
            return self.fail(Status::Eaccess, "acting as another user is not allowed");
        }
        if !self.bucket_is_there() {
            self.session.select(None);
            self.session.closing = true;
            return self.fail(Status::NoBucket, "the bucket was deleted");
        }
        if let Err((status, context)) = self.dispatch(&request) {
            self.fail(status, &context);
        }
    }

    /// The answer to something we asked: only of what a stream was sent is it of interest.
    fn note_answer(&mut self, header: &Header) {
        if let (Some(producer), Some(opcode)) = (&mut self.session.producer, self.call.opcode) {
            producer.answered(opcode, Status::from_wire(header.vbucket_or_status), header.opaque);
        }
    }

    /// Answers a frame whose lengths do not add up.
    pub fn refuse(&mut self, header: &Header) {
        self.take(header);
        if !header.magic.is_request() {
            return;
        }
        if !self.may_send() {
            return self.fail(Status::Eaccess, "authenticate first");
        }
        self.fail(Status::Einval, "the body is shorter than its parts");
    }

    /// Answers a request that takes an ordinary place when there is none.
    pub fn turn_away(&mut self, header: &Header) {
        self.take(header);
        self.session.closing = true;
        if header.magic.is_request() {
            self.fail(Status::Ebusy, "all connections are taken; try again later, or give the server more");
        }
    }

    fn take(&mut self, header: &Header) {
        let opcode = Opcode::from_wire(header.opcode).ok();
        self.call = Call { code: header.opcode, opcode, opaque: header.opaque, ..self.call };
        self.session.info.note_request(self.call.received);
        if let Some(producer) = &mut self.session.producer {
            producer.heard(self.call.received);
        }
    }

    /// Whether the selected bucket, if any, still exists. Looked at only when something in the cluster has changed.
    fn bucket_is_there(&mut self) -> bool {
        let Some(selected) = &mut self.session.selected else { return true };
        let revision = self.shared.cluster.revision();
        if selected.checked != revision {
            selected.checked = revision;
            let named = self.shared.engine.bucket(&selected.shape.name);
            return named.is_some_and(|bucket| Arc::ptr_eq(&bucket, &selected.bucket));
        }
        true
    }

    fn may_send(&self) -> bool {
        !self.shared.is_stranger(self.session) || wire::opcode::allowed_before_auth(self.call.code)
    }

    fn dispatch(&mut self, request: &Request<'_>) -> Result<(), Refusal> {
        if needs_admin(request.opcode) && self.session.identity.as_ref().is_none_or(|i| i.role != Role::Admin) {
            return Err((Status::Eaccess, format!("{} needs an administrator", request.opcode.name())));
        }
        if self.session.producer.is_some() && matches!(request.command, Command::Hello(_) | Command::SelectBucket(_)) {
            return not_supported("changing what a DCP connection is about");
        }
        match request.command {
            Command::Hello(hello) => self.hello(&hello),
            Command::SaslListMechs => self.sasl_list_mechs(),
            Command::SaslAuth(sasl) => self.sasl_auth(&sasl),
            Command::SaslStep(sasl) => self.sasl_step(&sasl),
            Command::SelectBucket(name) => self.select_bucket(name),
            Command::GetClusterConfig(known) => self.get_cluster_config(known),
            Command::SetClusterConfig(set) => self.set_cluster_config(&set),
            Command::GetErrorMap(version) => self.get_error_map(version),
            Command::Noop | Command::Verbosity(_) => self.done(),
            Command::Version => self.version(),
            Command::Quit => self.quit(),
            Command::Stat(stat) => self.stat(&stat),
            Command::ListBuckets => self.list_buckets(),
            Command::CreateBucket(create) => self.create_bucket(&create),
            Command::DeleteBucket(delete) => self.delete_bucket(&delete),
            Command::GetManifest => self.get_manifest(),
            Command::SetManifest(_) => not_supported("named collections"),
            Command::GetCollectionId(path) => self.get_collection_id(path),
            Command::GetScopeId(path) => self.get_scope_id(path),
            Command::Flush(delay_s) => self.flush(delay_s),
            Command::SetVbucket(set) => self.set_vbucket(request.vbucket, &set),
            Command::GetVbucket => self.get_vbucket(request.vbucket),
            Command::DelVbucket(_) => self.del_vbucket(request.vbucket),
            Command::CompactDb(compact) => self.compact(request.vbucket, &compact),
            Command::SetParam(_) => not_supported("changing parameters through this port"),
            Command::StartPersistence | Command::StopPersistence => not_supported("switching persistence"),
            Command::EnableTraffic | Command::DisableTraffic => self.traffic(),
            Command::GetRandomKey(get) => self.get_random_key(&get),
            Command::GetKeys(_) => not_supported("listing keys"),
            Command::Observe(keys) => self.observe(keys),
            Command::ObserveSeqno(uuid) => self.observe_seqno(request.vbucket, uuid),
            Command::GetAllVbSeqnos(get) => self.get_all_vb_seqnos(&get),
            Command::GetFailoverLog => self.get_failover_log(request.vbucket),
            Command::SeqnoPersistence(seqno) => self.seqno_persistence(request.vbucket, seqno),
            Command::SubdocSingle(single) => self.subdoc_single(request, &single),
            Command::SubdocLookup(lookup) => self.subdoc_lookup(request, &lookup),
            Command::SubdocMutation(mutation) => self.subdoc_mutation(request, &mutation),
            Command::Dcp(message) => self.dcp(request, &message),
            Command::Get(_)
            | Command::GetReplica(_)
            | Command::GetAndTouch(_)
            | Command::GetLocked(_)
            | Command::Unlock(_)
            | Command::Store(_)
            | Command::Concat(_)
            | Command::Arithmetic(_)
            | Command::Delete(_)
            | Command::Touch(_)
            | Command::EvictKey(_)
            | Command::GetMeta(_)
            | Command::WithMeta(_) => self.document(request),
        }
    }

    /// Runs one operation on one document.
    fn execute(&mut self, request: &Request<'_>, key: Key<'_>, op: engine::Op<'_>) -> Result<(), Refusal> {
        let key = key.resolve();
        let key = key.as_key();
        if key.collection().0 != 0 {
            return Err((Status::UnknownCollection, format!("no collection {:#x}", key.collection().0)));
        }
        let ticket = self.ticket();
        let selected = self.bucket()?;
        // A client that got its bucket without asking knows of no vBuckets and says 0 for every key. It is to find the
        // same documents as one that does know.
        let vb = match request.vbucket {
            VbId(0) if selected.implied => vbucket_of(key.logical(), selected.shape.vbuckets),
            vb => vb,
        };
        let asked = engine::Request {
            vb,
            key,
            cas: request.cas,
            durability: request.frames.durability.map(|d| engine::Requirement {
                level: d.level,
                timeout: d.timeout_ms.map(|ms| Duration::from_millis(ms.into())),
            }),
            preserve_expiry: request.frames.preserve_expiry,
            accepts: Datatype(self.session.features.datatypes()),
            op,
        };
        let mailbox = self.mailbox;
        match selected.bucket.execute(&asked, &|| Waiter::new(mailbox.clone(), ticket)) {
            Outcome::Done(result) => self.answer(result),
            Outcome::Pending => self.wait(ticket, request.frames.barrier),
        }
        Ok(())
    }

    /// A number for the request, for whoever will answer it.
    fn ticket(&mut self) -> Ticket {
        self.session.next_request += 1;
        let slot = self.session.slot;
        Ticket { slot: slot.index, generation: slot.generation, request: self.session.next_request }
    }

    /// The answer comes by letter.
    fn wait(&mut self, ticket: Ticket, barrier: bool) {
        let fence = barrier || self.call.opcode.is_none_or(|opcode| !opcode.info().reorderable());
        self.session.in_flight.push(Waiting { request: ticket.request, call: self.call, fence });
        let count = self.session.in_flight.len() as u32;
        self.session.info.in_flight.store(count, std::sync::atomic::Ordering::Relaxed);
    }

    /// The answer came by letter.
    pub fn answer_late(&mut self, answer: Answer) {
        match answer {
            Answer::Op(result) => self.answer(result),
            Answer::Job(Ok(JobReply { extras, value })) => {
                let reply = Reply { extras: &extras, value: (&value, &[]), ..self.blank(Status::Success) };
                self.put(reply);
            }
            Answer::Job(Err((status, context))) => self.fail(status, &context),
            Answer::Login(verdict) => {
                if let Err((status, context)) = self.judged(verdict) {
                    self.fail(status, &context);
                }
            }
        }
    }

    fn answer(&mut self, result: OpResult) {
        document::count(self.call.opcode, &result);
        match result {
            Ok(reply) => self.show(reply),
            Err(error) => {
                let (status, context) = errors::of_op(&error);
                self.fail(status, &context);
            }
        }
    }

    /// The selected bucket.
    fn bucket(&self) -> Result<&Selected, Refusal> {
        self.session.selected.as_ref().ok_or_else(|| (Status::NoBucket, "select a bucket first".to_owned()))
    }

    fn has(&self, feature: Feature) -> bool {
        self.session.features.has(feature)
    }

    fn blank<'a>(&self, status: Status) -> Reply<'a> {
        Reply::new(self.call.code, status, self.call.opaque)
    }

    /// JSON if the connection knows it.
    fn json(&self) -> Datatype {
        if self.has(Feature::Json) { Datatype::JSON } else { Datatype::RAW }
    }

    /// Success, and nothing more to say.
    fn done(&mut self) -> Result<(), Refusal> {
        self.put(self.blank(Status::Success));
        Ok(())
    }

    fn value(&mut self, datatype: Datatype, value: &[u8]) -> Result<(), Refusal> {
        self.put(Reply { datatype, value: (value, &[]), ..self.blank(Status::Success) });
        Ok(())
    }

    /// Sends a reply, unless the opcode is quiet about it.
    fn put(&mut self, mut reply: Reply<'_>) {
        let took = self.took();
        let timings = self.session.selected.as_ref().map_or(&self.shared.unbound, |s| &s.timings);
        timings.record(self.call.code, took);
        if self.call.opcode.is_some_and(|opcode| opcode.silences(reply.status)) {
            return;
        }
        reply.server_duration = self.duration_code(took);
        reply.encode(self.out);
    }

    fn took(&self) -> Duration {
        self.shared.now().saturating_sub(self.call.received)
    }

    fn duration_code(&self, took: Duration) -> Option<u16> {
        self.has(Feature::Tracing).then(|| wire::frame_info::encode_duration_us(took.as_micros() as u64))
    }

    /// Sends an error as this client understands it.
    fn fail(&mut self, status: Status, context: &str) {
        self.shared.errors.count(status);
        if status == Status::NotMyVbucket && self.session.selected.is_some() {
            return self.not_my_vbucket();
        }
        let mut shown = status;
        if !self.has(Feature::Xerror) {
            match status.without_xerror(self.call.opcode.unwrap_or(Opcode::Noop)) {
                Legacy::Status(old) => shown = old,
                // Older than XERROR itself: there have always been clients that log in too late.
                Legacy::Close if status == Status::Eaccess && self.shared.is_stranger(self.session) => {}
                Legacy::Close => {
                    self.session.closing = true;
                    return;
                }
            }
        }
        let took = self.took();
        let timings = self.session.selected.as_ref().map_or(&self.shared.unbound, |s| &s.timings);
        timings.record(self.call.code, took);
        if self.call.opcode.is_some_and(|opcode| opcode.silences(shown)) {
            return;
        }
        let manifest_uid = matches!(status, Status::UnknownCollection | Status::UnknownScope).then_some(0);
        let body = ErrorBody { context, manifest_uid };
        let request = (self.call.code, self.call.opaque);
        encode_error(self.out, request, shown, body, self.session.features, self.duration_code(took));
    }

    /// Carries the configuration, so that the client finds the right node without asking.
    fn not_my_vbucket(&mut self) {
        let Some(selected) = &self.session.selected else { return };
        let (revision, config) = self.shared.cluster.bucket_config(&selected.shape);
        let known = self.has(Feature::DedupeNotMyVbucketClustermap)
            && self.session.config_sent.is_some_and(|sent| sent >= revision);
        let mut reply = self.blank(Status::NotMyVbucket);
        if !known {
            reply.datatype = self.json();
            reply.value = (config.as_bytes(), &[]);
            self.session.config_sent = Some(revision);
        }
        self.put(reply);
    }

    /// The extras of a mutation's reply, for those who want to know.
    fn token<'a>(&self, mutated: &engine::Mutated, buffer: &'a mut [u8; 16]) -> &'a [u8] {
        if !self.has(Feature::MutationSeqno) {
            return &[];
        }
        *buffer = mutation_token(mutated.uuid, mutated.seqno);
        buffer
    }

    /// The CAS a mutation's reply shows. Old memcached clients expect none of a delete.
    fn shown_cas(&self, cas: Cas) -> Cas {
        let delete = self.call.opcode.is_some_and(|opcode| opcode.loud() == Opcode::Delete);
        if delete && !self.session.greeted { Cas(0) } else { cas }
    }
}

/// Whether a connection in one of the places kept for an administrator may send this: what it takes to find out who it
/// is, and then what administrators do.
pub(crate) fn allowed_in_reserve(session: &Session, code: u8) -> bool {
    use Opcode as O;
    let Ok(opcode) = Opcode::from_wire(code) else { return true };
    let admin = session.identity.as_ref().is_some_and(|identity| identity.role == Role::Admin);
    match opcode {
        O::Hello | O::SaslListMechs | O::SaslAuth | O::SaslStep | O::GetErrorMap | O::Quit | O::QuitQ => true,
        O::Noop | O::Version | O::SelectBucket | O::GetClusterConfig | O::Stat | O::ListBuckets => admin,
        opcode => admin && needs_admin(opcode),
    }
}

fn needs_admin(opcode: Opcode) -> bool {
    matches!(
        opcode,
        Opcode::SetVbucket
            | Opcode::SetClusterConfig
            | Opcode::DelVbucket
            | Opcode::CreateBucket
            | Opcode::DeleteBucket
            | Opcode::CompactDb
            | Opcode::SetParam
            | Opcode::StopPersistence
            | Opcode::StartPersistence
            | Opcode::EnableTraffic
            | Opcode::DisableTraffic
            | Opcode::SetManifest
    )
}

/// Where clients look for a key.
fn vbucket_of(key: &[u8], vbuckets: u16) -> VbId {
    let hash = (crc32fast::hash(key) >> 16) & 0x7fff;
    VbId((hash % u32::from(vbuckets.max(1))) as u16)
}

fn not_supported(what: &str) -> Result<(), Refusal> {
    Err((Status::NotSupported, format!("{what} is not supported")))
}

fn einval<T>(context: &str) -> Result<T, Refusal> {
    Err((Status::Einval, context.to_owned()))
}

fn no_such_vbucket(_: VbId) -> Refusal {
    (Status::NotMyVbucket, String::new())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_where_clients_look_for_them() {
        for (key, vb) in [("foo", 115), ("bar", 767), ("hello", 528), ("key-1", 748), ("a", 183), ("airline_10", 361)] {
            assert_eq!(vbucket_of(key.as_bytes(), 1024), VbId(vb), "{key}");
        }
    }
}
