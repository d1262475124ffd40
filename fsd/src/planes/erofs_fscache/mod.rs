//! `erofs-fscache`: the kernel keeps EROFS data in cache files of its own (cachefiles) and asks us to
//! fill what is missing. Linux 5.19 to 7.1 with `EROFS_FS_ONDEMAND`; for hosts without file-backed EROFS.
//!
//! Metadata and data are two cookies of one domain. The node cache is filled first and stays the place
//! where bytes are verified, so data is on the disk twice until the kernel's cache is culled.
//!
//! Locking: one mutex around the device, which is opened at the first mount.
//! What survives a crash: cache files, not their service. Readers get EIO (closed, never zeros), and the
//! next start unmounts what is left.

mod control;
mod culling;
mod events;
mod message;
mod objects;

#[cfg(test)]
mod tests;

use super::erofs_fanotify::events::EventCounters;
use super::{Plane, PlaneKind};
use crate::fetch::{Engine, spawn};
use crate::served::ServedLayer;
use control::Control;
use events::Events;
use layer::{Context, Error, ErrorKind, Result};
use objects::{Name, Part};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use sys::cachefiles::{DEVICE, Device};
use sys::mount::{Attributes, ErofsOnDemand};

/// Threads that take messages; a miss does not occupy one while it is fetched.
const THREADS: usize = 2;
/// How often the kernel is asked whether it is short of room.
const CULL_INTERVAL: Duration = Duration::from_secs(1);

/// The plane.
pub struct ErofsFscache {
    folder: PathBuf,
    domain: String,
    engine: Engine,
    counters: Arc<EventCounters>,
    events: Mutex<Option<Arc<Events>>>,
}

impl ErofsFscache {
    /// Lets the kernel keep its cache files in `folder` once the plane is needed.
    pub fn new(folder: &Path, engine: Engine, counters: Arc<EventCounters>) -> Self {
        // Cache files of two nodes on one host are apart.
        let digest = layer::Digest::of(folder.as_os_str().as_encoded_bytes());
        let domain = format!("lamella-{}", digest.short());
        Self { folder: folder.to_owned(), domain, engine, counters, events: Mutex::new(None) }
    }

    fn started(&self) -> Option<Arc<Events>> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn start(&self) -> Result<Arc<Events>> {
        let mut events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(running) = &*events {
            return Ok(Arc::clone(running));
        }
        let device = Device::open().map_err(|error| {
            let text = format!(
                "{DEVICE} is missing or taken: this plane needs Linux 5.19 to 7.1 with EROFS_FS_ONDEMAND"
            );
            Error::new(ErrorKind::Unsupported, text).with_source(error)
        })?;
        crate::cache::create_folder(&self.folder)?;
        bind(&device, &self.folder)?;
        let control: Arc<dyn Control> = Arc::new(device);
        let counters = Arc::clone(&self.counters);
        let running = Events::new(control, &self.domain, self.engine.clone(), counters);
        for index in 0..THREADS {
            let answering = Arc::clone(&running);
            spawn(&format!("fscache-{index}"), move || answering.run())?;
        }
        let (culling, folder) = (Arc::clone(&running), self.folder.clone());
        spawn("fscache-cull", move || keep_room(&culling, &folder))?;
        *events = Some(Arc::clone(&running));
        Ok(running)
    }
}

/// Makes a cache of the device.
fn bind(control: &dyn Control, folder: &Path) -> Result<()> {
    let place = folder.to_str().filter(|text| !text.contains(char::is_whitespace));
    let Some(place) = place else {
        let text = format!("cachefiles takes no folder like {}", folder.display());
        return Err(Error::new(ErrorKind::Unsupported, text));
    };
    for command in [&format!("dir {place}"), "tag lamella", "bind ondemand"] {
        control.command(command).context(|| format!("cachefiles: {command}"))?;
    }
    Ok(())
}

fn keep_room(events: &Events, folder: &Path) {
    loop {
        std::thread::sleep(CULL_INTERVAL);
        match culling::cull(&**events.control(), folder) {
            Ok(0) => {}
            Ok(files) => tracing::info!(files, "cache files are culled"),
            Err(error) => tracing::error!(%error, "culling"),
        }
    }
}

impl Plane for ErofsFscache {
    fn kind(&self) -> PlaneKind {
        PlaneKind::ErofsFscache
    }

    fn mount(&self, layer: &Arc<ServedLayer>, at: &Path) -> Result<()> {
        let events = self.start()?;
        let id = layer.id();
        let open = events.objects().parts(&id);
        let free = (0..).find(|mount| !open.contains(&Part::Metadata(*mount))).unwrap_or(0);
        let image = Name { layer: id, part: Part::Metadata(free) }.to_string();
        let data = Name { layer: id, part: Part::Data }.to_string();
        let fresh = events.layers().insert(layer);
        let on_demand = ErofsOnDemand { name: &image, domain: &self.domain, device: &data };
        let mounted = on_demand
            .mount_detached(Attributes::LAYER)
            .and_then(|mount| mount.attach(at))
            .context(|| format!("mount {image} at {}", at.display()));
        if mounted.is_err() && fresh {
            events.layers().remove(&id);
        }
        mounted
    }

    fn survives(&self, _layer: &Arc<ServedLayer>) -> bool {
        false
    }

    fn answers_reads(&self, _layer: &Arc<ServedLayer>) -> bool {
        true
    }

    fn lingers(&self, layer: &Arc<ServedLayer>) -> Result<bool> {
        // The kernel has no file of the node cache open; what it has are cache files.
        let events = self.started();
        Ok(events.is_some_and(|events| !events.objects().parts(&layer.id()).is_empty()))
    }

    fn release(&self, layer: &Arc<ServedLayer>) -> Result<()> {
        if let Some(events) = self.started() {
            events.layers().remove(&layer.id());
        }
        Ok(())
    }

    fn completed(&self, _layer: &Arc<ServedLayer>) -> Result<()> {
        Ok(())
    }

    fn close(&self) -> Result<()> {
        Ok(())
    }
}
