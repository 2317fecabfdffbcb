//! Attributes nobody stored: `$document` tells about the document, `$vbucket` about where it lives, `$XTOC` which
//! xattrs there are. Made up as JSON text when asked for, so that paths lead into them as into any xattr.

use types::{Cas, Datatype, RevSeqno, Seqno, VbUuid};

use super::{DocView, Existence, SubdocError};
use crate::{json, value_crc32c, xattr};

/// What a document's virtual attributes say that its bytes do not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Facts {
    pub cas: Cas,
    pub vbucket_uuid: VbUuid,
    pub seqno: Seqno,
    pub rev: RevSeqno,
    /// Unix seconds, 0 = never.
    pub expiry: u32,
    pub flags: u32,
    /// As stored, so with the SNAPPY bit if the stored value is compressed.
    pub stored_datatype: Datatype,
    /// Unix seconds; `None` when the CAS is no clock.
    pub last_modified_s: Option<u64>,
    /// The vBucket's hybrid clock, Unix seconds.
    pub hlc_now_s: u64,
    /// The clock runs ahead of the wall clock, by counting.
    pub hlc_logical: bool,
    /// The user may know which system xattrs there are.
    pub shows_system_xattrs: bool,
}

/// The JSON text of the virtual attribute `key`, which begins with `$`. `rest`: the path below it, so that only what
/// is asked for is worked out.
pub(super) fn value(view: &DocView<'_>, key: &[u8], rest: &[u8]) -> Result<Vec<u8>, SubdocError> {
    let (section, body) = xattr::split(view.value, view.datatype).unwrap_or((b"", b""));
    match key {
        b"$document" => {
            let with_crc = rest.is_empty() || rest == b".value_crc32c";
            Ok(document(view, body, with_crc).into_bytes())
        }
        b"$vbucket" => {
            let mode = if view.facts.hlc_logical { "logical" } else { "real" };
            Ok(format!("{{\"HLC\":{{\"now\":\"{}\",\"mode\":\"{mode}\"}}}}", view.facts.hlc_now_s).into_bytes())
        }
        b"$XTOC" => {
            let mut text = vec![b'['];
            for (key, _) in xattr::pairs(section).flatten() {
                if xattr::is_system_key(key) && !view.facts.shows_system_xattrs {
                    continue;
                }
                if text.len() > 1 {
                    text.push(b',');
                }
                json::push_string(&mut text, key);
            }
            text.push(b']');
            Ok(text)
        }
        _ => Err(SubdocError::XattrUnknownVattr),
    }
}

fn document(view: &DocView<'_>, body: &[u8], with_crc: bool) -> String {
    let facts = &view.facts;
    let mut text = format!(
        "{{\"CAS\":\"{:#018x}\",\"datatype\":{},\"deleted\":{},\"exptime\":{},\"flags\":{}",
        facts.cas.0,
        datatype_names(facts.stored_datatype),
        view.existence == Existence::Tombstone,
        facts.expiry,
        facts.flags,
    );
    if let Some(seconds) = facts.last_modified_s {
        text += &format!(",\"last_modified\":\"{seconds}\"");
    }
    text +=
        &format!(",\"revid\":\"{}\",\"seqno\":\"{:#018x}\",\"value_bytes\":{}", facts.rev, facts.seqno.0, body.len());
    if with_crc {
        text += &format!(",\"value_crc32c\":\"{:#010x}\"", value_crc32c(body));
    }
    text + &format!(",\"vbucket_uuid\":\"{:#018x}\"}}", facts.vbucket_uuid.0)
}

fn datatype_names(datatype: Datatype) -> String {
    let names = [(Datatype::JSON, "\"json\""), (Datatype::SNAPPY, "\"snappy\""), (Datatype::XATTR, "\"xattr\"")];
    let names: Vec<&str> = names.iter().filter(|(bit, _)| datatype.has(*bit)).map(|(_, name)| *name).collect();
    if names.is_empty() { "[\"raw\"]".to_owned() } else { format!("[{}]", names.join(",")) }
}
