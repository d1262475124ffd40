//! The built program as a person uses it: whole commands, exit codes, and what is left afterwards.
#![forbid(unsafe_code)]
// What surrounds a test may fail it.
#![allow(clippy::unwrap_used)]

mod direct;
mod full_disk;
mod mounts;
mod planes;
mod sandboxes;
mod storage;
mod store_care;
mod upgrade;
mod world;
