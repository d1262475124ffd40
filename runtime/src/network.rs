//! The network of the node's sandboxes: who is connected, with which policy and which published ports.
//!
//! The network itself is `netpolicy`'s. It is made when the first sandbox wants one, so that a node whose
//! sandboxes have none needs none of what it takes.
//!
//! Locking: a mutex over the table, held for look-ups; a change of one sandbox's network happens under an
//! asynchronous mutex of its own. CRASH: when this process dies every sandbox is cut off; the next one connects
//! those that live again, with the same address and the policy in their record.

pub mod rpc;

use crate::backends::Instance;
use crate::events::report;
use crate::sandbox::Sandbox;
use layer::{Error, ErrorKind, Result};
use netpolicy::{DenialLog, Member, Network, NetworkConfig, Policy, Publication, Published};
use proto::v1;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::OnceCell;

/// Content of every sandbox's /etc/resolv.conf; the address is `netpolicy::GATEWAY`.
pub const RESOLV_CONF: &[u8] = b"nameserver 198.18.0.1\noptions timeout:5 attempts:2\n";
/// Ports that one sandbox may publish.
const MAX_PUBLISHED: usize = 64;
/// Logs of denials that are kept of sandboxes that have ended.
const MAX_ENDED: usize = 256;

/// The network of a sandbox, as the journal keeps it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetworkRecord {
    /// Its policy, one rule a line.
    pub allow: Vec<String>,
    /// Its published ports.
    pub publish: Vec<String>,
    /// Its number on the network, which is its address.
    pub number: Option<u32>,
}

impl NetworkRecord {
    /// From a request, checked.
    pub fn read(policy: v1::NetworkPolicy) -> Result<Self> {
        let v1::NetworkPolicy { allow, publish } = policy;
        Policy::parse(&allow)?;
        if publish.len() > MAX_PUBLISHED {
            return Err(Error::invalid(format!("{MAX_PUBLISHED} ports at most are published")));
        }
        for text in &publish {
            Publication::parse(text)?;
        }
        Ok(Self { allow, publish, number: None })
    }
}

/// The network of one sandbox.
#[derive(Debug, Default)]
struct Connection {
    log: Arc<DenialLog>,
    /// Held while something is changed.
    state: tokio::sync::Mutex<ConnectionState>,
}

#[derive(Debug, Default)]
struct ConnectionState {
    instance: Option<Arc<dyn Instance>>,
    member: Option<Arc<Member>>,
    published: Vec<Published>,
}

/// The networks of all sandboxes of a node.
#[derive(Debug)]
pub struct Networks {
    config: NetworkConfig,
    network: OnceCell<Arc<Network>>,
    table: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    connections: HashMap<String, Arc<Connection>>,
    ended: std::collections::VecDeque<String>,
}

impl Networks {
    /// Nothing is connected yet.
    pub fn new(config: NetworkConfig) -> Self {
        Self { config, network: OnceCell::new(), table: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn network(&self) -> Result<&Arc<Network>> {
        let make = || async { Network::open(self.config.clone()).map(Arc::new) };
        self.network.get_or_try_init(make).await
    }

    fn connection(&self, id: &str) -> Result<Arc<Connection>> {
        let found = self.lock().connections.get(id).cloned();
        found.ok_or_else(|| Error::not_found(format!("sandbox {id} has no network: it has ended")))
    }

    /// Connects a sandbox that has just started, or that an earlier runtime left, as its record says.
    pub async fn begin(&self, sandbox: &Sandbox, instance: &Arc<dyn Instance>) -> Result<()> {
        let connection = Arc::new(Connection {
            log: Arc::new(DenialLog::told_to(report::network_denials(sandbox))),
            ..Connection::default()
        });
        connection.state.lock().await.instance = Some(Arc::clone(instance));
        self.lock().connections.insert(sandbox.id().to_owned(), Arc::clone(&connection));
        let record = sandbox.record().network;
        if !record.allow.is_empty() {
            self.set(sandbox, record.allow, false).await?;
        }
        for text in record.publish {
            self.open(&connection, Publication::parse(&text)?).await?;
            report::port(sandbox, &text, true);
        }
        Ok(())
    }

    /// Disconnects a sandbox that has ended.
    pub async fn end(&self, sandbox: &Sandbox) {
        let Ok(connection) = self.connection(sandbox.id()) else { return };
        let mut state = connection.state.lock().await;
        state.published.clear();
        state.instance = None;
        if let (Some(member), Some(network)) = (state.member.take(), self.network.get()) {
            let network = Arc::clone(network);
            let cut = tokio::task::spawn_blocking(move || network.detach(&member));
            if let Err(error) = cut.await {
                tracing::error!(id = sandbox.id(), %error, "disconnecting panicked");
            }
        }
        drop(state);
        let mut table = self.lock();
        table.ended.push_back(sandbox.id().to_owned());
        let oldest = if table.ended.len() > MAX_ENDED { table.ended.pop_front() } else { None };
        if let Some(oldest) = oldest {
            table.connections.remove(&oldest);
        }
    }

    /// Puts this policy in force, and into the record. `add`: to what is allowed already.
    pub async fn set(&self, sandbox: &Sandbox, allow: Vec<String>, add: bool) -> Result<()> {
        let connection = self.connection(sandbox.id())?;
        let mut state = connection.state.lock().await;
        let Some(instance) = state.instance.clone() else {
            return Err(Error::not_found(format!("sandbox {} has ended", sandbox.id())));
        };
        let before = sandbox.record().network;
        let mut lines = if add { before.allow.clone() } else { Vec::new() };
        lines.extend(allow.into_iter().filter(|line| !before.allow.contains(line) || !add));
        let policy = Policy::parse(&lines)?;
        match &state.member {
            Some(member) => member.set_policy(policy.clone())?,
            None if policy.is_empty() => {}
            None => {
                let network = Arc::clone(self.network().await?);
                let (id, number) = (sandbox.id().to_owned(), before.number);
                let (log, given) = (Arc::clone(&connection.log), policy.clone());
                let attach = tokio::task::spawn_blocking(move || {
                    network.attach(&id, number, &instance.network()?, given, log)
                });
                let panicked = |error| {
                    Err(Error::new(ErrorKind::Internal, "connecting panicked").with_source(error))
                };
                state.member = Some(attach.await.unwrap_or_else(panicked)?);
            }
        }
        let number = state.member.as_ref().map(|member| member.number());
        let old = Policy::parse(&before.allow).unwrap_or_default();
        sandbox.update(|record| {
            replace_env(&mut record.defaults.env, &old, &policy);
            record.network.allow.clone_from(&lines);
            record.network.number = number;
        })?;
        report::network(sandbox, &lines);
        Ok(())
    }

    async fn open(&self, connection: &Connection, publication: Publication) -> Result<()> {
        let mut state = connection.state.lock().await;
        let Some(instance) = &state.instance else {
            return Err(Error::not_found("the sandbox has ended"));
        };
        if state.published.len() >= MAX_PUBLISHED {
            return Err(Error::invalid(format!("{MAX_PUBLISHED} ports at most are published")));
        }
        let published = Published::open(publication, instance.network()?).await?;
        state.published.push(published);
        Ok(())
    }

    /// Opens one more port, and writes that into the record.
    pub async fn publish(&self, sandbox: &Sandbox, text: &str) -> Result<()> {
        let publication = Publication::parse(text)?;
        self.open(&*self.connection(sandbox.id())?, publication).await?;
        report::port(sandbox, text, true);
        sandbox.update(|record| record.network.publish.push(publication.to_string()))
    }

    /// Closes a published port, with its connections.
    pub async fn unpublish(&self, sandbox: &Sandbox, text: &str) -> Result<()> {
        let wanted = Publication::parse(text)?;
        let connection = self.connection(sandbox.id())?;
        let mut state = connection.state.lock().await;
        let before = state.published.len();
        state.published.retain(|published| published.publication() != wanted);
        if state.published.len() == before {
            return Err(Error::not_found(format!("{wanted} is not published")));
        }
        report::port(sandbox, text, false);
        let open: Vec<String> =
            state.published.iter().map(|published| published.publication().to_string()).collect();
        sandbox.update(|record| record.network.publish = open)
    }

    /// What holds now.
    pub async fn describe(&self, sandbox: &Sandbox) -> v1::Network {
        let record = sandbox.record().network;
        let mut wire = v1::Network {
            sandbox_id: sandbox.id().to_owned(),
            allow: record.allow,
            ..v1::Network::default()
        };
        if let Ok(connection) = self.connection(sandbox.id()) {
            let state = connection.state.lock().await;
            let published = state.published.iter();
            wire.publish = published.map(|open| open.publication().to_string()).collect();
            if let Some(member) = &state.member {
                wire.address = member.address().to_string();
                wire.open_flows = member.open_flows() as u64;
                wire.denied_packets = member.denied_packets();
            }
        }
        wire
    }

    /// The denials of a sandbox, also after its end for a while.
    pub fn denials(&self, id: &str) -> Result<Arc<DenialLog>> {
        Ok(Arc::clone(&self.connection(id)?.log))
    }
}

/// Clients of registries ask the node as long as the policy opens them; what the image or the caller has set
/// stays.
fn replace_env(env: &mut Vec<String>, old: &Policy, new: &Policy) {
    let ours = |policy: &Policy| -> Vec<String> {
        policy.registries().iter().flat_map(|registry| registry.preset().env()).collect()
    };
    let (old, new) = (ours(old), ours(new));
    env.retain(|entry| !old.contains(entry) || new.contains(entry));
    for entry in new {
        let key = entry.split('=').next().unwrap_or_default();
        if !env.iter().any(|known| known.split('=').next() == Some(key)) {
            env.push(entry);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use netpolicy::GATEWAY;

    #[test]
    fn the_resolver_is_where_the_network_has_it() {
        let text = String::from_utf8_lossy(RESOLV_CONF);
        assert!(text.starts_with(&format!("nameserver {GATEWAY}\n")));
    }

    #[test]
    fn clients_ask_the_node_while_a_registry_is_open() {
        let (none, pypi) = (Policy::default(), Policy::parse(&["pypi"]).unwrap());
        let mut env = vec!["A=1".to_owned(), "PIP_TRUSTED_HOST=mine".to_owned()];
        replace_env(&mut env, &none, &pypi);
        assert!(env.contains(&"PIP_TRUSTED_HOST=mine".to_owned()));
        assert!(env.contains(&format!("PIP_INDEX_URL=http://{GATEWAY}/pypi/simple/")));
        replace_env(&mut env, &pypi, &none);
        assert_eq!(env, ["A=1", "PIP_TRUSTED_HOST=mine"]);
    }

    #[test]
    fn requests_are_checked() {
        let read = |allow: &[&str], publish: &[&str]| {
            let text = |list: &[&str]| list.iter().map(|&text| text.to_owned()).collect();
            NetworkRecord::read(v1::NetworkPolicy { allow: text(allow), publish: text(publish) })
        };
        assert!(read(&["pypi", "tcp:example.org:443"], &["8080:80"]).is_ok());
        assert!(read(&["nonsense"], &[]).is_err());
        assert!(read(&[], &["nonsense"]).is_err());
        assert!(read(&[], &["80"; 65]).is_err());
    }
}
