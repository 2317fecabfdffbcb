//! May we use what we depend on? Licences come from `cargo metadata`, known vulnerabilities from `advisories.toml` in this
//! folder, which is part of the repository: the check needs no network and gives the same answer everywhere.

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::step::Tool;

/// Licences that Apache-2.0 software may include. An expression is fine when some choice of its `OR`s is.
const ALLOWED: &[&str] = &[
    "0BSD",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "CC0-1.0",
    "ISC",
    "MIT",
    "MIT-0",
    "Unicode-3.0",
    "Unlicense",
    "Zlib",
];

/// A published problem: `package` below `fixed` has it.
#[derive(serde::Deserialize)]
struct Advisory {
    id: String,
    package: String,
    fixed: String,
    title: String,
}

#[derive(serde::Deserialize)]
struct Advisories {
    advisory: Vec<Advisory>,
}

pub fn check() -> Result<()> {
    let metadata = Tool::cargo().args(["metadata", "--format-version=1", "--locked"]).output()?;
    let metadata: Value = serde_json::from_str(&metadata).context("cargo metadata")?;
    let advisories: Advisories = toml::from_str(include_str!("../advisories.toml")).context("advisories.toml")?;
    let packages = metadata["packages"].as_array().context("cargo metadata lists no packages")?;
    let mut problems = Vec::new();
    for package in packages {
        let (name, version) = (text(package, "name"), text(package, "version"));
        match package["license"].as_str() {
            Some(expression) if permitted(expression) => {}
            Some(expression) => problems.push(format!("{name} {version}: licence {expression:?} is not on the list")),
            None => problems.push(format!("{name} {version}: says nothing about its licence")),
        }
        for advisory in advisories.advisory.iter().filter(|a| a.package == name && below(version, &a.fixed)) {
            problems
                .push(format!("{name} {version}: {} ({}); fixed in {}", advisory.id, advisory.title, advisory.fixed));
        }
    }
    if !problems.is_empty() {
        bail!("{}", problems.join("\n"));
    }
    println!(
        "{} packages: licences allowed, none of {} known advisories applies",
        packages.len(),
        advisories.advisory.len()
    );
    Ok(())
}

fn text<'a>(package: &'a Value, field: &str) -> &'a str {
    package[field].as_str().unwrap_or_default()
}

/// Evaluates an SPDX expression: `OR` (or the old `/`) needs one side, `AND` both.
fn permitted(expression: &str) -> bool {
    let expression = expression.trim();
    if let Some(inner) =
        expression.strip_prefix('(').and_then(|e| e.strip_suffix(')')).filter(|e| !e.contains(['(', ')']))
    {
        return permitted(inner);
    }
    if let Some(parts) = split_outside(expression, " AND ") {
        return parts.into_iter().all(permitted);
    }
    if let Some(parts) = split_outside(expression, " OR ").or_else(|| split_outside(expression, "/")) {
        return parts.into_iter().any(permitted);
    }
    ALLOWED.contains(&expression)
}

/// Splits at a word that stands outside all parentheses. `None`: it does not occur there.
fn split_outside<'a>(expression: &'a str, word: &str) -> Option<Vec<&'a str>> {
    let mut parts = Vec::new();
    let (mut depth, mut from) = (0, 0);
    for (at, c) in expression.char_indices() {
        match c {
            '(' => depth += 1,
            ')' => depth -= 1,
            _ if depth == 0 && at >= from && expression[at..].starts_with(word) => {
                parts.push(&expression[from..at]);
                from = at + word.len();
            }
            _ => {}
        }
    }
    parts.push(&expression[from..]);
    (parts.len() > 1).then_some(parts)
}

/// Whether a version comes before another, by its three numbers.
fn below(version: &str, fixed: &str) -> bool {
    let numbers = |v: &str| -> Vec<u64> {
        v.split(['-', '+']).next().unwrap_or_default().split('.').map(|n| n.parse().unwrap_or(0)).collect()
    };
    numbers(version) < numbers(fixed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_expression_is_permitted_when_some_choice_is() {
        for (expression, expected) in [
            ("MIT", true),
            ("MIT OR Apache-2.0", true),
            ("MIT/Apache-2.0", true),
            ("GPL-3.0 OR MIT", true),
            ("GPL-3.0", false),
            ("(MIT OR Apache-2.0) AND Unicode-3.0", true),
            ("MIT AND GPL-2.0", false),
            ("Apache-2.0 WITH LLVM-exception OR GPL-2.0", true),
        ] {
            assert_eq!(permitted(expression), expected, "{expression}");
        }
    }

    #[test]
    fn versions_compare_by_number() {
        assert!(below("1.9.0", "1.10.0"));
        assert!(!below("1.10.0", "1.10.0"));
        assert!(below("0.4.9-alpha", "0.4.10"));
    }
}
