//! Whether it matters over how many vBuckets writes are spread, and whether more clients need more syncs.

use std::time::Duration;

use anyhow::{Result, bail};
use clap::Args;
use types::Level;

use super::{Bench, Common, Story};
use crate::load::{Load, Until};
use crate::report::{self, Ratio};
use crate::servers::Server;
use crate::workload::{Order, Workload};

#[derive(Args, Debug)]
pub struct Vbuckets {
    #[command(flatten)]
    pub(super) common: Common,
    /// Numbers of vBuckets: powers of two up to 1024
    #[arg(long, value_delimiter = ',', default_value = "1,64,1024", value_parser = clap::value_parser!(u32).range(1..=1024))]
    vbuckets: Vec<u32>,
    /// Numbers of connections [default: 1,64,500,2000, with --quick 1,64]
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=60_000))]
    clients: Vec<u32>,
    /// Bytes of a value
    #[arg(long, value_name = "BYTES", default_value_t = 512)]
    value_size: usize,
    /// Only `durable` or only `plain` writes [default: both]
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Event loops of the load generator
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    threads: u32,
}

/// Row, durability of the writes.
const WRITES: [(&str, Option<Level>); 2] = [("durable", Some(Level::PersistMajority)), ("plain", None)];

impl Vbuckets {
    pub(super) fn run(&self, bench: &mut Bench<'_>) -> Result<Story> {
        if let Some(unknown) = self.only.iter().find(|only| WRITES.iter().all(|(name, _)| *only != name)) {
            bail!("--only {unknown}: choose from durable, plain");
        }
        if let Some(odd) = self.vbuckets.iter().find(|vbuckets| !vbuckets.is_power_of_two()) {
            bail!("--vbuckets {odd}: keys can be spread over a power of two only");
        }
        let wanted = |name: &str| self.only.is_empty() || self.only.iter().any(|only| only == name);
        let writes = || WRITES.into_iter().filter(|(name, _)| wanted(name));
        let clients = match (&self.clients[..], self.common.quick) {
            ([], true) => vec![1, 64],
            ([], false) => vec![1, 64, 500, 2000],
            (chosen, _) => chosen.to_vec(),
        };
        let time = self.common.seconds(5.0, 1.0)?;
        let settee = self.common.settee()?;
        for round in 1..=self.common.rounds() {
            // All at once, so that rows that are compared are measured one after the other.
            let mut servers = Vec::new();
            for vbuckets in &self.vbuckets {
                let dir = bench.server_dir()?;
                let server = Server::settee(&settee, dir.path(), &[format!("bucket.vbuckets={vbuckets}")])?;
                bench.versions.insert("settee".to_owned(), server.version.clone());
                servers.push((*vbuckets, server, dir));
            }
            for clients in &clients {
                for (write, level) in writes() {
                    for (vbuckets, server, _) in &servers {
                        bench.check_stop()?;
                        let name = name(write, *vbuckets, *clients);
                        bench.say(&format!("round {round}: {name}"));
                        match bench.drive(server, level, &self.load(*clients, time)) {
                            Ok(outcome) => bench.rows.push(report::row(&name, *clients, &outcome)),
                            Err(error) => bench.rows.skip(&name, &format!("{error:#}")),
                        }
                    }
                }
            }
        }
        let (least, most) = (self.vbuckets.iter().min().copied(), self.vbuckets.iter().max().copied());
        let (least, most) = (least.unwrap_or(1), most.unwrap_or(1));
        let mut ratios: Vec<Ratio> = writes()
            .flat_map(|(write, _)| clients.iter().map(move |clients| (write, *clients)))
            .map(|(write, clients)| Ratio::new("ops_per_s", &name(write, most, clients), &name(write, least, clients)))
            .collect();
        let (few, many) = (clients.iter().min().copied(), clients.iter().max().copied());
        let (few, many) = (few.unwrap_or(1), many.unwrap_or(1));
        for field in ["ops_per_s", "syncs_per_s"] {
            ratios.push(Ratio::new(field, &name("durable", most, many), &name("durable", most, few)));
        }
        ratios.retain(|ratio| ratio.row != ratio.over);
        Ok(Story { columns: report::LOAD_COLUMNS, ratios })
    }

    fn load(&self, clients: u32, time: Duration) -> Load {
        Load {
            workload: Workload { value_bytes: self.value_size, set_pct: 100, keys: 100_000, order: Order::Random },
            clients,
            depth: 1,
            threads: self.threads,
            warmup: if self.common.quick { Duration::from_millis(200) } else { Duration::from_secs(1) },
            until: Until::For(time),
            rate: None,
            seed: 1,
        }
    }
}

/// `durable-1024/64`: writes, vBuckets, clients.
fn name(write: &str, vbuckets: u32, clients: u32) -> String {
    format!("{write}-{vbuckets}/{clients}")
}
