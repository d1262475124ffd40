//! The network of one node: the namespace between it and its sandboxes, the filter, the servers in it.
//!
//! Locking: a mutex over the table of members, held for look-ups. CRASH: all of it goes with this process.

use crate::denials::{Denial, DenialLog, Reason};
use crate::filter::{Denials, DeniedPacket, Filter, PacketFault};
use crate::member::Member;
use crate::policy::Policy;
use crate::range::{GATEWAY, SANDBOXES};
use crate::registry::Registries;
use crate::space::Space;
use crate::{exchange, relay, resolver};
use layer::{Context, Error, ErrorKind, Result};
use socket2::{Domain, Socket, Type};
use std::collections::{BTreeMap, HashMap};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::io::unix::AsyncFd;
use tokio::task::AbortHandle;

/// How a node's network runs.
#[derive(Debug, Clone, Default)]
pub struct NetworkConfig {
    /// Resolvers that allowed names are asked of; those of this host's /etc/resolv.conf if none is named.
    pub resolvers: Vec<SocketAddr>,
    /// Other places for the servers of registries: the URL in `presets.json`, and the one to use.
    pub mirrors: BTreeMap<String, String>,
}

/// The sandboxes on the network, by number.
#[derive(Debug, Default)]
pub struct Members {
    table: Mutex<HashMap<u32, Arc<Member>>>,
}

impl Members {
    fn lock(&self) -> MutexGuard<'_, HashMap<u32, Arc<Member>>> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The sandbox with this number.
    pub fn find(&self, number: u32) -> Option<Arc<Member>> {
        self.lock().get(&number).cloned()
    }
}

/// The network of a node.
#[derive(Debug)]
pub struct Network {
    space: Arc<Space>,
    filter: Arc<Filter>,
    members: Arc<Members>,
    next: Mutex<u32>,
    tasks: Vec<AbortHandle>,
}

/// Connections that wait to be accepted.
const BACKLOG: i32 = 1024;
/// 0 is the network itself, 1 is the node.
const FIRST_NUMBER: u32 = 2;

impl Network {
    /// Makes the namespace, loads the filter and starts the servers. Blocks shortly; call it on a tokio
    /// runtime.
    pub fn open(config: NetworkConfig) -> Result<Self> {
        let space = Arc::new(Space::new()?);
        let nowhere = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        // What a sandbox sends to a loopback address is dropped, so the filter alone leads to these two.
        let allowed_connections = socket(&space, Type::STREAM, nowhere)?;
        let allowed_datagrams = socket(&space, Type::DGRAM, nowhere)?;
        let names = SocketAddr::from((GATEWAY, 53));
        let questions = datagrams(socket(&space, Type::DGRAM, names)?)?;
        let packages = SocketAddr::from((GATEWAY, 80));
        let packages = connections(socket(&space, Type::STREAM, packages)?)?;
        let registries = Arc::new(Registries::new(config.mirrors)?);
        let long_questions = connections(socket(&space, Type::STREAM, names)?)?;
        let (filter, denials) = Filter::load(&allowed_connections, &allowed_datagrams)?;
        let members = Arc::new(Members::default());
        let upstream = Arc::new(resolver::Upstream::new(config.resolvers)?);
        let mut network = Self {
            space: Arc::clone(&space),
            filter: Arc::new(filter),
            members: Arc::clone(&members),
            next: Mutex::new(FIRST_NUMBER),
            tasks: Vec::new(),
        };
        network.spawn(relay::serve(connections(allowed_connections)?, Arc::clone(&members)));
        let exchanges = datagrams(allowed_datagrams)?;
        network.spawn(exchange::serve(exchanges, space, Arc::clone(&members)));
        network.spawn(resolver::serve(questions, Arc::clone(&members), Arc::clone(&upstream)));
        network.spawn(resolver::serve_streams(long_questions, Arc::clone(&members), upstream));
        network.spawn(registries.serve(packages, Arc::clone(&members)));
        network.spawn(report(denials, members));
        Ok(network)
    }

    fn spawn(&mut self, task: impl Future<Output = ()> + Send + 'static) {
        self.tasks.push(tokio::spawn(task).abort_handle());
    }

    /// Connects a sandbox. `number`: the one that it had before, for a sandbox that is connected again.
    /// Blocks for a moment.
    pub fn attach(
        &self,
        id: &str,
        number: Option<u32>,
        namespace: &OwnedFd,
        policy: Policy,
        log: Arc<DenialLog>,
    ) -> Result<Arc<Member>> {
        let member = self.enter(id, number, log)?;
        let attached = self.connect(&member, namespace).and_then(|()| member.set_policy(policy));
        match attached {
            Ok(()) => Ok(member),
            Err(error) => {
                self.detach(&member);
                Err(error)
            }
        }
    }

    fn connect(&self, member: &Arc<Member>, namespace: &OwnedFd) -> Result<()> {
        let (filter, number, address) = (&self.filter, member.number(), member.address());
        let guard =
            |cable: &crate::space::Cable| filter.guard(&cable.name, cable.index, number, address);
        let (_, guarded) = self.space.lay(number, namespace.as_fd(), guard)?;
        member.set_guarded(guarded);
        Ok(())
    }

    fn enter(&self, id: &str, number: Option<u32>, log: Arc<DenialLog>) -> Result<Arc<Member>> {
        let mut next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
        let mut table = self.members.lock();
        let last = SANDBOXES.network().to_bits().trailing_zeros();
        let last = (1u32 << last.min(32 - u32::from(SANDBOXES.bits()))) - 2;
        let free =
            |number: &u32| (FIRST_NUMBER..=last).contains(number) && !table.contains_key(number);
        let number = match number {
            Some(number) => Some(number).filter(free),
            // A number is used again as late as possible.
            None => (*next..=last).chain(FIRST_NUMBER..*next).find(free),
        };
        let number = number
            .ok_or_else(|| Error::new(ErrorKind::NoSpace, "no address is left for a sandbox"))?;
        *next = if number >= last { FIRST_NUMBER } else { number + 1 };
        let member = Arc::new(Member::new(id, number, Arc::clone(&self.filter), log));
        table.insert(number, Arc::clone(&member));
        Ok(member)
    }

    /// Disconnects a sandbox: its connections end, its interface goes. Blocks for a moment.
    pub fn detach(&self, member: &Arc<Member>) {
        if let Some(guarded) = member.close() {
            if let Err(error) = self.space.cut(guarded.index()) {
                tracing::warn!(id = member.id(), error = %error.chain(), "a cable stays behind");
            }
            self.filter.release(guarded);
        }
        self.members.lock().remove(&member.number());
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}

/// A socket in the namespace that may be at any address, and, for connections, listens.
fn socket(space: &Space, kind: Type, at: SocketAddr) -> Result<Socket> {
    space.inside(|| {
        let made = (|| -> std::io::Result<Socket> {
            let socket = Socket::new(Domain::IPV4, kind, None)?;
            socket.set_ip_transparent_v4(true)?;
            socket.bind(&at.into())?;
            if kind == Type::STREAM {
                socket.listen(BACKLOG)?;
            } else {
                sys::datagram::tell_destinations(socket.as_fd())?;
            }
            socket.set_nonblocking(true)?;
            Ok(socket)
        })();
        made.context(|| format!("serve sandboxes at {at}"))
    })
}

fn connections(socket: Socket) -> Result<tokio::net::TcpListener> {
    tokio::net::TcpListener::from_std(socket.into()).context(|| "take connections".into())
}

fn datagrams(socket: Socket) -> Result<tokio::net::UdpSocket> {
    tokio::net::UdpSocket::from_std(socket.into()).context(|| "take datagrams".into())
}

#[expect(
    deprecated,
    reason = "an owned descriptor stays open as long as its AsyncFd, which is all \
              that the unsafe constructor asks for"
)]
fn watch(denials: Denials) -> std::io::Result<AsyncFd<Denials>> {
    AsyncFd::new(denials)
}

/// Writes down what the filter denied.
async fn report(denials: Denials, members: Arc<Members>) {
    let mut denials = match watch(denials) {
        Ok(denials) => denials,
        Err(error) => return tracing::error!(%error, "denials of packets are not reported"),
    };
    while let Ok(mut ready) = denials.readable_mut().await {
        while let Some(bytes) = ready.get_inner_mut().next() {
            if let Some(packet) = DeniedPacket::decode(&bytes) {
                write_down(&packet, &members);
            }
        }
        ready.clear_ready();
    }
}

fn write_down(packet: &DeniedPacket, members: &Members) {
    let Some(member) = members.find(packet.sandbox) else { return };
    let reason = match packet.fault {
        PacketFault::NotAllowed => Reason::NotAllowed,
        PacketFault::Never => Reason::Never,
        PacketFault::Spoofed => Reason::Spoofed,
        PacketFault::Protocol => Reason::Protocol,
        PacketFault::Ipv6 => Reason::Ipv6,
        PacketFault::Malformed => Reason::Malformed,
    };
    let protocol = match packet.protocol {
        1 | 58 => "icmp".to_owned(),
        6 => "tcp".to_owned(),
        17 => "udp".to_owned(),
        other => other.to_string(),
    };
    let denial = Denial::now(reason, &protocol).to(packet.address, packet.port);
    member.deny(Denial { suppressed: packet.unreported, ..denial });
}
