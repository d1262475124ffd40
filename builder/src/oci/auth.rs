//! Meeting a registry's demand for credentials: `Basic`, or a bearer token from the service that the
//! demand names.
//!
//! Locking: one mutex around the header that is sent; never held during a request.

use super::credentials::{self, Credentials};
use super::name::ImageName;
use layer::{Context, Error, ErrorKind, Result};
use serde::Deserialize;
use std::fmt;
use std::io::Read;
use std::sync::{Mutex, PoisonError};
use ureq::Agent;

/// The longest answer of a token service.
const MAX_TOKEN_BYTES: u64 = 1 << 20;

/// What we are to one repository of one registry.
pub(super) struct Session {
    host: String,
    repository: String,
    /// Whether the registry itself is spoken to without encryption.
    plain: bool,
    credentials: Option<Credentials>,
    header: Mutex<Option<String>>,
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Session({}/{})", self.host, self.repository)
    }
}

/// A token service's answer.
#[derive(Deserialize)]
struct Token {
    token: Option<String>,
    access_token: Option<String>,
}

impl Session {
    pub(super) fn new(name: &ImageName, plain: bool) -> Result<Self> {
        Ok(Self {
            host: name.host().to_owned(),
            repository: name.repository().to_owned(),
            plain,
            credentials: credentials::find(name.host(), name.repository())?,
            header: Mutex::new(None),
        })
    }

    /// What to send, once a demand was met.
    pub(super) fn authorization(&self) -> Option<String> {
        self.header.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Meets the demand of the registry's `WWW-Authenticate` headers.
    pub(super) fn answer(&self, agent: &Agent, demands: &[String]) -> Result<()> {
        let demand = demands.iter().find_map(|text| Demand::parse(text));
        let header = match demand {
            Some(Demand::Bearer { realm, service, scope }) => {
                let scope = scope.unwrap_or_else(|| format!("repository:{}:pull", self.repository));
                self.token(agent, &realm, service.as_deref(), &scope)
                    .context(|| format!("get a token from {realm}"))?
            }
            Some(Demand::Basic) => {
                self.credentials.as_ref().and_then(Credentials::basic).ok_or_else(|| {
                    Error::new(
                        ErrorKind::Denied,
                        format!(
                            "{} wants a name and a password; `docker login`, `skopeo login` or \
                             a config.json in $DOCKER_CONFIG gives them",
                            self.host
                        ),
                    )
                })?
            }
            None => {
                let text = format!("{} wants credentials of an unknown kind", self.host);
                return Err(Error::new(ErrorKind::Denied, text));
            }
        };
        *self.header.lock().unwrap_or_else(PoisonError::into_inner) = Some(header);
        Ok(())
    }

    fn token(
        &self,
        agent: &Agent,
        realm: &str,
        service: Option<&str>,
        scope: &str,
    ) -> Result<String> {
        if !realm.starts_with("https://") && !self.plain {
            let text = "the token service is not reached by HTTPS";
            return Err(Error::new(ErrorKind::Denied, text));
        }
        let answer = match &self.credentials {
            Some(Credentials::Identity(token)) => {
                let mut form = vec![
                    ("grant_type", "refresh_token"),
                    ("client_id", "lamella"),
                    ("refresh_token", token.as_str()),
                    ("scope", scope),
                ];
                form.extend(service.map(|service| ("service", service)));
                agent.post(realm).send_form(form)
            }
            other => {
                let mut request = agent.get(realm).query("scope", scope);
                if let Some(service) = service {
                    request = request.query("service", service);
                }
                if let Some(value) = other.as_ref().and_then(Credentials::basic) {
                    request = request.header("Authorization", value);
                }
                request.call()
            }
        };
        let unavailable = |error| {
            Error::new(ErrorKind::Unavailable, "the token service cannot be reached")
                .with_source(error)
        };
        let mut answer = answer.map_err(unavailable)?;
        if !answer.status().is_success() {
            let text = format!("the token service answers {}", answer.status());
            return Err(Error::new(ErrorKind::Denied, text));
        }
        let mut bytes = Vec::new();
        let body = answer.body_mut().as_reader();
        body.take(MAX_TOKEN_BYTES)
            .read_to_end(&mut bytes)
            .context(|| "read the token".to_owned())?;
        let token: Option<Token> = serde_json::from_slice(&bytes).ok();
        let token = token.and_then(|token| token.token.or(token.access_token));
        match token.filter(|token| token.bytes().all(|byte| byte.is_ascii_graphic())) {
            Some(token) => Ok(format!("Bearer {token}")),
            None => Err(Error::invalid("the token service gives no token")),
        }
    }
}

/// What a registry demands.
#[derive(Debug, PartialEq, Eq)]
enum Demand {
    Basic,
    Bearer { realm: String, service: Option<String>, scope: Option<String> },
}

impl Demand {
    /// Understands one `WWW-Authenticate` header (RFC 9110, section 11.6.1).
    fn parse(text: &str) -> Option<Self> {
        let (scheme, rest) = text.trim().split_once(' ').unwrap_or((text.trim(), ""));
        if scheme.eq_ignore_ascii_case("basic") {
            return Some(Self::Basic);
        }
        if !scheme.eq_ignore_ascii_case("bearer") {
            return None;
        }
        let (mut realm, mut service, mut scope) = (None, None, None);
        let mut rest = rest;
        while let Some((key, after)) = rest.split_once('=') {
            let (value, next) = value(after)?;
            match key.trim().trim_start_matches(',').trim().to_ascii_lowercase().as_str() {
                "realm" => realm = Some(value),
                "service" => service = Some(value),
                "scope" => scope = Some(value),
                _ => {}
            }
            rest = next;
        }
        Some(Self::Bearer { realm: realm?, service, scope })
    }
}

/// A token or a quoted string, and what follows it.
fn value(text: &str) -> Option<(String, &str)> {
    let Some(quoted) = text.strip_prefix('"') else {
        let end = text.find(',').unwrap_or(text.len());
        return Some((text[..end].trim().to_owned(), &text[end..]));
    };
    let mut value = String::new();
    let mut letters = quoted.char_indices();
    while let Some((at, letter)) = letters.next() {
        match letter {
            '"' => return Some((value, &quoted[at + 1..])),
            '\\' => value.push(letters.next()?.1),
            _ => value.push(letter),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn demands_are_understood() {
        let bearer = |realm: &str, service: Option<&str>, scope: Option<&str>| {
            Some(Demand::Bearer {
                realm: realm.to_owned(),
                service: service.map(str::to_owned),
                scope: scope.map(str::to_owned),
            })
        };
        for (text, demand) in [
            ("Basic realm=\"x\"", Some(Demand::Basic)),
            ("basic", Some(Demand::Basic)),
            (
                "Bearer realm=\"https://a/token\",service=\"reg\",scope=\"repository:a/b:pull,push\"",
                bearer("https://a/token", Some("reg"), Some("repository:a/b:pull,push")),
            ),
            (
                "bearer realm=\"https://a/t\\\"k\" , Service=reg",
                bearer("https://a/t\"k", Some("reg"), None),
            ),
            ("Bearer service=\"reg\"", None),
            ("Bearer realm=\"open", None),
            ("Negotiate abc", None),
            ("", None),
        ] {
            assert_eq!(Demand::parse(text), demand, "{text}");
        }
    }
}
