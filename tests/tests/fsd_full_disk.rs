//! A full cache disk, on a small ext4 of its own: visible, never wrong, over once there is room.
#![allow(clippy::unwrap_used)]

mod fsd_disk;
mod fsd_world;

use fsd_disk::{Disk, DiskKind};
use fsd_world::{LayerShape, World};
use proto::v1::Plane;
use std::path::Path;
use std::time::{Duration, Instant};

/// A world whose data directory lies on a disk with less room than the layer needs.
fn cramped() -> World {
    let shape = LayerShape { files: 60, max_file_bytes: 900 << 10, ..LayerShape::default() };
    let mut world = World::new(&shape).unwrap();
    assert!(world.layer.data_bytes > 16 << 20);
    let image = world.folder.path().join("disk");
    world.disk = Some(Box::new(Disk::mount(DiskKind::Ext4, &world.data, &image, 16)));
    world.options = ["--full-ms", "300", "--reserve", "2097152"].map(str::to_owned).to_vec();
    world
}

#[test]
fn a_full_cache_disk_denies_with_enospc_and_recovers() {
    let mut world = cramped();
    let ballast = world.data.join("ballast");
    std::fs::write(&ballast, vec![1; 6 << 20]).unwrap();
    world.start().unwrap();
    let at = world.attach("test").unwrap();
    let (mut full, mut right) = (0, 0);
    for (name, expected) in &world.layer.files {
        match std::fs::read(at.join(name)) {
            Ok(got) => {
                assert!(got == *expected, "{name}");
                right += 1;
            }
            Err(error) => {
                // The first failed page of a readahead shows as EIO or as the errno of the denial.
                assert!(matches!(error.raw_os_error(), Some(28 | 5)), "{name}: {error}");
                full += 1;
            }
        }
        if full > 3 {
            break;
        }
    }
    assert!(full > 3 && right > 0, "{full} full, {right} right");
    assert!(world.log().contains("reserve"), "the reason is in the log");
    let stats = world.stats().unwrap();
    assert!(stats.errors_answered > 0 && stats.denied_full > 0 && stats.disk_full);
    assert_eq!(stats.full_disk_deadline_ms, 300);
    assert!(stats.layers[0].denials > 0);
    let told = |kind: &str| stats.incidents.iter().any(|incident| incident.kind == kind);
    assert!(told("disk-full") && told("refused"), "{:?}", stats.incidents);
    std::fs::remove_file(&ballast).unwrap();
    let deadline = Instant::now() + Duration::from_secs(20);
    let (name, expected) = world.layer.files.iter().nth(right).unwrap();
    loop {
        match std::fs::read(at.join(name)) {
            Ok(got) => {
                assert!(got == *expected);
                break;
            }
            Err(error) => assert!(Instant::now() < deadline, "room again, but {error}"),
        }
    }
    let stats = world.stats().unwrap();
    assert!(!stats.disk_full);
    assert!(stats.incidents.iter().any(|incident| incident.kind == "room"));
    world.end();
}

#[test]
fn a_full_cache_disk_does_not_stop_planes_that_answer_themselves() {
    for plane in [Plane::ErofsFuse, Plane::Fuse] {
        let mut world = cramped();
        world.start().unwrap();
        let at = world.attach_as("test", plane).unwrap().mount_path;
        world.compare(Path::new(&at)).unwrap();
        let stats = world.stats().unwrap();
        assert!(stats.layers[0].present_bytes < stats.layers[0].data_bytes, "{plane:?}");
        world.end();
    }
}
