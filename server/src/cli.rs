//! The command line, as a value.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

use crate::config::{ConfigError, Setting};

/// A durable, memory-first key-value server that speaks the Couchbase KV protocol.
#[derive(Parser)]
#[command(name = "settee", version, propagate_version = true, arg_required_else_help = true)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Subcommand)]
pub enum Command {
    /// Run the server
    Serve(Serve),
    /// Show a running server's counters; `settee stats timings` draws latency histograms
    Stats(Stats),
    /// Print the changes of a bucket as they come, one JSON object a line
    Tail(Tail),
    /// Create, list, delete or empty buckets of a running server
    #[command(subcommand)]
    Bucket(Bucket),
    /// Look into couchstore files and the commit log; needs no server
    #[command(subcommand)]
    File(File),
    /// Run several nodes on this machine, for development; stays until it is interrupted
    ClusterRun(ClusterRun),
    /// Look at the nodes of a cluster, and decide for them
    #[command(subcommand)]
    Cluster(Cluster),
    /// Put load on this server or its peers, and compare them
    #[command(subcommand)]
    Bench(bench::Command),
    /// Print every configuration key as Markdown
    #[command(hide = true)]
    Keys,
}

#[derive(Args)]
pub struct Serve {
    /// Configuration file (TOML); see docs/config.md for the keys
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Directory that holds everything [default: ./settee-data]
    #[arg(long, value_name = "DIR")]
    data_dir: Option<String>,
    /// Key-value address [default: 127.0.0.1:11210]; port 0 picks a free one
    #[arg(long, value_name = "ADDR")]
    kv: Option<String>,
    /// Admin (HTTP) address [default: 127.0.0.1:8091]
    #[arg(long, value_name = "ADDR")]
    admin: Option<String>,
    /// User made at the first start [default: Administrator]
    #[arg(long)]
    user: Option<String>,
    /// File whose first line is that user's password
    #[arg(long, value_name = "FILE")]
    password_file: Option<String>,
    /// Bucket to create if it is missing [default: default]
    #[arg(long)]
    bucket: Option<String>,
    /// Any configuration key
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Stop in order when standard input ends
    #[arg(long, hide = true)]
    pub until_eof: bool,
}

impl Serve {
    /// What the options set, `--set` first so that the named options win.
    pub fn settings(&self) -> Result<Vec<Setting>, ConfigError> {
        let mut settings: Vec<Setting> = self.set.iter().map(|pair| Setting::parse(pair)).collect::<Result<_, _>>()?;
        for (option, key, value) in [
            ("--data-dir", "data_dir", &self.data_dir),
            ("--kv", "kv.listen", &self.kv),
            ("--admin", "admin.listen", &self.admin),
            ("--user", "user", &self.user),
            ("--password-file", "password_file", &self.password_file),
            ("--bucket", "bucket.name", &self.bucket),
        ] {
            if let Some(value) = value {
                settings.push(Setting::new(option, key, value.as_str()));
            }
        }
        Ok(settings)
    }
}

/// How to reach a running server. The password is taken from SETTEE_PASSWORD, --password-file, or the data directory.
#[derive(Args, Clone)]
pub struct Target {
    /// Key-value address of the server
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:11210")]
    pub kv: String,
    #[arg(long, default_value = "Administrator")]
    pub user: String,
    /// File whose first line is the password
    #[arg(long, value_name = "FILE")]
    pub password_file: Option<PathBuf>,
    /// The server's data directory, for the password generated there
    #[arg(long, value_name = "DIR", default_value = "./settee-data")]
    pub data_dir: PathBuf,
}

#[derive(Args, Clone)]
pub struct ClusterRun {
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=16))]
    pub nodes: u16,
    /// Copies of each vBucket beside the active one
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(0..=2))]
    pub replicas: u8,
    /// Node N listens on this port and 2 N more for keys and values, and one above for HTTP; 0 for any free ports
    #[arg(long, value_name = "PORT", default_value_t = 12000, value_parser = clap::value_parser!(u16).range(..65_000))]
    pub base_port: u16,
    /// Holds the data directories and logs of all nodes
    #[arg(long, value_name = "DIR", default_value = "./settee-cluster")]
    pub data_dir: PathBuf,
    #[arg(long, default_value = "default")]
    pub bucket: String,
    /// Memory of the bucket on each node, in MiB
    #[arg(long, default_value_t = 256)]
    pub quota_mb: u64,
    /// A power of two up to 1024
    #[arg(long, default_value_t = 1024)]
    pub vbuckets: u16,
    /// Administrator of all nodes, and what they are to each other
    #[arg(long, default_value = "Administrator")]
    pub user: String,
    /// File whose first line is that user's password; without it and SETTEE_PASSWORD one is made
    #[arg(long, value_name = "FILE")]
    pub password_file: Option<PathBuf>,
    /// Any configuration key, for all nodes
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
}

#[derive(Subcommand)]
pub enum Cluster {
    /// Nodes, whether they answer, how many vBuckets they have and how far their replicas are behind
    Status {
        /// Print one JSON object
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        target: ClusterTarget,
    },
    /// Take a dead node out of the map: of each vBucket that was active there, the replica that is furthest takes over
    Failover {
        /// Key-value address of the node
        node: String,
        #[command(flatten)]
        target: ClusterTarget,
    },
    /// Put one more node in the map, without vBuckets: one that runs, or one that `settee cluster-run` starts
    Add {
        /// Key-value address of a server with the same user and password; without it the running `settee cluster-run` of --data-dir
        /// starts one
        node: Option<String>,
        #[command(flatten)]
        target: ClusterTarget,
    },
    /// Move everything away from a node, and take it out of the map; run it again if it was interrupted
    Remove {
        /// Key-value address of the node
        node: String,
        #[command(flatten)]
        target: ClusterTarget,
    },
    /// Spread actives and replicas evenly over the nodes while they are used; run it again if it was interrupted
    Rebalance {
        #[command(flatten)]
        target: ClusterTarget,
    },
}

/// How to reach the nodes of a cluster. The password is taken from SETTEE_PASSWORD, --password-file, or the data directory.
#[derive(Args, Clone)]
pub struct ClusterTarget {
    /// Key-value address of a node that is up [default: one that `settee cluster-run` started in --data-dir, else 127.0.0.1:11210]
    #[arg(long, value_name = "ADDR")]
    pub kv: Option<String>,
    #[arg(long, default_value = "Administrator")]
    pub user: String,
    /// File whose first line is the password
    #[arg(long, value_name = "FILE")]
    pub password_file: Option<PathBuf>,
    /// The directory of `settee cluster-run`, or a server's data directory, for the password generated there
    #[arg(long, value_name = "DIR", default_value = "./settee-cluster")]
    pub data_dir: PathBuf,
    #[arg(long, default_value = "default")]
    pub bucket: String,
}

impl ClusterTarget {
    /// Where a server is if nobody says.
    pub const KV: &str = "127.0.0.1:11210";
}

#[derive(Args)]
pub struct Stats {
    /// Which counters: empty for the general ones, or a group such as timings, memory, connections, dcp, limits, scheduler, persist,
    /// config, vbucket-details
    pub group: Option<String>,
    /// Arguments of the group, such as a vBucket
    pub args: Vec<String>,
    #[command(flatten)]
    pub target: Target,
    #[arg(long, default_value = "default")]
    pub bucket: String,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

#[derive(Args)]
pub struct Tail {
    pub bucket: String,
    /// Where to begin: now, beginning, or the token that an earlier tail printed when it ended
    #[arg(long, value_name = "now|beginning|TOKEN", default_value = "now")]
    pub from: String,
    #[command(flatten)]
    pub target: Target,
}

/// What may leave memory.
#[derive(Clone, Copy, clap::ValueEnum)]
pub enum Evicts {
    /// Values; keys and metadata stay
    Value,
    /// Whole documents
    Full,
}

#[derive(Subcommand)]
pub enum Bucket {
    /// Make a bucket
    Create {
        name: String,
        /// Memory in MiB
        #[arg(long, default_value_t = 1024)]
        quota_mb: u64,
        #[arg(long, default_value_t = 0)]
        replicas: u8,
        /// A power of two up to 1024
        #[arg(long, default_value_t = 1024)]
        vbuckets: u16,
        /// What may leave memory when it is short and the file has it
        #[arg(long, value_enum, default_value_t = Evicts::Value)]
        eviction: Evicts,
        /// Refuse FLUSH
        #[arg(long)]
        no_flush: bool,
        #[command(flatten)]
        target: Target,
    },
    /// List the buckets
    List {
        #[command(flatten)]
        target: Target,
    },
    /// Delete a bucket and all its documents
    Delete {
        name: String,
        #[command(flatten)]
        target: Target,
    },
    /// Delete all documents of a bucket
    Flush {
        name: String,
        #[command(flatten)]
        target: Target,
    },
    /// Rewrite a bucket's files without their garbage; `settee stats compaction` shows how far it is
    Compact {
        name: String,
        /// Leave out all deletions, not only those older than compaction.purge_age_s
        #[arg(long)]
        drop_deletes: bool,
        #[command(flatten)]
        target: Target,
    },
}

#[derive(Subcommand)]
pub enum File {
    /// Header, counts and sizes
    Info {
        file: PathBuf,
        /// Skip damaged headers and show the newest good one
        #[arg(long)]
        recover: bool,
    },
    /// Every document in seqno order, one JSON object a line
    Dump {
        file: PathBuf,
        #[arg(long)]
        recover: bool,
    },
    /// Prove checksums, order, reductions and the agreement of the trees; exit 3 and name the first damage
    Check {
        file: PathBuf,
        /// Check what every commit in the file reaches, not only the newest
        #[arg(long)]
        all: bool,
    },
    /// Write a file anew, without its garbage and its older commits; the new one must not exist, and is checked
    Compact {
        #[arg(value_name = "IN")]
        file: PathBuf,
        #[arg(value_name = "OUT")]
        out: PathBuf,
        /// Skip damaged headers and copy the newest good one
        #[arg(long)]
        recover: bool,
    },
    /// Segments of a commit log, such as DATA_DIR/log: headers, records, what each holds of which vBucket
    Log { dir: PathBuf },
}
