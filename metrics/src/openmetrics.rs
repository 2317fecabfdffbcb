//! The registry as OpenMetrics text, for `/metrics`.

use std::fmt::Write;
use std::time::Duration;

use crate::{Family, Kind, Snapshot, Value};

/// What an HTTP reply with this text declares itself to be.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Histogram edges are powers of four, 1 µs to 67 s: each falls on an edge of [`Snapshot`]'s buckets, so the counts are
/// exact, and a series stays at 15 lines.
const EDGES_US: [u64; 14] = {
    let mut edges = [0; 14];
    let mut i = 0;
    while i < edges.len() {
        edges[i] = 1 << (2 * i);
        i += 1;
    }
    edges
};

/// Appends every family, each name prefixed with `settee_`, and the end mark. Timings are in seconds.
pub fn write_openmetrics(out: &mut String, families: &[Family]) {
    for family in families {
        let (name, kind) = match family.kind() {
            Kind::Counter => (format!("settee_{}", family.name()), "counter"),
            Kind::Gauge => (format!("settee_{}", family.name()), "gauge"),
            Kind::Timings => (format!("settee_{}_seconds", family.name()), "histogram"),
        };
        line(out, format_args!("# TYPE {name} {kind}"));
        if kind == "histogram" {
            line(out, format_args!("# UNIT {name} seconds"));
        }
        line(out, format_args!("# HELP {name} {}", escaped(family.help())));
        family.walk(&mut |labels, value| {
            let labels: Vec<String> =
                labels.iter().map(|(label, value)| format!("{label}=\"{}\"", escaped(value))).collect();
            match value {
                Value::Counter(n) => line(out, format_args!("{name}_total{} {n}", braced(&labels, None))),
                Value::Gauge(n) => line(out, format_args!("{name}{} {n}", braced(&labels, None))),
                Value::Timings(snapshot) => write_histogram(out, &name, &labels, &snapshot),
            }
        });
    }
    out.push_str("# EOF\n");
}

fn write_histogram(out: &mut String, name: &str, labels: &[String], snapshot: &Snapshot) {
    for us in EDGES_US {
        let (edge, below) = (us as f64 / 1e6, snapshot.count_below(Duration::from_micros(us)));
        line(out, format_args!("{name}_bucket{} {below}", braced(labels, Some(&format!("le=\"{edge:?}\"")))));
    }
    let count = snapshot.count();
    line(out, format_args!("{name}_bucket{} {count}", braced(labels, Some("le=\"+Inf\""))));
    line(out, format_args!("{name}_count{} {count}", braced(labels, None)));
    line(out, format_args!("{name}_sum{} {}", braced(labels, None), snapshot.sum().as_secs_f64()));
}

fn line(out: &mut String, text: std::fmt::Arguments<'_>) {
    writeln!(out, "{text}").expect("a string takes any text");
}

fn braced(labels: &[String], extra: Option<&str>) -> String {
    let all: Vec<&str> = labels.iter().map(String::as_str).chain(extra).collect();
    if all.is_empty() { String::new() } else { format!("{{{}}}", all.join(",")) }
}

fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Counter, Gauge, Labelled, Timings};

    crate::metrics! {
        /// Opened.
        static OPENS: Counter = "opens";
        /// Open now.
        static OPEN: Gauge = "open";
        /// By task.
        static RUNS: Labelled<Timings> = "task_run" ["task"];
    }

    #[test]
    fn the_page_is_what_a_scraper_expects() {
        OPENS.add(2);
        OPEN.set(-1);
        let runs = RUNS.with(&["a \"quoted\"\nname"]);
        [3, 20, 500_000].iter().for_each(|us| runs.record(Duration::from_micros(*us)));
        let mut page = String::new();
        write_openmetrics(&mut page, METRICS);

        let expected_head = "# TYPE settee_opens counter\n# HELP settee_opens Opened.\nsettee_opens_total 2\n\
             # TYPE settee_open gauge\n# HELP settee_open Open now.\nsettee_open -1\n\
             # TYPE settee_task_run_seconds histogram\n# UNIT settee_task_run_seconds seconds\n";
        assert!(page.starts_with(expected_head), "{page}");
        let task = r#"task="a \"quoted\"\nname""#;
        for expected in [
            format!("settee_task_run_seconds_bucket{{{task},le=\"1e-6\"}} 0\n"),
            format!("settee_task_run_seconds_bucket{{{task},le=\"4e-6\"}} 1\n"),
            format!("settee_task_run_seconds_bucket{{{task},le=\"6.4e-5\"}} 2\n"),
            format!("settee_task_run_seconds_bucket{{{task},le=\"1.048576\"}} 3\n"),
            format!("settee_task_run_seconds_bucket{{{task},le=\"+Inf\"}} 3\n"),
            format!("settee_task_run_seconds_count{{{task}}} 3\n"),
            format!("settee_task_run_seconds_sum{{{task}}} 0.500023\n"),
        ] {
            assert!(page.contains(&expected), "{expected}not in\n{page}");
        }
        assert!(page.ends_with("# EOF\n"));
    }
}
