//! Where the vBuckets of a bucket are: what a coordinator decides, clients route by, and replicas follow.
//!
//! It travels as the JSON document that clients get, so there is one truth. A node finds itself in it by the entry marked
//! `thisNode`, and is out of the cluster if there is none; its name in the replication chains is the address of its key-value port.
//! Where a vBucket that moves goes to is in it too, so whoever finds the map can go on.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::{BUCKET_CAPABILITIES, Revision};

/// A node, as clients reach it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// `$HOST`: whatever the client dialled.
    pub host: String,
    pub kv_port: u16,
    pub admin_port: u16,
}

impl Node {
    /// Host and key-value port: the node's name in replication chains.
    pub fn name(&self) -> String {
        format!("{}:{}", self.bracketed(), self.kv_port)
    }

    fn bracketed(&self) -> String {
        if self.host.contains(':') { format!("[{}]", self.host) } else { self.host.clone() }
    }
}

/// Of one vBucket: places in the list of nodes, active first; `None` where nobody has it.
pub type Chain = Vec<Option<usize>>;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Map {
    pub revision: Revision,
    /// Of the cluster.
    pub cluster_uuid: String,
    pub bucket: String,
    /// 32 hexadecimal digits.
    pub uuid: String,
    pub replicas: u8,
    pub nodes: Vec<Node>,
    /// By vBucket; each has one place more than there are replicas.
    pub chains: Vec<Chain>,
    /// Of vBuckets that move: the chain they are to have. Who is in it follows the active one of now.
    pub forward: BTreeMap<u16, Chain>,
}

impl Map {
    /// Reads a document, and the place of the node that it was made for.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn parse(text: &[u8]) -> Result<(Map, Option<usize>), String> {
        let document: Value = serde_json::from_slice(text).map_err(|error| format!("no JSON: {error}"))?;
        let string = |name: &str| document[name].as_str().unwrap_or_default().to_owned();
        let number = |name: &str| document[name].as_i64().ok_or(format!("no {name:?}"));
        let revision = Revision { epoch: number("revEpoch")?, rev: number("rev")? };
        let listed = document["nodesExt"].as_array().ok_or("no \"nodesExt\"")?;
        let nodes = listed.iter().map(node).collect::<Result<Vec<Node>, String>>()?;
        let this = listed.iter().position(|entry| entry["thisNode"] == true);
        let place = &document["vBucketServerMap"];
        let replicas = place["numReplicas"].as_u64().and_then(|n| u8::try_from(n).ok());
        let replicas = replicas.filter(|n| *n <= 3).ok_or("no \"numReplicas\" of up to 3")?;
        let rows = place["vBucketMap"].as_array().filter(|rows| !rows.is_empty()).ok_or("no \"vBucketMap\"")?;
        let chain = |row: &Value| chain(row, nodes.len(), usize::from(replicas) + 1);
        let chains = rows.iter().map(chain).collect::<Option<Vec<Chain>>>();
        let chains = chains.ok_or("a row of \"vBucketMap\" has an active, and nodes that there are, each once")?;
        let forward = match place["vBucketMapForward"].as_array() {
            None => BTreeMap::new(),
            Some(rows) if rows.len() == chains.len() => {
                let next = (0u16..).zip(rows).map(|(vb, row)| Some((vb, chain(row)?))).collect::<Option<Vec<_>>>();
                let next = next.ok_or("a row of \"vBucketMapForward\" has nodes that there are, each once")?;
                next.into_iter().filter(|(vb, next)| *next != chains[usize::from(*vb)]).collect()
            }
            Some(_) => return Err("\"vBucketMapForward\" has another number of rows than \"vBucketMap\"".into()),
        };
        let (cluster_uuid, bucket, uuid) = (string("clusterUUID"), string("name"), string("uuid"));
        Ok((Map { revision, cluster_uuid, bucket, uuid, replicas, nodes, chains, forward }, this))
    }

    /// The document for clients of the node at place `this`; of a node that is not in the map if there is none.
    pub fn document(&self, this: Option<usize>) -> String {
        let Map { bucket, uuid, .. } = self;
        let mut document = common(self.revision, &self.nodes, this, &self.cluster_uuid);
        let rows = |chain: &Chain| chain.iter().map(|at| at.map_or(-1, |at| at as i64)).collect::<Vec<i64>>();
        let mut place = json!({
            "hashAlgorithm": "CRC",
            "numReplicas": self.replicas,
            "serverList": self.nodes.iter().map(Node::name).collect::<Vec<_>>(),
            "vBucketMap": self.chains.iter().map(rows).collect::<Vec<Vec<i64>>>(),
        });
        if !self.forward.is_empty() {
            let next = |(vb, chain)| rows(self.forward.get(&vb).unwrap_or(chain));
            place["vBucketMapForward"] = (0u16..).zip(&self.chains).map(next).collect::<Vec<Vec<i64>>>().into();
        }
        let node = |node: &Node| {
            let hostname = format!("{}:{}", node.bracketed(), node.admin_port);
            json!({"hostname": hostname, "ports": {"direct": node.kv_port}})
        };
        let more = json!({
            "name": bucket,
            "uuid": uuid,
            "nodeLocator": "vbucket",
            "uri": format!("/pools/default/buckets/{bucket}?bucket_uuid={uuid}"),
            "streamingUri": format!("/pools/default/bucketsStreaming/{bucket}?bucket_uuid={uuid}"),
            "nodes": self.nodes.iter().map(node).collect::<Vec<_>>(),
            "bucketCapabilitiesVer": "",
            "bucketCapabilities": BUCKET_CAPABILITIES,
            "collectionsManifestUid": "0",
            "vBucketServerMap": place,
        });
        let (Some(fields), Value::Object(more)) = (document.as_object_mut(), more) else {
            unreachable!("both were made as objects");
        };
        fields.extend(more);
        document.to_string()
    }

    /// The replication chain of a vBucket, by the names of nodes. Without an active there is none.
    pub fn topology(&self, vb: usize) -> Option<Vec<Option<String>>> {
        Some(self.names(self.chains.get(vb).filter(|chain| chain[0].is_some())?))
    }

    /// A chain by the names of nodes.
    pub fn names(&self, chain: &[Option<usize>]) -> Vec<Option<String>> {
        chain.iter().map(|at| at.map(|at| self.nodes[at].name())).collect()
    }

    /// The place of a node, by its name.
    pub fn place_of(&self, name: &str) -> Option<usize> {
        self.nodes.iter().position(|node| node.name() == name)
    }

    /// Who follows the active one of a vBucket: its replicas, and those that are to have it.
    pub fn followers(&self, vb: u16) -> impl Iterator<Item = usize> {
        let chain = &self.chains[usize::from(vb)];
        let next = self.forward.get(&vb).into_iter().flatten();
        chain[1..].iter().chain(next).filter_map(|at| *at).filter(move |at| chain[0] != Some(*at))
    }
}

/// What all documents begin with.
pub(super) fn common(revision: Revision, nodes: &[Node], this: Option<usize>, cluster_uuid: &str) -> Value {
    let entry = |(at, node): (usize, &Node)| {
        let services = json!({"mgmt": node.admin_port, "kv": node.kv_port});
        match Some(at) == this {
            true => json!({"services": services, "thisNode": true, "hostname": node.host}),
            false => json!({"services": services, "hostname": node.host}),
        }
    };
    json!({
        "rev": revision.rev,
        "revEpoch": revision.epoch,
        "nodesExt": nodes.iter().enumerate().map(entry).collect::<Vec<_>>(),
        "clusterCapabilitiesVer": [1, 0],
        "clusterCapabilities": {"n1ql": []},
        "clusterUUID": cluster_uuid,
        "clusterName": "",
    })
}

fn node(entry: &Value) -> Result<Node, String> {
    let port = |name: &str| {
        let port = entry["services"][name].as_u64().and_then(|port| u16::try_from(port).ok());
        port.ok_or(format!("a node without a port for {name:?}"))
    };
    let host = entry["hostname"].as_str().ok_or("a node without a \"hostname\"")?.to_owned();
    Ok(Node { host, kv_port: port("kv")?, admin_port: port("mgmt")? })
}

fn chain(row: &Value, nodes: usize, places: usize) -> Option<Chain> {
    let place = |at: &Value| match at.as_i64()? {
        -1 => Some(None),
        at => usize::try_from(at).ok().filter(|at| *at < nodes).map(Some),
    };
    let mut chain = row.as_array()?.iter().map(place).collect::<Option<Chain>>()?;
    let repeats = chain.iter().enumerate().any(|(n, at)| at.is_some() && chain[..n].contains(at));
    if chain.is_empty() || chain.len() > places || repeats {
        return None;
    }
    chain.resize(places, None);
    Some(chain)
}

#[cfg(test)]
mod tests {
    use super::*;

    pub fn map() -> Map {
        let node = |n: u16| Node { host: "127.0.0.1".into(), kv_port: 12000 + n, admin_port: 12001 + n };
        Map {
            revision: Revision { epoch: 1, rev: 42 },
            cluster_uuid: "cafe".into(),
            bucket: "default".into(),
            uuid: "6f1de0cf5d2f4b8aa29c9e0d4e7a0b11".into(),
            replicas: 1,
            nodes: vec![node(0), node(2)],
            chains: vec![vec![Some(0), Some(1)], vec![Some(1), Some(0)], vec![Some(1), None], vec![None, None]],
            forward: BTreeMap::new(),
        }
    }

    #[test]
    fn a_map_is_what_its_document_says() {
        let text = map().document(Some(1));
        assert_eq!(Map::parse(text.as_bytes()), Ok((map(), Some(1))));
        let document: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(document["vBucketServerMap"]["vBucketMap"], json!([[0, 1], [1, 0], [1, -1], [-1, -1]]));
        assert_eq!(document["vBucketServerMap"]["serverList"], json!(["127.0.0.1:12000", "127.0.0.1:12002"]));
        assert_eq!(document["nodesExt"][0].get("thisNode"), None);
        assert_eq!(map().topology(0), Some(vec![Some("127.0.0.1:12000".into()), Some("127.0.0.1:12002".into())]));
        assert_eq!((map().topology(3), map().topology(4)), (None, None));
    }

    #[test]
    fn a_map_says_where_a_vbucket_goes_that_moves_and_who_follows_meanwhile() {
        let moving = Map { forward: BTreeMap::from([(2, vec![Some(0), Some(1)])]), ..map() };
        let text = moving.document(None);
        assert_eq!(Map::parse(text.as_bytes()), Ok((moving.clone(), None)));
        let document: Value = serde_json::from_str(&text).unwrap();
        let rows = &document["vBucketServerMap"]["vBucketMapForward"];
        assert_eq!(*rows, json!([[0, 1], [1, 0], [0, 1], [-1, -1]]));
        assert_eq!(moving.followers(2).collect::<Vec<_>>(), [0]);
        assert_eq!(map().followers(2).count(), 0);
        assert_eq!(map().followers(0).collect::<Vec<_>>(), [1]);
    }

    #[test]
    fn a_document_that_makes_no_sense_is_refused() {
        let document: Value = serde_json::from_str(&map().document(Some(0))).unwrap();
        let with = |pointer: &str, value: Value| {
            let mut document = document.clone();
            *document.pointer_mut(pointer).unwrap() = value;
            Map::parse(document.to_string().as_bytes())
        };
        assert!(with("/name", json!("other")).is_ok());
        for (pointer, value) in [
            ("/rev", json!("x")),
            ("/nodesExt", json!(1)),
            ("/nodesExt/0/services/kv", json!(70_000)),
            ("/vBucketServerMap/vBucketMap", json!([])),
            ("/vBucketServerMap/vBucketMap/0", json!([2, 0])),
            ("/vBucketServerMap/vBucketMap/0", json!([0, 0])),
            ("/vBucketServerMap/vBucketMap/0", json!([0, 1, -1])),
            ("/vBucketServerMap/vBucketMap/0", json!([-2])),
            ("/vBucketServerMap/numReplicas", json!(9)),
        ] {
            assert!(with(pointer, value.clone()).is_err(), "{pointer} {value}");
        }
        assert!(Map::parse(b"{").is_err() && Map::parse(b"[]").is_err());
    }
}
