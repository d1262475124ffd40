//! A writable overlay whose lower layer is the mounted one: what a sandbox does all day.

use super::{View, errno};
use std::collections::BTreeMap;
use std::fs::{self, File, Permissions};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use sys::mount::{Attributes, Overlay, OverlayLower, OverlayUpper, Unmount};

/// An overlay that is gone when this is dropped.
struct Mounted {
    at: PathBuf,
    folder: PathBuf,
}

/// What the sandbox's root does, or what overlayfs does by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Redirects {
    On,
    Off,
}

impl Mounted {
    fn new(folder: PathBuf, lower: &Path, redirects: Redirects) -> io::Result<Self> {
        let (at, upper, work) = (folder.join("at"), folder.join("upper"), folder.join("work"));
        for path in [&folder, &at, &upper, &work] {
            fs::create_dir(path)?;
        }
        let mounted = Self { at, folder };
        match redirects {
            Redirects::On => {
                let (upper, work) = (File::open(upper)?, File::open(work)?);
                let overlay = Overlay {
                    name: "test",
                    lowers: &[OverlayLower::Path(lower)],
                    upper: Some(OverlayUpper { upper: upper.as_fd(), work: work.as_fd() }),
                    volatile: false,
                };
                overlay.mount_detached(Attributes::default())?.attach(&mounted.at)?;
            }
            Redirects::Off => plain(lower, &upper, &work, &mounted.at)?,
        }
        Ok(mounted)
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = sys::mount::unmount(&self.at, Unmount::Lazy);
        let _ = fs::remove_dir_all(&self.folder);
    }
}

fn plain(lower: &Path, upper: &Path, work: &Path, at: &Path) -> io::Result<()> {
    use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags};
    let context = rustix::mount::fsopen("overlay", FsOpenFlags::FSOPEN_CLOEXEC)?;
    for (key, value) in [("lowerdir", lower), ("upperdir", upper), ("workdir", work)] {
        rustix::mount::fsconfig_set_string(&context, key, value)?;
    }
    rustix::mount::fsconfig_set_string(&context, "redirect_dir", "off")?;
    rustix::mount::fsconfig_create(&context)?;
    let flags = FsMountFlags::FSMOUNT_CLOEXEC;
    let mount = rustix::mount::fsmount(&context, flags, MountAttrFlags::empty())?;
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
    Ok(rustix::mount::move_mount(&mount, "", rustix::fs::CWD, at, flags)?)
}

/// What a walk sees of one path: kind and mode, owner, links, content or target.
type Seen = (u32, u32, u64, Vec<u8>);

fn walk(root: &Path) -> io::Result<BTreeMap<PathBuf, Seen>> {
    let mut seen = BTreeMap::new();
    let mut open = vec![PathBuf::new()];
    while let Some(folder) = open.pop() {
        for entry in fs::read_dir(root.join(&folder))? {
            let path = folder.join(entry?.file_name());
            let stat = fs::symlink_metadata(root.join(&path))?;
            let (mut links, mut content) = (stat.nlink(), Vec::new());
            if stat.is_dir() {
                // Of merged folders overlayfs does not count them.
                links = 0;
                open.push(path.clone());
            } else if stat.is_symlink() {
                content = fs::read_link(root.join(&path))?.into_os_string().into_encoded_bytes();
            } else if stat.is_file() {
                content = fs::read(root.join(&path))?;
            }
            seen.insert(path, (stat.mode(), stat.uid(), links, content));
        }
    }
    Ok(seen)
}

/// What is done to the overlay; each step's outcome is compared too.
fn change(root: &Path) -> Vec<Result<(), i32>> {
    let mut outcomes = Vec::new();
    let mut step = |result: io::Result<()>| {
        outcomes.push(result.map_err(|error| errno(&error)));
    };
    let path = |name: &str| root.join(name);
    let writable = |name: &str| File::options().write(true).open(root.join(name));
    step(fs::write(path("new"), "new"));
    step(writable("sizes/65537").and_then(|file| file.write_all_at(b"changed", 65_530)));
    step(writable("sparse/middle").and_then(|file| file.write_all_at(b"in a hole", 300_000)));
    step(writable("sizes/1048593").and_then(|file| file.set_len(10_001)));
    step(fs::set_permissions(path("sizes/100"), Permissions::from_mode(0o600)));
    step(std::os::unix::fs::chown(path("sizes/5"), Some(7), Some(8)));
    step(fs::rename(path("sizes/4097"), path("sizes/moved")));
    step(fs::rename(path("sizes/4096"), path("sizes/4095")));
    step(fs::remove_file(path("sizes/1")));
    step(fs::remove_dir_all(path("names")));
    step(fs::create_dir(path("names")));
    step(fs::write(path("names/again"), "again"));
    step(fs::remove_file(path("links/hard-a")));
    step(writable("links/hard-b").and_then(|file| file.write_all_at(b"ONE", 0)));
    step(fs::hard_link(path("sizes/2047"), path("sizes/second")));
    step(symlink("second", path("sizes/third")));
    step(fs::rename(path("deep/level-0"), path("deep/renamed")));
    step(fs::rename(path("many"), path("empty")));
    step(fs::remove_dir(path("sizes")));
    step(fs::rename(path("special/fifo"), path("special/pipe")));
    step(fs::remove_file(path("special/null")));
    step(sys::file::xattr::set(
        &path("xattrs/few"),
        b"user.two",
        b"2",
        sys::file::xattr::SetMode::Any,
    ));
    outcomes
}

pub fn changes(view: &View) {
    let before = walk(&view.mounted).unwrap();
    for redirects in [Redirects::On, Redirects::Off] {
        let folder = view.scratch.join("overlay");
        view.same(format!("an overlay with redirects {redirects:?}, before"), |root| {
            walk(&Mounted::new(folder.clone(), root, redirects)?.at)
        });
        view.same(format!("changes of an overlay with redirects {redirects:?}"), |root| {
            Ok(change(&Mounted::new(folder.clone(), root, redirects)?.at))
        });
        let outcomes = change(&Mounted::new(folder.clone(), &view.mounted, redirects).unwrap().at);
        let crossed = outcomes.contains(&Err(18));
        assert_eq!(crossed, redirects == Redirects::Off, "EXDEV: {outcomes:?}");
        view.same(format!("a changed overlay with redirects {redirects:?}"), |root| {
            let mounted = Mounted::new(folder.clone(), root, redirects)?;
            change(&mounted.at);
            walk(&mounted.at)
        });
    }
    assert!(walk(&view.mounted).unwrap() == before, "the layer changed");
}
