//! Connection buffers, lent by the worker for as long as there are bytes in them: an idle connection holds none.

/// Bytes of a lent buffer. Larger frames grow the buffer they arrive in, and it is dropped afterwards.
pub const LENT_LEN: usize = 32 * 1024;
/// Buffers a worker keeps for lending.
const SPARE_MAX: usize = 64;

/// A worker's spare buffers.
#[derive(Default)]
pub struct Lender {
    /// Each `LENT_LEN` long.
    inputs: Vec<Vec<u8>>,
    /// Each empty.
    outputs: Vec<Vec<u8>>,
}

/// Received bytes that are not yet taken care of.
#[derive(Default)]
pub struct Input {
    /// The bytes are `start..end`; what is behind is room.
    bytes: Vec<u8>,
    start: usize,
    end: usize,
}

impl Input {
    pub fn filled(&self) -> &[u8] {
        &self.bytes[self.start..self.end]
    }

    pub fn len(&self) -> usize {
        self.end - self.start
    }

    /// Room to read into, when `need` bytes are wanted in all. Grows by doubling with what has really arrived, whatever a
    /// header announces.
    pub fn room(&mut self, need: usize, lender: &mut Lender) -> &mut [u8] {
        if self.bytes.is_empty() {
            self.bytes = lender.inputs.pop().unwrap_or_else(|| vec![0; LENT_LEN]);
        }
        if self.bytes.len() - self.start < need && self.start > 0 {
            self.bytes.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
        if self.end == self.bytes.len() {
            self.bytes.resize(self.bytes.len() * 2, 0);
        }
        &mut self.bytes[self.end..]
    }

    /// `count` bytes were read into the room.
    pub fn received(&mut self, count: usize) {
        self.end += count;
        assert!(self.end <= self.bytes.len(), "no more than there was room for");
    }

    /// The first `count` bytes are dealt with.
    pub fn consume(&mut self, count: usize) {
        self.start += count;
        assert!(self.start <= self.end, "no more than was received");
    }

    /// Gives the buffer back if nothing is in it.
    pub fn settle(&mut self, lender: &mut Lender) {
        if self.start < self.end || self.bytes.is_empty() {
            return;
        }
        let bytes = std::mem::take(&mut self.bytes);
        (self.start, self.end) = (0, 0);
        if bytes.len() == LENT_LEN && lender.inputs.len() < SPARE_MAX {
            lender.inputs.push(bytes);
        }
    }
}

/// Replies on their way out.
#[derive(Default)]
pub struct Output {
    bytes: Vec<u8>,
    sent: usize,
}

impl Output {
    /// Where replies are appended.
    pub fn tail(&mut self, lender: &mut Lender) -> &mut Vec<u8> {
        if self.bytes.capacity() == 0 {
            self.bytes = lender.outputs.pop().unwrap_or_default();
        }
        &mut self.bytes
    }

    /// Bytes in front of the tail that are sent already.
    pub fn sent_len(&self) -> usize {
        self.sent
    }

    pub fn unsent(&self) -> &[u8] {
        &self.bytes[self.sent..]
    }

    pub fn len(&self) -> usize {
        self.bytes.len() - self.sent
    }

    /// The first `count` unsent bytes are with the kernel.
    pub fn sent(&mut self, count: usize) {
        self.sent += count;
        assert!(self.sent <= self.bytes.len(), "no more than there was");
        if self.sent == self.bytes.len() {
            self.bytes.clear();
            self.sent = 0;
        }
        // Without this a client that always leaves a little unread would make the buffer grow for ever.
        if self.sent >= 1 << 20 && self.sent * 2 > self.bytes.len() {
            self.bytes.drain(..self.sent);
            self.sent = 0;
        }
    }

    /// Gives the buffer back if all is sent.
    pub fn settle(&mut self, lender: &mut Lender) {
        if self.len() > 0 || self.bytes.capacity() == 0 {
            return;
        }
        let mut bytes = std::mem::take(&mut self.bytes);
        self.sent = 0;
        if bytes.capacity() <= LENT_LEN && lender.outputs.len() < SPARE_MAX {
            bytes.clear();
            lender.outputs.push(bytes);
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
        assert_eq!(input.bytes.len(), 0);
        assert!(lender.inputs.iter().all(|b| b.len() == LENT_LEN));
    }

    #[test]
    fn a_reader_that_always_leaves_a_little_does_not_grow_the_output() {
        let (mut lender, mut output) = (Lender::default(), Output::default());
        for _ in 0..100 {
            output.tail(&mut lender).extend_from_slice(&[1; 1 << 20]);
            output.sent((1 << 20) - usize::from(output.len() == 1 << 20));
        }
        assert!(output.bytes.capacity() < 16 << 20, "{}", output.bytes.capacity());
    }
}
