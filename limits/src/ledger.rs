//! The permits that are out, and what happens when there are none.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Weak};

use parking_lot::{Mutex, RwLock};

use crate::account::{Account, Balance};
use crate::stats::{ClassStats, Stats};
use crate::{Class, Plan};

/// Idle descriptors closed at a time. More than one, or the next open would meet the wall again.
const GIVE_BACK_COUNT: u32 = 16;

/// A part that keeps descriptors open only because they may be wanted again.
pub trait GiveBack: Send + Sync {
    /// Closes up to `wanted` idle descriptors and returns how many were closed. Called on any thread that may do I/O,
    /// never from within a release. Returns 0 when everything is in use; whoever asked then does without.
    fn give_back(&self, wanted: u32) -> u32;
}

type Hook = Arc<dyn Fn() + Send + Sync>;

/// Counts permits by class.
///
/// 1. Permits out never exceed a class's capacity of that moment; after a shrink they may, until they come back.
/// 2. What the classes may use, plus what is out beyond that, never exceeds the limit, resizing included.
/// 3. Taking and giving back a permit takes no lock and waits for nobody.
/// 4. Whoever was refused a permit is told after the next release of that class, through [`Ledger::on_release`].
pub struct Ledger {
    limit: u64,
    accounts: [Account; Class::ALL.len()],
    /// Held for a few instructions, and taken by nobody who only takes a permit.
    resizing: Mutex<()>,
    hooks: RwLock<Vec<(Class, Hook)>>,
    /// Weak: a cache of files holds permits, and these hold the ledger.
    savers: RwLock<Vec<(Class, Weak<dyn GiveBack>)>>,
    exhausted: AtomicU64,
    given_back: AtomicU64,
}

/// The right to have descriptors open. Keep it as long as they are, and drop it after them.
#[must_use = "a permit is given back when it is dropped"]
pub struct Permit {
    ledger: Arc<Ledger>,
    class: Class,
    count: u32,
}

/// All permits of a class are out, and nothing idle could be closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "all {capacity} descriptors for {} are in use; wait until some are closed, or give them more",
    .class.name()
)]
pub struct NoPermit {
    pub class: Class,
    pub capacity: u32,
}

/// A class cannot be made this large.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{} = {asked} is out of range: the limit of open files is {limit}, of which {max} are left for {}; choose 0 to {max}",
    .class.name(), .class.name()
)]
pub struct NoRoom {
    pub class: Class,
    pub asked: u32,
    pub max: u32,
    pub limit: u64,
}

impl Ledger {
    pub fn new(plan: &Plan) -> Arc<Ledger> {
        Arc::new(Ledger {
            limit: plan.limit(),
            accounts: Class::ALL.map(|class| Account::new(plan.capacity(class))),
            resizing: Mutex::new(()),
            hooks: RwLock::default(),
            savers: RwLock::default(),
            exhausted: AtomicU64::new(0),
            given_back: AtomicU64::new(0),
        })
    }

    /// A permit for one descriptor, to be had before the descriptor is. `None`: all are out.
    pub fn take(self: &Arc<Self>, class: Class) -> Option<Permit> {
        self.take_many(class, 1)
    }

    /// One permit for `count` descriptors, or none.
    pub fn take_many(self: &Arc<Self>, class: Class, count: u32) -> Option<Permit> {
        self.account(class).take(count).then(|| Permit { ledger: Arc::clone(self), class, count })
    }

    /// As [`Ledger::take`], but before it gives up it has idle descriptors of the class closed. For callers without
    /// locks.
    pub fn claim(self: &Arc<Self>, class: Class) -> Result<Permit, NoPermit> {
        if self.account(class).take_quietly(1) {
            return Ok(Permit { ledger: Arc::clone(self), class, count: 1 });
        }
        self.give_back(Some(class), GIVE_BACK_COUNT);
        self.take(class).ok_or_else(|| NoPermit { class, capacity: self.account(class).balance().capacity })
    }

    /// Sets how many descriptors a class may have. Those out beyond a smaller number stay until they come back; their
    /// owners are asked to hurry, nobody waits for them. A larger number must fit into the limit.
    pub fn resize(&self, class: Class, capacity: u32) -> Result<(), NoRoom> {
        let resizing = self.resizing.lock();
        let max = self.room_for(class);
        if capacity > max {
            return Err(NoRoom { class, asked: capacity, max, limit: self.limit });
        }
        let (_, told) = self.account(class).resize(|_| capacity);
        drop(resizing);
        if told {
            self.tell(class);
        }
        let balance = self.account(class).balance();
        if balance.out > balance.capacity {
            self.give_back(Some(class), balance.out - balance.capacity);
        }
        Ok(())
    }

    /// Moves up to `wanted` descriptors from one class to another, having idle ones closed first, and leaves `from` at
    /// least `floor`. What is in use is not moved. Returns how many were.
    pub fn transfer(&self, from: Class, to: Class, wanted: u32, floor: u32) -> u32 {
        let giver = self.account(from).balance();
        let wanted = wanted.min(giver.capacity.saturating_sub(floor));
        let in_the_way = (giver.out + wanted).saturating_sub(giver.capacity);
        if in_the_way > 0 {
            self.give_back(Some(from), in_the_way);
        }
        let resizing = self.resizing.lock();
        let left = |b: Balance| b.capacity - wanted.min(b.capacity.saturating_sub(floor.max(b.out)));
        let (before, from_told) = self.account(from).resize(left);
        let moved = before.capacity - left(before);
        let (_, to_told) = self.account(to).resize(|balance| balance.capacity.saturating_add(moved));
        drop(resizing);
        // Nothing became free in `from`, but its mark was taken: pass it on rather than lose it.
        for class in [(from, from_told), (to, to_told)].into_iter().filter(|(_, told)| *told).map(|(class, _)| class) {
            self.tell(class);
        }
        moved
    }

    /// Calls `hook` after a release or a resize, once for each time somebody was refused a permit of `class` before, so
    /// that a part which stopped for want of a permit goes on without looking again and again. The hook runs wherever
    /// the permit is dropped, maybe under locks: it wakes somebody, and does nothing else.
    pub fn on_release(&self, class: Class, hook: impl Fn() + Send + Sync + 'static) {
        self.hooks.write().push((class, Arc::new(hook)));
    }

    /// Has `saver` asked to close idle descriptors of `class` when they are wanted. A saver that is gone is forgotten.
    pub fn on_pressure(&self, class: Class, saver: Weak<dyn GiveBack>) {
        let mut savers = self.savers.write();
        savers.retain(|(_, saver)| saver.strong_count() > 0);
        savers.push((class, saver));
    }

    /// Has up to `wanted` idle descriptors closed, of one class or of any. Returns how many were.
    pub fn give_back(&self, class: Option<Class>, wanted: u32) -> u32 {
        // Copied out: a saver may take its time, and closes files, which comes back to this ledger.
        let savers: Vec<_> = {
            let savers = self.savers.read();
            savers.iter().filter(|(of, _)| class.is_none_or(|class| class == *of)).map(|(_, s)| s.clone()).collect()
        };
        let mut closed = 0;
        for saver in savers.iter().filter_map(Weak::upgrade) {
            if closed < wanted {
                closed += saver.give_back(wanted - closed);
            }
        }
        self.given_back.fetch_add(u64::from(closed), Relaxed);
        closed
    }

    /// The classes as they are now. Displayed, it is the sum in one line.
    pub fn plan(&self) -> Plan {
        let _resizing = self.resizing.lock();
        Plan::of_capacities(self.limit, Class::ALL.map(|class| self.account(class).balance().capacity))
    }

    /// Permits of a class that are out now.
    pub fn out(&self, class: Class) -> u32 {
        self.account(class).balance().out
    }

    pub fn stats(&self) -> Stats {
        let class = |class| {
            let account = self.account(class);
            let balance = account.balance();
            ClassStats {
                class,
                capacity: balance.capacity,
                out: balance.out,
                high_water: account.high_water(),
                refusals: account.refusals(),
            }
        };
        Stats {
            plan: self.plan(),
            classes: Class::ALL.map(class),
            exhausted: self.exhausted.load(Relaxed),
            given_back: self.given_back.load(Relaxed),
        }
    }

    /// What `class` could be resized to. The lock on resizing is held.
    fn room_for(&self, class: Class) -> u32 {
        let others = Class::ALL.into_iter().filter(|other| *other != class);
        let claimed: u64 = others.map(|other| u64::from(self.account(other).balance().claimed())).sum();
        u32::try_from(self.limit.saturating_sub(claimed)).unwrap_or(u32::MAX)
    }

    fn account(&self, class: Class) -> &Account {
        &self.accounts[class as usize]
    }

    fn tell(&self, class: Class) {
        let hooks: Vec<Hook> =
            self.hooks.read().iter().filter(|(of, _)| *of == class).map(|(_, hook)| Arc::clone(hook)).collect();
        hooks.iter().for_each(|hook| hook());
    }
}

impl Permit {
    pub fn class(&self) -> Class {
        self.class
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        if self.ledger.account(self.class).give(self.count) {
            self.ledger.tell(self.class);
        }
    }
}

impl std::fmt::Debug for Permit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} of {}", self.count, self.class.name())
    }
}

impl From<NoPermit> for io::Error {
    fn from(refusal: NoPermit) -> io::Error {
        io::Error::new(io::ErrorKind::ResourceBusy, refusal)
    }
}

/// Whether an open failed for want of a descriptor: the process's, the system's, or its class's.
pub fn is_exhausted(error: &io::Error) -> bool {
    let refused = error.get_ref().is_some_and(|inner| inner.is::<NoPermit>());
    refused || matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE))
}

/// Runs `open`. If the system has no descriptor left for it, has idle ones closed and runs it once more, whether or not
/// there were any: others close theirs meanwhile. For callers without locks; every part that opens, accepts or
/// duplicates without a [`crate::Metered`] storage goes through here.
pub fn with_retry<T>(ledger: &Ledger, mut open: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    match open() {
        Err(error) if matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE)) => {
            ledger.exhausted.fetch_add(1, Relaxed);
            ledger.give_back(None, GIVE_BACK_COUNT);
            open()
        }
        result => result,
    }
}
