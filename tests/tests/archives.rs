//! Trees and archives through the builder into the kernel: what EROFS shows of a layer is what the tree
//! was, and what GNU tar unpacks from the same archive.

#![allow(clippy::unwrap_used)]

mod builder_facts;
#[path = "../../builder/tests/support/mod.rs"]
mod support;
#[path = "../../builder/tests/support/tape.rs"]
mod tape;

use builder_facts::{Mounted, assert_same, run};
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, PermissionsExt, chown, symlink};
use std::path::Path;
use support::{MemoryPublisher, build, noise, options, tight};
use tape::Tape;

fn set_xattr(path: &Path, name: &[u8], value: &[u8]) {
    sys::file::xattr::set(path, name, value, sys::file::xattr::SetMode::Any).unwrap();
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
