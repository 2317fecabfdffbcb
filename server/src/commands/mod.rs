//! The subcommands that are not the server.

pub mod bucket;
pub mod file;
pub mod stats;
mod table;

use crate::cli::Target;
use crate::client::Client;
use crate::credentials;

/// Connects as the user the options name.
fn connect(target: &Target) -> anyhow::Result<Client> {
    let password = credentials::for_tool(target.password_file.as_deref(), &target.data_dir)?;
    let mut client = Client::connect(&target.kv)?;
    client.authenticate(&target.user, &password)?;
    Ok(client)
}
