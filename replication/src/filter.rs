//! What a stream is about: the collections it was asked for, and what else came as JSON with the request.

use types::{CollectionId, Item, Seqno};
use wire::Status;

use crate::producer::Refusal;

/// Which changes a stream shows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Filter {
    /// Of every collection.
    All,
    /// Of the default collection: the connection knows of no other.
    Default,
    Collections(Vec<CollectionId>),
}

/// The value of a STREAM_REQ.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Wishes {
    pub filter: Filter,
    pub stream_id: Option<u16>,
    pub purge: Option<Seqno>,
}

impl Filter {
    pub fn admits(&self, item: &Item) -> bool {
        match self {
            Filter::All => true,
            Filter::Default => item.key().collection() == CollectionId(0),
            Filter::Collections(ids) => ids.contains(&item.key().collection()),
        }
    }
}

impl Wishes {
    /// `exists` says which collections there are.
    pub fn parse(
        json: &[u8],
        knows_collections: bool,
        exists: impl Fn(CollectionId) -> bool,
    ) -> Result<Wishes, Refusal> {
        let filter = if knows_collections { Filter::All } else { Filter::Default };
        let mut wishes = Wishes { filter, stream_id: None, purge: None };
        if json.is_empty() {
            return Ok(wishes);
        }
        if !knows_collections {
            return Err(einval("a filter needs collections to be negotiated"));
        }
        let object: serde_json::Map<String, serde_json::Value> =
            serde_json::from_slice(json).map_err(|_| einval("the value is not a JSON object"))?;
        for (key, value) in &object {
            let wrong = || einval(&format!("{key:?} cannot be {value}"));
            let text = || value.as_str().ok_or_else(wrong);
            let hex = |text: &str| u32::from_str_radix(text, 16).map_err(|_| wrong());
            match key.as_str() {
                "collections" => {
                    let names = value.as_array().filter(|names| !names.is_empty()).ok_or_else(wrong)?;
                    let mut ids = Vec::new();
                    for name in names {
                        let id = CollectionId(hex(name.as_str().ok_or_else(wrong)?)?);
                        if !exists(id) {
                            return Err(Refusal::new(
                                Status::UnknownCollection,
                                format!("no collection {id:#x}", id = id.0),
                            ));
                        }
                        ids.push(id);
                    }
                    wishes.filter = Filter::Collections(ids);
                }
                "scope" if hex(text()?)? != 0 => {
                    return Err(Refusal::new(Status::UnknownScope, format!("no scope {value}")));
                }
                "scope" if object.contains_key("collections") => {
                    return Err(einval("a filter names a scope or collections, not both"));
                }
                "scope" => wishes.filter = Filter::Collections(vec![CollectionId(0)]),
                // The manifest here is the first one, so everybody knows at least that.
                "uid" => drop(u64::from_str_radix(text()?, 16).map_err(|_| wrong())?),
                "sid" => {
                    let id = value.as_u64().and_then(|id| u16::try_from(id).ok()).filter(|id| *id > 0);
                    wishes.stream_id = Some(id.ok_or_else(wrong)?);
                }
                "purge_seqno" => wishes.purge = Some(Seqno(text()?.parse().map_err(|_| wrong())?)),
                _ => return Err(einval(&format!("a filter has no {key:?}"))),
            }
        }
        Ok(wishes)
    }
}

fn einval(context: &str) -> Refusal {
    Refusal::new(Status::Einval, context)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filter_says_what_it_is_about_or_is_refused() {
        let parse = |json: &str| Wishes::parse(json.as_bytes(), true, |id| id.0 == 0).map_err(|refusal| refusal.status);
        let filter = |filter| Ok(Wishes { filter, stream_id: None, purge: None });
        let default = || Filter::Collections(vec![CollectionId(0)]);
        assert_eq!(parse(""), filter(Filter::All));
        assert_eq!(parse("{}"), filter(Filter::All));
        assert_eq!(parse(r#"{"collections":["0"],"uid":"a"}"#), filter(default()));
        assert_eq!(parse(r#"{"scope":"0"}"#), filter(default()));
        let both = parse(r#"{"sid":3,"purge_seqno":"12"}"#);
        assert_eq!(both, Ok(Wishes { filter: Filter::All, stream_id: Some(3), purge: Some(Seqno(12)) }));
        assert_eq!(parse(r#"{"collections":["8"]}"#), Err(Status::UnknownCollection));
        assert_eq!(parse(r#"{"scope":"8"}"#), Err(Status::UnknownScope));
        for json in [
            "nonsense",
            "[]",
            r#"{"collections":[]}"#,
            r#"{"collections":["x"]}"#,
            r#"{"collections":["0"],"scope":"0"}"#,
            r#"{"sid":0}"#,
            r#"{"sid":65536}"#,
            r#"{"purge_seqno":12}"#,
            r#"{"colections":["0"]}"#,
        ] {
            assert_eq!(parse(json), Err(Status::Einval), "{json}");
        }
        let bare = |json: &[u8]| Wishes::parse(json, false, |_| true).map_err(|refusal| refusal.status);
        assert_eq!(bare(b""), filter(Filter::Default));
        assert_eq!(bare(b"{}"), Err(Status::Einval));
    }
}
