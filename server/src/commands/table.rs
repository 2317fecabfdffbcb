//! Statistics whose values are JSON objects, drawn as tables.

use std::io::{self, Write};

use serde_json::Value;

/// A column: its heading, and where the value is in the object.
type Column = (&'static str, &'static str);

/// Rows whose names begin like this have these columns.
struct Shape {
    group: &'static str,
    prefix: &'static str,
    /// Heading of the names.
    name: &'static str,
    columns: &'static [Column],
}

const SHAPES: &[Shape] = &[
    Shape {
        group: "connections",
        prefix: "",
        name: "id",
        columns: &[
            ("peer", "/peer"),
            ("user", "/user"),
            ("bucket", "/bucket"),
            ("agent", "/agent"),
            ("age s", "/age_s"),
            ("idle s", "/idle_s"),
            ("requests", "/requests"),
            ("in flight", "/in_flight"),
            ("bytes queued", "/bytes_queued"),
            ("in reserve", "/in_reserve"),
        ],
    },
    Shape {
        group: "scheduler",
        prefix: "pool ",
        name: "pool",
        columns: &[("threads", "/threads"), ("running", "/running"), ("ready", "/ready"), ("wakeups", "/wakeups")],
    },
    Shape {
        group: "scheduler",
        prefix: "task ",
        name: "task (times in µs)",
        columns: &[
            ("runs", "/runs"),
            ("wakes", "/wakes"),
            ("over-runs", "/overruns"),
            ("wait p50", "/wait/p50_us"),
            ("p99", "/wait/p99_us"),
            ("p99.9", "/wait/p999_us"),
            ("max", "/wait/max_us"),
            ("run p50", "/run/p50_us"),
            ("p99", "/run/p99_us"),
            ("p99.9", "/run/p999_us"),
            ("max", "/run/max_us"),
        ],
    },
    Shape {
        group: "compaction",
        prefix: "vb ",
        name: "vBucket",
        columns: &[
            ("phase", "/phase"),
            ("%", "/percent"),
            ("bytes", "/bytes"),
            ("of", "/bytes_total"),
            ("written", "/bytes_written"),
            ("bytes/s", "/bytes_per_s"),
            ("left s", "/left_s"),
            ("for s", "/elapsed_s"),
            ("pace", "/pace"),
        ],
    },
    Shape {
        group: "limits",
        prefix: "class ",
        name: "class",
        columns: &[("capacity", "/capacity"), ("open", "/out"), ("at most", "/high_water"), ("refused", "/refusals")],
    },
];

/// Whether a group is drawn here.
pub fn draws(group: &str) -> bool {
    SHAPES.iter().any(|shape| shape.group == group)
}

/// Draws a group: its tables, then what is in none.
pub fn draw(out: &mut impl Write, group: &str, lines: &[(String, String)]) -> io::Result<()> {
    let parsed = |value: &str| serde_json::from_str::<Value>(value).ok().filter(Value::is_object);
    let mut drawn = vec![false; lines.len()];
    for shape in SHAPES.iter().filter(|shape| shape.group == group) {
        let heading = std::iter::once(shape.name).chain(shape.columns.iter().map(|(heading, _)| *heading));
        let mut rows: Vec<Vec<String>> = vec![heading.map(str::to_owned).collect()];
        for ((name, value), drawn) in lines.iter().zip(&mut drawn) {
            let (Some(name), Some(value)) = (name.strip_prefix(shape.prefix), parsed(value)) else { continue };
            *drawn = true;
            let cells = shape.columns.iter().map(|(_, at)| cell(value.pointer(at)));
            rows.push(std::iter::once(name.to_owned()).chain(cells).collect());
        }
        if rows.len() > 1 {
            write_rows(out, &rows)?;
        }
    }
    let rest = lines.iter().zip(&drawn).filter(|(_, drawn)| !**drawn).map(|(line, _)| line);
    for (name, value) in rest {
        writeln!(out, "{name}  {value}")?;
    }
    Ok(())
}

fn cell(value: Option<&Value>) -> String {
    match value {
        None | Some(Value::Null) => "-".to_owned(),
        Some(Value::String(text)) => text.clone(),
        Some(Value::Bool(yes)) => if *yes { "yes" } else { "no" }.to_owned(),
        Some(Value::Number(number)) if number.is_f64() => format!("{:.0}", number.as_f64().unwrap_or_default()),
        Some(other) => other.to_string(),
    }
}

/// Text to the left, numbers to the right.
fn write_rows(out: &mut impl Write, rows: &[Vec<String>]) -> io::Result<()> {
    let columns = rows[0].len();
    let of = |column: usize| rows.iter().map(move |row| row[column].as_str());
    let width = |column| of(column).map(|cell| cell.chars().count()).max().unwrap_or(0);
    let numbers = |column| of(column).skip(1).all(|cell| cell == "-" || cell.parse::<f64>().is_ok());
    let layout: Vec<(usize, bool)> =
        (0..columns).map(|column| (width(column), column > 0 && numbers(column))).collect();
    for row in rows {
        let cells = row.iter().zip(&layout).map(|(cell, (width, right))| match right {
            true => format!("{cell:>width$}"),
            false => format!("{cell:<width$}"),
        });
        writeln!(out, "{}", cells.collect::<Vec<_>>().join("  ").trim_end())?;
    }
    writeln!(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_is_drawn_as_tables_and_what_fits_in_none_follows() {
        let lines = [
            ("class core", r#"{"capacity":32,"out":18,"high_water":20,"refusals":0}"#),
            ("class connections", r#"{"capacity":10000,"out":1,"high_water":7}"#),
            ("exhausted", "3"),
        ];
        let lines = lines.map(|(name, value)| (name.to_owned(), value.to_owned()));
        let mut out = Vec::new();
        draw(&mut out, "limits", &lines).unwrap();
        let expected = "\
class        capacity  open  at most  refused
core               32    18       20        0
connections     10000     1        7        -

exhausted  3
";
        assert_eq!(String::from_utf8(out).unwrap(), expected);
        assert!(draws("scheduler") && !draws("timings"));
    }
}
