//! `settee bench experiment …` starts servers of this very program, drives them and ends them: small runs of those that
//! nothing else tries.

use std::process::Command;

use serde_json::Value;

/// The rows of an experiment, by name.
fn run(arguments: &[&str]) -> Vec<Value> {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_settee"));
    command.args(["bench", "experiment"]).args(arguments).args(["--quick", "--json", "--dir"]).arg(dir.path());
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "nothing is left behind");
    let mut object: Value = serde_json::from_slice(&output.stdout).unwrap();
    let rows = object["rows"].take().as_array().unwrap().clone();
    assert!(rows.iter().all(|row| row["errors"] == 0), "{rows:?}");
    rows
}

fn names(rows: &[Value]) -> Vec<&str> {
    rows.iter().map(|row| row["name"].as_str().unwrap()).collect()
}

fn number(row: &Value, field: &str) -> f64 {
    row[field].as_f64().unwrap_or_else(|| panic!("{row} has no {field}"))
}

#[test]
fn one_node_and_two_are_measured_in_one_run() {
    let rows = run(&["file-cache", "--nodes=2", "--replicas=1", "--clients=16", "--vbuckets=16", "--seconds=0.5"]);
    assert_eq!(names(&rows), ["1-node/1", "1-node/16", "2-nodes/1", "2-nodes/16"]);
    for row in &rows {
        assert!(number(row, "ops") > 0.0 && number(row, "syncs_per_s") > 0.0 && number(row, "times_fdatasync") > 0.0);
    }
    let both = ["cpu_us_per_op_node_1", "cpu_us_per_op_node_2"].map(|field| number(&rows[3], field));
    assert!((both[0] + both[1] - number(&rows[3], "cpu_us_per_op")).abs() < 0.1, "{both:?}: every node is counted");
}

#[test]
fn durable_writes_on_two_nodes_are_looked_through_for_long_ones() {
    let rows = run(&["wakeups", "--nodes=2", "--vbuckets=16", "--only=2-nodes/64,2-nodes/every-10ms", "--seconds=0.5"]);
    assert_eq!(names(&rows), ["2-nodes/64", "2-nodes/every-10ms"]);
    assert!(rows.iter().all(|row| number(row, "above_1s") <= number(row, "above_100ms")), "{rows:?}");
}

#[test]
fn numbers_of_vbuckets_are_compared() {
    let rows = run(&["vbuckets", "--vbuckets=1,16", "--clients=4", "--seconds=0.3"]);
    assert_eq!(names(&rows), ["durable-1/4", "durable-16/4", "plain-1/4", "plain-16/4"]);
}

#[test]
fn passes_over_the_same_documents_are_told_one_by_one_and_together() {
    let rows = run(&["overwrite", "--keys=300", "--passes=3", "--set=persist.filing_age_s_max=1"]);
    assert_eq!(names(&rows), ["pass-1", "pass-2", "pass-3", "all"]);
    assert_eq!(number(&rows[3], "ops"), 900.0);
    assert!(number(&rows[3], "write_amplification") > 1.0, "a log and files hold more than the documents");
}

#[test]
fn memory_is_told_after_a_load_and_after_a_restart() {
    let only = "--only=settee-loaded,settee-restarted";
    let rows = run(&["memory", "--items=5000", only, "--set=persist.filing_age_s_max=1"]);
    assert_eq!(names(&rows), ["settee-loaded", "settee-restarted"]);
    assert!(rows.iter().all(|row| number(row, "bytes_per_item") > 114.0), "{rows:?}: key and value at the least");
}
