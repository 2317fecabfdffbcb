//! The SASL exchange of one connection: which mechanism is under way and who came out of it.

use super::scram::{ClientFirst, Failure, Hash, Server};
use super::users::{Identity, NAME_LEN_MAX, Users};

/// What the listing opcode answers, strongest first.
pub const MECHANISMS: &str = "SCRAM-SHA512 SCRAM-SHA256 SCRAM-SHA1 PLAIN";

/// What one SASL message led to.
#[derive(Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The name is proven; the bytes are the last message to the client.
    Passed(Identity, Vec<u8>),
    /// Another round: the challenge.
    Continue(Vec<u8>),
    /// Wrong name, password or mechanism. The text is for the client.
    Refused(&'static str),
    /// Not a message of this mechanism, or no exchange is under way.
    Malformed(&'static str),
    /// It takes [`Untried::verify`] to know, which takes long.
    Untried(Untried),
}

/// A PLAIN login whose password is not the one that passed last.
#[derive(Debug, PartialEq, Eq)]
pub struct Untried {
    user: String,
    password: Vec<u8>,
}

impl Untried {
    /// Takes milliseconds of a processor.
    pub fn verify(&self, users: &Users) -> Verdict {
        match users.verify_plain(&self.user, &self.password) {
            Some(identity) => Verdict::Passed(identity, Vec::new()),
            None => Verdict::Refused("authentication failed"),
        }
    }
}

/// The exchange under way on a connection, if any.
#[derive(Debug, Default)]
pub struct Exchange {
    scram: Option<(Hash, Server, Option<Identity>)>,
}

impl Exchange {
    /// The first message. Whatever was under way is forgotten.
    pub fn start(
        &mut self,
        users: &Users,
        mechanism: &[u8],
        message: &[u8],
        fill_random: impl FnOnce(&mut [u8]),
    ) -> Verdict {
        self.scram = None;
        if mechanism.eq_ignore_ascii_case(b"PLAIN") {
            return plain(users, message);
        }
        let Some(hash) = scram_hash(mechanism) else {
            return Verdict::Refused("unknown mechanism; supported: SCRAM-SHA512 SCRAM-SHA256 SCRAM-SHA1 PLAIN");
        };
        let first = match ClientFirst::parse(message) {
            Ok(first) => first,
            Err(failure) => return failed(failure),
        };
        if first.user.len() > NAME_LEN_MAX {
            return Verdict::Refused("authentication failed");
        }
        let (keys, identity) = users.scram_keys(hash, &first.user);
        let (server, challenge) = Server::begin(hash, &first, keys, identity.is_some(), fill_random);
        self.scram = Some((hash, server, identity));
        Verdict::Continue(challenge)
    }

    /// The next message of the exchange under way.
    pub fn step(&mut self, mechanism: &[u8], message: &[u8]) -> Verdict {
        let Some((hash, server, identity)) = self.scram.take() else {
            return Verdict::Malformed("no SASL exchange is under way");
        };
        if scram_hash(mechanism) != Some(hash) {
            return Verdict::Malformed("the mechanism differs from the one the exchange began with");
        }
        match (server.finish(message), identity) {
            (Ok(last), Some(identity)) => Verdict::Passed(identity, last),
            (Ok(_), None) => Verdict::Refused("authentication failed"),
            (Err(failure), _) => failed(failure),
        }
    }
}

fn scram_hash(mechanism: &[u8]) -> Option<Hash> {
    Hash::ALL.into_iter().find(|hash| mechanism.eq_ignore_ascii_case(hash.mechanism().as_bytes()))
}

fn failed(failure: Failure) -> Verdict {
    match failure {
        Failure::Malformed(what) => Verdict::Malformed(what),
        Failure::WrongProof => Verdict::Refused("authentication failed"),
    }
}

/// `authzid NUL user NUL password`.
fn plain(users: &Users, message: &[u8]) -> Verdict {
    let mut parts = message.splitn(3, |&b| b == 0);
    let (Some(_authzid), Some(user), Some(password)) = (parts.next(), parts.next(), parts.next()) else {
        return Verdict::Malformed("PLAIN is authzid, user and password with NULs between them");
    };
    let Some(user) = std::str::from_utf8(user).ok().filter(|user| user.len() <= NAME_LEN_MAX) else {
        return Verdict::Refused("authentication failed");
    };
    match users.recognise(user, password) {
        Some(identity) => Verdict::Passed(identity, Vec::new()),
        None => Verdict::Untried(Untried { user: user.to_owned(), password: password.to_owned() }),
    }
}

#[cfg(test)]
mod tests {
    use super::super::scram::Client;
    use super::super::users::Role;
    use super::*;

    fn users() -> Users {
        let users = Users::in_memory(&env::os::env()).with_iterations(0);
        users.set("jane", "secret", Role::Data).unwrap();
        users
    }

    #[test]
    fn plain_takes_the_password_and_ignores_the_authzid() {
        let (users, mut exchange) = (users(), Exchange::default());
        let passed = || Verdict::Passed(Identity { user: "jane".into(), role: Role::Data }, Vec::new());
        for message in [&b"\0jane\0wrong"[..], b"\0john\0secret", b"\0jane\0secret"] {
            let Verdict::Untried(untried) = exchange.start(&users, b"PLAIN", message, |_| ()) else { panic!() };
            let is_right = message == b"\0jane\0secret";
            assert_eq!(untried.verify(&users) == passed(), is_right, "{untried:?}");
        }
        for message in [&b"\0jane\0secret"[..], b"who\0jane\0secret"] {
            assert_eq!(exchange.start(&users, b"plain", message, |_| ()), passed(), "it has passed before");
        }
        assert!(matches!(exchange.start(&users, b"PLAIN", b"\0\xff\0secret", |_| ()), Verdict::Refused(_)));
        assert!(matches!(exchange.start(&users, b"PLAIN", b"jane\0secret", |_| ()), Verdict::Malformed(_)));
    }

    #[test]
    fn a_wrong_or_unknown_user_goes_the_whole_way_and_is_then_refused() {
        let users = users();
        for (user, password) in [("jane", "wrong"), ("ghost", "secret")] {
            let mut exchange = Exchange::default();
            let mut client = Client::with_nonce(Hash::Sha256, user, password, "abc".into());
            let verdict = exchange.start(&users, b"SCRAM-SHA256", &client.first(), |b| b.fill(1));
            let Verdict::Continue(challenge) = verdict else { panic!("{verdict:?}") };
            let last = client.respond(&challenge).unwrap();
            assert_eq!(exchange.step(b"SCRAM-SHA256", &last), Verdict::Refused("authentication failed"));
            assert!(matches!(exchange.step(b"SCRAM-SHA256", &last), Verdict::Malformed(_)), "the exchange is over");
        }
    }

    #[test]
    fn a_new_start_replaces_the_exchange_and_the_mechanism_must_stay_the_same() {
        let (users, mut exchange) = (users(), Exchange::default());
        let mut client = Client::with_nonce(Hash::Sha512, "jane", "secret", "abc".into());
        exchange.start(&users, b"SCRAM-SHA512", &client.first(), |b| b.fill(1));
        let verdict = exchange.start(&users, b"scram-sha512", &client.first(), |b| b.fill(2));
        let Verdict::Continue(challenge) = verdict else { panic!("{verdict:?}") };
        let last = client.respond(&challenge).unwrap();
        let Verdict::Passed(identity, signature) = exchange.step(b"SCRAM-SHA512", &last) else { panic!() };
        assert!(&*identity.user == "jane" && client.verify(&signature));

        exchange.start(&users, b"SCRAM-SHA512", &client.first(), |b| b.fill(1));
        assert!(matches!(exchange.step(b"SCRAM-SHA1", &last), Verdict::Malformed(_)));
        assert!(matches!(exchange.start(&users, b"GSSAPI", b"", |_| ()), Verdict::Refused(_)));
    }
}
