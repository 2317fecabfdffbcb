//! Which keys there may be: a Bloom filter that grows.
//!
//! Under full eviction a key missing from memory may be in the file. Most that clients ask for in vain never were; the
//! filter knows these without a look at the disk. It is cut into layers, each twice the last and a little stricter, since
//! a filter cannot be resized without its keys, and these are on disk.
//!
//! Sketch: 12 bits a key let 1 in 300 strangers pass. One that grew from nothing to a million keys takes 2 to 4 bytes a
//! key and lets 1 in 70 pass; the next start sizes it afresh.

/// Keys of the first layer, if nobody knows better.
const KEYS_FIRST: usize = 64;
/// Bits a key in the first layer. Every second layer has one more.
const KEY_BITS: usize = 12;

/// 1. A key once inserted is found for ever.
/// 2. The last layer is the one that takes keys.
#[derive(Debug, Default)]
pub struct KeyFilter {
    layers: Vec<Layer>,
}

#[derive(Debug)]
struct Layer {
    words: Box<[u64]>,
    probes: u32,
    /// Keys it was made for.
    keys_max: usize,
    /// Keys it takes until it is full.
    keys_left: usize,
}

impl KeyFilter {
    /// Makes room for so many more keys at once.
    pub fn reserve(&mut self, keys: usize) {
        let keys = keys.max(KEYS_FIRST);
        if self.layers.last().is_none_or(|layer| layer.keys_left < keys) {
            self.layers.push(Layer::new(keys, KEY_BITS + self.layers.len() / 2));
        }
    }

    /// `hash`: all of its bits are used.
    pub fn insert(&mut self, hash: u64) {
        if self.may_have(hash) {
            return;
        }
        if self.layers.last().is_none_or(|layer| layer.keys_left == 0) {
            self.reserve(self.layers.last().map_or(KEYS_FIRST, |layer| layer.keys_max * 2));
        }
        let layer = self.layers.last_mut().expect("just made");
        layer.keys_left -= 1;
        for bit in layer.bits(hash) {
            layer.words[bit / 64] |= 1 << (bit % 64);
        }
    }

    /// `false`: it was never inserted.
    pub fn may_have(&self, hash: u64) -> bool {
        // The newest are the largest.
        self.layers.iter().rev().any(|layer| layer.bits(hash).all(|bit| layer.words[bit / 64] >> (bit % 64) & 1 == 1))
    }

    /// Bytes of memory the filter holds beside itself.
    pub fn memory(&self) -> usize {
        let words = self.layers.iter().map(|layer| types::allocated(layer.words.len() * 8));
        words.sum::<usize>() + types::allocated(self.layers.capacity() * size_of::<Layer>())
    }
}

impl Layer {
    fn new(keys: usize, key_bits: usize) -> Layer {
        let words = vec![0; (keys * key_bits).div_ceil(64)].into_boxed_slice();
        // ln 2 of the bits a key is best.
        Layer { words, probes: (key_bits * 69 / 100) as u32, keys_max: keys, keys_left: keys }
    }

    fn bits(&self, hash: u64) -> impl Iterator<Item = usize> + use<> {
        let count = self.words.len() as u128 * 64;
        let mut at = hash.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let step = (hash.rotate_left(32) ^ (hash >> 7)).wrapping_mul(0xd6e8_feb8_6659_fd93) | 1;
        (0..self.probes).map(move |_| {
            at = at.wrapping_add(step).rotate_left(5);
            ((u128::from(at) * count) >> 64) as usize
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hash_table::HashSeed;

    fn hash(n: usize) -> u64 {
        HashSeed([3, 99]).hash(format!("\0user::{n:08}").as_bytes())
    }

    fn strangers_let_in(filter: &KeyFilter) -> usize {
        (0..100_000).filter(|n| filter.may_have(hash(1_000_000_000 + n))).count()
    }

    #[test]
    fn a_filter_of_the_right_size_knows_all_its_keys_and_few_others() {
        let mut filter = KeyFilter::default();
        filter.reserve(50_000);
        (0..50_000).for_each(|n| filter.insert(hash(n)));
        assert!((0..50_000).all(|n| filter.may_have(hash(n))));
        let strangers = strangers_let_in(&filter);
        assert!(strangers < 500, "{strangers} of 100000");
        assert!(filter.memory() <= 50_000 * 14 / 8, "{} bytes", filter.memory());
    }

    #[test]
    fn a_filter_that_grew_from_nothing_still_knows_most_strangers() {
        let mut filter = KeyFilter::default();
        assert!(!filter.may_have(hash(0)));
        for n in 0..200_000 {
            filter.insert(hash(n));
            filter.insert(hash(n / 2));
        }
        assert!((0..200_000).all(|n| filter.may_have(hash(n))));
        let strangers = strangers_let_in(&filter);
        assert!(strangers < 2_000, "{strangers} of 100000");
        assert!(filter.memory() <= 200_000 * 5, "{} bytes", filter.memory());
    }
}
