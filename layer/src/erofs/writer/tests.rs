//! Checks of the writer that need no kernel; the judges are in the `tests` crate.

use super::write;
use crate::ErrorKind;
use crate::tree::{Body, Extent, FileData, Inode, InodeIx, Kind, Rdev, Timestamp, Tree, Xattr};
use std::collections::BTreeMap;

fn inode(kind: Kind) -> Inode {
    let mtime = Timestamp { secs: 1_700_000_000, nanos: 5 };
    Inode { mode: 0o644, uid: 0, gid: 0, mtime, xattrs: Vec::new(), kind }
}

fn tree() -> Tree {
    Tree::new(inode(Kind::Directory(BTreeMap::new())))
}

fn with(tree: &mut Tree, name: &str, inode: Inode) {
    let index = tree.add(inode).unwrap();
    tree.link(InodeIx::ROOT, name.into(), index).unwrap();
}

fn file(size: u64, extents: Vec<Extent>) -> Kind {
    Kind::Regular(FileData { size, body: Body::Extents(extents) })
}

#[test]
fn what_erofs_cannot_hold_is_refused_with_its_path() {
    let xattr = |name: &str, bytes: usize| {
        let mut inode = inode(Kind::Fifo);
        inode.xattrs = vec![Xattr { name: name.into(), value: vec![1; bytes] }];
        inode
    };
    let many = |count: usize, bytes: usize| {
        let mut inode = inode(Kind::Fifo);
        let xattr = |n: usize| Xattr { name: format!("user.{n}").into(), value: vec![1; bytes] };
        inode.xattrs = (0..count).map(xattr).collect();
        inode
    };
    let owner = |uid: u32| Inode { uid, ..inode(Kind::Fifo) };
    let bad_time = Timestamp { secs: 0, nanos: 1_000_000_000 };
    let cases = [
        ("value", xattr("user.a", 65_536)),
        ("namespace", xattr("system.nfs4_acl", 1)),
        ("lustre", xattr("lustre.lov", 1)),
        ("empty", xattr("user.", 1)),
        ("long", xattr(&format!("user.{}", "n".repeat(256)), 1)),
        ("many", many(300, 60_000)),
        ("nobody", owner(u32::MAX)),
        ("time", Inode { mtime: bad_time, ..inode(Kind::Fifo) }),
        ("mode", Inode { mode: 0o10_000, ..inode(Kind::Fifo) }),
        ("major", inode(Kind::CharDevice(Rdev { major: 4096, minor: 0 }))),
        ("target", inode(Kind::Symlink(vec![b'a'; 4096]))),
        ("no target", inode(Kind::Symlink(Vec::new()))),
        ("behind", inode(file(4096, vec![Extent { file_block: 0, blocks: 1, data_block: 10 }]))),
        ("fine", inode(file(1 << 40, vec![Extent { file_block: 1, blocks: 1, data_block: 0 }]))),
        ("inline", inode(Kind::Regular(FileData { size: 2, body: Body::Inline(vec![1]) }))),
    ];
    for (name, inode) in cases {
        let mut tree = tree();
        with(&mut tree, name, inode);
        let error = write(&tree, 10).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{name}");
        assert!(error.to_string().starts_with(&format!("/{name}: ")), "{name}: {error}");
    }
    for name in ["", ".", "..", "a/b", "a\0b", &"n".repeat(256)] {
        let mut tree = tree();
        with(&mut tree, name, inode(Kind::Fifo));
        assert_eq!(write(&tree, 0).unwrap_err().kind(), ErrorKind::Invalid, "{name}");
    }
}

#[test]
fn a_data_space_that_ends_above_the_last_address_is_refused() {
    assert!(write(&tree(), u32::MAX - 1).is_ok());
    assert_eq!(write(&tree(), u32::MAX).unwrap_err().kind(), ErrorKind::Invalid);
}

#[test]
fn inodes_that_nothing_names_are_not_written() {
    let mut tree = tree();
    with(&mut tree, "a", inode(Kind::Fifo));
    let image = write(&tree, 0).unwrap();
    tree.add(inode(Kind::Fifo)).unwrap();
    let with_lost = write(&tree, 0).unwrap();
    assert_eq!(with_lost.bytes, image.bytes);
    assert_eq!(with_lost.inode_numbers, [&image.inode_numbers[..], &[0]].concat());
}

#[test]
fn the_order_of_xattrs_and_of_extents_borders_means_nothing() {
    let image = |swap: bool, cut: bool| {
        let mut tree = tree();
        let whole = vec![Extent { file_block: 0, blocks: 2, data_block: 3 }];
        let parts = vec![
            Extent { file_block: 0, blocks: 1, data_block: 3 },
            Extent { file_block: 1, blocks: 1, data_block: 4 },
        ];
        let mut inode = inode(file(8000, if cut { parts } else { whole }));
        inode.xattrs = ["user.b", "user.a", "trusted.x"]
            .map(|name| Xattr { name: name.into(), value: name.into() })
            .into();
        if swap {
            inode.xattrs.swap(0, 2);
        }
        with(&mut tree, "f", inode);
        write(&tree, 9).unwrap().bytes
    };
    assert_eq!(image(false, false), image(true, true));
}

#[test]
fn metadata_is_dense() {
    let mut tree = tree();
    for index in 0..4000 {
        let mut inode =
            inode(file(4096, vec![Extent { file_block: 0, blocks: 1, data_block: index }]));
        inode.mtime.secs += i64::from(index % 2);
        with(&mut tree, &format!("{index:08}"), inode);
    }
    // 2000 compact inodes, 2000 extended ones, and 20 bytes for each name.
    let least = 2000 * 32 + 2000 * 64 + 4000 * 20;
    let bytes = write(&tree, 4000).unwrap().bytes.len();
    assert!(bytes < least + 3 * 4096, "{bytes} bytes where {least} are needed");
}
