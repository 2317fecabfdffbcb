//! Macros: values a client names and the server fills in. The CAS and the seqno are known only when the write is
//! sequenced, so the new value is built with zeroes of the right width where they go, and the places are noted.

use types::{Cas, Datatype, Seqno};

use super::{DocView, Path, SubdocError, edit, spec, virtuals};
use crate::{value_crc32c, xattr};

const PLACEHOLDER: &[u8] = b"\"0x0000000000000000\"";
const PLACEHOLDER_CRC: &[u8] = b"\"0x00000000\"";

/// What belongs into a gap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MacroKind {
    /// Shown as XDCR and Sync Gateway expect it: the hex of the byte-swapped CAS.
    Cas,
    Seqno,
    /// The checksum of the body, after all other gaps are filled.
    ValueCrc32c,
}

/// A gap in a new value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MacroPatch {
    /// Of the first byte, a quote.
    pub offset: usize,
    pub kind: MacroKind,
}

impl MacroPatch {
    pub(super) const fn len(&self) -> usize {
        match self.kind {
            MacroKind::Cas | MacroKind::Seqno => PLACEHOLDER.len(),
            MacroKind::ValueCrc32c => PLACEHOLDER_CRC.len(),
        }
    }

    /// Fills the gap in `value`, the inflated value this patch came with.
    pub fn patch(&self, value: &mut [u8], datatype: Datatype, cas: Cas, seqno: Seqno) {
        let text = match self.kind {
            MacroKind::Cas => format!("\"{:#018x}\"", cas.0.swap_bytes()),
            MacroKind::Seqno => format!("\"{:#018x}\"", seqno.0),
            MacroKind::ValueCrc32c => {
                let body = xattr::body(value, datatype).expect("a value with a gap was built with its xattrs");
                format!("\"{:#010x}\"", value_crc32c(body))
            }
        };
        value[self.offset..self.offset + self.len()].copy_from_slice(text.as_bytes());
    }
}

/// The text that takes the place of a macro.
pub(super) struct Expansion {
    pub text: Vec<u8>,
    pub kind: Option<MacroKind>,
}

/// What `value`, a macro as a JSON string, stands for.
pub(super) fn expand(value: &[u8], view: &DocView<'_>) -> Result<Expansion, SubdocError> {
    let name = value.trim_ascii().strip_prefix(b"\"${").and_then(|rest| rest.strip_suffix(b"}\""));
    let gap = |kind, text: &[u8]| Ok(Expansion { text: text.to_vec(), kind: Some(kind) });
    match name.ok_or(SubdocError::XattrUnknownMacro)? {
        b"Mutation.CAS" => gap(MacroKind::Cas, PLACEHOLDER),
        b"Mutation.seqno" => gap(MacroKind::Seqno, PLACEHOLDER),
        b"Mutation.value_crc32c" => gap(MacroKind::ValueCrc32c, PLACEHOLDER_CRC),
        name if name.starts_with(b"$") => {
            let (key, rest) = spec::split_xattr_path(name);
            let unknown = SubdocError::XattrUnknownVattrMacro;
            let whole = virtuals::value(view, key, rest).map_err(|_| unknown)?;
            let wrapped = [b"{\"v\":", &whole[..], b"}"].concat();
            let text = edit::get(&wrapped, &Path::below(b"v", rest).map_err(|_| unknown)?).map_err(|_| unknown)?;
            Ok(Expansion { text: text.to_vec(), kind: None })
        }
        _ => Err(SubdocError::XattrUnknownMacro),
    }
}
