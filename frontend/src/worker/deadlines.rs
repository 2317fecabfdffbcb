//! What a worker does by the clock: it ends connections whose clients take their time.
//!
//! The alarm is set for the nearest of all deadlines, so an idle worker sleeps until then or for good. A deadline that has
//! moved on meanwhile is looked at once for nothing; a busy connection costs one entry in a timeout, not one a request.

use std::cmp::Reverse;
use std::collections::VecDeque;
use std::time::Duration;

use super::Worker;
use crate::auth::Role;
use crate::connection::{Connection, Parked, Phase};
use crate::table::Slot;
use crate::{Bounds, counts};

/// How long a stranger may keep a place while others wait for one.
const STRANGER_CROWDED: Duration = Duration::from_secs(5);
/// How long a place of the reserve may be held between two requests, while others wait, by an administrator and by
/// anybody else.
const RESERVE_ADMIN: Duration = Duration::from_secs(5);
const RESERVE_OTHER: Duration = Duration::from_secs(1);

/// The moment to look at a connection.
struct Deadline {
    at: Duration,
    what: Due,
}

#[derive(Clone, Copy)]
enum Due {
    /// It ends, for this reason.
    End(&'static str),
    /// The same at once: it does not read what would be said.
    Drop(&'static str),
    /// It has a turn.
    Turn,
}

impl Worker {
    /// Has the alarm go off for the nearest of all deadlines.
    pub(super) fn set_alarm(&mut self) {
        self.skip_acquaintances();
        let first = |queue: &VecDeque<(Duration, Slot)>| queue.front().map(|(at, _)| *at);
        let login = first(&self.strangers).map(|since| since + self.bounds.login_timeout);
        let timer = self.timers.peek().map(|Reverse((at, _))| *at);
        let deadlines = [first(&self.lingering), login, timer, self.draining];
        if let Some(next) = deadlines.into_iter().flatten().min() {
            self.alarm.set(next);
        }
    }

    /// From `since` on this connection has to log in.
    pub(super) fn expect_login(&mut self, since: Duration, slot: Slot) {
        self.skip_acquaintances();
        self.strangers.push_back((since, slot));
        self.alarm.set(since + self.bounds.login_timeout);
    }

    /// Takes those off the front of the strangers that are none any more.
    pub(super) fn skip_acquaintances(&mut self) {
        while let Some(&(since, slot)) = self.strangers.front() {
            if self.find(slot).is_some_and(|connection| connection.stranger_since == Some(since)) {
                return;
            }
            self.strangers.pop_front();
        }
    }

    /// Has a connection looked at when its deadline comes, unless it is looked at before that anyway: then is early
    /// enough to see that it has become later.
    pub(super) fn set_timer(&mut self, slot: Slot) {
        let bounds = self.bounds;
        let Some(connection) = self.find(slot) else { return };
        let Some(Deadline { at, .. }) = deadline(connection, &bounds) else { return };
        if connection.timer.is_none_or(|timer| at < timer) {
            connection.timer = Some(at);
            self.timers.push(Reverse((at, slot)));
            self.alarm.set(at);
        }
    }

    /// Ends what is due to end.
    pub(super) fn keep_deadlines(&mut self) {
        let now = self.shared.now();
        self.end_late_logins(now);
        self.end_the_quiet(now);
        while self.lingering.front().is_some_and(|(until, _)| *until <= now) {
            let Some((_, slot)) = self.lingering.pop_front() else { break };
            self.drop_slot(slot);
        }
        if self.draining.is_some_and(|until| until <= now) {
            self.slots().into_iter().for_each(|slot| self.drop_slot(slot));
        }
        self.set_alarm();
    }

    fn end_late_logins(&mut self, now: Duration) {
        let login_timeout = self.bounds.login_timeout;
        while let Some(&(since, slot)) = self.strangers.front()
            && since + login_timeout <= now
        {
            self.strangers.pop_front();
            if let Some(connection) = self.find(slot).filter(|c| c.stranger_since == Some(since)) {
                note_end(connection, "login", "it did not log in in time");
                self.close_all(vec![slot]);
            }
        }
    }

    fn end_the_quiet(&mut self, now: Duration) {
        let bounds = self.bounds;
        while let Some(&Reverse((at, slot))) = self.timers.peek()
            && at <= now
        {
            self.timers.pop();
            let Some(connection) = self.find(slot).filter(|connection| connection.timer == Some(at)) else { continue };
            connection.timer = None;
            let Some(deadline) = deadline(connection, &bounds).filter(|deadline| deadline.at <= now) else {
                self.set_timer(slot);
                continue;
            };
            let why = "nothing happened for too long";
            match deadline.what {
                Due::Turn => self.enqueue(slot),
                Due::End(reason) => {
                    note_end(connection, reason, why);
                    self.close_all(vec![slot]);
                }
                Due::Drop(reason) => {
                    note_end(connection, reason, why);
                    self.drop_slot(slot);
                }
            }
        }
    }

    /// Others wait and nobody leaves: ends strangers that take their time, and those who hold a place of the reserve
    /// without using it for what it is kept for.
    pub(super) fn make_room(&mut self) {
        let now = self.shared.now();
        let (mut leaving, mut refused) = (Vec::new(), Vec::new());
        for connection in self.connections.iter_mut().flatten().filter(|connection| !connection.session.closing) {
            match connection.parked {
                Parked::Waiting => {
                    connection.parked = Parked::Refused;
                    refused.push(connection.session.slot);
                }
                Parked::No if overstays(connection, now) => leaving.push(connection.session.slot),
                Parked::No | Parked::Refused => continue,
            }
            note_end(connection, "crowded", "others wait for its place");
        }
        self.close_all(leaving);
        // What they wait for is answered, with a refusal, before they are closed.
        refused.into_iter().for_each(|slot| self.enqueue(slot));
    }
}

/// When a connection is to be looked at if nothing happens meanwhile.
fn deadline(connection: &Connection, bounds: &Bounds) -> Option<Deadline> {
    let session = &connection.session;
    if matches!(connection.phase, Phase::Lingering { .. }) {
        None
    } else if let Some(producer) = &session.producer {
        // It may take what it is sent at its own pace, as long as it answers when asked.
        producer.deadline().map(|at| Deadline { at, what: Due::Turn })
    } else if connection.unsent {
        Some(Deadline { at: connection.sent + bounds.stall_timeout, what: Due::Drop("stalled") })
    } else if session.closing || !session.in_flight.is_empty() || connection.parked != Parked::No {
        None
    } else if connection.half {
        Some(Deadline { at: connection.received + bounds.stall_timeout, what: Due::End("stalled") })
    } else {
        let active = connection.received.max(connection.sent);
        bounds.idle_timeout.map(|idle| Deadline { at: active + idle, what: Due::End("idle") })
    }
}

/// Whether a client keeps its place for longer than it may while others wait.
fn overstays(connection: &Connection, now: Duration) -> bool {
    let session = &connection.session;
    if !connection.in_reserve() {
        return connection.stranger_since.is_some_and(|since| now >= since + STRANGER_CROWDED);
    }
    let Some(identity) = &session.identity else { return now >= session.info.since + RESERVE_OTHER };
    let patience = if identity.role == Role::Admin { RESERVE_ADMIN } else { RESERVE_OTHER };
    session.in_flight.is_empty() && now.saturating_sub(connection.received) >= patience
}

/// Says and counts why the server ends a connection.
pub(super) fn note_end(connection: &Connection, reason: &'static str, why: &str) {
    tracing::debug!(peer = %connection.session.info.peer, "closing: {why}");
    counts::CONNECTIONS_ENDED.with(&[reason]).inc();
}
