//! The nodes that `settee cluster-run` starts, across restarts: `laid-out` in its directory has a line for each, its number and its
//! key-value address. It is there once the bucket is laid out over them.

use std::fs;
use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result};

const FILE: &str = "laid-out";

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    pub number: u16,
    pub kv: String,
}

/// None before the first start has succeeded.
pub fn load(dir: &Path) -> Result<Vec<Member>> {
    let path = dir.join(FILE);
    let text = match fs::read_to_string(&path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        text => text.with_context(|| format!("cannot read {}", path.display()))?,
    };
    let member = |line: &str| {
        let (number, kv) = line.split_once(' ')?;
        Some(Member { number: number.parse().ok()?, kv: kv.to_owned() })
    };
    let members = text.lines().map(member).collect::<Option<Vec<_>>>();
    members.with_context(|| format!("{}: a line is no number with an address behind it", path.display()))
}

/// On disk when it returns.
pub fn keep(dir: &Path, members: &[Member]) -> Result<()> {
    let text: String = members.iter().map(|Member { number, kv }| format!("{number} {kv}\n")).collect();
    let (path, temp) = (dir.join(FILE), dir.join(format!("{FILE}.new")));
    let store = || -> std::io::Result<()> {
        let mut file = fs::File::create(&temp)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        fs::rename(&temp, &path)?;
        fs::File::open(dir)?.sync_all()
    };
    store().with_context(|| format!("cannot write {}", path.display()))
}

/// Of a node whose directory is not there yet: that of one that was removed may still hold documents.
pub fn next_number(dir: &Path) -> Result<u16> {
    let mut next = 0;
    for entry in fs::read_dir(dir).with_context(|| format!("cannot list {}", dir.display()))? {
        let name = entry?.file_name();
        let number = name.to_str().and_then(|name| name.strip_prefix("node-")?.parse::<u16>().ok());
        next = next.max(number.map_or(0, |number| number + 1));
    }
    Ok(next)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_are_found_again_and_a_new_one_gets_a_number_of_its_own() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(load(dir.path()).unwrap(), []);
        let members = [(0, "a:1"), (2, "a:3")].map(|(number, kv)| Member { number, kv: kv.to_owned() });
        keep(dir.path(), &members).unwrap();
        assert_eq!(load(dir.path()).unwrap(), members);
        for name in ["node-0", "node-3", "node-3.log", "other"] {
            fs::create_dir(dir.path().join(name)).unwrap();
        }
        assert_eq!(next_number(dir.path()).unwrap(), 4);
        fs::write(dir.path().join(FILE), "x\n").unwrap();
        assert!(load(dir.path()).is_err());
    }
}
