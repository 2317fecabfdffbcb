//! Servers started for an experiment, each on a scratch directory and a free loopback port, and ended with it.

use std::fs;
use std::io::{BufRead, BufReader};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};

use crate::machine;
use crate::process::{self, Usage};
use crate::target::{Identity, Kind, Target};

/// How long a server may take to answer.
const READY_PATIENCE: Duration = Duration::from_secs(60);
/// How long it may take to end when asked.
const END_PATIENCE: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(10);

/// A server that is not ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peer {
    Memcached,
    /// Every write synced before it is answered.
    RedisAlways,
    Etcd,
    Postgres,
}

/// How a cluster is laid out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    pub nodes: u16,
    pub replicas: u8,
    pub vbuckets: u32,
}

/// A running server, or a cluster. Dropped, it is ended; its files are those of the directory it was given.
pub struct Server {
    pub target: Target,
    pub identity: Identity,
    pub version: String,
    dir: PathBuf,
    child: Owned,
}

/// A child that does not outlive this value.
struct Owned {
    child: Child,
    /// What asks it to end, where more than one process has to. The others are killed: their files go with them.
    signal: Option<&'static str>,
    /// Kept, so that it may go on printing.
    stdout: Option<BufReader<ChildStdout>>,
}

impl Server {
    /// Starts `binary serve` with `settings`, as in `--set`.
    ///
    /// # Errors
    /// It ends before it is ready; the text is its last line.
    pub fn settee(binary: &Path, dir: &Path, settings: &[String]) -> Result<Server> {
        Server::serve(binary, dir, settings, new_password())
    }

    fn serve(binary: &Path, dir: &Path, settings: &[String], password: String) -> Result<Server> {
        let mut command = Command::new(binary);
        command.arg("serve").arg("--data-dir").arg(dir.join("data")).args(["--kv=127.0.0.1:0", "--admin=127.0.0.1:0"]);
        command.args(settings.iter().flat_map(|pair| ["--set", pair]));
        Server::launch(command, binary, dir, password, None)
    }

    /// Ends it in order and starts it again on what it left.
    ///
    /// # Errors
    /// As of [`Server::settee`].
    pub fn restart(mut self, binary: &Path, settings: &[String]) -> Result<Server> {
        self.child.signal = Some("TERM");
        let (dir, password) = (self.dir.clone(), self.identity.password.clone());
        drop(self);
        Server::serve(binary, &dir, settings, password)
    }

    /// Starts `binary cluster-run`: its `target` is the first node, and every node is in the map that it tells.
    ///
    /// # Errors
    /// As of [`Server::settee`].
    pub fn cluster(binary: &Path, dir: &Path, shape: Shape, settings: &[String]) -> Result<Server> {
        let Shape { nodes, replicas, vbuckets } = shape;
        let mut command = Command::new(binary);
        command.args(["cluster-run", "--base-port=0", "--quota-mb=1024", "--data-dir"]).arg(dir.join("data"));
        command.args([format!("--nodes={nodes}"), format!("--replicas={replicas}"), format!("--vbuckets={vbuckets}")]);
        command.args(settings.iter().flat_map(|pair| ["--set", pair]));
        // It ends its nodes when asked; killed, it would leave them to end by themselves.
        Server::launch(command, binary, dir, new_password(), Some("TERM"))
    }

    /// Starts what prints a line `ready kv=ADDRESS…` when it serves.
    fn launch(
        mut command: Command,
        binary: &Path,
        dir: &Path,
        password: String,
        signal: Option<&'static str>,
    ) -> Result<Server> {
        command.env("SETTEE_PASSWORD", &password);
        let log = dir.join("log");
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(fs::File::create(&log)?);
        let mut child = command.spawn().with_context(|| format!("cannot start {}", binary.display()))?;
        let stdout = child.stdout.take().map(BufReader::new);
        let mut child = Owned { child, signal, stdout };
        let Some(address) = child.address()? else {
            let said = fs::read_to_string(&log).unwrap_or_default();
            bail!("settee did not start: {}", said.trim_end().lines().last().unwrap_or("it said nothing"));
        };
        Ok(Server {
            target: Target { kind: Kind::Couchbase, address, path: "default".to_owned() },
            identity: Identity { user: "Administrator".to_owned(), password },
            version: version(binary)?,
            dir: dir.to_owned(),
            child,
        })
    }

    /// Starts a peer for up to `clients` connections.
    ///
    /// # Errors
    /// It is not installed, or does not start.
    pub fn peer(peer: Peer, dir: &Path, clients: u32) -> Result<Server> {
        let port = free_port()?;
        let (kind, program) = match peer {
            Peer::Memcached => (Kind::MemcachedBinary, "memcached"),
            Peer::RedisAlways => (Kind::Redis, "redis-server"),
            Peer::Etcd => (Kind::Etcd, "etcd"),
            Peer::Postgres => (Kind::Postgres, "postgres"),
        };
        let binary = find(program).with_context(|| format!("{program} is not installed"))?;
        let version = version(&binary)?;
        let mut signal = None;
        let mut command = Command::new(&binary);
        let port_text = port.to_string();
        // Those that have left may not be gone yet when others come.
        let room = (clients * 4 + 1000).to_string();
        match peer {
            Peer::Memcached => {
                command.args(["-l", "127.0.0.1", "-p", &port_text, "-m", "2048", "-c", &room]);
                if is_root() {
                    command.args(["-u", "nobody"]);
                }
            }
            Peer::RedisAlways => {
                command.args(["--bind", "127.0.0.1", "--port", &port_text, "--save", ""]);
                command.args(["--maxclients", &room]);
                command.args(["--appendonly", "yes", "--appendfsync", "always", "--dir"]).arg(dir);
            }
            Peer::Etcd => {
                let (client, other) =
                    (format!("http://127.0.0.1:{port}"), format!("http://127.0.0.1:{}", free_port()?));
                command.args(["--listen-client-urls", &client, "--advertise-client-urls", &client]);
                command.args(["--listen-peer-urls", &other, "--initial-advertise-peer-urls", &other]);
                command.args(["--initial-cluster", &format!("default={other}"), "--log-level", "error", "--data-dir"]);
                command.arg(dir.join("etcd"));
            }
            Peer::Postgres => {
                let data = dir.join("postgres");
                init_postgres(&binary, dir, &data)?;
                // At once, with all its processes, and without a last checkpoint.
                signal = Some("QUIT");
                command.args(["-c", "listen_addresses=127.0.0.1", "-c", "unix_socket_directories=", "-p", &port_text]);
                command.args(["-c", "synchronous_commit=on", "-c", "fsync=on", "-c", "shared_buffers=256MB"]);
                command.arg("-c").arg(format!("max_connections={}", clients + 20)).arg("-D").arg(&data);
                as_unprivileged(&mut command)?;
            }
        }
        let log = dir.join("log");
        command.current_dir(dir).stdin(Stdio::null());
        command.stdout(fs::File::create(&log)?).stderr(fs::File::options().append(true).open(&log)?);
        let child = command.spawn().with_context(|| format!("cannot start {}", binary.display()))?;
        let mut child = Owned { child, signal, stdout: None };
        let target = Target { kind, address: format!("127.0.0.1:{port}"), path: String::new() };
        let identity = Identity::default();
        child.wait_until(|| answers(&target)).with_context(|| {
            let said = fs::read_to_string(&log).unwrap_or_default();
            format!("{program} did not start: {}", said.trim_end().lines().last().unwrap_or("it said nothing"))
        })?;
        Ok(Server { target, identity, version, dir: dir.to_owned(), child })
    }

    /// Where its files are.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    pub fn usage(&self) -> Option<Usage> {
        let flushes = machine::flushes(&self.dir);
        process::usage_of_family(self.child.child.id()).map(|usage| Usage { flushes, ..usage })
    }

    /// How often its threads were given a processor so far.
    pub fn context_switches(&self) -> Option<u64> {
        process::context_switches_of(self.child.child.id())
    }

    /// Memory it has now, its children's not among it.
    pub fn resident_bytes(&self) -> Option<u64> {
        process::resident_bytes_of(self.child.child.id())
    }
}

fn new_password() -> String {
    let mut random = [0; 16];
    env::os::env().rng.fill(&mut random);
    random.iter().map(|byte| format!("{byte:02x}")).collect()
}

impl Owned {
    /// The first address of the line `ready kv=ADDRESS,…`. `None`: it ended without one.
    fn address(&mut self) -> Result<Option<String>> {
        let Some(stdout) = &mut self.stdout else { return Ok(None) };
        let mut line = String::new();
        while stdout.read_line(&mut line)? > 0 {
            if let Some(address) = ready_address(&line) {
                return Ok(Some(address.to_owned()));
            }
            line.clear();
        }
        Ok(None)
    }

    fn wait_until(&mut self, ready: impl Fn() -> bool) -> Result<()> {
        let began = Instant::now();
        while !ready() {
            if let Some(status) = self.child.try_wait()? {
                bail!("it ended with {status}");
            }
            if began.elapsed() > READY_PATIENCE {
                bail!("it did not answer within {READY_PATIENCE:?}");
            }
            thread::sleep(POLL);
        }
        Ok(())
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        // Sending a signal is the one thing std has no call for; the shell's own `kill` is on every machine. The
        // process is our child and not yet waited for, so the number is still its.
        let pid = self.child.id().to_string();
        let ask = |signal| Command::new("sh").args(["-c", "kill -s \"$1\" \"$2\"", "sh", signal, &pid]).status();
        let asked = self.signal.is_some_and(|signal| ask(signal).is_ok_and(|status| status.success()));
        let began = Instant::now();
        while asked && began.elapsed() < END_PATIENCE {
            match self.child.try_wait() {
                Ok(None) => thread::sleep(POLL),
                _ => return,
            }
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn ready_address(line: &str) -> Option<&str> {
    let kv = line.strip_prefix("ready ")?.split_whitespace().find_map(|word| word.strip_prefix("kv="))?;
    kv.split(',').next()
}

/// Waits until a server that was just filled has put away what it was given, as far as its processor time shows; reads
/// would be measured beside that otherwise.
pub fn settle(server: &Server) {
    const LOOK: Duration = Duration::from_millis(200);
    const LOOKS_MAX: usize = 50;
    let mut before = server.usage();
    for _ in 0..LOOKS_MAX {
        thread::sleep(LOOK);
        let now = server.usage();
        match now.as_ref().zip(before.as_ref()).map(|(now, before)| now.since(before).cpu) {
            Some(busy) if busy > LOOK / 10 => before = now,
            _ => return,
        }
    }
}

/// Takes a connection, and where that is not enough, a request.
fn answers(target: &Target) -> bool {
    let Ok(address) = target.socket_address() else { return false };
    if TcpStream::connect_timeout(&address, Duration::from_secs(1)).is_err() {
        return false;
    }
    match target.kind {
        // Before a leader is elected, and while recovery runs, these accept and refuse.
        Kind::Etcd => put_to_etcd(target).is_ok(),
        Kind::Postgres => target.prepare(&Identity::default(), None).is_ok(),
        _ => true,
    }
}

fn put_to_etcd(target: &Target) -> Result<()> {
    use crate::protocol::{Action, Answer, Parsed, Protocol, etcd::Etcd, exchange};
    let (mut etcd, mut request) = (Etcd::default(), Vec::new());
    etcd.encode(b"ready", Action::Set(b"?"), 0, &mut request);
    exchange(&mut target.connect()?, &request, |input| match etcd.parse(input)? {
        Parsed::Incomplete => Ok(None),
        Parsed::Reply { answer: Answer::Done, .. } => Ok(Some(())),
        Parsed::Reply { answer, .. } => Err(anyhow!("{answer:?}")),
    })
}

fn init_postgres(postgres: &Path, dir: &Path, data: &Path) -> Result<()> {
    let initdb = fs::canonicalize(postgres)?.with_file_name("initdb");
    // Another user has to reach it through here.
    fs::set_permissions(dir, fs::Permissions::from_mode(0o711))?;
    fs::create_dir(data)?;
    if is_root() {
        let (user, group) = unprivileged()?;
        chown(data, Some(user), Some(group))?;
    }
    let mut command = Command::new(&initdb);
    command
        .args(["-A", "trust", "-U", "postgres", "-E", "UTF8", "--locale=C", "--no-sync", "-D"])
        .arg(data)
        .current_dir(dir);
    as_unprivileged(&mut command)?;
    let made = command.output().with_context(|| format!("cannot start {}", initdb.display()))?;
    if !made.status.success() {
        let said = String::from_utf8_lossy(&made.stderr).into_owned();
        bail!("initdb failed: {}", said.trim_end().lines().last().unwrap_or_default());
    }
    Ok(())
}

/// postgres refuses to run as root.
fn as_unprivileged(command: &mut Command) -> Result<()> {
    if is_root() {
        let (user, group) = unprivileged()?;
        command.uid(user).gid(group);
    }
    Ok(())
}

/// The user and group of `postgres`, else of `nobody`.
fn unprivileged() -> Result<(u32, u32)> {
    let users = fs::read_to_string("/etc/passwd").context("cannot read /etc/passwd")?;
    let find = |name: &str| {
        let fields: Vec<&str> = users.lines().map(|l| l.split(':').collect::<Vec<_>>()).find(|f| f[0] == name)?;
        Some((fields.get(2)?.parse().ok()?, fields.get(3)?.parse().ok()?))
    };
    find("postgres").or_else(|| find("nobody")).context("there is no user to run postgres as")
}

fn is_root() -> bool {
    fs::metadata("/proc/self").is_ok_and(|own| own.uid() == 0)
}

/// On the path, or where Debian keeps postgres.
fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut places: Vec<PathBuf> = std::env::split_paths(&path).chain(["/usr/sbin".into()]).collect();
    if let Ok(versions) = fs::read_dir("/usr/lib/postgresql") {
        places.extend(versions.flatten().map(|entry| entry.path().join("bin")));
    }
    places.into_iter().map(|place| place.join(program)).find(|path| path.is_file())
}

/// The first line of what `--version` prints.
fn version(binary: &Path) -> Result<String> {
    let output = Command::new(binary).arg("--version").output();
    let output = output.with_context(|| format!("cannot start {}", binary.display()))?;
    Ok(String::from_utf8_lossy(&output.stdout).lines().next().unwrap_or_default().trim().to_owned())
}

/// A port that was free a moment ago.
fn free_port() -> Result<u16> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_that_does_not_start_is_quoted_and_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let refused = Server::settee(Path::new("/bin/false"), dir.path(), &[]).err().expect("false is no server");
        assert!(refused.to_string().contains("it said nothing"), "{refused}");
    }

    #[test]
    fn a_server_is_where_it_says_and_a_cluster_where_its_first_node_is() {
        assert_eq!(ready_address("ready pid=3 kv=127.0.0.1:7 admin=127.0.0.1:8\n"), Some("127.0.0.1:7"));
        assert_eq!(ready_address("ready kv=127.0.0.1:7,127.0.0.1:9 admin=x\n"), Some("127.0.0.1:7"));
        assert_eq!(ready_address("node kv=127.0.0.1:7 admin=x pid=3\n"), None);
    }

    #[test]
    fn a_child_ends_with_its_owner() {
        let child = Command::new("sleep").arg("600").spawn().unwrap();
        let pid = child.id();
        drop(Owned { child, signal: Some("TERM"), stdout: None });
        assert!(process::usage_of_family(pid).is_none());
    }
}
