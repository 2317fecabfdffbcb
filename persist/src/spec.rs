//! What a bucket is, beside its documents: `bucket.json`.

use std::path::Path;

use env::{OpenMode, Storage};
use serde::{Deserialize, Serialize};
use types::{BucketUuid, Level};

use crate::compaction::Trigger;
use crate::error::{Damage, Damages, StoreError};
use crate::names;
use crate::vb::remove_if_there;

/// A bucket's settings. Keys added later get a default, so that older files still load.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BucketSpec {
    pub name: String,
    #[serde(with = "hex_uuid")]
    pub uuid: BucketUuid,
    /// A power of two.
    pub vbuckets: u16,
    #[serde(default)]
    pub replicas: u8,
    #[serde(default = "default_quota_bytes")]
    pub quota_bytes: u64,
    #[serde(default)]
    pub flush_enabled: bool,
    #[serde(default)]
    pub eviction: Eviction,
    #[serde(default)]
    pub rules: WriteRules,
    /// When its files are compacted. `None`: as the server says.
    #[serde(default)]
    pub compaction: Option<Trigger>,
}

/// What a bucket makes of every write, whatever its client asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct WriteRules {
    /// No document lives for more seconds than this after a write that sets its expiry; 0: no limit.
    pub max_ttl_s: u32,
    /// A write that asks for less, or for nothing, gets this.
    #[serde(with = "level_name")]
    pub min_durability: Option<Level>,
    pub compression: Compression,
}

/// What becomes of values that clients compress.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Compression {
    /// They are kept inflated.
    Off,
    /// They are kept as they came.
    #[default]
    Passive,
    /// As `Passive`; others are not compressed either, so far.
    Active,
}

impl Compression {
    /// As settings and statistics call it.
    pub const fn name(self) -> &'static str {
        match self {
            Compression::Off => "off",
            Compression::Passive => "passive",
            Compression::Active => "active",
        }
    }
}

/// What leaves memory when it is short.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Eviction {
    /// Values. Keys and metadata of all documents stay: a miss is known at once.
    #[default]
    Value,
    /// Whole documents: for more keys than memory can hold.
    Full,
}

const fn default_quota_bytes() -> u64 {
    256 << 20
}

impl BucketSpec {
    /// Whether a bucket that is like this can become like `other`: what its files and its clients' maps are made of stays.
    pub(crate) fn can_become(&self, other: &BucketSpec) -> bool {
        let fixed = |spec: &BucketSpec| (spec.name.clone(), spec.uuid, spec.vbuckets, spec.replicas, spec.eviction);
        fixed(self) == fixed(other)
    }

    /// Refuses what cannot be stored.
    pub fn check(&self) -> Result<(), StoreError> {
        names::check_bucket_name(&self.name)?;
        if !self.vbuckets.is_power_of_two() {
            let what = format!("{} vBuckets: the count must be a power of two, 1 to 32768", self.vbuckets);
            return Err(StoreError::BadSpec { bucket: self.name.clone(), what });
        }
        Ok(())
    }

    pub(crate) fn load(storage: &dyn Storage, dir: &Path) -> Result<BucketSpec, StoreError> {
        let path = dir.join(names::SPEC_FILE);
        let damaged = |what: String| {
            let lost = format!("the settings of the bucket in {}; its documents may be whole", dir.display());
            StoreError::Damaged(Damages(vec![Damage { vb: None, path: path.clone(), offset: None, what, lost }]))
        };
        let file = match storage.open(&path, OpenMode::Read) {
            Ok(file) => file,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
                return Err(damaged("missing from a bucket's directory".to_owned()));
            }
            Err(e) => return Err(StoreError::io("open", &path)(e)),
        };
        let size = file.size().map_err(StoreError::io("size of", &path))?;
        if size > 1 << 20 {
            return Err(damaged(format!("{size} bytes long, which no bucket's settings are")));
        }
        let mut bytes = vec![0; size as usize];
        env::read_exact_at(&*file, &mut bytes, 0).map_err(StoreError::io("read", &path))?;
        let spec: BucketSpec = serde_json::from_slice(&bytes).map_err(|e| damaged(e.to_string()))?;
        spec.check().map_err(|e| damaged(e.to_string()))?;
        if dir.file_name().is_none_or(|name| name != spec.name.as_str()) {
            return Err(damaged(format!("names bucket \"{}\", which is not its directory's name", spec.name)));
        }
        Ok(spec)
    }

    /// Durable when it returns, in a directory whose own entry the caller makes durable.
    pub(crate) fn save(&self, storage: &dyn Storage, dir: &Path) -> Result<(), StoreError> {
        let json = serde_json::to_vec_pretty(self).expect("plain fields always serialise");
        replace_file(storage, dir, names::SPEC_FILE, &json)
    }
}

/// Writes a small file so that a crash leaves the old one or the new one: temp, sync, rename, sync of the directory.
pub(crate) fn replace_file(storage: &dyn Storage, dir: &Path, name: &str, bytes: &[u8]) -> Result<(), StoreError> {
    write_temp(storage, dir, name, bytes)?;
    put_in_place(storage, dir, name)
}

/// The first half of [`replace_file`]: after an error the old file is what it was.
pub(crate) fn write_temp(storage: &dyn Storage, dir: &Path, name: &str, bytes: &[u8]) -> Result<(), StoreError> {
    let temp = dir.join(format!("{name}{}", names::TEMP_SUFFIX));
    remove_if_there(storage, &temp)?;
    let file = storage.open(&temp, OpenMode::CreateNew).map_err(StoreError::io("create", &temp))?;
    env::write_all_at(&*file, bytes, 0).map_err(StoreError::io("write", &temp))?;
    file.sync().map_err(StoreError::io("sync", &temp))
}

/// The second half: after an error a crash may leave either file.
pub(crate) fn put_in_place(storage: &dyn Storage, dir: &Path, name: &str) -> Result<(), StoreError> {
    let temp = dir.join(format!("{name}{}", names::TEMP_SUFFIX));
    let path = dir.join(name);
    storage.rename(&temp, &path).map_err(StoreError::io("rename", &path))?;
    storage.sync_dir(dir).map_err(StoreError::io("sync directory", dir))
}

mod level_name {
    use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};
    use types::Level;

    pub fn serialize<S: Serializer>(level: &Option<Level>, s: S) -> Result<S::Ok, S::Error> {
        level.map(Level::name).serialize(s)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<Option<Level>, D::Error> {
        let name: Option<String> = Option::deserialize(d)?;
        let unknown = |name| D::Error::custom(format!("no durability level {name:?}"));
        name.map(|name| Level::from_name(&name).ok_or_else(|| unknown(name))).transpose()
    }
}

mod hex_uuid {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};
    use types::BucketUuid;

    pub fn serialize<S: Serializer>(uuid: &BucketUuid, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_str(&format!("{:032x}", uuid.0))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<BucketUuid, D::Error> {
        let text = String::deserialize(d)?;
        u128::from_str_radix(&text, 16).map(BucketUuid).map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spec_reads_back_as_it_was_and_older_ones_get_defaults() {
        let (env, _sim) = env::sim::env(1);
        let dir = Path::new("/d/b");
        env.storage.create_dir_all(dir).unwrap();
        let spec = BucketSpec {
            name: "b".into(),
            uuid: BucketUuid(7 << 100),
            vbuckets: 64,
            replicas: 1,
            quota_bytes: 1 << 30,
            flush_enabled: true,
            eviction: Eviction::Full,
            rules: WriteRules {
                max_ttl_s: 60,
                min_durability: Some(Level::PersistMajority),
                compression: Compression::Off,
            },
            compaction: Some(Trigger { garbage_percent: 40, garbage_bytes: 1 << 20, file_bytes_min: 1 << 16 }),
        };
        spec.save(&*env.storage, dir).unwrap();
        assert_eq!(BucketSpec::load(&*env.storage, dir).unwrap(), spec);

        let old = br#"{"name":"b","uuid":"0a","vbuckets":1024}"#;
        replace_file(&*env.storage, dir, names::SPEC_FILE, old).unwrap();
        let loaded = BucketSpec::load(&*env.storage, dir).unwrap();
        assert_eq!((loaded.uuid, loaded.quota_bytes), (BucketUuid(10), default_quota_bytes()));
        assert_eq!((loaded.eviction, loaded.compaction), (Eviction::Value, None));

        for bad in [&b"{}"[..], b"", br#"{"name":"other","uuid":"0a","vbuckets":1024}"#, b"\xff"] {
            replace_file(&*env.storage, dir, names::SPEC_FILE, bad).unwrap();
            assert!(matches!(BucketSpec::load(&*env.storage, dir), Err(StoreError::Damaged(_))));
        }
    }
}
