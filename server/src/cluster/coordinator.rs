//! What whoever decides about a cluster says to its nodes: the verbs, and in which order.
//!
//! Every node is told what its vBuckets are, then all get the map that says where they are. A client that goes by the old map
//! meanwhile is turned away and asks again. Only a node that is gone is taken out of the map first: whoever is left stops following it,
//! so that nothing more is acknowledged there, before anybody takes its place.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use frontend::cluster::{Map, Node, Revision};
use types::{Seqno, VbId, VbState};
use wire::client::RequestFrame;
use wire::dcp::StreamFlags;
use wire::{Opcode, Status};

use super::layout::{self, Progress};
use crate::client::{self, Answer, Client};

/// Requests under way together: a change of role waits for the disk, and many share a sync.
const REQUESTS_AT_A_TIME: usize = 16;
/// How long a node may be silent before it is taken for gone.
const SIGN_OF_LIFE_MAX: Duration = Duration::from_secs(3);

pub type Topology = Vec<Vec<Option<String>>>;

/// What a node is told of one vBucket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Order {
    /// By its name.
    pub node: String,
    pub vb: u16,
    pub state: VbState,
    pub topology: Option<Topology>,
}

impl Order {
    pub fn active(node: String, vb: u16, topology: Topology) -> Order {
        Order { node, vb, state: VbState::Active, topology: Some(topology) }
    }

    pub fn passive(node: String, vb: u16, state: VbState) -> Order {
        Order { node, vb, state, topology: None }
    }
}

/// Who speaks to the nodes, and of which bucket.
pub struct Coordinator {
    user: String,
    password: String,
    bucket: String,
    /// Connections that nobody uses now, by node.
    idle: Mutex<BTreeMap<String, Vec<Client>>>,
}

impl Coordinator {
    pub fn new(user: &str, password: String, bucket: &str) -> Coordinator {
        let idle = Mutex::default();
        Coordinator { user: user.to_owned(), password, bucket: bucket.to_owned(), idle }
    }

    pub fn user(&self) -> &str {
        &self.user
    }

    pub fn password(&self) -> &str {
        &self.password
    }

    /// An administrator at a node, without a bucket.
    pub fn admin(&self, node: &str) -> Result<Client> {
        let mut client = Client::connect(node, client::FEATURES)?;
        client.authenticate(&self.user, &self.password)?;
        Ok(client)
    }

    pub fn client(&self, node: &str) -> Result<Client> {
        let mut client = self.admin(node)?;
        client.select_bucket(&self.bucket)?;
        Ok(client)
    }

    /// Whether anything answers there.
    pub fn is_alive(&self, node: &str) -> bool {
        Client::connect_within(SIGN_OF_LIFE_MAX, node, client::FEATURES).is_ok()
    }

    /// Does something with a connection to a node, and keeps that for the next time. What is done may be done twice: a connection
    /// that was kept may be of before a restart.
    pub fn with<T>(&self, node: &str, work: impl Fn(&mut Client) -> Result<T>) -> Result<T> {
        let kept = self.idle().get_mut(node).and_then(Vec::pop);
        let (result, client) = match kept.and_then(|mut client| Some((work(&mut client).ok()?, client))) {
            Some(done) => done,
            None => {
                let mut client = self.client(node)?;
                (work(&mut client)?, client)
            }
        };
        self.idle().entry(node.to_owned()).or_default().push(client);
        Ok(result)
    }

    fn idle(&self) -> std::sync::MutexGuard<'_, BTreeMap<String, Vec<Client>>> {
        self.idle.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn ask(&self, node: &str, request: &RequestFrame<'_>) -> Result<Answer> {
        self.with(node, |client| client.call(request))
    }

    /// The map that a node serves.
    pub fn map(&self, node: &str) -> Result<Map> {
        let answer = self.ask(node, &RequestFrame::new(Opcode::GetClusterConfig))?.success()?;
        let (map, _) = Map::parse(&answer.value).map_err(|why| anyhow!("the map of {node} makes no sense: {why}"))?;
        Ok(map)
    }

    /// The newest map that any node has, beginning with the one `from` has. All nodes must answer, but for the one that is `gone`:
    /// an interrupted coordinator may have given a map to some of them only.
    pub fn newest_map(&self, from: &str, gone: Option<&str>) -> Result<Map> {
        let mut newest = self.map(from)?;
        let mut asked = BTreeMap::from([(from.to_owned(), newest.revision)]);
        while let Some(node) = newest.nodes.iter().map(Node::name).find(|node| !asked.contains_key(node)) {
            if gone == Some(&node) {
                asked.insert(node, newest.revision);
                continue;
            }
            let silent =
                || format!("{node} must answer; start it, or take it out with `settee cluster failover {node}`");
            if !self.is_alive(&node) {
                bail!(silent());
            }
            let map = self.map(&node).with_context(silent)?;
            asked.insert(node, map.revision);
            if map.revision > newest.revision && map.uuid == newest.uuid {
                newest = map;
            }
        }
        Ok(newest)
    }

    /// Gives a map to all nodes in it, each with its own place marked.
    pub fn give(&self, map: &Map) -> Result<()> {
        let places: Vec<usize> = (0..map.nodes.len()).collect();
        in_parallel(&places, |at| self.give_to(map, &map.nodes[*at].name())).map(drop)
    }

    /// Gives a node the map, whether it is in it or not.
    pub fn give_to(&self, map: &Map, node: &str) -> Result<()> {
        let Revision { epoch, rev } = map.revision;
        let document = map.document(map.place_of(node));
        let request = RequestFrame {
            extras: &[epoch.to_be_bytes(), rev.to_be_bytes()].concat(),
            key: self.bucket.as_bytes(),
            value: document.as_bytes(),
            ..RequestFrame::new(Opcode::SetClusterConfig)
        };
        self.ask(node, &request)?.success().with_context(|| format!("{node} did not take the map"))?;
        Ok(())
    }

    /// Tells nodes what their vBuckets are; durable there when this returns.
    pub fn order(&self, orders: &[Order]) -> Result<()> {
        in_parallel(orders, |order| {
            let Order { node, vb, state, topology } = order;
            let topology = topology.as_ref().map(|chains| serde_json::json!({ "topology": chains }).to_string());
            let request = RequestFrame {
                vbucket: *vb,
                extras: &[*state as u8],
                value: topology.as_deref().unwrap_or_default().as_bytes(),
                ..RequestFrame::new(Opcode::SetVbucket)
            };
            let answer = self.ask(node, &request)?.success();
            answer.with_context(|| format!("{node}: vBucket {vb} does not become {}", state.name()))
        })
        .map(drop)
    }

    /// What a vBucket is on a node.
    pub fn state(&self, node: &str, vb: u16) -> Result<VbState> {
        let answer = self.ask(node, &RequestFrame { vbucket: vb, ..RequestFrame::new(Opcode::GetVbucket) })?;
        if answer.status == Status::NotMyVbucket {
            return Ok(VbState::Dead);
        }
        let state = u32::from_be_bytes(answer.success()?.value.try_into().unwrap_or_default());
        let all = [VbState::Active, VbState::Replica, VbState::Pending, VbState::Dead];
        all.into_iter().find(|known| *known as u32 == state).with_context(|| format!("{node} knows state {state}"))
    }

    /// What a node's vBuckets are that are not dead there.
    pub fn states(&self, node: &str) -> Result<BTreeMap<u16, VbState>> {
        let mut found = BTreeMap::new();
        for state in [VbState::Active, VbState::Replica, VbState::Pending] {
            let those = self.with(node, |client| seqnos(client, Some(state)))?;
            found.extend(those.into_iter().map(|(vb, _)| (vb.0, state)));
        }
        Ok(found)
    }

    /// Has the replica at `node` take the vBucket over from the node that it follows. It is active there when this returns.
    pub fn hand_over(&self, node: &str, vb: u16) -> Result<()> {
        let flags = StreamFlags::TAKEOVER.0.to_be_bytes();
        let request = RequestFrame { vbucket: vb, extras: &flags, ..RequestFrame::new(Opcode::DcpAddStream) };
        self.ask(node, &request)?.success().with_context(|| format!("{node} does not take vBucket {vb} over"))?;
        Ok(())
    }

    /// The takeover is off: the vBucket is active at `node` by now, or will not be.
    pub fn call_off(&self, node: &str, vb: u16) -> Result<()> {
        self.ask(node, &RequestFrame { vbucket: vb, ..RequestFrame::new(Opcode::DcpCloseStream) })?.success()?;
        Ok(())
    }

    /// The node's map is the one to go by: it need not ask the others.
    pub fn confirm(&self, node: &str) -> Result<()> {
        self.ask(node, &RequestFrame::new(Opcode::EnableTraffic))?.success()?;
        Ok(())
    }

    /// Nothing of a bucket of so many vBuckets is on a node any more.
    pub fn discard_all(&self, node: &str, vbuckets: u16) -> Result<()> {
        in_parallel(&(0..vbuckets).collect::<Vec<_>>(), |vb| self.discard(node, *vb)).map(drop)
    }

    /// A vBucket that is on a node and by the map is not goes away, with its file.
    pub fn discard(&self, node: &str, vb: u16) -> Result<()> {
        self.order(&[Order::passive(node.to_owned(), vb, VbState::Dead)])?;
        let answer = self.ask(node, &RequestFrame { vbucket: vb, ..RequestFrame::new(Opcode::DelVbucket) })?;
        if answer.status != Status::NotMyVbucket {
            answer.success().with_context(|| format!("{node}: vBucket {vb} cannot be deleted"))?;
        }
        Ok(())
    }

    /// Lays a new bucket out: nobody has anything yet.
    pub fn lay_out(&self, map: &Map) -> Result<()> {
        let of_node = |at: usize| (0..map.chains.len()).map(move |vb| first_order(map, vb, at));
        self.order(&(0..map.nodes.len()).flat_map(of_node).collect::<Vec<_>>())?;
        self.give(map)
    }

    /// How far each vBucket of a node is.
    pub fn progress(&self, node: &str) -> Result<BTreeMap<u16, Progress>> {
        let mut found = BTreeMap::<u16, Progress>::new();
        for (name, value) in self.with(node, |client| client.stats("durability-monitor"))? {
            if let Some((vb, "high_prepared_seqno")) = of_vbucket(&name) {
                found.entry(vb).or_default().prepared = Seqno(value.parse().unwrap_or(0));
            }
        }
        for (VbId(vb), seqno) in self.with(node, |client| seqnos(client, None))? {
            found.entry(vb).or_default().high = seqno;
        }
        Ok(found)
    }

    /// A node that does not answer leaves the map; the replicas that are furthest take over. Returns the new map, and how many did.
    pub fn fail_over(&self, map: &Map, gone: usize) -> Result<(Map, usize)> {
        let left = match layout::without(map, gone) {
            Ok(left) => left,
            Err(lost) => bail!("nobody else has vBuckets {lost:?}; nothing was changed"),
        };
        self.give(&left)?;
        // From here on nobody follows the node: how far each replica is stays as it is, and a node that comes back finds out.
        let changed = |vb: usize| left.topology(vb) != map.topology(vb);
        self.promote(&left, changed)
    }

    /// Of vBuckets that are active nowhere by the map, the replicas that are furthest become active, and those that `changed` get
    /// their new chains.
    pub fn promote(&self, map: &Map, changed: impl Fn(usize) -> bool) -> Result<(Map, usize)> {
        let names: Vec<String> = map.nodes.iter().map(Node::name).collect();
        let progress = in_parallel(&names, |name| self.progress(name));
        let mut progress = progress.context("every node that is left must say how far it is")?;
        // One that was interrupted may have promoted some already.
        for (name, progress) in names.iter().zip(&mut progress) {
            for (vb, _) in self.states(name)?.into_iter().filter(|(_, state)| *state == VbState::Active) {
                progress.insert(vb, Progress { prepared: Seqno(u64::MAX), high: Seqno(u64::MAX) });
            }
        }
        let of = |vb: usize, node: usize| progress[node].get(&(vb as u16)).copied().unwrap_or_default();
        let next = layout::promoted(map, of);
        let is_new = |vb: usize| map.chains[vb][0].is_none();
        let mut orders = Vec::new();
        for vb in (0..next.chains.len()).filter(|vb| is_new(*vb) || changed(*vb)) {
            if let (Some(active), Some(chain)) = (next.chains[vb][0], next.topology(vb)) {
                orders.push(Order::active(names[active].clone(), vb as u16, vec![chain]));
            }
        }
        self.order(&orders)?;
        self.give(&next)?;
        Ok((next, (0..map.chains.len()).filter(|vb| is_new(*vb)).count()))
    }
}

/// Does something with every item, several at a time. The first error ends it.
pub fn in_parallel<T: Sync, R: Send>(items: &[T], work: impl Fn(&T) -> Result<R> + Sync) -> Result<Vec<R>> {
    let next = AtomicUsize::new(0);
    let some = || -> Result<Vec<(usize, R)>> {
        let mut done = Vec::new();
        loop {
            let n = next.fetch_add(1, Relaxed);
            let Some(item) = items.get(n) else { return Ok(done) };
            done.push((n, work(item).inspect_err(|_| next.store(items.len(), Relaxed))?));
        }
    };
    let done = thread::scope(|scope| -> Result<Vec<Vec<(usize, R)>>> {
        let workers: Vec<_> = (0..REQUESTS_AT_A_TIME.min(items.len())).map(|_| scope.spawn(some)).collect();
        workers.into_iter().map(|worker| worker.join().unwrap_or_else(|_| bail!("a thread panicked"))).collect()
    })?;
    let mut done: Vec<(usize, R)> = done.into_iter().flatten().collect();
    done.sort_by_key(|(n, _)| *n);
    Ok(done.into_iter().map(|(_, result)| result).collect())
}

fn first_order(map: &Map, vb: usize, node: usize) -> Order {
    let chain = &map.chains[vb];
    let (state, topology) = match chain.iter().position(|at| *at == Some(node)) {
        Some(0) => (VbState::Active, map.topology(vb).map(|chain| vec![chain])),
        Some(_) => (VbState::Replica, None),
        None => (VbState::Dead, None),
    };
    Order { node: map.nodes[node].name(), vb: vb as u16, state, topology }
}

/// The high seqnos of a node's vBuckets: of those in a state, or of all that are served.
pub fn seqnos(client: &mut Client, state: Option<VbState>) -> Result<Vec<(VbId, Seqno)>> {
    let state = state.map(|state| (state as u32).to_be_bytes());
    let extras = state.as_ref().map_or(&[][..], |state| state);
    let answer = client.call(&RequestFrame { extras, ..RequestFrame::new(Opcode::GetAllVbSeqnos) })?.success()?;
    wire::dcp::vb_seqnos(&answer.value).context("the list of seqnos is cut short")
}

/// `vb_7:name` as 7 and `name`.
fn of_vbucket(stat: &str) -> Option<(u16, &str)> {
    let (vb, name) = stat.strip_prefix("vb_")?.split_once(':')?;
    Some((vb.parse().ok()?, name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_is_told_its_part_of_each_chain() {
        let node = |n| Node { host: "h".into(), kv_port: n, admin_port: n };
        let map = Map {
            revision: Revision { epoch: 1, rev: 1 },
            cluster_uuid: String::new(),
            bucket: "b".into(),
            uuid: String::new(),
            replicas: 1,
            nodes: vec![node(1), node(2), node(3)],
            chains: layout::even(3, 1, 3),
            forward: BTreeMap::new(),
        };
        let told: Vec<_> = (0..3).map(|vb| first_order(&map, vb, 0)).collect();
        let chain = vec![vec![Some("h:1".to_owned()), Some("h:2".to_owned())]];
        let first = || "h:1".to_owned();
        assert_eq!(told[0], Order::active(first(), 0, chain));
        assert_eq!(told[1], Order::passive(first(), 1, VbState::Dead));
        assert_eq!(told[2], Order::passive(first(), 2, VbState::Replica));
        assert_eq!(of_vbucket("vb_12:num_tracked"), Some((12, "num_tracked")));
        assert_eq!((of_vbucket("ep_x"), of_vbucket("vb_x:y")), (None, None));
    }

    #[test]
    fn the_first_error_ends_what_is_done_in_parallel() {
        let items: Vec<usize> = (0..100).collect();
        assert_eq!(in_parallel(&items, |n| Ok(n * 2)).ok(), Some((0..100).map(|n| n * 2).collect()));
        assert!(in_parallel(&items, |n| if *n == 50 { bail!("no") } else { Ok(()) }).is_err());
        assert!(in_parallel(&Vec::<usize>::new(), |_| Ok(())).is_ok());
    }
}
