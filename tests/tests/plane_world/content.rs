//! Bytes: read, mapped, from many threads, around holes.

use super::{Shown, View, errno};
use crate::fsd_world::{Random, first_difference};
use layer::erofs::reader::Reader;
use layer::tree::{Body, Kind};
use rustix::fs::{Advice, SeekFrom};
use std::fs::{self, File};
use std::io;
use std::num::NonZero;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use sys::mapping::{FileMapping, PrivateMapping};

const PAGE: usize = 4096;
const EINVAL: i32 = 22;

/// One `pread`, which may be short.
fn read_at(file: &File, offset: usize, bytes: usize) -> io::Result<Vec<u8>> {
    let mut got = vec![0; bytes];
    let length = file.read_at(&mut got, offset as u64)?;
    got.truncate(length);
    Ok(got)
}

#[track_caller]
fn equal(name: &Path, what: &str, got: &[u8], wanted: &[u8]) {
    assert!(got == wanted, "{}, {what}: {}", name.display(), first_difference(got, wanted));
}

pub fn odd_offsets(view: &View) {
    let mut random = Random(77);
    for name in view.files().iter().filter(|name| name.starts_with("sizes")) {
        let wanted = fs::read(view.reference.join(name)).unwrap();
        let file = File::open(view.mounted.join(name)).unwrap();
        let every = (1..wanted.len() + 4).step_by(2);
        let offsets: Vec<usize> = if wanted.len() < 9000 {
            every.collect()
        } else {
            (0..300).map(|_| random.below(wanted.len() as u64 + 5000) as usize | 1).collect()
        };
        for (turn, offset) in offsets.into_iter().enumerate() {
            let bytes = [1, 333, 4097, 70_001][turn % 4];
            let got = read_at(&file, offset, bytes).unwrap();
            let from = offset.min(wanted.len());
            let to = (offset + bytes).min(wanted.len());
            equal(name, &format!("{bytes} at {offset}"), &got, &wanted[from..to]);
        }
        // Several buffers in one call, and far behind the end.
        let (mut one, mut two) = (vec![0; 100], vec![0; 5000]);
        let mut buffers = [io::IoSliceMut::new(&mut one), io::IoSliceMut::new(&mut two)];
        let length = rustix::io::preadv(&file, &mut buffers, 3).unwrap();
        let got = [one, two].concat();
        let from = wanted.len().min(3);
        equal(name, "preadv", &got[..length], &wanted[from..wanted.len().min(from + length)]);
        assert!(read_at(&file, 1 << 40, 10).unwrap().is_empty());
    }
}

pub fn whole_files(view: &View) {
    for name in view.files() {
        let wanted = fs::read(view.reference.join(&name)).unwrap();
        let got = fs::read(view.mounted.join(&name)).unwrap();
        equal(&name, "whole", &got, &wanted);
    }
}

pub fn mappings(view: &View) {
    for name in ["sizes/1", "sizes/4097", "sizes/131073", "sizes/5000011", "sparse/islands"] {
        let name = Path::new(name);
        let wanted = fs::read(view.reference.join(name)).unwrap();
        let file = File::open(view.mounted.join(name)).unwrap();
        let shared = FileMapping::open(&file).unwrap();
        let mut private = PrivateMapping::open(&file).unwrap();
        private.will_need().unwrap();
        // Backwards, so that the kernel cannot simply read ahead.
        for page in (0..wanted.len().div_ceil(PAGE)).rev() {
            let range = page * PAGE..wanted.len().min((page + 1) * PAGE);
            let mut got = vec![0; range.len()];
            shared.copy(range.start, &mut got).unwrap();
            equal(name, "shared mapping", &got, &wanted[range.clone()]);
            private.copy(range.start, &mut got).unwrap();
            equal(name, "private mapping", &got, &wanted[range]);
        }
        private.write(wanted.len() / 2, b"?").unwrap();
        let mut got = vec![0; wanted.len()];
        shared.copy(0, &mut got).unwrap();
        equal(name, "after a private write", &got, &wanted);
    }
    // A cold file whose mapping is asked for ahead of its use.
    let name = Path::new("sparse/middle");
    let wanted = fs::read(view.reference.join(name)).unwrap();
    let private = PrivateMapping::open(&File::open(view.mounted.join(name)).unwrap()).unwrap();
    private.will_need().unwrap();
    let mut got = vec![0; wanted.len()];
    private.copy(0, &mut got).unwrap();
    equal(name, "MADV_WILLNEED", &got, &wanted);
}

pub fn many_readers(view: &View) {
    let files = view.files();
    std::thread::scope(|scope| {
        for reader in 0..8_u64 {
            let files = &files;
            scope.spawn(move || {
                let mut random = Random(reader * 1_000_003 + 1);
                for _ in 0..150 {
                    let name = &files[random.below(files.len() as u64) as usize];
                    let wanted = File::open(view.reference.join(name)).unwrap();
                    let got = File::open(view.mounted.join(name)).unwrap();
                    let size = wanted.metadata().unwrap().len();
                    let offset = random.below(size + 1) as usize;
                    let bytes = random.below(200_000) as usize;
                    let wanted = read_at(&wanted, offset, bytes).unwrap();
                    let got = read_at(&got, offset, bytes).unwrap();
                    equal(name, &format!("{bytes} at {offset}"), &got, &wanted);
                }
            });
        }
    });
}

/// Borders between data and holes, as a copying program finds them.
fn borders(path: &Path) -> io::Result<Vec<(u64, u64)>> {
    let file = File::open(path)?;
    let size = file.metadata()?.len();
    let (mut ranges, mut at) = (Vec::new(), 0);
    while at < size {
        let start = match rustix::fs::seek(&file, SeekFrom::Data(at)) {
            Ok(start) => start,
            Err(rustix::io::Errno::NXIO) => break,
            Err(error) => return Err(error.into()),
        };
        let end = rustix::fs::seek(&file, SeekFrom::Hole(start))?;
        ranges.push((start, end));
        at = end;
    }
    Ok(ranges)
}

/// The same from the layer's image: a builder may take a small hole for data, and zeros for a hole.
fn kept_borders(view: &View, name: &Path) -> Vec<(u64, u64)> {
    let number = fs::metadata(view.mounted.join(name)).unwrap().ino();
    let image = view.store.read_layer(&view.layer).unwrap().metadata;
    let record = Reader::parse(&image).unwrap().inode(number).unwrap();
    let Kind::Regular(file) = record.inode.kind else { panic!("{} is no file", name.display()) };
    let extents = match file.body {
        Body::Inline(_) => return vec![(0, file.size)],
        Body::Extents(extents) => extents,
    };
    let mut ranges: Vec<(u64, u64)> = Vec::new();
    for extent in extents {
        let start = u64::from(extent.file_block) * 4096;
        let end = (start + u64::from(extent.blocks) * 4096).min(file.size);
        match ranges.last_mut() {
            Some(last) if last.1 == start => last.1 = end,
            _ => ranges.push((start, end)),
        }
    }
    ranges
}

pub fn holes(view: &View) {
    for name in view.files() {
        let got = borders(&view.mounted.join(&name)).unwrap();
        let content = fs::read(view.reference.join(&name)).unwrap();
        let mut hole = 0;
        for (start, end) in got.iter().copied().chain([(content.len() as u64, 0)]) {
            let hole_bytes = &content[hole as usize..start as usize];
            assert!(hole_bytes.iter().all(|byte| *byte == 0), "{}: {got:?}", name.display());
            hole = end;
        }
        if name.starts_with("sparse") {
            assert_eq!(got, kept_borders(view, &name), "{}", name.display());
        }
    }
    for name in ["sparse/middle", "sparse/all", "sizes/0", "sizes/5", "sizes/131073"] {
        let path = |root: &Path| File::open(root.join(name));
        let size = fs::metadata(view.reference.join(name)).unwrap().len();
        for offset in [0, 1, 4095, 65_536, 100_000, size.saturating_sub(1), size, size + 1] {
            for (what, from) in [("data", SeekFrom::Data(offset)), ("hole", SeekFrom::Hole(offset))]
            {
                view.same(format!("{what} of {name} from {offset}"), |root| {
                    Ok(rustix::fs::seek(path(root)?, from)?)
                });
            }
        }
        view.same(format!("the end of {name}"), |root| {
            Ok(rustix::fs::seek(path(root)?, SeekFrom::End(0))?)
        });
    }
}

pub fn advice(view: &View) {
    let name = Path::new("sizes/1048593");
    let wanted = fs::read(view.reference.join(name)).unwrap();
    let file = File::open(view.mounted.join(name)).unwrap();
    for advice in [
        Advice::Sequential,
        Advice::Random,
        Advice::NoReuse,
        Advice::WillNeed,
        Advice::DontNeed,
        Advice::Normal,
    ] {
        rustix::fs::fadvise(&file, 4096, NonZero::new(500_000), advice).unwrap();
        let mut got = vec![0; wanted.len()];
        file.read_exact_at(&mut got, 0).unwrap();
        equal(name, &format!("{advice:?}"), &got, &wanted);
    }
    view.same("readahead of a folder", |root| {
        let folder = File::open(root.join("sizes"))?;
        Ok(rustix::fs::fadvise(&folder, 0, None, Advice::WillNeed)?)
    });
}

pub fn syncs(view: &View) {
    for name in ["sizes/100", "sizes"] {
        let synced = File::open(view.mounted.join(name)).unwrap().sync_all();
        match view.shown {
            Shown::ByErofs => assert_eq!(errno(&synced.unwrap_err()), EINVAL, "{name}"),
            Shown::ByFuse => synced.unwrap(),
        }
    }
}

fn open_direct(path: &Path) -> io::Result<File> {
    let direct = rustix::fs::OFlags::DIRECT.bits().cast_signed();
    File::options().read(true).custom_flags(direct).open(path)
}

pub fn direct_reads(view: &View) {
    for name in view.files().iter().filter(|name| !name.starts_with("many")) {
        let wanted = fs::read(view.reference.join(name)).unwrap();
        let opened = open_direct(&view.mounted.join(name));
        let file = match (view.shown, opened) {
            (Shown::ByErofs, Err(error)) if errno(&error) == EINVAL => continue,
            (Shown::ByErofs, other) => panic!("O_DIRECT gives {other:?}"),
            (Shown::ByFuse, opened) => opened.unwrap(),
        };
        let mut got = vec![0; wanted.len() + 10];
        let mut at = 0;
        while let length @ 1.. = file.read_at(&mut got[at..], at as u64).unwrap() {
            at += length;
        }
        equal(name, "O_DIRECT", &got[..at], &wanted);
    }
}
