//! How a limit is divided.

use std::fmt;

use crate::Class;

/// The smallest descriptor limit a server starts with. Many workers need more: [`PlanError::TooLow`] says how many.
pub const LIMIT_MIN: u64 = 256;
/// The smallest number of client connections.
pub const CONNECTIONS_MIN: u32 = 8;
/// Connections that only an administrator gets.
pub const ADMIN_RESERVE: u32 = 8;
/// The smallest number of vBucket files: each flusher and reader holds a few at a time.
pub const FILES_MIN: u32 = 32;

/// Standard streams, locks, logs, two listeners with their pollers, signals.
const CORE_BASE: u32 = 24;
/// A poller and a waker.
const CORE_PER_WORKER: u32 = 2;
/// Background work has a 32nd of the limit within these bounds.
const BACKGROUND_MIN: u64 = 16;
const BACKGROUND_MAX: u64 = 64;
/// What connections get, the administrator's among them, where they and files together want more than there is.
const CONNECTIONS_EIGHTHS: u64 = 5;

/// How many a part wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wish {
    /// Nobody said otherwise: less will do.
    Default(u32),
    /// Somebody asked for this number: they get it, or are told why not.
    Asked(u32),
}

/// What the configuration wants of the limit.
#[derive(Clone, Copy, Debug)]
pub struct Wishes {
    /// Clients at a time, the administrator's reserve not among them.
    pub connections_max: Wish,
    /// vBucket files open at a time.
    pub files_max: Wish,
    /// Threads that serve connections. Each needs descriptors of its own, and at least one connection.
    pub workers: u32,
}

/// 1. The classes and the spare add up to the limit.
/// 2. What was asked for is granted in full; only defaults are reduced.
/// 3. Every class has its minimum, and connections are no fewer than workers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    limit: u64,
    capacities: [u32; Class::ALL.len()],
    /// What was reduced to what.
    reduced: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    #[error(
        "the limit of open files is {limit}, and {minimum} is the least for {workers} workers: raise it (`ulimit -n \
         {minimum}`, or LimitNOFILE= of the service){}", if *.minimum > LIMIT_MIN { ", or start fewer workers" } else { "" }
    )]
    TooLow { limit: u64, minimum: u64, workers: u32 },
    #[error(
        "{what} = {asked} is out of range: the limit of open files is {limit}, which leaves {min} to {max} for it; choose \
         one of these, or raise the limit (`ulimit -n`, or LimitNOFILE= of the service)"
    )]
    OutOfRange { what: &'static str, asked: u32, min: u32, max: u32, limit: u64 },
}

impl Plan {
    /// Divides `limit`, the most files this process may have open.
    pub fn for_limit(limit: u64, wishes: Wishes) -> Result<Plan, PlanError> {
        let workers = wishes.workers;
        let core = workers.saturating_mul(CORE_PER_WORKER).saturating_add(CORE_BASE);
        // Every worker owns a slot of the connection table, so there cannot be fewer connections than workers.
        let connections_min = workers.max(CONNECTIONS_MIN);
        let least: u64 = [core, ADMIN_RESERVE, connections_min, FILES_MIN].into_iter().map(u64::from).sum();
        let minimum = (least + BACKGROUND_MIN).max(LIMIT_MIN);
        if limit < minimum {
            return Err(PlanError::TooLow { limit, minimum, workers });
        }
        let background = (limit / 32).clamp(BACKGROUND_MIN, BACKGROUND_MAX).min(limit - least);
        let room = limit - u64::from(core) - u64::from(ADMIN_RESERVE) - background;
        let room = u32::try_from(room).unwrap_or(u32::MAX);

        let check = |what, asked, min, max| match (min..=max).contains(&asked) {
            true => Ok(()),
            false => Err(PlanError::OutOfRange { what, asked, min, max, limit }),
        };
        let (connections, files) = match (wishes.connections_max, wishes.files_max) {
            (Wish::Asked(connections), files) => {
                check("connections_max", connections, CONNECTIONS_MIN, room - FILES_MIN)?;
                let connections = connections.max(connections_min);
                if let Wish::Asked(files) = files {
                    check("files_max", files, FILES_MIN, room - connections)?;
                }
                (connections, files.number().clamp(FILES_MIN, room - connections))
            }
            (Wish::Default(connections), Wish::Asked(files)) => {
                check("files_max", files, FILES_MIN, room - connections_min)?;
                (connections.clamp(connections_min, room - files), files)
            }
            (Wish::Default(connections), Wish::Default(files)) => {
                share(room, connections_min, connections.max(connections_min), files.max(FILES_MIN))
            }
        };
        let reduced =
            [("connections_max", wishes.connections_max, connections), ("files_max", wishes.files_max, files)]
                .into_iter()
                .filter(|(_, wish, granted)| *granted < wish.number())
                .map(|(what, wish, granted)| format!("{what} is {granted} instead of {}", wish.number()))
                .collect();
        let capacities = [core, connections, ADMIN_RESERVE, files, background as u32];
        Ok(Plan { limit, capacities, reduced })
    }

    /// What a ledger was resized to.
    pub(crate) fn of_capacities(limit: u64, capacities: [u32; Class::ALL.len()]) -> Plan {
        Plan { limit, capacities, reduced: Vec::new() }
    }

    /// Descriptors in all.
    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// Descriptors of one class. Those of [`Class::Connections`] do not include the administrator's.
    pub fn capacity(&self, class: Class) -> u32 {
        self.capacities[class as usize]
    }

    /// Clients at a time: slots of the connection table that are not the administrator's.
    pub fn connections_max(&self) -> u32 {
        self.capacity(Class::Connections)
    }

    /// vBucket files open at a time.
    pub fn files_max(&self) -> u32 {
        self.capacity(Class::Files)
    }

    /// Descriptors that belong to no class.
    pub fn spare(&self) -> u64 {
        self.limit - self.capacities.iter().copied().map(u64::from).sum::<u64>()
    }

    /// One line for the log if the limit was too low for the defaults: what was reduced, and what to do about it.
    pub fn reduced(&self) -> Option<String> {
        let what = self.reduced.join(" and ");
        let why = format!(
            "the limit of open files is {}; raise it (`ulimit -n`, or LimitNOFILE= of the service)",
            self.limit
        );
        (!what.is_empty()).then(|| format!("{what}: {why}"))
    }
}

/// The sum: `descriptors 1024 = core 32 + connections 600 (8 admin) + files 360 + background 32`.
impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [core, connections, admin, files, background] = self.capacities;
        let connections = u64::from(connections) + u64::from(admin);
        write!(f, "descriptors {} = core {core} + connections {connections} ({admin} admin)", self.limit)?;
        write!(f, " + files {files} + background {background}")?;
        match self.spare() {
            0 => Ok(()),
            spare => write!(f, " + spare {spare}"),
        }
    }
}

impl Wish {
    pub fn number(self) -> u32 {
        match self {
            Wish::Default(n) | Wish::Asked(n) => n,
        }
    }
}

/// Divides `room` between connections and files that want `connections` and `files`, each at least its minimum.
fn share(room: u32, connections_min: u32, connections: u32, files: u32) -> (u32, u32) {
    let eighths = (u64::from(room) + u64::from(ADMIN_RESERVE)) * CONNECTIONS_EIGHTHS / 8;
    let fair = u32::try_from(eighths - u64::from(ADMIN_RESERVE)).unwrap_or(u32::MAX);
    let fair = fair.clamp(connections_min, room - FILES_MIN);
    // What one leaves of its fair share, the other gets.
    let connections = connections.min(fair.max(room.saturating_sub(files)));
    (connections, files.min(room - connections))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn defaults(workers: u32) -> Wishes {
        Wishes { connections_max: Wish::Default(10_000), files_max: Wish::Default(4096), workers }
    }

    fn asking(connections: u32) -> Wishes {
        Wishes { connections_max: Wish::Asked(connections), ..defaults(4) }
    }

    #[test]
    fn the_sum_is_one_line() {
        let line = |limit| Plan::for_limit(limit, defaults(4)).unwrap().to_string();
        assert_eq!(line(256), "descriptors 256 = core 32 + connections 130 (8 admin) + files 78 + background 16");
        assert_eq!(line(1024), "descriptors 1024 = core 32 + connections 600 (8 admin) + files 360 + background 32");
        assert_eq!(
            line(1_000_000),
            "descriptors 1000000 = core 32 + connections 10008 (8 admin) + files 4096 + background 64 + spare 985800"
        );
        // No limit at all.
        assert!(line(u64::MAX).ends_with("+ spare 18446744073709537415"));
    }

    #[test]
    fn a_limit_below_the_minimum_is_refused_with_what_to_do() {
        let refusal = |limit, workers| Plan::for_limit(limit, defaults(workers)).unwrap_err().to_string();
        assert_eq!(
            refusal(255, 4),
            "the limit of open files is 255, and 256 is the least for 4 workers: raise it (`ulimit -n 256`, or \
             LimitNOFILE= of the service)"
        );
        let many = refusal(256, 128);
        assert!(
            many.contains("464 is the least for 128 workers") && many.ends_with("or start fewer workers"),
            "{many}"
        );
        assert!(Plan::for_limit(464, defaults(128)).is_ok());
        assert!(Plan::for_limit(256, defaults(u32::MAX)).is_err());
    }

    #[test]
    fn what_was_asked_for_is_granted_or_refused_with_the_range() {
        let refusal = Plan::for_limit(1024, asking(10_000)).unwrap_err();
        assert_eq!(
            refusal.to_string(),
            "connections_max = 10000 is out of range: the limit of open files is 1024, which leaves 8 to 920 for it; \
             choose one of these, or raise the limit (`ulimit -n`, or LimitNOFILE= of the service)"
        );
        let plan = Plan::for_limit(1024, asking(920)).unwrap();
        assert_eq!((plan.connections_max(), plan.files_max(), plan.spare()), (920, FILES_MIN, 0));
        assert!(Plan::for_limit(1024, asking(921)).is_err() && Plan::for_limit(1024, asking(7)).is_err());
    }

    #[test]
    fn a_default_that_does_not_fit_is_reduced_and_says_so_in_one_line() {
        let plan = Plan::for_limit(1024, defaults(4)).unwrap();
        assert_eq!(
            plan.reduced().unwrap(),
            "connections_max is 592 instead of 10000 and files_max is 360 instead of 4096: the limit of open files is \
             1024; raise it (`ulimit -n`, or LimitNOFILE= of the service)"
        );
        assert_eq!(Plan::for_limit(65_536, defaults(4)).unwrap().reduced(), None);
    }

    #[test]
    fn what_one_does_not_want_the_other_gets() {
        let wishes = |c, f| Wishes { connections_max: Wish::Default(c), files_max: Wish::Default(f), workers: 4 };
        let shares = |c, f| {
            let plan = Plan::for_limit(1024, wishes(c, f)).unwrap();
            (plan.connections_max(), plan.files_max(), plan.spare())
        };
        assert_eq!(shares(100, 10_000), (100, 852, 0));
        assert_eq!(shares(10_000, 100), (852, 100, 0));
        assert_eq!(shares(100, 100), (100, 100, 752));
    }

    fn wish(n: impl Strategy<Value = u32>) -> impl Strategy<Value = Wish> {
        (n, any::<bool>()).prop_map(|(n, asked)| if asked { Wish::Asked(n) } else { Wish::Default(n) })
    }

    fn numbers() -> impl Strategy<Value = u32> {
        prop_oneof![0..2_000_u32, 0..2_000_000_u32, any::<u32>()]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(20_000))]
        /// Goal: no plan promises more than there is. Method: every limit, every wish; what is refused names a range
        /// that is true: its ends are granted, and there is nothing beyond them.
        #[test]
        fn the_classes_never_add_up_to_more_than_the_limit(
            limit in prop_oneof![0..3_000_u64, 0..2_000_000_u64, any::<u64>()],
            connections_max in wish(numbers()),
            files_max in wish(numbers()),
            workers in prop_oneof![1..64_u32, 0..2_000_u32, any::<u32>()],
        ) {
            let wishes = Wishes { connections_max, files_max, workers };
            match Plan::for_limit(limit, wishes) {
                Ok(plan) => {
                    let sum: u64 = Class::ALL.iter().map(|class| u64::from(plan.capacity(*class))).sum();
                    prop_assert_eq!(sum + plan.spare(), limit);
                    prop_assert!(sum <= limit && limit >= LIMIT_MIN);
                    prop_assert!(plan.connections_max() >= workers.max(CONNECTIONS_MIN));
                    prop_assert!(plan.files_max() >= FILES_MIN);
                    prop_assert_eq!(plan.capacity(Class::Admin), ADMIN_RESERVE);
                    prop_assert!((16..=64).contains(&plan.capacity(Class::Background)));
                    if let Wish::Asked(n) = connections_max {
                        prop_assert_eq!(plan.connections_max(), n.max(workers));
                    }
                    if let Wish::Asked(n) = files_max {
                        prop_assert_eq!(plan.files_max(), n);
                    }
                    let short = plan.connections_max() < connections_max.number() || plan.files_max() < files_max.number();
                    prop_assert_eq!(plan.reduced().is_some(), short);
                    prop_assert!(!short || plan.spare() == 0 || plan.limit() > u64::from(u32::MAX));
                }
                Err(PlanError::TooLow { minimum, .. }) => {
                    prop_assert!(limit < minimum);
                    let modest = Wishes { connections_max: Wish::Default(1), files_max: Wish::Default(1), workers };
                    prop_assert!(Plan::for_limit(minimum, modest).is_ok());
                    prop_assert!(Plan::for_limit(minimum - 1, modest).is_err());
                }
                Err(PlanError::OutOfRange { what, asked, min, max, .. }) => {
                    prop_assert!(!(min..=max).contains(&asked));
                    let with = |n| match what {
                        "connections_max" => Wishes { connections_max: Wish::Asked(n), files_max: Wish::Default(1), workers },
                        _ => Wishes { files_max: Wish::Asked(n), ..wishes },
                    };
                    for (n, fits) in [(min, true), (max, true), (min - 1, false), (max + 1, false)] {
                        prop_assert_eq!(Plan::for_limit(limit, with(n)).is_ok(), fits, "{} = {}", what, n);
                    }
                }
            }
        }
    }
}
