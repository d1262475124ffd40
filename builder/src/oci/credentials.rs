//! Who we are to a registry: docker's configuration file and its credential helpers.
//!
//! Only read; nothing here is ever printed.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use layer::{Context, Error, ErrorKind, Result};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::fmt;
use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// Docker Hub's name in docker's files.
const HUB_KEY: &str = "https://index.docker.io/v1/";
/// The longest configuration file.
const MAX_CONFIG_BYTES: u64 = 4 << 20;
/// The user name by which a helper says that the secret is a token.
const TOKEN_USER: &str = "<token>";

/// Who we are.
#[derive(Clone, PartialEq, Eq)]
pub(super) enum Credentials {
    /// A name and a password.
    Password(String, String),
    /// A token to get other tokens with.
    Identity(String),
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Password(..) => "Password",
            Self::Identity(_) => "Identity",
        })
    }
}

impl Credentials {
    /// The value of an `Authorization` header.
    pub(super) fn basic(&self) -> Option<String> {
        match self {
            Self::Password(user, password) => {
                Some(format!("Basic {}", STANDARD.encode(format!("{user}:{password}"))))
            }
            Self::Identity(_) => None,
        }
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Config {
    auths: BTreeMap<String, Entry>,
    cred_helpers: BTreeMap<String, String>,
    creds_store: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Entry {
    auth: Option<String>,
    username: Option<String>,
    password: Option<String>,
    identitytoken: Option<String>,
}

impl fmt::Debug for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Entry")
    }
}

/// What docker's configuration says about this registry and repository.
pub(super) fn find(host: &str, repository: &str) -> Result<Option<Credentials>> {
    let Some(path) = config_path() else { return Ok(None) };
    let bytes = match std::fs::metadata(&path) {
        Ok(metadata) if metadata.len() > MAX_CONFIG_BYTES => {
            return Err(Error::invalid(format!("{} is too large", path.display())));
        }
        Ok(_) => std::fs::read(&path).context(|| format!("read {}", path.display()))?,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(Error::io(format!("read {}", path.display()), error)),
    };
    // Its source may quote the file.
    let config: Config = serde_json::from_slice(&bytes)
        .map_err(|_| Error::invalid(format!("{} is no docker configuration", path.display())))?;
    choose(&config, host, repository).context(|| path.display().to_string())
}

fn config_path() -> Option<PathBuf> {
    match std::env::var_os("DOCKER_CONFIG") {
        Some(folder) if !folder.is_empty() => Some(PathBuf::from(folder).join("config.json")),
        _ => Some(PathBuf::from(std::env::var_os("HOME")?).join(".docker/config.json")),
    }
}

fn choose(config: &Config, host: &str, repository: &str) -> Result<Option<Credentials>> {
    let server = if host == "docker.io" { HUB_KEY } else { host };
    let helper = config.cred_helpers.get(host).or_else(|| config.cred_helpers.get(server));
    if let Some(helper) = helper {
        return ask_helper(helper, server);
    }
    // The most special name first: podman writes repositories too.
    let full = format!("{host}/{repository}");
    let ends = full.match_indices('/').map(|(at, _)| at).chain([full.len()]);
    let mut names: Vec<&str> = ends.map(|end| &full[..end]).collect();
    names.reverse();
    let entry = names.iter().find_map(|name| {
        config.auths.iter().find(|(key, _)| plain(key) == *name).map(|(_, entry)| entry)
    });
    match entry.map(from_entry).transpose()?.flatten() {
        Some(found) => Ok(Some(found)),
        None => match &config.creds_store {
            Some(helper) => ask_helper(helper, server),
            None => Ok(None),
        },
    }
}

/// The key of an entry without scheme and version: `https://index.docker.io/v1/` is `docker.io`.
fn plain(key: &str) -> &str {
    let key = key.strip_prefix("https://").or_else(|| key.strip_prefix("http://")).unwrap_or(key);
    let key = key.trim_end_matches('/');
    let key = key.strip_suffix("/v1").or_else(|| key.strip_suffix("/v2")).unwrap_or(key);
    if key == "index.docker.io" { "docker.io" } else { key }
}

fn from_entry(entry: &Entry) -> Result<Option<Credentials>> {
    if let Some(token) = entry.identitytoken.as_ref().filter(|token| !token.is_empty()) {
        return Ok(Some(Credentials::Identity(token.clone())));
    }
    if let (Some(user), Some(password)) = (&entry.username, &entry.password) {
        return Ok(Some(Credentials::Password(user.clone(), password.clone())));
    }
    let Some(auth) = entry.auth.as_ref().filter(|auth| !auth.is_empty()) else { return Ok(None) };
    let broken = || Error::invalid("an entry of `auths` is no base64 of NAME:PASSWORD");
    let text = STANDARD.decode(auth.trim()).ok().and_then(|bytes| String::from_utf8(bytes).ok());
    let text = text.ok_or_else(broken)?;
    let (user, password) = text.split_once(':').ok_or_else(broken)?;
    Ok(Some(Credentials::Password(user.to_owned(), password.trim_end_matches('\0').to_owned())))
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Secret {
    username: String,
    secret: String,
}

/// Asks `docker-credential-<helper>`; one that knows nothing is no error.
fn ask_helper(helper: &str, server: &str) -> Result<Option<Credentials>> {
    if helper.is_empty()
        || !helper.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte))
    {
        return Err(Error::invalid(format!("{helper:?} is no name of a credential helper")));
    }
    let program = format!("docker-credential-{helper}");
    let mut child = Command::new(&program)
        .arg("get")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .context(|| format!("start {program}"))?;
    if let Some(mut stdin) = child.stdin.take() {
        // A helper that does not read has ended; its code says more.
        let _ = stdin.write_all(server.as_bytes());
    }
    let output = child.wait_with_output().context(|| format!("run {program}"))?;
    if !output.status.success() {
        tracing::debug!("{program} has nothing for {server}");
        return Ok(None);
    }
    let secret: Secret = serde_json::from_slice(&output.stdout).map_err(|_| {
        Error::new(ErrorKind::Invalid, format!("{program} answered something that is no secret"))
    })?;
    Ok(Some(match secret.username.as_str() {
        TOKEN_USER => Credentials::Identity(secret.secret),
        _ => Credentials::Password(secret.username, secret.secret),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_special_entry_wins() {
        let auth = |text: &str| STANDARD.encode(text);
        let text = format!(
            r#"{{"auths": {{
                "host.x:5000": {{"auth": "{}"}},
                "host.x:5000/team": {{"auth": "{}"}},
                "https://index.docker.io/v1/": {{"username": "hub", "password": "p:q"}},
                "tokens.x": {{"auth": "{}", "identitytoken": "abc"}},
                "empty.x": {{}}, "broken.x": {{"auth": "%%"}}}},
              "HttpHeaders": {{}}}}"#,
            auth("a:one"),
            auth("b:two:three"),
            auth("<token>:")
        );
        let config: Config = serde_json::from_str(&text).unwrap();
        let of = |host: &str, repository: &str| choose(&config, host, repository).unwrap();
        let password =
            |user: &str, word: &str| Some(Credentials::Password(user.to_owned(), word.to_owned()));
        assert_eq!(of("host.x:5000", "other/app"), password("a", "one"));
        assert_eq!(of("host.x:5000", "team/app"), password("b", "two:three"));
        assert_eq!(of("host.x:5000", "teams"), password("a", "one"));
        assert_eq!(of("docker.io", "library/debian"), password("hub", "p:q"));
        assert_eq!(of("tokens.x", "a"), Some(Credentials::Identity("abc".to_owned())));
        assert_eq!(of("empty.x", "a"), None);
        assert_eq!(of("elsewhere.x", "a"), None);
        let error = choose(&config, "broken.x", "a").unwrap_err();
        assert!(!error.chain().contains("%%"), "{}", error.chain());
    }

    #[test]
    fn secrets_are_not_shown() {
        let credentials = Credentials::Password("user".into(), "hidden".into());
        assert!(!format!("{credentials:?}").contains("hidden"));
        assert_eq!(credentials.basic().unwrap(), "Basic dXNlcjpoaWRkZW4=");
    }

    #[test]
    fn a_helper_is_a_plain_name() {
        for bad in ["", "../x", "a b", "x;y"] {
            assert_eq!(ask_helper(bad, "host").unwrap_err().kind(), ErrorKind::Invalid);
        }
    }
}
