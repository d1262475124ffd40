//! Judges of the EROFS writer: the kernel, fsck.erofs and dump.erofs look at its images, and what they
//! see is compared with the source tree. The same comparison has to pass on mkfs.erofs's image of the
//! same tree where mkfs.erofs 1.5 can hold it: a judge that fails there is wrong itself.
//!
//! Our own reader is judge of nothing here. Needs root and a kernel with file-backed EROFS.

mod import;
mod judge;
mod random;
mod source;
mod view;

use anyhow::{Context, Result};
use import::{Imported, Layout, import};
use judge::Files;
use random::Random;
use source::{Source, Without, grow};
use std::path::Path;

fn write(imported: &Imported) -> Result<Files> {
    let image = layer::erofs::writer::write(&imported.tree, imported.data_blocks())?;
    Files::write(&image, &imported.data)
}

/// The whole verdict on one source folder by the kernel.
fn kernel_agrees(source: &Path, files: &Files) -> Result<()> {
    let mounted = files.mount()?;
    view::compare(&view::look(source)?, &view::look(&mounted.path)?)
}

#[test]
fn random_trees_are_what_the_kernel_sees() {
    for seed in 1..=12 {
        let verdict = (|| {
            let source = Source::new()?;
            let mut random = Random::new(seed);
            grow(source.path(), &mut random, 40 + 30 * seed as usize, Without::default())?;
            let imported = import(source.path(), &mut random, Layout::Mixed)?;
            let files = write(&imported)?;
            kernel_agrees(source.path(), &files)?;
            files.fsck()
        })();
        verdict.with_context(|| format!("seed {seed}")).unwrap();
    }
}

#[test]
fn the_kernel_judge_passes_on_the_image_of_mkfs_erofs() {
    for seed in 1..=4 {
        let verdict = (|| {
            let source = Source::new()?;
            let mut random = Random::new(seed);
            grow(source.path(), &mut random, 100, Without { holes: true })?;
            kernel_agrees(source.path(), &Files::mkfs(source.path())?)
        })();
        verdict.with_context(|| format!("seed {seed}")).unwrap();
    }
}
