//! `cluster.json`: the maps that a coordinator gave this node, across restarts.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::Context;
use frontend::cluster::Keeper;

use crate::exit::{Exit, OrExit, Refusal};

/// Replaced as a whole.
pub struct Maps {
    dir: PathBuf,
}

impl Maps {
    /// The documents that were kept, by bucket.
    pub fn load(data_dir: &Path) -> Result<(BTreeMap<String, String>, Maps), Refusal> {
        let maps = Maps { dir: data_dir.to_owned() };
        let path = maps.path();
        let found = match fs::read(&path) {
            Ok(bytes) => serde_json::from_slice(&bytes)
                .with_context(|| {
                    format!("{} is damaged; remove it and have the coordinator give the map again", path.display())
                })
                .or_exit(Exit::Damaged)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => BTreeMap::new(),
            Err(error) => {
                return Err(error)
                    .with_context(|| format!("cannot read {}", path.display()))
                    .or_exit(Exit::Environment);
            }
        };
        Ok((found, maps))
    }

    fn path(&self) -> PathBuf {
        self.dir.join("cluster.json")
    }
}

impl Keeper for Maps {
    fn keep(&self, documents: &BTreeMap<String, String>) -> io::Result<()> {
        let temp = self.dir.join("cluster.json.new");
        let mut file = fs::File::create(&temp)?;
        file.write_all(&serde_json::to_vec(documents)?)?;
        file.sync_all()?;
        fs::rename(&temp, self.path())?;
        fs::File::open(&self.dir)?.sync_all()
    }
}
