//! The local document that says what a vBucket is: `_local/vbstate`, JSON with its numbers in strings.

use serde_json::{Map, Value, json};
use types::VbState;

use crate::kv::Malformed;

/// Id of the local document.
pub const ID: &[u8] = b"_local/vbstate";

/// What a vBucket was when its file was last committed. Its high and purge seqnos are the header's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VbStateRecord {
    pub state: VbState,
    /// Highest revision number of a deleted document.
    pub max_deleted_seqno: u64,
    /// The last snapshot persisted; of an active vBucket both are its high seqno.
    pub snap_start: u64,
    pub snap_end: u64,
    /// Never all ones: that is read as 0.
    pub max_cas: u64,
    /// First seqno whose CAS is a hybrid clock.
    pub hlc_epoch: Option<u64>,
    pub might_contain_xattrs: bool,
    pub namespaces_supported: bool,
    pub version: u64,
    /// Highest prepare known to be committed or aborted.
    pub completed_seqno: u64,
    /// Highest prepare in the file.
    pub prepared_seqno: u64,
    /// Highest prepare of the last complete snapshot.
    pub high_prepared_seqno: u64,
    /// Last seqno a client could see the effect of; unset: the high seqno.
    pub max_visible_seqno: Option<u64>,
    /// Prepares alive in the file.
    pub on_disk_prepares: u64,
    pub on_disk_prepare_bytes: u64,
    pub checkpoint_type: CheckpointType,
    /// Version of the product that wrote this.
    pub build: Option<String>,
    /// Newest first.
    pub failover_table: Option<Vec<Failover>>,
    /// One or two chains of one to four nodes, active first; `None` is a node that is missing.
    pub replication_topology: Option<Vec<Vec<Option<String>>>>,
    /// How often the vBucket was rolled back. Settee's own; not written while it is 0.
    pub rollbacks: u64,
    /// No commit comes before this one in the file, so whoever wants an earlier one need not look for it. Settee's own; not
    /// written unless it is so.
    pub is_first: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Failover {
    pub uuid: u64,
    /// Where this history began.
    pub seqno: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CheckpointType {
    #[default]
    Memory,
    Disk,
    InitialDisk,
}

impl CheckpointType {
    const ALL: [CheckpointType; 3] = [CheckpointType::Memory, CheckpointType::Disk, CheckpointType::InitialDisk];

    pub const fn name(self) -> &'static str {
        match self {
            CheckpointType::Memory => "Memory",
            CheckpointType::Disk => "Disk",
            CheckpointType::InitialDisk => "InitialDisk",
        }
    }
}

impl VbStateRecord {
    /// A vBucket that has seen nothing.
    pub fn new(state: VbState) -> VbStateRecord {
        VbStateRecord {
            state,
            max_deleted_seqno: 0,
            snap_start: 0,
            snap_end: 0,
            max_cas: 0,
            hlc_epoch: None,
            might_contain_xattrs: false,
            namespaces_supported: true,
            version: 4,
            completed_seqno: 0,
            prepared_seqno: 0,
            high_prepared_seqno: 0,
            max_visible_seqno: None,
            on_disk_prepares: 0,
            on_disk_prepare_bytes: 0,
            checkpoint_type: CheckpointType::Memory,
            build: None,
            failover_table: None,
            replication_topology: None,
            rollbacks: 0,
            is_first: false,
        }
    }

    /// The document's body: keys in order, no spaces.
    pub fn encode(&self) -> Vec<u8> {
        let number = |value: u64| Value::String(value.to_string());
        let epoch = self.hlc_epoch.map_or("-1".to_string(), |seq| seq.to_string());
        let failovers = self.failover_table.as_ref();
        let fields = [
            ("build", self.build.clone().map(Value::String)),
            ("checkpoint_type", Some(json!(self.checkpoint_type.name()))),
            ("completed_seqno", Some(number(self.completed_seqno))),
            ("failover_table", failovers.map(|t| t.iter().map(|f| json!({"id": f.uuid, "seq": f.seqno})).collect())),
            ("high_prepared_seqno", Some(number(self.high_prepared_seqno))),
            ("hlc_epoch", Some(Value::String(epoch))),
            ("is_first", self.is_first.then_some(Value::Bool(true))),
            ("max_cas", Some(number(self.max_cas))),
            ("max_deleted_seqno", Some(number(self.max_deleted_seqno))),
            ("max_visible_seqno", self.max_visible_seqno.map(number)),
            ("might_contain_xattrs", Some(json!(self.might_contain_xattrs))),
            ("namespaces_supported", Some(json!(self.namespaces_supported))),
            ("on_disk_prepare_bytes", Some(number(self.on_disk_prepare_bytes))),
            ("on_disk_prepares", Some(number(self.on_disk_prepares))),
            ("prepared_seqno", Some(number(self.prepared_seqno))),
            ("replication_topology", self.replication_topology.as_ref().map(|chains| json!(chains))),
            ("rollbacks", (self.rollbacks > 0).then(|| number(self.rollbacks))),
            ("snap_end", Some(number(self.snap_end))),
            ("snap_start", Some(number(self.snap_start))),
            ("state", Some(json!(self.state.name()))),
            ("version", Some(json!(self.version))),
        ];
        let object: Map<String, Value> =
            fields.into_iter().filter_map(|(key, value)| Some((key.to_string(), value?))).collect();
        Value::Object(object).to_string().into_bytes()
    }

    /// Absent keys get the values that the releases without them implied; unknown keys are ignored.
    pub fn decode(bytes: &[u8]) -> Result<VbStateRecord, Malformed> {
        let object: Value = serde_json::from_slice(bytes).map_err(|e| Malformed(format!("vbstate: {e}")))?;
        let fields = Reader(object.as_object().ok_or(Malformed::from("vbstate is not an object"))?);
        let required = |key| fields.number(key)?.ok_or_else(|| wrong(key, "is missing"));
        let or_zero = |key| Ok::<u64, Malformed>(fields.number(key)?.unwrap_or(0));

        let state = fields.text("state")?.ok_or_else(|| wrong("state", "is missing"))?;
        let checkpoint_type = match fields.text("checkpoint_type")? {
            None => CheckpointType::Memory,
            Some(name) => CheckpointType::ALL
                .into_iter()
                .find(|t| t.name() == name)
                .ok_or_else(|| wrong("checkpoint_type", "is none that is known"))?,
        };
        Ok(VbStateRecord {
            state: VbState::from_name(state).ok_or_else(|| wrong("state", "is none that is known"))?,
            max_deleted_seqno: required("max_deleted_seqno")?,
            snap_start: required("snap_start")?,
            snap_end: required("snap_end")?,
            max_cas: match required("max_cas")? {
                u64::MAX => 0,
                cas => cas,
            },
            hlc_epoch: match fields.0.get("hlc_epoch").and_then(Value::as_str) {
                Some("-1") => None,
                _ => fields.number("hlc_epoch")?,
            },
            might_contain_xattrs: fields.flag("might_contain_xattrs")?,
            namespaces_supported: fields.flag("namespaces_supported")?,
            version: match fields.0.get("version") {
                None => 1,
                Some(version) => version.as_u64().ok_or_else(|| wrong("version", "is not a number"))?,
            },
            completed_seqno: or_zero("completed_seqno")?,
            prepared_seqno: or_zero("prepared_seqno")?,
            high_prepared_seqno: or_zero("high_prepared_seqno")?,
            max_visible_seqno: fields.number("max_visible_seqno")?,
            on_disk_prepares: or_zero("on_disk_prepares")?,
            on_disk_prepare_bytes: or_zero("on_disk_prepare_bytes")?,
            checkpoint_type,
            build: fields.text("build")?.map(str::to_string),
            failover_table: fields.0.get("failover_table").map(failover_table).transpose()?,
            replication_topology: fields.0.get("replication_topology").map(topology).transpose()?,
            rollbacks: or_zero("rollbacks")?,
            is_first: fields.flag("is_first")?,
        })
    }
}

struct Reader<'a>(&'a Map<String, Value>);

impl<'a> Reader<'a> {
    fn text(&self, key: &str) -> Result<Option<&'a str>, Malformed> {
        self.0.get(key).map(|value| value.as_str().ok_or_else(|| wrong(key, "is not a string"))).transpose()
    }

    fn number(&self, key: &str) -> Result<Option<u64>, Malformed> {
        let text = self.text(key)?;
        text.map(|text| text.parse().map_err(|_| wrong(key, "is not a number in a string"))).transpose()
    }

    fn flag(&self, key: &str) -> Result<bool, Malformed> {
        self.0.get(key).map_or(Ok(false), |value| value.as_bool().ok_or_else(|| wrong(key, "is not true or false")))
    }
}

fn wrong(key: &str, how: &str) -> Malformed {
    Malformed(format!("vbstate: {key} {how}"))
}

fn failover_table(table: &Value) -> Result<Vec<Failover>, Malformed> {
    let bad = || wrong("failover_table", "is not a list of {id, seq}");
    let entry = |entry: &Value| Some(Failover { uuid: entry["id"].as_u64()?, seqno: entry["seq"].as_u64()? });
    table.as_array().ok_or_else(bad)?.iter().map(|e| entry(e).ok_or_else(bad)).collect()
}

fn topology(chains: &Value) -> Result<Vec<Vec<Option<String>>>, Malformed> {
    let bad = || wrong("replication_topology", "is not one or two chains of one to four node names");
    let node = |node: &Value| match node {
        Value::Null => Ok(None),
        Value::String(name) => Ok(Some(name.clone())),
        _ => Err(bad()),
    };
    let chain = |chain: &Value| -> Result<Vec<Option<String>>, Malformed> {
        let nodes: Vec<_> = chain.as_array().ok_or_else(bad)?.iter().map(node).collect::<Result<_, _>>()?;
        if (1..=4).contains(&nodes.len()) && nodes[0].is_some() { Ok(nodes) } else { Err(bad()) }
    };
    let chains: Vec<_> = chains.as_array().ok_or_else(bad)?.iter().map(chain).collect::<Result<_, _>>()?;
    if (1..=2).contains(&chains.len()) { Ok(chains) } else { Err(bad()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn record() -> impl Strategy<Value = VbStateRecord> {
        let number = any::<u64>;
        let chain = proptest::collection::vec(proptest::option::of("[a-z:@.0-9]{1,12}"), 0..4).prop_map(|rest| {
            let mut chain = vec![Some("n0".to_string())];
            chain.extend(rest.into_iter().take(3));
            chain
        });
        let head = (0usize..4, number(), number(), number(), 0..u64::MAX, proptest::option::of(number()));
        let middle = (any::<bool>(), any::<bool>(), number(), number(), number(), number());
        let tail = (
            proptest::option::of(number()),
            number(),
            number(),
            0usize..3,
            proptest::option::of("[ -~]{0,20}"),
            proptest::option::of(proptest::collection::vec((number(), number()), 0..4)),
            proptest::option::of(proptest::collection::vec(chain, 1..3)),
            number(),
        );
        (head, middle, tail).prop_map(|(h, m, t)| VbStateRecord {
            state: [VbState::Active, VbState::Replica, VbState::Pending, VbState::Dead][h.0],
            max_deleted_seqno: h.1,
            snap_start: h.2,
            snap_end: h.3,
            max_cas: h.4,
            hlc_epoch: h.5,
            might_contain_xattrs: m.0,
            namespaces_supported: m.1,
            version: m.2,
            completed_seqno: m.3,
            prepared_seqno: m.4,
            high_prepared_seqno: m.5,
            max_visible_seqno: t.0,
            on_disk_prepares: t.1,
            on_disk_prepare_bytes: t.2,
            checkpoint_type: CheckpointType::ALL[t.3],
            build: t.4,
            failover_table: t.5.map(|t| t.into_iter().map(|(uuid, seqno)| Failover { uuid, seqno }).collect()),
            replication_topology: t.6,
            rollbacks: t.7,
            is_first: t.2 % 2 == 1,
        })
    }

    proptest! {
        #[test]
        fn a_record_read_back_is_what_was_written(record in record()) {
            prop_assert_eq!(VbStateRecord::decode(&record.encode()), Ok(record));
        }
    }

    #[test]
    fn the_text_has_sorted_keys_no_spaces_and_numbers_in_strings() {
        let record = VbStateRecord {
            hlc_epoch: None,
            failover_table: Some(vec![Failover { uuid: 7, seqno: 0 }]),
            replication_topology: Some(vec![vec![Some("a".into()), None]]),
            ..VbStateRecord::new(VbState::Active)
        };
        let text = r#"{"checkpoint_type":"Memory","completed_seqno":"0","failover_table":[{"id":7,"seq":0}],"high_prepared_seqno":"0","hlc_epoch":"-1","max_cas":"0","max_deleted_seqno":"0","might_contain_xattrs":false,"namespaces_supported":true,"on_disk_prepare_bytes":"0","on_disk_prepares":"0","prepared_seqno":"0","replication_topology":[["a",null]],"snap_end":"0","snap_start":"0","state":"active","version":4}"#;
        assert_eq!(String::from_utf8(record.encode()).unwrap(), text);
    }

    #[test]
    fn absent_keys_mean_what_old_releases_meant_and_required_ones_are_missed() {
        let least = json!({"state": "replica", "max_deleted_seqno": "1", "snap_start": "2", "snap_end": "3",
            "max_cas": u64::MAX.to_string(), "checkpoint_id": "9"});
        let record = VbStateRecord::decode(least.to_string().as_bytes()).unwrap();
        let want = VbStateRecord {
            max_deleted_seqno: 1,
            snap_start: 2,
            snap_end: 3,
            namespaces_supported: false,
            version: 1,
            ..VbStateRecord::new(VbState::Replica)
        };
        assert_eq!(record, want);
        for key in ["state", "max_deleted_seqno", "snap_start", "snap_end", "max_cas"] {
            let mut without = least.clone();
            without.as_object_mut().unwrap().remove(key);
            let error = VbStateRecord::decode(without.to_string().as_bytes()).unwrap_err();
            assert!(error.0.contains(key), "{error}");
        }
        assert!(VbStateRecord::decode(b"{").is_err());
        assert!(VbStateRecord::decode(b"[]").is_err());
    }
}
