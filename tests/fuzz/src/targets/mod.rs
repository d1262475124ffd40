//! The targets, by what they parse.

pub mod documents;
pub mod erofs;
pub mod layers;
pub mod network;
pub mod stored;
pub mod tree;
