//! Where passwords come from. The server's: the environment, a file, or made at the first start. A tool's: the same places,
//! then the data directory of a server on this machine.

use std::fs;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

const VARIABLE: &str = "SETTEE_PASSWORD";
/// Where a server keeps everything if nobody says.
const SERVER_DIR: &str = "./settee-data";

/// The generated password, readable by its owner only.
pub fn file_in(data_dir: &Path) -> PathBuf {
    data_dir.join("password")
}

/// What somebody chose: the environment first, then the file they named.
pub fn chosen(password_file: Option<&Path>) -> Result<Option<String>> {
    match std::env::var(VARIABLE) {
        Ok(password) if password.is_empty() => bail!("{VARIABLE} is set but empty; unset it or give it a password"),
        Ok(password) => return Ok(Some(password)),
        Err(std::env::VarError::NotPresent) => {}
        Err(error) => bail!("{VARIABLE}: {error}"),
    }
    password_file.map(first_line).transpose()
}

/// What a tool should use: as [`chosen`], else what the server generated in `data_dir`.
pub fn for_tool(password_file: Option<&Path>, data_dir: &Path) -> Result<String> {
    if let Some(password) = chosen(password_file)? {
        return Ok(password);
    }
    let generated = file_in(data_dir);
    if generated.exists() {
        return first_line(&generated);
    }
    bail!(
        "no password: set {VARIABLE}, or give --password-file, or --data-dir of the server (there is no {})",
        generated.display()
    )
}

/// As [`for_tool`], for several nodes: the directory of a single server counts too, if it is where such a server puts it by itself.
pub fn for_cluster_tool(password_file: Option<&Path>, data_dir: &Path) -> Result<String> {
    for_tool(password_file, data_dir).or_else(|error| match file_in(Path::new(SERVER_DIR)).exists() {
        true => for_tool(None, Path::new(SERVER_DIR)),
        false => Err(error),
    })
}

/// Makes a password and stores it where only its owner can read it.
pub fn generate(data_dir: &Path, env: &env::Env) -> Result<String> {
    // No character that two people read differently.
    const ALPHABET: &[u8; 32] = b"abcdefghijkmnpqrstuvwxyz23456789";
    let mut random = [0; 26];
    env.rng.fill(&mut random);
    let password: String = random.iter().map(|b| char::from(ALPHABET[usize::from(b % 32)])).collect();
    let path = file_in(data_dir);
    let store = || -> std::io::Result<()> {
        let mut file = fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&path)?;
        writeln!(file, "{password}")?;
        file.sync_all()?;
        fs::File::open(data_dir)?.sync_all()
    };
    store().with_context(|| format!("cannot write {}", path.display()))?;
    Ok(password)
}

fn first_line(path: &Path) -> Result<String> {
    let text = fs::read_to_string(path).with_context(|| format!("cannot read the password file {}", path.display()))?;
    match text.lines().next() {
        Some(line) if !line.is_empty() => Ok(line.to_owned()),
        _ => bail!("{}: the first line, which should be the password, is empty", path.display()),
    }
}
