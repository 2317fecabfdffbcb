//! On what the numbers were measured: without it they mean nothing.

use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::tally::Latencies;

/// Bytes the probe writes at a time: a small record of a log.
const PROBE_BYTES: usize = 512;

/// Cores, memory, kernel, and the file system `dir` is on.
pub fn describe(dir: &Path) -> Value {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let mem_kb = read("/proc/meminfo")
        .lines()
        .find_map(|line| line.strip_prefix("MemTotal:")?.split_ascii_whitespace().next()?.parse::<u64>().ok());
    let cpu = read("/proc/cpuinfo")
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(':').map(|(_, name)| name.trim().to_owned()));
    json!({
        "cores": std::thread::available_parallelism().map_or(1, usize::from),
        "cpu": cpu.unwrap_or_default(),
        "mem_mb": mem_kb.unwrap_or(0) / 1024,
        "kernel": read("/proc/sys/kernel/osrelease").trim(),
        "dir": dir.display().to_string(),
        "fs": file_system(dir).unwrap_or_default(),
    })
}

/// The device that holds `dir`, as the kernel prints it: `major:minor`.
fn device(dir: &Path) -> Option<String> {
    let device = fs::metadata(dir).ok()?.dev();
    let (major, minor) =
        (((device >> 8) & 0xfff) | ((device >> 32) & !0xfff), (device & 0xff) | ((device >> 12) & !0xff));
    Some(format!("{major}:{minor}"))
}

/// How often the cache of the disk under `dir` was flushed since the machine started, by anybody.
pub fn flushes(dir: &Path) -> Option<u64> {
    let stat = fs::read_to_string(format!("/sys/dev/block/{}/stat", device(dir)?)).ok()?;
    stat.split_ascii_whitespace().nth(15)?.parse().ok()
}

/// The type of the file system that holds `dir`.
pub fn file_system(dir: &Path) -> Option<String> {
    let device = device(dir)?;
    fs::read_to_string("/proc/self/mountinfo").ok()?.lines().find_map(|line| {
        let (left, right) = line.split_once(" - ")?;
        (left.split(' ').nth(2)? == device).then(|| right.split(' ').next().unwrap_or_default().to_owned())
    })
}

/// Whether what is written in `dir` is only ever in memory.
pub fn is_memory(dir: &Path) -> bool {
    matches!(file_system(dir).as_deref(), Some("tmpfs" | "ramfs"))
}

/// A fresh directory under `dir`, or, without one, on a disk: where temporary files go unless that is memory, else
/// here.
pub fn scratch(dir: Option<&Path>) -> Result<tempfile::TempDir> {
    let parent: PathBuf = match dir {
        Some(dir) => {
            fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
            dir.to_owned()
        }
        None => [std::env::temp_dir(), "/var/tmp".into()]
            .into_iter()
            .find(|dir| dir.is_dir() && !is_memory(dir))
            .unwrap_or_else(|| ".".into()),
    };
    let made = tempfile::Builder::new().prefix("settee-bench-").tempdir_in(&parent);
    made.with_context(|| format!("cannot make a scratch directory in {}", parent.display()))
}

/// What one durable small write costs here: `count` writes of 512 B, one after the other, each followed by fdatasync,
/// in a file that was filled with zeros before, as a commit log's segments are.
///
/// # Errors
/// The directory cannot be written.
pub fn probe_sync(dir: &Path, count: usize) -> Result<Latencies> {
    let path = dir.join("probe");
    let cannot = || format!("cannot write {}", path.display());
    let file = fs::File::create_new(&path).with_context(cannot)?;
    let zeros = vec![0; 64 * 1024];
    let whole = (count * PROBE_BYTES).next_multiple_of(zeros.len());
    for at in (0..whole).step_by(zeros.len()) {
        file.write_all_at(&zeros, at as u64).with_context(cannot)?;
    }
    file.sync_all().with_context(cannot)?;
    let record = [0x5a; PROBE_BYTES];
    let mut latencies = Latencies::default();
    for n in 0..count {
        let began = Instant::now();
        file.write_all_at(&record, (n * PROBE_BYTES) as u64).with_context(cannot)?;
        file.sync_data().with_context(cannot)?;
        latencies.record(began.elapsed().as_nanos() as u64);
    }
    drop(file);
    fs::remove_file(&path).with_context(cannot)?;
    Ok(latencies)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_machine_is_described_and_its_disk_probed() {
        let dir = scratch(None).unwrap();
        let machine = describe(dir.path());
        assert!(machine["cores"].as_u64().unwrap() > 0 && machine["mem_mb"].as_u64().unwrap() > 0, "{machine}");
        assert!(!machine["fs"].as_str().unwrap().is_empty() && !machine["kernel"].as_str().unwrap().is_empty());
        let probe = probe_sync(dir.path(), 5).unwrap();
        assert_eq!(probe.count(), 5);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
