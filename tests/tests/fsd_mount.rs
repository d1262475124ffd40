//! Layers mounted lazily by the kernel: every byte, the counters, and what is left afterwards.

mod fsd_world;

use fsd_world::{LayerShape, World};
use std::time::{Duration, Instant};

#[test]
fn a_lazy_mount_has_every_byte_and_drops_its_mark_when_complete() {
    let mut world = World::new(&LayerShape::default()).unwrap();
    world.start().unwrap();
    let at = world.attach("test").unwrap();
    let before = world.stats().unwrap();
    assert_eq!(std::fs::read_dir(&at).unwrap().count(), world.layer.files.len());
    assert_eq!(world.stats().unwrap().events, before.events, "listing raises no event");
    assert!(before.layers[0].marked && !before.layers[0].complete);
    assert_eq!(before.keeper_pids.len(), 2);

    world.compare(&at).unwrap();
    let after = world.stats().unwrap();
    assert!(after.events > 0 && after.errors_answered == 0);
    assert!(after.layers[0].asked_bytes <= after.layers[0].data_bytes);

    world.complete().unwrap();
    let deadline = Instant::now() + Duration::from_secs(20);
    while world.stats().unwrap().layers[0].marked {
        assert!(Instant::now() < deadline, "the mark stays");
        std::thread::sleep(Duration::from_millis(20));
    }
    let complete = world.stats().unwrap();
    assert!(complete.layers[0].complete);
    std::fs::write("/proc/sys/vm/drop_caches", "3").unwrap();
    world.compare(&at).unwrap();
    assert_eq!(world.stats().unwrap().events, complete.events, "a complete layer raises none");

    assert!(world.detach("test").unwrap());
    assert!(world.mounts().is_empty());
    world.drain(false).unwrap();
    assert!(world.wait_end().unwrap().success());
    assert!(world.keeper_pid(0).is_none() && world.keeper_pid(1).is_none());
}
