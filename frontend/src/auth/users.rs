//! The users of this node and what is kept of their passwords.
//!
//! One small JSON file, read at start and replaced as a whole. Passwords are not in it: per hash it keeps the two SCRAM
//! keys, from which a login can be verified but not made. PLAIN logins are verified against the same keys; as that costs
//! the full PBKDF2 each time, the last password that passed is remembered as a keyed digest, under a key that lives only
//! in this process.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use env::{Env, OpenMode};
use parking_lot::{Mutex, RwLock};
use serde::{Deserialize, Serialize};
use subtle::ConstantTimeEq;

use super::scram::{Hash, ITERATIONS_MIN, Keys};

/// What a new password costs to try, in PBKDF2 iterations; the client pays it at each SCRAM login.
pub const ITERATIONS_DEFAULT: u32 = 10_000;

/// Longest user name in bytes.
pub const NAME_LEN_MAX: usize = 128;

const SALT_LEN: usize = 16;
const SECRET_LEN: usize = 32;

/// What a user may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Everything, bucket administration included.
    Admin,
    /// All data of all buckets.
    Data,
}

/// A name that was proven.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    pub user: Arc<str>,
    pub role: Role,
}

/// Why the users could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum UsersError {
    #[error("{op} {path}: {source}")]
    Io { op: &'static str, path: PathBuf, source: io::Error },
    #[error("{path} is not a users file ({what}); restore it, or remove it to start with a new administrator password")]
    Damaged { path: PathBuf, what: String },
    #[error("{0}")]
    Invalid(String),
}

/// The users, shared by all connections.
pub struct Users {
    env: Env,
    path: Option<PathBuf>,
    /// Makes the salts of users that do not exist: the same for a name each time, unlike any other server's.
    secret: [u8; SECRET_LEN],
    /// Keys the digests of remembered PLAIN passwords.
    session: [u8; SECRET_LEN],
    iterations: u32,
    users: RwLock<BTreeMap<Arc<str>, Arc<User>>>,
    /// One writer of the file at a time.
    saving: Mutex<()>,
}

struct User {
    role: Role,
    keys: [Keys; 3],
    passed: Mutex<Option<Vec<u8>>>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct UsersFile {
    version: u32,
    secret: String,
    users: BTreeMap<String, UserEntry>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct UserEntry {
    role: Role,
    sha512: KeysEntry,
    sha256: KeysEntry,
    sha1: KeysEntry,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct KeysEntry {
    salt: String,
    iterations: u32,
    stored_key: String,
    server_key: String,
}

impl Users {
    /// Users that are kept in memory only.
    pub fn in_memory(env: &Env) -> Users {
        Users::empty(env, None)
    }

    /// Reads `path`; a file that is not there is an empty one.
    pub fn load(env: &Env, path: &Path) -> Result<Users, UsersError> {
        let io = |op, source| UsersError::Io { op, path: path.to_owned(), source };
        let mut users = Users::empty(env, Some(path.to_owned()));
        if !env.storage.exists(path).map_err(|e| io("look for", e))? {
            return Ok(users);
        }
        let file = env.storage.open(path, OpenMode::Read).map_err(|e| io("open", e))?;
        let size = file.size().map_err(|e| io("read", e))?;
        let mut bytes = vec![0; size as usize];
        env::read_exact_at(&*file, &mut bytes, 0).map_err(|e| io("read", e))?;
        let damaged = |what: String| UsersError::Damaged { path: path.to_owned(), what };
        let parsed: UsersFile = serde_json::from_slice(&bytes).map_err(|e| damaged(e.to_string()))?;
        if parsed.version != 1 {
            return Err(damaged(format!("version {}, this program knows 1", parsed.version)));
        }
        let secret = BASE64.decode(&parsed.secret).ok().and_then(|s| <[u8; SECRET_LEN]>::try_from(s).ok());
        users.secret = secret.ok_or_else(|| damaged("the secret is not 32 bytes of base64".to_owned()))?;
        for (name, entry) in &parsed.users {
            let user = User::from_entry(entry).map_err(|what| damaged(format!("user {name}: {what}")))?;
            users.users.get_mut().insert(name.as_str().into(), Arc::new(user));
        }
        Ok(users)
    }

    /// Reads the file again and takes its users for those there are. Who has logged in stays who he was.
    ///
    /// # Errors
    /// It cannot be read or is not there; then nothing has changed.
    pub fn reload(&self) -> Result<(), UsersError> {
        let Some(path) = &self.path else { return Ok(()) };
        let _one = self.saving.lock();
        let found = self.env.storage.exists(path);
        if !found.map_err(|source| UsersError::Io { op: "look for", path: path.clone(), source })? {
            let source = io::Error::from(io::ErrorKind::NotFound);
            return Err(UsersError::Io { op: "open", path: path.clone(), source });
        }
        let read = Users::load(&self.env, path)?;
        *self.users.write() = read.users.into_inner();
        Ok(())
    }

    fn empty(env: &Env, path: Option<PathBuf>) -> Users {
        let (mut secret, mut session) = ([0; SECRET_LEN], [0; SECRET_LEN]);
        env.rng.fill(&mut secret);
        env.rng.fill(&mut session);
        let users = RwLock::new(BTreeMap::new());
        let saving = Mutex::new(());
        Users { env: env.clone(), path, secret, session, iterations: ITERATIONS_DEFAULT, users, saving }
    }

    /// Sets what new passwords cost; at least [`ITERATIONS_MIN`].
    #[must_use]
    pub fn with_iterations(mut self, iterations: u32) -> Users {
        self.iterations = iterations.max(ITERATIONS_MIN);
        self
    }

    pub fn is_empty(&self) -> bool {
        self.users.read().is_empty()
    }

    /// Names and roles, sorted.
    pub fn list(&self) -> Vec<(Arc<str>, Role)> {
        self.users.read().iter().map(|(name, user)| (name.clone(), user.role)).collect()
    }

    /// Adds a user or replaces the password and role of one. Costs PBKDF2 three times. Not on disk before [`Users::save`].
    pub fn set(&self, name: &str, password: &str, role: Role) -> Result<(), UsersError> {
        if name.is_empty() || name.len() > NAME_LEN_MAX || name.chars().any(char::is_control) {
            return Err(UsersError::Invalid(format!(
                "a user name is 1 to {NAME_LEN_MAX} printable bytes, not {name:?}"
            )));
        }
        let keys = Hash::ALL.map(|hash| {
            let mut salt = vec![0; SALT_LEN];
            self.env.rng.fill(&mut salt);
            Keys::derive(hash, password.as_bytes(), salt, self.iterations)
        });
        let user = User { role, keys, passed: Mutex::new(None) };
        self.users.write().insert(name.into(), Arc::new(user));
        Ok(())
    }

    /// Whether there was such a user.
    pub fn remove(&self, name: &str) -> bool {
        self.users.write().remove(name).is_some()
    }

    /// Replaces the file: after `Ok` the users outlive power loss; after `Err` the old file is still whole.
    pub fn save(&self) -> Result<(), UsersError> {
        let Some(path) = &self.path else { return Ok(()) };
        let _one = self.saving.lock();
        let users = self.users.read().iter().map(|(name, user)| (name.to_string(), user.to_entry())).collect();
        let file = UsersFile { version: 1, secret: BASE64.encode(self.secret), users };
        let mut text = serde_json::to_vec_pretty(&file).expect("plain strings and numbers");
        text.push(b'\n');
        replace_file(&self.env, path, &text).map_err(|source| UsersError::Io {
            op: "write",
            path: path.clone(),
            source,
        })
    }

    /// Whether this is the password that passed last for the name. Quick.
    pub fn recognise(&self, name: &str, password: &[u8]) -> Option<Identity> {
        let (name, user) = self.users.read().get_key_value(name).map(|(n, u)| (n.clone(), u.clone()))?;
        let digest = self.digest(password);
        let passed = user.passed.lock();
        let same = passed.as_ref().is_some_and(|known| known.ct_eq(&digest).into());
        same.then(|| Identity { user: name, role: user.role })
    }

    fn digest(&self, password: &[u8]) -> Vec<u8> {
        Hash::Sha256.hmac(&self.session, password)
    }

    /// Verifies a name and a password sent in the clear. A password that is not recognised takes milliseconds.
    pub fn verify_plain(&self, name: &str, password: &[u8]) -> Option<Identity> {
        if let Some(identity) = self.recognise(name, password) {
            return Some(identity);
        }
        let found = self.users.read().get_key_value(name).map(|(n, u)| (n.clone(), u.clone()));
        let Some((name, user)) = found else {
            // As slow as a real one, so that time does not tell who exists.
            self.unknown(Hash::Sha256, name).verify(Hash::Sha256, password);
            return None;
        };
        if !user.keys_for(Hash::Sha256).verify(Hash::Sha256, password) {
            return None;
        }
        *user.passed.lock() = Some(self.digest(password));
        Some(Identity { user: name, role: user.role })
    }

    /// The keys to run an exchange for `name` with, and who that is; `None`: nobody, but the exchange looks the same.
    pub fn scram_keys(&self, hash: Hash, name: &str) -> (Keys, Option<Identity>) {
        match self.users.read().get_key_value(name) {
            Some((name, user)) => (user.keys_for(hash).clone(), Some(Identity { user: name.clone(), role: user.role })),
            None => (self.unknown(hash, name), None),
        }
    }

    /// Keys that no password fits, with a salt that is stable for the name.
    fn unknown(&self, hash: Hash, name: &str) -> Keys {
        let seed = hash.hmac(&self.secret, name.as_bytes());
        let salt = seed[..SALT_LEN].to_vec();
        let key = hash.hmac(&self.secret, &seed);
        Keys { salt, iterations: self.iterations, stored_key: key.clone(), server_key: key }
    }
}

impl User {
    fn keys_for(&self, hash: Hash) -> &Keys {
        &self.keys[hash as usize]
    }

    fn to_entry(&self) -> UserEntry {
        let entry = |hash| {
            let keys = self.keys_for(hash);
            KeysEntry {
                salt: BASE64.encode(&keys.salt),
                iterations: keys.iterations,
                stored_key: BASE64.encode(&keys.stored_key),
                server_key: BASE64.encode(&keys.server_key),
            }
        };
        UserEntry { role: self.role, sha512: entry(Hash::Sha512), sha256: entry(Hash::Sha256), sha1: entry(Hash::Sha1) }
    }

    fn from_entry(entry: &UserEntry) -> Result<User, String> {
        let keys = |hash: Hash, e: &KeysEntry| {
            let decode = |what: &str, text: &str| {
                BASE64.decode(text).map_err(|_| format!("{} {what} is not base64", hash.mechanism()))
            };
            let keys = Keys {
                salt: decode("salt", &e.salt)?,
                iterations: e.iterations,
                stored_key: decode("stored_key", &e.stored_key)?,
                server_key: decode("server_key", &e.server_key)?,
            };
            let fits = keys.stored_key.len() == hash.digest_len() && keys.server_key.len() == hash.digest_len();
            if !fits || keys.iterations < ITERATIONS_MIN {
                return Err(format!("{} keys have the wrong length or too few iterations", hash.mechanism()));
            }
            Ok(keys)
        };
        let keys =
            [keys(Hash::Sha512, &entry.sha512)?, keys(Hash::Sha256, &entry.sha256)?, keys(Hash::Sha1, &entry.sha1)?];
        Ok(User { role: entry.role, keys, passed: Mutex::new(None) })
    }
}

const _: () = assert!(Hash::Sha512 as usize == 0 && Hash::Sha256 as usize == 1 && Hash::Sha1 as usize == 2);

/// Writes a file beside `path`, makes it durable and puts it in its place.
fn replace_file(env: &Env, path: &Path, bytes: &[u8]) -> io::Result<()> {
    let parent = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(".new");
    let temporary = PathBuf::from(temporary);
    if env.storage.exists(&temporary)? {
        env.storage.remove_file(&temporary)?;
    }
    let file = env.storage.open(&temporary, OpenMode::CreateNew)?;
    env::write_all_at(&*file, bytes, 0)?;
    file.sync()?;
    drop(file);
    env.storage.rename(&temporary, path)?;
    env.storage.sync_dir(parent)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn env() -> Env {
        env::os::env()
    }

    #[test]
    fn a_saved_user_is_there_after_a_restart_with_the_same_password() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("users.json");
        let users = Users::load(&env(), &path).unwrap().with_iterations(0);
        assert!(users.is_empty());
        users.set("Administrator", "hunter2", Role::Admin).unwrap();
        users.save().unwrap();
        users.set("other", "x", Role::Data).unwrap();
        users.save().unwrap();

        let users = Users::load(&env(), &path).unwrap();
        let admin = Identity { user: "Administrator".into(), role: Role::Admin };
        for _ in 0..2 {
            assert_eq!(users.verify_plain("Administrator", b"hunter2"), Some(admin.clone()));
            assert_eq!(users.verify_plain("Administrator", b"Hunter2"), None);
        }
        assert_eq!(users.verify_plain("nobody", b"hunter2"), None);
        assert_eq!(users.list().len(), 2);
        let text = fs::read_to_string(&path).unwrap();
        assert!(!text.contains("hunter2"), "no password in the file");
        assert!(users.remove("other") && !users.remove("other"));
    }

    #[test]
    fn a_password_that_was_remembered_is_worth_nothing_after_a_change() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("users.json");
        let users = Users::load(&env(), &path).unwrap().with_iterations(0);
        let passes = |name: &str, password: &str| users.verify_plain(name, password.as_bytes()).is_some();
        for name in ["changed", "removed", "changed on disk"] {
            users.set(name, "old", Role::Data).unwrap();
            assert!(passes(name, "old") && passes(name, "old"));
        }
        users.set("changed", "new", Role::Data).unwrap();
        users.save().unwrap();
        users.remove("removed");
        assert!(!passes("changed", "old") && passes("changed", "new") && !passes("removed", "old"));

        let other = Users::load(&env(), &path).unwrap().with_iterations(0);
        other.set("changed on disk", "new", Role::Data).unwrap();
        other.save().unwrap();
        users.reload().unwrap();
        assert!(!passes("changed on disk", "old") && passes("changed on disk", "new"));
    }

    #[test]
    fn an_unknown_user_has_the_same_salt_each_time_and_after_a_restart() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("users.json");
        let users = Users::load(&env(), &path).unwrap();
        users.save().unwrap();
        let (keys, who) = users.scram_keys(Hash::Sha512, "ghost");
        assert_eq!(who, None);
        let again = Users::load(&env(), &path).unwrap();
        assert_eq!(again.scram_keys(Hash::Sha512, "ghost").0.salt, keys.salt);
        assert_ne!(again.scram_keys(Hash::Sha512, "ghosu").0.salt, keys.salt);
    }

    #[test]
    fn a_damaged_file_is_refused_and_says_what_is_wrong() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("users.json");
        for (text, part) in
            [("", "EOF"), ("{\"version\":1}", "secret"), ("{\"version\":9,\"secret\":\"\",\"users\":{}}", "version 9")]
        {
            fs::write(&path, text).unwrap();
            let error = Users::load(&env(), &path).err().expect("refused").to_string();
            assert!(error.contains(part) && error.contains("users.json"), "{error}");
        }
    }

    #[test]
    fn names_must_be_printable_and_short() {
        let users = Users::in_memory(&env());
        for name in ["", "a\nb", &"x".repeat(129)] {
            assert!(users.set(name, "p", Role::Data).is_err(), "{name:?}");
        }
    }
}
