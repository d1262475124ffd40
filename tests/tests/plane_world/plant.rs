//! The tree that every plane shows: all kinds of files, at the borders of everything.

use crate::fsd_world::Random;
use std::fs::{self, File, Permissions};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, PermissionsExt, chown, symlink};
use std::path::Path;
use sys::file::xattr::{self, SetMode};
use sys::file::{Device, FileKind, Time};

const KIB: u64 = 1024;

/// Sizes of files: around blocks, chunks, readahead windows and what is kept inline.
pub const SIZES: [u64; 22] = [
    0, 1, 5, 100, 2047, 4000, 4095, 4096, 4097, 8191, 8193, 12_288, 65_535, 65_536, 65_537,
    131_071, 131_073, 262_147, 524_288, 1_048_575, 1_048_593, 5_000_011,
];

/// Names in the folder with many of them.
pub const MANY: usize = 3000;

pub fn plant(root: &Path) {
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    fs::set_permissions(root, Permissions::from_mode(0o755)).unwrap();
    for folder in ["sizes", "sparse", "many", "names", "links", "special", "rights", "xattrs"] {
        fs::create_dir(root.join(folder)).unwrap();
    }
    for folder in ["times", "bin", "deep", "empty"] {
        fs::create_dir(root.join(folder)).unwrap();
    }
    for size in SIZES {
        fs::write(root.join(format!("sizes/{size}")), random.bytes(size as usize)).unwrap();
    }
    sparse(&root.join("sparse"), &mut random);
    for index in 0..MANY {
        let name = format!("{index}-{}", "x".repeat(index * 7 % 200));
        fs::write(root.join("many").join(name), format!("{index}")).unwrap();
    }
    names(&root.join("names"));
    links(&root.join("links"));
    special(&root.join("special"));
    rights(&root.join("rights"));
    xattrs(&root.join("xattrs"));
    fs::copy("/usr/bin/busybox", root.join("bin/busybox")).unwrap();
    let script = format!("#!{}/bin/busybox sh\necho \"script $1\"\n", "/nowhere");
    fs::write(root.join("bin/lost"), script).unwrap();
    fs::write(root.join("bin/script"), "#!/bin/sh\necho \"script $1\"\n").unwrap();
    for name in ["busybox", "lost", "script"] {
        fs::set_permissions(root.join("bin").join(name), Permissions::from_mode(0o755)).unwrap();
    }
    let mut deep = root.join("deep");
    for level in 0..60 {
        deep.push(format!("level-{level}"));
        fs::create_dir(&deep).unwrap();
    }
    fs::write(deep.join("bottom"), "reached").unwrap();
    // Last: every change of a folder sets its time.
    times(&root.join("times"));
}

fn sparse(folder: &Path, random: &mut Random) {
    let mut make = |name: &str, size: u64, islands: &[(u64, usize)]| {
        let file = File::create(folder.join(name)).unwrap();
        for (offset, bytes) in islands {
            file.write_all_at(&random.bytes(*bytes), *offset).unwrap();
        }
        file.set_len(size).unwrap();
        file.sync_all().unwrap();
    };
    make("middle", 600 * KIB, &[(0, 65_536), (512 * 1024, 88 * 1024)]);
    make("leading", 1024 * KIB + 10_000, &[(1024 * KIB, 10_000)]);
    make("trailing", 3 * 1024 * KIB + 123, &[(0, 5000)]);
    make("all", 2 * 1024 * KIB, &[]);
    let islands: Vec<_> = (0..16).map(|at| (at * 128 * KIB + 64 * KIB, 4096)).collect();
    make("islands", 16 * 128 * KIB, &islands);
    fs::write(folder.join("zeros"), vec![0; 300_000]).unwrap();
}

fn names(folder: &Path) {
    let long = "n".repeat(255);
    for name in
        ["-n", " leading", "trailing ", "new\nline", "tab\t", "ü", "~", ".hidden", "...", &long]
    {
        fs::write(folder.join(name), name).unwrap();
    }
}

fn links(folder: &Path) {
    fs::write(folder.join("hard-a"), "three names").unwrap();
    fs::create_dir(folder.join("inner")).unwrap();
    fs::hard_link(folder.join("hard-a"), folder.join("hard-b")).unwrap();
    fs::hard_link(folder.join("hard-a"), folder.join("inner/hard-c")).unwrap();
    let long = format!("{}hard-a", "./".repeat(2000));
    for (name, target) in [
        ("to-file", "hard-a"),
        ("to-folder", "inner"),
        ("through", "to-folder/hard-c"),
        ("nowhere", "missing/file"),
        ("loop-a", "loop-b"),
        ("loop-b", "loop-a"),
        ("self", "self"),
        ("absolute", "/proc/self/status"),
        ("long", &long),
        ("up", "../sizes/100"),
    ] {
        symlink(target, folder.join(name)).unwrap();
    }
    // More links than the kernel follows.
    symlink("hard-a", folder.join("chain-0")).unwrap();
    for index in 1..45 {
        symlink(format!("chain-{}", index - 1), folder.join(format!("chain-{index}"))).unwrap();
    }
}

fn special(folder: &Path) {
    let at = File::open(folder).unwrap();
    for (name, kind, mode, major, minor) in [
        ("fifo", FileKind::Fifo, 0o644, 0, 0),
        ("null", FileKind::CharDevice, 0o666, 1, 3),
        ("char", FileKind::CharDevice, 0o600, 10, 300),
        ("block", FileKind::BlockDevice, 0o640, 259, 70_000),
    ] {
        let device = Device { major, minor };
        sys::file::make_node_at(at.as_fd(), name.as_bytes(), kind, mode, device).unwrap();
    }
    drop(std::os::unix::net::UnixListener::bind(folder.join("socket")).unwrap());
}

fn rights(folder: &Path) {
    for mode in [0o000, 0o400, 0o444, 0o600, 0o640, 0o644, 0o711, 0o755, 0o4755, 0o2755, 0o6711] {
        for owner in [0_u32, 1000, 4_000_000_000] {
            let path = folder.join(format!("{mode:04o}-{owner}"));
            fs::write(&path, "x").unwrap();
            chown(&path, Some(owner), Some(owner)).unwrap();
            fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
        }
    }
    for mode in [0o700, 0o711, 0o755, 0o1777, 0o2775] {
        let path = folder.join(format!("folder-{mode:04o}"));
        fs::create_dir(&path).unwrap();
        fs::write(path.join("inside"), "x").unwrap();
        chown(&path, Some(0), Some(1000)).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
    }
    // User 1000 may read, the group may not, by an access list.
    let path = folder.join("listed");
    fs::write(&path, "x").unwrap();
    fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
    xattr::set(&path, b"system.posix_acl_access", &access_list(), SetMode::Any).unwrap();
}

/// `user::rw-, user:1000:r--, group::---, mask::r--, other::---` as the kernel keeps it.
fn access_list() -> Vec<u8> {
    let mut bytes = 2_u32.to_le_bytes().to_vec();
    for (tag, rights, id) in
        [(1_u16, 6_u16, -1_i32), (2, 4, 1000), (4, 0, -1), (16, 4, -1), (32, 0, -1)]
    {
        bytes.extend(tag.to_le_bytes());
        bytes.extend(rights.to_le_bytes());
        bytes.extend(id.to_le_bytes());
    }
    bytes
}

fn xattrs(folder: &Path) {
    let set = |name: &str, key: &str, value: &[u8]| {
        xattr::set(&folder.join(name), key.as_bytes(), value, SetMode::Any).unwrap();
    };
    for name in ["none", "few", "large", "capable"] {
        fs::write(folder.join(name), name).unwrap();
    }
    fs::create_dir(folder.join("folder")).unwrap();
    set("few", "user.one", b"1");
    set("few", "user.empty", b"");
    set("few", "user.zeros", &[0; 17]);
    set("few", "trusted.secret", b"for root");
    set("large", "user.large", &vec![b'v'; 3000]);
    for index in 0..10 {
        set("large", &format!("user.{}{index}", "k".repeat(40)), b"value");
    }
    // cap_net_bind_service=ep, revision 2.
    let capability = [1, 0, 0, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    set("capable", "security.capability", &capability);
    set("folder", "user.of-a-folder", b"yes");
    set("folder", "trusted.of-a-folder", b"for root");
}

fn times(folder: &Path) {
    let at = File::open(folder).unwrap();
    for (name, secs, nanos) in [
        ("1969", -1, 999_999_999),
        ("1930", -1_262_304_000, 1),
        ("1970", 0, 0),
        ("2026", 1_790_000_000, 123_456_789),
        ("2100", 4_102_444_800, 5),
        ("2400", 13_569_465_600, 0),
    ] {
        fs::write(folder.join(name), name).unwrap();
        let time = Time { secs, nanos };
        sys::file::set_mtime_at(at.as_fd(), name.as_bytes(), time).unwrap();
    }
}
