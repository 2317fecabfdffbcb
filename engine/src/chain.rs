//! Which nodes must have a sync write before it counts: the replication chains, and how far each replica has come.
//!
//! A replica says one number, its high prepared seqno: it has what every prepare up to there asks of it. So what is known of
//! a node is one mark, whatever the number of writes under way, and a write is looked at only when it is the oldest.
//!
//! | level | committed when, in every chain, |
//! |---|---|
//! | majority | a majority has it in memory |
//! | majority and persist to active | the same, and the active on disk |
//! | persist to majority | a majority has it on disk, the active among them |
//!
//! Two replicas would be a majority of three without the active. But it may restart before anybody takes its place, and what it
//! does not find then it would have the others forget.
//!
//! A write that is inherited may have been acknowledged, so it is settled even where too few nodes are left for a majority: it is
//! committed once all that are left have it. New ones are refused there.
//!
//! While a vBucket moves to other nodes there are two chains, the one it comes from and the one it goes to.

use types::{Level, Seqno};

/// Nodes by name, active first; `None` where a replica is missing.
pub type Topology = Vec<Vec<Option<String>>>;

/// A chain has at most two replicas.
pub const CHAIN_NODES_MAX: usize = 3;
const CHAINS_MAX: usize = 2;
/// Marks of nodes in no chain that are kept: a replica may speak before its chain is known here.
const STRANGERS_MAX: usize = 8;

/// Whether a chain can make a sync write durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Chance {
    /// Nobody has said yet what the chains are.
    Unknown = 0,
    Possible = 1,
    /// Too few nodes, or more than are supported.
    Impossible = 2,
}

impl Chance {
    pub fn of(topology: &[Vec<Option<String>>]) -> Chance {
        let is_possible = |chain: &Vec<Option<String>>| {
            chain.len() <= CHAIN_NODES_MAX && chain.iter().flatten().count() >= usize::from(majority(chain.len()))
        };
        match topology {
            [] => Chance::Unknown,
            chains if chains.iter().all(is_possible) => Chance::Possible,
            _ => Chance::Impossible,
        }
    }

    pub fn from_bits(bits: u8) -> Chance {
        [Chance::Unknown, Chance::Possible, Chance::Impossible][usize::from(bits)]
    }
}

const fn majority(nodes: usize) -> u8 {
    nodes as u8 / 2 + 1
}

/// Why a topology makes no sense, if so.
pub(crate) fn refuse_topology(topology: &[Vec<Option<String>>]) -> Option<&'static str> {
    let repeats = |chain: &[Option<String>]| {
        chain.iter().enumerate().any(|(n, node)| node.is_some() && chain[..n].contains(node))
    };
    if topology.len() > CHAINS_MAX {
        Some("a topology has one chain or two")
    } else if topology.iter().any(|chain| chain.is_empty() || chain.len() > 4 || chain[0].is_none()) {
        Some("a chain names its active node and has one to four places")
    } else if topology.iter().any(|chain| repeats(chain)) {
        Some("a chain names a node twice")
    } else {
        None
    }
}

/// The chains of an active vBucket that is not alone, and what its replicas have said.
///
/// 1. A mark of a node only grows, unless the node has begun anew.
/// 2. Which chains a node is in is one bit each, so that asking for a majority goes over the nodes once.
#[derive(Clone, Debug)]
pub(crate) struct Chains {
    /// Of each chain, how many nodes make a majority, and how many there are.
    majorities: Vec<(u8, u8)>,
    /// The chains this node is in.
    own: u8,
    peers: Vec<Peer>,
}

#[derive(Clone, Debug)]
struct Peer {
    name: Box<str>,
    chains: u8,
    prepared: Seqno,
}

impl Chains {
    /// `None`: this node alone is each chain, and nobody needs to be asked. What the replicas said `before` still holds.
    pub fn of(topology: &[Vec<Option<String>>], before: Option<&Chains>) -> Option<Chains> {
        let own = topology.first()?.first()?.as_deref()?;
        if topology.iter().all(|chain| chain.len() == 1 && chain[0].as_deref() == Some(own)) {
            return None;
        }
        let mut chains = Chains { majorities: Vec::new(), own: 0, peers: Vec::new() };
        for (n, chain) in topology.iter().enumerate() {
            chains.majorities.push((majority(chain.len()), chain.iter().flatten().count() as u8));
            for name in chain.iter().flatten() {
                match name == own {
                    true => chains.own |= 1 << n,
                    false => chains.peer(name).chains |= 1 << n,
                }
            }
        }
        for old in before.iter().flat_map(|before| &before.peers) {
            chains.ack(&old.name, old.prepared);
        }
        Some(chains)
    }

    fn peer(&mut self, name: &str) -> &mut Peer {
        let at = match self.peers.iter().position(|peer| *peer.name == *name) {
            Some(at) => at,
            None => {
                let strangers = self.peers.iter().filter(|peer| peer.chains == 0).count();
                if strangers >= STRANGERS_MAX
                    && let Some(oldest) = self.peers.iter().position(|peer| peer.chains == 0)
                {
                    self.peers.remove(oldest);
                }
                self.peers.push(Peer { name: name.into(), chains: 0, prepared: Seqno(0) });
                self.peers.len() - 1
            }
        };
        &mut self.peers[at]
    }

    /// The node has what every prepare up to `prepared` asks of it.
    pub fn ack(&mut self, node: &str, prepared: Seqno) {
        let peer = self.peer(node);
        peer.prepared = peer.prepared.max(prepared);
    }

    /// The node goes on from `seqno`; whatever it said it had beyond is gone.
    pub fn begin_anew(&mut self, node: &str, seqno: Seqno) {
        let peer = self.peer(node);
        peer.prepared = peer.prepared.min(seqno);
    }

    /// Whether a prepare has what its level asks for, if this node has it on disk or not.
    pub fn is_satisfied(&self, seqno: Seqno, level: Level, on_disk: bool, is_inherited: bool) -> bool {
        if level > Level::Majority && !on_disk {
            return false;
        }
        self.majorities.iter().enumerate().all(|(n, &(majority, left))| {
            let has = |peer: &&Peer| peer.chains >> n & 1 == 1 && peer.prepared >= seqno;
            let nodes = (self.own >> n & 1) + self.peers.iter().filter(has).count() as u8;
            nodes >= if is_inherited { majority.min(left) } else { majority }
        })
    }

    /// The replicas and their high prepared seqnos.
    pub fn marks(&self) -> impl Iterator<Item = (&str, Seqno)> {
        self.peers.iter().filter(|peer| peer.chains != 0).map(|peer| (&*peer.name, peer.prepared))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chain(nodes: &[&str]) -> Vec<Option<String>> {
        nodes.iter().map(|node| (*node != "-").then(|| (*node).to_owned())).collect()
    }

    #[test]
    fn a_chain_can_if_a_majority_of_its_places_is_taken() {
        for (nodes, expected) in [
            (&["a"][..], Chance::Possible),
            (&["a", "b"], Chance::Possible),
            (&["a", "-"], Chance::Impossible),
            (&["a", "b", "-"], Chance::Possible),
            (&["a", "-", "-"], Chance::Impossible),
            (&["a", "b", "c", "d"], Chance::Impossible),
        ] {
            assert_eq!(Chance::of(&[chain(nodes)]), expected, "{nodes:?}");
            assert_eq!(refuse_topology(&[chain(nodes)]), None);
        }
        assert_eq!(Chance::of(&[]), Chance::Unknown);
        assert_eq!(Chance::of(&[chain(&["a"]), chain(&["a", "-"])]), Chance::Impossible);
        for nonsense in [vec![chain(&["-", "a"])], vec![vec![]], vec![chain(&["a", "a"])], vec![chain(&["a"]); 3]] {
            assert!(refuse_topology(&nonsense).is_some(), "{nonsense:?}");
        }
    }

    /// The table of the module's head, for every level and whoever has the write.
    #[test]
    fn who_must_have_a_write_is_what_the_table_says() {
        use Level::{Majority, MajorityAndPersistActive, PersistMajority};
        /// Chain, level, on disk here, replicas that have it, committed.
        type Row = (&'static [&'static str], Level, bool, &'static [&'static str], bool);
        let rows: &[Row] = &[
            (&["a", "b"], Majority, false, &[], false),
            (&["a", "b"], Majority, false, &["b"], true),
            (&["a", "b"], MajorityAndPersistActive, false, &["b"], false),
            (&["a", "b"], MajorityAndPersistActive, true, &["b"], true),
            (&["a", "b"], PersistMajority, false, &["b"], false),
            (&["a", "b"], PersistMajority, true, &[], false),
            (&["a", "b"], PersistMajority, true, &["b"], true),
            (&["a", "b", "c"], Majority, false, &["c"], true),
            (&["a", "b", "c"], MajorityAndPersistActive, false, &["b", "c"], false),
            (&["a", "b", "c"], PersistMajority, false, &["b"], false),
            (&["a", "b", "c"], PersistMajority, false, &["b", "c"], false),
            (&["a", "b", "c"], PersistMajority, true, &["b"], true),
            (&["a", "b", "-"], Majority, false, &["b"], true),
        ];
        for (nodes, level, on_disk, have, committed) in rows {
            let mut chains = Chains::of(&[chain(nodes)], None).expect("not alone");
            have.iter().for_each(|node| chains.ack(node, Seqno(7)));
            assert_eq!(
                chains.is_satisfied(Seqno(7), *level, *on_disk, false),
                *committed,
                "{nodes:?} {level:?} {on_disk} {have:?}"
            );
            assert!(!chains.is_satisfied(Seqno(8), *level, *on_disk, false));
        }
    }

    #[test]
    fn what_is_inherited_asks_no_more_than_all_that_are_left() {
        use Level::PersistMajority;
        let alone = Chains::of(&[chain(&["a", "-"])], None).expect("it has a place for another");
        assert!(!alone.is_satisfied(Seqno(1), PersistMajority, true, false));
        assert!(!alone.is_satisfied(Seqno(1), PersistMajority, false, true));
        assert!(alone.is_satisfied(Seqno(1), PersistMajority, true, true));
        let two = Chains::of(&[chain(&["a", "b", "-"])], None).expect("not alone");
        assert!(!two.is_satisfied(Seqno(1), PersistMajority, true, true), "two of three are a majority as ever");
    }

    #[test]
    fn two_chains_each_want_their_majority_and_what_was_said_before_counts() {
        let alone = [chain(&["a"])];
        assert!(Chains::of(&alone, None).is_none());
        let mut chains = Chains::of(&[chain(&["a", "b"])], None).unwrap();
        chains.ack("b", Seqno(5));
        chains.ack("c", Seqno(4));
        // To two other nodes: this one is not in the second chain.
        let both = [chain(&["a", "b"]), chain(&["c", "d"])];
        let mut chains = Chains::of(&both, Some(&chains)).unwrap();
        let is_committed = |chains: &Chains| chains.is_satisfied(Seqno(4), Level::Majority, false, false);
        assert!(!is_committed(&chains));
        chains.ack("d", Seqno(4));
        assert!(is_committed(&chains));
        chains.begin_anew("b", Seqno(3));
        assert!(!is_committed(&chains));
        assert_eq!(chains.marks().collect::<Vec<_>>(), [("b", Seqno(3)), ("c", Seqno(4)), ("d", Seqno(4))]);
    }

    #[test]
    fn nodes_that_nobody_knows_take_bounded_room() {
        let mut chains = Chains::of(&[chain(&["a", "b"])], None).unwrap();
        (0..100).for_each(|n| chains.ack(&format!("stranger {n}"), Seqno(n)));
        chains.ack("b", Seqno(1));
        assert!(
            chains.peers.len() <= 1 + STRANGERS_MAX && chains.is_satisfied(Seqno(1), Level::Majority, false, false)
        );
    }
}
