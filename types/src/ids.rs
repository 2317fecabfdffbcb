use std::fmt;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($repr:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub $repr);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

id!(/// A vBucket of a bucket: 0 up to the bucket's count.
    VbId(u16));
id!(/// Order of changes within one vBucket. Starts at 1; 0 means "nothing yet".
    Seqno(u64));
id!(/// A document's version for compare-and-swap: a hybrid logical clock in nanoseconds. Never 0 or all ones when stored;
    /// 0 in a request means "no condition".
    Cas(u64));
id!(/// How often a key was changed, across deletes.
    RevSeqno(u64));
id!(/// A collection. 0 is `_default`, user collections start at 8.
    CollectionId(u32));
id!(/// A group of collections. 0 is `_default`.
    ScopeId(u32));
id!(/// One history of a vBucket, as listed in its failover table. 48 random bits, never 0.
    VbUuid(u64));
id!(/// One life of a bucket: dropping and re-creating the name gives another.
    BucketUuid(u128));

impl Seqno {
    /// The one after this.
    #[must_use]
    pub const fn next(self) -> Seqno {
        Seqno(self.0 + 1)
    }
}

impl Cas {
    /// Shown in place of the real CAS of a locked document, so that nobody can write over the lock with it.
    pub const LOCKED: Cas = Cas(u64::MAX);
}

/// What a vBucket of this node may do. The discriminants are the wire's and the `vbstate` document's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum VbState {
    Active = 1,
    Replica = 2,
    Pending = 3,
    Dead = 4,
}

impl VbState {
    pub const fn name(self) -> &'static str {
        match self {
            VbState::Active => "active",
            VbState::Replica => "replica",
            VbState::Pending => "pending",
            VbState::Dead => "dead",
        }
    }

    pub fn from_name(name: &str) -> Option<VbState> {
        [VbState::Active, VbState::Replica, VbState::Pending, VbState::Dead].into_iter().find(|s| s.name() == name)
    }
}
