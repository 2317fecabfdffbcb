//! Where other threads leave things for a worker: new connections, answers to requests that had to wait.
//!
//! Posting wakes the worker only if it sleeps, or is about to: it says so under the box's lock, and only while the box is empty.
//! Otherwise it will look by itself before it sleeps, under the same lock. So no letter is left unseen, and a worker that has
//! enough to do is not woken again and again, which takes a system call each time.

use std::sync::Arc;
use std::time::Duration;

use engine::{OpResult, Ticket};
use limits::Permit;
use mio::Waker;
use mio::net::TcpStream;
use types::rank::Rank;
use types::sync::Mutex;
use wire::Status;

use crate::Bounds;
use crate::auth::sasl::Verdict;
use crate::connection::Info;
use crate::table::Slot;

pub enum Letter {
    /// A connection that is the worker's from now on.
    Adopt(Arrival),
    /// A connection of the reserve has an ordinary place.
    Promoted {
        slot: Slot,
        permit: Permit,
    },
    /// Somebody has waited for a place for a while and none came free: part with those who only hold one.
    Crowded,
    /// The moment has come that the worker's alarm was set for.
    Alarm,
    Bounds(Bounds),
    Answer {
        ticket: Ticket,
        answer: Answer,
    },
    /// There may be something to send to this connection.
    Look {
        slot: Slot,
    },
    /// Clients that asked for it are told that there is another map, and nodes that it does not name are sent away.
    MapChanged,
    /// The bucket is deleted: connections to it end.
    BucketGone {
        name: Arc<str>,
    },
    /// Take no more requests, finish what is under way, give up at this moment of the monotonic clock.
    Drain {
        until: Duration,
    },
}

/// A connection as the listener hands it over.
pub struct Arrival {
    pub slot: Slot,
    pub info: Arc<Info>,
    pub stream: TcpStream,
    pub permit: Permit,
    /// It counts among the strangers that the table has room for.
    pub counted: bool,
}

/// The outcome of a request that had to wait.
pub enum Answer {
    Op(OpResult),
    /// Of work that is not about one document.
    Job(Result<JobReply, (Status, String)>),
    Login(Verdict),
}

/// What a job has to say on success.
#[derive(Debug, Default)]
pub struct JobReply {
    pub extras: Vec<u8>,
    pub value: Vec<u8>,
}

pub struct Mailbox {
    inbox: Inbox<Letter>,
    waker: Waker,
}

impl Mailbox {
    pub fn new(waker: Waker) -> Mailbox {
        Mailbox { inbox: Inbox::new(), waker }
    }

    pub fn post(&self, letter: Letter) {
        if self.inbox.post(letter)
            && let Err(error) = self.waker.wake()
        {
            // The event descriptor is ours and open; a worker that cannot be woken would lose answers silently.
            panic!("waking a worker: {error}");
        }
    }

    /// To be asked before the owner goes to sleep. False: there are letters, so it must not. True: the next letter wakes it.
    pub fn may_sleep(&self) -> bool {
        self.inbox.may_sleep()
    }

    /// Everything posted so far, into `letters`, which must be empty.
    pub fn collect(&self, letters: &mut Vec<Letter>) {
        self.inbox.collect(letters);
    }
}

impl engine::Mailbox for Mailbox {
    fn deliver(&self, ticket: Ticket, result: OpResult) {
        self.post(Letter::Answer { ticket, answer: Answer::Op(result) });
    }
}

/// Letters that nobody has looked at yet.
struct Inbox<L>(Mutex<Letters<L>>);

struct Letters<L> {
    unread: Vec<L>,
    /// The owner sleeps until it is woken, or is about to.
    is_asleep: bool,
}

impl<L> Inbox<L> {
    fn new() -> Inbox<L> {
        Inbox(Mutex::ranked(Rank::RunQueue, Letters { unread: Vec::new(), is_asleep: false }))
    }

    /// True: the owner is to be woken.
    #[must_use]
    fn post(&self, letter: L) -> bool {
        let mut letters = self.0.lock();
        letters.unread.push(letter);
        std::mem::take(&mut letters.is_asleep)
    }

    fn may_sleep(&self) -> bool {
        let mut letters = self.0.lock();
        letters.is_asleep = letters.unread.is_empty();
        letters.is_asleep
    }

    fn collect(&self, unread: &mut Vec<L>) {
        debug_assert!(unread.is_empty());
        let mut letters = self.0.lock();
        letters.is_asleep = false;
        std::mem::swap(unread, &mut letters.unread);
    }
}

#[cfg(all(test, loom))]
mod models {
    use super::*;
    use loom::sync::Notify;
    use loom::thread;

    /// Goal: no letter lies unread while its owner sleeps. Method: two post while the owner collects and goes to sleep;
    /// like an event descriptor, the bell remembers one ring. A letter left behind is a deadlock, which loom reports.
    #[test]
    fn a_letter_posted_while_the_worker_goes_to_sleep_is_read() {
        two_letters_are_read(Inbox::may_sleep);
    }

    /// The same with the look at the letters and the word that one sleeps in two steps, which is the mistake this is about.
    #[test]
    #[should_panic]
    fn looking_first_and_saying_that_one_sleeps_afterwards_loses_it() {
        two_letters_are_read(|inbox| {
            let is_empty = inbox.0.lock().unread.is_empty();
            inbox.0.lock().is_asleep = is_empty;
            is_empty
        });
    }

    fn two_letters_are_read(may_sleep: fn(&Inbox<u8>) -> bool) {
        loom::model(move || {
            let (inbox, bell) = (Arc::new(Inbox::new()), Arc::new(Notify::new()));
            let posters = [0, 1].map(|n| {
                let (inbox, bell) = (inbox.clone(), bell.clone());
                thread::spawn(move || {
                    if inbox.post(n) {
                        bell.notify();
                    }
                })
            });
            let (mut read, mut letters) = (0, Vec::new());
            while read < 2 {
                if may_sleep(&inbox) {
                    bell.wait();
                }
                inbox.collect(&mut letters);
                read += letters.drain(..).count();
            }
            posters.into_iter().for_each(|poster| poster.join().unwrap());
        });
    }
}
