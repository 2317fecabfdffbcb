//! [`Storage`] over the simulated disk: paths, handles, faults, and the test's levers.

use std::io;
use std::path::{Component, Path};
use std::sync::Arc;

use parking_lot::Mutex;

use super::dice::{Dice, mix};
use super::disk::{Disk, Fate, NodeId, ROOT, Slot};
use super::fault::{Fault, FaultPlan, Op};
use crate::{File, OpenMode, Storage};

/// Larger files are refused (EFBIG): memory holds them.
const FILE_BYTES_MAX: u64 = 1 << 30;

/// A simulated disk, as one boot of a program sees it. Clones are the same boot. Paths are taken from the
/// root, absolute or not. Levers work through any clone of any boot; I/O only through the newest boot's.
#[derive(Clone)]
pub struct SimStorage {
    machine: Arc<Mutex<Machine>>,
    boot: u64,
}

struct Machine {
    disk: Disk,
    boot: u64,
    power: bool,
    open_files: u64,
    plan: FaultPlan,
    dice: Dice,
    counts: [u64; Op::ALL.len()],
    mutations: u64,
    last_mutation: Option<String>,
    trace: Option<Vec<String>>,
    meanwhile: Option<Meanwhile>,
}

/// What happens while a call is under way: which kind of call, a part of its path, and what to do.
type Meanwhile = (Op, String, Box<dyn FnOnce() + Send>);

/// Whether an error means that the simulated machine is off or has restarted since the handle was made.
pub fn is_power_off(error: &io::Error) -> bool {
    error.get_ref().is_some_and(|inner| inner.is::<PowerOff>())
}

#[derive(Debug)]
struct PowerOff;

impl std::fmt::Display for PowerOff {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("the simulated machine is off, or has restarted since this handle was made")
    }
}

impl std::error::Error for PowerOff {}

fn errno(code: i32) -> io::Error {
    io::Error::from_raw_os_error(code)
}

impl SimStorage {
    /// An empty disk. `seed` rules noise and the fate of failed syncs; a power cut brings its own.
    pub fn new(seed: u64) -> SimStorage {
        let machine = Machine {
            disk: Disk::new(),
            boot: 0,
            power: true,
            open_files: 0,
            plan: FaultPlan::new(),
            dice: Dice::new(seed),
            counts: [0; Op::ALL.len()],
            mutations: 0,
            last_mutation: None,
            trace: None,
            meanwhile: None,
        };
        SimStorage { machine: Arc::new(Mutex::new(machine)), boot: 0 }
    }

    /// Replaces the fault plan and sets all counts of I/Os to zero.
    pub fn arm(&self, plan: FaultPlan) {
        let mut machine = self.machine.lock();
        machine.plan = plan;
        machine.counts = [0; Op::ALL.len()];
        machine.mutations = 0;
        machine.last_mutation = None;
    }

    /// The next call of kind `op` whose path contains `part` has `act` happen before it does anything: on its own thread, but
    /// as if on another. Time passes, that is, and others get on, while this call is under way.
    pub fn meanwhile(&self, op: Op, part: &str, act: impl FnOnce() + Send + 'static) {
        self.machine.lock().meanwhile = Some((op, part.to_owned(), Box::new(act)));
    }

    /// Changes the space limit of the armed plan and nothing else; `None` lifts it.
    pub fn set_space_bytes_max(&self, bytes: Option<u64>) {
        self.machine.lock().plan.space_bytes_max = bytes;
    }

    /// Changes the limit of open files of the armed plan and nothing else; `None` lifts it.
    pub fn set_open_files_max(&self, n: Option<u64>) {
        self.machine.lock().plan.open_files_max = n;
    }

    /// Cuts the power and brings it back: what was synced stays, the rest meets `fate` (a number is a seed),
    /// faults are gone, counts are zero. The result is the new boot's; every older handle fails from now on.
    pub fn power_cut(&self, fate: impl Into<Fate>) -> SimStorage {
        self.machine.lock().disk.power_cut(fate.into());
        self.reboot()
    }

    /// Kills the program but not the machine, as `kill -9` does: what was written stays readable, and
    /// un-synced. Otherwise as [`SimStorage::power_cut`].
    pub fn kill(&self) -> SimStorage {
        self.machine.lock().disk.close_all();
        self.reboot()
    }

    /// A disk like this one, un-synced changes and all, without its faults and open files. What happens to one
    /// does not touch the other, so one run can meet many fates.
    pub fn fork(&self) -> SimStorage {
        let machine = self.machine.lock();
        let mut disk = machine.disk.clone();
        disk.close_all();
        let copy = Machine {
            disk,
            boot: 0,
            power: true,
            open_files: 0,
            plan: FaultPlan::new(),
            dice: machine.dice.clone(),
            counts: [0; Op::ALL.len()],
            mutations: 0,
            last_mutation: None,
            trace: None,
            meanwhile: None,
        };
        SimStorage { machine: Arc::new(Mutex::new(copy)), boot: 0 }
    }

    /// I/Os begun since the plan was armed, failed ones included, that could change what a cut leaves.
    pub fn mutations(&self) -> u64 {
        self.machine.lock().mutations
    }

    /// I/Os of one kind begun since the plan was armed, failed ones included.
    pub fn count(&self, op: Op) -> u64 {
        self.machine.lock().counts[op as usize]
    }

    /// Handles of this boot that are not dropped yet.
    pub fn open_files(&self) -> u64 {
        self.machine.lock().open_files
    }

    /// The sum of all files' sizes, unlinked open ones included.
    pub fn used_bytes(&self) -> u64 {
        self.machine.lock().disk.used_bytes()
    }

    /// Whether a power cut could lose anything.
    pub fn has_unsynced(&self) -> bool {
        self.machine.lock().disk.has_unsynced()
    }

    /// The newest mutating I/O that had power, for messages.
    pub fn last_mutation(&self) -> Option<String> {
        self.machine.lock().last_mutation.clone()
    }

    /// Begins to write down mutating I/Os, one line each.
    pub fn start_trace(&self) {
        self.machine.lock().trace = Some(Vec::new());
    }

    /// The lines since [`SimStorage::start_trace`] or the last take.
    pub fn take_trace(&self) -> Vec<String> {
        self.machine.lock().trace.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Flips the bits of `xor` in one durable byte, on the device and in memory. Counts as no I/O.
    /// A byte that is not there, or not durable yet, is `InvalidInput`.
    pub fn corrupt(&self, path: impl AsRef<Path>, at: u64, xor: u8) -> io::Result<()> {
        let mut machine = self.machine.lock();
        let id = machine.find_file(path.as_ref())?;
        if machine.disk.corrupt(id, at, xor) { Ok(()) } else { Err(errno(libc::EINVAL)) }
    }

    /// Drops pages no sync would write from memory: after a failed sync, reads see what the device kept.
    pub fn drop_clean_pages(&self) {
        self.machine.lock().disk.drop_clean_pages();
    }

    /// A file's bytes as a reader sees them. No fault applies, and it counts as no I/O.
    pub fn read_file(&self, path: impl AsRef<Path>) -> io::Result<Vec<u8>> {
        let machine = self.machine.lock();
        let id = machine.find_file(path.as_ref())?;
        Ok(machine.disk.bytes(id).to_vec())
    }

    /// Makes `path` a file with these bytes, creating its directories; all of the disk is durable after it.
    /// No fault applies, and it counts as no I/O.
    pub fn write_file(&self, path: impl AsRef<Path>, bytes: &[u8]) -> io::Result<()> {
        let path = path.as_ref();
        let mut machine = self.machine.lock();
        if let Some(parent) = path.parent() {
            machine.create_dir_all(parent)?;
        }
        let slot = machine.slot(path)?;
        if machine.find(path).is_some_and(|id| machine.disk.entries(id).is_some()) {
            return Err(errno(libc::EISDIR));
        }
        machine.disk.place_file(slot, bytes);
        Ok(())
    }

    /// Every file's path from the root, sorted, with its bytes; directories end in `/` and have none.
    /// No fault applies, and it counts as no I/O.
    pub fn list_all(&self) -> Vec<(String, Vec<u8>)> {
        let machine = self.machine.lock();
        let mut found = Vec::new();
        let mut ahead = vec![(String::new(), ROOT)];
        while let Some((prefix, dir)) = ahead.pop() {
            for (name, id) in machine.disk.entries(dir).into_iter().flatten() {
                let path = format!("{prefix}/{name}");
                if machine.disk.entries(*id).is_some() {
                    found.push((format!("{path}/"), Vec::new()));
                    ahead.push((path, *id));
                } else {
                    found.push((path, machine.disk.bytes(*id).to_vec()));
                }
            }
        }
        found.sort();
        found
    }

    fn reboot(&self) -> SimStorage {
        let mut machine = self.machine.lock();
        machine.boot += 1;
        machine.power = true;
        machine.open_files = 0;
        machine.plan = FaultPlan::new();
        machine.meanwhile = None;
        machine.counts = [0; Op::ALL.len()];
        machine.mutations = 0;
        machine.last_mutation = None;
        SimStorage { machine: self.machine.clone(), boot: machine.boot }
    }

    /// Counts a call and finds its fault. Errno faults of calls that are not syncs are returned as errors.
    fn begin<R>(
        &self,
        op: Op,
        paths: &[&Path],
        act: impl FnOnce(&mut Machine, Option<Fault>) -> io::Result<R>,
    ) -> io::Result<R> {
        let mut machine = self.machine.lock();
        let is_meant = |(of, part, _): &mut Meanwhile| {
            *of == op && paths.iter().any(|path| path.to_string_lossy().contains(part.as_str()))
        };
        if let Some((.., act)) = machine.meanwhile.take_if(is_meant) {
            drop(machine);
            act();
            machine = self.machine.lock();
        }
        if machine.boot != self.boot || !machine.power {
            return Err(io::Error::other(PowerOff));
        }
        if op.mutates() {
            if machine.plan.cut_before.is_some_and(|n| machine.mutations >= n) {
                machine.power = false;
                return Err(io::Error::other(PowerOff));
            }
            machine.mutations += 1;
            let line = describe(op, paths);
            if let Some(trace) = &mut machine.trace {
                trace.push(line.clone());
            }
            machine.last_mutation = Some(line);
        }
        machine.counts[op as usize] += 1;
        let Machine { plan, dice, .. } = &mut *machine;
        match plan.next(op, paths, dice) {
            Some(Fault::Errno(code)) if !matches!(op, Op::Sync | Op::SyncDir) => Err(errno(code)),
            fault => act(&mut machine, fault),
        }
    }
}

fn describe(op: Op, paths: &[&Path]) -> String {
    let paths: Vec<_> = paths.iter().map(|path| path.to_string_lossy()).collect();
    format!("{op:?} {}", paths.join(" -> "))
}

/// The names of a path from the root, or `None` if it climbs out.
fn names(path: &Path) -> Option<Vec<&str>> {
    let mut names = Vec::new();
    for component in path.components() {
        match component {
            Component::Normal(name) => names.push(name.to_str()?),
            Component::ParentDir => drop(names.pop()?),
            Component::RootDir | Component::CurDir | Component::Prefix(_) => {}
        }
    }
    Some(names)
}

impl Machine {
    fn find(&self, path: &Path) -> Option<NodeId> {
        names(path)?.into_iter().try_fold(ROOT, |dir, name| self.disk.entries(dir)?.get(name).copied())
    }

    fn find_file(&self, path: &Path) -> io::Result<NodeId> {
        let id = self.find(path).ok_or_else(|| errno(libc::ENOENT))?;
        if self.disk.entries(id).is_some() { Err(errno(libc::EISDIR)) } else { Ok(id) }
    }

    fn find_dir(&self, path: &Path) -> io::Result<NodeId> {
        let id = self.find(path).ok_or_else(|| errno(libc::ENOENT))?;
        if self.disk.entries(id).is_none() { Err(errno(libc::ENOTDIR)) } else { Ok(id) }
    }

    /// Where `path` is or would be; its directory exists.
    fn slot(&self, path: &Path) -> io::Result<Slot> {
        let mut names = names(path).ok_or_else(|| errno(libc::EINVAL))?;
        let name = names.pop().ok_or_else(|| errno(libc::EBUSY))?.to_owned();
        let dir = self.find_dir(&names.into_iter().collect::<std::path::PathBuf>())?;
        Ok(Slot { dir, name })
    }

    fn create_dir_all(&mut self, path: &Path) -> io::Result<()> {
        let mut dir = ROOT;
        for name in names(path).ok_or_else(|| errno(libc::EINVAL))? {
            let entries = self.disk.entries(dir).ok_or_else(|| errno(libc::ENOTDIR))?;
            dir = match entries.get(name) {
                Some(id) => *id,
                None => self.disk.create_dir(Slot { dir, name: name.to_owned() }),
            };
        }
        if self.disk.entries(dir).is_none() { Err(errno(libc::EEXIST)) } else { Ok(()) }
    }

    fn take_descriptor(&self) -> io::Result<()> {
        match self.plan.open_files_max {
            Some(max) if self.open_files >= max => Err(errno(libc::EMFILE)),
            _ => Ok(()),
        }
    }

    fn free_bytes(&self) -> u64 {
        self.plan.space_bytes_max.map_or(u64::MAX, |max| max.saturating_sub(self.disk.used_bytes()))
    }

    fn reroll(&mut self) -> Fate {
        Fate::Seeded(mix(self.dice.next()))
    }
}

impl Storage for SimStorage {
    fn open(&self, path: &Path, mode: OpenMode) -> io::Result<Arc<dyn File>> {
        let op = if mode == OpenMode::CreateNew { Op::Create } else { Op::Open };
        let id = self.begin(op, &[path], |machine, _| {
            machine.take_descriptor()?;
            let id = if mode == OpenMode::CreateNew {
                let slot = machine.slot(path)?;
                if machine.find(path).is_some() {
                    return Err(errno(libc::EEXIST));
                }
                if machine.free_bytes() == 0 {
                    return Err(errno(libc::ENOSPC));
                }
                machine.disk.create_file(slot)
            } else {
                machine.find_file(path)?
            };
            machine.disk.opened(id);
            machine.open_files += 1;
            Ok(id)
        })?;
        Ok(Arc::new(SimFile { storage: self.clone(), path: path.into(), id, writable: mode != OpenMode::Read }))
    }

    fn create_dir_all(&self, path: &Path) -> io::Result<()> {
        self.begin(Op::CreateDir, &[path], |machine, _| machine.create_dir_all(path))
    }

    fn list(&self, path: &Path) -> io::Result<Vec<String>> {
        self.begin(Op::List, &[path], |machine, _| {
            machine.take_descriptor()?;
            let dir = machine.find_dir(path)?;
            Ok(machine.disk.entries(dir).into_iter().flatten().map(|(name, _)| name.clone()).collect())
        })
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.begin(Op::Rename, &[from, to], |machine, _| {
            let (from_slot, to_slot) = (machine.slot(from)?, machine.slot(to)?);
            let node = machine.find(from).ok_or_else(|| errno(libc::ENOENT))?;
            if from_slot == to_slot {
                return Ok(());
            }
            let is_dir = machine.disk.entries(node).is_some();
            if is_dir && names(to).unwrap_or_default().starts_with(&names(from).unwrap_or_default()) {
                return Err(errno(libc::EINVAL));
            }
            if let Some(target) = machine.find(to) {
                match machine.disk.entries(target) {
                    Some(_) if !is_dir => return Err(errno(libc::EISDIR)),
                    Some(entries) if !entries.is_empty() => return Err(errno(libc::ENOTEMPTY)),
                    None if is_dir => return Err(errno(libc::ENOTDIR)),
                    _ => {}
                }
            }
            machine.disk.rename(from_slot, to_slot);
            Ok(())
        })
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        self.begin(Op::RemoveFile, &[path], |machine, _| {
            machine.find_file(path)?;
            let slot = machine.slot(path)?;
            machine.disk.remove(slot);
            Ok(())
        })
    }

    fn remove_dir(&self, path: &Path) -> io::Result<()> {
        self.begin(Op::RemoveDir, &[path], |machine, _| {
            let dir = machine.find_dir(path)?;
            let slot = machine.slot(path)?;
            if machine.disk.entries(dir).is_some_and(|entries| !entries.is_empty()) {
                return Err(errno(libc::ENOTEMPTY));
            }
            machine.disk.remove(slot);
            Ok(())
        })
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        self.begin(Op::SyncDir, &[path], |machine, fault| {
            machine.take_descriptor()?;
            let dir = machine.find_dir(path)?;
            match fault {
                Some(Fault::Errno(code)) => {
                    let fate = machine.reroll();
                    machine.disk.fail_sync_dir(dir, fate);
                    return Err(errno(code));
                }
                Some(Fault::Lie) => machine.disk.fail_sync_dir(dir, Fate::LoseUnsynced),
                _ => machine.disk.sync_dir(dir),
            }
            Ok(())
        })
    }

    fn exists(&self, path: &Path) -> io::Result<bool> {
        self.begin(Op::Exists, &[path], |machine, _| Ok(machine.find(path).is_some()))
    }

    fn free_bytes(&self, _: &Path) -> io::Result<Option<u64>> {
        Ok(Some(self.machine.lock().free_bytes()))
    }
}

/// An open file of one boot.
struct SimFile {
    storage: SimStorage,
    path: Box<Path>,
    id: NodeId,
    writable: bool,
}

impl SimFile {
    fn begin<R>(&self, op: Op, act: impl FnOnce(&mut Machine, Option<Fault>) -> io::Result<R>) -> io::Result<R> {
        self.storage.begin(op, &[&self.path], |machine, fault| {
            if matches!(op, Op::Write | Op::SetSize) && !self.writable {
                return Err(errno(libc::EBADF));
            }
            act(machine, fault)
        })
    }
}

impl File for SimFile {
    fn read_at(&self, buf: &mut [u8], at: u64) -> io::Result<usize> {
        self.begin(Op::Read, |machine, fault| {
            let bytes = machine.disk.bytes(self.id);
            let start = bytes.len().min(at.try_into().unwrap_or(usize::MAX));
            let mut len = buf.len().min(bytes.len() - start);
            if fault == Some(Fault::Short) && len > 1 {
                len = 1 + machine.dice.below(len as u64 - 1) as usize;
            }
            buf[..len].copy_from_slice(&machine.disk.bytes(self.id)[start..start + len]);
            Ok(len)
        })
    }

    fn write_at(&self, bytes: &[u8], at: u64) -> io::Result<usize> {
        self.begin(Op::Write, |machine, fault| {
            let mut len = bytes.len() as u64;
            match fault {
                Some(Fault::Zero) => return Ok(0),
                Some(Fault::Short) if len > 1 => len = 1 + machine.dice.below(len - 1),
                _ => {}
            }
            if at.saturating_add(len) > FILE_BYTES_MAX {
                return Err(errno(libc::EFBIG));
            }
            let room = (machine.disk.bytes(self.id).len() as u64).saturating_add(machine.free_bytes());
            if len > 0 && at >= room {
                return Err(errno(libc::ENOSPC));
            }
            len = len.min(room - at.min(room));
            machine.disk.write(self.id, &bytes[..len as usize], at);
            Ok(len as usize)
        })
    }

    fn size(&self) -> io::Result<u64> {
        self.begin(Op::Size, |machine, _| Ok(machine.disk.bytes(self.id).len() as u64))
    }

    fn set_size(&self, size: u64) -> io::Result<()> {
        self.begin(Op::SetSize, |machine, _| {
            if size > FILE_BYTES_MAX {
                return Err(errno(libc::EFBIG));
            }
            let grows = size.saturating_sub(machine.disk.bytes(self.id).len() as u64);
            if grows > machine.free_bytes() {
                return Err(errno(libc::ENOSPC));
            }
            machine.disk.set_size(self.id, size);
            Ok(())
        })
    }

    fn sync(&self) -> io::Result<()> {
        self.begin(Op::Sync, |machine, fault| {
            match fault {
                Some(Fault::Errno(code)) => {
                    let fate = machine.reroll();
                    machine.disk.fail_sync(self.id, fate);
                    return Err(errno(code));
                }
                Some(Fault::Lie) => machine.disk.fail_sync(self.id, Fate::LoseUnsynced),
                _ => machine.disk.sync(self.id),
            }
            Ok(())
        })
    }

    /// Nothing happens: what was not synced may be on the disk or not, as ever.
    fn write_back(&self, _at: u64, _len: u64) -> io::Result<()> {
        self.begin(Op::WriteBack, |_, _| Ok(()))
    }
}

impl Drop for SimFile {
    fn drop(&mut self) {
        let mut machine = self.storage.machine.lock();
        if machine.boot == self.storage.boot {
            machine.open_files -= 1;
            machine.disk.closed(self.id);
        }
    }
}
