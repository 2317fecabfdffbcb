//! Where others leave word for a producer or a consumer: bells that rang, pieces of files that were read, marks that moved.
//!
//! Posting wakes the owner only when the box was empty, otherwise an earlier note has woken it and it has not yet looked; and
//! not while the owner is at it anyway, as then it looks once more before it rests. All of that happens under the box's lock,
//! so no note is left unseen.

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
    /// For something that can wait for company.
    RungLater(StreamNumber),
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
    tray: Mutex<Tray<N>>,
    wake: Arc<dyn Wake>,
}

struct Tray<N> {
    notes: Vec<N>,
    /// The owner looks again of itself.
    is_attended: bool,
}

impl<N> Inbox<N> {
    pub fn new(wake: Arc<dyn Wake>) -> Arc<Inbox<N>> {
        let tray = Tray { notes: Vec::new(), is_attended: false };
        Arc::new(Inbox { tray: Mutex::ranked(Rank::RunQueue, tray), wake })
    }

    pub fn post(&self, note: N) {
        self.post_with(|_| note);
    }

    /// The note may depend on whether the owner is at it.
    fn post_with(&self, note: impl FnOnce(bool) -> N) {
        let wakes = {
            let mut tray = self.tray.lock();
            let note = note(tray.is_attended);
            tray.notes.push(note);
            tray.notes.len() == 1 && !tray.is_attended
        };
        if wakes {
            self.wake.wake();
        }
    }

    /// The owner is at it from here on: it is not woken until it rests.
    pub fn attend(&self) {
        self.tray.lock().is_attended = true;
    }

    /// Everything posted so far.
    pub fn collect(&self) -> Vec<N> {
        std::mem::take(&mut self.tray.lock().notes)
    }

    /// The owner sleeps until it is woken. `false`: it must look first.
    pub fn rest(&self) -> bool {
        let mut tray = self.tray.lock();
        tray.is_attended &= !tray.notes.is_empty();
        tray.notes.is_empty()
    }

    pub fn is_empty(&self) -> bool {
        self.tray.lock().notes.is_empty()
    }
}

/// The bell of one stream. However often it rings, there is one note until the stream looks, and a second one if what came
/// first can wait and what came then cannot.
pub(crate) struct StreamBell {
    pub number: StreamNumber,
    pub inbox: Arc<Inbox>,
    /// What nobody waits for is not urgent to its consumer either.
    is_patient: bool,
    has_rung: AtomicBool,
    has_rung_urgently: AtomicBool,
}

impl StreamBell {
    pub fn new(number: StreamNumber, inbox: Arc<Inbox>, is_patient: bool) -> StreamBell {
        let (has_rung, has_rung_urgently) = (AtomicBool::new(false), AtomicBool::new(false));
        StreamBell { number, inbox, is_patient, has_rung, has_rung_urgently }
    }

    /// To be called before the stream looks: what comes after that look rings again. The changelog's lock, which is taken
    /// between this and the look, and between a change and its ring, keeps both sides from passing each other.
    pub fn hush(&self) {
        self.has_rung.store(false, Relaxed);
        self.has_rung_urgently.store(false, Relaxed);
    }

    /// Whether it has rung since it was hushed. If it rings right after, there will be a note.
    pub fn has_rung(&self) -> bool {
        self.has_rung.load(Relaxed)
    }
}

impl engine::Bell for StreamBell {
    fn ring(&self, _: VbId) {
        if !self.has_rung_urgently.load(Relaxed) && !self.has_rung_urgently.swap(true, Relaxed) {
            self.has_rung.store(true, Relaxed);
            self.inbox.post(Note::Rung(self.number));
        }
    }

    fn ring_later(&self, vb: VbId) {
        if !self.is_patient {
            return self.ring(vb);
        }
        if !self.has_rung.load(Relaxed) && !self.has_rung.swap(true, Relaxed) {
            // An owner that sleeps would have to be woken to be told that it may wait.
            let note = |is_attended| if is_attended { Note::RungLater } else { Note::Rung };
            self.inbox.post_with(|is_attended| note(is_attended)(self.number));
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

    /// Goal: an owner at work is not woken for a note, and sees it before it sleeps. Method: a note is left while the owner looks and
    /// goes to sleep.
    #[test]
    fn a_note_left_with_an_owner_at_work_is_read_before_it_sleeps_or_wakes_it() {
        a_note_is_heard_of(|inbox| inbox.rest());
    }

    /// The same with a look before the rest, which is the mistake this is about.
    #[test]
    #[should_panic(expected = "nobody reads it")]
    fn looking_before_the_rest_loses_a_note() {
        a_note_is_heard_of(|inbox| {
            let is_empty = inbox.is_empty();
            inbox.rest();
            is_empty
        });
    }

    struct Rung(loom::sync::Arc<AtomicBool>);

    impl Wake for Rung {
        fn wake(&self) {
            self.0.store(true, Relaxed);
        }
    }

    fn a_note_is_heard_of(rests: fn(&Inbox<u8>) -> bool) {
        loom::model(move || {
            let rung = loom::sync::Arc::new(AtomicBool::new(false));
            let inbox = Inbox::new(Arc::new(Rung(rung.clone())));
            inbox.attend();
            let poster = thread::spawn({
                let inbox = Arc::clone(&inbox);
                move || inbox.post(1)
            });
            inbox.collect();
            let sleeps = rests(&inbox);
            poster.join().unwrap();
            assert!(!sleeps || inbox.is_empty() || rung.load(Relaxed), "nobody reads it");
        });
    }

    fn two_changes_are_seen(look: fn(&StreamBell, &Inbox, &dyn Fn() -> u32) -> u32) {
        two_changes_are_seen_that_ring(look, [StreamBell::ring, StreamBell::ring]);
    }

    /// The same of changes that can wait, beside one that cannot.
    #[test]
    fn a_change_that_can_wait_is_seen() {
        let look = |bell: &StreamBell, _: &Inbox, read: &dyn Fn() -> u32| {
            bell.hush();
            read()
        };
        two_changes_are_seen_that_ring(look, [StreamBell::ring, StreamBell::ring_later]);
        two_changes_are_seen_that_ring(look, [StreamBell::ring_later, StreamBell::ring_later]);
    }

    type Ring = fn(&StreamBell, VbId);

    fn two_changes_are_seen_that_ring(look: fn(&StreamBell, &Inbox, &dyn Fn() -> u32) -> u32, rings: [Ring; 2]) {
        let mut model = loom::model::Builder::new();
        // All orders take minutes; what goes wrong here takes one thread that is put aside at the wrong moment, or two.
        model.preemption_bound = Some(3);
        model.check(move || {
            let doorbell = loom::sync::Arc::new(Notify::new());
            let inbox = Inbox::new(Arc::new(Doorbell(doorbell.clone())));
            let bell = Arc::new(StreamBell::new(1, Arc::clone(&inbox), true));
            let log = loom::sync::Arc::new(loom::sync::Mutex::new(0));
            let writers = rings.map(|ring| {
                let (bell, log) = (Arc::clone(&bell), log.clone());
                thread::spawn(move || {
                    *log.lock().unwrap() += 1;
                    ring(&bell, VbId(0));
                })
            });
            let mut seen = 0;
            while seen < 2 {
                doorbell.wait();
                loop {
                    inbox.attend();
                    for note in inbox.collect() {
                        assert!(matches!(note, Note::Rung(1) | Note::RungLater(1)));
                        seen = look(&bell, &inbox, &|| *log.lock().unwrap());
                    }
                    if inbox.rest() {
                        break;
                    }
                }
            }
            writers.into_iter().for_each(|writer| writer.join().unwrap());
        });
    }
}
