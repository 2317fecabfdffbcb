//! What went wrong, in the words of the wire.

use document::subdoc::{RequestError, SubdocError};
use engine::OpError;
use wire::Status;

/// The status of an engine's error, and a sentence for the error body where the status does not say it all.
pub fn of_op(error: &OpError) -> (Status, String) {
    let status = match error {
        OpError::NotFound => Status::KeyEnoent,
        OpError::Exists => Status::KeyEexists,
        OpError::NotStored => Status::NotStored,
        OpError::Locked => Status::Locked,
        OpError::NotLocked => Status::NotLocked,
        OpError::BadDelta => Status::DeltaBadval,
        OpError::TooBig => Status::E2big,
        OpError::Invalid(_) => Status::Einval,
        OpError::BadXattr => Status::XattrEinval,
        OpError::NotMyVbucket => Status::NotMyVbucket,
        OpError::NoMemory => Status::Enomem,
        OpError::SyncWriteInProgress => Status::SyncWriteInProgress,
        OpError::ReCommitInProgress => Status::SyncWriteReCommitInProgress,
        OpError::Ambiguous(_) => Status::SyncWriteAmbiguous,
        OpError::DurabilityImpossible => Status::DurabilityImpossible,
        OpError::NotSupported(_) => Status::NotSupported,
        OpError::CanOnlyReviveDeleted => Status::SubdocCanOnlyReviveDeletedDocuments,
        OpError::DeletedCannotHaveValue => Status::SubdocDeletedDocumentCantHaveValue,
        OpError::ExpiryOverflow => Status::ExpiryOverflow,
        // Not "no such document": it may well be there.
        OpError::Unreadable(_) => Status::Einternal,
        // Both may work when tried again, and clients know this code to say so.
        OpError::Temporary(_) | OpError::DiskFull | OpError::Cancelled => Status::Etmpfail,
    };
    let context = match error {
        OpError::Invalid(_)
        | OpError::Temporary(_)
        | OpError::DiskFull
        | OpError::Cancelled
        | OpError::Ambiguous(_)
        | OpError::DurabilityImpossible
        | OpError::NotSupported(_)
        | OpError::Unreadable(_) => error.to_string(),
        _ => String::new(),
    };
    (status, context)
}

/// The status of one spec that failed.
pub fn of_subdoc(error: SubdocError) -> Status {
    match error {
        SubdocError::PathNotFound => Status::SubdocPathEnoent,
        SubdocError::PathMismatch => Status::SubdocPathMismatch,
        SubdocError::PathInvalid => Status::SubdocPathEinval,
        SubdocError::PathTooLong => Status::SubdocPathE2big,
        SubdocError::DocTooDeep => Status::SubdocDocE2deep,
        SubdocError::ValueCantInsert => Status::SubdocValueCantinsert,
        SubdocError::DocNotJson => Status::SubdocDocNotJson,
        SubdocError::NumRange => Status::SubdocNumErange,
        SubdocError::DeltaInvalid => Status::SubdocDeltaEinval,
        SubdocError::PathExists => Status::SubdocPathEexists,
        SubdocError::ValueTooDeep => Status::SubdocValueEtoodeep,
        SubdocError::XattrUnknownMacro => Status::SubdocXattrUnknownMacro,
        SubdocError::XattrUnknownVattr => Status::SubdocXattrUnknownVattr,
        SubdocError::XattrCantModifyVattr => Status::SubdocXattrCantModifyVattr,
        SubdocError::XattrUnknownVattrMacro => Status::SubdocXattrUnknownVattrMacro,
        SubdocError::FieldNotBinary => Status::SubdocFieldNotBinaryValue,
    }
}

/// The status of a sub-document request that is wrong whatever the document.
pub fn of_subdoc_request(error: RequestError) -> Status {
    match error {
        RequestError::Invalid => Status::Einval,
        RequestError::InvalidCombo => Status::SubdocInvalidCombo,
        RequestError::XattrInvalidFlagCombo => Status::SubdocXattrInvalidFlagCombo,
        RequestError::InvalidXattrOrder => Status::SubdocInvalidXattrOrder,
        RequestError::XattrInvalid => Status::XattrEinval,
        RequestError::NotSupported => Status::NotSupported,
    }
}
