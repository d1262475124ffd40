//! Mounts of every builder, detached and attached, on this kernel. Everything is undone by drop guards.

use super::*;
use crate::file::xattr;
use crate::probe::{BLOCK_BYTES, Capability, skip_test, tiny_erofs_metadata};
use std::fs;
use std::path::PathBuf;

/// Whether this host lacks what the test stands on; says so if it does.
fn skip(test: &str, needed: Capability) -> bool {
    skip_test(&format!("mount::tests::{test}"), &std::env::temp_dir(), &[needed])
}

/// A mount that is undone when the test ends, however it ends.
struct Attached(PathBuf);

impl Attached {
    fn new(mount: MountFd, path: &Path) -> Self {
        fs::create_dir_all(path).unwrap();
        mount.attach(path).unwrap();
        // The kernel answers EBUSY to an unmount while the descriptor is open.
        drop(mount);
        Self(path.to_owned())
    }

    fn entry(&self) -> MountEntry {
        let mounts = read_mounts().unwrap();
        let path = fs::canonicalize(&self.0).unwrap();
        mounts.into_iter().rfind(|mount| mount.mount_point == path).unwrap()
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        if let Err(error) = unmount(&self.0, Unmount::Lazy) {
            eprintln!("unmount {:?}: {error}", self.0);
        }
    }
}

fn tmpfs() -> MountFd {
    Tmpfs { name: "test", mode: 0o755, size_bytes: Some(64 << 20), inodes: None }
        .mount_detached(Attributes::default())
        .unwrap()
}

fn open(mount: &MountFd, path: &str) -> io::Result<fs::File> {
    let flags = rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::CLOEXEC;
    Ok(rustix::fs::openat(mount, path, flags, rustix::fs::Mode::empty())?.into())
}

fn make_folder(mount: &MountFd, path: &str) -> OwnedFd {
    rustix::fs::mkdirat(mount, path, rustix::fs::Mode::from_raw_mode(0o755)).unwrap();
    mount.open_inside(Path::new(path)).unwrap()
}

/// Writes a file by its /proc name, which works in detached mounts too.
fn write(folder: BorrowedFd<'_>, name: &str, text: &str) -> io::Result<()> {
    let path = PathBuf::from(format!("/proc/self/fd/{}", folder.as_raw_fd())).join(name);
    fs::write(path, text)
}

fn read(folder: BorrowedFd<'_>, name: &str) -> io::Result<String> {
    let path = PathBuf::from(format!("/proc/self/fd/{}", folder.as_raw_fd())).join(name);
    fs::read_to_string(path)
}

#[test]
fn erofs_mounts_plain_files_and_the_table_names_them() {
    if skip("erofs_mounts_plain_files_and_the_table_names_them", Capability::ErofsFileBacked) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (metadata, data) = (folder.path().join("meta"), folder.path().join("data"));
    fs::write(&metadata, tiny_erofs_metadata(2)).unwrap();
    fs::write(&data, vec![7; 4 * BLOCK_BYTES]).unwrap();
    let erofs = Erofs { metadata: &metadata, device: Some(&data) };
    let mount = erofs.mount_detached(Attributes::LAYER).unwrap();
    let mut bytes = Vec::new();
    io::Read::read_to_end(&mut open(&mount, "data").unwrap(), &mut bytes).unwrap();
    assert_eq!(bytes, vec![7; 4 * BLOCK_BYTES]);

    let point = folder.path().join("point");
    let attached = Attached::new(mount, &point);
    let entry = attached.entry();
    assert_eq!(entry.kind, "erofs");
    assert_eq!(Path::new(&entry.source), metadata);
    // The kernel's table does not name the device, only the metadata.
    assert_eq!(entry.super_option("device"), None);
    assert!(entry.is_read_only() && entry.options.contains("nodev"));
    assert!(!entry.options.contains("nosuid"));
    assert_eq!(fs::read(point.join("data")).unwrap(), bytes);
}

#[test]
fn a_mount_is_busy_while_its_descriptor_is_open() {
    let folder = tempfile::tempdir().unwrap();
    let mount = tmpfs();
    mount.attach(folder.path()).unwrap();
    let busy = unmount(folder.path(), Unmount::Now).unwrap_err();
    assert_eq!(busy.raw_os_error(), Some(libc::EBUSY));
    drop(mount);
    unmount(folder.path(), Unmount::Now).unwrap();
    let nothing = unmount(folder.path(), Unmount::Now).unwrap_err();
    assert_eq!(nothing.raw_os_error(), Some(libc::EINVAL));
}

#[test]
fn errors_carry_the_kernels_words() {
    if skip("errors_carry_the_kernels_words", Capability::ErofsFileBacked) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let metadata = folder.path().join("meta");
    let mut image = tiny_erofs_metadata(2);
    image[1024 + 83] = 0x80; // a feature from the future
    fs::write(&metadata, image).unwrap();
    let erofs = Erofs { metadata: &metadata, device: None };
    let error = erofs.mount_detached(Attributes::LAYER).unwrap_err();
    assert_eq!(crate::errno_of(&error), Some(libc::EINVAL), "{error}");
    assert!(error.to_string().contains("erofs"), "{error}");

    let place = folder.path().to_owned();
    let overlay = Overlay {
        name: "test",
        lowers: &[OverlayLower::Path(&place.join("absent"))],
        upper: None,
        volatile: false,
    };
    let error = overlay.mount_detached(Attributes::default()).unwrap_err();
    assert_eq!(crate::errno_of(&error), Some(libc::ENOENT), "{error}");
    assert_eq!(error.kind(), io::ErrorKind::NotFound);
}

#[test]
fn an_overlay_of_descriptors_is_written_in_its_upper_only() {
    if skip(
        "an_overlay_of_descriptors_is_written_in_its_upper_only",
        Capability::OverlayDescriptors,
    ) {
        return;
    }
    let (lower, scratch) = (tmpfs(), tmpfs());
    let (below, above) = (make_folder(&lower, "below"), make_folder(&lower, "above"));
    write(below.as_fd(), "both", "below").unwrap();
    write(below.as_fd(), "one", "below").unwrap();
    write(above.as_fd(), "both", "above").unwrap();
    rustix::fs::mkdirat(&below, "folder", rustix::fs::Mode::from_raw_mode(0o755)).unwrap();
    write(below.as_fd(), "folder/inside", "kept").unwrap();
    // Lower layers as the runtime has them: detached clones.
    let top = clone_tree_at(above.as_fd(), Path::new(""), Recursive::No).unwrap();
    let bottom = clone_tree_at(below.as_fd(), Path::new(""), Recursive::No).unwrap();
    let (upper, work) = (make_folder(&scratch, "upper"), make_folder(&scratch, "work"));
    let overlay = Overlay {
        name: "sandbox-1",
        lowers: &[OverlayLower::Fd(top.as_fd()), OverlayLower::Fd(bottom.as_fd())],
        upper: Some(OverlayUpper { upper: upper.as_fd(), work: work.as_fd() }),
        volatile: false,
    };
    let mount = overlay.mount_detached(Attributes::default()).unwrap();
    assert_eq!(read(mount.as_fd(), "both").unwrap(), "above");
    assert_eq!(read(mount.as_fd(), "one").unwrap(), "below");

    rustix::fs::unlinkat(&mount, "one", rustix::fs::AtFlags::empty()).unwrap();
    write(mount.as_fd(), "both", "changed").unwrap();
    // redirect_dir=on: a lower directory can be renamed.
    rustix::fs::renameat(&mount, "folder", &mount, "moved").unwrap();
    assert_eq!(read(mount.as_fd(), "moved/inside").unwrap(), "kept");
    assert_eq!(read(above.as_fd(), "both").unwrap(), "above");
    assert!(crate::file::stat_at(upper.as_fd(), b"one").unwrap().is_whiteout());
    assert_eq!(read(upper.as_fd(), "both").unwrap(), "changed");
    let redirect = xattr::get_at(upper.as_fd(), b"moved", b"trusted.overlay.redirect").unwrap();
    assert_eq!(redirect.as_deref(), Some(&b"folder"[..]));

    let point = tempfile::tempdir().unwrap();
    let attached = Attached::new(mount, point.path());
    let entry = attached.entry();
    assert_eq!((entry.kind.as_str(), &*entry.source), ("overlay", "sandbox-1".as_ref()));
    let options = entry.super_options.to_str().unwrap();
    assert!(options.contains("redirect_dir=on") && options.contains("xino=on"), "{options}");
}

#[test]
fn a_hundred_and_twenty_lower_layers_fit() {
    if skip("a_hundred_and_twenty_lower_layers_fit", Capability::OverlayDescriptors) {
        return;
    }
    let lower = tmpfs();
    let folders: Vec<OwnedFd> = (0..120)
        .map(|index| {
            let folder = make_folder(&lower, &format!("layer-{index}"));
            write(folder.as_fd(), &format!("file-{index}"), "x").unwrap();
            folder
        })
        .collect();
    let lowers: Vec<OverlayLower<'_>> =
        folders.iter().map(|folder| OverlayLower::Fd(folder.as_fd())).collect();
    let overlay = Overlay { name: "many", lowers: &lowers, upper: None, volatile: false };
    let mount = overlay.mount_detached(Attributes::default()).unwrap();
    let folder = crate::file::Folder::from_fd(
        crate::file::open_in_root(
            mount.as_fd(),
            Path::new(""),
            rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::DIRECTORY,
            0,
        )
        .unwrap(),
    )
    .unwrap();
    assert_eq!(folder.entries().unwrap().len(), 120);
}

#[test]
fn attributes_hold_and_can_be_changed() {
    let folder = tempfile::tempdir().unwrap();
    let attached = Attached::new(
        Tmpfs { name: "test", mode: 0o1777, size_bytes: Some(1 << 20), inodes: Some(10) }
            .mount_detached(Attributes { noexec: true, ..Attributes::KERNEL })
            .unwrap(),
        folder.path(),
    );
    let entry = attached.entry();
    for option in ["nosuid", "nodev", "noexec"] {
        assert!(entry.options.contains(option), "{}", entry.options);
    }
    let stat = crate::file::stat(folder.path()).unwrap();
    assert_eq!(stat.mode, 0o1777);
    let full = fs::write(folder.path().join("large"), vec![0; 2 << 20]).unwrap_err();
    assert_eq!(full.raw_os_error(), Some(libc::ENOSPC));

    let change = AttributeChange {
        set: Attributes { read_only: true, ..Attributes::default() },
        clear: Attributes { noexec: true, ..Attributes::default() },
        propagation: Some(Propagation::Private),
        ..AttributeChange::default()
    };
    set_attributes_of(folder.path(), &change).unwrap();
    let entry = attached.entry();
    assert!(entry.is_read_only() && !entry.options.contains("noexec"));
    let refused = fs::write(folder.path().join("file"), "x").unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(libc::EROFS));
}

#[test]
fn a_bind_has_attributes_of_its_own() {
    let folder = tempfile::tempdir().unwrap();
    let (source, target) = (folder.path().join("source"), folder.path().join("target"));
    fs::create_dir(&source).unwrap();
    fs::create_dir(&target).unwrap();
    fs::write(source.join("file"), "x").unwrap();
    let read_only = Attributes { read_only: true, ..Attributes::default() };
    bind(&source, &target, read_only, Recursive::No).unwrap();
    let _undo = Attached(target.clone());
    assert_eq!(fs::read_to_string(target.join("file")).unwrap(), "x");
    assert!(fs::write(target.join("file"), "y").is_err());
    fs::write(source.join("file"), "y").unwrap();
}

#[test]
fn owners_shift_through_an_id_map() {
    if skip("owners_shift_through_an_id_map", Capability::IdmappedMounts) {
        return;
    }
    let mount = tmpfs();
    write(mount.as_fd(), "file", "x").unwrap();
    let range = IdRange { from: 0, to: 100_000, count: 65536 };
    let map = IdMap { users: vec![range], groups: vec![range] };
    let namespace = map.user_namespace().unwrap();
    let shifted = mount.try_clone_tree(Recursive::No).unwrap();
    let change = AttributeChange { idmap: Some(namespace.as_fd()), ..AttributeChange::default() };
    shifted.set_attributes(&change).unwrap();
    let through = crate::file::stat_at(shifted.as_fd(), b"file").unwrap();
    assert_eq!((through.uid, through.gid), (100_000, 100_000));
    assert_eq!(crate::file::stat_at(mount.as_fd(), b"file").unwrap().uid, 0);
    // The overlay on an id-mapped lower sees the shifted owners too.
    let scratch = tmpfs();
    let (upper, work) = (make_folder(&scratch, "upper"), make_folder(&scratch, "work"));
    let overlay = Overlay {
        name: "mapped",
        lowers: &[OverlayLower::Fd(shifted.as_fd())],
        upper: Some(OverlayUpper { upper: upper.as_fd(), work: work.as_fd() }),
        volatile: true,
    }
    .mount_detached(Attributes::default())
    .unwrap();
    assert_eq!(crate::file::stat_at(overlay.as_fd(), b"file").unwrap().uid, 100_000);
}

#[test]
fn the_small_file_systems_of_a_sandbox_mount() {
    let proc = Proc { visibility: ProcVisibility::OnlyTraceable, only_processes: true }
        .mount_detached(Attributes::KERNEL)
        .unwrap();
    assert!(open(&proc, "self/status").is_ok());
    assert!(open(&proc, "meminfo").is_err());
    let all = Proc::default().mount_detached(Attributes::KERNEL).unwrap();
    assert!(open(&all, "meminfo").is_ok());
    let terminals =
        DevPts { gid: Some(5), mode: 0o620 }.mount_detached(Attributes::KERNEL).unwrap();
    assert_eq!(crate::file::stat_at(terminals.as_fd(), b"ptmx").unwrap().mode, 0o666);
    Mqueue.mount_detached(Attributes::KERNEL).unwrap();
    let sys = Sysfs.mount_detached(Attributes::KERNEL).unwrap();
    assert!(open(&sys, "kernel").is_ok());
}

#[test]
fn an_overlay_of_shifted_mounts_keeps_on_disk_the_owners_that_are_seen_inside() {
    use std::os::unix::fs::MetadataExt;
    const FIRST: u32 = 0x1234_0000;
    let scratch = tempfile::tempdir_in("/var/tmp").unwrap();
    let path = |name: &str| scratch.path().join(name);
    for folder in ["lower", "writable/upper", "writable/work"] {
        fs::create_dir_all(path(folder)).unwrap();
    }
    fs::write(path("lower/file"), "x").unwrap();
    std::os::unix::fs::chown(path("lower/file"), Some(1000), Some(5)).unwrap();
    let range = IdRange { from: 0, to: FIRST, count: 65_536 };
    let map = IdMap { users: vec![range], groups: vec![range] };
    let namespace = map.user_namespace().unwrap();
    let shift = |folder: &str| {
        let copy = clone_tree(&path(folder), Recursive::No).unwrap();
        let idmap = Some(namespace.as_fd());
        copy.set_attributes(&AttributeChange { idmap, ..AttributeChange::default() }).unwrap();
        copy
    };
    let (lower, writable) = (shift("lower"), shift("writable"));
    let (upper, work) = (
        writable.open_inside(Path::new("upper")).unwrap(),
        writable.open_inside(Path::new("work")).unwrap(),
    );
    let overlay = Overlay {
        name: "test",
        lowers: &[OverlayLower::Fd(lower.as_fd())],
        upper: Some(OverlayUpper { upper: upper.as_fd(), work: work.as_fd() }),
        volatile: true,
    };
    let identity = crate::identity::FileIdentity::assume(FIRST, FIRST).unwrap();
    let overlay = overlay.mount_detached(Attributes::default()).unwrap();
    write(overlay.as_fd(), "new", "y").unwrap();
    write(overlay.as_fd(), "file", "z").unwrap();
    make_folder(&overlay, "folder");
    let owner = |metadata: fs::Metadata| (metadata.uid(), metadata.gid());
    let seen = |name: &str| owner(open(&overlay, name).unwrap().metadata().unwrap());
    assert_eq!(seen("file"), (FIRST + 1000, FIRST + 5));
    assert_eq!((seen("new"), seen("folder")), ((FIRST, FIRST), (FIRST, FIRST)));
    drop(identity);
    // Who is nobody in there makes nothing.
    assert_eq!(
        crate::errno_of(&write(overlay.as_fd(), "foreign", "x").unwrap_err()),
        Some(libc::EOVERFLOW)
    );
    let on_disk = |name: &str| owner(path("writable/upper").join(name).metadata().unwrap());
    assert_eq!((on_disk("file"), on_disk("new"), on_disk("folder")), ((1000, 5), (0, 0), (0, 0)));
}
