//! Why the program ends, as scripts see it.

use std::process::ExitCode;

/// The contract of the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    Fine = 0,
    /// A request that a running server refused, or an error that has no code of its own.
    Failed = 1,
    /// Bad usage or configuration.
    Usage = 2,
    /// Data is damaged: the message says which file, what is lost and what to do.
    Damaged = 3,
    /// The environment: port, permission, disk, a second server on the directory.
    Environment = 4,
    /// It stopped as asked, but changes that it had taken are not on disk: the message says how many of which vBuckets, and why.
    Lost = 5,
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> ExitCode {
        ExitCode::from(exit as u8)
    }
}

/// An error that knows how the program should end.
#[derive(Debug)]
pub struct Refusal {
    pub exit: Exit,
    pub error: anyhow::Error,
}

/// Says how the program ends if this fails.
pub trait OrExit<T> {
    fn or_exit(self, exit: Exit) -> Result<T, Refusal>;
}

impl<T, E: Into<anyhow::Error>> OrExit<T> for Result<T, E> {
    fn or_exit(self, exit: Exit) -> Result<T, Refusal> {
        self.map_err(|error| Refusal { exit, error: error.into() })
    }
}
