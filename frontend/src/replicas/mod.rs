//! The replicas of this node: which active vBuckets elsewhere they follow, and the connections that takes.
//!
//! ```text
//!     map of a bucket ──look──▶ (bucket, peer) ──▶ a link, a thread each: connect, log in, follow; again after a pause
//! ```
//! Nothing is decided here: a coordinator says where the vBuckets are, and a node that was away finds out by a [`roll_call`]. What a
//! replica does with what it is sent, is the [`replication::Consumer`]'s business.

mod caller;
mod link;
mod roll_call;
mod wire_out;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::Mutex;
use types::VbId;

use crate::Shared;
use crate::cluster::{Cluster, Map};

use link::Link;
pub(crate) use link::LinkFace;
use roll_call::RollCall;

/// Who this node is to other nodes: an administrator there.
#[derive(Clone)]
pub struct Credentials {
    pub user: String,
    pub password: String,
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credentials").field("user", &self.user).finish_non_exhaustive()
    }
}

/// What a link is for.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Route {
    pub bucket: String,
    /// Address of its key-value port, which is its name.
    pub peer: String,
    /// The name of this node in the chains.
    pub node: String,
}

type Routes = BTreeMap<Route, BTreeSet<VbId>>;

/// 1. There is one link a route, and no vBucket is wanted by two: one that has to give any up has done so first.
#[derive(Default)]
pub(crate) struct Replicas {
    /// One at a time makes the links be what the maps say, and may wait for them; nobody else waits meanwhile.
    looking: Mutex<()>,
    links: Mutex<BTreeMap<Route, Arc<Link>>>,
    roll_call: RollCall,
    shared: OnceLock<Weak<Shared>>,
}

impl Replicas {
    /// From here on maps are followed. Buckets that are held are served once it is known that they are still this node's.
    pub fn start(&self, shared: &Arc<Shared>) {
        let _ = self.shared.set(Arc::downgrade(shared));
        self.look();
        let held = shared.engine.list().into_iter().filter(|bucket| bucket.is_held());
        held.for_each(|bucket| self.roll_call.doubt(shared, bucket.name(), None));
    }

    /// Another node goes by this map. If it is newer than ours, ours is out of date.
    fn hear_of(&self, shared: &Arc<Shared>, theirs: Map) {
        if let Some((ours, _)) = shared.cluster.map_of(&theirs.bucket)
            && ours.uuid == theirs.uuid
            && theirs.revision > ours.revision
        {
            self.roll_call.doubt(shared, &ours.bucket, Some(theirs));
        }
    }

    /// Whoever decides has said what this node is: it need not ask others.
    pub fn told(&self, bucket: &engine::Bucket) {
        self.roll_call.forget(bucket.name());
        bucket.release();
    }

    /// Makes the links be what the maps say. May wait for links to end: not for workers.
    pub fn look(&self) {
        let Some(shared) = self.shared.get().and_then(Weak::upgrade) else { return };
        let _one_at_a_time = self.looking.lock();
        let wanted = match shared.stopping.load(std::sync::atomic::Ordering::Acquire) {
            true => Routes::new(),
            false => routes(&shared.cluster, &shared.bucket_names()),
        };
        let over: Vec<_> = self.links.lock().extract_if(.., |route, _| !wanted.contains_key(route)).collect();
        over.iter().for_each(|(_, link)| link.stop());
        over.iter().for_each(|(_, link)| link.join());
        let kept = self.links.lock().clone();
        kept.iter().for_each(|(route, link)| link.keep_only(&wanted[route]));
        let mut links = self.links.lock();
        for (route, vbs) in wanted {
            match links.get(&route) {
                Some(link) => link.want(vbs),
                None => match Link::start(&shared, &route, vbs) {
                    Ok(link) => drop(links.insert(route, Arc::new(link))),
                    Err(error) => tracing::error!("{} cannot be followed: {error}", route.peer),
                },
            }
        }
    }

    /// A vBucket has another role: what came to nothing before may work now.
    pub fn role_changed(&self, bucket: &str) {
        self.links.lock().iter().filter(|(route, _)| route.bucket == bucket).for_each(|(_, link)| link.look());
    }

    /// Whether there is a link that follows for the vBucket.
    pub fn follows(&self, bucket: &str, vb: VbId) -> bool {
        self.links.lock().iter().any(|(route, link)| route.bucket == bucket && link.wants().contains(&vb))
    }

    /// Ends all links.
    pub fn stop(&self) {
        self.roll_call.stop();
        let _one_at_a_time = self.looking.lock();
        let links = std::mem::take(&mut *self.links.lock());
        links.values().for_each(|link| link.stop());
        links.values().for_each(|link| link.join());
    }

    /// What can be seen of a bucket's links.
    pub fn of_bucket(&self, bucket: &str) -> Vec<(String, Arc<LinkFace>)> {
        let links = self.links.lock();
        let those = links.iter().filter(|(route, _)| route.bucket == bucket);
        those.map(|(route, link)| (route.peer.clone(), link.face())).collect()
    }
}

fn routes(cluster: &Cluster, buckets: &[String]) -> Routes {
    let mut routes = Routes::new();
    for bucket in buckets {
        if let Some((map, Some(this))) = cluster.map_of(bucket) {
            add_routes(&mut routes, &map, this);
        }
    }
    routes
}

fn add_routes(routes: &mut Routes, map: &Map, this: usize) {
    let node = map.nodes[this].name();
    for (vb, chain) in (0u16..).zip(&map.chains) {
        let Some(active) = chain[0].filter(|_| map.followers(vb).any(|at| at == this)) else { continue };
        let route = Route { bucket: map.bucket.clone(), peer: map.nodes[active].name(), node: node.clone() };
        routes.entry(route).or_default().insert(VbId(vb));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::{Node, Revision};

    #[test]
    fn a_node_follows_the_actives_of_the_chains_it_is_a_replica_in() {
        let node = |n: u16| Node { host: "h".into(), kv_port: n, admin_port: 9 };
        let map = Map {
            revision: Revision { epoch: 1, rev: 1 },
            cluster_uuid: String::new(),
            bucket: "b".into(),
            uuid: String::new(),
            replicas: 2,
            nodes: vec![node(1), node(2), node(3)],
            chains: vec![
                vec![Some(0), Some(1), Some(2)],
                vec![Some(1), Some(0), None],
                vec![Some(2), Some(1), Some(0)],
                vec![Some(2), Some(0), Some(1)],
                vec![None, Some(1), None],
                vec![Some(0), Some(2), None],
            ],
            forward: BTreeMap::from([(5, vec![Some(1), Some(0), None])]),
        };
        let mut routes = Routes::new();
        add_routes(&mut routes, &map, 1);
        let shown: Vec<_> = routes
            .iter()
            .map(|(route, vbs)| {
                (route.peer.as_str(), route.node.as_str(), vbs.iter().map(|vb| vb.0).collect::<Vec<_>>())
            })
            .collect();
        assert_eq!(shown, [("h:1", "h:2", vec![0, 5]), ("h:3", "h:2", vec![2, 3])]);
    }
}
