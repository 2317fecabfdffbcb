//! The configuration: defaults, then `settee.toml`, then the command line, each checked where it is read.

pub mod keys;

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use keys::Key;
use limits::Wish;

/// Everything the server can be told. Parts never see it: `boot` hands each the plain values it needs.
#[derive(Clone, Debug)]
pub struct Config {
    pub admin_listen: SocketAddr,
    pub batch_bytes_max: usize,
    pub bounds: frontend::Bounds,
    pub bucket_eviction: persist::Eviction,
    pub bucket_flush_enabled: bool,
    pub bucket_name: String,
    pub bucket_quota_bytes: u64,
    pub bucket_replicas: u8,
    pub bucket_vbuckets: u16,
    pub commit_log: bool,
    pub compaction: persist::CompactionOptions,
    pub connections_max: Wish,
    pub data_dir: PathBuf,
    pub disk: persist::Limits,
    pub durability_timeout_ms: u32,
    pub file_format: u8,
    pub files_max: Wish,
    pub filing_age_s_max: u32,
    pub filing_bytes_max: u64,
    pub kv_listen: SocketAddr,
    pub log_bytes_max: u64,
    pub log_file: Option<PathBuf>,
    pub log_way: Option<persist::LogWay>,
    pub log_level: String,
    pub log_segment_bytes: u64,
    pub open_bucket: String,
    pub open_bucket_anywhere: bool,
    pub pager_interval_s: u32,
    pub warm_up_grace_ms: u32,
    pub password_file: String,
    pub readers: usize,
    pub recovery: bool,
    pub reserve_bytes: u64,
    pub scram_iterations: u32,
    pub user: String,
    pub workers: usize,
    pub writers: usize,
    /// Every key's value as it was written.
    pub texts: BTreeMap<&'static str, String>,
}

/// Why a configuration was refused. Exit code 2.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("{from}: unknown key {key:?}{}", .nearest.map(|n| format!("; did you mean {n:?}?")).unwrap_or_default())]
    UnknownKey { from: String, key: String, nearest: Option<&'static str> },
    #[error("{from}: {key} = {value:?}: expected {expected}")]
    BadValue { from: String, key: &'static str, value: String, expected: String },
    #[error("--set {0:?}: expected KEY=VALUE, such as --set bucket.replicas=0")]
    NotAPair(String),
    #[error("cannot read {}: {source}", .path.display())]
    Unreadable { path: PathBuf, source: io::Error },
    #[error("{}: {source}", .path.display())]
    NotToml { path: PathBuf, source: toml::de::Error },
    #[error("{0}")]
    Conflict(String),
}

impl Config {
    pub fn defaults() -> Config {
        let nowhere = SocketAddr::from(([127, 0, 0, 1], 0));
        let mut config = Config {
            admin_listen: nowhere,
            batch_bytes_max: 0,
            bounds: frontend::Bounds::default(),
            bucket_eviction: persist::Eviction::Value,
            bucket_flush_enabled: false,
            bucket_name: String::new(),
            bucket_quota_bytes: 0,
            bucket_replicas: 0,
            bucket_vbuckets: 0,
            commit_log: false,
            compaction: persist::CompactionOptions::default(),
            connections_max: Wish::Default(0),
            data_dir: PathBuf::new(),
            disk: persist::Limits::default(),
            durability_timeout_ms: 0,
            file_format: 0,
            files_max: Wish::Default(0),
            filing_age_s_max: 0,
            filing_bytes_max: 0,
            kv_listen: nowhere,
            log_bytes_max: 0,
            log_file: None,
            log_way: None,
            log_level: String::new(),
            log_segment_bytes: 0,
            open_bucket: String::new(),
            open_bucket_anywhere: false,
            pager_interval_s: 0,
            warm_up_grace_ms: 0,
            password_file: String::new(),
            readers: 0,
            recovery: false,
            reserve_bytes: 0,
            scram_iterations: 0,
            user: String::new(),
            workers: 0,
            writers: 0,
            texts: BTreeMap::new(),
        };
        for key in keys::KEYS {
            (key.set)(&mut config, key.default).expect("a default fits its key");
            config.texts.insert(key.name, key.default.to_owned());
        }
        // Nobody asked for them, so less will do.
        for wish in [&mut config.connections_max, &mut config.files_max] {
            *wish = Wish::Default(wish.number());
        }
        config
    }

    /// Defaults, then the file if there is one, then the settings in order (`from` says where each was written).
    pub fn load(file: Option<&Path>, settings: &[Setting]) -> Result<Config, ConfigError> {
        Config::load_with(file, settings, |path| std::fs::read_to_string(path))
    }

    /// The same with another way to read the file.
    pub fn load_with(
        file: Option<&Path>,
        settings: &[Setting],
        read: impl Fn(&Path) -> io::Result<String>,
    ) -> Result<Config, ConfigError> {
        let mut config = Config::defaults();
        if let Some(path) = file {
            let text = read(path).map_err(|source| ConfigError::Unreadable { path: path.to_owned(), source })?;
            config.apply_file(path, &text)?;
        }
        for setting in settings {
            config.apply(setting)?;
        }
        config.check()?;
        Ok(config)
    }

    /// The keys whose values differ.
    pub fn changes<'c>(&'c self, newer: &'c Config) -> impl Iterator<Item = &'static Key> + 'c {
        keys::KEYS.iter().filter(|key| self.texts.get(key.name) != newer.texts.get(key.name))
    }

    fn apply(&mut self, setting: &Setting) -> Result<(), ConfigError> {
        let Setting { from, key, value } = setting;
        let row = keys::find(key).ok_or_else(|| ConfigError::UnknownKey {
            from: from.clone(),
            key: key.clone(),
            nearest: keys::nearest(key),
        })?;
        (row.set)(self, value).map_err(|expected| ConfigError::BadValue {
            from: from.clone(),
            key: row.name,
            value: value.clone(),
            expected,
        })?;
        self.texts.insert(row.name, value.clone());
        Ok(())
    }

    fn apply_file(&mut self, path: &Path, text: &str) -> Result<(), ConfigError> {
        let table: toml::Table =
            toml::from_str(text).map_err(|source| ConfigError::NotToml { path: path.to_owned(), source })?;
        let mut settings = Vec::new();
        flatten(&path.display().to_string(), "", &table, &mut settings);
        settings.iter().try_for_each(|setting| self.apply(setting))
    }

    /// What no key can see alone.
    fn check(&self) -> Result<(), ConfigError> {
        if !self.open_bucket.is_empty() && !self.kv_listen.ip().is_loopback() && !self.open_bucket_anywhere {
            return Err(ConfigError::Conflict(format!(
                "kv.open_bucket lets anybody who reaches {} use bucket {:?} without a password; listen on loopback, or add \
                 --set kv.open_bucket_anywhere=true if that is meant",
                self.kv_listen, self.open_bucket
            )));
        }
        let (least, given) = (3 * self.log_segment_bytes, self.log_bytes_max);
        if given < least {
            return Err(ConfigError::Conflict(format!(
                "persist.log_bytes_max = {given} is fewer than three segments of persist.log_segment_bytes = {}: give at least \
                 {least}, or smaller segments",
                self.log_segment_bytes
            )));
        }
        Ok(())
    }
}

/// One key and its value as somebody wrote it.
#[derive(Clone, Debug)]
pub struct Setting {
    /// Where: `--kv`, `--set`, or the file's path.
    pub from: String,
    pub key: String,
    pub value: String,
}

impl Setting {
    pub fn new(from: &str, key: &str, value: impl Into<String>) -> Setting {
        Setting { from: from.to_owned(), key: key.to_owned(), value: value.into() }
    }

    /// The argument of `--set`.
    pub fn parse(pair: &str) -> Result<Setting, ConfigError> {
        let (key, value) = pair.split_once('=').ok_or_else(|| ConfigError::NotAPair(pair.to_owned()))?;
        Ok(Setting::new("--set", key.trim(), value.trim()))
    }
}

fn flatten(from: &str, prefix: &str, table: &toml::Table, settings: &mut Vec<Setting>) {
    for (name, value) in table {
        let key = if prefix.is_empty() { name.clone() } else { format!("{prefix}.{name}") };
        match value {
            toml::Value::Table(inner) => flatten(from, &key, inner, settings),
            toml::Value::String(text) => settings.push(Setting::new(from, &key, text.as_str())),
            other => settings.push(Setting::new(from, &key, other.to_string())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(toml: &str, settings: &[Setting]) -> Result<Config, ConfigError> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("settee.toml");
        std::fs::write(&path, toml).unwrap();
        Config::load(Some(&path), settings)
    }

    #[test]
    fn the_command_line_wins_over_the_file_and_the_file_over_the_defaults() {
        let toml = "user = \"admin\"\n[bucket]\nreplicas = 1\nvbuckets = 64\n";
        let config = load(toml, &[Setting::parse("bucket.vbuckets=16").unwrap()]).unwrap();
        assert_eq!((config.user.as_str(), config.bucket_replicas, config.bucket_vbuckets), ("admin", 1, 16));
    }

    #[test]
    fn an_unknown_key_is_named_with_the_one_that_was_meant() {
        let error = load("[bucket]\nreplica = 1\n", &[]).unwrap_err().to_string();
        assert!(error.contains("unknown key \"bucket.replica\"; did you mean \"bucket.replicas\"?"), "{error}");
    }

    #[test]
    fn a_log_of_fewer_than_three_segments_is_refused() {
        let segments = |n: u64| [Setting::new("--set", "persist.log_bytes_max", (n << 26).to_string())];
        let error = load("", &segments(2)).unwrap_err().to_string();
        assert!(error.contains("give at least 201326592"), "{error}");
        assert!(load("", &segments(3)).is_ok());
    }

    #[test]
    fn an_open_bucket_on_a_reachable_address_must_be_forced() {
        let open = [Setting::new("--kv", "kv.listen", "0.0.0.0:0"), Setting::new("--set", "kv.open_bucket", "b")];
        assert!(matches!(load("", &open), Err(ConfigError::Conflict(_))));
        let forced = [&open[..], &[Setting::new("--set", "kv.open_bucket_anywhere", "true")]].concat();
        assert!(load("", &forced).is_ok());
    }
}
