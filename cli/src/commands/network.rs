//! `net`, and what `run` and `create` say about the network.

use super::Scene;
use super::exec::lost_sandbox;
use crate::args::{Net, NetAction, NetworkSpec};
use crate::errors::{Outcome, Remedy};
use crate::node::start::{self, Lifetime};
use crate::output::Row;
use crate::quantity::show_time;
use layer::Context;
use proto::v1::networks_client::NetworksClient;
use proto::v1::{
    Denial, DenialsRequest, GetNetworkRequest, NetworkPolicy, PublishRequest, SetNetworkRequest,
};
use serde::Serialize;

/// The policy that a command line asks for.
pub fn policy(spec: &NetworkSpec) -> Outcome<NetworkPolicy> {
    let mut allow = match spec.net.as_deref() {
        None | Some("none") => Vec::new(),
        Some(file) => {
            let text = std::fs::read_to_string(file).context(|| format!("read {file}"))?;
            let lines = text.lines().map(str::trim);
            let lines = lines.filter(|line| !line.is_empty() && !line.starts_with('#'));
            lines.map(str::to_owned).collect()
        }
    };
    allow.extend(spec.allow.iter().cloned());
    Ok(NetworkPolicy { allow, publish: spec.publish.clone() })
}

/// The network of one sandbox.
#[derive(Debug, Serialize)]
struct Network {
    id: String,
    allow: Vec<String>,
    publish: Vec<String>,
    address: String,
    open_flows: u64,
    denied_packets: u64,
}

impl Network {
    fn text(&self) -> String {
        if self.address.is_empty() && self.publish.is_empty() {
            return "no network".to_owned();
        }
        let mut lines = vec![format!(
            "{} connections open, {} packets denied",
            self.open_flows, self.denied_packets
        )];
        lines.extend(self.allow.iter().map(|rule| format!("allow {rule}")));
        lines.extend(self.publish.iter().map(|ports| format!("publish {ports}")));
        lines.join("\n")
    }
}

#[derive(Debug, Serialize)]
struct Refused {
    number: u64,
    time: String,
    at_unix_ns: u64,
    reason: String,
    protocol: String,
    address: String,
    port: u32,
    name: String,
    suppressed: u64,
}

impl From<Denial> for Refused {
    fn from(denial: Denial) -> Self {
        Self {
            number: denial.number,
            time: show_time(denial.at_unix_ns),
            at_unix_ns: denial.at_unix_ns,
            reason: denial.reason,
            protocol: denial.protocol,
            address: denial.address,
            port: denial.port,
            name: denial.name,
            suppressed: denial.suppressed,
        }
    }
}

impl Row for Refused {
    const HEADER: &'static [&'static str] =
        &["TIME", "REASON", "PROTOCOL", "WHERE", "NAME", "BEFORE IT"];

    fn cells(&self) -> Vec<String> {
        let place = match (self.address.as_str(), self.port) {
            (address, 0) => address.to_owned(),
            (address, port) => format!("{address}:{port}"),
        };
        let uncounted =
            |count: u64| if count > 0 { format!("{count} more") } else { String::new() };
        vec![
            self.time.clone(),
            self.reason.clone(),
            self.protocol.clone(),
            place,
            self.name.clone(),
            uncounted(self.suppressed),
        ]
    }
}

/// `net`
pub async fn net(scene: &Scene, args: Net) -> Outcome {
    let node = start::connect(&scene.settings, Lifetime::WhileUsed, scene.out).await?;
    let mut client = NetworksClient::new(node.channel.clone());
    let id = args.id;
    let answer = match args.action.unwrap_or(NetAction::Show) {
        NetAction::Denials { follow } => return denials(scene, client, id, follow).await,
        NetAction::Show => client.get_network(GetNetworkRequest { id }).await,
        NetAction::Set { rules } => {
            client.set_network(SetNetworkRequest { id, allow: rules, add: false }).await
        }
        NetAction::Add { rules } => {
            client.set_network(SetNetworkRequest { id, allow: rules, add: true }).await
        }
        NetAction::Publish { ports } => client.publish(PublishRequest { id, publish: ports }).await,
        NetAction::Unpublish { ports } => {
            client.unpublish(PublishRequest { id, publish: ports }).await
        }
    };
    let network = answer.remedy(lost_sandbox)?.into_inner();
    let network = Network {
        id: network.sandbox_id,
        allow: network.allow,
        publish: network.publish,
        address: network.address,
        open_flows: network.open_flows,
        denied_packets: network.denied_packets,
    };
    scene.out.result(&network, || network.text())
}

async fn denials(
    scene: &Scene,
    mut client: NetworksClient<tonic::transport::Channel>,
    id: String,
    follow: bool,
) -> Outcome {
    let request = DenialsRequest { id, follow, after: 0 };
    let mut stream = client.denials(request).await.remedy(lost_sandbox)?.into_inner();
    if follow {
        while let Some(denial) = stream.message().await? {
            let refused = Refused::from(denial);
            let line = refused.cells();
            let line = line.into_iter().filter(|cell| !cell.is_empty()).collect::<Vec<_>>();
            scene.out.result(&refused, || line.join("  "))?;
        }
        return Ok(());
    }
    let mut rows = Vec::new();
    while let Some(denial) = stream.message().await? {
        rows.push(Refused::from(denial));
    }
    scene.out.listing(&rows)
}
