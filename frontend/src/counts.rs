//! What the front end counts.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use metrics::{Counter, Gauge, Labelled, Timings, metrics};

metrics! {
    /// Connections open now.
    pub static CURR_CONNECTIONS: Gauge = "curr_connections";
    /// Bytes of connection buffers, those kept for the next connection included.
    pub static CONNECTION_BUFFER_BYTES: Gauge = "connection_buffer_bytes";
    /// Connections accepted.
    pub static TOTAL_CONNECTIONS: Counter = "total_connections";
    /// Times the listener found every slot of the connection table taken and paused.
    pub static CONNECTION_TABLE_FULL: Counter = "connection_table_full";
    /// Connections that were let into the places kept for an administrator.
    pub static CONNECTIONS_IN_RESERVE: Counter = "connections_in_reserve";
    /// Connections the server ended, by what for: login, idle, stalled, unsent or crowded.
    pub static CONNECTIONS_ENDED: Labelled<Counter> = "connections_ended" ["reason"];
    /// Connections that could not be accepted, most likely for want of descriptors.
    pub static ACCEPT_ERRORS: Counter = "accept_errors";
    /// Connections closed because their bytes were not this protocol.
    pub static PROTOCOL_ERRORS: Counter = "protocol_errors";
    /// Logins refused.
    pub static AUTH_ERRORS: Counter = "auth_errors";
    /// Bytes read from clients.
    pub static BYTES_READ: Counter = "bytes_read";
    /// Bytes written to clients.
    pub static BYTES_WRITTEN: Counter = "bytes_written";
    /// Reads of documents.
    pub static CMD_GET: Counter = "cmd_get";
    /// Writes of documents.
    pub static CMD_SET: Counter = "cmd_set";
    /// Reads that found their document.
    pub static GET_HITS: Counter = "get_hits";
    /// Reads that did not.
    pub static GET_MISSES: Counter = "get_misses";
    /// Requests answered with an error, by its name.
    pub static REPLY_ERRORS: Labelled<Counter> = "reply_errors" ["status"];
    /// From the arrival of a request to its reply, by bucket and operation.
    pub static OP_DURATION: Labelled<Timings> = "op_duration" ["bucket", "op"];
}

/// A bucket's histograms, found by opcode without a lock.
pub struct OpTimings {
    bucket: String,
    by_code: [OnceLock<Arc<Timings>>; 256],
}

impl OpTimings {
    /// `bucket`: empty for requests without one.
    pub fn of_bucket(bucket: &str) -> OpTimings {
        OpTimings { bucket: bucket.to_owned(), by_code: [const { OnceLock::new() }; 256] }
    }

    pub fn record(&self, code: u8, duration: Duration) {
        let timings =
            self.by_code[usize::from(code)].get_or_init(|| OP_DURATION.with(&[&self.bucket, wire::opcode::name(code)]));
        timings.record(duration);
    }
}

/// Errors by status, found without a lock.
pub struct ErrorCounts([OnceLock<Arc<Counter>>; 256]);

impl Default for ErrorCounts {
    fn default() -> ErrorCounts {
        ErrorCounts([const { OnceLock::new() }; 256])
    }
}

impl ErrorCounts {
    pub fn count(&self, status: wire::Status) {
        let Some(cell) = self.0.get(status as usize) else { return };
        cell.get_or_init(|| REPLY_ERRORS.with(&[status.name()])).inc();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_stat_name_is_unique() {
        let mut registry = metrics::Registry::new();
        registry.add(METRICS);
        registry.assert_every_stat_name_is_unique();
    }
}
