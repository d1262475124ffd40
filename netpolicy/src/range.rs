//! Ranges of IPv4 addresses, and those that no policy opens.

use layer::{Error, Result};
use std::fmt;
use std::net::Ipv4Addr;

/// The addresses that begin with the same bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Range {
    network: Ipv4Addr,
    bits: u8,
}

impl Range {
    /// The range around `address` with these leading bits; 32 at most.
    pub const fn new(address: Ipv4Addr, bits: u8) -> Self {
        let network = address.to_bits() & Self::mask(bits);
        Self { network: Ipv4Addr::from_bits(network), bits }
    }

    /// One address.
    pub const fn of(address: Ipv4Addr) -> Self {
        Self::new(address, 32)
    }

    const fn mask(bits: u8) -> u32 {
        match bits {
            0 => 0,
            bits => u32::MAX << (32 - bits),
        }
    }

    /// `192.0.2.1` or `192.0.2.0/24`.
    pub fn parse(text: &str) -> Result<Self> {
        let wrong = || Error::invalid(format!("{text:?} is no IPv4 address or range"));
        let (address, bits) = match text.split_once('/') {
            Some((address, bits)) => (address, bits.parse::<u8>().map_err(|_| wrong())?),
            None => (text, 32),
        };
        let address: Ipv4Addr = address.parse().map_err(|_| wrong())?;
        if bits > 32 {
            return Err(wrong());
        }
        let range = Self::new(address, bits);
        if range.network != address {
            let text = format!("{text}: bits are set beyond the range; {range} is meant?");
            return Err(Error::invalid(text));
        }
        Ok(range)
    }

    /// Its first address.
    pub fn network(&self) -> Ipv4Addr {
        self.network
    }

    /// How many leading bits its addresses share.
    pub fn bits(&self) -> u8 {
        self.bits
    }

    /// Whether this address lies in it.
    pub const fn contains(&self, address: Ipv4Addr) -> bool {
        address.to_bits() & Self::mask(self.bits) == self.network.to_bits()
    }

    /// Whether every address of the other lies in it.
    pub fn covers(&self, other: &Self) -> bool {
        self.bits <= other.bits && self.contains(other.network)
    }
}

impl fmt::Display for Range {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.bits {
            32 => write!(f, "{}", self.network),
            bits => write!(f, "{}/{bits}", self.network),
        }
    }
}

/// The addresses of sandboxes and of the node among them. They exist between the two only; the range is one
/// that no network routes.
pub const SANDBOXES: Range = Range::new(Ipv4Addr::new(198, 18, 0, 0), 15);
/// Where a sandbox finds its resolver and the registries.
pub const GATEWAY: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 1);

/// What no policy opens, whatever it says. The filter in the kernel knows the same list.
const NEVER: [Range; 6] = [
    Range::new(Ipv4Addr::new(0, 0, 0, 0), 8),
    Range::new(Ipv4Addr::new(127, 0, 0, 0), 8),
    // Link-local, and the metadata services of clouds.
    Range::new(Ipv4Addr::new(169, 254, 0, 0), 16),
    Range::new(Ipv4Addr::new(100, 100, 100, 200), 32),
    // Multicast, reserved, broadcast.
    Range::new(Ipv4Addr::new(224, 0, 0, 0), 3),
    SANDBOXES,
];

/// Networks of organisations and providers: opened by a range that names them, never by a name that
/// somebody's server points there.
const PRIVATE: [Range; 4] = [
    Range::new(Ipv4Addr::new(10, 0, 0, 0), 8),
    Range::new(Ipv4Addr::new(100, 64, 0, 0), 10),
    Range::new(Ipv4Addr::new(172, 16, 0, 0), 12),
    Range::new(Ipv4Addr::new(192, 168, 0, 0), 16),
];

/// Whether no policy opens this address.
pub fn is_never_allowed(address: Ipv4Addr) -> bool {
    NEVER.iter().any(|range| range.contains(address))
}

/// Whether a name alone does not open this address.
pub fn is_private(address: Ipv4Addr) -> bool {
    PRIVATE.iter().any(|range| range.contains(address))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_read_and_written_alike() {
        for text in ["0.0.0.0/0", "192.0.2.0/24", "192.0.2.7", "128.0.0.0/1"] {
            assert_eq!(Range::parse(text).unwrap().to_string(), text);
        }
        for text in ["192.0.2.1/24", "1.2.3", "1.2.3.4/33", "::1", "1.2.3.4/", "01.2.3.4"] {
            assert!(Range::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn the_worst_places_are_never_allowed() {
        for text in [
            "169.254.169.254",
            "127.0.0.1",
            "0.0.0.0",
            "255.255.255.255",
            "224.0.0.1",
            "198.18.0.9",
        ] {
            assert!(is_never_allowed(text.parse().unwrap()), "{text}");
        }
        assert!(!is_never_allowed("192.0.2.1".parse().unwrap()));
        assert!(is_private("10.1.2.3".parse().unwrap()));
    }
}
