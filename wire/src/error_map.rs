//! The error map: tells clients what to do about statuses they do not know. One document per version, both made from
//! the status table, because some clients insist on the version they asked for.

use std::fmt::Write;
use std::sync::LazyLock;

use crate::status::Status;

/// The newest version written here.
pub const VERSION_MAX: u16 = 2;
/// Grows whenever the table of statuses changes.
const REVISION: u32 = 1;

static DOCUMENTS: LazyLock<[String; VERSION_MAX as usize]> = LazyLock::new(|| [write(1), write(2)]);

/// The JSON document of the newest version not above `version`. `None` (answer `KeyEnoent`) for version 0.
pub fn error_map(version: u16) -> Option<&'static str> {
    let newest = version.min(VERSION_MAX);
    Some(&DOCUMENTS[usize::from(newest.checked_sub(1)?)])
}

fn write(version: u16) -> String {
    let mut json = format!("{{\"version\":{version},\"revision\":{REVISION},\"errors\":{{");
    for (i, &status) in Status::ALL.iter().enumerate() {
        let comma = if i == 0 { "" } else { "," };
        let attributes = status.attributes().iter().filter(|a| a.since_version() <= version);
        let attributes: Vec<String> = attributes.map(|a| format!("\"{}\"", a.name())).collect();
        // Names and descriptions are ours and need no escaping; a test parses the result.
        write!(
            json,
            "{comma}\"{:x}\":{{\"name\":\"{}\",\"desc\":\"{}\",\"attrs\":[{}]}}",
            status as u16,
            status.name(),
            status.description(),
            attributes.join(",")
        )
        .expect("writing to a string");
    }
    json.push_str("}}");
    json
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    fn document(version: u16) -> Value {
        serde_json::from_str(error_map(version).expect("a document")).expect("valid JSON")
    }

    #[test]
    fn both_versions_are_json_and_list_every_status() {
        for version in [1, 2] {
            let map = document(version);
            assert_eq!(map["version"], version);
            assert!(map["revision"].is_u64());
            let errors = map["errors"].as_object().expect("an object");
            assert_eq!(errors.len(), Status::ALL.len());
            for &status in Status::ALL {
                let row = &errors[&format!("{:x}", status as u16)];
                assert_eq!(row["name"], status.name());
                assert!(row["desc"].as_str().is_some_and(|d| !d.is_empty()));
                assert!(row["attrs"].as_array().is_some());
            }
        }
        assert_eq!(document(2)["errors"]["7"]["attrs"], serde_json::json!(["fetch-config", "invalid-input"]));
    }

    #[test]
    fn version_1_has_no_attribute_that_came_with_version_2() {
        let old = error_map(1).expect("a document");
        assert!(!old.contains("rate-limit") && !old.contains("system-constraint"));
        let new = error_map(2).expect("a document");
        assert!(new.contains("rate-limit") && new.contains("system-constraint"));
    }

    #[test]
    fn a_client_gets_the_newest_version_it_understands() {
        assert_eq!(error_map(0), None);
        assert_eq!(error_map(9), error_map(2));
    }
}
