//! A directory as a source: what is kept, what is refused by name, and trees that change meanwhile.

#![allow(clippy::unwrap_used)]

mod support;

use builder::{BuildOptions, Phase, Progress, Source};
use layer::ErrorKind;
use layer::tree::Kind;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use support::{MemoryPublisher, build, options};

fn run(program: &str, arguments: &[&OsStr]) {
    let output = Command::new(program).args(arguments).output().unwrap();
    assert!(output.status.success(), "{program} {arguments:?}: {output:?}");
}

fn refused(root: &Path) -> layer::Error {
    let publisher = MemoryPublisher::default();
    let error = build(root, &publisher, &options()).unwrap_err();
    assert!(publisher.layers.lock().unwrap().is_empty());
    error
}

/// Does something to the tree when a phase begins, and keeps notices.
struct Meddler<F> {
    at: Phase,
    meddle: F,
    notices: Mutex<Vec<String>>,
}

impl<F: Fn() + Send + Sync> Progress for Meddler<F> {
    fn phase(&self, phase: Phase, _files: u64, _bytes: u64) {
        if phase == self.at {
            (self.meddle)();
        }
    }

    fn notice(&self, text: &str) {
        self.notices.lock().unwrap().push(text.to_owned());
    }
}

fn build_meddled(root: &Path, at: Phase, meddle: impl Fn() + Send + Sync) -> layer::Result<()> {
    let meddler = Meddler { at, meddle, notices: Mutex::default() };
    let source = Source::Directory(root.to_owned());
    let options = BuildOptions { threads: 1, ..options() };
    builder::build(&source, &MemoryPublisher::default(), &options, &meddler).map(|_| ())
}

#[test]
fn a_file_that_changes_meanwhile_is_an_error() {
    for at in [Phase::Digest, Phase::Encode] {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("changing");
        let meddles: [&(dyn Fn() + Send + Sync); 5] = [
            &|| fs::write(&file, vec![2; 100_000]).unwrap(),
            &|| fs::write(&file, b"shorter").unwrap(),
            &|| fs::remove_file(&file).unwrap(),
            &|| {
                fs::write(dir.path().join("other"), vec![1; 100_000]).unwrap();
                fs::rename(dir.path().join("other"), &file).unwrap();
            },
            &|| {
                fs::remove_file(&file).unwrap();
                std::os::unix::fs::symlink("/etc/passwd", &file).unwrap();
            },
        ];
        for (number, meddle) in meddles.into_iter().enumerate() {
            let _ = fs::remove_file(&file);
            fs::write(&file, vec![1; 100_000]).unwrap();
            let error = build_meddled(dir.path(), at, meddle).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Busy, "{at:?} {number}: {}", error.chain());
            assert!(error.chain().contains("/changing changed"), "{}", error.chain());
        }
    }
}

#[test]
fn a_directory_swapped_for_a_link_is_never_followed() {
    let dir = tempfile::tempdir().unwrap();
    let (root, outside) = (dir.path().join("root"), dir.path().join("outside"));
    fs::create_dir_all(root.join("d")).unwrap();
    fs::create_dir(&outside).unwrap();
    fs::write(root.join("d/file"), vec![1; 5000]).unwrap();
    fs::write(outside.join("file"), vec![1; 5000]).unwrap();
    let error = build_meddled(&root, Phase::Digest, || {
        fs::rename(root.join("d"), root.join("e")).unwrap();
        std::os::unix::fs::symlink(&outside, root.join("d")).unwrap();
    })
    .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy, "{}", error.chain());
}

#[test]
fn an_archive_that_changes_meanwhile_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("root");
    fs::create_dir(&root).unwrap();
    fs::write(root.join("file"), vec![1; 100_000]).unwrap();
    let tar = dir.path().join("a.tar");
    let arguments =
        ["-cf".as_ref(), tar.as_os_str(), "-C".as_ref(), root.as_os_str(), ".".as_ref()];
    run("tar", &arguments);
    let meddler = Meddler {
        at: Phase::Encode,
        meddle: || {
            let file = fs::OpenOptions::new().write(true).open(&tar).unwrap();
            std::os::unix::fs::FileExt::write_all_at(&file, b"changed", 2000).unwrap();
        },
        notices: Mutex::default(),
    };
    let source = Source::Archive(tar.clone());
    let publisher = MemoryPublisher::default();
    let error = builder::build(&source, &publisher, &options(), &meddler).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy, "{}", error.chain());
    assert!(publisher.layers.lock().unwrap().is_empty());
}

#[test]
fn a_real_device_0_0_is_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let node = dir.path().join("odd");
    run("mknod", &[node.as_os_str(), "c".as_ref(), "0".as_ref(), "0".as_ref()]);
    let error = refused(dir.path());
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(error.chain().contains("/odd is a character device 0/0"), "{}", error.chain());
}

#[test]
fn attributes_of_overlayfs_are_left_out_with_a_notice() {
    let dir = tempfile::tempdir().unwrap();
    let inner = dir.path().join("d");
    fs::create_dir(&inner).unwrap();
    for (name, value) in [
        ("trusted.overlay.opaque", "y"),
        ("trusted.overlay.redirect", "/etc"),
        ("user.overlay.opaque", "y"),
        ("user.mine", "1"),
    ] {
        let arguments = ["-n", name, "-v", value].map(OsStr::new);
        run("setfattr", &[&arguments[..], &[inner.as_os_str()]].concat());
    }
    let meddler = Meddler { at: Phase::Commit, meddle: || (), notices: Mutex::default() };
    let publisher = MemoryPublisher::default();
    let source = Source::Directory(dir.path().to_owned());
    let built = builder::build(&source, &publisher, &options(), &meddler).unwrap();
    let view = publisher.view(built.layer_id());
    assert_eq!(view.inode("d").xattrs.len(), 1);
    let notices = meddler.notices.into_inner().unwrap();
    assert_eq!(notices.len(), 3, "{notices:?}");
    assert!(notices.iter().all(|notice| notice.starts_with("/d: attribute ")));
}

#[test]
fn a_path_longer_than_path_max_and_three_hundred_levels() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("root");
    fs::create_dir(&root).unwrap();
    // Built from the inside, as no call takes such a path.
    let script = r#"cd "$1"; d=$(printf 'd%.0s' $(seq 200)); for i in $(seq 30); do mkdir $d; cd $d; done
        echo deep > file; cd "$1"; for i in $(seq 300); do mkdir s; cd s; done; echo low > file"#;
    run("bash", &["-ec".as_ref(), script.as_ref(), "-".as_ref(), root.as_os_str()]);
    let publisher = MemoryPublisher::default();
    let built = build(&root, &publisher, &options());
    let removed = Command::new("rm").arg("-rf").arg(&root).status().unwrap();
    assert!(removed.success());
    let view = publisher.view(built.unwrap().layer_id());
    assert_eq!(view.text(&(vec!["d".repeat(200); 30].join("/") + "/file")), "deep\n");
    assert_eq!(view.text(&("s/".repeat(300) + "file")), "low\n");
}

#[test]
fn hard_links_across_directories_are_one_inode() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir_all(dir.path().join("a/b")).unwrap();
    fs::create_dir(dir.path().join("z")).unwrap();
    fs::write(dir.path().join("z/one"), vec![3; 9000]).unwrap();
    fs::hard_link(dir.path().join("z/one"), dir.path().join("a/b/two")).unwrap();
    std::os::unix::fs::symlink("t", dir.path().join("z/link")).unwrap();
    fs::hard_link(dir.path().join("z/link"), dir.path().join("a/link")).unwrap();
    let publisher = MemoryPublisher::default();
    let view = publisher.view(build(dir.path(), &publisher, &options()).unwrap().layer_id());
    assert!(view.same_inode("z/one", "a/b/two"));
    assert!(view.same_inode("z/link", "a/link"));
    assert!(matches!(view.inode("z/link").kind, Kind::Symlink(_)));
}

#[test]
fn missing_sources_and_a_full_spool_disk_are_one_clear_line() {
    let error = Source::parse("/nonexistent/thing").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    assert!(error.to_string().contains("/nonexistent/thing"));
    let dir = tempfile::tempdir().unwrap();
    let small = Small::new(dir.path().join("small"));
    let packed = dir.path().join("zeros.gz");
    let script = "head -c 3000000 /dev/urandom | gzip -1 > \"$1\"";
    run("bash", &["-ec".as_ref(), script.as_ref(), "-".as_ref(), packed.as_os_str()]);
    let options = BuildOptions { spool_dir: small.0.clone(), ..options() };
    let error = build(&packed, &MemoryPublisher::default(), &options).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoSpace, "{}", error.chain());
    assert!(error.to_string().contains("spool file in"), "{}", error.chain());
}

/// A file system of one megabyte; unmounted when dropped.
struct Small(PathBuf);

impl Small {
    fn new(path: PathBuf) -> Self {
        fs::create_dir(&path).unwrap();
        let arguments = ["-t", "tmpfs", "-o", "size=1M", "small"].map(OsStr::new);
        run("mount", &[&arguments[..], &[path.as_os_str()]].concat());
        Self(path)
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}
