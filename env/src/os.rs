//! The real environment, and what else only the operating system can tell.
//!
//! The one module that may be unsafe: a few system calls have no wrapper in std.
#![allow(unsafe_code)]

use std::ffi::CString;
use std::fs;
use std::io::{self, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::{Clock, Durable, Env, File, OpenMode, Rng, Storage};

/// Files, clock and randomness of the operating system.
pub fn env() -> Env {
    Env { storage: Arc::new(OsStorage), clock: Arc::new(OsClock { start: Instant::now() }), rng: Arc::new(OsRng) }
}

/// Raises the soft limit of open files to the hard one. Returns (soft, hard) as they are now.
pub fn raise_fd_limit() -> io::Result<(u64, u64)> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is a whole rlimit of ours, written for the length of the call only.
    check(unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) })?;
    if limit.rlim_cur < limit.rlim_max {
        limit.rlim_cur = limit.rlim_max;
        // SAFETY: `limit` is a whole, initialized rlimit of ours, read for the length of the call only.
        check(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) })?;
    }
    Ok((limit.rlim_cur, limit.rlim_max))
}

/// A directory that is ours alone while this value lives; the kernel lets go when the process dies.
#[derive(Debug)]
pub struct DirLock {
    _file: fs::File,
}

/// Locks the existing directory `path` for this process, through `settee.lock` in it, which holds our process
/// id. If another holds it, the error is `ResourceBusy` and names it.
pub fn lock_dir(path: &Path) -> io::Result<DirLock> {
    let path = path.join("settee.lock");
    let named = |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
    let opened = fs::OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path);
    let mut file = opened.map_err(named)?;
    match file.try_lock() {
        Ok(()) => {}
        Err(fs::TryLockError::Error(error)) => return Err(named(error)),
        Err(fs::TryLockError::WouldBlock) => {
            let mut pid = String::new();
            // The name only helps whoever reads the message; without it the lock is held all the same.
            let _ = file.take(32).read_to_string(&mut pid);
            let holder =
                if pid.trim().is_empty() { "another process".into() } else { format!("process {}", pid.trim()) };
            let advice = "stop it, or choose another data directory";
            let message = format!("{}: {holder} is using this directory; {advice}", path.display());
            return Err(io::Error::new(io::ErrorKind::ResourceBusy, message));
        }
    }
    file.set_len(0).and_then(|()| writeln!(file, "{}", std::process::id())).map_err(named)?;
    Ok(DirLock { _file: file })
}

/// Memory of this process that is in RAM now, in bytes.
pub fn resident_bytes() -> io::Result<u64> {
    Ok(memory()?.resident)
}

/// The same, and what of it is known. What is not the program is the heap, stacks, and the program's own
/// variables.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProcessMemory {
    pub resident: u64,
    /// Pages of files, the program itself above all.
    pub program: u64,
}

/// Asks the system.
pub fn memory() -> io::Result<ProcessMemory> {
    let statm = fs::read_to_string("/proc/self/statm")?;
    let mut pages = statm.split_ascii_whitespace().skip(1).map_while(|field| field.parse::<u64>().ok());
    let (Some(all), Some(of_files)) = (pages.next(), pages.next()) else {
        return Err(io::Error::other(format!("/proc/self/statm: no resident pages in {statm:?}")));
    };
    // SAFETY: sysconf takes a number and touches no memory of ours.
    let page_bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    let page_bytes = u64::try_from(page_bytes).map_err(io::Error::other)?;
    Ok(ProcessMemory { resident: all * page_bytes, program: of_files * page_bytes })
}

/// Processor time this process has used on all its threads, in user code and in the kernel.
pub fn cpu_time() -> io::Result<Duration> {
    let mut usage = MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: `usage` is room for a whole rusage of ours, written for the length of the call only.
    check(unsafe { libc::getrusage(libc::RUSAGE_SELF, usage.as_mut_ptr()) })?;
    // SAFETY: an rusage is integers only, so the zeros it began with were already a valid value.
    let usage = unsafe { usage.assume_init() };
    let duration =
        |time: libc::timeval| Duration::from_secs(time.tv_sec as u64) + Duration::from_micros(time.tv_usec as u64);
    Ok(duration(usage.ru_utime) + duration(usage.ru_stime))
}

/// The calling thread runs on this core only, counted from 0.
pub fn stay_on_core(core: usize) -> io::Result<()> {
    // SAFETY: a set of cores is plain bits, all zeros are a value of it, and the macro stays within it.
    let cores = unsafe {
        let mut cores: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(core.min(libc::CPU_SETSIZE as usize - 1), &mut cores);
        cores
    };
    // SAFETY: the set lives during the call, which is told its size; 0 is the calling thread.
    check(unsafe { libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &cores) })
}

/// From here on the calling thread runs where others leave room: whoever wakes takes the processor from it at once, instead of
/// waiting for the end of its slice, and of a processor that others want all the time it gets a tenth. For good: a thread
/// cannot take it back.
#[cfg(target_os = "linux")]
pub fn give_way() -> io::Result<()> {
    /// A tenth of what others weigh: so it never stands still with something that others wait for.
    const NICE: i32 = 10;
    /// The slice it asks for. Since Linux 6.12 who asks for less, as everybody else does, need not wait for its end.
    const SLICE_NS: u64 = 20_000_000;
    let attributes = libc::sched_attr {
        size: size_of::<libc::sched_attr>() as u32,
        sched_policy: libc::SCHED_OTHER as u32,
        sched_flags: 0,
        sched_nice: NICE,
        sched_priority: 0,
        sched_runtime: SLICE_NS,
        sched_deadline: 0,
        sched_period: 0,
    };
    // SAFETY: `attributes` is a whole sched_attr of ours that says its size, read for the length of the call only. Thread 0 is
    // the calling one.
    let rc = unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0) };
    check(rc as libc::c_int)
}

/// Elsewhere a priority is the whole process's.
#[cfg(not(target_os = "linux"))]
pub fn give_way() -> io::Result<()> {
    Ok(())
}

/// Waits until `source` has something to read or has ended. False: by then nobody reads any more what is written to `sink`,
/// which only a pipe, a socket and a terminal can tell.
pub fn wait_readable(source: BorrowedFd<'_>, sink: BorrowedFd<'_>) -> io::Result<bool> {
    let watch = |of: BorrowedFd<'_>, events| libc::pollfd { fd: of.as_raw_fd(), events, revents: 0 };
    let mut watched = [watch(source, libc::POLLIN), watch(sink, 0)];
    loop {
        // SAFETY: the two pollfds are ours, whole, and written for the length of the call only; the descriptors in them are
        // borrowed for longer than that.
        let rc = unsafe { libc::poll(watched.as_mut_ptr(), watched.len() as libc::nfds_t, -1) };
        match check(rc.min(0)) {
            Ok(()) => return Ok(watched[1].revents & (libc::POLLERR | libc::POLLHUP) == 0),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

fn check(rc: libc::c_int) -> io::Result<()> {
    if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

struct OsClock {
    start: Instant,
}

impl Clock for OsClock {
    fn unix_ns(&self) -> u64 {
        SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_nanos() as u64)
    }
    fn monotonic(&self) -> Duration {
        self.start.elapsed()
    }
}

struct OsRng;

impl Rng for OsRng {
    fn fill(&self, bytes: &mut [u8]) {
        getrandom::fill(bytes).expect("the operating system has no random numbers");
    }
}

struct OsStorage;
struct OsFile(fs::File);

impl File for OsFile {
    fn read_at(&self, buf: &mut [u8], at: u64) -> io::Result<usize> {
        self.0.read_at(buf, at)
    }
    fn write_at(&self, bytes: &[u8], at: u64) -> io::Result<usize> {
        self.0.write_at(bytes, at)
    }
    fn size(&self) -> io::Result<u64> {
        Ok(self.0.metadata()?.len())
    }
    fn set_size(&self, size: u64) -> io::Result<()> {
        self.0.set_len(size)
    }
    fn sync(&self) -> io::Result<()> {
        self.0.sync_data()
    }
    /// Without what a sync costs beside the bytes: a commit of the file system's journal, for which everybody waits who makes a file
    /// longer, and a flush of the device's cache.
    #[cfg(target_os = "linux")]
    fn write_back(&self, at: u64, len: u64) -> io::Result<()> {
        let (Ok(at), Ok(len)) = (at.try_into(), len.try_into()) else { return Err(io::ErrorKind::InvalidInput.into()) };
        let all = libc::SYNC_FILE_RANGE_WAIT_BEFORE | libc::SYNC_FILE_RANGE_WRITE | libc::SYNC_FILE_RANGE_WAIT_AFTER;
        // SAFETY: numbers only; the descriptor is ours while `self` lives.
        check(unsafe { libc::sync_file_range(self.0.as_raw_fd(), at, len, all) })
    }
    #[cfg(not(target_os = "linux"))]
    fn write_back(&self, _at: u64, _len: u64) -> io::Result<()> {
        self.sync()
    }
}

impl Storage for OsStorage {
    fn open(&self, path: &Path, mode: OpenMode) -> io::Result<Arc<dyn File>> {
        let mut options = fs::OpenOptions::new();
        match mode {
            OpenMode::Read => options.read(true),
            OpenMode::ReadWrite => options.read(true).write(true),
            // What clients store, and what they prove themselves with, is the owner's business.
            OpenMode::CreateNew => options.read(true).write(true).create_new(true).mode(0o600),
        };
        Ok(Arc::new(OsFile(options.open(path)?)))
    }
    #[cfg(target_os = "linux")]
    fn open_durable(&self, path: &Path, how: Durable) -> io::Result<Option<Arc<dyn File>>> {
        let flags = match how {
            Durable::Synced => libc::O_DSYNC,
            Durable::Direct => libc::O_DIRECT | libc::O_DSYNC,
        };
        let mut options = fs::OpenOptions::new();
        match options.write(true).custom_flags(flags).open(path) {
            Ok(file) => Ok(Some(Arc::new(OsFile(file)))),
            // The file system does not do it.
            Err(e) if matches!(e.raw_os_error(), Some(libc::EINVAL | libc::EOPNOTSUPP)) => Ok(None),
            Err(e) => Err(e),
        }
    }
    fn create_dir_all(&self, path: &Path) -> io::Result<()> {
        fs::create_dir_all(path)
    }
    fn list(&self, path: &Path) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in fs::read_dir(path)? {
            names.push(entry?.file_name().to_string_lossy().into_owned());
        }
        names.sort();
        Ok(names)
    }
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }
    fn remove_file(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }
    fn remove_dir(&self, path: &Path) -> io::Result<()> {
        fs::remove_dir(path)
    }
    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        fs::File::open(path)?.sync_all()
    }
    fn exists(&self, path: &Path) -> io::Result<bool> {
        path.try_exists()
    }
    fn free_bytes(&self, path: &Path) -> io::Result<Option<u64>> {
        let path = CString::new(path.as_os_str().as_bytes())?;
        let mut found = MaybeUninit::<libc::statvfs>::zeroed();
        // SAFETY: `path` ends with a zero and `found` is room for a whole statvfs; both are ours for the length of the call.
        check(unsafe { libc::statvfs(path.as_ptr(), found.as_mut_ptr()) })?;
        // SAFETY: a statvfs is integers only, so the zeros it began with were already a valid value.
        let found = unsafe { found.assume_init() };
        Ok(Some(found.f_bavail.saturating_mul(found.f_frsize)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{create_dir_durable, read_exact_at, write_all_at};

    #[test]
    fn a_directory_has_one_owner_at_a_time_and_the_refusal_names_it() {
        let dir = tempfile::tempdir().unwrap();
        let lock = lock_dir(dir.path()).unwrap();
        let refusal = lock_dir(dir.path()).unwrap_err();
        assert_eq!(refusal.kind(), io::ErrorKind::ResourceBusy);
        assert!(refusal.to_string().contains(&format!("process {} ", std::process::id())), "{refusal}");
        drop(lock);
        lock_dir(dir.path()).unwrap();
        let missing = lock_dir(&dir.path().join("no")).unwrap_err();
        assert!(missing.kind() == io::ErrorKind::NotFound && missing.to_string().contains("settee.lock"));
    }

    #[test]
    fn the_soft_limit_of_open_files_becomes_the_hard_one() {
        let (soft, hard) = raise_fd_limit().unwrap();
        assert!(soft == hard && soft > 0);
        assert_eq!(raise_fd_limit().unwrap(), (soft, hard));
    }

    #[test]
    fn memory_and_processor_time_are_seen_to_be_used() {
        let (memory, time) = (resident_bytes().unwrap(), cpu_time().unwrap());
        let used = std::hint::black_box(vec![1_u8; 64 << 20]);
        while cpu_time().unwrap() == time {
            std::hint::black_box(used.iter().map(|byte| u64::from(*byte)).sum::<u64>());
        }
        assert!(resident_bytes().unwrap() > memory + (32 << 20));
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_thread_that_gives_way_is_the_only_one_that_does() {
        // The nineteenth field, counted from behind the name, which may hold anything.
        let nice = || {
            let stat = fs::read_to_string("/proc/thread-self/stat").unwrap();
            stat.rsplit_once(") ").unwrap().1.split(' ').nth(16).unwrap().parse::<i32>().unwrap()
        };
        let before = nice();
        let there = std::thread::spawn(move || {
            give_way().unwrap();
            nice()
        });
        assert_eq!((there.join().unwrap(), nice()), (10, before));
    }

    /// The simulated storage has the same test, so the two agree on what a caller may expect.
    #[test]
    fn files_and_directories_behave_as_the_trait_says() {
        let dir = tempfile::tempdir().unwrap();
        crate::storage::tests::behaves(&*env().storage, dir.path());
        create_dir_durable(&*env().storage, &dir.path().join("x/y")).unwrap();
        let file = env().storage.open(&dir.path().join("x/y/f"), OpenMode::CreateNew).unwrap();
        write_all_at(&*file, b"bytes", 3).unwrap();
        let mut found = [9; 8];
        read_exact_at(&*file, &mut found, 0).unwrap();
        assert_eq!(&found, b"\0\0\0bytes");
    }
}
