//! Where the memory of the process is: what each part says it holds, beside what the allocator and the system say.
//!
//! ```text
//!     rss = program + heap_used + heap_free + elsewhere (stacks, variables)
//!                     heap_used = documents + tables + … + heap_other
//! ```
//! Every part counts what it asked the allocator for, with the allocator's own words; nothing is inferred from `rss`. So a
//! part that counts wrongly shows as `heap_other`, and a leak cannot hide.

use engine::{Engine, MemoryParts};

/// The lines of `settee stats memory` that concern the whole process. `sum` is all of them but `rss` and what is only the
/// sum of others.
pub fn emit(engine: &Engine, emit: &mut dyn FnMut(&str, &str)) {
    let process = env::os::memory().unwrap_or_default();
    let heap = crate::heap::read().unwrap_or_default();
    let of_buckets: Vec<MemoryParts> = engine.list().iter().map(|bucket| bucket.memory_parts()).collect();
    let total = |part: fn(&MemoryParts) -> u64| of_buckets.iter().map(part).sum::<u64>();
    let in_heap = [
        ("documents", total(|parts| parts.documents)),
        ("tables", total(|parts| parts.tables)),
        ("key_filters", total(|parts| parts.key_filters)),
        ("changelogs", total(|parts| parts.changelogs)),
        ("fetches", total(|parts| parts.fetches)),
        ("vbuckets", total(|parts| parts.vbuckets)),
        ("connections", frontend::connections_bytes()),
        ("commit_log", engine.store().log_stats().map_or(0, |log| log.waiting_bytes)),
    ];
    let named: u64 = in_heap.iter().map(|(_, bytes)| bytes).sum();
    let heap_other = heap.used.saturating_sub(named);
    let sum = named + heap_other + heap.free + process.program;
    let mut put = |name: &str, bytes: u64| emit(name, &bytes.to_string());
    put("rss", process.resident);
    put("sum", sum);
    put("program", process.program);
    put("heap_used", heap.used);
    put("heap_free", heap.free);
    in_heap.iter().for_each(|(name, bytes)| put(name, *bytes));
    put("heap_other", heap_other);
}
