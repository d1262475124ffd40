//! Sandboxes with a network: what a policy opens, what stays closed, and that nothing is left.
//!
//! Each test runs on a host of its own, in a network namespace, with an internet beside it.

#![allow(clippy::unwrap_used)]

#[path = "../../netpolicy/tests/world/mod.rs"]
mod internet;
mod runtime_world;

use anyhow::Result;
use internet::{OTHER, SERVER, on_a_host};
use proto::v1::networks_client::NetworksClient;
use proto::v1::*;
use runtime_world::{Client, World};
use std::io::{Read, Write};
use std::net::TcpStream;
use tonic::transport::Channel;

type Networks = NetworksClient<Channel>;

async fn open(world: &World) -> Result<(runtime::Service, Client, Networks)> {
    let (service, client) = world.client().await?;
    let channel = proto::connect::in_process(service.routes()).await?;
    Ok((service, client, NetworksClient::new(channel)))
}

/// Runs a test on a host of its own.
fn test<F>(body: impl FnOnce(internet::World) -> F + Send + 'static)
where
    F: Future<Output = Result<()>>,
{
    on_a_host(|world| tokio::runtime::Handle::current().block_on(body(world)).unwrap());
}

fn with_network(allow: &[&str], publish: &[&str]) -> CreateRequest {
    let text = |list: &[&str]| list.iter().map(|&text| text.to_owned()).collect();
    CreateRequest {
        network: Some(NetworkPolicy { allow: text(allow), publish: text(publish) }),
        ..CreateRequest::default()
    }
}

/// Whether an echo server answers from inside.
async fn reaches(client: &Client, id: &str, address: std::net::Ipv4Addr) -> Result<bool> {
    let line = format!("echo hello | nc -w 20 {address} 7");
    let ran = client.run(id, &["sh", "-c", &line]).await?;
    Ok(ran.ended.exit_code == 0 && ran.text() == "hello\n")
}

async fn denials(networks: &mut Networks, id: &str) -> Result<Vec<Denial>> {
    let request = DenialsRequest { id: id.into(), ..DenialsRequest::default() };
    let mut stream = networks.denials(request).await?.into_inner();
    let mut all = Vec::new();
    while let Some(denial) = stream.message().await? {
        all.push(denial);
    }
    Ok(all)
}

const INTERFACES: &str = "sed -n 's/^ *\\([^ :]*\\):.*/\\1/p' /proc/net/dev";

#[test]
fn a_policy_opens_what_it_says_and_every_refusal_is_told() {
    test(|internet| async move {
        internet.echo(SERVER, 7);
        internet.echo(OTHER, 7);
        let world = World::new()?;
        let (service, client, mut networks) = open(&world).await?;
        let closed = client.idle().await?.id;
        assert_eq!(client.shell(&closed, INTERFACES).await?, "lo\n");
        assert!(!reaches(&client, &closed, SERVER).await?);
        let id = client.create(with_network(&["tcp:203.0.113.0/24:7"], &[])).await?.id;
        assert!(reaches(&client, &id, SERVER).await?);
        assert!(!reaches(&client, &id, OTHER).await?);
        // The image's own resolv.conf does not count, and no question leaves.
        let text = client.shell(&id, "cat /etc/resolv.conf").await?;
        assert!(text.starts_with("nameserver 198.18.0.1\n"), "{text}");
        let asked = client.run(&id, &["nslookup", "secret.evil.com"]).await?;
        assert_ne!(asked.ended.exit_code, 0, "{}", asked.text());
        assert!(internet.asked().is_empty());
        let denied = denials(&mut networks, &id).await?;
        let is_told = |address: &str, name: &str| {
            denied.iter().any(|d| d.address == address && d.name.starts_with(name))
        };
        assert!(is_told("198.51.100.10", "") && is_told("", "secret.evil.com"), "{denied:?}");
        assert!(denied.iter().all(|d| d.at_unix_ns > 0 && d.reason == "not_allowed"));
        // From none to some and back, at once.
        for (allow, reached) in [(&["203.0.113.10"][..], true), (&[], false)] {
            let allow = allow.iter().map(|&rule| rule.to_owned()).collect();
            let request = SetNetworkRequest { id: closed.clone(), allow, add: false };
            networks.set_network(request).await?;
            assert_eq!(reaches(&client, &closed, SERVER).await?, reached);
        }
        service.close().await;
        Ok(())
    });
}

#[test]
fn a_published_port_is_open_as_long_as_its_sandbox_lives() {
    test(|_internet| async move {
        let world = World::new()?;
        let (service, client, mut networks) = open(&world).await?;
        let id = client.create(with_network(&[], &["0:8080"])).await?.id;
        client
            .shell(
                &id,
                "(nc -ll -p 8080 -e cat >/dev/null 2>&1 &)
                 until netstat -ltn | grep -q :8080; do sleep 0.01; done",
            )
            .await?;
        let shown = networks.get_network(GetNetworkRequest { id: id.clone() }).await?.into_inner();
        let (host, _) = shown.publish[0].rsplit_once(':').unwrap();
        assert_eq!((host.starts_with("127.0.0.1:"), shown.address.as_str()), (true, ""));
        let mut stream = TcpStream::connect(host)?;
        stream.write_all(b"hello")?;
        let mut buffer = [0; 5];
        stream.read_exact(&mut buffer)?;
        assert_eq!(&buffer, b"hello");
        client.stop(&id).await?;
        service.close().await;
        assert!(matches!(stream.read(&mut buffer), Ok(0) | Err(_)), "the connection ends");
        assert!(TcpStream::connect(host).is_err(), "the port is closed");
        Ok(())
    });
}
