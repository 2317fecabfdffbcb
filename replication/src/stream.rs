//! One vBucket for one consumer.

use std::collections::VecDeque;
use std::sync::{Arc, Weak};
use std::time::Duration;

use changelog::{Follower, Slice, VbRecord};
use engine::{Bell, Bucket, Mailbox, OpResult, Outcome, Role, Ticket, VBucket, Waiter};
use persist::{BucketStore, Changes};
use types::{Seqno, VbId, VbState, VbUuid};
use wire::dcp::EndReason;

use crate::filter::Filter;
use crate::inbox::{Inbox, Note, Piece, StreamBell, StreamNumber};
use crate::registry::StreamFace;
use crate::snapshot::{self, Next, OfDisk, Part};
use crate::stats::{DCP_BACKFILLS, DCP_BACKFILLS_BEGUN, DCP_STREAMS, DCP_STREAMS_LEFT_BEHIND};
use crate::takeover::Takeover;
use crate::terms::Terms;

/// How much of the changelog is one snapshot, in bytes of memory.
const SLICE_BYTES: usize = 128 << 10;
/// How much of a file is read in one go.
const PIECE_BYTES: usize = 1 << 20;

/// Where a stream gets its changes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum StreamState {
    /// From the file, once it is its turn.
    Waiting,
    Backfilling,
    InMemory,
}

impl StreamState {
    pub(crate) const ALL: [StreamState; 3] = [StreamState::Waiting, StreamState::Backfilling, StreamState::InMemory];

    pub const fn name(self) -> &'static str {
        match self {
            StreamState::Waiting => "waiting",
            StreamState::Backfilling => "backfilling",
            StreamState::InMemory => "in-memory",
        }
    }

    pub const fn may_become(self, next: StreamState) -> bool {
        matches!(
            (self, next),
            (StreamState::Waiting, StreamState::Backfilling | StreamState::InMemory)
                | (StreamState::Backfilling | StreamState::InMemory, StreamState::Waiting)
        )
    }
}

enum Phase {
    Waiting,
    /// A piece is on its way.
    Reading,
    /// A piece is here, and this is what is left of the file.
    Read(Box<Changes>),
    InMemory(Follower),
}

impl Phase {
    fn state(&self) -> StreamState {
        match self {
            Phase::Waiting => StreamState::Waiting,
            Phase::Reading | Phase::Read(_) => StreamState::Backfilling,
            Phase::InMemory(_) => StreamState::InMemory,
        }
    }
}

/// What comes next.
pub(crate) enum Step {
    Send(Next),
    /// The receiver of a vBucket that moves is to be in this state.
    Tell(VbState),
    /// Nothing, until somebody says so.
    Rest,
    /// It has to go to the file, and waits for its turn.
    WantsTurn,
    /// The next piece of the file.
    ReadOn,
    End(EndReason),
}

/// Which of its producer's queues a stream is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    Nowhere,
    Ready,
    /// Of those that have something which can wait for company.
    Deferred {
        since: Duration,
    },
    /// Of those that wait for their turn at the file.
    InLine,
}

/// What a stream is asked to be.
pub(crate) struct Plan {
    pub number: StreamNumber,
    pub vb: VbId,
    pub opaque: u32,
    pub stream_id: Option<u16>,
    pub start: Seqno,
    pub end: Seqno,
    /// What the consumer has of a snapshot that it was in the middle of; nothing if both are one.
    pub half: (Seqno, Seqno),
    pub filter: Filter,
    pub state: VbState,
    pub uuid: VbUuid,
    /// How often the vBucket had been rolled back.
    pub rollbacks: u32,
    /// Tombstones up to here may be gone, and that is fine.
    pub purge: Seqno,
    pub skips_deletes: bool,
    /// If the vBucket moves.
    pub takeover: Option<Takeover>,
}

/// 1. `read` is how far the changes of the vBucket were looked at; what of them is to be sent and was not is in `queue`.
/// 2. The bell is on the vBucket's list as long as the stream lives.
/// 3. It holds one slice or one piece at most, beside what the changelog keeps for it.
/// 4. `saw_all`: the last look at the changelog left nothing there. As long as the bell has not rung since, another would
///    find nothing.
pub(crate) struct Stream {
    pub plan: Plan,
    bucket: Arc<Bucket>,
    phase: Phase,
    read: Seqno,
    saw_all: bool,
    /// Where the next snapshot begins.
    next_start: Seqno,
    queue: VecDeque<Next>,
    of_disk: Option<OfDisk>,
    bell: Arc<StreamBell>,
    pub face: Arc<StreamFace>,
    pub place: Place,
}

impl Stream {
    /// `is_patient`: what nobody waits for may come a little later.
    pub fn new(plan: Plan, bucket: &Arc<Bucket>, inbox: &Arc<Inbox>, is_patient: bool) -> Stream {
        let face = Arc::new(StreamFace::new(plan.vb, plan.start, plan.end));
        let bell = Arc::new(StreamBell::new(plan.number, Arc::clone(inbox), is_patient));
        DCP_STREAMS.add(1);
        DCP_BACKFILLS.add(1);
        let stream = Stream {
            bucket: Arc::clone(bucket),
            phase: Phase::Waiting,
            read: plan.start,
            saw_all: false,
            next_start: plan.start,
            queue: VecDeque::new(),
            of_disk: None,
            bell,
            face,
            place: Place::Nowhere,
            plan,
        };
        stream.vbucket().listen(stream.bell());
        stream
    }

    fn bell(&self) -> Arc<dyn Bell> {
        Arc::clone(&self.bell) as _
    }

    fn vbucket(&self) -> &VBucket {
        self.bucket.vbucket(self.plan.vb).expect("a stream is of a vBucket there is")
    }

    /// What the vBucket is now.
    pub fn record(&self) -> Arc<VbRecord> {
        self.vbucket().log.record()
    }

    /// What to do next.
    pub fn step(&mut self, terms: &Terms) -> Step {
        loop {
            if let Some(next) = self.queue.pop_front() {
                return Step::Send(next);
            }
            if self.read >= self.plan.end {
                return Step::End(EndReason::Ok);
            }
            match &self.phase {
                Phase::Waiting => {
                    let log = &self.vbucket().log;
                    if self.is_of_another_life(&log.record()) {
                        return Step::End(EndReason::StateChanged);
                    }
                    if self.read > log.marks.high() {
                        return Step::End(EndReason::Rollback);
                    }
                    match log.follow(self.read) {
                        Some(follower) => self.enter(Phase::InMemory(follower)),
                        None => return Step::WantsTurn,
                    }
                }
                Phase::Reading => return Step::Rest,
                Phase::Read(changes) if !changes.is_done() => return Step::ReadOn,
                Phase::Read(_) => self.end_of_file(),
                Phase::InMemory(_) if self.has_nothing_new() => return self.caught_up(),
                Phase::InMemory(follower) => {
                    self.bell.hush();
                    match self.vbucket().log.take(follower, SLICE_BYTES) {
                        None => self.fall_behind(),
                        Some(slice) if self.is_of_another_life(&slice.record) => {
                            return Step::End(EndReason::StateChanged);
                        }
                        Some(slice) if slice.last <= self.read => return self.caught_up(),
                        Some(slice) => self.show(terms, slice),
                    }
                }
            }
        }
    }

    /// Whoever lets go of a vBucket looks again all the same: a change may have its place and not have rung yet.
    fn has_nothing_new(&self) -> bool {
        self.saw_all && self.plan.takeover.is_none() && !self.bell.has_rung()
    }

    /// The consumer was told everything there is.
    fn caught_up(&mut self) -> Step {
        // What is last may be nothing to it.
        self.face.note_sent(self.read, 0);
        if self.plan.takeover == Some(Takeover::Done) {
            return Step::End(EndReason::Ok);
        }
        match self.plan.takeover.and_then(Takeover::caught_up) {
            Some((state, next)) => {
                self.plan.takeover = Some(next);
                Step::Tell(state)
            }
            None => Step::Rest,
        }
    }

    /// The receiver of a vBucket that moves is what it was told to be, if it was told anything. `Err`: it cannot move from here.
    pub fn answered(&mut self, inbox: &Arc<Inbox>) -> Result<(), EndReason> {
        let Some(next) = self.plan.takeover.and_then(Takeover::answered) else { return Ok(()) };
        self.plan.takeover = Some(next);
        if next != Takeover::LettingGo {
            return Ok(());
        }
        let mailbox: Arc<dyn Mailbox> = Arc::new(LetGo(Arc::downgrade(inbox)));
        let ticket = Ticket { slot: 0, generation: 0, request: self.plan.number };
        let waiter = || Waiter::new(Arc::clone(&mailbox), ticket);
        match self.bucket.set_vbucket_state(self.plan.vb, Role::of(VbState::Dead, None), &waiter) {
            Outcome::Done(Err(_)) => Err(EndReason::StateChanged),
            Outcome::Done(Ok(_)) => {
                self.let_go();
                Ok(())
            }
            Outcome::Pending => Ok(()),
        }
    }

    /// That the vBucket is dead here is on disk.
    pub fn let_go(&mut self) {
        self.plan.takeover = self.plan.takeover.and_then(Takeover::recorded).or(self.plan.takeover);
    }

    /// What it was promised was promised by the vBucket as it was then.
    fn is_of_another_life(&self, record: &VbRecord) -> bool {
        let Plan { state, uuid, rollbacks, takeover, .. } = self.plan;
        if record.rollbacks != rollbacks {
            return true;
        }
        if takeover.is_some_and(Takeover::has_let_go) {
            return record.state != VbState::Dead;
        }
        record.state != state || (state == VbState::Active && record.failover.current().uuid != uuid)
    }

    fn show(&mut self, terms: &Terms, slice: Slice) {
        let unordered = slice.decided_out_of_order();
        let Slice { mut items, last, .. } = slice;
        self.saw_all = last >= self.vbucket().log.marks.high();
        let last = last.min(self.plan.end);
        items.retain(|item| item.seqno() <= last);
        self.read = last;
        let part = Part { start: self.next_start, items, last, unordered };
        if let Some((queue, end)) = snapshot::of_memory(terms, &self.plan.filter, part) {
            self.queue = queue;
            self.next_start = end.next();
        }
    }

    fn fall_behind(&mut self) {
        self.saw_all = false;
        DCP_STREAMS_LEFT_BEHIND.inc();
        self.enter(Phase::Waiting);
    }

    fn enter(&mut self, next: Phase) {
        let (from, to) = (self.phase.state(), next.state());
        if from != to {
            assert!(from.may_become(to), "a stream went from {} to {}", from.name(), to.name());
            self.face.set_state(to);
            DCP_BACKFILLS.add(i64::from(from == StreamState::InMemory) - i64::from(to == StreamState::InMemory));
        }
        if let Phase::InMemory(follower) = std::mem::replace(&mut self.phase, next) {
            self.vbucket().log.unfollow(follower);
        }
    }

    /// Has the next piece of the file read. It is posted to the inbox.
    pub fn read_on(&mut self, inbox: &Arc<Inbox>) {
        let changes = match std::mem::replace(&mut self.phase, Phase::Reading) {
            Phase::Read(changes) => Some(changes),
            Phase::Waiting => {
                DCP_BACKFILLS_BEGUN.inc();
                self.face.set_state(StreamState::Backfilling);
                None
            }
            Phase::Reading | Phase::InMemory(_) => unreachable!("only who waits for the file reads it"),
        };
        let (inbox, number, vb, after) = (Arc::clone(inbox), self.plan.number, self.plan.vb, self.read);
        self.bucket.read_behind("dcp_backfill", move |store| {
            let piece = read_piece(store, vb, after, changes);
            inbox.post(Note::Read(number, piece.map_err(|error| error.to_string())));
        });
    }

    /// A piece has come. `Err`: the stream is over.
    pub fn take_piece(&mut self, terms: &Terms, piece: Result<Piece, String>) -> Result<(), EndReason> {
        if self.is_of_another_life(&self.vbucket().log.record()) {
            return Err(EndReason::StateChanged);
        }
        let failed = |why: &str| {
            tracing::warn!(bucket = self.bucket.name(), vb = self.plan.vb.0, "a stream cannot read its vBucket: {why}");
            EndReason::BackfillFailed
        };
        let Piece { items, changes, left } = piece.map_err(|error| failed(&error))?;
        let Some(changes) = changes.filter(|changes| changes.upto() > self.read) else {
            return Err(failed("what left memory is not in its file"));
        };
        let may_miss_tombstones = self.read < changes.purge() && changes.purge() > self.plan.purge;
        if may_miss_tombstones && self.read.0 > 0 && self.of_disk.is_none() {
            return Err(EndReason::Rollback);
        }
        self.face.set_backfill_left(left);
        let skips = self.plan.skips_deletes && self.read.0 == 0;
        let of_disk =
            self.of_disk.get_or_insert_with(|| OfDisk::new(terms, self.next_start, self.plan.end, &changes, skips));
        of_disk.push(terms, &self.plan.filter, items, &mut self.queue);
        self.phase = Phase::Read(changes);
        Ok(())
    }

    fn end_of_file(&mut self) {
        let Phase::Read(changes) = &self.phase else { return };
        self.read = changes.upto().min(self.plan.end);
        if let Some(end) = self.of_disk.take().and_then(|mut of_disk| of_disk.finish(&mut self.queue)) {
            self.next_start = end.next();
        }
        self.face.set_backfill_left(0);
        self.enter(Phase::Waiting);
    }

    /// Whether nothing is left of the snapshot that was begun, as far as it is here.
    pub fn is_at_a_pause(&self) -> bool {
        self.queue.is_empty()
    }

    /// Whether there is nothing more to do for it until its bell rings.
    pub fn may_rest(&self) -> bool {
        let rests = self.is_at_a_pause() && self.has_nothing_new() && self.read < self.plan.end;
        if rests {
            self.face.note_sent(self.read, 0);
        }
        rests
    }

    /// Whether it reads the file, or has what it read.
    pub fn has_turn(&self) -> bool {
        matches!(self.phase, Phase::Reading | Phase::Read(_))
    }
}

/// Leaves word when a stream's vBucket is dead on disk.
/// Outlives the stream.
struct LetGo(Weak<Inbox>);

impl Mailbox for LetGo {
    fn deliver(&self, ticket: Ticket, result: OpResult) {
        if let Some(inbox) = self.0.upgrade() {
            inbox.post(Note::LetGo(ticket.request, result.is_ok()));
        }
    }
}

fn read_piece(
    store: &BucketStore,
    vb: VbId,
    after: Seqno,
    changes: Option<Box<Changes>>,
) -> Result<Piece, persist::StoreError> {
    let opened = match changes {
        Some(changes) => Some(changes),
        None => store.changes(vb, after)?.map(Box::new),
    };
    let Some(mut changes) = opened else { return Ok(Piece { items: Vec::new(), changes: None, left: 0 }) };
    let items = changes.read(PIECE_BYTES)?;
    let left = changes.left()?;
    Ok(Piece { items, changes: Some(changes), left })
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.vbucket().unlisten(&self.bell());
        DCP_STREAMS.sub(1);
        match std::mem::replace(&mut self.phase, Phase::Waiting) {
            Phase::InMemory(follower) => self.vbucket().log.unfollow(follower),
            Phase::Waiting | Phase::Reading | Phase::Read(_) => DCP_BACKFILLS.sub(1),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_goes_from_the_file_to_memory_and_back() {
        let arrows: Vec<String> = StreamState::ALL
            .iter()
            .flat_map(|from| StreamState::ALL.iter().map(move |to| (*from, *to)))
            .filter(|(from, to)| from.may_become(*to))
            .map(|(from, to)| format!("{} → {}", from.name(), to.name()))
            .collect();
        let expected = ["waiting → backfilling", "waiting → in-memory", "backfilling → waiting", "in-memory → waiting"];
        assert_eq!(arrows, expected);
    }
}
