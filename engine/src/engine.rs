//! All buckets of this node.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use env::Env;
use persist::{BucketSpec, Damages, Drained, Store, StoreError, Turn};
use scheduler::Pools;
use types::rank::{Rank, RwLock};

use crate::bucket::Bucket;
use crate::warm_up::Recovered;

/// How buckets behave; the same for all.
#[derive(Clone, Debug)]
pub struct Options {
    /// This node's name in replication chains.
    pub node: String,
    /// Between two rounds of the pager.
    pub pager_interval: Duration,
    /// From this much of the quota on, what the file has leaves memory,
    pub memory_high_percent: u8,
    /// until no more than this is in use.
    pub memory_low_percent: u8,
    /// From this much of the quota on, writes are put off if nothing can leave.
    pub memory_refuse_percent: u8,
    /// For sync writes that name none.
    pub durability_timeout: Duration,
    /// How long a start may go on reading what is in the files before it serves them, so that damage in them stops it.
    pub loading_grace: Duration,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            node: "settee@127.0.0.1".to_owned(),
            pager_interval: Duration::from_secs(600),
            memory_high_percent: 85,
            memory_low_percent: 75,
            memory_refuse_percent: 95,
            durability_timeout: Duration::from_secs(30),
            loading_grace: Duration::ZERO,
        }
    }
}

/// The buckets of a node.
///
/// 1. A bucket in the registry serves all it ever acknowledged, from the file what is not in memory yet.
pub struct Engine {
    env: Env,
    pools: Arc<Pools>,
    store: Store,
    options: Options,
    buckets: RwLock<BTreeMap<String, Arc<Bucket>>>,
}

impl Engine {
    /// No bucket is served before [`Engine::warm_up`].
    pub fn new(env: &Env, pools: &Arc<Pools>, store: Store, options: Options) -> Engine {
        Engine {
            env: env.clone(),
            pools: Arc::clone(pools),
            store,
            options,
            buckets: RwLock::ranked(Rank::Buckets, BTreeMap::new()),
        }
    }

    /// Begins to serve what the store recovered: sync writes that were under way are committed, documents are loaded behind
    /// the scenes. From here on a vBucket changes only because a client, a peer or the clock asked. Damage met so far is an
    /// error, all of it; then nothing was changed. Blocks for `loading_grace` at most, beside the reading of headers.
    pub fn warm_up(&self) -> Result<Vec<Recovered>, StoreError> {
        let (mut found, mut damages) = (Vec::new(), Vec::new());
        for store in self.store.buckets() {
            let bucket = Bucket::new(&self.env, &self.pools, self.options.clone(), store, self.store.was_clean());
            match bucket.recover() {
                Ok(recovered) => found.push((bucket, recovered)),
                // The others are looked at too, so that one start shows all of it.
                Err(StoreError::Damaged(more)) => damages.extend(more.0),
                Err(other) => return Err(other),
            }
        }
        found.iter().for_each(|(bucket, _)| bucket.warm_up());
        if !self.options.loading_grace.is_zero() {
            let deadline = self.env.clock.monotonic() + self.options.loading_grace;
            let met = found.iter().filter_map(|(bucket, _)| bucket.load_until(deadline).err());
            damages.extend(met.flat_map(|more| more.0));
        }
        if !damages.is_empty() {
            return Err(StoreError::Damaged(Damages(damages)));
        }
        let mut summary = Vec::new();
        for (bucket, recovered) in found {
            bucket.start();
            self.buckets.write().insert(bucket.name().to_owned(), bucket);
            summary.push(recovered);
        }
        Ok(summary)
    }

    pub fn bucket(&self, name: &str) -> Option<Arc<Bucket>> {
        self.buckets.read().get(name).cloned()
    }

    /// In order of their names.
    pub fn list(&self) -> Vec<Arc<Bucket>> {
        self.buckets.read().values().cloned().collect()
    }

    pub fn store(&self) -> &Store {
        &self.store
    }

    /// For a thread that serves many clients in turn.
    pub fn begin_turn(&self) -> Turn<'_> {
        self.store.begin_turn()
    }

    /// Durable when it returns.
    pub fn create_bucket(&self, spec: BucketSpec) -> Result<Arc<Bucket>, StoreError> {
        let store = self.store.create_bucket(spec)?;
        let bucket = Bucket::new(&self.env, &self.pools, self.options.clone(), store, true);
        bucket.start();
        self.buckets.write().insert(bucket.name().to_owned(), Arc::clone(&bucket));
        Ok(bucket)
    }

    /// Gives a bucket other settings; durable, and in force, when it returns.
    pub fn change_bucket(&self, spec: BucketSpec) -> Result<(), StoreError> {
        let name = spec.name.clone();
        self.store.change_bucket(spec)?;
        // Under the lock, so that of two changes at once the later one stays in force.
        if let Some(bucket) = self.buckets.write().get(&name) {
            bucket.adopt_spec();
        }
        Ok(())
    }

    /// The name is free, and the files are gone, when it returns. Requests under way are answered: sync writes with
    /// *ambiguous*.
    pub fn delete_bucket(&self, name: &str) -> Result<(), StoreError> {
        let Some(bucket) = self.buckets.write().remove(name) else {
            return Err(StoreError::NoSuchBucket(name.to_owned()));
        };
        bucket.stop("the bucket was deleted");
        self.store.delete_bucket(name)
    }

    /// Takes no more writes, lets sync writes under way come to their end as far as the disk allows, and writes everything
    /// out. Whoever still waits after that is told that the outcome is unknown. Blocks; needs the pools' threads.
    pub fn drain(&self) -> Drained {
        let buckets = self.list();
        buckets.iter().for_each(|bucket| bucket.close());
        let drained = self.store.drain();
        buckets.iter().for_each(|bucket| bucket.stop("the server stops"));
        drained
    }
}
