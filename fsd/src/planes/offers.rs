//! Which planes this host has, found out by trying what they need on scratch objects.

use super::PlaneKind;
use layer::{Error, ErrorKind, Result};
use std::collections::BTreeSet;
use std::path::Path;
use sys::probe::{Capabilities, Capability};

/// Tries what the planes need, below an existing folder of the node cache. `inherited` says that the
/// keepers of a former fsd have a group of pre-content events, which is proof enough.
pub fn probe(scratch: &Path, inherited: bool) -> BTreeSet<PlaneKind> {
    let mut needs: BTreeSet<Capability> =
        PlaneKind::ALL.iter().flat_map(|kind| kind.needs()).copied().collect();
    if inherited {
        PlaneKind::ErofsFanotify.needs().iter().for_each(|proven| {
            needs.remove(proven);
        });
    }
    let wanted: Vec<Capability> = needs.iter().copied().collect();
    let found = Capabilities::probe_only(scratch, &wanted);
    let mut offered = BTreeSet::new();
    for kind in PlaneKind::ALL {
        let missing = kind.needs().iter().find(|need| needs.contains(need) && !found.has(**need));
        match missing {
            None => {
                offered.insert(kind);
            }
            Some(missing) => {
                tracing::info!(plane = %kind, %missing, finding = ?found.finding(*missing), "no plane");
            }
        }
    }
    offered
}

/// `Unsupported` when the forced plane is none of these.
pub fn check(offered: &BTreeSet<PlaneKind>, forced: Option<PlaneKind>) -> Result<()> {
    match forced.filter(|kind| !offered.contains(kind)) {
        None => Ok(()),
        Some(kind) => Err(Error::new(
            ErrorKind::Unsupported,
            format!("this host has no plane {kind}; `lamella doctor` says why"),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_forced_plane_that_is_missing_is_an_error() {
        let offered = BTreeSet::from([PlaneKind::Fuse]);
        assert!(check(&offered, None).is_ok() && check(&offered, Some(PlaneKind::Fuse)).is_ok());
        let error = check(&offered, Some(PlaneKind::ErofsFanotify)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.chain().contains("erofs-fanotify"));
    }
}
