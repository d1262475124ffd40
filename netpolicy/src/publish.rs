//! Published ports: a listener of this host whose connections go on inside a sandbox.
//!
//! The second half of each connection is made in the sandbox's own network namespace, to its loopback address,
//! so that it needs no interface and no route, and a server there need not listen to anything else. Bounded:
//! connections of one port at once. All of it ends when the [`Published`] is dropped.

use crate::relay::reset;
use crate::space;
use layer::{Context, Error, ErrorKind, Result};
use socket2::{Domain, Socket, Type};
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::{AbortHandle, JoinSet};

/// Connections of one port at once; more wait until one ends.
const MAX_CONNECTIONS: usize = 128;
/// How long a server in the sandbox may take to answer.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// What is to be published.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Publication {
    /// Where the host listens; port 0 is any that is free.
    pub host: SocketAddr,
    /// The port of the sandbox.
    pub port: u16,
}

impl Publication {
    /// `[ADDRESS:]PORT[:PORT]`: of the host, and of the sandbox where that is another one. Without an address,
    /// this host alone reaches it.
    pub fn parse(text: &str) -> Result<Self> {
        let wrong = || {
            let text = format!("{text:?}: [ADDRESS:]PORT[:PORT of the sandbox] is expected");
            Error::invalid(text)
        };
        let port = |text: &str| text.parse::<u16>().map_err(|_| wrong());
        let (address, ports) = match text.strip_prefix('[').and_then(|rest| rest.split_once("]:")) {
            Some((address, ports)) => (address.parse().map_err(|_| wrong())?, ports),
            None => match text.split_once(':') {
                Some((address, ports)) if address.contains('.') => {
                    (address.parse().map_err(|_| wrong())?, ports)
                }
                _ => (IpAddr::from(Ipv4Addr::LOCALHOST), text),
            },
        };
        let (host, inside) = ports.split_once(':').unwrap_or((ports, ports));
        let (host, inside) = (port(host)?, port(inside)?);
        if inside == 0 {
            return Err(wrong());
        }
        Ok(Self { host: SocketAddr::new(address, host), port: inside })
    }
}

impl fmt::Display for Publication {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.host, self.port)
    }
}

/// A port that is open.
#[derive(Debug)]
pub struct Published {
    publication: Publication,
    task: AbortHandle,
}

impl Published {
    /// Opens the port in the namespace of the caller. `sandbox`: the network namespace to go on in.
    pub async fn open(publication: Publication, sandbox: OwnedFd) -> Result<Self> {
        let listener = TcpListener::bind(publication.host).await;
        let listener = listener.context(|| format!("publish {}", publication.host))?;
        let host = listener.local_addr().context(|| "look at a listener".into())?;
        let port = publication.port;
        let task = tokio::spawn(serve(listener, port, Arc::new(sandbox))).abort_handle();
        Ok(Self { publication: Publication { host, port }, task })
    }

    /// What is open; with the port that was chosen.
    pub fn publication(&self) -> Publication {
        self.publication
    }
}

impl Drop for Published {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn serve(listener: TcpListener, port: u16, sandbox: Arc<OwnedFd>) {
    let turns = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    // They end with this task.
    let mut connections = JoinSet::new();
    loop {
        let Ok(turn) = Arc::clone(&turns).acquire_owned().await else { return };
        while connections.try_join_next().is_some() {}
        let Ok((client, _)) = listener.accept().await else {
            tokio::time::sleep(Duration::from_millis(50)).await;
            continue;
        };
        let sandbox = Arc::clone(&sandbox);
        connections.spawn(async move {
            let _turn = turn;
            if let Err(error) = carry(client, port, sandbox).await {
                tracing::debug!(error = %error.chain(), port, "a published port");
            }
        });
    }
}

async fn carry(mut client: TcpStream, port: u16, sandbox: Arc<OwnedFd>) -> Result<()> {
    let socket = tokio::task::spawn_blocking(move || socket_in(&sandbox)).await;
    let socket = socket.unwrap_or_else(|error| {
        Err(Error::new(ErrorKind::Internal, "a thread").with_source(error))
    });
    let connecting = async {
        let socket = TcpSocket::from_std_stream(socket?.into());
        let server = socket.connect(SocketAddr::from((Ipv4Addr::LOCALHOST, port)));
        server.await.context(|| "connect inside the sandbox".into())
    };
    let mut server = match tokio::time::timeout(CONNECT_TIMEOUT, connecting).await {
        Ok(Ok(server)) => server,
        Ok(Err(error)) => {
            reset(client);
            return Err(error);
        }
        Err(_) => {
            reset(client);
            return Err(Error::new(ErrorKind::Timeout, "the sandbox does not answer"));
        }
    };
    let _slower_only = (client.set_nodelay(true), server.set_nodelay(true));
    if copy_bidirectional(&mut client, &mut server).await.is_err() {
        reset(client);
        reset(server);
    }
    Ok(())
}

fn socket_in(sandbox: &OwnedFd) -> Result<Socket> {
    space::inside(sandbox.as_fd(), || {
        let made = (|| -> std::io::Result<Socket> {
            let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
            socket.set_nonblocking(true)?;
            Ok(socket)
        })();
        made.context(|| "a socket inside the sandbox".into())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_read_as_people_write_them() {
        for (text, read) in [
            ("8080", "127.0.0.1:8080:8080"),
            ("8080:80", "127.0.0.1:8080:80"),
            ("0.0.0.0:8080:80", "0.0.0.0:8080:80"),
            ("10.0.0.1:80", "10.0.0.1:80:80"),
            ("[::1]:0:80", "[::1]:0:80"),
        ] {
            assert_eq!(Publication::parse(text).unwrap().to_string(), read);
        }
        for text in ["", "0", "80:0", "x:80", "1:2:3", "1.2.3:80", "70000", "[::1]80"] {
            assert!(Publication::parse(text).is_err(), "{text}");
        }
    }
}
