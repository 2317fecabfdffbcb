//! `cargo xtask test`: everything that must hold, on a machine that has nothing but Rust, Python, Go and Node.
//!
//! Steps run in order and stop at the first failure. Each is also a subcommand, for the impatient:
//! `cargo xtask test --only clippy`.

mod licences;
mod step;

use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use step::Tool;

/// A step's name, what it proves, and how.
struct Step {
    name: &'static str,
    proves: &'static str,
    run: fn() -> Result<()>,
}

const STEPS: &[Step] = &[
    Step { name: "fmt", proves: "the code is formatted", run: fmt },
    Step { name: "clippy", proves: "no warning anywhere", run: clippy },
    Step {
        name: "licences",
        proves: "every dependency may be used and none is known to be unsound",
        run: licences::check,
    },
    Step { name: "unit", proves: "unit, property, golden, crash, simulation and kill -9 tests", run: unit },
    Step {
        name: "simulate",
        proves: "engines and clusters on simulated disks, networks and clocks keep what they promised, for some minutes",
        run: simulate,
    },
    Step {
        name: "loom",
        proves: "no wake-up, permit, slot or letter is lost, and the broken orders are found broken",
        run: loom,
    },
    Step {
        name: "shuttle",
        proves: "pools and the commit log survive storms of all that can happen at once",
        run: shuttle,
    },
    Step { name: "build", proves: "the release binary builds", run: build },
    Step { name: "docs", proves: "docs/config.md says what the program says", run: docs_are_current },
    Step { name: "install", proves: "the real clients are here", run: install },
    Step { name: "memcapable", proves: "27 binary protocol tests of libmemcached", run: memcapable },
    Step { name: "python", proves: "the Python SDK works", run: python },
    Step { name: "go", proves: "gocb works", run: go },
    Step { name: "node", proves: "the Node SDK works", run: node },
    Step {
        name: "histories",
        proves: "what clients of a cluster are told has an order, whoever is killed, stopped or cut off",
        run: histories,
    },
    Step { name: "fuzz", proves: "no input found in half a minute each makes a parser panic", run: fuzz },
];

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let result = match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["test"] => test(|_| true),
        ["test", "--only", ref names @ ..] if !names.is_empty() => {
            known(names).and_then(|()| test(|s| names.contains(&s)))
        }
        ["docs"] => write_docs(),
        _ => {
            eprintln!("usage: cargo xtask test [--only STEP...] | docs\n\nsteps:");
            STEPS.iter().for_each(|step| eprintln!("  {:<10} {}", step.name, step.proves));
            return ExitCode::from(2);
        }
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("\nxtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn known(names: &[&str]) -> Result<()> {
    match names.iter().find(|name| !STEPS.iter().any(|step| step.name == **name)) {
        Some(name) => bail!("no step is called {name:?}; run `cargo xtask` for the list"),
        None => Ok(()),
    }
}

fn test(wanted: impl Fn(&str) -> bool) -> Result<()> {
    std::env::set_current_dir(step::root()).context("go to the workspace root")?;
    let start = Instant::now();
    let mut done = Vec::new();
    for step in STEPS.iter().filter(|step| wanted(step.name)) {
        println!("\n=== {}: {}", step.name, step.proves);
        let began = Instant::now();
        (step.run)().with_context(|| format!("step {} failed", step.name))?;
        done.push((step.name, began.elapsed().as_secs()));
    }
    println!();
    done.iter().for_each(|(name, seconds)| println!("{name:<10} {seconds:>5} s"));
    println!("all {} steps passed in {} s", done.len(), start.elapsed().as_secs());
    Ok(())
}

fn fmt() -> Result<()> {
    Tool::cargo().args(["fmt", "--all", "--", "--check"]).run()
}

fn clippy() -> Result<()> {
    // The allocator is built with it.
    debian("make", "make")?;
    Tool::cargo().args(["clippy", "--workspace", "--all-targets", "--locked", "--", "-D", "warnings"]).run()?;
    // What the experiment `wakeups` is built with to show the wrong order of steps.
    Tool::cargo().args(["clippy", "-p", "bench", "--features", "old-order", "--locked", "--", "-D", "warnings"]).run()
}

fn unit() -> Result<()> {
    Tool::cargo().args(["test", "--workspace", "--locked"]).run()
}

/// More of what `unit` begins with. The seeds are the same each time, so who changed nothing is not stopped by luck; others can be
/// chosen as the tests say.
fn simulate() -> Result<()> {
    for (name, seeds) in [("cluster", "4000"), ("simulation", "1200")] {
        Tool::cargo()
            .args(["test", "--locked", "-p", "engine", "--test", name, "--", "--nocapture"])
            .env("SETTEE_SIM_SEEDS", seeds)
            .run()?;
    }
    Ok(())
}

/// The crates whose smallest parts are tried in every order, and those whose storms are tried in many.
const MODELLED: [&str; 4] = ["scheduler", "limits", "frontend", "replication"];
const STORMED: [&str; 2] = ["scheduler", "commit_log"];

fn loom() -> Result<()> {
    MODELLED.iter().try_for_each(|name| under_checker("loom", name, "models"))
}

fn shuttle() -> Result<()> {
    STORMED.iter().try_for_each(|name| under_checker("shuttle", name, "storms"))
}

/// A separate target directory for each checker, so that its flag does not rebuild the world twice.
fn under_checker(checker: &str, name: &str, tests: &str) -> Result<()> {
    Tool::cargo()
        .args(["test", "--package", name, "--release", "--locked", "--lib", tests])
        .args(["--target-dir", &under_target(checker)?])
        .env("RUSTFLAGS", &format!("--cfg {checker}"))
        .run()
}

fn build() -> Result<()> {
    Tool::cargo().args(["build", "--release", "--locked"]).run()
}

const SERVER: &str = "SETTEE_BIN";
const CONFIG_DOC: &str = "docs/config.md";

fn config_doc() -> Result<String> {
    Tool::new(under_target("release/settee")?).arg("keys").output()
}

fn under_target(path: &str) -> Result<String> {
    let path = step::target_dir(Tool::cargo())?.join(path);
    path.into_os_string().into_string().ok().context("the target directory's name is not text")
}

/// A program that starts servers: the one that was built here, unless another is named.
fn client(program: &str) -> Result<Tool> {
    match std::env::var_os(SERVER) {
        Some(_) => Ok(Tool::new(program)),
        None => Ok(Tool::new(program).env(SERVER, &under_target("release/settee")?)),
    }
}

fn docs_are_current() -> Result<()> {
    let written = std::fs::read_to_string(CONFIG_DOC).context(CONFIG_DOC)?;
    if written != config_doc()? {
        bail!("{CONFIG_DOC} is out of date: run `cargo xtask docs`");
    }
    Ok(())
}

fn write_docs() -> Result<()> {
    std::env::set_current_dir(step::root())?;
    build()?;
    std::fs::write(CONFIG_DOC, config_doc()?).context(CONFIG_DOC)
}

fn in_venv(path: &str) -> Result<String> {
    under_target(&format!("interop-venv/{path}"))
}

/// What the real clients need, from the package registries; nothing outside the checkout but Debian packages.
fn install() -> Result<()> {
    debian("memccapable", "libmemcached-tools")?;
    Tool::new("python3").args(["-m", "venv", &in_venv("")?]).run()?;
    Tool::new(in_venv("bin/pip")?)
        .args(["install", "--quiet", "--disable-pip-version-check", "-r", "tests/interop/requirements.txt"])
        .run()?;
    Tool::new("go").args(["mod", "download"]).dir("tests/interop/go").run()?;
    Tool::new("go").args(["mod", "download"]).dir(HISTORIES).run()?;
    Tool::new("npm")
        .args(["install", "--no-package-lock", "--no-audit", "--no-fund", "--loglevel=error"])
        .dir("tests/interop/node")
        .run()
}

/// Sees to it that a tool is here.
fn debian(tool: &str, package: &str) -> Result<()> {
    if step::on_path(tool) {
        return Ok(());
    }
    let apt = || Tool::new("apt-get").env("DEBIAN_FRONTEND", "noninteractive");
    apt().args(["update", "-qq"]).run()?;
    apt().args(["install", "-y", "-qq", package]).run()
}

fn memcapable() -> Result<()> {
    client(&in_venv("bin/pytest")?)?.args(["-q", "tests/interop/python/test_memcapable.py"]).run()
}

fn python() -> Result<()> {
    client(&in_venv("bin/pytest")?)?
        .args(["-q", "tests/interop/python", "--ignore=tests/interop/python/test_memcapable.py"])
        .run()
}

fn go() -> Result<()> {
    Tool::new("go").args(["vet", "./..."]).dir("tests/interop/go").run()?;
    Tool::new("go").args(["vet", "./..."]).dir("examples/go").run()?;
    client("go")?.args(["test", "-count=1", "-v", "./..."]).dir("tests/interop/go").run()
}

fn node() -> Result<()> {
    client("npm")?.args(["test", "--silent"]).dir("tests/interop/node").run()
}

const HISTORIES: &str = "tests/histories";

/// Most of it is waiting, so several clusters are played with at once.
fn histories() -> Result<()> {
    Tool::new("go").args(["vet", "./..."]).dir(HISTORIES).run()?;
    client("go")?.args(["test", "-count=1", "-v", "-parallel=4", "-timeout=8m", "./..."]).dir(HISTORIES).run()
}

/// Each target and where its first inputs are.
const FUZZ_TARGETS: [(&str, &str); 4] = [
    ("frames", "fuzz/seeds/frames"),
    ("subdoc", "fuzz/seeds/subdoc"),
    ("values", "fuzz/seeds/values"),
    ("couchstore", "couchstore/tests/fixtures"),
];

/// Coverage-guided, so it needs the nightly compiler; without one the same entry points still run as property tests in
/// `unit`, and the reason for the skip is printed.
fn fuzz() -> Result<()> {
    if Tool::new("cargo").args(["+nightly", "--version"]).output().is_err() {
        println!(
            "skipped: no nightly toolchain here, which coverage-guided fuzzing needs; `unit` ran the same entry points"
        );
        return Ok(());
    }
    if !step::on_path("cargo-fuzz") {
        Tool::cargo().args(["install", "--quiet", "--locked", "cargo-fuzz"]).run()?;
    }
    for (target, seeds) in FUZZ_TARGETS {
        let corpus = format!("fuzz/corpus/{target}");
        std::fs::create_dir_all(&corpus).with_context(|| corpus.clone())?;
        Tool::new("cargo")
            .args(["+nightly", "fuzz", "run", target, &corpus, seeds])
            .args(["--", "-max_total_time=30", "-rss_limit_mb=4096", "-print_final_stats=1"])
            .run()?;
    }
    Ok(())
}
