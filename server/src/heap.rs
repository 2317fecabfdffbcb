//! The allocator of the program, and what it says of itself ([decision 0003](../../docs/decisions/0003-allocator.md)).

use tikv_jemalloc_ctl::{Result, background_thread, epoch, stats};

#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

/// Bytes, as the allocator counts them.
#[derive(Clone, Copy, Debug, Default)]
pub struct Heap {
    /// Given out, rounded up to the sizes it has.
    pub used: u64,
    /// In RAM, and not given out: given back and kept for a while, or never asked for beside what was. Not what it needs
    /// for itself: it counts what it laid claim to, most of which was never touched.
    pub free: u64,
}

/// A thread of the allocator's own gives the system what nobody asked for for a second or two. It sleeps while there is nothing
/// to give. Without it, whoever frees does that, and a server at rest keeps what it has.
pub fn give_back_by_itself() {
    if let Err(error) = background_thread::write(true) {
        tracing::warn!("memory is given back to the system only while there is work: {error}");
    }
}

pub fn read() -> Result<Heap> {
    epoch::advance()?;
    let used = stats::allocated::read()?;
    let free = stats::resident::read()?.saturating_sub(stats::metadata::read()? + used);
    Ok(Heap { used: used as u64, free: free as u64 })
}
