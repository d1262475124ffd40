//! Carries datagrams between a sandbox and where its policy lets them go, as [`crate::relay`] does with
//! connections.
//!
//! The filter hands every datagram that is allowed to the one socket here. Each pair of ends has an exchange: a
//! socket of this host towards the destination, and one that answers the sandbox in the destination's name. It
//! ends when nothing was said for a while. Bounded: exchanges per sandbox, datagrams that wait in one.

use crate::denials::Denial;
use crate::member::OpenFlow;
use crate::network::Members;
use crate::ports::Protocol;
use crate::relay::member_at;
use crate::space::Space;
use layer::{Context, Error, ErrorKind, Result};
use socket2::{Domain, Socket, Type};
use std::collections::HashMap;
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::Interest;
use tokio::net::UdpSocket;
use tokio::sync::mpsc;

/// An exchange ends when nothing was said for so long.
const SILENCE: Duration = Duration::from_secs(60);
/// Datagrams that wait in one exchange; more are lost, as on any network.
const QUEUE: usize = 32;
/// What the cable carries in one packet.
const MAX_BYTES: usize = 1500;

/// Who talks to whom.
type Ends = (SocketAddrV4, SocketAddrV4);

/// Takes datagrams for ever.
pub async fn serve(socket: UdpSocket, space: Arc<Space>, members: Arc<Members>) {
    let mut exchanges: HashMap<Ends, mpsc::Sender<Vec<u8>>> = HashMap::new();
    let mut buffer = [0; MAX_BYTES];
    loop {
        let received = socket
            .async_io(Interest::READABLE, || sys::datagram::receive(socket.as_fd(), &mut buffer));
        let received = match received.await {
            Ok(received) => received,
            Err(error) => {
                tracing::debug!(%error, "receive a datagram of a sandbox");
                continue;
            }
        };
        let ends = (received.from, received.to);
        let datagram = buffer[..received.length].to_vec();
        let datagram = match exchanges.get(&ends).map(|exchange| exchange.try_send(datagram)) {
            Some(Ok(()) | Err(mpsc::error::TrySendError::Full(_))) => continue,
            Some(Err(mpsc::error::TrySendError::Closed(datagram))) => datagram,
            None => buffer[..received.length].to_vec(),
        };
        exchanges.retain(|_, exchange| !exchange.is_closed());
        let Some(member) = member_at(received.from.into(), &members) else { continue };
        match member.open(Protocol::Udp, *received.to.ip(), received.to.port()) {
            Ok(flow) => {
                let (sender, receiver) = mpsc::channel(QUEUE);
                // A new queue has room for one.
                let _queued = sender.try_send(datagram);
                exchanges.insert(ends, sender);
                tokio::spawn(carry(ends, receiver, flow, Arc::clone(&space)));
            }
            Err(reason) => {
                let denial = Denial::now(reason, "udp");
                member.deny(denial.to(*received.to.ip(), received.to.port()));
            }
        }
    }
}

async fn carry(
    ends: Ends,
    mut datagrams: mpsc::Receiver<Vec<u8>>,
    mut flow: OpenFlow,
    space: Arc<Space>,
) {
    let talk = async {
        let client = tokio::task::spawn_blocking(move || in_the_name_of(&space, ends));
        let client = client
            .await
            .map_err(|error| Error::new(ErrorKind::Internal, "a thread").with_source(error))??;
        let client = UdpSocket::from_std(client.into()).context(|| "answer a sandbox".into())?;
        let io = |error| Error::io(format!("talk to {}", ends.1), error);
        let server = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).await.map_err(io)?;
        server.connect(ends.1).await.map_err(io)?;
        let mut buffer = [0; MAX_BYTES];
        loop {
            tokio::select! {
                datagram = datagrams.recv() => match datagram {
                    Some(datagram) => drop(server.send(&datagram).await.map_err(io)?),
                    None => return Ok(()),
                },
                answer = server.recv(&mut buffer) => {
                    let length = answer.map_err(io)?;
                    client.send(&buffer[..length]).await.map_err(io)?;
                }
                () = tokio::time::sleep(SILENCE) => return Ok(()),
            }
        }
    };
    let ended: Result<()> = tokio::select! {
        ended = talk => ended,
        _ = &mut flow.revoked => Ok(()),
    };
    if let Err(error) = ended {
        tracing::debug!(error = %error.chain(), "an exchange of a sandbox ends");
    }
}

/// A socket in the namespace that is the destination, to this sandbox alone.
fn in_the_name_of(space: &Space, (from, to): Ends) -> Result<Socket> {
    space.inside(|| {
        let made = (|| -> std::io::Result<Socket> {
            let socket = Socket::new(Domain::IPV4, Type::DGRAM, None)?;
            socket.set_ip_transparent_v4(true)?;
            socket.set_reuse_address(true)?;
            socket.bind(&SocketAddr::V4(to).into())?;
            socket.connect(&SocketAddr::V4(from).into())?;
            socket.set_nonblocking(true)?;
            Ok(socket)
        })();
        made.context(|| format!("answer {from} for {to}"))
    })
}
