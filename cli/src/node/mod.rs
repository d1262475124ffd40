//! The node of a data directory: one process that serves Images and Sandboxes and looks after fsd.
//!
//! [`lock`] says who owns a data directory, [`start`] finds or starts its node, [`server`] is the node,
//! [`daemon`] keeps fsd alive, [`leases`] keeps what is in use, [`upgrade`] makes it another program, [`owners`] cleans up after commands that died.

pub mod daemon;
pub mod leases;
pub mod lock;
pub mod log;
pub mod metrics;
pub mod options;
pub mod owners;
pub mod reserve;
pub mod sandbox_options;
pub mod server;
pub mod start;
pub mod upgrade;
