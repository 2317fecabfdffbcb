//! Commands on one document, and what their replies look like.

use engine::{Delta, End, Op, OpError, OpResult, StoreMode, WithMetaMode};
use types::Datatype;
use wire::kv::{self, ConcatEnd, Direction, MetaVerb};
use wire::{Command, Feature, Opcode, Reply, Request, Status};

use super::{Context, Refusal};
use crate::connection::Form;
use crate::counts;

impl Context<'_> {
    pub(super) fn document(&mut self, request: &Request<'_>) -> Result<(), Refusal> {
        let datatype = request.datatype;
        let (key, op) = match request.command {
            Command::Get(get) => (get.key, Op::Get),
            Command::GetReplica(key) => (key, Op::GetReplica),
            Command::GetAndTouch(touch) => (touch.key, Op::GetAndTouch { expiry: touch.expiry }),
            Command::GetLocked(lock) => (lock.key, Op::GetAndLock { lock_s: lock.lock_s }),
            Command::Unlock(key) => (key, Op::Unlock),
            Command::Touch(touch) => (touch.key, Op::Touch { expiry: touch.expiry }),
            Command::Delete(key) => (key, Op::Delete),
            Command::EvictKey(key) => (key, Op::Evict),
            Command::GetMeta(get) => {
                if get.with_datatype {
                    self.call.form = Form::WithDatatype;
                }
                (get.key, Op::GetMeta)
            }
            Command::Store(store) => {
                let mode = match store.mode {
                    kv::StoreMode::Set => StoreMode::Set,
                    kv::StoreMode::Add => StoreMode::Add,
                    kv::StoreMode::Replace => StoreMode::Replace,
                };
                let kv::Store { flags, expiry, value, .. } = store;
                (store.key, Op::Store { mode, flags, expiry, datatype, value })
            }
            Command::Concat(concat) => {
                let end = match concat.end {
                    ConcatEnd::Append => End::Append,
                    ConcatEnd::Prepend => End::Prepend,
                };
                (concat.key, Op::Concat { end, datatype, value: concat.value })
            }
            Command::Arithmetic(arithmetic) => {
                let delta = match arithmetic.direction {
                    Direction::Increment => Delta::Increment(arithmetic.delta),
                    Direction::Decrement => Delta::Decrement(arithmetic.delta),
                };
                let op = Op::Arithmetic { delta, initial: arithmetic.initial, expiry: arithmetic.expiry };
                (arithmetic.key, op)
            }
            Command::WithMeta(meta) => {
                let mode = match meta.verb {
                    MetaVerb::Set => WithMetaMode::Set,
                    MetaVerb::Add => WithMetaMode::Add,
                    MetaVerb::Delete => WithMetaMode::Delete,
                };
                let kv::WithMeta { flags, expiry, rev, cas, options, value, .. } = meta;
                let op = engine::WithMeta { mode, flags, expiry, rev, cas, options: options.0, datatype, value };
                (meta.key, Op::WithMeta(op))
            }
            _ => unreachable!("the dispatcher sends single-document commands only"),
        };
        self.execute(request, key, op)
    }

    /// Sends what the engine said.
    pub(super) fn show(&mut self, reply: engine::Reply) {
        use engine::Reply as Said;
        let mut token = [0; 16];
        match reply {
            Said::Value { item, cas, datatype, body } => {
                let flags = item.meta().flags.to_be_bytes();
                let with_key = self.call.opcode.is_some_and(|opcode| opcode.loud() == Opcode::GetK);
                let key = match (with_key, self.has(Feature::Collections)) {
                    (false, _) => &[],
                    (true, true) => item.id(),
                    (true, false) => item.key().logical(),
                };
                let datatype = datatype & Datatype(self.session.features.datatypes()).without(Datatype::XATTR);
                let value = (body.of(&item), &[][..]);
                self.put(Reply { cas, datatype, extras: &flags, key, value, ..self.blank(Status::Success) });
            }
            Said::Meta { deleted, flags, expiry, rev, cas, datatype } => {
                let mut extras = Vec::with_capacity(21);
                extras.extend_from_slice(&u32::from(deleted).to_be_bytes());
                extras.extend_from_slice(&flags.to_be_bytes());
                extras.extend_from_slice(&expiry.to_be_bytes());
                extras.extend_from_slice(&rev.0.to_be_bytes());
                if self.call.form == Form::WithDatatype {
                    extras.push(datatype.0);
                }
                self.put(Reply { cas, extras: &extras, ..self.blank(Status::Success) });
            }
            Said::Mutated(mutated) => {
                let (cas, extras) = (self.shown_cas(mutated.cas), self.token(&mutated, &mut token));
                self.put(Reply { cas, extras, ..self.blank(Status::Success) });
            }
            Said::Counter { value, mutated } => {
                let (value, extras) = (value.to_be_bytes(), self.token(&mutated, &mut token));
                let cas = mutated.cas;
                self.put(Reply { cas, extras, value: (&value, &[]), ..self.blank(Status::Success) });
            }
            Said::Done { cas } => self.put(Reply { cas, ..self.blank(Status::Success) }),
            Said::Lookup { cas, deleted, results } => self.show_lookup(cas, deleted, results),
            Said::SubdocMutated { mutated, deleted, results } => self.show_mutation(&mutated, deleted, &results),
            Said::SubdocFailed { index, error, deleted } => self.show_failure(index, error, deleted),
        }
    }
}

/// Counts an operation by its outcome.
pub(super) fn count(opcode: Option<Opcode>, result: &OpResult) {
    use Opcode as O;
    match opcode.map(Opcode::loud) {
        Some(O::Get | O::GetK | O::GetReplica | O::GetAndTouch | O::GetLocked) => {
            counts::CMD_GET.inc();
            match result {
                Ok(_) => counts::GET_HITS.inc(),
                Err(OpError::NotFound) => counts::GET_MISSES.inc(),
                Err(_) => {}
            }
        }
        Some(O::Set | O::Add | O::Replace | O::Append | O::Prepend | O::Increment | O::Decrement | O::Delete) => {
            counts::CMD_SET.inc();
        }
        _ => {}
    }
}
