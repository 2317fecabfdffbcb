//! vBuckets move from node to node, a few at a time, while they are read and written.
//!
//! ```text
//!     map: where it goes ─▶ the new nodes follow ─▶ two chains ─▶ they have all of it on disk ─▶ takeover ─▶ one chain ─▶ map
//! ```
//! While there are two chains a durable write needs a majority of both, so from the takeover on the new chain stands by itself. Where
//! each vBucket goes is in the map until it is there: whoever finds a map with moves in it, this run or the next, can settle them. The
//! node it leaves is dead, on disk, before the one it goes to is active, so of a move that was interrupted one question is left:
//! is it active there? If not, and its takeover is called off, it stays where it was.

use std::collections::BTreeMap;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use frontend::cluster::{Chain, Map, Node};
use types::{Seqno, VbState, VbUuid};

use super::coordinator::{Coordinator, Order, in_parallel};
use super::layout::successor;

/// vBuckets that move together: each is turned away for a moment, and each map costs every node a sync.
const AT_A_TIME: usize = 16;
/// How long those who follow may make no progress at all.
const STANDSTILL_MAX: Duration = Duration::from_secs(60);
/// Between two looks at how far they are.
const PAUSE: Duration = Duration::from_millis(10);

/// How far a copy of a vBucket is, and in which history.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Extent {
    history: VbUuid,
    high: Seqno,
    durable: Seqno,
}

impl Extent {
    /// Whether it has all that was there. A seqno of another history says nothing.
    fn has(&self, all: &Extent, durable: bool) -> bool {
        let has = if durable { self.durable } else { self.high };
        self.history == all.history && has >= all.high
    }
}

/// A copy that is waited for.
struct Awaited {
    node: String,
    active: String,
    vb: u16,
    /// What the active had when this began.
    all: Extent,
}

impl Coordinator {
    /// Ends the moves that are in the map: each vBucket is where it was or where it was going. The node that is `gone` is not asked.
    pub fn settle(&self, map: Map, gone: Option<&str>) -> Result<Map> {
        if map.forward.is_empty() {
            return Ok(map);
        }
        let mut next = successor(&map);
        next.forward.clear();
        let mut orders = Vec::new();
        for (&vb, goal) in &map.forward {
            let chain = &map.chains[usize::from(vb)];
            let (Some(from), Some(to)) = (chain[0], goal[0]) else { continue };
            let (from_name, to_name) = (map.nodes[from].name(), map.nodes[to].name());
            let is_gone = |name: &str| gone == Some(name);
            if from != to && !is_gone(&to_name) {
                self.call_off(&to_name, vb)?;
            }
            let has_arrived = from != to && !is_gone(&to_name) && self.state(&to_name, vb)? == VbState::Active;
            if has_arrived {
                orders.push(Order::active(to_name, vb, vec![map.names(goal)]));
                if !is_gone(&from_name) {
                    orders.push(Order::passive(from_name, vb, what_is_left(goal, from)));
                }
                next.chains[usize::from(vb)] = goal.clone();
                continue;
            }
            if is_gone(&from_name) {
                continue;
            }
            let may_have_arrived = is_gone(&to_name) && from != to && self.state(&from_name, vb)? != VbState::Active;
            if may_have_arrived && map.replicas == 0 {
                bail!(
                    "vBucket {vb} was on its way to {to_name}, and nobody else has what was written there since; start that again"
                );
            }
            orders.push(Order::active(from_name, vb, vec![map.names(chain)]));
        }
        self.order(&orders)?;
        let there: Vec<String> = next.nodes.iter().map(Node::name).filter(|name| gone != Some(name)).collect();
        in_parallel(&there, |name| self.give_to(&next, name))?;
        Ok(next)
    }

    /// Moves what has to be moved until the chains are these. `told` of every few that have, and of all. Interrupted or failed, it can
    /// be begun anew at any time.
    pub fn move_to(&self, mut map: Map, goals: &[Chain], told: &dyn Fn(usize, usize)) -> Result<Map> {
        let differs = |vb: &u16| map.chains[usize::from(*vb)] != goals[usize::from(*vb)];
        let vbs: Vec<u16> = (0..map.chains.len() as u16).filter(differs).collect();
        let mut is_done = 0;
        for some in vbs.chunks(AT_A_TIME) {
            map = self.announce(&map, some, goals)?;
            if let Err(error) = self.carry_over(&map) {
                // As few as possible are to be active nowhere until somebody comes again.
                let settled = self.settle(map, None);
                let settled = settled.err().map_or(String::new(), |error| format!(" ({error:#})"));
                return Err(error.context(format!("the move has stopped{settled}; the same command goes on with it")));
            }
            map = self.arrived(&map)?;
            is_done += some.len();
            told(is_done, vbs.len());
        }
        Ok(map)
    }

    /// Has the nodes that some vBuckets go to follow them.
    fn announce(&self, map: &Map, vbs: &[u16], goals: &[Chain]) -> Result<Map> {
        let mut next = successor(map);
        next.forward = vbs.iter().map(|vb| (*vb, goals[usize::from(*vb)].clone())).collect();
        let replica = |(vb, at): (u16, usize)| Order::passive(next.nodes[at].name(), vb, VbState::Replica);
        self.order(&newcomers(&next).map(replica).collect::<Vec<_>>())?;
        self.give(&next)?;
        Ok(next)
    }

    /// Brings the vBuckets that the map says are moving to where they go.
    fn carry_over(&self, map: &Map) -> Result<()> {
        // Only then do durable writes wait for them.
        self.await_copies(map, false)?;
        let both = |(vb, goal): (&u16, &Chain)| {
            let chain = &map.chains[usize::from(*vb)];
            let active = map.nodes[chain[0]?].name();
            Some(Order::active(active, *vb, vec![map.names(chain), map.names(goal)]))
        };
        self.order(&map.forward.iter().filter_map(both).collect::<Vec<_>>())?;
        self.await_copies(map, true)?;
        let moves: Vec<(u16, usize, usize)> = map
            .forward
            .iter()
            .filter_map(|(vb, goal)| Some((*vb, map.chains[usize::from(*vb)][0]?, goal[0]?)))
            .collect();
        let changes: Vec<_> = moves.iter().filter(|(_, from, to)| from != to).copied().collect();
        in_parallel(&changes, |(vb, _, to)| self.hand_over(&map.nodes[*to].name(), *vb))?;
        let mut orders = Vec::new();
        for (vb, from, to) in moves {
            let goal = &map.forward[&vb];
            orders.push(Order::active(map.nodes[to].name(), vb, vec![map.names(goal)]));
            if from != to {
                orders.push(Order::passive(map.nodes[from].name(), vb, what_is_left(goal, from)));
            }
        }
        self.order(&orders)
    }

    /// They are there; who has no part in them any more lets go.
    fn arrived(&self, map: &Map) -> Result<Map> {
        let mut next = successor(map);
        let mut leave = Vec::new();
        for (vb, goal) in std::mem::take(&mut next.forward) {
            let before = std::mem::replace(&mut next.chains[usize::from(vb)], goal.clone());
            let out = before.into_iter().flatten().filter(|at| !goal.contains(&Some(*at)));
            leave.extend(out.map(|at| (map.nodes[at].name(), vb)));
        }
        self.give(&next)?;
        in_parallel(&leave, |(node, vb)| self.discard(node, *vb))?;
        Ok(next)
    }

    /// Whatever nodes have that by the map is not theirs goes away: moves that were given up leave copies behind.
    pub fn sweep(&self, map: &Map) -> Result<()> {
        let mut stray = Vec::new();
        for (at, node) in map.nodes.iter().enumerate() {
            let has = self.states(&node.name())?.into_keys();
            stray
                .extend(has.filter(|vb| !map.chains[usize::from(*vb)].contains(&Some(at))).map(|vb| (node.name(), vb)));
        }
        in_parallel(&stray, |(node, vb)| self.discard(node, *vb)).map(drop)
    }

    /// Waits until those that the moving vBuckets go to have what there was when this began; on disk, if `durable`, and then the
    /// replicas that stay too.
    fn await_copies(&self, map: &Map, durable: bool) -> Result<()> {
        let mut waits = Vec::new();
        for (&vb, goal) in &map.forward {
            let chain = &map.chains[usize::from(vb)];
            let Some(active) = chain[0] else { continue };
            let others = goal.iter().flatten().filter(|at| **at != active);
            let name = |at: usize| map.nodes[at].name();
            let all = self.extent(&name(active), vb)?;
            let awaited = |at: &usize| Awaited { node: name(*at), active: name(active), vb, all };
            waits.extend(others.filter(|at| durable || !chain.contains(&Some(**at))).map(awaited));
        }
        let mut seen = BTreeMap::new();
        let mut moved = Instant::now();
        while !waits.is_empty() {
            let extents = in_parallel(&waits, |Awaited { node, vb, .. }| self.extent(node, *vb))?;
            let mut left = Vec::new();
            for (mut awaited, extent) in waits.into_iter().zip(extents) {
                let Awaited { node, active, vb, all } = &mut awaited;
                if seen.insert((node.clone(), *vb), extent) != Some(extent) {
                    moved = Instant::now();
                }
                if extent.has(all, durable) {
                    continue;
                }
                if extent.history != all.history {
                    // The active may have begun another one, and gone back for it.
                    let now = self.extent(active, *vb)?;
                    *all = if now.history == all.history { *all } else { now };
                }
                left.push(awaited);
            }
            waits = left;
            if let Some(Awaited { node, vb, all: Extent { high, .. }, .. }) = waits.first() {
                if moved.elapsed() > STANDSTILL_MAX {
                    bail!(
                        "{node} has not got on with vBucket {vb} to seqno {high} for {STANDSTILL_MAX:?}; `settee stats dcp` there says why"
                    );
                }
                thread::sleep(PAUSE);
            }
        }
        Ok(())
    }

    fn extent(&self, node: &str, vb: u16) -> Result<Extent> {
        let stats = self.with(node, |client| client.stats(&format!("vbucket-seqno {vb}")))?;
        let of = |wanted: &str| {
            let found = stats.iter().find(|(name, _)| name.rsplit(':').next() == Some(wanted));
            let number = found.and_then(|(_, value)| value.parse().ok());
            number.with_context(|| format!("{node} does not say the {wanted} of vBucket {vb}"))
        };
        let (high, durable) = (Seqno(of("high_seqno")?), Seqno(of("last_persisted_seqno")?));
        Ok(Extent { history: VbUuid(of("uuid")?), high, durable })
    }
}

/// Who has nothing yet of a vBucket that moves there.
fn newcomers(map: &Map) -> impl Iterator<Item = (u16, usize)> {
    map.forward.iter().flat_map(|(vb, goal)| {
        let chain = &map.chains[usize::from(*vb)];
        goal.iter().flatten().filter(|at| !chain.contains(&Some(**at))).map(|at| (*vb, *at))
    })
}

/// What the node is that a vBucket left.
fn what_is_left(goal: &Chain, from: usize) -> VbState {
    if goal.contains(&Some(from)) { VbState::Replica } else { VbState::Dead }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_of_another_history_has_nothing_however_far_it_is() {
        let extent =
            |history, high, durable| Extent { history: VbUuid(history), high: Seqno(high), durable: Seqno(durable) };
        let all = extent(1, 10, 3);
        assert!(extent(1, 10, 9).has(&all, false) && !extent(1, 9, 9).has(&all, false));
        assert!(extent(1, 12, 10).has(&all, true) && !extent(1, 12, 9).has(&all, true));
        assert!(!extent(2, 20, 20).has(&all, false) && !extent(2, 20, 20).has(&all, true));
    }
}
