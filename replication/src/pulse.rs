//! Whether the consumer is still there: a message that it has to answer, when it has said nothing for a while.

use std::time::Duration;

/// The server looks at its clock this often at least.
pub(crate) const INTERVAL_MIN: Duration = Duration::from_millis(100);
const INTERVAL_DEFAULT: Duration = Duration::from_secs(120);
/// A consumer that says nothing at all for so long is gone.
const SILENCE_MAX: Duration = Duration::from_secs(360);

/// 1. At most one question is unanswered.
#[derive(Debug)]
pub(crate) struct Pulse {
    is_on: bool,
    interval: Duration,
    heard: Duration,
    asked: Option<Duration>,
}

/// What to do by the clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Beat {
    Nothing,
    Ask,
    Dead(&'static str),
}

impl Pulse {
    pub fn new(now: Duration) -> Pulse {
        Pulse { is_on: false, interval: INTERVAL_DEFAULT, heard: now, asked: None }
    }

    pub fn switch(&mut self, is_on: bool) {
        self.is_on = is_on;
        self.asked = None;
    }

    pub fn is_on(&self) -> bool {
        self.is_on
    }

    pub fn set_interval(&mut self, interval: Duration) {
        self.interval = interval.max(INTERVAL_MIN);
    }

    /// The consumer said something.
    pub fn heard(&mut self, now: Duration) {
        self.heard = now;
    }

    pub fn answered(&mut self) {
        self.asked = None;
    }

    pub fn asked(&mut self, now: Duration) {
        self.asked = Some(now);
    }

    pub fn beat(&self, now: Duration) -> Beat {
        let since = |moment: Duration| now.saturating_sub(moment);
        match self.asked {
            _ if !self.is_on => Beat::Nothing,
            _ if since(self.heard) >= SILENCE_MAX => Beat::Dead("nothing was heard of the consumer for too long"),
            Some(asked) if since(asked.max(self.heard)) >= self.interval => Beat::Dead("the consumer does not answer"),
            None if since(self.heard) >= self.interval => Beat::Ask,
            _ => Beat::Nothing,
        }
    }

    /// When to look again.
    pub fn next(&self) -> Option<Duration> {
        let from = self.asked.unwrap_or_default().max(self.heard);
        self.is_on.then(|| (from + self.interval).min(self.heard + SILENCE_MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_silent_consumer_is_asked_once_and_given_up_if_it_does_not_answer() {
        let s = Duration::from_secs;
        let mut pulse = Pulse::new(s(0));
        assert_eq!((pulse.beat(s(10_000)), pulse.next()), (Beat::Nothing, None));
        pulse.switch(true);
        pulse.set_interval(s(20));
        pulse.heard(s(5));
        assert_eq!((pulse.beat(s(24)), pulse.next()), (Beat::Nothing, Some(s(25))));
        assert_eq!(pulse.beat(s(25)), Beat::Ask);
        pulse.asked(s(25));
        assert_eq!((pulse.beat(s(44)), pulse.next()), (Beat::Nothing, Some(s(45))));
        assert!(matches!(pulse.beat(s(45)), Beat::Dead(_)));
        pulse.heard(s(44));
        pulse.answered();
        assert_eq!((pulse.beat(s(63)), pulse.beat(s(64))), (Beat::Nothing, Beat::Ask));
    }

    #[test]
    fn one_that_talks_but_does_not_answer_is_alive() {
        let s = Duration::from_secs;
        let mut pulse = Pulse::new(s(0));
        pulse.switch(true);
        pulse.set_interval(s(20));
        pulse.asked(s(20));
        pulse.heard(s(39));
        assert_eq!((pulse.beat(s(58)), pulse.next()), (Beat::Nothing, Some(s(59))));
    }
}
