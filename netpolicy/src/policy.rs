//! What a sandbox may reach. Pure: text in, decisions out.
//!
//! ```text
//! [tcp:|udp:]WHERE[:PORTS]        WHERE: a name, *.NAME, an address, a range
//! PRESET[,before=DATE][,deny=PACKAGE]...
//! ```

use crate::name::DomainName;
use crate::ports::{Ports, Protocol};
use crate::presets::{self, Preset, RegistryKind, Selection};
use crate::range::Range;
use layer::{Error, Result};
use std::collections::BTreeMap;
use std::fmt;
use std::net::Ipv4Addr;

/// Most lines of a policy.
const MAX_RULES: usize = 256;
/// Most port ranges that hold for one address; the filter in the kernel reads no more.
pub const MAX_PORTS: usize = 24;

/// Destinations of a rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Destination {
    /// One name.
    Name(DomainName),
    /// All names below this one.
    Below(DomainName),
    /// Addresses.
    Range(Range),
}

/// One thing that is allowed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    /// Where to.
    pub destination: Destination,
    /// With which protocol to which ports.
    pub ports: Ports,
}

/// What a sandbox may reach; nothing unless it says so.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Policy {
    lines: Vec<String>,
    rules: Vec<Rule>,
    registries: Vec<Selection>,
}

impl Policy {
    /// Reads a policy, one rule or preset a line.
    pub fn parse<S: AsRef<str>>(lines: &[S]) -> Result<Self> {
        if lines.len() > MAX_RULES {
            return Err(Error::invalid(format!("a policy has {MAX_RULES} lines at most")));
        }
        let mut policy = Self::default();
        for line in lines {
            policy.add(line.as_ref().trim())?;
        }
        for (range, ports) in policy.ranges() {
            if ports.len() > MAX_PORTS {
                let text = format!("{range}: {MAX_PORTS} rules at most hold for one address");
                return Err(Error::invalid(text));
            }
        }
        Ok(policy)
    }

    fn add(&mut self, line: &str) -> Result<()> {
        if self.lines.iter().any(|known| known == line) {
            return Ok(());
        }
        let word = line.split(',').next().unwrap_or_default();
        let is_preset = !word.contains(['.', ':', '/', '*']);
        if is_preset {
            let (preset, selection) = presets::select(line)?;
            for rule in &preset.allow {
                self.rules.push(Rule::parse(rule)?);
            }
            if let Some(selection) = selection {
                if self.registries.iter().any(|known| known.kind == selection.kind) {
                    return Err(Error::invalid(format!("{word} is named twice")));
                }
                self.registries.push(selection);
            }
        } else {
            self.rules.push(Rule::parse(line)?);
        }
        self.lines.push(line.to_owned());
        Ok(())
    }

    /// The lines that it was read from.
    pub fn lines(&self) -> &[String] {
        &self.lines
    }

    /// Whether it allows nothing.
    pub fn is_empty(&self) -> bool {
        self.lines.is_empty()
    }

    /// The registries that it opens through the node.
    pub fn registries(&self) -> &[Selection] {
        &self.registries
    }

    /// The registry of this kind, if it is open.
    pub fn registry(&self, kind: RegistryKind) -> Option<&Selection> {
        self.registries.iter().find(|selection| selection.kind == kind)
    }

    /// The registry whose server this name is, as far as it is open here. Nobody reaches that server
    /// directly.
    pub fn registry_of(&self, name: &DomainName) -> Option<&Preset> {
        let presets = self.registries.iter().map(Selection::preset);
        presets.into_iter().find(|preset| preset.closes(name))
    }

    /// What may be asked of the servers behind a name; empty for a name that is not allowed.
    pub fn ports_of_name(&self, name: &DomainName) -> Vec<Ports> {
        if self.registry_of(name).is_some() {
            return Vec::new();
        }
        self.collect(|destination| match destination {
            Destination::Name(allowed) => allowed == name,
            Destination::Below(above) => name.is_below(above),
            Destination::Range(_) => false,
        })
    }

    /// What may be asked of an address because of a range.
    pub fn ports_of_address(&self, address: Ipv4Addr) -> Vec<Ports> {
        self.collect(|destination| match destination {
            Destination::Range(range) => range.contains(address),
            _ => false,
        })
    }

    /// Every range, with all that may be asked of its addresses: also by rules for larger ranges.
    pub fn ranges(&self) -> BTreeMap<Range, Vec<Ports>> {
        let ranges = self.rules.iter().filter_map(|rule| match &rule.destination {
            Destination::Range(range) => Some(*range),
            _ => None,
        });
        let covering = |wanted: Range| {
            self.collect(|destination| match destination {
                Destination::Range(range) => range.covers(&wanted),
                _ => false,
            })
        };
        ranges.map(|range| (range, covering(range))).collect()
    }

    fn collect(&self, matches: impl Fn(&Destination) -> bool) -> Vec<Ports> {
        let matching = self.rules.iter().filter(|rule| matches(&rule.destination));
        let mut ports: Vec<Ports> = matching.map(|rule| rule.ports).collect();
        ports.sort_unstable();
        ports.dedup();
        ports
    }
}

impl Rule {
    fn parse(text: &str) -> Result<Self> {
        let (protocol, rest) = match text.split_once(':') {
            Some(("tcp", rest)) => (Protocol::Tcp, rest),
            Some(("udp", rest)) => (Protocol::Udp, rest),
            Some((other @ ("icmp" | "sctp" | "ip" | "raw"), _)) => {
                return Err(Error::invalid(format!(
                    "{text}: tcp and udp can be allowed, {other} not"
                )));
            }
            _ => (Protocol::Tcp, text),
        };
        if rest.matches(':').count() > 1 || rest.starts_with('[') {
            return Err(Error::invalid(format!("{text}: IPv6 stays closed")));
        }
        let (place, ports) = match rest.split_once(':') {
            Some((place, ports)) => (place, Ports::parse(protocol, ports)?),
            None => (rest, Ports::all(protocol)),
        };
        let is_address = place.bytes().all(|byte| byte.is_ascii_digit() || b"./".contains(&byte));
        let destination = if let Some(above) = place.strip_prefix("*.") {
            Destination::Below(DomainName::parse(above)?)
        } else if is_address || place.contains('/') {
            Destination::Range(Range::parse(place)?)
        } else {
            Destination::Name(DomainName::parse(place)?)
        };
        Ok(Self { destination, ports })
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:", self.ports.protocol)?;
        match &self.destination {
            Destination::Name(name) => write!(f, "{name}")?,
            Destination::Below(name) => write!(f, "*.{name}")?,
            Destination::Range(range) => write!(f, "{range}")?,
        }
        write!(f, ":{}", self.ports)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> DomainName {
        DomainName::parse(text).unwrap()
    }

    fn allows(policy: &Policy, host: &str, port: u16) -> bool {
        let ports = policy.ports_of_name(&name(host));
        ports.iter().any(|ports| ports.include(Protocol::Tcp, port))
    }

    #[test]
    fn names_and_wildcards_mean_what_they_say() {
        let policy = Policy::parse(&["tcp:Example.org.:443", "*.debian.org:80"]).unwrap();
        assert!(allows(&policy, "example.org", 443));
        assert!(!allows(&policy, "example.org", 80));
        assert!(!allows(&policy, "www.example.org", 443));
        assert!(!allows(&policy, "example.org.evil.com", 443));
        assert!(allows(&policy, "a.b.debian.org", 80));
        assert!(!allows(&policy, "debian.org", 80));
        assert!(!allows(&policy, "evildebian.org", 80));
    }

    #[test]
    fn the_smaller_range_has_the_rules_of_the_larger_one() {
        let policy = Policy::parse(&["192.0.2.0/24:80", "udp:192.0.2.9:53", "192.0.0.0/8:22"]);
        let ranges = policy.unwrap().ranges();
        assert_eq!(ranges.values().map(Vec::len).collect::<Vec<_>>(), [1, 2, 3]);
    }

    #[test]
    fn what_cannot_be_kept_is_refused() {
        for line in [
            "",
            "tcp:",
            "icmp:1.2.3.4",
            "tcp:example.org:0",
            "tcp:example.org:99999",
            "tcp:example.org:9-3",
            "tcp:exa mple.org:1",
            "tcp:[::1]:80",
            "2001:db8::/32",
            "1.2.3.4/8:80",
            "*:80",
            "*.*.org",
            "no-such-preset",
            "github,before=2025-01-01",
            "pypi,before=yesterday",
            "pypi,colour=red",
        ] {
            assert!(Policy::parse(&[line]).is_err(), "{line:?}");
        }
        assert!(Policy::parse(&["pypi", "pypi,deny=numpy"]).is_err());
        let many: Vec<String> = (1..40).map(|port| format!("1.2.3.4:{port}")).collect();
        assert!(Policy::parse(&many).is_err());
    }

    #[test]
    fn the_servers_of_a_registry_are_closed_beside_it() {
        let policy = Policy::parse(&["pypi,before=2025-01-01", "*.org:443"]).unwrap();
        assert!(!allows(&policy, "pypi.org", 443));
        assert!(!allows(&policy, "files.pythonhosted.org", 443));
        assert!(allows(&policy, "example.org", 443));
        let open = Policy::parse(&["pypi.org:443"]).unwrap();
        assert!(allows(&open, "pypi.org", 443));
    }
}
