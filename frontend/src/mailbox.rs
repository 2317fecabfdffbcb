//! Where other threads leave things for a worker: new connections, answers to requests that had to wait.
//!
//! Posting wakes the worker only when the box was empty: otherwise an earlier letter has woken it and it has not yet
//! looked, or it would have emptied the box. Both happen under the box's lock, so no letter is left unseen.

use std::sync::Arc;
use std::time::Duration;

use engine::{OpResult, Ticket};
use mio::Waker;
use mio::net::TcpStream;
use types::rank::{Mutex, Rank};
use wire::Status;

use crate::connection::Info;
use crate::table::Slot;

pub enum Letter {
    /// A connection that is the worker's from now on.
    Adopt {
        slot: Slot,
        info: Arc<Info>,
        stream: TcpStream,
    },
    Answer {
        ticket: Ticket,
        answer: Answer,
    },
    /// The bucket is deleted: connections to it end.
    BucketGone {
        name: Arc<str>,
    },
    /// Take no more requests, finish what is under way, give up at this moment of the monotonic clock.
    Drain {
        until: Duration,
    },
}

/// The outcome of a request that had to wait.
pub enum Answer {
    Op(OpResult),
    /// Of work that is not about one document.
    Job(Result<JobReply, (Status, String)>),
}

/// What a job has to say on success.
#[derive(Debug, Default)]
pub struct JobReply {
    pub extras: Vec<u8>,
    pub value: Vec<u8>,
}

pub struct Mailbox {
    letters: Mutex<Vec<Letter>>,
    waker: Waker,
}

impl Mailbox {
    pub fn new(waker: Waker) -> Mailbox {
        Mailbox { letters: Mutex::ranked(Rank::RunQueue, Vec::new()), waker }
    }

    pub fn post(&self, letter: Letter) {
        let mut letters = self.letters.lock();
        let was_empty = letters.is_empty();
        letters.push(letter);
        drop(letters);
        if was_empty && let Err(error) = self.waker.wake() {
            // The event descriptor is ours and open; a worker that cannot be woken would lose answers silently.
            panic!("waking a worker: {error}");
        }
    }

    /// Everything posted so far, into `letters`, which must be empty.
    pub fn collect(&self, letters: &mut Vec<Letter>) {
        debug_assert!(letters.is_empty());
        std::mem::swap(letters, &mut self.letters.lock());
    }
}

impl engine::Mailbox for Mailbox {
    fn deliver(&self, ticket: Ticket, result: OpResult) {
        self.post(Letter::Answer { ticket, answer: Answer::Op(result) });
    }
}
