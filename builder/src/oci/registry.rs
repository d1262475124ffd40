//! A client of the OCI distribution protocol: manifests, blobs, referrers. Reads only.
//!
//! Everything that arrives is compared with its digest and size before it is believed. Blobs go to files
//! without names; an interrupted one is asked for from where it ended. Plain HTTP is spoken with loopback
//! addresses and where the caller allows it, never after HTTPS.
//!
//! Blocking; one request of each thread at a time.

use super::auth::Session;
use super::name::ImageName;
use crate::progress::Cancel;
use layer::{Context, Error, ErrorKind, Result};
use oci_spec::image::{Descriptor, ImageIndex};
use sha2::Digest as _;
use std::io::Read;
use std::time::{Duration, Instant};
use ureq::http::{Response, StatusCode};
use ureq::tls::{Certificate, PemItem, RootCerts, TlsConfig, parse_pem};
use ureq::{Agent, Body};

/// Requests that are tried again before we give up, unless they make progress.
const MAX_ATTEMPTS: u32 = 5;
/// The first pause between two attempts; it doubles.
const PAUSE: Duration = Duration::from_millis(200);
/// The longest pause that a registry may ask for.
const MAX_PAUSE: Duration = Duration::from_secs(30);
/// Requests for one answer: redirects, and a demand for credentials.
const MAX_HOPS: usize = 8;
/// How long a connection, an answer or the next bytes of one may take.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Where systems keep the certificates that they trust.
const CERTIFICATES: [&str; 3] =
    ["/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/cert.pem"];
/// Documents that we understand.
const MANIFEST_TYPES: &str = "application/vnd.oci.image.index.v1+json, \
    application/vnd.oci.image.manifest.v1+json, \
    application/vnd.docker.distribution.manifest.list.v2+json, \
    application/vnd.docker.distribution.manifest.v2+json";

/// How to reach a registry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RegistryOptions {
    /// Speak plain HTTP, also with registries that are not on this machine.
    pub insecure: bool,
}

/// A document with the digest that names it.
#[derive(Debug, Clone)]
pub(super) struct Document {
    pub bytes: Vec<u8>,
    pub digest: String,
    pub media_type: String,
}

/// One repository of a registry.
#[derive(Debug)]
pub(super) struct Registry {
    agent: Agent,
    /// `https://host/v2/repository`
    base: String,
    session: Session,
    cancel: Cancel,
}

/// Why an attempt failed, and whether another one may help.
enum Failure {
    Final(Error),
    Passing(Error, Option<Duration>),
}

impl Registry {
    pub(super) fn open(
        name: &ImageName,
        options: RegistryOptions,
        cancel: &Cancel,
    ) -> Result<Self> {
        let plain = options.insecure || name.is_loopback();
        let scheme = if plain { "http" } else { "https" };
        let tls = TlsConfig::builder().root_certs(trusted()).build();
        // A proxy is not asked for what is on this very machine.
        let proxy = if name.is_loopback() { None } else { ureq::Proxy::try_from_env() };
        let agent = Agent::config_builder()
            .proxy(proxy)
            .tls_config(tls)
            .https_only(!plain)
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .user_agent(concat!("lamella/", env!("CARGO_PKG_VERSION")))
            .timeout_connect(Some(TIMEOUT))
            .timeout_recv_response(Some(TIMEOUT))
            .timeout_per_read(Some(TIMEOUT))
            .build()
            .new_agent();
        Ok(Self {
            agent,
            base: format!("{scheme}://{}/v2/{}", name.address(), name.repository()),
            session: Session::new(name, plain)?,
            cancel: cancel.clone(),
        })
    }

    /// A manifest or index by tag or digest.
    pub(super) fn manifest(&self, wanted: &str) -> Result<Document> {
        let url = format!("{}/manifests/{wanted}", self.base);
        let what = || format!("manifest {wanted}");
        let document = self.retry(|| {
            let mut answer = self.get(&url, MANIFEST_TYPES, None)?;
            let bytes = small_body(&mut answer)?;
            Ok((bytes, header(&answer, "content-type"), header(&answer, "docker-content-digest")))
        });
        let (bytes, media_type, stated) = document.context(what)?;
        let by_digest = wanted.contains(':');
        let digest = match (by_digest, stated) {
            (true, _) => wanted.to_owned(),
            // Some registries leave the header out; then what we got names itself.
            (false, Some(stated)) => {
                super::check_digest(&stated).context(what)?;
                stated
            }
            (false, None) => sha256(&bytes),
        };
        super::verify(&bytes, &digest).context(what)?;
        let media_type = media_type.unwrap_or_default();
        Ok(Document { bytes, digest, media_type })
    }

    /// A small blob, or a manifest, that a descriptor names.
    pub(super) fn document(&self, descriptor: &Descriptor, is_manifest: bool) -> Result<Vec<u8>> {
        let digest = descriptor.digest().to_string();
        super::check_digest(&digest)?;
        if descriptor.size() > super::MAX_DOCUMENT_BYTES {
            let text = format!("document {digest} of {} bytes", descriptor.size());
            return Err(Error::invalid(text));
        }
        let bytes = if is_manifest {
            self.manifest(&digest)?.bytes
        } else {
            let url = format!("{}/blobs/{digest}", self.base);
            let bytes = self.retry(|| small_body(&mut self.get(&url, "*/*", None)?));
            bytes.context(|| format!("blob {digest}"))?
        };
        super::check_size(&digest, descriptor.size(), bytes.len() as u64)?;
        super::verify(&bytes, &digest)?;
        Ok(bytes)
    }

    /// Everything of a blob of the stated size, in order. An interrupted answer goes on where it ended.
    pub(super) fn blob(
        &self,
        descriptor: &Descriptor,
        take: &mut dyn FnMut(&[u8]) -> Result<()>,
    ) -> Result<()> {
        let digest = descriptor.digest().to_string();
        super::check_digest(&digest)?;
        let mut transfer = Transfer {
            registry: self,
            url: format!("{}/blobs/{digest}", self.base),
            size: descriptor.size(),
            digest,
            received: 0,
            take,
        };
        let digest = transfer.digest.clone();
        transfer.run().context(|| format!("blob {digest}"))
    }

    /// What refers to this manifest: signatures, attestations, lists of contents. Registries without the
    /// interface keep them under a tag that is made of the digest.
    pub(super) fn referrers(&self, digest: &str, kind: Option<&str>) -> Result<Vec<Descriptor>> {
        super::check_digest(digest)?;
        let url = format!("{}/referrers/{digest}", self.base);
        let what = || format!("referrers of {digest}");
        let answer = self.retry(|| small_body(&mut self.get(&url, MANIFEST_TYPES, None)?));
        let bytes = match answer {
            Ok(bytes) => Some(bytes),
            Err(error) if error.kind() == ErrorKind::NotFound => {
                match self.manifest(&digest.replace(':', "-")) {
                    Ok(document) => Some(document.bytes),
                    Err(error) if error.kind() == ErrorKind::NotFound => None,
                    Err(error) => return Err(error.context(what())),
                }
            }
            Err(error) => return Err(error.context(what())),
        };
        let Some(bytes) = bytes else { return Ok(Vec::new()) };
        let index: ImageIndex = super::parse(&bytes, &what())?;
        let fits = |found: &Descriptor| {
            kind.is_none_or(|kind| {
                found.artifact_type().as_ref().is_some_and(|found| found.to_string() == kind)
            })
        };
        Ok(index.manifests().iter().filter(|found| fits(found)).cloned().collect())
    }

    /// Tries until it works, or cannot work.
    fn retry<T>(&self, mut attempt: impl FnMut() -> Result<T, Failure>) -> Result<T> {
        let mut pause = PAUSE;
        for left in (0..MAX_ATTEMPTS).rev() {
            self.cancel.check()?;
            match attempt() {
                Ok(done) => return Ok(done),
                Err(Failure::Final(error)) => return Err(error),
                Err(Failure::Passing(error, _)) if left == 0 => {
                    return Err(error.context(format!("after {MAX_ATTEMPTS} attempts")));
                }
                Err(Failure::Passing(error, asked)) => {
                    tracing::debug!("try again: {}", error.chain());
                    self.pause(asked.unwrap_or(pause).min(MAX_PAUSE))?;
                    pause *= 2;
                }
            }
        }
        Err(Error::new(ErrorKind::Internal, "no attempt was made"))
    }

    /// Waits, but not for somebody who does not want it any more.
    fn pause(&self, time: Duration) -> Result<()> {
        let begin = Instant::now();
        while let Some(left) = time.checked_sub(begin.elapsed()) {
            self.cancel.check()?;
            std::thread::sleep(left.min(PAUSE));
        }
        Ok(())
    }

    /// One request; a demand for credentials is met once. Redirects are followed here, because what we
    /// are to the registry is nobody else's business.
    fn get(&self, url: &str, accept: &str, from: Option<u64>) -> Result<Response<Body>, Failure> {
        let (mut at, mut met) = (url.to_owned(), false);
        for _ in 0..MAX_HOPS {
            let own = origin(&at) == origin(&self.base);
            let mut request = self.agent.get(&at).header("Accept", accept);
            if let Some(value) = self.session.authorization().filter(|_| own) {
                request = request.header("Authorization", value);
            }
            if let Some(from) = from {
                request = request.header("Range", format!("bytes={from}-"));
            }
            let answer = request.call().map_err(failed)?;
            match answer.status() {
                StatusCode::OK | StatusCode::PARTIAL_CONTENT => return Ok(answer),
                StatusCode::UNAUTHORIZED if own && !met => {
                    met = true;
                    let demands: Vec<String> = answer
                        .headers()
                        .get_all("www-authenticate")
                        .iter()
                        .filter_map(|value| value.to_str().ok().map(str::to_owned))
                        .collect();
                    self.session.answer(&self.agent, &demands).map_err(Failure::Final)?;
                }
                status if status.is_redirection() => {
                    let to = header(&answer, "location").unwrap_or_default();
                    at = redirected(&at, &to).map_err(Failure::Final)?;
                }
                _ => return Err(refused(answer)),
            }
        }
        Err(Failure::Final(Error::invalid("the registry redirects in a circle")))
    }
}

/// Scheme, host and port of an address.
fn origin(url: &str) -> &str {
    let start = url.find("://").map_or(0, |at| at + 3);
    let end = url[start..].find(['/', '?', '#']).map_or(url.len(), |at| start + at);
    &url[..end]
}

/// Where a redirect leads.
fn redirected(from: &str, to: &str) -> Result<String> {
    if to.starts_with("https://") || (to.starts_with("http://") && from.starts_with("http://")) {
        return Ok(to.to_owned());
    }
    if to.starts_with('/') && !to.starts_with("//") {
        return Ok(format!("{}{to}", origin(from)));
    }
    Err(Error::invalid(format!("the registry redirects to {to:?}")))
}

/// A blob on its way.
struct Transfer<'a> {
    registry: &'a Registry,
    url: String,
    digest: String,
    size: u64,
    received: u64,
    take: &'a mut dyn FnMut(&[u8]) -> Result<()>,
}

impl Transfer<'_> {
    fn run(&mut self) -> Result<()> {
        let registry = self.registry;
        let mut before = 0;
        loop {
            // An attempt that brought something begins the count anew.
            match registry.retry(|| self.attempt()) {
                Ok(()) => return Ok(()),
                Err(error) if self.received == before => return Err(error),
                Err(error) if error.kind() != ErrorKind::Unavailable => return Err(error),
                Err(_) => before = self.received,
            }
        }
    }

    /// Takes what one answer brings.
    fn attempt(&mut self) -> Result<(), Failure> {
        let from = (self.received > 0).then_some(self.received);
        let answer = self.registry.get(&self.url, "*/*", from)?;
        let mut skip = match (from, answer.status()) {
            (Some(from), StatusCode::PARTIAL_CONTENT) => {
                let range = header(&answer, "content-range").unwrap_or_default();
                if !range.starts_with(&format!("bytes {from}-")) {
                    let text = format!("asked for bytes from {from}, was given {range:?}");
                    return Err(Failure::Final(Error::corrupt(text)));
                }
                0
            }
            // The whole blob again: what we have of it is passed over.
            (Some(from), _) => from,
            (None, _) => 0,
        };
        let expected = self.size - self.received + skip;
        if let Some(length) = answer.body().content_length()
            && length != expected
        {
            let stated = length + self.received - skip;
            return Err(Failure::Final(self.wrong_size(stated)));
        }
        let mut body = answer.into_body().into_reader();
        let mut buffer = vec![0; 128 << 10];
        loop {
            self.registry.cancel.check().map_err(Failure::Final)?;
            let length = match body.read(&mut buffer) {
                Ok(0) if self.received == self.size => return Ok(()),
                Ok(0) => {
                    let text = format!("ended after {} of {} bytes", self.received, self.size);
                    return Err(Failure::Passing(unavailable(text), None));
                }
                Ok(length) => length as u64,
                Err(error) => {
                    let text = format!("broke off after {} bytes", self.received);
                    return Err(Failure::Passing(unavailable(text).with_source(error), None));
                }
            };
            let old = skip.min(length);
            skip -= old;
            if self.received + (length - old) > self.size {
                return Err(Failure::Final(self.wrong_size(self.received + length - old)));
            }
            (self.take)(&buffer[old as usize..length as usize]).map_err(Failure::Final)?;
            self.received += length - old;
        }
    }

    fn wrong_size(&self, found: u64) -> Error {
        Error::corrupt(format!(
            "{} has {found} bytes or more, its descriptor says {}",
            self.digest, self.size
        ))
    }
}

fn unavailable(text: String) -> Error {
    Error::new(ErrorKind::Unavailable, text)
}

/// What a request that got no answer means.
fn failed(error: ureq::Error) -> Failure {
    let text = "the registry cannot be reached".to_owned();
    match error {
        ureq::Error::Io(_)
        | ureq::Error::Timeout(_)
        | ureq::Error::ConnectionFailed
        | ureq::Error::Protocol(_) => Failure::Passing(unavailable(text).with_source(error), None),
        ureq::Error::HostNotFound => Failure::Final(unavailable(text).with_source(error)),
        _ => Failure::Final(Error::new(ErrorKind::Unavailable, text).with_source(error)),
    }
}

/// What an answer that is no success means.
fn refused(mut answer: Response<Body>) -> Failure {
    let status = answer.status();
    let asked = header(&answer, "retry-after").and_then(|text| text.parse().ok());
    let said = answer.body_mut().with_config().limit(4096).read_to_string().unwrap_or_default();
    let said: String = said.trim().chars().filter(|letter| !letter.is_control()).collect();
    let text = match said.is_empty() {
        true => format!("the registry answers {status}"),
        false => format!("the registry answers {status}: {said}"),
    };
    match status {
        StatusCode::NOT_FOUND => Failure::Final(Error::not_found(text)),
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
            Failure::Final(Error::new(ErrorKind::Denied, text))
        }
        StatusCode::TOO_MANY_REQUESTS | StatusCode::REQUEST_TIMEOUT => {
            Failure::Passing(unavailable(text), asked.map(Duration::from_secs))
        }
        status if status.is_server_error() => {
            Failure::Passing(unavailable(text), asked.map(Duration::from_secs))
        }
        _ => Failure::Final(Error::invalid(text)),
    }
}

fn header(answer: &Response<Body>, name: &str) -> Option<String> {
    answer.headers().get(name)?.to_str().ok().map(str::to_owned)
}

fn small_body(answer: &mut Response<Body>) -> Result<Vec<u8>, Failure> {
    let mut bytes = Vec::new();
    let most = super::MAX_DOCUMENT_BYTES;
    let read = answer.body_mut().as_reader().take(most + 1).read_to_end(&mut bytes);
    if let Err(error) = read {
        let text = format!("an answer broke off after {} bytes", bytes.len());
        return Err(Failure::Passing(unavailable(text).with_source(error), None));
    }
    if bytes.len() as u64 > most {
        let text = format!("the registry sends a document of more than {most} bytes");
        return Err(Failure::Final(Error::invalid(text)));
    }
    Ok(bytes)
}

fn sha256(bytes: &[u8]) -> String {
    crate::source::blob::hex("sha256:", &sha2::Sha256::digest(bytes))
}

/// The certificates that this system trusts; the built-in ones of browsers where it keeps none.
fn trusted() -> RootCerts {
    for path in CERTIFICATES {
        let Ok(bytes) = std::fs::read(path) else { continue };
        let certificates: Vec<Certificate<'static>> = parse_pem(&bytes)
            .filter_map(|item| match item {
                Ok(PemItem::Certificate(certificate)) => Some(certificate),
                _ => None,
            })
            .collect();
        if !certificates.is_empty() {
            return RootCerts::new_with_certs(&certificates);
        }
    }
    RootCerts::WebPki
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn redirects_stay_encrypted_and_are_not_guessed() {
        let follow = |from, to| redirected(from, to).ok();
        assert_eq!(follow("https://a.x/v2/", "https://b.x/c"), Some("https://b.x/c".into()));
        assert_eq!(follow("https://a.x/v2/", "http://b.x/c"), None);
        assert_eq!(follow("http://a.x:5/v2/", "/c?d"), Some("http://a.x:5/c?d".into()));
        assert_eq!(follow("https://a.x/v2/", "//b.x/c"), None);
        assert_eq!(follow("https://a.x/v2/", "file:///etc/passwd"), None);
        assert_ne!(origin("http://127.0.0.1:1/v2"), origin("http://127.0.0.1:2/v2"));
        assert_eq!(origin("http://a.x?b"), "http://a.x");
    }
}
