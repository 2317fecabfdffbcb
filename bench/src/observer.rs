//! What the servers of a run have used: by the kernel's count, and how often they synced by their own.

use std::cell::RefCell;
use std::net::TcpStream;
use std::path::{Path, PathBuf};

use anyhow::Result;

use crate::machine;
use crate::process::{self, Usage};
use crate::protocol::couchbase;
use crate::target::{Dialect, Target};

/// Looks at all servers of a bucket's map. Of one on another machine there is little to see.
pub struct Observer {
    pids: Vec<u32>,
    /// To servers that tell their own counts, one each.
    told_by: RefCell<Vec<TcpStream>>,
    dir: PathBuf,
}

impl Observer {
    /// `dir` is on the disk that the servers write to.
    ///
    /// # Errors
    /// A server does not let us in.
    pub fn new(target: &Target, dialect: &Dialect, dir: &Path) -> Result<Observer> {
        let servers: Vec<Target> = target.route(dialect).servers.iter().map(|address| target.at(address)).collect();
        let pid = |server: &Target| server.socket_address().ok().and_then(process::listening_on);
        let connect = |server: &Target| {
            let mut stream = server.connect()?;
            dialect.protocol().open(&mut stream)?;
            Ok(stream)
        };
        let told_by = match dialect {
            Dialect::Couchbase(_) => servers.iter().map(connect).collect::<Result<_>>()?,
            _ => Vec::new(),
        };
        Ok(Observer {
            pids: servers.iter().filter_map(pid).collect(),
            told_by: RefCell::new(told_by),
            dir: dir.to_owned(),
        })
    }

    pub fn usage(&self) -> Option<Usage> {
        let usage = process::usage_of_families(&self.pids)?;
        Some(Usage { flushes: machine::flushes(&self.dir), syncs: self.sum("log_syncs"), ..usage })
    }

    /// A number of the group `persist`, all servers together. `None`: one of them does not tell.
    pub fn sum(&self, name: &str) -> Option<u64> {
        let mut told_by = self.told_by.borrow_mut();
        let count = |stream: &mut TcpStream| couchbase::stats(stream, "persist").ok()?.get(name)?.parse::<u64>().ok();
        if told_by.is_empty() { None } else { told_by.iter_mut().map(count).sum() }
    }
}
