//! How `settee cluster add` and `remove` ask a running `settee cluster-run` to start or stop a node: a line each way through a socket
//! in its directory, which only its owner can use.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::thread;

use anyhow::{Context, Result, anyhow, bail};

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ask {
    /// One more node; the answer is its key-value address.
    Add,
    /// The node of this address stops, and is not started again.
    Stop(String),
}

impl Ask {
    fn parse(line: &str) -> Option<Ask> {
        match line.trim_end().split_once(' ') {
            None if line.trim_end() == "add" => Some(Ask::Add),
            Some(("stop", kv)) => Some(Ask::Stop(kv.to_owned())),
            _ => None,
        }
    }

    fn line(&self) -> String {
        match self {
            Ask::Add => "add\n".to_owned(),
            Ask::Stop(kv) => format!("stop {kv}\n"),
        }
    }
}

fn socket(dir: &Path) -> PathBuf {
    dir.join("control")
}

/// The socket is there as long as this is.
pub struct Control(PathBuf);

impl Drop for Control {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// Answers, one at a time, until the process ends. Without a socket the nodes run all the same.
pub fn serve(dir: &Path, answer: impl Fn(Ask) -> Result<String> + Send + 'static) -> Option<Control> {
    let path = socket(dir);
    // The directories of the nodes are ours, so this is of a run that was killed.
    let _ = fs::remove_file(&path);
    let bind = || -> std::io::Result<UnixListener> {
        let listener = UnixListener::bind(&path)?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600))?;
        Ok(listener)
    };
    let listener = match bind() {
        Ok(listener) => listener,
        Err(error) => {
            eprintln!("settee: nodes cannot be added or stopped by command: {}: {error}", path.display());
            return None;
        }
    };
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            // Whoever asked may be gone.
            let _ = hear(stream, &answer);
        }
    });
    Some(Control(path))
}

fn hear(stream: UnixStream, answer: &dyn Fn(Ask) -> Result<String>) -> Result<()> {
    let mut line = String::new();
    BufReader::new(&stream).read_line(&mut line)?;
    let result = Ask::parse(&line).context("no such question").and_then(answer);
    let said = match result {
        Ok(said) => format!("ok {said}\n"),
        Err(error) => format!("error {}\n", format!("{error:#}").replace('\n', " ")),
    };
    Ok((&stream).write_all(said.as_bytes())?)
}

/// Asks the `settee cluster-run` of this directory.
pub fn ask(dir: &Path, ask: &Ask) -> Result<String> {
    let path = socket(dir);
    let mut stream = UnixStream::connect(&path).with_context(|| {
        format!("no `settee cluster-run` answers at {}; is --data-dir its directory?", path.display())
    })?;
    stream.write_all(ask.line().as_bytes())?;
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line)?;
    match line.trim_end().split_once(' ') {
        Some(("ok", said)) => Ok(said.to_owned()),
        Some(("error", why)) => Err(anyhow!("{why}")),
        _ => bail!("`settee cluster-run` ended before it had answered"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_asked_is_answered_and_the_socket_goes_with_its_owner() {
        let dir = tempfile::tempdir().unwrap();
        assert!(ask(dir.path(), &Ask::Add).is_err());
        let control = serve(dir.path(), |ask| match ask {
            Ask::Add => Ok("127.0.0.1:1".to_owned()),
            Ask::Stop(kv) => bail!("no {kv}"),
        });
        assert_eq!(ask(dir.path(), &Ask::Add).unwrap(), "127.0.0.1:1");
        let refused = ask(dir.path(), &Ask::Stop("127.0.0.1:2".to_owned())).unwrap_err();
        assert_eq!(refused.to_string(), "no 127.0.0.1:2");
        drop(control);
        assert!(!socket(dir.path()).exists());
    }
}
