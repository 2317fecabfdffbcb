//! How many files this process may have open, and who gets how many of them.

use std::fs;
use std::sync::Arc;

use anyhow::{Context, anyhow};
use limits::{Class, FILES_MIN, GiveBack, Ledger, Permit, Plan, PlanError, Wish, Wishes};
use persist::FileCache;

use crate::config::Config;
use crate::exit::{Exit, OrExit, Refusal};

/// Descriptors the process has open itself: the standard streams, the lock, signals, two listeners with their pollers and
/// wakers, and a connection that was accepted and has no place yet. The rest of the class is the admin port's.
const CORE_BASE: u32 = 14;
/// A poller and a waker.
const CORE_PER_WORKER: u32 = 2;
/// The commit log's: two segments, each open twice, one being made ready, and their directory.
const LOG_FILES: u32 = 6;
/// A flush has the old file and the new one open, or a directory; a read has its file.
const FILES_PER_THREAD: u32 = 2;

/// Raises the limit as far as it goes and divides it; one line of the log says how.
pub fn divide(config: &Config, workers: usize) -> Result<Arc<Ledger>, Refusal> {
    let limit = match env::os::raise_fd_limit() {
        Ok((soft, _)) => soft,
        Err(error) => {
            tracing::warn!("cannot raise the limit of open files: {error}");
            soft_limit().context("cannot tell the limit of open files").or_exit(Exit::Environment)?
        }
    };
    let plan = plan(limit, config, workers).map_err(|error| match error {
        PlanError::TooLow { .. } => Refusal { exit: Exit::Environment, error: anyhow!("{error}") },
        PlanError::OutOfRange { .. } => Refusal { exit: Exit::Usage, error: anyhow!("{}", explain(error, config)) },
    })?;
    tracing::info!("{plan}");
    if let Some(reduced) = plan.reduced() {
        tracing::warn!("{reduced}");
    }
    Ok(Ledger::new(&plan))
}

/// The permit for what the process has open for as long as it lives.
pub fn of_the_process(ledger: &Arc<Ledger>, workers: usize) -> Option<Permit> {
    ledger.take_many(Class::Core, CORE_BASE + CORE_PER_WORKER * workers as u32)
}

/// How many vBucket files may be kept open: those that no flush, no read and no log needs.
pub fn files_kept(ledger: &Ledger, config: &Config) -> usize {
    let left = ledger.plan().files_max().saturating_sub(files_in_use(config));
    left.min(config.files_max.number()) as usize
}

/// Lets whoever runs out of descriptors have vBucket files closed that nobody uses.
pub struct SpareFiles(pub Arc<FileCache>);

impl GiveBack for SpareFiles {
    fn give_back(&self, wanted: u32) -> u32 {
        self.0.close_some(wanted as usize) as u32
    }
}

/// Divides the same limit anew, as a start with this configuration would.
///
/// # Errors
/// What a start would refuse, or files that are to become connections are in use; then nothing has changed.
pub fn divide_again(ledger: &Ledger, front: &frontend::Handle, config: &Config, workers: usize) -> Result<(), String> {
    let before = ledger.plan();
    let plan = plan(before.limit(), config, workers).map_err(|error| explain(error, config).to_string())?;
    let (connections, files) = (plan.connections_max(), plan.files_max());
    let connect = || front.resize(connections).map_err(|no_room| format!("kv.connections_max: {no_room}"));
    let keep = || ledger.resize(Class::Files, files).map_err(|no_room| no_room.to_string());
    // What shrinks makes the room for what grows.
    if connections <= before.connections_max() {
        connect()?;
        keep()
    } else {
        keep()?;
        connect().inspect_err(|_| {
            // Nobody took what it has just given up.
            let _ = ledger.resize(Class::Files, before.files_max());
        })
    }
}

fn plan(limit: u64, config: &Config, workers: usize) -> Result<Plan, PlanError> {
    let wishes = Wishes {
        connections_max: config.connections_max,
        files_max: match config.files_max {
            Wish::Default(n) => Wish::Default(n + files_in_use(config)),
            Wish::Asked(n) => Wish::Asked((n + files_in_use(config)).max(FILES_MIN)),
        },
        workers: workers as u32,
    };
    Plan::for_limit(limit, wishes)
}

/// Files that are open because something is done with them, whether any are kept or not.
fn files_in_use(config: &Config) -> u32 {
    (config.writers + config.readers) as u32 * FILES_PER_THREAD + LOG_FILES
}

/// The same error in terms of the configuration: a class has more than its key says.
fn explain(error: PlanError, config: &Config) -> PlanError {
    let in_use = files_in_use(config);
    match error {
        PlanError::OutOfRange { what: "files_max", asked, min, max, limit } => PlanError::OutOfRange {
            what: "persist.file_cache.files_max",
            asked: asked.saturating_sub(in_use),
            min: min.saturating_sub(FILES_MIN.max(in_use)),
            max: max.saturating_sub(in_use),
            limit,
        },
        PlanError::OutOfRange { asked, min, max, limit, .. } => {
            PlanError::OutOfRange { what: "kv.connections_max", asked, min, max, limit }
        }
        too_low => too_low,
    }
}

/// The limit as it is, where it could not be raised.
fn soft_limit() -> anyhow::Result<u64> {
    let limits = fs::read_to_string("/proc/self/limits")?;
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files"));
    let soft = line.and_then(|line| line.split_whitespace().next()).and_then(|soft| soft.parse().ok());
    soft.ok_or_else(|| anyhow!("/proc/self/limits does not say"))
}
