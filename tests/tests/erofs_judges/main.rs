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
use layer::manifest::{LayerKind, Manifest};
use random::Random;
use source::{Source, Without, grow};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::Path;
use view::{Facts, View};

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
    for seed in 1..=8 {
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
            grow(source.path(), &mut random, 120, Without { holes: true, longest_names: true })?;
            kernel_agrees(source.path(), &Files::mkfs(source.path())?)
        })();
        verdict.with_context(|| format!("seed {seed}")).unwrap();
    }
}

/// What fsck.erofs 1.5 restores when it extracts: no xattrs, and a file for each hard link. Times of
/// directories and setuid bits get lost when it adds entries and changes owners afterwards.
fn as_extracted(view: View) -> View {
    let keep = |(path, facts): (Vec<u8>, Facts)| {
        let directory = facts.mode & 0o170_000 == 0o040_000;
        let mtime = if directory { (0, 0) } else { facts.mtime };
        let mode = facts.mode & !0o6000;
        let facts = Facts {
            mode,
            mtime,
            links: 0,
            xattrs: Default::default(),
            same_as: path.clone(),
            ..facts
        };
        (path, facts)
    };
    view.into_iter().map(keep).collect()
}

fn fsck_agrees(source: &Path, files: &Files) -> Result<()> {
    // A tmpfs again: other file systems do not hold all times.
    let target = Source::new()?;
    files.fsck_extract(target.path())?;
    view::compare(&as_extracted(view::look(source)?), &as_extracted(view::look(target.path())?))
}

#[test]
fn random_trees_are_what_fsck_erofs_extracts() {
    for seed in 21..=26 {
        let verdict = (|| {
            let source = Source::new()?;
            let mut random = Random::new(seed);
            grow(source.path(), &mut random, 120, Without { holes: true, ..Without::default() })?;
            let files = write(&import(source.path(), &mut random, Layout::Mixed)?)?;
            files.fsck()?;
            fsck_agrees(source.path(), &files)
        })();
        verdict.with_context(|| format!("seed {seed}")).unwrap();
    }
}

#[test]
fn the_fsck_judge_passes_on_the_image_of_mkfs_erofs() {
    let source = Source::new().unwrap();
    let without = Without { holes: true, longest_names: true };
    grow(source.path(), &mut Random::new(31), 120, without).unwrap();
    fsck_agrees(source.path(), &Files::mkfs(source.path()).unwrap()).unwrap();
}

#[test]
fn metadata_is_no_larger_than_that_of_mkfs_erofs() {
    let source = Source::new().unwrap();
    let mut random = Random::new(41);
    for folder in 0..60 {
        let folder = source.path().join(format!("folder-{folder}"));
        std::fs::create_dir(&folder).unwrap();
        for file in 0..random.below(90) {
            let path = folder.join(format!("a-file-with-a-name-{file}.txt"));
            let size = 1 + random.below(12_000) as usize;
            std::fs::write(&path, random.bytes(size)).unwrap();
            source::set_mtime(&path, 1_600_000_000 + random.below(3) as i64, 0).unwrap();
        }
        std::os::unix::fs::symlink("../somewhere/else", folder.join("link")).unwrap();
    }
    let ours = write(&import(source.path(), &mut random, Layout::Plain).unwrap()).unwrap();
    let theirs = Files::mkfs(source.path()).unwrap();
    kernel_agrees(source.path(), &ours).unwrap();
    let size = |files: &Files| std::fs::metadata(&files.metadata).unwrap().len();
    println!("metadata: {} bytes ours, {} bytes by mkfs.erofs", size(&ours), size(&theirs));
    assert!(size(&ours) * 10 <= size(&theirs) * 11);
}

#[test]
fn dump_erofs_reads_superblock_and_paths() {
    let source = Source::new().unwrap();
    std::fs::create_dir(source.path().join("folder")).unwrap();
    std::fs::write(source.path().join("folder/file"), [7; 10_000]).unwrap();
    let files = write(&import(source.path(), &mut Random::new(1), Layout::Plain).unwrap()).unwrap();
    let text = files.dump(None).unwrap();
    assert!(text.contains("sb_csum") && text.contains("mtime"), "{text}");
    let text = files.dump(Some("/folder/file")).unwrap();
    assert!(text.contains("10000") && text.contains("regular file"), "{text}");
}

/// A folder with so many names that lookups and listings cross block borders.
fn folder_of(count: usize, name: impl Fn(usize) -> Vec<u8>) -> Result<()> {
    let source = Source::new()?;
    for index in 0..count {
        let path = source.path().join(OsStr::from_bytes(&name(index)));
        std::fs::File::create(path)?;
    }
    let files = write(&import(source.path(), &mut Random::new(1), Layout::Plain)?)?;
    kernel_agrees(source.path(), &files)?;
    files.fsck()?;
    let mounted = files.mount()?;
    for absent in [&b"!"[..], b"zzzz", b"00000000.", b"~"] {
        anyhow::ensure!(!mounted.path.join(OsStr::from_bytes(absent)).exists(), "{absent:?}");
    }
    Ok(())
}

#[test]
fn directories_with_entries_around_block_borders() {
    // 4096 bytes hold `.`, `..` and 157 names of 14 bytes with their entries: look around 1 and 2 blocks.
    for count in [0, 1, 2, 3, 150, 155, 156, 157, 158, 159, 160, 310, 312, 313, 314, 315, 316, 1000]
    {
        let verdict = folder_of(count, |index| format!("a-name-{index:07}").into_bytes());
        verdict.with_context(|| format!("{count} entries")).unwrap();
    }
}

#[test]
fn directories_of_names_with_255_arbitrary_bytes() {
    for count in [14, 15, 16, 40] {
        let name = |index: usize| {
            let mut bytes = Random::new(index as u64).bytes(255);
            for byte in &mut bytes {
                if matches!(*byte, 0 | b'/') {
                    *byte = 0xff;
                }
            }
            bytes
        };
        folder_of(count, name).with_context(|| format!("{count} entries")).unwrap();
    }
}

#[test]
fn a_directory_of_200_000_entries() {
    folder_of(200_000, |index| format!("{index:x}").into_bytes()).unwrap();
}

/// A small tree that never changes. Its image may change only together with `docs/format.md` and the
/// format's version: two builds of one tree have to give one layer.
#[test]
fn the_golden_image_and_layer_id() {
    use layer::chunk::{Chunk, ChunkTable};
    use layer::tree::{Body, Extent, FileData, Inode, InodeIx, Kind, Rdev, Timestamp, Tree, Xattr};
    let inode = |secs, uid, kind| Inode {
        mode: 0o4755,
        uid,
        gid: 7,
        mtime: Timestamp { secs, nanos: 9 },
        xattrs: vec![Xattr { name: b"user.a".into(), value: b"value of some length".into() }],
        kind,
    };
    let extent = |file_block, blocks, data_block| Extent { file_block, blocks, data_block };
    let file = |size, body| Kind::Regular(FileData { size, body });
    let mut tree = Tree::new(inode(5, 0, Kind::Directory(Default::default())));
    let members = [
        ("device", inode(5, 0, Kind::CharDevice(Rdev { major: 1, minor: 3 }))),
        ("fifo", inode(-5, 1 << 20, Kind::Fifo)),
        ("holes", inode(5, 0, file(40_000, Body::Extents(vec![extent(2, 2, 5)])))),
        ("inlined", inode(5, 0, file(5, Body::Inline(b"hello".into())))),
        ("link", inode(5, 0, Kind::Symlink(b"plain".into()))),
        ("plain", inode(6, 0, file(20_000, Body::Extents(vec![extent(0, 5, 0)])))),
    ];
    for (name, inode) in members {
        let index = tree.add(inode).unwrap();
        tree.link(InodeIx::ROOT, name.into(), index).unwrap();
    }
    tree.link(InodeIx::ROOT, b"second name".into(), InodeIx(6)).unwrap();
    let metadata = layer::erofs::writer::write(&tree, 8).unwrap().bytes;
    let digest = layer::ChunkDigest([3; 32]);
    let chunk_table = ChunkTable::new(vec![Chunk { start_block: 0, blocks: 8, digest }]).unwrap();
    let manifest = Manifest {
        directories: 1,
        files: 6,
        plain_bytes: 60_010,
        ..Manifest::describing(LayerKind::Base, &chunk_table, &metadata)
    };
    let found = [layer::Digest::of(&metadata).to_string(), manifest.id().to_string()];
    let file = layer::layer_file::LayerFile { manifest, chunk_table, metadata };
    assert_eq!(layer::layer_file::LayerFile::decode(&file.encode().unwrap()).unwrap(), file);
    const IMAGE: &str = "204946b6a994b4235c40f7802c40ada9ecae7316d6ffdc9a2ac38f1d8497cae5";
    const LAYER: &str = "a035882ec025ca05970e87bc66a3f4f135f59242c398ff50831c389a984ee243";
    assert_eq!(found, [IMAGE, LAYER]);
}

#[test]
fn a_sparse_file_of_a_tebibyte() {
    let source = Source::new().unwrap();
    let path = source.path().join("sparse");
    let file = std::fs::File::create(&path).unwrap();
    file.set_len(1 << 40).unwrap();
    for at in [0, 77_777, 1 << 30, (1 << 39) + 12_345, (1 << 40) - 5] {
        file.write_all_at(b"data!", at).unwrap();
    }
    let imported = import(source.path(), &mut Random::new(1), Layout::Mixed).unwrap();
    let files = write(&imported).unwrap();
    let metadata = std::fs::metadata(&files.metadata).unwrap().len();
    assert!(metadata < 1 << 20, "{metadata} bytes of metadata");
    kernel_agrees(source.path(), &files).unwrap();
    files.fsck().unwrap();
}

#[test]
fn the_largest_xattrs_and_link_targets() {
    let source = Source::new().unwrap();
    for (index, sizes) in
        [&[65_535][..], &[65_535; 5], &[1; 300], &[4000, 4096, 60_000]].iter().enumerate()
    {
        let path = source.path().join(format!("file-{index}"));
        std::fs::write(&path, b"content").unwrap();
        for (number, size) in sizes.iter().enumerate() {
            let value = Random::new(number as u64).bytes(*size);
            source::set_xattr(&path, format!("trusted.{number}").as_bytes(), &value).unwrap();
        }
    }
    source::set_xattr(source.path(), b"system.posix_acl_access", &source::acl()).unwrap();
    for length in [1, 4000, 4031, 4032, 4063, 4064, 4065, 4094, 4095] {
        let link = source.path().join(format!("link-{length}"));
        std::os::unix::fs::symlink("t".repeat(length), link).unwrap();
    }
    for layout in [Layout::Plain, Layout::Mixed] {
        let files = write(&import(source.path(), &mut Random::new(1), layout).unwrap()).unwrap();
        kernel_agrees(source.path(), &files).unwrap();
        files.fsck().unwrap();
    }
}
