//! `settee bench`: the same client code against this server and its peers.
//!
//! ```text
//!     workload ──▶ load: event loops ──▶ connection ──▶ protocol ──▶ a server
//!                        │                                              │
//!                        ▼                                              ▼
//!                  tally, progress ──▶ report: a drawing, a table, JSON ◀── process: its processor time
//! ```
//!
//! This crate knows servers from outside only, by their sockets and their processes. What it prints says on which
//! machine and beside which sync latency it was measured, since nothing else makes numbers comparable.

#![forbid(unsafe_code)]

mod canary;
mod churn;
mod client;
mod connection;
mod event_loop;
mod experiment;
mod kv;
pub mod load;
mod machine;
mod observer;
mod pace;
pub mod process;
mod progress;
pub mod protocol;
mod report;
mod route;
mod servers;
mod slots;
pub mod tally;
pub mod target;
pub mod workload;

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use clap::Subcommand;

#[derive(Subcommand, Debug)]
pub enum Command {
    /// Put load on one server: this one, memcached, redis, etcd or postgres
    Kv(kv::Kv),
    /// Run a whole side-by-side story and print a table
    #[command(subcommand)]
    Experiment(experiment::Experiment),
}

/// Runs to the end, or until SIGINT or SIGTERM.
///
/// # Errors
/// In words: a target that does not answer, an option out of range, a peer that does not start.
pub fn run(command: &Command) -> anyhow::Result<()> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        signal_hook::flag::register(signal, stop.clone())?;
    }
    match command {
        Command::Kv(kv) => kv.run(&stop),
        Command::Experiment(experiment) => experiment.run(&stop),
    }
}
