//! What files and directories are called, and which names are theirs.
//!
//! ```text
//!     buckets/<bucket>/bucket.json
//!     buckets/<bucket>/deleted.json             vBuckets that were deleted, if any was
//!     buckets/<bucket>/<vb>.couch.<rev>         the vBucket's file; the highest whole revision counts
//!     buckets/<bucket>/<vb>.couch.boot          a first commit under way
//!     buckets/<bucket>/<vb>.couch.<rev>.compact a compaction under way
//!     buckets/<bucket>/<vb>.couch.<rev>.sorting and what it sorts
//!     buckets/<bucket>/<…>.aside                kept for a person to look at
//!     log/, log~gone/                           the commit log; one whose content is filed and that is being removed
//!     buckets/<bucket>~new, <bucket>~gone       a bucket being made or removed: `~` is in no bucket's name
//! ```

use types::VbId;

use crate::error::StoreError;

pub const BUCKETS_DIR: &str = "buckets";
pub const SPEC_FILE: &str = "bucket.json";
pub const DELETED_FILE: &str = "deleted.json";
pub const LOG_DIR: &str = "log";
pub const LOG_GONE_DIR: &str = "log~gone";
pub const LOG_ASIDE_DIR: &str = "log.aside";
pub const CLEAN_FILE: &str = "clean";
pub const NEW_SUFFIX: &str = "~new";
pub const GONE_SUFFIX: &str = "~gone";
pub const TEMP_SUFFIX: &str = ".tmp";
pub const ASIDE_SUFFIX: &str = ".aside";

const BUCKET_NAME_LEN_MAX: usize = 100;

/// Bucket names are directory names, so only what is safe as one passes.
pub fn check_bucket_name(name: &str) -> Result<(), StoreError> {
    let plain = |c: u8| c.is_ascii_alphanumeric() || matches!(c, b'.' | b'_' | b'%' | b'-');
    let fits = (1..=BUCKET_NAME_LEN_MAX).contains(&name.len());
    if fits && name.bytes().all(plain) && !matches!(name, "." | "..") {
        Ok(())
    } else {
        Err(StoreError::BadName(name.to_owned()))
    }
}

pub fn vb_file(vb: VbId, rev: u64) -> String {
    format!("{vb}.couch.{rev}")
}

pub fn boot_file(vb: VbId) -> String {
    format!("{vb}.couch.boot")
}

/// `rev` is the one that is compacted.
pub fn compact_file(vb: VbId, rev: u64) -> String {
    format!("{vb}.couch.{rev}.compact")
}

pub fn spill_file(vb: VbId, rev: u64) -> String {
    format!("{vb}.couch.{rev}.sorting")
}

/// What an entry of a bucket's directory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entry {
    /// A fixed name of what is known of the bucket as a whole.
    Fixed,
    VbFile {
        vb: VbId,
        rev: u64,
    },
    /// Unfinished work of an earlier run, of no use to anyone.
    Leftover,
    /// Kept for a person.
    Aside,
    Foreign,
}

/// `vbuckets` is the bucket's count: files of others are foreign.
pub fn classify(name: &str, vbuckets: u16) -> Entry {
    if matches!(name, SPEC_FILE | DELETED_FILE) {
        return Entry::Fixed;
    }
    if name.ends_with(ASIDE_SUFFIX) {
        return Entry::Aside;
    }
    if name.ends_with(TEMP_SUFFIX) {
        return Entry::Leftover;
    }
    let Some((vb, rest)) = name.split_once(".couch.") else { return Entry::Foreign };
    let Some(vb) = number::<u16>(vb).filter(|vb| *vb < vbuckets) else { return Entry::Foreign };
    let compacted = rest.strip_suffix(".compact").or(rest.strip_suffix(".sorting"));
    if rest == "boot" || compacted.is_some_and(|rev| number::<u64>(rev).is_some()) {
        return Entry::Leftover;
    }
    match number::<u64>(rest) {
        Some(rev) => Entry::VbFile { vb: VbId(vb), rev },
        None => Entry::Foreign,
    }
}

/// A decimal in its only spelling: "7", not "07" or "+7".
fn number<T: std::str::FromStr + ToString>(text: &str) -> Option<T> {
    text.parse::<T>().ok().filter(|n| n.to_string() == text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_safe_as_directories_pass() {
        for good in ["default", "a", "travel-sample", "A.b_c%20", "...", &"x".repeat(100)] {
            assert!(check_bucket_name(good).is_ok(), "{good}");
        }
        for bad in ["", ".", "..", "a/b", "a\\b", "a b", "ü", "a~new", "a\0", &"x".repeat(101)] {
            assert!(check_bucket_name(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn entries_are_told_apart() {
        let file = |vb, rev| Entry::VbFile { vb: VbId(vb), rev };
        for (name, entry) in [
            ("bucket.json", Entry::Fixed),
            ("deleted.json", Entry::Fixed),
            ("bucket.json.tmp", Entry::Leftover),
            ("0.couch.1", file(0, 1)),
            ("1023.couch.18446744073709551615", file(1023, u64::MAX)),
            ("1024.couch.1", Entry::Foreign),
            ("7.couch.boot", Entry::Leftover),
            ("7.couch.3.compact", Entry::Leftover),
            ("7.couch.3.sorting", Entry::Leftover),
            ("7.couch.3.aside", Entry::Aside),
            ("07.couch.3", Entry::Foreign),
            ("7.couch.+3", Entry::Foreign),
            ("master.couch.1", Entry::Foreign),
            ("notes.txt", Entry::Foreign),
        ] {
            assert_eq!(classify(name, 1024), entry, "{name}");
        }
    }
}
