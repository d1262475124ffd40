//! The same tree gives the same layer id: from a directory, a tar, a compressed tar; with one thread and
//! with many; on a store that knows everything and on one that knows nothing.

#![allow(clippy::unwrap_used)]

mod support;

use layer::ErrorKind;
use std::fs;
use std::os::unix::fs::{FileExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use support::{MemoryPublisher, build, options, tight};

/// Fills a directory with all kinds of files, sized around every limit.
fn plant(root: &Path) {
    let mut seed = 7_u64;
    let mut noise = move |length: usize| -> Vec<u8> {
        (0..length)
            .map(|_| {
                seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (seed >> 33) as u8
            })
            .collect()
    };
    fs::create_dir_all(root.join("dir/deep/er")).unwrap();
    for (at, length) in [0, 1, 63, 64, 65, 4095, 4096, 4097, 8191, 8192, 65_535, 65_536, 65_537]
        .into_iter()
        .enumerate()
    {
        fs::write(root.join(format!("dir/file{at}")), noise(length)).unwrap();
    }
    for at in 0..60 {
        fs::write(root.join(format!("dir/deep/small{at}")), noise(200 + at * 97)).unwrap();
    }
    let large = noise(1_000_000);
    fs::write(root.join("large"), &large).unwrap();
    fs::write(root.join("dir/deep/er/copy"), &large).unwrap();
    fs::write(root.join("zeros"), vec![0; 300_000]).unwrap();
    let sparse = fs::File::create(root.join("sparse")).unwrap();
    sparse.set_len(5_000_000).unwrap();
    sparse.write_all_at(b"in the middle", 3_000_000).unwrap();
    symlink("dir/file1", root.join("link")).unwrap();
    fs::hard_link(root.join("large"), root.join("dir/hard")).unwrap();
}

fn tar(root: &Path, file: &Path, flags: &[&str]) {
    let status = Command::new("tar")
        .args(["--format=pax", "--xattrs", "--xattrs-include=*", "--numeric-owner"])
        .args(flags)
        .arg("-cf")
        .arg(file)
        .arg("-C")
        .arg(root)
        .arg(".")
        .status()
        .unwrap();
    assert!(status.success());
}

fn pack(program: &str, file: &Path, flag: &str) -> PathBuf {
    let packed = PathBuf::from(format!("{}.{program}", file.display()));
    let output = Command::new(program).arg("-c").arg(flag).arg(file).output().unwrap();
    assert!(output.status.success());
    fs::write(&packed, output.stdout).unwrap();
    packed
}

#[test]
fn directory_tar_and_compressed_tars_are_one_layer() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("root");
    fs::create_dir(&root).unwrap();
    plant(&root);
    let plain = dir.path().join("a.tar");
    let sparse = dir.path().join("s.tar");
    let reversed = dir.path().join("r.tar");
    tar(&root, &plain, &[]);
    tar(&root, &sparse, &["--sparse"]);
    tar(&root, &reversed, &["--sort=inode"]);
    for options in [options(), tight()] {
        let expected = build(&root, &MemoryPublisher::default(), &options).unwrap().layer_id();
        for file in [
            plain.clone(),
            sparse.clone(),
            reversed.clone(),
            pack("gzip", &plain, "-1"),
            pack("zstd", &plain, "-3"),
            pack("xz", &plain, "-1"),
        ] {
            let built = build(&file, &MemoryPublisher::default(), &options).unwrap();
            assert_eq!(built.layer_id(), expected, "{}", file.display());
        }
        for threads in [1, 3, 8] {
            let mut options = options.clone();
            options.threads = threads;
            let built = build(&plain, &MemoryPublisher::default(), &options).unwrap();
            assert_eq!(built.layer_id(), expected, "{threads} threads");
        }
    }
}

#[test]
fn a_second_build_uploads_nothing() {
    let dir = tempfile::tempdir().unwrap();
    plant(dir.path());
    let publisher = MemoryPublisher::default();
    let first = build(dir.path(), &publisher, &options()).unwrap();
    let second = build(dir.path(), &publisher, &options()).unwrap();
    assert_eq!(first.layer_id(), second.layer_id());
    assert!(first.top().new_chunks > 0);
    assert_eq!(second.top().new_chunks, 0);
    assert_eq!(second.top().new_stored_bytes, 0);
}

#[test]
fn one_changed_small_file_changes_few_chunks() {
    let dir = tempfile::tempdir().unwrap();
    plant(dir.path());
    let publisher = MemoryPublisher::default();
    build(dir.path(), &publisher, &tight()).unwrap();
    fs::write(dir.path().join("dir/deep/small30"), b"something quite different, yet not small")
        .unwrap();
    fs::write(dir.path().join("dir/deep/added"), b"a file that was not there, in path order first")
        .unwrap();
    let second = build(dir.path(), &publisher, &tight()).unwrap();
    assert!(second.top().new_chunks <= 12, "{} new chunks", second.top().new_chunks);
}

#[test]
fn equal_files_lie_in_one_place_and_zeros_nowhere() {
    let dir = tempfile::tempdir().unwrap();
    plant(dir.path());
    let publisher = MemoryPublisher::default();
    let built = build(dir.path(), &publisher, &options()).unwrap();
    let file = publisher.layer(built.layer_id());
    // 1 MB once, the sized files, the small ones and one unit of the sparse file; no zeros.
    let bytes = u64::from(file.chunk_table.data_blocks()) * 4096;
    assert!(bytes < 1_900_000, "{bytes} bytes of data space");
    assert!(file.chunk_table.chunks().iter().all(|chunk| !chunk.is_zero()));
}

#[test]
fn a_full_store_and_a_cancelled_build_commit_nothing() {
    let dir = tempfile::tempdir().unwrap();
    plant(dir.path());
    let publisher = MemoryPublisher::default();
    *publisher.room.lock().unwrap() = Some(3);
    let error = build(dir.path(), &publisher, &options()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoSpace);
    assert!(publisher.layers.lock().unwrap().is_empty());

    let publisher = MemoryPublisher::default();
    let options = options();
    *publisher.cancel_after.lock().unwrap() = Some((2, options.cancel.clone()));
    let error = build(dir.path(), &publisher, &options).unwrap_err();
    assert_eq!(error.chain(), "cancelled");
    assert!(publisher.layers.lock().unwrap().is_empty());
}

#[test]
fn a_layer_that_is_refused_because_its_chunks_are_gone_is_uploaded_again_and_not_for_ever() {
    let dir = tempfile::tempdir().unwrap();
    plant(dir.path());
    let publisher = MemoryPublisher::default();
    let expected = build(dir.path(), &publisher, &options()).unwrap();
    let chunks = publisher.chunks.lock().unwrap().clone();

    let publisher = MemoryPublisher::default();
    *publisher.endings.lock().unwrap() = 1;
    let built = build(dir.path(), &publisher, &options()).unwrap();
    assert_eq!(built.layer_id(), expected.layer_id());
    assert_eq!(*publisher.chunks.lock().unwrap(), chunks);
    assert_eq!(*publisher.reopened.lock().unwrap(), 1);
    assert_eq!(built.top().new_chunks, 2 * expected.top().new_chunks);

    let publisher = MemoryPublisher::default();
    *publisher.ended.lock().unwrap() = true;
    let built = build(dir.path(), &publisher, &options()).unwrap();
    assert_eq!((built.layer_id(), *publisher.reopened.lock().unwrap()), (expected.layer_id(), 1));

    let publisher = MemoryPublisher::default();
    *publisher.endings.lock().unwrap() = 100;
    let error = build(dir.path(), &publisher, &options()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    assert_eq!(*publisher.reopened.lock().unwrap(), 2);
    assert!(publisher.layers.lock().unwrap().is_empty());
}

#[test]
fn an_archive_that_unpacks_to_too_much_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("root");
    fs::create_dir(&root).unwrap();
    plant(&root);
    let plain = dir.path().join("a.tar");
    tar(&root, &plain, &[]);
    let packed = pack("gzip", &plain, "-1");
    let mut options = options();
    options.max_unpacked_bytes = 100_000;
    let error = build(&packed, &MemoryPublisher::default(), &options).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoSpace);
    assert!(error.chain().contains("limit of 100000 bytes"), "{}", error.chain());
}
