//! Exports: a layer as two files, read and mapped lazily, shared, protected, and never zeros; plain files of the
//! cache once it is complete.
#![allow(clippy::unwrap_used)]

mod fsd_world;
mod vm_world;

use fsd_world::{LayerShape, World, wait_until};
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};
use sys::mapping::FileMapping;
use vm_world::{Exporter, data_space};

/// What pmem devices of a guest want.
const ALIGNMENT: u64 = 2 << 20;
const SIGBUS: i32 = 7;

fn started() -> (World, Exporter) {
    let mut world = World::new(&LayerShape::default()).unwrap();
    world.start().unwrap();
    (world, Exporter::new().unwrap())
}

#[test]
fn a_mapped_export_loads_lazily_and_has_every_byte() {
    let (world, exporter) = started();
    let exported = exporter.export(&world, "vm-1").unwrap();
    let data = data_space(&world);
    assert_eq!(data.len() as u64, world.layer.data_bytes);
    assert_eq!(exported.data_bytes, world.layer.data_bytes.next_multiple_of(ALIGNMENT));

    let mapping = FileMapping::open(&File::open(&exported.data_path).unwrap()).unwrap();
    assert_eq!(mapping.bytes() as u64, exported.data_bytes);
    assert_eq!(world.stats().unwrap().fetched_bytes, 0, "mapping fetches nothing");
    let mut page = [0; 4096];
    let middle = data.len() / 2 / 4096 * 4096;
    mapping.copy(middle, &mut page).unwrap();
    assert_eq!(page[..], data[middle..middle + 4096]);
    let fetched = world.stats().unwrap().fetched_bytes;
    assert!(fetched > 0 && fetched * 4 < world.layer.data_bytes, "{fetched} bytes for one page");

    let mut whole = vec![0; mapping.bytes()];
    mapping.copy(0, &mut whole).unwrap();
    assert!(whole[..data.len()] == data, "{}", fsd_world::first_difference(&whole, &data));
    assert!(whole[data.len()..].iter().all(|byte| *byte == 0), "behind the data are zeros");

    let metadata = std::fs::read(&exported.metadata_path).unwrap();
    let cached = world.data.join("cache").join(world.layer.id.to_string()).join("meta.erofs");
    let image = std::fs::read(cached).unwrap();
    assert_eq!(metadata.len() as u64, exported.metadata_bytes);
    assert_eq!(exported.metadata_bytes, (image.len() as u64).next_multiple_of(ALIGNMENT));
    assert!(metadata[..image.len()] == image);
    assert!(metadata[image.len()..].iter().all(|byte| *byte == 0));
    assert_eq!(world.stats().unwrap().errors_answered, 0);
}

#[test]
fn an_export_is_shared_counted_and_not_evicted() {
    let (world, exporter) = started();
    let first = exporter.export(&world, "vm-1").unwrap();
    assert_eq!(exporter.export(&world, "vm-1").unwrap(), first, "idempotent");
    assert_eq!(exporter.export(&world, "vm-2").unwrap(), first, "one pair of files a layer");
    assert_eq!(world.stats().unwrap().layers[0].exported_to, ["vm-1", "vm-2"]);
    assert!(exporter.export(&world, "").is_err());
    assert!(world.evict().is_err() && world.drain(false).is_err(), "in use");

    let file = File::open(&first.data_path).unwrap();
    assert!(!exporter.withdraw(&world, "vm-1").unwrap());
    assert!(exporter.withdraw(&world, "vm-1").is_err(), "it holds nothing any more");
    assert!(!exporter.withdraw(&world, "vm-2").unwrap(), "a file is open");
    assert!(world.evict().is_err(), "a file is open");
    let mut page = [0; 4096];
    file.read_exact_at(&mut page, 8192).unwrap();
    assert_eq!(page[..], data_space(&world)[8192..12288], "served while it is open");
    drop(file);
    wait_until("the end of the export", || world.evict().is_ok());
    assert!(!std::path::Path::new(&first.data_path).exists());

    let again = exporter.export(&world, "vm-3").unwrap();
    assert!(std::fs::read(&again.data_path).unwrap().starts_with(&data_space(&world)));
    assert!(exporter.withdraw(&world, "vm-3").is_ok());
}

#[test]
fn a_mounted_layer_is_exported_too() {
    let (world, exporter) = started();
    let at = world.attach("sandbox").unwrap();
    let exported = exporter.export(&world, "vm").unwrap();
    let mapping = FileMapping::open(&File::open(&exported.data_path).unwrap()).unwrap();
    let mut half = vec![0; world.layer.data_bytes as usize / 2];
    mapping.copy(0, &mut half).unwrap();
    assert!(data_space(&world).starts_with(&half));
    world.compare(&at).unwrap();
    assert!(world.detach("sandbox").unwrap());
    let mut whole = vec![0; world.layer.data_bytes as usize];
    mapping.copy(0, &mut whole).unwrap();
    assert!(data_space(&world) == whole, "served on after the mount is gone");
}

#[test]
fn a_killed_daemon_is_an_error_for_readers_of_an_export_and_never_zeros() {
    let (mut world, exporter) = started();
    let exported = exporter.export(&world, "vm").unwrap();
    let data = data_space(&world);
    let file = File::open(&exported.data_path).unwrap();
    let mut reader = Command::new(env!("CARGO_BIN_EXE_mapped-reader"))
        .arg(&exported.data_path)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut output = BufReader::new(reader.stdout.take().unwrap());
    let mut line = String::new();
    output.read_line(&mut line).unwrap();
    assert_eq!(line, "mapped\n");
    let mut page = [0; 4096];
    file.read_exact_at(&mut page, 0).unwrap();
    world.kill_fsd().unwrap();

    let far = world.layer.data_bytes - 4096;
    let refused = file.read_exact_at(&mut page, far);
    assert!(refused.is_err(), "{:?}", page[..8].to_vec());
    reader.stdin.take().unwrap().write_all(b"go\n").unwrap();
    let status = reader.wait().unwrap();
    assert_eq!(status.signal(), Some(SIGBUS), "{status:?}");

    world.start().unwrap();
    assert_eq!(world.stats().unwrap().layers[0].exported_to, ["vm"]);
    assert!(file.read_exact_at(&mut page, far).is_err(), "what was open stays an error");
    drop(file);
    // Served again at the same paths, also before anybody asks.
    let again = exported;
    let mapping = FileMapping::open(&File::open(&again.data_path).unwrap()).unwrap();
    let mut whole = vec![0; data.len()];
    mapping.copy(0, &mut whole).unwrap();
    assert!(whole == data);
    drop(mapping);
    assert_eq!(exporter.export(&world, "vm").unwrap(), again);
    assert!(world.drain(false).is_err(), "in use");
    world.drain(true).unwrap();
    assert!(world.wait_end().unwrap().success());
    assert!(world.mounts().is_empty(), "{:?}", world.mounts());
}

#[test]
fn a_complete_layer_is_exported_as_plain_files_that_need_no_daemon() {
    let (mut world, exporter) = started();
    world.complete().unwrap();
    let exported = exporter.export(&world, "vm").unwrap();
    let (data, plain) = (data_space(&world), world.data.join("cache"));
    for (path, bytes) in [
        (&exported.data_path, exported.data_bytes),
        (&exported.metadata_path, exported.metadata_bytes),
    ] {
        assert!(std::path::Path::new(path).starts_with(&plain), "{path}");
        assert_eq!(std::fs::metadata(path).unwrap().len(), bytes);
        assert!(bytes > 0 && bytes.is_multiple_of(ALIGNMENT));
    }
    let image = world.data.join("cache").join(world.layer.id.to_string()).join("meta.erofs");
    let image = std::fs::read(image).unwrap();
    let metadata = std::fs::read(&exported.metadata_path).unwrap();
    assert!(metadata.starts_with(&image) && metadata[image.len()..].iter().all(|byte| *byte == 0));
    assert!(world.mounts().is_empty(), "no FUSE takes part");
    let mapping = FileMapping::open(&File::open(&exported.data_path).unwrap()).unwrap();
    let mapped_is_right = |mapping: &FileMapping| {
        let mut whole = vec![1; mapping.bytes()];
        mapping.copy(0, &mut whole).unwrap();
        whole[..data.len()] == data && whole[data.len()..].iter().all(|byte| *byte == 0)
    };
    world.kill_fsd().unwrap();
    assert!(mapped_is_right(&mapping), "nobody of ours is needed");
    world.start().unwrap();
    assert_eq!(world.stats().unwrap().layers[0].exported_to, ["vm"]);
    assert!(world.evict().is_err() && world.drain(false).is_err(), "in use");
    assert_eq!(exporter.export(&world, "vm").unwrap(), exported);
    // The longer file is the same layer for a mount.
    let at = world.attach("sandbox").unwrap();
    world.compare(&at).unwrap();
    assert!(world.detach("sandbox").unwrap());
    assert!(exporter.withdraw(&world, "vm").unwrap(), "nothing lingers");
    wait_until("the eviction", || world.evict().is_ok());
    assert!(!std::path::Path::new(&exported.data_path).exists());
    assert!(mapped_is_right(&mapping), "a mapping keeps its file");
    let at = world.attach("sandbox").unwrap();
    world.compare(&at).unwrap();
}
