//! Several nodes: `settee cluster-run` starts them on this machine, `settee cluster` looks at them and decides for them.
//!
//! ```text
//!     layout ── map ──▶ coordinator ── SET_VBUCKET, SET_CLUSTER_CONFIG, takeovers ──▶ nodes
//! ```
//! This is the seam where one day a coordinator stands that agrees with others on the map before it gives it: it will use the
//! same verbs. Nothing is remembered here between two commands: the map says what is under way.

mod control;
mod coordinator;
mod layout;
mod members;
mod moves;
mod nodes;
mod run;
mod status;

use std::io::Write;

use anyhow::{Context, Result, bail};
use frontend::cluster::{Map, Node};
use serde_json::Value;
use wire::client::RequestFrame;
use wire::{Opcode, Status};

use crate::cli::{Cluster, ClusterTarget};
use crate::credentials;
use control::Ask;
use coordinator::Coordinator;

pub use run::run;

/// `settee cluster …`
pub fn command(command: &Cluster) -> Result<()> {
    match command {
        Cluster::Status { json, target } => {
            let (coordinator, from) = reach(target)?;
            status::status(&coordinator, &from, *json)
        }
        Cluster::Failover { node, target } => {
            let (coordinator, from) = reach(target)?;
            fail_over(&coordinator, &from, node)
        }
        Cluster::Add { node, target } => add(target, node.as_deref()),
        Cluster::Remove { node, target } => remove(target, node),
        Cluster::Rebalance { target } => {
            let (coordinator, from) = reach(target)?;
            let map = whole_map(&coordinator, &from)?;
            rebalance(&coordinator, map, None).map(drop)
        }
    }
}

/// Who speaks, and a node to begin with.
fn reach(target: &ClusterTarget) -> Result<(Coordinator, String)> {
    let ClusterTarget { kv, user, password_file, data_dir, bucket } = target;
    let password = credentials::for_cluster_tool(password_file.as_deref(), data_dir)?;
    let from = kv.clone().or_else(|| run::any_node(data_dir)).unwrap_or_else(|| ClusterTarget::KV.to_owned());
    Ok((Coordinator::new(user, password, bucket), from))
}

/// The newest map, without moves that somebody else began and did not end.
fn whole_map(coordinator: &Coordinator, from: &str) -> Result<Map> {
    let map = coordinator.settle(coordinator.newest_map(from, None)?, None)?;
    let nowhere = map.chains.iter().filter(|chain| chain[0].is_none()).count();
    if nowhere > 0 {
        bail!("{nowhere} vBuckets are active nowhere: a failover was interrupted; run that again first");
    }
    Ok(map)
}

fn add(target: &ClusterTarget, node: Option<&str>) -> Result<()> {
    let (coordinator, from) = reach(target)?;
    let map = whole_map(&coordinator, &from)?;
    let node = match node {
        Some(node) => node.to_owned(),
        None => control::ask(&target.data_dir, &Ask::Add)?,
    };
    let new = myself(&coordinator, &node)?;
    let name = new.name();
    if map.place_of(&name).is_some() {
        bail!("{name} is in the map already");
    }
    let sibling = map.nodes.first().context("a map has a node")?.name();
    create_bucket(&coordinator, &sibling, &name, &map)?;
    // A new bucket takes itself for active everywhere. One that was there before may have copies of another history, which have
    // come far and would be taken for copies of ours.
    coordinator.discard_all(&name, map.chains.len() as u16)?;
    let rev = coordinator.map(&name)?.revision.rev;
    let mut next = layout::successor(&map);
    next.revision.rev = next.revision.rev.max(rev + 1);
    next.nodes.push(new);
    coordinator.give(&next)?;
    println!("{name} is in the map {}; `settee cluster rebalance` gives it its share", next.revision.rev);
    Ok(())
}

/// A node as it says itself that it is reached.
fn myself(coordinator: &Coordinator, node: &str) -> Result<Node> {
    let answer = coordinator.admin(node)?.call(&RequestFrame::new(Opcode::GetClusterConfig))?.success()?;
    let config: Value = serde_json::from_slice(&answer.value).context("its configuration is no JSON")?;
    let entry = &config["nodesExt"][0];
    let port = |name: &str| entry["services"][name].as_u64().and_then(|port| u16::try_from(port).ok());
    let dialled = node.rsplit_once(':').map_or(node, |(host, _)| host.trim_matches(['[', ']']));
    let host = entry["hostname"].as_str().filter(|host| *host != "$HOST").unwrap_or(dialled).to_owned();
    match (port("kv"), port("mgmt")) {
        (Some(kv_port), Some(admin_port)) => Ok(Node { host, kv_port, admin_port }),
        _ => bail!("{node} does not say its ports"),
    }
}

/// Makes the bucket on a node as it is on another.
fn create_bucket(coordinator: &Coordinator, like: &str, node: &str, map: &Map) -> Result<()> {
    let stats = coordinator.with(like, |client| client.stats(""))?;
    let of = |wanted: &str| {
        let found = stats.iter().find(|(name, _)| name == wanted).map(|(_, value)| value.clone());
        found.with_context(|| format!("{like} does not say its {wanted}"))
    };
    let min_level = match &*of("ep_durability_min_level")? {
        "majorityAndPersistActive" => "majority_and_persist_on_master",
        "persistToMajority" => "persist_to_majority",
        "majority" => "majority",
        _ => "none",
    };
    let spec = format!(
        "settee\0max_size={};replicas={};max_vbuckets={};item_eviction_policy={};max_ttl={};durability_min_level={min_level};\
         compression_mode={};flush_enabled={}",
        of("ep_max_size")?,
        map.replicas,
        map.chains.len(),
        of("ep_item_eviction_policy")?,
        of("ep_max_ttl")?,
        of("ep_compression_mode")?,
        of("ep_flushall_enabled")?,
    );
    let request =
        RequestFrame { key: map.bucket.as_bytes(), value: spec.as_bytes(), ..RequestFrame::new(Opcode::CreateBucket) };
    let answer = coordinator.admin(node)?.call(&request)?;
    if answer.status != Status::KeyEexists {
        answer.success().with_context(|| format!("cannot create bucket {:?} on {node}", map.bucket))?;
    }
    Ok(())
}

fn remove(target: &ClusterTarget, node: &str) -> Result<()> {
    let (coordinator, from) = reach(target)?;
    let map = whole_map(&coordinator, &from)?;
    let at = find(&map, node)?;
    if map.nodes.len() == 1 {
        bail!("{node} is the only node");
    }
    if map.nodes.len() <= usize::from(map.replicas) + 1 {
        let (left, replicas) = (map.nodes.len() - 1, map.replicas);
        eprintln!(
            "settee: {left} nodes have no place for {replicas} replicas of each vBucket; durable writes may be impossible then"
        );
    }
    let map = rebalance(&coordinator, map, Some(at))?;
    let next = layout::without(&map, at).map_err(|left| anyhow::anyhow!("{node} still has vBuckets {left:?}"))?;
    coordinator.give(&next)?;
    // Last: from here on it turns everybody away, to the others.
    coordinator.give_to(&next, node)?;
    println!("{node} is out of the map, {}", next.revision.rev);
    match control::ask(&target.data_dir, &Ask::Stop(node.to_owned())) {
        Ok(_) => println!("{node} has stopped"),
        Err(_) => println!("{node} still runs and has nothing; stop it when you like"),
    }
    Ok(())
}

/// Moves what has to be moved until everything is spread evenly, over all or all but one.
fn rebalance(coordinator: &Coordinator, map: Map, leaves: Option<usize>) -> Result<Map> {
    let goals = layout::balance(&map.chains, map.nodes.len(), leaves);
    let map = coordinator.move_to(map, &goals, &|done, all| {
        println!("{done} of {all} vBuckets moved");
        let _ = std::io::stdout().flush();
    })?;
    coordinator.sweep(&map)?;
    for (at, node) in map.nodes.iter().enumerate() {
        let actives = map.chains.iter().filter(|chain| chain[0] == Some(at)).count();
        let replicas = map.chains.iter().filter(|chain| chain[1..].contains(&Some(at))).count();
        println!("{}: {actives} active, {replicas} replicas", node.name());
    }
    Ok(map)
}

fn find(map: &Map, node: &str) -> Result<usize> {
    let names: Vec<String> = map.nodes.iter().map(Node::name).collect();
    map.place_of(node)
        .with_context(|| format!("{node} is none of {}; name it by its key-value address", names.join(", ")))
}

/// Takes a node that does not answer out of the map; the replicas that are furthest take over. Whoever is interrupted between finds
/// vBuckets without an active, and the same command goes on.
fn fail_over(coordinator: &Coordinator, from: &str, gone: &str) -> Result<()> {
    let map = coordinator.newest_map(from, Some(gone))?;
    let is_interrupted = map.chains.iter().any(|chain| chain[0].is_none());
    if is_interrupted && map.place_of(gone).is_none() {
        let (next, promoted) = coordinator.promote(&map, |_| true)?;
        println!("{gone} was out of the map already; {promoted} vBuckets were taken over, map {}", next.revision.rev);
        return Ok(());
    }
    let at = find(&map, gone)?;
    if coordinator.is_alive(gone) {
        bail!("{gone} answers: its clients would go on writing there; stop it first");
    }
    let map = coordinator.settle(map, Some(gone))?;
    let (next, promoted) = coordinator.fail_over(&map, at)?;
    println!("{gone} is out of the map; {promoted} vBuckets were taken over, map {}", next.revision.rev);
    Ok(())
}
