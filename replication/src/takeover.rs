//! A vBucket moves: its stream ends with the receiver being active, and with nobody being so in between.
//!
//! ```text
//!     here:    active ───────────────────────── dead ─────────────────────▶
//!     stream:  changes … "be pending"   ok ┐    changes left, "be active"   ok, end
//!     there:   replica ────────── pending ─┘────────────────────── active ─▶
//! ```
//! Nothing is written here once it is dead, and nothing there before it is active, so no operation is lost or done twice. That it is
//! dead is on disk here before it is active there: whatever is restarted, no two nodes find it active. If the connection breaks in
//! between, the vBucket is dead here, and whoever moves it decides where it lives.

use changelog::{FailoverEntry, FailoverTable, VbRecord};
use engine::Topology;
use serde_json::{Value, json};
use types::{Seqno, VbState, VbUuid};

/// What the receiver takes along, as JSON: the histories, newest first, and the chains.
pub(crate) fn details(record: &VbRecord) -> String {
    let histories =
        record.failover.newest_first().iter().map(|entry| json!({"id": entry.uuid.0, "seq": entry.seqno.0}));
    json!({"failovers": histories.collect::<Vec<_>>(), "topology": record.topology}).to_string()
}

/// Reads what [`details`] wrote. Of the chains, those are ours that begin with us, the `node`: those it goes to.
pub(crate) fn parse_details(details: &[u8], node: &str) -> Option<(FailoverTable, Option<Topology>)> {
    let details: Value = serde_json::from_slice(details).ok()?;
    let entry = |entry: &Value| {
        Some(FailoverEntry { uuid: VbUuid(entry["id"].as_u64()?), seqno: Seqno(entry["seq"].as_u64()?) })
    };
    let entries = details["failovers"].as_array()?.iter().map(entry).collect::<Option<Vec<_>>>()?;
    let chains: Topology = serde_json::from_value(details["topology"].clone()).unwrap_or_default();
    let ours: Topology = chains.into_iter().filter(|chain| chain[..].first() == Some(&Some(node.to_owned()))).collect();
    Some((FailoverTable::from_entries(entries)?, (!ours.is_empty()).then_some(ours)))
}

/// How far it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Takeover {
    /// What was changed is sent as in any other stream.
    Sending,
    /// The receiver was told to be pending, and has yet to say that it is.
    AwaitsPending,
    /// Nothing is written here any more, and that is yet to be on disk; what was written is sent.
    LettingGo,
    /// The same, and it is on disk.
    Draining,
    /// The receiver was told to be active.
    AwaitsActive,
    Done,
}

impl Takeover {
    /// Everything there is was sent: what the receiver is to become now.
    pub const fn caught_up(self) -> Option<(VbState, Takeover)> {
        match self {
            Takeover::Sending => Some((VbState::Pending, Takeover::AwaitsPending)),
            Takeover::Draining => Some((VbState::Active, Takeover::AwaitsActive)),
            _ => None,
        }
    }

    /// The receiver has become what it was told to. `None`: nobody told it anything.
    pub const fn answered(self) -> Option<Takeover> {
        match self {
            Takeover::AwaitsPending => Some(Takeover::LettingGo),
            Takeover::AwaitsActive => Some(Takeover::Done),
            _ => None,
        }
    }

    /// It is on disk that the vBucket is dead here. `None`: nobody waited for that.
    pub const fn recorded(self) -> Option<Takeover> {
        match self {
            Takeover::LettingGo => Some(Takeover::Draining),
            _ => None,
        }
    }

    /// The vBucket is to be dead here from now on.
    pub const fn has_let_go(self) -> bool {
        matches!(self, Takeover::LettingGo | Takeover::Draining | Takeover::AwaitsActive | Takeover::Done)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [Takeover; 6] = [
        Takeover::Sending,
        Takeover::AwaitsPending,
        Takeover::LettingGo,
        Takeover::Draining,
        Takeover::AwaitsActive,
        Takeover::Done,
    ];

    #[test]
    fn the_receiver_takes_the_histories_and_the_chains_that_begin_with_it() {
        let chain = |nodes: [&str; 2]| nodes.map(|node| Some(node.to_owned())).to_vec();
        let entries = [(7, 90), (3, 0)].map(|(uuid, seqno)| FailoverEntry { uuid: VbUuid(uuid), seqno: Seqno(seqno) });
        let failover = FailoverTable::from_entries(entries.to_vec()).expect("not empty");
        let mut record = VbRecord::new(VbState::Active, failover.clone());
        record.topology = vec![chain(["a", "b"]), chain(["c", "a"])];
        let told = details(&record);
        assert_eq!(parse_details(told.as_bytes(), "c"), Some((failover.clone(), Some(vec![chain(["c", "a"])]))));
        assert_eq!(parse_details(told.as_bytes(), "b"), Some((failover, None)));
        assert_eq!(parse_details(b"{}", "c"), None);
    }

    #[test]
    fn a_vbucket_is_let_go_here_before_it_is_active_there() {
        let told: Vec<_> = ALL.iter().filter_map(|at| Some((*at, at.caught_up()?))).collect();
        let expected = [
            (Takeover::Sending, (VbState::Pending, Takeover::AwaitsPending)),
            (Takeover::Draining, (VbState::Active, Takeover::AwaitsActive)),
        ];
        assert_eq!(told, expected);
        let (mut at, mut path) = (Takeover::Sending, Vec::new());
        while at != Takeover::Done {
            at = at.caught_up().map(|(_, next)| next).or(at.answered()).or(at.recorded()).expect("a way on");
            path.push((at, at.has_let_go()));
        }
        let expected = [
            (Takeover::AwaitsPending, false),
            (Takeover::LettingGo, true),
            (Takeover::Draining, true),
            (Takeover::AwaitsActive, true),
            (Takeover::Done, true),
        ];
        assert_eq!(path, expected);
    }
}
