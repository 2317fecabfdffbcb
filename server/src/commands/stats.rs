//! `settee stats`: counters of a running server; histograms are drawn.

use std::io::{self, Write};

use anyhow::Result;
use serde_json::{Map, Value};

use super::{connect, table};
use crate::cli::Stats;
use crate::stats::from_json;

pub fn run(options: &Stats) -> Result<()> {
    let mut client = connect(&options.target)?;
    client.select_bucket(&options.bucket)?;
    let group = options.group.as_deref().unwrap_or("");
    let request: Vec<&str> = std::iter::once(group).chain(options.args.iter().map(String::as_str)).collect();
    let lines = client.stats(request.join(" ").trim())?;
    let mut out = io::stdout().lock();
    let written = match options.json {
        true => print_json(&mut out, &lines),
        false if group == "timings" => draw(&mut out, &lines),
        false if table::draws(group) => table::draw(&mut out, group, &lines),
        false => print(&mut out, &lines),
    };
    match written {
        // `settee stats | head` is not an error.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        other => Ok(other?),
    }
}

fn print(out: &mut impl Write, lines: &[(String, String)]) -> io::Result<()> {
    let width = lines.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    lines.iter().try_for_each(|(name, value)| writeln!(out, "{name:<width$}  {value}"))
}

fn print_json(out: &mut impl Write, lines: &[(String, String)]) -> io::Result<()> {
    let typed = |text: &String| serde_json::from_str(text).unwrap_or_else(|_| Value::String(text.clone()));
    let object: Map<String, Value> = lines.iter().map(|(name, value)| (name.clone(), typed(value))).collect();
    writeln!(out, "{}", Value::Object(object))
}

fn draw(out: &mut impl Write, lines: &[(String, String)]) -> io::Result<()> {
    if lines.is_empty() {
        return writeln!(out, "nothing was timed yet");
    }
    for (name, value) in lines {
        match serde_json::from_str(value).ok().as_ref().and_then(from_json) {
            Some(snapshot) => writeln!(out, "{name}\n{}", metrics::draw(&snapshot))?,
            None => writeln!(out, "{name}  {value}")?,
        }
    }
    Ok(())
}
