//! A build that is laid out by an access profile: other places, the same tree; what was touched lies first
//! and together; and equal input gives an equal layer.

#![allow(clippy::unwrap_used)]

mod image_daemon;

use builder::{BuildOptions, Layout, Silent, Source, build};
use image_daemon::ImageDaemon;
use layer::LayerId;
use layer::chunk::BLOCK_BYTES;
use layer::layer_file::LayerFile;
use layer::manifest::LayerKind;
use layer::profile::{Profile, Run, Touch};
use std::fs;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

struct World(ImageDaemon);

impl World {
    fn new() -> Self {
        Self(ImageDaemon::new(|_| String::new()))
    }

    fn build(&self, root: &Path, layout: Option<Layout>, threads: usize) -> LayerFile {
        let mut options = BuildOptions::new(LayerKind::Base);
        (options.layout, options.threads) = (layout, threads);
        let source = Source::parse(root.to_str().unwrap()).unwrap();
        let id = build(&source, &self.0.publisher(), &options, &Silent).unwrap().layer_id();
        self.0.store.read_layer(&id).unwrap()
    }

    /// The kernel's view of a layer: every file with its bytes.
    fn view(&self, file: &LayerFile) -> Vec<(PathBuf, Vec<u8>)> {
        let (metadata, data) = (self.0.dir.path().join("meta"), self.0.dir.path().join("data"));
        fs::write(&metadata, &file.metadata).unwrap();
        fs::write(&data, self.data_space(file)).unwrap();
        let erofs = sys::mount::Erofs { metadata: &metadata, device: Some(&data) };
        let fd = erofs.mount_detached(sys::mount::Attributes::default()).unwrap().into_fd();
        let root = PathBuf::from(format!("/proc/self/fd/{}/.", fd.as_raw_fd()));
        tree(&root)
    }

    fn data_space(&self, file: &LayerFile) -> Vec<u8> {
        let locations = self.0.store.read_locations(&file.id()).unwrap().unwrap();
        let mut space = Vec::new();
        for (index, chunk) in file.chunk_table.chunks().iter().enumerate() {
            let Some((pack, place)) = locations.get(index) else {
                space.resize(space.len() + chunk.plain_bytes() as usize, 0);
                continue;
            };
            let mut payload = vec![0; place.stored_bytes as usize];
            self.0.store.read_pack(&pack, place.offset, &mut payload).unwrap();
            let plain = chunk.plain_bytes();
            space.extend(
                store::codec::decode_chunk(&payload, place.codec, plain, &chunk.digest).unwrap(),
            );
        }
        space
    }
}

fn tree(root: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let (mut found, mut open) = (Vec::new(), vec![root.to_path_buf()]);
    while let Some(folder) = open.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            match path.is_dir() {
                true => open.push(path),
                false => {
                    let name = path.strip_prefix(root).unwrap().to_path_buf();
                    found.push((name, fs::read(&path).unwrap()));
                }
            }
        }
    }
    found.sort();
    found
}

fn plant(root: &Path) {
    let content = |at: usize, bytes: usize| {
        let mut state = at as u64 + 1;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) as u8
        };
        (0..bytes).map(|_| next()).collect::<Vec<u8>>()
    };
    for at in 0..400 {
        let folder = root.join(format!("folder{}", at % 7));
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join(format!("small{at}")), content(at, 500 + at * 40)).unwrap();
    }
    fs::write(root.join("folder3/large"), content(1000, 3 << 20)).unwrap();
    fs::write(root.join("folder3/same"), content(1000, 3 << 20)).unwrap();
    fs::hard_link(root.join("folder1/small1"), root.join("folder5/link")).unwrap();
}

/// What somebody touches: some small files far apart, and the end of the large one.
const TOUCHED: [&str; 5] =
    ["folder6/small398", "folder0/small7", "folder3/large", "folder5/small390", "folder2/small2"];

fn blocks_of(file: &LayerFile, path: &str) -> (u32, u32) {
    let tree = layer::erofs::reader::Reader::parse(&file.metadata).unwrap().to_tree().unwrap();
    let inode = tree.get(tree.find(path.as_bytes()).unwrap()).unwrap();
    let layer::tree::Kind::Regular(data) = &inode.kind else { panic!("{path} is no file") };
    let layer::tree::Body::Extents(extents) = &data.body else { panic!("{path} is inlined") };
    (extents[0].data_block, extents[0].blocks)
}

fn profile_of(file: &LayerFile) -> Profile {
    let touch = |(at, path): (usize, &&str)| {
        let (start, blocks) = blocks_of(file, path);
        let skipped = if *path == "folder3/large" { blocks - 40 } else { 0 };
        let (start_block, blocks) = (start + skipped, blocks - skipped);
        Touch { layer: 0, start_block, blocks, at_ms: at as u32 }
    };
    let touches = TOUCHED.iter().enumerate().map(touch).collect();
    Profile::new(vec![Run::new(1, vec![file.id()], touches).unwrap()])
}

#[test]
fn a_layout_moves_bytes_and_changes_none() {
    let world = World::new();
    let root = world.0.dir.path().join("root");
    plant(&root);
    let plain = world.build(&root, None, 2);
    let profile = profile_of(&plain);
    let read = |id: &LayerId| world.0.store.read_layer(id).map(Some);
    let layout = Layout::new(&profile, read).unwrap();
    let laid_out = world.build(&root, Some(layout.clone()), 1);
    assert_ne!(laid_out.id(), plain.id());
    assert_eq!(world.build(&root, Some(layout.clone()), 3).id(), laid_out.id(), "deterministic");
    let annotation = laid_out.manifest.annotations.get(builder::LAYOUT_ANNOTATION).unwrap();
    assert_eq!(*annotation, profile.digest().to_string());

    // The data space begins with what was touched: the large file, and a bundle of the small ones in
    // the order of first touch.
    let starts: Vec<u32> = TOUCHED.iter().map(|path| blocks_of(&laid_out, path).0).collect();
    let (large, small): (Vec<u32>, Vec<u32>) = starts.iter().partition(|start| **start == 0);
    assert!(large.len() == 1 && small[0] == 768 && small.is_sorted(), "{starts:?}");
    assert!(small[3] < 768 + 32, "{starts:?}");
    assert!(blocks_of(&plain, TOUCHED[0]).0 > 0);
    assert_eq!(world.view(&laid_out), tree(&root));

    // On a store that holds nothing yet, the touched chunks lie in a pack without a gap.
    let fresh = World::new();
    let laid_out = fresh.build(&root, Some(layout), 3);
    let locations = fresh.0.store.read_locations(&laid_out.id()).unwrap().unwrap();
    let mut places = Vec::new();
    for path in TOUCHED {
        let (start, blocks) = blocks_of(&laid_out, path);
        let skipped = if path == "folder3/large" { blocks - 40 } else { 0 };
        let block = u64::from(BLOCK_BYTES);
        let (from, bytes) =
            (u64::from(start + skipped) * block, u64::from(blocks - skipped) * block);
        for chunk in laid_out.chunk_table.covering(from, bytes) {
            let (pack, place) = locations.get(chunk).unwrap();
            places.push((pack, place.offset, u64::from(place.stored_bytes)));
        }
    }
    places.sort();
    places.dedup();
    let adjoin =
        |pair: &[_]| matches!(pair, [(p, at, len), (q, next, _)] if p == q && at + len == *next);
    assert!(places.len() > 3 && places.windows(2).all(adjoin), "{places:?}");
    assert_eq!(fresh.view(&laid_out), tree(&root));
}

#[test]
fn a_profile_of_layers_that_are_gone_decides_nothing() {
    let touch = Touch { layer: 0, start_block: 0, blocks: 9, at_ms: 0 };
    let run = Run::new(1, vec![LayerId([3; 32])], vec![touch]).unwrap();
    let layout = Layout::new(&Profile::new(vec![run]), |_| Ok(None)).unwrap();
    assert!(layout.is_empty());
}
