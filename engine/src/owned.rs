//! A request that outlives the bytes it came in: what has to wait for the disk takes its own copy along.

use document::subdoc::{LookupSpec, MutationSpec};
use types::{Cas, Datatype, KeyBuf, VbId, allocated};

use crate::op::{Op, Request, Requirement, SubdocLookup, SubdocMutate, WithMeta};

/// A spec without its path and value, and these.
type OwnedMutation = (MutationSpec<'static>, Box<[u8]>, Box<[u8]>);

/// See [`OwnedRequest::lend`].
pub(crate) struct OwnedRequest {
    vb: VbId,
    key: KeyBuf,
    cas: Cas,
    durability: Option<Requirement>,
    preserve_expiry: bool,
    accepts: Datatype,
    op: Op<'static>,
    /// The value of the operations that carry one; in `op` it is empty.
    value: Box<[u8]>,
    /// Path and value of each spec; in `op` there are none.
    lookups: Vec<(LookupSpec<'static>, Box<[u8]>)>,
    mutations: Vec<OwnedMutation>,
}

impl OwnedRequest {
    pub fn of(request: &Request<'_>) -> OwnedRequest {
        let (mut lookups, mut mutations) = (Vec::new(), Vec::new());
        let (op, value): (Op<'static>, &[u8]) = match request.op {
            Op::Store { mode, flags, expiry, datatype, value } => {
                (Op::Store { mode, flags, expiry, datatype, value: &[] }, value)
            }
            Op::Concat { end, datatype, value } => (Op::Concat { end, datatype, value: &[] }, value),
            Op::WithMeta(WithMeta { mode, flags, expiry, rev, cas, options, datatype, value }) => {
                (Op::WithMeta(WithMeta { mode, flags, expiry, rev, cas, options, datatype, value: &[] }), value)
            }
            Op::SubdocLookup(SubdocLookup { specs, doc_flags }) => {
                lookups = specs.iter().map(|s| (LookupSpec { path: &[], ..*s }, s.path.into())).collect();
                (Op::SubdocLookup(SubdocLookup { specs: &[], doc_flags }), &[])
            }
            Op::SubdocMutate(SubdocMutate { specs, doc_flags, expiry, user_flags }) => {
                let own = |s: &MutationSpec<'_>| {
                    (MutationSpec { path: &[], value: &[], ..*s }, s.path.into(), s.value.into())
                };
                mutations = specs.iter().map(own).collect();
                (Op::SubdocMutate(SubdocMutate { specs: &[], doc_flags, expiry, user_flags }), &[])
            }
            Op::Get => (Op::Get, &[]),
            Op::GetReplica => (Op::GetReplica, &[]),
            Op::GetMeta => (Op::GetMeta, &[]),
            Op::GetAndTouch { expiry } => (Op::GetAndTouch { expiry }, &[]),
            Op::Touch { expiry } => (Op::Touch { expiry }, &[]),
            Op::GetAndLock { lock_s } => (Op::GetAndLock { lock_s }, &[]),
            Op::Unlock => (Op::Unlock, &[]),
            Op::Delete => (Op::Delete, &[]),
            Op::Arithmetic { delta, initial, expiry } => (Op::Arithmetic { delta, initial, expiry }, &[]),
            Op::Evict => (Op::Evict, &[]),
        };
        OwnedRequest {
            vb: request.vb,
            key: KeyBuf::copy_of(request.key),
            cas: request.cas,
            durability: request.durability,
            preserve_expiry: request.preserve_expiry,
            accepts: request.accepts,
            op,
            value: value.into(),
            lookups,
            mutations,
        }
    }

    /// Bytes of memory this holds, near enough.
    pub fn memory(&self) -> usize {
        let lookups = self.lookups.iter().map(|(spec, path)| size_of_val(spec) + allocated(path.len()));
        let mutations = self.mutations.iter();
        let mutations =
            mutations.map(|(spec, path, value)| size_of_val(spec) + allocated(path.len()) + allocated(value.len()));
        size_of::<OwnedRequest>() + allocated(self.value.len()) + lookups.sum::<usize>() + mutations.sum::<usize>()
    }

    /// Gives the request to `run`, borrowed from this copy.
    pub fn lend<R>(&self, run: impl FnOnce(&Request<'_>) -> R) -> R {
        let lookups: Vec<_> = self.lookups.iter().map(|(spec, path)| LookupSpec { path, ..*spec }).collect();
        let mutations: Vec<_> =
            self.mutations.iter().map(|(spec, path, value)| MutationSpec { path, value, ..*spec }).collect();
        let value = &*self.value;
        let op = match self.op {
            Op::Store { mode, flags, expiry, datatype, .. } => Op::Store { mode, flags, expiry, datatype, value },
            Op::Concat { end, datatype, .. } => Op::Concat { end, datatype, value },
            Op::WithMeta(meta) => Op::WithMeta(WithMeta { value, ..meta }),
            Op::SubdocLookup(lookup) => Op::SubdocLookup(SubdocLookup { specs: &lookups, ..lookup }),
            Op::SubdocMutate(mutate) => Op::SubdocMutate(SubdocMutate { specs: &mutations, ..mutate }),
            other => other,
        };
        run(&Request {
            vb: self.vb,
            key: self.key.as_key(),
            cas: self.cas,
            durability: self.durability,
            preserve_expiry: self.preserve_expiry,
            accepts: self.accepts,
            op,
        })
    }
}
