//! Rows for people and rows for scripts.

use std::io::Write;

use anyhow::Result;
use serde_json::{Map, Value, json};

use crate::load::Outcome;
use crate::tally::{Latencies, show_us, tenths};

/// One line of a table, one element of `rows`. Fields that do not apply are absent.
pub type Row = Map<String, Value>;

/// A row of a load. `ops` are those answered without an error; `cpu_us_per_op` is the server's processor time and
/// `client_cpu_us_per_op` ours; of several servers, `cpu_us_per_op` is the sum. `syncs_per_s` is how often the servers made their
/// logs durable; `disk_flushes_per_s` counts those of the whole machine.
pub fn row(name: &str, clients: u32, outcome: &Outcome) -> Row {
    let tally = &outcome.tally;
    let mut row = Row::new();
    row.insert("name".into(), json!(name));
    row.insert("clients".into(), json!(clients));
    row.insert("ops".into(), json!(tally.ops));
    row.insert("errors".into(), json!(tally.error_count()));
    row.insert("ops_per_s".into(), json!(tenths(outcome.ops_per_s())));
    row.insert("elapsed_s".into(), json!((outcome.elapsed.as_secs_f64() * 1e3).round() / 1e3));
    if tally.ops > 0 {
        let per_op = |cpu: std::time::Duration| json!((cpu.as_secs_f64() * 1e8 / tally.ops as f64).round() / 100.0);
        if let Some(used) = &outcome.server {
            row.insert("cpu_us_per_op".into(), per_op(used.cpu));
            for (n, cpu) in used.cpu_by_server.iter().enumerate() {
                row.insert(format!("cpu_us_per_op_node_{}", n + 1), per_op(*cpu));
            }
            if let Some(bytes) = used.written_bytes {
                row.insert("written_bytes_per_op".into(), json!(tenths(bytes as f64 / tally.ops as f64)));
            }
            for (field, count) in [("disk_flushes_per_s", used.flushes), ("syncs_per_s", used.syncs)] {
                if let Some(count) = count {
                    let per_s = count as f64 / outcome.elapsed.as_secs_f64().max(1e-9);
                    row.insert(field.into(), json!(tenths(per_s)));
                }
            }
        }
        row.insert("client_cpu_us_per_op".into(), per_op(outcome.client_cpu));
    }
    tally.latencies.fields(&mut row);
    if tally.misses > 0 {
        row.insert("misses".into(), json!(tally.misses));
    }
    if !tally.errors.is_empty() {
        row.insert("errors_by_status".into(), json!(tally.errors));
    }
    if tally.sent_late.count() > 0 {
        row.insert("sent_late_p99_us".into(), json!(tally.sent_late.percentile_us(99.0)));
    }
    if tally.unfinished > 0 {
        row.insert("unfinished".into(), json!(tally.unfinished));
        row.insert("unfinished_oldest_us".into(), json!(tenths(tally.unfinished_oldest_ns as f64 / 1e3)));
    }
    if tally.connections_lost > 0 {
        row.insert("connections_lost".into(), json!(tally.connections_lost));
    }
    if tally.turned_away > 0 {
        row.insert("turned_away".into(), json!(tally.turned_away));
    }
    row
}

/// A row that was not measured, and why.
pub fn skipped(name: &str, reason: &str) -> Row {
    Row::from_iter([("name".to_owned(), json!(name)), ("skipped".to_owned(), json!(reason))])
}

/// The contract object.
pub fn object(experiment: &str, machine: Value, fdatasync: &Latencies, rows: Vec<Row>) -> Map<String, Value> {
    let percentile = |percent| fdatasync.percentile_us(percent);
    Map::from_iter([
        ("experiment".to_owned(), json!(experiment)),
        ("machine".to_owned(), machine),
        (
            "fdatasync_us".to_owned(),
            json!({"p50": percentile(50.0), "p99": percentile(99.0), "p999": percentile(99.9)}),
        ),
        ("rows".to_owned(), Value::from(rows.into_iter().map(Value::from).collect::<Vec<_>>())),
    ])
}

/// Prints to stdout; a reader that has gone away is no error.
///
/// # Errors
/// stdout cannot be written for another reason.
pub fn print(text: &str) -> Result<()> {
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(()),
    }
}

/// What a run of `kv` prints for people.
pub fn story(what: &str, row: &Row, outcome: &Outcome) -> String {
    let tally = &outcome.tally;
    let number = |name: &str| row.get(name).and_then(Value::as_f64);
    let mut out =
        format!("{what}\n{:.0} ops/s: {} in {:.2} s", outcome.ops_per_s(), tally.ops, outcome.elapsed.as_secs_f64());
    if let Some(us) = number("client_cpu_us_per_op") {
        out += &format!("; processor time per operation: client {us:.2} us");
    }
    if let Some(us) = number("cpu_us_per_op") {
        out += &format!(", server {us:.2} us");
    }
    for n in 1.. {
        let Some(us) = number(&format!("cpu_us_per_op_node_{n}")) else { break };
        out += &format!("{} {us:.2}", if n == 1 { " =" } else { " +" });
    }
    if let Some(per_s) = number("syncs_per_s") {
        out += &format!("; {per_s:.0} syncs/s");
    }
    out += "\n\n";
    out += &tally.latencies.draw();
    if tally.sent_late.count() > 0 {
        let late = &tally.sent_late;
        let (p50, p99) = (show_us(late.percentile_us(50.0)), show_us(late.percentile_us(99.0)));
        out +=
            &format!("\nsent later than intended by p50 {p50}, p99 {p99}; latencies count from the intended moment\n");
    }
    if tally.misses > 0 {
        out += &format!("\n{} reads found nothing (fill the store first with --preload)\n", tally.misses);
    }
    if tally.unfinished > 0 {
        let oldest = show_us(tally.unfinished_oldest_ns as f64 / 1e3);
        out += &format!("\n{} requests had no answer when the run ended, the oldest for {oldest}\n", tally.unfinished);
    }
    if tally.turned_away > 0 {
        out += &format!("\n{} requests were turned away and sent to another server\n", tally.turned_away);
    }
    for (words, count) in &tally.errors {
        out += &format!("\n{count} errors: {words}");
    }
    if !tally.errors.is_empty() {
        out.push('\n');
    }
    if outcome.interrupted {
        out += "\nThe run was interrupted.\n";
    }
    out
}

/// Columns of a table: head, field of the row, and how a value is shown.
pub struct Column(pub &'static str, pub &'static str, pub fn(&Value) -> String);

/// A whole number.
pub fn whole(value: &Value) -> String {
    value.as_f64().map_or_else(String::new, |n| format!("{n:.0}"))
}

/// With one digit behind the point.
pub fn tenth(value: &Value) -> String {
    value.as_f64().map_or_else(String::new, |n| format!("{n:.1}"))
}

/// With two digits behind the point.
pub fn hundredth(value: &Value) -> String {
    value.as_f64().map_or_else(String::new, |n| format!("{n:.2}"))
}

/// Microseconds, with a unit that fits.
pub fn us(value: &Value) -> String {
    value.as_f64().map_or_else(String::new, show_us)
}

pub const LOAD_COLUMNS: &[Column] = &[
    Column("ops/s", "ops_per_s", whole),
    Column("mean", "mean_us", us),
    Column("p50", "p50_us", us),
    Column("p99", "p99_us", us),
    Column("p99.9", "p999_us", us),
    Column("p99.99", "p9999_us", us),
    Column("max", "max_us", us),
    Column("cpu/op", "cpu_us_per_op", us),
    Column("node 1", "cpu_us_per_op_node_1", us),
    Column("node 2", "cpu_us_per_op_node_2", us),
    Column("node 3", "cpu_us_per_op_node_3", us),
    Column("syncs/s", "syncs_per_s", whole),
    Column("written/op", "written_bytes_per_op", whole),
    Column("flushes/s", "disk_flushes_per_s", whole),
    Column("fdatasync", "fdatasync_mean_us", us),
    Column("times that", "times_fdatasync", tenth),
    Column("turned away", "turned_away", whole),
    Column("errors", "errors", whole),
];

/// Rows as a table, columns aligned; what was skipped, and why, at its foot.
pub fn table(rows: &[Row], columns: &[Column]) -> String {
    let name = |row: &Row| row.get("name").and_then(Value::as_str).unwrap_or_default().to_owned();
    let measured: Vec<&Row> = rows.iter().filter(|row| !row.contains_key("skipped")).collect();
    let used: Vec<&Column> = columns.iter().filter(|c| measured.iter().any(|row| row.contains_key(c.1))).collect();
    let mut lines = vec![std::iter::once(String::new()).chain(used.iter().map(|c| c.0.to_owned())).collect::<Vec<_>>()];
    lines.extend(measured.iter().map(|row| {
        let cells = used.iter().map(|c| row.get(c.1).map_or_else(|| "-".to_owned(), c.2));
        std::iter::once(name(row)).chain(cells).collect()
    }));
    let widths: Vec<usize> =
        (0..=used.len()).map(|n| lines.iter().map(|line| line[n].chars().count()).max().unwrap_or(0)).collect();
    let mut out = String::new();
    for line in lines.iter().filter(|_| !measured.is_empty()) {
        out += &format!("{:<width$}", line[0], width = widths[0]);
        for (cell, width) in line[1..].iter().zip(&widths[1..]) {
            out += &format!("  {cell:>width$}");
        }
        out.push('\n');
    }
    for row in rows {
        if let Some(reason) = row.get("skipped").and_then(Value::as_str) {
            out += &format!("{}: skipped, {reason}\n", name(row));
        }
        if let Some(note) = row.get("note").and_then(Value::as_str) {
            out += &format!("{}: {note}\n", name(row));
        }
    }
    out
}

/// What a reader would work out from the table: a field of one row over that of another.
pub struct Ratio {
    pub field: &'static str,
    pub row: String,
    pub over: String,
}

impl Ratio {
    pub fn new(field: &'static str, row: &str, over: &str) -> Ratio {
        Ratio { field, row: row.to_owned(), over: over.to_owned() }
    }

    /// `None`: one of the rows was not measured.
    pub fn say(&self, rows: &[Row]) -> Option<String> {
        let number = |name: &str| {
            let row = rows.iter().find(|row| row.get("name").and_then(Value::as_str) == Some(name))?;
            row.get(self.field)?.as_f64().filter(|n| *n > 0.0)
        };
        let ratio = number(&self.row)? / number(&self.over)?;
        let ratio = if ratio < 0.1 { format!("1/{:.1}", 1.0 / ratio) } else { format!("{ratio:.2}") };
        Some(format!("{}: {} is {ratio} of {}\n", self.field, self.row, self.over))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_is_aligned_and_says_what_is_missing() {
        let mut row = Row::new();
        row.insert("name".into(), json!("commit-log"));
        row.insert("ops_per_s".into(), json!(1234.6));
        row.insert("mean_us".into(), json!(1500.0));
        let text = table(&[row, skipped("keep-open", "no such setting")], LOAD_COLUMNS);
        assert_eq!(text, "            ops/s   mean\ncommit-log   1235  1.5ms\nkeep-open: skipped, no such setting\n");
    }

    #[test]
    fn a_ratio_needs_both_rows() {
        let row = |name: &str, us: f64| Row::from_iter([("name".into(), json!(name)), ("mean_us".into(), json!(us))]);
        let rows = [row("commit-log", 5.0), row("keep-open", 100.0)];
        let say = |a, b| Ratio::new("mean_us", a, b).say(&rows);
        assert_eq!(say("commit-log", "keep-open").unwrap(), "mean_us: commit-log is 1/20.0 of keep-open\n");
        assert_eq!(say("keep-open", "commit-log").unwrap(), "mean_us: keep-open is 20.00 of commit-log\n");
        assert_eq!(say("keep-open", "none"), None);
    }

    #[test]
    fn the_object_has_the_contracts_names() {
        let object = object("peers", json!({"cores": 2}), &Latencies::default(), vec![Row::new()]);
        assert_eq!(
            object.keys().map(String::as_str).collect::<Vec<_>>(),
            ["experiment", "fdatasync_us", "machine", "rows"]
        );
    }
}
