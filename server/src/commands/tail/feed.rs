//! The other end of a DCP connection, for one that only reads: opens a stream of each vBucket, says when it has room again,
//! and goes back where it is told to.

use std::io::{Read, Write};
use std::net::TcpStream;

use anyhow::{Context, Result, bail};
use types::{Seqno, VbId, VbUuid};
use wire::dcp::{EndReason, failover_log, rollback_seqno, vb_seqnos};
use wire::dcp::{Message, Open, OpenFlags, Packet, SnapshotMarker, StreamFlags, StreamRequest};
use wire::{FeatureSet, Frame, FrameReader, Magic, Next, Opcode, Side, Status};

use super::place::{Place, Places};

/// What the server may send before we say that we have dealt with it.
const BUFFER_BYTES: usize = 4 << 20;

/// Something to tell.
pub enum News<'a> {
    Message(VbId, Message<'a>),
    /// What was told of a vBucket beyond this seqno is not so any more.
    Rollback(VbId, Seqno),
}

/// 1. A place moves when what leads to it has been handed out.
pub struct Feed {
    stream: TcpStream,
    input: Vec<u8>,
    /// Of `input`, dealt with.
    used: usize,
    features: FeatureSet,
    unacked: usize,
    pub places: Places,
}

impl Feed {
    /// Makes a logged-in connection on a bucket one that is fed. `name` tells it from others of the bucket.
    pub fn open(stream: TcpStream, features: FeatureSet, name: &str) -> Result<Feed> {
        stream.set_read_timeout(None)?;
        let mut feed = Feed { stream, input: Vec::new(), used: 0, features, unacked: 0, places: Places::new() };
        let flags = OpenFlags::PRODUCER.with(OpenFlags::INCLUDE_DELETE_TIMES);
        feed.ask(Message::Open(Open { flags, name: name.as_bytes(), details: b"" }))?;
        feed.ask(Message::Control { name: b"connection_buffer_size", value: BUFFER_BYTES.to_string().as_bytes() })?;
        feed.ask(Message::Control { name: b"enable_expiry_opcode", value: b"true" })?;
        Ok(feed)
    }

    /// The vBuckets the server has, and how far each is.
    pub fn seqnos(&mut self) -> Result<Vec<(VbId, Seqno)>> {
        self.write(&wire::client::RequestFrame::new(Opcode::GetAllVbSeqnos).to_bytes())?;
        let value = self.answer()?;
        vb_seqnos(&value).context("the server's list of vBuckets is cut short")
    }

    /// The vBucket's present history.
    pub fn uuid(&mut self, vb: VbId) -> Result<VbUuid> {
        self.say(Packet { vb, ..Packet::new(Message::GetFailoverLog) })?;
        let value = self.answer()?;
        let newest = failover_log(&value).and_then(|log| log.first().copied());
        Ok(newest.context("the server's failover log is cut short")?.0)
    }

    /// Asks for what comes after a place. The answer is among the news.
    pub fn follow(&mut self, vb: VbId, place: Place) -> Result<()> {
        self.places.insert(vb, place);
        let Place { uuid, seqno: start, snap_start, snap_end } = place;
        let (flags, end) = (StreamFlags::ACTIVE_ONLY, Seqno(u64::MAX));
        let request = StreamRequest { flags, start, end, uuid, snap_start, snap_end, filter: b"" };
        // The opaque comes back with all that is said of the stream.
        let packet = Packet { vb, opaque: vb.0.into(), ..Packet::new(Message::StreamRequest(request)) };
        self.say(packet)
    }

    /// A handle by which another thread ends the reading, or one waits for something to read.
    pub fn stopper(&self) -> Result<TcpStream> {
        Ok(self.stream.try_clone()?)
    }

    /// Hands out what has come, until there is no more of it; then waits for more. `idle` is called before each wait, and may
    /// do the waiting.
    /// Returns when the connection ends.
    pub fn run(
        &mut self,
        tell: &mut impl FnMut(News<'_>) -> Result<()>,
        idle: &mut impl FnMut() -> Result<()>,
    ) -> Result<()> {
        loop {
            let input = std::mem::take(&mut self.input);
            let mut used = self.used;
            let mut outcome = Ok(());
            while outcome.is_ok()
                && let Next::Frame(frame) = FrameReader::new(Side::Client).next(&input[used..])?
            {
                used += frame.frame_len();
                outcome = self.take(&frame, tell);
            }
            (self.input, self.used) = (input, used);
            outcome?;
            idle()?;
            if !self.read()? {
                return Ok(());
            }
        }
    }

    fn take(&mut self, frame: &Frame<'_>, tell: &mut impl FnMut(News<'_>) -> Result<()>) -> Result<()> {
        if matches!(frame.header.magic, Magic::Response | Magic::AltResponse) {
            return self.take_answer(frame, tell);
        }
        let packet = Packet::parse(frame, self.features)?;
        let vb = packet.vb;
        match packet.message {
            Message::Noop => {
                let mut answer = Vec::new();
                wire::Reply::new(Opcode::DcpNoop as u8, Status::Success, packet.opaque).encode(&mut answer);
                return self.write(&answer);
            }
            Message::StreamEnd(EndReason::StateChanged | EndReason::Rollback) => {
                // It may be here still, in another life.
                let place = self.place(vb)?;
                self.follow(vb, place)?;
            }
            Message::StreamEnd(reason) => bail!("the server ended the stream of vBucket {vb}: {}", reason.text()),
            message => {
                tell(News::Message(vb, message))?;
                self.note(vb, &message)?;
            }
        }
        self.unacked += frame.frame_len();
        if self.unacked >= BUFFER_BYTES / 2 {
            let bytes = std::mem::take(&mut self.unacked) as u32;
            self.say(Packet::new(Message::BufferAck(bytes)))?;
        }
        Ok(())
    }

    /// Moves the place to where the message leads.
    fn note(&mut self, vb: VbId, message: &Message<'_>) -> Result<()> {
        let Some(place) = self.places.get_mut(&vb) else { bail!("the server speaks of vBucket {vb}, unasked") };
        match message {
            Message::SnapshotMarker(SnapshotMarker { start, end, .. }) => {
                (place.snap_start, place.snap_end) = ((*start).min(place.seqno), *end);
            }
            Message::Mutation(m) => place.seqno = m.seqno,
            Message::Deletion(d) | Message::Expiration(d) => place.seqno = d.seqno,
            Message::SystemEvent(event) => place.seqno = event.seqno,
            Message::SeqnoAdvanced(seqno) => place.seqno = *seqno,
            _ => {}
        }
        if place.seqno >= place.snap_end {
            *place = Place::at(place.uuid, place.seqno);
        }
        Ok(())
    }

    /// The answer to a stream request.
    fn take_answer(&mut self, frame: &Frame<'_>, tell: &mut impl FnMut(News<'_>) -> Result<()>) -> Result<()> {
        let vb = VbId(frame.header.opaque as u16);
        match status_of(frame)? {
            Status::Success => {
                let log = failover_log(frame.value).filter(|log| !log.is_empty());
                let newest = log.context("the server's failover log is cut short")?[0].0;
                if let Some(place) = self.places.get_mut(&vb) {
                    place.uuid = newest;
                }
                Ok(())
            }
            Status::Rollback => {
                let to = rollback_seqno(frame.value).context("the server's rollback is cut short")?;
                tell(News::Rollback(vb, to))?;
                // What was known up to there was of the same history, or is nothing.
                let uuid = if to.0 == 0 { VbUuid(0) } else { self.place(vb)?.uuid };
                self.follow(vb, Place::at(uuid, to))
            }
            Status::NotMyVbucket => bail!("vBucket {vb} is not served there any more"),
            status => bail!("vBucket {vb}: {} ({})", status.name(), said(frame)),
        }
    }

    fn place(&self, vb: VbId) -> Result<Place> {
        self.places.get(&vb).copied().with_context(|| format!("the server speaks of vBucket {vb}, unasked"))
    }

    fn ask(&mut self, message: Message<'_>) -> Result<()> {
        self.say(Packet::new(message))?;
        self.answer().map(drop)
    }

    /// The value of the next answer. Only before the first stream.
    fn answer(&mut self) -> Result<Vec<u8>> {
        loop {
            if let Next::Frame(frame) = FrameReader::new(Side::Client).next(&self.input[self.used..])? {
                let status = status_of(&frame)?;
                if status != Status::Success {
                    bail!("{}: {}", status.name(), said(&frame));
                }
                let value = frame.value.to_vec();
                self.used += frame.frame_len();
                return Ok(value);
            }
            if !self.read()? {
                bail!("the server closed the connection");
            }
        }
    }

    fn say(&mut self, packet: Packet<'_>) -> Result<()> {
        let mut bytes = Vec::new();
        packet.encode(&mut bytes);
        self.write(&bytes)
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.stream.write_all(bytes).context("the server closed the connection")
    }

    /// False: the connection has ended.
    fn read(&mut self) -> Result<bool> {
        self.input.drain(..std::mem::take(&mut self.used));
        let mut chunk = [0; 64 * 1024];
        let count = self.stream.read(&mut chunk).context("the connection to the server broke")?;
        self.input.extend_from_slice(&chunk[..count]);
        Ok(count > 0)
    }
}

fn status_of(frame: &Frame<'_>) -> Result<Status> {
    wire::client::status(frame).map_err(|code| anyhow::anyhow!("the server answered with unknown status {code:#06x}"))
}

fn said(frame: &Frame<'_>) -> String {
    let body = serde_json::from_slice::<serde_json::Value>(frame.value).ok();
    let context = body.as_ref().and_then(|body| body["error"]["context"].as_str());
    context.unwrap_or("the server does not say why").to_owned()
}
