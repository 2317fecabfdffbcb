//! Goal: the connection table is never too full for an administrator, keeps nobody out for good, and keeps nobody in who
//! only takes room.

mod harness;

use std::collections::VecDeque;
use std::fs;
use std::io::ErrorKind;
use std::net::TcpStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use frontend::auth::{Role, Users};
use harness::{Connection, PASSWORD, Serve, Server};
use types::Level;
use wire::client::{RequestFrame, store_extras};
use wire::{Opcode, Status};

const BUCKET: &str = "default";

fn serve(dir: &Path) -> Serve {
    Serve::on(&dir.join("data")).set("bucket.vbuckets=16").set("kv.workers=2")
}

fn stat(client: &mut Connection, group: &str, name: &str) -> String {
    let stats = client.stats(group).unwrap();
    stats.into_iter().find(|(found, _)| found == name).unwrap_or_else(|| panic!("no {name:?} in {group:?}")).1
}

fn log_in(kv: &str) -> Connection {
    Connection::log_in(kv, BUCKET, harness::connection::FEATURES).expect("a client may log in")
}

/// As the kernel numbers the states of a socket.
const ESTABLISHED: &str = "01";
const CLOSE_WAIT: &str = "08";

/// What the kernel tells of the server's sockets on its port that are in this state.
fn sockets_of(address: &str, state: &str) -> Vec<Vec<String>> {
    let port: u16 = address.rsplit_once(':').unwrap().1.parse().unwrap();
    let local = format!(":{port:04X}");
    let table = fs::read_to_string("/proc/net/tcp").unwrap();
    let fields = table.lines().skip(1).map(|line| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>());
    fields.filter(|f| f[1].ends_with(&local) && f[3] == state).collect()
}

/// Sockets on this port that the client has closed and the server has not.
fn close_waits(address: &str) -> usize {
    sockets_of(address, CLOSE_WAIT).len()
}

/// Connect, log in, read, close, many times over on many threads: all are served, and in the end all places are free.
#[test]
fn many_more_clients_than_places_are_all_served() {
    const THREADS: usize = 60;
    const ROUNDS: usize = 20;
    let dir = harness::directory();
    let started = Instant::now();
    let server = serve(dir.path()).set("kv.connections_max=16").start();
    server.client(BUCKET).set(0, "k", b"v", None).unwrap();
    let kv = &server.kv;
    thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(move || {
                for _ in 0..ROUNDS {
                    assert_eq!(log_in(kv).get(0, "k").unwrap().text(), "v");
                }
            });
        }
    });
    let mut client = server.client(BUCKET);
    let began = Instant::now();
    while stat(&mut client, "", "curr_connections") != "1" || close_waits(&server.kv) > 0 {
        assert!(began.elapsed() < Duration::from_secs(5), "{} left in CLOSE_WAIT", close_waits(&server.kv));
    }
    for class in ["class connections", "class admin"] {
        let line: serde_json::Value = serde_json::from_str(&stat(&mut client, "limits", class)).unwrap();
        let out = if class == "class connections" { 1 } else { 0 };
        assert_eq!(line["out"], out, "{class}: {line}");
    }
    let ended = server.stop();
    let full = ended.stderr.lines().filter(|line| line.contains("connections are taken")).count();
    assert!((1..=started.elapsed().as_secs() + 1).contains(&(full as u64)), "at most once a second: {full}");
}

/// Goal: an administrator gets in whatever ordinary clients do. Method: they hold every place, and more of them knock:
/// some say nothing, some log in and then want to work.
#[test]
fn a_full_table_does_not_keep_an_administrator_out() {
    let dir = harness::directory();
    let mut server = serve(dir.path()).set("kv.connections_max=8").start();
    let path = dir.path().join("data/users.json");
    let users = Users::load(&env::os::env(), &path).unwrap().with_iterations(0);
    users.set("reader", PASSWORD, Role::Data).unwrap();
    users.save().unwrap();
    server.signal("HUP");
    assert!(server.wait_for_log("users=2"));
    let kv = server.kv.clone();
    let ordinary = || -> std::io::Result<Connection> {
        let mut client = Connection::open(&kv)?;
        client.hello(harness::connection::FEATURES)?;
        let plain = format!("\0reader\0{PASSWORD}");
        let auth = RequestFrame { key: b"PLAIN", value: plain.as_bytes(), ..RequestFrame::new(Opcode::SaslAuth) };
        assert_eq!(client.call(&auth)?.status, Status::Success);
        let reply = client.call(&RequestFrame { key: BUCKET.as_bytes(), ..RequestFrame::new(Opcode::SelectBucket) })?;
        assert!(matches!(reply.status, Status::Success | Status::Ebusy), "{:?} {}", reply.status, reply.text());
        if reply.status == Status::Ebusy { Err(ErrorKind::ResourceBusy.into()) } else { Ok(client) }
    };
    let mut holders: Vec<Connection> = (0..8).map(|_| ordinary().unwrap()).collect();

    // With nobody at the door it takes no time at all.
    let began = Instant::now();
    server.tool(&["stats", "connections"]).fine();
    assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());

    let silent: Vec<Connection> = (0..6).map(|_| Connection::open(&server.kv).unwrap()).collect();
    thread::scope(|scope| {
        let knockers: Vec<_> = (0..30).map(|_| scope.spawn(ordinary)).collect();
        let began = Instant::now();
        let drawn = server.tool(&["stats", "connections"]);
        assert!(drawn.fine().contains("reader"), "{}", drawn.stdout);
        println!("an administrator was in and out again after {:?}", began.elapsed());
        assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
        assert!(server.http("/metrics").1.contains("connections_in_reserve"));
        for holder in &mut holders {
            assert_eq!(holder.set(0, "k", b"v", None).unwrap().status, Status::Success);
        }
        // Whoever was turned away was told so; the rest got in when there was room.
        drop(holders);
        let outcomes: Vec<_> = knockers.into_iter().map(|knocker| knocker.join().unwrap().map(drop)).collect();
        let refused: Vec<_> = outcomes.iter().filter_map(|outcome| outcome.as_ref().err()).collect();
        assert!(refused.iter().all(|refusal| refusal.kind() == ErrorKind::ResourceBusy), "{refused:?}");
        println!("{} of {} others were refused", refused.len(), outcomes.len());
    });
    drop(silent);
    assert!(ordinary().is_ok());
    server.stop();
}

/// The admin port has places of its own, and none for those who say nothing while others wait.
#[test]
fn silent_clients_of_the_admin_port_make_way() {
    let dir = harness::directory();
    let server = serve(dir.path()).start();
    let silent: Vec<TcpStream> = (0..40).map(|_| TcpStream::connect(&server.admin).unwrap()).collect();
    let began = Instant::now();
    assert!(server.http("/metrics").0.contains("200"));
    println!("answered after {:?} behind {} that say nothing", began.elapsed(), silent.len());
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
    let began = Instant::now();
    assert!(server.http("/metrics").0.contains("200"));
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    server.stop();
}

/// Documents in the reserve wait for an ordinary place, even an administrator's.
#[test]
fn a_client_of_the_reserve_goes_on_when_a_place_comes_free() {
    let dir = harness::directory();
    let server = serve(dir.path()).set("kv.connections_max=8").start();
    let mut holders: Vec<Connection> = (0..8).map(|_| server.client(BUCKET)).collect();
    let mut next = server.client(BUCKET);
    next.send(&RequestFrame { key: b"k", ..RequestFrame::new(Opcode::Get) }).unwrap();
    let mut other = server.client(BUCKET);
    let in_reserve = |client: &mut Connection| {
        client.stats("connections").unwrap().iter().filter(|(_, line)| line.contains("\"in_reserve\":true")).count()
    };
    assert_eq!(in_reserve(&mut other), 2);
    drop(holders.pop());
    assert_eq!(next.receive().unwrap().status, Status::KeyEnoent);
    assert_eq!(in_reserve(&mut other), 1);
    server.stop();
}

/// The server is idle: only its own timer can end them.
#[test]
fn whoever_says_nothing_or_half_of_it_is_closed_in_time() {
    let dir = harness::directory();
    let bounds = ["kv.login_timeout_s=1", "kv.stall_timeout_s=2", "kv.idle_timeout_s=3"];
    let server = bounds.into_iter().fold(serve(dir.path()), Serve::set).start();
    let get = RequestFrame { key: b"k", ..RequestFrame::new(Opcode::Get) }.to_bytes();
    let mut silent = Connection::open(&server.kv).unwrap();
    let mut stranger_with_half_a_frame = Connection::open(&server.kv).unwrap();
    stranger_with_half_a_frame.send_raw(&get[..5]).unwrap();
    let mut half_a_frame = server.client(BUCKET);
    half_a_frame.send_raw(&get[..get.len() - 1]).unwrap();
    let mut idle = server.client(BUCKET);
    let mut relapsed = server.client(BUCKET);
    let wrong = RequestFrame { key: b"PLAIN", value: b"\0nobody\0x", ..RequestFrame::new(Opcode::SaslAuth) };
    assert_eq!(relapsed.call(&wrong).unwrap().status, Status::AuthError);

    let began = Instant::now();
    for (client, seconds) in [
        (&mut silent, 1),
        (&mut stranger_with_half_a_frame, 1),
        (&mut relapsed, 1),
        (&mut half_a_frame, 2),
        (&mut idle, 3),
    ] {
        let closed = client.receive().expect_err("closed");
        assert!(closed.kind() == ErrorKind::UnexpectedEof, "{closed}");
        let took = began.elapsed().as_secs_f64();
        let wanted = f64::from(seconds);
        assert!(took > wanted - 1.0 && took < wanted + 2.0, "{took} s instead of {seconds}");
    }
    let mut witness = server.client(BUCKET);
    let metrics = server.http("/metrics").1;
    for (reason, count) in [("login", 3), ("stalled", 1), ("idle", 1)] {
        let line = format!("connections_ended_total{{reason=\"{reason}\"}} {count}");
        assert!(metrics.contains(&line), "no {line:?} in\n{metrics}");
    }
    assert_eq!(witness.get(0, "k").unwrap().status, Status::KeyEnoent);
    server.stop();
}

/// Goal: a client whose machine is gone does not keep its place. Method: the system tells of each socket whether it will ask
/// after that.
#[test]
fn the_system_asks_after_silent_clients_unless_told_not_to() {
    const RETRANSMIT: &str = "01";
    const KEEP_ALIVE: &str = "02";
    let timers = |server: &Server| -> Vec<String> {
        let _client = server.client(BUCKET);
        loop {
            let sockets = sockets_of(&server.kv, ESTABLISHED);
            let timers: Vec<String> = sockets.iter().map(|fields| fields[5][..2].to_owned()).collect();
            // Until the last answer is acknowledged it is about sending it again.
            if timers != [RETRANSMIT] {
                return timers;
            }
        }
    };
    let dir = harness::directory();
    let server = serve(dir.path()).start();
    assert_eq!(timers(&server), [KEEP_ALIVE]);
    server.stop();
    let server = serve(dir.path()).set("kv.keepalive_s=0").start();
    assert_ne!(timers(&server), [KEEP_ALIVE]);
    server.stop();
}

/// Whoever does not read is closed after a while, and what was kept for him is given back; one who reads slowly stays.
#[test]
fn a_client_that_stops_reading_is_closed_and_a_slow_one_is_not() {
    let dir = harness::directory();
    let server = serve(dir.path()).set("kv.stall_timeout_s=2").start();
    let mut witness = server.client(BUCKET);
    let value = vec![b'v'; 1 << 20];
    witness.set(0, "large", &value, None).unwrap();
    let get = RequestFrame { key: b"large", ..RequestFrame::new(Opcode::Get) }.to_bytes();
    let (mut deaf, mut slow) = (server.client(BUCKET), server.client(BUCKET));
    deaf.send_raw(&get.repeat(60)).unwrap();
    slow.send_raw(&get.repeat(60)).unwrap();
    // Reads all the time, far less than there is, for longer than the deaf one may last.
    let began = Instant::now();
    let mut answers = 0;
    while stat(&mut witness, "", "curr_connections") != "2" {
        assert!(began.elapsed() < Duration::from_secs(20), "the deaf one is still there");
        if began.elapsed() > Duration::from_millis(200) * (answers + 1) && answers < 60 {
            assert!(slow.receive().unwrap().value == value);
            answers += 1;
        }
    }
    assert!(began.elapsed() > Duration::from_secs(1));
    (answers..60).for_each(|_| assert!(slow.receive().unwrap().value == value));
    assert_eq!(slow.get(0, "large").unwrap().status, Status::Success);
    // What was under way was sent; then there was nobody.
    assert!((0..60).any(|_| deaf.receive().is_err()));
    server.stop();
}

/// Goal: a stop under load is quick, and no acknowledged durable write is lost. Method: as many idle clients as there are
/// descriptors for, a few that write; terminate, then read everything back.
#[test]
fn a_stop_with_thousands_of_clients_and_load_takes_seconds_and_keeps_what_was_acknowledged() {
    const WRITERS: u16 = 16;
    let limits = fs::read_to_string("/proc/self/limits").unwrap();
    let line = limits.lines().find_map(|l| l.strip_prefix("Max open files")).unwrap();
    let own: usize = line.split_whitespace().next().unwrap().parse().unwrap_or(usize::MAX);
    let idle_count = 10_000.min(own.saturating_sub(200));
    let dir = harness::directory();
    let server = serve(dir.path()).set("kv.connections_max=10100").start();
    let kv = &server.kv;
    let idle: Vec<Connection> = thread::scope(|scope| {
        let logins: Vec<_> =
            (0..4).map(|_| scope.spawn(move || (0..idle_count / 4).map(|_| log_in(kv)).collect::<Vec<_>>())).collect();
        logins.into_iter().flat_map(|login| login.join().unwrap()).collect()
    });
    let (written, stopping) = (AtomicU64::new(0), AtomicBool::new(false));
    let (acknowledged, began) = thread::scope(|scope| {
        let writers: Vec<_> = (0..WRITERS)
            .map(|writer| {
                let mut client = server.client(BUCKET);
                let (written, stopping) = (&written, &stopping);
                scope.spawn(move || write_until_closed(&mut client, writer, written, stopping))
            })
            .collect();
        while written.load(Relaxed) < 500 {
            thread::yield_now();
        }
        let began = Instant::now();
        stopping.store(true, Relaxed);
        server.terminate();
        let acknowledged: Vec<(u16, u64)> = writers.into_iter().map(|writer| writer.join().unwrap()).collect();
        (acknowledged, began)
    });
    let ended = server.ended();
    let took = began.elapsed();
    ended.fine();
    println!("{} clients, {} writes: stopped in {took:?}", idle.len(), written.load(Relaxed));
    assert!(took < Duration::from_secs(5), "{took:?} with {} clients", idle.len());
    drop(idle);

    let server = serve(dir.path()).start();
    let mut client = server.client(BUCKET);
    for (writer, count) in acknowledged {
        for n in 0..count {
            assert_eq!(client.get(writer, &format!("w{writer}-{n}")).unwrap().status, Status::Success, "{writer}-{n}");
        }
    }
    server.stop();
}

/// Writes durably, 8 under way at a time, until the server closes; returns how many were acknowledged.
fn write_until_closed(client: &mut Connection, writer: u16, written: &AtomicU64, stopping: &AtomicBool) -> (u16, u64) {
    let framing = harness::connection::framing(Some(Level::PersistMajority));
    let extras = store_extras(0, 0);
    let mut acknowledged = 0;
    let mut under_way = VecDeque::new();
    for n in 0.. {
        let key = format!("w{writer}-{n}");
        let set = RequestFrame {
            framing_extras: &framing,
            vbucket: writer,
            extras: &extras,
            key: key.as_bytes(),
            value: b"v",
            ..RequestFrame::new(Opcode::Set)
        };
        if client.send(&set).is_err() {
            break;
        }
        under_way.push_back(n);
        if under_way.len() < 8 {
            continue;
        }
        match client.receive() {
            Ok(reply) if reply.status == Status::Success => {
                assert_eq!(under_way.pop_front(), Some(acknowledged));
                acknowledged += 1;
                written.fetch_add(1, Relaxed);
            }
            Ok(reply) => panic!("{:?} {}", reply.status, reply.text()),
            Err(_) => break,
        }
    }
    while let Ok(reply) = client.receive() {
        if reply.status != Status::Success {
            break;
        }
        acknowledged += 1;
    }
    assert!(stopping.load(Relaxed), "closed without a reason");
    (writer, acknowledged)
}
