//! A histogram for a terminal.

use std::fmt::Write;
use std::time::Duration;

use crate::Snapshot;

const BAR_WIDTH: u64 = 40;
const LINES_MAX: usize = 24;

/// One summary line, then one line per range of durations: how many per cent were shorter than its end, how many were in
/// it, and a bar. With many ranges, each power of two becomes one line.
pub fn draw(snapshot: &Snapshot) -> String {
    let count = snapshot.count();
    if count == 0 {
        return "no samples\n".to_string();
    }
    let mut out = format!("{count} samples, mean {}", show_duration(snapshot.mean()));
    for (name, percent) in [("p50", 50.0), ("p90", 90.0), ("p99", 99.0), ("p99.9", 99.9), ("p99.99", 99.99)] {
        write!(out, ", {name} {}", show_duration(snapshot.percentile(percent))).expect("a string takes any text");
    }
    writeln!(out, ", max {}", show_duration(snapshot.max())).expect("a string takes any text");

    let rows = rows(snapshot);
    let tallest = rows.iter().map(|row| row.2).max().unwrap_or(1);
    let digits = count.to_string().len();
    let mut below = 0;
    for (from, to, n) in rows {
        below += n;
        let percent = below as f64 * 100.0 / count as f64;
        // Rounded up: what happened once in a million is what one looks for here.
        let bar = "█".repeat((n * BAR_WIDTH).div_ceil(tallest) as usize);
        let (from, to) = (show_duration(from), show_duration(to));
        writeln!(out, "{from:>8} - {to:>8} {percent:>8.3}% {n:>digits$} {bar}").expect("a string takes any text");
    }
    out
}

/// Three or four digits and a unit: `0us`, `17us`, `1.25ms`, `31.0s`, `12m`.
pub fn show_duration(duration: Duration) -> String {
    let ns = duration.as_nanos() as f64;
    let (number, unit) = match duration.as_nanos() {
        0 => return "0us".to_string(),
        1..1_000 => return format!("{ns}ns"),
        1_000..1_000_000 => (ns / 1e3, "us"),
        1_000_000..1_000_000_000 => (ns / 1e6, "ms"),
        1_000_000_000..600_000_000_000 => (ns / 1e9, "s"),
        _ => (ns / 60e9, "m"),
    };
    let decimals = match number {
        ..10.0 => 2,
        ..100.0 => 1,
        _ => 0,
    };
    let text = format!("{number:.decimals$}");
    let text = if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.') } else { &text };
    format!("{text}{unit}")
}

fn rows(snapshot: &Snapshot) -> Vec<(Duration, Duration, u64)> {
    let fine: Vec<_> = snapshot.buckets().collect();
    if fine.len() <= LINES_MAX {
        return fine;
    }
    let mut coarse: Vec<(Duration, Duration, u64)> = Vec::new();
    for (from, _, n) in fine {
        let us = from.as_micros() as u64;
        let power = if us == 0 { 0 } else { 1 << us.ilog2() };
        let (start, end) = (Duration::from_micros(power), Duration::from_micros((power * 2).max(1)));
        match coarse.last_mut() {
            Some(last) if last.0 == start => last.2 += n,
            _ => coarse.push((start, end, n)),
        }
    }
    coarse
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Timings;

    #[test]
    fn a_drawing_shows_every_sample_and_the_rare_one_too() {
        let timings = Timings::new();
        (0..1000).for_each(|_| timings.record(Duration::from_micros(3)));
        timings.record(Duration::from_millis(2));
        let text = draw(&timings.snapshot());
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines.len(), 3, "{text}");
        assert!(lines[0].starts_with("1001 samples, mean 5us, p50 4us, p90 4us"), "{text}");
        assert!(lines[0].ends_with("max 2ms"), "{text}");
        assert_eq!(lines[1], format!("     3us -      4us   99.900% 1000 {}", "█".repeat(40)));
        assert!(lines[2].ends_with("100.000%    1 █"), "{text}");
    }

    #[test]
    fn a_wide_spread_is_drawn_by_powers_of_two() {
        let timings = Timings::new();
        (0..100_000).for_each(|us| timings.record(Duration::from_micros(us)));
        let text = draw(&timings.snapshot());
        assert_eq!(text.lines().count(), 1 + 18, "{text}");
        assert!(text.contains(" 32.8ms -   65.5ms   65.536%  32768 "), "{text}");
    }

    #[test]
    fn no_samples_are_said_to_be_none() {
        assert_eq!(draw(&Snapshot::default()), "no samples\n");
    }

    #[test]
    fn durations_read_well() {
        for (ns, text) in [(0, "0us"), (900, "900ns"), (17_000, "17us"), (1_250_000, "1.25ms"), (31_000_000_000, "31s")]
        {
            assert_eq!(show_duration(Duration::from_nanos(ns)), text);
        }
    }
}
