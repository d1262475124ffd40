//! Trees and archives through the builder into the kernel: what EROFS shows of a layer is what the tree
//! was, and what GNU tar unpacks from the same archive.

#![allow(clippy::unwrap_used)]

#[path = "../../builder/tests/support/mod.rs"]
mod support;
#[path = "../../builder/tests/support/tape.rs"]
mod tape;

use layer::LayerId;
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::io::Read;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use support::{MemoryPublisher, build, options, tight};
use sys::mount::{Attributes, Erofs, Unmount};
use tape::Tape;

/// A layer in the kernel; unmounted when dropped.
struct Mounted {
    dir: tempfile::TempDir,
}

impl Mounted {
    fn new(publisher: &MemoryPublisher, id: LayerId) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let (metadata, data) = (dir.path().join("meta"), dir.path().join("data"));
        fs::write(&metadata, publisher.layer(id).metadata).unwrap();
        let mut bytes = publisher.data(id);
        bytes.resize(bytes.len().max(4096), 0);
        fs::write(&data, bytes).unwrap();
        let mounted = Self { dir };
        fs::create_dir(mounted.root()).unwrap();
        let erofs = Erofs { metadata: &metadata, device: Some(&data) };
        erofs
            .mount_detached(Attributes::default())
            .and_then(|mount| mount.attach(&mounted.root()))
            .unwrap();
        mounted
    }

    fn root(&self) -> PathBuf {
        self.dir.path().join("root")
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = sys::mount::unmount(&self.root(), Unmount::Lazy);
    }
}

/// Everything about one inode that `stat`, `getxattr`, `readlink` and `read` tell.
#[derive(Debug, PartialEq, Eq)]
struct Facts {
    mode: u32,
    owner: (u32, u32),
    rdev: u64,
    size: u64,
    links: u64,
    mtime: (i64, i64),
    xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    content: Vec<u8>,
    /// The first path of this inode, in path order.
    first_name: Vec<u8>,
}

/// Looks at a whole tree.
fn look(root: &Path) -> BTreeMap<Vec<u8>, Facts> {
    let mut paths = vec![PathBuf::new()];
    let mut all = Vec::new();
    while let Some(path) = paths.pop() {
        let full = root.join(&path);
        if full.symlink_metadata().unwrap().is_dir() {
            paths.extend(
                fs::read_dir(&full).unwrap().map(|entry| path.join(entry.unwrap().file_name())),
            );
        }
        all.push(path);
    }
    all.sort();
    let mut first_names = BTreeMap::new();
    let mut facts = BTreeMap::new();
    for path in all {
        let name = path.clone().into_os_string().into_vec();
        let full = if name.is_empty() { root.to_owned() } else { root.join(&path) };
        let stat = full.symlink_metadata().unwrap();
        let kind = stat.file_type();
        let content = if kind.is_symlink() {
            fs::read_link(&full).unwrap().into_os_string().into_vec()
        } else if kind.is_file() {
            let mut bytes = Vec::new();
            fs::File::open(&full).unwrap().read_to_end(&mut bytes).unwrap();
            bytes
        } else {
            Vec::new()
        };
        let device = kind.is_block_device() || kind.is_char_device();
        let xattrs = sys::file::xattr::list(&full).unwrap();
        facts.insert(
            name.clone(),
            Facts {
                mode: stat.mode(),
                owner: (stat.uid(), stat.gid()),
                rdev: if device { stat.rdev() } else { 0 },
                size: if kind.is_dir() { 0 } else { stat.size() },
                links: stat.nlink(),
                mtime: (stat.mtime(), stat.mtime_nsec()),
                xattrs: xattrs
                    .into_iter()
                    .map(|key| (key.clone(), sys::file::xattr::get(&full, &key).unwrap().unwrap()))
                    .collect(),
                content,
                first_name: first_names.entry(stat.ino()).or_insert(name).clone(),
            },
        );
    }
    facts
}

#[track_caller]
fn assert_same(have: &Path, want: &Path, what: &str) {
    let (have, want) = (look(have), look(want));
    let names = |facts: &BTreeMap<Vec<u8>, Facts>| facts.keys().cloned().collect::<Vec<_>>();
    assert_eq!(names(&have), names(&want), "{what}");
    for (path, facts) in &have {
        let path_text = layer::tree::display_path(path);
        assert!(facts.content == want[path].content, "{what}: content of {path_text}");
        assert_eq!(facts, &want[path], "{what}: {path_text}");
    }
}

fn run(program: &str, arguments: &[&OsStr]) {
    let output = Command::new(program).args(arguments).output().unwrap();
    assert!(output.status.success(), "{program} {arguments:?}: {output:?}");
}

fn set_xattr(path: &Path, name: &[u8], value: &[u8]) {
    sys::file::xattr::set(path, name, value, sys::file::xattr::SetMode::Any).unwrap();
}

fn noise(length: usize, seed: u64) -> Vec<u8> {
    let mut state = seed;
    (0..length)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) as u8
        })
        .collect()
}

/// A directory with everything that a layer must hold. What is last changes the times of directories,
/// so times come at the end.
fn plant(root: &Path) {
    fs::create_dir_all(root.join("a/b/c")).unwrap();
    fs::create_dir_all(root.join("many")).unwrap();
    for at in 0..3000 {
        fs::write(root.join(format!("many/file-{at:04}")), noise(at % 300, at as u64)).unwrap();
    }
    for (at, size) in [0, 1, 64, 65, 4096, 4097, 65_536, 1_000_001].into_iter().enumerate() {
        fs::write(root.join(format!("a/size{at}")), noise(size, 77 + at as u64)).unwrap();
    }
    fs::hard_link(root.join("a/size5"), root.join("a/b/hard")).unwrap();
    fs::hard_link(root.join("a/size7"), root.join("many/hard")).unwrap();
    symlink("../size5", root.join("a/b/link")).unwrap();
    symlink("t".repeat(4095), root.join("long-target")).unwrap();
    fs::hard_link(root.join("a/b/link"), root.join("linked-link")).unwrap();
    fs::write(root.join(OsStr::from_bytes(&[0xfe; 255])), b"arbitrary bytes").unwrap();
    fs::write(root.join("new\nline \x1b[0m"), b"odd").unwrap();
    let sparse = fs::File::create(root.join("sparse")).unwrap();
    sparse.set_len(50_000_000).unwrap();
    sparse.write_all_at(b"one", 10_000_000).unwrap();
    sparse.write_all_at(b"two", 49_999_000).unwrap();
    fs::File::create(root.join("hole")).unwrap().set_len(123_456_789).unwrap();
    for (name, kind) in [("null", "c 1 3"), ("big-minor", "c 10 70000"), ("disk", "b 8 1")] {
        let path = root.join(name);
        let mut arguments = vec![path.as_os_str()];
        arguments.extend(kind.split(' ').map(OsStr::new));
        run("mknod", &arguments);
    }
    run("mkfifo", &[root.join("fifo").as_os_str()]);
    let _ = std::os::unix::net::UnixListener::bind(root.join("socket")).unwrap();
    let file = root.join("a/size4");
    set_xattr(&file, b"user.binary", b"\0\xff\n=");
    set_xattr(&file, b"user.empty", b"");
    set_xattr(&file, b"user.bytes\xfe\xff", &[7; 3000]);
    set_xattr(&file, b"trusted.mine", b"1");
    let capability = b"\x01\0\0\x02\0\x04\0\0\0\0\0\0\0\0\0\0\0\0\0\0";
    set_xattr(&file, b"security.capability", capability);
    let acl = b"\x02\0\0\0\x01\0\x06\0\xff\xff\xff\xff\x02\0\x04\0\xe8\x03\0\0\x04\0\x04\0\xff\xff\xff\xff\x10\0\x06\0\xff\xff\xff\xff\x20\0\x04\0\xff\xff\xff\xff";
    set_xattr(&root.join("a/size6"), b"system.posix_acl_access", acl);
    set_xattr(&root.join("a/b"), b"system.posix_acl_default", acl);
    for at in 0..50 {
        set_xattr(&root.join(format!("many/file-{at:04}")), b"user.shared", b"the same everywhere");
    }
    chown(root.join("a/size1"), Some(4_294_967_294), Some(3_000_000_000)).unwrap();
    for (path, mode) in
        [("a/size2", 0o6755), ("a/size3", 0o000), ("many", 0o1777), ("a/b/c", 0o2750)]
    {
        fs::set_permissions(root.join(path), fs::Permissions::from_mode(mode)).unwrap();
    }
    for (path, time) in [
        ("a/size2", "1950-01-02 03:04:05.123456789 UTC"),
        ("a/size3", "2400-05-06 07:08:09.000000001 UTC"),
        ("long-target", "1969-12-31 23:59:59.999999999 UTC"),
        ("a", "2001-02-03 04:05:06.7 UTC"),
        ("", "1999-09-09 09:09:09.9 UTC"),
    ] {
        let path = root.join(path);
        run("touch", &["-h".as_ref(), "-d".as_ref(), OsStr::new(time), path.as_os_str()]);
    }
}

fn tar(root: &Path, file: &Path) {
    let flags = ["--format=pax", "--xattrs", "--xattrs-include=*", "--numeric-owner", "--sparse"];
    let mut arguments: Vec<&OsStr> = flags.iter().map(OsStr::new).collect();
    arguments.extend([
        "-cf".as_ref(),
        file.as_os_str(),
        "-C".as_ref(),
        root.as_os_str(),
        ".".as_ref(),
    ]);
    run("tar", &arguments);
}

fn untar(file: &Path, root: &Path) {
    fs::create_dir_all(root).unwrap();
    let flags = ["--xattrs", "--xattrs-include=*", "--numeric-owner", "-p", "--same-owner"];
    let mut arguments: Vec<&OsStr> = flags.iter().map(OsStr::new).collect();
    arguments.extend(["-xf".as_ref(), file.as_os_str(), "-C".as_ref(), root.as_os_str()]);
    run("tar", &arguments);
}

#[test]
fn the_kernel_shows_the_tree_that_was_built() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("root");
    fs::create_dir(&root).unwrap();
    plant(&root);
    for options in [options(), tight()] {
        let publisher = MemoryPublisher::default();
        let id = build(&root, &publisher, &options).unwrap().layer_id();
        let mounted = Mounted::new(&publisher, id);
        assert_same(&mounted.root(), &root, "directory");
    }
}

#[test]
fn the_kernel_shows_what_gnu_tar_unpacks() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("root");
    fs::create_dir(&root).unwrap();
    plant(&root);
    // Tar leaves sockets out.
    fs::remove_file(root.join("socket")).unwrap();
    run("touch", &["-d".as_ref(), "2020-02-02".as_ref(), root.as_os_str()]);
    let archive = dir.path().join("a.tar");
    tar(&root, &archive);
    let unpacked = dir.path().join("unpacked");
    untar(&archive, &unpacked);
    let publisher = MemoryPublisher::default();
    let id = build(&archive, &publisher, &options()).unwrap().layer_id();
    assert_eq!(id, build(&root, &publisher, &options()).unwrap().layer_id(), "directory = tar");
    let mounted = Mounted::new(&publisher, id);
    assert_same(&mounted.root(), &unpacked, "tar");
}

/// Archives that GNU tar can unpack; each is judged by what it unpacks.
#[test]
fn odd_archives_become_what_gnu_tar_unpacks() {
    let long = "n".repeat(180);
    let cases: Vec<(&str, Vec<u8>)> = vec![
        (
            "repeated paths and links to what was before",
            Tape::default()
                .directory("./", 0o755)
                .file("a", b"one")
                .hard_link("b", "a")
                .file("a", b"two")
                .symlink("s", "a")
                .file("s", b"no link any more")
                .end(),
        ),
        (
            "entries through a symbolic link of the archive",
            Tape::default()
                .directory("./", 0o755)
                .directory("usr/", 0o755)
                .directory("usr/lib/", 0o711)
                .symlink("lib", "usr/lib")
                .file("lib/x", b"x")
                .directory("usr/lib/", 0o711)
                .directory("usr/", 0o755)
                .directory("./", 0o755)
                .end(),
        ),
        (
            "PAX names, times and owners",
            Tape::default()
                .directory("./", 0o755)
                .pax(&[
                    ("path", long.as_bytes()),
                    ("mtime", b"-86400.25"),
                    ("uid", b"3000000000"),
                    ("SCHILY.xattr.user.bin", b"\0\n="),
                ])
                .file("cut", b"data")
                .directory("./", 0o755)
                .end(),
        ),
        (
            "PAX sparse 0.0",
            Tape::default()
                .directory("./", 0o755)
                .pax(&[
                    ("GNU.sparse.size", b"300000"),
                    ("GNU.sparse.numblocks", b"3"),
                    ("GNU.sparse.offset", b"4096"),
                    ("GNU.sparse.numbytes", b"512"),
                    ("GNU.sparse.offset", b"200000"),
                    ("GNU.sparse.numbytes", b"3"),
                    ("GNU.sparse.offset", b"300000"),
                    ("GNU.sparse.numbytes", b"0"),
                ])
                .file("s", &[&noise(512, 5)[..], b"end"].concat())
                .directory("./", 0o755)
                .end(),
        ),
    ];
    for (what, bytes) in cases {
        let dir = tempfile::tempdir().unwrap();
        let archive = dir.path().join("a.tar");
        fs::write(&archive, bytes).unwrap();
        let unpacked = dir.path().join("unpacked");
        untar(&archive, &unpacked);
        let publisher = MemoryPublisher::default();
        let id = build(&archive, &publisher, &options()).unwrap().layer_id();
        let mounted = Mounted::new(&publisher, id);
        assert_same(&mounted.root(), &unpacked, what);
    }
}

#[test]
fn a_sparse_terabyte_is_a_small_layer() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("root");
    fs::create_dir(&root).unwrap();
    let file = fs::File::create(root.join("terabyte")).unwrap();
    file.set_len(1 << 40).unwrap();
    file.write_all_at(b"needle", 700_000_000_123).unwrap();
    let publisher = MemoryPublisher::default();
    let built = build(&root, &publisher, &options()).unwrap();
    assert!(built.top().manifest.metadata_bytes < 2 << 20);
    assert_eq!(built.top().new_chunks, 1);
    let mounted = Mounted::new(&publisher, built.layer_id());
    let file = fs::File::open(mounted.root().join("terabyte")).unwrap();
    assert_eq!(file.metadata().unwrap().len(), 1 << 40);
    let mut bytes = [1; 8];
    file.read_exact_at(&mut bytes, 700_000_000_122).unwrap();
    assert_eq!(&bytes, b"\0needle\0");
    file.read_exact_at(&mut bytes, 400_000_000_000).unwrap();
    assert_eq!(bytes, [0; 8]);
}
