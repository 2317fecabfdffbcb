//! What this node tells clients about the cluster: the configuration documents they route by.
//!
//! One node knows itself only, so every document has one `nodesExt` entry, marked `thisNode`. The host is the literal
//! `$HOST` unless one is configured: clients put in the name they dialled, which is right behind port forwarding too.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use persist::BucketSpec;
use serde_json::{Value, json};

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
        }
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
    }

    /// The configuration of a bucket.
    pub fn bucket_config(&self, shape: &BucketShape) -> (Revision, Arc<str>) {
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
        let document = match shape {
            Some(shape) => self.bucket_document(revision, shape),
            None => self.common(revision),
        };
        let text: Arc<str> = document.to_string().into();
        made.push(Made { revision, shape: shape.cloned(), text: text.clone() });
        (revision, text)
    }

    fn common(&self, revision: Revision) -> Value {
        json!({
            "rev": revision.rev,
            "revEpoch": revision.epoch,
            "nodesExt": [{
                "services": {"mgmt": self.admin_port, "kv": self.kv_port},
                "thisNode": true,
                "hostname": self.hostname,
            }],
            "clusterCapabilitiesVer": [1, 0],
            "clusterCapabilities": {"n1ql": []},
            "clusterUUID": self.uuid,
            "clusterName": "",
        })
    }

    fn bucket_document(&self, revision: Revision, shape: &BucketShape) -> Value {
        let BucketShape { name, uuid, vbuckets, replicas } = shape;
        let host = if self.hostname.contains(':') { format!("[{}]", self.hostname) } else { self.hostname.clone() };
        // No replica has a node yet; each still has its place in the row.
        let row: Vec<i32> = std::iter::once(0).chain((0..*replicas).map(|_| -1)).collect();
        let mut document = self.common(revision);
        let more = json!({
            "name": name,
            "uuid": uuid,
            "nodeLocator": "vbucket",
            "uri": format!("/pools/default/buckets/{name}?bucket_uuid={uuid}"),
            "streamingUri": format!("/pools/default/bucketsStreaming/{name}?bucket_uuid={uuid}"),
            "nodes": [{"hostname": format!("{host}:{}", self.admin_port), "ports": {"direct": self.kv_port}}],
            "bucketCapabilitiesVer": "",
            "bucketCapabilities": BUCKET_CAPABILITIES,
            "collectionsManifestUid": "0",
            "vBucketServerMap": {
                "hashAlgorithm": "CRC",
                "numReplicas": replicas,
                "serverList": [format!("{host}:{}", self.kv_port)],
                "vBucketMap": vec![row; usize::from(*vbuckets)],
            },
        });
        let (Some(document_map), Value::Object(more)) = (document.as_object_mut(), more) else {
            unreachable!("both were made as objects");
        };
        document_map.extend(more);
        document
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
