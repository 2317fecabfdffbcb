//! Sub-document commands. Single-path and multi-path requests run the same operations; only their frames differ.

use document::subdoc::{self, Features, Op, PathFlags, RequestError, SubdocError};
use engine::{Mutated, SubdocResult};
use types::{Cas, Datatype};
use wire::kv::{SubdocLookup, SubdocMutation, SubdocSingle};
use wire::{Feature, Opcode, Reply, Request, Status};

use super::{Context, Refusal};
use crate::connection::Form;
use crate::errors;

impl Context<'_> {
    fn subdoc_features(&self) -> Features {
        Features { xattr: self.has(Feature::Xattr), replica_read: self.has(Feature::SubdocReplicaRead) }
    }

    pub(super) fn subdoc_single(&mut self, request: &Request<'_>, single: &SubdocSingle<'_>) -> Result<(), Refusal> {
        let code = single.opcode as u8;
        let (flags, doc_flags, path_len) = (single.path_flags, single.doc_flags, single.path_len.into());
        let (body, features) = (single.body, self.subdoc_features());
        if PathFlags::from_bits(flags).is_some_and(|flags| flags.has(PathFlags::BINARY)) {
            self.call.form = Form::Binary;
        }
        if Op::from_wire(code).is_some_and(Op::is_mutation) {
            let with_cas = request.cas != Cas(0);
            let parsed = subdoc::single_mutation(code, flags, path_len, body, doc_flags, with_cas, features);
            let (spec, doc_flags) = parsed.map_err(refusal)?;
            let SubdocSingle { expiry, user_flags, .. } = *single;
            let op = engine::SubdocMutate { specs: &[spec], doc_flags, expiry, user_flags };
            self.execute(request, single.key, engine::Op::SubdocMutate(op))
        } else {
            let parsed = subdoc::single_lookup(code, flags, path_len, body, doc_flags, features);
            let (spec, doc_flags) = parsed.map_err(refusal)?;
            let op = engine::SubdocLookup { specs: &[spec], doc_flags };
            self.execute(request, single.key, engine::Op::SubdocLookup(op))
        }
    }

    pub(super) fn subdoc_lookup(&mut self, request: &Request<'_>, lookup: &SubdocLookup<'_>) -> Result<(), Refusal> {
        let parsed = subdoc::parse_lookup_specs(lookup.specs, lookup.doc_flags, self.subdoc_features());
        let (specs, doc_flags) = parsed.map_err(refusal)?;
        let op = engine::SubdocLookup { specs: &specs, doc_flags };
        self.execute(request, lookup.key, engine::Op::SubdocLookup(op))
    }

    pub(super) fn subdoc_mutation(
        &mut self,
        request: &Request<'_>,
        mutation: &SubdocMutation<'_>,
    ) -> Result<(), Refusal> {
        let with_cas = request.cas != Cas(0);
        let features = self.subdoc_features();
        let parsed = subdoc::parse_mutation_specs(mutation.specs, mutation.doc_flags, with_cas, features);
        let (specs, doc_flags) = parsed.map_err(refusal)?;
        let SubdocMutation { expiry, user_flags, .. } = *mutation;
        let op = engine::SubdocMutate { specs: &specs, doc_flags, expiry, user_flags };
        self.execute(request, mutation.key, engine::Op::SubdocMutate(op))
    }

    fn is_multi(&self) -> bool {
        matches!(self.call.opcode, Some(Opcode::SubdocMultiLookup | Opcode::SubdocMultiMutation))
    }

    pub(super) fn show_lookup(&mut self, cas: Cas, deleted: bool, results: Vec<SubdocResult>) {
        let fine = if deleted { Status::SubdocSuccessDeleted } else { Status::Success };
        if !self.is_multi() {
            match results.into_iter().next() {
                Some(Ok(fragment)) => {
                    let json = !fragment.is_empty() && self.call.form != Form::Binary;
                    let datatype = if json { self.json() } else { Datatype::RAW };
                    self.put(Reply { cas, datatype, value: (&fragment, &[]), ..self.blank(fine) });
                }
                Some(Err(error)) => self.fail(errors::of_subdoc(error), ""),
                None => self.fail(Status::Einternal, "the lookup has no result"),
            }
            return;
        }
        let mut value = Vec::with_capacity(results.iter().map(|r| 6 + r.as_ref().map_or(0, Vec::len)).sum());
        let mut status = fine;
        for result in &results {
            let (entry, fragment) = match result {
                Ok(fragment) => (Status::Success, &fragment[..]),
                Err(error) => {
                    status = path_failure(deleted);
                    (errors::of_subdoc(*error), &[][..])
                }
            };
            value.extend_from_slice(&(entry as u16).to_be_bytes());
            value.extend_from_slice(&(fragment.len() as u32).to_be_bytes());
            value.extend_from_slice(fragment);
        }
        self.put(Reply { cas, value: (&value, &[]), ..self.blank(status) });
    }

    pub(super) fn show_mutation(&mut self, mutated: &Mutated, deleted: bool, results: &[(u8, Vec<u8>)]) {
        let mut token = [0; 16];
        let extras = self.token(mutated, &mut token);
        let mut value = Vec::new();
        for (index, number) in results {
            if self.is_multi() {
                value.push(*index);
                value.extend_from_slice(&(Status::Success as u16).to_be_bytes());
                value.extend_from_slice(&(number.len() as u32).to_be_bytes());
            }
            value.extend_from_slice(number);
        }
        let status = if deleted { Status::SubdocSuccessDeleted } else { Status::Success };
        self.put(Reply { cas: mutated.cas, extras, value: (&value, &[]), ..self.blank(status) });
    }

    pub(super) fn show_failure(&mut self, index: u8, error: SubdocError, deleted: bool) {
        let failed = errors::of_subdoc(error);
        if !self.is_multi() {
            return self.fail(failed, "");
        }
        let [high, low] = (failed as u16).to_be_bytes();
        self.put(Reply { value: (&[index, high, low], &[]), ..self.blank(path_failure(deleted)) });
    }
}

fn path_failure(deleted: bool) -> Status {
    if deleted { Status::SubdocMultiPathFailureDeleted } else { Status::SubdocMultiPathFailure }
}

fn refusal(error: RequestError) -> Refusal {
    (errors::of_subdoc_request(error), error.to_string())
}
