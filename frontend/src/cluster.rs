//! What this node tells clients about the cluster: the configuration documents they route by.
//!
//! A node by itself knows itself only: its documents have one `nodesExt` entry, marked `thisNode`. The host is the literal
//! `$HOST` unless one is configured: clients put in the name they dialled, which is right behind port forwarding too.
//!
//! Where there are more, a coordinator gives each node the map of a bucket, and that is what clients get from then on.

pub mod map;

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use persist::BucketSpec;

pub use map::{Chain, Map, Node};

/// What clients may use; each one is a promise. Clients switch features on by these names.
const BUCKET_CAPABILITIES: &[&str] = &[
    "cbhello",
    "nodesExt",
    "cccp",
    "touch",
    "xattr",
    "collections",
    "durableWrite",
    "tombstonedUserXAttrs",
    "preserveExpiry",
    "couchapi",
    "subdoc.ReplaceBodyWithXattr",
    "subdoc.DocumentMacroSupport",
    "subdoc.ReviveDocument",
    "subdoc.ReplicaRead",
    "subdoc.BinaryXattr",
    "subdoc.AccessDeleted",
];

/// A version of the configuration; compared epoch first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Revision {
    pub epoch: i64,
    pub rev: i64,
}

/// What of a bucket shows in its configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BucketShape {
    pub name: String,
    /// 32 hexadecimal digits.
    pub uuid: String,
    pub vbuckets: u16,
    pub replicas: u8,
}

impl BucketShape {
    pub fn of(spec: &BucketSpec) -> BucketShape {
        let BucketSpec { name, uuid, vbuckets, replicas, .. } = spec;
        BucketShape { name: name.clone(), uuid: format!("{:032x}", uuid.0), vbuckets: *vbuckets, replicas: *replicas }
    }
}

/// This node, as clients are to see it. Shared by the KV port and the admin port, so that both say the same.
pub struct Cluster {
    uuid: String,
    hostname: String,
    kv_port: u16,
    admin_port: u16,
    epoch: i64,
    rev: AtomicU64,
    /// The last document made for each bucket ("" the global one) and what it was made of.
    made: Mutex<Vec<Made>>,
    /// What a coordinator gave, by bucket.
    given: Mutex<BTreeMap<String, Given>>,
    keeper: Box<dyn Keeper>,
    on_change: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

/// Keeps maps across restarts.
pub trait Keeper: Send + Sync {
    /// Keeps these documents, by bucket, and no others; on disk when it returns. May take its time.
    ///
    /// # Errors
    /// They may not survive.
    fn keep(&self, documents: &BTreeMap<String, String>) -> io::Result<()>;
}

/// Nothing is kept.
impl Keeper for () {
    fn keep(&self, _: &BTreeMap<String, String>) -> io::Result<()> {
        Ok(())
    }
}

/// Why a map was not taken.
#[derive(Debug, thiserror::Error)]
pub enum NotGiven {
    #[error("{0}")]
    Invalid(String),
    #[error("revision {given:?} is not above {here:?}")]
    Stale { given: Revision, here: Revision },
    #[error("the map could not be kept: {0}")]
    NotKept(#[from] io::Error),
}

struct Given {
    map: Arc<Map>,
    /// This node's place in it; `None`: it is out of the cluster.
    this: Option<usize>,
    text: Arc<str>,
}

struct Made {
    revision: Revision,
    shape: Option<BucketShape>,
    text: Arc<str>,
}

impl Cluster {
    /// `hostname`: `None` lets clients use what they dialled. `rev` must be at least 1, and above that of every earlier
    /// run of this node, or clients that saw it ignore what is new.
    pub fn new(uuid: &str, hostname: Option<&str>, kv_port: u16, admin_port: u16, rev: u64) -> Cluster {
        Cluster {
            uuid: uuid.to_owned(),
            hostname: hostname.unwrap_or("$HOST").to_owned(),
            kv_port,
            admin_port,
            epoch: 1,
            rev: AtomicU64::new(rev.max(1)),
            made: Mutex::new(Vec::new()),
            given: Mutex::new(BTreeMap::new()),
            keeper: Box::new(()),
            on_change: OnceLock::new(),
        }
    }

    /// Called after every change of what clients get: must be quick. The first one counts.
    pub(crate) fn on_change(&self, tell: impl Fn() + Send + Sync + 'static) {
        let _ = self.on_change.set(Box::new(tell));
    }

    /// With the maps that an earlier run was given; `keeper` keeps those to come. What is damaged is left out: the coordinator
    /// gives it again.
    pub fn keeping(mut self, found: BTreeMap<String, String>, keeper: Box<dyn Keeper>) -> Cluster {
        for (bucket, text) in found {
            match accept(&bucket, &text) {
                Ok(given) => {
                    self.rev.fetch_max(given.map.revision.rev.max(0) as u64 + 1, Ordering::AcqRel);
                    self.given.get_mut().insert(bucket, given);
                }
                Err(why) => tracing::error!("the map that was kept of bucket {bucket} is of no use: {why}"),
            }
        }
        self.keeper = keeper;
        self
    }

    /// Takes a map from a coordinator. Waits for the disk.
    ///
    /// # Errors
    /// It is no newer than what clients get already, or makes no sense here.
    pub fn give(&self, shape: &BucketShape, version: Revision, text: &str) -> Result<(), NotGiven> {
        let given = accept(&shape.name, text).map_err(NotGiven::Invalid)?;
        if given.map.revision != version {
            return Err(NotGiven::Invalid(format!("the document says {:?}, not {version:?}", given.map.revision)));
        }
        if given.map.chains.len() != usize::from(shape.vbuckets) {
            return Err(NotGiven::Invalid(format!("the bucket has {} vBuckets here", shape.vbuckets)));
        }
        let mut all = self.given.lock();
        let here = all.get(&shape.name).map_or(self.revision(), |before| before.map.revision);
        if version <= here {
            return Err(NotGiven::Stale { given: version, here });
        }
        let mut documents = texts(&all);
        documents.insert(shape.name.clone(), text.to_owned());
        self.keeper.keep(&documents)?;
        all.insert(shape.name.clone(), given);
        // Above it, so that what this node makes by itself one day is newer.
        self.rev.fetch_max(version.rev.max(0) as u64, Ordering::AcqRel);
        drop(all);
        self.changed();
        Ok(())
    }

    /// The bucket is gone, and so is its map.
    pub fn forget(&self, bucket: &str) {
        let mut all = self.given.lock();
        if all.remove(bucket).is_some()
            && let Err(error) = self.keeper.keep(&texts(&all))
        {
            tracing::error!("the map of bucket {bucket}, which is deleted, is still kept: {error}");
        }
    }

    /// The map a coordinator gave, and this node's place in it, if it has one.
    pub fn map_of(&self, bucket: &str) -> Option<(Arc<Map>, Option<usize>)> {
        self.given.lock().get(bucket).map(|given| (Arc::clone(&given.map), given.this))
    }

    pub fn kv_port(&self) -> u16 {
        self.kv_port
    }

    pub fn admin_port(&self) -> u16 {
        self.admin_port
    }

    pub fn revision(&self) -> Revision {
        Revision { epoch: self.epoch, rev: self.rev.load(Ordering::Acquire) as i64 }
    }

    /// To be called after anything in the documents changed, and after a bucket was deleted: connections look again
    /// whether theirs is still there.
    pub fn changed(&self) {
        self.rev.fetch_add(1, Ordering::AcqRel);
        if let Some(tell) = self.on_change.get() {
            tell();
        }
    }

    /// The configuration of a bucket.
    pub fn bucket_config(&self, shape: &BucketShape) -> (Revision, Arc<str>) {
        if let Some(given) = self.given.lock().get(&shape.name) {
            return (given.map.revision, Arc::clone(&given.text));
        }
        self.config(Some(shape))
    }

    /// The configuration for connections without a bucket.
    pub fn global_config(&self) -> (Revision, Arc<str>) {
        self.config(None)
    }

    fn config(&self, shape: Option<&BucketShape>) -> (Revision, Arc<str>) {
        let revision = self.revision();
        let name = |s: Option<&BucketShape>| s.map(|s| s.name.clone());
        let mut made = self.made.lock();
        made.retain(|m| m.revision == revision && (name(m.shape.as_ref()) != name(shape) || m.shape.as_ref() == shape));
        if let Some(found) = made.iter().find(|m| m.shape.as_ref() == shape) {
            return (revision, found.text.clone());
        }
        let text: Arc<str> = match shape {
            Some(shape) => self.alone(revision, shape).document(Some(0)).into(),
            None => map::common(revision, &[self.this()], Some(0), &self.uuid).to_string().into(),
        };
        made.push(Made { revision, shape: shape.cloned(), text: text.clone() });
        (revision, text)
    }

    fn this(&self) -> Node {
        Node { host: self.hostname.clone(), kv_port: self.kv_port, admin_port: self.admin_port }
    }

    /// Nobody has said where the replicas are; each still has its place in the row.
    fn alone(&self, revision: Revision, shape: &BucketShape) -> Map {
        let mut chain = vec![None; usize::from(shape.replicas) + 1];
        chain[0] = Some(0);
        Map {
            revision,
            cluster_uuid: self.uuid.clone(),
            bucket: shape.name.clone(),
            uuid: shape.uuid.clone(),
            replicas: shape.replicas,
            nodes: vec![self.this()],
            chains: vec![chain; usize::from(shape.vbuckets)],
            forward: BTreeMap::new(),
        }
    }
}

fn texts(given: &BTreeMap<String, Given>) -> BTreeMap<String, String> {
    given.iter().map(|(bucket, given)| (bucket.clone(), given.text.to_string())).collect()
}

fn accept(bucket: &str, text: &str) -> Result<Given, String> {
    let (map, this) = Map::parse(text.as_bytes())?;
    if map.bucket != bucket {
        return Err(format!("it is of bucket {:?}", map.bucket));
    }
    Ok(Given { map: Arc::new(map), this, text: text.into() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn shape(replicas: u8) -> BucketShape {
        BucketShape { name: "default".into(), uuid: "6f1de0cf5d2f4b8aa29c9e0d4e7a0b11".into(), vbuckets: 4, replicas }
    }

    #[test]
    fn a_bucket_config_has_what_each_client_needs() {
        let cluster = Cluster::new("cafe", None, 11210, 8091, 0);
        let (revision, text) = cluster.bucket_config(&shape(1));
        assert_eq!(revision, Revision { epoch: 1, rev: 1 });
        let config: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(config["rev"], 1);
        assert_eq!(config["name"], "default");
        assert_eq!(config["nodeLocator"], "vbucket");
        assert_eq!(config["nodes"][0]["hostname"], "$HOST:8091");
        assert_eq!(config["nodesExt"][0]["thisNode"], true);
        assert_eq!(config["nodesExt"][0]["services"], json!({"mgmt": 8091, "kv": 11210}));
        assert_eq!(config["vBucketServerMap"]["numReplicas"], 1);
        assert_eq!(config["vBucketServerMap"]["vBucketMap"], json!([[0, -1], [0, -1], [0, -1], [0, -1]]));
        assert!(config["bucketCapabilities"].as_array().unwrap().contains(&json!("durableWrite")));
    }

    #[test]
    fn the_global_config_names_no_bucket() {
        let cluster = Cluster::new("cafe", Some("::1"), 1, 2, 7);
        let config: Value = serde_json::from_str(&cluster.global_config().1).unwrap();
        assert_eq!(config["nodesExt"][0]["hostname"], "::1");
        for absent in ["name", "nodeLocator", "uuid", "vBucketServerMap", "nodes"] {
            assert!(config.get(absent).is_none(), "{absent}");
        }
    }

    #[test]
    fn a_document_is_made_once_a_revision_and_anew_when_its_bucket_changes() {
        let cluster = Cluster::new("cafe", None, 1, 2, 1);
        let first = cluster.bucket_config(&shape(0)).1;
        assert!(Arc::ptr_eq(&first, &cluster.bucket_config(&shape(0)).1));
        assert!(!Arc::ptr_eq(&first, &cluster.bucket_config(&shape(1)).1));
        cluster.changed();
        let (revision, text) = cluster.bucket_config(&shape(0));
        assert_eq!(revision.rev, 2);
        assert!(text.contains("\"rev\":2"));
        assert_eq!(cluster.made.lock().len(), 1, "old documents are forgotten");
    }

    fn given(rev: i64) -> Map {
        let node = |n: u16| Node { host: "127.0.0.1".into(), kv_port: 12000 + n, admin_port: 12001 + n };
        let alone = Cluster::new("cafe", None, 1, 2, 7).alone(Revision { epoch: 1, rev }, &shape(1));
        Map { nodes: vec![node(0), node(2)], chains: vec![vec![Some(1), Some(0)]; 4], ..alone }
    }

    #[test]
    fn a_map_that_is_given_is_served_and_only_a_newer_one_takes_its_place() {
        let cluster = Cluster::new("cafe", None, 1, 2, 7);
        let give = |map: &Map| cluster.give(&shape(1), map.revision, &map.document(Some(1)));
        assert!(matches!(give(&given(7)), Err(NotGiven::Stale { .. })), "no newer than what clients have");
        give(&given(9)).unwrap();
        assert_eq!(cluster.bucket_config(&shape(1)).0.rev, 9);
        assert_eq!(cluster.map_of("default").map(|(map, this)| (map.nodes.len(), this)), Some((2, Some(1))));
        assert!(matches!(give(&given(9)), Err(NotGiven::Stale { .. })));
        give(&given(10)).unwrap();
        let other = Map { chains: vec![vec![Some(0)]; 8], ..given(11) };
        assert!(matches!(give(&other), Err(NotGiven::Invalid(_))), "another number of vBuckets");
        assert!(matches!(cluster.give(&shape(1), given(11).revision, "{}"), Err(NotGiven::Invalid(_))));
        cluster.forget("default");
        assert!(cluster.bucket_config(&shape(1)).0.rev > 10, "clients that had the map take this one");
    }

    #[test]
    fn a_map_outlives_a_restart() {
        #[derive(Clone, Default)]
        struct Kept(Arc<Mutex<BTreeMap<String, String>>>);
        impl Keeper for Kept {
            fn keep(&self, documents: &BTreeMap<String, String>) -> io::Result<()> {
                *self.0.lock() = documents.clone();
                Ok(())
            }
        }
        let kept = Kept::default();
        let cluster = Cluster::new("cafe", None, 1, 2, 7).keeping(BTreeMap::new(), Box::new(kept.clone()));
        cluster.give(&shape(1), given(9).revision, &given(9).document(Some(0))).unwrap();
        let found = kept.0.lock().clone();
        let again = Cluster::new("cafe", None, 1, 2, 7).keeping(found, Box::new(kept.clone()));
        assert_eq!(again.bucket_config(&shape(1)).0, given(9).revision);
        again.forget("default");
        assert!(kept.0.lock().is_empty());
    }
}
