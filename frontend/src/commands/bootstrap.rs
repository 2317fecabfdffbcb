//! What a client does before its first document: greet, prove who it is, choose a bucket, learn the map.
//!
//! All of it is answered in order. Clients pipeline the selection of a bucket behind the last message of the login, so the
//! login must be over when the selection is looked at.

use types::Datatype;
use wire::kv::{ConfigVersion, Hello, Sasl};
use wire::{Feature, FeatureSet, Reply, Status};

use super::{Context, Refusal};
use crate::Shared;
use crate::auth::sasl::{MECHANISMS, Verdict};
use crate::cluster::{BucketShape, Cluster, Revision};
use crate::connection::{Selected, Session};
use crate::counts;
use crate::mailbox::{Answer, Letter};

/// What a HELLO may switch on: each is a promise, so nothing is here before it works.
const SUPPORTED: FeatureSet = FeatureSet::of(&[
    Feature::TcpNoDelay,
    Feature::MutationSeqno,
    Feature::Xattr,
    Feature::Xerror,
    Feature::SelectBucket,
    Feature::Snappy,
    Feature::Json,
    Feature::Duplex,
    Feature::ClustermapChangeNotification,
    Feature::UnorderedExecution,
    Feature::Tracing,
    Feature::AltRequestSupport,
    Feature::SyncReplication,
    Feature::Collections,
    Feature::SnappyEverywhere,
    Feature::PreserveTtl,
    Feature::VAttr,
    Feature::SubdocCreateAsDeleted,
    Feature::SubdocDocumentMacroSupport,
    Feature::SubdocReplaceBodyWithXattr,
    Feature::SubdocReplicaRead,
    Feature::GetClusterConfigWithKnownVersion,
    Feature::DedupeNotMyVbucketClustermap,
    Feature::ClustermapChangeNotificationBrief,
    Feature::SubdocAllowsAccessOnMultipleXattrKeys,
    Feature::SubdocBinaryXattr,
    Feature::DcpSkipDeletesInInitialBackfill,
]);

/// Longest agent name kept, in bytes.
const AGENT_LEN_MAX: usize = 200;
/// Selecting this means selecting none.
const NO_BUCKET: &[u8] = b"@no bucket@";

/// What a connection has before it says a word.
pub(crate) fn greet(session: &mut Session, shared: &Shared) {
    if let Some(name) = &shared.options.open_bucket {
        session.select(find(shared, name, true));
    }
}

/// Tells a connection that asked for it of the newest map of its bucket, or without one of the nodes, once: the map itself, or only
/// which one it is. Clients take no notice of one they have.
pub(crate) fn push_map(session: &mut Session, out: &mut Vec<u8>, cluster: &Cluster) {
    let shape = session.selected.as_ref().map(|selected| &selected.shape);
    let (revision, config) = shape.map_or_else(|| cluster.global_config(), |shape| cluster.bucket_config(shape));
    if session.config_sent.max(session.config_pushed) >= Some(revision) {
        return;
    }
    let name = shape.map_or(&b""[..], |shape| shape.name.as_bytes());
    session.config_pushed = Some(revision);
    let version = ConfigVersion { epoch: revision.epoch, rev: revision.rev };
    let (mut body, mut datatype) = (&b""[..], Datatype::RAW);
    if !session.features.has(Feature::ClustermapChangeNotificationBrief) {
        session.config_sent = Some(revision);
        body = config.as_bytes();
        datatype = if session.features.has(Feature::Json) { Datatype::JSON } else { Datatype::RAW };
    }
    wire::reply::encode_clustermap_change(out, revision.rev as u32, version, name, body, datatype);
}

fn find(shared: &Shared, name: &str, implied: bool) -> Option<Selected> {
    // Taken first: a deletion that comes in between is seen at the next request.
    let checked = shared.cluster.revision();
    let bucket = shared.engine.bucket(name)?;
    let shape = BucketShape::of(&bucket.spec());
    let timings = shared.timings_of(name);
    Some(Selected { bucket, shape, timings, implied, checked })
}

impl Context<'_> {
    pub(super) fn hello(&mut self, hello: &Hello<'_>) -> Result<(), Refusal> {
        // Nothing of an earlier HELLO stays, and the reply to this one is in the oldest form.
        self.session.features = FeatureSet::EMPTY;
        self.session.greeted = true;
        self.session.info.names.lock().agent = agent(hello.agent);
        let agreed =
            wire::hello::negotiate(hello.features, SUPPORTED).map_err(|e| (e.status, e.context.into_owned()))?;
        if agreed.has(Feature::SelectBucket) && self.session.selected.as_ref().is_some_and(|s| s.implied) {
            // It knows how to ask for a bucket, and takes having none as its own choice.
            self.session.select(None);
        }
        let mut codes = Vec::with_capacity(64);
        agreed.encode(&mut codes);
        self.put(Reply { value: (&codes, &[]), ..self.blank(Status::Success) });
        self.session.features = agreed;
        Ok(())
    }

    pub(super) fn sasl_list_mechs(&mut self) -> Result<(), Refusal> {
        self.value(Default::default(), MECHANISMS.as_bytes())
    }

    pub(super) fn sasl_auth(&mut self, sasl: &Sasl<'_>) -> Result<(), Refusal> {
        self.session.identify(None);
        let rng = &self.shared.env.rng;
        let users = &self.shared.users;
        let verdict = self.session.exchange.start(users, sasl.mechanism, sasl.message, |bytes| rng.fill(bytes));
        self.judged(verdict)
    }

    pub(super) fn sasl_step(&mut self, sasl: &Sasl<'_>) -> Result<(), Refusal> {
        let verdict = self.session.exchange.step(sasl.mechanism, sasl.message);
        self.judged(verdict)
    }

    pub(super) fn judged(&mut self, verdict: Verdict) -> Result<(), Refusal> {
        match verdict {
            Verdict::Untried(untried) => {
                let ticket = self.ticket();
                self.wait(ticket, true);
                let (mailbox, users) = (self.mailbox.clone(), self.shared.users.clone());
                self.shared.trials.put(move || {
                    let answer = Answer::Login(untried.verify(&users));
                    mailbox.post(Letter::Answer { ticket, answer });
                });
                Ok(())
            }
            Verdict::Continue(challenge) => {
                self.put(Reply { value: (&challenge, &[]), ..self.blank(Status::AuthContinue) });
                Ok(())
            }
            Verdict::Passed(identity, last) => {
                self.session.identify(Some(identity));
                self.imply_bucket();
                self.value(Default::default(), &last)
            }
            Verdict::Refused(why) => {
                counts::AUTH_ERRORS.inc();
                Err((Status::AuthError, why.to_owned()))
            }
            Verdict::Malformed(why) => Err((Status::Einval, why.to_owned())),
        }
    }

    /// Memcached clients log in and then expect to have a bucket: the open one, or "default", or the only one.
    fn imply_bucket(&mut self) {
        if self.session.selected.is_some() || self.has(Feature::SelectBucket) {
            return;
        }
        let names = self.shared.bucket_names();
        let only = if names.len() == 1 { names.first().cloned() } else { None };
        let default = names.iter().find(|name| *name == "default").cloned();
        if let Some(name) = self.shared.options.open_bucket.clone().or(default).or(only) {
            self.session.select(find(self.shared, &name, true));
        }
    }

    pub(super) fn select_bucket(&mut self, name: &[u8]) -> Result<(), Refusal> {
        if name == NO_BUCKET {
            self.session.select(None);
            return self.done();
        }
        // Not "no such": a common client takes that for a bucket that is about to appear, and waits.
        let refused = || (Status::Eaccess, format!("no access to bucket {}", name.escape_ascii()));
        let name = std::str::from_utf8(name).map_err(|_| refused())?;
        let open = self.shared.options.open_bucket.as_deref() == Some(name);
        if self.session.identity.is_none() && !open {
            return Err(refused());
        }
        let selected = find(self.shared, name, false).ok_or_else(refused)?;
        self.session.select(Some(selected));
        self.done()
    }

    pub(super) fn get_cluster_config(&mut self, known: Option<ConfigVersion>) -> Result<(), Refusal> {
        let cluster = &self.shared.cluster;
        let (revision, config) = match &self.session.selected {
            Some(selected) => cluster.bucket_config(&selected.shape),
            None => cluster.global_config(),
        };
        let known = known.map(|v| Revision { epoch: v.epoch, rev: v.rev });
        self.session.config_sent = self.session.config_sent.max(Some(revision));
        if known.is_some_and(|known| known >= revision) {
            return self.done();
        }
        self.value(self.json(), config.as_bytes())
    }

    pub(super) fn get_error_map(&mut self, version: u16) -> Result<(), Refusal> {
        match wire::error_map::error_map(version) {
            Some(map) => self.value(self.json(), map.as_bytes()),
            None => Err((Status::KeyEnoent, format!("no error map of version {version}"))),
        }
    }

    pub(super) fn version(&mut self) -> Result<(), Refusal> {
        self.value(Default::default(), self.shared.options.version.as_bytes())
    }

    pub(super) fn quit(&mut self) -> Result<(), Refusal> {
        self.session.closing = true;
        self.done()
    }
}

/// The agent's name out of free text or of a JSON object with the name under `a`.
fn agent(sent: &[u8]) -> String {
    let parsed: Option<serde_json::Value> = serde_json::from_slice(sent).ok();
    let name = parsed.as_ref().and_then(|v| v.get("a")).and_then(|a| a.as_str()).map(str::to_owned);
    let mut name = name.unwrap_or_else(|| String::from_utf8_lossy(sent).into_owned());
    name.retain(|c| !c.is_control());
    while name.len() > AGENT_LEN_MAX {
        name.pop();
    }
    name
}
