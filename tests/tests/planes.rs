//! One suite for every way of giving a layer to the kernel: whatever a reader can do with a read-only
//! tree gives the same result as on ext4, mounted read-only too.
//!
//! A plane is one line at the end of this file. It is given a cold layer; each topic runs whether or
//! not another failed, and all differences are told at the end.
#![allow(clippy::unwrap_used)]

mod fsd_world;
mod plane_world;

use fsd::PlaneKind;
use plane_world::{
    Shown, View, content, files, folders, moving, overlay, refusals, rights, stacked,
};
use std::panic::{AssertUnwindSafe, catch_unwind};

type Topic = (&'static str, fn(&View));

const TOPICS: &[Topic] = &[
    ("bytes at odd offsets", content::odd_offsets),
    ("mapped files", content::mappings),
    ("running programs", moving::programs),
    ("sendfile, splice and copy_file_range", moving::kernel_copies),
    ("many readers at once", content::many_readers),
    ("whole files", content::whole_files),
    ("holes", content::holes),
    ("advice and readahead", content::advice),
    ("fsync", content::syncs),
    ("direct reads", content::direct_reads),
    ("attributes", files::attributes),
    ("inode numbers and hard links", files::numbers),
    ("extended attributes", files::xattrs),
    ("symbolic links", files::symlinks),
    ("special files", files::special),
    ("file system statistics", files::statistics),
    ("locks", files::locks),
    ("listings", folders::listings),
    ("seeks in listings", folders::seeks),
    ("paths", folders::paths),
    ("rights of other users", rights::other_users),
    ("access", rights::access),
    ("owners that are shifted", rights::shifted_owners),
    ("refused writes", refusals::writes),
    ("an overlay on top", overlay::changes),
    ("whiteouts and opaque folders", stacked::layers_hide_what_is_below),
];

fn run(kind: PlaneKind, shown: Shown) {
    let Some(view) = View::new(kind, shown) else { return };
    let mut failed = Vec::new();
    for (name, topic) in TOPICS {
        let begun = std::time::Instant::now();
        if catch_unwind(AssertUnwindSafe(|| topic(&view))).is_err() {
            failed.push(*name);
        }
        eprintln!("{kind}, {name}: {:?}", begun.elapsed());
    }
    assert!(failed.is_empty(), "{kind} is not like ext4: {}", failed.join("; "));
}

#[test]
fn erofs_fanotify_reads_like_ext4() {
    run(PlaneKind::ErofsFanotify, Shown::ByErofs);
}

#[test]
fn erofs_fuse_reads_like_ext4() {
    run(PlaneKind::ErofsFuse, Shown::ByErofs);
}

#[test]
fn erofs_fscache_reads_like_ext4() {
    run(PlaneKind::ErofsFscache, Shown::ByErofs);
}

#[test]
fn direct_reads_like_ext4() {
    run(PlaneKind::Direct, Shown::ByErofs);
}

#[test]
fn fuse_reads_like_ext4() {
    run(PlaneKind::Fuse, Shown::ByFuse);
}
