//! The reader against the writer, and against mutated images. These tests say nothing about whether
//! the writer is right; the judges in the `tests` crate do.

use super::Reader;
use crate::erofs::writer::write;
use crate::tree::{Body, Extent, FileData, Inode, InodeIx, Kind, Rdev, Timestamp, Tree, Xattr};
use proptest::prelude::*;
use std::collections::BTreeMap;

const DATA_BLOCKS: u32 = 1000;

fn extents() -> impl Strategy<Value = FileData> {
    let runs = prop::collection::vec((0..4_u32, 1..5_u32, 0..DATA_BLOCKS - 5, any::<bool>()), 0..6);
    (runs, 0..9000_u64, 1..4096_u64).prop_map(|(runs, hole, tail)| {
        let (mut next, mut extents) = (0, Vec::<Extent>::new());
        for (gap, blocks, data_block, follows) in runs {
            let file_block = next + gap;
            let before = extents.last().map(|last| last.data_block + last.blocks);
            let data_block = match before {
                Some(before) if follows && before + blocks <= DATA_BLOCKS => before,
                _ => data_block,
            };
            extents.push(Extent { file_block, blocks, data_block });
            next = file_block + blocks;
        }
        let size = match (next, hole % 3) {
            (0, 0) => 0,
            (0, _) => hole,
            (_, 0) => u64::from(next) * 4096 + hole,
            _ => u64::from(next - 1) * 4096 + tail,
        };
        FileData { size, body: Body::Extents(extents) }
    })
}

/// Bytes that cost the test one number: a strategy for each byte would take most of its time.
fn bytes(longest: usize) -> impl Strategy<Value = Vec<u8>> {
    (0..=longest, any::<u64>()).prop_map(|(length, seed)| {
        let mut bytes = vec![0; length];
        let mut hasher = blake3::Hasher::new();
        hasher.update(&seed.to_le_bytes()).finalize_xof().fill(&mut bytes);
        bytes
    })
}

fn without_zeros(longest: usize) -> impl Strategy<Value = Vec<u8>> {
    bytes(longest - 1).prop_map(|mut bytes| {
        bytes.iter_mut().for_each(|byte| *byte = (*byte).max(1));
        bytes.push(b'x');
        bytes
    })
}

fn kind() -> impl Strategy<Value = Kind> {
    let rdev = (0..4096_u32, 0..1_u32 << 20).prop_map(|(major, minor)| Rdev { major, minor });
    let inlined = bytes(9000).prop_map(|bytes| {
        Kind::Regular(FileData { size: bytes.len() as u64, body: Body::Inline(bytes) })
    });
    prop_oneof![
        4 => Just(Kind::Directory(BTreeMap::new())),
        4 => extents().prop_map(Kind::Regular),
        2 => inlined,
        2 => without_zeros(4095).prop_map(Kind::Symlink),
        1 => rdev.clone().prop_map(Kind::CharDevice),
        1 => rdev.prop_map(Kind::BlockDevice),
        1 => Just(Kind::Fifo),
        1 => Just(Kind::Socket),
    ]
}

fn xattrs() -> impl Strategy<Value = Vec<Xattr>> {
    let name = prop_oneof![
        Just(b"security.selinux".to_vec()),
        Just(b"system.posix_acl_access".to_vec()),
        without_zeros(255).prop_map(|rest| [&b"user."[..], &rest].concat()),
    ];
    let value = prop_oneof![Just(vec![7; 40]), bytes(5000)];
    prop::collection::btree_map(name, value, 0..4)
        .prop_map(|map| map.into_iter().map(|(name, value)| Xattr { name, value }).collect())
}

fn inode() -> impl Strategy<Value = Inode> {
    let id = prop_oneof![0..3_u32, any::<u32>().prop_map(|id| id.min(u32::MAX - 1))];
    let time = prop_oneof![
        Just(Timestamp { secs: 1_000, nanos: 1 }),
        (any::<i64>(), 0..1_000_000_000_u32).prop_map(|(secs, nanos)| Timestamp { secs, nanos }),
    ];
    (0..0o10_000_u16, id.clone(), id, time, xattrs(), kind()).prop_map(
        |(mode, uid, gid, mtime, xattrs, kind)| Inode { mode, uid, gid, mtime, xattrs, kind },
    )
}

fn tree() -> impl Strategy<Value = Tree> {
    let name = without_zeros(255).prop_map(|mut name| {
        name.iter_mut().filter(|byte| **byte == b'/').for_each(|byte| *byte = b'-');
        if matches!(name.as_slice(), b"." | b"..") { b"...".to_vec() } else { name }
    });
    let nodes = prop::collection::vec((inode(), name, any::<prop::sample::Index>()), 0..60);
    (inode(), nodes, prop::collection::vec((any::<[prop::sample::Index; 2]>(), 0..99_u8), 0..5))
        .prop_map(|(mut root, nodes, links)| {
            root.kind = Kind::Directory(BTreeMap::new());
            let mut tree = Tree::new(root);
            let mut directories = vec![InodeIx::ROOT];
            let mut files = Vec::new();
            for (inode, name, parent) in nodes {
                let parent = *parent.get(&directories);
                if tree.entries(parent).unwrap().contains_key(&name) {
                    continue;
                }
                let is_directory = matches!(inode.kind, Kind::Directory(_));
                let index = tree.add(inode).unwrap();
                tree.link(parent, name, index).unwrap();
                if is_directory { directories.push(index) } else { files.push(index) }
            }
            for ([parent, file], name) in links {
                if !files.is_empty() {
                    let name = format!("a second name {name}").into_bytes();
                    tree.link(*parent.get(&directories), name, *file.get(&files)).unwrap();
                }
            }
            tree
        })
}

/// A tree in the form that the reader gives: numbered in its order, extents merged.
fn flattened(tree: &Tree) -> BTreeMap<Vec<u8>, (Inode, InodeIx)> {
    let mut paths = BTreeMap::new();
    let mut pending = vec![(Vec::new(), InodeIx::ROOT)];
    let mut first = BTreeMap::new();
    while let Some((path, index)) = pending.pop() {
        let mut inode = tree.get(index).unwrap().clone();
        for (name, child) in tree.entries(index).into_iter().flatten() {
            pending.push(([&path[..], b"/", name].concat(), *child));
        }
        match &mut inode.kind {
            Kind::Directory(names) => names.clear(),
            Kind::Regular(data) if data.size == 0 => data.body = Body::Inline(Vec::new()),
            Kind::Regular(data) => {
                if let Body::Extents(extents) = &mut data.body {
                    let mut merged: Vec<Extent> = Vec::new();
                    for extent in extents.drain(..) {
                        match merged.last_mut() {
                            Some(last)
                                if last.file_block + last.blocks == extent.file_block
                                    && last.data_block + last.blocks == extent.data_block =>
                            {
                                last.blocks += extent.blocks;
                            }
                            _ => merged.push(extent),
                        }
                    }
                    *extents = merged;
                }
            }
            _ => {}
        }
        inode.xattrs.sort();
        first.entry(index).or_insert_with(|| path.clone());
        paths.insert(path, (inode, index));
    }
    // What a path shares an inode with is told by the number of its first path in walking order.
    let mut numbers = BTreeMap::new();
    for (_, index) in paths.values_mut() {
        let next = InodeIx(numbers.len() as u32);
        *index = *numbers.entry(*index).or_insert(next);
    }
    paths
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    #[test]
    fn trees_round_trip(tree in tree()) {
        let image = write(&tree, DATA_BLOCKS).unwrap();
        let reader = Reader::parse(&image.bytes).unwrap();
        let read = reader.to_tree().unwrap();
        prop_assert_eq!(flattened(&read), flattened(&tree));
        prop_assert_eq!(reader.inodes(), read.inodes.len() as u64);
        prop_assert_eq!(reader.data_blocks(), DATA_BLOCKS);
        reader.check(DATA_BLOCKS).unwrap();
        prop_assert!(reader.check(DATA_BLOCKS + 1).is_err());
        // What was read gives the same image again.
        prop_assert!(write(&read, DATA_BLOCKS).unwrap().bytes == image.bytes);
        let links = tree.link_counts().unwrap();
        for (index, number) in image.inode_numbers.iter().enumerate() {
            let record = reader.inode(*number).unwrap();
            prop_assert_eq!(record.links, links[index]);
            for (name, child) in tree.entries(InodeIx(index as u32)).into_iter().flatten() {
                let found = reader.lookup(*number, name).unwrap();
                prop_assert_eq!(found, Some(image.inode_numbers[child.index()]));
                let mut other = name.clone();
                other.push(1);
                prop_assert_eq!(reader.lookup(*number, &other).unwrap(), None);
            }
        }
    }

    #[test]
    fn mutated_images_never_panic(
        tree in tree(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..20),
        cut in any::<prop::sample::Index>(),
    ) {
        let mut bytes = write(&tree, DATA_BLOCKS).unwrap().bytes;
        // Without the checksum, so that changes reach what is behind the superblock.
        bytes[1032] &= !1;
        for (at, byte) in changes {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        let _ = read_everything(&bytes);
        bytes.truncate(cut.index(bytes.len()));
        let _ = read_everything(&bytes);
    }

    #[test]
    fn other_bytes_never_panic(mut bytes in bytes(9000)) {
        bytes.resize(bytes.len().max(1300), 0);
        bytes[1024..1028].copy_from_slice(&[0xe2, 0xe1, 0xf5, 0xe0]);
        bytes[1028..1032].fill(0);
        bytes[1032..1040].copy_from_slice(&[0, 0, 0, 0, 12, 0, 40, 0]);
        bytes[1064..1072].fill(0);
        bytes[1104..1114].copy_from_slice(&[0xc, 0, 0, 0, 0, 0, 1, 0, 9, 0]);
        let _ = read_everything(&bytes);
    }
}

fn read_everything(bytes: &[u8]) -> crate::Result<()> {
    let reader = Reader::parse(bytes)?;
    // A sample: each may copy as much as the image has.
    let step = bytes.len() / 32 / 300 + 1;
    for number in (0..bytes.len() as u64 / 32).step_by(step) {
        let _ = reader.inode(number);
        let _ = reader.read_dir(number);
        let _ = reader.lookup(number, b"a");
    }
    let _ = reader.walk(&mut |_, _| Ok(()));
    let _ = reader.to_tree();
    let _ = reader.check(DATA_BLOCKS);
    Ok(())
}

fn plain(kind: Kind) -> Inode {
    let mtime = Timestamp::default();
    Inode { mode: 0o755, uid: 0, gid: 0, mtime, xattrs: Vec::new(), kind }
}

#[test]
fn walking_goes_through_a_tree_in_order() {
    let mut tree = Tree::new(plain(Kind::Directory(BTreeMap::new())));
    let directory = tree.add(plain(Kind::Directory(BTreeMap::new()))).unwrap();
    let file = tree.add(plain(Kind::Fifo)).unwrap();
    tree.link(InodeIx::ROOT, b"b".to_vec(), directory).unwrap();
    tree.link(InodeIx::ROOT, b"c".to_vec(), file).unwrap();
    tree.link(InodeIx::ROOT, b"a".to_vec(), file).unwrap();
    tree.link(directory, b"x".to_vec(), file).unwrap();
    let image = write(&tree, 0).unwrap();
    let mut paths = Vec::new();
    let reader = Reader::parse(&image.bytes).unwrap();
    reader
        .walk(&mut |path, record| {
            paths.push((String::from_utf8(path.to_vec()).unwrap(), record.links));
            Ok(())
        })
        .unwrap();
    let wanted = [("", 3), ("a", 3), ("b", 2), ("b/x", 3), ("c", 3)];
    assert_eq!(paths, wanted.map(|(path, links)| (path.to_owned(), links)));
}

#[test]
fn a_directory_in_itself_is_found() {
    let mut tree = Tree::new(plain(Kind::Directory(BTreeMap::new())));
    let directory = tree.add(plain(Kind::Directory(BTreeMap::new()))).unwrap();
    tree.link(InodeIx::ROOT, b"a".to_vec(), directory).unwrap();
    let image = write(&tree, 0).unwrap();
    let mut bytes = image.bytes;
    bytes[1032] &= !1;
    // The root's entries are `.`, `..`, `a`: let the third name the root.
    let third = image.inode_numbers[0] as usize * 32 + 32 + 24;
    assert_eq!(bytes[third..third + 8], image.inode_numbers[1].to_le_bytes());
    bytes[third..third + 8].copy_from_slice(&image.inode_numbers[0].to_le_bytes());
    let reader = Reader::parse(&bytes).unwrap();
    assert!(reader.to_tree().is_err());
    assert!(reader.check(0).is_err());
    assert!(reader.walk(&mut |_, _| Ok(())).is_err());
}
