//! Logs go to stderr, so that stdout carries only what scripts read.

use std::io::IsTerminal;

use tracing_subscriber::EnvFilter;

/// Starts logging. `filter` was checked when the configuration was read.
pub fn start(filter: &str) {
    tracing_subscriber::fmt()
        .with_env_filter(EnvFilter::new(filter))
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .with_target(true)
        .init();
}
