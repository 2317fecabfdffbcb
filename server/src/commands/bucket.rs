//! `settee bucket`: buckets of a running server.

use anyhow::{Context, Result};
use wire::Opcode;
use wire::client::RequestFrame;

use super::connect;
use crate::cli::{Bucket, Evicts};

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
        Bucket::Compact { name, target } => {
            let mut client = connect(target)?;
            client.select_bucket(name)?;
            let request = RequestFrame { extras: &[0; 24], ..RequestFrame::new(Opcode::CompactDb) };
            client.call(&request)?.success().with_context(|| format!("cannot compact bucket {name:?}"))?;
            println!("compacting {name}");
        }
    }
    Ok(())
}
