//! Container images: layouts, archives, docker archives; whiteouts and everything else that layers do to
//! each other, merged and stacked.

#![allow(clippy::unwrap_used)]

mod support;
#[path = "support/tape.rs"]
mod tape;

use builder::{BuildOptions, Built, ImageLayers, Silent, Source};
use layer::tree::Kind;
use layer::{ErrorKind, Result};
use serde_json::{Value, json};
use sha2::Digest as _;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use support::{MemoryPublisher, View, options};
use tape::{Fields, Tape};

fn sha256(bytes: &[u8]) -> String {
    sha2::Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

/// An image in the making: its layers as tar files.
struct Image {
    layers: Vec<Vec<u8>>,
    config: Value,
}

impl Image {
    fn new(layers: Vec<Vec<u8>>) -> Self {
        let config = json!({
            "Env": ["PATH=/bin", "A=b"], "Cmd": ["sh"], "Entrypoint": null, "User": "1000:1000",
            "WorkingDir": "/srv", "Labels": {"k": "v"}, "ExposedPorts": {"80/tcp": {}},
            "Volumes": null, "StopSignal": "SIGINT", "OnBuild": null, "ArgsEscaped": true
        });
        Self { layers, config }
    }

    fn config_json(&self) -> Vec<u8> {
        let diff_ids: Vec<String> =
            self.layers.iter().map(|layer| format!("sha256:{}", sha256(layer))).collect();
        let config = json!({
            "architecture": "amd64", "os": "linux", "created": "2024-01-01T00:00:00Z",
            "config": self.config, "rootfs": {"type": "layers", "diff_ids": diff_ids},
            "history": [{"created_by": "test", "empty_layer": true}], "docker_version": "1.2.3"
        });
        serde_json::to_vec(&config).unwrap()
    }

    /// Writes an OCI layout; layers are packed in turn as gzip, zstd, plain.
    fn layout(&self, dir: &Path) {
        let blobs = dir.join("blobs/sha256");
        fs::create_dir_all(&blobs).unwrap();
        let put = |media_type: &str, bytes: &[u8]| -> Value {
            let hex = sha256(bytes);
            fs::write(blobs.join(&hex), bytes).unwrap();
            json!({"mediaType": media_type, "digest": format!("sha256:{hex}"), "size": bytes.len()})
        };
        let layers: Vec<Value> = self
            .layers
            .iter()
            .enumerate()
            .map(|(at, tar)| match at % 3 {
                0 => put("application/vnd.oci.image.layer.v1.tar+gzip", &gzip(tar)),
                1 => put(
                    "application/vnd.oci.image.layer.v1.tar+zstd",
                    &zstd::bulk::compress(tar, 3).unwrap(),
                ),
                _ => put("application/vnd.oci.image.layer.v1.tar", tar),
            })
            .collect();
        let config = put("application/vnd.oci.image.config.v1+json", &self.config_json());
        let manifest = json!({"schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": config, "layers": layers});
        let mut entry = put(
            "application/vnd.oci.image.manifest.v1+json",
            &serde_json::to_vec(&manifest).unwrap(),
        );
        entry["annotations"] = json!({"org.opencontainers.image.ref.name": "v1"});
        // A second image for another machine, whose manifest nobody may need.
        let mut other = entry.clone();
        other["digest"] = json!(format!("sha256:{}", "0".repeat(64)));
        other["annotations"] = json!({"org.opencontainers.image.ref.name": "v2"});
        other["platform"] = json!({"architecture": "s390x", "os": "linux"});
        entry["platform"] = json!({"architecture": "amd64", "os": "linux"});
        let index = json!({"schemaVersion": 2, "manifests": [entry, other]});
        fs::write(dir.join("index.json"), serde_json::to_vec(&index).unwrap()).unwrap();
        fs::write(dir.join("oci-layout"), br#"{"imageLayoutVersion":"1.0.0"}"#).unwrap();
    }

    /// What `docker save` wrote: a directory per layer, equal layers linked.
    fn docker(&self) -> Vec<u8> {
        let mut tape = Tape::default().file("config.json", &self.config_json());
        let mut names = Vec::new();
        for (at, layer) in self.layers.iter().enumerate() {
            let name = format!("layer{at}/layer.tar");
            let first = self.layers.iter().position(|other| other == layer).unwrap();
            tape = match first == at {
                true => tape.file(&name, layer),
                false => tape.symlink(&name, &format!("../layer{first}/layer.tar")),
            };
            names.push(name);
        }
        let manifest =
            json!([{"Config": "config.json", "RepoTags": ["demo/app:v1"], "Layers": names}]);
        tape.file("manifest.json", &serde_json::to_vec(&manifest).unwrap()).end()
    }
}

fn build(source: &str, publisher: &MemoryPublisher, options: &BuildOptions) -> Result<Built> {
    builder::build(&Source::parse(source)?, publisher, options, &Silent)
}

fn merged(layers: Vec<Vec<u8>>) -> View {
    let dir = tempfile::tempdir().unwrap();
    Image::new(layers).layout(dir.path());
    let publisher = MemoryPublisher::default();
    let built = build(&format!("oci:{}:v1", dir.path().display()), &publisher, &options());
    let built = built.unwrap_or_else(|error| panic!("{}", error.chain()));
    publisher.view(built.layer_id())
}

fn refused(layers: Vec<Vec<u8>>) -> layer::Error {
    let dir = tempfile::tempdir().unwrap();
    Image::new(layers).layout(dir.path());
    build(&format!("oci:{}:v1", dir.path().display()), &MemoryPublisher::default(), &options())
        .unwrap_err()
}

fn stacked(layers: Vec<Vec<u8>>) -> Vec<View> {
    let dir = tempfile::tempdir().unwrap();
    Image::new(layers).layout(dir.path());
    let publisher = MemoryPublisher::default();
    let options = BuildOptions { image_layers: ImageLayers::Stacked, ..options() };
    let built = build(&format!("oci:{}:v1", dir.path().display()), &publisher, &options);
    let built = built.unwrap_or_else(|error| panic!("{}", error.chain()));
    for layer in &built.layers {
        assert!(layer.manifest.annotations["oci.diff_id"].starts_with("sha256:"));
    }
    built.layer_ids().into_iter().map(|id| publisher.view(id)).collect()
}

fn three() -> Image {
    Image::new(vec![
        Tape::default().directory("etc/", 0o755).file("etc/a", b"one").file("etc/b", b"old").end(),
        Tape::default().file("etc/.wh.a", b"").file("etc/b", b"new").end(),
        Tape::default().file("etc/c", b"three").end(),
    ])
}

#[test]
fn layout_archive_and_docker_archive_are_one_layer_with_one_config() {
    let dir = tempfile::tempdir().unwrap();
    let image = three();
    let layout = dir.path().join("layout");
    fs::create_dir(&layout).unwrap();
    image.layout(&layout);
    let mut tape = Tape::default();
    for path in files(&layout) {
        let name = path.strip_prefix(&layout).unwrap().to_str().unwrap();
        tape = tape.file(name, &fs::read(&path).unwrap());
    }
    let archive = dir.path().join("image.tar");
    fs::write(&archive, tape.end()).unwrap();
    let docker = dir.path().join("docker.tar");
    fs::write(&docker, image.docker()).unwrap();
    let packed = dir.path().join("docker.tar.gz");
    fs::write(&packed, gzip(&image.docker())).unwrap();
    // The same tree from a plain tar: where layers came from is no part of a merged layer.
    let flat = dir.path().join("flat.tar");
    let tape = Tape::default().directory("etc/", 0o755).file("etc/b", b"new");
    fs::write(&flat, tape.file("etc/c", b"three").end()).unwrap();
    let expected = build(flat.to_str().unwrap(), &MemoryPublisher::default(), &options()).unwrap();
    for source in [
        format!("oci:{}:v1", layout.display()),
        format!("oci:{}", layout.display()),
        format!("oci-archive:{}:v1", archive.display()),
        format!("docker-archive:{}", docker.display()),
        format!("docker-archive:{}:demo/app:v1", docker.display()),
        format!("docker-archive:{}", packed.display()),
    ] {
        let built = build(&source, &MemoryPublisher::default(), &options());
        let built = built.unwrap_or_else(|error| panic!("{source}: {}", error.chain()));
        assert_eq!(built.layer_id(), expected.layer_id(), "{source}");
        let config = built.config.unwrap();
        assert_eq!(config.env, ["PATH=/bin", "A=b"]);
        assert_eq!(config.cmd, ["sh"]);
        assert_eq!((config.cwd.as_str(), config.user.as_str()), ("/srv", "1000:1000"));
        assert_eq!(config.exposed_ports, ["80/tcp"]);
        assert_eq!(config.labels["k"], "v");
        assert_eq!(config.stop_signal.as_deref(), Some("SIGINT"));
        assert!(config.entrypoint.is_empty() && config.volumes.is_empty());
    }
}

fn files(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut pending = vec![dir.to_owned()];
    while let Some(dir) = pending.pop() {
        for entry in fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() { pending.push(path) } else { found.push(path) }
        }
    }
    found.sort();
    found
}

#[test]
fn whiteouts_concern_lower_layers_wherever_they_stand() {
    let view = merged(vec![
        Tape::default().file("a", b"1").file("d/x", b"1").file("o/x", b"1").file("o/y", b"1").end(),
        Tape::default()
            .file("d/new", b"2")
            .file(".wh.d", b"")
            .file("o/z", b"2")
            .file("o/.wh..wh..opq", b"")
            .file(".wh.a", b"")
            .file("a", b"2")
            .file(".wh.gone", b"")
            .end(),
    ]);
    assert_eq!(view.paths(), ["a", "d", "d/new", "o", "o/z"]);
    assert_eq!(view.text("a"), "2");
    assert!(view.inode("o").xattrs.is_empty());
}

#[test]
fn odd_whiteouts() {
    let view = merged(vec![
        Tape::default().file("a", b"1").file("b", b"1").file("c", b"1").end(),
        Tape::default()
            // A whiteout stored as a hard link, as aufs did; names of aufs itself; a whiteout of a name
            // that no layer can hold.
            .hard_link(".wh.a", ".wh..wh.aufs")
            .file(".wh..wh.aufs", b"")
            .directory(".wh..wh.plnk/", 0o700)
            .file(".wh..wh.x", b"")
            .symlink(".wh.b", "anything")
            .end(),
    ]);
    assert_eq!(view.paths(), ["c"]);
}

#[test]
fn a_lower_directory_that_is_only_implied_keeps_its_metadata() {
    let layers = || {
        vec![
            Tape::default().directory("tmp/", 0o1777).directory("tmp/in/", 0o700).end(),
            Tape::default().file("tmp/in/x", b"1").end(),
        ]
    };
    let view = merged(layers());
    assert_eq!(view.inode("tmp").mode, 0o1777);
    let stack = stacked(layers());
    assert_eq!(stack[1].inode("tmp").mode, 0o1777);
    assert_eq!(stack[1].inode("tmp/in").mode, 0o700);
}

#[test]
fn files_behind_a_symbolic_link_of_a_lower_layer_land_where_it_leads() {
    let layers = || {
        vec![
            Tape::default().directory("usr/lib/", 0o751).symlink("lib", "usr/lib").end(),
            Tape::default().file("lib/a", b"1").file("lib/.wh.b", b"").end(),
        ]
    };
    let view = merged(layers());
    assert_eq!(view.target("lib"), "usr/lib");
    assert_eq!(view.text("usr/lib/a"), "1");
    let stack = stacked(layers());
    assert!(stack[1].get("lib").is_none());
    assert_eq!(stack[1].text("usr/lib/a"), "1");
    assert!(stack[1].inode("usr/lib/b").is_whiteout());
    assert_eq!(stack[1].inode("usr/lib").mode, 0o751);
}

#[test]
fn an_opaque_mark_through_a_lower_link_empties_the_link_s_place_only_when_it_is_described() {
    // The directory is described, so it replaces the link: what the link led to stays.
    let view = merged(vec![
        Tape::default().file("usr/lib/a", b"1").symlink("lib", "usr/lib").end(),
        Tape::default()
            .directory("lib/", 0o755)
            .file("lib/.wh..wh..opq", b"")
            .file("lib/b", b"2")
            .end(),
    ]);
    assert_eq!(view.paths(), ["lib", "lib/b", "usr", "usr/lib", "usr/lib/a"]);
}

#[test]
fn links_and_directories_replace_each_other_from_layer_to_layer() {
    let view = merged(vec![
        Tape::default().file("a/x", b"1").symlink("b", "a").end(),
        Tape::default().symlink("a", "b").directory("b/", 0o755).file("b/y", b"2").end(),
        Tape::default().directory("a/", 0o755).file("b", b"3").end(),
    ]);
    assert_eq!(view.paths(), ["a", "b"]);
    assert!(matches!(view.inode("a").kind, Kind::Directory(_)));
    assert_eq!(view.text("b"), "3");
}

#[test]
fn hard_links_to_files_of_lower_layers() {
    let layers = || {
        vec![
            Tape::default().file("a", b"hello").hard_link("other", "a").end(),
            Tape::default().hard_link("b", "a").hard_link("d/c", "b").end(),
        ]
    };
    let view = merged(layers());
    assert!(view.same_inode("a", "b") && view.same_inode("a", "d/c"));
    assert_eq!(view.text("other"), "hello");
    let stack = stacked(layers());
    // Copied up, as overlayfs does.
    assert!(stack[1].same_inode("a", "b") && stack[1].same_inode("a", "d/c"));
    assert_eq!(stack[1].text("b"), "hello");
    let view = merged(vec![
        Tape::default().file("a", b"new").file("b", b"old").end(),
        Tape::default().hard_link("b", "a").hard_link("c", "b").end(),
    ]);
    assert_eq!(view.text("c"), "new");
    let loops = Tape::default().hard_link("x", "y").hard_link("y", "x").end();
    assert!(refused(vec![loops]).chain().contains("no layer holds"));
    let error = refused(vec![Tape::default().end(), Tape::default().hard_link("b", "a").end()]);
    assert!(error.chain().contains("/b is a hard link to /a, which no layer holds"));
}

#[test]
fn a_stack_carries_the_marks_of_overlayfs() {
    let stack = stacked(vec![
        Tape::default().file("a", b"1").file("o/x", b"1").file(".wh.nothing", b"").end(),
        Tape::default().file(".wh.a", b"").file("o/.wh..wh..opq", b"").file("o/y", b"2").end(),
    ]);
    // Nothing lies below the first layer, so it needs no marks.
    assert_eq!(stack[0].paths(), ["a", "o", "o/x"]);
    assert!(stack[1].inode("a").is_whiteout());
    assert_eq!(stack[1].xattr("o", "trusted.overlay.opaque").unwrap(), b"y");
    assert_eq!(stack[1].paths(), ["a", "o", "o/y"]);
}

#[test]
fn thirty_one_layers_and_an_empty_one() {
    let mut layers: Vec<Vec<u8>> = (0..31)
        .map(|at| {
            Tape::default()
                .file(&format!("dir/file{at}"), format!("layer {at}").as_bytes())
                .file("last", at.to_string().as_bytes())
                .end()
        })
        .collect();
    layers.push(Tape::default().end());
    let view = merged(layers);
    assert_eq!(view.text("last"), "30");
    assert_eq!(view.paths().len(), 33);
}

#[test]
fn marks_of_overlayfs_inside_a_layer_are_left_out() {
    let view = merged(vec![
        Tape::default().file("d/x", b"1").end(),
        Tape::default()
            .pax(&[("SCHILY.xattr.trusted.overlay.opaque", b"y")])
            .directory("d/", 0o755)
            .end(),
    ]);
    assert_eq!(view.paths(), ["d", "d/x"]);
}

#[test]
fn a_real_device_0_0_in_a_layer_is_no_whiteout() {
    let device = Fields { name: b"a".to_vec(), kind: b'3', ..Fields::default() };
    let error = refused(vec![
        Tape::default().file("a", b"1").end(),
        Tape::default().raw(device, b"").end(),
    ]);
    assert!(error.chain().contains("/a is a character device 0/0"), "{}", error.chain());
}

#[test]
fn broken_images_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let source = format!("oci:{}:v1", dir.path().display());
    let fails = |what: &str, kind: ErrorKind| {
        let error = build(&source, &MemoryPublisher::default(), &options()).unwrap_err();
        assert_eq!(error.kind(), kind, "{what}: {}", error.chain());
        error.chain()
    };
    three().layout(dir.path());
    let blobs = files(&dir.path().join("blobs"));
    for blob in &blobs {
        let good = fs::read(blob).unwrap();
        let mut bad = good.clone();
        let middle = bad.len() / 2;
        bad[middle] ^= 1;
        fs::write(blob, &bad).unwrap();
        fails("a flipped bit", ErrorKind::Corrupt);
        fs::write(blob, &good).unwrap();
    }
    fs::remove_file(&blobs[0]).unwrap();
    fails("a missing blob", ErrorKind::NotFound);
    three().layout(dir.path());
    let missing = format!("oci:{}:nope", dir.path().display());
    let error = build(&missing, &MemoryPublisher::default(), &options()).unwrap_err();
    assert!(error.chain().contains("no image \"nope\""), "{}", error.chain());
    fs::write(dir.path().join("index.json"), b"{").unwrap();
    assert!(fails("no JSON", ErrorKind::Corrupt).contains("index.json is malformed"));
}
