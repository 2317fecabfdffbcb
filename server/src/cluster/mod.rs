//! Several nodes: `settee cluster-run` starts them on this machine, `settee cluster` looks at them and decides for them.
//!
//! ```text
//!     layout ── map ──▶ coordinator ── SET_VBUCKET, SET_CLUSTER_CONFIG ──▶ nodes
//! ```
//! This is the seam where one day a coordinator stands that agrees with others on the map before it gives it: it will use the
//! same verbs.

mod coordinator;
mod layout;
mod nodes;

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result, anyhow, bail};
use coordinator::{Coordinator, Order};
use frontend::cluster::{Map, Revision};
use layout::Progress;
use nodes::{Running, Start};
use signal_hook::consts::{SIGCHLD, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use types::VbState;
use wire::client::RequestFrame;
use wire::{Opcode, Status};

use crate::cli::{Cluster, ClusterRun, Target};
use crate::credentials;

/// Starts nodes and stays until it is told to stop.
pub fn run(options: &ClusterRun) -> Result<()> {
    if usize::from(options.replicas) >= usize::from(options.nodes) && options.replicas > 0 {
        eprintln!("settee: with {} nodes some of {} replicas have no place", options.nodes, options.replicas);
    }
    let mut signals = Signals::new([SIGTERM, SIGINT, SIGCHLD]).context("cannot listen for signals")?;
    let dir = &options.data_dir;
    fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
    let coordinator =
        Coordinator { user: options.user.clone(), password: password(options)?, bucket: options.bucket.clone() };
    let mut nodes = Vec::new();
    for number in 0..options.nodes {
        let kv_port = if options.base_port == 0 { 0 } else { options.base_port + 2 * number };
        let (user, password, settings) = (&*coordinator.user, &*coordinator.password, &*options.set);
        let node = Start { dir, number, kv_port, user, password, settings }.run()?;
        println!("node kv={} admin={} pid={}", node.kv, node.admin, node.pid());
        nodes.push(node);
    }
    settle(options, &coordinator, &nodes)?;
    let joined = |part: fn(&Running) -> &str| nodes.iter().map(part).collect::<Vec<_>>().join(",");
    let (kv, admin) = (joined(|node| &node.kv), joined(|node| &node.admin));
    println!("ready kv={kv} admin={admin} connect=couchbase://{kv} bucket={} user={}", options.bucket, options.user);
    std::io::stdout().flush()?;
    let mut is_told = vec![false; nodes.len()];
    while signals.forever().next() == Some(SIGCHLD) {
        for (node, is_told) in nodes.iter_mut().zip(&mut is_told) {
            if let Some(status) = node.ended().filter(|_| !std::mem::replace(is_told, true)) {
                eprintln!("settee: node {} ended with {status}; `settee cluster failover {}`", node.kv, node.kv);
            }
        }
    }
    nodes.iter_mut().for_each(Running::let_go);
    for (node, is_told) in nodes.into_iter().zip(is_told) {
        let name = node.kv.clone();
        let status = node.wait()?;
        if !is_told && !status.success() {
            bail!("node {name} ended with {status}");
        }
    }
    Ok(())
}

/// The password somebody chose, or the one of this directory, or a new one.
fn password(options: &ClusterRun) -> Result<String> {
    let dir = &options.data_dir;
    if let Ok(password) = credentials::for_tool(options.password_file.as_deref(), dir) {
        return Ok(password);
    }
    let password = credentials::generate(dir, &env::os::env())?;
    let file = credentials::file_in(dir);
    eprintln!("user {}, password {password}; it is kept in {}", options.user, file.display());
    Ok(password)
}

/// At the first start the bucket is made and laid out; later the nodes know where their vBuckets are.
fn settle(options: &ClusterRun, coordinator: &Coordinator, nodes: &[Running]) -> Result<()> {
    let done = options.data_dir.join("laid-out");
    if done.exists() {
        return resume(coordinator, nodes);
    }
    for node in nodes {
        create_bucket(options, coordinator, &node.kv)?;
    }
    let maps = nodes.iter().map(|node| coordinator.map(&node.kv)).collect::<Result<Vec<Map>>>()?;
    let rev = maps.iter().map(|map| map.revision.rev).max().unwrap_or(0) + 1;
    let first = maps.first().context("there is at least one node")?.clone();
    let revision = Revision { rev, ..first.revision };
    let chains = layout::even(nodes.len(), options.replicas, options.vbuckets);
    // Each knows itself only.
    let known = maps.into_iter().flat_map(|map| map.nodes).collect();
    let map = Map { revision, replicas: options.replicas, nodes: known, chains, ..first };
    coordinator.lay_out(&map)?;
    mark(&done).with_context(|| format!("cannot write {}", done.display()))
}

/// The newest map counts. A node that is not in it was failed over and would take itself for active still: its vBuckets are made
/// dead.
fn resume(coordinator: &Coordinator, nodes: &[Running]) -> Result<()> {
    let maps = nodes.iter().map(|node| coordinator.map(&node.kv)).collect::<Result<Vec<Map>>>()?;
    let map = maps.into_iter().max_by_key(|map| map.revision).context("there is at least one node")?;
    let named: Vec<String> = map.nodes.iter().map(|node| node.name()).collect();
    if let Some(missing) = named.iter().find(|name| nodes.iter().all(|node| node.kv != **name)) {
        bail!(
            "the map names {missing}, which is none of these nodes; start with the nodes and ports of the first time"
        );
    }
    let dead = |vb: usize| Order { vb: vb as u16, state: VbState::Dead, topology: None };
    for node in nodes.iter().filter(|node| !named.contains(&node.kv)) {
        coordinator.order(&node.kv, &(0..map.chains.len()).map(dead).collect::<Vec<_>>())?;
        eprintln!(
            "settee: node {} was failed over and serves nothing; start anew on an empty directory to use it",
            node.kv
        );
    }
    Ok(())
}

fn mark(path: &Path) -> std::io::Result<()> {
    fs::File::create(path)?.sync_all()
}

fn create_bucket(options: &ClusterRun, coordinator: &Coordinator, node: &str) -> Result<()> {
    let ClusterRun { bucket, replicas, vbuckets, quota_mb, .. } = options;
    let spec =
        format!("settee\0max_size={};replicas={replicas};max_vbuckets={vbuckets};flush_enabled=true", quota_mb << 20);
    let request =
        RequestFrame { key: bucket.as_bytes(), value: spec.as_bytes(), ..RequestFrame::new(Opcode::CreateBucket) };
    let answer = coordinator.admin(node)?.call(&request)?;
    // A start that was interrupted has made it already.
    if answer.status != Status::KeyEexists {
        answer.success().with_context(|| format!("cannot create bucket {bucket:?} on {node}"))?;
    }
    Ok(())
}

/// `settee cluster …`
pub fn command(command: &Cluster) -> Result<()> {
    match command {
        Cluster::Status { bucket, json, target } => status(&coordinator(target, bucket)?, &target.kv, *json),
        Cluster::Failover { node, bucket, target } => fail_over(&coordinator(target, bucket)?, &target.kv, node),
    }
}

fn coordinator(target: &Target, bucket: &str) -> Result<Coordinator> {
    let password = credentials::for_tool(target.password_file.as_deref(), &target.data_dir)?;
    Ok(Coordinator { user: target.user.clone(), password, bucket: bucket.to_owned() })
}

/// One node, as `status` shows it.
struct Seen {
    active: BTreeMap<u16, u64>,
    replica: BTreeMap<u16, u64>,
}

fn look(coordinator: &Coordinator, node: &str) -> Result<Seen> {
    let mut client = coordinator.client(node)?;
    let mut of = |state| -> Result<BTreeMap<u16, u64>> {
        Ok(coordinator::seqnos(&mut client, Some(state))?.into_iter().map(|(vb, seqno)| (vb.0, seqno.0)).collect())
    };
    Ok(Seen { active: of(VbState::Active)?, replica: of(VbState::Replica)? })
}

fn status(coordinator: &Coordinator, from: &str, json: bool) -> Result<()> {
    let map = coordinator.map(from)?;
    let names: Vec<String> = map.nodes.iter().map(|node| node.name()).collect();
    let seen: Vec<Result<Seen>> = names.iter().map(|name| look(coordinator, name)).collect();
    // Where a vBucket is active, as the map says: an old active may still be up.
    let high = |vb: u16| {
        let at = map.chains.get(usize::from(vb))?[0]?;
        seen.get(at)?.as_ref().ok()?.active.get(&vb).copied()
    };
    let mut rows = Vec::new();
    for (name, seen) in names.iter().zip(&seen) {
        rows.push(match seen {
            Ok(seen) => {
                let lag = seen.replica.iter().map(|(vb, here)| high(*vb).map_or(0, |high| high.saturating_sub(*here)));
                let (active, replica, behind) = (seen.active.len(), seen.replica.len(), lag.sum::<u64>());
                serde_json::json!({"node": name, "state": "up", "active": active, "replica": replica, "behind": behind})
            }
            Err(error) => serde_json::json!({"node": name, "state": "down", "why": format!("{error:#}")}),
        });
    }
    if json {
        let revision = map.revision.rev;
        println!(
            "{}",
            serde_json::json!({"bucket": map.bucket, "rev": revision, "replicas": map.replicas, "nodes": rows})
        );
        return Ok(());
    }
    println!(
        "bucket {}, {} vBuckets, {} replicas, map {}",
        map.bucket,
        map.chains.len(),
        map.replicas,
        map.revision.rev
    );
    println!("{:<24} {:<6} {:>8} {:>8} {:>10}", "node", "state", "active", "replica", "behind");
    for row in &rows {
        let text = |name: &str| row[name].as_str().map_or_else(|| row[name].to_string(), str::to_owned);
        match row["state"] == "up" {
            true => println!(
                "{:<24} {:<6} {:>8} {:>8} {:>10}",
                text("node"),
                text("state"),
                text("active"),
                text("replica"),
                text("behind")
            ),
            false => println!("{:<24} {:<6} {}", text("node"), text("state"), text("why")),
        }
    }
    Ok(())
}

/// Takes a dead node out of the map; the replicas that are furthest take over.
///
/// It may be alive and out of reach only from here, and go on acknowledging what its replicas say they have. So these are told
/// first to follow it no more: what they have when they are asked how far they are, is all that it was ever told. Whoever
/// is interrupted between finds vBuckets without an active, and the same command goes on.
fn fail_over(coordinator: &Coordinator, from: &str, gone: &str) -> Result<()> {
    let map = coordinator.map(from)?;
    let names: Vec<String> = map.nodes.iter().map(|node| node.name()).collect();
    let at = names.iter().position(|name| name == gone);
    let at = at.with_context(|| format!("{gone} is none of {}; name it by its key-value address", names.join(", ")))?;
    if coordinator.is_alive(gone) {
        bail!("{gone} answers: its clients would go on writing there; stop it first");
    }
    if let Err(lost) = layout::fail_over(&map, at, |_, _| Progress::default()) {
        bail!("nobody else has vBuckets {lost:?}; nothing was changed");
    }
    if let Some(silent) = names.iter().find(|name| *name != gone && !coordinator.is_alive(name)) {
        bail!(
            "{silent} does not answer either, and every node that is left must say how far it is; nothing was changed"
        );
    }
    let suspended = layout::suspend(&map, at);
    coordinator.give_but(&suspended, Some(at))?;
    let progress: Vec<BTreeMap<u16, Progress>> = names
        .iter()
        .map(|name| if name == gone { Ok(BTreeMap::new()) } else { coordinator.progress(name) })
        .collect::<Result<_>>()
        .context("every node that is left must say how far it is")?;
    let of = |vb: usize, node: usize| progress[node].get(&(vb as u16)).copied().unwrap_or_default();
    let next = layout::fail_over(&suspended, at, of).map_err(|lost| anyhow!("nobody else has vBuckets {lost:?}"))?;
    let promoted = suspended.chains.iter().filter(|chain| chain[0].is_none()).count();
    coordinator.take_over(&map, &next)?;
    println!("{gone} is out of the map; {promoted} vBuckets were taken over, map {}", next.revision.rev);
    Ok(())
}
