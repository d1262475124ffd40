//! The built program as a person uses it: whole commands, exit codes, and what is left afterwards.
#![forbid(unsafe_code)]
// What surrounds a test may fail it.
#![allow(clippy::unwrap_used)]

mod bench;
mod commands;
mod containerd;
mod direct;
#[path = "../../../store/tests/places/double.rs"]
mod double;
mod events;
#[path = "../../../store/tests/places/folder.rs"]
mod folder;
mod full_disk;
mod lifetime;
mod metrics;
mod mounts;
mod network;
mod oci;
mod planes;
#[path = "../../../tests/tests/oci_world/registry.rs"]
mod registry;
mod remote;
#[path = "../../../store/tests/places/s3.rs"]
mod s3;
mod sandboxes;
mod signing;
mod storage;
mod store_care;
mod upgrade;
mod world;
