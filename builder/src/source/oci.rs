//! Images.
use super::Loaded;
use crate::options::BuildOptions;
use crate::progress::Progress;
use layer::{Error, ErrorKind, Result};
use std::path::Path;

/// A layout.
pub fn load_layout(
    _: &Path,
    _: Option<&str>,
    _: &BuildOptions,
    _: &dyn Progress,
) -> Result<Loaded> {
    Err(Error::new(ErrorKind::Unsupported, "images"))
}
/// A layout.
pub fn load_oci_archive(
    _: &Path,
    _: Option<&str>,
    _: &BuildOptions,
    _: &dyn Progress,
) -> Result<Loaded> {
    Err(Error::new(ErrorKind::Unsupported, "images"))
}
/// A layout.
pub fn load_docker_archive(
    _: &Path,
    _: Option<&str>,
    _: &BuildOptions,
    _: &dyn Progress,
) -> Result<Loaded> {
    Err(Error::new(ErrorKind::Unsupported, "images"))
}
