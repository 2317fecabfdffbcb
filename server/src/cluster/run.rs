//! `settee cluster-run`: nodes on this machine, as child processes.
//!
//! Which nodes there are is kept in the directory, so that one that was added is there at the next start, and one that was removed is
//! not. `settee cluster add` and `remove` ask for that through a socket beside it.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::{Context, Result, bail};
use frontend::cluster::{Map, Revision};
use signal_hook::consts::{SIGCHLD, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use types::VbState;
use wire::client::RequestFrame;
use wire::{Opcode, Status};

use super::control::{self, Ask};
use super::coordinator::{Coordinator, Order, in_parallel};
use super::layout;
use super::members::{self, Member};
use super::nodes::{Running, Start};
use crate::cli::ClusterRun;
use crate::credentials;

/// Starts nodes and stays until it is told to stop.
pub fn run(options: &ClusterRun) -> Result<()> {
    if usize::from(options.replicas) >= usize::from(options.nodes) && options.replicas > 0 {
        eprintln!("settee: with {} nodes some of {} replicas have no place", options.nodes, options.replicas);
    }
    let mut signals = Signals::new([SIGTERM, SIGINT, SIGCHLD]).context("cannot listen for signals")?;
    let dir = &options.data_dir;
    fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
    let coordinator = Coordinator::new(&options.user, password(options)?, &options.bucket);
    let members = members::load(dir)?;
    let is_laid_out = !members.is_empty();
    if is_laid_out && usize::from(options.nodes) > members.len() {
        eprintln!("settee: {} has {} nodes; `settee cluster add` adds one", dir.display(), members.len());
    }
    let numbers: Vec<u16> = match is_laid_out {
        true => members.iter().map(|member| member.number).collect(),
        false => (0..options.nodes).collect(),
    };
    let household = Arc::new(Household { options: options.clone(), coordinator, nodes: Mutex::default() });
    numbers.into_iter().try_for_each(|number| household.start(number).map(drop))?;
    let addresses: Vec<(String, String)> =
        household.nodes().iter().map(|child| (child.node.kv.clone(), child.node.admin.clone())).collect();
    let (kv, admin): (Vec<String>, Vec<String>) = addresses.into_iter().unzip();
    match is_laid_out {
        true => household.resume(&kv)?,
        false => household.lay_out(&kv)?,
    }
    household.note_members()?;
    let served = Arc::clone(&household);
    let control = control::serve(dir, move |ask| served.answer(ask));
    let (kv, admin) = (kv.join(","), admin.join(","));
    println!("ready kv={kv} admin={admin} connect=couchbase://{kv} bucket={} user={}", options.bucket, options.user);
    std::io::stdout().flush()?;
    while signals.forever().next() == Some(SIGCHLD) {
        household.nodes().iter_mut().for_each(Child::tell_of_its_end);
    }
    drop(control);
    let mut nodes = std::mem::take(&mut *household.nodes());
    nodes.iter_mut().for_each(|child| child.node.let_go());
    nodes.into_iter().try_for_each(Child::stop)
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

struct Child {
    number: u16,
    node: Running,
    /// Its end was told of.
    is_told: bool,
}

impl Child {
    fn tell_of_its_end(&mut self) {
        if let Some(status) = self.node.ended().filter(|_| !std::mem::replace(&mut self.is_told, true)) {
            let kv = &self.node.kv;
            eprintln!("settee: node {kv} ended with {status}; `settee cluster failover {kv}`");
        }
    }

    fn stop(self) -> Result<()> {
        let name = self.node.kv.clone();
        let status = self.node.wait()?;
        if !self.is_told && !status.success() {
            bail!("node {name} ended with {status}");
        }
        Ok(())
    }
}

struct Household {
    options: ClusterRun,
    coordinator: Coordinator,
    nodes: Mutex<Vec<Child>>,
}

impl Household {
    fn nodes(&self) -> MutexGuard<'_, Vec<Child>> {
        self.nodes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns its key-value address.
    fn start(&self, number: u16) -> Result<String> {
        let ClusterRun { base_port, data_dir, set, .. } = &self.options;
        let kv_port = match base_port {
            0 => 0,
            base => base.checked_add(2 * number).context("there is no port left for another node")?,
        };
        let (user, password) = (self.coordinator.user(), self.coordinator.password());
        let node = Start { dir: data_dir, number, kv_port, user, password, settings: set }.run()?;
        println!("node kv={} admin={} pid={}", node.kv, node.admin, node.pid());
        let kv = node.kv.clone();
        self.nodes().push(Child { number, node, is_told: false });
        Ok(kv)
    }

    fn note_members(&self) -> Result<()> {
        let member = |child: &Child| Member { number: child.number, kv: child.node.kv.clone() };
        let members: Vec<Member> = self.nodes().iter().map(member).collect();
        members::keep(&self.options.data_dir, &members)
    }

    fn answer(&self, ask: Ask) -> Result<String> {
        match ask {
            Ask::Add => {
                let kv = self.start(members::next_number(&self.options.data_dir)?)?;
                self.note_members()?;
                Ok(kv)
            }
            Ask::Stop(kv) => {
                let found = self.nodes().extract_if(.., |child| child.node.kv == kv).next();
                let Some(child) = found else { bail!("{kv} is none of the nodes started here") };
                self.note_members()?;
                child.stop()?;
                println!("node kv={kv} stopped");
                Ok(kv)
            }
        }
    }

    /// At the first start the bucket is made and laid out; later the nodes know where their vBuckets are.
    fn lay_out(&self, nodes: &[String]) -> Result<()> {
        let Household { options, coordinator, .. } = self;
        nodes.iter().try_for_each(|node| self.create_bucket(node))?;
        let maps = nodes.iter().map(|node| coordinator.map(node)).collect::<Result<Vec<Map>>>()?;
        let rev = maps.iter().map(|map| map.revision.rev).max().unwrap_or(0) + 1;
        let first = maps.first().context("there is at least one node")?.clone();
        let revision = Revision { rev, ..first.revision };
        let chains = layout::even(nodes.len(), options.replicas, options.vbuckets);
        // Each knows itself only.
        let known = maps.into_iter().flat_map(|map| map.nodes).collect();
        coordinator.lay_out(&Map { revision, replicas: options.replicas, nodes: known, chains, ..first })
    }

    fn create_bucket(&self, node: &str) -> Result<()> {
        let ClusterRun { bucket, replicas, vbuckets, quota_mb, .. } = &self.options;
        let quota = quota_mb << 20;
        let spec = format!("settee\0max_size={quota};replicas={replicas};max_vbuckets={vbuckets};flush_enabled=true");
        let request =
            RequestFrame { key: bucket.as_bytes(), value: spec.as_bytes(), ..RequestFrame::new(Opcode::CreateBucket) };
        let answer = self.coordinator.admin(node)?.call(&request)?;
        // A start that was interrupted has made it already.
        if answer.status != Status::KeyEexists {
            answer.success().with_context(|| format!("cannot create bucket {bucket:?} on {node}"))?;
        }
        Ok(())
    }

    /// The newest map counts, and what was interrupted is ended: nobody else moves anything now.
    fn resume(&self, nodes: &[String]) -> Result<()> {
        let coordinator = &self.coordinator;
        let maps = in_parallel(nodes, |node| coordinator.map(node))?;
        let is_one = maps.windows(2).all(|two| two[0].revision == two[1].revision);
        let map = maps.into_iter().max_by_key(|map| map.revision).context("there is at least one node")?;
        if let Some(missing) = map.nodes.iter().map(|node| node.name()).find(|name| !nodes.contains(name)) {
            bail!("the map names {missing}, which is none of these nodes; start with the ports of the first time");
        }
        let mut map = coordinator.settle(map, None)?;
        if map.chains.iter().any(|chain| chain[0].is_none()) {
            map = coordinator.promote(&map, |_| true)?.0;
        } else if !is_one {
            map = layout::successor(&map);
            coordinator.give(&map)?;
        }
        for node in nodes.iter().filter(|node| map.place_of(node).is_none()) {
            let dead = |vb| Order::passive(node.clone(), vb, VbState::Dead);
            coordinator.order(&coordinator.states(node)?.into_keys().map(dead).collect::<Vec<_>>())?;
            eprintln!("settee: node {node} was failed over and has nothing; `settee cluster add {node}` uses it again");
        }
        in_parallel(nodes, |node| coordinator.confirm(node)).map(drop)
    }
}

/// Of the directory of a `settee cluster-run`: where a node of it can be reached.
pub fn any_node(dir: &Path) -> Option<String> {
    let members = members::load(dir).ok()?;
    members.into_iter().map(|member| member.kv).find(|kv| std::net::TcpStream::connect(kv).is_ok())
}
