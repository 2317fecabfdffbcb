//! What whoever decides about a cluster says to its nodes: the verbs, and in which order.
//!
//! First every node is told what its vBuckets are, then all get the map that says where they are. A client that goes by the old
//! map meanwhile is turned away and asks again.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use frontend::cluster::{Map, Revision};
use types::{Seqno, VbId, VbState};
use wire::Opcode;
use wire::client::RequestFrame;

use super::layout::Progress;
use crate::client::{self, Client};

/// Requests under way together to one node: a change of role waits for the disk, and many share a sync.
const REQUESTS_AT_A_TIME: usize = 16;
/// How long a node may be silent before it is taken for gone.
const SIGN_OF_LIFE_MAX: Duration = Duration::from_secs(3);
/// How long a vBucket that was taken over may take to settle what it inherited.
const SETTLE_MAX: Duration = Duration::from_secs(30);

type Topology = Vec<Vec<Option<String>>>;

/// What a node is told of one vBucket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Order {
    pub vb: u16,
    pub state: VbState,
    pub topology: Option<Topology>,
}

/// Who speaks to the nodes, and of which bucket.
#[derive(Clone, Debug)]
pub struct Coordinator {
    pub user: String,
    pub password: String,
    pub bucket: String,
}

impl Coordinator {
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

    /// The map that a node serves.
    pub fn map(&self, node: &str) -> Result<Map> {
        let answer = self.client(node)?.call(&RequestFrame::new(Opcode::GetClusterConfig))?.success()?;
        let (map, _) = Map::parse(&answer.value).map_err(|why| anyhow!("the map of {node} makes no sense: {why}"))?;
        Ok(map)
    }

    /// Gives every node the map, each with its own place marked. One that answers follows no active any more that it does not
    /// name.
    pub fn give(&self, map: &Map) -> Result<()> {
        self.give_but(map, None)
    }

    /// Gives all but one the map.
    pub fn give_but(&self, map: &Map, gone: Option<usize>) -> Result<()> {
        let Revision { epoch, rev } = map.revision;
        let extras = [epoch.to_be_bytes(), rev.to_be_bytes()].concat();
        for (at, node) in map.nodes.iter().enumerate().filter(|(at, _)| Some(*at) != gone) {
            let document = map.document(Some(at));
            let request = RequestFrame {
                extras: &extras,
                key: self.bucket.as_bytes(),
                value: document.as_bytes(),
                ..RequestFrame::new(Opcode::SetClusterConfig)
            };
            let answer = self.admin(&node.name())?.call(&request)?.success();
            answer.with_context(|| format!("{} did not take the map", node.name()))?;
        }
        Ok(())
    }

    /// Tells a node what its vBuckets are; durable there when this returns.
    pub fn order(&self, node: &str, orders: &[Order]) -> Result<()> {
        let next = AtomicUsize::new(0);
        let work = || -> Result<()> {
            let mut client = self.client(node)?;
            while let Some(order) = orders.get(next.fetch_add(1, Relaxed)) {
                let topology =
                    order.topology.as_ref().map(|chains| serde_json::json!({ "topology": chains }).to_string());
                let request = RequestFrame {
                    vbucket: order.vb,
                    extras: &[order.state as u8],
                    value: topology.as_deref().unwrap_or_default().as_bytes(),
                    ..RequestFrame::new(Opcode::SetVbucket)
                };
                let answer = client.call(&request)?.success();
                answer
                    .with_context(|| format!("{node}: vBucket {} does not become {}", order.vb, order.state.name()))?;
            }
            Ok(())
        };
        let at_a_time = REQUESTS_AT_A_TIME.min(orders.len());
        thread::scope(|scope| -> Result<()> {
            let workers: Vec<_> = (0..at_a_time).map(|_| scope.spawn(work)).collect();
            workers.into_iter().try_for_each(|worker| worker.join().unwrap_or_else(|_| bail!("a thread panicked")))
        })
    }

    /// Lays a new bucket out: nobody has anything yet, so replicas first, then actives.
    pub fn lay_out(&self, map: &Map) -> Result<()> {
        for (at, node) in map.nodes.iter().enumerate() {
            let orders: Vec<Order> = (0..map.chains.len()).map(|vb| first_order(map, vb, at)).collect();
            self.order(&node.name(), &orders)?;
        }
        self.give(map)
    }

    /// How far each vBucket of a node is.
    pub fn progress(&self, node: &str) -> Result<BTreeMap<u16, Progress>> {
        let mut client = self.client(node)?;
        let mut found = BTreeMap::<u16, Progress>::new();
        for (name, value) in client.stats("durability-monitor")? {
            if let Some((vb, "high_prepared_seqno")) = of_vbucket(&name) {
                found.entry(vb).or_default().prepared = Seqno(value.parse().unwrap_or(0));
            }
        }
        for (VbId(vb), seqno) in seqnos(&mut client, None)? {
            found.entry(vb).or_default().high = seqno;
        }
        Ok(found)
    }

    /// Goes from one map to the next, which has a node less.
    ///
    /// A vBucket that is taken over by somebody who is alone with it first has a chain of its own, until what it inherited is
    /// settled: that may have been acknowledged, and who would commit it is gone. Then it has the chain of the map, in which
    /// durable writes are impossible until a replica is added.
    pub fn take_over(&self, before: &Map, next: &Map) -> Result<()> {
        for (at, node) in next.nodes.iter().enumerate() {
            let name = node.name();
            let mine = |vb: &usize| next.chains[*vb][0] == Some(at);
            let changed = |vb: &usize| next.topology(*vb) != before.topology(*vb);
            let vbs: Vec<usize> = (0..next.chains.len()).filter(mine).filter(changed).collect();
            let was_active =
                |vb: usize| before.topology(vb).and_then(|chain| chain[0].clone()).is_some_and(|active| active == name);
            let alone: Vec<usize> = vbs.iter().copied().filter(|vb| !was_active(*vb) && is_alone(next, *vb)).collect();
            let order = |vb: usize, chain: Vec<Option<String>>| Order {
                vb: vb as u16,
                state: VbState::Active,
                topology: Some(vec![chain]),
            };
            let own = |vb: &usize| order(*vb, vec![Some(name.clone())]);
            self.order(&name, &alone.iter().map(own).collect::<Vec<_>>())?;
            self.await_settled(&name, &alone)?;
            let whole = |vb: &usize| next.topology(*vb).map(|chain| order(*vb, chain));
            self.order(&name, &vbs.iter().filter_map(whole).collect::<Vec<_>>())?;
        }
        self.give(next)
    }

    /// Waits until no sync write of these vBuckets is under way.
    fn await_settled(&self, node: &str, vbs: &[usize]) -> Result<()> {
        if vbs.is_empty() {
            return Ok(());
        }
        let mut client = self.client(node)?;
        let until = Instant::now() + SETTLE_MAX;
        loop {
            let stats = client.stats("durability-monitor")?;
            let unsettled = stats.iter().find(|(name, value)| match of_vbucket(name) {
                Some((vb, "num_tracked")) => vbs.contains(&usize::from(vb)) && value != "0",
                _ => false,
            });
            let Some((name, _)) = unsettled else { return Ok(()) };
            if Instant::now() >= until {
                bail!("{node}: {name} is not 0 after {SETTLE_MAX:?}: sync writes that it inherited cannot be settled");
            }
            thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Whether nobody else has a copy.
fn is_alone(map: &Map, vb: usize) -> bool {
    map.chains[vb].iter().flatten().count() == 1
}

fn first_order(map: &Map, vb: usize, node: usize) -> Order {
    let chain = &map.chains[vb];
    let (state, topology) = match chain.iter().position(|at| *at == Some(node)) {
        Some(0) => (VbState::Active, map.topology(vb).map(|chain| vec![chain])),
        Some(_) => (VbState::Replica, None),
        None => (VbState::Dead, None),
    };
    Order { vb: vb as u16, state, topology }
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
    use crate::cluster::layout;
    use frontend::cluster::Node;

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
        assert_eq!(told[0], Order { vb: 0, state: VbState::Active, topology: Some(chain) });
        assert_eq!(told[1], Order { vb: 1, state: VbState::Dead, topology: None });
        assert_eq!(told[2], Order { vb: 2, state: VbState::Replica, topology: None });
        assert_eq!(of_vbucket("vb_12:num_tracked"), Some((12, "num_tracked")));
        assert_eq!((of_vbucket("ep_x"), of_vbucket("vb_x:y")), (None, None));
    }
}
