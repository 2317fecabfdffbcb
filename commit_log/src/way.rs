//! How what is written becomes durable: the ways there are, and which is the fastest on this disk.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use env::{Durable, Env, File, write_all_at};

use crate::format::{BLOCK_BYTES, DATA_AT};
use crate::segment::{Segment, Trouble};

/// How a write becomes durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Way {
    /// Works everywhere.
    WriteAndSync,
    /// The kernel syncs with the write; what RWF_DSYNC does to a single one.
    Dsync,
    /// The same past the page cache.
    Direct,
}

impl Way {
    /// The later, the less the kernel does besides writing.
    pub const ALL: [Way; 3] = [Way::WriteAndSync, Way::Dsync, Way::Direct];

    pub fn name(self) -> &'static str {
        match self {
            Way::WriteAndSync => "write and fdatasync",
            Way::Dsync => "O_DSYNC",
            Way::Direct => "O_DIRECT and O_DSYNC",
        }
    }

    pub(crate) fn durable(self) -> Option<Durable> {
        match self {
            Way::WriteAndSync => None,
            Way::Dsync => Some(Durable::Synced),
            Way::Direct => Some(Durable::Direct),
        }
    }
}

/// Medians of one block made durable, by way, in the order of [`Way::ALL`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Medians(pub Vec<(Way, Duration)>);

/// What is nearly as fast as another way is as good, as far as a few blocks can tell.
const GAIN_PERCENT_MIN: u32 = 10;

impl Medians {
    /// Of several that are about as fast, the one that does least besides: past the page cache nothing is copied, or kept that
    /// nobody will read, and large writes gain more by it than the blocks that were compared.
    pub fn fastest(&self) -> Way {
        let mut from_least = self.0.iter().rev();
        let Some(&(mut best, mut least)) = from_least.next() else { return Way::WriteAndSync };
        for &(way, median) in from_least {
            if median * 100 <= least * (100 - GAIN_PERCENT_MIN) {
                (best, least) = (way, median);
            }
        }
        best
    }
}

impl fmt::Display for Medians {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (n, (way, median)) in self.0.iter().enumerate() {
            write!(f, "{}{} {} µs", if n == 0 { "" } else { ", " }, way.name(), median.as_micros())?;
        }
        Ok(())
    }
}

/// The ways take turns, so that the disk's moods meet all alike, for about as long as a start may take anyway.
const TURNS_MIN: usize = 15;
const TURNS_MAX: usize = 40;
const TIME_MAX: Duration = Duration::from_millis(20);

/// Writes blocks of zeros to a segment that has no record yet. Without any way but the portable one it writes nothing.
pub(crate) fn compare(env: &Env, segment: &Segment) -> Result<Medians, Trouble> {
    let open = |way: Way| match way.durable() {
        None => Some((way, Arc::clone(&segment.file))),
        Some(how) => Some((way, env.storage.open_durable(&segment.path, how).ok().flatten()?)),
    };
    let files: Vec<(Way, Arc<dyn File>)> = Way::ALL.into_iter().filter_map(open).collect();
    if files.len() == 1 {
        return Ok(Medians::default());
    }
    let memory = vec![0; 2 * BLOCK_BYTES as usize];
    let start = memory.as_ptr().align_offset(BLOCK_BYTES as usize).min(BLOCK_BYTES as usize);
    let block = &memory[start..start + BLOCK_BYTES as usize];
    let blocks = (segment.header.segment_bytes - DATA_AT) / BLOCK_BYTES;
    let mut places = (0..blocks).cycle().map(|n| DATA_AT + n * BLOCK_BYTES);
    let mut took: Vec<Vec<Duration>> = vec![Vec::new(); files.len()];
    let began = env.clock.monotonic();
    for turn in 0..TURNS_MAX {
        for n in 0..files.len() {
            let which = (turn + n) % files.len();
            let (way, file) = &files[which];
            let before = env.clock.monotonic();
            write(&**file, *way, block, places.next().expect("there is a block"), segment)?;
            took[which].push(env.clock.monotonic().saturating_sub(before));
        }
        if turn + 1 >= TURNS_MIN && env.clock.monotonic().saturating_sub(began) >= TIME_MAX {
            break;
        }
    }
    let median = |took: &mut Vec<Duration>| {
        took.sort_unstable();
        took[took.len() / 2]
    };
    Ok(Medians(files.iter().zip(&mut took).map(|((way, _), took)| (*way, median(took))).collect()))
}

fn write(file: &dyn File, way: Way, block: &[u8], at: u64, segment: &Segment) -> Result<(), Trouble> {
    let failed = |e| Trouble::Poison(format!("sync of {} failed: {e}", segment.path.display()).into());
    match way {
        Way::WriteAndSync => {
            write_all_at(file, block, at).map_err(Trouble::no_room("write", &segment.path))?;
            file.sync().map_err(failed)
        }
        Way::Dsync | Way::Direct => match write_all_at(file, block, at) {
            // Not taken at all: told as such again when it is written this way, and then done otherwise.
            Err(e) if e.kind() == std::io::ErrorKind::InvalidInput => Ok(()),
            written => written.map_err(failed),
        },
    }
}
