//! Interfaces, addresses, routes and neighbours of a network namespace: the few requests of rtnetlink(7)
//! that a virtual cable to a sandbox takes.
//!
//! A [`Routes`] belongs to the namespace of the thread that opened it, wherever it is used afterwards.
//! IPv4 only: a sandbox's interface has no other address.

use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};
use std::io;
use std::net::Ipv4Addr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

/// Address of an Ethernet interface.
pub type MacAddress = [u8; 6];

/// A connection to the routing part of the kernel, for one network namespace.
#[derive(Debug)]
pub struct Routes {
    socket: OwnedFd,
}

/// One end of a virtual cable.
#[derive(Debug, Clone, Copy)]
pub struct CableEnd<'a> {
    /// Name of the interface, 15 bytes at most.
    pub name: &'a str,
    /// Its address.
    pub mac: MacAddress,
}

/// Which packets a rule is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RuleFor {
    /// All.
    Every,
    /// Those that this host makes itself.
    Own,
}

/// The table that says what is delivered here.
pub const LOCAL_TABLE: u8 = 255;

const NLM_F_REQUEST: u16 = 1;
const NLM_F_ACK: u16 = 4;
const NLM_F_EXCL: u16 = 0x200;
const NLM_F_CREATE: u16 = 0x400;
const RTM_NEWLINK: u16 = 16;
const RTM_DELLINK: u16 = 17;
const RTM_NEWADDR: u16 = 20;
const RTM_NEWROUTE: u16 = 24;
const RTM_NEWNEIGH: u16 = 28;
const RTM_NEWRULE: u16 = 32;
const RTM_DELRULE: u16 = 33;
const AF_INET: u8 = 2;
const RTN_UNICAST: u8 = 1;
const RTN_LOCAL: u8 = 2;
const RT_SCOPE_UNIVERSE: u8 = 0;
const RT_SCOPE_LINK: u8 = 253;
const RT_SCOPE_HOST: u8 = 254;
const IFF_UP: u32 = 1;

impl Routes {
    /// Opens a connection for the namespace of the calling thread.
    pub fn open() -> io::Result<Self> {
        let socket = rustix::net::socket_with(
            AddressFamily::NETLINK,
            SocketType::RAW,
            SocketFlags::CLOEXEC,
            None,
        )?;
        rustix::net::bind(&socket, &SocketAddrNetlink::new(0, 0))?;
        Ok(Self { socket })
    }

    /// The kernel's number of the interface with this name.
    pub fn index_of(&self, name: &str) -> io::Result<u32> {
        let socket = rustix::net::socket_with(
            AddressFamily::INET,
            SocketType::DGRAM,
            SocketFlags::CLOEXEC,
            None,
        )?;
        Ok(rustix::net::netdevice::name_to_index(&socket, name)?)
    }

    /// Makes a cable: `here` in this namespace, `there` in that one. Both ends are down.
    pub fn add_cable(
        &self,
        here: CableEnd<'_>,
        there: CableEnd<'_>,
        there_namespace: BorrowedFd<'_>,
    ) -> io::Result<()> {
        const IFLA_ADDRESS: u16 = 1;
        const IFLA_IFNAME: u16 = 3;
        const IFLA_LINKINFO: u16 = 18;
        const IFLA_NET_NS_FD: u16 = 28;
        const IFLA_INFO_KIND: u16 = 1;
        const IFLA_INFO_DATA: u16 = 2;
        const VETH_INFO_PEER: u16 = 1;
        let mut message = Message::new(RTM_NEWLINK, NLM_F_CREATE | NLM_F_EXCL);
        message.put(&link_header(0, 0, 0));
        message.attribute(IFLA_IFNAME, &named(here.name));
        message.attribute(IFLA_ADDRESS, &here.mac);
        message.nested(IFLA_LINKINFO, |message| {
            message.attribute(IFLA_INFO_KIND, b"veth");
            message.nested(IFLA_INFO_DATA, |message| {
                message.nested(VETH_INFO_PEER, |message| {
                    message.put(&link_header(0, 0, 0));
                    message.attribute(IFLA_IFNAME, &named(there.name));
                    message.attribute(IFLA_ADDRESS, &there.mac);
                    let namespace = there_namespace.as_raw_fd().cast_unsigned();
                    message.attribute(IFLA_NET_NS_FD, &namespace.to_ne_bytes());
                });
            });
        });
        self.ask(message)
    }

    /// Brings an interface up.
    pub fn set_up(&self, index: u32) -> io::Result<()> {
        let mut message = Message::new(RTM_NEWLINK, 0);
        message.put(&link_header(index, IFF_UP, IFF_UP));
        self.ask(message)
    }

    /// Removes an interface; a cable goes with both ends.
    pub fn remove(&self, index: u32) -> io::Result<()> {
        let mut message = Message::new(RTM_DELLINK, 0);
        message.put(&link_header(index, 0, 0));
        self.ask(message)
    }

    /// Gives an interface an address of its own, without a network around it.
    pub fn add_address(&self, index: u32, address: Ipv4Addr) -> io::Result<()> {
        const IFA_ADDRESS: u16 = 1;
        const IFA_LOCAL: u16 = 2;
        let mut message = Message::new(RTM_NEWADDR, NLM_F_CREATE | NLM_F_EXCL);
        let [a, b, c, d] = index.to_ne_bytes();
        message.put(&[AF_INET, 32, 0, RT_SCOPE_UNIVERSE, a, b, c, d]);
        message.attribute(IFA_LOCAL, &address.octets());
        message.attribute(IFA_ADDRESS, &address.octets());
        self.ask(message)
    }

    /// A route to one neighbour on the link, in this table.
    pub fn add_link_route(&self, to: Ipv4Addr, index: u32, table: u8) -> io::Result<()> {
        self.add_route((to, 32), (RTN_UNICAST, RT_SCOPE_LINK), table, index, None)
    }

    /// The route for all other destinations, in the main table.
    pub fn add_default_route(&self, gateway: Ipv4Addr, index: u32) -> io::Result<()> {
        const MAIN_TABLE: u8 = 254;
        let everywhere = (Ipv4Addr::UNSPECIFIED, 0);
        let kind = (RTN_UNICAST, RT_SCOPE_UNIVERSE);
        self.add_route(everywhere, kind, MAIN_TABLE, index, Some(gateway))
    }

    /// Every destination is delivered in this namespace itself.
    pub fn deliver_everything_here(&self, loopback: u32) -> io::Result<()> {
        let everywhere = (Ipv4Addr::UNSPECIFIED, 0);
        self.add_route(everywhere, (RTN_LOCAL, RT_SCOPE_HOST), LOCAL_TABLE, loopback, None)
    }

    fn add_route(
        &self,
        (to, bits): (Ipv4Addr, u8),
        (kind, scope): (u8, u8),
        table: u8,
        index: u32,
        gateway: Option<Ipv4Addr>,
    ) -> io::Result<()> {
        const RTA_DST: u16 = 1;
        const RTA_OIF: u16 = 4;
        const RTA_GATEWAY: u16 = 5;
        const RTPROT_STATIC: u8 = 4;
        let mut message = Message::new(RTM_NEWROUTE, NLM_F_CREATE | NLM_F_EXCL);
        message.put(&[AF_INET, bits, 0, 0, table, RTPROT_STATIC, scope, kind, 0, 0, 0, 0]);
        if bits > 0 {
            message.attribute(RTA_DST, &to.octets());
        }
        message.attribute(RTA_OIF, &index.to_ne_bytes());
        if let Some(gateway) = gateway {
            message.attribute(RTA_GATEWAY, &gateway.octets());
        }
        self.ask(message)
    }

    /// Writes down for ever which interface address a neighbour has.
    pub fn add_neighbour(&self, index: u32, address: Ipv4Addr, mac: MacAddress) -> io::Result<()> {
        const NUD_PERMANENT: u16 = 0x80;
        const NDA_DST: u16 = 1;
        const NDA_LLADDR: u16 = 2;
        let mut message = Message::new(RTM_NEWNEIGH, NLM_F_CREATE | NLM_F_EXCL);
        message.put(&[AF_INET, 0, 0, 0]);
        message.put(&index.to_ne_bytes());
        message.put(&NUD_PERMANENT.to_ne_bytes());
        message.put(&[0, 0]);
        message.attribute(NDA_DST, &address.octets());
        message.attribute(NDA_LLADDR, &mac);
        self.ask(message)
    }

    /// Looks into this table at this priority; smaller numbers come first.
    pub fn add_rule(&self, priority: u32, table: u8, packets: RuleFor) -> io::Result<()> {
        self.rule(RTM_NEWRULE, NLM_F_CREATE | NLM_F_EXCL, priority, table, packets)
    }

    /// Takes a rule away.
    pub fn remove_rule(&self, priority: u32, table: u8) -> io::Result<()> {
        self.rule(RTM_DELRULE, 0, priority, table, RuleFor::Every)
    }

    fn rule(
        &self,
        kind: u16,
        flags: u16,
        priority: u32,
        table: u8,
        packets: RuleFor,
    ) -> io::Result<()> {
        const FRA_IIFNAME: u16 = 3;
        const FRA_PRIORITY: u16 = 6;
        const FR_ACT_TO_TBL: u8 = 1;
        let mut message = Message::new(kind, flags);
        message.put(&[AF_INET, 0, 0, 0, table, 0, 0, FR_ACT_TO_TBL, 0, 0, 0, 0]);
        message.attribute(FRA_PRIORITY, &priority.to_ne_bytes());
        if packets == RuleFor::Own {
            message.attribute(FRA_IIFNAME, &named("lo"));
        }
        self.ask(message)
    }

    /// Sends a request and waits for the kernel's answer.
    fn ask(&self, message: Message) -> io::Result<()> {
        let bytes = message.finish();
        rustix::net::send(&self.socket, &bytes, SendFlags::empty())?;
        let mut answer = [0u8; 8192];
        let (length, _) = rustix::net::recv(self.socket.as_fd(), &mut answer, RecvFlags::empty())?;
        let malformed = || io::Error::new(io::ErrorKind::InvalidData, "an answer of rtnetlink");
        let code = answer[..length].get(16..20).ok_or_else(malformed)?;
        let code = i32::from_ne_bytes(code.try_into().map_err(|_| malformed())?);
        if code == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(-code)) }
    }
}

fn named(name: &str) -> Vec<u8> {
    let mut bytes = name.as_bytes().to_vec();
    bytes.push(0);
    bytes
}

/// struct ifinfomsg.
fn link_header(index: u32, flags: u32, change: u32) -> [u8; 16] {
    let mut header = [0; 16];
    header[4..8].copy_from_slice(&index.to_ne_bytes());
    header[8..12].copy_from_slice(&flags.to_ne_bytes());
    header[12..].copy_from_slice(&change.to_ne_bytes());
    header
}

/// A request that is being written.
struct Message(Vec<u8>);

impl Message {
    fn new(kind: u16, flags: u16) -> Self {
        let mut bytes = vec![0; 16];
        bytes[4..6].copy_from_slice(&kind.to_ne_bytes());
        bytes[6..8].copy_from_slice(&(flags | NLM_F_REQUEST | NLM_F_ACK).to_ne_bytes());
        Self(bytes)
    }

    fn put(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }

    fn attribute(&mut self, kind: u16, value: &[u8]) {
        self.nested(kind, |message| message.put(value));
    }

    fn nested(&mut self, kind: u16, content: impl FnOnce(&mut Self)) {
        let start = self.0.len();
        self.put(&[0, 0]);
        self.put(&kind.to_ne_bytes());
        content(self);
        let length = (self.0.len() - start) as u16;
        self.0[start..start + 2].copy_from_slice(&length.to_ne_bytes());
        self.0.resize(self.0.len().next_multiple_of(4), 0);
    }

    fn finish(mut self) -> Vec<u8> {
        let length = self.0.len() as u32;
        self.0[..4].copy_from_slice(&length.to_ne_bytes());
        self.0
    }
}
