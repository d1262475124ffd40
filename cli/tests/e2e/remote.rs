//! A node whose store is a bucket of an S3 server, or lies on 3FS: publish, mount lazily, read, run. `doctor` gives
//! notice when a store on 3FS is read through its mount.

use crate::double::Folder;
use crate::s3::Server;
use crate::sandboxes::root;
use crate::world::World;
use std::ffi::OsString;
use std::fs;

/// The line with the store before it.
fn at(store: &str, line: &str) -> Vec<OsString> {
    ["--store", store].into_iter().chain(line.split(' ')).map(OsString::from).collect()
}

/// Builds, forgets all that the node knows, mounts, reads, runs.
fn serves_builds_lazy_mounts_and_runs(url: &str) {
    let world = World::new();
    let line = |line: String| world.run(&at(url, &line));
    let tree = world.tree("tree");
    line(format!("build {} -t base/tree:1", tree.display())).ok();
    line(format!("build {} -t base/box:1", root(&world).display())).ok();
    line("down".to_owned());
    // Nothing of the node that built is left: this one has only the bucket.
    fs::remove_dir_all(world.data()).unwrap();
    let mnt = world.mount_point();
    line(format!("mount base/tree:1 {}", mnt.display())).ok();
    assert_eq!(fs::read(mnt.join("sub/big")).unwrap(), fs::read(tree.join("sub/big")).unwrap());
    assert_eq!(fs::read_to_string(mnt.join("link")).unwrap(), "hello\n");
    line(format!("umount {}", mnt.display())).ok();
    let done = line("run --rm base/box:1 -- cat /data/sub/deep".to_owned()).ok();
    assert_eq!(done.out, "deep\n");
    let done = line("ls base --json".to_owned()).ok();
    assert!(done.out.contains("base/box:1"), "{}", done.out);
    line("down".to_owned());
    world.nothing_is_left();
}

#[test]
fn a_store_on_s3_serves_builds_lazy_mounts_and_runs() {
    serves_builds_lazy_mounts_and_runs(&Server::shared().url());
}

#[test]
fn a_store_on_3fs_serves_builds_lazy_mounts_and_runs() {
    let folder = Folder::new();
    serves_builds_lazy_mounts_and_runs(&folder.url());
    let (rings, answers) = folder.counts();
    assert!(rings > 0 && answers > 0, "{rings} rings, {answers} answers");
}

#[test]
fn doctor_says_when_a_store_on_3fs_is_read_through_its_mount() {
    let world = World::new();
    let folder = world.path("shared");
    fs::create_dir(&folder).unwrap();
    let store = format!("3fs://{}", folder.display());
    let done = world.run(&at(&store, "doctor")).ok();
    assert!(
        done.out.contains("usrbio") && done.out.contains("through the 3FS mount"),
        "{}",
        done.out
    );
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 0);
}
