//! The names of the planes, in the order of preference, and what each asks of a host.

use layer::{Error, Result};
use proto::v1;
use std::fmt;
use std::str::FromStr;
use sys::probe::Capability;

/// Which plane.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PlaneKind {
    /// EROFS on a sparse file that is filled on pre-content events.
    ErofsFanotify,
    /// EROFS on a FUSE file that fsd answers.
    ErofsFuse,
    /// EROFS on demand through the kernel's cachefiles.
    ErofsFscache,
    /// The tree itself, answered over FUSE.
    Fuse,
    /// EROFS on the plain data space that lies on a mounted store.
    Direct,
}

impl PlaneKind {
    /// All of them, the best first.
    pub const ALL: [Self; 5] =
        [Self::ErofsFanotify, Self::ErofsFuse, Self::ErofsFscache, Self::Fuse, Self::Direct];

    /// The name that people use.
    pub fn name(self) -> &'static str {
        match self {
            Self::ErofsFanotify => "erofs-fanotify",
            Self::ErofsFuse => "erofs-fuse",
            Self::ErofsFscache => "erofs-fscache",
            Self::Fuse => "fuse",
            Self::Direct => "direct",
        }
    }

    /// Whether it serves layers as they come; `direct` serves those that were laid out for it.
    pub fn serves_every_layer(self) -> bool {
        self != Self::Direct
    }

    /// What a host must be able to do.
    pub fn needs(self) -> &'static [Capability] {
        match self {
            Self::ErofsFanotify => &[Capability::ErofsFileBacked, Capability::FanotifyPreContent],
            Self::ErofsFuse => &[Capability::ErofsFileBacked, Capability::Fuse],
            Self::ErofsFscache => &[Capability::ErofsFscache],
            Self::Fuse => &[Capability::Fuse],
            Self::Direct => &[Capability::ErofsFileBacked],
        }
    }

    /// The wire's name of it.
    pub fn to_proto(self) -> v1::Plane {
        match self {
            Self::ErofsFanotify => v1::Plane::ErofsFanotify,
            Self::ErofsFuse => v1::Plane::ErofsFuse,
            Self::ErofsFscache => v1::Plane::ErofsFscache,
            Self::Fuse => v1::Plane::Fuse,
            Self::Direct => v1::Plane::Direct,
        }
    }

    /// The plane that the wire names; none for the one that leaves it open.
    pub fn from_proto(plane: v1::Plane) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.to_proto() == plane)
    }
}

impl fmt::Display for PlaneKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for PlaneKind {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let found = Self::ALL.into_iter().find(|kind| kind.name() == text);
        found.ok_or_else(|| Error::invalid(format!("no plane is called {text:?}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_plane_is_found_by_both_of_its_names() {
        for kind in PlaneKind::ALL {
            assert_eq!(kind.name().parse::<PlaneKind>().unwrap(), kind);
            assert_eq!(PlaneKind::from_proto(kind.to_proto()), Some(kind));
        }
        assert!("auto".parse::<PlaneKind>().is_err());
        assert_eq!(PlaneKind::from_proto(v1::Plane::Auto), None);
    }
}
