//! How much the consumer has yet to say that it has dealt with.

/// Bytes sent and not acknowledged, against what the consumer has room for.
///
/// 1. Once the room is used up, nothing is sent until a fifth of it is free again: consumers count a few bytes less than
///    were sent for some messages, and acknowledge late.
#[derive(Debug, Default)]
pub(crate) struct Flow {
    /// 0: there is no such limit.
    room_bytes: u64,
    unacked_bytes: u64,
    is_shut: bool,
}

impl Flow {
    pub fn set_room(&mut self, bytes: u64) {
        self.room_bytes = bytes;
        self.look();
    }

    pub fn sent(&mut self, bytes: usize) {
        self.unacked_bytes += bytes as u64;
        self.look();
    }

    pub fn acked(&mut self, bytes: u32) {
        self.unacked_bytes = self.unacked_bytes.saturating_sub(bytes.into());
        self.look();
    }

    fn look(&mut self) {
        let free_from = self.room_bytes / 5 * 4;
        self.is_shut = match self.room_bytes {
            0 => false,
            room if self.unacked_bytes >= room => true,
            _ => self.is_shut && self.unacked_bytes >= free_from,
        };
    }

    pub fn is_shut(&self) -> bool {
        self.is_shut
    }

    pub fn unacked_bytes(&self) -> u64 {
        self.unacked_bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_consumer_is_left_alone_until_it_has_some_room_again() {
        let mut flow = Flow::default();
        flow.sent(1 << 30);
        assert!(!flow.is_shut());
        flow.acked(1 << 30);
        flow.set_room(1000);
        flow.sent(999);
        assert!(!flow.is_shut());
        flow.sent(50);
        assert!(flow.is_shut());
        flow.acked(240);
        assert!(flow.is_shut(), "{} of 1000", flow.unacked_bytes());
        flow.acked(10);
        assert!(!flow.is_shut());
        // More than was sent: a consumer that counts differently.
        flow.acked(u32::MAX);
        assert_eq!(flow.unacked_bytes(), 0);
    }
}
