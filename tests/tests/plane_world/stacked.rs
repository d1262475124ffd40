//! A diff layer on another: its whiteouts and opaque folders hide what is below.

use super::View;
use layer::LayerId;
use layer::chunk::ChunkTable;
use layer::layer_file::LayerFile;
use layer::location::Locations;
use layer::manifest::{LayerKind, Manifest};
use layer::tree::{
    Body, FileData, Inode, InodeIx, Kind, OPAQUE_XATTR, Rdev, Timestamp, Tree, Xattr,
};
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use sys::mount::{Attributes, Overlay, OverlayLower, Unmount};

fn inode(kind: Kind) -> Inode {
    let mtime = Timestamp { secs: 1_700_000_000, nanos: 0 };
    Inode { mode: 0o755, uid: 0, gid: 0, mtime, xattrs: Vec::new(), kind }
}

fn folder() -> Inode {
    inode(Kind::Directory(BTreeMap::new()))
}

fn file(text: &str) -> Inode {
    let body = Body::Inline(text.as_bytes().to_vec());
    inode(Kind::Regular(FileData { size: text.len() as u64, body }))
}

fn whiteout() -> Inode {
    inode(Kind::CharDevice(Rdev::WHITEOUT))
}

fn publish(view: &View, kind: LayerKind, paths: &[(&str, Inode)]) -> LayerId {
    let mut tree = Tree::new(folder());
    for (path, inode) in paths {
        let (above, name) = path.rsplit_once('/').unwrap_or(("", path));
        let above =
            if above.is_empty() { InodeIx::ROOT } else { tree.find(above.as_bytes()).unwrap() };
        let index = tree.add(inode.clone()).unwrap();
        tree.link(above, name.as_bytes().to_vec(), index).unwrap();
    }
    let chunk_table = ChunkTable::new(Vec::new()).unwrap();
    let metadata = layer::erofs::writer::write(&tree, 0).unwrap().bytes;
    let manifest = Manifest::describing(kind, &chunk_table, &metadata);
    let (id, _) = view
        .store
        .put_layer(&LayerFile { manifest, chunk_table, metadata }.encode().unwrap())
        .unwrap();
    let nowhere = Locations { packs: Vec::new(), placements: Vec::new() };
    view.store.put_locations(&id, &nowhere).unwrap();
    id
}

fn names(at: &Path) -> Vec<String> {
    let entries = fs::read_dir(at).unwrap();
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

pub fn layers_hide_what_is_below(view: &View) {
    let lower = [
        ("merged", folder()),
        ("merged/stays", file("below")),
        ("merged/goes", file("below")),
        ("replaced", folder()),
        ("replaced/old", file("below")),
        ("gone", file("below")),
    ];
    let opaque = Xattr { name: OPAQUE_XATTR.to_vec(), value: b"y".to_vec() };
    let upper = [
        ("merged", folder()),
        ("merged/goes", whiteout()),
        ("merged/comes", file("above")),
        ("replaced", Inode { xattrs: vec![opaque], ..folder() }),
        ("replaced/new", file("above")),
        ("gone", whiteout()),
    ];
    let lower = publish(view, LayerKind::Base, &lower);
    let upper = publish(view, LayerKind::Diff, &upper);
    let lower_at = view.attach("stacked", lower);
    let upper_at = view.attach("stacked", upper);

    let mark = fs::symlink_metadata(upper_at.join("merged/goes")).unwrap();
    assert!(mark.file_type().is_char_device() && mark.rdev() == 0);
    let value = sys::file::xattr::get(&upper_at.join("replaced"), OPAQUE_XATTR).unwrap();
    assert_eq!(value.as_deref(), Some(&b"y"[..]));

    let at = view.scratch.join("stacked");
    fs::create_dir(&at).unwrap();
    let lowers = [OverlayLower::Path(&upper_at), OverlayLower::Path(&lower_at)];
    let overlay = Overlay { name: "stacked", lowers: &lowers, upper: None, volatile: false };
    overlay.mount_detached(Attributes::LAYER).unwrap().attach(&at).unwrap();
    let seen = (names(&at), names(&at.join("merged")), names(&at.join("replaced")));
    let gone = fs::read(at.join("gone")).map_err(|error| error.kind());
    let stays = fs::read_to_string(at.join("merged/stays"));
    sys::mount::unmount(&at, Unmount::Now).unwrap();
    fs::remove_dir(&at).unwrap();
    assert_eq!(seen.0, ["merged", "replaced"]);
    assert_eq!(seen.1, ["comes", "stays"]);
    assert_eq!(seen.2, ["new"]);
    assert_eq!(gone.unwrap_err(), std::io::ErrorKind::NotFound);
    assert_eq!(stays.unwrap(), "below");
    for layer in [upper, lower] {
        assert!(view.world.detach_layer("stacked", layer).unwrap());
    }
}
