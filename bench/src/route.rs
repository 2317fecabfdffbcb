//! Which server a key is on, as every smart client works it out.
//!
//! ```text
//!     key ──▶ CRC-32 ──▶ vBucket ──▶ place in the map ──▶ one of the servers known so far
//! ```
//!
//! Servers that have no such map are one server with one vBucket.

use anyhow::{Result, anyhow};
use frontend::cluster::{Map, Node, Revision};

/// The vBucket of a key among `vbuckets`, a power of two.
pub fn vbucket_of(key: &[u8], vbuckets: u16) -> u16 {
    (crc32fast::hash(key) >> 16) as u16 & 0x7fff & (vbuckets - 1)
}

/// What one map says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Route {
    revision: Revision,
    /// Addresses, `host:port`.
    pub servers: Vec<String>,
    /// By vBucket: the place in `servers` of who has it; `None`: nobody.
    actives: Vec<Option<usize>>,
}

impl Route {
    /// All on one server.
    pub fn to_one(address: &str) -> Route {
        Route { revision: Revision { epoch: 0, rev: 0 }, servers: vec![address.to_owned()], actives: vec![Some(0)] }
    }

    /// Reads the map of a bucket, as the server at `dialled` sent it.
    ///
    /// # Errors
    /// It is none, or the number of vBuckets is none that keys are spread over.
    pub fn parse(document: &[u8], dialled: &str) -> Result<Route> {
        let (map, this) = Map::parse(document).map_err(|why| anyhow!("the map of the bucket makes no sense: {why}"))?;
        let vbuckets = map.chains.len();
        if !vbuckets.is_power_of_two() || vbuckets > 1 << 15 {
            return Err(anyhow!("a map of {vbuckets} vBuckets"));
        }
        let host = dialled.rsplit_once(':').map_or(dialled, |(host, _)| host);
        let address = |node: &Node| match &*node.host {
            "$HOST" => format!("{host}:{}", node.kv_port),
            _ => node.name(),
        };
        let servers = match &map.nodes[..] {
            // Alone it is where it answered, whatever it takes itself for.
            [_] if this == Some(0) => vec![dialled.to_owned()],
            nodes => nodes.iter().map(address).collect(),
        };
        let actives = map.chains.iter().map(|chain| chain.first().copied().flatten()).collect();
        Ok(Route { revision: map.revision, servers, actives })
    }

    pub fn vbuckets(&self) -> u16 {
        self.actives.len() as u16
    }
}

/// The servers that one event loop knows.
///
/// 1. A server keeps its place, whatever the map says later: connections go by places.
/// 2. A map replaces an older one only.
#[derive(Clone, Debug)]
pub struct Routes {
    revision: Revision,
    servers: Vec<String>,
    /// By vBucket: a place in `servers`.
    actives: Vec<Option<usize>>,
    /// The last map that somebody was turned away with: thousands may be, with the same.
    seen: Vec<u8>,
}

impl Routes {
    pub fn new(route: &Route) -> Routes {
        Routes {
            revision: route.revision,
            servers: route.servers.clone(),
            actives: route.actives.clone(),
            seen: Vec::new(),
        }
    }

    /// Takes a map, if it is newer than what is known. Whether it was.
    pub fn take(&mut self, route: &Route) -> bool {
        if route.revision <= self.revision {
            return false;
        }
        self.revision = route.revision;
        let places: Vec<usize> = route.servers.iter().map(|server| self.place(server)).collect();
        self.actives = route.actives.iter().map(|active| active.map(|at| places[at])).collect();
        true
    }

    /// Takes the map that the server at a place turned a request away with, if it is one and newer. Whether it was.
    pub fn take_document(&mut self, document: &[u8], server: usize) -> bool {
        if document == self.seen {
            return false;
        }
        self.seen = document.to_vec();
        Route::parse(document, &self.servers[server]).is_ok_and(|route| self.take(&route))
    }

    fn place(&mut self, server: &str) -> usize {
        self.servers.iter().position(|known| known == server).unwrap_or_else(|| {
            self.servers.push(server.to_owned());
            self.servers.len() - 1
        })
    }

    /// All that were ever in a map, each at its place.
    pub fn servers(&self) -> &[String] {
        &self.servers
    }

    /// The place of the server that has this key; `None`: nobody has.
    pub fn server_of(&self, key: &[u8]) -> Option<usize> {
        // Alone it has all, or says so itself.
        if self.servers.len() == 1 {
            return Some(0);
        }
        self.actives[usize::from(vbucket_of(key, self.actives.len() as u16))]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn document(rev: i64, hosts: &[(&str, u16)], chains: &[&[i64]]) -> Vec<u8> {
        let chain = |chain: &&[i64]| chain.iter().map(|at| usize::try_from(*at).ok()).collect();
        let map = Map {
            revision: Revision { epoch: 1, rev },
            cluster_uuid: String::new(),
            bucket: "b".into(),
            uuid: String::new(),
            replicas: 1,
            nodes: hosts.iter().map(|(h, p)| Node { host: (*h).to_owned(), kv_port: *p, admin_port: 1 }).collect(),
            chains: chains.iter().map(chain).collect(),
            forward: Default::default(),
        };
        map.document(Some(0)).into_bytes()
    }

    fn route(rev: i64, ports: &[u16], actives: &[i64]) -> Route {
        let hosts: Vec<_> = ports.iter().map(|port| ("n", *port)).collect();
        let chains: Vec<[i64; 2]> = actives.iter().map(|at| [*at, -1]).collect();
        let chains: Vec<&[i64]> = chains.iter().map(|chain| &chain[..]).collect();
        Route::parse(&document(rev, &hosts, &chains), "n:1").unwrap()
    }

    #[test]
    fn keys_map_to_the_vbuckets_that_other_clients_use() {
        // CRC-32 of "123456789" is 0xcbf43926, by the definition of that checksum.
        assert_eq!(vbucket_of(b"123456789", 1024), 0x4bf4 & 1023);
        assert_eq!(vbucket_of(b"123456789", 64), 0x4bf4 & 63);
        assert_eq!(vbucket_of(b"123456789", 1), 0);
    }

    #[test]
    fn keys_spread_over_all_vbuckets_and_go_to_whoever_has_them() {
        let routes = Routes::new(&route(1, &[1, 2], &[0, 1].repeat(512)));
        let (mut by_server, mut vbuckets) = ([0, 0], std::collections::BTreeSet::new());
        for n in 0..20_000 {
            let key = format!("key-{n:010}");
            let vbucket = vbucket_of(key.as_bytes(), 1024);
            let server = routes.server_of(key.as_bytes()).unwrap();
            assert_eq!(server, usize::from(vbucket % 2));
            by_server[server] += 1;
            vbuckets.insert(vbucket);
        }
        assert_eq!(vbuckets.len(), 1024);
        assert!(by_server.iter().all(|keys| (9_000..11_000).contains(keys)), "{by_server:?}");
    }

    #[test]
    fn a_newer_map_is_taken_and_an_older_one_is_not() {
        let mut routes = Routes::new(&route(5, &[1, 2], &[0, 1]));
        assert!(!routes.take(&route(5, &[1, 2], &[1, 1])) && !routes.take(&route(4, &[1, 2], &[1, 1])));
        // The first has left, a third has come: those that stay keep their places.
        assert!(routes.take(&route(6, &[2, 3], &[0, 1])));
        assert_eq!(routes.servers(), ["n:1", "n:2", "n:3"]);
        assert_eq!(routes.actives, [Some(1), Some(2)]);
        assert!(routes.take(&route(7, &[3, 2], &[-1, 0])));
        assert_eq!(routes.actives, [None, Some(2)]);
    }

    #[test]
    fn a_document_counts_once_and_one_that_makes_no_sense_never() {
        let mut routes = Routes::new(&route(5, &[1, 2], &[0, 1]));
        let newer = document(6, &[("n", 1), ("n", 2)], &[&[1, -1], &[1, -1]]);
        assert!(!routes.take_document(b"", 0) && !routes.take_document(b"no map", 0));
        assert!(routes.take_document(&newer, 0) && !routes.take_document(&newer, 1));
        assert_eq!(routes.actives, [Some(1), Some(1)]);
    }

    #[test]
    fn addresses_are_those_one_can_dial() {
        let parse = |hosts, dialled| Route::parse(&document(1, hosts, &[&[0, -1]]), dialled).unwrap().servers;
        assert_eq!(parse(&[("$HOST", 7), ("$HOST", 8)], "localhost:7"), ["localhost:7", "localhost:8"]);
        assert_eq!(parse(&[("10.0.0.1", 7), ("::1", 8)], "localhost:7"), ["10.0.0.1:7", "[::1]:8"]);
        assert_eq!(parse(&[("inside", 7)], "outside:9"), ["outside:9"], "alone it is where it answered");
    }

    #[test]
    fn a_map_that_keys_cannot_be_spread_over_is_refused() {
        assert!(Route::parse(b"{}", "n:1").is_err());
        let three: [&[i64]; 3] = [&[0, -1]; 3];
        assert!(Route::parse(&document(1, &[("n", 1)], &three), "n:1").is_err());
    }
}
