use std::time::Duration;

/// Time, both kinds. Deadlines and intervals use [`Clock::monotonic`]; only what a user sees or stores
/// (CAS, expiry, timestamps) uses the wall clock, which may jump.
pub trait Clock: Send + Sync {
    /// Nanoseconds since the Unix epoch.
    fn unix_ns(&self) -> u64;
    /// Time since some fixed moment before this process did anything; never goes back.
    fn monotonic(&self) -> Duration;
    /// Seconds since the Unix epoch.
    fn unix_s(&self) -> u32 {
        (self.unix_ns() / 1_000_000_000) as u32
    }
}
