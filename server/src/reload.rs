//! SIGHUP: the configuration file and the users are read again.
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
use scheduler::{PoolKind, Pools};
use types::rank::{Mutex, Rank};

use crate::config::keys::Applies;
use crate::config::{Config, ConfigError, Setting};
use crate::{descriptors, log};

metrics! {
    /// Times the configuration was read again and took effect.
    pub static CONFIG_RELOADS: Counter = "config_reloads";
    /// Times it was read again and refused, so that the old one stayed.
    pub static CONFIG_RELOADS_REFUSED: Counter = "config_reloads_refused";
    /// Times the users were read again and took effect.
    pub static USERS_RELOADS: Counter = "users_reloads";
    /// Times they were read again and refused, so that the old ones stayed.
    pub static USERS_RELOADS_REFUSED: Counter = "users_reloads_refused";
}

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
    config_refusal: Option<String>,
    users_refusal: Option<String>,
}

impl InEffect {
    pub fn new(config: &Config) -> InEffect {
        let texts = config.texts.clone();
        let state = State { texts, waiting: Vec::new(), config_refusal: None, users_refusal: None };
        InEffect { state: Mutex::ranked(Rank::RunQueue, state) }
    }

    /// Every key with its value, and how the last reload went.
    pub fn emit(&self, emit: &mut dyn FnMut(&str, &str)) {
        let state = self.state.lock();
        state.texts.iter().for_each(|(key, value)| emit(key, value));
        emit("reload_waits_for_restart", &state.waiting.join(" "));
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
    pub filter: log::Filter,
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
        if changed.iter().any(|key| ["kv.connections_max", "persist.file_cache.files_max"].contains(&key.name)) {
            // The one part that can be refused: it goes first.
            descriptors::divide_again(&self.live.ledger, &self.live.front, &new, self.workers)?;
            tracing::info!("{}", self.live.ledger.plan());
            self.live.kept_files.set_files_max(descriptors::files_kept(&self.live.ledger, &new));
        }
        self.live.front.set_bounds(new.bounds);
        if let Err(error) = self.live.pools.resize(PoolKind::Compaction, new.compaction.limit) {
            // They share the threads there are.
            tracing::warn!("{error}");
        }
        self.live.engine.store().set_compaction(new.compaction);
        self.live.engine.store().governor().set_limits(new.disk);
        if self.config.log_level != new.log_level {
            self.live.filter.set(&new.log_level);
        }

        let (live, waiting): (Vec<_>, Vec<_>) = changed.into_iter().partition(|key| key.applies == Applies::Live);
        for key in &live {
            let text = new.texts.get(key.name).cloned().unwrap_or_default();
            self.config.texts.insert(key.name, text);
        }
        self.config.connections_max = new.connections_max;
        self.config.files_max = new.files_max;
        self.config.bounds = new.bounds;
        self.config.compaction = new.compaction;
        self.config.disk = new.disk;
        self.config.log_level = new.log_level;
        let names = |keys: Vec<&'static crate::config::keys::Key>| keys.iter().map(|key| key.name).collect::<Vec<_>>();
        let (live, waiting) = (names(live), names(waiting));
        tracing::info!(changed = live.join(" "), wait_for_restart = waiting.join(" "), "configuration read again");
        let mut state = self.in_effect.state.lock();
        state.texts = self.config.texts.clone();
        state.waiting = waiting;
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
