//! The namespace between the sandboxes and this node: one end of every sandbox's cable lies here, and the
//! sockets of the node that sandboxes reach. Nothing leads out of it but what this process carries.
//!
//! CRASH: it has no name and lives as long as this process. When it goes, the cables go with it, and the
//! sandboxes are left without a network.

use layer::{Context, Error, ErrorKind, Result};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use sys::netlink::{CableEnd, LOCAL_TABLE, MacAddress, Routes, RuleFor};
use sys::process::{self, Namespaces};

use crate::range::{GATEWAY, SANDBOXES};

/// The interface inside a sandbox.
const INSIDE: &str = "eth0";
/// Routes to the sandboxes, for packets of our own.
const SANDBOX_TABLE: u8 = 10;
const MAIN_TABLE: u8 = 254;
/// Address of our end of every cable.
const OUR_MAC: MacAddress = [0x02, 0, 0, 0, 0, 1];

/// The namespace.
#[derive(Debug)]
pub struct Space {
    namespace: OwnedFd,
}

/// A cable to a sandbox, still closed.
#[derive(Debug)]
pub struct Cable {
    /// Name of our end.
    pub name: String,
    /// The kernel's number for our end.
    pub index: u32,
}

/// Address of the sandbox with this number.
pub fn address_of(number: u32) -> Ipv4Addr {
    Ipv4Addr::from_bits(SANDBOXES.network().to_bits() + number)
}

/// The sandbox that has this address, if it is one.
pub fn number_of(address: Ipv4Addr) -> Option<u32> {
    SANDBOXES.contains(address).then(|| address.to_bits() - SANDBOXES.network().to_bits())
}

/// Runs `work` on a thread inside a network namespace.
pub fn inside<T: Send>(
    namespace: BorrowedFd<'_>,
    work: impl FnOnce() -> Result<T> + Send,
) -> Result<T> {
    on_a_thread(|| {
        process::enter_namespace(namespace).context(|| "enter a network namespace".into())?;
        work()
    })
}

/// A thread of its own, which ends afterwards: no other thread is ever in a wrong namespace.
fn on_a_thread<T: Send>(work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("namespace".into());
        let thread = thread.spawn_scoped(scope, work).context(|| "start a thread".into())?;
        let panicked = |_| Err(Error::new(ErrorKind::Internal, "a thread panicked"));
        thread.join().unwrap_or_else(panicked)
    })
}

fn set(name: &str, value: &str) -> Result<()> {
    let path = format!("/proc/sys/net/{name}");
    std::fs::write(&path, value).context(|| format!("write {path}"))
}

impl Space {
    /// Makes the namespace: every address is delivered in it, and nothing is forwarded.
    pub fn new() -> Result<Self> {
        let namespace = on_a_thread(|| {
            process::unshare(Namespaces::NET).context(|| "make a network namespace".into())?;
            process::loopback_up().context(|| "bring loopback up".into())?;
            set("ipv4/ip_forward", "0")?;
            // A refusal is told at once, however many there are.
            set("ipv4/icmp_ratelimit", "0")?;
            set("ipv4/icmp_echo_ignore_all", "1")?;
            // A handshake is finished by the socket that began it, which the filter has chosen.
            set("ipv4/tcp_syncookies", "0")?;
            route().context(|| "set up routes between sandboxes and node".into())?;
            let own = std::fs::File::open("/proc/thread-self/ns/net");
            Ok(OwnedFd::from(own.context(|| "open a network namespace".into())?))
        })?;
        Ok(Self { namespace })
    }

    /// Runs `work` on a thread in here.
    pub fn inside<T: Send>(&self, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        inside(self.namespace.as_fd(), work)
    }

    /// Lays a cable to a sandbox. `guard` puts the filter on our end before it can carry anything.
    pub fn lay<G: Send>(
        &self,
        number: u32,
        sandbox: BorrowedFd<'_>,
        guard: impl FnOnce(&Cable) -> Result<G> + Send,
    ) -> Result<(Cable, G)> {
        let name = format!("s{number}");
        let [_, b, c, d] = number.to_be_bytes();
        let their_mac = [0x02, 0, 1, b, c, d];
        let address = address_of(number);
        let (cable, guarded) = self.inside(|| {
            let routes = Routes::open().context(|| "open rtnetlink".into())?;
            let here = CableEnd { name: &name, mac: OUR_MAC };
            let there = CableEnd { name: INSIDE, mac: their_mac };
            routes.add_cable(here, there, sandbox).context(|| "make a cable".into())?;
            let index = routes.index_of(&name).context(|| "find the cable".into())?;
            let cable = Cable { name: name.clone(), index };
            let prepared = guard(&cable).and_then(|guarded| {
                set(&format!("ipv6/conf/{name}/disable_ipv6"), "1").or_else(without_ipv6)?;
                routes
                    .set_up(index)
                    .and_then(|()| routes.add_link_route(address, index, SANDBOX_TABLE))
                    .and_then(|()| routes.add_neighbour(index, address, their_mac))
                    .context(|| "connect our end of the cable".into())?;
                Ok(guarded)
            });
            prepared.map(|guarded| (cable, guarded)).inspect_err(|_| {
                let _gone = routes.remove(index);
            })
        })?;
        let connected = inside(sandbox, || {
            let routes = Routes::open().context(|| "open rtnetlink".into())?;
            set(&format!("ipv6/conf/{INSIDE}/disable_ipv6"), "1").or_else(without_ipv6)?;
            connect(&routes, address).context(|| "connect the sandbox's end of the cable".into())
        });
        match connected {
            Ok(()) => Ok((cable, guarded)),
            Err(error) => {
                self.cut(cable.index)?;
                Err(error)
            }
        }
    }

    /// Takes a cable away; not being there any more is fine.
    pub fn cut(&self, index: u32) -> Result<()> {
        const ENODEV: i32 = 19;
        self.inside(|| {
            let routes = Routes::open().context(|| "open rtnetlink".into())?;
            match routes.remove(index) {
                Err(error) if error.raw_os_error() == Some(ENODEV) => Ok(()),
                other => other.context(|| "remove a cable".into()),
            }
        })
    }
}

/// A kernel without IPv6 has nothing to turn off.
fn without_ipv6(error: Error) -> Result<()> {
    if error.kind() == ErrorKind::NotFound { Ok(()) } else { Err(error) }
}

fn route() -> std::io::Result<()> {
    let routes = Routes::open()?;
    // Our own packets find the sandboxes first. What comes from a sandbox finds nothing but us, so that one
    // sandbox never leads to another.
    routes.add_rule(1, SANDBOX_TABLE, RuleFor::Own)?;
    routes.add_rule(2, LOCAL_TABLE, RuleFor::Every)?;
    routes.remove_rule(0, LOCAL_TABLE)?;
    let loopback = routes.index_of("lo")?;
    routes.deliver_everything_here(loopback)
}

fn connect(routes: &Routes, address: Ipv4Addr) -> std::io::Result<()> {
    let index = routes.index_of(INSIDE)?;
    routes.set_up(index)?;
    routes.add_address(index, address)?;
    routes.add_link_route(GATEWAY, index, MAIN_TABLE)?;
    routes.add_neighbour(index, GATEWAY, OUR_MAC)?;
    routes.add_default_route(GATEWAY, index)
}

/// Whether this address is one of the host's own, loopback or not.
pub fn is_of_this_host(address: Ipv4Addr) -> bool {
    // The kernel lets nobody else be it.
    std::net::UdpSocket::bind(SocketAddr::from((address, 0))).is_ok()
}
