//! A node whose data disk filled up while it was stopped.

use crate::world::World;
use serde_json::Value;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A small ext4 in a file; goes with the value, before the world's directory does.
struct Disk(PathBuf);

impl Disk {
    fn mount(at: &Path, image: &Path) -> Self {
        std::fs::create_dir_all(at).unwrap();
        std::fs::File::create(image).unwrap().set_len(140 << 20).unwrap();
        let run = |words: &[&str], last: &[&Path]| {
            let status = Command::new(words[0]).args(&words[1..]).args(last).status().unwrap();
            assert!(status.success(), "{words:?}");
        };
        run(&["mkfs.ext4", "-q", "-F", "-m", "0"], &[image]);
        run(&["mount", "-o", "loop"], &[image, at]);
        Self(at.to_owned())
    }

    /// Leaves no byte free.
    fn fill(&self, name: &str) {
        let mut file = std::fs::File::create(self.0.join(name)).unwrap();
        for bytes in [1 << 20, 1 << 12, 1] {
            while file.write_all(&vec![7; bytes]).is_ok() {}
        }
        // What the page cache took may not fit either.
        let _ = file.sync_all();
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = sys::mount::unmount(&self.0, sys::mount::Unmount::Lazy);
    }
}

#[test]
fn a_node_starts_on_a_disk_that_filled_up_meanwhile_or_says_in_one_line_why_not() {
    let world = World::new();
    let disk = Disk::mount(&world.data(), &world.path("image"));
    let store = world.path("store").display().to_string();
    let line = |line: &str| {
        let mut words = vec!["--store", &store];
        words.extend(line.split(' '));
        world.run(&words)
    };
    let tree = world.tree("tree");
    line(&format!("build {} -t base/x:1", tree.display())).ok();
    line("pin base/x:1").ok();
    assert!(world.data().join("reserve").exists(), "a running node keeps a reserve");
    line("down").ok();
    disk.fill("ballast");
    // The reserve is given back, and the disk is full for fsd all the same.
    let told = line("stats").code;
    assert_eq!(told, 1, "no node runs");
    line("pin base/x:1").ok();
    let stats: Value = line("stats --json").ok().json();
    assert!(stats["disk_free_bytes"].as_u64() < stats["disk_reserve_bytes"].as_u64(), "{stats}");
    line("down").ok();
    let _ = std::fs::remove_file(world.data().join("reserve"));
    disk.fill("more");
    line("pin base/x:1").fails(1, "a node needs 12.0 MiB to start");
    std::fs::remove_file(world.data().join("ballast")).unwrap();
    line("pin base/x:1").ok();
    line("down").ok();
    drop(disk);
    world.nothing_is_left();
}
