//! More clients than slots: who gets in, how soon, and whether anybody is turned away or forgotten.

use std::fs;
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use clap::Args;
use frontend::ConnectionInfo;
use frontend::table::{Slot, Table};
use serde_json::{Value, json};
use wire::Opcode;
use wire::client::{RequestFrame, store_extras};

use super::{Bench, Common, Only, Story};
use crate::churn::{Churn, Outcome, Step};
use crate::process::Usage;
use crate::protocol::memcached::Binary;
use crate::report::{Column, Ratio, Row, us, whole};
use crate::servers::{Peer, Server};
use crate::slots::{Baseline, Slots};
use crate::tally::tenths;
use crate::workload::Dice;

#[derive(Args, Debug)]
pub struct Connections {
    #[command(flatten)]
    pub(super) common: Common,
    #[command(flatten)]
    only: Only,
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=20_000))]
    clients: u32,
    /// Sizes of the connection table
    #[arg(long, value_delimiter = ',', default_values_t = [800, 512, 128])]
    slots: Vec<u32>,
    /// Operations in flight at once of each pipelining client
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pipeline: u32,
}

/// How long after the last client left its socket may still be half open.
const CLOSE_PATIENCE: Duration = Duration::from_secs(5);
const BASELINE_SLOTS: usize = 512;
/// Slots taken while one more is taken and given back.
const TABLE_SIZES: [u32; 3] = [1_000, 32_000, 1_000_000];
/// How often.
const TABLE_TURNS: u32 = 1_000_000;

const COLUMNS: &[Column] = &[
    Column("conns/s", "conns_per_s", whole),
    Column("refused", "refused", whole),
    Column("starved", "starved", whole),
    Column("mean", "mean_us", us),
    Column("p50", "p50_us", us),
    Column("p99", "p99_us", us),
    Column("max", "max_us", us),
    Column("longest gap", "longest_gap_us", us),
    Column("cpu/conn", "cpu_us_per_op", us),
    Column("half closed", "close_wait", whole),
    Column("a slot", "slot_ns", nanoseconds),
];

impl Connections {
    pub(super) fn run(&self, bench: &mut Bench<'_>) -> Result<Story> {
        let time = self.common.seconds(10.0, 2.0)?;
        let settee = self.common.settee()?;
        let one = [get_step(1, false)];
        for round in 1..=self.common.rounds() {
            for slots in &self.slots {
                for pipelined in [false, true] {
                    let name = format!("slots-{slots}{}", if pipelined { "-pipelined" } else { "" });
                    let settings = [format!("kv.connections_max={slots}")];
                    self.on_settee(bench, round, &name, &settee, &settings, time, |server| {
                        let last = if pipelined { get_step(self.pipeline, true) } else { get_step(1, false) };
                        vec![auth_step(server), select_step(), last]
                    })?;
                }
            }
            // Nobody waits for a slot. A login and a GET, in a round trip each; then with the bucket selected, all in one
            // round trip, as clients do that know what will be answered; then what memcached does, without a login.
            self.on_settee(bench, round, "login", &settee, &[], time, |server| {
                vec![auth_step(server), get_step(1, false)]
            })?;
            self.on_settee(bench, round, "login-at-once", &settee, &[], time, |server| {
                vec![auth_step(server).and(select_step()).and(get_step(1, false))]
            })?;
            let settings = ["kv.open_bucket=default".to_owned()];
            self.on_settee(bench, round, "open-bucket", &settee, &settings, time, |_| one.to_vec())?;
            self.on_memcached(bench, round, &one, time)?;
            for (name, slots) in
                [("scan-512", Slots::scanned(BASELINE_SLOTS)), ("list-512", Slots::listed(BASELINE_SLOTS))]
            {
                if !self.only.wants(name) {
                    continue;
                }
                bench.check_stop()?;
                bench.say(&format!("round {round}: {name}"));
                let baseline = Baseline::start(slots, BASELINE_SLOTS)?;
                let steps = [plain("user", "password"), select_step(), get_step(1, false)];
                let outcome = self.churn(bench, baseline.address, &steps, time, &|| None)?;
                baseline.end()?;
                bench.rows.push(self.row(name, &outcome));
            }
            for slots in TABLE_SIZES {
                let turns = if self.common.quick { TABLE_TURNS / 10 } else { TABLE_TURNS };
                for (name, measure) in [("table", table_row as fn(&str, u32, u32) -> Row), ("scan-table", scan_row)] {
                    let name = format!("{name}-{slots}");
                    if self.only.wants(&name) {
                        bench.check_stop()?;
                        bench.say(&format!("round {round}: {name}"));
                        bench.rows.push(measure(&name, slots, turns));
                    }
                }
            }
        }
        let [small, middle, large] = TABLE_SIZES.map(|slots| format!("table-{slots}"));
        let ratios = vec![
            Ratio::new("slot_ns", &large, &small),
            Ratio::new("slot_ns", &format!("scan-{small}"), &small),
            Ratio::new("slot_ns", &format!("scan-{middle}"), &middle),
            Ratio::new("conns_per_s", "login", "memcached"),
            Ratio::new("conns_per_s", "login-at-once", "memcached"),
            Ratio::new("conns_per_s", "open-bucket", "memcached"),
            Ratio::new("conns_per_s", "list-512", "scan-512"),
        ];
        Ok(Story { columns: COLUMNS, ratios })
    }

    #[allow(clippy::too_many_arguments, reason = "one row's whole description, said in one place")]
    fn on_settee(
        &self,
        bench: &mut Bench<'_>,
        round: u32,
        name: &str,
        binary: &std::path::Path,
        settings: &[String],
        time: Duration,
        steps: impl Fn(&Server) -> Vec<Step>,
    ) -> Result<()> {
        if !self.only.wants(name) {
            return Ok(());
        }
        bench.check_stop()?;
        let dir = bench.server_dir()?;
        bench.say(&format!("round {round}: {name}"));
        let server = match Server::settee(binary, dir.path(), settings) {
            Ok(server) => server,
            Err(error) => {
                bench.rows.skip(name, &format!("{error:#}"));
                return Ok(());
            }
        };
        bench.versions.insert("settee".to_owned(), server.version.clone());
        let row = self.on_server(bench, name, &server, &steps(&server), time)?;
        bench.rows.push(row);
        Ok(())
    }

    fn on_memcached(&self, bench: &mut Bench<'_>, round: u32, steps: &[Step], time: Duration) -> Result<()> {
        if !self.only.wants("memcached") {
            return Ok(());
        }
        bench.check_stop()?;
        bench.say(&format!("round {round}: memcached"));
        let dir = bench.server_dir()?;
        match Server::peer(Peer::Memcached, dir.path(), self.clients) {
            Ok(server) => {
                bench.versions.insert("memcached".to_owned(), server.version.clone());
                let row = self.on_server(bench, "memcached", &server, steps, time)?;
                bench.rows.push(row);
            }
            Err(error) => bench.rows.skip("memcached", &format!("{error:#}")),
        }
        Ok(())
    }

    fn on_server(&self, bench: &Bench<'_>, name: &str, server: &Server, steps: &[Step], time: Duration) -> Result<Row> {
        let address = server.target.socket_address()?;
        let outcome = self.churn(bench, address, steps, time, &|| server.usage())?;
        let mut row = self.row(name, &outcome);
        row.insert("close_wait".into(), json!(half_closed_after_patience(address)));
        if TcpStream::connect_timeout(&address, Duration::from_secs(5)).is_err() {
            bail!("{name}: after the storm the server no longer takes connections");
        }
        Ok(row)
    }

    fn churn(
        &self,
        bench: &Bench<'_>,
        address: SocketAddr,
        steps: &[Step],
        time: Duration,
        usage: &dyn Fn() -> Option<Usage>,
    ) -> Result<Outcome> {
        let churn = Churn {
            address,
            steps,
            protocol: &|| Box::new(Binary),
            clients: self.clients,
            warmup: Duration::from_millis(500),
            time,
        };
        let outcome = churn.run(bench.stop, usage)?;
        bench.check_stop()?;
        Ok(outcome)
    }

    fn row(&self, name: &str, outcome: &Outcome) -> Row {
        let mut row = Row::new();
        row.insert("name".into(), json!(name));
        row.insert("clients".into(), json!(self.clients));
        row.insert("ops".into(), json!(outcome.completed));
        row.insert("errors".into(), json!(outcome.errors.values().sum::<u64>()));
        let per_s = outcome.completed as f64 / outcome.elapsed.as_secs_f64().max(1e-9);
        row.insert("conns_per_s".into(), json!(tenths(per_s)));
        row.insert("refused".into(), json!(outcome.refused));
        row.insert("starved".into(), json!(outcome.starved));
        outcome.latencies.fields(&mut row);
        row.insert("longest_gap_us".into(), json!(tenths(outcome.longest_gap_ns as f64 / 1e3)));
        let per_op = |cpu: Duration| json!(tenths(cpu.as_secs_f64() * 1e6 / outcome.completed.max(1) as f64));
        if let Some(used) = &outcome.server {
            row.insert("cpu_us_per_op".into(), per_op(used.cpu));
            row.insert("client_cpu_us_per_op".into(), per_op(outcome.client_cpu));
        }
        if !outcome.errors.is_empty() {
            row.insert("errors_by_status".into(), json!(outcome.errors));
        }
        row
    }
}

/// What it costs to take a slot and to give one back, on the server's own table with `slots` of them taken.
///
/// Each turn gives back a slot taken a little earlier, as of connections that come and go beside others that stay.
fn table_row(name: &str, slots: u32, turns: u32) -> Row {
    const COMING_AND_GOING: usize = 64;
    let table = Table::new(2);
    let peer = SocketAddr::from(([127, 0, 0, 1], 1));
    let take = || table.take(|slot| Arc::new(ConnectionInfo::new(slot, peer, Duration::ZERO))).0;
    let mut taken: Vec<Slot> = (0..slots).map(|_| take()).collect();
    let mut coming_and_going = taken.split_off(taken.len() - COMING_AND_GOING);
    let began = Instant::now();
    for turn in 0..turns as usize {
        let slot = &mut coming_and_going[turn % COMING_AND_GOING];
        table.release(*slot);
        *slot = take();
    }
    let elapsed = began.elapsed();
    assert_eq!(table.active(), slots, "as many as before");
    slot_row(name, turns, elapsed)
}

/// The same on a table that looks for a free slot from the first on, while whoever leaves may have any of them.
fn scan_row(name: &str, slots: u32, turns: u32) -> Row {
    const TIME_MAX: Duration = Duration::from_secs(2);
    let table = Slots::all_taken(slots as usize);
    let mut dice = Dice(7);
    let (mut done, began) = (0, Instant::now());
    while done < turns && began.elapsed() < TIME_MAX {
        table.release(dice.below(u64::from(slots)) as usize);
        assert!(table.take().is_some(), "one is free");
        done += 1;
    }
    slot_row(name, done, began.elapsed())
}

fn slot_row(name: &str, turns: u32, elapsed: Duration) -> Row {
    let slot_ns = elapsed.as_nanos() as f64 / f64::from(turns.max(1));
    Row::from_iter([
        ("name".to_owned(), json!(name)),
        ("ops".to_owned(), json!(turns)),
        ("errors".to_owned(), json!(0)),
        ("slot_ns".to_owned(), json!(tenths(slot_ns))),
    ])
}

fn nanoseconds(value: &Value) -> String {
    value.as_f64().map_or_else(String::new, |ns| format!("{ns:.0}ns"))
}

fn auth_step(server: &Server) -> Step {
    plain(&server.identity.user, &server.identity.password)
}

fn plain(user: &str, password: &str) -> Step {
    let value = format!("\0{user}\0{password}");
    let auth = RequestFrame { key: b"PLAIN", value: value.as_bytes(), ..RequestFrame::new(Opcode::SaslAuth) };
    Step { request: auth.to_bytes(), answers: 1 }
}

fn select_step() -> Step {
    let select = RequestFrame { key: b"default", ..RequestFrame::new(Opcode::SelectBucket) };
    Step { request: select.to_bytes(), answers: 1 }
}

/// Reads of a key that is not there, every second one a write of another if `mixed`; all sent together.
fn get_step(count: u32, mixed: bool) -> Step {
    let mut request = Vec::new();
    for opaque in 0..count {
        if mixed && opaque % 2 == 1 {
            let (extras, value) = (store_extras(0, 0), [b'v'; 64]);
            let set = RequestFrame::new(Opcode::Set);
            RequestFrame { opaque, extras: &extras, key: b"stored", value: &value, ..set }.encode(&mut request);
        } else {
            RequestFrame { opaque, key: b"missing", ..RequestFrame::new(Opcode::Get) }.encode(&mut request);
        }
    }
    Step { request, answers: count }
}

/// Sockets of the server whose client has gone and that it has not closed, once they are none or the patience is over.
fn half_closed_after_patience(server: SocketAddr) -> usize {
    let began = Instant::now();
    loop {
        let count = half_closed(server.port());
        if count == 0 || began.elapsed() >= CLOSE_PATIENCE {
            return count;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn half_closed(port: u16) -> usize {
    const CLOSE_WAIT: &str = "08";
    let text = fs::read_to_string("/proc/net/tcp").unwrap_or_default();
    let of_server = |line: &&str| {
        let mut fields = line.split_ascii_whitespace().skip(1);
        let local = fields.next().and_then(|address| address.rsplit_once(':'));
        local.is_some_and(|(_, p)| u16::from_str_radix(p, 16) == Ok(port)) && fields.nth(1) == Some(CLOSE_WAIT)
    };
    text.lines().filter(of_server).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_has_its_price_however_many_are_taken() {
        for row in [table_row("table-100", 100, 1000), scan_row("scan-table-100", 100, 1000)] {
            assert!(row["slot_ns"].as_f64() > Some(0.0) && row["ops"] == 1000, "{row:?}");
        }
    }
}
