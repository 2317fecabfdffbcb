//! What goes wrong, and when: a plan is a value, so a failing test prints it and another run repeats it.

use std::path::Path;

use super::dice::Dice;

/// The kinds of I/O a plan can tell apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Op {
    Create,
    Write,
    SetSize,
    Sync,
    WriteBack,
    Rename,
    RemoveFile,
    CreateDir,
    RemoveDir,
    SyncDir,
    Open,
    Read,
    Size,
    List,
    Exists,
}

impl Op {
    pub const ALL: [Op; 15] = [
        Op::Create,
        Op::Write,
        Op::SetSize,
        Op::Sync,
        Op::WriteBack,
        Op::Rename,
        Op::RemoveFile,
        Op::CreateDir,
        Op::RemoveDir,
        Op::SyncDir,
        Op::Open,
        Op::Read,
        Op::Size,
        Op::List,
        Op::Exists,
    ];

    /// Whether what a power cut leaves may depend on this call having happened.
    pub fn mutates(self) -> bool {
        self <= Op::SyncDir
    }
}

/// What happens to a call instead of what it asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The call fails and does nothing, except `Sync` and `SyncDir`: there, what was un-synced is kept or lost
    /// by chance, stays readable, and no later sync makes up for it.
    Errno(i32),
    /// `Sync` and `SyncDir` say `Ok` and keep nothing, now or later. Other calls do what they should.
    Lie,
    /// `Read` and `Write` stop half-way, after at least one byte. Other calls do what they should.
    Short,
    /// `Write` takes nothing and says `Ok(0)`. Other calls do what they should.
    Zero,
}

/// One fault: which calls, and from which of them on. Without more said: the first call of its kind, once.
#[derive(Clone, Debug)]
pub struct Rule {
    op: Op,
    fault: Fault,
    path_part: String,
    skip: u64,
    times: u64,
    permille: u16,
}

impl Rule {
    pub fn new(op: Op, fault: Fault) -> Rule {
        Rule { op, fault, path_part: String::new(), skip: 0, times: 1, permille: 1000 }
    }

    /// Only calls whose path contains `part`. An open file keeps the path it was opened by; a rename counts as
    /// both its paths.
    pub fn path(mut self, part: &str) -> Rule {
        self.path_part = part.to_owned();
        self
    }

    /// Lets `n` matching calls pass first: 0 is the first call.
    pub fn nth(mut self, n: u64) -> Rule {
        self.skip = n;
        self
    }

    /// Strikes `n` times.
    pub fn times(mut self, n: u64) -> Rule {
        self.times = n;
        self
    }

    /// Strikes for ever.
    pub fn sticky(self) -> Rule {
        self.times(u64::MAX)
    }

    /// Strikes each of its calls only with this chance in a thousand.
    pub fn chance_permille(mut self, chance: u16) -> Rule {
        self.permille = chance;
        self
    }

    fn strikes(&mut self, op: Op, paths: &[&Path], dice: &mut Dice) -> bool {
        if self.op != op || !paths.iter().any(|path| path.to_string_lossy().contains(&self.path_part)) {
            return false;
        }
        if self.skip > 0 {
            self.skip -= 1;
            return false;
        }
        let strikes = self.times > 0 && (self.permille == 1000 || dice.below(1000) < self.permille.into());
        self.times -= u64::from(strikes && self.times != u64::MAX);
        strikes
    }
}

/// Trouble at random that a correct program rides out: chances in a thousand calls.
/// A read or write that got nowhere is never followed by another, so a loop that goes on always ends.
#[derive(Clone, Copy, Debug, Default)]
pub struct Noise {
    pub short_read_permille: u16,
    pub short_write_permille: u16,
    pub zero_write_permille: u16,
    /// Reads and writes that fail with EINTR, having done nothing.
    pub interrupt_permille: u16,
}

impl Noise {
    /// A third of the reads and more than a third of the writes are troubled.
    pub fn loud() -> Noise {
        Noise { short_read_permille: 250, short_write_permille: 250, zero_write_permille: 50, interrupt_permille: 100 }
    }
}

/// All that is to go wrong on a disk, counted from when it is armed ([`super::SimStorage::arm`]).
#[derive(Clone, Debug, Default)]
pub struct FaultPlan {
    pub(super) cut_before: Option<u64>,
    pub(super) open_files_max: Option<u64>,
    pub(super) space_bytes_max: Option<u64>,
    rules: Vec<Rule>,
    noise: Noise,
    was_stuck: bool,
}

impl FaultPlan {
    /// Nothing goes wrong.
    pub fn new() -> FaultPlan {
        FaultPlan::default()
    }

    /// The power goes before the `n`-th mutating call (0 is the first): it and every call after it fails
    /// until [`super::SimStorage::power_cut`].
    pub fn cut_before(mut self, n: u64) -> FaultPlan {
        self.cut_before = Some(n);
        self
    }

    /// The `n`-th call of kind `op` (0 is the first) fails with `errno`, once.
    pub fn fail_nth(self, op: Op, n: u64, errno: i32) -> FaultPlan {
        self.rule(Rule::new(op, Fault::Errno(errno)).nth(n))
    }

    /// The `n`-th call of kind `op` (0 is the first) and every later one fails with `errno`.
    pub fn fail_from(self, op: Op, n: u64, errno: i32) -> FaultPlan {
        self.rule(Rule::new(op, Fault::Errno(errno)).nth(n).sticky())
    }

    /// Adds a rule. Each counts the calls that match it; the earliest added that strikes decides.
    pub fn rule(mut self, rule: Rule) -> FaultPlan {
        self.rules.push(rule);
        self
    }

    pub fn noise(mut self, noise: Noise) -> FaultPlan {
        self.noise = noise;
        self
    }

    /// ENOSPC once the files' sizes would add up to more than `bytes`; holes count as if written. A write that
    /// fits in part is short. Overwriting needs no space, creating a file needs a byte free.
    pub fn space_bytes_max(mut self, bytes: u64) -> FaultPlan {
        self.space_bytes_max = Some(bytes);
        self
    }

    /// EMFILE for open, create, list and sync of a directory while `n` files are open.
    pub fn open_files_max(mut self, n: u64) -> FaultPlan {
        self.open_files_max = Some(n);
        self
    }

    /// The fault of this call, if it has one.
    pub(super) fn next(&mut self, op: Op, paths: &[&Path], dice: &mut Dice) -> Option<Fault> {
        let mut found = None;
        for rule in &mut self.rules {
            if rule.strikes(op, paths, dice) && found.is_none() {
                found = Some(rule.fault);
            }
        }
        found.or_else(|| self.next_noise(op, dice))
    }

    fn next_noise(&mut self, op: Op, dice: &mut Dice) -> Option<Fault> {
        let noise = self.noise;
        let (short, zero) = match op {
            Op::Read => (noise.short_read_permille, 0),
            Op::Write => (noise.short_write_permille, noise.zero_write_permille),
            _ => return None,
        };
        let roll = dice.below(1000) as u16;
        let fault = if roll < short {
            Some(Fault::Short)
        } else if roll < short + zero {
            Some(Fault::Zero)
        } else if roll < short + zero + noise.interrupt_permille {
            Some(Fault::Errno(libc::EINTR))
        } else {
            None
        };
        // Only faults without progress must not repeat; short calls get on by themselves.
        let stuck = matches!(fault, Some(Fault::Zero | Fault::Errno(_)));
        let allowed = !(stuck && self.was_stuck);
        self.was_stuck = stuck && allowed;
        fault.filter(|_| allowed)
    }
}
