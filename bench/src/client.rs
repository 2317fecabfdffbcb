//! One client of a load: a connection to each server, and the requests under way on any of them.

use std::io;

use crate::connection::Connection;
use crate::workload::Pick;

/// A request under way.
#[derive(Clone, Copy, Debug, Default)]
pub struct UnderWay {
    pub pick: Pick,
    /// From when its latency counts.
    pub began_ns: u64,
    /// Counts towards a run of a fixed number of operations.
    pub counted: bool,
}

/// 1. At most `depth` requests are under way, whichever servers they go to; each has a ticket that no other has.
/// 2. A ticket is given back when its request has ended, not when its connection is lost.
pub struct Client {
    /// By the place of the server; `None`: not connected.
    connections: Vec<Option<Connection>>,
    tickets: Vec<Option<UnderWay>>,
    free: Vec<u32>,
}

impl Client {
    pub fn new(depth: u32) -> Client {
        Client { connections: Vec::new(), tickets: vec![None; depth as usize], free: (0..depth).rev().collect() }
    }

    pub fn connect(&mut self, server: usize, connection: Connection) {
        let places = self.connections.len().max(server + 1);
        self.connections.resize_with(places, || None);
        self.connections[server] = Some(connection);
    }

    pub fn connection(&mut self, server: usize) -> Option<&mut Connection> {
        self.connections.get_mut(server)?.as_mut()
    }

    /// Connections there are, each with the place of its server.
    pub fn connections(&mut self) -> impl Iterator<Item = (usize, &mut Connection)> {
        self.connections.iter_mut().enumerate().filter_map(|(server, connection)| Some((server, connection.as_mut()?)))
    }

    /// A connection to look at by itself; it is put back with [`Client::connect`], or was lost.
    pub fn take(&mut self, server: usize) -> Option<Connection> {
        self.connections.get_mut(server)?.take()
    }

    pub fn has_room(&self) -> bool {
        !self.free.is_empty()
    }

    /// The ticket of the next request.
    pub fn next_ticket(&self) -> u32 {
        *self.free.last().expect("the caller has seen room")
    }

    pub fn begin(&mut self, what: UnderWay) -> u32 {
        let ticket = self.free.pop().expect("the caller has seen room");
        self.tickets[ticket as usize] = Some(what);
        ticket
    }

    /// What is under way with this ticket.
    pub fn request(&self, ticket: u32) -> UnderWay {
        self.tickets[ticket as usize].expect("its ticket was not given back")
    }

    pub fn end(&mut self, ticket: u32) -> UnderWay {
        let ended = self.request(ticket);
        self.tickets[ticket as usize] = None;
        self.free.push(ticket);
        ended
    }

    /// Requests under way.
    pub fn under_way(&self) -> impl Iterator<Item = UnderWay> {
        self.tickets.iter().copied().flatten()
    }

    /// Sends what is queued, as far as the sockets take it.
    ///
    /// # Errors
    /// The place of the first server to which the connection broke.
    pub fn flush(&mut self) -> Result<(), (usize, io::Error)> {
        self.connections().try_for_each(|(server, connection)| connection.flush().map_err(|error| (server, error)))
    }
}
