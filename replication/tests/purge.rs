//! S21. Goal: whoever follows a vBucket, from wherever, ends up with just the documents that it has, however often deletions are
//! purged from its file. Method: followers at random places, who come and go and read as they like, beside changes, flushes and
//! compactions that purge, in an order that a seed decides; each keeps what it is told, and forgets it only when it must.

mod common;

use std::collections::BTreeMap;

use common::*;
use persist::{Purge, WarmUp};
use types::{Seqno, VbUuid};
use wire::Status;
use wire::dcp::StreamRequest;

type Docs = BTreeMap<String, String>;

/// Somebody who follows, or does not at the moment.
#[derive(Default)]
struct Follower<'w> {
    docs: Docs,
    seqno: u64,
    /// Of which it may have only a part.
    snapshot: (u64, u64),
    uuid: VbUuid,
    connection: Option<Consumer<'w>>,
    has_just_come: bool,
    told_to_forget: u32,
}

impl<'w> Follower<'w> {
    fn forget(&mut self) {
        (self.docs, self.seqno, self.snapshot) = (Docs::new(), 0, (0, 0));
        self.told_to_forget += 1;
    }

    fn connect(&mut self, world: &'w World, name: &str) {
        let mut connection = Consumer::with(world, name, Default::default(), &[]);
        loop {
            let (snap_start, snap_end) = (Seqno(self.snapshot.0), Seqno(self.snapshot.1));
            match connection.ask(&StreamRequest { uuid: self.uuid, snap_start, snap_end, ..request(self.seqno) }) {
                Ok(_) => break,
                Err(refusal) => {
                    assert_eq!(refusal.status, Status::Rollback);
                    assert!(self.seqno > 0, "with nothing one is always welcome");
                    self.forget();
                }
            }
        }
        self.uuid = world.uuid();
        self.has_just_come = true;
        self.connection = Some(connection);
    }

    /// False: the stream has ended.
    fn take(&mut self, told: &[String]) -> bool {
        for line in told {
            if line.starts_with("end: ") {
                assert_eq!(line, "end: Rollback");
                self.forget();
                self.connection = None;
                return false;
            }
            let (first, rest) = line.split_once(' ').expect("two words");
            if matches!(first, "memory" | "disk") {
                let (start, end) = rest.split_once("..").expect("a range");
                let (start, end) = (start.parse::<u64>().unwrap(), end.parse::<u64>().unwrap());
                // Whoever comes again in the middle of one goes on with a longer one.
                let is_first = std::mem::take(&mut self.has_just_come);
                assert!(
                    is_first || self.seqno == self.snapshot.1,
                    "a snapshot is whole before the next begins: {line}"
                );
                self.snapshot = (start.min(self.seqno), end);
                continue;
            }
            let seqno = first.parse::<u64>().expect("a seqno");
            assert!(seqno > self.seqno && seqno <= self.snapshot.1, "{line} after {}", self.seqno);
            self.seqno = seqno;
            match (rest.split_once('='), rest.split_once(' ')) {
                (Some((key, value)), _) => drop(self.docs.insert(key.to_owned(), value.to_owned())),
                (None, Some((key, "deleted"))) => drop(self.docs.remove(key)),
                _ => panic!("{line}"),
            }
            if seqno == self.snapshot.1 {
                self.snapshot.0 = seqno;
            }
        }
        true
    }
}

struct Dice(u64);

impl Dice {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % n
    }
}

fn purge(dice: &mut Dice, high: u64) -> Purge {
    match dice.below(2) {
        0 => Purge { all: true, ..Purge::default() },
        _ => Purge { before_s: Some(u32::MAX), upto: Some(Seqno(dice.below(high + 1))), ..Purge::default() },
    }
}

/// The highest seqno of the file is there to be found, whatever was purged.
fn assert_high_stays(world: &World) {
    let mut last = Seqno(0);
    let all = WarmUp { tombstones: true, prove: true };
    let file = world.bucket.store().warm_up(VB, all, &mut |_, _| false, &mut |item| last = last.max(item.seqno()));
    assert_eq!(file.expect("a whole file").map_or(Seqno(0), |file| file.high), last);
}

#[test]
fn nobody_misses_a_deletion_that_was_purged() {
    let (mut forgot, mut purged) = (0, 0);
    for seed in 0..60 {
        let world = World::new();
        let mut dice = Dice(seed * 977 + 1);
        let mut docs = Docs::new();
        let mut followers: Vec<Follower<'_>> = (0..4).map(|_| Follower::default()).collect();
        for n in 0..400 {
            let key = format!("k{}", dice.below(12));
            match dice.below(20) {
                0..6 => {
                    world.set(&key, &n.to_string());
                    docs.insert(key, n.to_string());
                }
                6..9 if docs.remove(&key).is_some() => world.delete(&key),
                9 => world.file(),
                10 => {
                    let purge = purge(&mut dice, world.high().0);
                    world.bucket.store().compact(VB, purge, Box::new(drop));
                }
                11..14 => (0..dice.below(6)).for_each(|_| _ = world.stepper.step()),
                14..16 => {
                    let i = dice.below(4) as usize;
                    match followers[i].connection.take() {
                        Some(connection) => drop(connection),
                        None => followers[i].connect(&world, &format!("f{i}")),
                    }
                }
                _ => {
                    let follower = &mut followers[dice.below(4) as usize];
                    if let Some(connection) = &mut follower.connection {
                        let (told, _) = connection.pull(1 + dice.below(400) as usize);
                        follower.take(&told);
                    }
                }
            }
        }
        world.file();
        assert_high_stays(&world);
        purged += world.bucket.store().purge_seqno(VB).0;
        for (i, follower) in followers.iter_mut().enumerate() {
            while follower.seqno < world.high().0 {
                if follower.connection.is_none() {
                    follower.connect(&world, &format!("f{i}"));
                }
                let told = follower.connection.as_mut().expect("connected").told_everything();
                follower.take(&told);
            }
            assert_eq!(follower.docs, docs, "seed {seed}, follower {i}");
            forgot += follower.told_to_forget;
        }
    }
    assert!(forgot > 20 && purged > 0, "{forgot} {purged}: the case was hardly met");
}

/// A replica that was left behind by a purge is told to forget, also if the purge comes after it was let in.
#[test]
fn a_stream_from_before_a_purge_is_refused_or_ended() {
    for late in [false, true] {
        let world = World::new();
        world.set("a", "1");
        world.set("b", "2");
        world.file();
        world.delete("a");
        world.set("c", "3");
        world.file();
        let mut consumer = Consumer::new(&world);
        let compact = || {
            world.bucket.store().compact(VB, Purge { all: true, ..Purge::default() }, Box::new(drop));
            world.file();
            assert_eq!(world.bucket.store().purge_seqno(VB), Seqno(3));
        };
        let uuid = world.uuid();
        if !late {
            compact();
            let refusal = consumer.ask(&StreamRequest { uuid, ..request(2) }).expect_err("it would miss a deletion");
            assert_eq!((refusal.status, refusal.rollback), (Status::Rollback, Some(Seqno(0))));
            consumer.stream_from(3);
            assert_eq!(consumer.told_everything(), ["disk 3..4", "4 c=3"], "what it has seen it does not miss");
        } else {
            consumer.stream_from(2);
            compact();
            assert_eq!(consumer.told_everything(), ["end: Rollback"]);
        }
    }
}
