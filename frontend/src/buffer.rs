//! Connection buffers, lent by the worker for as long as there are bytes in them: an idle connection holds none.

use crate::counts::CONNECTION_BUFFER_BYTES;

/// Bytes of a lent buffer. Larger frames grow the buffer they arrive in, and it is dropped afterwards.
pub const LENT_LEN: usize = 32 * 1024;
/// Buffers a worker keeps for lending.
const SPARE_MAX: usize = 64;

/// Bytes whose memory is counted in [`CONNECTION_BUFFER_BYTES`], as of the last look.
#[derive(Default)]
struct Counted {
    bytes: Vec<u8>,
    counted: usize,
}

impl Counted {
    fn zeros(len: usize) -> Counted {
        let mut new = Counted { bytes: vec![0; len], counted: 0 };
        new.count();
        new
    }

    /// Looks how large it is now.
    fn count(&mut self) {
        let now = self.bytes.capacity();
        if now != self.counted {
            CONNECTION_BUFFER_BYTES.add(now as i64 - self.counted as i64);
            self.counted = now;
        }
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        if self.counted > 0 {
            CONNECTION_BUFFER_BYTES.sub(self.counted as i64);
        }
    }
}

/// A worker's spare buffers.
#[derive(Default)]
pub struct Lender {
    /// Each `LENT_LEN` long.
    inputs: Vec<Counted>,
    /// Each empty.
    outputs: Vec<Counted>,
}

/// Received bytes that are not yet taken care of.
#[derive(Default)]
pub struct Input {
    /// The bytes are `start..end`; what is behind is room.
    buffer: Counted,
    start: usize,
    end: usize,
}

impl Input {
    pub fn filled(&self) -> &[u8] {
        &self.buffer.bytes[self.start..self.end]
    }

    pub fn len(&self) -> usize {
        self.end - self.start
    }

    /// Room to read into, when `need` bytes are wanted in all. Grows by doubling with what has really arrived, whatever a
    /// header announces.
    pub fn room(&mut self, need: usize, lender: &mut Lender) -> &mut [u8] {
        if self.buffer.bytes.is_empty() {
            self.buffer = lender.inputs.pop().unwrap_or_else(|| Counted::zeros(LENT_LEN));
        }
        if self.buffer.bytes.len() - self.start < need && self.start > 0 {
            self.buffer.bytes.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
        if self.end == self.buffer.bytes.len() {
            self.buffer.bytes.resize(self.buffer.bytes.len() * 2, 0);
            self.buffer.count();
        }
        &mut self.buffer.bytes[self.end..]
    }

    /// `count` bytes were read into the room.
    pub fn received(&mut self, count: usize) {
        self.end += count;
        assert!(self.end <= self.buffer.bytes.len(), "no more than there was room for");
    }

    /// The first `count` bytes are dealt with.
    pub fn consume(&mut self, count: usize) {
        self.start += count;
        assert!(self.start <= self.end, "no more than was received");
    }

    /// Gives the buffer back if nothing is in it.
    pub fn settle(&mut self, lender: &mut Lender) {
        if self.start < self.end || self.buffer.bytes.is_empty() {
            return;
        }
        let buffer = std::mem::take(&mut self.buffer);
        (self.start, self.end) = (0, 0);
        if buffer.bytes.len() == LENT_LEN && lender.inputs.len() < SPARE_MAX {
            lender.inputs.push(buffer);
        }
    }
}

/// Replies on their way out.
#[derive(Default)]
pub struct Output {
    buffer: Counted,
    sent: usize,
}

impl Output {
    /// Where replies are appended.
    pub fn tail(&mut self, lender: &mut Lender) -> &mut Vec<u8> {
        if self.buffer.bytes.capacity() == 0 {
            self.buffer = lender.outputs.pop().unwrap_or_default();
        }
        &mut self.buffer.bytes
    }

    /// Bytes in front of the tail that are sent already.
    pub fn sent_len(&self) -> usize {
        self.sent
    }

    pub fn unsent(&self) -> &[u8] {
        &self.buffer.bytes[self.sent..]
    }

    pub fn len(&self) -> usize {
        self.buffer.bytes.len() - self.sent
    }

    /// The first `count` unsent bytes are with the kernel.
    pub fn sent(&mut self, count: usize) {
        self.sent += count;
        assert!(self.sent <= self.buffer.bytes.len(), "no more than there was");
        if self.sent == self.buffer.bytes.len() {
            self.buffer.bytes.clear();
            self.sent = 0;
        }
        // Without this a client that always leaves a little unread would make the buffer grow for ever.
        if self.sent >= 1 << 20 && self.sent * 2 > self.buffer.bytes.len() {
            self.buffer.bytes.drain(..self.sent);
            self.sent = 0;
        }
    }

    /// Gives the buffer back if all is sent.
    pub fn settle(&mut self, lender: &mut Lender) {
        // The tail may have grown.
        self.buffer.count();
        if self.len() > 0 || self.buffer.bytes.capacity() == 0 {
            return;
        }
        let mut buffer = std::mem::take(&mut self.buffer);
        self.sent = 0;
        if buffer.bytes.capacity() <= LENT_LEN && lender.outputs.len() < SPARE_MAX {
            buffer.bytes.clear();
            lender.outputs.push(buffer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_come_out_in_order_however_they_arrive_and_the_buffer_goes_back_when_empty() {
        let mut lender = Lender::default();
        let mut input = Input::default();
        let mut next = 0u8;
        let mut expected = 0u8;
        for chunk in [1usize, 7, 40_000, 3, 100_000, 32 * 1024] {
            let mut left = chunk;
            while left > 0 {
                let room = input.room(chunk, &mut lender);
                let count = left.min(room.len());
                for byte in &mut room[..count] {
                    *byte = next;
                    next = next.wrapping_add(1);
                }
                input.received(count);
                left -= count;
            }
            let keep = usize::from(chunk != 3);
            for &byte in &input.filled()[..input.len() - keep] {
                assert_eq!(byte, expected);
                expected = expected.wrapping_add(1);
            }
            input.consume(input.len() - keep);
            input.settle(&mut lender);
        }
        input.consume(1);
        input.settle(&mut lender);
        assert_eq!(input.buffer.bytes.len(), 0);
        assert!(lender.inputs.iter().all(|b| b.bytes.len() == LENT_LEN));
    }

    #[test]
    fn a_reader_that_always_leaves_a_little_does_not_grow_the_output() {
        let (mut lender, mut output) = (Lender::default(), Output::default());
        for _ in 0..100 {
            output.tail(&mut lender).extend_from_slice(&[1; 1 << 20]);
            output.sent((1 << 20) - usize::from(output.len() == 1 << 20));
        }
        assert!(output.buffer.bytes.capacity() < 16 << 20, "{}", output.buffer.bytes.capacity());
    }
}
