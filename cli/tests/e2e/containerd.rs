//! Debian's containerd on layers of ours: images that load lazily, containers that write, and what stays when one
//! of the processes dies.

mod daemon;

use crate::registry::run;
use crate::world::{World, alive, eventually, kill, noise};
use daemon::{Containerd, Snapshotter};
use serde_json::Value;
use snapshotter::api::snapshots::v1 as wire;
use std::fs;
use std::path::PathBuf;
use tonic::Code;
use wire::snapshots_client::SnapshotsClient;

/// A layout of three layers, made by umoci: busybox beside something large that nobody reads; a file more
/// and one less; a directory in the place of another.
fn image(world: &World) -> PathBuf {
    let layout = world.path("umoci");
    let image = format!("{}:v1", layout.display());
    let bundle = world.path("bundle");
    let bundle_text = bundle.to_str().unwrap();
    run("umoci", &["init", "--layout", layout.to_str().unwrap()]);
    run("umoci", &["new", "--image", &image]);
    run("umoci", &["unpack", "--image", &image, bundle_text]);
    let root = bundle.join("rootfs");
    for name in ["bin", "proc", "dev", "sys", "tmp", "etc", "old"] {
        fs::create_dir_all(root.join(name)).unwrap();
    }
    fs::copy("/bin/busybox", root.join("bin/busybox")).unwrap();
    std::os::unix::fs::symlink("busybox", root.join("bin/sh")).unwrap();
    fs::write(root.join("large"), noise(24 << 20, 7)).unwrap();
    fs::write(root.join("etc/gone"), "").unwrap();
    fs::write(root.join("old/hidden"), "").unwrap();
    let repack = || run("umoci", &["repack", "--refresh-bundle", "--image", &image, bundle_text]);
    repack();
    fs::remove_file(root.join("etc/gone")).unwrap();
    fs::write(root.join("etc/app"), "hello from the middle\n").unwrap();
    repack();
    fs::remove_dir_all(root.join("old")).unwrap();
    fs::create_dir(root.join("old")).unwrap();
    fs::write(root.join("old/new"), "").unwrap();
    fs::write(root.join("late"), noise(4 << 20, 9)).unwrap();
    repack();
    run("umoci", &["config", "--image", &image, "--config.env", "GREETING=hello"]);
    layout
}

fn digest(layout: &std::path::Path) -> String {
    let index = fs::read(layout.join("index.json")).unwrap();
    let index: Value = serde_json::from_slice(&index).unwrap();
    index["manifests"][0]["digest"].as_str().unwrap().to_owned()
}

/// The layers that somebody holds.
fn held(world: &World) -> Vec<Value> {
    let stats = world.line("stats --json").ok().json();
    let layers = stats["layers"].as_array().unwrap().iter();
    layers
        .filter(|layer| layer["holders"].as_array().is_some_and(|it| !it.is_empty()))
        .cloned()
        .collect()
}

fn present(layers: &[Value]) -> u64 {
    layers.iter().map(|layer| layer["present_bytes"].as_u64().unwrap()).sum()
}

#[test]
fn containerd_runs_an_image_that_loads_lazily() {
    let world = World::new();
    let layout = image(&world);
    world.line(&format!("pull oci:{}:v1 -t team/app:v1", layout.display())).ok();
    let mut snapshotter = Snapshotter::start(&world);
    // Another one takes neither its socket nor a file.
    let other = format!("snapshotter --root {}", world.path("other").display());
    world.line(&other).fails(1, "another process listens on");
    let file = layout.join("index.json");
    world.line(&format!("{other} --socket {}", file.display())).fails(1, "no socket; name another");
    assert!(file.is_file());
    let containerd = Containerd::start(&world);
    let name = "registry.test/team/app:v1";
    let added = world.run(&containerd.add("team/app:v1", name)).ok().json();
    assert_eq!(added["digest"], digest(&layout).as_str());
    // Documents, no layer; and nothing of a layer's data on the node.
    let blobs = containerd.ctr(&["content", "ls", "-q"]).ok().out;
    assert_eq!(blobs.lines().count(), 2, "{blobs}");
    assert_eq!((held(&world).len(), present(&held(&world))), (3, 0));

    let script = "cat /etc/app; echo $GREETING; test ! -e /etc/gone; ls /old";
    let ran = containerd.run(name, "first", script).ok();
    assert_eq!(ran.out, "hello from the middle\nhello\nnew\n");
    let loaded = present(&held(&world));
    assert!(loaded > 0 && loaded < 12 << 20, "{loaded} of 28 MiB");

    // What a container writes lies in the snapshotter's directory.
    let detached = ["run", "-d", "--snapshotter", "lamella", name, "long", "/bin/sh", "-c"];
    containerd.ctr(&[&detached[..], &["echo written > /tmp/file; sleep 1000"]].concat()).ok();
    containerd.shows("long", "cat /tmp/file", "written\n");
    let uppers = fs::read_dir(world.data().join("snapshotter/snapshots")).unwrap();
    let found = uppers.flatten().filter(|it| it.path().join("fs/tmp/file").exists()).count();
    assert_eq!(found, 1);

    // The snapshotter dies: the container goes on, the next snapshotter knows everything.
    snapshotter.kill();
    containerd.shows("long", "cat /etc/app", "hello from the middle\n");
    containerd.run(name, "nobody", "true").fails(1, "");
    snapshotter = Snapshotter::start(&world);
    // containerd connects again in its own time.
    eventually("containers start again", || {
        containerd.run(name, "again", "cat /etc/app").out == "hello from the middle\n"
    });
    // The file-system daemon dies: reads wait for the next one.
    let fsd = world.line("stats --json").ok().json()["fsd_pid"].as_u64().unwrap() as u32;
    kill(fsd, 9);
    let expected = run("md5sum", &[world.path("bundle/rootfs/late").to_str().unwrap()]);
    let sum = expected.split(' ').next().unwrap();
    containerd.shows("long", "md5sum < /late", &format!("{sum}  -\n"));
    assert_eq!(containerd.run(name, "third", "ls /old").ok().out, "new\n");

    // As long as containers or images need a layer, it stays; then everything goes.
    assert!(alive(snapshotter.pid()));
    let says = "containerd's snapshotter holds 3 layers for snapshots; remove the containers";
    world.line("down").fails(1, says);
    containerd.shows("long", "cat /etc/app", "hello from the middle\n");
    // A mount starts the next node.
    let place = world.path("place");
    fs::create_dir(&place).unwrap();
    world.line(&format!("mount team/app:v1 {}", place.display())).ok();
    world.line(&format!("umount {}", place.display())).ok();
    containerd.remove("long");
    containerd.ctr(&["images", "rm", "--sync", name]).ok();
    eventually("layers are released", || held(&world).is_empty());
    let empty = |name: &str| fs::read_dir(world.data().join(name)).unwrap().count() == 0;
    for folder in ["snapshotter/snapshots", "snapshotter/records", "snapshotter/l"] {
        assert!(empty(folder), "{folder}");
    }
    drop(containerd);
    drop(snapshotter);
    world.line("down").ok();
    world.nothing_is_left();
}

#[test]
fn any_environment_becomes_an_image_of_containerd() {
    let world = World::new();
    let root = world.path("root");
    for name in ["bin", "proc", "dev", "sys"] {
        fs::create_dir_all(root.join(name)).unwrap();
    }
    fs::copy("/bin/busybox", root.join("bin/busybox")).unwrap();
    std::os::unix::fs::symlink("busybox", root.join("bin/sh")).unwrap();
    world.build(&root, "base/box:1");
    let work = world.path("work");
    fs::create_dir(&work).unwrap();
    fs::write(work.join("note"), "of the workspace\n").unwrap();
    world.build(&work, "workspace/w:1");
    let create = "env create work:1 --layer base/box:1 --layer workspace/w:1 --env A=b";
    world.line(create).ok();
    world
        .run(&["containerd", "add", "work:1", "--address", "/nowhere/c.sock"])
        .fails(1, "lamella snapshotter");
    let snapshotter = Snapshotter::start(&world);
    world
        .run(&["containerd", "add", "work:1", "--address", "/nowhere/c.sock"])
        .fails(1, "--address");
    let containerd = Containerd::start(&world);
    let mut wrong = containerd.add("work:1", "work:1");
    wrong.extend(["--snapshotter".to_owned(), "unknown".to_owned()]);
    world.run(&wrong).fails(1, "proxy plugin");
    world.run(&containerd.add("nobody:1", "x")).fails(1, "nobody");

    world.run(&containerd.add("work:1", "work:1")).ok();
    // Once more, and a layer alone.
    world.run(&containerd.add("work:1", "work:1")).ok();
    world.run(&containerd.add("base/box:1", "box")).ok();
    let ran = containerd.run("work:1", "one", "cat /note; echo $A").ok();
    assert_eq!(ran.out, "of the workspace\nb\n");
    assert_eq!(containerd.run("box", "two", "ls /").ok().out, "bin\ndev\nproc\nrun\nsys\n");
    // The name moves on.
    world.run(&containerd.add("base/box:1", "work:1")).ok();
    assert_eq!(containerd.run("work:1", "three", "ls /").ok().out, "bin\ndev\nproc\nrun\nsys\n");
    // Of an environment that is another one now the layer goes when containerd collects, of both what is shared
    // goes last.
    containerd.ctr(&["images", "rm", "--sync", "work:1"]).ok();
    eventually("the workspace is released", || held(&world).len() == 1);
    containerd.ctr(&["images", "rm", "--sync", "box"]).ok();
    eventually("the base is released", || held(&world).is_empty());
    drop((containerd, snapshotter));
}

#[test]
fn layers_that_nobody_knows_are_unpacked_and_mix_with_others() {
    let world = World::new();
    let layout = image(&world);
    let snapshotter = Snapshotter::start(&world);
    let containerd = Containerd::start(&world);
    let name = "registry.test/team/app:v1";
    let archive = world.path("image.tar");
    let pack = ["-C", layout.to_str().unwrap(), "-cf", archive.to_str().unwrap(), "."];
    run("tar", &pack);
    let archive = archive.to_str().unwrap();
    let import = ["images", "import", "--snapshotter", "lamella", "--base-name"];
    containerd.ctr(&[&import[..], &["registry.test/team/app", archive]].concat()).ok();
    let script = "cat /etc/app; test ! -e /etc/gone; ls /old";
    let ran = containerd.run(name, "eager", script).ok();
    assert_eq!(ran.out, "hello from the middle\nnew\n");
    assert!(held(&world).is_empty());

    // What a container of it wrote, over three directories, becomes the layer of another image; pulled here, that
    // one layer is shown and stands on the directories.
    let snapshots = containerd.snapshots();
    assert_eq!(snapshots.len(), 3, "{snapshots:?}");
    let top = snapshots.iter().find(|it| !snapshots.iter().any(|other| other.1 == it.0)).unwrap();
    let bundle = world.path("bundle");
    fs::write(bundle.join("rootfs/on-top"), "shown\n").unwrap();
    let next = format!("{}:v2", layout.display());
    run("umoci", &["repack", "--image", &next, bundle.to_str().unwrap()]);
    world.line(&format!("pull oci:{next} -t team/app:v2")).ok();
    let config = run("skopeo", &["inspect", "--config", &format!("oci:{next}")]);
    let config: Value = serde_json::from_str(&config).unwrap();
    let diff_ids = config["rootfs"]["diff_ids"].as_array().unwrap();
    let diff_ids = diff_ids.iter().map(|it| it.as_str().unwrap());
    let chains: Vec<String> = diff_ids
        .scan(String::new(), |below, it| {
            *below = snapshotter::chain_id(below, it);
            Some(below.clone())
        })
        .collect();
    assert_eq!(chains.len(), 4);
    assert_eq!(chains[2], top.0);
    // As programs on containerd's client pull: they say the ChainID that they want.
    assert_eq!(containerd.prepare("pull 3", &top.0, &chains[3], &[]), Err(Code::AlreadyExists));
    assert_eq!(held(&world).len(), 1);
    assert_eq!(containerd.prepare("pull 3", &top.0, &chains[3], &[]), Err(Code::AlreadyExists));
    assert_eq!(held(&world).len(), 1);
    let shown: Vec<_> = containerd.snapshots();
    assert!(shown.iter().any(|it| it.0 == chains[3] && it.1 == top.0), "{shown:?}");
    // With the documents it is an image whose lower layers are directories.
    world.run(&containerd.add("team/app:v2", "mixed")).ok();
    let ran = containerd.run("mixed", "mixed", "cat /on-top; ls /old").ok();
    assert_eq!(ran.out, "shown\nnew\n");

    // Nobody knows this one, and no label of a stranger makes a layer of ours of it.
    let known = held(&world)[0]["id"].as_str().unwrap().to_owned();
    let unknown = format!("sha256:{}", "0".repeat(64));
    let forged = [
        ("lamella/layer", known.as_str()),
        ("containerd.io/snapshot/lamella/layer", known.as_str()),
        ("containerd.io/snapshot/lamella.layer", known.as_str()),
    ];
    assert_eq!(containerd.prepare("forged", "", &unknown, &forged), Ok(()));
    containerd.ctr(&["snapshots", "--snapshotter", "lamella", "rm", "forged"]).ok();

    // containerd refuses to remove what others stand on, and so do we.
    containerd.ctr(&["snapshots", "--snapshotter", "lamella", "rm", &top.0]).fails(1, "");
    for name in [name, "mixed"] {
        containerd.ctr(&["images", "rm", "--sync", name]).ok();
    }
    containerd.ctr(&["snapshots", "--snapshotter", "lamella", "rm", &chains[3]]);
    containerd.collect();
    eventually("all is released", || held(&world).is_empty());
    drop((containerd, snapshotter));
}

#[test]
fn what_a_killed_snapshotter_held_is_released() {
    let world = World::new();
    world.build(&world.tree("tree"), "base/t:1");
    let snapshotter = Snapshotter::start(&world);
    let containerd = Containerd::start(&world);
    world.run(&containerd.add("base/t:1", "t")).ok();
    assert_eq!(held(&world).len(), 1);
    drop(snapshotter);
    // As if it had died between its record and the layer.
    for entry in fs::read_dir(world.data().join("snapshotter/records")).unwrap() {
        fs::remove_file(entry.unwrap().path()).unwrap();
    }
    let snapshotter = Snapshotter::start(&world);
    eventually("the layer is released", || held(&world).is_empty());
    // A second one on the same directory is refused, and so is a directory that options cannot name.
    let other = world.path("other.sock");
    world.run(&["snapshotter", "--socket", other.to_str().unwrap()]).fails(1, "another process");
    let odd = world.path("a:b");
    let odd = ["snapshotter", "--root", odd.to_str().unwrap(), "--socket", other.to_str().unwrap()];
    world.run(&odd).fails(1, "colons");
    drop((containerd, snapshotter));
}

impl Containerd {
    /// The snapshots of our snapshotter, as containerd knows them: names and parents.
    fn snapshots(&self) -> Vec<(String, String)> {
        let listed = self.ctr(&["snapshots", "--snapshotter", "lamella", "ls"]).ok().out;
        let lines = listed.lines().skip(1).map(|line| {
            let mut words = line.split_whitespace();
            let name = words.next().unwrap().to_owned();
            let parent = words.next().filter(|word| word.starts_with("sha256:"));
            (name, parent.unwrap_or_default().to_owned())
        });
        lines.collect()
    }

    /// Asks containerd for the snapshot of a ChainID, as its client does when it pulls.
    fn prepare(
        &self,
        key: &str,
        parent: &str,
        chain: &str,
        more: &[(&str, &str)],
    ) -> Result<(), Code> {
        let mut labels = vec![("containerd.io/snapshot.ref", chain)];
        labels.push(("containerd.io/gc.root", "2026-01-01T00:00:00Z"));
        labels.extend(more);
        let labels = labels.into_iter().map(|(name, value)| (name.into(), value.into())).collect();
        let mut request = tonic::Request::new(wire::PrepareSnapshotRequest {
            snapshotter: "lamella".to_owned(),
            key: key.to_owned(),
            parent: parent.to_owned(),
            labels,
        });
        let namespace = self.namespace().parse().unwrap();
        request.metadata_mut().insert("containerd-namespace", namespace);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let channel = proto::connect::unix(&self.address()).await.unwrap();
            let prepared = SnapshotsClient::new(channel).prepare(request).await;
            prepared.map(drop).map_err(|status| status.code())
        })
    }

    /// Has containerd collect what nothing refers to.
    fn collect(&self) {
        let lease = self.ctr(&["leases", "create"]).ok().out;
        self.ctr(&["leases", "delete", "--sync", lease.trim()]).ok();
    }
}
