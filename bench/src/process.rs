//! Servers as processes: the processor time they use, and those started here.

use std::collections::HashMap;
use std::fs;
use std::net::SocketAddr;
use std::time::Duration;

/// Clock ticks a second in what `/proc` tells; part of the kernel's interface.
const TICKS_PER_S: u64 = 100;

/// What a server has used so far, or several together.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    pub cpu: Duration,
    /// Of that, what each of several servers used; empty if there is one.
    pub cpu_by_server: Vec<Duration>,
    /// Bytes it caused to be written to disks; `None`: not ours to see.
    pub written_bytes: Option<u64>,
    /// Flushes of the disk's cache, by anybody on this machine; `None`: the disk does not tell.
    pub flushes: Option<u64>,
    /// Times they made their logs durable, by their own count; `None`: they do not tell.
    pub syncs: Option<u64>,
}

impl Usage {
    pub fn since(&self, before: &Usage) -> Usage {
        let less = |now: Option<u64>, then: Option<u64>| now.zip(then).map(|(now, then)| now.saturating_sub(then));
        Usage {
            cpu: self.cpu.saturating_sub(before.cpu),
            cpu_by_server: self
                .cpu_by_server
                .iter()
                .zip(&before.cpu_by_server)
                .map(|(now, then)| now.saturating_sub(*then))
                .collect(),
            written_bytes: less(self.written_bytes, before.written_bytes),
            flushes: less(self.flushes, before.flushes),
            syncs: less(self.syncs, before.syncs),
        }
    }
}

/// What a process and all its descendants have used. `None`: it is gone, or not ours to see.
pub fn usage_of_family(pid: u32) -> Option<Usage> {
    let mut children: HashMap<u32, Vec<u32>> = HashMap::new();
    let mut ticks: HashMap<u32, u64> = HashMap::new();
    for entry in fs::read_dir("/proc").ok()?.flatten() {
        let Some(id) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        let Some(stat) = fs::read_to_string(entry.path().join("stat")).ok().as_deref().and_then(parse_stat) else {
            continue;
        };
        children.entry(stat.parent).or_default().push(id);
        ticks.insert(id, stat.ticks);
    }
    ticks.get(&pid)?;
    let mut family = vec![pid];
    let (mut sum, mut written_bytes) = (0, None);
    while let Some(member) = family.pop() {
        sum += ticks.get(&member).copied().unwrap_or(0);
        let io = fs::read_to_string(format!("/proc/{member}/io")).ok();
        if let Some(bytes) = io.as_deref().and_then(parse_written) {
            written_bytes = Some(written_bytes.unwrap_or(0) + bytes);
        }
        family.extend(children.remove(&member).unwrap_or_default());
    }
    Some(Usage { cpu: Duration::from_millis(sum * 1000 / TICKS_PER_S), written_bytes, ..Usage::default() })
}

/// What several have used together. `None`: there are none, or one of them is gone.
pub fn usage_of_families(pids: &[u32]) -> Option<Usage> {
    let families = pids.iter().map(|pid| usage_of_family(*pid)).collect::<Option<Vec<Usage>>>()?;
    if families.len() < 2 {
        return families.into_iter().next();
    }
    Some(Usage {
        cpu: families.iter().map(|family| family.cpu).sum(),
        written_bytes: families.iter().map(|family| family.written_bytes).sum(),
        cpu_by_server: families.iter().map(|family| family.cpu).collect(),
        ..Usage::default()
    })
}

/// How often the threads that a process has now gave up the processor, or lost it. `None`: it is gone, or not ours to see.
pub fn context_switches_of(pid: u32) -> Option<u64> {
    let mut sum = 0;
    for thread in fs::read_dir(format!("/proc/{pid}/task")).ok()?.flatten() {
        // One that has ended since the list was made is none of the process's any more.
        let Ok(status) = fs::read_to_string(thread.path().join("status")) else { continue };
        let counts = status.lines().filter_map(|line| line.split_once("voluntary_ctxt_switches:"));
        sum += counts.filter_map(|(_, count)| count.trim().parse::<u64>().ok()).sum::<u64>();
    }
    Some(sum)
}

/// Memory of a process that is in RAM. `None`: it is gone, or not ours to see.
pub fn resident_bytes_of(pid: u32) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    Some(line.trim().strip_suffix(" kB")?.parse::<u64>().ok()? * 1024)
}

fn parse_written(io: &str) -> Option<u64> {
    io.lines().find_map(|line| line.strip_prefix("write_bytes: ")?.parse().ok())
}

struct Stat {
    parent: u32,
    /// Its own, and of those of its children that ended and were waited for.
    ticks: u64,
}

/// The name, in parentheses, may hold anything; the fields after it are numbers.
fn parse_stat(text: &str) -> Option<Stat> {
    let fields: Vec<&str> = text.get(text.rfind(')')? + 1..)?.split_ascii_whitespace().collect();
    let number = |n: usize| fields.get(n)?.parse::<u64>().ok();
    Some(Stat { parent: number(1)? as u32, ticks: number(11)? + number(12)? + number(13)? + number(14)? })
}

/// The process that listens on a loopback address of this machine, if we may see it.
pub fn listening_on(address: SocketAddr) -> Option<u32> {
    if !address.ip().is_loopback() {
        return None;
    }
    let sockets: Vec<String> = ["/proc/net/tcp", "/proc/net/tcp6"]
        .iter()
        .filter_map(|path| fs::read_to_string(path).ok())
        .flat_map(|text| text.lines().filter_map(|line| listener_of(line, address.port())).collect::<Vec<_>>())
        .collect();
    let owns = |pid: &u32| {
        fs::read_dir(format!("/proc/{pid}/fd")).is_ok_and(|fds| {
            fds.flatten()
                .any(|fd| fs::read_link(fd.path()).is_ok_and(|link| sockets.iter().any(|s| link.as_os_str() == &**s)))
        })
    };
    let pids = fs::read_dir("/proc").ok()?.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    // A server's children may share its socket; the oldest holds the family.
    pids.filter(owns).min()
}

/// The link that `/proc/PID/fd` shows for the socket of this line of `/proc/net/tcp`, if it listens on `port`.
fn listener_of(line: &str, port: u16) -> Option<String> {
    const LISTEN: &str = "0A";
    let fields: Vec<&str> = line.split_ascii_whitespace().collect();
    let local_port = u16::from_str_radix(fields.get(1)?.rsplit_once(':')?.1, 16).ok()?;
    (local_port == port && *fields.get(3)? == LISTEN).then(|| fields.get(9).map(|inode| format!("socket:[{inode}]")))?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_spaces_and_parentheses_does_not_shift_the_fields() {
        let stat = parse_stat("7 (a (b) c) S 3 7 7 0 -1 4194560 1 2 3 4 100 20 3 1 20 0 1 0 5 6 7\n").unwrap();
        assert_eq!((stat.parent, stat.ticks), (3, 124));
        assert!(parse_stat("7 (x").is_none());
    }

    #[test]
    fn written_bytes_are_not_taken_for_cancelled_ones() {
        assert_eq!(parse_written("wchar: 1\nwrite_bytes: 4096\ncancelled_write_bytes: 7\n"), Some(4096));
    }

    #[test]
    fn our_own_listener_and_processor_time_are_found() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        assert_eq!(listening_on(listener.local_addr().unwrap()), Some(std::process::id()));
        assert!(usage_of_family(std::process::id()).is_some_and(|usage| usage.written_bytes.is_some()));
        assert!(usage_of_family(u32::MAX).is_none());
        let own = std::process::id();
        let both = usage_of_families(&[own, own]).unwrap();
        assert_eq!((both.cpu, both.cpu_by_server.len()), (both.cpu_by_server.iter().sum(), 2));
        assert!(usage_of_families(&[]).is_none() && usage_of_families(&[own, u32::MAX]).is_none());
        assert!(resident_bytes_of(std::process::id()) > Some(1 << 20) && resident_bytes_of(u32::MAX).is_none());
    }
}
