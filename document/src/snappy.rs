//! Snappy, the raw block format: how values travel and rest when a client or a bucket compresses them.
//! A block says itself how large it will be, so a hostile one is refused before memory is asked for.

/// A block of `n` bytes cannot inflate to more than this many times `n`: the densest element makes 64 bytes from 3.
const RATIO_MAX: usize = 22;

/// Why compressed bytes were refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SnappyError {
    #[error("not a snappy block: {bytes} bytes that do not inflate")]
    Damaged { bytes: usize },
    #[error("snappy block inflates to {inflated} bytes, more than the {limit} allowed")]
    TooLarge { inflated: usize, limit: usize },
}

/// How many bytes `block` claims to inflate to. An impossible claim is an error.
pub fn inflated_len(block: &[u8]) -> Result<usize, SnappyError> {
    let damaged = SnappyError::Damaged { bytes: block.len() };
    let claimed = snap::raw::decompress_len(block).map_err(|_| damaged)?;
    if block.is_empty() || claimed > block.len().saturating_mul(RATIO_MAX) { Err(damaged) } else { Ok(claimed) }
}

/// The bytes that were compressed into `block`, at most `len_max` of them.
pub fn inflate(block: &[u8], len_max: usize) -> Result<Vec<u8>, SnappyError> {
    let inflated = inflated_len(block)?;
    if inflated > len_max {
        return Err(SnappyError::TooLarge { inflated, limit: len_max });
    }
    snap::raw::Decoder::new().decompress_vec(block).map_err(|_| SnappyError::Damaged { bytes: block.len() })
}

/// `bytes` as one block. `None` when they are too long for the format (4 GiB).
pub fn compress(bytes: &[u8]) -> Option<Vec<u8>> {
    snap::raw::Encoder::new().compress_vec(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_compressed_comes_back() {
        for bytes in [Vec::new(), b"hello".to_vec(), vec![7; 100_000], (0..=255).cycle().take(5000).collect()] {
            let block = compress(&bytes).unwrap();
            assert_eq!(inflated_len(&block), Ok(bytes.len()));
            assert_eq!(inflate(&block, bytes.len()), Ok(bytes));
        }
    }

    #[test]
    fn a_block_over_the_limit_or_with_an_impossible_claim_is_refused_before_allocating() {
        let block = compress(&[0; 1000]).unwrap();
        assert_eq!(inflate(&block, 999), Err(SnappyError::TooLarge { inflated: 1000, limit: 999 }));
        assert_eq!(inflate(&[0xff, 0xff, 0xff, 0xff, 0x0f, 0], usize::MAX), Err(SnappyError::Damaged { bytes: 6 }));
        assert_eq!(inflate(b"", 10), Err(SnappyError::Damaged { bytes: 0 }));
        assert!(inflate(&block[..block.len() - 1], 1000).is_err());
    }
}
