//! Refreshed git indexes, judged by git on the kernel's mount of the layer, alone and as the lowest layer
//! of a sandbox's overlay.
//!
//! The strict judge: a mount whose work tree has other bytes than it should, with the metadata as it is.
//! Git calls a file unchanged there only when it does not read it.

#![allow(clippy::unwrap_used)]

mod support;

use builder::{BuildOptions, Progress, Source};
use layer::LayerId;
use layer::manifest::LayerKind;
use layer::tree::{Body, Kind};
use std::fs;
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use support::MemoryPublisher;
use sys::mount::{Attributes, Erofs, Overlay, OverlayLower, OverlayUpper, Tmpfs, Unmount};
use sys::probe::{Capability, skip_test};

/// 2023-11-14: files of the work trees.
const THEN: i64 = 1_700_000_000;

/// A folder that becomes a layer, and the mounts of it.
struct World {
    folder: tempfile::TempDir,
    publisher: MemoryPublisher,
    mounts: Vec<PathBuf>,
}

/// A layer under its mount points.
struct Shown {
    /// The layer itself.
    layer: PathBuf,
    /// An overlay as a sandbox has it.
    sandbox: PathBuf,
}

impl World {
    fn new() -> Option<Self> {
        let folder = tempfile::Builder::new().prefix("lamella-git-").tempdir().unwrap();
        if skip_test("git", folder.path(), &[Capability::ErofsFileBacked]) {
            return None;
        }
        fs::create_dir(folder.path().join("tree")).unwrap();
        Some(Self { folder, publisher: MemoryPublisher::default(), mounts: Vec::new() })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// A repository with 300 files below the tree, all committed, all of one time.
    fn repository(&self, name: &str, setup: &[&[&str]]) -> PathBuf {
        let place = self.path("tree").join(name);
        fs::create_dir_all(place.join("dir/deep")).unwrap();
        for number in 0..300 {
            let content = format!("{number} of {name}\n").repeat(10 + number);
            let below = ["", "dir/", "dir/deep/"][number % 3];
            fs::write(place.join(format!("{below}file{number:03}")), content).unwrap();
        }
        fs::set_permissions(place.join("file000"), PermissionsExt::from_mode(0o755)).unwrap();
        symlink("dir/deep", place.join("link")).unwrap();
        let sha256 = setup.iter().any(|words| words.contains(&"sha256"));
        let format = format!("--object-format={}", if sha256 { "sha256" } else { "sha1" });
        git(&place, &["init", "-q", &format, "."]);
        for words in setup.iter().filter(|words| !words.contains(&"sha256")) {
            git(&place, words);
        }
        for file in files(&place) {
            set_time(&file, THEN, 123_456_789);
        }
        git(&place, &["add", "-A"]);
        git(&place, &["commit", "-q", "-m", "all"]);
        place
    }

    fn build(
        &self,
        change: impl FnOnce(&mut BuildOptions),
    ) -> (LayerId, builder::GitRefresh, Vec<String>) {
        let mut options = BuildOptions { threads: 2, ..BuildOptions::new(LayerKind::Workspace) };
        change(&mut options);
        let source = Source::parse(self.path("tree").to_str().unwrap()).unwrap();
        let notices = Notices::default();
        let built = builder::build(&source, &self.publisher, &options, &notices).unwrap();
        (built.layer_id(), built.top().git, notices.0.into_inner().unwrap())
    }

    /// Mounts a layer; with `spoilt`, files outside of repositories have other bytes.
    fn mount(&mut self, id: LayerId, spoilt: bool) -> Shown {
        let number = self.mounts.len();
        let (metadata, data) =
            (self.path(&format!("meta{number}")), self.path(&format!("data{number}")));
        fs::write(&metadata, &self.publisher.layer(id).metadata).unwrap();
        let mut bytes = self.publisher.data(id);
        if spoilt {
            self.spoil(id, &mut bytes);
        }
        fs::write(&data, bytes).unwrap();
        let erofs = Erofs { metadata: &metadata, device: Some(&data) };
        let lower = erofs.mount_detached(Attributes::default()).unwrap();
        let layer = self.attach(&lower, &format!("layer{number}"));
        let tmpfs = Tmpfs { name: "upper", mode: 0o755, size_bytes: None, inodes: None };
        let place = self.attach(
            &tmpfs.mount_detached(Attributes::default()).unwrap(),
            &format!("upper{number}"),
        );
        let open = |name: &str| {
            fs::create_dir(place.join(name)).unwrap();
            fs::File::open(place.join(name)).unwrap()
        };
        let (upper, work, base) = (open("upper"), open("work"), open("base"));
        let overlay = Overlay {
            name: "sandbox",
            lowers: &[OverlayLower::Path(&layer), OverlayLower::Fd(base.as_fd())],
            upper: Some(OverlayUpper { upper: upper.as_fd(), work: work.as_fd() }),
            volatile: false,
        };
        let overlay = overlay.mount_detached(Attributes::default()).unwrap();
        let sandbox = self.attach(&overlay, &format!("sandbox{number}"));
        Shown { layer, sandbox }
    }

    fn attach(&mut self, mount: &sys::mount::MountFd, name: &str) -> PathBuf {
        let path = self.path(name);
        fs::create_dir(&path).unwrap();
        mount.attach(&path).unwrap();
        self.mounts.push(path.clone());
        path
    }

    fn spoil(&self, id: LayerId, bytes: &mut [u8]) {
        let view = self.publisher.view(id);
        let mut spoilt = 0;
        for path in view.paths() {
            let Kind::Regular(file) = &view.inode(&path).kind else { continue };
            let Body::Extents(extents) = &file.body else { continue };
            if path.split('/').any(|name| name.starts_with(".git")) {
                continue;
            }
            for extent in extents {
                let start = extent.data_block as usize * 4096;
                let block = &mut bytes[start..start + extent.blocks as usize * 4096];
                block.iter_mut().for_each(|byte| *byte ^= 0x20);
                spoilt += 1;
            }
        }
        assert!(spoilt > 200);
    }

    /// What git says of a repository on a spoilt mount, alone and in a sandbox; both say the same.
    #[track_caller]
    fn status(&mut self, id: LayerId, repository: &str) -> Vec<String> {
        let shown = self.mount(id, true);
        let alone = status(&shown.layer.join(repository));
        assert_eq!(alone, status(&shown.sandbox.join(repository)), "alone and in a sandbox");
        alone
    }

    /// Builds, and expects every repository named to be clean on a spoilt mount.
    #[track_caller]
    fn clean(&mut self, repositories: &[&str]) -> LayerId {
        let (id, done, notices) = self.build(|_| {});
        assert_eq!((done.indexes as usize, notices.len()), (repositories.len(), 0), "{notices:?}");
        assert_eq!(done.refreshed, done.entries);
        for repository in repositories {
            assert_eq!(self.status(id, repository), [""; 0], "{repository}");
        }
        id
    }
}

impl Drop for World {
    fn drop(&mut self) {
        for mount in self.mounts.iter().rev() {
            let _ = sys::mount::unmount(mount, Unmount::Lazy);
        }
    }
}

#[derive(Default)]
struct Notices(Mutex<Vec<String>>);

impl Progress for Notices {
    fn notice(&self, text: &str) {
        self.0.lock().unwrap().push(text.to_owned());
    }
}

/// Git without the host's settings.
#[track_caller]
fn git(place: &Path, words: &[&str]) -> String {
    let mut command = Command::new("git");
    command.args([
        "-c",
        "user.name=Test",
        "-c",
        "user.email=test@localhost",
        "-c",
        "safe.directory=*",
    ]);
    command
        .args(["-c", "protocol.file.allow=always", "-c", "gc.auto=0"])
        .args(words)
        .current_dir(place);
    for name in ["GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"] {
        command.env_remove(name);
    }
    command.env("GIT_CONFIG_GLOBAL", "/dev/null").env("GIT_CONFIG_SYSTEM", "/dev/null");
    let output = command.env("GIT_OPTIONAL_LOCKS", "0").output().unwrap();
    let (text, errors) = (String::from_utf8(output.stdout).unwrap(), output.stderr);
    assert!(output.status.success(), "git {words:?}: {}", String::from_utf8_lossy(&errors));
    text
}

fn status(repository: &Path) -> Vec<String> {
    git(repository, &["status", "--porcelain"]).lines().map(str::to_owned).collect()
}

fn set_time(path: &Path, seconds: i64, nanos: u32) {
    let time = rustix::fs::Timespec { tv_sec: seconds, tv_nsec: nanos.into() };
    let times = rustix::fs::Timestamps { last_access: time, last_modification: time };
    let flags = rustix::fs::AtFlags::SYMLINK_NOFOLLOW;
    rustix::fs::utimensat(rustix::fs::CWD, path, &times, flags).unwrap();
}

/// Files and links below a folder, without `.git`.
fn files(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let entry = entry.unwrap();
        match entry.file_type().unwrap().is_dir() {
            true if entry.file_name() != ".git" => files.extend(self::files(&entry.path())),
            true => {}
            false => files.push(entry.path()),
        }
    }
    files
}

/// Other bytes of the same length, at the same time.
fn change_unseen(path: &Path) {
    let (mut bytes, before) = (fs::read(path).unwrap(), fs::metadata(path).unwrap());
    bytes[0] ^= 1;
    fs::write(path, bytes).unwrap();
    set_time(path, before.mtime(), before.mtime_nsec() as u32);
}

#[test]
fn git_finds_a_tree_unchanged_without_reading_it() {
    let versions: [(&str, &[&[&str]]); 7] = [
        ("two", &[&["config", "index.version", "2"]]),
        ("four", &[&["config", "index.version", "4"]]),
        ("threads", &[&["config", "index.version", "4"], &["config", "index.threads", "2"]]),
        (
            "unsealed",
            &[&["config", "feature.manyFiles", "true"], &["config", "index.skipHash", "true"]],
        ),
        ("long", &[&["sha256"]]),
        ("long-four", &[&["sha256"], &["config", "index.version", "4"]]),
        ("sparse", &[&["config", "index.sparse", "true"]]),
    ];
    for (name, setup) in versions {
        let Some(mut world) = World::new() else { return };
        let place = world.repository(name, setup);
        if name == "sparse" {
            git(&place, &["sparse-checkout", "set", "--cone", "dir/deep"]);
        }
        let before = fs::read(place.join(".git/index")).unwrap();
        let id = world.clean(&[name]);
        let after = world.publisher.view(id).bytes(&format!("{name}/.git/index"));
        assert_ne!(before, after);
        assert_eq!(before.len(), after.len());
    }
}

#[test]
fn extended_entries_stay_what_they_are() {
    let Some(mut world) = World::new() else { return };
    let place = world.repository("repo", &[]);
    git(&place, &["update-index", "--skip-worktree", "file003"]);
    git(&place, &["update-index", "--assume-unchanged", "file006"]);
    fs::write(place.join("intended"), b"").unwrap();
    git(&place, &["add", "-N", "intended"]);
    assert_eq!(fs::read(place.join(".git/index")).unwrap()[7], 3);
    let (id, done, _) = world.build(|_| {});
    assert_eq!(done.entries - done.refreshed, 0);
    assert_eq!(world.status(id, "repo"), [" A intended"]);
    let flags = git(&world.mounts[0].join("repo"), &["ls-files", "-v", "file003", "file006"]);
    assert_eq!(flags, "S file003\nh file006\n");
}

#[test]
fn what_changed_shows_as_it_did() {
    let Some(mut world) = World::new() else { return };
    let place = world.repository("repo", &[]);
    change_unseen(&place.join("file003"));
    set_time(&place.join("file003"), THEN + 1, 0);
    fs::write(place.join("dir/file001"), "another length").unwrap();
    fs::remove_file(place.join("dir/file004")).unwrap();
    fs::set_permissions(place.join("file006"), PermissionsExt::from_mode(0o755)).unwrap();
    fs::write(place.join("new"), "untracked").unwrap();
    fs::write(place.join("staged"), "staged").unwrap();
    git(&place, &["add", "staged"]);
    fs::remove_file(place.join("link")).unwrap();
    symlink("dir/deeq", place.join("link")).unwrap();
    fs::remove_file(place.join("file009")).unwrap();
    symlink("file012", place.join("file009")).unwrap();
    // The same content, written anew: not changed.
    fs::write(place.join("file012"), fs::read(place.join("file012")).unwrap()).unwrap();
    let before = status(&place);
    assert_eq!(before.len(), 8, "{before:?}");
    let (id, done, _) = world.build(|_| {});
    assert_eq!(done.entries - done.refreshed, 5);
    assert_eq!(world.status(id, "repo"), before);
    let whole = world.mount(id, false);
    assert_eq!(status(&whole.sandbox.join("repo")), before);
    assert_eq!(git(&whole.sandbox.join("repo"), &["diff"]), git(&place, &["diff"]));
}

#[test]
fn a_change_that_no_clock_saw_is_found() {
    for minimal in [false, true] {
        let Some(mut world) = World::new() else { return };
        let place = world.repository("repo", &[]);
        if minimal {
            git(&place, &["config", "core.checkStat", "minimal"]);
            git(&place, &["config", "core.trustctime", "false"]);
        }
        // Written in the moment of the index, with the length and the time that it knows.
        change_unseen(&place.join("file003"));
        change_unseen(&place.join("dir/file001"));
        set_time(&place.join(".git/index"), THEN, 0);
        let before = status(&place);
        assert_eq!(before, [" M dir/file001", " M file003"]);
        let (id, done, _) = world.build(|_| {});
        assert_eq!(done.entries - done.refreshed, 2);
        assert_eq!(world.status(id, "repo"), before);
        // The index is younger now than its files.
        let view = world.publisher.view(id);
        assert_eq!(view.inode("repo/.git/index").mtime.secs, THEN + 1);
    }
}

#[test]
fn a_sandbox_that_writes_is_seen() {
    let Some(mut world) = World::new() else { return };
    world.repository("repo", &[]);
    let id = world.clean(&["repo"]);
    let sandbox = world.mount(id, false).sandbox.join("repo");
    change_unseen(&sandbox.join("file003"));
    fs::write(sandbox.join("dir/file001"), "another length").unwrap();
    assert_eq!(status(&sandbox), [" M dir/file001", " M file003"]);
    git(&sandbox, &["commit", "-q", "-a", "-m", "more"]);
    assert_eq!(status(&sandbox), [""; 0]);
}

#[test]
fn equal_repositories_submodules_and_further_work_trees_are_clean() {
    let Some(mut world) = World::new() else { return };
    let place = world.repository("repo", &[]);
    let whole = world.repository("module", &[]);
    git(&place, &["submodule", "--quiet", "add", whole.to_str().unwrap(), "sub"]);
    git(&place, &["commit", "-q", "-m", "submodule"]);
    let copied = Command::new("cp").arg("-a").arg(&whole).arg(world.path("tree/copy")).status();
    assert!(copied.unwrap().success());
    world.clean(&["repo", "repo/sub", "module", "copy"]);
    // Of a further work tree git keeps absolute paths: it has to lie where it will be in a sandbox.
    git(&place, &["worktree", "add", "-q", world.path("tree/further").to_str().unwrap()]);
    let inside = |file: &Path, text: &str| fs::write(file, text).unwrap();
    inside(&world.path("tree/further/.git"), "gitdir: /repo/.git/worktrees/further\n");
    let (id, done, _) = world.build(|_| {});
    assert_eq!((done.indexes, done.entries - done.refreshed), (5, 0));
    let shown = world.mount(id, true);
    let work_tree = shown.sandbox.join("further");
    let directory =
        format!("--git-dir={}", shown.sandbox.join("repo/.git/worktrees/further").display());
    let here = format!("--work-tree={}", work_tree.display());
    // The submodule is not checked out there.
    let said =
        git(&work_tree, &[&directory, &here, "status", "--porcelain", "--ignore-submodules"]);
    assert_eq!(said, "");
}

#[test]
fn the_same_tree_with_a_repository_is_the_same_layer_from_an_archive() {
    let Some(world) = World::new() else { return };
    world.repository("repo", &[]);
    let (id, ..) = world.build(|_| {});
    let archive = world.path("tree.tar");
    let packed = Command::new("tar")
        .args(["--format=pax", "--numeric-owner", "-cf"])
        .arg(&archive)
        .arg("-C")
        .arg(world.path("tree"))
        .arg(".")
        .status();
    assert!(packed.unwrap().success());
    let options = BuildOptions { threads: 1, ..BuildOptions::new(LayerKind::Workspace) };
    let from_archive = support::build(&archive, &MemoryPublisher::default(), &options).unwrap();
    assert_eq!(from_archive.layer_id(), id);
}

#[test]
fn indexes_that_stay_are_the_source_s() {
    let Some(mut world) = World::new() else { return };
    let place = world.repository("repo", &[]);
    let index = place.join(".git/index");
    let same = |world: &World, id: LayerId| {
        let view = world.publisher.view(id);
        assert_eq!(view.bytes("repo/.git/index"), fs::read(&index).unwrap());
        let mtime = view.inode("repo/.git/index").mtime;
        assert_eq!(mtime.secs, fs::metadata(&index).unwrap().mtime());
    };
    // By choice, and by the kind of the layer.
    let (id, done, _) = world.build(|options| options.refresh_git_index = false);
    same(&world, id);
    assert_eq!(done, builder::GitRefresh::default());
    assert!(!BuildOptions::new(LayerKind::Base).refresh_git_index);
    // Because nobody understands them: a split one, a damaged one.
    git(&place, &["update-index", "--split-index"]);
    let (id, _, notices) = world.build(|_| {});
    same(&world, id);
    assert!(
        notices[0].contains("repo/.git/index") && notices[0].contains("unknown form"),
        "{notices:?}"
    );
    fs::write(&index, b"DIRC and nothing that anybody knows").unwrap();
    let (id, _, notices) = world.build(|_| {});
    same(&world, id);
    assert_eq!(notices.len(), 1);
    // Git would read every file: the judge is no yes-man.
    git(&place, &["read-tree", "HEAD"]);
    let (id, ..) = world.build(|options| options.refresh_git_index = false);
    assert!(world.status(id, "repo").len() > 200);
}
