//! When documents end.

use crate::op::OpError;

/// Up to here, an expiry counts from now; beyond, it is a moment.
pub const RELATIVE_MAX_S: u32 = 30 * 24 * 60 * 60;

/// An expiry from the wire as Unix seconds; 0 = never.
pub fn absolute(raw: u32, now_s: impl FnOnce() -> u32) -> Result<u32, OpError> {
    match raw {
        0 => Ok(0),
        1..=RELATIVE_MAX_S => now_s().checked_add(raw).ok_or(OpError::ExpiryOverflow),
        _ => Ok(raw),
    }
}

/// The sooner of two expiries; 0 = never.
pub fn sooner(one: u32, other: u32) -> u32 {
    // One less than never is the latest moment there is.
    one.wrapping_sub(1).min(other.wrapping_sub(1)).wrapping_add(1)
}

/// Whether a document with this expiry is gone at `now_s`.
pub fn is_past(expiry: u32, now_s: impl FnOnce() -> u32) -> bool {
    expiry != 0 && expiry <= now_s()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn anything_is_sooner_than_never() {
        assert_eq!((sooner(0, 7), sooner(7, 0), sooner(7, 8), sooner(8, 7), sooner(0, 0)), (7, 7, 7, 7, 0));
        assert_eq!(sooner(0, u32::MAX), u32::MAX);
    }

    #[test]
    fn thirty_days_are_relative_and_a_second_more_is_1970() {
        let moment = 1_767_225_600;
        let now = || moment;
        assert_eq!(absolute(0, now), Ok(0));
        assert_eq!(absolute(1, now), Ok(moment + 1));
        assert_eq!(absolute(2_592_000, now), Ok(moment + 2_592_000));
        assert_eq!(absolute(2_592_001, now), Ok(2_592_001));
        assert!(is_past(2_592_001, now) && !is_past(0, now) && is_past(moment, now) && !is_past(moment + 1, now));
        assert_eq!(absolute(100, || u32::MAX - 99), Err(OpError::ExpiryOverflow));
    }
}
