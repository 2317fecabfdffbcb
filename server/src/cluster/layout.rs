//! Which node has which vBucket, and what becomes of that when one is gone. Only arithmetic: nobody is asked and nothing is
//! changed.

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

/// The map in which a node is active for nothing, and nobody else instead: who followed it follows nobody.
pub fn suspend(map: &Map, gone: usize) -> Map {
    let mut next = map.clone();
    next.revision = Revision { rev: map.revision.rev + 1, ..map.revision };
    next.chains.iter_mut().flat_map(|chain| chain.first_mut()).for_each(|at| *at = at.filter(|at| *at != gone));
    next
}

/// The map without a node: of each vBucket that was active there, or nowhere, the replica that is furthest is active.
///
/// # Errors
/// The vBuckets that nobody else has.
pub fn fail_over(map: &Map, gone: usize, progress: impl Fn(usize, usize) -> Progress) -> Result<Map, Vec<u16>> {
    let mut next = map.clone();
    next.revision = Revision { rev: map.revision.rev + 1, ..map.revision };
    next.nodes.remove(gone);
    let mut lost = Vec::new();
    for (vb, chain) in next.chains.iter_mut().enumerate() {
        let places = chain.len();
        let was_active = chain[0].is_none_or(|at| at == gone);
        chain.retain(|at| at.is_some_and(|at| at != gone));
        if was_active && let Some(best) = chain.iter().flatten().copied().max_by_key(|at| progress(vb, *at)) {
            let from = chain.iter().position(|at| *at == Some(best)).unwrap_or(0);
            chain[..=from].rotate_right(1);
        }
        if chain.is_empty() {
            lost.push(vb as u16);
        }
        chain.iter_mut().flatten().filter(|at| **at > gone).for_each(|at| *at -= 1);
        chain.resize(places, None);
    }
    if lost.is_empty() { Ok(next) } else { Err(lost) }
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
            forward: Default::default(),
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

    #[test]
    fn of_two_nodes_the_other_takes_over() {
        let before = map(even(2, 1, 4), 2);
        let after = fail_over(&before, 0, |_, _| Progress::default()).unwrap();
        assert_eq!(after.chains, vec![vec![Some(0), None]; 4]);
        assert_eq!((after.nodes.len(), after.nodes[0].kv_port, after.revision.rev), (1, 1, 6));
        assert_eq!(fail_over(&after, 0, |_, _| Progress::default()), Err(vec![0, 1, 2, 3]));
    }

    #[test]
    fn what_is_suspended_is_followed_by_nobody_and_fails_over_all_the_same() {
        let before = map(vec![vec![Some(1), Some(0), Some(2)], vec![Some(0), Some(2), Some(1)]], 3);
        let suspended = suspend(&before, 1);
        assert_eq!(suspended.chains, [vec![None, Some(0), Some(2)], vec![Some(0), Some(2), Some(1)]]);
        assert_eq!((suspended.revision.rev, suspended.nodes.len()), (6, 3));
        let furthest = |_: usize, node: usize| Progress { prepared: Seqno(node as u64), high: Seqno(0) };
        let after = fail_over(&suspended, 1, furthest).unwrap();
        assert_eq!(after.chains, [vec![Some(1), Some(0), None], vec![Some(0), Some(1), None]]);
        assert_eq!(after.revision.rev, 7);
    }

    #[test]
    fn the_replica_that_prepared_most_takes_over_and_the_other_follows_it() {
        let before = map(
            vec![vec![Some(1), Some(0), Some(2)], vec![Some(0), Some(2), Some(1)], vec![Some(2), Some(0), None]],
            3,
        );
        let progress = |prepared, high| Progress { prepared: Seqno(prepared), high: Seqno(high) };
        // Node 0 has more changes, node 2 more of what was acknowledged.
        let after = fail_over(&before, 1, |_, node| [progress(4, 90), progress(9, 9), progress(7, 50)][node]).unwrap();
        assert_eq!(after.chains[0], [Some(1), Some(0), None]);
        assert_eq!(after.chains[1], [Some(0), Some(1), None]);
        assert_eq!(after.chains[2], [Some(1), Some(0), None]);
        let equal = fail_over(&before, 1, |_, node| [progress(4, 9), progress(0, 0), progress(4, 8)][node]).unwrap();
        assert_eq!(equal.chains[0], [Some(0), Some(1), None]);
    }
}
