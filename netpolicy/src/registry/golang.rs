//! Go: the protocol of module proxies, filtered by the `Time` of each version.

use super::{Asked, Failed, Outcome, Upstream};
use crate::presets::{Date, Selection};
use std::sync::Arc;

const TEXT: &str = "text/plain; charset=utf-8";
/// Versions whose times are asked for at once.
const AT_ONCE: usize = 8;
/// Versions of one module that are looked at, the last of its list.
const MAX_VERSIONS: usize = 400;
/// The data base of checksums that clients ask through their proxy.
const CHECKSUMS: &str = "sumdb/sum.golang.org/";

/// `MODULE/@v/list`, `MODULE/@v/VERSION.{info,mod,zip}`, `MODULE/@latest`, `sumdb/...`.
pub async fn look(
    upstream: &Upstream,
    selection: &Selection,
    asked: &Asked<'_>,
) -> Result<Outcome, Failed> {
    if let Some(rest) = asked.path.strip_prefix(CHECKSUMS) {
        return match rest.split('/').next() {
            Some("supported") => Ok(Outcome::Document(TEXT, Vec::new())),
            Some("latest" | "lookup" | "tile") => {
                Ok(Outcome::File(format!("{}/{rest}", upstream.base(selection, "sumdb"))))
            }
            _ => Ok(Outcome::Missing),
        };
    }
    let (module, what) = match asked.path.split_once("/@v/") {
        Some((module, what)) => (module, what),
        None => match asked.path.strip_suffix("/@latest") {
            Some(module) => (module, "@latest"),
            None => return Ok(Outcome::Missing),
        },
    };
    let is_denied = |denied: &String| {
        // Capital letters are written `!x` in paths.
        let plain = module.replace('!', "").to_ascii_lowercase();
        plain.strip_prefix(denied).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    };
    if selection.deny.iter().any(is_denied) {
        return Ok(Outcome::Hidden(module.to_owned()));
    }
    let module = format!("{}/{module}", upstream.base(selection, ""));
    if what == "list" {
        return list(upstream, &module, selection.before).await;
    }
    if what == "@latest" {
        let Some(info) = upstream.document(&format!("{module}/@latest"), "*/*").await? else {
            return Ok(Outcome::Missing);
        };
        if selection.before.is_none_or(|before| time(&info).is_some_and(|at| at < before)) {
            return Ok(Outcome::Document("application/json", info.to_vec()));
        }
        // A client asks for this only when no version is in the list.
        return Ok(Outcome::Hidden(asked.path.to_owned()));
    }
    let Some((version, kind)) = what.rsplit_once('.') else { return Ok(Outcome::Missing) };
    if !["info", "mod", "zip"].contains(&kind) || version.contains('/') {
        return Ok(Outcome::Missing);
    }
    if let Some(before) = selection.before {
        let info = format!("{module}/@v/{version}.info");
        let Some(info) = upstream.document(&info, "*/*").await? else {
            return Ok(Outcome::Missing);
        };
        if time(&info).is_none_or(|at| at >= before) {
            return Ok(Outcome::Hidden(asked.path.to_owned()));
        }
    }
    Ok(Outcome::File(format!("{module}/@v/{what}")))
}

async fn list(upstream: &Upstream, module: &str, before: Option<Date>) -> Result<Outcome, Failed> {
    let Some(all) = upstream.document(&format!("{module}/@v/list"), "*/*").await? else {
        return Ok(Outcome::Missing);
    };
    let text = String::from_utf8_lossy(&all).into_owned();
    let Some(before) = before else { return Ok(Outcome::Document(TEXT, text.into_bytes())) };
    let is_version = |version: &&str| {
        let is_part = |byte: u8| byte.is_ascii_alphanumeric() || b"-.+!".contains(&byte);
        !version.is_empty() && version.len() < 128 && version.bytes().all(is_part)
    };
    let versions: Vec<&str> = text.lines().map(str::trim).filter(is_version).collect();
    let versions = &versions[versions.len().saturating_sub(MAX_VERSIONS)..];
    let mut visible = String::new();
    for some in versions.chunks(AT_ONCE) {
        let asked = some.iter().map(|version| {
            let url = format!("{module}/@v/{version}.info");
            async move { upstream.document(&url, "*/*").await }
        });
        for (version, info) in some.iter().zip(all_of(asked.collect()).await) {
            let published = info?.and_then(|info: Arc<Vec<u8>>| time(&info));
            if published.is_some_and(|at| at < before) {
                visible.push_str(version);
                visible.push('\n');
            }
        }
    }
    Ok(Outcome::Document(TEXT, visible.into_bytes()))
}

/// What several futures answer, in their order, all of them running at once.
async fn all_of<T>(futures: Vec<impl Future<Output = T>>) -> Vec<T> {
    let mut running: Vec<_> = futures.into_iter().map(|future| (Box::pin(future), None)).collect();
    std::future::poll_fn(|context| {
        let mut is_done = true;
        for (future, answer) in running.iter_mut().filter(|(_, answer)| answer.is_none()) {
            match future.as_mut().poll(context) {
                std::task::Poll::Ready(value) => *answer = Some(value),
                std::task::Poll::Pending => is_done = false,
            }
        }
        if is_done { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
    })
    .await;
    running.into_iter().filter_map(|(_, answer)| answer).collect()
}

/// `Time` of a version's description.
fn time(info: &[u8]) -> Option<Date> {
    let info: serde_json::Value = serde_json::from_slice(info).ok()?;
    Date::parse(info["Time"].as_str()?)
}
