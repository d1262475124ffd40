//! Container images in and out: registries, layouts, and the programs that others read them with.
//!
//! Judges: Debian's docker-registry, skopeo, umoci, crun, runc.

#![allow(clippy::unwrap_used)]

mod oci_world;
#[path = "../../builder/tests/support/tape.rs"]
mod tape;

use builder::export::{Compression, ExportOptions, export};
use builder::publish::{EncodedChunk, ImagesPublisher, Publisher};
use builder::{BuildOptions, ImageLayers, Silent};
use imaged::CollectOptions;
use layer::environment::{Environment, RunConfig};
use layer::manifest::LayerKind;
use layer::{ChunkDigest, EnvId, ErrorKind, LayerId, Result};
use oci_world::registry::{Registry, run};
use oci_world::{World, digests, layout, packed, umoci_image};
use std::fs;
use std::os::unix::fs::{FileExt, symlink};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tape::Tape;

fn text(bytes: usize, seed: u64) -> Vec<u8> {
    let mut state = seed;
    let mut text = Vec::new();
    while text.len() < bytes {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        text.extend_from_slice(format!("{:x} is a word\n", state >> 44).as_bytes());
    }
    text.truncate(bytes);
    text
}

#[test]
fn an_image_of_a_registry_comes_and_goes_unchanged() {
    let world = World::new();
    let source = umoci_image(world.dir.path());
    let (digest, blobs) = digests(&source);
    assert_eq!(blobs.len(), 3);
    let registry = Registry::start(world.dir.path(), false);
    registry.push(&format!("oci:{}:v1", source.display()), "demo/app:v1");
    assert_eq!(registry.digest("demo/app:v1"), digest);

    let (built, environment) = world.pull(&registry.image("demo/app:v1"));
    assert_eq!(environment.layers.len(), 3);
    assert_eq!(environment.config.env.last().unwrap(), "GREETING=hello");
    assert_eq!(environment.config.stop_signal.as_deref(), Some("SIGINT"));
    let (place, exported) = world.export(&environment, "out");
    assert_eq!(exported.manifest, digest);
    assert_eq!(digests(&place), (digest.clone(), blobs.clone()));
    assert!(exported.layers.iter().all(|layer| layer.original));

    // The registry takes it back, and has it already.
    registry.push(&format!("oci:{}:latest", place.display()), "demo/again:v2");
    assert_eq!(registry.digest("demo/again:v2"), digest);

    // What was converted is not fetched again: the registry does not even have it any more.
    registry.lose_layers(&blobs);
    let (again, same) = world.pull(&registry.image(&format!("demo/app@{digest}")));
    assert_eq!(again.layer_ids(), built.layer_ids());
    assert_eq!(same, environment);
    let other = World::new();
    let error = other.build(&registry.image("demo/app:v1"), &other.options()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound, "{}", error.chain());
}

/// A publisher during which collectors run that give nothing any grace: before and after each step.
struct Collected<'a> {
    world: &'a World,
    inner: ImagesPublisher,
    condemned: AtomicU64,
}

impl Collected<'_> {
    /// Twice: one run condemns, the next deletes.
    fn collect(&self) {
        let options = CollectOptions {
            grace: Duration::ZERO,
            history: Duration::ZERO,
            compact_below_percent: 70,
            ..CollectOptions::default()
        };
        for _ in 0..2 {
            let done = self.world.images.collect(&options).unwrap();
            self.condemned.fetch_add(done.condemned, Ordering::Relaxed);
        }
    }

    fn around<T>(&self, step: impl FnOnce(&ImagesPublisher) -> T) -> T {
        self.collect();
        let done = step(&self.inner);
        self.collect();
        done
    }
}

impl Publisher for Collected<'_> {
    fn missing(&self, digests: &[ChunkDigest]) -> Result<Vec<bool>> {
        self.inner.missing(digests)
    }

    fn upload(&self, chunk: EncodedChunk) -> Result<()> {
        self.inner.upload(chunk)
    }

    fn flush(&self) -> Result<()> {
        self.around(Publisher::flush)
    }

    fn commit_layer(&self, file: &[u8]) -> Result<LayerId> {
        self.around(|inner| inner.commit_layer(file))
    }

    fn reopen(&self) -> Result<()> {
        self.inner.reopen()
    }

    fn commit_environment(&self, document: &[u8]) -> Result<EnvId> {
        self.around(|inner| inner.commit_environment(document))
    }
}

#[test]
fn collections_in_the_middle_of_an_import_take_nothing_of_it() {
    let world = World::new();
    let source = umoci_image(world.dir.path());
    let (digest, blobs) = digests(&source);
    let inner = world.publisher();
    let publisher = Collected { world: &world, inner, condemned: AtomicU64::new(0) };
    let from = format!("oci:{}:v1", source.display());
    let (built, environment) = world.build_with(&from, &world.options(), &publisher).unwrap();
    assert!(publisher.condemned.load(Ordering::Relaxed) > 0, "there was something to take");
    // No name protects it yet, only the publish that goes on.
    publisher.collect();
    let checked = imaged::fsck::check(&world.store, true).unwrap();
    assert_eq!((checked.damages, checked.layers), (Vec::new(), built.layer_ids().len() as u64));
    let (place, exported) = world.export(&environment, "out");
    assert!(exported.layers.iter().all(|layer| layer.original), "the tars are there still");
    assert_eq!(digests(&place), (digest, blobs));
}

#[test]
fn every_compression_comes_back_to_the_bit() {
    let world = World::new();
    let dir = world.dir.path();
    let large = text(700_000, 3);
    let tar = |seed: u64| {
        let mut tape = Tape::default().directory("etc/", 0o755).file("etc/large", &large);
        for at in 0..30 {
            tape = tape.file(&format!("etc/{seed}-{at}"), &text(at * 97, seed + at as u64));
        }
        // Twice in one tar, the first time with bytes that no file shows.
        tape.file("etc/twice", &text(5000, 77)).file("etc/twice", b"the last wins").end()
    };
    let layers: Vec<(Vec<u8>, Vec<u8>, &str)> = [
        ("gzip -9", "+gzip"),
        ("gzip -1 -n", "+gzip"),
        ("zstd -q -3", "+zstd"),
        ("cat", ""),
        ("zstd -q --format=gzip -6", "+gzip"),
    ]
    .into_iter()
    .enumerate()
    .map(|(at, (command, how))| {
        let tar = tar(at as u64 * 1000);
        let blob = packed(dir, command, &tar);
        (tar, blob, how)
    })
    .collect();
    let source = dir.join("source");
    layout(&source, &layers);
    let registry = Registry::start(dir, false);
    registry.push(&format!("oci:{}:v1", source.display()), "demo/mixed:v1");
    let expected = digests(&source);
    assert_eq!(registry.digest("demo/mixed:v1"), expected.0);
    let (_, environment) = world.pull(&registry.image("demo/mixed:v1"));
    let (place, exported) = world.export(&environment, "out");
    assert_eq!(digests(&place), expected);
    assert_eq!(exported.manifest, expected.0);

    // gzip's own streams are kept as notes that are much shorter than they.
    let kept = world.dir.path().join("store/streams");
    let kept_bytes = |at: usize| {
        let hex = expected.1[at].strip_prefix("sha256:").unwrap();
        let name = run("find", &[kept.to_str().unwrap(), "-name", &format!("sha256-{hex}")]);
        fs::metadata(name.trim()).unwrap().len()
    };
    for (at, (_, blob, _)) in layers.iter().enumerate().take(2) {
        let (notes, whole) = (kept_bytes(at), blob.len() as u64);
        assert!(notes * 5 < whole, "layer {at}: {notes} bytes kept of {whole}");
    }
}

#[test]
fn one_tar_file_and_one_merged_layer_go_out_too() {
    let world = World::new();
    let source = umoci_image(world.dir.path());
    let from = format!("oci:{}:v1", source.display());
    let (_, environment) = world.pull(&from);
    let options =
        ExportOptions { as_archive: true, tag: "v9".to_owned(), ..ExportOptions::default() };
    let (archive, exported) = world.export_with(&environment, "image.tar", &options);
    assert_eq!(exported.manifest, digests(&source).0);
    let copied = world.dir.path().join("copied");
    run(
        "skopeo",
        &[
            "copy",
            "-q",
            "--preserve-digests",
            &format!("oci-archive:{}:v9", archive.display()),
            &format!("oci:{}:v9", copied.display()),
        ],
    );
    assert_eq!(digests(&copied), digests(&source));

    let options = BuildOptions { image_layers: ImageLayers::Merged, ..world.options() };
    let (_, merged) = world.build(&from, &options).unwrap();
    assert_eq!(merged.layers.len(), 1);
    let options = ExportOptions { compression: Compression::Zstd, ..ExportOptions::default() };
    let (place, exported) = world.export_with(&merged, "merged", &options);
    assert!(!exported.layers[0].original);
    let (_, back) = world.pull(&format!("oci:{}", place.display()));
    assert_eq!(back.config, merged.config);
    assert_eq!(world.tree_digests(back.layers[0]), world.tree_digests(merged.layers[0]));
    // Nothing is overwritten.
    let error = export(&world.store, &merged, &place, &options, &Silent).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Exists);
}

/// Everything that a tar can hold.
fn plant(root: &Path) {
    fs::create_dir_all(root.join("a/b/c")).unwrap();
    for (at, size) in [0, 1, 64, 65, 4096, 4097, 1_000_001].into_iter().enumerate() {
        fs::write(root.join(format!("a/size{at}")), text(size, at as u64)).unwrap();
    }
    fs::hard_link(root.join("a/size5"), root.join("a/b/hard")).unwrap();
    symlink("../size5", root.join("a/b/link")).unwrap();
    symlink("t".repeat(3000), root.join("long-target")).unwrap();
    fs::hard_link(root.join("a/b/link"), root.join("linked-link")).unwrap();
    fs::write(root.join("n".repeat(255)), b"a long name").unwrap();
    fs::write(root.join("ä\nö"), b"odd").unwrap();
    let sparse = fs::File::create(root.join("sparse")).unwrap();
    sparse.set_len(50_000_000).unwrap();
    sparse.write_all_at(b"one", 10_000_000).unwrap();
    fs::File::create(root.join("hole")).unwrap().set_len(1 << 34).unwrap();
    for (name, kind) in [("null", "c 1 3"), ("disk", "b 8 70000")] {
        let path = root.join(name);
        let mut arguments = vec![path.to_str().unwrap()];
        arguments.extend(kind.split(' '));
        run("mknod", &arguments);
    }
    run("mkfifo", &[root.join("fifo").to_str().unwrap()]);
    let file = root.join("a/size4");
    let any = sys::file::xattr::SetMode::Any;
    sys::file::xattr::set(&file, b"user.binary", b"\0\xff\n=", any).unwrap();
    let capability = b"\x01\0\0\x02\0\x04\0\0\0\0\0\0\0\0\0\0\0\0\0\0";
    sys::file::xattr::set(&file, b"security.capability", capability, any).unwrap();
    std::os::unix::fs::chown(root.join("a/size1"), Some(4_294_967_294), Some(3_000_000_000))
        .unwrap();
    for (path, time) in [
        ("a/size2", "1950-01-02 03:04:05.123456789 UTC"),
        ("a/size3", "2400-05-06 07:08:09.000000001 UTC"),
        ("", "1999-09-09 09:09:09.9 UTC"),
    ] {
        let path = root.join(path);
        run("touch", &["-h", "-d", time, path.to_str().unwrap()]);
    }
}

#[test]
fn a_tree_that_never_was_an_image_goes_out_and_comes_back_the_same() {
    let world = World::new();
    let root = world.dir.path().join("root");
    fs::create_dir(&root).unwrap();
    plant(&root);
    let options = BuildOptions { threads: 2, ..BuildOptions::new(LayerKind::Base) };
    let (_, environment) = world.build(root.to_str().unwrap(), &options).unwrap();
    for compression in [Compression::Gzip, Compression::Zstd, Compression::None] {
        let name = format!("out-{compression}");
        let options = ExportOptions { compression, ..ExportOptions::default() };
        let (place, exported) = world.export_with(&environment, &name, &options);
        let (_, back) = world.pull(&format!("oci:{}:latest", place.display()));
        let trees = [back.layers[0], environment.layers[0]].map(|it| world.tree_digests(it));
        assert_eq!(trees[0], trees[1], "{compression}");
        // And what came from our own tar goes out as that tar.
        let (second, again) = world.export(&back, &format!("again-{compression}"));
        assert_eq!(digests(&second), digests(&place));
        assert_eq!(again.layers[0].diff_id, exported.layers[0].diff_id);
    }
}

/// Runs a command in what umoci unpacks of a layout, by runc and by crun.
fn run_in(dir: &Path, layout: &Path, script: &str) -> Vec<String> {
    let bundle = dir.join("unpacked");
    let image = format!("{}:latest", layout.display());
    run("umoci", &["unpack", "--image", &image, bundle.to_str().unwrap()]);
    let path = bundle.join("config.json");
    let mut config: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    config["process"]["terminal"] = false.into();
    config["process"]["args"] = serde_json::json!(["/bin/sh", "-c", script]);
    fs::write(&path, serde_json::to_vec(&config).unwrap()).unwrap();
    let id = format!("lamella-oci-{}", std::process::id());
    // crun refuses a host that has controllers in both cgroup versions.
    let apart = "umount -l /sys/fs/cgroup/unified 2>/dev/null; exec \"$@\"";
    ["runc", "crun"]
        .map(|runtime| {
            let id = format!("{id}-{runtime}");
            let command = ["-m", "sh", "-c", apart, "x", runtime, "run", "--bundle"];
            run("unshare", &[&command[..], &[bundle.to_str().unwrap(), &id]].concat())
        })
        .to_vec()
}

#[test]
fn other_programs_unpack_and_run_what_goes_out() {
    let world = World::new();
    let source = umoci_image(world.dir.path());
    let (_, image) = world.pull(&format!("oci:{}:v1", source.display()));
    // A layer of ours on top, which takes a file away and replaces a directory.
    let upper = world.dir.path().join("upper");
    fs::create_dir_all(upper.join("etc/app")).unwrap();
    fs::write(upper.join("etc/app/own"), "ours").unwrap();
    fs::create_dir(upper.join("old")).unwrap();
    let any = sys::file::xattr::SetMode::Any;
    sys::file::xattr::set(&upper.join("old"), b"trusted.overlay.opaque", b"y", any).unwrap();
    run("mknod", &[upper.join("etc/linked").to_str().unwrap(), "c", "0", "0"]);
    let publisher = world.publisher();
    let options = builder::DiffOptions::new(BuildOptions::new(LayerKind::Diff));
    let lower = builder::NoLowerLayers;
    let diff = builder::pack_diff(&upper, &lower, &publisher, &options, &Silent).unwrap();
    let layers: Vec<LayerId> = image.layers.iter().copied().chain([diff.layer_id]).collect();
    let config = RunConfig { env: vec!["GREETING=ours".to_owned()], ..image.config.clone() };
    let environment = Environment::new(layers, config).unwrap().with_image(image.image);
    let (place, exported) = world.export(&environment, "out");
    let (digest, blobs) = digests(&source);
    assert_ne!(exported.manifest, digest);
    assert_eq!(digests(&place).1[..3], blobs[..]);
    let originals: Vec<bool> = exported.layers.iter().map(|layer| layer.original).collect();
    assert_eq!(originals, [true, true, true, false]);
    let script = "echo $GREETING; cat app/config app/own /etc/app/own; ls /old /usr/share/doc/7; \
                  test -e /etc/linked || echo unlinked; true";
    let expected = "ours\ntwoours";
    for said in run_in(world.dir.path(), &place, &format!("cd /etc; {script} 2>/dev/null")) {
        assert!(said.starts_with(expected), "{said}");
        assert!(said.contains("unlinked") && !said.contains("new"), "{said}");
    }
    // What the old configuration said beside this stays.
    let info = run("skopeo", &["inspect", "--config", &format!("oci:{}:latest", place.display())]);
    let info: serde_json::Value = serde_json::from_str(&info).unwrap();
    assert_eq!(info["author"], "somebody");
    assert_eq!(info["config"]["StopSignal"], "SIGINT");
    assert_eq!(info["history"].as_array().unwrap().last().unwrap()["created_by"], "lamella");
}

#[test]
fn damage_beside_a_layer_costs_its_digest_and_nothing_else() {
    let world = World::new();
    let source = umoci_image(world.dir.path());
    let (_, environment) = world.pull(&format!("oci:{}:v1", source.display()));
    let expected = digests(&source);
    let store = world.dir.path().join("store");
    let files = run(
        "find",
        &[
            store.join("framings").to_str().unwrap(),
            store.join("streams").to_str().unwrap(),
            "-type",
            "f",
        ],
    );
    let files: Vec<&str> = files.lines().collect();
    assert_eq!(files.len(), 6);
    for (number, path) in files.iter().enumerate() {
        let good = fs::read(path).unwrap();
        let mut bad = good.clone();
        let middle = bad.len() / 2;
        bad[middle] ^= 0xff;
        fs::write(path, &bad).unwrap();
        let (place, exported) = world.export(&environment, &format!("bad-{number}"));
        fs::write(path, &good).unwrap();
        let kept = exported.layers.iter().filter(|layer| layer.original).count();
        assert!(kept >= 2, "{path}: {kept}");
        let (_, back) = world.pull(&format!("oci:{}:latest", place.display()));
        for (left, right) in back.layers.iter().zip(&environment.layers) {
            assert_eq!(world.tree_digests(*left), world.tree_digests(*right), "{path}");
        }
    }
    fs::remove_dir_all(store.join("images")).unwrap();
    let (place, _) = world.export(&environment, "no-documents");
    assert_eq!(digests(&place).1, expected.1);
    fs::remove_dir_all(store.join("framings")).unwrap();
    let (_, exported) = world.export(&environment, "no-framings");
    assert!(exported.layers.iter().all(|layer| !layer.original));
}

#[test]
fn a_link_across_layers_makes_the_same_layer_with_and_without_shortcuts() {
    let (world, fresh) = (World::new(), World::new());
    let dir = world.dir.path();
    let mut base = Tape::default().directory("etc/", 0o755);
    for at in 0..40 {
        base = base.file(&format!("etc/{at}"), &text(500 + at * 10, at as u64));
    }
    let base = base.end();
    let upper = Tape::default().hard_link("etc/linked", "etc/20").file("etc/new", b"new").end();
    let plain = |tar: &[u8]| (tar.to_vec(), tar.to_vec(), "");
    layout(&dir.join("one"), &[plain(&base)]);
    layout(&dir.join("two"), &[plain(&base), plain(&upper)]);
    let two = format!("oci:{}:v1", dir.join("two").display());
    let (first, _) = world.pull(&format!("oci:{}:v1", dir.join("one").display()));
    // Without the blob of the lower layer nobody can know what the link stands for.
    let (both, environment) = world.pull(&two);
    let (expected, _) = fresh.pull(&two);
    assert_eq!(both.layer_ids(), expected.layer_ids());
    assert_eq!(both.layer_ids()[0], first.layer_ids()[0]);
    let (place, exported) = world.export(&environment, "out");
    assert_eq!(digests(&place), digests(&dir.join("two")));
    assert!(exported.layers.iter().all(|layer| layer.original));
}
