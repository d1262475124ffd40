//! The native interface of Lamella: messages, services, and how they map to inner types.
//!
//! With default features off only what the runtime and its zygote tell each other is compiled, so
//! that the program inside a sandbox links neither tonic nor tokio.
#![forbid(unsafe_code)]

#[cfg(feature = "rpc")]
pub mod connect;
pub mod exits;
pub mod launch;
#[cfg(feature = "rpc")]
pub mod meter;
#[cfg(feature = "rpc")]
mod named;
#[cfg(feature = "rpc")]
pub mod status;

/// The generated messages, clients and servers of `proto/v1/*.proto`.
#[cfg(feature = "rpc")]
#[allow(missing_docs, unreachable_pub, rust_2018_idioms, clippy::all, clippy::pedantic)]
pub mod v1 {
    tonic::include_proto!("lamella.v1");
}
