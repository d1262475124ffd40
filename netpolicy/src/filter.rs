//! The packet filter in the kernel (`bpf/filter.bpf.c`): loads it, puts it on interfaces, and keeps its maps.
//!
//! Locking: one mutex over all maps, held for a few system calls. CRASH: program and maps live as long as
//! this process; the interfaces go with it, so nothing is left open or behind.

use crate::ports::Ports;
use crate::range::{GATEWAY, Range, SANDBOXES};
use aya::maps::lpm_trie::Key;
use aya::maps::{HashMap, LpmTrie, MapData, RingBuf, SockMap};
use aya::programs::tc::SchedClassifierLinkId;
use aya::programs::{SchedClassifier, TcAttachType};
use aya::{Ebpf, EbpfLoader};
use layer::{Error, ErrorKind, Result};
use std::net::Ipv4Addr;
use std::os::fd::AsRawFd;
use std::sync::{Mutex, MutexGuard, PoisonError};

static OBJECT: &[u8] = aya::include_bytes_aligned!(env!("LAMELLA_FILTER"));

/// Bytes of `struct rules`.
const RULES_BYTES: usize = 8 + 16 * crate::policy::MAX_PORTS;
/// Bytes of `struct interface`.
const INTERFACE_BYTES: usize = 40;

type Rules = [u8; RULES_BYTES];

/// What a sandbox may do, as the kernel keeps it: until when, and which ports.
pub type TimedPorts = (u64, Ports);

/// Reads what was denied.
pub type Denials = RingBuf<MapData>;

/// The filter, loaded.
pub struct Filter {
    state: Mutex<State>,
}

impl std::fmt::Debug for Filter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Filter").finish_non_exhaustive()
    }
}

struct State {
    program: Ebpf,
    interfaces: HashMap<MapData, u32, [u8; INTERFACE_BYTES]>,
    allowed: LpmTrie<MapData, [u8; 8], Rules>,
    /// Keeps the map, which holds no reference to the sockets' owners.
    _listeners: SockMap<MapData>,
}

/// One interface with the filter on it.
#[derive(Debug)]
pub struct Guarded {
    index: u32,
    link: SchedClassifierLinkId,
}

impl Guarded {
    /// The kernel's number of the interface.
    pub fn index(&self) -> u32 {
        self.index
    }
}

fn wrong(what: &str, error: impl std::error::Error + Send + Sync + 'static) -> Error {
    Error::new(ErrorKind::Unsupported, format!("packet filter: {what}")).with_source(error)
}

impl Filter {
    /// Loads program and maps. What is allowed goes to these two listeners.
    pub fn load(tcp: &impl AsRawFd, udp: &impl AsRawFd) -> Result<(Self, Denials)> {
        let gateway = u32::from_ne_bytes(GATEWAY.octets());
        let network = u32::from_ne_bytes(SANDBOXES.network().octets());
        let mask = u32::MAX << (32 - SANDBOXES.bits());
        let mask = u32::from_ne_bytes(mask.to_be_bytes());
        let mut program = EbpfLoader::new()
            .override_global("GATEWAY", &gateway, true)
            .override_global("SANDBOXES", &network, true)
            .override_global("SANDBOXES_MASK", &mask, true)
            .load(OBJECT)
            .map_err(|error| wrong("load", error))?;
        let mut map = |name: &str| {
            let missing = || Error::new(ErrorKind::Internal, format!("no map {name}"));
            program.take_map(name).ok_or_else(missing)
        };
        let interfaces = HashMap::try_from(map("interfaces")?).map_err(|e| wrong("map", e))?;
        let allowed = LpmTrie::try_from(map("allowed")?).map_err(|e| wrong("map", e))?;
        let denials = RingBuf::try_from(map("denials")?).map_err(|e| wrong("map", e))?;
        let mut listeners = SockMap::try_from(map("listeners")?).map_err(|e| wrong("map", e))?;
        listeners.set(0, tcp, 0).map_err(|error| wrong("TCP listener", error))?;
        listeners.set(1, udp, 0).map_err(|error| wrong("UDP listener", error))?;
        classifier(&mut program)?.load().map_err(|error| wrong("verify", error))?;
        let state = State { program, interfaces, allowed, _listeners: listeners };
        Ok((Self { state: Mutex::new(state) }, denials))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts the filter on an interface of the calling thread's network namespace.
    pub fn guard(
        &self,
        name: &str,
        index: u32,
        sandbox: u32,
        address: Ipv4Addr,
    ) -> Result<Guarded> {
        let mut state = self.lock();
        let mut interface = [0; INTERFACE_BYTES];
        interface[..4].copy_from_slice(&address.octets());
        interface[4..8].copy_from_slice(&sandbox.to_ne_bytes());
        state.interfaces.insert(index, interface, 0).map_err(|e| wrong("interface", e))?;
        let attached = classifier(&mut state.program).and_then(|program| {
            program.attach(name, TcAttachType::Ingress).map_err(|e| wrong("attach", e))
        });
        match attached {
            Ok(link) => Ok(Guarded { index, link }),
            Err(error) => {
                let _unused = state.interfaces.remove(&index);
                Err(error)
            }
        }
    }

    /// Forgets an interface that is going away.
    pub fn release(&self, guarded: Guarded) {
        let mut state = self.lock();
        let detached = classifier(&mut state.program)
            .and_then(|program| program.detach(guarded.link).map_err(|e| wrong("detach", e)));
        if let Err(error) = detached {
            // The interface may have gone before, with its sandbox.
            tracing::debug!(error = %error.chain(), "packet filter");
        }
        let _absent = state.interfaces.remove(&guarded.index);
    }

    /// How many packets of an interface were denied so far.
    pub fn denied(&self, guarded: &Guarded) -> u64 {
        let interface = self.lock().interfaces.get(&guarded.index, 0);
        let count = |bytes: [u8; INTERFACE_BYTES]| bytes[8..16].try_into().map(u64::from_ne_bytes);
        interface.ok().and_then(|bytes| count(bytes).ok()).unwrap_or(0)
    }

    /// Says what a sandbox may ask of these addresses, in place of what was said before.
    pub fn allow(&self, sandbox: u32, range: Range, ports: &[TimedPorts]) -> Result<()> {
        let mut rules = [0; RULES_BYTES];
        let count = ports.len().min(crate::policy::MAX_PORTS);
        rules[..8].copy_from_slice(&(count as u64).to_ne_bytes());
        for ((until, ports), place) in ports.iter().zip(rules[8..].chunks_exact_mut(16)) {
            place[..8].copy_from_slice(&until.to_ne_bytes());
            place[8..10].copy_from_slice(&ports.first.to_ne_bytes());
            place[10..12].copy_from_slice(&ports.last.to_ne_bytes());
            place[12..].copy_from_slice(&u32::from(ports.protocol.number()).to_ne_bytes());
        }
        let full =
            |error| Error::new(ErrorKind::NoSpace, "packet filter: allow").with_source(error);
        self.lock().allowed.insert(&key(sandbox, range), rules, 0).map_err(full)
    }

    /// Closes these addresses.
    pub fn forbid(&self, sandbox: u32, range: Range) {
        let _absent = self.lock().allowed.remove(&key(sandbox, range));
    }
}

fn classifier(program: &mut Ebpf) -> Result<&mut SchedClassifier> {
    let missing = || Error::new(ErrorKind::Internal, "packet filter: no program");
    let program = program.program_mut("from_sandbox").ok_or_else(missing)?;
    program.try_into().map_err(|error| wrong("program", error))
}

fn key(sandbox: u32, range: Range) -> Key<[u8; 8]> {
    let mut data = [0; 8];
    data[..4].copy_from_slice(&sandbox.to_ne_bytes());
    data[4..].copy_from_slice(&range.network().octets());
    Key::new(32 + u32::from(range.bits()), data)
}

/// Why the kernel denied a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PacketFault {
    /// The policy does not say so.
    NotAllowed,
    /// No policy can say so.
    Never,
    /// Not from the sandbox's own address.
    Spoofed,
    /// Neither TCP nor UDP.
    Protocol,
    /// IPv6.
    Ipv6,
    /// Options, fragments, or cut short.
    Malformed,
}

/// A packet that was denied, as the kernel tells it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeniedPacket {
    /// Number of the sandbox.
    pub sandbox: u32,
    /// Why.
    pub fault: PacketFault,
    /// Protocol number of IP.
    pub protocol: u8,
    /// Where it was sent.
    pub address: std::net::IpAddr,
    /// The port there; 0 where there is none.
    pub port: u16,
    /// Denials before this one that were not reported one by one.
    pub unreported: u64,
}

impl DeniedPacket {
    /// From `struct denial`.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; 40] = bytes.get(..40)?.try_into().ok()?;
        let address: [u8; 4] = bytes[12..16].try_into().ok()?;
        let address6: [u8; 16] = bytes[24..40].try_into().ok()?;
        let fault = match bytes[19] {
            1 => PacketFault::NotAllowed,
            2 => PacketFault::Never,
            3 => PacketFault::Spoofed,
            4 => PacketFault::Protocol,
            5 => PacketFault::Ipv6,
            _ => PacketFault::Malformed,
        };
        Some(Self {
            sandbox: u32::from_ne_bytes(bytes[8..12].try_into().ok()?),
            fault,
            protocol: bytes[18],
            address: if fault == PacketFault::Ipv6 { address6.into() } else { address.into() },
            port: u16::from_ne_bytes(bytes[16..18].try_into().ok()?),
            unreported: u64::from_ne_bytes(bytes[..8].try_into().ok()?),
        })
    }
}
