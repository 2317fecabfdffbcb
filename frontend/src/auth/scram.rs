//! SCRAM, both ends: a password proves itself without being sent, and without the server being able to use what it
//! stores to log in elsewhere.
//!
//! ```text
//!     client                         server
//!     n,,n=user,r=C          ──▶
//!                            ◀──     r=C+S,s=salt,i=iterations
//!     c=biws,r=C+S,p=proof   ──▶     H(proof xor signature) == stored key?
//!     v == signature?        ◀──     v=signature
//! ```
//!
//! The server's side is cheap (a handful of HMACs on stored keys); the client pays the PBKDF2 iterations. Messages are
//! authenticated as they were sent, byte for byte, so nothing here is normalised or re-encoded. The attributes are split
//! at commas only: some clients send nonces with spaces in them.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use hmac::{Hmac, Mac};
use sha1::{Digest, Sha1};
use sha2::{Sha256, Sha512};
use subtle::ConstantTimeEq;

/// The hash a SCRAM mechanism is built on. The names lack the RFC's hyphen, as all clients of this protocol spell them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Hash {
    Sha512,
    Sha256,
    Sha1,
}

/// Fewest PBKDF2 iterations a stored key may have; clients refuse less.
pub const ITERATIONS_MIN: u32 = 4096;

/// Bytes of the server's half of the nonce, before base64.
const NONCE_LEN: usize = 18;

impl Hash {
    /// Strongest first: the order in which mechanisms are offered.
    pub const ALL: [Hash; 3] = [Hash::Sha512, Hash::Sha256, Hash::Sha1];

    /// The mechanism's name on the wire.
    pub const fn mechanism(self) -> &'static str {
        match self {
            Hash::Sha512 => "SCRAM-SHA512",
            Hash::Sha256 => "SCRAM-SHA256",
            Hash::Sha1 => "SCRAM-SHA1",
        }
    }

    /// Length of a digest in bytes.
    pub const fn digest_len(self) -> usize {
        match self {
            Hash::Sha512 => 64,
            Hash::Sha256 => 32,
            Hash::Sha1 => 20,
        }
    }

    pub fn digest(self, bytes: &[u8]) -> Vec<u8> {
        match self {
            Hash::Sha512 => Sha512::digest(bytes).to_vec(),
            Hash::Sha256 => Sha256::digest(bytes).to_vec(),
            Hash::Sha1 => Sha1::digest(bytes).to_vec(),
        }
    }

    pub fn hmac(self, key: &[u8], bytes: &[u8]) -> Vec<u8> {
        fn with<M: Mac + hmac::digest::KeyInit>(key: &[u8], bytes: &[u8]) -> Vec<u8> {
            let mut mac = <M as Mac>::new_from_slice(key).expect("HMAC takes keys of any length");
            mac.update(bytes);
            mac.finalize().into_bytes().to_vec()
        }
        match self {
            Hash::Sha512 => with::<Hmac<Sha512>>(key, bytes),
            Hash::Sha256 => with::<Hmac<Sha256>>(key, bytes),
            Hash::Sha1 => with::<Hmac<Sha1>>(key, bytes),
        }
    }

    /// PBKDF2 over this hash: the part that is slow on purpose.
    pub fn salted_password(self, password: &[u8], salt: &[u8], iterations: u32) -> Vec<u8> {
        let mut out = vec![0; self.digest_len()];
        match self {
            Hash::Sha512 => pbkdf2::pbkdf2_hmac::<Sha512>(password, salt, iterations, &mut out),
            Hash::Sha256 => pbkdf2::pbkdf2_hmac::<Sha256>(password, salt, iterations, &mut out),
            Hash::Sha1 => pbkdf2::pbkdf2_hmac::<Sha1>(password, salt, iterations, &mut out),
        }
        out
    }
}

/// What a server keeps of a password, for one hash. Enough to verify a proof, not to make one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Keys {
    pub salt: Vec<u8>,
    pub iterations: u32,
    pub stored_key: Vec<u8>,
    pub server_key: Vec<u8>,
}

impl Keys {
    pub fn derive(hash: Hash, password: &[u8], salt: Vec<u8>, iterations: u32) -> Keys {
        let salted = hash.salted_password(password, &salt, iterations);
        Keys {
            stored_key: hash.digest(&hash.hmac(&salted, b"Client Key")),
            server_key: hash.hmac(&salted, b"Server Key"),
            salt,
            iterations,
        }
    }

    /// Whether this password is the one the keys were derived from. As slow as the iterations.
    pub fn verify(&self, hash: Hash, password: &[u8]) -> bool {
        let salted = hash.salted_password(password, &self.salt, self.iterations);
        let stored = hash.digest(&hash.hmac(&salted, b"Client Key"));
        stored.ct_eq(&self.stored_key).into()
    }
}

/// Why an exchange ended without success.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The message is not SCRAM, asks for what is not offered, or does not belong to this exchange.
    Malformed(&'static str),
    /// The proof is wrong.
    WrongProof,
}

/// A client's first message, taken apart.
#[derive(Debug, PartialEq, Eq)]
pub struct ClientFirst<'a> {
    pub user: String,
    nonce: &'a [u8],
    bare: &'a [u8],
}

impl<'a> ClientFirst<'a> {
    pub fn parse(message: &'a [u8]) -> Result<ClientFirst<'a>, Failure> {
        let rest = message.strip_prefix(b"n,").ok_or(Failure::Malformed("channel binding is not offered"))?;
        let authzid_end =
            rest.iter().position(|&b| b == b',').ok_or(Failure::Malformed("the first message has no user"))?;
        let bare = &rest[authzid_end + 1..];
        let mut attributes = bare.split(|&b| b == b',');
        let user = attributes.next().and_then(|a| a.strip_prefix(b"n="));
        let nonce = attributes.next().and_then(|a| a.strip_prefix(b"r=")).filter(|n| !n.is_empty());
        match (user, nonce) {
            (Some(user), Some(nonce)) => Ok(ClientFirst { user: unescape(user)?, nonce, bare }),
            _ => Err(Failure::Malformed("the first message must name a user and a nonce")),
        }
    }
}

/// `=2C` is a comma, `=3D` an equals sign; no other escape exists.
fn unescape(name: &[u8]) -> Result<String, Failure> {
    let name = std::str::from_utf8(name).map_err(|_| Failure::Malformed("the user name is not UTF-8"))?;
    let mut out = String::with_capacity(name.len());
    let mut parts = name.split('=');
    out.push_str(parts.next().unwrap_or_default());
    for part in parts {
        match part.get(..2) {
            Some(code) if code.eq_ignore_ascii_case("2c") => out.push(','),
            Some(code) if code.eq_ignore_ascii_case("3d") => out.push('='),
            _ => return Err(Failure::Malformed("the user name has an unknown escape")),
        }
        out.push_str(&part[2..]);
    }
    Ok(out)
}

/// The server's side of one exchange, between its two messages.
#[derive(Debug)]
pub struct Server {
    hash: Hash,
    keys: Keys,
    /// False for a user nobody knows: the exchange goes on to the same end with keys that fit no password.
    known: bool,
    nonce: Vec<u8>,
    /// Client-first-bare, a comma, server-first, a comma.
    transcript: Vec<u8>,
}

impl Server {
    /// Answers the first message: the state to keep and the challenge to send.
    pub fn begin(
        hash: Hash,
        first: &ClientFirst<'_>,
        keys: Keys,
        known: bool,
        fill_random: impl FnOnce(&mut [u8]),
    ) -> (Server, Vec<u8>) {
        let mut random = [0; NONCE_LEN];
        fill_random(&mut random);
        Server::begin_with_nonce(hash, first, keys, known, BASE64.encode(random).as_bytes())
    }

    fn begin_with_nonce(
        hash: Hash,
        first: &ClientFirst<'_>,
        keys: Keys,
        known: bool,
        server_nonce: &[u8],
    ) -> (Server, Vec<u8>) {
        let nonce = [first.nonce, server_nonce].concat();
        let mut challenge = b"r=".to_vec();
        challenge.extend_from_slice(&nonce);
        challenge.extend_from_slice(format!(",s={},i={}", BASE64.encode(&keys.salt), keys.iterations).as_bytes());
        let transcript = [first.bare, b",", &challenge, b","].concat();
        (Server { hash, keys, known, nonce, transcript }, challenge)
    }

    /// Judges the client's final message; the server's signature if it was right.
    pub fn finish(self, message: &[u8]) -> Result<Vec<u8>, Failure> {
        let proof_at = find_last(message, b",p=").ok_or(Failure::Malformed("the final message has no proof"))?;
        let (without_proof, proof) = (&message[..proof_at], &message[proof_at + 3..]);
        let mut attributes = without_proof.split(|&b| b == b',');
        if attributes.next() != Some(b"c=biws") {
            return Err(Failure::Malformed("the channel binding differs from the first message"));
        }
        if attributes.next().and_then(|a| a.strip_prefix(b"r=")) != Some(&self.nonce[..]) {
            return Err(Failure::Malformed("the nonce is not the one of this exchange"));
        }
        let proof = BASE64.decode(proof).map_err(|_| Failure::Malformed("the proof is not base64"))?;
        if proof.len() != self.hash.digest_len() {
            return Err(Failure::WrongProof);
        }
        let transcript = [&self.transcript[..], without_proof].concat();
        let signature = self.hash.hmac(&self.keys.stored_key, &transcript);
        let client_key: Vec<u8> = proof.iter().zip(&signature).map(|(a, b)| a ^ b).collect();
        let right: bool = self.hash.digest(&client_key).ct_eq(&self.keys.stored_key).into();
        if !(right & self.known) {
            return Err(Failure::WrongProof);
        }
        let signature = self.hash.hmac(&self.keys.server_key, &transcript);
        Ok([b"v=", BASE64.encode(signature).as_bytes()].concat())
    }
}

fn find_last(haystack: &[u8], needle: &[u8]) -> Option<usize> {
    haystack.windows(needle.len()).rposition(|w| w == needle)
}

/// The client's side, for tools that connect to a server of this protocol.
#[derive(Debug)]
pub struct Client {
    hash: Hash,
    password: Vec<u8>,
    nonce: String,
    first_bare: String,
    server_signature: Vec<u8>,
}

impl Client {
    pub fn new(hash: Hash, user: &str, password: &str, fill_random: impl FnOnce(&mut [u8])) -> Client {
        let mut random = [0; NONCE_LEN];
        fill_random(&mut random);
        Client::with_nonce(hash, user, password, BASE64.encode(random))
    }

    /// With a nonce of the caller's choosing: anything printable without a comma.
    pub fn with_nonce(hash: Hash, user: &str, password: &str, nonce: String) -> Client {
        let user = user.replace('=', "=3D").replace(',', "=2C");
        let first_bare = format!("n={user},r={nonce}");
        Client { hash, password: password.as_bytes().to_vec(), nonce, first_bare, server_signature: Vec::new() }
    }

    /// The message that opens the exchange.
    pub fn first(&self) -> Vec<u8> {
        format!("n,,{}", self.first_bare).into_bytes()
    }

    /// Answers the server's challenge.
    pub fn respond(&mut self, challenge: &[u8]) -> Result<Vec<u8>, Failure> {
        let malformed = Failure::Malformed("the challenge is not r=,s=,i=");
        let text = std::str::from_utf8(challenge).map_err(|_| malformed)?;
        let mut attributes = text.split(',');
        let nonce = attributes.next().and_then(|a| a.strip_prefix("r=")).ok_or(malformed)?;
        let salt = attributes.next().and_then(|a| a.strip_prefix("s=")).ok_or(malformed)?;
        let salt = BASE64.decode(salt).map_err(|_| malformed)?;
        let iterations = attributes.next().and_then(|a| a.strip_prefix("i=")).ok_or(malformed)?;
        let iterations: u32 = iterations.parse().map_err(|_| malformed)?;
        if !nonce.starts_with(&self.nonce) || nonce.len() == self.nonce.len() {
            return Err(Failure::Malformed("the server's nonce does not extend ours"));
        }
        let without_proof = format!("c=biws,r={nonce}");
        let transcript = format!("{},{text},{without_proof}", self.first_bare);
        let salted = self.hash.salted_password(&self.password, &salt, iterations);
        let client_key = self.hash.hmac(&salted, b"Client Key");
        let signature = self.hash.hmac(&self.hash.digest(&client_key), transcript.as_bytes());
        let proof: Vec<u8> = client_key.iter().zip(&signature).map(|(a, b)| a ^ b).collect();
        self.server_signature = self.hash.hmac(&self.hash.hmac(&salted, b"Server Key"), transcript.as_bytes());
        Ok(format!("{without_proof},p={}", BASE64.encode(proof)).into_bytes())
    }

    /// Whether the server knows the password too.
    pub fn verify(&self, last: &[u8]) -> bool {
        let signature = last.strip_prefix(b"v=").and_then(|v| BASE64.decode(v).ok());
        signature.is_some_and(|s| s.ct_eq(&self.server_signature).into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Vector {
        hash: Hash,
        client_nonce: &'static str,
        server_nonce: &'static str,
        salt: &'static str,
        last: &'static str,
        signature: &'static str,
    }

    /// The worked examples of RFC 5802 §5 and RFC 7677 §3; user "user", password "pencil", 4096 iterations.
    const VECTORS: [Vector; 2] = [
        Vector {
            hash: Hash::Sha1,
            client_nonce: "fyko+d2lbbFgONRv9qkxdawL",
            server_nonce: "3rfcNHYJY1ZVvWVs7j",
            salt: "QSXCR+Q6sek8bf92",
            last: "c=biws,r=fyko+d2lbbFgONRv9qkxdawL3rfcNHYJY1ZVvWVs7j,p=v0X8v3Bz2T0CJGbJQyF0X+HI4Ts=",
            signature: "v=rmF9pqV8S7suAoZWja4dJRkFsKQ=",
        },
        Vector {
            hash: Hash::Sha256,
            client_nonce: "rOprNGfwEbeRWgbNEkqO",
            server_nonce: "%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0",
            salt: "W22ZaJ0SNY7soEsUEjb6gQ==",
            last: "c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,\
                   p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ=",
            signature: "v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4=",
        },
    ];

    #[test]
    fn the_worked_examples_of_the_rfcs_come_out_on_both_sides() {
        for v in VECTORS {
            let keys = Keys::derive(v.hash, b"pencil", BASE64.decode(v.salt).unwrap(), 4096);
            let mut client = Client::with_nonce(v.hash, "user", "pencil", v.client_nonce.to_owned());
            let first = client.first();
            let first = ClientFirst::parse(&first).unwrap();
            assert_eq!(first.user, "user");
            let (server, challenge) = Server::begin_with_nonce(v.hash, &first, keys, true, v.server_nonce.as_bytes());
            let expected = format!("r={}{},s={},i=4096", v.client_nonce, v.server_nonce, v.salt);
            assert_eq!(String::from_utf8(challenge.clone()).unwrap(), expected);
            assert_eq!(String::from_utf8(client.respond(&challenge).unwrap()).unwrap(), v.last);
            let last = server.finish(v.last.as_bytes()).unwrap();
            assert_eq!(String::from_utf8(last.clone()).unwrap(), v.signature);
            assert!(client.verify(&last));
        }
    }

    fn exchange(hash: Hash, user: &str, theirs: &str, ours: &str, nonce: &str, known: bool) -> Result<bool, Failure> {
        let keys = Keys::derive(hash, ours.as_bytes(), b"0123456789abcdef".to_vec(), ITERATIONS_MIN);
        let mut client = Client::with_nonce(hash, user, theirs, nonce.to_owned());
        let first = client.first();
        let first = ClientFirst::parse(&first)?;
        assert_eq!(first.user, user);
        let (server, challenge) = Server::begin(hash, &first, keys, known, |b| b.fill(7));
        let last = client.respond(&challenge)?;
        Ok(client.verify(&server.finish(&last)?))
    }

    #[test]
    fn the_right_password_passes_and_any_other_fails_for_every_hash() {
        for hash in Hash::ALL {
            assert_eq!(exchange(hash, "a", "secret", "secret", "n0nce", true), Ok(true));
            assert_eq!(exchange(hash, "a", "secret", "Secret", "n0nce", true), Err(Failure::WrongProof));
            assert_eq!(exchange(hash, "a", "secret", "secret", "n0nce", false), Err(Failure::WrongProof));
        }
    }

    #[test]
    fn nonces_with_spaces_and_names_with_commas_are_fine() {
        let nonce = "0xffffffe9 0x08 0x7f =p= 0x1";
        assert_eq!(exchange(Hash::Sha512, "a,b=c ü", "päss", "päss", nonce, true), Ok(true));
    }

    #[test]
    fn malformed_messages_are_told_apart_from_wrong_passwords() {
        for bad in [&b""[..], b"y,,n=a,r=b", b"p=tls,,n=a,r=b", b"n,,n=a", b"n,,r=b,n=a", b"n,,n=a,r=", b"n,,n=a=2,r=b"]
        {
            assert!(matches!(ClientFirst::parse(bad), Err(Failure::Malformed(_))), "{bad:?}");
        }
        let first = ClientFirst::parse(b"n,someone,n=a,r=b").unwrap();
        for bad in ["", "c=biws,r=b", "c=biws,r=other,p=AAAA", "c=eSws,r=bX,p=AAAA", "c=biws,r=bX,p=@@"] {
            let keys = Keys::derive(Hash::Sha1, b"x", b"salt".to_vec(), 1);
            let (server, _) = Server::begin_with_nonce(Hash::Sha1, &first, keys, true, b"X");
            assert!(matches!(server.finish(bad.as_bytes()), Err(Failure::Malformed(_))), "{bad}");
        }
    }
}
