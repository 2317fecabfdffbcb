//! Goal: one client's appetite costs the server a bounded amount of memory and the other clients nothing.

mod harness;

use harness::{Connection, Serve};
use wire::client::RequestFrame;
use wire::frame::BODY_LEN_MAX;
use wire::{Opcode, Status};

const BUCKET: &str = "default";

fn serve(dir: &tempfile::TempDir) -> Serve {
    Serve::on(&dir.path().join("data")).set("bucket.vbuckets=4")
}

fn resident_mib(client: &mut Connection) -> u64 {
    let stats = client.stats("").unwrap();
    let rss = stats.iter().find(|(name, _)| name == "rss").expect("stats tell the resident memory");
    rss.1.parse::<u64>().unwrap() >> 20
}

#[test]
fn answers_that_nobody_reads_do_not_pile_up() {
    let dir = harness::directory();
    let server = serve(&dir).start();
    let mut witness = server.client(BUCKET);
    let value = vec![b'v'; 1 << 20];
    assert_eq!(witness.set(0, "large", &value, None).unwrap().status, Status::Success);
    let before = resident_mib(&mut witness);

    const ASKED: usize = 1000;
    let mut greedy = server.client(BUCKET);
    let get = RequestFrame { key: b"large", ..RequestFrame::new(Opcode::Get) }.to_bytes();
    greedy.send_raw(&get.repeat(ASKED)).unwrap();
    // Each of these comes after the server looked at the greedy one once more, or found it not worth a look.
    for n in 0..200 {
        assert_eq!(witness.set(1, &format!("k{n}"), b"v", None).unwrap().status, Status::Success);
    }
    let grown = resident_mib(&mut witness).saturating_sub(before);
    assert!(grown < 200, "{grown} MiB for one client that does not read {ASKED} answers of 1 MiB");

    // It was only slow: every answer is there, whole.
    for n in 0..ASKED {
        assert!(greedy.receive().unwrap().value == value, "answer {n}");
    }
    server.stop();
}

#[test]
fn frames_that_are_announced_and_never_sent_take_no_memory() {
    let dir = harness::directory();
    let server = serve(&dir).start();
    let mut witness = server.client(BUCKET);
    let before = resident_mib(&mut witness);
    let mut header = RequestFrame::new(Opcode::Set).to_bytes();
    header[8..12].copy_from_slice(&BODY_LEN_MAX.to_be_bytes());
    header.extend_from_slice(&[0; 2000]);
    let clients: Vec<Connection> = (0..60)
        .map(|n| {
            let mut client = if n % 2 == 0 { Connection::open(&server.kv).unwrap() } else { server.client(BUCKET) };
            client.send_raw(&header).unwrap();
            client
        })
        .collect();
    let grown = resident_mib(&mut witness).saturating_sub(before);
    assert!(grown < 200, "{grown} MiB for {} clients that announced 30 MiB each", clients.len());
    drop(clients);
    assert_eq!(witness.set(0, "k", b"v", None).unwrap().status, Status::Success);
    server.stop();
}

#[test]
fn more_clients_than_there_is_room_for_wait_until_one_leaves() {
    let dir = harness::directory();
    let server = serve(&dir).set("kv.connections_max=8").start();
    let mut admitted = vec![server.client(BUCKET)];
    let mut waiting = Vec::new();
    for _ in 0..20 {
        let mut client = Connection::open(&server.kv).unwrap();
        client.send(&RequestFrame::new(Opcode::Noop)).unwrap();
        waiting.push(client);
    }
    assert!(server.http("/health/live").0.contains("200"), "the admin port answers whoever waits");
    assert_eq!(admitted[0].set(0, "k", b"v", None).unwrap().status, Status::Success);
    // Whoever leaves makes room for the next; in the end everybody was served.
    for mut client in waiting {
        assert_eq!(client.receive().unwrap().status, Status::Success);
        drop(client);
    }
    admitted.push(server.client(BUCKET));
    for client in &mut admitted {
        assert_eq!(client.get(0, "k").unwrap().text(), "v");
    }
    server.stop();
}
