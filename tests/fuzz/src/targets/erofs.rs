//! The metadata image.

use crate::Target;
use crate::seal::erofs_superblock;
use layer::erofs::{reader::Reader, writer};
use layer::tree::{Body, Extent, FileData, Inode, InodeIx, Kind, Rdev, Timestamp, Tree, Xattr};
use std::collections::BTreeMap;

/// An EROFS image, as a store or a hostile publisher may offer it.
pub const EROFS: Target = Target {
    name: "erofs",
    run: |data| {
        let mut image = data.to_vec();
        erofs_superblock(&mut image);
        let Ok(reader) = Reader::parse(&image) else { return };
        let blocks = reader.data_blocks();
        let sound = reader.check(blocks).is_ok();
        let Ok(tree) = reader.to_tree() else {
            assert!(!sound, "a sound image has a tree");
            return;
        };
        let Ok(written) = writer::write(&tree, blocks) else { return };
        let again = Reader::parse(&written.bytes).and_then(|reader| reader.to_tree());
        assert_eq!(again.ok().as_ref(), Some(&tree), "what is written reads back");
    },
    seeds: || {
        vec![
            small_image().0,
            writer::write(&Tree::new(directory(BTreeMap::new())), 0).expect("an empty tree").bytes,
        ]
    },
};

/// An image with one of everything, and the blocks of its data space.
pub(super) fn small_image() -> (Vec<u8>, u32) {
    let regular = |body, size| inode(Kind::Regular(FileData { size, body }));
    let extent = |file_block, blocks, data_block| Extent { file_block, blocks, data_block };
    let holes = vec![extent(0, 1, 0), extent(8, 1, 3)];
    let mut inodes = vec![
        inode(Kind::Directory(BTreeMap::new())),
        regular(Body::Inline(b"inlined".to_vec()), 7),
        regular(Body::Extents(vec![extent(0, 3, 1)]), 9000),
        regular(Body::Extents(holes), 9 * 4096),
        inode(Kind::Symlink(b"../target".to_vec())),
        inode(Kind::CharDevice(Rdev { major: 1, minor: 3 })),
        inode(Kind::Fifo),
        inode(Kind::Directory(BTreeMap::from([(b"again".to_vec(), InodeIx(2))]))),
    ];
    inodes[2].xattrs = vec![Xattr { name: b"user.a".to_vec(), value: vec![0, 255] }];
    inodes[4].mtime = Timestamp { secs: -5, nanos: 7 };
    let names: [&[u8]; 7] = [b"a", b"b", b"holes", b"link", b"null", b"pipe", b"sub"];
    let entries = names.iter().zip(1..).map(|(name, ix)| (name.to_vec(), InodeIx(ix))).collect();
    inodes[0].kind = Kind::Directory(entries);
    (writer::write(&Tree { inodes }, 4).expect("a small tree").bytes, 4)
}

fn directory(entries: BTreeMap<Vec<u8>, InodeIx>) -> Inode {
    inode(Kind::Directory(entries))
}

fn inode(kind: Kind) -> Inode {
    let mtime = Timestamp { secs: 1_700_000_000, nanos: 0 };
    Inode { mode: 0o755, uid: 0, gid: 70_000, mtime, xattrs: Vec::new(), kind }
}
