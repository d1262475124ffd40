//! Limits of single groups that few ask for: weights, processors, bandwidth of a disk. In version 1 the last two
//! have hierarchies of their own, which only the groups with such a limit are made in.

use super::{Group, Hierarchies, Place};
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

/// Bytes a second between a group and a disk; `None` is no bound.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Bandwidth {
    /// From the disk.
    pub read: Option<u64>,
    /// To the disk. In version 1 only what is written past the page cache or synced counts.
    pub write: Option<u64>,
}

impl Hierarchies {
    /// Mount points of the version 1 hierarchies that only some groups are made in: of processors, then of
    /// disks.
    pub fn rare_version_1_roots(&self) -> Vec<&Path> {
        let places = [&self.cpuset, &self.io].into_iter().flatten();
        let mut roots: Vec<&Path> =
            places.filter(|place| !place.unified).map(|place| place.root.as_path()).collect();
        roots.dedup();
        roots
    }

    /// Whether groups can be bound to processors.
    pub fn can_pin(&self) -> bool {
        self.cpuset.is_some()
    }

    /// Whether the bandwidth of disks can be bound.
    pub fn can_throttle(&self) -> bool {
        self.io.is_some()
    }
}

impl Group<'_> {
    /// Makes the group in the hierarchies that only some groups need.
    pub fn create_rare(&self) -> io::Result<()> {
        for root in self.hierarchies.rare_version_1_roots() {
            std::fs::create_dir_all(root.join(&self.name))?;
        }
        match &self.hierarchies.cpuset {
            Some(Place { root, unified: false }) => inherit_processors(root, &self.name),
            _ => Ok(()),
        }
    }

    /// Whether the group is bound to processors or in its bandwidth, or was once.
    pub fn is_rare(&self) -> bool {
        let hierarchies = self.hierarchies;
        let places = [(&hierarchies.cpuset, "cpuset.cpus"), (&hierarchies.io, "io.max")];
        let is_set = |(place, name): (&Option<Place>, &str)| match place {
            Some(place) if place.unified => {
                let text = std::fs::read_to_string(place.root.join(&self.name).join(name));
                text.is_ok_and(|text| !text.trim().is_empty())
            }
            _ => false,
        };
        !self.rare_directories().is_empty() || places.into_iter().any(is_set)
    }

    /// Descriptors of the version 1 groups of this name that only some have, for [`super::join_version_1`].
    pub fn open_rare(&self) -> io::Result<Vec<OwnedFd>> {
        self.rare_directories().iter().map(|group| super::open_directory(group)).collect()
    }

    pub(super) fn rare_directories(&self) -> Vec<PathBuf> {
        let roots = self.hierarchies.rare_version_1_roots().into_iter();
        roots.map(|root| root.join(&self.name)).filter(|group| group.exists()).collect()
    }

    /// The share of processors against other groups when all want them: 1 to 10000, `None` is 100.
    pub fn set_cpu_weight(&self, weight: Option<u32>) -> io::Result<()> {
        let place = &self.hierarchies.cpu;
        let weight = u64::from(weight.unwrap_or(100).clamp(1, 10_000));
        let is_unified = place.as_ref().is_some_and(|place| place.unified);
        let value = if is_unified { weight } else { (weight * 1024 / 100).max(2) };
        std::fs::write(self.file(place, "cpu.shares", "cpu.weight")?, value.to_string())
    }

    /// The only processors that it runs on, as in `0-3,6`; `None` is all of its parent. Needs
    /// [`Group::create_rare`].
    pub fn set_processors(&self, list: Option<&str>) -> io::Result<()> {
        let file = self.file(&self.hierarchies.cpuset, "cpuset.cpus", "cpuset.cpus")?;
        match (list, &self.hierarchies.cpuset) {
            (Some(list), _) => std::fs::write(file, list),
            (None, Some(place)) if !place.unified => {
                let above = file.parent().and_then(Path::parent).unwrap_or(Path::new("/"));
                std::fs::copy(above.join("cpuset.cpus"), file).map(drop)
            }
            (None, _) => std::fs::write(file, "\n"),
        }
    }

    /// Bounds the bandwidth between the group and one whole disk. Needs [`Group::create_rare`].
    pub fn set_bandwidth(&self, disk: (u32, u32), bandwidth: Bandwidth) -> io::Result<()> {
        let place = &self.hierarchies.io;
        let device = format!("{}:{}", disk.0, disk.1);
        if place.as_ref().is_some_and(|place| place.unified) {
            let text = |bytes: Option<u64>| bytes.map_or("max".to_owned(), |b| b.to_string());
            let (read, write) = (text(bandwidth.read), text(bandwidth.write));
            let file = self.file(place, "", "io.max")?;
            return std::fs::write(file, format!("{device} rbps={read} wbps={write}"));
        }
        for (name, bytes) in [
            ("blkio.throttle.read_bps_device", bandwidth.read),
            ("blkio.throttle.write_bps_device", bandwidth.write),
        ] {
            // Zero takes a bound away.
            let text = format!("{device} {}", bytes.unwrap_or(0));
            std::fs::write(self.file(place, name, "")?, text)?;
        }
        Ok(())
    }
}

/// A version 1 group of processors begins with none, and with no memory.
fn inherit_processors(root: &Path, name: &Path) -> io::Result<()> {
    let mut above = root.to_owned();
    for part in name {
        let group = above.join(part);
        for file in ["cpuset.cpus", "cpuset.mems"] {
            if std::fs::read_to_string(group.join(file))?.trim().is_empty() {
                std::fs::write(group.join(file), std::fs::read(above.join(file))?)?;
            }
        }
        above = group;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Removed<'a>(Group<'a>);
    impl Drop for Removed<'_> {
        fn drop(&mut self) {
            let _gone = self.0.remove();
            for above in self.0.rare_directories() {
                drop(std::fs::remove_dir(above));
            }
        }
    }

    #[test]
    fn rare_limits_are_set_and_taken_back() {
        let hierarchies = Hierarchies::detect().unwrap();
        if !hierarchies.can_pin() || !hierarchies.can_throttle() {
            return;
        }
        let name = format!("lamella-sys-rare-{}", std::process::id());
        let outer = Removed(hierarchies.group(&name));
        let group = Removed(hierarchies.group(Path::new(&name).join("inner")));
        group.0.create().unwrap();
        group.0.create_rare().unwrap();
        group.0.set_cpu_weight(Some(50)).unwrap();
        group.0.set_cpu_weight(None).unwrap();
        group.0.set_processors(Some("0")).unwrap();
        let place = hierarchies.cpuset.as_ref().unwrap();
        let processors = place.root.join(group.0.name()).join("cpuset.cpus");
        assert_eq!(std::fs::read_to_string(&processors).unwrap().trim(), "0");
        group.0.set_processors(None).unwrap();
        let scratch = std::fs::File::open("/var/tmp").unwrap();
        let disk = crate::loop_device::disk_of(std::os::fd::AsFd::as_fd(&scratch)).unwrap();
        let slow = Bandwidth { read: Some(1 << 20), write: Some(2 << 20) };
        group.0.set_bandwidth(disk, slow).unwrap();
        group.0.set_bandwidth(disk, Bandwidth::default()).unwrap();
        group.0.remove().unwrap();
        assert!(group.0.rare_directories().is_empty());
        drop((group, outer));
        assert!(!hierarchies.group(&name).exists());
    }
}
