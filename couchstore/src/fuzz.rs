//! The way in for fuzzers: any bytes, taken for a file.

use std::io;
use std::ops::{Bound, ControlFlow};
use std::path::Path;
use std::sync::Arc;

use env::File;

use crate::check::{Depth, check};
use crate::couch::Couch;
use crate::header::Mode;
use crate::kv::RevMeta;
use crate::vbstate::{self, VbStateRecord};

/// Opens `bytes` in both modes and reads all that can be reached. Anything but returning is a bug.
pub fn fuzz_open(bytes: &[u8]) {
    let file: Arc<dyn File> = Arc::new(Frozen(bytes.to_vec()));
    let path = Path::new("fuzz");
    for mode in [Mode::Strict, Mode::Recovery] {
        let Ok(couch) = Couch::open(file.clone(), path, mode) else { continue };
        let _ = couch.headers(mode);
        let _ = couch.changes_since(0, |doc| {
            let _ = couch.body(&doc);
            let _ = RevMeta::decode(&doc.rev_meta);
            let _ = couch.get_by_id(&doc.id);
            let _ = couch.count_since(doc.seq);
            ControlFlow::Continue(())
        });
        let _ = couch.by_id(Bound::Excluded(b"\0k"), Bound::Unbounded, |doc| {
            let _ = couch.get_by_seq(doc.seq);
            ControlFlow::Continue(())
        });
        if let Ok(Some(state)) = couch.local(vbstate::ID) {
            let _ = VbStateRecord::decode(&state);
        }
        let _ = couch.locals();
    }
    let _ = check(file, path, Depth::All);
}

/// Bytes that can only be read.
struct Frozen(Vec<u8>);

impl File for Frozen {
    fn read_at(&self, buf: &mut [u8], at: u64) -> io::Result<usize> {
        let rest = usize::try_from(at).ok().and_then(|at| self.0.get(at..)).unwrap_or(&[]);
        let n = rest.len().min(buf.len());
        buf[..n].copy_from_slice(&rest[..n]);
        Ok(n)
    }

    fn write_at(&self, _: &[u8], _: u64) -> io::Result<usize> {
        Err(io::ErrorKind::ReadOnlyFilesystem.into())
    }

    fn size(&self) -> io::Result<u64> {
        Ok(self.0.len() as u64)
    }

    fn set_size(&self, _: u64) -> io::Result<()> {
        Err(io::ErrorKind::ReadOnlyFilesystem.into())
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }
    fn write_back(&self, _at: u64, _len: u64) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::btree::{Reduce, Root};
    use crate::format::{MARKER_HEADER, Version, put_uint};
    use crate::header::Header;
    use proptest::prelude::*;

    /// Tree nodes that lie in every way a damaged or hostile file can, but have good checksums.
    fn node() -> impl Strategy<Value = Vec<u8>> {
        let part = proptest::collection::vec(any::<u8>(), 0..40);
        let lengths = (0u64..50, prop_oneof![4 => 0u64..60, 1 => 0u64..1 << 28]);
        let entry = (lengths, part.clone(), part, 0u64..400, 0u64..20).prop_map(|((k, v), key, value, at, reduce)| {
            let mut out = Vec::new();
            put_uint(&mut out, k << 28 | v, 5);
            out.extend(key);
            put_uint(&mut out, at, 6);
            put_uint(&mut out, 17, 6);
            put_uint(&mut out, reduce, 2);
            out.extend(value);
            out
        });
        let honest =
            (proptest::collection::btree_set(0u64..99, 1..5), 0u64..400, 0u64..20).prop_map(|(keys, at, r)| {
                let mut out = Vec::new();
                for key in keys {
                    put_uint(&mut out, 6 << 28 | 30, 5);
                    put_uint(&mut out, key, 6);
                    put_uint(&mut out, at, 6);
                    put_uint(&mut out, 17, 6);
                    put_uint(&mut out, r, 2);
                    out.extend([0; 16]);
                }
                vec![out]
            });
        let entries = prop_oneof![proptest::collection::vec(entry, 0..4), honest];
        (0u8..3, entries).prop_map(|(kind, entries)| {
            let mut out = vec![kind];
            out.extend(entries.concat());
            out
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(1500))]

        #[test]
        fn lying_tree_nodes_are_refused_without_panic(
            nodes in proptest::collection::vec((node(), any::<bool>()), 1..6),
            roots in [proptest::option::of(0usize..6), proptest::option::of(0usize..6), proptest::option::of(0usize..6)],
        ) {
            let mut bytes = vec![0];
            let mut positions = Vec::new();
            for (node, as_it_is) in nodes {
                let packed = if as_it_is { node } else { snap::raw::Encoder::new().compress_vec(&node).unwrap() };
                positions.push(bytes.len() as u64);
                put_uint(&mut bytes, packed.len() as u64 | 1 << 31, 4);
                put_uint(&mut bytes, u64::from(crc32c::crc32c(&packed)), 4);
                bytes.extend(packed);
            }
            bytes.resize(4096, 0);
            let root = |i: Option<usize>| i.map(|i| {
                Root { at: positions[i % positions.len()], subtree_bytes: 9, reduce: Reduce::default() }
            });
            let mut header = Header::empty(Version::V13);
            (header.by_seq, header.by_id, header.local) = (root(roots[0]), root(roots[1]), root(roots[2]));
            header.at = 4096;
            bytes.extend(header.encode(MARKER_HEADER));
            let newest = Couch::open(Arc::new(Frozen(bytes.clone())), Path::new("fuzz"), Mode::Strict).unwrap();
            prop_assert_eq!(newest.header(), &header);
            fuzz_open(&bytes);
        }
    }
}
