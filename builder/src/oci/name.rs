//! Names of images in registries: `[docker://]host[:port]/repository[:tag][@digest]`.
//!
//! Follows what docker and skopeo take: no host means Docker Hub, where a name of one word stands below
//! `library/`.

use layer::{Error, Result};
use std::fmt;
use std::str::FromStr;

/// What stands before a name in a source's text.
pub(crate) const PREFIX: &str = "docker://";
/// Where names without a host live, as people and configuration files call it.
const HUB: &str = "docker.io";
/// The host that answers for it.
const HUB_HOST: &str = "registry-1.docker.io";

/// An image in a registry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageName {
    host: String,
    repository: String,
    tag: Option<String>,
    digest: Option<String>,
}

impl ImageName {
    /// The registry as names spell it, with its port.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// The host and port to connect to.
    pub(crate) fn address(&self) -> &str {
        if self.host == HUB { HUB_HOST } else { &self.host }
    }

    /// Whether the registry is this very machine.
    pub(crate) fn is_loopback(&self) -> bool {
        let host = match self.host.strip_prefix('[') {
            Some(rest) => rest.split(']').next().unwrap_or(rest),
            None => self.host.split(':').next().unwrap_or(&self.host),
        };
        host == "localhost"
            || host.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
    }

    /// The repository below the host.
    pub fn repository(&self) -> &str {
        &self.repository
    }

    /// The tag, where one is named.
    pub fn tag(&self) -> Option<&str> {
        self.tag.as_deref()
    }

    /// The digest, where one is named; it wins over the tag.
    pub fn digest(&self) -> Option<&str> {
        self.digest.as_deref()
    }

    /// What to ask the registry for.
    pub(crate) fn wanted(&self) -> &str {
        self.digest.as_deref().or(self.tag.as_deref()).unwrap_or("latest")
    }
}

impl FromStr for ImageName {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let refuse = |why: &str| Error::invalid(format!("image name {text:?} {why}"));
        let rest = text.strip_prefix(PREFIX).unwrap_or(text);
        let (rest, digest) = match rest.split_once('@') {
            Some((rest, digest)) => {
                super::check_digest(digest)?;
                (rest, Some(digest.to_owned()))
            }
            None => (rest, None),
        };
        let (host, path) = match rest.split_once('/') {
            Some((host, path)) if host == "localhost" || host.contains(['.', ':']) => (host, path),
            _ => (HUB, rest),
        };
        let (path, tag) = match path.rsplit_once(':') {
            Some((path, tag)) => (path, Some(tag.to_owned())),
            None => (path, None),
        };
        let host_fits = |byte: u8| byte.is_ascii_alphanumeric() || b".-:[]_".contains(&byte);
        if host.is_empty() || !host.bytes().all(host_fits) {
            return Err(refuse("has no valid host"));
        }
        let part_fits = |part: &str| {
            let inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
            part.bytes().next().is_some_and(inner)
                && part.bytes().all(|byte| inner(byte) || b"._-".contains(&byte))
        };
        if path.len() > 255 || !path.split('/').all(part_fits) {
            return Err(refuse("has no valid repository (lower case words, `.`, `_`, `-`, `/`)"));
        }
        let tag_fits = |tag: &String| {
            let inner = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
            tag.len() <= 128
                && tag.bytes().next().is_some_and(inner)
                && tag.bytes().all(|byte| inner(byte) || b".-".contains(&byte))
        };
        if !tag.iter().all(tag_fits) {
            return Err(refuse("has no valid tag"));
        }
        let library = host == HUB && !path.contains('/');
        let repository = if library { format!("library/{path}") } else { path.to_owned() };
        Ok(Self { host: host.to_owned(), repository, tag, digest })
    }
}

impl fmt::Display for ImageName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{PREFIX}{}/{}", self.host, self.repository)?;
        if let Some(tag) = &self.tag {
            write!(f, ":{tag}")?;
        }
        self.digest.as_ref().map_or(Ok(()), |digest| write!(f, "@{digest}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_docker_reads_them() {
        let digest = format!("sha256:{}", "0f".repeat(32));
        for (text, full) in [
            ("debian", "docker://docker.io/library/debian".to_owned()),
            ("docker://a/b:v1", "docker://docker.io/a/b:v1".to_owned()),
            ("localhost/x", "docker://localhost/x".to_owned()),
            ("127.0.0.1:5000/a/b_c:V.1-2", "docker://127.0.0.1:5000/a/b_c:V.1-2".to_owned()),
            (&format!("ghcr.io/a/b:t@{digest}"), format!("docker://ghcr.io/a/b:t@{digest}")),
        ] {
            let name: ImageName = text.parse().unwrap();
            assert_eq!(name.to_string(), full);
            assert_eq!(full.parse::<ImageName>().unwrap(), name);
        }
        let name: ImageName = format!("ghcr.io/a/b:t@{digest}").parse().unwrap();
        assert_eq!(name.wanted(), digest);
        assert_eq!("debian".parse::<ImageName>().unwrap().address(), HUB_HOST);
    }

    #[test]
    fn names_that_could_reach_elsewhere_are_refused() {
        for bad in [
            "",
            "docker://",
            "host.x/",
            "host.x/../etc",
            "host.x/a//b",
            "host.x/UPPER",
            "host.x/a:",
            "host.x/a:.t",
            "user@host.x/a",
            "host.x/a@sha256:00",
            "ho st.x/a",
            "host.x/a?b=c",
            "host.x/a%2e",
        ] {
            assert!(bad.parse::<ImageName>().is_err(), "{bad}");
        }
    }

    #[test]
    fn only_loopback_is_loopback() {
        for (text, loopback) in [
            ("localhost:5000/a", true),
            ("127.0.0.1:5000/a", true),
            ("127.1.2.3/a", true),
            ("[::1]:5000/a", true),
            ("localhost.evil.org/a", false),
            ("128.0.0.1/a", false),
        ] {
            assert_eq!(text.parse::<ImageName>().unwrap().is_loopback(), loopback, "{text}");
        }
    }
}
