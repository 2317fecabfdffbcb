//! Which key comes next, what is done to it, and with which bytes.

/// What the operations of a run are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Workload {
    pub value_bytes: usize,
    /// Of a hundred operations, how many store; the others read.
    pub set_pct: u32,
    pub keys: u64,
    pub order: Order,
}

/// In which order keys come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Each as likely as every other; but requests that are under way together never meet on a key, where there are
    /// keys enough, as some servers refuse a second durable write of a key while the first is under way.
    Random,
    /// One after the other, each once a round: to fill a store.
    Sequential,
}

/// One thread's share of a workload.
///
/// 1. Two pickers with different `lane` of the same `lanes` never pick the same key in sequential order.
/// 2. In random order, different `places` never get the same key.
/// 3. What is picked depends on the seed only, not on time.
pub struct Picker {
    workload: Workload,
    dice: Dice,
    /// The next key of a sequential order, and the step to the one after.
    next: u64,
    step: u64,
    /// How many requests may be under way, on all threads.
    places: u64,
    /// Longer than a value, so that values differ by where they start.
    pool: Vec<u8>,
    key: Vec<u8>,
}

/// Values start at one of this many places in the pool.
const OFFSETS: u64 = 4096;

/// An operation: small, so that one that has to be sent again elsewhere can be kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pick {
    key: u64,
    /// Where in the pool the value starts; `None` reads.
    value_at: Option<u16>,
}

const _: () = assert!(OFFSETS <= 1 << 16);

impl Picker {
    /// `places`: how many requests may be under way together, on all threads.
    pub fn new(workload: Workload, lane: u64, lanes: u64, places: u64, seed: u64) -> Picker {
        let mut dice = Dice(seed);
        // Printable, and not compressible: servers that compress gain nothing.
        const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
        let pool = (0..workload.value_bytes as u64 + OFFSETS).map(|_| ALPHABET[dice.below(64) as usize]).collect();
        // Too few keys to go round: then they are shared.
        let places = if places > workload.keys { 1 } else { places };
        Picker { workload, dice, next: lane, step: lanes, places, pool, key: Vec::new() }
    }

    /// The next operation of one of the `places`.
    pub fn pick(&mut self, place: u64) -> Pick {
        let key = match self.workload.order {
            // Up to `places` keys at the end are nobody's.
            Order::Random => place % self.places + self.places * self.dice.below(self.workload.keys / self.places),
            Order::Sequential => {
                let n = self.next % self.workload.keys;
                self.next += self.step;
                n
            }
        };
        let set = self.workload.set_pct >= 100 || self.dice.below(100) < u64::from(self.workload.set_pct);
        Pick { key, value_at: set.then(|| self.dice.below(OFFSETS) as u16) }
    }

    /// The key, and the value to store under it or `None` to read it.
    pub fn bytes(&mut self, pick: Pick) -> (&[u8], Option<&[u8]>) {
        write_key(pick.key, &mut self.key);
        let value = |at| &self.pool[usize::from(at)..usize::from(at) + self.workload.value_bytes];
        (&self.key, pick.value_at.map(value))
    }
}

/// Bytes of every key.
pub const KEY_BYTES: usize = 14;

/// `key-` and ten digits.
fn write_key(n: u64, key: &mut Vec<u8>) {
    key.clear();
    const ZERO: &[u8; KEY_BYTES] = b"key-0000000000";
    key.extend_from_slice(ZERO);
    let mut rest = n;
    for digit in key[4..].iter_mut().rev() {
        *digit = b'0' + (rest % 10) as u8;
        rest /= 10;
    }
}

/// SplitMix64.
pub struct Dice(pub u64);

impl Dice {
    pub fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// From 0 to `n` - 1, without a division.
    pub fn below(&mut self, n: u64) -> u64 {
        ((u128::from(self.roll()) * u128::from(n)) >> 64) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn workload(set_pct: u32, order: Order) -> Workload {
        Workload { value_bytes: 32, set_pct, keys: 100, order }
    }

    fn key(picker: &mut Picker, place: u64) -> Vec<u8> {
        let pick = picker.pick(place);
        picker.bytes(pick).0.to_vec()
    }

    #[test]
    fn lanes_in_sequence_touch_every_key_once() {
        let mut seen = Vec::new();
        for lane in 0..3 {
            let mut picker = Picker::new(workload(100, Order::Sequential), lane, 3, 8, lane);
            let count = (100 - lane).div_ceil(3);
            seen.extend((0..count).map(|_| key(&mut picker, 0)));
        }
        seen.sort();
        seen.dedup();
        assert_eq!(seen.len(), 100);
        assert_eq!(seen[99], b"key-0000000099");
    }

    #[test]
    fn the_share_of_stores_is_as_asked() {
        for (pct, least, most) in [(0, 0, 0), (30, 2_800, 3_200), (100, 10_000, 10_000)] {
            let mut picker = Picker::new(workload(pct, Order::Random), 0, 1, 1, 7);
            let sets = (0..10_000).map(|_| picker.pick(0)).collect::<Vec<_>>();
            let sets = sets.into_iter().filter(|pick| picker.bytes(*pick).1.is_some_and(|v| v.len() == 32)).count();
            assert!((least..=most).contains(&sets), "{pct}: {sets}");
        }
    }

    #[test]
    fn requests_under_way_together_never_meet_on_a_key() {
        let keys = |places: u64, place: u64| -> std::collections::HashSet<Vec<u8>> {
            let mut picker = Picker::new(workload(100, Order::Random), 0, 1, places, place);
            (0..2_000).map(|_| key(&mut picker, place)).collect()
        };
        assert!((0..16).all(|a| (0..a).all(|b| keys(16, a).is_disjoint(&keys(16, b)))));
        assert_eq!(keys(101, 5).len(), 100, "with fewer keys than places all are shared");
    }

    #[test]
    fn random_keys_cover_the_whole_space() {
        let mut picker = Picker::new(workload(0, Order::Random), 0, 1, 1, 1);
        let keys: std::collections::HashSet<Vec<u8>> = (0..2_000).map(|_| key(&mut picker, 0)).collect();
        assert_eq!(keys.len(), 100);
    }
}
