//! A file as JSON, for people and scripts: what `settee file info|dump|check` prints.

use std::ops::ControlFlow;
use std::path::Path;

use env::{OpenMode, Storage};
use serde_json::{Value, json};

use crate::check::{self, Depth};
use crate::couch::{Couch, Snapshot};
use crate::doc::DocInfo;
use crate::error::{Error, Result};
use crate::header::{Header, Mode};
use crate::kv::{RevMeta, Sync};

/// Opens a file by its name, for reading.
pub fn open(storage: &dyn Storage, path: &Path, mode: Mode) -> Result<Couch> {
    Couch::open(open_file(storage, path)?, path, mode)
}

fn open_file(storage: &dyn Storage, path: &Path) -> Result<std::sync::Arc<dyn env::File>> {
    let failed = |source| Error::Io { op: "open", path: path.into(), offset: 0, source };
    storage.open(path, OpenMode::Read).map_err(failed)
}

/// What the newest header says, and the headers before it, oldest first.
pub fn info(storage: &dyn Storage, path: &Path, mode: Mode) -> Result<Value> {
    let couch = open(storage, path, mode)?;
    let header = couch.header();
    let file_bytes = couch.file_bytes()?;
    let live_bytes = header.live_bytes();
    let mut commits = couch.headers(Mode::Recovery)?;
    commits.reverse();
    let local_docs: Vec<String> = couch.locals()?.iter().map(|(id, _)| text_or_hex(id)).collect();
    Ok(json!({
        "file": path.display().to_string(),
        "disk_version": header.version.byte(),
        "crc": header.version.checksum().name(),
        "header_pos": header.at,
        "timestamp_ns": header.timestamp_ns,
        "doc_count": header.doc_count(),
        "deleted_count": header.deleted_count(),
        "update_seq": header.update_seq,
        "purge_seq": header.purge_seq,
        "file_bytes": file_bytes,
        "live_bytes": live_bytes,
        "fragmentation_pct": match file_bytes {
            0 => 0,
            all => 100 * all.saturating_sub(live_bytes) / all,
        },
        "local_docs": local_docs,
        "commits": commits.iter().map(commit).collect::<Vec<_>>(),
    }))
}

fn commit(header: &Header) -> Value {
    json!({
        "header_pos": header.at,
        "update_seq": header.update_seq,
        "timestamp_ns": header.timestamp_ns,
        "doc_count": header.doc_count(),
        "deleted_count": header.deleted_count(),
    })
}

/// Hands out every document in order of seqno, one object each, until `line` breaks. A body that cannot be read stops
/// nothing: its document has an `error` instead of a `body`.
pub fn dump(snapshot: &Snapshot, mut line: impl FnMut(Value) -> ControlFlow<()>) -> Result<ControlFlow<()>> {
    snapshot.changes_since(0, |doc| line(document(snapshot, &doc)))
}

/// All local documents: text, or `{"hex": …}`.
pub fn local_docs(snapshot: &Snapshot) -> Result<Value> {
    let value = |body: Vec<u8>| match as_text(body) {
        Ok(text) => Value::String(text),
        Err(bytes) => json!({ "hex": hex(&bytes) }),
    };
    Ok(Value::Object(snapshot.locals()?.into_iter().map(|(id, body)| (text_or_hex(&id), value(body))).collect()))
}

fn document(snapshot: &Snapshot, doc: &DocInfo) -> Value {
    let mut out = json!({
        "id_hex": hex(&doc.id),
        "seq": doc.seq,
        "rev": doc.rev,
        "deleted": doc.deleted,
        "content_meta": doc.content_meta,
        "rev_meta_hex": hex(&doc.rev_meta),
    });
    if let Ok(meta) = RevMeta::decode(&doc.rev_meta) {
        out["cas"] = json!(meta.cas.to_string());
        out["exptime"] = json!(meta.expiry);
        out["flags"] = json!(meta.flags);
        out["flex_byte"] = json!(doc.rev_meta[16]);
        out["datatype"] = json!(meta.datatype.0);
        match meta.sync {
            None => {}
            Some(Sync::Pending { level, is_delete }) => {
                out["prepare"] = json!({ "level": level as u8, "is_delete": is_delete });
            }
            Some(Sync::Abort { prepared }) => out["abort"] = json!({ "prepare_seqno": prepared.0 }),
        }
    }
    match snapshot.body(doc) {
        Ok(None) => out["body"] = Value::Null,
        Ok(Some(body)) => match as_text(body) {
            Ok(text) => out["body"] = Value::String(text),
            Err(bytes) => out["body_hex"] = json!(hex(&bytes)),
        },
        Err(e) => out["error"] = json!(e.to_string()),
    }
    out
}

/// Checks the file; `whole` says how it went, `damage` where it hurts.
pub fn check(storage: &dyn Storage, path: &Path, depth: Depth) -> Result<Value> {
    let report = check::check(open_file(storage, path)?, path, depth)?;
    let headers = report.headers.iter().map(|(header, whole)| {
        let mut out = commit(header);
        out["whole"] = json!(whole);
        out
    });
    let damage = report
        .damage
        .iter()
        .map(|damage| json!({ "offset": damage.offset, "header_pos": damage.header_at, "what": damage.what }));
    Ok(json!({
        "file": path.display().to_string(),
        "whole": report.is_whole(),
        "headers": headers.collect::<Vec<_>>(),
        "docs": report.docs,
        "nodes": report.nodes,
        "chunk_bytes": report.chunk_bytes,
        "damage": damage.collect::<Vec<_>>(),
        "warnings": report.warnings,
    }))
}

fn text_or_hex(bytes: &[u8]) -> String {
    as_text(bytes.to_vec()).unwrap_or_else(|bytes| hex(&bytes))
}

/// Text that a terminal would show, or the bytes back.
fn as_text(bytes: Vec<u8>) -> Result<String, Vec<u8>> {
    let text = String::from_utf8(bytes).map_err(|e| e.into_bytes())?;
    let shows = |c: char| !c.is_control() || matches!(c, '\n' | '\r' | '\t');
    if text.chars().all(shows) { Ok(text) } else { Err(text.into_bytes()) }
}

fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::with_capacity(2 * bytes.len()), |mut out, byte| {
        let _ = write!(out, "{byte:02x}");
        out
    })
}
