//! What a sandbox may reach on the network, and what sees to it.
//!
//! ```text
//!  sandbox            namespace of the node                    host
//!  eth0 ═══ cable ═══ filter (eBPF) ─┬─ allowed ──> relay ───────> the address asked for
//!                                    ├─ port 53 ──> resolver ────> the host's resolvers, allowed names only
//!                                    ├─ port 80 ──> registries ──> PyPI, npm, Go, Debian, as of a date
//!                                    └─ all else: refused, written down
//! ```
//!
//! No packet of a sandbox is ever routed: the namespace that its cable leads to has no way out. What is allowed
//! ends in a socket of this process, which opens another one for it. So nothing of the host's own network
//! configuration takes part, and when this process dies every sandbox is cut off.

#![forbid(unsafe_code)]

pub mod denials;
mod exchange;
mod filter;
mod member;
mod name;
mod network;
mod policy;
mod ports;
mod presets;
mod publish;
mod range;
mod registry;
mod relay;
mod resolver;
mod space;

pub use denials::{Denial, DenialLog, Reason};
pub use member::Member;
pub use network::{Network, NetworkConfig};
pub use policy::Policy;
pub use publish::{Publication, Published};
pub use range::GATEWAY;
#[doc(hidden)]
pub use resolver::read_question;
