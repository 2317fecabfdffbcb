//! Opening a bucket's directory: which file counts, what is cleaned away, and when to refuse.
//!
//! The newest whole revision counts. What cannot be whole is not guessed at: a vBucket whose only file is damaged is an
//! error, and stays one until a person has chosen what to give up.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use changelog::FailoverEntry;
use couchstore::check::{self, Damage as Damaged, Depth};
use couchstore::{Couch, Error, Mode, Snapshot, vbstate};
use env::OpenMode;
use types::{Seqno, VbId, VbUuid};

use crate::deletion::Deletions;
use crate::error::{Damage, StoreError};
use crate::facts::VbFacts;
use crate::names::{self, Entry};
use crate::shared::Shared;
use crate::spec::BucketSpec;
use crate::sync::prove_file;
use crate::vb::{Committed, open_file};

/// One vBucket found on disk.
pub(crate) struct Found {
    pub vb: VbId,
    pub committed: Committed,
    /// Beyond every revision that was ever seen here.
    pub next_rev: u64,
}

/// What a look at one bucket's directory gives. Any damage means that the bucket must not be served.
#[derive(Default)]
pub(crate) struct Look {
    pub found: Vec<Found>,
    pub damages: Vec<Damage>,
}

pub(crate) struct Opening<'a> {
    pub shared: &'a Arc<Shared>,
    pub dir: &'a Path,
    pub spec: &'a BucketSpec,
    pub deletions: &'a Deletions,
    /// The last run ended without saying so: what the page cache shows may not be on disk. Whoever opens the store syncs
    /// the files that were found before anything counts on them.
    pub unclean: bool,
}

/// Why a file cannot count.
enum Unusable {
    /// It could not be looked at; it may be fine.
    Unreadable(StoreError),
    Damaged {
        offset: Option<u64>,
        what: String,
        lost: String,
    },
}

impl Opening<'_> {
    pub fn look(&self) -> Result<Look, StoreError> {
        let storage = &*self.shared.env.storage;
        let names = storage.list(self.dir).map_err(StoreError::io("list", self.dir))?;
        let mut revs: BTreeMap<VbId, Vec<u64>> = BTreeMap::new();
        let mut changed = false;
        for name in &names {
            match names::classify(name, self.spec.vbuckets) {
                Entry::VbFile { vb, rev } if self.deletions.void(vb, rev) => {
                    tracing::info!(bucket = self.spec.name, file = name, "removing a file of a deleted vBucket");
                    self.remove(name)?;
                    changed = true;
                }
                Entry::VbFile { vb, rev } => revs.entry(vb).or_default().push(rev),
                Entry::Leftover => {
                    tracing::info!(
                        bucket = self.spec.name,
                        file = name,
                        "removing what an earlier run left unfinished"
                    );
                    self.remove(name)?;
                    changed = true;
                }
                Entry::Fixed => {}
                Entry::Aside => tracing::warn!(bucket = self.spec.name, file = name, "a file was set aside earlier"),
                Entry::Foreign => {
                    tracing::warn!(bucket = self.spec.name, file = name, "a file that is not ours: left alone");
                }
            }
        }
        let mut look = Look::default();
        for (vb, mut revs) in revs {
            revs.sort_unstable_by(|a, b| b.cmp(a));
            changed |= self.choose(vb, &revs, &mut look)?;
        }
        if changed || self.unclean {
            // A kill may have come between a rename and its sync, and then this entry is not durable yet.
            storage.sync_dir(self.dir).map_err(StoreError::io("sync directory", self.dir))?;
        }
        Ok(look)
    }

    /// Picks among the revisions of one vBucket, newest first. True: the directory was changed.
    fn choose(&self, vb: VbId, revs: &[u64], look: &mut Look) -> Result<bool, StoreError> {
        let mut whole: Option<Committed> = None;
        let mut aside = Vec::new();
        let mut damages = Vec::new();
        for (i, &rev) in revs.iter().enumerate() {
            match self.load(vb, rev) {
                Ok(older) => match &whole {
                    // Both are whole only between the steps of a compaction, and then they agree; or the older one's name is back
                    // after power loss, while the newer one went on, or was rolled back.
                    Some(newer) if newer.reach() >= older.reach() => {}
                    Some(newer) => {
                        aside
                            .push((newer.rev, format!("ends at seqno {}, an older one at {}", newer.high, older.high)));
                        whole = Some(older);
                    }
                    None => whole = Some(older),
                },
                Err(Unusable::Unreadable(error)) => return Err(error),
                Err(Unusable::Damaged { what, .. }) if whole.is_some() => {
                    tracing::warn!(bucket = self.spec.name, vb = vb.0, rev, "a superseded file is damaged: {what}");
                }
                Err(Unusable::Damaged { offset, what, lost }) => {
                    let is_newest_of_many = i + 1 < revs.len();
                    if is_newest_of_many && self.holds_nothing(vb, rev)? {
                        aside.push((rev, what.clone()));
                    } else if let Some(rescued) = self.rescue(vb, rev)? {
                        whole = Some(rescued);
                        break;
                    }
                    let path = self.path(vb, rev);
                    damages.push(Damage { vb: Some(vb), path, offset, what, lost });
                    if !aside.iter().any(|(other, _)| *other == rev) {
                        break;
                    }
                }
            }
        }
        let Some(committed) = whole else {
            look.damages.append(&mut damages);
            return Ok(false);
        };
        let changed = revs.len() > 1;
        if changed && self.unclean {
            // Before the others go, this one must be able to stand alone.
            prove_file(&*self.shared.env.storage, &self.path(vb, committed.rev), committed.header_at)?;
        }
        for &rev in revs.iter().filter(|rev| **rev != committed.rev) {
            let name = names::vb_file(vb, rev);
            match aside.iter().find(|(other, _)| *other == rev) {
                Some((_, why)) => self.set_aside(vb, &name, why, &committed)?,
                None if rev < committed.rev => self.remove(&name)?,
                None => {}
            }
        }
        let next_rev = revs[0].saturating_add(1);
        look.found.push(Found { vb, committed, next_rev });
        Ok(changed)
    }

    fn set_aside(&self, vb: VbId, name: &str, why: &str, used: &Committed) -> Result<(), StoreError> {
        let (from, to) = (self.dir.join(name), self.dir.join(format!("{name}{}", names::ASIDE_SUFFIX)));
        tracing::error!(
            bucket = self.spec.name,
            vb = vb.0,
            "{} is not a whole file ({why}); using {} up to seqno {}, keeping the other as {}",
            from.display(),
            names::vb_file(vb, used.rev),
            used.high,
            to.display()
        );
        self.shared.env.storage.rename(&from, &to).map_err(StoreError::io("rename", &from))
    }

    /// Opens a file as strictly as it goes and reads what its newest commit says of the vBucket.
    fn load(&self, vb: VbId, rev: u64) -> Result<Committed, Unusable> {
        let path = self.path(vb, rev);
        let file = open_file(self.shared, &path, OpenMode::Read).map_err(Unusable::Unreadable)?;
        let opened = Couch::open(file, &path, Mode::Strict);
        let couch = opened.map_err(|error| self.unusable(vb, rev, error, None))?;
        let snapshot = couch.snapshot();
        if self.shared.options.recovery {
            self.prove(vb, &path, &snapshot)?;
        }
        self.read(rev, &snapshot).map_err(|bad| match bad {
            Bad::File(error) => self.unusable(vb, rev, error, Some(&snapshot)),
            Bad::Facts(what) => {
                let offset = Some(snapshot.header().at);
                Unusable::Damaged { offset, what, lost: lost(vb, Some(&snapshot), None) }
            }
        })
    }

    /// Reads everything the newest commit reaches. Costs as much as the file is large, so only a recovery does it: elsewhere
    /// the warm-up meets the same damage, document by document.
    fn prove(&self, vb: VbId, path: &Path, newest: &Snapshot) -> Result<(), Unusable> {
        let file = open_file(self.shared, path, OpenMode::Read).map_err(Unusable::Unreadable)?;
        let report = check::check(file, path, Depth::Newest);
        let report = report.map_err(|error| Unusable::Unreadable(StoreError::file(vb)(error)))?;
        let here = newest.header().at;
        match report.damage.into_iter().find(|damage| damage.header_at == Some(here)) {
            None => Ok(()),
            Some(Damaged { offset, what, .. }) => {
                Err(Unusable::Damaged { offset, what, lost: lost(vb, Some(newest), None) })
            }
        }
    }

    fn read(&self, rev: u64, file: &Snapshot) -> Result<Committed, Bad> {
        let header = file.header();
        let high = Seqno(header.update_seq);
        let stored = file.local(vbstate::ID)?;
        let stored = stored.ok_or_else(|| Bad::Facts("the newest commit has no _local/vbstate".to_owned()))?;
        let facts = VbFacts::decode(&stored, high, || self.fresh_uuid()).map_err(Bad::Facts)?;
        // The tops of both trees: a file of which nothing can be read must not wait for somebody to ask.
        file.get_by_id(b"")?;
        file.count_since(high.0)?;
        Ok(Committed {
            rev,
            header_at: header.at,
            high,
            purge: Seqno(header.purge_seq),
            facts,
            alive: header.doc_count(),
            tombstones: header.deleted_count(),
            file_bytes: file.file_bytes()?,
            live_bytes: header.live_bytes(),
        })
    }

    fn unusable(&self, vb: VbId, rev: u64, error: Error, file: Option<&Snapshot>) -> Unusable {
        if let Error::Io { .. } = error {
            return Unusable::Unreadable(StoreError::file(vb)(error));
        }
        let older = self.open_recovering(vb, rev, OpenMode::Read).ok();
        let lost = lost(vb, file, older.as_deref());
        Unusable::Damaged { offset: error.offset(), what: error.to_string(), lost }
    }

    fn open_recovering(&self, vb: VbId, rev: u64, mode: OpenMode) -> Result<Couch, StoreError> {
        let path = self.path(vb, rev);
        let file = open_file(self.shared, &path, mode)?;
        Couch::open(file, &path, Mode::Recovery).map_err(StoreError::file(vb))
    }

    /// Whether a file has no commit at all, not even an old one: then it was never in use, and setting it aside loses
    /// nothing that was acknowledged.
    fn holds_nothing(&self, vb: VbId, rev: u64) -> Result<bool, StoreError> {
        match self.open_recovering(vb, rev, OpenMode::Read) {
            Ok(couch) => Ok(couch.header().update_seq == 0),
            Err(StoreError::File { source, .. }) if !matches!(*source, Error::Io { .. }) => Ok(true),
            Err(error) => Err(error),
        }
    }

    /// If asked to: goes back to the newest commit of which everything can be read, and makes it the newest, as the beginning of another
    /// history. Nothing is cut off.
    fn rescue(&self, vb: VbId, rev: u64) -> Result<Option<Committed>, StoreError> {
        if !self.shared.options.recovery {
            return Ok(None);
        }
        let Ok(mut couch) = self.open_recovering(vb, rev, OpenMode::ReadWrite) else { return Ok(None) };
        let path = self.path(vb, rev);
        let report = check::check(open_file(self.shared, &path, OpenMode::Read)?, &path, Depth::All);
        let report = report.map_err(StoreError::file(vb))?;
        let is_whole = |at: u64| report.headers.iter().any(|(header, whole)| header.at == at && *whole);
        let mut rescued = loop {
            match self.read(rev, &couch.snapshot()) {
                Ok(committed) if is_whole(committed.header_at) => break committed,
                _ if couch.rewind().is_ok() => {}
                _ => return Ok(None),
            }
        };
        // Seqnos after this one were used before, for changes that are now lost: peers must be able to tell.
        let uuid = self.fresh_uuid();
        rescued.facts.record.failover.begin(FailoverEntry { uuid, seqno: rescued.high });
        let mut batch = couch.batch().map_err(StoreError::file(vb))?;
        batch.local_put(vbstate::ID, &rescued.facts.encode()).map_err(StoreError::file(vb))?;
        let outcome = batch.commit(self.shared.env.clock.unix_ns()).map_err(StoreError::file(vb))?;
        rescued.header_at = outcome.header.at;
        tracing::error!(
            bucket = self.spec.name,
            vb = vb.0,
            "{} is damaged; as asked for, went back to its newest intact commit: {} documents, seqno {}; every later \
             change of this vBucket is lost",
            self.path(vb, rev).display(),
            rescued.alive,
            rescued.high
        );
        Ok(Some(rescued))
    }

    fn fresh_uuid(&self) -> VbUuid {
        VbUuid((self.shared.env.rng.u64() >> 16).max(1))
    }

    fn path(&self, vb: VbId, rev: u64) -> PathBuf {
        self.dir.join(names::vb_file(vb, rev))
    }

    fn remove(&self, name: &str) -> Result<(), StoreError> {
        let path = self.dir.join(name);
        self.shared.env.storage.remove_file(&path).map_err(StoreError::io("remove", &path))
    }
}

enum Bad {
    File(Error),
    Facts(String),
}

impl From<Error> for Bad {
    fn from(error: Error) -> Bad {
        Bad::File(error)
    }
}

fn lost(vb: VbId, file: Option<&Snapshot>, older: Option<&Snapshot>) -> String {
    match (file, older) {
        (Some(file), _) => format!("vBucket {vb}: up to {} documents", file.header().doc_count()),
        (None, Some(older)) => format!(
            "vBucket {vb}: every change after seqno {}; up to {} documents as of then can be read",
            older.header().update_seq,
            older.header().doc_count()
        ),
        (None, None) => format!("vBucket {vb}: all its documents; no commit in this file can be read"),
    }
}
