//! A real guest mounts a layer from two pmem devices that are exported files, and loads it lazily.
#![allow(clippy::unwrap_used)]

mod fsd_world;
mod vm_world;

use fsd_world::{LayerShape, World};
use vm_world::guest::{self, Guest, Plan};
use vm_world::{Exporter, sums};

const MODULES: [&str; 4] = ["nd_pmem", "virtio_pmem", "crc32c_generic", "erofs"];

/// How much the guest reads before the host looks.
const FIRST_FILES: usize = 3;

const SCRIPT: &str = r#"
i=0; while [ ! -b /dev/pmem1 ] && [ $i -lt 100 ]; do sleep 0.1; i=$((i+1)); done
for pair in "0 1" "1 0"; do set -- $pair
    mount -t erofs -o ro,dax=always,device=/dev/pmem$2 /dev/pmem$1 /mnt && break
done
cd /mnt
cached() { awk '/^Cached:/ { print "=> " $2 }' /proc/meminfo; }
ls | wc -l | sed 's/^/=> /'; cached; echo "=> mounted"
ls | head -n 3 | while read f; do sha256sum $f | sed 's/^/=> /'; done; echo "=> first"
read go
sha256sum * | sed 's/^/=> /'; echo "=> all"
cached; echo "=> end"
"#;

fn pmem(id: &str, path: &str, bytes: u64) -> [String; 4] {
    [
        "-object".to_owned(),
        format!("memory-backend-file,id={id},share=on,readonly=on,mem-path={path},size={bytes}"),
        "-device".to_owned(),
        format!("virtio-pmem-pci,memdev={id}"),
    ]
}

#[test]
fn a_guest_loads_a_layer_from_exported_pmem_lazily_and_keeps_no_copy() {
    if let Some(missing) = guest::missing() {
        println!(
            "SKIP a_guest_loads_a_layer_from_exported_pmem_lazily_and_keeps_no_copy: {missing}"
        );
        return;
    }
    let shape = LayerShape { files: 160, ..LayerShape::default() };
    let mut world = World::new(&shape).unwrap();
    world.start().unwrap();
    let exported = Exporter::new().unwrap().export(&world, "vm").unwrap();
    let mut qemu: Vec<String> =
        ["-M", "q35,nvdimm=off", "-m", "512,slots=4,maxmem=8G"].map(str::to_owned).to_vec();
    qemu.extend(pmem("metadata", &exported.metadata_path, exported.metadata_bytes));
    qemu.extend(pmem("data", &exported.data_path, exported.data_bytes));
    let plan = Plan { modules: &MODULES, qemu, script: SCRIPT };
    let expected = sums(&world).unwrap();

    let mut guest = Guest::boot(&plan, world.folder.path()).unwrap();
    let mounted = guest.read_until("mounted").unwrap();
    assert_eq!(mounted[0], world.layer.files.len().to_string());
    // The guest's kernel looks for labels and partitions, with readahead around each of its reads.
    let fetched = world.stats().unwrap().fetched_bytes;
    assert!(fetched * 4 < world.layer.data_bytes, "{fetched} bytes were fetched for a mount");
    assert_eq!(guest.read_until("first").unwrap(), expected[..FIRST_FILES]);
    let fetched = world.stats().unwrap().fetched_bytes;
    assert!(
        fetched > 0 && fetched * 2 < world.layer.data_bytes,
        "{fetched} of {} bytes were fetched for {FIRST_FILES} files",
        world.layer.data_bytes
    );
    guest.go_on().unwrap();
    assert_eq!(guest.read_until("all").unwrap(), expected);
    let end = guest.read_until("end").unwrap();
    let cached = |line: &String| line.parse::<u64>().unwrap() << 10;
    let growth = cached(&end[0]).saturating_sub(cached(&mounted[1]));
    assert!(growth < world.layer.data_bytes / 4, "the guest's cache grew by {growth} bytes");
    guest.wait().unwrap();
    assert_eq!(world.stats().unwrap().errors_answered, 0);
}
