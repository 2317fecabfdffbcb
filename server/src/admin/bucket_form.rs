//! The form that SDKs' bucket managers send to make a bucket or to change one.
//!
//! Their field names, and the words they look for in refusals, are other servers'. What is asked for and cannot be had is
//! refused, never passed over: a bucket is as its administrator was told.

use std::collections::HashMap;

use persist::{BucketSpec, Compression, Eviction, Trigger};
use serde_json::{Value, json};
use types::Level;

/// The fields of a form.
pub type Fields = HashMap<String, String>;

/// Which field cannot be, and why.
pub type Wrong = (&'static str, String);

/// What another server's manager may ask for and only this can be had.
const ONLY: &[(&str, &[&str])] = &[
    ("bucketType", &["couchbase", "membase"]),
    ("storageBackend", &["couchstore"]),
    ("conflictResolutionType", &["seqno"]),
];

/// A bucket's name, as the form gives it.
pub fn name(form: &Fields) -> Result<&str, Wrong> {
    let name = form.get("name").filter(|name| crate::config::keys::is_bucket_name(name));
    let rule = "1 to 100 of A-Z a-z 0-9 . % - _, not starting with a dot";
    name.map(String::as_str).ok_or(("name", rule.to_owned()))
}

/// `spec` with what the form asks for.
pub fn apply(form: &Fields, mut spec: BucketSpec) -> Result<BucketSpec, Wrong> {
    for (field, possible) in ONLY {
        if let Some(asked) = form.get(*field).filter(|asked| !possible.contains(&asked.as_str())) {
            return Err((field, format!("{asked:?} is not supported, only {}", possible.join(", "))));
        }
    }
    if let Some(count) = number(form, "numVBuckets", 1, 1024)? {
        spec.vbuckets = count as u16;
        if !spec.vbuckets.is_power_of_two() {
            return Err(("numVBuckets", format!("{count} is not a power of two")));
        }
    }
    if let Some(count) = number(form, "replicaNumber", 0, 2)? {
        spec.replicas = count as u8;
    }
    if let Some(megabytes) = number(form, "ramQuotaMB", 16, 1 << 24)? {
        spec.quota_bytes = megabytes << 20;
    }
    if let Some(seconds) = number(form, "maxTTL", 0, i32::MAX as u64)? {
        spec.rules.max_ttl_s = seconds as u32;
    }
    if let Some(enabled) = word(form, "flushEnabled", &[("0", false), ("false", false), ("1", true), ("true", true)])? {
        spec.flush_enabled = enabled;
    }
    if let Some(eviction) = word(form, "evictionPolicy", EVICTION)? {
        spec.eviction = eviction;
    }
    if let Some(compression) = word(form, "compressionMode", COMPRESSION)? {
        spec.rules.compression = compression;
    }
    if let Some(level) = word(form, "durabilityMinLevel", LEVEL)? {
        spec.rules.min_durability = level;
    }
    spec.compaction = compaction(form, spec.compaction)?;
    Ok(spec)
}

const OWN_RULES: &str = "autoCompactionDefined";
const GARBAGE_PERCENT: &str = "databaseFragmentationThreshold[percentage]";
const GARBAGE_BYTES: &str = "databaseFragmentationThreshold[size]";

/// When the bucket's files are compacted; `None`: as the server says.
fn compaction(form: &Fields, before: Option<Trigger>) -> Result<Option<Trigger>, Wrong> {
    if word(form, OWN_RULES, &[("false", false), ("true", true)])? == Some(false) {
        return Ok(None);
    }
    let percent = number(form, GARBAGE_PERCENT, 0, 99)?.map(|percent| percent as u8);
    let bytes = number(form, GARBAGE_BYTES, 0, 1 << 50)?;
    if percent.is_none() && bytes.is_none() {
        return Ok(before);
    }
    let before = before.unwrap_or_default();
    let garbage_percent = percent.unwrap_or(before.garbage_percent);
    Ok(Some(Trigger { garbage_percent, garbage_bytes: bytes.unwrap_or(before.garbage_bytes), ..before }))
}

/// As [`apply`], for a bucket that exists: some of its settings are fixed.
pub fn change(form: &Fields, spec: &BucketSpec) -> Result<BucketSpec, Wrong> {
    let changed = apply(form, spec.clone())?;
    let fixed = [
        ("numVBuckets", changed.vbuckets == spec.vbuckets),
        ("replicaNumber", changed.replicas == spec.replicas),
        ("evictionPolicy", changed.eviction == spec.eviction),
    ];
    match fixed.into_iter().find(|(_, is_same)| !is_same) {
        Some((field, _)) => Err((field, "is fixed for the life of a bucket".to_owned())),
        None => Ok(changed),
    }
}

/// The settings of a bucket, under the form's names where they have one.
pub fn describe(spec: &BucketSpec) -> Value {
    json!({
        "name": spec.name,
        "uuid": format!("{:032x}", spec.uuid.0),
        "bucketType": "membase",
        "storageBackend": "couchstore",
        "evictionPolicy": name_of(spec.eviction, EVICTION),
        "conflictResolutionType": "seqno",
        "compressionMode": name_of(spec.rules.compression, COMPRESSION),
        "durabilityMinLevel": name_of(spec.rules.min_durability, LEVEL),
        "maxTTL": spec.rules.max_ttl_s,
        "autoCompactionSettings": spec.compaction.map_or(json!(false), |trigger| json!({
            "databaseFragmentationThreshold": { "percentage": trigger.garbage_percent, "size": trigger.garbage_bytes },
        })),
        "replicaIndex": false,
        "replicaNumber": spec.replicas,
        "numVBuckets": spec.vbuckets,
        "quota": { "ram": spec.quota_bytes, "rawRAM": spec.quota_bytes },
    })
}

type Words<T> = &'static [(&'static str, T)];

const EVICTION: Words<Eviction> = &[("valueOnly", Eviction::Value), ("fullEviction", Eviction::Full)];
const COMPRESSION: Words<Compression> =
    &[("off", Compression::Off), ("passive", Compression::Passive), ("active", Compression::Active)];
const LEVEL: Words<Option<Level>> = &[
    ("none", None),
    (Level::Majority.name(), Some(Level::Majority)),
    (Level::MajorityAndPersistActive.name(), Some(Level::MajorityAndPersistActive)),
    (Level::PersistMajority.name(), Some(Level::PersistMajority)),
];

fn name_of<T: Copy + PartialEq>(value: T, words: Words<T>) -> &'static str {
    words.iter().find(|(_, meant)| *meant == value).map_or("", |(word, _)| word)
}

fn word<T: Copy>(form: &Fields, field: &'static str, words: &[(&str, T)]) -> Result<Option<T>, Wrong> {
    let Some(asked) = form.get(field) else { return Ok(None) };
    match words.iter().find(|(word, _)| word == asked) {
        Some((_, meant)) => Ok(Some(*meant)),
        None => {
            let known: Vec<_> = words.iter().map(|(word, _)| *word).collect();
            Err((field, format!("{asked:?} is not one of {}", known.join(", "))))
        }
    }
}

fn number(form: &Fields, field: &'static str, least: u64, most: u64) -> Result<Option<u64>, Wrong> {
    let Some(asked) = form.get(field) else { return Ok(None) };
    match asked.parse() {
        Ok(n) if (least..=most).contains(&n) => Ok(Some(n)),
        _ => Err((field, format!("{asked:?} is not a whole number from {least} to {most}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn form(fields: &[(&str, &str)]) -> Fields {
        fields.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect()
    }

    #[test]
    fn what_is_asked_for_is_described_and_the_rest_stays() {
        let base = crate::boot::new_bucket("b");
        let asked = form(&[
            ("ramQuotaMB", "100"),
            ("maxTTL", "60"),
            ("durabilityMinLevel", "persistToMajority"),
            ("compressionMode", "active"),
            ("evictionPolicy", "fullEviction"),
            ("flushEnabled", "1"),
            ("threadsNumber", "3"),
        ]);
        let spec = apply(&asked, base.clone()).unwrap();
        let shown = describe(&spec);
        for field in ["maxTTL", "durabilityMinLevel", "compressionMode", "evictionPolicy"] {
            assert_eq!(shown[field].to_string().trim_matches('"'), asked[field], "{field}");
        }
        assert_eq!((spec.quota_bytes, spec.flush_enabled), (100 << 20, true));
        let again = change(&form(&[("maxTTL", "0"), ("evictionPolicy", "fullEviction")]), &spec).unwrap();
        let rules = persist::WriteRules { max_ttl_s: 0, ..spec.rules };
        assert_eq!(again, BucketSpec { rules, ..spec });
    }

    #[test]
    fn a_bucket_may_have_its_own_rules_for_compaction_and_give_them_up() {
        let base = crate::boot::new_bucket("b");
        assert_eq!(describe(&base)["autoCompactionSettings"], false);
        let own = apply(&form(&[(OWN_RULES, "true"), (GARBAGE_PERCENT, "40")]), base.clone()).unwrap();
        let own = change(&form(&[(GARBAGE_BYTES, "1048576")]), &own).unwrap();
        let trigger = own.compaction.unwrap();
        assert_eq!((trigger.garbage_percent, trigger.garbage_bytes), (40, 1 << 20));
        let shown = &describe(&own)["autoCompactionSettings"]["databaseFragmentationThreshold"];
        assert_eq!(shown, &json!({ "percentage": 40, "size": 1 << 20 }));
        assert_eq!(change(&form(&[("maxTTL", "1")]), &own).unwrap().compaction, Some(trigger));
        assert_eq!(change(&form(&[(OWN_RULES, "false")]), &own).unwrap().compaction, None);
    }

    #[test]
    fn what_cannot_be_is_refused_by_its_field() {
        let base = crate::boot::new_bucket("b");
        for (field, value) in [
            ("bucketType", "ephemeral"),
            ("storageBackend", "magma"),
            ("conflictResolutionType", "lww"),
            ("numVBuckets", "1000"),
            ("ramQuotaMB", "1"),
            ("maxTTL", "-1"),
            ("flushEnabled", "maybe"),
            ("durabilityMinLevel", "all"),
            ("compressionMode", "zip"),
            (GARBAGE_PERCENT, "100"),
        ] {
            assert_eq!(apply(&form(&[(field, value)]), base.clone()).unwrap_err().0, field);
        }
        for (field, value) in [("numVBuckets", "64"), ("replicaNumber", "1"), ("evictionPolicy", "fullEviction")] {
            assert_eq!(change(&form(&[(field, value)]), &base).unwrap_err().0, field);
        }
    }
}
