//! Requests as values: what a client asked for, with every length checked and every number read. Keys and values
//! still borrow from the frame.

use types::{Cas, Datatype, DocKey, KEY_LEN_MAX, KeyBuf, KeyError, RevSeqno, Seqno, VbId, VbState, VbUuid};

use crate::dcp::Message;
use crate::frame::u16_at;
use crate::frame_info::RequestFrames;
use crate::hello::RequestedFeatures;
use crate::opcode::Opcode;

/// One request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request<'a> {
    pub opcode: Opcode,
    pub vbucket: VbId,
    /// Goes back as it came.
    pub opaque: u32,
    /// The precondition; 0: none.
    pub cas: Cas,
    /// What the client says the value is. Allowed for the opcode and switched on for the connection; not verified.
    pub datatype: Datatype,
    pub frames: RequestFrames<'a>,
    pub command: Command<'a>,
}

/// A key as the client sent it, checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Key<'a> {
    /// With its collection prefix: the connection negotiated Collections.
    Prefixed(DocKey<'a>),
    /// Without: a key of the default collection.
    Bare(&'a [u8]),
}

impl<'a> Key<'a> {
    /// # Errors
    /// Empty, too long, or a bad collection prefix: all answered with `Einval`.
    pub fn parse(bytes: &'a [u8], collections: bool) -> Result<Key<'a>, KeyError> {
        match bytes.len() {
            _ if collections => DocKey::parse(bytes).map(Key::Prefixed),
            0 => Err(KeyError::Empty),
            n if n > KEY_LEN_MAX => Err(KeyError::TooLong),
            _ => Ok(Key::Bare(bytes)),
        }
    }

    /// The bytes to echo to the client.
    pub fn wire(self) -> &'a [u8] {
        match self {
            Key::Prefixed(key) => key.as_bytes(),
            Key::Bare(bytes) => bytes,
        }
    }

    /// The key as the engine knows it. Copies at most a key's length, to the stack, and only for a bare key.
    pub fn resolve(self) -> ResolvedKey<'a> {
        match self {
            Key::Prefixed(key) => ResolvedKey::Borrowed(key),
            Key::Bare(bytes) => {
                ResolvedKey::Buffered(KeyBuf::in_default_collection(bytes).expect("its length was checked by parse"))
            }
        }
    }
}

/// A key with its collection prefix, borrowed from the frame if it was there.
// Lives on the stack for one request; a box would be the allocation it exists to avoid.
#[allow(clippy::large_enum_variant)]
pub enum ResolvedKey<'a> {
    Borrowed(DocKey<'a>),
    Buffered(KeyBuf),
}

impl ResolvedKey<'_> {
    pub fn as_key(&self) -> DocKey<'_> {
        match self {
            ResolvedKey::Borrowed(key) => *key,
            ResolvedKey::Buffered(buffer) => buffer.as_key(),
        }
    }
}

/// What to do. Quiet opcodes give the command of their loud form; ask the opcode whether to reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command<'a> {
    Get(Get<'a>),
    GetReplica(Key<'a>),
    GetAndTouch(Touch<'a>),
    GetLocked(GetLocked<'a>),
    /// The CAS is the lock's, never 0.
    Unlock(Key<'a>),
    GetRandomKey(GetRandomKey),
    GetKeys(GetKeys<'a>),
    Store(Store<'a>),
    Concat(Concat<'a>),
    Arithmetic(Arithmetic<'a>),
    Delete(Key<'a>),
    Touch(Touch<'a>),
    EvictKey(Key<'a>),
    GetMeta(GetMeta<'a>),
    WithMeta(WithMeta<'a>),
    SubdocSingle(SubdocSingle<'a>),
    SubdocLookup(SubdocLookup<'a>),
    SubdocMutation(SubdocMutation<'a>),
    Observe(ObserveKeys<'a>),
    ObserveSeqno(VbUuid),
    GetAllVbSeqnos(GetAllVbSeqnos),
    GetFailoverLog,
    SeqnoPersistence(Seqno),
    Hello(Hello<'a>),
    SaslListMechs,
    SaslAuth(Sasl<'a>),
    SaslStep(Sasl<'a>),
    SelectBucket(&'a [u8]),
    /// The version the client knows already, if it says so.
    GetClusterConfig(Option<ConfigVersion>),
    /// The newest version the client understands.
    GetErrorMap(u16),
    GetManifest,
    SetManifest(&'a [u8]),
    /// `scope.collection`.
    GetCollectionId(&'a [u8]),
    /// `scope`, or `scope.ignored`.
    GetScopeId(&'a [u8]),
    Noop,
    Version,
    Quit,
    Stat(Stat<'a>),
    Verbosity(u32),
    /// Seconds to wait before; absent and 0 both mean now.
    Flush(u32),
    SetVbucket(SetVbucket<'a>),
    GetVbucket,
    DelVbucket(&'a [u8]),
    CompactDb(CompactDb),
    SetParam(SetParam<'a>),
    StartPersistence,
    StopPersistence,
    EnableTraffic,
    DisableTraffic,
    ListBuckets,
    CreateBucket(CreateBucket<'a>),
    DeleteBucket(DeleteBucket<'a>),
    Dcp(Message<'a>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Get<'a> {
    pub key: Key<'a>,
    /// The reply to a hit carries the key.
    pub with_key: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GetLocked<'a> {
    pub key: Key<'a>,
    /// Seconds as asked for; absent is 0. 0 and too much both mean the default.
    pub lock_s: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GetRandomKey {
    /// The default collection if the connection has no collections.
    pub collection: types::CollectionId,
    pub include_xattr: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GetKeys<'a> {
    /// Inclusive.
    pub start: Key<'a>,
    pub count: Option<u32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreMode {
    Set,
    Add,
    Replace,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Store<'a> {
    pub mode: StoreMode,
    pub key: Key<'a>,
    pub flags: u32,
    /// As sent: 0, relative seconds or an absolute time.
    pub expiry: u32,
    pub value: &'a [u8],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConcatEnd {
    Append,
    Prepend,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Concat<'a> {
    pub end: ConcatEnd,
    pub key: Key<'a>,
    pub value: &'a [u8],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    Increment,
    Decrement,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arithmetic<'a> {
    pub direction: Direction,
    pub key: Key<'a>,
    pub delta: u64,
    /// What a missing document is created with; `None`: it is not created.
    pub initial: Option<u64>,
    /// Of a created document, as sent.
    pub expiry: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Touch<'a> {
    pub key: Key<'a>,
    /// As sent; 0 clears it.
    pub expiry: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GetMeta<'a> {
    pub key: Key<'a>,
    /// The reply's extras end with the datatype.
    pub with_datatype: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetaVerb {
    Set,
    Add,
    Delete,
}

/// Options of the with-meta family.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MetaOptions(pub u32);

impl MetaOptions {
    pub const FORCE: MetaOptions = MetaOptions(0x01);
    /// Required by buckets that resolve conflicts by last write, refused by others.
    pub const FORCE_ACCEPT: MetaOptions = MetaOptions(0x02);
    pub const REGENERATE_CAS: MetaOptions = MetaOptions(0x04);
    pub const SKIP_CONFLICT_RESOLUTION: MetaOptions = MetaOptions(0x08);
    pub const IS_EXPIRATION: MetaOptions = MetaOptions(0x10);
    pub const ALL: MetaOptions = MetaOptions(0x1f);

    pub const fn has(self, option: MetaOptions) -> bool {
        self.0 & option.0 != 0
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WithMeta<'a> {
    pub verb: MetaVerb,
    pub key: Key<'a>,
    pub flags: u32,
    /// When it expires; for a delete, when it was deleted.
    pub expiry: u32,
    pub rev: RevSeqno,
    /// The document's CAS from now on; 0 or all ones only together with `REGENERATE_CAS`.
    pub cas: Cas,
    pub options: MetaOptions,
    pub value: &'a [u8],
}

/// Flags, path and value are as sent: whether they suit the operation is checked where it is carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SubdocSingle<'a> {
    pub opcode: Opcode,
    pub key: Key<'a>,
    pub path_flags: u8,
    pub path_len: u16,
    /// The path, then the value. May be shorter than the path is said to be.
    pub body: &'a [u8],
    pub doc_flags: u8,
    pub expiry: Option<u32>,
    pub user_flags: Option<u32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SubdocLookup<'a> {
    pub key: Key<'a>,
    pub doc_flags: u8,
    /// The operations, back to back, as sent.
    pub specs: &'a [u8],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SubdocMutation<'a> {
    pub key: Key<'a>,
    pub doc_flags: u8,
    pub expiry: Option<u32>,
    pub user_flags: Option<u32>,
    /// The operations, back to back, as sent.
    pub specs: &'a [u8],
}

/// The keys of an OBSERVE: checked, so walking them cannot fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ObserveKeys<'a> {
    rest: &'a [u8],
    collections: bool,
}

impl<'a> ObserveKeys<'a> {
    /// `None`: cut short, or a bad key.
    pub(crate) fn parse(value: &'a [u8], collections: bool) -> Option<ObserveKeys<'a>> {
        let keys = ObserveKeys { rest: value, collections };
        let mut walk = keys;
        while !walk.rest.is_empty() {
            walk.split_first()?;
        }
        Some(keys)
    }

    fn split_first(&mut self) -> Option<(VbId, Key<'a>)> {
        let (head, rest) = self.rest.split_at_checked(4)?;
        let (key, rest) = rest.split_at_checked(usize::from(u16_at(head, 2)))?;
        self.rest = rest;
        Some((VbId(u16_at(head, 0)), Key::parse(key, self.collections).ok()?))
    }
}

impl<'a> Iterator for ObserveKeys<'a> {
    type Item = (VbId, Key<'a>);

    fn next(&mut self) -> Option<Self::Item> {
        self.split_first()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GetAllVbSeqnos {
    /// `None`: whatever is active, replica or pending.
    pub state: Option<VbState>,
    pub collection: Option<types::CollectionId>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello<'a> {
    /// Free text, or a JSON object. Nothing may depend on it.
    pub agent: &'a [u8],
    pub features: RequestedFeatures<'a>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sasl<'a> {
    /// In any case of letters.
    pub mechanism: &'a [u8],
    pub message: &'a [u8],
}

/// A version of a cluster configuration; epochs compare first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ConfigVersion {
    pub epoch: i64,
    pub rev: i64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stat<'a> {
    /// The group, possibly followed by a space and arguments. Empty: the general ones.
    pub group: &'a [u8],
    /// Empty, or JSON.
    pub arguments: &'a [u8],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SetVbucket<'a> {
    pub state: VbState,
    /// Empty, or JSON with the replication topology.
    pub meta: &'a [u8],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CompactDb {
    /// Unix seconds; 0: no such limit.
    pub purge_before_s: u64,
    pub purge_before_seqno: Seqno,
    pub drop_deletes: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParamGroup {
    Flush,
    Replication,
    Checkpoint,
    Dcp,
    Vbucket,
    Config,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SetParam<'a> {
    pub group: ParamGroup,
    pub name: &'a [u8],
    pub value: &'a [u8],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CreateBucket<'a> {
    pub name: &'a [u8],
    /// The engine's module, a NUL, then `key=value` pairs separated by semicolons.
    pub config: &'a [u8],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeleteBucket<'a> {
    pub name: &'a [u8],
    /// Empty, or JSON such as `{"force":true}`.
    pub arguments: &'a [u8],
}
