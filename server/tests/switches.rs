//! Off-switches turned at run time, under load: nothing acknowledged is lost, and 0 never means unlimited (S05).

mod harness;

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use harness::{Serve, Server};
use types::Level;
use wire::Status;

const BUCKET: &str = "default";
const CLIENTS: u16 = 8;
const VBUCKETS: u16 = 32;

/// vBucket files the process has open.
fn open_files(server: &Server) -> usize {
    let entries = fs::read_dir(format!("/proc/{}/fd", server.pid())).expect("it runs");
    let targets = entries.filter_map(|entry| fs::read_link(entry.ok()?.path()).ok());
    targets.filter(|target| target.to_string_lossy().contains(".couch.")).count()
}

fn hang_up(server: &mut Server, config: &Path, text: &str) {
    fs::write(config, text).unwrap();
    server.stderr.clear();
    server.signal("HUP");
    assert!(server.wait_for_log("configuration read again"), "{}", server.stderr);
}

/// Clients write durably, each to keys of its own, while `act` has the server and a way to wait for so many more answers. What
/// each client wrote last to each of its keys.
fn under_load(server: &mut Server, act: impl FnOnce(&mut Server, &dyn Fn(u64))) -> Vec<Vec<u32>> {
    let (stop, acks) = (AtomicBool::new(false), AtomicU64::new(0));
    let wait_for_acks = |more: u64| {
        let aim = acks.load(Ordering::Relaxed) + more;
        while acks.load(Ordering::Relaxed) < aim {
            thread::yield_now();
        }
    };
    let kv = server.kv.clone();
    thread::scope(|scope| {
        let clients: Vec<_> = (0..CLIENTS)
            .map(|client| {
                let mut connection = harness::Connection::log_in(&kv, BUCKET, harness::connection::FEATURES).unwrap();
                let (stop, acks) = (&stop, &acks);
                scope.spawn(move || {
                    let mut last = vec![0_u32; usize::from(VBUCKETS / CLIENTS)];
                    for n in 1_u32.. {
                        if stop.load(Ordering::Relaxed) {
                            break;
                        }
                        let which = n as usize % last.len();
                        let vb = client + CLIENTS * which as u16;
                        let value = n.to_string();
                        let set = connection.set(vb, "key", value.as_bytes(), Some(Level::PersistMajority)).unwrap();
                        assert_eq!(set.status, Status::Success);
                        last[which] = n;
                        acks.fetch_add(1, Ordering::Relaxed);
                    }
                    last
                })
            })
            .collect();
        act(server, &wait_for_acks);
        stop.store(true, Ordering::Relaxed);
        clients.into_iter().map(|client| client.join().unwrap()).collect()
    })
}

fn assert_holds(server: &Server, last: &[Vec<u32>]) {
    let mut client = server.client(BUCKET);
    for (number, last) in (0..).zip(last) {
        for (which, n) in (0..).zip(last) {
            assert_eq!(client.get(number + CLIENTS * which, "key").unwrap().text(), n.to_string());
        }
    }
}

/// Goal: the number of files kept open may be changed at any time. Method: clients write durably, each change a commit of
/// its file, while the number goes up and down; then the server is killed and everything acknowledged is read.
#[test]
fn the_file_cache_may_be_switched_off_and_on_under_load() {
    let dir = harness::directory();
    let config = dir.path().join("settee.toml");
    let files_max = |n: u32| format!("[persist.file_cache]\nfiles_max = {n}\n");
    fs::write(&config, files_max(1000)).unwrap();
    let serve = || {
        let serve = Serve::on(&dir.path().join("data")).arg("--config").arg(&config).set("persist.writers=4");
        serve.set("persist.commit_log=off").set(&format!("bucket.vbuckets={VBUCKETS}"))
    };
    let mut server = serve().start();
    let last = under_load(&mut server, |server, wait_for_acks| {
        for n in [0, 1, 1000, 0, 5, 0, 1000, 1, 0, 3] {
            wait_for_acks(100);
            hang_up(server, &config, &files_max(n));
            wait_for_acks(100);
            // Kept, and in use: a flush has one file open, and a new one beside it.
            let (open, most) = (open_files(server), n as usize + 2 * 4 + 4);
            assert!(open <= most, "{open} files are open with {n} kept");
        }
    });
    hang_up(&mut server, &config, &files_max(0));
    let stats = server.client(BUCKET).stats("persist").unwrap();
    assert!(stats.contains(&("file_cache_kept".to_owned(), "0".to_owned())), "{stats:?}");
    server.kill9();
    let server = serve().start();
    assert_holds(&server, &last);
    server.stop();
}

/// Goal: the commit log may be switched at any time, and says so. Method: clients write durably while it goes and comes; each
/// switch ends, its log is there or not, and everything acknowledged is there after a kill.
#[test]
fn the_commit_log_may_be_switched_off_and_on_under_load() {
    let dir = harness::directory();
    let (config, data) = (dir.path().join("settee.toml"), dir.path().join("data"));
    let commit_log = |state: &str| format!("[persist]\ncommit_log = \"{state}\"\n");
    fs::write(&config, commit_log("on")).unwrap();
    let serve = || Serve::on(&data).arg("--config").arg(&config).set(&format!("bucket.vbuckets={VBUCKETS}"));
    let mut server = serve().start();
    let last = under_load(&mut server, |server, wait_for_acks| {
        for state in ["off", "on", "off", "on", "off"] {
            wait_for_acks(300);
            hang_up(server, &config, &commit_log(state));
            assert!(server.wait_for_log(&format!("the commit log is {state}")), "{}", server.stderr);
            assert_eq!(data.join("log").exists(), state == "on");
            let stats = server.client(BUCKET).stats("persist").unwrap();
            assert!(stats.contains(&("log".to_owned(), state.to_owned())), "{stats:?}");
            wait_for_acks(300);
        }
    });
    server.kill9();
    let server = serve().start();
    assert_holds(&server, &last);
    server.stop();
}

/// What would be more than there is is refused, at a start and at run time, with the range that would do.
#[test]
fn more_kept_files_than_the_limit_allows_are_refused() {
    let dir = harness::directory();
    let config = dir.path().join("settee.toml");
    let data = dir.path().join("data");
    let serve = || Serve::on(&data).set("kv.workers=2").arg("--config").arg(&config).descriptors(512);
    fs::write(&config, "[persist.file_cache]\nfiles_max = 5000\n").unwrap();
    serve().refused().said(2, &["persist.file_cache.files_max = 5000 is out of range", "choose one of these"]);
    fs::write(&config, "").unwrap();
    let mut server = serve().start();
    fs::write(&config, "[persist.file_cache]\nfiles_max = 5000\n").unwrap();
    server.signal("HUP");
    assert!(server.wait_for_log("persist.file_cache.files_max = 5000 is out of range"));
    server.stop();
}
