//! Goal: whatever is wrong, `settee` says what and what to do, and ends with the code that its contract gives.
//!
//! 0 fine, 1 a running server refused, 2 bad usage or configuration, 3 damaged data, 4 the environment.

mod harness;

use std::fs;
use std::io::Write;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};

use harness::{Connection, PASSWORD, Serve, USER};
use types::Level;
use wire::client::RequestFrame;
use wire::{Opcode, Status};

const BUCKET: &str = "default";

fn serve(dir: &Path) -> Serve {
    Serve::on(&dir.join("data")).set("bucket.vbuckets=4")
}

#[test]
fn bad_usage_and_configuration_are_refused_before_anything_is_touched() {
    let dir = harness::directory();
    for (arguments, words) in [
        (&[][..], &["Usage"][..]),
        (&["server"], &["server", "serve"]),
        (&["serve", "--datadir", "x"], &["--datadir", "--data-dir"]),
        (&["serve", "extra"], &["extra"]),
        (&["stats", "--json=yes"], &["--json"]),
        (&["bucket"], &["Usage"]),
        (&["bucket", "create"], &["<NAME>"]),
        (&["bucket", "create", "b", "--vbuckets", "many"], &["many", "--vbuckets"]),
        (&["bucket", "create", "b", "--eviction", "none"], &["none", "value", "full"]),
        (&["file", "mend", "x"], &["mend"]),
        (&["file", "check"], &["<FILE>"]),
    ] {
        harness::run(arguments).said(2, words);
    }
    for (pair, words) in [
        ("bucket.replicas", &["bucket.replicas", "KEY=VALUE"][..]),
        ("bucket.replica=0", &["unknown key \"bucket.replica\"", "did you mean \"bucket.replicas\"?"]),
        ("replicas=0", &["unknown key \"replicas\""]),
        ("=", &["unknown key \"\""]),
        ("bucket.replicas=x", &["--set", "bucket.replicas", "\"x\"", "a whole number from 0 to 2"]),
        ("bucket.replicas=3", &["bucket.replicas", "a whole number from 0 to 2"]),
        ("bucket.vbuckets=1000", &["bucket.vbuckets", "a power of two from 1 to 1024"]),
        ("bucket.name=a/b", &["bucket.name", "a/b"]),
        ("persist.format=12", &["persist.format", "13 or 14"]),
        ("log.level=,=,", &["log.level"]),
    ] {
        serve(dir.path()).set(pair).refused().said(2, words);
    }
    for (option, value, words) in [
        ("--kv", "127.0.0.1", &["--kv", "the port is missing"][..]),
        ("--kv", "localhost:port", &["--kv", "localhost:port", "an address with a port"]),
        ("--admin", "1.2.3.4:99999", &["--admin", "1.2.3.4:99999"]),
        ("--user", "", &["--user"]),
        ("--bucket", "no spaces", &["--bucket", "no spaces"]),
        ("--data-dir", "", &["--data-dir"]),
    ] {
        let ended = Serve::bare().arg(option).arg(value).refused();
        ended.said(2, words);
    }
    assert!(!dir.path().join("data").exists(), "a refused configuration made a data directory");
}

#[test]
fn a_bad_configuration_file_is_refused_by_name() {
    let dir = harness::directory();
    let file = dir.path().join("settee.toml");
    let name = file.to_str().unwrap();
    serve(dir.path()).arg("--config").arg(&file).refused().said(2, &[name, "No such file"]);
    for (text, words) in [
        ("[bucket\n", &[name, "line 1"][..]),
        ("bucket = 3\n", &[name, "unknown key \"bucket\""]),
        ("[bucket]\nreplica = 0\n", &[name, "unknown key \"bucket.replica\"", "did you mean \"bucket.replicas\"?"]),
        ("[bucket]\nreplicas = \"none\"\n", &[name, "bucket.replicas", "a whole number from 0 to 2"]),
        ("[kv]\nlisten = \"127.0.0.1\"\n", &[name, "kv.listen", "the port is missing"]),
        ("[kv]\nlisten = [1, 2]\n", &[name, "kv.listen"]),
    ] {
        fs::write(&file, text).unwrap();
        serve(dir.path()).arg("--config").arg(&file).refused().said(2, words);
    }
    assert!(!dir.path().join("data").exists());

    // And a good one is believed.
    fs::write(&file, "[bucket]\nvbuckets = 8\nname = \"from-file\"\n").unwrap();
    let server = Serve::on(&dir.path().join("data")).arg("--config").arg(&file).start();
    let spec = fs::read_to_string(dir.path().join("data/buckets/from-file/bucket.json")).unwrap();
    assert_eq!(serde_json::from_str::<serde_json::Value>(&spec).unwrap()["vbuckets"], 8);
    server.stop();
}

#[test]
fn bad_passwords_are_refused() {
    let dir = harness::directory();
    let file = dir.path().join("password");
    let with_file = || serve(dir.path()).without_password().arg("--password-file").arg(&file);
    serve(dir.path()).env("SETTEE_PASSWORD", "").refused().said(2, &["SETTEE_PASSWORD", "empty"]);
    with_file().refused().said(2, &[file.to_str().unwrap(), "No such file"]);
    fs::write(&file, "\nsecond line\n").unwrap();
    with_file().refused().said(2, &[file.to_str().unwrap(), "empty"]);

    fs::write(&file, "from a file\nnot this\n").unwrap();
    let server = with_file().start();
    assert_eq!(log_in(&server.kv, "from a file"), Status::Success);
    assert_eq!(log_in(&server.kv, "not this"), Status::AuthError);
    assert!(!server.stop().stderr.contains("from a file"), "a password that was chosen is not shown");
}

fn log_in(kv: &str, password: &str) -> Status {
    let mut client = Connection::open(kv).unwrap();
    client.hello(harness::connection::FEATURES).unwrap();
    client.scram(frontend::auth::scram::Hash::Sha256, USER, password).unwrap().0
}

#[test]
fn a_generated_password_is_shown_once_and_kept_for_its_owner_only() {
    let dir = harness::directory();
    let first = serve(dir.path()).without_password().start();
    let file = dir.path().join("data/password");
    let password = fs::read_to_string(&file).unwrap().trim().to_owned();
    assert!(password.len() >= 16, "{password:?}");
    for file in ["data/password", "data/users.json"] {
        let mode = fs::metadata(dir.path().join(file)).unwrap().permissions().mode();
        assert_eq!(mode & 0o077, 0, "{file} may be read by others: {mode:o}");
    }
    assert_eq!(log_in(&first.kv, &password), Status::Success);
    // A tool on the same machine finds it.
    let stats = harness::settee()
        .args(["stats", "--kv", &first.kv, "--data-dir", dir.path().join("data").to_str().unwrap()])
        .output()
        .unwrap();
    assert!(stats.status.success(), "{}", String::from_utf8_lossy(&stats.stderr));
    let kv = first.kv.clone();
    let ended = first.stop();
    assert!(!ended.stdout.contains(&password), "stdout is for scripts");
    assert_eq!(ended.stderr.matches(&password).count(), 1, "shown once:\n{}", ended.stderr);
    assert!(ended.stderr.contains(&format!("couchbase://{kv}")), "with where to connect, {kv}:\n{}", ended.stderr);

    let second = serve(dir.path()).without_password().start();
    assert_eq!(log_in(&second.kv, &password), Status::Success);
    assert!(!second.stop().stderr.contains(&password), "never shown again");
}

#[test]
fn an_open_bucket_is_for_loopback_unless_it_is_forced() {
    let dir = harness::directory();
    let open = |kv: &str| {
        let serve = Serve::bare().arg("--data-dir").arg(dir.path().join("data")).arg("--admin=127.0.0.1:0");
        serve.arg(format!("--kv={kv}")).set("bucket.vbuckets=4").set("kv.open_bucket=default")
    };
    open("0.0.0.0:0").refused().said(2, &["kv.open_bucket", "0.0.0.0:0", "kv.open_bucket_anywhere=true"]);
    open("[::]:0").refused().said(2, &["kv.open_bucket"]);
    let server = open("127.0.0.1:0").start();
    let mut stranger = Connection::open(&server.kv).unwrap();
    assert_eq!(stranger.set(0, "k", b"v", None).unwrap().status, Status::Success);
    assert_eq!(stranger.get(0, "k").unwrap().text(), "v");
    server.stop();
}

#[test]
fn a_port_that_is_taken_is_named() {
    let dir = harness::directory();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    for option in ["--kv", "--admin"] {
        let other = if option == "--kv" { "--admin=127.0.0.1:0" } else { "--kv=127.0.0.1:0" };
        let serve = Serve::bare().arg("--data-dir").arg(dir.path().join("data")).arg(other);
        serve.arg(format!("{option}={address}")).refused().said(4, &[&address, option, "in use"]);
    }
    // Not ours to listen on.
    let elsewhere = Serve::bare().arg("--data-dir").arg(dir.path().join("data")).arg("--admin=127.0.0.1:0");
    elsewhere.arg("--kv=192.0.2.1:11210").refused().said(4, &["192.0.2.1:11210"]);
    // Nothing of this is in the way of a start that is right.
    serve(dir.path()).start().stop();
}

#[test]
fn a_directory_that_cannot_be_written_is_named() {
    let dir = harness::directory();
    let file = dir.path().join("file");
    fs::write(&file, "not a directory").unwrap();
    for path in [file.as_path(), &file.join("below"), Path::new("/dev/null/x"), Path::new("/proc/settee")] {
        Serve::on(path).refused().said(4, &[path.to_str().unwrap()]);
    }
    // Permission bits bind everybody but root.
    let sealed = dir.path().join("sealed");
    fs::create_dir(&sealed).unwrap();
    fs::set_permissions(&sealed, fs::Permissions::from_mode(0o555)).unwrap();
    if fs::write(sealed.join("probe"), "").is_err() {
        Serve::on(&sealed).refused().said(4, &[sealed.to_str().unwrap(), "denied"]);
        Serve::on(&sealed.join("below")).refused().said(4, &[sealed.to_str().unwrap(), "denied"]);
    }
    fs::set_permissions(&sealed, fs::Permissions::from_mode(0o755)).unwrap();
}

#[test]
fn one_server_a_directory() {
    let dir = harness::directory();
    let first = serve(dir.path()).start();
    let data = dir.path().join("data");
    serve(dir.path()).refused().said(4, &[data.to_str().unwrap(), &format!("process {}", first.pid())]);
    // The first did not notice, and a lock dies with its owner.
    assert_eq!(first.client(BUCKET).set(0, "k", b"v", None).unwrap().status, Status::Success);
    assert_eq!(first.kill9().signal, Some(9));
    serve(dir.path()).start().stop();
}

#[test]
fn a_signal_ends_the_server_in_order_with_everything_on_disk() {
    let dir = harness::directory();
    for (round, signal) in ["TERM", "INT"].into_iter().enumerate() {
        let server = serve(dir.path()).start();
        println!("ready after {:?}", server.ready_after.unwrap());
        assert!(server.http("/health/ready").0.contains("200"));
        let mut client = server.client(BUCKET);
        for n in 0..100 {
            let reply = client.set(n % 4, &format!("{signal}-{n}"), b"in memory", None).unwrap();
            assert_eq!(reply.status, Status::Success);
        }
        server.signal(signal);
        assert_eq!(client.receive_all().unwrap(), [], "clients are hung up on");
        let ended = server.ended();
        assert_eq!((ended.code, ended.signal), (Some(0), None), "{}", ended.stderr);
        assert_eq!(ended.stdout.lines().count(), 1, "stdout is the ready line and nothing else:\n{}", ended.stdout);

        let server = serve(dir.path()).start();
        let mut client = server.client(BUCKET);
        for n in 0..100 {
            assert_eq!(client.get(n % 4, &format!("{signal}-{n}")).unwrap().text(), "in memory", "{signal} {n}");
        }
        let said = server.stop().stderr;
        let recovered = format!("documents={}", 100 * (round + 1));
        assert!(said.contains(&recovered), "start-up says that {recovered} came back:\n{said}");
    }
}

#[test]
fn a_second_signal_ends_the_server_at_once() {
    let dir = harness::directory();
    let mut server = serve(dir.path()).start();
    // Waits for a seqno that never comes, and a stop waits for it a while.
    let mut client = server.client(BUCKET);
    client
        .send(&RequestFrame { extras: &1_000_000u64.to_be_bytes(), ..RequestFrame::new(Opcode::SeqnoPersistence) })
        .unwrap();
    assert_eq!(server.client(BUCKET).call(&RequestFrame::new(Opcode::Noop)).unwrap().status, Status::Success);
    server.terminate();
    assert!(server.wait_for_log("stopping"), "a stop is announced:\n{}", server.stderr);
    server.terminate();
    let ended = server.ended();
    assert_eq!(ended.signal, None, "it ends by itself");
    assert!(matches!(ended.code, Some(0 | 1)), "{:?}\n{}", ended.code, ended.stderr);
    serve(dir.path()).start().stop();
}

#[test]
fn a_server_whose_output_nobody_reads_goes_on() {
    let dir = harness::directory();
    let mut command = harness::settee();
    let data = dir.path().join("data");
    command
        .env("SETTEE_PASSWORD", PASSWORD)
        .args(["serve", "--kv=127.0.0.1:0", "--admin=127.0.0.1:0", "--data-dir"])
        .arg(&data);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    // `settee serve | head -0`
    drop(child.stdout.take());
    let log = std::io::BufReader::new(child.stderr.take().unwrap());
    let mut said = String::new();
    for line in std::io::BufRead::lines(log) {
        said += &(line.unwrap() + "\n");
        // The last line of a first start before it is ready; a signal that comes before that waits for its turn.
        if said.ends_with("created bucket=\"default\"\n") {
            let pid = child.id().to_string();
            let sent = Command::new("sh").args(["-c", "kill -s TERM \"$1\"", "sh", &pid]).status().unwrap();
            assert!(sent.success());
        }
    }
    let status = child.wait().unwrap();
    assert_eq!(status.code(), Some(0), "{status:?}\n{said}");
}

#[test]
fn stats_are_shown() {
    let dir = harness::directory();
    let server = serve(dir.path()).start();
    let mut client = server.client(BUCKET);
    for n in 0..20 {
        client.set(n % 4, &format!("k{n}"), b"{\"n\":1}", Some(Level::PersistMajority)).unwrap();
        client.get(n % 4, &format!("k{n}")).unwrap();
    }
    let general = server.tool(&["stats"]);
    assert!(
        general.fine().lines().any(|line| line.contains("curr_items") && line.contains("20")),
        "{}",
        general.stdout
    );
    let json: serde_json::Value = serde_json::from_str(server.tool(&["stats", "--json"]).fine()).unwrap();
    let items = &json["curr_items"];
    assert!(items == &serde_json::json!("20") || items == &serde_json::json!(20), "{json}");
    let timings = server.tool(&["stats", "timings"]);
    assert!(timings.fine().contains("GET") && timings.stdout.contains("SET"), "{}", timings.stdout);
    assert!(!server.tool(&["stats", "memory"]).fine().trim().is_empty());
    for group in ["connections", "vbucket", "vbucket-details", "vbucket-seqno", "failovers", "scheduler", "uuid"] {
        let shown = server.tool(&["stats", group]);
        assert!(!shown.fine().trim().is_empty(), "stats {group} shows nothing");
    }
    server.tool(&["stats", "nonsense"]).said(1, &["nonsense"]);
    server.tool(&["stats", "--bucket", "nowhere"]).said(1, &["nowhere"]);
    let (status, metrics) = server.http("/metrics");
    assert!(status.contains("200") && metrics.trim_end().ends_with("# EOF"), "{status}\n{metrics}");
    server.stop();
}

#[test]
fn tools_say_why_they_cannot_reach_a_server() {
    let dir = harness::directory();
    let server = serve(dir.path()).start();
    let stats = |password: Option<&str>, kv: &str| {
        let mut command = harness::settee();
        command.args(["stats", "--kv", kv, "--data-dir"]).arg(dir.path().join("elsewhere"));
        if let Some(password) = password {
            command.env("SETTEE_PASSWORD", password);
        }
        let output = command.output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    let (code, said) = stats(Some("wrong"), &server.kv);
    assert!(code == Some(1) && said.contains("wrong name or password") && said.contains(USER), "{code:?} {said}");
    let (code, said) = stats(None, &server.kv);
    assert!(code == Some(1) && said.contains("SETTEE_PASSWORD") && said.contains("--password-file"), "{code:?} {said}");
    let nobody = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let (code, said) = stats(Some(PASSWORD), &nobody);
    assert!(code == Some(1) && said.contains(&nobody), "{code:?} {said}");
    let (code, said) = stats(Some(PASSWORD), &server.admin);
    assert!(code == Some(1) && !said.contains("panicked"), "the admin port speaks HTTP: {code:?} {said}");
    server.stop();
}

#[test]
fn buckets_are_made_listed_emptied_and_deleted() {
    let dir = harness::directory();
    let server = serve(dir.path()).start();
    let bucket = |arguments: &[&str]| server.tool(&[&["bucket"], arguments].concat());
    let listed = || bucket(&["list"]).fine().lines().map(str::to_owned).collect::<Vec<_>>();
    assert_eq!(listed(), ["default"]);
    bucket(&["create", "beers", "--vbuckets", "8", "--quota-mb", "64"]).fine();
    bucket(&["create", "sealed", "--vbuckets", "2", "--no-flush"]).fine();
    bucket(&["create", "deep", "--vbuckets", "2", "--eviction", "full"]).fine();
    for (name, policy) in [("beers", "value_only"), ("deep", "full_eviction")] {
        let told = server.client(name).stats("").unwrap();
        assert!(told.contains(&("ep_item_eviction_policy".into(), policy.into())), "{name}: {told:?}");
    }
    bucket(&["delete", "deep"]).fine();
    assert_eq!(listed(), ["beers", "default", "sealed"]);
    bucket(&["create", "beers"]).said(1, &["beers"]);
    bucket(&["create", "no spaces"]).said(1, &["no spaces"]);
    bucket(&["create", "odd", "--vbuckets", "12"]).said(1, &["odd"]);
    bucket(&["delete", "nowhere"]).said(1, &["nowhere"]);
    bucket(&["flush", "nowhere"]).said(1, &["nowhere"]);

    let mut client = server.client("beers");
    assert_eq!(client.set(7, "ale", b"{}", Some(Level::PersistMajority)).unwrap().status, Status::Success);
    assert_eq!(client.set(8, "ale", b"{}", None).unwrap().status, Status::NotMyVbucket);
    bucket(&["flush", "sealed"]).said(1, &["sealed"]);
    bucket(&["flush", "beers"]).fine();
    assert_eq!(client.get(7, "ale").unwrap().status, Status::KeyEnoent);
    assert_eq!(client.set(7, "stout", b"{}", Some(Level::PersistMajority)).unwrap().status, Status::Success);
    bucket(&["delete", "sealed"]).fine();
    assert!(!dir.path().join("data/buckets/sealed").exists());
    server.kill9();

    let server = serve(dir.path()).start();
    let list = server.tool(&["bucket", "list"]);
    assert_eq!(list.fine().lines().collect::<Vec<_>>(), ["beers", "default"]);
    let mut client = server.client("beers");
    assert_eq!(client.get(7, "ale").unwrap().status, Status::KeyEnoent, "what a flush removed stays removed");
    assert_eq!(client.get(7, "stout").unwrap().status, Status::Success);
    // A bucket of the same name is another bucket.
    server.tool(&["bucket", "delete", "beers"]).fine();
    server.tool(&["bucket", "create", "beers", "--vbuckets", "8"]).fine();
    assert_eq!(server.client("beers").get(7, "stout").unwrap().status, Status::KeyEnoent);
    server.stop();
}

fn fixture(name: &str) -> String {
    format!("{}/../couchstore/tests/fixtures/{name}", env!("CARGO_MANIFEST_DIR"))
}

#[test]
fn files_of_other_makers_are_shown_and_checked() {
    let whole = fixture("a-10json-v13.couch");
    let info: serde_json::Value = serde_json::from_str(harness::run(&["file", "info", &whole]).fine()).unwrap();
    assert_eq!((&info["disk_version"], &info["doc_count"]), (&13.into(), &10.into()), "{info}");
    let dump = harness::run(&["file", "dump", &whole]);
    let docs: Vec<serde_json::Value> = dump.fine().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(docs.len(), 10);
    assert!(docs.iter().all(|doc| doc["body"].is_string()), "{docs:?}");
    let check: serde_json::Value = serde_json::from_str(harness::run(&["file", "check", &whole]).fine()).unwrap();
    assert_eq!(check["whole"], true);

    for (name, command) in [
        ("h-torn-header-v13.couch", "info"),
        ("h-torn-header-v13.couch", "check"),
        ("i-garbage-tail-v13.couch", "check"),
        ("j-corrupt-doc-v13.couch", "check"),
        ("j-corrupt-doc-v13.couch", "dump"),
        ("k-corrupt-header-v13.couch", "info"),
        ("k-corrupt-header-v13.couch", "check"),
    ] {
        let file = fixture(name);
        let ended = harness::run(&["file", command, &file]);
        ended.said(3, &[&format!("{name}@")]);
        let offset = ended.stderr.split(&format!("{name}@")).nth(1).unwrap();
        assert!(offset.starts_with(|c: char| c.is_ascii_digit()), "{name}: no offset: {}", ended.stderr);
    }
    for name in ["h-torn-header-v13.couch", "k-corrupt-header-v13.couch"] {
        harness::run(&["file", "info", "--recover", &fixture(name)]).fine();
    }
    let dir = harness::directory();
    let (garbage, empty) = (dir.path().join("garbage"), dir.path().join("empty"));
    fs::write(&garbage, harness::Dice::new("garbage").bytes(10_000)).unwrap();
    fs::write(&empty, "").unwrap();
    for file in [garbage.to_str().unwrap(), empty.to_str().unwrap()] {
        for command in ["info", "dump", "check"] {
            harness::run(&["file", command, file]).said(3, &[file]);
        }
    }
    for command in ["info", "dump", "check"] {
        harness::run(&["file", command, &fixture("nowhere.couch")]).said(4, &["nowhere.couch", "No such file"]);
        harness::run(&["file", command, env!("CARGO_MANIFEST_DIR")]).said(4, &["directory"]);
    }
}

#[test]
fn our_own_files_are_shown_and_checked() {
    let dir = harness::directory();
    for format in ["13", "14"] {
        let data = dir.path().join(format);
        let serve = || Serve::on(&data).set("bucket.vbuckets=1").set(&format!("persist.format={format}"));
        let server = serve().start();
        let mut client = server.client(BUCKET);
        for n in 0..50 {
            client.set(0, &format!("k{n}"), format!("{{\"n\":{n}}}").as_bytes(), Some(Level::PersistMajority)).unwrap();
        }
        let delete = RequestFrame { key: b"k7", ..RequestFrame::new(Opcode::Delete) };
        assert_eq!(client.call(&delete).unwrap().status, Status::Success);
        server.stop();
        let files = harness::vbucket_files(&data, BUCKET);
        assert_eq!(files.len(), 1, "{files:?}");
        let file = files[0].to_str().unwrap();
        let info: serde_json::Value = serde_json::from_str(harness::run(&["file", "info", file]).fine()).unwrap();
        assert_eq!(info["disk_version"].to_string(), format);
        assert_eq!(info["deleted_count"], 1, "{info}");
        let check: serde_json::Value = serde_json::from_str(harness::run(&["file", "check", file]).fine()).unwrap();
        assert_eq!(check["whole"], true, "{check}");
        let dump = harness::run(&["file", "dump", file]);
        let mut bodies: Vec<String> = Vec::new();
        for line in dump.fine().lines() {
            let doc: serde_json::Value = serde_json::from_str(line).unwrap();
            if !doc["prepare"].is_null() {
                continue;
            }
            assert_eq!(doc["deleted"], doc["body"].is_null() && doc["body_hex"].is_null(), "{doc}");
            bodies.extend(doc["body"].as_str().map(str::to_owned));
        }
        assert_eq!(bodies.len(), 49);
        assert!(bodies.contains(&"{\"n\":48}".to_owned()), "{bodies:?}");
        serve().start().stop();
    }
}

/// What a killed server left in its log is shown; a damaged record is named with its place, by the tool and by the start.
#[test]
fn a_commit_log_is_shown_and_its_damage_named() {
    let dir = harness::directory();
    let log = dir.path().join("data/log");
    let log = log.to_str().unwrap();
    let serve = || serve(dir.path()).set("bucket.vbuckets=8");
    let server = serve().start();
    let mut client = server.client(BUCKET);
    for (vb, key) in [(3, "a"), (5, "b"), (3, "c")] {
        assert_eq!(client.set(vb, key, b"v", Some(Level::PersistMajority)).unwrap().status, Status::Success);
    }
    server.kill9();
    let report: serde_json::Value = serde_json::from_str(harness::run(&["file", "log", log]).fine()).unwrap();
    let ranges = report["segments"][0]["ranges"].as_array().unwrap();
    let ends: Vec<_> = ranges.iter().map(|range| (range["vb"].as_u64(), range["last"].as_u64())).collect();
    // A durable write takes two seqnos: its prepare and its commit; nobody waits for the last of these.
    assert!(ends.iter().any(|(vb, last)| *vb == Some(3) && *last >= Some(3)), "{report}");
    assert!(ends.iter().any(|(vb, last)| *vb == Some(5) && *last >= Some(1)), "{report}");

    let segment = dir.path().join("data/log").join(report["segments"][0]["file"].as_str().unwrap());
    let good = fs::read(&segment).unwrap();
    let mut bad = good.clone();
    // In the first record, which is all of the first write.
    bad[8192 + 70] ^= 1;
    fs::write(&segment, bad).unwrap();
    let place = format!("{}@8192", segment.display());
    harness::run(&["file", "log", log]).said(3, &[&place]);
    serve().refused().said(3, &[&place, "lost: ", "options: "]);
    fs::write(&segment, good).unwrap();
    let server = serve().start();
    assert_eq!(server.client(BUCKET).get(3, "c").unwrap().text(), "v");
    server.stop();
    harness::run(&["file", "log", "/nowhere"]).said(4, &["/nowhere"]);
}

#[test]
fn damaged_files_beside_the_vbuckets_are_named() {
    let dir = harness::directory();
    serve(dir.path()).start().stop();
    let data = dir.path().join("data");
    for (name, bytes) in [
        ("users.json", &b"{\"version\":1"[..]),
        ("users.json", b""),
        ("buckets/default/bucket.json", b"\0\0\0\0"),
        ("buckets/default/bucket.json", b"{\"name\":\"other\"}"),
    ] {
        let path = data.join(name);
        let good = fs::read(&path).unwrap();
        fs::File::create(&path).unwrap().write_all(bytes).unwrap();
        serve(dir.path()).refused().said(3, &[path.to_str().unwrap()]);
        fs::write(&path, good).unwrap();
    }
    let node = data.join("node.json");
    let good = fs::read(&node).unwrap();
    fs::write(&node, "{").unwrap();
    serve(dir.path()).refused().said(3, &[node.to_str().unwrap()]);
    fs::write(&node, good).unwrap();
    serve(dir.path()).start().stop();
}
