//! `settee file`: looking into couchstore files, ours or anybody's, and into a commit log.

use std::io::{self, BufWriter, Write};
use std::ops::ControlFlow;
use std::path::Path;

use anyhow::anyhow;
use couchstore::check::Depth;
use couchstore::{Error, Mode, inspect};
use persist::Verdict;
use serde_json::Value;

use crate::cli::File;
use crate::exit::{Exit, OrExit, Refusal};

pub fn run(command: &File) -> Result<(), Refusal> {
    match command {
        File::Info { file, recover } => {
            let info = inspect::info(&*storage(), file, mode(*recover)).map_err(|error| refuse(file, &error))?;
            print(&info)
        }
        File::Dump { file, recover } => dump(file, mode(*recover)),
        File::Check { file, all } => {
            let depth = if *all { Depth::All } else { Depth::Newest };
            let report = inspect::check(&*storage(), file, depth).map_err(|error| refuse(file, &error))?;
            print(&report)?;
            match report["damage"].get(0) {
                None => Ok(()),
                Some(first) => Err(damaged(file, first)),
            }
        }
        File::Log { dir } => log(dir),
    }
}

fn log(dir: &Path) -> Result<(), Refusal> {
    let inspection = persist::inspect_log(&env::os::env(), dir).map_err(|error| {
        let exit = if error.verdict() == Verdict::Abort { Exit::Damaged } else { Exit::Environment };
        Refusal { exit, error: anyhow!("{error}") }
    })?;
    print(&serde_json::to_value(&inspection).or_exit(Exit::Environment)?)?;
    let broken = inspection.segments.iter().find_map(|segment| Some((segment, segment.damaged_before?)));
    broken.map_or(Ok(()), |(segment, witness)| {
        let place = format!("{}@{}", dir.join(&segment.file).display(), segment.end);
        let error = anyhow!("{place}: this record is not what was written; a later one at {witness} proves it");
        Err(Refusal { exit: Exit::Damaged, error })
    })
}

fn dump(file: &Path, mode: Mode) -> Result<(), Refusal> {
    let couch = inspect::open(&*storage(), file, mode).map_err(|error| refuse(file, &error))?;
    let mut out = BufWriter::new(io::stdout().lock());
    let mut written = Ok(());
    let mut unreadable = None;
    inspect::dump(&couch.snapshot(), |document| {
        if unreadable.is_none() && document.get("error").is_some() {
            unreadable = Some(document["error"].clone());
        }
        written = writeln!(out, "{document}");
        if written.is_ok() { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
    })
    .map_err(|error| refuse(file, &error))
    .map(|_| ())?;
    written.and_then(|()| out.flush()).or_else(reader_left).or_exit(Exit::Environment)?;
    match unreadable {
        None => Ok(()),
        Some(error) => {
            Err(Refusal { exit: Exit::Damaged, error: anyhow!("a document could not be read: {}", text(&error)) })
        }
    }
}

fn mode(recover: bool) -> Mode {
    if recover { Mode::Recovery } else { Mode::Strict }
}

fn storage() -> std::sync::Arc<dyn env::Storage> {
    env::os::env().storage
}

fn print(value: &Value) -> Result<(), Refusal> {
    writeln!(io::stdout(), "{value:#}").or_else(reader_left).or_exit(Exit::Environment)
}

/// `settee file dump | head` is not an error.
fn reader_left(error: io::Error) -> io::Result<()> {
    if error.kind() == io::ErrorKind::BrokenPipe { Ok(()) } else { Err(error) }
}

fn refuse(file: &Path, error: &Error) -> Refusal {
    if !error.is_damage() {
        return Refusal { exit: Exit::Environment, error: anyhow!("{error}") };
    }
    let advice = format!("try `settee file info --recover {}` for the newest commit that is whole", file.display());
    Refusal { exit: Exit::Damaged, error: anyhow!("{error}; {advice}") }
}

fn damaged(file: &Path, first: &Value) -> Refusal {
    let at = first["offset"].as_u64().map(|at| format!("@{at}")).unwrap_or_default();
    Refusal { exit: Exit::Damaged, error: anyhow!("{}{at}: {}", file.display(), text(&first["what"])) }
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}
