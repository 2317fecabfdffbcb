//! Reading and appending chunks: where block markers, checksums and short transfers are dealt with once.

use std::io;
use std::path::Path;
use std::sync::Arc;

use env::File;

use crate::error::{Error, Result, Step};
use crate::format::{
    BLOCK_BYTES, CHUNK_BYTES_MAX, CHUNK_FRAME_BYTES, Checksum, DATA_CHUNK_BIT, Fields, MARKER_DATA, POSITION_MAX,
    past_marker, put_uint, span,
};

/// A tree node and most documents come with one read of this size.
pub(crate) const READ_BYTES: u64 = 4096;
/// Appended bytes are held back until there are this many.
const WRITE_BYTES: usize = 256 * 1024;

/// A file to read chunks from, and the name it goes by in errors.
#[derive(Clone)]
pub(crate) struct Source {
    pub file: Arc<dyn File>,
    pub path: Arc<Path>,
}

pub(crate) struct Chunk {
    pub payload: Vec<u8>,
    /// Frame and payload, without markers.
    pub size: u64,
}

impl Source {
    pub fn corrupt(&self, offset: u64, what: &'static str) -> Error {
        Error::Corrupt { path: self.path.clone(), offset, what }
    }

    pub fn io(&self, op: &'static str, offset: u64) -> impl FnOnce(io::Error) -> Error {
        move |source| Error::Io { op, path: self.path.clone(), offset, source }
    }

    pub fn size(&self) -> Result<u64> {
        self.file.size().map_err(self.io("size of", 0))
    }

    /// Fills `buf` from `at` as far as the file goes; how far is the answer.
    pub fn read_up_to(&self, buf: &mut [u8], at: u64) -> Result<usize> {
        let mut done = 0;
        while done < buf.len() {
            match self.file.read_at(&mut buf[done..], at + done as u64) {
                Ok(0) => break,
                Ok(n) => done += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(self.io("read", at)(e)),
            }
        }
        Ok(done)
    }

    /// The data chunk at `at`, which must end at or before `end`. `guess` is how many bytes to read at first.
    pub fn chunk(&self, at: u64, end: u64, guess: u64, checksum: Checksum) -> Result<Chunk> {
        let start = past_marker(at);
        let room = end.saturating_sub(start);
        if room < span(start, CHUNK_FRAME_BYTES) {
            return Err(self.corrupt(at, "a chunk is said to lie beyond the header that refers to it"));
        }
        let mut data = Vec::new();
        let mut odd = self.extend(&mut data, start, guess.max(span(start, CHUNK_FRAME_BYTES)).min(room))?;

        let mut frame = Fields(&data);
        let (Some(len), Some(expected)) = (frame.uint(4), frame.uint(4)) else {
            return Err(Error::Truncated { path: self.path.clone(), offset: at });
        };
        let (len, expected) = (len as u32, expected as u32);
        if len & DATA_CHUNK_BIT == 0 {
            return Err(self.corrupt(at, "a chunk's length lacks the bit that marks data"));
        }
        let size = u64::from(len & !DATA_CHUNK_BIT) + CHUNK_FRAME_BYTES;
        let whole = span(start, size);
        if whole > room {
            return Err(self.corrupt(at, "a chunk's length reaches beyond the header that refers to it"));
        }
        let have = span(start, data.len() as u64);
        if (data.len() as u64) < size {
            odd = odd.or(self.extend(&mut data, start + have, whole - have)?);
        }
        if (data.len() as u64) < size {
            return Err(Error::Truncated { path: self.path.clone(), offset: at });
        }
        if let Some(marker) = odd.filter(|&marker| marker < start + whole) {
            return Err(self.corrupt(marker, "a block that is not data, though a chunk runs through it"));
        }
        data.truncate(size as usize);
        data.drain(..CHUNK_FRAME_BYTES as usize);
        let found = checksum.of(&data);
        if found != expected {
            return Err(Error::Checksum { path: self.path.clone(), offset: at, found, expected });
        }
        Ok(Chunk { payload: data, size })
    }

    /// Appends `raw` bytes of the file from `from` to `data`, leaving out the markers among them. Returns where the
    /// first of these is that does not mark data: no matter if the chunk has ended by there.
    fn extend(&self, data: &mut Vec<u8>, from: u64, raw: u64) -> Result<Option<u64>> {
        let old = data.len();
        data.resize(old + raw as usize, 0);
        let got = self.read_up_to(&mut data[old..], from)?;
        data.truncate(old + got);
        // Everything in front of the first marker is in place already; each later run moves back by one more byte.
        let mut marker = (BLOCK_BYTES - from % BLOCK_BYTES) % BLOCK_BYTES;
        let mut kept = old + (marker as usize).min(got);
        let mut odd = None;
        while (marker as usize) < got {
            if data[old + marker as usize] != MARKER_DATA {
                odd = odd.or(Some(from + marker));
            }
            let run = old + marker as usize + 1..old + got.min((marker + BLOCK_BYTES) as usize);
            let len = run.len();
            data.copy_within(run, kept);
            kept += len;
            marker += BLOCK_BYTES;
        }
        data.truncate(kept);
        Ok(odd)
    }
}

/// Writes chunks at the end of a file, a few large writes at a time.
/// 1. Nothing below the position it started at is ever touched.
/// 2. Every block it begins starts with the data marker.
/// 3. What it has not flushed cannot be read back: see [`Appender::flush`].
/// 4. After a failed write it refuses everything: what it would write next belongs behind bytes that may be missing.
pub(crate) struct Appender {
    source: Source,
    checksum: Checksum,
    /// Where `held[0]` goes.
    from: u64,
    held: Vec<u8>,
    broken: bool,
    encoder: snap::raw::Encoder,
}

impl Appender {
    pub fn new(source: Source, checksum: Checksum, at: u64) -> Appender {
        Appender { source, checksum, from: at, held: Vec::new(), broken: false, encoder: snap::raw::Encoder::new() }
    }

    /// At the start of an empty file. Its first byte is written now, because nothing may lie at position 0: there, a
    /// document would seem to have no body.
    pub fn at_start(source: Source, checksum: Checksum) -> Appender {
        Appender { held: vec![MARKER_DATA], ..Appender::new(source, checksum, 0) }
    }

    pub fn source(&self) -> &Source {
        &self.source
    }

    pub fn position(&self) -> u64 {
        self.from + self.held.len() as u64
    }

    pub fn compress(&mut self, bytes: &[u8]) -> Result<Vec<u8>> {
        self.encoder.compress_vec(bytes).map_err(|_| Error::Limit {
            what: "bytes to compress",
            value: bytes.len() as u64,
            max: u64::from(u32::MAX),
        })
    }

    /// Appends a data chunk; returns its position and its size on disk.
    pub fn chunk(&mut self, payload: &[u8]) -> Result<(u64, u64)> {
        if payload.len() as u64 > CHUNK_BYTES_MAX {
            return Err(Error::Limit { what: "bytes of a chunk", value: payload.len() as u64, max: CHUNK_BYTES_MAX });
        }
        let at = self.position();
        let end = at.saturating_add(span(past_marker(at), payload.len() as u64 + CHUNK_FRAME_BYTES));
        if end > POSITION_MAX {
            return Err(Error::Limit { what: "file size in bytes", value: end, max: POSITION_MAX });
        }
        let mut frame = Vec::with_capacity(CHUNK_FRAME_BYTES as usize);
        put_uint(&mut frame, u64::from(payload.len() as u32 | DATA_CHUNK_BIT), 4);
        put_uint(&mut frame, u64::from(self.checksum.of(payload)), 4);
        self.bytes(&frame)?;
        self.bytes(payload)?;
        Ok((at, payload.len() as u64 + CHUNK_FRAME_BYTES))
    }

    fn bytes(&mut self, mut bytes: &[u8]) -> Result<()> {
        while !bytes.is_empty() {
            if self.held.len() >= WRITE_BYTES {
                self.flush()?;
            }
            if self.position().is_multiple_of(BLOCK_BYTES) {
                self.held.push(MARKER_DATA);
            }
            let room = (BLOCK_BYTES - self.position() % BLOCK_BYTES) as usize;
            let (now, later) = bytes.split_at(room.min(bytes.len()));
            self.held.extend_from_slice(now);
            bytes = later;
        }
        Ok(())
    }

    /// Fills up the last block with zeros, then appends `block` as the start of a new one; returns its position.
    pub fn block(&mut self, block: &[u8]) -> Result<u64> {
        let at = self.position().next_multiple_of(BLOCK_BYTES);
        self.held.resize((at - self.from) as usize, 0);
        self.held.extend_from_slice(block);
        self.flush()?;
        Ok(at)
    }

    /// Hands everything held back to the file.
    pub fn flush(&mut self) -> Result<()> {
        let done = match self.broken {
            true => Err(io::Error::other("an earlier write of this batch failed")),
            false => env::write_all_at(&*self.source.file, &self.held, self.from),
        };
        self.broken = done.is_err();
        self.from += self.held.len() as u64;
        self.held.clear();
        done.map_err(|source| Error::Commit { step: Step::Write, path: self.source.path.clone(), source })
    }
}
