//! The registries that sandboxes see: PyPI, npm, Go modules and Debian, as a policy lets them be seen.
//!
//! Clients speak plain HTTP to the node's own address between it and its sandboxes; from there it is HTTPS to the
//! registry. What a policy hides (published at its date or later, or denied by name) is in no list and cannot be
//! fetched: a file is passed on only if the filtered list of its package names it.
//!
//! Nothing of a request is passed on but the name of what is wanted, checked. Bounded: documents are read up to
//! a size, files are streamed, connections are counted with the sandbox's others.

mod apt;
mod golang;
mod npm;
mod pypi;
mod upstream;

use crate::denials::{Denial, Reason};
use crate::member::Member;
use crate::network::Members;
use crate::presets::{RegistryKind, Selection};
use crate::range::GATEWAY;
use crate::relay::{member_at, reset};
use bytes::Bytes;
use http_body_util::StreamBody;
use hyper::body::{Frame, Incoming};
use hyper::header::{ACCEPT, CONTENT_LENGTH, CONTENT_TYPE, HOST};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio_stream::wrappers::ReceiverStream;
use upstream::Upstream;

/// How long a client may take for the head of a request.
const HEAD_TIMEOUT: Duration = Duration::from_secs(20);

/// Pieces of an answer, as they come.
type Pieces = ReceiverStream<Result<Frame<Bytes>, io::Error>>;
type Answer = Response<StreamBody<Pieces>>;

/// What a registry makes of a request.
enum Outcome {
    /// This document, of this type.
    Document(&'static str, Vec<u8>),
    /// This file of the upstream.
    File(String),
    /// Neither here nor there.
    Missing,
    /// It exists, and this sandbox does not see it.
    Hidden(String),
}

/// Why there is no outcome.
type Failed = layer::Error;

/// Serves every registry of a node.
#[derive(Debug)]
pub struct Registries {
    upstream: Upstream,
}

/// A request, as far as it counts.
struct Asked<'a> {
    /// Below the registry's prefix, without a query.
    path: &'a str,
    /// Name of the server that was asked, for those that the node plays.
    host: &'a str,
    /// What the client wants to be answered.
    accept: &'a str,
}

impl Registries {
    /// `mirrors`: other places for the servers of registries.
    pub fn new(mirrors: BTreeMap<String, String>) -> layer::Result<Self> {
        Ok(Self { upstream: Upstream::new(mirrors)? })
    }

    /// Accepts for ever.
    pub async fn serve(self: Arc<Self>, listener: TcpListener, members: Arc<Members>) {
        loop {
            let Ok((client, from)) = listener.accept().await else {
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            };
            let Some(member) = member_at(from, &members) else {
                reset(client);
                continue;
            };
            match member.open_registry() {
                Ok(flow) => drop(tokio::spawn(Arc::clone(&self).talk(client, member, flow))),
                Err(reason) => {
                    member.deny(Denial::now(reason, "http").to(GATEWAY, 80));
                    reset(client);
                }
            }
        }
    }

    async fn talk(
        self: Arc<Self>,
        client: TcpStream,
        member: Arc<Member>,
        mut flow: crate::member::OpenFlow,
    ) {
        let service = service_fn(|request| {
            let (registries, member) = (Arc::clone(&self), Arc::clone(&member));
            async move { Ok::<_, Infallible>(registries.answer(&request, &member).await) }
        });
        let talk = hyper::server::conn::http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(HEAD_TIMEOUT)
            .max_buf_size(64 << 10)
            .serve_connection(TokioIo::new(client), service);
        tokio::select! {
            ended = talk => if let Err(error) = ended {
                tracing::debug!(%error, "a client of a registry");
            },
            _ = &mut flow.revoked => {}
        }
    }

    async fn answer(&self, request: &Request<Incoming>, member: &Member) -> Answer {
        let header = |name| request.headers().get(name).and_then(|value| value.to_str().ok());
        let host = request.uri().host().or_else(|| header(HOST)).unwrap_or_default();
        let host = host.split(':').next().unwrap_or_default().to_ascii_lowercase();
        let path = request.uri().path();
        let is_head = request.method() == Method::HEAD;
        if request.method() != Method::GET && !is_head {
            return text(StatusCode::METHOD_NOT_ALLOWED, "packages can be read, nothing else");
        }
        let policy = member.policy();
        let refuse = |reason: Reason, name: &str| {
            member.deny(Denial::now(reason, "http").to(GATEWAY, 80).named(name));
        };
        let Some((kind, rest)) = route(&host, path) else {
            refuse(Reason::NotAllowed, path);
            return text(StatusCode::NOT_FOUND, "no registry is here");
        };
        let Some(selection) = policy.registry(kind) else {
            refuse(Reason::NotAllowed, path);
            return text(StatusCode::FORBIDDEN, "this registry is not allowed");
        };
        let asked = Asked { path: rest, host: &host, accept: header(ACCEPT).unwrap_or_default() };
        let outcome =
            if is_clean(rest) { self.look(selection, &asked).await } else { Ok(Outcome::Missing) };
        match outcome {
            Ok(Outcome::Document(kind, bytes)) => document(StatusCode::OK, kind, bytes, is_head),
            Ok(Outcome::File(url)) => self.file(&url, is_head).await,
            Ok(Outcome::Missing) => text(StatusCode::NOT_FOUND, "not found"),
            Ok(Outcome::Hidden(what)) => {
                refuse(Reason::Hidden, &what);
                text(StatusCode::NOT_FOUND, "not found: the policy of this sandbox hides it")
            }
            Err(error) => {
                tracing::warn!(id = member.id(), error = %error.chain(), "a registry");
                text(StatusCode::BAD_GATEWAY, "the registry does not answer")
            }
        }
    }

    async fn look(&self, selection: &Selection, asked: &Asked<'_>) -> Result<Outcome, Failed> {
        match selection.kind {
            RegistryKind::Pypi => pypi::look(&self.upstream, selection, asked).await,
            RegistryKind::Npm => npm::look(&self.upstream, selection, asked).await,
            RegistryKind::Go => golang::look(&self.upstream, selection, asked).await,
            RegistryKind::Apt => apt::look(selection, asked),
        }
    }

    /// Streams a file of the upstream.
    async fn file(&self, url: &str, is_head: bool) -> Answer {
        let mut file = match self.upstream.open(url).await {
            Ok(Some(file)) => file,
            Ok(None) => return text(StatusCode::NOT_FOUND, "not found"),
            Err(error) => {
                tracing::warn!(error = %error.chain(), "a file of a registry");
                return text(StatusCode::BAD_GATEWAY, "the registry does not answer");
            }
        };
        let (sender, receiver) = tokio::sync::mpsc::channel(4);
        let length = file.content_length();
        if !is_head {
            tokio::spawn(async move {
                loop {
                    let piece = match file.chunk().await {
                        Ok(Some(bytes)) => Ok(Frame::data(bytes)),
                        Ok(None) => return,
                        Err(error) => Err(io::Error::other(error)),
                    };
                    let is_last = piece.is_err();
                    if sender.send(piece).await.is_err() || is_last {
                        return;
                    }
                }
            });
        }
        let mut answer = Response::new(StreamBody::new(ReceiverStream::new(receiver)));
        let headers = answer.headers_mut();
        headers.insert(
            CONTENT_TYPE,
            hyper::header::HeaderValue::from_static("application/octet-stream"),
        );
        if let Some(length) = length {
            headers.insert(CONTENT_LENGTH, length.into());
        }
        answer
    }
}

/// Which registry a request is for, and what it asks of it.
fn route<'a>(host: &str, path: &'a str) -> Option<(RegistryKind, &'a str)> {
    if apt::SERVERS.contains(&host) {
        return Some((RegistryKind::Apt, path.strip_prefix('/')?));
    }
    let (registry, rest) = path.strip_prefix('/')?.split_once('/')?;
    let kind = match registry {
        "pypi" => RegistryKind::Pypi,
        "npm" => RegistryKind::Npm,
        "go" => RegistryKind::Go,
        _ => return None,
    };
    Some((kind, rest))
}

/// Whether a path has nothing in it that a server could read in another way than we do.
fn is_clean(path: &str) -> bool {
    const MAX_BYTES: usize = 1024;
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~+!@/:=,%".contains(&byte);
    path.len() <= MAX_BYTES
        && path.bytes().all(is_plain)
        && path.split('/').all(|part| part != "." && part != "..")
        && !path.to_ascii_lowercase().contains("%2e")
}

fn text(status: StatusCode, words: &str) -> Answer {
    document(status, "text/plain", format!("{words}\n").into_bytes(), false)
}

fn document(status: StatusCode, kind: &'static str, bytes: Vec<u8>, is_head: bool) -> Answer {
    let (sender, receiver) = tokio::sync::mpsc::channel(1);
    let length = bytes.len();
    if !is_head {
        // A new queue has room for one.
        let _queued = sender.try_send(Ok(Frame::data(Bytes::from(bytes))));
    }
    let mut answer = Response::new(StreamBody::new(ReceiverStream::new(receiver)));
    *answer.status_mut() = status;
    let headers = answer.headers_mut();
    headers.insert(CONTENT_TYPE, hyper::header::HeaderValue::from_static(kind));
    headers.insert(CONTENT_LENGTH, length.into());
    answer
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_find_their_registry_and_strange_paths_none() {
        assert_eq!(route("x", "/pypi/simple/a/"), Some((RegistryKind::Pypi, "simple/a/")));
        assert_eq!(
            route("deb.debian.org", "/debian/dists/x"),
            Some((RegistryKind::Apt, "debian/dists/x"))
        );
        for path in ["/", "/pypi", "/other/x", ""] {
            assert_eq!(route("x", path), None, "{path}");
        }
        for path in ["a/../b", "a/./b", "a/%2e%2E/b", "a b", "a?b", "a\\b", "a#b"] {
            assert!(!is_clean(path), "{path}");
        }
        assert!(is_clean("@scope%2fname"));
    }
}
