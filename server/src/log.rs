//! Logs go to stderr, so that stdout carries only what scripts read. Where they are kept, and for how long, is the
//! business of whoever started the server: there is no log file to rotate, and none to lose.

use std::io::IsTerminal;

use tracing_subscriber::EnvFilter;

/// Changes what is logged, while it is.
pub struct Filter(Box<dyn Fn(EnvFilter) -> Result<(), tracing_subscriber::reload::Error> + Send>);

impl Filter {
    /// `filter` was checked when the configuration was read.
    pub fn set(&self, filter: &str) {
        if let Err(error) = (self.0)(EnvFilter::new(filter)) {
            tracing::error!("the log filter stays as it was: {error}");
        }
    }
}

/// Starts logging. `filter` was checked when the configuration was read.
pub fn start(filter: &str) -> Filter {
    let builder = tracing_subscriber::fmt()
        .with_env_filter(EnvFilter::new(filter))
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .with_target(true)
        .with_filter_reloading();
    let handle = builder.reload_handle();
    builder.init();
    Filter(Box::new(move |filter| handle.reload(filter)))
}
