//! The producers of a node as others see them: for statistics, and so that a consumer that connects again takes the place
//! of its own dead connection.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock, Weak};

use engine::Bucket;
use types::rank::{Mutex, Rank};
use types::{Seqno, VbId};

use crate::inbox::{StreamNumber, Wake};
use crate::stream::StreamState;

/// What can be seen of a stream. Written by its owner, read by anybody.
#[derive(Debug)]
pub struct StreamFace {
    pub vb: VbId,
    pub start: Seqno,
    pub end: Seqno,
    state: AtomicU8,
    sent: AtomicU64,
    items: AtomicU64,
    backfill_left: AtomicU64,
    backfills: AtomicU64,
    acked: AtomicU64,
}

impl StreamFace {
    pub(crate) fn new(vb: VbId, start: Seqno, end: Seqno) -> StreamFace {
        StreamFace {
            vb,
            start,
            end,
            state: AtomicU8::new(StreamState::Waiting as u8),
            sent: AtomicU64::new(start.0),
            items: AtomicU64::new(0),
            backfill_left: AtomicU64::new(0),
            backfills: AtomicU64::new(0),
            acked: AtomicU64::new(0),
        }
    }

    pub fn state(&self) -> StreamState {
        StreamState::ALL[usize::from(self.state.load(Relaxed))]
    }

    pub(crate) fn set_state(&self, state: StreamState) {
        if state == StreamState::Backfilling {
            self.backfills.fetch_add(1, Relaxed);
        }
        self.state.store(state as u8, Relaxed);
    }

    /// The last seqno the consumer was told of.
    pub fn sent(&self) -> Seqno {
        Seqno(self.sent.load(Relaxed))
    }

    pub(crate) fn note_sent(&self, seqno: Seqno, items: u64) {
        self.sent.store(seqno.0, Relaxed);
        self.items.fetch_add(items, Relaxed);
    }

    pub fn items_sent(&self) -> u64 {
        self.items.load(Relaxed)
    }

    /// How many seqnos its consumer is behind.
    pub fn items_left(&self, bucket: &Bucket) -> u64 {
        let high = bucket.vbucket(self.vb).map_or(0, |vb| vb.log.marks.high().0);
        high.min(self.end.0).saturating_sub(self.sent().0)
    }

    /// Entries of the file that are still to be read.
    pub fn backfill_left(&self) -> u64 {
        self.backfill_left.load(Relaxed)
    }

    pub(crate) fn set_backfill_left(&self, entries: u64) {
        self.backfill_left.store(entries, Relaxed);
    }

    /// How often it had to go to the file.
    pub fn backfills(&self) -> u64 {
        self.backfills.load(Relaxed)
    }

    /// The highest prepare that a replica said it has.
    pub fn acked(&self) -> Seqno {
        Seqno(self.acked.load(Relaxed))
    }

    pub(crate) fn set_acked(&self, seqno: Seqno) {
        self.acked.fetch_max(seqno.0, Relaxed);
    }
}

/// What can be seen of a producer.
pub struct Face {
    pub bucket: String,
    pub name: String,
    wake: Arc<dyn Wake>,
    is_replaced: AtomicBool,
    pub(crate) unacked_bytes: AtomicU64,
    pub(crate) room_bytes: AtomicU64,
    pub(crate) bytes_sent: AtomicU64,
    /// The node whose replicas it is for, if it is.
    pub(crate) replica: OnceLock<String>,
    pub(crate) streams: Mutex<BTreeMap<StreamNumber, Arc<StreamFace>>>,
}

impl Face {
    pub(crate) fn new(bucket: String, name: String, wake: Arc<dyn Wake>) -> Face {
        Face {
            bucket,
            name,
            wake,
            is_replaced: AtomicBool::new(false),
            unacked_bytes: AtomicU64::new(0),
            room_bytes: AtomicU64::new(0),
            bytes_sent: AtomicU64::new(0),
            replica: OnceLock::new(),
            streams: Mutex::ranked(Rank::RunQueue, BTreeMap::new()),
        }
    }

    /// The same consumer has come again.
    pub(crate) fn is_replaced(&self) -> bool {
        self.is_replaced.load(Relaxed)
    }

    fn replace(&self) {
        self.is_replaced.store(true, Relaxed);
        self.wake.wake();
    }

    pub fn unacked_bytes(&self) -> u64 {
        self.unacked_bytes.load(Relaxed)
    }

    /// What the consumer has room for; 0: it did not say.
    pub fn room_bytes(&self) -> u64 {
        self.room_bytes.load(Relaxed)
    }

    pub fn bytes_sent(&self) -> u64 {
        self.bytes_sent.load(Relaxed)
    }

    pub fn streams(&self) -> Vec<Arc<StreamFace>> {
        self.streams.lock().values().cloned().collect()
    }
}

/// See [`Registry::totals`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    pub producers: u64,
    pub streams: u64,
    pub items_left: u64,
    pub backfill_left: u64,
    pub unacked_bytes: u64,
    pub bytes_sent: u64,
}

/// The producers there are, by bucket and name.
pub struct Registry {
    producers: Mutex<BTreeMap<(String, String), Weak<Face>>>,
}

impl Default for Registry {
    fn default() -> Registry {
        Registry { producers: Mutex::ranked(Rank::RunQueue, BTreeMap::new()) }
    }
}

impl Registry {
    /// A producer is there; one of the same name in the same bucket has to go.
    pub(crate) fn enter(&self, face: &Arc<Face>) {
        let before = {
            let mut producers = self.producers.lock();
            producers.retain(|_, face| face.strong_count() > 0);
            producers.insert((face.bucket.clone(), face.name.clone()), Arc::downgrade(face))
        };
        if let Some(before) = before.and_then(|face| face.upgrade()) {
            before.replace();
        }
    }

    /// Sums over the producers of a bucket.
    pub fn totals(&self, bucket: &Bucket) -> Totals {
        let mut totals = Totals::default();
        for producer in self.of_bucket(bucket.name()) {
            totals.producers += 1;
            totals.bytes_sent += producer.bytes_sent();
            totals.unacked_bytes += producer.unacked_bytes();
            for stream in producer.streams() {
                totals.streams += 1;
                totals.items_left += stream.items_left(bucket);
                totals.backfill_left += stream.backfill_left();
            }
        }
        totals
    }

    /// How many seqnos each node that has replicas of the bucket has yet to be sent.
    pub fn replica_lag(&self, bucket: &Bucket) -> BTreeMap<String, u64> {
        let mut lag = BTreeMap::new();
        for producer in self.of_bucket(bucket.name()) {
            let Some(node) = producer.replica.get() else { continue };
            let left = producer.streams().iter().map(|stream| stream.items_left(bucket)).sum::<u64>();
            *lag.entry(node.clone()).or_default() += left;
        }
        lag
    }

    /// Those of a bucket, in order of name.
    pub fn of_bucket(&self, bucket: &str) -> Vec<Arc<Face>> {
        let producers = self.producers.lock();
        let those = producers.iter().filter(|((of, _), _)| of == bucket);
        those.filter_map(|(_, face)| face.upgrade()).collect()
    }
}
