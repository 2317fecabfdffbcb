//! Where others leave word for a producer or a consumer: bells that rang, pieces of files that were read, marks that moved.
//!
//! Posting wakes the owner only when the box was empty: otherwise an earlier note has woken it and it has not
//! yet looked. Both happen under the box's lock, so no note is left unseen.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use persist::Changes;
use types::rank::Rank;
use types::sync::{AtomicBool, Mutex};
use types::{Item, VbId};

/// Has the owner of a producer or a consumer look at it. May wake it for nothing.
pub trait Wake: Send + Sync {
    fn wake(&self);
}

/// Numbers the streams of a producer, in the order they were asked for.
pub(crate) type StreamNumber = u64;

pub(crate) enum Note {
    Rung(StreamNumber),
    Read(StreamNumber, Result<Piece, String>),
    /// That the vBucket of a stream is dead here is on disk, or never will be.
    LetGo(StreamNumber, bool),
}

/// Part of a file.
pub(crate) struct Piece {
    pub items: Vec<Item>,
    /// What is left of it; `None`: the vBucket has no file.
    pub changes: Option<Box<Changes>>,
    /// Entries from here on.
    pub left: u64,
}

pub(crate) struct Inbox<N = Note> {
    notes: Mutex<Vec<N>>,
    wake: Arc<dyn Wake>,
}

impl<N> Inbox<N> {
    pub fn new(wake: Arc<dyn Wake>) -> Arc<Inbox<N>> {
        Arc::new(Inbox { notes: Mutex::ranked(Rank::RunQueue, Vec::new()), wake })
    }

    pub fn post(&self, note: N) {
        let is_first = {
            let mut notes = self.notes.lock();
            notes.push(note);
            notes.len() == 1
        };
        if is_first {
            self.wake.wake();
        }
    }

    /// Everything posted so far.
    pub fn collect(&self) -> Vec<N> {
        std::mem::take(&mut *self.notes.lock())
    }
}

/// The bell of one stream. However often it rings, there is one note until the stream looks.
pub(crate) struct StreamBell {
    pub number: StreamNumber,
    pub inbox: Arc<Inbox>,
    has_rung: AtomicBool,
}

impl StreamBell {
    pub fn new(number: StreamNumber, inbox: Arc<Inbox>) -> StreamBell {
        StreamBell { number, inbox, has_rung: AtomicBool::new(false) }
    }

    /// To be called before the stream looks: what comes after that look rings again. The changelog's lock, which is taken
    /// between this and the look, and between a change and its ring, keeps both sides from passing each other.
    pub fn hush(&self) {
        self.has_rung.store(false, Relaxed);
    }

    /// Whether it has rung since it was hushed. If it rings right after, there will be a note.
    pub fn has_rung(&self) -> bool {
        self.has_rung.load(Relaxed)
    }
}

impl engine::Bell for StreamBell {
    fn ring(&self, _: VbId) {
        if !self.has_rung.load(Relaxed) && !self.has_rung.swap(true, Relaxed) {
            self.inbox.post(Note::Rung(self.number));
        }
    }
}

#[cfg(all(test, loom))]
mod models {
    use super::*;
    use engine::Bell;
    use loom::sync::Notify;
    use loom::thread;

    /// Like an event descriptor: it remembers one ring.
    struct Doorbell(loom::sync::Arc<Notify>);

    impl Wake for Doorbell {
        fn wake(&self) {
            self.0.notify();
        }
    }

    /// Goal: no change lies unread while its stream sleeps. Method: two append to a log and ring, while the stream hushes its
    /// bell, reads, and goes to sleep. A change left behind is a deadlock, which loom reports.
    #[test]
    fn a_change_that_comes_while_the_stream_looks_is_seen() {
        two_changes_are_seen(|bell, _, read| {
            bell.hush();
            read()
        });
    }

    /// The same with a look before the hush, which is the mistake this is about.
    #[test]
    #[should_panic]
    fn hushing_the_bell_after_the_look_loses_a_change() {
        two_changes_are_seen(|bell, _, read| {
            let seen = read();
            bell.hush();
            seen
        });
    }

    /// Goal: a stream that has sent all it saw need not look again unless its bell has rung, even if the note of that ring
    /// came while it was still sending and was thrown away.
    #[test]
    fn a_bell_that_has_not_rung_says_that_there_is_nothing_new() {
        two_changes_are_seen(|bell, inbox, read| {
            bell.hush();
            let seen = read();
            inbox.collect();
            if !bell.has_rung() {
                return seen;
            }
            bell.hush();
            read()
        });
    }

    fn two_changes_are_seen(look: fn(&StreamBell, &Inbox, &dyn Fn() -> u32) -> u32) {
        loom::model(move || {
            let doorbell = loom::sync::Arc::new(Notify::new());
            let inbox = Inbox::new(Arc::new(Doorbell(doorbell.clone())));
            let bell = Arc::new(StreamBell::new(1, Arc::clone(&inbox)));
            let log = loom::sync::Arc::new(loom::sync::Mutex::new(0));
            let writers = [0, 1].map(|_| {
                let (bell, log) = (Arc::clone(&bell), log.clone());
                thread::spawn(move || {
                    *log.lock().unwrap() += 1;
                    bell.ring(VbId(0));
                })
            });
            let mut seen = 0;
            while seen < 2 {
                doorbell.wait();
                for note in inbox.collect() {
                    assert!(matches!(note, Note::Rung(1)));
                    seen = look(&bell, &inbox, &|| *log.lock().unwrap());
                }
            }
            writers.into_iter().for_each(|writer| writer.join().unwrap());
        });
    }
}
