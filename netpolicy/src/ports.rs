//! Protocols and ranges of ports.

use layer::{Error, Result};
use std::fmt;

/// What a packet carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Protocol {
    /// Connections.
    Tcp,
    /// Datagrams.
    Udp,
}

impl Protocol {
    /// Its number in a packet.
    pub fn number(self) -> u8 {
        match self {
            Self::Tcp => 6,
            Self::Udp => 17,
        }
    }
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
        })
    }
}

/// Ports of one protocol, from the first to the last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ports {
    /// The protocol they are of.
    pub protocol: Protocol,
    /// The first that belongs.
    pub first: u16,
    /// The last that belongs.
    pub last: u16,
}

impl Ports {
    /// `443`, `8000-8100` or `*`.
    pub fn parse(protocol: Protocol, text: &str) -> Result<Self> {
        let number = |text: &str| {
            let number = text.parse::<u16>().ok().filter(|number| *number != 0);
            number.ok_or_else(|| Error::invalid(format!("port {text:?}: a number from 1 to 65535")))
        };
        if text == "*" {
            return Ok(Self::all(protocol));
        }
        let (first, last) = match text.split_once('-') {
            Some((first, last)) => (number(first)?, number(last)?),
            None => (number(text)?, number(text)?),
        };
        if first > last {
            return Err(Error::invalid(format!("ports {text}: the first is above the last")));
        }
        Ok(Self { protocol, first, last })
    }

    /// Every port.
    pub fn all(protocol: Protocol) -> Self {
        Self { protocol, first: 0, last: u16::MAX }
    }

    /// Whether this port belongs.
    pub fn include(&self, protocol: Protocol, port: u16) -> bool {
        self.protocol == protocol && (self.first..=self.last).contains(&port)
    }
}

impl fmt::Display for Ports {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.first, self.last) {
            (0, u16::MAX) => f.write_str("*"),
            (first, last) if first == last => write!(f, "{first}"),
            (first, last) => write!(f, "{first}-{last}"),
        }
    }
}
