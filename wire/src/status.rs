//! The status codes, one row each: code, name, what it means, and what the error map tells clients to do about it.

use crate::Opcode;

macro_rules! statuses {
    ($($code:literal $variant:ident $name:literal [$($attribute:ident)*] $text:literal;)*) => {
        /// The outcome of a request. The discriminant is the wire's.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(u16)]
        pub enum Status { $(#[doc = $text] $variant = $code,)* }

        impl Status {
            /// Every status, by ascending code.
            pub const ALL: &'static [Status] = &[$(Status::$variant,)*];

            pub const fn from_wire(code: u16) -> Option<Status> {
                match code {
                    $($code => Some(Status::$variant),)*
                    _ => None,
                }
            }

            pub const fn name(self) -> &'static str {
                match self { $(Status::$variant => $name,)* }
            }

            /// One sentence for people.
            pub const fn description(self) -> &'static str {
                match self { $(Status::$variant => $text,)* }
            }

            /// What clients that do not know the code should do about it.
            pub const fn attributes(self) -> &'static [Attribute] {
                match self { $(Status::$variant => &[$(Attribute::$attribute,)*],)* }
            }
        }
    };
}

macro_rules! attributes {
    ($($variant:ident $name:literal;)*) => {
        /// What the error map says about a status.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Attribute { $($variant,)* }

        impl Attribute {
            pub const fn name(self) -> &'static str {
                match self { $(Attribute::$variant => $name,)* }
            }
        }
    };
}

attributes! {
    Success "success";
    ItemOnly "item-only";
    ItemDeleted "item-deleted";
    ItemLocked "item-locked";
    InvalidInput "invalid-input";
    FetchConfig "fetch-config";
    ConnState "conn-state-invalidated";
    Auth "auth";
    Special "special-handling";
    Support "support";
    Temp "temp";
    Internal "internal";
    RetryNow "retry-now";
    RetryLater "retry-later";
    NoRetry "no-retry";
    Subdoc "subdoc";
    Dcp "dcp";
    RateLimit "rate-limit";
    Constraint "system-constraint";
}

impl Attribute {
    /// The error map version that introduced it.
    pub const fn since_version(self) -> u16 {
        match self {
            Attribute::RateLimit | Attribute::Constraint => 2,
            _ => 1,
        }
    }
}

statuses! {
    0x00 Success "SUCCESS" [Success] "Done";
    0x01 KeyEnoent "KEY_ENOENT" [ItemOnly] "There is no such document";
    0x02 KeyEexists "KEY_EEXISTS" [ItemOnly] "The document exists, or its CAS is another";
    0x03 E2big "E2BIG" [ItemOnly InvalidInput] "The value is too large";
    0x04 Einval "EINVAL" [Internal InvalidInput] "The request is malformed";
    0x05 NotStored "NOT_STORED" [Internal ItemOnly] "There is no document to add to";
    0x06 DeltaBadval "DELTA_BADVAL" [ItemOnly InvalidInput] "The value is not a number";
    0x07 NotMyVbucket "NOT_MY_VBUCKET" [FetchConfig InvalidInput] "Another node serves this vBucket";
    0x08 NoBucket "NO_BUCKET" [ConnState] "The connection has selected no bucket";
    0x09 Locked "LOCKED" [ItemLocked ItemOnly RetryNow] "The document is locked";
    0x0a DcpStreamNotFound "DCP_STREAM_NOT_FOUND" [ConnState] "There is no such DCP stream";
    0x0b OpaqueNoMatch "OPAQUE_NO_MATCH" [ConnState] "The opaque is not that of the DCP stream";
    0x0c EwouldThrottle "EWOULD_THROTTLE" [Temp RetryLater RateLimit] "The request would have to be slowed down";
    0x0d EconfigOnly "ECONFIG_ONLY" [FetchConfig RetryNow] "This node knows the bucket's configuration only";
    0x0e NotLocked "NOT_LOCKED" [ItemOnly] "The document is not locked";
    0x0f CasValueInvalid "CAS_VALUE_INVALID" [ItemOnly] "The stored CAS is too far in the future";
    0x1f AuthStale "AUTH_STALE" [ConnState Auth] "The credentials have changed; authenticate again";
    0x20 AuthError "AUTH_ERROR" [ConnState Auth] "Authentication failed";
    0x21 AuthContinue "AUTH_CONTINUE" [Special] "Authentication needs another step";
    0x22 Erange "ERANGE" [InvalidInput] "The value is outside its range";
    0x23 Rollback "ROLLBACK" [Dcp Special] "The DCP consumer must roll back";
    0x24 Eaccess "EACCESS" [Support] "Not authenticated, or not allowed";
    0x25 NotInitialized "NOT_INITIALIZED" [ConnState] "The node is still starting";
    0x26 EncryptionKeyNotAvailable "ENCRYPTION_KEY_NOT_AVAILABLE" [Special] "The encryption key is not available";
    0x27 ChecksumMismatch "CHECKSUM_MISMATCH" [Special] "The stored checksum does not match";
    0x28 ExpiryOverflow "EXPIRY_OVERFLOW" [ItemOnly Constraint NoRetry] "The expiry time does not fit its field";
    0x29 LockExpiryOverflow "LOCK_EXPIRY_OVERFLOW" [ItemOnly Constraint NoRetry] "The lock time does not fit its field";
    0x30 RateLimitedNetworkIngress "RATE_LIMITED_NETWORK_INGRESS" [Temp RetryLater RateLimit] "Too much was received";
    0x31 RateLimitedNetworkEgress "RATE_LIMITED_NETWORK_EGRESS" [Temp RetryLater RateLimit] "Too much was sent";
    0x32 RateLimitedMaxConnections "RATE_LIMITED_MAX_CONNECTIONS" [Temp RetryLater RateLimit] "Too many connections";
    0x33 RateLimitedMaxCommands "RATE_LIMITED_MAX_COMMANDS" [Temp RetryLater RateLimit] "Too many commands";
    0x35 BucketSizeLimitExceeded "BUCKET_SIZE_LIMIT_EXCEEDED" [ItemOnly Constraint NoRetry] "The bucket is too large";
    0x36 BucketResidentRatioTooLow "BUCKET_RESIDENT_RATIO_TOO_LOW" [ItemOnly Constraint NoRetry] "Too little of the bucket is in memory";
    0x37 BucketDataSizeTooBig "BUCKET_DATA_SIZE_TOO_BIG" [ItemOnly Constraint NoRetry] "The bucket's data is too large";
    0x38 BucketDiskSpaceTooLow "BUCKET_DISK_SPACE_TOO_LOW" [ItemOnly Constraint NoRetry] "Too little disk space is left";
    0x50 BucketPaused "BUCKET_PAUSED" [Support] "The bucket is paused";
    0x51 Cancelled "CANCELLED" [ItemOnly RetryNow] "The request was cancelled";
    0x80 UnknownFrameInfo "UNKNOWN_FRAME_INFO" [Support] "The request carries an unknown frame info";
    0x81 UnknownCommand "UNKNOWN_COMMAND" [Support] "There is no such command";
    0x82 Enomem "ENOMEM" [Temp RetryLater] "The bucket is out of memory";
    0x83 NotSupported "NOT_SUPPORTED" [Support] "The command is not available here";
    0x84 Einternal "EINTERNAL" [Internal ConnState] "The server made a mistake";
    0x85 Ebusy "EBUSY" [Temp RetryNow] "Too busy; try again";
    0x86 Etmpfail "ETMPFAIL" [Temp RetryNow] "Not possible right now; try again";
    0x87 XattrEinval "XATTR_EINVAL" [InvalidInput] "The extended attributes are malformed";
    0x88 UnknownCollection "UNKNOWN_COLLECTION" [InvalidInput] "There is no such collection";
    0x8a CannotApplyCollectionsManifest "CANNOT_APPLY_COLLECTIONS_MANIFEST" [InvalidInput] "The manifest does not follow the current one";
    0x8c UnknownScope "UNKNOWN_SCOPE" [InvalidInput] "There is no such scope";
    0x8d DcpStreamIdInvalid "DCP_STREAM_ID_INVALID" [InvalidInput] "The DCP stream id is missing or not expected";
    0xa0 DurabilityInvalidLevel "DURABILITY_INVALID_LEVEL" [InvalidInput] "The durability level does not exist or cannot be had";
    0xa1 DurabilityImpossible "DURABILITY_IMPOSSIBLE" [ItemOnly InvalidInput] "There are not enough replicas for this durability";
    0xa2 SyncWriteInProgress "SYNC_WRITE_IN_PROGRESS" [ItemOnly RetryLater] "A durable write of this document is under way";
    0xa3 SyncWriteAmbiguous "SYNC_WRITE_AMBIGUOUS" [ItemOnly] "The durable write may or may not have happened";
    0xa4 SyncWriteReCommitInProgress "SYNC_WRITE_RE_COMMIT_IN_PROGRESS" [ItemOnly RetryLater] "An earlier durable write is being decided";
    0xa5 RangeScanCancelled "RANGE_SCAN_CANCELLED" [] "The range scan was cancelled";
    0xa6 RangeScanMore "RANGE_SCAN_MORE" [Success] "The range scan has more to give";
    0xa7 RangeScanComplete "RANGE_SCAN_COMPLETE" [Success] "The range scan is complete";
    0xa8 VbUuidNotEqual "VB_UUID_NOT_EQUAL" [InvalidInput] "The vBucket has another history";
    0xc0 SubdocPathEnoent "SUBDOC_PATH_ENOENT" [Subdoc ItemOnly] "The path does not exist in the document";
    0xc1 SubdocPathMismatch "SUBDOC_PATH_MISMATCH" [Subdoc ItemOnly] "The path does not fit the document's structure";
    0xc2 SubdocPathEinval "SUBDOC_PATH_EINVAL" [Subdoc InvalidInput] "The path is malformed";
    0xc3 SubdocPathE2big "SUBDOC_PATH_E2BIG" [Subdoc InvalidInput] "The path is too deep";
    0xc4 SubdocDocE2deep "SUBDOC_DOC_E2DEEP" [Subdoc InvalidInput] "The document is nested too deeply";
    0xc5 SubdocValueCantinsert "SUBDOC_VALUE_CANTINSERT" [Subdoc InvalidInput] "The value cannot be inserted there";
    0xc6 SubdocDocNotJson "SUBDOC_DOC_NOT_JSON" [Subdoc ItemOnly] "The document is not JSON";
    0xc7 SubdocNumErange "SUBDOC_NUM_ERANGE" [Subdoc ItemOnly] "The stored number is out of range";
    0xc8 SubdocDeltaEinval "SUBDOC_DELTA_EINVAL" [Subdoc ItemOnly] "The delta is not a usable number";
    0xc9 SubdocPathEexists "SUBDOC_PATH_EEXISTS" [Subdoc ItemOnly] "The path exists already";
    0xca SubdocValueEtoodeep "SUBDOC_VALUE_ETOODEEP" [Subdoc] "The value would be nested too deeply";
    0xcb SubdocInvalidCombo "SUBDOC_INVALID_COMBO" [Subdoc InvalidInput] "These operations cannot be combined";
    0xcc SubdocMultiPathFailure "SUBDOC_MULTI_PATH_FAILURE" [Special] "At least one path failed";
    0xcd SubdocSuccessDeleted "SUBDOC_SUCCESS_DELETED" [ItemDeleted Success] "Done, on a deleted document";
    0xce SubdocXattrInvalidFlagCombo "SUBDOC_XATTR_INVALID_FLAG_COMBO" [Subdoc InvalidInput] "These path flags cannot be combined";
    0xcf SubdocXattrInvalidKeyCombo "SUBDOC_XATTR_INVALID_KEY_COMBO" [Subdoc InvalidInput] "Only one extended attribute may be named";
    0xd0 SubdocXattrUnknownMacro "SUBDOC_XATTR_UNKNOWN_MACRO" [Subdoc InvalidInput] "There is no such macro";
    0xd1 SubdocXattrUnknownVattr "SUBDOC_XATTR_UNKNOWN_VATTR" [Subdoc InvalidInput] "There is no such virtual attribute";
    0xd2 SubdocXattrCantModifyVattr "SUBDOC_XATTR_CANT_MODIFY_VATTR" [Subdoc InvalidInput] "Virtual attributes cannot be changed";
    0xd3 SubdocMultiPathFailureDeleted "SUBDOC_MULTI_PATH_FAILURE_DELETED" [ItemDeleted Special] "At least one path failed, on a deleted document";
    0xd4 SubdocInvalidXattrOrder "SUBDOC_INVALID_XATTR_ORDER" [Subdoc InvalidInput] "Extended attributes must come first";
    0xd5 SubdocXattrUnknownVattrMacro "SUBDOC_XATTR_UNKNOWN_VATTR_MACRO" [Subdoc InvalidInput] "There is no such virtual attribute to expand";
    0xd6 SubdocCanOnlyReviveDeletedDocuments "SUBDOC_CAN_ONLY_REVIVE_DELETED_DOCUMENTS" [Subdoc InvalidInput] "The document is not deleted";
    0xd7 SubdocDeletedDocumentCantHaveValue "SUBDOC_DELETED_DOCUMENT_CANT_HAVE_VALUE" [Subdoc InvalidInput] "A deleted document has no body";
    0xd8 SubdocFieldNotBinaryValue "SUBDOC_FIELD_NOT_BINARY_VALUE" [Subdoc InvalidInput] "The field does not hold a binary value";
}

/// What a client that did not negotiate XERROR is told instead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Legacy {
    Status(Status),
    /// There is no old status for this: the connection is closed without a reply.
    Close,
}

impl Status {
    /// Statuses whose reply keeps its CAS, extras, key and value. All others carry at most an error body.
    pub const fn keeps_payload(self) -> bool {
        matches!(
            self,
            Status::Success
                | Status::AuthContinue
                | Status::Rollback
                | Status::SubdocSuccessDeleted
                | Status::SubdocMultiPathFailure
                | Status::SubdocMultiPathFailureDeleted
                | Status::RangeScanMore
                | Status::RangeScanComplete
                | Status::NotMyVbucket
        )
    }

    /// Translates for a connection without XERROR. Unknown collection or scope becomes `Einval`: such a connection
    /// has not negotiated collections either.
    pub fn without_xerror(self, opcode: Opcode) -> Legacy {
        use Opcode as O;
        Legacy::Status(match self {
            Status::Locked => match opcode.loud() {
                O::GetLocked | O::Unlock | O::Delete | O::DelWithMeta => Status::Etmpfail,
                subdoc if (O::SubdocGet..=O::SubdocReplaceBodyWithXattr).contains(&subdoc) => Status::Etmpfail,
                _ => Status::KeyEexists,
            },
            Status::NotLocked | Status::SyncWriteInProgress | Status::SyncWriteReCommitInProgress => Status::Etmpfail,
            Status::UnknownCollection | Status::UnknownScope => Status::Einval,
            Status::Eaccess
            | Status::NoBucket
            | Status::AuthStale
            | Status::DurabilityInvalidLevel
            | Status::DurabilityImpossible
            | Status::SyncWriteAmbiguous
            | Status::DcpStreamIdInvalid
            | Status::RangeScanCancelled
            | Status::RangeScanMore
            | Status::RangeScanComplete
            | Status::VbUuidNotEqual => return Legacy::Close,
            other => other,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_ascend_and_are_found_again() {
        assert!(Status::ALL.is_sorted_by(|a, b| (*a as u16) < *b as u16));
        for &status in Status::ALL {
            assert_eq!(Status::from_wire(status as u16), Some(status));
        }
        assert_eq!(Status::from_wire(0x34), None);
    }

    #[test]
    fn clients_without_xerror_see_old_codes_or_nothing() {
        let legacy = |status: Status, opcode| status.without_xerror(opcode);
        for opcode in [Opcode::Set, Opcode::SetQ, Opcode::IncrementQ, Opcode::Touch, Opcode::GetAndTouch] {
            assert_eq!(legacy(Status::Locked, opcode), Legacy::Status(Status::KeyEexists));
        }
        for opcode in [Opcode::GetLocked, Opcode::DeleteQ, Opcode::SubdocCounter, Opcode::SubdocMultiMutation] {
            assert_eq!(legacy(Status::Locked, opcode), Legacy::Status(Status::Etmpfail));
        }
        assert_eq!(legacy(Status::NotLocked, Opcode::Unlock), Legacy::Status(Status::Etmpfail));
        assert_eq!(legacy(Status::UnknownScope, Opcode::GetScopeId), Legacy::Status(Status::Einval));
        assert_eq!(legacy(Status::Eaccess, Opcode::Get), Legacy::Close);
        assert_eq!(legacy(Status::KeyEnoent, Opcode::Get), Legacy::Status(Status::KeyEnoent));
    }
}
