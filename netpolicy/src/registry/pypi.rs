//! PyPI: the simple index (PEP 503, 691, 700), filtered by the time of each file's upload.

use super::{Asked, Failed, Outcome, Upstream};
use crate::presets::{Date, Selection, package_key};
use crate::range::GATEWAY;
use serde_json::Value;
use std::fmt::Write;

const JSON: &str = "application/vnd.pypi.simple.v1+json";
const HTML: &str = "text/html; charset=utf-8";

/// `simple/NAME/` and `files/NAME/PATH`.
pub async fn look(
    upstream: &Upstream,
    selection: &Selection,
    asked: &Asked<'_>,
) -> Result<Outcome, Failed> {
    let (what, rest) = asked.path.split_once('/').unwrap_or((asked.path, ""));
    let (project, path) = rest.split_once('/').unwrap_or((rest, ""));
    let project = package_key(selection.kind, project);
    let is_name = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
    if project.is_empty() || project.len() > 128 || !project.bytes().all(is_name) {
        return Ok(Outcome::Missing);
    }
    if selection.deny.contains(&project) {
        return Ok(Outcome::Hidden(project));
    }
    let url = format!("{}/simple/{project}/", upstream.base(selection, ""));
    let Some(mut index) = upstream.json(&url, JSON).await? else { return Ok(Outcome::Missing) };
    let places = [
        upstream.base(selection, "files"),
        selection.preset().upstream.get("files").cloned().unwrap_or_default(),
    ];
    match what {
        "simple" if path.is_empty() => {
            filter(&mut index, selection.before, &project, &places);
            if asked.accept.contains("json") {
                return Ok(Outcome::Document(JSON, index.to_string().into_bytes()));
            }
            Ok(Outcome::Document(HTML, html(&index, &project).into_bytes()))
        }
        "files" => {
            let all = index.clone();
            filter(&mut index, selection.before, &project, &places);
            // Of each file there may be its metadata alone beside it (PEP 658).
            let file = path.strip_suffix(".metadata").unwrap_or(path);
            let wanted = ours(&project, file);
            if files(&index).any(|known| known["url"].as_str() == Some(&wanted)) {
                return Ok(Outcome::File(format!("{}/{path}", places[0])));
            }
            let exists = files(&all).any(|known| {
                known["url"].as_str().is_some_and(|url| url.ends_with(&format!("/{file}")))
            });
            Ok(if exists { Outcome::Hidden(file.to_owned()) } else { Outcome::Missing })
        }
        _ => Ok(Outcome::Missing),
    }
}

fn files(index: &Value) -> impl Iterator<Item = &Value> {
    index["files"].as_array().into_iter().flatten()
}

/// Where a sandbox finds a file.
fn ours(project: &str, path: &str) -> String {
    format!("http://{GATEWAY}/pypi/files/{project}/{path}")
}

/// Leaves what was uploaded before this moment, and lies where the registry's files lie.
fn filter(index: &mut Value, before: Option<Date>, project: &str, places: &[String]) {
    if let Some(files) = index.get_mut("files").and_then(Value::as_array_mut) {
        files.retain_mut(|file| {
            let uploaded = file["upload-time"].as_str().and_then(Date::parse);
            let is_visible = before.is_none_or(|before| uploaded.is_some_and(|at| at < before));
            let path = file["url"].as_str().and_then(|url| {
                let below = |place: &String| url.strip_prefix(place.as_str())?.strip_prefix('/');
                places.iter().filter(|place| !place.is_empty()).find_map(below)
            });
            let Some(url) = path.filter(|_| is_visible).map(|path| ours(project, path)) else {
                return false;
            };
            file["url"] = url.into();
            true
        });
    }
    if let Some(index) = index.as_object_mut() {
        // A list of versions would name the hidden ones; without it the index is of the older format.
        index.remove("versions");
        index.insert("meta".to_owned(), serde_json::json!({ "api-version": "1.0" }));
    }
}

/// The index as older clients want it.
fn html(index: &Value, project: &str) -> String {
    let mut text = format!("<!DOCTYPE html><html><head><title>{project}</title></head><body>\n");
    for file in files(index) {
        let word = |key: &str| escape(file[key].as_str().unwrap_or_default());
        let (url, name) = (word("url"), word("filename"));
        let hash = file["hashes"]["sha256"].as_str().map(escape);
        let hash = hash.map(|hash| format!("#sha256={hash}")).unwrap_or_default();
        let python = word("requires-python");
        let python = match python.as_str() {
            "" => String::new(),
            python => format!(" data-requires-python=\"{python}\""),
        };
        let yanked = match &file["yanked"] {
            Value::String(why) => format!(" data-yanked=\"{}\"", escape(why)),
            Value::Bool(true) => " data-yanked=\"\"".to_owned(),
            _ => String::new(),
        };
        // Writing to a string does not fail.
        let _written = writeln!(text, "<a href=\"{url}{hash}\"{python}{yanked}>{name}</a><br>");
    }
    text.push_str("</body></html>\n");
    text
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn newer_files_and_foreign_ones_are_left_out() {
        let file = |name: &str, place: &str, at: Option<&str>| {
            serde_json::json!({ "filename": name, "url": format!("{place}/packages/{name}"),
                "upload-time": at, "hashes": { "sha256": "00" }, "requires-python": ">=3" })
        };
        let files = "https://files.pythonhosted.org";
        let mut index = serde_json::json!({ "name": "a", "versions": ["1", "2"], "files": [
            file("old", files, Some("2024-12-31T23:59:59.9Z")),
            file("new", files, Some("2025-01-01T00:00:00Z")),
            file("unknown", files, None),
            file("elsewhere", "https://evil.com", Some("2020-01-01T00:00:00Z")),
        ]});
        filter(&mut index, Date::parse("2025-01-01"), "a", &[files.to_owned()]);
        assert_eq!(index["files"].as_array().unwrap().len(), 1);
        assert_eq!(index["files"][0]["url"], ours("a", "packages/old"));
        assert!(index.get("versions").is_none());
        let html = html(&index, "a");
        assert!(
            html.contains("packages/old#sha256=00\" data-requires-python=\"&gt;=3\">old</a>"),
            "{html}"
        );
    }
}
