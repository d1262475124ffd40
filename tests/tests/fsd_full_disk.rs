//! A full cache disk, on a small ext4 of its own: visible, never wrong, over once there is room.
#![allow(clippy::unwrap_used)]

mod fsd_world;

use fsd_world::{LayerShape, World};
use proto::v1::Plane;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// A small ext4 in a file, mounted; unmounted when dropped.
struct SmallDisk {
    at: PathBuf,
}

impl SmallDisk {
    fn mount(at: &Path, image: &Path, mebibytes: u64) -> Self {
        std::fs::create_dir_all(at).unwrap();
        std::fs::File::create(image).unwrap().set_len(mebibytes << 20).unwrap();
        let run = |program: &str, arguments: &[&str], last: &[&Path]| {
            let status = Command::new(program).args(arguments).args(last).status().unwrap();
            assert!(status.success(), "{program}");
        };
        run("mkfs.ext4", &["-q", "-F", "-m", "0", "-O", "^has_journal"], &[image]);
        run("mount", &["-o", "loop"], &[image, at]);
        Self { at: at.to_owned() }
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        for _ in 0..100 {
            match sys::mount::unmount(&self.at, sys::mount::Unmount::Now) {
                Ok(()) => return,
                Err(_) => std::thread::sleep(Duration::from_millis(50)),
            }
        }
        let _ = sys::mount::unmount(&self.at, sys::mount::Unmount::Lazy);
    }
}

/// A world whose data directory lies on a disk with less room than the layer needs.
fn cramped() -> (World, SmallDisk) {
    let shape = LayerShape { files: 60, max_file_bytes: 900 << 10, ..LayerShape::default() };
    let mut world = World::new(&shape).unwrap();
    assert!(world.layer.data_bytes > 16 << 20);
    let disk = SmallDisk::mount(&world.data, &world.folder.path().join("disk"), 16);
    world.options = ["--deadline-ms", "500", "--reserve", "2097152"].map(str::to_owned).to_vec();
    (world, disk)
}

#[test]
fn a_full_cache_disk_denies_with_enospc_and_recovers() {
    let (mut world, disk) = cramped();
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
    assert!(world.stats().unwrap().errors_answered > 0);
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
    world.end();
    drop(disk);
}

#[test]
fn a_full_cache_disk_does_not_stop_planes_that_answer_themselves() {
    for plane in [Plane::ErofsFuse, Plane::Fuse] {
        let (mut world, disk) = cramped();
        world.start().unwrap();
        let at = world.attach_as("test", plane).unwrap().mount_path;
        world.compare(Path::new(&at)).unwrap();
        let stats = world.stats().unwrap();
        assert!(stats.layers[0].present_bytes < stats.layers[0].data_bytes, "{plane:?}");
        world.end();
        drop(disk);
    }
}
