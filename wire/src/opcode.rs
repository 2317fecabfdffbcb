//! The client opcodes, one row each: what it is called, what it may be combined with and how its frame must look.
//! Parsing, error texts and statistics walk these rows, so a new opcode starts here.

use crate::status::Status;

/// Whether a part of the frame has to be there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Presence {
    No,
    May,
    Must,
}

impl Presence {
    pub const fn allows(self, len: usize) -> bool {
        match self {
            Presence::No => len == 0,
            Presence::May => true,
            Presence::Must => len > 0,
        }
    }
}

/// What the CAS of the header may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CasRule {
    Any,
    Zero,
    Set,
}

impl CasRule {
    pub const fn allows(self, cas: u64) -> bool {
        match self {
            CasRule::Any => true,
            CasRule::Zero => cas == 0,
            CasRule::Set => cas != 0,
        }
    }
}

/// One row of the table.
#[derive(Clone, Copy, Debug)]
pub struct Info {
    pub opcode: Opcode,
    pub name: &'static str,
    attributes: u8,
    /// The loud opcode that this one is the quiet form of.
    pub quiet_of: Option<Opcode>,
    /// Every legal length of the extras, in bytes.
    pub extras: &'static [u8],
    pub key: Presence,
    pub value: Presence,
    pub cas: CasRule,
    /// The datatype bits the request may carry.
    pub datatypes: u8,
}

impl Info {
    /// May carry a durability requirement.
    pub const fn durability(&self) -> bool {
        self.attributes & attribute::D != 0
    }
    /// May overlap with other requests of a connection that negotiated unordered execution.
    pub const fn reorderable(&self) -> bool {
        self.attributes & attribute::R != 0
    }
    /// The key starts with a collection id when Collections was negotiated.
    pub const fn collection_key(&self) -> bool {
        self.attributes & attribute::C != 0
    }
    /// May carry the preserve-expiry frame.
    pub const fn preserve_expiry(&self) -> bool {
        self.attributes & attribute::P != 0
    }
    /// May be sent before authentication.
    pub const fn before_auth(&self) -> bool {
        self.attributes & attribute::A != 0
    }
    pub const fn quiet(&self) -> bool {
        self.quiet_of.is_some()
    }
}

/// D durability, R reorderable, C collection key, P preserve expiry, A before authentication.
mod attribute {
    pub const D: u8 = 1;
    pub const R: u8 = 2;
    pub const C: u8 = 4;
    pub const P: u8 = 8;
    pub const A: u8 = 16;
}

/// Which datatype bits a request may carry: none; a JSON argument; a document; a document with its xattrs.
mod datatypes {
    pub const RAW: u8 = 0;
    pub const JSON: u8 = 1;
    pub const DOC: u8 = 1 | 2;
    pub const META: u8 = 1 | 2 | 4;
}

macro_rules! opcodes {
    (
        built { $($code:literal $variant:ident $name:literal { $($attribute:ident)* } [$($extras:literal)*]
            $key:ident $value:ident $cas:ident $datatypes:ident $(quiet $base:ident)?;)* }
        not_built { $($other:literal $other_name:literal;)* }
    ) => {
        /// A client opcode that this server answers. The discriminant is the wire's.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(u8)]
        pub enum Opcode { $($variant = $code,)* }

        impl Opcode {
            /// Every built opcode, in the order of the table.
            pub const ALL: &'static [Opcode] = &[$(Opcode::$variant,)*];
        }

        static ROWS: &[Info] = &[$(Info {
            opcode: Opcode::$variant,
            name: $name,
            attributes: 0 $(| attribute::$attribute)*,
            quiet_of: opcodes!(@base $($base)?),
            extras: &[$($extras,)*],
            key: Presence::$key,
            value: Presence::$value,
            cas: CasRule::$cas,
            datatypes: datatypes::$datatypes,
        },)*];

        const NOT_BUILT: &[(u8, &str)] = &[$(($other, $other_name),)*];
    };
    (@base) => { None };
    (@base $base:ident) => { Some(Opcode::$base) };
}

opcodes! {
    built {
        // code variant    name         attributes  extras  key  value cas datatypes
        0x00 Get           "GET"                 {R C}       [0]     Must No   Zero RAW;
        0x01 Set           "SET"                 {D R C P}   [8]     Must May  Any  DOC;
        0x02 Add           "ADD"                 {D R C}     [8]     Must May  Zero DOC;
        0x03 Replace       "REPLACE"             {D R C P}   [8]     Must May  Any  DOC;
        0x04 Delete        "DELETE"              {D R C}     [0]     Must No   Any  RAW;
        0x05 Increment     "INCREMENT"           {D R C P}   [20]    Must No   Zero RAW;
        0x06 Decrement     "DECREMENT"           {D R C P}   [20]    Must No   Zero RAW;
        0x07 Quit          "QUIT"                {A}         [0]     No   No   Any  RAW;
        0x08 Flush         "FLUSH"               {}          [0 4]   No   No   Any  RAW;
        0x09 GetQ          "GETQ"                {C}         [0]     Must No   Zero RAW quiet Get;
        0x0a Noop          "NOOP"                {A}         [0]     No   No   Any  RAW;
        0x0b Version       "VERSION"             {A}         [0]     No   No   Any  RAW;
        0x0c GetK          "GETK"                {R C}       [0]     Must No   Zero RAW;
        0x0d GetKQ         "GETKQ"               {C}         [0]     Must No   Zero RAW quiet GetK;
        0x0e Append        "APPEND"              {D R C P}   [0]     Must May  Any  DOC;
        0x0f Prepend       "PREPEND"             {D R C P}   [0]     Must May  Any  DOC;
        0x10 Stat          "STAT"                {}          [0]     May  May  Any  JSON;
        0x11 SetQ          "SETQ"                {C}         [8]     Must May  Any  DOC quiet Set;
        0x12 AddQ          "ADDQ"                {C}         [8]     Must May  Zero DOC quiet Add;
        0x13 ReplaceQ      "REPLACEQ"            {C}         [8]     Must May  Any  DOC quiet Replace;
        0x14 DeleteQ       "DELETEQ"             {C}         [0]     Must No   Any  RAW quiet Delete;
        0x15 IncrementQ    "INCREMENTQ"          {C}         [20]    Must No   Zero RAW quiet Increment;
        0x16 DecrementQ    "DECREMENTQ"          {C}         [20]    Must No   Zero RAW quiet Decrement;
        0x17 QuitQ         "QUITQ"               {A}         [0]     No   No   Any  RAW quiet Quit;
        0x18 FlushQ        "FLUSHQ"              {}          [0 4]   No   No   Any  RAW quiet Flush;
        0x19 AppendQ       "APPENDQ"             {C}         [0]     Must May  Any  DOC quiet Append;
        0x1a PrependQ      "PREPENDQ"            {C}         [0]     Must May  Any  DOC quiet Prepend;
        0x1b Verbosity     "VERBOSITY"           {}          [4]     No   No   Any  RAW;
        0x1c Touch         "TOUCH"               {R C}       [4]     Must No   Any  RAW;
        0x1d GetAndTouch   "GAT"                 {R C}       [4]     Must No   Any  RAW;
        0x1e GetAndTouchQ  "GATQ"                {C}         [4]     Must No   Any  RAW quiet GetAndTouch;
        0x1f Hello         "HELLO"               {A}         [0]     May  May  Any  RAW;
        0x20 SaslListMechs "SASL_LIST_MECHS"     {A}         [0]     No   No   Any  RAW;
        0x21 SaslAuth      "SASL_AUTH"           {A}         [0]     Must May  Any  RAW;
        0x22 SaslStep      "SASL_STEP"           {A}         [0]     Must May  Any  RAW;
        0x3d SetVbucket    "SET_VBUCKET"         {}          [1]     No   May  Any  JSON;
        0x3e GetVbucket    "GET_VBUCKET"         {}          [0]     No   No   Any  RAW;
        0x3f DelVbucket    "DEL_VBUCKET"         {}          [0]     No   May  Any  RAW;
        0x48 GetAllVbSeqnos "GET_ALL_VB_SEQNOS"  {R}         [0 4 8] No   No   Any  RAW;
        0x50 DcpOpen       "DCP_OPEN"            {}          [8]     Must May  Any  JSON;
        0x51 DcpAddStream  "DCP_ADD_STREAM"      {}          [4]     No   No   Any  RAW;
        0x52 DcpCloseStream "DCP_CLOSE_STREAM"   {}          [0]     No   No   Any  RAW;
        0x53 DcpStreamReq  "DCP_STREAM_REQ"      {}          [48]    No   May  Any  JSON;
        0x54 DcpGetFailoverLog "DCP_GET_FAILOVER_LOG" {}     [0]     No   No   Any  RAW;
        0x55 DcpStreamEnd  "DCP_STREAM_END"      {}          [4]     No   No   Any  RAW;
        0x56 DcpSnapshotMarker "DCP_SNAPSHOT_MARKER" {}      [1 20]  No   May  Any  RAW;
        0x57 DcpMutation   "DCP_MUTATION"        {C}         [31]    Must May  Any  META;
        0x58 DcpDeletion   "DCP_DELETION"        {C}         [18 21] Must May  Any  META;
        0x59 DcpExpiration "DCP_EXPIRATION"      {C}         [20]    Must May  Any  META;
        0x5b DcpSetVbucketState "DCP_SET_VBUCKET_STATE" {}   [1]     No   May  Any  JSON;
        0x5c DcpNoop       "DCP_NOOP"            {}          [0]     No   No   Any  RAW;
        0x5d DcpBufferAck  "DCP_BUFFER_ACK"      {}          [4]     No   No   Any  RAW;
        0x5e DcpControl    "DCP_CONTROL"         {}          [0]     Must Must Any  RAW;
        0x5f DcpSystemEvent "DCP_SYSTEM_EVENT"   {}          [13]    May  Must Any  RAW;
        0x60 DcpPrepare    "DCP_PREPARE"         {C}         [31]    Must May  Set  META;
        0x61 DcpSeqnoAck   "DCP_SEQNO_ACK"       {}          [8]     No   No   Any  RAW;
        0x62 DcpCommit     "DCP_COMMIT"          {C}         [16]    Must No   Any  RAW;
        0x63 DcpAbort      "DCP_ABORT"           {C}         [16]    Must No   Any  RAW;
        0x64 DcpSeqnoAdvanced "DCP_SEQNO_ADVANCED" {}        [8]     No   No   Any  RAW;
        0x80 StopPersistence "STOP_PERSISTENCE"  {}          [0]     No   No   Any  RAW;
        0x81 StartPersistence "START_PERSISTENCE" {}         [0]     No   No   Any  RAW;
        0x82 SetParam      "SET_PARAM"           {}          [4]     Must Must Any  RAW;
        0x83 GetReplica    "GET_REPLICA"         {R C}       [0]     Must No   Any  RAW;
        0x85 CreateBucket  "CREATE_BUCKET"       {}          [0]     Must Must Any  RAW;
        0x86 DeleteBucket  "DELETE_BUCKET"       {}          [0]     Must May  Any  JSON;
        0x87 ListBuckets   "LIST_BUCKETS"        {}          [0]     No   No   Any  RAW;
        0x89 SelectBucket  "SELECT_BUCKET"       {}          [0]     Must No   Any  RAW;
        0x91 ObserveSeqno  "OBSERVE_SEQNO"       {}          [0]     No   Must Any  RAW;
        0x92 Observe       "OBSERVE"             {}          [0]     No   Must Any  RAW;
        0x93 EvictKey      "EVICT_KEY"           {R C}       [0]     Must No   Any  RAW;
        0x94 GetLocked     "GET_LOCKED"          {R C}       [0 4]   Must No   Any  RAW;
        0x95 Unlock        "UNLOCK"              {R C}       [0]     Must No   Set  RAW;
        0x96 GetFailoverLog "GET_FAILOVER_LOG"   {}          [0]     No   No   Any  RAW;
        0xa0 GetMeta       "GET_META"            {C}         [0 1]   Must No   Any  RAW;
        0xa1 GetMetaQ      "GETQ_META"           {C}         [0 1]   Must No   Any  RAW quiet GetMeta;
        0xa2 SetWithMeta   "SET_WITH_META"       {C}         [24 26 28 30] Must May Any META;
        0xa3 SetWithMetaQ  "SETQ_WITH_META"      {C}         [24 26 28 30] Must May Any META quiet SetWithMeta;
        0xa4 AddWithMeta   "ADD_WITH_META"       {C}         [24 26 28 30] Must May Any META;
        0xa5 AddWithMetaQ  "ADDQ_WITH_META"      {C}         [24 26 28 30] Must May Any META quiet AddWithMeta;
        0xa8 DelWithMeta   "DEL_WITH_META"       {C}         [24 26 28 30] Must May Any META;
        0xa9 DelWithMetaQ  "DELQ_WITH_META"      {C}         [24 26 28 30] Must May Any META quiet DelWithMeta;
        0xad EnableTraffic "ENABLE_TRAFFIC"      {}          [0]     No   No   Any  RAW;
        0xae DisableTraffic "DISABLE_TRAFFIC"    {}          [0]     No   No   Any  RAW;
        0xb3 CompactDb     "COMPACT_DB"          {}          [24]    No   No   Any  RAW;
        0xb5 GetClusterConfig "GET_CLUSTER_CONFIG" {R}       [0 16]  No   No   Any  RAW;
        0xb6 GetRandomKey  "GET_RANDOM_KEY"      {}          [0 4 5] No   No   Any  RAW;
        0xb7 SeqnoPersistence "SEQNO_PERSISTENCE" {}         [8]     No   No   Any  RAW;
        0xb8 GetKeys       "GET_KEYS"            {C}         [0 4]   Must No   Any  RAW;
        0xb9 SetManifest   "COLLECTIONS_SET_MANIFEST" {}     [0]     No   Must Any  JSON;
        0xba GetManifest   "COLLECTIONS_GET_MANIFEST" {}     [0]     No   No   Any  RAW;
        0xbb GetCollectionId "COLLECTIONS_GET_ID" {}         [0]     May  May  Any  RAW;
        0xbc GetScopeId    "COLLECTIONS_GET_SCOPE_ID" {}     [0]     May  May  Any  RAW;
        0xc5 SubdocGet     "SUBDOC_GET"          {R C}       [3 4]   Must May Any  RAW;
        0xc6 SubdocExists  "SUBDOC_EXISTS"       {R C}       [3 4]   Must May Any  RAW;
        0xc7 SubdocDictAdd "SUBDOC_DICT_ADD"     {D R C P}   [3 4 7 8 11 12] Must May Any RAW;
        0xc8 SubdocDictUpsert "SUBDOC_DICT_UPSERT" {D R C P} [3 4 7 8 11 12] Must May Any RAW;
        0xc9 SubdocDelete  "SUBDOC_DELETE"       {D R C P}   [3 4 7 8 11 12] Must May Any RAW;
        0xca SubdocReplace "SUBDOC_REPLACE"      {D R C P}   [3 4 7 8 11 12] Must May Any RAW;
        0xcb SubdocArrayPushLast "SUBDOC_ARRAY_PUSH_LAST" {D R C P} [3 4 7 8 11 12] Must May Any RAW;
        0xcc SubdocArrayPushFirst "SUBDOC_ARRAY_PUSH_FIRST" {D R C P} [3 4 7 8 11 12] Must May Any RAW;
        0xcd SubdocArrayInsert "SUBDOC_ARRAY_INSERT" {D R C P} [3 4 7 8 11 12] Must May Any RAW;
        0xce SubdocArrayAddUnique "SUBDOC_ARRAY_ADD_UNIQUE" {D R C P} [3 4 7 8 11 12] Must May Any RAW;
        0xcf SubdocCounter "SUBDOC_COUNTER"      {D R C P}   [3 4 7 8 11 12] Must May Any RAW;
        0xd0 SubdocMultiLookup "SUBDOC_MULTI_LOOKUP" {R C}   [0 1]   Must May Any  RAW;
        0xd1 SubdocMultiMutation "SUBDOC_MULTI_MUTATION" {D R C P} [0 1 4 5 8 9] Must May Any RAW;
        0xd2 SubdocGetCount "SUBDOC_GET_COUNT"   {R C}       [3 4]   Must May  Any  RAW;
        0xd3 SubdocReplaceBodyWithXattr "SUBDOC_REPLACE_BODY_WITH_XATTR" {D R C P} [3 4 7 8 11 12] Must May Any RAW;
        0xfe GetErrorMap   "GET_ERROR_MAP"       {A}         [0]     No   Must Any  RAW;
    }
    not_built {
        0x23 "IOCTL_GET";
        0x24 "IOCTL_SET";
        0x25 "CONFIG_VALIDATE";
        0x26 "CONFIG_RELOAD";
        0x27 "AUDIT_PUT";
        0x28 "AUDIT_CONFIG_RELOAD";
        0x29 "SHUTDOWN";
        0x2a "SET_BUCKET_THROTTLE_PROPERTIES";
        0x2b "SET_BUCKET_DATA_LIMIT_EXCEEDED";
        0x2c "(retired 2c)";
        0x2d "SET_ACTIVE_ENCRYPTION_KEYS";
        0x2e "PRUNE_ENCRYPTION_KEYS";
        0x2f "REGISTER_AUTH_TOKEN";
        0x30 "(retired 30)";
        0x31 "(retired 31)";
        0x32 "(retired 32)";
        0x33 "(retired 33)";
        0x34 "(retired 34)";
        0x35 "(retired 35)";
        0x36 "(retired 36)";
        0x37 "(retired 37)";
        0x38 "(retired 38)";
        0x39 "(retired 39)";
        0x3a "(retired 3a)";
        0x3b "(retired 3b)";
        0x3c "(retired 3c)";
        0x40 "(tap 40)";
        0x41 "(tap 41)";
        0x42 "(tap 42)";
        0x43 "(tap 43)";
        0x44 "(tap 44)";
        0x45 "(tap 45)";
        0x46 "(tap 46)";
        0x47 "(tap 47)";
        0x49 "GETEX";
        0x4a "GETEX_REPLICA";
        0x4b "MUTATE_WITH_META";
        0x5a "DCP_FLUSH";
        0x65 "DCP_OSO_SNAPSHOT";
        0x66 "DCP_CACHE_TRANSFER";
        0x67 "DCP_CACHE_TRANSFER_END";
        0x70 "(fusion 70)";
        0x71 "(fusion 71)";
        0x72 "(fusion 72)";
        0x73 "(fusion 73)";
        0x74 "(fusion 74)";
        0x75 "(fusion 75)";
        0x76 "(fusion 76)";
        0x77 "(fusion 77)";
        0x78 "(fusion 78)";
        0x79 "(fusion 79)";
        0x84 "SET_CHRONICLE_AUTH_TOKEN";
        0x8a "PAUSE";
        0x8b "RESUME";
        0x8c "VALIDATE_BUCKET_CONFIG";
        0x97 "LAST_CLOSED_CHECKPOINT";
        0x9e "DEREGISTER_REPLICATION_CHAIN";
        0x9f "RESET_REPLICATION_CHAIN";
        0xaf "IFCONFIG";
        0xb2 "RETURN_META";
        0xb4 "SET_CLUSTER_CONFIG";
        0xda "RANGE_SCAN_CREATE";
        0xdb "RANGE_SCAN_CONTINUE";
        0xdc "RANGE_SCAN_CANCEL";
        0xe0 "PREPARE_SNAPSHOT";
        0xe1 "RELEASE_SNAPSHOT";
        0xe2 "DOWNLOAD_SNAPSHOT";
        0xe3 "GET_FILE_FRAGMENT";
        0xf1 "ISASL_REFRESH";
        0xf3 "GET_CMD_TIMER";
        0xf4 "SET_CTRL_TOKEN";
        0xf5 "GET_CTRL_TOKEN";
        0xf6 "UPDATE_EXTERNAL_USER_PERMISSIONS";
        0xf7 "RBAC_REFRESH";
        0xf8 "AUTH_PROVIDER";
        0xfb "DROP_PRIVILEGE";
        0xfc "ADJUST_TIMEOFDAY";
        0xfd "EWOULDBLOCK_CTL";
    }
}

#[derive(Clone, Copy)]
enum Slot {
    Built(&'static Info),
    NotBuilt(&'static str),
    Unknown,
}

static BY_CODE: [Slot; 256] = {
    let mut slots = [Slot::Unknown; 256];
    let mut i = 0;
    while i < ROWS.len() {
        slots[ROWS[i].opcode as usize] = Slot::Built(&ROWS[i]);
        i += 1;
    }
    i = 0;
    while i < NOT_BUILT.len() {
        let code = NOT_BUILT[i].0 as usize;
        assert!(matches!(slots[code], Slot::Unknown), "an opcode is built or not, never both");
        slots[code] = Slot::NotBuilt(NOT_BUILT[i].1);
        i += 1;
    }
    slots
};

impl Opcode {
    /// `Err`: the status to answer, `UnknownCommand` or (a known opcode that this server does not build) `NotSupported`.
    pub fn from_wire(code: u8) -> Result<Opcode, Status> {
        match BY_CODE[usize::from(code)] {
            Slot::Built(info) => Ok(info.opcode),
            Slot::NotBuilt(_) => Err(Status::NotSupported),
            Slot::Unknown => Err(Status::UnknownCommand),
        }
    }

    pub fn info(self) -> &'static Info {
        match BY_CODE[self as usize] {
            Slot::Built(info) => info,
            Slot::NotBuilt(_) | Slot::Unknown => unreachable!("every variant has its row"),
        }
    }

    pub fn name(self) -> &'static str {
        self.info().name
    }

    pub fn quiet(self) -> bool {
        self.info().quiet()
    }

    /// Part of the replication protocol, which has connections of its own.
    pub const fn is_dcp(self) -> bool {
        matches!(self as u8, 0x50..=0x6f)
    }

    /// The opcode whose behaviour this one has: itself, or what it is the quiet form of.
    pub fn loud(self) -> Opcode {
        self.info().quiet_of.unwrap_or(self)
    }

    /// Whether a reply of this status is left out because the opcode is quiet: reads leave out the miss, writes the
    /// success.
    pub fn silences(self, status: Status) -> bool {
        match self.info().quiet_of {
            None => false,
            Some(Opcode::Get | Opcode::GetK | Opcode::GetAndTouch | Opcode::GetMeta) => status == Status::KeyEnoent,
            Some(Opcode::Quit) => true,
            Some(_) => status == Status::Success,
        }
    }
}

/// The name of any opcode byte, for logs and statistics.
pub fn name(code: u8) -> &'static str {
    match BY_CODE[usize::from(code)] {
        Slot::Built(info) => info.name,
        Slot::NotBuilt(name) => name,
        Slot::Unknown => "UNKNOWN",
    }
}

/// Whether a connection may send this before it has authenticated. Anything else gets `Eaccess`, unknown opcodes too.
pub fn allowed_before_auth(code: u8) -> bool {
    matches!(BY_CODE[usize::from(code)], Slot::Built(info) if info.before_auth())
}

/// What a server asks of its clients, in frames of magic 0x82.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum ServerOpcode {
    ClustermapChangeNotification = 1,
    Authenticate = 2,
    ActiveExternalUsers = 3,
    GetAuthorization = 4,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_opcode_is_found_by_its_code_and_says_its_name() {
        for &opcode in Opcode::ALL {
            assert_eq!(Opcode::from_wire(opcode as u8), Ok(opcode));
            assert_eq!(name(opcode as u8), opcode.name());
        }
        assert_eq!(Opcode::from_wire(0x5a), Err(Status::NotSupported));
        assert_eq!(Opcode::from_wire(0xff), Err(Status::UnknownCommand));
        assert_eq!(Opcode::from_wire(0x88), Err(Status::UnknownCommand));
    }

    #[test]
    fn names_are_unique() {
        let mut names: Vec<_> = ROWS.iter().map(|r| r.name).chain(NOT_BUILT.iter().map(|r| r.1)).collect();
        names.sort_unstable();
        let total = names.len();
        names.dedup();
        assert_eq!(names.len(), total);
    }

    #[test]
    fn a_quiet_opcode_takes_the_frame_of_its_loud_form_and_neither_durability_nor_reordering() {
        for info in ROWS.iter().filter(|i| i.quiet()) {
            let loud = info.opcode.loud().info();
            assert_eq!((info.extras, info.key, info.value, info.cas), (loud.extras, loud.key, loud.value, loud.cas));
            assert_eq!((info.datatypes, info.collection_key()), (loud.datatypes, loud.collection_key()));
            assert!(!info.durability() && !info.reorderable() && !info.preserve_expiry(), "{}", info.name);
        }
    }

    #[test]
    fn quiet_reads_hide_misses_and_quiet_writes_hide_success() {
        assert!(Opcode::GetQ.silences(Status::KeyEnoent) && !Opcode::GetQ.silences(Status::Success));
        assert!(Opcode::SetQ.silences(Status::Success) && !Opcode::SetQ.silences(Status::KeyEexists));
        assert!(Opcode::QuitQ.silences(Status::Success) && !Opcode::Get.silences(Status::KeyEnoent));
        assert!(Opcode::SetWithMetaQ.silences(Status::Success) && Opcode::GetMetaQ.silences(Status::KeyEnoent));
    }

    #[test]
    fn only_the_handshake_is_open_to_strangers() {
        for code in 0..=255 {
            let open = [0x07, 0x0a, 0x0b, 0x17, 0x1f, 0x20, 0x21, 0x22, 0xfe].contains(&code);
            assert_eq!(allowed_before_auth(code), open, "{code:#04x}");
        }
    }
}
