//! What to drive, as a URL.

use std::fmt;
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use types::Level;

use crate::protocol::Protocol;
use crate::protocol::couchbase::{self, Couchbase, Login, Shape};
use crate::protocol::etcd::Etcd;
use crate::protocol::memcached::{Binary, Text};
use crate::protocol::postgres::Postgres;
use crate::protocol::redis::Redis;
use crate::route::Route;

/// How long connecting, and each step of making a connection ready, may take.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// A protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Couchbase,
    Memcached,
    MemcachedBinary,
    Redis,
    Etcd,
    Postgres,
}

const SCHEMES: [(&str, Kind, u16); 6] = [
    ("couchbase", Kind::Couchbase, 11210),
    ("memcached", Kind::Memcached, 11211),
    ("memcached+binary", Kind::MemcachedBinary, 11211),
    ("redis", Kind::Redis, 6379),
    ("etcd", Kind::Etcd, 2379),
    ("postgres", Kind::Postgres, 5432),
];

/// A server to drive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    pub kind: Kind,
    /// `host:port`.
    pub address: String,
    /// Bucket or database; empty if the URL has none.
    pub path: String,
}

/// Who we are there, where it matters.
#[derive(Clone, Debug, Default)]
pub struct Identity {
    pub user: String,
    pub password: String,
}

impl Target {
    /// # Errors
    /// Not one of the URLs we know.
    pub fn parse(url: &str) -> Result<Target> {
        let known = || SCHEMES.map(|(scheme, _, _)| format!("{scheme}://")).join(", ");
        let found = url.split_once("://").and_then(|(scheme, rest)| {
            let (_, kind, port) = SCHEMES.iter().find(|(name, ..)| *name == scheme)?;
            Some((*kind, *port, rest))
        });
        let Some((kind, port, rest)) = found else { bail!("{url:?} is no target: it starts with none of {}", known()) };
        let (address, path) = rest.split_once('/').unwrap_or((rest, ""));
        if address.is_empty() {
            bail!("{url:?} names no host");
        }
        let has_port = address.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
        let address = if has_port { address.to_owned() } else { format!("{address}:{port}") };
        Ok(Target { kind, address, path: path.to_owned() })
    }

    pub fn socket_address(&self) -> Result<SocketAddr> {
        let unknown = || format!("no address for {}", self.address);
        self.address.to_socket_addrs().with_context(unknown)?.next().with_context(unknown)
    }

    /// The same on another server.
    pub fn at(&self, address: &str) -> Target {
        Target { address: address.to_owned(), ..self.clone() }
    }

    /// A connection with time limits.
    pub fn connect(&self) -> Result<TcpStream> {
        self.connect_within(PATIENCE)
    }

    /// A connection that is made within this time, and whose every read and write is too.
    pub fn connect_within(&self, patience: Duration) -> Result<TcpStream> {
        let address = self.socket_address()?;
        let unreachable = || format!("no server answers at {}", self.address);
        let stream = TcpStream::connect_timeout(&address, patience).with_context(unreachable)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(patience))?;
        stream.set_write_timeout(Some(patience))?;
        Ok(stream)
    }

    /// Which servers there are and which keys they have, as known when the run was prepared.
    pub fn route(&self, dialect: &Dialect) -> Route {
        match dialect {
            Dialect::Couchbase(shape) => shape.route().clone(),
            _ => Route::to_one(&self.address),
        }
    }

    /// Asks the server again.
    ///
    /// # Errors
    /// It does not answer in time, or has no map.
    pub fn ask_route(&self, dialect: &Dialect, patience: Duration) -> Result<Route> {
        let mut stream = self.connect_within(patience)?;
        dialect.protocol().open(&mut stream)?;
        couchbase::ask_route(&mut stream, &self.address)
    }

    /// Does what is done once a run, and tells how connections then speak.
    ///
    /// # Errors
    /// The server is not there, or refuses; or `level` was asked of a server that has no such thing.
    pub fn prepare(&self, identity: &Identity, level: Option<Level>) -> Result<Dialect> {
        if level.is_some() && self.kind != Kind::Couchbase {
            bail!("--durability is for couchbase:// targets; the others are durable or not by their own settings");
        }
        let or = |text: &str, otherwise: &str| if text.is_empty() { otherwise.to_owned() } else { text.to_owned() };
        Ok(match self.kind {
            Kind::Couchbase => {
                let login = Login {
                    user: identity.user.clone(),
                    password: identity.password.clone(),
                    bucket: or(&self.path, "default"),
                };
                Dialect::Couchbase(Arc::new(Shape::learn(&mut self.connect()?, &self.address, login, level)?))
            }
            Kind::Postgres => {
                let (user, database) = (or(&identity.user, "postgres"), or(&self.path, "postgres"));
                Postgres { user: user.clone(), database: database.clone() }.make_table(&mut self.connect()?)?;
                Dialect::Postgres { user, database }
            }
            Kind::Memcached => Dialect::Memcached,
            Kind::MemcachedBinary => Dialect::MemcachedBinary,
            Kind::Redis => Dialect::Redis,
            Kind::Etcd => Dialect::Etcd,
        })
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (scheme, ..) = SCHEMES.iter().find(|(_, kind, _)| *kind == self.kind).expect("every kind has a scheme");
        write!(f, "{scheme}://{}", self.address)?;
        if self.path.is_empty() { Ok(()) } else { write!(f, "/{}", self.path) }
    }
}

/// How every connection of a run speaks.
#[derive(Clone, Debug)]
pub enum Dialect {
    Couchbase(Arc<Shape>),
    Memcached,
    MemcachedBinary,
    Redis,
    Etcd,
    Postgres { user: String, database: String },
}

impl Dialect {
    /// For one connection.
    pub fn protocol(&self) -> Box<dyn Protocol> {
        match self {
            Dialect::Couchbase(shape) => Box::new(Couchbase::new(shape.clone())),
            Dialect::Memcached => Box::new(Text),
            Dialect::MemcachedBinary => Box::new(Binary),
            Dialect::Redis => Box::new(Redis),
            Dialect::Etcd => Box::<Etcd>::default(),
            Dialect::Postgres { user, database } => {
                Box::new(Postgres { user: user.clone(), database: database.clone() })
            }
        }
    }
}

/// What `--durability` says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Durability(Option<Level>);

impl Durability {
    /// # Errors
    /// The text is none of the levels.
    pub fn parse(text: &str) -> Result<Durability> {
        Ok(Durability(match text.to_ascii_lowercase().as_str() {
            "none" => None,
            "majority" => Some(Level::Majority),
            "majorityandpersistactive" | "majorityandpersisttoactive" => Some(Level::MajorityAndPersistActive),
            "persisttomajority" => Some(Level::PersistMajority),
            _ => bail!("{text:?} is none of none, majority, majorityAndPersistActive, persistToMajority"),
        }))
    }

    pub fn level(self) -> Option<Level> {
        self.0
    }

    pub fn name(self) -> &'static str {
        match self.0 {
            None => "none",
            Some(Level::Majority) => "majority",
            Some(Level::MajorityAndPersistActive) => "majorityAndPersistActive",
            Some(Level::PersistMajority) => "persistToMajority",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_names_protocol_address_and_bucket() {
        let target = Target::parse("couchbase://localhost/travel").unwrap();
        assert_eq!((target.kind, &*target.address, &*target.path), (Kind::Couchbase, "localhost:11210", "travel"));
        assert_eq!(target.to_string(), "couchbase://localhost:11210/travel");
        let target = Target::parse("memcached+binary://[::1]:7").unwrap();
        assert_eq!((target.kind, &*target.address, &*target.path), (Kind::MemcachedBinary, "[::1]:7", ""));
    }

    #[test]
    fn an_unknown_scheme_is_told_the_known_ones() {
        for url in ["mongodb://x", "localhost:11210", "redis://"] {
            assert!(Target::parse(url).is_err(), "{url}");
        }
        assert!(Target::parse("ftp://x").unwrap_err().to_string().contains("memcached+binary://"));
    }

    #[test]
    fn levels_are_spelt_as_clients_spell_them() {
        let level = |text| Durability::parse(text).unwrap().level();
        assert_eq!(level("persistToMajority"), Some(Level::PersistMajority));
        assert_eq!(level("majorityAndPersistToActive"), Some(Level::MajorityAndPersistActive));
        assert_eq!(level("none"), None);
        assert_eq!(Durability::parse("MAJORITY").unwrap().name(), "majority");
        assert!(Durability::parse("all").is_err());
    }
}
