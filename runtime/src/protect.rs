//! Profiles and protected paths, as requests name them and as records keep them.

use layer::{Error, Result};
use proto::{launch, v1};
use serde::{Deserialize, Serialize};
use std::path::{Component, Path};
use sys::profile::Profile;

/// More mounts than this belong into an image.
const MAX_PATHS: usize = 64;
/// What the kernel takes as one path.
const MAX_PATH_BYTES: usize = 4095;

/// A path that a sandbox cannot change.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProtectedPath {
    /// Absolute, in its shortest form.
    pub path: String,
    /// Whether it cannot be read either.
    pub hidden: bool,
}

impl ProtectedPath {
    /// As the init takes it.
    pub fn wire(&self) -> launch::Protected {
        launch::Protected { path: self.path.clone().into_bytes(), hidden: self.hidden }
    }
}

/// The profile of this name; an empty one is the default.
pub fn profile(name: &str) -> Result<Profile> {
    name.parse().map_err(|error| Error::invalid(format!("profile {name:?}: {error}")))
}

/// Checks paths. Whether they exist is seen when the sandbox is made.
pub fn paths(asked: Vec<v1::ProtectedPath>) -> Result<Vec<ProtectedPath>> {
    if asked.len() > MAX_PATHS {
        return Err(Error::invalid(format!("{MAX_PATHS} paths at most can be protected")));
    }
    let check = |asked: v1::ProtectedPath| {
        let v1::ProtectedPath { path, hidden } = asked;
        let mut components = Path::new(&path).components();
        let is_plain = components.next() == Some(Component::RootDir)
            && components.all(|component| matches!(component, Component::Normal(_)));
        let plain: std::path::PathBuf = Path::new(&path).components().collect();
        let names_something = plain != Path::new("/") && path.len() <= MAX_PATH_BYTES;
        if !is_plain || !names_something || path.contains('\0') {
            let text = "a protected path is absolute, not the root, and without `..`";
            return Err(Error::invalid(format!("{text}: {path:?}")));
        }
        Ok(ProtectedPath { path: plain.to_string_lossy().into_owned(), hidden })
    };
    asked.into_iter().map(check).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_absolute_and_plain() {
        let check = |path: &str| paths(vec![v1::ProtectedPath { path: path.into(), hidden: true }]);
        assert_eq!(check("/opt//grader/./x/").unwrap()[0].path, "/opt/grader/x");
        for bad in ["", "opt", "/", "//", "/./", "/opt/../etc", "/a\0b"] {
            assert!(check(bad).is_err(), "{bad:?}");
        }
        let many = vec![v1::ProtectedPath { path: "/a".into(), hidden: false }; MAX_PATHS + 1];
        assert!(paths(many).is_err());
    }

    #[test]
    fn profiles_have_names() {
        assert_eq!(profile("").unwrap(), Profile::Default);
        assert_eq!(profile("strict").unwrap(), Profile::Strict);
        assert!(profile("loose").is_err());
    }
}
