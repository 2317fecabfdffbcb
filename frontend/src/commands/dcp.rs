//! The replication protocol: a connection that opened it is sent changes, as fast as it takes them.
//!
//! What is asked for is put to the connection's producer here; what the producer has to send is taken out of it by the
//! worker, behind the replies.

use std::sync::Arc;

use engine::{Outcome, Waiter};
use replication::Producer;
use types::{Seqno, VbId, VbState};
use wire::dcp::{Message, Open, Packet, StreamFlags, StreamRequest};
use wire::{Feature, Request, Status};

use super::{Context, Refusal, einval, not_supported};
use crate::auth::Role;
use crate::mailbox::{Letter, Mailbox};
use crate::table::Slot;

/// Has the worker look at a connection.
struct Knock {
    mailbox: Arc<Mailbox>,
    slot: Slot,
}

impl replication::Wake for Knock {
    fn wake(&self) {
        self.mailbox.post(Letter::Look { slot: self.slot });
    }
}

impl Context<'_> {
    pub(super) fn dcp(&mut self, request: &Request<'_>, message: &Message<'_>) -> Result<(), Refusal> {
        let packet = Packet {
            vb: request.vbucket,
            opaque: request.opaque,
            stream_id: request.frames.stream_id,
            message: *message,
        };
        match message {
            Message::Open(open) => self.open_dcp(open),
            Message::GetFailoverLog => self.get_failover_log(request.vbucket),
            Message::Control { name: b"consumer_name", .. } if !self.is_admin() => {
                Err((Status::Eaccess, "only an administrator's acknowledgements count as a replica's".to_owned()))
            }
            Message::Control { name, value } => {
                self.producer()?.control(name, value).map_err(refused)?;
                self.done()
            }
            Message::StreamRequest(stream) if stream.flags.has(StreamFlags::TAKEOVER) && !self.is_admin() => {
                Err((Status::Eaccess, "only an administrator moves vBuckets".to_owned()))
            }
            Message::StreamRequest(stream) => self.open_stream(&packet, stream),
            Message::CloseStream if self.session.producer.is_none() && self.is_admin() => {
                self.bucket()?.bucket.end_takeover(request.vbucket, "it was called off");
                self.done()
            }
            Message::CloseStream => {
                let mut end = Vec::new();
                self.producer()?.close_stream(&packet, &mut end).map_err(refused)?;
                self.done()?;
                self.out.extend_from_slice(&end);
                Ok(())
            }
            Message::BufferAck(bytes) => {
                self.producer()?.buffer_ack(*bytes);
                Ok(())
            }
            Message::SeqnoAck(seqno) => self.note_ack(&packet, *seqno),
            // A consumer may ask whether we are there as well.
            Message::Noop => self.done(),
            Message::AddStream(StreamFlags::TAKEOVER) => self.take_over(request.vbucket),
            Message::AddStream(_) => not_supported("consuming by other means than the map, but for a takeover,"),
            _ => einval("only a producer says that"),
        }
    }

    fn is_admin(&self) -> bool {
        self.session.identity.as_ref().is_some_and(|identity| identity.role == Role::Admin)
    }

    fn producer(&mut self) -> Result<&mut Producer, Refusal> {
        self.session.producer.as_deref_mut().ok_or_else(|| (Status::Einval, "open a DCP connection first".to_owned()))
    }

    fn open_dcp(&mut self, open: &Open<'_>) -> Result<(), Refusal> {
        if self.session.producer.is_some() {
            self.session.closing = true;
            return einval("the connection is a DCP connection already");
        }
        if self.session.identity.is_none() {
            return Err((Status::Eaccess, "reading a whole bucket needs a login".to_owned()));
        }
        if self.has(Feature::UnorderedExecution) {
            return not_supported("DCP on a connection with unordered execution");
        }
        if !self.session.in_flight.is_empty() {
            return not_supported("opening DCP while requests are under way");
        }
        let bucket = self.bucket()?.bucket.clone();
        let wake = Arc::new(Knock { mailbox: Arc::clone(self.mailbox), slot: self.session.slot });
        let (features, registry, now) = (self.session.features, &self.shared.streams, self.shared.now());
        let producer = Producer::open(&bucket, open, features, registry, wake, now).map_err(refused)?;
        self.session.producer = Some(Box::new(producer));
        self.done()
    }

    /// Has a replica here become active in place of the node that it follows. Answered when it is, or when nothing came of it;
    /// CLOSE_STREAM calls it off.
    fn take_over(&mut self, vb: VbId) -> Result<(), Refusal> {
        if !self.is_admin() {
            return Err((Status::Eaccess, "only an administrator moves vBuckets".to_owned()));
        }
        let bucket = self.bucket()?.bucket.clone();
        let is_active = bucket.vb_state(vb) == Some(VbState::Active);
        if !is_active && !self.shared.replicas.follows(bucket.name(), vb) {
            return Err((Status::Etmpfail, "by the map this node does not follow the active one".to_owned()));
        }
        let ticket = self.ticket();
        let mailbox = self.mailbox;
        let outcome = bucket.begin_takeover(vb, &|| Waiter::new(mailbox.clone(), ticket));
        match outcome {
            Outcome::Done(result) => self.answer(result),
            Outcome::Pending => {
                self.wait(ticket, true);
                self.shared.replicas.role_changed(bucket.name());
            }
        }
        Ok(())
    }

    /// A replica has what every prepare up to `seqno` asks of it.
    fn note_ack(&mut self, packet: &Packet<'_>, seqno: Seqno) -> Result<(), Refusal> {
        let bucket = self.bucket()?.bucket.clone();
        let producer = self.producer()?;
        if !producer.seqno_ack(packet, seqno) {
            return Err((Status::KeyEnoent, "there is no such stream".to_owned()));
        }
        let Some(replica) = producer.replica() else { return Ok(()) };
        bucket.seqno_acked(packet.vb, replica, seqno).map_err(|error| crate::errors::of_op(&error))
    }

    fn open_stream(&mut self, packet: &Packet<'_>, stream: &StreamRequest<'_>) -> Result<(), Refusal> {
        let opened = self.producer()?.stream_request(packet, stream);
        match opened {
            Ok(histories) => {
                let bucket = self.bucket()?.bucket.clone();
                if let Some(replica) = self.producer()?.replica() {
                    let began = bucket.replica_began(packet.vb, replica, stream.start);
                    began.map_err(|error| crate::errors::of_op(&error))?;
                }
                self.value(Default::default(), &histories)
            }
            Err(replication::Refusal { rollback: Some(seqno), .. }) => {
                let reply = self.blank(Status::Rollback);
                self.put(wire::Reply { value: (&seqno.0.to_be_bytes(), &[]), ..reply });
                Ok(())
            }
            Err(refusal) => Err(refused(refusal)),
        }
    }

    /// What is said about vBuckets when nobody asked for a stream: `GET_FAILOVER_LOG`, by either opcode.
    pub(super) fn get_failover_log(&mut self, vb: VbId) -> Result<(), Refusal> {
        let entries = self.bucket()?.bucket.failover_log(vb).map_err(|e| crate::errors::of_op(&e))?;
        let mut value = Vec::with_capacity(entries.len() * 16);
        wire::dcp::push_failover_log(&mut value, entries.iter().map(|entry| (entry.uuid, entry.seqno)));
        self.value(Default::default(), &value)
    }
}

fn refused(refusal: replication::Refusal) -> Refusal {
    (refusal.status, refusal.context.into_owned())
}
