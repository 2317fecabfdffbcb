//! `settee bucket`: buckets of a running server.

use std::sync::atomic::{AtomicU16, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use wire::Opcode;
use wire::client::RequestFrame;

use super::connect;
use crate::cli::{Bucket, Evicts, Target};
use crate::client::Client;

/// One vBucket, behind all others that wait.
const COMPACTION_MAX: Duration = Duration::from_secs(24 * 60 * 60);

pub fn run(command: &Bucket) -> Result<()> {
    match command {
        Bucket::Create { name, quota_mb, replicas, vbuckets, eviction, no_flush, target } => {
            let spec = format!(
                "settee\0max_size={};replicas={replicas};max_vbuckets={vbuckets};flush_enabled={};item_eviction_policy={}",
                quota_mb << 20,
                !no_flush,
                match eviction {
                    Evicts::Value => "value_only",
                    Evicts::Full => "full_eviction",
                }
            );
            let request = RequestFrame {
                key: name.as_bytes(),
                value: spec.as_bytes(),
                ..RequestFrame::new(Opcode::CreateBucket)
            };
            connect(target)?.call(&request)?.success().with_context(|| format!("cannot create bucket {name:?}"))?;
            println!("created {name}");
        }
        Bucket::List { target } => {
            let answer = connect(target)?.call(&RequestFrame::new(Opcode::ListBuckets))?.success()?;
            let names = String::from_utf8_lossy(&answer.value).into_owned();
            names.split_whitespace().for_each(|name| println!("{name}"));
        }
        Bucket::Delete { name, target } => {
            let request = RequestFrame { key: name.as_bytes(), ..RequestFrame::new(Opcode::DeleteBucket) };
            connect(target)?.call(&request)?.success().with_context(|| format!("cannot delete bucket {name:?}"))?;
            println!("deleted {name} and its documents");
        }
        Bucket::Flush { name, target } => {
            let mut client = connect(target)?;
            client.select_bucket(name)?;
            let answer = client.call(&RequestFrame::new(Opcode::Flush))?;
            answer.success().with_context(|| format!("cannot empty bucket {name:?}"))?;
            println!("deleted every document of {name}");
        }
        Bucket::Compact { name, drop_deletes, target } => compact(name, *drop_deletes, target)?,
    }
    Ok(())
}

/// Asks for as many at a time as the server may run; how many do run is its business.
fn compact(name: &str, drop_deletes: bool, target: &Target) -> Result<()> {
    let mut client = connect(target)?;
    client.select_bucket(name)?;
    let vbuckets = client.stats("vbucket")?.len() as u16;
    let before = file_bytes(&mut client)?;
    let next = AtomicU16::new(0);
    let work = || -> Result<()> {
        let mut client = connect(target)?;
        client.select_bucket(name)?;
        client.wait_for(COMPACTION_MAX)?;
        let mut extras = [0; 24];
        extras[16] = u8::from(drop_deletes);
        loop {
            let vbucket = next.fetch_add(1, Relaxed);
            if vbucket >= vbuckets {
                return Ok(());
            }
            let request = RequestFrame { vbucket, extras: &extras, ..RequestFrame::new(Opcode::CompactDb) };
            client
                .call(&request)?
                .success()
                .with_context(|| format!("cannot compact vBucket {vbucket} of {name:?}"))?;
        }
    };
    thread::scope(|scope| -> Result<()> {
        let workers: Vec<_> = (0..persist::COMPACTIONS_MAX).map(|_| scope.spawn(work)).collect();
        workers.into_iter().try_for_each(|worker| worker.join().unwrap_or_else(|_| bail!("a thread panicked")))
    })?;
    println!("compacted {name}: {vbuckets} vBuckets, {before} bytes before, {} after", file_bytes(&mut client)?);
    Ok(())
}

fn file_bytes(client: &mut Client) -> Result<u64> {
    let stats = client.stats("kvstore")?;
    let found = stats.iter().find(|(name, _)| name == "rw_0:file_bytes").and_then(|(_, bytes)| bytes.parse().ok());
    found.context("the server does not say how large its files are")
}
