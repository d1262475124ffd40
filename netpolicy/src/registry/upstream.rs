//! The servers of registries, as this host reaches them. Documents are kept for a short while, since a client
//! asks for a list and then for each file in it.

use crate::presets::Selection;
use layer::{Error, ErrorKind, Result};
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The largest document that is read; the largest of npm are about 30 MiB.
const MAX_DOCUMENT_BYTES: usize = 64 << 20;
/// Documents that are kept.
const MAX_KEPT: usize = 32;
/// Bytes of all of them.
const MAX_KEPT_BYTES: usize = 64 << 20;
/// How long they are kept.
const KEPT_FOR: Duration = Duration::from_secs(60);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
const READ_TIMEOUT: Duration = Duration::from_secs(30);

/// Documents by URL, and since when they are kept.
type Kept = HashMap<String, (Instant, Arc<Vec<u8>>)>;

/// A client of all servers.
#[derive(Debug)]
pub struct Upstream {
    client: reqwest::Client,
    mirrors: BTreeMap<String, String>,
    kept: Mutex<Kept>,
}

impl Upstream {
    /// `mirrors`: other places for servers, URL by URL.
    pub fn new(mirrors: BTreeMap<String, String>) -> Result<Self> {
        // Whoever was first has the same.
        let _known = rustls::crypto::ring::default_provider().install_default();
        let client = reqwest::Client::builder()
            .connect_timeout(CONNECT_TIMEOUT)
            .read_timeout(READ_TIMEOUT)
            .redirect(reqwest::redirect::Policy::limited(3))
            .user_agent(concat!("lamella/", env!("CARGO_PKG_VERSION")))
            .build();
        let failed = |error| Error::new(ErrorKind::Internal, "HTTP client").with_source(error);
        Ok(Self { client: client.map_err(failed)?, mirrors, kept: Mutex::default() })
    }

    /// Where this part of a registry is reached.
    pub fn base(&self, selection: &Selection, part: &str) -> String {
        let url = selection.preset().upstream.get(part).cloned().unwrap_or_default();
        let url = self.mirrors.get(&url).cloned().unwrap_or(url);
        url.trim_end_matches('/').to_owned()
    }

    /// Opens a file. `None`: there is no such file.
    pub async fn open(&self, url: &str) -> Result<Option<reqwest::Response>> {
        self.get(url, "*/*").await
    }

    async fn get(&self, url: &str, accept: &str) -> Result<Option<reqwest::Response>> {
        // The list of servers knows where each is mirrored.
        let mirrored = self.mirrors.iter().find_map(|(original, mirror)| {
            let rest = url.strip_prefix(original.as_str()).filter(|rest| rest.starts_with('/'))?;
            Some(format!("{}{rest}", mirror.trim_end_matches('/')))
        });
        let url = mirrored.as_deref().unwrap_or(url);
        let failed = |error: reqwest::Error| {
            Error::new(ErrorKind::Unavailable, format!("GET {url}")).with_source(error)
        };
        let request = self.client.get(url).header("accept", accept);
        let answer = request.send().await.map_err(failed)?;
        match answer.status().as_u16() {
            200 => Ok(Some(answer)),
            403 | 404 | 410 => Ok(None),
            other => {
                Err(Error::new(ErrorKind::Unavailable, format!("GET {url} is answered {other}")))
            }
        }
    }

    /// A document. `None`: there is no such document.
    pub async fn document(&self, url: &str, accept: &str) -> Result<Option<Arc<Vec<u8>>>> {
        if let Some((_, bytes)) = self.lock().get(url).filter(|(at, _)| at.elapsed() < KEPT_FOR) {
            return Ok(Some(Arc::clone(bytes)));
        }
        let Some(mut answer) = self.get(url, accept).await? else { return Ok(None) };
        let mut bytes = Vec::new();
        let failed = |error: reqwest::Error| {
            Error::new(ErrorKind::Unavailable, format!("read {url}")).with_source(error)
        };
        while let Some(chunk) = answer.chunk().await.map_err(failed)? {
            if bytes.len() + chunk.len() > MAX_DOCUMENT_BYTES {
                return Err(Error::new(ErrorKind::NoSpace, format!("{url} is too large")));
            }
            bytes.extend_from_slice(&chunk);
        }
        let bytes = Arc::new(bytes);
        let mut kept = self.lock();
        kept.retain(|_, (at, _)| at.elapsed() < KEPT_FOR);
        let total: usize = kept.values().map(|(_, bytes)| bytes.len()).sum();
        if kept.len() >= MAX_KEPT || total + bytes.len() > MAX_KEPT_BYTES {
            kept.clear();
        }
        kept.insert(url.to_owned(), (Instant::now(), Arc::clone(&bytes)));
        Ok(Some(bytes))
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A JSON document.
    pub async fn json(&self, url: &str, accept: &str) -> Result<Option<serde_json::Value>> {
        let Some(bytes) = self.document(url, accept).await? else { return Ok(None) };
        let wrong =
            |error| Error::new(ErrorKind::Corrupt, format!("{url}: JSON")).with_source(error);
        Ok(Some(serde_json::from_slice(&bytes).map_err(wrong)?))
    }
}
