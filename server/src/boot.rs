//! `settee serve`, from nothing to `ready` and back.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write};
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};
use env::Env;
use frontend::auth::{Role, Users};
use frontend::cluster::{Cluster, Map};
use limits::{Class, GiveBack, Metered};
use persist::{BucketSpec, LogOptions, Store, StoreError, Verdict};
use scheduler::{PoolConfig, PoolKind, Pools, Stop};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use types::BucketUuid;

use crate::admin;
use crate::config::Config;
use crate::descriptors::SpareFiles;
use crate::exit::{Exit, OrExit, Refusal};
use crate::log::Log;
use crate::maps::Maps;
use crate::node::Node;
use crate::reload::{InEffect, Live, Origin, Reloader};
use crate::{credentials, descriptors, heap, log, stats};

/// What VERSION and the admin port say: the generation of the protocol that clients may expect, then who we are.
pub const VERSION: &str = concat!("7.6.0-settee-", env!("CARGO_PKG_VERSION"));

/// How long a stop waits for clients in the middle of something.
const DRAIN_MAX: Duration = Duration::from_secs(4);

pub fn serve(config: Config, origin: Origin, until_eof: bool) -> Result<(), Refusal> {
    let began = Instant::now();
    let log = start_log(&config).or_exit(Exit::Environment)?;
    heap::give_back_by_itself();
    // Signals are ours before anything needs an orderly end.
    let mut signals =
        Signals::new([SIGTERM, SIGINT, SIGHUP]).context("cannot listen for signals").or_exit(Exit::Environment)?;
    let workers = match config.workers {
        0 => std::thread::available_parallelism().map_or(1, usize::from),
        n => n,
    };
    let ledger = descriptors::divide(&config, workers)?;
    let _core = descriptors::of_the_process(&ledger, workers);
    log.account(&ledger);
    // From here on whoever opens a file or a socket has a permit for it.
    let os = env::os::env();
    let files = Metered::new(os.storage, Arc::clone(&ledger), Class::Files);
    let background = Arc::new(files.for_class(Class::Background));
    let env = Env { storage: Arc::new(files), ..os };

    let _lock = claim(&config).or_exit(Exit::Environment)?;
    // From here on the data directory is ours alone.
    let node = Node::start(&config.data_dir, &env)?;
    let (found_maps, maps) = Maps::load(&config.data_dir)?;
    let admin_listener = admin::Listener::bind(config.admin_listen)
        .with_context(|| taken("admin", config.admin_listen, "admin"))
        .or_exit(Exit::Environment)?;
    let admin_port = admin_listener.address().or_exit(Exit::Environment)?.port();
    let (users, generated) = users(&config, &Env { storage: background, ..env.clone() })?;
    let users = Arc::new(users);
    let credentials = node_credentials(&config);

    let pools = Pools::start(&env, &pool_sizes(&config));
    if config.commit_log {
        // The log makes durable; files are written when there is time, or, if the log runs full, while clients are put off.
        pools.give_way(PoolKind::Writer);
    }
    let options = persist::Options { files_max: descriptors::files_kept(&ledger, &config), ..store_options(&config) };
    let store = Store::open(&env, &pools, &config.data_dir, options).map_err(|error| refuse(&error))?;
    let kept_files = store.files();
    let spare_files: Arc<dyn GiveBack> = Arc::new(SpareFiles(Arc::clone(&kept_files)));
    ledger.on_pressure(Class::Files, Arc::downgrade(&spare_files));
    // From here on every file was validated as far as its roots.
    let engine = Arc::new(engine::Engine::new(&env, &pools, store, engine_options(&config)));
    for recovered in engine.warm_up().map_err(|error| refuse(&error))? {
        announce(&recovered);
    }
    if !config.bucket_name.is_empty() && engine.bucket(&config.bucket_name).is_none() {
        engine.create_bucket(first_bucket(&config)).map_err(|error| refuse(&error))?;
        tracing::info!(bucket = config.bucket_name, "created");
    }
    hold_what_others_may_have(&engine, &found_maps);
    // From here on a vBucket changes only because a client or the clock asked.

    let in_effect = Arc::new(InEffect::new(&config));
    let streams = Arc::new(replication::Registry::default());
    let seen = stats::Seen {
        streams: Arc::clone(&streams),
        pools: Arc::clone(&pools),
        ledger: Arc::clone(&ledger),
        in_effect: Arc::clone(&in_effect),
        engine: Arc::clone(&engine),
        node_uuid: node.uuid.clone(),
        began,
    };
    let process = Arc::new(stats::Process::new(seen));
    let (node_uuid, revision) = (node.uuid.clone(), node.first_revision());
    let parts = frontend::Parts {
        env,
        engine: Arc::clone(&engine),
        pools: Arc::clone(&pools),
        users: Arc::clone(&users),
        ledger: Arc::clone(&ledger),
        cluster: Box::new(move |kv| {
            let cluster = Cluster::new(&node_uuid, advertised(kv).as_deref(), kv.port(), admin_port, revision);
            Arc::new(cluster.keeping(found_maps, Box::new(maps)))
        }),
        stats: Arc::clone(&process) as Arc<dyn frontend::StatProvider>,
        streams,
    };
    let front = frontend::serve(frontend::Options { credentials, ..front_options(&config, workers) }, parts)
        .with_context(|| taken("key-value", config.kv_listen, "kv"))
        .or_exit(Exit::Environment)?;
    let kv_address = front.local_addr();
    let context = Arc::new(admin::Context {
        engine: Arc::clone(&engine),
        cluster: Arc::clone(front.cluster()),
        users: Arc::clone(&users),
        front: front.handle(),
        registry: process.registry(),
        node_uuid: node.uuid,
        ready: AtomicBool::new(true),
        bucket_defaults: admin::Defaults {
            vbuckets: config.bucket_vbuckets,
            quota_bytes: config.bucket_quota_bytes,
            eviction: config.bucket_eviction,
        },
    });
    let admin = admin_listener
        .serve(Arc::clone(&context), Arc::clone(&ledger))
        .context("cannot start the admin port")
        .or_exit(Exit::Environment)?;
    if let Some(password) = generated {
        introduce(&config, kv_address, &password);
    }
    let (pid, after_ms) = (std::process::id(), began.elapsed().as_millis());
    // Nobody has to read it.
    let _ = writeln!(io::stdout(), "ready kv={kv_address} admin={} pid={pid} after_ms={after_ms}", admin.address());

    let live = Live {
        ledger,
        users,
        front: front.handle(),
        kept_files,
        engine: Arc::clone(&engine),
        pools: Arc::clone(&pools),
        log,
    };
    let mut reloader = Reloader { origin, config, workers, in_effect, live };
    if until_eof {
        stop_at_eof(signals.handle()).or_exit(Exit::Environment)?;
    }
    while signals.forever().next() == Some(SIGHUP) {
        reloader.reload();
    }
    tracing::info!("stopping: finishing what clients wait for");
    std::thread::Builder::new()
        .name("second signal".to_owned())
        .spawn(move || {
            if signals.forever().any(|signal| signal != SIGHUP) {
                // The person asked twice: what is not on disk was not acknowledged as durable.
                std::process::exit(1);
            }
        })
        .or_exit(Exit::Environment)?;
    context.ready.store(false, Ordering::Release);
    front.drain(DRAIN_MAX);
    // From here on no client can change anything.
    let drained = engine.drain();
    // From here on all is on disk that ever will be, and if it is everything the directory says so.
    drop(admin);
    pools.shutdown(Stop::Cancel);
    if drained.is_lossy() {
        return Err(anyhow::anyhow!("{drained}")).or_exit(Exit::Lost);
    }
    if !drained.left.is_empty() {
        drained.to_string().lines().for_each(|line| tracing::warn!("{line}"));
    }
    tracing::info!("stopped");
    Ok(())
}

/// Of a bucket that has more nodes, nothing is served before they have said that this node's map is still the one to go by.
fn hold_what_others_may_have(engine: &engine::Engine, maps: &BTreeMap<String, String>) {
    for (name, text) in maps {
        let is_alone = |map: &Map| map.nodes.len() == 1;
        if let (Ok((map, this)), Some(bucket)) = (Map::parse(text.as_bytes()), engine.bucket(name))
            && !(this.is_some() && is_alone(&map))
        {
            bucket.hold();
        }
    }
}

/// Ends the waiting for signals when whoever started this process has closed the pipe to it, or is gone.
fn stop_at_eof(signals: signal_hook::iterator::Handle) -> io::Result<()> {
    let wait = move || {
        let _ = io::copy(&mut io::stdin(), &mut io::sink());
        signals.close();
    };
    std::thread::Builder::new().name("end of input".to_owned()).spawn(wait).map(drop)
}

/// What this node is to other nodes: its own first user, who has the same password everywhere.
fn node_credentials(config: &Config) -> Option<frontend::Credentials> {
    let file = (!config.password_file.is_empty()).then(|| config.password_file.as_ref());
    let password = credentials::for_tool(file, &config.data_dir).ok()?;
    Some(frontend::Credentials { user: config.user.clone(), password })
}

/// A bucket with a new identity and otherwise the plainest settings.
pub fn new_bucket(name: &str) -> BucketSpec {
    let env = env::os::env();
    BucketSpec {
        name: name.to_owned(),
        uuid: BucketUuid(u128::from(env.rng.u64()) << 64 | u128::from(env.rng.u64())),
        vbuckets: 1024,
        replicas: 0,
        quota_bytes: 1 << 30,
        flush_enabled: false,
        eviction: persist::Eviction::default(),
        rules: persist::WriteRules::default(),
        compaction: None,
    }
}

fn first_bucket(config: &Config) -> BucketSpec {
    BucketSpec {
        vbuckets: config.bucket_vbuckets,
        replicas: config.bucket_replicas,
        quota_bytes: config.bucket_quota_bytes,
        flush_enabled: config.bucket_flush_enabled,
        eviction: config.bucket_eviction,
        ..new_bucket(&config.bucket_name)
    }
}

/// Threads by what they wait for.
pub fn pool_sizes(config: &Config) -> PoolConfig {
    PoolConfig {
        readers: config.readers,
        writers: config.writers,
        compaction: config.compaction.limit,
        ..PoolConfig::default()
    }
}

fn start_log(config: &Config) -> anyhow::Result<Log> {
    let file = config.log_file.as_deref();
    log::start(&config.log_level, file).with_context(|| {
        format!("cannot open the log {}; choose another log.file", file.unwrap_or(Path::new("")).display())
    })
}

/// Makes the data directory if need be and takes its lock.
fn claim(config: &Config) -> anyhow::Result<env::os::DirLock> {
    let dir = &config.data_dir;
    fs::create_dir_all(dir).with_context(|| format!("cannot create the data directory {}", dir.display()))?;
    env::os::lock_dir(dir).with_context(|| format!("cannot use the data directory {}", dir.display()))
}

/// The users on disk; at the first start the first of them, with a password that was chosen or is made and shown.
///
/// The second is the password that was made, if one was.
fn users(config: &Config, env: &env::Env) -> Result<(Users, Option<String>), Refusal> {
    let path = config.data_dir.join("users.json");
    let users = Users::load(env, &path).or_exit(Exit::Damaged)?.with_iterations(config.scram_iterations);
    let file = (!config.password_file.is_empty()).then(|| config.password_file.as_ref());
    let chosen = credentials::chosen(file).or_exit(Exit::Usage)?;
    let (password, is_generated) = match chosen {
        Some(password) if users.verify_plain(&config.user, password.as_bytes()).is_some() => return Ok((users, None)),
        Some(password) => (password, false),
        None if users.list().iter().any(|(name, _)| **name == *config.user) => return Ok((users, None)),
        None => (credentials::generate(&config.data_dir, env).or_exit(Exit::Environment)?, true),
    };
    users.set(&config.user, &password, Role::Admin).or_exit(Exit::Usage)?;
    users.save().or_exit(Exit::Environment)?;
    Ok((users, is_generated.then_some(password)))
}

fn introduce(config: &Config, kv: SocketAddr, password: &str) {
    let file = credentials::file_in(&config.data_dir);
    eprintln!(
        "\nThis is the first start. Connect with\n\n    couchbase://{}    user {}    password {password}\n\nThe password is kept in {} \
         and will not be shown again.\n",
        kv,
        config.user,
        file.display()
    );
}

fn taken(what: &str, address: SocketAddr, option: &str) -> String {
    format!("cannot listen on {address} for the {what} port; choose another with --{option}, port 0 for any free one")
}

/// The host that configurations name. Bound to everything, clients use what they dialled.
fn advertised(kv: SocketAddr) -> Option<String> {
    (!kv.ip().is_unspecified()).then(|| kv.ip().to_string())
}

fn refuse(error: &StoreError) -> Refusal {
    let exit = if error.verdict() == Verdict::Abort { Exit::Damaged } else { Exit::Environment };
    Refusal { exit, error: anyhow!("{error}") }
}

/// Says what a bucket was found to hold.
fn announce(found: &engine::Recovered) {
    tracing::info!(
        bucket = found.bucket,
        documents = found.documents,
        tombstones = found.tombstones,
        vbuckets_with_files = found.vbuckets,
        changes = found.seqnos,
        sync_writes_committed = found.recommitted,
        took_ms = found.took.as_millis(),
        "recovered"
    );
}

/// How the commit log is used; `None`: it is not.
pub fn log_options(config: &Config) -> Option<LogOptions> {
    config.commit_log.then(|| LogOptions {
        segment_bytes: config.log_segment_bytes,
        bytes_max: config.log_bytes_max,
        way: config.log_way,
        file_after: Duration::from_secs(u64::from(config.filing_age_s_max)),
        unfiled_bytes_max: config.filing_bytes_max,
        ..LogOptions::default()
    })
}

fn store_options(config: &Config) -> persist::Options {
    persist::Options {
        commit_log: log_options(config),
        writers: config.writers,
        readers: config.readers,
        batch_bytes_max: config.batch_bytes_max,
        format: if config.file_format == 14 { persist::Version::V14 } else { persist::Version::V13 },
        recovery: config.recovery,
        compaction: config.compaction,
        governor: config.disk,
        reserve_bytes: config.reserve_bytes,
        ..persist::Options::default()
    }
}

fn engine_options(config: &Config) -> engine::Options {
    engine::Options {
        durability_timeout: Duration::from_millis(u64::from(config.durability_timeout_ms)),
        pager_interval: Duration::from_secs(u64::from(config.pager_interval_s)),
        loading_grace: Duration::from_millis(u64::from(config.warm_up_grace_ms)),
        ..engine::Options::default()
    }
}

fn front_options(config: &Config, workers: usize) -> frontend::Options {
    frontend::Options {
        listen: config.kv_listen,
        workers,
        open_bucket: (!config.open_bucket.is_empty()).then(|| config.open_bucket.clone()),
        version: VERSION.to_owned(),
        bounds: config.bounds,
        ..frontend::Options::default()
    }
}
