//! Whether a consumer may go on from where it is, or has to forget some of what it has.
//!
//! A consumer says which history it knows, how far it has come, and in which snapshot that is: between the ends of a
//! snapshot it holds a state the producer never had. What it may keep is what both histories share, cut back to the start of
//! a snapshot it has only part of.

use changelog::{FailoverEntry, FailoverTable};
use types::{Seqno, VbUuid};
use wire::dcp::{StreamFlags, StreamRequest};

/// What the producer knows of the vBucket.
#[derive(Clone, Copy, Debug)]
pub struct History<'a> {
    pub failover: &'a FailoverTable,
    pub high: Seqno,
    /// Tombstones up to here may be gone.
    pub purge: Seqno,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    Accept,
    /// It has to forget everything after this seqno, and ask again.
    Rollback(Seqno),
    /// What it says cannot be.
    OutOfRange,
}

/// `purge`: the purge seqno the consumer knows of, if it said so. Nothing was purged that it has not seen if it is ours.
pub fn decide(request: &StreamRequest<'_>, purge: Option<Seqno>, history: &History<'_>) -> Verdict {
    let StreamRequest { flags, start, end, uuid, mut snap_start, mut snap_end, .. } = *request;
    if start > end || start < snap_start || start > snap_end {
        return Verdict::OutOfRange;
    }
    if start.0 == 0 && (!flags.has(StreamFlags::STRICT_VB_UUID) || uuid.0 == 0) {
        return Verdict::Accept;
    }
    let has_seen_purges = flags.has(StreamFlags::IGNORE_PURGED_TOMBSTONES) || purge == Some(history.purge);
    if start < history.purge && start.0 != 0 && !has_seen_purges {
        return Verdict::Rollback(Seqno(0));
    }
    let Some(shared_upto) = shared_upto(uuid, history) else { return Verdict::Rollback(Seqno(0)) };
    if start == snap_start {
        // It has nothing of that snapshot.
        snap_end = start;
    }
    if snap_end <= shared_upto {
        return if start <= history.high { Verdict::Accept } else { Verdict::OutOfRange };
    }
    if start == snap_end {
        // It has all of it.
        snap_start = start;
    }
    Verdict::Rollback(snap_start.min(shared_upto))
}

/// How far a history and ours are the same.
fn shared_upto(uuid: VbUuid, history: &History<'_>) -> Option<Seqno> {
    let entries = history.failover.newest_first();
    let place = entries.iter().position(|entry: &FailoverEntry| entry.uuid == uuid)?;
    // A history ended where the next one began.
    Some(place.checked_sub(1).map_or(history.high, |next| entries[next].seqno))
}

#[cfg(test)]
mod tests {
    use super::*;

    const FOREVER: Seqno = Seqno(u64::MAX);

    fn table(newest_first: &[(u64, u64)]) -> FailoverTable {
        let entries =
            newest_first.iter().map(|(uuid, seqno)| FailoverEntry { uuid: VbUuid(*uuid), seqno: Seqno(*seqno) });
        FailoverTable::from_entries(entries.collect()).expect("some history")
    }

    fn ask(uuid: u64, (start, snap_start, snap_end): (u64, u64, u64)) -> StreamRequest<'static> {
        StreamRequest {
            flags: StreamFlags::default(),
            start: Seqno(start),
            end: FOREVER,
            uuid: VbUuid(uuid),
            snap_start: Seqno(snap_start),
            snap_end: Seqno(snap_end),
            filter: &[],
        }
    }

    /// Two histories: 7 was ours up to 10, since then it is 8, which has come to 20.
    fn verdict(request: &StreamRequest<'_>) -> Verdict {
        let failover = table(&[(8, 10), (7, 0)]);
        decide(request, None, &History { failover: &failover, high: Seqno(20), purge: Seqno(3) })
    }

    #[test]
    fn a_consumer_with_nothing_is_welcome_unless_it_insists_on_a_history() {
        assert_eq!(verdict(&ask(0, (0, 0, 0))), Verdict::Accept);
        assert_eq!(verdict(&ask(99, (0, 0, 0))), Verdict::Accept);
        let strict = |uuid| StreamRequest { flags: StreamFlags::STRICT_VB_UUID, ..ask(uuid, (0, 0, 0)) };
        assert_eq!(
            [0, 8, 99].map(|uuid| verdict(&strict(uuid))),
            [Verdict::Accept, Verdict::Accept, Verdict::Rollback(Seqno(0))]
        );
    }

    #[test]
    fn the_newest_history_goes_on_anywhere_up_to_the_high_seqno() {
        for place in [(20, 20, 20), (15, 10, 20), (15, 15, 99), (5, 5, 5), (20, 15, 20)] {
            assert_eq!(verdict(&ask(8, place)), Verdict::Accept, "{place:?}");
        }
        // What it has was never here, or not as far as this node remembers.
        assert_eq!(verdict(&ask(8, (25, 25, 25))), Verdict::Rollback(Seqno(20)));
        assert_eq!(verdict(&ask(8, (25, 18, 25))), Verdict::Rollback(Seqno(20)));
        assert_eq!(verdict(&ask(8, (19, 15, 25))), Verdict::Rollback(Seqno(15)));
    }

    #[test]
    fn an_older_history_goes_on_up_to_where_it_ended() {
        assert_eq!(verdict(&ask(7, (10, 10, 10))), Verdict::Accept);
        assert_eq!(verdict(&ask(7, (12, 12, 12))), Verdict::Rollback(Seqno(10)));
        assert_eq!(verdict(&ask(7, (12, 11, 15))), Verdict::Rollback(Seqno(10)));
        assert_eq!(verdict(&ask(7, (9, 6, 15))), Verdict::Rollback(Seqno(6)));
        assert_eq!(verdict(&ask(7, (9, 9, 15))), Verdict::Accept);
        assert_eq!(verdict(&ask(7, (15, 6, 15))), Verdict::Rollback(Seqno(10)));
        assert_eq!(verdict(&ask(99, (9, 9, 9))), Verdict::Rollback(Seqno(0)));
    }

    #[test]
    fn what_was_purged_must_have_been_seen() {
        let early = ask(8, (2, 2, 2));
        assert_eq!(verdict(&early), Verdict::Rollback(Seqno(0)));
        assert_eq!(verdict(&StreamRequest { flags: StreamFlags::IGNORE_PURGED_TOMBSTONES, ..early }), Verdict::Accept);
        let failover = table(&[(8, 0)]);
        let history = History { failover: &failover, high: Seqno(20), purge: Seqno(3) };
        assert_eq!(decide(&early, Some(Seqno(3)), &history), Verdict::Accept);
        assert_eq!(decide(&early, Some(Seqno(1)), &history), Verdict::Rollback(Seqno(0)));
    }

    #[test]
    fn a_place_outside_its_snapshot_or_behind_its_end_is_none() {
        assert_eq!(verdict(&ask(8, (5, 6, 7))), Verdict::OutOfRange);
        assert_eq!(verdict(&ask(8, (8, 6, 7))), Verdict::OutOfRange);
        assert_eq!(verdict(&StreamRequest { end: Seqno(4), ..ask(8, (5, 5, 5)) }), Verdict::OutOfRange);
    }

    /// Goal: whoever does as it is told gets a state that is ours. Method: all small requests against all small tables; a
    /// rollback never goes forward, keeps nothing but shared history, and what is asked for after it is accepted.
    #[test]
    fn doing_as_told_ends_in_shared_history_for_every_small_case() {
        let mut cases = 0;
        for (ended, high, purge) in
            (0..5u64).flat_map(|e| (e..6).flat_map(move |h| (0..=h.min(2)).map(move |p| (e, h, p))))
        {
            let failover = table(&[(8, ended), (7, 0)]);
            let history = History { failover: &failover, high: Seqno(high), purge: Seqno(purge) };
            for (uuid, snap_start, start, snap_end) in [7, 8, 99]
                .into_iter()
                .flat_map(|u| (0..8u64).flat_map(move |a| (a..8).flat_map(move |s| (s..8).map(move |z| (u, a, s, z)))))
            {
                let shared = match uuid {
                    7 => ended,
                    8 => high,
                    _ => 0,
                };
                cases += 1;
                match decide(&ask(uuid, (start, snap_start, snap_end)), None, &history) {
                    Verdict::Accept => {
                        assert!(start <= shared, "goes on with what it has of another history");
                        let is_whole = start == snap_start || start == 0;
                        assert!(is_whole || snap_end <= shared, "the rest of its snapshot is not ours");
                    }
                    Verdict::Rollback(Seqno(to)) => {
                        assert!(to <= start && to <= shared);
                        let again = decide(&ask(uuid, (to, to, to)), None, &history);
                        let from_nothing = decide(&ask(0, (0, 0, 0)), None, &history);
                        assert!(again == Verdict::Accept || again == Verdict::Rollback(Seqno(0)));
                        assert_eq!(from_nothing, Verdict::Accept);
                    }
                    Verdict::OutOfRange => panic!("a place within its snapshot"),
                }
            }
        }
        assert!(cases > 10_000, "{cases}");
    }
}
