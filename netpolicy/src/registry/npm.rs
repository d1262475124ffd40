//! npm: package documents, filtered by the `time` of each version.

use super::{Asked, Failed, Outcome, Upstream};
use crate::presets::{Date, Selection};
use crate::range::GATEWAY;
use serde_json::{Map, Value};

const JSON: &str = "application/json";

/// `NAME`, `NAME/VERSION` and `NAME/-/FILE`; a name may have a scope, `@SCOPE/NAME`.
pub async fn look(
    upstream: &Upstream,
    selection: &Selection,
    asked: &Asked<'_>,
) -> Result<Outcome, Failed> {
    let path = asked.path.replace("%2f", "/").replace("%2F", "/").replace("%40", "@");
    let parts: Vec<&str> = path.split('/').collect();
    let (name, rest) = match &parts[..] {
        [scope, name, rest @ ..] if scope.starts_with('@') => (format!("{scope}/{name}"), rest),
        [name, rest @ ..] => ((*name).to_owned(), rest),
        [] => return Ok(Outcome::Missing),
    };
    let is_name = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~@/".contains(&byte);
    if name.is_empty() || name.starts_with('-') || name.len() > 214 || !name.bytes().all(is_name) {
        return Ok(Outcome::Missing);
    }
    if selection.deny.contains(&name.to_ascii_lowercase()) {
        return Ok(Outcome::Hidden(name));
    }
    let base = upstream.base(selection, "");
    let url = format!("{base}/{}", name.replace('/', "%2f"));
    // The short form of the document has no times.
    let Some(all) = upstream.json(&url, JSON).await? else { return Ok(Outcome::Missing) };
    let original = selection.preset().upstream.get("").cloned().unwrap_or_default();
    let mut visible = all.clone();
    filter(&mut visible, selection.before, &[base.clone(), original]);
    let none_is_left = visible["versions"].as_object().is_none_or(Map::is_empty);
    match rest {
        _ if none_is_left => Ok(Outcome::Hidden(name)),
        [] => Ok(Outcome::Document(JSON, visible.to_string().into_bytes())),
        [version] => {
            let tagged = visible["dist-tags"][*version].as_str().unwrap_or(version).to_owned();
            match (visible["versions"].get(&tagged), all["versions"].get(&tagged)) {
                (Some(one), _) => Ok(Outcome::Document(JSON, one.to_string().into_bytes())),
                (None, Some(_)) => Ok(Outcome::Hidden(format!("{name}@{tagged}"))),
                (None, None) => Ok(Outcome::Missing),
            }
        }
        ["-", file] => {
            let path = format!("{name}/-/{file}");
            let ends = |document: &Value, tail: &str| {
                let versions = document["versions"].as_object().into_iter().flatten();
                let mut urls = versions.filter_map(|(_, one)| one["dist"]["tarball"].as_str());
                urls.any(|url| url.ends_with(tail))
            };
            if ends(&visible, &format!("{GATEWAY}/npm/{path}")) {
                return Ok(Outcome::File(format!("{base}/{path}")));
            }
            let exists = ends(&all, &format!("/{path}"));
            Ok(if exists { Outcome::Hidden(path) } else { Outcome::Missing })
        }
        _ => Ok(Outcome::Missing),
    }
}

/// Leaves the versions that were published before this moment and whose files the registry has.
fn filter(document: &mut Value, before: Option<Date>, places: &[String]) {
    let times = document["time"].as_object().cloned().unwrap_or_default();
    let published =
        |version: &str| times.get(version).and_then(Value::as_str).and_then(Date::parse);
    let is_visible = |version: &str| {
        before.is_none_or(|before| published(version).is_some_and(|at| at < before))
    };
    if let Some(versions) = document.get_mut("versions").and_then(Value::as_object_mut) {
        versions.retain(|version, one| {
            let tarball = one["dist"]["tarball"].as_str().and_then(|url| {
                let below = |place: &String| url.strip_prefix(place.as_str())?.strip_prefix('/');
                places.iter().filter(|place| !place.is_empty()).find_map(below)
            });
            let Some(path) = tarball.filter(|_| is_visible(version)).map(str::to_owned) else {
                return false;
            };
            one["dist"]["tarball"] = format!("http://{GATEWAY}/npm/{path}").into();
            true
        });
    }
    let versions: Vec<String> =
        document["versions"].as_object().into_iter().flat_map(Map::keys).cloned().collect();
    if let Some(tags) = document.get_mut("dist-tags").and_then(Value::as_object_mut) {
        tags.retain(|_, version| {
            version.as_str().is_some_and(|version| versions.iter().any(|known| known == version))
        });
        if !tags.contains_key("latest") {
            // What was the latest then: the youngest that is no preview.
            let finished = versions.iter().filter(|version| !version.contains('-'));
            let latest = finished.max_by_key(|version| published(version)).or(versions.last());
            if let Some(latest) = latest {
                tags.insert("latest".to_owned(), latest.clone().into());
            }
        }
    }
    if let Some(document) = document.as_object_mut() {
        document.remove("readme");
        if let Some(times) = document.get_mut("time").and_then(Value::as_object_mut) {
            times.retain(|version, _| versions.contains(version) || version == "created");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn newer_versions_and_their_tags_are_left_out() {
        let base = "https://registry.npmjs.org";
        let version = |number: &str| {
            serde_json::json!({ "version": number,
                "dist": { "tarball": format!("{base}/a/-/a-{number}.tgz") } })
        };
        let mut document = serde_json::json!({
            "dist-tags": { "latest": "3.0.0", "next": "4.0.0-rc1" },
            "versions": { "1.0.0": version("1.0.0"), "2.0.0": version("2.0.0"),
                "2.1.0-beta": version("2.1.0-beta"), "3.0.0": version("3.0.0") },
            "time": { "created": "2020-01-01T00:00:00.000Z", "modified": "2026-01-01T00:00:00.000Z",
                "1.0.0": "2020-01-01T00:00:00.000Z", "2.0.0": "2024-06-01T00:00:00.000Z",
                "2.1.0-beta": "2024-07-01T00:00:00.000Z", "3.0.0": "2025-06-01T00:00:00.000Z" },
            "readme": "3.0.0 is out",
        });
        filter(&mut document, Date::parse("2025-01-01"), &[base.to_owned()]);
        assert_eq!(document["versions"].as_object().unwrap().len(), 3);
        assert_eq!(document["dist-tags"], serde_json::json!({ "latest": "2.0.0" }));
        assert!(!document.to_string().contains("3.0.0"), "{document}");
        assert!(!document.to_string().contains("2026"), "{document}");
    }
}
