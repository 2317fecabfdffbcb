//! Headers: each is one commit, and the newest whole one is the file.
//!
//! A header starts at a block boundary and names the roots of three trees that lie wholly below it. The file is opened
//! by walking back from its end, block by block, to the first block marked as a header.

use crate::btree::{Kind, Reduce, Root};
use crate::error::{Error, Result};
use crate::format::{
    BLOCK_BYTES, Checksum, Fields, HEADER_BYTES_MAX, MARKER_DATA, MARKER_HEADER, MARKER_METADATA, POSITION_MAX,
    Version, put_uint,
};
use crate::source::Source;

/// What to do about a block that claims to be a header and is not whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Refuse the file: an acknowledged commit may be in there.
    Strict,
    /// Step over it to an older header, which is whole but may lack acknowledged commits.
    Recovery,
}

/// Which header comes before this one, as version 14 records it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Previous {
    /// The version does not say.
    Unknown,
    /// This is the first.
    None,
    /// It should be here. A file that began without a header says 0 although block 0 holds data.
    At(u64),
}

/// One commit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// Position in the file, a multiple of 4096.
    pub at: u64,
    pub version: Version,
    /// Highest seqno committed.
    pub update_seq: u64,
    /// Tombstones up to here may have been purged.
    pub purge_seq: u64,
    /// Unused by everybody; carried along.
    pub purge_ptr: u64,
    /// Nanoseconds since the Unix epoch as the committer told them; 0 before version 13 and in creation headers.
    pub timestamp_ns: u64,
    pub by_seq: Option<Root>,
    pub by_id: Option<Root>,
    pub local: Option<Root>,
    pub previous: Previous,
    /// Block 0 holds a metadata header (version 14).
    pub has_metadata: bool,
}

impl Header {
    pub fn empty(version: Version) -> Header {
        let previous = if version < Version::V14 { Previous::Unknown } else { Previous::None };
        Header {
            at: 0,
            version,
            update_seq: 0,
            purge_seq: 0,
            purge_ptr: 0,
            timestamp_ns: 0,
            by_seq: None,
            by_id: None,
            local: None,
            previous,
            has_metadata: false,
        }
    }

    fn counts(&self) -> Reduce {
        self.by_id.as_ref().map_or(Reduce::default(), |root| root.reduce)
    }

    /// Documents alive.
    pub fn doc_count(&self) -> u64 {
        self.counts().alive
    }

    /// Tombstones.
    pub fn deleted_count(&self) -> u64 {
        self.counts().deleted
    }

    /// Bytes on disk of the bodies of all documents, tombstones included.
    pub fn body_bytes(&self) -> u64 {
        self.counts().body_bytes
    }

    /// Bytes of the file that this commit needs: bodies and nodes, without markers, gaps and headers. What the file
    /// holds beyond it, compaction would give back.
    pub fn live_bytes(&self) -> u64 {
        let nodes = [&self.by_seq, &self.by_id, &self.local];
        nodes.into_iter().flatten().fold(self.body_bytes(), |sum, root| sum.saturating_add(root.subtree_bytes))
    }

    /// The block that holds this header, starting with `marker`.
    pub(crate) fn encode(&self, marker: u8) -> Vec<u8> {
        let roots = [(Kind::BySeq, &self.by_seq), (Kind::ById, &self.by_id), (Kind::Local, &self.local)]
            .map(|(kind, root)| root.as_ref().map_or(Vec::new(), |root| root.encode(kind)));
        let mut body = vec![self.version.byte()];
        put_uint(&mut body, self.update_seq, 6);
        put_uint(&mut body, self.purge_seq, 6);
        put_uint(&mut body, self.purge_ptr, 6);
        for root in &roots {
            put_uint(&mut body, root.len() as u64, 2);
        }
        if self.version >= Version::V13 {
            put_uint(&mut body, self.timestamp_ns, 8);
        }
        if self.version >= Version::V14 {
            let previous = match self.previous {
                Previous::At(at) => at,
                Previous::None | Previous::Unknown => POSITION_MAX,
            };
            put_uint(&mut body, previous << 1 | u64::from(self.has_metadata), 6);
        }
        assert_eq!(body.len(), self.version.header_fixed_bytes());
        body.extend(roots.into_iter().flatten());

        let mut block = vec![marker];
        put_uint(&mut block, body.len() as u64 + 4, 4);
        put_uint(&mut block, u64::from(self.version.checksum().of(&body)), 4);
        block.extend(body);
        block
    }

    fn decode(source: &Source, at: u64, body: &[u8], crc: u32) -> Result<Header> {
        let corrupt = |what| source.corrupt(at, what);
        let found = Checksum::Crc32c.of(body);
        // Which checksum applies is told by the version, which is not to be believed before a checksum agrees.
        let agrees = if found == crc {
            Checksum::Crc32c
        } else if Checksum::Crc32.of(body) == crc {
            Checksum::Crc32
        } else {
            return Err(Error::Checksum { path: source.path.clone(), offset: at, found, expected: crc });
        };
        let mut fields = Fields(body);
        let version = fields.uint(1).ok_or_else(|| corrupt("an empty header"))? as u8;
        let Some(version) = Version::from_byte(version) else {
            return Err(Error::UnknownVersion { path: source.path.clone(), offset: at, version });
        };
        if version.checksum() != agrees {
            let found = version.checksum().of(body);
            return Err(Error::Checksum { path: source.path.clone(), offset: at, found, expected: crc });
        }
        let header = Header::decode_fields(&mut fields, at, version).map_err(corrupt)?;
        if !fields.0.is_empty() {
            return Err(corrupt("a header longer than its parts"));
        }
        Ok(header)
    }

    fn decode_fields(fields: &mut Fields<'_>, at: u64, version: Version) -> Result<Header, &'static str> {
        const SHORT: &str = "a header shorter than its version demands";
        let mut uint = |n| fields.uint(n).ok_or(SHORT);
        let mut header = Header { at, update_seq: uint(6)?, purge_seq: uint(6)?, ..Header::empty(version) };
        header.purge_ptr = uint(6)?;
        if header.purge_ptr > at {
            return Err("a header's purge pointer points beyond it");
        }
        let sizes = [uint(2)? as usize, uint(2)? as usize, uint(2)? as usize];
        if version >= Version::V13 {
            header.timestamp_ns = uint(8)?;
        }
        if version >= Version::V14 {
            let packed = uint(6)?;
            header.has_metadata = packed & 1 == 1;
            header.previous = match packed >> 1 {
                POSITION_MAX => Previous::None,
                before => Previous::At(before),
            };
        }
        let mut root = |kind, size| match size {
            0 => Ok(None),
            _ => Root::decode(kind, fields.take(size).ok_or("a header's roots are longer than it")?, at).map(Some),
        };
        header.by_seq = root(Kind::BySeq, sizes[0])?;
        header.by_id = root(Kind::ById, sizes[1])?;
        header.local = root(Kind::Local, sizes[2])?;
        Ok(header)
    }
}

/// What a block turned out to be.
enum Block {
    Header(Box<Header>),
    Other,
}

/// The newest header of the file.
pub(crate) fn newest(source: &Source, mode: Mode) -> Result<Header> {
    let eof = source.size()?;
    // A lone marker byte at the very end is not a block yet.
    match eof.checked_sub(2) {
        Some(last) => scan_back(source, last - last % BLOCK_BYTES, eof, mode),
        None => Err(Error::NoHeader { path: source.path.clone() }),
    }
}

/// The header before `header`.
pub(crate) fn before(source: &Source, header: &Header, mode: Mode) -> Result<Header> {
    if header.previous == Previous::None || header.at == 0 {
        return Err(Error::NoHeader { path: source.path.clone() });
    }
    if let Previous::At(at) = header.previous
        && at < header.at
        && at.is_multiple_of(BLOCK_BYTES)
        && let Ok(Block::Header(found)) = block(source, at, header.at)
    {
        return Ok(*found);
    }
    scan_back(source, header.at - BLOCK_BYTES, header.at, mode)
}

/// The header at exactly `at`.
pub(crate) fn at(source: &Source, at: u64) -> Result<Header> {
    if !at.is_multiple_of(BLOCK_BYTES) {
        return Err(source.corrupt(at, "headers start at multiples of 4096"));
    }
    match block(source, at, source.size()?)? {
        Block::Header(header) => Ok(*header),
        Block::Other => Err(source.corrupt(at, "not a header")),
    }
}

fn scan_back(source: &Source, from: u64, eof: u64, mode: Mode) -> Result<Header> {
    let mut stepped_over = None;
    let mut at = from;
    loop {
        match block(source, at, eof) {
            Ok(Block::Header(header)) => return Ok(*header),
            Ok(Block::Other) => {}
            Err(e) if e.is_damage() && mode == Mode::Recovery => stepped_over = stepped_over.or(Some(e)),
            Err(e) => return Err(e),
        }
        match at.checked_sub(BLOCK_BYTES) {
            Some(before) => at = before,
            None => return Err(stepped_over.unwrap_or(Error::NoHeader { path: source.path.clone() })),
        }
    }
}

/// Nothing from `end` on is looked at: the file may end there, and asking it would cost another read.
fn block(source: &Source, at: u64, end: u64) -> Result<Block> {
    let mut buf = [0; 1 + 4 + HEADER_BYTES_MAX as usize];
    let room = end.saturating_sub(at).min(buf.len() as u64) as usize;
    let got = source.read_up_to(&mut buf[..room], at)?;
    match buf[..got].first() {
        Some(&MARKER_DATA | &MARKER_METADATA) => Ok(Block::Other),
        Some(&MARKER_HEADER) => match framed(source, at, &buf[1..got], HEADER_BYTES_MAX)
            .and_then(|(body, crc)| Header::decode(source, at, body, crc))
        {
            Ok(header) => Ok(Block::Header(Box::new(header))),
            // Compaction before 7.0 left this byte in front of plain data.
            Err(e) if at == 0 && e.is_damage() => Ok(Block::Other),
            Err(e) => Err(e),
        },
        Some(_) => Err(source.corrupt(at, "a block that is neither data nor a header")),
        None => Err(Error::Truncated { path: source.path.clone(), offset: at }),
    }
}

/// Takes the frame of a header-like chunk off: its body, and the checksum it should have.
fn framed<'a>(source: &Source, at: u64, bytes: &'a [u8], len_max: u64) -> Result<(&'a [u8], u32)> {
    let truncated = || Error::Truncated { path: source.path.clone(), offset: at };
    let mut fields = Fields(bytes);
    let len = fields.uint(4).ok_or_else(truncated)?;
    if !(4..=len_max).contains(&len) {
        return Err(source.corrupt(at, "a header with an impossible length"));
    }
    let crc = fields.uint(4).ok_or_else(truncated)? as u32;
    Ok((fields.take(len as usize - 4).ok_or_else(truncated)?, crc))
}

/// Refuses a file whose chunks are encrypted.
pub(crate) fn refuse_encrypted(source: &Source, header: &Header) -> Result<()> {
    if !header.has_metadata {
        return Ok(());
    }
    let mut buf = vec![0; BLOCK_BYTES as usize];
    let got = source.read_up_to(&mut buf, 0)?;
    if buf[..got].first() != Some(&MARKER_METADATA) {
        return Err(source.corrupt(0, "the header speaks of metadata in block 0, which holds none"));
    }
    let (body, expected) = framed(source, 0, &buf[1..got], BLOCK_BYTES)?;
    let found = Checksum::Crc32c.of(body);
    if found != expected {
        return Err(Error::Checksum { path: source.path.clone(), offset: 0, found, expected });
    }
    let mut fields = Fields(body);
    let key_id = fields.uint(1).and_then(|_| fields.uint(1)).and_then(|n| fields.take(n as usize));
    match key_id {
        Some([]) => Ok(()),
        Some(id) => {
            Err(Error::Encrypted { path: source.path.clone(), key_id: String::from_utf8_lossy(id).into_owned() })
        }
        None => Err(source.corrupt(0, "metadata too short for its key id")),
    }
}
