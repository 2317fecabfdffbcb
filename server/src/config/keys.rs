//! Every configuration key, one row each. The command line, `settee.toml`, `--set`, the error messages and
//! `docs/config.md` all walk this table.

use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::str::FromStr;
use std::time::Duration;

use limits::Wish;
use persist::{Eviction, LogWay};

use Applies::{Live, Restart};

use super::Config;

/// Holds the largest document with its key and its vBucket's record.
const SEGMENT_BYTES_MIN: u64 = 32 << 20;

/// One configuration key.
pub struct Key {
    /// As written in `--set` and, with its dots as tables, in `settee.toml`.
    pub name: &'static str,
    /// What holds when nobody says otherwise, in the syntax of `set`.
    pub default: &'static str,
    pub applies: Applies,
    pub doc: &'static str,
    /// Checks the text and stores the value. The error says what would be accepted.
    pub set: fn(&mut Config, &str) -> Result<(), String>,
}

/// When a change of a key in the configuration file takes effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Applies {
    /// On SIGHUP.
    Live,
    /// At the next start.
    Restart,
}

pub static KEYS: &[Key] = &[
    Key {
        name: "admin.listen",
        default: "127.0.0.1:8091",
        applies: Restart,
        doc: "Address of the admin port (HTTP): SDK bootstrap, health, metrics. Port 0 picks a free one.",
        set: |c, v| address(v).map(|a| c.admin_listen = a),
    },
    Key {
        name: "auth.scram_iterations",
        default: "4096",
        applies: Restart,
        doc: "PBKDF2 rounds for passwords stored from now on. Every connecting client pays them once; raise it for passwords \
              that people choose.",
        set: |c, v| number(v, 4096, 1_000_000).map(|n| c.scram_iterations = n as u32),
    },
    Key {
        name: "bucket.eviction",
        default: "value",
        applies: Restart,
        doc: "What may leave the memory of a bucket made from now on, when it is short and the file has it: value, or full for keys \
              too. With value a miss never reads the disk; with full memory holds what is in use, however many keys there are. Fixed \
              for the life of a bucket.",
        set: |c, v| one_of(v, [("value", Eviction::Value), ("full", Eviction::Full)]).map(|e| c.bucket_eviction = e),
    },
    Key {
        name: "bucket.flush_enabled",
        default: "true",
        applies: Restart,
        doc: "Whether the bucket made at start may be emptied with FLUSH.",
        set: |c, v| boolean(v).map(|b| c.bucket_flush_enabled = b),
    },
    Key {
        name: "bucket.name",
        default: "default",
        applies: Restart,
        doc: "A bucket to create at start if it is missing. Empty: none.",
        set: |c, v| bucket_name(v).map(|n| c.bucket_name = n),
    },
    Key {
        name: "bucket.quota_mb",
        default: "1024",
        applies: Restart,
        doc: "Memory of the bucket made at start, in MiB: keys, metadata and values. Writes are refused with a temporary failure when \
              it is used up.",
        set: |c, v| number(v, 16, 1 << 24).map(|n| c.bucket_quota_bytes = n << 20),
    },
    Key {
        name: "bucket.replicas",
        default: "0",
        applies: Restart,
        doc: "Copies beside the active one, for the bucket made at start. On a single node anything above 0 makes durable writes \
              impossible.",
        set: |c, v| number(v, 0, 2).map(|n| c.bucket_replicas = n as u8),
    },
    Key {
        name: "bucket.vbuckets",
        default: "1024",
        applies: Restart,
        doc: "vBuckets of the bucket made at start: a power of two. Fixed for the life of a bucket.",
        set: |c, v| power_of_two(v, 1, 1024).map(|n| c.bucket_vbuckets = n as u16),
    },
    Key {
        name: "compaction.file_mb_min",
        default: "1",
        applies: Live,
        doc: "Files smaller than so many MiB are compacted only when somebody asks.",
        set: |c, v| number(v, 0, 1 << 20).map(|n| c.compaction.trigger.file_bytes_min = n << 20),
    },
    Key {
        name: "compaction.fragmentation_mb",
        default: "0",
        applies: Live,
        doc: "A vBucket's file with so many MiB of garbage is compacted, whatever its share. 0: never for this reason. A bucket may have \
              its own rules.",
        set: |c, v| number(v, 0, 1 << 20).map(|n| c.compaction.trigger.garbage_bytes = n << 20),
    },
    Key {
        name: "compaction.fragmentation_percent",
        default: "30",
        applies: Live,
        doc: "A vBucket's file of which so much is garbage is compacted. 0: never for this reason. A bucket may have its own rules.",
        set: |c, v| number(v, 0, 99).map(|n| c.compaction.trigger.garbage_percent = n as u8),
    },
    Key {
        name: "compaction.limit",
        default: "4",
        applies: Live,
        doc: "Compactions at a time, and threads of the pool that is kept for them.",
        set: |c, v| number(v, 1, persist::COMPACTIONS_MAX as u64).map(|n| c.compaction.limit = n as usize),
    },
    Key {
        name: "compaction.paced",
        default: "on",
        applies: Live,
        doc: "on: compaction goes slower when clients wait too long for the disk, as disk.latency_budget_ms says. off: it goes at full speed \
              whoever feels it; the filing of the log and the loading after a start still give way.",
        set: |c, v| one_of(v, [("on", true), ("off", false)]).map(|on| c.compaction.is_paced = on),
    },
    Key {
        name: "compaction.purge_age_s",
        default: "259200",
        applies: Live,
        doc: "Compaction leaves out deletions that are older than so many seconds. Who was away for longer must start anew.",
        set: |c, v| number(v, 60, 10 * 365 * 86_400).map(|n| c.compaction.purge_age = Duration::from_secs(n)),
    },
    Key {
        name: "compaction.sync_every",
        default: "1MiB",
        applies: Live,
        doc: "A file in the making is written back to the disk whenever so much was added to it: bytes, or KiB, MiB, GiB such as 256KiB; off: \
              only when it is whole, by its sync. The more at once, the longer everybody else waits for the disk.",
        set: |c, v| size_or_off(v, 4096, 1 << 40).map(|n| c.compaction.sync_every = n),
    },
    Key {
        name: "data_dir",
        default: "./settee-data",
        applies: Restart,
        doc: "Directory that holds everything. One server a directory.",
        set: |c, v| non_empty(v).map(|v| c.data_dir = v.into()),
    },
    Key {
        name: "disk.floor_mb_s",
        default: "4",
        applies: Live,
        doc: "MiB a second that compaction and the filing of the log may always write together, whatever clients feel; more if the files \
              grow faster than that allows, or if the disk runs full.",
        set: |c, v| number(v, 1, 4096).map(|n| c.disk.floor_bytes_per_s = n << 20),
    },
    Key {
        name: "disk.free_mb_low",
        default: "1024",
        applies: Live,
        doc: "With less than so many MiB free, compaction goes faster, whoever feels it.",
        set: |c, v| number(v, 0, 1 << 30).map(|n| c.compaction.free_bytes_low = n << 20),
    },
    Key {
        name: "disk.latency_budget_ms",
        default: "2",
        applies: Live,
        doc: "How long a sync that clients wait for should take, in milliseconds. Compaction, the filing of the log and the loading after a \
              start slow down when it takes longer. While no client waits, they go as fast as the disk. 0: always.",
        set: |c, v| number(v, 0, 60_000).map(|n| c.disk.latency_budget = (n > 0).then_some(Duration::from_millis(n))),
    },
    Key {
        name: "durability.timeout_ms",
        default: "30000",
        applies: Restart,
        doc: "How long a synchronous write may take when the client did not say, in milliseconds.",
        set: |c, v| number(v, 1, 65_534).map(|n| c.durability_timeout_ms = n as u32),
    },
    Key {
        name: "expiry.pager_interval_s",
        default: "600",
        applies: Restart,
        doc: "How often expired documents that nobody asks for are removed, in seconds.",
        set: |c, v| number(v, 1, 86_400).map(|n| c.pager_interval_s = n as u32),
    },
    Key {
        name: "kv.connections_max",
        default: "10000",
        applies: Live,
        doc: "Client connections at a time; further clients wait in the listen backlog, and a few more are let in to see whether an \
              administrator is among them. Reduced to what the limit of open files leaves, unless it is set: then the server refuses to \
              start with less.",
        set: |c, v| number(v, 8, 1_000_000).map(|n| c.connections_max = Wish::Asked(n as u32)),
    },
    Key {
        name: "kv.idle_timeout_s",
        default: "0",
        applies: Live,
        doc: "Clients that send nothing for so many seconds are closed. 0: they may stay.",
        set: |c, v| number(v, 0, 31_536_000).map(|n| c.bounds.idle_timeout = (n > 0).then_some(Duration::from_secs(n))),
    },
    Key {
        name: "kv.keepalive_s",
        default: "60",
        applies: Live,
        doc: "After so many seconds of silence the system asks whether a client's machine is still there; for connections made from then \
              on. 0: never.",
        set: |c, v| number(v, 0, 32_767).map(|n| c.bounds.keepalive = (n > 0).then_some(Duration::from_secs(n))),
    },
    Key {
        name: "kv.listen",
        default: "127.0.0.1:11210",
        applies: Restart,
        doc: "Address of the key-value port. Port 0 picks a free one.",
        set: |c, v| address(v).map(|a| c.kv_listen = a),
    },
    Key {
        name: "kv.login_timeout_s",
        default: "30",
        applies: Live,
        doc: "How long a client may take to log in, in seconds.",
        set: |c, v| number(v, 1, 3600).map(|n| c.bounds.login_timeout = Duration::from_secs(n)),
    },
    Key {
        name: "kv.open_bucket",
        default: "",
        applies: Restart,
        doc: "A bucket that clients which never authenticate may use, for plain memcached clients. Empty: none. Refused unless the \
              key-value port is on loopback, or kv.open_bucket_anywhere is true.",
        set: |c, v| bucket_name(v).map(|n| c.open_bucket = n),
    },
    Key {
        name: "kv.open_bucket_anywhere",
        default: "false",
        applies: Restart,
        doc: "Allow kv.open_bucket on an address that other machines can reach.",
        set: |c, v| boolean(v).map(|b| c.open_bucket_anywhere = b),
    },
    Key {
        name: "kv.stall_timeout_s",
        default: "60",
        applies: Live,
        doc: "How long a client may leave a request half sent, or not take any of the answers that wait for it, in seconds. Then it is \
              closed.",
        set: |c, v| number(v, 1, 3600).map(|n| c.bounds.stall_timeout = Duration::from_secs(n)),
    },
    Key {
        name: "kv.unsent_mb_max",
        default: "256",
        applies: Live,
        doc: "A client with more than so many MiB of answers waiting to be sent is closed. With 4 of them waiting, or with 64 KiB while \
              256 MiB wait for all clients together, no further request of its is read; what was under way by then can come on top.",
        set: |c, v| number(v, 32, 65_536).map(|n| c.bounds.unsent_len_max = (n as usize) << 20),
    },
    Key {
        name: "kv.workers",
        default: "0",
        applies: Restart,
        doc: "Threads that serve connections. 0: one a core.",
        set: |c, v| number(v, 0, 256).map(|n| c.workers = n as usize),
    },
    Key {
        name: "log.file",
        default: "",
        applies: Restart,
        doc: "File that the log is appended to, instead of stderr. On SIGHUP it is opened anew, so it may be renamed before; if that \
              fails, the log goes on in the old one and says so.",
        set: |c, v| {
            c.log_file = (!v.is_empty()).then(|| v.into());
            Ok(())
        },
    },
    Key {
        name: "log.level",
        default: "info",
        applies: Live,
        doc: "What goes to the log: error, warn, info, debug or trace; or a filter such as info,persist=debug.",
        set: |c, v| log_filter(v).map(|v| c.log_level = v),
    },
    Key {
        name: "password_file",
        default: "",
        applies: Restart,
        doc: "File whose first line is the password of the user below. Without it, and without SETTEE_PASSWORD in the environment, a \
              password is generated at the first start.",
        set: |c, v| {
            c.password_file = v.to_owned();
            Ok(())
        },
    },
    Key {
        name: "persist.batch_bytes_max",
        default: "16777216",
        applies: Restart,
        doc: "Most bytes of changes that one commit of a vBucket takes.",
        set: |c, v| number(v, 4096, 1 << 30).map(|n| c.batch_bytes_max = n as usize),
    },
    Key {
        name: "persist.commit_log",
        default: "on",
        applies: Live,
        doc: "on: a durable write is answered once it is in a log that all vBuckets share, and goes to its vBucket's file later. off: once \
              it is in the file, each of which is synced by itself. What a log still holds then is filed first, beside new writes, and the \
              log removed. Threads that write files give way to all others until the next start if this one had a log.",
        set: |c, v| one_of(v, [("on", true), ("off", false)]).map(|on| c.commit_log = on),
    },
    Key {
        name: "persist.file_cache.files_max",
        default: "4096",
        applies: Live,
        doc: "vBucket files kept open for their next use; 0: none. Reduced to what the limit of open files leaves, unless it is set: then the \
              server refuses to start with less. Too low shows as file_cache_reopens growing as fast as flushes.",
        set: |c, v| number(v, 0, 1_000_000).map(|n| c.files_max = Wish::Asked(n as u32)),
    },
    Key {
        name: "persist.filing_age_s_max",
        default: "10",
        applies: Restart,
        doc: "A change that is in the commit log goes to its vBucket's file by the time it is so many seconds old. Longer: larger batches, fewer \
              bytes written, more to file after a crash.",
        set: |c, v| number(v, 1, 3600).map(|n| c.filing_age_s_max = n as u32),
    },
    Key {
        name: "persist.filing_bytes_max",
        default: "268435456",
        applies: Restart,
        doc: "A bucket's oldest changes go to files sooner once those only in the commit log hold so many bytes of memory, or a quarter of \
              its quota.",
        set: |c, v| number(v, 1 << 20, 1 << 40).map(|n| c.filing_bytes_max = n),
    },
    Key {
        name: "persist.format",
        default: "13",
        applies: Restart,
        doc: "couchstore version of files made from now on: 13, which released tools read, or 14.",
        set: |c, v| one_of(v, [("13", 13), ("14", 14)]).map(|n| c.file_format = n),
    },
    Key {
        name: "persist.log_bytes_max",
        default: "1073741824",
        applies: Restart,
        doc: "Most bytes of the commit log's files together, at least three segments. Bounds what a start after a crash has to file first. \
              When all of it is in use, writes are refused with a temporary failure until some is filed.",
        set: |c, v| number(v, 3 * SEGMENT_BYTES_MIN, 1 << 42).map(|n| c.log_bytes_max = n),
    },
    Key {
        name: "persist.log_segment_bytes",
        default: "67108864",
        applies: Restart,
        doc: "Bytes of each file of the commit log, a multiple of 4096. The largest document must fit.",
        set: |c, v| multiple_of_4096(v, SEGMENT_BYTES_MIN, 1 << 30).map(|n| c.log_segment_bytes = n),
    },
    Key {
        name: "persist.log_way",
        default: "auto",
        applies: Restart,
        doc: "How what is written to the commit log becomes durable. fdatasync: written and synced. dsync: with O_DSYNC. direct: past the page cache, \
              with O_DIRECT and O_DSYNC, where the file system allows it. auto: written and synced at first, then whichever is found to be the fastest \
              when the second file is made ready (direct unless another is a tenth faster); the log and `settee stats persist` say what was found.",
        set: |c, v| {
            let ways = [
                ("auto", None),
                ("fdatasync", Some(LogWay::WriteAndSync)),
                ("dsync", Some(LogWay::Dsync)),
                ("direct", Some(LogWay::Direct)),
            ];
            one_of(v, ways).map(|way| c.log_way = way)
        },
    },
    Key {
        name: "persist.readers",
        default: "4",
        applies: Live,
        doc: "Threads that read documents from disk.",
        set: |c, v| number(v, 1, 128).map(|n| c.readers = n as usize),
    },
    Key {
        name: "persist.recovery",
        default: "off",
        applies: Restart,
        doc: "on: at start, go back to the newest intact commit of each damaged vBucket file instead of refusing. Later changes of that \
              vBucket are lost.",
        set: |c, v| one_of(v, [("on", true), ("off", false)]).map(|on| c.recovery = on),
    },
    Key {
        name: "persist.reserve_mb",
        default: "32",
        applies: Restart,
        doc: "Disk space kept back, in MiB, for when there is none left: then it is given up, what was accepted is still written, and writes \
              that need more are refused until there is as much again. 0: none.",
        set: |c, v| number(v, 0, 65_536).map(|n| c.reserve_bytes = n << 20),
    },
    Key {
        name: "persist.writers",
        default: "8",
        applies: Live,
        doc: "Threads that commit vBucket files. Each waits for the disk most of its time.",
        set: |c, v| number(v, 1, 128).map(|n| c.writers = n as usize),
    },
    Key {
        name: "user",
        default: "Administrator",
        applies: Restart,
        doc: "Name of the user that is made at the first start.",
        set: |c, v| user_name(v).map(|v| c.user = v),
    },
    Key {
        name: "warm_up.grace_ms",
        default: "500",
        applies: Restart,
        doc: "How long a start may read what is in the files before it serves them, in milliseconds: damage found by then stops it. 0: none \
              of it. The rest is loaded while clients are served, and what turns out damaged is answered with an error.",
        set: |c, v| number(v, 0, 86_400_000).map(|n| c.warm_up_grace_ms = n as u32),
    },
];

/// The row of a key.
pub fn find(name: &str) -> Option<&'static Key> {
    KEYS.iter().find(|key| key.name == name)
}

/// The key somebody who wrote `name` most likely meant.
pub fn nearest(name: &str) -> Option<&'static str> {
    let (distance, nearest) = KEYS.iter().map(|key| (edit_distance(name, key.name), key.name)).min()?;
    (distance <= name.len().max(4) / 2).then_some(nearest)
}

/// Every key as a Markdown page: docs/config.md.
pub fn markdown() -> String {
    let mut page = String::from(
        "# Configuration\n\nEvery key can be set on the command line with `--set KEY=VALUE`, or in the TOML file that `--config` \
         names, where the dots are tables. The command line wins. An unknown key is an error. On SIGHUP the \
         server reads the file again, with `users.json`: what applies *live* takes effect, the rest waits for the next start, and if \
         anything in the file is wrong all stays as it was. This page is made by `cargo xtask docs`.\n\n| Key | Default | Applies | \
         Meaning |\n|---|---|---|---|\n",
    );
    for Key { name, default, applies, doc, .. } in KEYS {
        let applies = if *applies == Live { "live" } else { "at start" };
        let default = if default.is_empty() { "empty".to_owned() } else { format!("`{default}`") };
        page.push_str(&format!("| `{name}` | {default} | {applies} | {doc} |\n"));
    }
    page
}

/// How many insertions, deletions and replacements turn `a` into `b`.
pub fn edit_distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(x != *y);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

/// Whether a bucket may have this name: 1 to 100 of `A-Z a-z 0-9 . % - _`, not starting with a dot.
pub fn is_bucket_name(name: &str) -> bool {
    let allowed = |b: u8| b.is_ascii_alphanumeric() || b".%-_".contains(&b);
    (1..=100).contains(&name.len()) && name.bytes().all(allowed) && !name.starts_with('.')
}

fn bucket_name(text: &str) -> Result<String, String> {
    if text.is_empty() || is_bucket_name(text) {
        Ok(text.to_owned())
    } else {
        Err("a bucket name: 1 to 100 of A-Z a-z 0-9 . % - _, not starting with a dot".to_owned())
    }
}

fn user_name(text: &str) -> Result<String, String> {
    let fits = (1..=128).contains(&text.len())
        && !text.contains(|c: char| c.is_control() || "()<>@,;:\\\"/[]?={}".contains(c));
    if fits { Ok(text.to_owned()) } else { Err("1 to 128 characters, none of ()<>@,;:\\\"/[]?={}".to_owned()) }
}

fn non_empty(text: &str) -> Result<String, String> {
    if text.is_empty() { Err("something that is not empty".to_owned()) } else { Ok(text.to_owned()) }
}

fn log_filter(text: &str) -> Result<String, String> {
    match tracing_subscriber::EnvFilter::from_str(text) {
        Ok(_) if !text.is_empty() => Ok(text.to_owned()),
        _ => Err("error, warn, info, debug, trace or a filter such as info,persist=debug".to_owned()),
    }
}

fn boolean(text: &str) -> Result<bool, String> {
    text.parse().map_err(|_| "true or false".to_owned())
}

fn one_of<T: Copy, const N: usize>(text: &str, choices: [(&str, T); N]) -> Result<T, String> {
    let found = choices.iter().find(|(name, _)| *name == text);
    found.map(|(_, value)| *value).ok_or_else(|| choices.map(|(name, _)| name).join(" or "))
}

fn number(text: &str, least: u64, most: u64) -> Result<u64, String> {
    let wanted = || format!("a whole number from {least} to {most}");
    let n: u64 = text.parse().map_err(|_| wanted())?;
    if (least..=most).contains(&n) { Ok(n) } else { Err(wanted()) }
}

/// A number of bytes; 0 for "off".
fn size_or_off(text: &str, least: u64, most: u64) -> Result<u64, String> {
    let wanted = || format!("off, or {least} to {most} bytes, such as 65536, 256KiB or 1MiB");
    if text == "off" {
        return Ok(0);
    }
    let units = [("KiB", 10), ("MiB", 20), ("GiB", 30)];
    let found = units.iter().find_map(|(unit, shift)| Some((text.strip_suffix(unit)?, *shift)));
    let (digits, shift) = found.unwrap_or((text, 0));
    let n: u64 = digits.trim_end().parse().map_err(|_| wanted())?;
    match n.checked_mul(1 << shift) {
        Some(bytes) if (least..=most).contains(&bytes) => Ok(bytes),
        _ => Err(wanted()),
    }
}

fn multiple_of_4096(text: &str, least: u64, most: u64) -> Result<u64, String> {
    match number(text, least, most) {
        Ok(n) if n % 4096 == 0 => Ok(n),
        _ => Err(format!("a multiple of 4096 from {least} to {most}")),
    }
}

fn power_of_two(text: &str, least: u64, most: u64) -> Result<u64, String> {
    match number(text, least, most) {
        Ok(n) if n.is_power_of_two() => Ok(n),
        _ => Err(format!("a power of two from {least} to {most}")),
    }
}

fn address(text: &str) -> Result<SocketAddr, String> {
    let wanted = || "an address with a port, such as 127.0.0.1:11210 or [::1]:0".to_owned();
    if let Ok(ip) = text.parse::<IpAddr>() {
        return Err(format!("{} (the port is missing after {ip})", wanted()));
    }
    text.to_socket_addrs().ok().and_then(|mut found| found.next()).ok_or_else(wanted)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_default_is_accepted_by_its_own_key() {
        Config::defaults();
    }

    #[test]
    fn keys_are_sorted_and_unique() {
        assert!(KEYS.is_sorted_by(|a, b| a.name < b.name));
    }

    #[test]
    fn a_slip_of_the_finger_finds_its_key() {
        assert_eq!(nearest("bucket.replica"), Some("bucket.replicas"));
        assert_eq!(nearest("persist.writer"), Some("persist.writers"));
        assert_eq!(nearest("zzzzzzzzzzzzzzzzzzzzzzzz"), None);
    }

    #[test]
    fn a_size_is_a_number_with_or_without_a_unit() {
        for (text, bytes) in [("off", 0), ("4096", 4096), ("64KiB", 65_536), ("1MiB", 1 << 20), ("2 GiB", 2 << 30)] {
            assert_eq!(size_or_off(text, 4096, 1 << 40), Ok(bytes), "{text}");
        }
        assert!(size_or_off("99999999999GiB", 1, u64::MAX).is_err());
    }

    #[test]
    fn values_out_of_range_name_the_range() {
        let mut config = Config::defaults();
        for (key, value, expected) in [
            ("bucket.vbuckets", "1000", "a power of two from 1 to 1024"),
            ("kv.workers", "-1", "a whole number from 0 to 256"),
            ("kv.listen", "127.0.0.1", "the port is missing"),
            ("bucket.name", "a/b", "a bucket name"),
            ("bucket.name", "..", "a bucket name"),
            ("log.level", "=,=", "error, warn"),
            ("compaction.sync_every", "1XiB", "off, or 4096"),
            ("compaction.sync_every", "0", "off, or 4096"),
            ("persist.commit_log", "true", "on or off"),
            ("persist.file_cache.files_max", "-1", "a whole number from 0 to 1000000"),
            ("persist.log_segment_bytes", "33554433", "a multiple of 4096 from 33554432 to 1073741824"),
        ] {
            let error = (find(key).unwrap().set)(&mut config, value).unwrap_err();
            assert!(error.contains(expected), "{key}={value}: {error}");
        }
    }
}
