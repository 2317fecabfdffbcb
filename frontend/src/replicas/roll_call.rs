//! Finding out whether this node still is what its map says.
//!
//! ```text
//!     start with a map of several nodes: hold ──▶ ask the others ──▶ a majority knows no newer map: serve
//!                                                      └── one does: go by that, and ask again
//! ```
//! Whoever takes a node out of the cluster gives the new map to all that are left first. So of any majority of the nodes in the old
//! map one at least knows, and a node that asks a majority before it serves is not active where another one is. A node that runs by
//! itself has no map, and one that is the only one left in its map is a majority: they need not ask.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use parking_lot::Mutex;
use types::{VbId, VbState};

use super::caller::{Caller, Failure, Leash};
use crate::Shared;
use crate::cluster::{BucketShape, Map, NotGiven};

/// How long each answer of another node may take; it may be stopped, and others not.
const PATIENCE: Duration = Duration::from_secs(2);
/// Between two rounds of asking, at first and at most.
const PAUSE_MIN: Duration = Duration::from_millis(20);
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// 1. Whoever doubts is in `doubts` before the thread that asks looks whether anybody is.
#[derive(Default)]
pub(super) struct RollCall(Mutex<State>);

#[derive(Default)]
struct State {
    /// Buckets whose map may be out of date, and a newer one that somebody has, if so.
    doubts: BTreeMap<String, Option<Map>>,
    caller: Option<(Arc<Leash>, JoinHandle<()>)>,
    is_stopped: bool,
}

impl RollCall {
    /// The map of a bucket may be out of date: the others are asked.
    pub fn doubt(&self, shared: &Arc<Shared>, bucket: &str, newer: Option<Map>) {
        let mut state = self.0.lock();
        if state.is_stopped {
            return;
        }
        let known = state.doubts.entry(bucket.to_owned()).or_default();
        if newer.as_ref().map(|map| map.revision) > known.as_ref().map(|map| map.revision) {
            *known = newer;
        }
        if let Some((leash, thread)) = &state.caller
            && !thread.is_finished()
        {
            return leash.wake();
        }
        let start = || -> Result<(Arc<Leash>, JoinHandle<()>), String> {
            let caller = Caller::new(shared)?;
            let (leash, weak) = (caller.leash(), Arc::downgrade(shared));
            let ask = move || Asker { caller, pause: PAUSE_MIN }.run(&|| weak.upgrade());
            let thread = thread::Builder::new().name("roll-call".to_owned()).spawn(ask);
            Ok((leash, thread.map_err(|error| error.to_string())?))
        };
        match start() {
            Ok(caller) => state.caller = Some(caller),
            Err(why) => tracing::error!(bucket, "the other nodes cannot be asked for their map: {why}"),
        }
    }

    /// Whoever decides has spoken.
    pub fn forget(&self, bucket: &str) {
        self.0.lock().doubts.remove(bucket);
    }

    pub fn stop(&self) {
        let caller = {
            let mut state = self.0.lock();
            state.is_stopped = true;
            state.caller.take()
        };
        if let Some((leash, thread)) = caller {
            leash.stop();
            if thread.join().is_err() {
                tracing::error!("the thread that asks other nodes for their map panicked");
            }
        }
    }

    fn doubts(&self) -> Vec<(String, Option<Map>)> {
        self.0.lock().doubts.iter().map(|(bucket, newer)| (bucket.clone(), newer.clone())).collect()
    }

    /// Nothing newer was heard of meanwhile.
    fn settle(&self, bucket: &str, seen: &Option<Map>) {
        let mut state = self.0.lock();
        if state.doubts.get(bucket) == Some(seen) {
            state.doubts.remove(bucket);
        }
    }
}

/// The thread. It ends when nobody doubts any more.
struct Asker {
    caller: Caller,
    pause: Duration,
}

impl Asker {
    fn run(mut self, shared: &dyn Fn() -> Option<Arc<Shared>>) {
        let mut last_word = String::new();
        loop {
            let Some(shared) = shared() else { return };
            let roll_call = &shared.replicas.roll_call;
            for (bucket, newer) in roll_call.doubts() {
                match self.resolve(&shared, &bucket, newer.clone()) {
                    Ok(()) => roll_call.settle(&bucket, &newer),
                    Err(Failure::Stopped) => return,
                    Err(why) => {
                        if let Some(bucket) = shared.engine.bucket(&bucket) {
                            bucket.held_because(why.to_string());
                        }
                        let word = format!("bucket {bucket} is not served until this node knows its place: {why}");
                        if word != last_word {
                            tracing::warn!("{word}");
                            last_word = word;
                        }
                    }
                }
            }
            {
                // Under the lock: who doubts from now on starts another.
                let mut state = roll_call.0.lock();
                if state.doubts.is_empty() {
                    state.caller = None;
                    return;
                }
            }
            drop(shared);
            if self.caller.rest(self.pause).is_err() {
                return;
            }
            self.pause = (self.pause * 2).min(PAUSE_MAX);
        }
    }

    /// Goes by the newest map there is, and serves once a majority knows no newer one.
    fn resolve(&mut self, shared: &Arc<Shared>, name: &str, mut newer: Option<Map>) -> Result<(), Failure> {
        let Some(bucket) = shared.engine.bucket(name) else { return Ok(()) };
        loop {
            let (map, this) = match shared.cluster.map_of(name) {
                Some((map, Some(this))) => (map, this),
                out => {
                    if let Some((map, _)) = out {
                        // The map is on disk as soon as it counts; what a crash kept from being on disk goes by it.
                        give_up_what_is_not_ours(&bucket, &map, None);
                    }
                    bucket.release();
                    return Ok(());
                }
            };
            if newer.as_ref().is_none_or(|newer| newer.revision <= map.revision) {
                newer = self.ask_others(&map, this)?;
            }
            let Some(next) = newer.take() else {
                give_up_what_is_not_ours(&bucket, &map, Some(this));
                if bucket.release() {
                    tracing::info!(bucket = name, rev = map.revision.rev, "a majority goes by the same map: serving");
                }
                return Ok(());
            };
            let place = next.place_of(&map.nodes[this].name());
            match place {
                Some(_) => tracing::info!(bucket = name, rev = next.revision.rev, "another node has a newer map"),
                None => {
                    tracing::warn!(bucket = name, "this node was taken out of the cluster: it serves nothing of it")
                }
            }
            // First: what a restart finds goes with the older map, and that is asked about again.
            give_up_what_is_not_ours(&bucket, &next, place);
            let shape = BucketShape::of(&bucket.spec());
            match shared.cluster.give(&shape, next.revision, &next.document(place)) {
                // By the coordinator, meanwhile.
                Ok(()) | Err(NotGiven::Stale { .. }) => shared.replicas.look(),
                Err(why) => return Err(Failure::Login(format!("the newer map is of no use: {why}"))),
            }
        }
    }

    /// A newer map, if another node has one; `None` if a majority has none.
    fn ask_others(&mut self, map: &Map, this: usize) -> Result<Option<Map>, Failure> {
        let mut heard = 1;
        let (mut trouble, mut silent) = (Vec::new(), Vec::new());
        for (_, node) in map.nodes.iter().enumerate().filter(|(at, _)| *at != this) {
            let peer = node.name();
            let asked = self.caller.log_in(&peer, &map.bucket, PATIENCE);
            match asked.and_then(|mut wire| self.caller.ask_for_map(&mut wire, PATIENCE)) {
                Ok(theirs) if theirs.uuid != map.uuid => {
                    trouble.push(format!("{peer} has another bucket of that name"))
                }
                Ok(theirs) if theirs.revision > map.revision => return Ok(Some(theirs)),
                Ok(_) => heard += 1,
                Err(Failure::Stopped) => return Err(Failure::Stopped),
                Err(why) => {
                    trouble.push(format!("{peer}: {why}"));
                    silent.push(peer);
                }
            }
        }
        let count = map.nodes.len();
        if 2 * heard > count {
            return Ok(None);
        }
        let here = map.nodes[this].name();
        let command = |gone: &String| format!("settee cluster failover {gone} --kv {here} --bucket {}", map.bucket);
        let commands: Vec<_> = silent.iter().map(command).collect();
        let mut word = format!("of {count} nodes {heard} answer, it takes {} ({})", count / 2 + 1, trouble.join("; "));
        if !commands.is_empty() {
            word += &format!("; for a node that is gone for good: {}", commands.join(", "));
        }
        Err(Failure::Login(word))
    }
}

/// What is active here and by the map elsewhere is not active any more. Nothing becomes active by this: that takes a coordinator.
fn give_up_what_is_not_ours(bucket: &engine::Bucket, map: &Map, this: Option<usize>) {
    for (vb, chain) in (0u16..).zip(&map.chains) {
        let moves_here = map.forward.get(&vb).is_some_and(|next| this.is_some() && next[0] == this);
        let is_ours = this.is_some() && chain[0] == this || moves_here;
        if is_ours || bucket.vb_state(VbId(vb)) != Some(VbState::Active) {
            continue;
        }
        let follows = this.is_some_and(|this| map.followers(vb).any(|at| at == this));
        let state = if follows { VbState::Replica } else { VbState::Dead };
        if let Err(error) = bucket.set_vb_state(VbId(vb), state, None) {
            tracing::error!(bucket = bucket.name(), vb, "it is active elsewhere, and cannot become {state:?}: {error}");
        }
    }
}
