//! Whole-system suites live in `tests/`; this library is empty on purpose, so that the package can
//! hold the daemon processes that the suites kill (`src/bin`).
#![forbid(unsafe_code)]
