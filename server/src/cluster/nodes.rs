//! Servers as child processes of `settee cluster-run`.
//!
//! A child serves until the pipe to it is closed, so none is left when its parent is gone, whatever became of that. It has a
//! process group of its own: a Ctrl-C at the terminal is for the parent.

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};

use anyhow::{Context, Result, bail};

/// A running node.
pub struct Running {
    child: Child,
    /// Closing it is asking for an orderly stop.
    leash: Option<ChildStdin>,
    pub kv: String,
    pub admin: String,
}

/// How a node is started.
pub struct Start<'a> {
    pub dir: &'a Path,
    pub number: u16,
    /// 0 for any free ones.
    pub kv_port: u16,
    pub user: &'a str,
    pub password: &'a str,
    pub settings: &'a [String],
}

impl Start<'_> {
    /// Starts it and waits until it serves.
    pub fn run(&self) -> Result<Running> {
        let Start { dir, number, kv_port, .. } = *self;
        let admin_port = if kv_port == 0 { 0 } else { kv_port + 1 };
        let log_path = dir.join(format!("node-{number}.log"));
        let log = File::options().create(true).append(true).open(&log_path);
        let log = log.with_context(|| format!("cannot write {}", log_path.display()))?;
        let mut command = Command::new(std::env::current_exe().context("cannot tell which program this is")?);
        command
            .args(["serve", "--until-eof", "--bucket="])
            .arg("--data-dir")
            .arg(dir.join(format!("node-{number}")))
            .args([format!("--kv=127.0.0.1:{kv_port}"), format!("--admin=127.0.0.1:{admin_port}")])
            .arg(format!("--user={}", self.user))
            .args(self.settings.iter().map(|pair| format!("--set={pair}")))
            .env("SETTEE_PASSWORD", self.password)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(log)
            .process_group(0);
        let mut child = command.spawn().context("cannot start another process of this program")?;
        let leash = child.stdin.take();
        let out = BufReader::new(child.stdout.take().context("its output is a pipe")?);
        for line in out.lines() {
            let line = line.context("the output of a node is no text")?;
            let word = |name| line.split_whitespace().find_map(|word| word.strip_prefix(name)).map(str::to_owned);
            if let (true, Some(kv), Some(admin)) = (line.starts_with("ready "), word("kv="), word("admin=")) {
                return Ok(Running { child, leash, kv, admin });
            }
        }
        let status = child.wait()?;
        let said = fs::read_to_string(&log_path).unwrap_or_default();
        let last = said.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("it said nothing");
        bail!("node {number} ended with {status}: {last} (see {})", log_path.display())
    }
}

impl Running {
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Its end, if it has ended by itself.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().ok().flatten()
    }

    /// It stops in order, soon.
    pub fn let_go(&mut self) {
        self.leash = None;
    }

    pub fn wait(mut self) -> Result<ExitStatus> {
        self.let_go();
        Ok(self.child.wait()?)
    }
}
