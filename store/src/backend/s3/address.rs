//! Which bucket, which part of it, at which server: what an `s3://` URL says.

use crate::backend::s3::conditional::NeverReplacing;
use crate::key::check_prefix;
use layer::{Context, Error, Result};
use object_store::aws::{AmazonS3, AmazonS3Builder, AmazonS3ConfigKey};
use object_store::{BackoffConfig, ClientConfigKey, RetryConfig};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The longest that one request and its answer may take.
const REQUEST_TIMEOUT: &str = "60 seconds";
const CONNECT_TIMEOUT: &str = "5 seconds";
/// Tries of a request whose answer says that another try may help (5xx, 429, a broken connection).
const MAX_RETRIES: usize = 6;
/// No try begins later than this after the first.
const RETRY_TIMEOUT: Duration = Duration::from_secs(60);

/// Where a store lies on an object store.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Address {
    /// The bucket.
    pub bucket: String,
    /// What all names start with: empty, or with a slash at its end.
    pub prefix: String,
    /// The server, for example `http://127.0.0.1:9000`; none is Amazon's, or what `AWS_ENDPOINT_URL` says.
    pub endpoint: Option<String>,
    /// The region; none is what `AWS_REGION` says, or `us-east-1`.
    pub region: Option<String>,
    /// A file with the credentials, in the form of `~/.aws/credentials`; none is the environment.
    pub credentials: Option<PathBuf>,
}

impl Address {
    /// Reads `bucket/prefix`.
    pub fn parse(place: &str) -> Result<Self> {
        let (bucket, prefix) = place.split_once('/').unwrap_or((place, ""));
        let fits = |byte: u8| byte.is_ascii_alphanumeric() || b".-_".contains(&byte);
        if bucket.is_empty() || !bucket.bytes().all(fits) {
            return Err(Error::invalid(format!("{bucket:?} is no name of a bucket")));
        }
        let prefix = match prefix.trim_end_matches('/') {
            "" => String::new(),
            prefix => format!("{prefix}/"),
        };
        check_prefix(&prefix)?;
        Ok(Self { bucket: bucket.to_owned(), prefix, ..Self::default() })
    }

    /// For people.
    pub(super) fn place(&self) -> String {
        let at = self.endpoint.as_ref().map_or(String::new(), |endpoint| format!(" at {endpoint}"));
        format!("s3://{}/{}{at}", self.bucket, self.prefix)
    }

    /// A client; nothing is sent yet. Credentials come from where Amazon's own tools look: `AWS_ACCESS_KEY_ID`
    /// and `AWS_SECRET_ACCESS_KEY`, a web identity, the container's or the machine's role.
    pub(super) fn client(&self) -> Result<AmazonS3> {
        // The TLS of this process; somebody else may have chosen it already.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let retry = RetryConfig {
            backoff: BackoffConfig {
                init_backoff: Duration::from_millis(100),
                max_backoff: Duration::from_secs(10),
                base: 2.0,
            },
            max_retries: MAX_RETRIES,
            retry_timeout: RETRY_TIMEOUT,
        };
        let mut builder = AmazonS3Builder::from_env()
            .with_bucket_name(&self.bucket)
            .with_retry(retry)
            .with_config(AmazonS3ConfigKey::DisableBulkDelete, "true")
            .with_config(AmazonS3ConfigKey::Client(ClientConfigKey::Timeout), REQUEST_TIMEOUT)
            .with_config(
                AmazonS3ConfigKey::Client(ClientConfigKey::ConnectTimeout),
                CONNECT_TIMEOUT,
            )
            .with_http_connector(NeverReplacing::default());
        if let Some(region) = &self.region {
            builder = builder.with_region(region);
        }
        if let Some(endpoint) = &self.endpoint {
            let plain = endpoint.starts_with("http://");
            if !plain && !endpoint.starts_with("https://") {
                let text = format!(
                    "endpoint {endpoint:?} of {} is no http:// or https:// URL",
                    self.bucket
                );
                return Err(Error::invalid(text));
            }
            builder = builder.with_endpoint(endpoint).with_allow_http(plain);
        }
        if let Some(file) = &self.credentials {
            for (key, value) in credentials_in(file)? {
                builder = builder.with_config(key, value);
            }
        }
        builder
            .build()
            .map_err(|error| Error::invalid(format!("store {}", self.place())).with_source(error))
    }
}

/// The `default` section of a credentials file.
fn credentials_in(file: &Path) -> Result<Vec<(AmazonS3ConfigKey, String)>> {
    let what = || format!("credentials file {}", file.display());
    let text = std::fs::read_to_string(file).context(what)?;
    let mut found = Vec::new();
    let mut ours = false;
    for line in text.lines().map(str::trim) {
        if line.starts_with('[') {
            ours = line == "[default]";
        }
        let Some((name, value)) = line.split_once('=').filter(|_| ours) else { continue };
        let key = match name.trim() {
            "aws_access_key_id" => AmazonS3ConfigKey::AccessKeyId,
            "aws_secret_access_key" => AmazonS3ConfigKey::SecretAccessKey,
            "aws_session_token" => AmazonS3ConfigKey::Token,
            _ => continue,
        };
        found.push((key, value.trim().to_owned()));
    }
    if found.len() < 2 {
        return Err(Error::invalid(format!(
            "{}: its section [default] lacks aws_access_key_id and aws_secret_access_key",
            what()
        )));
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::{Address, credentials_in};

    #[test]
    fn credentials_are_those_of_the_default_section() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("credentials");
        let text = "[other]\naws_access_key_id=no\n[default]\naws_access_key_id = a\n# x\naws_secret_access_key=b=\n";
        std::fs::write(&file, text).unwrap();
        let found: Vec<String> =
            credentials_in(&file).unwrap().into_iter().map(|(_, value)| value).collect();
        assert_eq!(found, ["a", "b="]);
        std::fs::write(&file, "[default]\naws_access_key_id = a\n").unwrap();
        assert!(credentials_in(&file).is_err());
        assert!(credentials_in(&directory.path().join("none")).is_err());
    }

    #[test]
    fn an_endpoint_is_a_url() {
        let of = |endpoint: &str| {
            let endpoint = Some(endpoint.to_owned());
            Address { endpoint, ..Address::parse("b").unwrap() }.client()
        };
        assert!(of("http://127.0.0.1:9000").is_ok());
        assert!(of("https://s3.example.org").is_ok());
        let error = of("s3.example.org:9000").unwrap_err();
        assert!(error.to_string().contains("no http:// or https:// URL"), "{error}");
    }

    #[test]
    fn addresses_have_a_bucket_and_perhaps_a_prefix() {
        let parse = |text: &str| {
            let address = Address::parse(text).unwrap();
            (address.bucket, address.prefix)
        };
        let pair = |bucket: &str, prefix: &str| (bucket.to_owned(), prefix.to_owned());
        assert_eq!(parse("b"), pair("b", ""));
        assert_eq!(parse("b/"), pair("b", ""));
        assert_eq!(parse("my.bucket-1/a/b"), pair("my.bucket-1", "a/b/"));
        for bad in ["", "/a", "b/../c", "b/.hidden", "b c", "b/a//c"] {
            assert!(Address::parse(bad).is_err(), "{bad}");
        }
    }
}
