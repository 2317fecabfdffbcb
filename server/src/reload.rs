//! SIGHUP: the log is opened anew, the configuration file and the users are read again.
//!
//! Nothing is half applied. A file that cannot be read, or holds anything that would be refused at start, leaves all as
//! it was; the log and `settee stats config` say so, and why.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use frontend::auth::Users;
use limits::{Class, Ledger, with_retry};
use metrics::{Counter, metrics};
use persist::FileCache;
use scheduler::{PoolError, PoolKind, Pools};
use types::rank::{Mutex, Rank};

use crate::config::keys::Applies;
use crate::config::{Config, ConfigError, Setting};
use crate::log::Log;
use crate::{boot, descriptors};

metrics! {
    /// Times the log's file was opened anew.
    pub static LOG_REOPENS: Counter = "log_reopens";
    /// Times it could not be, so that the log went on in the old one.
    pub static LOG_REOPENS_REFUSED: Counter = "log_reopens_refused";
    /// Times the configuration was read again and took effect.
    pub static CONFIG_RELOADS: Counter = "config_reloads";
    /// Times it was read again and refused, so that the old one stayed.
    pub static CONFIG_RELOADS_REFUSED: Counter = "config_reloads_refused";
    /// Times the users were read again and took effect.
    pub static USERS_RELOADS: Counter = "users_reloads";
    /// Times they were read again and refused, so that the old ones stayed.
    pub static USERS_RELOADS_REFUSED: Counter = "users_reloads_refused";
}

/// Keys that have a part in how descriptors are divided.
const DIVIDING: [&str; 4] =
    ["kv.connections_max", "persist.file_cache.files_max", "persist.readers", "persist.writers"];

/// Where the configuration came from.
pub struct Origin {
    pub file: Option<PathBuf>,
    pub settings: Vec<Setting>,
}

/// What is in effect, for whoever asks.
pub struct InEffect {
    state: Mutex<State>,
}

struct State {
    texts: BTreeMap<&'static str, String>,
    waiting: Vec<&'static str>,
    log_refusal: Option<String>,
    config_refusal: Option<String>,
    users_refusal: Option<String>,
}

impl InEffect {
    pub fn new(config: &Config) -> InEffect {
        let texts = config.texts.clone();
        let (log_refusal, config_refusal, users_refusal) = (None, None, None);
        let state = State { texts, waiting: Vec::new(), log_refusal, config_refusal, users_refusal };
        InEffect { state: Mutex::ranked(Rank::RunQueue, state) }
    }

    /// Every key with its value, and how the last reload went.
    pub fn emit(&self, emit: &mut dyn FnMut(&str, &str)) {
        let state = self.state.lock();
        state.texts.iter().for_each(|(key, value)| emit(key, value));
        emit("reload_waits_for_restart", &state.waiting.join(" "));
        emit("reload_log_refusal", state.log_refusal.as_deref().unwrap_or(""));
        emit("reload_config_refusal", state.config_refusal.as_deref().unwrap_or(""));
        emit("reload_users_refusal", state.users_refusal.as_deref().unwrap_or(""));
    }
}

/// The parts that a reload changes.
pub struct Live {
    pub ledger: Arc<Ledger>,
    pub users: Arc<Users>,
    pub front: frontend::Handle,
    pub kept_files: Arc<FileCache>,
    pub engine: Arc<engine::Engine>,
    pub pools: Arc<Pools>,
    pub log: Log,
}

/// Reads the configuration again when told to.
pub struct Reloader {
    pub origin: Origin,
    pub config: Config,
    pub workers: usize,
    pub in_effect: Arc<InEffect>,
    pub live: Live,
}

impl Reloader {
    pub fn reload(&mut self) {
        // First: what comes next is to be found in the new file.
        let refusal = self.live.log.reopen(&self.live.ledger).err();
        match &refusal {
            None => LOG_REOPENS.inc(),
            Some(why) => {
                LOG_REOPENS_REFUSED.inc();
                tracing::error!("the log stays in the file it has: {why}");
            }
        }
        self.in_effect.state.lock().log_refusal = refusal;

        let refusal = self.reload_config().err();
        match &refusal {
            None => CONFIG_RELOADS.inc(),
            Some(why) => {
                CONFIG_RELOADS_REFUSED.inc();
                tracing::error!("the configuration stays as it was: {why}");
            }
        }
        self.in_effect.state.lock().config_refusal = refusal;

        let refusal = self.live.users.reload().err().map(|error| error.to_string());
        match &refusal {
            None => {
                USERS_RELOADS.inc();
                tracing::info!(users = self.live.users.list().len(), "users read again");
            }
            Some(why) => {
                USERS_RELOADS_REFUSED.inc();
                tracing::error!("the users stay as they were: {why}");
            }
        }
        self.in_effect.state.lock().users_refusal = refusal;
    }

    fn reload_config(&mut self) -> Result<(), String> {
        let new = self.read()?;
        let changed: Vec<_> = self.config.changes(&new).collect();
        // The parts that can be refused go first.
        if changed.iter().any(|key| DIVIDING.contains(&key.name)) {
            descriptors::divide_again(&self.live.ledger, &self.live.front, &new, self.workers)?;
        }
        if let Err(refused) = self.resize_pools(&new) {
            // Back to what there was: fewer threads and fewer descriptors, which nobody refuses.
            let _ = self.resize_pools(&self.config);
            let _ = descriptors::divide_again(&self.live.ledger, &self.live.front, &self.config, self.workers);
            return Err(refused.to_string());
        }
        if changed.iter().any(|key| DIVIDING.contains(&key.name)) {
            tracing::info!("{}", self.live.ledger.plan());
            self.live.kept_files.set_files_max(descriptors::files_kept(&self.live.ledger, &new));
        }
        self.live.front.set_bounds(new.bounds);
        self.live.engine.store().set_compaction(new.compaction);
        self.live.engine.store().governor().set_limits(new.disk);
        if self.config.commit_log != new.commit_log {
            // What else is said of the log waits for a restart.
            let log = boot::log_options(&Config { commit_log: new.commit_log, ..self.config.clone() });
            self.live.engine.store().set_commit_log(log).map_err(|error| error.to_string())?;
        }
        if self.config.log_level != new.log_level {
            self.live.log.set_filter(&new.log_level);
        }

        let (live, waiting): (Vec<_>, Vec<_>) = changed.into_iter().partition(|key| key.applies == Applies::Live);
        for key in &live {
            let text = new.texts.get(key.name).cloned().unwrap_or_default();
            self.config.texts.insert(key.name, text);
        }
        self.config.connections_max = new.connections_max;
        self.config.files_max = new.files_max;
        self.config.readers = new.readers;
        self.config.writers = new.writers;
        self.config.bounds = new.bounds;
        self.config.compaction = new.compaction;
        self.config.disk = new.disk;
        self.config.commit_log = new.commit_log;
        self.config.log_level = new.log_level;
        let names = |keys: Vec<&'static crate::config::keys::Key>| keys.iter().map(|key| key.name).collect::<Vec<_>>();
        let (live, waiting) = (names(live), names(waiting));
        tracing::info!(changed = live.join(" "), wait_for_restart = waiting.join(" "), "configuration read again");
        let mut state = self.in_effect.state.lock();
        state.texts = self.config.texts.clone();
        state.waiting = waiting;
        Ok(())
    }

    fn resize_pools(&self, config: &Config) -> Result<(), PoolError> {
        let sizes = boot::pool_sizes(config);
        for kind in [PoolKind::Reader, PoolKind::Writer, PoolKind::Compaction] {
            self.live.pools.resize(kind, sizes.threads(kind))?;
        }
        self.live.engine.store().set_threads(&self.live.pools, config.readers, config.writers);
        Ok(())
    }

    fn read(&self) -> Result<Config, String> {
        let _permit = self.live.ledger.claim(Class::Background).map_err(|error| error.to_string())?;
        let load = Config::load_with(self.origin.file.as_deref(), &self.origin.settings, |path| {
            with_retry(&self.live.ledger, || std::fs::read_to_string(path))
        });
        load.map_err(|error: ConfigError| error.to_string())
    }
}
