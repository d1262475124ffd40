//! What others make of the same trees: images by mkfs.erofs and mksquashfs, mounted by the kernel, and trees
//! merged by fuse-overlayfs.
//!
//! Dropping a mount takes it away; a squashfs image's loop device and a fuse-overlayfs process go with it. A
//! peer that a host cannot run is an error that says why, for the bench to tell and go on.

use crate::eager;
use crate::report::Report;
use crate::shell::{self, say};
use anyhow::Context;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use sys::mount::{Attributes, Erofs, Unmount};

/// A file system that a peer's tool writes and the kernel mounts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Format {
    /// mkfs.erofs, not compressed, mounted from the plain file.
    Erofs,
    /// mksquashfs with zstd at level 3, mounted through a loop device.
    Squashfs,
}

impl Format {
    /// All of them.
    const ALL: [Self; 2] = [Self::Erofs, Self::Squashfs];

    /// The side's name in a report.
    fn name(self) -> &'static str {
        match self {
            Self::Erofs => "mkfs.erofs",
            Self::Squashfs => "squashfs",
        }
    }

    /// Writes the image of a tree.
    fn make(self, tree: &Path, image: &Path) -> anyhow::Result<()> {
        let (tree, image) = (shell::text(tree)?, shell::text(image)?);
        let words: &[&str] = match self {
            Self::Erofs => &["mkfs.erofs", "--quiet", image, tree],
            Self::Squashfs => &[
                "mksquashfs",
                tree,
                image,
                "-comp",
                "zstd",
                "-Xcompression-level",
                "3",
                "-noappend",
                "-no-progress",
                "-quiet",
            ],
        };
        shell::run(words).map(drop)
    }

    /// Mounts an image at a directory, which is made when it is absent.
    fn mount(self, image: &Path, at: &Path) -> anyhow::Result<Mounted> {
        fs::create_dir_all(at)?;
        match self {
            Self::Erofs => Erofs { metadata: image, device: None }
                .mount_detached(Attributes::LAYER)
                .and_then(|mount| mount.attach(at))
                .context("cannot mount mkfs.erofs's image")?,
            // The program finds a free loop device and lets the kernel free it with the mount.
            Self::Squashfs => {
                let (image, at) = (shell::text(image)?, shell::text(at)?);
                shell::run(&["mount", "-t", "squashfs", "-o", "loop,ro", image, at])?;
            }
        }
        Ok(Mounted { at: at.to_path_buf() })
    }
}

/// Images of several trees in one format.
#[derive(Debug)]
pub struct Images {
    format: Format,
    files: Vec<PathBuf>,
}

impl Images {
    /// Writes an image of each tree into `folder`.
    fn make(format: Format, trees: &[PathBuf], folder: &Path) -> anyhow::Result<Self> {
        fs::create_dir_all(folder)?;
        let mut files = Vec::new();
        for (index, tree) in trees.iter().enumerate() {
            let file = folder.join(format!("{index}.{}", format.name()));
            format.make(tree, &file)?;
            files.push(file);
        }
        Ok(Self { format, files })
    }

    /// The side's name in a report.
    pub fn name(&self) -> &'static str {
        self.format.name()
    }

    /// Runs a command in a container of crun over all of them; answers its time, the mounts included.
    pub fn run(&self, scratch: &Path, env: &[String], argv: &[&str]) -> anyhow::Result<Duration> {
        let start = Instant::now();
        let mounted = self.mount(&scratch.join(format!("run-{}", self.name())))?;
        let places: Vec<PathBuf> = mounted.iter().map(|one| one.path().to_path_buf()).collect();
        let mounting = start.elapsed();
        let (time, _) = eager::run(&places, scratch, env, argv)?;
        Ok(mounting + time)
    }

    /// Mounts all of them below `folder`, in the order of the trees.
    pub fn mount(&self, folder: &Path) -> anyhow::Result<Vec<Mounted>> {
        let numbered = self.files.iter().enumerate();
        numbered
            .map(|(index, file)| self.format.mount(file, &folder.join(index.to_string())))
            .collect()
    }
}

/// Images of the trees in every format that can be mounted here; the report is told of those that cannot.
pub fn images(
    trees: &[PathBuf],
    folder: &Path,
    report: &mut Report,
) -> anyhow::Result<Vec<Images>> {
    let mut found = Vec::new();
    for format in Format::ALL {
        say(format!("making the images of {}", format.name()));
        let images = Images::make(format, trees, folder)?;
        match images.mount(&folder.join(format!("try-{}", format.name()))) {
            Ok(_) => found.push(images),
            Err(error) => left_out(report, format.name(), &error),
        }
    }
    Ok(found)
}

/// Tells that a peer does not run here.
pub fn left_out(report: &mut Report, name: &str, error: &anyhow::Error) {
    let told = format!("{name} is left out, since it does not run here: {error:#}");
    say(&told);
    report.note(&told);
}

/// Merges trees, bottom first, by fuse-overlayfs.
pub fn merge(trees: &[PathBuf], at: &Path) -> anyhow::Result<Mounted> {
    fs::create_dir_all(at)?;
    let lowers: Vec<&str> =
        trees.iter().rev().map(|tree| shell::text(tree)).collect::<anyhow::Result<_>>()?;
    let lowers = format!("lowerdir={}", lowers.join(":"));
    shell::run(&["fuse-overlayfs", "-o", &lowers, shell::text(at)?])?;
    Ok(Mounted { at: at.to_path_buf() })
}

/// A mount of a peer.
#[derive(Debug)]
pub struct Mounted {
    at: PathBuf,
}

impl Mounted {
    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.at
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // Lazily: whoever still reads ends with it. The scratch folder's sweep finds what stays.
        let _ = sys::mount::unmount(&self.at, Unmount::Lazy);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_erofs_peer_shows_its_trees_and_goes() -> anyhow::Result<()> {
        let scratch = tempfile::Builder::new().tempdir_in("/var/tmp")?;
        let trees: Vec<PathBuf> = ["a", "b"].map(|name| scratch.path().join(name)).to_vec();
        for tree in &trees {
            fs::create_dir(tree)?;
            fs::write(tree.join("file"), tree.to_string_lossy().as_bytes())?;
        }
        let images = Images::make(Format::Erofs, &trees, &scratch.path().join("images"))?;
        let mounted = images.mount(&scratch.path().join("mounted"))?;
        for (tree, mounted) in trees.iter().zip(&mounted) {
            let shown = fs::read(mounted.path().join("file"))?;
            assert_eq!(shown, tree.to_string_lossy().as_bytes());
        }
        let places: Vec<PathBuf> = mounted.iter().map(|one| one.path().to_path_buf()).collect();
        drop(mounted);
        for place in places {
            assert_eq!(fs::read_dir(place)?.count(), 0);
        }
        Ok(())
    }
}
