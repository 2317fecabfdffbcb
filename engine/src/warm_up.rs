//! From files to memory, before clients are let in.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc;
use std::time::Duration;

use persist::{StoreError, WarmUp};
use scheduler::{PoolKind, Pools};
use types::{Item, VbId};

use crate::bucket::Bucket;

/// What a bucket was found to hold.
#[derive(Clone, Debug, Default)]
pub struct Recovered {
    pub bucket: String,
    pub vbuckets: usize,
    pub documents: u64,
    /// In the files; they are not loaded.
    pub tombstones: u64,
    /// Documents whose value stayed in the file because memory was short.
    pub without_value: u64,
    /// Sync writes that were under way and are now committed.
    pub recommitted: u64,
    /// Sum of the vBuckets' high seqnos.
    pub seqnos: u64,
    pub took: Duration,
}

/// How many threads load at once.
const LOADERS: usize = 4;

impl Bucket {
    /// Loads every vBucket that has a file, several at a time.
    pub(crate) fn warm_up(self: &Arc<Bucket>, pools: &Pools) -> Result<Recovered, StoreError> {
        let began = self.env.clock.monotonic();
        let files = Arc::new(self.store.recovered());
        let mut recovered = Recovered { bucket: self.name().to_owned(), vbuckets: files.len(), ..Recovered::default() };
        let loader = Arc::new(Loader { next: AtomicUsize::new(0), without_value: AtomicU64::new(0) });
        let (send, receive) = mpsc::channel();
        let ids: Arc<Vec<VbId>> = Arc::new(files.iter().map(|file| file.vb).collect());
        let helpers = if self.options.parallel_warm_up { LOADERS.min(ids.len()) } else { 0 };
        for _ in 0..helpers {
            let (me, loader, ids, send) = (Arc::clone(self), Arc::clone(&loader), Arc::clone(&ids), send.clone());
            pools.execute(PoolKind::Reader, "warm_up", move || {
                let _ = send.send(loader.run(&me, &ids));
            });
        }
        drop(send);
        if helpers == 0 {
            loader.run(self, &ids)?;
        }
        for result in receive {
            result?;
        }
        for file in files.iter() {
            let vb = &self.vbuckets[usize::from(file.vb.0)];
            recovered.seqnos += file.high.0;
            recovered.tombstones += file.tombstones;
            recovered.documents += vb.table.counts.live.load(Relaxed) as u64;
            recovered.recommitted += vb.table.counts.prepares.load(Relaxed) as u64;
            vb.retrack();
        }
        recovered.without_value = loader.without_value.load(Relaxed);
        recovered.took = self.env.clock.monotonic().saturating_sub(began);
        let _ = self.warm_up.set(recovered.clone());
        Ok(recovered)
    }

    fn load(&self, vb: VbId, without_value: &AtomicU64) -> Result<(), StoreError> {
        let home = &self.vbuckets[usize::from(vb.0)];
        let mut each = |item: Item| {
            let mut slot = home.table.lock(item.key());
            if item.is_committed() {
                if !item.resident() {
                    without_value.fetch_add(1, Relaxed);
                }
                slot.put_committed(item.clone(), true);
            } else {
                slot.put_prepare(item.clone());
            }
        };
        let options = WarmUp { tombstones: false };
        self.store.warm_up(
            vb,
            options,
            &mut |_, bytes| self.memory_used() + bytes as u64 <= self.high_mark(),
            &mut each,
        )
    }
}

struct Loader {
    next: AtomicUsize,
    without_value: AtomicU64,
}

impl Loader {
    fn run(&self, bucket: &Bucket, ids: &[VbId]) -> Result<(), StoreError> {
        while let Some(vb) = ids.get(self.next.fetch_add(1, Relaxed)) {
            bucket.load(*vb, &self.without_value)?;
        }
        Ok(())
    }
}
