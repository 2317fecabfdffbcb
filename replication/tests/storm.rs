//! Goal: no change lies unread while its consumer sleeps. Method: real threads write to several vBuckets while a consumer
//! does nothing but sleep until it is woken, look, and sleep again; a wake that is lost is a consumer that hears nothing.

mod common;

use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, SyncSender};
use std::thread;
use std::time::Duration;

use engine::{Bucket, Engine, Op, Options, Outcome, Request, StoreMode};
use persist::Store;
use replication::{Producer, Pulled, Registry, Wake};
use scheduler::{PoolConfig, Pools};
use types::{Cas, Datatype, KeyBuf, VbId};
use wire::dcp::{Message, Open, OpenFlags, Packet};
use wire::{FeatureSet, FrameReader, Next, Side};

/// Like an event descriptor: it remembers one ring.
struct Doorbell(SyncSender<()>);

impl Wake for Doorbell {
    fn wake(&self) {
        let _ = self.0.try_send(());
    }
}

/// Only so that a test that would hang fails instead.
const PATIENCE: Duration = Duration::from_secs(60);

fn write(bucket: &Bucket, vb: VbId, key: &str, value: &[u8]) {
    let key = KeyBuf::in_default_collection(key.as_bytes()).expect("a key");
    let op = Op::Store { mode: StoreMode::Set, flags: 0, expiry: 0, datatype: Datatype::RAW, value };
    let (durability, accepts) = (None, Datatype(7));
    let request = Request { vb, key: key.as_key(), cas: Cas(0), durability, preserve_expiry: false, accepts, op };
    let waiter = || unreachable!("a plain write does not wait");
    assert!(matches!(bucket.execute(&request, &waiter), Outcome::Done(Ok(_))));
}

/// Hears changes until it has heard the last one of each vBucket.
fn listen(producer: &mut Producer, rung: &Receiver<()>, last: u64, vbuckets: u16) {
    let mut heard = vec![0; usize::from(vbuckets)];
    while heard.iter().any(|seqno| *seqno < last) {
        rung.recv_timeout(PATIENCE).unwrap_or_else(|_| panic!("nothing was heard any more: {heard:?}"));
        let mut out = Vec::new();
        while producer.pull(&mut out, 64 << 10, Duration::ZERO) != Pulled::Dry {}
        let mut at = 0;
        while let Ok(Next::Frame(frame)) = FrameReader::new(Side::Client).next(&out[at..]) {
            let packet = Packet::parse(&frame, FeatureSet::EMPTY).expect("a message");
            if let Message::Mutation(mutation) = packet.message {
                let before = &mut heard[usize::from(packet.vb.0)];
                assert!(mutation.seqno.0 > *before, "in order");
                *before = mutation.seqno.0;
            }
            at += frame.frame_len();
        }
    }
}

#[test]
fn whoever_sleeps_until_it_is_woken_hears_of_every_change() {
    const VBUCKETS: u16 = 4;
    const ROUNDS: u64 = 300;
    const BURST: u64 = 5;
    let dir = tempfile::tempdir().expect("a directory");
    let env = env::os::env();
    let pools = Pools::start(&env, &PoolConfig::default());
    let store = Store::open(&env, &pools, dir.path(), persist::Options::default()).expect("opens");
    let engine = Engine::new(&env, &pools, store, Options::default());
    engine.warm_up().expect("warms up");
    let bucket = engine.create_bucket(persist::BucketSpec { vbuckets: VBUCKETS, ..common::spec() }).expect("a bucket");
    let (ring, rung) = mpsc::sync_channel(1);
    let open = Open { flags: OpenFlags::PRODUCER, name: b"storm", details: b"" };
    let wake = Arc::new(Doorbell(ring));
    let registry = Registry::default();
    let mut producer = Producer::open(&bucket, &open, FeatureSet::EMPTY, &registry, wake.clone(), Duration::ZERO)
        .unwrap_or_else(|refusal| panic!("{refusal:?}"));
    for vb in 0..VBUCKETS {
        let request = common::request(0);
        let packet = Packet { vb: VbId(vb), ..Packet::new(Message::StreamRequest(request)) };
        producer.stream_request(&packet, &request).expect("a stream");
    }
    wake.wake();
    // Short bursts with the consumer asleep in between: each burst races with a consumer on its way to sleep.
    for round in 1..=ROUNDS {
        thread::scope(|scope| {
            for vb in 0..VBUCKETS {
                let bucket = &bucket;
                scope.spawn(move || (0..BURST).for_each(|n| write(bucket, VbId(vb), &format!("k{n}"), b"v")));
            }
            listen(&mut producer, &rung, round * BURST, VBUCKETS);
        });
    }
    drop(producer);
    engine.drain();
}
