//! A vBucket moves: its stream ends with the receiver being active, and with nobody being so in between.
//!
//! ```text
//!     here:    active ───────────────────────── dead ─────────────────────▶
//!     stream:  changes … "be pending"   ok ┐    changes left, "be active"   ok, end
//!     there:   replica ────────── pending ─┘────────────────────── active ─▶
//! ```
//! Nothing is written here once it is dead, and nothing there before it is active, so no operation is lost or done twice. If the
//! connection breaks in between, the vBucket is dead here, and whoever moves it decides where it lives.

use types::VbState;

/// How far it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Takeover {
    /// What was changed is sent as in any other stream.
    Sending,
    /// The receiver was told to be pending, and has yet to say that it is.
    AwaitsPending,
    /// Nothing is written here any more; what was written is sent.
    Draining,
    /// The receiver was told to be active.
    AwaitsActive,
    Done,
}

impl Takeover {
    /// Everything there is was sent: what the receiver is to become now.
    pub const fn caught_up(self) -> Option<(VbState, Takeover)> {
        match self {
            Takeover::Sending => Some((VbState::Pending, Takeover::AwaitsPending)),
            Takeover::Draining => Some((VbState::Active, Takeover::AwaitsActive)),
            _ => None,
        }
    }

    /// The receiver has become what it was told to. `None`: nobody told it anything.
    pub const fn answered(self) -> Option<Takeover> {
        match self {
            Takeover::AwaitsPending => Some(Takeover::Draining),
            Takeover::AwaitsActive => Some(Takeover::Done),
            _ => None,
        }
    }

    /// The vBucket is to be dead here from now on.
    pub const fn has_let_go(self) -> bool {
        matches!(self, Takeover::Draining | Takeover::AwaitsActive | Takeover::Done)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [Takeover; 5] =
        [Takeover::Sending, Takeover::AwaitsPending, Takeover::Draining, Takeover::AwaitsActive, Takeover::Done];

    #[test]
    fn a_vbucket_is_let_go_here_before_it_is_active_there() {
        let told: Vec<_> = ALL.iter().filter_map(|at| Some((*at, at.caught_up()?))).collect();
        let expected = [
            (Takeover::Sending, (VbState::Pending, Takeover::AwaitsPending)),
            (Takeover::Draining, (VbState::Active, Takeover::AwaitsActive)),
        ];
        assert_eq!(told, expected);
        let (mut at, mut path) = (Takeover::Sending, Vec::new());
        while at != Takeover::Done {
            at = at.caught_up().map(|(_, next)| next).or(at.answered()).expect("a way on");
            path.push((at, at.has_let_go()));
        }
        let expected = [
            (Takeover::AwaitsPending, false),
            (Takeover::Draining, true),
            (Takeover::AwaitsActive, true),
            (Takeover::Done, true),
        ];
        assert_eq!(path, expected);
    }
}
