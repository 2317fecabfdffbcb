//! Where the log goes: to stderr, so that stdout carries only what scripts read, or to a file of its own.
//!
//! The file is only appended to, and opened anew on SIGHUP, so whoever rotates it renames it and sends that. If it cannot
//! be opened then, the one that is open stays in use: nothing is lost, and the last thing it says is why.

use std::fs::{File, OpenOptions};
use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use limits::{Class, Ledger, Permit, with_retry};
use parking_lot::RwLock;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::MakeWriter;

/// The log, as it may be changed while it is written.
pub struct Log {
    set_filter: Box<dyn Fn(EnvFilter) -> Result<(), tracing_subscriber::reload::Error> + Send>,
    output: Output,
}

impl Log {
    /// `filter` was checked when the configuration was read.
    pub fn set_filter(&self, filter: &str) {
        if let Err(error) = (self.set_filter)(EnvFilter::new(filter)) {
            tracing::error!("the log filter stays as it was: {error}");
        }
    }

    /// Opens the file anew, if the log goes to one.
    ///
    /// # Errors
    /// There is no descriptor, or the file cannot be made; then the log goes on where it went.
    pub fn reopen(&self, ledger: &Arc<Ledger>) -> Result<(), String> {
        let Output::File { path, open } = &self.output else { return Ok(()) };
        let permit = ledger.claim(Class::Background).map_err(|error| error.to_string())?;
        let file = with_retry(ledger, || append_to(path)).map_err(|error| format!("{}: {error}", path.display()))?;
        let old = std::mem::replace(&mut *open.write(), Open { file, permit: Some(permit) });
        drop(old);
        Ok(())
    }

    /// Takes the permit for the file that was opened before there were any.
    pub fn account(&self, ledger: &Arc<Ledger>) {
        if let Output::File { open, .. } = &self.output {
            open.write().permit = ledger.take(Class::Background);
        }
    }
}

/// Starts logging, to `file` if there is one. `filter` was checked when the configuration was read.
///
/// # Errors
/// The file cannot be opened.
pub fn start(filter: &str, file: Option<&Path>) -> io::Result<Log> {
    let output = match file {
        None => Output::Stderr,
        Some(path) => {
            let open = Open { file: append_to(path)?, permit: None };
            Output::File { path: path.to_owned(), open: Arc::new(RwLock::new(open)) }
        }
    };
    let builder = tracing_subscriber::fmt()
        .with_env_filter(EnvFilter::new(filter))
        .with_ansi(file.is_none() && io::stderr().is_terminal())
        .with_writer(output.clone())
        .with_target(true)
        .with_filter_reloading();
    let handle = builder.reload_handle();
    builder.init();
    Ok(Log { set_filter: Box::new(move |filter| handle.reload(filter)), output })
}

fn append_to(path: &Path) -> io::Result<File> {
    OpenOptions::new().create(true).append(true).open(path)
}

#[derive(Clone)]
enum Output {
    Stderr,
    File { path: PathBuf, open: Arc<RwLock<Open>> },
}

struct Open {
    file: File,
    /// Given back after the file is closed.
    #[allow(dead_code, reason = "held, not read")]
    permit: Option<Permit>,
}

impl<'a> MakeWriter<'a> for Output {
    type Writer = Line<'a>;

    fn make_writer(&'a self) -> Line<'a> {
        Line(self)
    }
}

/// Writes one event, whole, to the file that is open at that moment.
struct Line<'a>(&'a Output);

impl Write for Line<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self.0 {
            Output::Stderr => io::stderr().write(bytes),
            Output::File { open, .. } => (&open.read().file).write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
