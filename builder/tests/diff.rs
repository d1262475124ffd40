//! pack_diff over real overlay mounts: what a sandbox saw, the diff layer over its lower layer shows too.

#![allow(clippy::unwrap_used)]

mod support;

use builder::{
    BuildOptions, BuiltLayer, DiffOptions, NoLowerLayers, Silent, build_index, from_layer, merge,
    pack_diff,
};
use layer::ErrorKind;
use layer::manifest::LayerKind;
use layer::tree::Kind;
use std::fs;
use std::os::unix::fs::{FileExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use support::{Below, MemoryPublisher, View, build, noise, options};

/// Directories of one overlay mount; unmounted when dropped.
struct Overlay {
    dir: tempfile::TempDir,
}

impl Overlay {
    fn new(plant: impl Fn(&Path)) -> Self {
        let overlay = Self { dir: tempfile::tempdir().unwrap() };
        for name in ["lower", "upper", "work", "merged"] {
            fs::create_dir(overlay.path(name)).unwrap();
        }
        plant(&overlay.path("lower"));
        let layers = format!(
            "lowerdir={},upperdir={},workdir={},redirect_dir=on,metacopy=off,index=off,xino=off",
            overlay.path("lower").display(),
            overlay.path("upper").display(),
            overlay.path("work").display()
        );
        run("mount", &["-t", "overlay", "overlay", "-o", &layers, &overlay.text("merged")]);
        overlay
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn text(&self, name: &str) -> String {
        self.path(name).to_str().unwrap().to_owned()
    }

    /// A path as the sandbox sees it.
    fn at(&self, path: &str) -> PathBuf {
        self.path("merged").join(path)
    }
}

impl Drop for Overlay {
    fn drop(&mut self) {
        let _ = Command::new("umount").args(["-l", &self.text("merged")]).status();
    }
}

fn run(program: &str, arguments: &[&str]) {
    let output = Command::new(program).args(arguments).output().unwrap();
    assert!(output.status.success(), "{program} {arguments:?}: {output:?}");
}

fn diff_options() -> DiffOptions {
    DiffOptions::new(BuildOptions { threads: 2, ..BuildOptions::new(LayerKind::Diff) })
}

/// Builds the lower directory, packs the upper one, and compares the two layers together with what the
/// mount shows. Returns the store and the diff.
fn compare(overlay: &Overlay) -> (MemoryPublisher, BuiltLayer) {
    let publisher = MemoryPublisher::default();
    let lower = build(&overlay.path("lower"), &publisher, &options()).unwrap().layer_id();
    let below = Below { publisher: &publisher, layers: vec![lower] };
    let diff = pack_diff(&overlay.path("upper"), &below, &publisher, &diff_options(), &Silent)
        .unwrap_or_else(|error| panic!("{}", error.chain()));
    let index =
        |id| from_layer(&publisher.view(id).tree, &publisher.layer(id).chunk_table).unwrap();
    let mut together = merge(index(lower), index(diff.layer_id)).unwrap();
    together.clear_marks();
    let together = build_index(&together, &publisher, &options(), &Silent).unwrap();
    // A plain copy has stable inode numbers, which overlayfs does not promise.
    run("cp", &["-a", &format!("{}/.", overlay.text("merged")), &overlay.text("copy")]);
    let seen = MemoryPublisher::default();
    let truth = build(&overlay.path("copy"), &seen, &options()).unwrap().layer_id();
    assert_same(&publisher.view(together.layer_id), &seen.view(truth));
    (publisher, diff)
}

fn assert_same(have: &View, want: &View) {
    assert_eq!(have.paths(), want.paths());
    for path in have.paths().iter().map(String::as_str).chain([""]) {
        let (a, b) = (have.inode(path), want.inode(path));
        assert_eq!((a.mode, a.uid, a.gid, a.mtime), (b.mode, b.uid, b.gid, b.mtime), "{path}");
        assert_eq!(a.xattrs, b.xattrs, "{path}");
        match (&a.kind, &b.kind) {
            (Kind::Directory(_), Kind::Directory(_)) => {}
            (Kind::Regular(_), Kind::Regular(_)) => {
                assert!(have.bytes(path) == want.bytes(path), "{path}");
            }
            (a, b) => assert_eq!(a, b, "{path}"),
        }
        for other in have.paths() {
            assert_eq!(
                have.same_inode(path, &other),
                want.same_inode(path, &other),
                "{path} {other}"
            );
        }
    }
}

fn plant(root: &Path) {
    fs::create_dir_all(root.join("dir/sub/deep")).unwrap();
    fs::create_dir(root.join("gone")).unwrap();
    for (at, size) in [10, 100, 5000, 70_000, 300_000].into_iter().enumerate() {
        fs::write(root.join(format!("dir/file{at}")), noise(size, at as u64)).unwrap();
        fs::write(root.join(format!("dir/sub/deep/other{at}")), noise(size + 1, at as u64))
            .unwrap();
    }
    fs::write(root.join("gone/a"), b"a").unwrap();
    fs::write(root.join("top"), b"top").unwrap();
    fs::hard_link(root.join("dir/file2"), root.join("dir/linked")).unwrap();
    symlink("file1", root.join("dir/sub/link")).unwrap();
    let sparse = fs::File::create(root.join("dir/sparse")).unwrap();
    sparse.set_len(3_000_000).unwrap();
    sparse.write_all_at(b"data", 1_500_000).unwrap();
}

#[test]
fn every_kind_of_change() {
    let overlay = Overlay::new(plant);
    let at = |path: &str| overlay.at(path);
    fs::remove_file(at("top")).unwrap();
    fs::remove_dir_all(at("gone")).unwrap();
    // A directory that is replaced hides what was there.
    fs::create_dir(at("gone")).unwrap();
    fs::write(at("gone/new"), b"new").unwrap();
    fs::set_permissions(at("dir/file0"), fs::Permissions::from_mode(0o4711)).unwrap();
    std::os::unix::fs::chown(at("dir/file1"), Some(3_000_000_000), Some(7)).unwrap();
    fs::OpenOptions::new()
        .write(true)
        .open(at("dir/file4"))
        .unwrap()
        .write_all_at(b"changed", 200_000)
        .unwrap();
    // Copy-up breaks the hard link; a new one is made.
    fs::write(at("dir/linked"), b"no link any more").unwrap();
    fs::hard_link(at("dir/linked"), at("dir/sub/linked")).unwrap();
    symlink("/absolute", at("absolute")).unwrap();
    fs::remove_file(at("dir/sub/link")).unwrap();
    fs::create_dir(at("dir/sub/link")).unwrap();
    run("mkfifo", &[at("fifo").to_str().unwrap()]);
    run("mknod", &[at("null").to_str().unwrap(), "c", "1", "3"]);
    let attributed = at("dir/file3");
    run("setfattr", &["-n", "user.note", "-v", "0x00ff0a", attributed.to_str().unwrap()]);
    run("touch", &["-d", "1960-02-03 04:05:06.789", at("absolute").to_str().unwrap(), "-h"]);
    let (publisher, diff) = compare(&overlay);
    let view = publisher.view(diff.layer_id);
    assert!(view.inode("top").is_whiteout());
    assert_eq!(view.xattr("gone", "trusted.overlay.opaque").unwrap(), b"y");
    assert!(view.get("dir/sub/deep").is_none(), "what did not change is not in the diff");
    // One changed piece of a large file is one new chunk; the others are known.
    assert!(diff.reused_plain_bytes >= 200_000, "{diff:?}");
}

#[test]
fn renamed_directories_are_written_out_without_reading_data() {
    let overlay = Overlay::new(plant);
    let at = |path: &str| overlay.at(path);
    fs::rename(at("dir"), at("moved")).unwrap();
    let (_, diff) = compare(&overlay);
    assert_eq!(diff.new_chunks, 0, "{diff:?}");
}

#[test]
fn renamed_directories_with_changes_inside_and_renames_inside_of_renames() {
    let overlay = Overlay::new(plant);
    let at = |path: &str| overlay.at(path);
    fs::rename(at("dir/sub/deep"), at("dir/sub/deeper")).unwrap();
    fs::rename(at("dir"), at("moved")).unwrap();
    fs::remove_file(at("moved/file0")).unwrap();
    fs::write(at("moved/file1"), b"other").unwrap();
    fs::write(at("moved/sub/new"), b"new").unwrap();
    fs::remove_file(at("moved/sub/deeper/other0")).unwrap();
    fs::create_dir(at("dir")).unwrap();
    fs::write(at("dir/fresh"), b"fresh").unwrap();
    fs::rename(at("moved/sub/deeper"), at("dir/out")).unwrap();
    fs::rename(at("gone"), at("dir/out/gone")).unwrap();
    let (publisher, diff) = compare(&overlay);
    let view = publisher.view(diff.layer_id);
    for path in view.paths() {
        let inode = view.inode(&path);
        assert!(
            inode.xattrs.iter().all(|xattr| xattr.name != b"trusted.overlay.redirect"),
            "{path}"
        );
        assert!(!path.starts_with("moved/") || !inode.is_whiteout(), "{path} hides nothing");
    }
}

#[test]
fn a_repeated_pack_diff_is_the_same_layer_and_stores_nothing() {
    let overlay = Overlay::new(plant);
    fs::write(overlay.at("dir/added"), noise(200_000, 99)).unwrap();
    let (publisher, first) = compare(&overlay);
    let below = Below { publisher: &publisher, layers: Vec::new() };
    let again =
        pack_diff(&overlay.path("upper"), &below, &publisher, &diff_options(), &Silent).unwrap();
    assert_eq!(again.layer_id, first.layer_id);
    assert_eq!(again.new_chunks, 0);
}

#[test]
fn includes_and_excludes() {
    let overlay = Overlay::new(plant);
    let at = |path: &str| overlay.at(path);
    for path in ["keep", "secrets", "tmp"] {
        fs::create_dir_all(at(path).join("inner")).unwrap();
        fs::write(at(path).join("inner/file.log"), b"log").unwrap();
        fs::write(at(path).join("inner/file.txt"), b"text").unwrap();
    }
    fs::remove_file(at("top")).unwrap();
    let publisher = MemoryPublisher::default();
    let mut options = diff_options();
    options.exclude = vec!["/secrets".into(), "tmp/**".into(), "**/*.log".into()];
    let pack = |options: &DiffOptions| {
        let built = pack_diff(&overlay.path("upper"), &NoLowerLayers, &publisher, options, &Silent);
        publisher.view(built.unwrap().layer_id).paths()
    };
    assert_eq!(pack(&options), ["keep", "keep/inner", "keep/inner/file.txt", "tmp", "top"]);
    options.include = vec!["keep/inner".into()];
    assert_eq!(pack(&options), ["keep", "keep/inner", "keep/inner/file.txt"]);
    options.include = vec!["[".into()];
    let error = pack_diff(&overlay.path("upper"), &NoLowerLayers, &publisher, &options, &Silent)
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
}

#[test]
fn what_a_diff_cannot_stand_on_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let upper = dir.path().join("upper");
    fs::create_dir_all(upper.join("d")).unwrap();
    let pack =
        || pack_diff(&upper, &NoLowerLayers, &MemoryPublisher::default(), &diff_options(), &Silent);
    let directory = upper.join("d");
    let directory = directory.to_str().unwrap();
    run("setfattr", &["-n", "trusted.overlay.redirect", "-v", "/elsewhere", directory]);
    let error = pack().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    assert!(error.chain().contains("/d was renamed from /elsewhere"), "{}", error.chain());
    run("setfattr", &["-x", "trusted.overlay.redirect", directory]);
    fs::write(upper.join("f"), b"").unwrap();
    let file = upper.join("f");
    run("setfattr", &["-n", "trusted.overlay.metacopy", file.to_str().unwrap()]);
    let error = pack().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.chain().contains("/f: its content is in a lower layer"), "{}", error.chain());
}
