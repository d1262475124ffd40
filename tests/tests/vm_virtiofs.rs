//! A real guest mounts a layer over virtiofs from fsd's vhost-user socket, and loads it lazily.
#![allow(clippy::unwrap_used)]

mod fsd_world;
mod vm_world;

use fsd_world::{LayerShape, World, wait_until};
use std::io::Write;
use std::os::unix::net::UnixStream;
use vm_world::guest::{self, Guest, Plan};
use vm_world::{Exporter, sums};

const MODULES: [&str; 2] = ["fuse", "virtiofs"];

/// How much the guest reads before the host looks.
const FIRST_FILES: usize = 3;

const SCRIPT: &str = r#"
mount -t virtiofs -o ro lamella /mnt && cd /mnt
ls | wc -l | sed 's/^/=> /'; echo "=> mounted"
ls | head -n 3 | while read f; do sha256sum $f | sed 's/^/=> /'; done; echo "=> first"
read go
sha256sum * | sed 's/^/=> /'; echo "=> all"
echo x 2>/dev/null > new || echo "=> refused"; stat -c '=> %s %a %h' file-0000; echo "=> end"
"#;

#[test]
fn a_guest_loads_a_layer_over_virtiofs_lazily() {
    if let Some(missing) = guest::missing() {
        println!("SKIP a_guest_loads_a_layer_over_virtiofs_lazily: {missing}");
        return;
    }
    let mut world = World::new(&LayerShape::default()).unwrap();
    world.start().unwrap();
    let exporter = Exporter::new().unwrap();
    let served = exporter.serve(&world, "vm").unwrap();
    assert_eq!(exporter.serve(&world, "vm").unwrap(), served, "idempotent");
    assert_eq!(served.tag, "lamella");
    let qemu = [
        "-M".to_owned(),
        "q35,memory-backend=ram".to_owned(),
        "-m".to_owned(),
        "512".to_owned(),
        "-object".to_owned(),
        "memory-backend-memfd,id=ram,size=512M,share=on".to_owned(),
        "-chardev".to_owned(),
        format!("socket,id=fs,path={}", served.socket_path),
        "-device".to_owned(),
        format!("vhost-user-fs-pci,chardev=fs,tag={}", served.tag),
    ];
    let plan = Plan { modules: &MODULES, qemu: qemu.to_vec(), script: SCRIPT };
    let expected = sums(&world).unwrap();

    let mut guest = Guest::boot(&plan, world.folder.path()).unwrap();
    assert_eq!(guest.read_until("mounted").unwrap(), [world.layer.files.len().to_string()]);
    assert_eq!(world.stats().unwrap().fetched_bytes, 0, "mounting and listing fetch no data");
    assert_eq!(guest.read_until("first").unwrap(), expected[..FIRST_FILES]);
    let fetched = world.stats().unwrap().fetched_bytes;
    assert!(
        fetched > 0 && fetched * 2 < world.layer.data_bytes,
        "{fetched} of {} bytes were fetched for {FIRST_FILES} files",
        world.layer.data_bytes
    );
    guest.go_on().unwrap();
    assert_eq!(guest.read_until("all").unwrap(), expected);
    let size = world.layer.files["file-0000"].len();
    assert_eq!(guest.read_until("end").unwrap(), ["refused".to_owned(), format!("{size} 644 1")]);
    guest.wait().unwrap();

    assert!(world.evict().is_err(), "served");
    wait_until("a server for the next guest", || UnixStream::connect(&served.socket_path).is_ok());
    exporter.end_serve(&world, "vm").unwrap();
    assert!(!std::path::Path::new(&served.socket_path).exists());
    wait_until("the end of the export", || world.evict().is_ok());
}

#[test]
fn who_speaks_nonsense_at_a_socket_ends_his_own_server_only() {
    let mut world = World::new(&LayerShape::default()).unwrap();
    world.start().unwrap();
    let exporter = Exporter::new().unwrap();
    let at = world.attach("sandbox").unwrap();
    let hostile = exporter.serve(&world, "hostile").unwrap();
    let other = exporter.serve(&world, "other").unwrap();
    assert_ne!(hostile.socket_path, other.socket_path, "one socket a machine");
    for round in 0..3u8 {
        wait_until("a server", || {
            UnixStream::connect(&hostile.socket_path)
                .is_ok_and(|mut stream| stream.write_all(&[round; 4096]).is_ok())
        });
    }
    assert!(world.drain(false).is_err(), "in use");
    world.compare(&at).unwrap();
    assert!(UnixStream::connect(&other.socket_path).is_ok());
    exporter.end_serve(&world, "hostile").unwrap();
    exporter.end_serve(&world, "other").unwrap();
    assert!(exporter.end_serve(&world, "other").is_err(), "it is not served any more");

    let again = exporter.serve(&world, "vm").unwrap();
    world.kill_fsd().unwrap();
    wait_until("the end of the server with fsd", || {
        UnixStream::connect(&again.socket_path).is_err()
    });
}
