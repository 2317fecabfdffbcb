//! Segment files: made once by writing zeros all through, then used again and again under new headers.
//!
//! A file that is only allocated is slower to sync than one that grows: each first write to a block makes the file system
//! note that the block is in use. So the zeros are really written, once in the life of the file.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use env::{Env, File, OpenMode, write_all_at};

use crate::error::{LogError, is_no_space};
use crate::format::{BLOCK_BYTES, SEGMENT_HEADER_BYTES, SegmentHeader, Slot};
use crate::way::Way;

/// How zeros are written.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Pace {
    /// Nobody else writes yet.
    Hurry,
    /// In steps, each synced, so that the log's own syncs do not wait behind them for long.
    Beside,
}

impl Pace {
    fn step_bytes(self) -> u64 {
        match self {
            Pace::Hurry => 8 << 20,
            Pace::Beside => 256 << 10,
        }
    }
}

/// A segment file in its present life.
///
/// 1. Its header is durable. The slot not in use holds the header of the life before, if there was one: so a header torn
///    by a power cut leaves the file what it was.
pub(crate) struct Segment {
    pub file: Arc<dyn File>,
    /// The same file, durable when written, if it is written that way; see [`env::Storage::open_durable`].
    pub durable: Option<Arc<dyn File>>,
    /// How it is to be written.
    pub way: Way,
    pub path: PathBuf,
    pub header: SegmentHeader,
    pub slot: u8,
    /// At least what the header says; more, or less before the next life, if the configuration changed.
    pub file_bytes: u64,
}

/// A segment that is not written to: no descriptor is open for it.
pub(crate) struct Resting {
    pub path: PathBuf,
    pub header: SegmentHeader,
    pub slot: u8,
    pub file_bytes: u64,
}

impl Resting {
    /// Starts another life of the file. Its old records are none from here on.
    pub fn begin(&self, env: &Env, way: Way, header: SegmentHeader) -> Result<Segment, Trouble> {
        let mut segment = self.open(env).map_err(Trouble::no_room("open", &self.path))?;
        segment.begin(env, way, header)?;
        Ok(segment)
    }

    /// Opens the file in the life it is in.
    pub fn open(&self, env: &Env) -> io::Result<Segment> {
        let Resting { path, header, slot, file_bytes } = self;
        let file = env.storage.open(path, OpenMode::ReadWrite)?;
        let (durable, way) = (None, Way::WriteAndSync);
        Ok(Segment { file, durable, way, path: path.clone(), header: *header, slot: *slot, file_bytes: *file_bytes })
    }

    /// All bytes of the segment.
    pub fn read(&self, env: &Env, into: &mut Vec<u8>) -> Result<(), LogError> {
        let file = env.storage.open(&self.path, OpenMode::Read).map_err(LogError::io("open", &self.path))?;
        into.clear();
        into.resize(self.header.segment_bytes as usize, 0);
        env::read_exact_at(&*file, into, 0).map_err(LogError::io("read", &self.path))
    }
}

/// Why a file could not be made ready.
#[derive(Debug)]
pub(crate) enum Trouble {
    /// It may work later.
    NoRoom(Arc<str>),
    /// The same for want of disk space.
    DiskFull(Arc<str>),
    /// A sync failed, or a write: what the disk holds is not known.
    Poison(Arc<str>),
}

impl Trouble {
    pub fn no_room(op: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Trouble {
        move |e| {
            let why = format!("{op} {}: {e}", path.display()).into();
            if is_no_space(&e) { Trouble::DiskFull(why) } else { Trouble::NoRoom(why) }
        }
    }

    fn sync(path: &Path) -> impl FnOnce(io::Error) -> Trouble {
        move |e| Trouble::Poison(format!("sync of {} failed: {e}", path.display()).into())
    }
}

pub(crate) fn file_name(number: u32) -> String {
    format!("{number:08}.log")
}

/// The number in a segment file's name.
pub(crate) fn file_number(name: &str) -> Option<u32> {
    let digits = name.strip_suffix(".log")?;
    (digits.len() == 8 && digits.bytes().all(|b| b.is_ascii_digit())).then(|| digits.parse().ok())?
}

/// Makes a new file full of zeros, durable under its name, with its first header.
pub(crate) fn create(
    env: &Env,
    way: Way,
    path: PathBuf,
    header: SegmentHeader,
    pace: Pace,
) -> Result<Segment, Trouble> {
    let storage = &*env.storage;
    let file = storage.open(&path, OpenMode::CreateNew).map_err(Trouble::no_room("create", &path))?;
    let made = fill(&*file, &path, 0, header.segment_bytes, pace).and_then(|()| {
        let dir = path.parent().unwrap_or(Path::new("."));
        storage.sync_dir(dir).map_err(Trouble::sync(dir))
    });
    if let Err(trouble) = made {
        // Should it stay: without a header it is nothing, and the next start removes it.
        let _ = storage.remove_file(&path);
        return Err(trouble);
    }
    let file_bytes = header.segment_bytes;
    let mut segment = Segment { file, durable: None, way, path, header, slot: 1, file_bytes };
    segment.begin(env, way, header)?;
    Ok(segment)
}

fn fill(file: &dyn File, path: &Path, mut at: u64, bytes: u64, pace: Pace) -> Result<(), Trouble> {
    let zeros = vec![0; pace.step_bytes().min(bytes) as usize];
    while at < bytes {
        let step = zeros.len().min((bytes - at) as usize);
        write_all_at(file, &zeros[..step], at).map_err(Trouble::no_room("write", path))?;
        file.sync().map_err(Trouble::sync(path))?;
        at += step as u64;
    }
    Ok(())
}

impl Segment {
    fn begin(&mut self, env: &Env, way: Way, header: SegmentHeader) -> Result<(), Trouble> {
        self.grow(header.segment_bytes)?;
        self.write_header(1 - self.slot, header)?;
        self.go_over(env, way);
        Ok(())
    }

    /// From here on it is written this way, if that can be. Otherwise the log is slower, not worse.
    pub fn go_over(&mut self, env: &Env, way: Way) {
        self.way = way;
        self.durable = way.durable().and_then(|how| env.storage.open_durable(&self.path, how).unwrap_or_default());
    }

    /// Closes the file.
    pub fn rest(self) -> Resting {
        Resting { path: self.path, header: self.header, slot: self.slot, file_bytes: self.file_bytes }
    }

    /// For a segment without records: writes its header once more, in case the sync after the first time failed.
    pub fn renew_header(&mut self) -> Result<(), Trouble> {
        self.write_header(self.slot, self.header)
    }

    fn grow(&mut self, bytes: u64) -> Result<(), Trouble> {
        if self.file_bytes < bytes {
            fill(&*self.file, &self.path, self.file_bytes, bytes, Pace::Beside)?;
            self.file_bytes = bytes;
        }
        Ok(())
    }

    fn write_header(&mut self, slot: u8, header: SegmentHeader) -> Result<(), Trouble> {
        let at = u64::from(slot) * BLOCK_BYTES;
        write_all_at(&*self.file, &header.encode(), at).map_err(Trouble::no_room("write", &self.path))?;
        self.file.sync().map_err(Trouble::sync(&self.path))?;
        (self.header, self.slot) = (header, slot);
        Ok(())
    }

    /// Looks at an existing file's header slots. The one with the higher sequence counts.
    pub fn look(file: &dyn File) -> io::Result<([Slot; 2], u64)> {
        let size = file.size()?;
        let mut slots = [Slot::Blank, Slot::Blank];
        for (slot, at) in slots.iter_mut().zip([0, BLOCK_BYTES]) {
            let mut bytes = [0; SEGMENT_HEADER_BYTES];
            if at + bytes.len() as u64 <= size {
                env::read_exact_at(file, &mut bytes, at)?;
                *slot = SegmentHeader::decode(&bytes);
            }
        }
        Ok((slots, size))
    }
}
