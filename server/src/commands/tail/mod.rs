//! `settee tail`: the changes of a bucket as they come, one JSON object a line.

mod feed;
mod place;

use std::io::{self, BufWriter, Write};
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use anyhow::{Context, Result, bail};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde_json::{Map, Value, json};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use types::{Datatype, VbId};
use wire::dcp::{Event, Message};
use wire::{Feature, FeatureSet, Key};

use super::connect_with;
use crate::cli::Tail;
use feed::{Feed, News};
use place::{Place, Places};

const FEATURES: &[Feature] =
    &[Feature::Xerror, Feature::SelectBucket, Feature::Json, Feature::AltRequestSupport, Feature::Collections];

pub fn run(options: &Tail) -> Result<()> {
    let resume = match options.from.as_str() {
        "now" | "beginning" => Places::new(),
        token => place::parse(token)?,
    };
    let mut client = connect_with(&options.target, FEATURES)?;
    client.select_bucket(&options.bucket)?;
    let name = format!("settee-tail-{}-{:08x}", std::process::id(), env::os::env().rng.u64() as u32);
    let mut feed = Feed::open(client.into_stream(), FeatureSet::of(FEATURES), &name)?;
    let vbuckets = feed.seqnos()?;
    if let Some(unknown) = resume.keys().find(|vb| vbuckets.iter().all(|(known, _)| known != *vb)) {
        bail!("the token is of a bucket that has a vBucket {unknown}; {:?} has none", options.bucket);
    }
    let is_stopping = stop_on_signal(&feed)?;
    for (vb, high) in vbuckets {
        let place = match options.from.as_str() {
            "now" if high.0 > 0 => Place::at(feed.uuid(vb)?, high),
            _ => resume.get(&vb).copied().unwrap_or_default(),
        };
        feed.places.insert(vb, place);
    }
    for (vb, place) in feed.places.clone() {
        feed.follow(vb, place)?;
    }
    if options.from == "now" {
        eprintln!("settee: following {:?}; Ctrl-C ends it", options.bucket);
    }
    let ended = print(&mut feed);
    if ended.as_ref().is_err_and(|error| error.is::<ReaderGone>()) {
        // Nobody knows how much of what was printed it has read, so there is no place to tell.
        return Ok(());
    }
    eprintln!("settee: to go on from here: settee tail {} --from {}", options.bucket, place::token(&feed.places));
    match ended {
        _ if is_stopping.load(Ordering::SeqCst) => Ok(()),
        Ok(()) => bail!("the server closed the connection"),
        Err(error) => Err(error),
    }
}

/// The first signal ends the reading, so that what was read is printed and told; the second ends the program.
fn stop_on_signal(feed: &Feed) -> Result<Arc<AtomicBool>> {
    let mut signals = Signals::new([SIGINT, SIGTERM]).context("cannot listen for signals")?;
    let (stopper, is_stopping) = (feed.stopper()?, Arc::new(AtomicBool::new(false)));
    let stopping = Arc::clone(&is_stopping);
    thread::Builder::new().name("signals".to_owned()).spawn(move || {
        for (count, _) in signals.forever().enumerate() {
            if count > 0 {
                std::process::exit(1);
            }
            stopping.store(true, Ordering::SeqCst);
            let _ = stopper.shutdown(Shutdown::Both);
        }
    })?;
    Ok(is_stopping)
}

/// Returns when the connection or whoever reads ends.
fn print(feed: &mut Feed) -> Result<()> {
    let (socket, stdout) = (feed.stopper()?, io::stdout());
    let out = std::cell::RefCell::new(BufWriter::new(stdout.lock()));
    let mut tell = |news: News<'_>| match line(&news) {
        Some(line) => printed(writeln!(out.borrow_mut(), "{line}")),
        None => Ok(()),
    };
    let mut idle = || {
        printed(out.borrow_mut().flush())?;
        match env::os::wait_readable(socket.as_fd(), stdout.as_fd())? {
            true => Ok(()),
            false => bail!(ReaderGone),
        }
    };
    let ended = feed.run(&mut tell, &mut idle);
    printed(out.borrow_mut().flush())?;
    ended
}

/// `settee tail | head` is not an error.
#[derive(Debug, thiserror::Error)]
#[error("whoever read what is printed here has gone")]
struct ReaderGone;

fn printed(written: io::Result<()>) -> Result<()> {
    match written {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => bail!(ReaderGone),
        written => written.context("cannot print"),
    }
}

/// What is printed of it, if anything is.
fn line(news: &News<'_>) -> Option<Value> {
    let (vb, message) = match news {
        News::Rollback(vb, to) => return Some(json!({"type": "rollback", "vb": vb.0, "seqno": to.0})),
        News::Message(vb, message) => (*vb, message),
    };
    let mut object = Map::new();
    let mut put = |name: &str, value: Value| drop(object.insert(name.to_owned(), value));
    match message {
        Message::Mutation(m) => {
            put("type", json!("mutation"));
            about(&mut put, vb, m.seqno.0, m.cas.0, m.key);
            put("flags", json!(m.flags));
            put("expiry", json!(m.expiry));
            match serde_json::from_slice::<Value>(m.value) {
                Ok(value) if m.datatype.has(Datatype::JSON) => put("value", value),
                _ => put("value_base64", json!(BASE64.encode(m.value))),
            }
        }
        Message::Deletion(d) | Message::Expiration(d) => {
            let kind = if matches!(message, Message::Deletion(_)) { "deletion" } else { "expiration" };
            put("type", json!(kind));
            about(&mut put, vb, d.seqno.0, d.cas.0, d.key);
            put("deleted_at", json!(d.delete_time));
        }
        Message::SystemEvent(event) => {
            let (kind, name) = match event.event {
                Event::CollectionCreated { name, .. } => ("collection_created", name),
                Event::CollectionDropped { .. } => ("collection_dropped", &[][..]),
                Event::ScopeCreated { name } => ("scope_created", name),
                Event::ScopeDropped => ("scope_dropped", &[][..]),
            };
            put("type", json!(kind));
            put("vb", json!(vb.0));
            put("seqno", json!(event.seqno.0));
            put("name", json!(String::from_utf8_lossy(name)));
        }
        _ => return None,
    }
    Some(Value::Object(object))
}

fn about(put: &mut impl FnMut(&str, Value), vb: VbId, seqno: u64, cas: u64, key: Key<'_>) {
    let key = key.resolve();
    let key = key.as_key();
    match std::str::from_utf8(key.logical()) {
        Ok(text) => put("key", json!(text)),
        Err(_) => put("key_base64", json!(BASE64.encode(key.logical()))),
    }
    match key.collection().0 {
        0 => put("collection", json!("_default")),
        id => put("collection", json!(format!("{id:#x}"))),
    }
    put("vb", json!(vb.0));
    put("seqno", json!(seqno));
    // In words: more digits than some readers of JSON keep.
    put("cas", json!(cas.to_string()));
}

#[cfg(test)]
mod tests {
    use super::*;
    use types::{Cas, RevSeqno, Seqno};
    use wire::dcp::{Deletion, Mutation};

    #[test]
    fn a_line_says_what_changed_in_json_or_in_base64() {
        let key = Key::parse(b"\0k", true).unwrap();
        let (seqno, rev, cas) = (Seqno(7), RevSeqno(1), Cas(u64::MAX - 1));
        let mutation = |datatype, value| Mutation { seqno, rev, flags: 2, expiry: 9, cas, datatype, key, value };
        let show = |message| line(&News::Message(VbId(3), message)).unwrap().to_string();
        let json = show(Message::Mutation(mutation(Datatype::JSON, br#"{"a": 1}"#)));
        let expected = r#"{"cas":"18446744073709551614","collection":"_default","expiry":9,"flags":2,"key":"k","seqno":7,"type":"mutation","value":{"a":1},"vb":3}"#;
        assert_eq!(json, expected);
        assert!(show(Message::Mutation(mutation(Datatype::RAW, b"\xff"))).contains(r#""value_base64":"/w==""#));
        let key = Key::parse(b"\x08\xff", true).unwrap();
        let deletion = Deletion { seqno, rev, delete_time: Some(5), cas, datatype: Datatype::RAW, key, value: b"" };
        let told = show(Message::Deletion(deletion));
        assert!(told.contains(r#""collection":"0x8""#) && told.contains(r#""key_base64":"/w==""#), "{told}");
        assert!(told.contains(r#""deleted_at":5"#) && told.contains(r#""type":"deletion""#), "{told}");
        assert!(show(Message::Expiration(deletion)).contains("expiration"));
        assert!(line(&News::Message(VbId(0), Message::SeqnoAdvanced(Seqno(1)))).is_none());
    }
}
