//! `settee cluster status`: the nodes of the map, and what each of them has.

use std::collections::BTreeMap;

use anyhow::Result;
use types::VbState;

use super::coordinator::{self, Coordinator};

/// One node, as `status` shows it.
struct Seen {
    active: BTreeMap<u16, u64>,
    replica: BTreeMap<u16, u64>,
    /// Why it serves no document, if so.
    waits: Option<String>,
}

fn look(coordinator: &Coordinator, node: &str) -> Result<Seen> {
    let of = |state| -> Result<BTreeMap<u16, u64>> {
        let seqnos = coordinator.with(node, |client| coordinator::seqnos(client, Some(state)))?;
        Ok(seqnos.into_iter().map(|(vb, seqno)| (vb.0, seqno.0)).collect())
    };
    let stats = coordinator.with(node, |client| client.stats(""))?;
    let waits = stats.into_iter().find(|(name, why)| name == "ep_degraded_why" && !why.is_empty());
    Ok(Seen { active: of(VbState::Active)?, replica: of(VbState::Replica)?, waits: waits.map(|(_, why)| why) })
}

pub fn status(coordinator: &Coordinator, from: &str, json: bool) -> Result<()> {
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
                let mut row = serde_json::json!({"node": name, "active": active, "replica": replica, "behind": behind});
                row["state"] = if seen.waits.is_some() { "waiting" } else { "up" }.into();
                if let Some(why) = &seen.waits {
                    row["why"] = why.as_str().into();
                }
                row
            }
            Err(error) => serde_json::json!({"node": name, "state": "down", "why": format!("{error:#}")}),
        });
    }
    if json {
        let (revision, moving) = (map.revision.rev, map.forward.len());
        let shown = serde_json::json!({
            "bucket": map.bucket, "rev": revision, "replicas": map.replicas, "moving": moving, "nodes": rows
        });
        println!("{shown}");
        return Ok(());
    }
    let (vbuckets, replicas, rev) = (map.chains.len(), map.replicas, map.revision.rev);
    println!("bucket {}, {vbuckets} vBuckets, {replicas} replicas, map {rev}", map.bucket);
    let nowhere = map.chains.iter().filter(|chain| chain[0].is_none()).count();
    if nowhere > 0 {
        println!(
            "{nowhere} vBuckets are active nowhere: a failover was interrupted; `settee cluster failover` of that node goes on"
        );
    }
    if !map.forward.is_empty() {
        println!(
            "{} vBuckets are moving; if nobody moves them any more, `settee cluster rebalance` goes on",
            map.forward.len()
        );
    }
    println!("{:<24} {:<7} {:>8} {:>8} {:>10}", "node", "state", "active", "replica", "behind");
    for row in &rows {
        let text = |name: &str| row[name].as_str().map_or_else(|| row[name].to_string(), str::to_owned);
        match row["state"] != "down" {
            true => println!(
                "{:<24} {:<7} {:>8} {:>8} {:>10}",
                text("node"),
                text("state"),
                text("active"),
                text("replica"),
                text("behind")
            ),
            false => println!("{:<24} {:<7} {}", text("node"), text("state"), text("why")),
        }
    }
    for row in rows.iter().filter(|row| row["state"] == "waiting") {
        println!(
            "{} serves no document: {}",
            row["node"].as_str().unwrap_or_default(),
            row["why"].as_str().unwrap_or_default()
        );
    }
    Ok(())
}
