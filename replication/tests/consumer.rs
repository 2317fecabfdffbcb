//! Goal: a replica ends up with what its active has, in the same order, and the active learns what the replica has.
//! Method: two buckets on two simulated disks, a producer and a consumer between them, and a connection that can be cut before
//! any message.

mod common;

use std::collections::{BTreeSet, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::*;
use engine::{OpResult, Outcome, Ticket, Waiter};
use replication::{Consumer as Following, ConsumerFace, Place, Producer};
use types::{Seqno, VbState};
use wire::dcp::{Message, Packet};
use wire::{Frame, FrameReader, Next, Opcode, Reply, Side, Status};

/// Two nodes, `a` active and `b` its replica, and what is between them.
struct Pair {
    a: World,
    b: World,
    /// How `b` calls itself.
    replica: &'static str,
    link: Option<Link>,
    /// Messages that reached the replica.
    delivered: usize,
    /// The active says that it is at it while it hears the replica, as a front end does.
    attends: bool,
}

struct Link {
    producer: Option<Producer>,
    consumer: Following,
    bedside: Arc<Bedside>,
    /// Frames on their way to the replica.
    under_way: VecDeque<Vec<u8>>,
}

fn frames(bytes: &[u8]) -> Vec<&[u8]> {
    let (mut rest, mut found) = (bytes, Vec::new());
    while let Ok(Next::Frame(frame)) = FrameReader::new(Side::Client).next(rest) {
        let (one, more) = rest.split_at(frame.frame_len());
        found.push(one);
        rest = more;
    }
    assert!(rest.is_empty(), "no whole frame");
    found
}

fn frame(bytes: &[u8]) -> Frame<'_> {
    let Ok(Next::Frame(frame)) = FrameReader::new(Side::Client).next(bytes) else { panic!("no whole frame") };
    frame
}

impl Pair {
    fn new() -> Pair {
        Pair::of(World::new(), World::new())
    }

    fn of(a: World, b: World) -> Pair {
        let chain = |names: [&str; 2]| vec![names.map(|name| Some(name.to_owned())).to_vec()];
        a.bucket.set_vb_state(VB, VbState::Active, Some(chain(["a", "b"]))).expect("a role");
        b.bucket.set_vb_state(VB, VbState::Replica, None).expect("a role");
        Pair { a, b, replica: "b", link: None, delivered: 0, attends: false }
    }

    fn connect(&mut self) {
        let face = Arc::new(ConsumerFace::default());
        let wake = Arc::new(Bedside::default());
        let bedside = Arc::clone(&wake);
        let mut consumer = Following::open(&self.b.bucket, self.replica, wake, face, self.b.now());
        consumer.want(&BTreeSet::from([VB]));
        self.link = Some(Link { producer: None, consumer, bedside, under_way: VecDeque::new() });
    }

    /// Lets both ends do what they can without another message reaching the replica.
    fn turn(&mut self) {
        let Some(link) = &mut self.link else { return };
        link.consumer.turn(self.b.now()).expect("the peer is there");
        let said = std::mem::take(link.consumer.output());
        if let Some(producer) = link.producer.as_mut().filter(|_| self.attends) {
            producer.attend();
        }
        for bytes in frames(&said) {
            hear(&self.a, self.replica, link, &frame(bytes));
        }
        if let Some(producer) = &mut link.producer {
            let mut out = Vec::new();
            producer.pull(&mut out, usize::MAX / 2, self.a.now());
            link.under_way.extend(frames(&out).into_iter().map(<[u8]>::to_vec));
        }
    }

    /// One message reaches the replica. False: there is none.
    fn deliver(&mut self) -> bool {
        self.turn();
        let Some(link) = &mut self.link else { return false };
        let Some(bytes) = link.under_way.pop_front() else { return false };
        self.delivered += 1;
        let taken = link.consumer.receive(&bytes, self.b.now(), false).expect("it makes sense");
        assert!(taken == bytes.len() || link.consumer.is_full());
        true
    }

    /// Everything that can happen happens.
    fn settle(&mut self) {
        while self.deliver() || self.a.stepper.run_until_idle() + self.b.stepper.run_until_idle() > 0 {}
    }

    /// The two have the same, by the same seqnos.
    #[track_caller]
    fn assert_same(&self) {
        let told = |world: &World| {
            let mut reader = Consumer::with(world, "reader", Default::default(), &[]);
            reader.control("enable_sync_writes", "true");
            reader.ask(&request(0)).expect("a stream");
            let changes =
                reader.told_everything().into_iter().filter(|line| line.starts_with(|c: char| c.is_ascii_digit()));
            changes.map(|line| line.chars().take(40).collect()).collect::<Vec<String>>()
        };
        assert_eq!(told(&self.b), told(&self.a));
        assert_eq!(self.b.high(), self.a.high());
        assert_eq!(self.b.bucket.failover_log(VB).ok(), self.a.bucket.failover_log(VB).ok());
    }
}

/// What a front end does with a message of a consumer.
fn hear(a: &World, replica: &str, link: &mut Link, frame: &Frame<'_>) {
    let features = Following::FEATURES;
    if !frame.header.magic.is_request() {
        let status = wire::client::status(frame).ok();
        let producer = link.producer.as_mut().expect("it is open");
        let opcode = Opcode::from_wire(frame.header.opcode).expect("one of ours");
        return producer.answered(opcode, status, frame.header.opaque);
    }
    let packet = Packet::parse(frame, features).expect("a message");
    let opcode = frame.header.opcode;
    let mut answer = |status, value: &[u8]| {
        let mut out = Vec::new();
        Reply { value: (value, &[]), ..Reply::new(opcode, status, packet.opaque) }.encode(&mut out);
        link.under_way.push_back(out);
    };
    match packet.message {
        Message::Open(open) => {
            let wake = Arc::new(Bedside::default());
            let producer = Producer::open(&a.bucket, &open, features, &a.registry, wake, a.now());
            link.producer = Some(producer.unwrap_or_else(|refusal| panic!("{refusal:?}")));
            answer(Status::Success, &[]);
        }
        Message::Control { name, value } => {
            let producer = link.producer.as_mut().expect("it is open");
            let agreed = producer.control(name, value);
            answer(agreed.map_or_else(|refusal| refusal.status, |()| Status::Success), &[]);
        }
        Message::StreamRequest(request) => {
            let producer = link.producer.as_mut().expect("it is open");
            match producer.stream_request(&packet, &request) {
                Ok(log) => {
                    a.bucket.replica_began(packet.vb, replica, request.start).expect("it is active");
                    answer(Status::Success, &log);
                }
                Err(refusal) => {
                    let to = refusal.rollback.map_or(Vec::new(), |to| to.0.to_be_bytes().to_vec());
                    answer(refusal.status, &to);
                }
            }
        }
        Message::CloseStream => {
            let _ = link.producer.as_mut().expect("it is open").close_stream(&packet, &mut Vec::new());
        }
        Message::BufferAck(bytes) => link.producer.as_mut().expect("it is open").buffer_ack(bytes),
        Message::SeqnoAck(seqno) => {
            assert!(link.producer.as_mut().expect("it is open").seqno_ack(&packet, seqno));
            // Once it has let go of the vBucket that is nothing to it.
            let _ = a.bucket.seqno_acked(packet.vb, replica, seqno);
        }
        other => panic!("{other:?}"),
    }
}

/// Documents, deletions and sync writes of all levels, some of them after the replica is there.
fn write_before(a: &World) {
    a.set("a", "1");
    a.set("b", "2");
    a.file();
    a.set("a", "3");
}

fn write_after(a: &World) {
    a.delete("b");
    a.set_durably("c", "4");
    a.set("d", "5");
}

fn commits(pair: &Pair) -> usize {
    let mut reader = Consumer::with(&pair.b, "commits", Default::default(), &[]);
    reader.control("enable_sync_writes", "true");
    reader.ask(&request(0)).expect("a stream");
    reader.told_everything().iter().filter(|line| line.contains("c! of") || line.contains("c=4")).count()
}

#[test]
fn a_replica_gets_everything_and_its_word_commits_durable_writes() {
    let mut pair = Pair::new();
    write_before(&pair.a);
    pair.connect();
    pair.settle();
    pair.assert_same();
    write_after(&pair.a);
    assert_eq!(commits(&pair), 0);
    pair.settle();
    assert_eq!(commits(&pair), 1, "the active heard that the replica has it on disk, and said so");
    pair.assert_same();
}

#[test]
fn a_connection_may_be_cut_before_any_message() {
    let whole = {
        let mut pair = Pair::new();
        write_before(&pair.a);
        pair.connect();
        while pair.deliver() {}
        write_after(&pair.a);
        pair.settle();
        pair.delivered
    };
    assert!(whole > 12, "{whole} messages");
    for cut in 0..whole {
        let mut pair = Pair::new();
        write_before(&pair.a);
        pair.connect();
        let mut has_written = false;
        loop {
            if pair.delivered == cut {
                pair.link = None;
                break;
            }
            if !pair.deliver() {
                match std::mem::replace(&mut has_written, true) {
                    false => write_after(&pair.a),
                    true if pair.a.stepper.run_until_idle() + pair.b.stepper.run_until_idle() == 0 => break,
                    true => {}
                }
            }
        }
        if !has_written {
            write_after(&pair.a);
        }
        pair.connect();
        pair.settle();
        assert_eq!(commits(&pair), 1, "cut before message {cut}");
        pair.assert_same();
    }
}

#[test]
fn a_replica_of_another_history_goes_back_and_follows() {
    let mut pair = Pair::new();
    // What it has is nobody else's: it was made while the node was active.
    pair.b.bucket.set_vb_state(VB, VbState::Active, None).expect("a role");
    pair.b.set("stray", "x");
    pair.b.set("another", "y");
    pair.b.file();
    pair.b.bucket.set_vb_state(VB, VbState::Replica, None).expect("a role");
    write_before(&pair.a);
    write_after(&pair.a);
    pair.connect();
    pair.settle();
    pair.assert_same();
    assert_eq!(commits(&pair), 1);
}

#[test]
fn a_stream_that_cannot_be_had_rests_ever_longer() {
    let mut pair = Pair::new();
    pair.a.bucket.set_vb_state(VB, VbState::Replica, None).expect("a role");
    pair.connect();
    let mut pauses = Vec::new();
    for _ in 0..10 {
        while pair.deliver() {}
        let link = pair.link.as_ref().expect("connected");
        let (_, place) = link.consumer.places().next().expect("one stream");
        let Place::Resting { until } = place else { panic!("{place:?}") };
        pauses.push(until - pair.b.now());
        pair.b.sim.clock.advance(until - pair.b.now());
    }
    assert!(pauses.windows(2).all(|two| two[0] <= two[1]) && pauses[9] > pauses[0] * 50, "{pauses:?}");
    // The coordinator has made up its mind.
    pair.a.bucket.set_vb_state(VB, VbState::Active, None).expect("a role");
    let link = pair.link.as_mut().expect("connected");
    link.consumer.want(&BTreeSet::from([VB]));
    pair.settle();
    assert_eq!(pair.link.as_ref().and_then(|link| link.consumer.places().next()), Some((VB, Place::Following)));
}

/// Goal: a replica without room stops its peer, loses nothing, and goes on. Method: a quota far below what is sent.
#[test]
fn a_replica_without_room_takes_no_more_until_it_has_some() {
    let (a, b) = (World::new(), World::with(persist::BucketSpec { quota_bytes: 1 << 20, ..spec() }));
    let mut pair = Pair::of(a, b);
    let value = "v".repeat(20_000);
    for n in 0..200 {
        pair.a.set(&format!("k{n}"), &value);
    }
    pair.connect();
    let mut waits = 0;
    while pair.b.high() < Seqno(200) {
        let Some(link) = pair.link.as_mut() else { panic!("cut") };
        if link.consumer.is_full() {
            waits += 1;
            assert!(waits < 1000, "stuck at {}", pair.b.high());
            let until = link.consumer.deadline();
            pair.b.stepper.run_until_idle();
            pair.b.sim.clock.advance(until.saturating_sub(pair.b.now()));
            pair.turn();
        } else if !pair.retry() && !pair.a.stepper.step() {
            pair.b.stepper.run_until_idle();
        }
    }
    assert!(waits > 0, "there was always room");
    pair.assert_same();
}

/// What became of a takeover, if anything.
#[derive(Default)]
struct Told(Mutex<Option<OpResult>>);

impl engine::Mailbox for Told {
    fn deliver(&self, _: Ticket, result: OpResult) {
        *self.0.lock().unwrap() = Some(result);
    }
}

impl Pair {
    /// `a` and `b` change places once `b` is active.
    fn begin_takeover(&mut self) -> Arc<Told> {
        let told = Arc::new(Told::default());
        let ticket = Ticket { slot: 0, generation: 0, request: 0 };
        let outcome = self.b.bucket.begin_takeover(VB, &|| Waiter::new(Arc::clone(&told) as _, ticket));
        assert!(matches!(outcome, Outcome::Pending), "{outcome:?}");
        if let Some(link) = &mut self.link {
            link.consumer.want(&BTreeSet::from([VB]));
        }
        told
    }

    fn states(&self) -> [VbState; 2] {
        [&self.a, &self.b].map(|world| world.bucket.vb_state(VB).expect("a vBucket"))
    }

    /// Each chain begins with who is active in it.
    fn two_chains() -> Vec<Vec<Option<String>>> {
        [["a", "b"], ["b", "a"]].map(|chain| chain.map(|name| Some(name.to_owned())).to_vec()).to_vec()
    }
}

/// Goal: a vBucket that moves is active on one node or on none, whoever moves it can always go on, and nothing that was written is
/// lost. Method: the connection is cut before any message, while documents are written wherever that is possible; then it is
/// decided anew as a coordinator does.
#[test]
fn a_takeover_may_be_cut_before_any_message() {
    let mut ends = BTreeSet::new();
    for cut in 0.. {
        let mut pair = Pair::new();
        pair.a.bucket.set_vb_state(VB, VbState::Active, Some(Pair::two_chains())).expect("a role");
        write_before(&pair.a);
        pair.connect();
        pair.settle();
        let told = pair.begin_takeover();
        let begun = pair.delivered;
        let mut written = Vec::new();
        let mut is_over = false;
        while pair.delivered - begun < cut && !is_over {
            match pair.states() {
                [VbState::Active, VbState::Active] => panic!("two are active"),
                [VbState::Active, _] if written.len() < 4 => {
                    written.push(format!("w{}", written.len()));
                    pair.a.set_durably(written.last().expect("one"), "x");
                }
                _ => {}
            }
            is_over = !pair.deliver() && pair.a.stepper.run_until_idle() + pair.b.stepper.run_until_idle() == 0;
        }
        ends.insert(pair.states().map(VbState::name));
        pair.link = None;
        pair.b.bucket.end_takeover(VB, "the one who moves it was interrupted");
        pair.a.stepper.run_until_idle();
        pair.b.stepper.run_until_idle();
        let first = told.0.lock().unwrap().take().expect("told by now");
        let has_moved = pair.states() == [VbState::Dead, VbState::Active];
        assert_eq!(first.is_ok(), has_moved, "cut {cut}");
        assert_ne!(pair.states()[1], VbState::Pending);
        if !has_moved {
            pair.a.bucket.set_vb_state(VB, VbState::Active, Some(Pair::two_chains())).expect("a role");
            let before = pair.a.bucket.failover_log(VB);
            pair.connect();
            let told = pair.begin_takeover();
            pair.settle();
            assert_eq!(told.0.lock().unwrap().take().map(|result| result.is_ok()), Some(true), "cut {cut}");
            assert_eq!(pair.b.bucket.failover_log(VB), before, "the history goes on");
        }
        assert_eq!(pair.states(), [VbState::Dead, VbState::Active], "cut {cut}");
        assert_eq!(pair.b.bucket.vbucket(VB).expect("a vBucket").log.record().topology, [Pair::two_chains().remove(1)]);
        // The other way round: what was under way is committed once the other has it.
        let mut back = Pair { a: pair.b, b: pair.a, replica: "a", link: None, delivered: 0, attends: false };
        back.b.bucket.set_vb_state(VB, VbState::Replica, None).expect("a role");
        back.connect();
        back.settle();
        back.assert_same();
        let mut reader = Consumer::with(&back.a, "reader", Default::default(), &[]);
        reader.ask(&request(0)).expect("a stream");
        let told = reader.told_everything();
        for key in &written {
            let of_it = told.iter().filter(|line| line.ends_with(&format!(" {key}=x"))).count();
            assert_eq!(of_it, 1, "cut {cut}: {key} of {told:?}");
        }
        if is_over {
            break;
        }
    }
    let expected =
        [["active", "replica"], ["active", "pending"], ["dead", "pending"], ["dead", "active"]].map(|states| states);
    assert_eq!(ends, BTreeSet::from(expected), "every state was met");
}

#[test]
fn a_takeover_that_was_called_off_does_not_happen_later() {
    let mut pair = Pair::new();
    pair.connect();
    pair.settle();
    let told = pair.begin_takeover();
    while pair.states() != [VbState::Dead, VbState::Pending] {
        assert!(pair.deliver() || pair.a.stepper.step() || pair.b.stepper.step(), "it never let go");
    }
    // "Be active" may be on its way.
    pair.b.bucket.end_takeover(VB, "patience has an end");
    pair.settle();
    assert_eq!(pair.states(), [VbState::Dead, VbState::Replica]);
    assert!(told.0.lock().unwrap().take().expect("told").is_err());
    let again = pair.begin_takeover();
    pair.b.bucket.set_vb_state(VB, VbState::Dead, None).expect("a role");
    assert!(again.0.lock().unwrap().take().expect("told").is_err(), "another role ends it too");
}

/// Goal: between a prepare that comes and the word that it is on disk nobody has to be woken. Method: two prepares, of which the
/// first comes while there is more to read; nothing runs but what the link does itself.
#[test]
fn who_has_nothing_more_to_read_puts_on_disk_what_came_and_says_so() {
    let mut pair = Pair::of(World::logged(), World::logged());
    pair.connect();
    pair.settle();
    for (key, leads) in [("a", false), ("b", true)] {
        pair.a.set_durably(key, "v");
        pair.turn();
        let link = pair.link.as_mut().expect("connected");
        let bytes: Vec<u8> = link.under_way.drain(..).flatten().collect();
        let (now, wakes) = (pair.b.now(), link.bedside.wakes());
        assert_eq!(link.consumer.receive(&bytes, now, leads).expect("it makes sense"), bytes.len());
        link.consumer.turn(now).expect("the peer is there");
        let said = link.consumer.output().clone();
        let acks = frames(&said).into_iter().filter(|bytes| frame(bytes).header.opcode == Opcode::DcpSeqnoAck as u8);
        assert_eq!((acks.count(), link.bedside.wakes()), (usize::from(leads), wakes), "{key}");
        assert!(link.consumer.may_sleep());
        pair.settle();
    }
    assert_eq!(pair.b.high(), pair.a.high());
    pair.assert_same();
}

/// Goal: an outcome, which nobody waits for, goes along with what somebody waits for, and by itself before long. Method: a
/// producer whose owner is at it when the outcome comes.
#[test]
fn an_outcome_goes_with_the_next_change_or_by_itself_after_a_pause() {
    let mut pair = Pair { attends: true, ..Pair::new() };
    pair.connect();
    pair.settle();
    let behind = |pair: &Pair| pair.a.high().0 - pair.b.high().0;
    pair.a.set_durably("a", "1");
    pair.settle();
    assert_eq!((pair.a.bucket.vbucket(VB).expect("a vBucket").sync_writes(), behind(&pair)), (0, 1));
    pair.a.set_durably("a", "2");
    pair.turn();
    let under_way = pair.link.as_ref().map(|link| link.under_way.len());
    assert_eq!(under_way, Some(3), "one marker for the outcome and the next prepare");
    pair.deliver();
    pair.settle();
    assert_eq!((pair.a.high(), behind(&pair)), (Seqno(4), 1), "the first outcome went along");
    pair.a.stepper.advance(Duration::from_millis(9));
    pair.settle();
    assert_eq!(behind(&pair), 1);
    let deadline = pair.link.as_ref().and_then(|link| link.producer.as_ref()?.deadline()).expect("it has one");
    assert_eq!(deadline, pair.a.now() + Duration::from_millis(1));
    pair.a.stepper.advance(Duration::from_millis(1));
    pair.settle();
    assert_eq!(behind(&pair), 0);
    pair.assert_same();
}

impl Pair {
    /// As [`Pair::deliver`], but what is not taken is handed over again.
    fn retry(&mut self) -> bool {
        self.turn();
        let Some(link) = &mut self.link else { return false };
        let Some(bytes) = link.under_way.pop_front() else { return false };
        if link.consumer.receive(&bytes, self.b.now(), false).expect("it makes sense") == 0 {
            link.under_way.push_front(bytes);
        }
        true
    }
}
