//! Goal: a durable write that was acknowledged survives SIGKILL at any moment, and nothing else appears.
//!
//! Method: 16 clients write to keys of their own; the server is killed while they do, started again on the same
//! directory, and every key is read. What a key may hold follows from one rule: the changes of a key take effect in the
//! order they were sent, so what is found is the state after some of them, no fewer than were acknowledged as durable.

mod harness;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Condvar, Mutex};
use std::thread;
use std::{fs, io};

use harness::connection::{FEATURES, is_closed};
use harness::{Connection, Dice, PATIENCE, Serve, Server};
use types::Level;
use wire::client::{RequestFrame, store_extras};
use wire::{Feature, Opcode, Status};

const CLIENTS: usize = 16;
const BUCKET: &str = "default";

/// How one run is shaped.
struct Plan {
    vbuckets: u16,
    kills: usize,
    keys_per_client: usize,
    /// A kill comes after fewer acknowledgements than this.
    acks_max: usize,
    /// Of one start after the other, over and over.
    commit_log: &'static [&'static str],
    /// It is switched over fewer times than this while clients write, the last time just before the kill.
    switches: usize,
}

const FEW: Plan =
    Plan { vbuckets: 16, kills: 20, keys_per_client: 6, acks_max: 4000, commit_log: &["on"], switches: 1 };
const MANY: Plan =
    Plan { vbuckets: 1024, kills: 5, keys_per_client: 40, acks_max: 4000, commit_log: &["on"], switches: 1 };

#[test]
fn acknowledged_durable_writes_survive_twenty_kills() {
    survive(&FEW, Dice::new("twenty kills"));
}

#[test]
fn acknowledged_durable_writes_survive_twenty_kills_without_a_commit_log() {
    survive(&Plan { commit_log: &["off"], ..FEW }, Dice::new("twenty kills without a log"));
}

#[test]
fn acknowledged_durable_writes_survive_kills_with_a_thousand_vbuckets() {
    survive(&MANY, Dice::new("a thousand vBuckets"));
}

#[test]
fn acknowledged_durable_writes_survive_kills_with_a_thousand_vbuckets_without_a_commit_log() {
    survive(&Plan { commit_log: &["off"], ..MANY }, Dice::new("a thousand vBuckets without a log"));
}

/// What one start left in the log, the next has in the files, whether it uses a log or not.
#[test]
fn acknowledged_durable_writes_survive_kills_while_the_commit_log_comes_and_goes() {
    survive(&Plan { commit_log: &["on", "off", "off", "on"], ..FEW }, Dice::new("a log that comes and goes"));
}

/// The log is switched at run time too, back and forth, and the kill comes at any moment of a switch.
#[test]
fn acknowledged_durable_writes_survive_kills_while_the_commit_log_is_switched_under_load() {
    let plan = Plan { commit_log: &["on", "off"], switches: 6, acks_max: 1000, ..FEW };
    survive(&plan, Dice::new("a log switched under load"));
    survive(&Plan { vbuckets: 256, kills: 6, ..plan }, Dice::new("a log of many vBuckets switched under load"));
}

fn survive(plan: &Plan, mut dice: Dice) {
    let dir = harness::directory();
    let data_dir = dir.path().join("data");
    let mut clients: Vec<Vec<Key>> = (0..CLIENTS).map(|client| keys_of(client, plan, &mut dice)).collect();
    for kill in 0..plan.kills {
        let server = start(&data_dir, plan, kill);
        verify(&server, &mut clients, kill);
        write_until_killed(server, &mut clients, plan, &data_dir, &mut dice);
        if dice.one_in(4) {
            // Recovery is interrupted too.
            let mut recovering = serve(&data_dir, plan, dice.below(4)).spawn();
            recovering.wait_for_log_lines(dice.below(6));
            recovering.kill9();
        }
    }
    let server = start(&data_dir, plan, plan.kills);
    verify(&server, &mut clients, plan.kills);
    server.stop();
    for file in harness::vbucket_files(&data_dir, BUCKET).iter().take(16) {
        harness::run(&["file", "check", file.to_str().expect("our own name")]).fine();
    }
    let server = start(&data_dir, plan, plan.kills + 1);
    verify(&server, &mut clients, plan.kills + 1);
    server.stop();
}

fn serve(data_dir: &Path, plan: &Plan, start: usize) -> Serve {
    let commit_log = plan.commit_log[start % plan.commit_log.len()];
    let config = write_config(data_dir, commit_log);
    let serve = Serve::on(data_dir).arg("--config").arg(config);
    serve.set(&format!("bucket.vbuckets={}", plan.vbuckets))
}

fn write_config(data_dir: &Path, commit_log: &str) -> PathBuf {
    let config = data_dir.with_extension("toml");
    fs::write(&config, format!("[persist]\ncommit_log = \"{commit_log}\"\n")).expect("a temporary directory");
    config
}

fn start(data_dir: &Path, plan: &Plan, start: usize) -> Server {
    serve(data_dir, plan, start).start()
}

/// One key and all that may have become of it.
struct Key {
    name: String,
    vbucket: u16,
    /// How often it was changed so far; makes every value unique.
    counter: u64,
    /// What the last restart was found to hold.
    base: Option<Vec<u8>>,
    /// What was sent since, in order.
    sent: Vec<Change>,
    /// The first so many of them must have taken effect.
    settled: usize,
    /// The newest version acknowledged so far: seqno and CAS, which only grow. The seqno of a change that was lost,
    /// since it was not durable, is given out again.
    version: (u64, u64),
    /// The newest seqno known to be on disk.
    filed: u64,
}

struct Change {
    /// `None`: a delete.
    value: Option<Vec<u8>>,
    durable: bool,
    /// The seqno it was acknowledged with.
    seqno: Option<u64>,
}

impl Key {
    /// What it holds if everything sent so far has taken effect.
    fn newest(&self) -> Option<&[u8]> {
        self.sent.last().map_or(self.base.as_deref(), |change| change.value.as_deref())
    }

    /// Everything it may hold after a kill.
    fn possible(&self) -> Vec<Option<&[u8]>> {
        let mut states: Vec<_> = self.sent.iter().map(|change| change.value.as_deref()).collect();
        states.insert(0, self.base.as_deref());
        states.split_off(self.settled)
    }

    fn next_change(&mut self, dice: &mut Dice) -> &Change {
        self.counter += 1;
        let durable = !dice.one_in(10);
        let exists = self.newest().is_some();
        let value = (!exists || !dice.one_in(6)).then(|| {
            let padding = if dice.one_in(50) { dice.below(200_000) } else { dice.below(1500) };
            let (open, close) = if dice.one_in(2) { ("{\"is\":\"", "\"}") } else { ("is ", "") };
            format!("{open}{} change {}{}{close}", self.name, self.counter, ".".repeat(padding)).into_bytes()
        });
        self.sent.push(Change { value, durable, seqno: None });
        &self.sent[self.sent.len() - 1]
    }

    /// Starts over from what a restart was found to hold.
    fn settle(&mut self, found: Option<Vec<u8>>) {
        self.filed = self.sent[..self.settled].iter().filter_map(|change| change.seqno).fold(self.filed, u64::max);
        self.version.0 = self.filed;
        self.base = found;
        self.sent.clear();
        self.settled = 0;
    }

    fn acknowledge(&mut self, index: usize, seqno: u64, cas: u64) {
        assert!(seqno > self.version.0, "{}: seqno {seqno} after {}", self.name, self.version.0);
        assert!(cas > self.version.1, "{}: CAS {cas} after {}", self.name, self.version.1);
        self.version = (seqno, cas);
        self.sent[index].seqno = Some(seqno);
        if self.sent[index].durable {
            self.settled = index + 1;
        }
    }
}

fn keys_of(client: usize, plan: &Plan, dice: &mut Dice) -> Vec<Key> {
    let key = |n| Key {
        name: format!("client-{client}-key-{n}"),
        vbucket: dice.below(usize::from(plan.vbuckets)) as u16,
        counter: 0,
        base: None,
        sent: Vec::new(),
        settled: 0,
        version: (0, 0),
        filed: 0,
    };
    (0..plan.keys_per_client).map(key).collect()
}

/// Lets all clients write until the server has acknowledged some changes, and some more after each switch of the commit log,
/// then kills it.
fn write_until_killed(server: Server, clients: &mut [Vec<Key>], plan: &Plan, data_dir: &Path, dice: &mut Dice) {
    let mut acks = dice.below(plan.acks_max);
    let progress = Progress::default();
    thread::scope(|scope| {
        for (client, keys) in clients.iter_mut().enumerate() {
            let (progress, kv, mut dice) = (&progress, server.kv.clone(), dice.split());
            let out_of_order = client % 2 == 1;
            scope.spawn(move || {
                let _ended = Ended(progress);
                match write(keys, &kv, out_of_order, progress, &mut dice) {
                    Err(error) if is_closed(&error) => {}
                    Err(error) => panic!("client {client}: {error}"),
                    Ok(never) => match never {},
                }
            });
        }
        let mut alive = progress.wait_for(acks);
        for _ in 0..dice.below(plan.switches) {
            write_config(data_dir, if dice.one_in(2) { "on" } else { "off" });
            server.signal("HUP");
            acks += dice.below(300);
            alive = alive && progress.wait_for(acks);
        }
        // Not always in step with an answer that was just sent.
        (0..dice.below(100_000)).for_each(|_| std::hint::spin_loop());
        let ended = server.kill9();
        assert!(alive, "a client ended before the kill; the server said:\n{}", ended.stderr);
        assert_eq!(ended.signal, Some(9), "the server ended by itself:\n{}", ended.stderr);
    });
    settle_what_came_before(clients);
}

/// Within a vBucket, changes reach the disk by seqno: one that is durable has all earlier ones under it.
fn settle_what_came_before(clients: &mut [Vec<Key>]) {
    let mut durable: HashMap<u16, u64> = HashMap::new();
    for key in clients.iter().flatten() {
        let seqnos = key.sent.iter().filter(|change| change.durable).filter_map(|change| change.seqno);
        let newest = durable.entry(key.vbucket).or_default();
        *newest = (*newest).max(seqnos.max().unwrap_or(0));
    }
    for key in clients.iter_mut().flatten() {
        let on_disk = durable[&key.vbucket];
        let settled = key.sent.iter().rposition(|change| change.seqno.is_some_and(|seqno| seqno <= on_disk));
        key.settled = key.settled.max(settled.map_or(0, |index| index + 1));
    }
}

enum Never {}

/// Keeps a few changes under way until the connection breaks.
fn write(keys: &mut [Key], kv: &str, out_of_order: bool, progress: &Progress, dice: &mut Dice) -> io::Result<Never> {
    let mut features = FEATURES.to_vec();
    if out_of_order {
        features.push(Feature::UnorderedExecution);
    }
    let mut client = Connection::log_in(kv, BUCKET, &features)?;
    let mut under_way: Vec<(u32, usize, usize)> = Vec::new();
    loop {
        let wanted = 1 + dice.below(4);
        while under_way.len() < wanted {
            let index = dice.below(keys.len());
            // Answered in any order, two changes of one key may also be made in any order.
            if out_of_order && under_way.iter().any(|&(_, busy, _)| busy == index) {
                continue;
            }
            let key = &mut keys[index];
            let (name, vbucket) = (key.name.clone(), key.vbucket);
            let position = key.sent.len();
            let opaque = send(&mut client, &name, vbucket, key.next_change(dice))?;
            under_way.push((opaque, index, position));
        }
        let reply = client.receive()?;
        let found = under_way.iter().position(|&(opaque, ..)| opaque == reply.opaque).expect("an answer to a request");
        assert!(out_of_order || found == 0, "answers come in the order of the requests");
        let (_, index, position) = under_way.remove(found);
        let key = &mut keys[index];
        if reply.status == Status::SyncWriteAmbiguous && key.sent[position].durable {
            // A disk slower than the time allowed: what follows decides.
            continue;
        }
        assert_eq!(reply.status, Status::Success, "{} change {position}: {}", key.name, reply.text());
        let (_, seqno) = reply.token().expect("a write tells its seqno");
        key.acknowledge(position, seqno, reply.cas);
        progress.acknowledged();
    }
}

fn send(client: &mut Connection, name: &str, vbucket: u16, change: &Change) -> io::Result<u32> {
    let framing = harness::connection::framing(change.durable.then_some(Level::PersistMajority));
    let opcode = if change.value.is_some() { Opcode::Set } else { Opcode::Delete };
    let request = RequestFrame { vbucket, framing_extras: &framing, key: name.as_bytes(), ..RequestFrame::new(opcode) };
    match &change.value {
        Some(value) => client.send(&RequestFrame { extras: &store_extras(0, 0), value, ..request }),
        None => client.send(&request),
    }
}

/// Reads every key, checks that it holds what it may, and takes that for the truth from now on.
fn verify(server: &Server, clients: &mut [Vec<Key>], kill: usize) {
    let mut client = server.client(BUCKET);
    let mut present = 0;
    for keys in clients {
        for key in &*keys {
            let get = RequestFrame { vbucket: key.vbucket, key: key.name.as_bytes(), ..RequestFrame::new(Opcode::Get) };
            client.send(&get).expect("it reads");
        }
        for key in keys {
            let reply = client.receive().expect("it answers");
            let found = match reply.status {
                Status::Success => Some(reply.value),
                Status::KeyEnoent => None,
                other => panic!("after kill {kill}: GET {}: {other:?}", key.name),
            };
            let possible = key.possible();
            assert!(
                possible.contains(&found.as_deref()),
                "after kill {kill}, {} of vBucket {} holds {}, which is none of: {}",
                key.name,
                key.vbucket,
                excerpt(found.as_deref()),
                possible.iter().map(|state| excerpt(*state)).collect::<Vec<_>>().join(", "),
            );
            present += u64::from(found.is_some());
            key.settle(found);
        }
    }
    let stats = client.stats("").expect("it answers");
    let items = stats.iter().find(|(name, _)| name == "curr_items").map(|(_, value)| value.as_str());
    assert_eq!(items, Some(present.to_string().as_str()), "documents after kill {kill}");
}

fn excerpt(state: Option<&[u8]>) -> String {
    let text = state.map(|value| String::from_utf8_lossy(value).trim_matches(|c| ".\"}".contains(c)).to_owned());
    text.unwrap_or_else(|| "nothing".to_owned())
}

/// How far all clients are, for the one who kills.
#[derive(Default)]
struct Progress {
    /// Changes acknowledged, clients ended.
    state: Mutex<(usize, usize)>,
    moved: Condvar,
}

impl Progress {
    fn acknowledged(&self) {
        self.state.lock().expect("no panic under the lock").0 += 1;
        self.moved.notify_one();
    }

    /// Whether it got there with every client alive.
    fn wait_for(&self, acks: usize) -> bool {
        let mut state = self.state.lock().expect("no panic under the lock");
        while state.0 < acks && state.1 == 0 {
            let before = state.0;
            let (next, waited) = self.moved.wait_timeout(state, PATIENCE).expect("no panic under the lock");
            state = next;
            if waited.timed_out() && state.0 == before {
                return false;
            }
        }
        state.1 == 0
    }
}

/// Counts a client that ends, however it does.
struct Ended<'a>(&'a Progress);

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        self.0.state.lock().expect("no panic under the lock").1 += 1;
        self.0.moved.notify_one();
    }
}
