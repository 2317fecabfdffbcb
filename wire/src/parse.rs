//! Frame to request. The checks come in the order the protocol gives them, since the first one that fails decides
//! the status a client sees: opcode, then everything the row of the opcode table says, then framing extras, then the
//! key and what only this opcode knows about its fields.

use std::borrow::Cow;

use types::{Cas, CollectionId, Datatype, KEY_LEN_MAX, KeyError, RevSeqno, Seqno, VbId, VbState, VbUuid};

use crate::frame::{Frame, Magic, u16_at, u32_at, u64_at};
use crate::frame_info;
use crate::hello::{Feature, FeatureSet, RequestedFeatures};
use crate::kv::*;
use crate::opcode::{CasRule, Info, Opcode};
use crate::status::Status;

/// Why a frame is no request, and what to tell the client.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}: {context}", .status.name())]
pub struct ParseError {
    pub status: Status,
    /// For the error body.
    pub context: Cow<'static, str>,
}

impl ParseError {
    pub fn new(status: Status, context: impl Into<Cow<'static, str>>) -> ParseError {
        ParseError { status, context: context.into() }
    }
}

fn einval<T>(context: impl Into<Cow<'static, str>>) -> Result<T, ParseError> {
    Err(ParseError::new(Status::Einval, context))
}

/// Reads a client's request. The connection has been found allowed to send the opcode
/// ([`crate::opcode::allowed_before_auth`]).
///
/// # Errors
/// The status to answer with.
pub fn parse<'a>(frame: &Frame<'a>, features: FeatureSet) -> Result<Request<'a>, ParseError> {
    let header = &frame.header;
    if !matches!(header.magic, Magic::Request | Magic::AltRequest) {
        return einval("the frame is a response, not a request");
    }
    let opcode = Opcode::from_wire(header.opcode).map_err(|status| {
        let name = crate::opcode::name(header.opcode);
        ParseError::new(status, format!("this server does not answer opcode {:#04x}, {name}", header.opcode))
    })?;
    let info = opcode.info();
    check_layout(frame, info, features)?;
    let frames = frame_info::parse_request(frame.framing_extras, opcode)?;
    let command = Fields { frame, info, features }.command(opcode)?;
    Ok(Request {
        opcode,
        vbucket: VbId(header.vbucket_or_status),
        opaque: header.opaque,
        cas: Cas(header.cas),
        datatype: Datatype(header.datatype),
        frames,
        command,
    })
}

/// Everything the row of the table says about a frame.
fn check_layout(frame: &Frame<'_>, info: &Info, features: FeatureSet) -> Result<(), ParseError> {
    let Frame { header, extras, key, value, .. } = frame;
    let name = info.name;
    if header.datatype > 7 {
        return einval(format!("datatype {:#04x} has unknown bits", header.datatype));
    }
    if !info.extras.contains(&header.extras_len) {
        return einval(format!("{name} takes extras of {:?} bytes, not {}", info.extras, extras.len()));
    }
    if !info.key.allows(key.len()) {
        return einval(format!("{name} {} a key", if key.is_empty() { "needs" } else { "takes no" }));
    }
    let key_len_max = KEY_LEN_MAX + usize::from(features.has(Feature::Collections));
    if info.collection_key() && key.len() > key_len_max {
        return einval(format!("the key has {} bytes, more than {key_len_max}", key.len()));
    }
    if !info.value.allows(value.len()) {
        return einval(format!("{name} {} a value", if value.is_empty() { "needs" } else { "takes no" }));
    }
    if !info.cas.allows(header.cas) {
        return einval(format!("{name} {} a CAS", if info.cas == CasRule::Set { "needs" } else { "takes no" }));
    }
    if header.datatype & !info.datatypes != 0 {
        return einval(format!("{name} does not take datatype {:#04x}", header.datatype));
    }
    if header.datatype & !features.datatypes() != 0 {
        return einval(format!("datatype {:#04x} was not negotiated", header.datatype));
    }
    Ok(())
}

/// A frame whose layout has been checked. The fields of the extras may be read by the lengths the table allows.
struct Fields<'f, 'a> {
    frame: &'f Frame<'a>,
    info: &'static Info,
    features: FeatureSet,
}

impl<'a> Fields<'_, 'a> {
    fn command(&self, opcode: Opcode) -> Result<Command<'a>, ParseError> {
        let Frame { extras, key: name, value, .. } = *self.frame;
        Ok(match opcode.loud() {
            Opcode::Get => Command::Get(Get { key: self.key()?, with_key: false }),
            Opcode::GetK => Command::Get(Get { key: self.key()?, with_key: true }),
            Opcode::Set => Command::Store(self.store(StoreMode::Set)?),
            Opcode::Add => Command::Store(self.store(StoreMode::Add)?),
            Opcode::Replace => Command::Store(self.store(StoreMode::Replace)?),
            Opcode::Delete => Command::Delete(self.key()?),
            Opcode::Increment => Command::Arithmetic(self.arithmetic(Direction::Increment)?),
            Opcode::Decrement => Command::Arithmetic(self.arithmetic(Direction::Decrement)?),
            Opcode::Append => Command::Concat(Concat { end: ConcatEnd::Append, key: self.key()?, value }),
            Opcode::Prepend => Command::Concat(Concat { end: ConcatEnd::Prepend, key: self.key()?, value }),
            Opcode::Touch => Command::Touch(Touch { key: self.key()?, expiry: u32_at(extras, 0) }),
            Opcode::GetAndTouch => Command::GetAndTouch(Touch { key: self.key()?, expiry: u32_at(extras, 0) }),
            Opcode::GetLocked => {
                Command::GetLocked(GetLocked { key: self.key()?, lock_s: self.optional_u32(0).unwrap_or(0) })
            }
            Opcode::Unlock => Command::Unlock(self.key()?),
            Opcode::GetReplica => Command::GetReplica(self.key()?),
            Opcode::EvictKey => Command::EvictKey(self.key()?),
            Opcode::GetRandomKey => Command::GetRandomKey(self.get_random_key()?),
            Opcode::GetKeys => Command::GetKeys(GetKeys { start: self.key()?, count: self.optional_u32(0) }),
            Opcode::GetMeta => Command::GetMeta(self.get_meta()?),
            Opcode::SetWithMeta => Command::WithMeta(self.with_meta(MetaVerb::Set)?),
            Opcode::AddWithMeta => Command::WithMeta(self.with_meta(MetaVerb::Add)?),
            Opcode::DelWithMeta => Command::WithMeta(self.with_meta(MetaVerb::Delete)?),
            Opcode::SubdocMultiLookup => Command::SubdocLookup(SubdocLookup {
                key: self.key()?,
                doc_flags: extras.first().copied().unwrap_or(0),
                specs: value,
            }),
            Opcode::SubdocMultiMutation => Command::SubdocMutation(self.subdoc_mutation()?),
            Opcode::SubdocGet
            | Opcode::SubdocExists
            | Opcode::SubdocGetCount
            | Opcode::SubdocDictAdd
            | Opcode::SubdocDictUpsert
            | Opcode::SubdocDelete
            | Opcode::SubdocReplace
            | Opcode::SubdocArrayPushLast
            | Opcode::SubdocArrayPushFirst
            | Opcode::SubdocArrayInsert
            | Opcode::SubdocArrayAddUnique
            | Opcode::SubdocCounter
            | Opcode::SubdocReplaceBodyWithXattr => Command::SubdocSingle(self.subdoc_single(opcode)?),
            Opcode::Observe => match ObserveKeys::parse(value, self.collections()) {
                Some(keys) => Command::Observe(keys),
                None => return einval("the keys to observe are cut short or malformed"),
            },
            Opcode::ObserveSeqno => match value.len() {
                8 => Command::ObserveSeqno(VbUuid(u64_at(value, 0))),
                n => return einval(format!("a vBucket uuid takes 8 bytes, not {n}")),
            },
            Opcode::GetAllVbSeqnos => Command::GetAllVbSeqnos(self.get_all_vb_seqnos()?),
            Opcode::GetFailoverLog => Command::GetFailoverLog,
            Opcode::SeqnoPersistence => Command::SeqnoPersistence(Seqno(u64_at(extras, 0))),
            Opcode::Hello => Command::Hello(Hello { agent: name, features: RequestedFeatures::parse(value)? }),
            Opcode::SaslListMechs => Command::SaslListMechs,
            Opcode::SaslAuth => Command::SaslAuth(Sasl { mechanism: name, message: value }),
            Opcode::SaslStep => Command::SaslStep(Sasl { mechanism: name, message: value }),
            Opcode::SelectBucket => Command::SelectBucket(name),
            Opcode::GetClusterConfig => Command::GetClusterConfig((!extras.is_empty()).then(|| ConfigVersion {
                epoch: u64_at(extras, 0).cast_signed(),
                rev: u64_at(extras, 8).cast_signed(),
            })),
            Opcode::GetErrorMap => {
                self.no_vbucket()?;
                match value.len() {
                    2 => Command::GetErrorMap(u16_at(value, 0)),
                    n => return einval(format!("an error map version takes 2 bytes, not {n}")),
                }
            }
            Opcode::GetManifest => Command::GetManifest,
            Opcode::SetManifest => Command::SetManifest(value),
            Opcode::GetCollectionId => Command::GetCollectionId(self.path_to_id()?),
            Opcode::GetScopeId => Command::GetScopeId(self.path_to_id()?),
            Opcode::Noop => Command::Noop,
            Opcode::Version => Command::Version,
            Opcode::Quit => Command::Quit,
            Opcode::Stat => Command::Stat(Stat { group: name, arguments: value }),
            Opcode::Verbosity => Command::Verbosity(u32_at(extras, 0)),
            Opcode::Flush => Command::Flush(self.optional_u32(0).unwrap_or(0)),
            Opcode::SetVbucket => match vb_state(extras[0]) {
                Some(state) => Command::SetVbucket(SetVbucket { state, meta: value }),
                None => return einval(format!("{} is no vBucket state", extras[0])),
            },
            Opcode::GetVbucket => Command::GetVbucket,
            Opcode::DelVbucket => Command::DelVbucket(value),
            Opcode::CompactDb => Command::CompactDb(CompactDb {
                purge_before_s: u64_at(extras, 0),
                purge_before_seqno: Seqno(u64_at(extras, 8)),
                drop_deletes: extras[16] != 0,
            }),
            Opcode::SetParam => Command::SetParam(SetParam { group: self.param_group()?, name, value }),
            Opcode::StartPersistence => Command::StartPersistence,
            Opcode::StopPersistence => Command::StopPersistence,
            Opcode::EnableTraffic => Command::EnableTraffic,
            Opcode::DisableTraffic => Command::DisableTraffic,
            Opcode::ListBuckets => Command::ListBuckets,
            Opcode::CreateBucket => Command::CreateBucket(CreateBucket { name, config: value }),
            Opcode::DeleteBucket => Command::DeleteBucket(DeleteBucket { name, arguments: value }),
            Opcode::DcpOpen
            | Opcode::DcpAddStream
            | Opcode::DcpCloseStream
            | Opcode::DcpStreamReq
            | Opcode::DcpGetFailoverLog
            | Opcode::DcpStreamEnd
            | Opcode::DcpSnapshotMarker
            | Opcode::DcpMutation
            | Opcode::DcpDeletion
            | Opcode::DcpExpiration
            | Opcode::DcpSetVbucketState
            | Opcode::DcpNoop
            | Opcode::DcpBufferAck
            | Opcode::DcpControl
            | Opcode::DcpSystemEvent
            | Opcode::DcpPrepare
            | Opcode::DcpSeqnoAck
            | Opcode::DcpCommit
            | Opcode::DcpAbort
            | Opcode::DcpSeqnoAdvanced => Command::Dcp(crate::dcp::decode(opcode, self.frame, || self.key())?),
            Opcode::GetQ
            | Opcode::GetKQ
            | Opcode::SetQ
            | Opcode::AddQ
            | Opcode::ReplaceQ
            | Opcode::DeleteQ
            | Opcode::IncrementQ
            | Opcode::DecrementQ
            | Opcode::QuitQ
            | Opcode::FlushQ
            | Opcode::AppendQ
            | Opcode::PrependQ
            | Opcode::GetAndTouchQ
            | Opcode::GetMetaQ
            | Opcode::SetWithMetaQ
            | Opcode::AddWithMetaQ
            | Opcode::DelWithMetaQ => unreachable!("`loud` gives no quiet opcode"),
        })
    }

    fn collections(&self) -> bool {
        self.features.has(Feature::Collections)
    }

    fn key(&self) -> Result<Key<'a>, ParseError> {
        debug_assert!(self.info.collection_key());
        Key::parse(self.frame.key, self.collections()).or_else(|why| {
            einval(match why {
                KeyError::Empty => "the key is empty",
                KeyError::TooLong => "the key is too long",
                KeyError::BadCollection => "the key does not start with a valid collection id",
            })
        })
    }

    fn optional_u32(&self, at: usize) -> Option<u32> {
        self.frame.extras.get(at..at + 4).map(|bytes| u32_at(bytes, 0))
    }

    fn no_vbucket(&self) -> Result<(), ParseError> {
        match self.frame.header.vbucket_or_status {
            0 => Ok(()),
            vb => einval(format!("{} takes no vBucket, not {vb}", self.info.name)),
        }
    }

    fn store(&self, mode: StoreMode) -> Result<Store<'a>, ParseError> {
        let Frame { extras, value, .. } = *self.frame;
        Ok(Store { mode, key: self.key()?, flags: u32_at(extras, 0), expiry: u32_at(extras, 4), value })
    }

    fn arithmetic(&self, direction: Direction) -> Result<Arithmetic<'a>, ParseError> {
        let extras = self.frame.extras;
        let expiry = u32_at(extras, 16);
        let initial = (expiry != u32::MAX).then(|| u64_at(extras, 8));
        Ok(Arithmetic { direction, key: self.key()?, delta: u64_at(extras, 0), initial, expiry })
    }

    fn get_random_key(&self) -> Result<GetRandomKey, ParseError> {
        let extras = self.frame.extras;
        if extras.is_empty() == self.collections() {
            return einval("GET_RANDOM_KEY takes a collection id exactly when collections are negotiated");
        }
        Ok(GetRandomKey {
            collection: CollectionId(self.optional_u32(0).unwrap_or(0)),
            include_xattr: extras.get(4).is_some_and(|&include| include != 0),
        })
    }

    fn get_meta(&self) -> Result<GetMeta<'a>, ParseError> {
        let key = self.key()?;
        match self.frame.extras {
            [] | [0 | 1] => Ok(GetMeta { key, with_datatype: false }),
            [2] => Ok(GetMeta { key, with_datatype: true }),
            _ => einval("GET_META versions are 0, 1 and 2"),
        }
    }

    fn with_meta(&self, verb: MetaVerb) -> Result<WithMeta<'a>, ParseError> {
        let Frame { extras, value, .. } = *self.frame;
        let (options, meta_len) = match extras.len() {
            26 => (0, u16_at(extras, 24)),
            28 => (u32_at(extras, 24), 0),
            30 => (u32_at(extras, 24), u16_at(extras, 28)),
            _ => (0, 0),
        };
        let key = self.key()?;
        let options = MetaOptions(options);
        if options.0 & !MetaOptions::ALL.0 != 0 {
            return einval(format!("the options {:#x} have unknown bits", options.0));
        }
        let regenerate = options.has(MetaOptions::REGENERATE_CAS);
        if regenerate && !options.has(MetaOptions::SKIP_CONFLICT_RESOLUTION) {
            return einval("REGENERATE_CAS needs SKIP_CONFLICT_RESOLUTION");
        }
        let cas = u64_at(extras, 16);
        if (cas == 0 || cas == u64::MAX) && !regenerate {
            return einval("the document's CAS may not be 0 or all ones");
        }
        // Extended metadata trails the value. None of it is used.
        let Some(value_len) = value.len().checked_sub(usize::from(meta_len)) else {
            return einval(format!("{meta_len} bytes of metadata do not fit {} bytes of value", value.len()));
        };
        Ok(WithMeta {
            verb,
            key,
            flags: u32_at(extras, 0),
            expiry: u32_at(extras, 4),
            rev: RevSeqno(u64_at(extras, 8)),
            cas: Cas(cas),
            options,
            value: &value[..value_len],
        })
    }

    fn subdoc_single(&self, opcode: Opcode) -> Result<SubdocSingle<'a>, ParseError> {
        let Frame { extras, value: body, .. } = *self.frame;
        let len = extras.len();
        Ok(SubdocSingle {
            opcode,
            key: self.key()?,
            path_flags: extras[2],
            path_len: u16_at(extras, 0),
            body,
            doc_flags: if matches!(len, 4 | 8 | 12) { extras[len - 1] } else { 0 },
            expiry: self.optional_u32(3),
            user_flags: self.optional_u32(7),
        })
    }

    fn subdoc_mutation(&self) -> Result<SubdocMutation<'a>, ParseError> {
        let Frame { extras, value, .. } = *self.frame;
        let len = extras.len();
        Ok(SubdocMutation {
            key: self.key()?,
            doc_flags: if matches!(len, 1 | 5 | 9) { extras[len - 1] } else { 0 },
            expiry: self.optional_u32(0),
            user_flags: self.optional_u32(4),
            specs: value,
        })
    }

    fn get_all_vb_seqnos(&self) -> Result<GetAllVbSeqnos, ParseError> {
        let state = match self.optional_u32(0) {
            None | Some(0) => None,
            Some(code) => match u8::try_from(code).ok().and_then(vb_state) {
                Some(state) => Some(state),
                None => return einval(format!("{code} is no vBucket state")),
            },
        };
        let collection = self.optional_u32(4).map(CollectionId);
        if collection.is_some() && !self.collections() {
            return einval("a collection id needs collections to be negotiated");
        }
        Ok(GetAllVbSeqnos { state, collection })
    }

    fn path_to_id(&self) -> Result<&'a [u8], ParseError> {
        self.no_vbucket()?;
        match (self.frame.key, self.frame.value) {
            ([], path) | (path, []) => Ok(path),
            _ => einval("the name goes into the value or the key, not both"),
        }
    }

    fn param_group(&self) -> Result<ParamGroup, ParseError> {
        Ok(match u32_at(self.frame.extras, 0) {
            1 => ParamGroup::Flush,
            2 => ParamGroup::Replication,
            3 => ParamGroup::Checkpoint,
            4 => ParamGroup::Dcp,
            5 => ParamGroup::Vbucket,
            6 => ParamGroup::Config,
            other => return einval(format!("{other} is no group of parameters")),
        })
    }
}

pub(crate) fn vb_state(code: u8) -> Option<VbState> {
    [VbState::Active, VbState::Replica, VbState::Pending, VbState::Dead].into_iter().find(|s| *s as u8 == code)
}
