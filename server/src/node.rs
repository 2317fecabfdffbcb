//! `node.json`: who this node is, across restarts.

use std::fs;
use std::io::Write;
use std::path::Path;

use anyhow::Context;
use serde::{Deserialize, Serialize};

use crate::exit::{Exit, OrExit, Refusal};

/// Revisions of the cluster configuration that one run may use up. More changes than this in one run and clients would
/// ignore the next run's first ones until it catches up.
const REVISIONS_PER_RUN: u64 = 1 << 20;

/// This node's identity.
#[derive(Debug, Serialize, Deserialize)]
pub struct Node {
    /// 32 hexadecimal digits, made at the first start.
    pub uuid: String,
    /// How often it was started.
    pub starts: u64,
}

impl Node {
    /// Reads the file, counts this start and writes it back durably; makes it at the first start.
    pub fn start(data_dir: &Path, env: &env::Env) -> Result<Node, Refusal> {
        let path = data_dir.join("node.json");
        let mut node = match fs::read(&path) {
            Ok(bytes) => serde_json::from_slice(&bytes)
                .with_context(|| format!("{} is damaged; remove it to give this node a new identity", path.display()))
                .or_exit(Exit::Damaged)?,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                Node { uuid: format!("{:016x}{:016x}", env.rng.u64(), env.rng.u64()), starts: 0 }
            }
            Err(error) => {
                return Err(error)
                    .with_context(|| format!("cannot read {}", path.display()))
                    .or_exit(Exit::Environment);
            }
        };
        node.starts += 1;
        node.write(data_dir, &path)
            .with_context(|| format!("cannot write {}", path.display()))
            .or_exit(Exit::Environment)?;
        Ok(node)
    }

    /// The first revision of the cluster configuration in this run: above all of every earlier run.
    pub fn first_revision(&self) -> u64 {
        self.starts * REVISIONS_PER_RUN
    }

    fn write(&self, data_dir: &Path, path: &Path) -> std::io::Result<()> {
        let temp = data_dir.join("node.json.new");
        let mut file = fs::File::create(&temp)?;
        file.write_all(serde_json::to_string_pretty(self)?.as_bytes())?;
        file.sync_all()?;
        fs::rename(&temp, path)?;
        fs::File::open(data_dir)?.sync_all()
    }
}
