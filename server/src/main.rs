//! `settee`: one binary, the server and its tools.

#![forbid(unsafe_code)]

mod admin;
mod boot;
mod cli;
mod client;
mod cluster;
mod commands;
mod config;
mod credentials;
mod descriptors;
mod exit;
mod heap;
mod log;
mod maps;
mod memory;
mod node;
mod reload;
mod stats;

use std::process::ExitCode;

use clap::Parser;
use clap::error::ErrorKind;
use cli::{Cli, Command};
use exit::{Exit, OrExit, Refusal};

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            let _ = error.print();
            let asked = matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion);
            return if asked { Exit::Fine.into() } else { Exit::Usage.into() };
        }
    };
    match run(cli.command) {
        Ok(()) => Exit::Fine.into(),
        Err(Refusal { exit, error }) => {
            eprintln!("settee: {error:#}");
            exit.into()
        }
    }
}

fn run(command: Command) -> Result<(), Refusal> {
    match command {
        Command::Serve(options) => {
            let settings = options.settings().or_exit(Exit::Usage)?;
            let config = config::Config::load(options.config.as_deref(), &settings).or_exit(Exit::Usage)?;
            boot::serve(config, reload::Origin { file: options.config, settings }, options.until_eof)
        }
        Command::Stats(options) => commands::stats::run(&options).or_exit(Exit::Failed),
        Command::Tail(options) => commands::tail::run(&options).or_exit(Exit::Failed),
        Command::Bucket(command) => commands::bucket::run(&command).or_exit(Exit::Failed),
        Command::File(command) => commands::file::run(&command),
        Command::ClusterRun(options) => cluster::run(&options).or_exit(Exit::Environment),
        Command::Cluster(command) => cluster::command(&command).or_exit(Exit::Failed),
        Command::Bench(command) => bench::run(&command).or_exit(Exit::Failed),
        Command::Keys => {
            print!("{}", config::keys::markdown());
            Ok(())
        }
    }
}
