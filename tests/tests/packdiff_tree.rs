//! Stacks of layers in the kernel: a stack of image layers shows what the merged layer holds, and a diff
//! over its lower layers shows what the sandbox saw, after any sequence of changes.

#![allow(clippy::unwrap_used)]

mod builder_facts;
#[path = "../../builder/tests/support/mod.rs"]
mod support;
#[path = "../../builder/tests/support/tape.rs"]
mod tape;

use builder::{BuildOptions, DiffOptions, Silent, build_index, from_layer, merge, pack_diff};
use builder_facts::{Mounted, Stack, assert_same_but_links, assert_same_view, run};
use layer::LayerId;
use layer::manifest::LayerKind;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::{FileExt, PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};
use support::{Below, MemoryPublisher, build, options};
use tape::Tape;

/// A generator of numbers; the same seed gives the same changes.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % bound
    }

    fn bytes(&mut self, length: usize) -> Vec<u8> {
        (0..length).map(|_| self.below(256) as u8).collect()
    }

    fn pick<'a>(&mut self, paths: &'a [PathBuf]) -> Option<&'a PathBuf> {
        if paths.is_empty() { None } else { Some(&paths[self.below(paths.len())]) }
    }
}

fn plant(root: &Path, random: &mut Random) {
    for at in 0..6 {
        let dir = root.join(format!("d{at}/e{at}/f{at}"));
        fs::create_dir_all(&dir).unwrap();
        for (number, size) in [0, 30, 3000, 9000, 70_000, 200_000].into_iter().enumerate() {
            let parent = dir.ancestors().nth(number % 3).unwrap();
            fs::write(parent.join(format!("file{number}")), random.bytes(size)).unwrap();
        }
        symlink("file1", dir.join("link")).unwrap();
        fs::hard_link(dir.join("file0"), root.join(format!("d{at}/hard"))).unwrap();
        fs::set_permissions(dir, fs::Permissions::from_mode(0o2750)).unwrap();
    }
}

/// Everything below a folder: directories and the rest.
fn list(root: &Path) -> (Vec<PathBuf>, Vec<PathBuf>) {
    let (mut directories, mut others) = (vec![root.to_owned()], Vec::new());
    let mut at = 0;
    while at < directories.len() {
        for entry in fs::read_dir(&directories[at]).unwrap() {
            let path = entry.unwrap().path();
            let is_directory = path.symlink_metadata().unwrap().is_dir();
            if is_directory { directories.push(path) } else { others.push(path) }
        }
        at += 1;
    }
    directories.sort();
    others.sort();
    (directories, others)
}

/// Changes one thing. What the file system refuses (a directory into itself) is no change.
fn change(root: &Path, random: &mut Random, number: usize) {
    let (directories, others) = list(root);
    let inner = &directories[1..];
    let home = random.pick(&directories).unwrap().clone();
    let fresh = home.join(format!("new{number}"));
    let (Some(some), Some(other)) = (random.pick(&others).cloned(), random.pick(&others).cloned())
    else {
        fs::write(fresh, b"the last file is gone").unwrap();
        return;
    };
    let plain = some.symlink_metadata().unwrap().is_file();
    match random.below(16) {
        0 | 1 => {
            let size = random.below(100_000);
            fs::write(fresh, random.bytes(size)).unwrap();
        }
        2 if plain => {
            let file = fs::OpenOptions::new().write(true).open(&some).unwrap();
            file.write_all_at(b"changed", random.below(100_000) as u64).unwrap();
        }
        3 => fs::remove_file(&some).unwrap(),
        4 => fs::create_dir(fresh).unwrap(),
        5 if random.below(3) == 0 => {
            if let Some(directory) = random.pick(inner) {
                fs::remove_dir_all(directory).unwrap();
            }
        }
        6 | 7 => {
            if let Some(directory) = random.pick(inner) {
                let _ = fs::rename(directory, fresh);
            }
        }
        8 => fs::rename(&some, fresh).unwrap(),
        9 => fs::rename(&some, &other).unwrap(),
        10 => symlink("nowhere", fresh).unwrap(),
        11 => fs::hard_link(&some, fresh).unwrap(),
        12 if plain => {
            let mode = random.below(0o10000) as u32;
            fs::set_permissions(&some, fs::Permissions::from_mode(mode)).unwrap();
        }
        13 => {
            std::os::unix::fs::lchown(&some, Some(random.below(70_000) as u32), Some(5)).unwrap();
        }
        14 => {
            if let Some(directory) = random.pick(inner) {
                chown(directory, Some(7), Some(random.below(9) as u32)).unwrap();
                // Replaced: the new one hides the old one.
                if random.below(2) == 0 {
                    fs::remove_dir_all(directory).unwrap();
                    fs::create_dir(directory).unwrap();
                }
            }
        }
        15 if plain => {
            let mode = sys::file::xattr::SetMode::Any;
            sys::file::xattr::set(&some, b"user.note", &random.bytes(9), mode).unwrap();
        }
        _ => {
            if let Some(directory) = random.pick(inner) {
                let time: &OsStr = "1965-04-03 02:01:00.5 UTC".as_ref();
                run("touch", &["-d".as_ref(), time, directory.as_os_str()]);
            }
        }
    }
}

fn diff_options() -> DiffOptions {
    DiffOptions::new(BuildOptions { threads: 2, ..BuildOptions::new(LayerKind::Diff) })
}

/// Changes a stack at random, packs, compares; then goes on from the diff, three layers deep.
fn random_changes(seed: u64) {
    let mut random = Random(seed);
    let dir = tempfile::tempdir().unwrap();
    plant(dir.path(), &mut random);
    let publisher = MemoryPublisher::default();
    let mut layers = vec![build(dir.path(), &publisher, &options()).unwrap().layer_id()];
    let mut mounts = vec![Mounted::new(&publisher, layers[0])];
    for round in 0..3 {
        let roots: Vec<PathBuf> = mounts.iter().map(Mounted::root).collect();
        let sandbox = Stack::new(&roots, true);
        for number in 0..40 {
            change(&sandbox.view(), &mut random, round * 100 + number);
        }
        let below = Below { publisher: &publisher, layers: layers.clone() };
        let diff = pack_diff(&sandbox.upper(), &below, &publisher, &diff_options(), &Silent)
            .unwrap_or_else(|error| panic!("seed {seed} round {round}: {}", error.chain()));
        layers.push(diff.layer_id);
        mounts.push(Mounted::new(&publisher, diff.layer_id));
        let roots: Vec<PathBuf> = mounts.iter().map(Mounted::root).collect();
        let restored = Stack::new(&roots, false);
        let what = format!("seed {seed} round {round}");
        // Writing a renamed directory out ends links between it and names that stayed behind.
        assert_same_but_links(&restored.view(), &sandbox.view(), &what);
        merged_shows_the_same(&publisher, &layers, &sandbox.view(), &what);
    }
}

/// The layers merged by the builder are what overlayfs shows of them.
fn merged_shows_the_same(publisher: &MemoryPublisher, layers: &[LayerId], view: &Path, what: &str) {
    let mut merged = builder::Index::new();
    for &id in layers {
        let layer = from_layer(&publisher.view(id).tree, &publisher.layer(id).chunk_table).unwrap();
        merged = merge(merged, layer).unwrap();
        merged.clear_marks();
    }
    let built = build_index(&merged, publisher, &options(), &Silent).unwrap();
    let mounted = Mounted::new(publisher, built.layer_id);
    assert_same_but_links(&mounted.root(), view, &format!("{what}, merged"));
}

#[test]
fn a_diff_shows_what_the_sandbox_saw() {
    for seed in 1..=6 {
        random_changes(seed);
    }
}

/// Applies image layers to a stack in the kernel and to a merged layer; both must show the same.
#[test]
fn a_stack_of_image_layers_shows_what_the_merged_layer_holds() {
    let layers = [
        Tape::default()
            .directory("./", 0o755)
            .directory("usr/", 0o755)
            .directory("usr/lib/", 0o751)
            .symlink("lib", "usr/lib")
            .file("usr/lib/old", b"old")
            .file("a", &[1; 9000])
            .hard_link("b", "a")
            .directory("o/", 0o700)
            .file("o/x", b"x")
            .directory("tmp/", 0o1777)
            .end(),
        Tape::default()
            .file("lib/new", b"new")
            .file("lib/.wh.old", b"")
            .hard_link("c", "a")
            .file("o/.wh..wh..opq", b"")
            .file("o/y", b"y")
            .file("tmp/t", b"t")
            .end(),
        Tape::default().file(".wh.b", b"").file("c", b"replaced").symlink("o", "tmp").end(),
        Tape::default().directory("o/", 0o755).file("o/z", b"z").file("new/deep/er", b"1").end(),
    ];
    let publisher = MemoryPublisher::default();
    let mut mounts = Vec::new();
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image.tar");
    fs::write(&image, docker_archive(&layers)).unwrap();
    let source = builder::Source::Image(builder::ImageFormat::DockerArchive, image, None);
    let stacked = BuildOptions { image_layers: builder::ImageLayers::Stacked, ..options() };
    let built = builder::build(&source, &publisher, &stacked, &Silent).unwrap();
    for id in built.layer_ids() {
        mounts.push(Mounted::new(&publisher, id));
    }
    let roots: Vec<PathBuf> = mounts.iter().map(Mounted::root).collect();
    let stack = Stack::new(&roots, false);
    let merged = builder::build(&source, &publisher, &options(), &Silent).unwrap().layer_id();
    let mounted = Mounted::new(&publisher, merged);
    assert_same_view(&stack.view(), &mounted.root(), "stack");
    assert_eq!(fs::read(mounted.root().join("usr/lib/new")).unwrap(), b"new");
    assert!(!mounted.root().join("usr/lib/old").exists());
    assert!(mounted.root().join("tmp").metadata().unwrap().permissions().mode() & 0o1000 != 0);
}

fn docker_archive(layers: &[Vec<u8>]) -> Vec<u8> {
    use std::fmt::Write as _;
    let dir = tempfile::tempdir().unwrap();
    let mut diff_ids = String::new();
    let mut names = String::new();
    let mut tape = Tape::default();
    for (at, layer) in layers.iter().enumerate() {
        let file = dir.path().join("layer");
        fs::write(&file, layer).unwrap();
        let output = std::process::Command::new("sha256sum").arg(&file).output().unwrap();
        let hex = String::from_utf8(output.stdout).unwrap();
        let comma = if at == 0 { "" } else { "," };
        write!(diff_ids, "{comma}\"sha256:{}\"", &hex[..64]).unwrap();
        write!(names, "{comma}\"{at}.tar\"").unwrap();
        tape = tape.file(&format!("{at}.tar"), layer);
    }
    let config = format!(
        r#"{{"architecture":"amd64","os":"linux","rootfs":{{"type":"layers","diff_ids":[{diff_ids}]}},"history":[]}}"#
    );
    let manifest = format!(r#"[{{"Config":"c.json","RepoTags":null,"Layers":[{names}]}}]"#);
    tape.file("c.json", config.as_bytes()).file("manifest.json", manifest.as_bytes()).end()
}
