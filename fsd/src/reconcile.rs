//! At start: what a former fsd left is compared with what exists, taken over where it can be served,
//! and cleaned up where it cannot.
//!
//! | mount | file from a keeper | durable bits | then |
//! |---|---|---|---|
//! | yes | yes | any | served on: the mark is still set |
//! | yes | no | complete | served on: no mark is needed |
//! | yes, alone | no | any | served on by the plane that needs nobody |
//! | yes | no | partial | readers may have seen zeros: unmounted lazily, loudly |
//! | no | yes | any | served until its superblock is gone |
//! | no | no | any | its holder files are removed |
//!
//! A mount that nobody holds is unmounted.

use crate::attach::{Attachments, Live};
use crate::config::Paths;
use crate::planes::Plane;
use crate::served::{Registry, ServedLayer};
use layer::{Context, Error, ErrorKind, LayerId, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// Takes over and cleans up. `files` are the quiet descriptors that keepers held; layers that are
/// served on are in `registry` afterwards.
pub fn reconcile(
    attachments: &Attachments,
    registry: &Registry,
    mut files: BTreeMap<LayerId, OwnedFd>,
) -> Result<()> {
    let paths = &attachments.parts().paths;
    // What can be served on came from the best plane, or needs none.
    let planes = &attachments.parts().planes;
    let Some(plane) = planes.first() else { return Ok(()) };
    let alone = planes.iter().find(|plane| plane.stands_alone()).unwrap_or(plane);
    let mounted = mounted_layers(paths)?;
    for id in &mounted {
        let quiet = files.remove(id);
        let marked = quiet.is_some();
        match readopt(attachments, id, quiet, registry) {
            Ok(served) => {
                let by = if attachments.holders().is_alone(id) { alone } else { plane };
                take_in(attachments, by, served, true, marked);
            }
            Err(error) => abandon(attachments, id, &error)?,
        }
    }
    for (id, quiet) in files {
        match readopt(attachments, &id, Some(quiet), registry) {
            Ok(served) => take_in(attachments, plane, served, false, true),
            Err(error) => abandon(attachments, &id, &error)?,
        }
    }
    let mut served = BTreeSet::new();
    attachments.each(|live| {
        served.insert(live.served.id());
    });
    for id in attachments.holders().layers()? {
        if !served.contains(&id) {
            attachments.holders().clear(&id)?;
        }
    }
    remove_empty_mount_points(paths, &mounted)?;
    unmount_unheld(attachments)
}

/// The layers that are mounted below `run/layers`.
fn mounted_layers(paths: &Paths) -> Result<BTreeSet<LayerId>> {
    let folder = paths.mounts();
    let mounts = sys::mount::read_mounts().context(|| "read the mount table".to_owned())?;
    let mut layers = BTreeSet::new();
    for mount in mounts {
        if mount.mount_point.parent() == Some(&folder)
            && let Some(name) = mount.mount_point.file_name().and_then(|name| name.to_str())
            && let Ok(id) = name.parse()
        {
            layers.insert(id);
        }
    }
    Ok(layers)
}

fn readopt(
    attachments: &Attachments,
    id: &LayerId,
    quiet: Option<OwnedFd>,
    registry: &Registry,
) -> Result<Arc<ServedLayer>> {
    let marked = quiet.is_some();
    if attachments.holders().is_mortal(id) {
        return Err(Error::new(
            ErrorKind::Unavailable,
            "it was served by a process that has ended",
        ));
    }
    let served = attachments.open(id, quiet)?;
    if marked {
        served.set_marked(true);
        registry.insert(&served);
    } else if !attachments.holders().is_alone(id) && !served.fetch().cached().is_durably_complete()
    {
        return Err(Error::corrupt("no keeper held its group: readers may have seen zeros"));
    }
    Ok(served)
}

fn take_in(
    attachments: &Attachments,
    plane: &Arc<dyn Plane>,
    served: Arc<ServedLayer>,
    mounted: bool,
    marked: bool,
) {
    let id = served.id();
    let holders = attachments.holders().list(&id).unwrap_or_default();
    tracing::info!(layer = %id, mounted, marked, holders = holders.len(), "served on");
    attachments.adopt(Live { served, plane: Some(Arc::clone(plane)), mounted, holders, pins: 0 });
}

/// A layer that cannot be served on: nobody new may read from it.
fn abandon(attachments: &Attachments, id: &LayerId, error: &Error) -> Result<()> {
    tracing::error!(layer = %id, error = %error.chain(), "a mount is lost");
    let at = attachments.parts().paths.mount(id);
    match sys::mount::unmount(&at, sys::mount::Unmount::Lazy) {
        Ok(()) => {}
        Err(error) => tracing::debug!(%error, "nothing to unmount"),
    }
    attachments.holders().clear(id)
}

fn remove_empty_mount_points(paths: &Paths, mounted: &BTreeSet<LayerId>) -> Result<()> {
    let folder = paths.mounts();
    let name = || format!("list {}", folder.display());
    for entry in std::fs::read_dir(&folder).context(name)? {
        let entry = entry.context(name)?;
        let id = entry.file_name().to_str().and_then(|name| name.parse::<LayerId>().ok());
        if id.is_some_and(|id| !mounted.contains(&id))
            && let Err(error) = std::fs::remove_dir(entry.path())
        {
            tracing::warn!(%error, path = %entry.path().display(), "remove a mount point");
        }
    }
    Ok(())
}

fn unmount_unheld(attachments: &Attachments) -> Result<()> {
    let mut unheld = Vec::new();
    attachments.each(|live| {
        if live.mounted && live.holders.is_empty() {
            unheld.push(live.served.id());
        }
    });
    for id in unheld {
        tracing::info!(layer = %id, "nobody holds it");
        attachments.unmount_unheld(&id)?;
    }
    Ok(())
}
