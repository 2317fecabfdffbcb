//! A baseline: the smallest server that has a connection table, so that two ways of finding a free slot can be compared
//! with nothing else different. It says yes to everything and stores nothing; its numbers are about tables only.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Result, anyhow};
use mio::net::{TcpListener, TcpStream};
use mio::{Events, Interest, Poll, Token};
use parking_lot::Mutex;
use socket2::{Domain, Socket, Type};
use wire::{FrameReader, Header, Magic, Next, Opcode, Side, Status};

/// How a table finds a free slot.
pub enum Slots {
    /// By looking at every slot from the first, each under its own lock, as servers did that had such tables.
    Scan(Vec<Mutex<bool>>),
    /// By taking the last one that was given back.
    List(Mutex<Vec<usize>>),
}

impl Slots {
    pub fn scanned(capacity: usize) -> Slots {
        Slots::Scan((0..capacity).map(|_| Mutex::new(false)).collect())
    }

    /// To be scanned, with all of them taken.
    pub fn all_taken(capacity: usize) -> Slots {
        Slots::Scan((0..capacity).map(|_| Mutex::new(true)).collect())
    }

    pub fn listed(capacity: usize) -> Slots {
        Slots::List(Mutex::new((0..capacity).rev().collect()))
    }

    pub fn take(&self) -> Option<usize> {
        match self {
            Slots::List(free) => free.lock().pop(),
            Slots::Scan(slots) => slots.iter().position(|slot| {
                let mut taken = slot.lock();
                !std::mem::replace(&mut *taken, true)
            }),
        }
    }

    pub fn release(&self, n: usize) {
        match self {
            Slots::List(free) => free.lock().push(n),
            Slots::Scan(slots) => *slots[n].lock() = false,
        }
    }
}

/// A running baseline server; dropped, it ends.
pub struct Baseline {
    pub address: SocketAddr,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Result<()>>>,
}

const LISTENER: Token = Token(usize::MAX);
const BACKLOG: i32 = 4096;
const TICK: Duration = Duration::from_millis(20);

struct Connection {
    stream: TcpStream,
    input: Vec<u8>,
}

impl Baseline {
    pub fn start(slots: Slots, capacity: usize) -> Result<Baseline> {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
        socket.set_nonblocking(true)?;
        socket.bind(&SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into())?;
        // Long enough for all: who finds the backlog full tries again after a second, which is no property of a table.
        socket.listen(BACKLOG)?;
        let mut listener = TcpListener::from_std(socket.into());
        let address = listener.local_addr()?;
        let poll = Poll::new()?;
        poll.registry().register(&mut listener, LISTENER, Interest::READABLE)?;
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let thread = std::thread::Builder::new()
            .name("baseline".to_owned())
            .spawn(move || serve(poll, &listener, &slots, capacity, &stopped))?;
        Ok(Baseline { address, stop, thread: Some(thread) })
    }

    /// # Errors
    /// What ended the server before it was asked to.
    pub fn end(mut self) -> Result<()> {
        self.stop.store(true, Relaxed);
        match self.thread.take().map(JoinHandle::join) {
            Some(Err(_)) => Err(anyhow!("the baseline server panicked")),
            Some(Ok(ended)) => ended,
            None => Ok(()),
        }
    }
}

impl Drop for Baseline {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
    }
}

fn serve(mut poll: Poll, listener: &TcpListener, slots: &Slots, capacity: usize, stop: &AtomicBool) -> Result<()> {
    let mut connections: Vec<Option<Connection>> = (0..capacity).map(|_| None).collect();
    let mut events = Events::with_capacity(1024);
    let mut scratch = vec![0; 16 * 1024];
    while !stop.load(Relaxed) {
        match poll.poll(&mut events, Some(TICK)) {
            Err(error) if error.kind() != io::ErrorKind::Interrupted => return Err(error.into()),
            _ => {}
        }
        for event in events.iter().filter(|event| event.token() != LISTENER) {
            let n = event.token().0;
            let Some(connection) = &mut connections[n] else { continue };
            if !connection.serve(&mut scratch) {
                connections[n] = None;
                slots.release(n);
            }
        }
        // After every round, as one that was full may no longer be.
        while let Some(n) = slots.take() {
            match listener.accept() {
                Ok((mut stream, _)) => {
                    poll.registry().register(&mut stream, Token(n), Interest::READABLE)?;
                    connections[n] = Some(Connection { stream, input: Vec::new() });
                }
                Err(error) => {
                    slots.release(n);
                    if error.kind() == io::ErrorKind::WouldBlock {
                        break;
                    }
                    return Err(error.into());
                }
            }
        }
    }
    Ok(())
}

impl Connection {
    /// Answers what there is. False: it is over.
    fn serve(&mut self, scratch: &mut [u8]) -> bool {
        loop {
            match self.stream.read(scratch) {
                Ok(0) => return false,
                Ok(n) => self.input.extend_from_slice(&scratch[..n]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return true,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(_) => return false,
            }
            let mut output = Vec::new();
            let mut used = 0;
            loop {
                match FrameReader::new(Side::Server).next(&self.input[used..]) {
                    Ok(Next::Frame(frame)) => {
                        used += frame.frame_len();
                        output.extend_from_slice(&answer(&frame.header));
                    }
                    Ok(Next::Need(_)) => break,
                    Ok(Next::Malformed(_)) | Err(_) => return false,
                }
            }
            self.input.drain(..used);
            // A few short answers always fit into an empty socket.
            if self.stream.write_all(&output).is_err() {
                return false;
            }
        }
    }
}

fn answer(request: &Header) -> [u8; 24] {
    let missing = request.opcode == Opcode::Get as u8;
    let status = if missing { Status::KeyEnoent } else { Status::Success };
    let header = Header {
        magic: Magic::Response,
        framing_len: 0,
        key_len: 0,
        extras_len: 0,
        datatype: 0,
        vbucket_or_status: status as u16,
        body_len: 0,
        cas: 0,
        ..*request
    };
    header.encode()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_tables_give_out_each_slot_once() {
        for slots in [Slots::scanned(3), Slots::listed(3)] {
            let mut taken: Vec<usize> = std::iter::from_fn(|| slots.take()).collect();
            taken.sort();
            assert_eq!(taken, [0, 1, 2]);
            slots.release(1);
            assert_eq!((slots.take(), slots.take()), (Some(1), None));
        }
    }
}
