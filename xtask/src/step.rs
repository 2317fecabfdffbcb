//! Running other programs, loudly.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use serde_json::Value;

/// The workspace root.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask lives in the workspace").to_owned()
}

/// Where cargo puts what it builds here, whether the environment, its configuration or nobody says so.
pub fn target_dir(cargo: Tool) -> Result<PathBuf> {
    let metadata = cargo.args(["metadata", "--no-deps", "--format-version=1"]).output()?;
    let metadata: Value = serde_json::from_str(&metadata).context("cargo metadata")?;
    Ok(metadata["target_directory"].as_str().context("cargo metadata names no target directory")?.into())
}

/// Whether a program of this name is on the PATH.
pub fn on_path(name: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|dir| dir.join(name).is_file())
}

/// A program about to be run from the workspace root (or [`Tool::dir`] below it).
pub struct Tool {
    command: Command,
    line: String,
}

impl Tool {
    pub fn new(program: impl AsRef<Path>) -> Tool {
        let program = program.as_ref();
        let mut command = Command::new(program);
        command.stdin(Stdio::null()).current_dir(root());
        Tool { command, line: program.display().to_string() }
    }

    pub fn cargo() -> Tool {
        Tool::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
    }

    pub fn arg(self, arg: &str) -> Tool {
        self.args([arg])
    }

    pub fn args<const N: usize>(mut self, args: [&str; N]) -> Tool {
        self.command.args(args);
        self.line = format!("{} {}", self.line, args.join(" "));
        self
    }

    pub fn env(mut self, name: &str, value: &str) -> Tool {
        self.command.env(name, value);
        self.line = format!("{name}={value:?} {}", self.line);
        self
    }

    pub fn dir(mut self, dir: &str) -> Tool {
        self.command.current_dir(root().join(dir));
        self.line = format!("(in {dir}) {}", self.line);
        self
    }

    /// Runs it with its output on ours; anything but success is an error.
    pub fn run(mut self) -> Result<()> {
        println!("$ {}", self.line);
        let status = self.command.status().with_context(|| format!("cannot run {}", self.line))?;
        if !status.success() {
            bail!("{} ended with {status}", self.line);
        }
        Ok(())
    }

    /// Runs it quietly and returns what it printed.
    pub fn output(mut self) -> Result<String> {
        let output =
            self.command.stderr(Stdio::null()).output().with_context(|| format!("cannot run {}", self.line))?;
        if !output.status.success() {
            bail!("{} ended with {}", self.line, output.status);
        }
        String::from_utf8(output.stdout).with_context(|| format!("{} printed something that is not text", self.line))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_built_is_looked_for_where_cargo_was_told_to_put_it() {
        let elsewhere = std::env::temp_dir().join("built-elsewhere");
        let told = Tool::cargo().env("CARGO_TARGET_DIR", elsewhere.to_str().unwrap());
        assert_eq!(target_dir(told).unwrap(), elsewhere);
    }
}
