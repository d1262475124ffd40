//! Carries connections from a sandbox to where its policy lets them go.
//!
//! The filter hands every new connection that is allowed to the one listener here; the socket that is accepted
//! has the address that the sandbox asked for as its own. Bounded per sandbox; nothing is buffered beyond what
//! the copy of one connection takes.

use crate::denials::Denial;
use crate::member::Member;
use crate::network::Members;
use crate::ports::Protocol;
use crate::space;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};

/// How long a server may take to answer a new connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(15);

/// Accepts for ever.
pub async fn serve(listener: TcpListener, members: Arc<Members>) {
    loop {
        match listener.accept().await {
            Ok((client, from)) => accept(client, from, &members),
            Err(error) => {
                tracing::warn!(%error, "accept a connection of a sandbox");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    }
}

/// The sandbox at this address.
pub fn member_at(from: SocketAddr, members: &Members) -> Option<Arc<Member>> {
    let IpAddr::V4(from) = from.ip() else { return None };
    space::number_of(from).and_then(|number| members.find(number))
}

fn accept(client: TcpStream, from: SocketAddr, members: &Members) {
    let (Some(member), Ok(SocketAddr::V4(to))) = (member_at(from, members), client.local_addr())
    else {
        reset(client);
        return;
    };
    match member.open(Protocol::Tcp, *to.ip(), to.port()) {
        Ok(flow) => {
            tokio::spawn(carry(client, *to.ip(), to.port(), flow));
        }
        Err(reason) => {
            member.deny(Denial::now(reason, "tcp").to(*to.ip(), to.port()));
            reset(client);
        }
    }
}

/// Ends a connection so that the other side hears of it at once.
pub fn reset(connection: TcpStream) {
    let _gone = socket2::SockRef::from(&connection).set_linger(Some(Duration::ZERO));
    drop(connection);
}

async fn carry(
    mut client: TcpStream,
    address: Ipv4Addr,
    port: u16,
    mut flow: crate::member::OpenFlow,
) {
    let connect = tokio::time::timeout(CONNECT_TIMEOUT, TcpStream::connect((address, port)));
    let server = tokio::select! {
        connected = connect => connected,
        _ = &mut flow.revoked => return reset(client),
    };
    let Ok(Ok(mut server)) = server else { return reset(client) };
    let _slower_only = (client.set_nodelay(true), server.set_nodelay(true));
    let broken = tokio::select! {
        copied = copy_bidirectional(&mut client, &mut server) => copied.is_err(),
        _ = &mut flow.revoked => true,
    };
    if broken {
        reset(client);
        reset(server);
    }
}
