//! One link: a thread that follows the vBuckets of one bucket on one peer, for as long as it is wanted.

use std::collections::BTreeSet;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use engine::Bucket;
use parking_lot::{Condvar, Mutex};
use replication::{Consumer, ConsumerFace};
use types::VbId;

use super::Route;
use super::caller::{Caller, Failure, Leash};
use crate::Shared;

/// How long connecting, and each answer while logging in, may take.
const LOGIN_MAX: Duration = Duration::from_secs(10);
/// The pause before a peer that cannot be reached is tried again, at first and at most.
const PAUSE_MIN: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(3);

/// What can be seen of a link.
#[derive(Default)]
pub(crate) struct LinkFace {
    pub consumer: Arc<ConsumerFace>,
    pub is_connected: AtomicBool,
    pub connects: AtomicU64,
    pub wanted: AtomicU64,
    /// Why it is not connected.
    pub trouble: Mutex<String>,
}

pub(super) struct Link {
    desk: Arc<Desk>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// What a link's thread shares with others.
struct Desk {
    order: Mutex<Order>,
    /// `order.has` is not what it was.
    obeyed: Condvar,
    /// Looked at by the thread: its wants, or the roles of vBuckets, are not what they were.
    has_news: AtomicBool,
    leash: Arc<Leash>,
    face: Arc<LinkFace>,
}

#[derive(Default)]
struct Order {
    wants: BTreeSet<VbId>,
    /// Something may be applied to these.
    has: BTreeSet<VbId>,
}

impl replication::Wake for Desk {
    fn wake(&self) {
        self.leash.wake();
    }
}

impl Desk {
    fn look(&self) {
        self.has_news.store(true, Ordering::Release);
        replication::Wake::wake(self);
    }

    /// Follows for what is wanted now.
    fn obey(&self, consumer: &mut Consumer) {
        let mut order = self.order.lock();
        consumer.want(&order.wants);
        order.has = order.wants.clone();
        self.obeyed.notify_all();
    }

    /// Nothing is applied any more.
    fn let_go(&self) {
        self.order.lock().has.clear();
        self.obeyed.notify_all();
    }
}

impl Link {
    /// # Errors
    /// The bucket is gone, there is no way to log in, or no room for another thread or descriptor.
    pub fn start(shared: &Arc<Shared>, route: &Route, wants: BTreeSet<VbId>) -> Result<Link, String> {
        let bucket = shared.engine.bucket(&route.bucket).ok_or("the bucket is gone")?;
        let caller = Caller::new(shared)?;
        let face = Arc::new(LinkFace::default());
        face.wanted.store(wants.len() as u64, Ordering::Relaxed);
        let desk = Arc::new(Desk {
            order: Mutex::new(Order { wants, has: BTreeSet::new() }),
            obeyed: Condvar::new(),
            has_news: AtomicBool::new(true),
            leash: caller.leash(),
            face,
        });
        let (shared, route, name) = (Arc::downgrade(shared), route.clone(), format!("replica-{}", route.peer));
        let follower = Follower { shared, bucket, route, desk: Arc::clone(&desk), caller };
        let thread = thread::Builder::new().name(name).spawn(|| follower.run());
        let thread = thread.map_err(|error: io::Error| error.to_string())?;
        Ok(Link { desk, thread: Mutex::new(Some(thread)) })
    }

    pub fn wants(&self) -> BTreeSet<VbId> {
        self.desk.order.lock().wants.clone()
    }

    /// Gives up all others. Once this returns nothing more is applied to them.
    pub fn keep_only(&self, vbs: &BTreeSet<VbId>) {
        let mut order = self.desk.order.lock();
        if order.wants.is_subset(vbs) {
            return;
        }
        order.wants.retain(|vb| vbs.contains(vb));
        self.desk.look();
        self.desk.obeyed.wait_while(&mut order, |order| !order.has.is_subset(vbs));
    }

    /// These from now on: all it had and more.
    pub fn want(&self, vbs: BTreeSet<VbId>) {
        self.desk.face.wanted.store(vbs.len() as u64, Ordering::Relaxed);
        self.desk.order.lock().wants = vbs;
        self.desk.look();
    }

    /// Asks again for what came to nothing before.
    pub fn look(&self) {
        self.desk.look();
    }

    /// It ends soon.
    pub fn stop(&self) {
        self.desk.leash.stop();
    }

    /// Once it has ended nothing more is applied. Call [`Link::stop`] first.
    pub fn join(&self) {
        let thread = self.thread.lock().take();
        if thread.is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("a link to another node panicked");
        }
    }

    pub fn face(&self) -> Arc<LinkFace> {
        Arc::clone(&self.desk.face)
    }
}

/// What the thread owns. It lets go of its vBuckets even if it panics.
struct Follower {
    shared: Weak<Shared>,
    bucket: Arc<Bucket>,
    route: Route,
    desk: Arc<Desk>,
    caller: Caller,
}

impl Drop for Follower {
    fn drop(&mut self) {
        self.desk.let_go();
    }
}

impl Follower {
    fn run(mut self) {
        let mut pause = PAUSE_MIN;
        loop {
            let result = self.follow();
            self.desk.let_go();
            let failure = match result {
                Err(Failure::Stopped) | Ok(()) => return,
                Err(failure) => failure.to_string(),
            };
            let face = &self.desk.face;
            let was_connected = face.is_connected.swap(false, Ordering::Relaxed);
            let is_new = std::mem::replace(&mut *face.trouble.lock(), failure.clone()) != failure;
            if was_connected {
                pause = PAUSE_MIN;
            }
            if was_connected || is_new {
                tracing::warn!(bucket = self.route.bucket, peer = self.route.peer, "replicas do not follow: {failure}");
            }
            if self.caller.rest(pause).is_err() {
                return;
            }
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }

    /// One connection, from its beginning to its end.
    fn follow(&mut self) -> Result<(), Failure> {
        let mut wire = self.caller.log_in(&self.route.peer, &self.route.bucket, LOGIN_MAX)?;
        let theirs = self.caller.ask_for_map(&mut wire, LOGIN_MAX)?;
        if let Some(shared) = self.shared.upgrade() {
            shared.replicas.hear_of(&shared, theirs);
        }
        let face = Arc::clone(&self.desk.face);
        face.is_connected.store(true, Ordering::Relaxed);
        face.connects.fetch_add(1, Ordering::Relaxed);
        face.trouble.lock().clear();
        tracing::info!(bucket = self.route.bucket, peer = self.route.peer, "replicas follow");
        let wake = Arc::clone(&self.desk) as Arc<dyn replication::Wake>;
        let now = self.caller.now();
        let mut consumer = Consumer::open(&self.bucket, &self.route.node, wake, Arc::clone(&face.consumer), now);
        self.desk.has_news.store(true, Ordering::Release);
        loop {
            self.caller.check()?;
            if self.desk.has_news.swap(false, Ordering::AcqRel) {
                self.desk.obey(&mut consumer);
            }
            let now = self.caller.now();
            let taken = consumer.receive(&wire.input, now, wire.is_drained())?;
            wire.input.drain(..taken);
            consumer.turn(now)?;
            wire.output.append(consumer.output());
            let until = if consumer.may_sleep() { consumer.deadline() } else { now };
            self.caller.pump(&mut wire, until, !consumer.is_full())?;
        }
    }
}
