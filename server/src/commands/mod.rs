//! The subcommands that are not the server.

pub mod bucket;
pub mod file;
pub mod stats;
mod table;
pub mod tail;

use wire::Feature;

use crate::cli::Target;
use crate::client::{self, Client};
use crate::credentials;

/// Connects as the user the options name.
fn connect(target: &Target) -> anyhow::Result<Client> {
    connect_with(target, client::FEATURES)
}

/// The same, with these features negotiated.
fn connect_with(target: &Target, features: &[Feature]) -> anyhow::Result<Client> {
    let password = credentials::for_tool(target.password_file.as_deref(), &target.data_dir)?;
    let mut client = Client::connect(&target.kv, features)?;
    client.authenticate(&target.user, &password)?;
    Ok(client)
}
