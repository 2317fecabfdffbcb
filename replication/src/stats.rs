//! What all producers and consumers of this node count.

use metrics::{Counter, Gauge};

metrics::metrics! {
    /// Replication connections that are served now.
    pub static DCP_PRODUCERS: Gauge = "dcp_producers";
    /// Streams that are open now.
    pub static DCP_STREAMS: Gauge = "dcp_streams";
    /// Streams that read a file now, or wait for their turn to.
    pub static DCP_BACKFILLS: Gauge = "dcp_backfills";
    /// Changes sent to consumers.
    pub static DCP_ITEMS_SENT: Counter = "dcp_items_sent";
    /// Bytes sent to consumers.
    pub static DCP_BYTES_SENT: Counter = "dcp_bytes_sent";
    /// Streams that began to read a file, because the changelog did not reach back far enough.
    pub static DCP_BACKFILLS_BEGUN: Counter = "dcp_backfills_begun";
    /// Streams that were left behind by the changelog, as their consumer was too slow for it.
    pub static DCP_STREAMS_LEFT_BEHIND: Counter = "dcp_streams_left_behind";
    /// Consumers that were told to roll back.
    pub static DCP_ROLLBACKS: Counter = "dcp_rollbacks";
    /// Replication connections to other nodes that are open now.
    pub static DCP_CONSUMERS: Gauge = "dcp_consumers";
    /// Changes that replicas here took from other nodes.
    pub static DCP_ITEMS_RECEIVED: Counter = "dcp_items_received";
    /// Times that the stream of a replica here ended or was refused, and was begun anew after a pause.
    pub static DCP_STREAMS_RESTARTED: Counter = "dcp_streams_restarted";
    /// Times that a replica here went back to an earlier state.
    pub static DCP_ROLLBACKS_DONE: Counter = "dcp_rollbacks_done";
}
