//! Collections, as far as there are any: every bucket has the scope `_default` with the collection `_default` in it.

use wire::{Reply, Status};

use super::{Context, Refusal, einval};

/// What there is, as clients read it.
pub const MANIFEST: &str =
    r#"{"uid":"0","scopes":[{"name":"_default","uid":"0","collections":[{"name":"_default","uid":"0"}]}]}"#;
const DEFAULT: &[u8] = b"_default";
const NAME_LEN_MAX: usize = 251;

impl Context<'_> {
    pub(super) fn get_manifest(&mut self) -> Result<(), Refusal> {
        self.bucket()?;
        self.value(self.json(), MANIFEST.as_bytes())
    }

    pub(super) fn get_collection_id(&mut self, path: &[u8]) -> Result<(), Refusal> {
        self.bucket()?;
        let Some(dot) = path.iter().position(|&b| b == b'.') else {
            return einval("the path is scope.collection");
        };
        let (scope, collection) = (name(&path[..dot])?, name(&path[dot + 1..])?);
        if scope != DEFAULT {
            return Err(unknown(Status::UnknownScope, scope));
        }
        if collection != DEFAULT {
            return Err(unknown(Status::UnknownCollection, collection));
        }
        self.default_id()
    }

    pub(super) fn get_scope_id(&mut self, path: &[u8]) -> Result<(), Refusal> {
        self.bucket()?;
        let scope = name(path.split(|&b| b == b'.').next().unwrap_or_default())?;
        if scope != DEFAULT {
            return Err(unknown(Status::UnknownScope, scope));
        }
        self.default_id()
    }

    /// The manifest's uid and an id, all of them 0.
    fn default_id(&mut self) -> Result<(), Refusal> {
        self.put(Reply { extras: &[0; 12], ..self.blank(Status::Success) });
        Ok(())
    }
}

/// A name; empty means the default one.
fn name(name: &[u8]) -> Result<&[u8], Refusal> {
    let plain = |b: &u8| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-' | b'%');
    match name {
        b"" => Ok(DEFAULT),
        _ if name.len() <= NAME_LEN_MAX && name.iter().all(plain) => Ok(name),
        _ => einval("a scope or collection name has 1 to 251 characters out of A-Z a-z 0-9 _ - %"),
    }
}

fn unknown(status: Status, name: &[u8]) -> Refusal {
    (status, format!("there is no {}", name.escape_ascii()))
}
