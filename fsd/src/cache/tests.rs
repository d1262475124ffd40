//! The cache without an engine: evictions broken off at every step.
