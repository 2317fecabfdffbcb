//! Which node has which vBucket, and what becomes of that when one is gone. Only arithmetic: nobody is asked and nothing is
//! changed.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use frontend::cluster::{Chain, Map, Revision};
use types::Seqno;

/// Spreads actives evenly, and the replicas of each node's actives evenly over the others. With more replicas than there are
/// other nodes, the last places stay empty.
pub fn even(nodes: usize, replicas: u8, vbuckets: u16) -> Vec<Chain> {
    let others = nodes.saturating_sub(1);
    let chain = |vb: usize| {
        let active = vb % nodes;
        let replica = |k: usize| (k < others).then(|| (active + 1 + (vb / nodes + k) % others) % nodes);
        std::iter::once(Some(active)).chain((0..usize::from(replicas)).map(replica)).collect()
    };
    (0..usize::from(vbuckets)).map(chain).collect()
}

/// How far a replica is. What it has prepared decides: among those who said that they have it is everything acknowledged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Progress {
    pub prepared: Seqno,
    pub high: Seqno,
}

/// The map without a node: what was active there is active nowhere, and nobody follows it. Its revision is the next one but one: a
/// coordinator that was interrupted may have given the next one to that node alone.
///
/// # Errors
/// The vBuckets that nobody else has.
pub fn without(map: &Map, gone: usize) -> Result<Map, Vec<u16>> {
    let mut next = successor(&successor(map));
    next.nodes.remove(gone);
    next.forward.clear();
    let mut lost = Vec::new();
    for (vb, chain) in next.chains.iter_mut().enumerate() {
        let places = chain.len();
        let was_active = chain[0] == Some(gone);
        chain[usize::from(!was_active)..].iter_mut().filter(|at| **at == Some(gone)).for_each(|at| *at = None);
        chain[1..].sort_by_key(Option::is_none);
        chain.iter_mut().flatten().filter(|at| **at > gone).for_each(|at| *at -= 1);
        chain.resize(places, None);
        if chain.iter().all(Option::is_none) {
            lost.push(vb as u16);
        }
    }
    if lost.is_empty() { Ok(next) } else { Err(lost) }
}

/// The map in which of each vBucket that is active nowhere the replica that is furthest is active.
pub fn promoted(map: &Map, progress: impl Fn(usize, usize) -> Progress) -> Map {
    let mut next = successor(map);
    for (vb, chain) in next.chains.iter_mut().enumerate().filter(|(_, chain)| chain[0].is_none()) {
        let furthest = chain.iter().flatten().copied().max_by_key(|at| progress(vb, *at));
        let from = chain.iter().position(|at| *at == furthest && furthest.is_some()).unwrap_or(0);
        chain[0] = chain[from].take();
        chain[1..].sort_by_key(Option::is_none);
    }
    next
}

/// The same, to be changed.
pub fn successor(map: &Map) -> Map {
    Map { revision: Revision { rev: map.revision.rev + 1, ..map.revision }, ..map.clone() }
}

/// Spreads actives and replicas evenly over the nodes, or over all but the one that leaves, and changes no more than that takes. What
/// is even stays as it is. Every vBucket must be active somewhere.
pub fn balance(chains: &[Chain], nodes: usize, leaves: Option<usize>) -> Vec<Chain> {
    let members = (0..nodes).filter(|node| Some(*node) != leaves).collect();
    let mut balance = Balance { members, chains: chains.to_vec() };
    for chain in &mut balance.chains {
        chain.iter_mut().filter(|at| leaves.is_some() && **at == leaves).for_each(|at| *at = None);
        chain[1..].sort_by_key(Option::is_none);
    }
    balance.fill_actives();
    balance.spread_actives();
    balance.fill_replicas();
    balance.spread_replicas();
    balance.chains
}

struct Balance {
    members: Vec<usize>,
    chains: Vec<Chain>,
}

impl Balance {
    fn actives(&self, node: usize) -> usize {
        self.chains.iter().filter(|chain| chain[0] == Some(node)).count()
    }

    fn replicas(&self, node: usize) -> usize {
        self.chains.iter().filter(|chain| chain[1..].contains(&Some(node))).count()
    }

    /// Of how many vBuckets one node has the active and another a replica.
    fn pairs(&self, active: Option<usize>, replica: usize) -> usize {
        self.chains.iter().filter(|chain| chain[0] == active && chain[1..].contains(&Some(replica))).count()
    }

    /// A vBucket that loses its active goes to one of its replicas, as nothing has to be copied.
    fn fill_actives(&mut self) {
        for vb in 0..self.chains.len() {
            if self.chains[vb][0].is_some() {
                continue;
            }
            let of_it: Vec<usize> = self.chains[vb][1..].iter().flatten().copied().collect();
            let candidates = if of_it.is_empty() { &self.members } else { &of_it };
            let active = candidates.iter().copied().min_by_key(|node| self.actives(*node));
            let chain = &mut self.chains[vb];
            chain[1..].iter_mut().filter(|at| **at == active).for_each(|at| *at = None);
            chain[0] = active;
            chain[1..].sort_by_key(Option::is_none);
        }
    }

    /// From who has most to who has least, until they differ by one. If who has least has a replica, the two change places.
    fn spread_actives(&mut self) {
        loop {
            let (Some(most), Some(least)) = self.extremes(Balance::actives) else { return };
            let has_replica = |chain: &&mut Chain| chain[1..].contains(&Some(least));
            let of_most = |chain: &&mut Chain| chain[0] == Some(most);
            let found = self.chains.iter_mut().filter(of_most).find(has_replica);
            let change_places = found.is_some();
            let Some(chain) = (match found {
                Some(chain) => Some(chain),
                None => self.chains.iter_mut().find(of_most),
            }) else {
                return;
            };
            if change_places {
                chain[1..].iter_mut().filter(|at| **at == Some(least)).for_each(|at| *at = Some(most));
            }
            chain[0] = Some(least);
        }
    }

    fn fill_replicas(&mut self) {
        for vb in 0..self.chains.len() {
            for place in 1..self.chains[vb].len() {
                let chain = &self.chains[vb];
                if chain[place].is_some() {
                    continue;
                }
                let free = self.members.iter().copied().filter(|node| !chain.contains(&Some(*node)));
                let least = free.min_by_key(|node| (self.replicas(*node), self.pairs(chain[0], *node)));
                self.chains[vb][place] = least;
            }
        }
    }

    fn spread_replicas(&mut self) {
        while let (Some(most), Some(least)) = self.extremes(Balance::replicas) {
            let may_move = |chain: &Chain| chain[1..].contains(&Some(most)) && !chain.contains(&Some(least));
            // The replicas of each node's actives are spread too.
            let gain = |active| self.pairs(active, most) as i64 - self.pairs(active, least) as i64;
            let gains: BTreeMap<_, _> = self.members.iter().map(|node| (Some(*node), gain(Some(*node)))).collect();
            let found = (0..self.chains.len()).filter(|vb| may_move(&self.chains[*vb]));
            let Some(vb) = found.max_by_key(|vb| (gains.get(&self.chains[*vb][0]), Reverse(*vb))) else { return };
            self.chains[vb][1..].iter_mut().filter(|at| **at == Some(most)).for_each(|at| *at = Some(least));
        }
    }

    /// Who has most and who has least, if they differ by more than one.
    fn extremes(&self, count: fn(&Balance, usize) -> usize) -> (Option<usize>, Option<usize>) {
        let counts: Vec<(usize, usize)> = self.members.iter().map(|node| (count(self, *node), *node)).collect();
        let most = counts.iter().max_by_key(|(count, _)| *count);
        let least = counts.iter().min_by_key(|(count, _)| *count);
        match (most, least) {
            (Some(most), Some(least)) if most.0 > least.0 + 1 => (Some(most.1), Some(least.1)),
            _ => (None, None),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use frontend::cluster::Node;

    fn map(chains: Vec<Chain>, nodes: u16) -> Map {
        let node = |n| Node { host: "127.0.0.1".into(), kv_port: n, admin_port: n };
        Map {
            revision: Revision { epoch: 1, rev: 5 },
            cluster_uuid: String::new(),
            bucket: "b".into(),
            uuid: String::new(),
            replicas: (chains[0].len() - 1) as u8,
            nodes: (0..nodes).map(node).collect(),
            chains,
            forward: BTreeMap::new(),
        }
    }

    #[test]
    fn every_layout_is_even_and_names_a_node_once_a_chain() {
        for nodes in 1..=6usize {
            for replicas in 0..=3u8 {
                let chains = even(nodes, replicas, 1024);
                let mut taken = vec![vec![0i32; usize::from(replicas) + 1]; nodes];
                for chain in &chains {
                    assert_eq!(chain.len(), usize::from(replicas) + 1);
                    let present: Vec<usize> = chain.iter().flatten().copied().collect();
                    assert_eq!(present.len(), (usize::from(replicas) + 1).min(nodes), "{chain:?} of {nodes}");
                    assert!(present.iter().enumerate().all(|(n, at)| !present[..n].contains(at)), "{chain:?}");
                    assert!(
                        chain[0].is_some() && chain.iter().rev().skip_while(|at| at.is_none()).all(Option::is_some)
                    );
                    present.iter().enumerate().for_each(|(place, at)| taken[*at][place] += 1);
                }
                for place in 0..=usize::from(replicas).min(nodes - 1) {
                    let counts = taken.iter().map(|node| node[place]);
                    let (least, most) = (counts.clone().min().unwrap(), counts.max().unwrap());
                    assert!(most - least <= 2 * nodes as i32, "{nodes} nodes, place {place}: {least} to {most}");
                }
            }
        }
    }

    fn fail_over(map: &Map, gone: usize, progress: impl Fn(usize, usize) -> Progress) -> Result<Map, Vec<u16>> {
        Ok(promoted(&without(map, gone)?, progress))
    }

    #[test]
    fn of_two_nodes_the_other_takes_over() {
        let before = map(even(2, 1, 4), 2);
        let between = without(&before, 0).unwrap();
        assert_eq!(between.chains[0], [None, Some(0)], "first nobody follows the one that is gone");
        assert_eq!(between.chains[1], [Some(0), None]);
        let after = promoted(&between, |_, _| Progress::default());
        assert_eq!(after.chains, vec![vec![Some(0), None]; 4]);
        assert_eq!((after.nodes.len(), after.nodes[0].kv_port, after.revision.rev), (1, 1, 8));
        assert_eq!(without(&after, 0), Err(vec![0, 1, 2, 3]));
    }

    #[test]
    fn the_replica_that_prepared_most_takes_over_and_the_other_follows_it() {
        let before = map(
            vec![vec![Some(1), Some(0), Some(2)], vec![Some(0), Some(2), Some(1)], vec![Some(2), Some(0), None]],
            3,
        );
        let progress = |prepared, high| Progress { prepared: Seqno(prepared), high: Seqno(high) };
        // The first has more changes, the other more of what was acknowledged.
        let after = fail_over(&before, 1, |_, node| [progress(4, 90), progress(7, 50)][node]).unwrap();
        assert_eq!(after.chains[0], [Some(1), Some(0), None]);
        assert_eq!(after.chains[1], [Some(0), Some(1), None]);
        assert_eq!(after.chains[2], [Some(1), Some(0), None]);
        let equal = fail_over(&before, 1, |_, node| [progress(4, 9), progress(4, 8)][node]).unwrap();
        assert_eq!(equal.chains[0], [Some(0), Some(1), None]);
    }

    /// How many places differ: active ones, and copies to be made.
    fn changes(before: &[Chain], after: &[Chain]) -> (usize, usize) {
        let actives = before.iter().zip(after).filter(|(before, after)| before[0] != after[0]).count();
        let is_new = |before: &Chain, at: &&Option<usize>| at.is_some() && !before.contains(at);
        let copies =
            before.iter().zip(after).map(|(before, after)| after.iter().filter(|at| is_new(before, at)).count());
        (actives, copies.sum())
    }

    #[track_caller]
    fn assert_even(chains: &[Chain], members: &[usize], what: &str) {
        let places = chains[0].len().min(members.len());
        for chain in chains {
            assert!(chain[..places].iter().all(|at| at.is_some_and(|at| members.contains(&at))), "{what}: {chain:?}");
            assert!(chain[places..].iter().all(Option::is_none), "{what}: {chain:?}");
            let distinct: std::collections::BTreeSet<_> = chain[..places].iter().collect();
            assert_eq!(distinct.len(), places, "{what}: {chain:?}");
        }
        let of = |count: &dyn Fn(&Chain, usize) -> bool| {
            let counts = members.iter().map(|node| chains.iter().filter(|chain| count(chain, *node)).count());
            counts.clone().max().unwrap() - counts.min().unwrap()
        };
        assert!(of(&|chain, node| chain[0] == Some(node)) <= 1, "{what}: actives");
        assert!(of(&|chain, node| chain[1..].contains(&Some(node))) <= 1, "{what}: replicas");
    }

    #[test]
    fn nodes_come_and_go_and_only_what_has_to_moves() {
        for nodes in 1..=5usize {
            for replicas in 0..=2u8 {
                for vbuckets in [8u16, 64] {
                    let what = format!("{nodes} nodes, {replicas} replicas, {vbuckets} vBuckets");
                    let members: Vec<usize> = (0..nodes).collect();
                    let before = balance(&even(nodes, replicas, vbuckets), nodes, None);
                    assert_even(&before, &members, &what);
                    assert_eq!(balance(&before, nodes, None), before, "{what}: what is even stays");
                    let more = balance(&before, nodes + 1, None);
                    assert_even(&more, &(0..=nodes).collect::<Vec<_>>(), &format!("{what} and one more"));
                    let (actives, copies) = changes(&before, &more);
                    let share = usize::from(vbuckets).div_ceil(nodes + 1);
                    assert!(actives <= share, "{what}: {actives} of {share} move");
                    let places = usize::from(replicas).min(nodes) + 1;
                    let empty = if usize::from(replicas) >= nodes { usize::from(vbuckets) } else { 0 };
                    assert!(copies <= share * places + empty + nodes, "{what}: {copies} copies");
                    let fewer = balance(&more, nodes + 1, Some(nodes));
                    assert_even(&fewer, &members, &format!("{what} and one less again"));
                    let first_left = balance(&more, nodes + 1, Some(0));
                    assert_even(&first_left, &(1..=nodes).collect::<Vec<_>>(), &format!("{what}, without the first"));
                }
            }
        }
    }

    #[test]
    fn one_that_comes_back_empty_gets_its_share_by_copies_alone_where_it_can() {
        // After a failover of the second of two everything is active on the first, without replicas.
        let alone = vec![vec![Some(0), None]; 8];
        let both = balance(&alone, 2, None);
        assert_even(&both, &[0, 1], "both");
        assert_eq!(changes(&alone, &both), (4, 8));
    }
}
