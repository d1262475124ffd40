//! Files, folders, attributes, holes and publishing, on the file system of the temporary folder.

use super::publish::{Unnamed, exchange, rename_without_replacing};
use super::space::{self, PageCache};
use super::xattr::SetMode;
use super::*;
use std::fs;
use std::os::unix::fs::symlink;

fn folder() -> (tempfile::TempDir, Folder) {
    let place = tempfile::tempdir().unwrap();
    let folder = Folder::open(place.path()).unwrap();
    (place, folder)
}

const READ: OFlags = OFlags::RDONLY;

#[test]
fn no_path_leads_out_of_its_root() {
    let (place, root) = folder();
    fs::create_dir_all(place.path().join("etc")).unwrap();
    fs::write(place.path().join("etc/passwd"), "inside").unwrap();
    symlink("/etc/passwd", place.path().join("absolute")).unwrap();
    symlink("../../../../etc/passwd", place.path().join("up")).unwrap();
    symlink("/proc/self/root/etc/passwd", place.path().join("magic")).unwrap();
    for path in ["absolute", "up", "/etc/passwd", "../etc/passwd", "etc/../../etc/passwd"] {
        let fd = open_in_root(root.as_fd(), Path::new(path), READ, 0).unwrap();
        let mut text = [0; 6];
        space::read_exact_at(fd.as_fd(), &mut text, 0).unwrap();
        assert_eq!(&text, b"inside", "{path}");
    }
    assert!(open_in_root(root.as_fd(), Path::new("magic"), READ, 0).is_err());
    for path in ["absolute", "up", "/etc/passwd", "../etc"] {
        let error = open_beneath(root.as_fd(), Path::new(path), READ, 0).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EXDEV), "{path}");
    }
    let error = open_without_symlinks(root.as_fd(), Path::new("up"), READ, 0).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::ELOOP));
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL;
    let fd = open_in_root(root.as_fd(), Path::new("/new"), flags, 0o640).unwrap();
    assert_eq!(stat_fd(fd.as_fd()).unwrap().mode & 0o600, 0o600);
    assert!(place.path().join("new").exists());
}

#[test]
fn every_kind_of_inode_keeps_all_its_metadata() {
    let (_place, root) = folder();
    let fd = root.as_fd();
    let device = Device { major: 7, minor: 300 };
    make_node_at(fd, b"char", FileKind::CharDevice, 0o640, device).unwrap();
    make_node_at(fd, b"block", FileKind::BlockDevice, 0o640, device).unwrap();
    make_node_at(fd, b"white", FileKind::CharDevice, 0, Device::default()).unwrap();
    make_node_at(fd, b"fifo", FileKind::Fifo, 0o600, Device::default()).unwrap();
    make_node_at(fd, b"socket", FileKind::Socket, 0o600, Device::default()).unwrap();
    make_node_at(fd, b"file\xff", FileKind::Regular, 0o600, Device::default()).unwrap();
    make_symlink_at(fd, b"link", b"tar\xfeget").unwrap();
    make_folder_at(fd, b"folder", 0o700).unwrap();
    make_link_at(fd, b"file\xff", fd, b"again").unwrap();
    let kinds: Vec<(Vec<u8>, Option<FileKind>)> =
        root.entries().unwrap().into_iter().map(|entry| (entry.name, entry.kind)).collect();
    let expected: [(&[u8], FileKind); 9] = [
        (b"again", FileKind::Regular),
        (b"block", FileKind::BlockDevice),
        (b"char", FileKind::CharDevice),
        (b"fifo", FileKind::Fifo),
        (b"file\xff", FileKind::Regular),
        (b"folder", FileKind::Directory),
        (b"link", FileKind::Symlink),
        (b"socket", FileKind::Socket),
        (b"white", FileKind::CharDevice),
    ];
    let expected = expected.map(|(name, kind)| (name.to_vec(), Some(kind)));
    assert_eq!(kinds, expected);
    let times = [Time { secs: -2, nanos: 999_999_999 }, Time { secs: 4_000_000_000, nanos: 1 }];
    for (name, kind) in kinds {
        for mtime in times {
            set_owner_at(fd, &name, 70_000, 80_000).unwrap();
            set_mtime_at(fd, &name, mtime).unwrap();
            let stat = root.stat(&name).unwrap();
            assert_eq!((Some(stat.kind), stat.mtime), (kind, mtime));
            assert_eq!((stat.uid, stat.gid), (70_000, 80_000));
        }
        if kind == Some(FileKind::Symlink) {
            assert!(set_mode_at(fd, &name, 0o644).is_err());
        } else {
            set_mode_at(fd, &name, 0o4751).unwrap();
            assert_eq!(root.stat(&name).unwrap().mode, 0o4751);
        }
    }
    assert_eq!(root.stat(b"char").unwrap().rdev, device);
    assert!(root.stat(b"white").unwrap().is_whiteout());
    assert!(!root.stat(b"char").unwrap().is_whiteout());
    assert_eq!(root.stat(b"again").unwrap().links, 2);
    assert_eq!(root.read_link(b"link").unwrap(), b"tar\xfeget");
    for name in [&b"link"[..], b"fifo", b"char", b"socket", b"folder"] {
        assert!(root.open_regular(name).is_err());
    }
    assert!(root.open_regular(b"again").is_ok());
    assert!(root.open_folder(b"link").is_err());
}

#[test]
fn attributes_of_links_and_files_are_whole() {
    let (place, root) = folder();
    symlink("nowhere", place.path().join("link")).unwrap();
    fs::write(place.path().join("file"), "x").unwrap();
    let (file, link) = (place.path().join("file"), place.path().join("link"));
    let long = vec![b'v'; 3000];
    xattr::set(&file, b"user.long", &long, SetMode::Any).unwrap();
    xattr::set(&file, b"user.empty", b"", SetMode::Create).unwrap();
    xattr::set(&link, b"trusted.on-link", b"\0\xff", SetMode::Create).unwrap();
    assert_eq!(xattr::list(&file).unwrap(), [b"user.empty".to_vec(), b"user.long".to_vec()]);
    assert_eq!(xattr::get(&file, b"user.long").unwrap(), Some(long.clone()));
    assert_eq!(xattr::get(&file, b"user.empty").unwrap(), Some(Vec::new()));
    assert_eq!(xattr::get(&file, b"user.absent").unwrap(), None);
    assert_eq!(xattr::list_at(root.as_fd(), b"link").unwrap(), [b"trusted.on-link".to_vec()]);
    let value = xattr::get_at(root.as_fd(), b"link", b"trusted.on-link").unwrap();
    assert_eq!(value.as_deref(), Some(&b"\0\xff"[..]));
    let again = xattr::set(&file, b"user.long", b"", SetMode::Create).unwrap_err();
    assert_eq!(again.raw_os_error(), Some(libc::EEXIST));
    let fd = root.open_regular(b"file").unwrap();
    assert_eq!(xattr::list_fd(fd.as_fd()).unwrap().len(), 2);
    assert_eq!(xattr::get_fd(fd.as_fd(), b"user.long").unwrap(), Some(long));
    xattr::set_fd(fd.as_fd(), b"user.fd", b"1", SetMode::Any).unwrap();
    xattr::set_at(root.as_fd(), b"file", b"user.at", b"2", SetMode::Any).unwrap();
    assert!(xattr::remove(&file, b"user.fd").unwrap());
    assert!(!xattr::remove(&file, b"user.fd").unwrap());
    assert_eq!(xattr::list(&file).unwrap().len(), 3);
}

#[test]
fn holes_are_found_and_made() {
    let (place, root) = folder();
    let path = place.path().join("sparse");
    let file = fs::File::options().read(true).write(true).create_new(true).open(path).unwrap();
    let fd = file.as_fd();
    space::set_size(fd, 1 << 20).unwrap();
    assert_eq!(space::data_ranges(fd).count(), 0);
    space::write_all_at(fd, &[1; 8192], 65536, PageCache::Keep).unwrap();
    space::write_all_at(fd, &[2; 4096], (1 << 20) - 4096, PageCache::Keep).unwrap();
    space::sync_data(fd).unwrap();
    let ranges: Vec<_> = space::data_ranges(fd).collect::<io::Result<_>>().unwrap();
    assert_eq!(ranges, [65536..73728, (1 << 20) - 4096..1 << 20]);
    space::punch_hole(fd, 65536, 4096).unwrap();
    let ranges: Vec<_> = space::data_ranges(fd).collect::<io::Result<_>>().unwrap();
    assert_eq!(ranges[0], 69632..73728);
    let mut bytes = [9; 8192];
    space::read_exact_at(fd, &mut bytes, 65536).unwrap();
    assert!(bytes[..4096].iter().all(|byte| *byte == 0) && bytes[4096..] == [1; 4096]);
    space::allocate(fd, 0, 4096).unwrap();
    assert!(root.stat(b"sparse").unwrap().blocks_512 >= 24);
    assert_eq!(root.stat(b"sparse").unwrap().size, 1 << 20);
    let mut past = [0; 1];
    let end = space::read_exact_at(fd, &mut past, 1 << 20).unwrap_err();
    assert_eq!(end.kind(), io::ErrorKind::UnexpectedEof);
    space::drop_cached(fd, 0, 0).unwrap();
    space::expect_sequential(fd).unwrap();
    space::sync_all(root.as_fd()).unwrap();
}

#[test]
fn copies_inside_the_kernel_are_exact() {
    let (place, _root) = folder();
    let open = |name| {
        let path = place.path().join(name);
        fs::File::options().read(true).write(true).create_new(true).open(path).unwrap()
    };
    let (source, target) = (open("source"), open("target"));
    let bytes: Vec<u8> = (0..100_000u32).map(|index| (index / 3) as u8).collect();
    space::write_all_at(source.as_fd(), &bytes, 0, PageCache::Keep).unwrap();
    space::copy_range(source.as_fd(), 10, target.as_fd(), 5, 99_000).unwrap();
    let mut copied = vec![0; 99_000];
    space::read_exact_at(target.as_fd(), &mut copied, 5).unwrap();
    assert_eq!(copied, bytes[10..99_010]);
    let beyond = space::copy_range(source.as_fd(), 0, target.as_fd(), 0, 100_001).unwrap_err();
    assert_eq!(beyond.kind(), io::ErrorKind::UnexpectedEof);
    // A reflink where the file system can; a clear errno where it cannot.
    match space::clone_range(source.as_fd(), 0, target.as_fd(), 0, 4096) {
        Ok(()) => {}
        Err(error) => assert!(
            matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::ENOTTY | libc::EINVAL)),
            "{error}"
        ),
    }
    let mut read = [0; 64];
    assert_eq!(space::read_at(source.as_fd(), &mut read, 99_990, PageCache::Keep).unwrap(), 10);
    match space::write_all_at(target.as_fd(), &bytes, 0, PageCache::LetGo) {
        Ok(()) => space::read_exact_at(target.as_fd(), &mut copied, 10).unwrap(),
        Err(error) => assert_eq!(error.raw_os_error(), Some(libc::EOPNOTSUPP)),
    }
}

#[test]
fn a_file_appears_whole_or_not_at_all() {
    let (place, root) = folder();
    let file = Unnamed::create(root.as_fd(), 0o644).unwrap();
    space::write_all_at(file.as_fd(), b"whole", 0, PageCache::Keep).unwrap();
    assert!(root.entries().unwrap().is_empty());
    file.publish(root.as_fd(), b"name").unwrap();
    assert_eq!(fs::read(place.path().join("name")).unwrap(), b"whole");
    let second = Unnamed::create(root.as_fd(), 0o644).unwrap();
    let taken = second.publish(root.as_fd(), b"name").unwrap_err();
    assert_eq!(taken.kind(), io::ErrorKind::AlreadyExists);
    assert_eq!(fs::read(place.path().join("name")).unwrap(), b"whole");
    fs::write(place.path().join("other"), "other").unwrap();
    let fd = root.as_fd();
    let taken = rename_without_replacing(fd, b"other", fd, b"name").unwrap_err();
    assert_eq!(taken.kind(), io::ErrorKind::AlreadyExists);
    exchange(fd, b"other", fd, b"name").unwrap();
    assert_eq!(fs::read(place.path().join("name")).unwrap(), b"other");
    rename_without_replacing(fd, b"other", fd, b"third").unwrap();
    publish::rename(fd, b"third", fd, b"name").unwrap();
    assert_eq!(root.entries().unwrap().len(), 1);
}

#[test]
fn hostile_trees_are_removed_without_recursion() {
    let (place, root) = folder();
    let tree = place.path().join("tree");
    fs::create_dir_all(tree.join("a/b/c")).unwrap();
    fs::write(tree.join("a/b/c/file"), "x").unwrap();
    fs::create_dir(tree.join("removed-0")).unwrap();
    symlink(place.path(), tree.join("a/out")).unwrap();
    fs::write(place.path().join("outside"), "kept").unwrap();
    // Deeper than any path or descriptor limit.
    let mut deep = Folder::open(&tree).unwrap();
    for _ in 0..3000 {
        make_folder_at(deep.as_fd(), b"deep", 0o700).unwrap();
        make_node_at(deep.as_fd(), b"file", FileKind::Fifo, 0o600, Device::default()).unwrap();
        deep = deep.open_folder(b"deep").unwrap();
    }
    drop(deep);
    for index in 0..5000 {
        fs::write(tree.join("a").join(index.to_string()), "").unwrap();
    }
    assert!(root.remove_tree(b"tree").unwrap());
    assert!(!root.remove_tree(b"tree").unwrap());
    assert!(root.remove_tree(b"outside").unwrap());
    assert!(root.entries().unwrap().is_empty());
}

#[test]
fn removing_never_enters_a_mount() {
    let (place, root) = folder();
    let point = place.path().join("tree/below/point");
    fs::create_dir_all(&point).unwrap();
    let tmpfs = crate::mount::Tmpfs { name: "test", mode: 0o700, size_bytes: None, inodes: None };
    tmpfs.mount_detached(crate::mount::Attributes::default()).unwrap().attach(&point).unwrap();
    fs::write(point.join("kept"), "x").unwrap();
    let removed = root.remove_tree(b"tree");
    let kept = point.join("kept").exists();
    crate::mount::unmount(&point, crate::mount::Unmount::Lazy).unwrap();
    assert_eq!(removed.unwrap_err().raw_os_error(), Some(libc::EBUSY));
    assert!(kept);
    assert!(root.remove_tree(b"tree").unwrap());
}

#[test]
fn locks_exclude_and_end_with_their_descriptor() {
    let (place, _root) = folder();
    let path = place.path().join("lock");
    let first = fs::File::create(&path).unwrap();
    let second = fs::File::open(&path).unwrap();
    lock(first.as_fd(), Lock::Exclusive).unwrap();
    assert!(!try_lock(second.as_fd(), Lock::Shared).unwrap());
    unlock(first.as_fd()).unwrap();
    assert!(try_lock(second.as_fd(), Lock::Shared).unwrap());
    assert!(try_lock(first.as_fd(), Lock::Shared).unwrap());
    assert!(!try_lock(first.as_fd(), Lock::Exclusive).unwrap());
    drop(second);
    assert!(try_lock(first.as_fd(), Lock::Exclusive).unwrap());
}

#[test]
fn the_file_system_says_what_it_is() {
    let (_place, root) = folder();
    let found = space::file_system(root.as_fd()).unwrap();
    assert!(found.total_bytes > found.available_bytes && found.available_bytes > 0);
    let proc = Folder::open(Path::new("/proc")).unwrap();
    assert!(!space::file_system(proc.as_fd()).unwrap().can_back_layers());
    space::sync_file_system(root.as_fd()).unwrap();
}
